"""Write the state file when it must be durable, and otherwise seldom.

``durable`` returns when all changes before the call are on disk; concurrent callers share a write (group commit). ``soon`` has
them written within 100 ms, together with later changes. The disk works in a thread. A failure is logged once for each reason
and tried again, less and less often. If the disk doesn't answer, nobody waits longer than ``PATIENCE``: to serve devices
without the state file is better than not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from gateway.memory.file import LedgerError
from gateway.memory.ledger import Guard, Ledger, unguarded
from gateway.memory.rows import FileState

SOON = 0.075
"""Seconds until a change is written that need not be durable at once."""
PATIENCE = 2.0
"""Most seconds that ``durable`` waits for a disk. It is longer than a write waits for its lock."""
RETRY_FIRST, RETRY_MAX = 0.1, 30.0
"""Seconds until a failed write is tried again, at first and at most. They double, so that the file is written at most as long
after the disk recovered as it was ill."""

_log = structlog.get_logger()


class Scribe:
    """Writes one ledger on the event loop, as long as its gateway leads.

    ``writes`` returns True while it leads. ``guard`` is held in the thread during a write (``Ledger.save``).
    """

    def __init__(self, ledger: Ledger, writes: Callable[[], bool] = lambda: True, guard: Guard = unguarded) -> None:
        self._ledger, self._writing, self._guard = ledger, writes, guard
        self._write: asyncio.Task[tuple[int, bool]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._retry = RETRY_FIRST
        self._stuck = self._closed = False
        self._error = ""
        self._written_at: float | None = None
        self._writes = 0

    @property
    def state(self) -> FileState:
        """The state of the file."""
        return FileState(
            path=str(self._ledger.path),
            writable=not self._error,
            error=self._error,
            written_s=None if self._written_at is None else round(time.monotonic() - self._written_at, 3),
            writes=self._writes,
            put_aside=self._ledger.aside,
            exposed=self._ledger.exposure,
            pending=self._ledger.pending,
        )

    async def load(self, *, patient: bool = False) -> None:
        """Read the ledger, at the start and while another gateway leads; log what is wrong with it.

        ``patient``: wait for a disk that doesn't answer, and for descriptors. A gateway must not start without the cordons, and then
        write over them. Otherwise go on with what is in memory after ``PATIENCE``.
        """
        if self._ledger.current:  # A thread would cost up to 12 ms of a takeover.
            return
        looking = asyncio.ensure_future(asyncio.to_thread(self._ledger.look))
        if not (await asyncio.wait({looking}, timeout=PATIENCE))[0]:
            reason = f"{self._ledger.path} is not read after {PATIENCE:g} s: the disk does not answer"
            _log.error("state file not read", reason=reason, waits=patient)
            if not patient:
                return
        found = await looking
        if isinstance(found, OSError):
            reason = f"could not read {self._ledger.path}: {found.strerror}"
            _log.error("state file not read", reason=reason, waits=patient)
        while patient and isinstance(found, OSError):
            await asyncio.sleep(RETRY_FIRST)
            found = await asyncio.to_thread(self._ledger.look)
        if isinstance(found, OSError):
            return
        try:
            self._ledger.take(found)
        except LedgerError as error:
            _log.error("state file not read in full", reason=str(error))
            self.soon()
        if self._ledger.exposure:
            _log.warning("the state directory is not private", reason=self._ledger.exposure)

    async def durable(self) -> bool:
        """Wait until all changes up to now are on disk; return False if they may not be. The reason is logged."""
        wanted = self._ledger.revision
        if self._stuck or not self._writing():
            return self._ledger.written >= wanted
        try:
            async with asyncio.timeout(PATIENCE):
                while self._ledger.written < wanted:
                    covered, on_disk = await asyncio.shield(self._write or self._begin())
                    if covered >= wanted:
                        return on_disk
        except TimeoutError:
            self._stuck = True
            self._failed(f"{self._ledger.path} is not written after {PATIENCE:g} s: the disk does not answer")
            return False
        return True

    def soon(self) -> None:
        """Have all changes up to now written within 100 ms; after a failure, with the next try."""
        if self._timer is None and not self._closed and self._writing():
            self._timer = asyncio.get_running_loop().call_later(SOON, self._on_time)

    def close(self) -> None:
        """Stop writing. The leader has written what it promised."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        self._timer = None
        if self._write is None and self._ledger.pending:
            _ = self._begin()

    def _begin(self) -> asyncio.Task[tuple[int, bool]]:
        self._write = asyncio.ensure_future(self._write_once())
        return self._write

    async def _write_once(self) -> tuple[int, bool]:
        """Write; return the revision that the write has, and if it is on disk. A write that has begun is finished."""
        ledger, covered, on_disk = self._ledger, self._ledger.revision, False
        try:
            snapshot = ledger.snapshot()
            ledger.settle(snapshot, await asyncio.to_thread(ledger.save, snapshot, self._guard))
        except LedgerError as error:
            self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, devices are served and it is tried again
            _log.exception("the state file could not be written, because of a defect in the gateway")
            self._failed(repr(error))
        else:
            on_disk = True
            self._succeeded()
        finally:
            self._write, self._stuck = None, False
        self._go_on(on_disk=on_disk)
        return covered, on_disk

    def _succeeded(self) -> None:
        if self._error:
            _log.info("state file written again", path=str(self._ledger.path))
        self._error, self._retry = "", RETRY_FIRST
        self._written_at = time.monotonic()
        self._writes += 1

    def _failed(self, reason: str) -> None:
        if reason != self._error:
            _log.error("state file not written", reason=reason)
        self._error = reason

    def _go_on(self, *, on_disk: bool) -> None:
        """Schedule a write of what is left: at once for changes during the last write, later after a failure."""
        if self._closed or not self._ledger.pending or not self._writing():
            return
        if not on_disk:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._retry, self._on_time)
            self._retry = min(self._retry * 2, RETRY_MAX)
        elif self._timer is None:
            _ = self._begin()
