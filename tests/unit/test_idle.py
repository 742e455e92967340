"""An idle gateway isn't woken for nothing: its own thread's wake-ups are counted, from outside."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Kubelet

SECONDS: Final = 10.0
MOST: Final = 5
"""Wake-ups in that time: the kubelet's folder is looked at every 5 s, and three more. A look every 2 s would be seven in all."""
TIMES: Final = 4
"""What a start leaves to do, and a node that stood still, is over when this time has gone by so often."""


def wakes(pid: int) -> int:
    """Give how often the process's first thread, which has the event loop, went to sleep so far."""
    lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


async def test_an_idle_gateway_sleeps(folder: Path) -> None:
    (folder / "dp").mkdir()
    command = gateway_command(folder / "dp", folder / "state")
    async with await Kubelet.launch("1.28", folder / "dp") as kubelet, await GatewayProcess.launch(command) as gateway:
        await kubelet.start()
        await gateway.wait_for("registered")
        woken: list[int] = []
        while len(woken) < TIMES and (not woken or woken[-1] > MOST):
            before = wakes(gateway.pid)
            await asyncio.sleep(SECONDS)
            woken.append(wakes(gateway.pid) - before)
    assert woken[-1] <= MOST, woken
