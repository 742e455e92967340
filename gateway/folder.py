"""Watch the kubelet's socket directory: a kubelet starts, our socket names are deleted, the directory is replaced.

inotify reports changes at once. A slow poll finds what inotify missed; without inotify a faster poll finds everything.

A kubelet binds its socket before it listens, and inotify reports it in between. A refused first connection would cost gRPC's
back-off of one second. So a plain socket tries every millisecond, and the kubelet is reported once it listens. A kubelet.sock
without a listener (a stopped kubelet leaves it behind) is tried less and less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

import structlog

from devices import inotify
from gateway.kubelet.identity import KUBELET_SOCKET, folder_id, is_deleted, kubelet_id
from gateway.leader import instance
from gateway.registration import events
from gateway.registration.events import Phase
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from pathlib import Path

    from gateway.configuration.settings import Settings
    from gateway.kubelet.identity import KubeletId
    from gateway.leader.instance import Instance
    from gateway.leader.leadership import Leadership
    from gateway.memory.holdings import Holdings
    from gateway.registration.registrar import Resource
    from gateway.tally import Tally
    from gateway.tasks import Tasks

FOLDER_AGAIN, FOLDER_TOLD = 0.5, 60.0
"""Seconds between two tries of an unusable socket directory, and between two log lines about it."""
REBIND_FIRST, REBIND_MAX = 0.05, 5.0
"""Seconds until an unusable new socket directory is tried again, at first and at most."""
EXIT_PINNED = 75
"""Exit status (EX_TEMPFAIL) if the socket directory was replaced, but the mount still shows the old one. A restart helps."""
POLL = 5.0
"""Seconds between two polls while inotify works."""
POLL_WITHOUT_INOTIFY = 0.25
_TRY_AGAIN, _LISTEN_WITHIN = 0.001, 2.0
"""Seconds between two tries of a new socket, and for how long it is tried that often."""
_MASK = (
    inotify.CREATE | inotify.MOVED_TO | inotify.DELETE | inotify.MOVED_FROM | inotify.DELETE_SELF | inotify.MOVE_SELF
)
_log = structlog.get_logger()


class Folder:
    """The socket directory of one gateway; ``lock`` is held while sockets or lists change."""

    def __init__(
        self,
        settings: Settings,
        own: Instance,
        lead: Leadership,
        holdings: Holdings,
        resources: Mapping[str, Resource],
        lock: asyncio.Lock,
        tally: Tally,
        tasks: Tasks,
    ) -> None:
        self._settings, self._instance, self._lead, self._holdings = settings, own, lead, holdings
        self._resources, self._lock, self._tally, self._tasks = resources, lock, tally, tasks
        self._presence = holdings.presence
        self._folder = settings.socket_dir
        self._rebinding: asyncio.Task[None] | None = None
        self._inotify: inotify.INotify | None = None
        self._watched: dict[int, Path] = {}
        self._refused: set[Path] = set()
        self._folder_id: tuple[int, int, bool] | None = None
        self._names = frozenset[str]()
        self._seen: KubeletId | None = None
        self._created = True
        """True if a kubelet.sock may have been created after the last one that was seen."""
        self._timer: asyncio.TimerHandle | None = None
        self._wait, self._urgent_until = 0.0, 0.0

    async def wait(self, hindered: Callable[[], Awaitable[None]]) -> None:
        """Wait until the directory can be used. Log why it can't, and call ``hindered`` after each try."""
        folder, tell_at = self._settings.socket_dir, 0.0
        while reason := instance.make_folder(folder):
            self._lead.waits_for_folder = f"the socket directory: {reason}"
            await hindered()
            if (now := time.monotonic()) >= tell_at:
                _log.warning("waiting for the socket directory", folder=str(folder), reason=reason)
                tell_at = now + FOLDER_TOLD
            await asyncio.sleep(FOLDER_AGAIN)
        self._lead.waits_for_folder = ""

    async def run(self) -> None:
        """Watch the directory. Never returns."""
        self._folder_id, self._names = folder_id(self._folder), self._there()
        try:
            self._open_inotify()
            self.look_now()
            await asyncio.get_running_loop().create_future()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._inotify is not None:
                asyncio.get_running_loop().remove_reader(self._inotify.fileno())
                self._inotify.close()

    # What it shows.

    def _kubelet_started(self, kubelet: KubeletId) -> None:
        """Register each resource with a new kubelet."""
        self._presence.kubelet = kubelet
        self._presence.found(anew=True)
        if self._lead.begun:
            for resource in self._resources.values() if self._lead.leads and self._settings.dra != "only" else ():
                resource.approach(kubelet)
            for resource in self._resources.values():
                resource.feed(events.KubeletUp(kubelet))
        self._holdings.kubelet_started(kubelet)
        _log.info("kubelet found", socket=str(self._presence.socket))

    def _name_lost(self, name: str) -> None:
        if name.startswith(self._instance.token):  # The kubelet's own files don't matter.
            for resource in self._resources.values():
                resource.feed(events.NameLost(name))
        elif name == instance.FOLDER:
            _log.warning("the gateways' folder was removed: binding anew", folder=str(self._settings.socket_dir / name))
            self._bind_again()
        elif name == KUBELET_SOCKET:
            self._presence.check()

    def _replaced(self) -> None:
        if is_deleted(self._settings.socket_dir):
            _log.error(
                "the socket directory was replaced, and this mount still shows the deleted one",
                folder=str(self._settings.socket_dir),
                advice="the container must be restarted to see the new one; mount its parent to avoid this",
            )
            self._tasks.end(EXIT_PINNED)
            return
        _log.warning("the socket directory was replaced: binding anew", folder=str(self._settings.socket_dir))
        self._bind_again()

    def _bind_again(self) -> None:
        if self._rebinding is not None:
            self._rebinding.cancel()
        self._rebinding = self._tasks.start(self._rebind())

    async def _rebind(self) -> None:
        """Bind all servers in the new directory. Streams of the earlier kubelet go on until the next kubelet registers."""
        wait = REBIND_FIRST
        while not await self._bind_anew(told=wait > REBIND_FIRST):
            await asyncio.sleep(wait)
            wait = min(wait * 2, REBIND_MAX)
        self.look_now()
        if (kubelet := self._presence.kubelet) is not None:
            for resource in self._resources.values():
                if resource.state.phase is Phase.ABSENT:
                    resource.feed(events.KubeletUp(kubelet))

    async def _bind_anew(self, *, told: bool) -> bool:
        async with self._lock:
            self._instance.remove()
            try:
                self._instance.create()
                for resource in self._resources.values() if self._settings.dra != "only" else ():
                    await resource.bind()
            except (OSError, RuntimeError) as error:
                # It was deleted again, or this process has no file descriptor left.
                if not told:
                    _log.warning("the new socket directory can't be used yet", reason=str(error))
                return False
        return True

    # Watching.

    def look_now(self) -> None:
        """Look at once, because a file was created. To wake a task for it would take 0.1 ms."""
        self._urgent_until = asyncio.get_running_loop().time() + _LISTEN_WITHIN
        self._look()

    def _on_time(self, due: float) -> None:
        now = asyncio.get_running_loop().time()
        self._tally.late(now - due, now)
        if self._wait >= POLL_WITHOUT_INOTIFY:
            self._look_at_names()
        self._look()

    def _look(self) -> None:
        """Look for a new kubelet, and schedule the next look, also if a callback fails."""
        loop = asyncio.get_running_loop()
        wait = self._poll
        try:
            self._check_folder()
            wait = self._look_for_kubelet(loop.time())
        finally:
            if self._timer is not None:
                self._timer.cancel()
            due, self._wait = loop.time() + wait, wait
            self._timer = loop.call_at(due, self._on_time, due)

    def _look_for_kubelet(self, now: float) -> float:
        """Report a new kubelet that accepts connections; return the seconds until the next look."""
        path = self._folder / KUBELET_SOCKET
        found = kubelet_id(path)
        if found is None or found == self._seen or self._touched(found):
            self._created = self._created and found != self._seen
            return self._poll
        if listens(path) and kubelet_id(path) == found:
            self._kubelet_started(found)
            self._seen, self._created = found, False
            return self._poll
        return _TRY_AGAIN if now < self._urgent_until else min(max(0.05, self._wait * 2), self._poll)

    def _touched(self, found: KubeletId) -> bool:
        """Return True if this is the last seen socket with other times. inotify would have reported a new one."""
        seen = self._seen
        if seen is None or self._created or self._folder not in self._watched.values():
            return False
        return (found.device, found.inode) == (seen.device, seen.inode)

    @property
    def _poll(self) -> float:
        return POLL if self._folder in self._watched.values() else POLL_WITHOUT_INOTIFY

    def _own_names(self) -> Iterable[str]:
        """Return the names whose deletion matters."""
        return KUBELET_SOCKET, instance.FOLDER, *(one.state.name for one in self._resources.values())

    def _there(self) -> frozenset[str]:
        """Return our names that exist. Each is checked by itself, because the folder may have any number of other files."""
        return frozenset(name for name in self._own_names() if os.path.lexists(self._folder / name))

    def _look_at_names(self) -> None:
        """Report names that were deleted without an event."""
        before, self._names = self._names, self._there()
        for name in before - self._names:
            self._name_lost(name)

    def _check_folder(self) -> None:
        found = folder_id(self._folder)
        if found is not None and found != self._folder_id:
            self._folder_id = found
            self._rewatch()
            self._replaced()
        elif found is None:
            self._folder_id = None
        elif self._folder not in self._watched.values():  # An earlier watch may have failed.
            self._add(self._folder, _MASK)

    def _open_inotify(self) -> None:
        try:
            self._inotify = inotify.INotify()
        except OSError as error:
            _log.warning(
                "inotify is not available, polling instead",
                error=str(error),
                every_s=POLL_WITHOUT_INOTIFY,
                advice="Raise fs.inotify.max_user_instances",
            )
            return
        asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._read)
        self._rewatch()

    def _rewatch(self) -> None:
        """Watch the folder and its parent, where a new folder would appear."""
        if self._inotify is None:
            return
        for descriptor in self._watched:
            with contextlib.suppress(OSError):
                self._inotify.rm_watch(descriptor)
        self._watched.clear()
        self._add(self._folder.parent, inotify.CREATE | inotify.MOVED_TO)
        self._add(self._folder, _MASK)

    def _add(self, folder: Path, mask: int) -> None:
        if self._inotify is None or not folder.is_dir():
            return
        try:
            self._watched[self._inotify.add_watch(folder, mask | inotify.ONLYDIR)] = folder
        except OSError as error:
            if folder not in self._refused:
                _log.warning("cannot watch a folder, polling it", folder=str(folder), error=str(error))
            self._refused.add(folder)
        else:
            self._refused.discard(folder)

    def _read(self) -> None:
        if self._inotify is None:
            return
        came = False
        for event in self._inotify.read():
            folder = self._watched.get(event.wd)
            if event.mask & inotify.IGNORED:
                self._watched.pop(event.wd, None)
            if folder == self._folder and event.mask & (inotify.DELETE | inotify.MOVED_FROM):
                self._name_lost(event.name)
                self._created |= event.name == KUBELET_SOCKET and bool(event.mask & inotify.DELETE)
            elif event.name in {"", KUBELET_SOCKET, self._folder.name}:
                came = True
                # A socket that was moved away may come back; a deleted one can't.
                self._created |= folder != self._folder or not event.mask & inotify.MOVED_TO
        if came:
            self.look_now()
