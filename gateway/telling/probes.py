"""The probes of a gateway: ``/healthz`` and ``/readyz``.

The event loop answers ``/healthz``, so any answer shows that it runs; devices and kubelet don't matter. ``/readyz`` reports
what ``readiness`` decides.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from gateway.telling import readiness
from gateway.telling.served import kubelet_s, leader_name, verdicts
from gateway.wires import http

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.telling.subject import Subject


def routes(gateway: Subject) -> Mapping[str, http.Handler]:
    """Return the handlers of one gateway, by path."""

    def healthz() -> http.Answer:
        return HTTPStatus.OK, http.TEXT, b"alive\n"

    def readyz() -> http.Answer:
        found = look(gateway)
        status = HTTPStatus.OK if found.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return status, http.TEXT, found.text.encode()

    return {"/healthz": healthz, "/readyz": readyz}


def look(gateway: Subject) -> readiness.Readiness:
    """Return the readiness of a gateway now."""
    now = time.monotonic()
    found = verdicts(gateway, now)
    return readiness.judge(
        [
            readiness.ResourceStanding(
                name=one.name,
                devices=len(one.entries),
                verdict=found[one.name],
                confirmed=one.checked is not None,
                trouble=one.trouble,
            )
            for one in gateway.resources.values()
        ],
        begun=gateway.lead.begun,
        kubelet_s=kubelet_s(gateway, now),
        leader=_leader(gateway),
        hindrances=gateway.hindrances(),
        waits_for=gateway.lead.waits_for,
    )


def _leader(gateway: Subject) -> readiness.LeaderSeen | None:
    one = gateway.lead.led_by
    if one is None:
        return None
    to_take_over = not one.is_newer_than(gateway.instance.age) and not gateway.lead.could_lead
    return readiness.LeaderSeen(leader_name(one), to_take_over=to_take_over)
