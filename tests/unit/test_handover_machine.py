"""Handover: who yields, each step of a handover as a row, and every course that two gateways can take together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, field
from msgspec.structs import replace

from adapters.dialect import Level
from gateway.age import HOST_SERVICE_NS, Age, in_turn, plausible
from gateway.handover import machine as s
from gateway.handover.events import (
    Action,
    Event,
    HandoverOutcome,
    Heard,
    Note,
    RegisterAgain,
    Say,
    SetWait,
    Standing,
    Stood,
    Tell,
    Unserved,
    WaitOver,
    Wanted,
    standing,
)
from gateway.handover.machine import Newer, Older
from gateway.handover.records import LACKING, LACKING_STILL, LOOK_CLOSELY, RecordsSeen
from gateway.registration.events import Phase


@pytest.mark.parametrize(
    ("own", "peers", "waits_for"),
    [
        pytest.param(Age(5, "b"), [], None, id="alone"),
        pytest.param(Age(5, "b"), [Age(4, "z")], None, id="the other is older: it yields"),
        pytest.param(Age(5, "b"), [Age(6, "a")], Age(6, "a"), id="the other is newer: we yield"),
        pytest.param(Age(5, "b"), [Age(6, "a"), Age(7, "a")], Age(7, "a"), id="the newest counts"),
        pytest.param(Age(5, "b"), [Age(5, "c")], Age(5, "c"), id="born together: the token decides"),
        pytest.param(Age(5, "c"), [Age(5, "b")], None, id="and decides the other way for the other"),
        pytest.param(Age(9, "a"), [Age(HOST_SERVICE_NS + 5, "b")], Age(HOST_SERVICE_NS + 5, "b"), id="a host service"),
        pytest.param(Age(HOST_SERVICE_NS + 5, "b"), [Age(9, "a")], None, id="a pod that came after the host service"),
        pytest.param(
            Age(HOST_SERVICE_NS + 5, "a"),
            [Age(9, "b"), Age(HOST_SERVICE_NS + 6, "c")],
            Age(HOST_SERVICE_NS + 6, "c"),
            id="of two host services the newer, too",
        ),
    ],
)
def test_the_older_yields(own: Age, peers: list[Age], waits_for: Age | None) -> None:
    assert next(iter(in_turn(own, peers)), None) == waits_for


@pytest.mark.parametrize(
    ("phase", "streams", "stands"),
    [
        pytest.param(Phase.ABSENT, False, Standing.IDLE, id="no kubelet"),
        pytest.param(Phase.OFFERING, False, Standing.BUSY, id="a Register in flight"),
        pytest.param(Phase.OFFERING, True, Standing.BUSY, id="1.8 and 1.9 have called, and not answered yet"),
        pytest.param(Phase.ACCEPTED, False, Standing.BUSY, id="1.24 and before: answered, and yet to call"),
        pytest.param(Phase.SERVING, True, Standing.SERVING, id="served"),
        pytest.param(Phase.WAITING, False, Standing.IDLE, id="cut"),
        pytest.param(Phase.WAITING, True, Standing.LEAVING, id="about to register anew, the stream isn't over"),
        pytest.param(Phase.STANDBY, True, Standing.LEAVING, id="told to stand by, the stream isn't over"),
        pytest.param(Phase.STANDBY, False, Standing.IDLE, id="standing by"),
        pytest.param(Phase.OUT, False, Standing.OUT, id="too large"),
        pytest.param(Phase.STOPPED, False, Standing.OUT, id="the gateway ends"),
    ],
)
def test_standing(phase: Phase, streams: bool, stands: Standing) -> None:
    assert standing(phase, streams=streams) is stands


@pytest.mark.parametrize("phase", Phase)
def test_what_is_refused_waits_without_a_stream(phase: Phase) -> None:
    assert (standing(phase, streams=False, refused=True) is REFUSED) is (phase is Phase.WAITING)
    assert standing(phase, streams=True, refused=True) is not REFUSED


NOW = 1000


@pytest.mark.parametrize(
    ("born_ns", "can_be"),
    [
        pytest.param(0, True, id="at the boot"),
        pytest.param(-1, False, id="before the boot"),
        pytest.param(NOW, True, id="now"),
        pytest.param(NOW + 1, False, id="in the future, or in the boot before"),
        pytest.param(HOST_SERVICE_NS - 1, False, id="as old as the world"),
        pytest.param(HOST_SERVICE_NS, True, id="a host service at the boot"),
        pytest.param(HOST_SERVICE_NS + NOW, True, id="a host service now"),
        pytest.param(HOST_SERVICE_NS + NOW + 1, False, id="a host service in the future"),
    ],
)
def test_when_a_gateway_can_have_started(born_ns: int, can_be: bool) -> None:
    assert plausible(Age(born_ns, "a"), NOW) is can_be


# Standing by in vain.


@pytest.mark.parametrize(
    ("peers", "waits_for"),
    [
        pytest.param([Age(6, "a")], None, id="the one that we stood by for in vain"),
        pytest.param([Age(6, "a"), Age(7, "a")], Age(7, "a"), id="another one"),
    ],
)
def test_who_is_doubted_is_not_stood_by_for(peers: list[Age], waits_for: Age | None) -> None:
    assert next(iter(in_turn(Age(5, "b"), peers, {Age(6, "a")})), None) == waits_for


def test_what_the_records_lack_is_told_again() -> None:
    records = RecordsSeen().look(10.0, shown=False)
    assert records.unserved(11.5, 8)
    told = replace(records, told=11.5)
    assert [told.unserved(now, 8) for now in (11.75, 12.0, 12.2)] == [False, False, True]
    assert not told.unserved(16.5, 5000)


@pytest.mark.parametrize(
    ("taken", "seconds"), [(0, LACKING), (1, LACKING), (2, 2 * LACKING), (8, 128 * LACKING), (10_000, 128 * LACKING)]
)
def test_from_the_same_gateway_it_is_taken_back_ever_more_seldom(taken: int, seconds: float) -> None:
    records = RecordsSeen().look(10.0, shown=False)
    assert not records.unserved(10.0 + 0.99 * seconds, 0, taken)
    assert records.unserved(10.0 + 1.01 * seconds, 0, taken)


@pytest.mark.parametrize(
    ("looks", "devices", "unserved", "again"),
    [
        pytest.param([(0.0, False)], 8, False, 0.25, id="not yet"),
        pytest.param([(0.0, False), (1.4, False)], 8, False, 0.25, id="a kubelet takes its time"),
        pytest.param([(0.0, False), (1.41, False)], 8, True, 0.25, id="too long"),
        pytest.param([(0.0, False), (1.41, False)], 5000, False, 0.25, id="but not for so many"),
        pytest.param([(0.0, False), (6.4, False)], 5000, True, 0.25, id="too long for any"),
        pytest.param([(0.0, False), (1.0, True), (1.5, False)], 8, False, 0.25, id="it was there in between"),
        pytest.param([(0.0, False), (1.0, None), (1.5, False)], 8, True, 0.25, id="a look that showed nothing"),
        pytest.param([(0.0, None), (9.0, None)], 8, False, 1.0, id="nothing is known"),
        pytest.param([(0.0, None)] * 99, 8, False, 32.0, id="nothing is ever known"),
        pytest.param([(0.0, True)], 8, False, 1.0, id="served"),
        pytest.param([(0.0, True), (9.0, False), (10.5, False)], 8, True, 0.25, id="no longer"),
    ],
)
def test_looks_into_the_records(
    looks: list[tuple[float, bool | None]], devices: int, unserved: bool, again: float
) -> None:
    records = RecordsSeen()
    for now, shown in looks:
        records = records.look(now, shown=shown)
    assert (records.unserved(looks[-1][0], devices), records.again(talks=False)) == (unserved, again)
    served = looks[-1][1] is True
    assert records.again(talks=True) == (None if served else again)


@pytest.mark.parametrize(
    ("level", "late", "first"),
    [
        pytest.param(None, False, False, id="nothing known"),
        pytest.param(Level(10), False, False, id="any v1beta1 kubelet"),
        pytest.param(Level(36, 37), False, False, id="perhaps 1.37"),
        pytest.param(Level(36, 36), False, False, id="1.36 disconnects whoever is registered"),
        pytest.param(Level(37), False, True, id="1.37 or later, for certain"),
        pytest.param(Level(32, 32), True, True, id="asked too late: its Register may be in flight"),
    ],
)
def test_who_registers_before_the_old_streams_end(level: Level | None, late: bool, first: bool) -> None:
    assert s.register_first(level, late=late) is first


# One side, row by row.

SERVING, BUSY, IDLE, OUT, LEAVING, REFUSED = (
    Standing.SERVING,
    Standing.BUSY,
    Standing.IDLE,
    Standing.OUT,
    Standing.LEAVING,
    Standing.REFUSED,
)
UNSERVED = Unserved()
ASKED, ASKED_LATE = Wanted(first=False, could_serve=True), Wanted(first=True, could_serve=True)
ASKED_IN_VAIN = Wanted(first=False, could_serve=False)
OVER, OVER_IN_VAIN = WaitOver(could_serve=True), WaitOver(could_serve=False)


def heard(say: Say) -> Heard:
    return Heard(say)


def stood(standing: Standing) -> Stood:
    return Stood(standing)


def said(actions: tuple[Action, ...]) -> list[Say]:
    return [action.say for action in actions if isinstance(action, Tell)]


def waits(actions: tuple[Action, ...]) -> list[float | None]:
    return [action.seconds for action in actions if isinstance(action, SetWait)]


def play(state: s.State, events: list[Event]) -> tuple[s.State, tuple[Action, ...]]:
    """Play ``events``; return the state and what the last of them caused."""
    actions: tuple[Action, ...] = ()
    for event in events:
        state, actions = s.step(state, event)
    return state, actions


LENT: list[Event] = [ASKED, stood(LEAVING), stood(IDLE)]
ASKED_BACK: list[Event] = [*LENT, OVER]
DONE: list[Event] = [*LENT, heard(Say.SERVING)]
TAKEN: list[Event] = [*ASKED_BACK, OVER]


@pytest.mark.parametrize(
    ("own", "events", "stage", "says"),
    [
        pytest.param(SERVING, [ASKED], Older.ENDING, [], id="1.36 and before: end the streams first"),
        pytest.param(SERVING, LENT, Older.LENT, [Say.YOURS], id="and say so when they are over"),
        pytest.param(SERVING, [ASKED_LATE], Older.PROMISED, [Say.FIRST], id="1.37: the newer one registers first"),
        pytest.param(SERVING, [ASKED_LATE, heard(Say.SERVING)], Older.CONFIRMED, [], id="1.37: and then we end"),
        pytest.param(SERVING, [ASKED_LATE, OVER], Older.TAKEN, [Say.MINE], id="1.37: it isn't called, we went on"),
        pytest.param(
            SERVING, [ASKED_LATE, stood(IDLE)], Older.LENT, [Say.YOURS], id="1.37: the kubelet restarts meanwhile"
        ),
        pytest.param(
            SERVING, [ASKED_LATE, stood(BUSY), heard(Say.SERVING)], Older.CONFIRMED, [], id="1.37: and both register"
        ),
        pytest.param(SERVING, [ASKED_LATE, ASKED], Older.ENDING, [], id="1.37: it asks again, of an older kubelet"),
        pytest.param(IDLE, [ASKED], Older.LENT, [Say.YOURS], id="no stream: lent at once"),
        pytest.param(IDLE, [ASKED_LATE], Older.LENT, [Say.YOURS], id="no stream and late: lent at once"),
        pytest.param(OUT, [ASKED], Older.LENT, [Say.YOURS], id="not offered: lent at once"),
        pytest.param(BUSY, [ASKED], Older.ENDING, [Say.WAIT], id="our Register is in flight: wait for it"),
        pytest.param(BUSY, [ASKED, stood(SERVING)], Older.ENDING, [], id="it succeeds: now the stream can end"),
        pytest.param(BUSY, [ASKED, stood(IDLE)], Older.LENT, [Say.YOURS], id="it fails: lent"),
        pytest.param(BUSY, [ASKED, OVER], Older.ENDING, [], id="it takes long: still no stream is ended"),
        pytest.param(
            BUSY, [ASKED, heard(Say.GOING)], Older.PROMISED, [], id="the newer one has no patience: it goes first"
        ),
        pytest.param(BUSY, [ASKED_LATE], Older.PROMISED, [Say.FIRST], id="both register: nobody ends a stream"),
        pytest.param(BUSY, [ASKED_LATE, OVER], Older.PROMISED, [], id="both register, and a kubelet hangs"),
        pytest.param(
            BUSY,
            [ASKED_LATE, heard(Say.SERVING), stood(SERVING), stood(LEAVING), stood(IDLE)],
            Older.CONFIRMED,
            [Say.ANEW],
            id="both have registered: it does so once more when our streams are over",
        ),
        pytest.param(
            SERVING,
            [ASKED_LATE, stood(BUSY), stood(SERVING), heard(Say.SERVING), stood(LEAVING), stood(IDLE)],
            Older.CONFIRMED,
            [Say.ANEW],
            id="both have registered, with a kubelet that started meanwhile",
        ),
        pytest.param(
            BUSY,
            [ASKED_LATE, heard(Say.SERVING), stood(IDLE), stood(IDLE)],
            Older.CONFIRMED,
            [],
            id="both have registered: that is said once",
        ),
        pytest.param(
            SERVING,
            [ASKED_LATE, heard(Say.SERVING), stood(LEAVING), stood(IDLE)],
            Older.CONFIRMED,
            [],
            id="1.37: it registered, and we didn't",
        ),
        pytest.param(SERVING, [ASKED, heard(Say.GOING)], Older.ENDING, [], id="it goes while we end: we end"),
        pytest.param(SERVING, [ASKED, OVER], Older.LENT, [Say.YOURS], id="a stream that nobody reads doesn't end"),
        pytest.param(SERVING, [heard(Say.GOING)], Older.PROMISED, [Say.FIRST], id="it never asked: let it register"),
        pytest.param(SERVING, [heard(Say.SERVING)], Older.CONFIRMED, [], id="it never asked and serves: yield"),
        pytest.param(
            SERVING,
            [heard(Say.SERVING), stood(LEAVING), stood(IDLE)],
            Older.CONFIRMED,
            [Say.ANEW],
            id="both served: it registers once more, when our streams are over",
        ),
        pytest.param(
            IDLE, [heard(Say.SERVING), stood(OUT)], Older.CONFIRMED, [], id="it alone served: it registers no more"
        ),
        pytest.param(SERVING, [heard(Say.RELEASED)], Older.APART, [], id="gives back what it never had"),
        pytest.param(SERVING, [heard(Say.BUSY)], Older.APART, [], id="answers what was never asked"),
        pytest.param(SERVING, [heard(Say.MINE)], Older.APART, [], id="a newer one that speaks like an older one"),
        pytest.param(SERVING, DONE, Older.CONFIRMED, [], id="the newer one serves"),
        pytest.param(SERVING, [*DONE, heard(Say.SERVING)], Older.CONFIRMED, [], id="and says it twice"),
        pytest.param(SERVING, ASKED_BACK, Older.REVOKING, [Say.REVOKE], id="no report: ask it back"),
        pytest.param(SERVING, [*LENT, OVER_IN_VAIN], Older.LENT, [], id="no kubelet: nobody could report"),
        pytest.param(SERVING, [*ASKED_BACK, heard(Say.SERVING)], Older.CONFIRMED, [], id="asked back: it serves"),
        pytest.param(SERVING, [*ASKED_BACK, heard(Say.BUSY)], Older.REVOKING, [], id="asked back: it is registering"),
        pytest.param(SERVING, [*ASKED_BACK, heard(Say.RELEASED)], Older.RESTING, [], id="asked back: given back"),
        pytest.param(SERVING, TAKEN, Older.TAKEN, [Say.MINE], id="asked back: silence, so we register"),
        pytest.param(SERVING, [*TAKEN, OVER], Older.TAKEN, [Say.MINE], id="and tell it again"),
        pytest.param(SERVING, [*TAKEN, heard(Say.SERVING)], Older.TAKEN, [Say.MINE], id="too late: it has to yield"),
        pytest.param(SERVING, [*TAKEN, heard(Say.GOING)], Older.TAKEN, [Say.MINE], id="too late: it must not register"),
        pytest.param(SERVING, [*TAKEN, ASKED], Older.TAKEN, [Say.MINE], id="it asks at once: not yet"),
        pytest.param(SERVING, [*TAKEN, heard(Say.RELEASED)], Older.RESTING, [], id="it stands by"),
        pytest.param(
            SERVING, [*TAKEN, heard(Say.RELEASED), ASKED], Older.RESTING, [Say.MINE], id="it asks again: not yet"
        ),
        pytest.param(
            SERVING, [*TAKEN, heard(Say.RELEASED), OVER, stood(SERVING), ASKED], Older.ENDING, [], id="later: gladly"
        ),
        pytest.param(
            SERVING,
            [*TAKEN, heard(Say.RELEASED), stood(BUSY), OVER, ASKED],
            Older.RESTING,
            [Say.MINE],
            id="later, and the kubelet has not called us yet: not yet",
        ),
        pytest.param(
            SERVING,
            [*TAKEN, heard(Say.RELEASED), stood(BUSY), OVER, stood(SERVING), OVER, ASKED],
            Older.ENDING,
            [],
            id="and when it has: gladly",
        ),
        pytest.param(
            SERVING,
            [*TAKEN, heard(Say.RELEASED), stood(BUSY), *([OVER] * 101), ASKED],
            Older.ENDING,
            [Say.WAIT],
            id="and it never does: we rest for half a minute more, and no longer",
        ),
        pytest.param(SERVING, [*TAKEN, ASKED_IN_VAIN], Older.LENT, [Say.YOURS], id="taken back, and we can't serve it"),
        pytest.param(
            SERVING,
            [*TAKEN, heard(Say.RELEASED), ASKED_IN_VAIN],
            Older.LENT,
            [Say.YOURS],
            id="it stands by, and we can't serve it: it may at once",
        ),
        pytest.param(SERVING, [*LENT, heard(Say.RELEASED)], Older.RESTING, [], id="the newer one can't: take over"),
        pytest.param(SERVING, [*DONE, heard(Say.RELEASED)], Older.RESTING, [], id="the newer one ends: take over"),
        pytest.param(SERVING, [*DONE, OVER], Older.CHECKING, [Say.REVOKE], id="now and then: does it still serve?"),
        pytest.param(SERVING, [*DONE, OVER_IN_VAIN], Older.CONFIRMED, [], id="not while no kubelet is there"),
        pytest.param(SERVING, [*DONE, OVER, heard(Say.SERVING)], Older.CONFIRMED, [], id="it does"),
        pytest.param(SERVING, [*DONE, OVER, OVER], Older.TAKEN, [Say.MINE], id="it was stopped: take over"),
        pytest.param(REFUSED, [ASKED], Older.LENT, [Say.YOURS], id="refused: lent at once"),
        pytest.param(SERVING, [*DONE, UNSERVED], Older.CHECKING, [Say.REVOKE], id="records lack it: does it serve?"),
        pytest.param(SERVING, [*DONE, UNSERVED, OVER], Older.TAKEN, [Say.MINE], id="silence: take over"),
        pytest.param(SERVING, [*DONE, UNSERVED, heard(Say.SERVING)], Older.CONFIRMED, [], id="it says so: once"),
        pytest.param(SERVING, [*DONE, UNSERVED, heard(Say.BUSY)], Older.CHECKING, [], id="it is registering: wait"),
        pytest.param(
            SERVING, [*DONE, UNSERVED, heard(Say.SERVING), UNSERVED], Older.TAKEN, [Say.MINE], id="the records count"
        ),
        pytest.param(
            SERVING,
            [*DONE, UNSERVED, heard(Say.SERVING), OVER, heard(Say.SERVING), UNSERVED],
            Older.CHECKING,
            [Say.REVOKE],
            id="and what they lacked long ago doesn't",
        ),
        pytest.param(
            SERVING, [*ASKED_BACK, heard(Say.BUSY), OVER], Older.REVOKING, [Say.REVOKE], id="is it still at it?"
        ),
        pytest.param(
            SERVING, [*ASKED_BACK, heard(Say.BUSY), OVER, OVER], Older.TAKEN, [Say.MINE], id="it is silent: take over"
        ),
        pytest.param(
            SERVING, [*ASKED_BACK, *[heard(Say.BUSY), OVER] * 100], Older.REVOKING, [Say.REVOKE], id="it always is"
        ),
        pytest.param(
            SERVING, [*ASKED_BACK, *[heard(Say.BUSY), OVER] * 101], Older.TAKEN, [Say.MINE], id="longer than one can be"
        ),
        pytest.param(SERVING, [*LENT, UNSERVED], Older.LENT, [], id="lent: the report is waited for"),
        pytest.param(SERVING, [UNSERVED], Older.APART, [], id="nothing was asked"),
        pytest.param(OUT, [*DONE, stood(OUT), UNSERVED], Older.CONFIRMED, [], id="records lack it, and we have none"),
    ],
)
def test_older(own: Standing, events: list[Event], stage: Older, says: list[Say]) -> None:
    state, actions = play(s.older(own), events)
    assert (state.stage, said(actions)) == (stage, says)


YOURS: list[Event] = [heard(Say.YOURS)]
GIVEN_BACK: list[Event] = [*YOURS, heard(Say.REVOKE)]


@pytest.mark.parametrize(
    ("events", "stage", "says"),
    [
        pytest.param(YOURS, Newer.TRYING, [], id="lent: register"),
        pytest.param([heard(Say.FIRST)], Newer.TRYING, [], id="1.37: register first"),
        pytest.param([*YOURS, stood(BUSY), stood(SERVING)], Newer.SERVED, [Say.SERVING], id="called: say so"),
        pytest.param([OVER], Newer.TRYING, [Say.GOING], id="no answer: go on without"),
        pytest.param([OVER, *YOURS], Newer.TRYING, [], id="an answer too late changes nothing"),
        pytest.param([OVER, heard(Say.WAIT)], Newer.TRYING, [], id="told too late to wait"),
        pytest.param([OVER, heard(Say.MINE)], Newer.RESTING, [Say.RELEASED], id="told too late, and it serves: yield"),
        pytest.param([heard(Say.WAIT)], Newer.WAITING, [], id="its Register is in flight: wait"),
        pytest.param([heard(Say.WAIT), *YOURS], Newer.TRYING, [], id="then it is ours"),
        pytest.param([heard(Say.WAIT), OVER], Newer.TRYING, [Say.GOING], id="it is in flight for ever: go on"),
        pytest.param([heard(Say.MINE)], Newer.RESTING, [Say.RELEASED], id="refused: stand by"),
        pytest.param([heard(Say.SERVING)], Newer.ASKING, [], id="an older one that speaks like a newer one"),
        pytest.param(GIVEN_BACK, Newer.RESTING, [Say.RELEASED], id="asked back before we registered: give it back"),
        pytest.param(
            [*YOURS, stood(BUSY), heard(Say.REVOKE)],
            Newer.GIVING,
            [Say.BUSY],
            id="asked back with a Register in flight",
        ),
        pytest.param(
            [*YOURS, stood(BUSY), heard(Say.REVOKE), stood(SERVING)],
            Newer.SERVED,
            [Say.SERVING],
            id="it succeeds: keep",
        ),
        pytest.param(
            [*YOURS, stood(BUSY), heard(Say.REVOKE), stood(IDLE)],
            Newer.RESTING,
            [Say.RELEASED],
            id="it fails: give it back",
        ),
        pytest.param(
            [*YOURS, stood(SERVING), heard(Say.REVOKE)], Newer.SERVED, [Say.SERVING], id="asked back, and we serve"
        ),
        pytest.param(
            [*YOURS, stood(SERVING), stood(IDLE), heard(Say.REVOKE)],
            Newer.RESTING,
            [Say.RELEASED],
            id="asked back, and a newer one has it from us: give it back",
        ),
        pytest.param(
            [*YOURS, stood(SERVING), stood(IDLE), Heard(Say.REVOKE, soon=True)],
            Newer.SERVED,
            [Say.BUSY],
            id="asked back, and a newer one is asked: keep it until that one has answered",
        ),
        pytest.param(
            [*YOURS, stood(SERVING), heard(Say.MINE)],
            Newer.RETURNING,
            [Say.BUSY],
            id="it serves as well: end our stream, and say that there is one",
        ),
        pytest.param(
            [*YOURS, stood(SERVING), heard(Say.MINE), stood(LEAVING), stood(IDLE)],
            Newer.RESTING,
            [Say.RELEASED],
            id="and say when it is over",
        ),
        pytest.param(
            [*YOURS, stood(BUSY), heard(Say.MINE), stood(SERVING)],
            Newer.RETURNING,
            [],
            id="it serves, our Register was in flight: end the stream after it",
        ),
        pytest.param(
            [*YOURS, stood(BUSY), heard(Say.MINE), heard(Say.REVOKE)], Newer.RETURNING, [Say.BUSY], id="giving it back"
        ),
        pytest.param([*GIVEN_BACK, heard(Say.MINE)], Newer.RESTING, [Say.RELEASED], id="told again: answer again"),
        pytest.param([*GIVEN_BACK, heard(Say.REVOKE)], Newer.RESTING, [Say.RELEASED], id="asked again: answer again"),
        pytest.param([*GIVEN_BACK, *YOURS], Newer.RESTING, [], id="an answer from before"),
        pytest.param([*GIVEN_BACK, OVER], Newer.ASKING, [Say.ASK], id="later: ask again"),
        pytest.param([*GIVEN_BACK, OVER_IN_VAIN], Newer.RESTING, [], id="not while a newer one has it from us"),
        pytest.param([*YOURS, stood(OUT)], Newer.RESTING, [Say.RELEASED], id="our list is too large: give it back"),
        pytest.param(
            [*YOURS, stood(BUSY), stood(REFUSED)], Newer.RESTING, [Say.RELEASED], id="we are refused: give it back"
        ),
        pytest.param(
            [*YOURS, stood(SERVING), stood(BUSY), stood(REFUSED)],
            Newer.RESTING,
            [Say.RELEASED],
            id="the next kubelet refuses us: give it back",
        ),
        pytest.param([*GIVEN_BACK, UNSERVED], Newer.ASKING, [Say.ASK], id="the records lack it: ask at once"),
        pytest.param([heard(Say.WAIT), UNSERVED], Newer.TRYING, [Say.GOING], id="its Register hangs: go on"),
        pytest.param([*YOURS, UNSERVED], Newer.TRYING, [], id="we are at it"),
        pytest.param(
            [*YOURS, stood(SERVING), stood(OUT)], Newer.RESTING, [Say.RELEASED], id="we end: the older one takes over"
        ),
    ],
)
def test_newer(events: list[Event], stage: Newer, says: list[Say]) -> None:
    state, actions = play(s.newer(IDLE)[0], events)
    assert (state.stage, said(actions)) == (stage, says)


@pytest.mark.parametrize(
    ("now", "actions"),
    [
        pytest.param(SERVING, (RegisterAgain(),), id="it serves: by which Register, nobody knows"),
        pytest.param(BUSY, (), id="its Register is still in flight"),
    ],
)
def test_a_newer_one_whose_register_was_crossed(now: Standing, actions: tuple[Action, ...]) -> None:
    assert play(s.newer(IDLE)[0], [*YOURS, stood(BUSY), stood(now), heard(Say.ANEW)])[1] == actions


def test_a_register_that_was_crossed_before_it_was_taken_back_is_forgotten() -> None:
    crossed: list[Event] = [ASKED_LATE, stood(BUSY), stood(SERVING), OVER, heard(Say.RELEASED), OVER]
    state, _ = play(s.older(SERVING), crossed)
    assert (state.stage, state.crossed) == (Older.APART, False)


@pytest.mark.parametrize(
    ("says", "again"),
    [
        pytest.param([Say.BUSY], True, id="its Register was in flight"),
        pytest.param([Say.GOING], True, id="it registered without asking"),
        pytest.param([Say.SERVING], True, id="the kubelet called it"),
        pytest.param([Say.BUSY, Say.RELEASED, Say.SERVING], True, id="it registers again later"),
        pytest.param([Say.BUSY, Say.RELEASED], False, id="that was so once, long ago"),
        pytest.param([], False, id="it has sent no Register"),
    ],
)
def test_what_was_taken_back_is_registered_once_more_where_the_newer_one_registered_too(
    says: list[Say], again: bool
) -> None:
    """The kubelet may hold the newer one's Register, and its end would leave it nothing (1.12 to 1.36)."""
    events = [*TAKEN, stood(BUSY), stood(SERVING), *map(heard, says), stood(SERVING)]
    state, actions = play(s.older(SERVING), [*events, heard(Say.RELEASED)])
    assert (state.stage, RegisterAgain() in actions) == (Older.RESTING, again)
    assert said(play(s.older(SERVING), [*events, stood(IDLE)])[1]) == []


