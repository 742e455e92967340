"""The daemon: carries out what the state machines decide, and owns every socket, timer and task while it does.

It holds no rule of any kubelet version. For each resource name there is one ``registrar.Resource``; for the node one watch, one ledger,
one source.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from gateway import process
from gateway.configuration import reload
from gateway.folder import Folder
from gateway.following import Follower
from gateway.handover import instance, message
from gateway.handover.peers import ALLOCATES_END, Peers
from gateway.kubelet.beliefs import Beliefs
from gateway.kubelet.presence import Presence
from gateway.kubelet.watch import CHECKPOINT, KUBELET_SOCKET
from gateway.lists import Lists
from gateway.memory import mend
from gateway.memory.holdings import Holdings
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.registration import events
from gateway.registration.events import Phase
from gateway.registration.machine import CUT_WAIT
from gateway.registration.registrar import Node, Resource
from gateway.registration.turns import Turns
from gateway.tally import Tally
from gateway.tasks import Tasks
from gateway.telling.commands import Commands
from gateway.telling.listeners import Listeners
from gateway.wires import notify
from gateway.wires.pool import GrpcThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from typing import Any

    from devices.source import DeviceSource, Hindrance
    from gateway.age import Age
    from gateway.configuration.settings import Settings
    from gateway.dra.drivers import Drivers
    from gateway.handover.alone import Alone
    from gateway.kubelet.beliefs import Look
    from gateway.kubelet.identity import KubeletId
    from gateway.kubernetes.features import Features
    from gateway.leader.leader import Leader
    from gateway.pair.role import Role
    from gateway.telling.subject import LookedAfter
    from gateway.wires.control import ControlConnection, Handler

FIRST_LOOK = 1.0
"""Seconds that the source's first inventory is waited for, before what the ledger knows is served from memory."""
YIELD_TIME = 0.05
"""Seconds that an older gateway is given to end its streams before this one registers."""
RESIGNED = -1
"""What ``Gateway.run`` returns, in place of an exit status, where it made room: it is to begin anew and wait."""

_T = TypeVar("_T")
_log = structlog.get_logger()


class _EndedError(Exception):
    """The gateway was told to end, with this exit status, while it was still starting."""


