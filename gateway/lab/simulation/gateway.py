"""One gateway process under simulated time.

The machines are the daemon's own, and so is its ledger. What carries them out is a model of it, call by call, for one
resource: ``gateway.daemon`` here, what belongs to the resource in ``plugin``, to the ledger in ``scribe``, to other gateways
in ``handover`` and ``standby``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappush
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from devices.model import Device, Health
from gateway.age import HOST_SERVICE_NS, Age, in_turn
from gateway.handover.events import HandoverOutcome, Standing
from gateway.kubelet.identity import KubeletId
from gateway.lab.simulation.clock import Clock, Timer
from gateway.lab.simulation.handover import Handover
from gateway.lab.simulation.kubelet import RESOURCE, Kubelet
from gateway.lab.simulation.plugin import Plugin
from gateway.lab.simulation.scribe import Scribe
from gateway.lab.simulation.standby import Standby
from gateway.registration import events, negotiate
from gateway.registration.events import Phase

if TYPE_CHECKING:
    from gateway.lab.simulation.node import Node

FIRST_LOOK, PEERS_AGAIN, PROBE_AGAIN, YIELD_TIME, HANDED_OVER_WAIT, ANSWERS_WITHIN = 1.0, 0.5, 15.0, 0.05, 0.002, 0.3
"""As in ``gateway.daemon`` and, of ``gateway.handover``, ``peers``, ``ability``, ``talk`` and ``standby``, in seconds."""
LEASE_AGAIN: Final = 0.3
ROUNDS: Final = 50
"""How often at one moment a gateway may begin to serve again: more is going round."""
END_TIME, LAST_WRITE = 0.02, 2.2
"""Seconds that an orderly end takes, and that the last write is waited for."""


class Process:
    """What calls back only while it lives, and later where it is stopped."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.alive, self.frozen = True, False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.thawed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What came while it was stopped last: it may die before it has gone through that."""

    def later(self, seconds: float, call: Callable[..., None], *args: Any) -> Timer:
        """Have ``call`` called by this process: not after its death, and not while it is stopped."""
        clock = self.clock  # As ``Clock.by``, without a call: it is done 50 times a schedule.
        clock.count += 1
        timer = [clock.now + seconds, clock.count, call, args, self]
        heappush(clock.due, timer)
        return timer

    def freeze(self) -> None:
        """Stop, as SIGSTOP does: the kernel still takes connections."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on with all that came meanwhile."""
        self.frozen = False
        self.thawed, self.backlog = self.backlog, []
        for call, args in self.thawed:
            self.clock.by(self, 0.0, call, args)


