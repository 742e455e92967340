"""``gateway devices``: what a node's devices are, how they do, and who holds them, by the gateway that serves each resource."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from devices.replicas import unshared
from devices.source import Facts
from gateway.cli import asking, common, devicemap
from gateway.cli.devicemap import Row
from gateway.cli.page import columns, print_json
from gateway.cli.status import _colour, _remarks
from gateway.telling.status import GatewayStatus, ResourceStatus
from gateway.wires.log import printable

_EXAMPLES = """
\b
Examples:
  gateway devices
  gateway devices nvidia.com/gpu
  gateway devices GPU-5f3a -o wide
  gateway devices --map                          GPUs by NUMA node, their holders and links
  gateway devices -o json | jq -r '.devices[] | select(.state != "healthy") | .id'

Exit status: 0 where a gateway answered, otherwise 1; 2 for a wrong flag.
"""

ANSWER_TIME: Final = 5.0
"""Seconds within which a gateway must answer; the driver's time comes on top."""
_WIDTH: Final = 100
_MOST_REMARKS: Final = 3
_WELL: Final = "healthy"


class NodeDevices(msgspec.Struct, frozen=True):
    """A gateway's status, and ``facts`` about its devices: by resource, and by the ID that replicas share."""

    status: GatewayStatus
    facts: dict[str, dict[str, Facts]]


def rows(answers: Iterable[NodeDevices]) -> list[Row]:
    """Return the devices of every resource, by its name, from the gateway that serves it."""
    told_by: dict[str, tuple[NodeDevices, ResourceStatus]] = {}
    for answer in answers:
        for resource in answer.status.resources:
            if resource.name not in told_by or not answer.status.led_by:
                told_by[resource.name] = answer, resource
    found = []
    for name in sorted(told_by):
        answer, resource = told_by[name]
        facts = answer.facts.get(name, {})
        for device in resource.devices:
            fact = facts.get(unshared(device.id), Facts())
            found.append(Row(answer.status.token, name, device, fact, resource.held is not None))
    return found


def look(state_dir: Path) -> tuple[list[NodeDevices], dict[Path, str]]:
    """Ask every gateway for its devices; return the answers, and why the other gateways gave none, by control socket.

    Raises:
        ControlError: the folder can't be read.
    """
    answers, silent = asyncio.run(asking.ask_all(state_dir, {"op": "devices"}, ANSWER_TIME, NodeDevices))
    return [*answers.values()], silent


@click.command(epilog=_EXAMPLES)
@click.argument("names", metavar="[RESOURCE|ID]...", nargs=-1)
@common.output("one object (docs/devices.md has its keys)", wide="a line for each replica of a shared device")
@click.option(
    "--map", "as_map", is_flag=True, help="Draw GPUs by NUMA node, their holders, and the links between them."
)
@common.state_dir
def devices(*, names: tuple[str, ...], output: str, as_map: bool, state_dir: Path) -> None:
    """Show this node's devices: what they are, how they do, and who holds them.

    Names are resources, indexes, device IDs or the beginnings of those. It asks the gateways that run, so it must run on
    the node, as their own user (root).
    """
    if not all(names):
        raise click.UsageError("The name of a resource or device is empty. Is a variable not set?")
    if as_map and output == "json":
        raise click.UsageError("--map draws for people. Leave out --map, or -o json")
    answers, silent = look(state_dir)
    if not answers and not silent:
        raise asking.no_gateway_error(state_dir, "devices")
    found = [row for row in rows(answers) if not names or any(map(row.is_called, names))]
    unusable = [] if names else list(dict.fromkeys(gpu for one in answers for gpu in one.status.unusable))
    if output == "json":
        by_path = {str(path): why for path, why in silent.items()}
        print_json({"devices": [*map(_plain, found)], "silent": by_path} | ({"unusable": unusable} if unusable else {}))
    else:
        shown = devicemap.render(found, columns(_WIDTH)) if as_map else render(found, unfolded=output == "wide")
        for line in shown:
            click.echo(line)
        for gpu in unusable:
            how = "left out" if gpu.excluded else "can't be used"
            click.echo(click.style(printable(f"{gpu.name} {how}: {gpu.reason}"), fg=None if gpu.excluded else "red"))
        for path, why in silent.items():
            click.echo(f"gateway {path.stem} does not answer: {printable(why)}", err=True)
    unknown = [name for name in names if not any(row.is_called(name) for row in found)]
    if answers and unknown:
        raise click.ClickException(f"no resource or device here is called {unknown[0]!r}: see `gateway devices`")
    sys.exit(0 if answers else 1)


def _plain(row: Row) -> dict[str, Any]:
    said = msgspec.to_builtins(row.device) | msgspec.to_builtins(row.facts)
    return {"gateway": row.gateway, "resource": row.resource, **said}


# For a person.

_HEAD: Final = ("INDEX", "DEVICE", "KIND", "STATE", "NUMA", "LINKS", "HELD BY")
_STATE: Final = _HEAD.index("STATE")
_ALWAYS: Final = frozenset({"DEVICE", "STATE", "HELD BY"})


@dataclass(frozen=True, slots=True)
class _Line:
    """A device, or several replicas of one, in cells; without a state: the GPU that those below are part of."""

    cells: tuple[str, ...]
    state: str = ""
    remarks: tuple[str, ...] = ()


def render(rows: Sequence[Row], *, unfolded: bool = False) -> Iterator[str]:
    """Write a table for each resource; with colours, which ``click.echo`` drops elsewhere."""
    by_resource: dict[str, list[Row]] = {}
    for row in rows:
        by_resource.setdefault(row.resource, []).append(row)
    for number, group in enumerate(by_resource.values()):
        yield from ([""] if number else [])
        yield from _table(group, unfolded=unfolded)


