"""The device list of one resource: its devices, its options, and its message in each dialect.

A list is always sent whole. Because the kubelet waits for it, only the parts with a changed device are encoded again. Encoded
parts can be joined, because the message is one repeated field (protobuf: "Last One Wins",
https://protobuf.dev/programming-guides/encoding/#last-one-wins).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog
from msgspec.structs import replace

from adapters.dialect import Wire
from devices.life import admission, states
from devices.model import Field, Options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.dialect import Dialect
    from devices.model import Device, PreferredRequest
    from devices.source import Listing
    from gateway.tally import Tally

AT_ONCE = 10_000
"""Most devices of a list that is encoded in the event loop. Longer lists are encoded in a thread: 65,000 devices take 0.1 s."""
MAX_LIST_BYTES = 4 * 1024 * 1024
"""Most bytes of a list. Kubelets 1.10 and later refuse a longer message; 1.8 and 1.9 hang for seconds on one."""
PART_DEVICES: Final = 256
"""Devices in a part of a list."""
Parts: TypeAlias = "Sequence[tuple[Sequence[Device], Wire]]"
_log = structlog.get_logger()


class DeviceList:
    """The devices that are offered under one resource name.

    With ``grace``, the list asks for PreStartContainer until the backend has looked for the devices, so that containers wait.
    """

    def __init__(self, name: str, tally: Tally, *, grace: bool) -> None:
        self._name, self._tally, self._grace = name, tally, grace
        self._log = _log.bind(resource=name)
        self.entries: dict[str, states.Entry] = {}
        """The devices with their states, by ID. The dict is replaced, never changed, because threads read it."""
        self.devices: tuple[Device, ...] = ()
        """The devices as the kubelet gets them."""
        self._counted: tuple[str, ...] = ()
        """IDs of devices that DRA will give back, the soonest first."""
        self._listing: Listing | None = None
        self._wires: dict[str, Wire] = {}
        self._parts: dict[str, Parts] = {}
        self._lost_fields: set[tuple[str, Field]] = set()

    def becomes(self, listing: Listing | None, entries: tuple[states.Entry, ...]) -> bool:
        """Set a new list; return True if it differs for the kubelet."""
        if listing is not None and not listing.devices and self._listing is not None:
            # Keep the options: containers that still hold devices need the same calls.
            listing = replace(listing, options=self._listing.options)
        self._listing = listing
        self.entries = {entry.device.id: entry for entry in entries}
        self._counted = admission.counted(entries)
        if (devices := tuple(entry.device for entry in entries)) == self.devices:
            return False
        self.devices = devices
        self._wires.clear()
        return True

    def given_last(self, avoid: Sequence[str], request: PreferredRequest) -> Sequence[str]:
        """Return the devices to give last: ``avoid``, then those that DRA will give back, then unlisted ones."""
        if len(request.must_include) >= request.size:  # There is nothing to choose.
            return ()
        foreign = [one for one in request.available if one not in self.entries]
        return (*(one for one in avoid if one not in self._counted), *self._counted, *foreign)

    def forget(self, device_id: str) -> None:
        """Forget a device's state. The next list judges it as a new device."""
        self.entries = {known: entry for known, entry in self.entries.items() if known != device_id}

    def too_large(self, dialect: Dialect) -> str | None:
        """Return why the list can't be sent in ``dialect``; None if it can."""
        size = len(self.wire(dialect).data)
        if size <= MAX_LIST_BYTES:
            return None
        fits = _how_many_fit(dialect, self.devices, MAX_LIST_BYTES)
        return (
            f"the list of {len(self.entries)} devices takes {size} bytes in {dialect.name}. A message may have "
            f"{MAX_LIST_BYTES}: {fits} devices would fit. Announce fewer devices (fewer replicas), or shorten their IDs"
        )

    def wire(self, dialect: Dialect) -> Wire:
        """Return the encoded list. It is encoded once per dialect and change."""
        wire = self._wires.get(dialect.name)
        if wire is None:
            wire, self._parts[dialect.name] = spell(dialect, self.devices, self._parts.get(dialect.name, ()))
            self._wires[dialect.name] = wire
            self.note_lost(dialect, wire)
        return wire

    async def spell(self, dialect: Dialect) -> None:
        """Encode the parts of a long list in a thread. After that, ``wire`` encodes only parts that have changed since."""
        if dialect.name not in self._wires and len(self.devices) > AT_ONCE:
            known = self._parts.get(dialect.name, ())
            _, self._parts[dialect.name] = await asyncio.to_thread(spell, dialect, self.devices, known)

    @property
    def options(self) -> Options:
        """The options for the kubelet; none until the source has reported its devices."""
        options = self._listing.options if self._listing is not None else Options()
        if self._grace and admission.awaits_pre_start(self.entries.values()):
            return replace(options, pre_start_required=True)
        return options

    def note_lost(self, dialect: Dialect, wire: Wire) -> None:
        """Count the fields that a dialect can't carry, and log each once."""
        for field in wire.lost:
            self._tally.lost_fields.add(dialect.name, field.name.lower())
            if (dialect.name, field) not in self._lost_fields:
                self._lost_fields.add((dialect.name, field))
                self._log.info(
                    "a field was left out",
                    field=field.value,
                    api=dialect.name,
                    reason="this API cannot say it; pods work without",
                )


def _how_many_fit(dialect: Dialect, devices: Sequence[Device], limit: int) -> int:
    """Return how many of the first devices fit into ``limit`` bytes. The size of a list is the sum of its devices' sizes."""
    fits, step = 0, 4096
    while step:
        part = len(dialect.encode_list(devices[fits : fits + step]).data)
        if part <= limit and fits + step <= len(devices):
            fits, limit = fits + step, limit - part
        else:
            step //= 2
    return fits


def spell(dialect: Dialect, devices: Sequence[Device], before: Parts) -> tuple[Wire, Parts]:
    """Encode a list; return it, and its parts for the next call. Parts that equal those of ``before`` are not encoded again."""
    parts: list[tuple[Sequence[Device], Wire]] = []
    for start in range(0, len(devices), PART_DEVICES):
        part = devices[start : start + PART_DEVICES]
        known = before[len(parts)] if len(parts) < len(before) else None
        parts.append(known if known is not None and known[0] == part else (part, dialect.encode_list(part)))
    wires = [wire for _, wire in parts]
    return Wire(b"".join(wire.data for wire in wires), frozenset().union(*(wire.lost for wire in wires))), parts
