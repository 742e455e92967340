"""AMD's GPUs, as sysfs shows them and as they fail."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from devices.model import ContainerAnswer, DeviceNode
from tests.contract import wire
from tests.contract.clock import patches
from tests.contract.hardware import Amd
from tests.contract.node import Gateway, Node
from tests.fakes.amd import Board, Sysfs

GPU = "amd.com/gpu"
FIRST, SECOND, THIRD = "0000:05:00.0", "0000:27:00.0", "0000:47:00.0"
MODES = ("CPX", "NPS4")


def three(root: Path) -> Sysfs:
    """Two GPUs that are linked by XGMI, and one on another NUMA node."""
    return Sysfs(root, [Board(FIRST, 0, hive=1), Board(SECOND, 1), Board(THIRD, 1, hive=1)]).write()


def parted(root: Path, *modes: tuple[str, str]) -> Sysfs:
    """GPUs in two parts each."""
    boards = [Board(pci, 0, mode, 2) for pci, mode in zip((FIRST, SECOND, THIRD), modes, strict=False)]
    return Sysfs(root, boards).write()


async def reasons(one: Gateway) -> dict[str, str]:
    """Return why devices are unhealthy, by ID."""
    resources = (await one.status())["resources"]
    devices = (device for resource in resources for device in resource["devices"])
    return {device["id"]: device["reason"] for device in devices if device["health"] != "Healthy"}


async def test_a_pod_gets_the_nodes_of_its_gpu_and_the_one_that_all_need(node: Node) -> None:
    host = Amd(node, three)
    one = await host.served(3)
    async with node.plugin(GPU) as plugin:
        nodes = ("/dev/kfd", "/dev/dri/card2", "/dev/dri/renderD129")
        given = await plugin.allocate(SECOND)
        assert sorted(given.device_nodes, key=lambda one: one.host_path) == sorted(
            (DeviceNode(path, path) for path in nodes), key=lambda one: one.host_path
        )
        assert given == ContainerAnswer(device_nodes=given.device_nodes)
        assert {device.id: device.numa_nodes for device in await plugin.first_list()}[SECOND] == (1,)
        assert await plugin.prefer([FIRST, SECOND, THIRD], 2) == {FIRST, THIRD}
    assert await one.terminate() == 0


async def test_gpus_of_one_numa_node_are_preferred_where_there_is_no_xgmi(node: Node) -> None:
    host = Amd(node, lambda root: Sysfs(root, [Board(FIRST, 0), Board(SECOND, 1), Board(THIRD, 1)]).write())
    await host.served(3)
    async with node.plugin(GPU) as plugin:
        assert await plugin.prefer([FIRST, SECOND, THIRD], 2) == {SECOND, THIRD}


@pytest.mark.parametrize("strategy", ["single", "mixed"])
async def test_partitions_are_offered_by_one_name_or_by_their_modes(node: Node, strategy: str) -> None:
    host = Amd(node, lambda root: parted(root, MODES, MODES))
    name = GPU if strategy == "single" else "amd.com/cpx_nps4"
    await host.served(4, "--resource-naming-strategy", strategy, resource=name)
    given = await node.admit("pod", name, count=2)
    async with node.plugin(name) as plugin:
        devices = {device.id: device for device in await plugin.first_list()}
    assert set(given.devices[name]) in ({FIRST, "amdgpu_xcp_0"}, {SECOND, "amdgpu_xcp_1"})  # Of one GPU.
    assert len(devices) == 4


async def test_single_wants_all_gpus_partitioned_alike(node: Node) -> None:
    host = Amd(node, lambda root: parted(root, MODES, ("DPX", "NPS1")))
    await node.start_kubelet()
    one = host.gateway("--fail-on-init-error")
    await node.until(lambda: not one.alive, "its end")
    other = host.gateway("--resource-naming-strategy", "mixed")
    await node.allocatable_is(2, "amd.com/cpx_nps4")
    await node.allocatable_is(2, "amd.com/dpx_nps1")
    await other.terminate()


async def test_a_gpu_that_kfd_or_the_driver_does_not_know_is_unhealthy_and_the_others_are_not(node: Node) -> None:
    boards = [Board(FIRST), Board(SECOND, in_kfd=False), Board(THIRD)]
    host = Amd(node, lambda root: Sysfs(root, boards).write())
    one = await host.served(2)
    assert (node.capacity(GPU), list(await reasons(one))) == (3, [SECOND])
    assert "KFD" in (await reasons(one))[SECOND]
    host.tree.boards[1] = Board(SECOND)
    host.tree.write()
    await node.allocatable_is(3, GPU)
    shutil.rmtree(host.tree.pci(host.tree.boards[2]) / "drm")
    await node.allocatable_is(2, GPU)
    assert list(await reasons(one)) == [THIRD]


async def test_a_gpu_without_a_driver_is_told(node: Node) -> None:
    host = Amd(node, three)
    shutil.rmtree(host.tree.pci(host.tree.boards[1]) / "drm")
    (host.tree.pci(host.tree.boards[1]) / "driver").unlink()
    (host.tree.driver / SECOND).unlink()
    one = await host.served(2)
    (left_out,) = (await one.status())["unusable"]
    assert left_out["id"] == SECOND


async def test_without_its_driver_the_gpus_are_unhealthy_until_it_is_back(node: Node) -> None:
    host = Amd(node, three)
    away = host.root / "away"
    module = host.sys / "module"
    module.rename(away)
    await node.start_kubelet()
    one = host.gateway()
    await node.pass_time(30)
    assert (await one.status())["hindrances"]
    away.rename(module)
    await node.allocatable_is(3, GPU)
    given = await node.admit("pod", GPU)
    module.rename(away)
    await node.allocatable_is(0, GPU)
    await node.pass_time(30)
    assert node.capacity(GPU) == 3
    assert all("amdgpu" in reason for reason in (await reasons(one)).values())
    away.rename(module)
    await node.allocatable_is(3, GPU)
    assert given.devices[GPU][0] not in await reasons(one)


async def test_a_partition_that_is_gone_is_unhealthy_and_a_new_layout_is_not(node: Node) -> None:
    host = Amd(node, lambda root: parted(root, MODES, MODES))
    one = await host.served(4)
    given = await node.admit("pod", GPU)
    shutil.rmtree(host.sys / "devices/platform/amdgpu_xcp_1")
    await node.allocatable_is(2, GPU)  # Nobody knows which of the two parts is which.
    assert set(await reasons(one)) == {SECOND, "amdgpu_xcp_1"}
    host.tree.boards = [Board(FIRST, 0, ("SPX", "NPS1")), Board(SECOND, 0, ("SPX", "NPS1"))]
    host.tree.write()
    await node.pass_time(60)
    held = given.devices[GPU][0]
    offered = {FIRST, SECOND} if held == FIRST else {SECOND}
    assert node.allocatable(GPU) == len(offered)
    node.remove("pod")
    await node.allocatable_is(2, GPU, seconds=900)
    await node.until(lambda: node.capacity(GPU) == 2, "the partitions' going", 900)


async def test_released_gpus_are_left_alone_until_they_are_acquired(node: Node) -> None:
    host = Amd(node, three)
    one = await host.served(3)
    await one.order("release", ids=[SECOND])
    await node.allocatable_is(2, GPU)
    assert node.capacity(GPU) == 3
    await one.order("acquire", ids=[SECOND])
    await node.allocatable_is(3, GPU)


async def test_what_the_metrics_exporter_calls_unhealthy_is_so(node: Node) -> None:
    host = Amd(node, three)
    ill: list[str] = [SECOND]

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    async def said(_request: bytes, _context: object) -> bytes:
        states = [
            field(3, b"unhealthy" if pci in ill else b"healthy") + field(5, pci.encode()) for pci in (FIRST, SECOND)
        ]
        return b"".join(field(1, state) for state in states)

    patches.setattr("devices.gpu.amd.exporter.grpc", wire.Grpc(node.clock))
    handlers: dict[str, Any] = {"List": grpc.unary_unary_rpc_method_handler(said)}
    server = wire.Server([grpc.method_handlers_generic_handler("metricssvc.MetricsService", handlers)])
    server.add_insecure_port(f"unix:{host.root / 'exporter.sock'}")
    await server.start()
    one = await host.served(2)
    assert "exporter" in (await reasons(one))[SECOND]
    ill.clear()
    await node.allocatable_is(3, GPU)
    ill.append(FIRST)
    await node.allocatable_is(2, GPU)
    await server.stop(None)
    await node.allocatable_after(200, 2, GPU)
    await node.allocatable_after(200, 3, GPU)  # What it said long ago counts no longer.
    assert len(one.said("metrics exporter silent")) == 1
    server = wire.Server([grpc.method_handlers_generic_handler("metricssvc.MetricsService", handlers)])
    server.add_insecure_port(f"unix:{host.root / 'exporter.sock'}")
    await server.start()
    await node.allocatable_is(2, GPU)
    await node.pass_time(100)
    assert len(one.said("metrics exporter answers again")) == 1


async def test_a_node_without_a_metrics_exporter_is_told_nothing_of_it(node: Node) -> None:
    one = await Amd(node, three).served(3)
    await node.pass_time(100)
    assert not one.said("metrics exporter silent")


async def test_partitions_of_before_the_restart_are_not_lost_but_gone(node: Node) -> None:
    host = Amd(node, lambda root: parted(root, MODES, MODES))
    one = await host.served(4)
    one.kill()
    host.tree.boards = [Board(FIRST, 0, ("SPX", "NPS1")), Board(SECOND, 0, ("SPX", "NPS1"))]
    host.tree.write()
    host.gateway()
    await node.until(lambda: node.capacity(GPU) == node.allocatable(GPU) == 2, "the whole GPUs", 900)


async def test_a_gpu_whose_mode_cannot_be_read_is_listed_as_before(node: Node) -> None:
    host = Amd(node, lambda root: parted(root, MODES, MODES))
    one = await host.served(4)
    (host.tree.pci(host.tree.boards[0]) / "current_compute_partition").unlink()
    await node.allocatable_is(2, GPU)
    assert set(await reasons(one)) == {FIRST, "amdgpu_xcp_0"}
    host.tree.write()
    await node.allocatable_is(4, GPU)


async def test_the_gauges_tell_of_each_gpu(node: Node) -> None:
    host = Amd(node, three)
    folder = host.tree.pci(host.tree.boards[0])
    (folder / "mem_info_vram_used").write_text(f"{3 << 20}\n")
    (folder / "mem_info_vram_total").write_text(f"{9 << 20}\n")
    one = await host.served(3, "--gpu-metrics")
    _, body = await one.get("metrics", "/metrics")
    (line,) = [line for line in body.splitlines() if line.startswith("DCGM_FI_DEV_FB_FREE{")]
    assert f'UUID="{FIRST}"' in line
    assert line.endswith(" 6.0")
