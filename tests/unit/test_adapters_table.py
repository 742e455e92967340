"""The committed page of dialects is what the adapters declare, and a page that isn't is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dialects.md"


def _table(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.dialects", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("declared", "found"),
    [
        ("| annotations | degraded |", "| annotations | lossless |"),
        (
            "| GetPreferredAllocation | degraded | degraded | lossless from 1.19",
            "| GetPreferredAllocation | degraded | degraded | lossless from 1.18",
        ),
    ],
    ids=["a verdict", "a level"],
)
def test_a_difference_is_shown_with_what_to_do(tmp_path: Path, declared: str, found: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert declared in text
    page = tmp_path / "page.md"
    page.write_text(text.replace(declared, found), encoding="utf-8")
    run = _table("--check", page)
    assert run.returncode == 1
    assert f"-{found}" in run.stderr
    assert f"+{declared}" in run.stderr
    assert "run `make docs`" in run.stderr


def test_a_page_that_is_missing_is_noticed(tmp_path: Path) -> None:
    assert _table("--check", tmp_path / "none.md").returncode == 1


def test_what_was_written_is_in_order(tmp_path: Path) -> None:
    assert _table(tmp_path / "page.md").returncode == 0
    assert _table("--check", tmp_path / "page.md").returncode == 0
