"""What two gateways say to each other, under simulated time: ``gateway.handover.talk`` call by call, for one resource."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from gateway.age import Age
from gateway.handover import machine
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
from gateway.lab.simulation.clock import Timer, stop
from gateway.registration import events

if TYPE_CHECKING:
    from gateway.lab.simulation.gateway import Gateway

ASK_TIME, GRACE, AGAIN, AGAIN_MOST, FAREWELL = 0.15, 0.25, 5.0, 320.0, 0.2
"""As in ``gateway.handover.talk``, in seconds."""
_IDLE: Final = (Standing.IDLE, Standing.OUT, Standing.REFUSED)
_SETTLE_STEPS: Final = 50
"""How often in a row a decision may change the next one: more is going round."""


class Partner:
    """One end of a conversation."""

    def __init__(self, age: Age) -> None:
        self.age = age
        self.far: tuple[Gateway, Partner] | None = None
        """The other end, and whose it is."""
        self.state: State | None = None
        self.timer: Timer | None = None
        self.gone = False
        self.last = 0.0
        """When the last message arrives at the other end: messages keep their order."""


class Handover:
    """All conversations of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._clock = gateway, gateway.clock
        self.partners: dict[Age, Partner] = {}
        self.asked = False
        self._first_seen: dict[Age, float] = {}
        self._not_before: dict[Age, float] = {}
        self._rests: dict[Age, float] = {}
        self._events: deque[Callable[[], None]] = deque()
        self._deferring: Age | None = None
        self._running = self._closed = False
        self._answered: list[Callable[[], None]] = []

    # For the gateway.

    def take_over(self, peers: Iterable[Age], then: Callable[[], None] | None = None) -> None:
        """Ask the older gateways; ``then`` is called when they answered, or didn't in time."""
        self.asked = True
        gateway = self._gateway
        if not self._closed and gateway.bound:
            for peer in peers:
                far = gateway.node.by_age(peer)
                stranger = peer < gateway.age and peer not in self.partners and gateway.talks
                if stranger and far is not None and far.talks and self._not_before.get(peer, 0.0) <= self._clock.now:
                    self._meet(peer, far)
        asked = False
        for partner in [*self.partners.values()]:
            if partner.age < gateway.age and partner.state is None and gateway.bound:
                partner.state, actions = machine.newer(gateway.plugin.standing)
                self._act(partner, actions)
                asked = True
        self._run()
        if then is None:
            return
        if not asked or not self._asking:
            gateway.later(0.0, then)
            return
        self._answered.append(then)
        gateway.later(2 * machine.ANSWER_WAIT, self._give_up_asking, then)

    def _give_up_asking(self, then: Callable[[], None]) -> None:
        if then in self._answered:
            self._answered.remove(then)
            then()

    def changed(self) -> None:
        """Take notice that our standing may have changed."""
        for partner in [*self.partners.values()]:
            stands = self._gateway.plugin.standing
            if partner.state is not None and partner.state.standing is not stands:
                self._feed(partner, Stood(stands))

    def unserved(self) -> None:
        """Take notice that the kubelet's records lack what a partner is to serve."""
        for partner in [*self.partners.values()]:
            if partner.state is not None:
                self._feed(partner, Unserved())

    def defers_to(self) -> Age | None:
        """Return the gateway that is to serve instead."""
        if not self.partners:
            return None
        to = None
        for age, one in self.partners.items():
            if one.state is not None and one.state.stage in DEFERRING and (to is None or age > to):
                to = age
        return to if to is not None and self._gateway.plugin.standing is not Standing.BUSY else None

    def decides(self, peer: Age) -> bool:
        """Tell whether what ``peer`` serves is settled here, not by age alone."""
        gateway = self._gateway
        if peer in self.partners:
            return True
        far = gateway.node.by_age(peer)
        both = gateway.talks and far is not None and far.talks
        if self._closed or peer < gateway.age or not both or gateway.plugin.standing in _IDLE:
            return False
        if peer not in self._first_seen:
            self._first_seen[peer] = self._clock.now
            gateway.later(GRACE + 0.001, self._look)
        return self._clock.now < self._first_seen[peer] + GRACE

    def close(self) -> None:
        """End every lease, after what is left to say is said."""
        self._closed = True
        for partner in [*self.partners.values()]:
            self._part(partner)

    def died(self) -> None:
        """The process is dead: the kernel ends its connections."""
        self._closed = True
        for partner in [*self.partners.values()]:
            partner.gone = True
            self._hang_up(partner)
            partner.far = partner.timer = None
        self.partners.clear()

    # Conversations.

    def _meet(self, peer: Age, far: Gateway) -> None:
        partner = self.partners[peer] = Partner(peer)
        self._first_seen[peer] = float("-inf")
        other = Partner(self._gateway.age)
        partner.far, other.far = (far, other), (self._gateway, partner)
        partner.last = self._clock.now + self._clock.latency()
        far.later(partner.last - self._clock.now, far.handover._met, other)  # noqa: SLF001 - its other half

    def _met(self, partner: Partner) -> None:
        if partner.gone:
            return
        before = self.partners.get(partner.age)
        if before is not None:
            self._part(before)
        if self._closed:
            self._hang_up(partner)
            return
        self.partners[partner.age] = partner
        self._first_seen[partner.age] = float("-inf")

    def _say(self, partner: Partner, say: Say) -> None:
        if partner.far is None:
            return
        far, other = partner.far
        partner.last = max(partner.last, self._clock.now + self._clock.latency() * 0.5)
        until = self._clock.now + ASK_TIME
        self._clock.tell(self._gateway.label, "says", say, "to", far.label)
        far.later(partner.last - self._clock.now, far.handover._hear, other, say, until)  # noqa: SLF001

    def _hear(self, partner: Partner, say: Say, until: float) -> None:
        if partner.gone or partner.age not in self.partners:
            return
        self._rests.pop(partner.age, None)
        if partner.state is None:
            if partner.age < self._gateway.age:
                return
            partner.state = machine.older(self._gateway.plugin.standing)
        event: Event = Heard(say, soon=say is Say.REVOKE and self._asks_newer())
        if say is Say.ASK:
            late = self._clock.now > until
            if late:
                self._clock.met["an ask is read too late"] += 1
            level = self._gateway.plugin.level if self._gateway.plugin.standing is Standing.SERVING else None
            event = Wanted(machine.register_first(level, late=late), self._could_serve(partner))
        self._feed(partner, event)

    def _asks_newer(self) -> bool:
        for partner, state in self._states:
            if state.stage is Older.CONFIRMED and not state.doubted:
                self._feed(partner, Unserved())
        return any(state.stage is Older.CHECKING and state.doubted for _, state in self._states)

    @property
    def _states(self) -> list[tuple[Partner, State]]:
        return [(one, one.state) for one in self.partners.values() if one.state is not None]

    def _hang_up(self, partner: Partner) -> None:
        if partner.far is not None:
            far, other = partner.far
            after = max(partner.last - self._clock.now, 0.0) + self._clock.latency() * 0.2
            far.later(after, far.handover._part, other)  # noqa: SLF001 - its other half
            self._gateway.node.heard(self._clock.now + after)

    def _part(self, partner: Partner) -> None:
        if partner.gone:
            return
        partner.gone = True
        self._hang_up(partner)
        stop(partner.timer)
        partner.far = partner.timer = None
        if self.partners.get(partner.age) is partner:
            del self.partners[partner.age]
        seconds = self._rests.get(partner.age, AGAIN)
        self._rests[partner.age] = min(2 * seconds, AGAIN_MOST)
        self._not_before[partner.age] = self._clock.now + seconds
        self._gateway.later(seconds + 0.1, self._look)
        if partner.state is not None and partner.state.unsettled:
            self._gateway.count(HandoverOutcome.LOST)
        self._events.append(self._look)  # And once more below: who was killed may hold its lock for a moment yet.
        self._run()

    # What the machines decide.

    @property
    def _asking(self) -> bool:
        return any(one.state is not None and one.state.stage is Newer.ASKING for one in self.partners.values())

    def _feed(self, partner: Partner, event: Event) -> None:
        self._events.append(lambda: self._step(partner, event))
        self._run()

    def _run(self) -> None:
        if self._running:
            return
        self._running = True
        steps = 0
        try:
            while True:
                while self._events:
                    self._events.popleft()()
                deferring = self.defers_to()
                if deferring == self._deferring:
                    break
                self._deferring = deferring
                steps += 1
                if steps > _SETTLE_STEPS:
                    self._gateway.node.broken(
                        f"{self._gateway.label} goes round: who stands by for whom changes for ever"
                    )
                    break
                self._look()
        finally:
            self._running = False
        if not self._asking:
            answered, self._answered = self._answered, []
            for then in answered:
                self._gateway.later(0.0, then)

    def _look(self) -> None:
        if not self._closed:
            self._gateway.look()

    def _step(self, partner: Partner, event: Event) -> None:
        if not partner.gone and partner.state is not None:
            partner.state, actions = machine.step(partner.state, event)
            self._act(partner, actions)

    def _act(self, partner: Partner, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Tell(say):
                    self._say(partner, say)
                case SetWait(seconds):
                    stop(partner.timer)
                    partner.timer = None
                    if seconds is not None:
                        partner.timer = self._gateway.later(seconds, self._fire, partner)
                case Note(outcome):
                    self._gateway.count(outcome)
                case RegisterAgain():
                    self._clock.met["of two Registers that crossed, the newer gateway's is sent once more"] += 1
                    self._gateway.plugin.feed(events.Renew("crossed"))

    def _fire(self, partner: Partner) -> None:
        if not partner.gone and partner.state is not None:
            resting = [one for one, state in self._states if state.stage is Newer.RESTING]
            could = self._could_serve(partner) and not (partner in resting and self._gateway.leaves)
            for one in resting if could and partner in resting else (partner,):
                self._feed(one, WaitOver(could))

    def _could_serve(self, partner: Partner) -> bool:
        others = [state for other, state in self._states if other is not partner]
        kubelet = self._gateway.bound and self._gateway.kubelet_listens
        assert partner.state is not None
        return machine.could_serve(partner.state, others, kubelet=kubelet)

    @property
    def settled(self) -> bool:
        """Whether no handover is under way, nor one that failed about to be tried again."""
        return not any(
            one.state is not None and (one.state.unsettled or one.state.stage is Newer.RESTING)
            for one in self.partners.values()
        )
