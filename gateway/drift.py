"""Drift: where the kubelet's books and ours differ, as a pure state machine of one resource.

A kubelet that can't read its checkpoint (after some upgrades, a full disk, a deleted file) starts with empty books, and gives
devices away that running containers use. Nothing here may fail a pod for that: it is said, and ``steer`` keeps such devices
for last. Four things are noticed, each in words for a person:

- forgotten: held before a kubelet's start, and by its books no more. It ends when the device is held again (the books know
  better than we do), is listed no more, an operator says so, or after ``DRIFT_FOR`` (nothing ever tells when a container
  that the kubelet forgot has ended; a device kept for last too long costs next to nothing).
- unlisted: held, and not in our list.
- withheld, surplus: the kubelet would not give what we list as healthy; or would give what we don't.

The last three end with their cause. Clocks are values here, in monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from devices.model import Device, Health, PreferredRequest

if TYPE_CHECKING:
    from gateway.kubelet_view import View

DRIFT_FOR = 24 * 3600.0
"""How long a forgotten device is kept for last, in seconds: longer than most jobs last."""
ILL_FOR = 600.0
"""How long a device that was ill is kept for last once it is well again, in seconds: it may well be ill again soon."""
BOOKED_AFTER = 1.0
"""Seconds that a kubelet is given to book a list before its books are compared with it."""
REBOOKED_AFTER = 5.0
"""Seconds from a kubelet's start until its checkpoint is its own work: it writes it with the first list that it books."""


class Kind(Enum):
    """What differs. The values are what metrics and people call it."""

    FORGOTTEN = "forgotten"
    UNLISTED = "unlisted"
    WITHHELD = "withheld"
    SURPLUS = "surplus"


class Finding(Struct, frozen=True):
    """Something that differs: which devices (sorted), and what a person should know."""

    kind: Kind
    device_ids: tuple[str, ...]
    words: str


class Forgotten(Struct, frozen=True):
    """Who held a device before the kubelet's start, and when its books were first seen without it."""

    holder: str
    since: float


