"""The daemon: what it does with what its parts tell it, each by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace

from devices.generic import GenericSource
from devices.policy import Policy
from gateway.age import Age
from gateway.configuration.settings import Settings
from gateway.daemon import RESIGNED, Gateway
from gateway.kubelet.beliefs import Look
from gateway.kubelet.identity import KubeletId
from gateway.kubelet.view import View
from gateway.registration import events
from gateway.registration.events import Phase
from gateway.registration.registrar import Resource

OURS, THEIRS = "a.b/ours", "a.b/theirs"
KUBELET = KubeletId(1, 2, 3_000_000_000)


@pytest.fixture
async def gateway(folder: Path) -> AsyncIterator[Gateway]:
    """One with a resource of its own, and one that another gateway serves."""
    one = Gateway(Settings(socket_dir=folder / "dp", state_dir=folder / "state"), GenericSource(Policy()))
    for name in (OURS, THEIRS):
        one._resources[name] = Resource(one.around, name, "")
    one._resources[THEIRS].feed(events.StandBy(Age(1, "other")))
    yield one
    await one._close()


async def test_the_first_word_about_the_end_counts_and_a_signal_is_never_forgotten(gateway: Gateway) -> None:
    gateway._exit = asyncio.get_running_loop().create_future()
    for status in (RESIGNED, 0, RESIGNED):
        gateway._end(status)
    assert (gateway._exit.result(), gateway._stopped) == (RESIGNED, True)


@pytest.mark.parametrize(
    ("phase", "checked", "found"),
    [
        pytest.param(Phase.ABSENT, True, False, id="no kubelet listens"),
        pytest.param(Phase.ACCEPTED, False, True, id="one has answered"),
        pytest.param(Phase.SERVING, False, True, id="one has called"),
        pytest.param(Phase.OFFERING, False, False, id="one has yet to answer"),
        pytest.param(Phase.STANDBY, False, False, id="another gateway serves"),
    ],
)
async def test_what_a_registration_shows_of_the_kubelet(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, phase: Phase, checked: bool, found: bool
) -> None:
    check, finds, resource = Mock(), Mock(), gateway._resources[OURS]
    monkeypatch.setattr(gateway.presence, "check", check)
    monkeypatch.setattr(gateway.presence, "found", finds)
    monkeypatch.setattr(resource, "state", replace(resource.state, phase=phase))
    gateway._stood(resource)
    assert (check.called, finds.called) == (checked, found)
    assert all(call.kwargs == {"anew": False} for call in finds.mock_calls)


@pytest.mark.parametrize("begun", [True, False])
async def test_a_kubelet_that_comes(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, *, begun: bool) -> None:
    """What another gateway serves is that one's to remember; and while it starts, nothing is registered."""
    restarted, recall, others = Mock(), Mock(), gateway.others
    monkeypatch.setattr(gateway.beliefs, "restarted", lambda names, since: restarted([*names], since))
    monkeypatch.setattr(gateway.holdings, "recall", recall)
    monkeypatch.setattr(others, "kubelet_up", told := Mock())
    monkeypatch.setattr(others, "approach", approach := Mock())
    monkeypatch.setattr(gateway, "_tell_kubelet", registers := Mock())
    others.begun = begun
    gateway._kubelet_up(KUBELET)
    gateway._kubelet_up(replace(KUBELET, inode=7))
    assert [call.args for call in restarted.mock_calls] == [([OURS], 3.0)] * 2
    assert (recall.call_count, told.call_count) == (1, 2), "what the process before knew is recalled once"
    assert (approach.call_count, registers.call_count) == ((2, 2) if begun else (0, 0))
    assert gateway.presence.kubelet == replace(KUBELET, inode=7)


async def test_a_look_is_for_all(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    look, told = Look(View(), 1.0, 2.0), list[str]()
    for name, resource in gateway._resources.items():
        monkeypatch.setattr(resource, "looked", lambda seen, name=name: told.append(name) if seen is look else None)
    monkeypatch.setattr(gateway.holdings, "looked", lambda _: told.append("holdings"))
    monkeypatch.setattr(gateway.lists, "looked", lambda: told.append("lists"))
    gateway._looked(look)
    assert told == [OURS, THEIRS, "holdings", "lists"], "the lists go by what the others make of it"


@pytest.mark.parametrize(
    ("begun", "news", "asked", "looks"), [(False, True, 0, 0), (True, True, 1, 1), (True, False, 0, 1)]
)
async def test_after_each_update(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, begun: bool, news: bool, asked: int, looks: int
) -> None:
    """Older gateways are asked for what is new, and nothing is registered before the start is over."""
    monkeypatch.setattr(gateway.others.handover, "take_over", take_over := AsyncMock())
    monkeypatch.setattr(gateway.others, "look_at_peers", look := Mock())
    gateway.others.begun, gateway.presence.kubelet = begun, KUBELET
    knows = gateway._resources[THEIRS]
    knows.state = replace(knows.state, kubelet=KUBELET)
    monkeypatch.setattr(Resource, "feed", lambda one, event: fed.append((one.name, event)))
    fed: list[Any] = []
    await gateway._sent(news)
    monkeypatch.undo()
    assert (take_over.call_count, look.call_count) == (asked, looks)
    assert fed == ([(OURS, events.KubeletUp(KUBELET))] if begun else []), "those that know the kubelet are told nothing"
