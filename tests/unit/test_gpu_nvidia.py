"""The NVIDIA backend, by the genuine pynvml, on a fake NVML library whose world the tests change."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from devices.gpu.backend import Backend, Sight
from devices.gpu.model import GPU, Link, Way
from devices.gpu.nvidia import nvml as nvml_library
from devices.gpu.nvidia.backend import NvidiaBackend
from devices.gpu.nvidia.kernel import KernelFacts as Kernel
from devices.gpu.nvidia.nvml import Nvml
from devices.gpu.nvidia.scan import Let
from devices.gpu.nvidia.vendor import SUFFIXES, profile
from devices.gpu.nvidia.watch import Guests, Happened, Looker, News, Pace
from devices.model import Health, Trouble, TroubleKind
from devices.policy import Policy, Recovery
from devices.source import GiveUpError
from gateway.lab.trials.faults import descriptors
from gateway.lab.waiting import until
from tests.fakes import nvml as fake
from tests.fakes.nvml import GIB, PHB, PIX, PXB, World, a100s, counts, dgx, gpu, library

PACE = Pace(poll=0.02, wait=0.01, leave=10, again=0.01, again_max=0.03, lost=0.02, lost_max=0.04)
NOT_LOADED, LOST, RESET_WANTED, MISMATCH, UNKNOWN = 9, 15, 16, 18, 999


class Node:
    """A node: the world of its driver, and what its kernel tells besides."""

    def __init__(self, root: Path, world: World) -> None:
        self.root, self.world = root, world
        (root / "dev").mkdir()
        for name in ("nvidiactl", "nvidia-uvm"):
            (root / "dev" / name).touch()
        self.loads = 0
        self.load()
        self.write()

    def load(self) -> None:
        """Load the driver anew, as sysfs shows it: a folder that there was not before."""
        self.loads += 1
        new = self.root / f"sys/module/nvidia-{self.loads}"
        new.mkdir(parents=True)
        if (old := self.root / "sys/module/nvidia").exists():
            old.rename(self.root / f"sys/module/old-{self.loads}")
        new.rename(self.root / "sys/module/nvidia")

    def write(self) -> None:
        """Let the world be as it is, in NVML and in the kernel's files."""
        self.world.write()
        self.world.sysfs(self.root / "sys")
        plugged = self.root / "proc/driver/nvidia/gpus"
        plugged.mkdir(parents=True, exist_ok=True)
        there = {one.pci for one in self.world.gpus}
        for entry in plugged.iterdir():
            if entry.name not in there:
                entry.rmdir()
        for pci in there:
            (plugged / pci).mkdir(exist_ok=True)
        self.world.capabilities(self.root / "proc")
        self.world.device_nodes(self.root / "dev")

    def backend(self, policy: Policy | None = None, pace: Pace = PACE) -> NvidiaBackend:
        return NvidiaBackend(
            policy or Policy(),
            library=str(library()),
            sys=self.root / "sys",
            proc=self.root / "proc",
            dev=self.root / "dev",
            pace=pace,
        )


class Watch:
    """What a backend yields, as it comes."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.sights: list[Sight] = []
        self._came = asyncio.Condition()

    async def follow(self) -> None:
        async with contextlib.aclosing(self.backend.watch()) as sights:
            async for sight in sights:
                async with self._came:
                    self.sights.append(sight)
                    self._came.notify_all()

    async def until(self, holds: Callable[[Sight], object]) -> Sight:
        """Wait for a sight of which that holds; it is the last one."""
        async with asyncio.timeout(20), self._came:
            await self._came.wait_for(lambda: self.sights and holds(self.sights[-1]))
        return self.sights[-1]


@contextlib.asynccontextmanager
async def watching(backend: Backend) -> AsyncIterator[Watch]:
    watch = Watch(backend)
    task = asyncio.create_task(watch.follow())
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("nvml-")]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Eight H100s; in the end nothing is left of NVML, whatever happened."""
    world = dgx(tmp_path / "world")
    monkeypatch.setenv("FAKE_NVML_WORLD", str(world.path))
    yield Node(tmp_path, world)
    for one in threads():
        one.join(5)
    assert not threads()
    left = counts()
    assert (left.references, left.event_sets, left.waits) == (0, 0, 0)


def by_uuid(sight: Sight) -> dict[str, GPU]:
    return {one.uuid: one for one in sight.gpus}


def ill(sight: Sight) -> dict[str, TroubleKind]:
    """What isn't well, by UUID."""
    return {
        one.uuid: one.trouble.kind for one in sight.gpus if one.trouble is not None and one.health is not Health.HEALTHY
    }


def well(sight: Sight) -> bool:
    return not ill(sight)


async def test_what_is_seen_of_whole_gpus(node: Node) -> None:
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
    assert sight.control_nodes == ("/dev/nvidiactl", "/dev/nvidia-uvm")
    assert sight.driver == node.world.driver
    uuids = [one.uuid for one in node.world.gpus]
    assert sight.gpus == tuple(
        GPU(
            uuid=uuids[index],
            index=index,
            minor=index,
            numa_node=index // 4,
            links=tuple(Link(peer, Way.NVLINK, 18) for peer in uuids if peer != uuids[index]),
            spec_nodes=(f"/dev/nvidia{index}",),
            resource="nvidia.com/gpu",
            product="NVIDIA H100 80GB HBM3",
            pci=one.pci,
            memory=one.memory,
            traits=(
                ("architecture", "Hopper"),
                ("brand", "Nvidia"),
                ("cudaComputeCapability", "9.0"),
                ("cudaDriverVersion", "12.4"),
            ),
        )
        for index, one in enumerate(node.world.gpus)
    )


