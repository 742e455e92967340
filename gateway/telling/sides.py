"""What the status says of dynamic resource allocation: the drivers, and on which side each GPU is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from devices.source import Facts
    from gateway.sides.table import Stand
    from gateway.wires.control import Handler


class DriverStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A DRA driver of the gateway, with so many ``devices`` to offer, and as many ``claims`` that have some.

    ``registered``: the kubelet took it, or lost it, ``since_s`` ago (null: neither yet). If not, ``trouble`` is the reason it gave. ``unpublished`` says why its ResourceSlices
    aren't what they should be, and is mostly empty. ``rival`` names another process that has the driver's name, and says what is waited for.
    ``refused`` says which claims were refused in the last two minutes, and why.
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
    """A physical GPU where both APIs are served (``--dra on``).

    ``side`` is the one that gives it away (``plugin``, ``dra``), or where it is on its way (``to-dra``, ``to-plugin``, ``reclaimed``); ``foreign``:
    another DRA driver on this node offers it.
    ``holder`` is who has it by either (null: nobody, or it isn't known), ``words`` say what it waits for. It has been on its way for
    ``moving_s``, as far as this process knows (null: it isn't).
    """

    id: str
    side: str
    holder: str | None = None
    words: str = ""
    moving_s: float | None = None


class ByNameStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong for pods that ask by name for what is DRA's; mostly all is empty.

    ``overlooked`` says why they would run without their GPU: as long as it does, DRA offers its GPUs to nobody new. ``waiting`` says for
    which resources they wait, because no DeviceClass names them any more.
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
        """Return how the driver of a resource stands with the kubelet."""

    @property
    def trouble(self) -> str:
        """Why the node's annotation isn't followed."""

    @property
    def by_name(self) -> ByNameStatus:
        """What is wrong for pods that ask by name."""

    def standings(self) -> Sequence[DriverStatus]:
        """Return how each driver stands with the kubelet."""

    def stranger(self, device_id: str, about: Facts) -> str:
        """Return which other DRA driver on this node also offers a device; empty for none."""

    def stands(self) -> Sequence[Stand]:
        """Return on which side each GPU is; nothing unless both APIs are served."""


def sides(stands: Iterable[Stand], now: float) -> tuple[SideStatus, ...]:
    """Return on which side each GPU is at ``now`` (monotonic seconds)."""
    return tuple(
        SideStatus(
            id=one.board,
            side=one.side.value,
            holder=one.holder or None,
            words=one.words,
            moving_s=None if one.since is None else round(max(0.0, now - one.since), 3),
        )
        for one in stands
    )
