"""Succession: several gateways on one node, and the one rule that decides who serves. Pure.

Of two living gateways the *older* one yields: while a younger one serves a resource, the older stands by, and registers
again only when that one is gone. (Two plugins that both answer a cut stream by registering would take turns for ever:
kubelets 1.8 to 1.11 end the first stream at the second Register.) Every pod has PID 1 and a clock can jump, so age is
the boot clock, then a random token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, order=True)
class Age:
    """When a gateway started (nanoseconds of the boot clock); the token breaks a tie. Younger is greater."""

    born_ns: int
    token: str


def elder_should_wait(own: Age, peers: Iterable[Age]) -> Age | None:
    """Return the youngest of the living ``peers`` that is younger than we are: the one to stand by for."""
    younger = [peer for peer in peers if peer > own]
    return max(younger, default=None)
