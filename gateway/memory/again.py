"""Check that a device is free before it is given again, because the kubelet may have forgotten who holds it.

While a kubelet waits for an Allocate, its records of devices in use have the device, but no pod has it yet. If somebody calls
pod-resources List just after another pod ended, the kubelet counts again by pod (UpdateAllocatedDevices; 1.15 and later, seen
on 1.20, 1.28, 1.36, 1.37). Then it considers the device as free, even after the Allocate was answered. But it still knows what
its pods hold, and reports it by Get, which changes nothing, or by List. So the gateway asks about a device in doubt before it
gives the device again. A device is in doubt from the Allocate that gave it until a look shows that no pod holds it, or until
the kubelet leaves it out of the devices that it offers in GetPreferredAllocation. Then the kubelet counts it as in use, and
frees it only when its pod has ended.
"""

from __future__ import annotations

import os
import time
from itertools import chain
from typing import TYPE_CHECKING, Final

from devices.model import Fault, RefusedError
from gateway.kubelet import records
from gateway.kubelet.earlier import RECORDED_WITHIN
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence

    from devices.model import PreferredRequest
    from gateway.kubelet.earlier import HandedOut
    from gateway.kubelet.reader import Look
    from gateway.memory.holdings import Holdings

MOST_PODS: Final = 8
"""Most pods to ask about by name: a kubelet answers 10 requests at once (100 a second)."""
MOST_CHOICES: Final = 4
"""Most choices for one request, if some of the chosen devices are held."""


def holders(resource: str, given: Mapping[str, HandedOut], look: Look | None) -> dict[str, str]:
    """Return which of these devices may still be held, and by which pod (``namespace/pod``; empty if its name is unknown).

    Args:
        resource: the resource name.
        given: when each device was given, and its holder as far as a look showed it.
        look: the last look into the kubelet's records.
    """
    listed = look if look is not None and look.records.source == "pod-resources" else None
    held = {} if listed is None else (listed.records.held or {}).get(resource, {})
    found = {}
    for one, row in given.items():
        if listed is None or listed.unix < row.at:
            found[one] = _pod(row.names)
        elif one in held or listed.unix < row.at + RECORDED_WITHIN:
            found[one] = _pod((held.get(one, ""),))
    return found


def counted(
    given: Mapping[str, float], request: PreferredRequest, numa: Mapping[str, tuple[int, ...]], now: float
) -> frozenset[str]:
    """Return the given devices that the kubelet counts as in use.

    A kubelet with a topology manager offers the devices of some NUMA nodes only. So a device that it leaves out counts only if it
    offers another one of the same nodes.

    Args:
        given: when devices were given (Unix seconds).
        request: what the kubelet offers.
        numa: the NUMA nodes of each listed device.
        now: Unix seconds. The kubelet may not have recorded yet what was given within ``RECORDED_WITHIN``.
    """
    offered = frozenset((*request.available, *request.must_include))
    nodes = {numa.get(one) for one in request.available}
    return frozenset(
        one
        for one, at in given.items()
        if one not in offered and one in numa and numa[one] in nodes and at <= now - RECORDED_WITHIN
    )


def _pod(names: Sequence[str]) -> str:
    """Return the pod of a holder; empty if only its UID is known (from a checkpoint), because Get needs a name."""
    pod = names[0].rpartition("/")[0] if names else ""
    return pod if "/" in pod else ""


def pods(given: Iterable[str]) -> frozenset[str]:
    """Return the pods to ask about by Get; empty if List is needed."""
    names = frozenset(given)
    return names if "" not in names and len(names) <= MOST_PODS else frozenset()


