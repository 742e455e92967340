"""Find out which pods may still hold a device although a new kubelet doesn't name them. Pure.

A kubelet that can't read its checkpoint (after some upgrades, a full disk, a deleted file) starts with empty records, and gives
devices that running containers use. So at a kubelet's start, the holder of each device that was given is *in question* until
the kubelet's own records show one of three things:

- They name the holder: it stays, as a holder of the new kubelet.
- The kubelet kept its predecessor's records, or List lacks the pod: the holder has ended.
- Neither: the kubelet *forgot* it. That ends when the pod is gone, when the records name the pod again, or when an operator
  clears the device. It does not end when another pod gets the device.

List names every pod that the kubelet knows, with or without devices, so it shows when a pod is gone. One absence proves
nothing: a kubelet that has just started, or can't reach the API server, knows only its static pods. So a pod is gone if a List
lacks it for ``GONE_AFTER`` seconds, and that kubelet had heard from the API server (``_has_api_server_pods``) or had named the pod before.
Without List, only the node's reboot shows that a pod is gone. No device stays forgotten over a reboot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

if TYPE_CHECKING:
    from gateway.kubelet.records import Records

WRITTEN_AFTER = 5.0
"""Seconds after a kubelet's start until it has written its own checkpoint, with the first list that it records."""
RECORDED_WITHIN: Final = 1.5
"""Seconds that a kubelet may take to record an Allocate: earlier records don't show that a given device is free again."""
GONE_AFTER = 30.0
"""Seconds for which List must lack a pod until it is gone: after a forced deletion its containers run for the rest of their
grace period."""
_LATEST: Final = 2.0**32
"""The largest Unix time that every calendar can show."""
MOST_EARLIER: Final = 8
"""Most earlier holders of one device that are kept by name."""


class HandedOut(Struct, frozen=True):
    """A device that Allocate gave to a container, or that the kubelet's records show as held.

    ``dialect`` is empty if only the records show it. ``at`` is when it was given, in Unix seconds: each Allocate has its
    own time. ``names`` are the holder's names by the records (``Records.names_of``), none until they were read. ``counted``: the
    kubelet is known to count the device as in use (``gateway.memory.again``).
    """

    dialect: str
    at: float
    names: tuple[str, ...] = ()
    counted: bool = False


class Earlier(Struct, frozen=True):
    """A holder of a device before a kubelet's start: its ``HandedOut.names`` and ``at``.

    ``forgotten``: the kubelet's records lack it; otherwise it is in question. ``older``: it was already in question when the
    kubelet before this one ended.
    """

    names: tuple[str, ...]
    at: float
    forgotten: bool = False
    older: bool = False

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


Rows: TypeAlias = Mapping[str, tuple[Earlier, ...]]
"""The earlier holders of a resource's devices, by device ID. At most one holder of a device is in question: the last one."""


class Absences(Struct, frozen=True):
    """Which earlier holders' pods a kubelet's List names, and which it lacks."""

    named: frozenset[str] = frozenset()
    """The pods that a List of this kubelet named."""
    since: Mapping[str, float] = field(default_factory=dict)
    """The pods that its List should name and doesn't, and since when (monotonic seconds)."""

    def looked(self, asked: frozenset[str], pods: AbstractSet[str] | None, now: float) -> Absences:
        """Note which of the pods ``asked`` a List named, and which it lacks. ``pods``: all that it named; None: there was no List."""
        if pods is None:
            return self
        named = asked & (self.named | pods)
        heard = _has_api_server_pods(pods)
        lacking = [pod for pod in asked - pods if "/" in pod and (heard or pod in named)]
        return Absences(named, {pod: self.since.get(pod, now) for pod in lacking})

    def is_gone(self, one: Earlier, now: float) -> bool:
        """Return True if a holder's pod has been absent for ``GONE_AFTER`` seconds."""
        return any(now - self.since.get(pod, now) >= GONE_AFTER for pod in one.pods)


def in_question(rows: Rows) -> dict[str, Earlier]:
    """Return the holders that are in question, by device ID."""
    return {device_id: earlier[-1] for device_id, earlier in rows.items() if not earlier[-1].forgotten}


def forgotten(rows: Rows) -> dict[str, tuple[Earlier, ...]]:
    """Return the holders that the kubelet forgot."""
    found = {device_id: tuple(one for one in earlier if one.forgotten) for device_id, earlier in rows.items()}
    return {device_id: earlier for device_id, earlier in found.items() if earlier}


def words(earlier: Sequence[Earlier]) -> str:
    """Return the earlier holders of a device for people."""
    rest = [f"{len(earlier) - 2} more"] if len(earlier) > 2 else []
    return " and ".join([*(one.words for one in earlier[:2]), *rest])


def pods(rows: Rows) -> frozenset[str]:
    """Return the pods of all earlier holders, by each of their names."""
    return frozenset().union(*(one.pods for earlier in rows.values() for one in earlier))


# At a kubelet's start.


