"""What is spelled alike: how bytes become a message, of any API here; and of the dialects a device's health and a container's answer.

The three container answers (a spec of 0.1, the whole answer of v1alpha2, a container's response of v1beta1) number
their fields differently but call them the same; so they are filled and read by one piece of code, typed for all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from adapters.dialect import MalformedError
from devices.model import ContainerAnswer, DeviceNode, Health, Mount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.pb.v1alpha import v0_1_pb2, v1alpha2_pb2
    from adapters.pb.v1beta1 import v1beta1_pb2
    from devices.model import ContainerRequest

    Spec: TypeAlias = v0_1_pb2.DeviceRuntimeSpec | v1alpha2_pb2.AllocateResponse | v1beta1_pb2.ContainerAllocateResponse

M = TypeVar("M", bound=Message)

MAX_CONTAINERS: Final = 1024
"""The most containers in one request; kubelets ask for one at a time."""
MAX_NAMES: Final = 200_000
"""The most device IDs in one request: GetPreferredAllocation names every free device, twice if an init container had it."""
_BEGINNINGS: Final = b"\x0a\x12\x8a\x92"
"""The bytes with which texts and messages of field 1 and 2 begin, in the shortest spelling and in longer ones."""
_PIECE: Final = 64 * 1024
_LONGEST_VARINT: Final = 10

CDI_ADVICE = (
    "a container runtime resolves CDI names to more than device nodes, so nothing else stands for them; "
    "answer with environment variables or device nodes, or run kubelet 1.29 or later"
)


def parse(kind: type[M], data: bytes, api: str) -> M:
    """Read ``data`` as a message of ``kind``, for ``api``; fields that it doesn't know are ignored, as every kubelet does.

    Raises:
        MalformedError: the bytes are no protobuf, or have another type (or broken UTF-8) under a known field number.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        message = (
            f"{len(data)} bytes are no {kind.DESCRIPTOR.name} of the API {api} ({error}). Does the peer speak {api}?"
        )
        raise MalformedError(message) from error


def require_bounded(data: bytes, *, containers: bool) -> None:
    """Check how much a request can hold before it is decoded: an empty container is 2 bytes on the wire and 150 in memory.

    Args:
        data: a request whose fields number 1 and 2 are all that repeats, on each level (as in every request of a kubelet).
        containers: whether its first level is containers, and not device IDs.

    Raises:
        MalformedError: it may hold more than ``MAX_NAMES`` device IDs, or holds more than ``MAX_CONTAINERS`` containers.
    """
    if len(data) <= MAX_CONTAINERS:  # Each takes a byte at least.
        return
    if has_more_of(data, _BEGINNINGS, MAX_NAMES):
        raise MalformedError(
            f"too many device IDs in a request ({len(data)} bytes). Allowed: {MAX_NAMES}. No kubelet asks for so many"
        )
    if containers and has_more_fields(data, MAX_CONTAINERS):
        raise MalformedError(f"too many containers in a request. Allowed: {MAX_CONTAINERS}. Ask for fewer at once")


def has_more_of(data: bytes, these: bytes, most: int) -> bool:
    """Whether a message has more than so many of these bytes. It is looked at no further than that shows.

    To take them out is a quarter of what it costs to count one after another: 4 MiB take 3 ms at most.
    """
    left = most
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        left -= len(piece) - len(piece.translate(None, these))
        if left < 0:
            return True
    return False


def has_more_fields(data: bytes, most: int) -> bool:
    """Whether the first level of a message has more than so many fields; what is no message is left to its parser."""
    at = count = 0
    while at < len(data):
        count += 1
        if count > most:
            return True
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                length, at = _varint(data, at)
                at += length
            case 5:
                at += 4
            case _:  # A group begins or ends, which has no length: what is in it is counted, too.
                pass
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a variable-length number; return it and where it ends."""
    number = shift = 0
    for byte in data[at : at + _LONGEST_VARINT]:
        number |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            break
    return number, at


def serialize(message: Message) -> bytes:
    """Spell ``message``; the same message always gives the same bytes (protobuf leaves the order of maps open)."""
    return message.SerializeToString(deterministic=True)


def health(word: str) -> Health:
    """Read a device's health. Any word but ``Healthy`` is unhealthy: so counts each kubelet (read in 1.8, 1.10, 1.20, 1.28)."""
    return Health.HEALTHY if word == Health.HEALTHY.value else Health.UNHEALTHY


def require_answers(containers: Sequence[ContainerRequest], answers: Sequence[ContainerAnswer]) -> None:
    """Check that each container has its answer: a short list panics kubelets of 1.10's age (kubernetes#66596).

    Raises:
        ValueError: the numbers differ or are 0, which is a mistake of the caller.
    """
    if not containers or len(containers) != len(answers):
        message = f"{len(answers)} answers for {len(containers)} containers. Each container needs one"
        raise ValueError(message)


def fill(spec: Spec, answer: ContainerAnswer) -> None:
    """Put the environment variables, mounts and device nodes of ``answer`` into ``spec``."""
    for name, value in answer.envs.items():
        spec.envs[name] = value
    for mount in answer.mounts:
        spec.mounts.add(container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only)
    for node in answer.device_nodes:
        spec.devices.add(container_path=node.container_path, host_path=node.host_path, permissions=node.permissions)


def mounts(spec: Spec) -> tuple[Mount, ...]:
    """Read the mounts of ``spec``."""
    return tuple(Mount(mount.container_path, mount.host_path, mount.read_only) for mount in spec.mounts)


def device_nodes(spec: Spec) -> tuple[DeviceNode, ...]:
    """Read the device nodes of ``spec``."""
    return tuple(DeviceNode(node.container_path, node.host_path, node.permissions) for node in spec.devices)
