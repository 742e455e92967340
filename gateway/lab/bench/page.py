"""The benchmark's page: what one run found, with plots, for people. Written by ``--page``, never by hand.

The plots are plain SVG in colours that can be read on white and on black. There are two kinds of them: horizontal bars, and
curves that show which share of the samples took at most so long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from gateway.lab.bench.calls import HEALTH
from gateway.lab.bench.measure import Bar, Report, limit, percentile

INK: Final = "#808080"
COLOURS: Final = ("#2f81c7", "#d07a1e", "#2f9e5b", "#b1489b", "#8a7a2f", "#c2453d", "#3aa6a6", "#6f63c9")
WIDTH: Final = 760
_LEFT, _RIGHT, _TOP, _ROW = 250, 110, 34, 24
_HEIGHT: Final = 300


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page: which bars it tells (by the beginning of their names), and how it is drawn."""

    title: str
    bars: tuple[str, ...]
    words: str
    plot: Callable[[Report], str] = lambda _report: ""
    figures: str = ""
    """The beginning of the names of the figures that it tells as a table."""


def write(report: Report, path: Path) -> None:
    """Write the page to ``path``, and its plots into a folder beside it that has its name."""
    plots = path.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    parts = [_HEAD, _machine(report)]
    for section in SECTIONS:
        bars = [bar for bar in report.bars if bar.name.startswith(section.bars)] if section.bars else []
        plot = section.plot(report)
        tables = _tables(report, section.figures) if section.figures else ""
        if not (bars or plot or tables):
            continue
        parts.append(f"## {section.title}\n\n{section.words}\n")
        if plot:
            name = f"{section.title.lower().replace(' ', '-')}.svg"
            (plots / name).write_text(plot)
            parts.append(f"![{section.title}]({plots.name}/{name})\n")
        parts += [_table(bars)] if bars else []
        parts += [tables] if tables else []
    path.write_text("\n".join(parts))


_HEAD: Final = """# Benchmarks

What this project promises in figures, and what one run of `make bench` found: made by
`python -m gateway.lab.bench --page docs/benchmarks.md`, and by nothing else. The daemon runs in an environment that holds the
run-time lock alone; kubelets are the genuine device managers where a version says so. Machines differ: ratios and bars are
worth more than times.
"""


def _machine(report: Report) -> str:
    told = report.figures.get("machine", {})
    return "".join(
        f"- {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}\n"
        for name, value in told.items()
    )


def _table(bars: Sequence[Bar]) -> str:
    rows = [f"| {bar.name} | {_measured(bar)} | {limit(bar)} | {'yes' if bar.passed else '**no**'} |" for bar in bars]
    return "\n".join(["| promise | measured | bar | kept |", "|---|---|---|---|", *rows, ""])


def _measured(bar: Bar) -> str:
    return "not measured" if math.isnan(bar.measured) else f"{_number(bar.measured)} {bar.unit}".rstrip()


def _tables(report: Report, beginning: str) -> str:
    """Write each figure with this beginning as a table: a row for each thing, a column for each figure of it."""
    tables = []
    for name, found in report.figures.items():
        if name.startswith(beginning) and isinstance(found, dict):
            rows = {row: cells for row, cells in found.items() if isinstance(cells, dict)} or {"": found}
            columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
            lines = [
                f"| {row} | {' | '.join(_number(cells.get(column, math.nan)) for column in columns)} |"
                for row, cells in rows.items()
            ]
            head = f"| {name} | {' | '.join(columns)} |"
            tables.append("\n".join([head, "|---" * (len(columns) + 1) + "|", *lines, ""]))
    return "\n".join(tables)


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if math.isnan(value):
        return "-"
    return "never" if math.isinf(value) else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


# The plots.


@dataclass(frozen=True, slots=True)
class Row:
    """One horizontal bar; ``colour`` is an index, ``limit`` is drawn as a mark across it."""

    label: str
    value: float
    colour: int = 0
    limit: float | None = None


