"""Whether a device whose Allocate took long may be given again: no kubelet's forgetting puts it into two pods."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from devices.model import Fault, PreferredRequest
from gateway.bridge import calls, source
from gateway.bridge.calls import BridgedResource, KubeletRecords
from gateway.bridge.doubt import QUICK, RECORDED, Doubts, is_due, refusal
from gateway.kubelet import view
from gateway.kubelet.view import View
from gateway.lab.waiting import until
from tests.unit.bridging import NIC, bridged, plugin

LONG = QUICK
FREE = View({}, source="pod-resources")


@pytest.mark.parametrize(
    ("before", "took", "looked", "doubted"),
    [
        pytest.param((), 0.001, LONG, (), id="answered at once"),
        pytest.param((), LONG, LONG, ("a",), id="it took long"),
        pytest.param(("a",), 0.001, LONG, ("a",), id="it was looked up while its Allocate was open"),
        pytest.param(("b",), 0.001, LONG, ("b",), id="another one's doubt"),
        pytest.param((), 0.001, 0.01, ("a",), id="a look was just over"),
        pytest.param((), 0.001, -0.001, ("a",), id="a look was dropped for it"),
    ],
)
def test_what_is_in_doubt_after_an_allocate(
    before: tuple[str, ...], took: float, looked: float, doubted: tuple[str, ...]
) -> None:
    doubts = Doubts()
    doubts.given(before, LONG, 0)
    doubts.given(("a",), took, 100, looked)
    assert doubts.among(("a", "b")) == set(doubted)


@pytest.mark.parametrize(
    ("held", "at", "doubted"),
    [
        pytest.param((), 100 + RECORDED, False, id="nobody holds it"),
        pytest.param(("a",), 1000, True, id="somebody holds it"),
        pytest.param((), 100, True, id="the kubelet may not have written it down"),
    ],
)
def test_a_doubt_is_over_when_nobody_holds_the_device(held: tuple[str, ...], at: float, *, doubted: bool) -> None:
    doubts = Doubts()
    doubts.given(("a",), LONG, 100)
    assert doubts.seen(held, at) is not doubted
    assert bool(doubts.among(("a",))) is doubted


def test_what_was_given_again_is_in_doubt_from_then_on() -> None:
    doubts = Doubts()
    assert doubts.given(("a",), LONG, 0)
    assert not doubts.given(("a",), 0.001, 100)  # It is written down already.
    assert doubts.given(("a", "b"), 0.001, 100)
    assert not doubts.seen((), 100)


@pytest.mark.parametrize(
    ("holders", "fault"),
    [
        pytest.param({}, None, id="free"),
        pytest.param({"b": "ns/pod/main"}, None, id="another one is held"),
        pytest.param({"a": "ns/pod/main"}, Fault.FAILED_PRECONDITION, id="held"),
        pytest.param(None, Fault.UNAVAILABLE, id="nobody says"),
    ],
)
def test_what_is_refused(holders: Mapping[str, str] | None, fault: Fault | None) -> None:
    refused = refusal("vendor.example/nic", ("a",), holders)
    assert (refused.fault if refused is not None else None) is fault
    assert holders is None or refused is None or "ns/pod/main" in str(refused)


@pytest.mark.parametrize(
    ("since", "looked", "due"),
    [
        pytest.param((), -math.inf, False, id="nothing is in doubt"),
        pytest.param((90,), -math.inf, True, id="never looked"),
        pytest.param((50, 90), 80, True, id="not since"),
        pytest.param((90,), 95, True, id="twice as old"),
        pytest.param((50, 80), 95, False, id="not yet"),
    ],
)
def test_doubts_are_looked_up_ever_more_rarely(since: tuple[float, ...], looked: float, *, due: bool) -> None:
    doubts = Doubts()
    doubts.since = {str(one): one for one in since}
    assert is_due([Doubts(), doubts], looked, 100) is due


class Kubelet:
    """A kubelet that is asked who holds what, and answers when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = asyncio.Event()
        self.looks = 0
        monkeypatch.setattr(view, "look", self._look)
        monkeypatch.setattr(calls, "listens", lambda _: True)

    async def _look(self, *_: Path) -> View:
        self.looks += 1
        await self.free.wait()
        return FREE


@pytest.fixture
def kubelet(monkeypatch: pytest.MonkeyPatch) -> Kubelet:
    return Kubelet(monkeypatch)


async def test_nobody_looks_while_an_allocate_is_open(kubelet: Kubelet) -> None:
    records = KubeletRecords(Path("none"), Path("none"))
    kubelet.free.set()
    with records.asked:
        assert await records.look_between() is None
    assert not kubelet.looks
    assert await records.look_between() == {}


async def test_a_look_is_dropped_when_an_allocate_begins(kubelet: Kubelet) -> None:
    records = KubeletRecords(Path("none"), Path("none"))
    look = asyncio.create_task(records.look_between())
    await until(lambda: kubelet.looks == 1, 10)
    began = time.monotonic()
    with records.asked:
        assert records.looked >= began
        async with asyncio.timeout(10):
            assert await look is None


async def test_one_look_ends_all_doubts(folder: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "SETTLE_EVERY", 0.01)
    kubelet.free.set()
    async with (
        bridged(folder) as watched,
        plugin(folder),
        plugin(folder, resource="vendor.example/b", endpoint="b.sock"),
    ):
        await watched.lists("a", "b")
        await watched.lists("a", "b", resource="vendor.example/b")
        plugins = watched.bridge.plugins.values()
        for one in plugins:
            one.doubts.given(("a",), LONG, time.monotonic() - RECORDED)
        await until(lambda: not any(one.doubts.since for one in plugins), 10)
    assert kubelet.looks == 1


async def test_an_allocate_that_waits_for_its_plugin_is_open(folder: Path, kubelet: Kubelet) -> None:
    kubelet.free.set()
    async with bridged(folder) as watched, plugin(folder) as played:
        await watched.lists("a", "b")
        one = cast("BridgedResource", watched.one())
        played.free.clear()
        waiting = asyncio.create_task(watched.allocate("a"))
        await until(lambda: len(played.allocated) == 1, 10)
        assert await one.records.look_between() is None
        played.free.set()
        await waiting
        assert await one.records.look_between() == {}


async def test_what_is_in_doubt_is_chosen_last(folder: Path) -> None:
    async with bridged(folder) as watched, plugin(folder):
        await watched.lists("a", "b")
        watched.one().doubts.given(("b",), LONG, time.monotonic())  # Which it would choose.
        assert await watched.bridge.prefer(NIC, PreferredRequest(("a", "b"), (), 1)) == ("a",)
        assert set(await watched.bridge.prefer(NIC, PreferredRequest(("a", "b"), (), 2))) == {"a", "b"}
