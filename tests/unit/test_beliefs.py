"""When the kubelet's records are looked into, and what is told and remembered of it: one row, one promise."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs
from structlog.typing import EventDict

from devices.model import Device
from gateway.kubelet import beliefs
from gateway.kubelet import view as kubelet_view
from gateway.kubelet.beliefs import Beliefs
from gateway.kubelet.drift import Earlier, MismatchKind
from gateway.kubelet.view import View
from gateway.lab.waiting import until

R, OTHER = "example.com/gpu", "example.com/other"
A, B = View({R: {"g": "ns/a/main"}}, {}), View({R: {"g": "ns/b/main"}}, {})
NOBODY = View({R: {}}, {})


class KubeletRecords:
    """What looks find, one after the other and the last for ever; and what came of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.views: list[View] = [NOBODY]
        self.listed = False
        self.remembered: list[Mapping[str, Sequence[Earlier]]] = []
        self.looks: asyncio.Queue[View] = asyncio.Queue()
        self.began, self.free = asyncio.Event(), asyncio.Event()
        self.free.set()
        monkeypatch.setattr(kubelet_view, "look", self._look)
        self.beliefs = Beliefs(
            Path("none"),
            Path("none"),
            lambda look: self.looks.put_nowait(look.view),
            lambda _, forgotten: self.remembered.append(forgotten),
        )
        self.beliefs.listed(OTHER, [Device("o")])
        self.beliefs.listed(R, [Device("g"), Device("h")])

    async def _look(self, *_: Path, lists: bool) -> View:
        self.listed = lists
        self.began.set()
        await self.free.wait()
        await asyncio.sleep(0)
        return self.views.pop(0) if len(self.views) > 1 else self.views[0]

    async def looked(self, *views: View) -> None:
        """Look as often as there are views."""
        self.views = [*views]
        for _ in views:
            await self.beliefs.look()
            self.looks.get_nowait()

    async def lost(self) -> None:
        """Pod a had the device, and a new kubelet doesn't know."""
        await self.looked(A)
        self.beliefs.restarted([R])
        await self.looked(NOBODY)

    @property
    def kinds(self) -> list[MismatchKind]:
        return [finding.kind for finding in self.beliefs.findings(R)]


@pytest.fixture
async def records(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeletRecords]:
    made = KubeletRecords(monkeypatch)
    yield made
    await made.beliefs.close()


@pytest.fixture
def lines() -> Iterator[list[EventDict]]:
    with capture_logs() as captured:
        yield captured


async def until_looked(records: KubeletRecords) -> View:
    async with asyncio.timeout(10):
        return await records.looks.get()


async def test_whom_a_kubelet_forgot_is_told_once_and_remembered(
    records: KubeletRecords, lines: list[EventDict]
) -> None:
    await records.lost()
    await records.looked(NOBODY, NOBODY)
    assert [(one["event"], one["kind"]) for one in lines] == [("mismatch", "forgotten")]
    assert [[*one] for one in records.remembered] == [["g"]]
    assert records.beliefs.avoid(R) == ("g",)


async def test_an_allocate_of_it_is_told_at_once_and_is_no_end(records: KubeletRecords, lines: list[EventDict]) -> None:
    await records.lost()
    lines.clear()
    records.beliefs.allocated(R, ["g"])
    assert records.kinds == [MismatchKind.DOUBLED]
    assert [(one["event"], one["kind"], one["log_level"]) for one in lines] == [("mismatch", "doubled", "warning")]
    await records.looked(B)
    assert "mismatch is over" not in {one["event"] for one in lines}


async def test_a_holder_keeps_its_name_while_its_kubelet_is_away(records: KubeletRecords) -> None:
    """No later List shows by a UID that a pod is gone: it would be held for forgotten for ever."""
    written = {R: {"g": "uid-a/main"}}
    listed = replace(A, source="pod-resources", pods=frozenset({"ns/a"}), written=written)
    await records.looked(listed, View(written, {}, source="checkpoint", written=written), View())
    await records.looked(View(written, {}, source="checkpoint", written=written))
    records.beliefs.restarted([R])
    assert records.beliefs.earlier(R) == {"g": "'ns/a/main'"}