@pytest.mark.parametrize(
    ("own", "stage", "says"),
    [
        pytest.param(IDLE, Newer.ASKING, [Say.ASK], id="not registered yet: ask"),
        pytest.param(SERVING, Newer.SERVED, [Say.SERVING], id="an older one appears and we serve: say so"),
        pytest.param(BUSY, Newer.TRYING, [Say.GOING], id="an older one appears and we register: say so"),
        pytest.param(OUT, Newer.RESTING, [], id="we can't: leave it alone"),
        pytest.param(REFUSED, Newer.RESTING, [], id="we are refused: leave it alone"),
    ],
)
def test_a_newer_one_meets_an_older_one(own: Standing, stage: Newer, says: list[Say]) -> None:
    state, actions = s.newer(own)
    assert (state.stage, said(actions)) == (stage, says)


@pytest.mark.parametrize(
    ("state", "events", "seconds"),
    [
        pytest.param(s.newer(IDLE)[0], [], None, id="nothing yet"),
        pytest.param(s.newer(IDLE)[0], [heard(Say.WAIT)], s.BUSY_WAIT, id="as long as a Register can take"),
        pytest.param(s.newer(IDLE)[0], GIVEN_BACK, 5.0, id="a first failure: 5 s"),
        pytest.param(s.newer(IDLE)[0], [*GIVEN_BACK, OVER, *GIVEN_BACK], 10.0, id="a second: longer"),
        pytest.param(
            s.newer(IDLE)[0],
            [*GIVEN_BACK, *[Unserved(), heard(Say.MINE)] * 3],
            5.0,
            id="who asked, and was told that it isn't time yet, has tried nothing",
        ),
        pytest.param(s.newer(IDLE)[0], [heard(Say.MINE)], 5.0, id="told so at first: 5 s"),
        pytest.param(
            s.newer(IDLE)[0],
            [*GIVEN_BACK, OVER, *YOURS, stood(SERVING), stood(OUT)],
            10.0,
            id="it served in between, not for long: counted",
        ),
        pytest.param(
            s.newer(IDLE)[0],
            [*GIVEN_BACK, OVER, *YOURS, stood(SERVING), OVER, stood(OUT)],
            5.0,
            id="it served for long: forgotten",
        ),
        pytest.param(s.newer(IDLE)[0], [*GIVEN_BACK, OVER, *YOURS, stood(SERVING)], 30.0, id="for how long it serves"),
        pytest.param(s.newer(IDLE)[0], [*YOURS, stood(SERVING)], None, id="nothing: it served at once"),
        pytest.param(s.newer(IDLE)[0], [*GIVEN_BACK, OVER] * 20 + GIVEN_BACK, 320.0, id="never more seldom than this"),
        pytest.param(s.older(SERVING), LENT, 2.0, id="for the report"),
        pytest.param(s.older(SERVING), ASKED_BACK, 0.2, id="for an answer"),
        pytest.param(s.older(SERVING), [*ASKED_BACK, heard(Say.BUSY)], 0.3, id="its Register: whether it still runs"),
        pytest.param(s.older(SERVING), [*DONE, OVER], 2.0, id="for a busy newer one's word that it serves"),
        pytest.param(s.older(SERVING), [*DONE, UNSERVED], 0.2, id="for that of one that the records lack"),
        pytest.param(
            s.older(SERVING), [*ASKED_BACK, heard(Say.RELEASED)], 4.0, id="an older one's rest, the shorter one"
        ),
        pytest.param(s.older(SERVING), [*TAKEN, OVER], None, id="a stopped newer one isn't written to for ever"),
        pytest.param(
            s.older(SERVING),
            [*TAKEN, heard(Say.SERVING), heard(Say.RELEASED)],
            4.0,
            id="what it said too late is no failure of its own",
        ),
    ],
)
def test_waiting(state: s.State, events: list[Event], seconds: float | None) -> None:
    _, actions = play(state, events)
    assert waits(actions)[-1:] == ([seconds] if events else [])


