"""Who holds which hardware of the node.

The evidence: the kubelet's records, what Allocate gave since, the holders from before the kubelet's start, and the prepared
ResourceClaims. The state file has it. By the holds from here, ``devices.boards.may_give`` decides what may be given.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from adapters.registry import DIALECTS
from devices import boards
from devices.life.merging import HELD_UNKNOWN_S
from devices.model import Device
from gateway.kubelet import earlier
from gateway.kubelet.earlier import RECORDED_WITHIN
from gateway.kubelet.identity import kubelet_id
from gateway.kubelet.reader import AFTER_START
from gateway.kubelet.records import Records
from gateway.memory.claimed import claim_holders
from gateway.registration.events import Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from devices.boards import Hold, Place
    from devices.source import DeviceSource
    from gateway.kubelet.identity import KubeletId
    from gateway.kubelet.presence import Presence
    from gateway.kubelet.reader import Look, RecordsReader
    from gateway.memory.ledger import Ledger
    from gateway.memory.scribe import Scribe
    from gateway.registration.registrar import Resource

_GIVEN: Final = "a container that was given it a moment ago"
_FORGOTTEN: Final = "{:.80}, perhaps: the kubelet forgot who; when it has ended, run `gateway forget ID`"


class Holdings:
    """The holds on a node's hardware."""

    def __init__(
        self,
        ledger: Ledger,
        scribe: Scribe,
        reader: RecordsReader,
        presence: Presence,
        source: DeviceSource,
        resources: Mapping[str, Resource],
    ) -> None:
        self.ledger, self.scribe, self.reader, self.presence = ledger, scribe, reader, presence
        self._source, self._resources = source, resources
        self.let_in: Callable[[str], Awaitable[None]] | None = None
        """Waits until the kubelet would admit a pod that gets a device of a resource; None without DRA."""
        self.ended: frozenset[str] = frozenset()
        """The UIDs of pods that the API server lacks and the checkpoint still names. Empty without DRA."""
        self._whole: Look | None = None
        """The last look that showed all holders."""

    # Who holds a resource's devices.

    def recorded(self, resource: str, look: Look | None = None) -> dict[str, str] | None:
        """Return the holders by a look (the last one if None), by device ID; None if the kubelet's records could not be read."""
        look = look or self.reader.last
        if look is None or look.records.held is None:
            return None
        over = self.ended and {one for one, uid in look.records.only_written(resource).items() if uid in self.ended}
        holders = look.records.holders(resource)
        return {one: who for one, who in holders.items() if one not in over} if over else holders

    def holders(self, resource: str, *, forgotten: bool = True, look: Look | None = None) -> dict[str, str] | None:
        """Return the holders in words ('': unknown), by device ID; None if it is unknown which devices are held.

        ``forgotten``: include the holders that the kubelet forgot. It may give their devices to other pods. ``look``: the look to use;
        None for the last one.
        """
        look = look or self.reader.last
        if look is None:
            return None
        holders = self.recorded(resource, look) if look is self._whole else None
        unwritten = look.records.unwritten and any(
            one.writes_late for one in DIALECTS if one.name == self.ledger.accepted
        )
        if holders is None and not unwritten:
            return None
        self.note(resource)
        rows = self.ledger.handed_out(resource)
        found = self._earlier(resource) if forgotten else {}
        if holders is None:
            return found | dict.fromkeys(rows, "")  # They may have ended: kubelet 1.8 does not report it.
        # Also devices that were given so shortly before the look that the records may lack them.
        since = (one for one, row in rows.items() if row.at >= look.unix - RECORDED_WITHIN)
        return found | dict.fromkeys(since, _GIVEN) | holders

    def holder_of(self, devices: Iterable[tuple[str, str]]) -> str | None:
        """Return a holder of one of these devices (resource and ID each), in words; empty for none, None if unknown."""
        devices = tuple(devices)
        of = {name: self.holders(name) for name in {name for name, _ in devices}}
        found = (
            known[one] or "a container" for name, one in devices if (known := of[name]) is not None and one in known
        )
        return next(found, None if None in of.values() else "")

    def _knows_its_pods(self, look: Look) -> bool:
        """Return True if the look shows all holders: the kubelet knew its pods by then, or its checkpoint could be read."""
        if look.records.source != "pod-resources" or look.records.written is not None:
            return True
        since, kubelet = self.presence.since, kubelet_id(self.presence.socket)
        found = since is not None and look.at - since >= AFTER_START
        return found or (kubelet is not None and look.unix - kubelet.mtime_ns / 1e9 >= AFTER_START)

    # Holds on hardware, under any name.

    def on(self, resource: str, devices: Iterable[Device]) -> Sequence[Hold] | None:
        """Return the holds on a resource's own devices that another API must not overlook.

        These are the holds of containers, and the devices that the kubelet may give to its next pods. While the kubelet's records
        can't be read, use the last ones. None: they never could be read.
        """
        look = self._whole or self.reader.last
        holders = self.holders(resource, look=look)
        if holders is None or look is None:
            return None
        offered = (look.records.allocatable or {}).get(resource, frozenset())
        place = {one.id: boards.place_of(one) for one in devices}
        held = [boards.held(resource, one, place[one], who or None) for one, who in holders.items() if one in place]
        return held + [boards.offered(resource, one, place[one]) for one in offered - holders.keys() if one in place]

    def holds(self, remaining: Mapping[str, Iterable[Device]], offered: Mapping[str, AbstractSet[str]]) -> list[Hold]:
        """Return the holds that lists and claims must respect.

        Args:
            remaining: devices that are no longer offered and may be held, by resource.
            offered: the IDs on offer here, by resource.
        """
        ours = []
        for name, devices in remaining.items():
            holders = self.holders(name)
            for one in devices:
                who = None if holders is None else holders.get(one.id, _GIVEN)
                ours.append(boards.held(name, one.id, self._place(one), who or None))
        return [*ours, *self.of_others(offered)]

    def of_others(self, offered: Mapping[str, AbstractSet[str]]) -> list[Hold]:
        """Return the holds under names and IDs that aren't on offer here, and what the kubelet may give under such names.

        Another plugin has them, an earlier gateway had them, or this one did before it lost its state file.
        """
        held: list[Hold] = []
        offers: list[Hold] = []
        given_out = self._given_out()
        known = self.reader.known.records if self.reader.known is not None else Records()
        for name in sorted({*(known.held or ()), *(known.written or ()), *given_out, *offered, *self.ledger.named()}):
            announced, holders, ours = self.ledger.announced(name), self._last_holders(name), offered.get(name)
            free = given_out.get(name, frozenset()) - holders.keys() if ours is None else frozenset()
            for one in (*holders, *sorted(free)):
                if ours is not None and (one in ours or one in announced):
                    continue
                place = self._place(announced[one]) if one in announced else self._source.place(one)
                if place is not None and one in holders:
                    held.append(boards.held(name, one, place, holders[one] or None))
                elif place is not None:
                    offers.append(boards.offered(name, one, place))
        return [*held, *offers]

    def across_the_bridge(
        self, own: Mapping[str, Iterable[Device]], bridged: Iterable[str]
    ) -> tuple[Sequence[Hold], Sequence[Hold]]:
        """Return what withholds devices of our own source, and what withholds those of plugins behind the bridge.

        If both list the same hardware, only our source offers it, as soon as no container holds it as the plugin's device.

        Args:
            own: our source's devices by resource.
            bridged: the plugins' resources.
        """
        offered = [
            boards.offered(name, one.id, boards.place_of(one), "this gateway")
            for name, devices in own.items()
            for one in devices
        ]
        ours = boards.by_board(offered)
        held = [
            boards.held(name, one, place, who or None)
            for name in bridged
            for one, who in (self.holders(name) or {}).items()
            if (place := boards.place_of(Device(one))).board in ours
        ]
        return held, offered

    def named(self, resource: str) -> dict[str, str] | None:
        """Return who holds which device by the kubelet's records and by the prepared ResourceClaims."""
        holders, prepared = self.recorded(resource), claim_holders(self.ledger.claims, resource)
        return {**(holders or {}), **prepared} if prepared else holders

    def cordons(self, offered: Collection[AbstractSet[str]]) -> list[Hold]:
        """Return the cordons of IDs that aren't on offer. They are in force for the hardware, under any ID.

        The cordon of a partition ends with the partition.
        """
        found = []
        for one, cordon in self.ledger.cordons.items():
            if not any(one in ids for ids in offered):
                seen = self._source.place(one)
                place = seen if seen is not None and seen.part else boards.place_of(Device(one))
                found.append(boards.Hold("", one, place, f"{cordon.reason} (cordoned as {one})"))
        return found

    def _last_holders(self, resource: str) -> Mapping[str, str | None]:
        """Return the holders; while the records can't be read, those of the last look, for ``HELD_UNKNOWN_S``."""
        if (holders := self.holders(resource)) is not None:
            return holders
        last, known = self.reader.last, self.reader.known
        found = self._earlier(resource)
        if last is None or known is None or last.at - known.at >= HELD_UNKNOWN_S:
            return found
        return {**found, **dict.fromkeys(known.records.holders(resource))}

    def _earlier(self, resource: str) -> dict[str, str]:
        return {one: _FORGOTTEN.format(earlier.words(who)) for one, who in self.ledger.earlier(resource).items()}

    def _given_out(self) -> Mapping[str, frozenset[str]]:
        """Return the devices that the kubelet may give, by resource. Before 1.23 only its checkpoint has them (from 1.9 on)."""
        records = self.reader.last.records if self.reader.last is not None else Records()
        return (records.registered if records.allocatable is None else records.allocatable) or {}

    def _place(self, device: Device) -> Place:
        """Return the place of a device that isn't on offer here. A partition that isn't seen may be anywhere on its GPU."""
        return self._source.place(device.id) or boards.Place(boards.place_of(device).board)

    # Events.

    def note(self, resource: str) -> None:
        """Note the devices of a resource that were given until now."""
        if resource in self._resources:
            self._resources[resource].plugin.note_handed_out()

    def numa_nodes(self, resource: str) -> Mapping[str, tuple[int, ...]]:
        """Return the NUMA nodes of each device on a resource's list, by device ID."""
        listed = self._resources[resource].plugin.devices if resource in self._resources else ()
        return {device.id: device.numa_nodes for device in listed}

    def looked(self, look: Look) -> None:
        """Note a look into the kubelet's records: update what the state file has as given."""
        if look.records.held is not None and self._knows_its_pods(look):
            self._whole = look
        if self.reader.waits_for_own or look.records.held is None:
            return  # The kubelet may have lost its records: the state file keeps the holders until its checkpoint shows that.
        for name in {**self._resources, **dict.fromkeys(self.ledger.named()), **dict.fromkeys(look.records.held)}:
            holders: Collection[str] = look.records.holders(name)
            resource = self._resources.get(name)
            if resource is not None and resource.state.phase is not Phase.SERVING:
                continue
            if resource is None:  # Not ours: note what it has of our hardware.
                holders = [one for one in holders if self._source.place(one) is not None]
            # A holder from before the kubelet's start may still hold it. The next gateway must know that.
            rows, asked = self.ledger.handed_out(name), earlier.in_question(self.ledger.earlier(name))
            names = {one: rows[one].names for one in asked if one in rows}
            names |= {one: look.records.names_of(name, one) for one in holders}
            if self.ledger.rebuild_handed_out(name, names, look.unix - RECORDED_WITHIN, time.time()):
                self.scribe.soon()

    def kubelet_started(self, kubelet: KubeletId) -> None:
        """Note a new kubelet."""
        for name in self._resources:
            self.note(name)  # It was given before this kubelet started.
        self.reader.restarted(kubelet.mtime_ns / 1e9)
        self._question(kubelet)

    async def load(self, *, patient: bool = False) -> None:
        """Read the state file (``Scribe.load``). If its holders are from before the running kubelet's start, put them in question."""
        await self.scribe.load(patient=patient)
        if (kubelet := self.presence.kubelet or kubelet_id(self.presence.socket)) is not None:
            self._question(kubelet)

    def _question(self, kubelet: KubeletId) -> None:
        """Put all holders in question if the state file has them from another kubelet of this boot."""
        ledger, before = self.ledger, self.ledger.kubelet
        if ledger.set_kubelet(f"{ledger.boot_id} {kubelet.device}:{kubelet.inode}:{kubelet.mtime_ns}"):
            for name in ledger.named() if before.partition(" ")[0] == ledger.boot_id else ():
                ledger.set_earlier(name, earlier.restarted(ledger.earlier(name), ledger.handed_out(name)))
            self.scribe.soon()
        self.reader.compare()

    def accepted(self, dialect: str) -> None:
        """Note the dialect that the kubelet accepted, for the next start."""
        if self.ledger.accept(dialect):
            self.scribe.soon()
