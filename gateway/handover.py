"""Carries out what ``gateway.leader.machine`` decides: takes and frees the locks, and exchanges messages with the node's other gateways."""

from __future__ import annotations

import asyncio
import faulthandler
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import structlog

from adapters.registry import by_name
from gateway.age import TOKEN, Age, plausible
from gateway.kubelet.identity import kubelet_id
from gateway.leader import machine
from gateway.leader.instance import boot_ns
from gateway.leader.leadership import LAST_ALLOCATE_S, LEADER_WAIT_S
from gateway.leader.machine import Stage
from gateway.memory.scribe import PATIENCE
from gateway.registration import events
from gateway.registration.events import Phase
from gateway.registration.negotiate import CHOICES
from gateway.registration.registrar import any_registers, warm_up
from gateway.wires import control
from gateway.wires.control import ControlConnection, ControlError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devices.source import DeviceSource
    from gateway.configuration.settings import Settings
    from gateway.dra.drivers import RenewedDrivers
    from gateway.kubelet.identity import KubeletId
    from gateway.kubelet.presence import Presence
    from gateway.leader.instance import Instance
    from gateway.leader.leadership import Leadership
    from gateway.lists import Lists
    from gateway.memory.holdings import Holdings
    from gateway.registration.registrar import Resource
    from gateway.tasks import Signal, Tasks
    from gateway.wires.control import Handler

OP: Final = "lead"
ABLE_AGAIN: Final = 0.5
"""Seconds between two checks if this gateway could lead."""
LIVES: Final = 5.0
"""Seconds between two signs of life of a leader's event loop, and between two checks of its locks."""
HANGS: Final = 15.0
"""Seconds without a sign of life after which this process ends itself, so that the kernel frees the locks."""
OFFERS: Final = 1.0
"""Seconds for which a gateway that ends waits until a standby has taken over."""
STREAMS_END: Final = 0.05
"""Seconds for which the kubelet may notice the end of its streams, before the locks are freed."""
REGISTERS_END: Final = 12.0
"""Most seconds until a Register in flight is answered, and the kubelet has called."""
CONNECT: Final = 0.5
"""Most seconds for a connection to the leader."""
REGISTER_FIRST: Final = 37
"""From kubelet 1.37 on, the end of an older stream doesn't remove a newer registration (#135437)."""
UPDATE_AGAIN: Final = 5.0
"""Seconds until a failed update of the lists is tried again."""
ORDER: Final = 30.0
"""Most seconds for an order that was passed on to the leader."""
SERVES: Final = 15.0
"""Seconds after a takeover within which the kubelet must call: as long as a Register may last."""
PROBE_TIME = 1.0
"""Seconds within which a kubelet must say which API it speaks, before this gateway asks to lead."""
_log = structlog.get_logger()


class Ability:
    """Checks before a handover if the running kubelet would accept this gateway, given its choice of APIs (``--api``)."""

    def __init__(self, api: str, presence: Presence, resources: Mapping[str, Resource]) -> None:
        self._api, self._presence, self._resources = api, presence, resources
        self._speaks: tuple[KubeletId, str | None] | None = None
        """The kubelet that was asked, and the dialect that it speaks (None: none of those that ``--api`` allows)."""

    async def unable(self) -> str:
        """Return why the running kubelet would accept no resource of this gateway; empty if it would accept one, or no kubelet runs."""
        if not self._presence.listens():
            return ""
        if reason := await self.probe():
            return reason
        unfit = [self.unfit(resource) for resource in self._resources.values()]
        return "" if None in unfit else next((reason for reason in unfit if reason), "")

    async def probe(self) -> str:
        """Ask the kubelet which API it speaks, once per kubelet; return why it can't be known now."""
        kubelet = kubelet_id(self._presence.socket)
        if kubelet is None or (self._speaks is not None and self._speaks[0] == kubelet):
            return ""
        from gateway.registration import api as kubelet_api  # noqa: PLC0415 - paid where there is another gateway

        found = await kubelet_api.ask(self._presence.socket, PROBE_TIME)
        if not found.answered:
            return f"the kubelet did not answer a Register within {PROBE_TIME:g} s: {found.says}"
        if found.api is not None:  # An unknown API: only a Register will show what the kubelet accepts.
            self._speaks = (kubelet, found.api if found.api in CHOICES[self._api] else None)
        return ""

    def unfit(self, resource: Resource) -> str | None:
        """Return why the running kubelet would not accept a resource; None if it would, or if that is unknown."""
        if self._speaks is None or self._speaks[0] != kubelet_id(self._presence.socket):
            return None
        api = self._speaks[1]
        if api is None:
            return f"this kubelet speaks none of the APIs that --api {self._api} allows: use --api auto"
        return resource.plugin.list.too_large(by_name(api))


