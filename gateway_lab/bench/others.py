"""What must not happen to a kubelet because of others: a broken checkpoint of 1.9.

Kubelet 1.9 writes its checkpoint in place and under no lock, at each list: two lists at once leave it broken, and after the next
start what pods hold is given away.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Final

from gateway_lab.bench.measure import Report
from gateway_lab.bench.node import Node
from gateway_lab.kubelets import build

RESOURCES: Final = 4
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
