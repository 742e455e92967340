"""Find the kubelet versions that fit the evidence of a connection; in doubt, the older ones. Pure.

A dialect got new fields over time, but doesn't show which of them a kubelet knows. Evidence is the gRPC library in the kubelet's
``user-agent``, and whether the kubelet asks for the options before the list. If the assumed kubelet is too old, a request may be
refused. If it is too new, a container may start without its devices. So conflicting evidence is no error: the older version is
used. ``--kubelet-version`` overrides all evidence.

A vendor's build of a kubelet may have a later grpc-go than the release. Then set that flag.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from adapters.dialect import Level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from adapters.dialect import Dialect

GrpcGo: TypeAlias = tuple[int, int, int]

# Read from the go.mod (1.10: Godeps) of the first and the last release of each minor version; for 1.11 to 1.13, from the builds
# of their device managers. A minor version that isn't here lies between its neighbours, because grpc-go's version only rises.
GRPC_GO: Mapping[int, tuple[GrpcGo, GrpcGo]] = {
    10: ((1, 7, 5), (1, 7, 5)),
    11: ((1, 7, 5), (1, 7, 5)),
    12: ((1, 7, 5), (1, 7, 5)),
    13: ((1, 13, 0), (1, 13, 0)),
    15: ((1, 13, 0), (1, 13, 0)),
    16: ((1, 23, 0), (1, 23, 0)),
    17: ((1, 23, 1), (1, 23, 1)),
    18: ((1, 26, 0), (1, 26, 0)),
    19: ((1, 27, 0), (1, 27, 0)),
    20: ((1, 27, 1), (1, 27, 1)),
    21: ((1, 27, 1), (1, 27, 1)),
    22: ((1, 38, 0), (1, 38, 0)),
    23: ((1, 40, 0), (1, 40, 0)),
    24: ((1, 40, 0), (1, 40, 0)),
    25: ((1, 47, 0), (1, 47, 0)),
    26: ((1, 49, 0), (1, 56, 3)),
    27: ((1, 51, 0), (1, 56, 3)),
    28: ((1, 54, 0), (1, 56, 3)),
    29: ((1, 58, 3), (1, 58, 3)),
    30: ((1, 58, 3), (1, 58, 3)),
    31: ((1, 65, 0), (1, 65, 0)),
    32: ((1, 65, 0), (1, 65, 0)),
    33: ((1, 68, 1), (1, 68, 1)),
    34: ((1, 72, 1), (1, 72, 1)),
    35: ((1, 72, 2), (1, 72, 2)),
    36: ((1, 79, 3), (1, 79, 3)),
    37: ((1, 82, 1), (1, 82, 1)),
}
"""The lowest and the highest grpc-go in the releases of kubelet 1.N, by N."""

OPTIONS_FIRST_MINOR = 25
"""From kubelet 1.25 on, the kubelet calls GetDevicePluginOptions between Register and ListAndWatch; earlier ones never do."""

_USER_AGENT = re.compile(r"(?:^|\s)grpc-go/(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?!\d)")
_USER_AGENT_CHARS = 256
_VERSION = r"v?1\.(\d{1,3})(?:[.+-][0-9A-Za-z.+-]{0,64})?"


class Evidence(Struct, frozen=True):
    """The evidence of a connection so far. None: unknown."""

    user_agent: str | None = None
    """The ``user-agent`` of the kubelet's calls."""
    options_called_before_list: bool | None = None
    """True if it asked for the options between our Register and ListAndWatch. Calls of the kubelet's plugin watcher are no
    evidence."""
    pinned: int | None = None
    """The minor version in ``--kubelet-version``, which overrides all evidence."""


@lru_cache(maxsize=16)
def level(dialect: Dialect, evidence: Evidence) -> Level:
    """Return the kubelets that speak ``dialect`` and fit ``evidence``. Never raises."""
    if evidence.pinned is not None:
        return _within(dialect.kubelets, Level(evidence.pinned, evidence.pinned))
    found = dialect.kubelets
    if evidence.user_agent is not None:
        found = _both(found, by_user_agent(evidence.user_agent))
    if evidence.options_called_before_list is not None:
        found = _both(
            found,
            Level(OPTIONS_FIRST_MINOR) if evidence.options_called_before_list else Level(0, OPTIONS_FIRST_MINOR - 1),
        )
    return _within(dialect.kubelets, found)


def may_be_kubelet(user_agent: str | None) -> bool:
    """Return True if a caller may be a kubelet by its ``user-agent``: a kubelet's begins with its grpc-go."""
    return user_agent is not None and _USER_AGENT.match(user_agent[:_USER_AGENT_CHARS]) is not None


def by_user_agent(user_agent: str) -> Level:
    """Return the kubelets that fit a ``user-agent`` such as ``grpc-go/1.58.3``. Another library's (a proxy's) is no evidence.

    A version between two rows fits the kubelets of both rows. A version after all rows fits the newest kubelet and later ones.
    """
    match = _USER_AGENT.search(user_agent[:_USER_AGENT_CHARS])
    if match is None:
        return Level(0)
    version = (int(match[1]), int(match[2]), int(match[3]))
    known = sorted(itertools.chain.from_iterable(GRPC_GO.values()))
    floor = max((one for one in known if one <= version), default=known[0])
    ceiling = min((one for one in known if one >= version), default=known[-1])
    low = min(minor for minor, (_, last) in GRPC_GO.items() if last >= floor)
    high = max(minor for minor, (first, _) in GRPC_GO.items() if first <= ceiling)
    return Level(low, None if high == max(GRPC_GO) else high)


def minor_version(text: str) -> int:
    """Return the minor version of a kubelet's version, such as ``1.28`` or ``v1.28.15-vendor.3``.

    Raises:
        ValueError: it is not a kubelet version.
    """
    match = re.fullmatch(_VERSION, text)
    if match is None:
        raise ValueError(f"{text[:64]!r} is not a kubelet version such as 1.28 or v1.28.15")
    return int(match[1])


def _both(one: Level, other: Level) -> Level:
    """Return the intersection of two levels; if they have none, the older level."""
    older, newer = sorted((one, other), key=lambda level: level.low)
    if older.high is None:
        return newer
    if older.high < newer.low:
        return older
    high = older.high if newer.high is None else min(older.high, newer.high)
    return Level(newer.low, high)


def _within(bounds: Level, found: Level) -> Level:
    """Limit a level to ``bounds``: the kubelet accepted Register, so it must speak this dialect."""

    def inside(minor: int) -> int:
        at_least = max(minor, bounds.low)
        return at_least if bounds.high is None else min(at_least, bounds.high)

    return Level(inside(found.low), bounds.high if found.high is None else inside(found.high))
