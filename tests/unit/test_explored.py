"""The core, explored: every promise holds in every state of the model, and a core that breaks one is seen to.

The searches here take seconds. ``python -m gateway_lab.trials.explore`` searches more: pairs of faults, any number of them, any
number of kubelets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.registration import events
from gateway.registration import machine as registration
from gateway.registration.events import Action, Phase, Timer
from gateway.registration.machine import State
from gateway_lab.trials import explore
from gateway_lab.trials.explore import ERAS, QUICK, Explored, Run, Surroundings

*_, LATE = ERAS


def searched(run: Run, around: type[Surroundings] = Surroundings) -> Explored:
    """Search anew: something is changed."""
    model = run.model(around)
    return explore.search(model.start, model.moves, model.check)


# The search itself.


def _ring(size: int) -> Callable[[int], Iterator[tuple[str, int]]]:
    def moves(state: int) -> Iterator[tuple[str, int]]:
        yield "on", (state + 1) % size
        yield "back", (state - 1) % size

    return moves


def _not(bad: int) -> Callable[[int], None]:
    def check(state: int) -> None:
        if state == bad:
            raise explore.BrokenError(f"it is {state}", "and further")

    return check


@pytest.mark.parametrize(
    ("size", "bad", "expected"),
    [
        pytest.param(10, -1, Explored(10, 20, 5), id="to closure"),
        pytest.param(10, 0, Explored(1, 0, 0, "it is 0", ("and further",)), id="broken from the start"),
        pytest.param(10, 8, Explored(6, 8, 2, "it is 8", ("back", "back", "and further")), id="the shortest trace"),
    ],
)
def test_search(size: int, bad: int, expected: Explored) -> None:
    assert explore.search(0, _ring(size), _not(bad)) == expected


def test_a_model_that_is_not_finite_is_told() -> None:
    with pytest.raises(OverflowError, match="at most 100 states"):
        explore.search(0, lambda state: [("on", state + 1)], _not(-1), at_most=100)


# The core.


@functools.cache
def explored(run: Run) -> tuple[Explored, explore.Registrations]:
    model = run.model()
    return explore.search(model.start, model.moves, model.check), model


@pytest.mark.parametrize("run", QUICK, ids=str)
def test_every_promise_holds_in_every_state(run: Run) -> None:
    found, _ = explored(run)
    assert (found.broken, found.trace) == ("", ())
    assert found.states > 300


def test_the_searches_reach_what_there_is() -> None:
    """Every phase and timer, each fault, and whatever a kubelet does with a second registration."""
    models = [explored(run)[1] for run in QUICK if len(run.faults) == 1]
    seen = [it for model in models for it in model.seen]
    said = {said for model in models for moves in model._moves.values() for said, _, _ in moves}
    assert {it.machine.phase for it in seen} == set(Phase)
    assert {timer for it in seen for timer in it.timers} == set(Timer)
    assert all(any(not it.may for it in model.seen) for model in models)
    assert {
        "the dead kubelet's call arrives",
        "the kubelet takes the Register that we gave up",
        "our end of a stream is over, and the newer registration is stuck",
        "our end of a stream is over, and the newer registration is cut",
        "the kubelet's records said False",
    } <= said


# A core that breaks a promise is seen to.


Step = tuple[State, tuple[Action, ...]]


def _without(*kinds: type[Action]) -> Callable[[Callable[..., Step]], Callable[..., Step]]:
    """Make a step of the machine forget some actions."""

    def change(step: Callable[..., Step]) -> Callable[..., Step]:
        def forgetful(*arguments: Any, **options: Any) -> Step:
            state, actions = step(*arguments, **options)
            return state, tuple(action for action in actions if not isinstance(action, kinds))

        return forgetful

    return change


def _seeing(**fields: Any) -> Callable[[Callable[..., Step]], Callable[..., Step]]:
    """Make a step of the machine see a state that isn't."""

    def change(step: Callable[..., Step]) -> Callable[..., Step]:
        return lambda state, *arguments, **options: step(replace(state, **fields), *arguments, **options)

    return change


def _nothing(_: Callable[..., Step]) -> Callable[..., Step]:
    return lambda state, *_, **__: (state, ())


def _of_ours(ended: Callable[..., Step]) -> Callable[..., Step]:
    return lambda state, stream: ended(state, state.stream if stream in state.others else stream)


def _no_drop(_: Callable[..., Any]) -> Callable[..., tuple[Action, ...]]:
    return lambda _: ()


@pytest.mark.parametrize(
    ("function", "change", "run", "says"),
    [
        pytest.param("_stream_opened", _seeing(reached=True), Run(LATE, ("standby",)), "sent while a stream", id="a call before we asked"),
        pytest.param("_stream_opened", _seeing(stream=None), Run(LATE, ("ghost",)), "forgotten", id="a second stream hides the first"),
        pytest.param("_drop", _no_drop, Run(LATE, ("unfit",)), "our name is in the socket directory", id="a name is left behind"),
        pytest.param("_replied", _without(events.SetTimer), Run(LATE, ("mute",)), "no timer is set", id="no wait for the call"),
        pytest.param("_hold_back", _without(events.EndStreams), Run(LATE), "stopped, and a stream goes on", id="no orderly stop"),
        pytest.param("_kubelet_up", _nothing, Run(LATE), "it stays waiting for a kubelet", id="a kubelet is missed"),
        pytest.param("_look_again", _nothing, Run(LATE, ("records",)), "round for ever", id="stuck later, and stays"),
        pytest.param("_stream_ended", _of_ours, Run(LATE, ("mimic",)), "somebody else's stream ends", id="anybody's end is taken for the kubelet's"),
    ],
)  # fmt: skip
def test_a_broken_core_is_seen(
    function: str, change: Callable[[Any], Any], run: Run, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, function, change(getattr(registration, function)))
    found = searched(run)
    assert says in found.broken
    assert found.trace
