from __future__ import annotations

from collections.abc import Callable

import pytest

from devices.model import ContainerAnswer
from gateway_lab.kubelets.kubelet import Admission
from gateway_lab.trials.invariants import (
    Holding,
    Pods,
    broken,
    given_twice,
    holdings,
    may_be_an_accident,
    registered,
    short,
    unannounced,
)
from gateway_lab.trials.scenarios import mistold

GPU = "nvidia.com/gpu"


def h(pod: str, *device_ids: str, container: str = "main", resource: str = GPU) -> Holding:
    return Holding(pod, container, resource, device_ids)


@pytest.mark.parametrize(
    ("before", "after", "drained", "sentences"),
    [
        ([], [], set(), []),
        ([h("a", "G0")], [h("a", "G0")], set(), []),
        ([h("a", "G0", "G1")], [h("a", "G1", "G0")], set(), []),
        ([h("a", "G0")], [h("a", "G0"), h("b", "G1")], set(), []),
        ([h("a", "G0")], [], {"a"}, []),
        ([h("a", "G0")], [h("b", "G0")], {"a"}, []),
        ([h("a", "G0")], [], set(), ["pod a lost G0: it holds nothing now"]),
        ([h("a", "G0", "G1")], [h("a", "G0")], set(), ["pod a lost G1: it holds G0 now"]),
        (
            [h("a", "G0")],
            [h("a", "G1")],
            set(),
            ["pod a lost G0: it holds G1 now", "pod a got G1 unasked: it holds G1 now"],
        ),
        ([h("a", "G0")], [h("a", "G0"), h("b", "G0")], set(), ["G0 is given to both a and b"]),
        ([h("a", "G0"), h("b", "G1")], [h("a", "G0")], {"a"}, ["pod b lost G1: it holds nothing now"]),
        (
            [h("a", "G0", container="one")],
            [h("a", "G0", container="two")],
            set(),
            ["pod a lost G0: it holds nothing now"],
        ),
    ],
)
def test_broken_promises_to_pods(
    before: list[Holding], after: list[Holding], drained: set[str], sentences: list[str]
) -> None:
    assert broken(before, after, drained) == sentences


@pytest.mark.parametrize(
    ("now", "sentences"),
    [
        ([h("a", "G0", container="init"), h("a", "G0")], []),
        ([h("a", "G0"), h("b", "G1", resource="amd.com/gpu")], []),
        (
            [h("b", "G0", "G1"), h("a", "G0"), h("c", "G1")],
            ["G0 is given to both a and b", "G1 is given to both b and c"],
        ),
    ],
)
def test_no_device_is_in_two_pods(now: list[Holding], sentences: list[str]) -> None:
    assert given_twice(now) == sentences


@pytest.mark.parametrize(
    ("one", "other", "sentences"),
    [
        pytest.param("G0", "G0", ["G0 is given to both a and b"], id="one ID, under two names"),
        pytest.param("G0", "G0::1", ["G0 is given to both a and b, as G0 and as G0::1"], id="whole and shared"),
        pytest.param("G0::0", "G0::1", [], id="shared"),
        pytest.param("G0", "G1::1", [], id="two GPUs"),
        pytest.param("G0", "M0", ["G0 is given to both a and b, as G0 and as M0"], id="whole and a partition"),
        pytest.param("G0::1", "M0::1", ["G0 is given to both a and b, as G0::1 and as M0::1"], id="both shared"),
        pytest.param("M0", "M1", [], id="two partitions"),
        pytest.param("M0", "M0::0", ["G0 is given to both a and b, as M0 and as M0::0"], id="a partition, shared"),
    ],
)
def test_given_twice_judges_hardware(one: str, other: str, sentences: list[str]) -> None:
    now = [h("a", one), h("b", other, resource="nvidia.com/other")]
    assert given_twice(now, {"M0": "G0", "M1": "G0"}) == sentences
    assert given_twice([h("a", one), h("a", other, container="two")], {"M0": "G0"}) == []


@pytest.mark.parametrize(
    ("check", "sentences"),
    [
        (lambda: unannounced([h("a", "G0")], {GPU: ["G0", "G1"]}), []),
        (
            lambda: unannounced([h("a", "G0")], {GPU: ["G1"]}),
            ["pod a holds G0, which no longer exists: nvidia.com/gpu now has G1"],
        ),
        (
            lambda: unannounced([h("a", "G0")], {}),
            ["pod a holds G0, which no longer exists: nvidia.com/gpu now has no devices"],
        ),
        (lambda: short({GPU: 2}, {GPU: 2, "cpu": 1}, "capacity"), []),
        (lambda: short({GPU: 2}, {GPU: 3}, "capacity"), ["nvidia.com/gpu: expected capacity 2, found 3"]),
        (lambda: short({GPU: 2}, {}, "allocatable"), ["nvidia.com/gpu: expected allocatable 2, found 0"]),
        (lambda: registered({GPU: {1}}, {GPU: 1}), []),
        (lambda: registered({GPU: {1}}, {GPU: 2}), ["nvidia.com/gpu: expected 1 Register, the kubelet counted 2"]),
        (lambda: registered({GPU: {1}}, {}), ["nvidia.com/gpu: expected 1 Register, the kubelet counted 0"]),
        (lambda: registered({GPU: {3, 2}}, {GPU: 3}), []),
        (
            lambda: registered({GPU: {3, 2}}, {GPU: 4}),
            ["nvidia.com/gpu: expected 2 or 3 Register, the kubelet counted 4"],
        ),
        (lambda: registered({}, {GPU: 1}), ["nvidia.com/gpu: expected 0 Register, the kubelet counted 1"]),
    ],
)
def test_what_a_node_must_show(check: Callable[[], list[str]], sentences: list[str]) -> None:
    assert check() == sentences


def test_the_records_of_a_kubelet_are_read_in_order_and_without_empty_entries() -> None:
    records: Pods = {"b": {"main": {GPU: ["G2"], "amd.com/gpu": []}}, "a": {"two": {GPU: ("G1", "G0")}, "one": {}}}
    assert holdings(records) == (h("a", "G0", "G1", container="two"), h("b", "G2"))


@pytest.mark.parametrize(
    ("reason", "may_be"),
    [
        pytest.param(
            "not right within 5 s (promised: 2 s):\nnvidia.com/gpu: expected allocatable 8, found 0", True, id="late"
        ),
        pytest.param("it took more than 120 s", True, id="very late"),
        pytest.param("\n".join(["not right:", *given_twice([h("a", "G0"), h("b", "G0")])]), False, id="given twice"),
        pytest.param("\n".join(broken([h("a", "G0")], [], ())), False, id="lost"),
        pytest.param("\n".join(broken([h("a", "G0")], [h("a", "G0", "G1")], ())), False, id="unasked"),
        pytest.param("after the edit 'x': " + unannounced([h("a", "G0")], {})[0], False, id="another ID"),
        pytest.param(mistold("a", GPU, ["G0"], Admission({}, ContainerAnswer({})))[0], False, id="told another one"),
        pytest.param("the gateway ended by itself, with exit status 1; its log ends:", False, id="a crash"),
    ],
)
def test_what_a_busy_machine_may_be_the_reason_of(reason: str, *, may_be: bool) -> None:
    assert may_be_an_accident(reason) is may_be
