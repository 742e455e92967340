"""What this process may use of its node: descriptors up to its hard limit, and memory that goes back when it was used.

The soft limit of descriptors is low by default (1024) for programs that use select(2), which this one doesn't.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from typing import Final

LARGE: Final = 1024 * 1024
"""Bytes from which on what is allocated is mapped by itself, and goes back as soon as it is freed."""
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""Of mallopt(3)."""
_ARENAS: Final = 2


def allow_descriptors() -> int:
    """Raise the soft limit to the hard one, and return it; it stays where a system call filter forbids that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def give_memory_back() -> None:
    """Keep glibc from holding what large requests took: by default it keeps blocks of up to 32 MiB, for each thread's arena.

    Another C library does as it likes.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, LARGE)
        libc.mallopt(_ARENA_MAX, _ARENAS)
