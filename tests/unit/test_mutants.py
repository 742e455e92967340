"""Each mutant's patch fits the code, and each rule has a mutant; whether tests notice them is what `make mutants` runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.mutants.__main__ import MUTANTS, misplaced

ROOT = Path(__file__).parents[2]


def test_each_patch_fits_once() -> None:
    text = cache(lambda file: (ROOT / file).read_text())
    unfit = [f"{one.rule}: {one.name}" for one in MUTANTS if text(one.file).count(one.old) != 1]
    assert unfit == []


def test_each_rule_has_a_mutant_and_each_mutant_a_rule() -> None:
    assert misplaced() == []
