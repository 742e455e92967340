"""The devices that are prepared for ResourceClaims, from the state file. No other pod or claim gets them until they are unprepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from devices import boards

_MAX_SHOWN_PODS = 3


class ClaimedDevice(Struct, frozen=True):
    """A device that is prepared for a claim.

    ``name`` is its name in the driver's pool; ``resource`` and ``device_id`` are its names in the device plugin API. ``requests`` are
    the claim's requests that got it. ``share``: the share's ID, '' if the claim has the whole device. ``admin``: allocated with ``adminAccess``.
    ``former``: the claim has since been allocated other devices. ``interval``: its GPU's time-slice interval ('': the default).
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
        """The place of the device when it was prepared."""
        return boards.Place(self.board, self.part)

    @property
    def share_name(self) -> str:
        """``name``, or ``name-share``. Replicas of the same share have the same name."""
        return f"{self.name}-{self.share}" if self.share else self.name


class Claimed(Struct, frozen=True):
    """The devices that a driver prepared for a claim, at the time ``at`` (Unix seconds).

    ``pods`` are the pods that the claim was reserved for at that time. ``by_name``: the scheduler made the claim for a pod that
    requests an extended resource.
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
        more = [f"{len(self.pods) - _MAX_SHOWN_PODS} more"] if len(self.pods) > _MAX_SHOWN_PODS else []
        shown = ", ".join([*self.pods[:_MAX_SHOWN_PODS], *more])
        pods = f" ({'pod' if len(self.pods) == 1 else 'pods'} {shown})" if shown else ""
        return f"claim {self.namespace}/{self.name}{pods}"


def held_devices(claims: Mapping[str, Claimed]) -> Iterator[tuple[str, Claimed, ClaimedDevice]]:
    """Yield each device that a claim holds, with the claim and its key. Devices with ``adminAccess`` are not held."""
    return ((key, row, one) for key, row in claims.items() for one in row.devices if not one.admin)


def claim_holders(claims: Mapping[str, Claimed], resource: str) -> dict[str, str]:
    """Return the claim that holds each device of a resource, for display, by device ID."""
    return {one.device_id: row.words for _, row, one in held_devices(claims) if one.resource == resource}


def holds(claims: Mapping[str, Claimed], except_uid: str = "") -> Iterator[boards.Hold]:
    """Yield what claims hold, except the claim with this UID. One claim may have devices of several drivers."""
    for key, row, one in held_devices(claims):
        if not key.startswith(f"{except_uid}@"):
            sliced = f", with the time-slice interval {one.interval}" if one.interval else ""
            yield boards.held(one.resource, one.device_id, one.place, row.words + sliced, alone=bool(sliced))
