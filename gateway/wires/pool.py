"""gRPC's threads, kept from waking one another while nothing happens.

gRPC looks at its timers each second, in whichever thread of its pool is signalled for it. A thread that was just woken may take
that work from the one that signalled, which then waits anew from 15 ms up: in some processes 300 context switches in 20 s
instead of 100. Threads of the batch policy never cut in like that, sched(7). They also wait longer for a busy processor, so
they have it only while every resource is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

import structlog

SETTLED: Final = 2.0
"""Seconds for which all must be served before the threads rest: by then a kubelet's restart is over."""
THREADS: Final = Path("/proc/self/task")
NAME: Final = "event_engine"
_log = structlog.get_logger()


class GrpcThreads:
    """Lets the threads rest, and wakes them. Where the gateway was started with another policy, they keep that."""

    def __init__(self) -> None:
        self._rest: asyncio.TimerHandle | None = None

    def served(self, *, served: bool) -> None:
        """Take note whether every resource is served, or left to another gateway."""
        if served and self._rest is None:
            self._rest = asyncio.get_running_loop().call_later(SETTLED, put, os.SCHED_BATCH)
        elif not served and self._rest is not None:
            self._rest.cancel()
            self._rest = None
            put(os.SCHED_OTHER)


def put(policy: int) -> None:
    """Give the threads a policy, also those that gRPC has started since and that took over their maker's."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        for thread in THREADS.iterdir():
            with contextlib.suppress(OSError):  # It has just ended, or a system call filter forbids it.
                if (thread / "comm").read_text().strip() == NAME:
                    os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))
    _log.debug("gRPC's threads rest" if policy == os.SCHED_BATCH else "gRPC's threads are awake")
