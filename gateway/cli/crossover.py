"""Plan the move of a fleet's GPUs from the device plugin API to claims. Pure.

``advice.yaml`` says which kubelets support claims, and which problems pods may have on them. The nodes move in the order of their
kubelet versions, the newest first, because those have the fewest problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from gateway.cli.advice import Advice, ClaimSupport, Crossover, Kubelet, Support
from gateway.cli.fleet import Node, Unknown, sorted_by_version
from gateway.sides.table import ANNOTATION

_WORST: Final[tuple[Support, ...]] = ("no", "gate", "yes")


class Group(Struct, frozen=True, kw_only=True):
    """The nodes with one version of the kubelet. ``step`` is the number of their step; null if they can't move.

    ``claims``: how the kubelet supports a pod's own claims. ``names``: how it supports claims for pods that request GPUs by resource
    name. ``rows``: the problems that pods may have there. ``told``: the nodes that their annotation moves to claims already.
    """

    version: str
    step: int | None
    nodes: tuple[str, ...]
    devices: int
    told: tuple[str, ...]
    claims: Support
    names: Support
    rows: tuple[str, ...]


class CrossingPlan(Struct, frozen=True, kw_only=True):
    """The output of ``gateway plan --to dra --json``. ``names`` is the least support, on a kubelet that can move, for pods that request GPUs by resource name."""

    schema: int = 1
    to: str = "dra"
    nodes: int
    devices: int
    without: int
    names: Support
    first: tuple[str, ...]
    """Steps before the first node moves."""
    each: tuple[str, ...]
    """Steps on each node."""
    back: tuple[str, ...]
    """Steps to move back."""
    groups: tuple[Group, ...]
    rows: Mapping[str, Crossover]
    """The problems that the groups name, by ID."""
    unknown: tuple[Unknown, ...]


def plan(facts: Advice, nodes: Iterable[Node]) -> CrossingPlan:
    """Return the plan of all nodes that have devices."""
    everyone = list(nodes)
    concerned = [node for node in everyone if node.devices]
    by_version, unknown = sorted_by_version(facts, concerned)
    return _made(facts, by_version, len(concerned), len(everyone) - len(concerned), unknown)


def plan_of(facts: Advice, version: Kubelet) -> CrossingPlan:
    """Return the plan of one kubelet version."""
    return _made(facts, {version: []}, 0, 0, ())


def _made(
    facts: Advice, by_version: Mapping[Kubelet, Sequence[Node]], nodes: int, without: int, unknown: tuple[Unknown, ...]
) -> CrossingPlan:
    newest = sorted(by_version.items(), key=lambda item: item[0].release, reverse=True)
    can = [version for version, _ in newest if facts.claim_support(version).claims != "no"]
    groups = tuple(
        _group(facts, version, members, can.index(version) + 1 if version in can else None)
        for version, members in newest
    )
    named = {name for group in groups for name in group.rows}
    takes = [facts.claim_support(version) for version in can]
    return CrossingPlan(
        nodes=nodes,
        devices=sum(group.devices for group in groups),
        without=without,
        names=next((level for level in _WORST if any(one.names == level for one in takes)), "no"),
        first=tuple(_first(takes)) if can else (),
        each=_EACH if can else (),
        back=_BACK if can else (),
        groups=groups,
        rows={row.id: row for row in facts.crossovers if row.id in named},
        unknown=unknown,
    )


def _group(facts: Advice, version: Kubelet, members: Sequence[Node], step: int | None) -> Group:
    takes, in_order = facts.claim_support(version), sorted(members, key=lambda node: (node.count, node.name))
    return Group(
        version=str(version),
        step=step,
        nodes=tuple(node.name for node in in_order),
        devices=sum(node.count for node in in_order),
        told=tuple(node.name for node in in_order if node.move_to == "dra"),
        claims=takes.claims,
        names=takes.names,
        rows=tuple(row.id for row in facts.crossovers if row.hits(version)),
    )


def _first(takes: Sequence[ClaimSupport]) -> Iterator[str]:
    gated = any(one.claims == "gate" for one in takes)
    yield "Bring the control plane to 1.34 or later" + (
        ", and have its API server serve resource.k8s.io/v1beta1, too: kubelets before 1.34 ask for that."
        if gated
        else "."
    )
    if gated:
        yield "Switch the gate DynamicResourceAllocation on in the kubelets before 1.34, and restart them before anything moves."
    yield "Switch CDI on in the container runtime of each node (containerd 1.7: enable_cdi), because claims give GPUs by CDI only."
    yield (
        "Give each node the gateway with --dra on and the components api-server, dra and dra-on, and no other plugin or DRA driver of these "
        "GPUs. This alone changes nothing: all GPUs stay with the device plugin API."
    )
    yield "Make the DeviceClass of the driver" + (
        ", without extendedResourceName: a kubelet here would run a pod that asks by name without its GPU, or fail it."
        if any(one.names != "yes" for one in takes)
        else ". With extendedResourceName, pods that ask by name get claims, too, and all GPUs of a node move together."
    )
    yield "Give pods claims, or count the GPUs that pods which ask by name need: as many must stay with the device plugin API."


_EACH: Final = (
    f"kubectl annotate node NODE --overwrite {ANNOTATION}=dra",
    "No drain: running pods keep their GPUs, and each GPU moves when its pod ends. If you can't wait for that, end the pods.",
    "Wait until gateway status shows none on its way, and run a pod with a claim there, before the next node.",
)
_BACK: Final = (
    f"kubectl annotate node NODE --overwrite {ANNOTATION}=plugin: GPUs come back one by one, when no claim has them.",
    "Before a kubelet goes back below 1.36: bring its GPUs back, and end the pods that got theirs by a resource name, or that kubelet ends them.",
    "Before a kubelet goes back below 1.32, or the gateway to --dra off: bring its GPUs back and end its pods with claims.",
)
