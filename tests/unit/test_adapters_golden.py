"""Our messages against the bytes of the kubelets' own Go types: every message of the API, every field set."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from adapters.levels import minor_version
from adapters.pb.v1alpha import v0_1_pb2, v1alpha2_pb2
from adapters.pb.v1beta1 import v1beta1_pb2

GOLDEN = sorted((Path(__file__).parents[1] / "compat" / "golden").glob("*.json"))


@cache
def _golden(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _minor(file: Path) -> int:
    return minor_version(_golden(file)["kubernetes"])


def _module(minor: int) -> ModuleType:
    return {8: v0_1_pb2, 9: v1alpha2_pb2}.get(minor, v1beta1_pb2)


def _plain(message: Message) -> dict[str, Any]:
    """Give a message as plain values by field name, as the golden files do."""
    return {field.name: _plain_value(field, value) for field, value in message.ListFields()}


def _plain_value(field: Any, value: Any) -> Any:
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        return dict(value)
    return [_plain(part) for part in value] if field.is_repeated else _plain(value)


def _renamed(value: Any) -> Any:
    """Undo what newer kubelets renamed (devicesIDs is devices_ids there): the wire knows no names."""
    if isinstance(value, dict):
        return {key.replace("devices_ids", "devicesIDs"): _renamed(part) for key, part in value.items()}
    return [_renamed(part) for part in value] if isinstance(value, list) else value


def _unknown(message: Message) -> int:
    inner = 0
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            inner += sum(map(_unknown, value if field.is_repeated else [value]))
    return inner + len(UnknownFieldSet(message))


ROWS = [(file, name) for file in GOLDEN for name in _golden(file)["messages"]]


@pytest.mark.parametrize(("file", "name"), ROWS, ids=[f"{file.stem} {name}" for file, name in ROWS])
def test_a_kubelets_message_is_ours(file: Path, name: str) -> None:
    data = bytes.fromhex(_golden(file)["messages"][name])
    kind: Callable[[], Message] = getattr(_module(_minor(file)), name)
    message = kind()
    message.ParseFromString(data)
    assert _unknown(message) == 0
    assert message.SerializeToString(deterministic=True) == data
    assert _renamed(_plain(message)) == _renamed(_golden(file)["values"][name])


@pytest.mark.parametrize("minor", [8, 9, 37], ids=["0.1", "v1alpha2", "v1beta1"])
def test_we_have_no_message_that_the_kubelet_has_not(minor: int) -> None:
    [file] = [file for file in GOLDEN if _minor(file) == minor]
    ours = _module(minor).DESCRIPTOR.message_types_by_name
    values = _golden(file)["values"]
    theirs = {(name, field) for name, message in values.items() for field in _renamed(message)}
    assert set(ours) == set(values)
    assert {(name, field.name) for name, message in ours.items() for field in message.fields} == theirs
