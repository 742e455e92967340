"""Read the node's pods and claims from the API server, if the kubelet's records don't show what is needed.

The kubelet's checkpoint names pods that have ended until another pod gets devices. Without a device plugin, none ever does.
So a pod that only the checkpoint names counts only while the API server has it as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import Struct, field

from gateway.kubernetes.client import KubernetesError
from gateway.kubernetes.watch import Retries
from gateway.registration.events import Phase
from gateway.tasks import first_of

if TYPE_CHECKING:
    from devices.life.states import Entry
    from gateway.dra.claims import Allocated
    from gateway.kubelet.presence import Presence
    from gateway.kubelet.reader import Look
    from gateway.kubernetes.client import Client
    from gateway.memory.holdings import Holdings
    from gateway.registration.registrar import Resource

ASK_FIRST: Final = 0.2
"""Seconds between two reads of the pods while the result may free a device. The API server learns of a pod's end a moment
after the kubelet."""
ASK_AGAIN: Final = 10.0
"""The same, while the same pods are still there."""
LIST_FIRST: Final = 0.5
"""Seconds that a kubelet has to accept a new leader's lists before the leader writes to the API server."""
_log = structlog.get_logger()
_OVER: Final = frozenset({"Succeeded", "Failed"})
_HASH: Final = "kubernetes.io/config.hash"
"""The annotation of a mirror pod with the UID by which the kubelet knows its static pod."""


class _Annotations(Struct):
    hash: str = field(default="", name=_HASH)


class _About(Struct):
    uid: str
    annotations: _Annotations = field(default_factory=_Annotations)


class _Resources(Struct):
    limits: dict[str, str] = {}


class _Container(Struct):
    resources: _Resources = field(default_factory=_Resources)


class _Spec(Struct):
    containers: list[_Container] = []
    first: list[_Container] = field(default_factory=list, name="initContainers")


class _Phase(Struct):
    phase: str = ""
    began: str = field(default="", name="startTime")
    by_claim: object = field(default=None, name="extendedResourceClaimStatus")


class Pod(Struct):
    """A pod of the API server, with the devices that it asks for."""

    metadata: _About
    status: _Phase = field(default_factory=_Phase)
    spec: _Spec = field(default_factory=_Spec)


def living(pods: Iterable[Pod]) -> frozenset[str]:
    """Return the UIDs, as the kubelet knows them, of the pods that have not ended."""
    there = [one for one in pods if one.status.phase not in _OVER]
    return frozenset(uid for one in there for uid in (one.metadata.uid, one.metadata.annotations.hash) if uid)


async def arriving(ask: Callable[[], Awaitable[list[Pod]]], resources: Container[str]) -> bool:
    """Return True if pods of the node ask for one of these resources by the device plugin API and are not admitted yet.

    A kubelet writes to a pod's status that it admitted or refused the pod. If a claim was made for a pod by name, DRA serves it.
    """
    for one in await ask():
        if one.status.phase not in _OVER and not one.status.began and one.status.by_claim is None:
            asks = (
                name for container in (*one.spec.containers, *one.spec.first) for name in container.resources.limits
            )
            if any(name in resources for name in asks):
                return True
    return False


async def counted(ask: Callable[[], Awaitable[list[Pod]]], resource: str) -> int:
    """Return how many devices of a resource the node's pods ask for by name, as its kubelet counts; 0 if no claim was made for one.

    Without such claims the kubelet counts no more than it has given, so it admits each pod that is given a device
    (``sanitizeNodeAllocatable``).
    """
    there = [one for one in await ask() if one.status.phase not in _OVER]
    if all(one.status.by_claim is None for one in there):
        return 0
    return sum(max(sum(_wanted(one.spec.containers, resource)), *_wanted(one.spec.first, resource), 0) for one in there)


def _wanted(containers: Iterable[_Container], resource: str) -> list[int]:
    found = (one.resources.limits.get(resource, "") for one in containers)
    return [int(one) for one in found if one.isdecimal()]