@pytest.mark.parametrize(
    ("own", "others", "kubelet", "could"),
    [
        pytest.param(Older.LENT, [], True, True, id="alone with the newer one"),
        pytest.param(Older.LENT, [], False, False, id="no kubelet"),
        pytest.param(Older.LENT, [Older.CONFIRMED], True, False, id="another newer one serves"),
        pytest.param(Older.LENT, [Older.CHECKING], True, False, id="another newer one is asked whether it still does"),
        pytest.param(Older.LENT, [Older.LENT], True, True, id="another newer one doesn't either"),
        pytest.param(Older.LENT, [Newer.RESTING], True, False, id="an older one of our own serves"),
        pytest.param(Older.LENT, [Newer.SERVED], True, True, id="an older one of our own has yielded"),
        pytest.param(Newer.RESTING, [Older.LENT], True, False, id="a newer one has it from us"),
        pytest.param(Newer.RESTING, [Older.APART, Newer.RESTING], True, True, id="two older ones: ask both"),
    ],
)
def test_could_serve(own: Older | Newer, others: list[Older | Newer], kubelet: bool, could: bool) -> None:
    states = [s.State(stage, IDLE) for stage in others]
    assert s.could_serve(s.State(own, IDLE), states, kubelet=kubelet) is could


@pytest.mark.parametrize(
    ("state", "events", "outcomes"),
    [
        pytest.param(
            s.older(SERVING), [*DONE, OVER, heard(Say.SERVING)], [HandoverOutcome.DONE], id="older one: done, once"
        ),
        pytest.param(s.older(SERVING), TAKEN, [HandoverOutcome.BACK], id="older one: back"),
        pytest.param(
            s.newer(IDLE)[0], [*YOURS, stood(BUSY), stood(SERVING)], [HandoverOutcome.DONE], id="newer one: done"
        ),
        pytest.param(s.newer(IDLE)[0], [OVER], [HandoverOutcome.ALONE], id="newer one: no answer"),
        pytest.param(s.newer(IDLE)[0], GIVEN_BACK, [HandoverOutcome.BACK], id="newer one: back"),
    ],
)
def test_outcomes(state: s.State, events: list[Event], outcomes: list[HandoverOutcome]) -> None:
    noted = []
    for event in events:
        state, actions = s.step(state, event)
        noted += [action.outcome for action in actions if isinstance(action, Note)]
    assert noted == outcomes


