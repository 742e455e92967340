"""A standby: of two gateways with the same arguments the one that leads is killed, again and again.

What counts is how long the kubelet's records were short of GPUs, by its own clock: from the moment that they had none to the
one at which they had all again; 0 where they had all of them all the time, looked at every 0.5 ms. A pod that comes 100 ms
after the kill must run. The other gateway leads from then on, also when the one that was killed is there again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.leader.machine import Stage
from gateway_lab.bench.handovers import LATER_SECONDS, runs
from gateway_lab.bench.load import busy_loops
from gateway_lab.bench.measure import Report, line, spread
from gateway_lab.bench.node import GPUS, RESOURCE, Node
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets.kubelet import Kubelet, KubeletError
from gateway_lab.waiting import until

ON: Final = "1.37"
MEDIAN_MS: Final = 30.0
WORST_MS: Final = 100.0
BUSY_MEDIAN_MS: Final = 60.0
PATIENCE: Final = 30.0
GONE_WITHIN: Final = 1.0
"""Seconds in which the kubelet's records have no GPU after a kill, if they do at all: the kernel ends a connection in a hundredth."""
BOTH: Final = frozenset({Stage.LEADING.value, Stage.STANDBY.value})

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
    """Kill who leads ``runs`` times: as it is, with a slow look at the hardware, and with every processor busy."""

    def slow(node: Node) -> list[str]:
        return [str(python), "-P", "-c", SLOW, *node.gateway_command()[1:]]

    await _killed(report, python, "a standby", runs, Node.gateway_command, MEDIAN_MS)
    await _killed(report, python, "a standby, a look takes 2 s", runs, slow, MEDIAN_MS)
    with ExitStack() as stack:
        stack.enter_context(busy_loops(1))
        await _killed(report, python, "a standby, every processor busy", runs, Node.gateway_command, BUSY_MEDIAN_MS)


async def _killed(
    report: Report, python: Path, name: str, times: int, command: Callable[[Node], list[str]], limit: float
) -> None:
    kills: list[_Kill] = []
    async with Node.make(python) as node:
        kubelet = await node.kubelet(ON, genuine=True)
        await kubelet.start()
        argv = ["env", "POD_UID=0", *command(node)]  # The containers of one pod are of one age.
        two = [await _started(node, argv) for _ in range(2)]
        for number in range(times):
            await until(lambda two=two: {one.stage for one in two} == BOTH, PATIENCE)  # type: ignore[misc]
            two.sort(key=lambda one: one.stage == Stage.LEADING.value)
            other, leads = two
            mark = other.seen
            short, ran = await _kill(kubelet, leads, other, f"pod-{number}")
            after = _took(other, mark)
            await leads.kill()
            again, mark = await _started(node, argv), other.seen
            await until(lambda two=(again, other): {one.stage for one in two} == BOTH, PATIENCE)  # type: ignore[misc]
            kills.append(_Kill(short, ran, after, _took(again) + _took(other, mark)))
            two = [again, other]
    figures = spread([one.short_ms for one in kills])
    report.figures[f"{name}, who leads is killed, genuine {ON}: records short of GPUs (ms)"] = figures
    report.keep("a standby, records short (ms)", name, [one.short_ms for one in kills])
    report.bar(f"{name}, killed: median", figures["median"], limit, "ms", line(figures))
    if limit == MEDIAN_MS:
        report.bar(f"{name}, killed: worst", figures["max"], WORST_MS, "ms")
    later = f"{name}, killed: a pod ran {LATER_SECONDS * 1000:g} ms later"
    report.bar(later, sum(one.ran for one in kills), times, f"of {times}", exact=True)
    report.bar(f"{name}, killed: another one leads", sum(one.after for one in kills), times, "", exact=True)
    report.bar(f"{name}, back: another one leads", sum(one.back for one in kills), 0, "", exact=True)


@dataclass(frozen=True, slots=True)
class _Kill:
    """What one kill did."""

    short_ms: float
    ran: bool
    """Whether a pod ran that came a moment later."""
    after: int
    """How often another gateway began to lead after the kill."""
    back: int
    """The same, once the one that was killed was there again."""


async def _started(node: Node, argv: list[str]) -> GatewayProcess:
    one = await node.plugin(argv)
    await one.begun()
    return one


def _took(gateway: GatewayProcess, since: int = 0) -> int:
    """Count how often a gateway began to lead."""
    return len(gateway.lines("leader", since, stage=Stage.LEADING.value, why="ListsReady"))


async def _kill(kubelet: Kubelet, leads: GatewayProcess, other: GatewayProcess, pod: str) -> tuple[float, bool]:
    """Kill who leads; give the ms for which the kubelet's records were short, and whether a pod ran that came a moment later."""
    await kubelet.wait(RESOURCE, GPUS)
    gone = asyncio.create_task(kubelet.wait(RESOURCE, 0, GONE_WITHIN))
    await asyncio.sleep(0.05)  # The kubelet is asked before.
    mark = other.seen
    os.kill(leads.pid, signal.SIGKILL)
    coming = asyncio.create_task(_come(kubelet, pod))
    await other.wait_for("registered", since=mark)
    whole = (await kubelet.wait(RESOURCE, GPUS)).monotonic_ns
    ran = await coming
    try:
        began = (await gone).monotonic_ns
    except KubeletError:
        return 0.0, ran
    if began > whole:
        whole = (await kubelet.wait(RESOURCE, GPUS)).monotonic_ns
    return (whole - began) / 1e6, ran


async def _come(kubelet: Kubelet, pod: str) -> bool:
    await asyncio.sleep(LATER_SECONDS)
    return await runs(kubelet, pod)
