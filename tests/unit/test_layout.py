"""The daemon's rooms stay small: the limits of a folder, a module and a class, each with what to do when it is reached."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = ("adapters", "devices", "gateway")
APART: Final = ("adapters/pb", "gateway/cli", "gateway/lab")
"""Rooms in the same folders that no daemon runs: generated code, commands, the laboratory."""
MOST_LINES: Final = 450
MOST_LINES_OF_A_CLASS: Final = 300
MOST_MODULES: Final = 12
SHARED_NAMES: Final = {
    "Metadata": "Kubernetes' own word, of a claim and of a slice",
    "State": "each state machine's own, and a device's: read with the module's name",
}
"""Names that several classes have, and what each is: the field's own word in rooms that don't meet. None comes without a reason."""
UNFINISHED: Final[frozenset[str]] = frozenset()
"""What is too large still: a row goes when it is cut, and none comes."""


def modules(root: Path) -> list[Path]:
    """All modules of the daemon, as paths from the root."""
    apart = [Path(name) for name in APART]
    found = (path.relative_to(root) for room in ROOMS for path in sorted((root / room).rglob("*.py")))
    return [path for path in found if not any(path.is_relative_to(one) for one in apart)]


def long_modules(root: Path) -> Iterator[str]:
    for path in modules(root):
        if (lines := len((root / path).read_text(encoding="utf-8").splitlines())) > MOST_LINES:
            yield f"{path} has {lines} lines"


def long_classes(root: Path) -> Iterator[str]:
    for path in modules(root):
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES_OF_A_CLASS:
                    yield f"class {node.name} of {path} has {lines} lines"


def full_folders(root: Path) -> Iterator[str]:
    counted = Counter(path.parent for path in modules(root) if path.name != "__init__.py")
    for folder, count in counted.items():
        if count > MOST_MODULES:
            yield f"{folder} has {count} modules"


def shared_names(root: Path) -> dict[str, list[str]]:
    """Where the public classes are whose name another one has, too."""
    found: dict[str, list[str]] = {}
    for path in modules(root):
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def advice_on_modules(found: list[str]) -> str:
    return (
        f"{'; '.join(found)}: expected at most {MOST_LINES} lines: cut it where an idea ends, and give that a module of its own "
        "whose first line says what it is"
    )


def advice_on_classes(found: list[str]) -> str:
    return (
        f"{'; '.join(found)}: expected at most {MOST_LINES_OF_A_CLASS} lines: find the fields that only some of its methods use, "
        "and give them a class of their own; decisions become functions beside it"
    )


def advice_on_folders(found: list[str]) -> str:
    return (
        f"{'; '.join(found)}: expected at most {MOST_MODULES} modules: make a folder of those that belong together, draw it in "
        "docs/architecture.md, and name it in the import contracts of pyproject.toml"
    )


def unexpected(found: Iterable[str]) -> list[str]:
    return [one for one in found if one.split(" has ")[0] not in UNFINISHED]


def test_modules_are_short() -> None:
    assert not (found := unexpected(long_modules(ROOT))), advice_on_modules(found)


def test_classes_are_short() -> None:
    assert not (found := unexpected(long_classes(ROOT))), advice_on_classes(found)


def test_folders_are_small() -> None:
    assert not (found := list(full_folders(ROOT))), advice_on_folders(found)


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


@pytest.mark.parametrize(
    ("over", "found"),
    [
        pytest.param(0, ([], [], []), id="at the limits"),
        pytest.param(
            1,
            (
                ["gateway/room/long.py has 451 lines"],
                ["class Large of gateway/room/large.py has 301 lines"],
                ["gateway/room has 13 modules"],
            ),
            id="one more",
        ),
    ],
)
def test_what_is_too_large_is_found(tmp_path: Path, over: int, found: tuple[list[str], list[str], list[str]]) -> None:
    room, lab = tmp_path / "gateway/room", tmp_path / "gateway/lab"
    for folder in (room, lab):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "long.py").write_text("\n" * (MOST_LINES + over), encoding="utf-8")
        large = "class Large:\n" + "    x = 1\n" * (MOST_LINES_OF_A_CLASS - 1 + over)
        (folder / "large.py").write_text(large, encoding="utf-8")
        for number in range(MOST_MODULES - 2 + over):
            (folder / f"small{number}.py").touch()
    assert (list(long_modules(tmp_path)), list(long_classes(tmp_path)), list(full_folders(tmp_path))) == found
