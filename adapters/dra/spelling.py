"""What these APIs spell alike: bytes that become a message, and back."""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from adapters.dialect import MalformedError

M = TypeVar("M", bound=Message)

MAX_BYTES: Final = 1024 * 1024
"""The most bytes of a request. A pod has at most 64 claims, of some 600 bytes each."""


def parse(kind: type[M], data: bytes, api: str) -> M:
    """Read ``data`` as a message of ``kind``; fields that it doesn't know are ignored.

    Raises:
        MalformedError: it is none, or larger than any that a kubelet sends.
    """
    if len(data) > MAX_BYTES:
        raise MalformedError(f"expected a {kind.DESCRIPTOR.name} of at most {MAX_BYTES} bytes, got {len(data)}")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedError(
            f"expected a {kind.DESCRIPTOR.name} of {api}, got {len(data)} bytes that are none ({error}); check that the "
            f"peer speaks {api}"
        ) from error


def serialize(message: Message) -> bytes:
    """Spell ``message``; the same message always gives the same bytes (protobuf leaves the order of maps open)."""
    return message.SerializeToString(deterministic=True)
