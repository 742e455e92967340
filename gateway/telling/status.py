"""The status document: what one gateway knows of itself, its kubelet and its devices, at one moment. Pure.

``gateway status`` prints it, the metrics are read from it, and the control socket answers with it; ``gateway.telling.gathered``
collects the facts. Fields are added, never removed. Times are ages in seconds (fields in ``_s``), by a clock that never jumps.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Literal

import msgspec

from adapters.dialect import Level, span
from devices import source
from devices.life import states
from devices.model import Health
from gateway import VERSION
from gateway.kubelet.drift import MismatchKind
from gateway.memory.rows import FileState
from gateway.registration.events import Phase
from gateway.telling.served import Verdict
from gateway.telling.sides import ByNameStatus, DriverStatus, SideStatus

if TYPE_CHECKING:
    from gateway.configuration.reload import FileFate
    from gateway.kubelet.drift import Finding
    from gateway.registration import machine as registration
    from gateway.tally import Confirmation, Tally

SCHEMA = 2
"""Rises when a field changes its meaning or goes away."""
FEW = 32
"""Most devices that a resource shows. If it has more, it shows those that need attention."""


# The document.


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of the gateway and of its libraries."""

    gateway: str
    python: str
    grpcio: str
    protobuf: str


class KubeletStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet. ``present``: its socket accepts connections; it was found ``age_s`` ago."""

    present: bool
    age_s: float | None = None


class RecordsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's records of which container holds which device: their source, and the age of the last read."""

    source: Literal["pod-resources", "checkpoint", "none"] = "none"
    age_s: float | None = None


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One device.

    ``health`` is what the gateway reports to the kubelet. ``state`` is one of ``devices.life.states``, and ``reason`` is why. ``kind`` is
    what ends its trouble. ``cause`` is a ``devices.model.LibraryFault`` if the driver's library can't be used. ``holder`` is the pod or
    claim that holds it (null: none, or the kubelet's records can't be read). ``by_claim`` is true if a ResourceClaim holds it. ``drift``
    lists the kinds of mismatch with the kubelet's records. ``stranger`` names another DRA driver that offers it on this node; then ours
    doesn't.
    """

    id: str
    health: str
    state: str
    kind: str = ""
    reason: str = ""
    numa: tuple[int, ...] = ()
    holder: str | None = None
    drift: tuple[str, ...] = ()
    stranger: str = ""
    cause: str = ""
    by_claim: bool = False


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices of a resource have this state and kind of trouble."""

    state: str
    kind: str
    devices: int


class MismatchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of mismatch with the kubelet's records: for how many devices, and what to do about it."""

    kind: str
    devices: int
    words: str


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One resource. ``behind`` is its plugin behind the bridge, null if it is the gateway's own.

    ``verdict`` is whether it is served: readiness, the node's condition, the metrics and ``gateway doctor`` read it. ``phase`` is
    that of its registration. ``api`` is the kubelet's API version, ``kubelets`` are the kubelet versions that fit the evidence.
    ``stream_s`` is the age of the kubelet's open stream, null without one. ``trouble`` is the last error of the registration,
    while it isn't served.

    ``registrations`` counts the accepted ones by cause, ``last_gap_s`` is the last restart gap, ``calls`` counts answered calls
    by name and status. ``checked`` is whether the kubelet's records had the registration when last read: held, lacking, unknown,
    or empty.

    ``listed`` counts the devices on the list, ``healthy`` the healthy ones. ``allocatable`` counts the devices that the kubelet
    can give by its records; if they can't be read, the healthy devices while they are served. ``held`` counts the listed devices
    with a holder, ``free`` the allocatable ones without; null if unknown. ``devices`` has all devices, or only those that need
    attention.
    """

    name: str
    phase: str
    verdict: Verdict = Verdict()
    api: str = ""
    kubelets: str = ""
    stream_s: float | None = None
    trouble: str = ""
    registrations: dict[str, int] = msgspec.field(default_factory=dict)
    last_gap_s: float | None = None
    calls: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    checked: str = ""
    listed: int = 0
    healthy: int = 0
    allocatable: int = 0
    held: int | None = None
    free: int | None = None
    states: tuple[Count, ...] = ()
    drift: tuple[MismatchStatus, ...] = ()
    behind: source.Behind | None = None
    devices: tuple[DeviceStatus, ...] = ()


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration file.

    It was last accepted ``accepted_s`` ago (null: never). ``error`` is why its content was rejected since then; the last accepted
    content stays in force.
    """

    path: str
    error: str = ""
    accepted_s: float | None = None


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway.

    ``host_service`` is true if it is the node's own service, not a pod. ``led_by`` is the token of the gateway that leads instead
    of it; ``led_by_host_service`` is true if that one is the node's own service. ``waits_for`` is what its start waits for,
    ``crossing`` why the node's annotation ``device-plugin-gateway.io/move-to`` isn't followed; both are usually empty. ``by_name``
    is what is wrong for pods that ask by resource name, ``lag_s`` the worst lag of its event loop in the last minute or two,
    ``list_strategies`` how containers get their GPUs. ``unusable`` are the GPUs that no resource lists. ``warnings`` are the
    settings that do nothing on this node.
    """

    schema: int = SCHEMA
    build: Build
    pid: int
    token: str
    host_service: bool = False
    uptime_s: float
    socket_dir: str
    led_by: str = ""
    led_by_host_service: bool = False
    waits_for: str = ""
    kubelet: KubeletStatus
    books: RecordsStatus
    ledger: FileState
    lag_s: float = 0.0
    hindrances: tuple[source.Hindrance, ...] = ()
    unusable: tuple[source.Unusable, ...] = ()
    warnings: tuple[str, ...] = ()
    configuration: Configuration | None = None
    list_strategies: tuple[str, ...] = ()
    drivers: tuple[DriverStatus, ...] = ()
    sides: tuple[SideStatus, ...] = ()
    crossing: str = ""
    by_name: ByNameStatus = ByNameStatus()
    resources: tuple[ResourceStatus, ...] = ()


class Gateways(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``gateway status --json``: every gateway of this node's state directory that answered.

    ``silent`` are the living gateways that did not answer, with the reason, by the path of their control socket.
    """

    gateways: tuple[GatewayStatus, ...] = ()
    silent: dict[str, str] = msgspec.field(default_factory=dict)


# The input. Moments are monotonic seconds.


class ResourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one resource."""

    name: str
    state: registration.State
    entries: Mapping[str, states.Entry]
    level: Level | None = None
    """The kubelet versions that fit the evidence, while a dialect is in use."""
    stream_since: float | None = None
    trouble: str = ""
    verdict: Verdict = Verdict()
    checked: Confirmation | None = None
    holders: Mapping[str, str] | None = None
    """The holders, by device ID; None: unknown."""
    claimed: AbstractSet[str] = frozenset()
    """The devices that are prepared for ResourceClaims."""
    drift: Sequence[Finding] = ()
    others: AbstractSet[str] = frozenset()
    """The devices that the kubelet would give although it has no stream of ours, because another plugin serves the resource."""
    behind: source.Behind | None = None
    strangers: Mapping[str, str] = {}
    """By device ID: another DRA driver that also offers the device, in words."""


def configuration(path: str, fate: FileFate, now: float) -> Configuration | None:
    """Return the status of the configuration file; None if there is none (an empty path)."""
    if not path:
        return None
    return Configuration(path=path, error=fate.error, accepted_s=age_or_none(fate.accepted_at, now))


@cache
def build() -> Build:
    """Return the versions of the gateway and its libraries."""
    from importlib import metadata  # noqa: PLC0415 - 0.7 MiB, needed only for the status

    return Build(
        gateway=VERSION,
        python=platform.python_version(),
        grpcio=metadata.version("grpcio"),
        protobuf=metadata.version("protobuf"),
    )


def resource(facts: ResourceFacts, tally: Tally, now: float, *, few: bool = False) -> ResourceStatus:
    """Return the status of a resource at ``now`` (monotonic seconds), with a row for each device, or for a ``few`` of them.

    A thread may call it while the event loop changes the tally.
    """
    serving = facts.state.phase is Phase.SERVING
    entries = facts.entries
    states = Counter((entry.state.value, _kind(entry)) for entry in entries.values())
    healthy = {device_id for device_id, entry in entries.items() if entry.device.health is Health.HEALTHY}
    given = _corrected(healthy, facts.drift) if serving else facts.others
    holders = facts.holders
    calls: dict[str, dict[str, int]] = {}
    for (name, call, code), count in tuple(tally.calls.items()):
        if name == facts.name:
            calls.setdefault(call, {})[code] = count
    return ResourceStatus(
        name=facts.name,
        phase=facts.state.phase.value,
        verdict=facts.verdict,
        api=facts.state.dialect,
        kubelets=span(facts.level) if facts.level is not None else "",
        stream_s=age_or_none(facts.stream_since, now),
        trouble="" if serving else facts.trouble,
        registrations={why: count for (name, why), count in tuple(tally.registrations.items()) if name == facts.name},
        last_gap_s=tally.last_gaps.get(facts.name),
        calls=calls,
        checked=facts.checked.value if facts.checked is not None else "",
        listed=len(entries),
        healthy=len(healthy),
        allocatable=len(given),
        held=None if holders is None else len(holders.keys() & entries.keys()),
        free=None if holders is None else len(given - holders.keys()),
        states=tuple(Count(state=state, kind=kind, devices=count) for (state, kind), count in sorted(states.items())),
        drift=tuple(
            MismatchStatus(kind=finding.kind.value, devices=len(finding.device_ids), words=finding.words)
            for finding in facts.drift
        ),
        behind=facts.behind,
        devices=_devices(facts, few=few),
    )


def _corrected(healthy: AbstractSet[str], drift: Iterable[Finding]) -> AbstractSet[str]:
    """Return the devices that the kubelet can give: our healthy ones, corrected by the mismatches with its records."""
    by_kind = {finding.kind: finding.device_ids for finding in drift}
    return (healthy - {*by_kind.get(MismatchKind.WITHHELD, ())}) | {*by_kind.get(MismatchKind.SURPLUS, ())}


def _devices(facts: ResourceFacts, *, few: bool) -> tuple[DeviceStatus, ...]:
    drift: dict[str, tuple[str, ...]] = {}
    for finding in facts.drift:
        for id_ in finding.device_ids:
            drift[id_] = (*drift.get(id_, ()), finding.kind.value)
    holders, shown = facts.holders or {}, iter(facts.entries.items())
    if few and len(facts.entries) > FEW:
        said = drift.keys() | facts.strangers.keys()
        shown = islice(((id_, one) for id_, one in shown if one.reason or id_ in said or not _is_well(one)), FEW)
    return tuple(
        DeviceStatus(
            id=id_,
            health=entry.device.health.value,
            state=entry.state.value,
            kind=_kind(entry),
            reason=entry.reason,
            numa=entry.device.numa_nodes,
            holder=holders.get(id_),
            drift=drift.get(id_, ()),
            stranger=facts.strangers.get(id_, ""),
            cause=entry.cause,
            by_claim=id_ in facts.claimed,
        )
        for id_, entry in shown
    )


def _is_well(entry: states.Entry) -> bool:
    return entry.state is states.State.PRESENT and entry.kind is None


def _kind(entry: states.Entry) -> str:
    return "" if entry.kind is None else entry.kind.value


def age(moment: float, now: float) -> float:
    """Return how many seconds ago a moment was."""
    return round(max(0.0, now - moment), 3)


def age_or_none(moment: float | None, now: float) -> float | None:
    """Return how many seconds ago a moment was; None for None."""
    return None if moment is None else age(moment, now)
