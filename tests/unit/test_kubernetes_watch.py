"""Watching the API server: nothing is missed and nothing ends, whatever becomes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import h11
import pytest
import structlog
import yaml

from gateway.kubernetes import client, watch
from gateway.kubernetes.client import Client, KubernetesError
from gateway.kubernetes.watch import ObjectChange, Watch
from tests.fakes.apiserver import Answer, ApiServer, Fault, Request
from tests.unit.kubernetes import api, authority, node, server, until

__all__ = ["api", "authority", "server"]

ROOT = Path(__file__).resolve().parents[2]
NODES, NODE = "/api/v1/nodes", "/api/v1/nodes/n1"
Anything = dict[str, Any]


class Following:
    """A watch that is read: its changes, one by one."""

    def __init__(self, one: Watch[Anything]) -> None:
        self.watch, self._changes = one, one.changes()

    async def next(self) -> tuple[str, list[str]]:
        """Wait for a change: its kind, and each object's label ``is``."""
        async with asyncio.timeout(10):
            change: ObjectChange[Anything] = await anext(self._changes)
        return change.kind.value, [one["metadata"]["labels"].get("is", "") for one in change.objects]

    async def close(self) -> None:
        await self._changes.aclose()


@pytest.fixture
async def following(api: Client) -> AsyncIterator[Following]:
    one = Following(Watch(api, NODES, Anything, name="n1"))
    yield one
    await one.close()


@pytest.fixture
async def followed(server: ApiServer, following: Following) -> Following:
    """A watch that goes on."""
    server.put(NODE, **node())
    await following.next()
    server.put(NODE, **node())
    await following.next()
    return following


async def test_all_objects_come_first_and_each_change_after(server: ApiServer, api: Client) -> None:
    server.put(NODE, **node({"is": "a"}))
    following = Following(Watch(api, NODES, Anything))
    assert await following.next() == ("WHOLE", ["a"])
    server.put("/api/v1/nodes/n2", **node({"is": "b"}))
    assert await following.next() == ("ADDED", ["b"])
    server.put("/api/v1/nodes/n2", **node({"is": "c"}))
    assert await following.next() == ("MODIFIED", ["c"])
    server.remove("/api/v1/nodes/n2")
    assert await following.next() == ("DELETED", ["c"])
    assert following.watch.trouble == ""
    await following.close()


async def test_one_object_needs_no_right_to_list(server: ApiServer, followed: Following) -> None:
    assert [(one.path, one.watches) for one in server.requests] == [(NODE, False), (NODES, True)]
    assert server.requests[1].query["fieldSelector"] == "metadata.name=n1"


async def test_a_watch_that_broke_goes_on_where_it_was(server: ApiServer, followed: Following) -> None:
    await server.stop()
    server.put(NODE, **node({"is": "meanwhile"}))
    await server.start()
    assert await followed.next() == ("MODIFIED", ["meanwhile"])
    assert len(server.asked("GET")) == 1, "all was listed once"


async def test_a_bookmark_moves_the_place_where_it_goes_on(server: ApiServer, followed: Following) -> None:
    server.bookmark()
    pending = asyncio.ensure_future(followed.next())
    await until(lambda: followed.watch._version == str(server.version))
    await server.stop()
    server.oldest = server.version
    await server.start()
    server.put(NODE, **node({"is": "after"}))
    assert await pending == ("MODIFIED", ["after"])


async def test_where_the_server_has_forgotten_all_is_listed_anew(server: ApiServer, followed: Following) -> None:
    await server.stop()
    server.put(NODE, **node({"is": "later"}))
    server.forget()
    await server.start()
    assert await followed.next() == ("WHOLE", ["later"])


async def _expired(answer: Answer, _: Request) -> None:
    await answer.head(200, {"Transfer-Encoding": "chunked"})
    await answer.event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
    await answer.send(h11.EndOfMessage())


async def _failing(answer: Answer, _: Request) -> None:
    await answer.head(200, {"Transfer-Encoding": "chunked"})
    await answer.event("ERROR", {"kind": "Status", "code": 500, "message": "etcd"})
    await asyncio.get_running_loop().create_future()


