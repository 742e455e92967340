"""Read the requests of calls: a limited number at once, each within a time limit.

For gRPC each call has a stream of requests, of which we read one. So we must limit the time and the number ourselves.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from adapters.dialect import MalformedError

if TYPE_CHECKING:
    from gateway.wires.rpc import Call

REQUEST_TIME = 5.0
"""Seconds from the start of a call within which its request must arrive."""
MAX_READ = 8
"""Requests that are read at once. gRPC holds back the others, except 64 KiB of each. Reading takes twice a request's size of
memory."""
IN_LINE = 0.25
"""Seconds within which a request must arrive while other calls wait."""
_TURNS = 4
"""Turns of the event loop before a late read is ended: if gRPC has the request already, the loop was late."""


class Requests:
    """Reads requests: ``MAX_READ`` at once, each within ``REQUEST_TIME``, or within ``IN_LINE`` while other calls wait."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_READ)
        self._reading: dict[asyncio.Future[Any], float] = {}
        """The start of each read (seconds of the event loop)."""
        self._line = 0
        self._timer: asyncio.TimerHandle | None = None
        """One timer for all reads. It may outlive the read that set it."""

    async def read(self, call: Call) -> bytes:
        """Read the one request of a call.

        Raises:
            MalformedError: no request came, or it came too late.
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
        """Set the timer to the deadline of the oldest read."""
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
        """End the reads whose deadline was before ``now``, after ``turns`` turns of the event loop."""
        if turns:
            asyncio.get_running_loop().call_soon(self._end_late, now, turns - 1)
            return
        for reading, since in self._reading.items():
            if not reading.done() and self._due(since) <= now:
                reading.set_result(None)
        self._set_timer()


def _late() -> MalformedError:
    return MalformedError(f"no request came within {REQUEST_TIME:g} s, or {IN_LINE:g} s while others wait. Call again")
