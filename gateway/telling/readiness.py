"""Readiness: does this gateway do its work? From the verdict on each resource, it makes the lines of ``/readyz``. Pure.

A gateway that isn't ready stops a rolling update and raises alerts. So it is unready only if a running kubelet doesn't get its
resources, or if it can't carry out its configuration. Missing or unhealthy devices, a failed backend, a missing kubelet and another
leader are only reported: a new gateway could not change them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from gateway.telling.served import Reason, Verdict, VerdictState
from gateway.wires.log import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devices.source import Hindrance

CALL_BACK_S: Final = 10.0
"""Seconds for which a confirmed resource may be without the kubelet's stream: a kubelet may take so long to call back."""
_MAX_LINES: Final = 32
_LINE_CHARS: Final = 400


class ResourceStanding(Struct, frozen=True, kw_only=True):
    """What readiness needs to know of one resource."""

    name: str
    devices: int
    verdict: Verdict
    confirmed: bool = False
    """True if the kubelet's records were checked for it since the gateway's start."""
    trouble: str = ""
    """The last error of its registration."""


class LeaderSeen(Struct, frozen=True):
    """The other gateway that leads. ``to_take_over`` is True if this gateway should take over from it, and couldn't."""

    name: str
    to_take_over: bool = False

    @property
    def words(self) -> str:
        """The line for people."""
        return f"standby: {self.name} leads" + (", and this gateway could not" if self.to_take_over else "")


class Readiness(Struct, frozen=True):
    """The answer to ``/readyz``: whether the gateway is ready, and the reasons for people."""

    ready: bool
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole answer."""
        return "\n".join(("ready" if self.ready else "not ready", *self.lines, ""))


def judge(
    resources: Sequence[ResourceStanding],
    *,
    begun: bool,
    kubelet_s: float | None,
    leader: LeaderSeen | None = None,
    hindrances: Sequence[Hindrance] = (),
    waits_for: str = "",
) -> Readiness:
    """Return the readiness at one moment.

    Args:
        resources: all resources of the gateway.
        begun: True if it has started.
        kubelet_s: seconds since the running kubelet was found; None: none runs.
        leader: the other gateway that leads; None: none does.
        hindrances: why the sources can't report devices, or can't offer some of them.
        waits_for: what the start waits for, in words; empty if it doesn't wait.
    """
    lines = _first(kubelet_s, hindrances)
    held_up = any(one.held_up for one in hindrances)
    if not begun:
        troubles = [f"{one.name}: {one.trouble}" for one in resources if one.trouble]
        return Readiness(kubelet_s is None and not held_up, tuple(_bounded([*lines, _starting(waits_for), *troubles])))
    if not any(one.devices for one in resources):
        return Readiness(not held_up, tuple(_bounded([*lines, "no devices"])))
    if leader is not None:
        # If it were ready, a rolling update would end the leader and keep a gateway that can't lead.
        waits = leader.to_take_over and kubelet_s is not None
        troubles = [f"{one.name}: {one.trouble}" for one in resources if one.trouble and waits]
        return Readiness(not held_up and not waits, tuple(_bounded([*lines, leader.words, *troubles])))
    found = sorted(((*_resource(one), one.name) for one in resources), key=lambda row: (row[0], row[2]))
    told = [f"{name}: {words}" for _, words, name in found]
    return Readiness(not held_up and all(ready for ready, *_ in found), tuple(_bounded([*lines, *told])))


def _starting(waits_for: str) -> str:
    return f"starting: waiting for {waits_for}" if waits_for else "starting"


def _first(kubelet_s: float | None, hindrances: Sequence[Hindrance]) -> list[str]:
    lines = [] if kubelet_s is not None else ["no kubelet takes registrations: waiting for one"]
    return [*lines, *(f"backend {one.source}: {one.reason}" for one in hindrances)]


def _resource(it: ResourceStanding) -> tuple[bool, str]:
    if not it.devices:
        return True, "no devices"
    since_s, why = it.verdict.since_s or 0.0, it.verdict.why
    match it.verdict.state, it.verdict.reason:
        case VerdictState.SERVED, reason:
            ready = reason != Reason.UNVERIFIED or since_s >= CALL_BACK_S
            return ready, f"served ({why})" if why else "served"
        case VerdictState.STANDBY, _:
            return True, f"standby: {why}"
        case _, Reason.NO_KUBELET:
            return True, "not served: no kubelet"
        case _, Reason.LACKING:
            return False, why
        case _, Reason.RIVAL | Reason.NO_DRA as reason:
            return reason == Reason.RIVAL, f"not served: {why}"
        case _, reason:
            ready = it.confirmed and reason != Reason.LIST and since_s < CALL_BACK_S
            return ready, f"not served for {since_s:.1f} s: {why}"


def _bounded(lines: Sequence[str]) -> list[str]:
    """Return printable lines, shortened and limited in number, because a kubelet's message may contain anything."""
    shown = [printable(line[:_LINE_CHARS]) for line in lines[:_MAX_LINES]]
    return [*shown, f"{len(lines) - len(shown)} more"] if len(lines) > len(shown) else shown
