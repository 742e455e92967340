"""When a node is ready for GPU pods, and what is written at the API server about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from devices.life import states as life
from devices.life.states import State
from devices.model import Device, Health
from gateway.kubernetes import events, ready
from gateway.kubernetes.events import News, Queue
from gateway.kubernetes.node import Condition, NodeConditions, NodeMetadata, NodeObject, NodeSpec, Taint
from gateway.kubernetes.ready import judge

GPU, OTHER = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"


def node(
    allocatable: Mapping[str, str] | None = None, *conditions: Condition, taints: Sequence[Taint] = ()
) -> NodeObject:
    return NodeObject(NodeMetadata("n1"), NodeSpec(tuple(taints)), NodeConditions(dict(allocatable or {}), conditions))


def test_what_others_wrote_steers_no_screen() -> None:
    verdict = judge([], node(), hindrance="a\x1b[2Jb" + "x" * 5000, was=False)
    patch = ready.condition(node(), verdict, 0)
    assert patch is not None
    [said] = patch["status"]["conditions"]
    assert "\x1b" not in said["message"]
    assert len(said["message"]) <= 1024


# Events.


def entry(state: State, reason: str = "", device_id: str = "GPU-0") -> life.Entry:
    well = state in {State.PRESENT, State.NOT_LOOKED_YET}
    return life.Entry(Device(device_id, Health.HEALTHY if well else Health.UNHEALTHY), state, reason)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (State.PRESENT, State.UNHEALTHY, ("GPUUnhealthy", True)),
        (State.PRESENT, State.LOST, ("GPULost", True)),
        (State.CORDONED, State.UNHEALTHY, ("GPUUnhealthy", True)),
        (State.UNHEALTHY, State.PRESENT, ("GPURecovered", False)),
        (State.LOST, State.PRESENT, ("GPURecovered", False)),
        (State.PRESENT, State.CORDONED, ("GPUCordoned", False)),
        (State.UNHEALTHY, State.CORDONED, ("GPUCordoned", False)),
        (State.CORDONED, State.PRESENT, ("GPUUncordoned", False)),
        (State.UNHEALTHY, State.LOST, None),
        (State.PRESENT, State.PRESENT, None),
        (State.NOT_LOOKED_YET, State.PRESENT, None),
        (State.PRESENT, State.WITHHELD, None),
        (None, State.PRESENT, None),
        (None, State.UNHEALTHY, ("GPUUnhealthy", True)),
    ],
)
def test_what_becomes_of_a_gpu_is_an_event(before: State | None, after: State, told: tuple[str, bool] | None) -> None:
    was = {} if before is None else {"GPU-0": entry(before)}
    found = list(events.of_devices(GPU, was, {"GPU-0": entry(after)}, 7))
    assert [(one.reason, one.warning) for one in found] == ([told] if told else [])
    assert [(one.subject, one.at) for one in found] == ([("GPU-0", 7)] if told else [])


def test_the_replicas_of_a_gpu_are_one_event() -> None:
    ids = [f"GPU-0::{number}" for number in range(10)]
    was = {one: entry(State.PRESENT, device_id=one) for one in ids}
    now = {one: entry(State.UNHEALTHY, "Xid 79", one) for one in ids}
    [news] = events.of_devices(GPU, was, now, 0)
    assert news.message == "nvidia.com/gpu: GPU-0 is unhealthy: Xid 79"


def news(subject: str, reason: str = "GPUUnhealthy") -> News:
    return News(reason, subject, "", warning=True, at=0)


def test_a_gpu_that_flaps_is_told_once_in_a_while() -> None:
    queue = Queue()
    assert [queue.add(news("a"), now) for now in (0, 100, 299, 300, 301)] == [True, False, False, True, False]
    assert queue.add(news("a", "GPURecovered"), 301)
    assert queue.dropped == 3


def test_many_events_at_once_are_bounded_and_more_come_with_time() -> None:
    queue = Queue()
    taken = [queue.add(news(str(number)), 1000) for number in range(100)]
    assert taken == [True] * events.BURST + [False] * (100 - events.BURST)
    assert [queue.add(news(f"later {number}"), 1000 + 60 * 3) for number in range(5)] == [True] * 3 + [False] * 2
    assert queue.dropped == 92


def test_while_the_server_is_away_the_newest_wait() -> None:
    queue = Queue()
    for number in range(100):
        queue.add(news(str(number)), number * 1000)
    assert [one.subject for one in queue.waiting] == [str(number) for number in range(80, 100)]


def test_what_is_remembered_is_bounded() -> None:
    queue = Queue()
    for number in range(2000):
        queue.add(news(str(number)), number)
    assert len(queue._told) <= events.BURST + events.REPEAT_AFTER_S / events.REFILL_S


def test_an_event_is_of_the_node() -> None:
    made: Mapping[str, Any] = events.body(News("GPUUnhealthy", "GPU-0", "why\x07", warning=True, at=0), "n1", "abc")
    assert made["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}
    assert (made["type"], made["reason"], made["firstTimestamp"]) == ("Warning", "GPUUnhealthy", "1970-01-01T00:00:00Z")
    assert "\x07" not in made["message"]
