"""The life of a device: one row, one promise of the table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from devices.life import states
from devices.life.admission import all_present, awaits_pre_start, judge
from devices.life.merging import (
    FIRST_DISCOVERY_S,
    HELD_UNKNOWN_S,
    LOST_FORGOTTEN_S,
    Clock,
    Known,
    Merged,
    Sticky,
    merge,
)
from devices.life.states import Entry, State
from devices.model import Device, Fault, Health, RefusedError, Trouble, TroubleKind
from devices.source import Absence, Listing

WELL, ILL = Health.HEALTHY, Health.UNHEALTHY
RESOURCE = "nvidia.com/gpu"
NOW, UNIX, HOUR = 1000.0, 1e9, 3600.0


def by_id(*entries: Entry) -> dict[str, Entry]:
    return {entry.device.id: entry for entry in entries}


def at(now: float, *, unix: float | None = None, started: float = 0.0) -> Clock:
    """A moment; the wall clock goes with the other one unless told otherwise."""
    return Clock(now, UNIX + now - NOW if unix is None else unix, started)


def look(known: Known, listing: Listing | None, now: float = NOW, before: Sequence[Entry] = (), **more: Any) -> Merged:
    return merge(known, listing, by_id(*before), at(now), **more)


def listed(*devices: Device, trouble: Trouble | None = None, **more: Any) -> Listing:
    """A listing in which ``g``, if anything, has a trouble."""
    return Listing(devices, troubles={} if trouble is None else {"g": trouble}, **more)


G = Device("g", WELL, (1,))
ANNOUNCED = Known({"g": G})
GONE = Listing(())


# The table.


# What the backend sees.


RESET, RIDDLE, RESTART = (
    Trouble("hot", kind) for kind in (TroubleKind.RESET_REQUIRED, TroubleKind.UNKNOWN, TroubleKind.RESTART_APP)
)


@pytest.mark.parametrize("health", Health)
@pytest.mark.parametrize(
    ("kind", "state", "reason", "remembered"),
    [
        (TroubleKind.APPLICATION, State.PRESENT, "hot", False),
        (TroubleKind.RESTART_APP, State.UNHEALTHY, "hot", False),
        (TroubleKind.RESET_REQUIRED, State.UNHEALTHY, "hot; until it is reset, the node reboots, or you run", True),
        (TroubleKind.UNKNOWN, State.UNHEALTHY, "hot; until it is reset, the node reboots, or you run", True),
    ],
)  # fmt: skip
def test_the_kind_of_a_trouble_decides(
    kind: TroubleKind, state: State, reason: str, remembered: bool, health: Health
) -> None:
    """Whatever the device's own health says beside it."""
    trouble = Trouble("hot", kind)
    merged = look(Known({}, "boot"), listed(Device("g", health), trouble=trouble))
    [entry] = merged.entries
    assert (entry.state, entry.kind, entry.reason.startswith(reason)) == (state, kind, True)
    assert merged.sticky == ({"g": Sticky(trouble, UNIX, "boot")} if remembered else {})


@pytest.mark.parametrize(
    ("remembered", "boot", "listing", "state", "left"),
    [
        pytest.param(RESET, "this", listed(G), State.UNHEALTHY, RESET, id="well again by itself: ill all the same"),
        pytest.param(RIDDLE, "this", listed(G), State.UNHEALTHY, RIDDLE, id="unknown: as well"),
        pytest.param(RESET, "that", listed(G), State.PRESENT, None, id="the node rebooted"),
        pytest.param(RESET, "that", listed(G, trouble=RESET), State.UNHEALTHY, RESET, id="rebooted, and ill again"),
        pytest.param(RESET, "this", listed(G, recovered=frozenset("g")), State.PRESENT, None, id="it was reset"),
        pytest.param(RESET, "this", listed(G, recovered=frozenset("h")), State.UNHEALTHY, RESET, id="another was reset"),
        pytest.param(RESET, "this", listed(G, trouble=RIDDLE, recovered=frozenset("g")), State.UNHEALTHY, RIDDLE, id="reset, and ill again"),
        pytest.param(RESET, "this", listed(G, trouble=RESTART), State.UNHEALTHY, RESET, id="a lesser trouble beside it"),
        pytest.param(RESET, "this", listed(G, trouble=RIDDLE), State.UNHEALTHY, RIDDLE, id="another trouble instead"),
        pytest.param(None, "this", listed(G), State.PRESENT, None, id="forgotten by an operator"),
        pytest.param(RESET, "this", GONE, State.LOST, RESET, id="lost in the meantime: remembered for its return"),
        pytest.param(RESET, "this", None, State.UNHEALTHY, RESET, id="not looked yet: ill from memory"),
        pytest.param(RESET, "that", None, State.NOT_LOOKED_YET, None, id="rebooted, not looked yet"),
    ],
)  # fmt: skip
def test_a_trouble_that_must_be_remembered(
    remembered: Trouble | None, boot: str, listing: Listing | None, state: State, left: Trouble | None
) -> None:
    known = Known({"g": G}, "this", sticky={} if remembered is None else {"g": Sticky(remembered, 5.0, boot)})
    merged = merge(known, listing, {}, at(10.0))
    [entry] = merged.entries
    assert entry.state is state
    assert {device_id: row.trouble for device_id, row in merged.sticky.items()} == ({} if left is None else {"g": left})
    assert all(row.boot_id == "this" for row in merged.sticky.values())