class Gateway:
    """The daemon; ``role`` is what it is in a pair (None: it is alone).

    ``before``: when it began (nanoseconds of the boot clock; empty: now), and how often in a row it made room in vain.
    """

    def __init__(
        self, settings: Settings, source: DeviceSource, role: Role | None = None, before: Sequence[int] = ()
    ) -> None:
        self.settings, self.source, self._role = settings, source, role
        born_ns = next(iter(before), None) if role is None else role.born_ns
        age = instance.begin(host_service=settings.host_service, born_ns=born_ns)
        self._instance = instance.Instance(settings.socket_dir, age)
        self.ledger = Ledger(settings.state_dir, mend.decode if role is None else role.decode, settings.socket_dir)
        self.scribe = Scribe(self.ledger)
        self.alone = _alone(self, role, sum(before[1:]))
        self.tally, self.config, self._threads = Tally(), reload.FileFate(), GrpcThreads()
        self._features = _features(settings) if settings.asks_api_server else None
        self._tasks = Tasks(self._end, role.active if role is not None else None)
        self._resources: dict[str, Resource] = {}
        self.presence = Presence(settings.socket_dir / KUBELET_SOCKET)
        records = settings.pod_resources_socket, settings.socket_dir / CHECKPOINT
        self.beliefs = Beliefs(*records, self._looked, lambda *lost: self.holdings.remember_forgotten(*lost))  # noqa: PLW0108 - they need each other
        self.started, self._stopped = time.monotonic(), False
        self.holdings = Holdings(self.ledger, self.scribe, self.beliefs, self.presence, self._resources, self._tasks)
        lists: Callable[[], Lists] = lambda: self.lists  # noqa: E731 - they need each other
        around = settings, self._instance, self.holdings, self._resources, lists, lambda: self._exit.done()  # noqa: PLW0108 - there is none before `run`
        self.leader = self._peers = None
        if _one_leads(settings, role):
            from gateway.leader.leader import Leader  # noqa: PLC0415 - only who has it pays for it

            self.leader = leader = Leader(*around, self._tasks, source)
            self.others: Leader | Peers = leader
        else:
            self.others = self._peers = Peers(*around, self.tally, self._tasks)
        self.around = Node(
            settings=settings,
            source=source,
            tally=self.tally,
            turns=Turns(settings.socket_dir / CHECKPOINT),
            token=self.token,
            kubelet_socket=self.presence.socket,
            own_socket=self._instance.socket,
            memory=self.holdings.memory,
            look_within=self.beliefs.look_within,
            accepted=self.holdings.accepted,
            stood=self._stood,
            register_at=self.others.register_at,
            guard=_guard(role) if role is not None else self.leader.passing if self.leader is not None else None,
        )
        self.lists = Lists(
            settings,
            source,
            self.holdings,
            self.others,
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
            peers_changed=self.others.look,
            bound_anew=lambda: self._tell_kubelet([one for one in self.resources if one.state.phase is Phase.ABSENT]),
            late=self.tally.late,
            end=self._end,
            tasks=self._tasks,
        )
        self._exit: asyncio.Future[int]
        self.drivers: Drivers | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until a newer gateway takes over; return the exit status, or ``RESIGNED``."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, 0)
        loop.set_exception_handler(process.report_loop_error)
        if self._role is not None:
            self._role.attach()
        try:
            await self._start()
            status = await self._exit
        except _EndedError as ended:
            (status,) = ended.args
        finally:
            await self._close()
        return 0 if status == RESIGNED and self._stopped else status

    # Start and end.

    async def _start(self) -> None:
        await self._unless_ended(self.scribe.load(patient=True))
        self.holdings.recall(self.ledger.resources())
        self._listeners.open_probes(self)
        await self._unless_ended(self._folder.wait(self._say_waiting))
        await self._listeners.close_control()
        self.beliefs.look_within(0)
        if removed := instance.sweep(self.settings.socket_dir):
            _log.info("removed what dead gateways left", folders=removed)
        beside = self.alone is not None and await self._unless_ended(self.alone.begin(asks=self.settings.dra != "off"))
        self._instance.create()
        # It looks at its devices; where that takes longer than a moment, what is remembered is served.
        first = asyncio.Event()
        if self.settings.dra != "off":
            self.drivers = _drivers(self, first, decides=not beside)
            self.holdings.let_in = self.drivers.let_in
        self._tasks.spawn("source", self._follower.run(first))
        attempts = None if self._role is None else self._role.flight
        label = None if self._features is None else self._features.label
        self._tasks.spawn("reload", reload.follow(self.settings, self.source.adopt, self.config, label, attempts))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK):
                await self._unless_ended(first.wait())
        if self.lists.inventory is None:
            await self.lists.take(None)
        if not beside:
            await self._open_control()
        self._tasks.spawn("watch", self._folder.run())
        if self.leader is not None:
            self._instance.publish()
            self._tasks.spawn("leader", self.leader.run())
            await self._unless_ended(self.leader.settled.wait())
        elif self._peers is not None:
            await self._outrank(self._peers, first, beside=beside)
        await asyncio.sleep(0)  # The Registers go first.
        if self._role is not None and self._peers is not None and self.drivers is None:
            await self._role.rest(self.resources, self.scribe.load, self._peers.over)
        notify.tell(notify.READY)
        if (seconds := notify.watchdog()) is not None:
            self._tasks.spawn("watchdog", notify.keep_alive(seconds))
        if self._features is not None:
            self._tasks.spawn_once_active("kubernetes", self._features.run(self))
        gc.freeze()  # What is there now stays: a full collection of it takes 8 to 15 ms, in which nothing is answered.
        _tell_serving(self)

    async def _outrank(self, peers: Peers, first: asyncio.Event, *, beside: bool) -> None:
        # It takes over from older gateways, once it could serve.
        await self._unless_ended(peers.know_devices(first, self.source.name))
        await self._unless_ended(peers.ability.wait())
        if self.drivers is not None:
            living = self._instance.peers if self.settings.dra == "only" else dict
            self._tasks.spawn("dra", self.lists.unseen.offer(self.drivers.run, living))
            if beside and self.alone is not None:
                await self._unless_ended(_succeed(self, self.alone, self.drivers))
                await self._open_control()
        older_ones = self._instance.peers() if self.drivers is None else {}
        await self._unless_ended(peers.take_over(older_ones))
        self._instance.publish()
        if any(one < self._instance.age and not peers.handover.decides(one, "") for one in older_ones):
            await self._unless_ended(asyncio.sleep(YIELD_TIME))
        # From here on it serves.
        peers.begun = True
        if older_ones:  # Until now they may have answered Allocates, so List was not called.
            self.beliefs.look_within(ALLOCATES_END)
        if self.alone is not None:
            self.alone.serves(host_service=self.settings.host_service)
            self._tasks.spawn("lock", self.alone.keep())
        self._tasks.spawn("standby", peers.standby.run())
        peers.look()
        # Left to another gateway, which went before it was asked for it; or another serves it under another name.
        if self.lists.unremembered() or any(resource.standing_by_for is not None for resource in self.resources):
            await self._unless_ended(self.update())
        self._tell_kubelet(self.resources)

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

    def _end(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)
        self._stopped |= status != RESIGNED  # A signal may come while it makes room.

    async def _close(self) -> None:
        """End the streams, then the servers, then what is left of us in the socket directory."""
        notify.tell(notify.STOPPING)
        if self.drivers is not None:
            await self.drivers.close()
        await self.others.end()
        for resource in self._resources.values():
            resource.feed(events.Stop())
        await self._tasks.close()
        self.lists.close()
        await asyncio.gather(*(resource.close() for resource in self._resources.values()), self.beliefs.close())
        await self.others.close()
        self.presence.close()
        await self._listeners.close_control()
        await self.scribe.close()
        if self.alone is not None:
            self.alone.close()
        self._instance.remove()
        if self.drivers is not None:
            await self.drivers.finish()
        _log.info("ended")

    async def _open_control(self) -> None:
        commands = Commands(self)
        await self._listeners.open_control({**commands.handlers, **_met(self, self._role, commands)})
        self._listeners.open_metrics(commands.taken, self.tally, self)

    # What happens.

    async def _sent(self, news: bool) -> None:  # noqa: FBT001 - the lists' signature
        """Go on after each update: with ``news``, there are resources that are new."""
        if not self.begun:
            return
        if news and self._peers is not None:
            await self._peers.handover.take_over(self._peers.living() or ())
        self.others.look_at_peers()
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
        if self._role is not None:
            self._role.stood(self.token, resource)
        self._threads.served(served=all(one.unserved_since is None for one in self.resources))
        self.others.stood(resource)

    def _kubelet_up(self, kubelet: KubeletId) -> None:
        first = self.presence.kubelet is None
        self.presence.kubelet = kubelet
        self.presence.found(anew=True)
        self.others.kubelet_up(kubelet)
        if self.begun:
            self.others.approach(kubelet)
            self._tell_kubelet(self.resources)
        for name in self._resources:
            self.holdings.note(name)  # It was given before this kubelet's start.
        ours = (name for name, resource in self._resources.items() if resource.standing_by_for is None)
        self.beliefs.restarted(ours, kubelet.mtime_ns / 1e9)
        if first:
            self.holdings.recall(self.ledger.resources())
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
        flight = () if self._role is None else self._role.flight.hindrances()
        return (*self.lists.unseen.added_to(self._follower.hindrances()), *flight)

    @property
    def standby(self) -> LookedAfter:
        """What is known of the resources that another gateway is to serve."""
        return self.others.standby

    @property
    def could_lead(self) -> bool:
        """Whether it stands by, and would lead as soon as the other gateway ends."""
        return self.leader is not None and self.leader.could

    @property
    def waits_for(self) -> str:
        """What the start waits for, and why; empty where it doesn't."""
        one = self.alone or self.leader
        return self._folder.waits_for or (one.waits_for if one is not None else "")

    @property
    def begun(self) -> bool:
        """Whether it is done with its start."""
        return self.others.begun

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


