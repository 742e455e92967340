"""How a container gets its GPUs: by each way that an operator chooses, as far as each kubelet can be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from devices.model import ContainerAnswer, DeviceNode, Mount
from tests.contract.hardware import Nvidia
from tests.contract.node import GPU, Node, Refused

CDI = "k8s.device-plugin.nvidia.com/gpu="
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
MOUNTED = "/var/run/nvidia-container-devices"


async def answer(node: Node, nvidia: Nvidia, *gpus: int) -> ContainerAnswer:
    """Ask for these GPUs, by their indexes, in an order that isn't theirs."""
    async with node.plugin() as plugin:
        return await plugin.allocate(*(nvidia.uuids[one] for one in reversed(gpus)))


async def test_a_variable_names_the_gpus_in_their_order(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served(4, "--gdrcopy-enabled", GDS_ENABLED="true", MOFED_ENABLED="false")
    names = f"{nvidia.uuids[1]},{nvidia.uuids[3]}"
    enabled = {"NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled"}
    assert await answer(node, nvidia, 1, 3) == ContainerAnswer(envs={VISIBLE: names, **enabled})


async def test_the_index_names_a_gpu_if_the_operator_wants_that(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served(DEVICE_ID_STRATEGY="index")
    assert await answer(node, nvidia, 0, 2) == ContainerAnswer(envs={VISIBLE: "0,2"})


async def test_mounts_name_the_gpus(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served(4, "--device-list-strategy", "envvar,volume-mounts")
    mounts = tuple(Mount(f"{MOUNTED}/{nvidia.uuids[one]}", "/dev/null") for one in (0, 1))
    assert await answer(node, nvidia, 0, 1) == ContainerAnswer(envs={VISIBLE: MOUNTED}, mounts=mounts)


async def test_device_nodes_are_passed_from_where_they_are_on_the_host(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served(4, "--pass-device-specs", "--nvidia-driver-root", "/run/driver", NVIDIA_DEV_ROOT="/run/dev")
    names = ("nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    nodes = tuple(DeviceNode(f"/dev/{name}", f"/run/dev/dev/{name}") for name in names)
    assert await answer(node, nvidia, 2) == ContainerAnswer(envs={VISIBLE: nvidia.uuids[2]}, device_nodes=nodes)


CHANNEL = "nvidia-caps-imex-channels/channel0"
IN_CDI = "k8s.device-plugin.nvidia.com/imex-channel=0"
WAYS: dict[str, Callable[[ContainerAnswer], bool]] = {
    "--device-list-strategy=envvar": lambda said: said.envs.get("NVIDIA_IMEX_CHANNELS") == "0",
    "--device-list-strategy=volume-mounts": lambda said: Mount(f"{MOUNTED}/imex/0", "/dev/null") in said.mounts,
    "--device-list-strategy=cdi-annotations": lambda said: any(
        IN_CDI in names.split(",") for names in said.annotations.values()
    ),
    "--device-list-strategy=cdi-cri": lambda said: IN_CDI in said.cdi_devices,
    "--pass-device-specs": lambda said: DeviceNode(f"/dev/{CHANNEL}", f"/dev/{CHANNEL}") in said.device_nodes,
}
"""How a container is told its IMEX channel."""


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("when", ["early", "late", "absent"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_container_gets_its_imex_channel_as_its_gpus_once_it_is_there(
    node: Node, nvidia: Nvidia, way: str, when: str, required: bool
) -> None:
    before, after = nvidia.dev / CHANNEL, nvidia.driver / "dev" / CHANNEL
    if when == "early":
        before.parent.mkdir()
        before.touch()
    await node.start_kubelet("1.34")
    one = nvidia.gateway(way, "--imex-channel-ids=0", f"--imex-required={required}".lower())
    if when != "early":
        await node.until(lambda: node.capacity() == 4, "the GPUs")
        await node.pass_time(60)
        assert node.allocatable() == (0 if required else 4)
        assert "channel0 is missing" in str(await one.status())
        assert one.said("no IMEX channel")
        if not required:
            said = await answer(node, nvidia, 1)
            assert not any(told(said) for told in WAYS.values())
            assert await one.is_ready()
    if when == "late":
        after.parent.mkdir(parents=True)  # What a container sees of nodes that are made after its start.
        after.touch()
        await node.pass_time(10)
    if when != "absent":
        await node.allocatable_is(4)
        assert WAYS[way](await answer(node, nvidia, 1))
        assert "channel0 is missing" not in str(await one.status())
        if "cdi" in way:
            (device,) = nvidia.specification("k8s.device-plugin.nvidia.com-imex-channel")["devices"]
            assert device == {"name": "0", "containerEdits": {"deviceNodes": [{"path": f"/dev/{CHANNEL}"}]}}


async def test_a_container_gets_no_imex_channel_that_nobody_asked_for(node: Node, nvidia: Nvidia) -> None:
    (nvidia.dev / CHANNEL).parent.mkdir()
    (nvidia.dev / CHANNEL).touch()
    await nvidia.served(4, "--pass-device-specs", "--device-list-strategy", "envvar,cdi-cri")
    said = await answer(node, nvidia, 1)
    assert not any(told(said) for told in WAYS.values())


@pytest.mark.parametrize("options", [("--pass-device-specs",), ("--device-list-strategy", "cdi-cri")])
async def test_a_pod_that_cuda_would_fail_in_is_refused(node: Node, nvidia: Nvidia, options: tuple[str, ...]) -> None:
    (nvidia.dev / "nvidia-uvm").unlink()
    nvidia.show(nodes=False)
    one = await nvidia.served(4, *options)
    assert "nvidia-uvm is missing" in await node.refused("pod")
    assert "nvidia-uvm" in str((await one.status())["hindrances"])
    nvidia.show()
    await node.pass_time(40)
    await node.admit("other")


async def test_only_a_pod_that_has_the_gpu_without_a_device_node_is_refused(node: Node, nvidia: Nvidia) -> None:
    (nvidia.dev / "nvidia1").unlink()
    nvidia.show(nodes=False)
    await nvidia.served(4, "--pass-device-specs")
    assert (await answer(node, nvidia, 2)).device_nodes
    async with node.plugin() as plugin:
        await plugin.refused(nvidia.uuids[1], words="/dev/nvidia1 is missing on this node")


async def test_each_annotation_has_a_key_of_its_own(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served(4, "--device-list-strategy", "cdi-annotations")
    keys = [key for _ in range(2) for key in (await answer(node, nvidia, 1)).annotations]
    assert len(set(keys)) == len(keys) == 2


@pytest.mark.parametrize(
    ("version", "strategies", "fallback", "carried"),
    [
        ("1.34", "cdi-cri", "refuse", {"cdi_devices"}),
        ("1.34", "envvar,cdi-cri", "refuse", {"envs", "cdi_devices"}),
        ("1.34", "cdi-annotations", "refuse", {"annotations"}),
        ("1.34", "cdi-annotations,cdi-cri", "refuse", {"annotations", "cdi_devices"}),
        ("1.20", "cdi-annotations", "refuse", {"annotations"}),
        ("1.20", "cdi-cri", "refuse", None),
        ("1.28", "cdi-cri", "refuse", None),
        ("1.28", "cdi-cri", "envvar", {"envs"}),
        ("1.20", "envvar,cdi-cri", "refuse", {"envs"}),
        ("1.9", "cdi-annotations", "refuse", None),
        ("1.9", "cdi-annotations", "envvar", {"envs"}),
        ("1.20", "cdi-cri", "expand", None),  # The driver's libraries need hooks.
    ],
)
async def test_a_gpu_is_named_in_cdi_only_to_a_kubelet_that_takes_it(
    node: Node, nvidia: Nvidia, version: str, strategies: str, fallback: str, carried: set[str] | None
) -> None:
    await nvidia.served(4, "--device-list-strategy", strategies, "--cdi-fallback", fallback, version=version)
    if carried is None:
        async with node.plugin() as plugin:
            await plugin.refused(nvidia.uuids[1])
        return
    given = await answer(node, nvidia, 1)
    name = CDI + nvidia.uuids[1]
    assert {one for one in ("envs", "annotations", "cdi_devices") if getattr(given, one)} == carried
    assert given.envs in ({}, {VISIBLE: nvidia.uuids[1]})
    assert given.cdi_devices in ((), (name,))
    assert list(given.annotations.values()) in ([], [name])
    assert all(one.startswith("cdi.k8s.io/nvidia-device-plugin_") for one in given.annotations)


async def test_an_unknown_kubelet_gets_the_cdi_name_and_what_arrives_for_sure(node: Node, nvidia: Nvidia) -> None:
    for strategies in ("cdi-cri", "envvar,cdi-cri"):
        await node.start_kubelet("1.29")
        manager = node.kubelet.manager
        manager.behaviour = replace(manager.behaviour, grpc_go="1.57.0")  # Of 1.28 or of 1.29.
        one = nvidia.gateway("--device-list-strategy", strategies)
        await node.allocatable_is(4)
        if strategies == "cdi-cri":
            assert "CDI" in await node.refused("pod")
        else:
            given = await answer(node, nvidia, 1)
            assert given == ContainerAnswer(envs={VISIBLE: nvidia.uuids[1]}, cdi_devices=(CDI + nvidia.uuids[1],))
        await one.terminate()


async def test_what_a_cdi_name_stands_for_is_said_to_a_kubelet_that_knows_no_cdi(node: Node, nvidia: Nvidia) -> None:
    hooks = {"CDI_DISABLE_HOOKS": "all", "DEVICE_LIST_STRATEGY": "cdi-cri", "GATEWAY_CDI_FALLBACK": "expand"}
    await nvidia.served(4, version="1.20", **hooks)
    given = await answer(node, nvidia, 1)
    assert {"/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= {one.host_path for one in given.device_nodes}
    assert f"/usr/lib64/libcuda.so.{nvidia.world.driver}" in {one.host_path for one in given.mounts}


async def test_the_cdi_specification_has_what_is_offered_before_it_is_offered(node: Node, nvidia: Nvidia) -> None:
    nvidia.mig(3, "3g.40gb", "3g.40gb")
    instances = [one.uuid for one in nvidia.world.gpus[3].instances]
    options = ("--device-list-strategy", "cdi-cri", "--mig-strategy", "mixed", "--exclude-devices", "0")
    one = await nvidia.served(2, *options)
    await node.allocatable_is(2, "nvidia.com/mig-3g.40gb")
    devices = {device["name"]: device["containerEdits"] for device in nvidia.specification()["devices"]}
    assert set(devices) == {*nvidia.uuids[1:], *instances, "all"}
    assert [node["path"] for node in devices[nvidia.uuids[2]]["deviceNodes"]] == ["/dev/nvidia2"]
    assert len(devices[instances[0]]["deviceNodes"]) == 3
    edits = nvidia.specification()["containerEdits"]
    assert "NVIDIA_VISIBLE_DEVICES=void" in edits["env"]
    assert f"libcuda.so.{nvidia.world.driver}" in str(edits["mounts"])
    given = await node.admit("pod", "nvidia.com/mig-3g.40gb")
    assert given.answer.cdi_devices[0].removeprefix(CDI) in instances
    # One that a container was given stays in it when it goes.
    nvidia.no_mig(3)
    await node.pass_time(60)
    names = {device["name"] for device in nvidia.specification()["devices"]}
    assert given.answer.cdi_devices[0].removeprefix(CDI) in names
    assert await one.terminate() == 0
    assert nvidia.specification()["devices"]


async def test_without_the_drivers_libraries_there_is_no_cdi_and_the_reason_is_told(node: Node, nvidia: Nvidia) -> None:
    library = nvidia.driver / f"usr/lib64/libcuda.so.{nvidia.world.driver}"
    library.unlink()
    one = await nvidia.served(4, "--device-list-strategy", "cdi-cri", "--fail-on-init-error=false")
    assert "libcuda" in await node.refused("pod")
    library.touch()
    await node.pass_time(40)
    given = await node.admit("other")
    assert given.answer.cdi_devices
    assert one.alive
    library.unlink()
    failing = nvidia.gateway("--device-list-strategy", "cdi-cri")
    await node.until(lambda: not failing.alive, "its end")
    assert "libcuda" in str(failing.process.log)


async def test_the_drivers_libraries_that_go_later_end_no_gateway(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served(4, "--device-list-strategy", "cdi-cri", "--fail-on-init-error")
    (nvidia.driver / f"usr/lib64/libcuda.so.{nvidia.world.driver}").unlink()
    await node.pass_time(200)
    assert one.alive
    assert len(one.said("no CDI specification")) == 1
    assert "libcuda" in await node.refused("pod")
    nvidia.install()
    await node.pass_time(60)
    await node.admit("other")


async def test_a_specification_that_somebody_removed_is_written_again(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served(4, "--device-list-strategy", "cdi-cri")
    for path in nvidia.cdi.iterdir():
        path.unlink()
    await node.pass_time(40)
    assert len(nvidia.specification()["devices"]) == 5


async def test_the_drivers_root_of_the_start_counts_until_the_next_one(node: Node, nvidia: Nvidia) -> None:
    file = node.folder / "config.yaml"
    text = "flags: {{plugin: {{containerDriverRoot: {}, deviceListStrategy: [cdi-cri]}}}}"
    file.write_text(text.format(nvidia.driver))
    one = await node.served(4, "--backend", "nvidia", "--config-file", str(file))
    file.write_text(text.format("/nowhere") + "\ngateway: {excludeDevices: [0]}")
    await node.allocatable_is(3)
    assert one.said("configuration: these settings change only at a restart of the gateway")
    for path in nvidia.cdi.iterdir():
        path.unlink()
    await node.pass_time(40)
    assert len(nvidia.specification()["devices"]) == 4


async def test_an_answer_changes_with_the_configuration(node: Node, nvidia: Nvidia) -> None:
    file = node.folder / "config.yaml"
    file.write_text("flags: {plugin: {deviceIDStrategy: index}}")
    await nvidia.served(4, "--config-file", str(file))
    assert (await answer(node, nvidia, 2)).envs == {VISIBLE: "2"}
    file.write_text("flags: {plugin: {deviceIDStrategy: uuid}}")
    await node.pass_time(10)
    assert (await answer(node, nvidia, 2)).envs == {VISIBLE: nvidia.uuids[2]}


@pytest.mark.parametrize(
    "now",
    [[{"uuid": "a", "health": "Unhealthy", "reason": "smells"}, {"uuid": "b"}], [{"uuid": "b"}]],
    ids=["ill", "gone"],
)
async def test_a_container_whose_gpu_is_made_ready_starts_if_healthy(node: Node, now: list[dict[str, str]]) -> None:
    well = {GPU: {"gpus": [{"uuid": "a"}, {"uuid": "b"}], "pre_start": True}}
    node.simulate({GPU: {"gpus": [{"uuid": "a"}], "pre_start": True}})
    await node.served(1)
    await node.admit("pod")
    node.simulate({GPU: {"gpus": now, "pre_start": True}})
    await node.until(lambda: node.capacity() == 2, "the other list")
    await node.allocatable_is(1)
    with pytest.raises(Refused, match="is not healthy"):
        await node.restart_container("pod")
    node.simulate(well)
    await node.allocatable_is(2)
    await node.restart_container("pod")


async def test_gpus_with_cdi_names_of_their_own_are_named_so(node: Node) -> None:
    node.simulate({"vendor.com/gpu": {"gpus": 2, "cdi": "vendor.com/gpu"}})
    await node.served(2, version="1.34", resource="vendor.com/gpu")
    given = await node.admit("pod", "vendor.com/gpu")
    assert given.answer == ContainerAnswer(cdi_devices=(f"vendor.com/gpu={given.devices['vendor.com/gpu'][0]}",))
    node.remove("pod")
    await node.start_kubelet("1.20")
    await node.allocatable_is(2, "vendor.com/gpu")
    await node.refused("other", "vendor.com/gpu")


async def test_gpus_with_nodes_get_those(node: Node) -> None:
    node.simulate({"vendor.com/gpu": {"gpus": [{"uuid": "a", "device_nodes": ["/dev/null", "/dev/zero"]}]}})
    await node.served(1, resource="vendor.com/gpu")
    given = await node.admit("pod", "vendor.com/gpu")
    assert [one.host_path for one in given.answer.device_nodes] == ["/dev/null", "/dev/zero"]
