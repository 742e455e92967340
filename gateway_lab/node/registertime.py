"""How soon must a plugin register? A kubelet is restarted, and a plugin registers so many milliseconds after kubelet.sock appeared.

A restarted kubelet tells the API server of its node a moment later, and then not again for 10 seconds: a plugin that isn't back by
then costs ten seconds without GPUs. Counted are the restarts in which the API server saw that. Run on the whole node:

    python -m gateway_lab.node -- python -m gateway_lab.node.registertime --page docs/measured.md
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway_lab.bench.load import busy_loops
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.node import Node, page
from gateway_lab.node.api import Api
from gateway_lab.node.installed import DEVICES, GPUS
from gateway_lab.node.watch import Recorder, drops
from gateway_lab.trials.scenarios import RESOURCE

DELAYS = (60, 160)
RESTARTS = 20
LOADS = ("idle", "busy")
FIRST_STATUS_SECONDS = 1.5
"""How long after the node is ready again the API server is watched: a drop shows with the first status."""
PATIENCE = 60.0


class Row(msgspec.Struct, frozen=True):
    """What was found for one kubelet, load and delay."""

    kubelet: str
    load: str
    delay_ms: int
    registered_ms: list[float]
    """When Register was answered, counted from the creation of kubelet.sock, by the plugin's own clock."""
    drops_ms: list[float]
    """How long the API server saw no GPUs, for each restart; 0: it never did."""


async def measure(node: Node, seen: Recorder, version: str, load: str, delay: int, restarts: int) -> Row:
    """Restart a kubelet again and again beneath a plugin that registers ``delay`` milliseconds late."""
    if node.kubelet.version != version or node.kubelet.pid is None:
        await node.kubelet.restart(version=version)
    program = (sys.executable, "-m", "gateway_lab.node.otherplugin", "--socket-dir", str(node.plugins))
    command = [*program, "--delay-ms", str(delay), *(f"{uuid}={path}" for uuid, path in DEVICES.items())]
    took: list[float] = []
    dropped: list[float] = []
    async with await GatewayProcess.launch(command) as plugin:
        with busy_loops(2 if load == "busy" else 0):
            await plugin.wait_for("serving", seconds=PATIENCE)  # The GPUs of the one before are seen for a while yet.
            await _whole(node, seen)
            for _ in range(restarts):
                mark, began = plugin.seen, time.monotonic_ns()
                await node.kubelet.restart()
                line = await plugin.wait_for("registered", since=mark, seconds=PATIENCE)
                took.append(line["after_ms"])
                await node.ready(PATIENCE)
                await asyncio.sleep(FIRST_STATUS_SECONDS)
                await _whole(node, seen)
                dropped.append(round(sum(one.ms for one in drops(seen.nodes, RESOURCE, GPUS, began))))
        await plugin.terminate()
    return Row(version, load, delay, took, dropped)


async def _whole(node: Node, seen: Recorder) -> None:
    await node.ready(PATIENCE)
    await seen.until(
        lambda seen: seen.node.allocatable.get(RESOURCE, 0) == GPUS, "all GPUs at the API server", PATIENCE
    )


def table(rows: Sequence[Row]) -> str:
    """Write the table: in how many restarts the node lost its GPUs, a column for each delay; kubelets of which the same was seen share a row."""
    delays = sorted({row.delay_ms for row in rows})
    lines = [["kubelet", "machine", *(f"Register {delay} ms after the socket" for delay in delays)]]
    lines.append(["---"] * len(lines[0]))
    seen: dict[tuple[str, ...], list[str]] = {}
    for load, kubelet in sorted(
        {(row.load, row.kubelet) for row in rows}, key=lambda one: (LOADS.index(one[0]), one[1])
    ):
        found = {row.delay_ms: row for row in rows if (row.load, row.kubelet) == (load, kubelet)}
        seen.setdefault((load, *(_cell(found[delay]) if delay in found else "-" for delay in delays)), []).append(
            kubelet
        )
    lines += [[", ".join(kubelets), *cells] for cells, kubelets in seen.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: Row) -> str:
    seen = [one for one in row.drops_ms if one]
    return f"{len(seen)} of {len(row.drops_ms)}" + (f", for {page.seconds(seen)}" if seen else "")


async def run(
    versions: Sequence[str], loads: Sequence[str], delays: Sequence[int], restarts: int, told: Path | None
) -> None:
    """Measure all of it; each row is told, and written into the page, when it is there."""
    node = Node.here()
    rows = []
    async with Recorder(Api.of(node)) as seen:
        for load, version, delay in itertools.product(loads, versions or node.kubelet_versions, delays):
            rows.append(await measure(node, seen, version, load, delay, restarts))
            print(msgspec.json.encode(rows[-1]).decode(), flush=True)
            if told:
                page.write(told, "register", table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it; each row is told as a line of JSON when it is there."""
    parser = argparse.ArgumentParser(prog="python -m gateway_lab.node.registertime", description=__doc__)
    parser.add_argument("--kubelet", action="append", default=[], help="only this one (again for more)")
    parser.add_argument("--load", action="append", default=[], choices=LOADS, help="only this one")
    parser.add_argument(
        "--delay-ms", action="append", default=[], type=int, help=f"instead of {DELAYS} (again for more)"
    )
    parser.add_argument("--restarts", type=int, default=RESTARTS)
    parser.add_argument("--page", type=Path, help="write the table into this page")
    options = parser.parse_args(arguments)
    loads, delays = options.load or LOADS, options.delay_ms or DELAYS
    asyncio.run(run(options.kubelet, loads, delays, options.restarts, options.page))


if __name__ == "__main__":
    main()
