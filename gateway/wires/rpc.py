"""gRPC over Unix sockets. No other module of the daemon imports grpc, and callers see none of its types.

Messages are bytes, methods are full paths (``/service/Method``), and options are gRPC's channel arguments.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeAlias, TypeVar

import grpc
import grpc.aio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    _Context = grpc.aio.ServicerContext[bytes, bytes]

Options: TypeAlias = "Sequence[tuple[str, int | str]]"
Method: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
"""A server's method; made by ``unary``, ``reading`` or ``writing``."""
Code: TypeAlias = grpc.StatusCode
"""The status of a call, by gRPC's names."""
_T = TypeVar("_T")


class CallError(Exception):
    """A call failed. ``code`` is its status, ``details`` the text of the other end or of gRPC."""

    def __init__(self, code: Code, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code, self.details = code, details


class ClosedError(Exception):
    """The channel was closed before or during the call."""


def code(name: str) -> Code:
    """Return the status of this name."""
    return grpc.StatusCode[name]


def target(path: Path) -> str:
    """Return gRPC's name of a Unix socket: a URI, so ``%``, ``#`` and ``?`` are escaped."""
    from urllib.parse import quote  # noqa: PLC0415 - it takes half a MiB, which commands don't need

    return f"unix:{quote(os.fsencode(path))}"


class Channel:
    """A connection to the server on a Unix socket. It is made when it is first needed."""

    def __init__(self, path: Path, options: Options = ()) -> None:
        self._channel = grpc.aio.insecure_channel(target(path), options=options)
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, and cancel the calls on it."""
        await self._channel.close()

    def connect(self) -> None:
        """Start to connect."""
        self._channel.get_state(try_to_connect=True)

    async def ready(self) -> None:
        """Connect, and return once the connection can be used."""
        await self._channel.channel_ready()

    @property
    def is_ready(self) -> bool:
        """True if the connection can be used now."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def call(self, method: str, request: bytes = b"", *, seconds: float) -> bytes:
        """Make a call with one request and one answer.

        Raises:
            CallError: it failed, or took longer than ``seconds``.
            ClosedError: the channel is closed.
        """
        ask = self._methods.get(method)
        if ask is None:
            ask = self._methods[method] = self._channel.unary_unary(method)
        try:
            call = ask(request, timeout=seconds)
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                raise _call_error(error) from None
            except asyncio.CancelledError:  # gRPC raises this if the server ended the call as CANCELLED.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                raise CallError(Code.CANCELLED, await call.details() or "") from None
        except grpc.aio.UsageError:
            raise ClosedError from None

    def stream(self, method: str, request: bytes = b"") -> Stream:
        """Make a call with one request and a stream of answers.

        Raises:
            ClosedError: the channel is closed.
        """
        calls: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(method)
        try:
            return Stream(calls(request))
        except grpc.aio.UsageError:
            raise ClosedError from None


class Stream:
    """The answers of a call, one after another."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> None:
        self._call = call

    async def read(self) -> bytes | None:
        """Wait for the next answer; None at the end.

        Raises:
            CallError: the stream broke.
        """
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _call_error(error) from None
        return data if isinstance(data, bytes) else None

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()


class Call:
    """A call to our server."""

    __slots__ = ("_context",)

    def __init__(self, context: _Context) -> None:
        self._context = context

    @property
    def user_agent(self) -> str | None:
        """The caller's user agent."""
        for key, value in self._context.invocation_metadata() or ():
            if key == "user-agent" and isinstance(value, str):
                return value
        return None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the caller's deadline; None if it set none."""
        return self._context.time_remaining()

    def read(self) -> asyncio.Future[Any]:
        """Read the next request. A value that isn't bytes is the end."""
        return _run_to_end(self._context.read())

    def write(self, data: bytes) -> asyncio.Future[None]:
        """Send an answer on a stream."""
        return _run_to_end(self._context.write(data))

    async def abort(self, code: Code, details: str) -> NoReturn:
        """End the call with an error."""
        await self._context.abort(code, details)
        raise AssertionError  # abort always raises


def unary(answer: Callable[[bytes, Call], Awaitable[bytes]]) -> Method:
    """Return a method with one request and one answer."""

    async def handled(request: bytes, context: _Context) -> bytes:
        return await answer(request, Call(context))

    return grpc.unary_unary_rpc_method_handler(handled)


def reading(answer: Callable[[Call], Awaitable[bytes]]) -> Method:
    """Return a client-streaming method. ``answer`` reads the requests from the call, and must limit them."""
    return grpc.stream_unary_rpc_method_handler(_free_refused_calls(answer))


def writing(answer: Callable[[Call], Awaitable[None]]) -> Method:
    """Return a method with a stream of answers, which ``answer`` writes without waiting for a request."""
    return grpc.stream_stream_rpc_method_handler(_free_refused_calls(answer))


class UnixServer:
    """A server on a Unix socket, bound at once.

    Args:
        path: the socket, at most 107 bytes.
        find: returns the method of a path; None if there is none (UNIMPLEMENTED).
        options: gRPC's options.
        most_calls: open calls at once; gRPC refuses more.

    Raises:
        RuntimeError: the path can't be bound.
    """

    def __init__(self, path: Path, find: Callable[[str], Method | None], options: Options, most_calls: int) -> None:
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most_calls)
        self._server.add_generic_rpc_handlers((_Methods(find),))
        self._server.add_insecure_port(target(path))

    async def start(self) -> None:
        """Start to answer."""
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Accept no more calls. Open calls have ``grace`` seconds to end."""
        await self._server.stop(grace)


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, find: Callable[[str], Method | None]) -> None:
        self._find = find

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Method | None:
        return self._find(handler_call_details.method)


def _call_error(error: grpc.aio.AioRpcError) -> CallError:
    return CallError(error.code(), error.details() or "")


def _run_to_end(batch: Awaitable[_T]) -> asyncio.Future[_T]:
    """Await a gRPC operation to its end, even if its caller is cancelled.

    gRPC never frees the message of a cancelled operation (grpc/grpc#43360). When the call ends, the operation ends too.
    """
    return _AwaitableDriver(batch).end


def _free_refused_calls(handler: Callable[[Call], Awaitable[_T]]) -> Callable[[object, _Context], Awaitable[_T]]:
    """Wrap the handler so that each refused call is freed at once.

    gRPC keeps the error with the call, and the error's traceback keeps the functions that hold the call. The garbage collector
    would free them late, because it doesn't count gRPC's memory for the request, up to 4 MiB.
    """

    async def handled(_requests: object, context: _Context) -> _T:
        try:
            return await handler(Call(context))
        except grpc.aio.AbortError as error:
            error.__traceback__ = None
            raise

    return handled


class _AwaitableDriver(Generic[_T]):
    """Steps through the futures of an awaitable. A task would cost each call two more turns of the event loop."""

    def __init__(self, batch: Awaitable[_T]) -> None:
        self._steps = batch.__await__()
        self.end: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._go_on()

    def _go_on(self, _: object = None) -> None:
        try:
            waits_for = next(self._steps)
        except StopIteration as done:
            if not self.end.done():
                self.end.set_result(done.value)
        except asyncio.CancelledError:
            self.end.cancel()
        except Exception as error:  # noqa: BLE001 - the waiting task gets any error
            if not self.end.done():
                self.end.set_exception(error)
        else:
            if waits_for is None:  # A bare yield: continue in the next turn.
                asyncio.get_running_loop().call_soon(self._go_on)
            else:
                waits_for.add_done_callback(self._go_on)
