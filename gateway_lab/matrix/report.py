"""The report of a matrix, out of its records, in each form that somebody reads. Pure: records in, text out.

- report.json is the records themselves (``record``); everything else here can be made of it again.
- report.md is for a forge and for docs/compat.md, junit.xml for a CI system.
- index.html is for people: one file without anything from outside, each cell of the grids a click away from its transcript.
  It works without scripts: a panel is shown because the address names it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files as resources
from string import Template
from typing import assert_never
from xml.etree import ElementTree as ET

from gateway_lab.matrix.record import Cell, Hop, Kind, NodeFact, Report, Status, dump

BEGIN, END = "<!-- the last full run: begin -->", "<!-- the last full run: end -->"
"""What a page that holds a run has around it."""

_STATUSES: tuple[Status, ...] = ("passed", "failed", "not applicable")
_SIGNS: Mapping[Status, str] = {
    "passed": "✅",
    "failed": "❌",
    "not applicable": "\N{EN DASH}",
}
_GLYPHS: Mapping[Status, str] = {
    "passed": "✓",
    "failed": "✕",
    "not applicable": "\N{EN DASH}",
}
_CLASSES: Mapping[Status, str] = {"passed": "ok", "failed": "bad", "not applicable": "na"}
SECOND_TRY = "\N{SUPERSCRIPT TWO}"
"""What marks a run that failed at the first try."""
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 can't hold, however they are spelled."""


class NoPlaceError(Exception):
    """A page has no place for a run. The message says what was expected."""


def files(report: Report) -> dict[str, bytes]:
    """Give the files of a report by name."""
    return {
        "report.json": dump(report),
        "report.md": f"# Compatibility report\n\n{markdown(report)}".encode(),
        "junit.xml": junit(report),
        "index.html": html(report).encode(),
    }


# In words.


