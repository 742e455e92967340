"""Devices that are files: which files are devices, what a container gets, and what becomes of them with their rules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from devices.model import DeviceNode
from tests.contract.hardware import Host
from tests.contract.node import Gateway, Node, Refused
from tests.contract.test_sources import configure, device, reasons

FPGA = "example.com/fpga"
_NODE = Path("/dev/null").stat().st_rdev
NULL = f"{os.major(_NODE)}:{os.minor(_NODE)}"
RULE: dict[str, Any] = {"resource": FPGA, "paths": ["/dev/fpga*"]}


async def ready(node: Node, *rules: dict[str, Any], version: str = "1.34") -> Gateway:
    """Start a kubelet and a gateway that has these rules alone."""
    await node.start_kubelet(version)
    one = node.gateway("--backend", "none", *configure(node, *rules))
    await node.eventually(one.is_ready, "readiness")
    return one


async def listed(one: Gateway, resource: str = FPGA) -> list[str]:
    """Return the IDs of a resource's devices."""
    found = {it["name"]: it["devices"] for it in (await one.status())["resources"]}
    return [each["id"] for each in found.get(resource, ())]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param({}, ["/dev/fpga0", "/dev/fpga1"], id="each that matches"),
        pytest.param({"paths": ["/dev/fpga0", "/dev/f*0"]}, ["/dev/fpga0"], id="each once"),
        pytest.param(
            {"paths": ["/dev/fpga0"], "count": 2}, ["/dev/fpga0::0", "/dev/fpga0::1"], id="each so many times"
        ),
        pytest.param({"paths": ["/dev/ib/*"]}, ["/dev/ib/rdma_cm", "/dev/ib/uverbs0"], id="in a folder"),
        pytest.param(
            {"paths": ["/dev/ib/*"], "shared": ["/dev/ib/rdma_cm"]},
            ["/dev/ib/uverbs0"],
            id="what all share is no device",
        ),
        pytest.param({"paths": ["/dev/ib"]}, ["/dev/ib"], id="a folder that is named"),
        pytest.param({"paths": ["/dev/i*"]}, [], id="a folder that only matches is none"),
        pytest.param({"paths": ["/dev/text"]}, [], id="an ordinary file is none"),
        pytest.param({"paths": ["/dev/broken"]}, [], id="a link to nowhere is none"),
        pytest.param({"paths": ["/dev/odd*"]}, [], id="a name that would not be an ID is none"),
    ],
)
async def test_which_files_are_devices(node: Node, rule: dict[str, Any], expected: list[str]) -> None:
    host = Host(node)
    for name in ("fpga1", "fpga0", "ib/uverbs0", "ib/rdma_cm", "odd::1", "odd\x1b[2J", ".fpga7"):
        device(host, name)
    (host.dev / "broken").symlink_to("/nowhere")
    (host.dev / "text").write_text("text")
    one = await ready(node, RULE | rule)
    assert sorted(await listed(one)) == expected


@pytest.mark.parametrize(
    ("content", "expected"), [("1\n", (1,)), ("0\n", (0,)), ("-1\n", ()), ("99999\n", ()), ("nonsense", ()), (None, ())]
)
async def test_a_file_is_listed_on_its_numa_node(node: Node, content: str | None, expected: tuple[int, ...]) -> None:
    host = Host(node)
    device(host, "fpga0")
    folder = host.sys / "dev/char" / NULL / "device"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "numa_node").write_text(content)
    await ready(node, RULE)
    await node.allocatable_is(1, FPGA)
    async with node.plugin(FPGA) as plugin:
        assert [one.numa_nodes for one in await plugin.first_list()] == [expected]


@pytest.mark.parametrize(
    ("rule", "asked", "expected"),
    [
        pytest.param({}, ["/dev/fpga1", "/dev/fpga0"], ["/dev/fpga0", "/dev/fpga1"], id="its files, in order"),
        pytest.param({"count": 2}, ["/dev/fpga0::1", "/dev/fpga0::0"], ["/dev/fpga0"], id="each once"),
        pytest.param(
            {"shared": ["/dev/control*", "/dev/lacks"]},
            ["/dev/fpga0"],
            ["/dev/fpga0", "/dev/control0", "/dev/control1"],
            id="and what all share, as far as it is there",
        ),
    ],
)
async def test_containers_get_files(node: Node, rule: dict[str, Any], asked: list[str], expected: list[str]) -> None:
    host = Host(node)
    for name in ("fpga0", "fpga1", "control1", "control0"):
        device(host, name)
    if "shared" in rule:
        device(host, "lacks")
    one = await ready(node, RULE | rule | {"permissions": "rm"})
    await node.allocatable_is(4 if "count" in rule else 2, FPGA)
    if "shared" in rule:
        (host.dev / "lacks").unlink()
    async with node.plugin(FPGA) as plugin:
        answer = await plugin.allocate(*asked)
        assert answer.device_nodes == tuple(DeviceNode(path, path, "rm") for path in expected)
        assert (answer.envs, answer.mounts, answer.annotations, answer.cdi_devices) == ({}, (), {}, ())
    known = (await one.order("devices"))["facts"][FPGA]
    assert known["/dev/fpga0"]["nodes"] == ["/dev/fpga0"]


