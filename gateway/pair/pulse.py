"""Word that the other gateway of a pair is dying, some milliseconds before its connections end.

The kernel first lets go of the robust mutexes of a thread that dies, then takes its process's memory apart, and closes its files
last. So who stands by can make ready what it needs meanwhile. Who serves the resource is decided by the connection alone, but where
the kubelet takes a Register while an earlier stream lives: that is the last word of the one that dies.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from threading import Thread
from typing import Final

from gateway.pair.flight import LANES

_SIZE: Final = 128
"""Bytes for a mutex, or for its attributes: more than any C library takes; or for a word."""
_SHARED: Final = 1
_ROBUST: Final = 1
_OVER: Final = b"over"
"""The last word of one that ended in order."""


class Pulse:
    """A mutex for each gateway, which it holds as long as it lives. Make it before the fork."""

    def __init__(self) -> None:
        self._libc, self._lane = ctypes.CDLL(None), 0
        page = mmap.mmap(-1, (2 * LANES + 1) * _SIZE)
        places = [(ctypes.c_char * _SIZE).from_buffer(page, at * _SIZE) for at in range(2 * LANES + 1)]
        self._held, self._words, attributes = places[:LANES], places[LANES:-1], places[-1]
        self._libc.pthread_mutexattr_init(attributes)
        self._libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        self._libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        for mutex in self._held:
            self._libc.pthread_mutex_init(mutex, attributes)

    def begin(self, lane: int) -> None:
        """Hold this gateway's mutex from now on: call it in its main thread, which lives as long as it does."""
        self._lane = lane
        self._take(self._held[lane])
        self.say(b"")

    def say(self, word: bytes) -> None:
        """Leave word for the other gateway, instead of what was said before; it reads that when this one dies. Below 128 bytes."""
        self._words[self._lane].value = word

    def end(self) -> None:
        """Be over, though the process isn't yet: call it where ``begin`` was called."""
        self.say(_OVER)
        self._libc.pthread_mutex_unlock(self._held[self._lane])

    def at_others_end(self, call: Callable[[bytes], object]) -> None:
        """Have ``call`` called once with its last word, in another thread, when the other gateway dies, or is over.

        Never, if there is none now.
        """
        Thread(target=self._wait, args=(self._held[1 - self._lane], call), daemon=True).start()

    def _wait(self, mutex: ctypes.Array[ctypes.c_char], call: Callable[[bytes], object]) -> None:
        died = self._take(mutex)
        word = self._words[1 - self._lane].value
        self._libc.pthread_mutex_unlock(mutex)  # The next one is to hold it.
        if died or word == _OVER:
            call(word)

    def _take(self, mutex: ctypes.Array[ctypes.c_char]) -> bool:
        """Wait until a mutex is free and hold it; tell whether its owner died: then it is made good, or nobody could hold it once it is let go of."""
        died: bool = self._libc.pthread_mutex_lock(mutex) == errno.EOWNERDEAD
        if died:
            self._libc.pthread_mutex_consistent(mutex)
        return died
