"""Find differences between the kubelet's records and ours: a pure state machine of one resource.

This module fails no pod because of a difference. It reports it, and ``steer`` gives such devices last. The kinds of
differences, each with a sentence for people:

- forgotten: held before a kubelet's start, and no longer in its records (``earlier``).
- doubled: forgotten, and given to another pod since, so perhaps two pods have it. (Not for replicas, which share their GPU
  anyway.)
- unlisted: held, and not in our list.
- withheld: in our list as healthy, and not allocatable. Surplus: allocatable, and not in our list as healthy.

Each ends with its cause. Times are arguments, in monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from devices.model import Device, Health, PreferredRequest
from devices.replicas import is_replica
from gateway.kubelet import earlier

if TYPE_CHECKING:
    from gateway.kubelet.earlier import HandedOut, Rows
    from gateway.kubelet.records import Records

RECORDED_AFTER = 1.0
"""Seconds that a kubelet may take to record a list. After that, its records are compared."""
ILL_FOR = 600.0
"""Seconds for which a device is given last after it became healthy again: it may soon be unhealthy again."""


class MismatchKind(Enum):
    """The kinds of differences. The values are their names in metrics and for people."""

    FORGOTTEN = "forgotten"
    DOUBLED = "doubled"
    UNLISTED = "unlisted"
    WITHHELD = "withheld"
    SURPLUS = "surplus"


class Finding(Struct, frozen=True):
    """A difference: its devices (sorted), and a sentence for people."""

    kind: MismatchKind
    device_ids: tuple[str, ...]
    words: str


class Drift(Struct, frozen=True):
    """How a resource's list differs from what the last look showed."""

    resource: str
    differs: tuple[Finding, ...] = ()
    """The differences that the last look found, except forgotten devices."""
    _listed: frozenset[str] | None = None
    """The devices of the list; None: no list was sent, so nothing is compared."""
    _unwell: frozenset[str] = frozenset()
    """The unhealthy devices of the list."""
    _ill: Mapping[str, float] = field(default_factory=dict)
    """When each device was last listed as unhealthy."""
    _to_record: float = 0.0
    """When the kubelet last got something to record: its first list, or one with other healthy devices."""

    # Events.

    def listed(self, devices: Sequence[Device], now: float) -> Drift:
        """Note a list that is being sent. The first list comes before the first look."""
        listed = frozenset(device.id for device in devices)
        unwell = frozenset(device.id for device in devices if device.health is not Health.HEALTHY)
        ill = {known: since for known, since in self._ill.items() if known in listed and now - since < ILL_FOR}
        # Also for devices that were unhealthy until now.
        ill |= dict.fromkeys((unwell | self._unwell) & listed, now)
        return replace(
            self,
            _listed=listed,
            _unwell=unwell,
            _ill=ill,
            _to_record=self._to_record if listed - unwell == (self._listed or frozenset()) - self._unwell else now,
        )

    def restarted(self, now: float) -> Drift:
        """Note a new kubelet, which has to record our list."""
        return replace(self, _to_record=now)

    def looked(self, records: Records, now: float, *, ours: bool = True) -> Drift:
        """Compare the kubelet's records with our list.

        Args:
            records: the kubelet's records, read while it had our list.
            now: when the look began.
            ours: True if the kubelet has this gateway's list. Another gateway's list is not compared.
        """
        return replace(self, differs=tuple(self._compared(records, now)) if ours else ())

    # Results.

    def avoid(self, now: float, forgotten: AbstractSet[str]) -> tuple[str, ...]:
        """Return the devices to give last, the least bad ones first: lately unhealthy, perhaps forgotten, unhealthy."""
        bad = self._unwell.union(
            *(finding.device_ids for finding in self.differs if finding.kind is MismatchKind.SURPLUS)
        )
        doubtful = forgotten - bad
        ill = {device_id for device_id, since in self._ill.items() if now - since < ILL_FOR} - doubtful - bad
        return (*sorted(ill), *sorted(doubtful), *sorted(bad))

    def _compared(self, records: Records, now: float) -> Iterator[Finding]:
        if self._listed is None:
            return
        held = (records.held or {}).get(self.resource, {})
        if unlisted := held.keys() - self._listed:
            yield _finding(self.resource, MismatchKind.UNLISTED, unlisted, lambda one: f" (held by {held[one]!r:.160})")
        if records.allocatable is None or now - self._to_record < RECORDED_AFTER:
            return
        healthy, allocatable = self._listed - self._unwell, records.allocatable.get(self.resource, frozenset())
        for kind, differing in (
            (MismatchKind.WITHHELD, healthy - allocatable),
            (MismatchKind.SURPLUS, allocatable - healthy),
        ):
            if differing:
                yield _finding(self.resource, kind, differing, lambda _: "")


