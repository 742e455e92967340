"""The node's labels: what Node Feature Discovery finds in the file that the gateway writes for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.hardware import Amd, Nvidia
from tests.contract.node import GPU, Gateway, Node
from tests.contract.test_sharing import configure
from tests.fakes import nvml
from tests.fakes.labelled import GOLDEN, NODES

LABELS = "--node-features"


def read(nvidia: Nvidia) -> dict[str, str]:
    """Return the labels; none if there is no file."""
    if not nvidia.features.exists():
        return {}
    return dict(line.split("=", 1) for line in nvidia.features.read_text().splitlines())


async def labelled(node: Node, *options: str) -> tuple[Nvidia, Gateway]:
    """Start a kubelet and a gateway, and wait for the labels."""
    nvidia = Nvidia(node)
    await node.start_kubelet()
    one = nvidia.gateway(LABELS, *options)
    await count_is(node, nvidia, 4)
    return nvidia, one


async def count_is(node: Node, nvidia: Nvidia, count: int) -> None:
    """Wait until the label says so many GPUs."""
    await node.until(lambda: read(nvidia).get(f"{GPU}.count") == str(count), f"{count} GPUs in the label")


async def is_gone(node: Node, nvidia: Nvidia) -> None:
    """Wait until there are no labels."""
    await node.until(lambda: not nvidia.features.exists(), "the file's end")


@pytest.mark.parametrize("name", NODES)
async def test_the_labels_are_those_of_gpu_feature_discovery(node: Node, name: str) -> None:
    labelled_node, golden = NODES[name], (GOLDEN / name).read_text()
    nvidia = Nvidia(node, labelled_node.make)
    labelled_node.kernel(nvidia.world, nvidia.sys)
    node.shared = (GPU,)
    file = node.folder / "config.yaml"
    file.write_text(labelled_node.configuration())
    await node.start_kubelet()
    nvidia.gateway(LABELS, "--config-file", str(file), FAIL_ON_INIT_ERROR="false")
    await node.until(nvidia.features.exists, "the file")
    assert nvidia.features.read_text() == golden


async def test_the_labels_follow_the_hardware_in_a_file_that_is_replaced_as_a_whole(node: Node) -> None:
    nvidia, _ = await labelled(node, "--mig-strategy", "mixed")
    with nvidia.features.open() as before:
        first = read(nvidia)
        nvidia.mig(3, "1g.10gb", "1g.10gb", "3g.40gb")
        await node.until(lambda: "nvidia.com/mig-1g.10gb.count" in read(nvidia), "labels of MIG instances")
        assert dict(line.rstrip().split("=", 1) for line in before) == first, "a reader has the old file, whole"
    assert read(nvidia)["nvidia.com/mig-1g.10gb.count"] == "2"
    assert [one.name for one in nvidia.features.parent.iterdir()] == [nvidia.features.name]
    assert nvidia.features.stat().st_mode & 0o777 == 0o644


async def test_the_labels_say_nothing_of_gpus_that_are_left_out_and_keep_a_lost_one(node: Node) -> None:
    nvidia, _ = await labelled(node)
    await node.allocatable_is(4)
    nvidia.world.gpus[1].lost = True
    nvidia.show()
    await node.allocatable_is(3)
    await node.pass_time(60)
    assert read(nvidia)[f"{GPU}.count"] == "4"
    nvidia.world.gpus[1].lost = False
    nvidia.show()
    nvidia.gateway(LABELS, "--exclude-devices", "0")
    await count_is(node, nvidia, 3)


async def test_an_edit_of_the_file_removes_the_labels_and_brings_them_back(node: Node, nvidia: Nvidia) -> None:
    await node.start_kubelet()
    nvidia.gateway(*configure(node, {"gateway": {"nodeFeatures": True}}))
    await count_is(node, nvidia, 4)
    configure(node, {"gateway": {"nodeFeatures": False}})
    await is_gone(node, nvidia)
    configure(node, {"gateway": {"nodeFeatures": True}})
    await count_is(node, nvidia, 4)


async def test_a_gateway_that_ends_for_good_takes_its_labels_away(node: Node) -> None:
    nvidia, one = await labelled(node)
    assert await one.terminate() == 0
    assert not nvidia.features.exists()


async def test_labels_outlive_an_update_of_the_gateway_and_are_the_leaders(node: Node) -> None:
    nvidia, one = await labelled(node)
    before = nvidia.features.stat().st_ino
    other = nvidia.gateway(
        LABELS, *configure(node, {"sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": 2}]}}})
    )
    await node.until(lambda: read(nvidia)[f"{GPU}.replicas"] == "2", "the labels of the gateway that took over")
    assert nvidia.features.stat().st_ino != before
    await one.terminate()
    assert read(nvidia)[f"{GPU}.replicas"] == "2"
    await other.terminate()
    assert not nvidia.features.exists()


async def test_an_update_without_the_setting_leaves_no_labels(node: Node) -> None:
    nvidia, one = await labelled(node)
    two = nvidia.gateway()
    await node.until(lambda: two.said("registered"), "the newer one to lead")
    await one.terminate()
    assert not nvidia.features.exists()


async def test_labels_that_somebody_removed_or_that_could_not_be_written_come_later(node: Node, nvidia: Nvidia) -> None:
    folder = nvidia.features.parent
    folder.rmdir()
    one = await nvidia.served(4, LABELS)

    async def hindered() -> bool:
        return any("labels can't be written" in hindrance["reason"] for hindrance in (await one.status())["hindrances"])

    await node.eventually(hindered, "the reason in the status")
    await node.eventually(one.is_ready, "readiness all the same")
    folder.mkdir()
    await count_is(node, nvidia, 4)
    assert not await hindered()
    nvidia.features.unlink()
    await count_is(node, nvidia, 4)


async def test_what_the_driver_says_can_not_forge_a_label(node: Node) -> None:
    def make(path: Path) -> nvml.World:
        return nvml.World(path, [nvml.gpu(0, name="NVIDIA X=Y\tZ (R)")])

    nvidia = Nvidia(node, make)
    machine = nvidia.sys / "class/dmi/id/product_name"
    machine.parent.mkdir(parents=True)
    machine.write_text("Box\nnvidia.com/gpu.count=99\n")
    await node.start_kubelet()
    nvidia.gateway(LABELS)
    await count_is(node, nvidia, 1)
    assert read(nvidia)[f"{GPU}.product"] == "NVIDIA-XYZ-R"
    assert read(nvidia)[f"{GPU}.machine"] == "Boxnvidia.comgpu.count99"


async def test_amds_gpus_get_no_labels_and_the_operator_is_told(node: Node) -> None:
    amd = Amd(node)
    await node.start_kubelet()
    one = amd.gateway(LABELS)
    await node.until(lambda: one.said("a setting has no effect"), "a warning")
    assert "node-features has no effect" in json.dumps(one.process.log)
    assert not amd.features.exists()