def counted(count: int, noun: str) -> str:
    """Say how many there are: ``1 run``, ``2 runs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def tally(statuses: Iterable[Status]) -> str:
    """Count statuses in words, such as ``15 passed, 1 failed``."""
    found = list(statuses)
    counts = [f"{found.count(status)} {status}" for status in _STATUSES if status in found]
    return ", ".join(counts) or "nothing was run"


def summary(report: Report) -> str:
    """Say in a few lines how a run ended; the last one begins with PASSED or FAILED."""
    lines = [f"kubelets: {_kinds(report)}"]
    if report.cells:
        lines.append(f"{counted(len(report.scenarios), 'scenario')}: {tally(cell.status for cell in report.cells)}")
    if report.hops:
        forgotten = sum(1 for hop in report.hops if hop.forgets)
        lines.append(
            f"{counted(len(report.hops), 'hop')}: {tally(hop.status for hop in report.hops)}"
            + (f" (on {forgotten} the kubelet forgets its pods: drained first)" if forgotten else "")
        )
    if report.cluster:
        nodes = report.cluster.nodes
        lines.append(f"mixed cluster of {counted(len(nodes), 'node')}: {tally(node.status for node in nodes)}")
    lines += [f"note: {note}" for note in report.about.notes]
    lines += [f"passed at the second try: {one}" for one in _second_tries(report)]
    failed = [f"  {one.words}: {_first_line(one.reason)}" for one in report.results() if one.status == "failed"]
    ran = sum(1 for one in report.results() if one.status != "not applicable")
    ending = f"PASSED: {counted(ran, 'run')}" if report.passed else f"FAILED: {len(failed)} of {counted(ran, 'run')}"
    ending = ending if ran else "FAILED: nothing could be run (the report says why)"
    return "\n".join([*lines, *failed, f"{ending} in {report.about.seconds:.0f} s"])


def _kinds(report: Report) -> str:
    """Say which kubelets were genuine and which emulated."""
    by_kind: dict[Kind, list[str]] = {}
    for one in report.about.kubelets:
        by_kind.setdefault(one.kind, []).append(one.version)
    return "; ".join(f"{len(versions)} {kind} ({', '.join(versions)})" for kind, versions in by_kind.items())


def _second_tries(report: Report) -> Iterator[str]:
    """Name what passed at the second try only, and what was wrong at the first."""
    runs: tuple[Cell | Hop, ...] = (*report.cells, *report.hops)
    for one in runs:
        if one.first and one.status != "failed":
            yield f"{one.words}; at first: {_first_line(one.first)}"


def _sign(one: Cell | Hop, signs: Mapping[Status, str]) -> str:
    return signs[one.status] + (SECOND_TRY if one.first else "")


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    """Give what was run, on what: the header of every form."""
    about = report.about
    yield "run", f"{about.started.replace('T', ' ').replace('+00:00', ' UTC')}, {about.seconds:.0f} s"
    yield "gateway", f"{about.gateway}{' with ' + ' '.join(about.options) if about.options else ''}"
    yield "Go", about.go or "none: no genuine kubelets"
    yield "grpcio", about.grpcio
    yield "protobuf", about.protobuf
    yield "Python", about.python
    yield "host", about.host
    yield "kubelets", _kinds(report)
    for note in about.notes:
        yield "note", note


def _registers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count}" if len(counts) == 1 else f"{name} {count}" for name, count in sorted(counts.items()))


def _kept(hop: Hop) -> str:
    if hop.forgets:
        return "drained first: the kubelet forgets"
    if hop.checkpoint_kept is None:
        return ""
    return "kept" if hop.checkpoint_kept else "lost"


def _same(hop: Hop) -> str:
    if not hop.pods:
        return ""
    moved = [pod.pod for pod in hop.pods if set(pod.before) != set(pod.after)]
    return f"changed: {', '.join(moved)}" if moved else f"the same ({counted(len(hop.pods), 'pod')})"


def _change(before: str, after: str) -> str:
    return f"{before} → {after}" if before or after else ""


def _gap(hop: Hop) -> str:
    return "" if hop.gap_ms is None else f"{hop.gap_ms:.0f} ms"


def _versions(report: Report) -> list[str]:
    return [one.version for one in report.about.kubelets]


def _shown(report: Report) -> Mapping[str, str]:
    """Give each kubelet as Markdown shows it: emulated ones in italics."""
    return {one.version: f"*{one.version}*" if one.kind == "emulated" else one.version for one in report.about.kubelets}


def _ranged(some: Sequence[str], every: Sequence[str]) -> str:
    """Name some of these kubelets: ``1.8, 1.10 to 1.13``, or ``all``."""
    if some == every:
        return "all"
    runs: list[list[str]] = []
    for one in some:
        last = runs[-1][-1] if runs else ""
        if one in every and last in every and every.index(one) == every.index(last) + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _emulated(report: Report) -> set[str]:
    return {one.version for one in report.about.kubelets if one.kind == "emulated"}


# Markdown.


def markdown(report: Report) -> str:
    """Give the run in Markdown."""
    return "\n".join(_markdown(report)) + "\n"


def place(page: str, report: Report) -> str:
    """Put what a run found, in a few lines, into a page in place of the run it holds.

    Raises:
        NoPlaceError: it has no place for one.
    """
    before, after = find_place(page)
    _, *counts, last = summary(report).splitlines()
    lines = [
        "",
        *_table(["", "what was run"], _facts(report)),
        "",
        *(f"- {one.strip()}" for one in (*counts, last)),
        "",
    ]
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


def find_place(page: str) -> tuple[str, str]:
    """Return what is before and after the place for a run in a page.

    Raises:
        NoPlaceError: it has no place for one.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise NoPlaceError(f"expected a line {BEGIN} and a later one {END}: the run goes between them")
    return before, after


def _markdown(report: Report) -> Iterator[str]:
    ran = sum(1 for one in report.results() if one.status != "not applicable")
    yield f"**{'Passed' if report.passed else 'Failed'}**: {counted(ran, 'run')}, {tally(one.status for one in report.results())}."
    yield ""
    yield from _table(["", "what was run"], _facts(report))
    why = {one.version: one.why_emulated for one in report.about.kubelets if one.why_emulated}
    if why:
        yield from ("", *(f"- kubelet *{version}* is emulated: {reason}" for version, reason in why.items()))
    if report.cells:
        yield from _markdown_grid(report)
    if report.hops:
        yield from _markdown_hops(report)
    if second := [*_second_tries(report)]:
        yield f"\n## Passed at the second try ({SECOND_TRY})\n"
        yield from (f"- {_inline(one)}" for one in second)
    if report.cluster:
        yield from ("\n## A cluster of all of them at once\n",)
        alike: dict[tuple[str, ...], list[str]] = {}
        for node in report.cluster.nodes:
            seen = node.api, _registers(node.registers), _verdict(node)
            alike.setdefault(seen, []).append(_shown(report)[node.version])
        yield from _table(
            ["kubelet", "API", "Registers", ""],
            [[_ranged(on, [*_shown(report).values()]), *seen] for seen, on in alike.items()],
        )


