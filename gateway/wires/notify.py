"""Reports to a service manager (sd_notify(3)) that the gateway is ready, that its event loop runs, and that it ends.

A host service starts before the kubelet, and the kubelet waits until it is ready. A manager asks for these reports by NOTIFY_SOCKET
and WATCHDOG_USEC in the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"
_MICROSECONDS: Final = r"0*[1-9][0-9]{0,14}"
_MIN_PERIOD_S: Final = 0.05
"""Least seconds between two reports that the event loop runs."""


def tell(word: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send a word to the manager, if there is one. Never waits and never raises."""
    with contextlib.suppress(OSError):
        if name := environment.get("NOTIFY_SOCKET", ""):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(0)
                sender.connect(f"\0{name[1:]}" if name.startswith("@") else name)
                sender.send(word.encode())


def watchdog(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds between two reports that the event loop runs: half the manager's limit; None if it set none."""
    microseconds, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not re.fullmatch(_MICROSECONDS, microseconds) or process not in {"", str(os.getpid())}:
        return None
    return max(int(microseconds) / 2e6, _MIN_PERIOD_S)


async def keep_alive(seconds: float) -> None:
    """Report every ``seconds`` that the event loop runs. Never returns."""
    while True:
        tell(ALIVE)
        await asyncio.sleep(seconds)
