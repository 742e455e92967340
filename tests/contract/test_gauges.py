"""The GPUs' own gauges (``--gpu-metrics``): under the names of DCGM's exporter, with the pods, and never waited for."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.hardware import Amd, Nvidia
from tests.contract.node import GPU, PREFIX, Gateway, Node, OrderError
from tests.contract.test_nvidia import UNKNOWN
from tests.fakes.amd import Board, Sysfs

BUSY, USED, FREE, HOT, WATTS = (
    *("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"),
    *("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"),
)
PCI = "0000:05:00.0"
UNSUPPORTED = 3


async def samples(one: Gateway, name: str = "") -> list[tuple[str, dict[str, str], float]]:
    """Return the gauges of GPUs: each with its labels and its value."""
    _, body = await one.get("metrics", "/metrics")
    assert PREFIX in body
    found = (sample for family in text_string_to_metric_families(body) for sample in family.samples)
    return [(it.name, it.labels, it.value) for it in found if it.name.startswith(name or "DCGM_FI_DEV_")]


async def told(one: Gateway) -> list[str]:
    """Return the UUIDs of the GPUs whose gauges are told."""
    return [labels["UUID"] for _, labels, _ in await samples(one, USED)]


async def test_a_gpu_and_an_instance_have_dcgms_names_units_and_labels(node: Node, nvidia: Nvidia) -> None:
    (part,) = nvidia.mig(3, "1g.10gb")
    environment = {"NODE_NAME": "n1"}
    one = await nvidia.served(3, "--gpu-metrics", "--mig-strategy=mixed", **environment)
    given = await node.admit("pod")
    await node.pass_time(30)
    index = nvidia.uuids.index(given.devices[GPU][0])
    gpu, host = nvidia.world.gpus[index], nvidia.world.gpus[3]
    labels = {
        "gpu": str(index),
        "UUID": gpu.uuid,
        "pci_bus_id": f"0000{gpu.pci}".upper(),
        "device": f"nvidia{index}",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "n1",
        "GPU_I_PROFILE": "",
        "GPU_I_ID": "",
        "namespace": "default",
        "pod": "pod",
        "container": "main",
    }
    whole, used = gpu.memory / 2**20, 1024.0 * (index + 1)
    found = await samples(one)
    assert [it for it in found if it[1]["UUID"] == gpu.uuid] == [
        (BUSY, labels, 10 + index),
        (USED, labels, used),
        (FREE, labels, whole - used),
        (HOT, labels, 40 + index),
        (WATTS, labels, 100.5 + index),
    ]
    nobody = dict.fromkeys(("namespace", "pod", "container"), "")
    place = {"gpu": "3", "pci_bus_id": f"0000{host.pci}".upper(), "device": "nvidia3", "UUID": part.uuid}
    assert next(it for it in found if it[1]["UUID"] == part.uuid) == (
        USED,
        labels | nobody | place | {"GPU_I_PROFILE": "1g.10gb", "GPU_I_ID": "0"},
        4096,
    )
    assert BUSY not in {name for name, labels, _ in found if labels["UUID"] in {part.uuid, host.uuid}}


async def test_without_the_flag_no_driver_is_asked_for_gauges(nvidia: Nvidia) -> None:
    one = await nvidia.served()
    assert await samples(one) == []


async def test_a_shared_gpu_has_a_row_for_each_container_that_has_it_now(node: Node, nvidia: Nvidia) -> None:
    node.shared = (GPU,)
    sharing = {"timeSlicing": {"resources": [{"name": GPU, "replicas": 2}]}}
    (node.folder / "config.yaml").write_text(json.dumps({"version": "v1", "sharing": sharing}))
    one = await nvidia.served(8, "--gpu-metrics", "--config-file", str(node.folder / "config.yaml"))
    (held,) = (await node.admit("first")).devices[GPU]
    for number in range(7):
        await node.admit(f"other-{number}")
    await node.pass_time(15)
    await samples(one)
    await node.pass_time(2)
    rows = [(labels["UUID"], labels["pod"]) for _, labels, _ in await samples(one, BUSY)]
    assert sorted(pod for _, pod in rows) == ["first", *(f"other-{number}" for number in range(7))]
    assert {uuid: [it for it, _ in rows].count(uuid) for uuid in nvidia.uuids} == dict.fromkeys(nvidia.uuids, 2)
    node.remove("first")
    await node.admit("last")
    await node.pass_time(11)
    await samples(one)  # What is known of pods is old: this one has it asked for the next.
    await node.pass_time(2)
    rows = [(labels["UUID"], labels["pod"]) for _, labels, _ in await samples(one, BUSY)]
    assert (held.partition("::")[0], "last") in rows
    assert "first" not in {pod for _, pod in rows}


async def test_what_a_gpu_does_not_tell_has_no_row_and_hides_nothing_else(nvidia: Nvidia) -> None:
    nvidia.world.fails("nvmlDeviceGetPowerUsage", UNSUPPORTED, gpu=0)
    nvidia.world.fails("nvmlDeviceGetTemperature", UNKNOWN, gpu=1)
    one = await nvidia.served(4, "--gpu-metrics")
    nvidia.show()
    found = {(name, labels["gpu"]) for name, labels, _ in await samples(one)}
    every = {(name, str(gpu)) for name in (BUSY, USED, FREE, HOT, WATTS) for gpu in range(4)}
    assert every - found == {(WATTS, "0"), (HOT, "1")}


async def test_a_gpu_that_does_not_answer_is_not_asked_for_its_gauges(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served(4, "--gpu-metrics")
    nvidia.world.fails("nvmlDeviceGetUtilizationRates", 0, gpu=0, hangs=3600)
    nvidia.fails("nvmlDeviceGetMigMode", UNKNOWN, gpu=0)
    await node.allocatable_is(3)
    assert await told(one) == nvidia.uuids[1:]


async def test_a_driver_that_hangs_is_waited_for_by_nobody_and_told(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served(4, "--gpu-metrics")
    assert await told(one) == nvidia.uuids
    nvidia.fails("nvmlDeviceGetUtilizationRates", 0, gpu=2, hangs=3600)
    for passed in range(0, 100, 10):
        await node.pass_time(10)
        began = asyncio.get_running_loop().time()
        assert await told(one) == (nvidia.uuids if passed < 50 else [])  # What it told of late counts for a minute.
        assert asyncio.get_running_loop().time() - began < 0.5
    assert len(one.said("no GPU metrics: a driver doesn't answer")) == 1
    nvidia.event(1, 79)
    await node.allocatable_is(3)
    with pytest.raises(OrderError, match="hangs"):
        await one.order("release", ids=[])
    nvidia.works("nvmlDeviceGetUtilizationRates", gpu=2)
    await one.order("acquire", ids=[])
    await node.allocatable_is(4)
    await node.pass_time(10)
    await told(one)
    await node.pass_time(2)
    assert await told(one) == nvidia.uuids
    assert one.said("GPU metrics are there again")


async def test_all_who_ask_within_a_second_cost_one_question(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served(4, "--gpu-metrics")
    await node.pass_time(2)
    calls = nvidia.calls()
    await told(one)
    each = nvidia.calls() - calls
    await node.pass_time(2)
    calls = nvidia.calls()
    await asyncio.gather(*(told(one) for _ in range(20)))
    for _ in range(10):
        await told(one)
    assert nvidia.calls() - calls <= each + 40  # A look may be among them.


async def test_nothing_is_read_and_held_of_what_is_released(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served(4, "--gpu-metrics")
    await one.order("release", ids=[])
    await node.pass_time(70)
    calls = nvidia.calls()
    assert await told(one) == []
    assert nvidia.calls() == calls
    await one.order("acquire", ids=[])
    await node.pass_time(10)
    assert await told(one) == nvidia.uuids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"gpu_busy_percent": "7\n", "mem_info_vram_used": f"{2**30}\n", "mem_info_vram_total": f"{3 * 2**30}\n"}
            | {"temp1_input": "45000\n", "power1_average": "95000000\n"},
            {BUSY: 7, USED: 1024, FREE: 2048, HOT: 45, WATTS: 95},
            id="all",
        ),
        pytest.param({"power1_input": "5500000\n"}, {WATTS: 5.5}, id="what newer ones have"),
        pytest.param({"gpu_busy_percent": "busy", "mem_info_vram_used": "1" * 30}, {}, id="no numbers"),
        pytest.param({"mem_info_vram_used": "1048576"}, {USED: 1}, id="no total"),
        pytest.param(
            {"mem_info_vram_used": f"{2**21}", "mem_info_vram_total": f"{2**20}"}, {USED: 2, FREE: 0}, id="odd"
        ),
        pytest.param({"gpu_busy_percent": "0"}, {BUSY: 0}, id="zero"),
    ],
)
async def test_amds_gauges_are_the_kernels(node: Node, files: dict[str, str], expected: dict[str, float]) -> None:
    host = Amd(node, lambda root: Sysfs(root, [Board(PCI, 0, ("CPX", "NPS4"), 2)]).write())
    folder = host.tree.pci(host.tree.boards[0])
    (folder / "hwmon/hwmon3").mkdir(parents=True)
    for name, content in files.items():
        (folder / ("hwmon/hwmon3" if name.startswith(("temp", "power")) else "") / name).write_text(content)
    one = await host.served(2, "--gpu-metrics", resource="amd.com/gpu")
    found = await samples(one)
    assert {name: value for name, _, value in found} == expected
    assert {labels["UUID"] for _, labels, _ in found} <= {PCI}  # A partition has no files of its own.


async def test_a_gauge_of_amd_that_would_block_is_not_read(node: Node) -> None:
    host = Amd(node)
    os.mkfifo(host.tree.pci(host.tree.boards[0]) / "gpu_busy_percent")
    one = await host.served(8, "--gpu-metrics", resource="amd.com/gpu")
    assert await samples(one) == []
    await node.truthful()
