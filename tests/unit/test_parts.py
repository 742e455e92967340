"""Parts of a gateway, each without one: what a part needs around it is a record or a Protocol beside it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from devices.generic import GenericSource
from devices.policy import Policy
from devices.source import Hindrance
from gateway.age import Age
from gateway.configuration.settings import Settings
from gateway.handover import leases as holding
from gateway.handover.leases import Leases
from gateway.kubelet.presence import Presence
from gateway.registration import events, registrar
from gateway.registration.events import Phase
from gateway.registration.turns import Turns
from gateway.tally import Tally
from gateway.tasks import Background, Tasks
from gateway.telling import probes

GPU = "example.com/gpu"
ONE, OTHER = Age(1, "one"), Age(2, "other")


@pytest.fixture
def resource(tmp_path: Path) -> registrar.Resource:
    node = registrar.Node(
        settings=Settings(socket_dir=tmp_path),
        source=GenericSource(Policy()),
        tally=Tally(),
        turns=Turns(tmp_path / "checkpoint"),
        token="0123abcd",  # noqa: S106 - its name
        kubelet_socket=tmp_path / "kubelet.sock",
        own_socket=lambda _: tmp_path / "own.sock",
        memory=lambda _: cast("Any", SimpleNamespace(handed_out=(), held=())),
        look_within=lambda _: None,
        accepted=lambda _: None,
        stood=lambda _: None,
        register_at=lambda: 0.0,
    )
    return registrar.Resource(node, GPU, "")


@pytest.mark.parametrize(
    ("fed", "other", "phase"),
    [
        pytest.param([events.StandBy(ONE)], ONE, Phase.STANDBY, id="another gateway serves it"),
        pytest.param([events.StandBy(ONE), events.StandBy(OTHER)], OTHER, Phase.STANDBY, id="then a third one"),
        pytest.param([events.StandBy(ONE), events.Ours()], None, Phase.STANDBY, id="it is gone: made ready here"),
        pytest.param([events.StandBy(ONE), events.Ours(), events.Resume()], None, Phase.ABSENT, id="and served again"),
        pytest.param([events.StandBy(None)], None, Phase.STANDBY, id="DRA serves it: no other gateway"),
        pytest.param(
            [events.Stop(), events.StandBy(ONE)], None, Phase.STOPPED, id="after the end nobody is stood by for"
        ),
    ],
)
async def test_who_serves_a_resource_instead(
    resource: registrar.Resource, fed: list[events.Event], other: Age | None, phase: Phase
) -> None:
    for event in fed:
        resource.feed(event)
    assert (resource.standing_by_for, resource.state.phase) == (other, phase)
    await resource.close()


async def test_a_probe_judges_what_it_is_shown(tmp_path: Path) -> None:
    judged = SimpleNamespace(
        begun=True,
        age=ONE,
        resources=[],
        presence=Presence(tmp_path / "kubelet.sock"),
        standby=SimpleNamespace(lacking=lambda *_: 0.0),
        drivers=None,
        hindrances=lambda: (Hindrance("gpus", "the driver is away"),),
        left=list,
        waits_for="",
    )
    assert "gpus: the driver is away" in probes.look(cast("Any", judged)).text


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
    monkeypatch.setattr(holding, "listens", lambda _: listened.pop(0))
    gone, tasks = asyncio.Event(), Tasks(lambda _: None)
    Leases(gone.set, tasks).hold(tmp_path / "s")
    async with asyncio.timeout(10):
        await gone.wait()
    assert not listened
    await tasks.close()


async def test_a_part_that_must_not_end_ends_the_gateway() -> None:
    ended: asyncio.Queue[int] = asyncio.Queue()
    tasks = Tasks(ended.put_nowait)
    tasks.spawn("part", asyncio.sleep(0))
    async with asyncio.timeout(10):
        assert await ended.get() == 1
    await tasks.close()


async def test_a_task_that_fails_and_that_nobody_waits_for_is_told_of_at_once() -> None:
    log, told = Mock(), asyncio.Event()

    async def refused() -> None:
        raise PermissionError

    log.error.side_effect = lambda *_, **__: told.set()
    tasks = Background(log)
    tasks.background(refused())
    async with asyncio.timeout(10):
        await told.wait()
    log.error.assert_called_once()
    await tasks.close()


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
