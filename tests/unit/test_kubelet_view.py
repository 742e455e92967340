"""A look into the kubelet's records: real sockets, a pod-resources server of our own, real files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from adapters import checkpoint, podresources
from adapters.dialect import MalformedError
from adapters.pb.podresources import v1_pb2 as pb
from devices.model import Device, Health
from gateway.kubelet import view as kubelet_view
from gateway.kubelet.view import View

GPU = "nvidia.com/gpu"
DEVICES = [Device("a"), Device("b"), Device("ill", Health.UNHEALTHY)]
NOT_THERE = grpc.StatusCode.UNIMPLEMENTED, "unknown service"
OFF = grpc.StatusCode.UNKNOWN, "the API is off"
NO_SUCH_POD = grpc.StatusCode.UNKNOWN, "pod p in namespace ns not found"
TOO_OFTEN = grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"

Answer = bytes | tuple[grpc.StatusCode, str]


class Kubelet(grpc.GenericRpcHandler):
    """A pod-resources server that gives each method's answers one after the other, the last one for ever."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        answers = self.answers.get(handler_call_details.method, [NOT_THERE])

        async def answer(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            found = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(found, tuple):
                await context.abort(*found)
            return found

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
async def kubelet(folder: Path) -> AsyncIterator[Kubelet]:
    kubelet = Kubelet()
    server = grpc.aio.server(handlers=[kubelet], options=[("grpc.max_send_message_length", -1)])
    server.add_insecure_port(f"unix:{folder / 'k.sock'}")
    await server.start()
    yield kubelet
    await server.stop(grace=0)


async def test_one_answer_is_decoded_at_a_time(kubelet: Kubelet, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is no longer waited for would go on beside the next."""
    kubelet.answers[podresources.GET_ALLOCATABLE] = [recorded(GPU, "a", "b")]
    monkeypatch.setattr(kubelet_view, "_DEADLINE", 0.2)
    with kubelet_view._decoding:
        assert await kubelet_view.holds(folder / "k.sock", GPU, DEVICES) is None
        assert (await kubelet_view.look(folder / "k.sock", folder / "checkpoint")).allocatable is None
    assert await kubelet_view.holds(folder / "k.sock", GPU, DEVICES)


def recorded(resource: str, *ids: str) -> bytes:
    devices = [pb.ContainerDevices(resource_name=resource, device_ids=[one]) for one in ids]
    return pb.AllocatableResourcesResponse(devices=devices).SerializeToString()


@pytest.mark.parametrize(
    ("answers", "held"),
    [
        pytest.param([recorded(GPU, "a", "b")], True, id="just the healthy ones"),
        pytest.param([recorded(GPU, "a")], False, id="one is missing"),
        pytest.param([recorded(GPU, "a", "b", "ill")], False, id="an ill one would be given out"),
        pytest.param([recorded("amd.com/gpu", "a", "b")], False, id="another resource's"),
        pytest.param([recorded(GPU)], False, id="the endpoint is stopped"),
        pytest.param([recorded(GPU), recorded(GPU, "a", "b")], True, id="recorded a moment later"),
        pytest.param([TOO_OFTEN, TOO_OFTEN, recorded(GPU, "a", "b")], True, id="asked too often: asked again"),
        pytest.param([TOO_OFTEN], None, id="asked too often by everyone: nothing is claimed"),
        pytest.param([OFF], None, id="the API is off: nothing is claimed"),
        pytest.param([b"\xff\xff"], None, id="no such message: nothing is claimed"),
        pytest.param([recorded(GPU, "x" * (17 << 20))], None, id="too large: nothing is claimed"),
    ],
)
async def test_what_the_kubelet_holds(folder: Path, kubelet: Kubelet, answers: list[Answer], held: bool | None) -> None:
    kubelet.answers[podresources.GET_ALLOCATABLE] = answers
    assert await kubelet_view.holds(folder / "k.sock", GPU, DEVICES) is held


async def test_no_kubelet_to_ask(tmp_path: Path) -> None:
    assert await kubelet_view.holds(tmp_path / "none.sock", GPU, DEVICES) is None
    assert await kubelet_view.look(tmp_path / "none.sock", tmp_path / "none") == View(unwritten=True)
    (tmp_path / "file").touch()
    unknown = await kubelet_view.look(tmp_path / "none.sock", tmp_path / "file" / "none")
    assert not unknown.unwritten, "whether there is one can't be known"


def listed(**held: str) -> bytes:
    """Who holds what: pods by name, each with one container and the devices it holds, a letter each."""
    pods = [
        pb.PodResources(
            namespace="ns",
            name=pod,
            containers=[
                pb.ContainerResources(name="c", devices=[pb.ContainerDevices(resource_name=GPU, device_ids=ids)])
            ],
        )
        for pod, ids in held.items()
    ]
    return pb.ListPodResourcesResponse(pod_resources=pods).SerializeToString()


def written(**held: str) -> bytes:
    entries = [
        {"PodUID": pod, "ContainerName": "c", "ResourceName": GPU, "DeviceIDs": {"-1": [*ids]}, "AllocResp": ""}
        for pod, ids in held.items()
    ]
    return json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 0}).encode()


LIST, ALPHA, ALLOCATABLE = podresources.LIST, podresources.LIST_V1ALPHA1, podresources.GET_ALLOCATABLE
BY_NAME, BY_UID = {"a": "ns/p/c"}, {"a": "uid/c"}


@pytest.mark.parametrize(
    ("answers", "file", "view"),
    [
        pytest.param({LIST: listed(p="a"), ALLOCATABLE: recorded(GPU, "a", "b")}, written(uid="a"), View({GPU: BY_NAME}, {GPU: {}}, {GPU: frozenset("ab")}, "pod-resources"), id="today's kubelet"),
        pytest.param({LIST: listed(p="a")}, written(uid="a", old="z"), View({GPU: BY_NAME}, {GPU: {"z": "old/c"}}, source="pod-resources"), id="1.20, and a pod that ended or an init container"),
        pytest.param({ALPHA: listed(p="a")}, written(uid="a"), View({GPU: BY_NAME}, {GPU: {}}, source="pod-resources"), id="1.15: v1alpha1"),
        pytest.param({}, written(uid="a"), View({GPU: BY_UID}, {}, source="checkpoint"), id="1.14: the checkpoint alone"),
        pytest.param({LIST: OFF, ALPHA: listed(p="a")}, written(uid="a"), View({GPU: BY_UID}, {}, source="checkpoint"), id="v1 fails: v1alpha1 isn't asked"),
        pytest.param({LIST: b"\xff\xff"}, written(uid="a"), View({GPU: BY_UID}, {}, source="checkpoint"), id="no such message"),
        pytest.param({LIST: listed(p="a"), ALLOCATABLE: OFF}, b"", View({GPU: BY_NAME}, None, source="pod-resources"), id="the file is about to be written"),
        pytest.param({LIST: listed(p="a")}, b" " * (checkpoint.MAX_BYTES + 1), View({GPU: BY_NAME}, None, source="pod-resources"), id="the file is too large"),
        pytest.param({LIST: TOO_OFTEN}, b"", View(), id="nothing can be known"),
        pytest.param({LIST: listed()}, written(), View({}, {}, source="pod-resources"), id="nobody holds anything"),
    ],
)  # fmt: skip
async def test_a_look(folder: Path, kubelet: Kubelet, answers: Mapping[str, Answer], file: bytes, view: View) -> None:
    kubelet.answers = {method: [answer] for method, answer in answers.items()}
    (folder / "checkpoint").write_bytes(file)
    found = await kubelet_view.look(folder / "k.sock", folder / "checkpoint")
    assert replace(found, pods=None, written=None, file=None) == view
    assert found.pods == (None if found.source != "pod-resources" else frozenset({"ns/p"} if view.held else ()))


@pytest.mark.parametrize(
    ("answers", "held"),
    [
        pytest.param([listed(p="a")], {GPU: BY_NAME}, id="one pod"),
        pytest.param([listed(p="a"), listed(q="b")], {GPU: {"a": "ns/p/c", "b": "ns/q/c"}}, id="two"),
        pytest.param([NO_SUCH_POD, listed(q="b")], {GPU: {"b": "ns/q/c"}}, id="one is gone"),
        pytest.param([NO_SUCH_POD], {}, id="both are"),
        pytest.param([TOO_OFTEN, listed(p="a"), NO_SUCH_POD], {GPU: BY_NAME}, id="too often"),
        pytest.param([listed(p="a"), OFF], None, id="of one it isn't said"),
        pytest.param([OFF], None, id="1.27 to 1.33: behind a gate"),
        pytest.param([NOT_THERE], None, id="before 1.27"),
        pytest.param([b"\xff\xff"], None, id="no such message"),
    ],
)
async def test_what_some_pods_hold_now(
    folder: Path, kubelet: Kubelet, answers: list[Answer], held: Mapping[str, Mapping[str, str]] | None
) -> None:
    kubelet.answers = {podresources.GET: answers}
    assert await kubelet_view.held_by(folder / "k.sock", ["ns/p", "ns/q"]) == held
    assert await kubelet_view.held(folder / "k.sock") is None


@pytest.mark.parametrize(
    ("answers", "file", "names"),
    [
        pytest.param({LIST: listed(p="a")}, written(uid="a"), ("ns/p/c", "uid/c"), id="by both"),
        pytest.param({LIST: listed(p="a")}, b"", ("ns/p/c",), id="by List"),
        pytest.param({LIST: listed(p="")}, written(uid="a"), ("uid/c",), id="by the checkpoint"),
        pytest.param({}, written(uid="a"), ("uid/c",), id="where there is no List"),
        pytest.param({LIST: listed(p="")}, b"", (), id="by none"),
    ],
)
async def test_all_names_of_a_holder(
    folder: Path, kubelet: Kubelet, answers: Mapping[str, Answer], file: bytes, names: tuple[str, ...]
) -> None:
    """Also of a pod without devices: that it is there counts."""
    kubelet.answers = {method: [answer] for method, answer in answers.items()}
    (folder / "checkpoint").write_bytes(file)
    found = await kubelet_view.look(folder / "k.sock", folder / "checkpoint")
    assert found.names_of(GPU, "a") == names
    assert found.pods == ({"ns/p"} if answers else None)


async def test_list_is_asked_again_when_everyone_asks_too_often(folder: Path, kubelet: Kubelet) -> None:
    kubelet.answers[LIST] = [TOO_OFTEN, TOO_OFTEN, listed(p="a")]
    assert (await kubelet_view.look(folder / "k.sock", folder / "none")).held == {GPU: BY_NAME}


def test_who_must_not_err_takes_both() -> None:
    view = View({GPU: {"a": "ns/p/c"}}, {GPU: {"a": "uid/c", "z": "old/c"}})
    assert view.holders(GPU) == {"a": "ns/p/c", "z": "old/c"}
    assert not View().holders(GPU)


def by_list(held: Mapping[str, str], written: Mapping[str, str] | None) -> View:
    records = None if written is None else {GPU: written}
    return View({GPU: held}, {}, None, "pod-resources", frozenset(), records)


def by_checkpoint(**written: str) -> View:
    return View({GPU: written}, {}, None, "checkpoint", written={GPU: written})


@pytest.mark.parametrize(
    ("listed", "view", "held", "remembered"),
    [
        pytest.param(by_list({"a": "ns/p/c"}, {"a": "uid/c"}), by_checkpoint(a="uid/c"), {"a": "ns/p/c"}, {}, id="as then"),
        pytest.param(by_list({"a": "ns/p/c"}, {"a": "uid/c"}), by_checkpoint(a="new/c"), {"a": "new/c"}, {}, id="another pod since"),
        pytest.param(by_list({}, {"a": "uid/c"}), by_checkpoint(a="uid/c"), {}, {"a": "uid/c"}, id="of a pod that had ended, or starts"),
        pytest.param(by_list({}, {}), by_checkpoint(a="uid/c"), {"a": "uid/c"}, {}, id="given since"),
        pytest.param(by_list({"a": "ns/p/c"}, None), by_checkpoint(a="uid/c"), {"a": "uid/c"}, {}, id="the checkpoint couldn't be read then"),
        pytest.param(None, by_checkpoint(a="uid/c"), {"a": "uid/c"}, {}, id="there was no List"),
        pytest.param(by_list({"a": "ns/p/c"}, {"a": "uid/c"}), by_list({}, {"a": "uid/c"}), {}, {}, id="there is one now"),
    ],
)  # fmt: skip
def test_without_a_list_the_last_one_counts(
    listed: View | None, view: View, held: Mapping[str, str], remembered: Mapping[str, str]
) -> None:
    named = view.named_as(listed)
    assert ((named.held or {})[GPU], (named.remembered or {}).get(GPU, {})) == (held, remembered)
    assert named.source == view.source


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
async def test_only_a_file_is_read(folder: Path, kind: str) -> None:
    (folder / "real").write_bytes(written(uid="a"))
    path = folder / "checkpoint"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(folder / "real")
        case _:
            path.mkdir()
    assert await kubelet_view.look(folder / "none.sock", path) == View()


async def test_all_that_a_container_holds_has_one_text(folder: Path) -> None:
    """A file of 4 MB can name half a million devices, and two names of 253 characters that each of them repeats."""
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": GPU, "DeviceIDs": ["a", "b"]}
    (folder / "checkpoint").write_text(json.dumps({"PodDeviceEntries": [entry]}))
    held = (await kubelet_view.look(folder / "none.sock", folder / "checkpoint")).held
    assert held is not None
    assert held[GPU]["a"] is held[GPU]["b"]


async def test_of_a_file_that_is_too_large_no_more_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def refuse(data: bytes) -> None:
        read.append(data)
        raise MalformedError("too large")

    monkeypatch.setattr(checkpoint, "read", refuse)
    monkeypatch.setattr(checkpoint, "MAX_BYTES", 10)
    (folder / "checkpoint").write_bytes(written(uid="a"))
    assert await kubelet_view.look(folder / "none.sock", folder / "checkpoint") == View()
    assert [len(data) for data in read] == [11]


@pytest.mark.parametrize(
    ("whole_after", "age", "reads", "known"),
    [
        pytest.param(2, 0, 3, True, id="read again until it is whole"),
        pytest.param(99, 0, 10, False, id="and no longer than its kubelet may take"),
        pytest.param(1, 3600, 1, False, id="one that was damaged long ago stays so"),
    ],
)
async def test_a_checkpoint_that_is_being_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, whole_after: int, age: int, reads: int, known: bool
) -> None:
    """Kubelets 1.8 and 1.9 write it in place: who reads it meanwhile finds nothing, or a part."""
    file, whole, found = folder / "checkpoint", written(a="pod/main"), list[bytes]()

    def read(data: bytes) -> checkpoint.Checkpoint:
        found.append(data)
        if len(found) == whole_after:
            file.write_bytes(whole)
        return real(data)

    real = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", read)
    file.write_bytes(whole[: len(whole) // 2])
    os.utime(file, (time.time() - age,) * 2)
    view = await kubelet_view.look(folder / "nobody.sock", file)
    assert (len(found), view.held is not None) == (reads, known)