async def test_what_is_seen_of_mig_instances(node: Node) -> None:
    node.world.mig(1, "1g.10gb", "2g.20gb", "1c.3g.40gb", "1g.10gb+me")
    node.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
    parent = next(one for one in sight.gpus if one.index == 1)
    parts = [one for one in sight.gpus if one.parent]
    assert parent.partitioned
    assert [one.partitioned for one in sight.gpus].count(True) == 1
    assert [one.memory >> 30 for one in parts] == [9, 19, 39, 9]
    assert [one.slot for one in parts] == ["19-0", "14-2", "9-4", "20-8"]
    assert parent.slot == ""
    assert [(one.place, one.profile, one.spec_nodes[1:]) for one in parts] == [
        ("1:0", "1g.10gb", ("/dev/nvidia-caps/nvidia-cap173", "/dev/nvidia-caps/nvidia-cap174")),
        ("1:1", "2g.20gb", ("/dev/nvidia-caps/nvidia-cap133", "/dev/nvidia-caps/nvidia-cap134")),
        ("1:2", "1c.3g.40gb", ("/dev/nvidia-caps/nvidia-cap113", "/dev/nvidia-caps/nvidia-cap114")),
        ("1:3", "1g.10gb+me", ("/dev/nvidia-caps/nvidia-cap183", "/dev/nvidia-caps/nvidia-cap184")),
    ]
    assert {(one.parent, one.numa_node, one.spec_nodes[0], one.resource, one.links) for one in parts} == {
        (parent.uuid, 0, "/dev/nvidia1", "nvidia.com/gpu", ())
    }


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ((1, 1, 4864, 40 * GIB), "1g.5gb"),
        ((1, 3, 19968, 40 * GIB), "1c.3g.20gb"),
        ((7, 7, 40192, 40 * GIB), "7g.40gb"),
        ((1, 1, 5952, 24 * GIB), "1g.6gb"),
        ((1, 1, 9984, 80 * GIB - 85 * 2**20), "1g.10gb"),
        ((0, 0, 0, 0), "0g.0gb"),
    ],
)
def test_the_name_of_a_profile(of: tuple[int, int, int, int], name: str) -> None:
    assert profile(*of) == name


def test_what_a_profiles_name_ends_in() -> None:
    ends = {"GFX": "+gfx", "NO_ME": "-me", "ALL_ME": "+me.all", "REV1": "+me"}
    numbers = ((name.partition("_SLICE_")[2], number) for name, number in vars(pynvml).items() if "_PROFILE_" in name)
    assert {number: ends[kind] for kind, number in numbers if kind in ends} == SUFFIXES


