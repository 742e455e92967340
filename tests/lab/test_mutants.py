"""Each mutant's patch fits the code, and each rule has a mutant; whether tests notice them is what `make mutants` runs."""

from __future__ import annotations

import re
import subprocess
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import __main__ as runner
from tests.mutants.__main__ import MUTANTS, misplaced
from tests.mutants.table import Mutant

ROOT = Path(__file__).parents[2]


def test_each_patch_fits_once() -> None:
    text = cache(lambda file: (ROOT / file).read_text())
    unfit = [f"{one.rule}: {one.name}" for one in MUTANTS if text(one.file).count(one.old) != 1]
    assert unfit == []


def test_each_patch_leaves_a_program() -> None:
    """A test that is red over a file that can't be read noticed nothing."""
    for one in MUTANTS:
        if one.file.endswith(".py"):
            compile((ROOT / one.file).read_text().replace(one.old, one.new), f"{one.rule}: {one.name}", "exec")


def test_each_names_a_test_that_is_there() -> None:
    """Else pytest runs none at all, and with several workers it doesn't say which is missing."""
    there = cache(lambda file: set(re.findall(r"^(?:async )?def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)))
    named = ((one.name, *one.test.partition("[")[0].partition("::")[::2]) for one in MUTANTS)
    assert [name for name, file, test in named if test and test not in there(file)] == []


def test_each_rule_has_a_mutant_and_each_mutant_a_rule() -> None:
    assert misplaced() == []


@pytest.mark.parametrize(
    ("unnoticed", "status", "words"),
    [
        pytest.param(0, 0, [], id="noticed"),
        pytest.param(1, 0, ["once more: ", "noticed at the second try only, mend that: "], id="at the second try"),
        pytest.param(2, 1, ["once more: ", "1 troubles"], id="never"),
    ],
)
def test_what_no_test_noticed_runs_once_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unnoticed: int,
    status: int,
    words: list[str],
) -> None:
    tried: list[Mutant] = []

    def survives(_: object, mutant: Mutant) -> str | None:
        tried.append(mutant)
        return "it survived" if mutant is MUTANTS[0] and tried.count(mutant) <= unnoticed else None

    monkeypatch.setattr(runner, "copy", lambda *_: [tmp_path])
    monkeypatch.setattr(runner, "Tree", nullcontext)
    monkeypatch.setattr(runner, "survives", survives)
    assert runner.main(MUTANTS[:2], 1) == status
    said = capsys.readouterr().out
    assert [word for word in words if word not in said] == []
    assert len(tried) == 2 + min(unnoticed, 1)


def test_each_mutant_has_its_turn_and_what_was_changed_has_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        subprocess.run(("git", "-c", "user.name=a", "-c", "user.email=a@b", *words), cwd=tmp_path, check=True)

    def commit(text: str, *files: str) -> set[str]:
        for name in files:
            (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "-q", "--allow-empty", "-m", text)
        return {one.name for one in runner.turn(3)}

    mutants = [Mutant("R", str(number), f"{number}.py", "", "", f"test_{number}.py::test_a[b]") for number in range(9)]
    monkeypatch.setattr(runner, "MUTANTS", mutants)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    git("init", "-q")
    thirds = [{str(number) for number in range(first, 9, 3)} for first in range(3)]
    had: list[set[str]] = []
    while any(third not in had for third in thirds) and len(had) < 60:
        had.append(commit(f"{len(had)}"))
    assert {*map(frozenset, had)} == {*map(frozenset, thirds)}
    now = commit("b", "1.py", "test_5.py")
    assert now in [third | {"1", "5"} for third in thirds]
    (tmp_path / "6.py").write_text("not committed")
    git("add", ".")
    assert {one.name for one in runner.turn(3)} == now | {"6"}


@pytest.mark.parametrize(
    ("statuses", "green"), [((0,), True), ((1, 0), True), ((1, 1), False)], ids=["green", "the second time", "never"]
)
def test_a_test_that_is_red_without_a_patch_runs_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], *, green: bool
) -> None:
    came = iter(statuses)
    ran: list[tuple[str, ...]] = []

    def run(_: Path, command: tuple[str, ...], __: float) -> tuple[int, str]:
        ran.append(command)
        return next(came), "1 failed in 1 s"

    monkeypatch.setattr(runner, "run", run)
    with nullcontext() if green else pytest.raises(SystemExit):
        runner.see_green(tmp_path, ["a.py::test_a"], tmp_path)
    assert ["--last-failed" in command for command in ran] == [False, True][: len(statuses)]
