"""Whose hardware it is: what a pod has under one ID is nobody else's under another, whatever is edited, lost and forgotten meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.contract.hardware import Host
from tests.contract.node import GPU, Gateway, Node, gpus

OTHER, FILE = "example.com/accelerator", "example.com/file"
SMALL, BIG = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb"
WAYS = ["it goes on", "the next one comes with the edit", "the next one knows nothing"]


def shared(times: int, name: str = GPU, rename: str = "") -> dict[str, Any]:
    """Return a configuration in which each device of a resource is offered so many times."""
    entry = {"name": name, "replicas": times} | ({"rename": rename} if rename else {})
    return {"sharing": {"timeSlicing": {"resources": [entry]}}}


MIXED: dict[str, Any] = {"flags": {"migStrategy": "mixed"}}
WHOLE: dict[str, Sequence[str]] = {}
SPLIT = {"GPU-0": ["1g.10gb", "1g.10gb"]}


def configure(node: Node, configuration: Mapping[str, Any]) -> tuple[str, str]:
    """Write the configuration file, in place of the one that is there; return the option that names it."""
    draft = node.folder / "draft"
    gateway = {"honourResourceNames": True, **configuration.get("gateway", {})}
    draft.write_text(json.dumps({**configuration, "gateway": gateway}))
    draft.replace(node.folder / "config.yaml")
    return "--config-file", str(node.folder / "config.yaml")


async def rows(one: Gateway) -> list[dict[str, Any]]:
    """Return what the status says of each device, with its resource."""
    return [
        {**device, "resource": resource["name"]}
        for resource in (await one.status())["resources"]
        for device in resource["devices"]
    ]


async def free(one: Gateway) -> dict[str, list[str]]:
    """Return what the kubelet may give out, held or not, by resource."""
    found: dict[str, list[str]] = {}
    for row in await rows(one):
        if row["health"] == "Healthy":
            found.setdefault(row["resource"], []).append(row["id"])
    return {name: sorted(ids) for name, ids in found.items()}


async def reasons(one: Gateway, resource: str) -> dict[str, str]:
    """Return why devices of a resource aren't given out, by ID."""
    return {row["id"]: row["reason"] for row in await rows(one) if row["resource"] == resource and row["reason"]}


async def again(
    node: Node, one: Gateway, way: str, configuration: Mapping[str, Any], at_most: Mapping[str, int] | None = None
) -> Gateway:
    """Have an edit adopted: by the gateway that runs, or by the next one, which may have lost its state file.

    ``at_most`` says how many devices that one may offer at any moment, by resource.
    """
    if way == WAYS[0]:
        configure(node, configuration)
        await node.pass_time(4)
        return one
    one.kill()
    if way == WAYS[2]:
        for file in node.state.iterdir():
            file.unlink()
    await node.until(lambda: not any(map(node.allocatable, at_most or ())), "that nobody offers anything")
    two = node.gateway(*configure(node, configuration))
    while not two.said("registered"):
        await node.pass_time(0.002)
    for _ in range(1000):
        await node.pass_time(0.004)
        for name, count in (at_most or {}).items():
            assert node.allocatable(name) <= count, name
    return two


