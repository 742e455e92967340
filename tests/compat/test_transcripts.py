"""An emulated kubelet says on the wire what the genuine one of its version says: call by call, message by message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gateway_lab.wire.calls import Call, Reader
from gateway_lab.wire.tap import Connection
from gateway_lab.wire.transcript import diff, transcript
from tests.compat.conftest import GENUINE, Job, Recordings

RECORDED = ("allocate", "health", "kubelet-crash", "gateway-restart")


def _pair(scenario: str, version: str) -> tuple[Job, Job]:
    return (Job("genuine", scenario, version, tapped=True), Job("emulated", scenario, version, tapped=True))


@pytest.mark.genuine
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(_pair(scenario, version), id=f"{scenario}-{version}")
        for scenario in RECORDED
        for version in GENUINE
    ],
)
def test_emulated_and_genuine_say_the_same(jobs: tuple[Job, Job], recordings: Recordings) -> None:
    genuine, emulated = (transcript(recordings(job)) for job in jobs)
    assert not diff(genuine, emulated)
    assert any("Allocate: OK" in line for line in genuine)


def _dropped(calls: list[Call], at: int) -> list[Call]:
    return calls[:at] + calls[at + 1 :]


def _doubled(calls: list[Call], at: int) -> list[Call]:
    return [*calls[: at + 1], *calls[at:]]


def _reordered(calls: list[Call], at: int) -> list[Call]:
    return [*calls[:at], *calls[at : at + 2][::-1], *calls[at + 2 :]]


def _without_its_last_answer(calls: list[Call], at: int) -> list[Call]:
    return [*calls[:at], replace(calls[at], answers=calls[at].answers[:-1]), *calls[at + 1 :]]


def _ended_otherwise(calls: list[Call], at: int) -> list[Call]:
    return [*calls[:at], replace(calls[at], end="INTERNAL"), *calls[at + 1 :]]


def _with_a_strange_field(calls: list[Call], at: int) -> list[Call]:
    return [*calls[:at], replace(calls[at], requests=[*calls[at].requests[:-1], b"\xfa\x3e\x01x"]), *calls[at + 1 :]]


@pytest.mark.parametrize(
    "change", [_dropped, _doubled, _reordered, _without_its_last_answer, _ended_otherwise, _with_a_strange_field]
)
@pytest.mark.parametrize("jobs", [pytest.param((Job("emulated", "health", "1.28", tapped=True),), id="health-1.28")])
def test_a_change_of_any_call_is_noticed(
    change: Callable[[list[Call], int], list[Call]], jobs: tuple[Job], recordings: Recordings
) -> None:
    recorded = recordings(jobs[0])
    whole = transcript(recorded)
    assert diff(whole, transcript(recorded)) == []
    places = [(connection, at) for connection in recorded for at in range(len(connection.calls))]
    assert len(places) >= 6
    for connection, at in places:
        changed = change(connection.calls, at)
        if changed != connection.calls:  # the last call has no next one to change places with
            other = _with_calls(recorded, connection, changed)
            assert diff(whole, transcript(other)), (connection.calls[at].path, at)


def _with_calls(recorded: list[Connection], connection: Connection, calls: list[Call]) -> list[Connection]:
    reader = Reader()
    reader.calls = calls
    changed = replace(connection, reader=reader)
    return [changed if one is connection else one for one in recorded]
