"""``kubelet_internal_checkpoint``: what a kubelet remembers of its pods' devices, in the formats of 1.8 to today.

Pure: records in, bytes out, and back. A kubelet reads only what it knows, and starts with empty records where it can't read:
that is how pods lose their devices on the hops 1.8 to 1.9, 1.10 to 1.11, and from 1.19 or older to 1.31 or later.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from adapters.dialect import Level, MalformedError
from adapters.pb.v1beta1 import v1beta1_pb2
from adapters.registry import by_name
from devices.model import ContainerAnswer, ContainerRequest
from gateway_lab.kubelets.behaviour import Behaviour, Checkpoint

FILE_NAME = "kubelet_internal_checkpoint"


class CorruptError(Exception):
    """A checkpoint that this kubelet cannot read. It goes on with empty records, as the kubelet does."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """What one container holds of one resource: device IDs by the NUMA key of the checkpoint, and the plugin's answer."""

    numa: Mapping[str, tuple[str, ...]]
    answer: ContainerAnswer = field(default_factory=ContainerAnswer)

    @property
    def ids(self) -> frozenset[str]:
        """The device IDs; one that sits on several NUMA nodes is there once."""
        return frozenset(device for devices in self.numa.values() for device in devices)


Key = tuple[str, str, str]
"""Pod UID, container name, resource name."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a checkpoint says: who holds what, and which resources were registered (with their healthy devices)."""

    held: Mapping[Key, Allotment] = field(default_factory=dict)
    registered: Mapping[str, Sequence[str]] = field(default_factory=dict)


def encode(memory: Memory, behaviour: Behaviour) -> bytes:
    """Spell ``memory`` as this kubelet writes it."""
    if behaviour.checkpoint is Checkpoint.ENTRIES:
        entries = [
            {"PodUID": pod, "ContainerName": container, "ResourceName": resource, "DeviceID": device}
            for (pod, container, resource), allotment in memory.held.items()
            for device in sorted(allotment.ids)
        ]
        return json.dumps({"Entries": entries or None}).encode()
    data = {
        "PodDeviceEntries": [_entry(key, allotment, behaviour) for key, allotment in memory.held.items()] or None,
        "RegisteredDevices": {resource: list(devices) for resource, devices in memory.registered.items()},
    }
    if behaviour.checkpoint is Checkpoint.BARE:
        return json.dumps(data).encode()
    return json.dumps({"Data": data, "Checksum": checksum(data)}).encode()


def decode(content: bytes, behaviour: Behaviour) -> Memory:
    """Read a checkpoint as this kubelet does: what it doesn't know it doesn't see.

    Raises:
        CorruptError: it can't be read; the message is the kubelet's reason.
    """
    try:
        whole = json.loads(content)
        if not isinstance(whole, dict):
            raise CorruptError("checkpoint is corrupted")
        if behaviour.checkpoint is Checkpoint.ENTRIES:
            return _decode_entries(whole)
        if behaviour.checkpoint is Checkpoint.BARE:
            return _decode_data(whole, Checkpoint.BARE, behaviour)
        data = whole.get("Data")
        if not isinstance(data, dict) or whole.get("Checksum") != checksum(data):
            raise CorruptError("checkpoint is corrupted")
        return _decode_data(data, _shape(data), behaviour)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CorruptError(f"failed to unmarshal checkpoint data: {error}") from error


def _shape(data: Mapping[str, Any]) -> Checkpoint | None:
    """Tell the format by the type of DeviceIDs; None where there are no entries, which all formats spell alike."""
    shapes = {type(entry["DeviceIDs"]) for entry in data.get("PodDeviceEntries") or ()}
    if shapes == {list}:
        return Checkpoint.LIST
    return Checkpoint.NUMA if shapes else None


def _decode_entries(whole: Mapping[str, Any]) -> Memory:
    devices: dict[Key, tuple[str, ...]] = {}
    for entry in whole.get("Entries") or ():
        key = (entry["PodUID"], entry["ContainerName"], entry["ResourceName"])
        devices[key] = (*devices.get(key, ()), entry["DeviceID"])
    return Memory({key: Allotment({"0": ids}) for key, ids in devices.items()})


