"""What a dialect spells comes back as exactly what its declarations leave of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message_factory import GetMessageClass
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import fields, replace

from adapters.dialect import Dialect, Fidelity, Level, MalformedError, UnsayableError, Wire
from adapters.pb.podresources import v1_pb2  # noqa: F401 - it must be there when another v1 comes
from adapters.pb.v1beta1 import v1beta1_pb2
from adapters.registry import DIALECTS, by_name
from adapters.v1beta1 import RULES, Beta
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    DeviceNode,
    Field,
    Health,
    Mount,
    Options,
    Registration,
)
from tests.unit import strategies as model

NEWEST = Level(37, 37)


def _generated_anew(package: str, shift: int = 0) -> Any:
    """v1beta1's messages as another package's, as protoc would generate them; their fields have numbers higher by ``shift``."""
    proto = FileDescriptorProto.FromString(v1beta1_pb2.DESCRIPTOR.serialized_pb)
    proto.name = f"tests/{package}.proto"
    fully = f".{proto.package}.", f".{package}."
    proto.package = package
    for message in proto.message_type:
        for field in message.field:
            field.number += shift
        for field in [*message.field, *(one for nested in message.nested_type for one in nested.field)]:
            if field.type_name:
                field.type_name = field.type_name.replace(*fully)
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(*fully)
            method.output_type = method.output_type.replace(*fully)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(proto.SerializeToString())
    classes = {
        name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in (m.name for m in proto.message_type)
    }
    return SimpleNamespace(**classes, DESCRIPTOR=pool.FindFileByName(proto.name))


FUTURE: Dialect = Beta("v1", Level(40), _generated_anew("v1"), RULES)
"""A version that nobody has written yet, made by one line, in the process that knows pod-resources ``v1``."""
SHIFTED: Dialect = Beta("v2", Level(41), _generated_anew("v2", shift=100), RULES)
"""One whose messages have other numbers than v1beta1's."""
# Each property runs for each message and dialect or pair of them, so few examples each are many; and a busy machine is
# no failure.
few = settings(max_examples=30, deadline=None)
at_all = settings(max_examples=300, deadline=None, phases=[Phase.generate], database=None)
Left = Callable[[Any], Any]


@dataclass(frozen=True)
class Message:
    """One message of the API: how to draw, spell and read it, and what remains of it without a field that it uses."""

    name: str
    values: st.SearchStrategy[Any]
    encode: Callable[[Dialect, Any], Wire]
    decode: Callable[[Dialect, bytes], Any]
    fields: dict[Field, tuple[Callable[[Any], bool], Left]]


def _each(**nothing: Any) -> Left:
    return lambda values: tuple(replace(value, **nothing) for value in values)


def _any(name: str) -> Callable[[Any], bool]:
    return lambda values: any(getattr(value, name) for value in values)


def _never(value: Any) -> Any:
    raise AssertionError(f"no dialect drops this silently: {value}")


def _answer(dialect: Dialect, answers: tuple[ContainerAnswer, ...]) -> Wire:
    return dialect.encode_allocate_answer([ContainerRequest(("a", "b"))] * len(answers), answers, NEWEST)


def _of_options(
    call: Field, read: Callable[[Any], Options], left: Left
) -> dict[Field, tuple[Callable[[Any], bool], Left]]:
    return {
        call: (lambda value: read(value) != Options(), left),
        Field.PREFERRED_ALLOCATION: (lambda value: read(value).preferred_allocation, left),
        Field.PRE_START: (lambda value: read(value).pre_start_required, _never),
    }


