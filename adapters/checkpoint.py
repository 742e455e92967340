"""Read ``kubelet_internal_checkpoint``, the kubelet's record of its pods' devices, in every format from 1.8 to today.

The gateway needs only the devices of each container, and the registered resources. The checksum isn't verified: it is a hash
over a dump with the kubelet's Go types, and a file that the kubelet rejects is still useful here. Types and sizes are checked,
because the file comes from outside. Fields that aren't needed (the plugins' answers) aren't decoded.

The formats, by kubelet version (from the source of 1.8 to 1.37, checked on real kubelets):

- 1.8: ``Entries``, one for each device
- 1.9, 1.10: ``PodDeviceEntries`` and ``RegisteredDevices`` at the top level
- 1.11 to 1.19: the same two inside ``Data``, next to a ``Checksum``
- 1.20 and later: ``DeviceIDs`` is a map from NUMA node to list
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from adapters.dialect import MalformedError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of the file in bytes. 10,000 devices with the answers of 500 containers are about 4 MiB."""
_MAX_STRINGS = 500_000
"""Maximum of strings in the file, because each takes 50 more bytes in memory. 10,000 devices, each on 8 NUMA nodes, need 200,000."""

_Name = Annotated[str, msgspec.Meta(max_length=253)]
"""The name of a pod or container. Kubernetes allows 253 characters."""


class Held(msgspec.Struct, frozen=True):
    """The devices of one resource that one container holds."""

    pod_uid: str
    container: str
    resource: str
    device_ids: frozenset[str]


class Checkpoint(msgspec.Struct, frozen=True):
    """The content of a checkpoint. It may be old: a kubelet forgets ended pods late, and writes the file even later."""

    held: tuple[Held, ...] = ()
    registered: Mapping[str, frozenset[str]] = msgspec.field(default_factory=dict)
    """Device IDs that were healthy when it was written, by resource name (1.9 and later)."""


class _Device(msgspec.Struct):
    """1.8: one device of a container."""

    pod_uid: _Name = msgspec.field(name="PodUID")
    container: _Name = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    device_id: str = msgspec.field(name="DeviceID")


class _Entry(msgspec.Struct):
    """1.9 and later: the devices of a container, of one resource."""

    pod_uid: _Name = msgspec.field(name="PodUID")
    container: _Name = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    device_ids: list[str] | dict[str, list[str] | None] | None = msgspec.field(name="DeviceIDs")


class _Data(msgspec.Struct):
    """The whole file in 1.9 and 1.10; its field ``Data`` in later versions."""

    entries: list[_Entry] | msgspec.UnsetType | None = msgspec.field(name="PodDeviceEntries", default=msgspec.UNSET)
    registered: dict[str, list[str] | None] | None = msgspec.field(name="RegisteredDevices", default=None)


class _File(_Data):
    """A checkpoint of any format: its keys show the format."""

    devices: list[_Device] | msgspec.UnsetType | None = msgspec.field(name="Entries", default=msgspec.UNSET)
    data: _Data | msgspec.UnsetType = msgspec.field(name="Data", default=msgspec.UNSET)


def read(content: bytes) -> Checkpoint:
    """Decode a checkpoint of any format; unknown fields are ignored.

    Raises:
        MalformedError: the file isn't a checkpoint, or is too large. Kubelet 1.9 may still be writing it.
    """
    if len(content) > MAX_BYTES or content.count(b'"') > 2 * _MAX_STRINGS:
        raise MalformedError(
            f"the checkpoint is too large ({len(content)} bytes). Allowed: {MAX_BYTES} bytes and "
            f"{_MAX_STRINGS} strings. Is this file the kubelet's?"
        )
    try:
        whole = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedError(f"not a kubelet's checkpoint: {error}") from error
    if whole.devices is not msgspec.UNSET:
        return Checkpoint(_by_container(whole.devices or []))
    data = whole if whole.data is msgspec.UNSET else whole.data
    if data.entries is msgspec.UNSET:
        raise MalformedError("not a kubelet's checkpoint: it has none of Entries, PodDeviceEntries, Data")
    held = tuple(
        Held(entry.pod_uid, entry.container, entry.resource, _device_ids(entry.device_ids))
        for entry in data.entries or ()
    )
    return Checkpoint(held, {resource: frozenset(ids or ()) for resource, ids in (data.registered or {}).items()})


def _by_container(devices: list[_Device]) -> tuple[Held, ...]:
    held: dict[tuple[str, str, str], set[str]] = {}
    for device in devices:
        held.setdefault((device.pod_uid, device.container, device.resource), set()).add(device.device_id)
    return tuple(Held(*key, frozenset(ids)) for key, ids in held.items())


def _device_ids(ids: list[str] | dict[str, list[str] | None] | None) -> frozenset[str]:
    if isinstance(ids, dict):
        return frozenset(device_id for on_node in ids.values() for device_id in on_node or ())
    return frozenset(ids or ())
