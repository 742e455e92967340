"""The kubelet's plugin registration API, from the kubelet's side: what a plugin is, and what it is told of its fate.

It is there from kubelet 1.11; its versions are alike on the wire.
"""

from __future__ import annotations

from msgspec import Struct

from adapters.dialect import MalformedError
from adapters.pb.pluginregistration import v1_pb2 as pb
from adapters.spelling import parse

GET_INFO = "/pluginregistration.Registration/GetInfo"
NOTIFY = "/pluginregistration.Registration/NotifyRegistrationStatus"
DEVICE_PLUGIN = "DevicePlugin"
"""The type of a device plugin; others are drivers for volumes and for dynamic resources."""
LONGEST_REASON = 1024
"""Characters of a refusal that are kept."""
_API = "pluginregistration"
MAX_INFO = 64 * 1024
"""The most bytes of a GetInfo answer that are read: a resource name and some versions."""


class PluginInfo(Struct, frozen=True):
    """What a plugin says of itself. ``endpoint`` is a path as the plugin sees it; empty: the socket that was asked."""

    kind: str
    name: str
    endpoint: str = ""
    versions: tuple[str, ...] = ()


def decode_info(data: bytes) -> PluginInfo:
    """Read GetInfo's answer.

    Raises:
        MalformedError: it is none, or larger than any plugin's.
    """
    if len(data) > MAX_INFO:
        raise MalformedError(f"the PluginInfo is too long ({len(data)} bytes). Allowed: {MAX_INFO}")
    message = parse(pb.PluginInfo, data, _API)
    return PluginInfo(message.type, message.name, message.endpoint, tuple(message.supported_versions))


def encode_status(error: str) -> bytes:
    """Spell NotifyRegistrationStatus's request: registered, or why not."""
    return pb.RegistrationStatus(plugin_registered=not error, error=error).SerializeToString()


def encode_info(info: PluginInfo) -> bytes:
    """Spell GetInfo's answer."""
    return pb.PluginInfo(
        type=info.kind, name=info.name, endpoint=info.endpoint, supported_versions=info.versions
    ).SerializeToString()


def decode_status(data: bytes) -> str:
    """Read NotifyRegistrationStatus's request: why the plugin isn't registered, empty where it is.

    Raises:
        MalformedError: it is none.
    """
    message = parse(pb.RegistrationStatus, data, _API)
    return "" if message.plugin_registered else message.error[:LONGEST_REASON] or "refused, without a reason"
