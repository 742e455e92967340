"""What the bridge costs over a plugin that is called directly, and whether a bridged plugin's end is seen by anybody.

``python -m gateway_lab.bench --only bridge``. Directly and through the bridge are called in turns, in the same minutes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from devices.model import Device, Health
from gateway_lab.bench.caller import Caller, CallError
from gateway_lab.bench.calls import SERVICE, allocate_requests, in_turns
from gateway_lab.bench.measure import Report, line, percentile, spread
from gateway_lab.bench.node import Node, Unheard
from gateway_lab.bench.presence import idle_cost
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets.kubelet import Kubelet, KubeletError
from gateway_lab.plugins.played import PlayedPlugin
from gateway_lab.waiting import until

NIC: Final = "vendor.example/nic"
POD: Final = "pod"
COUNT: Final = 8
ALLOCATE_MS: Final = 1.5
CALLS: Final = 2_000
"""Allocates each way at least: in the first second the kubelet and the gateway are still busy with the list."""
LIST_MS: Final = 200.0
RSS_MIB: Final = 75.0
PLUGINS: Final = 30
DEVICES: Final = 10_000
RESTARTS, KILLS, UPGRADES = 100, 20, 10
GENUINE: Final = "1.37"
"""The kubelet, the genuine one where it is built."""
PODS_EVERY: Final = 0.05
"""Seconds between two pods."""
SECONDS: Final = 30.0
LOOK_EVERY: Final = 0.02
LISTS: Final = 10


def _folder(node: Node) -> Path:
    return node.root / "b" / "device-plugins"


async def _bridge(node: Node) -> tuple[Unheard, Kubelet]:
    """Start a gateway that only bridges, and a kubelet."""
    kubelet = await node.kubelet(GENUINE, genuine=True)
    await kubelet.start()
    options = ("--backend", "none", "--bridge", str(node.root / "b"), "--log-level", "warning")
    gateway = await node.unheard(node.gateway_command(options))
    socket = _folder(node) / "kubelet.sock"
    await until(socket.exists, SECONDS)
    return gateway, kubelet


def _command(node: Node, endpoint: str = "played.sock") -> list[str]:
    return [str(node.python), "-P", "-m", "gateway_lab.plugins.played", str(_folder(node)), "--endpoint", endpoint]


async def bridge(report: Report, python: Path, times: int) -> None:
    """Measure the bridge: calls, a long list, many plugins, and plugins that end."""
    async with Node.make(python) as node:
        await _calls(report, node, times)
    async with Node.make(python) as node, Node.make(python) as direct:
        await _long_list(report, node, direct)
    async with Node.make(python) as node:
        await _many(report, node)
    async with Node.make(python) as node:
        await _ends(report, node)


async def _calls(report: Report, node: Node, times: int) -> None:
    _, kubelet = await _bridge(node)
    await node.plugin(_command(node))
    await kubelet.wait(NIC, COUNT, SECONDS)
    node.hide_pod_resources()
    requests = allocate_requests([f"dev-{number}" for number in range(COUNT)])
    method = f"{SERVICE}/Allocate"
    through = next(path for path in node.plugin_sockets() if path.is_relative_to(node.sockets))
    with (
        Caller(_folder(node) / "played.sock", method, requests) as direct,
        Caller(through, method, requests) as bridged,
    ):
        taken = await asyncio.to_thread(in_turns, {"direct": direct, "bridged": bridged}, max(times, CALLS))
    figures = {name: spread(one) for name, one in taken.items()}
    more = (percentile(taken["bridged"], 50) - percentile(taken["direct"], 50)) / 1000
    report.figures["bridge: Allocate (µs)"] = figures
    report.bar("bridge: Allocate's median over a direct call", more, ALLOCATE_MS, "ms", line(figures["bridged"]))


async def _long_list(report: Report, node: Node, direct: Node) -> None:
    """Time a list until it is in the kubelet's records, through the bridge and directly, in turns."""
    _, bridged = await _bridge(node)
    alone = await direct.kubelet(GENUINE, genuine=True)
    await alone.start()
    well = [Device(f"dev-{number:05}") for number in range(DEVICES)]
    taken: dict[str, list[float]] = {"direct": [], "bridged": []}
    async with AsyncExitStack() as stack:
        sides = {}
        for name, folder, kubelet in (("direct", direct.sockets, alone), ("bridged", _folder(node), bridged)):
            played = PlayedPlugin(folder=folder, devices=well)
            stack.push_async_callback(played.stop)
            await played.start()
            await kubelet.wait(NIC, DEVICES, SECONDS)
            sides[name] = played, kubelet
        for turn in range(LISTS):
            ill = [Device(one.id, Health.UNHEALTHY) if number == turn else one for number, one in enumerate(well)]
            for name, (played, kubelet) in sides.items():
                for devices, count in ((ill, DEVICES - 1), (well, DEVICES)):
                    began = time.monotonic_ns()
                    await played.change(devices)
                    seen = await kubelet.wait(NIC, count, SECONDS)
                    taken[name].append((seen.monotonic_ns - began) / 1e6)
            await asyncio.sleep(1)
    figures = {name: spread(one) for name, one in taken.items()}
    more = percentile(taken["bridged"], 50) - percentile(taken["direct"], 50)
    report.figures["bridge: a list of 10 000, plugin to the kubelet's records (ms)"] = figures
    report.bar("bridge: a list of 10 000 over a direct one", more, LIST_MS, "ms", line(figures["bridged"]))


