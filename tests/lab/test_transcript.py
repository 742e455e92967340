from __future__ import annotations

from typing import Literal

import pytest
from google.protobuf.message import Message

from adapters.pb.v1alpha import v0_1_pb2, v1alpha2_pb2
from adapters.pb.v1beta1 import v1beta1_pb2 as pb
from gateway_lab.wire.calls import Call, Reader
from gateway_lab.wire.tap import Connection
from gateway_lab.wire.transcript import diff, transcript


def connection(endpoint: str, *calls: Call) -> Connection:
    kind: Literal["registration", "plugin"] = "registration" if endpoint == "kubelet.sock" else "plugin"
    reader = Reader()
    reader.calls = list(calls)
    return Connection(kind, endpoint, reader)


def call(path: str, request: Message | bytes, *answers: Message | bytes, end: str = "OK", details: str = "") -> Call:
    raw = [one if isinstance(one, bytes) else one.SerializeToString() for one in (request, *answers)]
    return Call(path, {}, raw[:1], raw[1:], end, details)


def register(endpoint: str, version: str = "v1beta1", details: str = "") -> Connection:
    service = "v1beta1" if version == "v1beta1" else "deviceplugin"
    request = pb.RegisterRequest(version=version, endpoint=endpoint, resource_name="nvidia.com/gpu")
    return connection("kubelet.sock", call(f"/{service}.Registration/Register", request, pb.Empty(), details=details))


def listed(*ids: str) -> Call:
    devices = [pb.Device(ID=device_id, health="Healthy") for device_id in ids]
    return call("/v1beta1.DevicePlugin/ListAndWatch", pb.Empty(), pb.ListAndWatchResponse(devices=devices))


def allocated(*ids: str) -> Call:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devicesIDs=ids)])
    return call("/v1beta1.DevicePlugin/Allocate", request, pb.AllocateResponse())


def alpha(ids: list[str], answer: Message) -> Call:
    return call("/deviceplugin.DevicePlugin/Allocate", v0_1_pb2.AllocateRequest(devicesIDs=ids), answer)


def specs(*ids: str) -> Message:
    """What a plugin answers to 1.8: a spec for each ID, everything in the first."""
    answer = v0_1_pb2.AllocateResponse(spec=[v0_1_pb2.DeviceRuntimeSpec(ID=device_id) for device_id in ids])
    answer.spec[0].envs["IDS"] = "all"
    return answer


BASE = [register("token-1.sock"), connection("token-1.sock", listed("G0", "G1"), allocated("G0", "G1"))]
UNKNOWN = b"\xfa\x3e\x01x"
"""Field 1007, one byte, 'x'."""


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            [register("x.sock"), connection("x.sock", listed("G0", "G1"), allocated("G0", "G1"))], id="tokens"
        ),
        pytest.param([BASE[0], connection("token-1.sock", listed("G1", "G0"), allocated("G1", "G0"))], id="sets"),
        pytest.param([connection("kubelet.sock"), BASE[0], connection("token-1.sock"), BASE[1]], id="plain looks"),
    ],
)
def test_what_chance_decides_is_no_difference(other: list[Connection]) -> None:
    assert not diff(transcript(BASE), transcript(other))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([BASE[1], BASE[0]], id="connections reordered"),
        pytest.param([*BASE, BASE[0]], id="a second Register"),
        pytest.param(
            [BASE[0], connection("token-1.sock", allocated("G0", "G1"), listed("G0", "G1"))], id="calls reordered"
        ),
        pytest.param([BASE[0], connection("other.sock", *BASE[1].calls)], id="another socket"),
        pytest.param([BASE[0], connection("token-1.sock", listed("G0"), allocated("G0", "G1"))], id="a device less"),
        pytest.param([BASE[0], connection("token-1.sock", listed("G0", "G1"), allocated("G0"))], id="an ID less"),
        pytest.param([register("token-1.sock", details="why"), BASE[1]], id="another text"),
        pytest.param([register("token-1.sock", version="v1alpha2"), BASE[1]], id="another version"),
    ],
)
def test_what_a_side_decides_is_a_difference(other: list[Connection]) -> None:
    assert diff(transcript(BASE), transcript(other))


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        # 0.1 repeats the request's IDs, whose order is chance; what the first spec holds is not.
        (alpha(["G0", "G1"], specs("G0", "G1")), alpha(["G1", "G0"], specs("G1", "G0")), True),
        (alpha(["G0", "G1"], specs("G0", "G1")), alpha(["G0", "G1"], specs("G0")), False),
        (alpha(["G0"], specs("G0")), alpha(["G0"], specs("G1")), False),
    ],
)
def test_the_specs_of_0_1(ours: Call, theirs: Call, *, same: bool) -> None:
    one, other = (
        transcript([register("t.sock", version="0.1"), connection("t.sock", allocate)]) for allocate in (ours, theirs)
    )
    assert (not diff(one, other)) is same


