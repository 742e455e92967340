"""A small HTTP listener, for those who ask a gateway over the network: GET and HEAD, a few fixed paths, nothing else.

Whoever asks is a stranger: a request is at most ``REQUEST_LIMIT`` bytes, everything has ``SECONDS``, ``MAX_CONNECTIONS`` are
open at most, and each carries one request. When one more comes, one ends that was answered or says nothing: whoever holds
them all keeps no probe away, and no answer that is being made is lost. A turn of the event loop takes a bounded number of
connections, and under a flood the listener rests for as long as it works: it starves before the kubelet's calls do.
Nothing that comes in is kept, obeyed or said back.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from http import HTTPStatus
from typing import Final

import structlog

from gateway.wires.log import Seldom

REQUEST_LIMIT: Final = 8 * 1024
"""The most bytes of a request's first line and headers, together."""
SECONDS: Final = 5.0
"""How long a request may take to come, its answer to be made, and the answer to be taken: for each of the three."""
MAX_CONNECTIONS: Final = 256
"""How many are open at once: at 10 000 a second each has 25 ms to say something before it makes room."""
AT_ONCE: Final = 64
"""How many are taken in one turn of the event loop."""
ACCEPT_AGAIN: Final = 1.0
"""Seconds until the next try, where the kernel gave no descriptor."""
_BACKLOG: Final = 2048
"""How many the kernel lets wait: of one more it drops the SYN, which comes again a second later, as long as a probe waits by
default. What waits in a longer line is late, too: on a busy node 4 000 are answered in a second."""
_RECEIVED, _SENT = REQUEST_LIMIT, 64 * 1024
"""Bytes that the kernel keeps for each (it doubles both): so those that wait fit into the pod's memory limit."""
_LINGER: Final = 16
"""How many times ``REQUEST_LIMIT`` bytes are read and dropped, of a request that was too large."""
TEXT: Final = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""
_Spelled = tuple[bytes, bytes]
"""An answer as it is sent: its head, and its body."""
Handler = Callable[[], Answer | Awaitable[Answer]]
"""Who can answer at once does: it costs half of what a task does, and under a flood that is how soon the next one has its turn."""

_REQUEST = re.compile(rb"(?P<method>[!#$%&'*+.^_`|~0-9A-Za-z-]+) (?P<target>[!-~]+) HTTP/1\.(?P<minor>[01])")
"""RFC 9112, section 3. A target is a path (origin form), or a whole URL (absolute form)."""
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*")
_ORIGIN = re.compile(r"(?i:https?://[^/?]*)?(?P<path>/[^?]*)?(?:\?.*)?")

_seldom = Seldom()
_log = structlog.get_logger()


class _Stage(IntEnum):
    """Where a connection stands. Of too many the first of the lowest stage goes."""

    SERVED = 0
    """Its answer is out; the other side is to end it."""
    SILENT = 1
    """Its request isn't there yet."""
    TAKING = 2
    """Its answer is being taken."""
    ASKED = 3
    """Its answer is being made."""


class _Connection:
    """One connection, and what is under way on it."""

    __slots__ = ("dropped", "fd", "linger", "read", "rest", "since", "socket", "stage", "task")

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.fd = connection, connection.fileno()
        """asyncio gets the number: it writes the socket it is given into an exception each time, with both addresses."""
        self.stage = _Stage.SILENT
        self.since = 0.0
        """When it came to its stage, in the event loop's time."""
        self.linger = False
        """Whether more came than a request, and may still come."""
        self.read = bytearray()
        """The request so far."""
        self.dropped = 0
        """How many bytes came after it."""
        self.rest: list[memoryview] = []
        """What is left of the answer."""
        self.task: asyncio.Task[None] | None = None


