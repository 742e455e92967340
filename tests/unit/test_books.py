"""The books of an emulated device manager, without a kubelet around them."""

from __future__ import annotations

import pytest

from devices.model import Device, Health
from gateway.lab.kubelets.behaviour import behaviour
from gateway.lab.kubelets.books import DeviceBooks

GPU = "example.com/gpu"
DEVICES = (Device("a", numa_nodes=(1,)), Device("ill", Health.UNHEALTHY, (0,)))


@pytest.mark.parametrize(("version", "nodes"), [("1.15", ()), ("1.16", (1,))])
def test_where_a_device_is_counts_from_1_16_on(version: str, nodes: tuple[int, ...]) -> None:
    books = DeviceBooks(behaviour(version))
    assert books.enter_list(GPU, {}, DEVICES)["a"].numa_nodes == nodes


def test_what_is_forgotten_comes_back_with_nothing() -> None:
    books = DeviceBooks(behaviour("1.37"))
    books.enter_list(GPU, {}, DEVICES)
    assert books.totals().capacity == {GPU: 2}
    books.forget(GPU)
    assert books.resources == ()
    books.mark_unhealthy(GPU)
    assert books.totals().capacity == {GPU: 0}
