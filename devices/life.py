"""The life of a device: what each of its states means, in one table.

Healthy and Unhealthy are not enough. A device that isn't found yet after a reboot, one that fell ill, one that is gone
and one that nobody offers any more all look "not Healthy", but the kubelet must be told different things: it fails pods
for good where it is told Unhealthy too early, and gives a device away where it is told nothing at all. So a device has a
state, the table says what follows from it, and nobody else decides that again.

Pure: clocks are values here, and what was promised, ordered and held comes from whoever remembers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from devices.model import Device, Fault, Health, Kind, RefusedError, Trouble
from devices.source import Fate, Listing

JUST_TURNED_S: Final = 1.0
"""How long after a device turned Unhealthy a request for it may still be the answer to the list before that, in seconds."""
FIRST_DISCOVERY_S: Final = 300.0
"""How long the first discovery may take, in seconds: long enough for a driver that is built while the node boots, and as long
as the kubelet itself waits for the plugin of a resource it remembers (endpointStopGracePeriod, 1.10 and later)."""
HELD_UNKNOWN_S: Final = 600.0
"""How long a withdrawn device stays on the list while nobody can say who holds it, in seconds: a kubelet that is being
replaced is back within minutes, and where its books can't be read at all a ghost must not outlive an operator's patience."""
LOST_FORGOTTEN_S: Final = 30 * 86_400.0
"""How long a lost device that nobody holds stays on the list, in seconds: a repair by the vendor takes weeks."""

SPELLS: Final = 3
"""From so many spells of illness in a row on, a device that is well again is held back. An error and its repetition are
everyday; a third is a habit."""
STEADY_S: Final = 600.0
"""How long a device must have been well, in seconds, for its earlier spells to be forgotten: a job that makes it ill again
has mostly done so by then."""
HOLD_S: Final = 60.0
"""How long it must first be well to be let back after that many spells, in seconds; each further spell doubles it."""
HOLD_MAX_S: Final = 3600.0
"""The most of it: a device that is well for an hour deserves another try."""

_STICKY: Final = (Kind.RESET_REQUIRED, Kind.UNKNOWN)


class State(Enum):
    """Where a device is in its life. The values are what people are told."""

    PRESENT = "present"
    NOT_LOOKED_YET = "not looked yet"
    UNHEALTHY = "unhealthy"
    LOST = "lost"
    WITHDRAWN = "withdrawn"
    CORDONED = "cordoned"
    RELEASED = "released"
    WITHHELD = "withheld"


_COVERS: Final = frozenset({State.CORDONED, State.WITHHELD})
"""States that lie over another one."""


class Row(Struct, frozen=True):
    """What follows from a state.

    ``health`` is what the list says (None: what it said last). ``allocate`` is how Allocate refuses the device (None: the
    state doesn't), ``lenient`` whether it is served all the same, with a warning, where the kubelet couldn't know better,
    and ``held`` whether it is where a container holds it already. ``pre_start`` is how PreStartContainer refuses it
    (None: the backend decides). ``listed`` and ``kept`` are for a device that nobody holds: whether it is on the list, and
    whether its ID stays remembered as announced, over restarts too. ``way_out`` tells a person what to do.
    """

    health: Health | None
    allocate: Fault | None = None
    lenient: bool = False
    held: bool = False
    pre_start: Fault | None = None
    listed: bool = True
    kept: bool = True
    way_out: str = ""


TABLE: Final[Mapping[State, Row]] = {
    State.PRESENT: Row(Health.HEALTHY),
    # Its ID comes from memory; the first discovery decides. Served: a refused admission would be final, where a refused
    # pre-start is tried again.
    State.NOT_LOOKED_YET: Row(None, pre_start=Fault.FAILED_PRECONDITION, way_out="the kubelet tries again"),
    State.UNHEALTHY: Row(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
        lenient=True,
        way_out="start the pod anew so that it gets another device, and repair this one",
    ),
    # Listed, not dropped, while anything may still hold it: the kubelet would forget whose it is.
    State.LOST: Row(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
        way_out="start the pod anew so that it gets another device, and check this one's seat, power and driver",
    ),
    # Somebody wanted it gone, so nothing of it stays but what a container holds.
    State.WITHDRAWN: Row(
        Health.UNHEALTHY,
        Fault.NOT_FOUND,
        held=True,
        listed=False,
        kept=False,
        way_out="start the pod anew so that it gets another device; this one is no longer offered under this name",
    ),
    # What it covers decides for those who hold the device.
    State.CORDONED: Row(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
        held=True,
        way_out="start the pod anew so that it gets another device, or lift the cordon",
    ),
    # Its hardware is in use under another ID (``devices.boards``). What it covers decides for those who hold the device.
    State.WITHHELD: Row(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
        held=True,
        way_out="it is offered again when that container has ended; or take the change of the configuration back",
    ),
    # Somebody is about to reset or partition it. Unhealthy also while a container holds it: the moment that one ends, the
    # kubelet would give it to the next. What it covers stays as it was seen last, and decides for those who hold it.
    State.RELEASED: Row(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
        held=True,
        way_out="start the pod anew so that it gets another device; after the reset say `gateway devices --acquire`",
    ),
}


class Spells(Struct, frozen=True):
    """How often in a row a device fell ill, and when the last time ended.

    ``count`` is the number of spells between which it was never well for long; ``ended`` the moment from which it has been
    well (monotonic seconds; None: it is ill, or never was). Of this process only: a restart forgets them.
    """

    count: int = 0
    ended: float | None = None

    def after(self, *, ill: bool, now: float) -> Spells:
        """Count on, given what the backend says now."""
        if ill == (self.count > 0 and self.ended is None):
            return self
        if not ill:
            return Spells(self.count, now)
        steady = self.ended is None or now >= self.ended + self.hold + STEADY_S
        return Spells(1 if steady else self.count + 1)

    @property
    def hold(self) -> float:
        """How long it must be well before it is let back, in seconds."""
        return min(HOLD_MAX_S, HOLD_S * 2 ** min(self.count - SPELLS, 16)) if self.count >= SPELLS else 0.0


class Entry(Struct, frozen=True):
    """A device as the list shows it, with its state and the reason for it in words.

    ``since`` is when its health in the list became what it is (monotonic seconds); None: before this process looked.
    ``kind`` is what its trouble takes to end, if it has one. ``until`` is when its state ends by itself (monotonic seconds;
    None: it doesn't). ``beneath`` is what a cordon, a release or another's claim covers.
    """

    device: Device
    state: State
    reason: str = ""
    since: float | None = None
    kind: Kind | None = None
    until: float | None = None
    spells: Spells = Spells()
    beneath: Entry | None = None


class Sticky(Struct, frozen=True):
    """A trouble that must be remembered, since when (unix seconds), and in which boot of the node."""

    trouble: Trouble
    at: float
    boot_id: str


class Known(Struct, frozen=True):
    """What is known of a resource's devices besides what the backend sees; all by device ID.

    ``announced`` holds every device that a kubelet was ever told of, as it was told last. ``cordons`` are an operator's, with
    their reasons; ``withheld`` are the listed ones whose hardware is in use under another ID, with theirs. ``sticky`` are the troubles that were remembered, in whichever boot; ``boot_id`` names this one. ``held`` is
    what containers hold by the kubelet's own books; None: they can't be read now. ``fates`` says of what the backend no
    longer lists where it went (LOST where it doesn't), and ``lost_since`` since when it has been lost (unix seconds).
    """

    announced: Mapping[str, Device]
    boot_id: str = ""
    cordons: Mapping[str, str] = field(default_factory=dict)
    withheld: Mapping[str, str] = field(default_factory=dict)
    sticky: Mapping[str, Sticky] = field(default_factory=dict)
    held: AbstractSet[str] | None = None
    fates: Mapping[str, Fate] = field(default_factory=dict)
    lost_since: Mapping[str, float] = field(default_factory=dict)


class Clock(Struct, frozen=True):
    """One moment by two clocks, and when this process began to look.

    ``now`` and ``started`` are monotonic seconds; ``unix`` counts what must outlive the process. A wall clock that jumps can
    at worst forget, too early, a lost device that nobody holds.
    """

    now: float
    unix: float
    started: float


class Merged(Struct, frozen=True):
    """The list to send, and what must be remembered of it.

    ``entries`` are the listed devices in the backend's order, then the others by ID. ``new`` are those that no kubelet was
    ever told of, ``dropped`` announced IDs to be forgotten. ``sticky`` and ``lost_since`` replace those of ``Known``. At ``again_at`` (monotonic seconds; None: never) the
    same question has another answer.
    """

    entries: tuple[Entry, ...]
    new: AbstractSet[str]
    dropped: frozenset[str]
    sticky: Mapping[str, Sticky]
    lost_since: Mapping[str, float]
    again_at: float | None


class _Found(NamedTuple):
    """A state and what led to it; ``free``: nobody holds the device."""

    state: State
    reason: str = ""
    kind: Kind | None = None
    until: float | None = None
    spells: Spells = Spells()
    free: bool = False


def merge(
    known: Known, listing: Listing | None, previous: Mapping[str, Entry], clock: Clock, grace: float = 0.0
) -> Merged:
    """Put what was announced together with what is there now.

    Args:
        known: what is known besides.
        listing: what the backend sees; None: it hasn't looked yet.
        previous: the entries of the last merge in this process, by device ID; empty at first.
        clock: the moment.
        grace: how long after the start a device may still turn up, in seconds; 0: no such grace, the first discovery
            decides, and may take ``FIRST_DISCOVERY_S``.
    """
    seen = {} if listing is None else {device.id: device for device in listing.devices}
    sticky = _remembered(known, listing, seen, clock.unix)
    same = seen.keys() - _in_question(known, listing, sticky)
    entries: list[Entry] = []
    dropped: set[str] = set()
    lost_since: dict[str, float] = {}
    again: list[float] = []
    for device_id in (*seen, *sorted(known.announced.keys() - seen.keys())):
        shown = previous.get(device_id)
        if shown is not None and device_id in same and _is_settled(shown, seen[device_id], sticky.get(device_id)):
            entries.append(shown)
            continue
        told = known.announced.get(device_id)
        last = _bare(shown)
        covered = None
        if listing is not None and device_id in listing.released:
            covered = _covered(told, last)
            if covered is None:
                first = _look(seen[device_id], listing, sticky.get(device_id), last, clock.now)
                covered = _entry(seen[device_id], first, told, last, clock.now, None)
            device = covered.device
            reason = _over("closed, so that it can be reset or partitioned", "the release", covered)
            found = _Found(State.RELEASED, reason, covered.kind, spells=covered.spells)
        elif listing is not None and device_id in seen:
            device = seen[device_id]
            found = _look(device, listing, sticky.get(device_id), last, clock.now)
        else:
            device = known.announced[device_id] if last is None else last.device
            found = _miss(device_id, known, listing, sticky.get(device_id), last, clock, grace)
        if device_id not in seen and (found.state is State.LOST or device_id in known.lost_since):
            lost_since[device_id] = known.lost_since.get(device_id, clock.unix)
            if found.state is State.LOST and found.free:
                again.append(clock.now + lost_since[device_id] + LOST_FORGOTTEN_S - clock.unix)
        row = TABLE[found.state]
        if found.free and not row.kept:
            dropped.add(device_id)
            lost_since.pop(device_id, None)
        if found.free and not row.listed:
            continue
        if found.until is not None:
            again.append(found.until)
        for state, what, reasons in (
            (State.WITHHELD, "that", known.withheld),
            (State.CORDONED, "the cordon", known.cordons),
        ):
            if device_id in reasons:
                covered = _entry(device, found, told, last, clock.now, covered)
                found = _Found(state, _over(reasons[device_id], what, covered), covered.kind)
        entries.append(_entry(device, found, told, shown, clock.now, covered))
    new = seen.keys() - known.announced.keys()
    return Merged(tuple(entries), new, frozenset(dropped), sticky, lost_since, min(again, default=None))


def remaining(
    known: Known, listing: Listing, previous: Mapping[str, Entry], clock: Clock, grace: float = 0.0
) -> tuple[Device, ...]:
    """Give the devices that the backend doesn't offer any more, and that a container holds or may hold; see ``merge``."""
    found = []
    for device_id in sorted(known.announced.keys() - {device.id for device in listing.devices} - listing.released):
        last = _bare(previous.get(device_id))
        miss = _miss(device_id, known, listing, None, last, clock, grace)
        sure = known.held is not None and device_id in known.held
        if sure or (miss.state is State.WITHDRAWN and not miss.free):
            found.append(known.announced[device_id])
    return tuple(found)


def _bare(entry: Entry | None) -> Entry | None:
    """An entry without what lies over it: a cordon, another's claim."""
    while entry is not None and entry.state in _COVERS:
        entry = entry.beneath
    return entry


def _remembered(known: Known, listing: Listing | None, seen: Mapping[str, Device], unix: float) -> dict[str, Sticky]:
    """Say which troubles last: those of this boot, without what was reset since, and what the backend adds to them."""
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


def _in_question(known: Known, listing: Listing | None, sticky: Mapping[str, Sticky]) -> AbstractSet[str]:
    """The devices about which more is known than that they are listed, or that a trouble of theirs lasts."""
    if listing is None:
        return frozenset()
    return (
        known.cordons.keys()
        | known.withheld.keys()
        | listing.recovered
        | listing.released
        | (listing.troubles.keys() - sticky.keys())
    )


def _is_settled(shown: Entry, device: Device, row: Sticky | None) -> bool:
    """Whether a device that isn't in question is listed as it was, and no clock can change that.

    Nearly all are, each time; so what is to be told of the others needn't wait until thousands were judged.
    """
    if shown.device is not device and shown.device != device:
        return False
    if row is not None:
        return shown.kind is row.trouble.kind and shown.reason == _lasting(row)
    return shown.state is State.PRESENT and not shown.reason


def _covered(told: Device | None, last: Entry | None) -> Entry | None:
    """The entry that stays while nobody looks at the device; None where there was none."""
    if last is not None:
        return last.beneath if last.state is State.RELEASED else last
    return None if told is None else Entry(told, State.NOT_LOOKED_YET, "announced before a restart")


def _look(device: Device, listing: Listing, row: Sticky | None, last: Entry | None, now: float) -> _Found:
    """Judge a device that the backend lists."""
    spells = Spells() if last is None or device.id in listing.recovered else last.spells
    if row is not None:
        return _still(row, spells)
    trouble = listing.troubles.get(device.id)
    if trouble is None and device.health is Health.UNHEALTHY:
        trouble = Trouble("")
    ill = trouble is not None and trouble.kind is not Kind.APPLICATION
    spells = spells.after(ill=ill, now=now)
    kind, reason = (None, "") if trouble is None else (trouble.kind, trouble.reason)
    if ill:
        return _Found(State.UNHEALTHY, reason, kind, spells=spells)
    back = None if spells.ended is None else spells.ended + spells.hold
    if back is not None and now < back:
        reason = f"it became unhealthy {spells.count} times in a row, and is held back until it was healthy for {spells.hold:.0f} s"
        return _Found(State.UNHEALTHY, reason, Kind.RESTART_APP, back, spells)
    return _Found(State.PRESENT, reason, kind, spells=spells)


def _miss(
    device_id: str,
    known: Known,
    listing: Listing | None,
    row: Sticky | None,
    last: Entry | None,
    clock: Clock,
    grace: float,
) -> _Found:
    """Judge a device that was announced and that the backend doesn't list."""
    spells = Spells() if last is None else last.spells
    patience = grace or FIRST_DISCOVERY_S
    limit = clock.started + patience
    if listing is None:
        if row is not None:
            return _still(row, spells)
        if clock.now < limit:
            reason = "known from before a restart, and not looked at since"
            return _Found(State.NOT_LOOKED_YET, reason, until=limit)
        return _Found(
            State.UNHEALTHY, f"nobody could look at it within {patience:.0f} s of the start: the gateway's log says why"
        )
    free = known.held is not None and device_id not in known.held
    if known.fates.get(device_id) is Fate.WITHDRAWN:
        if free:
            return _Found(State.WITHDRAWN, free=True)
        if known.held is not None:
            return _Found(State.WITHDRAWN, "no longer offered, but a container holds it", spells=spells)
        waits = None if last is None or last.state is not State.WITHDRAWN else last.until
        until = clock.now + HELD_UNKNOWN_S if waits is None else waits
        reason = "no longer offered, and who holds it can't be seen now"
        return _Found(State.WITHDRAWN, reason, until=until, spells=spells, free=clock.now >= until)
    if grace and clock.now < limit and row is None and (last is None or last.state is State.NOT_LOOKED_YET):
        return _Found(State.NOT_LOOKED_YET, "announced before a restart, and not found yet", until=limit)
    if free and clock.unix - known.lost_since.get(device_id, clock.unix) >= LOST_FORGOTTEN_S:
        return _Found(State.WITHDRAWN, free=True)
    return _Found(State.LOST, "the backend no longer finds it", spells=spells, free=free)


def _still(row: Sticky, spells: Spells) -> _Found:
    """What a remembered trouble makes of a device, whatever the backend says now."""
    return _Found(State.UNHEALTHY, _lasting(row), row.trouble.kind, spells=spells)


def _lasting(row: Sticky) -> str:
    reason = row.trouble.reason or "the backend gave no reason"
    return f"{reason}; until it is reset, the node reboots, or somebody says `gateway forget`"


def _over(reason: str, what: str, beneath: Entry) -> str:
    """The reason of ``what`` covers a device, and what would be without it where that is anything but well."""
    if beneath.state is State.PRESENT and not beneath.reason:
        return reason
    return f"{reason}; without {what}: {beneath.state.value}" + (f", {beneath.reason}" if beneath.reason else "")


def _entry(
    device: Device, found: _Found, told: Device | None, last: Entry | None, now: float, beneath: Entry | None
) -> Entry:
    """Build a device's entry: its health as the table says, and since when the list has said so."""
    health = TABLE[found.state].health or device.health
    if device.health is not health:
        device = replace(device, health=health)
    since: float | None = now
    if last is not None and last.device.health is health:
        since = last.since
    elif last is None and told is not None and told.health is health:
        since = None
    return Entry(device, found.state, found.reason, since, found.kind, found.until, found.spells, beneath)


def all_present(device_ids: Sequence[str], entries: Mapping[str, Entry]) -> bool:
    """Whether nothing at all stands against one container's devices: ``judge`` has then neither an objection nor a warning."""
    found = [entries.get(device_id) for device_id in device_ids]
    present = all(entry is not None and entry.state is State.PRESENT and entry.beneath is None for entry in found)
    return present and 0 < len(found) == len(set(device_ids))


def judge(
    resource: str,
    device_ids: Sequence[str],
    entries: Mapping[str, Entry],
    *,
    now: float,
    handed_out: Container[str] = frozenset(),
    held: Container[str] = frozenset(),
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
        held: the devices that containers hold by the kubelet's own books, as far as they are known.

    Returns:
        Warnings, one for each reason not to serve a device that is served all the same.

    Raises:
        RefusedError: INVALID_ARGUMENT for no ID at all or one given twice, NOT_FOUND for one that isn't on the list, else
            what the table says.
    """
    if not device_ids:
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f"expected at least one device ID of {resource} for a container, got none: ask for one, or don't call",
        )
    if len(frozenset(device_ids)) < len(device_ids):
        twice = [device_id for device_id, count in Counter(device_ids).items() if count > 1]
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f"expected each device ID of {resource} once in a container's request, got {_some(twice)} more than once: "
            "give each ID once",
        )
    warnings = []
    for entry in _asked(resource, device_ids, entries):
        row = TABLE[entry.state]
        if row.allocate is None:
            continue
        known = _known(resource, entry)
        if entry.device.id in handed_out and (row.lenient or row.held):
            why = "the kubelet asks again for devices that a container was given before"
        elif entry.device.id in held and row.held:
            why = "a container holds it"
        elif row.lenient and entry.since is not None and now - entry.since < JUST_TURNED_S:
            why = "it turned just now and the kubelet may not know yet"
        else:
            raise RefusedError(row.allocate, f"expected a device that a container can use, but {known}: {row.way_out}")
        warnings.append(f"{known}; served all the same, because {why}: {row.way_out}")
    return tuple(warnings)


def judge_pre_start(resource: str, device_ids: Sequence[str], entries: Mapping[str, Entry]) -> None:
    """Decide whether the backend may be asked to make a container's devices ready (PreStartContainer).

    The kubelet tries a refused pre-start again, with its restart back-off; a refused admission is final.

    Args:
        resource: the resource name, for the messages.
        device_ids: what the container was given.
        entries: the list as it was last sent, by device ID.

    Raises:
        RefusedError: NOT_FOUND for an ID that isn't on the list, else what the table says.
    """
    for entry in _asked(resource, device_ids, entries):
        row = TABLE[entry.state]
        if row.pre_start is not None:
            raise RefusedError(
                row.pre_start,
                f"expected devices that the backend has found, but {_known(resource, entry)}: {row.way_out}",
            )


def awaits_pre_start(entries: Iterable[Entry]) -> bool:
    """Whether PreStartContainer would be refused for any device of a list, so that the kubelet should be asked to call it."""
    return any(TABLE[layer.state].pre_start is not None for entry in entries for layer in _layers(entry))


def never_announced(resource: str, device_ids: Sequence[str]) -> RefusedError:
    """The refusal, NOT_FOUND, of at least one device ID that isn't on the list of ``resource``."""
    return RefusedError(
        Fault.NOT_FOUND,
        f"expected device IDs that are announced for {resource}, got {_some(device_ids)}, which never was or was withdrawn: "
        "if the kubelet keeps asking for it, drain the node and restart the kubelet, so that it learns the devices anew",
    )


def _asked(resource: str, device_ids: Sequence[str], entries: Mapping[str, Entry]) -> Iterator[Entry]:
    """The entries of these devices, each followed by what it covers."""
    if unknown := [device_id for device_id in device_ids if device_id not in entries]:
        raise never_announced(resource, unknown)
    return (layer for device_id in device_ids for layer in _layers(entries[device_id]))


def _layers(entry: Entry | None) -> Iterator[Entry]:
    while entry is not None:
        yield entry
        entry = entry.beneath


def _known(resource: str, entry: Entry) -> str:
    known = f"device {_shown(entry.device.id)} of {resource} is {entry.state.value}"
    return f"{known} ({entry.reason})" if entry.reason else known


def _some(device_ids: Sequence[str]) -> str:
    """Name some IDs, of any number and any length."""
    first, *rest = device_ids
    return _shown(first) + (f" and {len(rest)} more" if rest else "")


def _shown(device_id: str) -> str:
    return repr(device_id) if len(device_id) <= 80 else f"{device_id[:80]!r}…"
