"""Measures the promises that have a figure, each against its bar: ``make bench``.

Measured are the real daemon and, where they are built, genuine kubelets; emulated ones where faults are needed.
The daemon runs in an environment that holds the run-time lock alone (``gateway.lab.environment``). Times are taken where
the kubelet is, by CLOCK_MONOTONIC: what counts is what its books show. Nothing here is a test: machines differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import grpc

from adapters.pb.v1beta1 import v1beta1_pb2 as pb
from gateway.lab import build, environment
from gateway.lab.footprint import Footprint, footprint
from gateway.lab.gatewayproc import GatewayError, GatewayProcess, gateway_command
from gateway.lab.kubelet import Faults, Gap, Kubelet, KubeletError
from gateway.watch import KUBELET_SOCKET, listens

RESOURCE: Final = "nvidia.com/gpu"
GPUS: Final = 8
EMULATED: Final = "1.28"
"""Which kubelet is emulated where faults are needed: it connects back inside Register, the strictest way."""

MEDIAN_GAP_MS: Final = 8.0
WORST_GAP_MS: Final = 60.0
RECOVERY_MS: Final = 100.0
REPLACED_MS: Final = 300.0
ERRORS_MS: Final = 2000.0
COLD_START_MS: Final = 350.0
MORE_MIB: Final = 14.0
MORE_CPU_MS: Final = 10.0
MORE_SWITCHES: Final = 100.0
IDLE_SECONDS: Final = 20.0
SETTLING_SECONDS: Final = 3.0
MANY: Final = 10_000
TOO_MANY: Final = 100_000
LINGER_SECONDS: Final = 1.5
"""How long a kubelet is left alone at times, so that a second Register would be seen: longer than the gateway's last look
into the kubelet's books."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise with a figure: ``measured`` must be below ``limit`` (or equal to it, where ``exact``)."""

    name: str
    measured: float
    limit: float
    unit: str
    note: str = ""
    exact: bool = False

    @property
    def passed(self) -> bool:
        """Whether it was kept. What couldn't be measured (NaN) wasn't."""
        return self.measured == self.limit if self.exact else self.measured < self.limit


@dataclass(slots=True)
class Report:
    """What one run found: bars, and figures that are worth knowing without being promises."""

    bars: list[Bar] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether there are bars and each was kept."""
        return bool(self.bars) and all(bar.passed for bar in self.bars)

    def bar(self, name: str, measured: float, limit: float, unit: str, note: str = "", *, exact: bool = False) -> None:
        """Add a bar."""
        self.bars.append(Bar(name, measured, limit, unit, note, exact))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Give the smallest sample that ``percent`` of all don't exceed (nearest rank).

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("expected at least one sample, got none")
    return sorted(samples)[max(0, math.ceil(percent / 100 * len(samples)) - 1)]


def counted(gaps: Iterable[Gap]) -> list[float]:
    """Give the gaps (ms) that count: all, but those over the bar in which a 1 ms timer of that moment was as late."""
    return [gap.gap_ms for gap in gaps if gap.gap_ms < WORST_GAP_MS or gap.timer_late_ms < gap.gap_ms]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Sum samples up: min, median, p99, max and how many."""
    return {
        "min": round(min(samples), 2),
        "median": round(statistics.median(samples), 2),
        "p99": round(percentile(samples, 99), 2),
        "max": round(max(samples), 2),
        "n": len(samples),
    }


def _line(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in figures.items())


# A node to measure on.


