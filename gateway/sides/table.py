"""Decide which API may give a board, and when a board moves from one API to the other. Pure.

A board is a physical GPU with all its partitions and replicas. It has one side at a time. A change of side is first written to
disk, then in force, and only then shown to either API. So after a crash at any point it has one side.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from msgspec import Struct

from devices.life.states import COUNTED, State
from gateway.sides.side import Side


class BoardHolders(Struct, frozen=True):
    """The known holders of a board.

    ``pod`` is the container that holds it by the device plugin API: '' for none; None if that was not read since the list
    withheld the board. ``claim`` is the claim for which it is prepared ('' for none). ``allocated`` is the claim to which it is
    allocated at the API server: '' for none; None if that was not read since the ResourceSlice stopped offering it. If a pod got
    the board by resource name and has ended, ``allocated`` is '', because no other pod uses its claim. ``foreign`` is another DRA
    driver that has the board. ``unsaid`` is why the claims at the API server are unknown.
    """

    pod: str | None = None
    claim: str = ""
    allocated: str | None = None
    foreign: str = ""
    unsaid: str = ""

    @property
    def is_held_up(self) -> bool:
        """True if the board has a holder, or its claims are unknown."""
        return bool(self.pod or self.claim or self.allocated or self.unsaid)


class BoardStatus(Struct, frozen=True):
    """The side of a board, for people: its holder ('' for none or unknown), and what it waits for.

    ``since`` is when it began to move, or when this process started (monotonic seconds); None if it doesn't move. In a dry run,
    ``then`` is the side that the order would give it, and ``words`` describes the order's effect.
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
    """Only claims to which they are allocated get them."""
    FREE = "free"
    """New claims may get them."""


ANNOTATION: Final = "device-plugin-gateway.io/move-to"
"""A node's annotation. Its value is the side (dra or plugin) to which all boards move while the annotation exists."""
_THEIRS: Final = "foreign:"
"""Prefix of the rows that note that another driver has a board."""
_ORDERS: Final[Mapping[tuple[Side, Side], Side]] = {
    (Side.PLUGIN, Side.DRA): Side.TO_DRA,
    (Side.TO_PLUGIN, Side.DRA): Side.DRA,
    (Side.RECLAIMED, Side.DRA): Side.TO_DRA,
    (Side.TO_DRA, Side.PLUGIN): Side.PLUGIN,
    (Side.DRA, Side.PLUGIN): Side.TO_PLUGIN,
}
_OF_DRA: Final = frozenset({Side.DRA, Side.TO_PLUGIN})
UNPREPARED_S: Final = 2.0
"""Seconds within which a claim must be prepared. If it isn't, its pod waits for the kubelet's next try, 60 to 90 s later. (The
claim of an ended pod is deleted sooner.)"""
_GONE: Final = frozenset({State.ELSEWHERE}) | COUNTED
"""States in the device plugin API's list of devices that the kubelet can't give."""
MOVING: Final = frozenset({Side.TO_DRA, Side.TO_PLUGIN, Side.RECLAIMED})
"""Sides of boards that move."""


def actual(side: Side, *, claimed: bool) -> Side:
    """Return the actual side of a board: if it is prepared for a claim, it is DRA's, whatever the table says.

    The table can differ after ``--dra only``, which keeps no table, or if Prepare was answered while the board's return was
    being written.
    """
    if not claimed or side in _OF_DRA:
        return side
    return Side.DRA if side is Side.TO_DRA else Side.TO_PLUGIN


def ordered(side: Side, to: Side, foreign: str = "") -> Side:
    """Return the side of a board after an operator's order to move it to PLUGIN or DRA."""
    return _here(_ORDERS.get((side, to), side), foreign)


def missed(side: Side, seen: BoardHolders) -> Side:
    """Return the side of a board when a claim asks for it. If the device plugin API has it and no pod holds it, DRA reclaims it."""
    return Side.RECLAIMED if side is Side.PLUGIN and seen.pod == "" and not seen.foreign else _here(side, seen.foreign)


def moved(side: Side, seen: BoardHolders) -> Side:
    """Return the next side of a moving or foreign board with these holders. If it must wait, that is its current side."""
    return _here(_moved(side, seen), seen.foreign)


def moves(side: Side, foreign: str) -> bool:
    """Return True if a board's side may change: it moves, or another driver begins or ends to offer it."""
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
    """Return the rows to change, so that the table notes which boards other drivers have; ``foreign`` is the other driver by board.

    The rows are needed because those drivers' slices vanish for a moment when kubelet and gateway start, while their claims stay.
    """
    rows = {f"{_THEIRS}{board}": Side.FOREIGN if words else None for board, words in foreign.items()}
    return {row: side for row, side in rows.items() if known.get(row) is not side}


def theirs(known: Mapping[str, Side]) -> list[str]:
    """Return the boards that other drivers had."""
    return [row.removeprefix(_THEIRS) for row, side in known.items() if side is Side.FOREIGN]


def listed(
    side: Side, *, named: bool = False, claimed: bool = False, before: State | None = None, admits: bool = False
) -> State | None:
    """Return the state that covers a device in the device plugin API's list; None if no state does.

    The scheduler counts a pod that asked by resource name against the list, even if DRA gave its device. So while a board moves
    back, the list must include the devices of such pods; otherwise as many others stay unused (run on 1.37). The device stays
    listed until the board is back: the next pod is bound as soon as the last one has ended, and a kubelet without a healthy device
    fails it for good. A restarted kubelet also fails a pod whose container has ended, if the device is not listed (run on 1.36,
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
        return State.DRA_BY_NAME
    if side is Side.TO_PLUGIN and not claimed and before in COUNTED:
        return State.RETURNING
    return State.ELSEWHERE if side in _OF_DRA else State.LEAVING


def late(since: Mapping[str, float], counted: Mapping[str, State], now: float) -> frozenset[str]:
    """Return the devices for which pods that asked by resource name wait; the list must count them.

    Args:
        since: for each device, since when a claim of such a pod has it and is not prepared (monotonic seconds).
        counted: the state of each device that the list counts ahead of time. The pod of a returning device has ended.
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
        pod: as in ``BoardHolders``. A starting gateway must read it first: the earlier gateway may have ended before it changed its
            list.
        foreign: as in ``BoardHolders``.
    """
    if shown not in _GONE or side not in _OF_DRA or pod != "" or foreign:
        return Offered.NOT
    return Offered.FREE if side is Side.DRA else Offered.LEAVING


def words(side: Side, seen: BoardHolders) -> str:
    """Return the side of a board and what it waits for, for people."""
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
