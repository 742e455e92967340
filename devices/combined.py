"""Several sources of devices as one: a node with GPUs of two vendors, or with other devices besides.

Each resource belongs to the source that listed it. The inventory is whole, so the first one waits until every source has
looked; after that each change of one is told with what the others said last.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Sequence

from devices.boards import Place
from devices.model import ContainerAnswer, ContainerRequest, PreferredRequest, Sayable
from devices.policy import Policy
from devices.source import DeviceSource, Facts, Fate, Inventory


class Combined:
    """A ``DeviceSource`` over at least one other. Where two list the same resource, the first of them has it.

    A resource that nobody listed yet belongs to the first source.
    """

    def __init__(self, sources: Sequence[DeviceSource]) -> None:
        self.name = "+".join(source.name for source in sources)
        self._sources = tuple(sources)
        self._said: dict[int, Inventory] = {}
        self._owners: dict[str, DeviceSource] = {}

    async def watch(self) -> AsyncGenerator[Inventory]:
        """Yield what all sources list together, and again after each change of one.

        Raises:
            GiveUpError: one of them can't go on.
        """
        news = asyncio.Event()
        following = [
            asyncio.ensure_future(self._follow(place, source, news)) for place, source in enumerate(self._sources)
        ]
        try:
            while True:
                waiting = asyncio.ensure_future(news.wait())
                await asyncio.wait({waiting, *following}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                for one in following:
                    if one.done():
                        one.result()
                news.clear()
                if len(self._said) == len(self._sources):
                    yield self._merged()
        finally:
            for one in following:
                one.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def answer(self, resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        """Let the source that listed the resource answer.

        Raises:
            RefusedError: it refuses.
        """
        return await self._owner(resource).answer(resource, request, sayable)

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Let the source that listed the resource choose.

        Raises:
            RefusedError: no choice meets the request.
        """
        return await self._owner(resource).prefer(resource, request)

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Let the source that listed the resource make its devices ready.

        Raises:
            RefusedError: they can't be made ready.
        """
        await self._owner(resource).prepare(resource, device_ids)

    def fate(self, resource: str, device_id: str) -> Fate:
        """Ask whoever listed the resource; where nobody did in this process, all who can tell must say it was withdrawn."""
        if resource in self._owners:
            return self._owners[resource].fate(resource, device_id)
        fates = {source.fate(resource, device_id) for source in self._sources} - {Fate.UNKNOWN}
        return Fate.WITHDRAWN if fates == {Fate.WITHDRAWN} else Fate.LOST

    def facts(self, resource: str, device_id: str) -> Facts:
        """Say what the source that listed the resource knows."""
        return self._owner(resource).facts(resource, device_id)

    def place(self, device_id: str) -> Place | None:
        """Ask every source: IDs are of one source only."""
        return next((place for source in self._sources if (place := source.place(device_id)) is not None), None)

    def adopt(self, policy: Policy) -> None:
        """Tell every source."""
        for source in self._sources:
            source.adopt(policy)

    async def release(self, device_ids: Collection[str]) -> Collection[str]:
        """Let go of the hardware beneath these devices, whosever it is."""
        return [one for source in self._asked(device_ids) for one in await source.release(device_ids)]

    async def acquire(self, device_ids: Collection[str]) -> Collection[str]:
        """Look again at the hardware beneath these devices, whosever it is."""
        return [one for source in self._asked(device_ids) for one in await source.acquire(device_ids)]

    async def _follow(self, place: int, source: DeviceSource, news: asyncio.Event) -> None:
        async with contextlib.aclosing(source.watch()) as inventories:
            async for inventory in inventories:
                self._said[place] = inventory
                news.set()
        raise RuntimeError(f"the source {source.name} ended, which it must not")

    def _merged(self) -> Inventory:
        merged = {}
        for place, source in enumerate(self._sources):
            for resource, listing in self._said[place].items():
                if resource not in merged:
                    merged[resource] = listing
                    self._owners[resource] = source
        return merged

    def _owner(self, resource: str) -> DeviceSource:
        return self._owners.get(resource, self._sources[0])

    def _asked(self, device_ids: Collection[str]) -> Sequence[DeviceSource]:
        """The sources that have some of these devices; all where none is named."""
        if not device_ids:
            return self._sources
        wanted = frozenset(device_ids)
        return [
            source
            for place, source in enumerate(self._sources)
            if any(device.id in wanted for one in self._said.get(place, {}).values() for device in one.devices)
        ]
