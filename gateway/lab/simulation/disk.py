"""A disk that loses what wasn't flushed: the calls that the ledger makes, over files that a power cut may tear.

It stands in for ``os``, ``fcntl`` and ``time`` where the ledger is read and written, and its ``Place`` for a ``pathlib.Path``. A process
that is killed leaves what it wrote; a power cut leaves of each file what was flushed (``fsync``) and by chance a part of
what wasn't, and of each change of a folder that wasn't flushed, by chance and in any order, some.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import itertools
import os
import pkgutil
import stat
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Final, Self

import gateway.memory
from devices import files
from gateway.memory import file as ledger_file

_SECOND_NS: Final = 1_000_000_000


class KilledError(BaseException):
    """The process that was writing is dead."""


class WaitsError(BaseException):
    """The process would wait for a lock that another one holds: it is to try again later."""


class _Told:
    """What ``os.lstat`` tells, as far as the ledger asks for it."""

    __slots__ = ("st_ctime_ns", "st_ino", "st_mode", "st_mtime_ns", "st_size")
    st_dev: Final = 1
    st_uid: Final = os.geteuid()

    def __init__(self, number: int, changed: int, size: int, mode: int) -> None:
        self.st_ino, self.st_size, self.st_mode = number, size, mode
        self.st_ctime_ns = self.st_mtime_ns = changed


_FOLDER: Final = _Told(0, 0, 0, stat.S_IFDIR | 0o700)


class _File:
    """One file: ``data`` as processes see it, ``flushed`` as a power cut leaves it for certain."""

    __slots__ = ("changed", "data", "flushed", "mode", "number")

    def __init__(self, number: int, mode: int, changed: int) -> None:
        self.number, self.mode, self.changed = number, mode, changed
        self.data = self.flushed = b""


class Disk:
    """The files of one state directory, flat.

    Args:
        random: what a power cut spares.
        now: the time of day, in seconds.
    """

    def __init__(self, random: Callable[[], float], now: Callable[[], float]) -> None:
        self.random, self._now = random, now
        self._names: dict[str, _File] = {}
        self._flushed_names: dict[str, _File] = {}
        self._changes: list[tuple[str, _File | None]] = []
        """What happened to names since the folder was flushed: a file that got one, or None for one that lost it."""
        self._open: dict[int, _File | None] = {}
        """By descriptor; None is the folder."""
        self._numbers = 0
        self._locked: dict[int, int] = {}
        """Who holds the lock of a file: descriptors by the file's number."""
        self.full = False
        self.spares = -1
        """After how many calls who is writing dies; negative: never."""
        self.lies = False
        """Whether it says that it has flushed what it hasn't."""
        self._meanwhile: Callable[[], None] | None = None
        self._until = 0

    # What happens to a disk.

    def power_cut(self) -> None:
        """Forget what wasn't flushed, or a part of it."""
        names = dict(self._flushed_names)
        for name, file in self._changes:
            if self.random() < 0.5:
                if file is None:
                    names.pop(name, None)
                else:
                    names[name] = file
        for file in {*names.values()}:
            if file.flushed != file.data:
                kept = int(self.random() * (len(file.data) + 1))
                file.data = file.data[:kept] if self.random() < 0.7 else file.flushed
                file.flushed = file.data
        self._names, self._flushed_names, self._changes = names, dict(names), []
        self._open.clear()
        self._locked.clear()

    def interrupt(self, calls: int, meanwhile: Callable[[], None] | None) -> None:
        """Let another process have its turn after so many calls of the one that is writing; None: nobody has."""
        self._until, self._meanwhile = calls, meanwhile

    def died(self) -> None:
        """Close what a dead process had open: one process writes at a time."""
        self._open.clear()
        self._locked.clear()

    # What ``os`` does, as far as the ledger asks for it.

    def open(self, path: Place, flags: int, mode: int = 0o600) -> int:
        """Open a file or the folder."""
        self._step()
        self._numbers += 1
        if path.name == Place.FOLDER:
            self._open[self._numbers] = None
            return self._numbers
        file = self._names.get(path.name)
        if file is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            file = self._name(path.name, _File(self._numbers, mode, self._time()))
        elif flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "File exists")
        if flags & os.O_TRUNC:
            file.data = b""
        self._open[self._numbers] = file
        return self._numbers

    def write(self, descriptor: int, data: bytes) -> int:
        """Append, up to 512 bytes at a time."""
        self._step()
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        file = self._file(descriptor)
        file.data += bytes(data[:512])
        file.changed = self._time()
        return min(len(data), 512)

    def fsync(self, descriptor: int) -> None:
        """Flush a file, or the names of the folder."""
        self._step()
        if self.lies:
            return
        file = self._open[descriptor]
        if file is not None:
            file.flushed = file.data
        else:
            self._flushed_names, self._changes = dict(self._names), []

    def fchmod(self, descriptor: int, mode: int) -> None:
        """Change who may read an open file."""
        self._file(descriptor).mode = mode

    def replace(self, old: Place, new: Place) -> None:
        """Give a file another's name, in one step."""
        self._step()
        file = self._find(old)
        del self._names[old.name]
        file.changed = self._time()
        # One change of the folder: whoever finds the new name doesn't find the old one.
        self._changes = [change for change in self._changes if change[0] != old.name]
        self._names[new.name] = file
        self._changes.append((new.name, file))

    def link(self, old: Place, new: Place, *, follow_symlinks: bool = True) -> None:  # noqa: ARG002 - os.link's signature
        """Give a file one more name."""
        self._step()
        if new.name in self._names:
            raise FileExistsError(errno.EEXIST, "File exists")
        self._name(new.name, self._find(old))

    def fstat(self, descriptor: int) -> Any:
        """Tell of an open file."""
        return self._told(self._file(descriptor))

    def lstat(self, path: Place) -> Any:
        """Tell of a file."""
        if path.name == Place.FOLDER:
            return _FOLDER
        return self._told(self._find(path))

    def unlink(self, path: Place) -> None:
        """Take a name away."""
        self._step()
        self._find(path)
        del self._names[path.name]
        self._changes.append((path.name, None))

    def names(self) -> list[str]:
        """List the names."""
        return list(self._names)

    def read(self, descriptor: int) -> bytes:
        """Read a whole file."""
        return self._file(descriptor).data

    def close(self, descriptor: int) -> None:
        """Close a file, and let go of its lock."""
        file = self._open.pop(descriptor, None)
        if file is not None and self._locked.get(file.number) == descriptor:
            del self._locked[file.number]

    def flock(self, descriptor: int, operation: int) -> None:
        """Take a lock that nobody else has."""
        if operation & fcntl.LOCK_UN:
            return
        file = self._file(descriptor)
        if self._locked.setdefault(file.number, descriptor) != descriptor:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def _step(self) -> None:
        if self.spares == 0:
            self.spares = -1
            raise KilledError
        self.spares -= self.spares > 0
        self._until -= 1
        if self._meanwhile is not None and self._until < 0:
            meanwhile, self._meanwhile = self._meanwhile, None
            spares, self.spares = self.spares, -1  # Who dies is the one that began.
            meanwhile()
            self.spares = spares

    def _name(self, name: str, file: _File) -> _File:
        self._names[name] = file
        self._changes.append((name, file))
        return file

    def _file(self, descriptor: int) -> _File:
        file = self._open[descriptor]
        assert file is not None
        return file

    def _find(self, path: Place) -> _File:
        file = self._names.get(path.name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return file

    def _told(self, file: _File) -> Any:
        return _Told(file.number, file.changed, len(file.data), stat.S_IFREG | file.mode)

    def time_ns(self) -> int:
        """Tell the time of day."""
        return int(self._now() * _SECOND_NS)

    def _time(self) -> int:
        self._numbers += 1
        return self.time_ns() + self._numbers


class _Waiting:
    """Stands in for ``time``: who would sleep for a lock lets the one that has it go on first."""

    @staticmethod
    def monotonic() -> float:
        return 0.0

    @staticmethod
    def sleep(_: float) -> None:
        raise WaitsError


class Place:
    """A path on a ``Disk``: its folder, or a name in it."""

    FOLDER: Final = "state"
    __slots__ = ("_disk", "name")

    def __init__(self, disk: Disk, name: str = FOLDER) -> None:
        self._disk, self.name = disk, name

    def __truediv__(self, name: str) -> Place:
        return Place(self._disk, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def parent(self) -> Place:
        """The folder."""
        return Place(self._disk)

    def with_name(self, name: str) -> Place:
        """Give another name in the same folder."""
        return Place(self._disk, name)

    def mkdir(self, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: the folder is there."""

    def lstat(self) -> Any:
        """As ``pathlib`` has it."""
        return self._disk.lstat(self)

    def is_dir(self) -> bool:
        """As ``pathlib`` has it."""
        return self.name == self.FOLDER

    stat = lstat

    def unlink(self, missing_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - pathlib's signature
        """As ``pathlib`` has it."""
        try:
            self._disk.unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: Place) -> None:
        """As ``pathlib`` has it."""
        self._disk.replace(self, target)

    def glob(self, pattern: str) -> Iterator[Place]:
        """As ``pathlib`` has it, for names."""
        return (Place(self._disk, name) for name in self._disk.names() if fnmatchcase(name, pattern))


class Mounted:
    """Whichever disk the ledger is to write on, in place of the machine's: what is put into the ledger's module.

    One for a process: a schedule mounts its disk, and the next one its own.
    """

    def __init__(self) -> None:
        self._disk: Disk | None = None
        uid, numbers = os.geteuid(), itertools.count()
        self.geteuid = lambda: uid
        self.urandom = lambda size: next(numbers).to_bytes(size, "big")  # Names that no other file has.
        for module, constants in ((os, "O_"), (fcntl, "LOCK_")):
            self.__dict__.update({name: getattr(module, name) for name in dir(module) if name.startswith(constants)})

    def mount(self, disk: Disk) -> None:
        """Put a disk beneath the ledger."""
        if disk is not self._disk:
            self._disk = disk
            self.__dict__.update({name: getattr(disk, name) for name in _CALLS})

    def __getattr__(self, name: str) -> Any:
        """Give what no disk is asked for."""
        return getattr(os, name)

    def scandir(self, _: Any) -> list[Any]:
        """List the folder as ``os.scandir`` does, as far as names go."""
        return [Place(self._there, name) for name in self._there.names()]

    def fdopen(self, descriptor: int, *_: Any, **__: Any) -> _Reading:
        """Open a descriptor for one read."""
        return _Reading(self._there.read(descriptor))

    def place(self, name: str) -> Place:
        """Give a path on the disk."""
        return Place(self._there, name)

    @property
    def _there(self) -> Disk:
        assert self._disk is not None
        return self._disk


_CALLS: Final = frozenset({"open", "write", "fsync", "replace", "link", "fstat", "close", "flock", "fchmod", "time_ns"})


class _Reading:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, size: int) -> bytes:
        return self._data[:size]


mounted: Final = Mounted()
"""The disk that is written on."""


def install() -> None:
    """Let the modules of the ledger call the mounted disk where they call the machine's."""
    setattr(files, "time", mounted)  # noqa: B010 - a module's name, not a type
    names = [found.name for found in pkgutil.iter_modules(gateway.memory.__path__, "gateway.memory.")]
    for module in map(importlib.import_module, [*names, files.__name__]):
        for attribute in ("os", "fcntl"):
            if hasattr(module, attribute):
                setattr(module, attribute, mounted)
        if module is ledger_file:
            setattr(module, "time", _Waiting)  # noqa: B010 - a module's name, not a type
        if hasattr(module, "Path"):
            setattr(module, "Path", mounted.place)  # noqa: B010 - a module's name, not a type
