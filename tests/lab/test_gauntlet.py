"""The gauntlet's decisions: scripts out of seeds, shorter scripts, what counts as growth, and the table of faults."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway_lab.trials import gauntlet
from gateway_lab.trials.faults import FAULTS, Fault, Ground, Outcome, allowed
from gateway_lab.trials.gauntlet import (
    ENOUGH,
    RIVALS,
    WARM_UP,
    Result,
    Sample,
    Script,
    Step,
    document,
    growth,
    main,
    pairs,
    rounds,
    script,
    shrink,
    summary,
    tails,
)

KUBELETS = ("1.9 emulated", "1.28 emulated", "1.28 genuine")


# Scripts.


@pytest.mark.parametrize("seed", [0, 7, 123456])
def test_a_seed_gives_the_same_script_and_another_seed_another(seed: int) -> None:
    assert script(seed, KUBELETS, FAULTS, 200) == script(seed, KUBELETS, FAULTS, 200)
    assert script(seed, KUBELETS, FAULTS, 200) != script(seed + 1, KUBELETS, FAULTS, 200)


def test_a_longer_script_begins_like_a_shorter_one() -> None:
    short = script(7, KUBELETS, FAULTS, 50)
    assert script(7, KUBELETS, FAULTS, 100)[: len(short)] == short


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


def test_only_faults_that_are_possible_happen() -> None:
    assert {step.do for step in script(4, KUBELETS, ["stream-cut"], 200)} == {
        "kubelet",
        "admit",
        "remove",
        "stream-cut",
    }


def test_a_script_is_read_as_it_was_written() -> None:
    one = Script(5, script(5, KUBELETS, FAULTS, 20), "pod a lost GPU-1")
    assert msgspec.json.decode(msgspec.json.encode(one), type=Script) == one


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


async def test_shrinking_ends_in_time_with_a_script_that_fails() -> None:
    tried: list[Sequence[Step]] = []

    async def fails(rest: Sequence[Step]) -> bool:
        tried.append(rest)
        return True

    assert await shrink(steps("abcdefgh"), fails, time.monotonic() - 1) == steps("abcdefgh")
    assert tried == []


def test_the_end_of_a_script_is_tried_first_on_its_own_kubelet() -> None:
    first = Step(0, "kubelet", kubelet="1.9 emulated")
    rest = (Step(1, "a"), Step(2, "kubelet", kubelet="1.28 genuine"), Step(2, "b"), Step(3, "c"), Step(4, "d"))
    kubelet = Step(0, "kubelet", kubelet="1.28 genuine")
    assert list(tails((first, *rest))) == [
        (kubelet, Step(4, "d")),
        (kubelet, Step(3, "c"), Step(4, "d")),
        (first, *rest),
    ]


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


def test_what_does_not_apply_is_said_with_its_reason() -> None:
    assert "not applicable, a genuine kubelet can't be made to do this: stream-cut" in summary(Result(7, [NOT_HERE]))


def test_a_result_is_a_document() -> None:
    found = json.loads(document(Result(7, [NOT_HERE], rounds=3, struck=Counter({"stream-cut": 2}))))
    assert (found["seed"], found["rounds"], found["struck"]) == (7, 3, {"stream-cut": 2})
    assert found["bounds"].keys() >= {"stream-cut"}


@pytest.mark.parametrize("kind", ["emulated", "genuine"])
async def test_a_kubelet_is_ended_once_it_has_written_down_what_pods_hold(kind: str) -> None:
    """1.9 writes it in place: one that is killed meanwhile loses every pod."""
    did: list[str] = []

    def does(what: str) -> Callable[[], Awaitable[None]]:
        async def note() -> None:
            did.append(what)

        return note

    kubelet = SimpleNamespace(kind=kind, alive=True, kill=does("killed"), close=does("closed"))
    node = SimpleNamespace(kubelet=kubelet, written=does("written"))
    await Ground(cast("Any", node), None, "", (), "1.9").end_kubelet()
    assert did == ["written", "killed", "closed"]


def test_an_unknown_fault_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--faults", "earthquake"])
    said = capsys.readouterr().err
    assert "earthquake" in said
    assert "kubelet-killed" in said


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


@pytest.mark.parametrize(
    ("fault", "kind", "no_cell", "why_not"),
    [
        ("stream-cut", "genuine", "", "a genuine kubelet can't be made to do this"),
        ("stream-cut", "emulated", "", ""),
        (
            "disk-full",
            "genuine",
            "namespaces of our own aren't allowed here",
            "namespaces of our own aren't allowed here",
        ),
        ("disk-full", "genuine", "", ""),
        ("kubelet-killed", "genuine", "namespaces of our own aren't allowed here", ""),
    ],
)
def test_where_a_fault_does_not_apply(fault: str, kind: str, no_cell: str, why_not: str) -> None:
    assert FAULTS[fault].why_not(kind, no_cell) == why_not