def _decode_data(data: Mapping[str, Any], shape: Checkpoint | None, behaviour: Behaviour) -> Memory:
    if shape not in {behaviour.checkpoint, behaviour.also_reads, None}:
        raise CorruptError("json: cannot unmarshal DeviceIDs")
    held: dict[Key, Allotment] = {}
    for entry in data.get("PodDeviceEntries") or ():
        ids = entry["DeviceIDs"]
        numa = {node: tuple(devices) for node, devices in ids.items()} if isinstance(ids, dict) else {"0": tuple(ids)}
        try:
            answer = decode_answer(base64.b64decode(entry["AllocResp"] or "", validate=True), behaviour)
        except (binascii.Error, MalformedError):
            continue  # the kubelet logs it and leaves out the entry
        held[entry["PodUID"], entry["ContainerName"], entry["ResourceName"]] = Allotment(numa, answer)
    return Memory(held, {name: tuple(ids or ()) for name, ids in (data.get("RegisteredDevices") or {}).items()})


def _entry(key: Key, allotment: Allotment, behaviour: Behaviour) -> dict[str, Any]:
    pod, container, resource = key
    by_node = {node: list(devices) for node, devices in allotment.numa.items()}
    return {
        "PodUID": pod,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": by_node if behaviour.checkpoint is Checkpoint.NUMA else sorted(allotment.ids),
        "AllocResp": base64.b64encode(_encode_answer(allotment.answer, behaviour)).decode(),
    }


def _encode_answer(answer: ContainerAnswer, behaviour: Behaviour) -> bytes:
    """Spell one container's answer: the whole answer of v1alpha2, a container's part of v1beta1 (alike on the wire)."""
    dialect = by_name(behaviour.dialect)
    level = Level(behaviour.minor, behaviour.minor)
    if not behaviour.cdi or not answer.cdi_devices:
        whole = dialect.encode_allocate_answer([ContainerRequest(())], [answer], level).data
    else:  # kept by 1.28 too, whose gate decides only what the runtime is told
        whole = dialect.encode_allocate_answer([ContainerRequest(())], [answer], Level(29)).data
    if behaviour.minor < 10:
        return whole
    return v1beta1_pb2.AllocateResponse.FromString(whole).container_responses[0].SerializeToString(deterministic=True)


def decode_answer(data: bytes, behaviour: Behaviour) -> ContainerAnswer:
    """Read one container's answer from a checkpoint.

    Raises:
        MalformedError: the bytes are none.
    """
    if behaviour.minor >= 10:
        data = b"\x0a" + _varint(len(data)) + data  # as the first of the container_responses
    answers = by_name(behaviour.dialect).decode_allocate_answer(data)
    return known(answers[0], behaviour)


def known(answer: ContainerAnswer, behaviour: Behaviour) -> ContainerAnswer:
    """Drop what this kubelet's API types don't have."""
    return answer if behaviour.cdi else replace(answer, cdi_devices=())


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def checksum(data: Mapping[str, Any]) -> int:
    """Sum up ``Data`` as the kubelet does: FNV-32a over a dump of the value that names its Go types.

    The same number as a genuine kubelet's, so that an emulated one can follow a genuine one, and the other way round.
    """
    summed = 0x811C9DC5
    for byte in _dump(data).encode():
        summed = (summed ^ byte) * 0x01000193 & 0xFFFFFFFF
    return summed


def _dump(data: Mapping[str, Any]) -> str:
    entries = data.get("PodDeviceEntries")
    registered = data.get("RegisteredDevices")
    return (
        "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)"
        + _list(None if entries is None else [_dump_entry(entry) for entry in entries])
        + f" RegisteredDevices:(map[string][]string){_map(registered)}}}"
    )


def _dump_entry(entry: Mapping[str, Any]) -> str:
    words = [f"{name}:(string){entry[name]}" for name in ("PodUID", "ContainerName", "ResourceName")]
    ids = entry["DeviceIDs"]
    if isinstance(ids, list):
        words.append(f"DeviceIDs:([]string){_list(ids)}")
    else:
        words.append(f"DeviceIDs:(checkpoint.DevicesPerNUMA){_map(ids, int)}")
    answer = entry["AllocResp"]
    words.append(f"AllocResp:([]uint8){_list(None if answer is None else base64.b64decode(answer))}")
    return "{" + " ".join(words) + "}"


def _map(values: Mapping[str, Sequence[str] | None] | None, order: Callable[[str], Any] = str) -> str:
    if values is None:
        return "<nil>"
    return "map[" + " ".join(f"{key}:{_list(values[key])}" for key in sorted(values, key=order)) + "]"


def _list(values: Sequence[str] | bytes | None) -> str:
    return "<nil>" if values is None else "[" + " ".join(map(str, values)) + "]"
