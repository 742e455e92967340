"""What a client of the API server makes of what it saw: drops, restarts, and what pods say themselves."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from gateway_lab.node.api import Event
from gateway_lab.node.machine import HOSTNAME
from gateway_lab.node.pods import Account, Word, account, gpu_pod, words
from gateway_lab.node.watch import ContainerSeen, Drop, NodeSeen, PodSeen, Recorder, drops, failed, node_seen, pod_seen

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
        pytest.param([(0, 4), (5, 0), (15, 4)], 0, [Drop(5 * SECOND, 10_000, 0)], id="ten seconds of none"),
        pytest.param([(0, 4), (5, 3), (6, 0), (7, 4)], 0, [Drop(5 * SECOND, 2_000, 0)], id="one drop in two steps"),
        pytest.param([(0, 4), (5, None), (6, 4)], 0, [Drop(5 * SECOND, 1_000, 0)], id="the resource isn't there"),
        pytest.param([(0, 4), (5, 0)], 0, [Drop(5 * SECOND, math.inf, 0)], id="it lasts"),
        pytest.param([(0, 0), (5, 4), (9, 4)], 6, [], id="over before that"),
        pytest.param([(0, 0), (5, 4)], 3, [Drop(0, 2_000, 0)], id="only what was after that"),
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


def test_a_node_is_read_with_vendors_resources_only() -> None:
    found = {
        "status": {
            "capacity": {GPU: "4", "cpu": "2", "memory": "1Gi"},
            "allocatable": {GPU: "3", "cpu": "2"},
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"kubeletVersion": "v1.36.3"},
        }
    }
    assert node_seen(7, found) == NodeSeen(7, {GPU: 4}, {GPU: 3}, "True", "v1.36.3")


def test_a_pod_is_read_with_what_its_kubelet_says_of_its_devices() -> None:
    status: Mapping[str, Any] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {
                "name": "main",
                "containerID": "containerd://1",
                "restartCount": 2,
                "ready": True,
                "state": {"running": {"startedAt": "…"}},
                "allocatedResourcesStatus": [
                    {"name": GPU, "resources": [{"resourceID": "GPU-0", "health": "Healthy"}]}
                ],
            }
        ],
    }
    found = pod_seen(
        7, {"metadata": {"uid": "u", "namespace": "n", "name": "p", "labels": {"app": "a"}}, "status": status}
    )
    container = ContainerSeen("containerd://1", 2, "running", "", ready=True, health={"GPU-0": "Healthy"})
    assert found == PodSeen(7, "u", "n", "p", "a", "Running", "", "", ready=True, containers={"main": container})
    assert found.runs


def test_a_pod_that_was_never_seen_by_a_kubelet_does_not_run() -> None:
    found = pod_seen(0, {**gpu_pod("p"), "metadata": {"uid": "u", "namespace": "n", "name": "p"}})
    assert (found.phase, found.runs, found.ready) == ("Pending", False, False)


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


def test_a_containers_log_is_read_over_its_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "default_p_uid" / "main"
    folder.mkdir(parents=True)
    for number, text in {0: "told a", 10: "told c", 9: "told b"}.items():
        (folder / f"{number}.log").write_text(f"2026-01-01T00:00:{number:02}.000000000Z stdout F {text}\nnonsense\n")
    for uid in ("uid", "another", ""):
        assert [word.text for word in words(tmp_path, "p", uid)] == ["told a", "told b", "told c"]
    assert words(tmp_path, "q") == []


def test_of_several_pods_of_a_name_the_one_that_wrote_last_is_meant(tmp_path: Path) -> None:
    for uid in ("old", "new"):
        log = tmp_path / f"default_static-node-1_{uid}" / "main" / "0.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"2026-01-01T00:00:00.000000000Z stdout F told {uid}\n")
        os.utime(log, ns=(0, 2 if uid == "old" else 1))
    assert [word.text for word in words(tmp_path, "static-node-1", "mirror")] == ["told old"]
