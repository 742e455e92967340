"""Every field of every message under its number on the wire, written out by hand: what the kubelets' bytes are."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.dialect import Dialect, Level
from adapters.pb.podresources import v1_pb2 as podresources
from adapters.podresources import encode_get
from adapters.registry import by_name
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    DeviceNode,
    Health,
    Mount,
    Options,
    PreferredRequest,
    Registration,
)


def f(number: int, value: bytes | str | int) -> bytes:
    """Write one field: a number below 128 as a varint, anything else by its length, which is below 128 too."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    data = value.encode() if isinstance(value, str) else value
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


MOUNT = f(1, "/in") + f(2, "/on") + f(3, 1)
NODE = f(1, "/dev/a") + f(2, "/dev/b") + f(3, "rw")
ANSWER = ContainerAnswer({"K": "V"}, (Mount("/in", "/on", read_only=True),), (DeviceNode("/dev/a", "/dev/b", "rw"),))
WHOLE = ContainerAnswer(ANSWER.envs, ANSWER.mounts, ANSWER.device_nodes, {"A": "B"}, ("v/c=n", "v/c=m"))
K_V = f(1, "K") + f(2, "V")
PAIR = ContainerRequest(("a", "b"))
LEVEL = Level(37, 37)


def _answer(dialect: Dialect, answers: tuple[ContainerAnswer, ...]) -> bytes:
    return dialect.encode_allocate_answer([PAIR] * len(answers), answers, LEVEL).data


def _encode(dialect: Dialect, method: str, value: Any) -> bytes:
    if method == "allocate_answer":
        return _answer(dialect, value)
    data: bytes = getattr(dialect, f"encode_{method}")(value).data
    return data


ALPHA: list[tuple[str, str, Any, bytes]] = [
    ("register", "RegisterRequest", Registration("v", "e", "r"), f(1, "v") + f(2, "e") + f(3, "r")),
    (
        "list",
        "ListAndWatchResponse",
        (Device("a"), Device("b", Health.UNHEALTHY)),
        f(1, f(1, "a") + f(2, "Healthy")) + f(1, f(1, "b") + f(2, "Unhealthy")),
    ),
    ("allocate_request", "AllocateRequest", (PAIR,), f(1, "a") + f(1, "b")),
]
ROWS: list[tuple[str, str, str, Any, bytes]] = [
    *(("0.1", *row) for row in ALPHA),
    (
        "0.1",
        "allocate_answer",
        "AllocateResponse",
        (ANSWER,),
        f(1, f(1, "a") + f(2, K_V) + f(3, MOUNT) + f(4, NODE)) + f(1, f(1, "b")),
    ),
    *(("v1alpha2", *row) for row in ALPHA),
    ("v1alpha2", "allocate_answer", "AllocateResponse", (ANSWER,), f(1, K_V) + f(2, MOUNT) + f(3, NODE)),
    (
        "v1beta1",
        "register",
        "RegisterRequest",
        Registration("v", "e", "r", Options(pre_start_required=True, preferred_allocation=True)),
        f(1, "v") + f(2, "e") + f(3, "r") + f(4, f(1, 1) + f(2, 1)),
    ),
    ("v1beta1", "options", "DevicePluginOptions", Options(pre_start_required=True), f(1, 1)),
    ("v1beta1", "options", "DevicePluginOptions", Options(preferred_allocation=True), f(2, 1)),
    (
        "v1beta1",
        "list",
        "ListAndWatchResponse",
        (Device("a", numa_nodes=(1, 2)), Device("b", Health.UNHEALTHY)),
        f(1, f(1, "a") + f(2, "Healthy") + f(3, f(1, f(1, 1)) + f(1, f(1, 2)))) + f(1, f(1, "b") + f(2, "Unhealthy")),
    ),
    (
        "v1beta1",
        "allocate_request",
        "AllocateRequest",
        (PAIR, ContainerRequest(("c",))),
        f(1, f(1, "a") + f(1, "b")) + f(1, f(1, "c")),
    ),
    (
        "v1beta1",
        "allocate_answer",
        "AllocateResponse",
        (WHOLE, ContainerAnswer()),
        f(
            1,
            f(1, K_V)
            + f(2, MOUNT)
            + f(3, NODE)
            + f(4, f(1, "A") + f(2, "B"))
            + f(5, f(1, "v/c=n"))
            + f(5, f(1, "v/c=m")),
        )
        + f(1, b""),
    ),
    (
        "v1beta1",
        "preferred_request",
        "PreferredAllocationRequest",
        (PreferredRequest(("a", "b", "c"), ("b",), 2),),
        f(1, f(1, "a") + f(1, "b") + f(1, "c") + f(2, "b") + f(3, 2)),
    ),
    (
        "v1beta1",
        "preferred_answer",
        "PreferredAllocationResponse",
        (("a", "b"), ("c",)),
        f(1, f(1, "a") + f(1, "b")) + f(1, f(1, "c")),
    ),
    ("v1beta1", "pre_start_request", "PreStartContainerRequest", ("a", "b"), f(1, "a") + f(1, "b")),
]


@pytest.mark.parametrize(
    ("dialect", "method", "value", "data"),
    [(dialect, method, value, data) for dialect, method, _, value, data in ROWS],
    ids=[f"{dialect} {message}" for dialect, _, message, _, _ in ROWS],
)
def test_each_message_is_these_bytes(dialect: str, method: str, value: Any, data: bytes) -> None:
    assert _encode(by_name(dialect), method, value) == data
    assert getattr(by_name(dialect), f"decode_{method}")(data) == value


def test_pod_resources_are_these_bytes() -> None:
    listed = f(1, f(1, "n") + f(2, "s") + f(3, f(1, "c") + f(2, f(1, "r") + f(2, "a"))))
    allocatable = f(1, f(1, "r") + f(2, "a") + f(2, "b") + f(3, f(1, f(1, 1))))
    assert encode_get("s/n") == f(1, "n") + f(2, "s")
    [devices] = podresources.AllocatableResourcesResponse.FromString(allocatable).devices
    assert (devices.resource_name, [*devices.device_ids], [node.ID for node in devices.topology.nodes]) == (
        "r",
        ["a", "b"],
        [1],
    )
    [pod] = podresources.ListPodResourcesResponse.FromString(listed).pod_resources
    [got] = podresources.GetPodResourcesResponse.FromString(listed).ListFields()
    assert got[1] == pod
    assert (pod.name, pod.namespace, [container.name for container in pod.containers]) == ("n", "s", ["c"])
    assert [[*devices.device_ids] for devices in pod.containers[0].devices] == [["a"]]