class HttpServer:
    """The listener.

    Args:
        host: the address to listen on, or a name of it; empty: every one that this machine has.
        port: the port; 0 is any free one.
        routes: who answers for which path. A handler that raises is answered for with 500, one that hangs with 503.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Handler]) -> None:
        self._host, self._port, self._routes = host, port, routes
        self._loop: asyncio.AbstractEventLoop
        self._listeners: list[socket.socket] = []
        self._open: dict[_Connection, None] = {}
        self._at: dict[_Stage, dict[_Connection, None]] = {stage: {} for stage in _Stage}
        """The same by stage, in the order in which they came to it."""
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self) -> tuple[str, int]:
        """Listen; return the address that was taken.

        Raises:
            OSError: it can't be had (it is taken, or is none of this machine).
        """
        self._loop = asyncio.get_running_loop()
        bound = await self._loop.create_server(
            asyncio.Protocol, self._host or None, self._port, start_serving=False
        )  # for its names: asyncio's own way to accept is up to a hundred at once, whatever they cost
        try:
            self._listeners = [one.dup() for one in bound.sockets]
        finally:
            bound.close()
        try:
            for listener in self._listeners:
                listener.settimeout(0)
                with contextlib.suppress(OSError):  # Who says nothing stays with the kernel, as far as it has room.
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT)
                listener.listen(_BACKLOG)
                self._loop.add_reader(listener, self._accept, listener)
        except OSError:
            await self.close()
            raise
        host, port, *_ = self._listeners[0].getsockname()
        return host, port

    async def close(self) -> None:
        """End every connection and stop listening. Never raises."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            self._loop.remove_reader(listener)
            listener.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        tasks = [connection.task for connection in self._open if connection.task is not None]
        for connection in list(self._open):
            self._end(connection)
        await asyncio.gather(*tasks, return_exceptions=True)

    # Each of these is one turn of the event loop, and short.

    def _accept(self, listener: socket.socket) -> None:
        """Take those who wait, no more at once than may be open; after so many it rests for as much time as a processor needed.

        By the clock, it would rest also for the time that a busy node gave to others.
        """
        began = time.thread_time()
        for _ in range(AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # No descriptor is left, or no memory.
                if (left_out := _seldom.tell("accept")) is not None:
                    _log.warning("connections can't be taken", reason=str(error), more_of_them_before=left_out)
                self._rest(listener, ACCEPT_AGAIN)
                return
            self._take(connection)
        self._rest(listener, time.thread_time() - began)

    def _rest(self, listener: socket.socket, seconds: float) -> None:
        def again() -> None:
            if listener in self._listeners:
                self._loop.add_reader(listener, self._accept, listener)

        self._loop.remove_reader(listener)
        self._loop.call_later(seconds, again)

    def _take(self, accepted: socket.socket) -> None:
        """Take a connection, in place of the one that needs it least; who is being answered stays."""
        if len(self._open) >= MAX_CONNECTIONS:
            least = next(stage for stage in _Stage if self._at[stage])
            if least is _Stage.ASKED:
                accepted.close()
                return
            self._end(next(iter(self._at[least])))
        accepted.settimeout(0)
        connection = _Connection(accepted)
        self._open[connection] = None
        self._enter(connection, _Stage.SILENT)
        self._readable(connection)
        if connection in self._at[_Stage.SILENT]:
            self._loop.add_reader(connection.fd, self._readable, connection)

    def _enter(self, connection: _Connection, stage: _Stage) -> None:
        """Let it come to a stage. In each but ``ASKED``, which has its own time, it may be for ``SECONDS``."""
        self._at[connection.stage].pop(connection, None)
        self._at[stage][connection] = None
        connection.stage, connection.since = stage, self._loop.time()
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(SECONDS, self._sweep)

    def _sweep(self) -> None:
        """End those whose time is over: one timer for all is a third of what a connection costs less."""
        now, timed = self._loop.time(), [self._at[stage] for stage in _Stage if stage is not _Stage.ASKED]
        for those in timed:
            for connection in list(those):
                if now < connection.since + SECONDS:
                    break
                self._end(connection)
        oldest = min((next(iter(those)).since for those in timed if those), default=now)
        self._sweeping = self._loop.call_at(oldest + SECONDS, self._sweep) if self._open else None

    def _readable(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(REQUEST_LIMIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
            return
        if connection.stage is _Stage.SERVED:
            connection.dropped += len(data)
            if connection.dropped > _LINGER * REQUEST_LIMIT:
                self._end(connection)
            return
        connection.read += data
        head, whole, more = bytes(connection.read).partition(b"\r\n\r\n")
        if whole or len(head) > REQUEST_LIMIT:
            connection.linger = bool(more) or not whole
            connection.read.clear()
            self._loop.remove_reader(connection.fd)
            self._enter(connection, _Stage.ASKED)
            answer = self._answer(head if len(head) <= REQUEST_LIMIT else None)
            if isinstance(answer, tuple):
                self._send(connection, *answer)
            else:
                connection.task = self._loop.create_task(self._serve(connection, answer))

    async def _serve(self, connection: _Connection, answer: Awaitable[_Spelled]) -> None:
        self._send(connection, *await answer)

    def _send(self, connection: _Connection, head: bytes, body: bytes) -> None:
        self._enter(connection, _Stage.TAKING)
        connection.rest = [memoryview(head), memoryview(body)]
        self._writable(connection)
        if connection in self._at[_Stage.TAKING]:
            self._loop.add_writer(connection.fd, self._writable, connection)

    def _writable(self, connection: _Connection) -> None:
        """Send on, then end; where more came than a request, the other side ends: closed on unread bytes, a socket drops what it sent."""
        rest = connection.rest
        try:
            sent = connection.socket.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][sent:]
                return
            if not connection.linger:
                self._end(connection)
                return
            connection.socket.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # Nobody waits for an answer.
            self._end(connection)
            return
        self._loop.remove_writer(connection.fd)
        self._enter(connection, _Stage.SERVED)
        self._loop.add_reader(connection.fd, self._readable, connection)

    def _end(self, connection: _Connection) -> None:
        if connection not in self._open:
            return
        del self._open[connection], self._at[connection.stage][connection]
        if connection.task is not None:
            connection.task.cancel()
        self._loop.remove_reader(connection.fd)
        self._loop.remove_writer(connection.fd)
        connection.socket.close()

    def _answer(self, request: bytes | None) -> _Spelled | Awaitable[_Spelled]:
        """Answer a request's head (None: it was too large)."""
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
            answer = handler()
        except Exception:  # noqa: BLE001 - one request's defect is no other's
            return _failed(path, head=head)
        return _spell(*answer, head=head) if isinstance(answer, tuple) else _in_time(answer, path, head=head)


async def _in_time(answer: Awaitable[Answer], path: str, *, head: bool) -> _Spelled:
    try:
        async with asyncio.timeout(SECONDS):
            return _spell(*await answer, head=head)
    except TimeoutError:
        return _spell(*_plain(HTTPStatus.SERVICE_UNAVAILABLE), head=head)
    except Exception:  # noqa: BLE001 - one request's defect is no other's
        return _failed(path, head=head)


def _failed(path: str, *, head: bool) -> _Spelled:
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


def _plain(status: HTTPStatus) -> Answer:
    return status, TEXT, f"{status.value} {status.phrase}\n".encode()


def _spell(status: HTTPStatus, content_type: str, body: bytes, *, head: bool = False) -> _Spelled:
    allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{allow}Connection: close\r\n\r\n"
    )
    return lines.encode(), b"" if head else body