def _guard(role: Role) -> Callable[..., Any]:
    return lambda call, resource, answer: role.flight.guard(f"{call} for {resource}", answer)


def _one_leads(settings: Settings, role: Role | None) -> bool:
    """Whether the gateway that holds the locks leads: behind a switch, until all modes have it."""
    return role is None and settings.dra == "off" and os.environ.get("ONE_LEADER") == "1"


def _alone(gateway: Gateway, role: Role | None, in_vain: int) -> Alone | None:
    # One with DRA off that made room waits as those do that serve both APIs.
    if not {"on": True, "only": role is not None, "off": in_vain > 0}[gateway.settings.dra]:
        return None
    from gateway.handover.alone import Alone  # noqa: PLC0415 - only who must be alone pays for it

    ours, settings, resign = gateway._instance, gateway.settings, partial(gateway._end, RESIGNED)  # noqa: SLF001 - its parts
    who = ours.age, settings.state_dir, ours.peers, resign, gateway.scribe
    return Alone(*who, in_vain, role, shares=settings.dra == "only")


def _met(gateway: Gateway, role: Role | None, commands: Commands) -> Mapping[str, Handler]:
    """Return who meets the orders of other gateways, and ``doctor``. Without DRA, this one makes room for a newer one that serves both APIs."""

    async def resign(connection: ControlConnection, request: dict[str, Any]) -> None:
        stays = "" if gateway.begun else message.STARTING
        stays = message.PAIR if role is not None else message.HOST_SERVICE if gateway.settings.host_service else stays
        if token := await message.makes_room(gateway.age, stays, connection, request):
            _log.info("making room for a newer gateway", peer=token)
            gateway._end(RESIGNED)  # noqa: SLF001 - as above

    async def doctor(*talk: Any) -> None:
        from gateway.doctor import server  # noqa: PLC0415 - only a gateway that is asked pays for it

        await server.meet(gateway.source.name, commands.taken(rows=False)(), gateway.settings, *talk)

    others = {**gateway.others.handlers, message.RESIGN: resign}
    more = others if gateway.drivers is None else gateway.drivers.handlers
    return {"doctor": doctor, **more, **(gateway.alone.handlers if gateway.alone else {})}


