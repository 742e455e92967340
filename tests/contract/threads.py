"""Threads of a process on the moved clock: one runs only while the loop waits for it, so that the time doesn't pass meanwhile.

Where a thread would wait (for a queue, an event, another thread, or in the fake NVML), the loop goes on, and a timer of the moved
clock or whoever does what it waits for lets it go on. So nothing depends on how fast this machine is.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.contract.clock import Process

_by_ident: dict[int, _Turn] = {}
_paused: set[_Turn] = set()
_known: dict[threading.Thread, _Turn] = {}


class _Turn:
    """A thread of a process, and whose turn it is: the loop's or the thread's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, run: Callable[[], object]) -> None:
        self._loop, self._run = loop, run
        self._context = contextvars.copy_context()
        self._threads, self._loops = threading.Lock(), threading.Lock()
        self._threads.acquire()
        self._loops.acquire()
        self.over = False

    def body(self) -> None:
        """Run, as soon as it is the thread's turn (the thread's own function)."""
        self._threads.acquire()
        _by_ident[threading.get_ident()] = self
        try:
            self._context.copy().run(self._run)
        finally:
            self.over = True
            del _by_ident[threading.get_ident()]
            wake()
            self._loops.release()

    def go_on(self) -> None:
        """Let the thread run until it waits or ends (the loop's)."""
        if not self.over:
            self._threads.release()
            self._loops.acquire()

    def pause(self, seconds: float | None) -> None:
        """Let the loop go on for so long, or until somebody does something (the thread's)."""
        timer = None if seconds is None else self._loop.call_later(seconds, self._woken, context=self._context)
        _paused.add(self)
        self._loops.release()
        self._threads.acquire()
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        """Let it look again whether what it waits for is there."""
        _paused.discard(self)
        self._loop.call_soon_threadsafe(self.go_on, context=self._context)

    def _woken(self) -> None:
        if self in _paused:
            _paused.discard(self)
            self.go_on()


def wake() -> None:
    """Let each thread that waits look again."""
    for one in tuple(_paused):
        one.wake()


def _waited(found: Callable[[], object], timeout: float | None) -> bool:
    """Wait in a thread of a process; False: not within so many seconds."""
    turn, ends = _by_ident[threading.get_ident()], None if timeout is None else time.monotonic() + timeout
    while not found():
        left = None if ends is None else ends - time.monotonic()
        if left is not None and left <= 0:
            return False
        turn.pause(left)
    return True


class _Queue:
    """As ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and not (block and _waited(lambda: self._items, timeout)):
            raise queue.Empty
        return self._items.popleft()


def forget() -> None:
    """Let the threads that there are wait for ever."""
    _paused.clear()
    _known.clear()


def install(
    loop: asyncio.AbstractEventLoop, process: Callable[[], Process | None], replace: Callable[[Any, str, Any], None]
) -> None:
    """Have the threads that a process starts from now on run on the moved clock."""
    thread, event = threading.Thread, threading.Event
    start, join, is_alive, wait, happens = thread.start, thread.join, thread.is_alive, event.wait, event.set
    real: set[threading.Event] = set()

    def started(self: Any) -> None:
        if process() is not None:
            real.add(self._started)
            turn = _known[self] = _Turn(loop, self.run)
            self.run = turn.body
            loop.call_soon_threadsafe(turn.go_on)
        start(self)

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        if self in _known:
            _waited(lambda: _known[self].over, timeout)
        else:
            join(self, timeout)

    def alive(self: threading.Thread) -> bool:
        return not _known[self].over if self in _known else is_alive(self)

    def waited(self: threading.Event, timeout: float | None = None) -> bool:
        moved = threading.get_ident() in _by_ident and self not in real
        return _waited(self.is_set, timeout) if moved else wait(self, timeout)

    def happened(self: threading.Event) -> None:
        happens(self)
        if self not in real:
            wake()

    for owner, replaced in (
        (thread, {"start": started, "join": joined, "is_alive": alive}),
        (event, {"wait": waited, "set": happened}),
        (queue, {"SimpleQueue": _Queue}),
    ):
        for name, new in replaced.items():
            replace(owner, name, new)


def clocked(library: ctypes.CDLL, passes: Callable[[float], None]) -> None:
    """Have a fake NVML wait and hang on the moved clock."""

    def rest(milliseconds: int) -> None:
        turn = _by_ident.get(threading.get_ident())
        if turn is None:
            passes(milliseconds / 1000)  # Nothing else of the node runs while the loop itself waits.
        else:
            turn.pause(milliseconds / 1000)

    hooks: Final = (
        ctypes.CFUNCTYPE(ctypes.c_longlong)(lambda: int(time.monotonic() * 1000)),
        ctypes.CFUNCTYPE(None, ctypes.c_uint)(rest),
    )
    _hooks.append(hooks)
    library.fake_nvml_clock(*hooks)


_hooks: list[object] = []
"""What C calls, which must not be collected."""
