"""A pair (``--standby``): the gateway that serves is killed, again and again; and what the second one costs.

What counts is how long the kubelet's records were short of GPUs, by its own clock: from the moment that they had none to the
one at which they had all again; 0 where they had all of them all the time, looked at every 0.5 ms. After each kill a pod must get a
GPU, and the next kill waits until another one stands by.
A few kills end a pair's patience (``gateway.pair.policy``): then a new one is started on a new node.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from gateway.lab.bench.footprint import weight
from gateway.lab.bench.load import busy_loops
from gateway.lab.bench.measure import Report, line, spread
from gateway.lab.bench.node import GPUS, RESOURCE, Node
from gateway.lab.bench.presence import IDLE_SECONDS, idle_cost
from gateway.lab.gatewayproc import GatewayProcess
from gateway.lab.kubelets.kubelet import Kubelet, KubeletError

ON: Final = "1.37"
MEDIAN_MS: Final = 20.0
WORST_MS: Final = 100.0
BUSY_MEDIAN_MS: Final = 60.0
TIMES: Final = 1.5
"""How many times what one gateway costs a pair may cost, in memory and in idle CPU time."""
KILLS: Final = 3
"""Of one pair: the fifth young death in a row would end it, and each is followed by a longer wait."""
IDLE_ROUNDS: Final = 3
GONE_WITHIN: Final = 1.0
"""Seconds in which the kubelet's records have no GPU after a kill, if they do at all: the kernel ends a connection in a hundredth."""

SLOW: Final = """
import asyncio
from devices.gpu.simulated import backend
watch = backend.SimulatedBackend.watch
async def slowly(self):
    await asyncio.sleep(2)
    async for sight in watch(self):
        yield sight
backend.SimulatedBackend.watch = slowly
from gateway.cli.main import gateway
gateway()
"""
"""A program: the gateway with a backend whose first look takes two seconds, as one that waits for a driver."""


async def standby(report: Report, python: Path, runs: int) -> None:
    """Kill who serves ``runs`` times: as it is, with a slow look at the hardware, and with every processor busy."""

    def slow(node: Node) -> list[str]:
        return [str(python), "-P", "-c", SLOW, *_command(node)[1:]]

    await _killed(report, python, "a pair", runs, _command, MEDIAN_MS)
    await _killed(report, python, "a pair, a look takes 2 s", runs, slow, MEDIAN_MS)
    with ExitStack() as stack:
        stack.enter_context(busy_loops(1))
        await _killed(report, python, "a pair, every processor busy", runs, _command, BUSY_MEDIAN_MS)
    await _cost(report, python)


def _command(node: Node) -> list[str]:
    return node.gateway_command(["--standby"])


async def _killed(
    report: Report, python: Path, name: str, runs: int, command: Callable[[Node], list[str]], limit: float
) -> None:
    short: list[float] = []
    served, note = 0, ""
    while len(short) < runs:
        async with Node.make(python) as node:
            kubelet = await node.kubelet(ON, genuine=True)
            await kubelet.start()
            pair = await node.plugin(command(node))
            mark = 0
            for number in range(min(KILLS, runs - len(short))):
                stands_by = int((await pair.wait_for("ready", since=mark, serves=False))["gateway"])
                await kubelet.wait(RESOURCE, GPUS)
                mark = pair.seen
                try:
                    short.append(await _kill(kubelet, pair, stands_by, f"pod-{number}"))
                    served += 1
                except KubeletError as error:
                    short += [float("inf")] if len(short) < runs else []
                    note = error.message.splitlines()[0]
    times = spread(short)
    report.figures[f"{name}, who serves is killed, genuine {ON}: records short of GPUs (ms)"] = times
    report.keep("a pair, records short (ms)", name, short)
    report.bar(f"{name}, killed: median", times["median"], limit, "ms", line(times))
    if limit == MEDIAN_MS:
        report.bar(f"{name}, killed: worst", times["max"], WORST_MS, "ms")
    report.bar(f"{name}, killed: a pod got a GPU right after", served, runs, f"of {runs}", note, exact=True)


async def _kill(kubelet: Kubelet, pair: GatewayProcess, stands_by: int, pod: str) -> float:
    """Kill who serves, and admit a pod when the other one does; give the ms for which the kubelet's records were short."""
    [serves] = {*children(pair.pid)} - {stands_by}
    gone = asyncio.create_task(kubelet.wait(RESOURCE, 0, GONE_WITHIN))
    await asyncio.sleep(0.05)  # The kubelet is asked before.
    mark = pair.seen
    os.kill(serves, signal.SIGKILL)
    await pair.wait_for("registered", since=mark)
    whole = (await kubelet.wait(RESOURCE, GPUS)).monotonic_ns
    await kubelet.admit(pod, RESOURCE, 1)
    try:
        began = (await gone).monotonic_ns
    except KubeletError:
        return 0.0
    if began > whole:
        whole = (await kubelet.wait(RESOURCE, GPUS)).monotonic_ns
    return (whole - began) / 1e6


def children(pid: int) -> list[int]:
    """Give the processes that a process with one thread started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _cost(report: Report, python: Path) -> None:
    """What a pair and one alone cost in the same idle seconds."""
    rounds = [await _idle(python) for _ in range(IDLE_ROUNDS)]
    cpu = f"CPU in {IDLE_SECONDS:g} idle seconds"
    for at, (what, unit) in enumerate((("memory (proportional set size)", "MiB"), (cpu, "ms"))):
        alone, pair = (median(one[which][at] for one in rounds) for which in (0, 1))
        note = f"{pair:.1f} {unit}, one {alone:.1f} {unit}"
        report.bar(f"a pair: {what}, times one alone", pair / alone, TIMES, "", note)


async def _idle(python: Path) -> list[tuple[float, float]]:
    """Give the MiB and the ms of CPU of one alone, and of a pair, its parent included."""
    async with Node.make(python) as single, Node.make(python) as double:
        for node in (single, double):
            await (await node.kubelet(ON, genuine=True)).start()
        alone, pair = await single.gateway(), await double.plugin(_command(double))
        await alone.begun()
        await pair.wait_for("ready", serves=False)
        used = await idle_cost({"alone": alone, "pair": pair})
        families = ("alone", [alone.pid]), ("pair", [pair.pid, *children(pair.pid)])
        return [(weight(pids), used[name].cpu) for name, pids in families]
