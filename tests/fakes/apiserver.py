"""A stand-in for an API server: HTTPS on loopback, objects, pages, watches with bookmarks, patches; and whatever can go wrong.

It says what Kubernetes' API conventions say. ``faults`` are played before it, one for each request, and then it is well again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import h11
import trustme

from gateway.kubernetes.access import Access

TOKEN = b"token-1"


@cache
def issued(authority: trustme.CA, name: str) -> trustme.LeafCert:
    """Return a server's certificate; to make its key takes milliseconds."""
    return authority.issue_cert(name)


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any

    @property
    def watches(self) -> bool:
        return "watch" in self.query


Fault = Callable[["Answer", Request], Awaitable[None]]


class Answer:
    """What a connection is answered with, by h11's rules or against them."""

    def __init__(self, writer: asyncio.StreamWriter, http: h11.Connection) -> None:
        self.writer, self._http = writer, http

    async def send(self, *events: h11.Event) -> None:
        for event in events:
            self.writer.write(self._http.send(event) or b"")
        await self.writer.drain()

    async def raw(self, text: bytes) -> None:
        self.writer.write(text)
        await self.writer.drain()

    async def head(self, status: int, headers: Mapping[str, str] = {}) -> None:
        await self.send(
            h11.Response(status_code=status, headers=list({"Content-Type": "application/json", **headers}.items()))
        )

    async def json(self, status: int, body: object, headers: Mapping[str, str] = {}) -> None:
        text = json.dumps(body).encode()
        await self.head(status, {"Content-Length": str(len(text)), **headers})
        await self.send(h11.Data(data=text), h11.EndOfMessage())

    async def no(self, status: int, reason: str, headers: Mapping[str, str] = {}) -> None:
        await self.json(
            status, {"kind": "Status", "message": f"it is {reason}", "reason": reason, "code": status}, headers
        )

    async def event(self, kind: str, found: object) -> None:
        await self.send(h11.Data(data=json.dumps({"type": kind, "object": found}).encode() + b"\n"))


