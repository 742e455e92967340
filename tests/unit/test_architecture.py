"""The picture of docs/architecture.md shows the rooms that there are, and imports that there are; its files exist."""

from __future__ import annotations

import ast
import re
from enum import Enum
from functools import cache
from pathlib import Path

import pytest

from devices.life.states import State as DeviceState
from gateway.bridge.shield import Cover
from gateway.leader.machine import Stage
from gateway.registration.events import Phase
from gateway.sides.side import Side

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = PAGE.split("flowchart LR\n")[1].split("```")[0]
NODES = dict(re.findall(r'(\w+)\["([^<]+)<br>', PICTURE))
"""The label of each node: paths, with a comma between those that share one."""
ARROWS = re.findall(r"(\w+)(?:\[[^\]]*\])? --> (\w+)", PICTURE)


def paths(node: str) -> list[str]:
    first, *others = NODES[node].split(", ")
    return [first, *(str(Path(first).with_name(one)) for one in others)]


@cache
def imported(path: str) -> frozenset[str]:
    """Every module that a room's modules import, at their head or where they need it."""
    found = set[str]()
    where = ROOT / path
    for file in [where] if where.suffix else where.rglob("*.py"):
        for one in ast.walk(ast.parse(file.read_text())):
            if isinstance(one, ast.Import):
                found.update(name.name for name in one.names)
            elif isinstance(one, ast.ImportFrom) and one.module:
                found.update(f"{one.module}.{name.name}" for name in one.names)
    return frozenset(found)


def test_each_room_is_drawn() -> None:
    drawn = {path for node in NODES for path in paths(node)}
    rooms = {
        "adapters",
        "devices",
        "gateway_lab",
        "gateway/daemon.py",
        "gateway/handover.py",
        "gateway/lists.py",
        "gateway/compose.py",
    } | {
        str(file.parent.relative_to(ROOT))
        for package in ("devices", "devices/gpu", "gateway")
        for file in (ROOT / package).glob("*/__init__.py")
    }
    assert drawn == rooms


@pytest.mark.parametrize(("start", "end"), ARROWS)
def test_an_arrow_is_an_import(start: str, end: str) -> None:
    wanted = tuple(path.removesuffix(".py").replace("/", ".") for path in paths(end))
    assert any(f"{name}.".startswith(f"{one}.") for path in paths(start) for name in imported(path) for one in wanted)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:adapters|devices|gateway)/[\w/.]+)`", PAGE))))
def test_a_file_that_it_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_code_has_what_the_glossary_says_of_it() -> None:
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", PAGE.split("\n## Words\n")[1], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+)(?:\.\w+)?`", row)}
    code = "".join(
        file.read_text() for room in ("adapters", "devices", "gateway") for file in (ROOT / room).rglob("*.py")
    )
    assert len(named) > 8
    assert [name for name in named if not re.search(rf"^(class {name}\b|{name} = )", code, re.MULTILINE)] == []


@pytest.mark.parametrize("states", [Phase, Stage, DeviceState, Side, Cover])
def test_the_table_of_state_machines_has_every_state(states: type[Enum]) -> None:
    cells = [row.split(" | ")[1] for row in PAGE.splitlines() if row.startswith("| ") and row.count(" | ") == 2]
    assert ", ".join(str(one.value) for one in states) in cells