def refusal(resource: str, held: Mapping[str, str] | None) -> RefusedError | None:
    """Return why devices that were given may not be given again now; None if they may.

    A refusal makes the kubelet count again, and so correctly: the next pod gets another device.

    Args:
        resource: the resource name.
        held: which of them containers hold, and the holders, as the kubelet reports now; None: it doesn't answer. Devices of init
            containers are not in it, because the next container of their pod may have them.
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
    """What is known of one resource's devices in addition to its list (a ``serve.DeviceMemory``)."""

    def __init__(self, holdings: Holdings, resource: str) -> None:
        self._holdings, self._resource = holdings, resource
        self.asked, self._pod_resources = holdings.reader.asked, holdings.reader.pod_resources
        self._socket = os.fspath(self._pod_resources)

    @property
    def handed_out(self) -> Container[str]:
        """The devices that containers were given, by the state file."""
        return self._holdings.ledger.handed_out(self._resource)

    @property
    def held(self) -> Container[str]:
        """The devices that containers hold, as far as it is known."""
        return self._holdings.holders(self._resource, forgotten=False) or ()

    async def chosen(self, request: PreferredRequest, choose: Callable[..., Awaitable[Sequence[str]]]) -> Sequence[str]:
        """Have devices chosen, with the devices to give last as the argument, the least bad ones first.

        The worst are devices that a container holds although the kubelet considers them as free. The kubelet can be asked now: it sets
        nothing aside before it has the response, so List makes it forget nothing.
        """
        avoid, held = self._holdings.reader.avoid(self._resource), frozenset(request.must_include)
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
        """Wait until the kubelet would admit a pod that gets a device."""
        if self._holdings.let_in is not None:
            await self._holdings.let_in(self._resource)

    async def require_free(self, device_ids: Iterable[str]) -> None:
        """Check with the kubelet that those of these devices that were given are free again.

        Raises:
            RefusedError: a container holds one, or the kubelet doesn't answer.
        """
        doubtful = self._doubtful(device_ids)
        if doubtful and (refused := refusal(self._resource, await self._held_still(doubtful))) is not None:
            raise refused

    def _doubtful(self, device_ids: Iterable[str] | None = None) -> dict[str, HandedOut]:
        """Return the devices in doubt, of these or of all; empty if no kubelet can be asked."""
        if not os.access(self._socket, os.F_OK):  # Much faster than a connection.
            return {}
        rows = self._holdings.ledger.handed_out(self._resource)
        among = rows if device_ids is None else device_ids
        return {one: row for one in among if (row := rows.get(one)) is not None and not row.counted}

    def _count(self, request: PreferredRequest) -> None:
        """Note which devices the kubelet does not offer: it counts them as in use until their pods have ended."""
        if given := {one: row.at for one, row in self._doubtful().items()}:
            self._note(counted(given, request, self._holdings.numa_nodes(self._resource), time.time()))

    def _note(self, device_ids: Iterable[str]) -> None:
        if self._holdings.ledger.set_counted(self._resource, device_ids):
            self._holdings.scribe.soon()

    async def _held_still(self, rows: Mapping[str, HandedOut]) -> Mapping[str, str] | None:
        """Return which of these devices are held, and the holders, as the kubelet reports now; None if it does not answer."""
        given = holders(self._resource, rows, self._holdings.reader.last)
        if not given or not listens(self._pod_resources):
            return {}
        names = pods(given.values())
        found = await records.held_by(self._pod_resources, names) if names else None
        if found is None:
            found = await records.held(self._pod_resources)
        if found is None:
            return None
        held = {one: holder for one, holder in found.get(self._resource, {}).items() if one in given}
        # Another Allocate may have given one meanwhile.
        now = self._holdings.ledger.handed_out(self._resource)
        self._note(one for one in given.keys() - held.keys() if one in now and now[one].at == rows[one].at)
        return held

    def hand_out(self, given: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Note that containers were given devices: the dialect, and the devices of each container."""
        together: dict[str, list[str]] = {}
        for dialect, device_ids in given:
            together.setdefault(dialect, []).extend(device_ids)
        for dialect, device_ids in together.items():
            self._holdings.ledger.hand_out(self._resource, device_ids, dialect, time.time())
        self._holdings.scribe.soon()
        self._holdings.reader.allocated(self._resource, [*chain.from_iterable(together.values())])
