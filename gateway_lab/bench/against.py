"""Any other device plugin beside this one, in the same minutes: how long, how much, and the ratios.

Nothing is known of it but its command line. Which resource it serves is read from the kubelet's records, its sockets are
those that appear in the socket directory. What it doesn't do (recover from a restart, stay alive) is told as never.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gateway_lab.bench.caller import Caller, CallError
from gateway_lab.bench.calls import SERVICE, allocate_requests, in_turns
from gateway_lab.bench.measure import Report, percentile
from gateway_lab.bench.node import EMULATED, RESOURCE, Node, Unheard
from gateway_lab.bench.presence import idle_cost
from gateway_lab.kubelets.kubelet import Kubelet, KubeletError

DISCOVERY_SECONDS: Final = 20.0
STEADY_SECONDS: Final = 1.0
RESTART_SECONDS: Final = 15.0
PLACEHOLDER: Final = "{socket_dir}"


class UnfitError(Exception):
    """The other plugin can't be measured. The message says why."""


@dataclass(slots=True)
class _Side:
    """One of the two plugins: how it is started, what it serves, and what was measured of it."""

    node: Node
    command: list[str]
    resource: str = RESOURCE
    count: int = 0
    first_list: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    process: Unheard | None = None

    async def start(self) -> Unheard:
        self.process = await self.node.unheard(self.command)
        return self.process

    async def end(self) -> None:
        if self.process is not None:
            await self.process.kill()
            self.process = None

    async def restarted(self) -> float:
        """Start a kubelet after another; give the gap in ms, infinite where the plugin didn't get over it."""
        kubelet = await self.node.kubelet(genuine=True)
        try:
            return (await kubelet.start_measured(self.resource, self.count, seconds=RESTART_SECONDS)).gap_ms
        except KubeletError:
            return math.inf
        finally:
            await kubelet.close()


def command_for(text: str, sockets: Path) -> list[str]:
    """Split a command line as a shell does, and put the socket directory in.

    Raises:
        UnfitError: it has no place for the socket directory, or isn't one.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UnfitError(f"expected a command line, got {text!r}: {error}") from error
    if not any(PLACEHOLDER in word for word in words):
        raise UnfitError(f"expected {PLACEHOLDER} somewhere in {text!r}: the plugin must be told where to register")
    return [word.replace(PLACEHOLDER, str(sockets)) for word in words]


async def against(report: Report, python: Path, text: str, runs: int) -> None:
    """Measure the plugin that ``text`` starts, and the gateway, in turns. Figures only: there is no bar."""
    async with Node.make(python) as ours, Node.make(python) as theirs:
        sides = {
            "gateway": _Side(ours, ours.gateway_command()),
            "other": _Side(theirs, command_for(text, theirs.sockets)),
        }
        for side in sides.values():
            await _discover(side)
        for _ in range(runs):
            for side in sides.values():
                side.first_list.append(await _first_list(side))
        for side in sides.values():
            await side.start()
            await side.restarted()  # The first kubelet is met, not got over.
        for _ in range(runs):
            for side in sides.values():
                if side.process is None or not side.process.alive:
                    await side.end()
                    await side.start()
                side.gaps.append(await side.restarted())
        found = {name: _times(side) for name, side in sides.items()}
        for name, more in (await _living(sides, runs)).items():
            found[name] |= more
    found["ratio"] = {
        name: round(found["gateway"][name] / value, 2) if value else math.nan
        for name, value in found["other"].items()
        if name in found["gateway"]
    }
    report.figures[f"against {text.split(maxsplit=1)[0].rpartition('/')[2]}"] = found


async def _discover(side: _Side) -> None:
    """Find out what a plugin serves: what its kubelet's records show when they change no more."""
    kubelet = await side.node.kubelet(genuine=True)
    await kubelet.start()
    process = await side.start()
    begin = time.monotonic()
    seen: dict[str, int] = {}
    since = begin
    while not seen or time.monotonic() < since + STEADY_SECONDS:
        if time.monotonic() > begin + DISCOVERY_SECONDS:
            raise UnfitError(
                f"no device became allocatable on a kubelet {EMULATED} within {DISCOVERY_SECONDS:g} s of the plugin's start; "
                f"its log ends:\n{process.log()}"
            )
        now = {name: count for name, count in (await kubelet.totals()).allocatable.items() if count}
        if now != seen:
            seen, since = now, time.monotonic()
        await asyncio.sleep(0.02)
    side.resource, side.count = max(seen.items(), key=lambda one: one[1])
    await side.end()
    await kubelet.close()


async def _first_list(side: _Side) -> float:
    kubelet = await side.node.kubelet(genuine=True)
    await kubelet.start()
    begin = time.monotonic_ns()
    await side.start()
    try:
        return ((await kubelet.wait(side.resource, side.count, DISCOVERY_SECONDS)).monotonic_ns - begin) / 1e6
    except KubeletError:
        return math.inf
    finally:
        await side.end()
        await kubelet.close()


def _times(side: _Side) -> dict[str, Any]:
    well = [gap for gap in side.gaps if math.isfinite(gap)]
    return {
        "start to first list, median (ms)": round(percentile(side.first_list, 50), 1),
        "restart gap, median (ms)": round(percentile(side.gaps, 50), 2),
        "restart gap, worst (ms)": round(max(side.gaps), 2),
        "restarts recovered in the same process (%)": round(100 * len(well) / len(side.gaps)),
    }


async def _living(sides: dict[str, _Side], runs: int) -> dict[str, dict[str, Any]]:
    """Measure what needs a living kubelet: Allocate, then what each costs when nothing happens."""
    kubelets: list[Kubelet] = []
    for side in sides.values():
        await side.end()
        kubelets.append(await side.node.kubelet(genuine=True))
        await kubelets[-1].start()
        await side.start()
        await kubelets[-1].wait(side.resource, side.count, DISCOVERY_SECONDS)
    found: dict[str, dict[str, Any]] = {name: {} for name in sides}
    callers: dict[str, Caller] = {}
    for name, side in sides.items():
        caller = await _caller(side)
        if caller is not None:
            callers[name] = caller
        side.node.hide_pod_resources()
    for name, taken in (await asyncio.to_thread(in_turns, callers, 20 * runs)).items():
        found[name]["Allocate p50 (µs)"] = round(percentile(taken, 50))
        found[name]["Allocate p99 (µs)"] = round(percentile(taken, 99))
    for caller in callers.values():
        caller.close()
    processes = {name: side.process for name, side in sides.items() if side.process is not None}
    for name, cost in (await idle_cost(processes)).items():
        found[name] |= {
            "RSS (MiB)": round(cost.rss, 1),
            "PSS (MiB)": round(cost.pss, 1),
            "CPU in 20 idle seconds (ms)": round(cost.cpu, 1),
            "context switches in 20 idle seconds": cost.switches,
        }
    return found


async def _caller(side: _Side) -> Caller | None:
    """Connect to the socket on which the plugin answers an Allocate of its resource."""
    requests = allocate_requests(await side.node.allocatable(side.resource) or [])
    for path in side.node.plugin_sockets():
        with suppress(OSError, CallError):
            caller = Caller(path, f"{SERVICE}/Allocate", requests)
            await asyncio.to_thread(caller.call, 1)
            return caller
    return None
