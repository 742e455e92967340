"""Set the node's allocatable devices at the API server at once, because the kubelet does so up to 10 s late."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

import structlog

from gateway.dra.pods import awaits_admission, requested
from gateway.kubernetes import ready
from gateway.kubernetes.client import KubernetesError, Patch
from gateway.kubernetes.watch import REPEAT_MAX_S, Backoff

if TYPE_CHECKING:
    from gateway.dra.pods import Pod
    from gateway.kubelet.reader import Look
    from gateway.kubernetes.client import Client
    from gateway.kubernetes.node import NodeObject

SETTLE_S: Final = 0.5
"""Seconds from when the API server shows a lower number until devices are withheld: the scheduler sees the number later."""
CHECK_S: Final = 0.05
"""Seconds between two checks of the API server's number, doubled each time: all nodes of a fleet may check at once."""
MAX_CHECKS_S: Final = 5.0
"""Most seconds for these checks."""
KUBELET_REPORTS_S: Final = 10.0
"""Seconds after which the kubelet has reported its devices to the API server itself."""
KUBELET_SEES_S: Final = 0.15
"""Seconds until a kubelet has seen a new number, and for which a higher number is set for it."""
LEAVE_WAIT_S: Final = 6.0
"""Most seconds for which a leader waits before it yields, until no pod that asks by resource name is being bound or admitted."""
_log = structlog.get_logger()


class Allocatable:
    """The node's allocatable devices.

    Args:
        api: the API server.
        node: the node's path at the API server.
        pods: reads the node's pods.
    """

    def __init__(self, api: Client, node: str, pods: Callable[[], Awaitable[list[Pod]]]) -> None:
        self._api, self._path, self._pods = api, f"{node}/status", pods
        self._lowers: Collection[str] = ()
        """The resources with a lower number that the scheduler may not have seen yet."""
        self._told_at = 0.0
        self.turn = asyncio.Lock()
        """Hold it from a read of the table of sides until the number is set."""
        self._backoff = Backoff()
        self._own: NodeObject | None = None
        """The node, as the API server shows it."""
        self.came: float | None = None
        """When devices came back that the API server doesn't show yet (monotonic seconds); None: it shows all."""

    async def tell(self, counts: Mapping[str, int]) -> None:
        """Set how many devices there are, by resource.

        Raises:
            KubernetesError: it failed.
        """
        body = {"status": {"allocatable": {name: str(count) for name, count in counts.items()}}}
        await self._api.patch(self._path, body, Patch.MERGE)

    async def lower(self, stay: Mapping[str, Collection[str]]) -> None:
        """Set the number of the devices that stay, before others are withheld.

        The kubelet would do so within 10 s, but pods that are bound before that fail (run). Returns when the scheduler has seen
        the number and the kubelet has admitted earlier pods, at the latest after ``MAX_CHECKS_S``. If the kubelet overwrites the
        number meanwhile, it is set again.

        Raises:
            KubernetesError: it failed, or the pods can't be read.
        """
        counts = {name: len(ids) for name, ids in stay.items()}
        self._lowers = counts.keys()
        try:
            await self.tell(counts)
            seen = self._told_at = time.monotonic()
            ends, wait = seen + MAX_CHECKS_S, CHECK_S
            while (now := time.monotonic()) < ends:
                if self._shows_more(counts):
                    seen = now
                    if now - self._told_at >= SETTLE_S:
                        await self.tell(counts)
                        self._told_at = now
                elif now - seen >= SETTLE_S:
                    if not awaits_admission(await self._pods(), counts):
                        return
                    wait *= 2
                await asyncio.sleep(min(wait, ends - now))
        finally:
            self._lowers = ()
        _log.info("pods that were bound to the node may get no device", waited_s=MAX_CHECKS_S)

    async def let_in(self, resource: str) -> None:
        """Before a pod is given a device, make sure that the kubelet admits it, although a lower number was set.

        The pod was bound before the scheduler saw that number. Once Allocate is answered, the kubelet checks the pod against the
        API server's number. So the number that the kubelet counts is set for a moment. With it, the scheduler binds no further
        pods.
        """
        if resource in self._lowers:
            with contextlib.suppress(KubernetesError, TimeoutError):
                async with asyncio.timeout(2 * KUBELET_SEES_S):
                    if count := requested(await self._pods(), resource):
                        self._told_at = time.monotonic()
                        await self.tell({resource: count})
                        await asyncio.sleep(KUBELET_SEES_S)

    async def leave(self, stay: Mapping[str, Collection[str]]) -> None:
        """Set the number to 0, because pods that ask by resource name would fail while no gateway is registered. It is the last change."""
        if any(stay.values()):
            with contextlib.suppress(KubernetesError, TimeoutError):
                async with asyncio.timeout(LEAVE_WAIT_S):
                    await self.turn.acquire()
                    await self.lower(dict.fromkeys(stay, ()))

    async def admitted(self, stay: Collection[str], seconds: float) -> None:
        """Wait until the kubelet has admitted the pods that are bound to the node and ask for these resources, or the time ends.

        The kubelet counts pods that have DRA's GPUs by resource name against the API server's allocatable. If that were lowered
        first, the kubelet would fail the other pods (``OutOfnvidia.com/gpu``, run on 1.37).
        """
        with contextlib.suppress(KubernetesError, TimeoutError):
            async with asyncio.timeout(seconds):
                wait = CHECK_S
                while awaits_admission(await self._pods(), stay):
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, REPEAT_MAX_S)

    def _shows_more(self, counts: Mapping[str, int]) -> bool:
        own = self._own
        return own is not None and any(ready.allocatable(own, name) > count for name, count in counts.items())

    def heard(self, own: NodeObject) -> None:
        """Note the node, as the API server shows it."""
        self._own = own

    async def hold_back(self, stay: Mapping[str, Collection[str]]) -> None:
        """If the API server shows more devices than those that stay, lower the number again: a starting kubelet reports all devices."""
        async with self.turn:
            counts = {name: len(ids) for name, ids in stay.items()}
            if self._shows_more(counts) and self._backoff.due(counts, time.monotonic()):
                try:
                    await self.tell(counts)
                except KubernetesError as error:
                    _log.info("pods may still be bound for GPUs that move to DRA", reason=str(error))

    async def catch_up(self, last: Look | None, stays: Callable[[], Mapping[str, Collection[str]]]) -> None:
        """Raise the number as soon as the kubelet can give the devices that came back, and only these."""
        if (came := self.came) is None:
            return
        async with self.turn:
            there = stays()
            if (
                last is not None
                and last.at > came
                and all((last.records.allocatable or {}).get(name, frozenset()) == ids for name, ids in there.items())
            ):
                try:
                    await self.tell({name: len(ids) for name, ids in there.items()})
                except KubernetesError as error:
                    _log.info("only the kubelet reports GPUs that came back to the API server", reason=str(error))
            elif time.monotonic() - came < KUBELET_REPORTS_S:
                return
            if self.came == came:
                self.came = None
