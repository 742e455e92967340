"""The HTTP listener on a real socket: what is answered, and what a stranger can't do to it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest
import structlog.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.wires import http
from gateway.wires.http import TEXT, Answer, HttpServer, address, parse

BODY = b"all is well\n" * 20_000
"""More than a socket takes at once."""


async def _well() -> Answer:
    return HTTPStatus.OK, TEXT, BODY


async def _ill() -> Answer:
    return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"not yet\n"


async def _broken() -> Answer:
    raise ValueError("secret")


def _broken_at_once() -> NoReturn:
    raise ValueError("secret")


async def _hangs() -> Answer:
    await asyncio.Event().wait()
    raise AssertionError


ROUTES = {
    "/": _well,
    "/metrics": _well,
    "/readyz": _ill,
    "/broken": _broken,
    "/broken-at-once": _broken_at_once,
    "/hangs": _hangs,
}


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, int]]:
    server = HttpServer("127.0.0.1", 0, ROUTES)
    try:
        yield await server.start()
    finally:
        await server.close()


async def ask(where: tuple[str, int], request: bytes, *, end: bool = False) -> bytes:
    """Send bytes, and return all that comes back until the listener ends the connection."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*where)
        try:
            writer.write(request)
            if end:
                writer.write_eof()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: node\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/metrics"), 200),
        (get("/metrics?name=a&name=b"), 200),
        (get("http://node:9400/metrics"), 200),
        (get("http://node:9400"), 200),
        (get("/metrics", "HEAD"), 200),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nhost:node\r\nX: \xe4\t1\r\n\r\nwhat comes after is nobody's", 200),
        (get("/readyz"), 503),
        (get("/nowhere"), 404),
        (get("/metrics/"), 404),
        (get("/../metrics"), 404),
        (get("/%6detrics"), 404),
        (get("*"), 400),
        (get("ftp://node/metrics"), 400),
        (get("/metrics", "POST"), 405),
        (get("/metrics", "OPTIONS"), 405),
        (get("/broken"), 500),
        (get("/broken-at-once"), 500),
        (get("/metrics", "G\tT"), 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\nHost: a\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01 a TLS hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * http.REQUEST_LIMIT + b"\r\n\r\n", 431),
        (b"x" * 5 * http.REQUEST_LIMIT, 431),
    ],
)
async def test_a_request_and_its_status(request_: bytes, status: int) -> None:
    async with serving() as where:
        answer = await ask(where, request_)
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    length = int(next(line for line in lines if line.startswith("Content-Length: ")).split()[1])
    assert lines[0].startswith(f"HTTP/1.1 {status} ")
    assert "Connection: close" in lines
    assert ("Allow: GET, HEAD" in lines) == (status == 405)
    assert len(body) == (0 if request_.startswith(b"HEAD") else length)
    assert b"secret" not in answer
    if status == 200:
        assert length == len(BODY)


async def test_a_head_may_come_in_pieces_and_the_sender_may_end_first() -> None:
    async with serving() as where:
        reader, writer = await asyncio.open_connection(*where)
        for piece in (b"GET /met", b"rics HTTP/1.0\r", b"\n\r", b"\n"):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
        assert (await reader.read()).endswith(BODY)
        writer.close()


