"""The daemon: carries out what the state machines decide, and owns every socket, timer and task while it does.

It holds no rule of any kubelet version. For each resource name there is one ``registrar.Resource``; for the node one leader, one watch,
one ledger, one source.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from gateway.handover import Leader
from gateway.kubelet.beliefs import Beliefs
from gateway.kubelet.presence import Presence
from gateway.kubelet.watch import CHECKPOINT, KUBELET_SOCKET
from gateway.leader import instance
from gateway.leader.leadership import Leadership
from gateway.lists import Lists
from gateway.memory.again import Memory
from gateway.memory.holdings import Holdings
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.registration import events
from gateway.registration.registrar import Node, Resource
from gateway.registration.turns import Turns
from gateway.tally import Tally
from gateway.tasks import Signal, Tasks
from gateway.telling import orders
from gateway.telling.commands import Commands
from gateway.telling.listeners import Listeners
from gateway.wires import notify

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from devices.source import DeviceSource, Hindrance
    from gateway.age import Age
    from gateway.configuration.settings import Settings
    from gateway.dra.drivers import Drivers
    from gateway.dra.renewed import RenewedDrivers
    from gateway.kubelet.beliefs import Look
    from gateway.kubelet.watch import KubeletId
    from gateway.kubernetes.features import Features
    from gateway.wires.control import Handler

START = 5.0
"""Seconds of a start that are waited for until this gateway leads, or could."""
FIRST_LOOK = 1.0
"""Seconds that the source's first inventory is waited for, before what the ledger knows is served from memory."""

_log = structlog.get_logger()


class Gateway:
    """The daemon."""

    def __init__(self, settings: Settings, source: DeviceSource) -> None:
        self.settings, self.source = settings, source
        self.started = time.monotonic()
        self._tasks, self.tally, self.config = Tasks(), Tally(), reload.FileFate()
        self._features = _features(settings) if settings.asks_api_server else None
        self._instance = instance.Instance(
            settings.socket_dir, host_service=settings.host_service, pod_uid=settings.pod_uid
        )
        self.presence = Presence(settings.socket_dir / KUBELET_SOCKET)
        self.lead = Leadership(settings, self._instance, self.presence)
        self.ledger = Ledger(settings.state_dir, settings.socket_dir)
        self.scribe = Scribe(self.ledger, lambda: self.lead.writes, self.lead.locks.writing)
        records = settings.pod_resources_socket, settings.socket_dir / CHECKPOINT
        self.beliefs = Beliefs(*records, self.lead, self._looked, lambda *lost: self.holdings.remember_forgotten(*lost))  # noqa: PLW0108 - they need each other
        self._resources: dict[str, Resource] = {}
        kept = self.ledger, self.scribe, self.beliefs, self.presence
        self.holdings = Holdings(*kept, source, self._resources, self._tasks)
        node = Node(
            settings=settings,
            source=source,
            tally=self.tally,
            turns=Turns(settings.socket_dir / CHECKPOINT),
            token=self.token,
            own_socket=self._instance.socket,
            memory=partial(Memory, self.holdings),
            accepted=self.holdings.accepted,
            presence=self.presence,
            beliefs=self.beliefs,
            lead=self.lead,
            moved=Signal(),
        )
        around = self._resources, node, self._tasks, self.started
        self.lists = Lists(settings, source, self.holdings, self.lead, *around)
        self.lock = self.lists.lock
        parts = source, self.holdings, self._resources, self.lists
        self.leader = Leader(settings, self._instance, self.lead, *parts, node.moved, self._tasks)
        self._follower = Follower(settings, self.config, source, self.lists, self._tasks)
        self._listeners = Listeners(settings, self.token, self._tasks)
        place = self._instance, self.lead, self.presence, self._resources, self.lists.lock
        self._folder = Folder(settings, *place, self.tally, self._tasks)
        self._drivers: RenewedDrivers | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._tasks.end, 0)
        loop.set_exception_handler(process.report_loop_error)
        ended = asyncio.ensure_future(self._tasks.ended())
        start = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait((start, ended), return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()  # What it raises is a defect.
            await ended
        finally:
            for task in (start, ended):
                task.cancel()
            await asyncio.gather(start, ended, return_exceptions=True)
            await self._close()
        return self._tasks.status or 0

    # Start and end.

    async def _start(self) -> None:
        await self.scribe.load(patient=True)
        self.holdings.recall()
        self._listeners.open_probes(self)
        await self._folder.wait(self._say_waiting)
        await self._listeners.close_control()
        self.beliefs.look_within(0)
        if removed := instance.sweep(self.settings.socket_dir):
            _log.info("removed what dead gateways left", folders=removed)
        self._instance.create()
        # It looks at its devices; where that takes longer than a moment, what is remembered is served.
        first = asyncio.Event()
        if self.settings.dra != "off":
            self._drivers = self.lists.drivers = self.leader.drivers = _drivers(self, first)
        self._tasks.spawn("source", self._follower.run(first))
        label = None if self._features is None else self._features.label
        self._tasks.spawn("reload", reload.follow(self.settings, self.source, self.config, label))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK):
                await first.wait()
        if self.lists.inventory is None:
            await self.lists.take(None)
        await self._open_control()
        self._tasks.spawn("watch", self._folder.run(self._kubelet_up))
        if self._drivers is not None:
            self._drivers.begin()
        self._tasks.spawn("leader", self.leader.run())
        with contextlib.suppress(TimeoutError):  # systemd ends a unit whose start lasts.
            async with asyncio.timeout(START):
                await self.leader.settled.wait()
        await asyncio.sleep(0)  # The Registers go first.
        notify.tell(notify.READY)
        if (seconds := notify.watchdog()) is not None:
            self._tasks.spawn("watchdog", notify.keep_alive(seconds))
        if self._features is not None:
            self._tasks.spawn("kubernetes", self._features.run(self))
        gc.freeze()  # What is there now stays: a full collection of it takes 8 to 15 ms, in which nothing is answered.
        _tell_serving(self)

    async def _say_waiting(self) -> None:
        if not self._listeners.has_control:
            await self._listeners.open_control(Commands(self).handlers_while_waiting)

    async def _close(self) -> None:
        """End the streams, then the servers, then what is left of us in the socket directory."""
        notify.tell(notify.STOPPING)
        await self.leader.end()
        for resource in self._resources.values():
            resource.feed(events.Stop())
        await self._tasks.close()
        self.lists.close()
        await asyncio.gather(*(resource.close() for resource in self._resources.values()), self.beliefs.close())
        self.presence.close()
        await self._listeners.close_control()
        self.scribe.close()
        self._instance.remove()
        if self._drivers is not None:
            await self._drivers.finish()
        _log.info("ended")

    async def _open_control(self) -> None:
        commands = Commands(self)
        await self._listeners.open_control(_met(self, commands))
        self._listeners.open_metrics(commands.taken, self.tally, self)

    # What happens.

    def _looked(self, look: Look) -> None:
        for resource in self.resources:
            resource.looked(look)
        self.holdings.looked(look)
        self.lists.looked()

    def _kubelet_up(self, kubelet: KubeletId) -> None:
        first = self.presence.kubelet is None
        self.presence.kubelet = kubelet
        self.presence.found(anew=True)
        if self.begun:
            self.leader.approach(kubelet)
            for resource in self.resources:
                resource.feed(events.KubeletUp(kubelet))
        for name in self._resources:
            self.holdings.note(name)  # It was given before this kubelet's start.
        self.beliefs.restarted(self._resources if self.lead.leads else (), kubelet.mtime_ns / 1e9)
        if first:
            self.holdings.recall()
        _log.info("kubelet found", socket=str(self.presence.socket))

    async def update(self) -> None:
        """Bring every resource's list up to date, because something else than the source has news."""
        await self.lists.update()

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Say what keeps the sources of devices from telling of them, or from offering some."""
        return self.lists.unseen.added_to(self._follower.hindrances())

    @property
    def drivers(self) -> Drivers | None:
        """Its DRA drivers, where devices are offered by them."""
        return None if self._drivers is None else self._drivers.now

    @property
    def led_by(self) -> Age | None:
        """The gateway that leads, unless that is this one, or nobody is known to."""
        return self.lead.led_by

    @property
    def could_lead(self) -> bool:
        """Whether it stands by, and would lead as soon as the other gateway ends."""
        return self.lead.could

    @property
    def waits_for(self) -> str:
        """What the start waits for, and why; empty where it doesn't."""
        return self.lead.waits_for

    @property
    def begun(self) -> bool:
        """Whether it is done with its start."""
        return self.lead.begun

    @property
    def resources(self) -> Sequence[Resource]:
        """All resources of this gateway."""
        return tuple(self._resources.values())

    @property
    def age(self) -> Age:
        """This gateway's own age."""
        return self._instance.age

    @property
    def token(self) -> str:
        """This gateway's own token."""
        return self._instance.token


