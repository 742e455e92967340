"""Readiness: has this gateway done its part? Pure: what is known of each resource in, a verdict in words out.

A gateway that isn't ready holds up a rolling update and alarms people, so only what is our own failure towards a kubelet
that runs makes it so, or a configuration that it can't carry out: an update must not go on with that. No devices, unhealthy devices,
a backend that is down, no kubelet, another gateway that serves instead: nothing of that would be mended by another gateway in
this one's place, and the verdict only says it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from gateway.registration.events import Phase
from gateway.tally import Confirmation
from gateway.wires.log import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devices.source import Hindrance
    from gateway.telling.sides import DriverStatus

PATIENCE: Final = 10.0
"""Seconds that a resource may be without a running kubelet's stream, once the kubelet's records had it: a kubelet may take ten
to call back (1.25 and later dial for so long)."""
HOST_SERVICE: Final = "host service"
_MOST_LINES: Final = 32
_LONGEST: Final = 400


class ResourceStanding(Struct, frozen=True, kw_only=True):
    """Where one resource stands. Times are ages in seconds, and mean what ``kubelet_s`` of ``judge`` does."""

    name: str
    devices: int
    phase: Phase
    checked: Confirmation | None = None
    """What the last look into the kubelet's records told, since the gateway's start; None: there was none."""
    stream_s: float = 0.0
    """The age of the kubelet's stream."""
    unserved_s: float = 0.0
    """How long it has been neither served nor left to another gateway."""
    trouble: str = ""
    """What went wrong with its registration last."""


class LeaderSeen(Struct, frozen=True):
    """Another gateway, which leads: ``HOST_SERVICE``, or its token. This one is ``to_take_over`` from it, and could not."""

    name: str
    to_take_over: bool = False

    @property
    def words(self) -> str:
        """Say it to people."""
        return f"standby: {self.name} leads" + (", and this gateway could not" if self.to_take_over else "")


class Verdict(Struct, frozen=True):
    """Whether the gateway has done its part, and how each thing stands, in lines for people."""

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
) -> Verdict:
    """Decide, at one moment.

    Args:
        resources: all that the gateway has.
        begun: whether it is done with its start.
        kubelet_s: seconds since the kubelet that runs was found; None: none runs.
        leader: another gateway, which leads; None: none does.
        hindrances: what keeps the sources of devices from telling of them, or from offering some.
        waits_for: what the start waits for, in words; empty where it doesn't.
    """
    lines = _first(kubelet_s, hindrances)
    held_up = any(one.held_up for one in hindrances)
    if not begun:
        troubles = [f"{one.name}: {one.trouble}" for one in resources if one.trouble]
        return Verdict(kubelet_s is None and not held_up, tuple(_bounded([*lines, _starting(waits_for), *troubles])))
    if not any(one.devices for one in resources):
        return Verdict(not held_up, tuple(_bounded([*lines, "no devices"])))
    if leader is not None:
        # Or an update would end the one that leads, for one that can't.
        waits = leader.to_take_over and kubelet_s is not None
        troubles = [f"{one.name}: {one.trouble}" for one in resources if one.trouble and waits]
        return Verdict(not held_up and not waits, tuple(_bounded([*lines, leader.words, *troubles])))
    found = sorted(((*_resource(one, kubelet_s), one.name) for one in resources), key=lambda row: (row[0], row[2]))
    told = [f"{name}: {words}" for _, words, name in found]
    return Verdict(not held_up and all(ready for ready, *_ in found), tuple(_bounded([*lines, *told])))


def judge_drivers(
    drivers: Sequence[DriverStatus],
    *,
    begun: bool,
    kubelet_s: float | None,
    leader: LeaderSeen | None = None,
    hindrances: Sequence[Hindrance] = (),
    waits_for: str = "",
) -> Verdict:
    """Decide where devices are offered by DRA alone; arguments are as in ``judge``."""
    lines = _first(kubelet_s, hindrances)
    lines += [
        f"{one.name}: "
        + (
            f"registered, {one.devices} device{'' if one.devices == 1 else 's'}"
            if one.registered
            else "not registered" + (f"; {why}" if (why := one.rival or one.trouble) else "")
        )
        for one in drivers
    ]
    if not begun:
        lines.append(_starting(waits_for))
    if leader is not None:
        lines.append(leader.words)
        done = not leader.to_take_over
    else:
        done = begun and all(one.registered or one.rival for one in drivers)
    held_up = any(one.held_up for one in hindrances)
    return Verdict((kubelet_s is None or done) and not held_up, tuple(_bounded(lines or ["no devices"])))


def _starting(waits_for: str) -> str:
    return f"starting: waiting for {waits_for}" if waits_for else "starting"


def _first(kubelet_s: float | None, hindrances: Sequence[Hindrance]) -> list[str]:
    lines = [] if kubelet_s is not None else ["no kubelet takes registrations: waiting for one"]
    return [*lines, *(f"backend {one.source}: {one.reason}" for one in hindrances)]


def _resource(it: ResourceStanding, kubelet_s: float | None) -> tuple[bool, str]:
    if not it.devices:
        return True, "no devices"
    if kubelet_s is None:
        return True, "not served: no kubelet"
    if it.checked is Confirmation.LACKING:
        return False, "registered, but the kubelet's own records lack it: registering again"
    if it.phase is Phase.SERVING:
        if it.checked is None:
            return it.stream_s >= PATIENCE, "served, not looked up in the kubelet's records yet"
        return True, "served" if it.checked is Confirmation.HELD else "served (the kubelet's records can't be read)"
    waited = min(it.unserved_s, kubelet_s)
    words = f"not served for {waited:.1f} s: {it.phase.value}" + (f"; {it.trouble}" if it.trouble else "")
    return it.checked is not None and it.phase is not Phase.OUT and waited < PATIENCE, words


def _bounded(lines: Sequence[str]) -> list[str]:
    """Keep the answer short, and what others wrote (a kubelet's refusal) on its own line."""
    shown = [printable(line[:_LONGEST]) for line in lines[:_MOST_LINES]]
    return [*shown, f"{len(lines) - len(shown)} more"] if len(lines) > len(shown) else shown
