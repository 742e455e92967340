"""Devices that pods which ask by name were allocated by DRA, and haven't got for a while: the scheduler counts such pods, too. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from devices.life.states import State

UNPREPARED: Final = 2.0
"""Seconds from which on a pod whose claim isn't prepared waits for the kubelet to ask again, which it does after 60 to 90 s. One whose pod
has ended is gone by then."""


class Lent:
    """Which these are, by ID."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self.ids: frozenset[str] = frozenset()

    def meet(self, waiting: Collection[str], counted: Mapping[str, State], now: float) -> bool:
        """Take note of the devices that such pods wait for now (monotonic seconds); say whether that makes a difference.

        ``counted`` are those that the list counts ahead of time: what comes back was prepared, and is over.
        """
        self._since = {one: self._since.get(one, now) for one in waiting}
        late = (one for one, since in self._since.items() if now - since >= UNPREPARED)
        before, self.ids = self.ids, frozenset(one for one in late if counted.get(one) is not State.RETURNING)
        return self.ids != before
