"""Convert between a plugin in memory and its row in the plugins' file. The file has Unix times, the shield monotonic ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from devices.model import Device, Health, Options
from gateway.bridge import judge, memory
from gateway.bridge.shield import Word

if TYPE_CHECKING:
    from gateway.bridge.plugin import Bridged


def remembered(one: Bridged) -> memory.Plugin | None:
    """Return the row to write; None if the plugin never registered."""
    word = one.word
    if one.path is None:
        return None
    since = None if word.away_since is None else time.time() - (time.monotonic() - word.away_since)
    return memory.Plugin(
        resource=one.resource,
        folder=one.folder,
        endpoint=one.path.name,
        api=one.api,
        devices=_rows(one),
        pre_start=word.options.pre_start_required,
        preferred=word.options.preferred_allocation,
        away_since=since,
        why=word.why[:4096],
        answers=tuple(memory.EarlierAnswer(tuple(sorted(asked)), given) for asked, given in one.answers.items()),
        socket=one.registered_on,
        listed=word.devices is not None,
    )


def _rows(one: Bridged) -> tuple[memory.DeviceRow, ...]:
    """Return the devices to write. They are converted once per list, because those of all plugins take tens of milliseconds."""
    devices = one.word.devices or ()
    if one.rows[0] is not devices:
        one.rows = (
            devices,
            tuple(memory.DeviceRow(each.id, each.health is Health.HEALTHY, each.numa_nodes) for each in devices),
        )
    return one.rows[1]


def recalled(row: memory.Plugin) -> Word:
    """Return what the row says. A plugin that was away still is, since the same time."""
    listed = tuple(
        judge.placed(
            row.resource, Device(one.id, Health.HEALTHY if one.well else Health.UNHEALTHY, judge.numa_nodes(one.numa))
        )
        for one in row.devices
    )
    devices = listed if row.listed else None
    options = Options(row.pre_start, row.preferred)
    if row.away_since is None:
        return Word(devices, options)
    since = time.monotonic() - max(0.0, time.time() - row.away_since)
    return Word(devices, options, since, row.why)
