"""Claims: the scheduler sees each GPU, the kubelet has it prepared, and nobody else gets it."""

from __future__ import annotations

import asyncio
import errno
import json
import os

import pytest

from devices.model import Device
from gateway_lab.plugins.played import PlayedPlugin
from tests.contract import wire
from tests.contract.claiming import A, B, held_by_name, simulate, started
from tests.contract.clock import Process
from tests.contract.cluster import NVIDIA, Cluster, UnschedulableError, other_driver
from tests.contract.node import GPU, Node

AMD = "amd.com/gpu"
OF_AMD = "gpu.amd.com"


@pytest.mark.parametrize("version", ["1.32", "1.33", "1.34", "1.37"])
async def test_a_claim_gets_the_gpu_that_it_was_allocated(node: Node, version: str) -> None:
    async with Cluster(node, version) as cluster:
        await started(cluster, version)
        assert cluster.slices()["gpu-0"]["attributes"]["uuid"] == {"string": A}
        claims = [cluster.claim("one", "gpu-1"), cluster.claim("two")]
        got = [await cluster.prepare(claim) for claim in claims]
        assert [(*one.gpus, *one.nodes) for one in got] == [(B, "/dev/nvidia1"), (A, "/dev/nvidia0")]
        assert await cluster.prepare(claims[0]) == got[0]
        with pytest.raises(UnschedulableError):
            cluster.claim("three")
        await cluster.end(claims[0])
        assert (await cluster.prepare(cluster.claim("three"))).gpus == {B}
        assert node.capacity() == 0  # By name there is none.


async def test_what_was_prepared_or_unprepared_survives_a_kill_at_that_moment(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held = cluster.claim("held")
    got = await cluster.prepare(held)
    cluster.restart_gateway("--dra", "only")
    await cluster.connected()
    late = cluster.allocate("late", held.device)  # The API server deallocated the first claim by force.
    await cluster.refused(late, "default/held")
    assert await cluster.prepare(held) == got
    await cluster.unprepare(held)
    cluster.restart_gateway("--dra", "only")
    await cluster.connected()
    assert (await cluster.prepare(late)).gpus == got.gpus


async def test_without_the_api_server_a_new_claim_waits_and_a_prepared_one_not(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held, new = cluster.claim("held", "gpu-0"), cluster.claim("new", "gpu-1")
    got = await cluster.prepare(held)
    await cluster.server.stop()
    waiting = asyncio.create_task(cluster.prepare(new))
    assert await cluster.prepare(held) == got
    await node.pass_time(15)
    assert not waiting.done()
    await cluster.server.start()
    assert (await waiting).gpus == {B}


async def test_an_api_server_that_hangs_holds_up_no_prepared_claim(cluster: Cluster) -> None:
    await started(cluster)
    held, new = cluster.claim("held", "gpu-0"), cluster.claim("new", "gpu-1")
    got = await cluster.prepare(held)
    cluster.hang()
    async with asyncio.timeout(2):
        assert await cluster.prepare(held) == got
    await cluster.refused(new, "claim default/new")
    cluster.heal()
    assert (await cluster.prepared(new)).gpus == {B}


async def test_a_claim_that_was_allocated_again_keeps_what_it_had_until_it_is_unprepared(cluster: Cluster) -> None:
    await started(cluster)
    one = cluster.claim("one", "gpu-0")
    await cluster.prepare(one)
    cluster.allocate("one", "gpu-1")
    assert (await cluster.prepare(one)).gpus == {B}
    other = cluster.allocate("other", "gpu-0")
    await cluster.refused(other, "default/one")
    await cluster.unprepare(one)
    assert (await cluster.prepare(other)).gpus == {A}


async def test_a_claim_that_was_allocated_more_gets_that_beside_what_it_has(cluster: Cluster) -> None:
    await started(cluster)
    one = cluster.claim("one", "gpu-0")
    await cluster.prepare(one)
    cluster.allocate("one", "gpu-0", "gpu-1")
    assert (await cluster.prepare(one)).gpus == {A, B}


async def test_a_replica_is_one_claim_s_and_the_next_replica_may_be_another_s(node: Node) -> None:
    file = node.folder / "config.json"
    file.write_text(
        json.dumps({"version": "v1", "sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": 2}]}}})
    )
    node.shared = (GPU,)
    simulate(node, A)
    async with Cluster(node) as cluster:
        await cluster.start_kubelet()
        cluster.gateway("--dra", "only", "--config-file", str(file))
        await node.until(lambda: len(cluster.published()) == 2, "both replicas to be offered")
        first, second = sorted(cluster.published())
        await cluster.prepare(cluster.claim("one", first))
        await cluster.refused(cluster.allocate("two", first), "default/one")
        await node.kubelet.ask(cluster.dra.prepare(cluster.claim("three", second)))  # The oracle knows no shared GPU.


