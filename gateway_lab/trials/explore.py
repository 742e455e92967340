"""The core, explored: every state that registration can reach, whatever the kubelet, the clock and an operator do.

``registration`` decides without I/O, so what surrounds it can be a model: the shell's Register and timers, the kubelet's
side of each registration and stream, its deaths, and each kind of fault. The search goes breadth first until no state is
new: what holds in every state holds always, and the trace to one where it doesn't is the shortest there is. It ends,
because numbers are exchanged for their order: of all Registers, streams and kubelets there ever were, only those count
that somebody still speaks of. Counters that only make a wait longer are left out.

Time isn't modelled: timers fire in any order. Some things are sooner than others by more than an order of magnitude, and
the model says so: our own end of a stream is over before any timer fires; a kubelet that accepted has called, or given up
its dial (10 s), before we stop waiting for its call (11 s); a look into its records is over before the next one.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from adapters.registry import DIALECTS, by_name
from gateway.kubelet.identity import KubeletId
from gateway.registration import events, negotiate
from gateway.registration import machine as registration
from gateway.registration.events import Phase, Timer
from gateway.registration.machine import State

S = TypeVar("S", bound=Hashable)


# The search. It knows no model: another machine's is searched the same way.


class BrokenError(Exception):
    """A state that must not be. The message says which promise is broken; more arguments are steps that led on to it."""


@dataclass(frozen=True, slots=True)
class Explored:
    """What a search found. ``trace`` leads to the first broken promise, one sentence a step; empty where all held."""

    states: int
    transitions: int
    depth: int
    broken: str = ""
    trace: tuple[str, ...] = ()


@contextmanager
def uncollected() -> Iterator[None]:
    """Have no collector look through states again and again: hundreds of thousands of them, and no ring among them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def search(
    start: S, moves: Callable[[S], Iterable[tuple[str, S]]], check: Callable[[S], None], *, at_most: int = 3_000_000
) -> Explored:
    """Search breadth first until no state is new, or a promise is broken.

    Args:
        start: the first state.
        moves: what can happen to a state, in words, and what becomes of it.
        check: raises BrokenError for a state that must not be.
        at_most: how many states to hold: a model that has more is too large, or not finite.

    Raises:
        OverflowError: there are more.
    """
    parents: dict[S, tuple[S, str] | None] = {start: None}
    frontier, depth, transitions = [start], 0, 0
    while frontier:
        reached: list[S] = []
        for state in frontier:
            try:
                check(state)
            except BrokenError as error:
                told, *further = error.args
                return Explored(len(parents), transitions, depth, told, (*_trace(parents, state), *further))
            for said, successor in moves(state):
                transitions += 1
                if successor not in parents:
                    parents[successor] = state, said
                    reached.append(successor)
        if len(parents) > at_most:
            raise OverflowError(f"expected at most {at_most} states, found {len(parents)} up to depth {depth}")
        frontier, depth = reached, depth + bool(reached)
    return Explored(len(parents), transitions, depth)


def _trace(parents: Mapping[S, tuple[S, str] | None], state: S) -> list[str]:
    steps: list[str] = []
    while (parent := parents[state]) is not None:
        state, said = parent
        steps.append(said)
    return steps[::-1]


# The model of what surrounds one resource's registration.

FAULTS: Final = {
    "error": "the kubelet answers Register with an error",
    "hang": "Register is not answered; the kubelet took it, or takes it much later, or never",
    "mute": "an accepted kubelet never calls ListAndWatch",
    "ghost": "a dead kubelet's call arrives after its death",
    "cut": "a stream is cut while both sides live",
    "records": "the kubelet's records lose us",
    "name": "our name is deleted from the socket directory",
    "standby": "a newer gateway comes, and goes",
    "unfit": "the list grows too large for the dialect, and shrinks again",
    "renew": "Register's options change",
    "stranger": "somebody else calls ListAndWatch",
    "mimic": "somebody else who looks like a kubelet calls ListAndWatch",
}
"""What may go wrong beside the kubelet's deaths, other versions of it, and our own stop."""

PROMISES: Final = (
    "somebody else's call and its end never end the kubelet's stream, once we know which that is",
    "no Register is sent while a stream of ours is live on that kubelet, and never two at once",
    "a kubelet start during which nothing goes wrong has exactly one accepted Register of a resource",
    "whoever waits, waits for a timer that is set, or for somebody else",
    "whoever is held back holds nothing: no stream, no Register, no timer, no name",
    "from every state, once nothing more goes wrong, the kubelet comes to hold us, by what Register says now",
    "stop ends in stopped, with nothing left",
)
"""What is checked in every state."""


class Era(NamedTuple):
    """What kubelets of some releases do with a second Register of a resource whose first stream is open."""

    kubelets: str
    cuts_the_old: bool = False
    """The kubelet cuts the old stream (1.8 to 1.11); else it stays open."""
    end_hurts_the_new: bool = False
    """When the old stream ends, the new registration is disconnected, too, or stuck (1.25 to 1.36, #127803)."""


