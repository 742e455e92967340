"""A gateway of a pair that stands still is killed, and one that is only slow isn't."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from gateway.lab.trials.scenarios import RESOURCE, node
from gateway.pair import parent
from gateway.pair.flight import Flight
from gateway.pair.signs import EVERY, MISSED, Signs, Silence
from tests.unit.test_pair import pair, ready

SOON = """
from gateway.pair import parent, signs
parent.EVERY = signs.EVERY = 0.3
"""
"""Signs of life as often that a test needn't wait for long."""
RUNS = "from gateway.cli.main import gateway; gateway()\n"


@pytest.mark.parametrize(
    ("counts", "ends"),
    [
        pytest.param([1, 2, 3, 4], False, id="it lives"),
        pytest.param([0] * (MISSED - 1), False, id="a sign may come right after a look"),
        pytest.param([*[0] * (MISSED - 1), 1, *[1] * (MISSED - 1)], False, id="one sign is enough"),
        pytest.param([0] * MISSED, True, id="it stands still"),
        pytest.param([5, *[5] * MISSED], True, id="it came to stand still"),
        pytest.param([0] * (MISSED + 1), False, id="it is killed once: no signal ends one that waits for a disk"),
    ],
)
def test_who_stands_still(counts: list[int], ends: bool) -> None:
    silence = Silence(0)
    for count in counts:
        silence = silence.look(count)
    assert silence.lasts is ends


async def test_signs_come_from_one_lane_while_the_event_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pair.signs.EVERY", 0.0)
    signs = Signs()
    signs.give(1)
    before = signs.count(1)
    while signs.count(1) < before + 3:  # noqa: ASYNC110 - the loop's turns are what is counted
        await asyncio.sleep(0)
    assert signs.count(0) == 0


@pytest.mark.parametrize("which", ["who serves", "who stands by"])
async def test_one_that_stands_still_is_killed_and_followed(which: str) -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.37")
        async with pair(made, program=SOON + RUNS) as process:
            serves, stands_by = await ready(process)
            stopped, other = (serves, stands_by) if which == "who serves" else (stands_by, serves)
            await process.wait_for("registered")
            mark = process.seen
            os.kill(stopped, signal.SIGSTOP)
            died = await process.wait_for("a gateway of the pair died", since=mark)
            assert (died["gateway"], died["status"]) == (stopped, -signal.SIGKILL)
            assert (await ready(process, mark))[0] == other
            await kubelet.wait(RESOURCE, 2)
            await kubelet.admit("pod", RESOURCE, 1)
            assert await process.terminate() == 0


@pytest.mark.parametrize(
    ("late", "killed"),
    [
        pytest.param([0.0] * MISSED, [signal.SIGKILL], id="in time"),
        pytest.param([EVERY - 1] * MISSED, [signal.SIGKILL], id="nearly in time"),
        pytest.param([-1.0] * 10, [], id="a word of a gateway wakes the parent sooner"),
        pytest.param([*[0.0] * (MISSED - 1), 3600.0, *[0.0] * (MISSED - 1)], [], id="the machine stood still"),
        pytest.param([EVERY + 1] * 10, [], id="the machine is slow"),
    ],
)
def test_a_parent_that_stood_still_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, late: list[float], killed: list[signal.Signals]
) -> None:
    sent: list[signal.Signals] = []
    monkeypatch.setattr(parent, "_send", lambda _, number: sent.append(number))
    one = parent.Pair(lambda _: 0, Flight())
    with socket.socket() as channel:
        one._children.append(parent._Child(0, channel, 0, 0))
        for seconds in late:
            one._look(one._look_at + seconds)
    assert sent == killed
    os.close(one._woken)
    os.close(one._wake)
