"""Which hardware a device ID stands for, and whether a device may be given while that hardware is in use. Pure.

A kubelet counts IDs, and one GPU may have several: after an edit of the configuration (shared or not, another name, MIG or
not), under a resource of another plugin, in a ResourceSlice. So lists and Prepare ask ``may_give``, which checks the ``Hold``s
of the node. Replicas of one device, which a source offers together, don't conflict: the operator shares it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import lru_cache
from typing import Final

from msgspec import Struct

from devices.model import Device
from devices.replicas import unshared

_OLD_MIG: Final = "MIG-GPU-"
"""The prefix of MIG instances' IDs in drivers before R470: ``MIG-GPU-<the GPU's UUID>/<gi>/<ci>``."""


class Place(Struct, frozen=True):
    """A place on the hardware: ``board`` is the physical GPU (or file), ``part`` the partition; '' means all of it."""

    board: str
    part: str = ""

    def overlaps(self, other: Place) -> bool:
        """Return True if the places share hardware. Two partitions of one GPU don't overlap."""
        return self.board == other.board and (not self.part or not other.part or self.part == other.part)


class Hold(Struct, frozen=True):
    """Hardware that is held: its resource and device ID, its place, and the holder in words.

    ``offer``: it is not held yet, but the kubelet may give it at any time. ``alone``: its other replicas may not be given either.
    """

    resource: str
    device_id: str
    place: Place
    words: str
    offer: bool = False
    alone: bool = False


def held(resource: str, device_id: str, place: Place, holder: str | None, *, alone: bool = False) -> Hold:
    """Return the hold of a device; ``holder`` None: unknown."""
    by = f" by {holder:.160}" if holder is not None else "; its holder is unknown now, so it may be free"
    return Hold(resource, device_id, place, f"still held as {resource} {device_id}{by}", alone=alone)


def offered(resource: str, device_id: str, place: Place, by: str = "another gateway or plugin") -> Hold:
    """Return the hold of a device that the kubelet may give under a resource name."""
    return Hold(resource, device_id, place, f"offered as {resource} {device_id} by {by}", offer=True)


def may_give(device_id: str, place: Place, holds: Iterable[Hold], *, shares: bool) -> Hold | None:
    """Return None if a device may be given, else the first hold that forbids it.

    Args:
        device_id: the device.
        place: where it is.
        holds: the holds of others, without those of the asking pod or claim.
        shares: True if it may be given while other replicas of its hardware are held.
    """
    for hold in holds:
        beside = shares and not hold.alone and device_id != hold.device_id and are_shared(device_id, hold.device_id)
        if hold.place.overlaps(place) and not beside:
            return hold
    return None


def place_of(device: Device) -> Place:
    """Return where a listed device is, or was when it was listed last."""
    return _place(device.id, device.part_of)


@lru_cache(maxsize=1 << 14)  # It is needed for each device at each look.
def _place(device_id: str, part_of: str) -> Place:
    shared = unshared(device_id)
    if part_of:
        return Place(part_of, shared)
    if shared.startswith(_OLD_MIG):
        return Place(shared.removeprefix("MIG-").partition("/")[0], shared)
    return Place(shared)


def by_board(holds: Iterable[Hold]) -> dict[str, list[Hold]]:
    """Return the holds on each board."""
    found: dict[str, list[Hold]] = {}
    for hold in holds:
        found.setdefault(hold.place.board, []).append(hold)
    return found


def withheld(holds: Iterable[Hold], devices: Iterable[Device], held: Container[str]) -> dict[str, str]:
    """Return the devices of a resource that must not be given now, with the reason.

    Args:
        holds: the holds of others, under any resource.
        devices: the devices of the resource.
        held: those that containers hold. If a GPU had more replicas before, the held ones stay as they are.
    """
    boards, found = by_board(holds), dict[str, str]()
    for device in devices if boards else ():
        place = place_of(device)
        hindrance = may_give(device.id, place, boards.get(place.board, ()), shares=device.id in held)
        if hindrance is not None:
            found[device.id] = hindrance.words
    return found


def are_shared(*device_ids: str) -> bool:
    """Return True if all IDs are replicas of one device."""
    shared = {unshared(device_id) for device_id in device_ids}
    return len(shared) == 1 and shared.isdisjoint(device_ids)