async def test_capability_nodes_without_the_table(node: Node) -> None:
    [one] = node.world.mig(0, "7g.80gb")
    node.write()
    shutil.rmtree(node.root / "proc/driver/nvidia-caps")
    gpu_instance = node.root / f"proc/driver/nvidia/capabilities/gpu0/mig/gi{one.gpu_instance}"
    (gpu_instance / "ci0").mkdir(parents=True)
    for path, minor in ((gpu_instance, 30), (gpu_instance / "ci0", 31)):
        (path / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
    assert by_uuid(sight)[one.uuid].spec_nodes == (
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap30",
        "/dev/nvidia-caps/nvidia-cap31",
    )


async def test_an_instance_without_capability_nodes_lacks_them_until_they_are_there(node: Node) -> None:
    [one] = node.world.mig(0, "7g.80gb")
    node.write()
    caps = node.root / "proc/driver/nvidia-caps/mig-minors"
    table = caps.read_text()
    caps.write_text("config 1\n")
    with capture_logs() as logs:
        async with watching(node.backend()) as watch:
            sight = await watch.until(well)
            lacks = by_uuid(sight)[one.uuid].lacks
            assert lacks.startswith("it has no capability device nodes (gpu0/gi0/access and gpu0/gi0/ci0/access)")
            caps.write_text(table)
            await watch.until(lambda now: not by_uuid(now)[one.uuid].lacks)
    assert [entry["reason"] for entry in logs if entry["event"] == "a MIG instance is not offered"] == [lacks]


@pytest.mark.parametrize("product", ["DGX Display", "NVIDIA DGX Display"])
async def test_a_display_is_not_offered(node: Node, product: str) -> None:
    """A DGX Station A100 has one; no event of it is listened to, and none of its failures takes a look away."""
    display = node.world.gpus[3]
    node.world.gpus[3] = dataclasses.replace(display, name=product)
    for function in ("nvmlDeviceRegisterEvents", "nvmlDeviceGetMigMode"):
        node.world.fails(function, UNKNOWN, gpu=3)
    node.write()
    with capture_logs() as logs:
        async with watching(node.backend()) as watch:
            sight = await watch.until(well)
            assert [one.index for one in sight.gpus] == [0, 1, 2, 4, 5, 6, 7]
            assert display.uuid not in {link.peer for one in sight.gpus for link in one.links}
            node.world.event(5, 79)
            await watch.until(ill)
    told = [(entry["event"], entry["gpu"]) for entry in logs if entry["event"] not in {"NVML answers", "Xid"}]
    assert told == [("a GPU is not offered", display.uuid)]


async def test_a_gpu_whose_name_can_not_be_told_is_no_display(node: Node) -> None:
    node.world.fails("nvmlDeviceGetName", UNKNOWN, gpu=3)
    node.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
        assert [one.index for one in sight.gpus if not one.product] == [3]
        node.world.works("nvmlDeviceGetName", gpu=3)
        node.write()
        await watch.until(lambda now: all(one.product for one in now.gpus))


async def test_links_from_gpu_to_gpu(node: Node) -> None:
    node.world.gpus[:] = a100s(node.root / "other", 4).gpus
    uuids = [one.uuid for one in node.world.gpus]
    node.world.gpus[0].links[0].active = False
    del node.world.gpus[3].links[0]
    node.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
    assert {link.peer: link.lanes for link in sight.gpus[0].links} == {uuids[1]: 3, uuids[2]: 4, uuids[3]: 4}
    assert {link.way for one in sight.gpus for link in one.links} == {Way.NVLINK}


async def test_ways_over_pcie(node: Node) -> None:
    for one in node.world.gpus:
        one.links = {}
    node.world.ways = {(0, 1): PIX, (0, 2): PXB, (0, 3): PHB}
    node.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
    assert [link.way for link in sight.gpus[0].links] == [Way.PIX, Way.PXB, Way.PHB, *[Way.SYS] * 4]
    assert [link.way for link in sight.gpus[7].links] == [*[Way.SYS] * 4, *[Way.NODE] * 3]


@pytest.mark.parametrize("text", ["-1\n", "", "many\n"], ids=["none", "empty", "no number"])
async def test_a_gpu_without_a_numa_node(node: Node, text: str) -> None:
    (node.root / "sys/bus/pci/devices" / node.world.gpus[0].pci / "numa_node").write_text(text)
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
    assert sight.gpus[0].numa_node is None


async def test_an_xid_marks_its_gpu_at_once(node: Node) -> None:
    async with watching(node.backend(pace=replace(PACE, poll=3600))) as watch:
        await watch.until(well)
        node.world.event(3, 79)
        sight = await watch.until(ill)
    assert ill(sight) == {node.world.gpus[3].uuid: TroubleKind.RESET_REQUIRED}


async def test_a_double_bit_error_marks_its_gpu(node: Node) -> None:
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.event(5, type=2)
        sight = await watch.until(ill)
    assert ill(sight) == {node.world.gpus[5].uuid: TroubleKind.RESET_REQUIRED}


async def test_an_xid_of_an_instance_marks_that_one(node: Node) -> None:
    first, second = node.world.mig(0, "1g.10gb", "1g.10gb")
    node.write()
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.event(0, 95, gpu_instance=second.gpu_instance, compute_instance=0)
        sight = await watch.until(ill)
        assert ill(sight) == {second.uuid: TroubleKind.RESET_REQUIRED}
        node.world.event(0, 48)
        sight = await watch.until(lambda now: len(ill(now)) == 3)
    assert ill(sight).keys() == {node.world.gpus[0].uuid, first.uuid, second.uuid}


async def test_an_application_leaves_its_gpu_well(node: Node) -> None:
    async with watching(node.backend()) as watch:
        await watch.until(well)
        for xid in (13, 31, 43, 45, 68, 109):
            node.world.event(1, xid)
        node.world.event(2, 62)
        sight = await watch.until(ill)
    assert ill(sight).keys() == {node.world.gpus[2].uuid}


async def test_a_gpu_that_tells_no_errors_is_looked_at_all_the_same(node: Node) -> None:
    for one in node.world.gpus:
        one.events = 0
    node.write()
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.gpus[2].recovery = 1
        node.world.write()
        await watch.until(ill)
    assert counts().waits == 0


async def test_settings_of_health_count_at_once(node: Node) -> None:
    backend = node.backend()
    async with watching(backend) as watch:
        await watch.until(well)
        node.world.event(2, 62)
        await watch.until(ill)
        backend.judge_by(Policy(disabled_health_checks="62"))
        sight = await watch.until(well)
        assert node.world.gpus[2].uuid in sight.recovered
        backend.judge_by(Policy(enabled_health_checks="13"))
        node.world.event(1, 13)
        sight = await watch.until(ill)
    assert ill(sight) == {node.world.gpus[1].uuid: TroubleKind.RESTART_APP}


async def test_a_wanted_reset_that_was_done(node: Node) -> None:
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.event(4, 48)
        sight = await watch.until(ill)
        assert ill(sight) == {node.world.gpus[4].uuid: TroubleKind.RESET_REQUIRED}
        # What a look shows that began before the error counts for nothing. One that shows GPU 2 may be such a look, the next
        # isn't; and when that shows GPU 3, it has GPU 4, too, which it asks later.
        reset = node.world.gpus[2:5]
        for wanting in (reset[:1], reset[1:]):
            for gpu in wanting:
                gpu.recovery = 1
            node.world.write()
            first = node.world.gpus.index(wanting[0])
            await watch.until(lambda now, first=first: "wants" in str(now.gpus[first].trouble))  # type: ignore[misc]
        for gpu in reset:
            gpu.recovery = 0
        node.world.write()
        sight = await watch.until(well)
    assert sight.recovered == {gpu.uuid for gpu in reset}


async def test_nothing_comes_back_by_itself_where_that_is_off(node: Node) -> None:
    async with watching(node.backend(Policy(health_recovery=Recovery.OFF))) as watch:
        await watch.until(well)
        node.world.gpus[4].recovery = 1
        node.world.write()
        await watch.until(ill)
        node.world.gpus[4].recovery = 0
        node.world.gpus[5].name = "another"
        node.world.write()
        node.load()
        node.world.event(6, 79)
        sight = await watch.until(lambda now: len(ill(now)) == 2)
    assert ill(sight).keys() == {node.world.gpus[4].uuid, node.world.gpus[6].uuid}
    assert not sight.recovered


@pytest.mark.parametrize("code", [LOST, RESET_WANTED], ids=["lost", "reset required"])
async def test_a_lost_gpu_and_its_return(node: Node, code: int) -> None:
    uuid = node.world.gpus[2].uuid
    async with watching(node.backend()) as watch:
        before = await watch.until(well)
        node.world.fails("nvmlDeviceGetUUID", code, gpu=2)
        node.world.write()
        sight = await watch.until(ill)
        assert ill(sight) == {uuid: TroubleKind.RESET_REQUIRED}
        assert [replace(one, trouble=None) for one in sight.gpus] == list(before.gpus)
        node.world.works("nvmlDeviceGetUUID", gpu=2)
        node.world.write()
        sight = await watch.until(well)
    assert sight.recovered == {uuid}


async def test_others_are_heard_while_a_gpu_is_lost(node: Node) -> None:
    async with watching(node.backend(pace=replace(PACE, lost=3600, lost_max=3600))) as watch:
        await watch.until(well)
        node.world.gpus[0].lost = True
        node.world.write()
        await watch.until(ill)
        async with asyncio.timeout(20):
            while len(ill(watch.sights[-1])) < 2:  # one that comes while NVML is opened again may be missed
                node.world.event(5, 79)
                await asyncio.sleep(0.02)
    assert ill(watch.sights[-1]).keys() == {node.world.gpus[0].uuid, node.world.gpus[5].uuid}


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetFieldValues",
    ],
)
async def test_a_call_that_fails_for_one_gpu_takes_no_other_along(node: Node, function: str) -> None:
    async with watching(node.backend()) as watch:
        before = await watch.until(well)
        node.world.fails(function, UNKNOWN, gpu=6)
        node.world.write()
        sight = await watch.until(ill)
        assert ill(sight) == {node.world.gpus[6].uuid: TroubleKind.RESTART_APP}
        assert [replace(one, trouble=None) for one in sight.gpus] == list(before.gpus)
        node.world.works(function, gpu=6)
        node.world.write()
        sight = await watch.until(well)
    assert not sight.recovered


