"""Watch objects: yield first all of them, then each change. A watch never ends, even while the server is away.

A watch continues from the last resource version that it knows. If the server no longer has that version (410 Gone), or a change
can't be read, all objects are listed again. A slow reader slows the server down; nothing is queued here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
import structlog
from msgspec import Struct

from gateway.kubernetes import client
from gateway.kubernetes.client import KubernetesError

if TYPE_CHECKING:
    from gateway.kubernetes.client import Client

T = TypeVar("T")

RETRY_S, AWAY_MAX_S, BUSY_MAX_S = 0.2, 3.0, 30.0
"""Seconds until the next try: at first; at most if the server doesn't answer, so that its return is noticed soon; and at most after
an error answer."""
REPEAT_S, REPEAT_MAX_S = 0.1, 2.0
"""Seconds until the same request is repeated: at first, and at most."""
WATCH_S = 300
"""Seconds after which the server ends a watch. Then the next watch starts."""
WATCH_GRACE_S = 30
"""Seconds after ``WATCH_S`` until the client ends a watch that the server didn't end."""
_GONE: Final = 410

_log = structlog.get_logger()


class ChangeKind(Enum):
    """The kind of a change."""

    WHOLE = "WHOLE"
    """All objects that exist now."""
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class ObjectChange(Struct, Generic[T], frozen=True):
    """A change: all objects for WHOLE, else one."""

    kind: ChangeKind
    objects: tuple[T, ...]


class _Versioned(Struct):
    metadata: client.ListMeta


class _Event(Struct):
    type: str
    object: msgspec.Raw


def pause(error: KubernetesError | None, failures: int, chance: float) -> float:
    """Return the seconds to wait after a number of failures in a row; ``chance`` is a random number from 0 to 1. Pure.

    If the server asks for a pause, the wait is a random bit longer, so that not all nodes try at once.
    """
    if error is not None and error.retry_after:
        return min(error.retry_after, BUSY_MAX_S) * (1 + chance / 2)
    most = AWAY_MAX_S if error is None or error.away else BUSY_MAX_S
    seconds: float = RETRY_S * 2 ** min(failures, 16)
    return min(seconds, most) * (0.5 + chance / 2)


class Retries:
    """Counts failures in a row. The count starts again when the server goes away or comes back."""

    def __init__(self) -> None:
        self._failures, self._away = 0, False

    def wait(self, error: KubernetesError | None) -> float:
        """Count a failure, and return the seconds until the next try."""
        if error is not None and error.away != self._away:
            self._failures, self._away = 0, error.away
        seconds = pause(error, self._failures, random.random())  # noqa: S311 - no secret
        self._failures += 1
        return seconds

    def worked(self) -> None:
        """Note a success: the count starts again."""
        self._failures = 0

    @property
    def are_new(self) -> bool:
        """True if the last failure was the first in a row, or the first since the server went away or came back."""
        return self._failures == 1


class Backoff:
    """Limits repetition of an action: each wait is twice as long, up to ``REPEAT_MAX_S`` seconds. Pure."""

    def __init__(self) -> None:
        self._about: object = None
        self._wait = self._at = 0.0

    def due(self, about: object, now: float) -> bool:
        """Return True if the action is due at ``now`` (monotonic seconds). It is always due if ``about`` differs from the last call."""
        if about != self._about:
            self._about, self._wait, self._at = about, REPEAT_S, now
        if now < self._at:
            return False
        self._at, self._wait = now + self._wait, min(2 * self._wait, REPEAT_MAX_S)
        return True


