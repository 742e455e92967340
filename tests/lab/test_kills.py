"""What follows from a kubelet's log, a container's log and what the API server showed, when who leads of two is killed."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway_lab.node import kills
from gateway_lab.node.kills import GPUS, Kill
from gateway_lab.node.watch import NodeSeen
from gateway_lab.trials.scenarios import RESOURCE

NOW = datetime(2026, 11, 23, 20, 8, tzinfo=UTC)
LOG = """\
I1123 20:07:20.618442      97 server.go:161] "Got registration request from device plugin with resource" resourceName="nvidia.com/gpu"
I1123 20:07:20.628345      97 manager.go:345] "Processed device updates for resource" resourceName="nvidia.com/gpu" totalCount=8 healthyCount=8
E1123 20:07:37.024652      97 client.go:95] "ListAndWatch ended unexpectedly for device plugin" err="EOF" resource="nvidia.com/gpu"
I1123 20:07:37.025683      97 manager.go:448] "Mark all resources Unhealthy for resource" resourceName="nvidia.com/gpu"
I1123 20:07:37.025690      97 manager.go:448] "Mark all resources Unhealthy for resource" resourceName="nvidia.com/gpu.shared"
I1123 20:07:37.025704      97 manager.go:274] "Last device plugin for this resource disconnected" resource="nvidia.com/gpu"
I1123 20:07:37.041683      97 manager.go:345] "Processed device updates for resource" resourceName="nvidia.com/gpu" totalCount=8 healthyCount=8
"""
MS = 1_000_000


def seen(ms: float, count: int) -> NodeSeen:
    counts = {RESOURCE: count}
    return NodeSeen(int(ms * MS), counts, counts, "", "")


def kill(began_ms: int, ended_ms: int, *failed: float) -> Kill:
    return Kill(began_ms * MS, ended_ms * MS, dict.fromkeys(failed, "Refused: by the kubelet"))


def test_the_kubelets_log_tells_what_its_records_had() -> None:
    moment = int(datetime(2026, 11, 23, 20, 7, tzinfo=UTC).timestamp()) * 1000 * MS
    found = [*kills.records(LOG, NOW, -moment)]
    assert [(one.monotonic_ns, one.allocatable) for one in found] == [
        (20_628_345_000, {RESOURCE: 8}),
        (37_025_683_000, {RESOURCE: 0}),
        (37_041_683_000, {RESOURCE: 8}),
    ]
    assert kills.short_ms(found, kill(37_000, 38_000)) == 16


@pytest.mark.parametrize(
    ("history", "short"),
    [
        ([seen(0, 8), seen(100, 8)], 0),
        ([seen(0, 8), seen(12, 0), seen(30, 8)], 18),
        ([seen(0, 8), seen(12, 0), seen(20, 7), seen(30, 8)], 18),
        ([seen(0, 8), seen(12, 0), seen(14, 8), seen(40, 0), seen(45, 8)], 7),
        ([seen(0, 8), seen(12, 0)], math.inf),
        ([seen(0, 8), seen(2, 0), seen(5, 8)], 0),  # Before the kill.
        ([seen(0, 8), seen(60, 0), seen(90, 8)], 0),  # Of what came after it.
    ],
)
def test_what_a_kill_cost(history: list[NodeSeen], short: float) -> None:
    assert kills.short_ms(history, kill(10, 50)) == short


WHOLE = [seen(0, 8)]
ONCE = [kill(10, 50), kill(60, 100), kill(110, 150)]
RECORDS = [seen(0, 8), seen(12, 0), seen(30, 8), seen(62, 0), seen(80, 8), seen(112, 0), seen(130, 8)]


@pytest.mark.parametrize(
    ("kills_", "records", "shown", "missed"),
    [
        (ONCE, RECORDS, WHOLE, []),
        (ONCE, [seen(0, 8), seen(12, 0), seen(42, 8), seen(62, 0), seen(92, 8)], WHOLE, ["median"]),
        (ONCE, [*RECORDS[:-1], seen(212, 8)], WHOLE, ["worst"]),
        (ONCE, RECORDS[:-1], WHOLE, ["worst"]),
        (ONCE, RECORDS, [seen(0, 8), seen(65, 0), seen(10_065, 8)], ["saw"]),
        (ONCE, RECORDS, [seen(0, 8), seen(65, 7)], ["saw"]),
        (ONCE, RECORDS, [seen(0, 8), seen(55, 0), seen(10_055, 8)], []),  # No kill's, but told as a figure.
        ([*ONCE[:-1], kill(110, 150, 0.0)], RECORDS, WHOLE, []),  # While nobody leads.
        ([*ONCE[:-1], kill(110, 150, 0.1)], RECORDS, WHOLE, ["ran"]),
        ([*ONCE[:-1], replace(kill(110, 150), changes=2)], RECORDS, WHOLE, ["leader"]),
    ],
)
def test_what_is_held_to_the_bars(
    kills_: list[Kill], records: list[NodeSeen], shown: list[NodeSeen], missed: list[str]
) -> None:
    report = kills.judge(3, kills_, records, shown)
    assert [bar.name.rpartition(" ")[2] for bar in report.bars if not bar.passed] == missed
    assert report.figures["drops at the API server in all"] == len(shown) // 2


def test_fewer_kills_than_were_asked_for_are_no_success() -> None:
    assert kills.judge(3, ONCE, RECORDS, WHOLE).passed
    assert [bar.passed for bar in kills.judge(4, ONCE, RECORDS, WHOLE).bars] == [False, True, True, True, True, True]
    assert not kills.judge(3, [], RECORDS, WHOLE).passed


def test_pods_that_failed_are_counted_by_their_moment() -> None:
    report = kills.judge(2, [kill(10, 50, 0.0, 0.5), kill(60, 100, 0.0)], RECORDS, WHOLE)
    [bar] = [bar for bar in report.bars if bar.name == "pods that came later and ran"]
    assert (bar.measured, bar.limit) == (3, 4)
    assert bar.note == "2 failed that came after 0 s, 1 failed that came after 0.5 s"
    assert report.figures["why pods failed"] == {"Refused: by the kubelet": 3}


def test_who_leads_is_told_by_the_containers_logs() -> None:
    said = (
        '2026-11-23T20:07:01.123456789Z stderr F {"event": "leader", "stage": "standing by", "why": "Able"}\n'
        '2026-11-23T20:07:02.123456789Z stderr F {"event": "leader", "stage": "taking over", "why": "Locked"}\n'
        '2026-11-23T20:07:02.2Z stderr F {"event": "leader", "stage": "leading", "why": "ListsReady"}\n'
        '2026-11-23T20:07:03.1Z stdout F {"event": "registered", "peer": "leader"}\n'
        '2026-11-23T20:07:04.1Z stderr F {"event": "leader", "sta'  # It is being written.
    )
    assert kills.stage(said) == "leading"
    assert kills.stage("") == ""
    assert [kills.took(said, datetime(2026, 11, 23, 20, 7, second, tzinfo=UTC)) for second in (2, 3)] == [1, 0]


def test_the_interpreter_is_the_images() -> None:
    packages = (Path(__file__).parents[2] / "deploy" / "image.toml").read_text()
    assert f'"{Path(kills.PYTHON).name}-minimal"' in packages
    assert len(kills.DEVICES) == GPUS
