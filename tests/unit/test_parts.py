"""Parts of a handover, each without a gateway: what a part needs around it is a record or a Protocol beside it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from devices.model import Device
from gateway.age import Age
from gateway.handover import leases as holding
from gateway.handover import message, records
from gateway.handover import partner as partners
from gateway.handover.events import Say
from gateway.handover.leases import Leases
from gateway.handover.partner import Partner
from gateway.handover.records import RecordsSeen
from gateway.handover.standby import Standby
from gateway.kubelet import view as kubelet_view
from gateway.registration.events import Phase
from gateway.tasks import Tasks
from gateway.wires.control import ControlError

GPU = "example.com/gpu"
ONE = Age(1, "one")


def test_a_new_kubelet_has_refused_nobody_and_shows_nothing_of_before(folder: Path) -> None:
    one = Standby(cast("Any", None), folder, folder / "pods", folder / "checkpoint")
    one.began(GPU)
    assert one._wake.is_set()
    one._taken[GPU, ONE] = 5
    since = one._since_ns
    one.kubelet_up(since - 1)
    assert (one._since_ns, one._taken) == (since, {})
    one.kubelet_up(since + 1)
    assert one._since_ns == since + 1


def test_what_is_served_here_again_is_lacking_no_more(folder: Path) -> None:
    one = Standby(cast("Any", SimpleNamespace(doubts={})), folder, folder / "pods", folder / "checkpoint")
    one._records[GPU] = RecordsSeen(lacking_since=1.0)
    assert one.lacking(GPU, 11.0) == 10.0
    assert one._wait(cast("Any", SimpleNamespace(name=GPU, state=SimpleNamespace(phase=Phase.SERVING)))) is None
    assert one.lacking(GPU, 11.0) == 0.0


@pytest.mark.parametrize("comes", [True, False], ids=["a new kubelet", "the same one"])
async def test_a_look_at_the_kubelet_before_takes_nothing_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    taken = list[object]()
    plugin = SimpleNamespace(devices=(Device("a"),))
    stands_by = SimpleNamespace(name=GPU, standing_by_for=ONE, plugin=plugin, entries={}, checked=None)
    own = SimpleNamespace(resources=[stands_by], doubts={}, unserved=taken.append)
    one = Standby(cast("Any", own), folder, folder / "pods", folder / "checkpoint")

    async def shown(*_: object) -> frozenset[str]:
        if comes:
            one.kubelet_up(0)
        return frozenset()

    monkeypatch.setattr(kubelet_view, "shown", shown)
    one._records[GPU] = RecordsSeen(lacking_since=-1e6, told=-2e6)
    await one._look()
    assert len(taken) == (0 if comes else 1)


def test_however_often_a_resource_was_taken_back_it_is_once_more() -> None:
    patience = records.LACKING * 2.0**records._MOST_TAKEN + records.LACKING_EACH
    lacking = RecordsSeen(lacking_since=0.0)
    assert [lacking.unserved(now, 1, taken=1000) for now in (patience - 0.1, patience + 0.1)] == [False, True]


async def test_a_lease_tells_once_that_its_holder_is_gone(tmp_path: Path) -> None:
    gone: asyncio.Queue[None] = asyncio.Queue()
    tasks = Tasks(lambda _: None)
    leases, path = Leases(lambda: gone.put_nowait(None), tasks), tmp_path / "s"
    connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda _, writer: connected.put_nowait(writer), path)
    for _ in range(2):  # It is one.
        leases.hold(path)
    async with asyncio.timeout(10):
        writer = await connected.get()
        server.close()
        path.unlink()
        writer.close()
        await gone.get()
    await asyncio.sleep(0)
    assert gone.empty()
    assert connected.empty()
    await tasks.close()


@pytest.mark.parametrize("listened", [[False], [True, False]], ids=["gone", "about to go"])
async def test_a_holder_that_ends_the_connection_is_gone_once_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listened: list[bool]
) -> None:
    monkeypatch.setattr(holding, "LEASE_AGAIN", (*[0.001] * (len(listened) - 1), 3600.0))
    asked = list[bool]()
    monkeypatch.setattr(holding, "listens", lambda _: asked.pop(0))
    gone, tasks = asyncio.Event(), Tasks(lambda _: None)
    leases = Leases(gone.set, tasks)
    for _ in range(2):  # One that lives on is held again.
        asked[:] = listened
        gone.clear()
        leases.hold(tmp_path / "s")
        async with asyncio.timeout(10):
            await gone.wait()
        assert not asked
    await tasks.close()


def test_no_message_names_more_resources_than_the_other_one_takes() -> None:
    connection = Mock()
    partner = Partner(ONE, connection)
    for number in range(message.IN_ONE_MESSAGE + 1):
        partner.say(Say.ASK, str(number))
    assert [len(resources) for _, resources, _ in partner.outbox] == [message.IN_ONE_MESSAGE, 1]
    partner.say(Say.GOING, "0")
    assert [say for say, *_ in partner.outbox] == [Say.ASK, Say.ASK, Say.GOING]
    connection.abort.assert_not_called()


async def test_an_ask_that_is_written_late_waits_no_longer_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop stood still meanwhile: the newer one goes on when its own wait is over, and no stream may end after that."""
    sent = list[dict[str, Any]]()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        raise ControlError("it is gone")

    partner = Partner(ONE, cast("Any", SimpleNamespace(send=send, abort=Mock())))
    clock = iter((1000, 10**12))
    monkeypatch.setattr(partners, "boot_ns", lambda: next(clock))
    partner.say(Say.ASK, "a")
    await partner.write(ONE)
    assert [one["until_ns"] for one in sent] == [1000 + message.ASK_TIME * 1e9]


async def test_what_only_one_of_a_pair_does_waits_for_its_turn() -> None:
    turn, began = asyncio.Event(), asyncio.Event()

    async def active() -> None:
        await turn.wait()

    async def work() -> None:
        began.set()
        await asyncio.get_running_loop().create_future()

    tasks = Tasks(lambda _: None, active)
    tasks.spawn_once_active("work", work())
    await asyncio.sleep(0)
    assert not began.is_set()
    turn.set()
    async with asyncio.timeout(10):
        await began.wait()
    await tasks.close()
