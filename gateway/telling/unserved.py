"""What of a node's resources nobody serves, by the gateways' own words: for scripts and for ``gateway doctor``. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from gateway.registration.events import Phase

if TYPE_CHECKING:
    from gateway.telling.status import GatewayStatus, ResourceStatus

_BY_DRA: Final = "offered by DRA"
_NOT_YET: Final = "not registered"


def unserved(statuses: Iterable[GatewayStatus]) -> dict[str, str]:
    """Say of each resource with devices that no gateway serves where its registration stands; by name.

    Who stands by for another gateway says nothing. What is offered by DRA is served once the kubelet took the driver.
    """
    all_of = [one for status in statuses for one in status.resources]
    served = {one.name for one in all_of if one.phase == Phase.SERVING.value or _is_claimed(one)}
    return {
        one.name: f"{one.phase}{f': {one.trouble}' if one.trouble else ''}"
        for one in all_of
        if one.listed and one.name not in served and not one.standing_by_for
    }


def _is_claimed(one: ResourceStatus) -> bool:
    return one.phase == Phase.STANDBY.value and one.trouble.startswith(_BY_DRA) and _NOT_YET not in one.trouble
