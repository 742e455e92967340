"""``gateway cross``: real control sockets, what a gateway is asked, and what a person is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli.cross import cross
from gateway.wires.control import ControlError
from tests.unit.answering import By, gateways
from tests.unit.documents import SERVING, WAITING
from tests.unit.test_cli_devices import FULL, GPUS, PARTS

OPERATIONS = ("devices", "cross")
HELD = {"id": GPUS[0], "side": "plugin", "then": "to-dra", "words": "it goes as soon as nobody holds it"}
THERE = {"id": GPUS[1], "side": "dra", "then": "dra", "words": "offered by DRA"}


def call(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cross, [*arguments, "--state-dir", str(folder)])


def says(*rows: dict[str, str], refused: str = "") -> By:
    return By({"devices": FULL, "cross": {"boards": rows, "refused": refused}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        pytest.param([], [], id="all"),
        pytest.param(["0"], [GPUS[0]], id="an index"),
        pytest.param(["GPU-1", "MIG-0"], [GPUS[1], PARTS[0]], id="what no other ID begins with"),
        pytest.param(["GPU-3"], [GPUS[3]], id="the GPU beneath partitions"),
        pytest.param(["GPU-7"], ["GPU-7"], id="what nobody knows, for the gateway to refuse"),
    ],
)
def test_short_names_stand_for_whole_ids(folder: Path, names: list[str], ids: list[str]) -> None:
    with gateways(folder, {SERVING: says()}, *OPERATIONS) as told:
        assert call(folder, "--to", "dra", *names).exit_code == 0
    assert told == {SERVING: {"v": 1, "op": "cross", "to": "dra", "ids": ids, "dry_run": False}}


def test_each_gpu_is_told_with_where_it_goes(folder: Path) -> None:
    with gateways(folder, {SERVING: says(HELD, THERE)}, *OPERATIONS):
        result = call(folder, "--to", "dra", "--dry-run")
        raw = call(folder, "--to", "dra", "--dry-run", "--json")
    assert result.stdout.splitlines() == [
        f"{GPUS[0]}: plugin, then to-dra: it goes as soon as nobody holds it",
        f"{GPUS[1]}: dra: offered by DRA",
    ]
    assert (result.exit_code, raw.exit_code) == (0, 0)
    assert json.loads(raw.stdout) == {"v": 1, "boards": [HELD, THERE], "refused": ""}


def test_a_dry_run_says_that_the_order_would_be_refused(folder: Path) -> None:
    with gateways(folder, {SERVING: says(THERE, refused="the driver isn't registered")}, *OPERATIONS):
        result = call(folder, "--to", "dra", "--dry-run")
        raw = call(folder, "--to", "dra", "--dry-run", "--json")
    assert (result.exit_code, raw.exit_code) == (1, 1)
    assert result.stdout == f"{GPUS[1]}: dra: offered by DRA\n"
    assert result.stderr == "Error: the order would be refused: the driver isn't registered\n"
    assert json.loads(raw.stdout)["refused"] == "the driver isn't registered"


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({}, "No gateway runs on this node"),
        ({SERVING: says(), WAITING: says()}, "Two that stay (those of --standby, say) run with --dra off"),
        ({SERVING: By({"devices": FULL, "cross": ControlError("this gateway runs with --dra off")})}, "--dra off"),
    ],
)
def test_no_success(folder: Path, there: dict[str, Any], words: str) -> None:
    with gateways(folder, there, *OPERATIONS):
        result = call(folder, "--to", "dra")
    assert result.exit_code == 1
    assert words in result.stderr


def test_a_name_that_is_short_for_several_does_nothing(folder: Path) -> None:
    with gateways(folder, {SERVING: says()}, *OPERATIONS) as told:
        result = call(folder, "--to", "dra", "MIG-")
    assert (result.exit_code, told[SERVING]["op"]) == (1, "devices")
    assert "'MIG-' is short for 2 devices" in result.stderr
