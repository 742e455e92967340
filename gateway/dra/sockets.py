"""The registration sockets in the kubelet's folder ``plugins_registry``, by which it finds drivers.

Each instance has its own: two serve at once during a roll (1.33 and later), the kubelet calls the one that registered last, and
the end of one leaves the other alone. The claims' API is served on the same socket: a registration without an endpoint means its
own socket (operation_generator.go of the kubelet), so that nobody has to know how the kubelet sees our paths.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Final

from gateway.kubelet.watch import listens

FOLDER: Final = "plugins_registry"
_SHOWN: Final = 14
"""Characters of a driver's name that are shown: a path has at most 107 bytes, a driver's name 63."""
_TOKEN: Final = re.compile(r"[0-9a-f]{8}")


def path_of(folder: Path, driver: str, token: str) -> Path:
    """Say where the instance with a token (eight hexadecimal digits) has its socket for a driver."""
    return folder / f"{_stem(driver)}-{token}.sock"


def others(folder: Path, driver: str, token: str) -> list[Path]:
    """Give the living sockets of other instances for a driver."""
    own = path_of(folder, driver, token)
    return [path for path in _all(folder, driver) if path != own and listens(path)]


def has_younger(folder: Path, driver: str, token: str) -> bool:
    """Whether an instance serves the driver whose socket came later than ours: it has been registered last."""
    own = _made(path_of(folder, driver, token))
    return own is not None and any(
        (made := _made(path)) is not None and made > own for path in others(folder, driver, token)
    )


def sweep(folder: Path, driver: str) -> list[str]:
    """Remove the sockets that dead instances left; return their names."""
    removed = []
    for path in _all(folder, driver):
        if not listens(path):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _stem(driver: str) -> str:
    return f"{driver[:_SHOWN]}-{hashlib.sha256(driver.encode()).hexdigest()[:8]}"


def _all(folder: Path, driver: str) -> list[Path]:
    with contextlib.suppress(OSError):
        stem = _stem(driver)
        return [
            path
            for path in folder.glob(f"{stem}-*.sock")
            if _TOKEN.fullmatch(path.name.removeprefix(f"{stem}-").removesuffix(".sock"))
        ]
    return []


def _made(path: Path) -> tuple[int, str] | None:
    """When a socket was made; of two at once, the name decides."""
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:
        return None
