"""Preferred allocation: the best GPUs for one container, judged against every possible choice where that is feasible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.gpu.allocation import preferred
from devices.gpu.model import GPU
from devices.model import Fault, PreferredRequest, RefusedError, Trouble


def node_of(*numa: int | None, unhealthy: Sequence[int] = ()) -> dict[str, GPU]:
    """A node whose GPU ``g<i>`` sits on the i-th of the given NUMA nodes."""
    return {
        f"g{i}": GPU(f"g{i}", i, i, place, Trouble("too hot") if i in unhealthy else None)
        for i, place in enumerate(numa)
    }


def ids(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@pytest.mark.parametrize(
    ("numa", "available", "must", "size", "chosen"),
    [
        pytest.param((0, 0, 1, 1), "g3 g2 g1 g0", "", 1, "g0", id="lowest index"),
        pytest.param((0, 1, 1, 0), "g0 g1 g2 g3", "", 2, "g0 g3", id="one node, with the lowest index"),
        pytest.param((0, 1, 1, 1), "g0 g1 g2 g3", "", 2, "g1 g2", id="one node, though a lower index is free"),
        pytest.param((0, 1, 0, 1), "g1 g2 g3", "", 2, "g1 g3", id="only what is available counts"),
        pytest.param((0, 0, 1, 1), "g0 g1 g2 g3", "g3", 2, "g2 g3", id="on the node of what must be included"),
        pytest.param((0, 0, 1, 1), "g0 g1 g2 g3", "g1 g2", 3, "g0 g1 g2", id="its nodes are open: lowest index"),
        pytest.param((0, 0, 1, 1, 2), "g0 g1 g2 g3 g4", "g4", 3, "g0 g1 g4", id="one further node rather than two"),
        pytest.param(
            (0, 1, 1, 2, 2, 2), "g0 g1 g2 g3 g4 g5", "", 4, "g0 g3 g4 g5", id="two nodes, with the lowest index"
        ),
        pytest.param((None, 0, None, 0), "g0 g1 g2 g3", "", 2, "g0 g2", id="no known place is one place"),
        pytest.param((0, 0), "g0 g1", "g0 g1", 2, "g0 g1", id="nothing left to choose"),
        pytest.param((0, 0), "x9 x1 g1 g0", "", 2, "g0 g1", id="known before unknown"),
        pytest.param((0, 0), "x9 x1 g0", "", 2, "g0 x1", id="unknown where nothing else is left"),
        pytest.param((), "x9 x1 x5", "x9", 2, "x1 x9", id="before the first discovery: by ID"),
    ],
)
def test_choice(numa: tuple[int | None, ...], available: str, must: str, size: int, chosen: str) -> None:
    assert preferred(PreferredRequest(ids(available), ids(must), size), node_of(*numa)) == ids(chosen)


@pytest.mark.parametrize(
    ("size", "chosen"), [(1, "g1"), (2, "g1 g2"), (3, "g0 g1 g2")], ids=["well", "both well", "ill as the last resort"]
)
def test_a_gpu_that_has_just_fallen_ill_comes_last(size: int, chosen: str) -> None:
    request = PreferredRequest(("g0", "g1", "g2", "g3"), (), size)
    assert preferred(request, node_of(0, 0, 1, 0, unhealthy=(0, 3))) == ids(chosen)


@pytest.mark.parametrize(
    ("available", "must", "size", "says"),
    [
        ("g0 g1", "", 0, "expected a size of at least 1, got 0"),
        ("g0 g1", "", -1, "expected a size of at least 1, got -1"),
        ("g0 g0", "", 1, "the same device ID came twice; give each ID once"),
        ("g0 g1", "g1 g1", 2, "the same device ID came twice; give each ID once"),
        ("g0 g1", "g2 g3", 2, "'g2' and 1 more must be included but aren't available; list them as available too"),
        ("g0 g1", "g0 g1", 1, "2 devices must be included in a choice of 1; ask for at least 2"),
        ("g0 g1", "", 3, "3 devices are wanted and 2 available; ask for at most 2"),
    ],
)
def test_an_impossible_request_is_refused(available: str, must: str, size: int, says: str) -> None:
    with pytest.raises(RefusedError) as refused:
        preferred(PreferredRequest(ids(available), ids(must), size), node_of(0, 0, 1, 1))
    assert refused.value.fault is Fault.INVALID_ARGUMENT
    assert str(refused.value) == f"no such choice of devices: {says}"


@st.composite
def questions(draw: st.DrawFn) -> tuple[dict[str, GPU], PreferredRequest]:
    gpus = node_of(*draw(st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=1, max_size=9)))
    available = draw(st.lists(st.sampled_from(sorted(gpus)), min_size=1, unique=True))
    must = draw(st.lists(st.sampled_from(available), unique=True))
    size = draw(st.integers(max(1, len(must)), len(available)))
    return gpus, PreferredRequest(tuple(available), tuple(must), size)


@given(questions())
def test_no_choice_is_better(question: tuple[dict[str, GPU], PreferredRequest]) -> None:
    gpus, request = question

    def badness(choice: Sequence[str]) -> tuple[int, list[int]]:
        return len({gpus[i].numa_node for i in choice}), [gpus[i].index for i in choice]

    choices = itertools.combinations(sorted(request.available), request.size)
    best = min((choice for choice in choices if set(request.must_include) <= set(choice)), key=badness)
    assert preferred(request, gpus) == best


@given(questions(), st.randoms(use_true_random=False))
def test_the_order_of_the_question_does_not_matter(
    question: tuple[dict[str, GPU], PreferredRequest], random: st.DataObject
) -> None:
    gpus, request = question
    shuffled = list(request.available)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = PreferredRequest(tuple(shuffled), tuple(reversed(request.must_include)), request.size)
    assert preferred(again, gpus) == preferred(request, gpus)


@pytest.mark.parametrize("nodes", [1, 8, 1024])
def test_ten_thousand_gpus(nodes: int) -> None:
    gpus = node_of(*(i % nodes for i in range(10_000)))
    chosen = preferred(PreferredRequest(tuple(gpus), (), 5000), gpus)
    assert len(chosen) == len(set(chosen)) == 5000
