"""What the dialects spell alike: how bytes become a message, a word a health, and how one container gets its devices.

The three container answers (a spec of 0.1, the whole answer of v1alpha2, a container's response of v1beta1) number
their fields differently but call them the same; so they are filled and read by one piece of code, typed for all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

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

CDI_ADVICE = (
    "a container runtime resolves CDI names to more than device nodes, so nothing else stands for them; "
    "answer with environment variables or device nodes, or run kubelet 1.29 or later"
)


def parse(kind: type[M], data: bytes, dialect: str) -> M:
    """Read ``data`` as a message of ``kind``; fields that it doesn't know are ignored, as every kubelet does.

    Raises:
        MalformedError: the bytes are no protobuf, or have another type (or broken UTF-8) under a known field number.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        message = (
            f"expected a {kind.DESCRIPTOR.name} of device plugin API {dialect}, got {len(data)} bytes that are none "
            f"({error}); check that the peer speaks {dialect}"
        )
        raise MalformedError(message) from error


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
        message = f"expected one answer for each container, at least one; got {len(answers)} for {len(containers)}"
        raise ValueError(message)


def fill(spec: Spec, answer: ContainerAnswer) -> None:
    """Put the environment variables, mounts and device nodes of ``answer`` into ``spec``."""
    spec.envs.update(answer.envs)
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
