"""Being the only gateway on a node, where there must not be two: with both APIs served, two would have two tables of owners in force.

Who holds a lock in the state directory is the one that decides; the kernel opens it when its holder is no more, however that ended. A
gateway that comes beside an older one gets ready, as far as it can without deciding anything, and asks that one to make room (``message.RESIGN``):
it ends all that it serves, writes down what isn't on disk, opens the lock and begins anew as one that waits. So what passes from the
one to the other is what passes from a gateway that ended to the next one, and no more. Who stands by in a pair gets as far, asks nobody,
and waits for the other one's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from devices.files import NotPlainError, read_plain
from gateway.handover import message
from gateway.handover.instance import TOKEN
from gateway.memory import file
from gateway.wires import control, notify
from gateway.wires.control import ControlError

if TYPE_CHECKING:
    from gateway.age import Age
    from gateway.memory.scribe import Scribe
    from gateway.wires.control import ControlConnection, Handler

LOCK: Final = "alone.lock"
AGAIN: Final = 0.25
"""Seconds between two looks whether another gateway still lives."""
SOON: Final = 0.005
"""The same, where one makes room: nobody serves by name meanwhile."""
AT_ONCE: Final = 0.001
"""The same, where one dies."""
MAKES_ROOM: Final = 10.0
"""Seconds that it has for that, before it is asked again."""
ASK_TIME: Final = 1.0
"""Seconds within which an older gateway must answer."""
HOLDS_BACK, HOLDS_BACK_MAX = 30.0, 900.0
"""Seconds for which one makes no room that came back because the newer one ended; doubled each time in a row, up to the second."""
FORGETS: Final = 3600.0
"""Seconds that it serves then until that is forgotten."""
KEEPS: Final = 10.0
"""Seconds between two looks whether the lock is still where others look for it."""
SERVED: Final = 600.0
"""Seconds from which on a newer one that ended did serve: after as many a kubelet forgets that a container ended, too."""
_ANOTHER: Final = "the other gateway on this node to end: with --dra on one decides"
_ADVICE: Final = "one with --dra on or off makes room for a newer one, where the kubelet is 1.33 or later; else update with maxSurge 0"
STANDS_BY: Final = "the death of the other gateway of the pair, which serves"
"""What one waits for that stands by."""
_WRITABLE: Final = "make --state-dir a folder that this gateway can write"
_TOO_MANY: Final = "find out who holds so many files open on this node: `cat /proc/sys/fs/file-nr`"
_log = structlog.get_logger()


class PairMember(Protocol):
    """What this gateway is in a pair."""

    first: bool
    """Whether no other one of the pair lived when it came."""
    in_vain: int
    """How often in a row the pair made room for a gateway that ended again."""

    @property
    def serves(self) -> bool:
        """Whether it is known that the other one has closed all its files."""

    async def turn(self) -> None:
        """Wait for the death of the other one."""

    def over(self) -> None:
        """Let the other one decide."""

    def resign(self, in_vain: int) -> None:
        """Have the whole pair begin anew and wait."""


class Alone:
    """The lock, and the gateways beside this one.

    Args:
        age: our own.
        state_dir: the state directory.
        others: gives the other gateways that live, with their folders.
        resign: ends this gateway, to begin anew and wait.
        scribe: reads what the one before left.
        in_vain: how often it did, in a row, for one that ended again.
        role: what it is in a pair; None: it is in none.
        shares: whether gateways without the lock may live beside this one: with DRA alone those that are no pair decide, too.
    """

    def __init__(
        self,
        age: Age,
        state_dir: Path,
        others: Callable[[], Mapping[Age, object]],
        resign: Callable[[], None],
        scribe: Scribe,
        in_vain: int = 0,
        role: PairMember | None = None,
        *,
        shares: bool = False,
    ) -> None:
        self._age, self._state_dir, self._others, self._lock = age, state_dir, others, -1
        self._scribe, self._role, self._shares = scribe, role, shares
        self._make_room = resign if role is None else lambda: role.resign(self.in_vain)
        self._in_vain, self._back = in_vain if role is None else role.in_vain, time.monotonic()
        self.leave: Callable[[], Awaitable[None]] | None = None
        """Done before room is made, where there is something to do."""
        self._there: Collection[Age] = ()
        """The other gateways, when they were last looked for."""
        self.stays = message.STARTING
        """Why this one makes no room for a newer one; '' where it does."""
        self.waits_for = ""
        """What is waited for, in words; empty where nothing is."""

    async def begin(self, *, asks: bool = True) -> bool:
        """Wait for the lock, and for the end of others beside us; True as soon as an older gateway, if one ``asks``, would make room.

        Without the lock nothing is given away: two tables in force would give a GPU twice, and what can't be written can't be moved.
        Who stands by in a pair waits for nothing yet.
        """
        if self._role is not None and not self._role.first:
            return True
        began = time.monotonic()
        while (hindered := self._hindered()) is not None:
            reason, advice = hindered
            if asks and not await self._ask(ready=False):
                break
            self._tell(reason, advice)
            await asyncio.sleep(AGAIN)
        if hindered is None and time.monotonic() - began >= SERVED:
            self._in_vain = 0
        self.waits_for = ""
        await self._scribe.load(patient=True, follows=True)  # What one before us left meanwhile.
        return hindered is not None

    async def succeed(self, not_ready: Callable[[], str]) -> None:
        """Have the older gateway make room as soon as this one is ready; return when the lock is ours, and read what that one left.

        Args:
            not_ready: says why this one could not serve yet; '' where it could.
        """
        if self._role is not None and not self._role.first:
            await self._stand_by(self._role)
        loop, until = asyncio.get_running_loop(), 0.0
        while self._hindered() is not None:
            if loop.time() >= until:
                if any(one > self._age for one in self._there):  # It came first: the kubelet mustn't call this one.
                    self._make_room()
                reason = not_ready() or await self._ask(ready=True)
                self._tell(
                    f"the older gateway on this node goes on until this one can serve: {reason}" if reason else ""
                )
                until = loop.time() + (AGAIN if reason else MAKES_ROOM)
            await asyncio.sleep(min(SOON if not self.waits_for else AGAIN, max(until - loop.time(), 0.0)))
        self.waits_for = ""
        await self._scribe.load(patient=True, follows=True)

    async def _stand_by(self, role: PairMember) -> None:
        """Wait until the other gateway of the pair has died; mostly return with the lock."""
        self.waits_for = STANDS_BY
        notify.tell(notify.READY)
        _log.info("standing by")
        await role.turn()
        await self._scribe.load(follows=True)  # What it had open ends some milliseconds later.
        while not role.serves and self._hindered() is not None:  # noqa: ASYNC110 - who dies tells nobody
            await asyncio.sleep(AT_ONCE)

    def serves(self, *, host_service: bool) -> None:
        """Make room for newer ones from now on, unless this is the host service."""
        self.stays = message.HOST_SERVICE if host_service else ""
        self._back = time.monotonic()

    async def keep(self) -> None:
        """Keep the lock where others look for it, for ever: who empties the state directory lets them lock another file of that name.

        Where somebody has by now, two decide: this one begins anew, and waits.
        """
        while True:
            await asyncio.sleep(KEEPS)
            if self._is_there():
                continue
            before, self._lock = self._lock, -1
            try:
                alone = self._locked()
            except OSError:  # It is tried again.
                self._lock = before
                continue
            os.close(before)
            _log.warning(
                "the lock in the state directory was removed", path=str(self._state_dir / LOCK), made_anew=alone
            )
            if not alone:
                self._make_room()

    def _is_there(self) -> bool:
        """Whether the lock has its name still."""
        try:
            return os.path.samestat(os.fstat(self._lock), (self._state_dir / LOCK).lstat())
        except OSError:
            return False

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Who meets which order over the control socket."""
        return {message.RESIGN: self._resign}

    @property
    def in_vain(self) -> int:
        """How often it has made room in vain, should it do so now and come back."""
        return 1 if time.monotonic() - self._back > FORGETS else self._in_vain + 1

    def decider(self) -> str:
        """Give the token of the gateway that decides, or did last; '' where this one does, or nobody knows."""
        said = ""
        with contextlib.suppress(OSError, NotPlainError, ValueError):
            said = read_plain(self._state_dir / LOCK, 8).decode() if self._lock < 0 else ""
        return said if TOKEN.fullmatch(said) else ""

    def close(self) -> None:
        """Let another one in."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._role is not None:
            self._role.over()

    async def _ask(self, *, ready: bool) -> str:
        """Ask the newest of those that are older whether it makes room, or to do so now; say why it does not."""
        older = max((one for one in self._there if one < self._age), default=None)
        if older is None:
            return "no older gateway is there to be asked"
        asked = {"op": message.RESIGN, "ready": ready, "from": {"born_ns": self._age.born_ns, "token": self._age.token}}
        try:
            await control.ask(control.socket_path(self._state_dir, older.token), asked, ASK_TIME)
        except ControlError as error:
            return str(error)
        if ready:
            _log.info("the older gateway makes room", peer=older.token)
        return ""

    def _tell(self, reason: str, advice: str = _ADVICE) -> None:
        if reason and self.waits_for != reason:
            _log.warning("waiting to be alone on this node", reason=reason, advice=advice)
        self.waits_for = reason

    def _holds_back(self) -> str:
        """Say why no room is made yet: one that ends as soon as it serves would take the kubelet's devices away again and again."""
        left = self._back + held_back(self._in_vain) - time.monotonic()
        if left <= 0:
            return ""
        often = "once" if self._in_vain == 1 else f"{self._in_vain} times"
        return f"it made room {often} for one that ended again, and does so next in {left:.0f} s: see why it ended"

    def _hindered(self) -> tuple[str, str] | None:
        """Say what is in the way, and what to do about it; None: nothing is, and the lock is held."""
        try:
            self._there = self._others()
        except OSError as error:
            return f"it can't be known whether another gateway lives: {error.strerror}", _TOO_MANY
        if self._there and not self._shares:
            return _ANOTHER, _ADVICE
        try:
            return None if self._locked() else (_ANOTHER, _ADVICE)
        except OSError as error:
            path = self._state_dir / LOCK
            return (
                f"the state directory: {path} can't be locked ({error.strerror}), and without that no GPU is given away",
                _WRITABLE,
            )

    def _locked(self) -> bool:
        if self._lock < 0:
            self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = file.hold(self._state_dir / LOCK)
            if self._lock >= 0:
                with contextlib.suppress(OSError):  # A full disk: nobody can pass on to us what only we answer.
                    os.pwrite(self._lock, self._age.token.encode(), 0)
        return self._lock >= 0

    async def _resign(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        """Say whether this one makes room for a newer one; and do so where that one is ready."""
        if token := await message.makes_room(self._age, self.stays or self._holds_back(), connection, request):
            if self.leave is not None:
                await self.leave()
            _log.info("making room for a newer gateway", peer=token)
            self._make_room()


def held_back(in_vain: int) -> float:
    """Say for how many seconds no room is made by one that made it so often in vain, in a row."""
    return min(HOLDS_BACK * 2.0 ** (min(in_vain, 32) - 1), HOLDS_BACK_MAX) if in_vain else 0.0
