"""One HTTP/1.1 connection to the API server. It runs in the event loop, so a server that hangs blocks no thread.

h11 parses the responses. The caller limits their size.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

import h11

if TYPE_CHECKING:
    import ssl

    from gateway.kubernetes.access import Access

_READ_BYTES: Final = 16 * 1024
"""Most bytes that are read at once. Larger pieces would block the event loop for more than a few milliseconds."""
_PIECES_PER_TURN: Final = 64
"""Pieces of data that are handled in one turn of the event loop."""
_MAX_INFORMATIONAL: Final = 8
"""Maximum of informational responses (1xx) before the final response."""
_MAX_ADDRESSES: Final = 4
"""Maximum of addresses to try for one host name."""
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),
)
"""The kernel notices within 30 s that a server is gone, also on a watch without changes."""


class NoAnswerError(Exception):
    """The answer was incomplete or malformed."""


class TooLongError(NoAnswerError):
    """The answer was too long."""


class ServerAwayError(NoAnswerError):
    """The server can't be reached."""


class Connection:
    """A connection for one request after another. The caller closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self._pieces = 0

    @classmethod
    async def open(cls, access: Access, tls: ssl.SSLContext) -> Self:
        """Connect.

        Raises:
            ServerAwayError: the server can't be reached, or its certificate is not valid for its name.
        """
        problem: OSError | None = None
        for address in await _addresses(access.host):
            try:
                reader, writer = await asyncio.open_connection(
                    address, access.port, ssl=tls, server_hostname=access.server_name or access.host, limit=_READ_BYTES
                )
                break
            except OSError as error:  # TLS errors also are OSErrors.
                problem = error
        else:
            raise ServerAwayError(f"no connection to {access.host}:{access.port}: {problem}") from problem
        peer: socket.socket = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
        return cls(reader, writer)

    async def ask(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> h11.Response:
        """Send a request, and wait for the head of its answer.

        Raises:
            NoAnswerError: the connection ended, or the answer is not HTTP.
        """
        try:
            self._send(h11.Request(method=method, target=target, headers=headers))
            if body:
                self._send(h11.Data(data=body))
            self._send(h11.EndOfMessage())
            await self._writer.drain()
            for _ in range(_MAX_INFORMATIONAL):
                event = await self._next()
                if isinstance(event, h11.Response):
                    return event
                if not isinstance(event, h11.InformationalResponse):
                    raise NoAnswerError("the connection ended before an answer came")
        except (OSError, h11.ProtocolError) as error:
            raise NoAnswerError(f"no answer: {error!r}") from error
        raise NoAnswerError(f"only {_MAX_INFORMATIONAL} informational responses came (HTTP 1xx), no final one")

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's body as it comes.

        Raises:
            NoAnswerError: the body is incomplete.
        """
        try:
            while isinstance(event := await self._next(), h11.Data):
                yield bytes(event.data)
        except (OSError, h11.ProtocolError) as error:
            raise NoAnswerError(f"the answer broke off: {error!r}") from error

    def reuse(self) -> bool:
        """Prepare the connection for the next request; return False if it can't be reused."""
        if (self._http.our_state, self._http.their_state) != (h11.DONE, h11.DONE) or self._reader.at_eof():
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()

    def _send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            self._writer.write(data)

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        self._pieces += 1
        if self._pieces % _PIECES_PER_TURN == 0:
            await asyncio.sleep(0)
        return event


_resolver: Final = ThreadPoolExecutor(1, thread_name_prefix="resolve")
"""A separate thread, because a resolver that hangs must not block the threads that write the state file."""


async def _addresses(host: str) -> Sequence[str]:
    """Return a host's addresses. In a pod the host is an IP address; a kubeconfig may have a host name."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().run_in_executor(
            _resolver, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        )
    except OSError as error:
        raise ServerAwayError(f"the name {host} has no address: {error}") from error
    return [str(one[4][0]) for one in found[:_MAX_ADDRESSES]]
