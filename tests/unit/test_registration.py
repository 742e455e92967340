"""Registration of one resource: each row is one rule of the kubelet's behaviour, told as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.kubelet import identity
from gateway.registration import events as e
from gateway.registration import machine as r
from gateway.registration import registrar as plugin
from gateway.registration.events import Phase, Timer

K1 = identity.KubeletId(1, 10, 100)
K2 = identity.KubeletId(1, 10, 200)  # a new socket, the old inode number again
WRONG_VERSION = 'requested API version "v1beta1" is not supported by kubelet. Supported version is "v1alpha2"'


def play(events: Sequence[e.Event], choice: str = "auto", last: str = "v1beta1") -> tuple[r.State, list[e.Action]]:
    """Play ``events``; return the state and what the last of them caused."""
    state = r.start("token", choice, last)
    actions: tuple[e.Action, ...] = ()
    for event in events:
        state, actions = r.step(state, event)
    return state, list(actions)


def offers(actions: Sequence[e.Action]) -> list[str]:
    return [action.dialect for action in actions if isinstance(action, e.SendRegister)]


def timers(actions: Sequence[e.Action]) -> dict[Timer, float]:
    return {action.timer: action.seconds for action in actions if isinstance(action, e.SetTimer)}


UP: list[e.Event] = [e.KubeletUp(K1), e.Reached(1, K1)]
OK: list[e.Event] = [*UP, e.Replied(1, "OK")]
SERVING: list[e.Event] = [*OK, e.StreamOpened(1)]
CUT: list[e.Event] = [*SERVING, e.StreamEnded(1)]
SERVING_2: list[e.Event] = [e.Reached(2, K2), e.Replied(2, "OK"), e.StreamOpened(2)]
RENEWED: list[e.Event] = [
    *SERVING,
    e.Renew("options"),
    e.StreamEnded(1),
    e.Fired(Timer.RETRY),
    e.Reached(2, K1),
    e.Replied(2, "OK"),
    e.StreamOpened(2),
]
ERROR_AGAIN: list[e.Event] = [
    e.StreamEnded(1),
    e.Fired(Timer.RETRY),
    e.Reached(3, K1),
    e.Replied(3, "UNKNOWN", "x"),
]
LOOK: list[e.Event] = [e.Fired(Timer.VERIFY), e.Verified(held=True)]
LOOKED: list[e.Event] = [*SERVING, *LOOK * r.FIRST_LOOKS]
REGISTERED_AGAIN: list[e.Event] = [
    *CUT,
    e.Fired(Timer.RETRY),
    e.Reached(2, K1),
    e.Replied(2, "OK"),
    e.StreamOpened(2),
]


@pytest.mark.parametrize(
    ("events", "phase", "offered"),
    [
        pytest.param([e.KubeletUp(K1)], Phase.OFFERING, ["v1beta1"], id="a kubelet comes: register at once"),
        pytest.param([*UP, e.KubeletUp(K1)], Phase.OFFERING, [], id="the same kubelet again: one Register"),
        pytest.param([*SERVING, e.KubeletUp(K1)], Phase.SERVING, [], id="a poll finds the kubelet that holds us"),
        pytest.param(OK, Phase.ACCEPTED, [], id="OK proves nothing: wait for the call (1.24 and before)"),
        pytest.param(SERVING, Phase.SERVING, [], id="the kubelet calls: served"),
        pytest.param(
            [*UP, e.StreamOpened(1), e.Replied(1, "OK")],
            Phase.SERVING,
            [],
            id="1.8 and 1.9 call before they answer",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1), e.StreamEnded(1), e.Replied(1, "OK")],
            Phase.WAITING,
            [],
            id="called and cut before the answer: register again",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1), e.Replied(1, "DEADLINE_EXCEEDED")],
            Phase.SERVING,
            [],
            id="no answer, but called: what counts is the call",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1), e.Replied(1, "UNKNOWN", "x")],
            Phase.SERVING,
            [],
            id="refused, but called: an earlier Register is answered",
        ),
        pytest.param(
            [*UP, e.Replied(1, "UNIMPLEMENTED"), e.Reached(2, K2), e.Replied(2, "UNIMPLEMENTED")],
            Phase.OFFERING,
            ["v1beta1"],
            id="the next kubelet was met with another dialect: what it refuses is that one",
        ),
        pytest.param(CUT, Phase.WAITING, [], id="stream cut: never register at once (1.25 to 1.36 disconnect by name)"),
        pytest.param(
            [*CUT, e.Fired(Timer.RETRY)], Phase.OFFERING, ["v1beta1"], id="stream cut: register after the wait"
        ),
        pytest.param(
            [*CUT, e.KubeletUp(K2)], Phase.OFFERING, ["v1beta1"], id="a new kubelet: no wait, it has no old stream"
        ),
        pytest.param(
            [*CUT, e.Fired(Timer.RETRY), e.Reached(2, K2), e.KubeletUp(K2)],
            Phase.OFFERING,
            [],
            id="the wait ended on the new kubelet: still one Register for it",
        ),
        pytest.param([*SERVING, e.StreamEnded(7)], Phase.SERVING, [], id="the end of an older stream is none of ours"),
        pytest.param(
            [*OK, e.Fired(Timer.CALL)], Phase.WAITING, [], id="registered and never called: register again, later"
        ),
        pytest.param([*SERVING, e.Fired(Timer.CALL)], Phase.SERVING, [], id="a late timer changes nothing"),
        pytest.param(
            [*UP, e.Replied(1, "UNIMPLEMENTED")],
            Phase.OFFERING,
            ["v1alpha2"],
            id="no such service: the next dialect",
        ),
        pytest.param(
            [*UP, e.Replied(1, "UNKNOWN", WRONG_VERSION)],
            Phase.OFFERING,
            ["v1alpha2"],
            id="refused by version: the one that it names",
        ),
        pytest.param([*UP, e.Replied(1, "DEADLINE_EXCEEDED")], Phase.WAITING, [], id="a time-out is no answer"),
        pytest.param(
            [*UP, e.Replied(1, "DEADLINE_EXCEEDED"), e.Fired(Timer.RETRY)],
            Phase.OFFERING,
            ["v1beta1"],
            id="after a time-out: the same dialect",
        ),
        pytest.param(
            [*UP, e.Replied(1, "UNKNOWN", "strange")], Phase.WAITING, [], id="an unknown text isn't guessed at"
        ),
        pytest.param([*UP, e.Replied(9, "OK")], Phase.OFFERING, [], id="the answer to an older Register is ignored"),
        pytest.param(
            [*UP, e.Replied(1, "NOBODY"), e.KubeletUp(K1)],
            Phase.OFFERING,
            ["v1beta1"],
            id="gone, and there after all",
        ),
        pytest.param([*UP, e.KubeletUp(K2)], Phase.OFFERING, ["v1beta1"], id="a hanging Register, then a restart"),
        pytest.param([*SERVING, e.Verified(held=True)], Phase.SERVING, [], id="the kubelet's records agree"),
        pytest.param(
            [*SERVING, e.Verified(held=False)], Phase.WAITING, [], id="the kubelet's records lack us: begin again"
        ),
        pytest.param(
            [*SERVING, e.StreamOpened(8), e.StreamEnded(8)],
            Phase.SERVING,
            [],
            id="somebody else calls, and ends: the kubelet's stream goes on",
        ),
        pytest.param(
            [*SERVING, e.StreamOpened(8), e.StreamEnded(1)],
            Phase.WAITING,
            [],
            id="the kubelet's stream ends, and somebody else's goes on: register again",
        ),
        pytest.param(
            [*SERVING, e.StreamOpened(8), e.KubeletUp(K2)],
            Phase.OFFERING,
            ["v1beta1"],
            id="a new kubelet, and somebody else's stream goes on: register at once",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1), e.StreamOpened(2), e.Replied(1, "OK")],
            Phase.SERVING,
            [],
            id="called twice while it registers: the first is the kubelet's",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1), e.StreamOpened(2), e.StreamEnded(1), e.Replied(1, "OK")],
            Phase.WAITING,
            [],
            id="called twice while it registers, and the first ends: begin again",
        ),
        pytest.param(
            [*OK, e.StreamOpened(1, likely=False), e.StreamOpened(2), e.StreamEnded(1)],
            Phase.SERVING,
            [],
            id="who looks like a kubelet takes the place of who doesn't",
        ),
        pytest.param(
            [*OK, e.StreamOpened(1, likely=False), e.StreamOpened(2), e.StreamEnded(2)],
            Phase.WAITING,
            [],
            id="and is the one whose end counts",
        ),
        pytest.param(
            [*OK, e.StreamOpened(1, likely=False), e.StreamEnded(1), e.StreamOpened(2)],
            Phase.SERVING,
            [],
            id="a stranger calls between Register and the kubelet's call: serve whom we asked",
        ),
        pytest.param(
            [*CUT, e.StreamOpened(2, likely=False)], Phase.WAITING, [], id="a stranger's call answers no Register"
        ),
        pytest.param(
            [*CUT, e.Fired(Timer.RETRY), e.StreamOpened(2, likely=False)],
            Phase.OFFERING,
            [],
            id="nor one that isn't sent yet",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1, likely=False), e.StreamEnded(1), e.Replied(1, "OK")],
            Phase.ACCEPTED,
            [],
            id="a stranger comes and goes while it registers: the kubelet's call is still to come",
        ),
        pytest.param(
            [*CUT, e.Fired(Timer.RETRY), e.StreamOpened(9)],
            Phase.SERVING,
            [],
            id="an earlier Register is answered before the next is sent: serve",
        ),
        pytest.param(
            [*SERVING, e.KubeletUp(K2), e.StreamOpened(9), e.Reached(2, K2), e.Replied(2, "OK")],
            Phase.ACCEPTED,
            [],
            id="the kubelet before calls late: that isn't the new one's call",
        ),
        pytest.param([*SERVING, e.NameLost("token-1.sock")], Phase.SERVING, [], id="own name deleted: do not register"),
        pytest.param([*SERVING, e.Renew("options")], Phase.WAITING, [], id="other options: register anew"),
        pytest.param(
            [*UP, e.Renew("options"), e.Replied(1, "OK"), e.StreamOpened(1)],
            Phase.WAITING,
            [],
            id="other options while a Register is in flight: register anew when it took",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1), e.Renew("options"), e.Replied(1, "OK")],
            Phase.WAITING,
            [],
            id="and where the call came first (1.8, 1.9)",
        ),
        pytest.param(
            [*OK, e.Renew("options"), e.StreamOpened(1)],
            Phase.WAITING,
            [],
            id="other options while the kubelet's call is waited for: register anew",
        ),
        pytest.param(
            [*UP, e.Replied(1, "DEADLINE_EXCEEDED"), e.Renew("options"), e.StreamOpened(1)],
            Phase.WAITING,
            [],
            id="other options, then the call to a Register of before: register anew",
        ),
        pytest.param(
            [
                e.KubeletUp(K1),
                e.Renew("options"),
                e.Reached(1, K1),
                e.Replied(1, "OK"),
                e.StreamOpened(1),
            ],
            Phase.SERVING,
            [],
            id="other options before the Register is sent: it says them",
        ),
        pytest.param(
            [
                *CUT,
                e.Renew("options"),
                e.Fired(Timer.RETRY),
                e.Reached(2, K1),
                e.Replied(2, "OK"),
                e.StreamOpened(2),
            ],
            Phase.SERVING,
            [],
            id="other options while it waits: the next Register says them",
        ),
        pytest.param([*RENEWED, e.Renew("again")], Phase.SERVING, [], id="other options again at once: in a moment"),
        pytest.param(
            [*RENEWED, e.Renew("again"), e.Fired(Timer.RENEW)],
            Phase.WAITING,
            [],
            id="the moment is over: once more",
        ),
        pytest.param([*RENEWED, e.Fired(Timer.RENEW)], Phase.SERVING, [], id="the moment is over, and nothing is new"),
        pytest.param(
            [*RENEWED, e.Fired(Timer.RENEW), e.Renew("again")],
            Phase.WAITING,
            [],
            id="other options after it: at once",
        ),
        pytest.param([*SERVING, e.StandBy()], Phase.STANDBY, [], id="a newer gateway: yield"),
        pytest.param(
            [*SERVING, e.StandBy(), e.KubeletUp(K2)],
            Phase.STANDBY,
            [],
            id="yielded: not on a restart either",
        ),
        pytest.param([*SERVING, e.StandBy(), e.Resume()], Phase.WAITING, [], id="the newer one is gone: take over"),
        pytest.param([e.StandBy(), e.Resume()], Phase.ABSENT, [], id="no kubelet yet when it takes over"),
        pytest.param([*SERVING, e.Withhold("too large")], Phase.OUT, [], id="the list grew too large: out"),
        pytest.param(
            [
                *UP,
                e.Replied(1, "UNFIT", "x"),
                e.Replied(2, "UNIMPLEMENTED"),
                e.Replied(3, "UNIMPLEMENTED"),
            ],
            Phase.OUT,
            [],
            id="no dialect can carry it: out, and not registered",
        ),
        pytest.param(
            [*SERVING, e.Withhold("too large"), e.KubeletUp(K2)],
            Phase.OFFERING,
            ["v1beta1"],
            id="out, but another kubelet may speak a roomier dialect",
        ),
        pytest.param([*SERVING, e.Stop(), e.KubeletUp(K2)], Phase.STOPPED, [], id="stopped stays stopped"),
    ],
)
def test_rule(events: list[e.Event], phase: Phase, offered: list[str]) -> None:
    state, actions = play(events)
    assert (state.phase, offers(actions)) == (phase, offered)


@pytest.mark.parametrize(
    ("waited", "left"),
    [
        pytest.param(0.0, r.CUT_WAIT, id="the kubelet has yet to notice that the other one's stream ended"),
        pytest.param(r.CUT_WAIT / 5, r.CUT_WAIT * 4 / 5, id="what was done meanwhile is part of that time"),
        pytest.param(1.0, 0.0, id="it had time enough"),
    ],
)
def test_a_takeover_waits_for_the_kubelet(waited: float, left: float) -> None:
    _, actions = play([*SERVING, e.StandBy(), e.Resume(waited)])
    assert timers(actions)[Timer.RETRY] == pytest.approx(left)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(
            [*SERVING, e.KubeletUp(K2)],
            e.EndStreams(),
            id="a new kubelet: the stream of the old one is ended",
        ),
        pytest.param([*UP, e.KubeletUp(K2)], e.CancelRegister(), id="a new kubelet: the hanging Register is given up"),
        pytest.param(
            [*CUT, e.Fired(Timer.RETRY), e.StreamOpened(9)],
            e.CancelRegister(),
            id="an earlier Register is answered: the next isn't sent",
        ),
        pytest.param(
            [*SERVING, e.KubeletUp(K2), e.StreamOpened(9)],
            e.EndStreams(),
            id="the kubelet before: end it",
        ),
        pytest.param(
            [*SERVING, e.NameLost("token-1.sock")], e.LinkSocket("token-1.sock"), id="own name deleted: put it back"
        ),
        pytest.param([*SERVING, e.Verified(held=False)], e.EndStreams(), id="not held: end the dead stream first"),
        pytest.param([*CUT, e.Fired(Timer.RETRY)], e.UnlinkSocket("token-1.sock"), id="the name before is taken away"),
        pytest.param(
            [*CUT, e.Fired(Timer.RETRY)],
            e.SendRegister(2, "v1beta1", "token-2.sock"),
            id="each Register, a new name",
        ),
        pytest.param([*SERVING, e.Stop()], e.EndStreams(), id="stop: streams first"),
        pytest.param([*SERVING, e.Stop()], e.UnlinkSocket("token-1.sock"), id="stop: own name removed"),
        pytest.param([*UP, e.Stop()], e.CancelRegister(), id="stop while a Register hangs"),
        pytest.param(
            [*SERVING, e.StandBy(), e.StreamOpened(5)],
            e.EndStreams(),
            id="standing by: a late call is ended",
        ),
        pytest.param([*SERVING, e.Fired(Timer.VERIFY)], e.Verify(), id="a served resource is verified"),
        pytest.param(
            [*LOOKED, e.Lacking(), e.Fired(Timer.VERIFY)],
            e.Verify(),
            id="and again where a look lacks it",
        ),
        pytest.param(CUT, e.CancelTimer(Timer.SETTLED), id="a stream that is cut won't settle"),
        pytest.param(CUT, e.CancelTimer(Timer.VERIFY), id="nor is looked for"),
        pytest.param(SERVING, e.Heed(1), id="the stream after a Register is the kubelet's"),
        pytest.param([*UP, e.StreamOpened(1)], e.Heed(1), id="also before the reply"),
        pytest.param(
            [*OK, e.StreamOpened(1, likely=False), e.StreamOpened(2)],
            e.Heed(2),
            id="who looks like a kubelet, rather",
        ),
        pytest.param(
            [*SERVING, e.StreamOpened(8), e.StreamEnded(1)],
            e.EndStreams(),
            id="who is left may be the kubelet's, too",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1), e.StreamOpened(2), e.StreamEnded(1)],
            e.EndStreams(),
            id="also while it registers",
        ),
        pytest.param(
            [*UP, e.StreamOpened(1, likely=False), e.StreamOpened(2), e.Replied(1, "UNIMPLEMENTED")],
            e.EndStreams(),
            id="the next dialect: no stream is left over",
        ),
    ],
)
def test_action(events: list[e.Event], expected: e.Action) -> None:
    _, actions = play(events)
    assert expected in actions


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([*SERVING, e.StreamOpened(8)], id="somebody else calls"),
        pytest.param([*SERVING, e.StreamOpened(8, likely=False)], id="a stranger calls"),
        pytest.param([*SERVING, e.StreamOpened(8, likely=False), e.StreamEnded(8)], id="a stranger ends"),
        pytest.param([*SERVING, e.StreamOpened(8), e.StreamEnded(8)], id="who ends before the looks of its stream"),
        pytest.param([*CUT, e.StreamOpened(8, likely=False)], id="a stranger calls while we wait"),
        pytest.param([*SERVING, e.Lacking()], id="a look lacks us, and the first looks are still to come"),
        pytest.param([*LOOKED, e.Lacking(), e.Lacking()], id="it lacks us again, and the next look is still to come"),
        pytest.param([*CUT, e.Lacking()], id="a look lacks us, and nobody serves"),
        pytest.param([*RENEWED, e.Renew("again")], id="other options, a moment after others"),
    ],
)
def test_nothing_is_done(events: list[e.Event]) -> None:
    assert play(events)[1] == []


@pytest.mark.parametrize("timer", Timer)
def test_a_timer_that_fires_while_another_gateway_serves_begins_nothing(timer: Timer) -> None:
    """The loop stood still: it was due before it was cancelled."""
    state, _ = play([*SERVING, e.StandBy()])
    after, actions = r.step(state, e.Fired(timer))
    assert (after.phase, actions) == (Phase.STANDBY, ())


@pytest.mark.parametrize(
    ("events", "timer", "seconds"),
    [
        pytest.param(CUT, Timer.RETRY, 0.005, id="after a cut: 5 ms"),
        pytest.param([*REGISTERED_AGAIN, e.StreamEnded(2)], Timer.RETRY, 0.010, id="a second cut: longer"),
        pytest.param(
            [*REGISTERED_AGAIN, e.Fired(Timer.SETTLED), e.StreamEnded(2)],
            Timer.RETRY,
            0.005,
            id="settled: forgotten",
        ),
        pytest.param([*UP, e.Replied(1, "UNKNOWN", "x")], Timer.RETRY, 0.05, id="a first error"),
        pytest.param(
            [
                *UP,
                e.Replied(1, "UNKNOWN", "x"),
                e.Fired(Timer.RETRY),
                e.Reached(2, K1),
                e.Replied(2, "OK"),
                e.StreamOpened(1),
                e.Fired(Timer.SETTLED),
                *ERROR_AGAIN,
            ],
            Timer.RETRY,
            0.05,
            id="settled: an error is forgotten, too",
        ),
        pytest.param(SERVING, Timer.SETTLED, 10.0, id="a stream has to live for a while until they are"),
        pytest.param(
            [
                *LOOKED,
                e.StreamEnded(1),
                e.Fired(Timer.RETRY),
                e.Reached(2, K1),
                e.Replied(2, "OK"),
                e.StreamOpened(2),
                e.Fired(Timer.VERIFY),
            ],
            Timer.VERIFY,
            0.9,
            id="the next stream gets its own looks",
        ),
        pytest.param(OK, Timer.CALL, 11.0, id="longer than the kubelet's own dial takes"),
        pytest.param(
            [*UP, e.Replied(1, "OK", connected=True)], Timer.CALL, 2.0, id="it has connected: it calls or never"
        ),
        pytest.param(SERVING, Timer.VERIFY, 0.1, id="a first look into the kubelet's records"),
        pytest.param([*SERVING, e.Fired(Timer.VERIFY)], Timer.VERIFY, 0.9, id="and a second, 1 s after the call"),
        pytest.param(
            [*SERVING, *[e.Fired(Timer.VERIFY)] * 2],
            Timer.VERIFY,
            329.0,
            id="and one after a stopped one is deleted",
        ),
        pytest.param([*LOOKED, e.Lacking()], Timer.VERIFY, 1.0, id="a look lacks us: another one, soon"),
        pytest.param(
            [*LOOKED, e.StreamOpened(8), e.StreamEnded(8)],
            Timer.VERIFY,
            1.0,
            id="one ended that looks like a kubelet",
        ),
        pytest.param(
            [*OK, e.StreamOpened(1, likely=False), e.StreamEnded(1)],
            Timer.RETRY,
            1.0,
            id="a stranger's end after a Register: the kubelet's own call may still come",
        ),
        pytest.param([*SERVING, e.Renew("x")], Timer.RENEW, 1.0, id="other options: at most once a second"),
        pytest.param([*REGISTERED_AGAIN, e.Renew("x")], Timer.RETRY, 0.005, id="other options are no cut"),
        pytest.param([*RENEWED, e.StreamEnded(2)], Timer.RETRY, 0.005, id="nor count as one"),
        pytest.param(
            [*CUT, e.KubeletUp(K2), *SERVING_2, e.StreamEnded(2)],
            Timer.RETRY,
            0.005,
            id="a new kubelet: no cut yet",
        ),
        pytest.param(
            [*UP, e.Replied(1, "UNKNOWN", "x"), e.KubeletUp(K2), e.Replied(2, "UNKNOWN", "x")],
            Timer.RETRY,
            0.05,
            id="a new kubelet: no error yet",
        ),
        pytest.param(
            [
                *UP,
                e.Replied(1, "UNKNOWN", "x"),
                e.Fired(Timer.RETRY),
                e.Reached(2, K2),
                e.Replied(2, "UNKNOWN", "x"),
            ],
            Timer.RETRY,
            0.05,
            id="also where the Register met it first",
        ),
        pytest.param(
            [
                *CUT,
                e.Fired(Timer.RETRY),
                e.Reached(2, K2),
                e.Replied(2, "OK"),
                e.StreamOpened(2),
                e.StreamEnded(2),
            ],
            Timer.RETRY,
            0.005,
            id="no cut either",
        ),
        pytest.param(
            [*SERVING, e.Verified(held=False), e.KubeletUp(K2), *SERVING_2, e.Verified(held=False)],
            Timer.RETRY,
            0.1,
            id="a new kubelet: nothing was healed yet",
        ),
        pytest.param(
            [*SERVING, e.Verified(held=False), e.Fired(Timer.RETRY), *SERVING_2, e.Verified(held=False)],
            Timer.RETRY,
            0.1,
            id="nor where the Register met it first",
        ),
        pytest.param(
            [
                *SERVING,
                e.Verified(held=False),
                *[e.Fired(Timer.RETRY), e.Reached(2, K1), e.Replied(2, "OK"), e.StreamOpened(2)],
                *LOOK,
                *[e.Fired(Timer.VERIFY), e.Verified(held=False)],
            ],
            Timer.RETRY,
            0.4,
            id="it looks held at first: that healed nothing",
        ),
    ],
)
def test_waiting(events: list[e.Event], timer: Timer, seconds: float) -> None:
    _, actions = play(events)
    assert timers(actions)[timer] == pytest.approx(seconds)


def _ends(state: r.State) -> list[e.Event]:
    return [
        e.Reached(state.attempt, K1),
        e.StreamOpened(state.attempt),
        e.Replied(state.attempt, "OK"),
        e.StreamEnded(state.attempt),
    ]


def _fails(state: r.State) -> list[e.Event]:
    return [e.Replied(state.attempt, "UNKNOWN", "busy")]


def _finds_nobody(state: r.State) -> list[e.Event]:
    return [e.Replied(state.attempt, "NOBODY")]


@pytest.mark.parametrize(
    ("again", "first"),
    [
        pytest.param(_ends, r.CUT_WAIT, id="cuts"),
        pytest.param(_fails, r.ERROR_WAIT, id="errors"),
        pytest.param(_finds_nobody, r.ERROR_WAIT, id="no kubelet"),
    ],
)
def test_waits_double_up_to_ten_seconds(again: Callable[[r.State], list[e.Event]], first: float) -> None:
    state, waits = play([e.KubeletUp(K1)])[0], []
    for _ in range(1100):  # 2.0 ** 1024 is too large.
        actions: tuple[e.Action, ...] = ()
        for event in again(state):
            state, actions = r.step(state, event)
        waits.append(timers(actions)[Timer.RETRY])
        state, _ = r.step(state, e.Fired(Timer.RETRY))
    assert waits == [min(first * 2 ** min(number, 30), 10.0) for number in range(1100)]


def test_waits_are_spread() -> None:
    waits = {plugin.spread(4.0) for _ in range(100)}
    assert (min(waits) >= 4, max(waits) < 5, len(waits) > 10) == (True, True, True)


def test_healing_waits_ever_longer_and_never_gives_up() -> None:
    state, waits, looks = play(SERVING)[0], [], []
    for stream in range(2, 12):
        state, actions = r.step(replace(state, cuts=0), e.Verified(held=False))
        assert e.EndStreams() in actions
        waits.append(timers(actions)[Timer.RETRY])
        for event in (e.Fired(Timer.RETRY), e.Replied(state.attempt + 1, "OK"), e.StreamOpened(stream)):
            state, actions = r.step(state, event)
        looks.append(timers(actions)[Timer.VERIFY])
    assert waits == pytest.approx([0.1, 0.4, *[1.6] * 8])
    assert looks == [0.1, 0.1, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0, 320.0]


def test_what_is_healed_in_vain_is_an_error_in_the_end() -> None:
    state, levels = play(SERVING)[0], []
    for stream in range(2, 6):
        state, actions = r.step(state, e.Verified(held=False))
        levels += [action.level for action in actions if isinstance(action, e.Report)]
        for event in (e.Fired(Timer.RETRY), e.Replied(state.attempt + 1, "OK"), e.StreamOpened(stream)):
            state, _ = r.step(state, event)
    assert levels == ["warning"] * r.HEALS + ["error"]


def test_other_options_are_said_in_their_time_though_the_stream_was_cut_meanwhile() -> None:
    """A Register for another reason doesn't forget the timer, or nothing would say the next ones."""
    _, actions = play([*RENEWED, e.Renew("again"), e.StreamEnded(2), e.Fired(Timer.RETRY)])
    assert e.CancelTimer(Timer.RENEW) not in actions