# What the backend doesn't see.


@pytest.mark.parametrize(
    ("grace", "now", "listing", "before", "state"),
    [
        pytest.param(0, FIRST_DISCOVERY_S - 1, None, None, State.NOT_LOOKED_YET, id="the first look may take a while"),
        pytest.param(0, FIRST_DISCOVERY_S, None, State.NOT_LOOKED_YET, State.UNHEALTHY, id="but not for ever"),
        pytest.param(0, FIRST_DISCOVERY_S + 9, None, State.UNHEALTHY, State.UNHEALTHY, id="and it stays so"),
        pytest.param(0, 1, GONE, State.NOT_LOOKED_YET, State.LOST, id="what isn't found at the first look is lost"),
        pytest.param(0, FIRST_DISCOVERY_S, listed(G), State.UNHEALTHY, State.PRESENT, id="a late look"),
        pytest.param(60, 59, None, State.NOT_LOOKED_YET, State.NOT_LOOKED_YET, id="grace"),
        pytest.param(60, 60, None, State.NOT_LOOKED_YET, State.UNHEALTHY, id="grace is the bound, where it is shorter"),
        pytest.param(900, 899, None, State.NOT_LOOKED_YET, State.NOT_LOOKED_YET, id="and where it is longer"),
        pytest.param(60, 59, GONE, None, State.NOT_LOOKED_YET, id="grace: it may still turn up"),
        pytest.param(60, 59, GONE, State.NOT_LOOKED_YET, State.NOT_LOOKED_YET, id="grace: still"),
        pytest.param(60, 60, GONE, State.NOT_LOOKED_YET, State.LOST, id="grace is over"),
        pytest.param(60, 59, GONE, State.PRESENT, State.LOST, id="grace is not for what was there and went"),
    ],
)
def test_the_first_discovery_is_bounded(
    grace: float, now: float, listing: Listing | None, before: State | None, state: State
) -> None:
    last = [] if before is None else [Entry(G, before)]
    merged = look(ANNOUNCED, listing, now, last, grace=grace)
    [entry] = merged.entries
    assert entry.state is state
    assert merged.again_at == (grace or FIRST_DISCOVERY_S if state is State.NOT_LOOKED_YET else None)
    assert awaits_pre_start(merged.entries) == (state is State.NOT_LOOKED_YET)


@pytest.mark.parametrize(
    ("looks", "left"),
    [
        pytest.param([(0, None), (HELD_UNKNOWN_S - 1, None)], True, id="within the bound"),
        pytest.param([(0, None), (HELD_UNKNOWN_S, None)], False, id="after it"),
        pytest.param([(0, None), (1, {"g"}), (HELD_UNKNOWN_S, {"g"})], True, id="held: without end"),
        pytest.param([(0, None), (1, {"g"}), (HELD_UNKNOWN_S, None)], True, id="held, then unknown: begins anew"),
        pytest.param([(0, {"g"}), (1, None), (HELD_UNKNOWN_S + 1, None)], False, id="held, then unknown for too long"),
        pytest.param([(0, None), (1, set())], False, id="nobody holds it"),
        pytest.param([(0, {"g"}), (1, set())], False, id="nobody holds it any more"),
    ],
)
def test_a_withdrawn_device_whose_holder_cannot_be_seen(
    looks: Sequence[tuple[float, Collection[str] | None]], left: bool
) -> None:
    merged = look(ANNOUNCED, listed(G), 0.0)
    for now, held in looks:
        known = replace(ANNOUNCED, held=None if held is None else frozenset(held), absences={"g": Absence.WITHDRAWN})
        merged = look(known, GONE, now, merged.entries)
    assert bool(merged.entries) == left
    assert merged.dropped == (set() if left else {"g"})


