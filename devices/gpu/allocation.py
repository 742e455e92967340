"""Which GPUs a container should get, where the kubelet asks (GetPreferredAllocation, kubelet 1.19 and later).

Whole GPUs are chosen near to each other, partitions on as few GPUs as possible, replicas of shared GPUs where the fewest
others are. Each of these is one question: how many devices from which GPU? This module asks it and turns the answer into
device IDs; ``selection`` finds the GPUs. docs/preferred-allocation.md states what is best, in the order of importance. The
same question always has the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, chain

from devices.gpu.model import GPU, found, in_order
from devices.gpu.selection import select
from devices.model import Fault, Health, PreferredRequest, RefusedError


class Sharing(Enum):
    """How replicas of shared GPUs are given out; the values are those of ``SHARED_DEVICES_ALLOCATION_POLICY``."""

    DISTRIBUTED = "distributed"
    """From the least used GPU first."""
    PACKED = "packed"
    """From as few GPUs as possible, the most used first."""


def preferred(
    request: PreferredRequest, gpus: Mapping[str, GPU], sharing: Sharing = Sharing.DISTRIBUTED
) -> tuple[str, ...]:
    """Choose exactly ``request.size`` of the available devices, in the order of their indices.

    Those that must be included are chosen. Devices that ``gpus`` (by UUID) doesn't hold, or holds as unhealthy, come
    last: the kubelet asks with the list it had, which can be older than ours. GPUs without a known NUMA node count as
    being on one node together. Takes some milliseconds for 10 000 devices, and at most some 10 ms for the links of many
    GPUs.

    Raises:
        RefusedError: INVALID_ARGUMENT, where no choice meets the request: a size below 1, an ID given twice, a device
            to include that isn't available, more of those than ``size``, or fewer available than ``size``.
    """
    available, must = frozenset(request.available), frozenset(request.must_include)
    _check(request, available, must)
    free = request.size - len(must)
    there: dict[str, list[str]] = {}  # by the UUID of the GPU
    doubtful: list[str] = []
    for device_id in available - must:
        gpu = found(device_id, gpus)
        (doubtful if gpu is None else there.setdefault(gpu.uuid, [])).append(device_id)
    sound = {uuid: ids for uuid, ids in there.items() if gpus[uuid].health is Health.HEALTHY}
    doubtful += chain.from_iterable(ids for uuid, ids in there.items() if uuid not in sound)
    well = sum(map(len, sound.values()))
    if well < free:
        chosen = [*chain.from_iterable(sound.values()), *in_order(doubtful, gpus)[: free - well]]
    else:
        opened = {gpu.uuid for device_id in must if (gpu := found(device_id, gpus)) is not None}
        chosen = _chosen(free, sound, opened, gpus, sharing)
    return tuple(in_order([*must, *chosen], gpus))


@dataclass(slots=True)
class _Source:
    """Where devices come from: a physical GPU, or what is shared by replicas. ``gpu`` is the first that stands for it.

    ``ids`` are free, those of lower indices first; ``opened`` is one of which the container has something already.
    """

    gpu: GPU
    ids: list[str] = field(default_factory=list)
    opened: bool = False

    @property
    def free(self) -> int:
        return len(self.ids)


def _chosen(
    free: int, sound: Mapping[str, list[str]], opened: AbstractSet[str], gpus: Mapping[str, GPU], sharing: Sharing
) -> list[str]:
    """Choose ``free`` of the devices in ``sound``, by UUID, for a container that has some of the ``opened`` GPUs anyway."""
    shared = any(ids != [uuid] for uuid, ids in sound.items())
    sources: dict[str, _Source] = {}
    for gpu in sorted((gpus[uuid] for uuid in sound.keys() | opened), key=lambda gpu: (gpu.index, gpu.uuid)):
        source = sources.setdefault(gpu.uuid if shared else gpu.board, _Source(gpu))
        # Replicas of one GPU differ in their numbers alone: a longer one is a higher one.
        source.ids += sorted(sorted(sound.get(gpu.uuid, ())), key=len)
        source.opened |= gpu.uuid in opened
    ordered = tuple(sources.values())
    takes = _spread if shared and sharing is Sharing.DISTRIBUTED else _packed
    return [
        device_id
        for source, count in zip(ordered, takes(free, ordered), strict=True)
        for device_id in source.ids[:count]
    ]


def _packed(free: int, sources: Sequence[_Source]) -> list[int]:
    """Say how many devices to take from each: from as few GPUs as can be, the fullest used up first."""
    used = {place for place, source in enumerate(sources) if source.opened}
    fresh = [place for place in range(len(sources)) if place not in used]
    room = [sources[place].free for place in fresh]
    missing = free - sum(sources[place].free for place in used)
    count = sum(1 for before in accumulate(sorted(room, reverse=True), initial=0) if before < missing)
    inside = [sources[place].gpu for place in used]
    chosen = select([sources[place].gpu for place in fresh], room, count, missing, inside, [])
    used.update(fresh[place] for place in chosen)
    taken = [0] * len(sources)
    for place in sorted(used, key=lambda place: (sources[place].free, place)):
        taken[place] = min(free, sources[place].free)
        free -= taken[place]
    return taken


def _spread(free: int, sources: Sequence[_Source]) -> list[int]:
    """Say how many devices to take from each, so that what is left of each is as even as can be.

    As every GPU has the same number of replicas, the one with the most left is the least used. To take them one by one,
    always from that one, is best: what it leaves can't be made more even by taking one from elsewhere instead.
    """
    low, high = 0, max((source.free for source in sources), default=0)
    while low < high:  # the least level to which all can be lowered
        level = (low + high) // 2
        if sum(max(source.free - level, 0) for source in sources) <= free:
            high = level
        else:
            low = level + 1
    taken = [max(source.free - low, 0) for source in sources]
    free -= sum(taken)
    used = {place for place, source in enumerate(sources) if source.opened or taken[place]}
    highest = [place for place, source in enumerate(sources) if source.free - taken[place] == low > 0]
    fresh = [place for place in highest if place not in used]
    others = [source.gpu for place, source in enumerate(sources) if 0 < source.free < low and place not in used]
    inside = [sources[place].gpu for place in used]
    count = min(free, len(fresh))
    chosen = select([sources[place].gpu for place in fresh], [1] * len(fresh), count, count, inside, others)
    again = [place for place in highest if place in used]
    for place in [*(fresh[place] for place in chosen), *again][:free]:
        taken[place] += 1
    return taken


def _check(request: PreferredRequest, available: frozenset[str], must: frozenset[str]) -> None:
    strangers = must - available
    if request.size < 1:
        problem = f"expected a size of at least 1, got {request.size}"
    elif len(available) < len(request.available) or len(must) < len(request.must_include):
        problem = "the same device ID came twice; give each ID once"
    elif strangers:
        problem = f"{_some(strangers)} must be included but aren't available; list them as available too"
    elif len(must) > request.size:
        problem = f"{len(must)} devices must be included in a choice of {request.size}; ask for at least {len(must)}"
    elif len(available) < request.size:
        problem = f"{request.size} devices are wanted and {len(available)} available; ask for at most {len(available)}"
    else:
        return
    raise RefusedError(Fault.INVALID_ARGUMENT, f"no such choice of devices: {problem}")


def _some(device_ids: Iterable[str]) -> str:
    first, *rest = sorted(device_ids)
    return f"{first[:80]!r}" + (f" and {len(rest)} more" if rest else "")