async def test_an_edit_of_a_rule_counts_at_once_and_says_what_became_of_its_devices(node: Node) -> None:
    host = Host(node)
    for name in ("fpga0", "fpga1", "nic0"):
        device(host, name)
    one = await ready(node, RULE)
    await node.allocatable_is(2, FPGA)
    given = await node.admit("pod", FPGA)
    (held,) = given.devices[FPGA]
    free = next(path for path in ("/dev/fpga0", "/dev/fpga1") if path != held)
    configure(node, RULE | {"paths": ["/dev/nic*", held]})
    await _lists(node, one, "/dev/nic0", held)
    configure(node, RULE | {"count": 2})
    await _lists(node, one, f"{free}::0", f"{free}::1", held, only=False)
    assert node.allocatable(FPGA) == 2  # Nobody else gets the file that the pod has under another ID.
    (host.dev / free.removeprefix("/dev/")).unlink()
    await node.allocatable_is(0, FPGA)
    assert (await one.states(FPGA))[f"{free}::0"] == "lost"
    device(host, free.removeprefix("/dev/"))
    await node.allocatable_is(2, FPGA)
    node.remove("pod")
    await node.allocatable_is(4, FPGA, seconds=900)
    for count in (3, 2):
        configure(node, RULE | {"count": count})
        ids = [f"{path}::{number}" for path in ("/dev/fpga0", "/dev/fpga1") for number in range(count)]
        await _lists(node, one, *ids)


async def _lists(node: Node, one: Gateway, *expected: str, only: bool = True) -> None:
    async def so() -> bool:
        there = set(await listed(one))
        return there == set(expected) if only else there >= set(expected)

    await node.eventually(so, f"a list of {sorted(expected)}", 3)


async def test_a_list_and_a_container_without_what_all_share_are_refused(node: Node) -> None:
    host = Host(node)
    device(host, "fpga0")
    one = await ready(node, RULE | {"shared": ["/dev/control*"]})
    await node.until(lambda: node.capacity(FPGA) == 1, "the file")
    assert "needs /dev/control*" in (await reasons(one))["/dev/fpga0"]
    device(host, "control0")
    await node.allocatable_is(1, FPGA)


@pytest.mark.parametrize(
    ("must", "count", "chosen"),
    [
        pytest.param([], 0, None, id="none"),
        pytest.param([], 3, None, id="more than there are"),
        pytest.param(["/dev/fpga0", "/dev/fpga1"], 1, None, id="fewer than must be"),
        pytest.param(["/dev/fpga7"], 1, None, id="one that isn't available"),
        pytest.param(["/dev/fpga1"], 1, {"/dev/fpga1"}, id="the one that must be"),
    ],
)
async def test_no_impossible_choice_is_made(node: Node, must: list[str], count: int, chosen: set[str] | None) -> None:
    host = Host(node)
    device(host, "fpga0")
    device(host, "fpga1")
    await ready(node, RULE)
    await node.allocatable_is(2, FPGA)
    async with node.plugin(FPGA) as plugin:
        if chosen is not None:
            assert await plugin.prefer(["/dev/fpga0", "/dev/fpga1"], count, must) == chosen
            return
        with pytest.raises(Refused):
            await plugin.prefer(["/dev/fpga0", "/dev/fpga1"], count, must)


async def test_of_files_that_several_may_have_each_is_given_once_first(node: Node) -> None:
    host = Host(node)
    for name in ("fpga0", "fpga1"):
        device(host, name)
    await ready(node, RULE | {"count": 3})
    ids = [f"/dev/fpga{file}::{number}" for file in range(2) for number in range(3)]
    async with node.plugin(FPGA) as plugin:
        assert await plugin.prefer(ids, 2) == {ids[0], ids[3]}
        assert await plugin.prefer(ids[1:], 2) == {ids[1], ids[3]}


async def test_a_file_goes_with_its_rule_and_its_pod_over_a_restart(node: Node) -> None:
    host = Host(node)
    for name in ("fpga0", "fpga1"):
        device(host, name)
    one = await ready(node, RULE)
    await node.allocatable_is(2, FPGA)
    (held,) = (await node.admit("pod", FPGA)).devices[FPGA]
    one.kill()
    two = node.gateway("--backend", "none", *configure(node, {"resource": "a.com/nic", "paths": ["/dev/nic*"]}))
    await node.pass_time(30)
    assert await listed(two) in ([], [held])
    assert node.allocatable(FPGA) == 0
    configure(node, RULE)
    await node.allocatable_is(2, FPGA)
    assert (await node.restart_container("pod")).devices[FPGA] == (held,)


@pytest.mark.parametrize("version", ["1.8", "1.37"])
async def test_files_beside_a_silent_driver_are_given_as_files_and_gpus_as_gpus(node: Node, version: str) -> None:
    from tests.contract.hardware import Nvidia  # noqa: PLC0415 - this row alone has GPUs

    nvidia = Nvidia(node)
    for name in ("fpga0", "fpga1"):
        device(nvidia, name)
    await node.start_kubelet(version)
    options = (*configure(node, RULE), "--backend", "nvidia", "--container-driver-root", str(nvidia.driver))
    one = node.gateway(*options, environment={"FAIL_ON_INIT_ERROR": "false"})
    await node.allocatable_is(4)
    await node.allocatable_is(2, FPGA)
    one.kill()
    nvidia.fails("nvmlInit", 999)
    two = node.gateway(*options, environment={"FAIL_ON_INIT_ERROR": "false"})
    await node.until(lambda: len(two.said("registered")) == 2, "its registrations")
    await node.allocatable_is(2, FPGA)
    await node.allocatable_is(4)
    assert set((await two.states()).values()) == {"not checked yet"}
    file, gpu = await node.admit("file", FPGA), await node.admit("gpu")
    assert [one.host_path for one in file.answer.device_nodes] == list(file.devices[FPGA])
    assert (dict(file.answer.envs), [*gpu.answer.envs]) == ({}, ["NVIDIA_VISIBLE_DEVICES"])
    (nvidia.dev / "fpga1").unlink()
    await node.allocatable_is(1, FPGA)
    nvidia.works("nvmlInit")
    await node.pass_time(60)
    assert set((await two.states()).values()) == {"healthy"}
    await node.truthful()