async def _garbage(answer: Answer, _: Request) -> None:
    await answer.head(200, {"Transfer-Encoding": "chunked"})
    await answer.send(h11.Data(data=b"{]\n"))
    await asyncio.get_running_loop().create_future()


async def _of_a_later_kubernetes(answer: Answer, _: Request) -> None:
    await answer.head(200, {"Transfer-Encoding": "chunked"})
    await answer.event("PAUSED", {"metadata": {}})
    await answer.send(h11.EndOfMessage())


async def _without_end(answer: Answer, _: Request) -> None:
    await answer.head(200, {"Transfer-Encoding": "chunked"})
    while True:
        await answer.send(h11.Data(data=b"x" * 4096))


async def _busy(answer: Answer, _: Request) -> None:
    await answer.no(429, "TooManyRequests", {"Retry-After": "0"})


async def _forbidden(answer: Answer, _: Request) -> None:
    await answer.no(403, "Forbidden")


async def _ended(answer: Answer, _: Request) -> None:
    await answer.head(200, {"Transfer-Encoding": "chunked"})
    await answer.send(h11.EndOfMessage())


async def _stalled(answer: Answer, _: Request) -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("path", "component"),
    [(NODES, "api-server"), ("/apis/resource.k8s.io/v1/resourceslices", "dra")],
)
async def test_who_lacks_rights_hears_which_component_has_them(
    path: str, component: str, server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and it allows what is watched: to apply another one would mend nothing."""
    monkeypatch.setattr(watch, "FIRST", 60.0)
    server.faults.append(_forbidden)
    following = Following(Watch(api, path, Anything))
    with structlog.testing.capture_logs() as log:
        waits = asyncio.ensure_future(following.next())
        await until(lambda: log)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
    await following.close()
    [named] = re.findall(r"deploy/kustomize/components/([a-z-]+)", log[0]["advice"])
    assert named == component
    rules = [
        rule
        for file in (ROOT / "deploy/kustomize/components" / named).glob("*.yaml")
        for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))
        for rule in (one.get("rules") or ())
    ]
    assert any(path.rpartition("/")[2] in rule["resources"] and "watch" in rule["verbs"] for rule in rules)


@pytest.mark.parametrize(
    ("fault", "anew"),
    [
        (_expired, True),
        (_failing, False),
        (_garbage, True),
        (_of_a_later_kubernetes, False),
        (_without_end, False),
        (_busy, False),
        (_forbidden, False),
        (_ended, False),
        (_stalled, False),
    ],
)
async def test_after_each_fault_it_goes_on(
    server: ApiServer, following: Following, monkeypatch: pytest.MonkeyPatch, fault: Fault, *, anew: bool
) -> None:
    monkeypatch.setattr(client, "MOST", 100_000)
    monkeypatch.setattr(watch, "HEAD", 0.2)
    server.put(NODE, **node())
    server.faults.extend([server.answer, fault])
    assert await following.next() == ("WHOLE", [""])
    server.put(NODE, **node({"is": "new"}))
    kind, labels = await following.next()
    assert (kind, labels) == ("WHOLE" if anew else "MODIFIED", ["new"])


async def test_after_a_change_that_cannot_be_read_all_is_listed_anew(
    server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was before isn't so any more."""
    following = Following(Watch(api, NODES, Anything))
    server.put(NODE, **node())
    assert await following.next() == ("WHOLE", [""])
    pending = asyncio.ensure_future(following.next())
    await until(lambda: following.watch.trouble == "")
    monkeypatch.setattr(client, "MOST_PARTS", 100)
    server.put(NODE, **node({"is": "endless"}), spec={"parts": [[]] * 101})
    await until(lambda: "at most 100 parts" in following.watch.trouble)
    server.put(NODE, **node({"is": "mended"}))
    assert await pending == ("WHOLE", ["mended"])
    await following.close()


async def test_a_server_that_was_away_from_the_start_is_found(server: ApiServer, following: Following) -> None:
    await server.stop()
    pending = asyncio.ensure_future(following.next())
    await until(lambda: following.watch.trouble.startswith("GET"))
    server.put(NODE, **node({"is": "there"}))
    await server.start()
    assert await pending == ("WHOLE", ["there"])


async def test_an_object_that_is_deleted_and_made_again_is_followed(server: ApiServer, followed: Following) -> None:
    server.remove(NODE)
    assert (await followed.next())[0] == "DELETED"
    server.put(NODE, **node({"is": "again"}))
    assert await followed.next() == ("ADDED", ["again"])


async def test_who_reads_slowly_gets_every_change(server: ApiServer, followed: Following) -> None:
    for number in range(500):
        server.put(NODE, **node({"is": str(number)}))
    assert [(await followed.next())[1] for _ in range(500)] == [[str(number)] for number in range(500)]


async def test_a_watch_that_never_ends_is_ended(
    server: ApiServer, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LASTS", 0)
    monkeypatch.setattr(watch, "LATE", 0.05)
    server.put(NODE, **node())
    await following.next()
    pending = asyncio.ensure_future(following.next())
    await until(lambda: len(server.asked("GET", watch=True)) > 2)
    pending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await pending


AWAY = KubernetesError("GET", 0, "", away=True)
BUSY = KubernetesError("GET", 503, "")
LATER = KubernetesError("GET", 429, "", retry_after=7)
LATE = KubernetesError("GET", 429, "", retry_after=3600)


@pytest.mark.parametrize(
    ("error", "failures", "chance", "seconds"),
    [
        (None, 0, 1, 0.2),
        (None, 0, 0, 0.1),
        (None, 50, 1, 3),
        (AWAY, 1, 1, 0.4),
        (AWAY, 3, 0, 0.8),
        (AWAY, 1000, 1, 3),
        (AWAY, 1000, 0, 1.5),
        (BUSY, 1, 1, 0.4),
        (BUSY, 1000, 1, 30),
        (LATER, 0, 0, 7),
        (LATER, 0, 1, 10.5),
        (LATE, 0, 0, 30),
    ],
)
def test_how_long_the_server_is_left_alone(
    error: KubernetesError | None, failures: int, chance: float, seconds: float
) -> None:
    assert watch.pause(error, failures, chance) == pytest.approx(seconds)


def test_failures_while_the_server_was_away_do_not_count_once_it_answers() -> None:
    retries = watch.Retries()
    assert max(retries.wait(AWAY) for _ in range(100)) <= watch.AWAY
    assert retries.wait(BUSY) <= watch.FIRST
    assert max(retries.wait(BUSY) for _ in range(100)) > watch.AWAY
    retries.worked()
    assert retries.wait(BUSY) <= watch.FIRST


async def test_a_server_that_returns_is_asked_again_soon(
    server: ApiServer, followed: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour away, and then it has too much to do for a moment: that moment is not an hour's."""
    counted: list[tuple[bool, int]] = []

    def pause(error: KubernetesError | None, failures: int, _: float) -> float:
        counted.append((error is not None and error.away, failures))
        return 0.01

    monkeypatch.setattr(watch, "pause", pause)
    await server.stop()
    pending = asyncio.ensure_future(followed.next())
    await until(lambda: len(counted) >= 10)
    server.faults.append(_busy)
    server.put(NODE, **node({"is": "back"}))
    await server.start()
    assert await pending == ("MODIFIED", ["back"])
    assert counted[-1] == (False, 0)
    before = len(counted)
    pending = asyncio.ensure_future(followed.next())
    await server.stop()
    await until(lambda: len(counted) > before)
    assert counted[before] == (False, 0), "what went well since counts"
    pending.cancel()


def test_the_same_is_asked_ever_more_seldom_and_something_else_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "OFTEN", 1.0)
    monkeypatch.setattr(watch, "SELDOM", 6.0)
    backoff = watch.Backoff()
    assert [now for now in range(20) if backoff.due("a", now)] == [0, 1, 3, 7, 13, 19]
    assert backoff.due("b", 20)
    assert not backoff.due("b", 20.5)
