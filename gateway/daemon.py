"""Makes the parts of the daemon, gives each what it needs, and starts and ends them.

It has no rule of a kubelet version. There is one ``registrar.Resource`` per resource name, and one of each other part per node.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import structlog

from gateway import process
from gateway.configuration import reload
from gateway.folder import Folder
from gateway.following import Follower
from gateway.handover import Handover
from gateway.kubelet.identity import CHECKPOINT, KUBELET_SOCKET
from gateway.kubelet.presence import Presence
from gateway.kubelet.reader import RecordsReader
from gateway.leader import instance
from gateway.leader.leadership import Leadership
from gateway.lists import Lists
from gateway.memory.again import Memory
from gateway.memory.holdings import Holdings
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.registration import events
from gateway.registration.serve import Node
from gateway.registration.turns import Turns
from gateway.tally import Tally
from gateway.tasks import Signal, Tasks, first_of
from gateway.telling import orders
from gateway.telling.commands import Commands
from gateway.telling.listeners import Listeners
from gateway.telling.subject import Subject
from gateway.wires import notify

if TYPE_CHECKING:
    from typing import Any

    from devices.source import DeviceSource, Hindrance
    from gateway.configuration.settings import Settings
    from gateway.kubelet.reader import Look
    from gateway.kubernetes.features import Features
    from gateway.registration.registrar import Resource

START = 5.0
"""Seconds for which the start waits until this gateway leads or stands by."""
FIRST_LOOK = 1.0
"""Seconds for which the start waits for the first inventory. After that, the devices in the state file are served."""

_log = structlog.get_logger()


class Gateway:
    """The daemon."""

    def __init__(self, settings: Settings, source: DeviceSource) -> None:
        self._settings, self._source = settings, source
        started = time.monotonic()
        self._tasks, self._config, tally = Tasks(), reload.FileFate(), Tally()
        self._instance = instance.Instance(
            settings.socket_dir, host_service=settings.host_service, pod_uid=settings.pod_uid
        )
        self._presence = Presence(settings.socket_dir / KUBELET_SOCKET)
        self._lead = Leadership(settings, self._instance, self._presence)
        self._ledger = Ledger(settings.state_dir, settings.socket_dir)
        self._scribe = Scribe(self._ledger, lambda: self._lead.writes, self._lead.locks.writing)
        places = settings.pod_resources_socket, settings.socket_dir / CHECKPOINT
        self._reader = RecordsReader(*places, self._lead, self._ledger, self._scribe.soon, self._looked)
        self._resources: dict[str, Resource] = {}
        kept = self._ledger, self._scribe, self._reader, self._presence
        self._holdings = Holdings(*kept, source, self._resources)
        node = Node(
            settings=settings,
            source=source,
            tally=tally,
            turns=Turns(settings.socket_dir / CHECKPOINT),
            token=self._instance.token,
            own_socket=self._instance.socket,
            memory=partial(Memory, self._holdings),
            accepted=self._holdings.accepted,
            presence=self._presence,
            reader=self._reader,
            lead=self._lead,
            moved=Signal(),
        )
        around = self._resources, node, self._tasks, started
        self._lists = Lists(settings, source, self._holdings, self._lead, *around)
        parts = source, self._holdings, self._resources, self._lists
        self._handover = Handover(settings, self._instance, self._lead, *parts, node.moved, self._tasks)
        self._follower = Follower(settings, self._config, source, self._lists, self._tasks)
        self._listeners = Listeners(settings, self._instance.token, self._tasks)
        place = self._instance, self._lead, self._holdings, self._resources, self._lists.lock
        self._folder = Folder(settings, *place, tally, self._tasks)
        self._subject = Subject(
            settings=settings,
            source=source,
            holdings=self._holdings,
            tally=tally,
            config=self._config,
            resources=self._resources,
            instance=self._instance,
            lead=self._lead,
            started=started,
            drivers=lambda: None if self._lists.drivers is None else self._lists.drivers.now,
            hindrances=self._hindrances,
            lock=self._lists.lock,
            update=self._lists.update,
        )
        self._features = _features(self._subject) if settings.asks_api_server or settings.dra != "off" else None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._tasks.end, 0)
        loop.set_exception_handler(process.report_loop_error)
        ended = asyncio.ensure_future(self._tasks.wait_for_end())
        start = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait((start, ended), return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()  # An exception is a defect.
            await ended
        finally:
            for task in (start, ended):
                task.cancel()
            await asyncio.gather(start, ended, return_exceptions=True)
            await self._close()
        return self._tasks.exit_status or 0

    # Start and end.

    async def _start(self) -> None:
        settings = self._settings
        await self._holdings.load(patient=True)
        self._listeners.open_probes(self._subject)
        await self._folder.wait(self._say_waiting)
        await self._listeners.close_control()
        self._reader.look_within(0)
        if removed := instance.sweep(self._settings.socket_dir):
            _log.info("removed what dead gateways left", folders=removed)
        self._instance.create()
        # If the first look at the devices takes longer than this, the remembered devices are served.
        first = asyncio.Event()
        if self._settings.dra != "off":
            self._make_drivers(first)
        self._tasks.spawn("source", self._follower.run(first))
        label = None if self._features is None else self._features.label
        self._tasks.spawn("reload", reload.follow(self._settings, self._source, self._config, label))
        await first_of(first, seconds=FIRST_LOOK)
        if self._lists.inventory is None:
            await self._lists.take(None)
        await self._open_control()
        self._tasks.spawn("watch", self._folder.run())
        if self._lists.drivers is not None:
            self._lists.drivers.begin()
        self._tasks.spawn("leader", self._handover.run())
        await first_of(self._handover.settled, seconds=START)  # systemd ends a unit whose start takes too long.
        await asyncio.sleep(0)  # Let the Registers go first.
        notify.tell(notify.READY)
        if (seconds := notify.watchdog()) is not None:
            self._tasks.spawn("watchdog", notify.keep_alive(seconds))
        if self._features is not None:
            self._tasks.spawn("kubernetes", self._features.run())
        gc.freeze()  # Later collections skip all existing objects: to scan them takes 8 to 15 ms, in which no call is answered.
        tell = partial(_log.info, "serving") if self._presence.since is not None else self._presence.wait
        resources = {name: len(one.plugin.devices) for name, one in self._resources.items()}
        tell(backend=self._source.name, api=settings.api, socket_dir=str(settings.socket_dir), resources=resources)

    async def _say_waiting(self) -> None:
        if not self._listeners.has_control:
            await self._listeners.open_control(Commands(self._subject).handlers_while_waiting)

    async def _close(self) -> None:
        """End the streams, then the servers, then remove our files from the socket directory."""
        notify.tell(notify.STOPPING)
        await self._handover.end()
        for resource in self._resources.values():
            resource.feed(events.Stop())
        await self._tasks.close()
        self._lists.close()
        await asyncio.gather(*(resource.close() for resource in self._resources.values()), self._reader.close())
        self._presence.close()
        await self._listeners.close_control()
        self._scribe.close()
        self._instance.remove()
        if self._lists.drivers is not None:
            await self._lists.drivers.finish()
        _log.info("ended")

    def _make_drivers(self, first: asyncio.Event) -> None:
        """Make the DRA drivers. End the gateway if the API server can't be configured."""
        from gateway.dra import drivers  # noqa: PLC0415 - its imports are paid only where DRA is wanted
        from gateway.kubernetes.access import AccessError  # noqa: PLC0415 - as above

        lists = (lambda: tuple(self._resources.values())), self._lists.update
        known = self._instance.age, self._source, self._holdings, *lists
        told = [] if self._features is None else [self._features.cordons.take]
        inside = drivers.Inside(*known, first, lambda: self._lead.passes_to, told)
        try:
            made = drivers.RenewedDrivers(self._settings, inside, self._tasks)
        except AccessError as error:
            _log.error("giving up: --dra needs the API server", reason=str(error))
            self._tasks.end(1)
        else:
            self._lists.drivers = self._handover.drivers = made
            self._holdings.let_in = made.let_in

    async def _open_control(self) -> None:
        """Listen on the control socket. Orders about devices are passed on to the leader."""
        commands = Commands(self._subject)

        async def doctor(*talk: Any) -> None:
            from gateway.doctor import server  # noqa: PLC0415 - only a gateway that is asked pays for it

            await server.meet(self._source.name, commands.taken(few=True)(), self._settings, *talk)

        own = commands.handlers
        forwarded = {order: self._handover.forwarding(own[order]) for order in ("move", *orders.ORDERS)}
        await self._listeners.open_control({**own, **forwarded, **self._handover.handlers, "doctor": doctor})
        self._listeners.open_metrics(commands.taken, self._subject)

    # What happens.

    def _hindrances(self) -> tuple[Hindrance, ...]:
        by_annotation = () if self._features is None else self._features.cordons.hindrances()
        return (*self._lists.unseen.added_to(self._follower.hindrances()), *by_annotation)

    def _looked(self, look: Look) -> None:
        for resource in self._resources.values():
            resource.looked(look)
        self._holdings.looked(look)
        self._lists.looked()


def _features(gateway: Subject) -> Features:
    from gateway.kubernetes.features import Features  # noqa: PLC0415 - who needs none needn't pay for it

    return Features(gateway)
