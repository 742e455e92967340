"""The threads of gRPC's pool, kept from waking one another while nothing happens.

gRPC looks at its timers each second, in whichever thread of its pool is signalled for it. A thread that was just woken
takes that work from the thread that signalled, where the scheduler lets it, and the other one then waits anew from 15 ms
up: 300 context switches in 20 s instead of 120 (grpcio 1.85, measured by ``python -m gateway.lab.bench --only idle``).
Threads of the batch policy never cut in like that, sched(7). They also wait for a busy CPU, some 4 ms per registration,
so they are of it only while every resource is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

import structlog

SETTLED: Final = 2.0
"""Seconds for which all must be served before the threads rest: a restart has been verified by then."""
_THREADS: Final = Path("/proc/self/task")
_NAME: Final = "event_engine"
_log = structlog.get_logger()


class GrpcThreads:
    """Lets the threads rest, and wakes them. Where that is forbidden (a system call filter), they stay as they are."""

    def __init__(self) -> None:
        self._settled: asyncio.TimerHandle | None = None
        self._resting: list[int] = []

    def served(self, *, served: bool) -> None:
        """Take note whether every resource is served, or left to another gateway."""
        if served and self._settled is None:
            self._settled = asyncio.get_running_loop().call_later(SETTLED, self._rest)
        elif not served and self._settled is not None:
            self._settled.cancel()
            self._settled = None
            self._wake()

    def _rest(self) -> None:
        for thread in threads():
            with contextlib.suppress(OSError):
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:  # Else somebody has decided otherwise.
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                    self._resting.append(thread)
        _log.debug("gRPC's threads rest", threads=len(self._resting))

    def _wake(self) -> None:
        for thread in self._resting:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        self._resting.clear()
        _log.debug("gRPC's threads are awake")


def threads(tasks: Path = _THREADS) -> list[int]:
    """Return the threads of the pool in a process, by default in this one."""
    found = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # One that has just ended.
            if (task / "comm").read_text().strip() == _NAME:
                found.append(int(task.name))
    return found