def _drivers(gateway: Gateway, first: asyncio.Event, *, decides: bool) -> Drivers:
    from gateway.dra import drivers  # noqa: PLC0415 - its imports are paid only where DRA is wanted
    from gateway.kubernetes.access import AccessError  # noqa: PLC0415 - as above

    memory = gateway.ledger, gateway.scribe, gateway.beliefs, gateway.holdings.held
    lists = (lambda: gateway.resources), gateway.update
    alone, guard = gateway.alone, None if gateway._role is None else gateway._role.flight.guard  # noqa: SLF001 - as above
    decider = alone.decider if alone is not None else str
    inside = drivers.Inside(gateway.age, gateway.source, *memory, *lists, gateway.presence, first, decider, guard)
    try:
        made = drivers.Drivers(gateway.settings, inside)
    except AccessError as error:
        _log.error("giving up: --dra needs the API server", reason=str(error))
        raise _EndedError(1) from error
    if alone is not None:
        alone.leave = made.leave
    if decides:
        made.decide()
    return made


def _tell_serving(gateway: Gateway) -> None:
    tell = partial(_log.info, "serving") if gateway.presence.since is not None else gateway.presence.wait
    settings, resources = gateway.settings, {one.name: len(one.plugin.devices) for one in gateway.resources}
    tell(backend=gateway.source.name, api=settings.api, socket_dir=str(settings.socket_dir), resources=resources)


async def _succeed(gateway: Gateway, alone: Alone, drivers: Drivers) -> None:
    """Decide in place of another gateway, by what that one left: of an older one as soon as this one could."""
    await alone.succeed(lambda: drivers.not_ready or gateway.lists.unseen.words)
    gateway.holdings.recall(fresh=True)
    drivers.decide()
    if gateway.presence.kubelet is not None:
        gateway.others.approach(gateway.presence.kubelet)
    await asyncio.gather(gateway.update(), asyncio.sleep(CUT_WAIT))  # The kubelet sees its streams end meanwhile.
