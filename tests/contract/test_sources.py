"""What a node has: which backends there are, several of them, and devices that are files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from devices.model import DeviceNode
from tests.contract.hardware import Amd, Host, Nvidia
from tests.contract.node import Gateway, Node, Refused
from tests.fakes.amd import Board, Sysfs

AMD, FUSE, VERBS = "amd.com/gpu", "vendor.com/fuse", "vendor.com/verbs"


def device(host: Host, name: str) -> Path:
    """Make a device node below the host's /dev."""
    path = host.dev / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/null")
    return path


def configure(node: Node, *rules: dict[str, Any], **others: Any) -> tuple[str, str]:
    """Write the configuration file; return the option that names it."""
    draft = node.folder / "draft"
    draft.write_text(json.dumps({"gateway": {"devices": list(rules), **others}}))
    draft.replace(node.folder / "config.yaml")
    return "--config-file", str(node.folder / "config.yaml")


async def reasons(one: Gateway) -> dict[str, str]:
    """Return why devices are unhealthy, by ID."""
    resources = (await one.status())["resources"]
    devices = (device for resource in resources for device in resource["devices"])
    return {device["id"]: device["reason"] for device in devices if device["health"] != "Healthy"}


# Files.


async def test_files_that_match_are_devices_and_a_container_gets_their_nodes(node: Node) -> None:
    host = Host(node)
    for name in ("infiniband/uverbs0", "infiniband/uverbs1", "infiniband/rdma_cm", "fuse"):
        device(host, name)
    (host.dev / "infiniband/uverbs9").touch()  # No device node.
    verbs = {"resource": VERBS, "paths": ["/dev/infiniband/*"], "shared": ["/dev/infiniband/rdma_cm"]}
    fuse = {"resource": FUSE, "paths": ["/dev/fuse"], "count": 3, "permissions": "r"}
    one = await node.served(2, "--backend", "none", *configure(node, verbs, fuse), resource=VERBS)
    await node.allocatable_is(3, FUSE)
    given = await node.admit("pod", VERBS)
    (held,) = given.devices[VERBS]
    assert set(given.answer.device_nodes) == {DeviceNode(path, path) for path in (held, "/dev/infiniband/rdma_cm")}
    node.shared = [FUSE]
    given = await node.admit("other", FUSE, count=2)
    assert given.answer.device_nodes == (DeviceNode("/dev/fuse", "/dev/fuse", "r"),)
    # A file that vanishes is lost while its pod runs.
    (host.root / held[1:]).unlink()
    await node.allocatable_is(1, VERBS)
    assert (node.capacity(VERBS), list(await reasons(one))) == (2, [held])
    other = next(f"infiniband/uverbs{number}" for number in (0, 1) if f"uverbs{number}" not in held)
    (host.dev / other).unlink()
    await node.allocatable_is(0, VERBS)
    await node.pass_time(100)
    assert node.capacity(VERBS) == 2
    for name in (held.removeprefix("/dev/"), other):
        device(host, name)
    await node.allocatable_is(2, VERBS)
    # What every container needs makes all of them unhealthy where it is missing.
    (host.dev / "infiniband/rdma_cm").unlink()
    await node.allocatable_is(0, VERBS)
    assert "rdma_cm" in str(await reasons(one))
    assert node.allocatable(FUSE) == 3


async def test_files_that_no_rule_describes_any_more_go_and_new_rules_count(node: Node) -> None:
    host = Host(node)
    for name in ("fuse", "kvm"):
        device(host, name)
    fuse, kvm = ({"resource": f"vendor.com/{name}", "paths": [f"/dev/{name}"]} for name in ("fuse", "kvm"))
    await node.start_kubelet()
    node.gateway(*configure(node))  # Beside simulated GPUs, and without a rule at first.
    await node.allocatable_is(8)
    configure(node, fuse)
    await node.allocatable_is(1, FUSE)
    configure(node, kvm)
    await node.allocatable_is(1, "vendor.com/kvm")
    await node.allocatable_is(0, FUSE)
    await node.until(lambda: node.capacity(FUSE) == 0, "its going", 900)
    assert node.allocatable() == 8


