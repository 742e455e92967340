"""Rows of the contract over real sockets and with real kubelet code: the clock and the gRPC of the other rows hide nothing."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway_lab.kubelets.build import built
from tests.contract.node import VERSION
from tests.contract.real import RealNode

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "contract").glob("test_*.py"))
GENUINE = ("1.8", "1.9", "1.37")
"""A kubelet of each dialect: `make test` builds these."""
ONE_OF_EACH = (*GENUINE, "1.10", "1.12", "1.28")
"""A kubelet of each class of behaviour."""


def rows() -> Iterator[Any]:
    """Find the rows that are marked, each with its parameters; on a kubelet's real code if `make test` builds that version."""
    for module in map(importlib.import_module, (f"tests.contract.{name}" for name in MODULES)):
        for name, row in vars(module).items():
            marks = {mark.name: mark for mark in getattr(row, "pytestmark", ())}
            if "also_real" not in marks:
                continue
            names, values = [], []
            for mark in row.pytestmark:
                if mark.name == "parametrize":
                    several = isinstance(mark.args[0], str) and "," not in mark.args[0]
                    names += [mark.args[0]] if several else [*mark.args[0]]
                    values.append([(one,) if several else tuple(one) for one in mark.args[1]])
            for chosen in itertools.product(*values):
                arguments = dict(zip(names, itertools.chain(*chosen), strict=True))
                version = arguments.get("version", "1.37")
                words = "-".join([name.removeprefix("test_"), *map(str, arguments.values())])
                if version in GENUINE and marks["also_real"].kwargs.get("genuine", True):
                    yield pytest.param(row, arguments, True, id=f"{words}-genuine", marks=pytest.mark.genuine)
                elif version in ONE_OF_EACH:
                    yield pytest.param(row, arguments, False, id=f"{words}-emulated")


@pytest.mark.parametrize(("row", "arguments", "genuine"), [*rows()])
async def test_row(folder: Path, row: Any, arguments: dict[str, Any], *, genuine: bool) -> None:
    async with RealNode(folder, GENUINE[-1] if genuine else VERSION, built if genuine else lambda _: None) as node:
        await row(node=node, **arguments)
        node.check()
