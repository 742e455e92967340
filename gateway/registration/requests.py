"""Read the requests of calls: a limited number at once, each within a time limit.

For gRPC, each call has a stream of requests, and we read only the first. So gRPC limits neither time nor number for us.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from adapters.dialect import MalformedError

if TYPE_CHECKING:
    from gateway.wires.rpc import Call

REQUEST_S = 5.0
"""Seconds from the start of a call within which its request must arrive."""
MAX_READS = 8
"""Most requests that are read at once. gRPC buffers only 64 KiB of each other request. A request takes twice its size of memory
while it is read."""
QUEUED_REQUEST_S = 0.25
"""Seconds within which a request must arrive while other calls wait."""
_LOOP_TURNS = 4
"""Turns of the event loop before a late read is ended: gRPC may have the request already, if the loop was late."""


class Requests:
    """Reads requests: ``MAX_READS`` at once, each within ``REQUEST_S``, or within ``QUEUED_REQUEST_S`` while other calls wait."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_READS)
        self._line = 0
        """How many calls wait for a turn."""

    async def read(self, call: Call) -> bytes:
        """Read the one request of a call.

        Raises:
            MalformedError: no request came, or it came too late.
        """
        self._line += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._turns.acquire()
        except TimeoutError:
            raise _late() from None
        finally:
            self._line -= 1
        reading = call.read()
        try:
            for _ in range(int(REQUEST_S / QUEUED_REQUEST_S) or 1):
                if (await asyncio.wait({reading}, timeout=QUEUED_REQUEST_S))[0] or self._line:
                    break
            for _ in range(0 if reading.done() else _LOOP_TURNS):
                await asyncio.sleep(0)
            if not reading.done():
                raise _late()
        finally:
            reading.cancel()  # Otherwise asyncio would complain about an error that comes later.
            self._turns.release()
        if not isinstance(request := reading.result(), bytes):
            raise MalformedError("the call ended without a request. Send one")
        return request


def _late() -> MalformedError:
    return MalformedError(
        f"no request came within {REQUEST_S:g} s, or {QUEUED_REQUEST_S:g} s while others wait. Call again"
    )