async def test_its_end_is_told_and_remembered(records: KubeletRecords, lines: list[EventDict]) -> None:
    await records.lost()
    lines.clear()
    records.beliefs.forget("g")
    assert [(one["event"], one["kind"], one["devices"]) for one in lines] == [("mismatch is over", "forgotten", ["g"])]
    assert [[*one] for one in records.remembered] == [["g"], []]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        pytest.param("AFTER_ALLOCATE", lambda one: one.allocated(R, ["h"]), id="an Allocate"),
        pytest.param("AFTER_START", lambda one: one.restarted([R]), id="a new kubelet"),
        pytest.param("AFTER_START", lambda one: one.recall(R, {}, {"g": Earlier(("ns/a/c",), 0.0)}), id="another process's memory"),
    ],
)  # fmt: skip
async def test_what_is_followed_by_a_look(
    records: KubeletRecords, monkeypatch: pytest.MonkeyPatch, name: str, cause: object
) -> None:
    monkeypatch.setattr(beliefs, name, 0.01)
    assert callable(cause)
    cause(records.beliefs)
    await until_looked(records)


async def test_the_end_of_a_look_that_was_dropped_is_not_that_of_the_next(records: KubeletRecords) -> None:
    records.views = [A]
    records.free.clear()
    records.beliefs._on_time()
    await records.began.wait()
    records.beliefs._drop()
    records.beliefs._on_time()
    following = records.beliefs._looking
    for _ in range(5):
        await asyncio.sleep(0)
    assert following is not None
    assert records.beliefs._looking is following
    records.free.set()
    assert await until_looked(records) is A