@dataclass(slots=True)
class Node:
    """Directories of one node, and the processes on them, which end with it."""

    root: Path
    python: Path
    stack: AsyncExitStack

    @property
    def sockets(self) -> Path:
        """The kubelet's device plugin directory."""
        return self.root / "device-plugins"

    @classmethod
    @asynccontextmanager
    async def make(cls, python: Path) -> AsyncIterator[Self]:
        """Make a node in a temporary directory (a short one: a socket's path may have 107 bytes)."""
        root = Path(tempfile.mkdtemp(prefix="dpg-"))
        try:
            (root / "device-plugins").mkdir()
            async with AsyncExitStack() as stack:
                yield cls(root, python, stack)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    async def gateway(self, profile: str = "") -> GatewayProcess:
        """Start a gateway from the measured environment, with the GPUs of ``profile`` (8 healthy ones without)."""
        path = self.root / "profile.yaml"
        if profile:
            path.write_text(profile)
        command = gateway_command(self.sockets, self.root / "state", path if profile else None)
        process = await GatewayProcess.launch([str(self.python.with_name("gateway")), *command[3:]])
        await self.stack.enter_async_context(process)
        return process

    async def trivial(self) -> GatewayProcess:
        """Start the trivial plugin from the measured environment (-P: not from the current folder)."""
        process = await GatewayProcess.launch([str(self.python), "-P", "-m", "gateway.lab.trivial", str(self.sockets)])
        await self.stack.enter_async_context(process)
        return process

    async def kubelet(self, version: str = EMULATED, *, genuine: bool = False) -> Kubelet:
        """Launch a kubelet (a genuine one where that is wanted and built)."""
        kubelet = await Kubelet.launch(version, self.sockets, build.built(version) if genuine else None)
        self.stack.push_async_callback(kubelet.close)
        return kubelet


# The gap at a restart.


async def restart_gaps(report: Report, python: Path, versions: Sequence[str], runs: int) -> None:
    """Kill -9 and start, again and again: from the first possible connect until the books show all GPUs."""
    for version in versions:
        name = f"restart gap, genuine {version}"
        if build.built(version) is None:
            report.bar(name, math.nan, MEDIAN_GAP_MS, "ms", f"not built: python -m gateway.lab.build {version}")
            continue
        gaps: list[Gap] = []
        registers: list[int] = []
        async with Node.make(python) as node:
            gateway = await node.gateway()
            await gateway.wait_for("serving")
            for number in range(runs):
                kubelet = await node.kubelet(version, genuine=True)
                gaps.append(await kubelet.start_measured(RESOURCE, GPUS))
                await asyncio.sleep(LINGER_SECONDS if number % 20 == 0 else 0)
                registers.append((await kubelet.registers()).get(RESOURCE, 0))
                await kubelet.close()
        times, late = spread([gap.gap_ms for gap in gaps]), spread([gap.timer_late_ms for gap in gaps])
        counting = counted(gaps)
        excused = len(gaps) - len(counting)
        report.figures[name] = {"gap_ms": times, "timer_late_ms": late, "excused": excused}
        note = f"{_line(times)}; 1 ms timer late: {_line(late)}"
        report.bar(f"{name}: median", times["median"], MEDIAN_GAP_MS, "ms", note)
        worst = max(counting, default=math.nan)
        report.bar(f"{name}: worst", worst, WORST_GAP_MS, "ms", f"{excused} excused" if excused else "")
        report.bar(f"{name}: most Registers in one start", max(registers), 1, "", exact=True)
        report.bar(f"{name}: fewest Registers in one start", min(registers), 1, "", exact=True)


# Recovery, in the same process.


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
    while not listens(node.sockets / KUBELET_SOCKET):  # noqa: ASYNC110  another process listens
        await asyncio.sleep(0.0005)
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
    while not (await kubelet.registers()).get(RESOURCE):  # noqa: ASYNC110  another process counts
        await asyncio.sleep(0.005)
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
        await gateway.wait_for("serving")
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
            report.figures[f"recovery: {name}"] = figures
            report.bar(f"recovery: {name}", max(samples), limit, "ms", note or _line(figures))


# The cost of being there.


async def cold_start(report: Report, python: Path, runs: int) -> None:
    """From the spawn of the process until the kubelet's books show its first list."""
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
    report.bar("cold start: median", figures["median"], COLD_START_MS, "ms", _line(figures))


