"""What is being answered or read, where it outlives who does it: a request that ends a gateway must not end the next one, too.

The parent and its gateways share a page of memory. A gateway notes each request's digest there while it answers it. When one
crashes (a signal of its own making, such as SIGSEGV), the parent keeps what it was answering then as suspect, and no gateway
of the pair answers that again: a crash that repeats with every try would end them all. A gateway that somebody else killed
(SIGKILL, out of memory) leaves no suspects.
"""

from __future__ import annotations

import mmap
import signal
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, Final, TypeVar

from devices.model import Fault, RefusedError

CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS})
"""The signals by which a process ends itself."""
LANES: Final = 2
"""How many gateways a pair has."""
AT_ONCE: Final = 64
"""How many requests of one gateway are noted at once; of more, some aren't."""
SUSPECTS: Final = 64
"""How many are kept; then the oldest is forgotten."""
_SIZE: Final = 8
"""Bytes of a digest."""
_NONE: Final = bytes(_SIZE)
_SORTED: Final = 4096
"""Bytes up to which a request's digest doesn't depend on the order of what it names: a kubelet's is by chance."""
_SHOWN: Final = 200

_Answer = Callable[[Any, bytes, Any], Awaitable[bytes]]
_T = TypeVar("_T")


class Flight:
    """The shared page. Make it before the fork; each gateway has a lane of it."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, (LANES * AT_ONCE + SUSPECTS) * _SIZE)
        self._next = 0

    def landed(self, lane: int, status: int) -> int:
        """Clear the lane of a gateway that ended (parent); return how many requests are suspect for that.

        Args:
            lane: the gateway's.
            status: how it ended; negative: by that signal.
        """
        found = {digest for at in range(AT_ONCE) if (digest := self._read(lane * AT_ONCE + at)) != _NONE}
        for at in range(AT_ONCE):
            self._write(lane * AT_ONCE + at, _NONE)
        if -status not in CRASHES:
            return 0
        for digest in found:
            self._write(LANES * AT_ONCE + self._next % SUSPECTS, digest)
            self._next += 1
        return len(found)

    def guard(self, lane: int, what: str, answer: _Answer) -> _Answer:
        """Note each request while it is answered; refuse one that ended a gateway (gateway).

        Args:
            lane: this gateway's.
            what: the call and the resource, for the error.
            answer: answers a request (dialect, request, context).
        """

        async def guarded(dialect: Any, request: bytes, context: Any) -> bytes:
            digest = digest_of(what, request)
            if digest in self._suspects():
                raise RefusedError(
                    Fault.FAILED_PRECONDITION,
                    f"expected {what} to be answered, and a gateway of this pair crashed while it answered this very request, so "
                    f"it is refused now: {ascii(request)[:_SHOWN]}. Restart the container to have it tried again, and report it",
                )
            at = self._enter(lane, digest)
            try:
                return await answer(dialect, request, context)
            finally:
                if at is not None:
                    self._write(at, _NONE)

        return guarded

    def decoding(
        self, lane: int, what: str, decode: Callable[[bytes], _T], instead: Callable[[bytes], _T]
    ) -> Callable[[bytes], _T]:
        """Note a file's bytes while they are decoded; leave what ended a gateway to ``instead`` (gateway, in any thread)."""

        def noted(data: bytes) -> _T:
            digest = digest_of(what, data)
            if digest in self._suspects():
                return instead(data)
            at = self._enter(lane, digest)
            try:
                return decode(data)
            finally:
                if at is not None:
                    self._write(at, _NONE)

        return noted

    def _suspects(self) -> set[bytes]:
        if self._read(LANES * AT_ONCE) == _NONE:  # Their places fill from the first on: mostly there is none.
            return set()
        return {self._read(LANES * AT_ONCE + at) for at in range(SUSPECTS)}

    def _enter(self, lane: int, digest: bytes) -> int | None:
        for at in range(lane * AT_ONCE, (lane + 1) * AT_ONCE):
            if self._read(at) == _NONE:
                self._write(at, digest)
                return at
        return None

    def _read(self, at: int) -> bytes:
        return self._page[at * _SIZE : (at + 1) * _SIZE]

    def _write(self, at: int, digest: bytes) -> None:
        self._page[at * _SIZE : (at + 1) * _SIZE] = digest


def digest_of(what: str, request: bytes) -> bytes:
    """Tell one request from another, and from none."""
    spelled = bytes(sorted(request)) if len(request) <= _SORTED else request
    return blake2b(spelled, digest_size=_SIZE, key=what.encode()[:64]).digest()
