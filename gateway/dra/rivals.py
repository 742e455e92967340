"""Detect another process on this node that has the name of one of our DRA drivers.

The kubelet sends all claims of a driver to the process that registered the name last. With two processes, one gets claims that
the other prepared. So the gateway registers a driver and publishes its devices only if no other process has the name.

When NVIDIA's driver is updated, it ends on a node, leaves its ResourceSlices, and starts again. So ours waits until the other
socket has been away for a while, and no claim names a device of those slices. The sockets in the kubelet's folder
``plugins_registry`` show which drivers run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import Struct

from adapters import pluginregistration
from adapters.dialect import MalformedError
from gateway.dra.claims import ResourceClaim
from gateway.dra.sockets import is_socket_path
from gateway.kubelet.identity import SocketId, socket_id
from gateway.kubernetes.client import KubernetesError
from gateway.tasks import Signal, first_of
from gateway.wires import rpc
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from gateway.dra.slices import Slice

AWAY_S: Final = 60.0
"""Seconds for which the other process must be away before its ResourceSlices may be deleted."""
LOOK_S: Final = 1.0
"""Seconds between two checks while another process has the name, or while that is unknown."""
LOOK_SELDOM_S: Final = 5.0
"""Seconds between two checks while no other process has the name, and between two reads of the cluster's claims."""
INFO_S: Final = 1.0
"""Seconds within which a socket must answer GetInfo."""
MOST_SOCKETS: Final = 256
"""Most sockets in the kubelet's folder that are asked, the first ones by name."""
DRA_PLUGIN: Final = "DRAPlugin"
"""The type that a DRA driver announces."""

_log = structlog.get_logger()

Device = tuple[str, str]
"""The pool and the name of a device."""


class OtherProcess(Struct, frozen=True):
    """What is known of another process with the name of our ``driver``.

    ``socket`` is a socket on which it listens; empty if there is none. ``slices`` are its ResourceSlices; None: unknown yet. It
    was last seen ``away_s`` seconds ago; None: no such process was seen. ``claims`` name devices of its slices; None: unknown.
    """

    driver: str
    socket: str = ""
    slices: tuple[str, ...] | None = ()
    away_s: float | None = None
    claims: tuple[str, ...] | None = ()

    @property
    def unregistered(self) -> str:
        """Why our driver may not be registered; '' if it may."""
        theirs = f" and publishes {_some(self.slices)}" if self.slices else ""
        if self.socket:
            return f"another process has the driver {self.driver}: it listens on {self.socket}{theirs}"
        if self.slices is None:
            return "the API server has not reported yet which ResourceSlices the node has"
        if self.away_s is not None and self.away_s < AWAY_S:
            return f"another process had the driver {self.driver}{theirs}, and ended less than {AWAY_S:g} s ago: it may be updated now"
        if self.slices:
            return (
                f"another process left ResourceSlices of the driver {self.driver}: {_some(self.slices)}{self._claimed}"
            )
        return ""

    @property
    def unpublished(self) -> str:
        """Why our devices may not be published; '' if they may."""
        if (why := self.unregistered) or self.away_s is None or self.claims == ():
            return why
        return f"another process had the driver {self.driver}, and has ended{self._claimed}"

    @property
    def is_stale(self) -> bool:
        """True if the other process's slices may be deleted."""
        gone = not self.socket and self.away_s is not None and self.away_s >= AWAY_S
        return gone and bool(self.slices) and self.claims == ()

    @property
    def _claimed(self) -> str:
        if self.claims is None:
            return ". The API server does not say which claims have devices of it"
        return f". Claims still have devices of it: {_some(self.claims)}. Delete their pods" if self.claims else ""


def _some(names: Sequence[str] | None) -> str:
    names = names or ()
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class Announced:
    """Knows which driver each socket in the kubelet's folder announces. It asks each socket once.

    Args:
        registry: the folder.
    """

    def __init__(self, registry: Path) -> None:
        self._registry = registry
        self._known: dict[tuple[str, SocketId], str] = {}

    async def socket(self, driver: str) -> str:
        """Return a socket on which another process announces a driver; '' if there is none."""
        found = await asyncio.to_thread(self._living, driver)
        unknown = [(path, id_) for path, id_ in found if (str(path), id_) not in self._known]
        for (path, id_), name in zip(unknown, await asyncio.gather(*map(_asked, unknown)), strict=True):
            if name is not None:
                self._known[str(path), id_] = name
        if len(self._known) > 2 * MOST_SOCKETS:  # Most of them are gone.
            self._known.clear()
        for path, id_ in found:
            name = self._known.get((str(path), id_))
            # A socket without an answer is judged by its name: upstream's library begins it with the driver's name.
            if name == driver or (name is None and path.name.startswith((f"{driver}-", f"{driver}."))):
                return str(path.relative_to(self._registry))
        return ""

    def _living(self, driver: str) -> list[tuple[Path, SocketId]]:
        """Return the living sockets, except those of other drivers and of gateways."""
        found = []
        for path in _sockets(self._registry):
            id_ = socket_id(path)
            if id_ is None or is_socket_path(path, self._registry, driver):
                continue
            if self._known.get((str(path), id_), driver) == driver and listens(path):
                found.append((path, id_))
        return found


def _sockets(folder: Path) -> Iterator[Path]:
    """Yield the files of the folder and its sub-folders, except names that begin with a dot: a kubelet ignores those also."""
    left = MOST_SOCKETS
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and left > 0:
                left -= 1
                yield Path(at, name)


