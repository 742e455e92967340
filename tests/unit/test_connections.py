"""What strangers may hold of each server: so many calls and so much metadata on a connection, and no stream of the kubelet's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from adapters.v1beta1 import V1BETA1
from gateway.dra.service import Service
from gateway.registration import serve
from gateway.wires.rpc import target
from tests.unit.bridging import bridged
from tests.unit.test_requests import code, device_plugin, silent

GUARD_S = 20
CALLS, WINDOW, METADATA = 3, 4, 6
"""Settings of HTTP/2 (RFC 9113, section 6.5.2)."""
Server = Callable[[Path], AbstractAsyncContextManager[Path]]


@asynccontextmanager
async def of_a_resource(folder: Path) -> AsyncIterator[Path]:
    resource = device_plugin(folder)
    await resource.bind(folder / "gpu.sock")
    resource.offer(V1BETA1)
    try:
        yield folder / "gpu.sock"
    finally:
        await resource.close()


@asynccontextmanager
async def of_the_bridge(folder: Path) -> AsyncIterator[Path]:
    async with bridged(folder):
        yield folder / "device-plugins" / "kubelet.sock"


@asynccontextmanager
async def of_a_driver(folder: Path) -> AsyncIterator[Path]:
    one = Service(cast("Any", SimpleNamespace(name="gpu.nvidia.com")))
    await one.start(folder / "dra.sock")
    try:
        yield folder / "dra.sock"
    finally:
        await one.stop()


async def settings(socket: Path) -> dict[int, int]:
    """Begin a connection; return what the server's first frame allows on it."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        async with asyncio.timeout(GUARD_S):
            head = await reader.readexactly(9)
            assert head[3] == 4  # SETTINGS
            body = await reader.readexactly(int.from_bytes(head[:3], "big"))
    finally:
        writer.transport.abort()
    parts = [body[at : at + 6] for at in range(0, len(body), 6)]
    return {int.from_bytes(part[:2], "big"): int.from_bytes(part[2:], "big") for part in parts}


@pytest.mark.parametrize(
    ("server", "calls"),
    [
        pytest.param(of_a_resource, 16, id="a resource"),
        pytest.param(of_the_bridge, 8, id="the bridge"),
        pytest.param(of_a_driver, 256, id="a DRA driver"),
    ],
)
async def test_a_connection_has_so_many_calls_and_so_much_metadata(folder: Path, server: Server, calls: int) -> None:
    async with server(folder) as socket:
        said = await settings(socket)
    assert said[CALLS] == calls
    assert said[METADATA] <= 16 * 1024
    assert said.get(WINDOW, 65535) <= 65535


@pytest.mark.parametrize("server", [of_a_resource, of_the_bridge], ids=["a resource", "the bridge"])
async def test_more_metadata_is_refused(folder: Path, server: Server) -> None:
    async with server(folder) as socket, grpc.aio.insecure_channel(target(socket)) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1beta1.Registration/Register")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", timeout=GUARD_S, metadata=[("x", "y" * 20_000)])
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_beyond_the_most_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_CALLS", 1)
    async with of_a_resource(folder) as socket, grpc.aio.insecure_channel(target(socket)) as channel:
        first = silent(channel)
        async with asyncio.timeout(GUARD_S):
            await first.wait_for_connection()
            while await code(channel, "Allocate", b"") is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                pass  # The first one wasn't there yet.
        first.cancel()
