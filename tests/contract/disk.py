"""The disk under a folder of a row: it can fail, hang, and lose at a power cut what wasn't flushed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.contract.clock import WaitsError, patches

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_READS: Final = 1 << 40
"""Stands for a file that is opened to be read: ``os.O_RDONLY`` is no bit."""


class Disk:
    """One folder's disk. The files in it are real; the calls to ``os`` that concern them are looked at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.fails = 0
        """The error number that every write gets (``errno.ENOSPC``); 0: none."""
        self.refused = 0
        """How many files were not opened because of it."""
        self.meanwhile: Callable[[], object] | None = None
        """What happens, once, while the next file is flushed."""
        self._hangs = 0
        self._waiting: list[Callable[[], object]] = []
        self._flushed: dict[int, bytes] = {}
        """What is on the disk for certain, by inode."""
        self._names: dict[str, int] = {}
        """The same of the folder: inodes by name."""
        for name in ("open", "fsync", "replace", "link"):
            patches.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))

    def hang(self, *, writers: bool = False) -> None:
        """Let each thread wait that opens a file here, or only those that open it to write."""
        self._hangs = _WRITES if writers else -1

    def go_on(self) -> None:
        """Answer again."""
        self._hangs = 0
        waiting, self._waiting[:] = [*self._waiting], []
        for one in waiting:
            one()

    def cut_power(self, *, keeps_names: bool) -> None:
        """Lose what wasn't flushed. ``keeps_names``: but not the changes of the folder, as a disk may have it. Kill all processes before."""
        files = {one.name: one for one in Path(self._folder).iterdir() if one.is_file() and not one.is_symlink()}
        names = {name: one.stat().st_ino for name, one in files.items()} if keeps_names else dict(self._names)
        for one in files.values():
            one.unlink()
        for name, inode in names.items():
            Path(self._folder, name).write_bytes(self._flushed.get(inode, b""))
        self._flushed.clear()

    def _is_here(self, path: object) -> bool:
        return str(path).startswith(f"{self._folder}/")

    def _open(self, real: Any) -> Any:
        def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if self._is_here(path):
                if (flags | _READS) & self._hangs:
                    raise WaitsError(self._waiting)
                if self.fails and flags & _WRITES:
                    self.refused += 1
                    raise OSError(self.fails, os.strerror(self.fails))
            number: int = real(path, flags, *more, **named)
            if self._is_here(path) and flags & os.O_EXCL:
                self._flushed.pop(os.fstat(number).st_ino, None)  # The inode may be one of before.
            return number

        return opened

    def _fsync(self, real: Any) -> Any:
        def flushed(number: int) -> None:
            real(number)
            path = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - each write of a row comes here
            if self._is_here(path) and (happens := self.meanwhile):
                self.meanwhile = None
                happens()
            if path == self._folder:
                self._names = {entry.name: entry.inode() for entry in os.scandir(path) if entry.is_file()}
            elif self._is_here(path):
                with open(path, "rb") as file:  # noqa: PTH123 - as above
                    self._flushed[os.fstat(number).st_ino] = file.read()

        return flushed

    def _replace(self, real: Any) -> Any:
        def replaced(old: Any, new: Any, **named: Any) -> None:
            if self.fails and self._is_here(new):
                raise OSError(self.fails, os.strerror(self.fails))
            real(old, new, **named)

        return replaced

    _link = _replace
