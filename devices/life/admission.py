"""Whether a container may be given the devices that it asks for, by the state of each, and in which words it is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from devices.life.states import COUNTED, TABLE, Entry, State
from devices.model import Fault, RefusedError

JUST_TURNED_S: Final = 1.0
"""How long after a device turned Unhealthy a request for it may still be the answer to the list before that, in seconds."""


def all_present(device_ids: Sequence[str], entries: Mapping[str, Entry]) -> bool:
    """Whether nothing at all stands against one container's devices: ``judge`` has then neither an objection nor a warning."""
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
    """Decide whether one container may have the devices it asks for.

    Never refuses because a device was handed out before: init and app containers share, and no release is ever told.

    Args:
        resource: the resource name, for the messages.
        device_ids: what the container asks for.
        entries: the list as it was last sent, by device ID.
        now: the clock, in monotonic seconds.
        handed_out: where the kubelet asks again at each start of a container (1.8 does), the devices that containers
            were given before: a refusal would end a running pod. Empty for any other kubelet.
        held: the devices that containers hold by the kubelet's own records, as far as they are known.

    Returns:
        Warnings, one for each reason not to serve a device that is served all the same.

    Raises:
        RefusedError: INVALID_ARGUMENT for no ID at all or one given twice, NOT_FOUND for one that isn't on the list, else
            what the table says.
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
            why = "it turned just now and the kubelet may not know yet"
        else:
            raise RefusedError(row.allocate, f"a container cannot use this device: {known}. {row.way_out}")
        warnings.append(f"{known}; served all the same, because {why}: {row.way_out}")
    return tuple(warnings)


def judge_pre_start(resource: str, device_ids: Sequence[str], entries: Mapping[str, Entry]) -> None:
    """Decide whether the backend may be asked to make a container's devices ready (PreStartContainer).

    The kubelet tries a refused pre-start again, with its restart back-off; a refused admission is final. ``entries`` are as in ``judge``.

    Raises:
        RefusedError: NOT_FOUND for an ID that isn't on the list, else what the table says.
    """
    for entry in _asked(resource, device_ids, entries):
        row = TABLE[entry.state]
        if row.pre_start is not None:
            raise RefusedError(
                row.pre_start,
                f"the backend has not found this device: {_known(resource, entry)}. {row.way_out}",
            )


def awaits_pre_start(entries: Iterable[Entry]) -> bool:
    """Whether PreStartContainer would be refused for any device of a list, so that the kubelet should be asked to call it."""
    return any(TABLE[layer.state].pre_start is not None for entry in entries for layer in entry.layers)


def counted(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Name the devices that another API is about to give back, those first that nobody has any more."""
    found = [(entry.state is State.LENT, entry.device.id) for entry in entries if entry.state in COUNTED]
    return tuple(device_id for _, device_id in sorted(found))


def never_announced(resource: str, device_ids: Sequence[str]) -> RefusedError:
    """The refusal, NOT_FOUND, of at least one device ID that isn't on the list of ``resource``."""
    return RefusedError(
        Fault.NOT_FOUND,
        f"{_some(device_ids)} of {resource} was never announced, or was withdrawn. If the kubelet "
        "keeps asking for it, drain the node and restart the kubelet, so that it learns the "
        "devices again",
    )


def _asked(resource: str, device_ids: Sequence[str], entries: Mapping[str, Entry]) -> Iterator[Entry]:
    """The entries of these devices, each followed by what it covers."""
    if unknown := [device_id for device_id in device_ids if device_id not in entries]:
        raise never_announced(resource, unknown)
    return (layer for device_id in device_ids for layer in entries[device_id].layers)


def _known(resource: str, entry: Entry) -> str:
    known = f"device {_shown(entry.device.id)} of {resource} is {entry.state.value}"
    return f"{known} ({entry.reason})" if entry.reason else known


def _some(device_ids: Sequence[str]) -> str:
    """Name some IDs, of any number and any length."""
    first, *rest = device_ids
    return _shown(first) + (f" and {len(rest)} more" if rest else "")


def _shown(device_id: str) -> str:
    return repr(device_id) if len(device_id) <= 80 else f"{device_id[:80]!r}…"
