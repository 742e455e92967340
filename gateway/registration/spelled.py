"""A list in a dialect, of which only what changed is spelled anew: one device of 8 000 falls ill, and the kubelet waits for it.

A list is sent whole, but the message has one field, which is repeated, and the parts of such a message joined are the whole
(protobuf: "Last One Wins", https://protobuf.dev/programming-guides/encoding/#last-one-wins). So it is spelled in parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from adapters.dialect import Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.dialect import Dialect
    from devices.model import Device

PART: Final = 256
"""Devices in a part."""

Parts: TypeAlias = "Sequence[tuple[Sequence[Device], Wire]]"


def spell(dialect: Dialect, devices: Sequence[Device], before: Parts) -> tuple[Wire, Parts]:
    """Spell a list, with the parts of the one before that are the same; return its parts for the next one, too.

    Comparing is quick where the devices are the same objects.
    """
    parts: list[tuple[Sequence[Device], Wire]] = []
    for start in range(0, len(devices), PART):
        part = devices[start : start + PART]
        known = before[len(parts)] if len(parts) < len(before) else None
        parts.append(known if known is not None and known[0] == part else (part, dialect.encode_list(part)))
    wires = [wire for _, wire in parts]
    return Wire(b"".join(wire.data for wire in wires), frozenset().union(*(wire.lost for wire in wires))), parts
