"""The rows of the ledger: what is written of a device, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from devices.life.merging import Sticky
from devices.model import Device, Health, Trouble, TroubleKind
from gateway.kubelet.drift import MOST_EARLIER, Earlier

FORMAT = 2
MAX_TEXT = 1024

Content: TypeAlias = dict[str, Any]


class FileState(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's memory on disk.

    ``writable``: the last write did not fail; otherwise ``error`` says how it did. ``written_s`` is the age of the last good
    write of this process (null: none yet), ``writes`` counts them, ``pending`` the changes that aren't known to be on disk.
    ``put_aside`` names the damaged file met last, ``exposed`` says who else could change the ledger; both are mostly empty.
    """

    path: str
    writable: bool = True
    error: str = ""
    written_s: float | None = None
    writes: int = 0
    pending: int = 0
    put_aside: str = ""
    exposed: str = ""


class Cordon(msgspec.Struct, frozen=True):
    """An operator's word that a device must not be given to new containers. ``at`` is in unix seconds.

    ``annotated``: it is the node's annotation that says so, and no command.
    """

    reason: str
    at: float
    annotated: bool = False


class HandedOut(msgspec.Struct, frozen=True):
    """That Allocate gave a device to a container; ``dialect`` is empty where only the kubelet's records say so.

    ``holder`` is who has it by those records, and empty until they were looked at.
    """

    dialect: str
    at: float
    holder: str = ""


class _Announced(msgspec.Struct, frozen=True):
    """A row of ``announced`` as it must be. The numbers are what an int64 on the wire can say.

    ``part_of`` is there of partitions only, ``pci`` if it is known.
    """

    health: Literal["Healthy", "Unhealthy"]
    numa: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]
    part_of: str = ""
    pci: str = ""


class _Sticky(msgspec.Struct, frozen=True):
    """A row of ``sticky``: an illness that a restart of the gateway doesn't cure. ``at`` is in unix seconds."""

    reason: str
    kind: str
    at: float
    boot_id: str
    code: str = ""


class _Lost(msgspec.Struct, frozen=True):
    """A row of ``lost``. ``since`` is in unix seconds."""

    since: float


class Forgotten(msgspec.Struct, frozen=True):
    """A row of ``forgotten``: who held a device, in which boot of the node, before a kubelet's start that forgot it."""

    boot_id: str
    pods: Annotated[list[Earlier], msgspec.Meta(min_length=1, max_length=MOST_EARLIER)]


TABLES: Mapping[str, type] = {
    "announced": _Announced,
    "lost": _Lost,
    "sticky": _Sticky,
    "handed_out": HandedOut,
    "forgotten": Forgotten,
}
"""What a resource has rows of, by device ID."""


def device_of(device_id: str, row: Content) -> Device:
    """Read a row of ``announced``."""
    health = (
        Health.HEALTHY if row["health"] == "Healthy" else Health.UNHEALTHY
    )  # To call the Enum takes five times as long.
    return Device(device_id, health, tuple(row["numa"]), row.get("part_of", ""), row.get("pci", ""))


def device_row(device: Device) -> Content:
    """Spell a row of ``announced``."""
    # The health comes last: a damaged row that ends before it has none, and is known to be incomplete.
    part = {"part_of": device.part_of} if device.part_of else {}
    if device.pci:
        part["pci"] = device.pci
    # Python's garbage collector goes through lists, not through tuples of numbers: 51 200 take half of its time.
    return part | {"numa": device.numa_nodes, "health": device.health.value}


def illness_of(_: str, row: Content) -> Sticky:
    """Read a row of ``sticky``."""
    trouble = Trouble(row["reason"], TroubleKind.named(row["kind"]), row.get("code", ""))
    return Sticky(trouble, float(row["at"]), row["boot_id"])


def illness_row(illness: Sticky) -> Content:
    """Spell a row of ``sticky``."""
    what = illness.trouble
    return row_of(_Sticky(what.reason, what.kind.value, illness.at, illness.boot_id, what.code))


def row_of(value: Cordon | _Sticky | HandedOut | Earlier) -> Content:
    """Spell a value as a row, with texts of a size and kind that JSON and a screen can take."""
    fields: Content = msgspec.to_builtins(value)
    return {name: fitting(part) for name, part in fields.items()}


def fitting(part: Any) -> Any:
    """Cut texts to a size, and take out what no screen can show."""
    if isinstance(part, str):
        return part[:MAX_TEXT].encode(errors="replace").decode()
    return [fitting(one) for one in part] if isinstance(part, (list, tuple)) else part
