"""Word of a gateway's death: however it dies, once, and for each that follows it; with the last that it said."""

from __future__ import annotations

import os
import queue
import signal

from gateway.pair.pulse import Pulse


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


def dies(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_death_is_told_once_and_so_is_the_next_one() -> None:
    pulse, told = Pulse(), queue.SimpleQueue[bytes]()
    pulse.begin(1)
    for word in (b"first, and longer", b"second"):
        other = lives(pulse, 0, b"before", word)
        pulse.at_others_end(told.put)
        assert told.empty()
        dies(other)
        assert told.get(timeout=30) == word


def test_a_death_that_nobody_waits_for_hides_no_later_one() -> None:
    pulse, told = Pulse(), queue.SimpleQueue[bytes]()
    pulse.begin(1)
    dies(lives(pulse, 0, b"the dead one's"))
    other = lives(pulse, 0)
    pulse.at_others_end(told.put)
    assert told.empty()
    dies(other)
    assert told.get(timeout=30) == b"", "nobody's word is another one's"


def test_one_that_is_over_before_its_process_is_told_as_soon() -> None:
    pulse, told = Pulse(), queue.SimpleQueue[bytes]()
    pulse.begin(1)
    reading, writing = os.pipe()
    other = os.fork()
    if other == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        pulse.begin(0)
        os.write(writing, b"1")
        signal.sigwait({signal.SIGUSR1})
        pulse.end()
        signal.pause()
    assert os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    pulse.at_others_end(told.put)
    assert told.empty()
    os.kill(other, signal.SIGUSR1)
    assert told.get(timeout=30)
    dies(other)
    third = lives(pulse, 0)
    pulse.at_others_end(told.put)
    assert told.empty()
    dies(third)
    assert told.get(timeout=30) == b""


def test_where_there_is_no_other_nothing_is_told() -> None:
    pulse, told = Pulse(), queue.SimpleQueue[bytes]()
    pulse.begin(0)
    pulse.at_others_end(told.put)
    other = lives(pulse, 1)
    dies(other)
    assert told.empty()
