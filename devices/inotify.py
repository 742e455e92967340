"""inotify(7): the kernel tells what happens to the names in a folder.

By the C library that this process has already. Packages look for it by ``ctypes.util``, which runs ldconfig, a process of its own,
and brings tempfile, random and every compression there is: 15 ms of a start of 300.
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
"""More happened than the kernel keeps: it may have been anything."""
IGNORED = 0x8000
"""The watch is over: it was removed, or its folder is gone."""
ONLYDIR = 0x1000000

_AT_ONCE = 64 * 1024
"""Bytes of one read. What is left makes the descriptor ready again."""
_EVENT = struct.Struct("iIII")


class FolderEvent(Struct, frozen=True):
    """What happened (``mask``) to ``name`` in the folder with the watch ``wd``; '' is the folder itself."""

    wd: int
    mask: int
    name: str


class INotify:
    """An inotify instance: a descriptor that is ready to be read when something has happened.

    Raises:
        OSError: there is none left for this user, or no descriptor.
    """

    def __init__(self) -> None:
        self._fd = _called(_libc().inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def fileno(self) -> int:
        """Give the descriptor, for a selector."""
        return self._fd

    def add_watch(self, folder: Path, mask: int) -> int:
        """Watch a folder for what is in ``mask``; give the watch's number, the same where there is one already.

        Raises:
            OSError: there is no such folder, or no watch left for this user.
        """
        return _called(_libc().inotify_add_watch(self._fd, os.fsencode(folder), mask))

    def rm_watch(self, wd: int) -> None:
        """End a watch.

        Raises:
            OSError: there is no such watch.
        """
        _called(_libc().inotify_rm_watch(self._fd, wd))

    def read(self) -> list[FolderEvent]:
        """Give what happened since the last time, as far as one read goes; never blocks."""
        try:
            data = os.read(self._fd, _AT_ONCE)
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
        """Free the descriptor, and with it all watches."""
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
