"""Keep the node's ResourceSlices equal to what the drivers offer: watch them, and write those that differ.

A kubelet deletes the slices of its node when it starts, and those of a driver that was away for half a minute. They are written
again as soon as the watch reports that. The kubelet's calls never wait for this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from gateway.dra import slices
from gateway.dra.slices import Change, Pool, Slice
from gateway.kubernetes.client import KubernetesError
from gateway.kubernetes.watch import ChangeKind, Retries, Watch

if TYPE_CHECKING:
    from gateway.dra.offer import Offer
    from gateway.dra.rivals import RivalDetector
    from gateway.kubernetes.client import Client

T = TypeVar("T")
VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""Versions of resource.k8s.io, the best first: 1.34, 1.33 and 1.32 have them."""
_GROUP: Final = "/apis/resource.k8s.io"
_MAX_REWRITES: Final = 4
"""How often an unchanged pool may be written again within ``_REWRITES_WITHIN_S`` seconds. More often means that another process
writes it also, or that the server stores something else than was written."""
_REWRITES_WITHIN_S: Final = 2.0
_REWRITE_PAUSE_S: Final = 1.0
"""Seconds between two writes of the same pool after ``_MAX_REWRITES``."""
LINGERS: Final = 30.0
"""Seconds for which another driver's device still counts as offered after its slice was deleted: a starting kubelet deletes that
slice also."""
SHARES_CHECK_S: Final = 60.0
"""Seconds between two checks if the API server keeps shares of devices now."""
_NO_SHARES: Final = (
    "shared GPUs are not published, because the API server keeps no shares of devices. Switch on its feature gate "
    "DRAConsumableCapacity (Kubernetes 1.34 or later; on by default since 1.36), or set --dra-shares to devices"
)
_VERSION_CHECK_S: Final = 1.0
"""Least seconds between two checks of the server's API version."""
_log = structlog.get_logger()


class _Version(Struct):
    version: str


class _Group(Struct):
    versions: list[_Version] = []


def api_path(version: str) -> str:
    """Return the path of a version of resource.k8s.io."""
    return f"{_GROUP}/{version}"


async def ask(api: Client) -> str:
    """Ask the server for its version of resource.k8s.io.

    Raises:
        KubernetesError: it doesn't answer, or has no version that the gateway speaks.
    """
    try:
        found = {one.version for one in (await api.get(_GROUP, _Group)).versions}
    except KubernetesError as error:
        if error.status != 404:
            raise
        found = set()
    for version in VERSIONS:
        if version in found:
            return version
    raise KubernetesError(
        f"GET {_GROUP}",
        404,
        f"the API server has {', '.join(sorted(found)) or 'no version'} of resource.k8s.io. DRA "
        f"needs one of {', '.join(VERSIONS)}: Kubernetes 1.34, or 1.32 with its API and feature "
        "gate switched on",
    )


class Current:
    """The version of resource.k8s.io that the server has now. It is read again after an upgrade or downgrade of the server.

    Args:
        api: the API server.
    """

    def __init__(self, api: Client) -> None:
        self._api, self._turn, self._due = api, asyncio.Lock(), 0.0
        self.version: str | None = None
        """The last known version; None: unknown."""

    async def anew(self) -> str:
        """Read the version from the server, unless that was done less than a second ago.

        Raises:
            KubernetesError: as ``ask``; the last known version stays.
        """
        async with self._turn:
            if self.version is None or time.monotonic() >= self._due:
                self._due = time.monotonic() + _VERSION_CHECK_S
                before, self.version = self.version, await ask(self._api)
                if self.version != before is not None:
                    _log.info("the API server has another version of resource.k8s.io", version=self.version)
            return self.version

    async def at(self, do: Callable[[str], Awaitable[T]]) -> T:
        """Call ``do`` with the server's version, and again if the version has changed.

        Raises:
            KubernetesError: it failed.
        """
        version = self.version or await self.anew()
        try:
            return await do(version)
        except KubernetesError as error:
            if not error.is_astray or (found := await self.anew()) == version:
                raise
        return await do(found)

    async def list(self, plural: str, kind: type[T], keep: Callable[[T], bool] = lambda _: True) -> list[T]:
        """Return the cluster's objects of a kind that ``keep`` accepts. Raises as ``at``."""
        found, _ = await self.at(lambda version: self._api.list(f"{api_path(version)}/{plural}", kind, keep=keep))
        return found


