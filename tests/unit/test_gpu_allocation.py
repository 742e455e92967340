"""Preferred allocation: the best GPUs for one container, judged against every possible choice where that is feasible."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from devices.gpu.allocation import preferred
from devices.gpu.model import FARTHEST, GPU, Link, Way
from devices.gpu.selection import EXACT_GPUS, LINKED_GPUS
from devices.model import Fault, PreferredRequest, RefusedError, Trouble
from devices.policy import Sharing
from gateway_lab.trials import choice


def node_of(*numa: int | None, unhealthy: Sequence[int] = ()) -> dict[str, GPU]:
    """A node whose GPU ``g<i>`` sits on the i-th of the given NUMA nodes."""
    return {
        f"g{i}": GPU(f"g{i}", i, i, place, Trouble("too hot") if i in unhealthy else None)
        for i, place in enumerate(numa)
    }


def linked(gpus: Mapping[str, GPU], *links: str) -> dict[str, GPU]:
    """Link the GPUs ``g<i>`` of each text, such as "xgmi 0 1 2" or "nvlink*4 0 1", to each other; the first names the link."""
    there = dict(gpus)
    for text in links:
        kind, *members = text.split()
        way, _, lanes = kind.partition("*")
        for a, b in itertools.combinations(members, 2):
            link = Link(f"g{b}", Way(way), int(lanes or 1))
            there |= {one.uuid: replace(one, links=(*one.links, link)) for one in gpus_on(f"g{a}", there)}
    return there


def gpus_on(board: str, gpus: Mapping[str, GPU]) -> list[GPU]:
    return [gpu for gpu in gpus.values() if gpu.board == board]


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
        pytest.param((0, 1, 1, 2, 2, 2), "g0 g1 g2 g3 g4 g5", "", 4, "g0 g3 g4 g5", id="two nodes, with the lowest index"),
        pytest.param((0, 0, 0, 0, 1, 1, 1, 1), "g0 g1 g2 g3 g4 g5 g6 g7", "g2 g4 g7", 4, "g2 g4 g5 g7", id="where the container has more GPUs already"),
        pytest.param((0, 1, 1, 1, 1, 1), "g0 g1 g2 g3 g4 g5", "g0", 3, "g0 g1 g2", id="a node of its own has no GPU left"),
        pytest.param((0, 0, 0, 0, 1, 2, 2, 2), "g0 g1 g4 g5 g6 g7", "g4", 4, "g4 g5 g6 g7", id="the node that is used up"),
        pytest.param((None, 0, None, 0), "g0 g1 g2 g3", "", 2, "g0 g2", id="no known place is one place"),
        pytest.param((0, 0), "g0 g1", "g0 g1", 2, "g0 g1", id="nothing left to choose"),
        pytest.param((0, 0), "x9 x1 g1 g0", "", 2, "g0 g1", id="known before unknown"),
        pytest.param((0, 0), "x9 x1 g0", "", 2, "g0 x1", id="unknown where nothing else is left"),
        pytest.param((), "x9 x1 x5", "x9", 2, "x1 x9", id="before the first discovery: by ID"),
    ],
)  # fmt: skip
def test_choice(numa: tuple[int | None, ...], available: str, must: str, size: int, chosen: str) -> None:
    assert preferred(PreferredRequest(ids(available), ids(must), size), node_of(*numa)) == ids(chosen)


@given(st.lists(st.integers(0, 7), min_size=17, max_size=24), st.data())
def test_no_other_choice_has_more_pairs_on_one_numa_node(places: list[int], data: st.DataObject) -> None:
    """Without links, also above the number of GPUs up to which links are tried out."""
    gpus = node_of(*places)
    must = tuple(data.draw(st.lists(st.sampled_from(sorted(gpus)), max_size=3, unique=True)))
    size = data.draw(st.integers(max(1, len(must)), min(len(gpus), len(must) + 3)))
    chosen = preferred(PreferredRequest(tuple(gpus), must, size), gpus)
    rest = sorted(gpus.keys() - set(must), key=lambda one: gpus[one].index)
    assert set(must) <= set(chosen)

    def key(ids: Sequence[str]) -> tuple[int, list[int]]:
        counts = Counter(gpus[one].numa_node for one in ids)
        return -sum(count * (count - 1) for count in counts.values()), sorted(gpus[one].index for one in ids)

    best = min(key((*must, *more)) for more in itertools.combinations(rest, size - len(must)))
    assert key(chosen) == best


DISTANCES = ((1, 12), (2, 6), (3, 4), (4, 3), (5, 3), (6, 2), (12, 1), (18, 1))
PAIRS = ("nvlink 0 1", "nvlink 2 3")


@pytest.mark.parametrize(
    ("free", "links", "must", "size", "distributed", "packed"),
    [
        pytest.param("3 3", (), "", 1, "2 3", "2 3", id="lowest index"),
        pytest.param("3 2", (), "", 1, "2 2", "3 1", id="the least used; the most used"),
        pytest.param("2 3", (), "", 2, "1 2", "0 3", id="the least used first, then in turn"),
        pytest.param("4 1", (), "", 2, "2 1", "2 1", id="the least used twice; as one has not enough, the other"),
        pytest.param("3 3", (), "", 2, "2 2", "1 3", id="each once; one GPU"),
        pytest.param("3 3 3", (), "", 4, "1 2 2", "0 2 3", id="even; one used up before the next"),
        pytest.param("3 2 1", (), "", 2, "2 1 1", "3 0 1", id="on two, as both are then as much used; the fullest that has both"),
        pytest.param("3 3", (), "0", 1, "3 3", "3 3", id="nothing left to choose"),
        pytest.param("3 3", (), "0", 2, "3 2", "2 3", id="a GPU of its own; the same GPU"),
        pytest.param("2 2 2 2", ("xgmi 1 3",), "", 2, "2 1 2 1", "0 2 2 2", id="as much used: linked ones"),
        pytest.param("2 2 2 3", ("xgmi 0 1",), "", 2, "2 2 1 2", "2 2 0 3", id="less used rather than linked; those that stay are linked"),
        pytest.param("2 2 2 2", PAIRS, "3", 2, "2 2 1 2", "2 2 2 1", id="linked to what must be included"),
        pytest.param("1 1 1", ("xgmi 1 2",), "", 1, "0 1 1", "0 1 1", id="those that stay are linked"),
        pytest.param("11", (), "", 10, "1", "1", id="lower numbers first, as numbers"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sharing", Sharing, ids=lambda sharing: sharing.value)
def test_replicas(
    free: str, links: Sequence[str], must: str, size: int, distributed: str, packed: str, sharing: Sharing
) -> None:
    """How many replicas of each GPU are left afterwards, besides the one of ``must``: those with the highest numbers."""
    counts = [int(count) for count in free.split()]
    gpus = linked(node_of(*(0 for _ in counts)), *links)
    offered = {f"g{i}": [f"g{i}::{number}" for number in range(count)] for i, count in enumerate(counts)}
    needed = tuple(f"g{i}::77" for i in must)
    request = PreferredRequest((*itertools.chain(*offered.values()), *needed), needed, size)
    chosen = preferred(request, gpus, sharing)
    left = {uuid: [one for one in there if one not in chosen] for uuid, there in offered.items()}
    assert " ".join(str(len(there)) for there in left.values()) == (
        packed if sharing is Sharing.PACKED else distributed
    )
    assert all(there == offered[uuid][len(offered[uuid]) - len(there) :] for uuid, there in left.items())
    assert set(needed) <= set(chosen)
    assert len(chosen) == size


@pytest.mark.parametrize(
    ("link", "distance"),
    [
        *((Link("", way, lanes), distance) for way in (Way.NVLINK, Way.XGMI) for lanes, distance in DISTANCES),
        (Link("", Way.PIX), 28),
        (Link("", Way.PXB), 30),
        (Link("", Way.PHB), 33),
        (Link("", Way.NODE), 36),
        (Link("", Way.SYS), FARTHEST),
    ],
)
def test_distance(link: Link, distance: int) -> None:
    assert link.distance == distance


@pytest.mark.parametrize(
    ("available", "must", "size", "says"),
    [
        ("g0 g1", "", 0, "cannot choose 0 devices. Ask for at least 1"),
        ("g0 g1", "", -1, "cannot choose -1 devices. Ask for at least 1"),
        ("g0 g0", "", 1, "the same device ID came twice; give each ID once"),
        ("g0 g1", "g1 g1", 2, "the same device ID came twice; give each ID once"),
        ("g0 g1", "g2 g3", 2, "'g2' and 1 more must be included but aren't available; list them as available too"),
        ("g0 g1", "g0 g1", 1, "2 devices must be included in a choice of 1; ask for at least 2"),
        ("g0 g1", "", 3, "3 wanted and 2 available; ask for at most 2"),
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
        apart = sum(gpus[a].numa_node != gpus[b].numa_node for a, b in itertools.combinations(choice, 2))
        return apart, [gpus[i].index for i in choice]

    choices = itertools.combinations(sorted(request.available), request.size)
    best = min((choice for choice in choices if set(request.must_include) <= set(choice)), key=badness)
    assert preferred(request, gpus) == best


DRAWS = st.randoms(use_true_random=True)


@settings(max_examples=300, deadline=None)
@given(DRAWS, st.integers(1, 10))
def test_no_choice_is_better_whatever_the_links(draw: random.Random, devices: int) -> None:
    """Whole GPUs, partitions and replicas, against an objective written down a second time and all possible choices."""
    question = choice.asked(draw, devices)
    assert tuple(sorted(question.answer())) == choice.best(question)


@settings(max_examples=3, deadline=None)
@given(DRAWS)
def test_no_choice_of_six_from_sixteen_is_better(draw: random.Random) -> None:
    question = choice.whole(draw, EXACT_GPUS, 6)
    assert tuple(sorted(question.answer())) == choice.best(question)


@settings(max_examples=30, deadline=None)
@given(DRAWS, st.integers(EXACT_GPUS + 1, 24), st.integers(1, 16))
def test_above_sixteen_no_exchange_of_one_gpu_is_better(draw: random.Random, gpus: int, size: int) -> None:
    question = choice.whole(draw, gpus, size)
    judge, chosen = choice.Judge(question), frozenset(question.answer())
    swaps = itertools.product(chosen, frozenset(question.gpus) - chosen)
    # The last three parts settle which of equal choices it is.
    assert judge.badness(chosen)[:-3] <= min(judge.badness(chosen - {out} | {new})[:-3] for out, new in swaps)


def test_among_too_many_gpus_links_do_not_count() -> None:
    gpus = linked(node_of(*([0, 1] * LINKED_GPUS)), "xgmi 0 1")
    assert preferred(PreferredRequest(tuple(gpus), (), 2), gpus) == ("g0", "g2")


@given(questions(), st.randoms(use_true_random=False))
def test_the_order_of_the_question_does_not_matter(
    question: tuple[dict[str, GPU], PreferredRequest], random: st.DataObject
) -> None:
    gpus, request = question
    shuffled = list(request.available)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = PreferredRequest(tuple(shuffled), tuple(reversed(request.must_include)), request.size)
    assert preferred(again, gpus) == preferred(request, gpus)


@pytest.mark.parametrize("sharing", Sharing, ids=lambda sharing: sharing.value)
@pytest.mark.parametrize("shared", [8, 1000, 8000])
@pytest.mark.parametrize("size", [8, 4000])
def test_eight_thousand_replicas(sharing: Sharing, shared: int, size: int) -> None:
    gpus = node_of(*(i % 2 for i in range(shared)))
    available = tuple(f"{uuid}::{number}" for uuid in gpus for number in range(8000 // shared))
    chosen = preferred(PreferredRequest(available, (), size), gpus, sharing)
    assert len(chosen) == len(set(chosen)) == size


@pytest.mark.parametrize("nodes", [1, 8, 1024])
def test_ten_thousand_gpus(nodes: int) -> None:
    gpus = node_of(*(i % nodes for i in range(10_000)))
    chosen = preferred(PreferredRequest(tuple(gpus), (), 5000), gpus)
    assert len(chosen) == len(set(chosen)) == 5000
