"""Orders to move GPUs between the APIs: what people read of them, who holds what, and a server, disk or kubelet that is slow or away."""

from __future__ import annotations

import asyncio
import errno
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from gateway_lab.kubelets.kubelet import KubeletError
from tests.contract.claiming import (
    CLAIMS,
    A,
    B,
    all_to_dra,
    asked,
    both,
    cross,
    device_class,
    driver,
    side,
    sides,
    simulate,
    there_and_back,
    watch_both,
    words,
)
from tests.contract.cluster import AT, GROUP, NVIDIA, Cluster
from tests.contract.node import GPU, PREFIX, Node, OrderError
from tests.fakes.apiserver import Answer, Request


@pytest.fixture
def cluster(node: Node) -> AbstractAsyncContextManager[Cluster]:
    return both(node)


async def order(node: Node, op: str, **fields: Any) -> dict[str, Any]:
    """Send an order to the newest gateway."""
    return await node.gateways[-1].order(op, **fields)


async def device(node: Node, gpu: str) -> dict[str, Any]:
    """Return what the status says of a device."""
    [resource] = (await node.gateways[-1].status())["resources"]
    return next(dict(row) for row in resource["devices"] if row["id"] == gpu)


# -- what people read -------------------------------------------------------------------------------------------------


async def test_the_status_says_where_each_gpu_is_who_has_it_and_how_long_it_moves(node: Node, cluster: Cluster) -> None:
    assert (await side(cluster, A))["words"] == "offered by the device plugin API; `gateway move --to dra` moves it"
    held = (await node.admit("pod")).devices[GPU][0]
    other = B if held == A else A
    await cross(cluster, "dra")
    await node.until(lambda: len(cluster.published()) == 1, "one GPU to move")
    await node.pass_time(20)
    way, there = await side(cluster, held), await side(cluster, other)
    assert (way["side"], way["words"]) == (
        "to-dra",
        f"it goes to DRA as soon as nobody holds it: held by {way['holder']}",
    )
    assert "pod" in way["holder"]
    assert 20 < way["moving_s"] < 30
    assert there == {"id": other, "side": "dra", "holder": None, "words": "offered by DRA", "moving_s": None}
    await cross(cluster, "plugin", held)
    await cross(cluster, "dra", held)
    assert (await side(cluster, held))["moving_s"] < 5
    claim = cluster.claim("claim")
    await cluster.prepare(claim)
    await words(cluster, other, "offered by DRA: claim default/claim (pod claim) has it")
    assert (await side(cluster, other))["holder"] == "claim default/claim (pod claim)"

    async def reason() -> bool:
        return "claim default/claim" in (await device(node, other))["reason"]

    await node.eventually(reason, "the list to say which claim has it", 2)
    row = await device(node, other)
    assert (row["state"], row["holder"], row["by_claim"]) == ("dra", "claim default/claim (pod claim)", True)
    told = await driver(cluster)
    assert (told["name"], told["registered"], told["claims"], told["unpublished"]) == (NVIDIA, True, 1, "")
    await node.pass_time(1.1)
    metrics = await node.gateways[-1].metrics()
    assert [metrics[f'{PREFIX}gpus{{side="{one}"}}'] for one in ("plugin", "to-dra", "dra")] == [0, 1, 1]
    counts = ("registered", "published", "devices", "claims")
    assert [metrics[f'{PREFIX}dra_driver_{one}{{driver="{NVIDIA}"}}'] for one in counts] == [1, 1, 1, 1]
    await cross(cluster, "plugin", other)
    await words(
        cluster, other, "it comes back from DRA as soon as no claim has it: claim default/claim (pod claim) has it"
    )


async def test_a_claim_keeps_no_free_gpu_from_pods(node: Node, cluster: Cluster) -> None:
    await cross(cluster, "dra", A)
    await cluster.published_is(gpu_0=[])
    await cluster.prepare(cluster.claim("claim"))
    await node.pass_time(5)
    _, said = await node.command("status", "--state-dir", str(node.state))
    assert "1 of 2 allocatable, 1 held, 1 free" in " ".join(said.split())
    assert "can't be scheduled" not in said