ERAS: Final = (Era("1.8-1.11", cuts_the_old=True), Era("1.12-1.24, 1.37"), Era("1.25-1.36", end_hurts_the_new=True))

CURRENT: Final = KubeletId(0, 0, 3)
"""The kubelet that is there, or was there last."""
TOLD: Final = KubeletId(0, 0, 2)
"""One that is gone, and the last that the watch told of."""
GONE: Final = KubeletId(0, 0, 1)
"""Any other that is gone. A machine knows one such kubelet at most: only the watch could tell it of the next."""

_TOKEN: Final = "t"  # noqa: S105 - part of a socket's name
_SERVICE: Final = {one.name: one.registration_service for one in DIALECTS} | {"v2": DIALECTS[0].registration_service}
_DIALS: Final = 2
"""How many registrations of one resource a kubelet may have accepted and not called yet: the next has to wait."""
_ENDS: Final = 2
"""How many ends of streams may be on their way to us: before anything else happens, one of them arrives."""
_WITH_KUBELET: Final = ("", "")
_NOT_SENT: Final = None


class Node(NamedTuple):
    """What all resources of the node share."""

    alive: bool = False
    speaks: str = ""
    """The current kubelet's dialect; ``v2`` is one that we don't know."""
    told: KubeletId | None = None
    """The kubelet that the watch told of last: CURRENT, or TOLD where it is another one by now."""
    left: int | None = None
    """How many kubelets may still start; None for any number."""
    stopped: bool = False

    def next(self, dialect: str) -> Node:
        """The same node with the next kubelet."""
        return Node(alive=True, speaks=dialect, told=self.told and TOLD, left=self.left and self.left - 1)


class Sent(NamedTuple):
    """The shell's Register, and what came of it: gRPC's code and text, empty while it is with the kubelet."""

    attempt: int
    dialect: str
    answer: tuple[str, str] | None = _NOT_SENT


class Client(NamedTuple):
    """The kubelet's side of an accepted Register. ``stream`` is 0 until it calls; ``held`` is whether it serves us by it."""

    attempt: int
    stream: int = 0
    held: bool = True


class End(NamedTuple):
    """Our side of a stream. ``open`` is whether its caller may think so, ``kept`` whether we do.

    ``foreign`` is whether the caller is somebody else than a kubelet, ``alike`` whether it looks like one.
    """

    stream: int
    open: bool = True
    kept: bool = True
    foreign: bool = False
    alike: bool = True


class Resource(NamedTuple):
    """One resource: its state machine and what is around it."""

    machine: State
    timers: frozenset[Timer] = frozenset()
    sent: Sent | None = None
    late: tuple[int, str] | None = None
    """A Register that we gave up and the kubelet may still take: its attempt and dialect."""
    spoken: str = ""
    """The dialect that calls are understood in: of the Register that was sent last."""
    clients: tuple[Client, ...] = ()
    """What the kubelet accepted; the last one is what it believes in."""
    streams: tuple[End, ...] = ()
    ghost: bool = False
    """Whether a call of a dead kubelet is on its way."""
    names: frozenset[int] = frozenset()
    """Our names in the socket directory, by attempt."""
    stale: frozenset[int] = frozenset()
    """The Registers that said what is no longer true, by attempt."""
    lost: int = 0
    """A name whose loss is on its way to us."""
    look: tuple[int, bool | None] | None = None
    """A look into the kubelet's records: the stream that it is for, and what it saw (None: not yet)."""
    accepts: int = 0
    """How many Registers this kubelet accepted, while nothing went wrong."""
    clean: bool = True
    """Whether nothing went wrong yet since this kubelet started."""
    may: frozenset[str] = frozenset()
    """The ``FAULTS`` that may still happen."""
    broken: str = ""
    """A promise that the last step broke."""


class Move(NamedTuple):
    """Something that can happen: what becomes of what is around the machine, and what the machine is told of it, if anything.

    A calm one happens by itself where nothing goes wrong; of several, the first.
    """

    said: str
    around: Resource
    event: events.Event | None = None
    calm: bool = True


