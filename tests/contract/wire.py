"""A stand-in for gRPC between processes on one event loop: the calls, codes, limits and connection states that the project uses.

It replaces the module ``grpc`` in ``gateway.wires.rpc`` and in the emulated kubelets. A server binds and listens on a real socket, so names,
links, inodes and inotify are real. Which server a client talks to follows from the socket's inode. Bytes go from one to the other
after a moment of the moved clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import socket
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote

import grpc
import grpc.aio

from tests.contract.clock import Clock, current

_LIMIT: Final = 4 * 1024 * 1024
_WINDOW: Final = 64 * 1024
_clock: list[Clock] = []
_listening: dict[tuple[int, int], Server] = {}
calls: Counter[str] = Counter()
"""How often each method was called."""
_late: dict[str, LateListener] = {}
_State = grpc.ChannelConnectivity


def _later(context: contextvars.Context, call: Callable[..., object], *args: Any) -> None:
    asyncio.get_running_loop().call_later(_clock[0].latency(), call, *args, context=context)


def _path(target: str) -> str:
    return unquote(target.removeprefix("unix:"))


def _unlink(path: str) -> None:
    """Remove a socket, as gRPC does before it binds and when it stops."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(Path(path).lstat().st_mode):
            Path(path).unlink()


def _key(path: str) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - rows ask very often
    return found.st_dev, found.st_ino


def listening(path: str) -> Server | None:
    """Return the server that listens at a path, if it is one of these.

    Raises:
        OSError: there is nothing.
    """
    return _listening.get(_key(path))


def _failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Exchange:
    """One call: what went each way, and how it ended. ``client`` and ``server`` are the contexts of the two ends.

    ``request`` None: the client sends none, and leaves the call open.
    """

    def __init__(self, channel: Channel, method: str, request: bytes | None, timeout: float | None) -> None:
        self.channel, self.method, self.request = channel, method, request
        self.client = contextvars.copy_context()
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.answers: deque[bytes] = deque()
        self.buffered = 0
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.cancelled = False
        self._arrived = 0.0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = None if timeout is None else loop.call_later(timeout, self._late)
        channel.exchanges.add(self)
        channel.begin(self)

    # What the client does.

    async def read(self) -> bytes | None:
        """Return the next answer; None at the end, however it ended."""
        while not self.answers and self.status is None:
            self._news.clear()
            await self._news.wait()
        if not self.answers:
            return None
        data, full = self.answers.popleft(), self.buffered > _WINDOW
        self.buffered -= len(data)
        if full:
            _later(self.client, self._room.set)
        limit = self.channel.limit
        if 0 <= limit < len(data):
            text = f"Stream removed (CLIENT: Received message larger than max ({len(data)} vs. {limit}))"
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self.status = grpc.StatusCode.RESOURCE_EXHAUSTED, text  # Also where it had ended well at the server.
            self.break_off()
            return None
        return data

    def cancel(self) -> bool:
        """End it from the client's side."""
        if self.status is not None:
            return False
        self.cancelled = True
        self.answers.clear()
        self.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        self.break_off()
        return True

    def end(self, code: grpc.StatusCode, details: str = "") -> None:
        """Take note of how it ended; the first word counts."""
        if self.status is None:
            self.status = code, details
            self.channel.ended(self)
            if self._timer is not None:
                self._timer.cancel()
            self._news.set()
            self._room.set()

    def break_off(self) -> None:
        """Let the server know that nobody waits any more."""
        if self.task is not None:
            _later(self.server, self.task.cancel)

    def _late(self) -> None:
        if self.status is None:
            self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self.break_off()

    # What the server does.

    def served_by(self, server: Server) -> None:
        """Begin it at the server."""
        self.server = server.context
        server.exchanges.add(self)
        self.task = asyncio.get_running_loop().create_task(self._serve(server), context=server.context.copy())

    async def _serve(self, server: Server) -> None:
        context = Context(self)
        try:
            code, details, data = await server.answer(self, context)
        except asyncio.CancelledError:
            code, details, data = grpc.StatusCode.UNAVAILABLE, "Cancelling all calls", None
        server.exchanges.discard(self)
        if data is not None:
            self.buffered += len(data)
        self._send(self._arrive, data, code, details)

    def send(self, data: bytes) -> None:
        """Send an answer."""
        self.buffered += len(data)
        self._send(self._arrive, data)

    def _send(self, call: Callable[..., object], *args: Any) -> None:
        """Have something arrive at the client, after all that was sent before."""
        loop = asyncio.get_running_loop()
        self._arrived = max(loop.time() + _clock[0].latency(), self._arrived + 1e-7)
        loop.call_at(self._arrived, call, *args, context=self.client)

    def _arrive(self, data: bytes | None, code: grpc.StatusCode | None = None, details: str = "") -> None:
        if self.status is not None:
            return
        if data is not None:
            self.answers.append(data)
            self._news.set()
        if code is not None:
            self.end(code, details)

    async def room(self) -> None:
        """Wait until the client has taken enough of what was sent."""
        while self.buffered > _WINDOW and self.status is None:
            self._room.clear()
            await self._room.wait()

    async def over(self) -> None:
        """Wait for its end."""
        while self.status is None:
            self._room.clear()
            await self._room.wait()


