"""Find differences between the kubelet's records and ours: a pure state machine of one resource.

A kubelet that can't read its checkpoint (after some upgrades, a full disk, a deleted file) starts with empty records,
and gives devices that running containers use. This module fails no pod for that. It reports the difference, and
``steer`` gives such devices last. The kinds of differences, each with a sentence for people:

- forgotten: held before a kubelet's start, and no longer in its records.
- doubled: forgotten, and given to another pod since, so perhaps two pods have it. (Not for replicas, which share their GPU
  anyway.)
- unlisted: held, and not in our list.
- withheld: in our list as healthy, and not allocatable. Surplus: allocatable, and not in our list as healthy.

A device stays forgotten until the pod that held it is gone, the records name that pod again, or an operator clears it. It does
not end when another pod gets the device. The other kinds end with their cause. Times are arguments, in monotonic seconds unless
their name says unix.

List names every pod that the kubelet knows, with or without devices, so it shows when a pod is gone. One absence proves
nothing: a kubelet that has just started, or can't reach the API server, knows only its static pods. So a pod is gone if a List
lacks it for ``GONE_AFTER`` seconds, and that kubelet had heard from the API server (``_has_api_server_pods``) or had named the pod before.
Without List, only the node's reboot shows that a pod is gone. No device stays forgotten over a reboot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field
from msgspec.structs import replace

from devices.model import Device, Health, PreferredRequest
from devices.replicas import is_replica

if TYPE_CHECKING:
    from gateway.kubelet.view import View

ILL_FOR = 600.0
"""Seconds for which a device is given last after it became healthy again: it may soon be unhealthy again."""
RECORDED_AFTER = 1.0
"""Seconds that a kubelet may take to record a list or an Allocate. After that, its records are compared."""
WRITTEN_AFTER = 5.0
"""Seconds after a kubelet's start until it has written its own checkpoint, with the first list that it records."""
GONE_AFTER = 30.0
"""Seconds for which List must lack a pod until it is gone: after a forced deletion its containers run for the rest of their
grace period."""
_LATEST: Final = 2.0**32
"""The largest Unix time that every calendar can show."""
MOST_EARLIER: Final = 8
"""Most earlier holders of one device that are kept by name."""


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


class Earlier(Struct, frozen=True):
    """A holder of a device before a kubelet's start: its known names (``View.names_of``), and when they were read last.

    ``names`` is empty if the device had just been given and no look had shown its holder. ``at`` is in Unix seconds.
    """

    names: tuple[str, ...]
    at: float

    @property
    def pods(self) -> frozenset[str]:
        """The holder's pod, by each of its names: ``namespace/pod``, or the pod's UID."""
        return frozenset(name.rpartition("/")[0] for name in self.names)

    @property
    def words(self) -> str:
        """The holder's name for people."""
        if self.names:
            return f"{self.names[0]!r:.160}"
        at = min(max(self.at, 0.0), _LATEST)  # A damaged state file may have any number.
        return f"a pod that was given it at {time.strftime('%H:%M:%S', time.gmtime(at))} UTC"


