"""One gateway's folder on the node, with its sockets and a lock that shows that the gateway lives.

Each gateway binds its servers once, in its own folder below the socket directory: no kubelet cleans a sub-folder (run on 1.8 to
1.37). The gateway locks a file in its folder. The kernel frees the lock however the gateway ends, so a folder without a lock
may be removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from devices.files import NotPlainError, read_plain
from gateway.age import HOST_SERVICE_NS, TOKEN, Age
from gateway.configuration.settings import SOCKET_DIR
from gateway.kubelet.identity import folder_id

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "gateway"
"""The sub-folder of the socket directory that all gateways share."""
_LOCK = "lock"
_BORN = re.compile(rb"[0-9]{1,20}\n")
_UID = re.compile(r"[0-9A-Za-z-]{1,64}")
_POD = "pod-"
_MAX_PODS = 16
"""Most pods whose arrival on the node is remembered."""
_MAX_PEERS = 512
"""Most gateways' folders that are read. ``sweep`` removes those of dead gateways."""


def socket_name(resource: str) -> str:
    """Return the name of a resource's socket in a gateway's folder. It is short, and the same for every gateway."""
    from hashlib import sha256  # noqa: PLC0415 - half a MiB that commands need not pay

    return f"{sha256(resource.encode()).hexdigest()[:8]}.sock"


def make_folder(folder: Path) -> str:
    """Make the socket directory if it is missing. Return why it can't be used, '' if it can.

    A service of the host may start before the node's first kubelet. Only the last folder of the path is made, and only under the
    kubelet's name for it: otherwise a typing error would make a folder that no kubelet uses.
    """
    if folder.name == SOCKET_DIR.name:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o750, exist_ok=True)
    if folder_id(folder) is None and os.path.lexists(folder):
        return f"{folder} isn't a folder: correct --socket-dir (kubelets have {SOCKET_DIR})"
    if folder_id(folder) is None:
        there = next(parent for parent in folder.absolute().parents if folder_id(parent) is not None)
        return (
            f"there is no folder {folder}, the nearest one is {there}: correct --socket-dir (kubelets have {SOCKET_DIR}), or, "
            f"if a kubelet is to come there, start it or make the folder: mkdir -p {folder}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} can't be written to by the user {os.geteuid()}: run the gateway as root, as the kubelet is"
    return ""


def boot_ns() -> int:
    """Return the boot clock in nanoseconds. It never jumps, and runs on while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Instance:
    """The folder and the lock of this gateway.

    Args:
        socket_dir: the kubelet's socket directory.
        host_service: True if this is the node's own service.
        pod_uid: the UID of the gateway's pod, whose age is the gateway's; empty outside a pod.
    """

    def __init__(self, socket_dir: Path, *, host_service: bool = False, pod_uid: str = "") -> None:
        self.age = Age(HOST_SERVICE_NS if host_service else boot_ns(), os.urandom(4).hex())
        """When this gateway started on the node; after ``create``, when its pod first did."""
        self._shared = socket_dir / FOLDER
        self.folder, self._unseen = self._shared / self.token, self._shared / f".{self.token}"
        self._pod = pod_uid if _UID.fullmatch(pod_uid) and not host_service else ""
        self._lock = -1

    @property
    def token(self) -> str:
        """Eight hexadecimal digits, different for each gateway of the node."""
        return self.age.token

    def socket(self, resource: str) -> Path:
        """Return the path on which a resource's server is bound."""
        return self.folder / socket_name(resource)

    def create(self) -> None:
        """Make the folder, and lock a file in it; then give the folder its final name. May be called again after ``remove``.

        Raises:
            OSError: the socket directory is missing or not writable.
        """
        self._shared.mkdir(mode=0o750, exist_ok=True)
        if self._pod:
            self.age = Age(_born(self._shared, self._pod, self.age.born_ns), self.token)
        self._unseen.mkdir(mode=0o750)
        self._lock = os.open(self._unseen / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._unseen.rename(self.folder)

    def remove(self) -> None:
        """Remove the folder and free the lock. Never raises."""
        _remove_folder(self.folder)
        _remove_folder(self._unseen)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _born(shared: Path, pod: str, now_ns: int) -> int:
    """Return when a pod's first gateway started, from the file that it wrote. Return ``now_ns`` if the file can't be used."""
    path = shared / f"{_POD}{pod}"
    born = _read_born(path, now_ns)
    if born is None:
        others = sorted(shared.glob(f"{_POD}*"), key=lambda one: _read_born(one, now_ns) or 0)
        for old in {path, *others[: 1 - _MAX_PODS]}:
            with contextlib.suppress(OSError):
                old.unlink()
        with contextlib.suppress(OSError), path.open("x") as file:
            file.write(f"{now_ns}\n")
        born = _read_born(path, now_ns)
    return now_ns if born is None else born


def _read_born(path: Path, now_ns: int) -> int | None:
    """Read when a pod's first gateway started; None if the file can't be read or is from an earlier boot."""
    try:
        text = read_plain(path, 32)
    except (OSError, NotPlainError):
        return None
    return int(text) if _BORN.fullmatch(text) and int(text) <= now_ns else None


def alive(socket_dir: Path) -> frozenset[str]:
    """Return the tokens of the living gateways.

    Raises:
        OSError: this process has no file descriptor left, so the answer is unknown.
    """
    found = _instances(socket_dir / FOLDER)
    return frozenset(entry.name for entry in found if not entry.name.startswith(".") and _locked(entry.path))


def sweep(socket_dir: Path) -> list[str]:
    """Remove the folders and sockets of dead gateways; return what was removed."""
    removed = []
    for entry in _instances(socket_dir / FOLDER):
        folder = Path(entry.path)
        if _locked(entry.path) or _in_the_making(folder):
            continue
        token = folder.name.lstrip(".")
        for name in socket_dir.glob(f"{token}-*.sock"):
            with contextlib.suppress(OSError):
                name.unlink()
        _remove_folder(folder)
        removed.append(folder.name)
    return removed


def _instances(shared: Path) -> Iterator[os.DirEntry[str]]:
    try:
        found = [
            entry
            for entry in os.scandir(shared)
            if TOKEN.fullmatch(entry.name.lstrip(".")) and entry.is_dir(follow_symlinks=False)
        ]
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        return
    yield from sorted(found, key=lambda entry: entry.name)[:_MAX_PEERS]


def _locked(folder: str) -> bool:
    try:
        descriptor = os.open(f"{folder}/{_LOCK}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(descriptor)


def _in_the_making(folder: Path) -> bool:
    """Return True if a gateway may be making this folder and hasn't locked it yet. That takes microseconds; ten seconds are allowed."""
    with contextlib.suppress(OSError):
        return folder.name.startswith(".") and time.time() - folder.stat().st_mtime < 10
    return True


def _remove_folder(folder: Path) -> None:
    """Remove a folder with sockets and a lock. Never follows links, never descends."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISSOCK(mode) or entry.name == _LOCK:
                Path(entry.path).unlink()
        folder.rmdir()
