"""Resources that nobody serves and devices that the scheduler can't give away, from the gateways' status. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from devices.model import Health
from gateway.registration.events import Phase

if TYPE_CHECKING:
    from gateway.telling.status import DeviceStatus, GatewayStatus, ResourceStatus

_BY_DRA: Final = "offered by DRA"
_NOT_YET: Final = "not registered"
_MOST_NAMED: Final = 4


def unserved(statuses: Iterable[GatewayStatus]) -> dict[str, str]:
    """Say of each resource with devices that no gateway serves where its registration stands; by name.

    Who stands by for another gateway says nothing. What is offered by DRA is served once the kubelet took the driver.
    """
    all_of = [one for status in statuses if not status.led_by for one in status.resources]
    served = {one.name for one in all_of if one.phase == Phase.SERVING.value or _is_claimed(one)}
    return {
        one.name: f"{one.phase}{f': {one.trouble}' if one.trouble else ''}"
        for one in all_of
        if one.listed and one.name not in served
    }


def unschedulable(one: ResourceStatus) -> int:
    """Return how many free devices the scheduler can't give away: it counts allocatable minus requested.

    A pod that holds a device which is not allocatable (cordoned, unhealthy) still requests one (kubernetes#92592). A pod that holds
    it by a claim requests none.
    """
    if not one.held or not one.free:
        return 0
    claimed = sum(map(_is_claim, filter(_is_out, one.devices)))
    return one.free - max(0, one.allocatable - (one.held - claimed))


def unschedulable_words(one: ResourceStatus) -> str:
    """Say that free devices can't be scheduled, why, and what to do; empty if all can."""
    if not (count := unschedulable(one)):
        return ""
    free = "1 free device" if count == 1 else f"{count} free devices"
    held = [each for each in one.devices if each.holder and _is_out(each) and not _is_claim(each)]
    named = ", ".join(f"{each.holder} (its device is {each.state})" for each in held[:_MOST_NAMED])
    more = f" and {len(held) - _MOST_NAMED} more" if len(held) > _MOST_NAMED else ""
    return (
        f"{free} can't be scheduled: pods hold devices that aren't allocatable, and the scheduler counts their requests. "
        f"End those pods, or bring their devices back: {named}{more}"
    )


def _is_out(one: DeviceStatus) -> bool:
    return one.health != Health.HEALTHY.value


def _is_claim(one: DeviceStatus) -> bool:
    return (one.holder or "").startswith("claim ")


def _is_claimed(one: ResourceStatus) -> bool:
    return one.phase == Phase.STANDBY.value and one.trouble.startswith(_BY_DRA) and _NOT_YET not in one.trouble
