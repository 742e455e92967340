"""Time-slicing: one GPU or partition offered several times, as replicas ``<uuid>::0``, ``<uuid>::1`` and so on. Pure.

The operator's ``Policy.slices`` says which resources are shared, how often and under which name. The IDs are those of NVIDIA's
device plugin, so that a kubelet's checkpoint stays valid when the plugin is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct

from devices.gpu import naming
from devices.gpu.model import GPU
from devices.gpu.naming import NamingError
from devices.model import Device, Health, Options, Trouble
from devices.policy import Policy, Portion, Slices
from devices.replicas import ids
from devices.source import Listing, Unusable

_MAX_CACHED: Final = 128
"""GPUs and partitions whose devices are cached: as many as a node has (64), and as many earlier ones."""
MOST_DEVICES: Final = 100_000
"""Most devices of one resource: a kubelet accepts a list of 4 MiB, which some 65,000 replicas of GPUs fill."""


class NamedGPUs(Struct, frozen=True):
    """The GPUs of one resource name, by UUID, each offered ``replicas`` times (0: unshared).

    ``own`` has the number for GPUs that differ, by UUID.
    """

    gpus: Mapping[str, GPU]
    replicas: int = 0
    own: Mapping[str, int] = {}

    def replicas_of(self, uuid: str) -> int:
        """Return how often a GPU is offered; 0: unshared."""
        return self.own.get(uuid, self.replicas)

    def ids(self, uuid: str) -> tuple[str, ...]:
        """Return the device IDs of a GPU."""
        return _ids(uuid, self.replicas_of(uuid))


def offered(named: Mapping[str, Iterable[GPU]], policy: Policy) -> dict[str, NamedGPUs]:
    """Return what each resource offers, by the name that it is shown as.

    Raises:
        NamingError: two resources have the same shown name, or one has more than ``MOST_DEVICES``.
    """
    offers: dict[str, NamedGPUs] = {}
    for name, gpus in named.items():
        slices = policy.slices.get(name, Slices(0, name))
        for shown, offer in _portioned(list(gpus), slices).items():
            if shown in offers:
                raise NamingError(f"two resources have the name {shown}; one is {name}. Rename one of them")
            if (count := sum(offer.replicas_of(uuid) or 1 for uuid in offer.gpus)) > MOST_DEVICES:
                raise NamingError(
                    f"{shown} would have {count} devices. Allowed: at most {MOST_DEVICES}. Write fewer replicas"
                )
            offers[shown] = offer
    return offers


def could_be(gpu: GPU, device_id: str, resource: str, slices: Slices) -> bool:
    """Return True if a GPU, present or not, could be offered as ``device_id`` of ``resource``, its shown name."""
    ways: list[Slices | Portion] = [slices]
    for portion in slices.portions:
        if isinstance(portion.devices, int):  # "The first n" depends on which GPUs are present, so it is possible.
            ways.append(portion)
        elif _names(portion.devices, gpu):
            ways[:1] = [portion]
            break
    return any(way.shown_as == resource and device_id in _ids(gpu.uuid, way.replicas) for way in ways)


def unlisted(
    source: str, gpus: Sequence[GPU], offers: Iterable[NamedGPUs], left_out: Mapping[str, tuple[str, ...]]
) -> Iterator[Unusable]:
    """Yield each GPU that is offered under no name, with the reason: left out by a setting, no partitions, or no pattern matches."""
    for gpu in gpus:
        if gpu.uuid in left_out and gpu.parent not in left_out:
            yield naming.as_left_out(
                Unusable(source, "", gpu.place or str(gpu.index), gpu.pci, gpu.uuid), left_out[gpu.uuid]
            )
    told = {gpu.board for gpu in gpus if gpu.uuid in left_out}
    told |= {gpu.board for offer in offers for gpu in offer.gpus.values()}
    split = {gpu.parent for gpu in gpus}
    for gpu in gpus:
        if not gpu.parent and gpu.uuid not in told:
            empty = gpu.partitioned and gpu.uuid not in split
            reason = (
                "it is in MIG mode and has no MIG instances: create some, or turn MIG mode off (nvidia-smi)"
                if empty
                else f"no pattern of the configuration's resources names it ({gpu.product})"
            )
            yield Unusable(source, reason, str(gpu.index), gpu.pci, gpu.uuid, excluded=not empty)


def _portioned(gpus: Sequence[GPU], slices: Slices) -> dict[str, NamedGPUs]:
    """Return what a resource offers, by shown name. If it has no GPU, the result has one name without GPUs."""
    if not slices.portions:
        return {slices.shown_as: NamedGPUs({gpu.uuid: gpu for gpu in gpus}, slices.replicas)}
    first = [gpu.uuid for gpu in sorted(gpus, key=lambda gpu: gpu.index)]
    found: dict[str, dict[str, GPU]] = {}
    own: dict[str, int] = {}
    for gpu in gpus:
        way = next((one for one in slices.portions if _means(one.devices, gpu, first)), slices)
        found.setdefault(way.shown_as, {})[gpu.uuid] = gpu
        own[gpu.uuid] = way.replicas
    return {shown: NamedGPUs(there, 0, own) for shown, there in found.items()} or {slices.shown_as: NamedGPUs({})}


def _means(devices: tuple[str, ...] | int, gpu: GPU, first: Sequence[str]) -> bool:
    return gpu.uuid in first[:devices] if isinstance(devices, int) else _names(devices, gpu)


def _names(devices: Sequence[str], gpu: GPU) -> bool:
    return gpu.uuid in devices or (gpu.place or str(gpu.index)) in devices


def listing(offer: NamedGPUs, recovered: frozenset[str], released: frozenset[str]) -> Listing:
    """Return the devices of an offer, with the options for the kubelet.

    GetPreferredAllocation is asked for, and PreStartContainer if a GPU must be prepared. ``recovered`` and ``released`` are
    UUIDs of GPUs, and mean the same as in ``Listing``.
    """
    gpus = offer.gpus.values()
    devices: list[Device] = []
    troubles: dict[str, Trouble] = {}
    for gpu in gpus:
        devices += _devices(gpu.uuid, offer.replicas_of(gpu.uuid), gpu.health, gpu.numa_node, gpu.parent, gpu.pci)
        if gpu.trouble is not None:
            troubles |= dict.fromkeys(offer.ids(gpu.uuid), gpu.trouble)
    return Listing(
        devices=tuple(devices),
        options=Options(any(gpu.pre_start for gpu in gpus), preferred_allocation=True),
        troubles=troubles,
        recovered=_expanded(offer, recovered),
        released=_expanded(offer, released),
    )


_ids = lru_cache(maxsize=_MAX_CACHED)(ids)


@lru_cache(maxsize=_MAX_CACHED)
def _devices(
    uuid: str, replicas: int, health: Health, numa_node: int | None, parent: str, pci: str
) -> tuple[Device, ...]:
    """Return the devices of a GPU. Equal calls return the same objects, so that comparing lists is fast."""
    numa_nodes = () if numa_node is None else (numa_node,)
    return tuple(Device(device_id, health, numa_nodes, parent, pci) for device_id in _ids(uuid, replicas))


def _expanded(offer: NamedGPUs, uuids: frozenset[str]) -> frozenset[str]:
    """Return the device IDs of these GPUs, and of the partitions on them."""
    return frozenset(
        device_id
        for gpu in offer.gpus.values()
        if gpu.uuid in uuids or gpu.parent in uuids
        for device_id in offer.ids(gpu.uuid)
    )
