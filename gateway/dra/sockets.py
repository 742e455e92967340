"""The registration sockets in the kubelet's folder ``plugins_registry``, by which the kubelet finds DRA drivers.

Each gateway has its own socket. During a rolling update two gateways serve (kubelet 1.33 and later): the kubelet calls the one
that registered last, and the end of one doesn't affect the other. The registration names no endpoint, so the kubelet calls
the DRA API on the same socket (operation_generator.go of the kubelet).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.age import TOKEN
from gateway.wires.unix import listens

FOLDER: Final = "plugins_registry"
FIRST_OVERLAP_MINOR: Final = 33
"""The first kubelet (1.N) with which two processes may register one driver. In 1.32 the second process breaks the first (measured)."""
CHECK_S: Final = 1.0
"""Seconds between two checks if another gateway has ended."""
_NAME_CHARS: Final = 14
"""Characters of the driver's name in a socket's name. A socket's path may have 107 bytes, a driver's name alone 63."""


def path_of(folder: Path, driver: str, token: str) -> Path:
    """Return the socket of a gateway's driver; ``token`` has eight hexadecimal digits."""
    return folder / f"{_stem(driver)}-{token}.sock"


def others(folder: Path, driver: str, token: str) -> list[Path]:
    """Return the sockets on which other gateways serve a driver."""
    own = path_of(folder, driver, token)
    return [path for path in _all(folder, driver) if path != own and listens(path)]


def newest(folder: Path, driver: str, token: str) -> Path | None:
    """Return the newest socket on which another gateway serves a driver (the kubelet calls that one); None: there is none."""
    there = [(key, path) for path in others(folder, driver, token) if (key := _sort_key(path)) is not None]
    return max(there)[1] if there else None


def listening_path(folder: Path, driver: str, token: Callable[[], str]) -> Path | None:
    """Return the socket of the gateway with this token; None if no process listens on it."""
    path = path_of(folder, driver, token())
    return path if listens(path) else None


def is_socket_path(path: Path, folder: Path, driver: str) -> bool:
    """Return True if a gateway uses this path for the driver's socket."""
    token = path.name.removeprefix(f"{_stem(driver)}-").removesuffix(".sock")
    return TOKEN.fullmatch(token) is not None and path == path_of(folder, driver, token)


def sweep(folder: Path, driver: str) -> list[str]:
    """Remove the sockets of dead gateways; return their names."""
    removed = []
    made = (path for path in folder.glob(".*") if TOKEN.fullmatch(path.name[1:]) and path.is_socket())
    for path in (*_all(folder, driver), *made):
        if not listens(path):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _stem(driver: str) -> str:
    return f"{driver[:_NAME_CHARS]}-{hashlib.sha256(driver.encode()).hexdigest()[:8]}"


def _all(folder: Path, driver: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.glob(f"{_stem(driver)}-*.sock") if is_socket_path(path, folder, driver)]
    return []


def _sort_key(path: Path) -> tuple[int, str] | None:
    """Return a sort key: the creation time of a socket, then its name."""
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:
        return None
