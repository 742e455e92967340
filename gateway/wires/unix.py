"""Check if a process listens on a Unix socket."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def listens(path: Path) -> bool:
    """Return True if a process listens on a Unix socket. False also if no file descriptor is left: callers try again."""
    return connect_error(path) is None


def connect_error(path: Path) -> OSError | None:
    """Connect to a Unix socket; return why that failed. Does not block: a full backlog is treated as listening."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0)
            probe.connect(os.fspath(path))
    except OSError as error:
        return None if isinstance(error, BlockingIOError) else error
    return None