async def test_files_of_one_numa_node_and_the_least_used_ones_are_preferred(node: Node) -> None:
    host = Host(node)
    for number, source in enumerate(("/dev/null", "/dev/zero", "/dev/full")):
        (host.dev / f"x{number}").symlink_to(source)
        status = os.stat(source)  # noqa: PTH116 - the row's own
        assert stat.S_ISCHR(status.st_mode)
        folder = host.sys / f"dev/char/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}/device"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{number % 2}\n")
    await node.served(
        6, "--backend", "none", *configure(node, {"resource": FUSE, "paths": ["/dev/x*"], "count": 2}), resource=FUSE
    )
    async with node.plugin(FUSE) as plugin:
        listed = {device.id: device.numa_nodes for device in await plugin.first_list()}
        assert listed["/dev/x1::0"] == (1,)
        assert await plugin.prefer([*listed], 2) == {"/dev/x1::0", "/dev/x1::1"}
        assert await plugin.prefer([*listed], 3) == {"/dev/x0::0", "/dev/x0::1", "/dev/x2::0"}
        assert await plugin.prefer([*listed], 2, ["/dev/x1::1"]) == {"/dev/x1::0", "/dev/x1::1"}
        assert await plugin.prefer(["/dev/x0::1", "/dev/x2::0", "/dev/x2::1"], 1) == {"/dev/x2::0"}


# Several backends.


def both(node: Node) -> tuple[Nvidia, Amd]:
    """Make a node with two GPUs of AMD and four of NVIDIA."""
    amd = Amd(node, lambda root: Sysfs(root, [Board("0000:05:00.0"), Board("0000:06:00.0")]).write())
    nvidia = Nvidia(node)
    for gpu in nvidia.world.gpus:
        folder = nvidia.sys / "bus/pci/devices" / gpu.pci.lower()
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
    return nvidia, amd


def auto(node: Node, nvidia: Nvidia, *options: str) -> Gateway:
    """Start a gateway that finds out what is there."""
    return node.gateway("--backend", "auto", "--container-driver-root", str(nvidia.driver), *options)


async def test_each_vendors_gpus_are_found_and_fail_alone(node: Node) -> None:
    nvidia, amd = both(node)
    await node.start_kubelet()
    one = auto(node, nvidia)
    await node.allocatable_is(4)
    await node.allocatable_is(2, AMD)
    given = await node.admit("pod", AMD)
    assert "NVIDIA_VISIBLE_DEVICES" not in given.answer.envs
    nvidia.event(0, 79)
    (amd.sys / "module").rename(amd.root / "away")
    await node.allocatable_is(3)
    await node.allocatable_is(0, AMD)
    assert len(await reasons(one)) == 3
    (amd.root / "away").rename(amd.sys / "module")
    await node.allocatable_is(2, AMD)
    await one.order("release", ids=[nvidia.uuids[0]])
    await one.order("acquire", ids=[nvidia.uuids[0]])
    await node.allocatable_is(4)
    assert await one.terminate() == 0


async def test_one_that_cannot_start_keeps_no_other_from_being_offered(node: Node) -> None:
    nvidia, _ = both(node)
    nvidia.fails("nvmlInit", 9)
    await node.start_kubelet()
    one = auto(node, nvidia, "--fail-on-init-error")
    await node.allocatable_is(2, AMD)
    await node.pass_time(100)
    assert one.alive
    assert "NVML" in str((await one.status())["hindrances"])
    nvidia.works("nvmlInit")
    await node.allocatable_is(4, seconds=130)


async def test_an_edit_is_for_every_source(node: Node) -> None:
    nvidia, _ = both(node)
    await node.start_kubelet()
    auto(node, nvidia, *configure(node))
    await node.allocatable_is(4)
    await node.allocatable_is(2, AMD)
    configure(node, excludeDevices=["0000:06:00.0", nvidia.uuids[2]])
    await node.allocatable_is(3)
    await node.allocatable_is(1, AMD)


