"""How much of a processor's time the lists of plugins may take. Pure."""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.1
"""Of one processor, for the lists of all plugins together."""
AHEAD: Final = 10.0
"""Seconds of rest that a plugin may owe: its first list of 10 000 devices, and three more after it, are read at once."""
FOLLOWS: Final = 5.0
EACH: Final = 0.004
"""Until a kubelet has it, a list takes so many times as long as to be read here (10 000 new devices: 55 of 270 ms), and seconds besides."""


class ListPace:
    """Lets a plugin that was read rest for so long that no more than ``SHARE`` is spent; who has sent little waits for nobody.

    Times are in monotonic seconds.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        """When a plugin has rested for all that was read of it."""

    def rests(self, resource: str, now: float) -> float:
        """Return the seconds until its next list may be read; not above 0 where that is now."""
        return self._until.get(resource, now) - AHEAD - now

    def spent(self, resource: str, seconds: float, now: float) -> None:
        """Take note of a processor's time for one of its lists: those who rest share what there is."""
        resting = {one: until for one, until in self._until.items() if until > now}
        rest = (FOLLOWS * seconds + EACH) / SHARE * len({*resting, resource})
        self._until = {**resting, resource: resting.get(resource, now) + rest}
