"""The policies of the topology manager, on the genuine one of 1.37 with two NUMA nodes that the machine need not have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway_lab.kubelets.kubelet import KubeletError
from gateway_lab.trials.scenarios import RESOURCE, Node, device_ids, node
from tests.compat.test_podresources import genuine

pytestmark = pytest.mark.genuine
VERSION = "1.37"
NUMA = (0, 1, 0, 1, 1)
"""The NUMA node of each GPU."""
ALIGNED = "TopologyAffinityError"


@asynccontextmanager
async def kubelet(policy: str) -> AsyncIterator[Node]:
    """Run a node with five GPUs, two of them on the first NUMA node, whose kubelet has this policy."""
    async with node(genuine, gpus={RESOURCE: len(NUMA)}) as made:
        made.describe({RESOURCE: [f"numa: {[*NUMA]}"]})
        await made.start_kubelet(VERSION, numa=[0, 1], topology=policy)
        await made.start_gateway()
        await made.served()
        yield made


async def given(made: Node, pod: str, count: int) -> list[int]:
    """Admit a pod; return the NUMA nodes of the GPUs that it got."""
    ids = device_ids(made.gpus)[RESOURCE]
    admission = await made.the_kubelet.admit(pod, RESOURCE, count)
    return sorted(NUMA[ids.index(one)] for one in admission.devices[RESOURCE])


async def refused(made: Node, pod: str, count: int) -> None:
    """See that a pod isn't admitted, because its GPUs aren't on one NUMA node."""
    with pytest.raises(KubeletError, match=ALIGNED) as error:
        await made.the_kubelet.admit(pod, RESOURCE, count)
    assert error.value.stage == "allocate"


@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node"])
async def test_the_gpus_of_a_pod_are_on_one_numa_node_where_that_can_be(policy: str) -> None:
    async with kubelet(policy) as made:
        assert await given(made, "three", 3) == [1, 1, 1]
        assert await given(made, "two", 2) == [0, 0]


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
async def test_more_than_one_numa_node_has_is_refused_only_by_the_strictest_policy(policy: str) -> None:
    async with kubelet(policy) as made:
        if policy == "single-numa-node":
            await refused(made, "four", 4)
        else:
            assert len(await given(made, "four", 4)) == 4
        assert await given(made, "one", 1)  # What was refused holds nothing.


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
async def test_two_gpus_that_are_left_on_two_numa_nodes_are_for_pods_that_need_not_be_near(policy: str) -> None:
    async with kubelet(policy) as made:
        made.set_health({RESOURCE: [0, 3, 4]})
        await made.the_kubelet.wait(RESOURCE, 2)
        if policy in {"none", "best-effort"}:
            assert await given(made, "two", 2) == [0, 1]
        else:
            await refused(made, "two", 2)


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
async def test_an_unhealthy_gpu_is_not_counted_on_its_numa_node(policy: str) -> None:
    async with kubelet(policy) as made:
        made.set_health({RESOURCE: [0]})
        await made.the_kubelet.wait(RESOURCE, len(NUMA) - 1)
        assert await given(made, "three", 3) == [1, 1, 1]
        assert await given(made, "one", 1) == [0]
