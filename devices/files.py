"""Files: read without waiting, replaced as a whole, and watched without a thread and without waking up for nothing.

A watch is on the file's folder, because editors and the kubelet's volumes put a new file in the old one's place: a
watch on the file itself would stay with the one that nobody sees any more. Under it lies a slow poll, for what inotify
doesn't tell (network file systems, a replaced folder, a link to elsewhere).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from devices import inotify
from devices.inotify import INotify

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S: Final = 5.0
_POLL_ALONE_S: Final = 1.0
# CREATE is missing on purpose: a file that was just created is still empty; its CLOSE_WRITE follows.
_MASK: Final[int] = (
    inotify.CLOSE_WRITE | inotify.MOVED_TO | inotify.DELETE | inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.ONLYDIR
)
_DRAFT: Final = re.compile(r"\..+\.[0-9a-f]{8}\.new", re.ASCII)
_IN_THE_MAKING_NS: Final = 60_000_000_000
"""Nanoseconds for which a draft may be another process's that is writing."""
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
            raise NotPlainError("it is no plain file")
        return file.read(most + 1)


def _without_waiting(path: str, mode: int) -> int:
    return os.open(path, mode | os.O_NONBLOCK)


def replace(
    path: Path, data: bytes, mode: int = 0o600, *, durable: bool = True, check: Callable[[], None] = lambda: None
) -> os.stat_result:
    """Put a file in the place of another, as a whole: a crash leaves the old one or the new one. It blocks: for a thread.

    A link in its place is replaced, not followed. Until it is whole it is a draft beside it, ``.NAME.XXXXXXXX.new``: none that a
    container runtime reads, and what a crash left of one ``sweep`` removes.

    Args:
        path: where it is to be.
        data: all of it.
        mode: who may read and write it, whatever this process's mask says.
        durable: the file and its name are on the disk when this returns, which takes two flushes.
        check: is called right before the old file goes; what it raises is raised, and the old file stays.

    Returns:
        What the new file is known by.

    Raises:
        OSError: it can't be written. The old file is there, or, where its folder couldn't be flushed, the new one.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fchmod(descriptor, mode)
        if durable:
            os.fsync(descriptor)
        check()
        os.replace(draft, path)  # noqa: PTH105 - beside the other calls of one write
        written = os.fstat(descriptor)  # A rename changes the time, so only now.
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    finally:
        os.close(descriptor)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return written


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what crashes left of writes of files that are called so; what is young may be another process's, which is at it now."""
    with contextlib.suppress(OSError):
        for draft in folder.glob(f".{name}.????????.new"):
            info = draft.lstat()
            ours = _DRAFT.fullmatch(draft.name) and stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
            if ours and time.time_ns() - info.st_mtime_ns > _IN_THE_MAKING_NS:
                draft.unlink()


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
