"""What a benchmark has found: bars, figures, samples; and the arithmetic of samples. Nothing is timed here."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gateway_lab.kubelets.kubelet import Gap


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
    """What one run found: bars, and figures that are worth knowing without being promises.

    ``samples`` has the times behind them, by section and name, for the plots; their unit is in the section's name.
    """

    bars: list[Bar] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether there are bars and each was kept."""
        return bool(self.bars) and all(bar.passed for bar in self.bars)

    def bar(self, name: str, measured: float, limit: float, unit: str, note: str = "", *, exact: bool = False) -> None:
        """Add a bar."""
        self.bars.append(Bar(name, measured, limit, unit, note, exact))

    def keep(self, section: str, name: str, samples: Iterable[float]) -> None:
        """Add samples."""
        self.samples.setdefault(section, {})[name] = [round(one, 3) for one in samples]


def percentile(samples: Sequence[float], percent: float) -> float:
    """Give the smallest sample that ``percent`` of all don't exceed (nearest rank).

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("expected at least one sample, got none")
    return sorted(samples)[max(0, math.ceil(percent / 100 * len(samples)) - 1)]


def counted(gaps: Iterable[Gap], limit: float) -> list[float]:
    """Give the gaps (ms) that count: all, but those over ``limit`` in which a 1 ms timer of that moment was as late."""
    return [gap.gap_ms for gap in gaps if gap.gap_ms < limit or gap.timer_late_ms < gap.gap_ms]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Sum samples up: min, median, p99, max and how many."""
    return {
        "min": round(min(samples), 2),
        "median": round(statistics.median(samples), 2),
        "p99": round(percentile(samples, 99), 2),
        "max": round(max(samples), 2),
        "n": len(samples),
    }


def line(figures: Mapping[str, float]) -> str:
    """Write figures as a line."""
    return ", ".join(f"{name} {value:g}" for name, value in figures.items())


def others(registers: Mapping[int, int]) -> str:
    """Write how many Registers there were where it wasn't one; ``registers`` counts how often there were so many."""
    return ", ".join(f"{count} times {number}" for number, count in sorted(registers.items()) if number != 1 and count)


def describe(bar: Bar) -> str:
    """Write a bar as a line."""
    measured = "not measured" if math.isnan(bar.measured) else f"{bar.measured:.4g} {bar.unit}".rstrip()
    return f"  {'pass' if bar.passed else 'FAIL'}  {bar.name:<58} {measured:>14}  ({limit(bar)})  {bar.note}".rstrip()


def limit(bar: Bar) -> str:
    """Write what a bar asks for."""
    return f"{'exactly' if bar.exact else '<'} {bar.limit:g}"


def document(report: Report) -> str:
    """Write a report as one JSON document; what wasn't measured, or never came, is null."""
    found = {
        "passed": report.passed,
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in report.bars],
        "figures": report.figures,
        "samples": report.samples,
    }
    return json.dumps(_finite(found), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(one) for name, one in value.items()}
        case list():
            return [_finite(one) for one in value]
        case _:
            return value
