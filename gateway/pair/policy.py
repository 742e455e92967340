"""When a gateway that died is followed by another one, and when the pair ends: pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

YOUNG: Final = 60.0
"""Seconds that a gateway must have lived so that its death is no part of a crash loop."""
FIRST_WAIT: Final = 1.0
"""Seconds before another one is started after one that died young, doubled for each in a row."""
MOST_YOUNG: Final = 5
"""Deaths in a row, each young, that end the pair: Kubernetes is to see a crash loop, and waits longer each time."""
LASTING: Final = frozenset({2, 75, 78})
"""Exit statuses that another gateway would end with, too: a wrong flag or setting, a mount that can't follow."""


class Deaths(Struct, frozen=True):
    """The deaths in a row that were young."""

    young: int = 0

    def after(self, lived: float) -> Deaths:
        """Count one more, after so many seconds of life."""
        return replace(self, young=self.young + 1 if lived < YOUNG else 0)

    @property
    def wait(self) -> float:
        """In how many seconds the next one is started."""
        return FIRST_WAIT * 2.0 ** (self.young - 1) if self.young else 0.0

    @property
    def loop(self) -> bool:
        """Whether to give up."""
        return self.young >= MOST_YOUNG


def lasting(status: int) -> bool:
    """Tell whether a gateway that ended with this status (negative: by a signal) would be followed by the same end."""
    return status in LASTING