async def test_an_allocate_of_a_forgotten_device_is_looked_after_in_haste(
    records: KubeletRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AFTER_ALLOCATE", "AFTER_START", "WHILE_FORGOTTEN"):
        monkeypatch.setattr(beliefs, name, 3600.0)
    await records.lost()
    records.beliefs.allocated(R, ["g"])
    await until_looked(records)


async def test_a_look_that_comes_too_early_is_followed_by_another(
    records: KubeletRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beliefs, "AFTER_ALLOCATE", 0.05)
    records.beliefs.allocated(R, ["h"])
    records.beliefs.look_within(0)
    await until_looked(records)
    await until_looked(records)


@pytest.mark.parametrize(("forgotten", "again"), [(True, True), (False, False)])
async def test_while_somebody_is_forgotten_looks_go_on(
    records: KubeletRecords, monkeypatch: pytest.MonkeyPatch, forgotten: bool, again: bool
) -> None:
    monkeypatch.setattr(beliefs, "WHILE_FORGOTTEN", 0.0)
    monkeypatch.setattr(beliefs, "AFTER_START", 3600.0)
    await (records.lost() if forgotten else records.looked(A))
    for _ in range(20):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert records.looks.empty() is not again


async def test_only_what_is_served_here_is_compared_with_before(records: KubeletRecords) -> None:
    await records.looked(A)
    records.beliefs.restarted([])
    await records.looked(NOBODY)
    assert records.kinds == []


async def test_another_process_memory_takes_the_place_of_what_is_out_of_date(records: KubeletRecords) -> None:
    await records.lost()
    records.beliefs.recall(R, {"h": (Earlier(("ns/z/main",), 0.0),)}, {}, fresh=True)
    records.beliefs.listed(R, [Device("g"), Device("h")])
    assert [one.device_ids for one in records.beliefs.findings(R)] == [("h",)]
    assert [[*one] for one in records.remembered] == [["g"], ["h"]]


async def test_what_is_out_of_date_is_compared_with_nothing(records: KubeletRecords) -> None:
    await records.looked(A)
    records.beliefs.restarted([R])
    records.beliefs.recall(R, {}, {}, fresh=True)
    records.beliefs.listed(R, [Device("g"), Device("h")])
    await records.looked(NOBODY)
    assert records.kinds == []


async def test_the_sooner_of_two_looks_counts(records: KubeletRecords) -> None:
    records.beliefs.look_within(3600)
    records.beliefs.look_within(0)
    records.beliefs.look_within(3600)
    await until_looked(records)


async def test_a_look_that_is_due_waits_until_no_allocate_is_open(
    records: KubeletRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beliefs, "WHILE_ASKED", 0.01)
    with records.beliefs.asked:
        records.beliefs.look_within(0)
        await asyncio.sleep(0.05)
        assert records.looks.empty()
    await until_looked(records)


@pytest.mark.parametrize(
    "awaited", [pytest.param(False, id="by itself"), pytest.param(True, id="somebody waits for it")]
)
async def test_a_look_that_is_under_way_is_dropped_when_an_allocate_begins(
    records: KubeletRecords, monkeypatch: pytest.MonkeyPatch, *, awaited: bool
) -> None:
    monkeypatch.setattr(beliefs, "WHILE_ASKED", 0.01)
    records.free.clear()
    records.beliefs.look_within(0)
    await records.began.wait()
    waits = asyncio.create_task(records.beliefs.look()) if awaited else None
    await asyncio.sleep(0)
    with records.beliefs.asked:
        records.free.set()
        await asyncio.sleep(0.05)
        assert records.looks.empty() is not awaited
    if waits is not None:
        await waits
    await until_looked(records)
    assert records.looks.empty()


async def test_who_comes_right_after_a_look_was_dropped_gets_another(records: KubeletRecords) -> None:
    records.free.clear()
    records.beliefs.look_within(0)
    await records.began.wait()
    records.free.set()
    with records.beliefs.asked:
        await records.beliefs.look()
    assert records.looks.qsize() == 1


async def test_who_asks_at_once_shares_a_look(records: KubeletRecords) -> None:
    await asyncio.gather(records.beliefs.look(), records.beliefs.look())
    assert records.looks.qsize() == 1


async def test_who_gives_up_a_look_leaves_it_to_the_others(records: KubeletRecords) -> None:
    records.free.clear()
    first, second = (asyncio.create_task(records.beliefs.look()) for _ in range(2))
    await records.began.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    records.free.set()
    await second
    assert records.looks.qsize() == 1


@pytest.mark.parametrize(("view", "holders"), [(A, {"g": "ns/a/main"}), (NOBODY, {}), (View(), None)])
async def test_who_holds_what_is_unknown_where_the_records_can_not_be_read(
    records: KubeletRecords, view: View, holders: dict[str, str] | None
) -> None:
    assert records.beliefs.holders(R) is None
    await records.looked(view)
    assert records.beliefs.holders(R) == holders


async def test_what_was_known_last_outlives_a_look_that_shows_nothing(records: KubeletRecords) -> None:
    await records.looked(A, View())
    assert [one and one.view for one in (records.beliefs.known, records.beliefs.last)] == [A, View()]


async def test_who_waits_for_a_look_gets_it_once_no_allocate_is_open(records: KubeletRecords) -> None:
    """List makes a kubelet forget what it is about to give, until it has noted the answer."""
    with records.beliefs.asked:
        look = asyncio.create_task(records.beliefs.look())
        await asyncio.sleep(0)
        assert not records.began.is_set()
    await asyncio.sleep(0)
    assert not records.began.is_set(), "the kubelet may not have noted the answer yet"
    await look


async def test_who_waits_for_a_look_gets_it_beside_an_allocate_that_takes_long(
    records: KubeletRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beliefs, "WHILE_ASKED", 0.01)
    with records.beliefs.asked:
        await records.beliefs.look()
    assert records.looks.qsize() == 1


SINCE = time.time() + 3600
"""When the kubelet's socket is made, in unix seconds: after all that was seen before."""


def write(file: Path, at: float, *, registered: str | None = R, **pods: str) -> None:
    """Write a checkpoint so long after the kubelet's start: who holds which devices, by the pod's UID."""
    entries = [
        {"PodUID": pod, "ContainerName": "main", "ResourceName": R, "DeviceIDs": [*ids]} for pod, ids in pods.items()
    ]
    content = {"PodDeviceEntries": entries, "RegisteredDevices": {registered: []} if registered else {}}
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(content))
    os.utime(fresh, (SINCE + at, SINCE + at))
    fresh.replace(file)