def _table(rows: Sequence[Row], *, unfolded: bool) -> Iterator[str]:
    """Write one resource's table: what all of its devices share is above it, and a column that says nothing left out."""
    products = {row.facts.product for row in rows}
    product = products.pop() if len(products) == 1 else ""
    yield "  ".join(
        filter(None, [click.style(printable(rows[0].resource), bold=True), printable(product), _summary(rows)])
    )
    lines = list(_lines(rows, product, unfolded=unfolded))
    table = [_HEAD, *(line.cells for line in lines if line.state)]
    columns = list(zip(*table, strict=True))
    shown = [place for place, column in enumerate(columns) if column[0] in _ALWAYS or any(column[1:])]
    widths = {place: max(map(len, columns[place])) for place in shown}
    yield ""
    yield click.style(("  " + "  ".join(f"{_HEAD[place]:<{widths[place]}}" for place in shown)).rstrip(), dim=True)
    for line in lines:
        if not line.state:
            yield click.style(f"  {' '.join(line.cells)}", dim=True)
            continue
        cells = [f"{line.cells[place] or '-':<{widths[place]}}" for place in shown]
        cells[shown.index(_STATE)] = click.style(cells[shown.index(_STATE)], fg=_colour(line.state))
        yield ("  " + "  ".join(cells)).rstrip()
        colour = "yellow" if line.state == _WELL else _colour(line.state)
        for remark in line.remarks:
            yield from (click.style(f"      {part}", fg=colour) for part in textwrap.wrap(remark, _WIDTH))


def _summary(rows: Sequence[Row]) -> str:
    return f"{_states(rows)}, {_held(rows)} held" if rows[0].known else f"{_states(rows)}, who holds them can't be seen"


def _states(rows: Iterable[Row]) -> str:
    counts = Counter(row.device.state for row in rows)
    return ", ".join(
        f"{counts[state]} {printable(state)}" for state in sorted(counts, key=lambda state: (state != _WELL, state))
    )


def _held(rows: Iterable[Row]) -> int:
    return sum(row.device.holder is not None for row in rows)


def _lines(rows: Sequence[Row], product: str, *, unfolded: bool) -> Iterator[_Line]:
    """Put replicas on one line, and partitions below their GPU."""
    folded: dict[str, list[Row]] = {}
    for row in rows:
        folded.setdefault(row.device.id if unfolded else unshared(row.device.id), []).append(row)
    parts: dict[str, list[list[Row]]] = {}
    for group in folded.values():
        parts.setdefault(group[0].facts.parent, []).append(group)
    for group in parts.pop("", []):
        yield _line(group, product, "")
        yield from (_line(part, product, "  ") for part in parts.pop(unshared(group[0].device.id), []))
    for parent, groups in parts.items():
        yield _Line(("on", printable(parent)))
        yield from (_line(part, product, "  ") for part in groups)


def _line(group: Sequence[Row], product: str, indent: str) -> _Line:
    first, many = group[0], len(group) > 1
    device, facts = first.device, first.facts
    kind = " ".join(filter(None, [facts.product if not product else "", facts.profile]))
    holder = (f"{_held(group)} held" if _held(group) else "") if many else device.holder or ""
    cells = (
        facts.index,
        indent + (times(unshared(device.id), len(group)) if many else device.id),
        kind,
        _states(group) if len({row.device.state for row in group}) > 1 else device.state,
        ",".join(map(str, device.numa)),
        links(facts.links),
        holder if first.known else "?",
    )
    worst = next((row.device.state for row in group if row.device.state != _WELL), _WELL)
    remarks = list(dict.fromkeys(filter(None, (printable(_remarks(row.device)) for row in group))))
    if (more := len(remarks) - _MOST_REMARKS) > 0:
        remarks[_MOST_REMARKS:] = [f"and {more} more: -o wide shows each"]
    return _Line(tuple(map(printable, cells)), worst, tuple(remarks))


def times(device_id: str, count: int) -> str:
    """Return a device's ID with its number of replicas."""
    return device_id if count == 1 else f"{device_id} \u00d7{count}"


def links(found: Mapping[str, str]) -> str:
    """Return a device's links to others in short: ``nvlink x12: 1-3, sys: 4-7``."""
    by_way: dict[str, list[str]] = {}
    for index, way in found.items():
        by_way.setdefault(way, []).append(index)
    return ", ".join(f"{way}: {_ranges(indexes)}" for way, indexes in by_way.items())


def _ranges(indexes: Iterable[str]) -> str:
    """Return numbers in short: ``0 2-4``. Other texts stay as they are."""
    runs: list[list[int]] = []
    for number in sorted(int(index) for index in indexes if index.isdecimal()):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    others = [index for index in indexes if not index.isdecimal()]
    return " ".join([*(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs), *others])


def resolve_devices(names: Sequence[str], answers: Iterable[NodeDevices]) -> list[str]:
    """Return the IDs that names stand for: of devices, of what replicas share, or of the GPU that partitions are part of.

    Raises:
        ControlError: one could be several.
    """
    found = rows(answers)
    replicas = {row.device.id for row in found}
    indexes = {row.facts.parent: "" for row in found if row.facts.parent}
    indexes |= {unshared(row.device.id): row.facts.index for row in found}
    return list(dict.fromkeys(name if name in replicas else asking.resolve_device(name, indexes) for name in names))
