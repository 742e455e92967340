"""The dialect v1alpha2 of kubelet 1.9: Allocate answers flatly, for the one container that it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.alpha import Alpha
from adapters.dialect import Level
from adapters.pb.v1alpha import v1alpha2_pb2 as pb
from adapters.spelling import device_nodes, fill, mounts, parse
from devices.model import ContainerAnswer, ContainerRequest

if TYPE_CHECKING:
    from adapters.dialect import Dialect

NAME = "v1alpha2"


def _spell(_container: ContainerRequest, answer: ContainerAnswer) -> pb.AllocateResponse:
    message = pb.AllocateResponse()
    fill(message, answer)
    return message


def _read(data: bytes) -> ContainerAnswer:
    message = parse(pb.AllocateResponse, data, NAME)
    return ContainerAnswer(dict(message.envs), mounts(message), device_nodes(message))


# At each list, and after each Allocate, 1.9 writes its checkpoint in place and under no lock: two at once leave it broken, and
# what pods hold is given away after the next start. 1.8 writes after Allocate only, one pod at a time; 1.10 renames into place.
V1ALPHA2: Dialect = Alpha(NAME, Level(9, 9), _spell, _read, pb.DESCRIPTOR, spacing=0.02)