@pytest.mark.parametrize(
    ("function", "code"),
    [("nvmlDeviceGetMigMode", 2), ("nvmlDeviceGetMaxMigDeviceCount", UNKNOWN), ("nvmlDeviceGetAttributes", UNKNOWN)],
)
async def test_a_call_that_fails_takes_no_partition_away(node: Node, function: str, code: int) -> None:
    node.world.mig(0, "3g.40gb", "3g.40gb")
    node.write()
    async with watching(node.backend()) as watch:
        before = await watch.until(
            lambda now: well(now) and all(len(one.spec_nodes) == 3 for one in now.gpus if one.parent)
        )
        node.world.fails(function, code, gpu=0)
        node.world.write()
        sight = await watch.until(ill)
    assert [replace(one, trouble=None) for one in sight.gpus] == list(before.gpus)
    assert len(ill(sight)) == 3


@pytest.mark.parametrize("function", ["nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo", "nvmlDeviceGetUUID"])
async def test_a_gpu_that_was_never_seen_is_left_out_until_it_answers(node: Node, function: str) -> None:
    node.world.fails(function, UNKNOWN, gpu=6)
    node.world.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
        assert len(sight.gpus) == 7
        node.world.works(function, gpu=6)
        node.world.write()
        await watch.until(lambda now: len(now.gpus) == 8)


async def test_a_gpu_that_is_unplugged_and_plugged_in_again(node: Node) -> None:
    gone = node.world.gpus[3]
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.event(3, 79)
        await watch.until(ill)
        node.world.gpus.remove(gone)
        node.write()
        sight = await watch.until(lambda now: len(now.gpus) == 7)
        assert gone.uuid not in by_uuid(sight)
        node.world.gpus.insert(3, gone)
        node.write()
        sight = await watch.until(lambda now: len(now.gpus) == 8 and well(now))
    assert gone.uuid in sight.recovered


async def test_a_gpu_that_is_plugged_in_again_before_its_folder_was_seen_to_go(node: Node) -> None:
    gone = node.world.gpus[3]
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.gpus.remove(gone)
        node.world.write()  # NVML loses it first.
        await watch.until(lambda now: len(now.gpus) == 7)
        node.world.gpus.insert(3, gone)
        node.write()
        await watch.until(lambda now: len(now.gpus) == 8 and well(now))


async def test_a_new_gpu_is_listed_and_watched(node: Node) -> None:
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.gpus.append(gpu(8, numa_node=1))
        node.write()
        sight = await watch.until(lambda now: len(now.gpus) == 9)
        node.world.event(8, 79)
        await watch.until(ill)
    assert sight.gpus[8].numa_node == 1


async def test_new_mig_instances_are_seen_and_old_ones_go(node: Node) -> None:
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.mig(0, "3g.40gb", "3g.40gb")
        node.write()
        sight = await watch.until(lambda now: len(now.gpus) == 10)
        assert [one.profile for one in sight.gpus[:3]] == ["", "3g.40gb", "3g.40gb"]
        node.world.no_mig(0)
        node.write()
        # A look in the moment of the change may find the instances gone and the mode still on.
        await watch.until(lambda now: len(now.gpus) == 8 and not now.gpus[0].partitioned)


async def test_memory_that_is_to_be_replaced(node: Node) -> None:
    uuid = node.world.gpus[1].uuid
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.gpus[1].rows = (0, 1, 1, 0)
        node.world.write()
        sight = await watch.until(lambda now: now.gpus[1].trouble)
        assert well(sight)
        node.world.event(1, 95)
        await watch.until(ill)
        for other in (7, 6):  # What shows the first may have begun before the error, what shows the second hasn't.
            node.world.gpus[other].rows = (0, 1, 1, 0)
            node.world.write()
            await watch.until(lambda now, other=other: now.gpus[other].trouble)  # type: ignore[misc]
        node.world.gpus[1].rows = (0, 1, 0, 0)
        node.world.write()
        sight = await watch.until(well)
        assert sight.recovered == {uuid}
        node.world.gpus[1].rows = (0, 1, 0, 1)
        node.world.write()
        sight = await watch.until(ill)
    assert ill(sight) == {uuid: TroubleKind.UNKNOWN}


async def test_the_driver_is_loaded_anew(node: Node) -> None:
    every = {one.uuid for one in node.world.gpus}
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.event(0, 79)
        await watch.until(ill)
        for function in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlEventSetWait"):
            node.world.fails(function, NOT_LOADED)
        node.world.write()
        sight = await watch.until(lambda now: len(ill(now)) == 8)
        assert set(ill(sight).values()) == {TroubleKind.RESET_REQUIRED, TroubleKind.RESTART_APP}
        node.world.rules.clear()
        node.load()
        node.world.write()
        sight = await watch.until(well)
    assert sight.recovered == every


async def test_nvml_that_fails_in_another_way_takes_no_gpu_away(node: Node) -> None:
    async with watching(node.backend()) as watch:
        await watch.until(well)
        for function in ("nvmlInit", "nvmlDeviceGetCount"):
            node.world.fails(function, UNKNOWN)
        node.world.write()
        sight = await watch.until(lambda now: now.gpus[0].trouble)
        assert well(sight)
        assert not watch.backend.hindrance, "each GPU says it itself"
        node.world.rules.clear()
        node.world.write()
        await watch.until(lambda now: not now.gpus[0].trouble)


