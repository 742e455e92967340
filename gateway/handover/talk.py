"""Handover: carries out what ``handover.machine`` decides, over the control sockets of the gateways on a node.

The newer one connects to each older gateway's control socket, once, and both keep the connection as long as both live: it is
the lease of every resource. ``gateway.handover.message`` is what goes over it.

Whether a resource stands by is decided in one place, ``handover.peers``: ``Holder.look`` makes it ask ``defers_to`` first, and for
peers that ``decides`` disowns (another state directory, an older release) go by age alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from gateway.age import Age
from gateway.handover import machine, message
from gateway.handover.events import (
    Action,
    Event,
    HandoverOutcome,
    Heard,
    Note,
    RegisterAgain,
    Say,
    SetWait,
    Standing,
    Stood,
    Tell,
    Unserved,
    WaitOver,
    Wanted,
)
from gateway.handover.machine import DEFERRING, Newer, Older, State
from gateway.handover.partner import MAX_RESOURCES, Partner, Rests, remember
from gateway.tasks import Background
from gateway.wires import control
from gateway.wires.control import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from adapters.dialect import Level
    from gateway.wires.control import ControlConnection

CONNECT_TIME: Final = 1.0
"""Seconds that an older one's socket is given to take our connection. The kernel does that for it, at once, so that what takes
time is only ever our own loop."""
GRACE: Final = 0.25
"""Seconds that a newer gateway which has a control socket is given to ask, before age alone decides."""
FAREWELL: Final = 0.2
"""Seconds that the last words are given when the gateway ends."""
MAX_PARTNERS: Final = 16
HANDED_OVER_WAIT = 0.002
"""Seconds between an older one's word that its streams have ended and our Register: for the same reason as
``registration.machine.CUT_WAIT``, but that word was a millisecond on its way. A kubelet (1.25 to 1.36) that reports the end later still may
stop our endpoint between its connection and our list: that is seen at the last of ``VERIFY_AFTER``, and until then Allocate fails."""
_log = structlog.get_logger()


class Holder(Protocol):
    """What a handover must know of this gateway's own registrations, and the one thing that it asks for."""

    def names(self) -> Collection[str]:
        """The resources that this gateway has."""

    def standing(self, resource: str) -> Standing:
        """Where the registration of one of them stands."""

    def level(self, resource: str) -> Level | None:
        """The kubelets that fit the evidence of its live stream; None without one."""

    def kubelet_listens(self) -> bool:
        """Whether a kubelet takes connections now."""

    def leaves(self, resource: str) -> bool:
        """Whether one of them would be left to a newer gateway that doesn't talk, were it not for those that do.

        Got back from those, nobody would serve it: so it isn't asked for.
        """

    def renew(self, resource: str) -> None:
        """Register one of them once more."""

    def look(self) -> None:
        """Let each resource stand by or resume, by ``Handover.defers_to`` and the peers it doesn't decide about."""