@dataclass
class ApiServer:
    """An API server. ``put``, ``remove`` and ``bookmark`` are what happens there; ``requests`` is who asked for what."""

    authority: trustme.CA = field(default_factory=trustme.CA)
    clients: trustme.CA | None = None
    """Who signed the certificates that clients must have."""
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    always: Fault | None = None
    """What each request meets that meets none of these."""
    tokens: set[str] = field(default_factory=lambda: {TOKEN.decode()})
    forbidden: str = ""
    """What no path that is written may contain."""
    hidden: str = ""
    """What no path that is read may contain."""
    denied: frozenset[str] = frozenset()
    """What an access review says no to, such as ``list pods``."""
    removed: str = ""
    """What the paths begin with that it has nothing at, as those of an API's version that this release has no more."""
    version: int = 100
    oldest: int = 0
    """Watches from before this version are 410 Gone."""
    connections: int = 0
    watches: int = 0
    mute: int = 0
    """So many watches, the first ones, say nothing more and have no end, as behind a proxy that has lost the server."""
    port: int = 0
    told: Callable[[], object] = lambda: None
    """What is called after each change."""
    _log: list[tuple[int, str, str, dict[str, Any]]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, name: str = "127.0.0.1") -> None:
        """Listen; again on the same port, where it was stopped."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        issued(self.authority, name).configure_cert(tls)
        if self.clients is not None:
            self.clients.configure_trust(tls)
            tls.verify_mode = ssl.CERT_REQUIRED
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Be away: nobody listens, and every connection is cut."""
        if self._server is not None:
            self._server.close()
        self._server = None
        for writer in list(self._open):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def access(self, token: Path | bytes = TOKEN) -> Access:
        return Access("127.0.0.1", self.port, self.authority.cert_pem.bytes(), token=token)

    def kubeconfig(self, path: Path) -> Path:
        """Write how a process reaches it."""
        authority = base64.b64encode(self.authority.cert_pem.bytes()).decode()
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority-data": authority}
        content = {
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": TOKEN.decode()}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        path.write_text(json.dumps(content))
        return path

    # What happens there.

    def put(self, path: str, **content: Any) -> dict[str, Any]:
        """Make an object what it is from now on."""
        before = self.objects.get(path)
        self.version += 1
        found = copy.deepcopy(content)
        found.setdefault("metadata", {})
        found["metadata"] |= {"name": path.rpartition("/")[2], "resourceVersion": str(self.version)}
        self.objects[path] = found
        self._tell("ADDED" if before is None else "MODIFIED", path, found)
        return found

    def change(self, path: str, do: Callable[[dict[str, Any]], object]) -> None:
        """Change an object."""
        found = copy.deepcopy(self.objects[path])
        do(found)
        self.put(path, **found)

    def remove(self, path: str) -> None:
        self.version += 1
        self._tell("DELETED", path, self.objects.pop(path))

    def bookmark(self) -> None:
        self.version += 1
        self._tell("BOOKMARK", "", {"metadata": {"resourceVersion": str(self.version)}})

    def forget(self) -> None:
        """Forget every version that was: who watches from one of them hears 410."""
        self.version += 1
        self.oldest = self.version

    def asked(self, method: str, *, watch: bool = False) -> list[Request]:
        return [one for one in self.requests if one.method == method and one.watches == watch]

    def _tell(self, kind: str, path: str, found: dict[str, Any]) -> None:
        self._log.append((self.version, kind, path, copy.deepcopy(found)))
        self._news.set()
        self._news = asyncio.Event()
        self.told()

    async def upgrade(self, version: str) -> None:
        """Start anew, as a release with this version of resource.k8s.io and no other one, and with all the objects; up or down."""
        await self.stop()
        group = "/apis/resource.k8s.io"
        [before] = (one["version"] for one in self.objects[group]["versions"])
        self.removed = f"{group}/{before}/"
        for path in [one for one in self.objects if one.startswith(self.removed)]:
            found = self.objects.pop(path)
            for device in found.get("spec", {}).get("devices", ()):
                _spell(device, basic=version == "v1beta1")
            self.objects[f"{group}/{version}/{path.removeprefix(self.removed)}"] = found
        self.put(group, versions=[{"version": version}])
        await self.start()

    # Who asks.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # It was under way when that ended.
            writer.transport.abort()
            return
        self.connections += 1
        self._open.add(writer)
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, h11.ProtocolError, asyncio.CancelledError):
            http = h11.Connection(h11.SERVER)
            while (request := await _request(reader, http)) is not None:
                self.requests.append(request)
                answer = Answer(writer, http)
                await (self.faults.popleft() if self.faults else self.always or self.answer)(answer, request)
                if http.our_state is not h11.DONE:
                    break
                http.start_next_cycle()
        self._open.discard(writer)
        writer.transport.abort()

    async def answer(self, answer: Answer, request: Request) -> None:
        """Answer as a server does that is well."""
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            await answer.no(401, "Unauthorized")
        elif self.removed and request.path.startswith(self.removed):
            await answer.head(404, {"Content-Type": "text/plain", "Content-Length": "18"})
            await answer.send(h11.Data(data=b"404 page not found"), h11.EndOfMessage())
        elif (no := self.hidden if request.method == "GET" else self.forbidden) and no in request.path:
            await answer.no(403, "Forbidden")
        elif request.watches:
            await self._watch(answer, request)
        elif request.method == "GET":
            await self._get(answer, request)
        elif request.path.endswith("/selfsubjectaccessreviews"):
            asked = request.body["spec"]["resourceAttributes"]
            what = "/".join(filter(None, (asked["resource"], asked["subresource"])))
            await answer.json(
                201, {**request.body, "status": {"allowed": f"{asked['verb']} {what}" not in self.denied}}
            )
        elif request.method == "POST":
            await self._create(answer, request)
        elif request.path.removesuffix("/status") not in self.objects and "apply" not in request.headers.get(
            "content-type", ""
        ):
            await answer.no(404, "NotFound")
        elif request.method == "DELETE":
            self.remove(request.path)
            await answer.json(200, {"kind": "Status", "status": "Success"})
        else:
            await self._patch(answer, request)

    async def _get(self, answer: Answer, request: Request) -> None:
        if request.path in self.objects:
            await answer.json(200, self.objects[request.path])
            return
        found = [one for _, one in self._selected(request)]
        if (
            not found
            and not any(path.startswith(f"{request.path}/") for path in self.objects)
            and request.path.count("/") > 3
        ):
            await answer.no(404, "NotFound")
            return
        begin, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "500"))
        more = str(begin + limit) if len(found) > begin + limit else ""
        await answer.json(
            200,
            {
                "metadata": {"resourceVersion": str(self.version), "continue": more},
                "items": found[begin : begin + limit],
            },
        )

    def _selected(self, request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, found in sorted(self.objects.items()):
            if _fits(path, found, request):
                yield path, found

    async def _watch(self, answer: Answer, request: Request) -> None:
        seen = int(request.query["resourceVersion"])
        if seen < self.oldest:
            await answer.no(410, "Expired")
            return
        self.watches += 1
        number = self.watches
        await answer.head(200, {"Transfer-Encoding": "chunked"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "3600"))):
                while True:
                    news = self._news
                    while number <= self.mute:
                        await asyncio.Event().wait()
                    for version, kind, path, found in list(self._log):
                        if version <= seen:
                            continue
                        if _fits(path, found, request) if path else "allowWatchBookmarks" in request.query:
                            await answer.event(kind, found)
                        seen = version
                    await news.wait()
        while number <= self.mute:
            await asyncio.Event().wait()
        await answer.send(h11.EndOfMessage())

    async def _create(self, answer: Answer, request: Request) -> None:
        name = request.body["metadata"].get("name") or f"made-{self.version}"
        path = f"{request.path}/{name}"
        if path in self.objects:
            await answer.no(409, "AlreadyExists")
            return
        await answer.json(201, self.put(path, **request.body))

    async def _patch(self, answer: Answer, request: Request) -> None:
        path = request.path.removesuffix("/status")
        found = copy.deepcopy(self.objects.get(path, {}))
        if "dryRun" in request.query:
            await answer.json(200, {"metadata": {"name": path.rpartition("/")[2]}, **request.body})
            return
        if isinstance(request.body, list):
            if _operated(found, request.body):
                await answer.json(200, self.put(path, **found))
            else:
                await answer.no(422, "Invalid")
            return
        version = request.body.get("metadata", {}).get("resourceVersion")
        if version is not None and version != found["metadata"]["resourceVersion"]:
            await answer.no(409, "Conflict")
            return
        strategic = "strategic" in request.headers["content-type"]
        await answer.json(200, self.put(path, **_merged(found, request.body, strategic=strategic)))