async def test_of_two_sources_of_one_name_the_first_keeps_it_and_people_are_told(node: Node) -> None:
    host = Host(node)
    device(host, "fuse")
    node.simulate({FUSE: {"gpus": 2}, AMD: {"gpus": 1}})
    one = await node.served(2, *configure(node), resource=FUSE)
    configure(node, {"resource": FUSE, "paths": ["/dev/fuse"]})
    await node.allocatable_after(30, 2, FUSE)
    assert one.said("a resource is listed twice")
    (hindrance,) = (await one.status())["hindrances"]
    assert hindrance["source"] == "generic"
    assert f"{FUSE} of simulated keeps the name, and that of generic isn't offered" in hindrance["reason"]
    node.simulate({AMD: {"gpus": 1}})
    await node.allocatable_is(1, FUSE)
    assert "keeps the name" not in str((await one.status())["hindrances"])
    given = await node.admit("pod", FUSE)
    assert [one.host_path for one in given.answer.device_nodes] == ["/dev/fuse"]


@pytest.mark.parametrize(
    ("files", "code", "status"),
    [
        pytest.param(["fuse"], 9, None, id="others have devices"),
        pytest.param([], 9, 1, id="no other has one"),
    ],
)
async def test_a_source_that_gives_up_ends_the_gateway_only_where_no_other_has_a_device(
    node: Node, nvidia: Nvidia, files: list[str], code: int, status: int | None
) -> None:
    nvidia.fails("nvmlInit", code)
    for name in files:
        device(nvidia, name)
    await node.start_kubelet()
    one = nvidia.gateway(*configure(node, {"resource": FUSE, "paths": ["/dev/fuse"]}))
    if status is not None:
        await node.until(lambda: not one.alive, "its end")
        assert one.process.ended.result() == status
        return
    await node.allocatable_is(1, FUSE)
    assert not await one.is_ready()
    hindrances = {each["reason"]: each["held_up"] for each in (await one.status())["hindrances"]}
    assert any("it gave up, and is asked again" in reason and held_up for reason, held_up in hindrances.items())
    await node.pass_time(300)
    assert len(one.said("a device source gave up")) <= 8, "it asks too often"
    nvidia.works("nvmlInit")
    await node.allocatable_is(4, seconds=61)
    assert not (await one.status())["hindrances"]
    nvidia.fails("nvmlInit", code)
    nvidia.world.fails("nvmlDeviceGetCount", code)
    nvidia.show()
    await node.allocatable_is(0)
    await node.pass_time(120)
    assert one.alive  # It had told of its GPUs once.


async def test_a_source_that_needs_another_process_gets_one(node: Node, nvidia: Nvidia) -> None:
    device(nvidia, "fuse")
    one = await nvidia.served(4, *configure(node, {"resource": FUSE, "paths": ["/dev/fuse"]}))
    await node.allocatable_is(1, FUSE)
    for call in ("nvmlInit", "nvmlDeviceGetCount"):
        nvidia.fails(call, 18)
    await node.pass_time(1200)
    assert one.process.ended.result() == 75


async def test_a_source_that_hangs_from_the_start_keeps_no_other_from_being_offered(node: Node, nvidia: Nvidia) -> None:
    device(nvidia, "fuse")
    nvidia.fails("nvmlInit", 0, hangs=3600)
    await nvidia.served(1, *configure(node, {"resource": FUSE, "paths": ["/dev/fuse"]}), resource=FUSE)
    nvidia.works("nvmlInit")
    await node.allocatable_is(4)


