"""Read the node's pods and claims from the API server, for facts that the kubelet's records lack.

The kubelet removes ended pods from its checkpoint only when the device plugin API gives devices to another pod. If all devices are
offered by DRA, that never happens. So the API server decides if a pod that only the checkpoint names has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Iterable
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import Struct, field

from gateway.kubernetes import quantity
from gateway.kubernetes.client import KubernetesError
from gateway.kubernetes.watch import Retries
from gateway.tasks import first_of

if TYPE_CHECKING:
    from gateway.dra.claims import Allocated
    from gateway.kubelet.presence import Presence
    from gateway.memory.holdings import Holdings

PODS_PERIOD_S: Final = 0.2
"""Seconds until the second read of the pods. The API server learns of a pod's end a moment after the kubelet."""
PODS_PERIOD_MAX_S: Final = 10.0
"""The wait doubles with each read, up to this maximum."""
_log = structlog.get_logger()
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_STATIC_POD_UID: Final = "kubernetes.io/config.hash"
"""The annotation of a mirror pod that has the UID of its static pod. The kubelet uses that UID."""


class _Annotations(Struct):
    hash: str = field(default="", name=_STATIC_POD_UID)


class _Metadata(Struct):
    uid: str
    annotations: _Annotations = field(default_factory=_Annotations)


class _Resources(Struct):
    limits: dict[str, str] = {}


class _Container(Struct):
    resources: _Resources = field(default_factory=_Resources)


class _Spec(Struct):
    containers: list[_Container] = []
    first: list[_Container] = field(default_factory=list, name="initContainers")


class _Status(Struct):
    phase: str = ""
    began: str = field(default="", name="startTime")
    by_claim: object = field(default=None, name="extendedResourceClaimStatus")


class Pod(Struct):
    """A pod of the API server, with the devices that it asks for."""

    metadata: _Metadata
    status: _Status = field(default_factory=_Status)
    spec: _Spec = field(default_factory=_Spec)


def living(pods: Iterable[Pod]) -> frozenset[str]:
    """Return the UIDs, as the kubelet knows them, of the pods that have not ended."""
    there = [one for one in pods if one.status.phase not in _ENDED]
    return frozenset(uid for one in there for uid in (one.metadata.uid, one.metadata.annotations.hash) if uid)


def awaits_admission(pods: Iterable[Pod], resources: Container[str]) -> bool:
    """Return True if a pod that the kubelet has not admitted or refused yet needs a device plugin for one of these resources.

    If the scheduler made a claim for the pod, DRA serves the pod.
    """
    for one in pods:
        if one.status.phase not in _ENDED and not one.status.began and one.status.by_claim is None:
            asks = (
                name for container in (*one.spec.containers, *one.spec.first) for name in container.resources.limits
            )
            if any(name in resources for name in asks):
                return True
    return False


def requested(pods: Iterable[Pod], resource: str) -> int:
    """Return how many devices of a resource the node's pods request by resource name, as the kubelet counts them.

    Return 0 if the scheduler made no claim for any pod: then the kubelet raises allocatable to the devices that it gave
    (``sanitizeNodeAllocatable``), and the requests don't matter.
    """
    there = [one for one in pods if one.status.phase not in _ENDED]
    if all(one.status.by_claim is None for one in there):
        return 0
    return sum(max(sum(_wanted(one.spec.containers, resource)), *_wanted(one.spec.first, resource), 0) for one in there)


def _wanted(containers: Iterable[_Container], resource: str) -> list[int]:
    found = (one.resources.limits.get(resource, "") for one in containers)
    return [quantity.read(one) or 0 for one in found]


class EndedPods:
    """Finds out which of the pods that only the checkpoint names have ended."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._doubted: frozenset[str] = frozenset()
        """The UIDs of the pods that only the checkpoint names."""
        self._doubt = asyncio.Event()
        self._known: frozenset[str] = frozenset()
        """The UIDs that the last read checked."""
        self._news = asyncio.Event()
        """Set if there is a UID which that read did not check."""

    def looked(self, resources: Iterable[str]) -> None:
        """Find the pods that only the checkpoint names."""
        last = self._holdings.reader.last
        if last is None or last.records.held is None:
            return
        self._doubted = frozenset().union(*(last.records.only_written(name).values() for name in resources))
        if self._doubted - self._holdings.ended:
            self._doubt.set()
        if self._doubted - self._known:
            self._news.set()

    async def watch(self, ask: Callable[[], Awaitable[list[Pod]]], changed: Callable[[], None]) -> None:
        """Read the pods while there are such pods; call ``changed`` if one has ended. Never returns."""
        retries, wait = Retries(), PODS_PERIOD_S
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            # Take the UIDs before the read: if the API server then lacks a UID, the pod has ended.
            doubted = self._doubted
            wait = PODS_PERIOD_S if doubted - self._known else min(2 * wait, PODS_PERIOD_MAX_S)
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
        looked: returns True once the ResourceSlices are known. Until then, an old slice may still offer a board.
    """

    def __init__(self, ask: Callable[[], Awaitable[Allocated]], looked: Callable[[], bool] = lambda: True) -> None:
        self._ask, self._looked = ask, looked
        self.unsaid = ""
        """Why the last read failed; empty if it did not."""

    def unknown(self, *, looked: bool) -> str:
        """Return a text: what the API server has not reported yet, and why. ``looked``: True if the ResourceSlices are known."""
        what = "claims there are" if looked else "ResourceSlices the node has"
        return f"the API server has not reported yet which {what}" + (
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
            _log.warning("cannot read the claims from the API server: trying again", reason=self.unsaid)
        return found


def starts(presence: Presence, within: float) -> bool:
    """Return True if no kubelet runs, or if it started less than ``within`` seconds ago. The start of this process doesn't matter."""
    if presence.since is None:
        return True
    young = presence.kubelet is None or time.time() - presence.kubelet.mtime_ns / 1e9 < within
    return young and time.monotonic() - presence.since < within


def is_away(presence: Presence, within: float) -> bool:
    """Return True if no kubelet listens, or if it started less than ``within`` seconds ago: it may not have ended pods yet."""
    return not presence.listens() or starts(presence, within)
