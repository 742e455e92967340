"""The API server's client, against a server that is well, and one that does what servers and networks do."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import h11
import msgspec
import pytest
import trustme
from msgspec import Struct

from gateway.kubernetes import access, client
from gateway.kubernetes.access import Access
from gateway.kubernetes.client import Client, KubernetesError
from tests.fakes.apiserver import Answer, ApiServer, Fault, Request
from tests.unit.kubernetes import api, authority, node, server, until

__all__ = ["api", "authority", "server"]

NODE = "/api/v1/nodes/n1"
Anything = dict[str, Any]


class Metadata(Struct):
    labels: dict[str, str]


class Node(Struct):
    metadata: Metadata


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "\u00e9"], ids=["nothing", "empty", "lines", "not ASCII"])
async def test_a_token_that_is_none_is_sent_to_nobody(server: ApiServer, tmp_path: Path, content: str) -> None:
    token = tmp_path / "token"
    token.write_text(content)
    with pytest.raises(KubernetesError, match=r"the token (is empty|has characters)") as caught:
        await Client(server.access(token), manager="test").get(NODE, Node)
    assert caught.value.away
    assert not server.requests


async def test_a_certificate_of_another_name_is_refused(authority: trustme.CA) -> None:
    server = ApiServer(authority)
    await server.start("elsewhere.example")
    try:
        with pytest.raises(KubernetesError, match="CERTIFICATE_VERIFY_FAILED"):
            await Client(server.access(), manager="test").get(NODE, Node)
        assert not server.requests
    finally:
        await server.stop()


async def test_a_name_is_resolved(server: ApiServer) -> None:
    there = server.access()
    server.put(NODE, **node())
    one = Client(Access("localhost", there.port, there.ca, server_name="127.0.0.1", token=there.token), manager="test")
    await one.get(NODE, Node)
    one.close()


async def test_what_is_in_the_bundle_is_trusted_root_or_not() -> None:
    """As Go trusts it: an intermediate CA is enough."""
    async with ApiServer(trustme.CA().create_child_ca()) as server:
        server.put(NODE, **node())
        one = Client(server.access(), manager="test")
        await one.get(NODE, Node)
        one.close()


def test_without_a_port_a_kubeconfigs_server_has_that_of_https(server: ApiServer, tmp_path: Path) -> None:
    path = server.kubeconfig(tmp_path / "config")
    path.write_text(path.read_text().replace(f":{server.port}", ""))
    assert access.kubeconfig(path).port == 443


# What goes wrong after the connection.


async def _stall(answer: Answer, _: Request) -> None:
    await asyncio.get_running_loop().create_future()


def said(text: bytes) -> Fault:
    """Say this, by HTTP's rules or against them, and close the connection."""
    return lambda answer, _: answer.raw(text)


async def _half(answer: Answer, request: Request) -> None:
    await answer.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
    await _stall(answer, request)


async def _endless_body(answer: Answer, _: Request) -> None:
    await answer.head(200, {"Transfer-Encoding": "chunked"})
    while True:
        await answer.send(h11.Data(data=b" " * 65536))


async def _endless_head(answer: Answer, _: Request) -> None:
    await answer.raw(b"HTTP/1.1 200 OK\r\n")
    while True:
        await answer.raw(b"X-More: and more\r\n" * 1000)


async def _endless_hints(answer: Answer, _: Request) -> None:
    while True:
        await answer.raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)


