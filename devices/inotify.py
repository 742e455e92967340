"""inotify(7): the kernel reports changes of the names in a folder.

It uses the C library that this process has loaded already. Packages for inotify search it with ``ctypes.util``, which runs
ldconfig and imports tempfile, random and all compression modules: 15 ms of 300 ms to start.
"""

from __future__ import annotations

import functools
import os
import struct
from pathlib import Path
from typing import Any

from msgspec import Struct

CLOSE_WRITE = 0x8
MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
DELETE_SELF = 0x400
MOVE_SELF = 0x800
Q_OVERFLOW = 0x4000
"""Events were lost, so anything may have happened."""
IGNORED = 0x8000
"""The watch ended: it was removed, or its folder is gone."""
ONLYDIR = 0x1000000

_READ_BYTES = 64 * 1024
"""Bytes of one read. If more is left, the descriptor stays ready."""
_EVENT = struct.Struct("iIII")


class FolderEvent(Struct, frozen=True):
    """An event (``mask``) of ``name`` in the folder with the watch ``wd``; '' is the folder itself."""

    wd: int
    mask: int
    name: str


class INotify:
    """An inotify instance.

    Raises:
        OSError: no instance is left for this user, or no file descriptor.
    """

    def __init__(self) -> None:
        self._fd = _called(_libc().inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._fd

    def add_watch(self, folder: Path, mask: int) -> int:
        """Watch a folder for the events in ``mask``; return the watch's number, which is the old one if the folder is watched.

        Raises:
            OSError: the folder doesn't exist, or no watch is left for this user.
        """
        return _called(_libc().inotify_add_watch(self._fd, os.fsencode(folder), mask))

    def rm_watch(self, wd: int) -> None:
        """End a watch.

        Raises:
            OSError: there is no such watch.
        """
        _called(_libc().inotify_rm_watch(self._fd, wd))

    def read(self) -> list[FolderEvent]:
        """Return the events since the last call, as many as one read returns. Never blocks."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return []
        events, at = [], 0
        while at < len(data):
            wd, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size + length
            name = data[at - length : at].rstrip(b"\0")
            events.append(FolderEvent(wd, mask, os.fsdecode(name)))
        return events

    def close(self) -> None:
        """Close the descriptor, which ends all watches."""
        os.close(self._fd)


@functools.cache
def _libc() -> Any:
    import ctypes  # noqa: PLC0415 - half a MiB, which commands needn't pay

    return ctypes.CDLL(None, use_errno=True)


def _called(result: int) -> int:
    if result < 0:
        import ctypes  # noqa: PLC0415 - as above

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
