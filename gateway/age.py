"""Decide which of two gateways is newer. Pure."""

from __future__ import annotations

import re

from msgspec import Struct

TOKEN = re.compile(r"[0-9a-f]{8}")
HOST_SERVICE_NS = 1 << 62
"""The time at which every host service counts as started (146 years after boot): it is newer than any pod."""


class Age(Struct, frozen=True):
    """When a gateway's pod came to the node (nanoseconds of the boot clock), and the gateway's token.

    All containers of a pod have one age, also after restarts. All host services have one age.
    """

    born_ns: int
    token: str

    @property
    def host_service(self) -> bool:
        """True if this is the node's own service."""
        return self.born_ns == HOST_SERVICE_NS

    def is_newer_than(self, other: Age) -> bool:
        """True if its pod came later."""
        return self.born_ns > other.born_ns


def plausible(age: Age, now_ns: int) -> bool:
    """Return True if the time is possible: after the boot and not after ``now_ns`` (boot clock)."""
    return age.host_service or 0 <= age.born_ns <= now_ns