class Publisher:
    """Writes the slices of this node's drivers.

    Args:
        api: the API server.
        current: its version of resource.k8s.io.
        node: the node's name.
        offered: returns what each driver offers now, by its name; None if unknown: then its slices stay as they are.
        ready: returns True if a kubelet accepted a driver. Until then no further devices are offered: if a claim were
            prepared too early, the kubelet would retry only after 60 to 90 s (run on 1.36).
        met: called when the devices that other drivers offer have changed.
        rival: returns what is known of another process with a driver's name; None: nothing.
        noticed: called when slices changed.
    """

    def __init__(
        self,
        api: Client,
        current: Current,
        node: str,
        offered: Callable[[], Mapping[str, Sequence[Offer] | None]],
        ready: Callable[[str], bool],
        met: Callable[[], None],
        rival: Callable[[str], RivalDetector | None],
        noticed: Callable[[], None],
    ) -> None:
        self._api, self._current, self._node, self._owner = api, current, node, ""
        self._offered, self._ready, self._met = offered, ready, met
        self._rival, self._noticed = rival, noticed
        self._there: dict[str, Slice] = {}
        self._is_listed = False
        """True if the node's slices are known."""
        self._wake = asyncio.Event()
        self._last: dict[str, int] = {}
        self._tries: dict[str, tuple[Pool, list[float]]] = {}
        """Each driver's last pool, and when it was written."""
        self._written: dict[str, Slice] = {}
        self._taints = True
        self._shareless = set[str]()
        """Drivers whose shared devices can't be offered in shares by this API server."""
        self._asks_again: asyncio.TimerHandle | None = None
        self._strangers: Mapping[str, str] = {}
        self._met_at: dict[str, float] = {}
        self.has_looked = False
        """True if it is known what other drivers offer."""
        self._watch = Watch(api, "", Slice, fields=f"spec.nodeName={node}", moved=self._collection)
        self._failed = ""

    def changed(self) -> None:
        """Note that the offers may have changed."""
        self._wake.set()

    def trouble(self, driver: str) -> str:
        """Return why a driver's slices aren't up to date; '' if they are."""
        rival = self._rival(driver)
        shareless = _NO_SHARES if driver in self._shareless else ""
        return (rival.reason if rival is not None else "") or self._failed or shareless or self._watch.trouble

    @property
    def meets_strangers(self) -> bool:
        """True if other drivers' slices offer devices of this node."""
        return bool(self._strangers)

    def stranger(self, attributes: Mapping[str, object]) -> str:
        """Return which other driver's slices on this node also offer a device; '' for none."""
        if not self._strangers:
            return ""
        return next(filter(None, map(self._strangers.get, slices.hardware(attributes))), "")

    def free(self) -> frozenset[tuple[str, str]]:
        """Return the driver and the name of each device that our slices at the API server offer to new claims."""
        ours = (one for name, one in self._there.items() if slices.is_ours(name, one, self._node))
        return frozenset(
            name
            for name, device in _shown(ours)
            if not any(taint.get("effect") == "NoSchedule" for taint in device.get("taints") or ())
        )

    def shown(self) -> frozenset[tuple[str, str]]:
        """Return the driver and the name of each device in any slice of this node."""
        return frozenset(name for name, _ in _shown(self._there.values()))

    def others(self, driver: str) -> dict[str, Slice] | None:
        """Return a driver's slices on this node that another process wrote; None: unknown yet."""
        if not self._is_listed:
            return None
        return {
            name: one
            for name, one in self._there.items()
            if (one.spec.driver, one.spec.node) == (driver, self._node) and not slices.is_ours(name, one, self._node)
        }

    async def run(self, owner: str) -> None:
        """Publish. Never returns. ``owner`` is the node's UID, '' if unknown."""
        self._owner = owner
        retries = Retries()
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                wait = await self._current.at(self._publish)
                retries.worked()
                self._failed = ""
            except KubernetesError as error:
                wait, self._failed = retries.wait(error), str(error)
                if retries.are_new:
                    _log.warning("ResourceSlices can't be written: trying again", reason=str(error))
            if wait:
                await asyncio.sleep(wait)
                self._wake.set()

    # The slices at the API server.

    async def _collection(self) -> str:
        return f"{api_path(await self._current.anew())}/resourceslices"

    async def watch(self) -> None:
        """Watch the node's slices. Never returns."""
        async for change in self._watch.changes():
            if change.kind is ChangeKind.WHOLE:
                self._there, self._is_listed = {one.metadata.name: one for one in change.objects}, True
            else:
                [one] = change.objects
                if change.kind is ChangeKind.DELETED:
                    self._there.pop(one.metadata.name, None)
                else:
                    self._there[one.metadata.name] = one
                    self._check_taints(one)
            self._wake.set()
            self._noticed()

    def _check_taints(self, one: Slice) -> None:
        written = self._written.get(one.metadata.name)
        if self._taints and written is not None and slices.lacks_taints(written, one):
            self._taints = False
            _log.warning(
                "the API server keeps no taints of devices: the ResourceSlices lack unhealthy and cordoned devices",
                advice="its feature gate DRADeviceTaints is off (on by default since 1.36)",
            )

    # Writing.

    async def _publish(self, version: str) -> float:
        """Write the slices that differ; return the seconds until the next check (0: at the next change)."""
        if not self._is_listed:
            return 0.0
        offered = self._offered()
        ours = {
            name
            for name, one in self._there.items()
            if one.spec.driver in offered and slices.is_ours(name, one, self._node)
        }
        self._tell_strangers(slices.strangers(self._there.values(), self._node, ours))
        wait = 0.0
        for driver, devices in offered.items():
            if devices is None:
                continue
            if (rival := self._rival(driver)) is not None and rival.other_process.publication_blocker:
                await self._make_way(version, driver, rival)
                continue
            free = tuple(one for one in devices if not self.stranger(one.attributes))
            mine = {name: self._there[name] for name in ours if self._there[name].spec.driver == driver}
            free = free if self._ready(driver) else slices.no_more(free, mine.values())
            pool = Pool(driver, self._node, free, version, self._owner, self._taints)
            wanted = slices.changes(pool, mine, self._last.get(driver, 0))
            if await self._drops_shares(version, driver, wanted):
                pool = replace(pool, devices=tuple(one for one in free if not one.shares))
                wanted = slices.changes(pool, mine, self._last.get(driver, 0))
            if wanted and self._too_often(driver, pool):
                wait = _REWRITE_PAUSE_S
                continue
            await self._carry_out(version, driver, wanted)
        return wait

    async def _make_way(self, version: str, driver: str, rival: RivalDetector) -> None:
        """Delete our slices of a driver whose name another process has; also that process's slices, if it has ended for good."""
        stale, node = rival.other_process.has_stale_slices, self._node
        gone = {
            name: one
            for name, one in self._there.items()
            if (one.spec.driver, one.spec.node) == (driver, node) and (stale or slices.is_ours(name, one, node))
        }
        await self._carry_out(version, driver, [Change(name) for name in gone])
        if stale:
            _log.info("deleted ResourceSlices that another process left", driver=driver, slices=sorted(gone))
            ended = slices.strangers(gone.values(), node, ())
            self._met_at = {what: at for what, at in self._met_at.items() if what not in ended}

    def _too_often(self, driver: str, pool: Pool) -> bool:
        """Return True if the same pool was written too often, and must wait."""
        now = asyncio.get_running_loop().time()
        last, tries = self._tries.get(driver, (pool, []))
        lately = [at for at in tries if last == pool and now - at < _REWRITES_WITHIN_S]
        often = len(lately) >= _MAX_REWRITES
        self._tries[driver] = pool, lately if often else [*lately, now]
        return often

    async def _drops_shares(self, version: str, driver: str, wanted: Sequence[Change]) -> bool:
        """Return True if the API server would silently drop the shares of devices. Then shared devices are not written."""
        shared = [one for one in wanted if one.body and slices.has_shares(msgspec.convert(one.body, Slice))]
        drops = bool(shared) and version != VERSIONS[0]
        for one in shared if not drops else ():
            path = f"{api_path(version)}/resourceslices/{one.name}"
            drops = drops or not slices.has_shares(await self._api.apply(path, one.body or {}, Slice, dry_run=True))
        if not drops:
            self._shareless.discard(driver)
            return False
        if driver not in self._shareless:
            self._shareless.add(driver)
            _log.error("shared devices are not published", driver=driver, reason=_NO_SHARES)
        if self._asks_again is None:
            self._asks_again = asyncio.get_running_loop().call_later(SHARES_CHECK_S, self._ask_again)
        return True

    def _ask_again(self) -> None:
        self._asks_again = None
        self.changed()

    async def _carry_out(self, version: str, driver: str, wanted: Sequence[Change]) -> None:
        if not wanted:
            return
        for change in wanted:
            path = f"{api_path(version)}/resourceslices/{change.name}"
            if change.body is None:
                await self._api.delete(path)
                self._there.pop(change.name, None)
                continue
            # Note it before sending: the watch may report it before the answer comes.
            one = msgspec.convert(change.body, Slice)
            self._written[change.name] = one
            self._last[driver] = one.generation
            seen = await self._api.apply(path, change.body, Slice)
            if slices.has_shares(one) and not slices.has_shares(
                seen
            ):  # Another API server answered than the one that was asked before.
                raise KubernetesError(f"PATCH {path}", 0, _NO_SHARES)
            self._there.setdefault(change.name, one)
            if self._there[change.name].generation < one.generation:
                self._there[change.name] = one
        devices: list[Any] = [device for change in wanted if change.body for device in change.body["spec"]["devices"]]
        _log.info(
            "ResourceSlices written",
            driver=driver,
            devices=len(devices),
            tainted=sum("taints" in device for device in devices),
            generation=self._last.get(driver, 0),
        )

    def _tell_strangers(self, found: Mapping[str, str]) -> None:
        loop, looked, self.has_looked = asyncio.get_running_loop(), self.has_looked, True
        now = loop.time()
        before, recent = self._strangers, {one for one, at in self._met_at.items() if now < at + LINGERS}
        if lingering := {one: before[one] for one in recent - found.keys() if one in before}:
            loop.call_later(LINGERS, self.changed)
        self._met_at = {one: self._met_at[one] for one in lingering} | dict.fromkeys(found, now)
        found = {**found, **lingering}
        if looked and found == before:
            return
        for what in sorted(found.keys() - before.keys())[:8]:
            _log.error(
                "a device is not offered here, because another DRA driver offers it",
                device=what,
                reason=found[what],
                advice="end that driver on this node, or set --dra-drivers or --exclude-devices",
            )
        self._strangers = found
        self._met()


def _shown(found: Iterable[Slice]) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    for one in found:
        for device in one.spec.devices or ():
            yield (one.spec.driver, str(device.get("name"))), device
