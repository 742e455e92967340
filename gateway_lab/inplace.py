"""Runs a command that sees another socket directory in the place of the kubelet's: many device plugins have that path compiled in.

    python -m gateway_lab.inplace SOCKET_DIR [-- COMMAND...]

The folder that holds SOCKET_DIR is /var/lib/kubelet for the command and what it starts, in a mount namespace of their own; the
machine's own is neither seen nor touched. It takes root, or user namespaces. Without a command it only says whether that works here.
It becomes the command: the same process, so signals and exit status are the command's own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gateway_lab.conformance.started import CANNOT_EXECUTE, not_started

KUBELET: Final = Path("/var/lib/kubelet")
_NEWNS, _NEWUSER = 0x20000, 0x10000000  # linux/sched.h
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000  # sys/mount.h


class InPlaceError(Exception):
    """This machine doesn't allow it. The message says what was tried, what came and what to do."""


def command(socket_dir: str, words: Sequence[str]) -> tuple[str, ...]:
    """Give the command that runs another one with ``socket_dir`` in the kubelet's place."""
    return (sys.executable, "-m", "gateway_lab.inplace", socket_dir, "--", *words)


def enter(socket_dir: Path) -> None:
    """Put the folder that holds ``socket_dir`` in the place of the kubelet's, for this process and its children.

    Raises:
        InPlaceError: it isn't allowed here.
    """
    folder = socket_dir.absolute().parent
    try:
        _unshare()
        _mount(None, Path("/"), _REC | _PRIVATE)
        if not KUBELET.is_dir():
            _make_room()
        _mount(folder, KUBELET, _BIND | _REC)
    except OSError as error:
        raise InPlaceError(
            f"expected to put {folder} in the place of {KUBELET} in a mount namespace of its own, but: {error}; run it as root, "
            "or allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns)"
        ) from error


def see_that_it_works() -> None:
    """Try it in another process.

    Raises:
        InPlaceError: it isn't allowed here.
    """
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        tried = [sys.executable, "-m", "gateway_lab.inplace", f"{folder}/device-plugins"]
        done = subprocess.run(tried, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise InPlaceError(done.stderr.strip())


def _unshare() -> None:
    """Leave the machine's mount namespace: as root, or as root of a user namespace of one's own."""
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEWNS)
    except PermissionError:
        _call("unshare", _NEWNS | _NEWUSER)
        own = Path("/proc/self")
        (own / "setgroups").write_text("deny", encoding="ascii")
        (own / "uid_map").write_text(f"0 {user} 1", encoding="ascii")
        (own / "gid_map").write_text(f"0 {group} 1", encoding="ascii")


def _make_room() -> None:
    """Make the kubelet's folder where the machine has none, and leave nothing there: its parent becomes a copy in memory."""
    parent = KUBELET.parent
    before = os.open(parent, os.O_PATH | os.O_DIRECTORY)
    _call("mount", b"none", bytes(parent), b"tmpfs", 0, None)
    KUBELET.mkdir()
    place = Path("/proc/self/fd", str(before))
    for entry in place.iterdir():
        if entry.is_symlink():
            (parent / entry.name).symlink_to(entry.readlink())
        elif entry.is_dir():
            (parent / entry.name).mkdir()
            _mount(entry, parent / entry.name, _BIND | _REC)
    os.close(before)


def _mount(source: Path | None, target: Path, flags: int) -> None:
    _call("mount", None if source is None else bytes(source), bytes(target), None, flags, None)


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main(arguments: Sequence[str]) -> int:
    """Become the command."""
    socket_dir, *words = arguments
    try:
        enter(Path(socket_dir))
    except InPlaceError as error:
        print(error, file=sys.stderr)
        return 1
    if not words:
        return 0
    try:
        os.execvp(words[1], words[1:])  # noqa: S606 - a command that somebody gave, without a shell
    except OSError as error:
        print(not_started(words[1], error), file=sys.stderr)
        return CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