def _markdown_grid(report: Report) -> Iterator[str]:
    yield "\n## Scenarios\n"
    shown = _shown(report)
    found: dict[tuple[str, Status], list[str]] = {}
    for cell in report.cells:
        on = shown[cell.version] + (SECOND_TRY if cell.first else "")
        found.setdefault((cell.scenario, cell.status), []).append(on)
    statuses = [status for status in _STATUSES if any(status == cell.status for cell in report.cells)]
    yield from _table(
        ["scenario", "promise", *statuses],
        [
            [row.name, row.promise, *(_ranged(on, [*shown.values()]) for on in each)]
            for row in report.scenarios
            if any(each := [found.get((row.name, status), []) for status in statuses])
        ],
    )
    reasons: dict[tuple[str, Status, str], list[str]] = {}
    for cell in report.cells:
        if cell.status != "passed":
            reasons.setdefault((cell.scenario, cell.status, cell.reason), []).append(cell.version)
    for status in ("failed", "not applicable"):
        why = [(scenario, why, where) for (scenario, one, why), where in reasons.items() if one == status]
        if why:
            yield f"\n{status.capitalize()}:\n"
            yield from (
                f"- {scenario} on {_ranged(where, _versions(report))}: {_inline(text)}" for scenario, text, where in why
            )


def _markdown_hops(report: Report) -> Iterator[str]:
    yield "\n## Hops\n"
    yield "Gap: from the first possible connect to the new kubelet's socket until all devices are allocatable again.\n"
    shown = _shown(report)
    yield from _table(
        ["hop", "", *_HOP_SEEN],
        [[f"{shown[hop.old]} → {shown[hop.new]}", _sign(hop, _SIGNS), *_hop_seen(hop)] for hop in report.hops],
    )
    forgets = dict.fromkeys(hop.forgets for hop in report.hops if hop.forgets)
    if forgets:
        yield "\nPods were drained before a hop if the kubelet forgets them (seen, not assumed):\n"
        yield from (f"- {why}" for why in forgets)
    failed = [hop for hop in report.hops if hop.status != "passed"]
    if failed:
        yield "\nFailed:\n"
        yield from (f"- {hop.old} → {hop.new}: {_inline(hop.reason)}" for hop in failed)


_HOP_SEEN = ("recognized as", "pods' devices", "gap", "Registers")


def _hop_seen(hop: Hop) -> Sequence[str]:
    """Give what a page says of a hop: a row of its table, whose head is ``_HOP_SEEN``. The other forms say more."""
    pods = "drained first" if hop.forgets else "records lost" if hop.checkpoint_kept is False else _same(hop)
    return (hop.level_after, pods, _gap(hop), _registers(hop.registers))


def _verdict(one: NodeFact) -> str:
    return _SIGNS[one.status] + (f" {_inline(one.reason)}" if one.reason else "")


def _inline(text: str) -> str:
    """Spell text of a process, which may hold anything, as one line of Markdown."""
    return "`" + " ".join(text.replace("`", "'").split())[:400] + "`" if "\n" in text else text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


# JUnit.


def junit(report: Report) -> bytes:
    """Give the run as JUnit XML: a suite for each kubelet, one for the hops, one for the cluster."""
    suites: dict[str, list[tuple[str, float, Cell | Hop | NodeFact]]] = {}
    for cell in report.cells:
        suites.setdefault(f"kubelet {cell.version} ({cell.kind})", []).append((cell.scenario, cell.seconds, cell))
    for hop in report.hops:
        suites.setdefault("hops", []).append((f"{hop.old} to {hop.new} ({hop.kind})", hop.seconds, hop))
    for node in report.cluster.nodes if report.cluster else ():
        suites.setdefault("mixed cluster", []).append((f"kubelet {node.version} ({node.kind})", 0.0, node))
    root = ET.Element("testsuites", name="compat", time=f"{report.about.seconds:.3f}")
    for name, rows in suites.items():
        suite = ET.SubElement(root, "testsuite", name=name, timestamp=report.about.started)
        properties = ET.SubElement(suite, "properties")
        for key, value in _facts(report):
            ET.SubElement(properties, "property", name=key, value=_xml(value))
        for case, seconds, one in rows:
            found = ET.SubElement(suite, "testcase", classname=name, name=case, time=f"{seconds:.3f}")
            if one.status == "failed":
                failure = ET.SubElement(found, "failure", message=_xml(_first_line(one.reason)))
                failure.text = _xml("\n".join([one.reason, "", *one.transcript]))
            elif one.status != "passed":
                ET.SubElement(found, "skipped", message=_xml(f"{one.status}: {_first_line(one.reason)}"))
            if not isinstance(one, NodeFact) and one.first:
                ET.SubElement(found, "system-out").text = _xml(f"this is the second try; at the first: {one.first}")
        statuses = [one.status for *_, one in rows]
        suite.set("tests", str(len(rows)))
        suite.set("failures", str(statuses.count("failed")))
        suite.set("errors", "0")
        suite.set("skipped", str(len(rows) - statuses.count("failed") - statuses.count("passed")))
        suite.set("time", f"{sum(seconds for _, seconds, _ in rows):.3f}")
    ET.indent(root)
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _xml(text: str) -> str:
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)


