"""The kubelet's calls, as fast as it makes them: Allocate and GetPreferredAllocation, and lists on their way to its records.

Both plugins are measured in the same seconds, in short turns, by a caller that costs little (``caller``). The trivial
plugin answers whatever is asked and remembers nothing; the gateway checks the devices, says what this kubelet understands,
logs each Allocate and writes down what it gave, on the disk that is named in the report.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from adapters.pb.v1beta1 import v1beta1_pb2 as pb
from gateway_lab.bench.caller import Caller
from gateway_lab.bench.measure import Report, percentile
from gateway_lab.bench.node import GPUS, RESOURCE, Node, plain

SIZES: Final = (8, 64, 1_000, 10_000)
ALLOCATE_P50: Final = 1.25
ALLOCATE_P99: Final = 2.0
PREFERRED_P50: Final = 1.5
TURN: Final = 50
"""Calls of one plugin before it is another's turn."""
ROUNDS: Final = 9
"""How often both plugins are started anew. The threads of gRPC fall into one of two rhythms by chance, and stay in it: of two
trivial plugins one can answer 20 % later than the other."""
DIFFERENT: Final = 256
"""How many devices are asked for in turn."""
SERVICE: Final = "/v1beta1.DevicePlugin"
OURS, TRIVIAL, PREFERRED = "Allocate", "Allocate, trivial plugin", "GetPreferredAllocation"


def allocate_requests(device_ids: Sequence[str]) -> list[bytes]:
    """Write one Allocate of one device for each of these devices, or for the first ``DIFFERENT``."""
    return [
        pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devicesIDs=[device_id])]).SerializeToString()
        for device_id in device_ids[:DIFFERENT]
    ]


def preferred_request(device_ids: Sequence[str]) -> bytes:
    """Write the GetPreferredAllocation for half of a node's GPUs, out of these devices."""
    asked = pb.ContainerPreferredAllocationRequest(available_deviceIDs=device_ids, allocation_size=GPUS // 2)
    return pb.PreferredAllocationRequest(container_requests=[asked]).SerializeToString()


def in_turns(callers: dict[str, Caller], times: int) -> dict[str, list[float]]:
    """Let each caller call ``times`` times, in turns; give how long each call took, in µs. Blocks."""
    taken: dict[str, list[float]] = {name: [] for name in callers}
    for caller in callers.values():
        caller.call(TURN)  # the first ones pay for the connection
    for _ in range(max(1, times // TURN)):
        for name, caller in callers.items():
            taken[name] += [one / 1000 for one in caller.call(TURN)]
    return taken


async def calls(report: Report, python: Path, runs: int) -> None:
    """Allocate and GetPreferredAllocation beside a trivial plugin, with lists of each size.

    ``ROUNDS`` times, each with processes of their own: bars are of the median round.
    """
    for size in SIZES:
        rounds = [await _round(python, size, runs // ROUNDS) for _ in range(ROUNDS)]
        _tell(report, size, rounds)


async def _round(python: Path, size: int, runs: int) -> _Round:
    async with Node.make(python) as ours, Node.make(python) as least:
        kubelets = [await node.kubelet(genuine=True) for node in (ours, least)]
        for kubelet in kubelets:
            await kubelet.start()
        ours.simulate(plain(size))
        plugins = [await ours.unheard(ours.gateway_command()), await least.unheard(least.trivial_command())]
        for kubelet, count in zip(kubelets, (size, GPUS), strict=True):
            await kubelet.wait(RESOURCE, count, 30)
        device_ids = await ours.allocatable() or []
        ours.hide_pod_resources()
        sockets = (ours.plugin_sockets()[0], least.plugin_sockets()[0])
        found = await asyncio.to_thread(_measured, sockets, device_ids, runs)
        assert all(plugin.alive for plugin in plugins)
        return found


@dataclass(frozen=True, slots=True)
class _Round:
    """What each call took (µs), by the call's name."""

    taken: dict[str, list[float]]

    def times(self, name: str, other: str, percent: float) -> float:
        """How many times as long one call takes as another."""
        return percentile(self.taken[name], percent) / percentile(self.taken[other], percent)


def _measured(sockets: tuple[Path, Path], device_ids: Sequence[str], runs: int) -> _Round:
    requests = allocate_requests(device_ids)
    ours, trivial = sockets
    with ExitStack() as stack:
        callers = {
            OURS: Caller(ours, f"{SERVICE}/Allocate", requests),
            TRIVIAL: Caller(trivial, f"{SERVICE}/Allocate", requests),
            PREFERRED: Caller(ours, f"{SERVICE}/GetPreferredAllocation", [preferred_request(device_ids)]),
        }
        for caller in callers.values():
            stack.callback(caller.close)
        choose = callers.pop(PREFERRED)
        taken = in_turns(callers, runs)
        fewer = runs if len(device_ids) < 1_000 else runs // 4  # A choice out of so many takes milliseconds.
        taken |= in_turns({PREFERRED: choose}, fewer)
        return _Round(taken)


def _tell(report: Report, size: int, rounds: Sequence[_Round]) -> None:
    of = f"{size} devices"

    def bar(name: str, other: str, percent: float, said: str, limit: float) -> None:
        ratios = sorted(one.times(name, other, percent) for one in rounds)
        spread = f"rounds {ratios[0]:.2f} to {ratios[-1]:.2f}"
        report.bar(f"{said}: p{percent:g}, times {other}", statistics.median(ratios), limit, "x", spread)

    for name in (OURS, TRIVIAL, PREFERRED):
        samples = [sample for one in rounds for sample in one.taken[name]]
        report.keep("calls (µs)", f"{name}, {of}", samples)
        report.figures.setdefault("calls (µs)", {})[f"{name}, {of}"] = {
            "p50": round(percentile(samples, 50)),
            "p99": round(percentile(samples, 99)),
        }
    bar(OURS, TRIVIAL, 50, f"Allocate, {of}", ALLOCATE_P50)
    bar(OURS, TRIVIAL, 99, f"Allocate, {of}", ALLOCATE_P99)
    if size == GPUS:
        bar(PREFERRED, OURS, 50, "GetPreferredAllocation 4 of 8", PREFERRED_P50)
