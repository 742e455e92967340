"""The kubelet finds the gateway, whichever API it speaks, and finds it again."""

from __future__ import annotations

import pytest

from tests.contract.node import GPU, Node


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.10", "1.20", "1.28", "1.34", "1.37"])
async def test_a_pod_gets_a_gpu_and_keeps_it_through_a_restart_of_the_kubelet(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    node.gateway()
    await node.allocatable_is(8)
    given = await node.admit("first")
    assert given.answer.envs["NVIDIA_VISIBLE_DEVICES"] == given.devices[GPU][0]
    await node.start_kubelet(version)
    await node.allocatable_is(8)
    await node.admit("second")
