"""Word of a gateway's death: however it dies, once, and for each that follows it; with the last that it said."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.pair.pulse import Pulse


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    """This process is the second gateway of the pair."""
    made = Pulse()
    made.begin(1)
    yield made
    made.end()  # A thread keeps a list of what it holds, in the memory of that itself.


def lives(pulse: Pulse, lane: int, *says: bytes) -> int:
    """Start a process that holds a lane, as a gateway does, and return when it does, and has said so much."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        pulse.begin(lane)
        for word in says:
            pulse.say(word)
        os.write(writing, b"1")
        signal.pause()
    assert os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    return pid


def lives_until_told(pulse: Pulse, lane: int) -> tuple[int, int]:
    """Do as ``lives``; return the descriptor, too, at whose end it is over, though its process isn't."""
    # No signal: it would kill the process where another thread of it gets it, such as gRPC's after a fork.
    waiting, ends = os.pipe()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends)
        pulse.begin(lane)
        os.write(writing, b"1")
        os.read(waiting, 1)
        pulse.end()
        signal.pause()
    assert os.read(reading, 1)
    for each in (waiting, reading, writing):
        os.close(each)
    return pid, ends


def dies(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_death_is_told_once_and_so_is_the_next_one(pulse: Pulse) -> None:
    told = queue.SimpleQueue[bytes]()
    for word in (b"first, and longer", b"second"):
        other = lives(pulse, 0, b"before", word)
        pulse.at_others_end(told.put)
        assert told.empty()
        dies(other)
        assert told.get(timeout=30) == word


def test_a_death_that_nobody_waits_for_hides_no_later_one(pulse: Pulse) -> None:
    told = queue.SimpleQueue[bytes]()
    dies(lives(pulse, 0, b"the dead one's"))
    other = lives(pulse, 0)
    pulse.at_others_end(told.put)
    assert told.empty()
    dies(other)
    assert told.get(timeout=30) == b"", "nobody's word is another one's"


def test_one_that_is_over_before_its_process_is_told_as_soon(pulse: Pulse) -> None:
    told = queue.SimpleQueue[bytes]()
    other, ends = lives_until_told(pulse, 0)
    pulse.at_others_end(told.put)
    assert told.empty()
    os.close(ends)
    assert told.get(timeout=30)
    dies(other)
    third = lives(pulse, 0)
    pulse.at_others_end(told.put)
    assert told.empty()
    dies(third)
    assert told.get(timeout=30) == b""


def test_one_that_is_over_where_nobody_waited_for_the_death_before_hides_no_later_one(pulse: Pulse) -> None:
    told = queue.SimpleQueue[bytes]()
    dies(lives(pulse, 0))
    other, ends = lives_until_told(pulse, 0)
    pulse.at_others_end(told.put)
    os.close(ends)
    assert told.get(timeout=30)
    dies(other)
    third = lives(pulse, 0, b"the last one's")
    pulse.at_others_end(told.put)
    dies(third)
    assert told.get(timeout=30) == b"the last one's"


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_who_begins_while_the_death_before_is_told_is_told_of_too(pulse: Pulse) -> None:
    told = queue.SimpleQueue[bytes]()
    reading, writing = os.pipe()
    pulse._take(pulse._held[0])  # As the thread does that tells of a death.
    other = os.fork()
    if other == 0:
        pulse.begin(0)
        os.write(writing, b"1")
        signal.pause()
    while not sleeps(other):
        os.sched_yield()
    pulse._libc.pthread_mutex_unlock(pulse._held[0])
    assert os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    pulse.at_others_end(told.put)
    dies(other)
    assert told.get(timeout=30) == b""


def test_where_there_is_no_other_nothing_is_told(pulse: Pulse) -> None:
    told, before = queue.SimpleQueue[bytes](), {*threading.enumerate()}
    pulse.at_others_end(told.put)
    for one in {*threading.enumerate()} - before:
        one.join(30)
    dies(lives(pulse, 0))
    assert told.empty()
