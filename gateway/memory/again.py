"""Whether a device that a container was given may be given again: a kubelet may have forgotten who has it.

While a kubelet waits for an Allocate, its records of what is in use have the device, but no pod has it yet. Whoever calls pod-resources List
then, just after another pod ended, makes it count anew by pod (UpdateAllocatedDevices; 1.15 and later, seen on 1.20, 1.28, 1.36, 1.37): the
device is free to it from then on, also when the Allocate was answered. What its pods hold it still knows, and says: by Get, which changes
nothing, or by List. So a device that is in doubt is asked about before it is given again. It is in doubt from the Allocate that gave it on,
until a look shows that nobody holds it, or the kubelet leaves it out of what it offers in GetPreferredAllocation: then it is in the kubelet's
count of what is in use, which frees it only when its pod has ended.
"""

from __future__ import annotations

import os
import time
from itertools import chain
from typing import TYPE_CHECKING, Final

from devices.model import Fault, RefusedError
from gateway.kubelet import view
from gateway.memory.holdings import RECORDED_WITHIN
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence

    from devices.model import PreferredRequest
    from gateway.kubelet.beliefs import Look
    from gateway.memory.holdings import Holdings
    from gateway.memory.rows import HandedOut

MOST_PODS: Final = 8
"""How many pods are asked about by name: a kubelet answers 10 requests at once (100 a second)."""
MOST_CHOICES: Final = 4
"""How often devices are chosen again because some of those that were chosen are held."""


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
            "the kubelet's pod-resources API does not answer, so it is not known if a device of "
            f"{resource} that a container was given is free. See why its socket doesn't answer",
        )
    if not held:
        return None
    first = min(held)
    return RefusedError(
        Fault.FAILED_PRECONDITION,
        f"{held[first]} holds {first!r} of {resource}. The kubelet forgot that when its "
        "pod-resources API was read while it waited for an Allocate. It knows again now, so the "
        "next pod gets another device",
    )


class Memory:
    """What is known and remembered of one resource's devices, beyond its list (a ``serve.DeviceMemory``)."""

    def __init__(self, holdings: Holdings, resource: str) -> None:
        self._holdings, self._resource = holdings, resource
        self.asked, self._pod_resources = holdings.beliefs.asked, holdings.beliefs.pod_resources
        self._socket = os.fspath(self._pod_resources)
        self._counted: dict[str, float] = {}
        """The devices of which the kubelet knows who has them, by when they were given: they aren't in doubt."""

    @property
    def handed_out(self) -> Container[str]:
        """The devices that were given to containers, as far as the state file has them."""
        return self._holdings.ledger.handed_out(self._resource)

    @property
    def held(self) -> Container[str]:
        """The devices that containers hold, as far as it is known."""
        return self._holdings.holders(self._resource, forgotten=False) or ()

    async def chosen(self, request: PreferredRequest, choose: Callable[..., Awaitable[Sequence[str]]]) -> Sequence[str]:
        """Have devices chosen by which of them are to be given last, the least bad ones first.

        The worst are those that a container holds, though the kubelet takes them for free. Now is the time to ask it: it sets nothing aside
        before it has the answer, so that List makes it forget nothing.
        """
        avoid, held = (
            self._holdings.beliefs.drift(self._resource).avoid(time.monotonic()),
            frozenset(request.must_include),
        )
        chosen = await choose(avoid)
        self._holdings.note(self._resource)
        self._count(request)
        for _ in range(MOST_CHOICES):
            doubtful = self._doubtful(one for one in chosen if one not in held)
            if not (doubtful and (more := await self._held_still(doubtful))):
                break
            held |= more.keys()
            chosen = await choose((*(one for one in avoid if one not in held), *sorted(held)))
        return chosen

    async def let_in(self) -> None:
        """Wait until the kubelet would admit a pod that is given a device."""
        if self._holdings.let_in is not None:
            await self._holdings.let_in(self._resource)

    async def require_free(self, device_ids: Iterable[str]) -> None:
        """Ask the kubelet whether those of these devices that were given are free again.

        Raises:
            RefusedError: a container holds one, or the kubelet doesn't answer.
        """
        doubtful = self._doubtful(device_ids)
        if doubtful and (refused := refusal(self._resource, await self._held_still(doubtful))) is not None:
            raise refused

    def _doubtful(self, device_ids: Iterable[str] | None = None) -> dict[str, HandedOut]:
        """Return the devices, of these or of all, that were given and aren't known to be free since; none if no kubelet can be asked."""
        if not os.access(self._socket, os.F_OK):  # It costs a fraction of what a connection does.
            return {}
        rows = self._holdings.ledger.handed_out(self._resource, device_ids)
        return {one: row for one, row in rows.items() if self._counted.get(one) != row.at}

    def _count(self, request: PreferredRequest) -> None:
        """Take note of what the kubelet doesn't offer: it knows that this is in use, and frees it only when its pod has ended."""
        if given := {one: row.at for one, row in self._doubtful().items()}:
            self._counted |= counted(given, request, self._holdings.numa_nodes(self._resource), time.time())

    async def _held_still(self, rows: Mapping[str, HandedOut]) -> Mapping[str, str] | None:
        """Return which of these are held, and by whom, as the kubelet says now; None if it doesn't answer, nothing if it has no such API."""
        given = holders(self._resource, rows, self._holdings.beliefs.last)
        if not given or not listens(self._pod_resources):
            return {}
        names = pods(given.values())
        found = await view.held_by(self._pod_resources, names) if names else None
        if found is None:
            found = await view.held(self._pod_resources)
        if found is None:
            return None
        held = {one: holder for one, holder in found.get(self._resource, {}).items() if one in given}
        self._counted |= {one: rows[one].at for one in given.keys() - held.keys()}
        return held

    def hand_out(self, given: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Take note that containers were given devices: by which dialect, and which, one container after another."""
        together: dict[str, list[str]] = {}
        for dialect, device_ids in given:
            together.setdefault(dialect, []).extend(device_ids)
        for dialect, device_ids in together.items():
            self._holdings.ledger.hand_out(self._resource, device_ids, dialect, time.time())
        self._holdings.scribe.soon()
        self._holdings.beliefs.allocated(self._resource, [*chain.from_iterable(together.values())])
