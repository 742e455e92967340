"""An operator's orders about devices over the control socket, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.wires.control import ControlError, shown

CORDON_ANNOTATION: Final = "device-plugin-gateway.io/cordon"
"""A node's annotation: the IDs of devices that are cordoned while they are in it, separated by commas."""
ORDERS: Final = ("cordon", "uncordon", "forget")
HANDLES: Final = ("release", "acquire")
HANDLE_TIME: Final = 20.0
"""Seconds within which the driver must answer."""
_ID_CHARS: Final = 256
_MAX_IDS: Final = 128
_REASON_CHARS: Final = 256


class Order(msgspec.Struct, frozen=True):
    """An order about a device: ``op`` is one of ``ORDERS``; only ``cordon`` has a reason."""

    op: str
    device_id: str
    reason: str = ""


class FoundDevice(msgspec.Struct, frozen=True):
    """A device in one resource: its state before and now (a ``devices.life.states.State`` in words), and who holds it."""

    resource: str
    before: str
    now: str
    holder: str | None = None


class OrderOutcome(msgspec.Struct, frozen=True):
    """The result of an order: did it change anything, and in which resources was the device found?"""

    changed: bool
    found: tuple[FoundDevice, ...] = ()


class Handled(msgspec.Struct, frozen=True):
    """The result of releasing or acquiring hardware: the IDs of all devices on it, and their holders (null: unknown)."""

    devices: tuple[str, ...]
    holders: dict[str, str] | None = None


def order(request: Mapping[str, Any]) -> Order:
    """Read ``{"op", "id", "reason"}``, from a command line or a socket.

    Raises:
        ControlError: it is not an order; the message says why.
    """
    op = request.get("op")
    if op not in ORDERS:
        raise ControlError(f"unknown order {shown(op)}. Allowed: {', '.join(ORDERS)}")
    device_id = _one_line(request.get("id"), "a device ID", _ID_CHARS)
    return Order(op, device_id, _one_line(request.get("reason"), "a reason", _REASON_CHARS) if op == "cordon" else "")


def handle_ids(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Read ``{"ids"}`` of a request to release or acquire hardware; an empty list means all devices.

    Raises:
        ControlError: they are not IDs; the message says why.
    """
    ids = request.get("ids")
    if not isinstance(ids, list | tuple) or len(ids) > _MAX_IDS:
        raise ControlError(f"not a list of at most {_MAX_IDS} device IDs: {shown(ids)}. Leave them out for all")
    return tuple(dict.fromkeys(_one_line(device_id, "a device ID", _ID_CHARS) for device_id in ids))


def _one_line(text: object, what: str, limit: int) -> str:
    if isinstance(text, str) and text.strip() and text.isprintable() and len(text) <= limit:
        return text
    raise ControlError(f"not {what} of at most {limit} printable characters: {shown(text)}")