EVENTS = st.one_of(
    st.builds(Wanted, first=st.booleans(), could_serve=st.booleans()),
    st.builds(Heard, st.sampled_from(Say)),
    st.builds(Stood, st.sampled_from(Standing)),
    st.builds(WaitOver, could_serve=st.booleans()),
    st.just(Unserved()),
)


@settings(max_examples=500)
@given(st.booleans(), st.sampled_from(Standing), st.lists(EVENTS, max_size=40))
def test_whatever_a_partner_says(newer: bool, own: Standing, events: list[Event]) -> None:
    """Its role stays, a stage in which we stand by always has a wait, and nothing is said without end."""
    state, actions = (s.older(own), ()) if newer else s.newer(own)
    waiting: float | None = None
    for event in (None, *events):
        if event is not None:
            state, actions = s.step(state, event)
            waiting = None if isinstance(event, WaitOver) else waiting
        for seconds in waits(actions):
            waiting = seconds
        assert isinstance(state.stage, Older if newer else Newer)
        assert len(said(actions)) <= 1
        if state.stage in s.DEFERRING - {Newer.RETURNING}:  # That one waits for our own registration.
            assert waiting is not None or isinstance(event, WaitOver)


# Two sides, and all that can happen between them.


class Side(Struct, frozen=True):
    """A gateway: its machine (None: it has no partner any more), its registration, its one timer."""

    machine: s.State | None
    standing: Standing
    wait: float | None = None
    alive: bool = True
    running: bool = True


