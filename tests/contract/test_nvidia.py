"""NVIDIA's GPUs, as NVML shows them and as they fail: what the kubelet is told, and what containers get."""

from __future__ import annotations

from tests.contract.hardware import Nvidia
from tests.contract.node import Node


async def test_a_gpu_with_an_xid_is_unhealthy_and_the_others_are_not(node: Node) -> None:
    nvidia = Nvidia(node)
    await node.start_kubelet()
    one = nvidia.gateway()
    await node.allocatable_is(4)
    nvidia.event(2, 79)
    await node.allocatable_is(3)
    await node.pass_time(600)
    assert await one.terminate() == 0