class Surroundings:
    """What can happen to one resource, and what must hold then.

    Args:
        era: what the kubelets do with a second Register.
        once: whether each fault happens at most once, or as often as one likes.
    """

    def __init__(self, era: Era, *, once: bool = True) -> None:
        self.era, self._once = era, once

    def moves(self, node: Node, it: Resource) -> Iterator[Move]:
        """Tell everything that can happen to ``it`` alone."""
        yield from self._ends(it)
        if sum(not (end.open and end.kept) for end in it.streams) >= _ENDS:
            return
        if it.lost:
            yield Move("we hear that our name is gone", it._replace(lost=0), events.NameLost(_name(it.lost)))
        if it.late is not None:
            yield from self._late(node, it, *it.late)
        if it.sent is not None:
            yield from self._register(node, it, it.sent)
        yield from self._calls(node, it)
        if it.look is not None:
            yield from self._look(node, it, *it.look)
        elif node.alive and it.machine.phase is Phase.SERVING and Timer.VERIFY not in it.timers and not _held(it):
            yield Move("a look for another reason finds nothing of us", it, events.Lacking())
        for timer in Timer:
            if timer in it.timers and _may_fire(it, timer):
                yield Move(
                    f"the timer {timer.value} fires", it._replace(timers=it.timers - {timer}), events.Fired(timer)
                )
        yield from self._faults(it)

    def _ends(self, it: Resource) -> Iterator[Move]:
        for end in it.streams:
            left = it._replace(streams=tuple(other for other in it.streams if other is not end))
            ended = events.StreamEnded(end.stream)
            if not end.open:
                yield Move("we notice that a stream ended", left, ended)
            elif end.foreign:
                said = "somebody else's stream ends" if end.kept else "our end of somebody else's stream is over"
                yield Move(said, _told_by_another(left, end, it, ended))
            elif not end.kept:
                for how, after in self._disconnect(left, end.stream):
                    yield Move(f"our end of a stream is over{how}", after, ended)
            elif "cut" in it.may:
                for how, after in self._disconnect(self._wrong(_closed(it, {end.stream}), "cut"), end.stream):
                    yield Move(f"a stream is cut{how}", after, calm=False)

    def _disconnect(self, it: Resource, stream: int) -> Iterator[tuple[str, Resource]]:
        """A stream is over for the kubelet: tell what that does to the registration that it believes in."""
        clients = tuple(client for client in it.clients if client.stream != stream)
        if not clients or len(clients) == len(it.clients):
            yield "", it._replace(clients=clients)
            return
        *others, last = clients
        stuck = it._replace(clients=(*others, last._replace(held=False)))
        if it.clients[-1].stream == stream:  # What is left is older, and nobody's any more.
            yield "", stuck
        elif self.era.end_hurts_the_new:
            yield ", and the newer registration is stuck", stuck
            cut = _closed(it, {last.stream} - {0})
            yield ", and the newer registration is cut", cut._replace(clients=tuple(others))
        else:
            yield "", it._replace(clients=clients)

    def _late(self, node: Node, it: Resource, attempt: int, dialect: str) -> Iterator[Move]:
        dropped = it._replace(late=None)
        yield Move("the kubelet drops the Register that we gave up", dropped)
        if dialect == node.speaks:
            # What it says is perhaps no longer true, and nothing can show that to us.
            taken = self._accept(dropped._replace(clean=False, stale=it.stale - {attempt}), attempt)
            yield Move("the kubelet takes the Register that we gave up", taken, calm=False)

    def _register(self, node: Node, it: Resource, sent: Sent) -> Iterator[Move]:
        if sent.answer is _NOT_SENT:
            if node.alive:
                yield Move("the Register is sent", _send(it, sent), events.Reached(sent.attempt, CURRENT))
            else:
                nobody = events.Replied(sent.attempt, negotiate.NOBODY)
                yield Move("nobody listens for the Register", it._replace(sent=None), nobody)
            if "unfit" in it.may:
                unfit = events.Replied(sent.attempt, negotiate.UNFIT)
                yield Move(
                    "the list is too large to register", self._wrong(it._replace(sent=None), "unfit"), unfit, calm=False
                )
        elif sent.answer != _WITH_KUBELET:
            code, details = sent.answer
            replied = events.Replied(sent.attempt, code, details)
            yield Move(f"the Register's answer comes: {code}", it._replace(sent=None), replied)
        elif sent.dialect != node.speaks:
            answer = _refusal(sent.dialect, node.speaks)
            yield Move(f"the kubelet refuses {sent.dialect}", it._replace(sent=sent._replace(answer=answer)))
        elif sum(not client.stream for client in it.clients) < _DIALS:
            ok = it._replace(sent=sent._replace(answer=("OK", "")))
            yield Move("the kubelet accepts the Register", self._accept(ok, sent.attempt))
            if "error" in it.may:
                error = self._wrong(it, "error")._replace(sent=sent._replace(answer=("UNKNOWN", "busy")))
                yield Move("the kubelet answers with an error", error, calm=False)
            if "hang" in it.may:
                silent = self._wrong(it, "hang")._replace(sent=sent._replace(answer=("DEADLINE_EXCEEDED", "")))
                taken = self._accept(silent, sent.attempt)
                yield Move("the kubelet accepts the Register and never says so", taken, calm=False)
                if it.late is None:
                    queued = silent._replace(late=(sent.attempt, sent.dialect))
                    yield Move("the kubelet doesn't look at the Register in time", queued, calm=False)

    def _accept(self, it: Resource, attempt: int) -> Resource:
        it = it._replace(accepts=it.accepts + it.clean)
        if self.era.cuts_the_old:
            it = _closed(it, {client.stream for client in it.clients})._replace(clients=())
        return it._replace(clients=(*it.clients, Client(attempt)))

    def _calls(self, node: Node, it: Resource) -> Iterator[Move]:
        understood = _SERVICE.get(it.spoken) == _SERVICE.get(node.speaks)
        for number, client in enumerate(it.clients):
            if client.stream:
                continue
            there = client.attempt in it.names
            gone = it._replace(clients=(*it.clients[:number], *it.clients[number + 1 :]))
            if understood:
                stream = _next_stream(it)
                clients = (*it.clients[:number], client._replace(stream=stream), *it.clients[number + 1 :])
                called = it._replace(clients=clients, streams=(*it.streams, End(stream)))
                yield Move("the kubelet calls ListAndWatch", called, events.StreamOpened(stream), calm=there)
            else:
                yield Move("the kubelet's call isn't understood: another dialect is on offer", gone)
            if not there:
                yield Move("the kubelet finds nobody under our name", gone)
            elif "mute" in it.may:
                yield Move("the kubelet never calls", self._wrong(gone, "mute"), calm=False)

    @staticmethod
    def _look(node: Node, it: Resource, stream: int, *saw: bool | None) -> Iterator[Move]:
        [seen] = saw
        if seen is not None:
            yield Move(f"the kubelet's records said {seen}", it._replace(look=None), events.Verified(held=seen))
        elif node.alive:
            yield Move("the kubelet's records are read", it._replace(look=(stream, _held(it))))
        else:
            yield Move("the kubelet's records can't be read", it._replace(look=None))

    def _faults(self, it: Resource) -> Iterator[Move]:
        phase = it.machine.phase
        if it.ghost:
            stream = _next_stream(it)
            here = it._replace(clean=False, ghost=False, streams=(*it.streams, End(stream, open=False)))
            yield Move("the dead kubelet's call arrives", here, events.StreamOpened(stream))
        if "records" in it.may and _held(it):
            stuck = it._replace(clients=(*it.clients[:-1], it.clients[-1]._replace(held=False)))
            yield Move("the kubelet's records lose us", self._wrong(stuck, "records"), calm=False)
        if "name" in it.may:
            for name in it.names:
                deleted = it._replace(names=it.names - {name}, lost=name)
                yield Move("our name is deleted", self._wrong(deleted, "name"), calm=False)
        if phase is Phase.STANDBY:
            yield Move("the newer gateway goes", it, events.Resume())
        elif "standby" in it.may:
            yield Move("a newer gateway comes", self._wrong(it, "standby"), events.StandBy(), calm=False)
        if phase is Phase.OUT:
            yield Move("the list shrinks", it, events.Resume())
        elif "unfit" in it.may and any(end.open and end.kept for end in it.streams):
            grown = self._wrong(it, "unfit")
            yield Move("the list grows too large for its stream", grown, events.Withhold("too large"), calm=False)
        if "renew" in it.may:
            changed = self._wrong(it, "renew")._replace(stale=frozenset(_attempts(it) - _unsent(it)))
            yield Move("the options change", changed, events.Renew("options"), calm=False)
        for fault, alike in (("stranger", False), ("mimic", True)):
            if fault in it.may:
                end = End(_next_stream(it), foreign=True, alike=alike)
                wrong = self._wrong(it, fault)
                here = wrong._replace(streams=(*it.streams, end))
                event = events.StreamOpened(end.stream, alike)
                yield Move(f"{FAULTS[fault]}", _told_by_another(here, end, it, event), calm=False)

    def _wrong(self, it: Resource, fault: str) -> Resource:
        return it._replace(clean=False, may=it.may - {fault} if self._once else it.may)

    # What the whole node does to a resource.

    def died(self, it: Resource) -> Iterator[Resource]:
        """The kubelet dies: its streams end, and what it didn't answer it never will."""
        if it.ghost or not all(end.open for end in it.streams):
            return  # A kubelet lives longer than we need to hear of the death of the one before.
        sent = it.sent
        if sent is not None and sent.answer == _WITH_KUBELET:
            sent = sent._replace(answer=("UNAVAILABLE", ""))
        dead = _closed(it, {end.stream for end in it.streams if not end.foreign})._replace(
            sent=sent, late=None, clients=()
        )
        yield dead
        if "ghost" in it.may and any(not client.stream for client in it.clients):
            yield self._wrong(dead, "ghost")._replace(ghost=True)

    @staticmethod
    def started(node: Node, it: Resource) -> Resource:
        """A new kubelet: it empties the socket directory, and knows nobody."""
        machine = _known_as(it.machine, {CURRENT: TOLD if node.told == CURRENT else GONE})
        lost = max(it.names, default=it.lost)
        return it._replace(machine=machine, names=frozenset(), lost=lost, accepts=0, clean=not it.ghost)

    @staticmethod
    def told(it: Resource) -> Resource:
        """The watch tells of the current kubelet."""
        return feed(it._replace(machine=_known_as(it.machine, {TOLD: GONE})), events.KubeletUp(CURRENT))

    def told_again(self, it: Resource, kubelet: KubeletId) -> Resource:
        """The shell tells a resource that is new, or reached nobody, of the kubelet that it heard of last."""
        absent = it.machine.kubelet is None or it.machine.phase is Phase.ABSENT
        return feed(it, events.KubeletUp(kubelet)) if absent else it

    @staticmethod
    def stopped(it: Resource) -> Resource:
        """Our own end; what the machine leaves then, is left."""
        it = feed(it, events.Stop())
        return it if it.machine.phase is Phase.STOPPED else it._replace(broken=f"stop ended {it.machine.phase.value}")

    def dropped(self, it: Resource) -> Resource:
        """What the shell forgets by itself: a look into the records for a stream that is over."""
        return it._replace(look=None) if it.look is not None and it.look[0] != it.machine.stream else it


