"""Values of the neutral model, for hypothesis: everything the model can hold and a kubelet would take as it is."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec import Struct

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

text = st.text(st.characters(codec="utf-8"), max_size=12)
ids = st.lists(text, max_size=4).map(tuple)
pairs = st.dictionaries(text, text, max_size=3)

options = st.builds(Options, st.booleans(), st.booleans())
registrations = st.builds(Registration, text, text, text, options)

numa_nodes = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2).map(tuple)
devices = st.builds(Device, text, st.sampled_from(Health), numa_nodes)
lists = st.lists(devices, max_size=4).map(tuple)

mounts = st.builds(Mount, text, text, st.booleans())
device_nodes = st.builds(DeviceNode, text, text, text)
answers = st.builds(
    ContainerAnswer,
    envs=pairs,
    # Each container path once: of two, every kubelet takes the first.
    mounts=st.lists(mounts, max_size=3, unique_by=lambda mount: mount.container_path).map(tuple),
    device_nodes=st.lists(device_nodes, max_size=3, unique_by=lambda node: node.container_path).map(tuple),
    annotations=pairs,
    cdi_devices=ids,
)
requests = st.builds(ContainerRequest, ids)


def containers(of: st.SearchStrategy[object], at_least: int = 0) -> st.SearchStrategy[tuple[object, ...]]:
    """Draw a tuple with one value for each container; often for one alone, which all dialects can say."""
    one = st.tuples(of)
    return one | st.lists(of, min_size=at_least, max_size=3).map(tuple)


preferred_requests = st.builds(PreferredRequest, ids, ids, st.integers(-(2**31), 2**31 - 1))

STRUCTS: dict[type[Struct], st.SearchStrategy[Any]] = {
    Registration: registrations,
    Options: options,
    Device: devices,
    ContainerRequest: requests,
    ContainerAnswer: answers,
    Mount: mounts,
    DeviceNode: device_nodes,
    PreferredRequest: preferred_requests,
}
"""How the structs are drawn that messages are made of."""
