"""The dialect "0.1" of kubelet 1.8: Allocate answers with one spec for each device ID.

Neither side notices the form of 1.9, which has the same service name (kubernetes#53031): here it is silently empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.alpha import Alpha
from adapters.dialect import Level
from adapters.pb.v1alpha import v0_1_pb2 as pb
from adapters.spelling import device_nodes, fill, mounts, parse
from devices.model import ContainerAnswer, ContainerRequest, DeviceNode, Mount

if TYPE_CHECKING:
    from adapters.dialect import Dialect

NAME = "0.1"


def _spell(container: ContainerRequest, answer: ContainerAnswer) -> pb.AllocateResponse:
    """Give each device ID of the request its spec, with everything on the first, since the kubelet merges them."""
    specs = [pb.DeviceRuntimeSpec(ID=device_id) for device_id in container.device_ids or ("",)]
    fill(specs[0], answer)
    return pb.AllocateResponse(spec=specs)


def _read(data: bytes) -> ContainerAnswer:
    """Merge the specs as kubelet 1.8 does: of a variable or container path that is there twice, the first counts."""
    envs: dict[str, str] = {}
    mounted: dict[str, Mount] = {}
    nodes: dict[str, DeviceNode] = {}
    for spec in parse(pb.AllocateResponse, data, NAME).spec:
        envs = {**spec.envs, **envs}
        for mount in mounts(spec):
            mounted.setdefault(mount.container_path, mount)
        for node in device_nodes(spec):
            nodes.setdefault(node.container_path, node)
    return ContainerAnswer(envs, tuple(mounted.values()), tuple(nodes.values()))


V0_1: Dialect = Alpha(
    NAME, Level(8, 8), _spell, _read, pb.DESCRIPTOR, asks_again=True, writes_late=True, names_itself=False
)
