"""Registration of one resource: each row is one rule of the kubelet's behaviour, told as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.kubelet import identity
from gateway.registration import events as e
from gateway.registration import machine as r
from gateway.registration.events import Phase, Timer

K1 = identity.KubeletId(1, 10, 100)
K2 = identity.KubeletId(1, 10, 200)  # a new socket, the old inode number again


def play(events: Sequence[e.Event], choice: str = "auto", last: str = "v1beta1") -> tuple[r.State, list[e.Action]]:
    """Play ``events``; return the state and what the last of them caused."""
    state = r.start("token", choice, last)
    actions: tuple[e.Action, ...] = ()
    for event in events:
        state, actions = r.step(state, event)
    return state, list(actions)


def timers(actions: Sequence[e.Action]) -> dict[Timer, float]:
    return {action.timer: action.seconds for action in actions if isinstance(action, e.SetTimer)}


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
        pytest.param(_ends, r.CUT_WAIT_S, id="cuts"),
        pytest.param(_fails, r.ERROR_WAIT_S, id="errors"),
        pytest.param(_finds_nobody, r.ERROR_WAIT_S, id="no kubelet"),
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
        before = state.phase
        state, actions = r.step(state, event)
        if isinstance(event, e.Fired) and before is Phase.STANDBY:  # It was due before it was cancelled.
            assert (state.phase, actions) == (before, ())
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
