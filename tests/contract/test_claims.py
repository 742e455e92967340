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
from gateway_lab.kubelets.kubelet import KubeletError
from tests.contract import wire
from tests.contract.claiming import A, B, asked, driver, held_by_name, simulate, started
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


async def test_a_container_sees_all_gpus_of_its_request(cluster: Cluster) -> None:
    both = await of_amd(cluster, nodes=False)
    got = await cluster.prepare(cluster.allocate("claim", *both, driver=OF_AMD))
    assert got.envs["AMD_VISIBLE_DEVICES"] == f"{A},{B}"


async def test_a_claims_specification_can_be_read_by_container_runtimes(node: Node, cluster: Cluster) -> None:
    os.umask(0o077)
    spoiled.append("umask")
    first, _ = await of_amd(cluster)
    await cluster.prepare(cluster.claim("claim", first, driver=OF_AMD))
    [file] = node.cdi.glob("*claim*")
    assert file.stat().st_mode & 0o777 == 0o644


async def test_a_claim_whose_specification_cannot_be_written_gets_its_gpu_later(node: Node, cluster: Cluster) -> None:
    first, _ = await of_amd(cluster)
    claim = cluster.claim("claim", first, driver=OF_AMD)
    shutil.rmtree(node.cdi, ignore_errors=True)
    node.cdi.write_text("where a folder belongs")
    assert "CDI specification into" in await cluster.refused(claim)
    node.cdi.unlink()
    assert (await cluster.prepare(claim)).nodes == ("/dev/dri/card0",)


async def test_the_specification_of_a_claim_that_is_gone_goes_too(node: Node, cluster: Cluster) -> None:
    first, _ = await of_amd(cluster)
    claim = cluster.claim("claim", first, driver=OF_AMD)
    await cluster.prepare(claim)
    [file] = node.cdi.glob("*claim*")
    os.utime(file, (0, 0))
    cluster.forget(claim)
    await node.pass_time(1000)
    assert not file.exists()


