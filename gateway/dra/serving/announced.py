"""Find out which drivers the sockets in the kubelet's folder ``plugins_registry`` announce, of any process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from adapters import pluginregistration
from adapters.dialect import MalformedError
from gateway.dra.sockets import is_gateways
from gateway.kubelet.watch import socket_id
from gateway.wires import rpc
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from gateway.kubelet.watch import SocketId

INFO_S: Final = 1.0
"""Seconds within which a socket must answer GetInfo."""
MOST_SOCKETS: Final = 256
"""Most sockets in the kubelet's folder that are looked at, the first ones by name."""
DRA_PLUGIN: Final = "DRAPlugin"
"""The type that a DRA driver announces."""
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", pluginregistration.MAX_INFO),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_retries", 0),
)


class Announced:
    """Knows which drivers the sockets in the kubelet's folder announce. Each socket is asked once.

    Args:
        registry: the folder.
    """

    def __init__(self, registry: Path) -> None:
        self._registry = registry
        self._known: dict[tuple[str, SocketId], str] = {}

    async def socket(self, driver: str) -> str:
        """Return a living socket of another process that announces a driver; '' if there is none."""
        found = await asyncio.to_thread(self._living, driver)
        unknown = [(path, id_) for path, id_ in found if (str(path), id_) not in self._known]
        for (path, id_), name in zip(unknown, await asyncio.gather(*map(_asked, unknown)), strict=True):
            if name is not None:
                self._known[str(path), id_] = name
        if len(self._known) > 2 * MOST_SOCKETS:  # Most of them are gone.
            self._known.clear()
        for path, id_ in found:
            name = self._known.get((str(path), id_))
            # A socket without an answer is judged by its name, which upstream's library begins with the driver's name.
            if name == driver or (name is None and path.name.startswith((f"{driver}-", f"{driver}."))):
                return str(path.relative_to(self._registry))
        return ""

    def _living(self, driver: str) -> list[tuple[Path, SocketId]]:
        """Return the living sockets, except those of other drivers and of gateways."""
        found = []
        for path in _sockets(self._registry):
            id_ = socket_id(path)
            if id_ is None or is_gateways(path, self._registry, driver):
                continue
            if self._known.get((str(path), id_), driver) == driver and listens(path):
                found.append((path, id_))
        return found


def _sockets(folder: Path) -> Iterator[Path]:
    """Yield the files of the folder and its sub-folders, as a kubelet does: no names with a dot in front."""
    left = MOST_SOCKETS
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and left > 0:
                left -= 1
                yield Path(at, name)


async def _asked(one: tuple[Path, SocketId]) -> str | None:
    """Ask a socket for its driver: '' if it is not a driver's; None if it doesn't answer."""
    async with rpc.Channel(one[0], _OPTIONS) as channel:
        try:
            info = pluginregistration.decode_info(await channel.call(pluginregistration.GET_INFO, seconds=INFO_S))
        except (rpc.CallError, MalformedError):
            return None
        return info.name if info.kind == DRA_PLUGIN else ""
