"""What is being tried, where it outlives who tries it: what ended one gateway must not end the next one, too.

The parent and its gateways share a page of memory. A gateway notes there, as a digest, each request while it answers it, each
file while it reads it, and each device while it looks at it. When one crashes (a signal of its own making, such as SIGSEGV), the
parent keeps what it was trying then as suspect, and no gateway of the pair tries that again: a crash that repeats with every try
would end them all. A gateway that somebody else killed (SIGKILL, out of memory) leaves no suspects.
"""

from __future__ import annotations

import asyncio
import mmap
import signal
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from threading import Lock
from typing import Any, Final, TypeVar

from devices.model import Fault, RefusedError
from devices.source import Hindrance

CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS})
"""The signals by which a process ends itself."""
LANES: Final = 2
"""How many gateways a pair has."""
AT_ONCE: Final = 64
"""How much of what one gateway tries at once is noted; of more, some isn't."""
SUSPECTS: Final = 64
"""How many are kept; then the oldest is forgotten."""
PATIENCE: Final = 1.0
"""Seconds for which what the other gateway is trying is waited for. (A crash is known within milliseconds.)"""
_POLL: Final = 0.001
_SIZE: Final = 8
"""Bytes of a digest."""
_NONE: Final = bytes(_SIZE)
_LANE: Final = AT_ONCE * _SIZE
_SUSPECT: Final = LANES * _LANE
"""Where the suspects begin."""
_SORTED: Final = 4096
"""Bytes up to which a request's digest doesn't depend on the order of what it names: a kubelet's is by chance."""
_SHOWN: Final = 200

_Answer = Callable[[Any, bytes, Any], Awaitable[bytes]]
_T = TypeVar("_T")


class Flight:
    """The shared page. Make it before the fork; each gateway has a lane of it."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _SUSPECT + SUSPECTS * _SIZE)
        self._lane = self._next = 0
        self._entering = Lock()
        self._left_out: dict[str, str] = {}

    def take(self, lane: int) -> None:
        """Note in this lane from now on (gateway)."""
        self._lane = lane

    def landed(self, lane: int, status: int) -> int:
        """Clear the lane of a gateway that ended (parent); return how much of what it tried is suspect for that.

        Args:
            lane: the gateway's.
            status: how it ended; negative: by that signal.
        """
        found = {digest for at in _places(lane) if (digest := self._read(at)) != _NONE}
        for digest in found if -status in CRASHES else ():
            self._write(_SUSPECT + self._next % SUSPECTS * _SIZE, digest)
            self._next += 1
        for at in _places(lane):  # Last: who waits for it to be over looks at the suspects then.
            self._write(at, _NONE)
        return len(found) if -status in CRASHES else 0

    def guard(self, what: str, answer: _Answer) -> _Answer:
        """Note each request while it is answered; refuse one that ended a gateway (gateway).

        Args:
            what: the call and the resource, for the error.
            answer: answers a request (dialect, request, context).
        """

        async def guarded(dialect: Any, request: bytes, context: Any) -> bytes:
            digest, deadline = digest_of(what, request), time.monotonic() + PATIENCE
            while self._other_tries(digest) and time.monotonic() < deadline:  # noqa: ASYNC110 - it died: the parent says of what
                await asyncio.sleep(_POLL)
            if self._is_suspect(digest):
                raise RefusedError(
                    Fault.FAILED_PRECONDITION,
                    f"expected {what} to be answered, and a gateway of this pair crashed while it answered this very request, so "
                    f"it is refused now: {ascii(request)[:_SHOWN]}. Restart the container to have it tried again, and report it",
                )
            self._enter(digest)
            try:
                return await answer(dialect, request, context)
            finally:
                self._leave(digest)

        return guarded

    def decoding(
        self, what: str, decode: Callable[[bytes], _T], instead: Callable[[bytes], _T]
    ) -> Callable[[bytes], _T]:
        """Note a file's bytes while they are decoded; leave what ended a gateway to ``instead`` (gateway, in any thread)."""

        def noted(data: bytes) -> _T:
            if self.begin(what, data):
                return instead(data)
            try:
                return decode(data)
            finally:
                self.end(what, data)

        return noted

    def begin(self, what: str, about: bytes = b"") -> str:
        """Note an attempt (``devices.source.Attempts``)."""
        digest = digest_of(what, about)
        self._take_turn(digest)
        if not self._is_suspect(digest):
            self._left_out.pop(what, None)
            return ""
        self._leave(digest)
        reason = (
            f"a gateway of this pair crashed at {what}, so it is left out from now on: restart the container to have it tried "
            "again, and report it"
        )
        self._left_out[what] = reason
        return reason

    def end(self, what: str, about: bytes = b"") -> None:
        """Note that an attempt is over."""
        self._leave(digest_of(what, about))

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Say what this gateway left out, because it ended another one."""
        return tuple(Hindrance("pair", reason) for reason in [*self._left_out.values()])

    def _take_turn(self, digest: bytes) -> None:
        """Note an attempt as soon as the other gateway isn't at the same, or patience ends. Of two at once, the first lane goes on."""
        self._enter(digest)
        deadline = time.monotonic() + PATIENCE
        while self._other_tries(digest) and time.monotonic() < deadline:
            if self._lane:
                self._leave(digest)
            while self._other_tries(digest) and time.monotonic() < deadline:
                time.sleep(_POLL)
            if self._lane:
                self._enter(digest)

    def _is_suspect(self, digest: bytes) -> bool:
        return self._page.find(digest, _SUSPECT) >= 0

    def _other_tries(self, digest: bytes) -> bool:
        other = (1 - self._lane) * _LANE
        return self._page.find(digest, other, other + _LANE) >= 0

    def _enter(self, digest: bytes) -> None:
        with self._entering:
            at = next((at for at in _places(self._lane) if self._read(at) == _NONE), None)
            if at is not None:
                self._write(at, digest)

    def _leave(self, digest: bytes) -> None:
        with self._entering:
            at = next((at for at in _places(self._lane) if self._read(at) == digest), None)
            if at is not None:
                self._write(at, _NONE)

    def _read(self, at: int) -> bytes:
        return self._page[at : at + _SIZE]

    def _write(self, at: int, digest: bytes) -> None:
        self._page[at : at + _SIZE] = digest


def _places(lane: int) -> range:
    return range(lane * _LANE, (lane + 1) * _LANE, _SIZE)


def digest_of(what: str, request: bytes) -> bytes:
    """Tell one request from another, and from none."""
    spelled = bytes(sorted(request)) if len(request) <= _SORTED else request
    return blake2b(spelled, digest_size=_SIZE, key=what.encode()[:64]).digest()