class Drift(Struct, frozen=True):
    """What is known of one resource after a look, and the differences that it found."""

    resource: str
    forgotten: Mapping[str, tuple[Earlier, ...]] = field(default_factory=dict)
    """The holders that the kubelet forgot, by device ID; kept until the node reboots."""
    _differs: tuple[Finding, ...] = ()
    """The differences that the last look found, except forgotten devices."""
    _listed: frozenset[str] | None = None
    """The devices of the list; None: no list was sent, so nothing is compared."""
    _unwell: frozenset[str] = frozenset()
    """The unhealthy devices of the list."""
    _ill: Mapping[str, float] = field(default_factory=dict)
    """When each device was last listed as unhealthy."""
    _to_record: float = 0.0
    """When the kubelet last got something to record: its first list, or one with other healthy devices."""
    _seen: View | None = None
    """The last look that found holders."""
    _seen_at: float = 0.0
    """When that look began (Unix seconds)."""
    _given: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Devices that this kubelet's Allocate gave and no look can have shown yet, and when (monotonic and Unix seconds)."""
    _before: Mapping[str, Earlier] = field(default_factory=dict)
    """The holders before the kubelet's start, until its own records were seen."""
    older: frozenset[str] = frozenset()
    """Devices of ``_before`` that were already in question when the earlier kubelet ended."""
    _started: float = 0.0
    _since: float = 0.0
    """When the kubelet's socket was created (Unix seconds); 0: unknown."""
    _named: frozenset[str] = frozenset()
    """The pods in question that a List of this kubelet named."""
    _absent: Mapping[str, float] = field(default_factory=dict)
    """The pods in question that its List should name and doesn't, and since when."""

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

    def restarted(self, now: float, since: float = math.inf) -> Drift:
        """Note a new kubelet: its records should have the devices that were held at the last look, or given since.

        Args:
            now: monotonic seconds.
            since: when its socket was created, in Unix seconds (infinite: unknown). Later looks show this kubelet's own
                records.
        """
        seen, held = self._seen, {}
        if seen is not None and self._since <= self._seen_at < since:
            held = {
                device_id: Earlier(seen.names_of(self.resource, device_id), self._seen_at)
                for device_id in (seen.held or {}).get(self.resource, {})
            }
        given = {
            device_id: Earlier((), unix)
            for device_id, (_, unix) in self._given.items()
            if unix >= self._seen_at or device_id not in held
        }
        return replace(
            self,
            _before={**self._before, **held, **given},
            older=frozenset(self._before.keys() - held.keys() - given.keys()),
            _given={},
            _started=now,
            _since=since if since < math.inf else 0.0,
            _to_record=now,
            _named=frozenset(),
            _absent={},
        )

    def is_in(self, written: Mapping[str, str], *, older: bool) -> bool:
        """Return True if a checkpoint still names an earlier holder whose device Allocate has not given again.

        ``older``: consider only the holders that were already in question when the earlier kubelet ended.
        """
        return any(
            _may_be(one, written[device_id])
            for device_id, one in self._before.items()
            if device_id in written and device_id not in self._given and (device_id in self.older or not older)
        )

    def note_first_checkpoint(self, written: Mapping[str, str]) -> Drift:
        """Note the checkpoint that the kubelet found at its start: a holder that it lacks has ended, or never ran.

        A container starts only after the checkpoint that names it was written.
        """
        before = {
            device_id: replace(one, names=_names_with(one, written[device_id]))
            for device_id, one in self._before.items()
            if device_id in written
        }
        return replace(self, _before=before, older=frozenset())

    def note_records_kept(self) -> Drift:
        """Note that the kubelet kept its predecessor's records: a holder that they lack now has ended."""
        return replace(self, _before={}, older=frozenset())

    def load_saved(self, forgotten: Mapping[str, tuple[Earlier, ...]], before: Mapping[str, Earlier]) -> Drift:
        """Take over what another process knew: forgotten holders, and holders from before the running kubelet's start."""
        ours = {**self._before}
        for one in before.keys() & ours.keys():
            if ours[one].names and not _are_named(
                ours[one].names
            ):  # It has only a UID, because no later List names its pod.
                ours[one] = replace(ours[one], names=(*before[one].names, *ours[one].names))
        return replace(self, forgotten=dict(forgotten), _before={**before, **ours})

    def allocated(self, device_ids: Iterable[str], now: float, unix: float) -> Drift:
        """Note an answered Allocate: a container holds these devices, whatever the last look showed."""
        return replace(self, _given={**self._given, **dict.fromkeys(device_ids, (now, unix))})

    def look(self, view: View, now: float, unix: float = 0.0, *, ours: bool = True) -> Drift:
        """Compare the kubelet's records with ours.

        Args:
            view: the kubelet's records, read while it had our list.
            now: when the look began.
            unix: the same in Unix seconds.
            ours: True if the kubelet has this gateway's list. Another gateway's list is not compared.
        """
        return self._with_pods(view, now)._judged(view, now, unix, ours=ours)  # noqa: SLF001 - another value of this class

    def forget(self, device_id: str) -> Drift:
        """Note that an operator cleared a device: only holders that the kubelet knows use it."""
        return replace(
            self,
            forgotten={known: about for known, about in self.forgotten.items() if known != device_id},
            _before={held: holder for held, holder in self._before.items() if held != device_id},
        )

    # Results.

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The differences, one finding per kind."""
        if not self.forgotten:
            return self._differs
        holders = self._seen.holders(self.resource) if self._seen is not None else {}
        lost: dict[str, str] = {}
        doubled: dict[str, str] = {}
        for device_id, earlier in self.forgotten.items():
            who = _who(earlier)
            if not is_replica(device_id) and (device_id in holders or device_id in self._given):
                now = f"{holders[device_id]!r:.160}" if device_id in holders else "a pod that was given it just now"
                doubled[device_id] = f" ({who} before a kubelet's start, {now} since)"
            else:
                lost[device_id] = f" (then held by {who})"
        about = ((MismatchKind.DOUBLED, doubled), (MismatchKind.FORGOTTEN, lost))
        return (
            *(self._finding(kind, devices, devices.__getitem__) for kind, devices in about if devices),
            *self._differs,
        )

    @property
    def in_question(self) -> AbstractSet[str]:
        """The devices that were held before the kubelet's start, until its own records show if they still are."""
        return self._before.keys()

    @property
    def waits(self) -> bool:
        """True if later looks may show whether a pod of an earlier kubelet is gone."""
        return bool(self.forgotten or self._before)

    @property
    def earlier(self) -> dict[str, str]:
        """The earlier kubelet's pods that may still use a device, for people, by device ID."""
        return {
            **{device_id: one.words for device_id, one in self._before.items()},
            **{device_id: _who(earlier) for device_id, earlier in self.forgotten.items()},
        }

    def avoid(self, now: float) -> tuple[str, ...]:
        """Return the devices to give last, the least bad ones first: lately unhealthy, perhaps forgotten, unhealthy."""
        bad = self._unwell.union(
            *(finding.device_ids for finding in self._differs if finding.kind is MismatchKind.SURPLUS)
        )
        # Until the kubelet's records are seen, it may have forgotten any device that was held before its start.
        forgotten = (self.forgotten.keys() | self._before.keys()) - bad
        ill = {device_id for device_id, since in self._ill.items() if now - since < ILL_FOR} - forgotten - bad
        return (*sorted(ill), *sorted(forgotten), *sorted(bad))

    # Judging a look.

    def _with_pods(self, view: View, now: float) -> Drift:
        if view.pods is None:
            return self
        question = frozenset(pod for one in self._before.values() for pod in one.pods).union(
            *(one.pods for earlier in self.forgotten.values() for one in earlier)
        )
        named = question & (self._named | view.pods)
        heard = _has_api_server_pods(view.pods)
        absent = {
            pod: self._absent.get(pod, now) for pod in question - view.pods if "/" in pod and (heard or pod in named)
        }
        return replace(self, _named=named, _absent=absent)

    def _judged(self, view: View, now: float, unix: float, *, ours: bool) -> Drift:
        before, forgotten = self._compared_with_before(view, now)
        left = {device_id: self._left(device_id, earlier, view, now) for device_id, earlier in forgotten.items()}
        known = view.held is not None
        return replace(
            self,
            forgotten={device_id: earlier for device_id, earlier in left.items() if earlier},
            _differs=tuple(self._compared(view, now)) if ours else (),
            _seen=view if known else self._seen,
            _seen_at=unix if known else self._seen_at,
            _given={
                device_id: at
                for device_id, at in self._given.items()
                if not known or now - at[0] < RECORDED_AFTER or device_id in before
            },
            _before=before,
        )

    def _compared_with_before(
        self, view: View, now: float
    ) -> tuple[Mapping[str, Earlier], Mapping[str, tuple[Earlier, ...]]]:
        """Return the holders from before the kubelet's start that are still in question, and the holders that it forgot."""
        # Both the checkpoint and List are needed: after a start, List lacks pods that the kubelet hasn't heard of yet.
        if not self._before or view.held is None or view.written is None:
            return self._before, self.forgotten
        left, forgotten = {}, dict(self.forgotten)
        settled = now - self._started >= WRITTEN_AFTER
        holders = view.holders(self.resource)
        for device_id, earlier in self._before.items():
            # The kubelet remembers a device that is held and was not given since its start. Then the holder that our last look
            # found has ended.
            if device_id in holders and (device_id not in self._given or self._is_held_by(device_id, earlier, view)):
                if not settled:
                    left[device_id] = earlier
            # The pod has ended if it stays absent.
            elif earlier.pods & self._absent.keys():
                if not self._is_gone(earlier, view, now):
                    left[device_id] = earlier
            elif device_id in self._given and device_id not in holders:
                left[device_id] = earlier  # The kubelet hasn't recorded it yet.
            else:
                forgotten[device_id] = _add_holder(forgotten.get(device_id, ()), earlier)
        return left, forgotten

    def _left(self, device_id: str, earlier: Sequence[Earlier], view: View, now: float) -> tuple[Earlier, ...]:
        """Return the forgotten holders that may still use a device."""
        return tuple(
            one for one in earlier if not self._is_held_by(device_id, one, view) and not self._is_gone(one, view, now)
        )

    def _is_held_by(self, device_id: str, earlier: Earlier, view: View) -> bool:
        """Return True if the records name an earlier holder's pod for a device (a pod has several containers)."""
        names = view.names_of(self.resource, device_id)
        if _are_named(names) and _are_named(earlier.names):
            names = names[:1]  # List is newer than the checkpoint.
        return any(name.rpartition("/")[0] in earlier.pods for name in names)

    def _is_gone(self, earlier: Earlier, view: View, now: float) -> bool:
        return view.pods is not None and any(now - self._absent.get(pod, now) >= GONE_AFTER for pod in earlier.pods)

    def _compared(self, view: View, now: float) -> Iterator[Finding]:
        if self._listed is None:
            return
        held = (view.held or {}).get(self.resource, {})
        if unlisted := held.keys() - self._listed:
            yield self._finding(MismatchKind.UNLISTED, unlisted, lambda one: f" (held by {held[one]!r:.160})")
        if view.allocatable is None or now - self._to_record < RECORDED_AFTER:
            return
        healthy, allocatable = self._listed - self._unwell, view.allocatable.get(self.resource, frozenset())
        for kind, differing in (
            (MismatchKind.WITHHELD, healthy - allocatable),
            (MismatchKind.SURPLUS, allocatable - healthy),
        ):
            if differing:
                yield self._finding(kind, differing, lambda _: "")

    def _finding(self, kind: MismatchKind, differing: Iterable[str], about: Callable[[str], str]) -> Finding:
        device_ids = tuple(sorted(differing))
        some = [f"{device_id!r:.80}{about(device_id)}" for device_id in device_ids[:3]]
        rest = [f"{len(device_ids) - 3} more"] if len(device_ids) > 3 else []
        return Finding(kind, device_ids, _WORDS[kind].format(resource=self.resource, devices=", ".join([*some, *rest])))


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


