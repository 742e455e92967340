"""Replicas: one device that is offered several times, as ``<id>::0``, ``<id>::1`` and so on.

The form is that of NVIDIA's device plugin (internal/rm of 0.17), so that a kubelet's checkpoint stays valid when the plugin is
replaced. A vendor's own ID may look like it, so callers that know the IDs pass them (``known``), and those are never split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import Final

MARK: Final = "::"
"""The mark between the ID of a device and the number of the replica."""


def ids(device_id: str, count: int) -> tuple[str, ...]:
    """Return the IDs under which a device is offered ``count`` times; 0: its own ID, unshared."""
    return tuple(f"{device_id}{MARK}{number}" for number in range(count)) if count else (device_id,)


def unshared(device_id: str, known: Container[str] = ()) -> str:
    """Return the ID of the device that an ID is a replica of, or the ID itself."""
    if device_id in known:
        return device_id
    shared, _, number = device_id.rpartition(MARK)
    return shared if shared and number.isascii() and number.isdecimal() else device_id


def grouped(device_ids: Iterable[str], known: Container[str] = ()) -> Mapping[str, list[str]]:
    """Group device IDs by the result of ``unshared``."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for one in device_ids:
        groups[unshared(one, known)].append(one)
    return groups


def is_replica(device_id: str, known: Container[str] = ()) -> bool:
    """Return True if an ID is a replica's."""
    return unshared(device_id, known) != device_id
