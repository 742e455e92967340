"""Resources that no gateway serves, and free devices that the scheduler can't give away, from the gateways' status. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from devices.model import Health
from gateway.telling.served import VerdictState

if TYPE_CHECKING:
    from gateway.telling.status import DeviceStatus, GatewayStatus, ResourceStatus

_MAX_NAMED: Final = 4


def unserved(statuses: Iterable[GatewayStatus]) -> dict[str, str]:
    """Return, by name, each resource that has devices and that none of these gateways serves, with the reason."""
    resources = [one for status in statuses for one in status.resources]
    served = {one.name for one in resources if one.verdict.state == VerdictState.SERVED}
    return {
        one.name: one.verdict.why
        for one in resources
        if one.listed and one.name not in served and one.verdict.state != VerdictState.STANDBY
    }


def unschedulable(one: ResourceStatus) -> int:
    """Return how many free devices the scheduler can't use: it counts allocatable devices minus requested ones.

    A pod still requests one device if the device that it holds is no longer allocatable (cordoned, unhealthy; kubernetes#92592). A
    pod that holds a device by a claim requests none.
    """
    if not one.held or not one.free:
        return 0
    claimed = sum(each.by_claim for each in one.devices if _is_out(each))
    return one.free - max(0, one.allocatable - (one.held - claimed))


def unschedulable_words(one: ResourceStatus) -> str:
    """Return, for people, why free devices can't be scheduled, and what to do; empty if all can."""
    if not (count := unschedulable(one)):
        return ""
    free = "1 free device" if count == 1 else f"{count} free devices"
    held = [each for each in one.devices if each.holder and _is_out(each) and not each.by_claim]
    named = ", ".join(f"{each.holder} (its device is {each.state})" for each in held[:_MAX_NAMED])
    more = f" and {len(held) - _MAX_NAMED} more" if len(held) > _MAX_NAMED else ""
    return (
        f"{free} can't be scheduled: pods hold devices that aren't allocatable, and the scheduler counts their requests. "
        f"End those pods, or bring their devices back: {named}{more}"
    )


def _is_out(one: DeviceStatus) -> bool:
    return one.health != Health.HEALTHY.value
