"""What a client of the API server makes of what it saw: drops, restarts, and what pods say themselves."""

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from gateway_lab.node.api import Event
from gateway_lab.node.machine import HOSTNAME
from gateway_lab.node.pods import Account, Word, account
from gateway_lab.node.watch import ContainerSeen, Drop, NodeSeen, PodSeen, Recorder, drops, failed

GPU = "nvidia.com/gpu"
SECOND = 1_000_000_000


def node(second: float, allocatable: int | None) -> NodeSeen:
    counts = {} if allocatable is None else {GPU: allocatable}
    return NodeSeen(int(second * SECOND), counts, counts, "True", "v1.37.1")


def pod(uid: str = "u", phase: str = "Running", *, container: str = "c1", restarts: int = 0, at: int = 0) -> PodSeen:
    containers = {"main": ContainerSeen(container, restarts, "running", "", ready=True)}
    return PodSeen(at, uid, "default", f"pod-{uid}", "", phase, "Because", "of that", ready=True, containers=containers)


@pytest.mark.parametrize(
    ("history", "since", "expected"),
    [
        pytest.param([(0, 4), (5, 4)], 0, [], id="constant"),
        pytest.param([(0, 4), (5, 0), (15, 4)], 0, [Drop(5 * SECOND, 10_000)], id="ten seconds of none"),
        pytest.param([(0, 4), (5, 3), (6, 0), (7, 4)], 0, [Drop(5 * SECOND, 2_000)], id="one drop in two steps"),
        pytest.param([(0, 4), (5, None), (6, 4)], 0, [Drop(5 * SECOND, 1_000)], id="the resource isn't there"),
        pytest.param([(0, 4), (5, 0)], 0, [Drop(5 * SECOND, math.inf)], id="it lasts"),
        pytest.param([(0, 0), (5, 4), (9, 4)], 6, [], id="over before that"),
        pytest.param([(0, 0), (5, 4)], 3, [Drop(0, 2_000)], id="only what was after that"),
        pytest.param([(0, 5), (5, 8)], 0, [], id="more is no drop"),
    ],
)
def test_drops(history: Sequence[tuple[float, int | None]], since: float, expected: Sequence[Drop]) -> None:
    seen = [node(second, count) for second, count in history]
    assert drops(seen, GPU, 4, int(since * SECOND)) == expected


def test_a_pod_that_failed_and_is_gone_is_told_once() -> None:
    history = [pod("a", "Failed", at=1), pod("b", "Failed", at=5), pod("b", "Failed", at=6), pod("c", at=7)]
    assert failed(history, 1) == ["pod pod-b failed: Because: of that"]


async def test_another_node_that_a_test_makes_is_not_taken_for_this_one() -> None:
    recorder = Recorder(cast("Any", None))
    for at, name in ((1, HOSTNAME), (2, "node-2")):
        recorder._node(Event(at, {"metadata": {"name": name}, "status": {"capacity": {GPU: str(at)}}}))
    assert [one.capacity for one in recorder.nodes] == [{GPU: 1}]


def test_a_container_tells_its_devices_and_what_it_could_not_open() -> None:
    said = [
        Word("01", "told GPU-7"),
        Word("02", "open /dev/nvidia7"),
        Word("03", "told GPU-0,GPU-1"),
        Word("04", "open /dev/nvidia0"),
        Word("05", "lost /dev/nvidia1"),
        Word("06", "open /dev/nvidia1"),
        Word("07", "open /dev/nvidia0"),
    ]
    found = account(said, since="04")
    assert found == Account(
        frozenset({"GPU-0", "GPU-1"}), frozenset({"/dev/nvidia0", "/dev/nvidia1"}), "06", ("/dev/nvidia1",), "03"
    )
    assert account(said, since="05").lost == ()
    assert account([]) == Account(frozenset(), frozenset(), "", ())
