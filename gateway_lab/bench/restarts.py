"""Restarts and other trouble, in one gateway process: how long until the kubelet's records show all GPUs again.

Times are taken where the kubelet is, by CLOCK_MONOTONIC. That the records show the GPUs could be the list's doing alone
(kubelets 1.25 to 1.36 can record a list and fail every Allocate), so each restart ends with a pod that gets one.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from gateway.kubelet.identity import KUBELET_SOCKET
from gateway.wires.unix import listens
from gateway_lab.bench.measure import Report, counted, line, others, percentile, spread
from gateway_lab.bench.node import EMULATED, GPUS, RESOURCE, Node
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets import build
from gateway_lab.kubelets.kubelet import Faults, Gap, Kubelet, KubeletError
from gateway_lab.waiting import until

MEDIAN_GAP_MS: Final = 6.0
P99_GAP_MS: Final = 20.0
RECOVERY_MS: Final = 100.0
REPLACED_MS: Final = 300.0
ERRORS_MS: Final = 2000.0
LINGER_SECONDS: Final = 1.5
"""How long a kubelet is left alone at times, so that a second Register would be seen: longer than the gateway's last look
into the kubelet's records."""


async def restart_gaps(report: Report, python: Path, versions: Sequence[str], runs: int) -> None:
    """Kill -9 and start, again and again: from the first possible connect until the records show all GPUs."""
    for version in versions:
        name = f"restart gap, genuine {version}"
        if build.built(version) is None:
            report.bar(
                name, math.nan, MEDIAN_GAP_MS, "ms", f"not built: python -m gateway_lab.kubelets.build {version}"
            )
            continue
        gaps: list[Gap] = []
        registers: Counter[int] = Counter()
        served = 0
        note = ""
        async with Node.make(python) as node:
            gateway = await node.gateway()
            await gateway.begun()
            for number in range(runs):
                kubelet = await node.kubelet(version, genuine=True)
                try:
                    gaps.append(await kubelet.start_measured(RESOURCE, GPUS))
                    await kubelet.admit(f"pod-{number}", RESOURCE, 1)
                    served += 1
                except KubeletError as error:
                    note = error.message.splitlines()[0]
                await asyncio.sleep(LINGER_SECONDS if number % 20 == 0 else 0)
                registers[(await kubelet.registers()).get(RESOURCE, 0)] += 1
                await kubelet.close()
        times = spread([gap.gap_ms for gap in gaps] or [math.inf])
        late = spread([gap.timer_late_ms for gap in gaps] or [math.inf])
        counting = counted(gaps, P99_GAP_MS)
        excused = len(gaps) - len(counting)
        report.figures[f"{name} (ms)"] = {
            "gateway": times,
            "a 1 ms timer, late": late,
        }
        report.keep("restart gap (ms)", version, (gap.gap_ms for gap in gaps))
        report.bar(
            f"{name}: median",
            times["median"],
            MEDIAN_GAP_MS,
            "ms",
            f"{line(times)}; a 1 ms timer late: {line(late)}",
        )
        p99 = percentile(counting, 99) if counting else math.inf
        why = f"without {excused} in which a 1 ms timer was as late" if excused else ""
        report.bar(f"{name}: p99", p99, P99_GAP_MS, "ms", why)
        report.bar(f"{name}: recovered, and a pod got a GPU", served, runs, f"of {runs}", note, exact=True)
        report.bar(f"{name}: with just one Register", registers[1], runs, f"of {runs}", others(registers), exact=True)


async def _back(kubelet: Kubelet, act: Callable[[], Awaitable[object]]) -> float:
    """Do what makes the devices go, and give the ms from then until they are all back."""
    gone = asyncio.create_task(kubelet.wait(RESOURCE, 0))
    await asyncio.sleep(0)
    begin = time.monotonic_ns()
    await act()
    await gone
    return ((await kubelet.wait(RESOURCE, GPUS)).monotonic_ns - begin) / 1e6


async def cut(node: Node, _gateway: GatewayProcess) -> float:
    """The kubelet alone cuts the stream."""
    kubelet = await node.kubelet()
    await kubelet.start_measured(RESOURCE, GPUS)
    recovered = await _back(kubelet, lambda: kubelet.cut(RESOURCE))
    await kubelet.close()
    return recovered


async def late(node: Node, _gateway: GatewayProcess) -> float:
    """The kubelet binds its socket and listens half a second later: from then on."""
    kubelet = await node.kubelet()
    await kubelet.fault(Faults(listen_late_ms=500))
    await kubelet.start()
    await until(lambda: listens(node.sockets / KUBELET_SOCKET), every=0.0005)
    begin = time.monotonic_ns()
    recovered = ((await kubelet.wait(RESOURCE, GPUS)).monotonic_ns - begin) / 1e6
    await kubelet.close()
    return recovered


async def away(node: Node, _gateway: GatewayProcess, *, genuine: bool = False) -> float:
    """No kubelet for three seconds; the last one's socket stays behind."""
    await asyncio.sleep(3)
    kubelet = await node.kubelet(genuine=genuine)
    gap = await kubelet.start_measured(RESOURCE, GPUS)
    await kubelet.close()
    return gap.gap_ms