class EndedPods:
    """Finds out which of the pods that only the checkpoint names have ended."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._doubted: frozenset[str] = frozenset()
        """The UIDs of the pods that only the checkpoint names."""
        self._doubt = asyncio.Event()
        self._known: frozenset[str] = frozenset()
        """Those that the last read of the pods was for."""
        self._news = asyncio.Event()
        """Set if a UID is new since that read."""

    def looked(self, resources: Iterable[str]) -> None:
        """Note the pods that only the checkpoint names, by the last look."""
        last = self._holdings.reader.last
        if last is None or last.records.held is None:
            return
        self._doubted = frozenset().union(*(last.records.only_written(name).values() for name in resources))
        if self._doubted - self._holdings.ended:
            self._doubt.set()
        if self._doubted - self._known:
            self._news.set()

    async def mind(self, ask: Callable[[], Awaitable[list[Pod]]], changed: Callable[[], None]) -> None:
        """Read the pods while that matters; call ``changed`` if a pod has ended. Never returns."""
        retries, wait = Retries(), ASK_FIRST
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            # Read before the call: if the API server lacks one of these, its pod has ended.
            doubted = self._doubted
            wait = ASK_FIRST if doubted - self._known else min(2 * wait, ASK_AGAIN)
            self._known = doubted
            self._news.clear()
            try:
                pods = living(await ask())
            except KubernetesError as error:
                self._doubt.set()
                await asyncio.sleep(retries.wait(error))
                continue
            retries.worked()
            before, self._holdings.ended = self._holdings.ended, doubted - pods
            if self._holdings.ended - before:
                changed()
            await first_of(self._news, seconds=wait)


class AskedClaims:
    """Reads from the API server which claims have which boards.

    Args:
        ask: reads it; raises ``KubernetesError`` if that fails.
        looked: returns True once the ResourceSlices are known. An older slice may still offer a board.
    """

    def __init__(self, ask: Callable[[], Awaitable[Allocated]], looked: Callable[[], bool] = lambda: True) -> None:
        self._ask, self._looked = ask, looked
        self.unsaid = ""
        """Why the last read failed; empty if it did not."""

    def unknown(self, *, looked: bool) -> str:
        """Return what is unknown, and why. ``looked``: True if the ResourceSlices are known."""
        what = "claims there are" if looked else "ResourceSlices the node has"
        return f"the API server hasn't said yet which {what}" + (
            f": {self.unsaid:.200}" if looked and self.unsaid else ""
        )

    async def __call__(self) -> Allocated | None:
        """Read the claims; None if that fails."""
        if not self._looked():
            self.unsaid = self.unknown(looked=False)
            return None
        before, self.unsaid, found = self.unsaid, "", None
        try:
            found = await self._ask()
        except KubernetesError as error:
            self.unsaid = str(error)
        if self.unsaid and not before:
            _log.warning("the API server doesn't say which claims there are: trying again", reason=self.unsaid)
        return found


def pods_of(api: Client, node: str) -> Callable[[], Awaitable[list[Pod]]]:
    """Return a function that reads the node's pods from the API server."""

    async def ask() -> list[Pod]:
        found, _ = await api.list("/api/v1/pods", Pod, fields=f"spec.nodeName={node}")
        return found

    return ask


def starts(presence: Presence, within: float) -> bool:
    """Return True if no kubelet is there, or if the kubelet started less than ``within`` seconds ago, no matter when this process started."""
    if presence.since is None:
        return True
    young = presence.kubelet is None or time.time() - presence.kubelet.mtime_ns / 1e9 < within
    return young and time.monotonic() - presence.since < within


def boards_with(there: Mapping[str, Sequence[tuple[str, Entry]]], ids: Container[str]) -> set[str]:
    """Return the boards that have some of these devices."""
    return {board for board, devices in there.items() if any(one.device.id in ids for _, one in devices)}


def since_served(resources: Iterable[Resource], last: Look | None) -> Look | None:
    """Return the last look at the kubelet's records; None if the kubelet may not have our lists."""
    return last if all(one.state.phase is Phase.SERVING for one in resources) else None


def is_away(presence: Presence, within: float) -> bool:
    """Return True if no kubelet listens, or only since less than ``within`` seconds: pods may not have been ended."""
    return not presence.listens() or starts(presence, within)


async def until_listed(
    decides: asyncio.Event, resources: Callable[[], Iterable[Resource]], known: Callable[[], bool]
) -> None:
    """Wait until this gateway leads and a kubelet has its lists: during an update of the gateway no process serves pods by name.

    If no kubelet accepts the lists, wait ``LIST_FIRST`` seconds; don't wait if the lists need the API server first (not ``known``).
    """
    await decides.wait()
    ends = time.monotonic() + LIST_FIRST if known() else 0.0
    while time.monotonic() < ends and any(one.state.phase is not Phase.SERVING for one in resources()):  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(LIST_FIRST / 50)