MESSAGES = [
    Message(
        "Register",
        model.registrations,
        lambda dialect, value: dialect.encode_register(value),
        lambda dialect, data: dialect.decode_register(data),
        _of_options(Field.OPTIONS, lambda value: value.options, lambda value: replace(value, options=Options())),
    ),
    Message(
        "options",
        model.options,
        lambda dialect, value: dialect.encode_options(value),
        lambda dialect, data: dialect.decode_options(data),
        _of_options(Field.GET_OPTIONS, lambda value: value, lambda _: Options()),
    ),
    Message(
        "list",
        model.lists,
        lambda dialect, value: dialect.encode_list(value),
        lambda dialect, data: dialect.decode_list(data),
        {Field.TOPOLOGY: (_any("numa_nodes"), _each(numa_nodes=()))},
    ),
    Message(
        "Allocate request",
        model.containers(model.requests),
        lambda dialect, value: dialect.encode_allocate_request(value),
        lambda dialect, data: dialect.decode_allocate_request(data),
        {Field.SEVERAL_CONTAINERS: (lambda value: len(value) != 1, _never)},
    ),
    Message(
        "Allocate answer",
        model.containers(model.answers, at_least=1),
        _answer,
        lambda dialect, data: dialect.decode_allocate_answer(data),
        {
            Field.SEVERAL_CONTAINERS: (lambda value: len(value) != 1, _never),
            Field.ENVS: (_any("envs"), _each(envs={})),
            Field.MOUNTS: (_any("mounts"), _each(mounts=())),
            Field.DEVICE_NODES: (_any("device_nodes"), _each(device_nodes=())),
            Field.ANNOTATIONS: (_any("annotations"), _each(annotations={})),
            Field.CDI_DEVICES: (_any("cdi_devices"), _never),
        },
    ),
    Message(
        "preferred request",
        model.containers(model.preferred_requests),
        lambda dialect, value: dialect.encode_preferred_request(value),
        lambda dialect, data: dialect.decode_preferred_request(data),
        {Field.PREFERRED_ALLOCATION: (bool, lambda _: ())},
    ),
    Message(
        "preferred answer",
        model.containers(model.ids),
        lambda dialect, value: dialect.encode_preferred_answer(value),
        lambda dialect, data: dialect.decode_preferred_answer(data),
        {Field.PREFERRED_ALLOCATION: (bool, lambda _: ())},
    ),
    Message(
        "PreStartContainer",
        model.ids,
        lambda dialect, value: dialect.encode_pre_start_request(value),
        lambda dialect, data: dialect.decode_pre_start_request(data),
        {Field.PRE_START: (lambda _: True, _never)},
    ),
]


NEVER_ON_THE_WIRE = {(Device, "part_of"), (Device, "pci")}
"""What only the gateway itself asks a device."""


@pytest.mark.parametrize(
    ("message", "field"),
    [pytest.param(one, field, id=f"{one.name}: {field.value}") for one in MESSAGES for field in one.fields],
)
def test_each_field_is_drawn(message: Message, field: Field) -> None:
    """Or the properties below hold for nothing."""
    find(message.values, message.fields[field][0], settings=at_all)


def test_each_field_is_one_of_a_message_here() -> None:
    assert {field for message in MESSAGES for field in message.fields} == set(Field)


@pytest.mark.parametrize(
    ("kind", "values", "name"),
    [
        pytest.param(kind, values, one.name, id=f"{kind.__name__}.{one.name}")
        for kind, values in model.STRUCTS.items()
        for one in fields(kind)
        if (kind, one.name) not in NEVER_ON_THE_WIRE
    ],
)
def test_each_part_of_the_model_is_drawn(kind: type[Struct], values: st.SearchStrategy[Any], name: str) -> None:
    first = find(values, lambda _: True, settings=at_all)
    find(values, lambda value: getattr(value, name) != getattr(first, name), settings=at_all)


def _used(message: Message, dialect: Dialect, value: Any, verdict: Fidelity) -> set[Field]:
    """Name the fields in ``value`` that ``dialect`` declares as ``verdict``, for the newest kubelet that speaks it."""
    return {
        field for field, (uses, _) in message.fields.items() if dialect.rules[field].verdict is verdict and uses(value)
    }


def test_a_version_of_the_future_has_services_of_its_own() -> None:
    assert (FUTURE.registration_service, FUTURE.plugin_service) == ("v1.Registration", "v1.DevicePlugin")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
@few
@given(data=st.data())
def test_a_version_of_the_future_is_spelled_by_its_own_messages_alone(message: Message, data: st.DataObject) -> None:
    value = data.draw(message.values)
    known = by_name("v1beta1")
    own, as_known = message.encode(SHIFTED, value).data, message.encode(known, value).data
    assert message.decode(SHIFTED, own) == message.decode(known, as_known)
    assert (own == as_known) == (as_known == b"")