def feed(it: Resource, event: events.Event) -> Resource:
    """Let the state machine take an event, and do what it asks for, as the shell does."""
    machine, actions = registration.step(it.machine, event)
    it = it._replace(machine=machine)
    for action in actions:
        match action:
            case events.SendRegister(attempt, dialect):
                broken = "two Registers of one resource are in flight" if it.sent is not None else it.broken
                it = it._replace(sent=Sent(attempt, dialect), broken=broken)
            case events.CancelRegister():
                if it.sent is not None and it.sent.answer == _WITH_KUBELET and it.late is None:
                    it = it._replace(late=(it.sent.attempt, it.sent.dialect))
                it = it._replace(sent=None)
            case events.SetTimer(timer, seconds):
                longest = registration.VERIFY_AFTER_S[-1] if timer is Timer.VERIFY else registration.REFUSED_WAIT_S
                broken = it.broken if 0 < seconds <= longest else f"a timer is set to {seconds} s"
                it = it._replace(timers=it.timers | {timer}, broken=broken)
            case events.CancelTimer(timer):
                it = it._replace(timers=it.timers - {timer})
            case events.EndStreams():
                it = it._replace(streams=tuple(end._replace(kept=False) for end in it.streams))
            case events.LinkSocket(name):
                it = it._replace(names=it.names | {_attempt(name)})
            case events.UnlinkSocket(name):
                it = it._replace(names=it.names - {_attempt(name)})
            case events.Verify():
                it = it._replace(look=it.look or (machine.stream or 0, None))
            case events.Report() | events.Heed():
                pass
    return it


