"""The shell: carries out what the state machines decide, and owns every socket, timer and task while it does.

It holds no rule of any kubelet version. For each resource name there is one state machine (``registration``), one device
plugin (``serve``) and the timers and the Register in flight between them; for the node one watch, one ledger, one source.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import structlog

from adapters.dialect import UnsayableError
from adapters.registry import by_name
from devices import life
from devices.model import Registration
from devices.source import Listing
from gateway import instance, kubelet_view, registration, succession
from gateway.ledger import Ledger, LedgerError
from gateway.negotiate import NOBODY, UNFIT
from gateway.registration import Phase, Timer
from gateway.serve import Resource
from gateway.watch import KUBELET_SOCKET, Watch, is_pinned, kubelet_id, listens

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from devices.source import DeviceSource, Inventory
    from gateway.registration import KubeletId
    from gateway.settings import Settings

REGISTER_DEADLINE = 15.0
"""Seconds for one Register. Kubelets 1.25 and later dial back within it, for up to 10 s; 1.35 and later give that up
when our deadline passes."""
FIRST_LOOK = 1.0
"""Seconds that the source's first inventory is waited for, before what the ledger knows is served from memory."""
YIELD_TIME = 0.05
"""Seconds that an older gateway is given to end its streams before this one registers."""
LEASE_AGAIN = 1.0
"""Seconds between two connections to a younger gateway that lives and ended the first."""
SOURCE_RETRY = 5.0
EXIT_PINNED = 75
"""Exit status (EX_TEMPFAIL) for: the socket directory was replaced under a mount that can't follow. A restart helps."""

_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_GONE = Listing(())
_LEVELS = logging.getLevelNamesMapping()
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
        self._plugins: dict[str, _Plugin] = {}
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
                plugin = self._plugins[name] = _Plugin(self, name, self._ledger.accepted)
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


class _Plugin:
    """One resource: its state machine, its device plugin, and what runs between them."""

    def __init__(self, gateway: Gateway, name: str, last_accepted: str) -> None:
        self._gateway = gateway
        self._log = _log.bind(resource=name)
        self.resource = Resource(name, gateway.source, self.feed, gateway.settings.kubelet_minor)
        self.state = registration.start(f"{gateway.token}-{secrets.token_hex(2)}", gateway.settings.api, last_accepted)
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._offer_task: asyncio.Task[None] | None = None
        self._last_report: registration.Report | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def entries(self) -> dict[str, life.Entry]:
        return self.resource.entries

    def publish(self, listing: Listing | None, entries: tuple[life.Entry, ...]) -> None:
        asked = self.resource.options
        self.resource.publish(listing, entries)
        if self.resource.options != asked:
            self.feed(registration.Renew("the resource asks other options of the kubelet than before"))
        if self.state.phase is Phase.OUT:  # The list may fit now.
            self.feed(registration.Resume())

    def feed(self, event: registration.Event) -> None:
        """Let the state machine take an event, and do what it asks for."""
        before = self.state.phase
        self.state, actions = registration.step(self.state, event)
        if self.state.phase is not before:
            self._log.debug("phase", phase=self.state.phase.value)
        for action in actions:
            self._act(action)

    def _act(self, action: registration.Action) -> None:
        match action:
            case registration.Offer():
                self._offer_task = asyncio.ensure_future(self._offer(action))
            case registration.CancelOffer():
                if self._offer_task is not None:
                    self._offer_task.cancel()
            case registration.SetTimer(timer, seconds):
                self._cancel(timer)
                jittered = seconds * (1 + random.random() / 4)  # noqa: S311 - spreads retries, hides nothing
                self._timers[timer] = asyncio.get_running_loop().call_later(
                    jittered, self.feed, registration.Fired(timer)
                )
            case registration.CancelTimer(timer):
                self._cancel(timer)
            case registration.EndStreams():
                self.resource.end_streams()
            case registration.Link(name):
                with contextlib.suppress(OSError):  # The folder itself may be gone; then the watch tells.
                    os.link(self._gateway.own_socket(self.resource.name), self._gateway.settings.socket_dir / name)
                    self._log.info("put our socket's name back", name=name)
            case registration.Unlink(name):
                with contextlib.suppress(OSError):
                    (self._gateway.settings.socket_dir / name).unlink()
            case registration.Verify():
                self._background(self._verify())
            case registration.Report():
                self._report(action)

    async def _offer(self, offer: registration.Offer) -> None:
        """Send one Register, and feed back what became of it, whatever that is: the state machine waits for it."""
        try:
            code, details = await self._register(offer)
        except Exception as error:  # noqa: BLE001 - see above
            self._log.exception("unexpected while registering")
            code, details = "INTERNAL", repr(error)
        self.feed(registration.Replied(offer.attempt, code, details))
        if code == "OK":
            self._gateway.accepted(offer.dialect)
            await self.resource.drop_earlier_servers()

    async def _register(self, offer: registration.Offer) -> tuple[str, str]:
        dialect = by_name(offer.dialect)
        if reason := self.resource.too_large(dialect):
            return UNFIT, reason
        socket = self._gateway.kubelet_socket
        kubelet = kubelet_id(socket)
        if kubelet is None or not listens(socket):
            return NOBODY, f"nobody takes connections on {socket}"
        self.feed(registration.Reached(offer.attempt, kubelet))
        endpoint = self._link(offer.name)
        try:
            wire = dialect.encode_register(
                Registration(dialect.name, endpoint, self.resource.name, self.resource.options)
            )
        except UnsayableError as error:
            return UNFIT, str(error)
        self.resource.offer(dialect)
        try:
            async with grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS) as channel:
                register: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                    f"/{dialect.registration_service}/Register"
                )
                await register(wire.data, timeout=REGISTER_DEADLINE)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""

    def _link(self, name: str) -> str:
        """Give the bound socket a fresh name in the kubelet's folder; return the endpoint to register."""
        own, folder = self._gateway.own_socket(self.resource.name), self._gateway.settings.socket_dir
        try:
            os.link(own, folder / name)
        except OSError as error:
            # No hard links here (another mount, SELinux): every kubelet joins the endpoint to its folder, so the path
            # below it serves as well; only its name isn't new for each registration.
            self._log.warning("cannot link our socket: registering its own path", error=str(error))
            return str(own.relative_to(folder))
        return name

    async def _verify(self) -> None:
        """Look into the kubelet's books, where they can be reached."""
        held = await kubelet_view.holds(self._gateway.pod_resources, self.resource.name, self.resource.devices)
        if held is not None:
            self.feed(registration.Verified(held))

    def _report(self, report: registration.Report) -> None:
        """Say it; a trouble that repeats itself word for word is said once."""
        state = self.state
        told = {"api": state.dialect, "details": report.details} if report.details else {"api": state.dialect}
        if report.what == "registered":
            told["endpoint"] = state.name
        repeated = report == self._last_report and report.what != "registered"
        self._last_report = report
        self._log.log(_LEVELS[("debug" if repeated else report.level).upper()], report.what, **told)

    def _cancel(self, timer: Timer) -> None:
        if handle := self._timers.pop(timer, None):
            handle.cancel()

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End everything of this resource; its machine was told to stop."""
        tasks = [*self._tasks, *([self._offer_task] if self._offer_task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.resource.close()


def _report_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what nobody caught; it is a defect, but never a reason to take devices away."""
    _log.error("unexpected", what=context.get("message"), exc_info=context.get("exception") or False)