class World(Struct, frozen=True):
    """Two gateways, one resource, one kubelet. ``inbox``: what was said to the older one, and to the newer one.

    Failures and questions are counted to two: more only make the waits longer, or end them.
    """

    sides: tuple[Side, Side]
    inbox: tuple[tuple[Say, ...], tuple[Say, ...]] = ((), ())
    connected: bool = True
    faults: tuple[str, ...] = ()
    """Those that may still happen, each once."""
    unmet: bool = False
    """Whether the older one came to a newer one that was there, and hasn't heard from it yet: it stands by, by age alone."""


OLDER, NEWER = 0, 1
TOLD = LACKING + LOOK_CLOSELY
"""Seconds after which whoever stands by is told that nobody serves."""
AGAIN = LACKING_STILL + LOOK_CLOSELY
"""Seconds after which it is told again."""


def begin(faults: tuple[str, ...]) -> list[World]:
    """A newer one comes, whatever its older one is doing; or a pod comes, the older one of a host service that is there."""
    worlds = []
    for own in (SERVING, BUSY, IDLE):
        machine, actions = s.newer(own)
        sides = (Side(s.older(IDLE), IDLE), Side(machine, own, wait=waits(actions)[-1]))
        worlds.append(World(sides, (tuple(said(actions)), ()), faults=tuple(sorted(faults)), unmet=True))
    for own in (SERVING, BUSY, IDLE):
        machine, actions = s.newer(IDLE)
        sides = (Side(s.older(own), own), Side(machine, IDLE, wait=waits(actions)[-1]))
        worlds.append(World(sides, (tuple(said(actions)), ()), faults=tuple(sorted(faults))))
    return worlds


