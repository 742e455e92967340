"""What AMD's metrics exporter may answer, and how many GPUs are read at most."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from devices.gpu.amd import backend as amd
from devices.gpu.amd import sysfs
from devices.gpu.amd.exporter import unhealthy
from tests.fakes.amd import Sysfs


def test_more_entries_than_any_node_has_are_not_read(tmp_path: Path) -> None:
    tree = Sysfs(tmp_path, []).write()
    for number in range(1100):
        (tree.driver / f"{number:04x}:01:00.0").symlink_to(tree.root / "class")
    assert len(amd.gpus(sysfs.read(tree.root, sysfs.Topology()))) == 1024


def _messages() -> Any:
    """The exporter's answer, as its own metricssvc.proto describes it: made by protobuf, read by us."""
    text, many = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    file = descriptor_pb2.FileDescriptorProto(name="metricssvc.proto", package="metricssvc", syntax="proto3")
    state = file.message_type.add(name="GPUState")
    for number, name in enumerate(("ID", "UUID", "Health", "AssociatedWorkload", "Device"), 1):
        state.field.add(name=name, number=number, type=text, label=many if number == 4 else 1)
    answer = file.message_type.add(name="GPUStateResponse")
    answer.field.add(name="GPUState", number=1, type=11, type_name=".metricssvc.GPUState", label=many)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("metricssvc.GPUStateResponse"))


Answer = _messages()


def answer(**health: str) -> bytes:
    states = [
        {"ID": "0", "UUID": "u", "Health": word, "AssociatedWorkload": ["a", "b"], "Device": device}
        for device, word in health.items()
    ]
    data: bytes = Answer(GPUState=states).SerializeToString()
    return data


@given(st.dictionaries(st.text(max_size=300), st.sampled_from(["healthy", "unhealthy", "unknown", ""]), max_size=20))
def test_an_answer_of_the_exporter_is_read(health: dict[str, str]) -> None:
    assert unhealthy(answer(**health)) == {device for device, word in health.items() if word == "unhealthy"}


@given(st.binary(max_size=200))
def test_no_answer_of_the_exporter_does_harm(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        unhealthy(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(answer(a="unhealthy")[:-1], id="cut short"),
        pytest.param(b"\x0a\x05\x1a\x09abc", id="cut short inside"),
        pytest.param(b"\x0a" + b"\xff" * 10, id="a length of more than 64 bits"),
        pytest.param(b"\x0a", id="no length"),
        pytest.param(b"\x0b", id="a group without an end"),
    ],
)
def test_what_is_no_answer_of_the_exporter(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot decode the answer of AMD's metrics exporter"):
        unhealthy(data)


@pytest.mark.parametrize("field", [b"\x30\x96\x01", b"\x31" + b"\x00" * 8, b"\x35" + b"\x00" * 4, b"\x32\x01?"])
def test_fields_of_a_release_to_come_are_stepped_over(field: bytes) -> None:
    assert unhealthy(field + answer(a="unhealthy") + field) == {"a"}
