"""Pods that ask by name for GPUs of DRA, and GPUs that another DRA driver has: counted, withheld, and given back at the right moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import pytest

from tests.contract.claiming import A, B, all_to_dra, both, cross, device_class, side, sides, words
from tests.contract.cluster import AT, NVIDIA, Claim, Cluster, UnschedulableError
from tests.contract.node import GPU, Node, OrderError

THEIRS = "dra.example.com"


@pytest.fixture
def cluster(node: Node) -> AbstractAsyncContextManager[Cluster]:
    return both(node)


def kubelet_is(cluster: Cluster, version: str) -> None:
    """Have the API server say that the node has this kubelet."""
    cluster.server.change(AT, lambda one: one["status"]["nodeInfo"].update(kubeletVersion=version))


async def by_name(cluster: Cluster) -> Mapping[str, str]:
    """Return what the status says of pods that ask by name."""
    return dict((await cluster.node.gateways[-1].status())["by_name"])


async def lent(cluster: Cluster) -> Claim:
    """Have A on its way back because a pod that asked by name has it, and B back; return that pod's claim."""
    claim = cluster.claim("claim", "gpu-0", by_name=True)
    await cluster.prepare(claim)
    await cross(cluster, "plugin")
    await sides(cluster, "to-plugin", "plugin")
    await cluster.node.allocatable_is(2)
    return claim


# -- pods that would run without their GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["nothing", "no"])
async def test_nothing_moves_while_nobody_says_whether_pods_ask_by_name(node: Node, said: str) -> None:
    async with both(node, "1.35") as cluster:
        if said == "no":
            cluster.server.hidden = "deviceclasses"
        else:
            cluster.server.remove(f"{cluster.api}/deviceclasses/{NVIDIA}")
        with pytest.raises(OrderError, match="it can't be known whether pods that ask by name"):
            await cross(cluster, "dra")
        await sides(cluster, "plugin", "plugin")
        assert cluster.allocatable == 2


async def test_what_pods_by_name_would_run_without_is_offered_to_nobody_new_and_claims_keep_it(node: Node) -> None:
    async with both(node, "1.35") as cluster:
        await all_to_dra(cluster)
        held = cluster.claim("held", "gpu-0")
        got = await cluster.prepare(held)
        late = cluster.claim("late", "gpu-1")
        device_class(cluster)
        await cluster.published_is(180, gpu_0=["by-name"], gpu_1=["by-name"])
        assert f"the DeviceClass {NVIDIA} has the extendedResourceName {GPU}" in (await by_name(cluster))["overlooked"]
        assert await cluster.prepare(held) == got
        assert (await cluster.prepare(late)).gpus == {B}
        await cluster.end(held)
        with pytest.raises(UnschedulableError):
            cluster.claim("new")
        device_class(cluster, "other.com/gpu")
        await cluster.published_is(180, gpu_0=[], gpu_1=[])
        assert not (await by_name(cluster))["overlooked"]


