"""The neutral model of Dynamic Resource Allocation (DRA): claims, what was prepared for them, and the health of devices.

It covers every version of the kubelet's API for DRA drivers, as frozen values, without a wire format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct


class ClaimName(Struct, frozen=True):
    """A ResourceClaim. The UID distinguishes it from an earlier or later one of the same name."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Prepared(Struct, frozen=True):
    """A device that is prepared for a claim.

    ``requests`` are the claim's requests that it is for (none: all), ``cdi_names`` the CDI names for the container runtime.
    ``share`` is the claim's share of a device whose capacity several claims divide ('' if it isn't divided).
    """

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_names: tuple[str, ...]
    share: str = ""


class Refused(Struct, frozen=True):
    """Why a claim could not be prepared or unprepared, as shown in the pod's event."""

    reason: str


Answer: TypeAlias = tuple[Prepared, ...] | Refused
"""The result for one claim. A successful Unprepare returns no devices."""
Answers: TypeAlias = Mapping[str, Answer]
"""By claim UID."""


class DeviceHealth(Struct, frozen=True):
    """The health of a device: ``well`` (None: unknown), checked at ``at`` (Unix seconds), with the reason in ``words``."""

    pool: str
    device: str
    well: bool | None
    at: int
    words: str = ""