# Cordons and releases.


# Spells of illness.


# The list as a whole.


@pytest.mark.parametrize(
    ("since", "held", "listing", "states", "kept"),
    [
        pytest.param(None, set(), GONE, [State.LOST], UNIX, id="lost now"),
        pytest.param(UNIX - LOST_FORGOTTEN_S + 1, set(), GONE, [State.LOST], UNIX - LOST_FORGOTTEN_S + 1, id="not yet"),
        pytest.param(UNIX - LOST_FORGOTTEN_S, set(), GONE, [], None, id="after 30 days"),
        pytest.param(UNIX - LOST_FORGOTTEN_S, {"g"}, GONE, [State.LOST], UNIX - LOST_FORGOTTEN_S, id="never while held"),
        pytest.param(UNIX - LOST_FORGOTTEN_S, None, GONE, [State.LOST], UNIX - LOST_FORGOTTEN_S, id="nor while unknown"),
        pytest.param(UNIX + HOUR, set(), GONE, [State.LOST], UNIX + HOUR, id="the wall clock went back"),
        pytest.param(UNIX - 9, set(), listed(G), [State.PRESENT], None, id="it is back"),
        pytest.param(UNIX - 9, set(), None, [State.NOT_LOOKED_YET], UNIX - 9, id="not looked yet: remembered"),
    ],
)  # fmt: skip
def test_a_lost_device_is_forgotten_in_the_end(
    since: float | None,
    held: Collection[str] | None,
    listing: Listing | None,
    states: list[State],
    kept: float | None,
) -> None:
    known = replace(
        ANNOUNCED,
        held=None if held is None else frozenset(held),
        lost_since={} if since is None else {"g": since},
    )
    merged = merge(known, listing, {}, Clock(NOW, UNIX, NOW))
    assert [entry.state for entry in merged.entries] == states
    assert merged.lost_since == ({} if kept is None else {"g": kept})
    assert merged.dropped == (set() if states else {"g"})
    if states == [State.LOST] and held == set():
        assert merged.again_at == NOW + (kept or 0.0) + LOST_FORGOTTEN_S - UNIX


def test_a_device_that_was_ill_in_this_boot_gets_no_grace() -> None:
    known = Known({"g": G}, "this", sticky={"g": Sticky(RESET, 5.0, "this")})
    before = look(known, None, 1.0, grace=60).entries
    for last in ((), before):
        assert [entry.state for entry in look(known, GONE, 2.0, last, grace=60).entries] == [State.LOST]


@pytest.mark.parametrize(
    ("announced", "last", "listing", "health", "beneath"),
    [
        pytest.param(WELL, State.PRESENT, GONE, WELL, State.PRESENT, id="can't be seen: as well as it was"),
        pytest.param(WELL, State.PRESENT, listed(G, trouble=RESET), WELL, State.PRESENT, id="a trouble doesn't count"),
        pytest.param(WELL, State.UNHEALTHY, listed(G), ILL, State.UNHEALTHY, id="ill: stays ill"),
        pytest.param(WELL, State.LOST, listed(G), ILL, State.LOST, id="lost: stays lost"),
        pytest.param(WELL, None, GONE, WELL, State.NOT_LOOKED_YET, id="a restart meanwhile: as announced"),
        pytest.param(ILL, None, GONE, ILL, State.NOT_LOOKED_YET, id="a restart meanwhile: ill as announced"),
        pytest.param(None, None, listed(G), WELL, State.PRESENT, id="never seen before: its first look stays"),
        pytest.param(None, None, listed(G, trouble=RESTART), ILL, State.UNHEALTHY, id="never seen before, and ill"),
    ],
)
def test_a_released_device_is_for_nobody_and_what_was_seen_last_stays(
    announced: Health | None, last: State | None, listing: Listing, health: Health, beneath: State
) -> None:
    known = Known({} if announced is None else {"g": Device("g", announced)}, absences={"g": Absence.WITHDRAWN})
    shown = None if last is None else Entry(Device("g", health), last, "so it was", since=7.0)
    released = replace(listing, released=frozenset("g"))
    merged = look(known, released, before=[] if shown is None else [shown])
    [entry] = merged.entries
    assert (entry.device.health, entry.state, merged.sticky) == (ILL, State.RELEASED, {})
    assert entry.beneath is not None
    assert (entry.beneath.device.health, entry.beneath.state) == (health, beneath)
    if shown is not None:
        assert (entry.beneath, entry.since) == (shown, 7.0 if health is ILL else NOW)
    assert look(known, released, NOW + 1, merged.entries).entries == merged.entries
    [again] = look(known, listed(G), NOW + 2, merged.entries).entries
    assert (again.device.health, again.state) == (WELL, State.PRESENT)


