"""The benchmark's page: what one run found, with plots, for people. Written by ``--page``, never by hand.

The plots are plain SVG in colours that can be read on white and on black. There are two kinds of them: horizontal bars, and
curves that show which share of the samples took at most so long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from gateway_lab.bench import busy
from gateway_lab.bench.measure import Bar, Report, limit, percentile

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
    """The figures that it tells as a table; a plot shows its own."""


def write(report: Report, path: Path) -> None:
    """Write the page to ``path``, and its plots into a folder beside it that has its name."""
    plots = path.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    parts = [_HEAD, _machine(report)]
    for section in SECTIONS:
        bars = [bar for bar in report.bars if bar.name.startswith(section.bars)] if section.bars else []
        plot = section.plot(report)
        figures = report.figures.get(section.figures)
        if not (bars or plot or figures):
            continue
        parts.append(f"## {section.title}\n\n{section.words}\n")
        if plot:
            name = f"{section.title.lower().replace(' ', '-')}.svg"
            (plots / name).write_text(plot)
            parts.append(f"![{section.title}]({plots.name}/{name})\n")
        parts += [_table(bars, section.bars)] if bars else []
        parts += [_figures(section.figures, figures)] if figures else []
    path.write_text("\n".join(parts))


_HEAD: Final = """# Benchmarks

One run of `python -m gateway_lab.bench --page docs/benchmarks.md` measured these figures. The limit of a figure is in the head of its column, or in brackets. A figure above its
limit is **bold**. A *genuine* kubelet is the real device manager of its version.
"""


def _machine(report: Report) -> str:
    told = report.figures.get("machine", {})
    return "".join(
        f"- {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}\n"
        for name, value in told.items()
    )


def _table(bars: Sequence[Bar], about: Sequence[str] = ()) -> str:
    """Write a row for each thing that was measured, and a column for each of its bars; ``about`` is left out before a thing's name."""
    rows: dict[str, dict[str, Bar]] = {}
    for bar in bars:
        thing, _, figure = bar.name.rpartition(": ")
        rows.setdefault(thing, {})[figure] = bar
    if len(rows) == 1 or "" in rows:
        rows = {bar.name: {"": bar} for bar in bars}
    columns = {
        figure: [found[figure] for found in rows.values() if figure in found]
        for found in rows.values()
        for figure in found
    }
    alike = {figure: limit(of[0]) for figure, of in columns.items() if len({limit(bar) for bar in of}) == 1}
    counts = {
        figure for figure, of in columns.items() if figure in alike and all(bar.exact and bar.passed for bar in of)
    }
    counts = counts if len(counts) < len(columns) else set()
    shown = [figure for figure in columns if figure not in counts]
    heads = (f"{figure or 'measured'} {alike.get(figure, '')}".strip() for figure in shown)
    lines = [f"|  | {' | '.join(heads)} |", "|---" * (len(shown) + 1) + "|"]
    for thing, found in rows.items():
        cells = (_cell(found[figure], told=figure in alike) if figure in found else "" for figure in shown)
        lines.append(f"| {_short(thing, about)} | {' | '.join(cells)} |")
    if counts:
        told = (f"{figure}: {_measured(of[0])}" for figure, of in columns.items() if figure in counts)
        lines += ["", f"In each row: {'; '.join(told)}."]
    return "\n".join([*lines, ""])


def _cell(bar: Bar, *, told: bool) -> str:
    measured = _measured(bar) if told else f"{_measured(bar)} ({limit(bar)})"
    return measured if bar.passed else f"**{measured}**"


def _short(name: str, about: Sequence[str]) -> str:
    for one in about:
        name = name.removeprefix(f"{one}, ").removeprefix(f"{one}: ")
    return name


def _measured(bar: Bar) -> str:
    return "not measured" if math.isnan(bar.measured) else f"{_number(bar.measured)} {bar.unit}".rstrip()


def _figures(name: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """Write figures as a table: a row for each thing, a column for each figure of it."""
    columns = [*next(iter(found.values()))]
    lines = [f"| {name} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | {' | '.join(_number(cells[one]) for one in columns)} |" for row, cells in found.items()]
    return "\n".join([*lines, ""])


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


def _idle(report: Report) -> str:
    rows = [
        Row(bar.name.removeprefix("idle, "), max(0.0, bar.measured), int("metrics on" in bar.name), bar.limit)
        for bar in report.bars
        if bar.name.startswith("idle, ") and math.isfinite(bar.measured)
    ]
    return horizontal(rows, "")


SECTIONS: Final = (
    Section(
        "Restart gap",
        ("restart gap",),
        "The kubelet is killed and restarted. The time counts from the first possible connection to its socket until "
        "its records show all 8 GPUs. The curves show the share of restarts. Dashed lines are the limits.",
        _restarts,
    ),
    Section(
        "A busy node",
        ("a busy node",),
        "The same on a node whose pods use every processor, with the gateway's CPU request. A kubelet reports its node to the API server "
        "100 ms after its socket exists.",
        figures=busy.FIGURES,
    ),
    Section(
        "Handover",
        ("handover",),
        "A second gateway takes over. The figure is the longest time in which the kubelet's records, read every "
        "millisecond, lack a GPU.",
        _handovers,
    ),
    Section(
        "Recovery",
        (),
        "The worst time of each other fault, all in one gateway process.",
        _recoveries,
    ),
    Section(
        "Calls",
        ("Allocate", "GetPreferredAllocation"),
        "Calls one after another, compared with a trivial plugin that uses the same library. *Times* is the ratio.",
        _calls,
    ),
    Section(
        "Idle",
        ("idle",),
        "What the gateway uses more than the trivial plugin in 20 idle seconds. The marks in the figure are the limits.",
        _idle,
    ),
    Section(
        "Start",
        ("cold start",),
        "The time from the start of the gateway's process until the kubelet's records have its first list.",
    ),
)
