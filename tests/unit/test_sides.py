"""Whose each GPU is: each rule of the table, and the table explored with two APIs, a kubelet, a scheduler and late news."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from devices.life.states import AWAY, TABLE, State
from devices.model import Health
from gateway.sides import table
from gateway.sides.side import Side
from gateway.sides.table import BoardHolders, Offered
from gateway_lab.trials.explore import search
from gateway_lab.trials.owners import Model, is_settled

_offered = table.offered
FREE = BoardHolders(pod="", claim="", allocated="")


@pytest.mark.parametrize(
    ("side", "seen", "after"),
    [
        (Side.PLUGIN, FREE, Side.PLUGIN),
        (Side.DRA, FREE, Side.DRA),
        (Side.TO_DRA, FREE, Side.DRA),
        (Side.TO_DRA, BoardHolders(pod=None), Side.TO_DRA),
        (Side.TO_DRA, BoardHolders(pod="a pod"), Side.TO_DRA),
        (Side.RECLAIMED, FREE, Side.TO_PLUGIN),
        (Side.RECLAIMED, BoardHolders(pod=None), Side.RECLAIMED),
        (Side.RECLAIMED, BoardHolders(pod="a pod"), Side.PLUGIN),
        (Side.TO_PLUGIN, FREE, Side.PLUGIN),
        (Side.TO_PLUGIN, BoardHolders(pod="", claim="c", allocated=""), Side.TO_PLUGIN),
        (Side.TO_PLUGIN, BoardHolders(pod="", claim="", allocated="c"), Side.TO_PLUGIN),
        (Side.TO_PLUGIN, BoardHolders(pod="", claim="", allocated=None), Side.TO_PLUGIN),
        (Side.PLUGIN, BoardHolders(pod="a pod", foreign="x"), Side.FOREIGN),
        (Side.TO_PLUGIN, BoardHolders(pod="", claim="", allocated="", foreign="x"), Side.FOREIGN),
        (Side.RECLAIMED, BoardHolders(pod="a pod", foreign="x"), Side.FOREIGN),
        (Side.TO_DRA, BoardHolders(pod="", foreign="x"), Side.DRA),
        (Side.FOREIGN, BoardHolders(pod="", foreign="x"), Side.FOREIGN),
        (Side.FOREIGN, BoardHolders(pod="a pod"), Side.PLUGIN),
    ],
)
def test_a_board_moves_on_when_nobody_has_it(side: Side, seen: BoardHolders, after: Side) -> None:
    assert table.moved(side, seen) is after


@pytest.mark.parametrize(
    ("side", "to_dra", "to_plugin"),
    [
        (Side.PLUGIN, Side.TO_DRA, Side.PLUGIN),
        (Side.TO_DRA, Side.TO_DRA, Side.PLUGIN),
        (Side.DRA, Side.DRA, Side.TO_PLUGIN),
        (Side.TO_PLUGIN, Side.DRA, Side.TO_PLUGIN),
        (Side.RECLAIMED, Side.TO_DRA, Side.RECLAIMED),
        (Side.FOREIGN, Side.FOREIGN, Side.FOREIGN),
    ],
)
def test_an_order_is_followed_or_taken_back(side: Side, to_dra: Side, to_plugin: Side) -> None:
    assert (table.ordered(side, Side.DRA), table.ordered(side, Side.PLUGIN)) == (to_dra, to_plugin)
    foreign = Side.FOREIGN if to_plugin is Side.PLUGIN else to_plugin
    assert (table.ordered(side, Side.DRA, "x"), table.ordered(side, Side.PLUGIN, "x")) == (to_dra, foreign)


@pytest.mark.parametrize("side", Side)
def test_what_another_driver_has_is_given_by_neither_api(side: Side) -> None:
    assert table.offered(side, State.ELSEWHERE, "", "x") is Offered.NOT
    assert table.listed(Side.FOREIGN) is table.listed(Side.FOREIGN, admits=True) is State.LEAVING
    moves = side in table.MOVING
    assert (table.moves(side, "x"), table.moves(side, "")) == (
        moves or side is Side.PLUGIN,
        moves or side is Side.FOREIGN,
    )
    assert table.missed(side, BoardHolders(pod="", foreign="x")) is (Side.FOREIGN if side is Side.PLUGIN else side)


def test_one_api_at_most_gives_a_board_away() -> None:
    for side in Side:
        for named, claimed in ((False, False), (False, True), (True, True)):
            for before in (None, *AWAY):
                shown = table.listed(side, named=named, claimed=claimed, before=before)
                assert (shown is None) is (side is Side.PLUGIN)
                assert shown is None or TABLE[shown].allocate is not None
        for over in (None, *AWAY):
            for pod in (None, "", "a pod"):
                may = side in {Side.DRA, Side.TO_PLUGIN} and over not in {None, State.LEAVING} and pod == ""
                assert (table.offered(side, over, pod) is not Offered.NOT) is may
    assert table.offered(Side.DRA, State.ELSEWHERE, "") is Offered.FREE
    assert table.offered(Side.TO_PLUGIN, State.ELSEWHERE, "") is Offered.LEAVING


@pytest.mark.parametrize(
    ("side", "named", "claimed", "before", "shown"),
    [
        (Side.TO_PLUGIN, True, True, State.ELSEWHERE, State.DRA_BY_NAME),
        (Side.TO_PLUGIN, True, True, None, State.DRA_BY_NAME),
        (Side.TO_PLUGIN, False, False, State.DRA_BY_NAME, State.RETURNING),
        (Side.TO_PLUGIN, False, False, State.RETURNING, State.RETURNING),
        (Side.PLUGIN, False, False, State.RETURNING, None),
        # A claim that isn't by name has it now, or another part of it.
        (Side.TO_PLUGIN, False, True, State.DRA_BY_NAME, State.ELSEWHERE),
        (Side.TO_PLUGIN, False, True, State.RETURNING, State.ELSEWHERE),
        # Nobody by name had it, or it stays with DRA.
        (Side.TO_PLUGIN, False, False, State.ELSEWHERE, State.ELSEWHERE),
        (Side.TO_PLUGIN, False, False, None, State.ELSEWHERE),
        (Side.DRA, True, True, State.DRA_BY_NAME, State.ELSEWHERE),
        (Side.DRA, False, False, State.RETURNING, State.ELSEWHERE),
    ],
)
def test_on_the_way_back_the_list_has_what_pods_by_name_have_until_it_is_here(
    side: Side, *, named: bool, claimed: bool, before: State | None, shown: State | None
) -> None:
    assert table.listed(side, named=named, claimed=claimed, before=before) is shown
    assert all(TABLE[state].health is Health.HEALTHY for state in (State.DRA_BY_NAME, State.RETURNING))


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("side", Side)
def test_a_kubelet_that_admits_its_pods_has_what_goes_to_dra_and_nothing_of_dras(side: Side, *, claimed: bool) -> None:
    shown = table.listed(side, claimed=claimed, admits=True)
    assert (shown is None) is (side in {Side.PLUGIN, Side.TO_DRA})
    assert table.offered(side, None, "") is Offered.NOT


# Explored.


SHAPES: Final[Mapping[str, tuple[Mapping[str, Any], int]]] = {
    "one GPU": ({}, 20_000),
    "one GPU, also by name": ({"by_name": True, "at_once": True}, 3_000),
    "one GPU beside another driver": ({"beside": True, "at_once": True}, 7_000),
    "a pod of two": ({"claims": ((0,),), "pods": ((0, 1),), "ghosts": False, "at_once": True}, 30_000),
    "a pod and a claim of two": ({"claims": ((0, 1),), "pods": ((0, 1),), "ghosts": False, "at_once": True}, 15_000),
}
"""What is searched, and how many states there are at least. What takes longer: `python -m gateway_lab.trials.owners`."""


@pytest.mark.parametrize("shape", SHAPES)
def test_no_gpu_is_given_twice_and_every_crossing_can_end(shape: str) -> None:
    options, states = SHAPES[shape]
    model = Model(**options)
    found = search(model.start, model.moves, model.check)
    assert (found.broken, found.trace) == ("", ())
    assert found.states > states
    assert model.unending(is_settled) == set()


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("actual", lambda side, claimed: side),  # noqa: ARG005 - the table's signature
        ("listed", lambda side, **_: None if side is Side.TO_PLUGIN else State.ELSEWHERE),
        ("offered", lambda side, shown, pod, _: _offered(side, State.ELSEWHERE, pod)),  # noqa: ARG005
        ("offered", lambda side, shown, pod, _: _offered(side, shown, "")),  # noqa: ARG005
    ],
)
def test_a_table_that_breaks_a_rule_is_seen_to_give_twice(
    rule: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, rule, broken)
    model = Model()
    found = search(model.start, model.moves, model.check)
    assert found.broken == "GPU 0 is given twice"
    assert found.trace


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("moved", lambda side, seen: side),  # noqa: ARG005
        ("missed", lambda side, seen: side),  # noqa: ARG005
    ],
)
def test_a_table_in_which_somebody_waits_for_ever_is_seen(
    rule: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, rule, broken)
    model = Model(at_once=True)
    assert not search(model.start, model.moves, model.check).broken
    assert model.unending(is_settled)
