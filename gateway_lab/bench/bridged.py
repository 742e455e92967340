"""What the bridge costs over a plugin that is called directly.

``python -m gateway_lab.bench --only bridge``. Directly and through the bridge are called in turns, in the same minutes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from devices.model import Device, Health
from gateway_lab.bench.caller import Caller
from gateway_lab.bench.calls import SERVICE, allocate_requests, in_turns
from gateway_lab.bench.measure import Report, line, percentile, spread
from gateway_lab.bench.node import Node, Unheard
from gateway_lab.bench.presence import idle_cost
from gateway_lab.kubelets.kubelet import Kubelet
from gateway_lab.plugins.played import PlayedPlugin
from gateway_lab.waiting import until

NIC: Final = "vendor.example/nic"
COUNT: Final = 8
ALLOCATE_MS: Final = 1.5
CALLS: Final = 2_000
"""Allocates each way at least: in the first second the kubelet and the gateway are still busy with the list."""
LIST_MS: Final = 200.0
RSS_MIB: Final = 75.0
PLUGINS: Final = 30
DEVICES: Final = 10_000
GENUINE: Final = "1.37"
"""The kubelet, the genuine one where it is built."""
SECONDS: Final = 30.0
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
    """Measure the bridge: calls, a long list, and many plugins."""
    async with Node.make(python) as node:
        await _calls(report, node, times)
    async with Node.make(python) as node, Node.make(python) as direct:
        await _long_list(report, node, direct)
    async with Node.make(python) as node:
        await _many(report, node)


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
