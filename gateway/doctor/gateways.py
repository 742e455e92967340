"""Checks of the gateways: their status, their state files, and what the kernel allows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from devices.life.states import State
from devices.model import TroubleKind
from gateway.doctor.kubelets import no_kubelet_listens
from gateway.doctor.snapshot import NodeFacts, joined
from gateway.kubelet import drift
from gateway.telling.status import DeviceStatus, ResourceStatus
from gateway.telling.unserved import unschedulable_words, unserved

_LEAST_BYTES: Final = 16 * 1024 * 1024
_LEAST_INODES: Final = 64
_LEAST_FILES: Final = 4096
_NEARLY_FULL: Final = 0.9
_LATE_S: Final = 0.1
"""Seconds of lag from which the event loop is reported. If no device is registered 0.1 s after a kubelet's start, the API server
shows none."""
_DOUBLED: Final = drift.MismatchKind.DOUBLED.value
_OLDEST_S: Final = 1_735_689_600.0
"""The start of 2025 (Unix seconds). A correct clock can't show an earlier time."""
_AHEAD_S: Final = 86_400.0
_HANDS: Final = (TroubleKind.RESET_REQUIRED.value, TroubleKind.UNKNOWN.value)
_CLOSED: Final = frozenset(
    state.value for state in (State.NOT_LOOKED_YET, State.UNHEALTHY, State.CORDONED, State.RELEASED, State.WITHHELD)
)
"""States in which no further container gets a device of the resource."""


def _none(seen: NodeFacts) -> str:
    if seen.statuses or seen.unreachable or seen.live_tokens:
        return ""
    return f"none in {seen.state_dir.path}, and none in {seen.socket_dir.path}"


def _hanging(seen: NodeFacts) -> str:
    return joined(f"{path}: {why}" for path, why in seen.unreachable.items())


def _unserved(seen: NodeFacts) -> str:
    return "" if no_kubelet_listens(seen) else joined(f"{name}: {why}" for name, why in unserved(seen.statuses).items())


def _unwritable(seen: NodeFacts) -> str:
    return f"{one.path} can't be written to" if (one := seen.used_state_dir) and not one.writable else ""


def _full(seen: NodeFacts) -> str:
    folder = seen.used_state_dir
    if folder is None:
        return ""
    if folder.free_bytes is not None and folder.free_bytes < _LEAST_BYTES:
        return f"{folder.path}: {folder.free_bytes // 1024} KiB are free"
    if folder.free_inodes is not None and folder.free_inodes < _LEAST_INODES:
        return f"{folder.path}: {folder.free_inodes} inodes are free"
    return ""


def _damaged(seen: NodeFacts) -> str:
    return (seen.used_state_dir.complaint if seen.used_state_dir else "") or joined(
        f"{one.ledger.put_aside} was put aside" for one in seen.statuses if one.ledger.put_aside
    )


def _apart(seen: NodeFacts) -> str:
    known = {one.token for one in seen.statuses} | {path.rpartition("/")[2][:8] for path in seen.unreachable}
    apart = sorted(seen.live_tokens - known)
    if not apart or not known:
        return ""
    return (
        f"gateway {', '.join(apart)} has no control socket in {seen.state_dir.path}, and {', '.join(sorted(known))} has"
    )


def _elsewhere(seen: NodeFacts) -> str:
    if not seen.state_dir_unused:
        return ""
    return f"gateway {', '.join(sorted(seen.live_tokens))} lives in {seen.socket_dir.path}, without a control socket in {seen.state_dir.path}"


def _unsaved(seen: NodeFacts) -> str:
    return joined(f"{one.ledger.path}: {one.ledger.error}" for one in seen.statuses if not one.ledger.writable)


def _settings(seen: NodeFacts) -> str:
    return seen.settings_error


def _rejected(seen: NodeFacts) -> str:
    known = (one.configuration for one in seen.statuses)
    return joined(one.error for one in known if one is not None and one.error)


def _doubled(seen: NodeFacts) -> str:
    return joined(one.words for resource in _resources(seen) for one in resource.drift if one.kind == _DOUBLED)


def _drifted(seen: NodeFacts) -> str:
    return joined(one.words for resource in _resources(seen) for one in resource.drift if one.kind != _DOUBLED)


