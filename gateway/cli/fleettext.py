"""Write the plan of a fleet for people: a summary, a table of steps, and the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gateway.cli.fleet import Fleet, Group, Step, Unknown
from gateway.cli.page import count, table
from gateway.wires.log import printable

_MOST_NAMES: Final = 8
"""Nodes that are named of a group; --json has all."""
_MOST_UNKNOWN: Final = 10
_DRAINS: Final = {"required": "DRAIN", "advised": "advised", "not needed": "no"}


def render(fleet: Fleet) -> Iterator[str]:
    """Yield the lines of the plan."""
    yield f"{count(fleet.nodes, 'node')} with {count(fleet.devices, 'device')}, to kubelet {fleet.goal}."
    for level, words in (
        ("required", "must be drained at one step or more"),
        ("advised", "should be drained at one step or more"),
        ("not needed", "can go without a drain"),
    ):
        if fleet.drained[level]:
            yield f"  {count(fleet.drained[level], 'node')} {words}."
    if there := sum(len(group.nodes) for group in fleet.groups if group.plan is None):
        yield f"  {count(there, 'node')} already there: nothing to do."
    if fleet.without:
        yield f"  {count(fleet.without, 'node')} without devices: left out."
    if fleet.unknown:
        yield f"  {count(len(fleet.unknown), 'node')} can't be judged: see the end."
    if fleet.first:
        yield from ("", "First")
        yield from (f"  - {line}" for line in fleet.first)
    if fleet.steps:
        yield from (
            "",
            "Steps. Those of one number may go together; finish one number before the next. One node first, each time.",
            "",
        )
        yield from table(
            ("STEP", "FROM", "TO", "AT LEAST", "NODES", "DEVICES", "DRAIN", "CHECKPOINT"), map(_row, fleet.steps)
        )
        yield from _reasons(fleet.steps)
    yield from _bugs(fleet.groups)
    if fleet.groups:
        yield from ("", "Nodes by kubelet version, then by number of devices", "")
        yield from table(("KUBELET", "NODES", "DEVICES", "NAMES"), map(_names, fleet.groups))
    elif not fleet.unknown:
        yield "  No node here has had a device plugin (its capacity names no such resource): nothing to plan."
    yield from unknown(fleet.unknown)
    yield from (
        "",
        "gateway plan --from VERSION --to VERSION says of one version what is known, and how. --json has all of it here.",
    )


def _row(step: Step) -> tuple[str, ...]:
    hop = step.hop
    kept = "kept" if hop.checkpoint_kept else f"LOST{f', stop at {hop.stop_at}' if hop.stop_at else ''}"
    return (
        str(step.number),
        hop.old,
        hop.new,
        hop.at_least or "-",
        str(step.nodes),
        str(step.devices),
        _DRAINS[hop.drain],
        kept,
    )


def _reasons(steps: Sequence[Step]) -> Iterator[str]:
    said = {f"{step.hop.old} -> {step.hop.new}: {reason}": None for step in steps for reason in step.hop.drain_because}
    if said:
        yield from ("", "Why to drain")
        yield from (f"  - {line}" for line in said)


def _bugs(groups: Iterable[Group]) -> Iterator[str]:
    """Name the bugs of today's kubelets that a patch release of the same minor version fixes."""
    heading = "Today's kubelets, fixed by a patch release"
    for group in groups:
        made = group.plan
        minor = group.version.rsplit(".", 1)[0] if group.version.count(".") == 2 else group.version
        for name, fixed in (made.now if made else {}).items():
            if made and (patch := next((one for one in fixed if one.startswith(f"{minor}.")), None)):
                if heading:
                    yield from ("", heading)
                    heading = ""
                title = getattr(made.rows[name], "title", name)
                yield f"  - {group.version} ({count(len(group.nodes), 'node')}): {title}; fixed in {patch}"


def _names(group: Group) -> tuple[str, ...]:
    return group.version, str(len(group.nodes)), str(group.devices), names(group.nodes)


def names(nodes: Sequence[str]) -> str:
    """Return the names of the first nodes, and how many more there are."""
    more = len(nodes) - _MOST_NAMES
    return ", ".join(map(printable, nodes[:_MOST_NAMES])) + (f", and {more} more" if more > 0 else "")


def unknown(nodes: Sequence[Unknown]) -> Iterator[str]:
    """Yield the nodes that can't be judged, with the reasons."""
    if nodes:
        yield from ("", "Not judged")
        yield from (f"  - {printable(one.node)}: {one.why}" for one in nodes[:_MOST_UNKNOWN])
        if len(nodes) > _MOST_UNKNOWN:
            yield f"  - and {len(nodes) - _MOST_UNKNOWN} more: --json has all"
