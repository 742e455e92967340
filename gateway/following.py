"""Following the device source: each inventory is taken as it comes, and a source that fails is asked anew."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from devices.source import NOT_TOLD, GiveUpError, Hindrance, Partial

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from devices.source import DeviceSource, Inventory

SOURCE_RETRY = 5.0
"""Seconds until a source that failed is asked again."""
_log = structlog.get_logger()


class Follower:
    """Follows one source: ``take`` takes each inventory, ``end`` ends the gateway where the source gives up."""

    def __init__(
        self, source: DeviceSource, take: Callable[[Inventory], Awaitable[None]], end: Callable[[int], None]
    ) -> None:
        self._source, self._take, self._end = source, take, end
        self.trouble = NOT_TOLD
        """Why the source doesn't tell of devices; empty where it does."""

    async def run(self, first: asyncio.Event) -> None:
        """Take each inventory as it comes. A source that fails is asked anew; what it said last stays."""
        while True:
            try:
                async with contextlib.aclosing(self._source.watch()) as inventories:
                    async for inventory in inventories:
                        self.trouble = ""
                        await self._take(inventory)
                        if not isinstance(inventory, Partial):
                            first.set()
                self.trouble = "it ended, which it must not: it is asked again"
                _log.error("the device source ended, which it must not: asking it again", retry_s=SOURCE_RETRY)
            except GiveUpError as error:
                _log.error("giving up", reason=str(error), status=error.status)
                self._end(error.status)
                await asyncio.get_running_loop().create_future()
            except Exception as error:  # noqa: BLE001 - whatever a backend does, the devices stay
                self.trouble = f"it failed ({error!r}): its last word counts"
                _log.exception("the device source failed: its last inventory stays", retry_s=SOURCE_RETRY)
            await asyncio.sleep(SOURCE_RETRY)

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Say what keeps the sources of devices from telling of them, or from offering some."""
        told = self._source.hindrances()
        if not self.trouble or (told and self.trouble == NOT_TOLD):
            return told
        return (Hindrance(self._source.name, self.trouble), *told)
