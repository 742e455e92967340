"""A small HTTP listener for metrics and probes: GET and HEAD on a few fixed paths.

Every client may be hostile. So requests are short, each step has a time limit, and a connection has one request. If too many are
open, a new one closes the oldest one that was answered or sent nothing, so that no client keeps a probe away. An answer in progress
is never lost. Under a flood the listener rests for as long as it worked, so that the kubelet's calls get their time. A request's
content is never kept or sent back.
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

MAX_REQUEST_BYTES: Final = 8 * 1024
"""The most bytes of a request's first line and headers, together."""
STEP_S: Final = 5.0
"""Seconds for each step: the request arrives, the answer is made, the client receives it."""
MAX_CONNECTIONS: Final = 256
"""Most open connections. At 10 000 new ones a second, each has 25 ms for its request before it is closed."""
ACCEPTS_PER_TURN: Final = 64
"""Most connections that are accepted in one turn of the event loop."""
ACCEPT_RETRY_S: Final = 1.0
"""Seconds until the next accept if the kernel gave no descriptor."""
_BACKLOG: Final = 2048
"""Most connections that wait in the kernel. It drops the SYN of further ones; their clients try again after a second, the default
time-out of a probe. A longer queue would not help: a busy node answers 4 000 a second."""
_RECEIVE_BYTES, _SEND_BYTES = MAX_REQUEST_BYTES, 64 * 1024
"""Bytes of the kernel's buffers of a connection (it doubles both). All waiting connections must fit into the pod's memory limit."""
_MAX_DROPPED_REQUESTS: Final = 16
"""Most bytes of a too large request that are read and dropped, as a multiple of ``MAX_REQUEST_BYTES``."""
TEXT: Final = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""
_Encoded = tuple[bytes, bytes]
"""An answer as bytes: head and body."""
Handler = Callable[[], Answer | Awaitable[Answer]]
"""Returns the answer, or an awaitable of it. A direct answer costs half as much time, which matters under a flood."""

_REQUEST = re.compile(rb"(?P<method>[!#$%&'*+.^_`|~0-9A-Za-z-]+) (?P<target>[!-~]+) HTTP/1\.(?P<minor>[01])")
"""RFC 9112, section 3. A target is a path (origin form), or a whole URL (absolute form)."""
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*")
_ORIGIN = re.compile(r"(?i:https?://[^/?]*)?(?P<path>/[^?]*)?(?:\?.*)?")

_seldom = Seldom()
_log = structlog.get_logger()


class _Stage(IntEnum):
    """The stage of a connection. If too many are open, the oldest one in the lowest stage is closed."""

    SENT = 0
    """Its answer was sent. The client should close it."""
    WAITING = 1
    """Its request has not arrived."""
    SENDING = 2
    """Its answer is being sent."""
    ANSWERING = 3
    """Its handler is at work."""


class _Connection:
    """One connection."""

    __slots__ = ("dropped", "fd", "more_came", "read", "rest", "since", "socket", "stage", "task")

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.fd = connection, connection.fileno()
        """asyncio gets the descriptor, not the socket: with a socket it formats both addresses each time, which costs time."""
        self.stage = _Stage.WAITING
        self.since = 0.0
        """When it entered its stage, in the event loop's time."""
        self.more_came = False
        """True if the client sent more than a request."""
        self.read = bytearray()
        """The request so far."""
        self.dropped = 0
        """How many bytes came after the request."""
        self.rest: list[memoryview] = []
        """The part of the answer that is not sent yet."""
        self.task: asyncio.Task[None] | None = None


