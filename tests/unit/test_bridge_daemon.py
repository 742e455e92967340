"""The bridge in a daemon of its own, before an emulated kubelet: what nobody is to see when a plugin ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Faults, Kubelet
from tests.unit.bridging import NIC, plugin


async def test_one_that_only_bridges_and_ends_while_a_newer_one_registers_is_missed_by_nobody(folder: Path) -> None:
    sockets, state = folder / "k" / "device-plugins", folder / "state"
    sockets.mkdir(parents=True)
    options = ("--backend", "none", "--bridge", str(folder), "--log-level", "debug")
    command = gateway_command(sockets, state, options=options)
    async with (
        await Kubelet.launch("1.37", sockets) as kubelet,
        await GatewayProcess.launch(command) as older,
    ):
        await kubelet.start()
        await older.wait_for("plugins can register here")
        async with plugin(folder):
            await kubelet.wait(NIC, 2)
            await kubelet.fault(Faults(register_late_ms=300))
            async with await GatewayProcess.launch(command) as newer:
                seen = Counter[int]()
                watching = asyncio.create_task(_watch(kubelet, seen, every=0.001))
                await newer.wait_for("phase", phase="registering")
                await older.terminate()
                await newer.wait_for("registered")
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                assert set(seen) == {2}


async def _watch(kubelet: Kubelet, seen: Counter[int], every: float = 0.01) -> None:
    while True:
        seen[(await kubelet.totals()).allocatable.get(NIC, 0)] += 1
        await asyncio.sleep(every)