class Handover:
    """Changes who leads on the node, for this gateway.

    Args:
        settings: the gateway's settings.
        own: its folder on the node.
        lead: who leads; only this class changes it.
        source: the source of its devices.
        holdings: what containers hold.
        resources: its resources, by name.
        lists: its lists.
        moved: set when the phase of a registration may have changed.
        tasks: its tasks.
    """

    def __init__(
        self,
        settings: Settings,
        own: Instance,
        lead: Leadership,
        source: DeviceSource,
        holdings: Holdings,
        resources: Mapping[str, Resource],
        lists: Lists,
        moved: Signal,
        tasks: Tasks,
    ) -> None:
        self._settings, self._instance, self._lead, self._holdings = settings, own, lead, holdings
        self._source, self._resources, self._lists, self._moved, self._tasks = source, resources, lists, moved, tasks
        self._presence, self._scribe, self._reader = holdings.presence, holdings.scribe, holdings.reader
        self.drivers: RenewedDrivers | None = None
        """The DRA drivers, if DRA is on."""
        self.settled = asyncio.Event()
        """Set when this gateway has started: it leads, or stands by."""
        self._locks = lead.locks
        self._ability = Ability(settings.api, self._presence, resources)
        self._warm = False
        """True if this process has connected to a kubelet. Its first connection takes milliseconds longer."""
        self._timer: asyncio.TimerHandle | None = None
        self._links: dict[str, ControlConnection] = {}
        """The connections to the other gateways, by token."""
        self._ages: dict[str, Age] = {}
        """The ages of the other gateways, by token."""
        self._before = ""
        """The token of the gateway that yielded to this one, until this one reports that it serves."""
        self._parts_decide = False
        """True if the source and the DRA drivers act as the leader's."""
        self._turn = asyncio.Lock()
        """Held while ``_parts_decide`` changes."""
        self._opening: asyncio.Future[None] | None = None
        """The thread that opens the second lock. Only one runs, even if the disk hangs."""

    # -- for the gateway ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Check repeatedly if this gateway could lead, and if its locks still have their names."""
        self._lead.state = machine.start(self._instance.age)  # Its pod's age is known by now.
        self._tasks.spawn("locks", self._let_go())
        while True:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            if self._lead.leads and self._lead.check_locks():
                await self._lock_state_directory()
                self._end_unless_served()
            else:
                await self._read_state_file()
                self._feed(machine.Able(reason := await self._unable(replaces=self._lead.state.leader is not None)))
                if not reason and not self._warm and self._presence.listens():
                    self._warm = True
                    await warm_up(self._presence.socket)
            await self._lead.changed.wait(LIVES if self._lead.leads else ABLE_AGAIN)

    async def _let_go(self) -> None:
        """Free the locks as soon as one was replaced."""
        while True:
            if self._lead.lost:
                self._feed(machine.Lost(self._lead.lost))
            await self._lead.changed.wait(None)

    def _end_unless_served(self) -> None:
        """End this process if the kubelet doesn't call after a takeover, so that the earlier leader leads again."""
        waited = time.monotonic() - self._lead.handed_over_at
        is_to_serve = self._lead.state.stage is Stage.LEADING and self._before in self._links
        if is_to_serve and waited >= SERVES and not self._serves():
            why = [f"{one.name}: {one.state.phase.value}" for one in self._resources.values()]
            _log.error("ending: this gateway took over, and isn't served", waited_s=round(waited, 1), resources=why)
            self._tasks.end(1)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of another gateway's orders over the control socket."""
        return {OP: self._meet_another}

    async def end(self) -> None:
        """Write all notes to disk and let another gateway lead, before this one ends."""
        if self._links:
            self._feed(machine.Ending())
            ends = time.monotonic() + OFFERS
            while self._lead.state.stage in {Stage.LEADING, Stage.YIELDING, Stage.YIELDED} and time.monotonic() < ends:
                await self._lead.changed.wait(ends - time.monotonic())
        self._feed_all(events.Stop())
        self._lead.ended = True
        if (drivers := self.drivers) is not None:
            await drivers.close()
        if self._lead.leads:
            await self._wait_for_answers(OFFERS)
            await self._source.rest()
            await self._write_promises()
            await self._wait_for_streams()
        self._let_go_for_good()

    async def _read_state_file(self) -> None:
        """Read the orders and holders that the leader wrote."""
        if self._lead.state.leader is not None and not self._holdings.ledger.current:
            await self._holdings.load()
            await self._lists.update()

    async def _lock_state_directory(self) -> None:
        """Lock the state directory if it isn't locked yet. If another gateway has that lock, stop leading."""
        if not self._locks.whole:
            await self._open_locks()
            try:
                reason = "" if self._locks.take() else "another gateway has the lock of the state directory"
            except OSError as error:
                reason = str(error)
            if reason:
                self._feed(machine.Lost(reason))

    def _let_go_for_good(self) -> None:
        """Free the locks and close all connections, because this gateway ends."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
        self._locks.close(last=not self._links)
        for link in [*self._links.values()]:
            link.close()

    async def _meet_another(self, connection: ControlConnection, request: Mapping[str, Any]) -> None:
        """Handle ``OP`` of the control server: exchange messages with another gateway until it ends.

        Raises:
            ControlError: it doesn't introduce itself.
        """
        age = sender(request)
        if age is None:
            raise ControlError(f"not the age of a gateway: {control.shown(request.get('from'))}")
        await connection.send({"leads": self._lead.leads, "from": self._introduction()})
        await self._talk(age, connection)

    def forwarding(self, handler: Handler) -> Handler:
        """Return a handler that passes an order on to the leader, unless this gateway leads."""

        async def met(connection: ControlConnection, request: dict[str, Any]) -> None:
            ends = time.monotonic() + LEADER_WAIT_S
            while not self._lead.answers and self._lead.led_by is None and time.monotonic() < ends:
                await self._lead.changed.wait(ends - time.monotonic())
            if self._lead.answers:
                with self._lead.count_call():
                    return await handler(connection, request)
            if (leader := self._lead.led_by) is None:
                raise ControlError(f"no gateway leads on this node within {LEADER_WAIT_S:g} s: give the order again")
            path = control.socket_path(self._settings.state_dir, leader.token)
            answer = await control.ask(path, request, ORDER)
            await self._read_state_file()
            return await connection.send(answer)

        return met

    # -- what happens -------------------------------------------------------------------------------------------------

    def _stand_by(self) -> None:
        """End all registrations, unless this gateway leads, or yields and its streams must go on until the next one serves."""
        if self._lead.stands_by and self._settings.dra != "only":
            self._feed_all(events.StandBy())

    def _feed_all(self, event: events.Event) -> None:
        for resource in self._resources.values():
            resource.feed(event)

    def approach(self, kubelet: KubeletId) -> None:
        """Start to connect to a running kubelet, if this gateway leads."""
        for resource in self._resources.values() if self._lead.leads and self._settings.dra != "only" else ():
            resource.approach(kubelet)

    async def _report(self) -> None:
        """Report to the gateway that yielded as soon as this one serves."""
        before = self._before
        while before and before == self._before and self._lead.state.stage is Stage.LEADING:
            if self._serves():
                self._tell(before, {"serving": True})
                self._before = ""
                return
            await self._moved.wait(LIVES)

    # -- the machine --------------------------------------------------------------------------------------------------

    def _feed(self, event: machine.Event) -> None:
        if (reason := self._lead.lost) and not isinstance(event, machine.Lost):
            self._feed(machine.Lost(reason))  # First react to the lost locks.
        before = self._lead.state.stage
        self._lead.state, actions = machine.step(self._lead.state, event)
        if self._lead.state.stage is not before:
            _log.info("leader", stage=self._lead.state.stage.value, why=type(event).__name__)
            self._lead.changed.set()
        stands_by = self._lead.state.stage is Stage.STANDBY and self._lead.state.leader is not None
        if not self._lead.begun and (stands_by or self._lead.state.stage is Stage.LEADING):
            self._lead.begun = True
            self.settled.set()
        if self._lead.state.leader is not None and self._lead.state.stage in {
            Stage.PREPARING,
            Stage.STANDBY,
            Stage.ASKING,
        }:
            self._stand_by()
        for action in actions:
            self._act(action)
        if isinstance(event, machine.Lost):
            self._lead.lost = ""

    def _act(self, action: machine.Action) -> None:
        match action:
            case machine.TryLocks():
                self._try()
            case machine.Ask():
                self._tell(self._lead.other, {"ask": True})
            case machine.Withdraw():
                self._tell(self._lead.other, {"ask": False})
            case machine.PrepareLists():
                self._tasks.background(self._take())
            case machine.Lead():
                self._register()
            case machine.Invite():
                for token in self._links:
                    self._tell(token, {"offer": True})
            case machine.Drain():
                self._tasks.background(self._drain())
            case machine.Reply(to, reason, seconds):
                self._tell(to.token, {"no": reason, "again_s": seconds} if reason else {"yours": True})
            case machine.Free():
                self._locks.free()
            case machine.StopServing(by):
                self._feed_all(events.StandBy())
                self._tasks.background(self._parts_stand_by())  # In the background: the locks may be lost already.
                for token in self._links.keys() - {"" if by is None else by.token}:
                    self._tell(token, {"leads": False})
            case machine.SetAlarm(seconds):
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                if seconds is not None:
                    self._timer = asyncio.get_running_loop().call_later(seconds, self._waited)

    def _waited(self) -> None:
        self._timer = None
        self._feed(machine.AlarmRang(time.monotonic()))

    def _try(self) -> None:
        if self._tasks.exit_status is not None:
            return
        if not self._locks.ready:
            self._tasks.background(self._open_and_try())
            return
        if self._locks.unguarded and self._settings.dra != "off":
            self._locks.ready = False  # With DRA the leader must be able to write what it gives.
            self._feed(machine.HeldElsewhere(why=self._locks.unguarded))
            return
        try:
            taken = self._locks.take()
        except OSError as error:
            self._feed(machine.HeldElsewhere(why=f"{error}: without this lock nobody can lead"))
            return
        if taken:
            if self._locks.unguarded:
                _log.error("leading without the lock of the state directory", reason=self._locks.unguarded)
            self._feed(machine.Locked())
        elif self._lead.state.hurry and self._locks.holder().token in {"", self._lead.state.left}:
            self._feed(machine.HeldElsewhere(leaving=True))
        else:
            self._tasks.background(self._connect())

    async def _connect(self) -> None:
        """Connect to the gateway that holds the locks."""
        holder = self._locks.holder()
        if holder.state and holder.state != self._locks.state():
            why = (
                f"the gateway {holder.token} leads with another state directory ({holder.path}; this one has "
                f"{self._settings.state_dir}): give both the same --state-dir, on the same mount"
            )
            self._feed(machine.HeldElsewhere(why=why))
            return
        if not holder.token or holder.token in self._links:
            self._feed(machine.HeldElsewhere(self._ages.get(holder.token)))
            return
        path = control.socket_path(self._settings.state_dir, holder.token)
        try:
            link = await control.connect(path, CONNECT)
            await link.send({"op": OP, "from": self._introduction()})
            async with asyncio.timeout(CONNECT):
                said = await link.receive()
        except (ControlError, TimeoutError) as error:
            self._feed(machine.HeldElsewhere(why=str(error)))
            return
        age = sender(said) if said is not None and said.get("leads") is True else None
        if age is None:
            link.abort()
            self._feed(
                machine.HeldElsewhere(why=f"the gateway {holder.token} holds the locks and doesn't say that it leads")
            )
            return
        unable = await self._unable(replaces=True)
        self._links[age.token], self._ages[age.token] = link, age  # Before the next message can arrive.
        self._tasks.background(self._talk(age, link))
        self._feed(machine.HeldElsewhere(age, unable=unable))

    async def _talk(self, age: Age, link: ControlConnection) -> None:
        """Handle another gateway's messages until the connection ends."""
        self._links[age.token], self._ages[age.token] = link, age
        try:
            while (said := await link.receive()) is not None:
                match said:
                    case {"ask": True}:
                        self._feed(machine.LeadWanted(age, time.monotonic()))
                    case {"yours": True}:
                        self._before = age.token
                        self._feed(machine.LeaderYielded())
                    case {"no": str(reason), "again_s": int() | float() as seconds}:
                        self._feed(machine.LeaderRefused(reason, float(seconds)))
                    case {"offer": True}:
                        self._feed(machine.Invited())
                    case {"serving": True}:
                        self._feed(machine.Serving())
                    case {"leads": False} | {"ask": False}:
                        self._feed(machine.Gone(age.token))
                    case _:  # A message of a later release.
                        pass
        finally:
            if self._links.get(age.token) is link:
                del self._links[age.token], self._ages[age.token]
            link.abort()
            self._feed(machine.Gone(age.token))

    def _introduction(self) -> dict[str, Any]:
        return {"born_ns": self._instance.age.born_ns, "token": self._instance.age.token}

    def _tell(self, token: str, message: Mapping[str, Any]) -> None:
        if (link := self._links.get(token)) is not None:
            self._tasks.background(self._send(link, message))

    async def _send(self, link: ControlConnection, message: Mapping[str, Any]) -> None:
        with suppress(ControlError):
            await link.send(message)

    # -- serving ------------------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        """Read the state file of the earlier leader, and prepare the lists."""
        self._lead.handed_over_at = time.monotonic()
        if self._presence.kubelet is not None:
            self.approach(self._presence.kubelet)
        await self._holdings.load(patient=True)
        lists = self._lists
        try:
            news = await self._let_parts_decide() or lists.only_remembered or lists.unremembered()
            ready = not news and lists.based_on == self._holdings.ledger.list_inputs()
            await (lists.announce() if ready else lists.update())
        except Exception:  # noqa: BLE001 - no other gateway serves, and the last lists are better than none
            _log.exception("the lists could not be brought up to date: serving the last ones", retry_s=UPDATE_AGAIN)
            lists.update_again([time.monotonic() + UPDATE_AGAIN])
        self._feed(machine.ListsReady())

    async def _let_parts_decide(self) -> bool:
        """Let the source and the DRA drivers act as the leader's. Return True if the lists may change because of that."""
        async with self._turn:
            drivers = self.drivers
            if not self._parts_decide:
                self._parts_decide = True
                await self._source.lead()
                if drivers is not None:
                    drivers.now.decide()
            return drivers is not None

    async def _parts_stand_by(self) -> None:
        """Stop the source and the DRA drivers from acting as the leader's."""
        async with self._turn:
            if self._parts_decide:
                self._parts_decide = False
                if (drivers := self.drivers) is not None:
                    await (drivers.close() if self._lead.state.ending else drivers.rest())
                await self._source.rest()

    def _register(self) -> None:
        """Register all resources, or go on serving them."""
        self._tasks.background(self._let_parts_decide())  # It may have begun to yield.
        self._tasks.background(self._report())
        if self._settings.dra == "only":
            return
        waited = time.monotonic() - self._lead.handed_over_at
        for resource in self._resources.values():
            resource.feed(events.Resume(waited))
            if self._presence.kubelet is not None and resource.state.kubelet is None:
                resource.feed(events.KubeletUp(self._presence.kubelet))
        self._reader.look_within(LAST_ALLOCATE_S)
        if self._holdings.ledger.pending:  # Changes that it saw while it stood by.
            self._scribe.soon()

    async def _drain(self) -> None:
        """Prepare to yield: send nothing new and write all notes to disk. End the streams first if the kubelet needs that."""
        if (drivers := self.drivers) is not None and not self._lead.state.ending:
            self._lead.leaves = True
            await drivers.leave()
            self._lead.leaves = False
        await self._wait_for_answers(REGISTERS_END)
        if not self._yields():
            return
        if self._lead.answering:
            self._feed(machine.Drained("a call isn't answered yet"))
            return
        first = self._register_first()
        await self._parts_stand_by()
        if not await self._write_promises():
            self._feed(machine.Drained("the state file can't be written"))
            return
        if not self._yields():
            return
        if not first:
            self._feed_all(events.StandBy())
            await self._wait_for_streams()
            self._lead.handed_over_at = time.monotonic()  # In case it leads again at once.
        self._feed(machine.Drained())

    def _yields(self) -> bool:
        """True if this gateway still yields."""
        return self._lead.state.stage is Stage.YIELDING

    async def _wait_for_answers(self, seconds: float) -> None:
        """Wait until no call and no Register is in flight, at most so many seconds."""
        deadline = time.monotonic() + seconds
        while (self._lead.answering or any_registers(self._resources.values())) and time.monotonic() < deadline:  # noqa: ASYNC110 - many things end these
            await asyncio.sleep(0.001)

    async def _write_promises(self) -> bool:
        for name in self._resources:
            self._holdings.note(name)
        return await self._scribe.durable()

    async def _wait_for_streams(self) -> None:
        deadline = time.monotonic() + STREAMS_END
        while time.monotonic() < deadline and any(one.plugin.streaming for one in self._resources.values()):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)

    # -- details ------------------------------------------------------------------------------------------------------

    async def _unable(self, *, replaces: bool) -> str:
        """Return why this gateway could not lead; empty if it could. If there is no leader to replace, it only needs to know its devices."""
        lists = self._lists
        if lists.inventory is None and not lists.unseen.none_before:
            return "its devices aren't known yet"
        if not replaces:
            return ""
        drivers = self.drivers
        not_ready = "" if drivers is None else drivers.now.not_ready
        hindered = lists.unseen.words or not_ready
        return hindered if hindered or self._settings.dra == "only" else await self._ability.unable()

    async def _open_and_try(self) -> None:
        await self._open_locks()
        self._try()

    async def _open_locks(self) -> None:
        """Open the lock of the state directory in a thread, because the disk may hang."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(asyncio.to_thread(self._locks.open))
        if not (await asyncio.wait({self._opening}, timeout=PATIENCE))[0]:
            self._locks.ready = True
            self._locks.unguarded = f"the disk of {self._settings.state_dir} doesn't answer within {PATIENCE:g} s"

    def _serves(self) -> bool:
        """Return True if the kubelet is served all resources that it accepts, or no kubelet runs."""
        if not self._presence.listens() or self._settings.dra == "only":
            return True
        return all(one.state.phase is Phase.SERVING or _is_out(one) for one in self._resources.values())

    def _register_first(self) -> bool:
        """Return True if the kubelet keeps a new registration when an older stream ends."""
        levels = [one.plugin.level for one in self._resources.values() if one.state.phase is Phase.SERVING]
        return bool(levels) and all(level is not None and level.reaches(REGISTER_FIRST) is True for level in levels)


def sender(message: Mapping[str, Any]) -> Age | None:
    """Return the age of the gateway that sent a message; None if it is not plausible."""
    match message.get("from"):
        case {"born_ns": int(born_ns), "token": str(token)} if TOKEN.fullmatch(token):
            age = Age(born_ns, token)
            return age if plausible(age, boot_ns()) else None
        case _:
            return None


def _is_out(one: Resource) -> bool:
    """Return True if a resource can't be served: its list is too large, or this kubelet refused it."""
    out = one.state.phase in {Phase.OUT, Phase.STOPPED} or (one.state.phase is Phase.WAITING and one.state.refused)
    return out and not one.plugin.streaming
