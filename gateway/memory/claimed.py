"""What was prepared for a ResourceClaim, as the ledger remembers it: a GPU of it is nobody else's until it is unprepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from devices import boards

_MOST_PODS = 3


class ClaimedDevice(Struct, frozen=True):
    """A device that a claim has: what it is called in its driver's pool, what it is here, and where on the hardware.

    ``requests`` are the claim's requests that it is for, ``share`` names the share that it has of it ('': all). ``admin``: it is there for
    supervision. ``former``: its claim was allocated others since. ``interval`` is the time-slice interval of its GPU ('': the default).
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
    interval: str = ""

    @property
    def place(self) -> boards.Place:
        """Where it is, or was when it was prepared."""
        return boards.Place(self.board, self.part)

    @property
    def part_name(self) -> str:
        """What tells it from the claim's other devices: its name, with the share if it is one. Several replicas may be one share."""
        return f"{self.name}-{self.share}" if self.share else self.name


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


def given(claims: Mapping[str, Claimed]) -> Iterator[tuple[str, Claimed, ClaimedDevice]]:
    """Give each device that a claim has, with the claim and its key. What is there for supervision is taken from nobody."""
    return ((key, row, one) for key, row in claims.items() for one in row.devices if not one.admin)


def holding(claims: Mapping[str, Claimed], resource: str) -> dict[str, str]:
    """Return for people which claim holds each device of a resource, by device ID."""
    return {one.device_id: row.words for _, row, one in given(claims) if one.resource == resource}


def holds(claims: Mapping[str, Claimed], besides: str = "") -> Iterator[boards.Hold]:
    """Give what claims hold, but for the one with the UID ``besides``: several drivers may have devices of one."""
    for key, row, one in given(claims):
        if not key.startswith(f"{besides}@"):
            sliced = f", with the time-slice interval {one.interval}" if one.interval else ""
            yield boards.held(one.resource, one.device_id, one.place, row.words + sliced, alone=bool(sliced))
