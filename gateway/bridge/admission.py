"""Which plugins are accepted: a Register is judged against those that are there, and a refusal is worded for the plugin's author."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import structlog

from devices.model import Fault, RefusedError
from gateway.bridge import judge, shield
from gateway.bridge.peer import AwayError
from gateway.bridge.sockets import REGISTRY
from gateway.kubelet.watch import socket_id
from gateway.wires.log import Seldom

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
    from pathlib import Path

    from adapters.dialect import Dialect
    from devices.model import Options
    from gateway.bridge.calls import BridgedResource
    from gateway.bridge.memory import PluginFolder

RIVAL_GOES: Final = 1.0
"""Seconds that a plugin's stream is given to end before another plugin for its resource is refused."""
MOST_REGISTERS = 600
"""Registers of one resource in a minute."""

_log = structlog.get_logger()


class Admission:
    """Takes plugins, or says why not (a ``sockets.Host``).

    Args:
        plugins: those that are known, by the name that they registered; who is taken is put there.
        made: makes what a resource is bridged by.
        occupied: says whose the name already is that the kubelet would know a resource by (empty: nobody else's).
        durable: waits until what is known of plugins outlives this gateway.
    """

    def __init__(
        self,
        plugins: MutableMapping[str, BridgedResource],
        made: Callable[[str], BridgedResource],
        occupied: Callable[[str], str],
        durable: Callable[[], Awaitable[None]],
    ) -> None:
        self._plugins, self._made, self._occupied, self._durable = plugins, made, occupied, durable
        self.allow: Sequence[str] = ()
        """The names that an operator lets in though another device plugin has them usually."""
        self._seldom = Seldom(times=MOST_REGISTERS)
        self._closing: asyncio.Future[None] | None = None

    @property
    def counted(self) -> Collection[str]:
        """The names by which Registers are counted."""
        return self._seldom.kinds

    async def register(
        self, path: Path, dialect: Dialect, resource: str, options: Options, folder: PluginFolder
    ) -> None:
        """Take a plugin, or say why not.

        Raises:
            RefusedError: see there.
        """
        if problem := judge.resource_error(resource, self.allow):
            raise RefusedError(Fault.INVALID_ARGUMENT, problem)
        if self._seldom.tell(resource if resource in self._plugins else "") is None:
            raise RefusedError(
                Fault.RESOURCE_EXHAUSTED,
                f"{resource} was registered more than {MOST_REGISTERS} times in a minute. Register once "
                "for each kubelet.sock",
            )
        self._require_socket(path, resource)
        known = self._plugins.get(resource)
        living = None if known is None else known.peer
        if folder == REGISTRY and living is not None and living.path == path and living.identity == socket_id(path):
            return  # Found again, after a restart of the bridge: its stream is open.
        if problem := self._occupied(resource):
            raise RefusedError(Fault.ALREADY_EXISTS, problem)
        one = self._plugins.get(resource) or self._made(resource)
        peer = one.registration(path, dialect, options)
        try:
            await peer.dial()
            await peer.ask_options()
            await self._require_no_rival(resource, path)
            self._require_socket(path, resource)
            self._require_room(resource)  # Last: many may register at once.
        except AwayError as error:
            raise RefusedError(
                Fault.UNAVAILABLE, f"failed to dial device plugin: {error}: serve the socket before registering it"
            ) from error
        except (RefusedError, asyncio.CancelledError):
            await peer.close()
            raise
        one = self._plugins.setdefault(resource, one)
        before = (one.folder, one.path, one.api, one.registered_on)
        one.folder = folder
        one.follow(peer)
        _log.info("a plugin registered", resource=resource, endpoint=path.name, api=dialect.name, folder=folder)
        if before != (one.folder, one.path, one.api, one.registered_on):
            await self._durable()

    def _require_socket(self, path: Path, resource: str) -> None:
        """Refuse what is no plugin's own socket."""
        found = socket_id(path)
        if found is None:
            raise RefusedError(
                Fault.INVALID_ARGUMENT,
                f"there is no socket at {path.parent.name}/{path.name} (links aren't followed). Bind it "
                "there before registering it",
            )
        for name, one in self._plugins.items():
            if name == resource or one.peer is None or one.peer.identity != found:
                continue
            if one.registered_on != found:  # It was called by an old name, and this is who is there now.
                one.give_way(f"its socket is {resource}'s now")
            else:
                raise RefusedError(
                    Fault.ALREADY_EXISTS,
                    f"the socket {path.name} serves {name} already. Bind another one for {resource}",
                )

    async def _require_no_rival(self, resource: str, path: Path) -> None:
        """Refuse a second plugin while the first lives. A plugin that serves anew, under the same name or after its end, is none.

        Of two that register at once, as all do when kubelet.sock comes, each looks when nothing is left but to take it.
        """
        dead = None
        while (one := self._plugins.get(resource)) is not None:
            peer = one.peer
            if peer is None or peer is dead or peer.path == path:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RIVAL_GOES):
                    await peer.ended.wait()
            if peer is one.peer and not peer.ended.is_set() and await peer.answers():
                raise RefusedError(
                    Fault.ALREADY_EXISTS,
                    f"{resource} is offered by the plugin on {peer.path.name}, which lives: end that one first, or give one of "
                    "them another resource name",
                )
            dead = peer

    def _require_room(self, resource: str) -> None:
        """Refuse one more resource where there are too many; one that went makes room if it has nothing announced."""
        if resource in self._plugins or len(self._plugins) < judge.MOST_PLUGINS:
            return
        now = time.monotonic()
        idle = next(
            (
                name
                for name, one in self._plugins.items()
                if one.peer is None
                and (not one.word.devices or shield.cover(one.word, one.limits, now) is shield.Cover.WITHDRAWN)
            ),
            None,
        )
        if idle is None:
            raise RefusedError(
                Fault.RESOURCE_EXHAUSTED,
                f"more than {judge.MOST_PLUGINS} resources behind the bridge. End a plugin",
            )
        gone = self._plugins.pop(idle)
        self._closing = asyncio.ensure_future(gone.close())
