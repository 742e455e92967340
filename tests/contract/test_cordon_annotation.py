"""Cordons by the node's annotation: for operators who have no shell on the node."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from tests.contract.cluster import AT, Cluster
from tests.contract.node import GPU, Gateway, Node, OrderError
from tests.contract.test_cluster import A, B, cluster_of
from tests.contract.test_sharing import configure

KEY = "device-plugin-gateway.io/cordon"
WATCHES = "--node-events"


@pytest.fixture
def cluster(node: Node) -> AbstractAsyncContextManager[Cluster]:
    return cluster_of(node)


async def cordoned_are(node: Node, one: Gateway, *ids: str, seconds: float = 60) -> None:
    """Wait until these devices are cordoned, and no other."""

    async def so() -> bool:
        return {device for device, state in (await one.states()).items() if state == "cordoned"} == {*ids}

    await node.eventually(so, f"{ids or 'no device'} to be cordoned", seconds)


async def reasons(one: Gateway) -> dict[str, str]:
    """Return what the status says of each device, by ID."""
    return {
        device["id"]: device["reason"]
        for resource in (await one.status())["resources"]
        for device in resource["devices"]
    }


def lift(cluster: Cluster) -> None:
    """Remove the node's annotations."""
    cluster.server.change(AT, lambda node: node["metadata"].pop("annotations"))


@pytest.mark.parametrize("options", [(WATCHES,), ("--node-condition",), ("--dra", "on"), ("--dra", "only")], ids=str)
async def test_what_the_annotation_names_is_cordoned_while_it_is_there(
    node: Node, cluster: Cluster, options: tuple[str, ...]
) -> None:
    one = cluster.gateway(*options)
    await cordoned_are(node, one)
    cluster.annotate(cordon=f" {A},, {B}")
    await cordoned_are(node, one, A, B)
    assert f"by the node's annotation {KEY}" in (await reasons(one))[A]
    cluster.annotate(cordon=B)
    await cordoned_are(node, one, B)
    lift(cluster)
    await cordoned_are(node, one)


async def test_a_pod_keeps_its_gpu_and_no_new_one_gets_it(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway(WATCHES)
    await node.allocatable_is(2)
    (held,) = (await node.admit("pod")).devices[GPU]
    cluster.annotate(cordon=held)
    await node.allocatable_is(1)
    assert {held} == {*node.pods()["pod"]["main"][GPU]}
    node.remove("pod")
    await node.pass_time(30)
    assert held not in (await node.admit("next")).devices[GPU]
    await cordoned_are(node, one, held)


async def test_a_gpus_uuid_means_all_that_is_offered_of_it(node: Node, cluster: Cluster) -> None:
    node.shared = (GPU,)
    sharing = configure(node, {"sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": 3}]}}})
    cluster.gateway(WATCHES, *sharing)
    await node.allocatable_is(6)
    cluster.annotate(cordon=A)
    await node.allocatable_is(3)


async def test_the_last_annotation_counts_while_the_api_server_is_away(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway(WATCHES)
    cluster.annotate(cordon=A)
    await cordoned_are(node, one, A)
    await cluster.server.stop()
    lift(cluster)
    await node.pass_time(60)
    one.kill()
    two = cluster.gateway(WATCHES)
    await cordoned_are(node, two, A)
    await node.pass_time(120)
    await cordoned_are(node, two, A)
    await cluster.server.start()
    await cordoned_are(node, two, seconds=300)


async def test_the_gateway_that_takes_over_goes_on_with_it(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway(WATCHES)
    cluster.annotate(cordon=A)
    await cordoned_are(node, one, A)
    two = cluster.gateway(WATCHES)
    await node.until(lambda: two.said("registered"), "the newer one to lead")
    await cordoned_are(node, two, A)
    cluster.annotate(cordon=B)
    await cordoned_are(node, two, B)


async def test_neither_command_nor_annotation_lifts_the_other_s_cordon(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway(WATCHES)
    await node.allocatable_is(2)
    cluster.annotate(cordon=f"{A},{B}")
    await cordoned_are(node, one, A, B)
    with pytest.raises(OrderError, match=f"the node's annotation {KEY} names {A}. Take it out there"):
        await one.order("uncordon", id=A)
    await one.order("cordon", id=B, reason="ticket 4711")
    assert (await reasons(one))[B] == "ticket 4711"
    lift(cluster)
    await cordoned_are(node, one, B)
    await one.order("uncordon", id=B)
    await cordoned_are(node, one)


async def test_names_that_no_device_has_are_told_and_an_index_is_none(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway(WATCHES)
    await node.allocatable_is(2)
    cluster.annotate(cordon=f"0,{B}")
    await cordoned_are(node, one, B)
    (told,) = (await one.status())["hindrances"]
    assert told["source"] == f"annotation {KEY}"
    assert told["reason"] == "no device here is called 0. Write whole IDs"
    await node.eventually(one.is_ready, "readiness all the same")
    cluster.annotate(cordon="GPU-\x07")

    async def unprintable() -> bool:
        return any("printable" in hindrance["reason"] for hindrance in (await one.status())["hindrances"])

    await node.eventually(unprintable, "the reason")
    await cordoned_are(node, one, B)
    cluster.annotate(cordon="")
    await cordoned_are(node, one)
    assert not (await one.status())["hindrances"]