class Context:
    """What a handler sees of a call."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._read = False
        self.aborted: tuple[grpc.StatusCode, str] | None = None

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return (("user-agent", self._exchange.channel.user_agent),)

    def time_remaining(self) -> float | None:
        deadline = self._exchange.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    async def abort(self, code: grpc.StatusCode, details: str = "", _trailing: object = ()) -> None:
        self.aborted = code, details
        raise grpc.aio.AbortError("Locally aborted.")

    async def read(self) -> Any:
        if self._read:
            return grpc.aio.EOF
        self._read = True
        if self._exchange.request is None:
            await self._exchange.over()
            return grpc.aio.EOF
        return self._exchange.request

    async def write(self, data: bytes) -> None:
        if self._exchange.status is not None:
            raise asyncio.CancelledError
        self._exchange.send(data)
        await self._exchange.room()

    def cancelled(self) -> bool:
        return self._exchange.cancelled

    def peer(self) -> str:
        return "unix:"


class Server:
    """As ``grpc.aio.server`` makes one."""

    def __init__(
        self,
        handlers: Sequence[Any] | None = None,
        options: Sequence[tuple[str, Any]] | None = None,
        maximum_concurrent_rpcs: int | None = None,
        compression: grpc.Compression | None = None,
    ) -> None:
        self._handlers = list(handlers or ())
        known = dict(options or ())
        self.limit = int(known.get("grpc.max_receive_message_length", _LIMIT))
        self.streams = int(known.get("grpc.max_concurrent_streams", 2**31))
        """How many calls one connection has at once; the others wait."""
        self._most = maximum_concurrent_rpcs
        self.context = contextvars.copy_context()
        self.channels: set[Channel] = set()
        self.exchanges: set[_Exchange] = set()
        self._sockets: list[tuple[str, socket.socket, tuple[int, int]]] = []
        self._started = self.stopping = False
        if (process := current()) is not None:
            process.at_death.append(self._died)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers.extend(handlers)

    def add_insecure_port(self, address: str) -> int:
        if (late := _late.get(address)) is not None:
            late.server = self
            return 1
        path = _path(address)
        _unlink(path)
        try:
            self.listen(path, _bound(path))
        except OSError as error:
            raise RuntimeError(f"Failed to bind to address {address}; {error}") from error
        return 1

    def listen(self, path: str, listener: socket.socket) -> None:
        """Listen on a socket that is bound."""
        listener.listen(64)
        _listening[key := _key(path)] = self
        self._sockets.append((path, listener, key))
        if self._started:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def start(self) -> None:
        self._started = True
        for _, listener, _ in self._sockets:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def stop(self, grace: float | None) -> None:
        self.stopping = True
        for path, listener, key in self._sockets:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
            _listening.pop(key, None)
            _unlink(path)
        self._sockets.clear()
        for channel in tuple(self.channels):
            _later(channel.context, channel.lost)
        if grace:
            ends = time.monotonic() + grace
            while self.exchanges and time.monotonic() < ends:  # noqa: ASYNC110 - simulated time
                await asyncio.sleep(0.001)
        for one in tuple(self.exchanges):
            if one.task is not None:
                one.task.cancel()
        while self.exchanges:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.0005)

    def take(self, channel: Channel) -> bool:
        """Let a client connect; False: nobody answers it."""
        if self.stopping:
            return False
        self.channels.add(channel)
        return True

    @property
    def speaks(self) -> bool:
        """Whether it answers who connects: a listener that isn't started does not."""
        return self._started

    async def answer(self, exchange: _Exchange, context: Context) -> tuple[grpc.StatusCode, str, bytes | None]:
        """Have a handler answer; return the code, the details and the one answer of a unary method."""
        calls[exchange.method] += 1
        if self._most is not None and len(self.exchanges) > self._most:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", None
        request = exchange.request or b""
        if 0 <= self.limit < len(request):
            text = f"SERVER: Received message larger than max ({len(request)} vs. {self.limit})"
            return grpc.StatusCode.RESOURCE_EXHAUSTED, text, None
        details = _Details(exchange.method, context.invocation_metadata())
        handler = next(filter(None, (one.service(details) for one in self._handlers)), None)
        if handler is None:
            return grpc.StatusCode.UNIMPLEMENTED, "Method not found!", None
        data: bytes | None = None
        try:
            if handler.request_streaming:
                work = handler.stream_stream if handler.response_streaming else handler.stream_unary
                data = await work(None, context)
            elif handler.response_streaming:
                found = handler.unary_stream(request, context)
                if hasattr(found, "__aiter__"):
                    async for one in found:
                        await context.write(one)
                else:
                    data = await found
            else:
                data = await handler.unary_unary(request, context)
        except grpc.aio.AbortError:
            assert context.aborted is not None
            return *context.aborted, None
        except Exception as error:  # noqa: BLE001 - as gRPC
            return grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}", None
        return grpc.StatusCode.OK, "", data

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            listener.accept()[0].close()

    def _died(self) -> None:
        for _, _, key in self._sockets:
            _listening.pop(key, None)
        for channel in tuple(self.channels):
            _later(channel.context, channel.broken)


