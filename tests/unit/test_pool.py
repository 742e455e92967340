"""gRPC's threads rest while all is served, and only then: seen from outside, by their scheduling policy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.wires import pool
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Kubelet

GUARD = 15.0


def policies(pid: int) -> tuple[set[int], set[int]]:
    """Give the policies of gRPC's threads, and those of all others."""
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    pooled = {int(one.name) for one in threads if (one / "comm").read_text().strip() == pool.NAME}
    others = {int(one.name) for one in threads} - pooled
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


async def test_what_is_served_for_a_moment_lets_nothing_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    put, later = list[int](), asyncio.Event()
    monkeypatch.setattr(pool, "SETTLED", 0.0)
    monkeypatch.setattr(pool, "put", put.append)
    one = pool.GrpcThreads()
    one.served(served=True)
    one.served(served=False)
    asyncio.get_running_loop().call_later(0, later.set)
    async with asyncio.timeout(GUARD):
        await later.wait()
    assert put == [os.SCHED_OTHER]