@pytest.mark.parametrize("dialect", [*DIALECTS, FUTURE], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
@few
@given(data=st.data())
def test_what_is_read_back_is_what_the_dialect_declares(
    message: Message, dialect: Dialect, data: st.DataObject
) -> None:
    value = data.draw(message.values)
    if impossible := _used(message, dialect, value, Fidelity.IMPOSSIBLE):
        with pytest.raises(UnsayableError) as refused:
            message.encode(dialect, value)
        assert refused.value.field in impossible
        assert dialect.name in refused.value.dialect
        return
    lost = _used(message, dialect, value, Fidelity.DEGRADED)
    wire = message.encode(dialect, value)
    assert wire.lost == lost
    read = message.decode(dialect, wire.data)
    assert read == reduce(lambda left, field: message.fields[field][1](left), lost, value)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
@few
@given(data=st.data())
def test_fields_of_the_future_are_ignored(message: Message, dialect: Dialect, data: st.DataObject) -> None:
    value = data.draw(message.values)
    try:
        wire = message.encode(dialect, value)
    except UnsayableError:
        return
    unknown = b"\xf2\x3f\x01x"  # field 1022, a string
    assert message.decode(dialect, wire.data + unknown) == message.decode(dialect, wire.data)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
@few
@given(data=st.binary(max_size=64))
def test_bytes_are_a_message_or_malformed(message: Message, dialect: Dialect, data: bytes) -> None:
    with contextlib.suppress(MalformedError):
        message.decode(dialect, data)


@pytest.mark.parametrize(
    ("name", "decode", "expected"),
    [
        ("v1beta1", "decode_register", "RegisterRequest"),
        ("v1beta1", "decode_options", "DevicePluginOptions"),
        ("v1beta1", "decode_list", "ListAndWatchResponse"),
        ("v1beta1", "decode_allocate_request", "AllocateRequest"),
        ("v1beta1", "decode_allocate_answer", "AllocateResponse"),
        ("v1beta1", "decode_preferred_request", "PreferredAllocationRequest"),
        ("v1beta1", "decode_preferred_answer", "PreferredAllocationResponse"),
        ("v1beta1", "decode_pre_start_request", "PreStartContainerRequest"),
        ("v1alpha2", "decode_register", "RegisterRequest"),
        ("v1alpha2", "decode_list", "ListAndWatchResponse"),
        ("v1alpha2", "decode_allocate_request", "AllocateRequest"),
        ("v1alpha2", "decode_allocate_answer", "AllocateResponse"),
        ("v1alpha2", "decode_pre_start_request", ""),
        ("0.1", "decode_list", "ListAndWatchResponse"),
        ("0.1", "decode_allocate_answer", "AllocateResponse"),
    ],
)
@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05abc", b"\x0a"], ids=["no tag", "cut short", "no length"])
def test_wrong_bytes_are_named(name: str, decode: str, expected: str, data: bytes) -> None:
    with pytest.raises(MalformedError, match=rf"{expected}.*{name}"):
        getattr(by_name(name), decode)(data)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_text_that_is_no_utf8_is_malformed(dialect: Dialect) -> None:
    with pytest.raises(MalformedError):
        dialect.decode_register(b"\x0a\x01\xff")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    ("word", "health"),
    [
        (b"Healthy", Health.HEALTHY),
        (b"Unhealthy", Health.UNHEALTHY),
        (b"healthy", Health.UNHEALTHY),
        (b"Broken", Health.UNHEALTHY),
        (b"", Health.UNHEALTHY),
    ],
)
def test_any_word_but_healthy_is_unhealthy(dialect: Dialect, word: bytes, health: Health) -> None:
    device = b"\x0a\x01g\x12" + bytes([len(word)]) + word
    assert dialect.decode_list(b"\x0a" + bytes([len(device)]) + device) == (Device("g", health),)


GPU = ContainerAnswer(
    envs={"NVIDIA_VISIBLE_DEVICES": "a,b"},
    mounts=(Mount("/usr/bin/x", "/opt/x", read_only=True),),
    device_nodes=(DeviceNode("/dev/nvidia0", "/dev/nvidia0"),),
)
NODES = ContainerAnswer(device_nodes=GPU.device_nodes)
PAIR = ContainerRequest(("a", "b"))


def _said(name: str, answer: ContainerAnswer) -> bytes:
    return by_name(name).encode_allocate_answer([PAIR], [answer], NEWEST).data