@pytest.mark.parametrize("code", [NOT_LOADED, MISMATCH, UNKNOWN], ids=["no driver", "mismatch", "broken"])
async def test_a_driver_that_comes_late(node: Node, code: int) -> None:
    node.world.fails("nvmlInit", code)
    node.world.write()
    with capture_logs() as logs:
        async with watching(node.backend()) as watch:
            await until(lambda: bool(logs), 20)
            if code == NOT_LOADED:  # That was a look, and there is none.
                assert (await watch.until(lambda now: not now.gpus)).gpus == ()
            else:
                assert not watch.sights
            assert watch.backend.hindrance == f"NVML can't be used: {logs[0]['reason']}"
            node.world.works("nvmlInit")
            node.world.write()
            await watch.until(lambda now: len(now.gpus) == 8)
            assert not watch.backend.hindrance
    assert [one["event"] for one in logs] == ["NVML can't be used", "NVML answers"]


async def test_a_half_initialised_nvml(node: Node) -> None:
    node.world.fails("nvmlDeviceGetCount", UNKNOWN)
    node.world.write()
    with pytest.raises(GiveUpError, match="nvmlDeviceGetCount") as given_up:
        await Watch(node.backend(Policy(fail_on_init_error=True))).follow()
    assert given_up.value.status == 1


@pytest.mark.parametrize("missing", ["library", "driver"])
async def test_a_first_failure_can_be_final(node: Node, missing: str) -> None:
    node.world.fails("nvmlInit", NOT_LOADED)
    node.world.write()
    backend = node.backend(Policy(fail_on_init_error=True))
    if missing == "library":
        backend = NvidiaBackend(Policy(fail_on_init_error=True), library=str(node.root / "no.so"), pace=PACE)
    with pytest.raises(GiveUpError, match="Cannot use NVML") as given_up:
        await Watch(backend).follow()
    assert given_up.value.status == 1
    assert {"library": "its library visible", "driver": "Load the NVIDIA driver"}[missing] in str(given_up.value)


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (4, "Run the gateway as root"),
        (6, "Does this node have an NVIDIA GPU"),
        (NOT_LOADED, "Load the NVIDIA driver on this node."),
        (12, "Is the NVIDIA driver installed on this node"),
        (MISMATCH, "The driver was upgraded: restart the container"),
        (UNKNOWN, "Does nvidia-smi work here?"),
    ],
)
async def test_each_failure_of_nvml_has_its_own_cure(node: Node, code: int, cure: str) -> None:
    node.world.fails("nvmlInit", code)
    node.world.write()
    with pytest.raises(GiveUpError) as given_up:
        await Watch(node.backend(Policy(fail_on_init_error=True))).follow()
    assert f"(NVML error {code}). {cure}" in str(given_up.value)
    assert str(given_up.value).endswith(" To keep trying, set FAIL_ON_INIT_ERROR=false.")


async def test_a_later_failure_is_not_final(node: Node) -> None:
    async with watching(node.backend(Policy(fail_on_init_error=True))) as watch:
        await watch.until(well)
        for function in ("nvmlInit", "nvmlDeviceGetCount"):
            node.world.fails(function, NOT_LOADED)
        node.world.write()
        await watch.until(ill)
        node.world.rules.clear()
        node.world.write()
        await watch.until(well)


async def test_stale_libraries_serve_for_a_grace_and_then_end_the_process(node: Node) -> None:
    watch = Watch(node.backend(pace=replace(PACE, grace=0.3)))
    following = asyncio.create_task(watch.follow())
    await watch.until(well)
    for function in ("nvmlInit", "nvmlDeviceGetCount"):
        node.world.fails(function, MISMATCH)
    node.world.write()
    with pytest.raises(GiveUpError, match="restart") as given_up:
        await following
    assert given_up.value.status == 75
    assert all(well(sight) and len(sight.gpus) == 8 for sight in watch.sights)


async def told(node: Node, watch: Watch, index: int, xid: int) -> Sight:
    """Have an error told, again and again: NVML that is just being opened anew misses what comes in that moment."""
    for _ in range(20):
        node.world.event(index, xid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                return await watch.until(ill)
    raise AssertionError(f"nobody heard of Xid {xid} of GPU {index}")


async def test_release_and_acquire_around_a_change_of_mig(node: Node) -> None:
    backend = node.backend()
    uuid = node.world.gpus[2].uuid
    with capture_logs() as logs:
        async with watching(backend) as watch:
            await watch.until(well)
            node.world.fails("nvmlDeviceGetHandleByPciBusId", UNKNOWN, gpu=2)
            node.world.write()
            await backend.release([uuid])
            sight = await watch.until(lambda now: now.released)
            assert sight.released == {uuid}
            node.world.fails("nvmlDeviceGetHandleByIndex", UNKNOWN, gpu=2)
            node.world.mig(2, "7g.80gb")
            node.write()
            sight = await told(node, watch, 5, 79)
            assert ill(sight).keys() == {node.world.gpus[5].uuid}
            assert len(sight.gpus) == 8
            node.world.rules.clear()
            node.write()
            await backend.acquire([uuid])
            sight = await watch.until(lambda now: len(now.gpus) == 9)
    assert not sight.released
    assert not [one for one in logs if one["event"] == "a GPU can't be looked at"]


@pytest.fixture
def nodes(node: Node) -> Callable[[], set[str]]:
    """NVML opens the device nodes of GPUs, of the first one with nvmlInit: say which it holds."""
    node.world.nodes = node.root / "dev"
    for one in node.world.gpus:
        (node.world.nodes / f"nvidia{one.minor}").touch()
    (node.root / "proc/self").symlink_to("/proc/self")
    node.write()

    def held() -> set[str]:
        links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return {link.name for link in links if link.parent == node.world.nodes}

    return held


def test_it_listens_to_errors_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that a GPU tells: a driver's mask has changes of clocks and of power, too (0xff9f with driver 580)."""
    asked: list[int] = []
    node.world.gpus[0].events = 0xFF9F
    node.write()
    register = pynvml.nvmlDeviceRegisterEvents

    def noted(handle: object, kinds: int, events: object) -> None:
        asked.append(kinds)
        register(handle, kinds, events)

    monkeypatch.setattr(pynvml, "nvmlDeviceRegisterEvents", noted)
    nvml = Nvml(str(library()))
    nvml.open()
    nvml.listen(nvml.at(0))
    nvml.close()
    assert asked == [pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError]


def test_it_counts_no_more_gpus_than_a_node_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1 << 31)
    assert Nvml(str(library())).count() == 256


