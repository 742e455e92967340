"""What a kubelet asks of a claim again, twice at once, with a full disk or a name that is not the claim's; and what anybody may call."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from adapters import pluginregistration
from adapters.dra import health
from adapters.dra.plugin import MAX_BYTES, PREPARE, V1
from gateway.lab.kubelets.kubelet import KubeletError
from tests.contract import wire
from tests.contract.claiming import A, B, asked, driver, simulate, started
from tests.contract.clock import spoiled
from tests.contract.cluster import Claim, Cluster, UnschedulableError
from tests.contract.node import GPU, Node, OrderError

AMD, OF_AMD = "amd.com/gpu", "gpu.amd.com"
POD = "/api/v1/namespaces/default/pods/pod"


async def of_amd(cluster: Cluster, *, nodes: bool = True) -> list[str]:
    """Have two GPUs of AMD, whose claims have CDI specifications of their own; return their names. Without ``nodes`` a variable names them."""
    said = {name: {"device_nodes": [f"/dev/dri/card{number}"]} if nodes else {} for number, name in enumerate((A, B))}
    gpus = [{"uuid": name, **more} for name, more in said.items()]
    cluster.node.simulate({AMD: {"gpus": gpus}})
    await cluster.start_kubelet()
    cluster.gateway("--dra", "only")
    await cluster.node.until(lambda: len(cluster.published(OF_AMD)) == 2, "slices")
    names = {one["attributes"]["uuid"]["string"]: name for name, one in cluster.slices(OF_AMD).items()}
    return [names[A], names[B]]


async def refusal(cluster: Cluster, claim: Claim) -> str:
    """See that a claim is refused, and return the reason."""
    with pytest.raises(KubeletError) as error:
        await cluster.prepare(claim)
    return str(error.value)


async def test_a_container_sees_all_gpus_of_its_request(node: Node) -> None:
    async with Cluster(node) as cluster:
        both = await of_amd(cluster, nodes=False)
        got = await cluster.prepare(cluster.allocate("claim", *both, driver=OF_AMD))
        assert got.envs["AMD_VISIBLE_DEVICES"] == f"{A},{B}"


async def test_a_claims_specification_can_be_read_by_container_runtimes(node: Node) -> None:
    async with Cluster(node) as cluster:
        os.umask(0o077)
        spoiled.append("umask")
        first, _ = await of_amd(cluster)
        await cluster.prepare(cluster.claim("claim", first, driver=OF_AMD))
        [file] = node.cdi.glob("*claim*")
        assert file.stat().st_mode & 0o777 == 0o644


async def test_where_no_specification_can_be_written_a_claim_is_refused_and_gets_its_gpu_later(node: Node) -> None:
    async with Cluster(node) as cluster:
        first, _ = await of_amd(cluster)
        claim = cluster.claim("claim", first, driver=OF_AMD)
        shutil.rmtree(node.cdi, ignore_errors=True)
        node.cdi.write_text("where a folder belongs")
        assert "CDI specification into" in await refusal(cluster, claim)
        node.cdi.unlink()
        assert (await cluster.prepare(claim)).nodes == ("/dev/dri/card0",)


async def test_the_specification_of_a_claim_that_is_gone_goes_too(node: Node) -> None:
    async with Cluster(node) as cluster:
        first, _ = await of_amd(cluster)
        claim = cluster.claim("claim", first, driver=OF_AMD)
        await cluster.prepare(claim)
        [file] = node.cdi.glob("*claim*")
        os.utime(file, (0, 0))
        cluster.forget(claim)
        await node.pass_time(1000)
        assert not file.exists()


async def test_nothing_is_given_or_taken_back_that_is_not_on_disk(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        held, new = cluster.claim("held", "gpu-0"), cluster.claim("new", "gpu-1")
        await cluster.prepare(held)
        node.disk.fails = errno.ENOSPC
        assert "could not be written down" in await refusal(cluster, new)
        for _ in range(3):
            with pytest.raises(KubeletError, match="could not be written down"):
                await cluster.unprepare(held)
        node.disk.fails = 0
        await cluster.unprepare(held)
        assert (await cluster.prepare(new)).gpus == {B}
        node.gateways[-1].kill()
        cluster.gateway("--dra", "only")
        await cluster.connected()
        assert (await cluster.prepare(cluster.allocate("next", "gpu-0"))).gpus == {A}


async def test_a_disk_that_is_slow_is_waited_for(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        node.disk.hang(writers=True)
        waiting = asyncio.create_task(cluster.prepare(cluster.claim("claim", "gpu-0")))
        await node.pass_time(20)
        assert not waiting.done()
        node.disk.go_on()
        assert (await waiting).gpus == {A}


async def test_what_is_unprepared_while_it_is_being_prepared_is_free_then(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        claim = cluster.claim("claim", "gpu-0")
        cluster.hang()
        preparing = [asyncio.create_task(cluster.dra.prepare(claim)) for _ in range(2)]
        await node.pass_time(1)
        ending = asyncio.create_task(cluster.dra.unprepare(claim))
        await node.pass_time(1)
        cluster.heal()
        first, second = await asyncio.gather(*preparing)
        await ending
        assert first == second
        assert (await cluster.prepare(cluster.allocate("next", "gpu-0"))).gpus == {A}


async def at_once(cluster: Cluster, *claims: Claim) -> list[Any]:
    """Have the oldest and the newest gateway asked for one claim each in the same moment; return what came of it."""
    drivers = cluster.dra.drivers[0], cluster.dra.drivers[-1]
    calls = (cluster.dra.prepare(claim, one) for claim, one in zip(claims, drivers, strict=True))
    return await asyncio.gather(*map(cluster.node.kubelet.ask, calls), return_exceptions=True)


@pytest.mark.parametrize("gateways", [1, 2])
async def test_of_two_claims_that_are_asked_for_at_once_one_gets_the_gpu(node: Node, gateways: int) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        if gateways == 2:
            cluster.gateway("--dra", "only")
            await node.until(lambda: len(cluster.dra.drivers) == 2, "both drivers")
            await node.pass_time(5)
        for number in range(6):  # Each time in another order.
            claims = [cluster.allocate(f"{name}-{number}", "gpu-0") for name in ("one", "two")]
            answers = await at_once(cluster, *claims)
            [refused] = [one for one in answers if isinstance(one, KubeletError)]
            assert "gpu-0" in str(refused)
            winner, loser = claims if isinstance(answers[1], KubeletError) else reversed(claims)
            await cluster.prepare(winner)
            await cluster.end(winner)
            await cluster.prepare(loser)
            await cluster.end(loser)


async def test_a_claim_keeps_what_it_had_though_another_gateway_gave_away_what_it_was_allocated_again(
    node: Node,
) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        cluster.gateway("--dra", "only")
        await node.until(lambda: len(cluster.dra.drivers) == 2, "both drivers")
        await node.pass_time(5)
        for number in range(6):
            held = cluster.allocate(f"held-{number}", "gpu-1")
            await cluster.prepare(held)
            cluster.allocate(held.name, "gpu-0")
            other = cluster.allocate(f"other-{number}", "gpu-0")
            answers = await at_once(cluster, held, other)
            assert sum(isinstance(one, KubeletError) for one in answers) == 1
            with pytest.raises(KubeletError, match=f"default/{held.name}"):
                await node.kubelet.ask(cluster.dra.prepare(cluster.allocate("late", "gpu-1")))
            for claim in (held, other):
                await cluster.end(claim)


async def test_a_claim_waits_at_one_gateway_for_what_another_one_takes_back(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        cluster.gateway("--dra", "only")
        await node.until(lambda: len(cluster.dra.drivers) == 2, "both drivers")
        await node.pass_time(5)
        older, newer = cluster.dra.drivers
        held, late = cluster.allocate("held", "gpu-0"), cluster.allocate("late", "gpu-0")
        await cluster.dra.prepare(held, newer)
        waiting = asyncio.create_task(cluster.dra.prepare(late, older))
        await node.pass_time(5)
        assert not waiting.done()
        await cluster.dra.unprepare(held, newer)
        async with asyncio.timeout(3):
            assert (await waiting).gpus == {A}


async def test_a_claim_keeps_all_that_it_had_however_often_it_was_allocated_again(node: Node) -> None:
    async with Cluster(node) as cluster:
        simulate(node, A, B, "GPU-c")
        await cluster.start_kubelet()
        cluster.gateway("--dra", "only")
        await cluster.published_is(gpu_0=[], gpu_1=[], gpu_2=[])
        claims = []
        for name in ("gpu-0", "gpu-1", "gpu-2"):
            claims.append(cluster.allocate("claim", name))
            await cluster.prepare(claims[-1])
        later = [cluster.allocate(f"late-{name}", name) for name in ("gpu-0", "gpu-1", "gpu-2")]
        for one in later:
            with pytest.raises(KubeletError, match="default/claim"):
                await node.kubelet.ask(cluster.dra.prepare(one))
        await cluster.unprepare(claims[-1])
        await node.kubelet.ask(cluster.dra.prepare(later[-1]))


async def test_a_name_that_is_not_the_prepared_claims_gets_and_takes_nothing(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        held = cluster.claim("held", "gpu-0")
        got = await cluster.prepare(held)
        liar = replace(cluster.allocate("liar", "gpu-0"), uid=held.uid)
        for call in (cluster.dra.prepare, cluster.dra.unprepare):
            with pytest.raises(KubeletError, match="default/held"):
                await node.kubelet.ask(call(liar))
        assert await cluster.prepare(held) == got


async def taken_away(cluster: Cluster, claim: Claim) -> None:
    """Take a claim's allocation away."""
    cluster.server.change(claim.path, lambda one: one["status"].pop("allocation"))


