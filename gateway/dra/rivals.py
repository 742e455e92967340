"""Detect another process on this node that has the name of one of our DRA drivers.

The kubelet sends all claims of a driver to the process that registered the name last. With two processes, one gets claims that
the other prepared. So the gateway registers a driver and publishes its devices only if no other process has the name.

The sockets in the kubelet's folder ``plugins_registry`` show which drivers run. During an update, NVIDIA's DRA driver ends
on a node, leaves its ResourceSlices there, and starts again. So our driver waits until the other socket has been gone for
``AWAY_S``, and no claim has a device of those slices.
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
"""Seconds for which the other process must be gone before its ResourceSlices may be deleted."""
CHECK_S: Final = 1.0
"""Seconds between two checks while another process has the name, or while that is unknown."""
QUIET_CHECK_S: Final = 5.0
"""Seconds between two checks while no other process has the name, and between two reads of the cluster's claims."""
INFO_S: Final = 1.0
"""Seconds within which a socket must answer GetInfo."""
MAX_SOCKETS: Final = 256
"""Maximum number of sockets in the kubelet's folder that are asked, first by name."""
DRA_PLUGIN: Final = "DRAPlugin"
"""The type that a DRA driver announces."""

_log = structlog.get_logger()

Device = tuple[str, str]
"""The pool and the name of a device."""


class OtherProcess(Struct, frozen=True):
    """The facts about another process with the name of our ``driver``.

    ``socket`` is a socket on which it listens; '' if there is none. ``slices`` are the names of its ResourceSlices; None if unknown.
    It was last seen ``away_s`` seconds ago; None if it was never seen. ``claims`` are the claims that have devices of its slices;
    None if unknown.
    """

    driver: str
    socket: str = ""
    slices: tuple[str, ...] | None = ()
    away_s: float | None = None
    claims: tuple[str, ...] | None = ()

    @property
    def registration_blocker(self) -> str:
        """Why our driver may not be registered; '' if it may."""
        theirs = f" and publishes {_first_names(self.slices)}" if self.slices else ""
        if self.socket:
            return f"another process has the driver {self.driver}: it listens on {self.socket}{theirs}"
        if self.slices is None:
            return "the API server has not reported yet which ResourceSlices the node has"
        if self.away_s is not None and self.away_s < AWAY_S:
            return f"another process had the driver {self.driver}{theirs}, and ended less than {AWAY_S:g} s ago. It may be in an update"
        if self.slices:
            return f"another process left ResourceSlices of the driver {self.driver}: {_first_names(self.slices)}{self._claims_text}"
        return ""

    @property
    def publication_blocker(self) -> str:
        """Why our devices may not be published; '' if they may."""
        if (why := self.registration_blocker) or self.away_s is None or self.claims == ():
            return why
        return f"another process had the driver {self.driver}, and has ended{self._claims_text}"

    @property
    def has_stale_slices(self) -> bool:
        """True if the other process left slices that may be deleted."""
        gone = not self.socket and self.away_s is not None and self.away_s >= AWAY_S
        return gone and bool(self.slices) and self.claims == ()

    @property
    def _claims_text(self) -> str:
        if self.claims is None:
            return ". It is unknown which claims have its devices: the API server did not list them"
        return f". Claims still have its devices: {_first_names(self.claims)}. Delete their pods" if self.claims else ""


