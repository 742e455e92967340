"""Where devices come from: the narrow surface that every kind of hardware, real or simulated, shows the gateway.

NVIDIA's NVML, AMD's sysfs, a simulated node and another vendor's device plugin (a proxied one) all fit it: it pushes
whole lists, as ListAndWatch does, and answers three questions. It never sees a dialect or a kubelet.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from devices.model import ContainerAnswer, ContainerRequest, Device, Options, PreferredRequest, Sayable, Trouble


@dataclass(frozen=True, slots=True)
class Listing:
    """All devices of one resource name, and what the kubelet must do for them."""

    devices: tuple[Device, ...]
    options: Options = Options()
    troubles: Mapping[str, Trouble] = field(default_factory=dict)
    """What is wrong, by device ID. Its kind decides whether the device is ill; where there is none, ``Device.health``."""
    recovered: frozenset[str] = frozenset()
    """IDs of which there is evidence of a reset, newer than any trouble they had: what was remembered of it ends."""
    released: frozenset[str] = frozenset()
    """IDs that can't be looked at now, because an operator or a reset in progress wants nobody to use them: what was
    listed last stays. They needn't be in ``devices``."""


Inventory = Mapping[str, Listing]
"""Everything the node has, by resource name. Always whole: what isn't in it is not there."""


class Fate(Enum):
    """Why a device that was announced isn't listed any more. The values are what people are told."""

    LOST = "lost"
    """The hardware is gone and nobody asked for that."""
    WITHDRAWN = "withdrawn"
    """Somebody wanted it so (configuration, partitions, replicas, another name), or other hardware took its place."""


class DeviceSource(Protocol):
    """One backend. Its methods run on the event loop and must not block it: hardware calls live in threads."""

    name: str

    def watch(self) -> AsyncGenerator[Inventory]:
        """Yield the inventory as soon as it is known, and again, whole, after each change; for ever.

        It is closed (``aclose``) when it is no longer wanted, and then lets go of what it holds.

        A backend that can't see its hardware now (a driver still loading) yields nothing yet and keeps trying. Its
        ending, or any exception out of it, is a defect that the gateway reports.
        """
        ...

    async def answer(self, resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        """Say how a container gets the devices of ``request`` (all known, no duplicates), using only ``sayable`` fields.

        Raises:
            RefusedError: nothing that can be said to this kubelet would give the container its devices.
        """
        ...

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Choose ``request.size`` of the available devices, those that must be included among them."""
        ...

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Make devices ready right before a container starts (PreStartContainer; the kubelet waits 30 s).

        Raises:
            RefusedError: the devices can't be made ready; the kubelet tries again with its restart back-off.
        """
        ...

    def fate(self, resource: str, device_id: str) -> Fate:
        """Say why a device of ``resource`` isn't in the last inventory. Must not block, and never raises.

        ``LOST`` where it isn't known: such a device stays on the list.
        """
        ...
