"""One bridged resource: which plugin serves it, and what that plugin said last.

``shield`` decides what is announced while the plugin is away. This module reads the streams and tries the connection again. The calls go through in ``calls``.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import structlog
from msgspec.structs import replace

from adapters.registry import DIALECTS, by_name
from devices.model import ContainerAnswer
from gateway.bridge import judge, shield
from gateway.bridge.peer import AwayError, Peer
from gateway.kubelet.watch import socket_id
from gateway.tasks import Background
from gateway.wires.log import Seldom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from adapters.dialect import Dialect
    from devices.model import Device, Options
    from gateway.bridge import memory
    from gateway.bridge.memory import Api, DeviceRow, PluginFolder
    from gateway.bridge.pace import ListPace
    from gateway.bridge.shield import Limits, Word
    from gateway.kubelet.watch import SocketId

EMPTY_PATIENCE: Final = 1.0
"""Seconds that an empty list after another one is held back: a plugin that stops may send one before it ends its stream."""
CALL_TIME: Final = 1.0
"""Seconds to connect to a plugin by its old name."""
REDIAL_FIRST, REDIAL_MAX = 3.0, 30.0
"""Seconds until a plugin whose stream ended, and that didn't register, is called again by its old name, at first and at most."""
OLD_STREAMS: Final = 3
"""Earlier registrations whose streams are left open."""
KEPT: Final = ".kept-"
"""What the second name of a plugin's socket begins with."""
FIRST_LIST: Final = 2.0
"""Seconds that calls wait for the first list of a plugin that came back; one that says nothing for so long has what it had."""
PROBE_EVERY: Final = 5.0
"""Seconds between two tries of a plugin that left a call unanswered."""
DEADLINE: Final = 30.0
"""Seconds for one Allocate, unless an operator says otherwise."""

_log = structlog.get_logger()