Written = Mapping[str, str] | None
"""What a checkpoint names, by the pod's UID; None: there is no file."""


@pytest.mark.parametrize(
    ("found", "own", "forgotten"),
    [
        pytest.param({"p": "g", "q": "h"}, {"p": "g", "q": "h"}, "", id="the kubelet has read it"),
        pytest.param({"q": "h"}, {"q": "h"}, "", id="one has ended before the start"),
        pytest.param({"p": "g", "q": "h"}, {"q": "h"}, "", id="one has ended, and is freed at once"),
        pytest.param({}, {"x": "g"}, "", id="all have ended before the start"),
        pytest.param({"x": "g"}, {"x": "g"}, "", id="and another pod has a device since"),
        pytest.param({"p": "g", "q": "h"}, {}, "gh", id="the kubelet can't read it"),
        pytest.param({"p": "g"}, {}, "g", id="nor one of which a pod has ended"),
        pytest.param(
            {"p": "g", "q": "h"},
            {"x": "g"},
            "h",
            id="nor that, and another pod has a device, which isn't forgotten then",
        ),
        pytest.param(None, {}, "gh", id="there is none"),
    ],
)
async def test_records_are_lost_as_a_whole_or_not_at_all(
    tmp_path: Path, found: Written, own: Mapping[str, str], forgotten: str
) -> None:
    assert await forgot(tmp_path / "checkpoint", found, own) == forgotten


@pytest.mark.parametrize(
    ("at", "registered"),
    [
        pytest.param(-20.0, R, id="it is older than the one that was read last"),
        pytest.param(-1.0, "example.com/other", id="it was begun without ours"),
    ],
)
async def test_a_checkpoint_of_other_records_proves_nothing(tmp_path: Path, at: float, registered: str) -> None:
    assert await forgot(tmp_path / "checkpoint", {}, {}, at=at, registered=registered) == "gh"


@pytest.mark.parametrize(("seconds", "lists"), [(0.0, True), (5.0, False), (math.inf, False)])
async def test_list_waits_until_no_other_gateway_answers(
    monkeypatch: pytest.MonkeyPatch, seconds: float, lists: bool
) -> None:
    records = KubeletRecords(monkeypatch)
    records.beliefs.lists_after = lambda: seconds
    await records.looked(A)
    assert records.listed is lists
    await records.beliefs.close()


async def test_the_next_kubelet_finds_what_one_wrote_that_had_lost_its_records(tmp_path: Path) -> None:
    assert await forgot(tmp_path / "checkpoint", {"p": "g", "q": "h"}, {}, kubelets=2) == "gh"


async def forgot(
    file: Path, found: Written, own: Mapping[str, str], *, at: float = -1.0, registered: str = R, kubelets: int = 1
) -> str:
    """Have a kubelet start that finds one checkpoint and writes another; say whom it forgot, by the devices' IDs."""
    beliefs = Beliefs(file.with_name("none"), file, lambda _: None)
    beliefs.listed(R, [Device("g"), Device("h")])
    write(file, -10, p="g", q="h")
    await beliefs.look()
    if found is None:
        file.rename(file.with_name("gone"))  # noqa: ASYNC240 - a test's own file
    else:
        write(file, at, registered=registered, **found)
    for number in range(kubelets):
        beliefs.restarted([R], SINCE + 2 * number)
        write(file, 2 * number + 1, **own)
    try:
        await until(lambda: not beliefs.waits_for_own, 10)
        await beliefs.look()
        return "".join(sorted(one for finding in beliefs.findings(R) for one in finding.device_ids))
    finally:
        await beliefs.close()
