"""The client of the API server: requests say what failed, and a watch begins again for as long as it is wanted."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gateway_lab.node.api import Access, Api, ApiError, Event

POD: Any = {"metadata": {"uid": "u1", "name": "a"}}
LATER: Any = {"metadata": {"uid": "u2", "name": "b"}}


class Handler(BaseHTTPRequestHandler):
    """One collection, /pods: a list of one object, and a watch that tells of another one and ends."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer secret":
            self._answer(401, {"message": "who are you?"})
        elif self.path == "/pods":
            self._answer(200, {"metadata": {"resourceVersion": "7"}, "items": [POD]})
        elif self.path == "/pods?watch=1&resourceVersion=7":
            self._answer(200, {"type": "ADDED", "object": LATER}, {"type": "DELETED", "object": POD})
        elif self.path == "/text":
            self._answer(200)
        else:
            self._answer(404, {"message": "not found here"})

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(200, {"kind": self.headers["Content-Type"], "path": self.path, "body": body})

    def do_DELETE(self) -> None:
        self._answer(404, {"message": "gone"})

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, *lines: object) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_an_object_is_read_and_changed(url: str) -> None:
    api = Api(Access(url, "secret"))
    assert (await api.get("/pods"))["items"] == [POD]
    assert await api.merge("/pods/a", {"x": None}) == {
        "kind": "application/merge-patch+json",
        "path": "/pods/a",
        "body": {"x": None},
    }
    assert (await api.apply("/pods/a", POD))["path"] == "/pods/a?fieldManager=e2e&force=true"
    await api.delete("/pods/a", grace_seconds=0)


@pytest.mark.parametrize(
    ("token", "path", "status", "said"),
    [
        ("secret", "/other", 404, "GET /other: 404: not found here"),
        ("guess", "/pods", 401, "GET /pods: 401: who are you"),
        ("secret", "/text", 200, "expected JSON"),
    ],
)
async def test_a_request_says_what_failed(url: str, token: str, path: str, status: int, said: str) -> None:
    with pytest.raises(ApiError, match=said) as error:
        await Api(Access(url, token)).get(path)
    assert error.value.status == status


async def test_a_server_that_is_not_there_is_no_answer() -> None:
    with pytest.raises(ApiError, match="no answer") as error:
        await Api(Access("http://127.0.0.1:1", "secret")).get("/pods")
    assert error.value.status == 0


async def test_a_watch_tells_what_is_there_what_changes_and_begins_again(url: str) -> None:
    events: list[Event] = []
    twice = asyncio.Event()

    def tell(event: Event) -> None:
        events.append(event)
        if sum(one.uids is not None for one in events) == 2:
            twice.set()

    watch = Api(Access(url, "secret")).watch("/pods", tell)
    async with asyncio.timeout(10):
        await twice.wait()
    await watch.close()
    kinds = [(one.object, one.gone, one.uids) for one in events[:6]]
    assert kinds == [
        (POD, False, None),
        (None, False, frozenset({"u1"})),
        (LATER, False, None),
        (POD, True, None),
        (None, False, None),
        (POD, False, None),
    ]
    assert events == sorted(events, key=lambda one: one.monotonic_ns)


async def test_a_watch_of_a_server_that_is_not_there_says_so_and_can_be_closed() -> None:
    told: asyncio.Queue[Event] = asyncio.Queue()
    watch = Api(Access("http://127.0.0.1:1", "secret")).watch("/pods", told.put_nowait)
    async with asyncio.timeout(10):
        first = await told.get()
    await watch.close()
    assert (first.object, first.uids) == (None, None)
