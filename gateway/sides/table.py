"""Decide which API may give a board, and when a board moves from one API to the other. Pure.

A board is a physical GPU with all its partitions and replicas. It has one side at a time. A change of side is on disk before it
is in force, and in force before either API hears of it, so that a crash at any point leaves one side.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from msgspec import Struct

from devices.life.states import COUNTED, State
from gateway.sides.side import Side


class BoardHolders(Struct, frozen=True):
    """What is known of a board's holders.

    ``pod`` is the container that holds it by the device plugin API: '' for none; None if unknown since the list withheld it.
    ``claim`` is the claim it is prepared for ('' for none). ``allocated`` is the claim it is allocated to at the API server;
    None if unknown since the ResourceSlice stopped offering it. It is also '' if a pod by name had it and ended, because no
    other pod uses such a claim. ``foreign`` is another DRA driver that has it. ``unsaid`` is why the claims at the API server
    are unknown.
    """

    pod: str | None = None
    claim: str = ""
    allocated: str | None = None
    foreign: str = ""
    unsaid: str = ""

    @property
    def is_held_up(self) -> bool:
        """True if it is held, or its holders are unknown: looking again soon would not help."""
        return bool(self.pod or self.claim or self.allocated or self.unsaid)


class BoardStatus(Struct, frozen=True):
    """Where a board is, for people: its holder ('' for none or unknown), and what it waits for.

    ``since`` is when it began to move (monotonic seconds), or when this process started; None if it doesn't move. ``then`` is
    the side that an order in question would give it; ``words`` is about that order.
    """

    board: str
    side: Side
    holder: str
    words: str
    since: float | None = None
    then: Side | None = None


class Offered(Enum):
    """How a ResourceSlice offers the devices of a board."""

    NOT = "not"
    LEAVING = "leaving"
    """Offered to no new claim."""
    FREE = "free"


ANNOTATION: Final = "device-plugin-gateway.io/move-to"
"""A node's annotation: the side (dra or plugin) to which all its boards go while it is there."""
_THEIRS: Final = "foreign:"
"""Prefix of the rows that say that another driver has a board."""
_ORDERS: Final[Mapping[tuple[Side, Side], Side]] = {
    (Side.PLUGIN, Side.DRA): Side.TO_DRA,
    (Side.TO_PLUGIN, Side.DRA): Side.DRA,
    (Side.RECLAIMED, Side.DRA): Side.TO_DRA,
    (Side.TO_DRA, Side.PLUGIN): Side.PLUGIN,
    (Side.DRA, Side.PLUGIN): Side.TO_PLUGIN,
}
_OF_DRA: Final = frozenset({Side.DRA, Side.TO_PLUGIN})
UNPREPARED_S: Final = 2.0
"""Seconds after which a pod whose claim is not prepared waits for the kubelet to ask again, which it does after 60 to 90 s. If
the pod has ended, its claim is gone by then."""
_GONE: Final = frozenset({State.ELSEWHERE}) | COUNTED
"""States of a device in the device plugin API's list that keep it from being given."""
MOVING: Final = frozenset({Side.TO_DRA, Side.TO_PLUGIN, Side.RECLAIMED})
"""Sides of boards that move."""


def actual(side: Side, *, claimed: bool) -> Side:
    """Return where a board is: a board that is prepared for a claim is DRA's, whatever the table says.

    The table can differ after ``--dra only``, which keeps none, or if Prepare was answered while the board's return was
    written.
    """
    if not claimed or side in _OF_DRA:
        return side
    return Side.DRA if side is Side.TO_DRA else Side.TO_PLUGIN


def ordered(side: Side, to: Side, foreign: str = "") -> Side:
    """Return the side of a board after an operator's order to move it to PLUGIN or DRA."""
    return _here(_ORDERS.get((side, to), side), foreign)


def missed(side: Side, seen: BoardHolders) -> Side:
    """Return the side of a board after a claim asks for it: it is called back from the device plugin API if no pod holds it."""
    return Side.RECLAIMED if side is Side.PLUGIN and seen.pod == "" and not seen.foreign else _here(side, seen.foreign)


def moved(side: Side, seen: BoardHolders) -> Side:
    """Return the side of a moving or foreign board, given its holders. It is the same if the board must wait."""
    return _here(_moved(side, seen), seen.foreign)


def moves(side: Side, foreign: str) -> bool:
    """Return True if a board's holders must be looked up: it moves, or must be withheld from or given back by another driver."""
    return side in MOVING or side is (Side.PLUGIN if foreign else Side.FOREIGN)


def _here(side: Side, foreign: str) -> Side:
    return Side.FOREIGN if side is Side.PLUGIN and foreign else side


