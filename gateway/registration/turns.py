"""Send one list or answer at a time to kubelets whose checkpoint breaks if two are sent at once (``Dialect.spacing``)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT_WAIT_S: Final = 2.0
"""Most seconds to wait until a kubelet has written its checkpoint after a list. On a busy disk it takes longer than
``Dialect.spacing`` (0.3 s seen)."""
_CHECKPOINT_POLL_S: Final = 0.005
"""Seconds between two reads of the checkpoint."""


class Turns:
    """The turns of all resources of a node, because the kubelet writes one checkpoint for all of them."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._lock = asyncio.Lock()
        self._taken, self._free_at = 0.0, 0.0
        self._before: tuple[int, int] | None = None
        self._written = True

    async def take(self, spacing: float, *, writes: bool) -> None:
        """Wait for a turn, and take it for ``spacing`` seconds. ``writes`` is True if the kubelet will certainly write its checkpoint.

        The next turn begins when this one has lasted ``spacing`` seconds and the kubelet has written, or after ``CHECKPOINT_WAIT_S``.
        """
        async with self._lock:
            now = time.monotonic()
            if now < self._free_at:
                await asyncio.sleep(self._free_at - now)
            while not self._written and time.monotonic() < self._taken + CHECKPOINT_WAIT_S:
                stamp = self._stamp()
                self._written = (
                    stamp != self._before and stamp is not None and stamp[1] > 0
                )  # The kubelet empties the file first.
                await asyncio.sleep(_CHECKPOINT_POLL_S)
            self._taken = time.monotonic()
            self._free_at, self._written, self._before = self._taken + spacing, not writes, self._stamp()

    def unused(self) -> None:
        """Report that nothing was sent in this turn, so that the next turn doesn't wait for a write."""
        self._written = True

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._checkpoint.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size
