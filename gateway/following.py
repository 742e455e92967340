"""Pass each inventory of the device source to the lists. Restart a source that fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from devices.source import NOT_REPORTED, RETRY_S, GiveUpError, Hindrance, PartialInventory, follow
from gateway.configuration import effective

if TYPE_CHECKING:
    from devices.source import DeviceSource, Inventory
    from gateway.configuration.reload import FileFate
    from gateway.configuration.settings import Settings
    from gateway.lists import Lists
    from gateway.tasks import Tasks

_log = structlog.get_logger()


class Follower:
    """Passes each inventory of the source to the lists. If the source gives up, the gateway ends."""

    def __init__(self, settings: Settings, config: FileFate, source: DeviceSource, lists: Lists, tasks: Tasks) -> None:
        self._settings, self._config, self._source, self._lists, self._tasks = settings, config, source, lists, tasks
        self._warned: tuple[str, ...] = ()
        self.trouble = NOT_REPORTED
        """Why the source reports no devices; empty if it does."""

    async def run(self, first: asyncio.Event) -> None:
        """Take each inventory. If the source fails, its last inventory stays in force, and it is started again."""

        async def take(inventory: Inventory) -> None:
            self.trouble = ""
            await self._lists.take(inventory)
            if not isinstance(inventory, PartialInventory):
                first.set()
            if first.is_set():
                self._warn()

        while True:
            try:
                self.trouble = await follow(self._source, take)
            except GiveUpError as error:
                _log.error("giving up", reason=str(error), status=error.status)
                self._tasks.end(error.status)
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(RETRY_S)

    def _warn(self) -> None:
        """Log each setting that has no effect on this node, once."""
        found = effective.settings_without_effect(self._config.policy or self._settings.policy, self._source)
        for one in found:
            if one not in self._warned:
                _log.warning("a setting has no effect", reason=one)
        self._warned = found

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Return why the sources can't report devices, or can't offer some of them."""
        told = self._source.hindrances()
        if not self.trouble or (told and self.trouble == NOT_REPORTED):
            return told
        return (Hindrance(self._source.name, self.trouble), *told)