# HTML.


def html(report: Report) -> str:
    """Give the run as one page for people."""
    template = Template((resources("gateway_lab.matrix") / "report.html").read_text(encoding="utf-8"))
    failed = sum(1 for one in report.results() if one.status == "failed")
    ran = sum(1 for one in report.results() if one.status != "not applicable")
    return template.substitute(
        verdict="passed" if report.passed else "failed",
        sentence=f"{counted(ran, 'run')} passed" if report.passed else f"{failed} of {counted(ran, 'run')} failed",
        tiles="".join(_tiles(report)),
        facts="".join(_fact(name, value, wide=name in {"kubelets", "note"}) for name, value in _facts(report)),
        emulated="".join(_why_emulated(report)),
        scenarios="".join(_html_grid(report)),
        hops="".join(_html_hops(report)),
        cluster="".join(_html_cluster(report)),
        panels="".join(_panels(report)),
    )


def _fact(name: str, value: str, *, wide: bool = False) -> str:
    return f"<div{' class=wide' if wide else ''}><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def _why_emulated(report: Report) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for one in report.about.kubelets:
        if one.kind == "emulated":
            reasons.setdefault(one.why_emulated, []).append(one.version)
    for why, versions in reasons.items():
        yield f"<p class=aside>Emulated: {', '.join(map(escape, versions))} ({escape(why)}).</p>"


def _tiles(report: Report) -> Iterator[str]:
    def tile(number: str, what: str, note: str) -> str:
        return f"<div class=tile><b>{escape(number)}</b><span>{escape(what)}</span><small>{escape(note)}</small></div>"

    kinds = [one.kind for one in report.about.kubelets]
    noted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("genuine", "emulated") if kind in kinds)
    yield tile(str(len(kinds)), "kubelets", noted)
    if report.cells:
        yield tile(str(len(report.scenarios)), "scenarios", tally(cell.status for cell in report.cells))
    if report.hops:
        yield tile(str(len(report.hops)), "hops", tally(hop.status for hop in report.hops))
    if report.cluster:
        nodes = report.cluster.nodes
        yield tile(str(len(nodes)), "nodes at once", tally(node.status for node in nodes))


def _classes(status: Status, kind: Kind) -> str:
    return f"{_CLASSES[status]}{' emu' if kind == 'emulated' else ''}"


def _head(report: Report, versions: Iterable[str]) -> str:
    emulated = _emulated(report)
    return "".join(
        f"<th scope=col{' class=emu title=emulated' if version in emulated else ''}>{escape(version)}</th>"
        for version in versions
    )


def _link(one: Cell | Hop | NodeFact, text: str) -> str:
    key = escape(one.key)
    title = escape(f"{one.words}: {one.status}{'. ' + _first_line(one.reason) if one.reason else ''}", quote=True)
    return f'<a id="at-{key}" href="#{key}" title="{title}" class="{_classes(one.status, one.kind)}">{text}</a>'


def _html_grid(report: Report) -> Iterator[str]:
    if not report.cells:
        return
    versions = _versions(report)
    cells = {(cell.scenario, cell.version): cell for cell in report.cells}
    yield "<section><h2>Scenarios</h2><div class=scroll><table class=grid><thead><tr><th></th>"
    for api, group in itertools.groupby(report.about.kubelets, key=lambda one: one.api):
        yield f"<th scope=colgroup colspan={len([*group])}>{escape(api)}</th>"
    yield f"</tr><tr><th></th>{_head(report, versions)}</tr></thead><tbody>"
    for row in report.scenarios:
        yield f"<tr><th scope=row><b>{escape(row.name)}</b><small>{escape(row.promise)}</small></th>"
        for version in versions:
            cell = cells.get((row.name, version))
            yield f"<td>{_link(cell, _sign(cell, _GLYPHS)) if cell else ''}</td>"
        yield "</tr>"
    yield "</tbody></table></div></section>"


