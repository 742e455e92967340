"""The pod-resources API: what its answers say, and how much of one is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adapters import podresources
from adapters.dialect import MalformedError
from adapters.pb.podresources import v1_pb2 as pb
from adapters.podresources import Listed

GPU = "example.com/gpu"


def container(name: str, *devices: tuple[str, str]) -> pb.ContainerResources:
    return pb.ContainerResources(
        name=name, devices=[pb.ContainerDevices(resource_name=resource, device_ids=ids) for resource, ids in devices]
    )


@pytest.mark.parametrize("decode", [podresources.decode_list, podresources.decode_allocatable])
@pytest.mark.parametrize("part", [b"\x0a\x00", b"\x8a\x00\x00", b"\x0a\x02\x1a\x00", b"\x0a\x02\x12\x00"])
def test_an_answer_is_counted_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch, decode: Callable[[bytes], object], part: bytes
) -> None:
    most = podresources.MAX_PARTS
    with monkeypatch.context() as limited:
        limited.setattr(podresources, "MAX_PARTS", 1000 * sum(byte in podresources._BEGINNINGS for byte in part))
        decode(part * 1000)
    monkeypatch.setattr(podresources, "pb", None)
    with pytest.raises(MalformedError, match=f"Allowed: {most}"):
        decode(part * (most + 1))


@pytest.mark.parametrize(
    ("details", "gone"),
    [
        ("pod c in namespace b not found", True),
        ("pods are listed late", False),
        ("the method Get was not found", False),
        ("pod c in namespace b not found in time", False),
        ("", False),
    ],
)
def test_only_an_error_about_a_pod_says_that_there_is_none(details: str, *, gone: bool) -> None:
    assert podresources.is_not_found(details) is gone


def test_an_answer_of_ten_thousand_devices_is_read() -> None:
    """In their longest form: each by itself, with its NUMA nodes."""
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=number) for number in range(2)])
    devices = [
        pb.ContainerDevices(resource_name=GPU, device_ids=[f"GPU-{number:036}::{number % 10}"], topology=topology)
        for number in range(10_000)
    ]
    answer = pb.AllocatableResourcesResponse(devices=devices).SerializeToString()
    assert len(podresources.decode_allocatable(answer)[GPU]) == 10_000


@pytest.mark.parametrize(
    ("containers", "held"),
    [
        pytest.param([], {}, id="nothing"),
        pytest.param([container("c")], {}, id="a container without devices"),
        pytest.param([container("c", ("r", "ab"))], {"r": {"a": "s/n/c", "b": "s/n/c"}}, id="as 1.20 says it"),
        pytest.param([container("c", ("r", "a"), ("r", "b"))], {"r": {"a": "s/n/c", "b": "s/n/c"}}, id="as 1.24 says it"),
        pytest.param([container("c", ("r", "a"), ("r", "a"))], {"r": {"a": "s/n/c"}}, id="on two NUMA nodes"),
        pytest.param([container("c", ("r", "a"), ("q", "a"))], {"r": {"a": "s/n/c"}, "q": {"a": "s/n/c"}}, id="two resources"),
        pytest.param([container("c", ("r", "a")), container("d", ("r", "ab"))], {"r": {"a": "s/n/c", "b": "s/n/d"}}, id="shared"),
    ],
)  # fmt: skip
def test_who_holds_what(containers: list[pb.ContainerResources], held: dict[str, dict[str, str]]) -> None:
    pod = pb.PodResources(name="n", namespace="s", containers=containers)
    assert podresources.decode_list(pb.ListPodResourcesResponse(pod_resources=[pod]).SerializeToString()) == Listed(
        held, frozenset({"s/n"})
    )


def test_names_are_as_long_as_kubernetes_has_them_at_most() -> None:
    """Each holder repeats its pod's name: a name of 200 000 characters with 2 000 containers would be 400 MB."""

    def listed(pod: int, container_name: int) -> bytes:
        held = [container("c" * container_name, ("r", "a"))]
        pods = [pb.PodResources(name="p" * pod, namespace="n" * 63, containers=held)]
        return pb.ListPodResourcesResponse(pod_resources=pods).SerializeToString()

    assert list(podresources.decode_list(listed(253, 63)).held) == ["r"]
    with pytest.raises(MalformedError, match=r"382 characters.. Allowed: 381"):
        podresources.decode_list(listed(254, 63))


@pytest.mark.parametrize("decode_one", [podresources.decode_list, podresources.decode_allocatable])
def test_what_is_none(decode_one: object) -> None:
    assert callable(decode_one)
    with pytest.raises(MalformedError, match="pod-resources"):
        decode_one(b"\xff\xff")