async def test_a_claim_that_is_gone_is_forgotten_at_the_second_look_of_a_kubelet(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held = cluster.claim("held", "gpu-0")
    await cluster.prepare(held)
    kept = cluster.server.objects[held.path]

    async def late_is_refused() -> None:
        await cluster.connected()
        late = cluster.allocate("late", "gpu-0")
        await cluster.refused(late, "default/held")
        cluster.forget(late)

    cluster.forget(held)
    await node.pass_time(350)  # One look finds it missing.
    cluster.server.put(held.path, **kept)
    await node.pass_time(700)
    await late_is_refused()
    node.kill_kubelet()
    cluster.forget(held)
    await node.pass_time(1000)
    await cluster.start_kubelet()
    await late_is_refused()
    await node.pass_time(700)
    node.claims.clear()
    await cluster.prepare(cluster.allocate("late", "gpu-0"))


@pytest.mark.parametrize("meanwhile", ["the kubelet starts again", "the API server has another version"])
async def test_no_claim_is_forgotten_by_looks_without_its_pod(node: Node, cluster: Cluster, meanwhile: str) -> None:
    await started(cluster)
    held = cluster.claim("held", "gpu-0")
    await cluster.prepare(held)
    if meanwhile == "the kubelet starts again":
        cluster.forget(held)
        await node.pass_time(320)  # One look finds it missing.
        await cluster.start_kubelet()
        await node.pass_time(600)
    else:
        cluster.server.removed = f"{cluster.api}/"
        await node.pass_time(1000)
        cluster.server.removed = ""
    await cluster.connected()
    await cluster.refused(cluster.allocate("late", "gpu-0"), "default/held")


async def test_a_claim_waits_for_what_is_in_use_and_gets_it_at_once_then(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held = cluster.claim("held", "gpu-0")
    await cluster.prepare(held)
    waiting = asyncio.create_task(cluster.prepare(cluster.allocate("late", "gpu-0")))
    await node.pass_time(20)
    assert not waiting.done()
    await cluster.unprepare(held)
    async with asyncio.timeout(1):
        assert (await waiting).gpus == {A}


async def test_what_cannot_be_is_refused(cluster: Cluster) -> None:
    await started(cluster)
    before = cluster.claim("one", "gpu-0")
    cluster.forget(before)
    now = cluster.claim("one", "gpu-0")
    await cluster.refused(before, "was replaced by another one")
    cluster.server.change(now.path, lambda claim: claim["status"].pop("allocation"))
    await cluster.refused(now, "is not allocated any more")
    cluster.forget(now)
    await cluster.refused(now, "has no claim")
    elsewhere = cluster.allocate("elsewhere", "gpu-0", pool="n2")
    await cluster.refused(elsewhere, "n2")
    assert (await cluster.prepare(cluster.claim("good", "gpu-0"))).gpus == {A}


@pytest.mark.parametrize("version", ["1.32", "1.34", "1.36"])
async def test_an_unhealthy_gpu_is_offered_to_nobody_and_its_claim_keeps_it(node: Node, version: str) -> None:
    async with Cluster(node, version) as cluster:
        await started(cluster, version)
        held = cluster.claim("held", "gpu-0")
        got = await cluster.prepare(held)
        simulate(node, unhealthy=A)
        await cluster.published_is(gpu_0=None if version == "1.32" else ["unhealthy"], gpu_1=[])
        assert await cluster.prepare(held) == got
        await cluster.end(held)
        with pytest.raises(UnschedulableError):
            cluster.claim("new", "gpu-0")
        waiting = asyncio.create_task(cluster.prepare(cluster.allocate("early", "gpu-0")))
        await node.pass_time(10)
        assert not waiting.done()
        simulate(node)
        assert (await waiting).gpus == {A}
        await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_the_kubelet_hears_of_health_at_once(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    health = cluster.dra.health()
    assert await anext(health) == {"gpu-0": True, "gpu-1": True}
    simulate(node, unhealthy=B)
    async with asyncio.timeout(5):
        assert await anext(health) == {"gpu-0": True, "gpu-1": False}
    await node.gateways[-1].order("cordon", id=A, reason="smells")
    async with asyncio.timeout(5):
        assert await anext(health) == {"gpu-0": True, "gpu-1": False}
    await cluster.published_is(gpu_0=["cordoned"], gpu_1=["unhealthy"])


async def test_a_cordoned_gpu_is_offered_to_nobody_new_until_it_is_uncordoned(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held = cluster.claim("held", "gpu-0")
    got = await cluster.prepare(held)
    await node.gateways[-1].order("cordon", id=A, reason="smells")
    await cluster.published_is(gpu_0=["cordoned"], gpu_1=[])
    assert await cluster.prepare(held) == got
    (path,) = (one for one in cluster.server.objects if "/resourceslices/" in one and NVIDIA in one)
    since = {"timeAdded": "2026-01-01T00:00:00Z"}  # The API server notes it.
    cluster.server.change(path, lambda one: one["spec"]["devices"][0]["taints"][0].update(since))
    await node.pass_time(20)
    assert cluster.slices()["gpu-0"]["taints"][0].get("timeAdded")
    await node.gateways[-1].order("uncordon", id=A)
    await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_specifications_of_claims_are_there_as_long_as_the_claims(node: Node) -> None:
    node.simulate({AMD: {"gpus": [{"uuid": "a", "device_nodes": ["/dev/dri/card1"]}, {"uuid": "b"}]}})
    async with Cluster(node) as cluster:
        await cluster.start_kubelet()
        one = cluster.gateway("--dra", "only")
        await node.until(lambda: cluster.published(OF_AMD), "slices")
        device = next(name for name, of in cluster.slices(OF_AMD).items() if of["attributes"]["uuid"]["string"] == "a")
        claim = cluster.claim("one", device, driver=OF_AMD)
        got = await cluster.prepare(claim)
        assert got.nodes == ("/dev/dri/card1",)
        [file] = node.cdi.glob("*claim*")
        left = node.cdi / file.name.replace(claim.uid, "uid-of-before")
        left.write_text(file.read_text().replace(claim.uid, "uid-of-before"))
        theirs, fresh = node.cdi / "x.example.com-claim-old.json", node.cdi / file.name.replace(claim.uid, "uid-of-now")
        for path in (theirs, fresh):
            path.write_text("{}")
        for path in (file, left, theirs):
            os.utime(path, (0, 0))
        one.kill()
        two = cluster.gateway("--dra", "only")
        await node.until(lambda: not left.exists(), "what a claim of before left to go")
        await node.pass_time(1)
        assert file.stat().st_mtime == 0  # It was there all the time.
        assert theirs.exists()
        assert fresh.exists()  # Another gateway may be about to answer for it.
        for path in (theirs, fresh):
            path.unlink()
        two.kill()
        file.unlink()  # The node booted.
        cluster.gateway("--dra", "only")
        await node.until(file.exists, "the claim's specification")
        await cluster.connected()
        assert await cluster.prepare(claim) == got
        await cluster.end(claim)
        assert not file.exists()


async def test_a_share_of_a_gpu_is_refused_where_the_kubelet_can_not_be_told_of_it(node: Node) -> None:
    async with Cluster(node, "1.34") as cluster:  # The kubelets of a cluster may be older than its API server.
        await started(cluster, "1.33")
        await cluster.refused(cluster.allocate("one", "gpu-0", shareID="share"), "cannot name the share")
        assert (await cluster.prepare(cluster.claim("two", "gpu-1"))).gpus == {B}


@pytest.mark.parametrize("version", ["1.33", "1.37"])
async def test_a_call_under_way_is_answered_when_another_gateway_takes_over(node: Node, version: str) -> None:
    async with Cluster(node, version) as cluster:
        await started(cluster, version)
        held = cluster.claim("held", "gpu-0")
        await cluster.prepare(held)
        waiting = asyncio.create_task(cluster.prepare(cluster.allocate("late", "gpu-0")))
        cluster.gateway("--dra", "only")
        await node.until(lambda: len(cluster.dra.drivers) == 2, "both drivers")
        node.gateways[0].process.terminate()
        await node.pass_time(5)
        assert not waiting.done()
        await cluster.unprepare(held)
        assert (await waiting).gpus == {A}
        assert (await cluster.prepare(cluster.claim("new"))).gpus == {B}
        assert await node.gateways[0].terminate() == 0


async def test_at_the_end_a_call_under_way_is_answered(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    cluster.hang()
    waiting = asyncio.create_task(cluster.prepare(cluster.claim("one", "gpu-0")))
    await node.pass_time(1)
    node.gateways[0].process.terminate()
    await node.pass_time(1)
    cluster.heal()
    assert (await waiting).gpus == {A}


async def test_sockets_of_dead_gateways_go(node: Node) -> None:
    async with Cluster(node, "1.33") as cluster:
        await started(cluster, "1.33")
        for _ in range(3):
            cluster.restart_gateway("--dra", "only")
            await cluster.connected()
        await node.pass_time(5)
        assert len(list((node.folder / "plugins_registry").iterdir())) == len(cluster.dra.drivers) == 1


async def test_a_kubelet_that_takes_one_instance_gets_one(node: Node) -> None:
    async with Cluster(node, "1.32") as cluster:
        await started(cluster, "1.32")
        held = cluster.claim("held", "gpu-0")
        got = await cluster.prepare(held)
        cluster.gateway("--dra", "only")
        await node.pass_time(20)
        assert len(list((node.folder / "plugins_registry").iterdir())) == 1
        assert await node.gateways[0].terminate() == 0
        await cluster.connected()
        assert await cluster.prepare(held) == got
        await node.pass_time(60)
        assert (await cluster.prepare(cluster.claim("new"))).gpus == {B}
        await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_another_process_keeps_its_name_until_it_was_away_for_a_minute(node: Node, cluster: Cluster) -> None:
    simulate(node)
    other = await other_driver(node)
    await cluster.start_kubelet()
    cluster.gateway("--dra", "only")
    await node.pass_time(30)
    assert not cluster.published()
    assert len(cluster.dra.drivers) == 1
    other.kill()
    await node.pass_time(40)
    assert not cluster.published()
    assert not cluster.dra.is_connected
    other = await other_driver(node)  # It was updated.
    await node.pass_time(90)
    assert not cluster.published()
    other.kill()
    await cluster.published_is(90, gpu_0=[], gpu_1=[])
    assert (await cluster.prepared(cluster.claim("one", "gpu-0"))).gpus == {A}


@pytest.mark.parametrize("version", ["1.33", "1.37"])
async def test_a_restart_of_the_kubelet_brings_the_slices_back_and_changes_no_claim(node: Node, version: str) -> None:
    async with Cluster(node, version) as cluster:
        await started(cluster, version)
        held = cluster.claim("held")
        got = await cluster.prepare(held)
        before = cluster.generation()
        cluster.wipe()
        await cluster.published_is(gpu_0=[], gpu_1=[])
        await cluster.start_kubelet(version)
        await node.until(lambda: cluster.generation() > before, "newer slices", 5)
        await cluster.published_is(gpu_0=[], gpu_1=[])
        await cluster.connected()
        assert await cluster.prepare(held) == got
        assert not (await cluster.prepare(cluster.claim("new"))).gpus & got.gpus


@pytest.mark.parametrize(
    ("reason", "told"), [("no such plugin here", "no such plugin here"), (" ", "refused, without a reason")]
)
async def test_nothing_is_offered_if_no_driver_is_taken(node: Node, cluster: Cluster, reason: str, told: str) -> None:
    simulate(node)
    (await cluster.start_kubelet()).refuses = reason
    one = cluster.gateway("--dra", "only")
    await node.pass_time(30)
    assert cluster.published() == {}
    assert not await one.is_ready()
    [driver] = (await one.status())["drivers"]
    assert (driver["registered"], driver["trouble"]) == (False, told)
    cluster.dra.refuses = ""
    await cluster.published_is(gpu_0=[], gpu_1=[])
    assert await one.is_ready()


@pytest.mark.parametrize(("before", "after"), [("1.32", "v1"), ("1.34", "v1beta2")])
async def test_an_api_server_is_upgraded_or_taken_back_under_a_gateway(node: Node, before: str, after: str) -> None:
    async with Cluster(node, before) as cluster:
        await started(cluster, before)
        held = cluster.claim("held", "gpu-0")
        await cluster.prepare(held)
        await cluster.upgrade(after)
        async with asyncio.timeout(3):
            assert (await cluster.prepare(cluster.claim("new"))).gpus == {B}
        await node.gateways[-1].order("cordon", id=A, reason="smells")
        await cluster.published_is(gpu_0=["cordoned"], gpu_1=[])
        cluster.wipe()
        await cluster.published_is(gpu_0=["cordoned"], gpu_1=[])


async def test_a_pool_is_in_slices_that_the_api_server_takes(node: Node) -> None:
    gpus = [{"uuid": f"GPU-{number}"} for number in range(150)]
    node.simulate({GPU: {"gpus": gpus}})
    async with Cluster(node) as cluster:
        await cluster.start_kubelet()
        cluster.gateway("--dra", "only")
        await node.until(lambda: len(cluster.published()) == 150, "150 devices")
        assert cluster.sizes() == [128, 22]
        node.simulate({GPU: {"gpus": gpus, "unhealthy": {"GPU-3": "fell off the bus"}}})
        await node.until(lambda: ["unhealthy"] in cluster.published().values(), "a taint")
        assert cluster.sizes() == [64, 64, 22]
        assert len(cluster.published()) == 150
        node.simulate({GPU: {"gpus": gpus[:10]}})
        await node.until(lambda: len(cluster.sizes()) == 1, "one slice")


async def test_the_kubelet_is_asked_seldom_what_its_pods_have_by_name(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    await cluster.prepare(cluster.claim("one"))
    await node.pass_time(30)
    wire.calls.clear()
    await node.pass_time(300)
    assert wire.calls.total() < 60, dict(wire.calls)


async def test_without_dra_a_claims_gpu_is_given_to_nobody(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    await cluster.prepare(cluster.claim("held", "gpu-0"))
    cluster.restart_gateway("--dra", "off")
    await node.allocatable_is(1)
    await node.admit("pod")
    await node.refused("next")


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", ""])
async def test_what_a_pod_has_by_name_is_offered_when_it_ended(node: Node, cluster: Cluster, phase: str) -> None:
    one, _ = await held_by_name(cluster)
    cluster.pod("pod", phase="Running", startTime="2026-01-01T00:00:00Z")
    assert await one.terminate() == 0
    cluster.gateway("--dra", "only")
    await node.until(lambda: len(cluster.published()) == 1, "one GPU to be offered")
    await node.pass_time(30)
    await cluster.prepare(cluster.claim("claim"))
    with pytest.raises(UnschedulableError):
        cluster.claim("other")
    node.remove("pod")
    if phase:
        cluster.pod("pod", phase=phase)
    else:
        cluster.server.remove("/api/v1/namespaces/default/pods/pod")
    await node.until(lambda: len(cluster.published()) == 2, "both GPUs to be offered", 5)
    await cluster.prepare(cluster.claim("other"))


async def test_what_a_pod_had_by_name_and_the_kubelet_forgot_is_offered_to_nobody(node: Node, cluster: Cluster) -> None:
    one, held = await held_by_name(cluster)
    await node.pass_time(10)
    node.kill_kubelet()
    node.forget_checkpoint()
    await cluster.start_kubelet()
    node.forgotten |= {"pod"}
    await node.allocatable_is(2)
    await node.pass_time(30)
    assert await one.terminate() == 0
    cluster.gateway("--dra", "only")
    await node.pass_time(60)
    assert len(cluster.published()) == 1
    assert held not in (await cluster.prepare(cluster.claim("claim"))).gpus


async def test_what_a_static_pod_has_is_not_offered_while_its_mirror_runs(node: Node, cluster: Cluster) -> None:
    one, _ = await held_by_name(cluster)
    mirror = "/api/v1/namespaces/default/pods/pod"
    cluster.pod("pod", phase="Running", startTime="2026-01-01T00:00:00Z")
    about = {"uid": "mirror", "annotations": {"kubernetes.io/config.hash": "pod"}}
    cluster.server.change(mirror, lambda pod: pod["metadata"].update(about))
    assert await one.terminate() == 0
    node.remove("pod")  # From now on only the checkpoint names it.
    cluster.gateway("--dra", "only")
    await node.until(lambda: len(cluster.published()) == 1, "one GPU to be offered")
    await node.pass_time(60)
    assert len(cluster.published()) == 1
    cluster.server.remove(mirror)
    await node.until(lambda: len(cluster.published()) == 2, "both GPUs to be offered", 30)


async def test_an_order_to_a_standby_is_carried_out_by_the_leader(node: Node, cluster: Cluster) -> None:
    older = await started(cluster)
    newer = cluster.gateway("--dra", "only")
    await node.until(lambda: newer.said("leader", stage="leading"), "the newer one to lead")
    await older.order("cordon", id=A, reason="smells")
    await cluster.published_is(gpu_0=["cordoned"], gpu_1=[])
    assert await older.is_ready()


async def test_a_gateway_that_takes_over_prepares_claims_at_once(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    newer = cluster.gateway("--dra", "only")
    await node.until(lambda: newer.said("leader", stage="leading"), "the newer one to lead")
    async with asyncio.timeout(0.5):
        assert (await cluster.prepare(cluster.allocate("one", "gpu-0"))).gpus == {A}


@pytest.mark.parametrize("dra", ["on", "only"])
async def test_a_gateway_that_cannot_write_is_not_ready_and_says_why(node: Node, cluster: Cluster, dra: str) -> None:
    simulate(node)
    await cluster.start_kubelet()
    node.disk.fails = errno.EROFS
    one = cluster.gateway("--dra", dra)
    await node.pass_time(60)
    code, words = await one.get("probes", "/readyz")
    assert (code, os.strerror(errno.EROFS) in words) == (503, True)
    assert not node.allocatable()
    node.disk.fails = 0
    await node.eventually(one.is_ready, "that it is ready", 30)


async def test_what_another_device_plugin_offers_is_not_offered_by_dra(node: Node, cluster: Cluster) -> None:
    simulate(node)
    await cluster.start_kubelet()
    theirs = Process("plugin")
    plugin = PlayedPlugin(folder=node.sockets, resource=GPU, devices=(Device(A), Device(B)))
    await theirs.ask(plugin.start())
    await node.allocatable_is(2)
    one = cluster.gateway("--dra", "only")
    await node.until(lambda: one.said("devices are not offered by DRA now"), "the reason")
    await node.pass_time(20)
    assert not cluster.published()
    await theirs.ask(plugin.change(()))
    await cluster.published_is(gpu_0=[], gpu_1=[])
