"""The parts of the gateway that its commands, probes and metrics read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from devices.source import DeviceSource, Hindrance
    from gateway.configuration.reload import FileFate
    from gateway.configuration.settings import Settings
    from gateway.leader.instance import Instance
    from gateway.leader.leadership import Leadership
    from gateway.memory.holdings import Holdings
    from gateway.registration.registrar import Resource
    from gateway.tally import Tally
    from gateway.telling.sides import SubjectDrivers


class Subject(Struct, frozen=True, kw_only=True):
    """The parts of a gateway that its commands, probes and metrics read."""

    settings: Settings
    source: DeviceSource
    holdings: Holdings
    tally: Tally
    config: FileFate
    """The state of its configuration file."""
    resources: Mapping[str, Resource]
    instance: Instance
    lead: Leadership
    started: float
    """When it started (monotonic seconds)."""
    drivers: Callable[[], SubjectDrivers | None]
    """Returns its DRA drivers, which are made again each time it stops leading."""
    hindrances: Callable[[], Sequence[Hindrance]]
    """Returns why the sources of devices can't report them."""
    lock: asyncio.Lock
    """Hold this lock while you merge device lists."""
    update: Callable[[], Awaitable[None]]
    """Updates the lists of all resources."""