class Drift(Struct, frozen=True):
    """All that is remembered of one resource between two looks, and what differed at the last."""

    resource: str
    forgotten: Mapping[str, Forgotten] = field(default_factory=dict)
    _differs: tuple[Finding, ...] = ()
    """What differed at the last look, beside what was forgotten."""
    _listed: frozenset[str] = frozenset()
    _unwell: frozenset[str] = frozenset()
    """Those of the list that aren't healthy."""
    _ill: Mapping[str, float] = field(default_factory=dict)
    """When a device was last listed as unwell."""
    _to_book: float = 0.0
    """When a kubelet last got something to book: a list with other healthy devices, or, as a new kubelet, all of it."""
    _held: Mapping[str, str] = field(default_factory=dict)
    """The holders at the last look."""
    _before: Mapping[str, str] = field(default_factory=dict)
    """The holders before the kubelet's start, until its own books were seen."""
    _started: float = 0.0

    # Events.

    def listed(self, devices: Sequence[Device], now: float) -> Drift:
        """Take note of the list, as it is sent; the first one before the first look."""
        listed = frozenset(device.id for device in devices)
        unwell = frozenset(device.id for device in devices if device.health is not Health.HEALTHY)
        ill = {known: since for known, since in self._ill.items() if known in listed and now - since < ILL_FOR}
        # Also those that were unwell until now: it counts from here.
        ill |= dict.fromkeys((unwell | self._unwell) & listed, now)
        return replace(
            self,
            forgotten={device_id: known for device_id, known in self.forgotten.items() if device_id in listed},
            _listed=listed,
            _unwell=unwell,
            _ill=ill,
            _to_book=self._to_book if listed - unwell == self._listed - self._unwell else now,
        )

    def restarted(self, now: float) -> Drift:
        """Take note of a new kubelet: what was held at the last look is to be in its books, too."""
        return replace(self, _before={**self._before, **self._held}, _started=now, _to_book=now)

    def look(self, view: View, now: float, handed_out: AbstractSet[str] = frozenset()) -> Drift:
        """Compare what was seen of the kubelet's books with ours.

        Args:
            view: the kubelet's books, seen while it served our list.
            now: the clock.
            handed_out: the device IDs that Allocate gave out, as far as that is remembered: for the words only.
        """
        holders = view.holders(self.resource)
        before, forgotten = self._before, dict(self.forgotten)
        # Without the checkpoint a List says too little: after a start it has no pod that the kubelet hasn't heard of yet.
        if view.held is not None and view.remembered is not None:
            for device_id in before.keys() - holders.keys():
                forgotten.setdefault(device_id, Forgotten(before[device_id], now))
            before = {} if now - self._started >= REBOOKED_AFTER else before
        return replace(
            self,
            forgotten={
                device_id: known
                for device_id, known in forgotten.items()
                if device_id in self._listed and device_id not in holders and now - known.since < DRIFT_FOR
            },
            _differs=tuple(self._compared(view, now, handed_out)),
            _held=self._held if view.held is None else view.held.get(self.resource, {}),
            _before=before,
        )

    def forget(self, device_id: str) -> Drift:
        """Take note that an operator has looked after a device: nothing uses it that the kubelet doesn't know of."""
        return replace(
            self,
            forgotten={known: about for known, about in self.forgotten.items() if known != device_id},
            _before={held: holder for held, holder in self._before.items() if held != device_id},
        )

    # What follows.

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What differs, one finding of a kind."""
        if not self.forgotten:
            return self._differs
        holders = {device_id: f" (then held by {known.holder!r:.160})" for device_id, known in self.forgotten.items()}
        return (self._finding(Kind.FORGOTTEN, holders), *self._differs)

    def avoid(self, now: float) -> tuple[str, ...]:
        """Name the devices to be given last, the least bad ones first: ill of late, forgotten, not well."""
        bad = self._unwell.union(*(finding.device_ids for finding in self._differs if finding.kind is Kind.SURPLUS))
        forgotten = self.forgotten.keys() - bad
        ill = {device_id for device_id, since in self._ill.items() if now - since < ILL_FOR} - forgotten - bad
        return (*sorted(ill), *sorted(forgotten), *sorted(bad))

    def _compared(self, view: View, now: float, handed_out: AbstractSet[str]) -> Iterator[Finding]:
        held = (view.held or {}).get(self.resource, {})
        if unlisted := held.keys() - self._listed:
            by = {True: "given by this gateway", False: "not given by this gateway"}
            yield self._finding(
                Kind.UNLISTED,
                {
                    device_id: f" (held by {held[device_id]!r:.160}; {by[device_id in handed_out]})"
                    for device_id in unlisted
                },
            )
        if view.allocatable is None or now - self._to_book < BOOKED_AFTER:
            return
        healthy, allocatable = self._listed - self._unwell, view.allocatable.get(self.resource, frozenset())
        for kind, differing in ((Kind.WITHHELD, healthy - allocatable), (Kind.SURPLUS, allocatable - healthy)):
            if differing:
                yield self._finding(kind, dict.fromkeys(differing, ""))

    def _finding(self, kind: Kind, about: Mapping[str, str]) -> Finding:
        device_ids = tuple(sorted(about))
        some = [f"{device_id!r:.80}{about[device_id]}" for device_id in device_ids[:3]]
        rest = [f"{len(about) - 3} more"] if len(about) > 3 else []
        return Finding(kind, device_ids, _WORDS[kind].format(resource=self.resource, devices=", ".join([*some, *rest])))


_WORDS: Mapping[Kind, str] = {
    Kind.FORGOTTEN: (
        "the kubelet lost its memory of devices of {resource} that were held before its start: {devices}. A container that "
        "ran through it may still use them: see to those pods, then say `gateway forget`"
    ),
    Kind.UNLISTED: (
        "pods hold devices of {resource} that aren't in the list: {devices}. Bring them back into the configuration, or end "
        "those pods"
    ),
    Kind.WITHHELD: (
        "the kubelet would not give devices of {resource} that are listed as healthy: {devices}. If that stays, another "
        "plugin serves the resource, or the kubelet needs a restart"
    ),
    Kind.SURPLUS: (
        "the kubelet would give devices of {resource} that aren't listed as healthy: {devices}. If that stays, another "
        "plugin serves the resource, or the kubelet needs a restart"
    ),
}


def steer(request: PreferredRequest, avoid: Sequence[str]) -> PreferredRequest:
    """Keep devices for last: offer a source those that are not to be avoided, and of the others no more than it takes.

    ``avoid`` names the least bad ones first. The request can be met wherever it could be before: ``must_include`` stays,
    and so do enough devices.
    """
    if not avoid:
        return request
    available, must = frozenset(request.available), frozenset(request.must_include)
    kept = set(available.difference(avoid) | (available & must))
    others = [device_id for device_id in avoid if device_id in available and device_id not in must]
    kept.update(others[: max(0, request.size - len(kept))])
    return replace(request, available=tuple(device_id for device_id in request.available if device_id in kept))
