"""Being the only gateway on a node, where there must not be two: with both APIs served, two would have two tables of owners in force."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Final

import structlog

from gateway.memory import file

LOCK: Final = "alone.lock"
AGAIN: Final = 0.25
"""Seconds between two looks whether another gateway still lives."""
_ANOTHER: Final = (
    "the other gateway on this node to end: with --dra on there is one",
    "update the DaemonSet without a surge (maxSurge 0)",
)
_log = structlog.get_logger()


class Alone:
    """A lock in the state directory, which the kernel opens when its holder is no more; and no other gateway beside it.

    Args:
        state_dir: the state directory.
        others: gives the other gateways that live.
    """

    def __init__(self, state_dir: Path, others: Callable[[], Collection[object]]) -> None:
        self._path, self._others, self._lock = state_dir / LOCK, others, -1
        self.waits_for = ""
        """What is waited for, in words; empty where nothing is."""

    async def wait(self, then: Callable[[], Awaitable[None]]) -> None:
        """Wait for the others' end, and for a disk that takes the lock; then read what they left.

        Without the lock nothing is given away: two tables in force would give a GPU twice, and what can't be written can't be moved.
        """
        while (found := self._hindered()) is not None:
            reason, advice = found
            if self.waits_for != reason:
                self.waits_for = reason
                _log.warning("waiting to be alone on this node", reason=reason, advice=advice)
            await asyncio.sleep(AGAIN)
        self.waits_for = ""
        await then()

    def close(self) -> None:
        """Let another one in."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _hindered(self) -> tuple[str, str] | None:
        """Say what is in the way, and what to do about it; None: nothing is, and the lock is held."""
        if self._others():
            return _ANOTHER
        try:
            return None if self._locked() else _ANOTHER
        except OSError as error:
            reason = f"the state directory: {self._path} can't be locked ({error.strerror}), and without that no GPU is given away"
            return reason, "make --state-dir a folder that this gateway can write"

    def _locked(self) -> bool:
        if self._lock < 0:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = file.hold(self._path)
        return self._lock >= 0
