"""Write the plan of a fleet as a page: a timeline with a row for each version of the kubelet and a column for each step."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from gateway.cli.fleet import Fleet, Group, Step
from gateway.cli.fleettext import names, render
from gateway.cli.page import count

_HEAD: Final = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Kubelet upgrade plan</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: .4rem; }
th { text-align: left; font-weight: 600; vertical-align: top; }
td { min-width: 8rem; padding: .4rem .6rem; border-radius: .4rem; vertical-align: top; }
small { display: block; }
.required { background: #c2453d; color: #fff; }
.advised { background: #e0a83a; color: #000; }
.free { background: #2f9e5b; color: #fff; }
pre { white-space: pre-wrap; }
</style>
"""
_CLASSES: Final = {"required": "required", "advised": "advised", "not needed": "free"}
_DRAIN_LABELS: Final = {"required": "drain", "advised": "drain advised", "not needed": "no drain"}


def page(fleet: Fleet) -> str:
    """Return the page as HTML. It loads no other files."""
    return "\n".join([_HEAD, *_body(fleet), "</html>", ""])


def _body(fleet: Fleet) -> Iterator[str]:
    numbers = sorted({step.number for step in fleet.steps})
    yield f"<h1>{count(fleet.nodes, 'node')} to kubelet {escape(fleet.goal)}</h1>"
    yield "<p>Finish each step on all nodes before the next one. In each step, upgrade one node first.</p>"
    yield '<div class="wide"><table>'
    yield f"<tr><th>kubelet today</th>{''.join(f'<th>step {number}</th>' for number in numbers)}</tr>"
    for group in fleet.groups:
        yield f"<tr><th>{escape(group.version)}<small>{_describe_group(group)}</small></th>"
        mine = {step.number: step for step in fleet.steps if group.version in step.versions}
        yield "".join(_cell(mine[number]) if number in mine else "<td></td>" for number in numbers) + "</tr>"
    yield f"</table></div>\n<pre>{escape(chr(10).join(render(fleet)))}</pre>"


def _describe_group(group: Group) -> str:
    return escape(
        f"{count(len(group.nodes), 'node')}, {count(group.devices, 'device')}: {names(group.nodes)}"
        + ("" if group.plan else "; already on the target version")
    )


def _cell(step: Step) -> str:
    hop = step.hop
    kept = "" if hop.checkpoint_kept else "<small>the checkpoint is lost</small>"
    target = escape(f"{hop.old} \u2192 {hop.at_least or hop.new}")
    return f'<td class="{_CLASSES[hop.drain]}">{target}<small>{_DRAIN_LABELS[hop.drain]}</small>{kept}</td>'