def _features(settings: Settings) -> Features:
    from gateway.kubernetes.features import Features  # noqa: PLC0415 - who needs none needn't pay for it

    return Features(settings)


def _met(gateway: Gateway, commands: Commands) -> Mapping[str, Handler]:
    """Return who meets which order. An order about a device is the leader's."""

    async def doctor(*talk: Any) -> None:
        from gateway.doctor import server  # noqa: PLC0415 - only a gateway that is asked pays for it

        await server.meet(gateway.source.name, commands.taken(few=True)(), gateway.settings, *talk)

    async def moved(*talk: Any) -> None:
        # Other drivers after each time that the gateway led.
        of_drivers = {} if gateway.drivers is None else gateway.drivers.handlers
        await {**commands.handlers, **of_drivers}["move"](*talk)

    handlers = {**commands.handlers, "move": moved}
    forwarded = {order: gateway.leader.forwarding(handlers[order]) for order in ("move", *orders.ORDERS)}
    return {**handlers, **forwarded, **gateway.leader.handlers, "doctor": doctor}


def _drivers(gateway: Gateway, first: asyncio.Event) -> RenewedDrivers | None:
    from gateway.dra import drivers, renewed  # noqa: PLC0415 - its imports are paid only where DRA is wanted
    from gateway.kubernetes.access import AccessError  # noqa: PLC0415 - as above

    lists = (lambda: gateway.resources), gateway.update
    known = gateway.age, gateway.source, gateway.holdings, *lists
    inside = drivers.Inside(*known, first, lambda: gateway.lead.passes_to)
    try:
        made = renewed.RenewedDrivers(lambda: drivers.Drivers(gateway.settings, inside), gateway._tasks)  # noqa: SLF001 - its parts
    except AccessError as error:
        _log.error("giving up: --dra needs the API server", reason=str(error))
        gateway._tasks.end(1)  # noqa: SLF001 - as above
        return None
    gateway.holdings.let_in = made.let_in
    return made


def _tell_serving(gateway: Gateway) -> None:
    tell = partial(_log.info, "serving") if gateway.presence.since is not None else gateway.presence.wait
    settings, resources = gateway.settings, {one.name: len(one.plugin.devices) for one in gateway.resources}
    tell(backend=gateway.source.name, api=settings.api, socket_dir=str(settings.socket_dir), resources=resources)