def held(world: World, who: int) -> bool:
    """Whether this side is to stand by. Where the connection is lost, age decides among the living."""
    side = world.sides[who]
    if side.machine is None or (who == OLDER and world.unmet):
        return who == OLDER and world.sides[NEWER].alive
    return side.machine.stage in s.DEFERRING


def put(world: World, who: int, **changes: object) -> World:
    side = replace(world.sides[who], **changes)
    return replace(world, sides=(side, world.sides[1]) if who == OLDER else (world.sides[0], side))


def feed(world: World, who: int, event: Event) -> World:
    """Let one machine take an event; what it wants of its own registration happens in the same breath."""
    side = world.sides[who]
    if side.machine is not None:
        machine, actions = s.step(side.machine, event)
        machine = replace(machine, failures=min(machine.failures, 2), asked=min(machine.asked, 2))
        wait, inbox = side.wait, list(world.inbox)
        for seconds in waits(actions):
            wait = seconds
        if world.connected:
            inbox[1 - who] += tuple(said(actions))
        world = replace(put(world, who, machine=machine, wait=wait), inbox=(inbox[0], inbox[1]))
    if world.sides[who].standing is SERVING and held(world, who):
        return stand(world, who, LEAVING)
    return world


def stand(world: World, who: int, standing: Standing) -> World:
    return feed(put(world, who, standing=standing), who, Stood(standing))


def hear(world: World, who: int) -> World:
    say, *rest = world.inbox[who]
    inbox = [*world.inbox]
    inbox[who] = tuple(rest)
    world = replace(world, inbox=(inbox[0], inbox[1]), unmet=world.unmet and who != OLDER)
    return feed(world, who, heard(say))


def fire(world: World, who: int) -> World:
    return feed(put(world, who, wait=None, running=True), who, WaitOver(could_serve=True))


def ask(world: World, *, first: bool) -> World:
    """The older one reads an ask: late, when the newer one has gone on by now."""
    newer = world.sides[NEWER].machine
    late = newer is None or newer.stage is not Newer.ASKING
    at_once = first and world.sides[OLDER].standing is SERVING
    world = replace(world, inbox=(world.inbox[OLDER][1:], world.inbox[NEWER]), unmet=False)
    return feed(world, OLDER, Wanted(first=at_once or late, could_serve=True))


def part(world: World) -> World:
    """The connection ends: what was said and not heard is lost, and the living decide by age."""
    world = replace(world, connected=False, inbox=((), ()), unmet=False)
    for who in (OLDER, NEWER):
        world = feed(put(world, who, machine=None, wait=None), who, OVER)
    return world


def courses(world: World, who: int, *, first: bool) -> Iterator[World]:
    """What can happen next on a side that runs, without any fault."""
    side = world.sides[who]
    if not (side.alive and side.running):
        return
    if world.inbox[who]:
        yield ask(world, first=first) if world.inbox[who][0] is Say.ASK else hear(world, who)
    match side.standing:
        case Standing.IDLE | Standing.REFUSED if not held(world, who):
            yield stand(world, who, BUSY)
        case Standing.REFUSED:
            yield stand(world, who, IDLE)
        case Standing.BUSY:
            yield stand(world, who, SERVING)
        case Standing.LEAVING:
            yield stand(world, who, IDLE)
        case _:
            pass


