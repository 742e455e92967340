"""Merge a source's inventory with what is remembered: announced devices, orders, holders and lasting troubles. Pure.

Times are arguments, and so is everything that is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from devices.life.states import COVERS, TABLE, Entry, Spells, State
from devices.model import Device, Health, Trouble, TroubleKind
from devices.source import Absence, Listing

FIRST_DISCOVERY_S: Final = 300.0
"""Most seconds until the first inventory: enough to build a driver while the node boots, and as long as the kubelet waits for
the plugin of a resource it remembers (endpointStopGracePeriod, 1.10 and later)."""
HELD_UNKNOWN_S: Final = 600.0
"""Seconds for which a withdrawn device stays listed while its holders are unknown. An upgraded kubelet is back within minutes.
If its records stay unreadable, the device must still leave the list."""
LOST_FORGOTTEN_S: Final = 30 * 86_400.0
"""Seconds for which a lost device without a holder stays listed: a repair by the vendor takes weeks."""


_STICKY: Final = (TroubleKind.RESET_REQUIRED, TroubleKind.UNKNOWN)


class Sticky(Struct, frozen=True, gc=False):
    """A trouble that must be remembered; ``at`` is when it began (Unix seconds), ``boot_id`` the boot of the node then."""

    trouble: Trouble
    at: float
    boot_id: str


class Known(Struct, frozen=True):
    """What is known of a resource's devices in addition to the inventory; all by device ID.

    ``announced`` are all devices that a kubelet ever got, as it last got them. ``cordons`` are an operator's, with their
    reasons. ``withheld`` are listed devices whose hardware is in use under another ID, with the reasons. ``away`` are the
    devices in a state of ``AWAY``, each with its reason. ``sticky`` are remembered troubles of any boot; ``boot_id`` is this
    boot. ``held`` are the devices that containers hold by the kubelet's records; None: unknown now. ``absences`` has why the
    backend no longer lists a device (default LOST), and ``lost_since`` when it was lost (Unix seconds).
    """

    announced: Mapping[str, Device]
    boot_id: str = ""
    cordons: Mapping[str, str] = field(default_factory=dict)
    withheld: Mapping[str, str] = field(default_factory=dict)
    away: Mapping[str, tuple[State, str]] = field(default_factory=dict)
    sticky: Mapping[str, Sticky] = field(default_factory=dict)
    held: AbstractSet[str] | None = None
    absences: Mapping[str, Absence] = field(default_factory=dict)
    lost_since: Mapping[str, float] = field(default_factory=dict)


class Clock(Struct, frozen=True):
    """One moment by two clocks, and the start of this process.

    ``now`` and ``started`` are monotonic seconds. ``unix`` is for times that are on the disk. If the wall clock jumps, the
    worst result is that a lost device without a holder is forgotten too early.
    """

    now: float
    unix: float
    started: float


class Merged(Struct, frozen=True):
    """The list to send, and what to remember.

    ``entries`` are the listed devices in the backend's order, then the others by ID. ``new`` are those that no kubelet ever
    got, ``dropped`` are announced IDs to forget. ``sticky`` and ``lost_since`` replace those of ``Known``. ``again_at`` is when
    the result changes by itself (monotonic seconds; None: never).
    """

    entries: tuple[Entry, ...]
    new: AbstractSet[str]
    dropped: frozenset[str]
    sticky: Mapping[str, Sticky]
    lost_since: Mapping[str, float]
    again_at: float | None


def merge(
    known: Known, listing: Listing | None, previous: Mapping[str, Entry], clock: Clock, grace: float = 0.0
) -> Merged:
    """Merge what was announced with what exists now.

    Args:
        known: what is remembered.
        listing: what the backend sees; None: it hasn't reported yet.
        previous: the entries of the last merge in this process, by device ID; empty at first.
        clock: the moment.
        grace: seconds after the start in which a device may still appear; 0: the first inventory decides, and may take
            ``FIRST_DISCOVERY_S``.
    """
    there = Listing(()) if listing is None else listing
    seen, troubles = there.by_id, there.troubles
    sticky = _remembered(known, listing, seen, clock.unix)
    question = there.recovered | there.released
    entries: list[Entry] = []
    dropped: set[str] = set()
    lost_since: dict[str, float] = {}
    again: list[float] = []
    for device_id in (*seen, *sorted(known.announced.keys() - seen.keys())):
        shown = previous.get(device_id)
        if shown is not None and (device := seen.get(device_id)) is not None and device_id not in question:
            lasting, trouble, covers = sticky.get(device_id), troubles.get(device_id), _covers(known, device_id)
            if _is_settled(shown, device, lasting, trouble, covers):
                entries.append(shown)
                continue
        told = known.announced.get(device_id)
        last = _bare(shown)
        row = sticky.get(device_id)
        covered = None
        found: Entry | None
        if device_id in there.released:
            covered = _covered(told, last)
            if covered is None:
                first = _look(seen[device_id], there, row, last, clock.now)
                covered = _entry(first, told, last, clock.now, None)
            reason = _over("closed, so that it can be reset or partitioned", "the release", covered)
            found = Entry(covered.device, State.RELEASED, reason, kind=covered.kind, spells=covered.spells)
        elif device_id in seen:
            found = _look(seen[device_id], there, row, last, clock.now)
        else:
            found = _miss(device_id, known, listing, row, last, clock, grace)
        if found is None:
            dropped.add(device_id)
            continue
        if device_id not in seen and (found.state is State.LOST or device_id in known.lost_since):
            lost_since[device_id] = known.lost_since.get(device_id, clock.unix)
            if found.state is State.LOST and _is_free(device_id, known):
                again.append(clock.now + lost_since[device_id] + LOST_FORGOTTEN_S - clock.unix)
        if found.until is not None:
            again.append(found.until)
        for state, what, reason in _covers(known, device_id):
            covered = _entry(found, told, last, clock.now, covered)
            found = Entry(found.device, state, _over(reason, what, covered), kind=covered.kind)
        entries.append(_entry(found, told, shown, clock.now, covered))
    new = seen.keys() - known.announced.keys()
    return Merged(tuple(entries), new, frozenset(dropped), sticky, lost_since, min(again, default=None))


def remaining(
    known: Known, listing: Listing, previous: Mapping[str, Entry], clock: Clock, grace: float = 0.0
) -> tuple[Device, ...]:
    """Return the devices that the backend no longer offers, and that a container holds or may hold; see ``merge``."""
    found = []
    for device_id in sorted(known.announced.keys() - listing.by_id.keys() - listing.released):
        last = _bare(previous.get(device_id))
        miss = _miss(device_id, known, listing, None, last, clock, grace)
        sure = known.held is not None and device_id in known.held
        if sure or (miss is not None and miss.state is State.WITHDRAWN):
            found.append(known.announced[device_id])
    return tuple(found)


def _covers(known: Known, device_id: str) -> Iterator[tuple[State, str, str]]:
    """Yield the states that cover a device, the lowest first: the state, its name in a sentence, and its reason."""
    if device_id in known.withheld:
        yield State.WITHHELD, "that", known.withheld[device_id]
    if device_id in known.away:
        state, reason = known.away[device_id]
        yield state, "that", reason
    if device_id in known.cordons:
        yield State.CORDONED, "the cordon", known.cordons[device_id]


def _bare(entry: Entry | None) -> Entry | None:
    """Return the entry beneath all covers, such as a cordon."""
    while entry is not None and entry.state in COVERS:
        entry = entry.beneath
    return entry


def _remembered(known: Known, listing: Listing | None, seen: Mapping[str, Device], unix: float) -> dict[str, Sticky]:
    """Return the troubles that last: those of this boot, except devices that were reset since, and new ones of the backend."""
    rows = {device_id: row for device_id, row in known.sticky.items() if row.boot_id == known.boot_id}
    if listing is not None:
        for device_id in listing.recovered:
            rows.pop(device_id, None)
        for device_id, trouble in listing.troubles.items():
            before = rows.get(device_id)
            if before is not None and (before.trouble is trouble or before.trouble == trouble):
                continue
            if trouble.kind in _STICKY and device_id in seen and device_id not in listing.released:
                rows[device_id] = Sticky(trouble, unix if before is None else before.at, known.boot_id)
    return rows


def _is_settled(
    shown: Entry, device: Device, row: Sticky | None, trouble: Trouble | None, covers: Iterable[tuple[State, str, str]]
) -> bool:
    """Return True if a device's entry is the same as before, and doesn't change with time.

    This is a shortcut: nearly all of thousands of devices are settled.
    """
    for state, what, reason in reversed([*covers]):
        covered = shown.beneath
        if shown.state is not state or covered is None or shown.reason != _over(reason, what, covered):
            return False
        shown = covered
    if shown.device is not device and shown.device != device:
        return False
    if row is not None:
        return shown.kind is row.trouble.kind and shown.reason == _lasting(row)
    if trouble is not None:
        return shown.state is State.UNHEALTHY and shown.kind is trouble.kind and shown.reason == trouble.reason
    return shown.state is State.PRESENT and not shown.reason


def _covered(told: Device | None, last: Entry | None) -> Entry | None:
    """Return the entry that stays while the device is released; None if there was none."""
    if last is not None:
        return last.beneath if last.state is State.RELEASED else last
    return None if told is None else Entry(told, State.NOT_LOOKED_YET, "announced before a restart")


def _look(device: Device, listing: Listing, row: Sticky | None, last: Entry | None, now: float) -> Entry:
    """Return the entry of a device that the backend lists. ``_entry`` completes it."""
    spells = Spells() if last is None or device.id in listing.recovered else last.spells
    if row is not None:
        return _still(device, row, spells)
    trouble = listing.troubles.get(device.id)
    if trouble is None and device.health is Health.UNHEALTHY:
        trouble = Trouble("")
    ill = trouble is not None and trouble.kind is not TroubleKind.APPLICATION
    spells = spells.after(ill=ill, now=now)
    kind, reason = (None, "") if trouble is None else (trouble.kind, trouble.reason)
    if trouble is not None and ill:
        return Entry(device, State.UNHEALTHY, reason, kind=kind, spells=spells, code=trouble.code, cause=trouble.cause)
    back = None if spells.ended is None else spells.ended + spells.hold
    if back is not None and now < back:
        reason = f"it became unhealthy {spells.count} times in a row, and is held back until it was healthy for {spells.hold:.0f} s"
        return Entry(device, State.UNHEALTHY, reason, kind=TroubleKind.RESTART_APP, until=back, spells=spells)
    cause = "" if trouble is None else trouble.cause
    return Entry(device, State.PRESENT, reason, kind=kind, spells=spells, cause=cause)


def _miss(
    device_id: str,
    known: Known,
    listing: Listing | None,
    row: Sticky | None,
    last: Entry | None,
    clock: Clock,
    grace: float,
) -> Entry | None:
    """Return the entry of a device that was announced and that the backend doesn't list; None: forget the device."""
    device = known.announced[device_id] if last is None else last.device
    spells = Spells() if last is None else last.spells
    patience = grace or FIRST_DISCOVERY_S
    limit = clock.started + patience
    if listing is None:
        if row is not None:
            return _still(device, row, spells)
        if clock.now < limit:
            reason = "known from before a restart, and not checked since"
            return Entry(device, State.NOT_LOOKED_YET, reason, until=limit)
        reason = f"not checked within {patience:.0f} s of the gateway's start; its log has the reason"
        return Entry(device, State.UNHEALTHY, reason)
    free = _is_free(device_id, known)
    absence = known.absences.get(device_id)
    if absence in {Absence.WITHDRAWN, Absence.EXCLUDED}:
        gone = "no longer offered" if absence is Absence.WITHDRAWN else "left out by the setting exclude-devices"
        if free:
            return None
        if known.held is not None:
            return Entry(device, State.WITHDRAWN, f"{gone}, but a container holds it", spells=spells)
        waits = None if last is None or last.state is not State.WITHDRAWN else last.until
        until = clock.now + HELD_UNKNOWN_S if waits is None else waits
        if clock.now >= until:
            return None
        return Entry(device, State.WITHDRAWN, f"{gone}, and its holder is unknown now", until=until, spells=spells)
    if grace and clock.now < limit and row is None and (last is None or last.state is State.NOT_LOOKED_YET):
        return Entry(device, State.NOT_LOOKED_YET, "announced before a restart, and not found yet", until=limit)
    if free and clock.unix - known.lost_since.get(device_id, clock.unix) >= LOST_FORGOTTEN_S:
        return None
    return Entry(device, State.LOST, "the backend no longer finds it", spells=spells)


