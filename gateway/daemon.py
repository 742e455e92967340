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
from typing import TYPE_CHECKING, TypeVar

import structlog

from gateway import process
from gateway.configuration import reload
from gateway.folder import Folder
from gateway.following import Follower
from gateway.kubelet.beliefs import Beliefs
from gateway.kubelet.presence import Presence
from gateway.kubelet.watch import CHECKPOINT, KUBELET_SOCKET
from gateway.leader import instance
from gateway.leader.leader import Leader
from gateway.lists import Lists
from gateway.memory.again import Memory
from gateway.memory.holdings import Holdings
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.registration import events
from gateway.registration.events import Phase
from gateway.registration.registrar import Node, Resource
from gateway.registration.turns import Turns
from gateway.tally import Tally
from gateway.tasks import Tasks
from gateway.telling import orders
from gateway.telling.commands import Commands
from gateway.telling.listeners import Listeners
from gateway.wires import notify

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping, Sequence
    from typing import Any

    from devices.source import DeviceSource, Hindrance
    from gateway.age import Age
    from gateway.configuration.settings import Settings
    from gateway.dra.drivers import Drivers
    from gateway.dra.renewed import RenewedDrivers
    from gateway.kubelet.beliefs import Look
    from gateway.kubelet.identity import KubeletId
    from gateway.kubernetes.features import Features
    from gateway.wires.control import Handler

START = 5.0
"""Seconds of a start that are waited for until this gateway leads, or could."""
FIRST_LOOK = 1.0
"""Seconds that the source's first inventory is waited for, before what the ledger knows is served from memory."""

_T = TypeVar("_T")
_log = structlog.get_logger()


class _EndedError(Exception):
    """The gateway was told to end, with this exit status, while it was still starting."""


