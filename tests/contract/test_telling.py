"""What a gateway says of itself is what is so: status, readiness, metrics, the words to a service manager."""

from __future__ import annotations

import pytest

from tests.contract.node import Node


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.10", "1.12", "1.20", "1.28", "1.34", "1.37"])
async def test_status_metrics_and_readiness_say_what_the_kubelets_records_say(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    one = node.gateway()
    await node.allocatable_is(8)
    await node.admit("pod")
    await node.admit("other", count=3)
    await node.truthful()
    node.remove("pod")
    await node.admit("third", count=3)
    node.gateway()
    await node.truthful()
    assert await one.terminate() == 0
    await node.truthful()
    await node.start_kubelet(version)
    await node.truthful()
    node.kill_kubelet()
    await node.truthful()
