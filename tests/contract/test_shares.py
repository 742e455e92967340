"""Shares of a GPU that the configuration shares: claims ask for some of its capacity (``--dra-shares capacity``)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway_lab.kubelets.kubelet import KubeletError
from tests.contract.claiming import A, B, cross, driver, simulate
from tests.contract.cluster import Claim, Cluster, UnschedulableError
from tests.contract.node import GPU, Gateway, Node
from tests.contract.test_sharing import configure, sliced
from tests.contract.test_time_slices import Driver, asking
from tests.fakes.apiserver import Answer, Request

CAPACITY = ("--dra-shares", "capacity")


@contextlib.asynccontextmanager
async def shared(
    node: Node,
    replicas: int = 4,
    *gpus: str,
    dra: str = "only",
    version: str = "1.37",
    options: tuple[str, ...] = (),
    **more: Any,
) -> AsyncGenerator[Cluster]:
    """Give a node whose GPUs are shared so often, and whose gateway offers shares of them to claims."""
    node.shared, node.most = (GPU,), replicas
    simulate(node, *gpus or (A, B), **more)
    async with Cluster(node, version) as cluster:
        await cluster.start_kubelet(version)
        start(cluster, replicas, dra, *CAPACITY, *options)
        await cluster.connected()
        yield cluster


def start(cluster: Cluster, replicas: int = 4, dra: str = "only", *options: str) -> Gateway:
    """Start such a gateway."""
    shares = configure(cluster.node, sliced({"name": "gpu", "replicas": replicas}))
    return cluster.gateway("--dra", dra, *shares, *(options or CAPACITY))


async def offered(cluster: Cluster, **shares: int) -> None:
    """Wait until slices offer so many shares of these devices (``_`` stands for ``-``; 0: only as a whole)."""
    wanted = {name.replace("_", "-"): count for name, count in shares.items()}

    def seen() -> dict[str, int]:
        there = cluster.slices().items()
        return {name: int(one.get("capacity", {}).get("shares", {}).get("value", 0)) for name, one in there}

    await cluster.node.until(lambda: seen() == wanted, f"slices to offer {wanted} instead of {cluster.slices()}")


async def test_a_shared_gpu_is_one_device_of_which_claims_ask_for_shares(node: Node) -> None:
    async with shared(node, 4, memory=80) as cluster:
        await offered(cluster, gpu_0=4, gpu_1=4)
        one = cluster.slices()["gpu-0"]
        assert one["allowMultipleAllocations"] is True
        policy = {"default": "1", "validRange": {"min": "1", "max": "4", "step": "1"}}
        assert one["capacity"]["shares"] == {"value": "4", "requestPolicy": policy}
        assert one["capacity"]["memory"] == {"value": "80Gi", "requestPolicy": {"default": "0"}}
        assert one["attributes"]["uuid"] == {"string": A}
        before = len(cluster.server.asked("PATCH"))
        await node.pass_time(60)
        assert len(cluster.server.asked("PATCH")) == before


async def test_a_gpu_that_is_not_shared_stays_as_it_is(node: Node) -> None:
    simulate(node)
    async with Cluster(node, "1.37") as cluster:
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "only", *CAPACITY)
        await cluster.published_is(gpu_0=[], gpu_1=[])
        assert not any("allowMultipleAllocations" in one for one in cluster.slices().values())
        await cluster.prepare(cluster.claim("claim"))


async def test_without_the_setting_each_replica_is_a_device(node: Node) -> None:
    node.shared = (GPU,)
    simulate(node, A)
    async with Cluster(node, "1.37") as cluster:
        await cluster.start_kubelet("1.37")
        start(cluster, 2, "only", "--dra-shares", "devices")
        await cluster.published_is(gpu_0_shared_0=[], gpu_0_shared_1=[])


@pytest.mark.parametrize("replicas", [1000, 1024])
async def test_the_number_of_shares_is_spelled_as_the_server_does(node: Node, replicas: int) -> None:
    async with shared(node, replicas, A) as cluster:
        spelled = {1000: "1k", 1024: "1Ki"}[replicas]
        await node.until(cluster.slices, "a slice")
        assert cluster.slices()["gpu-0"]["capacity"]["shares"]["value"] == spelled
        claim = cluster.allocate("all", "gpu-0", shareID="all", consumedCapacity={"shares": spelled})
        await cluster.prepare(claim)


async def test_claims_share_a_gpu_until_it_has_no_share_left(node: Node) -> None:
    async with shared(node) as cluster:
        await offered(cluster, gpu_0=4, gpu_1=4)
        claims = [cluster.share(name, count) for name, count in (("three", 3), ("one", 1), ("two", 2))]
        got = [await cluster.prepare(one) for one in claims]
        assert [one.gpus for one in got] == [{A}, {A}, {B}]
        assert [one.shares for one in got] == [(f"{one.uid}-share-0",) for one in claims]
        with pytest.raises(UnschedulableError):
            cluster.share("more", 3)
        assert await cluster.prepare(claims[0]) == got[0]


async def test_shares_beyond_those_of_a_gpu_wait_until_enough_are_given_back(node: Node) -> None:
    async with shared(node, 4, A) as cluster:
        await offered(cluster, gpu_0=4)
        claims = [cluster.share(f"claim-{number}", 2) for number in range(2)]
        for one in claims:
            await cluster.prepare(one)
        late = cluster.allocate_shares("late", 3, "gpu-0")
        await cluster.refused(late, "gpu-0 has 0 free shares, and 3 were allocated: still held as")
        waiting = asyncio.create_task(cluster.prepare(late))
        await cluster.end(claims[0])
        await node.pass_time(10)
        assert not waiting.done()
        await cluster.end(claims[1])
        await waiting


@pytest.mark.parametrize("more", [{}, {"shareID": "s"}, {"consumedCapacity": {"shares": "2"}}])
async def test_a_claim_that_was_allocated_no_number_of_shares_is_refused(node: Node, more: dict[str, Any]) -> None:
    async with shared(node) as cluster:
        await offered(cluster, gpu_0=4, gpu_1=4)
        await cluster.refused(cluster.allocate("claim", "gpu-0", **more), "gpu-0 without a number of shares")


async def test_a_claim_for_supervision_takes_no_share(node: Node) -> None:
    async with shared(node, 2, A) as cluster:
        await offered(cluster, gpu_0=2)
        admin = cluster.allocate("admin", "gpu-0", adminAccess=True, shareID="s")
        await node.kubelet.ask(cluster.dra.prepare(admin))
        await cluster.prepare(cluster.share("all", 2))


@pytest.mark.parametrize("how", ["killed", "another one takes over"])
async def test_the_next_gateway_counts_the_shares_that_claims_have(node: Node, how: str) -> None:
    async with shared(node, 4, A) as cluster:
        await offered(cluster, gpu_0=4)
        claims = [cluster.share("three", 3), cluster.share("one", 1)]
        got = [await cluster.prepare(one) for one in claims]
        if how == "killed":
            node.gateways[-1].kill()
        start(cluster)
        await node.pass_time(5)
        await cluster.connected()
        assert [await cluster.prepare(one) for one in claims] == got
        await cluster.refused(cluster.allocate_shares("more", 1, "gpu-0"), "has 0 free shares")
        await cluster.end(claims[1])
        await cluster.prepared(cluster.allocate_shares("more", 1, "gpu-0"))


async def test_two_requests_of_a_claim_may_have_shares_of_one_gpu(node: Node) -> None:
    async with shared(node, 4, A) as cluster:
        await offered(cluster, gpu_0=4)
        both = cluster.allocate_shares("both", 2, "gpu-0", "gpu-0")
        got = await node.kubelet.ask(cluster.dra.prepare(both))
        assert got.gpus == {A}
        assert len({*got.shares}) == 2
        more = cluster.allocate_shares("more", 1, "gpu-0")
        await cluster.refused(more, "has 0 free shares")
        await cluster.end(both)
        await cluster.end(more)
        await cluster.prepare(cluster.share("all", 4))


async def test_a_claim_with_a_time_slice_interval_has_the_gpu_alone(node: Node) -> None:
    there = Driver(node)
    async with shared(node, 4, A, options=there.options) as cluster:
        await offered(cluster, gpu_0=4)
        one = cluster.share("one")
        await cluster.prepare(one)
        sliced = asking(cluster, cluster.share("sliced", 2), "Short")
        await cluster.refused(sliced, "only for a claim that has the GPU alone: still held")
        await cluster.end(one)
        await cluster.prepare(sliced)
        assert there.slice() == "1"
        await cluster.refused(cluster.share("two"), "has 0 free shares")
        await cluster.end(sliced)
        assert there.slice() == "0"
        await cluster.prepared(cluster.allocate_shares("two", 1, "gpu-0"))


async def test_a_partition_that_is_shared_has_shares_of_its_own(node: Node) -> None:
    node.most = 2
    simulate(node, A, mig={0: ["1g.10gb", "2g.20gb"]})
    shares = configure(node, sliced({"name": "mig-1g.10gb", "replicas": 2}))
    async with Cluster(node, "1.37") as cluster:
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "only", "--mig-strategy", "mixed", *shares, *CAPACITY)
        await node.until(lambda: len(cluster.slices()) == 2, "both partitions")
        names = {one: said["attributes"]["profile"]["string"] for one, said in cluster.slices().items()}
        [small] = [one for one, profile in names.items() if profile == "1g.10gb"]
        [large] = names.keys() - {small}
        await offered(cluster, **{small: 2, large: 0})
        assert cluster.slices()[small]["capacity"]["memory"]["requestPolicy"] == {"default": "0"}
        assert "requestPolicy" not in cluster.slices()[large]["capacity"]["memory"]
        got = [await cluster.prepare(cluster.share(name, 1, small)) for name in ("a", "b")]
        assert got[0].names != (await cluster.prepare(cluster.claim("c", large))).names
        await cluster.refused(cluster.allocate_shares("d", 1, small), "has 0 free shares")


async def test_a_gpu_that_has_fewer_shares_since_gets_no_claim_until_as_many_are_free(node: Node) -> None:
    async with shared(node, 4, A) as cluster:
        await offered(cluster, gpu_0=4)
        claims = [cluster.share(f"claim-{number}") for number in range(4)]
        for one in claims:
            await cluster.prepare(one)
        configure(node, sliced({"name": "gpu", "replicas": 2}))
        await offered(cluster, gpu_0=2)
        for one in claims[:3]:
            await cluster.refused(cluster.allocate_shares("late", 1, "gpu-0"), "has 0 free shares")
            await cluster.end(one)
        await cluster.prepared(cluster.allocate_shares("late", 1, "gpu-0"))


async def test_a_share_whose_api_is_switched_off_keeps_the_whole_gpu_from_pods(node: Node) -> None:
    async with shared(node, 2, A, B) as cluster:
        await offered(cluster, gpu_0=2, gpu_1=2)
        await cluster.prepare(cluster.share("claim"))
        await node.gateways[-1].terminate()
        node.gateway(*configure(node, sliced({"name": "gpu", "replicas": 2})))
        await node.allocatable_is(2)
        for number in range(2):
            assert {one.partition("::")[0] for one in (await node.admit(f"pod-{number}")).devices[GPU]} == {B}


async def test_pods_by_name_and_claims_have_a_shared_gpu_in_turn(node: Node) -> None:
    async with shared(node, 2, A, dra="on") as cluster:
        await node.allocatable_is(2)
        await node.admit("pod")
        await cross(cluster, "dra")
        await node.allocatable_is(0)
        await node.pass_time(30)
        assert not cluster.published()
        node.remove("pod")
        await offered(cluster, gpu_0=2)
        claims = [cluster.share(f"claim-{number}") for number in range(2)]
        for one in claims:
            await cluster.prepare(one)
        await cross(cluster, "plugin")
        for one in claims:
            await node.allocatable_after(20, 0)
            await cluster.end(one)
        await node.allocatable_is(2)
        await node.admit("last", count=2)


async def test_pods_that_asked_by_name_and_got_shares_count_on_the_way_back(node: Node) -> None:
    async with shared(node, 4, A, B, dra="on") as cluster:
        await node.allocatable_is(8)
        await cross(cluster, "dra")
        await offered(cluster, gpu_0=4, gpu_1=4)
        devices = ("gpu-0", "gpu-0", "gpu-1")
        claims = [cluster.share(f"claim-{at}", 1, one, by_name=True) for at, one in enumerate(devices)]
        await cluster.prepare(claims[0])
        await cross(cluster, "plugin")
        # The scheduler counts these pods against what the list has, also those that wait for the kubelet.
        await node.allocatable_is(3)
        await node.refused("pod")
        for one in claims[1:]:
            await cluster.prepare(one)
        await node.allocatable_is(3)
        for one in claims:
            await cluster.end(one)
        await node.allocatable_is(8)


# -- what the API server and the kubelet know -------------------------------------------------------------------------


def dropping(cluster: Cluster, *, dry_run: bool = True) -> None:
    """Have an API server that drops what it doesn't know; a ``dry_run`` is answered by it, or by another one that keeps it."""

    async def drop(answer: Answer, request: Request) -> None:
        if (
            request.method == "PATCH"
            and "resourceslices" in request.path
            and (dry_run or "dryRun" not in request.query)
        ):
            for device in request.body["spec"]["devices"]:
                device.pop("allowMultipleAllocations", None)
                for value in device.get("capacity", {}).values():
                    value.pop("requestPolicy", None)
        await cluster.server.answer(answer, request)

    cluster.server.always = drop


