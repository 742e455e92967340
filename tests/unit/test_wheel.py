"""What pip installs: the wheel holds the data the code reads at run time, and nothing that isn't the product."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("adapters", "devices", "gateway")


@pytest.fixture(scope="module")
def contents() -> Iterator[set[str]]:
    """Build the wheel from a copy, so that the build leaves nothing in this tree, and list it."""
    with tempfile.TemporaryDirectory(prefix="dpg-wheel-") as scratch:
        tree = Path(scratch, "tree")
        for package in PACKAGES:
            shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", scratch, str(tree)], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with ZipFile(wheel) as opened:
            yield set(opened.namelist())


def _sources(*patterns: str) -> list[str]:
    """Give every file of the packages that matches, as the wheel should name it."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for pattern in patterns
        for path in (ROOT / package).rglob(pattern)
    )


@pytest.mark.parametrize("pattern", ["*.py", "*.pyi", "py.typed", "*.yaml"])
def test_the_wheel_holds_every(pattern: str, contents: set[str]) -> None:
    sources = _sources(pattern)
    assert sources, f"this tree has no {pattern}"
    assert not set(sources) - contents


def test_the_wheel_holds_nothing_else(contents: set[str]) -> None:
    tops = {name.split("/")[0] for name in contents}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