def _html_hops(report: Report) -> Iterator[str]:
    if not report.hops:
        return
    found = {(hop.old, hop.new): hop for hop in report.hops}
    versions = [version for version in _versions(report) if any(version in pair for pair in found)]
    yield "<section><h2>Hops</h2><p class=aside>From the kubelet of a row to that of a column, with pods that hold devices. "
    yield "Upgrades are above the diagonal, downgrades below it. The number is the gap in milliseconds: from the first possible "
    yield "connect to the new kubelet until every device is allocatable. A dashed frame: the kubelet itself forgets its pods, so "
    yield "they were drained first.</p><div class=scroll><table class='grid hops'><thead><tr><th>from ╲ to</th>"
    yield f"{_head(report, versions)}</tr></thead><tbody>"
    for old in versions:
        yield f"<tr><th scope=row><b>{escape(old)}</b></th>"
        for new in versions:
            hop = found.get((old, new))
            number = "" if hop is None else f"{hop.gap_ms:.0f}" if hop.gap_ms is not None else _GLYPHS[hop.status]
            number += SECOND_TRY if hop and hop.first else ""
            inner = _link(hop, number).replace('class="', 'class="forgets ', 1 if hop.forgets else 0) if hop else ""
            yield f"<td{' class=self' if old == new else ''}>{inner}</td>"
        yield "</tr>"
    yield "</tbody></table></div></section>"


def _html_cluster(report: Report) -> Iterator[str]:
    if not report.cluster:
        return
    yield "<section><h2>A cluster of all of them at once</h2><p class=aside>A node of each version at the same time, one gateway "
    yield "process on each, all with the same configuration.</p><div class=nodes>"
    for node in report.cluster.nodes:
        text = f"<b>{escape(node.version)}</b><small>{escape(node.api or 'not served')}</small>"
        yield _link(node, text)
    yield "</div></section>"


def _panels(report: Report) -> Iterator[str]:
    promises = {row.name: row.promise for row in report.scenarios}
    for one in report.results():
        key = escape(one.key)
        facts = "".join(_fact(name, value) for name, value in _panel_facts(one) if value)
        promise = f"<p>{escape(promises.get(one.scenario, ''))}</p>" if isinstance(one, Cell) else ""
        reason = f"<pre class=reason>{escape(one.reason)}</pre>" if one.reason else ""
        logged = ""
        if isinstance(one, Hop) and one.logged:
            logged = f"<h3>The kubelet's warnings and errors</h3><pre>{escape(chr(10).join(one.logged))}</pre>"
        heading = "What was said" if isinstance(one, Cell) and one.witness == "wire" else "Ends of the logs"
        lines = escape("\n".join(one.transcript))
        transcript = f"<h3>{heading}</h3><pre>{lines}</pre>" if lines else ""
        yield (
            f'<div class=panel id="{key}"><a class=backdrop href="#at-{key}" aria-label=close></a><article>'
            f'<header><span class="badge {_classes(one.status, one.kind)}">{escape(one.status)}</span>'
            f'<h2>{escape(one.words)}</h2><a class=close href="#at-{key}" aria-label=close>✕</a></header>'
            f"{promise}{reason}<dl>{facts}</dl>{logged}{transcript}</article></div>\n"
        )


def _panel_facts(one: Cell | Hop | NodeFact) -> Iterator[tuple[str, str]]:
    match one:
        case Cell():
            yield "at the first try", one.first
            yield "took", f"{one.seconds:g} s" if one.seconds else ""
        case Hop():
            yield "at the first try", one.first
            yield "API", _change(one.api_before, one.api_after)
            yield "taken for kubelet", _change(one.level_before, one.level_after)
            yield "checkpoint", _kept(one)
            yield "why", one.forgets
            for pod in one.pods:
                same = "the same" if set(pod.before) == set(pod.after) else f"now {', '.join(pod.after) or 'nothing'}"
                yield f"pod {pod.pod}", f"{', '.join(pod.before)}: {same}"
            yield (
                "gap",
                _gap(one) + (f" (a 1 ms timer was {one.timer_late_ms:.1f} ms late)" if one.timer_late_ms else ""),
            )
            yield "took", f"{one.seconds:.2f} s"
        case NodeFact():
            yield "API", one.api
        case _:
            assert_never(one)
    yield "Registers", _registers(one.registers)