async def idle(report: Report, python: Path) -> None:
    """Both in the same twenty seconds: the gateway and a trivial plugin, each with a kubelet that leaves it alone."""
    async with Node.make(python) as ours, Node.make(python) as least:
        kubelets = [await node.kubelet(genuine=True) for node in (ours, least)]
        for kubelet in kubelets:
            await kubelet.start()
        processes = {"gateway": await ours.gateway(), "trivial": await least.trivial()}
        for kubelet in kubelets:
            await kubelet.wait(RESOURCE, GPUS)
        await asyncio.sleep(SETTLING_SECONDS)
        before = {name: footprint(process.pid) for name, process in processes.items()}
        await asyncio.sleep(IDLE_SECONDS)
        used = {name: footprint(process.pid).since(before[name]) for name, process in processes.items()}
    more = used["gateway"].over(used["trivial"])
    report.figures[f"in {IDLE_SECONDS:g} idle seconds"] = {name: asdict(cost) for name, cost in used.items()}

    def note(read: Callable[[Footprint], float]) -> str:
        return f"gateway {read(used['gateway']):.1f}, trivial plugin {read(used['trivial']):.1f}"

    report.bar("idle: memory more (PSS)", more.pss, MORE_MIB, "MiB", note(lambda cost: cost.pss))
    report.bar("idle: memory more (RSS)", more.rss, MORE_MIB, "MiB", note(lambda cost: cost.rss))
    report.bar("idle: CPU more", more.cpu, MORE_CPU_MS, "ms", note(lambda cost: cost.cpu))
    report.bar("idle: context switches more", more.switches, MORE_SWITCHES, "", note(lambda cost: cost.switches))


# Large lists, and the speed of Allocate.


async def lists(report: Report, python: Path) -> None:
    """Ten thousand devices arrive; a list that the kubelet would refuse stays out, and the rest of the node goes on."""
    async with Node.make(python) as node:
        kubelet = await node.kubelet(genuine=True)
        await kubelet.start()
        begin = time.monotonic_ns()
        gateway = await node.gateway(f"resources:\n  {RESOURCE}:\n    gpus: {MANY}\n")
        seen = await _wait(kubelet, RESOURCE, MANY)
        report.figures["10 000 devices, spawn to books (ms)"] = round((time.monotonic_ns() - begin) / 1e6)
        report.bar(f"a list of {MANY} devices arrives", seen, MANY, "devices", exact=True)
        await gateway.terminate()
    async with Node.make(python) as node:
        kubelet = await node.kubelet(genuine=True)
        await kubelet.start()
        gateway = await node.gateway(
            f"resources:\n  {RESOURCE}:\n    gpus: {TOO_MANY}\n  example.com/small:\n    gpus: {GPUS}\n"
        )
        small = await _wait(kubelet, "example.com/small", GPUS)
        report.bar("beside a list over 4 MiB the others go on", small, GPUS, "devices", exact=True)
        try:
            line = await gateway.wait_for("not offered", resource=RESOURCE, level="error")
            said = str(line.get("details", ""))
        except GatewayError as error:
            said = str(error).splitlines()[0]
        fit = re.search(r"(\d+) devices would fit", said)
        kept_out = (await kubelet.books()).capacity.get(RESOURCE, 0)
        report.bar("a list over 4 MiB isn't sent", kept_out, 0, "devices", exact=True)
        count = int(fit[1]) if fit else 0
        report.bar(
            "its error says how many fit",
            float(bool(fit)),
            1,
            "",
            f"{count} of {TOO_MANY}" if fit else said,
            exact=True,
        )


async def _wait(kubelet: Kubelet, resource: str, count: int) -> int:
    """Wait for a count; give what is there in the end."""
    with suppress(KubeletError):
        await kubelet.wait(resource, count, 20)
    return (await kubelet.books()).allocatable.get(resource, 0)


