"""Writes the CDI specifications to where container runtimes look for them, and keeps them true.

A runtime reads a file whenever it changes, so a file is replaced as a whole, and only when it says something else.
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
    """A specification can't be written. The message says what was expected, what came and what to do."""


def path_of(specification: Specification, folder: Path = FOLDER) -> Path:
    """Say where a specification is written: under the name that CDI's own library gives it (GenerateNameForSpec)."""
    return folder / f"{specification['kind'].replace('/', '-')}.json"


def write(specification: Specification, folder: Path = FOLDER) -> bool:
    """Write a specification if it changed; say whether it did. It blocks (fsync): for a thread.

    Devices that the file has and the specification hasn't stay in it (``cdi.with_gone``). Files of others are never touched.

    Raises:
        CDIFileError: it can't be written, or another kind of devices has its place.
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
    """Read a file; None where there is none that could be a specification."""
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
