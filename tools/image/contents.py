"""What goes into the image: deploy/image.toml, read strictly."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import msgspec

_PYTHON = re.compile(r"python(3\.\d+)-minimal")


class ImageError(Exception):
    """The image can't be made; the message says what was expected, what came, and what to do."""


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """deploy/image.toml: Debian's release, its packages by name, and what of them is left out, as globs of paths."""

    release: str
    packages: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def python(self) -> str:
        """The Python among the packages, as ``3.13``."""
        (version,) = (found[1] for name in self.packages if (found := _PYTHON.fullmatch(name)))
        return version

    def leaves_out(self, path: str) -> bool:
        """Whether a path of the root ("usr/lib/...") is left out; what licences ask to go along never is."""
        if fnmatchcase(path, "usr/share/doc/*/copyright") or path.startswith("usr/share/common-licenses/"):
            return False
        return any(fnmatchcase(path, pattern) for pattern in self.left_out)


def read(path: Path) -> Contents:
    """Read what goes into the image.

    Raises:
        ImageError: the file isn't there, or isn't what ``Contents`` says.
    """
    try:
        contents = msgspec.toml.decode(path.read_bytes(), type=Contents)
    except (OSError, msgspec.DecodeError) as error:
        raise ImageError(f"{path}: {error}") from error
    if sum(_PYTHON.fullmatch(name) is not None for name in contents.packages) != 1:
        raise ImageError(
            f"{path}: expected one python3.N-minimal among the packages, got {', '.join(contents.packages)}"
        )
    return contents


class Pin(msgspec.Struct, frozen=True):
    """A package of the lock: its name, its version, and the SHA-256 of its archive."""

    name: str
    version: str
    sha256: str


_HEAD = "# Debian's packages in the image: architecture, name, version, SHA-256. `make image-lock` writes the newest.\n"


def pin(archive: Path) -> Pin:
    """Pin a package's archive, whose name is NAME_VERSION_ARCHITECTURE.deb."""
    name, version, _ = unquote(archive.name).split("_")
    return Pin(name, version, hashlib.sha256(archive.read_bytes()).hexdigest())


def locked(pins: Mapping[str, Sequence[Pin]]) -> str:
    """Write a lock of the packages by architecture."""
    return _HEAD + "".join(
        f"{architecture} {one.name} {one.version} {one.sha256}\n" for architecture in pins for one in pins[architecture]
    )


def lock(path: Path, architecture: str, contents: Contents) -> list[Pin]:
    """Read the packages of an architecture from a lock.

    Raises:
        ImageError: it can't be read, or its packages aren't those of the contents.
    """
    try:
        rows = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
    except OSError as error:
        raise ImageError(f"{path}: {error}") from error
    pins = [Pin(*row[1:]) for row in rows if len(row) == 4 and row[0] == architecture]
    if sorted(one.name for one in pins) != sorted(contents.packages):
        raise ImageError(
            f"{path} does not have the packages of deploy/image.toml for {architecture}. Run `make image-lock`"
        )
    return pins
