"""A driver's pool of devices as ResourceSlices, and the changes that make the API server's slices match it. Pure.

All slices of a pool have one generation: the scheduler uses the newest one, and only once all its slices are there
(``resourceSliceCount``). So a change gives every slice of the pool the next number, and superfluous slices are deleted last.
The limits are those of k8s.io/api/resource/v1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct, field

from devices.replicas import MARK
from gateway.dra.offer import Offer, Version
from gateway.kubernetes import quantity

Body: TypeAlias = dict[str, Any]

MOST_DEVICES: Final = 128
"""Most devices in a slice (ResourceSliceMaxDevices)."""
MOST_TAINTED: Final = 64
"""Most devices in a slice, if one of them has a taint (ResourceSliceMaxDevicesWithAdvancedFeatures)."""
MOST_ATTRIBUTES: Final = 32
"""Most attributes and capacities of a device, together (ResourceSliceMaxAttributesAndCapacitiesPerDevice)."""
TAINTS: Final = "device-plugin-gateway.io/"
SHARES: Final = "shares"
"""The name of the capacity of which claims ask for shares, as in NVIDIA's driver (consumable_shares.go)."""
_SHARED: Final = "allowMultipleAllocations"
_IDENTITIES: Final = frozenset({"uuid", "parentUUID"})
_ADDRESSES: Final = frozenset({"pciBusID", "pcieBusID", "pciAddr"})
"""Attributes by which drivers (NVIDIA's, AMD's, and Kubernetes' own names) identify a device's hardware."""
_PCI_CHARS: Final = 12
"""Characters of a PCI address (0000:3b:00.0). NVML writes four more digits before them."""

_STEM_CHARS: Final = 240
"""Most characters of a slice's name before its number: a name has at most 253."""
_BASIC: Final = "v1beta1"
"""The API version (Kubernetes 1.32) in which a device's fields are in ``basic``, by default without taints."""


class _Shape(Struct):
    """The fields of any process's device that are read."""

    taints: list[dict[str, Any]] | None = None
    attributes: dict[str, Any] | None = None
    basic: _Shape | None = None


class Spec(Struct):
    """The fields of a slice that are read."""

    driver: str = ""
    pool: dict[str, Any] = {}
    node: str = field(default="", name="nodeName")
    devices: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.devices = [_readable(one) for one in self.devices or ()]


def _readable(device: dict[str, Any]) -> dict[str, Any]:
    """Reduce a device with unexpected fields to its attributes. If it is in our slice, the slice differs, and is written again."""
    try:
        msgspec.convert(device, _Shape)
    except msgspec.ValidationError:
        said = device["basic"] if isinstance(device.get("basic"), dict) else device
        attributes = said.get("attributes")
        kept = attributes if isinstance(attributes, dict) else {}
        return {"name": device.get("name"), "attributes": kept, "has": "another shape"}
    return device


class Metadata(Struct):
    """The metadata of a slice."""

    name: str


class Slice(Struct):
    """A slice of the API server."""

    metadata: Metadata
    spec: Spec

    @property
    def generation(self) -> int:
        """The pool's generation, 0 if it has none."""
        number = self.spec.pool.get("generation", 0)
        return number if isinstance(number, int) else 0


class Pool(Struct, frozen=True):
    """What a driver offers on a node.

    ``version`` is the API's. ``taints`` is True if the API keeps taints of devices. ``owner`` is the UID of the Node object, with
    which the slices are deleted; '' if unknown.
    """

    driver: str
    node: str
    devices: tuple[Offer, ...]
    version: str = "v1"
    owner: str = ""
    taints: bool = True


class Change(Struct, frozen=True):
    """A slice to apply; without a body, a slice to delete."""

    name: str
    body: Body | None = None


def name_of(pool: Pool, number: int) -> str:
    """Return the name of a slice. It is the same for every gateway of the node, so that they write one object."""
    stem = f"{pool.node}-{pool.driver}"
    if len(stem) > _STEM_CHARS:
        digest = hashlib.sha256(stem.encode()).hexdigest()[:12]
        stem = f"{stem[: _STEM_CHARS - 13].rstrip('-.')}-{digest}"
    return f"{stem}-{number}"


def changes(pool: Pool, there: Mapping[str, Slice], last: int = 0) -> list[Change]:
    """Return the changes to make; empty if the slices are up to date.

    Args:
        pool: what is offered.
        there: our slices of the pool that the API server has, by name.
        last: the highest generation that was ever written.
    """
    parts = {name_of(pool, number): part for number, part in enumerate(_parts(pool))}
    generations = {one.generation for one in there.values()}
    same = there.keys() == parts.keys() and len(generations) == 1
    if same and all(_is(there[name], part, len(parts)) for name, part in parts.items()):
        return []
    generation = max([last, *generations]) + 1
    wanted = [Change(name, _body(pool, name, part, generation, len(parts))) for name, part in parts.items()]
    return [*wanted, *map(Change, sorted(there.keys() - parts.keys()))]


def no_more(devices: Iterable[Offer], there: Iterable[Slice]) -> tuple[Offer, ...]:
    """Return the devices without those that the existing slices don't offer, or don't offer to new claims."""
    shown = {str(one.get("name")): bool(one.get("taints")) for found in there for one in found.spec.devices or ()}
    return tuple(one for one in devices if one.name in shown and (one.ailment is not None or not shown[one.name]))


def is_ours(name: str, one: Slice, node: str) -> bool:
    """Return True if a slice has the name that a gateway would give it."""
    number = name.rpartition("-")[2]
    return number.isdecimal() and name == name_of(Pool(one.spec.driver, node, ()), int(number))


