"""Simulated time, chance from one seed, and what must have been met."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from heapq import heappop as _pop
from heapq import heappush as _push
from typing import Any, Final, Protocol

QUICK: Final = 0.0002
"""Seconds that a message takes at least."""

Timer = list[Any]
"""A call that is due: its time, its number, the function, its arguments and who makes it. ``stop`` takes the function out."""


class Doer(Protocol):
    """Who makes calls only while it lives, and later where it is stopped."""

    alive: bool
    frozen: bool
    backlog: list[tuple[Callable[..., None], tuple[Any, ...]]]
    """What became due while it was stopped."""


class Clock:
    """The calls that are due, and the chance by which they are early or late. All times are in simulated seconds."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.met: defaultdict[str, int] = defaultdict(int)
        """What was met in this schedule, by the names of ``sometimes.STATES``."""
        self.trace: list[str] | None = None
        """What happened, line by line, where somebody wants to read it."""
        self.random = random.Random(seed).random
        self.due: list[Timer] = []
        self.count = 0

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> Timer:
        """Have ``call`` called ``seconds`` from now; of calls at one moment, in the order in which they were asked for."""
        self.count += 1
        timer = [self.now + seconds, self.count, call, args, None]
        _push(self.due, timer)
        return timer

    def by(self, doer: Doer, seconds: float, call: Callable[..., None], args: tuple[Any, ...]) -> Timer:
        """Have ``doer`` make a call ``seconds`` from now: not after its death, and not while it is stopped."""
        self.count += 1
        timer = [self.now + seconds, self.count, call, args, doer]
        _push(self.due, timer)
        return timer

    def run(self, until: float) -> None:
        """Make all calls that are due, up to a moment."""
        due = self.due
        while due and due[0][0] <= until:
            self.now, _, call, args, doer = _pop(due)
            if call is None:
                continue
            if doer is None:
                call(*args)
            elif doer.frozen:
                doer.backlog.append((call, args))
            elif doer.alive:
                call(*args)
        self.now = until

    def latency(self) -> float:
        """Return how long a message or a task takes: mostly half a millisecond, now and then a hundred."""
        chance = self.random()
        if chance < 0.97:
            return QUICK + chance * 0.0006
        return QUICK + (chance - 0.97) * 4.0

    def tell(self, *words: object) -> None:
        """Note what happened, where somebody wants to read it."""
        if self.trace is not None:
            told = (word.value if isinstance(word, Enum) else word for word in words)
            self.trace.append(f"{self.now:10.4f}  {' '.join(map(str, told))}")


def stop(timer: Timer | None) -> None:
    """Forget a call that is due; one that was made, or none, is no trouble."""
    if timer is not None:
        timer[2] = None