def test_order_is_that_of_the_backend_then_the_others_by_id() -> None:
    known = Known({name: Device(name) for name in ("z", "c", "a", "b")})
    merged = look(known, Listing((Device("c"), Device("new"), Device("b"))))
    assert [entry.device.id for entry in merged.entries] == ["c", "new", "b", "a", "z"]
    assert [entry.device.id for entry in look(known, None).entries] == ["a", "b", "c", "z"]


NAMES = st.sampled_from("abcdef")
SOME = st.frozensets(NAMES)
DEVICES = st.dictionaries(NAMES, st.tuples(st.sampled_from(Health), st.sampled_from([(), (0,), (1,)]))).map(
    lambda found: {name: Device(name, *facts) for name, facts in found.items()}
)
TROUBLES = st.dictionaries(
    NAMES, st.builds(Trouble, st.sampled_from(["", "hot", "cold"]), st.sampled_from(TroubleKind))
)
LISTINGS = st.none() | st.builds(
    lambda devices, troubles, recovered, released: Listing(
        tuple(devices.values()), troubles=troubles, recovered=recovered, released=released
    ),
    DEVICES,
    TROUBLES,
    SOME,
    SOME,
)
KNOWN = st.builds(
    Known,
    DEVICES,
    boot_id=st.sampled_from(["this", "that"]),
    cordons=st.dictionaries(NAMES, st.sampled_from(["x", "y"])),
    sticky=st.dictionaries(
        NAMES,
        st.builds(
            Sticky,
            st.builds(Trouble, st.just("old"), st.sampled_from([TroubleKind.RESET_REQUIRED, TroubleKind.UNKNOWN])),
            st.floats(0, UNIX),
            st.sampled_from(["this", "that"]),
        ),
    ),
    held=st.none() | SOME,
    absences=st.dictionaries(NAMES, st.sampled_from(Absence)),
    lost_since=st.dictionaries(NAMES, st.floats(0, 2 * UNIX)),
)
CLOCKS = st.builds(Clock, st.floats(0, 1e7), st.floats(0, 2 * UNIX), st.sampled_from([0.0, 1e6]))
STEPS = st.lists(st.tuples(KNOWN, LISTINGS, CLOCKS), min_size=1, max_size=5)


def played(steps: Sequence[tuple[Known, Listing | None, Clock]], grace: float) -> tuple[Merged, Mapping[str, Entry]]:
    """Merge step by step, whatever is known at each of them; give the last merge and the entries before it."""
    *earlier, (known, listing, clock) = steps
    before = by_id(*played(earlier, grace)[0].entries) if earlier else {}
    return merge(known, listing, before, clock, grace), before


@given(STEPS, st.sampled_from([0.0, 60.0]))
def test_whatever_comes_there_is_one_answer_for_each_device(
    steps: list[tuple[Known, Listing | None, Clock]], grace: float
) -> None:
    merged, _ = played(steps, grace)
    known, listing, clock = steps[-1]
    seen = {} if listing is None else {device.id: device for device in listing.devices}
    found = [entry.device.id for entry in merged.entries]
    assert len(found) == len(set(found))
    assert set(found) | merged.dropped == known.announced.keys() | seen.keys()
    assert set(found).isdisjoint(merged.dropped)
    assert seen.keys() <= set(found), "what the backend lists never vanishes"
    assert (known.held or frozenset()).isdisjoint(merged.dropped), "what is held is never dropped"
    lost = {device_id for device_id, absence in known.absences.items() if absence is Absence.LOST}
    young = {device_id for device_id in lost if clock.unix - known.lost_since.get(device_id, clock.unix) < 1.0}
    assert young.isdisjoint(merged.dropped), "what was lost only now is never dropped"
    assert merged.again_at is None or merged.again_at >= clock.now
    for entry in merged.entries:
        says = states.TABLE[entry.state].health
        assert says is None or entry.device.health is says
        assert (entry.state is State.CORDONED) == (entry.device.id in known.cordons)