# -- an edit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("before", "after", "mig", "then", "pod", "left"),
    [
        pytest.param({}, shared(2), WHOLE, WHOLE, GPU, {GPU: ["GPU-1::0", "GPU-1::1"]}, id="shared"),
        pytest.param(shared(2), {}, WHOLE, WHOLE, GPU, {GPU: ["GPU-1"]}, id="shared no longer"),
        pytest.param(shared(2), shared(4), WHOLE, WHOLE, GPU, {GPU: [f"GPU-{n}::{m}" for n in (0, 1) for m in range(4)]}, id="more replicas"),
        pytest.param({}, shared(2, rename=OTHER), WHOLE, WHOLE, GPU, {OTHER: ["GPU-1::0", "GPU-1::1"]}, id="shared under another name"),
        pytest.param({}, MIXED, SPLIT, SPLIT, GPU, {GPU: ["GPU-1"]}, id="in instances"),
        pytest.param(MIXED, {}, SPLIT, SPLIT, SMALL, {GPU: ["GPU-1"]}, id="whole again"),
        pytest.param(MIXED, MIXED, WHOLE, SPLIT, GPU, {GPU: ["GPU-1"]}, id="split under its pod"),
        pytest.param(MIXED, MIXED, SPLIT, WHOLE, SMALL, {GPU: ["GPU-1"]}, id="one piece under its pod"),
        pytest.param(MIXED, MIXED, SPLIT, {"GPU-0": ["2g.20gb"]}, SMALL, {GPU: ["GPU-1"]}, id="another instance under its pod"),
        pytest.param(MIXED, MIXED | shared(2, SMALL), SPLIT, SPLIT, SMALL, {GPU: ["GPU-1"], SMALL: 2}, id="instances are shared"),
    ],
)  # fmt: skip
async def test_an_edit_gives_nobody_what_a_pod_has(
    node: Node,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    mig: Mapping[str, Any],
    then: Mapping[str, Any],
    pod: str,
    left: Mapping[str, Any],
    way: str,
) -> None:
    if pod == SMALL and then != mig and way == WAYS[2]:
        return  # Nothing says any more which GPU the instance was part of.
    node.shared = (GPU, OTHER, SMALL)
    node.simulate(gpus(0, 1, mig=mig))
    await node.start_kubelet()
    one = node.gateway(*configure(node, before))
    await node.until(lambda: node.allocatable(pod), "the devices")
    given = (await node.admit("pod", pod)).devices[pod]
    assert given[0].startswith("GPU-0") or pod == SMALL
    await node.pass_time(5)
    node.simulate(gpus(0, 1, mig=then))
    counts = {name: ids if isinstance(ids, int) else len(ids) for name, ids in left.items()}
    one = await again(node, one, way, after, dict.fromkeys((GPU, OTHER, SMALL, BIG), 0) | counts)
    found = await free(one)
    assert {name: len(ids) if isinstance(left.get(name), int) else ids for name, ids in found.items()} == left
    assert given[0] not in found.get(SMALL, ())
    one.kill()
    one = await node.registered(*configure(node, after))
    await node.pass_time(4)
    assert await free(one) == found
    node.remove("pod")
    await node.pass_time(8)
    assert "withheld" not in {row["state"] for row in await rows(one)}


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize(
    ("before", "after", "mig", "then", "cordoned", "left"),
    [
        pytest.param({}, shared(2), WHOLE, WHOLE, "GPU-0", {GPU: ["GPU-1::0", "GPU-1::1"]}, id="shared"),
        pytest.param(shared(2), {}, WHOLE, WHOLE, "GPU-0::1", {GPU: ["GPU-1"]}, id="shared no longer"),
        pytest.param(shared(2), shared(2), WHOLE, WHOLE, "GPU-0::1", {GPU: ["GPU-0::0", "GPU-1::0", "GPU-1::1"]}, id="one replica"),
        pytest.param({}, shared(2, rename=OTHER), WHOLE, WHOLE, "GPU-0", {OTHER: ["GPU-1::0", "GPU-1::1"]}, id="shared under another name"),
        pytest.param({}, MIXED, SPLIT, SPLIT, "GPU-0", {GPU: ["GPU-1"]}, id="in instances"),
        pytest.param(MIXED, {}, SPLIT, SPLIT, SMALL, {GPU: ["GPU-1"]}, id="whole again"),
        pytest.param(MIXED, MIXED, SPLIT, {"GPU-0": ["2g.20gb"]}, SMALL, {GPU: ["GPU-1"], BIG: 1}, id="the instance is no more"),
    ],
)  # fmt: skip
async def test_a_cordon_is_of_the_hardware_whatever_it_is_offered_as(
    node: Node,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    mig: Mapping[str, Any],
    then: Mapping[str, Any],
    cordoned: str,
    left: Mapping[str, Any],
    way: str,
) -> None:
    node.simulate(gpus(0, 1, mig=mig))
    await node.start_kubelet()
    one = node.gateway(*configure(node, before))
    await node.until(node.allocatable, "the devices")
    await node.pass_time(5)
    if cordoned == SMALL:
        cordoned = (await free(one))[SMALL][0]
    await one.order("cordon", id=cordoned, reason="smells")
    node.simulate(gpus(0, 1, mig=then))
    one = await again(node, one, way, after)
    found = await free(one)
    assert {name: len(ids) if isinstance(left.get(name), int) else ids for name, ids in found.items()} == left
    told = {row["reason"] for row in await rows(one) if row["state"] == "cordoned" and row["id"] != cordoned}
    assert told <= {f"smells (cordoned as {cordoned})"}
    await one.order("uncordon", id=cordoned)
    await node.pass_time(3)
    assert {row["state"] for row in await rows(one)} == {"healthy"}


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        pytest.param({}, shared(2), {GPU: ["GPU-1::0", "GPU-1::1"]}, id="shared"),
        pytest.param(shared(2), {}, {GPU: ["GPU-1"]}, id="shared no longer"),
        pytest.param(shared(2), shared(4), {GPU: [f"GPU-1::{number}" for number in range(4)]}, id="more replicas"),
        pytest.param({}, shared(2, rename=OTHER), {OTHER: ["GPU-1::0", "GPU-1::1"]}, id="shared under another name"),
    ],
)
async def test_what_needs_a_reset_is_unhealthy_whatever_it_is_offered_as(
    node: Node, before: Mapping[str, Any], after: Mapping[str, Any], left: Mapping[str, Any], way: str
) -> None:
    node.simulate(gpus(0, 1, unhealthy={"GPU-0": {"reason": "fell off the bus", "kind": "reset-required"}}))
    await node.start_kubelet()
    one = node.gateway(*configure(node, before))
    await node.until(node.allocatable, "the devices")
    node.simulate(gpus(0, 1))
    await node.pass_time(5)
    one = await again(node, one, way, after)
    assert await free(one) == left
    node.simulate(gpus(0, 1, recovered=["GPU-0"]))
    await node.pass_time(5)
    assert {row["health"] for row in await rows(one) if row["state"] != "withdrawn"} == {"Healthy"}