class HttpServer:
    """The listener.

    Args:
        host: the address or name to listen on; empty: all addresses.
        port: the port; 0 is any free one.
        routes: the handler of each path. A handler that raises gives 500, one that hangs 503.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Handler]) -> None:
        self._host, self._port, self._routes = host, port, routes
        self._loop: asyncio.AbstractEventLoop
        self._listeners: list[socket.socket] = []
        self._open: dict[_Connection, None] = {}
        self._by_stage: dict[_Stage, dict[_Connection, None]] = {stage: {} for stage in _Stage}
        """The same by stage, oldest first."""
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self) -> tuple[str, int]:
        """Listen; return host and port.

        Raises:
            OSError: the address is in use, or not of this machine.
        """
        self._loop = asyncio.get_running_loop()
        bound = await self._loop.create_server(
            asyncio.Protocol, self._host or None, self._port, start_serving=False
        )  # Only to resolve names: asyncio's own accept takes up to a hundred connections at once.
        try:
            self._listeners = [one.dup() for one in bound.sockets]
        finally:
            bound.close()
        try:
            for listener in self._listeners:
                listener.settimeout(0)
                with contextlib.suppress(OSError):  # The kernel holds silent connections back, while it has room.
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
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

    # Each of these runs within one turn of the event loop.

    def _accept(self, listener: socket.socket) -> None:
        """Accept up to ``ACCEPTS_PER_TURN`` connections. If that limit is reached, rest for the processor time that they took.

        Wall-clock time would include the time of other processes on a busy node.
        """
        began = time.thread_time()
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # No descriptor is left, or no memory.
                if (left_out := _seldom.tell("accept")) is not None:
                    _log.warning("cannot accept connections", reason=str(error), more_of_them_before=left_out)
                self._rest(listener, ACCEPT_RETRY_S)
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
        """Add a connection. If there are too many, close the oldest one in the lowest stage; if all are being answered, refuse this one."""
        if len(self._open) >= MAX_CONNECTIONS:
            least = next(stage for stage in _Stage if self._by_stage[stage])
            if least is _Stage.ANSWERING:
                accepted.close()
                return
            self._end(next(iter(self._by_stage[least])))
        accepted.settimeout(0)
        connection = _Connection(accepted)
        self._open[connection] = None
        self._move_to(connection, _Stage.WAITING)
        self._readable(connection)
        if connection in self._by_stage[_Stage.WAITING]:
            self._loop.add_reader(connection.fd, self._readable, connection)

    def _move_to(self, connection: _Connection, stage: _Stage) -> None:
        """Move a connection to a stage. Each stage but ``ANSWERING``, which has its own time-out, may last for ``STEP_S``."""
        self._by_stage[connection.stage].pop(connection, None)
        self._by_stage[stage][connection] = None
        connection.stage, connection.since = stage, self._loop.time()
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(STEP_S, self._sweep)

    def _sweep(self) -> None:
        """Close the connections whose time is up. One timer for all of them saves a third of a connection's cost."""
        now, timed = self._loop.time(), [self._by_stage[stage] for stage in _Stage if stage is not _Stage.ANSWERING]
        for those in timed:
            for connection in list(those):
                if now < connection.since + STEP_S:
                    break
                self._end(connection)
        oldest = min((next(iter(those)).since for those in timed if those), default=now)
        self._sweeping = self._loop.call_at(oldest + STEP_S, self._sweep) if self._open else None

    def _readable(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(MAX_REQUEST_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
            return
        if connection.stage is _Stage.SENT:
            connection.dropped += len(data)
            if connection.dropped > _MAX_DROPPED_REQUESTS * MAX_REQUEST_BYTES:
                self._end(connection)
            return
        connection.read += data
        head, whole, more = bytes(connection.read).partition(b"\r\n\r\n")
        if whole or len(head) > MAX_REQUEST_BYTES:
            connection.more_came = bool(more) or not whole
            connection.read.clear()
            self._loop.remove_reader(connection.fd)
            self._move_to(connection, _Stage.ANSWERING)
            answer = self._answer(head if len(head) <= MAX_REQUEST_BYTES else None)
            if isinstance(answer, tuple):
                self._send(connection, *answer)
            else:
                connection.task = self._loop.create_task(self._serve(connection, answer))

    async def _serve(self, connection: _Connection, answer: Awaitable[_Encoded]) -> None:
        self._send(connection, *await answer)

    def _send(self, connection: _Connection, head: bytes, body: bytes) -> None:
        self._move_to(connection, _Stage.SENDING)
        connection.rest = [memoryview(head), memoryview(body)]
        self._writable(connection)
        if connection in self._by_stage[_Stage.SENDING]:
            self._loop.add_writer(connection.fd, self._writable, connection)

    def _writable(self, connection: _Connection) -> None:
        """Send the rest, then close. If the client sent more than a request, let it close first: closing with unread bytes drops the answer."""
        rest = connection.rest
        try:
            sent = connection.socket.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][sent:]
                return
            if not connection.more_came:
                self._end(connection)
                return
            connection.socket.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # The client is gone.
            self._end(connection)
            return
        self._loop.remove_writer(connection.fd)
        self._move_to(connection, _Stage.SENT)
        self._loop.add_reader(connection.fd, self._readable, connection)

    def _end(self, connection: _Connection) -> None:
        if connection not in self._open:
            return
        del self._open[connection], self._by_stage[connection.stage][connection]
        if connection.task is not None:
            connection.task.cancel()
        self._loop.remove_reader(connection.fd)
        self._loop.remove_writer(connection.fd)
        connection.socket.close()

    def _answer(self, request: bytes | None) -> _Encoded | Awaitable[_Encoded]:
        """Return the answer to a request's head (None: it is too large)."""
        if request is None:
            return _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        found = parse(request)
        if found is None:
            return _refusal(HTTPStatus.BAD_REQUEST)
        method, path = found
        head = method == "HEAD"
        if not head and method != "GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        handler = self._routes.get(path)
        if handler is None:
            return _refusal(HTTPStatus.NOT_FOUND, head=head)
        try:
            answer = handler()
        except Exception:  # noqa: BLE001 - one request's defect is no other's
            return _failed(path, head=head)
        return _encoded(*answer, head=head) if isinstance(answer, tuple) else _awaited(answer, path, head=head)


async def _awaited(answer: Awaitable[Answer], path: str, *, head: bool) -> _Encoded:
    try:
        async with asyncio.timeout(STEP_S):
            return _encoded(*await answer, head=head)
    except TimeoutError:
        return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, head=head)
    except Exception:  # noqa: BLE001 - one request's defect is no other's
        return _failed(path, head=head)


def _failed(path: str, *, head: bool) -> _Encoded:
    _log.exception("a request failed", path=path)
    return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, head=head)


def parse(request: bytes) -> tuple[str, str] | None:
    """Return method and path (undecoded) of a request's head, without the empty line; None if it is no HTTP/1 request."""
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


def _refusal(status: HTTPStatus, *, head: bool = False) -> _Encoded:
    return _encoded(status, TEXT, f"{status.value} {status.phrase}\n".encode(), head=head)


def _encoded(status: HTTPStatus, content_type: str, body: bytes, *, head: bool = False) -> _Encoded:
    allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{allow}Connection: close\r\n\r\n"
    )
    return lines.encode(), b"" if head else body