class Bridged:
    """One resource of a plugin.

    Args:
        resource: the name that the plugin registered.
        changed: called when there is something new to announce, or to remember.
        limits: how long it may be away.
        beside: the plugins of the bridge, this one included.
        pace: that of their lists.
    """

    def __init__(
        self,
        resource: str,
        changed: Callable[[], None],
        limits: Limits,
        beside: Callable[[], Iterable[Bridged]],
        pace: ListPace,
    ) -> None:
        self.resource, self._changed, self.limits = resource, changed, limits
        self._beside, self._pace = beside, pace
        self.word: Word = shield.Word()
        self.rows: tuple[object, tuple[DeviceRow, ...]] = (), ()  # A list's devices, and what is written of them.
        self.peer: Peer | None = None  # The registration that calls go to; None while the plugin is away.
        self.path: Path | None = None  # Where it was served last.
        self.registered_on: SocketId | None = None
        """The socket that it named itself, in its last Register. One that was bound since may be another plugin's."""
        self.folder: PluginFolder = "device-plugins"
        self.api: Api = DIALECTS[0].name
        self.deadline = DEADLINE
        """Seconds for one Allocate."""
        self.repeats = False
        """Whether an Allocate may be answered from an identical earlier answer while the plugin is away."""
        self.answers: OrderedDict[frozenset[str], ContainerAnswer] = OrderedDict()
        self.trouble = ""
        """What was wrong with what it said last; empty where nothing was."""
        self.registrations = self.returns = self.absences = self.repeated = 0
        self.since = time.monotonic()
        """When it came or went last (monotonic seconds)."""
        self._turn = asyncio.Lock()
        """One Allocate at a time."""
        self._back = asyncio.Event()
        self._heard = asyncio.Event()
        """Unset while a plugin is back, and has not said yet which devices it has."""
        self._heard.set()
        self._emptied: asyncio.TimerHandle | None = None
        self._old: list[Peer] = []
        self._hung: Peer | None = None
        """A registration that left a call unanswered; its stream is open all the same."""
        self._recovery: asyncio.Future[None] | None = None
        """Tries to have the plugin back."""
        self._log = _log.bind(resource=resource)
        self._tasks = Background(self._log)
        self._seldom = Seldom(times=20)
        self._last = b""
        """The digest of the last message, of whichever registration."""

    def registration(self, path: Path, dialect: Dialect, options: Options) -> Peer:
        """Make what a registration of the resource is served by."""
        return Peer(path, dialect, options, partial(judge.placed, self.resource))

    # What it says.

    def follow(self, peer: Peer, *, called: bool = False) -> None:
        """Go by a Register, or by a plugin that was ``called``. The stream before is left open as long as the plugin wants."""
        if not called:
            self.registered_on = peer.identity
        self._stop_recovery()
        if self._emptied is not None and self.peer is not None and self.peer.identity != peer.identity:
            self._cancel_emptied()  # It was the other one's farewell.
            self._last = b""
        self._old += [one for one in (self.peer, self._hung) if one is not None and not one.ended.is_set()]
        self.peer, self._hung = peer, None
        while len(self._old) > OLD_STREAMS:
            self._tasks.background(self._old.pop(0).leave())
        self.path, self.api = peer.path, peer.dialect.name
        self.word = replace(self.word, options=peer.options)  # Its list may be the one of before, which is dropped.
        self._changed()
        self.registrations += 1
        if self.word.away_since is not None:
            self._heard.clear()
        self._back.set()
        self._tasks.background(self._read(peer))

    async def _read(self, peer: Peer) -> None:
        try:
            why = await peer.follow(self)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it is not served as if nothing were
            self._log.exception("a plugin's lists can't be followed because of a defect in the gateway")
            why = repr(error)
        if peer in self._old:
            self._old.remove(peer)
        if peer is self._hung:
            self._hung = None
        if peer is self.peer:
            self.went(why)
        await peer.leave()

    def others(self) -> int:
        """How many devices other plugins have."""
        return sum(len(one.word.devices or ()) for one in self._beside() if one is not self)

    def rests(self) -> float:
        """Seconds until its next list may be read; not above 0 where that is now."""
        return self._pace.rests(self.resource, time.monotonic())

    def spent(self, seconds: float) -> None:
        """Take note of what a list took of a processor's time."""
        self._pace.spent(self.resource, seconds, time.monotonic())

    def is_old(self, peer: Peer, data: bytes) -> bool:
        """Whether it says what was said last, as some plugins do again and again, or comes from a server that was replaced."""
        if peer is self._hung:
            self._woke(peer)
        if peer is not self.peer and (self.peer is None or peer.identity != self.peer.identity):
            return True
        before, self._last = self._last, blake2b(data, digest_size=16).digest()
        return self._last == before and self.word.away_since is None

    def listed(self, devices: tuple[Device, ...]) -> None:
        """Take a list, from the present registration or from an earlier one of the same server."""
        self._cancel_emptied()
        if not devices and self.word.devices:
            self._emptied = asyncio.get_running_loop().call_later(EMPTY_PATIENCE, self._take, devices)
        else:
            self._take(devices)

    def _take(self, devices: tuple[Device, ...]) -> None:
        self._emptied = None
        self._heard.set()
        self.trouble, now, away = "", time.monotonic(), self.word.away_since
        self.word = shield.came(self.word, devices, self.limits, now)
        if away is not None:
            self.returns, self.since = self.returns + 1, now
            if (more := self._seldom.tell("there")) is not None:
                away_s = round(now - away, 1)
                self._log.info(
                    "the plugin is there", endpoint=self.endpoint, api=self.api, away_s=away_s, more_before=more
                )
        self._changed()

    def spoilt(self, peer: Peer, reason: str) -> None:
        """Say that a list can't be taken; what it said before stays. Said again, it may fit: others may have fewer devices by then."""
        told, self.trouble, self._last = self.trouble, f"a list was refused, and the last one stays: {reason}", b""
        self._heard.set()
        if self.trouble != told and (more := self._seldom.tell("spoilt")) is not None:
            self._log.error("a plugin's list is refused", endpoint=peer.path.name, reason=reason, more_before=more)

    def keep(self) -> Path | None:
        """Give the socket of a plugin that lives a second name, and go by that: its own is about to be removed. None: there is none.

        Some plugins register once: without it nobody who comes later could call them.
        """
        if self.path is None or self.peer is None or socket_id(self.path) != self.peer.identity:
            return None
        kept = self.path.with_name(KEPT + self.endpoint)
        if judge.endpoint_error(kept.name, str(kept.parent)):
            return None
        if kept != self.path:
            try:
                kept.unlink(missing_ok=True)
                kept.hardlink_to(self.path)
            except OSError:  # As with a kubelet, the plugin must register again.
                return None
            self.path = kept
            self._changed()
        return kept

    def recall(self, word: Word, path: Path, row: memory.Plugin) -> None:
        """Take over what was remembered of it."""
        self.word, self.path, self.folder, self.api, self.registered_on = word, path, row.folder, row.api, row.socket
        self.answers = OrderedDict((frozenset(each.devices), each.given) for each in row.answers)
        self.trouble = ""

    @property
    def endpoint(self) -> str:
        """The name of its socket."""
        return self.path.name.removeprefix(KEPT) if self.path is not None else ""

    # That it is away, and what brings it back.

    def went(self, why: str, hung: Peer | None = None) -> None:
        """The plugin is away: shield its devices, and try to have it back."""
        self._cancel_emptied()
        self._heard.set()
        self.peer, self._hung = None, hung
        now = time.monotonic()
        if self.word.away_since is None:
            self.absences, self.since = self.absences + 1, now
        self.word = shield.went(self.word, why, now)
        if (more := self._seldom.tell("away")) is not None:
            grace = self.limits.grace
            self._log.warning("the plugin is away", endpoint=self.endpoint, reason=why, grace_s=grace, more_before=more)
        self._changed()
        self._stop_recovery()
        self._recovery = self._tasks.start(self._recover())

    def _woke(self, peer: Peer) -> None:
        """One that hung answers again: its registration holds, and so does its last list."""
        self._stop_recovery()
        self.peer, self._hung = peer, None
        self._back.set()
        if self.word.devices is not None:
            self._take(self.word.devices)

    def _stop_recovery(self) -> None:
        if self._recovery is not None and self._recovery is not asyncio.current_task():
            self._recovery.cancel()
        self._recovery = None

    def _cancel_emptied(self) -> None:
        if self._emptied is not None:
            self._emptied.cancel()
            self._emptied = None

    async def _recover(self) -> None:
        """Try one that hangs, and call one that went by its old name, ever more rarely.

        Kubelets never do the latter, and some plugins never register twice.
        """
        while (hung := self._hung) is not None:
            await asyncio.sleep(PROBE_EVERY)
            if await hung.answers() and hung is self._hung:
                self._woke(hung)
                return
        wait = REDIAL_FIRST
        await asyncio.sleep(wait)
        while not await self.call():
            wait = min(2 * wait, REDIAL_MAX)
            await asyncio.sleep(wait)

    async def call(self) -> bool:
        """Call the plugin by the name of the socket that it registered last; False where it isn't there.

        One that was given another resource name binds its old socket, and would be taken for both.
        """
        path = _there(self.path, KEPT + self.endpoint)
        if path is None:
            return False
        peer = self.registration(path, by_name(self.api), self.word.options)
        try:
            await peer.dial(CALL_TIME)
            await peer.ask_options()
        except (AwayError, asyncio.CancelledError) as error:
            await peer.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            return False
        if any(one.serves_on(peer.identity) for one in self._beside() if one is not self):
            await peer.close()
            return False
        self.follow(peer, called=True)
        return True

    def give_way(self, why: str) -> None:
        """Let go of a plugin that was called by an old name and turned out to be another one."""
        peer = self.peer
        self.went(why)
        if peer is not None:
            self._tasks.background(peer.close())

    def serves_on(self, socket: SocketId | None) -> bool:
        """Whether it is this plugin that is behind a socket."""
        return socket is not None and socket in {self.registered_on, self.peer.identity if self.peer else None}

    async def close(self) -> None:
        """Let go of the plugin. It may be called again."""
        await self._tasks.close()
        self._cancel_emptied()
        peers = (*self._old, self.peer, self._hung)
        self.peer, self._hung, self._old = None, None, []  # First: a call that is open finds nobody to go.
        for peer in peers:
            if peer is not None:
                await peer.close()


def _there(path: Path | None, kept: str) -> Path | None:
    """Find a plugin's socket. A gateway that was killed while it opened its socket may not have written down that it gave it another name."""
    names = () if path is None else (path, path.with_name(kept))
    return next((one for one in names if socket_id(one) is not None), None)
