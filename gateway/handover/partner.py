"""Another gateway that handovers are talked about with, and those with which that failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Final

from gateway.handover import message
from gateway.handover.instance import boot_ns
from gateway.wires.control import ControlError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.age import Age
    from gateway.handover.events import Say
    from gateway.handover.machine import State
    from gateway.wires.control import ControlConnection

AGAIN: Final = 5.0
"""Seconds before a gateway with which a conversation failed is spoken to again, doubled for each failure in a row."""
AGAIN_MOST: Final = 320.0
MAX_RESOURCES: Final = 256
"""In all, with one partner; kubelets take resource names of at most 317 characters."""
_MAX_OUTBOX: Final = 256
_MAX_REMEMBERED: Final = 64


class Partner:
    """One other gateway, the conversation with it, and where each resource stands between us."""

    def __init__(self, age: Age, connection: ControlConnection) -> None:
        self.age, self.connection = age, connection
        self.states: dict[str, State] = {}
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.outbox: deque[tuple[Say, list[str], int]] = deque()
        self.ready = asyncio.Event()
        self.quiet = asyncio.Event()
        """Set while nothing is left to say."""
        self.gone = False

    def take_in(self, resources: Iterable[str]) -> None:
        """Make sure that there is room for these.

        Raises:
            NonsenseError: more than ``MAX_RESOURCES`` would be talked about.
        """
        if len(self.states.keys() | set(resources)) > MAX_RESOURCES:
            raise message.NonsenseError(f"expected at most {MAX_RESOURCES} resources from the other gateway, got more")

    def say(self, say: Say, resource: str) -> None:
        """Put it into the outbox; what is said of several resources at once goes as one message."""
        if self.outbox and self.outbox[-1][0] is say and len(self.outbox[-1][1]) < message.IN_ONE_MESSAGE:
            self.outbox[-1][1].append(resource)
        elif len(self.outbox) < _MAX_OUTBOX:
            self.outbox.append((say, [resource], boot_ns()))
        else:
            self.connection.abort()  # It doesn't read. What reads from it ends, and with it the lease.
        self.quiet.clear()
        self.ready.set()

    async def write(self, age: Age) -> None:
        """Send what there is to say, as the gateway of this age, until the partner is gone."""
        with contextlib.suppress(ControlError):  # Then it is closed, and reading ends.
            while True:
                while self.outbox:
                    say, resources, said_ns = self.outbox.popleft()
                    await self.connection.send(message.written(age, say, resources, said_ns))
                self.quiet.set()
                await self.ready.wait()
                self.ready.clear()
        self.connection.abort()


class Rests:
    """How long gateways with which a conversation failed are left in peace: ever longer. Times are in monotonic seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By token: for how long, the next time."""
        self.until: dict[str, float] = {}

    def begin(self, peer: Age, now: float) -> float:
        """Leave one in peace; return for how many seconds."""
        seconds = self.seconds.get(peer.token, AGAIN)
        remember(self.seconds, peer, min(2 * seconds, AGAIN_MOST))
        remember(self.until, peer, now + seconds)
        return seconds

    def over(self, peer: Age, now: float) -> bool:
        """Whether it may be spoken to."""
        return self.until.get(peer.token, now) <= now

    def forget(self, peer: Age) -> None:
        """It talks: the next failure is its first."""
        self.seconds.pop(peer.token, None)


def remember(times: dict[str, float], peer: Age, when: float) -> None:
    """Note a time of a gateway; of very many, those before are forgotten."""
    if len(times) >= _MAX_REMEMBERED:
        times.clear()
    times[peer.token] = when