class Gateway:
    """The daemon."""

    def __init__(self, settings: Settings, source: DeviceSource) -> None:
        self.settings, self.source = settings, source
        self._instance = instance.Instance(
            settings.socket_dir, host_service=settings.host_service, pod_uid=settings.pod_uid
        )
        self.ledger = Ledger(settings.state_dir, settings.socket_dir)
        self.scribe = Scribe(self.ledger, self._writes, lambda: self.leader.writing())  # noqa: PLW0108 - they need each other
        self.tally, self.config = Tally(), reload.FileFate()
        self._features = _features(self) if settings.asks_api_server or settings.dra != "off" else None
        self._tasks = Tasks(self._end)
        self._resources: dict[str, Resource] = {}
        self.presence = Presence(settings.socket_dir / KUBELET_SOCKET)
        records = settings.pod_resources_socket, settings.socket_dir / CHECKPOINT
        self.beliefs = Beliefs(*records, self._looked, lambda *lost: self.holdings.remember_forgotten(*lost))  # noqa: PLW0108 - they need each other
        self.started = time.monotonic()
        kept = self.ledger, self.scribe, self.beliefs, self.presence
        self.holdings = Holdings(*kept, source, self._resources, self._tasks)
        self.leader = Leader(
            settings,
            self._instance,
            source,
            self.holdings,
            self._resources,
            lambda: self.lists,  # They need each other.
            lambda: self._drivers,
            lambda: self._exit.done(),  # noqa: PLW0108 - there is none before `run`
            self._tasks,
        )
        self.around = Node(
            settings=settings,
            source=source,
            tally=self.tally,
            turns=Turns(settings.socket_dir / CHECKPOINT),
            token=self.token,
            kubelet_socket=self.presence.socket,
            own_socket=self._instance.socket,
            memory=partial(Memory, self.holdings),
            look_within=self.beliefs.look_within,
            accepted=self.holdings.accepted,
            stood=self._stood,
            register_at=self.leader.register_at,
            guard=self.leader.passing,
        )
        self.lists = Lists(
            settings,
            source,
            self.holdings,
            self.leader,
            self._resources,
            lambda name: Resource(self.around, name, self.ledger.accepted),
            lambda: None if self.drivers is None else self.drivers.update(),
            lambda devices: {} if self.drivers is None else self.drivers.away(devices),
            self._sent,
            self._tasks,
            self.started,
        )
        self.lock = self.lists.lock
        self._follower = Follower(source, self.lists.take, self._end, lambda: self.config.policy or settings.policy)
        self._listeners = Listeners(settings, self.token, self._tasks)
        self._folder = Folder(
            settings,
            self._instance,
            self.presence,
            self._resources,
            self.lists.lock,
            kubelet_up=self._kubelet_up,
            bound_anew=lambda: self._tell_kubelet([one for one in self.resources if one.state.phase is Phase.ABSENT]),
            late=self.tally.late,
            end=self._end,
            tasks=self._tasks,
        )
        self._exit: asyncio.Future[int]
        self._drivers: RenewedDrivers | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, 0)
        loop.set_exception_handler(process.report_loop_error)
        try:
            await self._start()
            status = await self._exit
        except _EndedError as ended:
            (status,) = ended.args
        finally:
            await self._close()
        return status

    # Start and end.

    async def _start(self) -> None:
        await self._unless_ended(self.scribe.load(patient=True))
        self.holdings.recall()
        self._listeners.open_probes(self)
        await self._unless_ended(self._folder.wait(self._say_waiting))
        await self._listeners.close_control()
        self.beliefs.look_within(0)
        if removed := instance.sweep(self.settings.socket_dir):
            _log.info("removed what dead gateways left", folders=removed)
        self._instance.create()
        # It looks at its devices; where that takes longer than a moment, what is remembered is served.
        first = asyncio.Event()
        if self.settings.dra != "off":
            self._drivers = _drivers(self, first)
        self._tasks.spawn("source", self._follower.run(first))
        label = None if self._features is None else self._features.label
        self._tasks.spawn("reload", reload.follow(self.settings, self.source.adopt, self.config, label))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK):
                await self._unless_ended(first.wait())
        if self.lists.inventory is None:
            await self.lists.take(None)
        await self._open_control()
        self._tasks.spawn("watch", self._folder.run())
        if self._drivers is not None:
            self._drivers.begin()
        self._tasks.spawn("leader", self.leader.run())
        with contextlib.suppress(TimeoutError):  # systemd ends a unit whose start lasts.
            async with asyncio.timeout(START):
                await self._unless_ended(self.leader.settled.wait())
        await asyncio.sleep(0)  # The Registers go first.
        notify.tell(notify.READY)
        if (seconds := notify.watchdog()) is not None:
            self._tasks.spawn("watchdog", notify.keep_alive(seconds))
        if self._features is not None:
            self._tasks.spawn("kubernetes", self._features.run())
        gc.freeze()  # What is there now stays: a full collection of it takes 8 to 15 ms, in which nothing is answered.
        _tell_serving(self)

    async def _say_waiting(self) -> None:
        if not self._listeners.has_control:
            await self._listeners.open_control(Commands(self).handlers_while_waiting)

    async def _unless_ended(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await ``work``, but leave at once when the gateway is to end. What it raises is a defect, and ends the start."""
        task: asyncio.Future[_T] = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._exit), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _EndedError(self._exit.result())
            return task.result()
        finally:
            task.cancel()

    def _writes(self) -> bool:
        """Whether this gateway writes the state file: it leads, or waits for the folder in which others would be met."""
        return self.leader.leads or bool(self._folder.waits_for)

    def _end(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)

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

    async def _sent(self, news: bool) -> None:  # noqa: FBT001 - the lists' signature
        """Go on after each update: with ``news``, there are resources that are new."""
        if not self.begun:
            return
        if news:
            self.leader.look()
        self._tell_kubelet([resource for resource in self._resources.values() if resource.state.kubelet is None])

    def _looked(self, look: Look) -> None:
        for resource in self.resources:
            resource.looked(look)
        self.holdings.looked(look)
        self.lists.looked()

    def _stood(self, resource: Resource) -> None:
        """Take note that a resource's registration may stand elsewhere now."""
        if resource.state.phase is Phase.ABSENT:
            self.presence.check()
        elif resource.state.phase in {Phase.ACCEPTED, Phase.SERVING}:
            self.presence.found(anew=False)
        self.leader.stood(resource)

    def _kubelet_up(self, kubelet: KubeletId) -> None:
        first = self.presence.kubelet is None
        self.presence.kubelet = kubelet
        self.presence.found(anew=True)
        if self.begun:
            self.leader.approach(kubelet)
            self._tell_kubelet(self.resources)
        for name in self._resources:
            self.holdings.note(name)  # It was given before this kubelet's start.
        self.beliefs.restarted(self._resources if self.leader.leads else (), kubelet.mtime_ns / 1e9)
        if first:
            self.holdings.recall()
        _log.info("kubelet found", socket=str(self.presence.socket))

    def _tell_kubelet(self, resources: Iterable[Resource]) -> None:
        if self.presence.kubelet is not None:
            for resource in resources:
                resource.feed(events.KubeletUp(self.presence.kubelet))

    async def update(self) -> None:
        """Bring every resource's list up to date, because something else than the source has news."""
        await self.lists.update()

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Say what keeps the sources of devices from telling of them, or from offering some."""
        by_annotation = () if self._features is None else self._features.cordons.hindrances()
        return (*self.lists.unseen.added_to(self._follower.hindrances()), *by_annotation)

    @property
    def drivers(self) -> Drivers | None:
        """Its DRA drivers, where devices are offered by them."""
        return None if self._drivers is None else self._drivers.now

    @property
    def led_by(self) -> Age | None:
        """The gateway that leads, unless that is this one, or nobody is known to."""
        return self.leader.led_by

    @property
    def could_lead(self) -> bool:
        """Whether it stands by, and would lead as soon as the other gateway ends."""
        return self.leader.could

    @property
    def waits_for(self) -> str:
        """What the start waits for, and why; empty where it doesn't."""
        return self._folder.waits_for or self.leader.waits_for

    @property
    def begun(self) -> bool:
        """Whether it is done with its start."""
        return self.leader.begun

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


def _features(gateway: Gateway) -> Features:
    from gateway.kubernetes.features import Features  # noqa: PLC0415 - who needs none needn't pay for it

    return Features(gateway, lambda: gateway.leader.leads)


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


def _drivers(gateway: Gateway, first: asyncio.Event) -> RenewedDrivers:
    from gateway.dra import drivers, renewed  # noqa: PLC0415 - its imports are paid only where DRA is wanted
    from gateway.kubernetes.access import AccessError  # noqa: PLC0415 - as above

    lists = (lambda: gateway.resources), gateway.update
    known = gateway.age, gateway.source, gateway.holdings, *lists
    told = [] if gateway._features is None else [gateway._features.cordons.take]  # noqa: SLF001 - its parts
    inside = drivers.Inside(*known, first, lambda: gateway.leader.passes_to, told)
    try:
        made = renewed.RenewedDrivers(lambda: drivers.Drivers(gateway.settings, inside), gateway._tasks)  # noqa: SLF001 - its parts
    except AccessError as error:
        _log.error("giving up: --dra needs the API server", reason=str(error))
        raise _EndedError(1) from error
    gateway.holdings.let_in = made.let_in
    return made


def _tell_serving(gateway: Gateway) -> None:
    tell = partial(_log.info, "serving") if gateway.presence.since is not None else gateway.presence.wait
    settings, resources = gateway.settings, {one.name: len(one.plugin.devices) for one in gateway.resources}
    tell(backend=gateway.source.name, api=settings.api, socket_dir=str(settings.socket_dir), resources=resources)
