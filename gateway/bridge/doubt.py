"""Whether a device that a container was given may be given to the next one: a kubelet may have forgotten the first. Pure.

While a kubelet waits for an Allocate, its records of what is in use have the device, but no pod has it yet. Whoever reads its pod-resources
API then, just after another pod ended, makes it count anew by pod (UpdateAllocatedDevices; run on 1.20, 1.28 and 1.37): the device is free to it,
also when the Allocate was answered. So a device whose Allocate took long is in doubt until the kubelet's records showed it free. One that is
in doubt and asked for again is looked up: a refusal makes the kubelet count anew, and so right.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from devices.model import Fault, RefusedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

QUICK: Final = 0.1
"""Seconds of an Allocate after which its devices are in doubt."""
RECORDED: Final = 1.5
"""Seconds after an answer until a kubelet has it in its records for certain."""


class Doubts:
    """The devices of a resource that are in doubt: since when, in monotonic seconds."""

    def __init__(self) -> None:
        self.since: dict[str, float] = {}

    def given(self, device_ids: Collection[str], took: float, now: float, looked: float = math.inf) -> bool:
        """Take note of an Allocate that was answered ``now``, after ``took`` seconds; say whether a device is newly in doubt.

        Those that were already, still are: they were looked up, and that look was made while the Allocate was open. And so are
        those whose Allocate came less than ``QUICK`` seconds after a look (``looked``), or during one: the kubelet may have been
        about to call when it was asked.
        """
        before = len(self.since)
        if took >= QUICK or looked < QUICK or not self.since.keys().isdisjoint(device_ids):
            self.since.update(dict.fromkeys(device_ids, now))
        return len(self.since) > before

    def seen(self, held: Collection[str], at: float) -> bool:
        """Take note of what containers held in a look that began ``at``, while no Allocate was open; say whether doubts are over."""
        over = [one for one, since in self.since.items() if one not in held and since + RECORDED <= at]
        for one in over:
            del self.since[one]
        return bool(over)

    def among(self, device_ids: Collection[str]) -> Collection[str]:
        """Tell which of these are in doubt."""
        return self.since.keys() & device_ids


def is_due(doubts: Iterable[Doubts], looked: float, now: float) -> bool:
    """Say whether to look if doubts are over: the last one of them is twice as old as at the last look, or was not there then.

    A container may hold its device for days, and each look is one more that may fall into another plugin's Allocate.
    """
    newest = max((since for one in doubts for since in one.since.values()), default=None)
    return newest is not None and now - newest >= 2 * (looked - newest)


def refusal(resource: str, doubted: Collection[str], holders: Mapping[str, str] | None) -> RefusedError | None:
    """Say whether devices in doubt may not be given now.

    Args:
        resource: the resource name.
        doubted: those of the request that are in doubt.
        holders: who holds what of the resource by records that were read after the request came; None: they can't be read now.
            Init containers, whose devices the next one of their pod may have, are not among them.
    """
    if holders is None:
        return RefusedError(
            Fault.UNAVAILABLE,
            f"expected the kubelet's pod-resources API to say whether {min(doubted)!r} of {resource} is free, and it doesn't answer: the "
            "kubelet may have forgotten that it gave it away; see why its socket doesn't answer",
        )
    held = sorted(one for one in doubted if one in holders)
    if not held:
        return None
    return RefusedError(
        Fault.FAILED_PRECONDITION,
        f"expected a device that nobody holds, but {held[0]!r} of {resource} is {holders[held[0]]}'s: the kubelet forgot that when its "
        "pod-resources API was read while it waited for an Allocate; it knows again now, so the next pod gets another device",
    )