@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
@pytest.mark.parametrize("dies", [False, True])
async def test_what_only_the_records_said_is_not_forgotten_with_them(node: Node, version: str, dies: bool) -> None:
    node.simulate(gpus(0, 1))
    await node.start_kubelet(version)
    one = node.gateway(*configure(node, shared(2, rename=OTHER)))
    await node.allocatable_is(4, OTHER)
    given = (await node.admit("pod", OTHER)).devices[OTHER]
    await node.pass_time(5)
    one.kill()
    for file in node.state.iterdir():
        file.unlink()
    options = configure(node, {})
    one = node.gateway(*options)
    await node.allocatable_is(1)
    await node.pass_time(5)
    node.kill_kubelet()
    node.forget_checkpoint()
    if dies:
        one.kill()
        node.gateway(*options)
    await node.start_kubelet(version)
    await node.until(lambda: node.allocatable() == 1, "the other one")
    await node.pass_time(60)
    assert (node.allocatable(), given[0].partition("::")[0]) == (1, "GPU-0")


async def test_what_the_leader_took_off_its_list_is_not_on_that_of_the_next_one(node: Node) -> None:
    node.simulate(gpus(0, 1))
    await node.start_kubelet()
    options = configure(node, {})
    standby = node.gateway(*options)
    await node.allocatable_is(2)
    await node.admit("pod")
    await node.pass_time(5)
    leader = await node.registered(*options)
    configure(node, shared(2, rename=OTHER))
    await node.until(lambda: node.allocatable(OTHER) == 2, "what is free under the new name")
    await node.pass_time(5)
    standby.process.stop()  # It hears of nothing that follows.
    node.remove("pod")
    await node.until(lambda: node.allocatable(OTHER) == 4, "all of it")
    leader.kill()
    standby.process.go_on()
    await node.pass_time(20)
    assert {row["resource"] for row in await rows(standby)} == {OTHER}
    assert (node.capacity(GPU), node.allocatable(OTHER)) == (0, 4)