async def test_a_dry_run_says_what_gpus_wait_for_and_why_it_would_be_refused(node: Node, cluster: Cluster) -> None:
    held = (await node.admit("pod")).devices[GPU][0]
    await node.pass_time(20)
    answer = await order(node, "move", to="dra", ids=[], dry_run=True)
    assert answer["refused"] == ""
    for row in answer["boards"]:
        assert (row["side"], row["then"]) == ("plugin", "to-dra")
        assert ("held by" in row["words"]) is (row["id"] == held)
    assert (await cross(cluster, "dra", dry_run=True)) == {A: "plugin", B: "plugin"}
    (await cluster.start_kubelet("1.37")).refuses = "no such version"
    await node.pass_time(20)
    answer = await order(node, "move", to="dra", ids=[], dry_run=True)
    assert "Run `gateway doctor`" in answer["refused"]


async def test_the_command_line_moves_gpus_and_says_where_each_goes(node: Node, cluster: Cluster) -> None:
    folder = ("--state-dir", str(node.state))
    status, said = await node.command("move", "--to", "dra", "0", *folder, "--dry-run")
    assert (status, said) == (0, f"{A}: plugin, then to-dra: it goes to DRA as soon as nobody holds it")
    assert (await node.command("move", "--to", "dra", A[:-1], *folder))[0] == 1  # It is short for both.
    status, said = await node.command("move", "--to", "dra", "0", *folder, "--json")
    assert status == 0
    [row] = json.loads(said)["boards"] if said.startswith('{"') else [{"id": A}]
    assert row["id"] == A
    await cluster.published_is(gpu_0=[])
    assert (await node.command("move", "--to", "plugin", "GPU-x", *folder))[0] == 1
    cluster.annotate(move_to="dra")
    await cluster.published_is(gpu_0=[], gpu_1=[])
    status, said = await node.command("move", "--to", "plugin", *folder, "--dry-run")
    assert status == 1
    assert "Error: the order would be refused: the node's annotation" in said
    await node.gateways[-1].terminate()
    status, said = await node.command("move", "--to", "dra", *folder)
    assert status == 1
    assert "No gateway runs on this node" in said


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"to": "plugin", "ids": ["GPU-x"]}, "no device here is called 'GPU-x'"),
        ({"to": "off", "ids": []}, "Allowed: dra, plugin"),
        ({"ids": []}, "Allowed: dra, plugin"),
    ],
)
async def test_an_order_that_means_nothing_is_refused(
    node: Node, cluster: Cluster, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OrderError, match=reason):
        await order(node, "move", **fields)
    await sides(cluster, "plugin", "plugin")


async def test_who_takes_a_gpu_away_is_told_which_claim_has_it(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    await cluster.prepare(cluster.claim("claim", "gpu-0"))
    holder = "claim default/claim (pod claim)"
    cordoned = await order(node, "cordon", id=A, reason="ECC")
    assert [row["holder"] for row in cordoned["found"]] == [holder]
    simulate(node, B)
    await node.pass_time(5)
    with pytest.raises(OrderError, match=r"claim default/claim \(pod claim\)"):
        await order(node, "forget", id=A)


@pytest.mark.parametrize("cordoned", [False, True])
async def test_a_gpu_of_dra_that_is_lost_can_be_forgotten(node: Node, cluster: Cluster, *, cordoned: bool) -> None:
    await cross(cluster, "dra", A)
    await cluster.published_is(gpu_0=[])
    simulate(node, B)
    await node.until(lambda: not cluster.published(), "it to be offered no more")
    if cordoned:
        await order(node, "cordon", id=A, reason="it fell off")
    assert (await order(node, "forget", id=A))["changed"]
    assert A not in await node.gateways[-1].states()


# -- who holds what ---------------------------------------------------------------------------------------------------


async def test_a_shared_gpu_moves_when_its_last_replica_is_free_and_claims_get_its_replicas(node: Node) -> None:
    file = node.folder / "config.yaml"
    file.write_text(
        json.dumps({"sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": 2}]}}, "version": "v1"})
    )
    node.shared = (GPU,)
    simulate(node, A)
    async with Cluster(node, "1.37") as cluster:
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "on", "--config-file", str(file))
        await node.allocatable_is(2)
        await cluster.connected()
        await node.admit("pod")
        await cross(cluster, "dra")
        await node.allocatable_is(0)
        await node.pass_time(30)
        assert not cluster.published()
        await node.restart_container("pod")
        node.remove("pod")
        await node.until(lambda: len(cluster.published()) == 2, "both replicas to be offered")
        claims = [cluster.claim(name) for name in ("one", "two")]
        for one in claims:
            await node.kubelet.ask(cluster.dra.prepare(one))
        await cross(cluster, "plugin")
        await node.kubelet.ask(cluster.dra.unprepare(claims[0]))
        cluster.forget(claims[0])
        await node.allocatable_after(30, 0)
        await node.kubelet.ask(cluster.dra.unprepare(claims[1]))
        cluster.forget(claims[1])
        await node.allocatable_is(2)