def _has_api_server_pods(pods: AbstractSet[str]) -> bool:
    """Return True if pods (``namespace/pod``) show that the kubelet has heard from the API server: they can't all be static.

    A static pod's name is ``<name>-<node's name>`` (applyDefaults in pkg/kubelet/config/common.go), so all static pods of a
    node have the same last part. The API server's pods reach the device manager together, with the first answer.
    """
    return len({pod.rpartition("/")[2].rpartition("-")[2] for pod in pods}) > 1


def _are_named(names: Sequence[str]) -> bool:
    """Return True if the first of a holder's names comes from List (``namespace/pod/container``)."""
    return bool(names) and names[0].count("/") > 1


def _may_be(one: Earlier, written: str) -> bool:
    """Return True if a holder may be the one that a checkpoint names. It is not if its UID is known and differs."""
    uids = [name for name in one.names if name.count("/") == 1]
    return written in uids or not uids


def _names_with(one: Earlier, written: str) -> tuple[str, ...]:
    """Return a holder's names with the checkpoint's name. If the checkpoint names a different holder, return only its name."""
    return tuple(dict.fromkeys((*one.names, written))) if _may_be(one, written) else (written,)


def _add_holder(earlier: tuple[Earlier, ...], one: Earlier) -> tuple[Earlier, ...]:
    """Return the earlier holders with one more, the latest last. It replaces an entry of the same pod."""
    others = tuple(known for known in earlier if not known.pods & one.pods)
    return (*others, one) if len(others) < MOST_EARLIER else (*others[: MOST_EARLIER - 1], Earlier((), one.at))


def _who(earlier: Sequence[Earlier]) -> str:
    rest = [f"{len(earlier) - 2} more"] if len(earlier) > 2 else []
    return " and ".join([*(one.words for one in earlier[:2]), *rest])


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
