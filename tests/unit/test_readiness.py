"""Readiness: every case as a row, and the words that come with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.source import Hindrance
from gateway.registration.events import Phase
from gateway.tally import Confirmation
from gateway.telling import readiness
from gateway.telling.readiness import HOST_SERVICE, PATIENCE, ResourceStanding, judge

GPU = "nvidia.com/gpu"
LONG = PATIENCE + 1


def standing(phase: Phase, checked: Confirmation | None = Confirmation.HELD, **facts: object) -> ResourceStanding:
    fields: dict[str, object] = {"name": GPU, "devices": 8, "stream_s": LONG, "unserved_s": LONG} | facts
    return ResourceStanding(phase=phase, checked=checked, **fields)  # type: ignore[arg-type]  # the fields' types are theirs


@pytest.mark.parametrize(
    ("it", "kubelet_s", "ready", "words"),
    [
        pytest.param(standing(Phase.SERVING), 60.0, True, "served", id="registered and verified"),
        pytest.param(
            standing(Phase.SERVING, Confirmation.UNKNOWN),
            60.0,
            True,
            "records can't be read",
            id="nothing to verify it with",
        ),
        pytest.param(
            standing(Phase.SERVING, None, stream_s=0.5), 60.0, False, "not looked up", id="registered, not verified yet"
        ),
        pytest.param(
            standing(Phase.SERVING, None), 60.0, True, "not looked up", id="the list changes too often to verify it"
        ),
        pytest.param(
            standing(Phase.SERVING, Confirmation.LACKING),
            60.0,
            False,
            "records lack it",
            id="the kubelet does not hold it",
        ),
        pytest.param(
            standing(Phase.WAITING, Confirmation.LACKING), 60.0, False, "records lack it", id="and it registers again"
        ),
        pytest.param(
            standing(Phase.OFFERING, None, unserved_s=0.1),
            60.0,
            False,
            "registering",
            id="registering for the first time",
        ),
        pytest.param(
            standing(Phase.OFFERING, unserved_s=0.1), 60.0, True, "0.1 s: registering", id="a stream was cut just now"
        ),
        pytest.param(standing(Phase.OFFERING), 0.1, True, "0.1 s: registering", id="the kubelet started just now"),
        pytest.param(standing(Phase.OFFERING), 60.0, False, "11.0 s: registering", id="registering for too long"),
        pytest.param(
            standing(Phase.OFFERING, unserved_s=PATIENCE), 60.0, False, "10.0 s: registering", id="just as long"
        ),
        pytest.param(
            standing(Phase.SERVING, None, stream_s=PATIENCE), 60.0, True, "not looked up", id="unverified, just as long"
        ),
        pytest.param(standing(Phase.ACCEPTED), 60.0, False, "kubelet's call", id="accepted and never called"),
        pytest.param(
            standing(Phase.WAITING, trouble="no common version: 1.7"),
            60.0,
            False,
            "no common version: 1.7",
            id="the kubelet refuses us",
        ),
        pytest.param(
            standing(Phase.OUT, unserved_s=0.1, trouble="not offered: too large"),
            60.0,
            False,
            "too large",
            id="no dialect carries the list",
        ),
        pytest.param(standing(Phase.ABSENT), None, True, "no kubelet", id="no kubelet"),
        pytest.param(standing(Phase.WAITING, Confirmation.LACKING), None, True, "no kubelet", id="none any more"),
        pytest.param(standing(Phase.ABSENT, None), 0.0, False, "waiting for a kubelet", id="a kubelet, unseen yet"),
        pytest.param(standing(Phase.WAITING, None, devices=0), 60.0, True, "no devices", id="no devices"),
        pytest.param(
            standing(Phase.STANDBY, None, standing_by_for="3f9a2c1d"), 60.0, True, "standby: 3f9a2c1d", id="standby"
        ),
        pytest.param(
            standing(Phase.STANDBY, None, standing_by_for=HOST_SERVICE),
            60.0,
            True,
            "standby: host service",
            id="the host service has it",
        ),
        pytest.param(
            standing(Phase.OFFERING, None, standing_by_for="3f9a2c1d"), 60.0, True, "standby", id="about to stand by"
        ),
        pytest.param(standing(Phase.STANDBY), 60.0, True, "standby: another gateway", id="about to take over"),
        pytest.param(
            standing(
                Phase.STANDBY, None, standing_by_for="3f9a2c1d", to_take_over=True, trouble="no answer to Register"
            ),
            60.0,
            False,
            "another gateway leads (3f9a2c1d), and this one could not take over; no answer to Register",
            id="it could not take over",
        ),
        pytest.param(
            standing(Phase.STANDBY, None, standing_by_for="3f9a2c1d", to_take_over=True),
            None,
            True,
            "standby: 3f9a2c1d",
            id="nothing to take over: no kubelet",
        ),
        pytest.param(
            standing(Phase.STANDBY, None, devices=0, standing_by_for="3f9a2c1d", to_take_over=True),
            60.0,
            True,
            "no devices",
            id="nothing to take over: no devices",
        ),
    ],
)
def test_a_resource(it: ResourceStanding, kubelet_s: float | None, ready: bool, words: str) -> None:
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
def test_a_gateway_without_resources(facts: dict[str, object], ready: bool, lines: list[str]) -> None:
    verdict = judge([], **facts)  # type: ignore[arg-type]  # rows of a table
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
def test_a_source_beside_a_resource_that_is_served(facts: dict[str, object], ready: bool, line: str) -> None:
    verdict = judge([standing(Phase.SERVING)], begun=True, kubelet_s=60.0, **facts)  # type: ignore[arg-type]  # rows
    assert (verdict.ready, verdict.lines) == (ready, (line, f"{GPU}: served"))


def test_what_a_start_waits_for_is_told() -> None:
    waits = [standing(Phase.ABSENT, None, trouble="too large"), standing(Phase.ABSENT, None, name="z.com/z")]
    assert judge(waits, begun=False, kubelet_s=3.0).lines == ("starting", f"{GPU}: too large")
    verdict = judge((), begun=False, kubelet_s=3.0, waits_for="the state directory: it is full")
    assert (verdict.ready, verdict.lines) == (False, ("starting: waiting for the state directory: it is full",))


def test_one_that_is_not_ready_counts_and_is_told_first() -> None:
    failing = standing(Phase.WAITING, name="z.com/z", trouble="refused")
    verdict = judge([standing(Phase.SERVING), failing, standing(Phase.STANDBY)], begun=True, kubelet_s=60.0)
    assert not verdict.ready
    assert verdict.lines[0].startswith("z.com/z: not served for 11.0 s")
    assert len(verdict.lines) == 3


@given(st.lists(st.tuples(st.text(max_size=300), st.text(max_size=2000), st.sampled_from(Phase)), max_size=80))
def test_an_answer_is_short_and_each_line_is_ours(resources: list[tuple[str, str, Phase]]) -> None:
    found = [standing(phase, name=name, trouble=trouble) for name, trouble, phase in resources]
    verdict = judge(found, begun=True, kubelet_s=60.0)
    assert all(line.isprintable() for line in verdict.lines)
    assert len(verdict.text) < 20_000
    assert len(verdict.lines) <= readiness._MOST_LINES + 1


@pytest.mark.parametrize("to_take_over", [False, True])
def test_of_a_resource_without_devices_nothing_is_missing_beside_one_that_is_served(*, to_take_over: bool) -> None:
    empty = standing(Phase.STANDBY, None, standing_by_for="3f9a2c1d", devices=0, to_take_over=to_take_over)
    assert readiness.judge((standing(Phase.SERVING), empty), begun=True, kubelet_s=60.0).ready