@pytest.mark.parametrize("request_", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: a\r\n"])
async def test_half_a_request_that_ends_is_not_answered(request_: bytes) -> None:
    async with serving() as where:
        assert await ask(where, request_, end=True) == b""
        assert (await ask(where, get("/metrics"))).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("request_", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: a\r\n"])
async def test_half_a_request_has_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch, request_: bytes) -> None:
    monkeypatch.setattr(http, "SECONDS", 0.05)
    async with serving() as where:
        assert await ask(where, request_) == b""


async def test_who_does_not_take_the_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read here until the listener has given up: then a piece of the answer is there, and no more."""
    monkeypatch.setattr(http, "SECONDS", 0.05)
    done = asyncio.Event()

    async def much() -> Answer:
        asyncio.current_task().add_done_callback(lambda _: done.set())  # type: ignore[union-attr]  # we are in one
        return HTTPStatus.OK, TEXT, b"x" * 32_000_000

    server = HttpServer("127.0.0.1", 0, {"/": much})
    where = await server.start()
    reader, writer = await asyncio.open_connection(*where, limit=1024)
    writer.write(get("/"))
    async with asyncio.timeout(20):
        await done.wait()
    await server.close()
    writer.close()
    assert not server._open
    assert len(reader._buffer) < 32_000_000  # type: ignore[attr-defined]  # what this end took without being asked


async def test_an_answer_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SECONDS", 0.05)
    async with serving() as where:
        assert (await ask(where, get("/hangs"))).startswith(b"HTTP/1.1 503 ")


async def test_a_defect_is_logged_and_nobody_else_sees_it() -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving() as where:
            await ask(where, get("/broken"))
            assert (await ask(where, get("/metrics"))).endswith(BODY)
    assert [(line["event"], line["path"]) for line in logs] == [("a request failed", "/broken")]


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def until(true: Callable[[], bool]) -> None:
    """Let the event loop turn until something is so."""
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def undeferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections come up to us at once, as they do where the kernel has no room for more of them."""
    monkeypatch.setattr(socket, "TCP_DEFER_ACCEPT", 2**16)


@contextmanager
def idle(where: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Connect so often in one turn of the event loop, and say nothing."""
    with ExitStack() as opened:
        yield [opened.enter_context(socket.create_connection(where, timeout=20)) for _ in range(count)]


async def test_so_many_connections_and_no_more() -> None:
    """One more ends one that is silent: who holds them all keeps nobody away."""
    server = HttpServer("127.0.0.1", 0, ROUTES)
    where = await server.start()
    held = [await asyncio.open_connection(*where) for _ in range(http.MAX_CONNECTIONS)]
    assert (await ask(where, get("/metrics"))).startswith(b"HTTP/1.1 200 ")
    assert await held[0][0].read() == b""
    held[1][1].write(get("/readyz"))
    assert (await held[1][0].read()).startswith(b"HTTP/1.1 503 ")
    for _, writer in held:
        writer.close()
    await until(lambda: not server._open)
    assert (await ask(where, get("/metrics"))).startswith(b"HTTP/1.1 200 ")
    await server.close()


async def test_connections_that_come_all_at_once_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 32)
    server = HttpServer("127.0.0.1", 0, ROUTES)
    where = await server.start()
    before = descriptors()
    with idle(where, 200):
        assert (await ask(where, get("/metrics"))).startswith(b"HTTP/1.1 200 ")
        assert descriptors() - before <= 200 + 32 + 1
    await until(lambda: not server._open)
    assert descriptors() == before
    await server.close()
    assert descriptors() == before - 1


async def test_one_turn_of_the_loop_takes_no_more_than_so_many() -> None:
    server = HttpServer("127.0.0.1", 0, ROUTES)
    where = await server.start()
    with idle(where, 200), patch.object(server, "_take", wraps=server._take) as take:
        listener = server._listeners[0]
        server._accept(listener)
        assert take.call_count == http.AT_ONCE
        # Then it rests, so that the kubelet's calls have their turns; and goes on by itself.
        assert not asyncio.get_running_loop().remove_reader(listener)
        await until(lambda: take.call_count == 200)
    await server.close()


async def test_a_listener_rests_for_what_it_used_not_for_what_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy node a turn takes long by the clock: a listener that rests as long has a quarter of the processor for it."""
    clock = iter(range(10**6))
    monkeypatch.setattr("time.thread_time", lambda: 0.25 * next(clock))
    server = HttpServer("127.0.0.1", 0, ROUTES)
    where = await server.start()
    with idle(where, http.AT_ONCE), patch.object(server, "_rest") as rest:
        server._accept(server._listeners[0])
        assert rest.call_args.args[1] == 0.25
    await server.close()


@pytest.mark.parametrize(("path", "tasks"), [("/at-once", 0), ("/metrics", 1)])
async def test_an_answer_that_is_known_costs_no_task_and_nothing_stays_of_it(
    monkeypatch: pytest.MonkeyPatch, path: str, tasks: int
) -> None:
    """Nor is any socket spelled with its addresses, which is what a selector does with one that it doesn't know."""
    monkeypatch.setattr(http, "SECONDS", 60.0)
    server = HttpServer("127.0.0.1", 0, {**ROUTES, "/at-once": lambda: (HTTPStatus.OK, TEXT, b"alive\n")})
    where = await server.start()
    loop = asyncio.get_running_loop()
    with (
        idle(where, 1) as [connection],
        patch.object(loop, "create_task", wraps=loop.create_task) as created,
        patch.object(socket.socket, "__repr__") as spelled,
    ):
        connection.sendall(get(path, "HEAD"))
        server._accept(server._listeners[0])
        await until(lambda: not server._open)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert created.call_count == tasks
        assert not spelled.called
    await server.close()


async def test_who_is_being_answered_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who were answered go first, then the silent, then those who don't take their answers."""
    go, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def waits() -> Answer:
        asked.release()
        await go.wait()
        return HTTPStatus.OK, TEXT, b"at last\n"

    server = HttpServer("127.0.0.1", 0, {"/": waits, "/metrics": _well})
    where = await server.start()
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 32)
    waiting = [asyncio.ensure_future(ask(where, get("/"))) for _ in range(31)]
    for _ in waiting:
        await asked.acquire()
    assert (await ask(where, get("/metrics"))).endswith(BODY)
    with idle(where, 100):
        await until(lambda: len(server._open) == 32)
        assert (await ask(where, get("/metrics"))).endswith(BODY)
    last = asyncio.ensure_future(ask(where, get("/")))
    await asked.acquire()
    assert await ask(where, get("/")) == b""  # All are being answered: no more can be served.
    go.set()
    for answer in await asyncio.gather(*waiting, last):
        assert answer.endswith(b"at last\n")
    await server.close()


@pytest.mark.parametrize(
    ("stages", "ends"),
    [
        (["SERVED", "SILENT", "TAKING", "ASKED"], "SERVED"),
        (["ASKED", "TAKING", "SILENT"], "SILENT"),
        (["ASKED", "TAKING", "ASKED"], "TAKING"),
    ],
)
async def test_which_one_goes(monkeypatch: pytest.MonkeyPatch, stages: list[str], ends: str) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", len(stages))
    server = HttpServer("127.0.0.1", 0, ROUTES)
    await server.start()
    pairs = [socket.socketpair() for _ in range(len(stages) + 1)]
    for ours, _ in pairs[:-1]:
        server._take(ours)
    for connection, stage in zip(server._open, stages, strict=True):
        server._enter(connection, http._Stage[stage])
    server._take(pairs[-1][0])
    stages.remove(ends)
    assert [connection.stage.name for connection in server._open] == [*stages, "SILENT"]
    await server.close()
    for pair in pairs:
        for one in pair:
            one.close()


async def test_who_does_not_take_the_answer_keeps_nobody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 4)
    begun = asyncio.Semaphore(0)

    async def much() -> Answer:
        begun.release()
        return HTTPStatus.OK, TEXT, b"x" * 32_000_000

    server = HttpServer("127.0.0.1", 0, {"/much": much, "/": _ill})
    where = await server.start()
    with idle(where, 4) as connections:
        for one in connections:
            one.sendall(get("/much"))
            await begun.acquire()
        assert (await ask(where, get("/"))).startswith(b"HTTP/1.1 503 ")
    await server.close()