@pytest.mark.parametrize("away", [e.StandBy(), e.Withhold("too large")])
def test_who_was_held_back_says_other_options_at_once(away: e.Event) -> None:
    """Its timer is gone with all others."""
    back: list[e.Event] = [
        e.Resume(),
        e.Fired(Timer.RETRY),
        e.Reached(3, K1),
        e.Replied(3, "OK"),
        e.StreamOpened(3),
    ]
    state, _ = play([*RENEWED, away, *back, e.Renew("again")])
    assert state.phase is Phase.WAITING


def test_a_new_kubelet_met_before_it_was_told_is_negotiated_with_anew() -> None:
    """The wait after a cut ended on the next kubelet: what the one before refused is no longer true."""
    told = 'requested API version "0.1" is not supported by kubelet. Supported version is "v1alpha2"'
    state, _ = play(
        [
            *UP,
            e.Replied(1, "UNKNOWN", told),
            e.Replied(2, "OK"),
            e.StreamOpened(1),
            e.StreamEnded(1),
        ],
        last="0.1",
    )
    tried: list[str] = []
    for event in (
        e.Fired(Timer.RETRY),
        e.Reached(3, K2),
        e.KubeletUp(K2),
        e.Replied(3, "UNIMPLEMENTED"),
    ):
        state, actions = r.step(state, event)
        tried += offers(actions)
    assert tried == ["v1alpha2", "v1beta1"]


