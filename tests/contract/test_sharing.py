"""GPUs that are shared, named, left out and chosen as an operator wants it, also while the gateway runs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.contract.hardware import Nvidia
from tests.contract.node import GPU, Gateway, Node, Refused
from tests.fakes import nvml

SHARED = "nvidia.com/gpu.shared"


def sliced(*resources: dict[str, Any], honour: bool = False, **others: Any) -> dict[str, Any]:
    """Return a configuration with shared resources."""
    return {
        "gateway": {"honourResourceNames": honour},
        "sharing": {"timeSlicing": {"resources": list(resources), **others}},
    }


def configure(node: Node, configuration: dict[str, Any]) -> tuple[str, str]:
    """Write the configuration file, in place of the one that is there; return the option that names it."""
    draft = node.folder / "draft"
    draft.write_text(json.dumps(configuration))
    draft.replace(node.folder / "config.yaml")
    return "--config-file", str(node.folder / "config.yaml")


async def ready(node: Node, count: int, resource: str = GPU, *options: str) -> Gateway:
    """Start a kubelet and a gateway, and wait for the devices."""
    node.shared = {GPU, SHARED}
    return await node.served(count, *options, resource=resource)


def boards(ids: Any) -> Counter[str]:
    """Count the GPUs that replicas are of."""
    return Counter(one.partition("::")[0] for one in ids)


async def test_a_shared_gpu_is_given_to_as_many_pods_as_it_has_replicas(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    await ready(node, 6, GPU, *configure(node, sliced({"name": "gpu", "replicas": 3})))
    given = [await node.admit(f"pod-{number}") for number in range(6)]
    assert set(boards(one.devices[GPU][0] for one in given).values()) == {3}
    for one in given:  # The least used one is given first, and is named once and without its number.
        assert one.answer.envs["NVIDIA_VISIBLE_DEVICES"] == one.devices[GPU][0].partition("::")[0]
    assert len(boards(one.devices[GPU][0] for one in given[:2])) == 2
    await node.refused("seventh")


async def test_more_than_one_replica_is_refused_if_the_operator_wants_that(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}, "vendor.com/gpu": {"gpus": 2}})
    options = configure(node, sliced({"name": "gpu", "replicas": 3}, failRequestsGreaterThanOne=True))
    await ready(node, 6, GPU, *options)
    assert "maximum request size for shared resources is 1; found 2" in await node.refused("greedy", count=2)
    async with node.plugin(GPU) as plugin:
        one, *_ = await plugin.first_list()
        await plugin.refused(one.id, f"{one.id[:-1]}1", words="found 2")  # Also of one GPU.
    await node.admit("modest")
    await node.admit("other", "vendor.com/gpu", count=2)


@pytest.mark.parametrize(("sharing", "most"), [("distributed", 1), ("packed", 2)])
async def test_replicas_are_spread_or_packed(node: Node, sharing: str, most: int) -> None:
    node.simulate({GPU: {"gpus": 2}})
    options = configure(node, sliced({"name": "gpu", "replicas": 4}))
    await ready(node, 8, GPU, *options, "--shared-devices-allocation-policy", sharing)
    given = [await node.admit(f"pod-{number}") for number in range(2)]
    assert max(boards(one.devices[GPU][0] for one in given).values()) == most


async def test_shared_gpus_have_another_name_if_the_operator_wants_that(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    await ready(node, 4, SHARED, *configure(node, sliced({"name": "gpu", "replicas": 2}, renameByDefault=True)))
    assert node.capacity() == 0


@pytest.mark.parametrize(("honour", "name"), [(True, "nvidia.com/slice"), (False, GPU)])
async def test_a_name_of_ones_own_counts_if_it_is_wanted(node: Node, honour: bool, name: str) -> None:
    node.simulate({GPU: {"gpus": 2}})
    options = configure(node, sliced({"name": "gpu", "replicas": 2, "rename": "nvidia.com/slice"}, honour=honour))
    await ready(node, 4, name, *options)


async def test_some_gpus_are_shared_and_others_not(node: Node) -> None:
    node.simulate({GPU: {"gpus": [{"uuid": name} for name in "abcd"]}})
    some = {"name": "gpu", "replicas": 4, "rename": SHARED, "devices": 1}
    others = {"name": "gpu", "replicas": 2, "rename": "nvidia.com/two", "devices": ["d", 2]}
    await ready(node, 1, GPU, *configure(node, sliced(some, others, honour=True)))
    await node.allocatable_is(4, SHARED)
    await node.allocatable_is(4, "nvidia.com/two")
    given = await node.admit("pod", SHARED)
    assert boards(given.devices[SHARED]) == {"a": 1}
    given = await node.admit("other")
    assert given.devices[GPU] == ("b",)


async def test_partitions_are_shared_by_their_place(node: Node, nvidia: Nvidia) -> None:
    nvidia.mig(0, "3g.40gb", "3g.40gb")
    big = "nvidia.com/mig-3g.40gb"
    some = {"name": "mig-3g.40gb", "replicas": 4, "rename": "nvidia.com/four", "devices": ["0:1"]}
    configuration: dict[str, Any] = sliced(some, honour=True) | {"flags": {"migStrategy": "mixed"}}
    await nvidia.served(4, *configure(node, configuration), resource="nvidia.com/four")
    await node.allocatable_is(1, big)


async def test_two_resources_of_one_name_are_not_mixed(node: Node, nvidia: Nvidia) -> None:
    nvidia.mig(0, "3g.40gb", "3g.40gb")
    big = "nvidia.com/mig-3g.40gb"
    some = {"name": "gpu", "replicas": 4, "rename": big}
    configuration: dict[str, Any] = sliced(some, honour=True) | {"flags": {"migStrategy": "mixed"}}
    await node.start_kubelet()
    one = nvidia.gateway(*configure(node, configuration))
    await node.until(lambda: not one.alive, "its end")
    assert one.process.ended.result() == 1
    assert "two resources have the name nvidia.com/mig-3g.40gb; one is nvidia.com/gpu" in str(one.process.log)
    assert not node.capacity(big)


@pytest.mark.parametrize("sharing", [False, True])
async def test_a_gpu_that_a_pod_has_is_not_given_under_another_id(node: Node, sharing: bool) -> None:
    node.simulate({GPU: {"gpus": 2}})
    plain, shared = {"version": "v1"}, sliced({"name": "gpu", "replicas": 2}, renameByDefault=True)
    before, after = (shared, plain) if sharing else (plain, shared)
    resource, new = (SHARED, GPU) if sharing else (GPU, SHARED)
    one = await ready(node, 4 if sharing else 2, resource, *configure(node, before))
    given = await node.admit("pod", resource)
    (held,) = boards(given.devices[resource])
    configure(node, after)
    free = 1 if sharing else 2
    await node.allocatable_is(free, new)
    for number in range(free):
        other = await node.admit(f"other-{number}", new)
        assert held not in boards(other.devices[new])
    # As well after a restart of everything.
    one.kill()
    await node.served(free, *configure(node, after), resource=new)
    await node.refused("third", new)
    node.remove("pod")
    await node.allocatable_is(2 * free, new, seconds=900)


@pytest.mark.parametrize(
    ("pattern", "left"),
    [("1", 3), ("*-2", 3), ("00000000:2A:00.0", 3), ("2a:00.0", 3), ("NVIDIA H100*", 0), ("9,nothing", 4)],
)
async def test_a_gpu_that_a_setting_names_is_left_out(node: Node, nvidia: Nvidia, pattern: str, left: int) -> None:
    nvidia.world.gpus[2].uuid = "GPU-number-2"
    nvidia.show()
    await node.start_kubelet()
    one = nvidia.gateway("--exclude-devices", pattern)
    await node.eventually(one.is_ready, "readiness")
    await node.allocatable_is(left)
    unusable = (await one.status()).get("unusable", [])
    assert [gpu["excluded"] for gpu in unusable] == [True] * (4 - left)


async def test_excluding_a_gpu_leaves_out_its_partitions_and_waits_for_their_pods(node: Node, nvidia: Nvidia) -> None:
    for index in range(2):
        nvidia.mig(index, "3g.40gb", "3g.40gb")
    big = "nvidia.com/mig-3g.40gb"
    configuration: dict[str, Any] = {"flags": {"migStrategy": "mixed"}}
    await node.start_kubelet()
    one = nvidia.gateway(*configure(node, configuration))
    await node.allocatable_is(4, big)
    given = await node.admit("pod", big)
    board = next(gpu for gpu in nvidia.world.gpus if given.devices[big][0] in {one.uuid for one in gpu.instances})
    configure(node, configuration | {"gateway": {"excludeDevices": [board.uuid]}})
    await node.allocatable_is(2, big)
    await node.pass_time(120)
    assert node.capacity(big) == 3  # The pod goes on, and may start anew.
    await node.restart_container("pod")
    assert board.uuid in {gpu["id"] for gpu in (await one.status())["unusable"]}
    node.remove("pod")
    await node.until(lambda: node.capacity(big) == 2, "its going", 900)


async def test_resources_are_named_by_product_if_that_is_wanted(node: Node, nvidia: Nvidia) -> None:
    nvidia.world.gpus[3].name = "NVIDIA L4"
    nvidia.mig(0, "3g.40gb", "3g.40gb")
    names = {
        "gpus": [{"pattern": "*H100*", "name": "nvidia.com/h100"}],
        "mig": [{"pattern": "3g.*", "name": "big"}],
    }
    configuration = {"resources": names, "gateway": {"honourResourceNames": True}, "flags": {"migStrategy": "mixed"}}
    one = await nvidia.served(2, *configure(node, configuration), resource="nvidia.com/h100")
    await node.allocatable_is(2, "nvidia.com/big")
    (left_out,) = (await one.status())["unusable"]
    assert left_out["id"] == nvidia.uuids[3]
    assert "pattern" in left_out["reason"]


# Which ones.


@pytest.mark.parametrize(
    ("must", "count", "chosen"),
    [((), 2, {0, 2}), ((3,), 2, {1, 3}), ((), 3, {0, 1, 2}), ((1, 2), 2, {1, 2}), ((), 4, {0, 1, 2, 3})],
)
async def test_gpus_near_to_each_other_are_preferred(
    node: Node, nvidia: Nvidia, must: tuple[int, ...], count: int, chosen: set[int]
) -> None:
    for gpu in nvidia.world.gpus:
        gpu.numa_node, gpu.links = 0, {}
    for one, other, lanes in ((0, 1, 1), (0, 2, 4), (1, 3, 2)):
        for a, b in ((one, other), (other, one)):
            gpu = nvidia.world.gpus[a]
            gpu.links |= {len(gpu.links) + n: nvml.NVLink(nvidia.world.gpus[b].pci) for n in range(lanes)}
    nvidia.show()
    await nvidia.served()
    async with node.plugin() as plugin:
        preferred = await plugin.prefer(nvidia.uuids, count, [nvidia.uuids[one] for one in must])
        assert preferred == {nvidia.uuids[one] for one in chosen}
        with pytest.raises(Refused):
            await plugin.prefer(nvidia.uuids[:1], 2)


async def test_replicas_are_given_in_the_order_of_their_numbers(node: Node) -> None:
    node.simulate({GPU: {"gpus": [{"uuid": "GPU-a"}]}})
    await ready(node, 12, GPU, *configure(node, sliced({"name": "gpu", "replicas": 12})))
    replicas = [f"GPU-a::{number}" for number in range(12)]
    async with node.plugin() as plugin:
        assert await plugin.prefer(replicas, 3) == {*replicas[:3]}
        assert await plugin.prefer(replicas[2:], 3) == {*replicas[2:5]}


async def test_gpus_on_one_switch_are_nearer_than_those_over_pcie(node: Node, nvidia: Nvidia) -> None:
    for index in (0, 1):  # They alone lost their links to the switches.
        nvidia.world.gpus[index].links = {}
    for gpu in nvidia.world.gpus:
        gpu.numa_node = 0
    nvidia.show()
    await nvidia.served()
    given = await node.admit("pod", count=2)
    assert set(given.devices[GPU]) == set(nvidia.uuids[2:])


async def test_gpus_on_one_numa_node_and_the_healthy_ones_are_preferred(node: Node) -> None:
    gpus: list[dict[str, Any]] = [{"uuid": f"gpu-{n}", "numa": n % 2} for n in range(6)]
    ids = [gpu["uuid"] for gpu in gpus]
    node.simulate({GPU: {"gpus": gpus}})
    await ready(node, 6)
    async with node.plugin() as plugin:
        assert await plugin.prefer(ids, 3) == {ids[0], ids[2], ids[4]}
        assert await plugin.prefer(ids, 2, [ids[3]]) == {ids[1], ids[3]}
        # The same where links are known, and don't tell them apart.
        node.simulate({GPU: {"gpus": gpus, "links": [{"between": ids, "by": "pix"}]}})
        await node.pass_time(5)
        assert await plugin.prefer(ids, 3) == {ids[0], ids[2], ids[4]}
        node.simulate({GPU: {"gpus": gpus, "unhealthy": {ids[0]: "smells"}}})
        await node.allocatable_is(5)
        assert await plugin.prefer(ids[:3], 2) == {ids[1], ids[2]}
        assert await plugin.prefer([ids[0], ids[2]], 2) == {ids[0], ids[2]}


async def test_more_nvlinks_are_nearer(node: Node) -> None:
    ids = [f"gpu-{n}" for n in range(4)]
    links = [{"between": ids[:2], "by": "nvlink", "lanes": 1}, {"between": ids[2:], "by": "nvlink", "lanes": 4}]
    node.simulate({GPU: {"gpus": [{"uuid": one} for one in ids], "links": links}})
    await ready(node, 4)
    given = await node.admit("pod", count=2)
    assert set(given.devices[GPU]) == set(ids[2:])


async def test_an_instance_held_under_its_old_name_leaves_its_gpu_s_others_free(node: Node, nvidia: Nvidia) -> None:
    for index in range(4):
        nvidia.mig(index, "3g.40gb", "3g.40gb")
    big = "nvidia.com/mig-3g.40gb"
    await node.start_kubelet()
    nvidia.gateway(*configure(node, {"flags": {"migStrategy": "mixed"}}))
    await node.allocatable_is(8, big)
    given = await node.admit("pod", big)
    configure(node, {"flags": {"migStrategy": "single"}})
    await node.allocatable_is(7)
    others = await node.admit("others", count=7)
    assert given.devices[big][0] not in others.devices[GPU]


async def test_partitions_of_one_gpu_are_preferred_and_those_of_one_that_is_used(node: Node, nvidia: Nvidia) -> None:
    for index in range(4):
        nvidia.mig(index, *(["1g.10gb"] * (3 if index == 2 else 2)))
    await nvidia.served(9, "--mig-strategy", "single")
    of = [[one.uuid for one in gpu.instances] for gpu in nvidia.world.gpus]
    async with node.plugin() as plugin:
        assert await plugin.prefer([*of[0], *of[1]], 2, [of[1][1]]) == {*of[1]}
        chosen = await plugin.prefer([*of[0], *of[2][:2]], 3, [of[2][0]])
        assert len(chosen & {*of[2]}) == 2
        assert len(chosen & {*of[0]}) == 1
    given = await node.admit("pod", count=3)
    assert set(given.devices[GPU]) == {*of[2]}