@pytest.mark.parametrize("way", WAYS)
async def test_a_rule_for_files_that_is_renamed_gives_nobody_what_a_pod_has(node: Node, way: str) -> None:
    host = Host(node)
    (host.dev / "fuse").symlink_to("/dev/null")

    def rule(name: str) -> dict[str, Any]:
        return {"gateway": {"devices": [{"resource": name, "paths": ["/dev/fuse"]}]}}

    node.profile.write_text("nonsense")  # The GPUs, which could have any name of their vendor's, are silent.
    one = await node.served(1, *configure(node, rule("nvidia.com/file")), resource="nvidia.com/file")
    await node.admit("pod", "nvidia.com/file")
    await node.pass_time(5)
    one = await again(node, one, way, rule(FILE))
    assert await free(one) == {}
    assert list(await reasons(one, FILE)) == ["/dev/fuse"]
    node.remove("pod")
    await node.allocatable_is(1, FILE)


async def test_while_the_driver_is_silent_a_pod_s_gpu_is_nobody_else_s_under_the_ids_of_before(node: Node) -> None:
    host = Host(node)
    (host.dev / "fuse").symlink_to("/dev/null")
    devices = {"gateway": {"devices": [{"resource": FILE, "paths": ["/dev/fuse"]}]}}
    node.simulate(gpus(0, 1))
    await node.start_kubelet()
    options = configure(node, devices)
    one = node.gateway(*options)
    await node.allocatable_is(2)
    assert (await node.admit("pod")).devices[GPU] == ("GPU-0",)
    await node.pass_time(5)
    one = await again(node, one, WAYS[0], devices | shared(2))
    one.kill()
    node.profile.write_text("nonsense")
    two = node.gateway(*options)
    await node.allocatable_is(2)
    await node.pass_time(5)
    assert await free(two) == {GPU: ["GPU-1::0", "GPU-1::1"], FILE: ["/dev/fuse"]}
    assert not await two.is_ready()
    node.simulate(gpus(0, 1))
    await node.eventually(two.is_ready, "readiness")
    assert await free(two) == {GPU: ["GPU-1::0", "GPU-1::1"], FILE: ["/dev/fuse"]}
    node.remove("pod")
    await node.allocatable_is(4)


async def test_a_configuration_that_goes_back_and_forth_gives_out_nothing_that_is_held(node: Node) -> None:
    node.shared = (GPU,)
    one = await node.served(2, *configure(node, {}))
    assert (await node.admit("first")).devices[GPU] == ("GPU-0",)
    await node.pass_time(5)
    await again(node, one, WAYS[0], shared(2))
    await node.admit("second")
    await node.pass_time(5)
    await again(node, one, WAYS[0], {})
    assert await free(one) == {GPU: ["GPU-0"]}
    node.remove("second")
    await node.pass_time(5)
    assert await free(one) == {GPU: ["GPU-0", "GPU-1"]}


async def test_what_is_withheld_says_why_and_is_refused(node: Node) -> None:
    node.shared = (OTHER,)
    one = await node.served(2, *configure(node, {}))
    await node.admit("pod")
    await node.pass_time(5)
    await again(node, one, WAYS[0], shared(2, rename=OTHER))
    found = await reasons(one, OTHER)
    assert found == dict.fromkeys(["GPU-0::0", "GPU-0::1"], "still held as nvidia.com/gpu GPU-0 by default/pod/main")
    async with node.plugin(OTHER) as plugin:
        await plugin.refused("GPU-1::0", "GPU-0::0", words=r"withheld .*still held as nvidia.com/gpu GPU-0")
        assert await plugin.prefer(["GPU-0::0", "GPU-0::1", "GPU-1::0"], 1) == {"GPU-1::0"}
    # A cordon lies over it, and both are told.
    await one.order("cordon", id="GPU-0::0", reason="for repair")
    assert (await reasons(one, OTHER))["GPU-0::0"] == f"for repair; without the cordon: withheld, {found['GPU-0::0']}"
    node.remove("pod")
    await node.allocatable_is(3, OTHER)
    assert await reasons(one, OTHER) == {"GPU-0::0": "for repair"}
    await one.order("uncordon", id="GPU-0::0")
    await node.allocatable_is(4, OTHER)


