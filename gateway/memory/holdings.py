"""What containers hold: by the kubelet's records, by what was handed out since, and by what the state file remembers of both."""

from __future__ import annotations

import os
import time
from itertools import chain
from typing import TYPE_CHECKING

from adapters.registry import DIALECTS
from gateway.kubelet import beliefs, view
from gateway.kubelet.drift import Earlier
from gateway.kubelet.watch import kubelet_id
from gateway.memory import again
from gateway.memory.again import RECORDED_WITHIN
from gateway.memory.ledger import boot_id
from gateway.registration.events import Phase
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from devices.model import PreferredRequest
    from gateway.kubelet.beliefs import Beliefs
    from gateway.kubelet.presence import Presence
    from gateway.kubelet.view import View
    from gateway.memory.ledger import Ledger
    from gateway.memory.rows import HandedOut
    from gateway.memory.scribe import Scribe
    from gateway.registration.registrar import Resource
    from gateway.tasks import Tasks

MOST_CHOICES = 4
"""How often devices are chosen anew, where some that were are held."""


def remembered_only(view: View, resource: str) -> Mapping[str, str]:
    """Give the UIDs of the pods that only the checkpoint names, by device ID, beside a List that doesn't."""
    if view.source != "pod-resources":
        return {}
    listed = (view.held or {}).get(resource, {})
    remembered = (view.remembered or {}).get(resource, {})
    return {one: holder.partition("/")[0] for one, holder in remembered.items() if one not in listed}


class Holdings:
    """Who holds what on this node, and what says so: the state file's ledger and the kubelet's records, for whoever asks."""

    def __init__(
        self,
        ledger: Ledger,
        scribe: Scribe,
        beliefs: Beliefs,
        presence: Presence,
        resources: Mapping[str, Resource],
        tasks: Tasks,
    ) -> None:
        self.ledger, self.scribe, self.beliefs, self.presence = ledger, scribe, beliefs, presence
        self._resources, self._tasks = resources, tasks
        self._boot_id = boot_id()
        self.let_in: Callable[[str], Awaitable[None]] | None = None
        """Waits until the kubelet would admit a pod that is given a device of a resource. With DRA on."""
        self.ended: frozenset[str] = frozenset()
        """The UIDs of pods that ended by the API server, as long as the checkpoint goes on naming them. With DRA."""

    def recorded(self, resource: str) -> dict[str, str] | None:
        """Return who holds, or may hold, what by the kubelet's records, by device ID; None where they could not be read."""
        look, holders = self.beliefs.last, self.beliefs.holders(resource)
        if look is None or holders is None or not self.ended:
            return holders
        over = {one for one, uid in remembered_only(look.view, resource).items() if uid in self.ended}
        return {one: who for one, who in holders.items() if one not in over}

    def holders(self, resource: str) -> dict[str, str] | None:
        """Return who holds what by the kubelet's records, and what was given since ('': nobody knows to whom); None where nobody knows."""
        look = self.beliefs.last
        if look is None or not self._knows_its_pods(look):
            return None
        holders = self.recorded(resource)
        unwritten = look.view.unwritten and any(one.writes_late for one in DIALECTS if one.name == self.ledger.accepted)
        if holders is None and not unwritten:
            return None
        self.note(resource)
        given = self.ledger.handed_out(resource)
        if holders is None:
            return dict.fromkeys(given, "")
        # What was given so shortly before the look that the records may not have had it counts, too.
        since = (one for one, row in given.items() if row.at >= look.unix - RECORDED_WITHIN)
        return dict.fromkeys(since, "") | holders

    def held(self, resource: str) -> AbstractSet[str] | None:
        """Return the devices that have ``holders``; None where nobody knows."""
        holders = self.holders(resource)
        return None if holders is None else holders.keys()

    def note(self, resource: str) -> None:
        """Take note of what was handed out of a resource until now."""
        if resource in self._resources:
            self._resources[resource].plugin.note_handed_out()

    def numa_nodes(self, resource: str) -> Mapping[str, tuple[int, ...]]:
        """Return the NUMA nodes of each device on a resource's list, by device ID."""
        listed = self._resources[resource].plugin.devices if resource in self._resources else ()
        return {device.id: device.numa_nodes for device in listed}

    def _knows_its_pods(self, look: beliefs.Look) -> bool:
        """Whether the kubelet had heard of its pods when it was asked, or its checkpoint could be read. How old this process is doesn't count."""
        if look.view.source != "pod-resources" or look.view.remembered is not None:
            return True
        since, kubelet = self.presence.since, kubelet_id(self.presence.socket)
        found = since is not None and look.at - since >= beliefs.AFTER_START
        return found or (kubelet is not None and look.unix - kubelet.mtime_ns / 1e9 >= beliefs.AFTER_START)

    def looked(self, look: beliefs.Look) -> None:
        """Take note of the kubelet's records, as they were just read: what was handed out is known anew."""
        if self.beliefs.waits_for_own:
            return  # The kubelet may have lost its records: the state file keeps the holders until its checkpoint shows that.
        news = False
        for name, resource in self._resources.items():
            holders = self.beliefs.holders(name)
            if holders is not None and resource.state.phase is Phase.SERVING:
                named = (look.view.held or {}).get(name, {})
                who = {device_id: named.get(device_id, "") for device_id in holders}
                news = self.ledger.rebuild_handed_out(name, who, look.unix - RECORDED_WITHIN, time.time()) or news
        served = all(one.state.phase is Phase.SERVING for one in self._resources.values())
        since = self.presence.since
        if served and look.view.held is not None and since is not None and look.at >= since:
            news = self.ledger.compared_with(self.kubelet_named()) or news
        if news:
            self.scribe.soon()

    def kubelet_named(self) -> str:
        """Name the kubelet that runs so that another process knows it again; empty where there is none."""
        one = self.presence.kubelet or kubelet_id(self.presence.socket)
        return f"{self._boot_id} {one.device}:{one.inode}:{one.mtime_ns}" if one is not None else ""

    def remember_forgotten(self, resource: str, forgotten: Mapping[str, Sequence[Earlier]]) -> None:
        """Whom the kubelet forgot is to outlive this gateway."""
        if self.ledger.set_forgotten(resource, forgotten):
            self._tasks.background(self.scribe.durable())

    def recall(self, resources: Iterable[str] | None = None, *, fresh: bool = False) -> bool:
        """Take over what the ledger remembers of resources' holders, which this gateway before its start, or another one, knew.

        ``fresh``: what this one knew of them is out of date. Returns whether other devices may still be in use than this one knew.
        """
        known, current = self.ledger.kubelet, self.kubelet_named()
        boot, _, _ = known.partition(" ")
        changed = bool(known and current) and known != current and boot == self._boot_id
        news = False
        for resource in self.ledger.resources() if resources is None else resources:
            handed_out = self.ledger.handed_out(resource) if changed else {}
            before = {
                device_id: Earlier((row.holder,) if row.holder else (), row.at) for device_id, row in handed_out.items()
            }
            earlier = self.beliefs.earlier(resource).keys()
            self.beliefs.recall(resource, self.ledger.forgotten(resource), before, fresh=fresh)
            news |= self.beliefs.earlier(resource).keys() != earlier
        return news

    def recall_all(self, served: Collection[str]) -> bool:
        """Take over what another gateway remembered: of what we ``served`` ourselves we know more, and that stays. Returns as ``recall``.

        Of all resources it counts whom the kubelet forgot: what we offer may be the same hardware, under another name.
        """
        news = [self.recall([one], fresh=one not in served) for one in self.ledger.resources()]
        return any(news)

    def accepted(self, dialect: str) -> None:
        """Remember, for the next start, which dialect the kubelet accepted."""
        if self.ledger.accept(dialect):
            self.scribe.soon()

    def memory(self, resource: str) -> Memory:
        """Return what is known and remembered of a resource's devices, beyond its list."""
        return Memory(self, resource)


