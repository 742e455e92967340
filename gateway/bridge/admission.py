"""Decide which plugins may register. A refusal's message is for the plugin's author."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog

from devices.model import Fault, RefusedError
from gateway.bridge import judge, shield
from gateway.bridge.judge import REGISTRY
from gateway.bridge.peer import AwayError, Peer
from gateway.kubelet.identity import socket_id
from gateway.tasks import first_of
from gateway.wires.log import Seldom

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
    from pathlib import Path

    from adapters.dialect import Dialect
    from devices.model import Options
    from gateway.bridge.memory import PluginFolder
    from gateway.bridge.plugin import Bridged

RIVAL_ENDS_S: Final = 1.0
"""Seconds for which a second plugin of a resource waits for the first one to end its stream. After that it is refused."""
REGISTERS_PER_MINUTE = 600
"""Most Registers of one resource per minute."""

_log = structlog.get_logger()


class Admission:
    """Accepts or refuses plugins.

    Args:
        plugins: the accepted plugins, by the resource that they registered; new ones are added.
        made: makes the ``Bridged`` of a resource.
        occupied: returns which other source or plugin has the resource's name for the kubelet; '' if none has.
        durable: waits until the plugins' file is on disk.
    """

    def __init__(
        self,
        plugins: MutableMapping[str, Bridged],
        made: Callable[[str], Bridged],
        occupied: Callable[[str], str],
        durable: Callable[[], Awaitable[None]],
    ) -> None:
        self._plugins, self._made, self._occupied, self._durable = plugins, made, occupied, durable
        self.allow: Sequence[str] = ()
        """Patterns of the resources that may register (``bridge.allow``); if empty, all may."""
        self._seldom = Seldom(times=REGISTERS_PER_MINUTE)
        self._closing: asyncio.Future[None] | None = None

    @property
    def counted(self) -> Collection[str]:
        """The resources for which Registers are counted."""
        return self._seldom.kinds

    async def register(
        self, path: Path, dialect: Dialect, resource: str, options: Options, folder: PluginFolder
    ) -> None:
        """Accept a plugin.

        Raises:
            RefusedError: it is refused.
        """
        if problem := judge.resource_error(resource, self.allow):
            raise RefusedError(Fault.INVALID_ARGUMENT, problem)
        if self._seldom.tell(resource if resource in self._plugins else "") is None:
            raise RefusedError(
                Fault.RESOURCE_EXHAUSTED,
                f"{resource} was registered more than {REGISTERS_PER_MINUTE} times in a minute. Register once "
                "for each kubelet.sock",
            )
        self._require_socket(path, resource)
        known = self._plugins.get(resource)
        living = None if known is None else known.peer
        if folder == REGISTRY and living is not None and living.path == path and living.identity == socket_id(path):
            return  # It was found again after a restart of the bridge, and its stream is open.
        if problem := self._occupied(resource):
            raise RefusedError(Fault.ALREADY_EXISTS, problem)
        one = self._plugins.get(resource) or self._made(resource)
        peer = Peer(path, dialect, options)
        try:
            await peer.dial()
            await peer.ask_options()
            await self._require_no_rival(resource, path)
            self._require_socket(path, resource)
            self._require_room(resource)  # The last check, because many plugins may register at once.
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
        """Refuse an endpoint that isn't a socket, or is another plugin's."""
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
            if one.registered_on != found:  # The bridge reconnected by an old socket name, and another plugin answered.
                one.give_way(f"its socket is {resource}'s now")
            else:
                raise RefusedError(
                    Fault.ALREADY_EXISTS,
                    f"the socket {path.name} serves {name} already. Bind another one for {resource}",
                )

    async def _require_no_rival(self, resource: str, path: Path) -> None:
        """Refuse a second plugin for a resource while the first one lives. A restarted plugin is no second plugin."""
        dead = None
        while (one := self._plugins.get(resource)) is not None:
            peer = one.peer
            if peer is None or peer is dead or peer.path == path:
                return
            await first_of(peer.ended, seconds=RIVAL_ENDS_S)
            if peer is one.peer and not peer.ended.is_set() and await peer.answers():
                raise RefusedError(
                    Fault.ALREADY_EXISTS,
                    f"{resource} is offered by the plugin on {peer.path.name}, which still runs: end that one first, or give one of "
                    "them another resource name",
                )
            dead = peer

    def _require_room(self, resource: str) -> None:
        """Refuse one more resource if there are too many, unless one can be dropped: its plugin is away and it offers no devices."""
        if resource in self._plugins or len(self._plugins) < judge.MAX_PLUGINS:
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
                f"more than {judge.MAX_PLUGINS} resources behind the bridge. End a plugin",
            )
        gone = self._plugins.pop(idle)
        self._closing = asyncio.ensure_future(gone.close())
