"""Writes what was seen of each scenario into the tables of one page.

    python -m gateway_lab.node.page OUTCOMES docs/measured.md

OUTCOMES is the file of that name that the e2e tests write: a line of JSON for each run of each scenario. Nothing in the table is
written by hand, and nothing is left out of it: a run that broke its promise is counted like any other.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from packaging.version import Version

from gateway_lab.node.bridged import WORDS as BRIDGED
from gateway_lab.node.bridged import Bridged
from gateway_lab.node.continuity import SCENARIOS
from gateway_lab.node.installed import DaemonSet, HostService
from gateway_lab.node.migration import STEPS
from gateway_lab.node.stage import Outcome

_WAYS: Final = (HostService.kind, DaemonSet.kind)
_WORDS: Final = {one.name: one.words for one in SCENARIOS.values()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(prog="python -m gateway_lab.node.page", description=__doc__)
    parser.add_argument("outcomes", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args(arguments)
    found = [msgspec.json.decode(line, type=Outcome) for line in options.outcomes.read_bytes().splitlines()]
    outcomes = [one for one in found if one.installed in _WAYS]
    bridged = [one for one in found if one.installed == Bridged.kind]
    swaps = {step.name: step.words for step in STEPS}
    write(options.page, "scenarios", table([one for one in outcomes if one.scenario not in swaps], _WORDS))
    write(options.page, "migration", table([one for one in outcomes if one.scenario in swaps], swaps))
    write(options.page, "bridge", table(bridged, BRIDGED, (Bridged.kind,)))


def write(page: Path, part: str, text: str) -> None:
    """Put ``text`` in the place of a part of the page.

    Raises:
        ValueError: the page has no such part.
    """
    begin, end = f"<!-- {part}: measured, begin -->\n", f"<!-- {part}: measured, end -->\n"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(
            f"expected the lines {begin.strip()!r} and {end.strip()!r} in {page}: write them around the table"
        )
    page.write_text(before + begin + text + end + after, encoding="utf-8")


def table(outcomes: Sequence[Outcome], words: Mapping[str, str], ways: Sequence[str] = _WAYS) -> str:
    """Write a table: a row for each scenario and change of the kubelet, with what was seen of GPUs and pods for each way to install.

    Scenarios of which the same was seen share a row.
    ``words`` says what happens, by the name of the scenario, in the order of the rows; those without are changes of the kubelet.
    """
    order = {name: number for number, name in enumerate(words)}
    runs: dict[tuple[str, str], list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: (order.get(one.scenario, -1), _versions(one.kubelet))):
        runs.setdefault((one.scenario, one.kubelet if "->" in one.kubelet else ""), []).append(one)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (name, change), found in runs.items():
        kubelets = change or ", ".join(dict.fromkeys(one.kubelet for one in found))
        cells = [kubelets]
        for way in ways:
            here = [one for one in found if one.installed == way]
            cells += [_gpus(here), _pods(here)] if here else ["-", "-"]
        rows.setdefault(tuple(cells), []).append(words.get(name, "the kubelet is replaced"))
    head = ("what happens", "kubelet", *(f"{way}: {what}" for way in ways for what in ("GPUs", "pods")))
    lines = [head, ("---",) * len(head)]
    lines += [("; ".join(dict.fromkeys(happened)), *seen) for seen, happened in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _versions(kubelet: str) -> list[Version]:
    return [Version(one) for one in kubelet.split(" -> ")]


def _gpus(runs: Sequence[Outcome]) -> str:
    """Say what the API server saw of the GPUs."""
    dropped = [one for one in runs if one.drops]
    if dropped:
        return f"fewer in {len(dropped)} of {len(runs)} runs, for {seconds(one.drop_ms for one in dropped)}"
    return f"all ({len(runs)})"


def seconds(ms: Iterable[float]) -> str:
    """Write the shortest and the longest of some times, given in milliseconds: ``0.1-1.2 s``."""
    found = sorted(one / 1000 for one in ms)
    low, high = (f"{one:.1f}" for one in (found[0], found[-1]))
    return f"{high} s" if low == high else f"{low}-{high} s"


def _pods(runs: Sequence[Outcome]) -> str:
    """Say what became of the pods, by kind where that differs."""
    fates = {kind: Counter(one.fates[kind] for one in runs if kind in one.fates) for kind in runs[0].fates}
    alike: dict[str, list[str]] = {}
    for kind, counted in fates.items():
        told = ((fate.replace(", ", " with "), count) for fate, count in counted.most_common())
        word = ", ".join(fate if count == len(runs) else f"{count} {fate}" for fate, count in told)
        alike.setdefault(word, []).append(kind)
    if len(alike) == 1:
        said = next(iter(alike))
    else:
        said = "; ".join(f"{', '.join(kinds)}: {word}" for word, kinds in alike.items())
    failed = sum(bool(one.failed) for one in runs if "failed" not in one.fates.values())
    lost = sum(bool(one.lost) for one in runs)
    return (
        said
        + (f"; pods failed in {failed} of {len(runs)}" if failed else "")
        + (f"; GPUs that could not be opened in {lost}" if lost else "")
    )


if __name__ == "__main__":
    main()