async def held_by_another(cluster: Cluster, claim: Claim) -> None:
    """Allocate to a claim what another one has."""
    await cluster.prepare(cluster.claim("other", "gpu-1"))
    cluster.allocate(claim.name, "gpu-1")


async def elsewhere(cluster: Cluster, claim: Claim) -> None:
    """Allocate to a claim what is on another node."""
    cluster.allocate(claim.name, "gpu-0", pool="n2")


@pytest.mark.parametrize("change", [taken_away, held_by_another, elsewhere])
async def test_a_claim_that_cannot_have_what_it_was_allocated_again_keeps_what_it_had(node: Node, change: Any) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        claim = cluster.claim("claim", "gpu-0")
        got = await cluster.prepare(claim)
        await change(cluster, claim)
        await refusal(cluster, claim)
        with pytest.raises(KubeletError, match="default/claim"):
            await cluster.prepare(cluster.allocate("late", "gpu-0"))
        cluster.allocate("claim", "gpu-0")
        assert await cluster.prepare(claim) == got


@pytest.mark.parametrize("end", ["prepared", "unprepared", "asked for no more"])
async def test_a_refused_claim_is_reported_until_its_end(node: Node, end: str) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        claim = cluster.claim("claim", "gpu-0")
        config = [{"opaque": {"driver": "gpu.nvidia.com", "parameters": {}}}]
        cluster.server.change(claim.path, lambda one: one["status"]["allocation"]["devices"].update(config=config))
        assert "parameters" in await refusal(cluster, claim)
        [reason] = (await driver(cluster))["refused"]
        assert "claim default/claim: " in reason
        if end == "prepared":
            cluster.allocate("claim", "gpu-0")
            await cluster.prepare(claim)
        elif end == "unprepared":
            await cluster.unprepare(claim)
        else:
            await node.pass_time(150)
        assert not (await driver(cluster))["refused"]


