"""The devices that are prepared for ResourceClaims, as the state file has them. Nobody else gets them until they are unprepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from devices import boards

_MOST_PODS = 3


class ClaimedDevice(Struct, frozen=True):
    """A device that a claim has: its name in the pool of its driver, its names in the device plugin API, and its place.

    ``requests`` are the claim's requests that it is for. ``share`` is the name of the claim's share of it ('': all of it).
    ``admin``: it is there for supervision. ``former``: the claim was allocated other devices since. ``interval`` is the time-slice
    interval of its GPU ('': the default).
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
        """The place of the device, as of when it was prepared."""
        return boards.Place(self.board, self.part)

    @property
    def part_name(self) -> str:
        """Its name among the claim's devices, with the share if it is one. Several replicas may be one share."""
        return f"{self.name}-{self.share}" if self.share else self.name


class Claimed(Struct, frozen=True):
    """The devices that a driver prepared for a claim; ``at`` is in Unix seconds, ``pods`` are those for which it was reserved then.

    ``by_name``: the scheduler made the claim for a pod that asked for a resource by name.
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
        """The claim for people: ``claim ns/c (pod p)``. Its pods are in its namespace."""
        more = [f"{len(self.pods) - _MOST_PODS} more"] if len(self.pods) > _MOST_PODS else []
        shown = ", ".join([*self.pods[:_MOST_PODS], *more])
        pods = f" ({'pod' if len(self.pods) == 1 else 'pods'} {shown})" if shown else ""
        return f"claim {self.namespace}/{self.name}{pods}"


def given(claims: Mapping[str, Claimed]) -> Iterator[tuple[str, Claimed, ClaimedDevice]]:
    """Yield each device that a claim holds, with the key of the claim and the claim. Devices for supervision are held by nobody."""
    return ((key, row, one) for key, row in claims.items() for one in row.devices if not one.admin)


def holding(claims: Mapping[str, Claimed], resource: str) -> dict[str, str]:
    """Return for people which claim holds each device of a resource, by device ID."""
    return {one.device_id: row.words for _, row, one in given(claims) if one.resource == resource}


def holds(claims: Mapping[str, Claimed], besides: str = "") -> Iterator[boards.Hold]:
    """Yield what claims hold, except the claim with the UID ``besides``. Several drivers may have devices of one claim."""
    for key, row, one in given(claims):
        if not key.startswith(f"{besides}@"):
            sliced = f", with the time-slice interval {one.interval}" if one.interval else ""
            yield boards.held(one.resource, one.device_id, one.place, row.words + sliced, alone=bool(sliced))
