"""Where a resource's server listens: bound, or resting while another gateway of a pair serves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.wires.unix import listening

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from socket import socket

    from gateway.registration.serve import DevicePlugin


class Bound:
    """The socket of one resource's device plugin, which is in its gateway's own folder.

    Args:
        plugin: the device plugin.
        path: says where that is now.
    """

    def __init__(self, plugin: DevicePlugin, path: Callable[[], Path]) -> None:
        self._plugin, self._path = plugin, path
        self._lock = asyncio.Lock()
        self._rests = False
        self._place: socket | None = None
        """What listens while it rests."""
        self.address = ""
        """Where the server was bound, as the kernel says of each connection that comes there."""

    async def bind(self) -> None:
        """Bind it, with a server of its own.

        Raises:
            OSError: the folder went, or no descriptor is left.
            RuntimeError: the path can't be bound.
        """
        async with self._lock:
            await self._bind()

    async def rest(self) -> None:
        """Until ``wake`` only listen: gRPC's threads, which end with the last server, wake a dozen times a second, called or not.

        To other gateways a socket that listens is what shows that the resource is offered.
        """
        async with self._lock:
            self._rests = True
            await self._plugin.close()
            self._place = listening(self._path())

    async def wake(self) -> None:
        """Bind it, if it rests; raises what ``bind`` does."""
        async with self._lock:
            if self._rests:
                await self._bind()

    async def _bind(self) -> None:
        path = self._path()
        made = path.with_suffix(
            ".made"
        )  # When a server ends, gRPC removes the name that it bound, whoever has it then.
        await self._plugin.bind(made)
        self.address = str(made)
        made.rename(path)
        self._rests = False
        self.close()

    def close(self) -> None:
        """Listen no more where it rests."""
        if self._place is not None:
            self._place.close()