class Gateway(Process):
    """One gateway.

    Args:
        node: where it runs.
        number: tells it from the others.
        api: what ``--api`` says.
        talks: whether the others can talk to it (it has their state directory).
        host_service: whether it is the node's own service.
        looks: how many seconds its first look at the hardware takes.
    """

    def __init__(
        self,
        node: Node,
        number: int,
        *,
        api: str = "auto",
        talks: bool = True,
        host_service: bool = False,
        looks: float,
    ) -> None:
        super().__init__(node.clock)
        self.node, self.label, self.talks, self.api = node, f"g{number}", talks, api
        rank = HOST_SERVICE_NS if host_service else 0
        self.age = Age(rank + int(self.clock.now * 1e9) + number, f"{number:08x}")
        self.stopping = self.published = self.begun = self.bound = self.removed = False
        self.scribe = Scribe(self)
        self.scribe.load()
        self._told: tuple[Device, ...] | None = None
        """What its source told of last; None: it hasn't looked yet."""
        self.devices: tuple[Device, ...] = ()
        """The list as the kubelet is to see it."""
        self.plugin = Plugin(self, self.scribe.ledger.accepted)
        self.handover, self._standby = Handover(self), Standby(self)
        self._kubelet: KubeletId | None = None
        self.standing_by_for: Age | None = None
        self.doubts: dict[Age, frozenset[str]] = {}
        self._resuming = self._yielding = self._knows = self._in_update = False
        self._rounds = (0.0, 0)
        self._leases: set[Age] = set()
        self._silent: set[Age] = set()
        self._before: Age | None = None
        self._updating: list[Callable[[], None]] = []
        self.later(looks, self._look_at_hardware)
        self.later(FIRST_LOOK, self._first_look_over)
        self.clock.tell(self.label, "starts", "" if talks else "(apart)", api, f"looks {looks:.2f}")

    def thaw(self) -> None:
        """Go on with all that came meanwhile; the watch reads it all, and looks at folders first."""
        self.later(0.0, self.look)
        super().thaw()

    def die(self) -> None:
        """End at once, as by SIGKILL."""
        if not self.alive:
            return
        self.clock.tell(self.label, "dies")
        self.alive = self.published = False
        for client, kubelet, _ in self.plugin.streams.values():
            if client is not None and kubelet is not None:
                self.clock.after(self.clock.latency(), kubelet.hear_end, client)
        for call, args in (*self.thawed, *self.backlog):
            if call == self.plugin.called and args[1] is not None:  # Nobody read it: it ends with its connection.
                self.clock.after(self.clock.latency(), args[2].hear_end, args[1])
        self.plugin.streams.clear()
        self.handover.died()
        self.node.died(self)

    def end(self) -> None:
        """End as SIGTERM has it."""
        if not self.alive or self.stopping:
            return
        self.clock.tell(self.label, "is told to end")
        self.stopping = True
        self.node.kubelet.clean = False
        self.plugin.feed(events.Stop())
        self.later(END_TIME, self._end)

    def _end(self) -> None:
        self.handover.close()
        self.scribe.durable(self._remove)
        self.later(LAST_WRITE, self._remove)

    def _remove(self) -> None:
        self.removed = True
        self.die()

    def take_apart(self) -> None:
        """Let go of everything."""
        for one in (*self.handover.partners.values(), self.plugin, self.handover, self._standby, self.scribe, self):
            vars(one).clear()

    @property
    def listens(self) -> bool:
        """Whether its socket takes connections."""
        return self.alive and self.bound

    # The start, and its lists.

    def _look_at_hardware(self) -> None:
        self._told = self.node.hardware()
        self.update(self._know_devices_once)

    def _first_look_over(self) -> None:
        if self._told is None:
            self.update(self._know_devices_once)
        else:
            self._know_devices_once()

    def _know_devices_once(self) -> None:
        if not self._knows:
            self._knows = True
            self._know_devices()

    def _know_devices(self) -> None:
        if self._told is None and self.node.peers(self):
            self.clock.met["a gateway without devices leaves all to another"] += 1
            self.later(PEERS_AGAIN, self._know_devices)
        else:
            self._be_able()

    def _be_able(self, wait: float = PEERS_AGAIN) -> None:
        kubelet = self.node.kubelet
        if self.node.peers(self) and kubelet.alive and not self._can_speak(kubelet):
            self.clock.met["a gateway that this kubelet would refuse asks for nothing"] += 1
            self.later(wait, self._be_able, min(2 * wait, PROBE_AGAIN))
            return
        older_ones = self.node.peers(self)
        if not older_ones:
            self._publish(older_ones)
            return
        self.handover.take_over(older_ones, lambda: self._taken_over(older_ones))

    def _can_speak(self, kubelet: Kubelet) -> bool:
        return kubelet.behaviour.dialect in negotiate.CHOICES[self.api] and not (
            kubelet.faults.hangs or kubelet.faults.loses
        )

    def _taken_over(self, older_ones: Sequence[Age]) -> None:
        self.scribe.load()
        self.update(partial(self._publish_soon, older_ones))

    def _publish_soon(self, older_ones: Sequence[Age]) -> None:
        self.later(HANDED_OVER_WAIT, self._publish, older_ones)

    def _publish(self, older_ones: Sequence[Age]) -> None:
        self.published = True
        for other in self.node.others(self):
            after = self.clock.latency()
            other.later(after, other.look, self.age)
            self.node.heard(self.clock.now + after)
        silent = any(peer < self.age and not self.handover.decides(peer) for peer in older_ones)
        self.later(YIELD_TIME if silent else 0.0, self._begin)

    def _begin(self) -> None:
        self.begun = True
        kubelet = self.node.kubelet
        self._kubelet = kubelet.id if kubelet.alive else None
        self._standby.kubelet_up(kubelet.started_at)
        self.look()
        unheard_of = {device.id for device in self.devices} - self.scribe.ledger.announced(RESOURCE).keys()
        if unheard_of and self.to_be_sent:
            self.clock.met["what was held back at the start is remembered before it is sent"] += 1
            self.update(self._tell_kubelet)
        else:
            self._tell_kubelet()

    def _tell_kubelet(self) -> None:
        if self._kubelet is not None and self.bound:
            self.plugin.feed(events.KubeletUp(self._kubelet))

    def kubelet_up(self, kubelet: Kubelet) -> None:
        """Take notice of a new kubelet, as the watch tells of it."""
        self._kubelet = kubelet.id
        self._standby.kubelet_up(kubelet.started_at)
        if self.begun and self.bound and not self.stopping:
            self.plugin.feed(events.KubeletUp(kubelet.id))
            self._standby.look_again()

    def hardware_changed(self) -> None:
        """Take notice of what happened to devices."""
        if self._told is not None:
            self._told = self.node.hardware()
            self.update()

    def update(self, then: Callable[[], None] = lambda: None) -> None:
        """Bring the list up to date: what is new in it is on disk before it is sent."""
        self._updating.append(then)
        if not self._in_update:
            self._in_update = True
            self._update()

    def _update(self) -> None:
        known = self.scribe.ledger.announced(RESOURCE)
        if self._told is None:
            merged = tuple(known.values())
        else:
            seen = {device.id for device in self._told}
            gone = (replace(one, health=Health.UNHEALTHY) for one in known.values() if one.id not in seen)
            merged = (*self._told, *gone)
        thens, self._updating = self._updating, []
        if self.to_be_sent and any(device.id not in known for device in merged):
            self.scribe.ledger.announce(RESOURCE, merged)
            self.scribe.durable(lambda: self._shown(merged, thens))
        else:
            self._shown(merged, thens)

    def _shown(self, merged: tuple[Device, ...], thens: list[Callable[[], None]]) -> None:
        if merged and not self.bound:
            self.bound = True
            for other in self.node.others(self) if self.published else ():
                other.later(self.clock.latency(), other.look)
        if merged != self.devices:
            self.devices = merged
            self.plugin.send_lists()
        if self.to_be_sent and self.scribe.ledger.announce(RESOURCE, merged):
            self.scribe.soon()
        if self.begun:
            self.look()
            if self.plugin.machine.kubelet is None and self._kubelet is not None and self.bound:
                self.plugin.feed(events.KubeletUp(self._kubelet))
        for then in thens:
            then()
        if self._updating:
            self._update()
        else:
            self._in_update = False

    @property
    def to_be_sent(self) -> bool:
        """Whether this gateway serves, or is about to: what isn't sent isn't remembered."""
        if self.standing_by_for is not None or self.handover.defers_to() is not None:
            return False
        return self.begun or self.handover.asked or not self.node.peers(self)

    # Other gateways.

    def stood(self) -> None:
        """Take note that the registration may stand elsewhere now."""
        if self.handover.partners:
            self.handover.changed()
        if self.plugin.machine.phase is Phase.WAITING and self.doubts:
            self.look()
        if self._yielding and self.plugin.standing is not Standing.BUSY:
            self.look()

    @property
    def able(self) -> bool:
        """Whether the kubelet speaks what this gateway may."""
        return self.node.kubelet.behaviour.dialect in self._speaks

    @property
    def _speaks(self) -> tuple[str, ...]:
        return negotiate.CHOICES[self.api]

    @property
    def kubelet_listens(self) -> bool:
        """Whether a kubelet takes connections now."""
        return self.node.kubelet.alive

    def look(self, came: Age | None = None) -> None:
        """Stand by for the gateway that serves instead, or take up again what nobody serves."""
        if not self.begun or self.stopping:
            return
        if came is not None:
            self._silent.add(came)
        self._yielding = False
        if not self.bound:
            return
        peers = self.node.peers(self)
        if peers or self._silent:
            self._look_for_gone(peers)
        other = self.handover.defers_to()
        if other is None and (peers or self.doubts):
            other = self._served_by(peers)
        if other is not None:
            if self.standing_by_for != other:
                self._standby.began()
            began, self.standing_by_for = self.standing_by_for != other, other
            self.plugin.feed(events.StandBy(other))
            if began:
                self._standby.look_again()
        elif self.plugin.machine.phase is Phase.STANDBY and not self._resuming:
            self._resuming, last = True, self.standing_by_for
            self._before = last if last in peers and not self.node.by_age(last).listens else None
            self._resume()
        if any(peer < self.age for peer in peers):
            self.handover.take_over(peers)

    def _look_for_gone(self, peers: Sequence[Age]) -> None:
        gone, self._silent = self._silent - {*peers}, {age for age in peers if age not in self.handover.partners}
        self._leases |= {age for age in self._silent if self.node.by_age(age).listens}
        gone -= {self._before}
        if gone and self.plugin.checks:
            self.plugin.feed(events.Lacking())
        elif gone and self.plugin.machine.phase is Phase.SERVING:
            self.clock.met["one that couldn't talk has gone: registered once more"] += 1
            self.plugin.feed(events.Renew("another gateway ended"))

    def _served_by(self, peers: Sequence[Age]) -> Age | None:
        newer = self._newer(peers)
        if newer is None:
            return None
        if self.plugin.standing is Standing.BUSY:
            self._yielding = True
            return None
        self._lease(newer)
        return newer

    def _newer(self, peers: Sequence[Age]) -> Age | None:
        return next(iter(self._in_turn(peers)), None)

    def _in_turn(self, peers: Sequence[Age]) -> list[Age]:
        offering = [age for age in peers if not self.handover.decides(age) and self.node.by_age(age).listens]
        if self.doubts and self.kubelet_listens:
            self.doubts = {
                age: had for age, had in self.doubts.items() if age in peers and self.node.names_of(age) <= had
            }
        return in_turn(self.age, offering, self.doubts)

    def unserved(self) -> None:
        """Take the resource back that another gateway is to serve, and that the kubelet's records lack."""
        deferred = self.handover.defers_to()
        self.handover.unserved()
        other = self._newer(self.node.peers(self))
        if other is not None and (deferred is None or other > deferred):
            self.doubts[other] = self.node.names_of(other)
            self.count(HandoverOutcome.BACK)
            still = {
                age: self.node.names_of(age)
                for age in self._in_turn(self.node.peers(self))
                if self.node.by_age(age).frozen
            }
            if still:
                self.later(ANSWERS_WITHIN, self._doubt_deaf, still)
        self.look()

    def _doubt_deaf(self, still: Mapping[Age, frozenset[str]]) -> None:
        deaf = {age: names for age, names in still.items() if self.node.by_age(age).frozen}
        self.doubts |= deaf
        if deaf:
            self.clock.met["several others stand still: all doubted at once"] += 1
        self.look()

    @property
    def leaves(self) -> bool:
        """Whether the resource would be left to a newer gateway that can't talk, were it not for those that can."""
        return self._newer(self.node.peers(self)) is not None

    def _lease(self, other: Age) -> None:
        """Learn when a gateway that can't talk is gone."""
        self._leases.add(other)

    def died(self, other: Age) -> None:
        """Take notice of another gateway's death: its folder shows an orderly end, its lease any."""
        if other in self._leases or self.node.by_age(other).removed:
            after = self.clock.latency()
            self.later(after, self.look)
            self.node.heard(self.clock.now + after)
        if other in self._leases:
            self._leases.discard(other)
            self.later(LEASE_AGAIN * self.clock.random(), self.look)

    def _resume(self) -> None:
        at, rounds = self._rounds
        self._rounds = (self.clock.now, rounds + 1 if at == self.clock.now else 1)
        if rounds > ROUNDS:
            self.node.broken(f"{self.label} goes round: who stands by for whom changes for ever")
        self.standing_by_for = None
        self.scribe.load()
        self.update(partial(self._resumed, self.clock.now))

    def _resumed(self, began: float) -> None:
        self._resuming = False
        if self.standing_by_for is None:
            self.plugin.feed(events.Resume(self.clock.now - began))
        else:
            self.look()

    def count(self, outcome: HandoverOutcome) -> None:
        """Count how a handover went."""
        self.clock.met[f"a handover ends: {outcome.value}"] += 1
