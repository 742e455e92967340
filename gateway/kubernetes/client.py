"""A client of the API server, bounded in bytes and time.

A connection is kept for half a minute for the next request. A request that fails because the kept connection had ended is tried
once more. All other retries are the caller's. ``watch`` makes the requests that don't end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from gateway.kubernetes.access import AccessError
from gateway.kubernetes.wire import Connection, NoAnswerError, ServerAwayError, TooLongError
from gateway.wires.log import printable

if TYPE_CHECKING:
    import h11

    from gateway.kubernetes.access import Access

T = TypeVar("T")
Body = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""An object or a patch. A JSON patch is a list."""

REQUEST_S: Final = 10.0
"""Most seconds for a request, with its connection and its whole answer."""
CONNECT_S: Final = 3.0
"""Most of these seconds for the connection."""
MAX_BYTES: Final = 4 * 1024 * 1024
"""Most bytes of an answer, or of one event of a watch. An object has at most 1.5 MiB (etcd). If a page of a list is larger, the
client asks for smaller pages."""
PAGE_OBJECTS: Final = 100
"""Objects in one page of a list."""
MAX_PAGES: Final = 2_000
"""Most pages of a list. A longer list is refused."""
MAX_OBJECTS: Final = 20_000
"""Most objects of a list. A longer list is refused."""
MAX_LIST_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of the objects of a list. A longer list is refused."""
MAX_PARTS: Final = 50_000
"""Most JSON objects and lists within one object, and a quarter of its most quotation marks. A ResourceSlice has 10,000. Decoding so
many takes the event loop some 0.03 s; a thread would not help, because msgspec holds the interpreter's lock."""
_TEXT: Final = re.compile(rb'"[^"]*"')
MAX_REQUESTS: Final = 8
"""Most requests at once, without watches; the next one waits."""
_KEEP_S: Final = 30.0
"""Seconds for which an idle connection is kept."""
_ERROR_CHARS: Final = 400
_REASON_CHARS: Final = 80


class Patch(Enum):
    """The kind of a patch. The value is its content type."""

    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    APPLY = "application/apply-patch+yaml"
    JSON = "application/json-patch+json"


class KubernetesError(Exception):
    """A request failed.

    ``status`` is the HTTP status of the answer, 0 without one. ``reason`` is Kubernetes' word for it (``Conflict``,
    ``Expired``). ``retry_after`` are the seconds that the server asks to wait. ``away`` is True if the server was not reached.
    """

    def __init__(
        self, what: str, status: int, message: str, reason: str = "", retry_after: float = 0.0, *, away: bool = False
    ) -> None:
        reason = printable(reason[:_REASON_CHARS])
        told = f"{status} {reason}".strip() if status else "no answer"
        super().__init__(f"{what}: {told}: {printable(message[:_ERROR_CHARS])}")
        self.status, self.reason, self.retry_after, self.away = status, reason, retry_after, away

    @property
    def is_missing(self) -> bool:
        """True if the object doesn't exist. A server without the API, or a proxy, answers 404 without that reason."""
        return (self.status, self.reason) == (404, "NotFound")

    @property
    def is_astray(self) -> bool:
        """True if the path doesn't exist: the server may have another version of the API now."""
        return self.status == 404 and not self.is_missing


class ApiStatus(Struct):
    """The API server's description of an error; ``code`` is an HTTP status."""

    code: int = 0
    message: str = ""
    reason: str = ""


class ListMeta(Struct):
    """The metadata of a list; an object has ``resourceVersion`` also."""

    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next: str = msgspec.field(default="", name="continue")


class _Page(Struct):
    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


