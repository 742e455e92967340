"""Several sources of devices as one: GPUs of two vendors on a node, or GPUs and other devices.

The sources are independent. The devices of each are passed on at once. A source that is silent, fails or gives up doesn't
affect the others; it is started again, and its last inventory stays in force. Each resource belongs to one source: the one that
listed it first, or until then the one that claims its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final

import structlog

from devices.boards import Place
from devices.model import ContainerAnswer, ContainerRequest, PreferredRequest, Sendable
from devices.policy import Policy
from devices.source import (
    NOT_REPORTED,
    RETRY_S,
    Absence,
    Behind,
    DeviceSource,
    Facts,
    GiveUpError,
    Hindrance,
    Inventory,
    Listing,
    PartialInventory,
    Reading,
    Unusable,
    follow,
    not_offered,
)

RETRY_MAX_S: Final = 60.0
"""Most seconds until a source that gave up is started again; the wait doubles each time."""

_RESTART: Final = 75
"""The status of a ``GiveUpError`` that asks for a restart of the process."""

_log = structlog.get_logger()


class Combined:
    """A ``DeviceSource`` over several others. If two list the same resource, the first one keeps it, and the other is reported."""

    def __init__(self, sources: Sequence[DeviceSource]) -> None:
        self.name = "+".join(source.name for source in sources)
        self._sources = tuple(sources)
        self._said: dict[DeviceSource, Inventory] = {}
        self._owners: dict[str, DeviceSource] = {}
        self._troubles: dict[DeviceSource, str] = {}
        """Why a source isn't running now."""
        self._given_up: dict[DeviceSource, GiveUpError] = {}
        self._rivals: frozenset[tuple[str, str]] = frozenset()
        """Resources that a source lists although another source has them."""
        self._news, self._told = asyncio.Event(), asyncio.Event()
        """``_news``: a source reported something. ``_told``: the next inventory was taken."""
        self._told.set()

    async def watch(self) -> AsyncGenerator[Inventory]:
        """Yield the common inventory once a source has reported, and again after each change.

        Raises:
            GiveUpError: a source needs a restart of the process (status 75), or no other source has a device.
        """
        told = self._told = asyncio.Event()
        following = [asyncio.ensure_future(self._follow(source)) for source in self._sources]
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                told, self._told = self._told, asyncio.Event()
                self._mind()
                if self._said:
                    yield self._merged()
                told.set()
        finally:
            told.set()
            self._told.set()
            for one in following:
                one.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def answer(self, resource: str, request: ContainerRequest, sendable: Sendable) -> ContainerAnswer:
        """Let the resource's source answer.

        Raises:
            RefusedError: the source refuses; NOT_FOUND: no source has the resource.
        """
        return await self._asked_of(resource, request.device_ids).answer(resource, request, sendable)

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Let the resource's source choose.

        Raises:
            RefusedError: no choice meets the request; NOT_FOUND: no source has the resource.
        """
        return await self._asked_of(resource).prefer(resource, request)

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Let the resource's source prepare its devices.

        Raises:
            RefusedError: they can't be prepared; NOT_FOUND: no source has the resource.
        """
        await self._asked_of(resource, device_ids).prepare(resource, device_ids)

    def absence(self, resource: str, device_id: str) -> Absence:
        """Ask the source that listed the resource. If none has in this process, ask all: LOST wins, and is the default."""
        if resource in self._owners:
            return self._owners[resource].absence(resource, device_id)
        absences = {source.absence(resource, device_id) for source in self._sources} - {Absence.UNKNOWN}
        if not absences or Absence.LOST in absences:
            return Absence.LOST
        return Absence.EXCLUDED if Absence.EXCLUDED in absences else Absence.WITHDRAWN

    def claims(self, resource: str) -> bool:
        """Return True if a source claims the resource."""
        return self._owner(resource) is not None

    def source_of(self, resource: str) -> str:
        """Return the name of the resource's source; if it has none, of all sources."""
        owner = self._owner(resource)
        return self.name if owner is None else owner.name

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Return what keeps each source from reporting its devices, and which resources are listed twice."""
        found = []
        for source in self._sources:
            own = source.hindrances()
            if source in self._troubles:
                found.append(Hindrance(source.name, self._troubles[source], held_up=source in self._given_up))
            elif source not in self._said and not own:
                found.append(Hindrance(source.name, NOT_REPORTED))
            found += own
        return (*found, *(Hindrance(name, self._shadowed(name, resource)) for resource, name in sorted(self._rivals)))

    def unusable(self) -> tuple[Unusable, ...]:
        """Return the GPUs of every source that no resource lists."""
        return tuple(one for source in self._sources for one in source.unusable())

    def facts(self, resource: str) -> Callable[[str], Facts]:
        """Return the facts of the resource's source."""
        owner = self._owner(resource)
        return (lambda _: Facts()) if owner is None else owner.facts(resource)

    def behind(self, resource: str) -> Behind | None:
        """Return the plugin of the resource, as its source does."""
        owner = self._owner(resource)
        return None if owner is None else owner.behind(resource)

    def place(self, device_id: str) -> Place | None:
        """Return the place from the source that knows the ID."""
        return next((place for source in self._sources if (place := source.place(device_id)) is not None), None)

    def adopt(self, policy: Policy) -> None:
        """Pass new settings to every source."""
        for source in self._sources:
            source.adopt(policy)

    def readings(self) -> Sequence[Reading]:
        """Read the gauges of all sources. Blocks."""
        return [one for source in self._sources for one in source.readings()]

    async def lead(self) -> None:
        """Tell every source to lead, and wait until the consumer of ``watch`` has processed the resulting inventory."""
        before = dict(self._said)
        await asyncio.gather(*(source.lead() for source in self._sources))
        if any(said is not before.get(source) for source, said in self._said.items()):
            told = self._told
            self._news.set()
            await told.wait()

    async def rest(self) -> None:
        """Tell every source that this gateway no longer leads."""
        await asyncio.gather(*(source.rest() for source in self._sources))

    async def release(self, device_ids: Collection[str]) -> Collection[str]:
        """Release the hardware of these devices in every source that has some."""
        return await _of_all(source.release(device_ids) for source in self._having(device_ids))

    async def acquire(self, device_ids: Collection[str]) -> Collection[str]:
        """Acquire the hardware of these devices in every source that has some."""
        return await _of_all(source.acquire(device_ids) for source in self._having(device_ids))

    async def _follow(self, source: DeviceSource) -> None:
        """Run one source. Never returns; a source that fails is started again."""
        pause = RETRY_S

        async def take(inventory: Inventory) -> None:
            nonlocal pause
            self._troubles.pop(source, None)
            self._given_up.pop(source, None)
            self._said[source], pause = inventory, RETRY_S
            self._news.set()

        while True:
            wait = RETRY_S
            try:
                self._troubles[source] = await follow(source, take)
            except GiveUpError as error:
                wait, pause = pause, min(2 * pause, RETRY_MAX_S)
                self._given_up[source] = error
                self._troubles[source] = f"it gave up, and is asked again: {error}"
                _log.error("a device source gave up", source=source.name, reason=str(error), retry_s=wait)
            self._news.set()
            await asyncio.sleep(wait)

    def _mind(self) -> None:
        """End if a source can't go on.

        Raises:
            GiveUpError: as ``watch``.
        """
        for source, error in self._given_up.items():
            others = [one for one in self._sources if one is not source]
            silent = [one for one in others if one not in self._said and one not in self._given_up]
            having = [one for one in others if any(listing.devices for listing in self._said.get(one, {}).values())]
            if error.status == _RESTART or not (silent or having or source in self._said):
                raise error

    def _merged(self) -> Inventory:
        merged: dict[str, Listing] = {}
        rivals = set()
        listed = [(resource, source) for source in self._sources for resource in self._said.get(source, {})]
        for resource, source in listed:
            owner = self._owners.get(resource)
            if owner is None or resource not in self._said[owner]:
                owner = self._owners[resource] = source
            merged[resource] = self._said[owner][resource]
            if owner is not source:
                rivals.add((resource, source.name))
        for resource, name in sorted(rivals - self._rivals):
            _log.error(
                "a resource is listed twice", resource=resource, source=name, reason=self._shadowed(name, resource)
            )
        self._rivals = frozenset(rivals)
        silent = [source for source in self._sources if source not in self._said]
        if not silent:
            return merged
        return PartialInventory(merged, lambda resource: any(source.claims(resource) for source in silent))

    def _shadowed(self, name: str, resource: str) -> str:
        return (
            f"{resource} of {self._owners[resource].name} keeps the name, and that of {name} isn't offered: give one of them "
            "another name in the configuration"
        )

    def _owner(self, resource: str) -> DeviceSource | None:
        """Return the source that listed a resource, else one that claims its name, preferably one that hasn't reported yet."""
        if resource in self._owners:
            return self._owners[resource]
        claim = [source for source in self._sources if source.claims(resource)]
        return next((source for source in claim if source not in self._said), claim[0] if claim else None)

    def _asked_of(self, resource: str, device_ids: Collection[str] = ()) -> DeviceSource:
        """Return the resource's source; if it has none any more, the source that has all these devices.

        Raises:
            RefusedError: NOT_FOUND, there is neither.
        """
        having = (one for one in self._sources if device_ids and None not in map(one.place, device_ids))
        owner = self._owner(resource) or next(having, None)
        if owner is None:
            raise not_offered(resource)
        return owner

    def _having(self, device_ids: Collection[str]) -> Sequence[DeviceSource]:
        """Return the sources that have some of these devices; all sources if no device is named."""
        if not device_ids:
            return self._sources
        wanted = frozenset(device_ids)
        return [
            source
            for source in self._sources
            if any(device.id in wanted for one in self._said.get(source, {}).values() for device in one.devices)
        ]


async def _of_all(calls: Iterable[Awaitable[Collection[str]]]) -> Collection[str]:
    return [device_id for some in await asyncio.gather(*calls) for device_id in some]
