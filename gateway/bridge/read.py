"""Decode a plugin's list, of which usually only one device has changed since the last list. Pure.

In every dialect a list has one repeated field, its devices, so the bytes of one device are a valid list of one device. A device with
the same bytes as before is not decoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from adapters.dialect import Dialect
    from devices.model import Device

Known = Mapping[bytes, "Device"]
"""The devices of the last list, by their bytes."""
_DEVICE: Final = 0x0A
"""The first byte of a device: field 1, a message."""
_MORE: Final = 0x80
"""The bit that marks each byte of a length except the last one."""
_LENGTH_BYTES: Final = 3
"""Most bytes of an encoded length: 2 MiB is too long for a device."""


def read(
    dialect: Dialect, data: bytes, known: Known, make: Callable[[Device], Device]
) -> tuple[tuple[Device, ...], Known]:
    """Decode a list. Return its devices, each passed through ``make``, and what is needed to decode the next list.

    Raises:
        MalformedError: it is not a list.
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
    """Split a list into the bytes of its devices; None if it has anything else."""
    parts, at, size = [], 0, len(data)
    while at < size:
        if data[at] != _DEVICE:
            return None
        begin, length = at, 0
        for shift in range(_LENGTH_BYTES):
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
