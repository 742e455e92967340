"""Plan the upgrade of many nodes, from the output of ``kubectl get nodes -o json``. Pure.

``advice`` has the plan of each kubelet version. This module combines them into steps: which nodes change at which step, in which
order, and which of them must be drained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from adapters.levels import minor_version
from gateway.cli import advice
from gateway.cli.advice import Advice, Drain, Hop, Kubelet, Plan, PlanError
from gateway.sides.table import ANNOTATION

MOST_BYTES: Final = 1024 * 1024 * 1024
"""Of the nodes' JSON: 10 000 nodes with all their images are about 300 MB."""
_NATIVE: Final = ("hugepages-", "attachable-volumes-")
_STRICTEST: Final[tuple[Drain, ...]] = ("required", "advised", "not needed")


class _NodeInfo(Struct, frozen=True):
    kubelet: str = msgspec.field(default="", name="kubeletVersion")


class _Status(Struct, frozen=True):
    capacity: dict[str, str] = {}
    info: _NodeInfo = msgspec.field(default=_NodeInfo(), name="nodeInfo")


class _Meta(Struct, frozen=True):
    name: str = ""
    annotations: dict[str, str] = {}


class _Node(Struct, frozen=True):
    metadata: _Meta = _Meta()
    status: _Status = _Status()


class _Nodes(Struct, frozen=True):
    items: list[_Node]


class Node(Struct, frozen=True):
    """A node: its kubelet's version as the API server has it, and its number of devices by resource.

    ``move_to`` is the API to which its annotation moves them; usually empty.
    """

    name: str
    version: str
    devices: Mapping[str, int] = {}
    move_to: str = ""

    @property
    def count(self) -> int:
        """All its devices. A GPU that is offered under two names counts twice."""
        return sum(self.devices.values())


class Group(Struct, frozen=True, kw_only=True):
    """The nodes with one version of the kubelet. ``plan`` is null if that is the goal's version."""

    version: str
    nodes: tuple[str, ...]
    devices: int
    plan: Plan | None


class Step(Struct, frozen=True, kw_only=True):
    """One hop, and the nodes that make it. Steps of one number can run together; the numbers follow each other."""

    number: int
    versions: tuple[str, ...]
    """The present versions of these nodes."""
    nodes: int
    devices: int
    hop: Hop


class Unknown(Struct, frozen=True):
    """A node whose version is not known here."""

    node: str
    version: str
    why: str


class Fleet(Struct, frozen=True, kw_only=True):
    """The output of ``gateway plan --nodes --json``. ``without`` counts the nodes without devices."""

    schema: int = 1
    goal: str
    nodes: int
    devices: int
    without: int
    drained: Mapping[str, int]
    """The number of nodes with a step that requires a drain, with one that advises it, and without either."""
    first: tuple[str, ...]
    """What to do before the first step."""
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    unknown: tuple[Unknown, ...]


def read(content: bytes) -> tuple[Node, ...]:
    """Read the nodes from the JSON of a list of nodes.

    Raises:
        PlanError: the text is no such list.
    """
    try:
        found = msgspec.json.decode(content, type=_Nodes)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise PlanError(f"not a list of nodes (kubectl get nodes -o json): {error}") from error
    return tuple(
        Node(
            one.metadata.name,
            one.status.info.kubelet,
            _devices(one.status.capacity),
            one.metadata.annotations.get(ANNOTATION, ""),
        )
        for one in found.items
    )


def sorted_by_version(facts: Advice, nodes: Iterable[Node]) -> tuple[Mapping[Kubelet, list[Node]], tuple[Unknown, ...]]:
    """Return the nodes by their kubelet's version, and the nodes whose version is not known here."""
    found: dict[Kubelet, list[Node]] = defaultdict(list)
    unknown = []
    for node in nodes:
        try:
            found[advice.kubelet(node.version, facts)].append(node)
        except PlanError as error:
            unknown.append(Unknown(node.name, node.version[:64], str(error)))
    return found, tuple(unknown)


def plan(facts: Advice, nodes: Iterable[Node], goal: Kubelet, *, direct: bool = False) -> Fleet:
    """Return the plan of all nodes that have devices."""
    everyone = list(nodes)
    concerned = [node for node in everyone if node.devices]
    by_version, unknown = sorted_by_version(facts, concerned)
    groups = tuple(
        Group(
            version=str(version),
            nodes=tuple(node.name for node in sorted(members, key=lambda node: (node.count, node.name))),
            devices=sum(node.count for node in members),
            plan=None if _is_at_goal(version, goal) else advice.plan(facts, version, goal, direct=direct),
        )
        for version, members in sorted(by_version.items(), key=lambda item: item[0].release)
    )
    return Fleet(
        goal=str(goal),
        nodes=len(concerned),
        devices=sum(node.count for node in concerned),
        without=len(everyone) - len(concerned),
        drained=_drained(groups),
        first=next((group.plan.first for group in groups if group.plan), ()),
        groups=groups,
        steps=tuple(_steps(groups)),
        unknown=unknown,
    )


def _is_at_goal(version: Kubelet, goal: Kubelet) -> bool:
    """Return True if a node need not change: a goal without a patch number accepts each patch release."""
    return version == goal or (goal.patch is None and version.minor == goal.minor)


def _steps(groups: Iterable[Group]) -> Iterator[Step]:
    """Yield the hops in the order of the version that they lead to: the oldest nodes begin, and all arrive at the goal together."""
    plans = [(group, group.plan) for group in groups if group.plan]
    for way in ("up", "down"):
        hops = [(hop, group) for group, made in plans if made.way == way for hop in made.hops]
        if way == "down":
            hops.reverse()
        targets = sorted({minor_version(hop.new) for hop, _ in hops}, reverse=way == "down")
        for number, target in enumerate(targets, 1):
            alike: dict[bytes, list[tuple[Hop, Group]]] = defaultdict(list)
            for hop, group in hops:
                if minor_version(hop.new) == target:
                    alike[msgspec.json.encode(hop)].append((hop, group))
            for same in alike.values():
                yield Step(
                    number=number,
                    versions=tuple(group.version for _, group in same),
                    nodes=sum(len(group.nodes) for _, group in same),
                    devices=sum(group.devices for _, group in same),
                    hop=same[0][0],
                )


def _drained(groups: Iterable[Group]) -> dict[str, int]:
    found = dict.fromkeys(_STRICTEST, 0)
    for group in groups:
        if group.plan:
            levels = {hop.drain for hop in group.plan.hops}
            found[next(level for level in _STRICTEST if level in levels)] += len(group.nodes)
    return {str(level): count for level, count in found.items()}


def _devices(capacity: Mapping[str, str]) -> dict[str, int]:
    """Return the extended resources: their names have a domain, and are not Kubernetes' own."""
    return {
        name: int(count)
        for name, count in capacity.items()
        if "/" in name and not name.startswith(_NATIVE) and count.isdecimal() and len(count) < 10 and int(count)
    }
