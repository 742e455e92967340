"""Write CDI specifications to the folder where container runtimes look for them.

A runtime reads a file whenever it changes, so a file is replaced atomically, and only if its content differs.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Final

from devices import files
from devices.gpu.cdi import Specification, with_gone

FOLDER: Final = Path("/var/run/cdi")
_MOST_BYTES: Final = 8 * 2**20


class CDIFileError(Exception):
    """A specification can't be written. The message says what is wrong and what to do."""


def path_of(specification: Specification, folder: Path = FOLDER) -> Path:
    """Return the path of a specification, named as by CDI's own library (GenerateNameForSpec)."""
    return folder / f"{specification['kind'].replace('/', '-')}.json"


def write(specification: Specification, folder: Path = FOLDER) -> bool:
    """Write a specification if it changed; return True if it did. It blocks (fsync): call it in a thread.

    Devices that only the file has stay in it (``cdi.with_gone``). Other programs' files are never changed.

    Raises:
        CDIFileError: it can't be written, or its path has another kind of devices.
    """
    path = path_of(specification, folder)
    try:
        files.sweep(folder, path.name)
        content = _read(path)
        old = _parsed(content)
        if isinstance(old, dict) and old.get("kind", specification["kind"]) != specification["kind"]:
            raise CDIFileError(
                f"{path} has CDI devices of the kind {str(old['kind'])[:80]!r}, not "
                f"{specification['kind']}, so another program wrote it. Move it away"
            )
        new = (json.dumps(with_gone(specification, old), indent=1) + "\n").encode()
        if new == content:
            return False
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(path, new, 0o644)
    except OSError as error:
        raise CDIFileError(
            f"cannot write the CDI specification {path}: {error}. Mount the host's folder so that the "
            "gateway can write to it"
        ) from error
    return True


def _read(path: Path) -> bytes | None:
    """Read a file; None if it doesn't exist or can't be a specification."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        content = file.read(_MOST_BYTES + 1) if is_file else b""
    return content if is_file and len(content) <= _MOST_BYTES else None


def _parsed(content: bytes | None) -> object:
    try:
        return json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