def horizontal(rows: Sequence[Row], unit: str) -> str:
    """Draw horizontal bars, each with its value."""
    if not rows:
        return ""
    most = max(max(row.value, row.limit or 0.0) for row in rows) or 1.0
    wide = WIDTH - _LEFT - _RIGHT
    parts = []
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW
        width = max(1.0, wide * row.value / most)
        parts += [
            _text(_LEFT - 8, y + 13, row.label, "end"),
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW - 8}" fill="{_colour(row.colour)}"/>',
            _text(
                _LEFT + max(width, wide * (row.limit or 0) / most) + 6, y + 13, f"{_number(row.value)} {unit}".strip()
            ),
        ]
        if row.limit is not None:
            x = _LEFT + wide * row.limit / most
            parts.append(f'<path d="M{x:.1f} {y - 3}v{_ROW - 2}" stroke="{INK}" stroke-width="2"/>')
    return _svg(_TOP + len(rows) * _ROW + 8, parts)


def curves(series: Mapping[str, Sequence[float]], unit: str, marks: Sequence[float] = ()) -> str:
    """Draw, for each series, which share of the samples is at most so large; ``marks`` are drawn upright."""
    series = {name: sorted(one for one in samples if math.isfinite(one)) for name, samples in series.items()}
    series = {name: samples for name, samples in series.items() if samples}
    if not series:
        return ""
    most = max(*(percentile(samples, 99) for samples in series.values()), *marks, 1e-9) * 1.1
    left, right, bottom = 60, 190, _HEIGHT - 34
    wide, high = WIDTH - left - right, bottom - 14

    def place(value: float, share: float) -> str:
        return f"{left + wide * min(value, most) / most:.1f} {bottom - high * share:.1f}"

    parts = []
    for share in (0, 0.5, 0.99):
        y = bottom - high * share
        parts += [
            f'<path d="M{left} {y:.1f}h{wide}" stroke="{INK}" stroke-opacity=".35"/>',
            _text(left - 6, y + 4, f"{share:.0%}", "end"),
        ]
    step = _round_step(most)
    for number in range(int(most / step) + 1):
        x = left + wide * number * step / most
        parts.append(_text(x, bottom + 18, f"{number * step:g}", "middle"))
    parts.append(_text(left + wide, bottom + 32, unit, "end"))
    parts += [f'<path d="M{place(mark, 0)}L{place(mark, 1)}" stroke="{INK}" stroke-dasharray="4 4"/>' for mark in marks]
    for number, (name, samples) in enumerate(series.items()):
        points = "L".join(place(value, (rank + 1) / len(samples)) for rank, value in enumerate(samples))
        colour = _colour(number)
        dashes = ' stroke-dasharray="6 3"' if number >= len(COLOURS) else ""
        parts += [
            f'<path d="M{place(samples[0], 0)}L{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>',
            f'<path d="M{WIDTH - right + 16} {20 + 18 * number}h18" stroke="{colour}" stroke-width="3"{dashes}/>',
            _text(WIDTH - right + 40, 24 + 18 * number, name),
        ]
    return _svg(max(_HEIGHT, 34 + 18 * len(series)), parts)


def _round_step(most: float) -> float:
    """Find a round step that gives four to ten labels."""
    power: float = 10.0 ** math.floor(math.log10(most))
    return next(power * part for part in (0.1, 0.2, 0.5, 1.0) if most / (power * part) <= 10)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


# What is drawn of what.


def _of(report: Report, section: str) -> Mapping[str, Sequence[float]]:
    return report.samples.get(section, {})


def _restarts(report: Report) -> str:
    return curves({f"kubelet {name}": one for name, one in _of(report, "restart gap (ms)").items()}, "ms", (6, 20))


def _handovers(report: Report) -> str:
    return curves(_of(report, "handover gap (ms)"), "ms", (15, 60))


def _recoveries(report: Report) -> str:
    found = [bar for bar in report.bars if bar.name.startswith("recovery: ")]
    rows = [Row(bar.name.removeprefix("recovery: "), bar.measured, 0, bar.limit) for bar in found if bar.limit <= 300]
    return horizontal([row for row in rows if math.isfinite(row.value)], "ms")


