"""The rows of the state file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from devices.life.merging import Sticky
from devices.model import Device, Health, Trouble, TroubleKind
from gateway.kubelet.earlier import MOST_EARLIER, Earlier, HandedOut

FORMAT = 2
MAX_TEXT = 1024

Content: TypeAlias = dict[str, Any]


class FileState(msgspec.Struct, frozen=True, kw_only=True):
    """The state file, for the status.

    ``writable``: the last write did not fail; otherwise ``error`` is why it did. ``written_s`` is the age of the last successful
    write of this process (null: none yet), ``writes`` counts them, ``pending`` counts the changes that may not be on disk.
    ``put_aside`` is the last damaged file, ``exposed`` is who else could change the file; both are usually empty.
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
    """An order that no new container may get a device. ``at`` is in Unix seconds.

    ``annotated``: it comes from the node's annotation, not from a command.
    """

    reason: str
    at: float
    annotated: bool = False


class _Announced(msgspec.Struct, frozen=True):
    """A row of ``announced``, for validation. The numbers are those of an int64.

    ``part_of`` is there for partitions, ``pci`` if it is known.
    """

    health: Literal["Healthy", "Unhealthy"]
    numa: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]
    part_of: str = ""
    pci: str = ""


class _Sticky(msgspec.Struct, frozen=True):
    """A row of ``sticky``: a trouble that a restart of the gateway does not end. ``at`` is in Unix seconds."""

    reason: str
    kind: str
    at: float
    boot_id: str
    code: str = ""


class _Lost(msgspec.Struct, frozen=True):
    """A row of ``lost``. ``since`` is in Unix seconds."""

    since: float


class EarlierHolders(msgspec.Struct, frozen=True):
    """A row of ``earlier``: the holders of a device, in one boot of the node, before the running kubelet's start."""

    boot_id: str
    holders: Annotated[tuple[Earlier, ...], msgspec.Meta(min_length=1, max_length=MOST_EARLIER + 1)]


TABLES: Mapping[str, type] = {
    "announced": _Announced,
    "lost": _Lost,
    "sticky": _Sticky,
    "handed_out": HandedOut,
    "earlier": EarlierHolders,
}
"""The tables of a resource, with rows by device ID."""


def device_of(device_id: str, row: Content) -> Device:
    """Decode a row of ``announced``."""
    health = (
        Health.HEALTHY if row["health"] == "Healthy" else Health.UNHEALTHY
    )  # To call the Enum takes five times as long.
    return Device(device_id, health, tuple(row["numa"]), row.get("part_of", ""), row.get("pci", ""))


def device_row(device: Device) -> Content:
    """Encode a row of ``announced``."""
    # The health comes last, so that a row that was cut off lacks it.
    part = {"part_of": device.part_of} if device.part_of else {}
    if device.pci:
        part["pci"] = device.pci
    # A tuple, not a list: Python's garbage collector skips tuples of numbers, and 51,200 lists would take half of its time.
    return part | {"numa": device.numa_nodes, "health": device.health.value}


def illness_of(_: str, row: Content) -> Sticky:
    """Decode a row of ``sticky``."""
    trouble = Trouble(row["reason"], TroubleKind.named(row["kind"]), row.get("code", ""))
    return Sticky(trouble, float(row["at"]), row["boot_id"])


def illness_row(illness: Sticky) -> Content:
    """Encode a row of ``sticky``."""
    what = illness.trouble
    return row_of(_Sticky(what.reason, what.kind.value, illness.at, illness.boot_id, what.code))


def row_of(value: Cordon | _Sticky | HandedOut | Earlier) -> Content:
    """Encode a value as a row. Its texts are made fit for JSON and a screen."""
    fields: Content = msgspec.to_builtins(value)
    return {name: fitting(part) for name, part in fields.items()}


def fitting(part: Any) -> Any:
    """Shorten texts, and replace what JSON and a screen can't show."""
    if isinstance(part, str):
        return part[:MAX_TEXT].encode(errors="replace").decode()
    return [fitting(one) for one in part] if isinstance(part, (list, tuple)) else part