def broken(it: Resource) -> str:
    """Say which promise a resource's state breaks; empty where it keeps all."""
    kept = {end.stream for end in it.streams if end.open and end.kept and not end.foreign}
    phase, stream = it.machine.phase, it.machine.stream
    held_back = phase in {Phase.STANDBY, Phase.OUT, Phase.STOPPED}
    rows = (
        (bool(it.broken), it.broken),
        (it.accepts > 1, "nothing went wrong, and one kubelet accepted two Registers of a resource"),
        (held_back and any(end.kept for end in it.streams), f"{phase.value}, and a stream goes on"),
        (held_back and it.sent is not None, f"{phase.value}, and a Register is in flight"),
        (held_back and bool(it.timers), f"{phase.value}, and a timer is set"),
        (held_back and bool(it.names), f"{phase.value}, and our name is in the socket directory"),
        (bool(kept - it.machine.others - {stream}), "a live stream is kept that the state machine has forgotten"),
        (
            phase is Phase.SERVING and stream not in {end.stream for end in it.streams},
            "serving, and there is no stream",
        ),
        (phase is Phase.WAITING and Timer.RETRY not in it.timers, "waiting to register again, and no timer is set"),
        (
            phase is Phase.ACCEPTED and Timer.CALL not in it.timers,
            "waiting for the kubelet's call, and no timer is set",
        ),
        (phase is Phase.OFFERING and it.sent is None, "registering, and there is no Register"),
    )
    return next((told for is_so, told in rows if is_so), "")


def _send(it: Resource, sent: Sent) -> Resource:
    """The shell sees a kubelet, links the name and sends the Register."""
    live = any(end.open and not end.foreign for end in it.streams)
    return it._replace(
        names=it.names | {sent.attempt},
        spoken=sent.dialect,
        sent=sent._replace(answer=_WITH_KUBELET),
        broken="a Register is sent while a stream of ours is live on that kubelet" if live else it.broken,
    )


def _closed(it: Resource, streams: Iterable[int]) -> Resource:
    """The kubelet's side of some streams is gone; we haven't noticed yet."""
    return it._replace(streams=tuple(end._replace(open=end.open and end.stream not in streams) for end in it.streams))


