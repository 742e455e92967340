"""Mistakes that the contract (tests/contract) notices from outside: memory."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES: dict[str, str] = {}
MUTANTS: tuple[Mutant, ...] = ()
