"""A look into the kubelet's records: real sockets, a pod-resources server of our own, real files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from adapters import checkpoint, podresources
from adapters.pb.podresources import v1_pb2 as pb
from devices.model import Device, Health
from gateway.kubelet import records as kubelet_records
from gateway.kubelet.records import Records

GPU = "nvidia.com/gpu"
DEVICES = [Device("a"), Device("b"), Device("ill", Health.UNHEALTHY)]
NOT_THERE = grpc.StatusCode.UNIMPLEMENTED, "unknown service"
OFF = grpc.StatusCode.UNKNOWN, "the API is off"
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
    monkeypatch.setattr(kubelet_records, "_DEADLINE", 0.2)
    with kubelet_records._decoding:
        assert await kubelet_records.holds(folder / "k.sock", GPU, DEVICES) is None
        assert (await kubelet_records.look(folder / "k.sock", folder / "checkpoint")).allocatable is None
    assert await kubelet_records.holds(folder / "k.sock", GPU, DEVICES)


def recorded(resource: str, *ids: str) -> bytes:
    devices = [pb.ContainerDevices(resource_name=resource, device_ids=[one]) for one in ids]
    return pb.AllocatableResourcesResponse(devices=devices).SerializeToString()


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
    ("answers", "file", "records"),
    [
        pytest.param({LIST: listed(p="a"), ALLOCATABLE: recorded(GPU, "a", "b")}, written(uid="a"), Records({GPU: BY_NAME}, {GPU: BY_UID}, {GPU: frozenset("ab")}, "pod-resources"), id="today's kubelet"),
        pytest.param({LIST: listed(p="a")}, written(uid="a", old="z"), Records({GPU: BY_NAME}, {GPU: BY_UID | {"z": "old/c"}}, source="pod-resources"), id="1.20, and a pod that ended or an init container"),
        pytest.param({ALPHA: listed(p="a")}, written(uid="a"), Records({GPU: BY_NAME}, {GPU: BY_UID}, source="pod-resources"), id="1.15: v1alpha1"),
        pytest.param({}, written(uid="a"), Records({GPU: BY_UID}, {GPU: BY_UID}, source="checkpoint"), id="1.14: the checkpoint alone"),
        pytest.param({LIST: OFF, ALPHA: listed(p="a")}, written(uid="a"), Records({GPU: BY_UID}, {GPU: BY_UID}, source="checkpoint"), id="v1 fails: v1alpha1 isn't asked"),
        pytest.param({LIST: b"\xff\xff"}, written(uid="a"), Records({GPU: BY_UID}, {GPU: BY_UID}, source="checkpoint"), id="no such message"),
        pytest.param({LIST: listed(p="a"), ALLOCATABLE: OFF}, b"", Records({GPU: BY_NAME}, None, source="pod-resources"), id="the file is about to be written"),
        pytest.param({LIST: listed(p="a")}, b" " * (checkpoint.MAX_BYTES + 1), Records({GPU: BY_NAME}, None, source="pod-resources"), id="the file is too large"),
        pytest.param({LIST: TOO_OFTEN}, b"", Records(), id="nothing can be known"),
        pytest.param({LIST: listed()}, written(), Records({}, {}, source="pod-resources"), id="nobody holds anything"),
    ],
)  # fmt: skip
async def test_a_look(
    folder: Path, kubelet: Kubelet, answers: Mapping[str, Answer], file: bytes, records: Records
) -> None:
    kubelet.answers = {method: [answer] for method, answer in answers.items()}
    (folder / "checkpoint").write_bytes(file)
    found = await kubelet_records.look(folder / "k.sock", folder / "checkpoint")
    assert replace(found, pods=None, file=None) == records
    assert found.pods == (None if found.source != "pod-resources" else frozenset({"ns/p"} if records.held else ()))


async def test_list_is_asked_again_when_everyone_asks_too_often(folder: Path, kubelet: Kubelet) -> None:
    kubelet.answers[LIST] = [TOO_OFTEN, TOO_OFTEN, listed(p="a")]
    assert (await kubelet_records.look(folder / "k.sock", folder / "none")).held == {GPU: BY_NAME}


def by_list(held: Mapping[str, str], written: Mapping[str, str] | None) -> Records:
    records = None if written is None else {GPU: written}
    return Records({GPU: held}, records, None, "pod-resources", frozenset())


def by_checkpoint(**written: str) -> Records:
    return Records({GPU: written}, {GPU: written}, None, "checkpoint")


@pytest.mark.parametrize(
    ("listed", "records", "held"),
    [
        pytest.param(by_list({"a": "ns/p/c"}, {"a": "uid/c"}), by_checkpoint(a="uid/c"), {"a": "ns/p/c"}, id="as then"),
        pytest.param(by_list({"a": "ns/p/c"}, {"a": "uid/c"}), by_checkpoint(a="new/c"), {"a": "new/c"}, id="another pod since"),
        pytest.param(by_list({}, {"a": "uid/c"}), by_checkpoint(a="uid/c"), {}, id="of a pod that had ended, or starts"),
        pytest.param(by_list({}, {}), by_checkpoint(a="uid/c"), {"a": "uid/c"}, id="given since"),
        pytest.param(by_list({"a": "ns/p/c"}, None), by_checkpoint(a="uid/c"), {"a": "uid/c"}, id="the checkpoint couldn't be read then"),
        pytest.param(None, by_checkpoint(a="uid/c"), {"a": "uid/c"}, id="there was no List"),
        pytest.param(by_list({"a": "ns/p/c"}, {"a": "uid/c"}), by_list({}, {"a": "uid/c"}), {}, id="there is one now"),
    ],
)  # fmt: skip
def test_without_a_list_the_last_one_counts(listed: Records | None, records: Records, held: Mapping[str, str]) -> None:
    named = records.named_as(listed)
    assert (named.held or {})[GPU] == held
    assert named.source == records.source


async def test_all_that_a_container_holds_has_one_text(folder: Path) -> None:
    """A file of 4 MB can name half a million devices, and two names of 253 characters that each of them repeats."""
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": GPU, "DeviceIDs": ["a", "b"]}
    (folder / "checkpoint").write_text(json.dumps({"PodDeviceEntries": [entry]}))
    held = (await kubelet_records.look(folder / "none.sock", folder / "checkpoint")).held
    assert held is not None
    assert held[GPU]["a"] is held[GPU]["b"]
