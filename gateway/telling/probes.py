"""The probes of the kubelet that runs this gateway as a pod, or of anybody: ``/healthz`` and ``/readyz``.

``/healthz`` is answered by the event loop, so that an answer at all says that it lives; no device and no kubelet counts
there. ``/readyz`` says what ``readiness`` decides.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from gateway.telling import readiness
from gateway.wires import http

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from devices.source import Hindrance
    from gateway.age import Age
    from gateway.handover.standby import Standby
    from gateway.kubelet.presence import Presence
    from gateway.registration.registrar import Resource
    from gateway.telling.sides import DriverStatus


class JudgedDrivers(Protocol):
    """The DRA drivers of a gateway."""

    @property
    def alone(self) -> bool:
        """Whether devices are offered by DRA alone."""

    def standings(self) -> Sequence[DriverStatus]:
        """Say where each of them stands."""


class Judged(Protocol):
    """The gateway that is judged."""

    @property
    def begun(self) -> bool:
        """Whether it is done with its start."""

    @property
    def waits_for(self) -> str:
        """What its start waits for, and why; empty where it doesn't."""

    @property
    def age(self) -> Age:
        """Its own age."""

    @property
    def resources(self) -> Sequence[Resource]:
        """Its resources."""

    @property
    def presence(self) -> Presence:
        """The kubelet that is there."""

    @property
    def standby(self) -> Standby:
        """What is known of the resources that another gateway is to serve."""

    @property
    def door(self) -> JudgedDrivers | None:
        """Its DRA drivers, where devices are offered by them."""

    def hindrances(self) -> Sequence[Hindrance]:
        """Say what keeps the sources of devices from telling of them."""

    def left(self) -> list[str]:
        """Name the resources that are left to another gateway for now."""


def routes(gateway: Judged) -> Mapping[str, http.Handler]:
    """Answer for one gateway."""

    def healthz() -> http.Answer:
        return HTTPStatus.OK, http.TEXT, b"alive\n"

    def readyz() -> http.Answer:
        verdict = look(gateway)
        status = HTTPStatus.OK if verdict.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return status, http.TEXT, verdict.text.encode()

    return {"/healthz": healthz, "/readyz": readyz}


def look(gateway: Judged) -> readiness.Verdict:
    """Judge how a gateway stands now."""
    now = time.monotonic()
    since = gateway.presence.since if gateway.presence.since is not None else now
    kubelet_s = now - since if gateway.presence.listens() else None
    if gateway.door is not None and gateway.door.alone:
        return readiness.judge_drivers(
            gateway.door.standings(), begun=gateway.begun, kubelet_s=kubelet_s, hindrances=gateway.hindrances()
        )
    return readiness.judge(
        [_standing(resource, gateway, now) for resource in gateway.resources],
        begun=gateway.begun,
        kubelet_s=kubelet_s,
        hindrances=gateway.hindrances(),
        left=gateway.left(),
        waits_for=gateway.waits_for,
    )


def _standing(resource: Resource, gateway: Judged, now: float) -> readiness.ResourceStanding:
    own, other = gateway.age, resource.standing_by_for
    return readiness.ResourceStanding(
        name=resource.name,
        devices=len(resource.entries),
        phase=resource.state.phase,
        checked=resource.checked,
        stream_s=0.0 if resource.stream_since is None else now - resource.stream_since,
        unserved_s=0.0 if resource.unserved_since is None else now - resource.unserved_since,
        standing_by_for="" if other is None else readiness.HOST_SERVICE if other.host_service else other.token,
        lacking_s=gateway.standby.lacking(resource.name, now),
        to_take_over=other is not None and other < own,
        trouble=resource.trouble,
    )
