"""The control socket, over real sockets: who is heard, what is answered, and that nobody can make it grow or wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import stat
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.typing import EventDict

from devices.life.states import Entry, State
from devices.model import ContainerAnswer, ContainerRequest, Device, PreferredRequest, Sayable, Trouble
from devices.policy import Policy
from devices.replicas import grouped, unshared
from devices.source import DeviceSource, Facts, Fate, Inventory, Listing
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.kubelet.watch import CHECKPOINT
from gateway.lab.gatewayproc import BEGUN
from gateway.registration.devicelist import DeviceList
from gateway.tally import Tally
from gateway.tasks import Tasks
from gateway.telling import commands as told
from gateway.telling import listeners, orders, status
from gateway.telling.commands import Commands
from gateway.wires import control
from gateway.wires.control import ControlConnection, ControlError, ControlServer

TOKEN, OTHER = "0123abcd", "4567ef01"
PING: dict[str, Any] = {"v": 1, "op": "ping"}
PONG = {"v": 1, "pong": True}
GUARD = 10.0
"""Seconds after which a test that waits for ever is told so."""


async def _ping(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    await connection.send({"pong": True})


async def _refuse(_connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    raise ControlError("no such device")


async def _fail(_connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    raise ValueError("a defect")


async def _lease(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    """Echo what comes, for as long as the partner is there."""
    while (message := await connection.receive()) is not None:
        await connection.send({"echo": message})


HANDLERS: dict[str, control.Handler] = {"ping": _ping, "refuse": _refuse, "fail": _fail, "lease": _lease}


@contextlib.asynccontextmanager
async def serving(folder: Path, handlers: Mapping[str, control.Handler] = HANDLERS) -> AsyncIterator[ControlServer]:
    """Run a server; at its end, no exception was left to the event loop."""
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, trouble: troubles.append(trouble))
    server = ControlServer(control.socket_path(folder, TOKEN), handlers)
    await server.start()
    try:
        async with asyncio.timeout(GUARD):
            yield server
    finally:
        await server.close()
    gc.collect(0)
    assert troubles == []


@contextlib.asynccontextmanager
async def talking(server: ControlServer) -> AsyncIterator[ControlConnection]:
    connection = await control.connect(server.path, 1)
    try:
        yield connection
    finally:
        await connection.finish()


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


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def line(message: object) -> bytes:
    return msgspec.json.encode(message) + b"\n"


REQUESTS = [
    pytest.param(line(PING), [PONG], id="a known op"),
    pytest.param(line(PING) * 3, [PONG] * 3, id="one request after the other"),
    pytest.param(line(PING | {"since": "release N+1"}), [PONG], id="a field of a later release is ignored"),
    pytest.param(line({"v": 1, "op": "dance"}) + line(PING), ["unknown op 'dance'", PONG], id="an unknown op"),
    pytest.param(
        line({"v": 1, "op": ["ping"]}) + line(PING), ["unknown op ['ping']", PONG], id="an op that is no text"
    ),
    pytest.param(line({"v": 2, "op": "ping"}) + line(PING), ["of version 1, got 2", PONG], id="another version"),
    pytest.param(line({"op": "ping"}) + line(PING), ["of version 1, got None", PONG], id="no version"),
    pytest.param(line({"v": 1, "op": "refuse"}) + line(PING), ["no such device", PONG], id="a refused request"),
    pytest.param(line({"v": 1, "op": "fail"}) + line(PING), ["its log says how", PONG], id="a defect in a handler"),
    pytest.param(b"no JSON\n" + line(PING), [], id="no JSON: closed"),
    pytest.param(line([PING]) + line(PING), [], id="no object: closed"),
    pytest.param(b"[" * 60_000 + b"\n" + line(PING), [], id="nested without end: closed"),
    pytest.param(b'{"v": 1, "op": "\xff"}\n' + line(PING), [], id="no UTF-8: closed"),
    pytest.param(line(PING | {"x": "y" * control.REQUEST_LIMIT}) + line(PING), [], id="a line too long: closed"),
    pytest.param(line(PING)[:-1], [], id="half a line is no message"),
    pytest.param(b"", [], id="nothing at all"),
]


@pytest.mark.parametrize(("sent", "expected"), REQUESTS)
async def test_request(folder: Path, sent: bytes, expected: list[Any]) -> None:
    async with serving(folder) as server:
        answers = await converse(server.path, sent)
        assert len(answers) == len(expected)
        for answer, wanted in zip(answers, expected, strict=True):
            assert answer == wanted if isinstance(wanted, dict) else wanted in answer["error"]
        assert await converse(server.path, line(PING)) == [PONG]  # And it lives.


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=200), st.just(b"\n"), st.just(line(PING)), st.just(b'{"v":1,"op":'))))
def test_garbage_is_survived(parts: list[bytes]) -> None:
    async def run(folder: Path) -> None:
        async with serving(folder) as server:
            await converse(server.path, b"".join(parts))
            assert await converse(server.path, line(PING)) == [PONG]
            await asyncio.gather(*server._open)
            assert not server._open

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
        async with serving(folder) as server, talking(server) as connection:
            await connection.send({"op": "lease"})
            answers = []
            for message in messages:
                await connection.send(message)
                answers.append(await connection.receive())
            return answers

    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        assert asyncio.run(run(Path(folder))) == [{"v": 1, "echo": message | {"v": 1}} for message in messages]


# Bounded.


async def test_an_idle_connection_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "IDLE_TIME", 0.02)
    async with serving(folder) as server, talking(server) as connection:
        assert await connection.receive() is None


async def test_half_a_line_does_not_keep_a_connection_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "IDLE_TIME", 0.02)
    async with serving(folder) as server:
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(b'{"v": 1')
        assert await _until_closed(reader) == b""
        writer.close()


async def test_a_lease_stays_open_for_as_long_as_its_handler_wants(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "IDLE_TIME", 0.02)
    async with serving(folder) as server, talking(server) as lease, talking(server) as other:
        await lease.send({"op": "lease"})
        assert await other.receive() is None  # Idle: closed.
        await lease.send({"still": "here"})
        assert await lease.receive() == {"v": 1, "echo": {"v": 1, "still": "here"}}


async def test_a_client_that_never_reads_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "WRITE_TIME", 0.05)
    ended: asyncio.Future[ControlError] = asyncio.get_running_loop().create_future()

    async def pour(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
        try:
            while True:
                await connection.send({"much": "x" * 100_000})
        except ControlError as error:
            assert connection.closed, "half a message may be out"
            ended.set_result(error)
            raise

    async with serving(folder, {"pour": pour, "ping": _ping}) as server:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(server.path))
            client.send(line({"v": 1, "op": "pour"}))
            assert "did not take a message" in str(await ended)
            await asyncio.gather(*server._open)
            assert not server._open
            assert await converse(server.path, line(PING)) == [PONG]


async def test_of_a_hundred_connections_sixteen_are_served(folder: Path) -> None:
    async with serving(folder) as server:
        connections = await asyncio.gather(*(control.connect(server.path, 5) for _ in range(100)))
        for connection in connections:
            with contextlib.suppress(ControlError):  # Closed already.
                await connection.send(PING)
        answers = [await connection.receive() for connection in connections]
        assert answers.count(PONG) == control.MAX_CONNECTIONS == 16
        assert all("try again later" in answer["error"] for answer in answers if answer and answer != PONG)
        for connection in connections:
            await connection.finish()
        await asyncio.gather(*server._open)
        assert await converse(server.path, line(PING)) == [PONG]


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


async def test_each_message_takes_its_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its connection's own pace and of everybody's; and a new connection one of everybody's."""
    turns: list[float] = []

    def wait(self: control.Throttle, _now: float) -> float:
        turns.append(round(1 / self._step))
        return 0

    monkeypatch.setattr(control.Throttle, "wait", wait)
    async with serving(folder) as server:
        await converse(server.path, line(PING) * 3)
    assert turns == [200, *[50, 200] * 3]


