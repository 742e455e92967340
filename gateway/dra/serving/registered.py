"""The sockets of our drivers. Each driver is registered while no other process has its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gateway.dra import sockets
from gateway.dra.service import Service, serve

if TYPE_CHECKING:
    from gateway.dra.service import Claims
    from gateway.dra.serving.rivals import Rival

_log = structlog.get_logger()


class Registered:
    """The servers of our drivers.

    Args:
        registry: the kubelet's folder.
        token: this gateway's token.
        decider: returns the token of another gateway that decides about claims; empty: there is none.
        kubelet: returns the kubelet's minor version; None: unknown.
        lacking: returns why the kubelet can't prepare claims; '' if it may.
    """

    def __init__(
        self,
        registry: Path,
        token: str,
        decider: Callable[[], str],
        kubelet: Callable[[], int | None],
        lacking: Callable[[], str],
    ) -> None:
        self._registry, self._token, self._decider = registry, token, decider
        self._kubelet, self._lacking = kubelet, lacking
        self._services: list[Service] = []

    async def serve(
        self,
        claims: Claims,
        rival: Rival,
        prepared: Callable[[], int],
        withdrawn: Callable[[], None],
        learned: asyncio.Event,
    ) -> None:
        """Keep a driver registered whenever its name is free and that breaks no other gateway's. Never returns.

        Args:
            claims: the driver's claims.
            rival: knows of another process with its name.
            prepared: returns the number of claims that we prepared.
            withdrawn: called when the driver is no longer registered.
            learned: set once the kubelet's version is known.
        """
        driver = claims.name
        others = partial(sockets.others, self._registry, driver, self._token)
        await sockets.until_alone(driver, others, self._kubelet, self._lacking, learned, claims.decides)
        if swept := await asyncio.to_thread(sockets.sweep, self._registry, driver):
            _log.info("removed sockets that dead gateways left", sockets=swept)
        elsewhere = partial(sockets.of_another, self._registry, driver, self._decider)
        path = sockets.path_of(self._registry, driver, self._token)
        while True:
            await rival.until(lambda: not rival.unregistered(prepared()))
            service = await serve(lambda: Service(claims, elsewhere), path)
            self._services.append(service)
            # While we are registered, the kubelet unprepares our claims with us.
            await rival.until(lambda: bool(rival.words and rival.unregistered(0)) and not prepared())
            withdrawn()
            await service.stop()
            self._services.remove(service)

    async def close(self) -> None:
        """Remove the sockets, so that another gateway is called. Waiting calls are passed on to it."""
        newest = partial(sockets.newest, self._registry)
        await asyncio.gather(*(one.stop(newest(one.name, self._token)) for one in self._services))

    async def finish(self) -> None:
        """Wait for the answers to calls that were passed on."""
        await asyncio.gather(*(one.finish() for one in self._services))
