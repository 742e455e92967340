"""Checks of other components' reports about the node: DRA drivers, and the API server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.doctor.snapshot import NodeFacts, allocatable

_DRIVERS: Final = {"gpu.nvidia.com": "nvidia.com/", "gpu.amd.com": "amd.com/"}
"""DRA drivers of GPUs, and the prefixes of their vendor's resource names."""
_COMPUTE_DOMAINS: Final = "compute-domain.nvidia.com"
_VENDORS: Final = ("nvidia.com/", "amd.com/")


def _dra(seen: NodeFacts) -> str:
    names = {name for name, count in allocatable(seen).items() if count}
    both = sorted(
        driver
        for driver, prefix in _DRIVERS.items()
        if driver in (seen.dra_drivers or ()) and any(name.startswith(prefix) for name in names)
    )
    return f"{', '.join(both)} is registered with the kubelet, next to {', '.join(sorted(names))}" if both else ""


def _channels(seen: NodeFacts) -> str:
    if not seen.imex or _COMPUTE_DOMAINS not in (seen.dra_drivers or ()):
        return ""
    return f"imex.channelIDs is [0], and {_COMPUTE_DOMAINS} is registered with the kubelet"


def _dead(seen: NodeFacts) -> str:
    if seen.own_node is None or not seen.statuses:
        return ""
    dead = sorted(
        name
        for name, count in seen.own_node.capacity.items()
        if not count and name.startswith(_VENDORS) and name not in allocatable(seen)
    )
    return f"the node has {', '.join(dead)} with 0, and no gateway offers that" if dead else ""


def _unseen(seen: NodeFacts) -> str:
    # If GPUs may move between the APIs, DPG0603 checks this.
    if seen.own_node is None or any(status.sides for status in seen.statuses):
        return ""
    missing = [
        f"{name}: {count} offered, the API server shows {seen.own_node.allocatable.get(name, 0)}"
        for name, count in allocatable(seen).items()
        if seen.own_node.allocatable.get(name, 0) < count
    ]
    return "; ".join(missing)


def _no_class(seen: NodeFacts) -> str:
    runtime = seen.runtime
    if seen.runtime_classes is None or runtime is None or not runtime.nvidia or runtime.nvidia_is_default:
        return ""
    return "" if "nvidia" in seen.runtime_classes else "there is no RuntimeClass nvidia"


def _misnamed(seen: NodeFacts) -> str:
    if seen.node_missing:
        return f"the API server has no node {seen.node_name}"
    if seen.node is None or seen.own_node is not None:
        return ""
    there = seen.node.boot
    return f"the node {seen.node_name} runs on another machine: its boot ID is {there}, and here it is {seen.boot}"


CHECKS: Final[Mapping[str, Callable[[NodeFacts], str]]] = {
    "DPG0501": _dra,
    "DPG0502": _dead,
    "DPG0503": _unseen,
    "DPG0504": _no_class,
    "DPG0505": _misnamed,
    "DPG0506": _channels,
}
