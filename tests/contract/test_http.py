"""Probes and metrics over HTTP: a few fixed paths, and no client keeps another one away."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from tests.contract.node import Gateway, Node

MOST = 256
"""Connections that are open at once."""


async def _answer(one: Gateway, request: bytes, what: str = "probes") -> tuple[str, dict[str, str], str]:
    """Send bytes; return the status line, the headers and the body."""
    reader, writer = await one.port(what)
    writer.write(request)
    async with asyncio.timeout(30):
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    first, *rest = head.split("\r\n")
    return first, {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}, body


def _get(path: str, method: str = "GET", minor: int = 1) -> bytes:
    return f"{method} {path} HTTP/1.{minor}\r\nHost: node\r\n\r\n".encode()


async def test_get_and_head_are_answered_on_their_paths_and_nothing_else_is(node: Node) -> None:
    one = node.gateway()
    first, headers, body = await _answer(one, _get("/healthz"))
    assert (first, body) == ("HTTP/1.1 200 OK", "alive\n")
    assert (headers["content-length"], headers["connection"]) == ("6", "close")
    for path in ("/healthz?verbose=1", "http://node/healthz"):
        assert (await _answer(one, _get(path)))[2] == "alive\n"
    assert (await _answer(one, _get("/healthz", minor=0)))[2] == "alive\n"
    first, headers, body = await _answer(one, _get("/healthz", "HEAD"))
    assert (first, headers["content-length"], body) == ("HTTP/1.1 200 OK", "6", "")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        first, headers, _ = await _answer(one, _get("/healthz", method))
        assert first.split()[1] == "405"
        assert headers["allow"] == "GET, HEAD"
    for path in ("/", "/metrics", "/healthz/", "/readyz/../healthz", "/%68ealthz"):
        assert (await _answer(one, _get(path)))[0].split()[1] == "404"
    assert (await _answer(one, _get("/healthz"), "metrics"))[0].split()[1] == "404"
    assert (await _answer(one, _get("/metrics"), "metrics"))[1]["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n\r\n",
        b"\x00\xff\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/2\r\nHost: node\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: node\r\n bad: header\r\n\r\n",
        b"GET  /healthz HTTP/1.1\r\nHost: node\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: node\r\n\r\n",
        b"GET ftp://node/healthz HTTP/1.1\r\nHost: node\r\n\r\n",
        b"G\tT /healthz HTTP/1.1\r\nHost: node\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost : node\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: node\r\nX: \0\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01 a TLS hello\r\n\r\n",
    ],
)
async def test_garbage_is_a_bad_request(node: Node, garbage: bytes) -> None:
    one = node.gateway()
    first, _, body = await _answer(one, garbage)
    assert first.split()[1] == "400"
    assert "hello" not in body
    assert (await one.get("probes", "/healthz"))[0] == 200
    assert not [line for line in one.process.log if line["level"] == "error"]


async def test_a_request_without_end_is_refused_and_one_with_a_body_is_answered(node: Node) -> None:
    one = node.gateway()
    first, _, _ = await _answer(one, b"GET /healthz HTTP/1.1\r\nHost: node\r\nX: " + b"x" * 9000)
    assert first.split()[1] == "431"
    first, _, body = await _answer(one, _get("/healthz") + b"x" * 20000)
    assert (first.split()[1], body) == ("200", "alive\n")


async def test_slow_clients_go_after_a_while_and_never_keep_a_probe_away(node: Node) -> None:
    one = await node.served(8)
    slow = [await one.port("probes") for _ in range(8)]
    for _, writer in slow:
        writer.write(b"GET /healthz HT")
    await node.pass_time(3)
    assert (await one.get("probes", "/healthz"))[0] == 200
    began = asyncio.get_running_loop().time()
    for reader, _ in slow:
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    assert asyncio.get_running_loop().time() - began < 10
    many = [await one.port("probes") for _ in range(MOST + 20)]
    for _, writer in many:
        writer.write(b"GET /healthz HT")
    began = asyncio.get_running_loop().time()
    for _ in range(3):
        assert (await one.get("probes", "/healthz"))[0] == 200
    assert asyncio.get_running_loop().time() - began < 1  # As long as a probe waits by default.
    await node.admit("pod")
    for _, writer in (*slow, *many):
        writer.close()
    await node.truthful()


async def test_a_request_may_come_in_pieces_and_half_a_one_is_not_answered(node: Node) -> None:
    one = node.gateway()
    reader, writer = await one.port("probes")
    for piece in (b"GET /hea", b"lthz HTTP/1.0\r", b"\n\r", b"\n"):
        writer.write(piece)
        await node.pass_time(0.1)
    writer.write_eof()
    assert (await reader.read()).endswith(b"alive\n")
    writer.close()
    for half in (b"GET /", b"GET /healthz HTTP/1.1\r\nHost: a\r\n"):
        for ends in (True, False):
            reader, writer = await one.port("probes")
            writer.write(half)
            if ends:
                writer.write_eof()
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.close()


async def test_connections_that_come_all_at_once_leave_no_descriptor(node: Node) -> None:
    one = node.gateway()
    assert (await one.get("probes", "/healthz"))[0] == 200
    await node.pass_time(1)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a moment
    talks = [await one.port("probes") for _ in range(MOST + 40)]
    for _, writer in talks:
        writer.write(b"GET /healthz HT")
    assert (await one.get("probes", "/healthz"))[0] == 200
    both_ends = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208 - as above
    assert both_ends <= len(talks) + MOST + 8
    for _, writer in talks:
        writer.close()
    await node.pass_time(15)
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 - as above


async def test_without_descriptors_it_waits_and_says_so_once(node: Node) -> None:
    one = node.gateway()
    assert (await one.get("probes", "/healthz"))[0] == 200
    accept = socket.socket.accept

    def full(self: socket.socket) -> tuple[socket.socket, object]:
        if self.family == socket.AF_INET:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    reader, writer = await one.port("probes")
    writer.close()
    await node.pass_time(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "accept", full)
        reader, writer = await one.port("probes")
        writer.write(_get("/healthz"))
        await node.pass_time(30)
        assert (await one.status())["resources"]
    assert len(one.said("cannot accept connections")) == 1
    async with asyncio.timeout(5):
        assert (await reader.read()).endswith(b"alive\n")
    writer.close()


async def test_an_end_waits_for_no_client(node: Node) -> None:
    one = node.gateway()
    reader, writer = await one.port("probes")
    writer.write(b"GET /healthz HT")
    await node.pass_time(1)
    assert await one.terminate() == 0
    assert await reader.read() == b""
    writer.close()


async def test_a_port_that_is_taken_at_the_start_is_had_when_it_is_free(node: Node) -> None:
    await node.start_kubelet()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        one = node.gateway("--probe-address", f"127.0.0.1:{port}")
        await node.allocatable_is(8)
        await node.pass_time(20)
        assert not one.said("listening", what="probes")
        assert len(one.said("can't listen", what="probes")) >= 2
    assert await one.is_ready()
    assert one.said("listening", what="probes")[0]["port"] == port
