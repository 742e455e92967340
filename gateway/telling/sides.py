"""The part of the status about Dynamic Resource Allocation: the drivers, and the side of each GPU. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from devices.source import Facts
    from gateway.sides.table import BoardStatus
    from gateway.wires.control import Handler


class DriverStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A DRA driver of the gateway, with the number of ``devices`` that it offers and of ``claims`` that have some.

    ``registered`` is true while a kubelet accepts it; that changed ``since_s`` ago (null: never). ``trouble`` is why a kubelet
    refused it. ``unpublished`` is why its ResourceSlices aren't up to date; empty if they are. ``rival`` names another process
    with the driver's name, and what the gateway waits for. ``refused`` are the claims that were refused in the last two minutes,
    with the reasons.
    """

    name: str
    devices: int
    registered: bool
    since_s: float | None = None
    trouble: str = ""
    unpublished: str = ""
    claims: int = 0
    rival: str = ""
    refused: tuple[str, ...] = ()


class SideStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A physical GPU, if both APIs are served (``--dra on``).

    ``side`` is the API that gives it (``plugin``, ``dra``), the move that it makes (``to-dra``, ``to-plugin``, ``reclaimed``), or
    ``foreign`` if another DRA driver on this node offers it. ``holder`` is the pod or claim that holds it (null: none, or
    unknown), ``words`` is what the move waits for. It has been moving for ``moving_s`` at least (null: it isn't moving).
    """

    id: str
    side: str
    holder: str | None = None
    words: str = ""
    moving_s: float | None = None


class ByNameStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong for pods that ask by name for GPUs of DRA's; usually empty.

    ``overlooked`` is why they would run without their GPU. While it is set, DRA offers its GPUs to no new claim. ``waiting`` names
    the resources for which such pods wait, because no DeviceClass names them any more.
    """

    overlooked: str = ""
    waiting: str = ""


class SubjectDrivers(Protocol):
    """The DRA drivers of a gateway."""

    @property
    def alone(self) -> bool:
        """True if devices are offered by DRA alone."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by order."""

    def standing(self, resource: str) -> DriverStatus:
        """Return the status of a resource's driver."""

    @property
    def trouble(self) -> str:
        """Why the node's annotation isn't followed."""

    @property
    def by_name(self) -> ByNameStatus:
        """What is wrong for pods that ask by name."""

    def standings(self) -> Sequence[DriverStatus]:
        """Return the status of each driver."""

    def stranger(self, device_id: str, about: Facts) -> str:
        """Return which other DRA driver on this node also offers a device; empty for none."""

    def board_statuses(self) -> Sequence[BoardStatus]:
        """Return where each GPU is; empty unless both APIs are served."""


def sides(statuses: Iterable[BoardStatus], now: float) -> tuple[SideStatus, ...]:
    """Return on which side each GPU is at ``now`` (monotonic seconds)."""
    return tuple(
        SideStatus(
            id=one.board,
            side=one.side.value,
            holder=one.holder or None,
            words=one.words,
            moving_s=None if one.since is None else round(max(0.0, now - one.since), 3),
        )
        for one in statuses
    )
