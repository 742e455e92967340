"""What was prepared for a ResourceClaim, as the ledger remembers it: a GPU of it is nobody else's until it is unprepared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from devices import boards


class ClaimedDevice(Struct, frozen=True):
    """A device that a claim has: what it is called in its driver's pool, what it is here, and where on the hardware.

    ``requests`` are the claim's requests that it is for, ``share`` names the share of it that the claim has ('' for all of it),
    ``admin`` says that it is there for supervision and taken from nobody, ``former`` that its claim was allocated others since: nobody gets it.
    """

    name: str
    resource: str
    device_id: str
    board: str
    part: str = ""
    requests: list[str] = []
    share: str = ""
    admin: bool = False
    former: bool = False

    @property
    def place(self) -> boards.Place:
        """Where it is, or was when it was prepared."""
        return boards.Place(self.board, self.part)


_MOST_PODS = 3


class Claimed(Struct, frozen=True):
    """What a driver prepared for a claim; ``at`` is in unix seconds, ``pods`` those for which it was reserved then.

    ``by_name``: the scheduler made it for a pod that asked for a resource by its name.
    """

    namespace: str
    name: str
    driver: str
    at: float
    devices: list[ClaimedDevice] = []
    pods: list[str] = []
    by_name: bool = False

    @property
    def words(self) -> str:
        """Name it for people: ``claim ns/c (pod p)``; its pods are in its namespace."""
        more = [f"{len(self.pods) - _MOST_PODS} more"] if len(self.pods) > _MOST_PODS else []
        shown = ", ".join([*self.pods[:_MOST_PODS], *more])
        pods = f" ({'pod' if len(self.pods) == 1 else 'pods'} {shown})" if shown else ""
        return f"claim {self.namespace}/{self.name}{pods}"


def holding(claims: Mapping[str, Claimed], resource: str) -> dict[str, str]:
    """Say in words which claim has which device of a resource, by device ID."""
    return {
        device.device_id: row.words
        for row in claims.values()
        for device in row.devices
        if device.resource == resource and not device.admin
    }


def on_hardware(claims: Mapping[str, Claimed]) -> Iterable[boards.Claim]:
    """Give what claims hold as claims on hardware, for who offers it by the device plugin API; nobody waits for supervision."""
    for row in claims.values():
        words = f"prepared by DRA for {row.words}"
        for device in row.devices:
            if not device.admin:
                yield boards.Claim(device.resource, device.device_id, device.place, words)
