"""``python3 -m tools.step SECONDS COMMAND...``: run one step of ``.ci/run``, and end it when its time is up.

What still runs then is printed as a tree, so that one sees where it hung, and ended: first told (TERM), then killed. Processes
that a step leaves behind are ended, too. The exit status is the command's, or 124 when its time was up. The standard library
alone: nothing is installed yet when CI begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TIME_IS_UP = 124
GRACE_SECONDS = 15.0
"""A genuine node needs ten to remove what it made."""
SHOWN = 60
CHARACTERS = 160
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _TimeIsUpError(Exception):
    pass


def main(seconds: float, command: list[str]) -> int:
    """Run a command for so many seconds at most; give its exit status."""
    _adopt()
    # Another signal would be dropped: a shell starts what runs in its background with SIGINT ignored.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGALRM, _time_is_up)
    status = TIME_IS_UP
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        status = _wait(child.pid, seconds)
    except _TimeIsUpError:
        print(f"step: {' '.join(command)}: not done after {seconds:g} s; what it was doing:", flush=True)
        _tell()
    except FileNotFoundError as error:
        print(f"step: {error}", flush=True)
        status = 127
    else:
        if [*_below(os.getpid())]:
            print("step: left behind, and ended:", flush=True)
            _tell()
    finally:
        _end()
    return status


def _adopt() -> None:
    """Have every process below this one, whoever started it, end here; and end with who runs this."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _time_is_up(*_: object) -> None:
    raise _TimeIsUpError


def _wait(pid: int, seconds: float) -> int:
    """Wait for one child; reap orphans meanwhile, for whose end somebody may wait."""
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            signal.setitimer(signal.ITIMER_REAL, 0)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end() -> None:
    """End all processes below this one: told at first, then killed."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for pid, _ in _below(os.getpid()):
        _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    for pid, _ in _below(os.getpid()):
                        _send(pid, signal.SIGKILL)
                time.sleep(0.05)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _below(root: int) -> Iterator[tuple[int, int]]:
    """Give all processes below one, each with its depth there; who has ended isn't there any more."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    waiting = [(pid, 0) for pid in sorted(children.get(root, ()), reverse=True)]
    while waiting:
        pid, depth = waiting.pop()
        yield pid, depth
        waiting += [(child, depth + 1) for child in sorted(children.get(pid, ()), reverse=True)]


def _tell() -> None:
    """Print the processes below this one, each with its age in seconds."""
    up, ticks = float(Path("/proc/uptime").read_text().split()[0]), os.sysconf("SC_CLK_TCK")
    found = [*_below(os.getpid())]
    for pid, depth in found[:SHOWN]:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
            began = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
            print(f"  {pid:>7} {up - began / ticks:6.0f} s {'  ' * depth}{' '.join(words)[:CHARACTERS]}")
    if len(found) > SHOWN:
        print(f"  and {len(found) - SHOWN} more")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