@pytest.mark.parametrize("question", ["nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetAttributes"])
async def test_mig_devices_that_the_driver_cannot_tell_of_take_no_other_gpu_away(node: Node, question: str) -> None:
    node.world.mig(0, "1g.10gb")
    node.world.fails(question, pynvml.NVML_ERROR_NOT_SUPPORTED)
    node.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
        assert ([one.index for one in sight.gpus], [one.index for one in sight.unusable]) == ([*range(1, 8)], ["0"])
        assert question in sight.unusable[0].reason


async def test_health_that_the_driver_does_not_tell_us_is_as_if_it_did_not_know_it(node: Node) -> None:
    node.world.fails("nvmlDeviceGetRemappedRows", pynvml.NVML_ERROR_NO_PERMISSION)
    node.write()
    async with watching(node.backend()) as watch:
        assert len((await watch.until(well)).gpus) == 8


async def test_a_gpu_is_not_offered_whole_while_its_mig_mode_can_not_be_asked(node: Node) -> None:
    node.world.fails("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_NO_PERMISSION, gpu=3)
    node.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
        assert [one.index for one in sight.gpus] == [0, 1, 2, 4, 5, 6, 7]
        lost = node.world.gpus[3]
        assert [(one.index, one.pci, one.id) for one in sight.unusable] == [("3", lost.pci, lost.uuid)]
        assert "Insufficient Permissions" in sight.unusable[0].reason


async def test_a_released_gpus_node_is_closed(node: Node, nodes: Callable[[], set[str]]) -> None:
    backend, uuid = node.backend(), node.world.gpus[2].uuid
    async with watching(backend) as watch:
        await watch.until(well)
        await backend.release([uuid])
        assert nodes() == {f"nvidia{index}" for index in range(8) if index != 2}
        await told(node, watch, 5, 79)
        await backend.acquire([uuid])
        await watch.until(lambda now: not now.released and "nvidia2" in nodes())


async def test_where_nvml_opens_a_released_gpu_unasked_it_stays_closed(
    node: Node, nodes: Callable[[], set[str]]
) -> None:
    backend = node.backend()
    uuids = [one.uuid for one in node.world.gpus]
    async with watching(backend) as watch:
        await watch.until(well)
        await backend.release([uuids[0]])
        assert nodes() == set()
        sight = await watch.until(lambda now: any(one.trouble for one in now.gpus))
        reason = by_uuid(sight)[uuids[1]].trouble
        assert reason is not None
        assert reason.kind is TroubleKind.APPLICATION
        assert reason.reason.startswith("NVML can't be asked: it opens /dev/nvidia0 unasked, so it stays closed")
        calls = counts().calls
        await backend.release([uuids[1]])
        await backend.acquire([uuids[1]])
        await asyncio.sleep(5 * PACE.poll)  # nothing must happen
        assert (counts().calls, nodes()) == (calls, set())
        await backend.acquire([uuids[0]])
        await watch.until(lambda now: well(now) and len(nodes()) == 8)


async def test_release_of_all_closes_nvml(node: Node) -> None:
    backend = node.backend()
    async with watching(backend) as watch:
        before = await watch.until(well)
        await backend.release(())
        sight = await watch.until(lambda now: len(now.released) == 8)
        await asyncio.sleep(5 * PACE.poll)  # nothing must happen
        assert counts().references == 0
        assert sight.gpus == before.gpus
        node.load()
        await backend.acquire(())
        sight = await watch.until(lambda now: not now.released and now.recovered)
    assert sight.recovered == {one.uuid for one in node.world.gpus}


async def test_errors_that_have_come_when_nvml_is_to_be_closed_are_told(node: Node) -> None:
    nvml, taken = Nvml(str(library())), list[News]()
    nvml.open()
    for index in range(3):
        nvml.listen(nvml.at(index))
    looker = Looker(nvml, Kernel(node.root, node.root, node.root), PACE, Let(), Guests())
    looker._loop, looker._take = asyncio.get_running_loop(), taken.append
    for index in range(3):
        node.world.event(index, 79)
    stop = threading.Event()
    stop.set()
    await asyncio.to_thread(looker._listen, stop)
    nvml.close()
    assert [one.event.uuid for one in taken if isinstance(one, Happened)] == [one.uuid for one in node.world.gpus[:3]]


async def test_a_gpu_that_was_reset_while_it_was_released(node: Node) -> None:
    backend = node.backend()
    board = node.world.gpus[2]
    async with watching(backend) as watch:
        await watch.until(well)
        board.recovery = 4
        node.write()
        await watch.until(ill)
        await backend.release([board.uuid])
        board.recovery = 0
        node.write()
        await backend.acquire([board.uuid])
        sight = await watch.until(well)
    assert sight.recovered == {board.uuid}


async def test_an_operator_is_believed(node: Node) -> None:
    """Where nothing else ends an error: a driver that doesn't tell of resets."""
    uuid = node.world.gpus[3].uuid
    backend = node.backend()
    async with watching(backend) as watch:
        await watch.until(well)
        node.world.event(3, 48)
        await watch.until(ill)
        await backend.acquire([uuid])
        sight = await watch.until(well)
    assert uuid in sight.recovered


async def test_a_library_that_hangs_before_any_gpu_was_seen_is_told(node: Node) -> None:
    node.world.fails("nvmlDeviceGetCount", 0, hangs=60)
    node.world.write()
    backend = node.backend(pace=replace(PACE, hang=0.1))
    async with watching(backend):
        await until(lambda: "NVML doesn't answer" in backend.hindrance)
        node.world.works("nvmlDeviceGetCount")
        node.world.write()
        await until(lambda: not backend.hindrance)


async def test_a_call_that_hangs(node: Node) -> None:
    uuid = node.world.gpus[3].uuid
    async with watching(node.backend(pace=replace(PACE, hang=0.2))) as watch:
        await watch.until(well)
        node.world.fails("nvmlDeviceGetMigMode", 0, gpu=3, hangs=60)
        node.world.write()
        sight = await watch.until(ill)
        assert ill(sight) == {uuid: TroubleKind.RESTART_APP}
        node.world.event(6, 79)
        sight = await watch.until(lambda now: len(ill(now)) == 2)
        assert ill(sight).keys() == {uuid, node.world.gpus[6].uuid}
        node.world.works("nvmlDeviceGetMigMode", gpu=3)
        node.world.write()
        sight = await watch.until(lambda now: uuid not in ill(now))


@pytest.mark.parametrize(
    ("had", "kind"),
    [
        (None, TroubleKind.RESTART_APP),
        (TroubleKind.APPLICATION, TroubleKind.RESTART_APP),
        (TroubleKind.RESET_REQUIRED, TroubleKind.RESET_REQUIRED),
    ],
)
def test_what_an_application_did_hides_no_call_that_hangs(
    node: Node, had: TroubleKind | None, kind: TroubleKind
) -> None:
    one = node.backend()
    one._stuck = "GPU-a"
    one._health = cast("Any", SimpleNamespace(trouble=lambda *_: None if had is None else Trouble("before", had)))
    found = one._trouble(cast("Any", SimpleNamespace(uuid="GPU-a", board="GPU-a")))
    assert found is not None
    assert found.kind is kind


async def test_a_wait_that_hangs_is_told(node: Node) -> None:
    node.world.fails("nvmlEventSetWait", 0, hangs=60)
    node.world.write()
    with capture_logs() as logs:
        async with watching(node.backend(pace=replace(PACE, hang=0.1))) as watch:
            await watch.until(well)
            await until(lambda: len(logs) >= 2, 20)
            node.world.rules.clear()
            node.world.write()
    assert logs[1] == {
        "event": "NVML doesn't answer",
        "log_level": "error",
        "call": "nvmlEventSetWait",
        "seconds": 0.1,
    }


async def test_release_says_so_where_nvml_hangs(node: Node) -> None:
    backend = node.backend(pace=replace(PACE, hang=0.1))
    async with watching(backend) as watch:
        await watch.until(well)
        node.world.fails("nvmlDeviceGetMigMode", 0, gpu=3, hangs=60)
        node.world.write()
        await watch.until(ill)
        with pytest.raises(TimeoutError, match="hangs"):
            await backend.release(())
        node.world.rules.clear()
        node.world.write()


async def test_the_watch_ends_although_a_call_hangs(node: Node) -> None:
    async with watching(node.backend(pace=replace(PACE, hang=0.2, leave=0.05))) as watch:
        await watch.until(well)
        node.world.fails("nvmlDeviceGetMigMode", 0, gpu=3, hangs=60)
        node.world.write()
        await watch.until(ill)
    assert threads()
    node.world.rules.clear()
    node.world.write()


async def test_what_the_driver_says_is_checked(node: Node) -> None:
    node.world.gpus[0].uuid = "GPU-" + "x" * 60 + "|"
    node.world.gpus[1].name = "a\x1b[31mname"
    node.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(well)
    assert [one.index for one in sight.gpus] == list(range(1, 8))
    assert sight.gpus[0].product == "a?[31mname"


def shape(node: Node) -> dict[str, tuple[str, str]]:
    """The GPUs of the world: UUID, with parent and profile."""
    shown: dict[str, tuple[str, str]] = {}
    for board in node.world.gpus:
        shown[board.uuid] = ("", "")
        shown |= {one.uuid: (board.uuid, one.profile) for one in board.instances}
    return shown


FAILING = ("nvmlDeviceGetUUID", "nvmlDeviceGetMigMode", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetRemappedRows")


async def misbehave(node: Node, chance: random.Random, away: list[fake.GPU]) -> None:
    """Let one thing happen, of all that can."""
    world = node.world
    index = chance.randrange(len(world.gpus))
    board = world.gpus[index]
    match chance.randrange(9):
        case 0:
            world.event(index, chance.choice((13, 48, 63, 79, 94, 119, 999, 2**63)))
        case 1:
            world.event(index, type=2)
        case 2 if len(world.gpus) > 4:
            world.rules.clear()
            away.append(world.gpus.pop(index))
        case 3 if away:
            world.rules.clear()
            world.gpus.insert(chance.randrange(len(world.gpus) + 1), away.pop())
        case 4:
            world.mig(index, *chance.choice([("1g.10gb",) * 7, ("3g.40gb", "2g.20gb"), ("7g.80gb",)]))
        case 5:
            world.no_mig(index)
        case 6:
            world.fails(chance.choice(FAILING), chance.choice((LOST, UNKNOWN, 2)), gpu=index)
        case 7:
            board.lost = not board.lost
        case _:
            world.fails(
                chance.choice(("nvmlInit", "nvmlDeviceGetCount", "nvmlEventSetWait")),
                chance.choice((NOT_LOADED, UNKNOWN, LOST)),
            )
    node.write()
    await asyncio.sleep(chance.choice((0, 0, 0.01, 0.03)))


@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 100, 10)], ids=str)
async def test_random_faults_end_and_the_list_is_what_is_there(node: Node, seeds: range) -> None:
    fresh = [copy(one) for one in node.world.gpus]
    for seed in seeds:
        chance = random.Random(seed)  # noqa: S311 (a test's choice)
        before = descriptors(os.getpid())
        away: list[fake.GPU] = []
        async with watching(node.backend()) as watch:
            await watch.until(well)
            for _ in range(chance.randrange(2, 9)):
                await misbehave(node, chance, away)
            node.world.rules.clear()
            for board in node.world.gpus:
                board.lost = False
            node.load()
            node.write()
            there = shape(node)

            def right(now: Sight, there: dict[str, tuple[str, str]] = there) -> bool:
                shown = {one.uuid: (one.parent, one.profile) for one in now.gpus}
                order = [one.uuid for one in now.gpus if not one.parent] == [one.uuid for one in node.world.gpus]
                nodes = all(len(one.spec_nodes) == (3 if one.parent else 1) for one in now.gpus)
                unseen = any("can't be" in str(one.trouble) or "any more" in str(one.trouble) for one in now.gpus)
                return shown == there and order and nodes and not unseen

            await watch.until(right)
        assert not descriptors(os.getpid()) - before, seed
        node.world.gpus[:] = [copy(one) for one in fresh]
        node.write()


