"""Leases: connections to other gateways that are held so that their end is known at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gateway.tasks import Tasks

LEASE_AGAIN = (0.001, 0.005, 0.02, 0.1, 0.3, 0.6)
"""Seconds between looks at a newer gateway that ended our connection and still listens, until it is connected to again: one
that was killed is mostly gone at the first, one that lives was only tired of a connection without a call."""


class Leases:
    """The leases of one gateway; ``gone`` is called when a gateway that was held on to is gone."""

    def __init__(self, gone: Callable[[], None], tasks: Tasks) -> None:
        self._gone, self._tasks = gone, tasks
        self._held: dict[Path, asyncio.Task[Any]] = {}

    def hold(self, path: Path) -> None:
        """Learn at once when the gateway behind ``path`` is gone: the kernel ends our connection to it."""
        if path in self._held:
            return

        async def until_gone() -> None:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    while await reader.read(4096):
                        pass
                finally:
                    writer.close()
            for seconds in LEASE_AGAIN:
                if not listens(path):
                    break
                await asyncio.sleep(seconds)

        def gone(_: asyncio.Task[None]) -> None:
            del self._held[path]
            self._gone()

        task = self._held[path] = self._tasks.start(until_gone())
        task.add_done_callback(gone)
