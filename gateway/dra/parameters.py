"""The parameters that a claim or its DeviceClass has for our driver. Decoded strictly; unsupported ones are refused. Pure.

Kinds, fields and precedence follow the vendors' drivers:

- dra-driver-nvidia-gpu 0.5: api/nvidia.com/resource/v1beta1, and cmd/gpu-kubelet-plugin/device_state.go
- k8s-gpu-dra-driver 1.0: api/amd.com/resource/gpu/v1alpha1
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from devices.claims import Refused
from gateway.dra.offer import AMD
from gateway.wires.log import printable

_NAME_CHARS: Final = 80
_ERROR_CHARS: Final = 300


class Opaque(Struct):
    """A driver's parameters, as a user wrote them."""

    driver: str = ""
    parameters: Any = None


class Config(Struct):
    """Parameters of a claim or its class. ``requests``: the claim's requests that they apply to (none: all)."""

    opaque: Opaque | None = None
    source: str = ""
    requests: list[str] | None = None


class _TimeSlicing(Struct, forbid_unknown_fields=True):
    interval: Literal["Default", "Short", "Medium", "Long"] | None = None


class _MigSharing(Struct, forbid_unknown_fields=True, rename="camel"):
    strategy: Literal["TimeSlicing", "MPS"]
    mps_config: Any = None


class _GpuSharing(_MigSharing, forbid_unknown_fields=True, rename="camel"):
    time_slicing_config: _TimeSlicing | None = None


class _BaseConfig(Struct, forbid_unknown_fields=True, rename="camel"):
    """A kind of parameters without own fields, and the base of the other kinds."""

    api_version: str
    kind: str

    @property
    def unsupported(self) -> str:
        """The error if the parameters request an unsupported feature, with what to do instead; '' if they don't."""
        return ""

    @property
    def interval(self) -> str:
        """The requested time-slice interval; '' for the default."""
        return ""


class _Mig(_BaseConfig, forbid_unknown_fields=True, rename="camel"):
    sharing: _MigSharing | None = None

    @property
    def unsupported(self) -> str:
        if self.sharing is not None and (self.sharing.strategy == "MPS" or self.sharing.mps_config is not None):
            return (
                f"{self.kind} asks for MPS, which the gateway does not run. Remove sharing from it. To share a GPU, "
                "configure time-slicing in the gateway"
            )
        return ""


class _Gpu(_Mig, forbid_unknown_fields=True, rename="camel"):
    sharing: _GpuSharing | None = None

    @property
    def interval(self) -> str:
        slicing = None if self.sharing is None else self.sharing.time_slicing_config
        return "" if slicing is None or slicing.interval in {None, "Default"} else str(slicing.interval)


_Kinds: TypeAlias = Mapping[str, tuple[type[_BaseConfig], Collection[str]]]
_NVIDIA_KINDS: Final = "resource.nvidia.com/v1beta1", {"GpuConfig": (_Gpu, {"gpu"}), "MigDeviceConfig": (_Mig, {"mig"})}
_AMD_KINDS: Final = "gpu.resource.amd.com/v1alpha1", {"GpuConfig": (_BaseConfig, {"amdgpu", "amdgpu-partition"})}
"""The apiVersion; for each kind, its decoder and the ``type`` of the devices that it applies to."""
_Parameters: TypeAlias = tuple[Collection[str], _BaseConfig, Collection[str]]
"""Decoded parameters: the requests that they apply to (none: all), their content, and the types of devices that they apply to."""


class _Head(Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""


def intervals(
    driver: str, configs: Iterable[Config], devices: Iterable[tuple[Collection[str], str, str]]
) -> dict[str, str] | Refused:
    """Return the requested time-slice interval of each device (defaults left out), or a refusal if parameters can't be used.

    Parameters match a device if they name its request, or if they name no request and apply to its type. The last match is in
    force. A claim's parameters come after those of its classes.

    Args:
        driver: our driver.
        configs: the parameters for our driver.
        devices: for each allocated device, the names of its request, its name and its ``type``.
    """
    version, kinds = _AMD_KINDS if driver == AMD else _NVIDIA_KINDS
    known: list[_Parameters] = []
    for one in sorted(configs, key=lambda one: one.source != "FromClass"):
        decoded = _decoded(one.opaque, version, kinds)
        if isinstance(decoded, Refused):
            return decoded
        known.append((one.requests or (), decoded, kinds[decoded.kind][1]))
    found: dict[str, str] = {}
    for names, device, kind in devices:
        content = _for_device(known, names, device, kind)
        if isinstance(content, Refused):
            return content
        if content is not None and content.unsupported:
            return Refused(content.unsupported)
        if content is not None and content.interval:
            found[device] = content.interval
    return found


def _for_device(
    known: Sequence[_Parameters], names: Collection[str], device: str, kind: str
) -> _BaseConfig | Refused | None:
    """Return the parameters that are in force for a device; None if there are none."""
    for requests, content, types in reversed(known):
        named = [name for name in requests if name in names]
        if named and kind not in types:
            return Refused(
                f"{content.kind} is for type {' or '.join(sorted(types))}, and request {named[0]} got {device} of type {kind}. Correct the requests of the config"
            )
        if named or (not requests and kind in types):
            return content
    return None


def _decoded(opaque: Opaque | None, version: str, kinds: _Kinds) -> _BaseConfig | Refused:
    """Decode parameters, or return why they can't be used."""
    given = None if opaque is None else opaque.parameters
    try:
        head = msgspec.convert(given, _Head)
        if head.api_version == version and head.kind in kinds:
            return msgspec.convert(given, kinds[head.kind][0])
    except msgspec.ValidationError as error:
        return Refused(f"{printable(str(error)[:_ERROR_CHARS])}. Correct the parameters")
    if (head.api_version, head.kind) == (version, "VfioDeviceConfig"):
        return Refused(
            "VfioDeviceConfig is not supported, because the gateway gives no GPU to a virtual machine. Use the vendor's DRA driver "
            "on another node"
        )
    named = " ".join(repr(printable(one[:_NAME_CHARS])) for one in (head.api_version, head.kind))
    return Refused(f"apiVersion and kind {named} are unknown. Use {version} {' or '.join(kinds)}")