def lacks_taints(written: Slice, seen: Slice) -> bool:
    """Return True if the server kept a slice as it was written, except its taints."""
    tainted = any(device.get("taints") for device in written.spec.devices or ())
    kept = any(device.get("taints") for device in seen.spec.devices or ())
    return tainted and not kept and written.generation == seen.generation


def has_shares(one: Slice) -> bool:
    """Return True if claims can ask for shares of a device of this slice."""
    return any(device.get(_SHARED) for device in one.spec.devices or ())


def strangers(slices: Iterable[Slice], node: str, ours: Iterable[str]) -> dict[str, str]:
    """Return the hardware that other processes offer on this node: its key (``hardware``), and a text that names driver and slice.

    Two drivers that offer one GPU would give it to two pods. ``ours`` are the names of our own slices.
    """
    mine = set(ours)
    found: dict[str, str] = {}
    for one in slices:
        if one.spec.node != node or one.metadata.name in mine:
            continue
        for device in one.spec.devices or ():
            words = f"{one.spec.driver} offers it as {device.get('name')} in {one.metadata.name}"
            for key in hardware(_strings(device)):
                found.setdefault(key, words)
    return found


def hardware(attributes: Mapping[str, object]) -> frozenset[str]:
    """Return the keys of a device's hardware, the same for all drivers: its UUID, the UUID of its GPU, its PCI address.

    Two devices with a common key may be the same hardware.
    """
    found = set()
    for name, value in attributes.items():
        bare = name.rpartition("/")[2]
        if isinstance(value, str) and value and bare in _IDENTITIES:
            found.add(value)
        elif isinstance(value, str) and value and bare in _ADDRESSES:
            found.add(value.lower()[-_PCI_CHARS:])
    return frozenset(found)


def _strings(device: Mapping[str, Any]) -> dict[str, object]:
    """Return the string attributes of a published device."""
    attributes = device.get("attributes") or (device.get("basic") or {}).get("attributes") or {}
    return {
        name: value["string"] for name, value in attributes.items() if isinstance(value, dict) and "string" in value
    }


def _parts(pool: Pool) -> Sequence[Sequence[Body]]:
    """Split the devices into slices. A pool without devices has one empty slice."""
    taints = pool.taints and pool.version != _BASIC
    shown = [one for one in pool.devices if taints or one.ailment is None]
    most = MOST_TAINTED if any(one.ailment is not None for one in shown) else MOST_DEVICES
    devices = [_device(one, pool) for one in sorted(shown, key=_in_order)]
    return [devices[at : at + most] for at in range(0, max(len(devices), 1), most)]


def _in_order(one: Offer) -> tuple[int, int, str]:
    """Sort by replica number, then by name in numeric order. The scheduler takes the first device that fits, so pods spread over the GPUs."""
    replica = int(one.device_id.rpartition(MARK)[2]) if one.attributes.get("shared") else 0
    return replica, len(one.name), one.name


def _device(one: Offer, pool: Pool) -> Body:
    counts = ({"memory": one.memory} if one.memory else {}) | dict(one.capacities)
    capacity: Body = {name: {"value": quantity.written(count)} for name, count in counts.items()}
    if one.shares:
        capacity = {name: {**value, "requestPolicy": {"default": "0"}} for name, value in capacity.items()}
        most = quantity.written(len(one.shares))
        policy = {"default": "1", "validRange": {"min": "1", "max": most, "step": "1"}}
        capacity[SHARES] = {"value": most, "requestPolicy": policy}
    shown = list(one.attributes.items())[: MOST_ATTRIBUTES - len(capacity)]
    said: Body = {"attributes": {name: _value(value) for name, value in shown}}
    if one.shares:
        said[_SHARED] = True
    if capacity:
        said["capacity"] = capacity
    if pool.version == _BASIC:
        return {"name": one.name, "basic": said}
    told: Body = {"name": one.name, **said}
    if one.ailment is not None:
        told["taints"] = [{"key": f"{TAINTS}{one.ailment.value}", "effect": "NoSchedule"}, *_vendor_taints(one)]
    return told


def _vendor_taints(one: Offer) -> Iterable[Body]:
    for key, value in one.vendor_taints.items():
        yield {"key": key, **({"value": value} if value else {}), "effect": "NoSchedule"}


def _value(value: object) -> Body:
    match value:
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case Version(text):
            return {"version": text}
        case _:
            return {"string": str(value)}


def _is(one: Slice, part: Sequence[Body], count: int) -> bool:
    """Return True if a slice has these devices, apart from the time that the server adds to a taint."""
    return one.spec.pool.get("resourceSliceCount") == count and list(map(_bare, one.spec.devices or ())) == list(part)


def _bare(device: Mapping[str, Any]) -> Body:
    taints = [
        {key: value for key, value in taint.items() if key != "timeAdded"} for taint in device.get("taints") or ()
    ]
    bare = {key: value for key, value in device.items() if key != "taints"}
    return {**bare, "taints": taints} if taints else bare


def _body(pool: Pool, name: str, part: Sequence[Body], generation: int, count: int) -> Body:
    metadata: Body = {"name": name}
    if pool.owner:
        metadata["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Node", "name": pool.node, "uid": pool.owner, "controller": True}
        ]
    return {
        "apiVersion": f"resource.k8s.io/{pool.version}",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {
            "driver": pool.driver,
            "nodeName": pool.node,
            "pool": {"name": pool.node, "generation": generation, "resourceSliceCount": count},
            "devices": list(part),
        },
    }
