"""What follows from what was seen of GPUs that cross between the two APIs."""

import pytest

from gateway_lab.node import crossed
from gateway_lab.node.crossed import NEVER, Life, Shown

A, B = "GPU-a", "GPU-b"


def life(
    name: str, gpu: str = A, created: float = 0, scheduled: float = 0, ended: float = NEVER, *, claim: bool = False
) -> Life:
    began = scheduled + 1
    return Life(name, claim, created, scheduled, began, ended, frozenset({gpu}), (began, min(ended, 1e9)))


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (life("y", A, scheduled=8, ended=20), [f"{A}: x and y"]),
        (life("y", B, scheduled=8, ended=20), []),
        (life("y", A, scheduled=9.5, ended=20), []),
        (life("y", A, scheduled=10, ended=20, claim=True), []),
    ],
)
def test_two_containers_with_one_gpu(other: Life, found: list[str]) -> None:
    assert crossed.doubly([life("x", ended=10), other]) == found


@pytest.mark.parametrize(
    ("claim", "scheduled", "waited"),
    [
        (False, 4, 5),  # The GPU of its side was there all the time.
        (True, 14, 5),  # DRA's was there from 10 on: the pod began at 15.
        (False, 24, 10 + 3),  # From 10 on it was DRA's, and was back at 22.
    ],
)
def test_a_wait_counts_while_a_gpu_of_its_side_is_free(claim: bool, scheduled: float, waited: float) -> None:
    moves = {A: [(10.0, "dra"), (22.0, "plugin")]}
    one = life("x", scheduled=scheduled, claim=claim)
    assert crossed.waited(one, [one], moves, 100) == waited


def test_a_gpu_isnt_free_from_when_a_pod_is_given_to_the_node_until_that_one_is_over() -> None:
    one, other = life("x", scheduled=9), life("y", scheduled=2, ended=8)
    assert crossed.waited(one, [one, other], {A: ()}, 100) == 2 + 2
    never = Life("z", claim=False, created=50)
    assert crossed.waited(never, [one, never], {A: ()}, 100) == 0
    assert crossed.waited(never, [one, never], {A: (), B: ()}, 100) == 50


def test_a_gpu_has_come_when_the_slices_offer_it() -> None:
    shown = Shown()
    shown.hear(1, "s", {A: False, B: True})
    shown.hear(3, "s", {A: True, B: True})
    shown.hear(4, "s", None)
    shown.hear(6, "s", {A: True})
    moves = {A: [(2.0, "to-dra"), (2.5, "dra"), (5.0, "to-plugin"), (7.0, "plugin")]}
    assert crossed.arrival(A, "dra", 2, moves, shown) == 3
    assert crossed.arrival(A, "plugin", 4, moves, shown) == 7
    assert crossed.arrival(A, "dra", 5, moves, shown) == NEVER
    assert [shown.since(B, at) for at in (0, 3.5, 4)] == [1, 3.5, NEVER]


def test_who_had_it_last_and_who_is_next() -> None:
    lives = [life("x", ended=4), life("y", created=3, scheduled=6), life("z", created=8, scheduled=9)]
    assert crossed.last_end(A, 2, 5, lives) == 4
    assert crossed.last_end(A, 4.5, 5, lives) == NEVER
    assert crossed.last_end(A, 2, 3.5, lives) == 3.5  # It is told to be over only after its GPU is back.
    first = crossed.first_after(A, 5, lives, claim=False)
    assert first is not None
    assert first.name == "y"
    assert crossed.first_after(A, 2, lives, claim=False) is None
    assert crossed.first_after(A, 2, lives, claim=True) is None


def test_the_gateways_log_says_when() -> None:
    log = [
        '{"event":"other"}',
        f'{{"boards":{{"{A}":"dra"}},"event":"GPUs move to the other API","timestamp":"1970-01-01T00:00:02.250000Z"}}',
    ]
    assert crossed.sides(log) == {A: [(2.25, "dra")]}
    assert crossed.unix("1970-01-01T00:00:02.123456789Z") == pytest.approx(2.123456789)


def test_what_never_came_is_in_no_figure() -> None:
    assert crossed.figures([2, NEVER, 1, 4]) == {"count": 3, "median": 2, "worst": 4}
    assert crossed.figures([NEVER]) == {"count": 0}


def test_a_pod_that_failed_waits_no_more() -> None:
    failed = Life("z", claim=False, created=50, ended=53)
    assert crossed.waited(failed, [failed], {A: ()}, 100) == 3


def test_what_the_kubelet_could_not_prepare_at_first() -> None:
    line = 'E1 kuberuntime_manager.go:1594] "Failed to prepare dynamic resources" err="{}" pod="default/{}"'
    log = [line.format(*one) for one in (('"c" is forbidden: no', "x"), ("no such driver", "y"), ("again", "y"))]
    assert crossed.unprepared("\n".join(["", *log])) == {
        "x": "the API server didn't let the kubelet read the claim",
        "y": "no such driver",
    }


@pytest.mark.parametrize(
    ("scheduled", "ended", "found"),
    [
        (8, 9, ""),
        (8, 11, "no gateway served for 2.0 s"),
        (11, 19, "no gateway served for 2.0 s"),
        (21, 23, "3.0 s after the kubelet's end"),
        (28, 33, "13.0 s after the kubelet's end"),
        (30, 33, ""),
        (41, 41, "no gateway served for 2.0 s, 1.0 s after the kubelet's end"),
    ],
)
def test_what_happened_to_the_node_while_it_had_a_pod(scheduled: float, ended: float, found: str) -> None:
    assert crossed.meanwhile(scheduled, ended, [(20, 24), (40, 44)], [(10, 12), (40, 42)]) == found
