"""Encode and decode what several APIs have in common: any protobuf message, a device's health, a container's answer.

The container's answer has the same field names in each dialect (a spec of 0.1, the whole answer of v1alpha2, a container's
response of v1beta1), with other field numbers. So the same functions fill and read all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

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
"""Most containers in one request. Kubelets ask for one at a time."""
MAX_NAMES: Final = 200_000
"""Most device IDs in one request. GetPreferredAllocation names every free device, twice if an init container had it."""
_BEGINNINGS: Final = b"\x0a\x12\x8a\x92"
"""The first bytes of texts and messages in fields 1 and 2, in the shortest encoding and in longer ones."""
_PIECE_BYTES: Final = 64 * 1024

CDI_ADVICE = (
    "a container runtime adds more for a CDI name than device nodes, so the gateway can't replace it. "
    "Use environment variables or device nodes, or kubelet 1.29 or later"
)


def parse(kind: type[M], data: bytes, api: str) -> M:
    """Decode a message of an API. Unknown fields are ignored, as every kubelet does.

    Raises:
        MalformedError: it is not protobuf, or a known field has another type or invalid UTF-8.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedError(
            f"{len(data)} bytes are no {kind.DESCRIPTOR.name} of the API {api} ({error}). Does the peer speak {api}?"
        ) from error


def require_bounded(data: bytes) -> None:
    """Refuse a request with too many parts before it is decoded. ``MAX_NAMES`` empty containers take 7 MB then.

    On each level of ``data`` only fields 1 and 2 repeat, as in every request of a kubelet.

    Raises:
        MalformedError: it may have more than ``MAX_NAMES`` device IDs or containers.
    """
    if has_more_of(data, _BEGINNINGS, MAX_NAMES):
        raise MalformedError(
            f"too many device IDs in a request ({len(data)} bytes). Allowed: {MAX_NAMES}. No kubelet asks for so many"
        )


def parse_containers(kind: Any, data: bytes, api: str) -> Any:
    """Decode a request that has one part for each container.

    Raises:
        MalformedError: as ``parse``; it has more than ``MAX_CONTAINERS`` containers, or may have too many device IDs.
    """
    require_bounded(data)
    message = parse(kind, data, api)
    if len(message.container_requests) > MAX_CONTAINERS:
        raise MalformedError(f"too many containers in a request. Allowed: {MAX_CONTAINERS}. Ask for fewer at once")
    return message


def has_more_of(data: bytes, these: bytes, most: int) -> bool:
    """Return True if a message has more than ``most`` of these bytes. Stop at the first piece that shows it.

    Removing the bytes and comparing lengths takes a quarter of the time that counting each takes: at most 3 ms for 4 MiB.
    """
    left = most
    for at in range(0, len(data), _PIECE_BYTES):
        piece = data[at : at + _PIECE_BYTES]
        left -= len(piece) - len(piece.translate(None, these))
        if left < 0:
            return True
    return False


def serialize(message: Message) -> bytes:
    """Encode a message. Equal messages give equal bytes, although protobuf leaves the order of maps open."""
    return message.SerializeToString(deterministic=True)


def health(word: str) -> Health:
    """Decode a device's health. Every word except ``Healthy`` means unhealthy, as for each kubelet (read in 1.8, 1.10, 1.20, 1.28)."""
    return Health.HEALTHY if word == Health.HEALTHY.value else Health.UNHEALTHY


def require_answers(containers: Sequence[ContainerRequest], answers: Sequence[ContainerAnswer]) -> None:
    """Check that each container has an answer. With too few answers a kubelet such as 1.10 panics (kubernetes#66596).

    Raises:
        ValueError: the numbers differ or are 0, which is a defect of the caller.
    """
    if not containers or len(containers) != len(answers):
        raise ValueError(f"{len(answers)} answers for {len(containers)} containers. Each container needs one")


def fill(spec: Spec, answer: ContainerAnswer) -> None:
    """Set the environment variables, mounts and device nodes of a container's answer."""
    for name, value in answer.envs.items():
        spec.envs[name] = value
    for mount in answer.mounts:
        spec.mounts.add(container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only)
    for node in answer.device_nodes:
        spec.devices.add(container_path=node.container_path, host_path=node.host_path, permissions=node.permissions)


def mounts(spec: Spec) -> tuple[Mount, ...]:
    """Return the mounts of a container's answer."""
    return tuple(Mount(mount.container_path, mount.host_path, mount.read_only) for mount in spec.mounts)


def device_nodes(spec: Spec) -> tuple[DeviceNode, ...]:
    """Return the device nodes of a container's answer."""
    return tuple(DeviceNode(node.container_path, node.host_path, node.permissions) for node in spec.devices)
