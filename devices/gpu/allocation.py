"""Choose GPUs for a container, if the kubelet asks (GetPreferredAllocation, kubelet 1.19 and later).

Whole GPUs are chosen near each other, partitions on few GPUs, replicas of shared GPUs on the least used ones. ``selection``
finds the GPUs; this module decides how many devices to take from each, and returns their IDs. docs/preferred-allocation.md has
the order of importance. Equal requests always get equal answers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import nsmallest
from itertools import accumulate, chain

from devices.gpu.model import GPU, found, in_order
from devices.gpu.selection import select
from devices.model import Health, PreferredRequest
from devices.policy import Sharing
from devices.replicas import grouped
from devices.source import check_choice


def preferred(
    request: PreferredRequest, gpus: Mapping[str, GPU], sharing: Sharing = Sharing.DISTRIBUTED
) -> tuple[str, ...]:
    """Choose exactly ``request.size`` of the available devices, in the order of their indices.

    Devices that must be included are chosen. Devices that are unhealthy or missing in ``gpus`` (by UUID) are chosen last: the
    kubelet's list may be older than ours. GPUs with an unknown NUMA node are treated as one node. It takes at most some 20 ms,
    for a few of 10,000 devices or for the links of 64 GPUs.

    Raises:
        RefusedError: INVALID_ARGUMENT, no choice meets the request: the size is below 1, an ID is given twice, a device
            to include isn't available, there are more of those than ``size``, or fewer are available than ``size``.
    """
    check_choice(request)
    must = frozenset(request.must_include)
    free = request.size - len(must)
    there = grouped([one for one in request.available if one not in must] if must else request.available, gpus)
    sound = {uuid: ids for uuid, ids in there.items() if uuid in gpus and gpus[uuid].health is Health.HEALTHY}
    doubtful = [device_id for uuid, ids in there.items() if uuid not in sound for device_id in ids]
    well = sum(map(len, sound.values()))
    if well < free:
        chosen = [*chain.from_iterable(sound.values()), *in_order(doubtful, gpus)[: free - well]]
    else:
        opened = {gpu.uuid for device_id in must if (gpu := found(device_id, gpus)) is not None}
        chosen = _chosen(free, sound, opened, gpus, sharing)
    return tuple(in_order([*must, *chosen], gpus))


def _chosen(
    free: int, sound: Mapping[str, list[str]], opened: AbstractSet[str], gpus: Mapping[str, GPU], sharing: Sharing
) -> list[str]:
    """Choose ``free`` of the ``sound`` devices (by UUID) for a container that must get devices of the ``opened`` GPUs.

    Partitions are grouped by their physical GPU, replicas by the device that they share.
    """
    shared = any(len(ids) > 1 or ids[0] != uuid for uuid, ids in sound.items())
    first: dict[str, GPU] = {}
    there: dict[str, list[str]] = {}
    inside = {gpus[uuid].uuid if shared else gpus[uuid].board for uuid in opened}
    for gpu in sorted((gpus[uuid] for uuid in sound.keys() | opened), key=lambda gpu: (gpu.index, gpu.uuid)):
        name = gpu.uuid if shared else gpu.board
        first.setdefault(name, gpu)
        there[name] = [*there.get(name, ()), *sound.get(gpu.uuid, ())]
    takes = _spread if shared and sharing is Sharing.DISTRIBUTED else _packed
    room = [len(ids) for ids in there.values()]
    taken = takes(free, list(first.values()), room, {place for place, name in enumerate(first) if name in inside})
    return [
        device_id
        for ids, count in zip(there.values(), taken, strict=True)
        # The replicas of one GPU differ only in their numbers: a longer ID is a higher one.
        for device_id in (nsmallest(count, ids, key=lambda one: (len(one), one)) if shared else ids[:count])
    ]


def _packed(free: int, gpus: Sequence[GPU], room: Sequence[int], used: set[int]) -> list[int]:
    """Return how many devices to take from each GPU, at most its ``room``: from few GPUs, first those with the least room.

    ``used`` are the indexes of GPUs that the container gets anyway.
    """
    fresh = [place for place in range(len(gpus)) if place not in used]
    fresh_room = [room[place] for place in fresh]
    missing = free - sum(room[place] for place in used)
    count = sum(1 for before in accumulate(sorted(fresh_room, reverse=True), initial=0) if before < missing)
    inside = [gpus[place] for place in used]
    chosen = select([gpus[place] for place in fresh], fresh_room, count, missing, inside, [])
    taken = [0] * len(gpus)
    for place in sorted(used | {fresh[one] for one in chosen}, key=lambda place: (room[place], place)):
        taken[place] = min(free, room[place])
        free -= taken[place]
    return taken


def _spread(free: int, gpus: Sequence[GPU], room: Sequence[int], used: set[int]) -> list[int]:
    """As ``_packed``, but leave the remaining room as even as possible.

    Every GPU has the same number of replicas, so the one with the most room is the least used. Taking one at a time from that
    GPU is optimal.
    """
    # The lowest level to which every GPU's room can be lowered.
    low = bisect_left(range(max(room, default=0)), -free, key=lambda level: -sum(max(left - level, 0) for left in room))
    taken = [max(left - low, 0) for left in room]
    free -= sum(taken)
    used = used | {place for place, count in enumerate(taken) if count}
    highest = [place for place, left in enumerate(room) if left >= low > 0]
    fresh = [place for place in highest if place not in used]
    others = [gpus[place] for place, left in enumerate(room) if 0 < left < low and place not in used]
    inside = [gpus[place] for place in used]
    count = min(free, len(fresh))
    chosen = select([gpus[place] for place in fresh], [1] * len(fresh), count, count, inside, others)
    again = [place for place in highest if place in used]
    for place in [*(fresh[one] for one in chosen), *again][:free]:
        taken[place] += 1
    return taken
