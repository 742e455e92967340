"""The DRAResourceHealth API, which reports the health of prepared devices: v1alpha1 (1.34 and later) and v1 (1.37), with equal messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from adapters.pb.dra import health_pb2 as pb
from adapters.spelling import serialize
from devices.claims import DeviceHealth

WATCH: Final = "NodeWatchResources"
VERSIONS: Final = ("v1", "v1alpha1")
MESSAGE_CHARS: Final = 1024
"""Most characters of a message; the kubelet cuts longer ones."""

_WORDS: Final = {True: pb.HEALTHY, False: pb.UNHEALTHY, None: pb.UNKNOWN}


def service(version: str) -> str:
    """Return the name of the gRPC service, also in the registration."""
    return f"{version}.DRAResourceHealth"


def encode(devices: Iterable[DeviceHealth], valid_s: int) -> bytes:
    """Encode the whole list. A device that isn't reported again within ``valid_s`` seconds is unknown to the kubelet."""
    message = pb.NodeWatchResourcesResponse()
    for one in devices:
        added = message.devices.add(
            health=_WORDS[one.well],
            last_updated_time=one.at,
            health_check_timeout_seconds=valid_s,
            message=one.words[:MESSAGE_CHARS],
        )
        added.device.pool_name, added.device.device_name = one.pool, one.device
    return serialize(message)