def _ill(seen: NodeFacts) -> str:
    return joined(
        f"{device.id} ({one.name}) is {device.state}: {device.reason}"
        for one in _resources(seen)
        for device in one.devices
        if _waits_for_hands(device)
    )


def _waits_for_hands(device: DeviceStatus) -> bool:
    return device.state == State.LOST.value or (device.state == State.UNHEALTHY.value and device.kind in _HANDS)


def _ungivable(seen: NodeFacts) -> str:
    """Return the resources without a healthy device, except those that another check reports."""
    closed = {
        one.name: [each for each in one.devices if each.state in _CLOSED and not _waits_for_hands(each)]
        for one in _resources(seen)
        if not one.healthy
    }
    return joined(
        f"{name}: {device.id} is {device.state}" + (f": {device.reason}" if device.reason else "")
        for name, devices in closed.items()
        for device in devices
    )


def _unschedulable(seen: NodeFacts) -> str:
    return joined(f"{one.name}: {words}" for one in _resources(seen) if (words := unschedulable_words(one)))


def _instances(seen: NodeFacts) -> str:
    used = sum(one.inotify_instances for one in seen.processes)
    if seen.max_inotify_instances is None or used < _NEARLY_FULL * seen.max_inotify_instances:
        return ""
    return f"{used} of {seen.max_inotify_instances} are in use (fs.inotify.max_user_instances)"


def _files(seen: NodeFacts) -> str:
    for one in seen.processes:
        if one.max_open_files is not None and one.max_open_files < _LEAST_FILES:
            return f"process {one.pid} may open {one.max_open_files}"
        if one.max_open_files and one.open_files and one.open_files > _NEARLY_FULL * one.max_open_files:
            return f"process {one.pid} has {one.open_files} of {one.max_open_files} open"
    return ""


def _throttled(seen: NodeFacts) -> str:
    return joined(
        f"process {one.pid} was held (nr_throttled {one.throttled})" for one in seen.processes if one.throttled
    )


def _killed(seen: NodeFacts) -> str:
    return joined(f"{one.oom_kills} kills in process {one.pid}'s container" for one in seen.processes if one.oom_kills)


def _clock(seen: NodeFacts) -> str:
    if seen.now < _OLDEST_S:
        return f"the clock shows {seen.now:.0f} seconds since 1970, which is before this program was made"
    written = seen.state_dir.written_at
    if written is not None and written > seen.now + _AHEAD_S:
        return f"the state file was written {(written - seen.now) / 3600:.0f} hours in the future"
    return ""


def _hindered(seen: NodeFacts) -> str:
    # Other checks report why NVIDIA's library can't be used.
    known = seen.nvml.message if seen.nvml else ""
    every = (one for status in seen.statuses for one in status.hindrances)
    return joined(f"{one.source}: {one.reason}" for one in every if one.reason != known)


def _late(seen: NodeFacts) -> str:
    return joined(
        f"gateway {one.token}: {one.lag_s * 1000:.0f} ms late" for one in seen.statuses if one.lag_s >= _LATE_S
    )


def _resources(seen: NodeFacts) -> Iterator[ResourceStatus]:
    """Return the resources of the leading gateways. A standby knows less about them."""
    for status in seen.statuses:
        yield from () if status.led_by else status.resources


CHECKS: Final[Mapping[str, Callable[[NodeFacts], str]]] = {
    "DPG0201": _none,
    "DPG0202": _hanging,
    "DPG0203": _unserved,
    "DPG0204": _unwritable,
    "DPG0205": _full,
    "DPG0206": _damaged,
    "DPG0207": _apart,
    "DPG0208": _unsaved,
    "DPG0209": _settings,
    "DPG0210": _rejected,
    "DPG0211": _doubled,
    "DPG0212": _drifted,
    "DPG0213": _ill,
    "DPG0214": _instances,
    "DPG0215": _files,
    "DPG0216": _throttled,
    "DPG0217": _killed,
    "DPG0218": _clock,
    "DPG0219": _hindered,
    "DPG0220": _late,
    "DPG0221": _ungivable,
    "DPG0222": _elsewhere,
    "DPG0223": _unschedulable,
}
