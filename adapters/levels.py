"""Which kubelets fit the evidence of a live connection: pure, and in doubt always the older one.

A dialect that grew over time doesn't tell how much of it the kubelet knows. What tells is what the kubelet does: the
gRPC library in its ``user-agent``, and whether it asks for the options before it asks for the list. Taking it for older
than it is costs a refused request; for newer, a container without its devices. So evidence narrows the level and never
raises an error, contradictions go to the older side, and ``--kubelet-version`` settles it.

A vendor's build of a kubelet can hold a later grpc-go than the release; there, that option is the way.
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

# Read from the go.mod (1.10: Godeps) of the first and the last release of each minor version; of 1.11 to 1.13, from
# what their device managers are built with. A minor version that isn't here lies between its neighbours: it only rises.
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

OPTIONS_FIRST = 25
"""From kubelet 1.25 on, Register makes the kubelet call GetDevicePluginOptions before ListAndWatch; before, never."""

_USER_AGENT = re.compile(r"(?:^|\s)grpc-go/(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?!\d)")
_USER_AGENT_LIMIT = 256
_VERSION = r"v?1\.(\d{1,3})(?:[.+-][0-9A-Za-z.+-]{0,64})?"


class Evidence(Struct, frozen=True):
    """What a live connection has shown so far. None: nothing yet, or nothing that can be known."""

    user_agent: str | None = None
    """The metadata of any call that the kubelet made."""
    options_called_before_list: bool | None = None
    """After our Register, once ListAndWatch has come. What the kubelet's plugin watcher asks is no evidence."""
    pinned: int | None = None
    """The minor version that the operator named with ``--kubelet-version``; nothing else counts then."""


@lru_cache(maxsize=16)
def level(dialect: Dialect, evidence: Evidence) -> Level:
    """Find the kubelets, among those that speak ``dialect``, that fit ``evidence``. Never raises."""
    if evidence.pinned is not None:
        return _within(dialect.kubelets, Level(evidence.pinned, evidence.pinned))
    found = dialect.kubelets
    if evidence.user_agent is not None:
        found = _both(found, by_user_agent(evidence.user_agent))
    if evidence.options_called_before_list is not None:
        found = _both(
            found, Level(OPTIONS_FIRST) if evidence.options_called_before_list else Level(0, OPTIONS_FIRST - 1)
        )
    return _within(dialect.kubelets, found)


def may_be_kubelet(user_agent: str | None) -> bool:
    """Tell whether a caller may be a kubelet by its ``user-agent``: each one's begins with its grpc-go, and names nothing first."""
    return user_agent is not None and _USER_AGENT.match(user_agent[:_USER_AGENT_LIMIT]) is not None


def by_user_agent(user_agent: str) -> Level:
    """Look a ``user-agent`` up, such as ``grpc-go/1.58.3``; one of another library (a proxy's) says nothing.

    A version that no release is known for (between two rows) can be that of any kubelet of its neighbours, a later one
    than all is the newest kubelet's or a later one's.
    """
    match = _USER_AGENT.search(user_agent[:_USER_AGENT_LIMIT])
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
    """Read the minor version out of a kubelet's version, such as ``1.28`` or ``v1.28.15-vendor.3``.

    Raises:
        ValueError: it is no kubelet version.
    """
    match = re.fullmatch(_VERSION, text)
    if match is None:
        raise ValueError(f"{text[:64]!r} is not a kubelet version such as 1.28 or v1.28.15")
    return int(match[1])


def _both(one: Level, other: Level) -> Level:
    """Intersect two levels; where they contradict each other, the older one holds."""
    older, newer = sorted((one, other), key=lambda level: level.low)
    if older.high is None:
        return newer
    if older.high < newer.low:
        return older
    high = older.high if newer.high is None else min(older.high, newer.high)
    return Level(newer.low, high)


def _within(bounds: Level, found: Level) -> Level:
    """Keep a level within ``bounds``: Register was accepted, so the kubelet is one of those, whatever else it shows."""

    def inside(minor: int) -> int:
        at_least = max(minor, bounds.low)
        return at_least if bounds.high is None else min(at_least, bounds.high)

    return Level(inside(found.low), bounds.high if found.high is None else inside(found.high))
