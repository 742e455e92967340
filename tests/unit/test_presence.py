"""Whether a kubelet is there, and what is said while none is."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.dra import records
from gateway.kubelet import presence
from gateway.kubelet.identity import KubeletId
from gateway.kubelet.presence import WAITING, Presence
from gateway.lab.waiting import until


@pytest.fixture
def kubelet(folder: Path) -> Iterator[socket.socket]:
    """One that listens in the folder."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "kubelet.sock"))
        listening.listen()
        yield listening


@pytest.fixture
def one(folder: Path) -> Presence:
    return Presence(folder / "kubelet.sock")


async def test_who_listens_is_not_gone(one: Presence, kubelet: socket.socket) -> None:
    one.found(anew=True)
    one.check()
    assert one.since is not None


async def test_who_does_not_listen_any_more_is_gone_and_told_once(one: Presence, kubelet: socket.socket) -> None:
    one.found(anew=True)
    kubelet.close()
    with capture_logs() as said:
        one.check()
        one.check()
    one.close()
    assert ([line["event"] for line in said], one.since) == (["the kubelet is gone"], None)


@pytest.mark.parametrize(
    ("there", "began", "starts"),
    [
        pytest.param(None, 0.0, True, id="none"),
        pytest.param(1.0, 1.0, True, id="a young one"),
        pytest.param(5.0, 5.0, False, id="an old one"),
        pytest.param(1.0, 5.0, False, id="an old one, found just now"),
        pytest.param(5.0, -3600.0, False, id="the clock was set back"),
    ],
)
def test_whether_one_starts(one: Presence, there: float | None, began: float, *, starts: bool) -> None:
    one.since = None if there is None else time.monotonic() - there
    one.kubelet = KubeletId(1, 2, round((time.time() - began) * 1e9))
    assert records.starts(one, 4.0) is starts


@pytest.mark.parametrize(("anew", "later"), [(True, True), (False, False)])
async def test_since_when(one: Presence, monkeypatch: pytest.MonkeyPatch, *, anew: bool, later: bool) -> None:
    now = 1.0
    monkeypatch.setattr(presence.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    one.found(anew=False)
    assert one.since == 1.0
    now = 2.0
    one.found(anew=anew)
    assert one.since == (2.0 if later else 1.0)


async def test_it_is_said_again_and_again_where_one_is_waited_for(
    one: Presence, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "REMIND_EVERY", 0.01)
    with capture_logs() as said:
        one.wait(backend="test")
        await until(lambda: len(said) >= 3, 10)
        one.found(anew=True)
        told = len(said)
        await asyncio.sleep(0.05)  # Nothing tells of a reminder that doesn't come.
    assert {(line["event"], line["socket"]) for line in said} == {(WAITING, str(folder / "kubelet.sock"))}
    assert [line["log_level"] for line in said[:3]] == ["info", "warning", "warning"]
    assert (said[0]["backend"], len(said)) == ("test", told)


async def test_the_wait_is_counted_from_the_kubelets_end(
    one: Presence, kubelet: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(presence.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    one.found(anew=True)
    kubelet.close()
    one.check()
    now = 1060.0
    with capture_logs() as said:
        one._remind()
    one.close()
    assert [line["waited_s"] for line in said] == [60]


async def test_there_is_one_reminder_however_often_one_is_waited_for(one: Presence) -> None:
    one.wait()
    first = one._reminder
    one.wait()
    one.close()
    assert first is not None
    assert first.cancelled()
