"""Log what changed in a list: one line for each device whose state changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from devices.life.states import AWAY, State
from devices.model import Health

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from devices.life.states import Entry

MAX_LINES: Final = 16
"""Most log lines per list."""

_log = structlog.get_logger()


def tell(resource: str, before: Mapping[str, Entry], after: Mapping[str, Entry]) -> None:
    """Log the differences between the lists ``before`` and ``after``, for at most ``MAX_LINES`` devices."""
    untold = 0
    for number, (device_id, was, now) in enumerate(_changed(before, after)):
        if number >= MAX_LINES:
            untold += 1
            continue
        # A device that DRA has is Unhealthy in the kubelet's list, but nothing is wrong with it.
        worse = now is not None and now.device.health is not Health.HEALTHY and now.state not in AWAY
        (_log.warning if worse else _log.info)(
            "device changed",
            resource=resource,
            device=device_id,
            was="not listed" if was is None else was.state.value,
            now="not listed" if now is None else now.state.value,
            **({"kind": now.kind.value} if now is not None and now.kind is not None else {}),
            **({"reason": now.reason} if now is not None and now.reason else {}),
        )
    if untold:
        _log.warning("more devices changed", resource=resource, devices=untold, advice="gateway devices lists them all")


def _changed(
    before: Mapping[str, Entry], after: Mapping[str, Entry]
) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """Yield each device whose state or reason changed, with its earlier entry."""
    for device_id, now in after.items():
        was = before.get(device_id)
        if was is now:
            continue
        if was is None or was.state is State.NOT_LOOKED_YET:
            # At the start all devices are new. The log line "serving" counts them.
            if (before and was is None) or now.state not in {State.PRESENT, State.NOT_LOOKED_YET}:
                yield device_id, was, now
        elif (was.state, was.kind, was.reason) != (now.state, now.kind, now.reason):
            yield device_id, was, now
    for device_id in before.keys() - after.keys():
        yield device_id, before[device_id], None