async def test_an_older_kubelet_on_the_node_counts_at_once(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    device_class(cluster)
    await node.pass_time(150)
    await cluster.published_is(gpu_0=[], gpu_1=[])
    kubelet_is(cluster, "v1.35.2")
    await cluster.published_is(3, gpu_0=["by-name"], gpu_1=["by-name"])
    kubelet_is(cluster, "v1.37.1")
    await cluster.published_is(3, gpu_0=[], gpu_1=[])
    kubelet_is(cluster, "unknown")
    await cluster.published_is(3, gpu_0=["by-name"], gpu_1=["by-name"])


@pytest.mark.parametrize("classes", ["named", "hidden"])
async def test_a_new_gateway_offers_nothing_that_pods_would_lack(node: Node, cluster: Cluster, classes: str) -> None:
    await all_to_dra(cluster)
    device_class(cluster)
    node.gateways[-1].kill()
    cluster.wipe()
    kubelet_is(cluster, "v1.35.2")
    cluster.server.hidden = "deviceclasses" if classes == "hidden" else ""
    before = len(cluster.server.requests)
    cluster.gateway("--dra", "on")
    await cluster.published_is(gpu_0=["by-name"], gpu_1=["by-name"])
    slices = [one for one in cluster.server.requests[before:] if one.method == "PATCH" and "resourceslices" in one.path]
    assert all(device.get("taints") for one in slices for device in one.body["spec"]["devices"])
    device_class(cluster, "")
    cluster.server.hidden = ""
    await cluster.published_is(150, gpu_0=[], gpu_1=[])


async def test_people_read_that_pods_by_name_wait_for_a_class_where_they_had_one(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    await cluster.prepare(cluster.claim("claim", "gpu-0"))
    await node.pass_time(150)
    assert not (await by_name(cluster))["waiting"]  # People may want claims alone.
    device_class(cluster)
    await node.pass_time(150)
    device_class(cluster, "")
    await node.pass_time(150)
    assert (await by_name(cluster))["waiting"].startswith(f"no DeviceClass has the extendedResourceName {GPU}")
    await cluster.published_is(gpu_0=[], gpu_1=[])
    device_class(cluster)
    await node.pass_time(150)
    assert not (await by_name(cluster))["waiting"]


async def test_people_read_it_also_where_a_pod_got_its_gpu_by_name_before(cluster: Cluster) -> None:
    await all_to_dra(cluster)
    await cluster.prepare(cluster.claim("claim", "gpu-0", by_name=True))
    assert (await by_name(cluster))["waiting"]


# -- on the way back --------------------------------------------------------------------------------------------------


async def test_on_the_way_back_a_pod_counts_also_while_its_claim_is_not_prepared(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0", by_name=True)
    await cross(cluster, "plugin")
    await node.allocatable_is(1)  # It may be prepared, or be over, in a moment.
    await node.allocatable_is(2)
    await node.until(lambda: cluster.allocatable == 2, "the API server to show both", 3)
    assert (await node.admit("pod")).devices[GPU] == (B,)
    assert (await cluster.prepare(claim)).gpus == {A}
    await node.pass_time(5)
    await cluster.unprepare(claim)  # The API server has its claim for a while.
    assert (await node.admit("next")).devices[GPU] == (A,)


async def test_what_is_over_before_it_is_prepared_comes_back(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0", by_name=True)
    await cross(cluster, "plugin")
    await node.allocatable_is(2)
    cluster.forget(claim)
    await sides(cluster, "plugin", "plugin")
    await node.admit("pod", count=2)


async def test_what_a_pod_by_name_has_is_given_to_no_other_and_not_forgotten(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = await lent(cluster)
    cluster.restart_gateway("--dra", "on")
    await cluster.connected()
    await node.allocatable_is(2)
    await node.admit("pod")
    assert "default/claim" in await node.refused("other")
    await cluster.prepare(claim)
    await cross(cluster, "dra", A)  # It is counted no more.
    await node.allocatable_is(1)
    await node.until(lambda: cluster.allocatable == 1, "the API server to show one", 3)
    await sides(cluster, "dra", "plugin")


async def test_what_a_pod_by_name_had_is_the_next_ones_at_once(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = await lent(cluster)
    await node.admit("pod")
    await node.pass_time(20)
    await cluster.unprepare(
        claim
    )  # The kubelet says then that the pod ended. The API server has its claim for a while.
    assert (await node.admit("next")).devices[GPU] == (A,)
    await node.until(lambda: cluster.allocatable == 2, "the API server to show both", 3)


async def test_what_a_pod_by_name_had_waits_while_a_slice_offers_it(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0", by_name=True)
    await cluster.prepare(claim)
    cluster.server.forbidden = "resourceslices"
    await cross(cluster, "plugin", A)
    await node.allocatable_is(1)
    await cluster.end(claim)
    await node.pass_time(20)
    await sides(cluster, "to-plugin", "dra")
    assert node.allocatable() == 1  # It is counted until it is back.
    cluster.server.forbidden = ""
    await sides(cluster, "plugin", "dra")
    assert (await node.admit("pod")).devices[GPU] == (A,)


async def test_what_a_pod_by_name_had_waits_until_the_slices_are_known(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0", by_name=True)
    await cluster.prepare(claim)
    cluster.server.forbidden = "resourceslices"  # So a slice goes on offering it.
    await cross(cluster, "plugin", A)
    node.gateways[-1].kill()
    cluster.server.hidden = "resourceslices"
    cluster.gateway("--dra", "on")
    await cluster.connected()
    await node.pass_time(5)
    await cluster.end(claim)
    await node.pass_time(10)
    await sides(cluster, "to-plugin", "dra")
    cluster.server.hidden = cluster.server.forbidden = ""
    await sides(cluster, "plugin", "dra")


async def test_an_order_to_dra_counts_though_the_pod_by_name_ends_meanwhile(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = await lent(cluster)
    await node.pass_time(20)
    cluster.server.forbidden = "resourceslices"
    node.disk.hang(writers=True)
    ordering = asyncio.create_task(cross(cluster, "dra", A))
    await node.pass_time(0.8)
    ending = asyncio.create_task(cluster.unprepare(claim))
    await node.pass_time(0.5)
    node.disk.go_on()
    await asyncio.gather(ordering, ending)
    cluster.server.forbidden = ""
    cluster.forget(claim)
    await node.pass_time(10)
    await sides(cluster, "dra", "plugin")


async def test_of_a_shared_gpu_that_a_pod_had_by_name_another_claim_keeps_its_part(node: Node) -> None:
    file = node.folder / "config.yaml"
    file.write_text(
        f'{{"version": "v1", "sharing": {{"timeSlicing": {{"resources": [{{"name": "{GPU}", "replicas": 2}}]}}}}}}'
    )
    node.shared = (GPU,)
    node.simulate({GPU: {"gpus": [{"uuid": A, "device_nodes": ["/dev/nvidia0"]}]}})
    async with Cluster(node, "1.37") as cluster:
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "on", "--config-file", str(file))
        await node.allocatable_is(2)
        await cluster.connected()
        await cross(cluster, "dra")
        await node.until(lambda: len(cluster.published()) == 2, "both replicas")
        one, other = cluster.claim("one", by_name=True), cluster.claim("other")
        await node.kubelet.ask(cluster.dra.prepare(one))
        await cross(cluster, "plugin")
        await node.pass_time(10)
        await node.kubelet.ask(cluster.dra.unprepare(one))
        await node.pass_time(10)
        await node.refused("pod", count=1)
        cluster.forget(one)
        await node.pass_time(10)
        await node.refused("pod", count=1)
        cluster.forget(other)
        await node.allocatable_is(2)


# -- another DRA driver -----------------------------------------------------------------------------------------------


async def test_people_read_which_driver_has_a_gpu_and_no_pod_gets_it_meanwhile(node: Node, cluster: Cluster) -> None:
    await node.pass_time(20)
    who = f"{THEIRS} offers it as x in {THEIRS}-theirs"
    cluster.offer(THEIRS, x=A)
    await node.allocatable_is(1, seconds=0.4)  # It isn't waited for the scheduler.
    row = await side(cluster, A)
    assert (row["side"], row["words"], row["moving_s"]) == ("foreign", f"offered by nobody here: {who}", None)
    [resource] = (await node.gateways[-1].status())["resources"]
    assert {each["id"]: each["stranger"] for each in resource["devices"]} == {A: who, B: ""}
    await cluster.refused(cluster.allocate("late", "gpu-0"), THEIRS)


async def test_a_pod_is_named_that_has_what_another_driver_offers(node: Node, cluster: Cluster) -> None:
    await node.admit("pod", count=2)
    cluster.offer(THEIRS, x=A)
    await words(cluster, A, ": held by ")
    assert "pod" in (await side(cluster, A))["holder"]


async def test_dra_offers_again_what_another_driver_gave_up_once_no_claim_has_it(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    theirs = cluster.offer(THEIRS, x=A)
    await cluster.published_is(gpu_1=[])
    claim = cluster.allocate("theirs", "x", driver=THEIRS)
    cluster.server.remove(theirs)
    await words(cluster, A, "claim default/theirs may have it")
    await node.pass_time(120)
    await cluster.published_is(gpu_1=[])
    await sides(cluster, "dra", "dra")
    cluster.forget(claim)
    await cluster.published_is(gpu_0=[], gpu_1=[])
    cluster.offer(THEIRS, x=A)
    await cluster.published_is(gpu_1=[])
    await cross(cluster, "plugin")
    await sides(cluster, "foreign", "plugin")
    assert node.allocatable() == 1
    cluster.server.remove(theirs)
    await sides(cluster, "plugin", "plugin", 90)
    await node.allocatable_is(2)


async def test_what_drivers_give_up_one_after_the_other_is_asked_about_each(node: Node, cluster: Cluster) -> None:
    theirs = cluster.offer(THEIRS, x=A, y=B)
    await node.allocatable_is(0)
    claims = [cluster.allocate(one, one, driver=THEIRS) for one in "xy"]
    cluster.offer(THEIRS, y=B)
    await node.pass_time(40)
    cluster.server.remove(theirs)
    await node.allocatable_after(100, 0)
    for claim in claims:
        cluster.forget(claim)
    await node.allocatable_is(2)


async def test_without_its_state_file_it_gives_nothing_that_another_driver_offers(node: Node) -> None:
    node.simulate({GPU: {"gpus": [{"uuid": A}, {"uuid": B}]}})
    async with Cluster(node, "1.37") as cluster:
        await cluster.start_kubelet("1.37")
        await node.pass_time(2)
        cluster.offer(THEIRS, x=A)
        cluster.gateway("--dra", "on")
        await node.allocatable_is(1)
        await node.pass_time(20)
        assert (await node.admit("pod")).devices[GPU] == (B,)
        await node.refused("other")


async def test_a_new_kubelet_gets_nothing_that_moves_or_is_another_driver_s(node: Node, cluster: Cluster) -> None:
    held = (await node.admit("pod")).devices[GPU][0]
    await cross(cluster, "dra")
    await node.until(lambda: len(cluster.published()) == 1, "one GPU to move")
    cluster.offer(THEIRS, x=held)
    await node.pass_time(5)
    await cluster.start_kubelet("1.37")
    for _ in range(100):
        assert node.allocatable() == 0
        await asyncio.sleep(0.1)
