"""Decide how the kubelet sees a plugin's devices while the plugin is away. Pure.

A plugin that restarts, crashes, is upgraded or hangs has not lost its devices. So for ``grace`` seconds they stay as the plugin
last reported them. After that they are Unhealthy, because their health is unknown. They stay listed, because the kubelet would
forget the holders of absent devices. After ``withdraw`` seconds they are no longer offered. A device that a container holds stays
on the list until the container ends, as any withdrawn device does (``devices.life``).

Times are seconds of one clock that never jumps.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from devices.model import Device, Health, Options, Trouble
from devices.source import Listing

RETURNED_S: Final = 10.0
"""Seconds after a plugin's return in which devices that the shield made Unhealthy are healthy again at once."""


class Cover(Enum):
    """The state of a plugin's devices. The values are shown to people."""

    LIVE = "live"
    SHIELDED = "shielded"
    UNHEALTHY = "unhealthy"
    WITHDRAWN = "withdrawn"


class Word(Struct, frozen=True):
    """The last report of a plugin, and whether the plugin is connected.

    ``devices`` is None if it never sent a list. ``away_since`` is since when it is away (None: it isn't), and ``why`` the reason.
    ``uncovered`` is when it came back, if that was after the grace. ``mended`` are the devices that were Unhealthy before and
    are Healthy now.
    """

    devices: tuple[Device, ...] | None = None
    options: Options = Options()
    away_since: float | None = None
    why: str = ""
    uncovered: float | None = None
    mended: frozenset[str] = frozenset()


class Limits(Struct, frozen=True):
    """Seconds for which a plugin may be away until its devices are Unhealthy, and until they are withdrawn."""

    grace: float = 60.0
    withdraw: float = 3600.0


def cover(word: Word, limits: Limits, now: float) -> Cover:
    """Return the state of a plugin's devices at ``now``."""
    if word.away_since is None:
        return Cover.LIVE
    away = now - word.away_since
    if away < limits.grace:
        return Cover.SHIELDED
    return Cover.UNHEALTHY if away < limits.withdraw else Cover.WITHDRAWN


def changes_at(word: Word, limits: Limits, now: float) -> float | None:
    """Return when the result of ``cover`` changes next by itself; None: never."""
    if word.away_since is None:
        return None
    moments = (word.away_since + limits.grace, word.away_since + limits.withdraw)
    return next((moment for moment in moments if moment > now), None)


def left(word: Word, limits: Limits, now: float) -> float:
    """Return how many seconds a call may wait for the plugin to return."""
    return limits.grace if word.away_since is None else max(0.0, word.away_since + limits.grace - now)


def went(word: Word, why: str, now: float) -> Word:
    """Return the word of a plugin that is away now. If it was away already, ``away_since`` stays."""
    since = now if word.away_since is None else word.away_since
    return replace(word, away_since=since, why=why, uncovered=None)


def came(word: Word, devices: tuple[Device, ...], limits: Limits, now: float) -> Word:
    """Return the word of a plugin that sent a list."""
    late = cover(word, limits, now) not in {Cover.LIVE, Cover.SHIELDED}
    uncovered = now if late else word.uncovered
    if uncovered is not None and now - uncovered > RETURNED_S:
        uncovered = None
    before = {one.id for one in word.devices or () if one.health is Health.UNHEALTHY} | word.mended
    mended = frozenset(one.id for one in devices if one.id in before and one.health is Health.HEALTHY)
    return Word(devices, word.options, uncovered=uncovered, mended=mended)


def listing(word: Word, limits: Limits, now: float) -> Listing | None:
    """Return the list that is announced for a plugin's resource; None if it is not announced.

    A change of health that the plugin reports is announced at once. The gateway's own devices are held back if they were Unhealthy
    often; a plugin's are not.
    """
    if word.devices is None:
        return None
    stands = cover(word, limits, now)
    if stands is Cover.WITHDRAWN:
        return None
    if stands is Cover.UNHEALTHY:
        gone = Trouble(f"its plugin is away ({word.why}), for longer than --bridge-grace: look at the plugin's pod")
        return Listing(word.devices, word.options, dict.fromkeys((one.id for one in word.devices), gone))
    unhealthy = Trouble("its plugin says that it is Unhealthy")
    troubles = {one.id: unhealthy for one in word.devices if one.health is Health.UNHEALTHY}
    recovered = word.mended
    if word.uncovered is not None:
        recovered = frozenset(one.id for one in word.devices if one.id not in troubles)
    return Listing(word.devices, word.options, troubles, recovered)
