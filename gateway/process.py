"""Set up the process: its limit of file descriptors, its memory allocator, and the log of errors in the event loop.

The soft limit of descriptors is low by default (1024), for programs that use select(2). This one doesn't.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
from typing import Any, Final

import structlog

from gateway.wires.log import Seldom

LARGE: Final = 1024 * 1024
"""Larger blocks are mapped one by one, and returned to the kernel when they are freed."""
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""Parameters of mallopt(3)."""
_ARENAS: Final = 2
_loop_errors = Seldom(times=5)
_log = structlog.get_logger()


def allow_descriptors() -> int:
    """Raise the soft limit to the hard one; return the limit in force. A system call filter may forbid raising it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def give_memory_back() -> None:
    """Make glibc return the memory of large requests. By default it keeps blocks of up to 32 MiB in each thread's arena.

    Other C libraries ignore the settings.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, LARGE)
        libc.mallopt(_ARENA_MAX, _ARENAS)


def report_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that no code caught. It is a defect, but the devices stay.

    If no file descriptor is left, asyncio calls this a hundred times a second, with a traceback each time.
    """
    what = str(context.get("message"))
    if (left_out := _loop_errors.tell(what)) is not None:
        _log.error("unexpected", what=what, more_of_them_before=left_out, exc_info=context.get("exception") or False)
