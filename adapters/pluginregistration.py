"""The kubelet's plugin registration API: the kubelet asks a socket for its plugin, and reports if it registered it.

Kubelet 1.11 and later has it. Its versions have the same encoding.
"""

from __future__ import annotations

from msgspec import Struct

from adapters.dialect import MalformedError
from adapters.pb.pluginregistration import v1_pb2 as pb
from adapters.spelling import parse

GET_INFO = "/pluginregistration.Registration/GetInfo"
NOTIFY = "/pluginregistration.Registration/NotifyRegistrationStatus"
DEVICE_PLUGIN = "DevicePlugin"
"""The type of a device plugin. Other types are drivers for volumes and for dynamic resources."""
REASON_CHARS = 1024
"""Most characters of a refusal that are kept."""
_API = "pluginregistration"
MAX_INFO_BYTES = 64 * 1024
"""Most bytes of an answer to GetInfo: a resource name and some versions."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_INFO_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_retries", 0),
)
"""gRPC's options for the connection to a plugin."""


class PluginInfo(Struct, frozen=True):
    """What a plugin reports. ``endpoint`` is a path as the plugin sees it; empty: the socket that was asked."""

    kind: str
    name: str
    endpoint: str = ""
    versions: tuple[str, ...] = ()


def decode_info(data: bytes) -> PluginInfo:
    """Decode the answer to GetInfo.

    Raises:
        MalformedError: it is not a PluginInfo, or is too long.
    """
    if len(data) > MAX_INFO_BYTES:
        raise MalformedError(f"the PluginInfo is too long ({len(data)} bytes). Allowed: {MAX_INFO_BYTES}")
    message = parse(pb.PluginInfo, data, _API)
    return PluginInfo(message.type, message.name, message.endpoint, tuple(message.supported_versions))


def encode_status(error: str) -> bytes:
    """Encode the request of NotifyRegistrationStatus. ``error`` is why the plugin isn't registered; '' if it is."""
    return pb.RegistrationStatus(plugin_registered=not error, error=error).SerializeToString()


def encode_info(info: PluginInfo) -> bytes:
    """Encode the answer to GetInfo."""
    return pb.PluginInfo(
        type=info.kind, name=info.name, endpoint=info.endpoint, supported_versions=info.versions
    ).SerializeToString()


def decode_status(data: bytes) -> str:
    """Decode the request of NotifyRegistrationStatus. Return why the plugin isn't registered; '' if it is.

    Raises:
        MalformedError: it is not a RegistrationStatus.
    """
    message = parse(pb.RegistrationStatus, data, _API)
    return "" if message.plugin_registered else message.error[:REASON_CHARS] or "refused, without a reason"
