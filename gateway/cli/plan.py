"""``gateway plan``: what a GPU node goes through on the way from one kubelet version to another, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Final

import click

from gateway.cli import common
from gateway.cli.page import Page, columns, count, print_json

if TYPE_CHECKING:
    from gateway.cli.advice import Advice, Bug, CheckpointFormat, Crossing, Hop, Kubelet, Plan
    from gateway.cli.fleet import Node

_EXAMPLES = """
\b
Examples:
  gateway plan --from 1.24 --to 1.33
  gateway plan --from 1.27.3 --to 1.28           also shows the bugs of the patch release that you run
  gateway plan --from 1.18 --to 1.32 --direct    in one jump: what is lost, and which stop prevents it
  gateway plan --from 1.36 --to 1.28             a downgrade
  kubectl get nodes -o json | gateway plan --nodes - --to 1.37
  kubectl get nodes -o json | gateway plan --nodes - --to 1.37 -o html > plan.html
  kubectl get nodes -o json | gateway plan --nodes - --to dra    GPUs move to claims (DRA): which nodes can, in which order
  gateway plan --from 1.24 --to 1.33 --json | jq '.hops[] | select(.drain != "not needed") | .new'
"""

_TO_DRA: Final = "dra"
"""The value of --to that plans the move of GPUs to DRA. The kubelets keep their versions."""
_WIDEST: Final = 100
_WHEN: Final = {
    "restart": "At each start of the kubelet.",
    "reboot": "After a reboot of the node.",
    "register": "When a plugin is replaced.",
    "admission": "When a pod is admitted.",
}


@click.command(epilog=_EXAMPLES)
@click.option("--from", "start", metavar="VERSION", help="The kubelet that runs now: 1.24, or 1.24.17.")
@click.option(
    "--nodes",
    type=click.File("rb"),
    metavar="FILE",
    help="All nodes: kubectl get nodes -o json (-: from standard input).",
)
@click.option(
    "--to",
    "goal",
    required=True,
    metavar="VERSION|dra",
    help="The kubelet version to plan for, newer or older. dra: move the GPUs to claims and keep the kubelets.",
)
@click.option("--direct", is_flag=True, help="Plan one jump instead of one minor version at a time.")
@common.output("one document, with the source of each statement", html="with --nodes, a page with a timeline")
def plan(*, start: str | None, nodes: IO[bytes] | None, goal: str, direct: bool, output: str) -> None:
    """Show what happens to a GPU node at each hop of a kubelet upgrade or downgrade.

    With --nodes: the same for each node of a cluster, with the nodes to drain and the order of the nodes.

    With --to dra: which kubelets can move their GPUs from the device plugin API to claims (dynamic resource allocation). The plan
    names the prerequisites, the effects on pods, and the order of the nodes.

    For each hop, the plan shows the device plugin API and whether to drain. It shows whether the kubelet keeps its checkpoint (who
    holds which GPU), and the minimum patch release. It lists the kubelet bugs that affect GPU pods, with workarounds. Each
    statement was tested on real kubelet code, or comes from its source, release notes or issues. The plan shows which.
    """
    from gateway.cli import advice, fleet

    if (start is None) == (nodes is None):
        raise click.UsageError("Give either --from, for one node, or --nodes, for many")
    if goal == _TO_DRA and direct:
        raise click.UsageError("--direct can't be used with --to dra, because no kubelet changes. Leave it out")
    if output == "html" and (nodes is None or goal == _TO_DRA):
        raise click.UsageError("-o html needs --nodes and a kubelet version in --to. Leave it out")
    facts = advice.load()
    width = columns(_WIDEST)
    try:
        everyone = None if nodes is None else fleet.read(_content(nodes))
        document, lines = (
            _move_to_dra(facts, start, everyone, width)
            if goal == _TO_DRA
            else _upgrade(facts, start, everyone, advice.kubelet(goal, facts), width, direct=direct)
        )
    except advice.PlanError as error:
        raise click.UsageError(str(error)) from error
    if output == "json":
        print_json(document, indent=2)
    elif isinstance(document, fleet.Fleet) and output == "html":
        from gateway.cli import fleethtml

        click.echo(fleethtml.page(document), nl=False)
    else:
        click.echo("\n".join(lines))


def _content(nodes: IO[bytes]) -> bytes:
    from gateway.cli import fleet

    content = nodes.read(fleet.MOST_BYTES + 1)
    if len(content) > fleet.MOST_BYTES:
        raise click.UsageError(f"--nodes: more than {fleet.MOST_BYTES} bytes. Name fewer nodes")
    return content


def _upgrade(
    facts: Advice, start: str | None, nodes: Sequence[Node] | None, to: Kubelet, width: int, *, direct: bool
) -> tuple[object, Iterator[str]]:
    """Plan an upgrade. Return the JSON document and the lines of text."""
    from gateway.cli import advice, fleet, fleettext

    if nodes is not None:
        whole = fleet.plan(facts, nodes, to, direct=direct)
        return whole, fleettext.render(whole)
    one = advice.plan(facts, advice.kubelet(str(start), facts), to, direct=direct)
    return one, render(one, width)


def _move_to_dra(
    facts: Advice, start: str | None, nodes: Sequence[Node] | None, width: int
) -> tuple[object, Iterator[str]]:
    """Plan the move of GPUs to claims. Return the JSON document and the lines of text."""
    from gateway.cli import advice, crossover, crossovertext

    if nodes is not None:
        made = crossover.plan(facts, nodes)
    else:
        made = crossover.plan_of(facts, advice.kubelet(str(start), facts))
    return made, crossovertext.render(made, width)


def render(plan: Plan, width: int) -> Iterator[str]:
    """Write a plan as text, in lines of at most ``width`` columns (a longer word gets its own line)."""
    page = Page(width)
    drains = [
        f"{sum(hop.drain == level for hop in plan.hops)} with a drain {level}" for level in ("required", "advised")
    ]
    said = [phrase for phrase in drains if not phrase.startswith("0 ")] or ["the GPUs need no drain"]
    hops = count(len(plan.hops), "hop")
    yield from page.text(f"Kubelet {plan.start} to {plan.goal} on a GPU node: {hops}, {', '.join(said)}.")
    yield from _summary(page, plan)
    for heading, steps in (("Before the first hop", plan.first), ("At each hop", plan.each)):
        yield from ("", heading)
        for step in steps:
            yield from page.item(step)
    if plan.now:
        yield from ("", f"Now, on {plan.start}")
    for name, fixed in plan.now.items():
        end = f"Fixed in {' and '.join(fixed)}." if fixed else "Not fixed yet."
        yield from page.item(f"{name}: {_headline(plan.rows[name])} {end}")
    explained = {*plan.now}
    for hop in plan.hops:
        yield ""
        yield from _hop(page, plan, hop, explained)
    yield from ("", f"In the end, on {plan.goal}")
    yield from page.line(", ".join(plan.then) + "." if plan.then else "No bug is known that hits GPU pods.")
    yield ""
    yield from page.text(
        "run: tested on real kubelet code; read: in code, release notes or issues; inferred: not tested. --json has the sources."
    )


def _summary(page: Page, plan: Plan) -> Iterator[str]:
    """Summarize the plan: hops with a drain, lost checkpoints, minimum patch releases."""
    for words, hops in (
        ("Drain before the hop to", [hop for hop in plan.hops if hop.drain == "required"]),
        ("A drain is advised before the hop to", [hop for hop in plan.hops if hop.drain == "advised"]),
        ("The checkpoint is lost at the hop to", [hop for hop in plan.hops if not hop.checkpoint_kept]),
    ):
        if hops:
            yield from page.line(f"{words} {', '.join(_target(hop) for hop in hops)}.")
    if early := [hop.at_least for hop in plan.hops if hop.at_least]:
        yield from page.line(f"Use at least these patch releases: {', '.join(early)}.")


def _hop(page: Page, plan: Plan, hop: Hop, explained: set[str]) -> Iterator[str]:
    drain = {"required": "DRAIN", "advised": "drain advised", "not needed": "no drain"}[hop.drain]
    yield from page.text(f"{hop.old} -> {_target(hop)}: {drain}")
    for reason in hop.drain_because:
        yield from page.line(f"Because {reason}.")
    if hop.api_before != hop.api_after:
        yield from page.line(f"API: {hop.api_before} becomes {hop.api_after}. The gateway changes over by itself.")
    else:
        yield from page.line(f"API: {hop.api_after}, as before.")
    checkpoint = _evidence(plan.rows[hop.checkpoint])
    if hop.checkpoint_kept:
        yield from page.line("Checkpoint: kept. Running pods keep their GPUs.")
    else:
        rescue = f" If you stop at {hop.stop_at} on the way, it is kept." if hop.stop_at else ""
        yield from page.line(
            f"Checkpoint: LOST {checkpoint}. The kubelet starts with empty records and gives GPUs that are in use to others.{rescue}"
        )
    for name, patches in hop.avoided.items():
        lost = f"The checkpoint of {hop.old} can't be read {checkpoint}."
        yield from page.line(f"Avoid {patches}: {lost if name == hop.checkpoint else _headline(plan.rows[name])}")
    for name in (*hop.crossings, *hop.new_bugs):
        if name not in explained:
            yield from _row(page, plan.rows[name])
            explained.add(name)
    again = [name for name in hop.new_bugs if name in plan.now]
    for word, names in (("Again", again), ("No longer", hop.gone)):
        if names:
            yield from page.line(f"{word}: {', '.join(names)}.")


def _target(hop: Hop) -> str:
    """Return the target version and its minimum patch release."""
    if hop.at_least is None:
        return hop.new
    minor, patch = hop.at_least.rsplit(".", 1)
    if hop.new == minor:
        return f"{hop.new} (at least {hop.at_least})"
    return (
        hop.new if int(hop.new.rsplit(".", 1)[1]) >= int(patch) else f"{hop.new} (TOO EARLY: at least {hop.at_least})"
    )


def _row(page: Page, row: Crossing | Bug | CheckpointFormat) -> Iterator[str]:
    from gateway.cli.advice import Bug, Hazard

    yield from page.item(f"{row.id}: {_headline(row)}")
    if isinstance(row, Hazard):
        yield from page.under((f"{_WHEN[row.when]} " if isinstance(row, Bug) else "") + row.suffers)
        yield from page.under(f"Way out: {row.way_out}")


def _headline(row: Crossing | Bug | CheckpointFormat) -> str:
    """Return one sentence about a row: what it is, and its evidence."""
    from gateway.cli.advice import Hazard

    return f"{row.title if isinstance(row, Hazard) else row.what} {_evidence(row)}."


def _evidence(row: Crossing | Bug | CheckpointFormat) -> str:
    return f"({', '.join([row.evidence, *re.findall(r'#[0-9]+', row.source)[:1]])})"