async def _asked(one: tuple[Path, SocketId]) -> str | None:
    """Ask a socket for its driver; '' if it announces something else, None if it doesn't answer."""
    async with rpc.Channel(one[0], pluginregistration.CHANNEL_OPTIONS) as channel:
        try:
            info = pluginregistration.decode_info(await channel.call(pluginregistration.GET_INFO, seconds=INFO_S))
        except (rpc.CallError, MalformedError):
            return None
        return info.name if info.kind == DRA_PLUGIN else ""


class Rival:
    """Detects another process with the name of one driver.

    Args:
        driver: the name.
        announced: knows which socket announces which driver.
        others: returns the driver's slices on this node that another process wrote; None: unknown.
        claims: lists the claims of the cluster that have a device of the driver; raises a ``KubernetesError``.
        ours: returns True if we prepared the claim with a UID.
        changed: called when the result changed.
    """

    def __init__(
        self,
        driver: str,
        announced: Announced,
        others: Callable[[], Mapping[str, Slice] | None],
        claims: Callable[[], Awaitable[Sequence[ResourceClaim]]],
        ours: Callable[[str], bool],
        changed: Callable[[], None],
    ) -> None:
        self._driver, self._announced, self._others = driver, announced, others
        self._claims, self._ours, self._changed = claims, ours, changed
        self._socket, self._asked_at = "", 0.0
        self._seen_at: float | None = None
        self._slices: Mapping[str, int] | None = None
        self._devices: frozenset[Device] = frozenset()
        self._names: tuple[str, ...] | None = None
        self._looked, self._told = False, ("", False)
        self._wake, self._news = asyncio.Event(), Signal()

    @property
    def seen(self) -> OtherProcess:
        """What is known now."""
        self._meet()
        away = None if self._seen_at is None else asyncio.get_running_loop().time() - self._seen_at
        slices = None if self._slices is None else tuple(sorted(self._slices))
        return OtherProcess(self._driver, self._socket, slices, away, self._names)

    @property
    def words(self) -> str:
        """The other process with this driver name, and what the gateway waits for; '' if there is none."""
        return "" if self._seen_at is None else self.seen.unpublished

    def unregistered(self, prepared: int) -> str:
        """Return why our driver may not be registered; '' if it may.

        It may if claims are ``prepared``, even if the slices are unknown: without the API server the kubelet calls only for
        prepared claims.
        """
        seen = self.seen
        if not self._looked or (prepared and seen.slices is None and not seen.socket):
            return "" if self._looked else "the kubelet's folder plugins_registry has not been read yet"
        return seen.unregistered

    def noticed(self) -> None:
        """Note that slices changed."""
        if self._meet():
            self._wake.set()

    def has(self, claim: ResourceClaim) -> str:
        """Return which other process offered a device that a claim has; '' if none did."""
        for one in claim.results:
            if one.driver == self._driver and (one.pool, one.device) in self._devices:
                whose = self._socket or _some(sorted(self._slices or ())) or "its process has ended"
                return f"{one.device} was allocated from the ResourceSlices of another process with the driver {self._driver} ({whose})"
        return ""

    async def lives(self) -> str:
        """Look now; return the socket on which the other process listens, '' if there is none."""
        await self._look()
        return self._socket

    async def run(self) -> None:
        """Check repeatedly. Never returns."""
        while True:
            await self._look()
            await self._ask()
            self._tell()
            known = self._seen_at is None and self._slices is not None
            self._wake.clear()
            await first_of(self._wake, seconds=LOOK_SELDOM_S if known else LOOK_S)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition is true. It is checked after each look."""
        while not true():
            await self._news.within(None)

    async def _look(self) -> None:
        lived, self._socket = self._socket, await self._announced.socket(self._driver)
        self._looked = True
        self._meet()
        if self._socket or lived:
            self._seen_at = asyncio.get_running_loop().time()

    def _meet(self) -> bool:
        """Note the slices; return True if they changed. A new write of a slice shows that its process runs."""
        others = self._others()
        there = None if others is None else {name: one.generation for name, one in others.items()}
        if there == self._slices or there is None:
            return False
        before, self._slices, self._names = self._slices or {}, there, None
        self._asked_at = 0.0
        if any(before.get(name) != generation for name, generation in there.items()):
            self._seen_at = asyncio.get_running_loop().time()
        self._devices |= {
            (str(one.spec.pool.get("name", "")), str(device.get("name")))
            for one in (others or {}).values()
            for device in one.spec.devices or ()
        }
        return True

    async def _ask(self) -> None:
        """Read which claims have devices of a process that ended. Once no claim has one, forget that process."""
        seen, now = self.seen, asyncio.get_running_loop().time()
        if seen.socket or seen.slices is None or seen.away_s is None or seen.away_s < AWAY_S or now < self._asked_at:
            return
        slices = self._slices
        try:
            found = await self._claims()
        except KubernetesError as error:
            _log.warning("the claims cannot be listed", driver=self._driver, reason=str(error))
            found = None
        self._asked_at = asyncio.get_running_loop().time() + LOOK_SELDOM_S
        if self._slices is not slices:
            return
        self._names = None if found is None else tuple(_names_of(found, self.has, self._ours))
        if self._names == () and not self._slices:
            self._seen_at, self._devices = None, frozenset()

    def _tell(self) -> None:
        words, stale = self.words, self.seen.is_stale
        if words and words != self._told[0]:
            _log.warning("another process has the name of this DRA driver", driver=self._driver, reason=words)
        elif self._told[0] and not words:
            _log.info("no other process has the name of this DRA driver any more", driver=self._driver)
        if (words, stale) != self._told:
            self._told = words, stale
            self._changed()
        self._news.set()


def _names_of(
    found: Collection[ResourceClaim], has: Callable[[ResourceClaim], str], ours: Callable[[str], bool]
) -> Iterator[str]:
    for one in found:
        if has(one) and not ours(one.metadata.uid):
            yield f"{one.metadata.namespace}/{one.metadata.name}"