async def allocates(report: Report, python: Path, runs: int) -> None:
    """How long one Allocate takes, as a kubelet sees it. For information: there is no bar."""
    async with Node.make(python) as node:
        gateway = await node.gateway()
        kubelet = await node.kubelet(genuine=True)
        await kubelet.start_measured(RESOURCE, GPUS)
        endpoint = str((await gateway.wait_for("registered"))["endpoint"])
        device_id = (await kubelet.admit("a", RESOURCE, 1)).devices[RESOURCE][0]
        samples = await asyncio.to_thread(_allocate, node.sockets / endpoint, device_id, runs)
    figures = spread(samples)
    report.figures["Allocate (ms)"] = {**figures, "p50": figures["median"]}


def _allocate(socket: Path, device_id: str, runs: int) -> list[float]:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devicesIDs=[device_id])])
    wire = request.SerializeToString()
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1beta1.DevicePlugin/Allocate")
        samples = []
        for _ in range(runs):
            begin = time.perf_counter_ns()
            call(wire)
            samples.append((time.perf_counter_ns() - begin) / 1e6)
    return samples[runs // 10 :]  # the first ones pay for the connection


# The runner.

SECTIONS: Final = ("restart-gap", "recovery", "cold-start", "idle", "lists", "allocate")


async def measure(only: Sequence[str], versions: Sequence[str], runs: int, say: Callable[[str], None]) -> Report:
    """Measure what ``only`` names; ``runs`` is how often each kubelet is restarted, the rest follows from it."""
    report = Report()
    say("making the environment of the run-time lock")
    python = await asyncio.to_thread(environment.make)
    say(f"measured in {python.parent.parent}: locks/run.txt and the gateway, nothing else")
    repeated = max(3, runs // 10)
    sections: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "restart-gap": lambda: restart_gaps(report, python, versions, runs),
        "recovery": lambda: recoveries(report, python, repeated),
        "cold-start": lambda: cold_start(report, python, 2 * repeated + 1),
        "idle": lambda: idle(report, python),
        "lists": lambda: lists(report, python),
        "allocate": lambda: allocates(report, python, 10 * runs),
    }
    for name in only:
        say(f"measuring: {name}")
        seen = len(report.bars)
        await sections[name]()
        for bar in report.bars[seen:]:
            say(describe(bar))
    return report


def describe(bar: Bar) -> str:
    """Write a bar as a line."""
    measured = "not measured" if math.isnan(bar.measured) else f"{bar.measured:.4g} {bar.unit}".rstrip()
    limit = f"{'exactly' if bar.exact else '<'} {bar.limit:g}"
    return f"  {'pass' if bar.passed else 'FAIL'}  {bar.name:<58} {measured:>14}  ({limit})  {bar.note}".rstrip()


def document(report: Report) -> str:
    """Write a report as one JSON document; what wasn't measured is null."""
    bars = [
        {**asdict(bar), "measured": bar.measured if math.isfinite(bar.measured) else None, "passed": bar.passed}
        for bar in report.bars
    ]
    return json.dumps({"passed": report.passed, "bars": bars, "figures": report.figures}, indent=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m gateway.lab.bench``; give the exit status: 0 when each bar was kept."""
    parser = argparse.ArgumentParser(prog="python -m gateway.lab.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, progress beside it")
    parser.add_argument("--kubelets", default="1.10,1.20,1.28,1.37", help="genuine versions for the restart gap")
    parser.add_argument("--runs", type=int, default=100, help="restarts of each kubelet; the rest follows from it")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="measure only this (again for more)")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"argument --runs: expected 1 or more, got {options.runs}")

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    try:
        report = asyncio.run(measure(options.only or SECTIONS, options.kubelets.split(","), options.runs, say))
    except (environment.UnmadeError, build.BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(document(report))
    else:
        failed = [bar.name for bar in report.bars if not bar.passed]
        for name, figures in report.figures.items():
            say(f"{name}: {_line(figures) if isinstance(figures, dict) and 'n' in figures else figures}")
        say(f"FAILED: {', '.join(failed)}" if failed else f"PASSED: {len(report.bars)} bars")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
