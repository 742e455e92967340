"""What the parent of a pair makes of what its gateways say, and of their deaths."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from gateway.pair import parent
from gateway.pair.flight import Flight
from gateway.pair.parent import ANSWER_TIME, END_TIME, READY_TIME, Pair, _Child
from gateway.pair.policy import MOST_YOUNG
from gateway.pair.role import RESIGNS
from gateway.wires import notify


class Made:
    """A pair whose gateways are no processes: a socket for each, by which it speaks."""

    def __init__(self) -> None:
        self.pair = Pair(lambda _: 0, Flight())
        self.sockets: list[socket.socket] = []

    def child(self, *, active: bool = False, ready: bool = False) -> _Child:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0)
        its.settimeout(0)
        self.sockets += [ours, its]
        one = _Child(len(self.pair._children), ours, len(self.pair._children), 0)
        one.active, one.ready = active, ready
        self.pair._children.append(one)
        return one

    def says(self, child: _Child, *words: str) -> None:
        for word in words:
            self.sockets[2 * child.lane + 1].send(word.encode())
        self.pair._hear()

    def dies(self, child: _Child, status: int) -> None:
        self.pair._children.remove(child)
        self.pair._died(child, status)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a service manager is told."""
    words: list[str] = []
    monkeypatch.setattr(notify, "tell", words.append)
    return words


@pytest.fixture
def made() -> Iterator[Made]:
    one = Made()
    yield one
    for each in one.sockets:
        each.close()


def test_a_manager_hears_of_the_one_that_serves_alone(made: Made, told: list[str]) -> None:
    serves, stands_by = made.child(active=True), made.child()
    made.says(stands_by, notify.READY, notify.ALIVE, f"{RESIGNS}3")
    assert (told, made.pair.resigned) == ([], None)
    made.says(serves, notify.READY, notify.ALIVE)
    assert told == [notify.READY, notify.ALIVE]
    made.says(serves, f"{RESIGNS}3")
    assert (made.pair.resigned, made.pair._status) == (3, 0)


def test_a_manager_hears_that_the_next_one_is_ready_where_the_first_one_never_was(made: Made, told: list[str]) -> None:
    serves, stands_by = made.child(active=True), made.child(ready=True)
    made.dies(serves, -signal.SIGKILL)
    assert stands_by.active
    assert told == [notify.READY]


def test_a_crash_loop_by_signals_ends_with_a_status(made: Made) -> None:
    for _ in range(MOST_YOUNG):
        made.dies(made.child(active=True), -signal.SIGKILL)
    assert made.pair._status == 1


@pytest.mark.parametrize("dra", [False, True])
def test_a_second_one_is_started_beside_one_that_is_slow_only_where_it_decides_nothing(made: Made, dra: bool) -> None:
    made.pair = Pair(lambda _: 0, Flight(), dra=dra)
    first = made.child(active=True)
    assert made.pair._due == (None if dra else first.since + READY_TIME)
    first.ready = True
    assert made.pair._due == 0.0
    made.child()
    assert made.pair._due is None


def test_a_pair_that_begins_anew_is_as_old_as_before(made: Made) -> None:
    again = Pair(lambda _: 0, Flight(), before=(12, 3))
    assert (again.born_ns, again._in_vain) == (12, 3)
    assert made.pair.born_ns > 12


def test_who_stands_by_ends_first_and_has_time_to_answer(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    serves, stands_by = made.child(active=True), made.child()
    ended: list[tuple[_Child, float]] = []
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(parent, "_end_within", lambda child, seconds, *_: ended.append((child, seconds)))
    assert made.pair._end(0) == 0
    assert ended == [
        (stands_by, END_TIME),
        (serves, END_TIME),
        (serves, END_TIME),
        (stands_by, ANSWER_TIME),
    ]
