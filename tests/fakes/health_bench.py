"""How long a health event of NVML takes to the kubelet's books: ``python -m tests.fakes.health_bench``.

From the moment that the fake NVML tells an Xid until the kubelet would give out fewer devices: 8 GPUs, and 8 000 replicas of
them, on the genuine kubelet where it is built. Nothing here is a test: machines differ.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from gateway.lab.build import built
from gateway.lab.gatewayproc import GatewayProcess
from gateway.lab.kubelet import Kubelet
from tests.fakes.nvml import dgx

GPU: Final = "nvidia.com/gpu"
KUBELET: Final = "1.37"
ROUNDS: Final = 5
BARS: Final = {1: 50.0, 1000: 150.0}
"""Milliseconds that it may take at most, by replicas of each of 8 GPUs."""


async def events(replicas: int) -> list[float]:
    """Let seven GPUs fall ill one after another; give the milliseconds that each took."""
    with TemporaryDirectory(prefix="dpg-") as folder:
        root = Path(folder)
        world = dgx(root / "world")
        os.environ.update(world.env())
        (root / "dp").mkdir()
        file = root / "config.yaml"
        shared = f"sharing: {{timeSlicing: {{resources: [{{name: {GPU}, replicas: {replicas}}}]}}}}\n"
        file.write_text("version: v1\n" + (shared if replicas > 1 else ""))
        folders = ("--socket-dir", str(root / "dp"), "--state-dir", str(root / "state"), "--config-file", str(file))
        command = (sys.executable, "-m", "gateway.cli.main", "--backend", "nvidia", "--log-format", "json", *folders)
        async with await Kubelet.launch(KUBELET, root / "dp", built(KUBELET)) as kubelet:
            await kubelet.start()
            async with await GatewayProcess.launch(command):
                await kubelet.wait(GPU, 8 * replicas, 60)
                taken = []
                for index in range(7):
                    await asyncio.sleep(0.2)
                    begin = time.monotonic_ns()
                    world.event(index, 79)
                    seen = await kubelet.wait(GPU, (7 - index) * replicas, 60)
                    taken.append((seen.monotonic_ns - begin) / 1e6)
                return taken


async def main() -> int:
    """Measure, print, and give the exit status: 0 where the bars were kept."""
    kept = True
    for replicas, bar in BARS.items():
        taken = [one for _ in range(ROUNDS) for one in await events(replicas)]
        kept = kept and max(taken) < bar
        print(  # noqa: T201 - its job
            f"8 GPUs x {replicas}: n {len(taken)}, median {statistics.median(taken):.1f} ms, worst {max(taken):.1f} ms, bar "
            f"{bar:g} ms"
        )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
