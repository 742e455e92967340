"""Find, lock, read and replace the state file. All functions block: call them in a thread."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import TypeAlias

import msgspec

from gateway.memory import rows, salvage

_MAX_ASIDE = 8
_NOT_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a read that may pass soon. The file is left where it is."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Identity: TypeAlias = tuple[int, int, int, int]


class LedgerError(Exception):
    """The state file could not be read or written. The message says what happened to it, and what to do."""


class ReadFile(msgspec.Struct, frozen=True):
    """The result of a read: the valid part of the file, and what is wrong with the rest."""

    identity: Identity | None
    content: rows.Content = msgspec.field(default_factory=dict)
    complaint: str = ""


def encode(content: rows.Content) -> bytes:
    """Encode the content. Cordons, claims, sides and the generation come first, because damage is usually at the end of a file."""
    first = {"format": rows.FORMAT, "cordons": content.get("cordons", {}), "claims": content.get("claims", {})}
    first |= {key: content[key] for key in ("sides", "generation") if key in content}
    return msgspec.json.encode(first | {key: value for key, value in content.items() if key not in first})


def identity(info: os.stat_result) -> Identity:
    """Return the identity of a version of the file. Each write changes it."""
    return info.st_dev, info.st_ino, info.st_ctime_ns, info.st_size


def identity_of(path: Path) -> Identity | None:
    """Return the identity of the file at a path; None if there is no file."""
    try:
        return identity(path.lstat())
    except FileNotFoundError:
        return None


def read(path: Path) -> ReadFile | None:
    """Read the file; None if there is no file. Links are not followed, and a pipe is not waited for.

    Raises:
        OSError: it can't be read now, but perhaps later: descriptors or memory are exhausted.
    """
    try:
        descriptor = os.open(path, _READ)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                return ReadFile(None, complaint="it is no regular file")
            if info.st_mode & 0o077:
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, 0o600)
                    info = os.fstat(descriptor)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                content, complaint = salvage.decode(file.read(salvage.MAX_BYTES + 1))
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _NOT_NOW:
            raise
        return ReadFile(None, complaint=error.strerror or str(error))
    return ReadFile(identity(info), content, complaint)


def hold(path: Path) -> int:
    """Lock a file for as long as the returned descriptor is open; -1 if another process has the lock.

    Raises:
        OSError: it can't be opened or locked.
    """
    descriptor = opened(path)
    try:
        if locks(descriptor):
            return descriptor
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return -1


def opened(path: Path) -> int:
    """Open a file to lock it, and create it if it is missing. Open it for reading only: its file system may become read-only.

    Raises:
        OSError: it can't be opened.
    """
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def locks(descriptor: int) -> bool:
    """Lock an open file without waiting; return False if another process has the lock.

    Raises:
        OSError: it can't be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Free a lock, and keep the file open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def close_to_others(folder: Path) -> str:
    """Make the state directory private if it is ours; return why it is not private, empty if it is.

    If the folder has the sticky bit or sub-folders (/tmp, /var/lib), others use it as well. Then its mode stays.
    """
    try:
        info = folder.stat()
        if info.st_uid != os.geteuid():
            return f"{folder} belongs to uid {info.st_uid}, not to uid {os.geteuid()}. Change its owner (chown)"
        if not info.st_mode & 0o077:
            return ""
        folders = {entry.name for entry in list(os.scandir(folder)) if entry.is_dir(follow_symlinks=False)}
        if info.st_mode & stat.S_ISVTX or folders - {"lost+found"}:
            return f"others use {folder} too. Give the gateway a --state-dir of its own"
        folder.chmod(0o700)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{folder} cannot be made a private folder (0700): {error.strerror}"
    return ""


def put_aside(path: Path) -> str:
    """Link a damaged file to a second name, by which it stays when it is replaced; keep the newest few such files.

    It keeps its first name until then, so that a crash loses nothing. The second name identifies the file, so that it is put aside
    only once.
    """
    info = path.lstat()
    aside = path.with_name(f"ledger.damaged-{info.st_mtime_ns}-{info.st_ino}.json")
    try:
        os.link(path, aside, follow_symlinks=False)
    except FileExistsError:
        return aside.name
    except OSError:  # A folder can't have two names, and some file systems have no links.
        path.rename(aside)
    files = [entry for entry in path.parent.glob("ledger.damaged-*.json") if entry != aside and not entry.is_dir()]
    files.sort(key=lambda entry: entry.lstat().st_mtime_ns, reverse=True)
    for old in files[_MAX_ASIDE - 1 :]:
        with contextlib.suppress(OSError):
            old.unlink()
    return aside.name
