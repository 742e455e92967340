"""One bridged resource: the plugin that serves it, and its last list.

``shield`` decides which devices are announced while the plugin is away. This module reads its streams, reconnects, and passes calls on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from msgspec.structs import replace

from adapters.dialect import MalformedError
from adapters.registry import DIALECTS, by_name
from adapters.spelling import require_bounded
from devices.model import Fault, RefusedError
from gateway.bridge import judge, memory, shield
from gateway.bridge.peer import MAX_LIST_BYTES, PRE_START_S, AwayError, ListPace, Peer
from gateway.kubelet.identity import socket_id
from gateway.tasks import Background
from gateway.wires import rpc
from gateway.wires.log import Seldom

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from devices.model import ContainerAnswer, ContainerRequest, Device, PreferredRequest
    from gateway.bridge.memory import Api, PluginFolder
    from gateway.bridge.shield import Word
    from gateway.kubelet.identity import SocketId

EMPTY_LIST_WAIT_S: Final = 1.0
"""Seconds for which an empty list is held back: a plugin that stops may send one before it ends its stream."""
RECONNECT_S: Final = 1.0
"""Seconds to connect to a plugin by its old socket name."""
REDIAL_S, REDIAL_MAX_S = 3.0, 30.0
"""Seconds until the gateway tries to reconnect to a plugin by its old socket name: at first, and at most."""
MAX_OLD_STREAMS: Final = 3
"""Most earlier registrations of a plugin whose streams stay open."""
KEPT_PREFIX: Final = ".kept-"
"""Prefix of the second name that the gateway gives to a plugin's socket."""
FIRST_LIST_S: Final = 2.0
"""Seconds that calls wait for the first list of a returned plugin. After that, its earlier list is used."""
PROBE_PERIOD_S: Final = 5.0
"""Seconds between two checks of a plugin that hangs."""
ALLOCATE_S: Final = 30.0
"""Seconds for one Allocate, if an operator sets no other limit."""
MAX_ANSWERS: Final = 256
"""Most answers of a resource that are remembered, if an operator wants them repeated."""

_log = structlog.get_logger()


