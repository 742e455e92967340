"""The pluginregistration API: how a kubelet finds a DRA driver by a socket in its folder ``plugins_registry``."""

from __future__ import annotations

from typing import Final

from adapters.dialect import MalformedError
from adapters.dra.spelling import parse, serialize
from adapters.pb.pluginregistration import v1_pb2 as pb
from devices.claims import Driver, Registered

SERVICE: Final = "pluginregistration.Registration"
GET_INFO: Final = "GetInfo"
NOTIFY: Final = "NotifyRegistrationStatus"
_TYPE: Final = "DRAPlugin"


def encode_info(driver: Driver) -> bytes:
    """Spell who the driver is."""
    return serialize(
        pb.PluginInfo(type=_TYPE, name=driver.name, endpoint=driver.endpoint, supported_versions=driver.services)
    )


def decode_info(data: bytes) -> Driver:
    """Read who a driver is, as a kubelet does.

    Raises:
        MalformedError: it is nothing of that kind, or no DRA driver.
    """
    message = parse(pb.PluginInfo, data, SERVICE)
    if message.type != _TYPE:
        raise MalformedError(f"expected a plugin of type {_TYPE}, got {message.type[:64]!r}")
    return Driver(message.name, message.endpoint, tuple(message.supported_versions))


def encode_status(status: Registered) -> bytes:
    """Spell what became of the registration, as a kubelet does."""
    return serialize(pb.RegistrationStatus(plugin_registered=not status.reason, error=status.reason))


def decode_status(data: bytes) -> Registered:
    """Read what became of the registration.

    Raises:
        MalformedError: it is nothing of that kind.
    """
    message = parse(pb.RegistrationStatus, data, SERVICE)
    return Registered("" if message.plugin_registered else message.error or "it gave no reason")