def overdue(world: World, who: int) -> bool:
    """Whether this side's wait may be over: all that runs is faster than any wait, but for a Register.

    A side that was stopped may find its wait over before it reads what was said. No Register takes as long as the longest.
    """
    side, other = world.sides[who], world.sides[1 - who]
    if side.wait is None or not side.alive or len(world.inbox[1 - who]) > 3:
        return False
    if other.running and other.standing is BUSY and side.wait >= s.BUSY_WAIT:
        return False
    return not any(moves(world, one) for one in (OLDER, NEWER))


def moves(world: World, who: int) -> bool:
    """Whether this side runs and is about to do something by itself."""
    side = world.sides[who]
    if not (side.alive and side.running):
        return False
    if side.standing is IDLE:
        return bool(world.inbox[who]) or not held(world, who)
    return bool(world.inbox[who]) or side.standing in {LEAVING, REFUSED}


def faults(world: World) -> Iterator[World]:
    """What can go wrong next."""
    for name in set(world.faults):
        left = list(world.faults)
        left.remove(name)
        bad = replace(world, faults=tuple(left))
        for who in (OLDER, NEWER):
            side = bad.sides[who]
            runs = side.alive and side.running
            match name:
                case "kill" if side.alive:
                    yield part(put(bad, who, alive=False, standing=OUT))
                case "stop" if runs:
                    yield put(bad, who, running=False)
                case "refuse" if runs and side.standing is BUSY:
                    yield stand(bad, who, IDLE)
                    yield stand(bad, who, REFUSED)
                case "cut" if runs and side.standing is SERVING:
                    yield stand(bad, who, IDLE)
                case "break" if bad.connected:
                    yield part(bad)
                case "lose" if bad.inbox[who] and not bad.unmet:  # The first words come with the connection.
                    inbox = [*bad.inbox]
                    inbox[who] = inbox[who][1:]
                    yield replace(bad, inbox=(inbox[0], inbox[1]))
                case _:
                    pass
    for who in (OLDER, NEWER):
        if world.sides[who].alive and not world.sides[who].running:
            yield put(world, who, running=True)


def following(world: World, *, first: bool) -> list[World]:
    """All that can happen next."""
    after = list(faults(world))
    for who in (OLDER, NEWER):
        after += courses(world, who, first=first)
        if overdue(world, who):
            after.append(fire(world, who))
    return after


def explore(may: tuple[str, ...], *, first: bool) -> tuple[set[World], set[tuple[World, World]]]:
    """All worlds that can be reached, and every step between two of them."""
    found, steps = set(begin(may)), set()
    todo = list(found)
    while todo:
        world = todo.pop()
        for one in following(world, first=first):
            steps.add((world, one))
            if one not in found:
                found.add(one)
                todo.append(one)
    return found, steps


class Settling(Struct):
    """What becomes of a world when nothing goes wrong any more, and whoever waits does so in seconds."""

    world: World
    first: bool
    now: float = 0.0
    due: dict[int, float] = field(default_factory=dict)
    nobody: float = 0.0
    """The most seconds on end without anybody who serves."""
    nobody_since: float | None = None
    looked: float = 0.0
    """When whoever stands by last heard that the kubelet's records lack it."""

    def run(self, until: float, *, all_run: bool) -> None:
        for who in (OLDER, NEWER):
            if all_run and self.world.sides[who].alive:
                self._take(put(self.world, who, running=True))
            self._arm(who)
        while True:
            while (world := self._next()) is not None:
                self._take(world)
            unserved = until
            if self.nobody_since is not None:
                unserved = self.looked + AGAIN if self.looked > self.nobody_since else self.nobody_since + TOLD
            if min(self.due.values(), default=until) >= unserved < until:
                self._unserved(unserved)
                continue
            if min(self.due.values(), default=until) >= until:
                break
            who = min(self.due, key=self.due.__getitem__)
            self.now = self.due.pop(who)
            self._take(fire(self.world, who))
            self._arm(who)
        self.now = until
        self._take(self.world)

    def _unserved(self, now: float) -> None:
        self.now = self.looked = now
        for who in (OLDER, NEWER):
            side = self.world.sides[who]
            if side.alive and side.running and held(self.world, who):
                self._take(feed(self.world, who, Unserved()))

    def _next(self) -> World | None:
        return next((world for who in (OLDER, NEWER) for world in courses(self.world, who, first=self.first)), None)

    def _take(self, world: World) -> None:
        before, self.world = self.world, world
        for who in (OLDER, NEWER):
            old, new = before.sides[who], world.sides[who]
            if old.wait != new.wait or (old.machine and old.machine.stage) != (new.machine and new.machine.stage):
                self._arm(who)
        if any(serves(world, who) for who in (OLDER, NEWER)):
            self.nobody_since = None
        elif self.nobody_since is None:
            self.nobody_since = self.now
        else:
            self.nobody = max(self.nobody, self.now - self.nobody_since)

    def _arm(self, who: int) -> None:
        self.due.pop(who, None)
        side = self.world.sides[who]
        if side.wait is not None and side.running:
            self.due[who] = self.now + side.wait


def serves(world: World, who: int) -> bool:
    return world.sides[who].alive and world.sides[who].standing is SERVING


@pytest.mark.parametrize(
    "may",
    [
        pytest.param((), id="nothing goes wrong"),
        pytest.param(("refuse", "refuse", "refuse"), id="Registers fail"),
        pytest.param(("cut", "cut", "refuse"), id="the kubelet restarts"),
        pytest.param(("kill", "refuse", "cut"), id="one is killed"),
    ],
)
def test_never_both(may: tuple[str, ...]) -> None:
    """On kubelets up to 1.36 no Register is sent while a stream of either is open, and no stream ended during one."""
    found, steps = explore(may, first=False)
    for world in found:
        active = [who for who in (OLDER, NEWER) if world.sides[who].standing in {BUSY, SERVING, LEAVING}]
        assert len(active) < 2, world
    assert len(steps) > len(found) > 20


@pytest.mark.parametrize(
    "may", [pytest.param((), id="nothing goes wrong"), pytest.param(("refuse", "cut", "kill"), id="all does")]
)
def test_register_first_has_no_gap(may: tuple[str, ...]) -> None:
    """From 1.37 on the older one serves until the newer one does, unless something else ends its stream."""
    found, steps = explore(may, first=True)
    for before, after in steps:
        if before.faults == after.faults == tuple(sorted(may)) and serves(before, OLDER) and not serves(after, OLDER):
            assert serves(after, NEWER), (before, after)
    assert len(found) > 20