async def test_an_answer_that_is_too_long_is_an_error(folder: Path) -> None:
    async def much(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
        await connection.send({"much": "x" * control.REPLY_LIMIT})

    async with serving(folder, {"much": much}) as server:
        with pytest.raises(ControlError, match="at most 16777216 bytes"):
            await control.ask(server.path, {"op": "much"}, 5)


async def test_a_long_message_is_written_a_piece_at_a_time() -> None:
    """The next one goes when the one before was taken."""
    writer = Mock(asyncio.StreamWriter, **{"is_closing.return_value": False})
    await ControlConnection(Mock(), writer).send({"much": "x" * 3 * control.PIECE})
    pieces = [call.args[0] for call in writer.method_calls if call[0] == "write"]
    assert [one[0] for one in writer.method_calls if one[0] != "is_closing"] == ["write", "drain"] * 4
    assert max(map(len, pieces)) == control.PIECE
    assert b"".join(pieces) == line({"much": "x" * 3 * control.PIECE, "v": 1})


async def test_ten_thousand_devices_fit_an_answer(folder: Path) -> None:
    devices = [{"id": f"GPU-{number:036}::0", "state": "unhealthy", "reason": "r" * 256} for number in range(10_000)]

    async def status(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
        await connection.send({"devices": devices})

    async with serving(folder, {"status": status}) as server:
        assert (await control.ask(server.path, {"op": "status"}, 5))["devices"] == devices


# Who is heard.


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


async def test_it_is_ours_alone_before_it_can_be_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask: not to be connected to before its mode is 0600, and not under its name before it listens."""
    seen: list[tuple[str, int]] = []
    listen = socket.socket.listen

    def watched(self: socket.socket, *arguments: int) -> None:
        [entry] = folder.iterdir()
        seen.append((entry.name, stat.S_IMODE(entry.stat().st_mode)))
        listen(self, *arguments)

    monkeypatch.setattr(socket.socket, "listen", watched)
    umask = os.umask(0)
    try:
        async with serving(folder) as server:
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    finally:
        os.umask(umask)
    assert seen == [(f".{TOKEN}.sock", 0o600)]


# Start and end.


async def test_the_state_directory_is_made_for_us_alone(folder: Path) -> None:
    async with serving(folder / "state") as server:
        assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("d" * 100, "at most 107 bytes", id="a path too long"),
        pytest.param("file", "File exists", id="a state directory that is none"),
    ],
)
async def test_a_socket_that_cannot_be_had(folder: Path, name: str, says: str) -> None:
    (folder / "file").write_text("")
    server = ControlServer(control.socket_path(folder / name, TOKEN), HANDLERS)
    with pytest.raises(ControlError, match=says):
        await server.start()
    assert names(folder) == {"file"}
    await server.close()


async def test_a_failed_start_leaves_nothing(folder: Path) -> None:
    control.socket_path(folder, TOKEN).mkdir()  # It can't be renamed to this.
    server = ControlServer(control.socket_path(folder, TOKEN), HANDLERS)
    with pytest.raises(ControlError, match="Make --state-dir writable"):
        await server.start()
    assert names(folder) == {f"{TOKEN}.sock"}


def _leave(path: Path, *, hours_ago: float = 0) -> None:
    """Leave a socket that nobody listens on, as a killed gateway does."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fspath(path))
    moment = path.stat().st_mtime - hours_ago * 3600
    os.utime(path, (moment, moment))


async def test_what_dead_gateways_left_is_removed(folder: Path) -> None:
    _leave(folder / "00000000.sock")
    _leave(folder / ".11111111.sock", hours_ago=1)
    kept = {".22222222.sock", "33333333.sock", "ledger.json", "foreign.sock", f"{OTHER}.sock", f"{TOKEN}.sock"}
    _leave(folder / ".22222222.sock")  # Perhaps another gateway makes it right now.
    (folder / "33333333.sock").write_text("no socket")
    (folder / "ledger.json").write_text("{}")
    _leave(folder / "foreign.sock")
    living = ControlServer(control.socket_path(folder, OTHER), HANDLERS)
    await living.start()
    async with serving(folder):
        assert names(folder) == kept
    await living.close()


async def test_the_sockets_of_living_gateways(folder: Path) -> None:
    _leave(folder / "00000000.sock")
    (folder / "ledger.json").write_text("{}")
    async with serving(folder) as server:
        assert control.sockets(folder) == [server.path]
    assert control.sockets(folder) == []


def test_so_many_sockets_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MAX_SOCKETS", 2)
    for number in range(3):
        (folder / f"0000000{number}.sock").touch()
    assert [path.name for path in control._named_as_ours(folder)] == ["00000000.sock", "00000001.sock"]


@pytest.mark.parametrize(
    ("name", "says"), [("missing", None), pytest.param("file", "Correct --state-dir", id="a folder that can't be read")]
)
def test_sockets_where_there_can_be_none(folder: Path, name: str, says: str | None) -> None:
    (folder / "file").write_text("")
    with contextlib.nullcontext() if says is None else pytest.raises(ControlError, match=says):
        assert control.sockets(folder / name) == []


async def test_the_end_ends_every_conversation(folder: Path) -> None:
    async with serving(folder) as server, talking(server) as lease, talking(server) as idle:
        await lease.send({"op": "lease"})
        await lease.send({})
        await lease.receive()
        await server.close()
        assert [await lease.receive(), await idle.receive()] == [None, None]
        assert names(folder) == set()
        await server.close()  # Twice does no harm.


# The asking side.


async def test_an_answer_is_returned_and_a_refusal_raised(folder: Path) -> None:
    async with serving(folder) as server:
        assert await control.ask(server.path, {"op": "ping"}, 5) == PONG
        with pytest.raises(ControlError, match="no such device"):
            await control.ask(server.path, {"op": "refuse"}, 5)


@pytest.mark.parametrize(
    ("partner", "says"),
    [
        pytest.param(None, "no gateway takes connections", id="nobody there"),
        pytest.param("dead", "no gateway takes connections", id="a dead gateway's socket"),
        pytest.param("stopped", r"did not answer within 0\.05 s", id="a gateway that is stopped"),
        pytest.param("mute", "closed the connection without an answer", id="a gateway that closes"),
    ],
)
async def test_ask_without_an_answer(folder: Path, partner: str | None, says: str) -> None:
    path = control.socket_path(folder, TOKEN)

    async def mute(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
        connection.close()

    async with contextlib.AsyncExitStack() as stack:
        if partner == "dead":
            _leave(path)
        if partner == "stopped":
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(os.fspath(path))
            listener.listen()
        if partner == "mute":
            await stack.enter_async_context(serving(folder, {"ping": mute}))
        with pytest.raises(ControlError, match=says):
            await control.ask(path, {"op": "ping"}, 0.05 if partner == "stopped" else 5)


async def test_nothing_is_sent_on_a_closed_connection(folder: Path) -> None:
    async with serving(folder) as server, talking(server) as connection:
        connection.close()
        with pytest.raises(ControlError, match="is closed"):
            await connection.send(PING)


# What commands ask.


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
        pytest.param({"op": "reset", "id": "GPU-1"}, "expected one of cordon, uncordon, forget", id="another op"),
        pytest.param({"op": "cordon", "id": "GPU-1"}, "expected a reason", id="no reason"),
        pytest.param({"op": "cordon", "id": "GPU-1", "reason": "  "}, "expected a reason", id="an empty reason"),
        pytest.param(
            {"op": "cordon", "id": "GPU-1", "reason": "a\nb"}, "expected a reason", id="a reason of two lines"
        ),
        pytest.param({"op": "cordon", "id": "GPU-1", "reason": "\x1b[2J"}, "printable", id="a terminal's commands"),
        pytest.param({"op": "cordon", "id": "GPU-1", "reason": "x" * 257}, "at most 256", id="a long reason"),
        pytest.param({"op": "uncordon"}, "expected a device ID", id="no ID"),
        pytest.param({"op": "uncordon", "id": 3}, "expected a device ID", id="an ID that is no text"),
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
        pytest.param({}, "leave them out for all", id="nothing said is not all"),
        pytest.param({"ids": "GPU-1"}, "expected a list", id="no list"),
        pytest.param({"ids": ["GPU-1"] * 129}, "at most 128", id="too many"),
        pytest.param({"ids": ["GPU-1", 7]}, "expected a device ID", id="an ID that is no text"),
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


# What a gateway answers that runs.

GPU, PART = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"
WHOLE = Facts(product="A100", index="0", links={"1": "nvlink x12"})
PIECE = Facts(product="A100", index="1:0", parent="GPU-b", profile="1g.5gb")


class Hardware(DeviceSource):
    """A ``DeviceSource`` with a GPU that is shared, and one in two parts."""

    name = "hardware"

    def __init__(self) -> None:
        self.told: list[tuple[str, list[str]]] = []
        self.hangs = False
        self.parts, self.changed = ["MIG-0", "MIG-1"], asyncio.Event()

    async def watch(self) -> AsyncGenerator[Inventory]:
        while True:
            self.changed.clear()
            yield {
                GPU: Listing((Device("GPU-a::0", numa_nodes=(1,)), Device("GPU-a::1"))),
                PART: Listing(tuple(map(Device, self.parts))),
            }
            await self.changed.wait()

    async def answer(self, resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        return ContainerAnswer()

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        return request.available[: request.size]

    def fate(self, resource: str, device_id: str) -> Fate:
        return Fate.LOST

    def claims(self, resource: str) -> bool:
        return True

    def facts(self, resource: str) -> Callable[[str], Facts]:
        return lambda _: WHOLE if resource == GPU else PIECE

    def adopt(self, policy: Policy) -> None:
        pass

    async def release(self, device_ids: Collection[str]) -> Collection[str]:
        return await self._take("release", device_ids)

    async def acquire(self, device_ids: Collection[str]) -> Collection[str]:
        return await self._take("acquire", device_ids)

    async def _take(self, op: str, device_ids: Collection[str]) -> Collection[str]:
        self.told.append((op, list(device_ids)))
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        return device_ids or ("GPU-a::0", "GPU-a::1", "MIG-0", "MIG-1")


@contextlib.asynccontextmanager
async def a_gateway(folder: Path, source: DeviceSource) -> AsyncIterator[Path]:
    """Run a whole gateway, without a kubelet; a container holds GPU-a::1 by the checkpoint. Yield its control socket."""
    serving = asyncio.Event()

    def heard(_logger: object, _level: str, event: EventDict) -> EventDict:
        if event["event"] in BEGUN:
            serving.set()
        raise structlog.DropEvent

    entry = {"PodUID": "u", "ContainerName": "main", "ResourceName": GPU, "DeviceIDs": ["GPU-a::1"], "AllocResp": ""}
    (folder / "dp").mkdir()
    (folder / "dp" / CHECKPOINT).write_bytes(
        msgspec.json.encode({"PodDeviceEntries": [entry], "RegisteredDevices": {}})
    )
    structlog.configure(processors=[heard])
    gateway = Gateway(Settings(socket_dir=folder / "dp", state_dir=folder / "state"), source)
    run = asyncio.ensure_future(gateway.run())
    try:
        async with asyncio.timeout(GUARD):
            await serving.wait()
            [path] = control.sockets(folder / "state")
            yield path
    finally:
        gateway._end(0)
        assert await run == 0
        structlog.reset_defaults()


async def test_devices_are_told_as_in_the_status_with_what_is_known_of_each(folder: Path) -> None:
    """The status, and what is known of each device: of replicas once."""
    async with a_gateway(folder, Hardware()) as path:
        answer = await control.ask(path, {"op": "devices"}, 5)
        status = (await control.ask(path, {"op": "status"}, 5))["status"]
    assert msgspec.convert(answer["facts"], dict[str, dict[str, Facts]]) == {
        GPU: {"GPU-a": WHOLE},
        PART: {"MIG-0": PIECE, "MIG-1": PIECE},
    }
    assert [one["devices"] for one in answer["status"]["resources"]] == [one["devices"] for one in status["resources"]]
    [shared, _] = sorted(answer["status"]["resources"], key=lambda one: str(one["name"]))
    assert [(one["id"], one["holder"]) for one in shared["devices"]] == [("GPU-a::0", None), ("GPU-a::1", "u/main")]


@pytest.mark.parametrize("op", ["status", "devices"])
async def test_many_devices_are_told_of_beside_the_loop_and_to_one_at_a_time(
    folder: Path, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks second is let in only when the first one's document is there; the loop goes on meanwhile."""
    loop, asked, second, say = asyncio.get_running_loop(), [0], asyncio.Event(), status.resource
    taken: list[int] = []
    said: list[int] = []
    look, take = Commands._look, Commands.taken

    async def looked(commands: Commands) -> None:
        await look(commands)
        asked[0] += 1
        if asked[0] == 2:
            loop.call_soon(second.set)

    def began(commands: Commands, *args: bool, **keys: bool) -> object:
        taken.append(0)
        return take(commands, *args, **keys)

    async def both_asked() -> int:
        await second.wait()
        return len(taken)

    def slow(*args: Any, **keys: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        if not said:
            said.append(0)
            assert asyncio.run_coroutine_threadsafe(both_asked(), loop).result(GUARD) == 1
        return say(*args, **keys)

    class Slow(Hardware):
        def facts(self, resource: str) -> Callable[[str], Facts]:
            assert threading.current_thread() is threading.main_thread()
            return partial(slow_facts, super().facts(resource))

    def slow_facts(known: Callable[[str], Facts], device_id: str) -> Facts:
        assert threading.current_thread() is not threading.main_thread()
        return known(device_id)

    async with a_gateway(folder, Slow()) as path:
        monkeypatch.setattr(told, "AT_ONCE", 3)
        monkeypatch.setattr(Commands, "_look", looked)
        monkeypatch.setattr(Commands, "taken", began)
        monkeypatch.setattr(status, "resource", slow)
        first, other = await asyncio.gather(*(control.ask(path, {"op": op}, GUARD) for _ in range(2)))
    assert first["status"]["resources"] == other["status"]["resources"]


@pytest.mark.parametrize("op", orders.HANDLES)
@pytest.mark.parametrize(
    ("ids", "meant", "concerned"),
    [
        pytest.param([], [], ["GPU-a::0", "GPU-a::1", "MIG-0", "MIG-1"], id="all"),
        pytest.param(["MIG-1"], ["MIG-1"], ["MIG-1"], id="a device"),
        pytest.param(["GPU-a"], ["GPU-a::0", "GPU-a::1"], ["GPU-a::0", "GPU-a::1"], id="what replicas share"),
        pytest.param(["GPU-b", "MIG-0"], ["MIG-0", "MIG-1"], ["MIG-0", "MIG-1"], id="what parts are of"),
    ],
)
async def test_hardware_is_let_go_of_and_looked_at_again(
    folder: Path, op: str, ids: list[str], meant: list[str], concerned: list[str]
) -> None:
    source = Hardware()
    async with a_gateway(folder, source) as path:
        answer = msgspec.convert(await control.ask(path, {"op": op, "ids": ids}, 5), orders.Handled)
    assert source.told == [(op, meant)]
    held = {"GPU-a::1": "u/main"}
    assert answer == orders.Handled(tuple(concerned), held if "GPU-a::1" in concerned else {})


def test_what_is_told_of_a_list_is_what_it_was_when_that_was_taken() -> None:
    """A thread goes through it while a device is forgotten."""
    shown = DeviceList(GPU, Tally(), grace=False)
    shown.becomes(None, (Entry(Device("GPU-a"), State.PRESENT), Entry(Device("GPU-b"), State.LOST)))
    taken = shown.entries
    shown.forget("GPU-b")
    assert [*taken] == ["GPU-a", "GPU-b"]
    assert [*shown.entries] == ["GPU-a"]


async def test_of_many_devices_those_are_let_go_of_that_are_there_when_it_is_carried_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another part of the GPU is listed while it is found out, beside the loop, which devices are meant."""
    loop, listed, becomes, asked = asyncio.get_running_loop(), asyncio.Event(), DeviceList.becomes, 0

    def became(one: DeviceList, *lists: Any) -> bool:
        news = becomes(one, *lists)
        if "MIG-2" in one.entries:
            listed.set()
        return news

    class Partitioned(Hardware):
        def facts(self, resource: str) -> Callable[[str], Facts]:
            return partial(self._known, super().facts(resource))

        def _known(self, known: Callable[[str], Facts], device_id: str) -> Facts:
            nonlocal asked
            assert threading.current_thread() is not threading.main_thread()
            asked += 1
            if asked == 1:
                asyncio.run_coroutine_threadsafe(self._grow(), loop).result(GUARD)
            return known(device_id)

        async def _grow(self) -> None:
            self.parts.append("MIG-2")
            self.changed.set()
            await listed.wait()

    source = Partitioned()
    async with a_gateway(folder, source) as path:
        monkeypatch.setattr(told, "AT_ONCE", 3)
        monkeypatch.setattr(DeviceList, "becomes", became)
        await control.ask(path, {"op": "release", "ids": ["GPU-b"]}, GUARD)
    assert source.told == [("release", ["MIG-0", "MIG-1", "MIG-2"])]


@pytest.mark.parametrize(
    ("ids", "hangs", "says"),
    [
        pytest.param(
            ["GPU-7"], False, "no device here is called 'GPU-7': `gateway devices` lists them", id="an unknown ID"
        ),
        pytest.param(["GPU-a", "GPU-7"], False, "no device here is called 'GPU-7'", id="one that is unknown"),
        pytest.param(None, False, "leave them out for all", id="no IDs at all"),
        pytest.param(["GPU-a"], True, "did not answer within 0.05 s", id="a driver that hangs"),
    ],
)
async def test_hardware_is_not_touched(
    folder: Path, ids: list[str] | None, hangs: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "HANDLE_TIME", 0.05)
    source = Hardware()
    source.hangs = hangs
    async with a_gateway(folder, source) as path:
        with pytest.raises(ControlError, match=says):
            await control.ask(path, {"op": "release", "ids": ids}, 5)
    assert bool(source.told) is hangs


async def test_ten_thousand_devices_with_all_facts_fit_an_answer(folder: Path) -> None:
    facts = replace(WHOLE, links={str(number): "nvlink x12" for number in range(8)}, nodes=("/dev/nvidia0",) * 4)
    reason = "r" * 256

    class Large(Hardware):
        async def watch(self) -> AsyncGenerator[Inventory]:
            found = tuple(Device(f"GPU-{number:036}") for number in range(10_000))
            yield {GPU: Listing(found, troubles={device.id: Trouble(reason) for device in found})}
            await asyncio.get_running_loop().create_future()

        def facts(self, resource: str) -> Callable[[str], Facts]:
            return lambda _: facts

    async with a_gateway(folder, Large()) as path:
        answer = await control.ask(path, {"op": "devices"}, 5)
    assert len(answer["facts"][GPU]) == len(answer["status"]["resources"][0]["devices"]) == 10_000


async def _until_closed(reader: asyncio.StreamReader, stop: bytes = b"") -> bytes:
    """Read to the end, or to ``stop``; a connection that was cut counts as ended."""
    read = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1):
            read += part
            if part == stop:
                break
    return read


@pytest.mark.parametrize("closed", [False, True], ids=["it is made later", "it is closed before"])
async def test_a_control_socket_that_could_not_be_made_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """The state directory was full or read-only: for its whole life the gateway could neither be asked nor hand over."""
    monkeypatch.setattr(listeners, "LISTEN_RETRY", 0.01)
    state, tasks = folder / "state", Tasks(lambda _: None)
    state.touch()  # In the way of the folder.
    ours = listeners.Listeners(Settings(socket_dir=folder, state_dir=state), TOKEN, tasks)
    await ours.open_control({})
    assert ours._opening is not None
    if closed:
        await ours.close_control()
    state.unlink()
    await asyncio.wait([ours._opening], timeout=GUARD)
    assert (ours._opening.cancelled(), control.socket_path(state, TOKEN).exists()) == (closed, not closed)
    await ours.close_control()
    assert not control.socket_path(state, TOKEN).exists()
    await tasks.close()