async def five_restarts(node: Node, _gateway: GatewayProcess, *, genuine: bool = False) -> float:
    """Five kubelets within two seconds, each killed; the worst of the five gaps."""
    gaps = []
    for _ in range(5):
        begin = time.monotonic()
        kubelet = await node.kubelet(genuine=genuine)
        gaps.append((await kubelet.start_measured(RESOURCE, GPUS)).gap_ms)
        await asyncio.sleep(max(0.0, begin + 0.4 - time.monotonic()))
        await kubelet.close()
    return max(gaps)


async def hang(node: Node, _gateway: GatewayProcess) -> float:
    """Register hangs, then the kubelet is restarted."""
    kubelet = await node.kubelet()
    await kubelet.fault(Faults(register_hangs=True))
    await kubelet.start()

    async def registered() -> bool:
        return RESOURCE in await kubelet.registers()

    await until(registered)
    await kubelet.close()
    kubelet = await node.kubelet()
    gap = await kubelet.start_measured(RESOURCE, GPUS)
    await kubelet.close()
    return gap.gap_ms


async def name_deleted(node: Node, gateway: GatewayProcess, *, genuine: bool = False) -> float:
    """Our socket's name is deleted under a living stream: until it is back, with no Register for it."""
    mark = gateway.seen
    kubelet = await node.kubelet(genuine=genuine)
    await kubelet.start_measured(RESOURCE, GPUS)
    own = node.sockets / str((await gateway.wait_for("registered", since=mark))["endpoint"])
    before = await kubelet.registers()
    begin = time.monotonic()
    own.unlink()
    while not os.path.lexists(own):  # noqa: ASYNC240  a look takes microseconds, a thread would cost more
        if time.monotonic() > begin + 5:
            return math.inf
        await asyncio.sleep(0.0005)
    recovered = (time.monotonic() - begin) * 1000
    await asyncio.sleep(0.3)
    after = await kubelet.registers()
    await kubelet.close()
    return recovered if before == after else math.inf


async def directory_replaced(node: Node, _gateway: GatewayProcess, *, genuine: bool = False) -> float:
    """The kubelet's directory is removed and made anew by the next kubelet."""
    kubelet = await node.kubelet(genuine=genuine)
    await kubelet.start_measured(RESOURCE, GPUS)
    await kubelet.close()
    node.sockets.rename(node.root / f"old-{time.monotonic_ns()}")
    node.sockets.mkdir()
    kubelet = await node.kubelet(genuine=genuine)
    gap = await kubelet.start_measured(RESOURCE, GPUS)
    await kubelet.close()
    return gap.gap_ms


async def three_errors(node: Node, _gateway: GatewayProcess) -> float:
    """Register is answered with an error three times."""
    kubelet = await node.kubelet()
    await kubelet.fault(Faults(register_errors=3))
    gap = await kubelet.start_measured(RESOURCE, GPUS)
    await kubelet.close()
    return gap.gap_ms


async def recoveries(report: Report, python: Path, runs: int) -> None:
    """Trouble of each kind, all in one gateway process."""

    async def genuinely(scenario: Callable[..., Awaitable[float]], node: Node, gateway: GatewayProcess) -> float:
        return await scenario(node, gateway, genuine=True)

    kinds: list[tuple[str, Callable[[Node, GatewayProcess], Awaitable[float]], float]] = [
        ("stream cut by the kubelet alone", cut, RECOVERY_MS),
        ("kubelet late to listen", late, RECOVERY_MS),
        ("kubelet back after three seconds", away, RECOVERY_MS),
        ("kubelet restarted five times in two seconds", five_restarts, RECOVERY_MS),
        ("Register hangs, then a restart", hang, RECOVERY_MS),
        ("own name deleted, no Register for it", name_deleted, RECOVERY_MS),
        ("socket directory replaced", directory_replaced, REPLACED_MS),
        ("Register answered with three errors", three_errors, ERRORS_MS),
    ]
    if build.built(EMULATED) is not None:
        kinds += [
            (f"{name}, genuine {EMULATED}", partial(genuinely, one), limit)
            for name, one, limit in kinds
            if one in {away, five_restarts, name_deleted, directory_replaced}
        ]
    async with Node.make(python) as node:
        gateway = await node.gateway()
        await gateway.begun()
        for name, scenario, limit in kinds:
            samples = []
            note = ""
            for _ in range(runs):
                try:
                    samples.append(await scenario(node, gateway))
                except KubeletError as error:
                    samples.append(math.inf)
                    note = error.message.splitlines()[0]
                if not gateway.alive:
                    raise RuntimeError(f"the gateway ended in the middle of {name!r}:\n{gateway.log()}")
            figures = spread(samples)
            report.figures[f"recovery: {name} (ms)"] = figures
            report.bar(f"recovery: {name}", max(samples), limit, "ms", note or line(figures))
