"""What must not happen to a kubelet because of others: a broken checkpoint of 1.9, and devices gone while strangers read lists.

Kubelet 1.9 writes its checkpoint in place and under no lock, at each list: two lists at once leave it broken, and after the next
start what pods hold is given away. A stranger is anybody with the plugin's socket who calls ListAndWatch.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from adapters.registry import by_name
from gateway_lab.bench.measure import Report
from gateway_lab.bench.node import GPUS, RESOURCE, Node, settled
from gateway_lab.kubelets import build
from gateway_lab.kubelets.kubelet import Kubelet

RESOURCES: Final = 4
READERS_A_SECOND: Final = 100
READ_FOR: Final = 10.0
"""Seconds for which strangers read."""
AT_REST: Final = 0.25
"""Seconds after the last list at which 1.9 has written its checkpoint: it does so in a millisecond."""


async def checkpoints(report: Report, python: Path, runs: int) -> None:
    """Start a genuine 1.9 again and again beside a gateway with several resources: its checkpoint at rest must be whole."""
    name = f"checkpoints broken at rest, genuine 1.9, {RESOURCES} resources, {runs} starts"
    if build.built("1.9") is None:
        report.bar(name, math.nan, 0, "", "not built: python -m gateway_lab.kubelets.build 1.9", exact=True)
        return
    counts = {f"example.com/r{number}": 4 + 3 * number for number in range(RESOURCES)}
    profile = "resources:\n" + "".join(f"  {resource}:\n    gpus: {count}\n" for resource, count in counts.items())
    broken = 0
    async with Node.make(python) as node:
        await (await node.gateway(profile)).begun()
        for number in range(runs):
            kubelet = await node.kubelet("1.9", genuine=True)
            await kubelet.start()
            for resource, count in counts.items():
                await kubelet.wait(resource, count, 20)
            if number == 0:  # What pods hold makes the checkpoint long enough to break.
                for resource in counts:
                    await kubelet.admit(f"pod-{resource.rpartition('/')[2]}-{'x' * 30}", resource, 2)
            await asyncio.sleep(AT_REST)
            try:
                json.loads((node.sockets / "kubelet_internal_checkpoint").read_text())
            except ValueError:
                broken += 1
                (node.sockets / "kubelet_internal_checkpoint").unlink()
            await kubelet.close()
    report.bar(name, broken, 0, "", exact=True)


async def strangers(report: Report, python: Path, version: str) -> None:
    """Let strangers read the list, a hundred a second, and watch what the kubelet has to give meanwhile."""
    name = f"without devices while {READERS_A_SECOND} strangers a second read lists, genuine {version}"
    if build.built(version) is None:
        report.bar(name, math.nan, 0, "s", f"not built: python -m gateway_lab.kubelets.build {version}", exact=True)
        return
    async with Node.make(python) as node:
        await (await node.gateway()).begun()
        kubelet = await node.kubelet(version, genuine=True)
        await kubelet.start()
        await settled(kubelet, RESOURCE, GPUS)
        reading = asyncio.ensure_future(_read_on(node))
        try:
            short = await _short_of_devices(kubelet, time.monotonic() + READ_FOR)
            registers = (await kubelet.registers()).get(RESOURCE, 0)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    report.bar(name, round(short, 2), 0, "s", exact=True)
    report.bar(f"Registers meanwhile, genuine {version}", registers, 1, "", exact=True)


async def _short_of_devices(kubelet: Kubelet, until: float) -> float:
    """Return for how many seconds the kubelet had fewer devices than there are, until a moment (monotonic seconds)."""
    short, last = 0.0, time.monotonic()
    while last < until:
        there = (await kubelet.totals()).allocatable.get(RESOURCE, 0)
        now = time.monotonic()
        short += now - last if there < GPUS else 0.0
        last = now
        await asyncio.sleep(0.01)
    return short


async def _read_on(node: Node) -> None:
    """Open a list and leave, again and again, each time as somebody new."""
    readers: set[asyncio.Task[None]] = set()
    try:
        while True:
            if paths := [path for path in node.plugin_sockets() if path.parent == node.sockets]:
                reader = asyncio.ensure_future(_read(paths[0]))
                readers.add(reader)
                reader.add_done_callback(readers.discard)
            await asyncio.sleep(1 / READERS_A_SECOND)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(path: Path) -> None:
    options = (("grpc.use_local_subchannel_pool", 1),)
    method = f"/{by_name('v1beta1').plugin_service}/ListAndWatch"
    with suppress(grpc.aio.AioRpcError, TimeoutError):
        async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel, asyncio.timeout(2):
            call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            async for _ in call(b""):
                break