def _bound(path: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.setblocking(False)
    try:
        bound.bind(path)
    except OSError:
        bound.close()
        raise
    now = time.time_ns()
    os.utime(path, ns=(now, now))  # The file's time is the moved clock's.
    return bound


class LateListener:
    """As ``gateway_lab.kubelets.latelistener`` has one: it binds ``path`` at once, and listens when ``seconds`` have passed."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = str(path), seconds
        self._socket = _bound(self._path)
        self.inner = f"late:{path}"
        self.server: Server | None = None
        _late[self.inner] = self

    async def listen(self) -> None:
        """Wait, then listen."""
        await asyncio.sleep(self._seconds)
        assert self.server is not None
        self.server.listen(self._path, self._socket)

    async def close(self) -> None:
        """Stop listening."""
        self._socket.close()


class _Details:
    def __init__(self, method: str, metadata: Sequence[tuple[str, str]]) -> None:
        self.method, self.invocation_metadata = method, metadata


class Channel:
    """As ``grpc.aio.insecure_channel`` makes one."""

    def __init__(self, target: str, options: Sequence[tuple[str, Any]] | None = None) -> None:
        known = dict(options or ())
        self._target = _path(target)
        self.limit = int(known.get("grpc.max_receive_message_length", _LIMIT))
        self.user_agent = f"{known.get('grpc.primary_user_agent', '')} grpc-python-asyncio/1".strip()
        self._wait = float(known.get("grpc.initial_reconnect_backoff_ms", 1000)) / 1e3
        self._longest = float(known.get("grpc.max_reconnect_backoff_ms", 120000)) / 1e3
        self._backoff = self._wait
        self.context = contextvars.copy_context()
        self.exchanges: set[_Exchange] = set()
        self._waiting: list[_Exchange] = []
        self._sent: set[_Exchange] = set()
        self._server: Server | None = None
        self._state = _State.IDLE
        self._changed = asyncio.Event()
        self._wanted = False
        if (process := current()) is not None:
            process.at_death.append(self._died)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state, as it was before this began to connect."""
        state = self._state
        if try_to_connect and state is _State.IDLE:
            self._connect()
        return state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            self._changed.clear()
            await self._changed.wait()

    async def channel_ready(self) -> None:
        self._wanted = True
        try:
            while (state := self.get_state(try_to_connect=True)) is not _State.READY:
                if state is _State.SHUTDOWN:
                    raise grpc.aio.UsageError("Channel is closed.")
                await self.wait_for_state_change(state)
        finally:
            self._wanted = False

    def unary_unary(self, method: str, **_: Any) -> Callable[..., _Unary]:
        return lambda request=b"", timeout=None, **_: _Unary(self._exchange(method, request, timeout))

    def unary_stream(self, method: str, **_: Any) -> Callable[..., _Stream]:
        return lambda request=b"", timeout=None, **_: _Stream(self._exchange(method, request, timeout))

    async def close(self, _grace: float | None = None) -> None:
        self._to(_State.SHUTDOWN)
        for one in tuple(self.exchanges):
            one.cancel()
        self._let_go()

    def _exchange(self, method: str, request: bytes | None, timeout: float | None) -> _Exchange:
        if self._state is _State.SHUTDOWN:
            raise grpc.aio.UsageError("Channel is closed.")
        return _Exchange(self, method, request, timeout)

    def begin(self, exchange: _Exchange) -> None:
        """Send a call, as soon as there is a connection; fail it where there can't be one now."""
        if self._state is _State.READY and self._server is not None:
            self._waiting.append(exchange)
            self._send()
        elif self._state is _State.TRANSIENT_FAILURE:
            exchange.end(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses; last error: {self._target}")
        else:
            self._waiting.append(exchange)
            if self._state is _State.IDLE:
                self._connect()

    def ended(self, exchange: _Exchange) -> None:
        """Take note that a call is over: another one that waits may begin."""
        self.exchanges.discard(exchange)
        self._sent.discard(exchange)
        self._send()

    def _send(self) -> None:
        """Send the calls that wait, as many as the server takes at once on one connection."""
        server = self._server
        while server is not None and self._waiting and len(self._sent) < server.streams:
            exchange = self._waiting.pop(0)
            if exchange.status is None:
                self._sent.add(exchange)
                _later(server.context, self._begin, exchange, server)

    def _begin(self, exchange: _Exchange, server: Server) -> None:
        if exchange.status is None and server.stopping:
            exchange.end(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls")
        elif exchange.status is None:
            exchange.served_by(server)

    def _connect(self) -> None:
        self._to(_State.CONNECTING)
        _later(self.context, self._look)

    def _look(self) -> None:
        if self._state is not _State.CONNECTING:
            return
        server = None
        try:
            if (server := listening(self._target)) is None:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.setblocking(False)
                    probe.connect(self._target)
                return  # Somebody listens who never speaks: it stays as it is.
        except OSError:
            server = None
        if server is not None and not server.speaks:
            asyncio.get_running_loop().call_later(0.001, self._look, context=self.context)
        elif server is None or not server.take(self):
            self._to(_State.TRANSIENT_FAILURE)
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one.end(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses; last error: {self._target}")
            asyncio.get_running_loop().call_later(self._backoff, self._again, context=self.context)
            self._backoff = min(self._backoff * 1.6, self._longest)
        else:
            self._server, self._backoff = server, self._wait
            self._to(_State.READY)
            self._send()

    def _again(self) -> None:
        if self._state is _State.TRANSIENT_FAILURE:
            self._to(_State.IDLE)
            if self._wanted or self._waiting:
                self._connect()

    def broken(self) -> None:
        """Take note that the server died: what was sent to it has failed, whether it came there or not."""
        for one in tuple(self._sent):
            one.end(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        self.lost()

    def lost(self) -> None:
        """Take note that the server closed the connection."""
        if self._state is not _State.SHUTDOWN:
            self._server = None
            self._to(_State.IDLE)
            if self._waiting:
                self._connect()

    def _to(self, state: grpc.ChannelConnectivity) -> None:
        if self._state is not _State.SHUTDOWN:
            self._state = state
            self._changed.set()

    def _let_go(self) -> None:
        if self._server is not None:
            self._server.channels.discard(self)
            self._server = None

    def _died(self) -> None:
        for one in tuple(self.exchanges):
            one.break_off()
        self._let_go()


class _Unary:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._task = asyncio.ensure_future(self._result())
        self._task.add_done_callback(self._over)

    def __await__(self) -> Any:
        return self._task.__await__()

    async def _result(self) -> bytes:
        exchange = self._exchange
        data = await exchange.read()
        while data is not None and exchange.status is None:
            await exchange.read()
        if exchange.cancelled:
            raise asyncio.CancelledError
        assert exchange.status is not None
        code, details = exchange.status
        if code is not grpc.StatusCode.OK:
            raise _failure(code, details)
        if data is None:
            raise _failure(grpc.StatusCode.INTERNAL, "No message received")
        return data

    def _over(self, task: asyncio.Task[bytes]) -> None:
        if task.cancelled():
            self._exchange.cancel()
        else:
            task.exception()

    async def details(self) -> str:
        return self._exchange.status[1] if self._exchange.status else ""

    async def code(self) -> grpc.StatusCode:
        return self._exchange.status[0] if self._exchange.status else grpc.StatusCode.UNKNOWN

    def cancel(self) -> bool:
        return self._exchange.cancel()

    def done(self) -> bool:
        return self._task.done()


class _Stream:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    async def read(self) -> Any:
        exchange = self._exchange
        try:
            data = await exchange.read()
        except asyncio.CancelledError:
            exchange.cancel()
            raise
        if data is not None:
            return data
        if exchange.cancelled:
            raise asyncio.CancelledError
        assert exchange.status is not None
        code, details = exchange.status
        if code is grpc.StatusCode.OK:
            return grpc.aio.EOF
        raise _failure(code, details)

    def cancel(self) -> bool:
        return self._exchange.cancel()

    def done(self) -> bool:
        return self._exchange.status is not None


class _Aio:
    server = Server
    insecure_channel = Channel

    def __getattr__(self, name: str) -> Any:
        return getattr(grpc.aio, name)


class Grpc:
    """The module ``grpc``, as far as it is replaced."""

    def __init__(self, clock: Clock) -> None:
        _clock[:] = [clock]
        for one in (_listening, calls, _late):
            one.clear()
        self.aio = _Aio()

    def __getattr__(self, name: str) -> Any:
        return getattr(grpc, name)
