"""The shell of ``machine``: takes the locks, talks with the other gateways, and serves or stands by as the machine decides."""

from __future__ import annotations

import asyncio
import faulthandler
import math
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import structlog

from devices.model import Fault, RefusedError
from gateway.age import TOKEN, Age, plausible
from gateway.kubelet.watch import kubelet_id
from gateway.leader import machine
from gateway.leader.ability import Ability
from gateway.leader.instance import FOLDER, boot_ns, socket_name
from gateway.leader.locks import Locks
from gateway.leader.machine import Stage
from gateway.memory.scribe import PATIENCE
from gateway.registration import events
from gateway.registration.events import Phase
from gateway.registration.registrar import warm_up
from gateway.wires import control, rpc
from gateway.wires.control import ControlConnection, ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from adapters.dialect import Dialect
    from devices.source import DeviceSource
    from gateway.configuration.settings import Settings
    from gateway.dra.renewed import RenewedDrivers
    from gateway.kubelet.identity import KubeletId
    from gateway.leader.instance import Instance
    from gateway.lists import Lists
    from gateway.memory.holdings import Holdings
    from gateway.registration.registrar import Resource
    from gateway.tasks import Tasks
    from gateway.wires.control import Handler

OP: Final = "lead"
ABLE_AGAIN: Final = 0.5
"""Seconds between two looks whether this gateway could lead."""
LIVES: Final = 5.0
"""Seconds between two signs of life of a leader's event loop, and between two looks at its locks."""
HANGS: Final = 15.0
"""Seconds without a sign of life after which this process ends itself, so that the kernel frees the locks."""
OFFERS: Final = 1.0
"""Seconds within which one that stands by has taken over from one that ends."""
STREAMS_END: Final = 0.05
"""Seconds that the kubelet has to see its streams end, before the locks are let go of."""
REGISTERS_END: Final = 12.0
"""Seconds within which a Register in flight is answered and called."""
CONNECT: Final = 0.5
"""Seconds within which a leader takes a connection."""
ALLOCATES_END: Final = 2.0
"""Seconds from a handover until the gateway before has answered its last Allocate, and the kubelet has noted that."""
REGISTER_FIRST: Final = 37
"""From kubelet 1.37 on, the end of an old stream leaves a newer registration alone (#135437)."""
UPDATE_AGAIN: Final = 5.0
"""Seconds until lists that could not be brought up to date are tried again."""
ORDER: Final = 30.0
"""Seconds within which the leader carries out an order that was passed on to it."""
SERVES: Final = 15.0
"""Seconds within which a gateway that took over must be served, as long as a Register may last."""
PASSES: Final = 10.0
"""Seconds for which a call waits for a gateway that leads."""
_UNASKED: Final = frozenset({Fault.UNAVAILABLE, Fault.CANCELLED, Fault.DEADLINE_EXCEEDED})
_FAULTS: Final = {rpc.Code(fault.value): fault for fault in Fault if fault not in _UNASKED}
"""What a gateway refuses with; anything else means that it could not be asked."""
_log = structlog.get_logger()