def _first_names(names: Sequence[str] | None) -> str:
    names = names or ()
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class DriverSockets:
    """The driver that each socket in the kubelet's folder announces. Asks each socket once.

    Args:
        registry: the folder.
    """

    def __init__(self, registry: Path) -> None:
        self._registry = registry
        self._known: dict[tuple[str, SocketId], str] = {}

    async def socket(self, driver: str) -> str:
        """Return a socket on which another process announces a driver; '' if there is none."""
        found = await asyncio.to_thread(self._listening, driver)
        unknown = [(path, id_) for path, id_ in found if (str(path), id_) not in self._known]
        for (path, id_), name in zip(unknown, await asyncio.gather(*map(_driver_of_socket, unknown)), strict=True):
            if name is not None:
                self._known[str(path), id_] = name
        if len(self._known) > 2 * MAX_SOCKETS:  # Most of them are gone.
            self._known.clear()
        for path, id_ in found:
            name = self._known.get((str(path), id_))
            # If a socket doesn't answer, use its file name: Kubernetes' library for DRA drivers begins it with the driver's name.
            if name == driver or (name is None and path.name.startswith((f"{driver}-", f"{driver}."))):
                return str(path.relative_to(self._registry))
        return ""

    def _listening(self, driver: str) -> list[tuple[Path, SocketId]]:
        """Return the sockets on which a process listens, except those of other drivers and of gateways."""
        found = []
        for path in _sockets(self._registry):
            id_ = socket_id(path)
            if id_ is None or is_socket_path(path, self._registry, driver):
                continue
            if self._known.get((str(path), id_), driver) == driver and listens(path):
                found.append((path, id_))
        return found


def _sockets(folder: Path) -> Iterator[Path]:
    """Yield the files of the folder and its sub-folders. Names with a leading dot are skipped, because a kubelet ignores them."""
    left = MAX_SOCKETS
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and left > 0:
                left -= 1
                yield Path(at, name)


async def _driver_of_socket(one: tuple[Path, SocketId]) -> str | None:
    """Return the driver that a socket announces; '' if it announces something else, None if it doesn't answer."""
    async with rpc.Channel(one[0], pluginregistration.CHANNEL_OPTIONS) as channel:
        try:
            info = pluginregistration.decode_info(await channel.call(pluginregistration.GET_INFO, seconds=INFO_S))
        except (rpc.CallError, MalformedError):
            return None
        return info.name if info.kind == DRA_PLUGIN else ""