class Waits:
    """What is waited for of the others, by the stages of all handovers."""

    def __init__(self) -> None:
        self.answered, self._kept = asyncio.Event(), asyncio.Event()
        self._kept.set()

    def saw(self, stages: Collection[Older | Newer]) -> None:
        """Take notice of all stages: whether each ask was answered, and no newer gateway is still to register first."""
        for event, unless in ((self.answered, Newer.ASKING), (self._kept, Older.PROMISED)):
            if unless in stages:
                event.clear()
            else:
                event.set()

    async def keep_promises(self) -> None:
        """Wait until who registers first serves, for ``machine.REPORT_WAIT`` at most. Call it before the registrations end.

        Or the kubelet would have nothing to give while that Register is in flight.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(machine.REPORT_WAIT):
                await self._kept.wait()


class Handover:
    """All handovers of this gateway, with older and with newer ones.

    ``count`` takes our side ("older" or "newer") and the outcome (a ``HandoverOutcome`` in words) of each handover.
    """

    def __init__(self, age: Age, state_dir: Path, holder: Holder, count: Callable[[str, str], None]) -> None:
        self._age, self._state_dir, self._holder, self._count = age, state_dir, holder, count
        self._partners: dict[str, Partner] = {}
        self._first_seen: dict[str, float] = {}
        self._rests = Rests()
        self._events: deque[Callable[[], None]] = deque()
        self._deferring: dict[str, Age | None] = {}
        self._running = self._closed = False
        self.register_at = 0.0
        """Monotonic seconds: no Register before the kubelet is done with the streams that were ended for us."""
        self.waits = Waits()
        self._taking = asyncio.Lock()
        self._tasks = Background()

    # For the daemon.

    async def take_over(self, peers: Iterable[Age]) -> bool:
        """Ask the older gateways for each resource that they were not asked for yet; tell whether there was any.

        Returns when each was answered, or ``machine.ANSWER_WAIT`` is over. What was handed over may be registered a
        moment later (kubelets 1.25 to 1.36 disconnect whoever is registered right after a stream's end); the rest stands by (``defers_to``). Call it before this gateway is seen by the others, when one appears
        that is older, and when a resource is new.
        """
        async with self._taking:
            if not self._closed and self._holder.names():
                await asyncio.gather(*(self._meet(peer) for peer in list(self._strangers(peers))))
            if not self._ask():
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * machine.ANSWER_WAIT):
                    await self.waits.answered.wait()
            self.register_at = time.monotonic() + HANDED_OVER_WAIT
            return True

    async def serve(self, connection: ControlConnection, request: Mapping[str, Any]) -> None:
        """Hand over to a newer gateway: the control server's handler of ``OP``. Returns when the lease is over.

        Raises:
            ControlError: there is nothing to talk about with this one.
        """
        age = message.sender(request)
        if age is None or age <= self._age:
            raise ControlError(
                f"expected the age of a gateway newer than {self._age}, got {ascii(age or request)[:80]}"
            )
        if (before := self._partners.get(age.token)) is not None:
            self._part(before)
        if self._closed or len(self._partners) >= MAX_PARTNERS:
            raise ControlError(
                "expected one of few gateways to talk about handovers, and this one ends or talks to as many as it can: go on without it"
            )
        partner = self._partners[age.token] = Partner(age, connection)
        await self._converse(partner, request)

    def changed(self, resource: str) -> None:
        """Take notice that a resource's standing may have changed: call it after each event of its registration."""
        for partner, state in _of(self._partners, resource):
            if state.standing is not self._standing(resource):
                self._feed(partner, resource, Stood(self._standing(resource)))

    def unserved(self, resource: str) -> None:
        """Take notice that the kubelet's records lack what a partner is to serve."""
        for partner, _ in _of(self._partners, resource):  # All at once: whatever one of them says, none of them serves.
            self._feed(partner, resource, Unserved())

    def defers_to(self, resource: str) -> Age | None:
        """Return the gateway for which the resource is to stand by; None while its own Register is in flight, too."""
        if self._standing(resource) is Standing.BUSY:
            return None
        return max((one.age for one, state in _of(self._partners, resource) if state.stage in DEFERRING), default=None)

    @property
    def talks(self) -> bool:
        """Whether there is a gateway that we talk to."""
        return bool(self._partners)

    def talks_to(self, peer: Age) -> bool:
        """Whether a conversation with a gateway is open."""
        return peer.token in self._partners

    def decides(self, peer: Age, resource: str) -> bool:
        """Tell whether what ``peer`` serves is settled here, not by age alone.

        It is while both talk. And a newer gateway that could, has ``GRACE`` seconds to begin, before a resource that
        we serve is yielded without a word.
        """
        if peer.token in self._partners:
            return True
        both = (control.socket_path(self._state_dir, age.token) for age in (peer, self._age))
        idle = self._standing(resource) in {Standing.IDLE, Standing.OUT, Standing.REFUSED}
        if idle or self._closed or peer < self._age or not all(path.exists() for path in both):
            return False
        loop = asyncio.get_running_loop()
        if peer.token not in self._first_seen:
            remember(self._first_seen, peer, loop.time())
            loop.call_later(GRACE, self._look)
        return loop.time() < self._first_seen[peer.token] + GRACE

    def part(self, token: str) -> None:
        """End the lease of a gateway that is dying, before the kernel ends the connection."""
        if (partner := self._partners.get(token)) is not None:
            self._part(partner)

    async def close(self) -> None:
        """Say what is left to say, and end every lease. Call it when the registrations have ended. Never raises."""
        self._closed = True
        partners = list(self._partners.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await asyncio.gather(*(partner.quiet.wait() for partner in partners))
        for partner in partners:
            self._part(partner)
        await self._tasks.close()

    # Conversations.

    def _strangers(self, peers: Iterable[Age]) -> Iterable[Age]:
        """Choose the older gateways that are to be spoken to now."""
        now, room = time.monotonic(), MAX_PARTNERS - len(self._partners)
        for peer in sorted(peers, reverse=True):
            known = peer.token in self._partners
            if peer < self._age and not known and room > 0 and self._rests.over(peer, now):
                room -= 1
                yield peer

    async def _meet(self, older: Age) -> None:
        try:
            connection = await control.connect(control.socket_path(self._state_dir, older.token), CONNECT_TIME)
        except ControlError as error:
            self._rest(older)
            _log.info(
                "an older gateway can't be talked to: the newer one serves, as age alone says",
                peer=older.token,
                reason=str(error),
            )
            return
        partner = self._partners[older.token] = Partner(older, connection)
        self._tasks.background(self._converse(partner, None))

    async def _converse(self, partner: Partner, first: Mapping[str, Any] | None) -> None:
        """Listen to a partner until it goes, or says what can't be; send what there is to say."""
        remember(self._first_seen, partner.age, float("-inf"))
        writing = asyncio.ensure_future(partner.write(self._age))
        try:
            if first is not None and not self._hear(partner, first):
                return
            while (said := await partner.connection.receive()) is not None:
                if not self._hear(partner, said):
                    return
        finally:
            writing.cancel()
            self._part(partner)

    def _hear(self, partner: Partner, said: Mapping[str, Any]) -> bool:
        """Take one message. False ends the conversation."""
        try:
            heard = message.read(said)
            if heard is None:
                return True
            say, resources = heard
            partner.take_in(resources)
        except message.NonsenseError as error:
            _log.warning(str(error), peer=partner.age.token, said=ascii(said)[:200])
            return False
        late = say is Say.ASK and not message.in_time(said)
        for resource in resources:
            self._rests.forget(partner.age)  # It talks.
            if resource not in partner.states:
                if partner.age < self._age:  # An older one answers; it doesn't begin.
                    continue
                partner.states[resource] = machine.older(self._standing(resource))
            self._feed(partner, resource, self._event(partner, resource, say, late=late))
        return True

    def _event(self, partner: Partner, resource: str, say: Say, *, late: bool) -> Event:
        if say is not Say.ASK:
            return Heard(say, soon=say is Say.REVOKE and self._asks_newer(resource))
        level = self._holder.level(resource) if self._standing(resource) is Standing.SERVING else None
        first = machine.register_first(level, late=late)
        return Wanted(first, self._could_serve(partner, resource))

    def _asks_newer(self, resource: str) -> bool:
        """Ask the newer ones that we stand by for, since an older one asks us; tell whether we wait for the answer of any."""
        for partner, state in _of(self._partners, resource):
            if state.stage is Older.CONFIRMED and not state.doubted:
                self._feed(partner, resource, Unserved())
        return any(state.stage is Older.CHECKING and state.doubted for _, state in _of(self._partners, resource))

    def _part(self, partner: Partner) -> None:
        """End the leases that hang on this connection. What serves now, and who, ``Holder.look`` says anew."""
        if partner.gone:
            return
        partner.gone = True
        partner.connection.close()
        for timer in partner.timers.values():
            timer.cancel()
        del self._partners[partner.age.token]
        self._rest(partner.age)
        for resource, state in partner.states.items():
            if state.unsettled:
                self._note(partner, resource, HandoverOutcome.LOST)
        self._events.append(self._look)  # And once more below: who was killed may hold its lock for a moment yet.
        self._run()

    def _rest(self, peer: Age) -> None:
        """Leave a gateway in peace for a while, and look then whether it can be spoken to."""
        seconds = self._rests.begin(peer, time.monotonic())
        asyncio.get_running_loop().call_later(seconds + 0.1, self._look)

    # What the machines decide.

    def _ask(self) -> bool:
        """Begin with each older one for each resource that is new to it; tell whether there was any."""
        asked = False
        for partner in self._partners.values():
            if partner.age > self._age:
                continue
            for resource in sorted(set(self._holder.names()) - set(partner.states))[
                : MAX_RESOURCES - len(partner.states)
            ]:
                partner.states[resource], actions = machine.newer(self._standing(resource))
                self._act(partner, resource, actions)
                asked = True
        self._run()
        return asked

    def _standing(self, resource: str) -> Standing:
        return self._holder.standing(resource) if resource in self._holder.names() else Standing.IDLE

    def _feed(self, partner: Partner, resource: str, event: Event) -> None:
        """Let one machine take an event, after those that are waiting; what it causes may cause others."""
        self._events.append(lambda: self._step(partner, resource, event))
        self._run()

    def _run(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while True:
                while self._events:
                    self._events.popleft()()
                deferring = {resource: self.defers_to(resource) for resource in self._holder.names()}
                if deferring == self._deferring:
                    break
                self._deferring = deferring
                self._look()
        finally:
            self._running = False
        self.waits.saw({state.stage for partner in self._partners.values() for state in partner.states.values()})

    def _look(self) -> None:
        if not self._closed:
            self._holder.look()

    def _step(self, partner: Partner, resource: str, event: Event) -> None:
        if not partner.gone:
            partner.states[resource], actions = machine.step(partner.states[resource], event)
            self._act(partner, resource, actions)

    def _act(self, partner: Partner, resource: str, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Tell(say):
                    partner.say(say, resource)
                case SetWait(seconds):
                    if (timer := partner.timers.pop(resource, None)) is not None:
                        timer.cancel()
                    if seconds is not None:
                        loop = asyncio.get_running_loop()
                        partner.timers[resource] = loop.call_later(seconds, self._fire, partner, resource)
                case Note(outcome):
                    self._note(partner, resource, outcome)
                case RegisterAgain():
                    self._holder.renew(resource)

    def _fire(self, partner: Partner, resource: str) -> None:
        resting = [one for one, state in _of(self._partners, resource) if state.stage is Newer.RESTING]
        could = self._could_serve(partner, resource) and not (partner in resting and self._holder.leaves(resource))
        # All at once: what one gives us is of no use while another one keeps it.
        for one in resting if could and partner in resting else (partner,):
            self._feed(one, resource, WaitOver(could))

    def _could_serve(self, partner: Partner, resource: str) -> bool:
        """Whether only this partner keeps us from serving."""
        others = [state for other, state in _of(self._partners, resource) if other is not partner]
        kubelet = resource in self._holder.names() and self._holder.kubelet_listens()
        return machine.could_serve(partner.states[resource], others, kubelet=kubelet)

    def _note(self, partner: Partner, resource: str, outcome: HandoverOutcome) -> None:
        side = "newer" if partner.age < self._age else "older"
        self._count(side, outcome.value)
        _log.info("handover", side=side, outcome=outcome.value, resource=resource, peer=partner.age.token)


def _of(partners: Mapping[str, Partner], resource: str) -> list[tuple[Partner, State]]:
    """Give those with whom a resource was talked about, and where it stands."""
    return [(one, one.states[resource]) for one in partners.values() if resource in one.states]
