"""The DRA drivers of a gateway, which are made again each time it stops leading.

So what they knew as the leader's never mixes with what another gateway decided later.
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
    """Holds the current drivers.

    Args:
        make: makes new drivers that don't act as the leader's yet; raises AccessError.
        tasks: the gateway's tasks.
    """

    def __init__(self, make: Callable[[], Drivers], tasks: Tasks) -> None:
        self._make, self._tasks = make, tasks
        self.now = make()
        """The current drivers."""
        self._runs: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Future[None]] = set()
        """The ends of calls that were passed on."""

    def begin(self) -> None:
        """Serve the kubelet's calls. They are passed on while another gateway leads."""
        self._runs = self._tasks.spawned("dra", self.now.run())

    async def let_in(self, resource: str) -> None:
        """Wait until the kubelet would admit a pod that gets a device of the resource."""
        await self.now.let_in(resource)

    async def leave(self) -> None:
        """Let no new pod get a GPU by name, before another gateway leads. It may take seconds, in which calls are still answered."""
        if self.now.decides.is_set():
            await self.now.leave()

    async def rest(self) -> None:
        """Stop acting as the leader's. Return when all decisions were handed to the scribe. Waiting calls go to the next leader."""
        if self._runs is not None:
            await self.close()
            self.now = self._make()
            self.begin()

    async def close(self) -> None:
        """Stop for good."""
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
        """Wait for the answers to calls that were passed on."""
        await asyncio.gather(*self._answers)
