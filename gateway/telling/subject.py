"""The gateway that is told of: what its commands, probes and metrics ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gateway.telling.served import Verdict, verdict

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from devices.source import DeviceSource, Facts, Hindrance
    from gateway.age import Age
    from gateway.configuration.reload import FileFate
    from gateway.configuration.settings import Settings
    from gateway.kubelet.beliefs import Beliefs
    from gateway.kubelet.presence import Presence
    from gateway.memory.holdings import Holdings
    from gateway.memory.ledger import Ledger
    from gateway.memory.scribe import Scribe
    from gateway.registration.registrar import Resource
    from gateway.sides.table import Stand
    from gateway.tally import Tally
    from gateway.telling.sides import ByNameStatus, DriverStatus


class SubjectDrivers(Protocol):
    """The DRA drivers of a gateway."""

    @property
    def alone(self) -> bool:
        """Whether devices are offered by DRA alone."""

    def standing(self, resource: str) -> DriverStatus:
        """Return how the driver of a resource stands with the kubelet."""

    @property
    def trouble(self) -> str:
        """Why the node's annotation isn't followed."""

    @property
    def by_name(self) -> ByNameStatus:
        """What is wrong for pods that ask by name."""

    def standings(self) -> Sequence[DriverStatus]:
        """Say how each driver stands."""

    def stranger(self, device_id: str, about: Facts) -> str:
        """Say which other DRA driver offers a device on this node, too; '' for none."""

    def stands(self) -> Sequence[Stand]:
        """Say where each GPU is, where both APIs are served."""


class Subject(Protocol):
    """A gateway."""

    @property
    def age(self) -> Age:
        """Its own age."""

    @property
    def token(self) -> str:
        """Its own token."""

    @property
    def settings(self) -> Settings:
        """What it was told."""

    @property
    def source(self) -> DeviceSource:
        """Where devices come from."""

    @property
    def ledger(self) -> Ledger:
        """What it remembers."""

    @property
    def scribe(self) -> Scribe:
        """Writes that."""

    @property
    def beliefs(self) -> Beliefs:
        """The kubelet's records."""

    @property
    def holdings(self) -> Holdings:
        """Who holds what on the node."""

    @property
    def presence(self) -> Presence:
        """The kubelet that is there."""

    @property
    def tally(self) -> Tally:
        """What it counted."""

    @property
    def config(self) -> FileFate:
        """What became of its configuration file."""

    @property
    def resources(self) -> Sequence[Resource]:
        """Its resources."""

    @property
    def started(self) -> float:
        """When it started (monotonic seconds)."""

    @property
    def begun(self) -> bool:
        """Whether it is done with its start."""

    @property
    def led_by(self) -> Age | None:
        """The gateway that leads, unless that is this one, or nobody is known to."""

    @property
    def could_lead(self) -> bool:
        """Whether it stands by, and would lead as soon as the other gateway ends."""

    @property
    def waits_for(self) -> str:
        """What its start waits for, and why; empty where it doesn't."""

    @property
    def drivers(self) -> SubjectDrivers | None:
        """Its DRA drivers, where devices are offered by them."""

    def hindrances(self) -> Sequence[Hindrance]:
        """Say what keeps the sources of devices from telling of them."""

    @property
    def lock(self) -> asyncio.Lock:
        """Held while its lists are put together."""

    async def update(self) -> None:
        """Bring every resource's list up to date."""


def leader_name(leader: Age) -> str:
    """Return what people call a gateway that leads."""
    return "host service" if leader.host_service else leader.token


def kubelet_s(gateway: Subject, now: float) -> float | None:
    """Return how many seconds ago the kubelet was found that listens; None: none does."""
    presence = gateway.presence
    return now - (presence.since or now) if presence.listens() else None


def verdicts(gateway: Subject, now: float) -> Mapping[str, Verdict]:
    """Return the verdict on each resource, by name, at ``now`` (monotonic seconds)."""
    drivers, leader, found_s = gateway.drivers, gateway.led_by, kubelet_s(gateway, now)
    alone = drivers if drivers is not None and drivers.alone else None
    return {
        one.name: verdict(
            one.state.phase,
            refused=one.state.refused,
            checked=one.checked,
            trouble=one.trouble,
            since_s=now - one.since,
            kubelet_s=found_s,
            leader="" if leader is None else leader_name(leader),
            driver=None if alone is None else alone.standing(one.name),
        )
        for one in gateway.resources
    }
