"""A gateway's side of a pair: whether it is the one that serves, and how old it says it is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from gateway.memory import mend
from gateway.pair.flight import Flight
from gateway.pair.pulse import Pulse
from gateway.registration.events import Phase
from gateway.registration.registrar import Resource
from gateway.tasks import REGISTERS_FIRST

MORE: Final = 100
"""By how much the serving gateway is sooner chosen when memory runs out (of 1000): the other one then takes over."""
_SCORE: Final = Path("/proc/self/oom_score_adj")
_HIGHEST: Final = 1000


class Role:
    """What the parent tells one gateway of a pair.

    Args:
        flight: the page that it shares with the parent; its lane is taken.
        pulse: tells that the other gateway dies; its own has begun.
        pipe: the descriptor by which the parent says that this gateway is to serve; its end is the parent's end.
        born_ns: the age that it has among the node's gateways (``handover.machine.Age``). Each of a pair is older than those
            before it, so that it stands by for them and takes nothing over while they live.
    """

    def __init__(self, flight: Flight, pulse: Pulse, pipe: int, born_ns: int) -> None:
        self.flight, self.pulse = flight, pulse
        self.decode = flight.decoding("the state file", mend.decode, mend.cordons)
        """Reads the state file; of one that ended a gateway of this pair only the cordons."""
        self._pipe, self.born_ns = pipe, born_ns
        self._active = asyncio.Event()

    def attach(self) -> None:
        """Listen to the parent, on the running event loop."""
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    async def rest(self, resources: Sequence[Resource], load: Callable[[], Coroutine[None, None, None]]) -> None:
        """Let gRPC end while another gateway serves: two that are idle cost little more than one.

        As soon as the other gateway of the pair dies, what takes time is done: sockets are bound, and ``load`` reads the state file.
        """
        if resting := [resource.bound for resource in resources if resource.state.phase is Phase.STANDBY]:
            await asyncio.gather(*(one.rest() for one in resting))
            gc.collect()  # gRPC ends with the last of its objects.
            loop = asyncio.get_running_loop()
            self.pulse.at_others_end(
                partial(loop.call_soon_threadsafe, self._make_ready, [load, *(one.wake for one in resting)])
            )

    async def active(self) -> None:
        """Wait until this gateway is the one that serves: what only one of a pair may do begins then."""
        await self._active.wait()

    async def once_active(self, call: Callable[[], Awaitable[None]]) -> None:
        """Do what only the one that serves has a use for: who stands by wakes as seldom as it can."""
        await self.active()
        await asyncio.sleep(REGISTERS_FIRST)
        await call()

    def _make_ready(self, works: Iterable[Callable[[], Coroutine[None, None, None]]]) -> None:
        """Begin what takes time. What fails is tried again, and told, when this gateway takes over."""
        self._works = asyncio.gather(*(work() for work in works), return_exceptions=True)

    def _read(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe)
        if os.read(self._pipe, 1):
            self._active.set()
            _come_first()


def _come_first() -> None:
    """Let the kernel choose this process before the other of the pair. Where it may not be said, nothing is lost."""
    with contextlib.suppress(OSError, ValueError):
        _SCORE.write_text(str(min(int(_SCORE.read_text()) + MORE, _HIGHEST)))
