"""What NVML and the kernel's driver tell of NVIDIA's GPUs, also where it is odd, missing, late or hangs."""

from __future__ import annotations

import os
import random
import shutil
from copy import copy
from itertools import product
from typing import Any

import pytest

from tests.contract.hardware import Nvidia
from tests.contract.node import GPU, Gateway, Node, OrderError
from tests.contract.test_nvidia import DENIED, LOST, MISMATCH, NO_LIBRARY, NOT_LOADED, UNKNOWN, open_files, told
from tests.fakes import nvml

INVALID, UNSUPPORTED, NOT_FOUND, RESET_WANTED = 2, 3, 6, 16
BIG, SMALL = "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"
DOWN = ("nvmlInit", "nvmlDeviceGetCount")
"""What fails where NVML can't be used: a count that works leaves it open."""
CALLS = (
    *("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo"),
    *("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount"),
    *("nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"),
    *("nvmlDeviceGetAttributes", "nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo"),
    *("nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues"),
)
DESCRIBING = (
    *("nvmlDeviceGetName", "nvmlDeviceGetBrand", "nvmlDeviceGetArchitecture", "nvmlDeviceGetCudaComputeCapability"),
    "nvmlDeviceGetAddressingMode",
    *("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetDriverVersion", "nvmlDeviceGetNvLinkState"),
    *("nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetTopologyCommonAncestor"),
)
"""What only describes a GPU."""


async def facts(one: Gateway) -> dict[str, dict[str, Any]]:
    """Return what is known of each GPU and instance, by UUID."""
    found: dict[str, dict[str, dict[str, Any]]] = (await one.order("devices"))["facts"]
    return {uuid: known for devices in found.values() for uuid, known in devices.items()}


async def offered(one: Gateway) -> dict[str, str]:
    """Return the resource of each device that is healthy, by ID."""
    resources = (await one.status())["resources"]
    return {each["id"]: it["name"] for it in resources for each in it["devices"] if each["health"] == "Healthy"}


# What is told.


async def test_what_nvml_tells_of_a_gpu_and_of_an_instance_is_told(nvidia: Nvidia) -> None:
    whole = nvidia.world.gpus[0]
    part = nvidia.world.mig(3, "1c.3g.40gb", "1g.10gb+me")[1]
    nvidia.show()
    one = await nvidia.served(3, "--mig-strategy", "mixed")
    known = await facts(one)
    same: dict[str, Any] = {
        "product": "NVIDIA H100 80GB HBM3",
        "driver": nvidia.world.driver,
        "traits": {
            "architecture": "Hopper",
            "brand": "Nvidia",
            "cudaComputeCapability": "9.0",
            "cudaDriverVersion": "12.4",
        },
    }
    assert known[whole.uuid] == same | {
        "capacities": {},
        "index": "0",
        "pci": whole.pci,
        "parent": "",
        "profile": "",
        "links": dict.fromkeys("123", "nvlink x18"),
        "nodes": ["/dev/nvidia0"],
        "minor": 0,
        "memory": whole.memory,
        "slot": "",
    }
    assert known[part.uuid] == same | {
        "index": "3:1",
        "pci": nvidia.world.gpus[3].pci,
        "parent": nvidia.uuids[3],
        "profile": "1g.10gb+me",
        "links": {},
        "nodes": ["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap373", "/dev/nvidia-caps/nvidia-cap374"],
        "minor": 3,
        "memory": 9984 << 20,
        "capacities": {
            "multiprocessors": 16,
            "copyEngines": 1,
            "decoders": 1,
            "encoders": 0,
            "jpegEngines": 1,
            "ofaEngines": 1,
            "memorySlice4": 1,
        },
        "slot": "20-4",
    }