def _calls(report: Report) -> str:
    rows = []
    for name, samples in _of(report, "calls (µs)").items():
        colour = 1 if "trivial" in name else 2 if name.startswith("Get") else 0
        rows += [
            Row(f"{name.replace(' devices', '')}: p{percent}", percentile(samples, percent), colour)
            for percent in (50, 99)
        ]
    return horizontal(rows, "µs")


def _health(report: Report) -> str:
    found = _of(report, HEALTH)
    return horizontal([Row(f"{size} devices", statistics.median(samples)) for size, samples in found.items()], "ms")


def _idle(report: Report) -> str:
    rows = [
        Row(bar.name.removeprefix("idle, "), max(0.0, bar.measured), int("metrics on" in bar.name), bar.limit)
        for bar in report.bars
        if bar.name.startswith("idle, ") and math.isfinite(bar.measured)
    ]
    return horizontal(rows, "")


def _imports(report: Report) -> str:
    for name, found in report.figures.items():
        if name.startswith("imports"):
            return horizontal([Row(package, ms) for package, ms in found.items() if package != "all"], "ms")
    return ""


SECTIONS: Final = (
    Section(
        "Restart gap",
        ("restart gap",),
        "The kubelet is killed (SIGKILL) and started again. From the first moment that its socket takes connections until its own "
        "records show all 8 GPUs. The curves tell which share of the restarts took at most so long; the dashed lines are the bars. "
        "Most of a gap is the kubelet's own: the trivial plugin, in turns with the gateway, registers with whoever comes, and does "
        "nothing else.",
        _restarts,
        figures="restart gap",
    ),
    Section(
        "A busy node",
        ("a busy node",),
        "The same on a node whose pods use every processor, by the gateway's CPU request. A kubelet tells the API server of its "
        "node 100 ms after its socket is there.",
        figures="a busy node",
    ),
    Section(
        "Handover",
        ("handover",),
        "A second gateway starts on the node, takes over, and the first one ends. The longest time in which the kubelet's records "
        "don't show all GPUs, from the last look that had them to the first that has them again, with a look about every "
        "millisecond; 0 where no look missed any.",
        _handovers,
    ),
    Section(
        "Stuck registrations",
        ("stuck",),
        "Kubelets 1.25 to 1.36 can be left with a live stream on an endpoint that they have stopped, so that every Allocate "
        "fails. After each of many registrations anew and handovers a pod asks at once.",
        figures="registered anew",
    ),
    Section(
        "Recovery",
        ("recovery",),
        "Other trouble, all in one gateway process: the worst of each kind.",
        _recoveries,
    ),
    Section(
        "Calls",
        ("Allocate", "GetPreferredAllocation"),
        "As a kubelet calls, one call after another, in turns with a trivial plugin that is written with the same library and "
        "answers whatever is asked. The gateway checks the devices, logs, and writes down what it gave.",
        _calls,
        figures="calls",
    ),
    Section(
        "A health change",
        (),
        "A GPU becomes unhealthy in the profile: until the kubelet's records show one less (median). The list is always sent whole.",
        _health,
        figures="a health change",
    ),
    Section(
        "Idle",
        ("idle",),
        "What the gateway costs more than the trivial plugin in the same 20 seconds, in which nothing happens (with metrics on: "
        "but for a scrape every 15 seconds). The marks are the bars.",
        _idle,
        figures="in 20 idle seconds",
    ),
    Section("Start", ("cold start",), "From the spawn of the process until the kubelet's records show its first list."),
    Section(
        "Imports",
        (),
        "What the daemon imports until it serves, by what each top-level package takes of that (`python -X importtime`, which "
        "makes everything slower).",
        _imports,
    ),
    Section(
        "Long lists", ("a list", "beside", "its error"), "A list is one message, and kubelets receive at most 4 MiB."
    ),
    Section(
        "Beside another plugin",
        (),
        "Measured in the same minutes, in turns; below 1 is less than the other.",
        figures="against",
    ),
)
