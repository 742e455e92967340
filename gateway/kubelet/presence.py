"""Whether a kubelet is there: when it was found, that it is gone, and where one is waited for."""

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
"""Seconds between two lines that say that a kubelet is still waited for."""

WAITING: Final = "waiting for a kubelet"
_log = structlog.get_logger()


class Presence:
    """The kubelet of a socket directory; ``socket`` is where it takes registrations."""

    def __init__(self, socket: Path) -> None:
        self.since: float | None = None
        """When it was found (monotonic seconds); None: there is none."""
        self.kubelet: KubeletId | None = None
        """The one that was found last, also where it is gone."""
        self.socket = socket
        self._waiting_since = time.monotonic()
        self._reminder: asyncio.TimerHandle | None = None

    def listens(self) -> bool:
        """Whether a kubelet takes connections now."""
        return listens(self.socket)

    def found(self, *, anew: bool) -> None:
        """Take note that it is there; ``anew`` is whether it is another one than before."""
        self.close()
        if anew or self.since is None:
            self.since = time.monotonic()

    def check(self) -> None:
        """Take note that it is gone, where nobody takes connections any more."""
        if self.since is not None and not listens(self.socket):
            self.since = None
            _log.warning("the kubelet is gone", socket=str(self.socket))
            self._wait()

    def wait(self, **told: Any) -> None:
        """Say that one is waited for, and again each minute."""
        _log.info(
            WAITING,
            socket=str(self.socket),
            advice="expected a kubelet to listen there: does it run (systemctl status kubelet), and is --socket-dir its device plugin folder?",
            **told,
        )
        self._wait()

    def close(self) -> None:
        """Remind nobody any more."""
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
            advice="no device is offered meanwhile: does the kubelet run, and is --socket-dir its device plugin folder?",
        )
        self._remind_later()
