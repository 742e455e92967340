"""Read a file that a person or a program edits, and notice each edit, without a thread and without waking up for nothing.

The watch is on the file's folder, because editors and the kubelet's volumes put a new file in the old one's place: a
watch on the file itself would stay with the one that nobody sees any more. Under it lies a slow poll, for what inotify
doesn't tell (network file systems, a replaced folder, a link to elsewhere).
"""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import Any, Final, Self

import structlog

from devices import inotify
from devices.inotify import INotify

_POLL_S: Final = 5.0
_POLL_ALONE_S: Final = 1.0
# CREATE is missing on purpose: a file that was just created is still empty; its CLOSE_WRITE follows.
_MASK: Final[int] = (
    inotify.CLOSE_WRITE | inotify.MOVED_TO | inotify.DELETE | inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.ONLYDIR
)
_FOLDER_GONE: Final[int] = inotify.MOVE_SELF | inotify.IGNORED

_log = structlog.get_logger()


class NotPlainError(Exception):
    """What has the file's name is a folder, a FIFO or the like."""


def read_plain(path: Path, most: int) -> bytes:
    """Read a plain file, at most ``most`` bytes and one more, by which a larger one is known. A FIFO can't stall it.

    Raises:
        OSError: it can't be read now.
        NotPlainError: as its name says.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotPlainError
        return file.read(most + 1)


def _without_waiting(path: str, mode: int) -> int:
    return os.open(path, mode | os.O_NONBLOCK)


class FileWatch:
    """A watch on one file; a context manager, to be entered and left on the running event loop.

    Enter it before the first read: from then on no change is missed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inotify: Any = None
        self._changed = asyncio.Event()
        self._told_polling = False

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._seen = _fingerprint(self._path)
        self._attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._detach()

    async def changed(self) -> None:
        """Wait until the file's content may have changed since the last call: it may be new, another one, or gone."""
        while True:
            try:
                async with asyncio.timeout(_POLL_ALONE_S if self._inotify is None else _POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                if self._inotify is None:
                    self._attach()
            told = self._changed.is_set()
            self._changed.clear()
            seen, self._seen = self._seen, _fingerprint(self._path)
            if told or seen != self._seen:
                return

    async def changed_or(self, order: asyncio.Event) -> None:
        """Wait as ``changed`` does, but no longer than until ``order`` is set."""
        waiting = [asyncio.ensure_future(work) for work in (self.changed(), order.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    def look_again(self) -> None:
        """Let ``changed`` return in a second, whatever happens: the content could not be read."""
        self._loop.call_later(_POLL_ALONE_S, self._changed.set)

    def _attach(self) -> None:
        try:
            watch = INotify()
            try:
                watch.add_watch(self._path.parent, _MASK)
            except OSError:
                watch.close()
                raise
        except OSError as error:  # no instance or watch left for this user, or no such folder
            if not self._told_polling:
                self._told_polling = True
                _log.warning("file watched by polling", path=str(self._path), seconds=_POLL_ALONE_S, reason=str(error))
            return
        self._loop.add_reader(watch.fileno(), self._read)
        self._inotify = watch

    def _detach(self) -> None:
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _read(self) -> None:
        gone = False
        for event in self._inotify.read():
            gone = gone or bool(event.mask & _FOLDER_GONE)
            # Names that begin with ".." are the links by which the kubelet swaps a volume's files, all at once.
            if event.mask & inotify.Q_OVERFLOW or event.name == self._path.name or event.name.startswith(".."):
                self._changed.set()
        if gone:
            self._detach()
            self._changed.set()


def _fingerprint(path: Path) -> tuple[int, int, int, int] | None:
    """Tell two contents apart without reading them; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
