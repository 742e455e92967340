"""Reads a plugin's list, in which mostly one device differs from the list before. Pure.

In every dialect a list is nothing but its devices, one message after another under field 1, so each by itself is a list of one.
A device that was read before is recognised by its bytes, and needn't be read or compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from adapters.dialect import Dialect
    from devices.model import Device

Known = Mapping[bytes, "Device"]
"""The devices of the list before, by their bytes."""
_DEVICE: Final = 0x0A
_MORE: Final = 0x80
_LONGEST: Final = 3
"""Bytes of a length: a device of 2 MiB is none."""


def read(
    dialect: Dialect, data: bytes, known: Known, make: Callable[[Device], Device]
) -> tuple[tuple[Device, ...], Known]:
    """Read a list; return its devices, each as ``make`` made of it, and what is known of them for the next one.

    Raises:
        MalformedError: it is none.
    """
    parts = _split(data)
    if parts is None:
        return tuple(map(make, dialect.decode_list(data))), {}
    fresh = dict.fromkeys(part for part in parts if part not in known)
    decoded = dialect.decode_list(b"".join(fresh))
    found = dict(zip(fresh, map(make, decoded), strict=True))
    devices = tuple(known[part] if part in known else found[part] for part in parts)
    return devices, dict(zip(parts, devices, strict=True))


def _split(data: bytes) -> list[bytes] | None:
    """Part a list into its devices' bytes; None where it isn't that plain."""
    parts, at, size = [], 0, len(data)
    while at < size:
        if data[at] != _DEVICE:
            return None
        begin, length = at, 0
        for shift in range(_LONGEST):
            at += 1
            if at >= size:
                return None
            length |= (data[at] & ~_MORE) << 7 * shift
            if data[at] < _MORE:
                break
        else:
            return None
        at += 1 + length
        parts.append(data[begin:at])
    return parts
