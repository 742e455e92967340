"""Reading the requests of calls: so many at once, and each within its time.

To gRPC each call has a stream of requests, of which one is read: so it is ours to bound how long that takes, and how many wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from adapters.dialect import MalformedError

if TYPE_CHECKING:
    from gateway.wires.rpc import Call

REQUEST_TIME = 5.0
"""Seconds from the begin of a call until its request must have arrived."""
MAX_READ = 8
"""Requests that are read at once; gRPC holds the others back, but for 64 KiB. Reading takes twice the size of a request."""
IN_LINE = 0.25
"""Seconds that a request may take to arrive while others wait for their turn."""
_TURNS = 4
"""Turns of the event loop until a request that gRPC has arrives here: then the loop was late, not the request."""


class Requests:
    """Reads the requests of calls: ``MAX_READ`` at once, each within ``REQUEST_TIME``; while others wait, within ``IN_LINE``."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_READ)
        self._reading: dict[asyncio.Future[Any], float] = {}
        """The start of each read (seconds of the event loop)."""
        self._line = 0
        self._timer: asyncio.TimerHandle | None = None
        """One timer for all reads, also after a read has ended: a call needs none of its own."""

    async def read(self, call: Call) -> bytes:
        """Read a call's one request.

        Raises:
            MalformedError: there was none, or it took too long.
        """
        if not self._turns.locked():
            await self._turns.acquire()
        elif not await self._wait():
            raise _late()
        try:
            request = await self._read(call)
        finally:
            self._turns.release()
        if request is None:
            raise _late()
        if not isinstance(request, bytes):
            raise MalformedError("the call ended without a request. Send one")
        return request

    async def _wait(self) -> bool:
        """Wait for a turn; False if none came in time. Reads in progress have only ``IN_LINE`` from now on."""
        self._line += 1
        self._set_timer()
        try:
            async with asyncio.timeout(REQUEST_TIME):
                await self._turns.acquire()
        except TimeoutError:
            return False
        finally:
            self._line -= 1
        return True

    async def _read(self, call: Call) -> object:
        """Read a request; None if none arrived in time."""
        reading = call.read()
        self._reading[reading] = asyncio.get_running_loop().time()
        if self._timer is None:
            self._set_timer()
        try:
            return await reading
        finally:
            del self._reading[reading]

    def _set_timer(self) -> None:
        """Set the timer to when the time of the oldest read is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if since := [since for reading, since in self._reading.items() if not reading.done()]:
            self._timer = asyncio.get_running_loop().call_at(self._due(min(since)), self._on_time)

    def _due(self, since: float) -> float:
        return since + (IN_LINE if self._line else REQUEST_TIME)

    def _on_time(self) -> None:
        self._timer = None
        self._end_late(asyncio.get_running_loop().time(), _TURNS)

    def _end_late(self, now: float, turns: int) -> None:
        """End the reads whose time was over at ``now``, after ``turns`` turns of the event loop."""
        if turns:
            asyncio.get_running_loop().call_soon(self._end_late, now, turns - 1)
            return
        for reading, since in self._reading.items():
            if not reading.done() and self._due(since) <= now:
                reading.set_result(None)
        self._set_timer()


def _late() -> MalformedError:
    return MalformedError(f"no request came within {REQUEST_TIME:g} s, or {IN_LINE:g} s while others wait. Call again")
