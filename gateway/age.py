"""Which of several gateways is newer. Pure."""

from __future__ import annotations

import re

from msgspec import Struct

TOKEN = re.compile(r"[0-9a-f]{8}")
HOST_SERVICE_NS = 1 << 62
"""When the node's own service was born (146 years after the boot): it is newer than any pod, whoever came first."""


class Age(Struct, frozen=True):
    """When a gateway's pod came to the node (nanoseconds of the boot clock), and the gateway's own token.

    The containers of a pod are of one age, however often they are started again; so are all host services.
    """

    born_ns: int
    token: str

    @property
    def host_service(self) -> bool:
        """Whether this is the node's own service."""
        return self.born_ns == HOST_SERVICE_NS

    def is_newer_than(self, other: Age) -> bool:
        """Whether its pod came later."""
        return self.born_ns > other.born_ns


def plausible(age: Age, now_ns: int) -> bool:
    """Whether a gateway can have come then: after the boot, and not after ``now_ns`` (boot clock)."""
    return age.host_service or 0 <= age.born_ns <= now_ns
