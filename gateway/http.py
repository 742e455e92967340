"""A small HTTP listener, for those who ask a gateway over the network: GET and HEAD, a few fixed paths, nothing else.

Whoever asks is a stranger: a request is at most ``REQUEST_LIMIT`` bytes, everything has ``SECONDS``, ``MAX_CONNECTIONS`` are
open at most, and each carries one request. When one more comes, the oldest ends: whoever holds them all keeps no probe away.
Nothing that comes in is kept, obeyed or said back.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

import structlog

REQUEST_LIMIT: Final = 8 * 1024
"""The most bytes of a request's first line and headers, together."""
SECONDS: Final = 5.0
"""How long a request may take to come, its answer to be made, and the answer to be taken: for each of the three."""
MAX_CONNECTIONS: Final = 32
_LINGER: Final = 16
"""How many times ``REQUEST_LIMIT`` bytes are read and dropped, of a request that was too large."""
TEXT: Final = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""
Handler = Callable[[], Awaitable[Answer]]

_REQUEST = re.compile(rb"(?P<method>[!#$%&'*+.^_`|~0-9A-Za-z-]+) (?P<target>[!-~]+) HTTP/1\.(?P<minor>[01])")
"""RFC 9112, section 3. A target is a path (origin form), or a whole URL (absolute form)."""
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*")
_ORIGIN = re.compile(r"(?i:https?://[^/?]*)?(?P<path>/[^?]*)?(?:\?.*)?")
_ADDRESS = re.compile(r"(?:(?:(?P<host>[^\s:\[\]]*)|\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]):)?(?P<port>[0-9]{1,5})")
_LOOPBACK: Final = "127.0.0.1"

_log = structlog.get_logger()


def address(text: str) -> tuple[str, int]:
    """Read where to listen: ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` (every address), or ``PORT`` alone (this machine only).

    Port 0 is any free one; the host of ``:PORT`` is empty.

    Raises:
        ValueError: it is none of these.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(
            f"expected HOST:PORT or PORT, such as 10.1.2.3:9400, :9400 (every address) or 9400 (this machine only); got {text[:80]!r}"
        )
    host = match["host"] if match["host"] is not None else match["v6"]
    return _LOOPBACK if host is None else host, int(match["port"])


class Server:
    """The listener.

    Args:
        host: the address to listen on, or a name of it; empty: every one that this machine has.
        port: the port; 0 is any free one.
        routes: who answers for which path. A handler that raises is answered for with 500, one that hangs with 503.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Handler]) -> None:
        self._host, self._port, self._routes = host, port, routes
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], None] = {}

    async def start(self) -> tuple[str, int]:
        """Listen; return the address that was taken.

        Raises:
            OSError: it can't be had (it is taken, or is none of this machine).
        """
        self._server = await asyncio.start_server(self._connected, self._host, self._port, limit=REQUEST_LIMIT)
        host, port, *_ = self._server.sockets[0].getsockname()
        return host, port

    async def close(self) -> None:
        """End every connection and stop listening. Never raises."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection. The task is ours: one of asyncio's own can't be cancelled without a complaint (Python 3.11)."""
        if self._server is None:
            writer.transport.abort()
            return
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._open[task] = None
        task.add_done_callback(lambda task: self._open.pop(task, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request. Whatever happens, the connection ends, and within a bounded time."""
        try:
            with contextlib.suppress(OSError, EOFError):  # TimeoutError is an OSError; then nobody waits for an answer.
                async with asyncio.timeout(SECONDS):
                    request = await _read(reader)
                answer = await self._answer(request)
                async with asyncio.timeout(SECONDS):
                    await _send(reader, writer, answer)
        finally:
            writer.transport.abort()

    async def _answer(self, request: bytes | None) -> bytes:
        """Make the whole answer to a request's head; None: it was too large."""
        if request is None:
            return _spell(*_plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        found = parse(request)
        if found is None:
            return _spell(*_plain(HTTPStatus.BAD_REQUEST))
        method, path = found
        head = method == "HEAD"
        if not head and method != "GET":
            return _spell(*_plain(HTTPStatus.METHOD_NOT_ALLOWED))
        handler = self._routes.get(path)
        if handler is None:
            return _spell(*_plain(HTTPStatus.NOT_FOUND), head=head)
        try:
            async with asyncio.timeout(SECONDS):
                return _spell(*await handler(), head=head)
        except TimeoutError:
            return _spell(*_plain(HTTPStatus.SERVICE_UNAVAILABLE), head=head)
        except Exception:  # noqa: BLE001 - one request's defect is no other's
            _log.exception("a request failed", path=path)
            return _spell(*_plain(HTTPStatus.INTERNAL_SERVER_ERROR), head=head)


def parse(request: bytes) -> tuple[str, str] | None:
    """Read a request's head, without the empty line: its method and path (undecoded). None: it is no HTTP/1 request."""
    first, *headers = request.split(b"\r\n")
    match = _REQUEST.fullmatch(first)
    if match is None or not all(map(_HEADER.fullmatch, headers)):
        return None
    hosts = sum(line[:5].lower() == b"host:" for line in headers)
    if hosts > 1 or (hosts == 0 and match["minor"] == b"1"):  # RFC 9112, section 3.2
        return None
    target = _ORIGIN.fullmatch(match["target"].decode("ascii"))
    if target is None:
        return None
    return match["method"].decode("ascii"), target["path"] or "/"


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """Read up to the empty line that ends the head; None where that is further than ``REQUEST_LIMIT``."""
    try:
        return (await reader.readuntil(b"\r\n\r\n"))[:-4]
    except asyncio.LimitOverrunError:
        return None


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes) -> None:
    """Send everything, and wait until the other side ends: closed on unread bytes, a socket drops what it sent."""
    writer.transport.set_write_buffer_limits(0)
    writer.write(answer)
    writer.write_eof()
    await writer.drain()
    for _ in range(_LINGER):
        if not await reader.read(REQUEST_LIMIT):
            return


def _plain(status: HTTPStatus) -> Answer:
    return status, TEXT, f"{status.value} {status.phrase}\n".encode()


def _spell(status: HTTPStatus, content_type: str, body: bytes, *, head: bool = False) -> bytes:
    allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{allow}Connection: close\r\n\r\n"
    )
    return lines.encode() + (b"" if head else body)
