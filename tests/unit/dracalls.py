"""What a kubelet says to a DRA driver, and how it reads the answers: the other side of ``adapters.dra``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc.aio

from adapters.dra import health, plugin
from adapters.dra.plugin import PluginApi
from adapters.pb.dra import health_pb2
from adapters.spelling import parse, serialize
from devices.claims import Answers, ClaimName, DeviceHealth, Prepared, Refused
from gateway.wires.rpc import target

_MEANINGS = {health_pb2.HEALTHY: True, health_pb2.UNHEALTHY: False}


def request(api: PluginApi, claims: Iterable[ClaimName]) -> bytes:
    """Ask to prepare claims, or to unprepare them: both are the same on the wire."""
    spelled = [api.pb.Claim(namespace=one.namespace, name=one.name, uid=one.uid) for one in claims]
    return serialize(api.pb.NodePrepareResourcesRequest(claims=spelled))


def prepare_answer(api: PluginApi, data: bytes) -> Answers:
    message = parse(api.pb.NodePrepareResourcesResponse, data, api.registered_as)
    return {
        uid: Refused(one.error)
        if one.error
        else tuple(
            Prepared(
                tuple(device.request_names),
                device.pool_name,
                device.device_name,
                tuple(device.cdi_device_ids),
                device.share_id if api.carries_share else "",
            )
            for device in one.devices
        )
        for uid, one in message.claims.items()
    }


def unprepare_answer(api: PluginApi, data: bytes) -> Mapping[str, Refused | None]:
    message = parse(api.pb.NodeUnprepareResourcesResponse, data, api.registered_as)
    return {uid: Refused(one.error) if one.error else None for uid, one in message.claims.items()}


def health_list(data: bytes) -> tuple[DeviceHealth, ...]:
    """Read a list of devices' health; a word of a later version is unknown."""
    message = parse(health_pb2.NodeWatchResourcesResponse, data, health.service(health.VERSIONS[0]))
    return tuple(
        DeviceHealth(
            one.device.pool_name,
            one.device.device_name,
            _MEANINGS.get(one.health),
            one.last_updated_time,
            one.message,
        )
        for one in message.devices
    )


class Kubelet:
    """Calls a driver as a kubelet does."""

    def __init__(self, path: Path, patience: float) -> None:
        self.channel, self._patience = grpc.aio.insecure_channel(target(path)), patience

    async def call(self, where: str, data: bytes = b"") -> bytes:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(where)
        return await ask(data, timeout=self._patience)

    async def prepare(self, api: PluginApi, *asked: ClaimName) -> Any:
        wire = await self.call(f"/{api.service}/{plugin.PREPARE}", request(api, asked))
        return prepare_answer(api, wire)

    async def unprepare(self, api: PluginApi, *asked: ClaimName) -> Any:
        wire = await self.call(f"/{api.service}/{plugin.UNPREPARE}", request(api, asked))
        return unprepare_answer(api, wire)