@pytest.mark.parametrize(
    ("version", "answer", "line"),
    [
        ("0.1", v0_1_pb2.AllocateResponse(spec=[v0_1_pb2.DeviceRuntimeSpec(ID="G0")]), '{"spec": [{"ID": "G0"}]}'),
        ("v1alpha2", v1alpha2_pb2.AllocateResponse(envs={"A": "1"}), '{"envs": {"A": "1"}}'),
    ],
)
def test_the_alpha_dialects_are_told_apart_by_what_was_registered(version: str, answer: Message, line: str) -> None:
    written = transcript([register("t.sock", version=version), connection("t.sock", alpha(["G0"], answer))])
    assert written[-1] == f"    < AllocateResponse {line}"


@pytest.mark.parametrize(
    ("strange", "line"),
    [
        (
            call("/v1beta1.DevicePlugin/ListAndWatch", UNKNOWN),
            """    > Empty {"(unknown)": ["field 1007, wire type 2: b'x'"]}""",
        ),
        (
            call("/v1beta1.DevicePlugin/Allocate", b"\x0a\x04" + UNKNOWN),
            """    > AllocateRequest {"container_requests": [{"(unknown)": ["field 1007, wire type 2: b'x'"]}]}""",
        ),
        (call("/v1beta1.DevicePlugin/Allocate", b"\xff"), "    > 1 bytes that are no AllocateRequest: ff"),
        (call("/v1beta1.DevicePlugin/Later", b"\x01"), "    > 1 bytes of an unknown call: 01"),
        (call("/v2.DevicePlugin/Allocate", b"\x01"), "    > 1 bytes of an unknown call: 01"),
    ],
)
def test_what_no_dialect_knows_is_shown(strange: Call, line: str) -> None:
    assert transcript([connection("t.sock", strange)])[-1] == line


def test_a_transcript_names_no_path_of_its_machine() -> None:
    failed = call("/v1beta1.Registration/Register", b"", end="UNKNOWN", details="dial /tmp/node/devices/t.sock: no")
    written = transcript([register("t.sock"), connection("kubelet.sock", failed)], {"/tmp/node": "<node>"})
    assert written[-2] == "  call 1, /v1beta1.Registration/Register: UNKNOWN: dial <node>/devices/<socket 1>: no"


def test_a_difference_is_shown_with_its_surroundings() -> None:
    other = [BASE[0], connection("token-1.sock", listed("G0", "G1"), allocated("G0"))]
    shown = diff(transcript(BASE), transcript(other))
    assert '-    > AllocateRequest {"container_requests": [{"devicesIDs": ["G0", "G1"]}]}' in shown
    assert '+    > AllocateRequest {"container_requests": [{"devicesIDs": ["G0"]}]}' in shown
    assert "   call 2, /v1beta1.DevicePlugin/Allocate: OK" in shown