async def test_the_nodes_of_an_instance_are_found_without_the_drivers_table(nvidia: Nvidia) -> None:
    (part,) = nvidia.mig(0, "7g.80gb")
    shutil.rmtree(nvidia.proc / "driver/nvidia-caps")
    folder = nvidia.proc / f"driver/nvidia/capabilities/gpu0/mig/gi{part.gpu_instance}"
    (folder / "ci0").mkdir(parents=True)
    for path, minor in ((folder, 30), (folder / "ci0", 31)):
        (path / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\n")
    one = await nvidia.served(3, "--mig-strategy", "mixed")
    caps = [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (30, 31)]
    assert (await facts(one))[part.uuid]["nodes"] == ["/dev/nvidia0", *caps]


@pytest.mark.parametrize("uuid", ["GPU-../../etc", "GPU-a..b", "GPU-a/b", "GPU-", "/GPU-1", "GPU-" + "x" * 60 + "|"])
async def test_what_could_not_be_a_uuid_is_never_one(node: Node, nvidia: Nvidia, uuid: str) -> None:
    nvidia.world.gpus[0].uuid = uuid
    nvidia.world.gpus[1].name = "a\x1b[31mname"
    nvidia.show()
    one = await nvidia.served(3)
    assert node.capacity() == 3
    (left_out,) = (await one.status())["unusable"]
    assert (left_out["index"], left_out["id"]) == ("0", "")
    assert (await facts(one))[nvidia.uuids[1]]["product"] == "a?[31mname"


@pytest.mark.parametrize("text", ["-1\n", "", "many\n"])
async def test_a_gpu_whose_numa_node_is_unknown_is_listed_without_one(node: Node, nvidia: Nvidia, text: str) -> None:
    (nvidia.sys / "bus/pci/devices" / nvidia.world.gpus[2].pci / "numa_node").write_text(text)
    await nvidia.served()
    async with node.plugin() as plugin:
        listed = {device.id: device.numa_nodes for device in await plugin.first_list()}
    assert [listed[uuid] for uuid in nvidia.uuids] == [(0,), (0,), (), (1,)]


@pytest.mark.parametrize("near", [nvml.PIX, nvml.PXB, nvml.PHB])
async def test_over_pcie_the_nearer_gpus_are_preferred(node: Node, nvidia: Nvidia, near: int) -> None:
    for gpu in nvidia.world.gpus:
        gpu.links, gpu.numa_node = {}, 0
    nvidia.world.ways = {(0, 1): near + 10, (1, 3): near}
    nvidia.show()
    one = await nvidia.served()
    assert set((await node.admit("pod", count=2)).devices[GPU]) == {nvidia.uuids[1], nvidia.uuids[3]}
    names = {nvml.PIX: "pix", nvml.PXB: "pxb", nvml.PHB: "phb", nvml.NODE: "node", nvml.SYS: "sys"}
    links = (await facts(one))[nvidia.uuids[1]]["links"]
    assert {peer: way.lower() for peer, way in links.items()} == {"0": names[near + 10], "2": "node", "3": names[near]}


async def test_only_links_that_are_up_are_counted(node: Node) -> None:
    nvidia = Nvidia(node, lambda path: nvml.a100s(path, 4))
    nvidia.world.gpus[0].links[0].active = False
    nvidia.show()
    one = await nvidia.served()
    assert (await facts(one))[nvidia.uuids[0]]["links"] == {"1": "nvlink x3", "2": "nvlink x4", "3": "nvlink x4"}


async def test_indexes_are_those_of_now_also_where_others_are_linked_to(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    assert (await facts(one))[nvidia.uuids[3]]["links"] == dict.fromkeys("012", "nvlink x18")
    del nvidia.world.gpus[0]
    nvidia.show()
    await node.allocatable_is(3)
    await node.pass_time(10)
    known = await facts(one)
    assert [known[uuid]["index"] for uuid in nvidia.uuids] == ["0", "1", "2"]
    assert known[nvidia.uuids[2]]["links"] == dict.fromkeys("01", "nvlink x18")


@pytest.mark.parametrize("call", ["nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"])
async def test_what_cannot_be_told_at_first_is_asked_again(node: Node, nvidia: Nvidia, call: str) -> None:
    nvidia.world.fails(call, UNKNOWN, gpu=2)
    nvidia.show()
    one = await nvidia.served()
    assert 0 in {known["memory"] and len(known["product"]) for known in (await facts(one)).values()}
    nvidia.works(call, gpu=2)
    await node.pass_time(20)
    assert all(known["memory"] and known["product"] for known in (await facts(one)).values())


# What ends an error, and what doesn't.


async def test_an_error_ends_with_the_reset_that_the_driver_wanted_after_it(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served()
    nvidia.event(1, 48)
    await node.allocatable_is(3)
    await node.pass_time(20)
    for action in (1, 0):
        nvidia.world.gpus[1].recovery = action
        nvidia.show()
        await node.pass_time(20)
    assert node.allocatable() == 4


@pytest.mark.parametrize("sign", ["reset", "load"])
async def test_no_sign_of_a_reset_ends_an_error_where_that_is_off(node: Node, nvidia: Nvidia, sign: str) -> None:
    await nvidia.served(4, "--health-recovery", "off")
    nvidia.event(1, 48)
    nvidia.world.gpus[1].recovery = 1
    nvidia.show()
    await node.pass_time(20)
    nvidia.world.gpus[1].recovery = 0
    if sign == "load":
        for call in DOWN:
            nvidia.fails(call, NOT_LOADED)
        await node.allocatable_is(0)
        nvidia.load()
        for call in DOWN:
            nvidia.world.works(call)
    nvidia.show()
    await node.allocatable_after(100, 3)


async def test_a_driver_that_was_away_ends_all_errors_of_before(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    nvidia.event(0, 79)
    await node.allocatable_is(3)
    for call in (*DOWN, "nvmlEventSetWait"):
        nvidia.world.fails(call, NOT_LOADED)
    nvidia.show()
    await node.allocatable_is(0)
    assert all("driver isn't loaded" in reason or "Xid 79" in reason for reason in (await told(one)).values())
    nvidia.world.rules.clear()
    nvidia.load()
    nvidia.show()
    await node.allocatable_is(4)
    nvidia.event(1, 79)
    await node.allocatable_is(3)
    for rows in ((0, 1, 1, 0), (0, 0, 0, 0)):  # Looks that find something new.
        await node.pass_time(20)
        nvidia.world.gpus[2].rows = rows
        nvidia.show()
    await node.allocatable_after(20, 3)  # It is newer than the load.


async def test_memory_to_be_remapped_is_no_error_and_ends_one_when_it_is_done(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served()
    gpu = nvidia.world.gpus[1]
    gpu.rows = (0, 1, 1, 0)
    nvidia.show()
    await node.allocatable_after(20, 4)
    nvidia.event(1, 95)
    await node.allocatable_is(3)
    await node.allocatable_after(20, 3)
    gpu.rows = (0, 1, 0, 0)
    nvidia.show()
    await node.allocatable_is(4)


@pytest.mark.parametrize("seen", [True, False])
async def test_a_gpu_that_is_plugged_in_again_is_well(node: Node, nvidia: Nvidia, seen: bool) -> None:
    await nvidia.served()
    if seen:
        nvidia.event(3, 79)
        await node.allocatable_is(3)
    gone = nvidia.world.gpus.pop(3)
    if seen:
        nvidia.show()
    else:
        nvidia.world.write()  # NVML loses it first, and the kernel never shows that it went.
    await node.allocatable_after(30, 3)
    nvidia.world.gpus.insert(3, gone)
    nvidia.show()
    await node.allocatable_is(4)


@pytest.mark.parametrize("code", [LOST, RESET_WANTED])
async def test_the_others_errors_count_while_a_gpu_is_lost(node: Node, nvidia: Nvidia, code: int) -> None:
    one = await nvidia.served()
    nvidia.fails("nvmlDeviceGetUUID", code, gpu=0)
    await node.allocatable_is(3)
    await node.pass_time(100)
    nvidia.event(2, 79)
    await node.allocatable_is(2)
    assert set(await told(one)) == {nvidia.uuids[0], nvidia.uuids[2]}
    nvidia.works("nvmlDeviceGetUUID", gpu=0)
    await node.allocatable_is(3, seconds=1300)


async def test_a_gpu_that_tells_no_errors_is_looked_at_all_the_same(node: Node, nvidia: Nvidia) -> None:
    for gpu in nvidia.world.gpus:
        gpu.events = 0
    nvidia.show()
    await nvidia.served()
    nvidia.world.gpus[2].recovery = 1
    nvidia.show()
    await node.allocatable_is(3)


async def test_a_new_gpu_is_heard_and_what_is_no_error_is_not(node: Node, nvidia: Nvidia) -> None:
    nvidia.world.gpus[0].events = 0xFF9F
    nvidia.show()
    await nvidia.served()
    nvidia.world.gpus.append(nvml.gpu(4, events=0xFF9F))
    nvidia.show()
    await node.allocatable_is(5)
    for gpu in (0, 4):
        nvidia.event(gpu, 1, type=0x10)  # A change of clocks.
    await node.allocatable_after(10, 5)
    nvidia.event(4, 79)
    await node.allocatable_is(4)


# What fails.

EACH_CODE = (1, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 17, 18, 19, 20, 999)
"""Those of nvmlReturn_t with which a question about a GPU can be answered."""
WHOLE = "WHOLE_TABLE" in os.environ
COUNT = 8 if WHOLE else 4
EACH = {"first": (0,), "last": (COUNT - 1,), "two": (1, COUNT - 2), "all": tuple(range(COUNT))}
CODES = EACH_CODE if WHOLE else (INVALID, UNSUPPORTED, DENIED, NOT_LOADED, UNKNOWN)
WHICH = EACH if WHOLE else {one: EACH[one] for one in ("two", "all")}
SPLIT = (0, 1)
"""The GPUs with a MIG instance, by index."""
NO_INSTANCE = {("nvmlDeviceGetMigDeviceHandleByIndex", INVALID), ("nvmlDeviceGetMigDeviceHandleByIndex", NOT_FOUND)}
"""What says that a GPU has no instance any more."""


async def stands(one: Gateway, nvidia: Nvidia) -> list[tuple[str, str]]:
    """Say of each GPU how it stands, and under which name it or its instance is listed."""
    status, found = await one.status(), []
    listed = {device["id"]: (it["name"], device) for it in status["resources"] for device in it["devices"]}
    left_out = {gpu["index"] for gpu in status.get("unusable", ()) if gpu["reason"]}
    for index, gpu in enumerate(nvidia.world.gpus):
        name, device = next((listed[uuid] for uuid in (gpu.uuid, *_parts(gpu)) if uuid in listed), ("", None))
        if device is None:
            found.append(("unusable" if str(index) in left_out else "GONE", ""))
        elif device["health"] == "Healthy":
            found.append(("served", name))
        else:
            found.append(("unhealthy" if device["reason"] else "GONE", name))
    return found


def _parts(gpu: nvml.GPU) -> list[str]:
    return [part.uuid for part in gpu.instances]


@pytest.mark.parametrize("call", CALLS + DESCRIBING)
async def test_a_call_that_fails_for_some_gpus_speaks_for_these_alone_and_hides_none(node: Node, call: str) -> None:
    """``pytest -s`` shows the table; with WHOLE_TABLE in the environment, as at night, for each code, and also for the first GPU and the last."""
    nvidia = Nvidia(node, lambda path: nvml.dgx(path, COUNT))
    for index in SPLIT:
        nvidia.mig(index, "3g.40gb")
    well = [("served", BIG if index in SPLIT else GPU) for index in range(COUNT)]
    rows: dict[str, list[str]] = {"later": [], "first look": []}
    one = nvidia.gateway("--mig-strategy", "mixed", FAIL_ON_INIT_ERROR="false")
    await node.eventually(lambda: _stand(one, nvidia, well), "the GPUs")
    for code in CODES:
        cells: dict[str, list[str]] = {"later": [], "first look": []}
        for which, indexes in WHICH.items():
            for index in indexes:
                nvidia.world.fails(call, code, index)
            nvidia.show_nvml()
            for moment, row in cells.items():
                if moment == "first look":
                    one.kill()
                    shutil.rmtree(node.state)
                    one = nvidia.gateway("--mig-strategy", "mixed", FAIL_ON_INIT_ERROR="false")
                await node.pass_time(6)
                found = await stands(one, nvidia)
                allowed = {"served"} if call in DESCRIBING else {"served", "unhealthy"}
                if call not in DESCRIBING and (moment == "first look" or (call, code) in NO_INSTANCE):
                    allowed.add("unusable")
                for index, (how, name) in enumerate(found):
                    case = f"{call} {code} {which} {moment}: GPU {index} of {found}"
                    assert how in allowed if index in indexes else found[index] == well[index], case
                    assert name in {"", well[index][1]}, case  # None is whole that is partitioned.
                row.append("".join(sorted({found[index][0][2] for index in indexes})))
            nvidia.world.rules.clear()
            nvidia.show_nvml()
            await node.eventually(lambda: _stand(one, nvidia, well), f"the GPUs after {call} {code}", 1300)  # noqa: B023 - at once
        for moment, row in rows.items():
            row.append("/".join(cells[moment]))
    if call == CALLS[0]:
        print(f"\n{'/'.join(WHICH)}: r served, h unhealthy, u unusable (never seen well), both with a reason")  # noqa: T201
        print(f"{'':48}" + "".join(f"{code:>10}" for code in CODES))  # noqa: T201
    for moment, row in rows.items():
        print(f"{call:36} {moment:11}" + "".join(f"{cell:>10}" for cell in row))  # noqa: T201


async def _stand(one: Gateway, nvidia: Nvidia, well: list[tuple[str, str]]) -> bool:
    return await stands(one, nvidia) == well


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("nvmlInit", DENIED, "(NVML error 4). Run the gateway as root"),
        ("nvmlInit", NOT_FOUND, "(NVML error 6). Does this node have an NVIDIA GPU"),
        ("nvmlInit", NOT_LOADED, "(NVML error 9). Load the NVIDIA driver on this node."),
        ("nvmlInit", NO_LIBRARY, "(NVML error 12). Is the NVIDIA driver installed on this node"),
        ("nvmlInit", MISMATCH, "(NVML error 18). The driver was upgraded: restart the container"),
        ("nvmlDeviceGetCount", UNKNOWN, "(NVML error 999). Does nvidia-smi work here?"),
    ],
)
async def test_a_first_failure_names_its_cure(node: Node, nvidia: Nvidia, call: str, code: int, words: str) -> None:
    nvidia.fails(call, code)
    one = nvidia.gateway()
    await node.until(lambda: not one.alive, "its end")
    assert one.process.ended.result() == 1
    said = "\n".join(str(line) for line in one.process.log)
    assert words in said
    assert "FAIL_ON_INIT_ERROR=false" in said


@pytest.mark.parametrize("code", [NOT_LOADED, DENIED, UNKNOWN])
async def test_a_control_node_that_is_missing_is_named(node: Node, nvidia: Nvidia, code: int) -> None:
    nvidia.fails("nvmlInit", code)
    (nvidia.dev / "nvidiactl").unlink()
    one = nvidia.gateway()
    await node.until(lambda: not one.alive, "its end")
    assert ("/dev/nvidiactl is missing" in str(one.process.log)) is (code != UNKNOWN)


async def test_nvml_that_fails_for_another_reason_later_takes_no_gpu_away(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    for call in DOWN:
        nvidia.world.fails(call, UNKNOWN)
    nvidia.show()
    await node.allocatable_after(100, 4)
    devices = (await one.status())["resources"][0]["devices"]
    assert all("NVML can't be asked" in device["reason"] for device in devices)
    assert {device["cause"] for device in devices} == {"library-failed"}
    assert not (await one.status())["hindrances"]  # Each GPU says it itself.
    calls = nvidia.calls()
    await node.pass_time(300)
    assert nvidia.calls() - calls < 40, "it asks too often"
    nvidia.world.rules.clear()
    nvidia.show()
    await node.pass_time(60)
    nvidia.event(1, 79)
    await node.allocatable_is(3)


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"])
async def test_errors_that_nobody_can_tell_take_no_gpu_away(node: Node, nvidia: Nvidia, call: str) -> None:
    for code in (INVALID, UNSUPPORTED, DENIED, UNKNOWN):
        nvidia.fails(call, code)
        one = await nvidia.served()
        await node.pass_time(60)
        assert (node.allocatable(), await told(one)) == (4, {})
        await one.terminate()


async def test_mig_devices_that_cannot_be_read_leave_out_their_gpu_with_the_reason(nvidia: Nvidia) -> None:
    nvidia.world.mig(0, "1g.10gb")
    codes = {UNSUPPORTED: "library-failed", DENIED: "not-permitted"}
    for call, code in product(("nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetAttributes"), codes):
        nvidia.world.fails(call, code)
        nvidia.show()
        one = await nvidia.served(3)
        (left_out,) = (await one.status())["unusable"]
        assert (left_out["index"], left_out["cause"]) == ("0", codes[code])
        assert call in left_out["reason"]
        await one.terminate()
        nvidia.world.rules.clear()


@pytest.mark.parametrize("shown", [True, False])
async def test_a_gpu_is_known_by_its_address_after_the_bus_changed(node: Node, nvidia: Nvidia, shown: bool) -> None:
    one = await nvidia.served()
    gone, failing = nvidia.uuids[1:3]
    del nvidia.world.gpus[1]
    nvidia.world.fails("nvmlDeviceGetHandleByIndex", UNKNOWN, gpu=1)  # The index of the next one, now.
    nvidia.show()
    if not shown:
        shutil.rmtree(nvidia.proc / "driver/nvidia/gpus")
    await node.allocatable_after(20, 2)
    ill = await told(one)
    if shown:
        assert {gone, failing} <= ill.keys()
        assert "nvmlDeviceGetHandleByIndex" in ill[failing]
    else:  # Nobody can tell which one it is.
        assert [gpu["index"] for gpu in (await one.status())["unusable"]] == ["1"]


@pytest.mark.parametrize("uncounted", [[3], [0, 2], [0, 1, 2, 3]])
async def test_gpus_without_device_nodes_are_left_out_with_that_reason(
    node: Node, nvidia: Nvidia, uncounted: list[int]
) -> None:
    gone = [nvidia.world.gpus[index] for index in uncounted]
    for gpu in gone:
        (nvidia.dev / f"nvidia{gpu.minor}").unlink()
        nvidia.world.gpus.remove(gpu)
    nvidia.show(nodes=False)
    for gpu in gone:
        folder = nvidia.proc / "driver/nvidia/gpus" / gpu.pci.lower()
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"GPU UUID: \t {gpu.uuid}\nDevice Minor: \t {gpu.minor}\n")
    await node.start_kubelet()
    one = nvidia.gateway(FAIL_ON_INIT_ERROR="false")
    await node.pass_time(10)
    assert node.allocatable() == 4 - len(gone)
    ill = await told(one)
    assert all(f"/dev/nvidia{gpu.minor} is missing" in ill[gpu.uuid] for gpu in gone)


async def test_a_gpu_that_the_driver_leaves_out_is_no_reason_to_open_nvml_again(node: Node, nvidia: Nvidia) -> None:
    calls = []
    for excluded in (False, True):
        if excluded:
            gpu = nvidia.world.gpus.pop()
            nvidia.show()
            folder = nvidia.proc / "driver/nvidia/gpus" / gpu.pci.lower()
            folder.mkdir()
            (folder / "information").write_text(f"GPU UUID: \t {gpu.uuid}\nGPU Excluded:\t Yes\n")
        one = await nvidia.served(3 if excluded else 4)
        await node.pass_time(30)
        before = nvidia.calls()
        await node.pass_time(300)
        calls.append(nvidia.calls() - before)
        await one.terminate()
    assert calls[1] <= calls[0]


@pytest.mark.parametrize(
    ("name", "devices", "capabilities", "missing"),
    [
        ("nvidiactl", "", "all", True),
        ("nvidia3", "", "all", True),
        ("nvidia-uvm", "", "utility,compute", True),
        ("nvidia-uvm", "510 nvidia-uvm", "utility", False),  # It is kept from this container alone.
        ("nvidia-uvm", "", "utility", True),
    ],
)
async def test_a_device_node_that_cuda_needs_is_missed_until_it_is_there(
    node: Node, nvidia: Nvidia, name: str, devices: str, capabilities: str, missing: bool
) -> None:
    (nvidia.dev / name).unlink()
    nvidia.show(nodes=False)
    (nvidia.proc / "devices").write_text(devices)
    one = await nvidia.served(4, "--device-list-strategy=cdi-cri", NVIDIA_DRIVER_CAPABILITIES=capabilities)
    await node.pass_time(20)
    assert (f"/dev/{name}" in str((await one.status())["hindrances"])) is missing
    nvidia.show()
    await node.pass_time(20)
    assert not (await one.status())["hindrances"]


# What is long ago.


async def test_errors_count_however_long_there_was_none(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served()
    await node.pass_time(1800)
    nvidia.event(2, 79)
    await node.allocatable_is(3, seconds=3)


async def test_a_driver_that_fails_again_much_later_is_tried_again_as_soon(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served()
    for seconds in (120, 6):
        for call in DOWN:
            nvidia.fails(call, NOT_LOADED)
        await node.allocatable_is(0)
        await node.pass_time(seconds)
        for call in DOWN:
            nvidia.works(call)
        await node.allocatable_is(4, seconds=31 if seconds == 120 else 10)
        await node.pass_time(120)


async def test_a_gpu_that_is_lost_again_much_later_is_looked_at_again_as_soon(node: Node, nvidia: Nvidia) -> None:
    await nvidia.served()
    for seconds in (600, 6):
        nvidia.world.gpus[1].lost = True
        nvidia.show()
        await node.allocatable_is(3)
        await node.pass_time(seconds)
        nvidia.world.gpus[1].lost = False
        nvidia.show()
        await node.allocatable_is(4, seconds=700 if seconds == 600 else 15)
        await node.pass_time(300)


async def test_a_library_that_fitted_again_in_between_has_its_whole_time(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    for _ in range(2):
        for call in DOWN:
            nvidia.fails(call, MISMATCH)
        await node.pass_time(400)
        assert one.alive
        for call in DOWN:
            nvidia.works(call)
        await node.pass_time(60)
    assert node.allocatable() == 4


# What is released.


async def test_a_released_gpu_is_not_touched_and_the_others_are_heard(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served(4, "--mig-strategy=mixed")
    released = nvidia.uuids[2]
    for index in (0, 1):
        nvidia.event(index, 79)
    await one.order("release", ids=[released])
    await node.allocatable_is(1)  # What had come was still heard.
    for call in ("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetHandleByIndex"):
        nvidia.world.fails(call, UNKNOWN, gpu=2)
    nvidia.mig(2, "3g.40gb")
    await node.allocatable_after(30, 1)
    assert (await one.states())[released] == "released"
    assert "can't be read" not in str(await one.status())
    nvidia.event(3, 79)
    await node.allocatable_is(0)
    nvidia.world.rules.clear()
    nvidia.show()
    await one.order("acquire", ids=[released])
    await node.allocatable_is(1, BIG)


async def test_a_gpu_that_was_reset_while_it_was_released_is_well(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    gpu = nvidia.world.gpus[2]
    gpu.recovery = 4
    nvidia.show()
    await node.allocatable_is(3)
    await one.order("release", ids=[gpu.uuid])
    gpu.recovery = 0
    nvidia.show()
    await one.order("acquire", ids=[gpu.uuid])
    await node.allocatable_is(4)


def opened(nvidia: Nvidia) -> set[str]:
    """Return the names of the GPUs' device nodes that are open."""
    return {path.removeprefix(f"{nvidia.dev}/") for path in open_files() if path.startswith(f"{nvidia.dev}/nvidia")}


async def test_where_nvml_would_open_a_released_gpu_it_stays_closed(node: Node, nvidia: Nvidia) -> None:
    nvidia.world.nodes = nvidia.dev
    (nvidia.proc / "self").symlink_to("/proc/self")
    nvidia.show()
    one = await nvidia.served()
    await one.order("release", ids=[nvidia.uuids[0]])
    calls = nvidia.calls()
    assert opened(nvidia) == set()
    await node.pass_time(20)
    assert nvidia.calls() == calls  # Whoever is told that it is done may reset the GPU at once.
    reasons = {device["id"]: device["reason"] for device in (await one.status())["resources"][0]["devices"]}
    assert "NVML opens /dev/nvidia0 by itself, so it stays closed" in reasons[nvidia.uuids[1]]
    calls = nvidia.calls()
    await one.order("release", ids=[nvidia.uuids[1]])
    await one.order("acquire", ids=[nvidia.uuids[1]])
    await node.pass_time(30)
    assert (nvidia.calls(), opened(nvidia)) == (calls, set())
    await one.order("acquire", ids=[nvidia.uuids[0]])
    await node.allocatable_is(4)
    await node.until(lambda: len(opened(nvidia)) == 4, "the GPUs to be looked at again")


async def test_a_release_of_all_closes_nvml(node: Node, nvidia: Nvidia) -> None:
    nvidia.world.nodes = nvidia.dev
    (nvidia.proc / "self").symlink_to("/proc/self")
    nvidia.show()
    one = await nvidia.served()
    nvidia.event(1, 79)
    await node.allocatable_is(3)
    await one.order("release", ids=[])
    calls = nvidia.calls()
    await node.pass_time(30)
    assert (nvidia.calls(), opened(nvidia), node.capacity()) == (calls, set(), 4)
    nvidia.load()
    await one.order("acquire", ids=[])
    await node.allocatable_is(4)


# What hangs.


async def test_a_library_that_hangs_at_the_start_is_told_and_waited_for(node: Node, nvidia: Nvidia) -> None:
    nvidia.fails("nvmlDeviceGetCount", 0, hangs=3600)
    await node.start_kubelet()
    one = nvidia.gateway()
    await node.pass_time(30)
    (hindrance,) = (await one.status())["hindrances"]
    assert "NVML doesn't answer" in hindrance["reason"]
    assert hindrance["cause"] == "library-silent"
    nvidia.works("nvmlDeviceGetCount")
    await node.allocatable_is(4)
    assert not (await one.status())["hindrances"]


async def test_what_an_application_did_hides_no_call_that_hangs(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    nvidia.world.gpus[1].rows = (0, 1, 1, 0)
    nvidia.show()
    await node.pass_time(10)
    nvidia.fails("nvmlDeviceGetMigMode", 0, gpu=1, hangs=3600)
    await node.allocatable_is(3)
    assert "NVML hasn't answered" in (await told(one))[nvidia.uuids[1]]
    with pytest.raises(OrderError, match="hangs"):
        await one.order("release", ids=[])
    nvidia.works("nvmlDeviceGetMigMode", gpu=1)


async def test_a_wait_for_errors_that_hangs_is_told(node: Node, nvidia: Nvidia) -> None:
    one = await nvidia.served()
    nvidia.fails("nvmlEventSetWait", 0, hangs=3600)
    await node.until(lambda: one.said("NVML doesn't answer", call="nvmlEventSetWait"), "the complaint")
    assert node.allocatable() == 4
    nvidia.works("nvmlEventSetWait")
    await node.until(lambda: one.said("NVML answers again"), "its end")
    nvidia.event(1, 79)
    await node.allocatable_is(3)


# Whatever happens.

FAILING = ("nvmlDeviceGetUUID", "nvmlDeviceGetMigMode", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetRemappedRows")


def misbehave(nvidia: Nvidia, chance: random.Random, away: list[nvml.GPU]) -> None:
    """Let one thing happen, of all that can."""
    world = nvidia.world
    index = chance.randrange(len(world.gpus))
    match chance.randrange(8):
        case 0:
            nvidia.event(index, chance.choice((13, 48, 63, 79, 94, 119, 999, 2**63)))
        case 1 if len(world.gpus) > 2:
            world.rules.clear()
            away.append(world.gpus.pop(index))
        case 2 if away:
            world.rules.clear()
            world.gpus.insert(chance.randrange(len(world.gpus) + 1), away.pop())
        case 3:
            world.mig(index, *chance.choice([("1g.10gb",) * 7, ("3g.40gb", "2g.20gb"), ("7g.80gb",)]))
        case 4:
            world.no_mig(index)
        case 5:
            world.fails(chance.choice(FAILING), chance.choice((LOST, UNKNOWN, INVALID)), gpu=index)
        case 6:
            world.gpus[index].lost = not world.gpus[index].lost
        case _:
            calls = ("nvmlInit", "nvmlDeviceGetCount", "nvmlEventSetWait")
            world.fails(chance.choice(calls), chance.choice((NOT_LOADED, UNKNOWN, LOST)))
    nvidia.show()


@pytest.mark.parametrize("seeds", [range(first, first + 3) for first in range(0, 18, 3)], ids=str)
async def test_whatever_happened_what_is_there_is_offered_in_the_end(node: Node, nvidia: Nvidia, seeds: range) -> None:
    fresh = [copy(gpu) for gpu in nvidia.world.gpus]
    await node.start_kubelet()
    for seed in seeds:
        chance, away = random.Random(seed), list[nvml.GPU]()  # noqa: S311 - a test's choice
        one = nvidia.gateway("--mig-strategy", "mixed")
        await node.until(lambda: node.allocatable() > 0, "the GPUs")
        for _ in range(chance.randrange(3, 9)):
            misbehave(nvidia, chance, away)
            await node.pass_time(chance.choice((0.0, 0.0, 1.0, 8.0)))
        nvidia.world.rules.clear()
        for gpu in nvidia.world.gpus:
            gpu.lost = False
        nvidia.show()
        await one.order("release", ids=[])
        nvidia.load()
        await one.order("acquire", ids=[])
        there = {gpu.uuid for gpu in nvidia.world.gpus if not gpu.mig}
        there |= {part.uuid for gpu in nvidia.world.gpus for part in gpu.instances}

        async def right(one: Gateway = one, there: set[str] = there) -> bool:
            return set(await offered(one)) == there

        await node.eventually(right, f"what is there, seed {seed}", 1300)
        assert await one.terminate() == 0
        nvidia.world.gpus[:] = [copy(gpu) for gpu in fresh]
        nvidia.show()