# -- what nobody has written down -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.34"])
async def test_what_was_given_a_moment_ago_is_held_under_every_name(node: Node, version: str) -> None:
    one = await node.served(2, version=version)
    await node.pass_time(5)
    async with node.plugin() as plugin:
        await plugin.allocate("GPU-0")  # The kubelet's records don't have it yet.
    node.simulate(gpus(0, 1, name=OTHER))
    await node.until(lambda: one.said("registered", resource=OTHER), "the new name")
    assert await free(one) == {OTHER: ["GPU-1"]}
    words = "it may be free" if version == "1.8" else "given it a moment ago"
    assert words in (await reasons(one, OTHER))["GPU-0"]
    await node.pass_time(10)
    # It gave it to nobody, if it says anything: 1.8 writes nothing before its first pod.
    assert await free(one) == {OTHER: ["GPU-1"] if version == "1.8" else ["GPU-0", "GPU-1"]}


async def test_what_is_given_while_the_new_ids_are_written_is_held_under_them(node: Node) -> None:
    one = await node.served(2)
    await node.pass_time(5)
    node.disk.hang(writers=True)
    node.simulate(gpus(0, 1, name=OTHER))
    await node.pass_time(1)
    assert await one.states(OTHER) == {}
    async with node.plugin() as plugin:
        await plugin.allocate("GPU-0")
    node.disk.go_on()
    await node.until(lambda: one.said("registered", resource=OTHER), "the new name")
    assert await free(one) == {OTHER: ["GPU-1"]}


async def test_while_nobody_can_say_who_has_a_gpu_it_has_no_new_name_for_ten_minutes(node: Node) -> None:
    one = await node.served(2)
    await node.admit("pod")
    await node.hide_pods()
    node.forget_checkpoint()
    (node.sockets / "kubelet_internal_checkpoint").mkdir()  # The kubelet writes none any more.
    await node.pass_time(5)
    node.simulate(gpus(0, 1, name=OTHER))
    await node.until(lambda: node.capacity(OTHER) == 2, "the new name")
    await node.allocatable_after(570, 0, OTHER)
    assert "its holder is unknown now" in (await reasons(one, OTHER))["GPU-0"]
    await node.allocatable_is(2, OTHER, 60)


@pytest.mark.parametrize("seen", [True, False])
async def test_what_nobody_wrote_down_is_held_while_the_records_cannot_be_read(node: Node, seen: bool) -> None:
    one = await node.served(2)
    await node.admit("pod")
    await node.pass_time(5)
    two = await again(node, one, WAYS[2], shared(2)) if seen else one
    await node.hide_pods()
    node.forget_checkpoint()
    (node.sockets / "kubelet_internal_checkpoint").mkdir()
    if not seen:
        two = await again(node, one, WAYS[1], shared(2))
    await node.pass_time(100)
    assert await free(two) == ({GPU: ["GPU-1::0", "GPU-1::1"]} if seen else {})
    await node.allocatable_after(600, 4)


async def test_a_clock_that_is_set_back_keeps_no_gpu_held(node: Node) -> None:
    await node.served(2)
    await node.admit("pod")
    await node.pass_time(0.5)
    node.clock.set_back(3600)
    await node.pass_time(5)
    node.remove("pod")
    await node.pass_time(5)
    node.simulate(gpus(0, 1, name=OTHER))
    await node.allocatable_is(2, OTHER, 30)


async def test_a_state_file_that_does_not_say_which_gpu_an_instance_is_part_of_is_enough(node: Node) -> None:
    node.simulate(gpus(0, 1, mig=SPLIT))
    one = await node.served(2, *configure(node, MIXED), resource=SMALL)
    await node.admit("pod", SMALL)
    await node.pass_time(5)
    one.kill()
    file = node.state / "ledger.json"
    file.write_text(file.read_text().replace('"part_of":"GPU-0",', ""))  # As an earlier release wrote it.
    two = node.gateway(*configure(node, {}))
    await node.allocatable_is(1)
    await node.pass_time(5)
    assert await free(two) == {GPU: ["GPU-1"]}


