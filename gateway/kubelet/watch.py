"""Which kubelet serves a socket directory, and which directory that is: by inode and time of making, because names come back."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT = "kubelet_internal_checkpoint"
"""Its name in the socket directory (kubelet 1.8 and later)."""
KUBELET_SOCKET = "kubelet.sock"
SocketId: TypeAlias = tuple[int, int, int]
"""The device, the inode and the time of making (ns) of a socket."""


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
