"""The HTTP listener: which heads are read, that garbage does no harm, addresses, and what the kernel keeps of a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.configuration.kinds import address
from gateway.wires import http
from gateway.wires.http import TEXT, Answer, HttpServer, parse

BODY = b"all is well\n" * 20_000
"""More than a socket takes at once."""


async def _well() -> Answer:
    return HTTPStatus.OK, TEXT, BODY


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, int]]:
    server = HttpServer("127.0.0.1", 0, {"/": _well, "/metrics": _well})
    try:
        yield await server.start()
    finally:
        await server.close()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: node\r\n\r\n".encode()


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
    with pytest.raises(ValueError, match="is not HOST:PORT or PORT"):
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
    assert sizes == [2 * http._RECEIVE_BYTES, 2 * http._SEND_BYTES]  # The kernel doubles them (socket(7)).
