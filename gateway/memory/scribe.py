"""The scribe: when the ledger is written, so that it is durable before it matters and costs nothing where it doesn't.

Two promises. ``durable`` returns when all that was changed before the call is on disk; callers that come together share
a write (group commit). ``soon`` has it written within 100 ms, with whatever else changes until then. The disk works in a
thread of its own. One that fails is reported once for each reason and tried again, ever more slowly; one that doesn't
answer holds nobody up for longer than ``PATIENCE``: devices are served without memory rather than not at all.
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
"""Seconds that ``durable`` waits for a disk: longer than the ledger waits for its lock."""
RETRY_FIRST, RETRY_MAX = 0.1, 30.0
"""Seconds until a failed write is tried again, at first and at most. They double: it is on disk after at most as long
again as the disk was ill."""

_log = structlog.get_logger()


class Scribe:
    """Writes one ledger on the event loop that it is used on, as long as its gateway leads.

    ``writes`` tells whether that is so. ``guard`` is held in the thread during a write (``Ledger.save``).
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
        """How the ledger is now."""
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
        """Read the ledger, at the start and while another gateway leads; what is wrong with it is logged.

        A disk that doesn't answer, and descriptors that are exhausted, are waited for where that is ``patient``: nobody is to
        start without what was cordoned, and to write over it. Otherwise what was known before has to do, after ``PATIENCE``.
        """
        if self._ledger.current:  # A thread's turn would be up to 12 ms of a takeover.
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
        """Wait until all changes up to now are on disk; False where they may not be, which was reported then."""
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
        """Have all changes up to now on disk within 100 ms; after a failure, with the next try."""
        if self._timer is None and not self._closed and self._writing():
            self._timer = asyncio.get_running_loop().call_later(SOON, self._on_time)

    def close(self) -> None:
        """Write nothing by itself from now on: the gateway that led has written what it promised."""
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
        """Write; return which revision that covers, and whether it is on disk. A write that has begun is finished."""
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
        """See to what is left: at once what came during the write, and later what failed."""
        if self._closed or not self._ledger.pending or not self._writing():
            return
        if not on_disk:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._retry, self._on_time)
            self._retry = min(self._retry * 2, RETRY_MAX)
        elif self._timer is None:
            _ = self._begin()
