"""What no plugin can do to a gateway, with gRPC's own code between them: fill its memory, take its connections, or all of its time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from adapters.registry import by_name
from devices.model import Device
from gateway.bridge.peer import READ_PERIOD_S, _Newest
from gateway.bridge.sockets import folder_error
from gateway.wires.rpc import target
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Kubelet
from gateway_lab.plugins.played import Habits
from tests.unit.bridging import NIC, plugin

GOOD = "other.example/fpga"
GUARD_S = 10


@contextlib.asynccontextmanager
async def beside(folder: Path) -> AsyncIterator[tuple[GatewayProcess, Path]]:
    """A gateway with a good plugin that must not notice anything; give it and the socket where plugins register."""
    sockets = folder / "k" / "device-plugins"
    sockets.mkdir(parents=True)
    command = gateway_command(sockets, folder / "state", options=("--backend", "none", "--bridge", str(folder)))
    async with await Kubelet.launch("1.37", sockets) as kubelet, await GatewayProcess.launch(command) as gateway:
        await kubelet.start()
        await gateway.wait_for("plugins can register here")
        async with plugin(folder, resource=GOOD, endpoint="good.sock") as good:
            await kubelet.wait(GOOD, 2)
            yield gateway, good.folder / "kubelet.sock"
            await kubelet.admit("pod", GOOD, 1)
            assert good.lists == 1


async def test_a_list_that_is_small_until_it_is_unpacked_is_refused(folder: Path) -> None:
    bomb = by_name("v1beta1").encode_list([Device("d" * 200)]).data * 100_000
    async with beside(folder) as (gateway, _), plugin(folder, habits=Habits(compresses=True), raw_list=bomb):
        refused = await gateway.wait_for("a plugin's list is refused", resource=NIC)
        assert "Allowed: 4194304 bytes" in refused["reason"]


async def test_a_register_that_is_small_until_it_is_unpacked_is_refused(folder: Path) -> None:
    async with (
        beside(folder) as (_, path),
        grpc.aio.insecure_channel(target(path), compression=grpc.Compression.Gzip) as channel,
    ):
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1beta1.Registration/Register")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"\x0a\x00" * 20_000_000)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_connections_without_end_leave_the_others_alone(folder: Path) -> None:
    async with beside(folder) as (gateway, path):
        held = []
        for _ in range(600):
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            try:
                one.connect(str(path))
            except BlockingIOError:
                one.close()
                await asyncio.sleep(0.01)
            else:
                held.append(one)
        for one in held:
            one.close()
        async with asyncio.timeout(GUARD_S), grpc.aio.insecure_channel(target(path)) as channel:
            await channel.channel_ready()  # It was noticed that they went.
        async with plugin(folder):
            await gateway.wait_for("a plugin registered", resource=NIC)


async def _ended(rests: float) -> _Newest:
    """What a stream said that has ended."""
    newest, sent = _Newest(lambda: rests), iter([b"x"])
    await newest.read(SimpleNamespace(read=lambda: _soon(next(sent, None))))  # type: ignore[arg-type]
    return newest


async def _soon(said: object) -> object:
    return said


async def test_small_lists_without_end_leave_time_for_others() -> None:
    sent = iter([b"x"] * 6)
    began = time.monotonic()
    await _Newest(lambda: 0.0).read(SimpleNamespace(read=lambda: _soon(next(sent, None))))  # type: ignore[arg-type]
    assert time.monotonic() - began >= (1 + 2 + 4 + 8 + 16 + 16) * READ_PERIOD_S, "nobody takes them"


async def test_the_last_of_a_flood_of_small_lists_is_read_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds wait in a stream by then: after pauses that go on doubling it would come when the node has long changed."""
    pauses: list[float] = []

    async def slept(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", slept)
    sent = iter([b"x"] * 200)
    await _Newest(lambda: 0.0).read(SimpleNamespace(read=lambda: _soon(next(sent, None))))  # type: ignore[arg-type]
    assert len(pauses) == 200
    assert sum(pauses) <= 200 * 16 * READ_PERIOD_S


async def test_who_ends_while_it_rests_is_not_read() -> None:
    """Else it would register anew after each list, and never rest. Its end is known at once."""
    assert await (await _ended(-1.0)).take() == b"x"
    assert await (await _ended(3600.0)).take() is None


@pytest.mark.parametrize(("owner", "ours"), [(0, True), (os.geteuid(), True), (os.geteuid() + 1, False)])
def test_a_folder_is_roots_or_ones_own(owner: int, *, ours: bool) -> None:
    found = SimpleNamespace(st_mode=stat.S_IFDIR | 0o750, st_uid=owner)
    one: Any = SimpleNamespace(mkdir=lambda **_: None, stat=lambda **_: found)
    assert ("can be written to by users other" in folder_error(one)) is not ours
