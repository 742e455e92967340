"""Each public class of the daemon has a name of its own, and the contract knows nothing of the daemon's inside."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = ("adapters", "devices", "gateway")
APART: Final = ("adapters/pb", "gateway/cli", "gateway_lab")
"""Rooms in the same folders that no daemon runs: generated code, commands, the laboratory."""
SHARED_NAMES: Final = {
    "Metadata": "Kubernetes' own word, of a claim and of a slice",
    "State": "each state machine's own, and a device's: read with the module's name",
}
"""Names that several classes have, and what each is: the field's own word in rooms that don't meet. None comes without a reason."""

CONTRACT_MAY_IMPORT: Final = (
    *("gateway.cli.main", "gateway.configuration.settings", "gateway_lab"),
    *("adapters", "devices.model"),
    *("tests.contract", "tests.fakes", "gateway.wires.rpc"),
)
"""The daemon's entry point, its settings, what is sent over the wire, and who is at the other end of it.

``gateway.wires.rpc`` is what the stand-in for gRPC is compared through."""


def modules(root: Path) -> list[Path]:
    """All modules of the daemon, as paths from the root."""
    apart = [Path(name) for name in APART]
    found = (path.relative_to(root) for room in ROOMS for path in sorted((root / room).rglob("*.py")))
    return [path for path in found if not any(path.is_relative_to(one) for one in apart)]


def shared_names(root: Path) -> dict[str, list[str]]:
    """Where the public classes are whose name another one has, too."""
    found: dict[str, list[str]] = {}
    for path in modules(root):
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_class_has_a_name_of_its_own() -> None:
    found = shared_names(ROOT)
    unexpected_ones = {name: paths for name, paths in found.items() if name not in SHARED_NAMES}
    assert not unexpected_ones, f"{unexpected_ones}: expected one idea per name: call the newer one by what it says"
    assert SHARED_NAMES.keys() == found.keys(), "a name that only one class has needs no reason any more"


def test_a_name_that_two_classes_have_is_found(tmp_path: Path) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway/a.py").write_text("class One: ...\nclass _Own: ...\n", encoding="utf-8")
    (tmp_path / "gateway/b.py").write_text("class _Own: ...\nclass Two:\n    class One: ...\n", encoding="utf-8")
    assert shared_names(tmp_path) == {"One": ["gateway/a.py", "gateway/b.py"]}


def knows_the_inside(text: str) -> list[str]:
    """Return what a module of the contract imports of the project, and may not."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
        found += [name for name in names if name.partition(".")[0] in {*ROOMS, "tests"}]
    return [name for name in found if not any(f"{name}.".startswith(f"{may}.") for may in CONTRACT_MAY_IMPORT)]


@pytest.mark.parametrize("path", sorted((ROOT / "tests/contract").glob("*.py")), ids=lambda path: path.name)
def test_the_contract_sees_the_daemon_from_outside(path: Path) -> None:
    assert knows_the_inside(path.read_text(encoding="utf-8")) == []


def test_an_import_of_the_inside_is_found() -> None:
    text = (
        "import gateway.daemon\nfrom gateway.memory.ledger import Ledger\nfrom devices.model import Device\nimport os\n"
    )
    assert knows_the_inside(text) == ["gateway.daemon", "gateway.memory.ledger.Ledger"]