@pytest.mark.parametrize(
    ("spelled", "read", "answer", "gives"),
    [
        ("v1alpha2", "0.1", NODES, ContainerAnswer()),
        ("0.1", "v1alpha2", NODES, ContainerAnswer(envs={"b": ""})),
    ],
    ids=["silently empty", "a device ID for a variable"],
)
def test_each_alpha_answer_passes_for_the_other(
    spelled: str, read: str, answer: ContainerAnswer, gives: ContainerAnswer
) -> None:
    """Why there are three dialects: the genuine kubelets 1.8 and 1.9 were seen to misread each other's form likewise."""
    assert by_name(read).decode_allocate_answer(_said(spelled, answer)) == (gives,)


def test_a_variable_in_the_answer_of_1_9_is_an_error_to_1_8() -> None:
    with pytest.raises(MalformedError):
        by_name("0.1").decode_allocate_answer(_said("v1alpha2", GPU))


def test_a_later_spec_adds_to_an_earlier_one_and_never_overrides_it() -> None:
    first = by_name("0.1").encode_allocate_answer([ContainerRequest(("a",))], [GPU], NEWEST).data
    second = (
        by_name("0.1")
        .encode_allocate_answer(
            [ContainerRequest(("b",))],
            [
                ContainerAnswer(
                    envs={"NVIDIA_VISIBLE_DEVICES": "b", "MORE": "1"},
                    mounts=(Mount("/usr/bin/x", "/elsewhere"), Mount("/usr/bin/y", "/opt/y")),
                    device_nodes=(
                        DeviceNode("/dev/nvidia0", "/dev/null"),
                        DeviceNode("/dev/nvidia1", "/dev/nvidia1", "r"),
                    ),
                )
            ],
            NEWEST,
        )
        .data
    )
    assert by_name("0.1").decode_allocate_answer(first + second) == (
        ContainerAnswer(
            envs={"NVIDIA_VISIBLE_DEVICES": "a,b", "MORE": "1"},
            mounts=(*GPU.mounts, Mount("/usr/bin/y", "/opt/y")),
            device_nodes=(*GPU.device_nodes, DeviceNode("/dev/nvidia1", "/dev/nvidia1", "r")),
        ),
    )


CDI = ContainerAnswer(cdi_devices=("nvidia.com/gpu=0",))


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (Level(10, 12), False),
        (Level(26, 28), False),
        (Level(28, 28), False),
        (Level(28, 29), True),
        (Level(29, 30), True),
        (Level(10), True),
    ],
)
@pytest.mark.parametrize("answer", [CDI, replace(GPU, cdi_devices=CDI.cdi_devices)], ids=["alone", "beside others"])
def test_cdi_names_are_refused_where_they_would_certainly_be_dropped(
    level: Level, said: bool, answer: ContainerAnswer
) -> None:
    v1beta1 = by_name("v1beta1")
    if said:
        wire = v1beta1.encode_allocate_answer([PAIR], [answer], level)
        assert v1beta1.decode_allocate_answer(wire.data) == (answer,)
    else:
        with pytest.raises(UnsayableError, match=r"CDI device names cannot be said to .* v1beta1 .* kubelet 1\.29"):
            v1beta1.encode_allocate_answer([PAIR], [answer], level)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(("requests", "answers"), [(0, 0), (1, 0), (0, 1), (2, 1), (1, 2)])
def test_each_container_has_one_answer(dialect: Dialect, requests: int, answers: int) -> None:
    with pytest.raises(ValueError, match=f"{answers} answers for {requests} containers"):
        dialect.encode_allocate_answer([PAIR] * requests, [GPU] * answers, NEWEST)


def test_an_unknown_dialect_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'v1'\. Allowed: v1beta1, v1alpha2, 0\.1"):
        by_name("v1")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("field", Field, ids=lambda field: field.name)
def test_every_field_has_a_rule_with_a_source(dialect: Dialect, field: Field) -> None:
    assert dialect.rules[field].source


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_the_same_value_is_always_the_same_bytes(dialect: Dialect) -> None:
    envs = {f"N{number}": str(number) for number in range(50)}
    backwards = dict(reversed(envs.items()))
    one, other = (
        dialect.encode_allocate_answer([PAIR], [ContainerAnswer(envs=each)], NEWEST) for each in (envs, backwards)
    )
    assert one == other


def test_register_carries_any_version_so_that_a_probe_can_name_one_that_there_is_not() -> None:
    registration = Registration("probe", "x.sock", "nvidia.com/gpu")
    assert [d.decode_register(d.encode_register(registration).data).version for d in DIALECTS] == ["probe"] * 3
