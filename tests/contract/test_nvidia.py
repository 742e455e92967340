"""NVIDIA's GPUs, as NVML shows them and as they fail: what the kubelet is told of each, and what an operator reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.hardware import Nvidia
from tests.contract.node import GPU, Gateway, Node
from tests.contract.test_sharing import configure
from tests.fakes import nvml

NOT_LOADED, UNKNOWN, LOST, DENIED, NO_LIBRARY, MISMATCH = 9, 999, 15, 4, 12, 18


async def told(one: Gateway) -> dict[str, str]:
    """Return what the status says of each GPU that isn't simply there, by UUID: in the resources, or among those left out."""
    status = await one.status()
    found = {gpu["id"]: gpu["reason"] for gpu in status.get("unusable", ())}
    for resource in status["resources"]:
        found |= {device["id"]: device["reason"] for device in resource["devices"] if device["health"] != "Healthy"}
    return found


def open_files() -> set[str]:
    """Return the paths of all files that are open on this node."""
    return {str(link.resolve()) for link in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize(
    ("xid", "at_once", "later"),
    [
        pytest.param(13, 4, 4, id="an application's"),
        pytest.param(8, 3, 4, id="one that ends with its application"),
        pytest.param(79, 3, 3, id="one that wants a reset"),
        pytest.param(9999, 3, 3, id="one that nobody knows"),
    ],
)
async def test_an_error_makes_its_gpu_unhealthy_while_it_lasts(
    node: Node, nvidia: Nvidia, xid: int, at_once: int, later: int
) -> None:
    one = await nvidia.served()
    nvidia.event(2, xid)
    await node.pass_time(5)
    assert (node.allocatable(), node.capacity()) == (at_once, 4)
    assert set(await told(one)) == ({nvidia.uuids[2]} if at_once == 3 else set())
    await node.allocatable_after(50, at_once)
    await node.allocatable_after(100, later)


@pytest.mark.parametrize(
    ("disabled", "enabled", "xid", "count"),
    [
        ("79", "", 79, 4),
        ("all", "", 79, 4),
        ("xids", "48", 48, 3),
        ("13,79", "79", 79, 3),
        ("", "13", 13, 3),
        ("all", "", 0, 4),
        ("", "", 0, 3),
        *(("", "", xid, 4) for xid in (13, 31, 43, 45, 68, 109)),  # Of an application, says NVIDIA's plugin.
    ],
)
async def test_errors_count_if_set(
    node: Node, nvidia: Nvidia, disabled: str, enabled: str, xid: int, count: int
) -> None:
    await nvidia.served(DP_DISABLE_HEALTHCHECKS=disabled, DP_ENABLE_HEALTHCHECKS=enabled)
    nvidia.event(1, xid, type=nvml.XID if xid else 0x2)  # 0: a double bit ECC error
    await node.allocatable_after(10, count)


@pytest.mark.parametrize(("recovery", "count"), [("safe", 4), ("off", 3)])
async def test_a_lost_gpu_is_back_after_a_reset_if_set(node: Node, nvidia: Nvidia, recovery: str, count: int) -> None:
    one = await nvidia.served(4, "--health-recovery", recovery)
    nvidia.event(1, 79)
    nvidia.world.gpus[1].lost = True
    nvidia.show()
    await node.pass_time(70)
    assert (node.allocatable(), node.capacity()) == (3, 4)
    assert "doesn't answer" in (await told(one))[nvidia.uuids[1]] or "Xid 79" in (await told(one))[nvidia.uuids[1]]
    nvidia.world.gpus[1].lost = False
    nvidia.show()
    await node.allocatable_after(150, count)


async def test_an_error_that_is_newer_than_the_reset_counts(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served()
    nvidia.world.gpus[1].lost = True
    nvidia.show()
    await node.allocatable_is(3)
    nvidia.world.gpus[1].lost = False
    nvidia.show()
    await node.allocatable_is(4, seconds=1200)
    nvidia.event(1, 95)
    await node.allocatable_is(3)
    await node.allocatable_after(100, 3)


async def test_an_edit_says_from_then_on_whether_a_gpu_may_come_back(node: Node, nvidia: Nvidia) -> None:
    file = node.folder / "config.yaml"
    file.write_text("gateway: {healthRecovery: 'off'}")
    await nvidia.served(4, "--config-file", str(file))
    nvidia.event(1, 48)
    await node.allocatable_is(3)
    for recovery, count in (("off", 3), ("safe", 4)):
        file.write_text(f"gateway: {{healthRecovery: '{recovery}'}}")
        await node.pass_time(10)
        for action in (1, 0):  # The driver wants a reset, and then it doesn't any more.
            nvidia.world.gpus[1].recovery = action
            nvidia.show()
            await node.pass_time(20)
        assert node.allocatable() == count


@pytest.mark.parametrize("sign", ["recovery", "rows"])
async def test_what_the_driver_wants_makes_a_gpu_unhealthy_until_done(node: Node, nvidia: Nvidia, sign: str) -> None:
    one = await nvidia.served()
    gpu = nvidia.world.gpus[3]
    gpu.recovery, gpu.rows = (1, gpu.rows) if sign == "recovery" else (0, (0, 1, 0, 1))
    nvidia.show()
    await node.allocatable_is(3)
    assert set(await told(one)) == {gpu.uuid}
    gpu.recovery, gpu.rows = 0, (0, 0, 0, 0)
    nvidia.show()
    if sign == "rows":  # Nothing shows a reset.
        await node.allocatable_after(30, 3)
        await one.order("forget", id=gpu.uuid)
    await node.allocatable_is(4)


async def test_a_driver_that_is_loaded_anew_ends_what_was_wrong_before(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    nvidia.event(0, 79)
    await node.allocatable_is(3)
    await one.order("release", ids=[nvidia.uuids[1]])
    nvidia.load()
    await one.order("acquire", ids=[nvidia.uuids[1]])
    await node.allocatable_is(4)


async def test_a_released_gpu_is_let_go_of_and_the_operators_word_makes_it_well(node: Node, nvidia: Nvidia) -> None:
    nvidia.world.nodes, nvidia.world.at_once = nvidia.dev, 0
    (nvidia.proc / "self").symlink_to("/proc/self")
    nvidia.show()
    one = await nvidia.served()
    opened = open_files()
    assert str(nvidia.dev / "nvidia2") in opened
    nvidia.event(2, 79)
    await node.allocatable_is(3)
    await one.order("release", ids=[nvidia.uuids[2]])
    await node.pass_time(60)
    opened = open_files()
    assert str(nvidia.dev / "nvidia2") not in opened
    assert str(nvidia.dev / "nvidia1") in opened
    assert node.capacity() == 4
    await one.order("acquire", ids=[nvidia.uuids[2]])
    await node.allocatable_is(4)


async def test_a_gpu_that_is_plugged_in_is_offered_and_a_pulled_one_is_unhealthy(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    given = await node.admit("pod")
    nvidia.world.gpus.append(nvml.gpu(4))
    nvidia.show()
    await node.allocatable_is(5)
    held = nvidia.uuids.index(given.devices[GPU][0])
    del nvidia.world.gpus[held]
    free = nvidia.world.gpus.pop().uuid
    nvidia.show()
    await node.allocatable_is(3)
    await node.pass_time(100)
    assert (node.allocatable(), node.capacity()) == (3, 5)
    assert free in await told(one)
    assert given.devices[GPU][0] in await told(one)


async def test_a_call_that_hangs_makes_its_gpu_unhealthy_and_nothing_else(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    nvidia.fails("nvmlDeviceGetRemappedRows", 0, gpu=1, hangs=3600)
    await node.pass_time(30)
    assert set(await told(one)) == {nvidia.uuids[1]}
    nvidia.event(3, 79)
    await node.allocatable_is(2)
    await node.admit("pod")
    nvidia.works("nvmlDeviceGetRemappedRows", gpu=1)
    await node.allocatable_is(3, seconds=120)
    nvidia.fails("nvmlDeviceGetRemappedRows", 0, gpu=1, hangs=3600)
    await node.pass_time(7)
    assert await one.terminate() == 0


async def test_waiting_for_errors_that_fails_begins_again(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served()
    nvidia.fails("nvmlEventSetWait", UNKNOWN)
    await node.allocatable_after(10, 4)
    nvidia.works("nvmlEventSetWait")
    await node.pass_time(60)
    nvidia.event(2, 79)
    await node.allocatable_is(3)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (NOT_LOADED, "library-failed"),
        (NO_LIBRARY, "no-library"),
        (MISMATCH, "library-mismatch"),
        (UNKNOWN, "library-failed"),
    ],
)
async def test_a_first_failure_is_final_unless_set_otherwise(node: Node, nvidia: Nvidia, code: int, cause: str) -> None:
    nvidia.fails("nvmlInit", code)
    await node.start_kubelet()
    one = nvidia.gateway()
    await node.until(lambda: not one.alive, "its end")
    assert one.process.ended.result() == 1
    assert "FAIL_ON_INIT_ERROR=false" in str(one.process.log)
    other = nvidia.gateway(FAIL_ON_INIT_ERROR="false")
    await node.allocatable_after(300, 0)
    assert [hindrance["cause"] for hindrance in (await other.status())["hindrances"]] == [cause]
    nvidia.works("nvmlInit")
    await node.allocatable_is(4)


async def test_without_a_library_the_gateway_waits_for_it(node: Node, nvidia: Nvidia) -> None:
    library = nvidia.driver / "usr/lib64/libnvidia-ml.so.1"
    library.rename(library.with_suffix(".away"))
    await node.start_kubelet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gateway.compose._NVML", "libnvidia-ml.so.none"
        )  # This process has loaded one of that name before.
        one = nvidia.gateway()
        await node.until(lambda: not one.alive, "its end")
    assert one.process.ended.result() == 1
    library.with_suffix(".away").rename(library)
    nvidia.gateway()
    await node.allocatable_is(4)


async def test_a_driver_that_is_unloaded_takes_the_gpus_along_until_it_is_back(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served()
    nvidia.world.gpus[0].lost = True
    nvidia.world.fails("nvmlInit", NOT_LOADED)
    nvidia.show()
    await node.allocatable_is(0)
    assert node.capacity() == 4
    nvidia.world.gpus[0].lost = False
    nvidia.works("nvmlInit")
    await node.allocatable_is(4)


async def test_a_library_of_another_release_ends_the_gateway_later_and_no_gpu(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    nvidia.world.gpus[0].lost = True
    nvidia.world.fails("nvmlInit", MISMATCH)
    nvidia.show()
    await node.allocatable_after(300, 4)  # Nobody knows anything else.
    await node.pass_time(400)
    assert not one.alive
    assert one.process.ended.result() == 75


async def test_a_display_is_no_gpu_for_pods(nvidia: Nvidia) -> None:
    nvidia.world.gpus[3].name = "NVIDIA DGX Display"
    nvidia.show()
    one = await nvidia.served(3)
    assert "display" in (await told(one))[nvidia.uuids[3]]


async def test_a_gpu_that_only_the_kernel_has_is_named(nvidia: Nvidia) -> None:
    hidden, excluded = nvidia.world.gpus.pop(), nvidia.world.gpus.pop()
    nvidia.show()
    for gpu, words in ((hidden, ""), (excluded, "GPU Excluded:\t Yes\n")):
        folder = nvidia.proc / "driver/nvidia/gpus" / gpu.pci.lower()
        folder.mkdir()
        (folder / "information").write_text(f"GPU UUID: \t {gpu.uuid}\nDevice Minor: \t {gpu.minor}\n{words}")
    one = await nvidia.served(2)
    assert list(await told(one)) == [hidden.uuid]


# MIG.


async def test_gpus_without_mig_are_offered_and_what_may_not_be_asked_is_no_trouble(node: Node, nvidia: Nvidia) -> None:
    for gpu in nvidia.world.gpus:
        gpu.profiles = {}
    nvidia.fails("nvmlDeviceGetRemappedRows", DENIED)
    await nvidia.served(4, "--mig-strategy", "single")
    await node.allocatable_after(60, 4)


def partitioned(nvidia: Nvidia, *profiles: str) -> list[str]:
    """Partition all GPUs; return the instances' UUIDs."""
    for index in range(len(nvidia.world.gpus)):
        nvidia.mig(index, *profiles)
    return [one.uuid for gpu in nvidia.world.gpus for one in gpu.instances]


async def test_with_mig_single_the_instances_stand_in_for_gpus(node: Node, nvidia: Nvidia) -> None:
    instances = partitioned(nvidia, "3g.40gb", "3g.40gb")
    one = await nvidia.served(8, "--mig-strategy", "single")
    given = await node.admit("pod")
    assert given.answer.envs["NVIDIA_VISIBLE_DEVICES"] in instances
    hit = nvidia.world.gpus[0].instances[0]
    nvidia.event(0, 79, gpu_instance=hit.gpu_instance, compute_instance=hit.compute_instance)
    await node.pass_time(5)
    assert set(await told(one)) == {hit.uuid}
    nvidia.event(1, 79)
    await node.allocatable_is(5)


@pytest.mark.parametrize("unlike", ["profiles", "whole", "empty"])
async def test_mig_single_wants_all_gpus_alike(node: Node, nvidia: Nvidia, unlike: str) -> None:
    partitioned(nvidia, "3g.40gb", "3g.40gb")
    one = await nvidia.served(8, "--mig-strategy", "single")
    if unlike == "profiles":
        nvidia.world.mig(3, "2g.20gb", "2g.20gb")
    elif unlike == "whole":
        nvidia.world.no_mig(3)
    else:
        nvidia.world.gpus[3].instances = []
    nvidia.show()
    await node.allocatable_is(6)
    assert "single" in str((await one.status())["hindrances"])
    one.kill()
    other = nvidia.gateway("--mig-strategy", "single")
    await node.until(lambda: not other.alive, "its end")
    assert other.process.ended.result() == 1


async def test_a_node_that_cannot_be_named_says_so_and_is_not_ready_until_it_can(node: Node, nvidia: Nvidia) -> None:
    partitioned(nvidia, "3g.40gb", "3g.40gb")
    nvidia.no_mig(3)
    await node.start_kubelet()
    one = nvidia.gateway("--mig-strategy", "single", FAIL_ON_INIT_ERROR="false")
    await node.pass_time(60)
    (hindrance,) = (await one.status())["hindrances"]
    assert (node.capacity(), hindrance["held_up"], await one.is_ready()) == (0, True, False)
    assert "devices can't be named: with the MIG strategy 'single', every GPU" in hindrance["reason"]
    nvidia.mig(3, "3g.40gb", "3g.40gb")
    await node.allocatable_is(8)
    await node.eventually(one.is_ready, "readiness")
    assert not (await one.status())["hindrances"]
    nvidia.no_mig(3)
    await node.allocatable_is(6)
    assert not (await one.status())["hindrances"][0]["held_up"]
    nvidia.event(0, 79)  # What can't be named may fall ill.
    await node.allocatable_is(4)
    nvidia.mig(3, "3g.40gb", "3g.40gb")
    await node.allocatable_is(6)


async def test_a_gpu_that_is_partitioned_before_the_node_has_a_name_is_not_given(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served(4, "--mig-strategy", "single")
    nvidia.mig(3, "3g.40gb")
    await node.allocatable_is(3)
    assert set(await told(one)) == {nvidia.uuids[3]}
    nvidia.no_mig(3)
    await node.allocatable_is(4)


@pytest.mark.parametrize("beside", [False, True])
async def test_what_was_offered_before_a_restart_stays_until_the_node_has_a_name(
    node: Node, nvidia: Nvidia, beside: bool
) -> None:
    partitioned(nvidia, "3g.40gb", "3g.40gb")
    rules = [{"resource": "vendor.com/null", "paths": ["/dev/null*"]}] if beside else []
    options = ("--mig-strategy", "single", *configure(node, {"version": "v1", "gateway": {"devices": rules}}))
    one = await nvidia.served(8, *options)
    given = await node.admit("pod")
    before = await one.states()
    one.kill()
    nvidia.no_mig(3)
    two = nvidia.gateway(*options, FAIL_ON_INIT_ERROR="false")
    await node.until(lambda: two.said("registered"), "its registration")
    await node.pass_time(60)
    assert await two.states() == dict.fromkeys(before, "not checked yet")
    assert node.capacity() == 8
    assert (await node.restart_container("pod")).devices == given.devices
    nvidia.mig(3, "3g.40gb", "3g.40gb")
    await node.eventually(lambda: _are_present(two), "the look")
    await node.allocatable_is(8)


async def _are_present(one: Gateway) -> bool:
    return set((await one.states()).values()) == {"healthy"}


@pytest.mark.parametrize(("failing", "usable"), [(1, 3), (4, 0)])
async def test_a_node_is_ready_if_one_gpu_can_be_used(node: Node, nvidia: Nvidia, failing: int, usable: int) -> None:
    for index in range(failing):
        nvidia.world.fails("nvmlDeviceGetHandleByIndex", UNKNOWN, index)
    nvidia.show()
    await node.start_kubelet()
    if not usable:
        final = nvidia.gateway()
        await node.until(lambda: not final.alive, "its end")
        assert final.process.ended.result() == 1
        assert "can't be used: it can't be read" in str(final.process.log)
    one = nvidia.gateway(FAIL_ON_INIT_ERROR="false")
    await node.allocatable_after(30, usable)
    hindrances = (await one.status())["hindrances"]
    assert len(hindrances) == failing
    assert {each["held_up"] for each in hindrances} == {not usable}
    assert await one.is_ready() is bool(usable)


async def test_gpus_none_of_which_can_be_used_any_more_end_no_gateway(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served(4, "--mig-strategy", "mixed", "--fail-on-init-error")
    for index in range(4):
        nvidia.world.mig(index)  # In MIG mode, and without an instance.
    nvidia.show()
    await node.allocatable_is(0)
    await node.pass_time(60)
    assert one.alive
    assert {each["held_up"] for each in (await one.status())["hindrances"]} == {True}
    for index in range(4):
        nvidia.no_mig(index)
    await node.allocatable_is(4)


async def test_a_gpu_in_mig_mode_without_an_instance_is_named(nvidia: Nvidia) -> None:
    nvidia.mig(2)
    one = await nvidia.served(3, "--mig-strategy", "mixed")
    assert "no MIG instances" in (await told(one))[nvidia.uuids[2]]


async def test_with_mig_mixed_each_profile_has_its_name_and_whole_gpus_theirs(node: Node, nvidia: Nvidia) -> None:
    nvidia.world.mig(0, "1g.10gb", "1g.10gb+me", "2g.20gb")
    nvidia.world.mig(1, "1c.3g.40gb", "1c.3g.40gb")
    nvidia.mig(2, "7g.80gb")
    await nvidia.served(1, "--mig-strategy", "mixed", "--device-id-strategy", "index")
    names = {"mig-1g.10gb": 1, "mig-1g.10gb.me": 1, "mig-2g.20gb": 1, "mig-1c.3g.40gb": 2, "mig-7g.80gb": 1}
    for name, count in names.items():
        await node.allocatable_is(count, f"nvidia.com/{name}")
    given = await node.admit("pod", "nvidia.com/mig-2g.20gb")
    assert given.answer.envs["NVIDIA_VISIBLE_DEVICES"] == "0:2"


async def test_without_a_mig_strategy_a_partitioned_gpu_is_offered_whole(node: Node, nvidia: Nvidia) -> None:
    nvidia.mig(0, "3g.40gb", "3g.40gb")
    one = await nvidia.served()
    hit = nvidia.world.gpus[0].instances[0]
    nvidia.event(0, 79, gpu_instance=hit.gpu_instance, compute_instance=hit.compute_instance)
    await node.allocatable_is(3)
    await one.order("release", ids=[nvidia.uuids[0]])
    await one.order("acquire", ids=[nvidia.uuids[0]])
    await node.allocatable_is(4)


async def test_a_whole_gpu_has_the_worst_of_what_its_instances_have(node: Node, nvidia: Nvidia) -> None:
    nvidia.mig(0, "3g.40gb", "3g.40gb")
    one = await nvidia.served()
    for xid, hit in zip((8, 79), nvidia.world.gpus[0].instances, strict=True):
        nvidia.event(0, xid, gpu_instance=hit.gpu_instance, compute_instance=hit.compute_instance)
    await node.allocatable_is(3)
    assert "Xid 79" in (await told(one))[nvidia.uuids[0]]
    await node.allocatable_after(300, 3)  # What ends with its application has ended.


async def test_an_instance_that_no_container_could_use_is_not_given(node: Node, nvidia: Nvidia) -> None:
    instances = partitioned(nvidia, "3g.40gb", "3g.40gb")
    table = nvidia.proc / "driver/nvidia-caps/mig-minors"
    gone = nvidia.world.gpus[0].instances[1]
    lines = [one for one in table.read_text().splitlines() if f"gpu0/gi{gone.gpu_instance}/ci0" not in one]
    table.write_text("\n".join(lines))
    strategies = ("--mig-strategy", "single", "--device-list-strategy", "envvar,cdi-cri")
    one = await nvidia.served(7, *strategies)
    assert gone.uuid not in {device["name"] for device in nvidia.specification()["devices"]}
    assert "capability" in (await told(one))[gone.uuid]
    async with node.plugin() as plugin:
        await plugin.refused(gone.uuid)
        assert (await plugin.allocate(instances[0])).envs


async def test_a_gpu_that_is_partitioned_anew_is_given_only_where_no_pod_has_it(node: Node, nvidia: Nvidia) -> None:
    small, big = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
    for index in range(2):
        nvidia.mig(index, "3g.40gb", "3g.40gb")
    await nvidia.served(2, "--mig-strategy", "mixed")
    await node.allocatable_is(4, big)
    given = await node.admit("pod", big)
    held = next(i for i in range(2) if given.devices[big][0] in {one.uuid for one in nvidia.world.gpus[i].instances})
    nvidia.mig(1 - held, "1g.10gb", "1g.10gb")
    await node.allocatable_is(2, small)
    await node.until(
        lambda: node.capacity(big) == 2, "the going of the others"
    )  # The pod's, and the other one of its GPU.
    nvidia.no_mig(held)
    await node.allocatable_after(60, 2)  # The pod still has the hardware of the third one.
    node.remove("pod")
    await node.allocatable_is(3, seconds=300)


async def test_an_instance_that_goes_during_a_look_is_no_trouble_of_its_gpu(node: Node, nvidia: Nvidia) -> None:
    partitioned(nvidia, "3g.40gb", "3g.40gb")
    one = await nvidia.served(8, "--mig-strategy", "single")
    nvidia.fails("nvmlDeviceGetGpuInstanceId", 2, gpu=0)
    await node.pass_time(15)
    assert set(await told(one)) == {one.uuid for one in nvidia.world.gpus[0].instances}
    nvidia.works("nvmlDeviceGetGpuInstanceId", gpu=0)
    await node.allocatable_is(8)
    nvidia.fails("nvmlDeviceGetGpuInstanceId", 0, gpu=0, hangs=60)
    await node.pass_time(6)
    nvidia.world.gpus[0].instances.pop(0)
    nvidia.works("nvmlDeviceGetGpuInstanceId", gpu=0)
    await node.pass_time(2)
    assert nvidia.world.gpus[0].instances[0].uuid not in await told(one)
    assert node.allocatable() == 7


@pytest.mark.parametrize(("whole", "hit"), [(True, 4), (False, 2)])
async def test_an_error_of_an_instance_is_one_of_all_on_it(node: Node, nvidia: Nvidia, whole: bool, hit: int) -> None:
    one_each = partitioned(nvidia, "1c.3g.40gb", "1c.3g.40gb", "1c.4g.40gb", "1c.4g.40gb")[:4]
    one = await nvidia.served(8, "--mig-strategy", "mixed", resource="nvidia.com/mig-1c.3g.40gb")
    await node.allocatable_is(8, "nvidia.com/mig-1c.4g.40gb")
    instance = nvidia.world.gpus[0].instances[0]
    nvidia.event(0, 79, **({} if whole else {"gpu_instance": instance.gpu_instance}))
    await node.pass_time(5)
    assert set(await told(one)) == set(one_each[:hit])


async def test_instances_of_before_the_restart_are_not_lost_but_gone(node: Node, nvidia: Nvidia) -> None:
    partitioned(nvidia, "3g.40gb", "3g.40gb")
    one = await nvidia.served(8, "--mig-strategy", "single")
    given = await node.admit("pod")
    one.kill()
    partitioned(nvidia, "2g.20gb", "2g.20gb", "2g.20gb")
    nvidia.gateway("--mig-strategy", "single")
    await node.pass_time(60)
    held = given.devices[GPU][0]
    assert node.capacity() == 13  # The new ones, and what the pod has.
    assert node.allocatable() <= 9  # Where that is can't be known: all of its GPU is left alone.
    async with node.plugin() as plugin:
        assert held in {device.id for device in await plugin.first_list()}
    node.remove("pod")
    await node.until(lambda: node.capacity() == node.allocatable() == 12, "its going", 900)


@pytest.mark.parametrize("down", [False, True])
async def test_a_gpu_that_another_one_replaces_goes_when_no_pod_has_it(node: Node, nvidia: Nvidia, down: bool) -> None:
    one = await nvidia.served()
    (held,) = (await node.admit("pod")).devices[GPU]
    nvidia.world.gpus[nvidia.uuids.index(held)].uuid = "GPU-new"
    if down:
        await one.terminate()
        nvidia.show()
        nvidia.gateway()
    else:
        await one.order("release", ids=[])
        nvidia.show()
        await one.order("acquire", ids=[])
    await node.until(lambda: (node.capacity(), node.allocatable()) == (5, 4), "the new one", 900)
    node.remove("pod")
    await node.until(lambda: node.capacity() == node.allocatable() == 4, "the old one's going", 900)
    async with node.plugin() as plugin:
        assert {device.id for device in await plugin.first_list()} == {*nvidia.uuids}


async def test_the_gauges_tell_of_each_gpu_that_answers_and_of_its_pod(node: Node, nvidia: Nvidia) -> None:
    nvidia.mig(3, "3g.40gb", "3g.40gb")
    one = await nvidia.served(3, "--gpu-metrics", "--mig-strategy", "mixed")
    given = await node.admit("pod")
    await node.pass_time(60)

    async def gauges() -> dict[str, str]:
        _, body = await one.get("metrics", "/metrics")
        lines = [line for line in body.splitlines() if line.startswith("DCGM_FI_DEV_FB_USED{")]
        return {line.partition('UUID="')[2].partition('"')[0]: line for line in lines}

    instances = [one.uuid for one in nvidia.world.gpus[3].instances]
    found = await gauges()
    assert set(found) == {*nvidia.uuids, *instances}
    assert [uuid for uuid, line in found.items() if 'pod="pod"' in line] == list(given.devices[GPU])
    assert found[nvidia.uuids[2]].endswith(" 3072.0")
    await one.order("release", ids=[nvidia.uuids[0]])
    nvidia.fails("nvmlDeviceGetMemoryInfo", UNKNOWN, gpu=1)
    await node.pass_time(30)
    assert set(await gauges()) == {nvidia.uuids[2], nvidia.uuids[3], *instances}
