"""The listeners of a gateway: control socket, probes and metrics. The last two are imported only if they are switched on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from gateway.wires.control import ControlError, ControlServer, socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.configuration.settings import Settings
    from gateway.tasks import Tasks
    from gateway.telling import status
    from gateway.telling.subject import Subject
    from gateway.wires import http
    from gateway.wires.control import Handler

    _StatusReader = Callable[[bool], Callable[[], status.GatewayStatus]]

LISTEN_RETRY_S = 5.0
"""Seconds until the next try, if an address is in use or the control socket can't be made."""
_log = structlog.get_logger()


class Listeners:
    """The listeners that a gateway's settings switch on; ``token`` names the control socket."""

    def __init__(self, settings: Settings, token: str, tasks: Tasks) -> None:
        self._settings, self._token, self._tasks = settings, token, tasks
        self._control: ControlServer | None = None
        self._opening: asyncio.Task[None] | None = None

    @property
    def has_control(self) -> bool:
        """True if the control socket is open, or will be as soon as it can be made."""
        return self._control is not None

    async def open_control(self, handlers: Mapping[str, Handler]) -> None:
        """Listen for orders on the control socket. If it can't be made now, it is made later."""
        self._control = server = ControlServer(socket_path(self._settings.state_dir, self._token), handlers)
        try:
            await server.start()
        except ControlError as error:
            told = {"reason": str(error), "retry_s": LISTEN_RETRY_S}
            _log.warning("the control socket can't be made: gateway status and cordon can't reach this gateway", **told)
            self._opening = self._tasks.start(_open_later(server))

    async def close_control(self) -> None:
        """Close the control socket."""
        if self._opening is not None:
            self._opening.cancel()
        if self._control is not None:
            await self._control.close()
            self._control = None

    def open_metrics(self, document: _StatusReader, gateway: Subject) -> None:
        """Serve metrics, if they are switched on."""
        if self._settings.metrics_address is not None:
            from gateway.telling import metrics  # noqa: PLC0415 - its imports cost memory

            told = metrics.Metrics(document, gateway.tally, device_ids=self._settings.metrics_device_ids)
            routes: dict[str, http.Handler] = {"/metrics": told.answer}
            if self._settings.gpu_metrics:
                from gateway.telling import gpumetrics  # noqa: PLC0415 - as above

                routes["/metrics"] = gpumetrics.added(gateway, told.answer)
            answer = self._serve_http("metrics", self._settings.metrics_address, routes)
            self._tasks.spawn("metrics", answer)

    def open_probes(self, gateway: Subject) -> None:
        """Answer probes, if they are switched on."""
        if self._settings.probe_address is not None:
            from gateway.telling import probes  # noqa: PLC0415 - as above

            answer = self._serve_http("probes", self._settings.probe_address, probes.routes(gateway))
            self._tasks.spawn("probes", answer)

    async def _serve_http(self, what: str, address: tuple[str, int], routes: Mapping[str, http.Handler]) -> None:
        """Answer HTTP requests. Never returns. If the address is in use, try again."""
        from gateway.wires import http  # noqa: PLC0415 - as above

        host, port = address
        server = http.HttpServer(host, port, routes)
        taken = None
        try:
            while taken is None:
                try:
                    taken = await server.start()
                except OSError as error:
                    _log.error(
                        "can't listen", what=what, host=host, port=port, reason=str(error), retry_s=LISTEN_RETRY_S
                    )
                    await asyncio.sleep(LISTEN_RETRY_S)
            _log.info("listening", what=what, host=taken[0], port=taken[1])
            await asyncio.get_running_loop().create_future()
        finally:
            await server.close()


async def _open_later(server: ControlServer) -> None:
    """Open a control socket as soon as the state directory can be written."""
    opened = False
    while not opened:
        await asyncio.sleep(LISTEN_RETRY_S)
        with contextlib.suppress(ControlError):
            await server.start()
            opened = True
    _log.info("listening", what="orders", path=str(server.path))
