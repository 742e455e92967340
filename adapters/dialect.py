"""What a dialect is: a version string, two gRPC services, a spelling for each message, and what it cannot say.

A dialect knows nothing but spelling. It is pure, and speaks in both directions: the gateway is a device plugin to the
kubelet, and can stand in the kubelet's place for other plugins. What it cannot say is declared, not coded: each
``Field`` of the model has a ``Fidelity``, and for a dialect that grew over time (v1beta1: kubelet 1.10 to today) the
kubelet minor version from which that verdict holds. The page ``docs/dialects.md`` is printed from these declarations.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    Field,
    Options,
    PreferredRequest,
    Registration,
    Sayable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from google.protobuf.descriptor import FileDescriptor


class Fidelity(Enum):
    """What becomes of a field in a dialect."""

    LOSSLESS = "lossless"
    """It is said as it is."""
    DEGRADED = "degraded"
    """It is left out, because the pod works without it. Counted, and logged once."""
    IMPOSSIBLE = "impossible"
    """Left out, the pod would start without its device: the request is refused."""


class Rule(Struct, frozen=True):
    """``verdict`` holds for kubelet 1.``since`` and later (None: all that speak the dialect), ``before`` below it."""

    verdict: Fidelity
    since: int | None = None
    before: Fidelity = Fidelity.IMPOSSIBLE
    source: str = ""
    """Where the rule comes from: a Kubernetes issue, a feature gate, a kubelet version that was run."""
    advice: str = ""
    """What to do where it is impossible."""


class Level(Struct, frozen=True):
    """The kubelet minor versions (1.``low`` to 1.``high``, both included) that fit the evidence of a live connection.

    ``high`` None means that nothing bounds it from above.
    """

    low: int
    high: int | None = None

    def reaches(self, minor: int) -> bool | None:
        """Tell whether the kubelet is 1.``minor`` or later; None where the evidence leaves it open."""
        if self.low >= minor:
            return True
        if self.high is not None and self.high < minor:
            return False
        return None


def span(level: Level) -> str:
    """Say a level in words, such as ``1.26 to 1.28``."""
    if level.high is None:
        return f"1.{level.low} and later"
    return f"1.{level.low}" if level.high == level.low else f"1.{level.low} to 1.{level.high}"


class Wire(Struct, frozen=True):
    """A message in a dialect's spelling, and the fields that were left out of it (all of them ``DEGRADED``)."""

    data: bytes
    lost: frozenset[Field] = frozenset()


class UnsayableError(Exception):
    """The message would be harmful without a field that the dialect (at this level) cannot say."""

    def __init__(self, field: Field, dialect: str, advice: str) -> None:
        super().__init__(f"{field.value} cannot be said to a kubelet that speaks {dialect}: {advice}")
        self.field = field
        self.dialect = dialect


class MalformedError(Exception):
    """Bytes that are no message of this dialect. The message says which one was expected."""


