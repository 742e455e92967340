"""Which hardware a device ID stands for, and which IDs are withheld because a pod has the same hardware under another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from devices import boards
from devices.boards import Hold, Place, place_of
from devices.model import Device
from devices.replicas import grouped, unshared

GPUS = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        pytest.param(Place("G"), Place("G"), True, id="the same GPU"),
        pytest.param(Place("G"), Place("H"), False, id="two GPUs"),
        pytest.param(Place("G"), Place("G", "P"), True, id="a GPU and a partition of it"),
        pytest.param(Place("G", "P"), Place("G", "P"), True, id="the same partition"),
        pytest.param(Place("G", "P"), Place("G", "Q"), False, id="two partitions of a GPU"),
        pytest.param(Place("G", "P"), Place("H", "P"), False, id="partitions of two GPUs"),
    ],
)
def test_what_overlaps(one: Place, other: Place, overlap: bool) -> None:
    assert one.overlaps(other) is other.overlaps(one) is overlap


@pytest.mark.parametrize(
    ("device", "place"),
    [
        (Device("GPU-1"), Place("GPU-1")),
        (Device("GPU-1::0"), Place("GPU-1")),
        (Device("MIG-1", part_of="GPU-1"), Place("GPU-1", "MIG-1")),
        (Device("MIG-1::12", part_of="GPU-1"), Place("GPU-1", "MIG-1")),
        (Device("MIG-GPU-1/7/0"), Place("GPU-1", "MIG-GPU-1/7/0")),
        (Device("MIG-GPU-1/7/0::1"), Place("GPU-1", "MIG-GPU-1/7/0")),
        (Device("MIG-1"), Place("MIG-1")),
        (Device("/dev/fuse::3"), Place("/dev/fuse")),
        (Device("GPU::x"), Place("GPU::x")),
        (Device("::1"), Place("::1")),
    ],
)
def test_where_a_device_is(device: Device, place: Place) -> None:
    assert place_of(device) == place


@pytest.mark.parametrize(
    ("device_id", "expected"),
    [
        ("GPU-1::0", "GPU-1"),
        ("GPU-1::12", "GPU-1"),
        ("GPU-1", "GPU-1"),
        ("GPU-1::x", "GPU-1::x"),
        ("GPU-1::", "GPU-1::"),
        ("GPU-1::٣", "GPU-1::٣"),
        ("::1", "::1"),
        ("known::1", "known::1"),
        ("known::1::0", "known::1"),
    ],
)
def test_what_a_replica_is_of(device_id: str, expected: str) -> None:
    """One alone, and of many."""
    assert unshared(device_id, {"known::1"}) == expected
    assert grouped((device_id,), {"known::1"}) == {expected: [device_id]}


@pytest.mark.parametrize(
    ("offered", "had", "held", "withheld"),
    [
        pytest.param("G", "G", (), True, id="the same ID, under another name"),
        pytest.param("G::0", "G", (), True, id="shared now, held whole"),
        pytest.param("G", "G::0", (), True, id="whole now, held as a replica"),
        pytest.param("G::0", "G::3", (), True, id="fewer replicas now"),
        pytest.param("G::0", "G::3", ("G::0",), False, id="who shared it goes on sharing it"),
        pytest.param("G::0", "G::3", ("G::1",), True, id="but nobody else begins to"),
        pytest.param("G::0", "G", ("G::0",), True, id="who holds it whole shares it with nobody"),
        pytest.param("G", "G::0", ("G",), True, id="nor does who holds a replica with one who has it whole"),
        pytest.param("H", "G", (), False, id="another GPU"),
    ],
)
def test_what_is_withheld(offered: str, had: str, held: Sequence[str], withheld: bool) -> None:
    hold = Hold("r", had, place_of(Device(had)), "why")
    others = Hold("r", "X", Place("X"), "why not")
    found = boards.withheld([others, hold], [Device(offered)], held)
    assert found == ({offered: "why"} if withheld else {})


def test_a_hold_says_who_has_what() -> None:
    assert boards.held(GPUS, "U0", Place("U0"), "ns/pod/main").words == "still held as nvidia.com/gpu U0 by ns/pod/main"
    assert "its holder is unknown now" in boards.held(GPUS, "U0", Place("U0"), None).words
    assert len(boards.held(GPUS, "U0", Place("U0"), "x" * 999).words) < 300
