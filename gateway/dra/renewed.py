"""The DRA drivers of a gateway that leads, stands by, and leads again: made anew each time that it stops leading.

So what one that led knew never meets what another gateway decided since.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.dra.drivers import Drivers
    from gateway.tasks import Tasks


class RenewedDrivers:
    """The drivers that this gateway has now.

    Args:
        make: makes drivers that decide nothing yet; raises AccessError.
        tasks: the gateway's.
    """

    def __init__(self, make: Callable[[], Drivers], tasks: Tasks) -> None:
        self._make, self._tasks = make, tasks
        self.now = make()
        """The drivers; other ones after each time that this gateway led."""
        self._runs: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Future[None]] = set()
        """The ends of calls that were passed on."""

    def begin(self) -> None:
        """Serve the kubelet's calls, and pass them on while another gateway leads."""
        self._runs = self._tasks.spawned("dra", self.now.run())

    async def let_in(self, resource: str) -> None:
        """Wait, before a pod is given a device, until the kubelet would admit it."""
        await self.now.let_in(resource)

    async def leave(self) -> None:
        """Have nobody come by name any more, before another gateway leads. It may take seconds, in which calls are still answered."""
        if self.now.decides.is_set():
            await self.now.leave()

    async def rest(self) -> None:
        """Decide nothing any more: return when all that was decided is with the scribe. What waits is the next leader's."""
        if self._runs is not None:
            await self.close()
            self.now = self._make()
            self.begin()

    async def close(self) -> None:
        """The same, for good."""
        runs, self._runs = self._runs, None
        if runs is not None:
            runs.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await runs
            await self.now.close()
            answers = asyncio.ensure_future(self.now.finish())
            self._answers.add(answers)
            answers.add_done_callback(self._answers.discard)

    async def finish(self) -> None:
        """Wait for the answers to what was passed on."""
        await asyncio.gather(*self._answers)
