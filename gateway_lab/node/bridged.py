"""A plugin behind the gateway, on a whole node: what the API server and pods notice of its restarts, and of the kubelet's and ours.

The gateway has no device of its own here. The plugin (``otherplugin.py``) has them all and registers in the bridge's folder; it
speaks no handover and remembers nothing. Promised is that nobody sees it end: not for a moment, at the API server or in the
kubelet's own records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from gateway_lab.node import Node, pods
from gateway_lab.node.continuity import RECREATED, ROLLED, Facts, Promise, Scenario
from gateway_lab.node.installed import HostService, OtherPlugin
from gateway_lab.node.stage import PATIENCE, POD, Stage
from gateway_lab.trials.scenarios import must
from gateway_lab.waiting import until

REGISTERED = "a plugin registered"
"""What the gateway's log says of each Register of a plugin behind it."""
FOLDER = "run/dp-bridge"
NAMES = ("first.sock", "second.sock")
"""Two releases of the plugin serve under different names."""
AWAY_SECONDS = 12.0
"""Longer than between two of a kubelet's words to the API server, so that what its records lack would show there, too."""
FLAWLESS = Promise(gap_ms=0)
"""Nobody sees anything, the kubelet's own records included."""
HOPPED = Promise(static=RECREATED)
"""A kubelet begins without devices, for the moment until it is told; what becomes of static pods is its own doing."""


class Bridged:
    """A gateway that only bridges, as a host service, and the plugin behind it."""

    kind = "behind the bridge"

    def __init__(self, node: Node) -> None:
        folder = node.root / FOLDER
        self._gateway = HostService(node, ["--backend", "none", "--bridge", str(folder)])
        self._socket = folder / "device-plugins" / "kubelet.sock"
        self._releases = [OtherPlugin(node, self._socket.parent, name) for name in NAMES]

    @property
    def plugin(self) -> OtherPlugin:
        """The release of the plugin that is in use."""
        return self._releases[0]

    async def start(self) -> None:
        """Start the gateway, and the plugin when the gateway is there for it."""
        await self._gateway.start()
        await until(self._socket.exists, PATIENCE)
        await self.returned(self.plugin.start)

    async def stop(self) -> None:
        """End both."""
        await self.plugin.stop()
        await self._gateway.stop()

    async def kill(self) -> None:
        """Kill the gateway."""
        await self._gateway.kill()

    async def roll(self, image: str) -> None:
        """Replace the gateway; the plugin lives on."""
        await self._gateway.roll(image)

    async def off(self) -> None:
        """Kill both for good."""
        await self.plugin.off()
        await self._gateway.off()

    async def on(self) -> None:
        """Start both."""
        await self._gateway.on()
        await self.plugin.on()

    async def returned(self, happens: Callable[[], Awaitable[None]]) -> None:
        """Let the plugin come back, and wait until the gateway has heard of it."""
        mark = self._gateway.lines
        await happens()
        await self._gateway.said(REGISTERED, mark)

    async def upgrade(self) -> None:
        """End the plugin and start its other release in its place, as a DaemonSet's update does."""
        await self.plugin.stop()
        self._releases.reverse()
        await self.returned(self.plugin.start)


def _bridged(stage: Stage) -> Bridged:
    assert isinstance(stage.plugin, Bridged)
    return stage.plugin


async def _restart(stage: Stage) -> None:
    found = _bridged(stage)
    await found.plugin.stop()
    await found.returned(found.plugin.start)


async def _kill(stage: Stage) -> None:
    found = _bridged(stage)
    await found.returned(found.plugin.kill)


async def _upgrade(stage: Stage) -> None:
    await _bridged(stage).upgrade()


async def _away(stage: Stage) -> Facts:
    """Keep the plugin away, have a pod ask for a device meanwhile, and let it come back: the pod waits, and runs."""
    found, name = _bridged(stage), "meanwhile"
    await found.plugin.stop()
    await stage.api.create(POD, pods.gpu_pod(name))
    await asyncio.sleep(AWAY_SECONDS)
    [waits] = stage.seen.named(name)
    must([] if waits.phase == "Pending" else [f"expected the pod to wait for the plugin, it is {waits.phase}"])
    await found.returned(found.plugin.start)
    await stage.seen.until(lambda seen: any(pod.runs for pod in seen.named(name)), "the pod to run", PATIENCE)
    await stage.remove(name)
    return {"a pod that asks then": "waits and runs"}


async def _kubelet(stage: Stage, version: str) -> None:
    await stage.node.kubelet.restart(version=version)


async def _kubelet_alone(stage: Stage) -> None:
    """Restart the kubelet while the plugin is away: it registers with nobody until the kubelet has all devices again."""
    found = _bridged(stage)
    await found.plugin.stop()
    await stage.node.kubelet.restart()
    await stage.served()
    await found.returned(found.plugin.start)


async def _roll(stage: Stage) -> None:
    await stage.plugin.roll(ROLLED)


def _scenario(name: str, words: str, run: Callable[[Stage], Awaitable[Facts | None]], promise: Promise) -> Scenario:
    return Scenario(name, words, run, {Bridged.kind: promise})


_ANYWHERE = (
    _scenario("plugin-restarted", "the plugin is restarted (TERM)", _restart, FLAWLESS),
    _scenario("plugin-killed", "the plugin crashes (KILL)", _kill, FLAWLESS),
    _scenario("plugin-upgraded", "the plugin is replaced by another release", _upgrade, FLAWLESS),
    _scenario("plugin-away", "the plugin is away for 12 s, and a pod asks for a device", _away, FLAWLESS),
)
_NEWEST = (
    _scenario("plugin-away-kubelet", "the kubelet is restarted while the plugin is away", _kubelet_alone, Promise()),
    _scenario("gateway-rolled", "the gateway is replaced by another release", _roll, FLAWLESS),
)
WORDS = {one.name: one.words for one in (*_ANYWHERE, *_NEWEST)}
"""What happens, by the scenario's name."""


def walk(old: str, new: str) -> Sequence[tuple[str, Scenario]]:
    """Give the scenarios, each with the kubelet's version that it begins on: all on the old one, up, all again, and down."""
    up, down = (
        _scenario(f"to-{to}", f"the kubelet is replaced by {to}", partial(_kubelet, version=to), HOPPED)
        for to in (new, old)
    )
    return [
        *((old, one) for one in _ANYWHERE),
        (old, up),
        *((new, one) for one in (*_ANYWHERE, *_NEWEST)),
        (new, down),
    ]
