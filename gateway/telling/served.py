"""The verdict on a resource: whether it is served, why, and since when. Pure.

The status document carries it. Readiness, the node's condition, the metrics, ``gateway doctor`` and ``gateway status --check`` read it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.registration.events import Phase
from gateway.tally import Confirmation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.age import Age
    from gateway.telling.sides import DriverStatus
    from gateway.telling.subject import Subject


class VerdictState(StrEnum):
    """Whether a resource is served."""

    SERVED = "served"
    STANDBY = "standby"
    """Another gateway serves it, or should."""
    WAITING = "waiting"
    """It is not served yet. The gateway goes on trying."""
    REFUSED = "refused"
    """It is not served, and only another kubelet or another list of devices can change that."""


class Reason(StrEnum):
    """Why a resource is served or not, for programs."""

    VERIFIED = "verified"
    UNVERIFIED = "not-verified-yet"
    UNVERIFIABLE = "records-unreadable"
    DRA = "dra-driver-registered"
    LEADER = "another-gateway-leads"
    STOPPED = "stopped"
    NO_KUBELET = "no-kubelet"
    LACKING = "records-lack-it"
    REGISTERING = "registering"
    NO_DRA = "dra-driver-not-registered"
    RIVAL = "dra-driver-of-another-process"
    KUBELET = "kubelet-refuses"
    LIST = "list-fits-no-version"


_STATES: Final = {
    **dict.fromkeys((Reason.VERIFIED, Reason.UNVERIFIED, Reason.UNVERIFIABLE, Reason.DRA), VerdictState.SERVED),
    **dict.fromkeys((Reason.LEADER, Reason.STOPPED), VerdictState.STANDBY),
    **dict.fromkeys((Reason.KUBELET, Reason.LIST), VerdictState.REFUSED),
}
"""All other reasons mean WAITING."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a resource is served, for ``since_s`` seconds (null: unknown).

    ``state`` is served, standby (another gateway serves it), waiting (the gateway goes on trying) or refused (only another kubelet or
    another list of devices helps). ``reason`` is why, in a word for programs. ``why`` is the same for people; empty if nothing is wrong.
    """

    state: str = VerdictState.WAITING
    reason: str = ""
    why: str = ""
    since_s: float | None = None


def verdict(
    phase: Phase,
    *,
    refused: bool = False,
    checked: Confirmation | None = None,
    trouble: str = "",
    since_s: float | None = None,
    kubelet_s: float | None = 0.0,
    leader: str = "",
    driver: DriverStatus | None = None,
) -> Verdict:
    """Return the verdict on one resource.

    Args:
        phase: the phase of its registration.
        refused: True if the kubelet refused the last Register.
        checked: what the last read of the kubelet's records found; None: they were not read yet.
        trouble: the last error of the registration.
        since_s: seconds since its serving state changed: served here, by another gateway, or neither.
        kubelet_s: seconds since the running kubelet was found; None: none runs.
        leader: the other gateway that leads; empty if none does.
        driver: the DRA driver that offers its devices instead of the device plugin API.
    """
    if leader:
        return _verdict(Reason.LEADER, f"{leader} leads", since_s)
    if kubelet_s is None:
        return _verdict(Reason.NO_KUBELET, Phase.ABSENT.value + (f": {trouble}" if trouble else ""), since_s)
    if driver is not None:
        return _of_driver(driver)
    words = phase.value + (f": {trouble}" if trouble else "")
    match phase:
        case Phase.STOPPED:
            return _verdict(Reason.STOPPED, phase.value, since_s)
        case _ if checked is Confirmation.LACKING:
            lacking = "registered, but the kubelet's own records lack it: registering again"
            return _verdict(Reason.LACKING, lacking, since_s)
        case Phase.SERVING if checked is None:
            return _verdict(Reason.UNVERIFIED, "not looked up in the kubelet's records yet", since_s)
        case Phase.SERVING if checked is Confirmation.UNKNOWN:
            return _verdict(Reason.UNVERIFIABLE, "the kubelet's records can't be read", since_s)
        case Phase.SERVING:
            return _verdict(Reason.VERIFIED, "", since_s)
        case Phase.OUT:
            reason = Reason.LIST
        case Phase.WAITING if refused:
            reason = Reason.KUBELET
        case _:
            reason = Reason.REGISTERING
    return _verdict(reason, words, None if since_s is None else min(since_s, kubelet_s))


def _of_driver(driver: DriverStatus) -> Verdict:
    instead = f"offered by DRA: the driver {driver.name} is"
    if driver.registered:
        return _verdict(Reason.DRA, f"{instead} registered", driver.since_s)
    reason = Reason.RIVAL if driver.rival else Reason.NO_DRA
    why = driver.rival or driver.trouble
    return _verdict(reason, f"{instead} not registered" + (f": {why}" if why else ""), driver.since_s)


def _verdict(reason: Reason, why: str, since_s: float | None) -> Verdict:
    since_s = None if since_s is None else round(since_s, 3)
    return Verdict(state=_STATES.get(reason, VerdictState.WAITING), reason=reason, why=why, since_s=since_s)


def leader_name(leader: Age) -> str:
    """Return the leader's name for people."""
    return "host service" if leader.host_service else leader.token


def kubelet_s(gateway: Subject, now: float) -> float | None:
    """Return how many seconds ago the running kubelet was found; None: none runs."""
    presence = gateway.holdings.presence
    return now - (presence.since or now) if presence.listens() else None


def verdicts(gateway: Subject, now: float) -> Mapping[str, Verdict]:
    """Return the verdict on each resource, by name, at ``now`` (monotonic seconds)."""
    drivers, leader, found_s = gateway.drivers(), gateway.lead.led_by, kubelet_s(gateway, now)
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
        for one in gateway.resources.values()
    }
