"""What the command line of this process looks like to others, in ``/proc/<pid>/cmdline``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

_SELF: Final = Path("/proc/self")
# Of /proc/<pid>/stat (proc(5)), counted from the field behind the name of the program, which may have spaces.
_ARG_START, _ARG_END = 45, 46


def first_word(word: str) -> bool:
    """Make ``word`` the first word of the command line, and this program's arguments the rest; say whether it could be done.

    A script's first word is its interpreter. The sidecar of NVIDIA's plugin (cmd/config-manager) sends its signal to the process
    whose first word is exactly ``nvidia-device-plugin``. The words are written where the kernel looks for them, which has
    room because the interpreter's own go; no capability is needed.
    """
    line = b"\0".join(os.fsencode(one) for one in (word, *sys.argv[1:])) + b"\0"
    try:
        fields = (_SELF / "stat").read_bytes().rpartition(b") ")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if len(line) > end - start:
            return False
        with (_SELF / "mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(line.ljust(end - start, b"\0"))
    except (OSError, ValueError, IndexError):
        return False
    return True
