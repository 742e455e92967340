"""Which kubelet it is."""

from __future__ import annotations

from msgspec import Struct


class KubeletId(Struct, frozen=True):
    """One creation of kubelet.sock.

    A new socket may get the old inode number, so that the time of its creation belongs to it: nothing modifies a socket
    afterwards, and a change of its mode, owner, label or links is another time.
    """

    device: int
    inode: int
    mtime_ns: int
