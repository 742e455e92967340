"""Whether the packages that are imported are this project's own: another one's of the same name hides them, or was merged in.

``gateway``, ``adapters`` and ``devices`` are names that others have, too (docs/adr/0008). This is the first module of a command,
and imports nothing of them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("gateway", "adapters", "devices")
PROJECT: Final = "device-plugin-gateway"
"""The word that the first file of each package has."""


def require() -> None:
    """End the process with a message where a package is another project's."""
    if found := mixed_up():
        sys.stderr.write(f"{found}\n")
        sys.exit(2)  # Starting again doesn't help.


def mixed_up() -> str:
    """Say which package is another project's, where it is and what to do; '' where all are ours."""
    ours = Path(__file__).parents[2]
    for name in PACKAGES:
        spec = find_spec(name)
        origin = Path(spec.origin) if spec is not None and spec.origin else None
        if origin is None or origin.parents[1] != ours or PROJECT.encode() not in origin.read_bytes():
            return (
                f"the Python package {name!r} of {PROJECT} should be in {ours / name}, but {_who(name)} "
                f"is in {origin or 'no file'}. Packages of the same name hide or overwrite each other, so "
                f"{PROJECT} needs an environment of its own: python3 -m venv DIR && DIR/bin/pip install "
                f"{PROJECT}, without PYTHONPATH"
            )
    return ""


def _who(name: str) -> str:
    """Name the installed distributions that brought a package."""
    from importlib.metadata import packages_distributions

    others = sorted({one for one in packages_distributions().get(name, ()) if one != PROJECT})
    return f"that of {', '.join(others)[:200]}" if others else "another one"