async def test_who_was_answered_and_goes_on_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SECONDS", 60.0)
    server = HttpServer("127.0.0.1", 0, ROUTES)
    where = await server.start()
    _, writer = await asyncio.open_connection(*where)
    writer.write(get("/readyz") + b"x" * 1_000_000)
    await until(lambda: bool(server._open))
    await until(lambda: not server._open)
    writer.transport.abort()
    await server.close()


async def test_nothing_is_kept_of_what_follows_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SECONDS", 60.0)
    server = HttpServer("127.0.0.1", 0, ROUTES)
    where = await server.start()
    reader, writer = await asyncio.open_connection(*where)
    writer.write(get("/readyz") + b"x" * 4000)
    await reader.read()
    [connection] = server._open
    writer.write(b"x" * 20_000)
    await until(lambda: connection.dropped == 20_000)
    assert not connection.read
    writer.transport.abort()
    await server.close()


async def test_without_descriptors_it_waits_and_says_so_once() -> None:
    """A listener without its socket stands for a process without descriptors."""

    class Exhausted(socket.socket):
        def accept(self) -> NoReturn:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    server = HttpServer("127.0.0.1", 0, ROUTES)
    await server.start()
    with Exhausted() as listener, structlog.testing.capture_logs() as logs:
        for _ in range(100):
            server._accept(listener)
    await server.close()
    assert [line["event"] for line in logs] == ["connections can't be taken"]


