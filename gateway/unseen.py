"""Find devices that worked until now and that this gateway can't see: an update that lost its rights must not go on.

The rule holds for every vendor. A gateway that sees none of a source's usable devices doesn't take them over, isn't ready, and
doesn't record them as lost. If it sees some, the others are lost, and the update goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from devices import boards
from devices.model import Health
from devices.source import Absence, Hindrance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from devices.model import Device
    from devices.source import DeviceSource, Inventory
    from gateway.memory.ledger import Ledger

PCI: Final = Path("/sys/bus/pci/devices")
_LOOK_AGAIN = 0.5
"""Seconds between two looks whether another gateway lives."""
_BY_A_SETTING = frozenset({Absence.WITHDRAWN, Absence.EXCLUDED})


class Unseen:
    """Devices that the state file has as usable, and that this gateway doesn't see."""

    def __init__(self, ledger: Ledger, source: DeviceSource) -> None:
        self._ledger, self._source = ledger, source
        self.names: Mapping[str, str] = {}
        """The resources of which no usable device is seen, with the name of their source."""
        self.none_before = False
        """True if the earlier gateway had no usable device either."""
        self._hindrances: Sequence[Hindrance] = ()
        self._sighted: set[str] = set()
        """The sources of which this process has seen a usable device. Devices that vanish later are lost."""

    def look(self, inventory: Inventory | None) -> None:
        """Compare what the sources list with what was served. A device that worked before a reboot need not work after it.

        Args:
            inventory: what the sources list; None: nothing yet.
        """
        ledger, source = self._ledger, self._source
        healthy = {source.source_of(name) for name in inventory or () if next(seen(inventory, name), "")}
        usable = {
            name: self._usable(name, inventory)
            for name in (ledger.resources() if ledger.served_in_boot in {"", ledger.boot_id} else ())
            # If a source has healthy devices and doesn't know the name, a setting withdrew it.
            if source.source_of(name) not in self._sighted and (source.claims(name) or not healthy)
        }
        known = {name: ledger.announced(name).keys() for name in usable}
        self.names = unseen(usable, known, inventory, source.source_of)
        self.none_before = not (self._sighted or any(usable.values())) and bool(ledger.resources())
        self._sighted |= healthy - set(self.names.values())
        self._hindrances = hindrances(self.names, usable)

    def _usable(self, resource: str, inventory: Inventory | None) -> list[str]:
        """Return the devices that were healthy last, except those that a setting withdrew or the kernel no longer has."""
        well = [one for one in self._ledger.announced(resource).values() if one.health is Health.HEALTHY]
        became = absences(resource, well, inventory, self._source)
        return [one.id for one in well if became[one.id] not in _BY_A_SETTING and not is_removed(one)]

    def added_to(self, told: Iterable[Hindrance]) -> tuple[Hindrance, ...]:
        """Add a hindrance for each source whose devices aren't seen. If the earlier gateway served none, no hindrance holds up an update."""
        if self.none_before:
            told = (replace(one, held_up=False) for one in told)
        return (*told, *self._hindrances)

    @property
    def words(self) -> str:
        """The missing devices, for people; empty if none is missing."""
        return "; ".join(one.reason for one in self._hindrances)

    def to_record(self, resource: str, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Leave out devices that aren't seen: they stay in the state file as they are, so that a second start also waits."""
        if resource not in self.names:
            return tuple(devices)
        known = self._ledger.announced(resource)
        return tuple(one for one in devices if one.id not in known)


def absences(
    name: str, gone: Sequence[Device], inventory: Inventory | None, source: DeviceSource
) -> dict[str, Absence]:
    """Return why devices are no longer listed. A GPU is withdrawn if another one has its PCI address now."""
    there: dict[str, str] = {}
    if any(device.pci for device in gone):
        listings = (inventory or {}).values()
        there = {one.pci: boards.place_of(one).board for listing in listings for one in listing.devices if one.pci}
    return {
        one.id: Absence.WITHDRAWN
        if there.get(one.pci, board := boards.place_of(one).board) != board
        else source.absence(name, one.id)
        for one in gone
    }


def is_removed(device: Device) -> bool:
    """Return True if the kernel no longer has a GPU. It had it before if the NUMA node is known, which is read from the GPU's folder."""
    return bool(device.pci and device.numa_nodes) and not (PCI / device.pci).exists()


def seen(inventory: Inventory | None, resource: str) -> Iterator[str]:
    """Yield the healthy devices that a source lists. A device that it can't look at is listed as unhealthy."""
    listing = None if inventory is None else inventory.get(resource)
    if listing is not None:
        yield from (one.id for one in listing.devices if one.health is Health.HEALTHY)


def unseen(
    usable: Mapping[str, Collection[str]],
    known: Mapping[str, Collection[str]],
    inventory: Inventory | None,
    source_of: Callable[[str], str],
) -> dict[str, str]:
    """Return the resources whose source had usable devices and sees none of its known devices, each with the source's name.

    Args:
        usable: the devices that the earlier gateway could give, by resource.
        known: all devices that it listed, also cordoned ones, by resource.
        inventory: what the sources list; None: nothing yet.
        source_of: returns the name of a resource's source.
    """
    sources = {name: source_of(name) for name, ids in usable.items() if ids}
    sighted = {source for name, source in sources.items() if not set(known[name]).isdisjoint(seen(inventory, name))}
    return {name: source for name, source in sources.items() if source not in sighted}


def hindrances(missing: Mapping[str, str], usable: Mapping[str, Collection[str]]) -> tuple[Hindrance, ...]:
    """Return a hindrance for each source whose devices aren't seen."""
    found = []
    for source in dict.fromkeys(missing.values()):
        names = sorted(name for name in missing if missing[name] == source)
        count = sum(len(usable[name]) for name in names)
        what = f"it sees none of the {count} usable device{'' if count == 1 else 's'} of {', '.join(names)}"
        then = (
            "the gateway before this one served them. Did this release lose a capability, its runtime class or a device node? If the devices are "
            "gone for good: `gateway forget ID`, or reboot the node"
        )
        found.append(Hindrance(source, f"{what}; {then}", held_up=True))
    return tuple(found)
