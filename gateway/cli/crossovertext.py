"""Write the plan of a move to claims for people: what each kubelet supports, the steps, and the problems of pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.cli.crossover import CrossingPlan, Group
from gateway.cli.fleettext import names, unknown
from gateway.cli.page import Page, count, table

_CLAIMS: Final = {"yes": "yes", "gate": "with a gate", "no": "no"}
_NAMES: Final = {"yes": "yes", "gate": "NO without a gate", "no": "NO"}


def render(plan: CrossingPlan, width: int) -> Iterator[str]:
    """Yield a table of kubelets, and all else in lines of at most ``width`` columns."""
    page = Page(width)
    yield from _summary(page, plan)
    if plan.groups:
        yield ""
        yield from table(
            ("STEP", "KUBELET", "NODES", "DEVICES", "CLAIMS", "BY NAME", "MOVE", "NAMES"), map(_row, plan.groups)
        )
        yield from page.line(
            "CLAIMS: pods with claims of their own. BY NAME: pods that ask by a resource name, where a DeviceClass has that name."
        )
    for heading, lines in (
        ("First", plan.first),
        ("Each node, those with the fewest devices first", plan.each),
        ("Back", plan.back),
    ):
        if lines:
            yield from ("", heading)
        for line in lines:
            yield from page.item(line)
    if plan.rows:
        yield from ("", "What pods may suffer")
    for row in plan.rows.values():
        on = ", ".join(group.version for group in plan.groups if row.id in group.rows)
        yield from page.item(f"{row.id} (kubelet {on}): {row.title} ({row.evidence}).")
        yield from page.under(row.suffers)
        yield from page.under(f"Way out: {row.way_out}")
    yield from unknown(plan.unknown)
    yield ""
    yield from page.text("run: seen on genuine kubelets; read: in their code. --json has the sources, and all nodes.")


def _summary(page: Page, plan: CrossingPlan) -> Iterator[str]:
    can = [group for group in plan.groups if group.step is not None]
    if not plan.nodes:
        for group in plan.groups:
            verdict = "its GPUs can move to claims" if can else "its GPUs stay with the device plugin API"
            yield from page.text(f"Kubelet {group.version}: {verdict}.")
    else:
        crossing, staying = (
            sum(len(group.nodes) for group in plan.groups if (group in can) is one) for one in (True, False)
        )
        yield f"{count(plan.nodes, 'node')} with {count(plan.devices, 'device')}, to claims (DRA)."
        if crossing:
            yield f"  {count(crossing, 'node')} can move."
        if staying:
            yield f"  {count(staying, 'node')} left with the device plugin API, because the kubelet takes no claims."
        if told := sum(len(group.told) for group in plan.groups):
            yield f"  {count(told, 'node')} moving, or moved already, by annotation."
    if plan.without:
        yield f"  {count(plan.without, 'node')} without devices: left out."
    if plan.unknown:
        yield f"  {count(len(plan.unknown), 'node')} can't be judged: see the end."
    if can and plan.names != "yes":
        yield from page.text(
            "No extendedResourceName: a kubelet here doesn't know claims for pods that ask by name, and may run such a pod WITHOUT A GPU."
        )


def _row(group: Group) -> tuple[str, ...]:
    nodes = group.nodes
    return (
        "-" if group.step is None else str(group.step),
        group.version,
        str(len(nodes)) if nodes else "-",
        str(group.devices) if nodes else "-",
        _CLAIMS[group.claims],
        "-" if group.step is None else _NAMES[group.names],
        str(len(group.told)) if nodes else "-",
        names(nodes) or "-",
    )
