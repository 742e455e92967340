"""Move boards between the device plugin API and DRA, if one gateway serves both (``--dra on``), by the rules of ``gateway.sides.table``.

A change of side is on disk first, then in force, then in the kubelet's list. Only then does DRA offer the board. Holders are
read from the kubelet's records after the kubelet's list stopped offering the board.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from devices import boards
from devices.life.states import AWAY, COUNTED, Entry, State
from devices.model import Health
from gateway.dra.claims import Allocated, allocated_to, by_board
from gateway.dra.pods import starts
from gateway.dra.publisher import LINGERS
from gateway.kubernetes.client import KubernetesError
from gateway.kubernetes.watch import Backoff
from gateway.registration.events import Phase
from gateway.sides import table
from gateway.sides.side import Side
from gateway.sides.table import BoardHolders, BoardStatus, Offered

if TYPE_CHECKING:
    from devices.claims import ClaimName
    from devices.model import Device
    from gateway.dra.allocatable import Allocatable
    from gateway.dra.pods import AskedClaims
    from gateway.memory.claimed import Claimed
    from gateway.memory.holdings import Holdings
    from gateway.memory.ledger import Ledger
    from gateway.memory.scribe import Scribe
    from gateway.registration.registrar import Resource

REST: Final = ""
"""The row of all boards without one. If it is missing, there is no table: the state file is new, or was lost."""
LOOK_AGAIN_S: Final = 0.1
"""Seconds between two looks while boards move that may have no holder."""
WAIT_S: Final = 0.5
"""The same, if all of them have holders: nobody reports that the kubelet considers a pod as ended."""
LET_GO_S: Final = 5.0
"""Seconds between two reads of the claims, to find out if they still have what another DRA driver offered."""
ADMITS_S: Final = 4.0
"""Seconds after which a started kubelet has admitted its pods again (0.6 to 2.9 on a busy machine: run)."""
_log = structlog.get_logger()


class NotWrittenError(Exception):
    """The state file could not be written, so nothing was changed."""


class Strangers:
    """The boards that other DRA drivers on this node have: those that they offer, and those that they offered and claims may still have.

    Args:
        ask: reads from the API server which claims have what.
        changed: called if another driver has more boards, or fewer.
    """

    def __init__(self, ask: AskedClaims, changed: Callable[[], None]) -> None:
        self._ask, self._changed, self._ask_at = ask, changed, time.monotonic() + LINGERS
        self.offered: Mapping[str, str] | None = None
        """The boards that they offer, and the driver in words; None: unknown yet."""
        self.went: dict[str, str] = {}
        """The boards that they offered and claims may still have. A change replaces the dict, because ``let_go`` compares it
        after its read of the claims."""

    @property
    def unknown(self) -> str:
        """Why it is unknown which boards they have."""
        return self._ask.unknown(looked=self.offered is not None)

    def begin(self, boards: Iterable[str]) -> None:
        """Note the boards that they had before this gateway."""
        self.went = dict.fromkeys(boards, "another DRA driver offered it a moment ago")

    def meet(self, offered: Mapping[str, str] | None) -> None:
        """Note the boards that they offer now; None: unknown."""
        if offered is not None and offered != self.offered:
            self.went = self.went | {one: words for one, words in (self.offered or {}).items() if one not in offered}
            self.offered = offered
            self._changed()

    def of(self, board: str) -> str:
        """Return which other driver has a board, in words; empty for none."""
        return (self.offered or {}).get(board) or self.went.get(board, "")

    def remember(self, ledger: Ledger, scribe: Scribe, boards: Iterable[str]) -> None:
        """Write to the state file which of these boards they have."""
        for row, side in table.remembered(ledger.sides, {one: self.of(one) for one in boards}).items():
            ledger.set_side(row, side)
            scribe.soon()

    async def let_go(self) -> None:
        """Forget boards that they no longer offer, once no claim has a device that no ResourceSlice shows."""
        if not self.went or self.offered is None or time.monotonic() < self._ask_at:
            return
        went, asked = self.went, await self._ask()
        self._ask_at = time.monotonic() + LET_GO_S
        if asked is None:
            return
        if asked.unshown:
            self.went = dict.fromkeys(self.went, f"another DRA driver offered it, and {asked.unshown} may have it")
        else:
            has = {one: f"another DRA driver offered it, and {who} may have it" for one, who in asked.boards.items()}
            self.went = {one: has.get(one, words) for one, words in self.went.items() if one not in went or one in has}
            self._changed()


class Crossing:
    """The sides in force, and the boards that move.

    Args:
        holdings: the holders. Its ledger has the sides on disk, and the prepared claims.
        resources: returns the lists of all devices.
        allocated: reads from the API server which claims have which boards.
        update: updates the lists.
        allocatable: tells the scheduler which devices came back.
        first: set once all devices are known. Until then it is unknown which boards claims have.
    """

    def __init__(
        self,
        holdings: Holdings,
        resources: Callable[[], Sequence[Resource]],
        allocated: AskedClaims,
        update: Callable[[], Awaitable[None]],
        allocatable: Allocatable,
        first: asyncio.Event,
    ) -> None:
        self.allocatable, self._presence, self._first = allocatable, holdings.presence, first
        self._admits = False
        """True if the list also has what moves to DRA, because a kubelet starts and admits its pods again."""
        self._holdings, self._reader = holdings, holdings.reader
        self._ledger, self._scribe = holdings.ledger, holdings.scribe
        self._resources, self._ask, self._update = resources, allocated, update
        self._sides: dict[str, Side] = {}
        self._began = time.monotonic()
        self._moving_since: dict[str, float] = {}
        """Since when each board moves (monotonic seconds). Boards that moved before this process started are not in it."""
        self._withheld_since: dict[str, float] = {}
        """Since when the list withholds each moving board from new pods (monotonic seconds)."""
        self._allocated: dict[str, str] = {}
        """The claim that each board is allocated to by the API server ('' for none), read since the ResourceSlice stopped
        offering it."""
        self.strangers = Strangers(allocated, self.claimed)
        self._prepared: tuple[Mapping[str, Claimed], Mapping[str, str], frozenset[str]] = {}, {}, frozenset()
        """The prepared claims, the claim of each board, and the devices of pods that asked by name."""
        self._missed = set[str]()
        self._unprepared: dict[str, float] = {}
        """Since when (monotonic seconds) pods that asked by name have had a device allocated by DRA and not prepared, by device ID."""
        self._late: frozenset[str] = frozenset()
        """Those of them that the device plugin API must list, because the scheduler counts their pods."""
        self._counted: Mapping[str, State] = {}
        """The devices that the list counts ahead of time, by ID."""
        self._lists_are_stale = False
        """True if the lists must be updated, because claims changed."""
        self._wake, self._turn, self._backoff = asyncio.Event(), asyncio.Lock(), Backoff()

    # The sides in force.

    def adopt(self) -> None:
        """Put the table on disk in force: this gateway leads from now on."""
        self._sides = dict(self._ledger.sides)
        self._admits, self.allocatable.came = starts(self._presence, ADMITS_S), time.monotonic()
        self.strangers.begin(table.theirs(self._sides))

    @property
    def is_known(self) -> bool:
        """True if there is a table."""
        return REST in self._sides

    def side(self, board: str) -> Side:
        """Return the side of a board. Without a table each board moves, so that neither API gives it."""
        written = self._sides.get(board, self._sides.get(REST, Side.TO_DRA))
        return table.actual(written, claimed=bool(self._claim(board)))

    def away(self, devices: Iterable[Device]) -> dict[str, tuple[State, str]]:
        """Return the devices that the device plugin API must not give, by ID: their state, and the reason."""
        found, admits = {}, self._admits and self.is_known
        for device in devices:
            board = boards.place_of(device).board
            side, claim = self.side(board), self._claim(board)
            named = device.id in self._prepared[2] or device.id in self._late
            here, before = admits and not self.strangers.of(board), self._counted.get(device.id)
            state = table.listed(side, named=named, claimed=bool(claim), before=before, admits=here)
            if state is not None:
                found[device.id] = state, self._words(board, side)
        return found

    def offered(self, entry: Entry) -> Offered:
        """Return how DRA offers a device. ``offer`` checks the kubelet's records."""
        over = next((one.state for one in entry.layers if one.state in AWAY), None)
        board = boards.place_of(entry.device).board
        return table.offered(self.side(board), over, "", self.strangers.of(board))

    def words(self, entry: Entry) -> str:
        """Return for people where a device is."""
        board = boards.place_of(entry.device).board
        return self._words(board, self.side(board))

    def boards(self) -> dict[str, list[tuple[str, Entry]]]:
        """Return the devices of each board, with their resources."""
        found: dict[str, list[tuple[str, Entry]]] = {}
        for resource in self._resources():
            for entry in resource.entries.values():
                found.setdefault(boards.place_of(entry.device).board, []).append((resource.name, entry))
        return found

    def statuses(self, to: Side | None = None) -> list[BoardStatus]:
        """Return the status of each board for people. ``to``: as an order to move it there would make it."""
        found = []
        for board, devices in self.boards().items():
            side, seen = self.side(board), self._seen(board, devices)
            then = None if to is None else table.ordered(side, to, seen.foreign)
            words = table.words(then or side, seen) if self.is_known else self._words(board, side)
            since = self._moving_since.get(board, self._began) if side in table.MOVING else None
            found.append(BoardStatus(board, side, seen.pod or seen.claim, words, since, then))
        return found

    def _words(self, board: str, side: Side) -> str:
        if not self.is_known:
            return f"nothing is known of it yet, because {self.strangers.unknown}"
        return table.words(side, self._seen(board))

    def _claim(self, board: str) -> str:
        """Return the claim that a board is prepared for; empty for none. It is called for each device of each list."""
        rows = self._ledger.claims  # A change replaces it.
        if rows is not self._prepared[0]:
            self._prepared = rows, *by_board(rows)
        return self._prepared[1].get(board, "")

    # Events and orders.

    async def order(self, to: Side, wanted: Collection[str]) -> None:
        """Move boards to one API.

        Raises:
            NotWrittenError: nothing was done.
        """
        self._admits = self._admits or starts(self._presence, ADMITS_S)
        sides = {board: self._sides.get(board, self._sides[REST]) for board in wanted}
        await self._put({one: table.ordered(side, to, self.strangers.of(one)) for one, side in sides.items()})

    def claimed(self) -> None:
        """Note that a claim got devices, or gave them back: the list shows holders."""
        self._lists_are_stale = True
        self._wake.set()

    def ended(self) -> None:
        """Note that pods ended: what they held may move."""
        self._wake.set()

    async def bring_back(self, free: Collection[str], gone: ClaimName, had: Collection[str]) -> None:
        """Give the device plugin API at once what a pod got by name and its claim no longer has, except boards that ResourceSlices still offer.

        The API server keeps the claim for a while. The devices that it ``had`` (by ID) have no other holder there. If other parts of
        the board may have one, the API server must be asked first. The kubelet reports the end of the pod when this returns, and the
        scheduler then has the next pod for the GPU.
        """
        seen, there = {}, self.boards()
        for board in there.keys() - {*free}:
            if not any(one.device.id in self._counted for _, one in there[board]):
                continue
            allocated = self._allocated.get(board)
            whole = all(one.device.id in had for _, one in there[board])
            if allocated == allocated_to(gone.namespace, gone.name) or (allocated is None and whole):
                allocated = ""
            seen[board] = BoardHolders("", self._claim(board), allocated, self.strangers.of(board))
        with contextlib.suppress(NotWrittenError):  # ``run`` tries again.
            await self._put(
                {one: table.moved(self.side(one), seen[one]) for one in seen}, of=dict.fromkeys(seen, Side.TO_PLUGIN)
            )

    def missed(self, wanted: Iterable[str]) -> None:
        """Note that a claim waits for boards. Those of the device plugin API may be called back."""
        self._missed.update(wanted)
        self._wake.set()

    async def run(self) -> None:
        """Move boards. Never returns."""
        while True:
            try:
                busy = await self._look()
            except NotWrittenError as error:
                _log.error("GPUs stay where they are", reason=str(error))
                busy = WAIT_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(busy or None):
                    await self._wake.wait()
            self._wake.clear()

    async def _look(self) -> float:
        """Move the boards that can be moved; return after how many seconds to look again (0: at the next event)."""
        if not self.is_known:
            there = self.boards() if self._first.is_set() else {}
            if not there or self.strangers.offered is None or not self._backoff.due(REST, time.monotonic()):
                return WAIT_S
            if (found := await self._ask()) is None:
                return WAIT_S
            await self._put(_anew(there, found, self.strangers.offered))
        await self.strangers.let_go()
        self.strangers.remember(self._ledger, self._scribe, self.boards())
        if self._lists_are_stale:
            self._lists_are_stale = False
            await self._update()
        if self._admits is not starts(self._presence, ADMITS_S):
            await self._admit()
        elif self._admits and Side.TO_DRA in self._sides.values():
            await self.allocatable.hold_back(self.stays())
        there, missed, self._missed = self.boards(), self._missed, set[str]()
        moving = {one for one in there if table.moves(self.side(one), self.strangers.of(one))}
        if not moving and not missed and self.allocatable.came is None:
            return WAIT_S if self.strangers.went else 0.0
        await self._reader.look()
        served = all(one.state.phase is Phase.SERVING for one in self._resources())
        await self.allocatable.catch_up(self._reader.last if served else None, self.stays)
        asked: Allocated | None = Allocated()
        coming = {one for one in moving if self.side(one) is Side.TO_PLUGIN and not self._claim(one)}
        if (
            not self._backoff.due(coming, time.monotonic()) and coming
        ):  # The read is for the claims of the whole cluster.
            asked, self._allocated = None, {one: claim for one, claim in self._allocated.items() if claim}
        elif coming:
            asked = await self._ask()
            self._allocated = {} if asked is None else {one: asked.boards.get(one, "") for one in coming}
        if asked is not None:
            now = time.monotonic()
            self._unprepared = {one: self._unprepared.get(one, now) for one in asked.by_name - self._prepared[2]}
            before, self._late = self._late, table.late(self._unprepared, self._counted, now)
            if self._late != before:
                self.claimed()
        seen = {board: self._seen(board, there[board]) for board in moving | (missed & there.keys())}
        sides = {board: self.side(board) for board in seen}
        after = {one: table.looked_at(side, seen[one], misses=one in missed) for one, side in sides.items()}
        news = {board: side for board, side in after.items() if side is not sides[board]}
        await self._put(news, of=sides)
        held = self.allocatable.came is None and all(one.is_held_up for one in seen.values())
        return WAIT_S if held and not news else LOOK_AGAIN_S

    async def _admit(self) -> None:
        """List what moves to DRA while a kubelet starts; withhold it again once the kubelet has admitted its pods."""
        if self._admits and any(self.side(board) is Side.TO_DRA for board in self.boards()):
            try:
                async with self.allocatable.turn:
                    await self.allocatable.lower(self.stays())
            except KubernetesError as error:
                _log.info("what goes to DRA is listed until the API server can be told of less", reason=str(error))
                return
            self.allocatable.came = time.monotonic()
        self._admits = not self._admits
        await self._update()

    def stays(self, leaving: Collection[str] = ()) -> dict[str, frozenset[str]]:
        """Return the devices that the device plugin API's list has for pods once some boards have left it, by resource."""
        found: dict[str, set[str]] = {}
        for board, devices in self.boards().items():
            stays = board not in leaving
            all_stay = stays and self.side(board) is Side.PLUGIN
            for name, entry in devices:
                ids, device = found.setdefault(name, set()), entry.device
                if (all_stay or (stays and device.id in self._counted)) and device.health is Health.HEALTHY:
                    ids.add(device.id)
        return {name: frozenset(ids) for name, ids in found.items()}

    def _seen(self, board: str, devices: Sequence[tuple[str, Entry]] = ()) -> BoardHolders:
        foreign, allocated = self.strangers.of(board), self._allocated.get(board)
        return BoardHolders(self._pod(board, devices), self._claim(board), allocated, foreign, self._ask.unsaid)

    def _pod(self, board: str, devices: Sequence[tuple[str, Entry]]) -> str | None:
        """Return the container that holds a device of a board, empty for none; None if unknown since the list withheld the board."""
        last, side = self._reader.last, self.side(board)
        if not devices or last is None or last.records.source != "pod-resources" or last.records.allocatable is None:
            return None
        if side is not Side.PLUGIN and (board not in self._withheld_since or last.at <= self._withheld_since[board]):
            return None
        there = [(name, one.device.id) for name, one in devices]
        holder = self._holdings.holder_of(there)
        # Until the kubelet has the list that withholds it, the kubelet may give it.
        gives = side is not Side.PLUGIN and any(one in last.records.allocatable.get(name, ()) for name, one in there)
        return None if holder == "" and gives else holder

    async def _put(self, news: Mapping[str, Side], of: Mapping[str, Side] | None = None) -> None:
        """Write new sides to disk, put them in force, then update the list. ``of``: only for boards that are still on these sides."""
        async with self._turn:
            before = self._ledger.sides
            news = {board: side for board, side in news.items() if of is None or self.side(board) is of[board]}
            news = {board: side for board, side in news.items() if before.get(board) is not side}
            if not news:
                return
            for board, side in news.items():
                self._ledger.set_side(board, side)
            if not await self._scribe.durable():
                for board in news:
                    self._ledger.set_side(board, before.get(board))
                raise NotWrittenError(self._scribe.state.error)
            self._sides |= news
            for board, side in news.items():
                self._withheld_since.pop(board, None)
                self._allocated.pop(board, None)
                if side not in table.MOVING:
                    self._moving_since.pop(board, None)
                elif before.get(board) not in table.MOVING:
                    self._moving_since[board] = time.monotonic()
            if named := {board: side.value for board, side in news.items() if board != REST}:
                _log.info("GPUs move to the other API", boards=named)
        await self._update()
        if any(news):  # Also if a board left: the kubelet may have written an earlier number over the new one.
            self.allocatable.came = time.monotonic()
        self._wake.set()

    def listed(self, there: Mapping[str, Sequence[tuple[str, Entry]]], now: float) -> None:
        """Note that the lists are served as they are now (monotonic seconds): ``there`` is what ``boards`` returns."""
        counted = _counted(there)
        for board, devices in there.items():
            if all(any(one.state in AWAY for one in entry.layers) for _, entry in devices):
                if self._withheld_since.setdefault(board, now) == now:  # A board that just came may already move.
                    self._wake.set()
            else:
                self._withheld_since.pop(board, None)
        if counted.keys() - self._counted.keys():
            self.allocatable.came = now
            self._wake.set()
        self._counted = counted


def _anew(there: Iterable[str], found: Allocated, theirs: Iterable[str]) -> dict[str, Side]:
    """Return the sides for a state file that is new or was lost.

    If a claim has a device that is not there now, boards that appear later move back from DRA first, so that claims are read.
    """
    rest = Side.TO_PLUGIN if found.missing else Side.PLUGIN
    known = dict.fromkeys(there, Side.PLUGIN) if found.missing else {}
    return known | dict.fromkeys(theirs, Side.FOREIGN) | dict.fromkeys(found.boards, Side.TO_PLUGIN) | {REST: rest}


def _counted(there: Mapping[str, Iterable[tuple[str, Entry]]]) -> dict[str, State]:
    """Return the devices that the list counts ahead of time, by ID."""
    entries = (entry for devices in there.values() for _, entry in devices)
    return {entry.device.id: layer.state for entry in entries for layer in entry.layers if layer.state in COUNTED}
