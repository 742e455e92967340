"""Replicas: one device offered several times, as ``<id>::0``, ``<id>::1``, …: how such IDs are made and read.

The form is that of NVIDIA's device plugin (internal/rm of 0.17), so that a checkpoint from before a swap stays true. An ID of a
vendor's own may look like it: whoever knows the IDs that there are says so (``known``), and those are never taken apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import Final

MARK: Final = "::"
"""What stands between the ID of a device and the number of the replica."""


def ids(device_id: str, count: int) -> tuple[str, ...]:
    """Return the IDs under which a device is offered ``count`` times; 0: as itself, unshared."""
    return tuple(f"{device_id}{MARK}{number}" for number in range(count)) if count else (device_id,)


def unshared(device_id: str, known: Container[str] = ()) -> str:
    """Return the ID of what a device is a replica of, or its own where it is none."""
    if device_id in known:
        return device_id
    shared, _, number = device_id.rpartition(MARK)
    return shared if shared and number.isascii() and number.isdecimal() else device_id


def grouped(device_ids: Iterable[str], known: Container[str] = ()) -> Mapping[str, list[str]]:
    """Group device IDs by what ``unshared`` returns for each: its rule once more, as a call for each of thousands takes long."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for one in device_ids:
        shared, _, number = one.rpartition(MARK)
        groups[shared if shared and number.isascii() and number.isdecimal() and one not in known else one].append(one)
    return groups


def is_replica(device_id: str, known: Container[str] = ()) -> bool:
    """Whether an ID is a replica's."""
    return unshared(device_id, known) != device_id
