"""Handover: a second gateway starts on the node and takes over from the first, again and again on one living kubelet.

What counts is what the kubelet would give out: its records are read about every millisecond, and the gap is from the last
look that had all GPUs to the first that has them again (so it is never told too short). A pod that asks in the gap may be
refused, which is counted. One that asks 100 ms after the new gateway has registered must run, and so must one in the end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway_lab.bench.measure import Report, line, others, spread
from gateway_lab.bench.node import GPUS, RESOURCE, Node
from gateway_lab.gatewayproc import GatewayError, GatewayProcess
from gateway_lab.kubelets import build
from gateway_lab.kubelets.kubelet import Kubelet, KubeletError

MEDIAN_MS: Final = {1: 30.0, 8: 80.0}
"""By the number of resources that change hands."""
WORST_MS: Final = 150.0
LATER_SECONDS: Final = 0.1
"""How long after a handover a pod comes that must run."""
LOOK_SECONDS: Final = 0.001
SETTLING_SECONDS: Final = 0.15
"""How long the records are watched after the new gateway serves: a kubelet that loses it again does so within that."""


class Looks:
    """Looks into a kubelet's records, and the longest time in which they didn't have all GPUs.

    Args:
        now: when all were there (monotonic seconds).
    """

    def __init__(self, now: float) -> None:
        self._full_at = now
        self._gone = False
        self.gap_ms = 0.0

    def saw(self, before: float, after: float, *, full: bool) -> None:
        """Take note of a look that was begun at ``before`` and answered by ``after`` (monotonic seconds)."""
        if full and self._gone:
            self.gap_ms = max(self.gap_ms, (after - self._full_at) * 1000)
        self._gone = not full
        if full:
            self._full_at = before


async def _look(kubelet: Kubelet, looks: Looks, names: Sequence[str]) -> bool:
    before = time.monotonic()
    allocatable = (await kubelet.totals()).allocatable
    full = all(allocatable.get(name, 0) == GPUS for name in names)
    looks.saw(before, time.monotonic(), full=full)
    return full


async def _follow(kubelet: Kubelet, looks: Looks, names: Sequence[str], asked: list[asyncio.Task[bool]]) -> None:
    while True:
        if not await _look(kubelet, looks, names) and not asked:
            asked.append(asyncio.create_task(runs(kubelet, "in-the-gap")))
        await asyncio.sleep(LOOK_SECONDS)


async def runs(kubelet: Kubelet, pod: str) -> bool:
    """Admit a pod and remove it; tell whether it ran."""
    try:
        await kubelet.admit(pod, RESOURCE, 1)
    except KubeletError:
        return False
    finally:
        await kubelet.remove(pod)
    return True


async def handovers(report: Report, python: Path, versions: Sequence[str], runs: int) -> None:
    """On each genuine kubelet that is built: ``runs`` handovers, one after another, of one resource and of eight."""
    for version in versions:
        for count in MEDIAN_MS:
            if build.built(version) is None:
                note = f"not built: python -m gateway_lab.kubelets.build {version}"
                report.bar(f"handover, genuine {version}", math.nan, MEDIAN_MS[count], "ms", note)
            else:
                await _on(report, python, version, runs, count)


async def _on(report: Report, python: Path, version: str, runs: int, count: int) -> None:
    name = f"handover, genuine {version}" + (f", {count} resources" if count > 1 else "")
    names = [RESOURCE, *(f"example.com/gpu-{number}" for number in range(1, count))]
    gaps: list[float] = []
    registers: Counter[int] = Counter()
    asked: list[asyncio.Task[bool]] = []
    right, later, note = 0, 0, ""
    async with Node.make(python) as node:
        kubelet = await node.kubelet(version, genuine=True)
        await kubelet.start()
        old = await node.gateway("resources:\n" + "".join(f"  {one}:\n    gpus: {GPUS}\n" for one in names))
        for one in names:
            await kubelet.wait(one, GPUS)
        for number in range(runs):
            before = (await kubelet.registers()).get(RESOURCE, 0)
            try:
                old, change = await _handed_over(node, kubelet, old, names)
                gaps.append(change.gap_ms)
                later += change.later
                asked += change.asked
                await _right(node, kubelet, f"pod-{number}")
                right += 1
            except (GatewayError, KubeletError, _WrongError) as error:
                note = str(error).splitlines()[0]
                gaps.append(math.inf)
            registers[(await kubelet.registers()).get(RESOURCE, 0) - before] += 1
    times = spread(gaps)
    report.figures[f"{name} (ms)"] = times
    report.figures[f"{name}: pods that asked in the gap"] = f"{sum(one.result() for one in asked)} of {len(asked)} ran"
    report.keep("handover gap (ms)", name.removeprefix("handover, "), gaps)
    report.bar(f"{name}: median", times["median"], MEDIAN_MS[count], "ms", line(times))
    report.bar(f"{name}: worst", times["max"], WORST_MS, "ms")
    report.bar(f"{name}: a pod ran {LATER_SECONDS * 1000:g} ms later", later, runs, f"of {runs}", note, exact=True)
    report.bar(f"{name}: the kubelet's view right after", right, runs, f"of {runs}", note, exact=True)
    report.bar(f"{name}: with just one Register", registers[1], runs, f"of {runs}", others(registers), exact=True)


@dataclass(frozen=True, slots=True)
class _Change:
    """One handover."""

    gap_ms: float
    later: bool
    """Whether a pod ran that came a moment later."""
    asked: Sequence[asyncio.Task[bool]]
    """Whether a pod ran that asked in the gap, if there was one."""


async def _handed_over(
    node: Node, kubelet: Kubelet, old: GatewayProcess, names: Sequence[str]
) -> tuple[GatewayProcess, _Change]:
    """Start a gateway beside ``old``, wait until it leads, end ``old``; give the new one, and what was seen."""
    looks = Looks(time.monotonic())
    asked: list[asyncio.Task[bool]] = []
    following = asyncio.create_task(_follow(kubelet, looks, names, asked))
    try:
        new = await node.gateway()
        for name in names:
            await new.wait_for("registered", resource=name)
        deadline = time.monotonic() + 10
        await asyncio.sleep(LATER_SECONDS)
        later = await runs(kubelet, "later")
        await asyncio.sleep(SETTLING_SECONDS)
        await old.terminate()
        await asyncio.sleep(SETTLING_SECONDS)
    finally:
        following.cancel()
        await asyncio.wait([following])
    if not following.cancelled() and (error := following.exception()) is not None:
        raise error
    while not await _look(kubelet, looks, names):
        if time.monotonic() > deadline:
            raise _WrongError(
                f"expected {GPUS} GPUs within 10 s of the handover: {(await kubelet.totals()).allocatable}"
            )
        await asyncio.sleep(LOOK_SECONDS)
    await asyncio.gather(*asked)
    return new, _Change(looks.gap_ms, later, asked)


class _WrongError(Exception):
    """The kubelet doesn't believe what it should."""


async def _right(node: Node, kubelet: Kubelet, pod: str) -> None:
    """Check that the kubelet would give out all GPUs (by pod-resources too, where it has that), and that it can."""
    listed = await node.allocatable()
    if listed is not None and len(listed) != GPUS:
        raise _WrongError(f"expected {GPUS} GPUs in GetAllocatableResources, got {len(listed)}")
    await kubelet.admit(pod, RESOURCE, 1)
    await kubelet.remove(pod)