class Watch(Generic[T]):
    """A watch on a collection, or on one object of it.

    Args:
        api: the client.
        path: the collection's path; empty if ``moved`` returns it.
        kind: a msgspec type with the fields to read.
        name: the name of the one object to watch; '' for all objects. One object needs only the right to get it, not to list.
        fields: a field selector.
        moved: returns the collection's new path if the old one no longer exists; may raise a ``KubernetesError``.
    """

    def __init__(
        self,
        api: Client,
        path: str,
        kind: type[T],
        *,
        name: str = "",
        fields: str = "",
        moved: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._api, self._path, self._kind, self._name, self._moved = api, path, kind, name, moved
        self._query = client.selector(f"metadata.name={name}" if name else fields)
        self._version = ""
        self._retries = Retries()
        self.trouble = "not asked yet"
        """Why changes are unknown now; empty while the watch goes on."""

    async def changes(self) -> AsyncGenerator[ObjectChange[T], None]:
        """Yield all objects, then each change; after a gap all objects again."""
        error: KubernetesError | None = None
        while True:
            try:
                if self._moved is not None and (not self._path or (error is not None and error.is_astray)):
                    self._path = await self._moved()
                    self._version = ""  # Another version of the API has other fields.
                error = None
                if not self._version:
                    yield await self._everything()
                async with contextlib.aclosing(self._events()) as events:
                    async for change in events:
                        yield change
            except KubernetesError as caught:
                error = caught
                if error.status == _GONE:  # The server forgets old versions after a while.
                    self._version = ""
            wait = self._retries.wait(error)
            if error is not None and error.status != _GONE:
                self._tell(error)
            await asyncio.sleep(wait)

    async def _everything(self) -> ObjectChange[T]:
        if not self._name:
            fields = self._query.get("fieldSelector", "")
            found, self._version = await self._api.list(self._path, self._kind, fields=fields)
            return ObjectChange(ChangeKind.WHOLE, tuple(found))
        what = f"GET {self._path}/{self._name}"
        text = await self._api.get(f"{self._path}/{self._name}", msgspec.Raw)
        self._version = client.decoded(bytes(text), _Versioned, what).metadata.resource_version
        return ObjectChange(ChangeKind.WHOLE, (client.decoded(bytes(text), self._kind, what),))

    async def _events(self) -> AsyncGenerator[ObjectChange[T], None]:
        """Yield changes until the server ends the watch."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
            "resourceVersion": self._version,
        }
        path = client.target(self._path, self._query | query)
        async with self._api.stream(path) as parts:
            if self.trouble:
                _log.info("watching the API server", path=self._path)
            self.trouble = ""
            async with contextlib.aclosing(_lines(parts, WATCH_S + WATCH_GRACE_S)) as lines:
                async for line in lines:
                    try:
                        change = self._change(client.decoded(line, _Event, f"GET {self._path}"))
                    except KubernetesError as error:
                        if not error.status:  # The event can't be read, so list all objects again.
                            self._version = ""
                        raise
                    self._retries.worked()
                    if change is not None:
                        yield change

    def _change(self, event: _Event) -> ObjectChange[T] | None:
        what = f"watch of {self._path}"
        if event.type == "ERROR":
            error = client.decoded(bytes(event.object), client.ApiStatus, what)
            raise KubernetesError(what, error.code or 500, error.message, error.reason)
        seen = client.decoded(bytes(event.object), _Versioned, what).metadata.resource_version
        self._version = seen or self._version
        if event.type == "BOOKMARK":
            return None
        try:
            kind = ChangeKind(event.type)
        except ValueError:
            return None  # of a later Kubernetes
        return ObjectChange(kind, (client.decoded(bytes(event.object), self._kind, what),))

    def _tell(self, error: KubernetesError) -> None:
        if not self.trouble or self._retries.are_new:
            component = "dra" if "resource.k8s.io" in self._path else "api-server"
            advice = {
                401: "the token isn't accepted: look at the service account, or at the kubeconfig",
                403: f"the service account lacks rights: apply the RBAC of deploy/kustomize/components/{component}",
                404: "there is no such object or API: look at NODE_NAME",
            }.get(error.status, "what serves the kubelet goes on; trying again")
            _log.warning("the API server can't be watched", path=self._path, reason=str(error), advice=advice)
        self.trouble = str(error)


async def _lines(parts: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer until it ends or ``seconds`` have passed."""
    rest, ends = bytearray(), asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(ends):
                part = await anext(parts, b"")
        except TimeoutError:
            return
        if not part:
            return
        *lines, last = part.split(b"\n")
        for line in lines:
            rest += line
            yield bytes(rest)
            rest.clear()
        rest += last
        if len(rest) > client.MAX_BYTES:
            raise KubernetesError("watch", 0, f"an event is too long. Allowed: {client.MAX_BYTES} bytes")