def forgotten(
    resource: str, rows: Rows, given: Mapping[str, HandedOut], holders: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the findings about devices that the kubelet forgot.

    Args:
        resource: the resource name.
        rows: the earlier holders of its devices.
        given: the devices that are held, and since when.
        holders: the holders by the kubelet's records.
    """
    lost = earlier.forgotten(rows)
    twice = {one: now for one, now in earlier.doubled(lost, given, holders).items() if not is_replica(one)}
    if twice:
        yield _finding(
            resource,
            MismatchKind.DOUBLED,
            twice,
            lambda one: f" ({earlier.words(lost[one])} before a kubelet's start, {twice[one]} since)",
        )
    if once := lost.keys() - twice:
        yield _finding(
            resource, MismatchKind.FORGOTTEN, once, lambda one: f" (then held by {earlier.words(lost[one])})"
        )


def _finding(resource: str, kind: MismatchKind, differing: Iterable[str], about: Callable[[str], str]) -> Finding:
    device_ids = tuple(sorted(differing))
    some = [f"{device_id!r:.80}{about(device_id)}" for device_id in device_ids[:3]]
    rest = [f"{len(device_ids) - 3} more"] if len(device_ids) > 3 else []
    return Finding(kind, device_ids, _WORDS[kind].format(resource=resource, devices=", ".join([*some, *rest])))


_WORDS: Mapping[MismatchKind, str] = {
    MismatchKind.FORGOTTEN: (
        "the kubelet lost its memory of devices of {resource} that were held before its start: {devices}. Containers that "
        "ran then may still use them: end those pods, then run `gateway forget ID` for each device"
    ),
    MismatchKind.DOUBLED: (
        "devices of {resource} are perhaps in two pods at once: {devices}. The kubelet lost its memory of who held them, and gave "
        "them away again: end one of the pods, then run `gateway forget ID` for each device"
    ),
    MismatchKind.UNLISTED: (
        "pods hold devices of {resource} that aren't in the list: {devices}. Bring them back into the configuration, or end "
        "those pods"
    ),
    MismatchKind.WITHHELD: (
        "the kubelet would not give devices of {resource} that are listed as healthy: {devices}. If that stays, another "
        "plugin serves the resource, or the kubelet needs a restart"
    ),
    MismatchKind.SURPLUS: (
        "the kubelet would give devices of {resource} that aren't listed as healthy: {devices}. If that stays, another "
        "plugin serves the resource, or the kubelet needs a restart"
    ),
}


def steer(request: PreferredRequest, avoid: Sequence[str]) -> PreferredRequest:
    """Return the request without the devices to avoid, if enough others are available.

    If not, the first of ``avoid``, which are the least bad, fill it up. ``must_include`` stays.
    """
    if not avoid:
        return request
    available, must = frozenset(request.available), frozenset(request.must_include)
    kept = set(available.difference(avoid) | (available & must))
    others = [device_id for device_id in avoid if device_id in available and device_id not in must]
    kept.update(others[: max(0, request.size - len(kept))])
    return replace(request, available=tuple(device_id for device_id in request.available if device_id in kept))
