"""How a kubelet speaks to one device plugin: its connection, its calls, and the stream of lists, as grpc-go has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc

from adapters.dialect import Dialect, MalformedError
from adapters.registry import by_name
from devices.model import ContainerAnswer, ContainerRequest, Device, Options, PreferredRequest
from gateway.wires.rpc import target
from gateway_lab.kubelets.behaviour import DIAL_SECONDS, ENDPOINT_GRACE_SECONDS, PRE_START_SECONDS, Behaviour, Dial

EMPTY = b""
"""The message Empty, in every dialect."""


class CallError(Exception):
    """A call to a plugin that failed, in the words of grpc-go."""


@dataclass(eq=False, slots=True)
class PluginClient:
    """A registered device plugin: the kubelet's client and endpoint in one."""

    resource: str
    path: str
    behaviour: Behaviour
    options: Options = Options()
    devices: dict[str, Device] = field(default_factory=dict)
    """Its last list; used where lists are entered as differences."""
    stopped_at: float | None = None
    _channel: grpc.aio.Channel | None = None
    _lists: grpc.aio.UnaryStreamCall[bytes, bytes] | None = None

    @property
    def listing(self) -> bool:
        """Whether the stream of lists was opened, and the endpoint isn't stopped."""
        return self._lists is not None and self.stopped_at is None

    @property
    def expired(self) -> bool:
        """Whether it has been stopped for so long that its resource is to be forgotten."""
        return self.stopped_at is not None and time.monotonic() - self.stopped_at > ENDPOINT_GRACE_SECONDS

    def stop(self) -> None:
        """Make no more calls to it from now on; the stream of lists is another matter."""
        self.stopped_at = time.monotonic()

    async def dial(self) -> None:
        """Connect, as long as this version waits for that.

        Raises:
            CallError: it took too long.
        """
        limit = self.behaviour.receive_limit
        self._channel = grpc.aio.insecure_channel(
            target(Path(self.path)),
            options=[
                ("grpc.primary_user_agent", f"grpc-go/{self.behaviour.grpc_go}"),
                ("grpc.default_authority", self.path if self.behaviour.path_as_authority else "localhost"),
                ("grpc.max_receive_message_length", -1 if limit is None else limit),
                ("grpc.use_local_subchannel_pool", 1),  # each dial is a connection of its own
            ],
        )
        if self.behaviour.dial is Dial.AT_ONCE:
            return
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await self._channel.channel_ready()
        except TimeoutError:
            await self.close()
            raise CallError("failed to dial device plugin: context deadline exceeded") from None

    async def close(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def cancel_lists(self) -> None:
        """End the stream of lists from this side."""
        if self._lists is not None:
            self._lists.cancel()

    async def lists(self) -> AsyncIterator[tuple[Device, ...]]:
        """Yield the plugin's lists until its stream ends.

        Raises:
            CallError: why it ended, always.
        """
        if self._channel is None:
            raise CallError("grpc: the client connection is closing")
        calls: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            f"/{self._dialect.plugin_service}/ListAndWatch"
        )
        call = self._lists = calls(EMPTY)
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                yield self._dialect.decode_list(cast("bytes", data))
        except grpc.aio.AioRpcError as error:
            raise CallError(_status(error.code(), error.details())) from error
        except MalformedError as error:
            raise CallError(_UNDECODABLE) from error
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            raise CallError("the kubelet ended it") from None
        finally:
            call.cancel()
        raise CallError("EOF")

    async def ask_options(self) -> Options:
        """Call GetDevicePluginOptions."""
        try:
            return self._dialect.decode_options(await self._call("GetDevicePluginOptions", EMPTY))
        except MalformedError as error:
            raise CallError(_UNDECODABLE) from error

    async def allocate(self, ids: tuple[str, ...]) -> tuple[ContainerAnswer, ...]:
        """Call Allocate for one container."""
        request = self._dialect.encode_allocate_request([ContainerRequest(ids)]).data
        try:
            return self._dialect.decode_allocate_answer(await self._call("Allocate", request))
        except MalformedError as error:
            raise CallError(_UNDECODABLE) from error

    async def prefer(self, request: PreferredRequest) -> frozenset[str]:
        """Call GetPreferredAllocation for one container."""
        data = await self._call("GetPreferredAllocation", self._dialect.encode_preferred_request([request]).data)
        try:
            answer = self._dialect.decode_preferred_answer(data)
        except MalformedError as error:
            raise CallError(_UNDECODABLE) from error
        return frozenset(answer[0]) if answer else frozenset()

    async def pre_start(self, ids: tuple[str, ...]) -> None:
        """Call PreStartContainer."""
        await self._call("PreStartContainer", self._dialect.encode_pre_start_request(ids).data, PRE_START_SECONDS)

    @property
    def _dialect(self) -> Dialect:
        return by_name(self.behaviour.dialect)

    async def _call(self, method: str, request: bytes, seconds: float | None = None) -> bytes:
        if self.stopped_at is not None:
            raise CallError(f"endpoint {self.resource} {self.path} has been stopped")
        if self._channel is None:
            raise CallError("rpc error: code = Canceled desc = grpc: the client connection is closing")
        calls: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            f"/{self._dialect.plugin_service}/{method}"
        )
        call = calls(request, timeout=seconds)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise CallError(_status(error.code(), error.details())) from error
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                call.cancel()
                raise
            raise CallError("rpc error: code = Canceled desc = grpc: the client connection is closing") from None


def _cancelled_from_outside() -> bool:
    """Tell the cancelling of this task from that of the call alone, both of which gRPC shows as CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _status(code: grpc.StatusCode, details: str | None) -> str:
    """Spell a gRPC error as Go prints it."""
    word = "Canceled" if code is grpc.StatusCode.CANCELLED else code.name.title().replace("_", "")
    return f"rpc error: code = {word} desc = {details or ''}"


_UNDECODABLE = "rpc error: code = Internal desc = grpc: failed to unmarshal the received message unexpected EOF"
"""What grpc-go says of most bytes that are no message; for some it finds other words."""
