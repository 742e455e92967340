"""The pod-resources API: what its List says, and which part of it an emulated kubelet of each version has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from adapters import podresources
from adapters.dialect import MalformedError
from adapters.pb.podresources import v1_pb2 as pb
from adapters.podresources import Listed
from devices.model import ContainerAnswer, Device, Health
from gateway.kubelet import view as kubelet_view
from gateway.kubelet.drift import Drift
from gateway.kubelet.view import View
from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.checkpoint import FILE_NAME, CorruptError, Memory, decode, encode
from gateway_lab.kubelets.podresources import PodResources
from gateway_lab.kubelets.records import DeviceRecords

GPU = "example.com/gpu"
DEVICES = [Device("a", numa_nodes=(0, 1)), Device("b", numa_nodes=(1,)), Device("c"), Device("ill", Health.UNHEALTHY)]


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


# The emulated kubelet's.


@pytest.fixture
def node(folder: Path) -> Path:
    """A node's folder; the kubelet's own is ``device-plugins`` in it."""
    (folder / "device-plugins").mkdir()
    return folder


@asynccontextmanager
async def serving(version: str, directory: Path, *, ready: bool = True) -> AsyncIterator[Path]:
    """Serve the records of a kubelet: pod ``p`` holds a (and its init container b), pod ``ended`` c."""
    kubelet = behaviour(version)
    records = DeviceRecords(kubelet)
    records.ready = ready
    records.enter_list(GPU, {}, DEVICES)
    for pod, name, ids, init in (("p", "first", "b", True), ("p", "main", "a", False), ("ended", "main", "c", False)):
        records.activate(pod, name, {GPU: 1}, init=init)
        records.allot(pod, name, GPU, ids, ContainerAnswer())
    (directory / FILE_NAME).write_bytes(encode(records.memory(), kubelet))
    records.deactivate("ended")
    server = PodResources(kubelet, directory, records, lambda _line: None)
    await server.start()
    yield server.socket_path
    await server.stop()


UIDS = {"a": "p/main", "b": "p/first", "c": "ended/main"}
BOTH = {GPU: {"a": "default/p/main"}}
REST = {GPU: {"b": "p/first", "c": "ended/main"}}
WELL = {GPU: frozenset("abc")}
PODS = frozenset({"default/p"})


@pytest.mark.parametrize(
    ("version", "view"),
    [
        ("1.8", View({GPU: UIDS}, {}, source="checkpoint", written={GPU: UIDS})),
        ("1.14", View({GPU: UIDS}, {}, source="checkpoint", written={GPU: UIDS}, registered=WELL)),
        ("1.15", View(BOTH, REST, None, "pod-resources", PODS, {GPU: UIDS}, WELL)),
        ("1.20", View(BOTH, REST, None, "pod-resources", PODS, {GPU: UIDS}, WELL)),
        ("1.22", View(BOTH, REST, None, "pod-resources", PODS, {GPU: UIDS}, WELL)),
        ("1.23", View(BOTH, REST, WELL, "pod-resources", PODS, {GPU: UIDS}, WELL)),
        ("1.37", View(BOTH, REST, WELL, "pod-resources", PODS, {GPU: UIDS}, WELL)),
    ],
)
async def test_a_look_at_each_kubelet(node: Path, version: str, view: View) -> None:
    directory = node / "device-plugins"
    async with serving(version, directory) as socket:
        assert socket == node / "pod-resources" / "kubelet.sock"
        assert replace(await kubelet_view.look(socket, directory / FILE_NAME), file=None) == view
        holds = await kubelet_view.holds(socket, GPU, DEVICES)
        assert holds is (True if view.allocatable is not None else None)
    assert not socket.exists()


async def test_until_all_pods_are_known_none_has_ended(node: Path) -> None:
    """A kubelet that hasn't heard of all its pods frees nothing: what List leaves out is still held."""
    async with serving("1.37", node / "device-plugins", ready=False) as socket:
        assert (await kubelet_view.look(socket, node / "device-plugins" / FILE_NAME)).holders(GPU).keys() == set("abc")


@pytest.fixture
def shared(node: Path) -> Path:
    node.chmod(0o1777)
    return node


async def test_in_a_folder_that_everyone_shares_there_is_none(shared: Path) -> None:
    async with serving("1.37", shared / "device-plugins") as socket:
        assert not socket.parent.exists()


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ("1.8", "1.9", "ab"),
        ("1.9", "1.10", ""),
        ("1.10", "1.11", "ab"),
        ("1.11", "1.16", ""),
        ("1.18", "1.20", ""),
        ("1.18", "1.32", "ab"),
        ("1.28", "1.37", ""),
        ("1.37", "1.20", ""),
        ("1.25", "1.18", "ab"),
    ],
)
async def test_the_upgrades_that_lose_pods_are_noticed(tmp_path: Path, old: str, new: str, lost: str) -> None:
    """By the checkpoint alone: what the old kubelet wrote, and what the new one could read of it and wrote again."""
    file, none = tmp_path / FILE_NAME, tmp_path / "none.sock"
    records = DeviceRecords(behaviour(old))
    records.enter_list(GPU, {}, DEVICES)
    records.allot("p", "main", GPU, "ab", ContainerAnswer({"GPUS": "a,b"}))
    file.write_bytes(encode(records.memory(), behaviour(old)))
    drift = Drift(GPU).listed(DEVICES, 0).look(await kubelet_view.look(none, file), 9).restarted(10)
    try:
        memory = decode(file.read_bytes(), behaviour(new))
    except CorruptError:
        memory = Memory()
    file.write_bytes(encode(memory, behaviour(new)))
    assert "".join(sorted(drift.look(await kubelet_view.look(none, file), 11).forgotten)) == lost
