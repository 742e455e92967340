"""Watch the socket directory: a kubelet accepts connections, a name of ours is deleted, the folder is replaced.

inotify reports changes at once. A slow poll finds what inotify missed, and a faster one everything if inotify is not available.

A kubelet binds its socket before it listens. inotify fires in between, and a refused first connection costs gRPC's back-off of one
second. So a plain socket tries every millisecond until the kubelet listens, and only then is the kubelet reported. A kubelet.sock
on which no kubelet listens (a stopped kubelet leaves it behind) is tried less and less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from typing import TYPE_CHECKING, TypeAlias

import structlog
from msgspec import Struct

from devices import inotify
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

CHECKPOINT = "kubelet_internal_checkpoint"
"""Its name in the socket directory (kubelet 1.8 and later)."""
KUBELET_SOCKET = "kubelet.sock"
SocketId: TypeAlias = tuple[int, int, int]
"""The device, the inode and the time of making (ns) of a socket."""
POLL = 5.0
"""Seconds between two polls while inotify works."""
POLL_WITHOUT_INOTIFY = 0.25
_TRY_AGAIN, _LISTEN_WITHIN = 0.001, 2.0
"""Seconds between two tries of a socket that was just created, and for how long it is tried so often."""

_log = structlog.get_logger()
_MASK = (
    inotify.CREATE | inotify.MOVED_TO | inotify.DELETE | inotify.MOVED_FROM | inotify.DELETE_SELF | inotify.MOVE_SELF
)


class KubeletId(Struct, frozen=True):
    """One creation of kubelet.sock.

    A new socket may get the old inode number, so that the time of its creation belongs to it: nothing modifies a socket
    afterwards, and a change of its mode, owner, label or links is another time.
    """

    device: int
    inode: int
    mtime_ns: int


def kubelet_id(path: Path) -> KubeletId | None:
    """Return the identity of kubelet.sock; None if there is no socket of that name."""
    found = socket_id(path)
    return None if found is None else KubeletId(*found)


def socket_id(path: Path) -> SocketId | None:
    """Return the identity of a socket, by which a later one of the same name differs; None if there is no socket.

    The kernel may reuse an inode's number at once, so the time of its creation is part of it. A chmod, a link or another SELinux label
    changes ctime, but not that time.
    """
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns) if stat.S_ISSOCK(found.st_mode) else None


def folder_id(folder: Path) -> tuple[int, int, bool] | None:
    """Return the identity of a folder, and whether it is deleted (``is_pinned``); None if there is no folder."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_nlink == 0) if stat.S_ISDIR(found.st_mode) else None


def is_pinned(folder: Path) -> bool:
    """Return True if the folder was deleted while a mount of ours holds it: it can't come back in a container."""
    found = folder_id(folder)
    return found is not None and found[2]


class FolderWatch:
    """Watches one socket directory, with callbacks on the event loop.

    Args:
        folder: the kubelet's socket directory.
        names: names in ``folder`` whose deletion is reported.
        kubelet_up: a new kubelet accepts connections; called once for each creation of its socket.
        name_lost: a name was deleted from the folder.
        replaced: the folder is another one than before, or exists again.
        late: called with how late a poll was, and when (seconds, monotonic seconds): a free measure of the event loop.
    """

    def __init__(
        self,
        folder: Path,
        names: Callable[[], Iterable[str]],
        *,
        kubelet_up: Callable[[KubeletId], None],
        name_lost: Callable[[str], None],
        replaced: Callable[[], None],
        late: Callable[[float, float], None] = lambda _late, _now: None,
    ) -> None:
        self._folder, self._own = folder, names
        self._kubelet_up, self._name_lost = kubelet_up, name_lost
        self._replaced, self._late = replaced, late
        self._inotify: inotify.INotify | None = None
        self._watched: dict[int, Path] = {}
        self._refused: set[Path] = set()
        self._folder_id = folder_id(folder)
        self._names = self._there()
        self._seen: KubeletId | None = None
        self._created = True
        """True if a kubelet.sock may have been created since the last one that was seen."""
        self._timer: asyncio.TimerHandle | None = None
        self._wait, self._urgent_until = 0.0, 0.0

    async def run(self) -> None:
        """Watch for ever."""
        try:
            self._open_inotify()
            self.look_now()
            await asyncio.get_running_loop().create_future()
        finally:
            self.close()

    def close(self) -> None:
        """Stop watching, and free the descriptor."""
        if self._timer is not None:
            self._timer.cancel()
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def look_now(self) -> None:
        """Look at once, because something was created. Waking a task for it takes 0.1 ms."""
        self._urgent_until = asyncio.get_running_loop().time() + _LISTEN_WITHIN
        self._look()

    def _on_time(self, due: float) -> None:
        now = asyncio.get_running_loop().time()
        self._late(now - due, now)
        if self._wait >= POLL_WITHOUT_INOTIFY:
            self._look_at_names()
        self._look()

    def _look(self) -> None:
        """Look for a new kubelet, and set the time of the next look, also if a callback fails, so that it is called again."""
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
            self._kubelet_up(found)
            self._seen, self._created = found, False
            return self._poll
        return _TRY_AGAIN if now < self._urgent_until else min(max(0.05, self._wait * 2), self._poll)

    def _touched(self, found: KubeletId) -> bool:
        """Return True if it is the last socket with other times: inotify would have reported a new one."""
        seen = self._seen
        if seen is None or self._created or self._folder not in self._watched.values():
            return False
        return (found.device, found.inode) == (seen.device, seen.inode)

    @property
    def _poll(self) -> float:
        return POLL if self._folder in self._watched.values() else POLL_WITHOUT_INOTIFY

    def _there(self) -> frozenset[str]:
        """Return our names that exist, one look each: the folder may have any number of others."""
        return frozenset(name for name in self._own() if os.path.lexists(self._folder / name))

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
        elif self._folder not in self._watched.values():  # A watch may have been refused, for a while.
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
        """Watch the folder, and its parent, in which a new folder would appear."""
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
                # One that was moved away and isn't deleted may come back.
                self._created |= folder != self._folder or not event.mask & inotify.MOVED_TO
        if came:
            self.look_now()
