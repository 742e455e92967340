"""What a kubelet of each version asks, and what it is told: lists, answers, refusals; and callers that are no kubelet."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from adapters.pb.v1alpha import v0_1_pb2
from adapters.registry import by_name
from devices.model import ContainerRequest, Options
from tests.contract.clock import patches
from tests.contract.node import GPU, Gateway, Node, Refused, gpus

OTHER = "example.com/gpu"
CDI = {GPU: {"gpus": 2, "cdi": "vendor.com/gpu"}}


def allocate(version: str, *containers: tuple[str, ...]) -> bytes:
    """Spell an Allocate for containers."""
    return by_name(version).encode_allocate_request([ContainerRequest(one) for one in containers]).data


async def listed(node: Node, resource: str = GPU) -> list[str]:
    """Return the IDs on the list."""
    async with node.plugin(resource) as plugin:
        return [one.id for one in await plugin.first_list()]


async def resource_of(gateway: Gateway, name: str = GPU) -> dict[str, Any]:
    """Return what its status says of a resource."""
    return next(one for one in (await gateway.status())["resources"] if one["name"] == name)


# -- what each version is told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.10", "1.18", "1.37"])
async def test_a_device_has_its_numa_node_and_its_device_nodes(node: Node, version: str) -> None:
    gpus = [{"uuid": f"gpu-{number}", "numa": number, "device_nodes": ["/dev/null", "/dev/zero"]} for number in (0, 1)]
    node.simulate({OTHER: {"gpus": [*gpus, {"uuid": "gpu-2", "device_nodes": ["/dev/full"]}]}})
    await node.served(3, version=version, resource=OTHER)
    given = await node.admit("pod", OTHER, 3)
    assert {one.host_path for one in given.answer.device_nodes} == {"/dev/null", "/dev/zero", "/dev/full"}
    assert {one.permissions for one in given.answer.device_nodes} == {"rw"}
    async with node.plugin(OTHER) as plugin:
        nodes = {one.id: one.numa_nodes for one in await plugin.first_list()}
    said = {"gpu-0": (0,), "gpu-1": (1,), "gpu-2": ()}
    assert nodes == (dict.fromkeys(said, ()) if version in {"1.8", "1.9"} else said)


async def test_what_a_kubelet_cannot_be_told_is_said_once_and_counted_each_time(node: Node) -> None:
    numa = {"gpus": [{"uuid": f"gpu-{number}", "numa": number} for number in (0, 1)]}
    node.simulate({GPU: numa})
    one = await node.served(2, version="1.9")
    for ill in ({}, {"gpu-0": "hot"}, {}):
        node.simulate({GPU: {**numa, "unhealthy": ill}})
        await node.pass_time(3)
    assert len(one.said("a field was left out", resource=GPU)) == 1
    counted = {name: value for name, value in (await one.metrics()).items() if "lost_fields" in name}
    assert sum(counted.values()) >= 3, counted


async def test_each_device_has_a_spec_of_its_own_for_the_first_kubelets(node: Node) -> None:
    await node.served(8, version="1.8")
    ids = tuple((await listed(node))[:3])
    code, answer = await node.caller().call("Allocate", allocate("0.1", ids))
    assert code == "OK"
    assert [one.ID for one in v0_1_pb2.AllocateResponse.FromString(answer).spec] == [*ids]


@pytest.mark.parametrize(
    ("version", "differs", "pinned", "is_said"),
    [
        ("1.9", {}, "", False),
        ("1.24", {}, "", False),
        ("1.28", {}, "", False),
        ("1.29", {}, "", True),
        ("1.37", {}, "", True),
        ("1.38", {"grpc_go": "1.99.0"}, "", True),
        ("1.28", {}, "1.29", True),
        ("1.29", {}, "1.28", False),
        # Another vendor's build: it has a later grpc-go, and doesn't ask for the options before the list.
        ("1.24", {"grpc_go": "1.58.3"}, "", False),
    ],
)
async def test_cdi_names_are_said_to_kubelets_that_heed_them_and_refused_to_others(
    node: Node, version: str, differs: dict[str, Any], pinned: str, *, is_said: bool
) -> None:
    node.simulate(CDI)
    await node.start_kubelet(version, **differs)
    node.gateway(*(("--kubelet-version", pinned) if pinned else ()))
    await node.allocatable_is(2)
    if is_said:
        async with node.plugin() as plugin:
            (uuid, _) = [one.id for one in await plugin.first_list()]
            assert (await plugin.allocate(uuid)).cdi_devices == (f"vendor.com/gpu={uuid}",)
    else:
        assert "CDI" in await node.refused("pod")


async def test_a_stranger_that_asks_for_the_options_makes_the_kubelet_no_newer(node: Node) -> None:
    node.simulate(CDI)
    node.fault(register_late_ms=1000)
    await node.start_kubelet("1.24", grpc_go="1.58.3")
    node.gateway()
    await node.until(lambda: node.registers[GPU], "a Register")
    assert (await node.stranger("v1beta1", "curl").call("GetDevicePluginOptions"))[0] == "OK"
    await node.allocatable_is(2)
    assert "CDI" in await node.refused("pod")


async def test_what_one_kubelet_showed_is_no_evidence_of_the_next(node: Node) -> None:
    node.simulate(CDI)
    node.gateway()
    for version in ("1.37", "1.28", "1.29", "1.24", "1.37", "1.9"):
        await node.start_kubelet(version)
        await node.allocatable_is(2)
        if version in {"1.29", "1.37"}:
            await node.admit(f"on {version}")
            node.remove(f"on {version}")
        else:
            assert "CDI" in await node.refused(f"on {version}")


@pytest.mark.parametrize(
    ("version", "differs", "kubelets"),
    [
        ("1.8", {}, "1.8"),
        ("1.9", {}, "1.9"),
        ("1.21", {}, "1.20 to 1.21"),
        ("1.28", {}, "1.26 to 1.28"),
        ("1.28", {"grpc_go": "1.57.0"}, "1.26 to 1.30"),
        ("1.37", {}, "1.37 and later"),
        ("1.40", {"grpc_go": "1.99.0"}, "1.37 and later"),
    ],
)
async def test_the_likely_kubelets_are_told(node: Node, version: str, differs: dict[str, Any], kubelets: str) -> None:
    await node.start_kubelet(version, **differs)
    one = node.gateway()
    await node.allocatable_is(8)
    assert (await resource_of(one))["kubelets"] == kubelets


async def test_annotations_and_mounts_reach_the_container(node: Node) -> None:
    await node.served(8, "--device-list-strategy", "volume-mounts,cdi-annotations", version="1.20")
    given = await node.admit("pod")
    (uuid,) = given.devices[GPU]
    assert [one.container_path for one in given.answer.mounts] == [f"/var/run/nvidia-container-devices/{uuid}"]
    assert uuid in str(given.answer.annotations)


# -- options, preferences, PreStartContainer --------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.11", "1.20", "1.34"])
async def test_options_that_change_are_told_to_the_kubelet(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    node.simulate({GPU: {"gpus": 4}})
    node.gateway()
    await node.allocatable_is(4)
    for pod, changes in ("first", (True,)), ("second", (False, True)), ("third", (False, True, False)):
        for wanted in changes:
            node.simulate({GPU: {"gpus": 4, "pre_start": wanted}})
            await node.pass_time(0.3)
        await node.pass_time(5)
        await node.allocatable_is(4)
        await node.admit(pod)
        called = node.kubelet.noted(f"PreStartContainer {GPU} for pod {pod}: OK")
        assert (pod, len(called)) == (pod, int(changes[-1]))
    async with node.plugin() as plugin:
        assert await plugin.options() == Options(pre_start_required=False, preferred_allocation=True)
    await node.pass_time(60)
    assert len(node.kubelet.noted(f"Dial {GPU} ")) <= 1 + 1 + 2 + 2  # Each takes the devices away for a moment.


@pytest.mark.parametrize("version", ["1.11", "1.37"])
async def test_a_container_starts_when_its_device_is_made_ready(node: Node, version: str) -> None:
    node.simulate({GPU: {"gpus": 1, "pre_start": True}})
    await node.served(1, version=version)
    await node.admit("pod")
    node.simulate({GPU: {"gpus": 1, "pre_start": True, "unhealthy": {0: "fell off the bus"}}})
    await node.allocatable_is(0)
    with pytest.raises(Refused, match="PreStartContainer"):
        await node.restart_container("pod")
    assert node.capacity() == 1
    node.simulate({GPU: {"gpus": 1, "pre_start": True, "withdrawn": [0]}})
    await node.pass_time(10)
    with pytest.raises(Refused, match="PreStartContainer"):  # Also where it isn't offered any more.
        await node.restart_container("pod")
    caller = node.caller()
    assert (await caller.call("PreStartContainer", b"\xff"))[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("version", ["1.8", "1.9"])
async def test_what_must_be_made_ready_is_not_offered_to_a_kubelet_that_can_not_wait(node: Node, version: str) -> None:
    node.simulate({GPU: {"gpus": 1, "pre_start": True}, OTHER: {"gpus": 1}})
    one = await node.served(1, version=version, resource=OTHER)
    await node.allocatable_after(60, 0)
    assert "run kubelet 1.10 or later" in (await resource_of(one))["trouble"]
    node.simulate({GPU: {"gpus": 1}, OTHER: {"gpus": 1}})
    await node.allocatable_is(1)


async def test_preferences_hold_for_what_is_listed_and_impossible_wishes_harm_nobody(node: Node) -> None:
    node.simulate({GPU: {"gpus": 4, "numa": [0, 0, 1, 1]}})
    await node.served(4)
    ids = await listed(node)
    async with node.plugin() as plugin:
        assert await plugin.prefer(["stranger", *reversed(ids)], 1) <= set(ids)
        assert await plugin.prefer([*reversed(ids)], 2) in ({*ids[:2]}, {*ids[2:]})
        assert await plugin.prefer(ids, 2, [ids[2]]) == {ids[2], ids[3]}
        assert await plugin.prefer(ids, 1, [ids[3]]) == {ids[3]}
        for wish in ([], 1), (ids, 9), (ids, -1), (ids[:1], 2, ["stranger"]), (ids, 1, ids), ([ids[0]] * 3, 2):
            try:
                await plugin.prefer(*wish)
            except Refused as error:
                assert "Unexpected" not in str(error)  # noqa: PT017 - either is well
    await node.admit("pod", count=4)


# -- wrong requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.10", "1.34"])
async def test_a_wrong_request_is_refused_precisely_and_the_next_one_answered(node: Node, version: str) -> None:
    await node.served(8, version=version)
    api = node.kubelet.manager.behaviour.dialect
    ids, caller = await listed(node), node.caller()
    wrong = [
        (allocate(api, ("stranger",)), "NOT_FOUND"),
        (allocate(api, (ids[0], "stranger")), "NOT_FOUND"),
        (allocate(api, (ids[0], ids[0])), "INVALID_ARGUMENT"),
        (allocate(api, ()), "INVALID_ARGUMENT"),
        (b"", "INVALID_ARGUMENT"),
        (b"\xff\xff", "INVALID_ARGUMENT"),
        (b"\x0a\x05abc", "INVALID_ARGUMENT"),
        (allocate(api, tuple(map(str, range(200_001)))), "INVALID_ARGUMENT"),  # No kubelet asks for so many.
        (b"\x0a" + b"\xff" * 5_000_000, "RESOURCE_EXHAUSTED"),
    ]
    for request, code in wrong:
        assert ((await caller.call("Allocate", request))[0], request[:20]) == (code, request[:20])
    await node.admit("pod", count=8)


@pytest.mark.parametrize("version", ["1.10", "1.34"])
async def test_each_of_several_containers_is_judged_and_answered(node: Node, version: str) -> None:
    one = await node.served(8, version=version)
    ids, caller = await listed(node), node.caller()
    await one.order("cordon", id=ids[2], reason="smells")
    await node.allocatable_is(7)
    for given in ((ids[0], ids[1]), (ids[3],)), ((ids[0],), (ids[0],)):  # Init and app containers share.
        code, answer = await caller.call("Allocate", allocate("v1beta1", *given))
        assert code == "OK"
        answers = by_name("v1beta1").decode_allocate_answer(answer)
        assert [{*one.envs["NVIDIA_VISIBLE_DEVICES"].split(",")} for one in answers] == [{*one} for one in given]
    for wrong in ((ids[0],), (ids[2],)), ((ids[2],), (ids[0],)), ((ids[0],), ()):
        assert (await caller.call("Allocate", allocate("v1beta1", *wrong)))[0] != "OK"
    many = [(ids[number % 2],) for number in range(1025)]
    assert (await caller.call("Allocate", allocate("v1beta1", *many)))[0] == "INVALID_ARGUMENT"
    assert (await caller.call("Allocate", allocate("v1beta1", *many[:1024])))[0] == "OK"


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.28"])
async def test_a_method_that_its_api_lacks_is_unknown(node: Node, version: str) -> None:
    await node.served(8, version=version)
    caller = node.caller()
    new = ("GetDevicePluginOptions", "GetPreferredAllocation", "PreStartContainer")
    codes = {method: (await caller.call(method))[0] for method in (*new, "Explode")}
    assert codes.pop("Explode") == "UNIMPLEMENTED"
    assert {code == "UNIMPLEMENTED" for code in codes.values()} == {version != "1.28"}


async def test_who_calls_and_asks_nothing_keeps_nobody_waiting(node: Node) -> None:
    await node.served(8)
    begun = asyncio.get_running_loop().time()
    assert (await node.caller().call("Allocate", None))[0] == "INVALID_ARGUMENT"
    assert 4 < asyncio.get_running_loop().time() - begun < 7
    silent = [asyncio.create_task(node.caller().call("Allocate", None)) for _ in range(100)]
    await node.pass_time(0.01)
    begun = asyncio.get_running_loop().time()
    await node.admit("pod")
    assert asyncio.get_running_loop().time() - begun < 5
    assert {(await one)[0] for one in silent} == {"INVALID_ARGUMENT"}


async def test_whoever_is_refused_without_end_fills_no_log(node: Node) -> None:
    one = await node.served(8)
    caller = node.caller()
    for number in range(50):
        assert (await caller.call("Allocate", b""))[0] == "INVALID_ARGUMENT"
        assert (await caller.call("PreStartContainer", b"\xff"))[0] == "INVALID_ARGUMENT", number
    for call in ("Allocate", "PreStartContainer"):
        assert len(one.said("refused", call=call)) == 20
    await node.pass_time(61)
    await caller.call("Allocate", b"")
    assert one.said("refused", call="Allocate")[-1]["more_before"] == 30


@pytest.mark.parametrize("agent", ["grpc-node-js/1.8", "grpc-go/1.72.1"])
async def test_any_number_of_listeners_costs_the_kubelet_nothing(node: Node, agent: str) -> None:
    node.simulate({GPU: {"gpus": 2}})
    await node.served(2)
    callers = [node.stranger("v1beta1", agent) for _ in range(80)]
    streams = [caller.listen() for caller in callers[:40]]
    await node.pass_time(1)
    assert any(one.done() for one in streams)  # They are too many.
    node.simulate({GPU: {"gpus": 2, "unhealthy": {0: "fell off the bus"}}})
    await node.allocatable_is(1, seconds=1)
    node.kill_kubelet()
    await node.pass_time(1)
    streams += [caller.listen() for caller in callers[40:]]
    await node.pass_time(1)
    await node.start_kubelet()
    await node.allocatable_is(1, seconds=15)
    node.simulate({GPU: {"gpus": 2}})
    await node.allocatable_is(2, seconds=1)
    await node.admit("pod")
    for caller in callers:
        await caller.close()
    await node.allocatable_after(5, 2)


async def test_a_listener_with_a_deadline_is_no_kubelet(node: Node) -> None:
    await node.served(8)
    before = node.registers[GPU]
    stream = node.caller().listen(seconds=5)
    assert await stream.read()
    await node.pass_time(30)
    assert (node.registers[GPU], node.allocatable()) == (before, 8)


# -- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.9", "1.34"])
async def test_news_of_a_long_list_reaches_a_kubelet_that_reads_late(node: Node, version: str) -> None:
    node.simulate({GPU: {"gpus": 1300}})
    await node.served(1300, version=version)
    node.fault(reads_no_lists=True)
    for ill in ({700: "a"}, {700: "a", 3: "b"}, {700: "a", 3: "b", 1299: "c"}):
        node.simulate({GPU: {"gpus": 1300, "unhealthy": ill}})
        await node.pass_time(1)
    node.fault()
    await node.allocatable_is(1297, seconds=2)
    node.simulate({GPU: {"gpus": 1300, "unhealthy": {1299: "c"}}})
    await node.allocatable_is(1299, seconds=2)
    node.simulate({GPU: {"gpus": 1300, "withdrawn": [*range(1290, 1300)]}})
    await node.allocatable_is(1290, seconds=2)
    assert len(await listed(node)) == 1290


@pytest.mark.parametrize(("version", "limit"), [("1.8", 1 << 16), ("1.9", 1 << 16), ("1.34", 4 << 20)])
async def test_a_list_that_no_kubelet_takes_is_the_only_one_missing(node: Node, version: str, limit: int) -> None:
    def share(times: int) -> None:
        entry = {"name": OTHER, "replicas": times}
        draft.write_text(json.dumps({"sharing": {"timeSlicing": {"resources": [entry]}}}))
        draft.replace(node.folder / "config.yaml")

    draft = node.folder / "draft"
    patches.setattr("gateway.registration.devicelist.MAX_LIST_BYTES", limit)
    share(limit // 120)
    node.simulate(gpus(0, 1) | {OTHER: {"gpus": [{"uuid": f"{'x' * 50}{number}"} for number in (0, 1)]}})
    one = await node.served(2, "--config-file", str(node.folder / "config.yaml"), version=version)
    await node.pass_time(5)
    assert (node.registers[OTHER], node.capacity(OTHER)) == (0, 0)
    assert "devices would fit" in one.said("not offered", resource=OTHER)[0]["details"]
    share(2)
    await node.allocatable_is(4, OTHER)


async def test_a_list_that_says_nothing_new_is_not_sent(node: Node) -> None:
    await node.served(2)
    await node.pass_time(10)
    before = len(node.kubelet.noted("List "))
    for number in range(3):
        node.simulate(gpus(0, 1, product=f"Simulated GPU {number}"))
        await node.pass_time(2)
    assert len(node.kubelet.noted("List ")) == before
    node.simulate(gpus(0, 1, unhealthy={"GPU-0": "smoke"}))
    await node.allocatable_is(1, seconds=1)
    assert len(node.kubelet.noted("List ")) == before + 1


@pytest.mark.parametrize(("how", "code"), [("cordoned", "FAILED_PRECONDITION"), ("withdrawn", "NOT_FOUND")])
async def test_what_is_taken_away_while_it_is_asked_for_is_refused(node: Node, how: str, code: str) -> None:
    one = await node.served(4, version="1.9")
    ids, caller = await listed(node), node.caller()
    await node.pass_time(10)
    # This kubelet takes one answer at a time, so the last one waits.
    asked = [asyncio.create_task(caller.call("Allocate", allocate("v1alpha2", (uuid,)))) for uuid in ids[:3]]
    await node.pass_time(0.01)
    assert not asked[2].done()
    if how == "cordoned":
        await one.order("cordon", id=ids[2], reason="smells")
    else:
        node.simulate(gpus(0, 1, 2, 3, withdrawn=[ids[2]]))
    assert [(await call)[0] for call in asked] == ["OK", "OK", code]


async def test_a_kubelet_whose_checkpoint_two_writes_would_break_gets_one_list_at_a_time(node: Node) -> None:
    resources = [f"example.com/gpu-{number}" for number in range(5)]

    def apart(times: list[float]) -> float:
        return min(later - sooner for sooner, later in pairwise(sorted(times)))

    node.simulate({name: {"gpus": 2} for name in resources})
    await node.start_kubelet("1.9")
    node.gateway()
    for name in resources:
        await node.allocatable_is(2, name)
    assert len(node.kubelet.noted("List ")) == 5
    assert apart(node.kubelet.noted("List ")) > 0.015
    # A busy disk holds it up: what it has not written yet is waited for.
    node.kubelet.process.stop()
    node.simulate({name: {"gpus": 2, "unhealthy": {0: "ill"}} for name in resources})
    await node.pass_time(1)
    node.kubelet.process.go_on()
    await node.until(lambda: len(node.kubelet.noted("List ")) == 10, "the lists")
    assert apart(node.kubelet.noted("List ")[5:]) > 0.003
    # One that writes no checkpoint holds nobody up for long.
    node.fault(reads_no_lists=True)
    for ill in ({}, {0: "ill"}, {}):
        node.simulate({name: {"gpus": 2, "unhealthy": ill} for name in resources})
        await node.pass_time(15)
    async with asyncio.timeout(10):
        await node.admit("pod", resources[4])


@pytest.mark.parametrize("what", ["somebody listens", "a stream ends", "a gateway ends its streams"])
async def test_a_list_that_this_kubelet_is_not_sent_holds_up_no_other(node: Node, what: str) -> None:
    node.simulate(gpus(0, 1) | gpus(5, 6, name=OTHER))
    one = await node.served(2, version="1.9")
    await node.allocatable_is(2, OTHER)
    await node.pass_time(10)
    if what == "somebody listens":
        stream = node.caller(agent="grpc-node-js/1.8").listen()
        assert await stream.read()
    elif what == "a stream ends":
        node.kubelet.manager.cut(GPU)
        await node.pass_time(0.001)
    else:
        node.simulate(gpus(0, 1, unhealthy={"GPU-0": "smoke"}) | gpus(5, 6, name=OTHER))
        await one.terminate()
        node.gateway()
        await node.allocatable_is(1, seconds=1)
    node.simulate(gpus(0, 1) | gpus(5, 6, name=OTHER, unhealthy={"GPU-5": "smoke"}))
    await node.allocatable_is(1, OTHER, seconds=0.5)


async def test_the_first_kubelets_are_given_again_what_has_fallen_ill_and_later_ones_are_not(node: Node) -> None:
    well, ill = {GPU: {"gpus": 2}}, {GPU: {"gpus": 2, "unhealthy": {0: "fell off the bus", 1: "too"}}}
    for version in ("1.8", "1.10", "1.34"):
        node.simulate(well)
        one = await node.served(2, version=version)
        ids = (await node.admit("pod")).devices[GPU]
        node.simulate(ill)
        await node.allocatable_is(0)
        await node.pass_time(5)
        if version == "1.8":  # It asks at each start of a container: a refusal would end a pod that runs.
            assert (await node.restart_container("pod")).devices[GPU] == ids
        code, _ = await node.caller().call("Allocate", allocate(node.kubelet.manager.behaviour.dialect, ids))
        assert code == ("OK" if version == "1.8" else "FAILED_PRECONDITION")
        node.remove("pod")
        await one.terminate()


async def test_a_resource_that_comes_later_is_registered_and_one_that_goes_is_empty(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    await node.served(2)
    node.simulate({GPU: {"gpus": 2}, OTHER: {"gpus": 3}})
    await node.allocatable_is(3, OTHER, seconds=2)
    await node.admit("pod", OTHER)
    node.simulate({GPU: {"gpus": 2}, OTHER: {"gpus": 3, "withdrawn": [0, 1, 2]}})
    await node.allocatable_is(0, OTHER)
    await node.pass_time(60)
    assert node.capacity(OTHER) == 1  # The pod's.
    node.remove("pod")
    await node.until(lambda: node.capacity(OTHER) == 0, "the end of the pod's device", 120)
    node.simulate({GPU: {"gpus": 2}, OTHER: {"gpus": 3}})
    await node.allocatable_is(3, OTHER, seconds=2)
    assert node.allocatable() == 2


async def test_what_was_taken_off_the_list_on_purpose_is_forgotten(node: Node) -> None:
    node.simulate({GPU: {"gpus": 3}})
    first = await node.served(3)
    node.simulate({GPU: {"gpus": 3, "withdrawn": [2]}})
    await node.until(lambda: node.capacity() == 2, "the end of the device")
    await node.pass_time(1)
    first.kill()
    node.simulate({GPU: {"gpus": 2}})
    node.gateway()
    await node.pass_time(30)
    assert (node.allocatable(), node.capacity()) == (2, 2)


async def test_what_may_still_turn_up_after_a_start_is_kept_for_a_while(node: Node) -> None:
    node.simulate({GPU: {"gpus": 3}})
    first = await node.served(3)
    await node.admit("pod", count=3)
    await first.terminate()
    node.simulate({GPU: {"gpus": 2}})
    node.gateway("--startup-grace", "30")
    await node.allocatable_is(3, seconds=10)
    with pytest.raises(Refused, match="PreStartContainer"):
        await node.restart_container("pod")
    await node.allocatable_after(20, 3)
    await node.allocatable_is(2, seconds=20)


async def test_what_a_kubelet_was_told_is_remembered_through_a_kill_at_that_moment(node: Node) -> None:
    node.simulate({GPU: {"gpus": 3}})
    first = await node.served(3)
    first.kill()
    node.simulate({GPU: {"gpus": 2}})
    node.gateway()
    await node.allocatable_is(2)
    assert node.capacity() == 3  # A pod may have been given the one that is lost.


# -- a gateway that sees nothing --------------------------------------------------------------------------------------


async def test_a_gateway_that_sees_a_cordoned_gpu_is_ready_when_it_is_uncordoned(node: Node) -> None:
    first = await node.served(2)
    await first.order("cordon", id="GPU-0", reason="smells")
    first.kill()
    node.simulate(gpus(0, 1, unhealthy={"GPU-1": "smoke"}))
    second = node.gateway()
    await node.pass_time(5)
    await second.order("uncordon", id="GPU-0")
    await node.allocatable_is(1)
    assert await second.is_ready()


async def test_an_update_that_sees_some_of_the_devices_goes_on(node: Node) -> None:
    await node.served(8)
    node.simulate({GPU: {"gpus": 1}})
    second = await node.registered()
    await node.allocatable_is(1)
    await node.eventually(second.is_ready, "readiness")
    await node.pass_time(60)
    assert (node.allocatable(), node.capacity()) == (1, 8)


async def test_all_hardware_that_is_lost_while_it_runs_is_lost(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    one = await node.served(2)
    node.simulate({GPU: {"gpus": 0}})
    await node.allocatable_is(0)
    await node.pass_time(60)
    assert await one.is_ready()
    assert {device["state"] for device in (await resource_of(one))["devices"]} == {"lost"}
