"""What the tests of the bridge share: a bridge that is watched, and plugins that register with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from devices.life.states import State
from devices.model import ContainerAnswer, ContainerRequest, Device, Field, Health, Sayable
from devices.policy import Bridging, Policy
from devices.source import Inventory, Listing
from gateway.bridge.plugin import Bridged
from gateway.bridge.source import Bridge
from gateway.kubelet import view
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Kubelet, KubeletError
from gateway_lab.plugins.played import PlayedPlugin
from gateway_lab.waiting import until

GUARD_S = 10
"""How long a test waits for what must come; no promise, only an end to waiting for what never does."""
NIC = "vendor.example/nic"
PLAIN = Bridging()
TWO = (Device("a"), Device("b"))
ALL = Sayable(frozenset(Field))

__all__ = ["ALL", "GUARD_S", "NIC", "TWO", "Health", "State", "Watched", "bridged", "plugin"]


class Watched:
    """A bridge, and the inventory that it told last."""

    def __init__(self, bridge: Bridge, folder: Path) -> None:
        self.bridge, self.folder = bridge, folder
        self.told: Inventory = {}
        self.count = 0
        self._news = asyncio.Condition()

    def begin(self) -> None:
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self) -> None:
        async with aclosing(self.bridge.watch()) as inventories:
            async for inventory in inventories:
                async with self._news:
                    self.told, self.count = inventory, self.count + 1
                    self._news.notify_all()

    async def until(self, fits: Callable[[Inventory], object]) -> Inventory:
        async with asyncio.timeout(GUARD_S), self._news:
            await self._news.wait_for(lambda: fits(self.told))
        return self.told

    async def lists(self, *ids: str, resource: str = NIC) -> Listing:
        """Wait until the resource has these devices."""
        found = await self.until(
            lambda told: {one.id for one in _devices(told, resource)} == set(ids) and resource in told
        )
        return found[resource]

    async def open(self) -> None:
        """Wait until plugins can register."""
        await until(lambda: bool(self.bridge.is_open), GUARD_S)

    def one(self, resource: str = NIC) -> Bridged:
        return self.bridge.plugins[resource]

    async def allocate(self, *ids: str, resource: str = NIC) -> ContainerAnswer:
        return await self.bridge.answer(resource, ContainerRequest(ids), ALL)


def _devices(told: Inventory, resource: str) -> tuple[Device, ...]:
    return told[resource].devices if resource in told else ()


def health(listing: Listing) -> Mapping[str, bool]:
    """Say which devices a list calls well."""
    return {one.id: one.health is Health.HEALTHY and one.id not in listing.troubles for one in listing.devices}


@asynccontextmanager
async def bridged(
    folder: Path,
    *,
    grace: float = 60.0,
    withdraw: float = 3600.0,
    bridging: Bridging = PLAIN,
    taken: Callable[[str], bool] = lambda _: False,
    opens: bool = True,
) -> AsyncIterator[Watched]:
    """A bridge in ``folder``; open, unless another gateway leads."""
    policy = Policy(bridge=str(folder), bridge_grace=grace, bridge_withdraw=withdraw, bridging=bridging)
    state = folder / "state"
    state.mkdir(exist_ok=True, mode=0o700)
    watched = Watched(Bridge(folder, state, policy, taken), folder)
    watched.begin()
    try:
        if opens:
            await watched.bridge.lead()
            await watched.open()
        yield watched
    finally:
        await watched.close()


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
            await view.held(folder / "k" / "pod-resources" / "kubelet.sock")
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
