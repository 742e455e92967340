"""GPUs that an operator leaves out (``--exclude-devices``), and what becomes of devices that went: lost, or gone for good."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.contract.hardware import Amd, Nvidia
from tests.contract.node import GPU, Gateway, Node, gpus
from tests.contract.test_nvidia import UNKNOWN
from tests.contract.test_nvml import facts
from tests.contract.test_sharing import configure, sliced
from tests.fakes import nvml
from tests.fakes.amd import Board, Sysfs

BIG = "nvidia.com/mig-3g.40gb"
DISPLAY = "NVIDIA T400 4GB"
PCI = "0000:c5:00.0"


def leaving_out(node: Node, *patterns: str, strategy: str = "none") -> tuple[str, str]:
    """Write a configuration that leaves GPUs out; return the option that names it."""
    gateway = {"excludeDevices": list(patterns)}
    return configure(node, {"flags": {"migStrategy": strategy}, "gateway": gateway})


async def unusable(one: Gateway) -> list[dict[str, Any]]:
    """Return the GPUs that no resource lists."""
    found: list[dict[str, Any]] = (await one.status())["unusable"]
    return found


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "simulated"])
async def test_a_gpu_of_any_vendor_is_left_out_and_the_others_keep_their_numbers(node: Node, vendor: str) -> None:
    resource, patterns, ids = GPU, ["1"], [f"GPU-{number}" for number in range(3)]
    if vendor == "nvidia":
        nvidia = Nvidia(node, lambda path: nvml.dgx(path, 3))
        nvidia.world.gpus[1].name, nvidia.world.gpus[1].pci = DISPLAY, PCI
        nvidia.show()
        start, patterns, ids = nvidia.gateway, [*patterns, PCI, "*T400*", nvidia.uuids[1]], nvidia.uuids
    elif vendor == "amd":
        boards = [Board("0000:03:00.0"), Board(PCI, product=DISPLAY), Board("0000:e3:00.0")]
        host = Amd(node, lambda root: Sysfs(root, boards).write())
        start, patterns, resource = host.gateway, [*patterns, PCI, "*T400*"], "amd.com/gpu"
        ids = [board.pci for board in boards]
    else:
        node.simulate(gpus(0, 1, 2))
        start = node.gateway  # type: ignore[assignment]
    await node.start_kubelet()
    one = start()
    await node.allocatable_is(3, resource)
    before = await facts(one)
    await one.terminate()
    for pattern in patterns:
        one = start("--exclude-devices", pattern)
        await node.until(lambda: node.capacity(resource) == node.allocatable(resource) == 2, "its going", 900)
        now, (out,) = await facts(one), await unusable(one)
        assert {uuid: (known["index"], known["minor"]) for uuid, known in now.items()} == {
            uuid: (before[uuid]["index"], before[uuid]["minor"]) for uuid in (ids[0], ids[2])
        }
        assert (out["id"], out["index"], out["excluded"]) == (ids[1], "1", True)
        assert out["reason"] == f"the setting exclude-devices names it ({pattern})"
        assert not (await one.status())["hindrances"]
        await node.eventually(one.is_ready, "readiness")
        await one.terminate()


async def test_what_is_left_out_does_not_count_for_the_mig_strategy(node: Node, nvidia: Nvidia) -> None:
    for index in range(3):
        nvidia.world.mig(index, "3g.40gb", "3g.40gb")
    nvidia.world.gpus[3].name = DISPLAY
    nvidia.show()
    await nvidia.served(6, *leaving_out(node, "*t400*", strategy="single"))
    nvidia.world.no_mig(2)
    nvidia.show()  # Now the node can't be named: its list stays, but for what isn't there and what is left out.
    await node.allocatable_is(4)
    leaving_out(node, "*t400*", "0", strategy="single")
    await node.allocatable_is(2)
    await node.until(lambda: node.capacity() == 4, "their going", 900)


async def test_a_gpu_that_is_left_out_is_told_once_with_all_its_partitions(node: Node, nvidia: Nvidia) -> None:
    for index, profiles in enumerate((("3g.40gb", "3g.40gb"), ("3g.40gb",), ("3g.40gb",))):
        nvidia.mig(index, *profiles)
    one = await nvidia.served(1, *leaving_out(node, "0", "1:0", strategy="mixed"), resource=BIG)
    await node.allocatable_is(1, GPU)
    assert [(gpu["index"], gpu["excluded"]) for gpu in await unusable(one)] == [("0", True), ("1:0", True)]


async def test_a_gpu_stays_left_out_while_its_product_cannot_be_read(node: Node, nvidia: Nvidia) -> None:
    nvidia.world.gpus[3].name = DISPLAY
    nvidia.show()
    await nvidia.served(3, "--exclude-devices", DISPLAY)
    nvidia.world.fails("nvmlDeviceGetName", UNKNOWN, gpu=3)
    nvidia.world.gpus.append(nvml.gpu(4))  # NVML is opened anew for it.
    nvidia.show()
    await node.allocatable_is(4)
    await node.pass_time(30)
    assert node.capacity() == 4


@pytest.mark.parametrize("again", ["an edit", "a restart"])
@pytest.mark.parametrize("how", ["lost", "held"])
async def test_a_gpu_that_is_left_out_later_goes_when_no_pod_has_it(node: Node, how: str, again: str) -> None:
    one = await node.served(3, *leaving_out(node))
    if how == "held":
        (out,) = (await node.admit("pod")).devices[GPU]
    else:
        out = "GPU-2"
        node.simulate(gpus(0, 1))
        await node.allocatable_is(2)
        assert (await one.states())[out] == "lost"
    options = leaving_out(node, out)
    if again == "a restart":
        one.kill()
        one = node.gateway(*options)
    await node.allocatable_is(2)
    if how == "held":
        await node.pass_time(60)
        (device,) = [each for each in (await one.status())["resources"][0]["devices"] if each["id"] == out]
        assert device["health"] == "Unhealthy"
        assert device["reason"] == "left out by the setting exclude-devices, but a container holds it"
        await node.restart_container("pod")
        node.remove("pod")
    await node.until(lambda: node.capacity() == 2, "its going", 900)
    if how == "held":
        leaving_out(node)
        await node.allocatable_is(3)


async def test_a_gpu_that_cannot_be_used_and_is_left_out_is_no_trouble(nvidia: Nvidia) -> None:
    nvidia.world.fails("nvmlDeviceGetHandleByIndex", UNKNOWN, 1)
    nvidia.show()
    one = await nvidia.served(3, "--exclude-devices", f"0000{nvidia.world.gpus[1].pci}".upper())
    (out,) = await unusable(one)
    assert out["excluded"] is True
    assert not (await one.status())["hindrances"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--exclude-devices=0"], ""),
        (["--exclude-devices=0,7"], "exclude-devices: '7' names no GPU"),
        (["--resource-naming-strategy=mixed"], "resource_naming_strategy has no effect"),
    ],
)
async def test_a_setting_without_effect_is_reported(node: Node, nvidia: Nvidia, options: list[str], words: str) -> None:
    await node.start_kubelet()
    one = nvidia.gateway(*options)
    await node.until(lambda: node.allocatable() >= 3, "the GPUs")
    warnings = (await one.status())["warnings"]
    assert len(warnings) == bool(words)
    assert words.replace("_", "-") in str(warnings).replace("_", "-")
    nvidia.event(3, 79)
    await node.pass_time(10)
    told = [line["reason"] for line in one.said("a setting has no effect")]
    assert len(told) == bool(words)
    assert words.replace("_", "-") in str(told).replace("_", "-")


# Lost, or gone for good.


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        pytest.param("mixed", "mixed", "lost", id="an instance went with its GPU"),
        pytest.param("mixed", "single", None, id="and would have another name now"),
        pytest.param("shared", "shared", "lost", id="a shared GPU"),
        pytest.param("none", "shared", None, id="a GPU that would be shared now"),
        pytest.param("none", "none", "lost", id="a GPU"),
    ],
)
async def test_a_device_that_went_with_its_gpu_is_lost_if_it_would_be_offered_so_now(
    node: Node, nvidia: Nvidia, before: str, after: str, state: str | None
) -> None:
    if before == "mixed":
        for index in range(4):
            nvidia.mig(index, "3g.40gb", "3g.40gb")
    resource = BIG if before == "mixed" else GPU
    each = 2 if before in {"mixed", "shared"} else 1

    def configured(how: str) -> tuple[str, str]:
        shared = sliced({"name": "gpu", "replicas": 2}) if how == "shared" else {}
        return configure(node, shared | {"flags": {"migStrategy": how if how in {"mixed", "single"} else "none"}})

    await node.start_kubelet()
    one = nvidia.gateway(*configured(before))
    await node.allocatable_is(4 * each, resource)
    gone = nvidia.world.gpus.pop(2)
    nvidia.show()
    await node.allocatable_is(3 * each, resource)
    ids = {part.uuid for part in gone.instances} or {f"{gone.uuid}::{n}" for n in range(2)} if each > 1 else {gone.uuid}
    assert {(await one.states(resource)).get(name) for name in ids} == {"lost"}
    configured(after)
    await node.pass_time(60)
    found = await one.states(resource)
    assert {found.get(name) for name in ids} == {state}


@pytest.mark.parametrize(
    ("trouble", "kept"),
    [("", False), ("its own GPU's", True), ("of a display", False)],
)
async def test_an_instance_is_gone_only_if_all_gpus_can_be_looked_at(
    node: Node, nvidia: Nvidia, trouble: str, kept: bool
) -> None:
    nvidia.mig(0, "3g.40gb")
    one = await nvidia.served(1, "--mig-strategy", "mixed", resource=BIG)
    (part,) = await one.states(BIG)
    one.kill()
    nvidia.world.no_mig(0)
    if trouble == "of a display":
        nvidia.world.gpus[2].name = "NVIDIA DGX Display"
    elif trouble:
        nvidia.world.fails("nvmlDeviceGetHandleByIndex", UNKNOWN, 0)
    nvidia.show()
    two = nvidia.gateway("--mig-strategy", "mixed")
    await node.until(lambda: two.said("registered"), "its registration")
    await node.pass_time(60)
    assert (part in await two.states(BIG)) is kept


@pytest.mark.parametrize("left", [3, 0])
@pytest.mark.parametrize("beside", [False, True])
async def test_gpus_that_went_without_a_gateway_are_lost(node: Node, nvidia: Nvidia, beside: bool, left: int) -> None:
    rules = [{"resource": "vendor.com/null", "paths": ["/dev/null*"]}] if beside else []
    options = configure(node, {"gateway": {"devices": rules}})
    one = await nvidia.served(4, *options)
    one.kill()
    gone = nvidia.uuids[left:]
    for gpu in nvidia.world.gpus[left:]:
        shutil.rmtree(nvidia.sys / "bus/pci/devices" / gpu.pci)
    del nvidia.world.gpus[left:]
    nvidia.show()
    two = nvidia.gateway(*options)
    await node.allocatable_is(left)
    await node.pass_time(60)
    found = await two.states()
    assert {found.get(uuid) for uuid in gone} == {"lost"}
    assert node.capacity() == 4
    assert await two.is_ready()
