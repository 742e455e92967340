"""Limit the CPU time for the lists of plugins. Pure."""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.1
"""Most of one CPU for the lists of all plugins together."""
AHEAD: Final = 10.0
"""Seconds of rest that a plugin may owe. So its first list of 10,000 devices and three more are read at once."""
FOLLOWS: Final = 5.0
EACH: Final = 0.004
"""A list takes this many times its reading time until the kubelet has it (10,000 new devices: 55 of 270 ms), plus ``EACH``
seconds."""


class ListPace:
    """Tells when a plugin's next list may be read, so that lists take at most ``SHARE`` of a CPU. A plugin that sends little never waits.

    Times are in monotonic seconds.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        """Until when each plugin rests for the lists that were read."""

    def rests(self, resource: str, now: float) -> float:
        """Return the seconds until its next list may be read; 0 or less: now."""
        return self._until.get(resource, now) - AHEAD - now

    def spent(self, resource: str, seconds: float, now: float) -> None:
        """Count CPU time that was spent on one of its lists. Plugins that rest share the limit."""
        resting = {one: until for one, until in self._until.items() if until > now}
        rest = (FOLLOWS * seconds + EACH) / SHARE * len({*resting, resource})
        self._until = {**resting, resource: resting.get(resource, now) + rest}
