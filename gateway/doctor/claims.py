"""Checks of Dynamic Resource Allocation: the gateway's drivers, other processes' offers, and GPUs that move between the APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.doctor.snapshot import NodeFacts, allocatable, joined
from gateway.sides.table import MOVING

_LONG_S: Final = 3600.0
"""Seconds after which a GPU that is still moving is reported."""
_GATED_MINORS: Final = range(32, 34)
"""Kubelets (1.N) that prepare claims only with a feature gate (advice.yaml has the source)."""
_FIRST_DRA_MINOR: Final = 32
_MOVING: Final = frozenset(side.value for side in MOVING)


def _strangers(seen: NodeFacts) -> str:
    return joined(
        f"{device.id}: {device.stranger}"
        for status in seen.statuses
        for resource in status.resources
        for device in resource.devices
        if device.stranger
    )


def _stuck(seen: NodeFacts) -> str:
    return joined(
        f"{one.id} has been {one.side} for {one.moving_s / 3600:.0f} h: {one.words}"
        for one in seen.sides
        if one.moving_s is not None and one.moving_s >= _LONG_S
    )


def _lowered(seen: NodeFacts) -> str:
    sides = seen.sides
    if seen.own_node is None or not sides or any(one.side in _MOVING for one in sides):
        return ""
    there = seen.own_node.allocatable
    return joined(
        f"{name}: the device plugin API has {count} healthy devices, the API server shows {there.get(name, 0)}"
        for name, count in allocatable(seen).items()
        if there.get(name, 0) < count
    )


def _no_class(seen: NodeFacts) -> str:
    classes = seen.device_classes
    if classes is None:
        return ""
    return joined(
        f"no DeviceClass selects devices of {one.name}"
        for one in seen.own_drivers
        if not any(one.name in text or not text for text in classes.values())
    )


def _unpublished(seen: NodeFacts) -> str:
    return joined(f"{one.name}: {one.unpublished}" for one in seen.own_drivers if one.unpublished and not one.rival)


def _rival(seen: NodeFacts) -> str:
    return joined(one.rival for one in seen.own_drivers if one.rival)


def _rights(seen: NodeFacts) -> str:
    missing = [what for what, allowed in (seen.rights or {}).items() if not allowed]
    return f"not allowed: {', '.join(missing)}" if missing else ""


def _no_registry(seen: NodeFacts) -> str:
    return "the kubelet's folder has no plugins_registry" if seen.has_registry is False and seen.own_drivers else ""


def _untaken(seen: NodeFacts) -> str:
    """Return the drivers that the kubelet did not accept. Missing rights and an unreachable API server have their own checks."""
    if _no_registry(seen) or _rights(seen):
        return ""
    minor = seen.release.minor if seen.release else 0
    why = "no kubelet registered it"
    if minor in _GATED_MINORS:
        why += f". Kubelet 1.{minor} prepares claims only with the feature gate DynamicResourceAllocation"
    elif 0 < minor < _FIRST_DRA_MINOR:
        why += f". Kubelet 1.{minor} prepares no claims"
    return joined(
        f"{one.name}: {one.trouble or why}"
        for one in seen.own_drivers
        if not one.registered and not one.rival and (one.trouble or not one.unpublished)
    )


def _annotation(seen: NodeFacts) -> str:
    return joined(one.crossing for one in seen.statuses if one.crossing)


def _overlooked(seen: NodeFacts) -> str:
    return joined(one.by_name.overlooked for one in seen.statuses if one.by_name.overlooked)


def _waiting(seen: NodeFacts) -> str:
    return joined(one.by_name.waiting for one in seen.statuses if one.by_name.waiting)


def _left(seen: NodeFacts) -> str:
    if not seen.used_state_dir or not seen.statuses or seen.own_drivers:
        return ""
    return joined(f"{one} is prepared" for one in seen.used_state_dir.claims)


def _refused(seen: NodeFacts) -> str:
    return joined(words for one in seen.own_drivers for words in one.refused)


CHECKS: Final[Mapping[str, Callable[[NodeFacts], str]]] = {
    "DPG0601": _strangers,
    "DPG0602": _stuck,
    "DPG0603": _lowered,
    "DPG0604": _no_class,
    "DPG0605": _unpublished,
    "DPG0606": _rights,
    "DPG0607": _no_registry,
    "DPG0608": _untaken,
    "DPG0609": _annotation,
    "DPG0610": _overlooked,
    "DPG0611": _waiting,
    "DPG0612": _rival,
    "DPG0613": _left,
    "DPG0614": _refused,
}
