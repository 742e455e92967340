"""A Unix socket that is bound long before it listens, as kubelet.sock is for a moment at every start of a kubelet.

gRPC binds and listens in one go. So it serves elsewhere, and the socket that everyone knows passes on to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path


class LateListener:
    """Binds ``path`` at once; connect() to it is refused until ``listen`` has waited for ``seconds``."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._inner = f"dpg-{secrets.token_hex(8)}"
        self._seconds = seconds
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)  # noqa: FBT003
        self._socket.bind(str(path))
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()

    @property
    def inner(self) -> str:
        """Where the real server has to serve, as a gRPC address: a name that leaves nothing behind in the file system."""
        return f"unix-abstract:{self._inner}"

    async def listen(self) -> None:
        """Wait, then listen."""
        await asyncio.sleep(self._seconds)
        self._server = await asyncio.start_unix_server(self._join, sock=self._socket)

    async def close(self) -> None:
        """Cut all connections and stop listening. The socket's name stays, as everywhere in Unix."""
        for task in self._pipes:
            task.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(f"\0{self._inner}")
        for source, sink in ((reader, inner_writer), (inner_reader, writer)):
            task = asyncio.create_task(_pipe(source, sink))
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
    finally:
        sink.close()