class Bridged:
    """One resource of a plugin.

    Args:
        resource: the name that the plugin registered.
        changed: called when there is something new to announce, or to write.
        beside: returns all plugins of the bridge.
        pace: limits the CPU time for lists.
    """

    def __init__(
        self,
        resource: str,
        changed: Callable[[], None],
        beside: Callable[[], Iterable[Bridged]],
        pace: ListPace,
    ) -> None:
        self.resource, self._changed, self.limits = resource, changed, shield.Limits()
        self._beside, self._pace = beside, pace
        self.word: Word = shield.Word()
        self.peer: Peer | None = None  # The registration that gets the calls; None while the plugin is away.
        self.path: Path | None = None  # Its last socket.
        self.registered_on: SocketId | None = None
        """The socket of its last Register. A socket that was bound under this name since then may be another plugin's."""
        self.folder: PluginFolder = "device-plugins"
        self.api: Api = DIALECTS[0].name
        self.deadline = ALLOCATE_S
        """Seconds for one Allocate."""
        self.repeats = False
        """True if an earlier answer may be repeated for the same devices while the plugin is away."""
        self.answers: OrderedDict[frozenset[str], ContainerAnswer] = OrderedDict()
        self.trouble = ""
        """What was wrong with its last list; empty if nothing was."""
        self.registrations = self.absences = self.repeated = 0
        self.since = time.monotonic()
        """When it last came or went (monotonic seconds)."""
        self._turn = asyncio.Lock()
        """Held during an Allocate: one at a time."""
        self._back = asyncio.Event()
        self._heard = asyncio.Event()
        """Not set from a plugin's return until its first list."""
        self._heard.set()
        self._emptied: asyncio.TimerHandle | None = None
        self._old: list[Peer] = []
        self._hung: Peer | None = None
        """A registration that left a call unanswered. Its stream is still open."""
        self._recovery: asyncio.Future[None] | None = None
        """The task that reconnects to the plugin."""
        self._log = _log.bind(resource=resource)
        self._tasks = Background(self._log)
        self._seldom = Seldom(times=20)
        self._last = b""
        """The digest of the last message of any registration."""

    # Its lists.

    def follow(self, peer: Peer, *, called: bool = False) -> None:
        """Use a new registration: from a Register, or (``called``) from our reconnection. The earlier stream stays until the plugin ends it."""
        if not called:
            self.registered_on = peer.identity
        self._stop_recovery()
        if self._emptied is not None and self.peer is not None and self.peer.identity != peer.identity:
            self._cancel_emptied()  # The empty list came from the earlier server.
            self._last = b""
        self._old += [one for one in (self.peer, self._hung) if one is not None and not one.ended.is_set()]
        self.peer, self._hung = peer, None
        while len(self._old) > MAX_OLD_STREAMS:
            self._tasks.background(self._old.pop(0).leave())
        self.path, self.api = peer.path, peer.dialect.name
        self.word = replace(
            self.word, options=peer.options
        )  # Here, because a list that equals the last one is skipped.
        self._changed()
        self.registrations += 1
        if self.word.away_since is not None:
            self._heard.clear()
        self._back.set()
        self._tasks.background(self._read(peer))

    async def _read(self, peer: Peer) -> None:
        why = "it ended its stream"
        try:
            async with contextlib.aclosing(peer.lists(self._rests)) as lists:
                async for data in lists:
                    began = time.thread_time()
                    self._hear(peer, data)
                    self._pace.spent(self.resource, time.thread_time() - began, time.monotonic())
        except rpc.ClosedError:
            why = "the connection is closed"
        except rpc.CallError as error:
            if error.code is rpc.Code.RESOURCE_EXHAUSTED:
                self._spoil(peer, f"the list is too long. Allowed: {MAX_LIST_BYTES} bytes. {error.details[:200]}")
            why = f"its stream broke: {error.code.name} {error.details[:200]}".rstrip()
        except Exception as error:  # noqa: BLE001 - whatever failed, the plugin's lists are no longer read
            self._log.exception("a plugin's lists can't be followed because of a defect in the gateway")
            why = repr(error)
        if peer in self._old:
            self._old.remove(peer)
        if peer is self._hung:
            self._hung = None
        if peer is self.peer:
            self.went(why)
        await peer.leave()

    def _rests(self) -> float:
        """Return the seconds until its next list may be read; 0 or less: now."""
        return self._pace.rests(self.resource, time.monotonic())

    def _hear(self, peer: Peer, data: bytes) -> None:
        """Take a list of the current registration, or of an earlier one of the same server, unless it is refused."""
        if self._is_old(peer, data):
            return
        try:
            require_bounded(data)
            devices = tuple(judge.placed(self.resource, one) for one in peer.dialect.decode_list(data))
        except MalformedError as error:
            self._spoil(peer, str(error))
            return
        others = sum(len(one.word.devices or ()) for one in self._beside() if one is not self)
        if problem := judge.list_error(devices, others):
            self._spoil(peer, problem)
            return
        self._cancel_emptied()
        if not devices and self.word.devices:
            self._emptied = asyncio.get_running_loop().call_later(EMPTY_LIST_WAIT_S, self._take, devices)
        else:
            self._take(devices)

    def _is_old(self, peer: Peer, data: bytes) -> bool:
        """Return True if the message equals the last one (some plugins repeat their list), or comes from a replaced server."""
        if peer is self._hung:
            self._woke(peer)
        if peer is not self.peer and (self.peer is None or peer.identity != self.peer.identity):
            return True
        before, self._last = self._last, blake2b(data, digest_size=16).digest()
        return self._last == before and self.word.away_since is None

    def _take(self, devices: tuple[Device, ...]) -> None:
        self._emptied = None
        self._heard.set()
        self.trouble, now, away = "", time.monotonic(), self.word.away_since
        self.word = shield.came(self.word, devices, self.limits, now)
        if away is not None:
            self.since = now
            if (more := self._seldom.tell("there")) is not None:
                away_s = round(now - away, 1)
                self._log.info(
                    "the plugin is there", endpoint=self.endpoint, api=self.api, away_s=away_s, more_before=more
                )
        self._changed()

    def _spoil(self, peer: Peer, reason: str) -> None:
        """Report a refused list; the last one stays. If the plugin sends it again, it is checked again: other plugins may have fewer devices."""
        told, self.trouble, self._last = self.trouble, f"a list was refused, and the last one stays: {reason}", b""
        self._heard.set()
        if self.trouble != told and (more := self._seldom.tell("spoilt")) is not None:
            self._log.error("a plugin's list is refused", endpoint=peer.path.name, reason=reason, more_before=more)

    def keep(self) -> Path | None:
        """Give the socket of a running plugin a second name, because its first name is about to be removed. Return it; None on failure.

        Some plugins register only once. Without the second name, a later gateway could not connect to them.
        """
        if self.path is None or self.peer is None or socket_id(self.path) != self.peer.identity:
            return None
        kept = self.path.with_name(KEPT_PREFIX + self.endpoint)
        if judge.endpoint_error(kept.name, str(kept.parent)):
            return None
        if kept != self.path:
            try:
                kept.unlink(missing_ok=True)
                kept.hardlink_to(self.path)
            except OSError:  # The plugin must register again, as with a kubelet.
                return None
            self.path = kept
            self._changed()
        return kept

    def recall(self, path: Path, row: memory.Plugin) -> None:
        """Restore the plugin from its row in the file. A plugin that was away is still away, since the same time."""
        # The file has Unix times, the shield monotonic ones.
        since = None if row.away_since is None else time.monotonic() - max(0.0, time.time() - row.away_since)
        self.word = shield.Word(row.devices, row.options, since, "" if since is None else row.why)
        self.path, self.folder, self.api, self.registered_on = path, row.folder, row.api, row.socket
        self.answers = OrderedDict((frozenset(each.devices), each.given) for each in row.answers)
        self.trouble = ""

    def remembered(self) -> memory.Plugin | None:
        """Return the row for the plugins' file; None if the plugin never registered."""
        word = self.word
        if self.path is None:
            return None
        return memory.Plugin(
            resource=self.resource,
            folder=self.folder,
            endpoint=self.path.name,
            api=self.api,
            devices=word.devices,
            options=word.options,
            away_since=None if word.away_since is None else time.time() - (time.monotonic() - word.away_since),
            why=word.why[:4096],
            answers=tuple(memory.EarlierAnswer(tuple(sorted(asked)), given) for asked, given in self.answers.items()),
            socket=self.registered_on,
        )

    @property
    def endpoint(self) -> str:
        """The name of its socket."""
        return self.path.name.removeprefix(KEPT_PREFIX) if self.path is not None else ""

    # Its absence and return.

    def went(self, why: str, hung: Peer | None = None) -> None:
        """Note that the plugin is away: shield its devices, and try to reconnect."""
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
        """Note that a hung plugin answers again. Its registration and its last list are in force again."""
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
        """Check a hung plugin, or reconnect to an absent one by its old socket name, less and less often.

        Kubelets never reconnect, but some plugins never register twice.
        """
        while (hung := self._hung) is not None:
            await asyncio.sleep(PROBE_PERIOD_S)
            if await hung.answers() and hung is self._hung:
                self._woke(hung)
                return
        wait = REDIAL_S
        await asyncio.sleep(wait)
        while not await self.call():
            wait = min(2 * wait, REDIAL_MAX_S)
            await asyncio.sleep(wait)

    async def call(self) -> bool:
        """Connect to the plugin by the socket that it registered last; return False if that fails.

        A plugin that was given another resource name may bind its old socket. It is not used for both resources.
        """
        path = _there(self.path, KEPT_PREFIX + self.endpoint)
        if path is None:
            return False
        peer = Peer(path, by_name(self.api), self.word.options)
        try:
            await peer.dial(RECONNECT_S)
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
        """Drop a connection that was made by an old socket name and leads to another plugin."""
        peer = self.peer
        self.went(why)
        if peer is not None:
            self._tasks.background(peer.close())

    def serves_on(self, socket: SocketId | None) -> bool:
        """Return True if this plugin serves on the socket."""
        return socket is not None and socket in {self.registered_on, self.peer.identity if self.peer else None}

    async def close(self) -> None:
        """Close all connections. The plugin may be connected to again."""
        await self._tasks.close()
        self._cancel_emptied()
        peers = (*self._old, self.peer, self._hung)
        self.peer, self._hung, self._old = None, None, []  # First, so that no new call starts.
        for peer in peers:
            if peer is not None:
                await peer.close()

    # The calls. While the plugin is away, they wait as long as its devices are shielded.

    async def allocate(self, request: ContainerRequest) -> ContainerAnswer:
        """Let the plugin answer. It gets one call at a time, in order, because some plugins search for the one waiting pod.

        Raises:
            RefusedError: the plugin refused, in its words; UNAVAILABLE if it is away for too long, DEADLINE_EXCEEDED if it
                hangs.
        """
        async with self._turn:
            return await self._answered(request)

    async def _answered(self, request: ContainerRequest) -> ContainerAnswer:
        while True:
            peer = self.peer
            if peer is None:
                earlier = self.answers.get(frozenset(request.device_ids)) if self.repeats else None
                if earlier is not None:
                    self.repeated += 1
                    self._log.warning(
                        "the plugin is away: an earlier answer is repeated", devices=len(request.device_ids)
                    )
                    return earlier
                await self._returned(shield.left(self.word, self.limits, time.monotonic()))
                continue
            if not await self._knows(request.device_ids, peer):
                continue
            try:
                answer = await peer.allocate(request, self.deadline)
            except AwayError as error:
                await self._let_down(peer, error)
                continue
            self._note(request, answer)
            return answer

    async def prefer(self, request: PreferredRequest) -> tuple[str, ...]:
        """Let the plugin choose. If it is away or lacks some of the devices, choose the first available ones.

        Raises:
            RefusedError: the plugin refused, in its words.
        """
        if self.peer is not None and self._heard.is_set() and not self._unlisted(request.available):
            try:
                return await self.peer.prefer(request)
            except AwayError as error:
                self._log.warning("the plugin didn't choose: the first available devices are taken", reason=str(error))
        must = request.must_include
        rest = [one for one in request.available if one not in frozenset(must)]
        return (*must, *rest[: max(0, request.size - len(must))])

    async def prepare(self, device_ids: tuple[str, ...]) -> None:
        """Let the plugin prepare devices. The kubelet calls again if that is refused.

        Raises:
            RefusedError: as for ``allocate``.
        """
        if not self.word.options.pre_start_required:
            return
        ends = time.monotonic() + PRE_START_S
        while True:
            if self.peer is None:
                await self._returned(
                    min(shield.left(self.word, self.limits, time.monotonic()), ends - time.monotonic())
                )
                continue
            peer = self.peer
            try:
                await peer.prepare(device_ids, max(0.1, ends - time.monotonic()))
            except AwayError as error:
                await self._let_down(peer, error)
            else:
                return

    async def _knows(self, device_ids: Collection[str], peer: Peer) -> bool:
        """Return True if the plugin may be asked for these devices; False if it ended during the wait.

        A call that waited for the plugin names devices of the earlier list. The plugin may have lost one of them, and an unknown ID
        may crash it.

        Raises:
            RefusedError: the plugin lacks some of the devices.
        """
        if not self._heard.is_set():
            try:
                async with asyncio.timeout(FIRST_LIST_S):
                    await self._heard.wait()
            except TimeoutError:
                self._heard.set()
            if peer is not self.peer:
                return False
        if unlisted := self._unlisted(device_ids):
            raise RefusedError(
                Fault.NOT_FOUND,
                f"the plugin of {self.resource} came back without {min(unlisted)!r}. Look at the plugin's "
                "log. The kubelet has the new list",
            )
        return True

    def _unlisted(self, device_ids: Collection[str]) -> Collection[str]:
        """Return the devices that the plugin doesn't list."""
        listed = {one.id for one in self.word.devices or ()}
        return [one for one in device_ids if one not in listed]

    async def _returned(self, seconds: float) -> None:
        """Wait until the plugin is back.

        Raises:
            RefusedError: it was not back in time.
        """
        self._back.clear()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._back.wait()
        except TimeoutError:  # Don't check the event: another call may have cleared it.
            raise RefusedError(
                Fault.UNAVAILABLE,
                f"the plugin of {self.resource} is away ({self.word.why or 'never heard of'}). Look at "
                f"its pod. With bridge.repeat for {self.resource} this call would get the earlier answer",
            ) from None

    async def _let_down(self, peer: Peer, error: AwayError) -> None:
        """Handle a call without an answer: the connection broke, or the plugin hangs. It returns if the call should be repeated.

        Raises:
            RefusedError: the plugin hangs.
        """
        if error.hangs and await peer.answers():
            raise RefusedError(
                Fault.DEADLINE_EXCEEDED,
                f"the plugin of {self.resource} runs, but {error}: look at its log, or set a longer limit (bridge.deadlines)",
            )
        if peer is not self.peer:  # It has registered again since.
            return
        if not error.hangs:
            self.went(str(error))
            return
        self.went(f"it hangs: {error}", peer)
        if not self.repeats:
            raise RefusedError(
                Fault.DEADLINE_EXCEEDED, f"the plugin of {self.resource} hangs: {error}; look at its pod, or end it"
            )

    def _note(self, request: ContainerRequest, answer: ContainerAnswer) -> None:
        if not self.repeats or len(msgspec.json.encode(answer)) > judge.MAX_REPEATED_BYTES:
            return
        asked = frozenset(request.device_ids)
        before = self.answers.pop(asked, None)
        self.answers[asked] = answer
        while len(self.answers) > MAX_ANSWERS:
            self.answers.popitem(last=False)
        if before != answer:
            self._changed()


def _there(path: Path | None, kept: str) -> Path | None:
    """Return a plugin's socket under its first or second name. A killed gateway may have set the second name without writing it to the file."""
    names = () if path is None else (path, path.with_name(kept))
    return next((one for one in names if socket_id(one) is not None), None)
