"""Decide if the node is ready for GPU pods, and make the patches of its condition and its taints. Pure.

The node is ready if each resource with devices is registered, the kubelet's records have it, and the API server shows as many
allocatable devices as are healthy. Autoscalers wait for the condition, or until the start-up taint is removed. So they add no
second node while this one is nearly ready (NVIDIA/gpu-operator#2573, NVIDIA/k8s-device-plugin#1746).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from gateway.kubernetes import quantity
from gateway.telling.served import Reason, VerdictState
from gateway.wires.log import printable

if TYPE_CHECKING:
    from gateway.kubernetes.node import Condition, NodeObject
    from gateway.telling.served import Verdict

CONDITION: Final = "nvidia.com/GPUReady"
"""The condition's type."""
READY: Final = "Ready"
"""The reason of a ready node."""
_MESSAGE_CHARS: Final = 1024


class NodeResource(Struct, frozen=True):
    """A resource: the numbers of its devices and healthy devices, and its verdict. ``withheld`` counts healthy devices that the kubelet doesn't give."""

    name: str
    devices: int
    healthy: int
    verdict: Verdict
    withheld: int = 0


class NodeReadiness(Struct, frozen=True):
    """The verdict on the node: the reason in one word, and in a sentence for people."""

    reason: str
    message: str

    @property
    def ready(self) -> bool:
        """True if the node is ready."""
        return self.reason == READY


def judge(resources: Sequence[NodeResource], node: NodeObject, *, hindrance: str = "", was: bool) -> NodeReadiness:
    """Return the verdict at one moment.

    Args:
        resources: all resources of the gateway.
        node: the node, as the API server has it.
        hindrance: why a source can't report its devices; '' if all can.
        was: True if the node was ready. The kubelet reports a change up to ten seconds late, so a ready node stays
            ready while some of a resource's devices are allocatable.
    """
    there = [one for one in resources if one.devices]
    if hindrance:
        return NodeReadiness("DevicesUnknown", hindrance)
    if not there:
        return NodeReadiness("NoDevices", "no GPU was found")
    if not any(one.healthy for one in there):
        return NodeReadiness("NoHealthyDevices", _each(there, "none is healthy"))
    for reason, wrong, words in (
        (
            "NotRegistered",
            [one for one in there if one.verdict.state != VerdictState.SERVED and not _is(one, Reason.LACKING)],
            "isn't registered with the kubelet",
        ),
        ("NotVerified", [one for one in there if _is(one, Reason.LACKING)], "the kubelet's records lack it"),
        (
            "NotVerified",
            [one for one in there if one.withheld],
            "the kubelet would not give all healthy devices: another plugin may have the resource",
        ),
        (
            "NotVerified",
            [one for one in there if _is(one, Reason.UNVERIFIED)],
            "the kubelet's records aren't read yet",
        ),
    ):
        if wrong:
            return NodeReadiness(reason, _each(wrong, words))
    unseen = [one for one in there if allocatable(node, one.name) < (min(1, one.healthy) if was else one.healthy)]
    if unseen:
        words = "; ".join(
            f"{one.name}: {allocatable(node, one.name)} of {one.healthy} are allocatable" for one in unseen
        )
        return NodeReadiness("NotAllocatable", words)
    return NodeReadiness(READY, "every resource is registered, verified and allocatable: " + _each(there, ""))


def allocatable(node: NodeObject, resource: str) -> int:
    """Return how many devices of a resource the API server shows as allocatable."""
    return quantity.read(node.status.allocatable.get(resource)) or 0


def current(node: NodeObject) -> Condition | None:
    """Return our condition."""
    return next((one for one in node.status.conditions if one.type == CONDITION), None)


def condition(node: NodeObject, verdict: NodeReadiness, now: float) -> Mapping[str, Any] | None:
    """Return the strategic merge patch of the node's status that sets our condition; None if it is set. ``now``: Unix seconds."""
    status, message = str(verdict.ready), printable(verdict.message)[:_MESSAGE_CHARS]
    before = current(node)
    if before is not None and (before.status, before.reason, before.message) == (status, verdict.reason, message):
        return None
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    said = {"type": CONDITION, "status": status, "reason": verdict.reason, "message": message, "lastHeartbeatTime": at}
    if before is None or before.status != status:
        said["lastTransitionTime"] = at
    return {"status": {"conditions": [said]}}


def untaint(node: NodeObject, key: str) -> Sequence[Mapping[str, Any]]:
    """Return the JSON patch that removes the taints with a key, if they are unchanged; empty if there are none."""
    patch: list[Mapping[str, Any]] = []
    for index, taint in reversed(list(enumerate(node.spec.taints))):
        if taint.key == key:
            path = f"/spec/taints/{index}"
            patch += [{"op": "test", "path": f"{path}/key", "value": key}, {"op": "remove", "path": path}]
    return patch


def _is(one: NodeResource, reason: Reason) -> bool:
    return one.verdict.reason == reason


def _each(resources: Sequence[NodeResource], words: str) -> str:
    if not words:
        return ", ".join(f"{one.name} ({one.healthy})" for one in resources)
    return "; ".join(f"{one.name}: {words}" for one in resources)
