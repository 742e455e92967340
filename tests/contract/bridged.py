"""Another vendor's device plugin, as a process of its own that registers behind the gateway's bridge."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from devices.model import Device, Health
from gateway_lab.plugins.played import PlayedPlugin
from tests.contract.clock import Process
from tests.contract.node import VERSION, Gateway, Node

NIC: Final = "vendor.example/nic"
OTHER: Final = "vendor.example/other"


def bridging(node: Node, *options: str) -> Gateway:
    """Start a gateway that other vendors' plugins register with."""
    backend = () if node.profile.exists() else ("--backend", "none")
    return node.gateway(*backend, "--bridge", str(node.bridge), *options)


def configured(node: Node, text: str) -> tuple[str, str]:
    """Write what a configuration file says of the bridge; return the options that name the file."""
    file, draft = node.folder / "config.yaml", node.folder / "config.draft"
    draft.write_text(f"gateway:\n  bridge:\n{text}")
    draft.replace(file)
    return "--config-file", str(file)


async def behind(one: Gateway, resource: str = NIC) -> dict[str, object]:
    """Return what the status says of the plugin behind a resource."""
    (found,) = (each["behind"] for each in (await one.status())["resources"] if each["name"] == resource)
    return dict(found)


async def stays(node: Node, count: int, seconds: float) -> None:
    """See that so many stay allocatable, at every moment."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    while loop.time() < ends:
        assert node.allocatable(NIC) == count
        await asyncio.sleep(0.05)


class Neighbour:
    """A plugin that can be killed, stopped and started again. Its socket keeps its name."""

    def __init__(self, node: Node, **kind: Any) -> None:
        self._node = node
        self._kind = {"folder": node.bridge / "device-plugins", "devices": (Device("a"), Device("b")), **kind}
        self.starts: list[PlayedPlugin] = []
        """One for each start."""

    @property
    def played(self) -> PlayedPlugin:
        """What it was called for, and what it says, since its last start."""
        return self.starts[-1]

    async def start(self, *, registers: bool = True, **kind: Any) -> PlayedPlugin:
        """Start it, once plugins can register; ``kind`` is other than before."""
        socket = self._node.bridge / "device-plugins" / "kubelet.sock"
        await self._node.until(socket.exists, "the bridge's socket")
        self._kind |= kind
        self.process = Process("plugin")
        played = PlayedPlugin(**self._kind)
        self.starts.append(played)
        await self.process.ask(played.start() if registers else played.serve())
        return played

    def played_by(self, other: Neighbour) -> None:
        """Be in the same process as another one, and serve nothing."""
        self.process = other.process
        self.starts.append(PlayedPlugin(**self._kind))

    async def register(self, **kind: Any) -> None:
        """Register once more, as plugins do when kubelet.sock is new."""
        await self.process.ask(self.played.register(**kind))

    async def change(self, *devices: Device) -> None:
        """Have another list from now on."""
        self._kind["devices"] = devices
        await self.process.ask(self.played.change(devices))

    async def end(self) -> None:
        """End in order."""
        await self.process.ask(self.played.stop())
        self.process.kill()

    def kill(self) -> None:
        """Kill it: -9."""
        self.process.kill()

    @property
    def allocated(self) -> list[tuple[str, ...]]:
        """What it was asked to allocate, in all its starts."""
        return [one for played in self.starts for one in played.allocated]


async def bridged(node: Node, *options: str, version: str = VERSION, **kind: Any) -> tuple[Gateway, Neighbour]:
    """Start a kubelet, a gateway and a plugin that is such, and wait until the kubelet has the plugin's devices."""
    await node.start_kubelet(version)
    one, plugin = bridging(node, *options), Neighbour(node, **kind)
    played = await plugin.start()
    await node.allocatable_is(sum(device.health is Health.HEALTHY for device in played.devices), NIC)
    return one, plugin


def socket_of(folder: Path) -> tuple[int, int]:
    """Tell which socket a bridge has now."""
    found = (folder / "device-plugins" / "kubelet.sock").stat()
    return found.st_ino, found.st_mtime_ns
