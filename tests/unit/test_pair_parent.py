"""What the parent of a pair makes of what its gateways say, and of their deaths."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adapters.dialect import Level
from gateway.pair import parent
from gateway.pair.flight import Flight
from gateway.pair.parent import ANSWER_TIME, END_TIME, READY_TIME, Pair, _Child
from gateway.pair.policy import MOST_YOUNG
from gateway.pair.pulse import Pulse
from gateway.pair.role import RESIGNS, Role
from gateway.registration.events import Phase
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


def test_a_manager_is_not_told_that_one_is_ready_that_is_not(made: Made, told: list[str]) -> None:
    serves, stands_by = made.child(active=True, ready=True), made.child()
    made.dies(serves, -signal.SIGKILL)
    assert (stands_by.active, told) == (True, [])


def test_once_the_pair_is_told_to_end_it_makes_room_for_nobody(made: Made) -> None:
    one = made.child(active=True)
    made.pair._on_signal(signal.SIGTERM, None)
    made.says(one, f"{RESIGNS}3")
    assert (made.pair._status, made.pair.resigned) == (0, None)


def test_the_next_one_is_started_at_once_only_where_nobody_takes_over(made: Made) -> None:
    serves, stands_by = made.child(active=True), made.child()
    serves.since = stands_by.since = time.monotonic() - 1e6
    made.dies(serves, -signal.SIGKILL)
    assert made.pair._not_before > time.monotonic()
    made.dies(stands_by, -signal.SIGKILL)
    assert made.pair._not_before <= time.monotonic()


def test_a_gateway_that_can_not_be_started_ends_the_pair_only_where_there_is_no_other(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(made.pair, "_fork", refuse)
    with pytest.raises(OSError, match="unavailable"):
        made.pair._start()
    made.child(active=True, ready=True)
    made.pair._start()
    assert made.pair._not_before > time.monotonic()


def test_a_gateway_whose_parent_is_no_more_does_not_begin() -> None:
    pid = os.fork()
    if pid == 0:
        Pair(lambda _: 0, Flight())._be_a_gateway(Role(Flight(), Pulse(), -1, 1), parent=-1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_manager_hears_of_the_end(made: Made, told: list[str]) -> None:
    assert made.pair._end(0) == 0
    assert told == [notify.STOPPING]


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


@pytest.mark.parametrize(("status", "ends"), [(0, None), (1, None), (-9, None), (2, 2), (75, 75), (78, 78)])
def test_what_the_next_one_would_end_with_too_ends_the_pair(made: Made, status: int, ends: int | None) -> None:
    made.child(active=True)
    made.dies(made.child(), status)
    assert made.pair._status == ends


def test_the_death_of_another_process_is_no_gateways(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent may be the container's first process, and then it is told of everybody's."""
    one, deaths = made.child(active=True), iter([(4711, 0), (0, 0)])
    monkeypatch.setattr(os, "waitpid", lambda *_: next(deaths))
    made.pair._bury()
    assert (made.pair._children, made.pair._status) == ([one], None)


def test_one_that_says_that_it_ends_may_say_more(made: Made) -> None:
    one = made.child(active=True)
    made.says(one, notify.STOPPING, notify.ALIVE)
    assert one.ends


async def test_the_end_of_the_parent_is_no_order_to_serve() -> None:
    ours, its = socket.socketpair()
    with its:
        role = Role(Flight(), Pulse(), its.fileno(), 1)
        role.attach()
        ours.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not role.serves
        assert not asyncio.get_running_loop().remove_reader(its.fileno()), "it has been read"


async def test_the_connection_of_a_kubelet_that_is_served_is_lent_once_for_several_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lent: list[tuple[str, Path, str]] = []
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    monkeypatch.setattr("gateway.pair.held.lend", lambda *one: lent.append(one))
    monkeypatch.setattr("gateway.pair.role.LENT_AFTER", 0)
    plugin, bound = SimpleNamespace(level=Level(37)), SimpleNamespace(address="at")
    role = Role(Flight(), Pulse(), -1, 1)
    for phase, count in ((Phase.ACCEPTED, 0), (Phase.SERVING, 1), (Phase.SERVING, 2)):
        state = SimpleNamespace(phase=phase, told="k")
        one = SimpleNamespace(name="a/b", plugin=plugin, bound=bound, state=state, endpoint=Path("1.sock"))
        role.stood("00000001", cast("Any", one))
        role.stood("00000001", cast("Any", one))
        await asyncio.sleep(0.01)
        assert (lent, failed) == ([("a/b", Path("1.sock"), "at")] * count, [])


def test_a_hangup_at_its_end_does_not_end_it() -> None:
    """Python takes back a handler of its own before the process ends, and execve does, too."""
    code = (
        "import os, signal\n"
        "from gateway.pair.flight import Flight\n"
        "from gateway.pair.parent import Pair\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # Who is run by nohup would ignore it.
        "pair = Pair(lambda _: 0, Flight())\n"
        "pair._status = 7\n"
        "assert pair.run() == 7\n"
        "os._exit(7 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 7


def test_a_hangup_goes_on_to_both_and_another_signal_ends_the_pair_though_it_makes_room(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, sent = [made.child(active=True), made.child()], list[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    made.says(both[0], f"{RESIGNS}0")
    made.pair._on_signal(signal.SIGHUP, None)
    assert sent == [(one.pid, signal.SIGHUP) for one in both]
    ends = [made.pair.resigned]
    made.pair._on_signal(signal.SIGTERM, None)
    assert [*ends, made.pair.resigned, made.pair._status] == [0, None, 0]


@pytest.mark.parametrize(("before", "after"), [("-997", "-897"), ("950", "1000"), ("1000", "1000")])
async def test_who_is_told_to_serve_comes_first_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text(before)
    monkeypatch.setattr("gateway.pair.role._SCORE", score)
    ours, its = socket.socketpair()
    with ours, its:
        role = Role(Flight(), Pulse(), its.fileno(), 1)
        role.attach()
        ours.send(b"1")
        await role.active()
    assert score.read_text() == after


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
