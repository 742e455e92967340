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
from gateway.telling import orders
from gateway.wires import control
from gateway.wires.control import ControlConnection, ControlError, ControlServer

SOCKET = "0123abcd"
PING: dict[str, Any] = {"v": 1, "op": "ping"}
PONG = {"v": 1, "pong": True}
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


async def converse(path: Path, sent: bytes) -> list[dict[str, Any]]:
    """Send raw bytes, then the end; return every answer until the server closes."""
    reader, writer = await asyncio.open_unix_connection(path)
    answers = []
    with contextlib.suppress(OSError):  # Closed by the server before it took everything.
        writer.write(sent)
        writer.write_eof()
        while line := await reader.readline():
            answers.append(msgspec.json.decode(line, type=dict[str, Any]))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return answers


def line(message: object) -> bytes:
    return msgspec.json.encode(message) + b"\n"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=200), st.just(b"\n"), st.just(line(PING)), st.just(b'{"v":1,"op":'))))
def test_garbage_is_survived(parts: list[bytes]) -> None:
    async def run(folder: Path) -> None:
        async with serving(folder) as server:
            await converse(server.path, b"".join(parts))
            assert await converse(server.path, line(PING)) == [PONG]

    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        asyncio.run(run(Path(folder)))


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


@pytest.mark.parametrize(
    ("rate", "times", "waits"),
    [
        pytest.param(4, [0, 0, 0, 0], [0, 0, 0, 0], id="a second's worth at once"),
        pytest.param(4, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0.25, 0.5], id="then one after the other"),
        pytest.param(4, [0, 0.25, 0.5, 0.75, 1, 1.25], [0, 0, 0, 0, 0, 0], id="who keeps the pace never waits"),
        pytest.param(4, [0, 0, 0, 0, 9, 9, 9, 9, 9], [0] * 8 + [0.25], id="rest isn't saved beyond a second's worth"),
    ],
)
def test_pace(rate: float, times: list[float], waits: list[float]) -> None:
    pace = control.Throttle(rate)
    assert [pace.wait(now) for now in times] == pytest.approx(waits)


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
    ("request_", "expected"),
    [
        pytest.param(
            {"v": 1, "op": "cordon", "id": "GPU-1", "reason": "ECC"},
            orders.Order("cordon", "GPU-1", "ECC"),
            id="cordon",
        ),
        pytest.param({"op": "uncordon", "id": "GPU-1"}, orders.Order("uncordon", "GPU-1"), id="uncordon"),
        pytest.param({"op": "forget", "id": "GPU-1", "reason": 7}, orders.Order("forget", "GPU-1"), id="forget"),
        pytest.param(
            {"op": "reset", "id": "GPU-1"}, "unknown order 'reset'. Allowed: cordon, uncordon, forget", id="another op"
        ),
        pytest.param({"op": "cordon", "id": "GPU-1"}, "not a reason", id="no reason"),
        pytest.param({"op": "cordon", "id": "GPU-1", "reason": "  "}, "not a reason", id="an empty reason"),
        pytest.param({"op": "cordon", "id": "GPU-1", "reason": "a\nb"}, "not a reason", id="a reason of two lines"),
        pytest.param({"op": "cordon", "id": "GPU-1", "reason": "\x1b[2J"}, "printable", id="a terminal's commands"),
        pytest.param({"op": "cordon", "id": "GPU-1", "reason": "x" * 257}, "at most 256", id="a long reason"),
        pytest.param({"op": "uncordon"}, "not a device ID", id="no ID"),
        pytest.param({"op": "uncordon", "id": 3}, "not a device ID", id="an ID that is no text"),
        pytest.param({"op": "uncordon", "id": "x" * 257}, "at most 256", id="a long ID"),
    ],
)
def test_order(request_: Mapping[str, Any], expected: orders.Order | str) -> None:
    if isinstance(expected, orders.Order):
        assert orders.order(request_) == expected
    else:
        with pytest.raises(ControlError, match=expected):
            orders.order(request_)


@given(st.dictionaries(st.sampled_from(["op", "id", "reason", "x"]), JSON | st.sampled_from(orders.ORDERS)))
def test_an_order_or_an_error(request_: dict[str, Any]) -> None:
    with contextlib.suppress(ControlError):
        read = orders.order(request_)
        assert (read.op, read.device_id) == (request_["op"], request_["id"])
        assert (read.device_id + read.reason).isprintable()


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param({"ids": []}, (), id="all"),
        pytest.param({"ids": ["GPU-1", "GPU-2", "GPU-1"]}, ("GPU-1", "GPU-2"), id="each once"),
        pytest.param({}, "Leave them out for all", id="nothing said is not all"),
        pytest.param({"ids": "GPU-1"}, "not a list", id="no list"),
        pytest.param({"ids": ["GPU-1"] * 129}, "at most 128", id="too many"),
        pytest.param({"ids": ["GPU-1", 7]}, "not a device ID", id="an ID that is no text"),
        pytest.param({"ids": ["\x1b[2J"]}, "printable", id="a terminal's commands"),
    ],
)
def test_ids_of_hardware(request_: Mapping[str, Any], expected: tuple[str, ...] | str) -> None:
    if isinstance(expected, tuple):
        assert orders.handle_ids(request_) == expected
    else:
        with pytest.raises(ControlError, match=expected):
            orders.handle_ids(request_)


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