@given(STEPS, st.sampled_from([0.0, 60.0]))
def test_merging_again_changes_nothing(steps: list[tuple[Known, Listing | None, Clock]], grace: float) -> None:
    once, _ = played(steps, grace)
    known, listing, clock = steps[-1]
    announced = {entry.device.id: entry.device for entry in once.entries}
    remembered = replace(known, announced=announced, sticky=once.sticky, lost_since=once.lost_since)
    again = merge(remembered, listing, by_id(*once.entries), clock, grace)
    assert again == replace(once, new=frozenset(), dropped=frozenset())


@given(STEPS)
def test_what_happens_to_others_does_not_matter(steps: list[tuple[Known, Listing | None, Clock]]) -> None:
    """One resource's hundred devices are a hundred times one device."""
    merged, before = played(steps, 0.0)
    known, listing, clock = steps[-1]
    for name in known.announced.keys() | {entry.device.id for entry in merged.entries}:
        alone = None if listing is None else replace(listing, devices=tuple(d for d in listing.devices if d.id == name))
        announced = {name: known.announced[name]} if name in known.announced else {}
        single = merge(replace(known, announced=announced), alone, before, clock)
        assert single.entries == tuple(entry for entry in merged.entries if entry.device.id == name)


# Allocate and PreStartContainer.


def entry(state: State, since: float | None = 0.0, health: Health = ILL, beneath: Entry | None = None) -> Entry:
    return Entry(Device("g", states.TABLE[state].health or health), state, "because", since, beneath=beneath)


def over(state: State, beneath: State, since: float | None = 0.0) -> Entry:
    return entry(state, since, beneath=entry(beneath))


