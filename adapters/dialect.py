"""A dialect: a version string, two gRPC services, an encoding of each message, and what it can't carry.

A dialect only encodes and decodes. It works in both directions, because the gateway is a device plugin for the kubelet,
and a kubelet for other plugins. Each ``Field`` of the model has a ``Fidelity``, which declares whether the dialect can carry it.
For a dialect that got new fields over time (v1beta1: kubelet 1.10 to today), a rule also has the kubelet version from which it
is in force. ``docs/dialects.md`` is generated from these rules.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    Field,
    Options,
    PreferredRequest,
    Registration,
    Sendable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from google.protobuf.descriptor import FileDescriptor


class Fidelity(Enum):
    """What happens to a field in a dialect."""

    LOSSLESS = "lossless"
    """The field arrives unchanged."""
    DEGRADED = "degraded"
    """It is dropped, because the pod works without it. Counted, and logged once."""
    IMPOSSIBLE = "impossible"
    """The request is refused, because the pod would start without its device."""


class Rule(Struct, frozen=True):
    """``verdict`` is in force for kubelet 1.``since`` and later (None: for all that speak the dialect), ``before`` for earlier ones."""

    verdict: Fidelity
    since: int | None = None
    before: Fidelity = Fidelity.IMPOSSIBLE
    source: str = ""
    """Where the rule comes from: a Kubernetes issue, a feature gate, a kubelet version that was run."""
    advice: str = ""
    """What to do if it is impossible."""


class Level(Struct, frozen=True):
    """The kubelet minor versions (1.``low`` to 1.``high``, both included) that fit the evidence of a connection.

    ``high`` None: there is no upper limit.
    """

    low: int
    high: int | None = None

    def reaches(self, minor: int) -> bool | None:
        """Return True if the kubelet is 1.``minor`` or later; None if the evidence leaves it open."""
        if self.low >= minor:
            return True
        if self.high is not None and self.high < minor:
            return False
        return None


def span(level: Level) -> str:
    """Return a level in words, such as ``1.26 to 1.28``."""
    if level.high is None:
        return f"1.{level.low} and later"
    return f"1.{level.low}" if level.high == level.low else f"1.{level.low} to 1.{level.high}"


class Wire(Struct, frozen=True):
    """An encoded message, and the fields that were dropped from it (all of them ``DEGRADED``)."""

    data: bytes
    lost: frozenset[Field] = frozenset()


class UnsayableError(Exception):
    """The message would be harmful without a field that the dialect (at this level) can't carry."""

    def __init__(self, field: Field, dialect: str, advice: str) -> None:
        super().__init__(f"{field.value} cannot be said to a kubelet that speaks {dialect}: {advice}")
        self.field = field
        self.dialect = dialect


class MalformedError(Exception):
    """The bytes are not the expected message. The error's text names it."""


class Dialect(Protocol):
    """One encoding. ``encode_*`` may raise ``UnsayableError``; ``decode_*`` raise ``MalformedError``."""

    name: str
    """The version string of Register, and the dialect's name: ``v1beta1``, ``v1alpha2``, ``0.1``."""
    family: str
    """The common name of versions that differ in a message or two: ``v1alpha`` for both alphas."""
    registration_service: str
    """Full gRPC service name on kubelet.sock, such as ``v1beta1.Registration``."""
    plugin_service: str
    """Full gRPC service name on the plugin's socket, such as ``v1beta1.DevicePlugin``."""
    kubelets: Level
    """The kubelets that speak it."""
    rules: Mapping[Field, Rule]
    """What happens to each field; every ``Field`` has a row."""
    spacing: float = 0.0
    """Fewest seconds between two lists or answers to Allocate, of any resource; 0: no limit. If not 0, the kubelet writes its
    checkpoint in place without a lock. Then the next list also waits until the checkpoint has the last one."""
    asks_again: bool = False
    """True if the kubelet calls Allocate again for the same devices each time a container with them starts (only 1.8)."""
    writes_late: bool = False
    """True if the kubelet has no checkpoint before the first container with devices starts (only 1.8). Until then, only devices
    given by Allocate are held."""
    names_itself: bool = True
    """True if the kubelet's refusal of another version has its own version (all but 1.8)."""
    schema: FileDescriptor
    """The messages and services generated from ``protos/``."""

    def __hash__(self) -> int:
        return id(self)

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
        """Encode the answers, one per container of the request (dialect 0.1 repeats the request's device IDs)."""

    def decode_allocate_answer(self, data: bytes) -> tuple[ContainerAnswer, ...]: ...
    def encode_preferred_request(self, containers: Sequence[PreferredRequest]) -> Wire: ...
    def decode_preferred_request(self, data: bytes) -> tuple[PreferredRequest, ...]: ...
    def encode_preferred_answer(self, containers: Sequence[Sequence[str]]) -> Wire: ...
    def decode_preferred_answer(self, data: bytes) -> tuple[tuple[str, ...], ...]: ...
    def encode_pre_start_request(self, device_ids: Sequence[str]) -> Wire: ...
    def decode_pre_start_request(self, data: bytes) -> tuple[str, ...]: ...


