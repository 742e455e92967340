"""Reading a kubelet's checkpoint: every format, and nothing that isn't one."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import checkpoint
from adapters.checkpoint import Checkpoint, Held
from adapters.dialect import MalformedError
from devices.model import ContainerAnswer
from gateway_lab.kubelets import behaviour
from gateway_lab.kubelets import checkpoint as kubelet
from gateway_lab.kubelets.behaviour import Behaviour
from gateway_lab.kubelets.checkpoint import Allotment, Memory

from .strategies import text

KUBELETS = [behaviour.behaviour(f"1.{minor}") for minor in range(behaviour.OLDEST, behaviour.NEWEST + 1)]

ids = st.lists(text, min_size=1, max_size=4, unique=True).map(tuple)
nodes = st.sampled_from(["-1", "0", "1"])
memories = st.builds(
    Memory,
    st.dictionaries(
        st.tuples(text, text, text),
        st.builds(Allotment, st.dictionaries(nodes, ids, min_size=1), st.just(ContainerAnswer({"GPUS": "all"}))),
        max_size=3,
    ),
    st.dictionaries(text, ids, max_size=2),
)


@pytest.mark.parametrize("version", KUBELETS, ids=lambda version: version.name)
@settings(max_examples=10)  # for each of thirty kubelets
@given(memories)
def test_what_each_kubelet_writes_is_read(version: Behaviour, memory: Memory) -> None:
    found = checkpoint.read(kubelet.encode(memory, version))
    assert {(held.pod_uid, held.container, held.resource): held.device_ids for held in found.held} == {
        key: allotment.ids for key, allotment in memory.held.items()
    }
    registered = {} if version.minor == behaviour.OLDEST else memory.registered
    assert found.registered == {resource: frozenset(devices) for resource, devices in registered.items()}


HELD = (Held("uid", "main", "r", frozenset("ab")),)
ENTRY = {
    "PodUID": "uid",
    "ContainerName": "main",
    "ResourceName": "r",
    "DeviceIDs": ["a", "b"],
    "AllocResp": "CgNhYmM=",
}


def bare(**entry: object) -> dict[str, object]:
    return {"PodDeviceEntries": [{**ENTRY, **entry}], "RegisteredDevices": {"r": ["a"]}}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        pytest.param({"Entries": None}, Checkpoint(), id="1.8: nobody holds anything"),
        pytest.param({"PodDeviceEntries": None, "RegisteredDevices": {}}, Checkpoint(), id="1.9: nobody, nothing"),
        pytest.param(bare(), Checkpoint(HELD, {"r": frozenset("a")}), id="1.9: bare"),
        pytest.param({"Data": bare(), "Checksum": 1}, Checkpoint(HELD, {"r": frozenset("a")}), id="1.11: wrong checksum"),
        pytest.param({"Data": bare(DeviceIDs={"0": ["a"], "1": ["b"]})}, Checkpoint(HELD, {"r": frozenset("a")}), id="NUMA"),
        pytest.param({"Data": bare(DeviceIDs={"0": ["a", "b"], "-1": None})}, Checkpoint(HELD, {"r": frozenset("a")}), id="Go's nil list"),
        pytest.param({"Data": bare(DeviceIDs={"0": ["a"], "1": ["a", "b"]})}, Checkpoint(HELD, {"r": frozenset("a")}), id="a device on two nodes is one"),
        pytest.param({"Data": bare(Later=[1]), "Later": {}}, Checkpoint(HELD, {"r": frozenset("a")}), id="fields of later kubelets"),
        pytest.param({"Data": bare(AllocResp=None)}, Checkpoint(HELD, {"r": frozenset("a")}), id="answers aren't read"),
        pytest.param({"PodDeviceEntries": [], "RegisteredDevices": {"r": None}}, Checkpoint((), {"r": frozenset()}), id="a resource without devices"),
    ],
)  # fmt: skip
def test_what_is_read(content: object, found: Checkpoint) -> None:
    assert checkpoint.read(json.dumps(content).encode()) == found


NONE = {
    "empty": (b"", "truncated"),
    "half written": (json.dumps({"Data": bare()}).encode()[:-9], "truncated"),
    "another file": (b"{}", "none of Entries"),
    "data of another kind": (b'{"Data": {}}', "none of Entries"),
    "no data": (b'{"Data": null}', r"\$.Data"),
    "no object": (b"[]", "array"),
    "a number for a text": (json.dumps(bare(PodUID=7)).encode(), r"str.*PodUID"),
    "a name that each device would repeat": (json.dumps(bare(PodUID="p" * 254)).encode(), "length <= 253.*PodUID"),
    "of a container": (json.dumps(bare(ContainerName="c" * 254)).encode(), "length <= 253.*ContainerName"),
    "in 1.8's format": (
        json.dumps(
            {"Entries": [{"PodUID": "p" * 254, "ContainerName": "c", "ResourceName": "r", "DeviceID": "a"}]}
        ).encode(),
        "PodUID",
    ),
    "a text for a list": (json.dumps(bare(DeviceIDs="a")).encode(), "DeviceIDs"),
    "a list too deep": (json.dumps(bare(DeviceIDs=[["a"]])).encode(), "DeviceIDs"),
    "a field is missing": (b'{"PodDeviceEntries": [{"PodUID": "u"}]}', "ContainerName"),
    "no UTF-8": (b'{"Entries": [{"PodUID": "\xff"}]}', "utf-8"),
    "too deep": (b'{"a":' * 100_000, "recursion"),
    "too large": (b" " * (checkpoint.MAX_BYTES + 1), "too large"),
    "too many strings": (b'"",' * 600_000, "too large"),
}


@pytest.mark.parametrize(("content", "says"), NONE.values(), ids=NONE)
def test_what_is_none(content: bytes, says: str) -> None:
    with pytest.raises(MalformedError, match=says):
        checkpoint.read(content)


KEYS = st.sampled_from(["Data", "Entries", "PodDeviceEntries", "RegisteredDevices", "DeviceIDs"])
JSON = st.recursive(
    st.none() | st.integers() | text, lambda inner: st.lists(inner) | st.dictionaries(text | KEYS, inner), max_leaves=8
)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_nothing_else_is_ever_raised(content: bytes) -> None:
    with contextlib.suppress(MalformedError):
        assert isinstance(checkpoint.read(content), Checkpoint)
