"""The gauntlet's decisions: scripts out of seeds, shorter scripts, what counts as growth, and the table of faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from gateway_lab.trials import gauntlet
from gateway_lab.trials.faults import FAULTS, Fault, Outcome, allowed
from gateway_lab.trials.gauntlet import (
    ENOUGH,
    RIVALS,
    WARM_UP,
    Result,
    Sample,
    Step,
    growth,
    pairs,
    rounds,
    script,
    shrink,
    summary,
)

KUBELETS = ("1.9 emulated", "1.28 emulated", "1.28 genuine")


# Scripts.


def test_all_that_can_happen_does() -> None:
    steps = script(1, KUBELETS, FAULTS, 2000)
    assert {step.do for step in steps} == {"kubelet", "admit", "remove", *FAULTS}
    assert {step.kubelet for step in steps if step.do == "kubelet"} == {*KUBELETS}
    assert max(step.lasts for step in steps) > 16  # longer than any deadline of the gateway's


def test_what_only_an_emulated_kubelet_does_happens_on_one() -> None:
    kubelet = ""
    for step in script(2, KUBELETS, FAULTS, 2000):
        kubelet = step.kubelet or kubelet
        assert step.do not in FAULTS or not FAULTS[step.do].emulated or kubelet.endswith("emulated"), step


def test_no_pod_comes_while_two_kubelets_write_one_checkpoint() -> None:
    for _, steps in rounds(script(3, KUBELETS, FAULTS, 2000)):
        done = [step.do for step in steps]
        first = next((number for number, do in enumerate(done) if do in FAULTS), len(done))
        assert not (RIVALS & {*done} and "admit" in done[first:])


# Shorter scripts.


def steps(text: str) -> tuple[Step, ...]:
    """Spell a script as letters: each is a step of a round of its own."""
    return tuple(Step(at, letter) for at, letter in enumerate(text))


@pytest.mark.parametrize(
    ("whole", "needed", "left"),
    [
        ("abcdefgh", "f", "f"),
        ("abcdefgh", "ah", "ah"),
        ("abcdefgh", "bcg", "bcg"),
        ("abcdefgh", "abcdefgh", "abcdefgh"),
        ("a", "a", "a"),
        ("ab" * 50, "aab", "aab"),
    ],
)
async def test_what_fails_is_made_as_short_as_it_can_be(whole: str, needed: str, left: str) -> None:
    async def fails(rest: Sequence[Step]) -> bool:
        letters = iter([step.do for step in rest])
        return all(letter in letters for letter in needed)

    kept = await shrink(steps(whole), fails, time.monotonic() + 60)
    assert "".join(step.do for step in kept) == left


# Growth.

FLAT = Sample(50.0, 6, 20, 7)


def lives(count: int, each: Callable[[int], Sample]) -> list[Sample]:
    return [each(number) for number in range(count)]


@pytest.mark.parametrize(
    ("samples", "grew"),
    [
        (lives(60, lambda _: FLAT), ""),
        (lives(60, lambda n: Sample(50 + n / 4, 6, 20, 7)), "memory"),
        (lives(60, lambda n: Sample(50, 6 + n // 3, 20, 7)), "threads"),
        (lives(60, lambda n: Sample(50, 6, 20 + n, 7)), "descriptors"),
        (lives(60, lambda n: Sample(50, 6, 20, 7 + n)), "tasks"),
        (lives(60, lambda n: Sample(50, 6, 20 + 30 * (n % 5 == 0), 7)), ""),  # peaks
        (lives(60, lambda n: Sample(30 + min(n, WARM_UP), 6, 20, 7)), ""),  # the warm-up
        (lives(WARM_UP + ENOUGH - 1, lambda n: Sample(50 + n, 6, 20, 7)), ""),  # too short a life to say
    ],
    ids=["flat", "memory", "threads", "descriptors", "tasks", "peaks", "warm-up", "short"],
)
def test_what_grows_is_named(samples: Sequence[Sample], grew: str) -> None:
    found = growth(samples)
    assert [one.split()[2] for one in found] == ([grew] if grew else [])


# What is run, and what is said of it.


def test_each_fault_is_struck_on_either_kind_and_every_kubelet_has_its_turn() -> None:
    chosen = pairs(["1.9", "1.28", "1.37"], ["1.28"], list(FAULTS.values()), every=False)
    assert len(chosen) == 2 * len(FAULTS)
    assert {version for _, version, genuine in chosen if not genuine} == {"1.9", "1.28", "1.37"}
    assert {version for _, version, genuine in chosen if genuine} == {"1.28"}
    assert len(pairs(["1.9", "1.28"], ["1.28"], list(FAULTS.values()), every=True)) == 3 * len(FAULTS)


PASSED = Outcome("stream-cut", "1.28", "emulated", "passed", 0.02)
NOT_HERE = Outcome(
    "stream-cut", "1.28", "genuine", "not applicable", reason="a genuine kubelet can't be made to do this"
)
FAILED = Outcome("stream-cut", "1.28", "emulated", "failed", reason="not right within 5 s")


@pytest.mark.parametrize(
    ("outcomes", "broke", "passed"),
    [
        ([PASSED, NOT_HERE], [], True),
        ([PASSED, FAILED], [], False),
        ([PASSED], ["seed 7: pod a lost GPU-1"], False),
        ([NOT_HERE], [], False),  # nothing was shown
        ([], [], False),
    ],
)
def test_only_what_was_run_and_kept_passes(outcomes: list[Outcome], broke: list[str], *, passed: bool) -> None:
    result = Result(7, outcomes=outcomes, broke=broke)
    assert result.passed is passed
    assert ("every promise was kept" in summary(result).splitlines()[-1].replace("NOT every", "")) is passed
    assert all(sentence in summary(result) for sentence in broke)


@pytest.mark.parametrize(
    ("reasons", "status", "first"),
    [
        pytest.param(["not right within 5 s", ""], "passed", "not right within 5 s", id="the second time it passes"),
        pytest.param(["not right within 5 s", "nor then"], "failed", "not right within 5 s", id="it fails twice"),
        pytest.param(["GPU-1 is given to both a and b"], "failed", "", id="a device in two pods is no accident"),
    ],
)
async def test_a_fault_that_fails_is_struck_once_more(
    monkeypatch: pytest.MonkeyPatch, reasons: list[str], status: str, first: str
) -> None:
    left = [*reasons]

    async def alone(fault: Fault, version: str, *_: object) -> Outcome:
        reason = left.pop(0)
        return Outcome(fault.name, version, "emulated", "failed" if reason else "passed", reason=reason)

    monkeypatch.setattr(gauntlet, "alone", alone)
    outcomes = await gauntlet.each_alone([(FAULTS["stream-cut"], "1.28", False)], {}, lambda _: None)
    assert [(one.status, one.first) for one in outcomes] == [(status, first)]
    assert left == []
    told = "passed at the second try: stream-cut on emulated 1.28; at first: not right within 5 s"
    assert (told in summary(Result(7, outcomes)).splitlines()) is (status == "passed")


# The table of faults.


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_row_is_whole(fault: Fault) -> None:
    assert FAULTS[fault.name] is fault
    assert fault.what
    assert 0 < fault.bound <= allowed(fault.bound)
    assert {*fault.meanwhile} <= {*FAULTS}
    assert fault.bound <= 2 or fault.why  # whoever waits long wants to know why
    # What is struck beside it on a genuine kubelet must be possible there.
    assert fault.emulated or not any(FAULTS[name].emulated for name in fault.meanwhile)