# -- what the kubelet forgot -------------------------------------------------------------------------------------------


async def forgets(node: Node, *pods: str) -> None:
    """Start the kubelet without its checkpoint; it doesn't know what these pods have."""
    await node.start_forgetful_kubelet()
    node.forgotten |= {*pods}


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("first", ["the records", "the edit", "both while no gateway runs"])
async def test_what_the_kubelet_forgot_is_withheld_under_all_names_until_an_order(
    node: Node, first: str, way: str
) -> None:
    one = await node.served(2, *configure(node, {}))
    assert (await node.admit("pod")).devices[GPU] == ("GPU-0",)
    await node.pass_time(10)
    if first == "the edit":
        one = await again(node, one, way, shared(2))
    elif first != "the records":
        one.kill()
    await forgets(node, "pod")
    if first != "both while no gateway runs":
        await node.pass_time(30)
    if first != "the edit":
        one = await again(node, one, WAYS[1] if not one.alive else way, shared(2))
    await node.allocatable_is(2)
    await node.pass_time(60)
    assert await free(one) == {GPU: ["GPU-1::0", "GPU-1::1"]}
    assert "the kubelet forgot who; when it has ended, run `gateway forget ID`" in (await reasons(one, GPU))["GPU-0::0"]
    one.kill()
    one = await node.registered(*configure(node, shared(2)))
    await node.pass_time(5)
    assert await free(one) == {GPU: ["GPU-1::0", "GPU-1::1"]}
    await one.order("forget", id="GPU-0")
    await node.allocatable_is(4)


async def test_what_the_kubelet_forgot_is_not_lost_with_a_gateway_that_dies_at_once(node: Node) -> None:
    """The state file has rows from before the kubelet's start. The next gateway's first look shows the kubelet's own records."""
    one = await node.served(2, *configure(node, {}))
    assert (await node.admit("pod")).devices[GPU] == ("GPU-0",)
    await node.pass_time(10)
    await forgets(node, "pod")
    await node.allocatable_is(2)
    one.kill()
    two = node.gateway(*configure(node, shared(2, rename=OTHER)))
    await node.allocatable_is(2, OTHER)
    await node.pass_time(60)
    assert await free(two) == {OTHER: ["GPU-1::0", "GPU-1::1"]}


async def test_what_nobody_wrote_down_and_the_kubelet_forgot_is_withheld_until_an_order(node: Node) -> None:
    one = await node.served(2, *configure(node, {}))
    await node.admit("pod")
    await node.pass_time(5)
    two = await again(node, one, WAYS[2], shared(2))
    await forgets(node, "pod")
    await node.allocatable_is(2)
    await node.pass_time(60)
    assert await free(two) == {GPU: ["GPU-1::0", "GPU-1::1"]}
    await two.order("forget", id="GPU-0")
    await node.allocatable_is(4)


@pytest.mark.parametrize("way", WAYS[1:])
async def test_what_was_held_under_a_name_that_is_offered_no_longer_is_forgotten_by_order(node: Node, way: str) -> None:
    one = await node.served(2, *configure(node, {}))
    assert (await node.admit("pod")).devices[GPU] == ("GPU-0",)
    await node.pass_time(10)
    one = await again(node, one, way, shared(2, rename=OTHER))
    await forgets(node, "pod")
    await node.allocatable_is(2, OTHER)
    await node.pass_time(60)
    assert await free(one) == {OTHER: ["GPU-1::0", "GPU-1::1"]}
    (withheld,) = {*(await reasons(one, OTHER)).values()}
    assert f"still held as {GPU} GPU-0 by" in withheld
    status, said = await node.command("forget", "--state-dir", str(node.state), "GPU-0")
    assert (status, said.splitlines()[0]) == (0, "what was remembered of GPU-0 is forgotten")
    await node.allocatable_is(4, OTHER)
    one.kill()
    one = await node.registered(*configure(node, shared(2, rename=OTHER)))
    await node.pass_time(5)
    assert len((await free(one))[OTHER]) == 4


