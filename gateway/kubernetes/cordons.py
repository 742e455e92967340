"""Cordon the devices that an annotation of the node names, so that operators need no shell on the node."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog

from devices.source import Hindrance
from gateway.memory.rows import Cordon
from gateway.tasks import first_of
from gateway.telling import orders
from gateway.wires.control import ControlError

if TYPE_CHECKING:
    from gateway.kubernetes.node import NodeObject
    from gateway.telling.subject import Subject

ANNOTATION: Final = orders.CORDON_ANNOTATION
_REASON: Final = f"by the node's annotation {ANNOTATION}"
CHECK_S: Final = 2.0
"""Seconds between two comparisons of the annotation with the cordons in force."""
_log = structlog.get_logger()


class AnnotatedCordons:
    """Keeps the annotation's cordons in force. Without the API server, the last known annotation stays in force."""

    def __init__(self, gateway: Subject) -> None:
        self._gateway = gateway
        self._wanted: frozenset[str] | None = None
        """The IDs in the annotation; None: unknown yet."""
        self._wrong = ""
        self._news = asyncio.Event()

    def take(self, own: NodeObject) -> None:
        """Read the device IDs in the node's annotation."""
        names = [name.strip() for name in own.metadata.annotations.get(ANNOTATION, "").split(",")]
        try:
            ids = frozenset(
                orders.order({"op": "cordon", "id": name, "reason": _REASON}).device_id for name in names if name
            )
            self._wanted, self._wrong = ids, ""
        except ControlError as error:
            self._wrong = str(error)
        self._news.set()

    async def follow(self) -> None:
        """Apply the annotation while this gateway leads. Never returns."""
        while True:
            if self._gateway.lead.leads and self._wanted is not None:
                await self._settle(self._wanted)
            await first_of(self._news, seconds=CHECK_S)
            self._news.clear()

    async def _settle(self, wanted: frozenset[str]) -> None:
        gateway, ledger = self._gateway, self._gateway.holdings.ledger
        if not any(self._changes(wanted)):
            return
        async with gateway.lock:  # Cordon commands hold the same lock.
            new, lifted = self._changes(wanted)
            for one in sorted(new):
                ledger.cordon(one, Cordon(_REASON, time.time(), annotated=True))
            for one in lifted:
                ledger.uncordon(one)
        _log.info("annotated cordons changed", key=ANNOTATION, cordoned=sorted(new), uncordoned=sorted(lifted))
        await gateway.update()
        await gateway.holdings.scribe.durable()

    def _changes(self, wanted: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return the IDs to cordon, and those to uncordon."""
        cordons = self._gateway.holdings.ledger.cordons
        return wanted - cordons.keys(), frozenset(one for one in cordons if cordons[one].annotated) - wanted

    def hindrances(self) -> list[Hindrance]:
        """Return which IDs of the annotation are wrong or unknown, with the reasons."""
        place, resources = self._gateway.source.place, self._gateway.resources.values()
        missing = [
            one
            for one in sorted(self._wanted or ())
            if place(one) is None and not any(one in resource.entries for resource in resources)
        ]
        words = f"no device here is called {', '.join(missing)[:200]}. Write whole IDs" if missing else ""
        return [Hindrance(f"annotation {ANNOTATION}", one) for one in (self._wrong, words) if one]