class RivalDetector:
    """Detects another process with the name of one driver.

    Args:
        driver: the name.
        sockets: finds the sockets of a driver.
        other_slices: returns the driver's slices on this node that another process wrote; None if unknown.
        claims: lists the cluster's claims that have a device of the driver; raises a ``KubernetesError``.
        is_ours: returns True if we prepared the claim with this UID.
        changed: called when the reason to wait changed, or when slices became deletable.
    """

    def __init__(
        self,
        driver: str,
        sockets: DriverSockets,
        other_slices: Callable[[], Mapping[str, Slice] | None],
        claims: Callable[[], Awaitable[Sequence[ResourceClaim]]],
        is_ours: Callable[[str], bool],
        changed: Callable[[], None],
    ) -> None:
        self._driver, self._sockets, self._other_slices = driver, sockets, other_slices
        self._claims, self._is_ours, self._changed = claims, is_ours, changed
        self._socket, self._next_ask_at = "", 0.0
        self._seen_at: float | None = None
        self._slices: Mapping[str, int] | None = None
        self._devices: frozenset[Device] = frozenset()
        self._claim_names: tuple[str, ...] | None = None
        self._is_checked, self._last_reported = False, ("", False)
        self._wake, self._checked = asyncio.Event(), Signal()

    @property
    def other_process(self) -> OtherProcess:
        """The current facts about the other process."""
        self._update_slices()
        away = None if self._seen_at is None else asyncio.get_running_loop().time() - self._seen_at
        slices = None if self._slices is None else tuple(sorted(self._slices))
        return OtherProcess(self._driver, self._socket, slices, away, self._claim_names)

    @property
    def reason(self) -> str:
        """Why another process with this name keeps our devices unpublished; '' if none does."""
        return "" if self._seen_at is None else self.other_process.publication_blocker

    def registration_blocker(self, prepared: int) -> str:
        """Return why our driver may not be registered; '' if it may.

        If ``prepared`` claims are ours, it may even while the slices are unknown: without the API server, the kubelet calls only
        for prepared claims.
        """
        seen = self.other_process
        if not self._is_checked or (prepared and seen.slices is None and not seen.socket):
            return "" if self._is_checked else "the kubelet's folder plugins_registry has not been read yet"
        return seen.registration_blocker

    def note_slices_changed(self) -> None:
        """Check at once, because slices changed."""
        if self._update_slices():
            self._wake.set()

    def other_owner_of(self, claim: ResourceClaim) -> str:
        """Return a text about the other process that offered a device of a claim; '' if none did."""
        for one in claim.results:
            if one.driver == self._driver and (one.pool, one.device) in self._devices:
                whose = self._socket or _first_names(sorted(self._slices or ())) or "its process has ended"
                return f"{one.device} was allocated from the ResourceSlices of another process with the driver {self._driver} ({whose})"
        return ""

    async def find_socket(self) -> str:
        """Check now; return the socket on which the other process listens, '' if there is none."""
        await self._check_sockets()
        return self._socket

    async def run(self) -> None:
        """Check repeatedly. Never returns."""
        while True:
            await self._check_sockets()
            await self._check_claims()
            self._report()
            known = self._seen_at is None and self._slices is not None
            self._wake.clear()
            await first_of(self._wake, seconds=QUIET_CHECK_S if known else CHECK_S)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true. It is evaluated after each check."""
        while not condition():
            await self._checked.wait(None)

    async def _check_sockets(self) -> None:
        lived, self._socket = self._socket, await self._sockets.socket(self._driver)
        self._is_checked = True
        self._update_slices()
        if self._socket or lived:
            self._seen_at = asyncio.get_running_loop().time()

    def _update_slices(self) -> bool:
        """Read the slices; return True if they changed. A new write of a slice shows that its process runs."""
        others = self._other_slices()
        there = None if others is None else {name: one.generation for name, one in others.items()}
        if there == self._slices or there is None:
            return False
        before, self._slices, self._claim_names = self._slices or {}, there, None
        self._next_ask_at = 0.0
        if any(before.get(name) != generation for name, generation in there.items()):
            self._seen_at = asyncio.get_running_loop().time()
        self._devices |= {
            (str(one.spec.pool.get("name", "")), str(device.get("name")))
            for one in (others or {}).values()
            for device in one.spec.devices or ()
        }
        return True

    async def _check_claims(self) -> None:
        """Find the claims that have devices of a process that ended. If there are none, forget that process."""
        seen, now = self.other_process, asyncio.get_running_loop().time()
        if seen.socket or seen.slices is None or seen.away_s is None or seen.away_s < AWAY_S or now < self._next_ask_at:
            return
        slices = self._slices
        try:
            found = await self._claims()
        except KubernetesError as error:
            _log.warning("the claims cannot be listed", driver=self._driver, reason=str(error))
            found = None
        self._next_ask_at = asyncio.get_running_loop().time() + QUIET_CHECK_S
        if self._slices is not slices:
            return
        self._claim_names = None if found is None else tuple(_rival_claims(found, self.other_owner_of, self._is_ours))
        if self._claim_names == () and not self._slices:
            self._seen_at, self._devices = None, frozenset()

    def _report(self) -> None:
        reason, stale = self.reason, self.other_process.has_stale_slices
        if reason and reason != self._last_reported[0]:
            _log.warning("another process has the name of this DRA driver", driver=self._driver, reason=reason)
        elif self._last_reported[0] and not reason:
            _log.info("no other process has the name of this DRA driver any more", driver=self._driver)
        if (reason, stale) != self._last_reported:
            self._last_reported = reason, stale
            self._changed()
        self._checked.set()


def _rival_claims(
    found: Collection[ResourceClaim], owner_of: Callable[[ResourceClaim], str], ours: Callable[[str], bool]
) -> Iterator[str]:
    for one in found:
        if owner_of(one) and not ours(one.metadata.uid):
            yield f"{one.metadata.namespace}/{one.metadata.name}"
