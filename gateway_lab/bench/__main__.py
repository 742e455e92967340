"""Measures the promises that have a figure, each against its bar: ``make bench``.

Measured are the real daemon and, where they are built, genuine kubelets; emulated ones where faults are needed.
The daemon runs in an environment that holds the run-time lock alone (``gateway_lab.environment``). Times are taken where
the kubelet is, by CLOCK_MONOTONIC: what counts is what its records show. Nothing here is a test: machines differ.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from gateway_lab import environment
from gateway_lab.bench import busy, calls, handovers, measure, page, presence, restarts
from gateway_lab.bench.measure import Report
from gateway_lab.bench.node import machine
from gateway_lab.kubelets import build

SECTIONS: Final = ("restart-gap", "recovery", "handover", "cold-start", "idle", "calls")
LONG: Final = ("busy-node",)
"""Measured only when it is asked for: it needs root and cgroups."""
RESTARTED: Final = ("1.10", "1.20", "1.32", "1.37")
HANDED_OVER: Final = ("1.10", "1.20", "1.24", "1.28", "1.32", "1.37")


async def run(only: Sequence[str], runs: int, say: Callable[[str], None]) -> Report:
    """Measure what ``only`` names; ``runs`` is how often each kubelet is restarted, the rest follows from it."""
    report = Report()
    say("making the environment of the run-time lock")
    python = await asyncio.to_thread(environment.make)
    say(f"measured in {python.parent.parent}: locks/run.txt and the gateway, nothing else")
    report.figures["machine"] = machine(Path(tempfile.gettempdir()))
    repeated = max(3, runs // 10)
    sections: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "restart-gap": lambda: restarts.restart_gaps(report, python, RESTARTED, runs),
        "recovery": lambda: restarts.recoveries(report, python, repeated),
        "handover": lambda: handovers.handovers(report, python, HANDED_OVER, max(3, runs // 6)),
        "cold-start": lambda: presence.cold_start(report, python, 2 * repeated + 1),
        "idle": lambda: presence.idle(report, python),
        "calls": lambda: calls.calls(report, python, 20 * runs),
        "busy-node": lambda: busy.busy_node(report, python, repeated),
    }
    for name in only:
        say(f"measuring: {name}")
        seen = len(report.bars)
        await sections[name]()
        for bar in report.bars[seen:]:
            say(measure.describe(bar))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m gateway_lab.bench``; give the exit status: 0 when each bar was kept."""
    parser = argparse.ArgumentParser(prog="python -m gateway_lab.bench", description=__doc__)
    parser.add_argument("--page", type=Path, help="write what was found to this page, with its plots beside it")
    parser.add_argument("--runs", type=int, default=300, help="restarts of each kubelet; the rest follows from it")
    parser.add_argument(
        "--only", action="append", choices=(*SECTIONS, *LONG), help="measure only this (again for more)"
    )
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"argument --runs: expected 1 or more, got {options.runs}")

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        report = asyncio.run(run(options.only or SECTIONS, options.runs, say))
    except (environment.UnmadeError, build.BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.page:
        page.write(report, options.page)
    for line in told(report):
        say(line)
    return 0 if report.passed else 1


def told(report: Report) -> list[str]:
    """Write the figures, and what became of the bars, as lines."""
    lines = []
    for name, figures in report.figures.items():
        if isinstance(figures, dict):
            lines.append(f"{name}:")
            lines += [f"  {row}: {measure.line(one) if isinstance(one, dict) else one}" for row, one in figures.items()]
        else:
            lines.append(f"{name}: {figures}")
    failed = [bar.name for bar in report.bars if not bar.passed]
    verdict = f"FAILED: {', '.join(failed)}" if failed else f"PASSED: {len(report.bars)} bars"
    return [*lines, verdict]


if __name__ == "__main__":
    sys.exit(main())
