"""Readiness: every case as a row, and the words that come with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.source import Hindrance
from gateway.registration.events import Phase
from gateway.tally import Confirmation
from gateway.telling import readiness, served
from gateway.telling.readiness import CALL_BACK_S, ResourceStanding

GPU = "nvidia.com/gpu"
LONG = CALL_BACK_S + 1


Standing = Callable[[float | None], ResourceStanding]
"""How a resource stands, by the seconds since a kubelet was found (None: none runs)."""


def standing(
    phase: Phase,
    checked: Confirmation | None = Confirmation.HELD,
    name: str = GPU,
    devices: int = 8,
    stream_s: float = LONG,
    unserved_s: float = LONG,
    trouble: str = "",
) -> Standing:
    since_s = stream_s if phase is Phase.SERVING else unserved_s

    def made(kubelet_s: float | None) -> ResourceStanding:
        found = served.verdict(phase, checked=checked, trouble=trouble, since_s=since_s, kubelet_s=kubelet_s)
        return ResourceStanding(
            name=name, devices=devices, verdict=found, confirmed=checked is not None, trouble=trouble
        )

    return made


def judge(resources: Sequence[Standing], *, kubelet_s: float | None, **facts: Any) -> readiness.Readiness:
    return readiness.judge([one(kubelet_s) for one in resources], kubelet_s=kubelet_s, **facts)


STANDINGS = {
    "registered and verified": (standing(Phase.SERVING), 60.0, True, "served"),
    "nothing to verify it with": (standing(Phase.SERVING, Confirmation.UNKNOWN), 60.0, True, "records can't be read"),
    "registered, not verified yet": (standing(Phase.SERVING, None, stream_s=0.5), 60.0, False, "not looked up"),
    "the list changes too often to verify it": (standing(Phase.SERVING, None), 60.0, True, "not looked up"),
    "the kubelet does not hold it": (standing(Phase.SERVING, Confirmation.LACKING), 60.0, False, "records lack it"),
    "and it registers again": (standing(Phase.WAITING, Confirmation.LACKING), 60.0, False, "records lack it"),
    "registering for the first time": (standing(Phase.OFFERING, None, unserved_s=0.1), 60.0, False, "registering"),
    "a stream was cut just now": (standing(Phase.OFFERING, unserved_s=0.1), 60.0, True, "0.1 s: registering"),
    "the kubelet started just now": (standing(Phase.OFFERING), 0.1, True, "0.1 s: registering"),
    "registering for too long": (standing(Phase.OFFERING), 60.0, False, "11.0 s: registering"),
    "just as long": (standing(Phase.OFFERING, unserved_s=CALL_BACK_S), 60.0, False, "10.0 s: registering"),
    "unverified, just as long": (standing(Phase.SERVING, None, stream_s=CALL_BACK_S), 60.0, True, "not looked up"),
    "accepted and never called": (standing(Phase.ACCEPTED), 60.0, False, "kubelet's call"),
    "the kubelet refuses us": (
        standing(Phase.WAITING, trouble="no common version: 1.7"),
        60.0,
        False,
        "no common version: 1.7",
    ),
    "no dialect carries the list": (
        standing(Phase.OUT, unserved_s=0.1, trouble="not offered: too large"),
        60.0,
        False,
        "too large",
    ),
    "no kubelet": (standing(Phase.ABSENT), None, True, "no kubelet"),
    "none any more": (standing(Phase.WAITING, Confirmation.LACKING), None, True, "no kubelet"),
    "a kubelet, unseen yet": (standing(Phase.ABSENT, None), 0.0, False, "waiting for a kubelet"),
    "no devices": (standing(Phase.WAITING, None, devices=0), 60.0, True, "no devices"),
}


@pytest.mark.parametrize(("it", "kubelet_s", "ready", "words"), STANDINGS.values(), ids=STANDINGS)
def test_a_resource(it: Standing, kubelet_s: float | None, ready: bool, words: str) -> None:
    verdict = judge([it], begun=True, kubelet_s=kubelet_s)
    assert verdict.ready is ready
    assert words in verdict.text
    assert verdict.text.startswith("ready\n" if ready else "not ready\n")


@pytest.mark.parametrize(
    ("facts", "ready", "lines"),
    [
        pytest.param({"begun": False, "kubelet_s": 3.0}, False, ["starting"], id="starting"),
        pytest.param({"begun": False, "kubelet_s": None}, True, ["no kubelet", "starting"], id="waits for its folder"),
        pytest.param({"begun": True, "kubelet_s": 3.0}, True, ["no devices"], id="no devices at all"),
        pytest.param(
            {"begun": True, "kubelet_s": 3.0, "hindrances": [Hindrance("nvidia", "the driver is not there")]},
            True,
            ["backend nvidia: the driver is not there", "no devices"],
            id="a backend that is down",
        ),
        pytest.param(
            {"begun": True, "kubelet_s": 3.0, "hindrances": [Hindrance("nvidia", "no name", held_up=True)]},
            False,
            ["backend nvidia: no name", "no devices"],
            id="a configuration that can't be carried out",
        ),
        pytest.param(
            {"begun": False, "kubelet_s": None, "hindrances": [Hindrance("nvidia", "no name", held_up=True)]},
            False,
            ["no kubelet", "backend nvidia: no name", "starting"],
            id="nor without a kubelet",
        ),
    ],
)
def test_a_gateway_without_resources(facts: dict[str, Any], ready: bool, lines: list[str]) -> None:
    verdict = judge([], **facts)
    assert (verdict.ready, len(verdict.lines)) == (ready, len(lines))
    assert all(found.startswith(wanted) for found, wanted in zip(verdict.lines, lines, strict=True))


@pytest.mark.parametrize(
    ("facts", "ready", "line"),
    [
        pytest.param(
            {"hindrances": [Hindrance("nvidia", "silent")]}, True, "backend nvidia: silent", id="others are served"
        ),
        pytest.param(
            {"hindrances": [Hindrance("nvidia", "x", held_up=True)]}, False, "backend nvidia: x", id="one is held up"
        ),
    ],
)
def test_a_source_beside_a_resource_that_is_served(facts: dict[str, Any], ready: bool, line: str) -> None:
    verdict = judge([standing(Phase.SERVING)], begun=True, kubelet_s=60.0, **facts)
    assert (verdict.ready, verdict.lines) == (ready, (line, f"{GPU}: served"))


def test_what_a_start_waits_for_is_told() -> None:
    waits = [standing(Phase.ABSENT, None, trouble="too large"), standing(Phase.ABSENT, None, name="z.com/z")]
    assert judge(waits, begun=False, kubelet_s=3.0).lines == ("starting", f"{GPU}: too large")
    verdict = judge((), begun=False, kubelet_s=3.0, waits_for="the state directory: it is full")
    assert (verdict.ready, verdict.lines) == (False, ("starting: waiting for the state directory: it is full",))


def test_one_that_is_not_ready_counts_and_is_told_first() -> None:
    failing = standing(Phase.WAITING, name="z.com/z", trouble="refused")
    verdict = judge(
        [standing(Phase.SERVING), failing, standing(Phase.SERVING, name="a.com/a")], begun=True, kubelet_s=60.0
    )
    assert not verdict.ready
    assert verdict.lines[0].startswith("z.com/z: not served for 11.0 s")
    assert len(verdict.lines) == 3


@given(st.lists(st.tuples(st.text(max_size=300), st.text(max_size=2000), st.sampled_from(Phase)), max_size=80))
def test_an_answer_is_short_and_each_line_is_ours(resources: list[tuple[str, str, Phase]]) -> None:
    found = [standing(phase, name=name, trouble=trouble) for name, trouble, phase in resources]
    verdict = judge(found, begun=True, kubelet_s=60.0)
    assert all(line.isprintable() for line in verdict.lines)
    assert len(verdict.text) < 20_000
    assert len(verdict.lines) <= readiness._MAX_LINES + 1


OTHER = readiness.LeaderSeen("3f9a2c1d")
FAILS = readiness.LeaderSeen("3f9a2c1d", to_take_over=True)


@pytest.mark.parametrize(
    ("leader", "devices", "kubelet_s", "ready", "words"),
    [
        pytest.param(OTHER, 8, 60.0, True, "standby: 3f9a2c1d leads", id="standby"),
        pytest.param(FAILS, 8, 60.0, False, "no answer to Register", id="it is newer and could not lead"),
        pytest.param(FAILS, 8, None, True, "standby", id="nothing to take over: no kubelet"),
        pytest.param(FAILS, 0, 60.0, True, "no devices", id="nothing to take over: no devices"),
    ],
)
def test_beside_a_gateway_that_leads(
    leader: readiness.LeaderSeen, devices: int, kubelet_s: float | None, words: str, *, ready: bool
) -> None:
    resource = standing(Phase.STANDBY, None, devices=devices, trouble="no answer to Register")
    verdict = judge([resource], begun=True, kubelet_s=kubelet_s, leader=leader)
    assert verdict.ready is ready
    assert words in verdict.text
