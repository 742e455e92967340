"""The records of an emulated device manager, without a kubelet around them."""

from __future__ import annotations

import pytest

from devices.model import Device, Health
from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.records import DeviceRecords

GPU = "example.com/gpu"
DEVICES = (Device("a", numa_nodes=(1,)), Device("ill", Health.UNHEALTHY, (0,)))


@pytest.mark.parametrize(("version", "nodes"), [("1.15", ()), ("1.16", (1,))])
def test_where_a_device_is_counts_from_1_16_on(version: str, nodes: tuple[int, ...]) -> None:
    records = DeviceRecords(behaviour(version))
    assert records.enter_list(GPU, {}, DEVICES)["a"].numa_nodes == nodes


def test_what_is_forgotten_comes_back_with_nothing() -> None:
    records = DeviceRecords(behaviour("1.37"))
    records.enter_list(GPU, {}, DEVICES)
    assert records.totals().capacity == {GPU: 2}
    records.forget(GPU)
    assert records.resources == ()
    records.mark_unhealthy(GPU)
    assert records.totals().capacity == {GPU: 0}
