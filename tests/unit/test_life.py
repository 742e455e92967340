"""The life of a device: one row, one promise of the table."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices import life
from devices.life import Entry, State, judge, merge
from devices.model import Device, Fault, Health, RefusedError
from devices.source import Listing

WELL, ILL = Health.HEALTHY, Health.UNHEALTHY
RESOURCE = "nvidia.com/gpu"


def by_id(*entries: Entry) -> dict[str, Entry]:
    return {entry.device.id: entry for entry in entries}


@pytest.mark.parametrize(
    ("announced", "listed", "state", "health"),
    [
        pytest.param(None, WELL, State.PRESENT, WELL, id="new"),
        pytest.param(WELL, WELL, State.PRESENT, WELL, id="still there"),
        pytest.param(ILL, WELL, State.PRESENT, WELL, id="recovered, or back"),
        pytest.param(None, ILL, State.UNHEALTHY, ILL, id="new and ill"),
        pytest.param(WELL, ILL, State.UNHEALTHY, ILL, id="fell ill"),
        pytest.param(ILL, ILL, State.UNHEALTHY, ILL, id="still ill"),
        pytest.param(WELL, None, State.LOST, ILL, id="gone, and never dropped from the list"),
        pytest.param(ILL, None, State.LOST, ILL, id="ill, then gone"),
    ],
)
def test_a_device_that_was_looked_for(
    announced: Health | None, listed: Health | None, state: State, health: Health
) -> None:
    known = {} if announced is None else {"g": Device("g", announced, (1,))}
    seen = Listing(() if listed is None else (Device("g", listed, (1,)),), reasons={"g": "because"} if listed else {})
    (entry,) = merge(known, seen, {}, 100.0)
    assert (entry.device, entry.state) == (Device("g", health, (1,)), state)
    assert entry.reason == ("because" if listed else "the backend no longer finds it")


@pytest.mark.parametrize("health", Health)
def test_before_the_first_look_the_list_says_what_it_said_last(health: Health) -> None:
    (entry,) = merge({"g": Device("g", health, (1,))}, None, {}, 100.0)
    assert (entry.device, entry.state, entry.since) == (Device("g", health, (1,)), State.NOT_LOOKED_YET, None)


def test_an_empty_listing_is_not_the_same_as_none() -> None:
    (entry,) = merge({"g": Device("g")}, Listing(()), {}, 100.0)
    assert entry.state is State.LOST


def test_order_is_that_of_the_backend_then_the_lost_ones_by_id() -> None:
    announced = {name: Device(name) for name in ("z", "c", "a", "b")}
    merged = merge(announced, Listing((Device("c"), Device("new"), Device("b"))), {}, 0.0)
    assert [entry.device.id for entry in merged] == ["c", "new", "b", "a", "z"]
    assert [entry.device.id for entry in merge(announced, None, {}, 0.0)] == ["a", "b", "c", "z"]


@pytest.mark.parametrize(
    ("announced", "before", "listed", "since"),
    [
        pytest.param(None, None, WELL, 100.0, id="new: now"),
        pytest.param(WELL, None, WELL, None, id="as before the restart: unknown"),
        pytest.param(ILL, None, ILL, None, id="ill before the restart: did not turn now"),
        pytest.param(WELL, None, ILL, 100.0, id="fell ill over the restart: now"),
        pytest.param(WELL, (WELL, 5.0), WELL, 5.0, id="unchanged: since then"),
        pytest.param(ILL, (ILL, 5.0), ILL, 5.0, id="still ill: since then"),
        pytest.param(WELL, (WELL, 5.0), ILL, 100.0, id="fell ill: now"),
        pytest.param(ILL, (ILL, 5.0), WELL, 100.0, id="recovered: now"),
        pytest.param(WELL, (WELL, 5.0), None, 100.0, id="lost: now"),
        pytest.param(ILL, (ILL, 5.0), None, 5.0, id="ill, then lost: the list has said Unhealthy since then"),
        pytest.param(ILL, (ILL, None), ILL, None, id="still as before the restart"),
    ],
)
def test_since_when(
    announced: Health | None, before: tuple[Health, float | None] | None, listed: Health | None, since: float | None
) -> None:
    known = {} if announced is None else {"g": Device("g", announced)}
    previous = {} if before is None else by_id(Entry(Device("g", before[0]), State.PRESENT, since=before[1]))
    (entry,) = merge(known, Listing(() if listed is None else (Device("g", listed),)), previous, 100.0)
    assert entry.since == since


devices = st.dictionaries(
    st.sampled_from("abcdefgh"), st.tuples(st.sampled_from(Health), st.sampled_from([(), (0,), (1,)])), max_size=8
).map(lambda found: {name: Device(name, *facts) for name, facts in found.items()})


@given(devices, st.none() | devices)
def test_nothing_announced_is_ever_dropped_and_nothing_else_is_added(
    announced: Mapping[str, Device], listed: Mapping[str, Device] | None
) -> None:
    merged = merge(announced, None if listed is None else Listing(tuple(listed.values())), {}, 0.0)
    found = [entry.device.id for entry in merged]
    assert len(found) == len(set(found))
    assert set(found) == announced.keys() | (listed or {}).keys()
    for entry in merged:
        source = listed if listed is not None and entry.device.id in listed else announced
        assert entry.device.numa_nodes == source[entry.device.id].numa_nodes
        healthy = listed is not None and entry.device.id in listed and listed[entry.device.id].health is WELL
        if listed is not None:
            assert entry.device.health is (WELL if healthy else ILL)


@given(devices, devices)
def test_merging_again_changes_nothing(announced: Mapping[str, Device], listed: Mapping[str, Device]) -> None:
    listing = Listing(tuple(listed.values()))
    once = merge(announced, listing, {}, 0.0)
    assert merge({entry.device.id: entry.device for entry in once}, listing, by_id(*once), 50.0) == once


def test_ten_thousand_devices() -> None:
    announced = {f"g{i}": Device(f"g{i}") for i in range(10_000)}
    merged = merge(announced, Listing(tuple(list(announced.values())[5000:])), {}, 0.0)
    assert sum(entry.state is State.LOST for entry in merged) == 5000
    well = tuple(entry.device.id for entry in merged if entry.state is State.PRESENT)
    assert judge(RESOURCE, well, by_id(*merged), now=0.0) == ()


NOW = 100.0


def entry(state: State, since: float | None = 0.0, health: Health = ILL) -> Entry:
    return Entry(Device("g", life.TABLE[state].health or health), state, "because", since)


@pytest.mark.parametrize(
    ("known", "again", "verdict"),
    [
        pytest.param(entry(State.PRESENT), False, "served", id="present"),
        pytest.param(entry(State.PRESENT), True, "served", id="present, handed out before"),
        pytest.param(entry(State.NOT_LOOKED_YET, health=WELL), False, "served", id="not looked yet"),
        pytest.param(entry(State.NOT_LOOKED_YET, health=ILL), False, "served", id="not looked yet, ill the last time"),
        pytest.param(entry(State.UNHEALTHY), False, Fault.FAILED_PRECONDITION, id="unhealthy"),
        pytest.param(entry(State.UNHEALTHY, None), False, Fault.FAILED_PRECONDITION, id="unhealthy since who knows"),
        pytest.param(entry(State.UNHEALTHY, NOW - 1.0), False, Fault.FAILED_PRECONDITION, id="unhealthy for a second"),
        pytest.param(entry(State.UNHEALTHY, NOW - 0.9), False, "warned", id="turned unhealthy just now"),
        pytest.param(entry(State.UNHEALTHY), True, "warned", id="unhealthy, asked for again at a container's start"),
        pytest.param(entry(State.LOST), False, Fault.FAILED_PRECONDITION, id="lost"),
        pytest.param(entry(State.LOST, NOW), False, Fault.FAILED_PRECONDITION, id="lost just now"),
        pytest.param(entry(State.LOST), True, Fault.FAILED_PRECONDITION, id="lost, asked for again"),
        pytest.param(None, False, Fault.NOT_FOUND, id="never announced"),
        pytest.param(None, True, Fault.NOT_FOUND, id="never announced, asked for again"),
    ],
)
def test_allocate(known: Entry | None, again: bool, verdict: str | Fault) -> None:
    entries = {} if known is None else {"g": known}
    handed_out = frozenset({"g"}) if again else frozenset[str]()
    if isinstance(verdict, Fault):
        with pytest.raises(RefusedError) as refused:
            judge(RESOURCE, ("g",), entries, now=NOW, handed_out=handed_out)
        assert refused.value.fault is verdict
    else:
        warnings = judge(RESOURCE, ("g",), entries, now=NOW, handed_out=handed_out)
        assert len(warnings) == (verdict == "warned")


TWO = by_id(
    Entry(Device("a"), State.PRESENT),
    Entry(Device("b", ILL), State.UNHEALTHY, "too hot", since=0.0),
    Entry(Device("c", ILL), State.LOST, "the backend no longer finds it", since=0.0),
)


@pytest.mark.parametrize(
    ("asked", "fault", "message"),
    [
        (
            (),
            Fault.INVALID_ARGUMENT,
            "expected at least one device ID of nvidia.com/gpu for a container, got none: ask for one, or don't call",
        ),
        (
            ("a", "x", "a"),
            Fault.INVALID_ARGUMENT,
            (
                "expected each device ID of nvidia.com/gpu once in a container's request, got 'a' more than once: give each ID "
                "once"
            ),
        ),
        (
            ("b", "x", "y"),
            Fault.NOT_FOUND,
            (
                "expected device IDs that were announced for nvidia.com/gpu, got 'x' and 1 more, which never was: if the kubelet "
                "keeps asking for it, drain the node and restart the kubelet, so that it learns the devices anew"
            ),
        ),
        (
            ("a", "b"),
            Fault.FAILED_PRECONDITION,
            (
                "expected a device that a container can use, but device 'b' of nvidia.com/gpu is unhealthy (too hot): start the "
                "pod anew so that it gets another device, and repair this one"
            ),
        ),
        (
            ("c",),
            Fault.FAILED_PRECONDITION,
            (
                "expected a device that a container can use, but device 'c' of nvidia.com/gpu is lost (the backend no longer "
                "finds it): start the pod anew so that it gets another device, and check this one's seat, power and driver"
            ),
        ),
    ],
)
def test_a_refusal_says_what_was_asked_what_is_known_and_what_to_do(
    asked: tuple[str, ...], fault: Fault, message: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        judge(RESOURCE, asked, TWO, now=NOW)
    assert (refused.value.fault, str(refused.value)) == (fault, message)


def test_a_warning_says_why_the_device_was_served() -> None:
    just_now = by_id(Entry(Device("b", ILL), State.UNHEALTHY, "too hot", since=NOW))
    assert judge(RESOURCE, ("b",), just_now, now=NOW) == (
        (
            "device 'b' of nvidia.com/gpu is unhealthy (too hot); served all the same, because it turned just now and the "
            "kubelet may not know yet: start the pod anew so that it gets another device, and repair this one"
        ),
    )


def test_the_same_device_for_two_containers_is_fine() -> None:
    for _ in range(2):
        assert judge(RESOURCE, ("a",), TWO, now=NOW) == ()


def test_a_refusal_stays_short_whatever_was_asked() -> None:
    with pytest.raises(RefusedError) as refused:
        judge(RESOURCE, tuple(f"{i}{'x' * 1_000_000}" for i in range(3)), TWO, now=NOW)
    assert len(str(refused.value)) < 500


def test_every_state_has_its_row() -> None:
    assert set(life.TABLE) == set(State)