async def test_a_replica_that_the_kubelet_forgot_is_given_to_nobody_beside_one_too_many(node: Node) -> None:
    node.shared = (GPU,)
    node.simulate(gpus(0, 1))
    one = await node.served(8, *configure(node, shared(4)), "--shared-devices-allocation-policy", "packed")
    assert (await node.admit("forgotten")).devices[GPU] == ("GPU-0::0",)
    await node.pass_time(10)
    await forgets(node, "forgotten")
    await node.allocatable_is(8)
    await node.pass_time(30)
    async with node.plugin() as plugin:
        assert await plugin.prefer([f"GPU-0::{number}" for number in range(4)], 1) != {"GPU-0::0"}
    given = (await node.admit("pod", count=3)).devices[GPU]
    await node.pass_time(5)
    configure(node, shared(2))
    await node.pass_time(5)
    assert {*given} == {"GPU-0::1", "GPU-0::2", "GPU-0::3"}
    assert await free(one) == {GPU: ["GPU-0::1", "GPU-1::0", "GPU-1::1"]}


async def test_a_pod_that_is_forgotten_by_order_leaves_the_other_one_the_gpu_that_both_had(node: Node) -> None:
    one = await node.served(2, *configure(node, {}))
    await node.admit("first", count=2)
    await node.pass_time(10)
    await forgets(node, "first")
    await node.allocatable_is(2)
    await node.pass_time(30)
    (double,) = (await node.admit("second")).devices[GPU]
    await node.pass_time(5)
    await again(node, one, WAYS[0], shared(2))
    assert await free(one) == {}
    for number in (0, 1):
        await one.order("forget", id=f"GPU-{number}")
    await node.allocatable_is(2)
    await node.pass_time(10)
    assert not [id_ for ids in (await free(one)).values() for id_ in ids if id_.startswith(double)]
    node.remove("second")
    await node.allocatable_is(4)


async def test_a_reboot_ends_what_the_kubelet_forgot_under_every_name(node: Node) -> None:
    await node.served(2, *configure(node, {}))
    await node.admit("pod")
    await node.pass_time(10)
    node.reboot()
    node.remove("pod")
    node.forget_checkpoint()
    one = await node.served(4, *configure(node, shared(2)))
    await node.pass_time(20)
    assert len((await free(one))[GPU]) == 4


# -- two gateways ------------------------------------------------------------------------------------------------------


async def test_what_the_kubelet_forgot_beside_another_gateway_is_withheld_by_the_one_that_is_left(node: Node) -> None:
    older = await node.served(2, *configure(node, {}))
    assert (await node.admit("pod")).devices[GPU] == ("GPU-0",)
    await node.pass_time(5)
    newer = await node.registered(*configure(node, {}))
    await node.pass_time(5)
    configure(node, shared(2, rename=OTHER))
    await node.allocatable_is(2, OTHER)
    await node.pass_time(5)
    await forgets(node, "pod")
    await node.allocatable_is(2, OTHER)
    await node.pass_time(30)
    newer.kill()
    for _ in range(100):
        await node.pass_time(0.1)
        assert node.allocatable(OTHER) in {0, 2}
    assert await free(older) == {OTHER: ["GPU-1::0", "GPU-1::1"]}


@pytest.mark.parametrize("restarts", [False, True])
async def test_an_instance_is_given_to_nobody_while_another_gateway_offers_its_gpu(node: Node, restarts: bool) -> None:
    node.simulate(gpus(0, 1, mig=SPLIT))
    host = await node.served(2, "--host-service")
    pod = node.gateway(*configure(node, MIXED))
    await node.pass_time(10)
    if restarts:
        await node.start_kubelet()
    for _ in range(20):
        await node.allocatable_after(1, 0, SMALL)
    assert node.allocatable() == 2
    host.kill()
    await node.allocatable_is(2, SMALL)
    await node.allocatable_is(1)
    assert await free(pod) == {GPU: ["GPU-1"], SMALL: sorted((await free(pod))[SMALL])}
