"""Decide by the state of each device whether a container may get the devices that it asks for, and word the refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from devices.life.states import COUNTED, TABLE, Entry, State
from devices.model import Fault, RefusedError

JUST_TURNED_S: Final = 1.0
"""Seconds after a device became Unhealthy in which a request for it may still be based on the earlier list."""


def all_present(device_ids: Sequence[str], entries: Mapping[str, Entry]) -> bool:
    """Return True if ``judge`` would neither refuse nor warn."""
    for device_id in device_ids:
        entry = entries.get(device_id)
        if entry is None or entry.state is not State.PRESENT or entry.beneath is not None:
            return False
    return 0 < len(device_ids) == len(set(device_ids))


def judge(
    resource: str,
    device_ids: Sequence[str],
    entries: Mapping[str, Entry],
    *,
    now: float,
    handed_out: Container[str] = frozenset(),
    held: Container[str] = frozenset(),
) -> tuple[str, ...]:
    """Decide whether a container may get the devices it asks for.

    It never refuses because a device was given before: init and app containers share devices, and the kubelet reports no
    release.

    Args:
        resource: the resource name, for the messages.
        device_ids: the devices that the container asks for.
        entries: the list as it was last sent, by device ID.
        now: monotonic seconds.
        handed_out: the devices that were given before, for a kubelet that asks again at each start of a container (1.8): a
            refusal would end a running pod. Empty for any other kubelet.
        held: the devices that containers hold by the kubelet's records, as far as they are known.

    Returns:
        Warnings about devices that are given although they should not be, one per reason.

    Raises:
        RefusedError: INVALID_ARGUMENT for no ID or a repeated one, NOT_FOUND for an ID that isn't on the list, else as in the
            table.
    """
    if not device_ids:
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f"no device ID of {resource} for a container. Ask for one, or don't call",
        )
    if len(frozenset(device_ids)) < len(device_ids):
        twice = [device_id for device_id, count in Counter(device_ids).items() if count > 1]
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            (f"{_some(twice)} of {resource} is more than once in a container's request. Give each ID once"),
        )
    warnings = []
    for entry in _asked(resource, device_ids, entries):
        row = TABLE[entry.state]
        if row.allocate is None:
            continue
        known = _known(resource, entry)
        if entry.device.id in handed_out and (row.lenient or row.held):
            why = "the kubelet asks again for devices that a container was given before"
        elif entry.device.id in held and row.held:
            why = "a container holds it"
        elif row.lenient and entry.since is not None and now - entry.since < JUST_TURNED_S:
            why = "its state changed just now and the kubelet may not know yet"
        else:
            raise RefusedError(row.allocate, f"a container cannot use this device: {known}. {row.way_out}")
        warnings.append(f"{known}; served all the same, because {why}: {row.way_out}")
    return tuple(warnings)


def judge_pre_start(resource: str, device_ids: Sequence[str], entries: Mapping[str, Entry]) -> None:
    """Decide whether the backend may prepare a container's devices (PreStartContainer).

    The kubelet tries a refused pre-start again, with its restart back-off; a refused admission is final. ``entries`` are as in
    ``judge``.

    Raises:
        RefusedError: NOT_FOUND for an ID that isn't on the list, else as in the table.
    """
    for entry in _asked(resource, device_ids, entries):
        row = TABLE[entry.state]
        if row.pre_start is not None:
            raise RefusedError(
                row.pre_start,
                f"the backend has not found this device: {_known(resource, entry)}. {row.way_out}",
            )


def awaits_pre_start(entries: Iterable[Entry]) -> bool:
    """Return True if PreStartContainer would be refused for a device of the list, so that the kubelet should call it."""
    return any(TABLE[layer.state].pre_start is not None for entry in entries for layer in entry.layers)


def counted(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the devices that DRA will give back, those without a holder first."""
    found = [(entry.state is State.DRA_BY_NAME, entry.device.id) for entry in entries if entry.state in COUNTED]
    return tuple(device_id for _, device_id in sorted(found))


def _asked(resource: str, device_ids: Sequence[str], entries: Mapping[str, Entry]) -> Iterator[Entry]:
    """Yield the entries of these devices, each followed by the entries that it covers."""
    if unknown := [device_id for device_id in device_ids if device_id not in entries]:
        raise RefusedError(
            Fault.NOT_FOUND,
            f"{_some(unknown)} of {resource} was never announced, or was withdrawn. If the kubelet keeps asking for it, drain "
            "the node and restart the kubelet, so that it learns the devices again",
        )
    return (layer for device_id in device_ids for layer in entries[device_id].layers)


def _known(resource: str, entry: Entry) -> str:
    known = f"device {_shown(entry.device.id)} of {resource} is {entry.state.value}"
    return f"{known} ({entry.reason})" if entry.reason else known


def _some(device_ids: Sequence[str]) -> str:
    """Return some of the IDs, shortened."""
    first, *rest = device_ids
    return _shown(first) + (f" and {len(rest)} more" if rest else "")


def _shown(device_id: str) -> str:
    return repr(device_id) if len(device_id) <= 80 else f"{device_id[:80]!r}…"
