"""The shell: carries out what the state machines decide, and owns every socket, timer and task while it does.

It holds no rule of any kubelet version. For each resource name there is one ``plugin``; for the node one watch, one ledger,
one source.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from adapters.registry import by_name
from devices import boards
from devices.life import merging, states
from devices.model import Health
from devices.source import NOT_TOLD, GiveUpError, Hindrance, Listing, Partial, listed
from gateway.configuration import reload
from gateway.handover import instance, standby
from gateway.handover import talk as handover
from gateway.handover.age import Doubt, elder_should_wait
from gateway.handover.events import Outcome, Standing, standing
from gateway.handover.standby import Standby
from gateway.handover.talk import Handover
from gateway.kubelet import api as kubelet_api
from gateway.kubelet import beliefs
from gateway.kubelet.beliefs import Beliefs
from gateway.kubelet.drift import Earlier
from gateway.kubelet.owners import Owners
from gateway.kubelet.presence import Presence
from gateway.kubelet.watch import KUBELET_SOCKET, Watch, is_pinned, kubelet_id, listens
from gateway.memory import ledger
from gateway.memory.claimed import on_hardware
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.registration import events
from gateway.registration.events import Phase
from gateway.registration.negotiate import CHOICES
from gateway.registration.registrar import Plugin, warm_up
from gateway.registration.turns import Turns
from gateway.tally import Check, Tally
from gateway.telling import changes
from gateway.telling.commands import Commands
from gateway.telling.log import Seldom
from gateway.wires import notify
from gateway.wires.control import ControlError, Server, socket_path
from gateway.wires.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from adapters.dialect import Level
    from devices.boards import Claim
    from devices.model import Device
    from devices.source import DeviceSource, Inventory
    from gateway.configuration.settings import Settings
    from gateway.dra.door import Door
    from gateway.handover.age import Age
    from gateway.pair.role import Role
    from gateway.registration.events import KubeletId
    from gateway.wires import control
    from gateway.wires.http import Handler

FIRST_LOOK = 1.0
"""Seconds that the source's first inventory is waited for, before what the ledger knows is served from memory."""
YIELD_TIME = 0.05
"""Seconds that an older gateway is given to end its streams before this one registers."""
HANDED_OVER_WAIT = 0.002
"""Seconds between an elder's word that its streams have ended and our Register: for the same reason as
``registration.CUT_WAIT``, but that word was a millisecond on its way, and the books are looked at afterwards."""
LEASE_AGAIN = (0.005, 0.02, 0.1, 0.3, 0.6)
"""Seconds between looks at a younger gateway that ended our connection and still listens, until it is connected to again: one
that was killed is mostly gone at the first, one that lives was only tired of a connection without a call."""
SOURCE_RETRY = 5.0
PEERS_AGAIN = 0.5
"""Seconds between two looks whether another gateway still is there, while this one knows of no device."""
FOLDER_AGAIN, FOLDER_TOLD = 0.5, 60.0
"""Seconds between two looks for the socket directory while it can't be used, and between two words about that."""
PROBE_TIME = 1.0
"""Seconds within which a kubelet must say which API it speaks, before anything is taken from another gateway."""
PROBE_AGAIN = 15.0
"""Seconds until one that didn't say it is asked again, at most."""
PROBE_AFTER = 0.5
"""Seconds after a kubelet was found at which it is asked: the Registers go first."""
REBIND_FIRST, REBIND_MAX = 0.05, 5.0
"""Seconds until a new socket directory that can't be used is tried again, at first and at most."""
LOOK_AGAIN = 30.0
"""Seconds between two looks into the kubelet's books while a device waits for what they show."""
HOLDERS_AGAIN = 2.0
"""The same, where devices are withheld until their holder has ended."""
LOOK_FOR_METRICS = 60.0
BOOKED_WITHIN = 1.5
"""Seconds that a kubelet is given to write down what Allocate answered: its books of before that don't end a hand-out."""
FOUND_IS_TOLD = 0.05
"""Seconds after a kubelet was found at which that is logged: the Registers go first."""
LISTEN_RETRY = 5.0
"""Seconds before an address that is taken is tried again."""
LONGEST_TIMER = 3600.0
EXIT_PINNED = 75
"""Exit status (EX_TEMPFAIL) for: the socket directory was replaced under a mount that can't follow. A restart helps."""

