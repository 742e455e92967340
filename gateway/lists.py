"""The device lists of all resources. They are merged from the source's inventory and the state file, and on disk before they are sent.

``devices.life`` and ``devices.boards`` decide what is offered. This module calls them, remembers the result and sends it.
"""

from __future__ import annotations

import asyncio
import time
from itertools import chain
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from devices import boards
from devices.life import merging, states
from devices.source import Absence, Listing, listed
from gateway.kubelet import reader
from gateway.kubelet.records import Outdated
from gateway.memory import claimed
from gateway.registration import events
from gateway.registration.devicelist import AT_ONCE
from gateway.registration.registrar import Resource, any_registers
from gateway.telling import changes
from gateway.unseen import Unseen, absences

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from devices.boards import Hold
    from devices.model import Device
    from devices.source import DeviceSource, Inventory
    from gateway.configuration.settings import Settings
    from gateway.dra.drivers import RenewedDrivers
    from gateway.leader.leadership import Leadership
    from gateway.memory.holdings import Holdings
    from gateway.memory.ledger import Ledger
    from gateway.registration.serve import Node
    from gateway.tasks import Tasks

    Asked = Mapping[str, tuple[merging.Known, Listing | None, Mapping[str, states.Entry], merging.Clock, float]]

BIND_AGAIN = 5.0
"""Seconds until a resource whose socket can't be bound is tried again."""
LOOK_AGAIN = 30.0
"""Seconds between two reads of the kubelet's records while a device waits for their result."""
HOLDERS_AGAIN = 2.0
"""The same, while devices are withheld until their holder has ended."""
LOOK_FOR_METRICS = 60.0
HANDED_OVER_LOOK = 0.3
"""Seconds after a handover until the lists are updated: Register and the kubelet's call go first."""
PART = 5.0
"""After an update, the next read waits this many times as long as the update took, so that most of the time is left for calls."""
LONGEST_TIMER = 3600.0
_WAITING = frozenset({states.State.WITHDRAWN, states.State.LOST})
_log = structlog.get_logger()


