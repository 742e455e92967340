"""Which of several gateways is newer. Pure."""

from __future__ import annotations

import re

from msgspec import Struct

TOKEN = re.compile(r"[0-9a-f]{8}")
HOST_SERVICE_NS = 1 << 62
"""Nanoseconds (146 years) by which the node's own service is newer than it is."""


class Age(Struct, frozen=True, order=True):
    """When a gateway started (nanoseconds of the boot clock); the token breaks a tie. Newer is greater.

    The node's own service says that it was born ``HOST_SERVICE_NS`` later than it was, so that it is the newer of any pod and
    itself, whoever came first.
    """

    born_ns: int
    token: str

    @property
    def host_service(self) -> bool:
        """Whether this is the node's own service."""
        return self.born_ns >= HOST_SERVICE_NS


def plausible(age: Age, now_ns: int) -> bool:
    """Whether a gateway can have started then: after the boot, and not after ``now_ns`` (boot clock)."""
    return 0 <= age.born_ns - (HOST_SERVICE_NS if age.host_service else 0) <= now_ns