def _spell(device: dict[str, Any], *, basic: bool) -> None:
    """Spell a device of a ResourceSlice as v1beta1 does, or as the later versions do."""
    said = device.pop("basic", None) or {key: device.pop(key) for key in list(device) if key != "name"}
    device.update({"basic": said} if basic else said)


async def _request(reader: asyncio.StreamReader, http: h11.Connection) -> Request | None:
    head, body = None, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            at = urlsplit(head.target.decode())
            headers = {name.decode(): value.decode() for name, value in head.headers}
            content = json.loads(body) if body else None
            return Request(head.method.decode(), at.path, dict(parse_qsl(at.query)), headers, content)
        else:
            return None


def _fits(path: str, found: dict[str, Any], request: Request) -> bool:
    wanted = dict(one.split("=") for one in request.query.get("fieldSelector", "").split(",") if one)
    values = {"metadata.name": found["metadata"]["name"]} | {
        f"spec.{key}": value for key, value in found.get("spec", {}).items() if isinstance(value, str)
    }
    everywhere = re.sub(r"/namespaces/[^/]+/(?=[^/]+/)", "/", path)  # A list without a namespace is of all of them.
    there = any(one.startswith(f"{request.path}/") for one in (path, everywhere))
    return there and all(values.get(key) == value for key, value in wanted.items())


def _merged(found: Any, patch: Any, *, strategic: bool) -> Any:
    """Merge as RFC 7396 says; strategic: lists of conditions by their type."""
    if strategic and isinstance(patch, list) and isinstance(found, list) and all("type" in one for one in patch):
        by_type = {one["type"]: one for one in found}
        return list((by_type | {one["type"]: {**by_type.get(one["type"], {}), **one} for one in patch}).values())
    if not isinstance(patch, dict):
        return patch
    merged = dict(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value, strategic=strategic)
    return merged


def _operated(found: Any, patch: list[dict[str, Any]]) -> bool:
    """Carry out what a JSON patch says, as far as tests and removals from lists go; False where a test fails."""
    for operation in patch:
        *way, last = operation["path"].strip("/").split("/")
        place = found
        for key in way:
            place = place[int(key)] if isinstance(place, list) else place[key]
        if isinstance(place, list) and int(last) >= len(place):
            return False
        if operation["op"] == "remove":
            del place[int(last)]
        elif place[last] != operation["value"]:
            return False
    return True
