"""What a run of the compatibility matrix found: the records behind every form of its report.

A record says what was observed, never what was meant to be seen, and always whether the kubelet was a genuine one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["genuine", "emulated"]
Status: TypeAlias = Literal["passed", "failed", "not applicable"]

SCHEMA = 1
"""Rises when a field changes its meaning or goes away."""


class KubeletFact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kubelet that took part."""

    version: str
    """The minor version, such as ``1.28``."""
    kind: Kind
    api: str
    """The device plugin API that it speaks."""
    kubernetes: str
    """Its own word for itself: ``v1.28.15``."""
    runtime: str
    """What it was built with, such as ``go1.26.6``; of an emulated one, its Python."""
    why_emulated: str = ""
    """Empty for a genuine one."""


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was run, on what."""

    started: str
    """UTC, ISO 8601."""
    seconds: float
    gateway: str
    """The version of this project."""
    python: str
    grpcio: str
    protobuf: str
    go: str
    """The Go that the genuine kubelets were built with; empty where there were none."""
    host: str
    """Kernel, architecture and number of processors, no names."""
    options: tuple[str, ...] = ()
    """The options of the daemon, beside those that every scenario sets."""
    kubelets: tuple[KubeletFact, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know to judge the run."""


class Promise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario: its name, and what it shows."""

    name: str
    promise: str


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scenario on one kubelet."""

    scenario: str
    version: str
    kind: Kind
    status: Status
    seconds: float = 0.0
    reason: str = ""
    """Why it failed or doesn't apply; empty where it passed."""
    first: str = ""
    """Why it failed at the first try, where this is the record of a second one; otherwise empty."""
    registers: dict[str, int] = {}
    """How many Registers the last kubelet of the scenario counted, by resource name."""
    witness: Literal["", "wire", "logs"] = ""
    """Where the transcript comes from: the calls as they passed by, or the ends of the processes' logs."""
    transcript: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Its name for people."""
        return f"{self.scenario} on kubelet {self.version} ({self.kind})"

    @property
    def key(self) -> str:
        """Its name on a page that has all of them."""
        return f"{self.scenario}-{self.version}"


class PodFact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices of one pod before and after a hop, by the records of the two kubelets."""

    pod: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class Hop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change of the kubelet under a running gateway, with pods."""

    old: str
    new: str
    kind: Kind
    """``genuine`` only if both kubelets are."""
    status: Status
    seconds: float = 0.0
    reason: str = ""
    """Why it failed."""
    first: str = ""
    """Why it failed at the first try, where this is the record of a second one; otherwise empty."""
    forgets: str = ""
    """Why the kubelet itself forgets its pods on this hop, which is why they were drained first; it was seen to forget."""
    checkpoint_kept: bool | None = None
    """Whether the new kubelet's records held the old one's pods before anything was admitted. None: it didn't come so far."""
    api_before: str = ""
    api_after: str = ""
    level_before: str = ""
    """Which kubelets the gateway took the old one for, such as ``1.26 to 1.28``, when it last answered an Allocate."""
    level_after: str = ""
    pods: tuple[PodFact, ...] = ()
    """The pods that lived through the hop; none where they were drained."""
    gap_ms: float | None = None
    """From the first possible connect to kubelet.sock until all devices were allocatable."""
    timer_late_ms: float | None = None
    """How late a 1 ms timer was meanwhile, at worst: how busy the machine was."""
    registers: dict[str, int] = {}
    """How many Registers the new kubelet counted, by resource name."""
    logged: tuple[str, ...] = ()
    """The warnings and errors that the new kubelet logged, the first ones."""
    transcript: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Its name for people."""
        return f"hop {self.old} -> {self.new} ({self.kind})"

    @property
    def key(self) -> str:
        """Its name on a page that has all of them."""
        return f"hop-{self.old}-{self.new}"


class NodeFact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node of a cluster."""

    version: str
    kind: Kind
    status: Status
    api: str = ""
    """The API in which it was served."""
    reason: str = ""
    registers: dict[str, int] = {}
    transcript: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Its name for people."""
        return f"node with kubelet {self.version} ({self.kind}) of the mixed cluster"

    @property
    def key(self) -> str:
        """Its name on a page that has all of them."""
        return f"node-{self.version}"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several nodes at once, each with a kubelet of another version and a gateway of the same configuration."""

    seconds: float = 0.0
    nodes: tuple[NodeFact, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run."""

    about: About
    scenarios: tuple[Promise, ...] = ()
    cells: tuple[Cell, ...] = ()
    hops: tuple[Hop, ...] = ()
    cluster: Cluster | None = None
    schema: int = SCHEMA

    def results(self) -> Iterator[Cell | Hop | NodeFact]:
        """Give everything that has a status."""
        yield from self.cells
        yield from self.hops
        yield from self.cluster.nodes if self.cluster else ()

    @property
    def passed(self) -> bool:
        """Whether something passed and nothing failed."""
        found = {one.status for one in self.results()}
        return "passed" in found and "failed" not in found


def dump(report: Report) -> bytes:
    """Give report.json."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def load(data: bytes) -> Report:
    """Read a report.json.

    Raises:
        msgspec.ValidationError: this is none; the message names the field.
    """
    return msgspec.json.decode(data, type=Report)