class Lists:
    """Keeps the device list of each resource.

    Args:
        settings: the gateway's settings.
        source: the source of devices.
        holdings: what containers hold.
        lead: who leads.
        resources: new resources are added to it.
        node: what a new resource needs.
        tasks: the gateway's tasks.
        started: when the gateway started (monotonic seconds).
    """

    def __init__(
        self,
        settings: Settings,
        source: DeviceSource,
        holdings: Holdings,
        lead: Leadership,
        resources: dict[str, Resource],
        node: Node,
        tasks: Tasks,
        started: float,
    ) -> None:
        self._settings, self._source, self._lead, self._node = settings, source, lead, node
        self._ledger, self._scribe = holdings.ledger, holdings.scribe
        self._reader, self._presence, self._holdings = holdings.reader, holdings.presence, holdings
        self._resources, self._tasks, self._started = resources, tasks, started
        self.drivers: RenewedDrivers | None = None
        """The DRA drivers, if DRA is on. They offer the devices that these lists leave to them."""
        self._holds: Sequence[Hold] = ()
        """The holds on hardware under IDs that aren't offered here."""
        self.inventory: Inventory | None = None
        """What the source reported last."""
        self.unseen = Unseen(holdings.ledger, source)
        self.based_on = b""
        """What the state file had, except lists, when the lists were merged last. That merge took ``_took`` seconds."""
        self._took = 0.0
        self.lock = asyncio.Lock()
        """Held while the lists, or the sockets behind them, change."""
        self._outdated = Outdated()
        self._again: asyncio.TimerHandle | None = None

    async def update(self) -> None:
        """Update all lists, because something other than the source's inventory has changed."""
        async with self.lock:
            await self._take(self.inventory)

    async def take(self, inventory: Inventory | None) -> None:
        """Update all lists with an inventory (None: the source has not reported yet). New IDs are on disk before they are sent."""
        async with self.lock:
            await self._take(inventory)

    async def _take(self, inventory: Inventory | None) -> None:
        self.inventory, known_holds = inventory, self._held_ids()
        clock = merging.Clock(began := time.monotonic(), time.time(), self._started)
        self.unseen.look(inventory)
        self.based_on = self._ledger.list_inputs()
        # The leader may have withdrawn what this gateway listed while it stood by.
        served = (name for name, one in self._resources.items() if one.entries)
        known = tuple(dict.fromkeys((*self._ledger.resources(), *served)))
        listings: dict[str, Listing | None] = dict.fromkeys(known)
        if inventory is not None:
            listings |= _told(inventory, (*known, *inventory), self._ledger, self._source)
            if self._reader.last is None and self._has_unheard_of(inventory):
                await self._reader.look()  # A container may hold them under other IDs.
        illnesses = {name: self._ledger.sticky(name) for name in listings}
        given, asked = self._given(), self._asked(listings, clock)
        merged = await _merged_apart(asked)
        # Don't record lists that we don't send: the leader's record is authoritative.
        sent = list(merged) if self._lead.leads else []
        if any(merged[name].new for name in sent):
            for name in sent:
                await self._announce(name, [entry.device for entry in merged[name].entries])
                if name not in self.unseen.names:  # A known ID inherits no trouble from an earlier ID.
                    self._ledger.set_sticky(name, merged[name].sticky, since=illnesses[name])
            await self._scribe.durable()
        before, again = frozenset(self._resources), list[float]()
        for name in merged.keys() - before:
            resource = Resource(self._node, name, self._ledger.accepted)
            if self._settings.dra == "only":  # Only DRA offers its devices.
                self._resources[name] = resource
                resource.feed(events.StandBy())
                continue
            try:
                await resource.bind()
            except (OSError, RuntimeError) as error:
                # No file descriptor is left, or the folder was removed. The other resources go on.
                _log.error("can't be bound", resource=name, reason=str(error), retry_s=BIND_AGAIN)
                again.append(time.monotonic() + BIND_AGAIN)
                del merged[name]
            else:
                self._resources[name] = resource
        sent = [name for name in sent if name in merged]
        if self._given() != given:  # A container got a device meanwhile.
            merged = _merged(self._asked({name: listings[name] for name in merged}, clock))
        shown = {name: self._resources[name].entries for name in merged}
        for name, one in merged.items():
            self._resources[name].publish(listings[name], one.entries)
        self._changed()
        try:
            await asyncio.sleep(0)  # Send first: to note thousands of devices takes milliseconds.
        finally:
            news = [remember(self._ledger, self.unseen, name, merged[name], illnesses[name]) for name in sent]
            if news:
                self._scribe.soon()
            if any(news):
                self._tasks.background(self._scribe.durable())
        await asyncio.sleep(0)
        for name in sent:
            changes.tell(name, shown[name], self._resources[name].entries)
        await asyncio.sleep(0)
        for name in merged if self._settings.dra != "only" else ():
            self._reader.listed(name, self._resources[name].plugin.devices)
        self._took = time.monotonic() - began
        self.update_again([*again, *(one.again_at for one in merged.values() if one.again_at is not None)])
        self._look_for(known_holds)
        self._serve_new(before)

    def _serve_new(self, before: Container[str]) -> None:
        """Register new resources, or let them stand by. Until the gateway has started, the start does that."""
        if not self._lead.begun:
            return
        for name, resource in self._resources.items():
            if name not in before and self._lead.stands_by:
                resource.feed(events.StandBy())
            if resource.state.kubelet is None and self._presence.kubelet is not None:
                resource.feed(events.KubeletUp(self._presence.kubelet))

    def _changed(self) -> None:
        """Let the DRA drivers read the lists and holders again."""
        if self.drivers is not None:
            self.drivers.now.update()

    @property
    def registering(self) -> bool:
        """True if a Register is in flight or awaits the kubelet's call. Slow work waits for its end."""
        return self._lead.takes_over or any_registers(self._resources.values())

    def _asked(self, listings: Mapping[str, Listing | None], clock: merging.Clock) -> Asked:
        """Return the input of the merge, by resource: what is remembered, what the source lists, and what others hold."""
        known = {name: self._known(name, listing) for name, listing in listings.items()}
        before = {name: self._resources[name].entries if name in self._resources else {} for name in listings}
        grace, asked, on_offer = self._settings.startup_grace, {}, _offered(listings, self._ledger)
        if self.inventory is None:
            self._holds = list(self._prepared())
        else:
            remaining = {
                name: merging.remaining(known[name], listing, before[name], clock, grace)
                for name, listing in listings.items()
                if listing is not None
            }
            self._holds = [*self._heeded(self._holdings.holds(remaining, on_offer), listings), *self._prepared()]
        offered = {
            name: known[name].announced.values() if listing is None else listing.devices
            for name, listing in listings.items()
        }
        bridged = {name for name in listings if self._source.behind(name) is not None}
        own = {name: devices for name, devices in offered.items() if name not in bridged}
        against_own, against_bridged = self._holdings.across_the_bridge(own, bridged) if own and bridged else ((), ())
        holds, self._holds = self._holds, [*self._holds, *against_own]
        cordons = self._holdings.cordons(on_offer.values())
        for name, listing in listings.items():
            held = self._holdings.holders(name, forgotten=False) or ()
            across = against_bridged if name in bridged else against_own
            one = replace(
                known[name],
                cordons={**known[name].cordons, **boards.withheld(cordons, offered[name], ())},
                withheld=boards.withheld([*holds, *across], offered[name], held),
                away={}
                if self.drivers is None
                else self.drivers.now.away(chain(known[name].announced.values(), offered[name])),
            )
            asked[name] = one, listing, before[name], clock, grace
        return asked

    def _prepared(self) -> Iterable[Hold]:
        """Return the holds of claims that were prepared before DRA was switched off. With DRA on, the drivers know them."""
        return claimed.holds(self._ledger.claims) if self._settings.dra == "off" else ()

    def _heeded(self, holds: Sequence[Hold], ours: Container[str]) -> Sequence[Hold]:
        """Leave out holds that have ended. While a kubelet restarts, other plugins' earlier offers stay, though its records lack them."""
        if not any(hold.offer for hold in (*holds, *self._holds)):
            return holds
        last, since = self._reader.last, self._presence.since
        if last is None or last.records.allocatable is None:
            holds = [hold for hold in holds if not hold.offer]
        if last is not None and since is not None and last.at - since >= reader.AFTER_START:
            return holds
        found = {(hold.resource, hold.device_id) for hold in holds}
        served = {resource.name for resource in self._resources.values() if resource.plugin.streaming}
        kept = [
            hold
            for hold in self._holds
            if hold.offer
            and hold.resource not in served
            and hold.resource not in ours
            and (hold.resource, hold.device_id) not in found
        ]
        return [*holds, *kept]

    def _known(self, name: str, listing: Listing | None) -> merging.Known:
        announced = self._ledger.announced(name)
        gone = frozenset() if listing is None else announced.keys() - listing.by_id.keys()
        return merging.Known(
            announced,
            boot_id=self._ledger.boot_id,
            cordons={device_id: cordon.reason for device_id, cordon in self._ledger.cordons.items()},
            sticky={**_ill_before(listing, announced, self._ledger), **self._ledger.sticky(name)},
            held=None if (holders := self._holdings.holders(name)) is None else holders.keys(),
            absences=absences(name, [announced[one] for one in gone], self.inventory, self._source),
            lost_since=self._ledger.lost_since(name),
        )

    def _has_unheard_of(self, inventory: Inventory) -> bool:
        """Return True if the source lists IDs that the state file doesn't have."""
        return any(ids - self._ledger.announced(name).keys() for name, ids in _offered(inventory, self._ledger).items())

    def _given(self) -> int:
        return sum(resource.plugin.given for resource in self._resources.values())

    def _held_ids(self) -> frozenset[tuple[str, str]]:
        return frozenset((hold.resource, hold.device_id) for hold in self._holds)

    def _look_for(self, known: frozenset[tuple[str, str]]) -> None:
        """Schedule a read of the kubelet's records while a device waits for the end of a hold; at once if a hold is not in ``known``."""
        if self._holds:
            self._reader.look_within(self._rest(HOLDERS_AGAIN) if self._held_ids() <= known else 0)

    def _rest(self, seconds: float) -> float:
        return max(seconds, PART * self._took)  # Most of the time is for calls.

    def update_again(self, moments: Sequence[float]) -> None:
        """Update the lists again at the first of these moments (monotonic seconds)."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if moments:
            delay = min(max(min(moments) - time.monotonic(), 0.01), LONGEST_TIMER)
            self._again = asyncio.get_running_loop().call_later(delay, self._refresh)

    async def announce(self) -> None:
        """Write the lists as they are to the state file, before they are sent: a full update of thousands of devices takes seconds.

        The update follows soon. By then most holds of the earlier leader have ended.
        """
        async with self.lock:
            if self.unremembered():
                for name in self._resources:
                    await self._announce(name, self._resources[name].plugin.devices)
                await self._scribe.durable()
        if self._holds:
            self._reader.look_within(HANDED_OVER_LOOK)
        else:
            self.update_again([time.monotonic() + HANDED_OVER_LOOK])

    async def _announce(self, name: str, devices: Sequence[Device]) -> None:
        """Note devices that are about to be sent, some at a time, so that calls are answered meanwhile."""
        devices = self.unseen.to_record(name, devices)
        for start in range(0, len(devices), AT_ONCE):
            if start:
                await asyncio.sleep(0)
            self._ledger.announce(name, tuple(devices[start : start + AT_ONCE]))

    def unremembered(self) -> bool:
        """Return True if a list has an ID that the state file lacks."""
        return any(one.entries.keys() - self._ledger.announced(one.name).keys() for one in self._resources.values())

    @property
    def only_remembered(self) -> bool:
        """True if the state file has resources that this gateway lacks."""
        return not self._resources.keys() >= set(self._ledger.resources())

    def looked(self) -> None:
        """Update the lists if a device waited for this read of the kubelet's records."""
        waiting = bool(self._holds and self._resources) or any(
            entry.state in _WAITING
            or (entry.beneath is not None and any(one.state in _WAITING for one in entry.beneath.layers))
            for resource in self._resources.values()
            for entry in resource.entries.values()
        )
        if not waiting and self.inventory is not None:  # A hold may have begun that was unknown at the last update.
            told = _told(self.inventory, (*self._resources, *self.inventory), self._ledger, self._source)
            waiting = bool(self._heeded(self._holdings.of_others(_offered(told, self._ledger)), self._resources))
        self._changed()
        if waiting:
            if self.registering:
                self._reader.look_within(HANDED_OVER_LOOK)
                return
            self._tasks.background(self.update())
            self._reader.look_within(self._rest(HOLDERS_AGAIN if self._holds else LOOK_AGAIN))
            if (last := self._reader.last) is not None and self._outdated.is_due(last.records, last.at):
                served = [one.plugin for one in self._resources.values() if one.plugin.streaming]
                for plugin in sorted(served, key=lambda one: len(one.devices))[:1]:
                    plugin.send_again()
        elif self._settings.metrics_address is not None:
            self._reader.look_within(LOOK_FOR_METRICS)

    def _refresh(self) -> None:
        if self.registering:
            self.update_again([time.monotonic() + HANDED_OVER_LOOK])
            return
        self._tasks.background(self.update())

    def close(self) -> None:
        """Stop updating the lists."""
        self.update_again(())


