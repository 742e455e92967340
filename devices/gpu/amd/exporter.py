"""The health of GPUs by AMD's metrics exporter, on nodes where it runs.

A gRPC method on the exporter's own socket lists the devices (ROCm/k8s-device-plugin, internal/pkg/exporter). Only the state
"unhealthy" is used: for some devices the exporter has no data, which is not a trouble (its #195). The answer is decoded without
the exporter's .proto file, because only two of its strings are needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import structlog
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

SOCKET: Final = Path("/var/lib/amd-metrics-exporter/amdgpu_device_metrics_exporter_grpc.socket")
_METHOD: Final = "/metricssvc.MetricsService/List"
_STATE, _HEALTH, _DEVICE = 1, 3, 5
"""Field numbers: GPUStateResponse.GPUState, GPUState.Health, GPUState.Device (metricssvc.proto)."""

_EVERY_S: Final = 30.0
"""Seconds between two calls: the exporter reads the GPUs every 30 s, and AMD's plugin asks as often."""
_KEPT_S: Final = 300.0
"""Seconds for which an answer is used, enough for a new exporter to replace an old one."""
_DEADLINE_S: Final = 2.0
"""Most seconds for one call."""
_LENGTH_DELIMITED: Final = 2
"""The wire type of strings and messages (https://protobuf.dev/programming-guides/encoding/)."""

# The size limits the work: a node has some hundred devices, with less than 1 KiB for each.
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_log = structlog.get_logger()


class Exporter:
    """Asks the exporter at most every 30 s. While it is silent, its last answer is used for 5 minutes.

    ``socket`` is its socket, which may not exist.
    """

    def __init__(self, socket: Path = SOCKET) -> None:
        self._socket = socket
        self._next = time.monotonic()
        self._heard: float | None = None
        self._ill: frozenset[str] = frozenset()
        self._silent = False

    async def unhealthy(self) -> frozenset[str]:
        """Return the IDs of the unhealthy devices. Takes at most 2 s, and never raises."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            await self._ask(now)
        if self._heard is None or now >= self._heard + _KEPT_S:
            return frozenset()
        return self._ill

    async def _ask(self, now: float) -> None:
        if not self._socket.is_socket():
            if self._heard is not None:
                self._say_silent("its socket is gone")
            return
        try:
            async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS) as channel:
                ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
                answer = await ask(b"", timeout=_DEADLINE_S)
                self._ill = await asyncio.to_thread(unhealthy, answer)  # 1 MiB of it may take a second.
        except grpc.aio.AioRpcError as error:
            self._say_silent(f"{error.code().name}: {error.details()}")
            return
        except ValueError as error:
            self._say_silent(str(error))
            return
        if self._silent:
            _log.info("metrics exporter answers again", socket=str(self._socket))
        self._heard, self._silent = now, False

    def _say_silent(self, reason: str) -> None:
        if not self._silent:
            _log.warning("metrics exporter silent", socket=str(self._socket), reason=reason[:400], kept_seconds=_KEPT_S)
        self._silent = True


def unhealthy(response: bytes) -> frozenset[str]:
    """Decode the IDs of unhealthy devices from a GPUStateResponse.

    Raises:
        ValueError: it isn't one.
    """
    ill: set[str] = set()
    for number, state in _fields(response):
        if number == _STATE:
            said = dict(_fields(state))
            if said.get(_HEALTH, b"").lower() == b"unhealthy":
                ill.add(said.get(_DEVICE, b"").decode(errors="replace"))
    return frozenset(ill)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the strings and messages in a protobuf message, each with its field number.

    Raises:
        ValueError: it isn't a protobuf message.
    """
    try:
        fields = UnknownFieldSet(Empty.FromString(message))
    except DecodeError as error:
        raise ValueError(f"cannot decode the answer of AMD's metrics exporter: {error}") from None
    for field in map(fields.__getitem__, range(len(fields))):
        if field.wire_type == _LENGTH_DELIMITED:
            yield field.field_number, field.data
