"""What the kubelet sees of a plugin's devices while the plugin is away: the rule of the shield. Pure.

A plugin that restarts, crashes, is upgraded or hangs has not lost its devices. So for ``grace`` seconds they stay as the plugin
last reported them. After that nobody can vouch for them: they are Unhealthy, never absent, because the kubelet would forget who
holds what is absent. After ``withdraw`` seconds nobody expects the plugin back, and they are no longer offered; what a
container holds stays on the list until it ends, as with any device that is withdrawn (``devices.life``).

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
"""How long a plugin that came back counts as returned: devices that the shield made Unhealthy are healthy again at once."""


class Cover(Enum):
    """How a plugin's devices stand. The values are those that people see."""

    LIVE = "live"
    SHIELDED = "shielded"
    UNHEALTHY = "unhealthy"
    WITHDRAWN = "withdrawn"


class Word(Struct, frozen=True):
    """What a plugin said last, and whether it still stands behind it.

    ``devices`` is None while it never said any. ``away_since`` is when it went (None: it is there), ``why`` in words how.
    ``uncovered`` tells that it came back after the grace had passed, and when. ``mended`` are the devices that it called
    Unhealthy before, and calls Healthy now.
    """

    devices: tuple[Device, ...] | None = None
    options: Options = Options()
    away_since: float | None = None
    why: str = ""
    uncovered: float | None = None
    mended: frozenset[str] = frozenset()


class Limits(Struct, frozen=True):
    """How long, in seconds, a plugin may be away until its devices are Unhealthy, and until they are withdrawn."""

    grace: float = 60.0
    withdraw: float = 3600.0


def cover(word: Word, limits: Limits, now: float) -> Cover:
    """Say how a plugin's devices stand at ``now``."""
    if word.away_since is None:
        return Cover.LIVE
    away = now - word.away_since
    if away < limits.grace:
        return Cover.SHIELDED
    return Cover.UNHEALTHY if away < limits.withdraw else Cover.WITHDRAWN


def changes_at(word: Word, limits: Limits, now: float) -> float | None:
    """Say when the answer of ``cover`` changes next by itself; None: never."""
    if word.away_since is None:
        return None
    moments = (word.away_since + limits.grace, word.away_since + limits.withdraw)
    return next((moment for moment in moments if moment > now), None)


def left(word: Word, limits: Limits, now: float) -> float:
    """Say for how many seconds a call that found nobody may still wait for the plugin; one that isn't known to be away goes now."""
    return limits.grace if word.away_since is None else max(0.0, word.away_since + limits.grace - now)


def went(word: Word, why: str, now: float) -> Word:
    """The plugin is away from now on; one that was away already is away since then."""
    since = now if word.away_since is None else word.away_since
    return replace(word, away_since=since, why=why, uncovered=None)


def came(word: Word, devices: tuple[Device, ...], limits: Limits, now: float) -> Word:
    """The plugin is there, and says this."""
    late = cover(word, limits, now) not in {Cover.LIVE, Cover.SHIELDED}
    uncovered = now if late else word.uncovered
    if uncovered is not None and now - uncovered > RETURNED_S:
        uncovered = None
    before = {one.id for one in word.devices or () if one.health is Health.UNHEALTHY} | word.mended
    mended = (
        frozenset(one.id for one in devices if one.id in before and one.health is Health.HEALTHY) if before else before
    )
    return Word(devices, word.options, uncovered=uncovered, mended=frozenset(mended))


def listing(word: Word, limits: Limits, now: float) -> Listing | None:
    """Say what is to be announced of a plugin's resource; None where nothing is.

    A device's health is what the plugin says, at once: one that was often Unhealthy isn't held back, as those are that the
    gateway watches itself.
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
