"""A file that ends who reads it: read first in a copy of the process, because the parent of a pair has nobody to notice its end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import TypeVar

from gateway.configuration.settings import ConfigError
from gateway.pair.flight import CRASHES

_T = TypeVar("_T")


def tasted(name: str, read: Callable[[], _T]) -> _T:
    """Return what ``read`` gives, unless a copy of this process crashes at it. Call it while this process has one thread.

    Args:
        name: what the error calls the file.
        read: reads it; it may raise.

    Raises:
        ConfigError: the copy crashed.
    """
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            read()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if -status in CRASHES:
        raise ConfigError(
            f"{name}: expected a file that can be read, but it crashes who reads it ({signal.Signals(-status).name}): write it "
            "otherwise, and report it"
        )
    return read()
