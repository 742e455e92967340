"""A machine that is never idle: processes that use a processor each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def busy_loops(each: int) -> Iterator[list[int]]:
    """Run ``each`` for every processor, and end them; give their PIDs."""
    with ExitStack() as stack:
        loops = []
        for _ in range(each * (os.cpu_count() or 1)):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
            loops.append(loop.pid)
        yield loops
