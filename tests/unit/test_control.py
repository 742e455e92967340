"""The control socket: who is heard by the kernel's word, what is read of a request, and that garbage and haste do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.replicas import grouped, unshared
from gateway.wires import control
from gateway.wires.control import ControlConnection, ControlServer

SOCKET = "0123abcd"
PING: dict[str, Any] = {"v": 1, "op": "ping"}
GUARD = 10.0
"""Seconds after which a test that waits for ever is told so."""


async def _ping(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    await connection.send({"pong": True})


async def _echo(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    while (message := await connection.receive()) is not None:
        await connection.send({"echo": message})


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[ControlServer]:
    server = ControlServer(control.socket_path(folder, SOCKET), {"ping": _ping, "echo": _echo})
    await server.start()
    try:
        async with asyncio.timeout(GUARD):
            yield server
    finally:
        await server.close()


def line(message: object) -> bytes:
    return msgspec.json.encode(message) + b"\n"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), min_size=1, max_size=3))
def test_what_is_sent_arrives(messages: list[dict[str, Any]]) -> None:
    async def run(folder: Path) -> list[Any]:
        async with serving(folder) as server:
            connection = await control.connect(server.path, 1)
            await connection.send({"op": "echo"})
            answers = []
            for message in messages:
                await connection.send(message)
                answers.append(await connection.receive())
            await connection.finish()
            return answers

    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        assert asyncio.run(run(Path(folder))) == [{"v": 1, "echo": message | {"v": 1}} for message in messages]


def _let_everybody_in(path: Path) -> None:
    """Loosen the modes, so that the kernel's word alone decides."""
    path.parent.chmod(0o755)
    path.chmod(0o666)


def _knock(path: Path, user: int | None) -> socket.socket:
    """Connect as ``user``: the kernel notes who one is at connect."""
    client = socket.socket(socket.AF_UNIX)
    if user is not None:
        os.seteuid(user)
    try:
        client.connect(os.fspath(path))
    finally:
        if user is not None:
            os.seteuid(0)
    return client


@pytest.mark.root
@pytest.mark.parametrize("heard", [pytest.param(True, id="our own user"), pytest.param(False, id="another user")])
async def test_who_is_heard(folder: Path, heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as root another user knocks; run as anybody else, the gateway is another user than the one who knocks."""
    root = os.geteuid() == 0
    async with serving(folder) as server:
        _let_everybody_in(server.path)
        if not heard and not root:
            own = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        client = _knock(server.path, 65534 if root and not heard else None)
        reader, writer = await asyncio.open_unix_connection(sock=client)
        writer.write(line(PING))
        assert await _until_closed(reader, stop=b"\n") == (line({"pong": True, "v": 1}) if heard else b"")
        writer.close()


@pytest.mark.parametrize(
    ("user", "heard"),
    [
        pytest.param(os.geteuid, True, id="our own user"),
        pytest.param(lambda: 0, True, id="root"),
        pytest.param(lambda: os.geteuid() + 1, False, id="another user"),
    ],
)
def test_the_kernels_word_decides(user: Any, heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_user", lambda _partner: user())
    assert control._may_talk(None) is heard


def test_so_many_sockets_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MAX_SOCKETS", 2)
    for number in range(3):
        (folder / f"0000000{number}.sock").touch()
    assert [path.name for path in control._named_as_ours(folder)] == ["00000000.sock", "00000001.sock"]


@pytest.mark.parametrize(
    ("device_id", "expected"),
    [
        ("GPU-1::0", "GPU-1"),
        ("GPU-1::12", "GPU-1"),
        ("GPU-1", "GPU-1"),
        ("GPU-1::x", "GPU-1::x"),
        ("GPU-1::", "GPU-1::"),
        ("GPU-1::٣", "GPU-1::٣"),
        ("::1", "::1"),
        ("known::1", "known::1"),
        ("known::1::0", "known::1"),
    ],
)
def test_unshared(device_id: str, expected: str) -> None:
    """One alone, and of many."""
    assert unshared(device_id, {"known::1"}) == expected
    assert grouped((device_id,), {"known::1"}) == {expected: [device_id]}


async def _until_closed(reader: asyncio.StreamReader, stop: bytes = b"") -> bytes:
    """Read to the end, or to ``stop``; a connection that was cut counts as ended."""
    read = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1):
            read += part
            if part == stop:
                break
    return read
