"""How many files and connections this process may have open: all that its hard limit allows.

The soft limit is low by default (1024) for programs that use select(2), which this one doesn't.
"""

from __future__ import annotations

import contextlib
import resource


def allow_all() -> int:
    """Raise the soft limit to the hard one, and return it; it stays where a system call filter forbids that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft
