"""A gateway's side of a pair: whether it is the one that serves, and how old it says it is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Final

from gateway.handover.machine import register_first
from gateway.memory import mend
from gateway.pair import held
from gateway.pair.flight import Flight
from gateway.pair.pulse import Pulse
from gateway.registration.events import Phase
from gateway.registration.registrar import Resource
from gateway.tasks import REGISTERS_FIRST
from gateway.wires import notify

MORE: Final = 100
"""By how much the serving gateway is sooner chosen when memory runs out (of 1000): the other one then takes over."""
RESIGNS: Final = "X_RESIGNS="
"""With it a gateway tells its parent that the pair is to make room for a newer gateway; how often in vain, follows."""
LENT_AFTER: Final = 0.02
"""Seconds after a change of a registration until the parent gets the kubelet's connection."""
_SCORE: Final = Path("/proc/self/oom_score_adj")
_HIGHEST: Final = 1000


class Role:
    """What the parent tells one gateway of a pair.

    Args:
        flight: the page that it shares with the parent; its lane is taken.
        pulse: tells that the other gateway dies; its own has begun.
        pipe: the descriptor by which the parent says that this gateway is to serve; its end is the parent's end.
        born_ns: the age that it has among the node's gateways (``gateway.age.Age``). Each of a pair is older than those
            before it, so that it stands by for them and takes nothing over while they live.
        first: whether no other one of the pair lives.
        in_vain: how often in a row the pair made room for a gateway that ended again.
        lives: has signs of life given from now on, by the running event loop.
    """

    def __init__(
        self,
        flight: Flight,
        pulse: Pulse,
        pipe: int,
        born_ns: int,
        *,
        first: bool = False,
        in_vain: int = 0,
        lives: Callable[[], None] = lambda: None,
    ) -> None:
        self.flight, self.pulse, self.first, self.in_vain, self._lives = flight, pulse, first, in_vain, lives
        self.decode = flight.decoding("the state file", mend.decode, mend.cordons)
        """Reads the state file; of one that ended a gateway of this pair only the cordons."""
        self._pipe, self.born_ns = pipe, born_ns
        self._active, self._turn = asyncio.Event(), asyncio.Event()
        self._lending: set[str] = set()
        """The resources whose connection the parent is about to get."""

    def attach(self) -> None:
        """Listen to the parent, on the running event loop, and let it see that this one lives."""
        self._lives()
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def stood(self, token: str, resource: Resource) -> None:
        """Leave word of a kubelet that takes a Register while an earlier stream lives, as soon as one calls: whose, and which one.

        The parent gets its connection, a little later: the kubelet has its list first.
        """
        level = resource.plugin.level
        if resource.state.phase is Phase.SERVING and register_first(level, late=False):
            self.pulse.say(f"{token} {resource.state.told}".encode())
            if resource.name not in self._lending:
                self._lending.add(resource.name)
                asyncio.get_running_loop().call_later(LENT_AFTER, self._lend, resource)

    def _lend(self, resource: Resource) -> None:
        self._lending.remove(resource.name)
        held.lend(resource.name, resource.endpoint, resource.bound.address)

    async def rest(
        self,
        resources: Sequence[Resource],
        load: Callable[[], Coroutine[None, None, None]],
        over: Callable[[str, str], object],
    ) -> None:
        """Let gRPC end while another gateway serves: two that are idle cost little more than one.

        As soon as the other gateway of the pair dies, what takes time is done: sockets are bound, and ``load`` reads the state file.
        ``over`` is told whose life is over then, and which kubelet takes a Register before it knows of that, if one does.
        """
        if resting := [resource.bound for resource in resources if resource.state.phase is Phase.STANDBY]:
            await asyncio.gather(*(one.rest() for one in resting))
            gc.collect()  # gRPC ends with the last of its objects.
            loop = asyncio.get_running_loop()
            works = load, *(one.wake for one in resting)
            self.pulse.at_others_end(
                lambda word: loop.call_soon_threadsafe(self._make_ready, works, over, word.decode(errors="replace"))
            )

    async def turn(self) -> None:
        """Wait for the death of the other gateway of the pair: for word of it, which comes before its files are closed."""
        loop = asyncio.get_running_loop()
        self.pulse.at_others_end(lambda _: loop.call_soon_threadsafe(self._turn.set))
        await self._turn.wait()

    def over(self) -> None:
        """Let the other gateway decide: this one doesn't any more, and waits for what that one answers."""
        self.pulse.end()

    def resign(self, in_vain: int) -> None:
        """Have the whole pair make room for a newer gateway, and begin anew: who stands by would take over else."""
        notify.tell(f"{RESIGNS}{in_vain}")

    @property
    def serves(self) -> bool:
        """Whether the parent has said so: the other one has closed all its files."""
        return self._active.is_set()

    async def active(self) -> None:
        """Wait until this gateway is the one that serves: what only one of a pair may do begins then."""
        await self._active.wait()

    async def once_active(self, call: Callable[[], Awaitable[None]]) -> None:
        """Do what only the one that serves has a use for: who stands by wakes as seldom as it can."""
        await self.active()
        await asyncio.sleep(REGISTERS_FIRST)
        await call()

    def _make_ready(
        self,
        works: Iterable[Callable[[], Coroutine[None, None, None]]],
        over: Callable[[str, str], object],
        word: str,
    ) -> None:
        """Begin what takes time. What fails is tried again, and told, when this gateway takes over."""
        self._works = asyncio.gather(*(work() for work in works), return_exceptions=True)
        token, _, kubelet = word.partition(" ")
        # After those have begun: most of it is gRPC's own threads'.
        asyncio.get_running_loop().call_soon(over, token, kubelet)

    def _read(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe)
        if os.read(self._pipe, 1):
            self._active.set()
            self._turn.set()
            _come_first()


def _come_first() -> None:
    """Let the kernel choose this process before the other of the pair. Where it may not be said, nothing is lost."""
    with contextlib.suppress(OSError, ValueError):
        _SCORE.write_text(str(min(int(_SCORE.read_text()) + MORE, _HIGHEST)))
