"""What goes into the image: deploy/image.toml, read strictly."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

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