@pytest.mark.parametrize("status", [401, 403])
async def test_what_no_later_answer_would_change_is_refused_at_once(node: Node, status: int) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        claim = cluster.claim("claim", "gpu-0")
        if status == 401:
            cluster.server.tokens.clear()
        else:
            cluster.server.hidden = "resourceclaims/claim"
        async with asyncio.timeout(3):
            assert str(status) in await refusal(cluster, claim)
        assert asked(cluster, "/claim") == 1


async def test_an_administrators_claim_gets_what_another_has_and_holds_nothing(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        held = cluster.claim("held", "gpu-0")
        await cluster.prepare(held)
        admin = cluster.allocate("admin", "gpu-0", adminAccess=True)
        assert (await node.kubelet.ask(cluster.dra.prepare(admin))).gpus == {A}
        await cluster.end(held)
        assert (await cluster.prepare(cluster.allocate("next", "gpu-0"))).gpus == {A}


async def test_a_claim_that_tolerates_it_gets_an_unhealthy_gpu(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        simulate(node, unhealthy=A)
        await cluster.published_is(gpu_0=["unhealthy"], gpu_1=[])
        key = "device-plugin-gateway.io/unhealthy"
        claim = cluster.allocate("claim", "gpu-0", tolerations=[{"key": key, "operator": "Exists"}])
        async with asyncio.timeout(3):
            assert (await cluster.prepare(claim)).gpus == {A}


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
async def test_each_kubelet_hears_of_health_in_its_own_version(node: Node, version: str) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        told = cluster.dra.health(version)
        assert await anext(told) == {"gpu-0": True, "gpu-1": True}
        simulate(node, unhealthy=B)
        async with asyncio.timeout(5):
            assert await anext(told) == {"gpu-0": True, "gpu-1": False}
        async with asyncio.timeout(50):  # The kubelet believes it for a minute.
            assert await anext(told) == {"gpu-0": True, "gpu-1": False}


async def test_an_open_health_stream_does_not_hold_up_the_end(node: Node) -> None:
    async with Cluster(node) as cluster:
        one = await started(cluster)
        await anext(cluster.dra.health())
        async with asyncio.timeout(3):
            assert await one.terminate() == 0


async def test_no_call_does_harm_whatever_its_bytes_and_its_number(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        prepare = f"/{V1.service}/{PREPARE}"
        assert (await cluster.dra.ask(prepare, b"\xff"))[0] == "INVALID_ARGUMENT"
        for where in (prepare, pluginregistration.NOTIFY):
            assert (await cluster.dra.ask(where, bytes(MAX_BYTES + 1)))[0] == "RESOURCE_EXHAUSTED"
        held = cluster.claim("held", "gpu-0")
        await cluster.prepare(held)
        late = [cluster.allocate(f"late-{number}", "gpu-0") for number in range(120)]
        waiting = [asyncio.create_task(cluster.dra.prepare(one)) for one in late]
        await node.pass_time(50)
        refused = [one.exception() for one in waiting]
        assert all(isinstance(one, KubeletError) for one in refused)
        assert len(node.gateways[-1].said("claim refused")) <= 100
        assert (await cluster.prepare(cluster.claim("new", "gpu-1"))).gpus == {B}


async def test_calls_beyond_the_most_are_refused_and_the_others_are_answered(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        path = f"unix:{cluster.dra.drivers[-1].path}"
        channels = [wire.Channel(path) for _ in range(3)]
        where = f"/{health.service('v1')}/{health.WATCH}"
        calls = [channel.unary_stream(where)(b"") for channel in channels for _ in range(250)]
        ends = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        refused = [one for one in ends if isinstance(one, grpc.aio.AioRpcError)]
        assert {one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) > 200
        for channel in channels:
            await channel.close()
        await node.pass_time(1)
        await cluster.prepare(cluster.claim("claim"))


@pytest.mark.parametrize("dra", ["off", "only"])
async def test_what_an_older_state_file_lacks_a_claim_keeps(node: Node, dra: str) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        file = node.state / "ledger.json"
        await cluster.prepare(cluster.claim("first", "gpu-0"))
        older = file.read_bytes()
        second = cluster.claim("second", "gpu-1")
        got = await cluster.prepare(second)
        node.gateways[-1].kill()
        file.write_bytes(older)
        cluster.gateway("--dra", dra)
        if dra == "off":
            await node.pass_time(20)
            assert node.allocatable() == 0
            await node.refused("pod")
        else:
            await cluster.connected()
            with pytest.raises(KubeletError, match="default/second"):
                await cluster.prepare(cluster.allocate("late", "gpu-1"))
            assert await cluster.prepare(second) == got


async def test_without_dra_a_claims_gpu_is_withheld_and_people_read_why(node: Node) -> None:
    async with Cluster(node) as cluster:
        one = await started(cluster)
        await cluster.prepare(cluster.claim("held", "gpu-0"))
        await one.terminate()
        node.profile.write_text("no profile")  # The driver is not up yet.
        two = cluster.gateway("--dra", "off")
        assert (await two.states()).get(A) in {"withheld", None}
        simulate(node)
        await node.allocatable_is(1)
        [resource] = (await two.status())["resources"]
        [row] = [row for row in resource["devices"] if row["id"] == A]
        assert row["state"] == "withheld"
        assert "claim default/held (pod held)" in row["reason"]


async def test_a_gateway_that_starts_without_the_api_server_serves_the_claims_that_it_prepared(node: Node) -> None:
    async with Cluster(node) as cluster:
        one = await started(cluster)
        held = cluster.claim("held", "gpu-0")
        got = await cluster.prepare(held)
        new = cluster.claim("new", "gpu-1")
        await cluster.server.stop()
        await one.terminate()
        cluster.gateway("--dra", "only")
        await cluster.connected()
        assert await cluster.prepare(held) == got
        waiting = asyncio.create_task(cluster.prepare(new))
        await node.pass_time(20)
        assert not waiting.done()
        await cluster.server.start()
        assert (await waiting).gpus == {B}
        await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_nothing_is_offered_while_nobody_says_what_pods_have(node: Node) -> None:
    async with Cluster(node) as cluster:
        simulate(node)
        await cluster.start_kubelet()
        await node.hide_pods()
        node.forget_checkpoint()
        cluster.gateway("--dra", "only")
        await node.pass_time(30)
        assert cluster.published() == {}
        await cluster.start_kubelet()
        await cluster.published_is(gpu_0=[], gpu_1=[])
        await node.hide_pods()  # What was said last counts.
        node.forget_checkpoint()
        await node.pass_time(60)
        await cluster.published_is(gpu_0=[], gpu_1=[])
        node.gateways[-1].kill()
        shutil.rmtree(node.state)
        cluster.gateway("--dra", "only")
        await node.pass_time(20)
        await cluster.published_is(gpu_0=[], gpu_1=[])  # Those of before stay until it is known.


async def test_a_gpu_that_is_left_out_is_offered_to_nobody_and_its_claim_keeps_it(node: Node) -> None:
    async with Cluster(node) as cluster:
        file = node.folder / "config.yaml"
        file.write_text("{}")
        await started(cluster, "1.34", "--config-file", str(file))
        held = cluster.claim("held", "gpu-0")
        got = await cluster.prepare(held)
        draft = node.folder / "draft"
        draft.write_text(f"gateway: {{excludeDevices: [{A}]}}")
        draft.replace(file)
        await cluster.published_is(gpu_1=[])
        assert await cluster.prepare(held) == got
        await cluster.end(held)
        await node.pass_time(10)
        await cluster.published_is(gpu_1=[])


async def test_a_claim_of_two_drivers_has_its_devices_of_each_until_that_one_is_unprepared(node: Node) -> None:
    async with Cluster(node) as cluster:
        node.simulate(
            {GPU: {"gpus": [{"uuid": A}]}, AMD: {"gpus": [{"uuid": "a", "device_nodes": ["/dev/dri/card1"]}]}}
        )
        await cluster.start_kubelet()
        cluster.gateway("--dra", "only")
        await node.until(lambda: cluster.published() and cluster.published(OF_AMD), "slices of both")
        nvidia = cluster.claim("claim", "gpu-0")
        [name] = cluster.published(OF_AMD)
        results = [
            {"request": one, "driver": driver, "pool": "n1", "device": device}
            for one, driver, device in (("gpu", nvidia.driver, "gpu-0"), ("other", OF_AMD, name))
        ]
        cluster.server.change(nvidia.path, lambda one: one["status"]["allocation"]["devices"].update(results=results))
        amd = replace(nvidia, device=name, driver=OF_AMD)
        got = [await node.kubelet.ask(cluster.dra.prepare(one)) for one in (nvidia, amd)]
        assert (set(got[0].gpus), [*got[1].nodes]) == ({A}, ["/dev/dri/card1"])
        await node.kubelet.ask(cluster.dra.unprepare(nvidia))
        late = cluster.allocate("late", name, driver=OF_AMD)
        with pytest.raises(KubeletError, match="default/claim"):
            await node.kubelet.ask(cluster.dra.prepare(late))
        assert await node.kubelet.ask(cluster.dra.prepare(amd)) == got[1]
        await node.kubelet.ask(cluster.dra.prepare(cluster.allocate("next", "gpu-0")))


async def test_a_boot_takes_no_claims_gpu_away(node: Node) -> None:
    async with Cluster(node) as cluster:
        await started(cluster)
        held = cluster.claim("held", "gpu-0")
        got = await cluster.prepare(held)
        node.reboot()
        shutil.rmtree(node.cdi, ignore_errors=True)
        await cluster.start_kubelet()
        cluster.gateway("--dra", "only")
        await cluster.connected()
        with pytest.raises(KubeletError, match="default/held"):
            await cluster.prepare(cluster.allocate("late", "gpu-0"))
        assert await cluster.prepare(held) == got
        await cluster.published_is(gpu_0=[], gpu_1=[])


@pytest.mark.parametrize("dra", ["off", "only"])
async def test_where_one_api_is_served_nothing_moves(node: Node, dra: str) -> None:
    async with Cluster(node) as cluster:
        simulate(node)
        await cluster.start_kubelet()
        one = cluster.gateway("--dra", dra)
        with pytest.raises(OrderError, match="--dra on"):
            await one.order("cross", to="dra", ids=[])


async def test_a_pod_that_goes_on_is_asked_about_less_and_less_often_and_an_outage_hides_no_end(node: Node) -> None:
    async with Cluster(node) as cluster:
        simulate(node)
        await cluster.start_kubelet()
        one = node.gateway()
        await node.allocatable_is(2)
        given = await node.admit("pod")
        cluster.pod("pod", phase="Running", startTime="2026-01-01T00:00:00Z")
        await one.terminate()
        cluster.gateway("--dra", "only")
        await node.until(lambda: len(cluster.published()) == 1, "one GPU to be offered")
        node.remove("pod")  # The kubelet's checkpoint names it until another pod gets a device.
        await node.pass_time(30)
        before = asked(cluster, "/pods")
        await node.pass_time(150)
        assert 5 < asked(cluster, "/pods") - before < 30
        await cluster.server.stop()
        cluster.server.remove(POD)
        await node.pass_time(20)
        with pytest.raises(UnschedulableError):
            cluster.claim("claim", {A: "gpu-0", B: "gpu-1"}[given.devices[GPU][0]])
        await cluster.server.start()
        await cluster.published_is(30, gpu_0=[], gpu_1=[])
