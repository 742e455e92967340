"""A process of the laboratory: a session of its own, which is killed, whole, when its handle is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Self, TypeAlias

Stream: TypeAlias = int | IO[bytes] | None


async def spawn(
    command: Sequence[str],
    *,
    stdin: Stream = asyncio.subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    limit: int = 1 << 16,
    env: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start a command as a session of its own; ``limit`` is the longest line in bytes that is read of it.

    From now on TERM ends this program as Ctrl-C does: a job that is called off leaves nothing running.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Not by SIGINT: a shell ignores that behind &.
    return await asyncio.create_subprocess_exec(
        *command, stdin=stdin, stdout=stdout, stderr=stderr, limit=limit, env=env, start_new_session=True
    )


class Spawned:
    """A process that was spawned; ``async with`` ends it for sure."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._killed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        """The process, which is also its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.returncode is None

    async def exited(self) -> None:
        """Wait for the end of the process, however long it takes."""
        await self._process.wait()

    async def kill(self) -> None:
        """End the process, and what it may have started, as a crash does (KILL)."""
        if not self._killed:  # Later its number may be another process's.
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()

    async def close(self) -> None:
        """End the process for sure."""
        await self.kill()