async def test_nothing_is_given_or_taken_back_that_is_not_on_disk(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held, new = cluster.claim("held", "gpu-0"), cluster.claim("new", "gpu-1")
    await cluster.prepare(held)
    node.disk.fails = errno.ENOSPC
    assert "cannot save the claim" in await cluster.refused(new)
    for _ in range(3):
        with pytest.raises(KubeletError, match="cannot save in"):
            await cluster.unprepare(held)
    node.disk.fails = 0
    await cluster.unprepare(held)
    assert (await cluster.prepare(new)).gpus == {B}
    cluster.restart_gateway("--dra", "only")
    await cluster.connected()
    assert (await cluster.prepare(cluster.allocate("next", "gpu-0"))).gpus == {A}


async def test_a_disk_that_is_slow_is_waited_for(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    node.disk.hang(writers=True)
    waiting = asyncio.create_task(cluster.prepare(cluster.claim("claim", "gpu-0")))
    await node.pass_time(20)
    assert not waiting.done()
    node.disk.go_on()
    assert (await waiting).gpus == {A}


async def test_what_is_unprepared_while_it_is_being_prepared_is_free_then(node: Node, cluster: Cluster) -> None:
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


async def joined(cluster: Cluster) -> None:
    """Start a second gateway, and wait until the kubelet has the DRA drivers of both."""
    cluster.gateway("--dra", "only")
    await cluster.node.until(lambda: len(cluster.dra.drivers) == 2, "both drivers")
    await cluster.node.pass_time(5)


async def at_once(cluster: Cluster, *claims: Claim) -> list[Any]:
    """Have the oldest and the newest gateway asked for one claim each in the same moment; return what came of it."""
    drivers = cluster.dra.drivers[0], cluster.dra.drivers[-1]
    calls = (cluster.dra.prepare(claim, one) for claim, one in zip(claims, drivers, strict=True))
    return await asyncio.gather(*map(cluster.node.kubelet.ask, calls), return_exceptions=True)


@pytest.mark.parametrize("gateways", [1, 2])
async def test_of_two_claims_at_once_one_gets_the_gpu(node: Node, cluster: Cluster, gateways: int) -> None:
    await started(cluster)
    if gateways == 2:
        await joined(cluster)
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


async def test_a_claim_keeps_its_gpu_though_another_gateway_gave_away_its_new_one(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    await joined(cluster)
    for number in range(6):
        held = cluster.allocate(f"held-{number}", "gpu-1")
        await cluster.prepare(held)
        cluster.allocate(held.name, "gpu-0")
        other = cluster.allocate(f"other-{number}", "gpu-0")
        answers = await at_once(cluster, held, other)
        assert sum(isinstance(one, KubeletError) for one in answers) == 1
        await cluster.refused(cluster.allocate("late", "gpu-1"), f"default/{held.name}")
        for claim in (held, other):
            await cluster.end(claim)


async def test_a_claim_waits_at_one_gateway_for_what_another_one_takes_back(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    await joined(cluster)
    older, newer = cluster.dra.drivers
    held, late = cluster.allocate("held", "gpu-0"), cluster.allocate("late", "gpu-0")
    await cluster.dra.prepare(held, newer)
    waiting = asyncio.create_task(cluster.dra.prepare(late, older))
    await node.pass_time(5)
    assert not waiting.done()
    await cluster.dra.unprepare(held, newer)
    async with asyncio.timeout(3):
        assert (await waiting).gpus == {A}


async def test_a_claim_keeps_all_that_it_had_however_often_it_was_allocated_again(node: Node, cluster: Cluster) -> None:
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
        await cluster.refused(one, "default/claim")
    await cluster.unprepare(claims[-1])
    await node.kubelet.ask(cluster.dra.prepare(later[-1]))


async def test_a_name_that_is_not_the_prepared_claims_gets_and_takes_nothing(node: Node, cluster: Cluster) -> None:
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
async def test_a_claim_that_cannot_have_its_new_allocation_keeps_the_old_one(cluster: Cluster, change: Any) -> None:
    await started(cluster)
    claim = cluster.claim("claim", "gpu-0")
    got = await cluster.prepare(claim)
    await change(cluster, claim)
    await cluster.refused(claim)
    await cluster.refused(cluster.allocate("late", "gpu-0"), "default/claim")
    cluster.allocate("claim", "gpu-0")
    assert await cluster.prepare(claim) == got


# -- parameters -------------------------------------------------------------------------------------------------------

NVIDIAS, AMDS = "resource.nvidia.com/v1beta1", "gpu.resource.amd.com/v1alpha1"


def gpu(sharing: Any = None, kind: Any = "GpuConfig", **more: Any) -> dict[str, Any]:
    """Return parameters as a claim for NVIDIA's driver has them."""
    return {"apiVersion": NVIDIAS, "kind": kind, **({} if sharing is None else {"sharing": sharing}), **more}


def interval(name: Any) -> dict[str, Any]:
    """Return parameters with a time-slice interval."""
    return gpu({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": name}})


def mig(sharing: Any = None, **more: Any) -> dict[str, Any]:
    """Return parameters for MIG devices."""
    return gpu(sharing, "MigDeviceConfig", **more)


MPS = {"strategy": "MPS"}
EMPTY_OF_AMD = {"apiVersion": AMDS, "kind": "GpuConfig"}


def config(parameters: Any, *requests: str, source: str = "FromClaim", driver: str = "gpu.nvidia.com") -> Any:
    """Return an entry of an allocation's ``config``."""
    return {"source": source, "requests": [*requests], "opaque": {"driver": driver, "parameters": parameters}}


def with_parameters(cluster: Cluster, claim: Claim, *configs: Any) -> Claim:
    """Allocate as the scheduler does where a claim and its class have parameters."""
    cluster.server.change(claim.path, lambda one: one["status"]["allocation"]["devices"].update(config=[*configs]))
    return claim


async def with_mig(cluster: Cluster) -> str:
    """Offer GPU A whole and an instance of B; return the name of the latter."""
    cluster.node.simulate({GPU: {"gpus": [{"uuid": A}, {"uuid": B}], "mig": {B: ["1g.10gb"]}}})
    await cluster.start_kubelet()
    cluster.gateway("--dra", "only", "--mig-strategy", "mixed")
    await cluster.node.until(lambda: len(cluster.published()) == 2, "both")
    [name] = [name for name, one in cluster.slices().items() if one["attributes"]["type"]["string"] == "mig"]
    return name


@pytest.mark.parametrize(
    "parameters",
    [
        gpu(),
        gpu({"strategy": "TimeSlicing"}),
        gpu({"strategy": "TimeSlicing", "timeSlicingConfig": {}, "mpsConfig": None}),
        interval("Default"),
        mig(),  # It is for no device of this claim.
        mig(MPS),
    ],
    ids=str,
)
async def test_parameters_that_ask_for_nothing_are_accepted(cluster: Cluster, parameters: Any) -> None:
    await started(cluster)
    claim = with_parameters(cluster, cluster.claim("claim", "gpu-0"), config(parameters))
    got = await cluster.prepare(claim)
    assert (*got.gpus, *got.nodes) == (A, "/dev/nvidia0")
    assert await cluster.prepare(claim) == got
    assert not (await driver(cluster))["refused"]


@pytest.mark.parametrize("parameters", [mig(), mig({"strategy": "TimeSlicing"}), gpu(MPS)], ids=str)
async def test_parameters_that_ask_nothing_of_a_mig_instance_are_accepted(cluster: Cluster, parameters: Any) -> None:
    name = await with_mig(cluster)
    claim = with_parameters(cluster, cluster.claim("claim", name), config(parameters))
    assert (await cluster.prepare(claim)).names


async def test_parameters_of_amd_are_accepted_without_members(cluster: Cluster) -> None:
    first, second = await of_amd(cluster)
    claim = cluster.claim("claim", first, driver=OF_AMD)
    with_parameters(cluster, claim, config(EMPTY_OF_AMD, "gpu", driver=OF_AMD))
    assert (await cluster.prepare(claim)).nodes == ("/dev/dri/card0",)
    for parameters, reason in ((EMPTY_OF_AMD | {"sharing": {}}, "unknown field `sharing`"), (gpu(), "are unknown")):
        claim = cluster.allocate("other", second, driver=OF_AMD)
        assert reason in await cluster.refused(with_parameters(cluster, claim, config(parameters, driver=OF_AMD)))


REFUSED: dict[str, tuple[Any, str]] = {
    "no interval": (interval("Longer"), "Invalid enum value 'Longer' - at `$.sharing.timeSlicingConfig.interval`"),
    "a number": (interval(2), "Expected `str | null`, got `int`"),
    "MPS": (gpu(MPS), "GpuConfig asks for MPS, which the gateway does not run. Remove sharing"),
    "MPS with members": (gpu({**MPS, "mpsConfig": {"defaultActiveThreadPercentage": 50}}), "asks for MPS"),
    "MPS beside": (gpu({"strategy": "TimeSlicing", "mpsConfig": {}}), "asks for MPS"),
    "no strategy": (gpu({}), "missing required field `strategy`"),
    "another strategy": (gpu({"strategy": "Exclusive"}), "Invalid enum value 'Exclusive'"),
    "VFIO": (gpu(kind="VfioDeviceConfig"), "VfioDeviceConfig is not supported"),
    "another kind": (
        gpu(kind="ComputeDomainChannelConfig"),
        "'ComputeDomainChannelConfig' are unknown. Use resource.nvidia",
    ),
    "another version": (gpu(apiVersion="resource.nvidia.com/v1"), "'resource.nvidia.com/v1' 'GpuConfig' are unknown"),
    "another vendor's": (EMPTY_OF_AMD, "'gpu.resource.amd.com/v1alpha1' 'GpuConfig' are unknown"),
    "a member": (gpu(memory="1Gi"), "unknown field `memory`"),
    "a member within": (gpu({"strategy": "TimeSlicing", "replicas": 2}), "unknown field `replicas` - at `$.sharing`"),
    "a member of MIG": (mig({"strategy": "TimeSlicing", "timeSlicingConfig": {}}), "unknown field `timeSlicingConfig`"),
    "another case": (gpu(Sharing={}), "unknown field `Sharing`"),
    "nothing": ({}, "'' '' are unknown"),
    "null": (None, "Expected `object`, got `null`"),
    "a list": ([gpu()], "Expected `object`, got `array`"),
    "a text": ("GpuConfig", "Expected `object`, got `str`"),
    "a list within": (gpu([]), "Expected `object | null`, got `array`"),
    "a kind that is a number": (gpu(kind=7), "Expected `str`, got `int`"),
    "a screen's": (gpu(kind="\x1b[2J"), "'?[2J' are unknown"),
    "a surrogate": (gpu(**{"\ud800": 1}), "cannot read claim"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_parameters_that_ask_for_what_is_not_done_are_refused_with_the_reason(node: Node, name: str) -> None:
    parameters, reason = REFUSED[name]
    async with Cluster(node) as cluster:
        await started(cluster)
        claim = with_parameters(cluster, cluster.claim("claim", "gpu-0"), config(parameters))
        async with asyncio.timeout(50 if name == "a surrogate" else 3):
            words = await cluster.refused(claim)
        assert reason in words
        [told] = (await driver(cluster))["refused"]
        assert told.startswith("claim default/claim: ")
        assert not node.gateways[-1].said("a claim could not be prepared because of a defect in the gateway")
        assert (await cluster.prepare(cluster.allocate("next", "gpu-0"))).gpus == {A}


@pytest.mark.parametrize(
    "parameters",
    [gpu(**{"x" * 9000: 1}), gpu(kind="x" * 9000), gpu({"strategy": "x" * 9000}), gpu({**MPS, "mpsConfig": {}})],
    ids=["a member", "a kind", "a value", "MPS"],
)
async def test_a_reason_is_short_and_says_what_to_do(cluster: Cluster, parameters: Any) -> None:
    await started(cluster)
    claim = with_parameters(cluster, cluster.claim("claim", "gpu-0"), config(parameters))
    words = await cluster.refused(claim)
    assert len(words) < 600
    assert "Cannot use the parameters of claim default/claim or its DeviceClass: " in words
    assert words.endswith("Then delete the pod and its claim")


OF_CLASS = {"source": "FromClass"}
LAST: dict[str, tuple[list[Any], str]] = {
    "the claim's comes after its class's": ([config(gpu()), config(gpu(MPS), **OF_CLASS)], ""),
    "also where it asks for more": ([config(gpu(MPS)), config(gpu(), **OF_CLASS)], "MPS"),
    "of a claim the last one": ([config(gpu(MPS)), config(gpu())], ""),
    "of a class the last one": ([config(gpu(), **OF_CLASS), config(gpu(MPS), **OF_CLASS)], "MPS"),
    "for its request": ([config(gpu(MPS), "other"), config(gpu(), "gpu")], ""),
    "not for another one": ([config(gpu(MPS), "gpu"), config(gpu(), "other")], "MPS"),
    "for all requests after its own": ([config(gpu(MPS), "gpu"), config(gpu())], ""),
    "for its own after all": ([config(gpu()), config(gpu(MPS), "gpu")], "MPS"),
    "of its type": ([config(gpu(MPS)), config(mig())], "MPS"),
    "another driver's is not ours": ([config({"kind": "Any"}, driver="x.example.com")], ""),
    "one that is for no device is read too": ([config(gpu(memory=1), "other")], "unknown field `memory`"),
    "a request of another type": (
        [config(mig(), "gpu")],
        "MigDeviceConfig is for type mig, and request gpu got gpu-0 of",
    ),
}


@pytest.mark.parametrize("name", LAST)
async def test_of_several_parameters_the_last_one_counts(node: Node, name: str) -> None:
    configs, reason = LAST[name]
    async with Cluster(node) as cluster:
        await started(cluster)
        claim = with_parameters(cluster, cluster.claim("claim", "gpu-0"), *configs)
        if reason:
            assert reason in await cluster.refused(claim)
        else:
            assert (await cluster.prepare(claim)).gpus == {A}


@pytest.mark.parametrize(("request_", "reason"), [("gpu", "MPS"), ("gpu/large", "MPS"), ("gpu/small", "")])
async def test_parameters_of_a_request_are_for_its_subrequests(cluster: Cluster, request_: str, reason: str) -> None:
    await started(cluster)
    claim = cluster.allocate("claim", "gpu-0", request="gpu/large")
    with_parameters(cluster, claim, config(gpu(MPS), request_))
    if reason:
        assert reason in await cluster.refused(claim)
    else:
        assert (await cluster.prepare(claim)).gpus == {A}


async def test_parameters_that_are_refused_are_not_waited_with(cluster: Cluster) -> None:
    await started(cluster)
    await cluster.prepare(cluster.claim("held", "gpu-0"))
    late = with_parameters(cluster, cluster.allocate("late", "gpu-0"), config(gpu(MPS)))
    async with asyncio.timeout(3):
        assert "MPS" in await cluster.refused(late)


async def test_people_read_which_claim_is_refused_and_why(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    await cluster.refused(with_parameters(cluster, cluster.claim("claim", "gpu-0"), config(gpu(MPS))))
    for words in ("status", "doctor"):
        text = " ".join((await node.command(words, "--state-dir", str(node.state)))[1].split())
        assert "claim default/claim: Cannot use the parameters" in text
        assert "GpuConfig asks for MPS" in text


@pytest.mark.parametrize("end", ["prepared", "unprepared", "asked for no more"])
async def test_a_refused_claim_is_reported_until_its_end(node: Node, cluster: Cluster, end: str) -> None:
    await started(cluster)
    claim = cluster.claim("claim", "gpu-0")
    config = [{"opaque": {"driver": "gpu.nvidia.com", "parameters": {}}}]
    cluster.server.change(claim.path, lambda one: one["status"]["allocation"]["devices"].update(config=config))
    assert "parameters" in await cluster.refused(claim)
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


async def test_a_claim_that_waits_in_vain_is_reported_until_it_is_asked_for_again(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    await cluster.prepare(cluster.claim("held", "gpu-0"))
    late = cluster.allocate("late", "gpu-0")
    assert "in use" in await cluster.refused(late)
    await node.pass_time(90)
    asking = node.kubelet.process.run(cluster.prepare(late))
    await node.pass_time(37)
    assert not asking.done()
    [reason] = (await driver(cluster))["refused"]
    assert reason.startswith("claim default/late: gpu-0 is in use")
    with pytest.raises(KubeletError):
        await asking


async def test_a_claim_that_cannot_be_unprepared_is_reported(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    claim = cluster.claim("claim", "gpu-0")
    await cluster.prepare(claim)
    node.disk.fails = errno.ENOSPC
    with pytest.raises(KubeletError):
        await cluster.unprepare(claim)
    [reason] = (await driver(cluster))["refused"]
    assert reason.startswith("claim default/claim: cannot save in ")
    node.disk.fails = 0
    await node.pass_time(40)
    await cluster.unprepare(claim)
    assert not (await driver(cluster))["refused"]


@pytest.mark.parametrize("status", [401, 403])
async def test_what_no_later_answer_would_change_is_refused_at_once(cluster: Cluster, status: int) -> None:
    await started(cluster)
    claim = cluster.claim("claim", "gpu-0")
    if status == 401:
        cluster.server.tokens.clear()
    else:
        cluster.server.hidden = "resourceclaims/claim"
    async with asyncio.timeout(3):
        assert str(status) in await cluster.refused(claim)
    assert asked(cluster, "/claim") == 1


async def test_an_administrators_claim_gets_what_another_has_and_holds_nothing(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held = cluster.claim("held", "gpu-0")
    await cluster.prepare(held)
    admin = cluster.allocate("admin", "gpu-0", adminAccess=True)
    assert (await node.kubelet.ask(cluster.dra.prepare(admin))).gpus == {A}
    await cluster.end(held)
    assert (await cluster.prepare(cluster.allocate("next", "gpu-0"))).gpus == {A}


async def test_a_claim_that_tolerates_it_gets_an_unhealthy_gpu(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    simulate(node, unhealthy=A)
    await cluster.published_is(gpu_0=["unhealthy"], gpu_1=[])
    key = "device-plugin-gateway.io/unhealthy"
    claim = cluster.allocate("claim", "gpu-0", tolerations=[{"key": key, "operator": "Exists"}])
    admin = cluster.allocate("admin", "gpu-0", adminAccess=True)
    async with asyncio.timeout(3):
        assert (await cluster.prepare(claim)).gpus == {A}
        assert (await node.kubelet.ask(cluster.dra.prepare(admin))).gpus == {A}


KEY = "device-plugin-gateway.io/unhealthy"


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        ({"key": KEY}, True),
        ({"operator": "Exists"}, True),
        ({"key": KEY, "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": KEY, "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": KEY, "value": "x"}, False),
        ({"key": f"{KEY}-too", "operator": "Exists"}, False),
        ({}, False),
    ],
)
async def test_a_toleration_covers_what_it_covers_for_kubernetes(
    node: Node, cluster: Cluster, toleration: dict[str, str], covers: bool
) -> None:
    await started(cluster)
    simulate(node, unhealthy=A)
    await cluster.published_is(gpu_0=["unhealthy"], gpu_1=[])
    claim = cluster.allocate("claim", "gpu-0", tolerations=[toleration])
    if covers:
        assert (await cluster.prepare(claim)).gpus == {A}
    else:
        assert "is unhealthy" in await cluster.refused(claim)


async def test_a_claim_that_is_allocated_more_gets_it_beside_what_it_has(cluster: Cluster) -> None:
    await started(cluster)
    claim = cluster.claim("claim", "gpu-0")
    await cluster.prepare(claim)
    async with asyncio.timeout(3):
        assert (await cluster.prepare(cluster.allocate("claim", "gpu-0", "gpu-1"))).gpus == {A, B}


async def test_each_request_of_a_claim_has_an_answer_of_its_own(cluster: Cluster) -> None:
    first, second = await of_amd(cluster, nodes=False)
    claim = cluster.allocate("claim", first, second, driver=OF_AMD)
    results = cluster.server.objects[claim.path]["status"]["allocation"]["devices"]["results"]
    results[1]["request"] = "another"
    got = await cluster.prepare(claim)
    assert got.envs["AMD_VISIBLE_DEVICES"] in {A, B}
    assert got.requests == {first: ("gpu",), second: ("another",)}


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
async def test_each_kubelet_hears_of_health_in_its_own_version(node: Node, cluster: Cluster, version: str) -> None:
    await started(cluster)
    told = cluster.dra.health(version)
    assert await anext(told) == {"gpu-0": True, "gpu-1": True}
    simulate(node, unhealthy=B)
    async with asyncio.timeout(5):
        assert await anext(told) == {"gpu-0": True, "gpu-1": False}
    async with asyncio.timeout(50):  # The kubelet believes it for a minute.
        assert await anext(told) == {"gpu-0": True, "gpu-1": False}


async def test_an_open_health_stream_does_not_hold_up_the_end(cluster: Cluster) -> None:
    one = await started(cluster)
    await anext(cluster.dra.health())
    async with asyncio.timeout(3):
        assert await one.terminate() == 0


async def test_no_call_does_harm_whatever_its_bytes_and_its_number(node: Node, cluster: Cluster) -> None:
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


async def test_calls_beyond_the_most_are_refused_and_the_others_are_answered(node: Node, cluster: Cluster) -> None:
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
async def test_what_an_older_state_file_lacks_a_claim_keeps(node: Node, cluster: Cluster, dra: str) -> None:
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
        await node.allocatable_after(20, 0)
        await node.refused("pod")
    else:
        await cluster.connected()
        await cluster.refused(cluster.allocate("late", "gpu-1"), "default/second")
        assert await cluster.prepare(second) == got


async def test_without_dra_a_claims_gpu_is_withheld_and_people_read_why(node: Node, cluster: Cluster) -> None:
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


async def test_a_gateway_without_the_api_server_serves_the_claims_it_prepared(node: Node, cluster: Cluster) -> None:
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


async def test_nothing_is_offered_while_nobody_says_what_pods_have(node: Node, cluster: Cluster) -> None:
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


async def test_a_gpu_that_is_left_out_is_offered_to_nobody_and_its_claim_keeps_it(node: Node, cluster: Cluster) -> None:
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


async def test_a_claim_of_two_drivers_has_the_devices_of_each_until_its_end(node: Node, cluster: Cluster) -> None:
    node.simulate({GPU: {"gpus": [{"uuid": A}]}, AMD: {"gpus": [{"uuid": "a", "device_nodes": ["/dev/dri/card1"]}]}})
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
    await cluster.refused(late, "default/claim")
    assert await node.kubelet.ask(cluster.dra.prepare(amd)) == got[1]
    await node.kubelet.ask(cluster.dra.prepare(cluster.allocate("next", "gpu-0")))


async def test_a_boot_takes_no_claims_gpu_away(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held = cluster.claim("held", "gpu-0")
    got = await cluster.prepare(held)
    node.reboot()
    shutil.rmtree(node.cdi, ignore_errors=True)
    await cluster.start_kubelet()
    cluster.gateway("--dra", "only")
    await cluster.connected()
    await cluster.refused(cluster.allocate("late", "gpu-0"), "default/held")
    assert await cluster.prepare(held) == got
    await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_a_boot_ends_what_only_the_kubelets_folder_remembers_of_claims(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held = cluster.claim("held", "gpu-0")
    await cluster.prepare(held)
    node.reboot()
    for file in node.state.iterdir():
        file.unlink()
    node.claims.clear()
    cluster.forget(held)
    await cluster.start_kubelet()
    cluster.gateway("--dra", "only")
    await cluster.connected()
    await cluster.published_is(gpu_0=[], gpu_1=[])
    await cluster.prepare(cluster.claim("next", "gpu-0"))


@pytest.mark.parametrize("dra", ["off", "only"])
async def test_where_one_api_is_served_nothing_moves(node: Node, cluster: Cluster, dra: str) -> None:
    simulate(node)
    await cluster.start_kubelet()
    one = cluster.gateway("--dra", dra)
    with pytest.raises(OrderError, match="--dra on"):
        await one.order("move", to="dra", ids=[])


async def test_a_pod_that_runs_on_is_asked_about_less_and_an_outage_hides_no_end(node: Node, cluster: Cluster) -> None:
    one, held = await held_by_name(cluster)
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
        cluster.claim("claim", {A: "gpu-0", B: "gpu-1"}[held])
    await cluster.server.start()
    await cluster.published_is(30, gpu_0=[], gpu_1=[])
