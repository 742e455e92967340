"""What must hold on a node whatever happens to its kubelet and its gateway: pure checks of what was observed.

Demo, scenarios and benchmarks all judge by these, so that "nothing was lost" means the same everywhere. Each check
returns sentences for a person, none when all is well; nothing here asserts, prints or waits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from devices.boards import Place, are_shared, place_of
from devices.model import Device
from devices.replicas import unshared
from gateway.registration.api import PROBE_RESOURCE

Pods = Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]
"""A kubelet's records: pod -> container -> resource name -> device IDs."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The devices of one resource that one container of a pod holds, by the kubelet's own records."""

    pod: str
    container: str
    resource: str
    device_ids: tuple[str, ...]


_NO_ACCIDENT = re.compile(
    r"is given to both|\bpod .+ (lost|got .+ unasked:|holds .+, (its container is told|which no longer exists))|ended by itself"
)


def may_be_an_accident(reason: str) -> bool:
    """Tell whether a busy machine may be why something failed: never where pods' devices are concerned, or a gateway crashed."""
    return not _NO_ACCIDENT.search(reason)


def holdings(pods: Pods) -> tuple[Holding, ...]:
    """Read a kubelet's records as holdings, sorted; a container that holds nothing of a resource is left out."""
    return tuple(
        Holding(pod, container, resource, tuple(sorted(device_ids)))
        for pod, containers in sorted(pods.items())
        for container, resources in sorted(containers.items())
        for resource, device_ids in sorted(resources.items())
        if device_ids
    )


def given_twice(now: Sequence[Holding], parents: Mapping[str, str] = {}) -> list[str]:
    """Find hardware that two living pods hold, under whichever IDs and names; replicas of one GPU may be in several.

    Containers of one pod may share: init containers hand theirs on. ``parents`` names the GPUs that partitions are part of.
    """
    holders: dict[str, set[str]] = {}
    by_board: dict[str, list[str]] = {}
    for holding in now:
        for device_id in holding.device_ids:
            holders.setdefault(device_id, set()).add(holding.pod)
    for device_id in sorted(holders):
        by_board.setdefault(_place(device_id, parents).board, []).append(device_id)
    twice = [
        f"{device_id} is given to both {' and '.join(sorted(pods))}"
        for device_id, pods in sorted(holders.items())
        if len(pods) > 1
    ]
    for board, device_ids in by_board.items():
        for one, other in combinations(device_ids, 2):
            apart = are_shared(one, other) or not _place(one, parents).overlaps(_place(other, parents))
            if not apart and len(pods := holders[one] | holders[other]) > 1:
                twice.append(f"{board} is given to both {' and '.join(sorted(pods))}, as {one} and as {other}")
    return twice


def _place(device_id: str, parents: Mapping[str, str]) -> Place:
    return place_of(Device(device_id, part_of=parents.get(unshared(device_id), "")))


def broken(before: Sequence[Holding], after: Sequence[Holding], drained: Collection[str]) -> list[str]:
    """Say which promises to pods were broken between two looks; ``drained`` pods were ended on purpose.

    Each other pod must hold exactly what it held, a pod that came later may hold what it likes, and no device may be
    in two living pods.
    """
    held = {(holding.pod, holding.container, holding.resource): holding.device_ids for holding in after}
    sentences = []
    for holding in sorted(before, key=lambda one: (one.pod, one.container, one.resource)):
        if holding.pod in drained:
            continue
        now = held.get((holding.pod, holding.container, holding.resource), ())
        holds = f"it holds {', '.join(sorted(now)) or 'nothing'} now"
        sentences += [
            f"pod {holding.pod} lost {device_id}: {holds}" for device_id in holding.device_ids if device_id not in now
        ]
        sentences += [
            f"pod {holding.pod} got {device_id} unasked: {holds}"
            for device_id in now
            if device_id not in holding.device_ids
        ]
    return sentences + given_twice(after)


def unannounced(now: Sequence[Holding], announced: Mapping[str, Collection[str]]) -> list[str]:
    """Find held devices that are no longer in the gateway's list (``announced``: device IDs by resource name).

    A device that changed its ID looks like this: the pod's records still name the old one, which means nothing any more.
    """
    return [
        f"pod {holding.pod} holds {device_id}, which no longer exists: "
        f"{holding.resource} now has {', '.join(sorted(announced.get(holding.resource, ()))) or 'no devices'}"
        for holding in now
        for device_id in holding.device_ids
        if device_id not in announced.get(holding.resource, ())
    ]


def short(expected: Mapping[str, int], found: Mapping[str, int], what: str) -> list[str]:
    """Compare the counts of a node by resource name; ``what`` is ``capacity`` or ``allocatable``."""
    return [
        f"{resource}: expected {what} {count}, found {found.get(resource, 0)}"
        for resource, count in sorted(expected.items())
        if found.get(resource, 0) != count
    ]


def registered(expected: Mapping[str, Collection[int]], counted: Mapping[str, int]) -> list[str]:
    """Compare a kubelet's own count of Register calls since its start, by resource name, with what it may be."""
    return [
        f"{resource}: expected {' or '.join(map(str, sorted(expected.get(resource, {0}))))} Register, "
        f"the kubelet counted {counted.get(resource, 0)}"
        for resource in sorted({*expected, *counted} - {PROBE_RESOURCE})
        if counted.get(resource, 0) not in expected.get(resource, {0})
    ]
