"""The kubelet's socket directory: watched, and bound again if it is replaced."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from gateway.kubelet.watch import KUBELET_SOCKET, FolderWatch, is_pinned
from gateway.leader import instance
from gateway.registration import events
from gateway.registration.events import Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gateway.configuration.settings import Settings
    from gateway.kubelet.presence import Presence
    from gateway.kubelet.watch import KubeletId
    from gateway.leader.instance import Instance
    from gateway.leader.leadership import Leadership
    from gateway.registration.registrar import Resource
    from gateway.tally import Tally
    from gateway.tasks import Tasks

FOLDER_AGAIN, FOLDER_TOLD = 0.5, 60.0
"""Seconds between two tries of a socket directory that can't be used, and between two log lines about that."""
REBIND_FIRST, REBIND_MAX = 0.05, 5.0
"""Seconds until a new socket directory that can't be used is tried again, at first and at most."""
EXIT_PINNED = 75
"""Exit status (EX_TEMPFAIL) for: the socket directory was replaced under a mount that can't follow. A restart helps."""
_log = structlog.get_logger()


class Folder:
    """The socket directory of one gateway; ``lock`` is held while sockets or lists change."""

    def __init__(
        self,
        settings: Settings,
        own: Instance,
        lead: Leadership,
        presence: Presence,
        resources: Mapping[str, Resource],
        lock: asyncio.Lock,
        tally: Tally,
        tasks: Tasks,
    ) -> None:
        self._settings, self._instance, self._lead, self._presence = settings, own, lead, presence
        self._resources, self._lock, self._tally, self._tasks = resources, lock, tally, tasks
        self._rebinding: asyncio.Task[None] | None = None
        self._watch: FolderWatch | None = None

    async def wait(self, hindered: Callable[[], Awaitable[None]]) -> None:
        """Wait until the directory can be used. Log why it can't, and await ``hindered`` each time."""
        folder, tell_at = self._settings.socket_dir, 0.0
        while reason := instance.make_folder(folder):
            self._lead.waits_for_folder = f"the socket directory: {reason}"
            await hindered()
            if (now := time.monotonic()) >= tell_at:
                _log.warning("waiting for the socket directory", folder=str(folder), reason=reason)
                tell_at = now + FOLDER_TOLD
            await asyncio.sleep(FOLDER_AGAIN)
        self._lead.waits_for_folder = ""

    async def run(self, kubelet_up: Callable[[KubeletId], None]) -> None:
        """Watch the directory for ever; ``kubelet_up`` takes each kubelet that starts."""
        self._watch = FolderWatch(
            self._settings.socket_dir,
            lambda: (KUBELET_SOCKET, instance.FOLDER, *(one.state.name for one in self._resources.values())),
            kubelet_up=kubelet_up,
            name_lost=self._name_lost,
            replaced=self._replaced,
            late=self._tally.late,
        )
        await self._watch.run()

    def _name_lost(self, name: str) -> None:
        if name.startswith(self._instance.token):  # The kubelet's own files don't matter.
            for resource in self._resources.values():
                resource.feed(events.NameLost(name))
        elif name == instance.FOLDER:
            _log.warning("the gateways' folder was removed: binding anew", folder=str(self._settings.socket_dir / name))
            self._bind_again()
        elif name == KUBELET_SOCKET:
            self._presence.check()

    def _replaced(self) -> None:
        if is_pinned(self._settings.socket_dir):
            _log.error(
                "the socket directory was replaced, and this mount still shows the deleted one",
                folder=str(self._settings.socket_dir),
                advice="the container must be restarted to see the new one; mount its parent to avoid this",
            )
            self._tasks.end(EXIT_PINNED)
            return
        _log.warning("the socket directory was replaced: binding anew", folder=str(self._settings.socket_dir))
        self._bind_again()

    def _bind_again(self) -> None:
        if self._rebinding is not None:
            self._rebinding.cancel()
        self._rebinding = self._tasks.start(self._rebind())

    async def _rebind(self) -> None:
        """Bind every server in the new directory. Streams of the kubelet before go on until the next one registers."""
        wait = REBIND_FIRST
        while not await self._bind_anew(told=wait > REBIND_FIRST):
            await asyncio.sleep(wait)
            wait = min(wait * 2, REBIND_MAX)
        if self._watch is not None:
            self._watch.look_now()
        if (kubelet := self._presence.kubelet) is not None:
            for resource in self._resources.values():
                if resource.state.phase is Phase.ABSENT:
                    resource.feed(events.KubeletUp(kubelet))

    async def _bind_anew(self, *, told: bool) -> bool:
        async with self._lock:
            self._instance.remove()
            try:
                self._instance.create()
                for resource in self._resources.values() if self._settings.dra != "only" else ():
                    await resource.bind()
            except (OSError, RuntimeError) as error:  # It was deleted again, or no descriptor is left.
                if not told:
                    _log.warning("the new socket directory can't be used yet", reason=str(error))
                return False
        return True
