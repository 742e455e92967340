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
from devices.gpu.selection import EXACT, SEARCHED
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


def partitions(*counts: int) -> dict[str, GPU]:
    """Cut the GPU ``g<i>`` into so many partitions as the i-th count says: ``g<i>p0``, ``g<i>p1``…"""
    names = [(f"g{i}", f"g{i}p{part}") for i, count in enumerate(counts) for part in range(count)]
    return {name: GPU(name, index, index, parent=parent) for index, (parent, name) in enumerate(names)}


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
        pytest.param(
            (0, 0, 0, 0, 1, 1, 1, 1),
            "g0 g1 g2 g3 g4 g5 g6 g7",
            "g2 g4 g7",
            4,
            "g2 g4 g5 g7",
            id="where the container has more GPUs already",
        ),
        pytest.param(
            (0, 1, 1, 1, 1, 1), "g0 g1 g2 g3 g4 g5", "g0", 3, "g0 g1 g2", id="a node of its own has no GPU left"
        ),
        pytest.param(
            (0, 0, 0, 0, 1, 2, 2, 2), "g0 g1 g4 g5 g6 g7", "g4", 4, "g4 g5 g6 g7", id="the node that is used up"
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
    ("nodes", "must", "size", "chosen"),
    [
        pytest.param(9, [], 10, [*range(8), 8, 9], id="one used up, and a part of the next"),
        pytest.param(9, [69, 70, 71], 10, [0, 1, *range(64, 72)], id="first those that make the most pairs"),
        pytest.param(72, [], 3, [0, 1, 2], id="all apart: the lowest indices"),
    ],
)
def test_many_gpus_on_many_numa_nodes(nodes: int, must: list[int], size: int, chosen: list[int]) -> None:
    gpus = node_of(*(place * nodes // 72 for place in range(72)))
    request = PreferredRequest(tuple(gpus), tuple(f"g{one}" for one in must), size)
    assert preferred(request, gpus) == tuple(f"g{one}" for one in chosen)


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
HIVES = ("xgmi 0 1 2 3", "xgmi 4 5 6 7")
PAIRS = ("nvlink 0 1", "nvlink 2 3")
SWITCHED = ("nvlink*18 0 1 2 3 4 5 6 7",)


def bridged(lanes: int) -> tuple[str, ...]:
    """Pairs of GPUs with a bridge, four GPUs on each PCIe switch."""
    pairs = (f"nvlink*{lanes} {first} {first + 1}" for first in (0, 2, 4, 6))
    return ("pix 0 1 2 3", "pix 4 5 6 7", "sys 0 1 2 3 4 5 6 7", *pairs)


@pytest.mark.parametrize(
    ("numa", "links", "available", "must", "size", "chosen"),
    [
        pytest.param("0000", ["xgmi 1 3"], "0123", "", 2, "13", id="linked rather than lowest index"),
        pytest.param("0101", ["xgmi 0 1"], "0123", "", 2, "01", id="linked rather than on one NUMA node"),
        pytest.param("0101", ["sys 0 1"], "0123", "", 2, "02", id="the farthest link is as none"),
        pytest.param("0101", ["xgmi 0 1 2 3"], "0123", "", 2, "02", id="all linked alike: on one NUMA node"),
        pytest.param("01234567", HIVES, "234567", "", 3, "456", id="in a hive that has enough"),
        pytest.param("01234567", HIVES, "01234567", "6", 3, "456", id="in the hive of what must be included"),
        pytest.param("01234567", HIVES, "01234567", "", 5, "01234", id="as much in one hive as possible"),
        pytest.param("0000", ["pix 0 1", "nvlink 2 3"], "0123", "", 2, "23", id="NVLink rather than a PCIe switch"),
        pytest.param("0000", ["node 0 1", "phb 1 2"], "0123", "", 2, "12", id="a host bridge rather than two"),
        pytest.param("0000", ["node 0 1", "pxb 1 2"], "0123", "", 2, "12", id="switches rather than the CPU"),
        pytest.param("0000", ["pxb 0 1", "pix 1 2"], "0123", "", 2, "12", id="one switch rather than several"),
        pytest.param("0000", ["nvlink 0 1", "nvlink*2 1 2"], "0123", "", 2, "12", id="two lanes rather than one"),
        pytest.param("0000", ["pix 0 1", "xgmi 1 0", "pix 2 3"], "0123", "", 2, "01", id="the nearest of two links"),
        pytest.param("0000", ["xgmi 2 3", "pix 3 2", "pix 0 1"], "0123", "", 2, "23", id="it was told first"),
        pytest.param("0000", ["xgmi 3 0"], "0123", "0", 2, "03", id="a link that only the other names"),
        pytest.param("0000", PAIRS, "012", "", 1, "2", id="one that has no partner any more"),
        pytest.param("0000", PAIRS, "0123", "", 1, "0", id="the lowest index, where each has its partner"),
        pytest.param(
            "000000", ["xgmi 0 4", "xgmi 1 3", "xgmi 2 5"], "012345", "", 4, "0134", id="pairs of low indices"
        ),
        pytest.param("0000", ["nvlink 1 2 3", "nvlink 0 1"], "0123", "", 2, "01", id="those that stay are linked, too"),
        pytest.param("00001111", SWITCHED, "01234567", "247", 4, "2457", id="fewer pairs over two NUMA nodes"),
        *(
            pytest.param(
                "00001111",
                bridged(lanes),
                "01234567",
                "36",
                4,
                "2367",
                id=f"two bridges rather than one, {lanes} lanes",
            )
            for lanes in (1, 2, 4, 12)
        ),
    ],
)
def test_linked_gpus(numa: str, links: Sequence[str], available: str, must: str, size: int, chosen: str) -> None:
    gpus = linked(node_of(*map(int, numa)), *links)
    request = PreferredRequest(tuple(f"g{i}" for i in available), tuple(f"g{i}" for i in must), size)
    assert preferred(request, gpus) == tuple(f"g{i}" for i in chosen)


CPX = (8, 8, 8, 8, 8, 8, 8, 7)


@pytest.mark.parametrize(
    ("cut", "links", "taken", "must", "size", "left"),
    [
        pytest.param(CPX, (), "", "", 8, "0 8 8 8 8 8 8 7", id="63 of 8 GPUs: a whole one"),
        pytest.param(CPX, (), "", "", 7, "8 8 8 8 8 8 8 0", id="the one that has no more"),
        pytest.param(CPX, (), "g2p0", "", 1, "8 8 6 8 8 8 8 7", id="the fullest"),
        pytest.param((4, 4, 4), (), "g0p0 g0p1 g1p0", "", 3, "2 0 4", id="one GPU rather than two that are fuller"),
        pytest.param((4, 4, 4), (), "g0p0 g1p0 g1p1", "", 5, "0 0 4", id="two, none of them left in part"),
        pytest.param((4, 4, 4), (), "", "", 5, "0 3 4", id="of two the first is used up"),
        pytest.param((3, 2), (), "", "", 4, "1 0", id="of two the fuller is used up"),
        pytest.param((4, 4, 4), (), "g0p0 g1p0", "g2p3", 2, "3 3 2", id="the GPU of what must be included"),
        pytest.param((4, 4, 4), (), "g1p0", "g2p3", 5, "4 0 2", id="and the fullest beside it"),
        pytest.param((2, 2, 2), ("xgmi 1 2",), "", "", 4, "2 0 0", id="two that are linked"),
        pytest.param((2, 2, 2), ("xgmi 1 2",), "g1p0", "", 3, "2 0 0", id="two that are linked and just suffice"),
        pytest.param((3, 2, 3), ("xgmi 0 2",), "", "", 4, "0 2 2", id="linked rather than fuller"),
        pytest.param((1, 2), (), "", "", 2, "1 0", id="one GPU rather than two"),
    ],
)
def test_partitions_are_packed(
    cut: tuple[int, ...], links: Sequence[str], taken: str, must: str, size: int, left: str
) -> None:
    """What is left on each GPU afterwards."""
    gpus = linked(partitions(*cut), *links)
    available = frozenset(gpus) - frozenset(ids(taken))
    chosen = preferred(PreferredRequest(tuple(available), ids(must), size), gpus)
    rest = Counter(gpus[one].parent for one in available - frozenset(chosen))
    assert " ".join(str(rest[f"g{i}"]) for i in range(len(cut))) == left


@pytest.mark.parametrize(
    ("free", "links", "must", "size", "distributed", "packed"),
    [
        pytest.param("3 3", (), "", 1, "2 3", "2 3", id="lowest index"),
        pytest.param("3 2", (), "", 1, "2 2", "3 1", id="the least used; the most used"),
        pytest.param("2 3", (), "", 2, "1 2", "0 3", id="the least used first, then in turn"),
        pytest.param("4 1", (), "", 2, "2 1", "2 1", id="the least used twice; as one has not enough, the other"),
        pytest.param("3 3", (), "", 2, "2 2", "1 3", id="each once; one GPU"),
        pytest.param("3 3 3", (), "", 4, "1 2 2", "0 2 3", id="even; one used up before the next"),
        pytest.param(
            "3 2 1", (), "", 2, "2 1 1", "3 0 1", id="on two, as both are then as much used; the fullest that has both"
        ),
        pytest.param("3 3", (), "0", 1, "3 3", "3 3", id="nothing left to choose"),
        pytest.param("3 3", (), "0", 2, "3 2", "2 3", id="a GPU of its own; the same GPU"),
        pytest.param("2 2 2 2", ("xgmi 1 3",), "", 2, "2 1 2 1", "0 2 2 2", id="as much used: linked ones"),
        pytest.param(
            "2 2 2 3",
            ("xgmi 0 1",),
            "",
            2,
            "2 2 1 2",
            "2 2 0 3",
            id="less used rather than linked; those that stay are linked",
        ),
        pytest.param("2 2 2 2", PAIRS, "3", 2, "2 2 1 2", "2 2 2 1", id="linked to what must be included"),
        pytest.param("1 1 1", ("xgmi 1 2",), "", 1, "0 1 1", "0 1 1", id="those that stay are linked"),
        pytest.param("11", (), "", 10, "1", "1", id="lower numbers first, as numbers"),
    ],
)
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
    ("available", "size", "chosen"),
    [
        pytest.param("g0::0 g1::0", 1, "g1::0", id="of a GPU that is well"),
        pytest.param("g0::0 g1::0 x::0", 2, "g0::0 g1::0", id="of an ill one rather than of an unknown one"),
        pytest.param("g1::0 g1::x g1:: g1::1", 2, "g1::0 g1::1", id="what has no number is no replica"),
        pytest.param("g0 g1::0", 1, "g1::0", id="beside a GPU that isn't shared any more"),
    ],
)
def test_replicas_of_what_is_ill_or_unknown_come_last(available: str, size: int, chosen: str) -> None:
    assert preferred(PreferredRequest(ids(available), (), size), node_of(0, 0, unhealthy=[0])) == ids(chosen)


def test_replicas_of_partitions_are_spread_over_partitions_and_stay_on_one_gpu() -> None:
    gpus = partitions(2, 2)
    available = tuple(f"{uuid}::{number}" for uuid in gpus for number in range(2))
    assert preferred(PreferredRequest(available, ("g1p0::1",), 2), gpus) == ("g1p0::1", "g1p1::0")


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
    question = choice.whole(draw, EXACT, 6)
    assert tuple(sorted(question.answer())) == choice.best(question)


@settings(max_examples=30, deadline=None)
@given(DRAWS, st.integers(EXACT + 1, 24), st.integers(1, 16))
def test_above_sixteen_no_exchange_of_one_gpu_is_better(draw: random.Random, gpus: int, size: int) -> None:
    question = choice.whole(draw, gpus, size)
    judge, chosen = choice.Judge(question), frozenset(question.answer())
    swaps = itertools.product(chosen, frozenset(question.gpus) - chosen)
    # The last three parts settle which of equal choices it is.
    assert judge.badness(chosen)[:-3] <= min(judge.badness(chosen - {out} | {new})[:-3] for out, new in swaps)


def test_among_too_many_gpus_links_do_not_count() -> None:
    gpus = linked(node_of(*([0, 1] * SEARCHED)), "xgmi 0 1")
    assert preferred(PreferredRequest(tuple(gpus), (), 2), gpus) == ("g0", "g2")


def test_partitions_of_too_many_gpus_are_still_packed() -> None:
    gpus = partitions(*([4, 2, 3] * SEARCHED))
    chosen = preferred(PreferredRequest(tuple(gpus), (), 11), gpus)
    assert Counter(gpus[one].parent for one in chosen) == {"g0": 4, "g3": 4, "g2": 3}


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