def verdict(dialect: Dialect, field: Field, level: Level) -> Fidelity | None:
    """Return what happens to ``field`` at ``level``; None if the level leaves it open."""
    rule = dialect.rules[field]
    if rule.since is None:
        return rule.verdict
    reached = level.reaches(rule.since)
    if reached is None:
        return None
    return rule.verdict if reached else rule.before


@lru_cache(maxsize=256)
def left_out(dialect: Dialect, used: tuple[Field, ...], level: Level | None = None) -> frozenset[Field]:
    """Return the fields of a message that ``dialect`` drops.

    Args:
        dialect: the message's dialect.
        used: the fields that the message uses (``of_registration`` and the other functions below).
        level: the kubelets that may be at the other end; None: the newest that speak the dialect.

    Raises:
        UnsayableError: the message would be harmful without one of them.
    """
    lost = set()
    for field in used:
        rule = dialect.rules[field]
        found = rule.verdict if level is None else verdict(dialect, field, level)
        if found is Fidelity.IMPOSSIBLE:
            to = dialect.name if level is None or rule.since is None else f"{dialect.name} (kubelet {span(level)})"
            raise UnsayableError(field, to, rule.advice)
        if found is Fidelity.DEGRADED and rule.since is None:  # A field that came later is always encoded.
            lost.add(field)
    return frozenset(lost)


@lru_cache(maxsize=64)
def sendable(dialect: Dialect, level: Level) -> Sendable:
    """Return the fields that ``dialect`` carries to a kubelet of ``level``, for a device source."""
    verdicts = {field: verdict(dialect, field, level) for field in Field}
    return Sendable(
        certain=frozenset(field for field, found in verdicts.items() if found is Fidelity.LOSSLESS),
        unsure=frozenset(field for field, found in verdicts.items() if found is None),
    )


# The parts of the model that a message uses: one function per kind of message, the same for every dialect.

_OF_ANSWERS: Final = {
    Field.ENVS: "envs",
    Field.MOUNTS: "mounts",
    Field.DEVICE_NODES: "device_nodes",
    Field.ANNOTATIONS: "annotations",
    Field.CDI_DEVICES: "cdi_devices",
}


def of_registration(registration: Registration) -> tuple[Field, ...]:
    """Return the fields that Register uses."""
    return _of(registration.options, Field.OPTIONS)


def of_options(options: Options) -> tuple[Field, ...]:
    """Return the fields that the answer of GetDevicePluginOptions uses."""
    return _of(options, Field.GET_OPTIONS)


def of_list(devices: Iterable[Device]) -> tuple[Field, ...]:
    """Return the fields that a list uses."""
    return (Field.TOPOLOGY,) if any(device.numa_nodes for device in devices) else ()


def of_allocate(containers: Sequence[object], answers: Iterable[ContainerAnswer] = ()) -> tuple[Field, ...]:
    """Return the fields that Allocate uses, in its request or its answer."""
    several = [Field.SEVERAL_CONTAINERS] if len(containers) != 1 else []
    return (*several, *(field for answer in answers for field, name in _OF_ANSWERS.items() if getattr(answer, name)))


def of_preferred(containers: Sequence[object]) -> tuple[Field, ...]:
    """Return the fields that GetPreferredAllocation uses, in its request or its answer."""
    return (Field.PREFERRED_ALLOCATION,) if containers else ()


def _of(options: Options, said_in: Field) -> tuple[Field, ...]:
    used = {
        Field.PRE_START: options.pre_start_required,
        Field.PREFERRED_ALLOCATION: options.preferred_allocation,
        said_in: options != Options(),
    }
    return tuple(field for field, is_used in used.items() if is_used)
