"""One resource's registration and what the kubelet calls, under simulated time: the daemon's own machine, carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from adapters.registry import by_name
from devices.model import Health
from gateway.handover.events import Standing, standing
from gateway.lab.simulation.clock import Timer, stop
from gateway.lab.simulation.kubelet import RESOURCE, SHOWS, Client, Kubelet, level_of
from gateway.registration import events, negotiate
from gateway.registration import machine as registration

if TYPE_CHECKING:
    from adapters.dialect import Level
    from gateway.lab.simulation.gateway import Gateway

REGISTER_DEADLINE, CALL_FIRST = 15.0, 0.002
"""As in ``gateway.registration.registrar``, in seconds."""
RECORDS_PATIENCE: Final = 0.8
"""Seconds that a kubelet is given to record a list."""


_of: Final = attrgetter("_value_")
"""A timer's name, many times a schedule: what ``value`` gives, without the Python that ``enum`` runs for it."""


class Plugin:
    """The resource of one gateway."""

    def __init__(self, gateway: Gateway, last_accepted: str) -> None:
        self._gateway, self._node, self._clock = gateway, gateway.node, gateway.clock
        self.machine = registration.start(gateway.age.token, gateway.api, last_accepted)
        self.streams: dict[int, tuple[Client | None, Kubelet | None, bool]] = {}
        """The open streams by number: who called, and whether it looks like a kubelet."""
        self._ending: set[int] = set()
        self._heeded: int | None = None
        self._timers: dict[str, Timer] = {}
        self._sent = 0
        self.connected = False
        """Whether a kubelet has asked for the options since the last Register."""
        self._call: tuple[Kubelet, Callable[[str, str], None]] | None = None
        """The Register that a kubelet hasn't answered: which one, and what takes the answer."""
        self.checks: bool | None = None
        """Whether the kubelet's records could be asked; None: they weren't yet."""

    # The machine, and what it asks for.

    def feed(self, event: events.Event) -> None:
        """Let the registration take an event, and do what it asks for."""
        before = self.machine
        self.machine, actions = registration.step(before, event)
        for action in actions:
            _ACTS[type(action)](self, action)
        if self.machine.phase is not before.phase:
            self._clock.tell(self._gateway.label, self.machine.phase)
        self._gateway.stood()

    def _set_timer(self, action: events.SetTimer) -> None:
        timer = _of(action.timer)
        stop(self._timers.get(timer))
        jittered = action.seconds * (1 + self._clock.random() / 4)
        self._timers[timer] = self._gateway.later(jittered, self.feed, events.Fired(action.timer))

    def _cancel_timer(self, action: events.CancelTimer) -> None:
        timer = self._timers.pop(_of(action.timer), None)
        if timer is not None:
            timer[2] = None

    def _offer(self, offer: events.SendRegister) -> None:
        self._sent = offer.attempt
        self._gateway.later(self._clock.latency() * 0.3, self._register, offer)

    def _cancel_offer(self, _: events.CancelRegister) -> None:
        self._sent = 0

    def _heed(self, action: events.Heed) -> None:
        self._heeded = action.stream

    def _end_streams(self, _: events.EndStreams) -> None:
        for number in self.streams:
            if number not in self._ending:
                self._ending.add(number)
                self._gateway.later(self._clock.latency() * 0.2, self._end_stream, number)

    def _link(self, action: events.LinkSocket) -> None:
        self._node.names[action.name] = self._gateway

    def _unlink(self, action: events.UnlinkSocket) -> None:
        self._node.names.pop(action.name, None)

    def _begin_to_verify(self, _: events.Verify) -> None:
        self._gateway.later(self._clock.latency(), self._verify, self.machine.stream, 0.0)

    def _report(self, report: events.Report) -> None:
        if report.level == "error":
            self._clock.met[f"said: {report.what}"] += 1

    def _register(self, offer: events.SendRegister) -> None:
        if self._sent != offer.attempt:
            return
        kubelet = self._node.kubelet
        if not kubelet.alive:
            self._replied(offer, negotiate.NOBODY, "")
            return
        self.feed(events.Reached(offer.attempt, kubelet.id))
        self.connected = False
        if self._sent != offer.attempt:
            return
        self._node.names[offer.name] = self._gateway
        if any(one is kubelet and number not in self._ending for number, (_, one, _) in self.streams.items()):
            self._node.broken(
                f"{self._gateway.label} sends a Register while a stream of its own is live on that kubelet"
            )
        waiting = self._gateway.later(REGISTER_DEADLINE, self._replied, offer, "DEADLINE_EXCEEDED", "")

        def reply(code: str, details: str) -> None:
            if waiting[2] is not None and not given_up():
                waiting[2] = self._call = None
                self._gateway.later(self._clock.latency(), self._replied, offer, code, details)

        def given_up() -> bool:
            return self._sent != offer.attempt or not self._gateway.alive

        self._call = kubelet, reply
        self._clock.after(
            self._clock.latency(), kubelet.register, self._gateway, offer.name, offer.dialect, reply, given_up
        )

    def hung_up(self, kubelet: Kubelet) -> None:
        """The kubelet is dead: a call that it hasn't answered ends."""
        if self._call is not None and self._call[0] is kubelet:
            self._call[1]("UNAVAILABLE", "")

    def _replied(self, offer: events.SendRegister, code: str, details: str) -> None:
        if self._sent != offer.attempt:
            return
        if code == "OK":
            self._gateway.later(CALL_FIRST, self._accepted, offer)
        else:
            self._sent = 0
            self.feed(events.Replied(offer.attempt, code, details))

    def _accepted(self, offer: events.SendRegister) -> None:
        if self._sent == offer.attempt:
            self._sent = 0
            if self._gateway.scribe.ledger.accept(offer.dialect):
                self._gateway.scribe.soon()
            self.feed(events.Replied(offer.attempt, "OK", connected=self.connected))

    def _verify(self, stream: int | None, spent: float) -> None:
        kubelet = self._node.kubelet
        if self.machine.stream != stream or not kubelet.alive:
            return
        self.checks = kubelet.behaviour.minor >= SHOWS
        if not self.checks:
            return
        expected = frozenset(device.id for device in self._gateway.devices if device.health is Health.HEALTHY)
        held = (kubelet.allocatable() or frozenset()) == expected
        if not held and spent < RECORDS_PATIENCE:
            self._gateway.later(0.4, self._verify, stream, spent + 0.4)
            return
        if not held:
            self._clock.met["the kubelet's records lack what a live stream serves"] += 1
        self.feed(events.Verified(held))

    # What the kubelet calls.

    def called(self, number: int, client: Client | None, kubelet: Kubelet | None) -> None:
        """Take a ListAndWatch. ``client`` is None where somebody else than a kubelet calls."""
        if client is not None and not client.open:
            return
        likely = client is not None
        self.streams[number] = (client, kubelet, likely)
        self.feed(events.StreamOpened(number, likely))
        if number in self.streams and client is not None and number not in self._ending:
            self._gateway.later(self._clock.latency() * 0.3, self._send_list, number)

    def send_lists(self) -> None:
        """Send the list to whoever listens."""
        for number in self.streams:
            self._gateway.later(self._clock.latency() * 0.1, self._send_list, number)

    def _send_list(self, number: int) -> None:
        client, kubelet, _ = self.streams.get(number, (None, None, False))
        if client is not None and kubelet is not None and number not in self._ending:
            client.heard_by = max(client.heard_by, self._clock.now + self._clock.latency())
            self._clock.after(client.heard_by - self._clock.now, kubelet.hear_list, client, self._gateway.devices)

    def _end_stream(self, number: int) -> None:
        client, kubelet, _ = self.streams.get(number, (None, None, False))
        if client is not None and kubelet is not None:
            self._clock.after(self._clock.latency(), kubelet.hear_end, client)
        self.stream_over(number)

    def stream_over(self, number: int) -> None:
        """A stream is over, whoever ended it."""
        if self.streams.pop(number, None) is not None:
            self._ending.discard(number)
            self.feed(events.StreamEnded(number))

    def allocate(self, ids: frozenset[str], answered: Callable[[str], None]) -> None:
        """Answer an Allocate."""
        listed = {device.id: device for device in self._gateway.devices}
        unknown = [one for one in ids if one not in listed]
        if unknown:
            answered("unknown device")
            return
        if any(listed[one].health is not Health.HEALTHY for one in ids):
            answered("unhealthy device")
            return
        if any(one in self._gateway.scribe.ledger.cordons for one in ids):
            answered("cordoned")
            return
        self._gateway.scribe.ledger.hand_out(RESOURCE, ids, "v1beta1", self._clock.now)
        self._gateway.scribe.soon()
        answered("")

    @property
    def standing(self) -> Standing:
        """Where the registration stands, for another gateway."""
        streaming, machine = False, self.machine
        for number, (_, _, likely) in self.streams.items():
            if likely or number == self._heeded:
                streaming = True
                break
        stands = standing(machine.phase, streams=streaming, refused=machine.refused)
        if stands is not Standing.IDLE:
            return stands
        unfit = not self._gateway.devices or (self._gateway.kubelet_listens and not self._gateway.able)
        return Standing.OUT if unfit else stands

    @property
    def level(self) -> Level | None:
        """The kubelets that fit the evidence of the live stream."""
        heeded = self.streams.get(self._heeded or 0)
        if heeded is None or heeded[1] is None:
            return None
        return level_of(by_name(heeded[1].behaviour.dialect), heeded[1].behaviour)


_ACTS: Final[Mapping[type, Callable[[Plugin, Any], None]]] = {
    events.CancelTimer: Plugin._cancel_timer,  # noqa: SLF001 - its own
    events.SendRegister: Plugin._offer,  # noqa: SLF001
    events.CancelRegister: Plugin._cancel_offer,  # noqa: SLF001
    events.SetTimer: Plugin._set_timer,  # noqa: SLF001
    events.Heed: Plugin._heed,  # noqa: SLF001
    events.EndStreams: Plugin._end_streams,  # noqa: SLF001
    events.LinkSocket: Plugin._link,  # noqa: SLF001
    events.UnlinkSocket: Plugin._unlink,  # noqa: SLF001
    events.Verify: Plugin._begin_to_verify,  # noqa: SLF001
    events.Report: Plugin._report,  # noqa: SLF001
}
