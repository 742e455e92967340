"""GPUs that an operator leaves out (``--exclude-devices``): by which words, of which vendor, and until when a pod keeps one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from devices.combined import Combined
from devices.generic import GenericSource
from devices.gpu.amd.backend import AmdBackend
from devices.gpu.amd.exporter import Exporter
from devices.gpu.amd.vendor import AMD
from devices.gpu.model import GPU
from devices.gpu.naming import left_out
from devices.gpu.nvidia.vendor import NVIDIA
from devices.gpu.simulated.backend import VENDORS, SimulatedBackend
from devices.gpu.source import GPUSource
from devices.model import Health
from devices.policy import MigStrategy, Policy
from devices.source import DeviceSource, Fate, Inventory, Unusable
from gateway.configuration.effective import idle
from tests.fakes.amd import Board, Sysfs
from tests.fakes.nvml import dgx
from tests.unit import test_gpu_nvidia, test_gpu_source

GPUS = "nvidia.com/gpu"

BIG = GPU("GPU-5f3a0c6e", 0, 0, pci="0000:07:00.0", product="NVIDIA H100 80GB HBM3", resource=GPUS, partitioned=True)
PART = replace(BIG, uuid="MIG-0a41", parent=BIG.uuid, place="0:1", profile="1g.10gb", partitioned=False)
DISPLAY = GPU("GPU-77b0", 1, 1, pci="0000:c5:00.0", product="NVIDIA T400 4GB", resource=GPUS)
TENTH = GPU("GPU-9d4a", 10, 10, pci="0001:07:00.0", product="NVIDIA H100 80GB HBM3", resource=GPUS)
ALL = (BIG, PART, DISPLAY, TENTH)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        pytest.param("GPU-77b0", [DISPLAY], id="UUID"),
        pytest.param("gpu-77B0", [DISPLAY], id="whatever its case"),
        pytest.param("GPU-77", [], id="the beginning alone is not enough"),
        pytest.param("GPU-77*", [DISPLAY], id="the beginning and a star"),
        pytest.param("1", [DISPLAY], id="index: not 10 also"),
        pytest.param("0", [BIG, PART], id="a GPU takes its partitions with it"),
        pytest.param("0:1", [PART], id="a partition alone, by place"),
        pytest.param("MIG-0a41", [PART], id="a partition alone, by UUID"),
        pytest.param("0000:c5:00.0", [DISPLAY], id="PCI address"),
        pytest.param("00000000:C5:00.0", [DISPLAY], id="PCI address as nvidia-smi writes it"),
        pytest.param("c5:00.0", [DISPLAY], id="PCI address as lspci writes it"),
        pytest.param("07:00.0", [BIG, PART], id="without a domain it is of the first one"),
        pytest.param("00000001:07:00.0", [TENTH], id="another domain"),
        pytest.param("NVIDIA T400 4GB", [DISPLAY], id="product"),
        pytest.param("*h100*", [BIG, PART, TENTH], id="some of a product"),
        pytest.param("T400", [], id="a part of a product is none"),
        pytest.param("GPU-[57]*", [], id="brackets are themselves"),
        pytest.param("*", ALL, id="all"),
    ],
)
def test_what_a_pattern_leaves_out(pattern: str, expected: Sequence[GPU]) -> None:
    assert left_out(ALL, (pattern,)) == {gpu.uuid: (pattern,) for gpu in expected}


# Of each vendor.

Make = Callable[[Path, pytest.MonkeyPatch, Policy], DeviceSource]


def nvidia(root: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy) -> DeviceSource:
    world = dgx(root / "world", count=3)
    monkeypatch.setenv("FAKE_NVML_WORLD", str(world.path))
    world.gpus[1].name = "NVIDIA T400 4GB"
    world.gpus[1].uuid = "GPU-odd"
    world.gpus[1].pci = "0000:c5:00.0"
    return GPUSource(test_gpu_nvidia.Node(root, world).backend(policy), policy, (NVIDIA,))


def amd(root: Path, _: pytest.MonkeyPatch, policy: Policy) -> DeviceSource:
    boards = [
        Board("0000:03:00.0", product="MI210"),
        Board("0000:c5:00.0", product="NVIDIA T400 4GB"),
        Board("0000:e3:00.0"),
    ]
    tree = Sysfs(root, boards).write()
    return GPUSource(AmdBackend(tree.root, Exporter(root / "no.socket")), policy, (AMD,))


def simulated(root: Path, _: pytest.MonkeyPatch, policy: Policy) -> DeviceSource:
    profile = root / "profile.yaml"
    profile.write_text("resources: {nvidia.com/gpu: {gpus: 3}}")
    return GPUSource(SimulatedBackend(str(profile)), policy, VENDORS)


async def listed(source: DeviceSource) -> Inventory:
    async with asyncio.timeout(20), contextlib.aclosing(source.watch()) as inventories:
        return await anext(inventories)


@pytest.mark.parametrize(
    ("make", "patterns"),
    [
        pytest.param(nvidia, ("GPU-odd", "1", "0000:c5:00.0", "*T400*"), id="NVIDIA"),
        pytest.param(amd, ("0000:c5:00.0", "1", "*T400*"), id="AMD"),
        pytest.param(simulated, ("1",), id="simulated"),
    ],
)
async def test_a_gpu_of_any_vendor_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make, patterns: tuple[str, ...]
) -> None:
    """The others keep their indexes and minors, and the status says which setting did it."""

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    source = make(folder("all"), monkeypatch, Policy())
    [(resource, whole)] = (await listed(source)).items()
    facts = source.facts(resource)
    for number, pattern in enumerate(patterns):
        source = make(folder(str(number)), monkeypatch, Policy(excluded=(pattern,)))
        there = (await listed(source))[resource].devices
        first, odd, last = whole.devices
        assert [one.id for one in there] == [first.id, last.id]
        now = source.facts(resource)
        assert [(now(one.id).index, now(one.id).minor) for one in there] == [
            (facts(one).index, facts(one).minor) for one in (first.id, last.id)
        ]
        (out,) = source.unusable()
        assert (out.id, out.index, out.excluded) == (odd.id, "1", True)
        assert out.reason == f"the setting exclude-devices names it ({pattern})"
        assert source.hindrances() == ()


async def test_a_display_that_is_left_out_does_not_count_for_the_mig_strategy() -> None:
    watched = test_gpu_source.Watched(Policy(mig_strategy=MigStrategy.SINGLE, excluded=("*T400*",)))
    assert await watched.sees(BIG, PART, DISPLAY) == {GPUS: [PART.uuid]}
    await watched.close()


async def test_a_gpu_stays_left_out_while_its_product_can_not_be_read() -> None:
    watched = test_gpu_source.Watched(Policy(excluded=("*T400*",)))
    assert await watched.sees(DISPLAY, TENTH) == {GPUS: [TENTH.uuid]}
    assert await watched.sees(replace(DISPLAY, product=""), TENTH) == {GPUS: [TENTH.uuid]}
    await watched.close()


async def test_a_gpu_is_left_out_of_what_can_not_be_named() -> None:
    """While the strategy ``single`` has no name for the node, the list stays, but for what is to be left out."""
    watched = test_gpu_source.Watched(Policy(mig_strategy=MigStrategy.SINGLE))
    whole = replace(BIG, partitioned=False)
    assert await watched.sees(whole, DISPLAY, TENTH) == {GPUS: [BIG.uuid, DISPLAY.uuid, TENTH.uuid]}
    await watched.sees(BIG, PART, DISPLAY, TENTH)
    watched.source.adopt(Policy(mig_strategy=MigStrategy.SINGLE, excluded=(TENTH.uuid,)))
    devices = (await watched.next())[GPUS].devices
    assert [one.id for one in devices if one.health is Health.HEALTHY] == [DISPLAY.uuid]
    assert TENTH.uuid not in {one.id for one in devices}
    await watched.close()


@pytest.mark.parametrize(
    ("before", "device", "fate"),
    [
        pytest.param([DISPLAY, TENTH], DISPLAY.uuid, Fate.EXCLUDED, id="it is there"),
        pytest.param([DISPLAY, TENTH], "GPU-old", Fate.EXCLUDED, id="it went before this start, and its UUID is named"),
        pytest.param([DISPLAY, TENTH], "GPU-other", Fate.UNKNOWN, id="nothing names it"),
    ],
)
async def test_what_is_left_out_counts_as_no_loss(before: list[GPU], device: str, fate: Fate) -> None:
    watched = test_gpu_source.Watched(Policy(excluded=("*T400*", "GPU-old")))
    await watched.sees(*before)
    assert watched.source.fate(GPUS, device) is fate
    assert Combined([watched.source]).fate("another.com/name", device) is (Fate.LOST if fate is Fate.UNKNOWN else fate)
    await watched.close()


async def test_a_lost_gpu_that_is_left_out_is_no_hindrance() -> None:
    watched = test_gpu_source.Watched(Policy(excluded=("00000000:C5:00.0",), fail_on_init_error=True))
    await watched.sees(TENTH, unusable=(Unusable("test", "it is lost", "1", "0000:c5:00.0"),))
    assert [(one.excluded, one.patterns) for one in watched.source.unusable()] == [(True, ("00000000:C5:00.0",))]
    assert watched.source.hindrances() == ()
    await watched.close()


# While a pod holds it.


# What does nothing.


@pytest.mark.parametrize(
    ("policy", "backends", "said"),
    [
        pytest.param(Policy(), ["amd"], [], id="nothing is set"),
        pytest.param(
            Policy(excluded=("7", "T400")),
            ["nvidia"],
            ["exclude-devices: '7' names no GPU"],
            id="a pattern without a GPU",
        ),
        pytest.param(
            Policy(gpu_names=(("*", GPUS),)), ["amd"], ["resources.gpus has no effect"], id="NVIDIA's names with AMD"
        ),
        pytest.param(Policy(gpu_names=(("*", GPUS),)), ["nvidia", "amd"], [], id="with both vendors"),
        pytest.param(Policy(gpu_names=(("*", GPUS),)), ["simulated"], [], id="simulated GPUs are of any vendor"),
        pytest.param(
            Policy(mig_strategy=MigStrategy.MIXED), ["amd", "generic"], ["mig-strategy has no effect"], id="a flag"
        ),
    ],
)
def test_a_setting_that_does_nothing_is_told(policy: Policy, backends: list[str], said: list[str]) -> None:
    class Source(GenericSource):
        def unusable(self) -> tuple[Unusable, ...]:
            return (Unusable("nvidia", "", patterns=("T400",)),)

    source = Source(Policy())
    source.name = "+".join(backends)
    found = idle(policy, source)
    assert len(found) == len(said)
    assert all(one.startswith(words) for one, words in zip(found, said, strict=True))