_WAITING = frozenset({states.State.WITHDRAWN, states.State.LOST})
_loop_errors = Seldom(times=5)
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
        role: what it is in a pair; None: it is alone.
    """

    def __init__(self, settings: Settings, source: DeviceSource, role: Role | None = None) -> None:
        self.settings, self.source, self._role = settings, source, role
        born_ns = role.born_ns if role is not None else None
        age = instance.begin(host_service=settings.host_service, born_ns=born_ns)
        self._instance = instance.Instance(settings.socket_dir, age)
        self.ledger = Ledger(settings.state_dir)
        self.scribe = Scribe(self.ledger)
        self.tally = Tally()
        self.config = reload.Fate()
        self._features = None
        if settings.asks_api_server:
            from gateway.kubernetes.features import Features  # noqa: PLC0415 - who needs none needn't pay for it

            self._features = Features(settings)
        self.waits_for = ""
        """What the start waits for, and why; empty where it doesn't."""
        self.turns = Turns(settings.socket_dir / beliefs.CHECKPOINT)
        self._pool = Pool()
        self.beliefs = Beliefs(
            self.pod_resources, settings.socket_dir / beliefs.CHECKPOINT, self._looked, self._remember_forgotten
        )
        self.started = time.monotonic()
        self._boot_id = ledger.boot_id()
        self._control: Server | None = None
        self._handover = Handover(self._instance.age, settings.state_dir, self, self.tally.handover)
        self._resuming: set[str] = set()
        self._silent: set[Age] = set()
        """The other gateways that can't be talked to."""
        self._yielding: set[str] = set()
        """What another gateway is to serve as soon as no Register of ours is in flight for it."""
        self._plugins: dict[str, Plugin] = {}
        self.standby = Standby(self, settings.socket_dir / beliefs.CHECKPOINT)
        self.doubts: dict[str, dict[Age, Doubt]] = {}
        """The younger gateways, by resource, that can't talk and for which we stood by in vain."""
        self._speaks: tuple[KubeletId, str | None] | None = None
        """Which kubelet said that it speaks which of our dialects (None: none), where it was asked."""
        self._asked = False
        """Whether the gateways that were there first were asked for what we have."""
        self._inventory: Inventory | None = None
        self._kubelet: KubeletId | None = None
        self.presence = Presence(self.kubelet_socket)
        self.source_trouble = NOT_TOLD
        """Why the source doesn't tell of devices; empty where it does."""
        self._owners = Owners(self.ledger, self.beliefs, source, self.held, self._elsewhere)
        self._claims: Sequence[Claim] = ()
        """What of the hardware is taken under IDs that aren't offered here."""
        self._again: asyncio.TimerHandle | None = None
        self._rebinding: asyncio.Task[None] | None = None
        self._begun = False
        self._exit: asyncio.Future[int]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._update_lock = asyncio.Lock()
        self._leases: dict[Path, asyncio.Task[None]] = {}
        self._watch: Watch
        self.door: Door | None = None
        """Where devices are offered by DRA, instead of by plugins."""

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, 0)
        loop.set_exception_handler(_report_loop_error)
        if self._role is not None:
            self._role.attach()
        try:
            await self._start()
            return await self._exit
        except _EndedError as ended:
            return ended.status
        finally:
            await self._close()

    # Start and end.

    async def _start(self) -> None:
        await self._unless_ended(self.scribe.load(patient=True))
        self._recall(self.ledger.resources())
        self._open_probes()
        await self._wait_for_folder()
        self.beliefs.look_within(0)
        if removed := instance.sweep(self.settings.socket_dir):
            _log.info("removed what dead gateways left", folders=removed)
        self._instance.create()
        if self.settings.dra != "off":
            self._open_door()
        first = asyncio.Event()
        self._spawn("source", self._follow_source(first))
        label = None if self._features is None else self._features.label
        self._spawn("reload", reload.follow(self.settings, self.source.adopt, self.config, label))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK):
                await self._unless_ended(first.wait())
        if self._inventory is None:
            await self._update(None)
        await self._open_control()
        self._watch = Watch(
            self.settings.socket_dir,
            self.settings.socket_dir / instance.FOLDER,
            kubelet_up=self._kubelet_up,
            name_lost=self._name_lost,
            peers_changed=self.look,
            replaced=self._replaced,
            late=self.tally.late,
        )
        self._spawn("watch", self._watch.run())
        await self._unless_ended(self._know_devices(first))
        await self._unless_ended(self._be_able())
        elders = self._instance.peers() if self.door is None else {}
        await self._unless_ended(self._take_over(elders))
        self._instance.publish()
        if any(peer < self._instance.age and not self._handover.decides(peer, "") for peer in elders):
            await self._unless_ended(asyncio.sleep(YIELD_TIME))
        self._begun = True
        self._spawn("standby", self.standby.run())
        if self.door is not None:
            self._spawn("dra", self.door.run())
        self.look()
        # It was left to another gateway, which went before this one asked for it; or another serves what is offered here
        # under another name.
        if self._unremembered() or any(plugin.standing_by_for is not None for plugin in self.plugins):
            await self._unless_ended(self.update())
        self._tell_kubelet(self.plugins)
        notify.tell(notify.READY)
        if (seconds := notify.watchdog()) is not None:
            self._spawn("watchdog", notify.keep_alive(seconds))
        if self._features is not None:
            self._spawn("kubernetes", self._once_active(self._features.run(self)))
        gc.freeze()  # What is there now stays: a full collection of it takes 8 to 15 ms, in which nothing is answered.
        tell = partial(_log.info, "serving") if self.presence.since is not None else self.presence.wait
        tell(
            backend=self.source.name,
            api=self.settings.api,
            socket_dir=str(self.settings.socket_dir),
            resources={name: len(plugin.resource.devices) for name, plugin in self._plugins.items()},
        )

    def _open_door(self) -> None:
        from gateway.dra import door  # noqa: PLC0415 - its imports are paid only where DRA is wanted
        from gateway.kubernetes.access import AccessError  # noqa: PLC0415 - as above

        inside = door.Inside(
            self._instance.age, self.source, self.ledger, self.scribe, self.beliefs, self.held, lambda: self.plugins
        )
        try:
            self.door = door.Door(self.settings, inside)
        except AccessError as error:
            _log.error("giving up: --dra needs the API server", reason=str(error))
            raise _EndedError(1) from error

    async def _wait_for_folder(self) -> None:
        """Wait until the socket directory can be used, and say again and again why it can't."""
        folder, tell_at = self.settings.socket_dir, 0.0
        while reason := instance.make_folder(folder):
            self.waits_for = f"the socket directory: {reason}"
            if self._control is None:
                await self._listen_for_orders(Commands(self).handlers_while_waiting)
            if (now := time.monotonic()) >= tell_at:
                _log.warning("waiting for the socket directory", folder=str(folder), reason=reason)
                tell_at = now + FOLDER_TOLD
            await self._unless_ended(asyncio.sleep(FOLDER_AGAIN))
        self.waits_for = ""
        if self._control is not None:
            await self._control.close()
            self._control = None

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
        notify.tell(notify.STOPPING)
        if self.door is not None:
            await self.door.close()
        for plugin in self._plugins.values():
            plugin.feed(events.Stop())
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._again is not None:
            self._again.cancel()
        await asyncio.gather(*(plugin.close() for plugin in self._plugins.values()), self.beliefs.close())
        await self._handover.close()
        self.presence.close()
        if self._control is not None:
            await self._control.close()
        await self.scribe.close()
        self._instance.remove()
        _log.info("ended")

    def _spawn(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Run a task that must never end by itself: if it does, that is a defect, and the gateway ends with it."""
        task = asyncio.ensure_future(work)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                _log.error(
                    "ending because of a defect: a part ended that must not",
                    task=name,
                    exc_info=task.exception() or False,
                )
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
                        self.source_trouble = ""
                        await self._update(inventory)
                        if not isinstance(inventory, Partial):
                            first.set()
                self.source_trouble = "it ended, which it must not: it is asked again"
                _log.error("the device source ended, which it must not: asking it again", retry_s=SOURCE_RETRY)
            except GiveUpError as error:
                _log.error("giving up", reason=str(error), status=error.status)
                self._end(error.status)
                await asyncio.get_running_loop().create_future()
            except Exception as error:  # noqa: BLE001 - whatever a backend does, the devices stay
                self.source_trouble = f"it failed ({error!r}): its last word counts"
                _log.exception("the device source failed: its last inventory stays", retry_s=SOURCE_RETRY)
            await asyncio.sleep(SOURCE_RETRY)

    async def _update(self, inventory: Inventory | None) -> None:
        """Bring every list up to what the source says (None: not looked yet). New IDs are durable before they are sent.

        What only the ledger knows is left to another gateway, as long as one lives: it may have other devices than this one.
        """
        async with self._update_lock:
            self._inventory, claimed = inventory, self._claimed()
            clock = merging.Clock(time.monotonic(), time.time(), self.started)
            known = self.ledger.resources()
            if self._only_remembered() and self._peers():
                known = tuple(name for name in known if name in self._plugins)
            listings: dict[str, Listing | None] = dict.fromkeys(known)
            if inventory is not None:
                listings |= {name: listed(inventory, name) for name in (*known, *inventory)}
                if self.beliefs.last is None and self._has_unheard_of(inventory):
                    await self.beliefs.look()  # Somebody may hold them under other IDs.
            illnesses = {name: self.ledger.sticky(name) for name in listings}
            merged, given = self._merge(listings, clock), self._given()
            # What isn't sent isn't remembered: what counts is what the gateway that serves it remembers.
            sent = self._to_be_sent(merged)
            if any(merged[name].new for name in sent):
                for name in sent:
                    self.ledger.announce(name, tuple(entry.device for entry in merged[name].entries))
                await self.scribe.durable()
            before = frozenset(self._plugins)
            again = []
            for name in merged.keys() - before:
                plugin = Plugin(self, name, self.ledger.accepted)
                if self.door is not None:  # Its devices are offered by DRA alone.
                    self._plugins[name] = plugin
                    plugin.feed(events.StandBy("DRA"))
                    continue
                try:
                    await plugin.resource.bind(self.own_socket(name))
                except (OSError, RuntimeError) as error:  # No descriptor is left, or the folder went: the others go on.
                    _log.error("can't be bound", resource=name, reason=str(error), retry_s=SOURCE_RETRY)
                    again.append(time.monotonic() + SOURCE_RETRY)
                    del merged[name]
                    sent.remove(name)
                else:
                    self._plugins[name] = plugin
            if self._given() != given:  # Somebody got a device meanwhile, by the lists of before.
                merged = self._merge({name: listings[name] for name in merged}, clock)
            shown = {name: self._plugins[name].entries for name in merged}
            for name, one in merged.items():
                self._plugins[name].publish(listings[name], one.entries)
            if self.door is not None:
                self.door.update()
            try:
                await asyncio.sleep(0)  # The streams come first: to note thousands of devices takes milliseconds.
            finally:
                news = [self._remember(name, merged[name], illnesses[name]) for name in sent]
                if any(news):
                    self._background(self.scribe.durable())
                for name in sent:
                    changes.tell(name, shown[name], self._plugins[name].entries)
                for name in merged if self.door is None else ():
                    self.beliefs.listed(name, self._plugins[name].resource.devices)
            self._update_again([*again, *(one.again_at for one in merged.values() if one.again_at is not None)])
            self._look_for(claimed)
            if self._begun:
                if any(name not in before for name in self._plugins) and await self._handover.take_over(
                    self._peers() or ()
                ):
                    await asyncio.sleep(HANDED_OVER_WAIT)
                self._look_at_peers()
                self._tell_kubelet([plugin for plugin in self._plugins.values() if plugin.state.kubelet is None])

    def _merge(self, listings: Mapping[str, Listing | None], clock: merging.Clock) -> dict[str, merging.Merged]:
        """Put what is remembered together with what is there, resource by resource; hardware that is held is given once."""
        known = {name: self._known(name, listing) for name, listing in listings.items()}
        before = {name: self._plugins[name].entries if name in self._plugins else {} for name in listings}
        grace, merged = self.settings.startup_grace, {}
        if self._inventory is None:
            self._claims = list(self._prepared())
        else:
            remaining = {
                name: merging.remaining(known[name], listing, before[name], clock, grace)
                for name, listing in listings.items()
                if listing is not None
            }
            heeded = self._heeded(self._owners.claims(remaining, _offered(listings)), listings)
            self._claims = [*heeded, *self._prepared()]
        for name, listing in listings.items():
            held = known[name].held or frozenset()
            offered = known[name].announced.values() if listing is None else listing.devices
            one = replace(known[name], withheld=boards.withheld(self._claims, offered, held))
            merged[name] = merging.merge(one, listing, before[name], clock, grace)
        return merged

    def _prepared(self) -> Iterable[Claim]:
        """Claim what is prepared for ResourceClaims from before, when DRA was on; with it on, that is not offered otherwise."""
        return on_hardware(self.ledger.claims) if self.settings.dra == "off" else ()

    def _heeded(self, claims: Sequence[Claim], ours: Container[str]) -> Sequence[Claim]:
        """Leave out what younger gateways offer and we do, too: they leave it to us. What others offer outlives a kubelet's restart.

        A checkpoint still names what nobody serves any more: it counts as long as another gateway lives.
        """
        if not any(claim.offer for claim in (*claims, *self._claims)):
            return claims
        peers = self._peers()
        if peers and all(peer > self._instance.age for peer in peers):
            claims = boards.not_beside(self._given_out(), claims)
        last, since = self.beliefs.last, self.presence.since
        if peers == {} and (last is None or last.view.allocatable is None):
            claims = [claim for claim in claims if not claim.offer]
        if last is not None and since is not None and last.at - since >= beliefs.AFTER_START:
            return claims
        found = {(claim.resource, claim.device_id) for claim in claims}
        served = {plugin.resource.name for plugin in self.plugins if plugin.resource.streaming}
        kept = [
            claim
            for claim in self._claims
            if claim.offer
            and claim.resource not in served
            and (claim.resource not in ours or self._elsewhere(claim.resource))
            and (claim.resource, claim.device_id) not in found
        ]
        return [*claims, *kept]

    def _given_out(self) -> Iterator[Device]:
        """Give the devices that the kubelet may give to a pod because of our lists."""
        for plugin in self.plugins:
            if plugin.resource.streaming:
                yield from (device for device in plugin.resource.devices if device.health is Health.HEALTHY)

    def _known(self, name: str, listing: Listing | None) -> merging.Known:
        announced = self.ledger.announced(name)
        listed = {device.id for device in listing.devices} if listing is not None else announced.keys()
        return merging.Known(
            announced,
            boot_id=self._boot_id,
            cordons={device_id: cordon.reason for device_id, cordon in self.ledger.cordons.items()},
            sticky=self.ledger.sticky(name),
            held=self._owners.held(name),
            fates={device_id: self.source.fate(name, device_id) for device_id in announced.keys() - listed},
            lost_since=self.ledger.lost_since(name),
        )

    def _has_unheard_of(self, inventory: Inventory) -> bool:
        """Whether a source offers IDs that no kubelet was ever told of, as far as the ledger knows."""
        return any(ids - self.ledger.announced(name).keys() for name, ids in _offered(inventory).items())

    def _given(self) -> int:
        """Count the containers that were given devices."""
        return sum(plugin.resource.given for plugin in self.plugins)

    def _claimed(self) -> frozenset[tuple[str, str]]:
        return frozenset((claim.resource, claim.device_id) for claim in self._claims)

    def _look_for(self, known: frozenset[tuple[str, str]]) -> None:
        """Have the kubelet's books read while a claim waits for its end; at once where there are others than ``known``."""
        if self._claims:
            self.beliefs.look_within(HOLDERS_AGAIN if self._claimed() <= known else 0)

    def _remember(self, name: str, merged: merging.Merged, illnesses: Mapping[str, merging.Sticky]) -> bool:
        """Write into the ledger what follows from a list; True where that should be on disk at once, not only soon."""
        news = self.ledger.announce(name, tuple(entry.device for entry in merged.entries))
        self.ledger.withdraw(name, merged.dropped)  # Forgets their illnesses too, which outlive them.
        illnesses = {device_id: row for device_id, row in illnesses.items() if device_id not in merged.dropped}
        news = self.ledger.set_sticky(name, merged.sticky, since=illnesses) or news
        self.ledger.set_lost_since(name, merged.lost_since)
        self.scribe.soon()
        return news

    def _to_be_sent(self, names: Iterable[str]) -> list[str]:
        """Choose the resources that this gateway serves, or is about to: not those that it is to leave to another."""
        peers = {} if self._begun else self._peers() or {}
        if peers and not self._asked:
            return []
        return [
            name
            for name in names
            if not (name in self._plugins and self._plugins[name].standing_by_for)
            and self._handover.defers_to(name) is None
            and not (peers and self._younger(name, peers))
        ]

    def _update_again(self, moments: Sequence[float]) -> None:
        """Bring the lists up to date again at the first of these moments (monotonic seconds)."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if moments:
            delay = min(max(min(moments) - time.monotonic(), 0.01), LONGEST_TIMER)
            self._again = asyncio.get_running_loop().call_later(delay, self._refresh)

    def _unremembered(self) -> bool:
        """Whether something is about to be sent that the ledger doesn't know."""
        plugins = (self._plugins[name] for name in self._to_be_sent(self._plugins))
        return any(one.entries.keys() - self.ledger.announced(one.resource.name).keys() for one in plugins)

    def _only_remembered(self) -> Collection[str]:
        """Return the resources that the ledger knows and nobody here serves."""
        return set(self.ledger.resources()) - self._plugins.keys()

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Say what keeps the sources of devices from telling of them, or from offering some."""
        told = self.source.hindrances()
        if not self.source_trouble or (told and self.source_trouble == NOT_TOLD):
            return told
        return (Hindrance(self.source.name, self.source_trouble), *told)

    def left(self) -> list[str]:
        """Name the resources that are left to another gateway until their source has told of its devices."""
        inventory = self._inventory
        if not isinstance(inventory, Partial) or not self._peers():
            return []
        return sorted(filter(inventory.awaits, self._only_remembered()))

    async def update(self) -> None:
        """Bring every resource's list up to date, because something else than the source has news."""
        await self._update(self._inventory)

    async def _refresh_remembered(self) -> None:
        await self.scribe.load()
        await self.update()

    def _refresh(self) -> None:
        self._background(self.update())

    def accepted(self, dialect: str) -> None:
        """Remember, for the next start, which dialect the kubelet accepted."""
        if self.ledger.accept(dialect):
            self.scribe.soon()

    # What the kubelet's books say.

    def held(self, resource: str) -> frozenset[str] | None:
        """Return what containers hold by the kubelet's books and what they were given since; None where nobody knows."""
        holders = self.beliefs.holders(resource)
        if holders is None or self.beliefs.last is None or self._is_half_known(self.beliefs.last):
            return None
        if resource in self._plugins:
            self._plugins[resource].resource.note_handed_out()
        at = self.beliefs.last.unix - BOOKED_WITHIN
        since = (device_id for device_id, row in self.ledger.handed_out(resource).items() if row.at >= at)
        return frozenset((*holders, *since))

    def _is_half_known(self, look: beliefs.Look) -> bool:
        """Whether a kubelet that may not have heard of its pods yet was asked, and its checkpoint couldn't be read."""
        since = self.presence.since
        young = since is None or look.at - since < beliefs.AFTER_START
        return young and look.view.source == "pod-resources" and look.view.remembered is None

    def _looked(self, look: beliefs.Look) -> None:
        """The kubelet's books were read: what was handed out is known anew, and what waited for that goes on."""
        news, waiting = False, False
        for name, plugin in self._plugins.items():
            plugin.looked(look)
            holders = self.beliefs.holders(name)
            if holders is not None and plugin.state.phase is Phase.SERVING:
                named = (look.view.held or {}).get(name, {})
                who = {device_id: named.get(device_id, "") for device_id in holders}
                news = self.ledger.rebuild_handed_out(name, who, look.unix - BOOKED_WITHIN) or news
            waiting = (
                waiting
                or bool(self._claims)
                or any(
                    entry.state in _WAITING or (entry.beneath is not None and entry.beneath.state in _WAITING)
                    for entry in plugin.entries.values()
                )
            )
        served = all(one.state.phase is Phase.SERVING for one in self.plugins if one.standing_by_for is None)
        since = self.presence.since
        if served and look.view.held is not None and since is not None and look.at >= since:
            news = self.ledger.compared_with(self._kubelet_named()) or news
        if news:
            self.scribe.soon()
        if not waiting and self._inventory is not None:  # What was offered until now by books of before, or by none.
            waiting = bool(self._heeded(self._owners.of_others(_offered(self._inventory)), self._plugins))
        if self.door is not None:
            self.door.update()
        if waiting:
            if self._only_remembered():  # What another gateway remembers may be over, too.
                self._background(self._refresh_remembered())
            else:
                self._refresh()
            self.beliefs.look_within(HOLDERS_AGAIN if self._claims else LOOK_AGAIN)
        elif self.settings.metrics_address is not None:
            self.beliefs.look_within(LOOK_FOR_METRICS)

    def _kubelet_named(self) -> str:
        """Name the kubelet that runs so that another process knows it again; empty where there is none."""
        one = self._kubelet or kubelet_id(self.kubelet_socket)
        return f"{self._boot_id} {one.device}:{one.inode}:{one.mtime_ns}" if one is not None else ""

    def _remember_forgotten(self, resource: str, forgotten: Mapping[str, Sequence[Earlier]]) -> None:
        """Whom the kubelet forgot is to outlive this gateway; of what another one serves, that one remembers it."""
        plugin = self._plugins.get(resource)
        if (plugin is None or plugin.standing_by_for is None) and self.ledger.set_forgotten(resource, forgotten):
            self._background(self.scribe.durable())

    def _recall(self, resources: Iterable[str], *, fresh: bool = False) -> None:
        """Take over what the ledger remembers of resources' holders, which this gateway before its start, or another one, knew.

        ``fresh``: what this one knew of them is out of date.
        """
        known, current = self.ledger.kubelet, self._kubelet_named()
        boot, _, _ = known.partition(" ")
        changed = bool(known and current) and known != current and boot == self._boot_id
        for resource in resources:
            handed_out = self.ledger.handed_out(resource) if changed else {}
            before = {device_id: Earlier((row.holder,), row.at) for device_id, row in handed_out.items() if row.holder}
            self.beliefs.recall(resource, self.ledger.forgotten(resource), before, fresh=fresh)

    def memory(self, resource: str) -> _Memory:
        """Return what is known and remembered of a resource's devices, beyond its list."""
        return _Memory(self, resource)

    # Being asked.

    async def _open_control(self) -> None:
        commands = Commands(self)
        handing = {handover.OP: self._handover.serve} if self.door is None else {}
        await self._listen_for_orders({**commands.handlers, **handing})
        if self.settings.metrics_address is not None:
            from gateway.telling import metrics  # noqa: PLC0415 - its imports are paid only where metrics are wanted

            told = metrics.Metrics(commands.document, self.tally, device_ids=self.settings.metrics_device_ids)
            routes: dict[str, Handler] = {"/metrics": told.answer}
            if self.settings.gpu_metrics:
                from gateway.telling import gpumetrics  # noqa: PLC0415 - as above

                routes["/metrics"] = gpumetrics.added(self, told.answer)
            answer = self._answer("metrics", self.settings.metrics_address, routes)
            self._spawn("metrics", self._once_active(answer))

    async def _listen_for_orders(self, handlers: Mapping[str, control.Handler]) -> None:
        server = Server(socket_path(self.settings.state_dir, self.token), handlers)
        try:
            await server.start()
        except ControlError as error:
            _log.warning("gateway status, devices and cordon can't reach this gateway", reason=str(error))
        else:
            self._control = server

    def _open_probes(self) -> None:
        if self.settings.probe_address is not None:
            from gateway.telling import probes  # noqa: PLC0415 - as above

            answer = self._answer("probes", self.settings.probe_address, probes.routes(self))
            self._spawn("probes", self._once_active(answer))

    async def _once_active(self, work: Coroutine[object, object, None]) -> None:
        """Do what only one of a pair may: listen on a port, write at the API server."""
        try:
            if self._role is not None:
                await self._role.active()
        except asyncio.CancelledError:
            work.close()
            raise
        await work

    async def _answer(self, what: str, address: tuple[str, int], routes: Mapping[str, Handler]) -> None:
        """Answer those who ask over the network, for ever; an address that can't be had is tried again."""
        from gateway.wires import http  # noqa: PLC0415 - as above

        host, port = address
        server = http.Server(host, port, routes)
        taken = None
        try:
            while taken is None:
                try:
                    taken = await server.start()
                except OSError as error:
                    _log.error("can't listen", what=what, host=host, port=port, reason=str(error), retry_s=LISTEN_RETRY)
                    await asyncio.sleep(LISTEN_RETRY)
            _log.info("listening", what=what, host=taken[0], port=taken[1])
            await asyncio.get_running_loop().create_future()
        finally:
            await server.close()

    def _background(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What the watch sees.

    def _kubelet_up(self, kubelet: KubeletId) -> None:
        first = self._kubelet is None
        self._kubelet = kubelet
        self.presence.found(anew=True)
        self.standby.kubelet_up(kubelet.mtime_ns)
        self.doubts = {
            name: {age: Doubt(self._plugins[name].cuts, doubt.names) for age, doubt in doubts.items()}
            for name, doubts in self.doubts.items()
        }
        if self._handover.talks:
            asyncio.get_running_loop().call_later(PROBE_AFTER, lambda: self._background(self._probe()))
        if self._begun:
            self._approach(kubelet)
            self._tell_kubelet(self.plugins)
        self.beliefs.restarted(name for name, plugin in self._plugins.items() if plugin.standing_by_for is None)
        if first:
            self._recall(self.ledger.resources())
        tell = partial(_log.info, "kubelet found", socket=str(self.kubelet_socket))
        asyncio.get_running_loop().call_later(FOUND_IS_TOLD, tell)

    def _approach(self, kubelet: KubeletId) -> None:
        for plugin in self.plugins:
            plugin.approach(kubelet)

    def _tell_kubelet(self, plugins: Iterable[Plugin]) -> None:
        """Tell plugins of the kubelet that was found last."""
        if self._kubelet is not None:
            for plugin in plugins:
                plugin.feed(events.KubeletUp(self._kubelet))

    def _name_lost(self, name: str) -> None:
        if name.startswith(self.token):  # What the kubelet does to its own files is nothing to us.
            for plugin in self._plugins.values():
                plugin.feed(events.NameLost(name))
        elif name == KUBELET_SOCKET:
            self.presence.check()

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
        if self._rebinding is not None:
            self._rebinding.cancel()
        self._rebinding = asyncio.ensure_future(self._rebind())
        self._tasks.add(self._rebinding)
        self._rebinding.add_done_callback(self._tasks.discard)

    async def _rebind(self) -> None:
        """Bind every server once more, in the new folder. Streams of the kubelet before live on until the next one."""
        wait = REBIND_FIRST
        while not await self._bind_anew(told=wait > REBIND_FIRST):
            await asyncio.sleep(wait)
            wait = min(wait * 2, REBIND_MAX)
        self._watch.look_now()
        self._tell_kubelet([plugin for plugin in self._plugins.values() if plugin.state.phase is Phase.ABSENT])

    async def _bind_anew(self, *, told: bool) -> bool:
        async with self._update_lock:
            self._instance.remove()
            self._instance = instance.Instance(self.settings.socket_dir, self._instance.age)
            try:
                self._instance.create()
                for name, plugin in self._plugins.items() if self.door is None else ():
                    await plugin.resource.bind(self.own_socket(name))
                self._instance.publish()
            except (OSError, RuntimeError) as error:  # It went again, or there is no descriptor left for it.
                if not told:
                    _log.warning("the new socket directory can't be used yet", reason=str(error))
                return False
        return True

    # Other gateways on this node.

    def _peers(self) -> dict[Age, Path] | None:
        """Return the other living gateways; None where no descriptor is left to look for them.

        None of them is any business of one whose devices are offered by DRA.
        """
        if self.door is not None:
            return {}
        try:
            return self._instance.peers()
        except OSError as error:
            _log.warning("other gateways can't be looked for", reason=str(error))
            return None

    def _elsewhere(self, resource: str) -> bool:
        """Whether another gateway serves a resource."""
        plugin = self._plugins.get(resource)
        if plugin is not None and any(device.health is Health.HEALTHY for device in plugin.resource.devices):
            return plugin.standing_by_for is not None or self._handover.defers_to(resource) is not None
        return any(listens(folder / instance.socket_name(resource)) for folder in (self._peers() or {}).values())

    def _look_at_peers(self) -> None:
        """Stand by, resource by resource, for the gateway that serves it instead: by what was agreed, else by age."""
        peers = self._peers()
        if peers is None or self.door is not None:
            return
        self._yielding.clear()
        self._look_for_gone(peers)
        for name, plugin in self._plugins.items():
            other = self._handover.defers_to(name) or self._served_by(name, peers)
            if other is not None:
                if plugin.standing_by_for != other:
                    self.standby.began(name)
                    self.beliefs.look_within(0)  # It may offer, under this name too, what is offered here under others.
                plugin.standing_by_for = other
                plugin.feed(events.StandBy(other.token))
            elif plugin.state.phase is Phase.STANDBY and name not in self._resuming:
                self._resuming.add(name)
                self._background(self._resume(plugin))
        if any(peer < self._instance.age for peer in peers):
            self._background(self._ask_elders(peers))

    def _look_for_gone(self, peers: Collection[Age]) -> None:
        """Register once more where a gateway that couldn't talk has gone, and this kubelet doesn't tell whom it holds.

        Kubelets 1.12 to 1.22 leave our stream open when another gateway registers, and give out nothing when that one ends.
        """
        gone, self._silent = self._silent - set(peers), {age for age in peers if not self._handover.talks_to(age)}
        for plugin in self._plugins.values() if gone else ():
            if plugin.checked is Check.UNKNOWN and plugin.state.phase is Phase.SERVING:
                plugin.feed(events.Renew("another gateway ended, and this kubelet doesn't tell whom it holds"))

    def _served_by(self, resource: str, peers: Mapping[Age, Path]) -> Age | None:
        """Return the younger gateway, of those that can't be talked to, to which a resource must be left."""
        younger = self._younger(resource, peers)
        if younger is None:
            return None
        if self.standing(resource) is Standing.BUSY:  # A Register that is given up goes on in kubelets 1.25 to 1.34.
            self._yielding.add(resource)
            return None
        self._hold_lease(peers[younger] / instance.socket_name(resource))
        return younger

    def _younger(self, resource: str, peers: Mapping[Age, Path]) -> Age | None:
        """Return the younger gateway, of those that can't be talked to, that offers a resource."""
        offering = [
            age
            for age, folder in peers.items()
            if not self._handover.decides(age, resource) and listens(folder / instance.socket_name(resource))
        ]
        if resource in self.doubts and self.kubelet_listens():
            names, cuts = standby.names_in(self), self._plugins[resource].cuts
            self.doubts[resource] = {
                age: doubt
                for age, doubt in self.doubts[resource].items()
                if age in peers and not doubt.over(cuts, standby.names_of(age, names))
            }
        return elder_should_wait(self._instance.age, offering, self.doubts.get(resource, {}))

    def unserved(self, plugin: Plugin, other: Age) -> None:
        """Take a resource back that another gateway is to serve, and that the kubelet's records lack."""
        name = plugin.resource.name
        if self._handover.defers_to(name) is not None:
            self._handover.unserved(name)
            return
        doubt = Doubt(plugin.cuts, standby.names_of(other, standby.names_in(self)))
        self.doubts.setdefault(name, {})[other] = doubt
        self.tally.handover("elder", Outcome.BACK.value)
        _log.warning(
            "taking it back: the kubelet's records show no device of it",
            resource=name,
            peer=other.token,
            advice="a younger gateway has a socket for it and doesn't serve it: look at that one, or end it",
        )
        self.look()

    def talks(self, plugin: Plugin) -> bool:
        """Tell whether the gateway that a resource stands by for talks to us."""
        return self._handover.defers_to(plugin.resource.name) is not None

    async def _ask_elders(self, elders: Collection[Age]) -> None:
        await self._handover.take_over(elders)

    async def _know_devices(self, first: asyncio.Event) -> None:
        """Leave all to another gateway, as long as one is there, until the source has told of its devices once.

        Or an update to a release that finds no device would go on from node to node, by what each ledger remembers.
        """
        if self._inventory is None and self._peers():
            _log.warning("waiting for the devices: meanwhile another gateway serves", backend=self.source.name)
        while self._inventory is None and self._peers():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PEERS_AGAIN):
                    await first.wait()

    async def _be_able(self) -> None:
        """Leave all to another gateway, as long as one is there, until the kubelet would take any resource from this one."""
        told, wait = "", PEERS_AGAIN
        while self._peers() and (reason := await self._unable()):
            if reason != told:
                _log.warning("waiting: another gateway serves, and this one could not", reason=reason)
                for plugin in self.plugins:
                    plugin.trouble = f"another gateway serves, and this one could not: {reason}"
            told, seen, ends = reason, self._kubelet, time.monotonic() + wait
            while time.monotonic() < ends and self._kubelet == seen and self._peers():  # noqa: ASYNC110 - who goes tells nobody
                await asyncio.sleep(PEERS_AGAIN)
            wait = min(2 * wait, PROBE_AGAIN)
        if told:
            for plugin in self.plugins:
                plugin.trouble = ""

    async def _unable(self) -> str:
        """Say why no resource of this gateway could be served by the kubelet that runs; empty where one could, or none runs."""
        if not self.kubelet_listens():
            return ""
        if reason := await self._probe():
            return reason
        unfit = [self._unfit(plugin) for plugin in self.plugins]
        return "" if None in unfit else next((reason for reason in unfit if reason), "")

    async def _probe(self) -> str:
        """Ask the kubelet which API it speaks, once for each kubelet; return why that can't be known now."""
        kubelet = kubelet_id(self.kubelet_socket)
        if kubelet is None or (self._speaks is not None and self._speaks[0] == kubelet):
            return ""
        found = await kubelet_api.ask(self.kubelet_socket, PROBE_TIME)
        if not found.answered:
            return f"expected the kubelet to answer a Register within {PROBE_TIME:g} s: {found.says}"
        if found.api is not None:  # Of what it says else, nobody knows what it means: a Register will show.
            self._speaks = (kubelet, found.api if found.api in CHOICES[self.settings.api] else None)
        for name in self._plugins:
            self._handover.changed(name)
        return ""

    def _unfit(self, plugin: Plugin) -> str | None:
        """Say why a resource could not be served by the kubelet that runs; None where it could, as far as that is known."""
        if not plugin.entries:
            return "it has no devices"
        if self._speaks is None or self._speaks[0] != kubelet_id(self.kubelet_socket):
            return None
        api = self._speaks[1]
        if api is None:
            return f"this kubelet speaks none of the APIs that --api {self.settings.api} allows: use --api auto"
        return plugin.resource.too_large(by_name(api))

    async def _take_over(self, elders: Collection[Age]) -> None:
        """Ask older gateways for what they serve; what they remembered until then is remembered here, too."""
        self._asked = True
        if not elders:
            if self._peers():  # What they don't serve, this one does: it is remembered before it is sent.
                await self.update()
            return
        if self.kubelet_listens():
            await warm_up(self.kubelet_socket)
        asked = await self._handover.take_over(elders)
        if asked and self._kubelet is not None:
            self._approach(self._kubelet)
        await self.scribe.load()
        self._recall(self.ledger.resources(), fresh=True)
        await asyncio.gather(self.update(), asyncio.sleep(HANDED_OVER_WAIT if asked else 0))

    async def _resume(self, plugin: Plugin) -> None:
        """Serve a resource again that another gateway served, with what that one remembered of it."""
        try:
            plugin.standing_by_for = None
            await self.scribe.load()
            self._recall([plugin.resource.name], fresh=True)
            await self.update()
        except Exception:  # noqa: BLE001 - nobody else serves it, and the list of before is better than none
            _log.exception("the lists could not be brought up to date: serving the last one", retry_s=SOURCE_RETRY)
            self._update_again([time.monotonic() + SOURCE_RETRY])
        finally:
            self._resuming.discard(plugin.resource.name)
        if not plugin.standing_by_for:
            plugin.feed(events.Resume())

    async def _take_up(self) -> None:
        """Serve what only another gateway served, with what that one remembered of it and by what is held now."""
        await self.scribe.load()
        await self.beliefs.look()
        await self.update()

    # What the handover asks (a ``handover.Holder``).

    def resources(self) -> Collection[str]:
        """Return the resources of this gateway."""
        return self._plugins.keys()

    def standing(self, resource: str) -> Standing:
        """Return where the registration of a resource stands."""
        plugin = self._plugins[resource]
        stands = standing(plugin.state.phase, streams=plugin.resource.streaming, refused=plugin.state.refused)
        return Standing.OUT if stands is Standing.IDLE and self._unfit(plugin) else stands

    def level(self, resource: str) -> Level | None:
        """Return the kubelets that fit the evidence of a resource's stream; None without one."""
        plugin = self._plugins[resource]
        return plugin.resource.level if plugin.resource.streaming else None

    def kubelet_listens(self) -> bool:
        """Tell whether a kubelet takes connections now."""
        return listens(self.kubelet_socket)

    def renew(self, resource: str) -> None:
        """Register a resource once more: the kubelet may hold another gateway's Register."""
        self._plugins[resource].feed(events.Renew("another gateway registered at the same time"))

    def look(self) -> None:
        """Let each resource stand by or resume; what only others served is taken up when nobody is left to."""
        if self._begun and not self._exit.done():
            self._look_at_peers()
            if self._only_remembered() and self._peers() == {}:
                self._background(self._take_up())

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
            for seconds in LEASE_AGAIN:
                if not listens(path):
                    break
                await asyncio.sleep(seconds)

        def gone(_: asyncio.Task[None]) -> None:
            del self._leases[path]
            if not self._exit.done():
                self._look_at_peers()

        task = self._leases[path] = asyncio.ensure_future(until_gone())
        task.add_done_callback(gone)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # For the plugins.

    def stood(self, plugin: Plugin) -> None:
        """Take note that a plugin's registration may stand elsewhere now."""
        name = plugin.resource.name
        if plugin.state.phase is Phase.ABSENT:
            self.presence.check()
        elif plugin.state.phase in {Phase.ACCEPTED, Phase.SERVING}:
            self.presence.found(anew=False)
        self._pool.served(served=all(one.unserved_since is None for one in self.plugins))
        self._handover.changed(name)
        if plugin.state.phase is Phase.WAITING and self.doubts.get(name):
            self.look()
        if name in self._yielding and self.standing(name) is not Standing.BUSY:
            self.look()

    @property
    def begun(self) -> bool:
        """Whether it is done with its start."""
        return self._begun

    @property
    def plugins(self) -> Sequence[Plugin]:
        """The plugins of all resources."""
        return tuple(self._plugins.values())

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
    def age(self) -> Age:
        """This gateway's own age."""
        return self._instance.age

    @property
    def token(self) -> str:
        """This gateway's own token."""
        return self._instance.token


def _offered(listings: Mapping[str, Listing | None]) -> dict[str, frozenset[str]]:
    """Give the IDs that sources offer, by resource; of one that hasn't told yet there are none."""
    return {
        name: frozenset(device.id for device in listing.devices)
        for name, listing in listings.items()
        if listing is not None
    }


class _Asked:
    """A container that is made each time it is asked for something."""

    def __init__(self, make: Callable[[], Container[str]]) -> None:
        self._make = make

    def __contains__(self, device_id: object) -> bool:
        return device_id in self._make()


class _Memory:
    """What is known and remembered of one resource's devices, beyond its list (a ``serve.Memory``)."""

    def __init__(self, gateway: Gateway, resource: str) -> None:
        self._gateway, self._resource = gateway, resource
        # Looked up only when asked for: an Allocate of devices that are well needs neither.
        self.handed_out: Container[str] = _Asked(lambda: gateway.ledger.handed_out(resource))
        self.held: Container[str] = _Asked(lambda: gateway.held(resource) or ())

    def avoid(self) -> Sequence[str]:
        return self._gateway.beliefs.avoid(self._resource)

    def hand_out(self, given: Iterable[tuple[str, Sequence[str]]]) -> None:
        together: list[str] = []
        for dialect, device_ids in given:
            self._gateway.ledger.hand_out(self._resource, device_ids, dialect, time.time())
            together += device_ids
        self._gateway.scribe.soon()
        self._gateway.beliefs.allocated(self._resource, together)


def _report_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what nobody caught; it is a defect, but never a reason to take devices away.

    asyncio tells this a hundred times a second of a listener without descriptors, with a traceback each.
    """
    what = str(context.get("message"))
    if (left_out := _loop_errors.tell(what)) is not None:
        _log.error("unexpected", what=what, more_of_them_before=left_out, exc_info=context.get("exception") or False)
