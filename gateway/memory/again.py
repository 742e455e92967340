"""Whether a device that a container was given may be given again: a kubelet may have forgotten who has it. Pure.

While a kubelet waits for an Allocate, its records of what is in use have the device, but no pod has it yet. Whoever calls pod-resources List
then, just after another pod ended, makes it count anew by pod (UpdateAllocatedDevices; 1.15 and later, seen on 1.20, 1.28, 1.36, 1.37): the
device is free to it from then on, also when the Allocate was answered. What its pods hold it still knows, and says: by Get, which changes
nothing, or by List. So a device that is in doubt is asked about before it is given again. It is in doubt from the Allocate that gave it on,
until a look shows that nobody holds it, or the kubelet leaves it out of what it offers in GetPreferredAllocation: then it is in the kubelet's
count of what is in use, which frees it only when its pod has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from devices.model import Fault, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from devices.model import PreferredRequest
    from gateway.kubelet.beliefs import Look
    from gateway.memory.rows import HandedOut

RECORDED_WITHIN: Final = 1.5
"""Seconds that a kubelet is given to note what Allocate answered: its records of before that don't end a hand-out."""
MOST_PODS: Final = 8
"""How many pods are asked about by name: a kubelet answers 10 requests at once (100 a second)."""


def holders(resource: str, given: Mapping[str, HandedOut], look: Look | None) -> dict[str, str]:
    """Say which of these devices may be held still, and in which pod (``namespace/pod``; '': nobody knows its name).

    Args:
        resource: the resource name.
        given: when each was given, and to whom as far as that was seen.
        look: the last look into the kubelet's records.
    """
    listed = look if look is not None and look.view.source == "pod-resources" else None
    held = {} if listed is None else (listed.view.held or {}).get(resource, {})
    found = {}
    for one, row in given.items():
        if listed is None or listed.unix < row.at:
            found[one] = _pod(row.holder)
        elif one in held or listed.unix < row.at + RECORDED_WITHIN:
            found[one] = _pod(held.get(one, ""))
    return found


def counted(
    given: Mapping[str, float], request: PreferredRequest, numa: Mapping[str, tuple[int, ...]], now: float
) -> dict[str, float]:
    """Return those of the given devices that the kubelet counts as in use, and when they were given.

    A kubelet with a topology manager offers the devices of some NUMA nodes only, so that a device it leaves out counts only if it offers
    another one of the same nodes.

    Args:
        given: when devices were given (unix seconds).
        request: what the kubelet offers.
        numa: the NUMA nodes of each listed device.
        now: unix seconds; the kubelet may not have noted yet what was given within ``RECORDED_WITHIN``.
    """
    offered = frozenset((*request.available, *request.must_include))
    nodes = {numa.get(one) for one in request.available}
    return {
        one: at
        for one, at in given.items()
        if one not in offered and one in numa and numa[one] in nodes and at <= now - RECORDED_WITHIN
    }


def _pod(holder: str) -> str:
    """Name the pod of a holder; a checkpoint has only the pod's UID, by which it can't be asked for."""
    pod = holder.rpartition("/")[0]
    return pod if "/" in pod else ""


def pods(given: Iterable[str]) -> frozenset[str]:
    """Say which pods to ask about; none where only List tells about all of them."""
    names = frozenset(given)
    return names if "" not in names and len(names) <= MOST_PODS else frozenset()


def refusal(resource: str, held: Mapping[str, str] | None) -> RefusedError | None:
    """Say whether devices that were given may not be given again now.

    A refusal makes the kubelet count anew, and so right: the next pod gets another device.

    Args:
        resource: the resource name.
        held: which of them containers hold, and who, as the kubelet says now; None: it doesn't answer. Init containers, whose devices the
            next one of their pod may have, are not among them.
    """
    if held is None:
        return RefusedError(
            Fault.UNAVAILABLE,
            f"expected the kubelet's pod-resources API to say whether a device of {resource} is free that a container was given, and it "
            "doesn't answer: the kubelet may have forgotten that container; see why its socket doesn't answer",
        )
    if not held:
        return None
    first = min(held)
    return RefusedError(
        Fault.FAILED_PRECONDITION,
        f"expected a device that nobody holds, but {first!r} of {resource} is {held[first]}'s: the kubelet forgot that when its "
        "pod-resources API was read while it waited for an Allocate; it knows again now, so the next pod gets another device",
    )
