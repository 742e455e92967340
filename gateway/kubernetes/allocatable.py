"""How many devices the scheduler may give by name: said to the API server at once, because the kubelet says it up to 10 s late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

import structlog

from gateway.kubernetes.client import KubernetesError, Patch

if TYPE_CHECKING:
    from gateway.kubelet.beliefs import Look
    from gateway.kubernetes.client import Client
    from gateway.kubernetes.node import NodeObject

SETTLE: Final = 0.5
"""Seconds from a lowered allocatable until devices are withheld: what the scheduler gave away before that still gets them."""
TELLS: Final = 10.0
"""Seconds after which the kubelet has told the API server by itself which devices there are."""
_log = structlog.get_logger()


class Allocatable:
    """The node's allocatable devices.

    Args:
        api: the API server.
        node: the node's path there.
    """

    def __init__(self, api: Client, node: str) -> None:
        self._api, self._path = api, f"{node}/status"
        self.turn = asyncio.Lock()
        """To be held from when the table is looked at until it was told, or changed."""
        self._shown: Mapping[str, str] = {}
        """What the API server shows, by resource."""
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

        Raises:
            KubernetesError: it can't be said.
        """
        await self.tell({name: len(ids) for name, ids in stay.items()})
        await asyncio.sleep(SETTLE)

    def heard(self, own: NodeObject) -> None:
        """Take note of what the API server shows of the node."""
        self._shown = own.status.allocatable

    async def hold_back(self, stay: Mapping[str, Collection[str]]) -> None:
        """Say so of those that stay where more is shown: a kubelet that starts tells of all that it is to admit its pods with."""
        async with self.turn:
            shown = {name: self._shown.get(name, "") for name in stay}
            if any(shown[name].isdecimal() and int(shown[name]) > len(ids) for name, ids in stay.items()):
                try:
                    await self.tell({name: len(ids) for name, ids in stay.items()})
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