EVENTS = st.one_of(
    st.sampled_from(
        [
            e.KubeletUp(K1),
            e.KubeletUp(K2),
            e.Stop(),
            e.Resume(),
            e.StandBy(),
            e.Withhold("x"),
            e.Renew("x"),
            e.Lacking(),
        ]
    ),
    st.builds(e.Reached, st.integers(1, 6), st.sampled_from([K1, K2])),
    st.builds(
        e.Replied, st.integers(1, 6), st.sampled_from(["OK", "UNIMPLEMENTED", "UNKNOWN", "UNAVAILABLE", "NOBODY"])
    ),
    st.builds(e.StreamOpened, st.integers(1, 3), st.booleans()),
    st.builds(e.StreamEnded, st.integers(1, 3)),
    st.builds(e.Fired, st.sampled_from(Timer)),
    st.builds(e.Verified, held=st.booleans()),
    st.builds(e.NameLost, st.sampled_from(["token-1.sock", "x"])),
)


@settings(max_examples=1000)
@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_no_register_is_sent_beside_a_live_stream(events: list[e.Event]) -> None:
    """No Register while a stream of ours is live; none when held back; always a way on."""
    state, live, waiting = r.start("token", "auto", ""), set[int](), set[Timer]()
    for event in events:
        state, actions = r.step(state, event)
        if isinstance(event, e.StreamOpened) and event.likely:
            live.add(event.stream)
        if isinstance(event, e.StreamEnded):
            live.discard(event.stream)
        if isinstance(event, e.Fired):
            waiting.discard(event.timer)
        for action in actions:
            match action:
                case e.EndStreams():
                    live.clear()
                case e.SetTimer(timer, seconds):
                    assert 0 < seconds <= (330 if timer is Timer.VERIFY else 15)
                    waiting.add(timer)
                case e.CancelTimer(timer):
                    waiting.discard(timer)
                case e.SendRegister():
                    assert not live
                    assert state.phase is Phase.OFFERING
                case _:
                    pass
        if state.phase is Phase.WAITING:
            assert Timer.RETRY in waiting
        if state.phase is Phase.ACCEPTED:
            assert Timer.CALL in waiting
