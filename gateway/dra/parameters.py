"""The parameters that a claim or its DeviceClass has for our driver. Decoded strictly; unsupported ones are refused. Pure.

Kinds, members and precedence are those of the vendors' drivers: api/nvidia.com/resource/v1beta1 and
cmd/gpu-kubelet-plugin/device_state.go of dra-driver-nvidia-gpu 0.5, and api/amd.com/resource/gpu/v1alpha1 of k8s-gpu-dra-driver
1.0.
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
    """Parameters of a claim or its class. ``requests`` are those of the claim's requests that they are for (none: all)."""

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


class _Empty(Struct, forbid_unknown_fields=True, rename="camel"):
    """A kind of parameters without members; also the base of the other kinds."""

    api_version: str
    kind: str

    @property
    def wants(self) -> str:
        """What the parameters ask for that the gateway doesn't support, and what to do instead; '' if there is nothing."""
        return ""

    @property
    def interval(self) -> str:
        """The time-slice interval that they ask for; '' for the default."""
        return ""


class _Mig(_Empty, forbid_unknown_fields=True, rename="camel"):
    sharing: _MigSharing | None = None

    @property
    def wants(self) -> str:
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


_Kinds: TypeAlias = Mapping[str, tuple[type[_Empty], Collection[str]]]
_NVIDIAS: Final = "resource.nvidia.com/v1beta1", {"GpuConfig": (_Gpu, {"gpu"}), "MigDeviceConfig": (_Mig, {"mig"})}
_AMDS: Final = "gpu.resource.amd.com/v1alpha1", {"GpuConfig": (_Empty, {"amdgpu", "amdgpu-partition"})}
"""The apiVersion, and for each kind how it is decoded and for which ``type`` of devices it is."""
_Parameters: TypeAlias = tuple[Collection[str], _Empty, Collection[str]]
"""Decoded parameters: for which requests (none: all), their content, and for which types of devices."""


class _Head(Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""


def intervals(
    driver: str, configs: Iterable[Config], devices: Iterable[tuple[Collection[str], str, str]]
) -> dict[str, str] | Refused:
    """Return the time-slice intervals that a claim's parameters ask for, by device, without defaults; or why they can't be used.

    Parameters fit a device if they name its request, or if they name no request and fit its type. The last ones that fit are in
    force; the claim's come after those of its classes.

    Args:
        driver: our driver.
        configs: the parameters for it.
        devices: the allocated devices: the names of its request, its own name, its ``type``.
    """
    version, kinds = _AMDS if driver == AMD else _NVIDIAS
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
        if content is not None and content.wants:
            return Refused(content.wants)
        if content is not None and content.interval:
            found[device] = content.interval
    return found


def _for_device(
    known: Sequence[_Parameters], names: Collection[str], device: str, kind: str
) -> _Empty | Refused | None:
    """Return the parameters that are in force for a device; None if there are none."""
    for requests, content, types in reversed(known):
        named = [name for name in requests if name in names]
        if named and kind not in types:
            return Refused(
                f"{content.kind} is for type {' or '.join(sorted(types))}, and request {named[0]} got {device} of type {kind}. Correct its requests"
            )
        if named or (not requests and kind in types):
            return content
    return None


def _decoded(opaque: Opaque | None, version: str, kinds: _Kinds) -> _Empty | Refused:
    """Decode parameters, or return why they can't be used."""
    given = None if opaque is None else opaque.parameters
    try:
        head = msgspec.convert(given, _Head)
        if head.api_version == version and head.kind in kinds:
            return msgspec.convert(given, kinds[head.kind][0])
    except msgspec.ValidationError as error:
        return Refused(f"{printable(str(error)[:_ERROR_CHARS])}. Correct it")
    if (head.api_version, head.kind) == (version, "VfioDeviceConfig"):
        return Refused(
            "VfioDeviceConfig is not supported, because the gateway gives no GPU to a virtual machine. Use the vendor's DRA driver "
            "on another node"
        )
    named = " ".join(repr(printable(one[:_NAME_CHARS])) for one in (head.api_version, head.kind))
    return Refused(f"apiVersion and kind {named} are unknown. Use {version} {' or '.join(kinds)}")