class _Asked:
    """A container that is made each time it is asked for something."""

    def __init__(self, make: Callable[[], Container[str]]) -> None:
        self._make = make

    def __contains__(self, device_id: object) -> bool:
        return device_id in self._make()


class Memory:
    """What is known and remembered of one resource's devices, beyond its list (a ``serve.DeviceMemory``)."""

    def __init__(self, holdings: Holdings, resource: str) -> None:
        self._holdings, self._resource = holdings, resource
        self.asked, self._pod_resources = holdings.beliefs.asked, holdings.beliefs.pod_resources
        self._socket = os.fspath(self._pod_resources)
        self._counted: dict[str, float] = {}
        """The devices of which the kubelet knows who has them, by when they were given: they aren't in doubt."""
        self._given: dict[str, float] = {}
        """Those that were given of late, and when (unix seconds): List may have made the kubelet forget them."""
        # Looked up only when asked for: an Allocate of devices that are well needs neither.
        self.handed_out: Container[str] = _Asked(lambda: holdings.ledger.handed_out(resource))
        self.held: Container[str] = _Asked(lambda: holdings.held(resource) or ())

    async def chosen(self, request: PreferredRequest, choose: Callable[..., Awaitable[Sequence[str]]]) -> Sequence[str]:
        """Have devices chosen by which of them are to be given last, the least bad ones first.

        The worst are those that a container holds, though the kubelet takes them for free. Now is the time to ask it: it sets nothing aside
        before it has the answer, so that List makes it forget nothing.
        """
        avoid, held = self._holdings.beliefs.avoid(self._resource), frozenset(request.must_include)
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
        """Ask the kubelet whether those of them that were given, as far as it was noted, are free again.

        Raises:
            RefusedError: a container holds one, or the kubelet doesn't answer.
        """
        doubtful = self._doubtful(device_ids)
        if doubtful and (refused := again.refusal(self._resource, await self._held_still(doubtful))) is not None:
            raise refused

    def _doubtful(self, device_ids: Iterable[str]) -> dict[str, HandedOut]:
        """Name those of these that were given and aren't known to be free since; none where no kubelet can be asked."""
        if not os.access(self._socket, os.F_OK):  # It costs a fraction of what a connection does.
            return {}
        rows = self._holdings.ledger.handed_out(self._resource, device_ids)
        return {one: row for one, row in rows.items() if self._counted.get(one) != row.at}

    def _count(self, request: PreferredRequest) -> None:
        """Take note of what the kubelet doesn't offer: it knows that this is in use, and frees it only when its pod has ended."""
        if self._given:
            numa = self._holdings.numa_nodes(self._resource)
            counted = again.counted(self._given, request, numa, time.time())
            self._counted |= counted
            self._given = {one: at for one, at in self._given.items() if one not in counted}

    async def _held_still(self, rows: Mapping[str, HandedOut]) -> Mapping[str, str] | None:
        """Say which of these are held, and by whom, as the kubelet says now; None where it doesn't answer.

        Where it has no such API nobody knows.
        """
        given = again.holders(self._resource, rows, self._holdings.beliefs.last)
        if not given or not listens(self._pod_resources):
            return {}
        pods = again.pods(given.values())
        found = await view.held_by(self._pod_resources, pods) if pods else None
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
            at = time.time()
            self._holdings.ledger.hand_out(self._resource, device_ids, dialect, at)
            self._given |= dict.fromkeys(device_ids, at)
        self._holdings.scribe.soon()
        self._holdings.beliefs.allocated(self._resource, [*chain.from_iterable(together.values())])