@pytest.mark.parametrize("first", [pytest.param(False, id="1.36 and before"), pytest.param(True, id="1.37 and later")])
@pytest.mark.parametrize(
    ("may", "gap"),
    [
        pytest.param(("refuse", "cut", "cut"), 2.2, id="the kubelet restarts"),
        pytest.param(("stop",), 2.2, id="either is stopped"),
        pytest.param(("kill", "cut"), 2.2, id="one is killed"),
        pytest.param(("kill", "stop"), 2.2, id="one is killed, or stopped"),
        pytest.param(("break", "cut"), 2.2, id="the connection breaks"),
        pytest.param(("lose", "refuse"), 2.2, id="words are lost"),
    ],
)
def test_in_the_end_one_serves(may: tuple[str, ...], gap: float, first: bool) -> None:
    """From whatever two gateways can come to, the newer living one serves alone, and stays, once nothing goes wrong."""
    found, _ = explore(may, first=first)
    for world in {replace(world, faults=()) for world in found}:
        settles(world, first=first, gap=gap)


@pytest.mark.parametrize("first", [pytest.param(False, id="1.36 and before"), pytest.param(True, id="1.37 and later")])
@pytest.mark.parametrize(
    "may", [pytest.param(("stop", "refuse"), id="stop"), pytest.param(("stop", "lose"), id="lose")]
)
def test_one_that_stays_stopped_is_replaced(may: tuple[str, ...], first: bool) -> None:
    """It holds its lease and its streams, but whatever it was doing, the one that runs serves in the end."""
    found, _ = explore(may, first=first)
    stopped = {replace(world, faults=()) for world in found if not all(side.running for side in world.sides)}
    for world in stopped:
        settling = Settling(world, first)
        settling.run(until=100.0, all_run=False)
        assert settling.nobody <= 2.2, (settling.nobody, world)
        [runs] = [who for who in (OLDER, NEWER) if world.sides[who].running]
        assert serves(settling.world, runs), (world, settling.world)
    assert len(stopped) > 100


@settings(max_examples=150)
@given(st.data(), st.booleans())
def test_in_the_end_one_serves_whatever_went_wrong(data: st.DataObject, first: bool) -> None:
    """The same, with every fault in one course."""
    world = data.draw(st.sampled_from(begin(("stop", "stop", "refuse", "refuse", "cut", "lose", "break", "kill"))))
    for _ in range(60):
        after = following(world, first=first)
        if not after:
            break
        world = data.draw(st.sampled_from(after))
    settles(world, first=first, gap=2.2)


def settles(world: World, *, first: bool, gap: float) -> None:
    settling = Settling(world, first)
    settling.run(until=100.0, all_run=True)
    last = settling.world
    alive = [who for who in (OLDER, NEWER) if last.sides[who].alive]
    assert [who for who in (OLDER, NEWER) if serves(last, who)] == alive[-1:], (world, last)
    assert settling.nobody <= gap, (settling.nobody, world)


class Course(Struct, frozen=True):
    """How two gateways came to where they are, with its times: all in seconds, from now on where it doesn't say otherwise."""

    world: World
    due: tuple[float | None, float | None]
    """When their timers fire."""
    told: float | None = None
    """When whoever stands by hears that nobody serves."""
    nobody: float = 0.0
    """For how long nobody has served."""
    registering: float = 0.0
    """For how long the newer one has had a Register in flight."""
    stops: bool = True
    """Whether one of them may still stop."""
    restarts: bool = True
    """Whether the kubelet may still start anew."""

    def to(self, world: World, **changes: object) -> Course:
        """Go on at once."""
        due = list(self.due)
        for who, (old, new) in enumerate(zip(self.world.sides, world.sides, strict=True)):
            if not new.running or new.wait is None:
                due[who] = None
            elif (old.wait, old.machine, old.running) != (new.wait, new.machine, new.running):
                due[who] = new.wait
        served = any(serves(world, who) for who in (OLDER, NEWER))
        told = None if served else TOLD if self.told is None else self.told
        nobody = 0.0 if served else self.nobody
        return replace(self, world=world, due=(due[0], due[1]), told=told, nobody=nobody, **changes)

    def later(self, seconds: float) -> Course:
        """Let time pass. For a gateway that runs and registers, the kubelet is waited for, not the other gateway."""
        older, newer = self.world.sides
        registers = older.running and older.standing is BUSY
        registers = registers or (newer.running and newer.standing is BUSY and not self.stops)
        counts = self.told is not None and not registers
        due = [None if one is None else round(one - seconds, 3) for one in self.due]
        return replace(
            self,
            due=(due[0], due[1]),
            told=None if self.told is None else round(self.told - seconds, 3),
            nobody=round(self.nobody + seconds, 3) if counts else self.nobody,
            registering=round(self.registering + seconds, 3) if newer.running and newer.standing is BUSY else 0.0,
        )

    def following(self, *, first: bool) -> Iterator[Course]:
        """All that can happen next: a Register takes any time, and what runs needs none for anything else."""
        for who in (OLDER, NEWER):
            for world in courses(self.world, who, first=first):
                yield self.to(world)
            if self.stops and self.world.sides[who].running:
                yield self.to(put(self.world, who, running=False), stops=False)
        if self.restarts:
            world = self.world
            for who, side in enumerate(world.sides):
                if side.standing is SERVING:
                    world = stand(world, who, IDLE) if side.running else put(world, who, standing=IDLE)
            yield self.to(world, restarts=False)
        if not any(moves(self.world, who) for who in (OLDER, NEWER)):
            yield from self._wait()

    def _wait(self) -> Iterator[Course]:
        """Let time pass until something is due. No newer one that runs registers for longer than it is waited for."""
        seconds = min((one for one in (*self.due, self.told) if one is not None), default=None)
        if seconds is None:
            return
        course = self.later(seconds)
        if course.world.sides[NEWER].running and course.registering > s.REPORT_WAIT + s.ANSWER_WAIT:
            return
        if course.told == 0:
            course = replace(course, told=AGAIN)
            for who, side in enumerate(course.world.sides):
                if side.running and held(course.world, who):
                    course = course.to(feed(course.world, who, Unserved()))
            yield course
            return
        for who in (OLDER, NEWER):
            if course.due[who] == 0:
                due = tuple(None if one == who else course.due[one] for one in (OLDER, NEWER))
                yield replace(course, due=due).to(fire(course.world, who))


@pytest.mark.parametrize("first", [pytest.param(False, id="1.36 and before"), pytest.param(True, id="1.37 and later")])
def test_whoever_stands_still_costs_less_than_three_seconds(first: bool) -> None:
    """In every order, from the first moment without devices on, also where it has said just before that it registers or serves."""
    todo = [Course(world, (None, None)).to(world) for world in begin(())]
    todo = [replace(course, due=tuple(side.wait for side in course.world.sides)) for course in todo]
    found = set(todo)
    while todo:
        for course in todo.pop().following(first=first):
            assert course.nobody <= 2.6, course
            if course not in found:
                found.add(course)
                todo.append(course)
        assert len(found) < 50_000
    assert (
        max(course.nobody for course in found) == 2.6
    )  # Seldom is it so long: it says that it registers, then nothing more.
