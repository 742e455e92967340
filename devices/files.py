"""Read files without blocking, replace them atomically, and watch them without a thread.

A watch is on the file's folder, because editors and the kubelet's volumes replace the file: a watch on the file itself would
stay with the old one. A slow poll finds what inotify doesn't report (network file systems, a replaced folder, a link to another
place).
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
"""Seconds between two polls in addition to inotify."""
_FAST_POLL_S: Final = 1.0
"""Seconds between two polls without inotify."""
# Without CREATE: a file that was just created is still empty, and CLOSE_WRITE follows.
_MASK: Final[int] = (
    inotify.CLOSE_WRITE | inotify.MOVED_TO | inotify.DELETE | inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.ONLYDIR
)
_DRAFT: Final = re.compile(r"\..+\.[0-9a-f]{8}\.new", re.ASCII)
_YOUNG_DRAFT_NS: Final = 60_000_000_000
"""Nanoseconds for which a draft may be in use by another process."""
_FOLDER_GONE: Final[int] = inotify.MOVE_SELF | inotify.IGNORED

_log = structlog.get_logger()


class NotPlainError(ValueError):
    """The path is a folder, a FIFO or another special file."""


def read_plain(path: Path, limit: int, *, follow: bool = True) -> bytes:
    """Read a plain file; never block on a FIFO. If the file has more than ``limit`` bytes, return ``limit`` + 1 bytes.

    Raises:
        OSError: it can't be read now, or it is a link and ``follow`` is False.
        NotPlainError: it is not a plain file.
    """
    flags = os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotPlainError(f"{path} is not a plain file")
        return file.read(limit + 1)


def replace(
    path: Path, data: bytes, mode: int = 0o600, *, durable: bool = True, check: Callable[[], None] = lambda: None
) -> os.stat_result:
    """Replace a file atomically: after a crash either the old or the new file is there. It blocks: call it in a thread.

    A link is replaced, not followed. The draft is next to the file, ``.NAME.XXXXXXXX.new``, which container runtimes don't
    read; ``sweep`` removes drafts that a crash left.

    Args:
        path: the file.
        data: its content.
        mode: its permissions. The umask is ignored.
        durable: flush the file and its folder to the disk before returning.
        check: called right before the replacement; if it raises, the old file stays.

    Returns:
        The new file's status, which identifies this version.

    Raises:
        OSError: it can't be written. The old file stays; if only the flush of the folder failed, the new file is there.
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
        os.replace(draft, path)  # noqa: PTH105 - like the other os calls here
        written = os.fstat(descriptor)  # Not earlier: a rename changes the ctime.
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
    """Remove drafts that a crash left behind. Keep young drafts, because another process may be writing them."""
    with contextlib.suppress(OSError):
        for draft in folder.glob(f".{name}.????????.new"):
            info = draft.lstat()
            ours = _DRAFT.fullmatch(draft.name) and stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
            if ours and time.time_ns() - info.st_mtime_ns > _YOUNG_DRAFT_NS:
                draft.unlink()


class FileWatch:
    """A watch on one file, as a context manager in the running event loop.

    Enter it before the first read, so that no change is missed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inotify: Any = None
        self._changed = asyncio.Event()
        self._polling_logged = False

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._seen = _fingerprint(self._path)
        self._attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._detach()

    async def changed_or(self, order: asyncio.Event) -> None:
        """Wait until the file's content may have changed since the last call, or ``order`` is set."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._changed, order)]
        try:
            while True:
                poll = _FAST_POLL_S if self._inotify is None else _POLL_S
                done, _ = await asyncio.wait(waiting, timeout=poll, return_when=asyncio.FIRST_COMPLETED)
                if not done and self._inotify is None:
                    self._attach()
                seen, self._seen = self._seen, _fingerprint(self._path)
                if done or seen != self._seen:
                    return
        finally:
            self._changed.clear()
            for one in waiting:
                one.cancel()

    def look_again(self) -> None:
        """Make ``changed_or`` return within a second, because the content could not be read."""
        self._loop.call_later(_FAST_POLL_S, self._changed.set)

    def _attach(self) -> None:
        try:
            watch = INotify()
            try:
                watch.add_watch(self._path.parent, _MASK)
            except OSError:
                watch.close()
                raise
        except OSError as error:  # No inotify instance or watch is left for this user, or the folder doesn't exist.
            if not self._polling_logged:
                self._polling_logged = True
                _log.warning("file watched by polling", path=str(self._path), seconds=_FAST_POLL_S, reason=str(error))
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
            # To replace a volume's files, the kubelet moves links whose names begin with "..".
            if event.mask & inotify.Q_OVERFLOW or event.name == self._path.name or event.name.startswith(".."):
                self._changed.set()
        if gone:
            self._detach()
            self._changed.set()


def _fingerprint(path: Path) -> tuple[int, int, int, int] | None:
    """Return a value that differs between two versions of a file, without reading it; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
