"""A gateway's side of a pair: whether it is the one that serves, and how old it says it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from gateway.memory import mend
from gateway.pair.flight import Flight

MORE: Final = 100
"""By how much the serving gateway is sooner chosen when memory runs out (of 1000): the other one then takes over."""
_SCORE: Final = Path("/proc/self/oom_score_adj")
_HIGHEST: Final = 1000


class Role:
    """What the parent tells one gateway of a pair.

    Args:
        flight: the page that it shares with the parent; its lane is taken.
        pipe: the descriptor by which the parent says that this gateway is to serve; its end is the parent's end.
        born_ns: the age that it has among the node's gateways (``handover.machine.Age``). Each of a pair is older than those
            before it, so that it stands by for them and takes nothing over while they live.
    """

    def __init__(self, flight: Flight, pipe: int, born_ns: int) -> None:
        self.flight = flight
        self.decode = flight.decoding("the state file", mend.decode, mend.cordons)
        """Reads the state file; of one that ended a gateway of this pair only the cordons."""
        self._pipe, self.born_ns = pipe, born_ns
        self._active = asyncio.Event()

    def attach(self) -> None:
        """Listen to the parent, on the running event loop."""
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    async def active(self) -> None:
        """Wait until this gateway is the one that serves: what only one of a pair may do begins then."""
        await self._active.wait()

    async def once_active(self, call: Callable[[], Awaitable[None]]) -> None:
        """Do what only the one that serves has a use for: who stands by wakes as seldom as it can."""
        await self.active()
        await call()

    def _read(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe)
        if os.read(self._pipe, 1):
            self._active.set()
            _come_first()


def _come_first() -> None:
    """Let the kernel choose this process before the other of the pair. Where it may not be said, nothing is lost."""
    with contextlib.suppress(OSError, ValueError):
        _SCORE.write_text(str(min(int(_SCORE.read_text()) + MORE, _HIGHEST)))