async def test_a_source_that_told_nothing_is_named_and_its_devices_are_as_before(node: Node, nvidia: Nvidia) -> None:
    device(nvidia, "fuse")
    await node.start_kubelet()
    options = configure(node, {"resource": FUSE, "paths": ["/dev/fuse"]})
    one = nvidia.gateway(*options)
    await node.allocatable_is(4)
    await node.allocatable_is(1, FUSE)
    one.kill()
    nvidia.fails("nvmlInit", 0, hangs=3600)
    two = nvidia.gateway(*options)
    await node.until(lambda: two.said("registered", resource=FUSE), "its registration")
    assert "it has not reported its devices yet" in str((await two.status())["hindrances"])
    assert set((await two.states()).values()) == {"not checked yet"}
    assert "backend nvidia: it has not reported its devices yet" in (await two.get("probes", "/readyz"))[1]
    await node.allocatable_is(1, FUSE)
    assert node.allocatable() == 4
    nvidia.works("nvmlInit")
    await node.pass_time(30)
    assert set((await two.states()).values()) == {"healthy"}
    assert not (await two.status())["hindrances"]
    assert await two.is_ready()


async def test_an_order_for_all_hardware_is_for_every_source_and_one_for_a_gpu_for_its_own(node: Node) -> None:
    nvidia, amd = both(node)
    await node.start_kubelet()
    one = auto(node, nvidia)
    await node.allocatable_is(4)
    await node.allocatable_is(2, AMD)
    (first, second) = (board.pci for board in amd.tree.boards)
    assert (await one.order("release", ids=[first, nvidia.uuids[1]]))["devices"] == [nvidia.uuids[1], first]
    await node.allocatable_is(3)
    await node.allocatable_is(1, AMD)
    assert sorted((await one.order("release", ids=[]))["devices"]) == sorted([*nvidia.uuids, first, second])
    await node.allocatable_is(0)
    await node.allocatable_is(0, AMD)
    assert len((await one.order("acquire", ids=[]))["devices"]) == 6
    await node.allocatable_is(4)
    await node.allocatable_is(2, AMD)


async def test_under_an_old_name_only_the_source_that_has_the_hardware_answers(node: Node) -> None:
    host = Host(node)
    device(host, "fuse")
    node.simulate({"nvidia.com/gpu": {"gpus": [{"uuid": "GPU-a"}]}})
    sharing = {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 2}], "renameByDefault": True}}
    node.shared = ("nvidia.com/gpu.shared", "nvidia.com/gpu")
    await node.start_kubelet("1.8")  # It asks at each start of a container.
    fuse = {"resource": FUSE, "paths": ["/dev/fuse"]}
    one = node.gateway(*configure(node, fuse))
    await node.allocatable_is(1)
    await node.allocatable_is(1, FUSE)
    await node.admit("gpu")
    await node.admit("file", FUSE)
    (node.folder / "config.yaml").write_text(json.dumps({"sharing": sharing, "gateway": {"devices": [fuse]}}))
    await node.pass_time(30)
    again = await node.restart_container("gpu")
    assert again.answer.envs == {"NVIDIA_VISIBLE_DEVICES": "GPU-a"}
    one.kill()
    configure(node)
    await node.registered(*configure(node))
    await node.pass_time(30)
    with pytest.raises(Refused):
        await node.restart_container("file")


@pytest.mark.parametrize("kind", ["0x030000", "0x030200", "0x120000", "0x020000"])
async def test_a_gpu_is_known_by_its_pci_class_and_nothing_else_counts(node: Node, nvidia: Nvidia, kind: str) -> None:
    for gpu in nvidia.world.gpus:
        folder = nvidia.sys / "bus/pci/devices" / gpu.pci.lower()
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text(f"{kind}\n")
    await node.start_kubelet()
    one = auto(node, nvidia)
    if kind == "0x020000":
        await node.until(lambda: not one.alive, "its end")
        assert "No GPU of NVIDIA or AMD" in str(one.process.log)
        return
    await node.allocatable_is(4)


async def test_nvml_is_taken_from_the_drivers_root(nvidia: Nvidia) -> None:
    (nvidia.driver / "usr/lib64").rename(nvidia.driver / "lib64")
    await nvidia.served()