def _told_by_another(around: Resource, end: End, before: Resource, event: events.Event) -> Resource:
    """The machine is told of somebody else's stream: where it knows the kubelet's, that one goes on."""
    after = feed(around, event)
    heeded = next((one for one in before.streams if one.stream == before.machine.stream), None)
    known = not end.alike or (heeded is not None and not heeded.foreign)
    ends = {one.stream for one in before.streams if one.kept and not one.foreign} - {
        one.stream for one in after.streams if one.kept
    }
    return after._replace(broken="somebody else's stream ends the kubelet's") if known and ends else after


def _unsent(it: Resource) -> set[int]:
    """The Register that isn't sent yet, and says what is true by then."""
    return {it.sent.attempt} if it.sent is not None and it.sent.answer is _NOT_SENT else set()


def _may_fire(it: Resource, timer: Timer) -> bool:
    """Whether nothing is still to happen that takes much less time than the timer."""
    sooner = {Timer.CALL: any(not client.stream for client in it.clients), Timer.VERIFY: it.look is not None}
    return all(end.kept for end in it.streams) and not sooner.get(timer, False)


def _held(it: Resource) -> bool:
    """Whether the kubelet serves us: its last registration has called, and isn't stuck."""
    return bool(it.clients and it.clients[-1].stream and it.clients[-1].held)


def _refusal(offered: str, speaks: str) -> tuple[str, str]:
    if _SERVICE[offered] != _SERVICE[speaks]:
        return "UNIMPLEMENTED", ""
    if speaks != "v2" and not by_name(speaks).names_itself:
        return "UNKNOWN", "unsupported API version by the Kubelet registry"
    return "UNKNOWN", f'requested API version "" is not supported by kubelet. Supported version is "{speaks}"'


def _known_as(machine: State, names: Mapping[KubeletId, KubeletId]) -> State:
    kubelet, told = machine.kubelet, machine.told
    return replace(machine, kubelet=kubelet and names.get(kubelet, kubelet), told=told and names.get(told, told))


def _name(attempt: int) -> str:
    return f"{_TOKEN}-{attempt}.sock" if attempt else ""


def _attempt(name: str) -> int:
    return int(name.removeprefix(f"{_TOKEN}-").removesuffix(".sock")) if name else 0


def _may_be_called(it: Resource) -> bool:
    with_kubelet = it.sent is not None and it.sent.answer == _WITH_KUBELET
    return with_kubelet or it.late is not None or any(not client.stream for client in it.clients)


def _streams(it: Resource) -> set[int]:
    """Every stream that somebody still speaks of."""
    told = {end.stream for end in it.streams} | {client.stream for client in it.clients} | it.machine.others
    return (told | {it.machine.stream or 0, it.look[0] if it.look is not None else 0}) - {0}


def _next_stream(it: Resource) -> int:
    return max(_streams(it), default=0) + 1


def _attempts(it: Resource) -> set[int]:
    """Every Register that somebody still speaks of."""
    told = {
        it.machine.attempt,
        _attempt(it.machine.name),
        it.lost,
        *it.names,
        *(client.attempt for client in it.clients),
    }
    return (told | {it.sent.attempt if it.sent is not None else 0, it.late[0] if it.late is not None else 0}) - {0}


def _alike(it: Resource) -> Resource:
    """Make one of states that behave alike: leave out what nobody reads any more, and exchange numbers for their order."""
    machine = it.machine
    if (
        machine.cuts or machine.errors or machine.heals or machine.refused
    ):  # They only make a wait longer, or are for others.
        machine = replace(machine, cuts=0, errors=0, heals=0, refused=False)
    if not machine.likely and machine.stream is None:  # The next stream brings its own.
        machine = replace(machine, likely=True)
    if machine.verified and machine.stream is None:  # The next stream begins at 0.
        machine = replace(machine, verified=0)
    if machine.called and machine.phase is not Phase.OFFERING:  # The next Offer begins with False.
        machine = replace(machine, called=False)
    if any(answer.details for _, answer in machine.negotiation.refused):
        refused = tuple((name, replace(answer, details="")) for name, answer in machine.negotiation.refused)
        machine = replace(machine, negotiation=replace(machine.negotiation, refused=refused))
    it = it._replace(
        machine=machine,
        lost=it.lost if _name(it.lost) == machine.name else 0,  # No other is put back.
        spoken=it.spoken if _may_be_called(it) else "",
        accepts=it.accepts if it.clean else 0,
    )
    return _with_streams(_with_attempts(it))


def _with_streams(it: Resource) -> Resource:
    told = sorted(_streams(it))
    if not told or told[-1] == len(told):
        return it
    stream = {0: 0} | {number: order for order, number in enumerate(told, 1)}
    return it._replace(
        machine=replace(
            it.machine,
            stream=it.machine.stream and stream[it.machine.stream],
            others=frozenset(stream[number] for number in it.machine.others),
        ),
        clients=tuple(client._replace(stream=stream[client.stream]) for client in it.clients),
        streams=tuple(end._replace(stream=stream[end.stream]) for end in it.streams),
        look=it.look and (stream[it.look[0]], it.look[1]),
    )