async def test_without_descriptors_a_listener_rests_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted(socket.socket):
        def accept(self) -> NoReturn:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    server = HttpServer("127.0.0.1", 0, ROUTES)
    await server.start()
    with Exhausted() as listener, patch.object(server, "_rest") as rest:
        server._accept(listener)
        rest.assert_called_once_with(listener, http.ACCEPT_AGAIN)
    await server.close()


async def test_the_end_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SECONDS", 3600.0)
    asked = asyncio.Event()

    async def hangs() -> Answer:
        asked.set()
        return await _hangs()

    server = HttpServer("127.0.0.1", 0, {"/": hangs})
    where = await server.start()
    waiting = asyncio.ensure_future(ask(where, get("/")))
    async with asyncio.timeout(20):
        await asked.wait()
        await server.close()
        await server.close()
        assert await waiting == b""
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*where)


async def test_an_address_that_is_taken_is_told() -> None:
    async with serving() as (host, port):
        with pytest.raises(OSError, match="in use"):
            await HttpServer(host, port, ROUTES).start()


GARBAGE = st.one_of(
    st.binary(max_size=300),
    st.lists(
        st.sampled_from(
            [
                b"GET",
                b"HEAD",
                b" ",
                b"/",
                b"/metrics",
                b"HTTP/1.1",
                b"\r\n",
                b"\n",
                b":",
                b"Host",
                b"\0",
                b"?",
                b"http://",
            ]
        ),
        max_size=30,
    ).map(b"".join),
)


@given(GARBAGE)
@example(b"GET / HTTP/1.1\r\nHost: a")
def test_a_head_is_read_or_refused(head: bytes) -> None:
    found = parse(head)
    if found is not None:
        method, path = found
        assert method.encode() in head
        assert path == "/" or path.encode() in head
        assert path.startswith("/")
        assert "?" not in path


@settings(max_examples=40, deadline=None)
@given(st.lists(GARBAGE, min_size=1, max_size=8))
async def test_garbage_is_answered_with_an_error_or_not_at_all(requests: list[bytes]) -> None:
    async with serving() as where:
        for answer in await asyncio.gather(*(ask(where, request, end=True) for request in requests)):
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
        assert (await ask(where, get("/metrics"))).endswith(BODY)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),  # noqa: S104 - as an operator may write it
        ("10.1.2.3:80", ("10.1.2.3", 80)),
        ("localhost:9400", ("localhost", 9400)),
        (":9400", ("", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        ("[fe80::1%eth0]:9400", ("fe80::1%eth0", 9400)),
    ],
)
def test_an_address(text: str, expected: tuple[str, int]) -> None:
    assert address(text) == expected


@pytest.mark.parametrize(
    "text", ["", ":", "::1:9400", "[]:9400", "host", "host:", "host:port", "65536", "1:65536", "a b:1", "-1", "९"]
)
def test_what_is_no_address_is_told_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT or PORT"):
        address(text)


async def test_what_the_kernel_keeps_of_a_connection_is_bounded() -> None:
    """It counts for the pod's memory limit; without a bound it may be megabytes, of 256 connections and those that wait."""
    taken: asyncio.Queue[socket.socket] = asyncio.Queue()
    with patch.object(HttpServer, "_take", lambda _, accepted: taken.put_nowait(accepted)):
        async with serving() as where, asyncio.timeout(20):
            _, writer = await asyncio.open_connection(*where)
            writer.write(b"G")
            with await taken.get() as one:
                sizes = [one.getsockopt(socket.SOL_SOCKET, which) for which in (socket.SO_RCVBUF, socket.SO_SNDBUF)]
            writer.transport.abort()
    assert sizes == [2 * http._RECEIVED, 2 * http._SENT]  # The kernel doubles them (socket(7)).
