"""Draw a node's GPUs for ``gateway devices --map``: each below its NUMA node with its holders, and how they reach each other."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from devices.replicas import unshared
from gateway.cli.page import table
from gateway.wires.log import printable

if TYPE_CHECKING:
    from devices.source import Facts
    from gateway.telling.status import DeviceStatus

_HEALTHY: Final = "healthy"
_ID: Final = 12
"""Characters of an ID that are shown: enough to tell GPUs apart, and to name one in a command."""


@dataclass(frozen=True, slots=True)
class Row:
    """One device of one resource."""

    gateway: str
    resource: str
    device: DeviceStatus
    facts: Facts
    known: bool
    """Whether it is known who holds what."""

    def is_called(self, name: str) -> bool:
        """Whether a person means it by ``name``: its resource, its index, its ID or the beginning of that, or what it is part of."""
        domain, _, short = self.resource.partition("/")
        others = {self.resource, domain, short, self.facts.parent, self.facts.index}
        return bool(name) and (name in others or self.device.id.startswith(name))


def render(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Write a map of the boards of all resources, in lines of ``width`` columns."""
    boards: dict[str, list[Row]] = {}
    for row in rows:
        boards.setdefault(row.facts.parent or unshared(row.device.id), []).append(row)
    places: dict[str, list[str]] = {}
    for board, parts in boards.items():
        numa = sorted({node for part in parts for node in part.device.numa})
        places.setdefault(", ".join(map(str, numa)) or "not known", []).append(board)
    for number, (place, found) in enumerate(sorted(places.items())):
        yield from ([""] if number else [])
        yield click.style(f"NUMA node {place}", bold=True)
        for board in found:
            yield from _board(board, boards[board], width)
    links = {_index(parts): parts[0].facts.links for parts in boards.values() if parts[0].facts.links}
    if links:
        yield from ("", *_matrix(links))


def _index(parts: Sequence[Row]) -> str:
    return parts[0].facts.index.partition(":")[0] or "-"


def _board(board: str, parts: Sequence[Row], width: int) -> Iterator[str]:
    """Draw a square for each device of a board: filled if a container holds it, a cross if it is not healthy."""
    squares = "".join(
        "✕" if part.device.state != _HEALTHY else "■" if part.device.holder else "□" for part in parts[: width // 2]
    )
    states = sorted({part.device.state for part in parts if part.device.state != _HEALTHY})
    holders = list(dict.fromkeys(part.device.holder for part in parts if part.device.holder))
    said = ", ".join(map(printable, [*states, *holders])) or ("free" if parts[0].known else "holders not known")
    lead = f"  {_index(parts):>2}  {printable(board)[:_ID]:<{_ID}}  {squares}  "
    yield from textwrap.wrap(said, width, initial_indent=lead, subsequent_indent="      ", break_on_hyphens=False)


def _short(way: str) -> str:
    return way.upper().replace("NVLINK X", "NV").replace(" ", "")


def _matrix(links: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Write how each GPU reaches each other, as `nvidia-smi topo -m` does."""
    rows = [
        (one, *("-" if one == other else _short(ways.get(other, "")) for other in links)) for one, ways in links.items()
    ]
    yield from (line[2:] for line in table(("LINKS", *links), rows))