def _with_attempts(it: Resource) -> Resource:
    told = sorted(_attempts(it))
    if not told or told[-1] == len(told):
        return it
    attempt = {0: 0} | {number: order for order, number in enumerate(told, 1)}
    name = _name(attempt[_attempt(it.machine.name)])
    return it._replace(
        machine=replace(it.machine, attempt=attempt[it.machine.attempt], name=name),
        sent=it.sent and it.sent._replace(attempt=attempt[it.sent.attempt]),
        late=it.late and (attempt[it.late[0]], it.late[1]),
        clients=tuple(client._replace(attempt=attempt[client.attempt]) for client in it.clients),
        names=frozenset(attempt[number] for number in it.names),
        stale=frozenset(attempt[number] for number in it.stale if number in attempt),
        lost=attempt[it.lost],
    )


# The node: several resources, whose only bond is their kubelet.


class World(NamedTuple):
    """A node with its resources, each by number (``Registrations``); they are alike, so that their order doesn't count."""

    node: Node
    resources: tuple[int, ...]


class Registrations:
    """A node's registrations as a graph for ``search``. Each resource's state has a number, so that it is worked out once.

    Args:
        around: what can happen to one of them.
        resources: how many there are.
        faults: which of ``FAULTS`` may happen to each.
        kubelets: how many start; None for any number.
        speaks: what a kubelet may speak: our dialects, and ``v2``.
    """

    def __init__(
        self,
        around: Surroundings,
        *,
        resources: int = 1,
        faults: Iterable[str] = (),
        kubelets: int | None = 2,
        speaks: Sequence[str] = ("v1beta1",),
    ) -> None:
        self._around, self._speaks = around, speaks
        self._numbers: dict[Resource, int] = {}
        self._known: list[Resource] = []
        self._moves: dict[tuple[Node, int], tuple[tuple[str, int, bool], ...]] = {}
        self._shared: dict[tuple[str, Node, int], tuple[int, ...]] = {}
        self._settled: set[tuple[Node, int]] = set()
        one = self._number(Resource(registration.start(_TOKEN, "auto", ""), may=frozenset(faults)))
        self.start = World(Node(left=kubelets), (one,) * resources)

    @property
    def seen(self) -> Sequence[Resource]:
        """Every state that one resource was met in so far."""
        return self._known

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Tell everything that can happen to ``world``."""
        node, resources = world
        if node.stopped:
            return
        for place, number in enumerate(resources):
            others = resources[:place] + resources[place + 1 :]
            for said, after, _ in self._alone(node, number):
                yield said, World(node, tuple(sorted((*others, after))))
        for said, to, change in self._together(node):
            for after_all in product(*(self._changed(said, node, number, change) for number in resources)):
                yield said, World(to, tuple(sorted(after_all)))

    def check(self, world: World) -> None:
        """Raise BrokenError where one of the resources breaks a promise, or would never be served again."""
        for number in world.resources:
            if told := broken(self._known[number]):
                raise BrokenError(told)
            if not world.node.stopped:
                self._settles(world.node, number)

    def _together(self, node: Node) -> Iterator[tuple[str, Node, Callable[[Resource], Iterable[Resource]]]]:
        around, told = self._around, node.told
        if node.alive:
            yield "the kubelet dies", node._replace(alive=False), around.died
            if told != CURRENT:
                yield "the watch tells of the kubelet", node._replace(told=CURRENT), lambda it: [around.told(it)]
        elif node.left != 0:
            for dialect in self._speaks:
                yield (
                    f"a kubelet starts that speaks {dialect}",
                    node.next(dialect),
                    lambda it: [around.started(node, it)],
                )
        if told is not None:
            yield "the shell tells of the kubelet again", node, lambda it: [around.told_again(it, told)]
        yield "we are told to stop", node._replace(stopped=True), lambda it: [around.stopped(it)]

    def _settles(self, node: Node, number: int) -> None:
        """Follow what happens by itself, with a kubelet that is well, until nothing more does: we are served then."""
        path: dict[tuple[Node, int], None] = {}
        steps = ["nothing more goes wrong:"]
        while (node, number) not in self._settled:
            it = self._known[number]
            if told := broken(it):
                raise BrokenError(told, *steps)
            if (node, number) in path:
                raise BrokenError("with nothing more going wrong, it goes round for ever", *steps)
            path[node, number] = None
            step = self._calm(node, number)
            if step is None:
                if it.machine.phase is Phase.SERVING and _held(it) and it.clients[-1].attempt in it.stale:
                    raise BrokenError(
                        "with nothing more going wrong, the kubelet holds us by what is no longer true", *steps
                    )
                if not (it.machine.phase is Phase.SERVING and _held(it)):
                    raise BrokenError(f"with nothing more going wrong, it stays {it.machine.phase.value}", *steps)
                break
            said, node, number = step
            steps.append(said)
        self._settled.update(path)

    def _calm(self, node: Node, number: int) -> tuple[str, Node, int] | None:
        """Let the next thing happen that happens by itself; None where nothing does."""
        it, ours = self._known[number], node.speaks in negotiate.NEWEST_FIRST
        if node.alive and node.told != CURRENT:
            return "the watch tells of the kubelet", node._replace(told=CURRENT), self._number(self._around.told(it))
        dead = it if not node.alive else None if ours else next(self._around.died(it), None)
        if dead is not None:
            return "a kubelet starts", node.next(self._speaks[0]), self._number(self._around.started(node, dead))
        return next(((said, node, after) for said, after, calm in self._alone(node, number) if calm), None)

    def _alone(self, node: Node, number: int) -> tuple[tuple[str, int, bool], ...]:
        """Return what can happen to one resource."""
        found = self._moves.get((node, number))
        if found is None:
            found = self._moves[node, number] = tuple(
                (said, self._number(around if event is None else feed(around, event)), calm)
                for said, around, event, calm in self._around.moves(node, self._known[number])
            )
        return found

    def _changed(
        self, said: str, node: Node, number: int, change: Callable[[Resource], Iterable[Resource]]
    ) -> tuple[int, ...]:
        """Return what a resource may become by what the whole node does."""
        found = self._shared.get((said, node, number))
        if found is None:
            found = self._shared[said, node, number] = tuple(map(self._number, change(self._known[number])))
        return found

    def _number(self, it: Resource) -> int:
        it = _alike(self._around.dropped(it))
        number = self._numbers.setdefault(it, len(self._known))
        if number == len(self._known):
            self._known.append(it)
        return number


# What is searched.


class Run(NamedTuple):
    """One search: what is in the model (``Surroundings``, ``Registrations``)."""

    era: Era
    faults: tuple[str, ...] = ()
    once: bool = True
    resources: int = 1
    kubelets: int | None = 2
    speaks: tuple[str, ...] = ("v1beta1",)

    def __str__(self) -> str:
        many = "any number of" if self.kubelets is None else self.kubelets
        spoken = f" that speak {' or '.join(self.speaks)}" if len(self.speaks) > 1 else ""
        faults = "every fault" if len(self.faults) == len(FAULTS) else " and ".join(self.faults) or "no fault"
        often = "" if not self.faults else " once" if self.once else " at any time"
        return f"{self.resources} x resource, {many} kubelets of {self.era.kubelets}{spoken}: {faults}{often}"

    def model(self, around: type[Surroundings] = Surroundings) -> Registrations:
        """Make its graph, with other surroundings where a test wants them."""
        return Registrations(
            around(self.era, once=self.once),
            resources=self.resources,
            faults=self.faults,
            kubelets=self.kubelets,
            speaks=self.speaks,
        )


_DOUBLED: Final = ("hang", "ghost", "standby")
"""The faults after which a kubelet may hold two registrations, so that its era counts."""

QUICK: Final = (
    *(Run(ERAS[-1], (fault,)) for fault in FAULTS),
    *(Run(era, ("hang",)) for era in ERAS[:-1]),
    Run(ERAS[-1], ("hang", "error")),
    Run(ERAS[-1], resources=2),
    Run(ERAS[0], speaks=negotiate.NEWEST_FIRST),
)
"""A few seconds."""
FULL: Final = (
    *QUICK,
    *(Run(era, speaks=(*negotiate.NEWEST_FIRST, "v2"), kubelets=None) for era in ERAS),
    *(Run(era, pair) for era in ERAS for pair in combinations(FAULTS, 2)),
    *(Run(era, (fault,), resources=2) for era in ERAS for fault in FAULTS if fault not in _DOUBLED),
    *(
        Run(era, (fault,), once=False, kubelets=None)
        for era in ERAS
        for fault in FAULTS
        if fault != "standby"
        or era.cuts_the_old  # Elsewhere too many to hold: ever more registrations may be on their way.
    ),
    *(Run(era, resources=2, kubelets=None) for era in ERAS),
)
"""Much longer."""


def main() -> int:
    """Search everything (``--quick``: what the tests search), and say what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_lab.trials.explore", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="only what the tests search")
    runs = QUICK if parser.parse_args().quick else FULL
    print("In every state:", *PROMISES, sep="\n  - ")
    states = transitions = 0
    for number, run in enumerate(runs, 1):
        begin, model = time.monotonic(), run.model()
        found = search(model.start, model.moves, model.check)
        seconds = time.monotonic() - begin
        states, transitions = states + found.states, transitions + found.transitions
        print(
            f"[{number}/{len(runs)}] {run}: {found.states} states, {found.transitions} transitions, depth {found.depth}, "
            f"{seconds:.1f} s",
            flush=True,
        )
        if found.broken:
            print(f"BROKEN: {found.broken}, after:", *found.trace, sep="\n  - ")
            return 1
    print(f"{states} states and {transitions} transitions, each search to its end: every promise holds in every state")
    return 0


if __name__ == "__main__":
    sys.exit(main())
