"""A node that serves both APIs: each GPU is given by one of them at a time, through orders, kills and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from contextlib import AbstractAsyncContextManager

import pytest

from gateway_lab.kubelets.kubelet import KubeletError
from tests.contract.claiming import (
    A,
    B,
    all_to_dra,
    both,
    cross,
    device_class,
    sides,
    simulate,
    there_and_back,
    watch_both,
    words,
)
from tests.contract.cluster import AT, NVIDIA, Claim, Cluster, UnschedulableError
from tests.contract.node import GPU, Node, OrderError

VERSIONS = ["1.34", "1.37"]


@pytest.fixture
def cluster(node: Node) -> AbstractAsyncContextManager[Cluster]:
    return both(node)


@pytest.mark.parametrize("version", VERSIONS)
async def test_gpus_go_over_and_back_and_whoever_has_one_keeps_it(node: Node, version: str) -> None:
    async with both(node, version) as cluster:
        twice = watch_both(cluster)
        pod = await node.admit("pod")
        [held] = pod.devices[GPU]
        await cross(cluster, "dra")
        await node.until(lambda: len(cluster.published()) == 1, "one GPU to go over")
        await node.allocatable_is(0)
        claim = cluster.claim("claim")
        got = await cluster.prepare(claim)
        assert held not in got.gpus
        await node.pass_time(30)
        assert len(cluster.published()) == 1
        node.remove("pod")
        await cluster.published_is(gpu_0=[], gpu_1=[])
        other = cluster.claim("other")
        assert (await cluster.prepare(other)).gpus == {held}
        await cross(cluster, "plugin")
        await cluster.published_is(gpu_0=["leaving"], gpu_1=["leaving"])
        await node.pass_time(30)
        assert await cluster.prepare(claim) == got
        assert node.allocatable() == 0
        await cluster.unprepare(claim)
        await node.allocatable_after(10, 0)  # It is allocated still.
        cluster.forget(claim)
        await node.allocatable_is(1)
        await node.admit("next")
        await node.refused("too many")
        await cluster.end(other)
        await node.allocatable_is(2)
        await node.admit("last")
        assert not twice


@pytest.mark.parametrize("to", ["dra", "plugin"])
async def test_an_order_that_was_answered_survives_a_kill_at_that_moment(node: Node, cluster: Cluster, to: str) -> None:
    if to == "plugin":
        await all_to_dra(cluster)
    await cross(cluster, to, A)
    cluster.restart_gateway("--dra", "on")
    await cluster.connected()
    await (sides(cluster, "dra", "plugin") if to == "dra" else sides(cluster, "plugin", "dra"))
    await node.allocatable_is(1)
    await node.until(lambda: [*cluster.published().values()] == [[]], "one GPU at each API")


@pytest.mark.parametrize("moment", [0.0, 0.3, 0.5, 0.55, 0.6, 0.7, 1.2, 2.0])
async def test_a_kill_at_any_moment_of_a_move_gives_no_gpu_twice(node: Node, cluster: Cluster, moment: float) -> None:
    twice = watch_both(cluster)
    claims: list[Claim] = []
    for to in ("dra", "plugin", "dra"):
        ordering = asyncio.create_task(cross(cluster, to))
        await asyncio.sleep(moment)
        node.gateways[-1].kill()
        ordering.cancel()
        cluster.gateway("--dra", "on")
        with contextlib.suppress(UnschedulableError):
            claims.append(cluster.claim(f"claim-{to}"))
            with contextlib.suppress(KubeletError):
                await cluster.prepare(claims[-1])
        with contextlib.suppress(KubeletError):
            await node.admit(f"pod-{to}")
        await cluster.connected()
        await node.pass_time(20)
        for claim in claims:
            await cluster.end(claim)
        claims.clear()
        node.remove(f"pod-{to}")
    await cross(cluster, "plugin")
    await sides(cluster, "plugin", "plugin")
    await node.allocatable_is(2)
    assert not twice


async def test_a_change_of_mind_counts_at_once(node: Node, cluster: Cluster) -> None:
    await node.admit("pod", count=2)
    await cross(cluster, "dra")
    await sides(cluster, "to-dra", "to-dra")
    await node.allocatable_is(0)
    await cross(cluster, "plugin")
    await sides(cluster, "plugin", "plugin")
    await node.allocatable_is(2)
    node.remove("pod")
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0")
    await cluster.prepare(claim)
    await cross(cluster, "plugin", A)
    await cluster.published_is(gpu_0=["leaving"], gpu_1=[])
    assert await cross(cluster, "dra", A) == {A: "dra"}
    await cluster.published_is(gpu_0=[], gpu_1=[])
    await cluster.end(claim)
    await cluster.prepare(cluster.claim("next", "gpu-0"))


async def test_a_claim_that_is_allocated_gets_its_gpu_on_the_way_back(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0")
    cluster.allocate("elsewhere", "gpu-1", pool="n2")  # Of another node, whose device has the same name.
    await cross(cluster, "plugin")
    await node.allocatable_is(1)
    await node.allocatable_after(20, 1)
    assert (await cluster.prepare(claim)).gpus == {A}
    await cluster.end(claim)
    await node.allocatable_is(2)


@pytest.mark.parametrize("held", [1, 2])
async def test_a_late_claim_calls_back_what_nobody_has(node: Node, cluster: Cluster, held: int) -> None:
    pod = await node.admit("pod", count=held)
    late = cluster.allocate("late", "gpu-0" if A not in pod.devices[GPU] or held == 2 else "gpu-1")
    if held == 2:
        await cluster.refused(late)
        await node.restart_container("pod")
    else:
        assert not {*pod.devices[GPU]} & (await cluster.prepare(late)).gpus
        await node.refused("other")


async def test_a_claim_for_supervision_keeps_no_gpu_from_coming_back(node: Node, cluster: Cluster) -> None:
    await there_and_back(cluster)
    await all_to_dra(cluster)
    cluster.allocate("admin", "gpu-0", adminAccess=True)
    await cross(cluster, "plugin")
    await node.allocatable_is(2)


async def test_what_another_driver_offers_is_given_by_neither_api(node: Node, cluster: Cluster) -> None:
    slice_ = cluster.offer("dra.example.com", x=A)
    await node.allocatable_is(1)
    await node.until(lambda: cluster.allocatable == 1, "the scheduler to hear of it", 3)
    await node.admit("pod")
    await node.refused("other")
    early = cluster.allocate("early", "gpu-0")
    await cluster.refused(early)
    cluster.forget(early)
    claim = cluster.allocate("theirs", "x", driver="dra.example.com")
    cluster.server.remove(slice_)
    await node.allocatable_after(60, 1)  # A claim has it still.
    await node.refused("second")
    cluster.forget(claim)
    await node.allocatable_is(2)


async def test_a_pod_keeps_what_another_driver_offers_later(node: Node, cluster: Cluster) -> None:
    await node.admit("pod", count=2)
    cluster.offer("dra.example.com", x=A)
    await node.allocatable_is(1)
    await node.restart_container("pod")
    node.remove("pod")
    assert (await node.admit("next")).devices[GPU] == (B,)
    await node.refused("other")


async def test_what_another_driver_has_stays_withheld_through_a_start_of_all(node: Node, cluster: Cluster) -> None:
    await cross(cluster, "dra", B)
    await sides(cluster, "plugin", "dra")
    slice_ = cluster.offer("dra.example.com", x=A, y=B)
    await node.allocatable_is(0)
    await node.until(lambda: not cluster.published(), "no slice of ours")
    claims = [cluster.allocate(one, one, driver="dra.example.com") for one in "xy"]
    node.gateways[-1].kill()
    node.kill_kubelet()
    cluster.server.remove(slice_)
    await cluster.server.stop()
    await cluster.start_kubelet("1.37")
    cluster.gateway("--dra", "on")
    await node.allocatable_after(20, 0)
    await cluster.server.start()
    await cluster.connected()
    await node.pass_time(60)
    assert (node.allocatable(), cluster.published()) == (0, {})
    for claim in claims:
        cluster.forget(claim)
    await node.allocatable_is(1)
    await cluster.published_is(gpu_1=[])
    cluster.restart_gateway("--dra", "on")
    await node.allocatable_is(1, seconds=10)  # Nothing of it is remembered.
    await cluster.connected()
    await sides(cluster, "plugin", "dra", 10)


@pytest.mark.parametrize("prepared", [True, False])
async def test_without_its_state_file_it_gives_no_claim_s_gpu(node: Node, cluster: Cluster, *, prepared: bool) -> None:
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0")
    if prepared:
        await cluster.prepare(claim)
    node.gateways[-1].kill()
    shutil.rmtree(node.state)
    cluster.hang()
    cluster.gateway("--dra", "on")
    await node.pass_time(20)
    await node.refused("early")
    cluster.heal()
    await node.allocatable_is(1)
    assert (await node.admit("pod")).devices[GPU] == (B,)
    await node.pass_time(30)
    await node.refused("other")
    await cluster.prepare(claim)
    await cluster.end(claim)
    await node.allocatable_is(2)


@pytest.mark.parametrize("version", ["1.31", "1.32"])
async def test_a_kubelet_without_claims_is_served_by_name_alone(node: Node, version: str) -> None:
    simulate(node)
    async with Cluster(node, version) as cluster:
        await cluster.start_kubelet(version)
        cluster.gateway("--dra", "on")
        await node.allocatable_is(2)
        if version == "1.31":
            await node.pass_time(20)
            with pytest.raises(OrderError, match="kubelet 1"):
                await cross(cluster, "dra")
            await node.admit("pod", count=2)
            return
        await cluster.connected()
        await cross(cluster, "dra", A)
        await cluster.published_is(gpu_0=[])


async def test_nothing_goes_to_a_driver_that_the_kubelet_did_not_take(node: Node) -> None:
    simulate(node)
    async with Cluster(node) as cluster:
        (await cluster.start_kubelet()).refuses = "no such plugin here"
        cluster.gateway("--dra", "on")
        await node.allocatable_is(2)
        await node.pass_time(10)
        with pytest.raises(OrderError, match=NVIDIA):
            await cross(cluster, "dra")
        cluster.annotate(move_to="dra")
        await node.pass_time(60)
        assert (node.allocatable(), cluster.allocatable) == (2, 2)
        await node.admit("pod")
        cluster.dra.refuses = ""
        await node.until(lambda: len(cluster.published()) == 1, "the other one to go over")
        node.remove("pod")
        await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_gpus_are_where_the_nodes_annotation_wants_them(node: Node, cluster: Cluster) -> None:
    cluster.annotate(move_to="dra")
    await cluster.published_is(gpu_0=[], gpu_1=[])
    with pytest.raises(OrderError, match="move-to"):
        await cross(cluster, "plugin")
    simulate(node, A, B, "GPU-c")  # One that comes goes there, too.
    await cluster.published_is(gpu_0=[], gpu_1=[], gpu_2=[])
    cluster.annotate(move_to="somewhere")
    await node.pass_time(30)
    assert len(cluster.published()) == 3
    assert "somewhere" in (await node.gateways[-1].status())["crossing"]
    cluster.annotate(move_to="dra")
    await node.pass_time(5)
    cluster.server.change(AT, lambda one: one["metadata"].pop("annotations"))
    await node.pass_time(30)
    assert len(cluster.published()) == 3
    await cross(cluster, "plugin")
    await node.allocatable_is(3)
    await node.allocatable_after(30, 3)


async def test_an_order_is_followed_right_after_a_restart_of_the_api_server(cluster: Cluster) -> None:
    await cross(cluster, "dra", A)
    await cluster.server.stop()
    await cluster.server.start()
    await cross(cluster, "dra", B)
    await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_the_scheduler_hears_of_less_before_the_kubelet_and_of_more_at_once(node: Node, cluster: Cluster) -> None:
    await there_and_back(cluster)
    ordering = asyncio.create_task(cross(cluster, "dra", A))
    await node.until(lambda: cluster.allocatable == 1, "less to be told")
    await node.pass_time(0.4)  # What the scheduler gave away before it heard still gets a GPU.
    assert (cluster.allocatable, node.allocatable()) == (1, 2)
    await ordering
    await node.allocatable_is(1)
    await cluster.published_is(gpu_0=[])
    await cross(cluster, "plugin", A)
    await node.allocatable_is(2)
    await node.until(lambda: cluster.allocatable == 2, "the scheduler to hear of it", 2)


@pytest.mark.parametrize(
    ("bound", "kind"), [("before", "containers"), ("before", "initContainers"), ("meanwhile", "containers")]
)
async def test_a_pod_bound_by_the_old_number_gets_its_gpu(node: Node, cluster: Cluster, bound: str, kind: str) -> None:
    await there_and_back(cluster)
    if bound == "before":
        cluster.pod("pod", 2, kind)
    ordering = asyncio.create_task(cross(cluster, "dra"))
    if bound == "meanwhile":
        await node.until(lambda: cluster.allocatable == 0, "less to be told")
        await node.pass_time(0.2)  # Less than the scheduler has to hear of it.
        cluster.pod("pod", 2)
    for _ in range(30):
        await node.pass_time(0.1)
        assert cluster.allocatable == 2 or bound == "meanwhile"
    assert not ordering.done()
    await node.admit("pod", count=2)
    cluster.pod("pod", 2, phase="Running", startTime="2026-01-01T00:00:00Z")
    assert await ordering == {A: "to-dra", B: "to-dra"}


async def test_a_kubelet_that_starts_admits_pods_again_that_have_what_goes_to_dra(node: Node, cluster: Cluster) -> None:
    await node.admit("pod")
    await cross(cluster, "dra")
    await node.until(lambda: len(cluster.published()) == 1, "one GPU to go over")
    await cluster.start_kubelet("1.37")
    await node.until(lambda: node.gateways[-1].said("registered"), "its registration")
    await node.allocatable_is(1, seconds=10)
    await node.restart_container("pod")
    await node.allocatable_after(20, 0)
    node.remove("pod")
    await cluster.published_is(gpu_0=[], gpu_1=[])


@pytest.mark.parametrize("version", ["1.35", "1.36"])
async def test_nothing_goes_where_pods_by_name_would_run_without_their_gpu(node: Node, version: str) -> None:
    async with both(node, version) as cluster:
        device_class(cluster)
        if version == "1.36":
            await all_to_dra(cluster)
            return
        with pytest.raises(OrderError, match=f"{NVIDIA} has the extendedResourceName {GPU}"):
            await cross(cluster, "dra")
        device_class(cluster, "other.com/gpu")
        await all_to_dra(cluster)
        device_class(cluster)
        await cluster.published_is(180, gpu_0=["by-name"], gpu_1=["by-name"])


async def test_on_the_way_back_a_pod_by_name_counts_and_its_gpu_goes_to_the_next(node: Node, cluster: Cluster) -> None:
    device_class(cluster)
    await all_to_dra(cluster)
    claims: list[Claim] = [cluster.claim(name, by_name=True) for name in ("one", "two")]
    for claim in claims:
        await cluster.prepare(claim)
    await cross(cluster, "plugin")
    await node.allocatable_is(2)  # The scheduler counts such pods.
    await node.until(lambda: cluster.allocatable == 2, "the scheduler to hear of it", 3)
    await cluster.end(claims[0])
    await node.admit("next")
    await node.allocatable_after(10, 2)
    await cluster.end(claims[1])
    await node.admit("last")


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_newer_gateway_takes_both_apis_over_and_nobody_loses_a_gpu(node: Node, version: str) -> None:
    async with both(node, version) as cluster:
        [held] = (await node.admit("pod")).devices[GPU]
        await cross(cluster, "dra")
        await node.until(lambda: len(cluster.published()) == 1, "one GPU to go over")
        claim = cluster.claim("claim")
        got = await cluster.prepare(claim)
        newer = cluster.gateway("--dra", "on")
        await node.eventually(newer.is_ready, "the newer one")
        await node.pass_time(5)
        assert await cluster.prepare(claim) == got
        await cluster.end(claim)
        node.remove("pod")
        await cluster.published_is(gpu_0=[], gpu_1=[])  # The order still counts.
        node.gateways[0].kill()
        await node.pass_time(5)
        assert (await cluster.prepare(cluster.claim("other", "gpu-0" if held == A else "gpu-1"))).gpus == {held}


async def test_before_a_handover_no_pod_is_on_its_way_to_a_gateway_that_ends(node: Node) -> None:
    async with both(node, "1.34") as cluster:
        await node.pass_time(5)
        [older] = node.gateways
        cluster.gateway("--dra", "on")
        await node.until(lambda: cluster.allocatable == 0, "the API server to show none")
        assert not older.said("leader", stage="yielded")
        await node.until(lambda: cluster.allocatable == 2, "the API server to show both", 10)
        await node.pass_time(30)
        assert not any(one.said("mismatch") for one in node.gateways)


@pytest.mark.parametrize("first", ["the order", "the kubelet's start"])
async def test_what_the_kubelet_forgot_goes_to_no_claim_by_itself(node: Node, cluster: Cluster, first: str) -> None:
    [held] = (await node.admit("pod")).devices[GPU]
    await node.pass_time(10)
    if first == "the order":
        await cross(cluster, "dra")
        await node.until(lambda: len(cluster.published()) == 1, "one GPU to go over")
    node.kill_kubelet()
    node.forget_checkpoint()
    await cluster.start_kubelet("1.37")
    node.forgotten |= {"pod"}
    await node.pass_time(30)
    if first != "the order":
        await cross(cluster, "dra")
    await node.pass_time(30)
    assert held not in (await cluster.prepare(cluster.claim("claim"))).gpus
    assert len(cluster.published()) == 1
    await words(cluster, held, "the kubelet forgot who")
    await node.gateways[-1].order("forget", id=held)
    await cluster.published_is(gpu_0=[], gpu_1=[])
