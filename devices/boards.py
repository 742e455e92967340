"""Which hardware a device ID stands for, and which IDs are withheld because a pod holds the same hardware under another.

A kubelet counts IDs. After an edit of the configuration (shared or not, another name, MIG or not) one GPU has other IDs, and
what a running pod holds under the old one is free to the kubelet under the new ones. So IDs that are offered no longer and
that a container holds are *claims* on their hardware; who offers anything on it asks here first. IDs that are offered side by
side now, replicas for example, are no claim on each other: that is what the operator wants.

Pure: what is held, and what the sources see, comes from whoever asks.
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


class Claim(Struct, frozen=True):
    """That hardware is taken under an ID that isn't on offer here: the ID, where it is, and in words by whom.

    ``offer``: nobody holds it, but the kubelet may give it to somebody.
    """

    resource: str
    device_id: str
    place: Place
    words: str
    offer: bool = False


def held(resource: str, device_id: str, place: Place, holder: str | None) -> Claim:
    """Claim the hardware of an ID that a container holds; ``holder`` None: it can't be seen who."""
    known = f"still held as {resource} {device_id}"
    perhaps = "; who holds it can't be seen now, so it may be free"
    return Claim(resource, device_id, place, f"{known} by {holder:.160}" if holder is not None else f"{known}{perhaps}")


def offered_elsewhere(resource: str, device_id: str, place: Place) -> Claim:
    """Claim the hardware of an ID that another gateway, or a plugin, offers under a resource name of its own."""
    return Claim(
        resource, device_id, place, f"offered as {resource} {device_id} by another gateway or plugin", offer=True
    )


def place_of(device: Device) -> Place:
    """Say where a device is that is offered, or was when it was listed last."""
    shared = unshared(device.id)
    if device.part_of:
        return Place(device.part_of, shared)
    if shared.startswith(_OLD_MIG):
        return Place(shared.removeprefix("MIG-").partition("/")[0], shared)
    return Place(shared)


def withheld(claims: Iterable[Claim], devices: Iterable[Device], held: Container[str]) -> dict[str, str]:
    """Say which devices of one resource are not to be given out now, and why, by ID.

    Args:
        claims: what is taken, under whichever resource.
        devices: what the resource offers.
        held: the devices of the resource that containers hold. Of a GPU that was shared more often before, they stay as they
            are: whoever shared it goes on sharing it.
    """
    by_board: dict[str, list[Claim]] = {}
    for claim in claims:
        by_board.setdefault(claim.place.board, []).append(claim)
    found: dict[str, str] = {}
    for device in devices if by_board else ():
        place = place_of(device)
        for claim in by_board.get(place.board, ()):
            if claim.place.overlaps(place) and not (device.id in held and are_shared(device.id, claim.device_id)):
                found[device.id] = claim.words
                break
    return found


def are_shared(*device_ids: str) -> bool:
    """Whether all are replicas of the same, which containers share because an operator wants it."""
    shared = {unshared(device_id) for device_id in device_ids}
    return len(shared) == 1 and shared.isdisjoint(device_ids)