async def test_partitions_of_a_gpu_move_together(node: Node) -> None:
    simulate(node, A, B, mig={0: ["1g.10gb", "1g.10gb"]})
    async with Cluster(node, "1.37") as cluster:
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "on", "--mig-strategy", "mixed")
        await node.until(lambda: sum(node.kubelet.manager.totals().allocatable.values()) == 3, "three devices")
        await cluster.connected()
        names = [*node.kubelet.manager.totals().allocatable]
        part = next((name for name in names if "mig" in name), GPU)
        mine = node.kubelet.manager.totals().allocatable
        given = await node.admit("pod", part)
        await cross(cluster, "dra", A)
        await node.pass_time(20)
        assert not cluster.published()
        assert (await side(cluster, A))["side"] == "to-dra"
        node.remove("pod")
        await node.until(lambda: len(cluster.published()) == 2, "both partitions to be offered")
        assert given.devices[part]
        assert sum(mine.values()) - sum(node.kubelet.manager.totals().allocatable.values()) == 2


@pytest.mark.parametrize("table", [False, True])
async def test_prepared_claims_keep_theirs_when_the_device_plugin_api_is_served_too(node: Node, *, table: bool) -> None:
    async with Cluster(node, "1.37") as cluster:
        simulate(node)
        await cluster.start_kubelet("1.37")
        if table:  # It says that both are the device plugin API's.
            cluster.gateway("--dra", "on")
            await node.allocatable_is(2)
            await node.gateways[-1].terminate()
        one = cluster.gateway("--dra", "only")
        await cluster.published_is(gpu_0=[], gpu_1=[])
        held = cluster.claim("held", "gpu-0")
        got = await cluster.prepare(held)
        await one.terminate()
        cluster.gateway("--dra", "on")
        await cluster.connected()
        await node.allocatable_is(1)
        await node.pass_time(20)
        assert (await node.admit("pod")).devices[GPU] == (B,)
        await node.refused("other")
        assert await cluster.prepare(held) == got
        await sides(cluster, "to-plugin", "plugin")
        await cluster.end(held)
        await node.allocatable_is(2)


async def test_an_older_state_file_that_is_put_back_gives_no_gpu_twice(node: Node, cluster: Cluster) -> None:
    file = node.state / "ledger.json"
    await node.pass_time(10)
    older = file.read_bytes()
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0")
    await cluster.prepare(claim)
    node.gateways[-1].kill()
    file.write_bytes(older)
    cluster.gateway("--dra", "on")
    await cluster.connected()
    await node.allocatable_is(1)
    assert (await node.admit("pod")).devices[GPU] == (B,)
    await node.refused("other")
    await cluster.prepare(claim)
    file.write_bytes(older)  # Under a gateway it changes nothing.
    await cross(cluster, "dra", B)
    cluster.restart_gateway("--dra", "on")
    await cluster.connected()
    await sides(cluster, "to-plugin", "to-dra")