class Leader:
    """Who leads on this node, and this gateway's part in it.

    Args:
        settings: the gateway's.
        own: its place on the node.
        source: where devices come from.
        holdings: what containers hold.
        resources: its resources, by name.
        lists: gives its lists, which depend on who leads, too.
        drivers: gives its DRA drivers; None: it has none.
        ending: tells whether it is about to end.
        tasks: its tasks.
    """

    def __init__(
        self,
        settings: Settings,
        own: Instance,
        source: DeviceSource,
        holdings: Holdings,
        resources: Mapping[str, Resource],
        lists: Callable[[], Lists],
        drivers: Callable[[], RenewedDrivers | None],
        ending: Callable[[], bool],
        tasks: Tasks,
    ) -> None:
        self._settings, self._instance, self._holdings = settings, own, holdings
        self._source, self._resources, self._lists, self._drivers = source, resources, lists, drivers
        self._ending, self._tasks = ending, tasks
        self._presence, self._scribe, self._beliefs = holdings.presence, holdings.scribe, holdings.beliefs
        self.state = machine.start(own.age)
        self.begun = False
        """Whether this gateway is done with its start: it leads, or stands by and could lead."""
        self.settled = asyncio.Event()
        """Set with ``begun``."""
        self._locks = Locks(settings.socket_dir, settings.state_dir, own.token)
        self.writing = self._locks.writing
        self._ability = Ability(settings.api, self._presence, resources)
        self._warm = False
        """Whether this process has connected to a kubelet before: its first connection takes milliseconds more."""
        self._timer: asyncio.TimerHandle | None = None
        self._links: dict[str, ControlConnection] = {}
        """The conversations with the other gateways, by token."""
        self._ages: dict[str, Age] = {}
        """How old those are."""
        self._before = ""
        """The gateway that yielded to this one, until it is told that this one serves."""
        self._changed = asyncio.Event()
        """Set, and made anew, when the stage changes."""
        self._parts_lead = False
        """Whether the source and the DRA drivers decide."""
        self._turn = asyncio.Lock()
        """Held while that changes."""
        self._answering = 0
        """How many calls are being answered."""
        self._leaves = self._ended = False
        """Whether calls are still answered here, though this gateway yields; and whether none is any more."""
        self._handed_over_at = -math.inf
        """When the kubelet's streams ended last for another gateway to lead, at the latest (monotonic seconds)."""
        self._opening: asyncio.Future[None] | None = None
        """The thread that opens a lock: one at most, also on a disk that never answers."""
        self._beliefs.lists_after, self._beliefs.leads = self._others_allocate_for, lambda: self.leads

    # -- for the gateway ----------------------------------------------------------------------------------------------

    @property
    def age(self) -> Age:
        """This gateway's own age."""
        return self._instance.age

    @property
    def leads(self) -> bool:
        """Whether this gateway decides."""
        return self.state.stage in {Stage.TAKING, Stage.LEADING, Stage.YIELDING} and self._locks.held

    @property
    def led_by(self) -> Age | None:
        """The gateway that leads, unless that is this one, or nobody is known to."""
        return None if self.leads else self.state.leader

    @property
    def passes_to(self) -> str:
        """The token of the gateway that gets a call in this one's place: it leads, or is about to; '' where that is this one, or nobody."""
        return "" if self.leads else self._leader_token()

    @property
    def _answers(self) -> bool:
        """Whether calls are answered here."""
        return self.leads and (self.state.stage is Stage.LEADING or self._leaves) and not self._ended

    @property
    def could(self) -> bool:
        """Whether it stands by, and would lead as soon as the leader ends."""
        return self.state.stage is Stage.STANDBY

    @property
    def waits_for(self) -> str:
        """What the start waits for, and why; empty where it doesn't."""
        if self.begun or self.leads:
            return ""
        other = self.state.leader
        who = f"the gateway {other.token}, which leads" if other else "the locks that a leader holds"
        return f"{who}: {why}" if (why := self.state.refused or self.state.unable) else who

    async def run(self) -> None:
        """Look, for ever, whether this gateway could lead, and whether its locks are where others look for them."""
        self.state = machine.start(self.age)  # By now it is known how old its pod is.
        while True:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            if self.leads and not self._look_at_locks():
                await self._guard()
                self._judge()
            else:
                await self._follow()
                self._feed(machine.Able(reason := await self._unable(beside=self.state.leader is not None)))
                if not reason and not self._warm and self._presence.listens():
                    self._warm = True
                    await warm_up(self._presence.socket)
            with suppress(TimeoutError):
                async with asyncio.timeout(LIVES if self.leads else ABLE_AGAIN):
                    await self._changed.wait()

    def _judge(self) -> None:
        """End, if this gateway took over from another one and the kubelet calls nothing of it: that one leads again."""
        waited = time.monotonic() - self._handed_over_at
        is_to_serve = self.state.stage is Stage.LEADING and self._before in self._links
        if is_to_serve and waited >= SERVES and not self._serves():
            why = [f"{one.name}: {one.state.phase.value}" for one in self._resources.values()]
            _log.error("ending: this gateway took over, and isn't served", waited_s=round(waited, 1), resources=why)
            self._tasks.end(1)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Who meets which order of another gateway over the control socket."""
        return {OP: self.met}

    async def end(self) -> None:
        """Write what was promised and let another gateway lead, before this one ends."""
        if self._links:
            self._feed(machine.Ending())
            with suppress(TimeoutError):
                async with asyncio.timeout(OFFERS):
                    while self.state.stage in {Stage.LEADING, Stage.YIELDING, Stage.YIELDED}:
                        await self._changed.wait()
        for resource in self._resources.values():
            resource.feed(events.Stop())
        self._ended = True
        if (drivers := self._drivers()) is not None:
            await drivers.close()
        if self.leads:
            await self._answered(OFFERS)
            await self._source.rest()
            await self._promised()
            await self._streams_end()
        self.free()

    async def _follow(self) -> None:
        """Know what the leader wrote: orders, and what it gave."""
        if self.state.leader is not None and not self._holdings.ledger.current:
            await self._scribe.load()
            self._holdings.recall(fresh=True)
            await self._lists().update()

    async def _guard(self) -> None:
        """Lock the state directory, once it can be: another gateway may have it by now, and then that one leads."""
        if not self._locks.whole:
            await self._open_locks()
            try:
                reason = "" if self._locks.take() else "another gateway has the lock of the state directory"
            except OSError as error:
                reason = str(error)
            if reason:
                self._feed(machine.Lost(reason))

    def free(self) -> None:
        """Let another gateway lead."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
        self._locks.close(last=not self._links)
        for link in [*self._links.values()]:
            link.close()

    async def met(self, connection: ControlConnection, request: Mapping[str, Any]) -> None:
        """Talk with another gateway, as long as it lives: the control server's handler of ``OP``.

        Raises:
            ControlError: it doesn't say who it is.
        """
        age = sender(request)
        if age is None:
            raise ControlError(f"not the age of a gateway: {control.shown(request.get('from'))}")
        await connection.send({"leads": self.leads, "from": self._own()})
        await self._talk(age, connection)

    def passing(self, call: str, resource: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Answer a kubelet's calls while this gateway leads; else pass them on to the one that does."""

        async def passed(dialect: Dialect, request: bytes, context: rpc.Call) -> bytes:
            ends = time.monotonic() + PASSES
            while time.monotonic() < ends:
                if self._answers and not self._look_at_locks():
                    with self._one_more():
                        wire: bytes = await answer(dialect, request, context)
                        return wire
                if (other := self._leader_token()) and self.state.stage is not Stage.YIELDING:
                    path = self._settings.socket_dir / FOLDER / other / socket_name(resource)
                    try:
                        async with rpc.Channel(path) as channel:
                            return await channel.call(f"/{dialect.plugin_service}/{call}", request, seconds=PASSES)
                    except rpc.CallError as error:
                        if error.code in _FAULTS:
                            raise RefusedError(_FAULTS[error.code], error.details) from None
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self._changed.wait()
            raise RefusedError(
                Fault.UNAVAILABLE,
                f"no gateway led on this node within {PASSES:g} s. Ask again",
            )

        return passed

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        """Count a call, or an order, while it is being answered."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    def forwarding(self, handler: Handler) -> Handler:
        """Meet an order while this gateway leads; else pass it on to the one that does."""

        async def met(connection: ControlConnection, request: dict[str, Any]) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PASSES):
                    while not self._answers and self.led_by is None:
                        await self._changed.wait()
            if self._answers:
                with self._one_more():
                    return await handler(connection, request)
            if (leader := self.led_by) is None:
                raise ControlError(f"no gateway leads on this node within {PASSES:g} s: give the order again")
            path = control.socket_path(self._settings.state_dir, leader.token)
            answer = await control.ask(path, request, ORDER)
            await self._follow()
            return await connection.send(answer)

        return met

    # -- for the lists ------------------------------------------------------------------------------------------------

    @property
    def registering(self) -> bool:
        """Whether a Register is about to be sent, or not answered by a call yet: what takes seconds waits until it is."""
        return self.state.stage is Stage.TAKING or self._is_busy()

    # -- what happens -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Let each resource stand by, also one that is new, unless this gateway leads or its streams go on until the next one serves."""
        if not self.leads and self.state.stage is not Stage.YIELDED and self._settings.dra != "only":
            for resource in self._resources.values():
                resource.feed(events.StandBy())

    def approach(self, kubelet: KubeletId) -> None:
        """Begin to connect to a kubelet that is there, if this gateway leads."""
        for resource in self._resources.values() if self.leads and self._settings.dra != "only" else ():
            resource.approach(kubelet)

    def stood(self, resource: Resource) -> None:  # noqa: ARG002 - it is asked of all
        """Take note that a resource's registration may stand elsewhere now."""
        self._report()

    def _report(self) -> None:
        """Tell the gateway that yielded as soon as this one serves."""
        if self._before and self.state.stage is Stage.LEADING and self._serves():
            self._tell(self._before, {"serving": True})
            self._before = ""

    def register_at(self) -> float:
        """Say when a Register may be sent (monotonic seconds): never without the locks."""
        return math.inf if self._look_at_locks() or not self.leads else 0.0

    # -- the machine --------------------------------------------------------------------------------------------------

    def _feed(self, event: machine.Event) -> None:
        before = self.state.stage
        self.state, actions = machine.step(self.state, event)
        if self.state.stage is not before:
            _log.info("leader", stage=self.state.stage.value, why=type(event).__name__)
            self._changed.set()
            self._changed = asyncio.Event()
        stands_by = self.state.stage is Stage.STANDBY and self.state.leader is not None
        if not self.begun and (stands_by or self.state.stage is Stage.LEADING):
            self.begun = True
            self.settled.set()
        if self.state.leader is not None and self.state.stage in {Stage.PREPARING, Stage.STANDBY, Stage.ASKING}:
            self.look()
        for action in actions:
            self._act(action)

    def _act(self, action: machine.Action) -> None:
        match action:
            case machine.Try():
                self._try()
            case machine.Ask():
                self._tell(self._leader_token(), {"ask": True})
            case machine.Withdraw():
                self._tell(self._leader_token(), {"ask": False})
            case machine.Take():
                self._tasks.background(self._take())
            case machine.Lead():
                self._lead()
            case machine.Invite():
                for token in self._links:
                    self._tell(token, {"offer": True})
            case machine.Drain():
                self._tasks.background(self._drain())
            case machine.Reply(to, reason, seconds):
                self._tell(to.token, {"no": reason, "again_s": seconds} if reason else {"yours": True})
            case machine.Free():
                self._locks.free()
            case machine.Rest(by):
                for resource in self._resources.values():
                    resource.feed(events.StandBy())
                self._tasks.background(self._rest_parts())  # The locks may be lost.
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
        self._feed(machine.Rung(time.monotonic()))

    def _try(self) -> None:
        if self._ending():
            return
        if not self._locks.ready:
            self._tasks.background(self._open_and_try())
            return
        if self._locks.unguarded and self._settings.dra != "off":
            self._locks.ready = False  # Nothing could be given: what DRA has must be on disk.
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
        elif self.state.hurry and self._locks.holder().token in {"", self.state.left}:
            self._feed(machine.HeldElsewhere(leaving=True))
        else:
            self._tasks.background(self._meet())

    async def _meet(self) -> None:
        """Connect to the gateway that holds the locks, and stay connected."""
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
            await link.send({"op": OP, "from": self._own()})
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
        unable = await self._unable(beside=True)
        self._links[age.token], self._ages[age.token] = link, age  # What follows may be said at once.
        self._tasks.background(self._talk(age, link))
        self._feed(machine.HeldElsewhere(age, unable=unable))

    async def _talk(self, age: Age, link: ControlConnection) -> None:
        """Hear what another gateway says, until one of both ends."""
        self._links[age.token], self._ages[age.token] = link, age
        try:
            while (said := await link.receive()) is not None:
                match said:
                    case {"ask": True}:
                        self._feed(machine.RoomWanted(age, time.monotonic()))
                    case {"yours": True}:
                        self._before = age.token
                        self._feed(machine.Yours())
                    case {"no": str(reason), "again_s": int() | float() as seconds}:
                        self._feed(machine.No(reason, float(seconds)))
                    case {"offer": True}:
                        self._feed(machine.Invited())
                    case {"serving": True}:
                        self._feed(machine.Serving())
                    case {"leads": False} | {"ask": False}:
                        self._feed(machine.Gone(age.token))
                    case _:  # A word of a later release.
                        pass
        finally:
            if self._links.get(age.token) is link:
                del self._links[age.token], self._ages[age.token]
            link.abort()
            self._feed(machine.Gone(age.token))

    def _own(self) -> dict[str, Any]:
        return {"born_ns": self.age.born_ns, "token": self.age.token}

    def _tell(self, token: str, message: Mapping[str, Any]) -> None:
        if (link := self._links.get(token)) is not None:
            self._tasks.background(self._send(link, message))

    async def _send(self, link: ControlConnection, message: Mapping[str, Any]) -> None:
        with suppress(ControlError):
            await link.send(message)

    # -- serving ------------------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        """Go on from what the gateway before left."""
        self._handed_over_at = time.monotonic()
        if self._presence.kubelet is not None:
            self.approach(self._presence.kubelet)
        await self._scribe.load(patient=True)
        news, lists = self._holdings.recall(fresh=True), self._lists()
        try:
            news |= await self._lead_parts() or lists.only_remembered or lists.unremembered()
            ready = not news and lists.based_on == self._holdings.ledger.beside_lists()
            await (lists.announce() if ready else lists.update())
        except Exception:  # noqa: BLE001 - nobody else serves, and the lists of before are better than none
            _log.exception("the lists could not be brought up to date: serving the last ones", retry_s=UPDATE_AGAIN)
            lists.update_again([time.monotonic() + UPDATE_AGAIN])
        self._feed(machine.Took())

    async def _lead_parts(self) -> bool:
        """Let the source and the DRA drivers decide; tell whether lists may be other ones because of that."""
        async with self._turn:
            drivers = self._drivers()
            if not self._parts_lead:
                self._parts_lead = True
                await self._source.lead()
                if drivers is not None:
                    drivers.now.decide()
            return drivers is not None

    async def _rest_parts(self) -> None:
        """Let them decide no more."""
        async with self._turn:
            if self._parts_lead:
                self._parts_lead = False
                if (drivers := self._drivers()) is not None:
                    await (drivers.close() if self.state.ending else drivers.rest())
                await self._source.rest()

    def _lead(self) -> None:
        """Register, or go on."""
        self._tasks.background(self._lead_parts())  # It may have been about to yield.
        self._report()
        if self._settings.dra == "only":
            return
        waited = time.monotonic() - self._handed_over_at
        for resource in self._resources.values():
            resource.feed(events.Resume(waited))
            if self._presence.kubelet is not None and resource.state.kubelet is None:
                resource.feed(events.KubeletUp(self._presence.kubelet))
        self._beliefs.look_within(ALLOCATES_END)
        if self._holdings.ledger.pending:  # What it saw while it stood by.
            self._scribe.soon()

    async def _drain(self) -> None:
        """Send nothing new, write what was promised, and end the streams of a kubelet that takes no Register while one lives."""
        if (drivers := self._drivers()) is not None and not self.state.ending:
            self._leaves = True
            await drivers.leave()
            self._leaves = False
        await self._answered(REGISTERS_END)
        if not self._yields():
            return
        if self._answering:
            self._feed(machine.Drained("a call isn't answered yet"))
            return
        first = self._register_first()
        await self._rest_parts()
        if not await self._promised():
            self._feed(machine.Drained("the state file can't be written"))
            return
        if not self._yields():
            return
        if not first:
            for resource in self._resources.values():
                resource.feed(events.StandBy())
            await self._streams_end()
            self._handed_over_at = time.monotonic()  # Should it lead again at once.
        self._feed(machine.Drained())

    def _yields(self) -> bool:
        """Whether this gateway is still to yield."""
        return self.state.stage is Stage.YIELDING

    async def _answered(self, seconds: float) -> None:
        """Wait, so long at most, until no call is being answered, and no Register either."""
        deadline = time.monotonic() + seconds
        while (self._answering or self._is_busy()) and time.monotonic() < deadline:  # noqa: ASYNC110 - many things end these
            await asyncio.sleep(0.001)

    async def _promised(self) -> bool:
        for name in self._resources:
            self._holdings.note(name)
        return await self._scribe.durable()

    async def _streams_end(self) -> None:
        deadline = time.monotonic() + STREAMS_END
        while time.monotonic() < deadline and any(one.plugin.streaming for one in self._resources.values()):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)

    # -- details ------------------------------------------------------------------------------------------------------

    async def _unable(self, *, beside: bool) -> str:
        """Say why this gateway could not lead; empty where it could. If none is there ``beside`` it, whatever it can do is better."""
        lists = self._lists()
        if lists.inventory is None and not lists.unseen.none_before:
            return "its devices aren't known yet"
        if not beside:
            return ""
        drivers = self._drivers()
        not_ready = "" if drivers is None else drivers.now.not_ready
        hindered = lists.unseen.words or not_ready
        return hindered if hindered or self._settings.dra == "only" else await self._ability.unable()

    async def _open_and_try(self) -> None:
        await self._open_locks()
        self._try()

    async def _open_locks(self) -> None:
        """Open what is locked later, in a thread: a disk that doesn't answer holds nobody up."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(asyncio.to_thread(self._locks.open))
        if not (await asyncio.wait({self._opening}, timeout=PATIENCE))[0]:
            self._locks.ready = True
            self._locks.unguarded = f"the disk of {self._settings.state_dir} doesn't answer within {PATIENCE:g} s"

    def _look_at_locks(self) -> str:
        """Say why the locks guard nothing any more; this gateway leads no longer, then."""
        if reason := self._locks.lost():
            _log.error("not leading any more: a lock was replaced", reason=reason)
            self._feed(machine.Lost(reason))
        return reason

    def _leader_token(self) -> str:
        one = self.state.leader or self.state.other
        return "" if one is None else one.token

    def _is_busy(self) -> bool:
        """Whether a Register is in flight, or was accepted and the kubelet hasn't called yet."""
        return any(one.state.phase in {Phase.OFFERING, Phase.ACCEPTED} for one in self._resources.values())

    def _serves(self) -> bool:
        """Whether every resource is served that can be, or no kubelet is there to serve."""
        if not self._presence.listens() or self._settings.dra == "only":
            return True
        return all(one.state.phase is Phase.SERVING or _is_out(one) for one in self._resources.values())

    def _register_first(self) -> bool:
        """Whether the kubelet is one that takes a Register while an earlier stream lives."""
        levels = [one.plugin.level for one in self._resources.values() if one.state.phase is Phase.SERVING]
        return bool(levels) and all(level is not None and level.reaches(REGISTER_FIRST) is True for level in levels)

    def _others_allocate_for(self) -> float:
        """Return for how many seconds another gateway may be answering an Allocate, of which this one doesn't know (infinite: it leads)."""
        if self._settings.dra == "only":  # No gateway answers any.
            return 0.0
        if kubelet_id(self._presence.socket) != self._presence.kubelet or not self.leads:
            return math.inf
        return max(self._handed_over_at + ALLOCATES_END - time.monotonic(), 0.0)


def sender(message: Mapping[str, Any]) -> Age | None:
    """Read who is speaking; None: nobody who can be."""
    match message.get("from"):
        case {"born_ns": int(born_ns), "token": str(token)} if TOKEN.fullmatch(token):
            age = Age(born_ns, token)
            return age if plausible(age, boot_ns()) else None
        case _:
            return None


def _is_out(one: Resource) -> bool:
    """Whether a resource can't be served: its list doesn't fit, or this kubelet refused it."""
    out = one.state.phase in {Phase.OUT, Phase.STOPPED} or (one.state.phase is Phase.WAITING and one.state.refused)
    return out and not one.plugin.streaming
