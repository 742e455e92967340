"""Signs of life: a gateway that stands still keeps its sockets, so that whoever calls it waits until it is killed.

Each gateway counts on in a page that it shares with the parent, whenever its event loop comes to it. The parent kills one whose count
stays the same at several looks in a row. It counts its own looks, and not seconds: while the machine or the container stood still, it didn't
look, either. A look that comes late says nothing, because whatever delayed the parent delayed its gateways.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from typing import Final

from msgspec import Struct

from gateway.pair.flight import LANES

EVERY: Final = 10.0
"""Seconds between two signs of life, and between two looks for them: each wakes a process that may have nothing else to do."""
MISSED: Final = 2
"""Looks in a row without a sign that end a gateway: it stood still for 10 to 30 s then. Nothing that is healthy keeps an event loop so long."""


class Signs:
    """A count for each gateway. Make it before the fork."""

    def __init__(self) -> None:
        self._counts = (ctypes.c_uint64 * LANES).from_buffer(mmap.mmap(-1, mmap.PAGESIZE))

    def give(self, lane: int) -> None:
        """Give signs of life from now on, as long as the running event loop does what is due."""
        self._counts[lane] += 1
        asyncio.get_running_loop().call_later(EVERY, self.give, lane)

    def count(self, lane: int) -> int:
        """Say how many signs there were from a lane."""
        return self._counts[lane]


class Silence(Struct, frozen=True):
    """A gateway's last count, and at how many looks in a row it was the same."""

    count: int
    looks: int = 0

    def look(self, count: int) -> Silence:
        """Look once more."""
        return Silence(count, self.looks + 1 if count == self.count else 0)

    @property
    def lasts(self) -> bool:
        """Whether the gateway is to be killed: said once."""
        return self.looks == MISSED