FAULTS: dict[str, tuple[Fault, str]] = {
    "it stalls": (_stall, "no answer: nothing whole came within 0.2 s"),
    "it stalls in the answer": (_half, "no answer: nothing whole came within 0.2 s"),
    "hints without end": (_endless_hints, "no answer: only 8 informational responses came (HTTP 1xx), no final one"),
    "broken off": (said(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"), "no answer: the answer broke off"),
    "broken off in a chunk": (
        said(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n'),
        "no answer: the answer broke off",
    ),
    "nothing": (said(b""), "no answer: "),
    "a body without end": (_endless_body, "no answer: the answer is too long. Allowed: 100000 bytes"),
    "a head without end": (_endless_head, "no answer: "),
    "no HTTP": (said(b"SSH-2.0-OpenSSH_9.6\r\n"), "no answer: "),
    "deep": (
        said(b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n" + b"[" * 50_000),
        "the answer is no JSON of Kubernetes",
    ),
    "a list": (lambda answer, _: answer.json(200, [1]), "the answer is no JSON of Kubernetes"),
    "a proxy's page": (said(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\n<html"), "502: <html"),
    "elsewhere": (lambda answer, _: answer.no(302, "Found", {"Location": "https://else.example/"}), "302 Found"),
    "too many": (lambda answer, _: answer.no(429, "TooManyRequests", {"Retry-After": "7"}), "429 TooManyRequests"),
    "steering": (lambda answer, _: answer.no(403, "\x1b[31m" + "R" * 1000), "403 ?[31m" + "R" * 75 + ": "),
}


@pytest.mark.parametrize(("fault", "told"), FAULTS.values(), ids=FAULTS)
async def test_every_fault_is_an_error_that_says_what_came(
    server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch, fault: Fault, told: str
) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 100_000)
    server.put(NODE, **node())
    server.faults.append(fault)
    with pytest.raises(KubernetesError) as caught:
        await api.get(NODE, Node, seconds=0.2)
    assert told in str(caught.value)
    assert not caught.value.away, "a server that is there and busy is left alone for longer"
    await api.get(NODE, Node)


CRUMBS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000 + b"2\r\n{}\r\n0\r\n\r\n"


async def test_an_answer_in_crumbs_lets_others_work_meanwhile(server: ApiServer, api: Client) -> None:
    server.faults.append(said(CRUMBS))
    getting = asyncio.ensure_future(api.get(NODE, Anything))
    turns = 0
    while not getting.done():
        turns += 1
        await asyncio.sleep(0)
    assert await getting == {}
    assert turns > 20_000 / 64


# Connections.


async def test_a_server_that_is_gone_without_a_word_is_noticed_by_the_kernel(server: ApiServer, api: Client) -> None:
    server.put(NODE, **node())
    await api.get(NODE, Node)
    assert api._idle is not None
    own: socket.socket = api._idle._writer.get_extra_info("socket")
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + 15 <= 30
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


async def test_what_is_created_is_created_on_a_connection_of_its_own(server: ApiServer, api: Client) -> None:
    server.put(NODE, **node())
    await api.get(NODE, Node)
    server.faults.append(said(b""))
    with pytest.raises(KubernetesError):
        await api.create("/api/v1/nodes", {"metadata": {"name": "n2"}})
    assert len(server.asked("POST")) == 1, "what may have been created must not be created again"


async def test_so_many_requests_are_under_way_and_no_more(server: ApiServer, api: Client) -> None:
    server.put(NODE, **node())
    server.faults.extend([_stall] * client.MAX_REQUESTS)
    waiting = [asyncio.ensure_future(api.get(NODE, Node)) for _ in range(client.MAX_REQUESTS)]
    await until(lambda: len(server.requests) == client.MAX_REQUESTS)
    with pytest.raises(KubernetesError, match=r"within 0\.1 s"):
        await api.get(NODE, Node, seconds=0.1)
    assert len(server.requests) == client.MAX_REQUESTS
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await api.get(NODE, Node)


# Lists.


@pytest.mark.parametrize("fits", [1, 3])
async def test_a_page_that_has_too_many_bytes_is_asked_for_in_smaller_ones(
    server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    monkeypatch.setattr(client, "PAGE_OBJECTS", 8)
    monkeypatch.setattr(client, "MAX_BYTES", 1000 * fits + 800)
    for number in range(9):
        server.put(f"/api/v1/nodes/n{number}", **node(number=str(number), padding="x" * 900))
    found, _ = await api.list("/api/v1/nodes", Node)
    assert [one.metadata.labels["number"] for one in found] == [str(number) for number in range(9)]


async def test_an_object_of_too_many_bytes_is_asked_for_no_more(
    server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 500)
    server.put("/api/v1/nodes/n", **node(padding="x" * 900))
    with pytest.raises(KubernetesError, match="Allowed: 500 bytes"):
        await api.list("/api/v1/nodes", Node)
    assert [one.query["limit"] for one in server.requests] == ["100", "25", "6", "1"]


BOUNDS: dict[str, tuple[str, int, list[Anything] | None, str, int]] = {
    "pages": ("MAX_PAGES", 3, None, "Allowed: 20000 in 3 pages", 3),
    "objects of a server that does not keep to the limit": ("MAX_OBJECTS", 6, [node()] * 5, "Allowed: 6", 2),
    "bytes": ("MAX_LIST_BYTES", 2500, [node(padding="x" * 1000)], "Allowed: 2500 bytes", 3),
}


@pytest.mark.parametrize(("setting", "most", "items", "words", "requests"), BOUNDS.values(), ids=BOUNDS)
async def test_a_list_without_an_end_is_refused(
    server: ApiServer,
    api: Client,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    most: int,
    items: list[Anything] | None,
    words: str,
    requests: int,
) -> None:
    monkeypatch.setattr(client, setting, most)
    server.faults.extend([lambda answer, _: answer.json(200, {"metadata": {"continue": "x"}, "items": items})] * 9)
    with pytest.raises(KubernetesError, match=words):
        await api.list("/api/v1/nodes", Node)
    assert len(server.requests) == requests


async def test_of_a_list_only_what_is_kept_counts(
    server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large cluster has more claims than a node could hold, and a node has a few of them."""
    monkeypatch.setattr(client, "PAGE_OBJECTS", 3)
    monkeypatch.setattr(client, "MAX_OBJECTS", 2)
    monkeypatch.setattr(client, "MAX_LIST_BYTES", 3000)
    for number in range(9):
        server.put(f"/api/v1/nodes/n{number}", **node(number=str(number), padding="x" * 1000))
    found, _ = await api.list("/api/v1/nodes", Node, keep=lambda one: one.metadata.labels["number"] in "27")
    assert [one.metadata.labels["number"] for one in found] == ["2", "7"]


async def test_between_the_objects_of_a_page_others_have_their_turn(server: ApiServer, api: Client) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    server.faults.append(lambda answer, _: answer.json(200, {"metadata": {}, "items": [node()] * 1000}))
    beside = asyncio.ensure_future(others())
    await api.list("/api/v1/nodes", Node)
    beside.cancel()
    assert turns >= 1000


@pytest.mark.parametrize("parts", [b"{},", b"[],", b'"x":"y",'], ids=["objects", "lists", "texts"])
def test_an_object_is_counted_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch, parts: bytes) -> None:
    """4 MiB of empty objects took the event loop more than a second."""
    client.decoded(b'{"metadata":{"labels":{}}}', Node, "GET")
    monkeypatch.setattr(client, "msgspec", None)
    with pytest.raises(KubernetesError, match="Allowed: 50000"):
        client.decoded(parts * 50_001, Node, "GET")


@pytest.mark.parametrize("text", ["{" * 50_001, "[" * 50_001, '"' * 200_001, '\\"{' * 50_001], ids=str.__len__)
def test_what_a_text_holds_is_no_part_of_the_object(text: str) -> None:
    """Else one annotation of one pod would hide all pods of its node."""
    one = client.decoded(msgspec.json.encode(node(said=text)), Node, "GET")
    assert one.metadata.labels["said"] == text