NO_SHARES = "the API server keeps no shares of devices. Switch on its feature gate DRAConsumableCapacity"


@pytest.mark.parametrize("server", ["its gate is off", "1.33"])
async def test_people_read_that_the_api_server_keeps_no_shares_and_all_else_stays(node: Node, server: str) -> None:
    node.shared, node.most = (GPU,), 2
    simulate(node)
    portion = {"name": GPU, "replicas": 2, "devices": [A]}
    async with Cluster(node, "1.33" if server == "1.33" else "1.37") as cluster:
        if server != "1.33":
            dropping(cluster)
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "only", *configure(node, sliced(portion, honour=True)), *CAPACITY)
        await cluster.published_is(gpu_1=[])
        for _ in range(200):
            await node.pass_time(1)
            assert [*cluster.published()] == ["gpu-1"]
        assert NO_SHARES in (await driver(cluster))["unpublished"]
        assert len(cluster.server.asked("PATCH")) < 20
        [said] = node.gateways[-1].said("shared devices are not published")
        assert NO_SHARES in said["reason"]
        cluster.server.always = None
        if server == "1.33":
            await cluster.upgrade("v1")
        await offered(cluster, gpu_0=2, gpu_1=0)
        assert (await driver(cluster))["unpublished"] == ""


async def test_one_of_two_api_servers_that_keeps_no_shares_is_noticed(node: Node) -> None:
    async with shared(node, 2, A) as cluster:
        await offered(cluster, gpu_0=2)
        dropping(cluster, dry_run=False)
        cluster.wipe()
        await node.until(cluster.slices, "a slice")
        await node.pass_time(20)
        assert NO_SHARES in (await driver(cluster))["unpublished"]
        cluster.server.always = None
        await offered(cluster, gpu_0=2)


