"""What this process may use of its node: descriptors up to its hard limit, and memory that goes back when it was used.

The soft limit of descriptors is low by default (1024) for programs that use select(2), which this one doesn't.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from gateway.wires.log import Seldom

LARGE: Final = 1024 * 1024
"""Bytes from which on what is allocated is mapped by itself, and goes back as soon as it is freed."""
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""Of mallopt(3)."""
_ARENAS: Final = 2
TRIM_EVERY, TRIM_IDLE, TRIM_SELDOM = 2.0, 16.0, 128.0
"""Seconds between two looks at the memory that is resident, doubled for each time in a row at which it had not grown (up to the
second) or nothing of it was free (up to the third): where nothing happens, each look wakes the process for nothing."""
GROWN: Final = 12 * 1024 * 1024
"""Bytes by which it is more than the least so far when what is free is given back: that takes the allocator 3 to 10 ms."""
GAINED: Final = 1024 * 1024
"""Bytes from which on that was worth it."""
_loop_errors = Seldom(times=5)
_log = structlog.get_logger()


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


async def trim() -> None:
    """Give back what calls have left scattered in the allocator's arenas, for ever, where that may be much.

    glibc does so by itself only at an arena's end: small blocks of many large requests would keep twice of what is needed.
    Another C library does as it likes.
    """
    with contextlib.suppress(AttributeError, OSError):
        malloc_trim = ctypes.CDLL(None).malloc_trim
        await trim_by(lambda: malloc_trim(0), resident)


async def trim_by(give_back: Callable[[], object], measure: Callable[[], int]) -> None:
    """Do it by ``give_back``, beside the event loop; ``measure`` tells how many bytes are resident."""
    least = last = measure()
    wait = TRIM_EVERY
    while True:
        await asyncio.sleep(wait)
        now = measure()
        if now - least >= GROWN:
            await asyncio.to_thread(give_back)
            before, now = now, measure()
            wait = TRIM_EVERY if before - now >= GAINED else min(2 * wait, TRIM_SELDOM)
        else:
            wait = TRIM_EVERY if now - last >= GAINED else min(2 * wait, TRIM_IDLE)
        least, last = min(least, now), now


def resident() -> int:
    """Return how many bytes of this process are in memory (proc(5)).

    Raises:
        OSError: there is no /proc.
    """
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def report_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what nobody caught; it is a defect, but never a reason to take devices away.

    asyncio tells this a hundred times a second of a listener without descriptors, with a traceback each.
    """
    what = str(context.get("message"))
    if (left_out := _loop_errors.tell(what)) is not None:
        _log.error("unexpected", what=what, more_of_them_before=left_out, exc_info=context.get("exception") or False)