async def _many(report: Report, node: Node) -> None:
    gateway, kubelet = await _bridge(node)
    async with AsyncExitStack() as stack:
        for number in range(PLUGINS):
            played = PlayedPlugin(
                folder=_folder(node),
                resource=f"vendor.example/nic-{number}",
                endpoint=f"played-{number}.sock",
                devices=[Device(f"dev-{one}") for one in range(COUNT)],
            )
            stack.push_async_callback(played.stop)
            await played.start()
        for number in range(PLUGINS):
            await kubelet.wait(f"vendor.example/nic-{number}", COUNT, SECONDS)
        cost = (await idle_cost({"bridge": gateway}))["bridge"]
    figures = {
        "RSS (MiB)": round(cost.rss, 1),
        "PSS (MiB)": round(cost.pss, 1),
        "CPU in 20 idle seconds (ms)": round(cost.cpu, 1),
    }
    report.figures[f"bridge: {PLUGINS} plugins"] = figures
    report.bar(f"bridge: {PLUGINS} plugins at once", cost.rss, RSS_MIB, "MiB RSS", line(figures))


@dataclass(slots=True)
class _Seen:
    """What was seen while plugins came and went in one way."""

    allocatable: Counter[int] = field(default_factory=Counter)
    answered: int = 0
    pods: int = 0
    failed: list[str] = field(default_factory=list)
    slowest: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """To be held while a device is asked for or held: no kubelet asks for one that a pod has, and the bridge refuses that."""


async def _ends(report: Report, node: Node) -> None:
    """Let a plugin restart, crash and be upgraded, under pods that come and calls that are made all the time."""
    _, kubelet = await _bridge(node)
    plugin = await node.plugin(_command(node))
    await kubelet.wait(NIC, COUNT, SECONDS)

    async def again(seen: _Seen, end: Callable[[GatewayProcess], Awaitable[object]], endpoint: str) -> None:
        nonlocal plugin
        await end(plugin)
        plugin = await node.plugin(_command(node, endpoint))
        await plugin.wait_for("registered", seconds=SECONDS)
        answered, pods = seen.answered, seen.pods
        await until(lambda: (seen.answered >= answered + 2 and seen.pods > pods) or bool(seen.failed), SECONDS)

    async def many(what: str, end: Callable[[GatewayProcess], Awaitable[object]], endpoints: Sequence[str]) -> None:
        seen = _Seen()
        tasks = [asyncio.create_task(one) for one in (_watch(kubelet, seen), _call(node, seen), _admit(kubelet, seen))]
        try:
            for endpoint in endpoints:
                await again(seen, end, endpoint)
        finally:
            for task in tasks:
                task.cancel()
            for one in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(one, Exception):
                    seen.failed.append(repr(one))
        await kubelet.remove(POD)
        _told(report, f"{len(endpoints)} {what}", seen)

    await many("restarts", lambda one: one.terminate(), ["played.sock"] * RESTARTS)
    await many("kills", lambda one: one.kill(), ["played.sock"] * KILLS)
    await many("upgrades", lambda one: one.terminate(), [f"played-{number}.sock" for number in range(UPGRADES)])


def _told(report: Report, what: str, seen: _Seen) -> None:
    figures = {
        "Allocates answered": seen.answered,
        "pods": seen.pods,
        "slowest Allocate (s)": round(seen.slowest, 2),
        "looks at allocatable": seen.allocatable.total(),
    }
    report.figures[f"bridge: {what}"] = figures
    worst = min(seen.allocatable, default=math.nan)
    report.bar(f"bridge: fewest allocatable in {what}", worst, COUNT, "devices", line(figures), exact=True)
    report.bar(
        f"bridge: Allocates and pods that failed in {what}",
        len(seen.failed),
        0,
        "",
        "; ".join(seen.failed[:3]),
        exact=True,
    )


async def _watch(kubelet: Kubelet, seen: _Seen) -> None:
    while True:
        seen.allocatable[(await kubelet.totals()).allocatable.get(NIC, 0)] += 1
        await asyncio.sleep(LOOK_EVERY)


async def _admit(kubelet: Kubelet, seen: _Seen) -> None:
    """Let one pod come after the other: the kubelet's own Allocates."""
    while not seen.failed:
        async with seen.turn:
            try:
                await kubelet.admit(POD, NIC, COUNT // 2)
            except KubeletError as error:
                seen.failed.append(str(error))
                return
            seen.pods += 1
            await kubelet.remove(POD)
        await asyncio.sleep(PODS_EVERY)


async def _call(node: Node, seen: _Seen) -> None:
    """Call Allocate on the gateway's own socket, one call after the other."""
    requests = allocate_requests([f"dev-{number}" for number in range(COUNT)])
    through = next(path for path in node.plugin_sockets() if path.is_relative_to(node.sockets))
    with Caller(through, f"{SERVICE}/Allocate", requests) as caller:
        while not seen.failed:
            try:
                async with seen.turn:
                    [taken] = await asyncio.to_thread(caller.call, 1)
            except (CallError, OSError) as error:
                seen.failed.append(str(error))
                return
            seen.answered += 1
            seen.slowest = max(seen.slowest, taken / 1e9)
            await asyncio.sleep(0.005)