def restarted(rows: Rows, given: Mapping[str, HandedOut]) -> Rows:
    """Put all holders in question, because another kubelet started.

    Args:
        rows: the earlier holders until now.
        given: the devices that are held, and since when.
    """
    asked = {device_id: replace(one, older=True) for device_id, one in in_question(rows).items()}
    for device_id, row in given.items():
        if device_id not in asked or asked[device_id].at != row.at:
            asked[device_id] = Earlier(row.names, row.at)
    return _with(forgotten(rows), asked)


def is_in(rows: Rows, given: Mapping[str, HandedOut], written: Mapping[str, str], *, older: bool) -> bool:
    """Return True if a checkpoint still names a holder in question whose device Allocate has not given again.

    ``older``: consider only the holders that were already in question when the earlier kubelet ended.
    """
    return any(
        _may_be(one, written[device_id])
        for device_id, one in in_question(rows).items()
        if device_id in written and not _is_given_since(given, device_id, one) and (one.older or not older)
    )


def with_first_checkpoint(rows: Rows, written: Mapping[str, str]) -> Rows:
    """Use the checkpoint that the kubelet found at its start: a holder in question that it lacks has ended, or never ran.

    A container starts only after the checkpoint that names it was written.
    """
    asked = {
        device_id: replace(one, names=_names_with(one, written[device_id]), older=False)
        for device_id, one in in_question(rows).items()
        if device_id in written
    }
    return _with(forgotten(rows), asked)


# At a look.


def looked(
    resource: str,
    rows: Rows,
    given: Mapping[str, HandedOut],
    records: Records,
    absences: Absences,
    now: float,
    *,
    settled: bool,
) -> Rows:
    """Compare a resource's earlier holders with a look into the kubelet's records.

    Args:
        resource: the resource name.
        rows: the earlier holders until now.
        given: the devices that are held, and since when.
        records: the kubelet's records.
        absences: the pods that the kubelet's List lacks, with this look.
        now: when the look began (monotonic seconds).
        settled: True if the kubelet has written its own checkpoint for certain (``WRITTEN_AFTER``).
    """
    left: dict[str, Earlier] = {}
    lost = forgotten(rows)
    holders = records.holders(resource)
    # Both the checkpoint and List are needed: after a start, List lacks pods that the kubelet hasn't heard of yet.
    known = records.held is not None and records.written is not None
    for device_id, one in in_question(rows).items():
        again = _is_given_since(given, device_id, one)
        if not known:
            left[device_id] = one
        # The device is held, and Allocate hasn't given it since the kubelet's start. So the kubelet kept its record of the
        # device. If that names another pod, the earlier holder has ended.
        elif device_id in holders and (not again or _is_held_by(resource, device_id, one, records)):
            if not settled:
                left[device_id] = one
        # The pod has ended if it stays absent.
        elif one.pods & absences.since.keys():
            if not absences.is_gone(one, now):
                left[device_id] = one
        elif again and device_id not in holders:
            left[device_id] = one  # The kubelet hasn't recorded it yet.
        else:
            lost[device_id] = _add_holder(lost.get(device_id, ()), one)
    return _with(
        {
            device_id: tuple(
                one
                for one in earlier
                if not _is_held_by(resource, device_id, one, records)
                and not (records.pods is not None and absences.is_gone(one, now))
            )
            for device_id, earlier in lost.items()
        },
        left,
    )


def doubled(
    lost: Mapping[str, Sequence[Earlier]], given: Mapping[str, HandedOut], holders: Mapping[str, str]
) -> dict[str, str]:
    """Return the devices that the kubelet forgot and gave to another pod since, and that pod for people.

    Args:
        lost: the holders that the kubelet forgot.
        given: the devices that are held, and since when.
        holders: the holders by the kubelet's records.
    """
    again = [one for one, earlier in lost.items() if all(_is_given_since(given, one, who) for who in earlier)]
    named = {one: f"{holders[one]!r:.160}" for one in lost if one in holders}
    return dict.fromkeys(again, "a pod that was given it just now") | named


def _with(lost: Mapping[str, tuple[Earlier, ...]], asked: Mapping[str, Earlier]) -> Rows:
    found = {device_id: earlier for device_id, earlier in lost.items() if earlier}
    return found | {device_id: (*found.get(device_id, ()), one) for device_id, one in asked.items()}


def _is_given_since(given: Mapping[str, HandedOut], device_id: str, one: Earlier) -> bool:
    """Return True if Allocate gave a device after an earlier holder had it."""
    return device_id in given and given[device_id].at != one.at


def _is_held_by(resource: str, device_id: str, one: Earlier, records: Records) -> bool:
    """Return True if the records name an earlier holder's pod for a device (a pod has several containers)."""
    names = records.names_of(resource, device_id)
    if _are_named(names) and _are_named(one.names):
        names = names[:1]  # List is newer than the checkpoint.
    return any(name.rpartition("/")[0] in one.pods for name in names)


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
    """Return the forgotten holders with one more, the latest last. It replaces an entry of the same pod."""
    one = replace(one, forgotten=True, older=False)
    others = tuple(known for known in earlier if not known.pods & one.pods)
    if len(others) < MOST_EARLIER:
        return (*others, one)
    return (*others[: MOST_EARLIER - 1], replace(one, names=()))
