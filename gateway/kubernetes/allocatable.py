"""How many devices the scheduler may give by name: said to the API server at once, because the kubelet says it up to 10 s late."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

import structlog

from gateway.kubernetes import ready
from gateway.kubernetes.client import KubernetesError, Patch
from gateway.kubernetes.watch import SELDOM, Backoff

if TYPE_CHECKING:
    from gateway.kubelet.beliefs import Look
    from gateway.kubernetes.client import Client
    from gateway.kubernetes.node import NodeObject

SETTLE: Final = 0.5
"""Seconds from when a lowered allocatable is seen at the API server until devices are withheld: what the scheduler gave away before it
saw that still gets them."""
LOOK: Final = 0.05
"""Seconds between two looks whether it is seen, and until it is asked again whether those pods were admitted: twice as long each time, as a
fleet asks so at once."""
PATIENCE: Final = 5.0
"""Seconds for which that is waited for."""
TELLS: Final = 10.0
"""Seconds after which the kubelet has told the API server by itself which devices there are."""
HEARD: Final = 0.15
"""Seconds until a kubelet has heard of a number that was just told, and at most for which it is told meanwhile."""
LEAVES: Final = 6.0
"""Seconds for which a leader puts off to yield, so that nobody comes by name meanwhile, or was given to the node before."""
_log = structlog.get_logger()


class Allocatable:
    """The node's allocatable devices.

    Args:
        api: the API server.
        node: the node's path there.
        arriving: asks whether pods were given to the node for some of these resources that its kubelet hasn't admitted yet.
        counted: asks how many devices of a resource the kubelet counts for pods on the node; 0 if none of them has a claim for it.
    """

    def __init__(
        self,
        api: Client,
        node: str,
        arriving: Callable[[Collection[str]], Awaitable[bool]],
        counted: Callable[[str], Awaitable[int]],
    ) -> None:
        self._api, self._path, self._arriving, self._counted = api, f"{node}/status", arriving, counted
        self._lowers: Collection[str] = ()
        """The resources of which a lower number was told that the scheduler may not have heard of."""
        self._told_at = 0.0
        self.turn = asyncio.Lock()
        """To be held from when the table is looked at until it was told, or changed."""
        self._backoff = Backoff()
        self._own: NodeObject | None = None
        """The node as the API server shows it."""
        self.came: float | None = None
        """Since when (monotonic seconds) devices came or went without the scheduler being told what the kubelet has now."""

    async def tell(self, counts: Mapping[str, int]) -> None:
        """Say how many there are, by resource.

        Raises:
            KubernetesError: it can't be said.
        """
        body = {"status": {"allocatable": {name: str(count) for name, count in counts.items()}}}
        await self._api.patch(self._path, body, Patch.MERGE)

    async def lower(self, stay: Mapping[str, Collection[str]]) -> None:
        """Say so of those that stay, before others are withheld. The kubelet does within 10 s, and pods that come meanwhile fail (run).

        Returns when the scheduler has heard of it and the kubelet has admitted who came before; after ``PATIENCE`` in any case. A kubelet that
        tells of its devices meanwhile writes over what was told: then it is told again.

        Raises:
            KubernetesError: it can't be said, or not be known who comes.
        """
        counts = {name: len(ids) for name, ids in stay.items()}
        self._lowers = counts.keys()
        try:
            await self._lower(counts)
        finally:
            self._lowers = ()

    async def _lower(self, counts: Mapping[str, int]) -> None:
        await self.tell(counts)
        seen = self._told_at = time.monotonic()
        ends, wait = seen + PATIENCE, LOOK
        while (now := time.monotonic()) < ends:
            if self._shows_more(counts):
                seen = now
                if now - self._told_at >= SETTLE:
                    await self.tell(counts)
                    self._told_at = now
            elif now - seen >= SETTLE:
                if not await self._arriving(counts):
                    return
                wait *= 2
            await asyncio.sleep(min(wait, ends - now))
        _log.info("pods that were given to the node may find no device", waited_s=PATIENCE)

    async def let_in(self, resource: str) -> None:
        """Wait, before a pod is given a device, until the kubelet would admit it though a lower number was told.

        The pod was bound before the scheduler had heard of that. The kubelet checks it against the API server's number once Allocate is
        answered, so it is told for a moment what the kubelet counts: the scheduler binds no more by that.
        """
        if resource in self._lowers:
            with contextlib.suppress(KubernetesError, TimeoutError):
                async with asyncio.timeout(2 * HEARD):
                    if count := await self._counted(resource):
                        self._told_at = time.monotonic()
                        await self.tell({resource: count})
                        await asyncio.sleep(HEARD)

    async def leave(self, stay: Mapping[str, Collection[str]]) -> None:
        """Say that there are none, for the moment in which no gateway is registered: who comes then by name fails. Nothing is told after it."""
        if any(stay.values()):
            with contextlib.suppress(KubernetesError, TimeoutError):
                async with asyncio.timeout(LEAVES):
                    await self.turn.acquire()
                    await self.lower(dict.fromkeys(stay, ()))

    async def admitted(self, stay: Collection[str], seconds: float) -> None:
        """Wait until the kubelet has admitted the pods that are bound to the node and ask for these resources; at most so many seconds.

        The kubelet counts pods that have DRA's GPUs by name against the allocatable of the API server. If that is lowered first, the
        kubelet fails the others (``OutOfnvidia.com/gpu``, run on 1.37).
        """
        with contextlib.suppress(KubernetesError, TimeoutError):
            async with asyncio.timeout(seconds):
                wait = LOOK
                while await self._arriving(stay):
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, SELDOM)

    def _shows_more(self, counts: Mapping[str, int]) -> bool:
        own = self._own
        return own is not None and any(ready.allocatable(own, name) > count for name, count in counts.items())

    def heard(self, own: NodeObject) -> None:
        """Take note of what the API server shows of the node."""
        self._own = own

    async def hold_back(self, stay: Mapping[str, Collection[str]]) -> None:
        """Say so of those that stay where more is shown: a kubelet that starts tells of all that it is to admit its pods with."""
        async with self.turn:
            counts = {name: len(ids) for name, ids in stay.items()}
            if self._shows_more(counts) and self._backoff.due(counts, time.monotonic()):
                try:
                    await self.tell(counts)
                except KubernetesError as error:
                    _log.info("pods may still come for GPUs that go to DRA", reason=str(error))

    async def catch_up(self, last: Look | None, stays: Callable[[], Mapping[str, Collection[str]]]) -> None:
        """Tell of what came as soon as the kubelet says that it would give it away: what the list has for pods, and nothing else."""
        if (came := self.came) is None:
            return
        async with self.turn:
            there = stays()
            if (
                last is not None
                and last.at > came
                and all((last.view.allocatable or {}).get(name, frozenset()) == ids for name, ids in there.items())
            ):
                try:
                    await self.tell({name: len(ids) for name, ids in there.items()})
                except KubernetesError as error:
                    _log.info("the kubelet tells the API server of GPUs that came back", reason=str(error))
            elif time.monotonic() - came < TELLS:
                return
            if self.came == came:
                self.came = None