def _merged(asked: Asked) -> dict[str, merging.Merged]:
    return {name: merging.merge(*one) for name, one in asked.items()}


async def _merged_apart(asked: Asked) -> dict[str, merging.Merged]:
    """Merge; with many devices in a thread, so that calls are answered meanwhile."""
    many = sum(len(listing.devices) for _, listing, *_ in asked.values() if listing is not None) > AT_ONCE
    return await asyncio.to_thread(_merged, asked) if many else _merged(asked)


def remember(
    ledger: Ledger, unseen: Unseen, name: str, merged: merging.Merged, illnesses: Mapping[str, merging.Sticky]
) -> bool:
    """Note in the ledger what follows from a list. Return True if it should be on disk at once."""
    news = ledger.announce(name, unseen.to_record(name, [entry.device for entry in merged.entries]))
    ledger.withdraw(name, merged.dropped)  # Also forgets their troubles.
    if name in unseen.names:
        return news
    illnesses = {device_id: row for device_id, row in illnesses.items() if device_id not in merged.dropped}
    news = ledger.set_sticky(name, merged.sticky, since=illnesses) or news
    ledger.set_lost_since(name, merged.lost_since)
    return news


def _ill_before(listing: Listing | None, announced: Container[str], ledger: Ledger) -> Mapping[str, merging.Sticky]:
    """Return the lasting troubles of hardware whose ID has changed, by its new ID. A new name or number of replicas ends no trouble."""
    new = () if listing is None else [one for one in listing.devices if one.id not in announced]
    ill: dict[boards.Place, merging.Sticky] = {}
    for name in ledger.resources() if new else ():
        known = ledger.announced(name)
        ill |= {boards.place_of(known[one]): row for one, row in ledger.sticky(name).items() if one in known}
    return {one.id: ill[place] for one in new if (place := boards.place_of(one)) in ill} if ill else {}


def _told(inventory: Inventory, of: Iterable[str], ledger: Ledger, source: DeviceSource) -> dict[str, Listing | None]:
    """Return the listings, by resource. A resource of which every device was withdrawn gets an empty one."""
    told = {name: listed(inventory, name) for name in of}
    for name in [name for name, listing in told.items() if listing is None]:
        ids = ledger.announced(name)
        if ids and all(source.absence(name, one) in {Absence.WITHDRAWN, Absence.EXCLUDED} for one in ids):
            told[name] = Listing(())
    return told


def _offered(listings: Mapping[str, Listing | None], ledger: Ledger) -> dict[str, AbstractSet[str]]:
    """Return the IDs on offer, by resource. If the source hasn't listed a resource yet, these are the remembered IDs."""
    return {name: (ledger.announced(name) if one is None else one.by_id).keys() for name, one in listings.items()}