@pytest.mark.parametrize(
    "text",
    [
        "GPU-../../etc",
        "GPU-a..b",
        "MIG-GPU-1/../2",
        "GPU-a/b",
        "GPU-1/2",
        "MIG-GPU-1/2/3/4",
        "GPU-",
        "/GPU-1",
        "GPU-a b",
        "GPU-é",
    ],
)
def test_a_uuid_that_would_be_a_path_is_none(text: str) -> None:
    with pytest.raises(nvml_library.NvmlError, match="expected a UUID"):
        nvml_library._uuid(text)


@pytest.mark.parametrize(
    "text",
    [
        "GPU-5f3a1b2c-0000-1111-2222-333344445555",
        "MIG-5f3a1b2c-0000-1111-2222-333344445555",
        "MIG-GPU-5f3a1b2c-0000/1/0",
    ],
)
def test_a_uuid_is_taken_as_drivers_spell_it(text: str) -> None:
    assert nvml_library._uuid(text) == text


@pytest.mark.parametrize("shown", [True, False], ids=["the kernel shows addresses", "it shows none"])
async def test_a_gpu_is_known_by_its_address_after_the_bus_changed(node: Node, shown: bool) -> None:
    """GPU 3 went, so its index is that of the next one, which fails: that one is unhealthy, not GPU 3."""
    gone, failing = node.world.gpus[3], node.world.gpus[4]
    if not shown:
        shutil.rmtree(node.root / "proc/driver/nvidia/gpus")
    async with watching(node.backend()) as watch:
        await watch.until(well)
        node.world.gpus.remove(gone)
        node.world.fails("nvmlDeviceGetHandleByIndex", UNKNOWN, gpu=3)
        if shown:
            node.write()
            sight = await watch.until(lambda now: len(now.gpus) == 7)
            assert ill(sight) == {failing.uuid: TroubleKind.RESTART_APP}
            return
        node.world.write()
        sight = await watch.until(lambda now: len(now.gpus) == 6)
    assert not ill(sight)
    assert [(one.index, one.pci, one.id) for one in sight.unusable] == [("3", "", "")]


