"""The optional features that use the API server. A feature that fails is logged, and started again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from gateway.configuration.choice import Label
from gateway.kubernetes import node
from gateway.kubernetes.access import AccessError
from gateway.kubernetes.cordons import AnnotatedCordons
from gateway.kubernetes.keeper import Keeper

if TYPE_CHECKING:
    from gateway.kubernetes.client import Client
    from gateway.telling.subject import Subject

RESTART_S: Final = 10.0
"""Seconds until a feature that failed is started again."""

_log = structlog.get_logger()


class Features:
    """Runs the optional features of one gateway.

    ``label`` is the node's label that chooses the configuration file; None if no label does. ``cordons`` follows the node's
    annotation. If DRA is on, the DRA drivers' watch of the node updates it.
    """

    def __init__(self, gateway: Subject) -> None:
        self._gateway, self._settings = gateway, gateway.settings
        choice = self._settings.choice
        self.label = None if choice is None else Label(choice, self._settings.node_label)
        self.cordons = AnnotatedCordons(gateway)

    async def run(self) -> None:
        """Run the features that the settings ask for. Never returns, and never ends the gateway."""
        while True:
            try:
                if not self._settings.asks_api_server:
                    await self.cordons.follow()
                api = node.client(self._settings)
                try:
                    await self._run_all(api)
                finally:
                    api.close()
            except AccessError as error:
                _log.error("the API server can't be asked", reason=str(error), retry_s=RESTART_S)
            except Exception:  # noqa: BLE001 - no defect in here may stop the service for the kubelet
                _log.exception(
                    "features that use the API server failed because of a defect: restarting them", retry_s=RESTART_S
                )
            await asyncio.sleep(RESTART_S)

    async def _run_all(self, api: Client) -> None:
        own = node.OwnNode(api, self._settings)
        own.told.append(self.cordons.take)
        if (label := self.label) is not None:
            own.told.append(lambda found: label.read(found.metadata.labels))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(own.run())
            tasks.create_task(self.cordons.follow())
            if self._settings.writes_node:
                tasks.create_task(Keeper(self._gateway, api, own).run())
