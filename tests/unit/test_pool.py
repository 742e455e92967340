"""The threads of gRPC's pool rest while all is served, and only then: seen from outside, by their scheduling policy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.lab.gatewayproc import GatewayProcess, gateway_command
from gateway.lab.kubelets.kubelet import Kubelet
from gateway.wires import pool

GUARD = 15.0


def policies(pid: int) -> tuple[set[int], set[int]]:
    """Give the policies of the pool's threads, and those of all others."""
    tasks = Path(f"/proc/{pid}/task")
    pooled = set(pool.threads(tasks))
    others = {int(task.name) for task in tasks.iterdir()} - pooled
    return {os.sched_getscheduler(one) for one in pooled}, {os.sched_getscheduler(one) for one in others}


@pytest.mark.parametrize(
    ("under", "own"),
    [
        pytest.param((), os.SCHED_OTHER, id="normal"),
        pytest.param(("chrt", "--batch", "0"), os.SCHED_BATCH, id="as-somebody-wants-it"),
    ],
)
async def test_they_rest_while_all_is_served_and_are_awake_when_the_kubelet_goes(
    folder: Path, under: tuple[str, ...], own: int
) -> None:
    (folder / "dp").mkdir()
    command = [*under, *gateway_command(folder / "dp", folder / "state", options=("--log-level", "debug"))]
    async with asyncio.timeout(GUARD), await GatewayProcess.launch(command) as gateway:
        await gateway.begun()
        for _ in range(2):
            mark = gateway.seen
            async with await Kubelet.launch("1.28", folder / "dp") as kubelet:
                await kubelet.start()
                await gateway.wait_for("gRPC's threads rest", since=mark)
                assert policies(gateway.pid) == ({os.SCHED_BATCH}, {own})
            await gateway.wait_for("gRPC's threads are awake", since=mark)
            assert policies(gateway.pid) == ({own}, {own})


async def test_what_is_served_for_a_moment_only_lets_nothing_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rests, later = list[bool](), asyncio.Event()
    monkeypatch.setattr(pool, "SETTLED", 0.0)
    monkeypatch.setattr(pool.GrpcThreads, "_rest", lambda _: rests.append(True))
    one = pool.GrpcThreads()
    one.served(served=True)
    one.served(served=False)
    asyncio.get_running_loop().call_later(0, later.set)
    async with asyncio.timeout(GUARD):
        await later.wait()
    assert not rests


async def test_each_time_those_are_woken_that_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ended meanwhile is left alone: its number may be another's by now."""
    set_to: list[tuple[int, int]] = []
    pooled = [101]
    monkeypatch.setattr(pool, "threads", lambda: pooled)
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", lambda thread, policy, _: set_to.append((thread, policy)))
    one = pool.GrpcThreads()
    for pooled[0] in (101, 102):
        one._rest()
        one._wake()
    rest, wake = os.SCHED_BATCH, os.SCHED_OTHER
    assert set_to == [(101, rest), (101, wake), (102, rest), (102, wake)]