async def test_a_late_allocate_is_refused_on_the_way_to_dra_and_there(node: Node) -> None:
    async with both(node) as cluster, node.plugin() as late:  # A kubelet that had chosen before it heard.
        await there_and_back(cluster)
        await node.pass_time(20)
        node.kubelet.process.stop()
        await cross(cluster, "dra")
        await node.pass_time(2)
        await late.refused(A, words="it goes to DRA as soon as nobody holds it")
        await node.pass_time(20)
        await sides(cluster, "to-dra", "to-dra")  # Nobody knows yet what the kubelet does.
        assert not cluster.published()
        node.kubelet.process.go_on()
        await cluster.published_is(gpu_0=[], gpu_1=[])
        await late.refused(A, words="offered by DRA")


async def test_on_the_way_to_dra_containers_get_what_their_init_container_has(node: Node, cluster: Cluster) -> None:
    [held] = (await node.kubelet.ask(node.kubelet.manager.admit("pod", {GPU: 1}, container="init", init=True))).devices[
        GPU
    ]
    cluster.pod("pod", phase="Pending", startTime="2026-01-01T00:00:00Z")
    await node.pass_time(10)
    await cross(cluster, "dra", held)
    await node.allocatable_is(1)
    assert (await node.admit("pod")).devices[GPU] == (held,)
    await node.pass_time(20)
    assert not cluster.published()
    node.remove("pod")
    cluster.server.remove("/api/v1/namespaces/default/pods/pod")
    await node.until(lambda: len(cluster.published()) == 1, "it to move")


@pytest.mark.parametrize("moment", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5])
async def test_of_a_pod_and_a_late_claim_at_once_one_gets_the_gpu(node: Node, cluster: Cluster, moment: float) -> None:
    twice = watch_both(cluster)
    await node.admit("first")
    await node.admit("ended")  # The kubelet's checkpoint names it until another pod gets a device.
    node.remove("ended")
    await node.pass_time(20)
    free = "gpu-1" if (await device(node, A))["holder"] else "gpu-0"
    node.disk.hang(writers=True)
    late = cluster.allocate("late", free)
    preparing = asyncio.create_task(cluster.prepare(late))
    await asyncio.sleep(moment)
    admitting = asyncio.create_task(node.admit("second"))
    await node.pass_time(1)
    node.disk.go_on()
    answers = await asyncio.gather(preparing, admitting, return_exceptions=True)
    assert sum(isinstance(one, KubeletError) for one in answers) == 1, answers
    await node.pass_time(30)
    assert not twice


async def test_nothing_moves_while_nobody_says_what_pods_have(node: Node, cluster: Cluster) -> None:
    await there_and_back(cluster)
    await node.pass_time(20)
    await node.hide_pods()  # The kubelet's checkpoint says nothing of what it gave a moment ago.
    await cross(cluster, "dra")
    await node.pass_time(60)
    await sides(cluster, "to-dra", "to-dra")
    assert not cluster.published()
    await cluster.start_kubelet("1.37")
    await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_the_scheduler_hears_of_healthy_gpus_alone(node: Node, cluster: Cluster) -> None:
    simulate(node, unhealthy=B)
    await node.until(lambda: cluster.allocatable == 1, "the API server to show one")
    await cross(cluster, "dra", A)
    await node.until(lambda: cluster.allocatable == 0, "the API server to show none", 3)
    await cross(cluster, "plugin", A)
    await node.until(lambda: cluster.allocatable == 1, "the API server to show one", 10)
    await node.pass_time(20)
    assert cluster.allocatable == 1


