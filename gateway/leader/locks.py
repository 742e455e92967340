"""The two locks of the leader.

The first is in the gateways' folder below the kubelet's socket directory, so gateways with different state directories share it.
The second is in the state directory, and guards the state file. The kernel frees both when their holder ends. A lock file that
was replaced (``rm -rf``, an overlay) guards nothing; ``lost`` detects that.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from devices.files import NotPlainError, read_plain
from gateway.age import TOKEN
from gateway.leader.instance import FOLDER
from gateway.memory import file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

NAME: Final = "leader.lock"
_MAX_BYTES: Final = 8192


class Signature(Struct, frozen=True):
    """The leader's entry in the first lock: its token, and its state directory (``state``: device and inode)."""

    token: str = ""
    state: str = ""
    path: str = ""


class Locks:
    """Both locks. The leader holds the first; the gateway that writes the state file holds the second.

    If the second can't be opened (the disk is full, read-only or hangs), no gateway can write the state file. Then the holder of
    the first lock leads, and locks the second as soon as it can. ``unguarded`` is the reason.

    Args:
        socket_dir: the kubelet's socket directory.
        state_dir: the state directory; it is made if it is missing.
        token: the gateway's own token.
    """

    def __init__(self, socket_dir: Path, state_dir: Path, token: str) -> None:
        self._first, self._second = socket_dir / FOLDER / NAME, state_dir / NAME
        self._token = token
        self._held: dict[Path, int] = {}
        """The file descriptors of the locks that are held."""
        self._opened = -1
        """The descriptor of the second lock, opened and not locked."""
        self.ready = False
        """True if ``open`` was called for the second lock."""
        self.unguarded = ""
        """Why the second can't be opened; empty if it can."""

    @property
    def held(self) -> bool:
        """True if the first lock is held: this gateway may lead."""
        return self._first in self._held

    @property
    def whole(self) -> bool:
        """True if both are held."""
        return self._second in self._held

    def open(self) -> None:
        """Open the second lock. It blocks: call it in a thread."""
        if self._second in self._held:
            return
        self._forget()
        try:
            self._second.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._opened = file.opened(self._second)
        except OSError as error:
            self.unguarded = f"{self._second}: {error.strerror}"
        else:
            self.unguarded = ""
        self.ready = True

    def take(self) -> bool:
        """Lock both without waiting. Return False if another gateway holds one.

        Raises:
            OSError: the first can't be opened, or one can't be locked. An error never counts as a free lock.
        """
        before = self.held
        if not before:
            self._first.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            if (descriptor := file.hold(self._first)) < 0:
                return False
            self._held[self._first] = descriptor
        if self._opened >= 0:
            try:
                free = file.locks(self._opened)
            except OSError:
                self.free()
                raise
            if not free:
                self.free()
                return False
            self._held[self._second], self._opened = self._opened, -1
        if self.lost():  # One was replaced between its opening and its locking.
            self.free()
            self._forget()
            return False
        if not before:
            self._sign()
        return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[], None]]:
        """Guard a write of the state file; call it in a thread. The yielded function raises OSError if a lock was replaced.

        Raises:
            OSError: this process can't get the second lock.
        """
        passing = -1
        if self.held and self._second not in self._held:
            raise OSError(errno.ENOLCK, self.unguarded)
        if not self.held and (passing := file.hold(self._second)) < 0:
            raise OSError(errno.ENOLCK, "another gateway has the lock of the state directory")
        guards = {**self._held} if passing < 0 else {self._second: passing}

        def check() -> None:
            freed = "" if passing >= 0 or guards == self._held else "another gateway may lead by now"
            if reason := freed or _replaced(guards):
                raise OSError(errno.ENOLCK, reason)

        try:
            yield check
        finally:
            if passing >= 0:
                os.close(passing)

    def lost(self) -> str:
        """Return which of the held locks was replaced; empty if none was."""
        return _replaced(self._held)

    def free(self) -> None:
        """Free both. The second stays open, so that locking it again needs no disk."""
        if (first := self._held.pop(self._first, -1)) >= 0:
            if (second := self._held.pop(self._second, -1)) >= 0:
                file.unlock(second)
                self._opened = second
            os.close(first)

    def close(self, *, last: bool) -> None:
        """Free and close both. If this is the ``last`` gateway of the node, remove the first lock's file."""
        if self.held and last and not self.lost():
            with contextlib.suppress(OSError):
                self._first.unlink()
        self.free()
        self._forget()

    def holder(self) -> Signature:
        """Return the gateway that holds the first lock, or held it last."""
        with contextlib.suppress(OSError, NotPlainError, ValueError):
            said = msgspec.json.decode(read_plain(self._first, _MAX_BYTES), type=Signature)
            if TOKEN.fullmatch(said.token):
                return said
        return Signature()

    def state(self) -> str:
        """Return the device and inode of the state directory, as text."""
        try:
            found = self._second.parent.stat()
        except OSError:
            return ""
        return f"{found.st_dev}:{found.st_ino}"

    def _forget(self) -> None:
        """Close the second lock's file, because another file may have its name now."""
        self.ready = False
        if self._opened >= 0:
            os.close(self._opened)
            self._opened = -1

    def _sign(self) -> None:
        """Write our token into the first lock, so that other gateways find the leader. Without it, they only try the locks."""
        said = msgspec.json.encode(Signature(self._token, self.state(), str(self._second.parent)))
        with contextlib.suppress(OSError):
            descriptor = os.open(self._first, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.path.samestat(os.fstat(descriptor), os.fstat(self._held[self._first])):
                    os.pwrite(descriptor, said, 0)
                    os.ftruncate(descriptor, len(said))
            finally:
                os.close(descriptor)


def _replaced(held: Mapping[Path, int]) -> str:
    """Return which of these locks was replaced by another file; empty if none was."""
    for path, descriptor in [*held.items()]:
        try:
            there = os.path.samestat(os.fstat(descriptor), path.lstat())
        except OSError as error:
            return f"{path}: {error.strerror}"
        if not there:
            return f"{path} is another file by now"
    return ""
