"""Which hardware a device ID stands for, and whether a device may be given while somebody has its hardware. Pure.

A kubelet counts IDs, and one GPU has several: after an edit of the configuration (shared or not, another name, MIG or not), under a
resource of another plugin, in a ResourceSlice. So lists and Prepare ask ``may_give`` with the ``Hold``s of the node, wherever these come
from. IDs that one source offers side by side, replicas for example, are not in each other's way: that is what the operator wants.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from msgspec import Struct

from devices.model import Device
from devices.replicas import unshared

_OLD_MIG: Final = "MIG-GPU-"
"""How the IDs of MIG instances began in drivers before R470: ``MIG-GPU-<the GPU's UUID>/<gi>/<ci>``."""


class Place(Struct, frozen=True):
    """Where on the hardware something is: ``board`` names the physical GPU (or file), ``part`` the partition; '' means all of it."""

    board: str
    part: str = ""

    def overlaps(self, other: Place) -> bool:
        """Whether some hardware is in both. Partitions of one GPU are apart."""
        return self.board == other.board and (not self.part or not other.part or self.part == other.part)


class Hold(Struct, frozen=True):
    """That somebody has hardware: under which resource and ID, where it is, and in words who has it.

    ``offer``: nobody has it, but the kubelet may give it to somebody. ``alone``: not even other replicas of it may be given.
    """

    resource: str
    device_id: str
    place: Place
    words: str
    offer: bool = False
    alone: bool = False


def held(resource: str, device_id: str, place: Place, holder: str | None, *, alone: bool = False) -> Hold:
    """Say that somebody has a device; ``holder`` None: it can't be seen who."""
    by = f" by {holder:.160}" if holder is not None else "; who holds it can't be seen now, so it may be free"
    return Hold(resource, device_id, place, f"still held as {resource} {device_id}{by}", alone=alone)


def offered(resource: str, device_id: str, place: Place, by: str = "another gateway or plugin") -> Hold:
    """Say that a device is offered under a resource name, so that the kubelet may give it to somebody."""
    return Hold(resource, device_id, place, f"offered as {resource} {device_id} by {by}", offer=True)


def may_give(device_id: str, place: Place, holds: Iterable[Hold], *, shares: bool) -> Hold | None:
    """Decide whether a device may be given: None, or the first hold that is in the way.

    Args:
        device_id: the device.
        place: where it is.
        holds: what others have; not what the one who asks has.
        shares: whether it may go beside other replicas of the same hardware.
    """
    for hold in holds:
        beside = shares and not hold.alone and device_id != hold.device_id and are_shared(device_id, hold.device_id)
        if hold.place.overlaps(place) and not beside:
            return hold
    return None


def place_of(device: Device) -> Place:
    """Say where a device is that is offered, or was when it was listed last."""
    shared = unshared(device.id)
    if device.part_of:
        return Place(device.part_of, shared)
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
    """Say which devices of one resource are not to be given out now, and why, by ID.

    Args:
        holds: what others have, under whichever resource.
        devices: what the resource offers.
        held: the devices of the resource that containers hold. Of a GPU that was shared more often before, they stay as they
            are: whoever shared it goes on sharing it.
    """
    boards, found = by_board(holds), dict[str, str]()
    for device in devices if boards else ():
        place = place_of(device)
        hindrance = may_give(device.id, place, boards.get(place.board, ()), shares=device.id in held)
        if hindrance is not None:
            found[device.id] = hindrance.words
    return found


def are_shared(*device_ids: str) -> bool:
    """Whether all are replicas of the same, which containers share because an operator wants it."""
    shared = {unshared(device_id) for device_id in device_ids}
    return len(shared) == 1 and shared.isdisjoint(device_ids)
