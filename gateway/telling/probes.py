"""The probes of the kubelet that runs this gateway as a pod, or of anybody: ``/healthz`` and ``/readyz``.

``/healthz`` is answered by the event loop, so that an answer at all says that it lives; no device and no kubelet counts
there. ``/readyz`` says what ``readiness`` decides.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from gateway.telling import readiness
from gateway.wires import http

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.registration.registrar import Resource
    from gateway.telling.subject import Subject


def routes(gateway: Subject) -> Mapping[str, http.Handler]:
    """Answer for one gateway."""

    def healthz() -> http.Answer:
        return HTTPStatus.OK, http.TEXT, b"alive\n"

    def readyz() -> http.Answer:
        verdict = look(gateway)
        status = HTTPStatus.OK if verdict.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return status, http.TEXT, verdict.text.encode()

    return {"/healthz": healthz, "/readyz": readyz}


def look(gateway: Subject) -> readiness.Verdict:
    """Judge how a gateway stands now."""
    now = time.monotonic()
    since = gateway.presence.since if gateway.presence.since is not None else now
    kubelet_s = now - since if gateway.presence.listens() else None
    leader, hindrances = _leader(gateway), gateway.hindrances()
    if gateway.drivers is not None and gateway.drivers.alone:
        return readiness.judge_drivers(
            gateway.drivers.standings(),
            begun=gateway.begun,
            kubelet_s=kubelet_s,
            leader=leader,
            hindrances=hindrances,
            waits_for=gateway.waits_for,
        )
    return readiness.judge(
        [_standing(resource, now) for resource in gateway.resources],
        begun=gateway.begun,
        kubelet_s=kubelet_s,
        leader=leader,
        hindrances=hindrances,
        waits_for=gateway.waits_for,
    )


def _leader(gateway: Subject) -> readiness.LeaderSeen | None:
    one = gateway.led_by
    if one is None:
        return None
    name = readiness.HOST_SERVICE if one.host_service else one.token
    return readiness.LeaderSeen(name, to_take_over=not one.is_newer_than(gateway.age) and not gateway.could_lead)


def _standing(resource: Resource, now: float) -> readiness.ResourceStanding:
    return readiness.ResourceStanding(
        name=resource.name,
        devices=len(resource.entries),
        phase=resource.state.phase,
        checked=resource.checked,
        stream_s=0.0 if resource.stream_since is None else now - resource.stream_since,
        unserved_s=0.0 if resource.unserved_since is None else now - resource.unserved_since,
        trouble=resource.trouble,
    )
