"""A client of the API server: what an operator's own client would see, and do.

It is small on purpose (the standard library, no informer): objects are what JSON makes of them, requests run in threads, and a
watch is a thread of its own that takes the time of each line when it comes, however busy the event loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway_lab.node import Node

Object = Mapping[str, Any]
"""An object of the API, as it came."""

SECONDS = 10.0
"""How long one request may take."""
AGAIN = 0.1
"""Seconds between two attempts to watch an API server that isn't there."""
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_APPLY = "application/apply-patch+yaml"


class ApiError(Exception):
    """A request that failed. ``status`` is the server's, or 0 where it could not be asked."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: {status or 'no answer'}: {message}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Access:
    """Where an API server is, and who asks: ``https://host:port``, a bearer token, and what the server is trusted by."""

    url: str
    token: str
    trust: ssl.SSLContext | None = None

    def connect(self, seconds: float | None) -> http.client.HTTPConnection:
        """Give a connection that isn't open yet; ``seconds`` is how long it waits for each piece."""
        place = urllib.parse.urlsplit(self.url)
        host = place.hostname or ""
        if place.scheme == "http":
            return http.client.HTTPConnection(host, place.port, timeout=seconds)
        return http.client.HTTPSConnection(host, place.port, timeout=seconds, context=self.trust)

    @property
    def headers(self) -> dict[str, str]:
        """What each request says."""
        return {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}


@dataclass(frozen=True, slots=True)
class Event:
    """Something seen in a collection: an object that is (``gone``: was) there.

    ``uids`` is given, without an object, after each beginning: those of all that is there; what isn't among them is gone unseen.
    ``monotonic_ns`` is CLOCK_MONOTONIC when its line had come.
    """

    monotonic_ns: int
    object: Object | None = None
    gone: bool = False
    uids: frozenset[str] | None = None


class Api:
    """An API server. Paths are whole: ``/api/v1/namespaces/default/pods``."""

    def __init__(self, access: Access) -> None:
        self._access = access

    @classmethod
    def of(cls, node: Node) -> Api:
        """Give the API server of a node of ours, as its administrator."""
        return cls(Access(node.server, node.token, ssl.create_default_context(cafile=str(node.ca))))

    async def get(self, path: str) -> Object:
        """Read an object or a collection.

        Raises:
            ApiError: it isn't there (404), or could not be had. So do all others.
        """
        return await self._ask("GET", path)

    async def create(self, collection: str, wanted: Object) -> Object:
        """Make an object."""
        return await self._ask("POST", collection, wanted)

    async def apply(self, path: str, wanted: Object) -> Object:
        """Make an object what is wanted, or make it (server-side apply)."""
        return await self._ask("PATCH", f"{path}?fieldManager=e2e&force=true", wanted, _APPLY)

    async def merge(self, path: str, change: Object) -> Object:
        """Change some fields of an object; None removes one."""
        return await self._ask("PATCH", path, change, _MERGE)

    async def strategic(self, path: str, change: Object) -> Object:
        """Change some fields of an object, where lists of named things are changed by their names."""
        return await self._ask("PATCH", path, change, _STRATEGIC)

    async def delete(self, path: str, *, grace_seconds: int | None = None) -> None:
        """Remove an object; without an answer to when. One that isn't there is removed already."""
        body = {"propagationPolicy": "Background"} | (
            {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        )
        try:
            await self._ask("DELETE", path, body)
        except ApiError as error:
            if error.status != http.client.NOT_FOUND:
                raise

    def watch(self, collection: str, tell: Callable[[Event], None]) -> Watch:
        """Watch a collection from now on; ``tell`` is called in the event loop."""
        return Watch(self._access, collection, tell)

    async def _ask(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        return await asyncio.to_thread(_ask, self._access, method, path, body, kind)


class Watch:
    """Lists a collection, then hears of its changes, and begins again when that ends: for as long as it isn't closed."""

    def __init__(self, access: Access, collection: str, tell: Callable[[Event], None]) -> None:
        self._access, self._collection, self._tell = access, collection, tell
        self._loop = asyncio.get_running_loop()
        self._connection: http.client.HTTPConnection | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {collection}", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End the thread."""
        self._closed.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # it may just have ended by itself
                connection.sock.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(self._thread.join, SECONDS)

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(ApiError, OSError, http.client.HTTPException, ValueError):
                self._follow(self._list())
            self._closed.wait(AGAIN)

    def _list(self) -> str:
        found = _ask(self._access, "GET", self._collection)
        now = time.monotonic_ns()
        for one in found["items"]:
            self._say(Event(now, one))
        self._say(Event(now, uids=frozenset(one["metadata"]["uid"] for one in found["items"])))
        return str(found["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> None:
        """Hear changes until the stream ends, which is always: by the server, by a failure, or by ``close``."""
        self._connection = self._access.connect(None)
        with contextlib.closing(self._connection) as connection:
            path = f"{self._collection}?watch=1&resourceVersion={version}"
            connection.request("GET", path, headers=self._access.headers)
            if self._closed.is_set():  # close() came while there was no socket yet
                return
            answer = connection.getresponse()
            while line := answer.readline():
                now = time.monotonic_ns()
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                self._say(Event(now, event["object"], gone=event["type"] == "DELETED"))

    def _say(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell, event)


def _ask(access: Access, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
    try:
        with contextlib.closing(access.connect(SECONDS)) as connection:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {**access.headers, "Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(f"{method} {path}", 0, str(error)) from error
    if answer.status >= http.client.BAD_REQUEST:
        raise ApiError(f"{method} {path}", answer.status, _message(text))
    try:
        found: Object = json.loads(text)
    except ValueError as error:
        raise ApiError(f"{method} {path}", answer.status, f"expected JSON, got {text[:200]!r}") from error
    return found


def _message(text: bytes) -> str:
    """Give the reason that an API server says, or what came in its place."""
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(text).get("message", ""))
    return text[:500].decode(errors="replace")
