"""How long a health event of NVML takes to the kubelet: ``python -m tests.fakes.health_bench``.

From the moment that the fake NVML tells an Xid until the list that says so has come in whole at the kubelet's end of the stream
(the promise: all that is the gateway's), and until the kubelet would give out fewer devices (its own part besides): 8 GPUs, and
8 000 replicas of them. The records are those of the genuine kubelet where it is built. Nothing here is a test: machines differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

import grpc.aio

from adapters.v1beta1 import V1BETA1
from devices.model import Health
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets.build import built
from gateway_lab.kubelets.kubelet import Kubelet
from tests.fakes.nvml import World, dgx

GPU: Final = "nvidia.com/gpu"
KUBELET: Final = "1.37"
ROUNDS: Final = 5
BARS: Final = {1: 50.0, 1000: 150.0}
"""Milliseconds that it may take at most to the kubelet's end of the stream, by replicas of each of 8 GPUs."""

Told: TypeAlias = Callable[[int], Awaitable[int]]
"""Waits until so many devices are well, and gives the moment from which they were (CLOCK_MONOTONIC, nanoseconds)."""


@contextlib.asynccontextmanager
async def stream(folder: Path) -> AsyncIterator[Told]:
    """A kubelet that only listens: it takes a Register and reads lists as bytes, so that nothing of it is measured."""
    lists: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    reading: list[asyncio.Task[None]] = []

    async def read(endpoint: str) -> None:
        options = (("grpc.max_receive_message_length", -1),)
        async with grpc.aio.insecure_channel(f"unix:{folder / endpoint}", options=options) as channel:
            listen: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
                f"/{V1BETA1.plugin_service}/ListAndWatch"
            )
            async for data in listen(b""):
                lists.put_nowait((time.monotonic_ns(), data))

    async def register(request: bytes, _context: object) -> bytes:
        reading.append(asyncio.create_task(read(V1BETA1.decode_register(request).endpoint)))
        return b""

    async def told(well: int) -> int:
        while True:
            at, data = await lists.get()
            if sum(device.health is Health.HEALTHY for device in V1BETA1.decode_list(data)) == well:
                return at

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Register": grpc.unary_unary_rpc_method_handler(register)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1BETA1.registration_service, handlers),))
    server.add_insecure_port(f"unix:{folder / 'kubelet.sock'}")
    await server.start()
    try:
        yield told
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await server.stop(grace=0)


@contextlib.asynccontextmanager
async def records(folder: Path) -> AsyncIterator[Told]:
    """A whole kubelet, and when it would give out what the list says."""
    async with await Kubelet.launch(KUBELET, folder, built(KUBELET)) as kubelet:
        await kubelet.start()

        async def told(well: int) -> int:
            return (await kubelet.wait(GPU, well, 60)).monotonic_ns

        yield told


async def events(replicas: int, kubelet: Callable[[Path], contextlib.AbstractAsyncContextManager[Told]]) -> list[float]:
    """Let seven GPUs fall ill one after another; give the milliseconds that each took."""
    with TemporaryDirectory(prefix="dpg-") as folder:
        root = Path(folder)
        world = dgx(root / "world")
        os.environ.update(world.env())
        (root / "dp").mkdir()
        async with kubelet(root / "dp") as told, await GatewayProcess.launch(command(root, replicas)):
            async with asyncio.timeout(60):
                return await one_by_one(world, replicas, told)


async def one_by_one(world: World, replicas: int, told: Told) -> list[float]:
    """Measure each event after things are quiet again: what one leaves to be done later must not delay the next."""
    await told(8 * replicas)
    taken = []
    for index in range(7):
        await asyncio.sleep(0.2)
        begin = time.monotonic_ns()
        world.event(index, 79)
        taken.append((await told((7 - index) * replicas) - begin) / 1e6)
    return taken


def command(root: Path, replicas: int) -> tuple[str, ...]:
    """The command line of a gateway on that node."""
    file = root / "config.yaml"
    shared = f"sharing: {{timeSlicing: {{resources: [{{name: {GPU}, replicas: {replicas}}}]}}}}\n"
    file.write_text("version: v1\n" + (shared if replicas > 1 else ""))
    folders = ("--socket-dir", str(root / "dp"), "--state-dir", str(root / "state"), "--config-file", str(file))
    return (sys.executable, "-m", "gateway", "--backend", "nvidia", "--log-format", "json", *folders)


async def main() -> int:
    """Measure, print, and give the exit status: 0 where the bars were kept."""
    kept = True
    for replicas, bar in BARS.items():
        for where in (stream, records):
            taken = [one for _ in range(ROUNDS) for one in await events(replicas, where)]
            kept = kept and (where is records or max(taken) < bar)
            limit = f"bar {bar:g} ms" if where is stream else "no bar"
            print(  # noqa: T201 - its job
                f"8 GPUs x {replicas} to the kubelet's {where.__name__}: n {len(taken)}, "
                f"median {statistics.median(taken):.1f} ms, worst {max(taken):.1f} ms, {limit}"
            )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
