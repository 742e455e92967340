"""Who has which hardware under IDs that this gateway doesn't offer: the holds that ``devices.boards`` judges by.

Puts together what the ledger remembers, what the kubelet's records say and what the source sees. Nothing is kept here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from devices import boards
from devices.life.merging import HELD_UNKNOWN_S
from devices.model import Device

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from devices.boards import Hold, Place
    from devices.source import DeviceSource
    from gateway.memory.holdings import Holdings

_UNSEEN = "a container that was given it a moment ago"
_FORGOTTEN = "{:.80}, perhaps: the kubelet forgot who; when it has ended, run `gateway forget ID`"


class Owners:
    """The holds on a node's hardware."""

    def __init__(self, holdings: Holdings, source: DeviceSource) -> None:
        self._holdings, self._ledger, self._beliefs = holdings, holdings.ledger, holdings.beliefs
        self._source = source

    def holds(self, remaining: Mapping[str, Iterable[Device]], offered: Mapping[str, AbstractSet[str]]) -> list[Hold]:
        """Give the holds on what is offered no longer, by resource of ours, and on what others have.

        ``offered`` are the IDs of all that is on offer here, by resource.
        """
        ours = (hold for name, devices in remaining.items() for hold in self._of(name, devices))
        return [*ours, *self.of_others(offered)]

    def of_others(self, offered: Mapping[str, AbstractSet[str]]) -> list[Hold]:
        """Give the holds on what others have, and had: another plugin, a gateway before this one, this one before it lost its memory."""
        return [*self._of_others(offered), *self._unheard_of(offered), *self._offered_elsewhere(offered)]

    def held(self, resource: str) -> AbstractSet[str] | None:
        """Return what containers hold, and what those may hold that the kubelet forgot; None where nobody knows."""
        held = self._holdings.held(resource)
        return None if held is None else held | self._beliefs.earlier(resource).keys()

    def cordons(self, offered: Collection[AbstractSet[str]]) -> list[Hold]:
        """Give the cordons of IDs that aren't on offer: they are meant for the hardware, whatever it is offered as now.

        A partition that is no more takes its cordon along.
        """
        found = []
        for one, cordon in self._ledger.cordons.items():
            if not any(one in ids for ids in offered):
                seen = self._source.place(one)
                place = seen if seen is not None and seen.part else boards.place_of(Device(one))
                found.append(boards.Hold("", one, place, f"{cordon.reason} (cordoned as {one})"))
        return found

    def _of(self, resource: str, devices: Iterable[Device]) -> Iterable[Hold]:
        holders, earlier = self._holdings.recorded(resource), self._beliefs.earlier(resource)
        for device in devices:
            holder = None if holders is None else holders.get(device.id, _UNSEEN)
            if holder is _UNSEEN and device.id in earlier:
                holder = _FORGOTTEN.format(earlier[device.id])
            yield boards.held(resource, device.id, self._place(device), holder)

    def _of_others(self, ours: Mapping[str, object]) -> Iterable[Hold]:
        """Give what is held of resources that only a gateway before this one served."""
        for name in self._ledger.resources():
            if name not in ours:
                devices, held = self._ledger.announced(name), self.held(name) or frozenset()
                yield from self._of(name, (devices[one] for one in sorted(devices.keys() & held)))

    def _unheard_of(self, offered: Mapping[str, AbstractSet[str]]) -> Iterable[Hold]:
        """Give what containers hold by the kubelet's records, where it is seen here, though the ledger never heard of it.

        What they said last counts while they can't be read (``HELD_UNKNOWN_S``), and whom the kubelet forgot since.
        """
        last, known = self._beliefs.last, self._beliefs.known
        if last is None or known is None or last.at - known.at >= HELD_UNKNOWN_S:
            return
        for name in sorted({*(known.view.held or ()), *(known.view.remembered or ()), *offered}):
            announced, earlier = self._ledger.announced(name), self._beliefs.earlier(name)
            holders: dict[str, str | None] = {one: _FORGOTTEN.format(who) for one, who in earlier.items()}
            seen = known.view.holders(name)
            holders |= seen if last is known else dict.fromkeys(seen)
            for one, holder in holders.items():
                if one in announced or one in offered.get(name, ()):
                    continue
                if (place := self._source.place(one)) is not None:
                    yield boards.held(name, one, place, holder)

    def _offered_elsewhere(self, offered: Mapping[str, AbstractSet[str]]) -> Iterable[Hold]:
        """Give what the kubelet gives out under a name that this gateway doesn't offer."""
        for name, ids in sorted(self._offers().items()):
            if name in offered:
                continue
            announced, held = self._ledger.announced(name), self.held(name) or frozenset()
            for one in sorted(ids - held):
                place = self._place(announced[one]) if one in announced else self._source.place(one)
                if place is not None:
                    yield boards.offered_elsewhere(name, one, place)

    def _offers(self) -> Mapping[str, frozenset[str]]:
        """What the kubelet gives out; before 1.23 it doesn't say it, but its checkpoint does from 1.9 on."""
        last = self._beliefs.last
        if last is None:
            return {}
        said = last.view.registered if last.view.allocatable is None else last.view.allocatable
        return said or {}

    def _place(self, device: Device) -> Place:
        """Say where a device is that isn't offered here. A partition that nobody sees may be anywhere on its GPU by now."""
        return self._source.place(device.id) or boards.Place(boards.place_of(device).board)