def _moved(side: Side, seen: BoardHolders) -> Side:
    match side:
        case Side.TO_DRA if seen.pod == "":
            return Side.DRA
        case Side.RECLAIMED if seen.pod == "":
            return Side.TO_PLUGIN
        case Side.RECLAIMED if seen.pod:
            return Side.PLUGIN
        case Side.TO_PLUGIN if not seen.claim and seen.allocated == "":
            return Side.PLUGIN
        case Side.FOREIGN if not seen.foreign:
            return Side.PLUGIN
        case _:
            return side


def looked_at(side: Side, seen: BoardHolders, *, misses: bool) -> Side:
    """Return the side of a board after a look at its holders; ``misses``: a claim asks for it."""
    return missed(side, seen) if misses and side is Side.PLUGIN else moved(side, seen)


def remembered(known: Mapping[str, Side], foreign: Mapping[str, str]) -> dict[str, Side | None]:
    """Return the rows to change so that the table says which boards other drivers have; ``foreign`` is the other driver by board.

    The rows outlive those drivers' slices, which vanish for a moment when kubelet and gateway start, while their claims stay.
    """
    rows = {f"{_THEIRS}{board}": Side.FOREIGN if words else None for board, words in foreign.items()}
    return {row: side for row, side in rows.items() if known.get(row) is not side}


def theirs(known: Mapping[str, Side]) -> list[str]:
    """Return the boards that other drivers had."""
    return [row.removeprefix(_THEIRS) for row, side in known.items() if side is Side.FOREIGN]


def listed(
    side: Side, *, named: bool = False, claimed: bool = False, before: State | None = None, admits: bool = False
) -> State | None:
    """Return the state that covers a device in the device plugin API's list; None for none.

    The scheduler counts a pod that asked by name against the list, whichever API gave its device. While a board moves back, the
    list must include the devices of such pods, or as many others stay unused (run on 1.37). The device stays listed until the
    board is back, because the next pod comes as soon as the last one ended, and a kubelet without a healthy device fails it for
    good. So does a kubelet that starts with a pod whose container ended, or that was given the device meanwhile (run on 1.36,
    1.37).

    Args:
        side: the side of its board.
        named: True if it is prepared for a pod that asked by name.
        claimed: True if a device of its board is prepared for a claim.
        before: the state that covers it now.
        admits: True if the kubelet is away, or admits its pods again.
    """
    if side is Side.PLUGIN or (side is Side.TO_DRA and admits):
        return None
    if side is Side.TO_PLUGIN and named:
        return State.LENT
    if side is Side.TO_PLUGIN and not claimed and before in COUNTED:
        return State.RETURNING
    return State.ELSEWHERE if side in _OF_DRA else State.LEAVING


def late(since: Mapping[str, float], counted: Mapping[str, State], now: float) -> frozenset[str]:
    """Return the devices that pods by name wait for, so that the list must count them.

    Args:
        since: since when a claim of such a pod has had each device and was not prepared (monotonic seconds).
        counted: the state of each device that the list counts ahead of time. A returning device was prepared, and its pod has ended.
        now: monotonic seconds.
    """
    return frozenset(
        one for one, at in since.items() if now - at >= UNPREPARED_S and counted.get(one) is not State.RETURNING
    )


def offered(side: Side, shown: State | None, pod: str | None, foreign: str = "") -> Offered:
    """Return how DRA offers a board, in a slice and to Prepare.

    Args:
        side: the side of the board.
        shown: the state that covers it in the list that the device plugin API serves now.
        pod: as in ``BoardHolders``. A starting gateway looks before it offers: the earlier one may have died between the disk and the
            list.
        foreign: as in ``BoardHolders``.
    """
    if shown not in _GONE or side not in _OF_DRA or pod != "" or foreign:
        return Offered.NOT
    return Offered.FREE if side is Side.DRA else Offered.LEAVING


def words(side: Side, seen: BoardHolders) -> str:
    """Return where a board is and what it waits for, for people."""
    match side:
        case Side.PLUGIN:
            return "offered by the device plugin API; `gateway move --to dra` moves it"
        case Side.TO_DRA:
            return f"it goes to DRA as soon as nobody holds it{_by(seen.pod)}"
        case Side.RECLAIMED:
            return f"called back by DRA for a claim that was allocated it{_by(seen.pod)}"
        case Side.DRA if seen.foreign:
            return f"offered by nobody here: {seen.foreign}{_has(seen.claim)}"
        case Side.DRA:
            return f"offered by DRA{_has(seen.claim)}"
        case Side.FOREIGN:
            return f"offered by nobody here: {seen.foreign}{_by(seen.pod)}"
        case Side.TO_PLUGIN if seen.unsaid and not (seen.claim or seen.allocated):
            return f"it comes back from DRA as soon as no claim has it, and the API server doesn't say which do: {seen.unsaid:.200}"
        case Side.TO_PLUGIN:
            return f"it comes back from DRA as soon as no claim has it{_has(seen.claim or seen.allocated or '')}"


def _by(pod: str | None) -> str:
    return f": held by {pod:.160}" if pod else ""


def _has(claim: str) -> str:
    return f": {claim:.160} has it" if claim else ""
