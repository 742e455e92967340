"""One HTTP/1.1 connection to the API server, in the event loop: no thread that a server which hangs could hold.

h11 reads what comes, so that lengths, chunks and halves of headers are judged by it; everything is bounded by who asks.
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

_READ: Final = 16 * 1024
"""Bytes that are read at once: what comes in small pieces costs the event loop a few milliseconds at a time, and no more."""
_PIECES: Final = 64
"""How many pieces of what was read are taken in one turn of the event loop."""
_HINTS: Final = 8
"""How many informational answers (1xx) may come before the answer."""
_ADDRESSES: Final = 4
"""How many of a name's addresses are tried."""
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),
)
"""A server that is gone without a word is noticed within 30 s by the kernel, also by a watch on which nothing comes."""


class NoAnswerError(Exception):
    """What came was no whole answer."""


class TooLongError(NoAnswerError):
    """More came than an answer may have."""


class ServerAwayError(NoAnswerError):
    """Nobody was reached who could have been asked."""


class Connection:
    """A connection, for one request after the other. Whoever opened it closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self._pieces = 0

    @classmethod
    async def open(cls, access: Access, tls: ssl.SSLContext) -> Self:
        """Connect.

        Raises:
            AwayError: there is nobody, or not who should be there.
        """
        problem: OSError | None = None
        for address in await _addresses(access.host):
            try:
                reader, writer = await asyncio.open_connection(
                    address, access.port, ssl=tls, server_hostname=access.server_name or access.host, limit=_READ
                )
                break
            except OSError as error:  # of which TLS's are
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
            NoAnswerError: the connection ended, or what came is no HTTP.
        """
        try:
            self._send(h11.Request(method=method, target=target, headers=headers))
            if body:
                self._send(h11.Data(data=body))
            self._send(h11.EndOfMessage())
            await self._writer.drain()
            for _ in range(_HINTS):
                event = await self._next()
                if isinstance(event, h11.Response):
                    return event
                if not isinstance(event, h11.InformationalResponse):
                    raise NoAnswerError("the connection ended before an answer came")
        except (OSError, h11.ProtocolError) as error:
            raise NoAnswerError(f"no answer: {error!r}") from error
        raise NoAnswerError(f"no answer came, only {_HINTS} hints that one will come")

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Give the answer's body as it comes.

        Raises:
            NoAnswerError: it ended too soon.
        """
        try:
            while isinstance(event := await self._next(), h11.Data):
                yield bytes(event.data)
        except (OSError, h11.ProtocolError) as error:
            raise NoAnswerError(f"the answer broke off: {error!r}") from error

    def ready_again(self) -> bool:
        """Make it ready for the next request; False where there can be none."""
        if (self._http.our_state, self._http.their_state) != (h11.DONE, h11.DONE) or self._reader.at_eof():
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        """End it at once."""
        self._writer.transport.abort()

    def _send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            self._writer.write(data)

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ))
        self._pieces += 1
        if self._pieces % _PIECES == 0:
            await asyncio.sleep(0)
        return event


_resolver: Final = ThreadPoolExecutor(1, thread_name_prefix="resolve")
"""One thread of its own: a resolver that hangs must not hold those that write the gateway's memory."""


async def _addresses(host: str) -> Sequence[str]:
    """Find a host's addresses; a pod is told one, a kubeconfig may have a name."""
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
    return [str(one[4][0]) for one in found[:_ADDRESSES]]