@pytest.mark.parametrize(
    ("known", "who", "verdict"),
    [
        pytest.param(entry(State.PRESENT), "", "served", id="present"),
        pytest.param(entry(State.PRESENT), "again", "served", id="present, handed out before"),
        pytest.param(entry(State.PRESENT), "held", "served", id="present, held: init and app containers share"),
        pytest.param(entry(State.NOT_LOOKED_YET, health=WELL), "", "served", id="not checked yet"),
        pytest.param(entry(State.NOT_LOOKED_YET, health=ILL), "", "served", id="not looked yet, ill the last time"),
        pytest.param(entry(State.UNHEALTHY), "", Fault.FAILED_PRECONDITION, id="unhealthy"),
        pytest.param(entry(State.UNHEALTHY, None), "", Fault.FAILED_PRECONDITION, id="unhealthy since who knows"),
        pytest.param(entry(State.UNHEALTHY, NOW - 1.0), "", Fault.FAILED_PRECONDITION, id="unhealthy for a second"),
        pytest.param(entry(State.UNHEALTHY, NOW - 0.9), "", "warned", id="turned unhealthy just now"),
        pytest.param(entry(State.UNHEALTHY), "again", "warned", id="unhealthy, asked for again at a container's start"),
        pytest.param(entry(State.UNHEALTHY), "held", Fault.FAILED_PRECONDITION, id="unhealthy, held"),
        pytest.param(entry(State.LOST), "", Fault.FAILED_PRECONDITION, id="lost"),
        pytest.param(entry(State.LOST, NOW), "", Fault.FAILED_PRECONDITION, id="lost just now"),
        pytest.param(entry(State.LOST), "again", Fault.FAILED_PRECONDITION, id="lost, asked for again"),
        pytest.param(entry(State.LOST), "held", Fault.FAILED_PRECONDITION, id="lost, held"),
        pytest.param(entry(State.WITHDRAWN), "", Fault.NOT_FOUND, id="withdrawn"),
        pytest.param(entry(State.WITHDRAWN, NOW), "", Fault.NOT_FOUND, id="withdrawn just now"),
        pytest.param(entry(State.WITHDRAWN), "held", "warned", id="withdrawn, held"),
        pytest.param(entry(State.WITHDRAWN), "again", "warned", id="withdrawn, asked for again"),
        pytest.param(over(State.CORDONED, State.PRESENT), "", Fault.FAILED_PRECONDITION, id="cordoned"),
        pytest.param(over(State.CORDONED, State.PRESENT, NOW), "", Fault.FAILED_PRECONDITION, id="cordoned just now"),
        pytest.param(over(State.CORDONED, State.PRESENT), "held", "warned", id="cordoned, held"),
        pytest.param(over(State.CORDONED, State.PRESENT), "again", "warned", id="cordoned, asked for again"),
        pytest.param(over(State.CORDONED, State.UNHEALTHY), "held", Fault.FAILED_PRECONDITION, id="cordoned, held, and ill"),
        pytest.param(over(State.CORDONED, State.LOST), "again", Fault.FAILED_PRECONDITION, id="cordoned and lost"),
        pytest.param(over(State.RELEASED, State.PRESENT), "", Fault.FAILED_PRECONDITION, id="released, was well"),
        pytest.param(over(State.RELEASED, State.PRESENT, NOW), "", Fault.FAILED_PRECONDITION, id="released just now"),
        pytest.param(over(State.RELEASED, State.PRESENT), "held", "warned", id="released, held"),
        pytest.param(over(State.RELEASED, State.PRESENT), "again", "warned", id="released, asked for again"),
        pytest.param(over(State.RELEASED, State.NOT_LOOKED_YET), "held", "warned", id="released, held, and a restart"),
        pytest.param(over(State.RELEASED, State.UNHEALTHY), "", Fault.FAILED_PRECONDITION, id="released, was unhealthy"),
        pytest.param(over(State.RELEASED, State.UNHEALTHY), "again", "warned twice", id="released, was ill, again"),
        pytest.param(entry(State.CORDONED, beneath=over(State.RELEASED, State.LOST)), "held", Fault.FAILED_PRECONDITION, id="cordoned, released, was lost"),
        pytest.param(None, "", Fault.NOT_FOUND, id="never announced"),
        pytest.param(None, "again", Fault.NOT_FOUND, id="never announced, asked for again"),
        pytest.param(None, "held", Fault.NOT_FOUND, id="never announced, held"),
    ],
)  # fmt: skip
def test_allocate(known: Entry | None, who: str, verdict: str | Fault) -> None:
    entries = {} if known is None else {"g": known}
    handed_out, held = (frozenset({"g"}) if who == one else frozenset[str]() for one in ("again", "held"))
    if isinstance(verdict, Fault):
        with pytest.raises(RefusedError) as refused:
            judge(RESOURCE, ("g",), entries, now=NOW, handed_out=handed_out, held=held)
        assert refused.value.fault is verdict
    else:
        warnings = judge(RESOURCE, ("g",), entries, now=NOW, handed_out=handed_out, held=held)
        assert len(warnings) == ["served", "warned", "warned twice"].index(verdict)


TWO = by_id(
    Entry(Device("a"), State.PRESENT),
    Entry(Device("b", ILL), State.UNHEALTHY, "too hot", since=0.0),
    Entry(Device("c", ILL), State.LOST, "the backend no longer finds it", since=0.0),
    Entry(Device("d", ILL), State.WITHDRAWN, "no longer offered, but a container holds it", since=0.0),
    Entry(Device("e", ILL), State.CORDONED, "ticket 7", since=0.0, beneath=Entry(Device("e"), State.PRESENT)),
)


@given(STEPS, st.lists(st.sampled_from("abcgx"), max_size=3))
def test_all_present_is_never_judged_otherwise(
    steps: list[tuple[Known, Listing | None, Clock]], asked: list[str]
) -> None:
    entries = by_id(*played(steps, 0.0)[0].entries)
    if all_present(asked, entries):
        assert judge(RESOURCE, asked, entries, now=NOW) == ()


def test_a_refusal_stays_short_whatever_was_asked() -> None:
    with pytest.raises(RefusedError) as refused:
        judge(RESOURCE, tuple(f"{i}{'x' * 1_000_000}" for i in range(3)), TWO, now=NOW)
    assert len(str(refused.value)) < 500
