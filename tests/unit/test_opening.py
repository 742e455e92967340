"""Whoever ends while a gRPC server of its own begins to serve stops that server.

One that runs and is dropped keeps its socket, and whoever collects it as the process's last waits for its threads for ever
(``AioServer.__dealloc__`` of grpcio).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from gateway.bridge.sockets import Sockets
from gateway.dra.service import Service, serve
from gateway.wires.unix import listens
from tests.unit.test_requests import device_plugin


async def _plugin(path: Path) -> None:
    plugin = device_plugin(path.parent)
    try:
        await plugin.bind(path)
    finally:
        await plugin.close()


async def _driver(path: Path) -> None:
    await serve(lambda: Service(cast("Any", SimpleNamespace(name="gpu.nvidia.com"))), path)


async def _bridge(path: Path) -> None:
    sockets = Sockets(path.parents[1], cast("Any", None))
    assert not sockets.hinders()
    try:
        await sockets.keep_open()
    finally:
        assert not sockets.is_open
        await sockets.close()


@pytest.mark.parametrize("opens", [_plugin, _driver, _bridge])
async def test_a_server_that_begins_to_serve_is_stopped_by_who_is_cancelled(
    opens: Callable[[Path], Awaitable[None]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, made, servers = asyncio.Event(), grpc.aio.server, []

    def slow(**options: Any) -> Any:
        servers.append(server := made(**options))
        start = server.start

        async def begin() -> None:
            await start()
            began.set()
            await asyncio.Event().wait()

        server.start = begin  # type: ignore[method-assign]
        return server

    monkeypatch.setattr(grpc.aio, "server", slow)
    path = folder / "device-plugins" / "kubelet.sock"
    path.parent.mkdir(mode=0o750)
    opening = asyncio.ensure_future(opens(path))
    async with asyncio.timeout(20):
        await began.wait()
    assert any(map(listens, path.parent.iterdir()))
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    left = any(map(listens, path.parent.iterdir()))
    await asyncio.gather(*(server.stop(None) for server in servers))
    assert not left
