"""The neutral vocabulary of dynamic resource allocation (DRA): claims, what was prepared for them, and devices' health.

Everything any version of the kubelet's API for DRA drivers can say, as frozen values. Nothing here knows a wire format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct


class ClaimName(Struct, frozen=True):
    """Which ResourceClaim is meant. The UID tells it from one of the same name before or after it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Prepared(Struct, frozen=True):
    """A device that is ready for a claim.

    ``requests`` are the claim's requests that it is for (none: all), ``cdi_names`` the fully qualified CDI names by which the
    container runtime finds it. ``share`` names the share of a device whose capacity several claims divide ('' where it has none).
    """

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_names: tuple[str, ...]
    share: str = ""


class Refused(Struct, frozen=True):
    """Why a claim could not be prepared or unprepared, in the words that the pod's event shows."""

    reason: str


Answer: TypeAlias = tuple[Prepared, ...] | Refused
"""What became of one claim. No devices at all is what Unprepare answers where it went well."""
Answers: TypeAlias = Mapping[str, Answer]
"""By claim UID."""


class DeviceHealth(Struct, frozen=True):
    """How a device does. ``well`` None: nobody can tell. ``at`` is when that was found, in unix seconds; ``words`` say why."""

    pool: str
    device: str
    well: bool | None
    at: int
    words: str = ""
