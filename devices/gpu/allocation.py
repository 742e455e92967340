"""Which GPUs a container should get, where the kubelet asks (GetPreferredAllocation, kubelet 1.19 and later).

GPUs that share a NUMA node share memory and buses with the CPUs next to them, so the best choice is the one on the
fewest nodes; among those, the one with the lowest indices, so that the same question always has the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from devices.gpu.model import GPU, in_order
from devices.model import Fault, Health, PreferredRequest, RefusedError


def preferred(request: PreferredRequest, gpus: Mapping[str, GPU]) -> tuple[str, ...]:
    """Choose exactly ``request.size`` of the available devices, in the order of their indices.

    Those that must be included are chosen. Devices that ``gpus`` (by UUID) doesn't hold, or holds as unhealthy, come
    last: the kubelet asks with the list it had, which can be older than ours. GPUs without a known NUMA node count as
    being on one node together. Takes some milliseconds for 10 000 devices: n log n, plus the square of the number of
    nodes.

    Raises:
        RefusedError: INVALID_ARGUMENT, where no choice meets the request: a size below 1, an ID given twice, a device
            to include that isn't available, more of those than ``size``, or fewer available than ``size``.
    """
    available, must = frozenset(request.available), frozenset(request.must_include)
    _check(request, available, must)
    free = request.size - len(must)
    candidates = in_order(available - must, gpus)
    sound = [gpus[i] for i in candidates if i in gpus and gpus[i].health is Health.HEALTHY]
    if len(sound) >= free:
        chosen = _fewest_nodes(free, sound, {gpus[i].numa_node for i in must if i in gpus})
    else:
        well = {gpu.uuid for gpu in sound}
        doubtful = [i for i in candidates if i not in well]
        chosen = [*well, *doubtful[: free - len(well)]]
    return tuple(in_order([*must, *chosen], gpus))


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


def _fewest_nodes(size: int, candidates: Sequence[GPU], opened: set[int | None]) -> list[str]:
    """Choose ``size`` of at least as many ``candidates``, given by index, on as few nodes beyond ``opened`` as can be.

    Walks the candidates by index and settles each node when it first turns up: it is opened if, with it, the biggest of
    the unsettled nodes still make up the number, and closed for good otherwise. (Once a node can't be part of a smallest
    set of nodes, opening others never changes that.)
    """
    opened = set(opened)
    room = Counter(gpu.numa_node for gpu in candidates)
    missing = size - sum(room.pop(node, 0) for node in opened)
    budget, closed = _nodes_needed(missing, room.values()), set[int | None]()
    chosen: list[str] = []
    for gpu in candidates:
        if len(chosen) == size:
            break
        node = gpu.numa_node
        if node not in opened and node not in closed:
            own = room.pop(node)
            if budget and _nodes_needed(missing - own, room.values()) < budget:
                opened.add(node)
                missing, budget = missing - own, budget - 1
            else:
                closed.add(node)
        if node in opened:
            chosen.append(gpu.uuid)
    return chosen


def _nodes_needed(missing: int, room: Iterable[int]) -> int:
    """How many nodes it takes, the biggest first, to make up for ``missing``; one too many where all aren't enough."""
    count = 0
    for size in sorted(room, reverse=True):
        if missing <= 0:
            return count
        missing -= size
        count += 1
    return count if missing <= 0 else count + 1