def _is_free(device_id: str, known: Known) -> bool:
    """Return True if no container holds the device, by the kubelet's records."""
    return known.held is not None and device_id not in known.held


def _still(device: Device, row: Sticky, spells: Spells) -> Entry:
    """Return the entry that follows from a remembered trouble, whatever the backend reports now."""
    return Entry(device, State.UNHEALTHY, _lasting(row), kind=row.trouble.kind, spells=spells, code=row.trouble.code)


def _lasting(row: Sticky) -> str:
    reason = row.trouble.reason or "the backend gave no reason"
    return f"{reason}; until it is reset, the node reboots, or you run `gateway forget`"


def _over(reason: str, what: str, beneath: Entry) -> str:
    """Return the reason of a cover, and the state beneath it if that is not healthy."""
    if beneath.state is State.PRESENT and not beneath.reason:
        return reason
    return f"{reason}; without {what}: {beneath.state.value}" + (f", {beneath.reason}" if beneath.reason else "")


def _entry(found: Entry, told: Device | None, last: Entry | None, now: float, beneath: Entry | None) -> Entry:
    """Complete an entry: the device's health by the table, since when the list has had it, and the covered entry."""
    health = TABLE[found.state].health or found.device.health
    since: float | None = now
    if last is not None and last.device.health is health:
        since = last.since
    elif last is None and told is not None and told.health is health:
        since = None
    device = found.device if found.device.health is health else replace(found.device, health=health)
    return replace(found, device=device, since=since, beneath=beneath)