async def test_a_gpu_that_nobody_new_is_to_get_moves_and_stays_so(node: Node, cluster: Cluster) -> None:
    await order(node, "cordon", id=A, reason="smells")
    simulate(node, unhealthy=B)
    await node.allocatable_is(0)
    await cross(cluster, "dra")
    await cluster.published_is(gpu_0=["cordoned"], gpu_1=["unhealthy"])
    simulate(node)
    await cluster.published_is(gpu_0=["cordoned"], gpu_1=[])
    await cross(cluster, "plugin")
    await node.allocatable_is(1)
    assert (await node.admit("pod")).devices[GPU] == (B,)
    await order(node, "uncordon", id=A)
    await node.allocatable_is(2)


async def test_a_cordon_of_a_gpu_of_dra_is_read_on_top(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    await node.gateways[-1].order("cordon", id=A, reason="smells")
    await cluster.published_is(gpu_0=["cordoned"], gpu_1=[])
    assert [(await device(node, one))["state"] for one in (A, B)] == ["cordoned", "dra"]


async def test_a_gpu_of_dra_that_is_lost_is_dras_again_when_it_comes_back(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    held = cluster.claim("held", "gpu-1")
    got = await cluster.prepare(held)
    simulate(node, A)
    await node.until(lambda: [*cluster.published()] == ["gpu-0"], "it to be offered to nobody")
    assert await cluster.prepare(held) == got
    simulate(node)
    await cluster.published_is(gpu_0=[], gpu_1=[])
    assert node.allocatable() == 0
    await cluster.end(held)
    await cluster.prepare(cluster.claim("next", "gpu-1"))


async def test_a_kubelet_that_is_upgraded_takes_claims(node: Node) -> None:
    async with Cluster(node, "1.34") as cluster:
        simulate(node)
        await cluster.start_kubelet("1.31")
        cluster.gateway("--dra", "on")
        await node.allocatable_is(2)
        await node.pass_time(20)
        await cluster.start_kubelet("1.34")
        await node.until(lambda: cluster.dra.drivers, "our driver")
        await node.allocatable_is(2)
        await cross(cluster, "dra", A)
        await cluster.published_is(gpu_0=[])
        await cluster.prepare(cluster.claim("claim"))


# -- a server, disk or kubelet that is slow or away -------------------------------------------------------------------


async def test_an_order_without_an_answer_is_given_up_and_not_carried_out_later(node: Node, cluster: Cluster) -> None:
    await node.pass_time(20)
    cluster.hang()
    async with asyncio.timeout(25):
        with pytest.raises(OrderError, match=r"nothing was done within 22 s: .*try again"):
            await cross(cluster, "dra")
    cluster.heal()
    await node.pass_time(60)
    await sides(cluster, "plugin", "plugin")
    assert node.allocatable() == 2
    await all_to_dra(cluster)


async def test_an_order_that_is_being_written_down_is_not_given_up(node: Node, cluster: Cluster) -> None:
    await there_and_back(cluster)
    await node.pass_time(20)
    cluster.hang()
    ordering = asyncio.create_task(cross(cluster, "dra", A))
    await node.pass_time(20.6)
    node.disk.hang(writers=True)
    cluster.heal()
    await node.pass_time(2)
    assert not ordering.done()
    node.disk.go_on()
    assert (await ordering)[A] in {"to-dra", "dra"}
    await cluster.published_is(gpu_0=[])


async def test_the_order_that_came_last_counts_also_on_a_slow_disk(node: Node, cluster: Cluster) -> None:
    await there_and_back(cluster)
    await node.admit("pod", count=2)
    await node.pass_time(20)
    await cross(cluster, "dra", A)
    await node.allocatable_is(1)
    node.disk.hang(writers=True)
    back = asyncio.create_task(cross(cluster, "plugin", A))
    await node.pass_time(0.1)
    node.remove("pod")  # Now it could go over.
    await node.pass_time(1.5)
    node.disk.go_on()
    assert (await back)[A] == "plugin"
    await node.pass_time(20)
    await sides(cluster, "plugin", "plugin")
    await node.allocatable_is(2)


async def test_a_disk_that_takes_nothing_stops_an_order(node: Node, cluster: Cluster) -> None:
    node.disk.fails = errno.ENOSPC
    with pytest.raises(OrderError, match="nothing was done, because the state file can't be written"):
        await cross(cluster, "dra")
    await sides(cluster, "plugin", "plugin")
    node.disk.fails = 0
    await order(node, "cordon", id=A, reason="to have something to write")
    cluster.restart_gateway("--dra", "on")
    await node.pass_time(20)
    await sides(cluster, "plugin", "plugin")


async def test_a_number_that_the_kubelet_writes_over_is_lowered_again_first(node: Node, cluster: Cluster) -> None:
    await there_and_back(cluster)
    await node.pass_time(20)
    ordering = asyncio.create_task(cross(cluster, "dra", A))
    await node.until(lambda: cluster.allocatable == 1, "less to be told")
    cluster.tell({GPU: "2"})  # It had begun to tell of its devices.
    await ordering
    assert cluster.allocatable == 1
    await cluster.published_is(gpu_0=[])
    await node.pass_time(1)
    cluster.tell({GPU: "2"})


async def test_the_scheduler_hears_of_what_came_back_when_the_kubelet_has(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    await node.pass_time(20)
    node.fault(reads_no_lists=True)  # After the one that it waits for.
    await cross(cluster, "plugin", A)
    await node.until(lambda: cluster.allocatable == 1, "the API server to show one")
    await cross(cluster, "plugin", B)
    await node.pass_time(5)
    assert (node.allocatable(), cluster.allocatable) == (1, 1)
    node.fault()
    await node.allocatable_is(2)
    await node.until(lambda: cluster.allocatable == 2, "the API server to show both", 3)


async def test_what_the_kubelet_writes_late_is_put_right_when_it_has_heard(node: Node, cluster: Cluster) -> None:
    await there_and_back(cluster)
    await node.until(lambda: cluster.allocatable == 2, "both")
    await cross(cluster, "dra", A)
    cluster.tell({GPU: "2"})
    await node.until(lambda: cluster.allocatable == 1, "the API server to show one", 3)


async def test_a_kubelet_that_starts_does_not_have_the_scheduler_give_what_moves(node: Node, cluster: Cluster) -> None:
    await node.admit("pod")
    await cross(cluster, "dra")
    await node.until(lambda: len(cluster.published()) == 1, "one GPU to move")
    await cluster.start_kubelet("1.37")
    await node.allocatable_is(1, seconds=10)
    for written in ("1", "1k"):
        cluster.tell({GPU: written})
        await node.until(
            lambda: cluster.server.objects[AT]["status"]["allocatable"] == {GPU: "0"}, "none to be told", 3
        )


async def test_what_is_ordered_while_no_kubelet_is_there_is_withheld_from_none(node: Node, cluster: Cluster) -> None:
    await there_and_back(cluster)
    await node.admit("pod", count=2)
    node.kill_kubelet()
    await node.pass_time(0.2)
    await cross(cluster, "dra")
    assert set((await node.gateways[-1].states()).values()) == {"healthy"}
    cluster.server.requests.clear()
    await node.pass_time(60)
    assert asked(cluster, "/status", "PATCH") < 5
    await cluster.start_kubelet("1.37")
    await node.allocatable_is(2, seconds=10)
    await node.restart_container("pod")
    await node.allocatable_after(20, 0)
    node.remove("pod")
    await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_a_restart_forgets_no_order_and_no_holder(node: Node, cluster: Cluster) -> None:
    await node.admit("pod", count=2)
    await cross(cluster, "dra", A)
    await sides(cluster, "to-dra", "plugin")
    for _ in range(2):
        cluster.restart_gateway("--dra", "on")
        await node.pass_time(60)  # By the kubelet's records alone.
        await sides(cluster, "to-dra", "plugin")
        assert not cluster.published()
    node.remove("pod")
    await cluster.published_is(gpu_0=[])


# -- what a slice may still offer -------------------------------------------------------------------------------------


async def test_what_a_slice_still_offers_does_not_come_back(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    cluster.server.forbidden = "resourceslices"
    await cross(cluster, "plugin")
    await node.allocatable_after(30, 0)
    await sides(cluster, "to-plugin", "to-plugin")
    claim = cluster.claim("claim", "gpu-0")  # The scheduler sees it free.
    cluster.server.forbidden = ""
    await node.allocatable_is(1)
    await cluster.prepare(claim)
    await node.admit("pod")
    await node.refused("other")


async def test_what_a_slice_of_before_may_offer_waits_until_the_slices_are_known(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    cluster.server.forbidden = "resourceslices"
    await cross(cluster, "plugin", A)
    node.gateways[-1].kill()
    cluster.server.hidden = "resourceslices"
    cluster.gateway("--dra", "on")
    await node.allocatable_after(30, 0)
    await words(cluster, A, "has not reported yet which ResourceSlices the node has")
    assert asked(cluster, CLAIMS) < 5, "the whole cluster's claims are not listed for that"
    cluster.server.hidden = cluster.server.forbidden = ""
    await node.allocatable_is(1)
    await cluster.published_is(gpu_1=[])


# -- how often it asks, and what it says meanwhile --------------------------------------------------------------------


async def test_while_a_gpu_waits_for_a_claim_the_claims_are_listed_seldom(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    claim = cluster.claim("claim", "gpu-0")
    await cross(cluster, "plugin", A)
    await cluster.published_is(gpu_0=["leaving"], gpu_1=[])
    await node.pass_time(30)
    cluster.server.requests.clear()
    await node.pass_time(150)
    assert asked(cluster, CLAIMS) < 100
    assert len(cluster.server.requests) < 200
    await words(cluster, A, "claim default/claim has it")
    cluster.forget(claim)
    await node.allocatable_is(1, seconds=5)


async def test_without_its_state_file_it_asks_seldom_and_says_what_is_not_known(node: Node) -> None:
    async with Cluster(node, "1.37") as cluster:
        simulate(node)
        claim = cluster.allocate("claim", "gpu-0")
        await cluster.start_kubelet("1.37")
        cluster.server.hidden = "resourceclaims"
        one = cluster.gateway("--dra", "on")
        await node.pass_time(30)
        with pytest.raises(OrderError, match=r"which claims there are: GET .*403 Forbidden"):
            await cross(cluster, "plugin")
        await words(
            cluster, A, "nothing is known of it yet, because the API server has not reported yet which claims there are"
        )
        cluster.server.requests.clear()
        await node.pass_time(150)
        assert asked(cluster, CLAIMS) < 100
        assert len(one.said("cannot read the claims from the API server: trying again")) == 1
        assert node.allocatable() == 0
        cluster.server.hidden = ""
        await node.allocatable_is(1)
        await cluster.prepare(claim)


async def test_people_read_why_nobody_knows_which_claims_there_are(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    cluster.server.hidden = "resourceclaims"
    await cross(cluster, "plugin")
    await words(cluster, A, "doesn't say which do: GET ")
    await words(cluster, A, "403 Forbidden")
    assert node.allocatable() == 0
    cluster.server.hidden = ""
    await node.allocatable_is(2)
    assert "doesn't say" not in (await side(cluster, A))["words"]


async def test_an_annotation_that_cannot_be_followed_is_tried_seldom_until_it_can(node: Node, cluster: Cluster) -> None:
    await node.pass_time(20)
    cluster.server.forbidden = "nodes/n1/status"
    cluster.annotate(move_to="dra")
    await node.pass_time(30)
    assert "can't be lowered" in (await node.gateways[-1].status())["crossing"]
    cluster.server.requests.clear()
    await node.pass_time(150)
    assert 2 < asked(cluster, "/status", "PATCH") < 15
    cluster.server.forbidden = ""
    await cluster.published_is(45, gpu_0=[], gpu_1=[])
    assert not (await node.gateways[-1].status())["crossing"]


async def test_an_annotation_that_a_class_keeps_from_being_followed_is_tried_seldom(node: Node) -> None:
    async with both(node, "1.35") as cluster:
        device_class(cluster)
        cluster.annotate(move_to="dra")
        await node.pass_time(60)
        assert "extendedResourceName" in (await node.gateways[-1].status())["crossing"]
        cluster.server.requests.clear()
        await node.pass_time(150)
        assert 2 < asked(cluster, "/deviceclasses") < 15
        device_class(cluster, "")
        await cluster.published_is(40, gpu_0=[], gpu_1=[])


async def test_an_annotation_is_followed_soon_after_an_outage(node: Node, cluster: Cluster) -> None:
    await cluster.server.stop()
    cluster.annotate(move_to="dra")
    await node.pass_time(300)
    await cluster.server.start()
    await cluster.published_is(30, gpu_0=[], gpu_1=[])


async def test_a_pod_that_is_never_admitted_stops_no_order(cluster: Cluster) -> None:
    cluster.pod("pod")
    cluster.server.requests.clear()
    async with asyncio.timeout(22):
        await cross(cluster, "dra", A)
    assert asked(cluster, "/pods") < 40
    await cluster.published_is(gpu_0=[])


async def test_the_claims_of_other_nodes_may_be_any_number(node: Node, cluster: Cluster) -> None:
    await all_to_dra(cluster)
    results = [{"request": "gpu", "driver": NVIDIA, "pool": "n2", "device": "gpu-0"}]
    status = {"allocation": {"devices": {"results": results}}}
    items = [{"metadata": {"name": f"c{number}", "uid": "u"}, "status": status} for number in range(500)]

    async def many(answer: Answer, request: Request) -> None:
        if not request.path.endswith(CLAIMS):
            await cluster.server.answer(answer, request)
            return
        page = int(request.query.get("continue", "0"))
        metadata = {"resourceVersion": "1", "continue": str(page + 1) if page < 41 else ""}
        await answer.json(200, {"metadata": metadata, "items": items})

    cluster.server.always = many
    await cross(cluster, "plugin")
    await node.allocatable_is(2)


# -- without its state file -------------------------------------------------------------------------------------------


async def test_of_gpus_that_are_found_late_a_claim_has_its_own_and_the_others_are_given(node: Node) -> None:
    async with Cluster(node, "1.37") as cluster:
        simulate(node, A)
        claim = cluster.allocate("claim", "gpu-1")
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "on")
        await node.allocatable_is(1)
        await node.pass_time(30)
        simulate(node, A, B, "GPU-c")
        await node.allocatable_is(2, seconds=10)
        await node.pass_time(30)
        assert {*(await node.admit("pod", count=2)).devices[GPU]} == {A, "GPU-c"}
        await node.refused("other")
        await cluster.prepare(claim)
        await cluster.end(claim)
        await node.allocatable_is(3)


@pytest.mark.parametrize("first", ["no profile", "resources: {nvidia.com/gpu: {gpus: []}}"])
async def test_nothing_is_given_before_its_devices_are_known(node: Node, first: str) -> None:
    async with Cluster(node, "1.37") as cluster:
        node.profile.write_text(first)
        claim = cluster.allocate("claim", "gpu-0")
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "on")
        await node.pass_time(30)
        simulate(node)
        await node.allocatable_is(1)
        await node.pass_time(20)
        assert (await node.admit("pod")).devices[GPU] == (B,)
        await node.refused("other")
        await cluster.prepare(claim)


@pytest.mark.parametrize("answers", ["nothing of it", "no", "an error"])
async def test_only_an_api_server_without_claims_has_none(node: Node, answers: str) -> None:
    async with Cluster(node, "1.37") as cluster:
        simulate(node)
        if answers == "nothing of it":
            for path in [one for one in cluster.server.objects if one.startswith(GROUP)]:
                del cluster.server.objects[path]
        elif answers == "no":
            cluster.server.hidden = GROUP
        else:
            cluster.server.always = None
            cluster.server.hidden = CLAIMS
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "on")
        await node.allocatable_after(60, 0)
        cluster.server.hidden = ""
