"""The registration sockets in the kubelet's folder ``plugins_registry``, by which it finds drivers.

Each instance has its own: two serve at once during a roll (1.33 and later), the kubelet calls the one that registered last, and
the end of one leaves the other alone. The claims' API is served on the same socket: a registration without an endpoint means its
own socket (operation_generator.go of the kubelet), so that nobody has to know how the kubelet sees our paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from gateway.age import TOKEN
from gateway.wires.unix import listens

FOLDER: Final = "plugins_registry"
OVERLAP: Final = 33
"""The kubelet, 1.N, from which two instances of a driver may be registered: in 1.32 the second breaks the first (run)."""
AGAIN: Final = 1.0
"""Seconds between two looks for another instance's end."""
_SHOWN: Final = 14
"""Characters of a driver's name that are shown: a path has at most 107 bytes, a driver's name 63."""
_log = structlog.get_logger()


def path_of(folder: Path, driver: str, token: str) -> Path:
    """Say where the instance with a token (eight hexadecimal digits) has its socket for a driver."""
    return folder / f"{_stem(driver)}-{token}.sock"


def others(folder: Path, driver: str, token: str) -> list[Path]:
    """Give the living sockets of other instances for a driver."""
    own = path_of(folder, driver, token)
    return [path for path in _all(folder, driver) if path != own and listens(path)]


def newest(folder: Path, driver: str, token: str) -> Path | None:
    """Give the socket of another living instance that the kubelet calls: the one that came last; None: there is none."""
    there = [(made, path) for path in others(folder, driver, token) if (made := _made(path)) is not None]
    return max(there)[1] if there else None


def of_another(folder: Path, driver: str, token: Callable[[], str]) -> Path | None:
    """Give the socket of the instance with the token that ``token`` gives, where that lives."""
    path = path_of(folder, driver, token())
    return path if listens(path) else None


async def until_alone(
    driver: str,
    others: Callable[[], Sequence[Path]],
    kubelet: Callable[[], int | None],
    lacking: Callable[[], str],
    learned: asyncio.Event,
    decides: asyncio.Event,
) -> None:
    """Wait for a kubelet that takes claims. If it may be one that takes one instance only, that is the one of the gateway that leads.

    ``learned`` is set when it is known which kubelet there is, ``decides`` when this gateway leads: looked at once then.
    """
    told = False
    while ((minor := kubelet()) is None or minor < OVERLAP) and (lacking() or not decides.is_set() or others()):
        if not told and minor is not None and not lacking():
            reason = f"kubelet 1.{minor} takes one instance only: a second breaks the first"
            _log.info("the DRA driver is registered once this gateway leads", driver=driver, reason=reason)
            told = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN):
                news = learned if minor is None else decides
                await (asyncio.sleep(AGAIN) if news.is_set() else news.wait())


def is_gateways(path: Path, folder: Path, driver: str) -> bool:
    """True if a path is one that a gateway has its socket for a driver at."""
    token = path.name.removeprefix(f"{_stem(driver)}-").removesuffix(".sock")
    return TOKEN.fullmatch(token) is not None and path == path_of(folder, driver, token)


def sweep(folder: Path, driver: str) -> list[str]:
    """Remove the sockets that dead instances left; return their names."""
    removed = []
    made = (path for path in folder.glob(".*") if TOKEN.fullmatch(path.name[1:]) and path.is_socket())
    for path in (*_all(folder, driver), *made):
        if not listens(path):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _stem(driver: str) -> str:
    return f"{driver[:_SHOWN]}-{hashlib.sha256(driver.encode()).hexdigest()[:8]}"


def _all(folder: Path, driver: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.glob(f"{_stem(driver)}-*.sock") if is_gateways(path, folder, driver)]
    return []


def _made(path: Path) -> tuple[int, str] | None:
    """When a socket was made; of two at once, the name decides."""
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:
        return None
