"""What it costs a node that the gateway is there: its start, its memory and time while nothing happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from statistics import median
from typing import Final

from gateway_lab.bench.footprint import Footprint, footprint
from gateway_lab.bench.measure import Report, line, spread
from gateway_lab.bench.node import GPUS, RESOURCE, Node

COLD_START_MS: Final = 250.0
IDLE_SECONDS: Final = 20.0
IDLE_ROUNDS: Final = 5
SCRAPES: Final = (2.0, 17.0)
"""When metrics are asked for within the idle seconds: every fifteen, as Prometheus often does."""
SETTLING_SECONDS: Final = 3.0
MORE: Final = {"metrics off": (14.0, 8.0, 80.0), "metrics on": (18.0, 12.0, 120.0)}
"""What it may cost more than the trivial plugin: MiB, ms of CPU, context switches."""


async def cold_start(report: Report, python: Path, runs: int) -> None:
    """From the spawn of the process until the kubelet's records show its first list."""
    samples = []
    async with Node.make(python) as node:
        kubelet = await node.kubelet(genuine=True)
        await kubelet.start()
        for _ in range(runs):
            begin = time.monotonic_ns()
            gateway = await node.gateway()
            samples.append(((await kubelet.wait(RESOURCE, GPUS)).monotonic_ns - begin) / 1e6)
            await gateway.terminate()
            await kubelet.wait(RESOURCE, 0)
    figures = spread(samples)
    report.figures["cold start, spawn to first list (ms)"] = figures
    report.keep("cold start (ms)", "gateway", samples)
    report.bar("cold start: median", figures["median"], COLD_START_MS, "ms", line(figures))


async def idle(report: Report, python: Path) -> None:
    """The gateway without and with metrics, and a trivial plugin, each with a kubelet, in the same twenty seconds.

    ``IDLE_ROUNDS`` times, each with processes of their own; the median of each figure counts. The threads of gRPC's pool
    wake up by a clock of their own, in some processes three times as often as in others, whatever the program does.
    """
    rounds = [await _idle_round(python) for _ in range(IDLE_ROUNDS)]
    used = {name: _medians([one[name] for one in rounds]) for name in rounds[0]}
    report.figures[f"in {IDLE_SECONDS:g} idle seconds"] = {name: asdict(cost) for name, cost in used.items()}
    for name, (mib, cpu, switches) in MORE.items():
        ours, least_cost = used[name], used["trivial"]
        more = ours.over(least_cost)

        def note(read: Callable[[Footprint], float], ours: Footprint = ours, other: Footprint = least_cost) -> str:
            return f"gateway {read(ours):.1f}, trivial plugin {read(other):.1f}"

        report.bar(f"idle, {name}: memory more (PSS)", more.pss, mib, "MiB", note(lambda cost: cost.pss))
        report.bar(f"idle, {name}: memory more (RSS)", more.rss, mib, "MiB", note(lambda cost: cost.rss))
        report.bar(f"idle, {name}: CPU more", more.cpu, cpu, "ms", note(lambda cost: cost.cpu))
        report.bar(
            f"idle, {name}: context switches more", more.switches, switches, "", note(lambda cost: cost.switches)
        )


def _medians(costs: Sequence[Footprint]) -> Footprint:
    """The median of each figure by itself."""
    return Footprint(*(median(figures) for figures in zip(*(astuple(one) for one in costs), strict=True)))


async def _idle_round(python: Path) -> dict[str, Footprint]:
    async with Node.make(python) as off, Node.make(python) as on, Node.make(python) as least:
        kubelets = [await node.kubelet(genuine=True) for node in (off, on, least)]
        for kubelet in kubelets:
            await kubelet.start()
        processes = {
            "metrics off": await off.gateway(),
            "metrics on": await on.gateway(options=("--metrics-address", "127.0.0.1:0")),
            "trivial": await least.plugin(least.trivial_command()),
        }
        for kubelet in kubelets:
            await kubelet.wait(RESOURCE, GPUS)
        port = int((await processes["metrics on"].wait_for("listening", what="metrics"))["port"])
        await _scrape(port)
        await asyncio.sleep(SETTLING_SECONDS)
        before = {name: footprint(process.pid) for name, process in processes.items()}
        begin = time.monotonic()
        for at in SCRAPES:
            await asyncio.sleep(begin + at - time.monotonic())
            await _scrape(port)
        await asyncio.sleep(begin + IDLE_SECONDS - time.monotonic())
        return {name: footprint(process.pid).since(before[name]) for name, process in processes.items()}


async def _scrape(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    if b"200 OK" not in answer[:64]:
        raise RuntimeError(f"expected metrics, got {answer[:200]!r}")