class Client:
    """A client of one API server. It belongs to one event loop; several tasks may use it at once.

    Args:
        access: the server's address and our credentials.
        manager: the field manager of our writes, and our name in the server's logs.
    """

    def __init__(self, access: Access, *, manager: str) -> None:
        self.access, self._manager = access, manager
        self._idle: Connection | None = None
        self._forget: asyncio.TimerHandle | None = None
        self._turn = asyncio.Semaphore(MAX_REQUESTS)

    def close(self) -> None:
        """Close the kept connection. Requests in flight end with their tasks."""
        if (kept := self._take_kept()) is not None:
            kept.close()

    async def get(self, path: str, kind: type[T], *, seconds: float = REQUEST_S) -> T:
        """Get one object; ``kind`` is a msgspec type with the fields to read (or ``dict[str, Any]``).

        Raises:
            KubernetesError: there was no answer, an error, or an unexpected answer. Every method here raises it.
        """
        return decoded(await self._ask("GET", path, seconds=seconds), kind, f"GET {path}")

    async def list(
        self,
        path: str,
        kind: type[T],
        *,
        fields: str = "",
        seconds: float = REQUEST_S,
        keep: Callable[[T], bool] = lambda _: True,
    ) -> tuple[list[T], str]:
        """Get all objects, page by page, and the resource version for a watch; ``seconds`` is for each page.

        Objects that ``keep`` rejects are dropped at once, and don't count.
        """
        found: list[T] = []
        what, read = f"GET {path}", 0
        query, limit = selector(fields), PAGE_OBJECTS
        for _ in range(MAX_PAGES):
            query["limit"] = str(limit)
            try:
                text = await self._ask("GET", target(path, query), seconds=seconds)
            except KubernetesError as error:
                if not isinstance(error.__cause__, TooLongError) or limit == 1:
                    raise
                limit = max(limit // 4, 1)
                continue
            limit = min(2 * limit, PAGE_OBJECTS)
            got = _decoded(text, _Page, what)
            for item in map(bytes, got.items or ()):
                if keep(one := decoded(item, kind, what)):
                    found.append(one)
                    read += len(item)
                await asyncio.sleep(0)
            if len(found) > MAX_OBJECTS:  # Not every server respects the limit.
                break
            if read > MAX_LIST_BYTES:
                raise KubernetesError(what, 0, f"the list is too long. Allowed: {MAX_LIST_BYTES} bytes")
            if not got.metadata.next:
                return found, got.metadata.resource_version
            query["continue"] = got.metadata.next
        raise KubernetesError(what, 0, f"too many objects. Allowed: {MAX_OBJECTS} in {MAX_PAGES} pages")

    async def create(self, path: str, body: Mapping[str, Any]) -> None:
        """Create an object; ``path`` is the collection's."""
        query = {"fieldManager": self._manager}
        await self._ask("POST", target(path, query), body, "application/json", seconds=REQUEST_S)

    async def review(self, path: str, body: Mapping[str, Any], kind: type[T], *, seconds: float = REQUEST_S) -> T:
        """Post a review, which the server answers and doesn't store."""
        return decoded(await self._ask("POST", path, body, "application/json", seconds=seconds), kind, f"POST {path}")

    async def patch(self, path: str, body: Body, how: Patch) -> None:
        """Change an object."""
        await self._ask("PATCH", target(path, {"fieldManager": self._manager}), body, how.value, seconds=REQUEST_S)

    async def apply(self, path: str, body: Body, kind: type[T], *, dry_run: bool = False) -> T:
        """Apply ``body`` (server-side apply, by force); return the resulting object.

        With ``dry_run`` the server changes nothing, and returns the result that it would have.
        """
        query = {"fieldManager": self._manager, "force": "true"} | ({"dryRun": "All"} if dry_run else {})
        text = await self._ask("PATCH", target(path, query), body, Patch.APPLY.value, seconds=REQUEST_S)
        return decoded(text, kind, f"PATCH {path}")

    async def delete(self, path: str) -> None:
        """Delete an object, if it exists."""
        try:
            await self._ask("DELETE", path, seconds=REQUEST_S)
        except KubernetesError as error:
            if not error.is_missing:
                raise

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Open a request with an endless answer, for ``watch``; ``REQUEST_S`` limits the wait for its head, not for its body."""
        connection = None
        try:
            async with _within(REQUEST_S, f"GET {path}"):
                connection = await self._connect(REQUEST_S)
                answer = await self._send(connection, "GET", path, b"", "")
                if answer.status_code != 200:
                    raise _refusal(f"GET {path}", answer, await _whole(connection))
            async with aclosing(connection.body()) as parts:
                yield parts
        except (NoAnswerError, AccessError) as error:
            raise _unanswered(f"GET {path}", error) from error
        finally:
            if connection is not None:
                connection.close()

    # One request.

    async def _ask(self, method: str, path: str, body: Body | None = None, kind: str = "", *, seconds: float) -> bytes:
        content = b"" if body is None else msgspec.json.encode(body)
        what = f"{method} {path}"
        try:
            async with _within(seconds, what), self._turn:
                # Never repeat a POST after an old connection broke: the object may exist already.
                if method != "POST" and (kept := self._take_kept()) is not None:
                    try:
                        return await self._exchange(kept, method, path, content, kind)
                    except TooLongError:
                        raise
                    except NoAnswerError:
                        pass
                return await self._exchange(await self._connect(seconds), method, path, content, kind)
        except (NoAnswerError, AccessError) as error:
            raise _unanswered(what, error) from error

    async def _exchange(self, connection: Connection, method: str, path: str, content: bytes, kind: str) -> bytes:
        keep = False
        try:
            answer = await self._send(connection, method, path, content, kind)
            found = await _whole(connection)
            keep = connection.reuse()
        finally:
            if keep:
                self._keep(connection)
            else:
                connection.close()
        if not 200 <= answer.status_code < 300:
            raise _refusal(f"{method} {path}", answer, found)
        return found

    async def _connect(self, seconds: float) -> Connection:
        try:
            async with asyncio.timeout(min(CONNECT_S, seconds)):
                return await Connection.open(self.access, self.access.context())
        except TimeoutError as error:
            raise ServerAwayError(
                f"no connection to {self.access.host}:{self.access.port} within {CONNECT_S:g} s"
            ) from error

    async def _send(self, connection: Connection, method: str, path: str, content: bytes, kind: str) -> h11.Response:
        headers = [
            ("Host", authority(self.access.host, self.access.port)),
            ("Accept", "application/json"),
            ("User-Agent", self._manager),
        ]
        if authorization := self.access.authorization():
            headers.append(("Authorization", authorization))
        if content:
            headers += [("Content-Type", kind), ("Content-Length", str(len(content)))]
        return await connection.ask(method, self.access.base + path, headers, content)

    def _take_kept(self) -> Connection | None:
        kept, self._idle = self._idle, None
        if self._forget is not None:
            self._forget.cancel()
            self._forget = None
        return kept

    def _keep(self, connection: Connection) -> None:
        self.close()
        self._idle = connection
        self._forget = asyncio.get_running_loop().call_later(_KEEP_S, self.close)


def authority(host: str, port: int) -> str:
    """Return the host as HTTP writes it (RFC 9112, section 3.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def target(path: str, query: Mapping[str, str]) -> str:
    """Return a path with its query."""
    return f"{path}?{urlencode(query)}" if query else path


def selector(fields: str) -> dict[str, str]:
    """Return the query that selects objects."""
    return {"fieldSelector": fields} if fields else {}


def decoded(text: bytes, kind: type[T], what: str) -> T:
    """Decode the JSON of one object as ``kind``.

    Raises:
        KubernetesError: it is something else, or larger than any object.
    """
    if _has_more(text):  # Count again without texts: users' annotations may contain brackets.
        bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
        if bare.count(b'"') > 4 * MAX_PARTS or _has_more(_TEXT.sub(b"", bare)):
            raise KubernetesError(what, 0, f"an object has too many parts. Allowed: {MAX_PARTS}")
    return _decoded(text, kind, what)


def _has_more(text: bytes) -> bool:
    return text.count(b"{") + text.count(b"[") > MAX_PARTS or text.count(b'"') > 4 * MAX_PARTS


def _decoded(text: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KubernetesError(what, 0, f"the answer is no JSON of Kubernetes: {error}") from error


async def _whole(connection: Connection) -> bytes:
    found = bytearray()
    async with aclosing(connection.body()) as parts:
        async for part in parts:
            found += part
            if len(found) > MAX_BYTES:
                raise TooLongError(f"the answer is too long. Allowed: {MAX_BYTES} bytes")
    return bytes(found)


@asynccontextmanager
async def _within(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise KubernetesError(what, 0, f"nothing whole came within {seconds:g} s") from error


def _unanswered(what: str, error: Exception) -> KubernetesError:
    return KubernetesError(what, 0, str(error), away=isinstance(error, ServerAwayError | AccessError))


def _refusal(what: str, answer: h11.Response, text: bytes) -> KubernetesError:
    """Return the error of a refusal: Kubernetes' ``Status``, or the answer of a proxy."""
    try:
        status = msgspec.json.decode(text, type=ApiStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = ApiStatus(message=text[:_ERROR_CHARS].decode(errors="replace"))
    after = dict(answer.headers).get(b"retry-after", b"")
    seconds = float(after) if after.isdigit() and len(after) < 6 else 0.0
    return KubernetesError(what, answer.status_code, status.message, status.reason, seconds)