async def test_a_kubelet_that_knows_no_shares_is_refused_them(node: Node) -> None:
    async with shared(node, 2, A, version="1.37") as cluster:
        await cluster.start_kubelet("1.33")
        await cluster.connected()
        await offered(cluster, gpu_0=2)
        await cluster.refused(cluster.share("claim"), "cannot name the share of gpu-0")


# -- a trial ----------------------------------------------------------------------------------------------------------


async def test_of_many_claims_by_both_apis_in_turn_none_gets_more_than_a_gpu_has(node: Node) -> None:
    dice, names = random.Random(1), (f"GPU-{number}" for number in range(4))  # noqa: S311 - a test's choice
    async with shared(node, 4, *names, dra="on") as cluster:
        await node.allocatable_is(16)
        living: list[Claim] = []
        prepared, pods, most = 0, 0, Counter[str]()
        for number in itertools.count():
            if number % 25 == 0:
                await cross(cluster, "dra" if number // 25 % 2 == 0 else "plugin")
                await node.pass_time(12)
            if number % 90 == 89:
                node.gateways[-1].kill()
                start(cluster, 4, "on")
                await node.pass_time(8)
            count = dice.randint(1, 3)
            with contextlib.suppress(UnschedulableError, KubeletError):
                claim = (
                    cluster.share(f"claim-{number}", count) if dice.random() < 0.96 else late(cluster, number, count)
                )
                living.append(claim)
                await cluster.prepare(claim)
                prepared += 1
            with contextlib.suppress(KubeletError):
                await node.admit(f"pod-{number}", count=count)
                pods += 1
            for gpu, had in used(node).items():
                most[gpu] = max(most[gpu], had)
            await end_some(cluster, living, dice)
            if prepared >= 120:
                break
        assert set(most.values()) == {4}, most
        assert pods > 20


def late(cluster: Cluster, number: int, count: int) -> Claim:
    """Allocate shares as a scheduler does that has not heard of the last ones."""
    devices = [*cluster.slices()] or ["gpu-0"]
    return cluster.allocate_shares(f"late-{number}", count, devices[number % len(devices)])


def used(node: Node) -> Counter[str]:
    """Return how many shares and replicas of each GPU are in use."""
    found: Counter[str] = Counter()
    for claim, gpus in node.claims.items():
        found.update(dict.fromkeys(gpus, node.shares[claim]))
    for containers in node.pods().values():
        found.update(one.partition("::")[0] for given in containers.values() for one in given.get(GPU, ()))
    return found


async def end_some(cluster: Cluster, living: list[Claim], dice: random.Random) -> None:
    """End some claims and pods, so that a few go on."""
    for one in [one for one in living if dice.random() < 0.3]:
        living.remove(one)
        await cluster.end(one)
    for pod in [pod for pod in cluster.node.pods() if dice.random() < 0.4]:
        cluster.node.remove(pod)
