"""Word of a gateway's death: however it dies, once, and for each that follows it."""

from __future__ import annotations

import os
import queue
import signal
from functools import partial

from gateway.pair.pulse import Pulse


def lives(pulse: Pulse, lane: int) -> int:
    """Start a process that holds a lane, as a gateway does, and return when it does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        pulse.begin(lane)
        os.write(writing, b"1")
        signal.pause()
    assert os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    return pid


def dies(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_death_is_told_once_and_so_is_the_next_one() -> None:
    pulse, told = Pulse(), queue.SimpleQueue[str]()
    pulse.begin(1)
    for name in ("first", "second"):
        other = lives(pulse, 0)
        pulse.at_others_end(partial(told.put, name))
        assert told.empty()
        dies(other)
        assert told.get(timeout=30) == name


def test_a_death_that_nobody_waits_for_hides_no_later_one() -> None:
    pulse, told = Pulse(), queue.SimpleQueue[str]()
    pulse.begin(1)
    dies(lives(pulse, 0))
    other = lives(pulse, 0)
    pulse.at_others_end(partial(told.put, "told"))
    assert told.empty()
    dies(other)
    assert told.get(timeout=30) == "told"


def test_where_there_is_no_other_nothing_is_told() -> None:
    pulse, told = Pulse(), queue.SimpleQueue[str]()
    pulse.begin(0)
    pulse.at_others_end(partial(told.put, "told"))
    other = lives(pulse, 1)
    dies(other)
    assert told.empty()