class Dialect(Protocol):
    """One spelling. ``encode_*`` may raise ``UnsayableError``; ``decode_*`` raise ``MalformedError``."""

    name: str
    """The version string of Register, which is also how people call the dialect: ``v1beta1``, ``v1alpha2``, ``0.1``."""
    family: str
    """What the versions are called together that differ in a message or two: ``v1alpha`` for both alphas."""
    registration_service: str
    """Full gRPC service name on kubelet.sock, such as ``v1beta1.Registration``."""
    plugin_service: str
    """Full gRPC service name on the plugin's socket, such as ``v1beta1.DevicePlugin``."""
    kubelets: Level
    """The kubelets that speak it."""
    rules: Mapping[Field, Rule]
    """What becomes of each field; every ``Field`` has a row."""
    spacing: float
    """Seconds at least between two lists or answers to Allocate, of whichever resources; 0 where none need to. Where some do, the
    kubelet writes its checkpoint in place, under no lock, and the next list waits for the write of the one before, too."""
    asks_again: bool
    """Whether the kubelet calls Allocate again for the same devices each time a container of theirs starts (1.8 alone)."""
    writes_late: bool
    """Whether the kubelet has no checkpoint before the first container with devices starts (1.8 alone): what Allocate gave is all that is held then."""
    names_itself: bool
    """Whether a kubelet that refuses another version says which one it speaks (all but 1.8)."""
    schema: FileDescriptor
    """Its messages and services as they were generated from ``protos/``."""

    def __hash__(self) -> int: ...
    def encode_register(self, registration: Registration) -> Wire: ...
    def decode_register(self, data: bytes) -> Registration: ...
    def encode_options(self, options: Options) -> Wire: ...
    def decode_options(self, data: bytes) -> Options: ...
    def encode_list(self, devices: Sequence[Device]) -> Wire: ...
    def decode_list(self, data: bytes) -> tuple[Device, ...]: ...
    def encode_allocate_request(self, containers: Sequence[ContainerRequest]) -> Wire: ...
    def decode_allocate_request(self, data: bytes) -> tuple[ContainerRequest, ...]: ...
    def encode_allocate_answer(
        self, containers: Sequence[ContainerRequest], answers: Sequence[ContainerAnswer], level: Level
    ) -> Wire:
        """Spell the answers, one per container of the request (dialect 0.1 repeats the request's device IDs)."""

    def decode_allocate_answer(self, data: bytes) -> tuple[ContainerAnswer, ...]: ...
    def encode_preferred_request(self, containers: Sequence[PreferredRequest]) -> Wire: ...
    def decode_preferred_request(self, data: bytes) -> tuple[PreferredRequest, ...]: ...
    def encode_preferred_answer(self, containers: Sequence[Sequence[str]]) -> Wire: ...
    def decode_preferred_answer(self, data: bytes) -> tuple[tuple[str, ...], ...]: ...
    def encode_pre_start_request(self, device_ids: Sequence[str]) -> Wire: ...
    def decode_pre_start_request(self, data: bytes) -> tuple[str, ...]: ...


def verdict(dialect: Dialect, field: Field, level: Level) -> Fidelity | None:
    """Say what becomes of ``field`` at ``level``; None where the level leaves it open."""
    rule = dialect.rules[field]
    if rule.since is None:
        return rule.verdict
    reached = level.reaches(rule.since)
    if reached is None:
        return None
    return rule.verdict if reached else rule.before


def left_out(dialect: Dialect, used: Iterable[Field], level: Level | None = None) -> frozenset[Field]:
    """Name those of the fields that a message uses which ``dialect`` leaves out, as it declares.

    Args:
        dialect: in which the message is spelled.
        used: what the message uses (``adapters.fields``).
        level: the kubelets that may be at the other end; None: the newest ones that speak it.

    Raises:
        UnsayableError: the message would be harmful without one of them.
    """
    return _left_out(dialect, tuple(used), level)


@lru_cache(maxsize=256)
def _left_out(dialect: Dialect, used: tuple[Field, ...], level: Level | None) -> frozenset[Field]:
    lost = set()
    for field in used:
        rule = dialect.rules[field]
        found = rule.verdict if level is None else verdict(dialect, field, level)
        if found is Fidelity.IMPOSSIBLE:
            to = dialect.name if level is None or rule.since is None else f"{dialect.name} (kubelet {span(level)})"
            raise UnsayableError(field, to, rule.advice)
        if found is Fidelity.DEGRADED and rule.since is None:  # A field that came later is always spelled.
            lost.add(field)
    return frozenset(lost)


@lru_cache(maxsize=64)
def sayable(dialect: Dialect, level: Level) -> Sayable:
    """Collect what can be said in ``dialect`` to a kubelet of ``level``, for a device source to choose from."""
    verdicts = {field: verdict(dialect, field, level) for field in Field}
    return Sayable(
        said=frozenset(field for field, found in verdicts.items() if found is Fidelity.LOSSLESS),
        unsure=frozenset(field for field, found in verdicts.items() if found is None),
    )
