"""The gateway as it is, with a witness inside: for what can't be done or seen from outside without harm to others.

``python -m gateway_lab.trials.insider CLOCK ARGUMENTS...`` runs ``gateway ARGUMENTS...``. Its wall clock is off by as many seconds
as the file CLOCK says at that moment, and at SIGUSR1 it logs how many asyncio tasks there are.

A real jump would be everybody's on the machine. Log lines keep the real time, and so does gRPC: its deadlines are compared
with the kernel's clock, which hasn't jumped here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

TASKS = "tasks"
"""The event of the line that tells how many tasks there are, as ``count``."""


def main() -> None:
    """Run the gateway."""
    clock = Path(sys.argv.pop(1))
    really = time.time_ns

    def wall_ns() -> int:
        with contextlib.suppress(OSError, ValueError):
            return really() + int(clock.read_text()) * 10**9
        return really()

    def tell(*_: object) -> None:
        line = {"event": TASKS, "count": len(asyncio.all_tasks())}
        os.write(2, f"\n{json.dumps(line)}\n".encode())  # A line of the log may be half written.

    importlib.import_module("grpc.aio")
    as_it_is = ModuleType("time")
    vars(as_it_is).update(vars(time))
    vars(sys.modules["grpc.aio._utils"])["time"] = as_it_is

    time.time_ns = wall_ns
    time.time = lambda: wall_ns() / 1e9
    signal.signal(signal.SIGUSR1, tell)

    from gateway.cli.main import gateway  # noqa: PLC0415 - whatever it imports finds the clock as it is here

    gateway()


if __name__ == "__main__":
    main()
