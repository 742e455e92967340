"""The table of owners: to which API a board belongs, what each may do with it, and when it moves. Pure.

A board is a physical GPU with all that it is partitioned or shared into: what is physically one thing has one owner. A change is
on disk before it is in force, and in force before either API learns of it, so that a crash at any point leaves one owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from msgspec import Struct

from devices.life.states import COUNTED, State
from gateway.sides.side import Side


class Seen(Struct, frozen=True):
    """What is known of who holds a board.

    ``pod`` says in words which container has it by the device plugin API: '' for none, None where that isn't known since the
    kubelet was told to give it to nobody. ``claim`` says to which claim it is prepared ('' for none), ``allocated`` to which one
    it is allocated at the API server: None where that isn't known since the ResourceSlice offers it to nobody new; '' also where a pod by name
    had it and ended, because such a claim is nobody else's. ``foreign`` says in words which other DRA driver has it, ``unsaid`` why the
    API server doesn't say which claims there are.
    """

    pod: str | None = None
    claim: str = ""
    allocated: str | None = None
    foreign: str = ""
    unsaid: str = ""

    @property
    def is_held_up(self) -> bool:
        """Whether somebody holds it, or nobody says who: then there is no hurry to look again."""
        return bool(self.pod or self.claim or self.allocated or self.unsaid)


class Stand(Struct, frozen=True):
    """Where a board is, for people: who has it ('': nobody, or it isn't known), and what it waits for in words.

    It has been on its way ``since`` then (monotonic seconds), or since this process started; None: it isn't. ``then`` is where an order
    would bring it, where one is asked about; the words are about that.
    """

    board: str
    side: Side
    holder: str
    words: str
    since: float | None = None
    then: Side | None = None


class Offered(Enum):
    """How a ResourceSlice shows what is on a board."""

    NOT = "not"
    LEAVING = "leaving"
    """To nobody new."""
    FREE = "free"


ANNOTATION: Final = "device-plugin-gateway.io/move-to"
"""Of a node: the side (dra, plugin) to which all its boards go, as long as it is there."""
_THEIRS: Final = "foreign:"
"""What stands before a board in the row which says that another driver has it, whichever side it is on here."""
_ORDERS: Final[Mapping[tuple[Side, Side], Side]] = {
    (Side.PLUGIN, Side.DRA): Side.TO_DRA,
    (Side.TO_PLUGIN, Side.DRA): Side.DRA,
    (Side.RECLAIMED, Side.DRA): Side.TO_DRA,
    (Side.TO_DRA, Side.PLUGIN): Side.PLUGIN,
    (Side.DRA, Side.PLUGIN): Side.TO_PLUGIN,
}
_OF_DRA: Final = frozenset({Side.DRA, Side.TO_PLUGIN})
_GONE: Final = frozenset({State.ELSEWHERE}) | COUNTED
"""What lies over a device in the other API's list, so that it gives it to nobody."""
MOVING: Final = frozenset({Side.TO_DRA, Side.TO_PLUGIN, Side.RECLAIMED})
"""Where a board doesn't stay."""


def actual(side: Side, *, claimed: bool) -> Side:
    """Say where a board is: what is prepared for a claim is DRA's, whatever the table says.

    So it is after ``--dra only``, which keeps no table, and where Prepare was answered while the board's way back was written.
    """
    if not claimed or side in _OF_DRA:
        return side
    return Side.DRA if side is Side.TO_DRA else Side.TO_PLUGIN


def ordered(side: Side, to: Side, foreign: str = "") -> Side:
    """Say where a board is once an operator wants it at one end (PLUGIN or DRA)."""
    return _here(_ORDERS.get((side, to), side), foreign)


def missed(side: Side, seen: Seen) -> Side:
    """Say where a board is once a claim asks for it that is the other side's: it is called back if nobody holds it."""
    return Side.RECLAIMED if side is Side.PLUGIN and seen.pod == "" and not seen.foreign else _here(side, seen.foreign)


def moved(side: Side, seen: Seen) -> Side:
    """Say where a board on its way is now, or one that another DRA driver offers; the same where it has to wait."""
    return _here(_moved(side, seen), seen.foreign)


def moves(side: Side, foreign: str) -> bool:
    """Say whether there is something to look up of a board: what holds it up may be over, or it must be withheld."""
    return side in MOVING or side is (Side.PLUGIN if foreign else Side.FOREIGN)


def _here(side: Side, foreign: str) -> Side:
    return Side.FOREIGN if side is Side.PLUGIN and foreign else side


def _moved(side: Side, seen: Seen) -> Side:
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


def looked_at(side: Side, seen: Seen, *, misses: bool) -> Side:
    """Say where a board is now that it was looked at, on whichever side it came to meanwhile; ``misses``: a claim asks for it."""
    return missed(side, seen) if misses and side is Side.PLUGIN else moved(side, seen)


def remembered(known: Mapping[str, Side], foreign: Mapping[str, str]) -> dict[str, Side | None]:
    """Give the rows that say which boards other drivers have, as far as they are news; ``foreign`` says of each board who has it.

    A start of kubelet and gateway takes those drivers' slices away for a moment, and their claims stay.
    """
    rows = {f"{_THEIRS}{board}": Side.FOREIGN if words else None for board, words in foreign.items()}
    return {row: side for row, side in rows.items() if known.get(row) is not side}


def theirs(known: Mapping[str, Side]) -> list[str]:
    """Name the boards that other drivers had."""
    return [row.removeprefix(_THEIRS) for row, side in known.items() if side is Side.FOREIGN]


def listed(
    side: Side, *, named: bool = False, claimed: bool = False, before: State | None = None, admits: bool = False
) -> State | None:
    """Say what lies over a device in the device plugin API's list; None: nothing.

    The scheduler counts a pod that has a device by name against what the list has, whichever API gave it. On the way back, where
    such pods get what the list has, it must have theirs, too: without it as many others stayed unused (run on 1.37). It is listed
    so until it is here, because the next pod comes as soon as the last one ended, and a kubelet without a healthy device for it
    fails it for good. So does one that starts with a pod whose container ended, or that was given to it, meanwhile (run on 1.36, 1.37).

    Args:
        side: where its board is.
        named: whether it is prepared for a pod that asked by name.
        claimed: whether anything of its board is prepared for a claim.
        before: what lies over it in the list as it is now.
        admits: whether a kubelet is away, or admits its pods anew.
    """
    if side is Side.PLUGIN or (side is Side.TO_DRA and admits):
        return None
    if side is Side.TO_PLUGIN and named:
        return State.LENT
    if side is Side.TO_PLUGIN and not claimed and before in COUNTED:
        return State.RETURNING
    return State.ELSEWHERE if side in _OF_DRA else State.LEAVING


def offered(side: Side, shown: State | None, pod: str | None, foreign: str = "") -> Offered:
    """Say how DRA offers a board, to Prepare and in a slice.

    Args:
        side: where the board is.
        shown: what lies over it in the other API's list, as that is served now.
        pod: as in ``Seen``. A gateway that starts looks before it offers: the one before it may have died between the disk and
            the list.
        foreign: as in ``Seen``.
    """
    if shown not in _GONE or side not in _OF_DRA or pod != "" or foreign:
        return Offered.NOT
    return Offered.FREE if side is Side.DRA else Offered.LEAVING


def words(side: Side, seen: Seen) -> str:
    """Say for people where a board is, and what it waits for."""
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
