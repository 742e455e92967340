"""The life of a device: what each of its states means, in one table.

Healthy and Unhealthy are not enough. A device that isn't found yet after a reboot, one that fell ill and one that is
gone all look "not Healthy", but the kubelet must be told different things: it fails pods for good where it is told
Unhealthy too early, and gives a device away where it is told nothing at all. So a device has a state, the table says
what follows from it, and nobody else decides that again.

Pure: clocks are values here (monotonic seconds), and what was announced comes from whoever remembers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Final

from devices.model import Device, Fault, Health, RefusedError
from devices.source import Listing

JUST_TURNED_S: Final = 1.0
"""How long after a device turned Unhealthy a request for it may still be the answer to the list before that, in seconds."""


class State(Enum):
    """Where a device is in its life. The values are what people are told."""

    PRESENT = "present"
    NOT_LOOKED_YET = "not looked yet"
    UNHEALTHY = "unhealthy"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Row:
    """What follows from a state.

    ``health`` is what the list says (None: what it said last). ``allocate`` is how Allocate refuses the device (None: it
    is served), and ``lenient`` whether it is served all the same, with a warning, where the kubelet couldn't know better.
    ``kept`` is whether its ID is still remembered as announced after a restart. ``way_out`` tells a person what to do.
    """

    health: Health | None
    allocate: Fault | None
    lenient: bool
    kept: bool
    way_out: str


TABLE: Final[Mapping[State, Row]] = {
    State.PRESENT: Row(Health.HEALTHY, None, lenient=False, kept=True, way_out=""),
    # Its ID comes from memory; the first discovery decides. Served: a refused admission would be final.
    State.NOT_LOOKED_YET: Row(None, None, lenient=False, kept=True, way_out=""),
    State.UNHEALTHY: Row(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
        lenient=True,
        kept=True,
        way_out="start the pod anew so that it gets another device, and repair this one",
    ),
    # Listed, not dropped, while anything may still hold it: the kubelet would forget whose it is.
    State.LOST: Row(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
        lenient=False,
        kept=True,
        way_out="start the pod anew so that it gets another device, and check this one's seat, power and driver",
    ),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A device as the list shows it, with its state and the reason for it in words.

    ``since`` is when its health in the list became what it is (monotonic seconds); None: before this process looked.
    """

    device: Device
    state: State
    reason: str = ""
    since: float | None = None


def merge(
    announced: Mapping[str, Device], listing: Listing | None, previous: Mapping[str, Entry], now: float
) -> tuple[Entry, ...]:
    """Put what was announced together with what is there now: the list to send.

    Args:
        announced: every device of the resource that a kubelet was ever told of, by ID, as it was last told.
        listing: what the backend sees; None: it hasn't looked yet.
        previous: the entries of the last merge in this process, by device ID; empty at first.
        now: the clock, in monotonic seconds.

    Returns:
        The listed devices in the backend's order, then the lost ones by ID; all by ID where nobody has looked yet.
    """
    if listing is None:
        reason = "announced before a restart, and the backend hasn't reported yet"
        return tuple(
            _entry(announced[device_id], State.NOT_LOOKED_YET, reason, announced, previous, now)
            for device_id in sorted(announced)
        )
    listed = {device.id: device for device in listing.devices}
    states = {Health.HEALTHY: State.PRESENT, Health.UNHEALTHY: State.UNHEALTHY}
    there = [
        _entry(device, states[device.health], listing.reasons.get(device.id, ""), announced, previous, now)
        for device in listed.values()
    ]
    lost = [
        _entry(announced[device_id], State.LOST, "the backend no longer finds it", announced, previous, now)
        for device_id in sorted(announced.keys() - listed.keys())
    ]
    return (*there, *lost)


def judge(
    resource: str,
    device_ids: Sequence[str],
    entries: Mapping[str, Entry],
    *,
    now: float,
    handed_out: AbstractSet[str] = frozenset(),
) -> tuple[str, ...]:
    """Decide whether one container may have the devices it asks for.

    Never refuses because a device was handed out before: init and app containers share, and no release is ever told.

    Args:
        resource: the resource name, for the messages.
        device_ids: what the container asks for.
        entries: the list as it was last sent, by device ID.
        now: the clock, in monotonic seconds.
        handed_out: where the kubelet asks again at each start of a container (1.8 does), the devices that containers
            were given before: a refusal would end a running pod. Empty for any other kubelet.

    Returns:
        Warnings, one for each device that is served although it is not well.

    Raises:
        RefusedError: INVALID_ARGUMENT for no ID at all or one given twice, NOT_FOUND for one that was never announced,
            else what the table says.
    """
    if not device_ids:
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f"expected at least one device ID of {resource} for a container, got none: ask for one, or don't call",
        )
    if twice := [device_id for device_id, count in Counter(device_ids).items() if count > 1]:
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f"expected each device ID of {resource} once in a container's request, got {_some(twice)} more than once: "
            "give each ID once",
        )
    if unknown := [device_id for device_id in device_ids if device_id not in entries]:
        raise never_announced(resource, unknown)
    warnings = []
    for entry in (entries[device_id] for device_id in device_ids):
        row = TABLE[entry.state]
        if row.allocate is None:
            continue
        known = f"device {_shown(entry.device.id)} of {resource} is {entry.state.value}"
        known += f" ({entry.reason})" if entry.reason else ""
        if row.lenient and entry.device.id in handed_out:
            why = "the kubelet asks again for devices that a container was given before"
        elif row.lenient and entry.since is not None and now - entry.since < JUST_TURNED_S:
            why = "it turned just now and the kubelet may not know yet"
        else:
            raise RefusedError(row.allocate, f"expected a device that a container can use, but {known}: {row.way_out}")
        warnings.append(f"{known}; served all the same, because {why}: {row.way_out}")
    return tuple(warnings)


def never_announced(resource: str, device_ids: Sequence[str]) -> RefusedError:
    """The refusal, NOT_FOUND, of at least one device ID that no list of ``resource`` ever held."""
    return RefusedError(
        Fault.NOT_FOUND,
        f"expected device IDs that were announced for {resource}, got {_some(device_ids)}, which never was: if the kubelet "
        "keeps asking for it, drain the node and restart the kubelet, so that it learns the devices anew",
    )


def _entry(
    device: Device,
    state: State,
    reason: str,
    announced: Mapping[str, Device],
    previous: Mapping[str, Entry],
    now: float,
) -> Entry:
    """Build a device's entry: its health as the table says, and since when the list has said so."""
    health = TABLE[state].health or device.health
    if device.health is not health:
        device = Device(device.id, health, device.numa_nodes)
    last = previous.get(device.id)
    since: float | None = now
    if last is not None and last.device.health is health:
        since = last.since
    elif last is None and device.id in announced and announced[device.id].health is health:
        since = None
    return Entry(device, state, reason, since)


def _some(device_ids: Sequence[str]) -> str:
    """Name some IDs, of any number and any length."""
    first, *rest = device_ids
    return _shown(first) + (f" and {len(rest)} more" if rest else "")


def _shown(device_id: str) -> str:
    return repr(device_id) if len(device_id) <= 80 else f"{device_id[:80]!r}…"
