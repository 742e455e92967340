"""What the tests of the bridge share: a bridge that is watched, and plugins that register with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from devices.model import Device
from devices.policy import Policy
from gateway.bridge.source import Bridge
from gateway.kubelet import records
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Kubelet, KubeletError
from gateway_lab.plugins.played import PlayedPlugin
from gateway_lab.waiting import until

GUARD_S = 10
"""How long a test waits for what must come; no promise, only an end to waiting for what never does."""
NIC = "vendor.example/nic"
TWO = (Device("a"), Device("b"))


@asynccontextmanager
async def bridged(folder: Path) -> AsyncIterator[Bridge]:
    """A bridge in ``folder`` with which plugins can register."""
    state = folder / "state"
    state.mkdir(exist_ok=True, mode=0o700)
    bridge = Bridge(folder, state, Policy(bridge=str(folder)), lambda _: False)
    following = asyncio.create_task(_follow(bridge))
    try:
        await bridge.lead()
        await until(lambda: bool(bridge.is_open), GUARD_S)
        yield bridge
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(bridge: Bridge) -> None:
    async with aclosing(bridge.watch()) as inventories:
        async for _ in inventories:
            pass


async def play_forgotten_in_flight(
    folder: Path, version: str, genuine: Path | None = None, **kind: Any
) -> tuple[list[str], list[str]]:
    """Have a kubelet forget the device of an Allocate that is open; name the devices of all pods, and the pods that came after it."""
    sockets, state = folder / "k" / "device-plugins", folder / "state"
    sockets.mkdir(parents=True)
    command = gateway_command(sockets, state, options=("--backend", "none", "--bridge", str(folder)))
    async with (
        await Kubelet.launch(version, sockets, genuine=genuine) as kubelet,
        await GatewayProcess.launch(command) as gateway,
    ):
        await kubelet.start()
        await gateway.wait_for("plugins can register here")
        async with plugin(folder, **kind) as played:
            await kubelet.wait(NIC, len(played.devices))
            await kubelet.admit("pod-a", NIC, 1)
            played.free.clear()
            waiting = asyncio.create_task(kubelet.admit("pod-b", NIC, 1))
            await until(lambda: len(played.allocated) == 2, GUARD_S)
            await kubelet.remove("pod-a")
            await records.held(folder / "k" / "pod-resources" / "kubelet.sock")
            played.free.set()
            await waiting
            came = []
            for pod in ("pod-c", "pod-d", "pod-e"):
                with contextlib.suppress(KubeletError):
                    await kubelet.admit(pod, NIC, 1)
                    came.append(pod)
            held = [one for pod in (await kubelet.pods()).values() for ids in pod.values() for one in ids[NIC]]
    return sorted(held), came


@asynccontextmanager
async def plugin(folder: Path, *, start: bool = True, **kind: object) -> AsyncIterator[PlayedPlugin]:
    """A plugin that has registered."""
    played = PlayedPlugin(folder=folder / "device-plugins", **{"devices": TWO, **kind})  # type: ignore[arg-type]
    try:
        if start:
            await played.start()
        yield played
    finally:
        await played.stop()
