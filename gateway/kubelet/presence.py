"""Keep track of whether a kubelet listens, and since when."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from gateway.wires.unix import listens

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.kubelet.identity import KubeletId

REMIND_EVERY: Final = 60.0
"""Seconds between two log lines while the gateway waits for a kubelet."""

WAITING: Final = "waiting for a kubelet"
_log = structlog.get_logger()


class Presence:
    """The kubelet of a socket directory; ``socket`` is its kubelet.sock."""

    def __init__(self, socket: Path) -> None:
        self.since: float | None = None
        """When the kubelet was found (monotonic seconds); None: no kubelet listens."""
        self.kubelet: KubeletId | None = None
        """The last kubelet that was found, also if it has ended."""
        self.socket = socket
        self._waiting_since = time.monotonic()
        self._reminder: asyncio.TimerHandle | None = None

    def listens(self) -> bool:
        """Return True if a kubelet accepts connections now."""
        return listens(self.socket)

    def found(self, *, anew: bool) -> None:
        """Note that a kubelet listens; ``anew``: another one than before."""
        self.close()
        if anew or self.since is None:
            self.since = time.monotonic()

    def check(self) -> None:
        """Note that the kubelet has ended, if it no longer accepts connections."""
        if self.since is not None and not listens(self.socket):
            self.since = None
            _log.warning("the kubelet is gone", socket=str(self.socket))
            self._wait()

    def wait(self, **told: Any) -> None:
        """Log that the gateway waits for a kubelet, and again every minute."""
        _log.info(
            WAITING,
            socket=str(self.socket),
            advice="Does the kubelet run (systemctl status kubelet)? Is --socket-dir its device plugin folder?",
            **told,
        )
        self._wait()

    def close(self) -> None:
        """Stop the reminders."""
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None

    def _wait(self) -> None:
        self._waiting_since = time.monotonic()
        self._remind_later()

    def _remind_later(self) -> None:
        self.close()
        self._reminder = asyncio.get_running_loop().call_later(REMIND_EVERY, self._remind)

    def _remind(self) -> None:
        _log.warning(
            WAITING,
            socket=str(self.socket),
            waited_s=round(time.monotonic() - self._waiting_since),
            advice="No device is offered meanwhile. Does the kubelet run? Is --socket-dir its device plugin folder?",
        )
        self._remind_later()
