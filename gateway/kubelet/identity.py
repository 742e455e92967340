"""Detect a new kubelet or a new socket directory by its inode and creation time, because the path stays the same."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT = "kubelet_internal_checkpoint"
"""The checkpoint's name in the socket directory (kubelet 1.8 and later)."""
KUBELET_SOCKET = "kubelet.sock"
SocketId: TypeAlias = tuple[int, int, int]
"""The device, the inode and the creation time (ns) of a socket."""


class KubeletId(Struct, frozen=True):
    """The identity of one kubelet.sock. A restarted kubelet creates a new one.

    A new socket may get the old inode number, so the creation time is part of the identity. Nothing changes a socket's mtime
    afterwards: a new mode, owner, label or link changes only ctime.
    """

    device: int
    inode: int
    mtime_ns: int


def kubelet_id(path: Path) -> KubeletId | None:
    """Return the identity of kubelet.sock; None if no socket has that name."""
    found = socket_id(path)
    return None if found is None else KubeletId(*found)


def socket_id(path: Path) -> SocketId | None:
    """Return the identity of a socket; None if there is no socket. A new socket at the same path has another identity.

    The kernel may reuse an inode number at once, so the creation time is part of it. A chmod, a link or another SELinux label
    changes only ctime.
    """
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns) if stat.S_ISSOCK(found.st_mode) else None


def folder_id(folder: Path) -> tuple[int, int, bool] | None:
    """Return a folder's device, its inode, and True if it was deleted; None if there is no folder."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_nlink == 0) if stat.S_ISDIR(found.st_mode) else None


def is_deleted(folder: Path) -> bool:
    """Return True if the folder was deleted but our mount still shows it. The container can't see a new folder at that path."""
    found = folder_id(folder)
    return found is not None and found[2]
