"""The shell: carries out what the state machines decide, and owns every socket, timer and task while it does.

It holds no rule of any kubelet version. For each resource name there is one ``plugin``; for the node one watch, one ledger,
one source.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from devices import life
from devices.source import Listing
from gateway import instance, registration, succession
from gateway.ledger import Ledger, LedgerError
from gateway.plugin import Plugin
from gateway.registration import Phase
from gateway.watch import KUBELET_SOCKET, Watch, is_pinned, listens

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from devices.source import DeviceSource, Inventory
    from gateway.registration import KubeletId
    from gateway.settings import Settings

FIRST_LOOK = 1.0
"""Seconds that the source's first inventory is waited for, before what the ledger knows is served from memory."""
YIELD_TIME = 0.05
"""Seconds that an older gateway is given to end its streams before this one registers."""
LEASE_AGAIN = 1.0
"""Seconds between two connections to a younger gateway that lives and ended the first."""
SOURCE_RETRY = 5.0
EXIT_PINNED = 75
"""Exit status (EX_TEMPFAIL) for: the socket directory was replaced under a mount that can't follow. A restart helps."""

_GONE = Listing(())
_log = structlog.get_logger()


class _EndedError(Exception):
    """The gateway was told to end while it was still starting."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Gateway:
    """The daemon.

    Args:
        settings: what it was told.
        source: where devices come from.
    """

    def __init__(self, settings: Settings, source: DeviceSource) -> None:
        self.settings, self.source = settings, source
        self._ledger = Ledger(settings.state_dir)
        self._saving = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._instance = instance.Instance(settings.socket_dir)
        self._plugins: dict[str, Plugin] = {}
        self._inventory: Inventory | None = None
        self._kubelet: KubeletId | None = None
        self._published = False
        self._exit: asyncio.Future[int]
        self._tasks: set[asyncio.Task[None]] = set()
        self._update_lock = asyncio.Lock()
        self._leases: dict[Path, asyncio.Task[None]] = {}
        self._watch: Watch

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, 0)
        loop.set_exception_handler(_report_loop_error)
        try:
            await self._start()
            return await self._exit
        except _EndedError as ended:
            return ended.status
        finally:
            await self._close()

    # Start and end.

    async def _start(self) -> None:
        try:
            self._ledger.load()
        except LedgerError as error:
            _log.error("ledger put aside", reason=str(error))
        await self._wait_for_folder()
        if removed := instance.sweep(self.settings.socket_dir):
            _log.info("removed what dead gateways left", folders=removed)
        self._instance.create()
        first = asyncio.Event()
        self._spawn("source", self._follow_source(first))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK):
                await self._unless_ended(first.wait())
        if self._inventory is None:
            await self._update(None)
        self._instance.publish()
        self._published = True
        if self._instance.peers():
            await self._unless_ended(asyncio.sleep(YIELD_TIME))
        self._watch = Watch(
            self.settings.socket_dir,
            self.settings.socket_dir / instance.FOLDER,
            kubelet_up=self._kubelet_up,
            name_lost=self._name_lost,
            peers_changed=self._look_at_peers,
            replaced=self._replaced,
        )
        self._spawn("watch", self._watch.run())
        self._look_at_peers()
        _log.info(
            "serving",
            backend=self.source.name,
            api=self.settings.api,
            socket_dir=str(self.settings.socket_dir),
            resources={name: len(plugin.resource.devices) for name, plugin in self._plugins.items()},
        )

    async def _wait_for_folder(self) -> None:
        """Wait until the socket directory is there; make it where its parent is (the kubelet would, too)."""
        folder, told = self.settings.socket_dir, False
        while True:
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o750, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return
            if not told:
                _log.warning(
                    "waiting for the socket directory",
                    folder=str(folder),
                    advice="expected a folder that can be written to; is the kubelet installed, and --socket-dir right?",
                )
                told = True
            await self._unless_ended(asyncio.sleep(0.5))

    async def _unless_ended(self, work: Coroutine[Any, Any, Any]) -> None:
        """Await ``work``, but leave at once when the gateway is to end."""
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._exit}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _EndedError(self._exit.result())
        finally:
            task.cancel()

    def _end(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)

    async def _close(self) -> None:
        """End the streams, then the servers, then what is left of us in the socket directory."""
        for plugin in self._plugins.values():
            plugin.feed(registration.Stop())
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(plugin.close() for plugin in self._plugins.values()), *self._writes)
        self._instance.remove()
        _log.info("ended")

    def _spawn(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Run a task that must never end by itself: if it does, that is a defect, and the gateway ends with it."""
        task = asyncio.ensure_future(work)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                _log.error("a task ended that must not", task=name, exc_info=task.exception() or False)
                self._end(1)

        task.add_done_callback(ended)
        self._tasks.add(task)

    # What the source sees.

    async def _follow_source(self, first: asyncio.Event) -> None:
        """Take each inventory as it comes. A source that fails is asked anew; what it said last stays."""
        while True:
            try:
                async with contextlib.aclosing(self.source.watch()) as inventories:
                    async for inventory in inventories:
                        await self._update(inventory)
                        first.set()
                _log.error("the device source ended, which it must not: asking it again", retry_s=SOURCE_RETRY)
            except Exception:  # noqa: BLE001 - whatever a backend does, the devices stay
                _log.exception("the device source failed: its last inventory stays", retry_s=SOURCE_RETRY)
            await asyncio.sleep(SOURCE_RETRY)

    async def _update(self, inventory: Inventory | None) -> None:
        """Bring every resource's list up to what the source says (None: not looked yet), durably before it is sent."""
        async with self._update_lock:
            self._inventory = inventory
            now = time.monotonic()
            known = self._ledger.resources()
            listings: dict[str, Listing | None] = dict.fromkeys(known)
            if inventory is not None:
                listings |= {name: inventory.get(name, _GONE) for name in (*known, *inventory)}
            merged = {}
            for name, listing in listings.items():
                before = self._plugins[name].entries if name in self._plugins else {}
                merged[name] = life.merge(self._ledger.announced(name), listing, before, now)
            news = [
                self._ledger.announce(name, tuple(entry.device for entry in entries))
                for name, entries in merged.items()
            ]
            if any(news):
                await self._save()
            for name in merged.keys() - self._plugins.keys():
                plugin = self._plugins[name] = Plugin(self, name, self._ledger.accepted)
                await plugin.resource.bind(self.own_socket(name))
            for name, entries in merged.items():
                self._plugins[name].publish(listings[name], entries)
            if self._published:
                self._look_at_peers()
                self._tell_kubelet()

    async def _save(self) -> None:
        """Write the ledger as it is now. A write that has begun is finished, whoever stops waiting for it."""
        await asyncio.shield(self._begin_write())

    def _begin_write(self) -> asyncio.Task[None]:
        write = asyncio.ensure_future(self._write())
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return write

    async def _write(self) -> None:
        async with self._saving:
            try:
                await asyncio.to_thread(self._ledger.save, self._ledger.snapshot())
            except LedgerError as error:
                _log.error("ledger not written", reason=str(error))

    def accepted(self, dialect: str) -> None:
        """Remember, for the next start, which dialect the kubelet accepted."""
        if self._ledger.accept(dialect):
            _ = self._begin_write()

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What the watch sees.

    def _kubelet_up(self, kubelet: KubeletId) -> None:
        self._kubelet = kubelet
        self._tell_kubelet()
        _log.info("kubelet found", socket=str(self.kubelet_socket))

    def _tell_kubelet(self) -> None:
        """Tell every resource of the kubelet that is there: news to those that have not met it."""
        if self._kubelet is not None:
            for plugin in self._plugins.values():
                plugin.feed(registration.KubeletUp(self._kubelet))

    def _name_lost(self, name: str) -> None:
        for plugin in self._plugins.values():
            plugin.feed(registration.NameLost(name))

    def _replaced(self) -> None:
        if is_pinned(self.settings.socket_dir):
            _log.error(
                "the socket directory was replaced, and this mount still shows the deleted one",
                folder=str(self.settings.socket_dir),
                advice="the container must be restarted to see the new one; mount its parent to avoid this",
            )
            self._end(EXIT_PINNED)
            return
        _log.warning("the socket directory was replaced: binding anew", folder=str(self.settings.socket_dir))
        self._background(self._rebind())

    async def _rebind(self) -> None:
        """Bind every server once more, in the new folder. Streams of the kubelet before live on until the next one."""
        async with self._update_lock:
            self._instance.remove()
            self._instance = instance.Instance(self.settings.socket_dir)
            try:
                self._instance.create()
                for name, plugin in self._plugins.items():
                    await plugin.resource.bind(self.own_socket(name))
                self._instance.publish()
            except (OSError, RuntimeError) as error:  # It went again; the watch tells when the next one is there.
                _log.warning("the new socket directory can't be used", reason=str(error))
        self._watch.look_now()

    # Other gateways on this node.

    def _look_at_peers(self) -> None:
        """Stand by, resource by resource, for the youngest gateway that is younger than this one and serves it."""
        peers = self._instance.peers()
        for name, plugin in self._plugins.items():
            sockets = {age: folder / instance.socket_name(name) for age, folder in peers.items()}
            serving = {age: path for age, path in sockets.items() if listens(path)}
            younger = succession.elder_should_wait(self._instance.age, serving)
            if younger is None:
                if plugin.state.phase is Phase.STANDBY:
                    plugin.feed(registration.Resume())
            else:
                plugin.feed(registration.StandBy(younger.token))
                self._hold_lease(serving[younger])

    def _hold_lease(self, path: Path) -> None:
        """Learn at once when the gateway behind ``path`` is gone: the kernel ends our connection to it."""
        if path in self._leases:
            return

        async def until_gone() -> None:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    while await reader.read(4096):
                        pass
                finally:
                    writer.close()
            if listens(path):  # Alive, and only tired of a connection without a call.
                await asyncio.sleep(LEASE_AGAIN)

        def gone(_: asyncio.Task[None]) -> None:
            del self._leases[path]
            if not self._exit.done():
                self._look_at_peers()

        task = self._leases[path] = asyncio.ensure_future(until_gone())
        task.add_done_callback(gone)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # For the plugins.

    @property
    def kubelet_socket(self) -> Path:
        """Where the kubelet takes registrations."""
        return self.settings.socket_dir / KUBELET_SOCKET

    @property
    def pod_resources(self) -> Path:
        """Where the kubelet tells what it believes."""
        return self.settings.pod_resources or self.settings.socket_dir.parent / "pod-resources" / KUBELET_SOCKET

    def own_socket(self, resource: str) -> Path:
        """The socket that the resource's server is bound on."""
        return self._instance.folder / instance.socket_name(resource)

    @property
    def token(self) -> str:
        """This gateway's own token."""
        return self._instance.token


def _report_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what nobody caught; it is a defect, but never a reason to take devices away."""
    _log.error("unexpected", what=context.get("message"), exc_info=context.get("exception") or False)
