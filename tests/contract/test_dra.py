"""Claims: the scheduler sees each GPU, the kubelet has it prepared, and nobody else gets it."""

from __future__ import annotations

import pytest

from tests.contract.cluster import Cluster
from tests.contract.node import GPU, Node

A, B = "GPU-a", "GPU-b"


@pytest.mark.parametrize("version", ["1.32", "1.33", "1.34", "1.37"])
async def test_a_claim_gets_the_gpu_that_it_was_allocated(node: Node, version: str) -> None:
    node.simulate(
        {GPU: {"gpus": [{"uuid": A, "device_nodes": ["/dev/nvidia0"]}, {"uuid": B, "device_nodes": ["/dev/nvidia1"]}]}}
    )
    async with Cluster(node, version) as cluster:
        await cluster.start_kubelet(version)
        cluster.gateway("--dra", "only")
        await cluster.published_is(gpu_0=[], gpu_1=[])
        claim = cluster.claim("one")
        got = await cluster.prepare(claim)
        assert len(got.gpus) == 1
        assert got.nodes == ("/dev/nvidia0",)