@pytest.mark.parametrize("uncounted", [[3], [0, 7], [*range(8)]], ids=["one", "two", "all"])
async def test_a_gpu_that_the_kernel_has_and_nvml_does_not_count(node: Node, uncounted: list[int]) -> None:
    """So it is if its device node is missing (seen with driver 580)."""
    missing = [node.world.gpus[index] for index in uncounted]
    for one in missing:
        text = f"GPU UUID: \t {one.uuid}\nDevice Minor: \t {one.minor}\nGPU Excluded:\t No\n"
        (node.root / "proc/driver/nvidia/gpus" / one.pci / "information").write_text(text)
        (node.root / f"dev/nvidia{one.minor}").unlink()
        node.world.gpus.remove(one)
    node.world.write()
    async with watching(node.backend()) as watch:
        sight = await watch.until(lambda now: len(now.gpus) == 8 - len(missing))
    assert [(one.pci, one.id) for one in sight.unusable] == [(one.pci, one.uuid) for one in missing]
    assert all(
        f"/dev/nvidia{gpu.minor} is missing" in one.reason for gpu, one in zip(missing, sight.unusable, strict=True)
    )


@pytest.mark.parametrize(
    ("node_name", "devices", "without_uvm", "missing"),
    [
        pytest.param("nvidia-uvm", "", False, True, id="every CUDA program needs it"),
        pytest.param("nvidiactl", "", False, True, id="and the control node"),
        pytest.param("nvidia3", "", False, True, id="a GPU's own"),
        pytest.param(
            "nvidia-uvm", "510 nvidia-uvm", True, False, id="kept from this container, and its module is loaded"
        ),
        pytest.param("nvidia-uvm", "", True, True, id="and its module isn't"),
    ],
)
async def test_device_nodes_that_are_missing(
    node: Node, node_name: str, devices: str, without_uvm: bool, missing: bool
) -> None:
    (node.root / "dev" / node_name).unlink()
    (node.root / "proc/devices").write_text(devices)
    backend = NvidiaBackend(
        Policy(),
        library=str(library()),
        sys=node.root / "sys",
        proc=node.root / "proc",
        dev=node.root / "dev",
        pace=PACE,
        without_uvm=without_uvm,
    )
    async with watching(backend) as watch:
        assert (await watch.until(well)).missing == ((f"/dev/{node_name}",) if missing else ())
        (node.root / "dev" / node_name).touch()
        await watch.until(lambda now: not now.missing)


@pytest.mark.parametrize(
    ("code", "words"), [(9, "/dev/nvidiactl is missing"), (4, "/dev/nvidiactl is missing"), (999, "Unknown Error")]
)
async def test_a_driver_that_is_loaded_and_has_no_control_node(node: Node, code: int, words: str) -> None:
    (node.root / "dev/nvidiactl").unlink()
    node.world.fails("nvmlInit", code)
    node.world.write()
    with pytest.raises(GiveUpError, match=words):
        await Watch(node.backend(Policy(fail_on_init_error=True))).follow()
