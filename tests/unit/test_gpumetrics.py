"""The GPUs' own gauges: read beside those who watch, told under DCGM's names with the pods, and never waited for."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from devices.combined import Combined
from devices.gpu.amd import telemetry as amd
from devices.gpu.model import GPU
from devices.gpu.nvidia import telemetry
from devices.gpu.nvidia.watch import Guests
from devices.telemetry import Measured, Reading
from gateway.configuration.settings import Settings
from gateway.lab.gatewayproc import GatewayProcess, gateway_command
from gateway.telling import gpumetrics
from gateway.telling.gpumetrics import FAMILIES, Sampler, holders, text
from tests.fakes.nvml import counts, dgx, library
from tests.unit.kubernetes import until
from tests.unit.test_gpu_nvidia import Node, node, watching
from tests.unit.test_probes import get

__all__ = ["node"]

GPU_0 = Reading("GPU-0", "0", 0, "0000:07:00.0", "H100", "", 10, 1024, 2048, 40, 100.5)


def samples(body: bytes) -> list[tuple[str, dict[str, str], float]]:
    found = text_string_to_metric_families(body.decode())
    return [(one.name, one.labels, one.value) for family in found for one in family.samples]


# What the text says.


def test_a_gpu_has_dcgms_names_units_and_labels() -> None:
    labels = {
        "gpu": "0",
        "UUID": "GPU-0",
        "pci_bus_id": "00000000:07:00.0",
        "device": "nvidia0",
        "modelName": "H100",
        "Hostname": "n1",
        "GPU_I_PROFILE": "",
        "GPU_I_ID": "",
        "namespace": "ns",
        "pod": "p",
        "container": "c",
    }
    assert samples(text([GPU_0], {"GPU-0": [("ns", "p", "c")]}, "n1")) == [
        ("DCGM_FI_DEV_GPU_UTIL", labels, 10),
        ("DCGM_FI_DEV_FB_USED", labels, 1024),
        ("DCGM_FI_DEV_FB_FREE", labels, 2048),
        ("DCGM_FI_DEV_GPU_TEMP", labels, 40),
        ("DCGM_FI_DEV_POWER_USAGE", labels, 100.5),
    ]


def test_a_shared_gpu_has_a_row_for_each_container_and_a_free_one_a_row_without() -> None:
    found = samples(text([GPU_0, Reading("GPU-1", "1", 1, busy=0)], {"GPU-0": [("a", "p", "c"), ("a", "q", "c")]}, "n"))
    busy = [(labels["UUID"], labels["pod"]) for name, labels, _ in found if name == "DCGM_FI_DEV_GPU_UTIL"]
    assert busy == [("GPU-0", "p"), ("GPU-0", "q"), ("GPU-1", "")]


def test_what_a_driver_doesnt_tell_has_no_sample() -> None:
    assert samples(text([Reading("GPU-0", "0", 0, celsius=0)], {}, "n"))[0][0] == "DCGM_FI_DEV_GPU_TEMP"
    assert len(samples(text([Reading("GPU-0", "0", 0, celsius=0)], {}, "n"))) == 1


def test_a_partition_says_which() -> None:
    [(_, labels, _)] = samples(text([Reading("MIG-0", "2:1", 2, profile="1g.10gb", used=5)], {}, "n"))
    assert (labels["gpu"], labels["GPU_I_PROFILE"], labels["GPU_I_ID"]) == ("2", "1g.10gb", "1")


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([{"GPU-0": "ns/p/c"}], {"GPU-0": [("ns", "p", "c")]}),
        ([{"GPU-0::1": "ns/p/c", "GPU-0::2": "ns/p/c"}], {"GPU-0": [("ns", "p", "c")]}),
        ([{"GPU-0::1": "ns/p/c"}, {"GPU-0": "ns/q/c"}], {"GPU-0": [("ns", "p", "c"), ("ns", "q", "c")]}),
        ([{"GPU-0": "uid/c"}], {"GPU-0": [("", "uid", "c")]}),
        ([None, {}], {}),
    ],
)
def test_who_holds_a_gpu(held: Any, expected: Any) -> None:
    assert holders(held) == expected


def test_a_name_of_an_object_is_escaped() -> None:
    [(_, labels, _), *_] = samples(text([GPU_0], {"GPU-0": [("ns", 'p"\n', "c")]}, "n"))
    assert labels["pod"] == 'p"\n'


@pytest.mark.parametrize(
    ("pci", "expected"), [("0000:af:00.0", "00000000:AF:00.0"), ("00010000:07:00.0", "00010000:07:00.0"), ("", "")]
)
def test_an_address_is_spelled_as_dcgm_does(pci: str, expected: str) -> None:
    assert gpumetrics._bus_id(pci) == expected


@pytest.mark.parametrize(("age", "looks"), [(5.0, 0), (11.0, 1)])
async def test_a_scrape_has_old_records_read_again_for_the_next(
    clock: Callable[[float], None], age: float, looks: int
) -> None:
    looked: list[float] = []
    beliefs = SimpleNamespace(
        last=SimpleNamespace(at=1000.0), look_within=looked.append, holders=lambda _: {"GPU-0": "ns/p/c"}
    )
    resources = [SimpleNamespace(name="nvidia.com/gpu")]
    gateway: Any = SimpleNamespace(
        source=Driver(), settings=Settings(node_name="n1"), beliefs=beliefs, resources=resources
    )

    async def others() -> tuple[HTTPStatus, str, bytes]:
        return HTTPStatus.OK, "text/plain", b"other 1\n"

    clock(age)
    answer = gpumetrics.added(gateway, others)()
    assert not isinstance(answer, tuple)
    status, _, body = await answer
    assert (status, looked) == (HTTPStatus.OK, [0] * looks)
    assert body.startswith(b"other 1\n# HELP DCGM_FI_DEV_GPU_UTIL")
    assert {labels["Hostname"] for name, labels, _ in samples(body) if name != "other"} == {"n1"}


# Who is asked, and who isn't waited for.


class Driver:
    """A driver that hangs while it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.asked = 0

    def readings(self) -> Sequence[Reading]:
        return self.read()

    def read(self) -> Sequence[Reading]:
        self.asked += 1
        self.go.wait(20)
        return [GPU_0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]

    class Time:
        monotonic = staticmethod(lambda: now[0])

    monkeypatch.setattr(gpumetrics, "time", Time)

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


async def test_a_driver_that_hangs_is_waited_for_once_then_left_out_and_asked_by_one_thread_alone(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    sampler = Sampler(driver.read)
    assert await sampler.latest() == [GPU_0]
    driver.go.clear()
    for _ in range(5):
        clock(5)
        assert await sampler.latest() == [GPU_0], "what it told of late still counts"
    monkeypatch.setattr(gpumetrics, "WAIT", 0)
    clock(40)
    assert await sampler.latest() == ()
    assert driver.asked == 2
    driver.go.set()
    while await sampler.latest() == ():
        clock(1)
    assert driver.asked <= 3


async def test_all_who_ask_at_once_cost_one_question(clock: Callable[[float], None]) -> None:
    driver = Driver()
    sampler = Sampler(driver.read)
    await asyncio.gather(*(sampler.latest() for _ in range(20)))
    await sampler.latest()
    assert driver.asked == 1
    clock(2)
    await sampler.latest()
    assert driver.asked == 2


async def test_a_driver_that_fails_is_asked_again(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpumetrics, "WAIT", 10)
    answers: list[Sequence[Reading] | None] = [None, [GPU_0]]

    def read() -> Sequence[Reading]:
        answer = answers.pop(0)
        if answer is None:
            raise OSError
        return answer

    sampler = Sampler(read)
    assert await sampler.latest() == ()
    clock(2)
    assert await sampler.latest() == [GPU_0]


# NVIDIA.


async def test_nvidias_gauges_are_nvmls(node: Node) -> None:
    backend = node.backend()
    assert isinstance(backend, Measured)
    assert backend.readings() == (), "nobody has looked yet"
    async with watching(backend) as watch:
        await watch.until(lambda sight: len(sight.gpus) == 8)
        found = await asyncio.to_thread(backend.readings)
        assert counts().references == 1, "nothing is held"
    one = node.world.gpus[3]
    whole = one.memory / 2**20
    assert found[3] == Reading(
        one.uuid, "3", 3, one.pci, "NVIDIA H100 80GB HBM3", "", 13, 4096, whole - 4096, 43, 103.5
    )
    assert [reading.uuid for reading in found] == [gpu.uuid for gpu in node.world.gpus]


async def test_16_gpus_of_64_pods_are_told_in_20_ms_of_a_processors_time(
    node: Node, clock: Callable[[float], None]
) -> None:
    """Each GPU shared by four pods, and NVML asked each time. The least of 25 counts, without the time that others had."""
    node.world = dgx(node.world.path, 16)
    node.write()
    backend = node.backend()
    assert isinstance(backend, Measured)
    async with watching(backend) as watch:
        sight = await watch.until(lambda sight: len(sight.gpus) == 16)
        held = {f"{one.uuid}::{each}": f"ns/{one.uuid}-{each}/main" for one in sight.gpus for each in range(4)}
        beliefs = SimpleNamespace(last=None, holders=lambda _: held)
        gateway: Any = SimpleNamespace(
            source=backend,
            settings=Settings(node_name="n1"),
            beliefs=beliefs,
            resources=[SimpleNamespace(name="nvidia.com/gpu")],
        )

        async def others() -> tuple[HTTPStatus, str, bytes]:
            return HTTPStatus.OK, "text/plain", b""

        answer, took, body = gpumetrics.added(gateway, others), [], b""
        for _ in range(25):
            clock(gpumetrics.FRESH)
            began = time.process_time()
            asked = answer()
            assert not isinstance(asked, tuple)
            body = (await asked)[2]
            took.append(time.process_time() - began)
    assert len(samples(body)) == 64 * len(FAMILIES)
    print(f"least {min(took) * 1000:.1f} ms, median {sorted(took)[12] * 1000:.1f} ms")  # noqa: T201 - pytest -rP
    assert min(took) < 0.02


async def test_a_mig_instance_has_its_own_memory(node: Node) -> None:
    [instance] = node.world.mig(1, "1g.10gb")
    node.write()
    async with watching(node.backend()) as watch:
        await watch.until(lambda sight: len(sight.gpus) == 9)
        found = {one.uuid: one for one in await asyncio.to_thread(watch.backend.readings)}  # type: ignore[attr-defined]
    part = found[instance.uuid]
    assert (part.profile, part.index, part.busy, part.used) == ("1g.10gb", "1:0", None, 2048)
    assert found[node.world.gpus[1].uuid].busy is None, "NVML has none for a GPU in MIG mode"


async def test_a_gpu_that_fails_takes_no_other_along(node: Node) -> None:
    node.world.fails("nvmlDeviceGetPowerUsage", 3, gpu=0)
    node.world.fails("nvmlDeviceGetTemperature", 999, gpu=1)
    node.write()
    async with watching(node.backend()) as watch:
        await watch.until(lambda sight: len(sight.gpus) == 8)
        found = {one.index: one for one in await asyncio.to_thread(watch.backend.readings)}  # type: ignore[attr-defined]
    assert (found["0"].watts, found["0"].busy) == (None, 10)
    assert (found["1"].celsius, found["1"].busy) == (None, 11)
    assert sorted(found) == ["0", "1", "2", "3", "4", "5", "6", "7"]


def test_what_has_another_ones_place_is_left_out(node: Node) -> None:
    [instance] = node.world.mig(1, "1g.10gb")
    node.write()
    guests = Guests()
    guests.opened()
    there, other = node.world.gpus[:2]
    gpus = [
        GPU("GPU-of-before", 0, 0, pci=there.pci),
        GPU(other.uuid, 1, 1, pci=other.pci),
        GPU("MIG-of-before", 1, 1, parent=other.uuid, place=f"1:{instance.place}"),
    ]
    assert [one.uuid for one in telemetry.read(str(library()), guests, gpus)] == [other.uuid]


async def test_a_gpu_that_doesnt_answer_those_who_watch_isnt_asked(node: Node) -> None:
    """A call about it may hang, and the others' gauges with it."""
    async with watching(node.backend()) as watch:
        await watch.until(lambda sight: len(sight.gpus) == 8)
        node.world.fails("nvmlDeviceGetMigMode", 999, gpu=0)
        node.world.fails("nvmlDeviceGetUtilizationRates", 0, gpu=0, hangs=60)
        node.write()
        await watch.until(lambda sight: sight.gpus[0].trouble is not None)
        async with asyncio.timeout(30):
            found = await asyncio.to_thread(watch.backend.readings)  # type: ignore[attr-defined]
    assert [one.index for one in found] == ["1", "2", "3", "4", "5", "6", "7"]


async def test_a_released_gpu_isnt_touched_and_none_where_all_are(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guests, "PATIENCE", 60)  # A machine that stands still for 2 s isn't what this is about.
    backend = node.backend()
    async with watching(backend) as watch:
        sight = await watch.until(lambda sight: len(sight.gpus) == 8)
        gone = sight.gpus[2].uuid
        leaving = asyncio.ensure_future(backend.release([gone]))
        await asyncio.sleep(0)  # It is ordered, and the last look still has it.
        assert gone not in {one.uuid for one in backend.readings()}
        await leaving
        await watch.until(lambda sight: gone in sight.released)
        assert gone not in {one.uuid for one in await asyncio.to_thread(backend.readings)}
        await backend.release([])
        assert await asyncio.to_thread(backend.readings) == ()
        assert counts().references == 0


async def test_a_reading_that_hangs_keeps_nobody_from_watching_but_a_release_says_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guests, "PATIENCE", 0.1)
    backend = node.backend()
    async with watching(backend) as watch:
        await watch.until(lambda sight: len(sight.gpus) == 8)
        node.world.fails("nvmlDeviceGetUtilizationRates", 0, gpu=5, hangs=60)
        node.write()
        reading = asyncio.ensure_future(asyncio.to_thread(backend.readings))
        await until(lambda: counts().references == 2)
        node.world.gpus[0].lost = True
        node.write()
        await watch.until(lambda sight: sight.gpus[0].trouble is not None)
        assert backend.readings() == (), "one at a time"
        with pytest.raises(TimeoutError, match="NVML to be closed"):
            await backend.release([])
        node.world.works("nvmlDeviceGetUtilizationRates", gpu=5)
        node.write()
        await reading


def test_guests_leave_before_the_owner_takes_the_library_away() -> None:
    guests = Guests()
    guests.PATIENCE = 0.05
    with guests.let_in() as welcome:
        assert not welcome, "it isn't open"
    guests.opened()
    with guests.let_in() as welcome, guests.let_in() as another:
        assert (welcome, another) == (True, False)
        assert not guests.gone()
    assert guests.gone()
    with guests.let_in() as welcome:
        assert not welcome


# AMD.


def amd_gpu(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "bus/pci/devices/0000:03:00.0"
    (folder / "hwmon/hwmon3").mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", "/hwmon3/")).write_text(content)
    return tmp_path


MI = GPU("amd-0", 0, 128, pci="0000:03:00.0", product="MI300X")
VRAM = {"mem_info_vram_used": "1073741824\n", "mem_info_vram_total": "3221225472\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"gpu_busy_percent": "7\n", **VRAM, "hwmon__temp1_input": "45000\n", "hwmon__power1_average": "95000000\n"},
            (7, 1024, 2048, 45, 95),
        ),
        ({"hwmon__power1_input": "5500000\n"}, (None, None, None, None, 5.5)),
        ({"gpu_busy_percent": "busy", "mem_info_vram_used": "1" * 30}, (None, None, None, None, None)),
        ({"mem_info_vram_used": "1048576"}, (None, 1, None, None, None)),
        ({"mem_info_vram_used": "2097152", "mem_info_vram_total": "1048576"}, (None, 2, 0, None, None)),
    ],
)
def test_amds_gauges_are_the_kernels(tmp_path: Path, files: dict[str, str], expected: tuple[float | None, ...]) -> None:
    [found] = amd.read(amd_gpu(tmp_path, **files), [MI, GPU("part", 1, 129, pci="0000:03:00.0", parent="amd-0")])
    assert (found.busy, found.used, found.free, found.celsius, found.watts) == expected
    assert (found.uuid, found.pci) == ("amd-0", "0000:03:00.0")


def test_a_gpu_without_files_has_no_gauges(tmp_path: Path) -> None:
    os.mkfifo(amd_gpu(tmp_path) / "bus/pci/devices/0000:03:00.0/gpu_busy_percent")
    assert amd.read(tmp_path, [MI, GPU("elsewhere", 1, 1, pci="0000:99:00.0")])[0].busy is None


# Together.


def test_sources_that_have_none_are_left_out() -> None:
    class Some:
        name = "some"

        def readings(self) -> Sequence[Reading]:
            return [GPU_0]

    class Nothing:
        name = "nothing"

    assert Combined([Some(), Nothing()]).readings() == [GPU_0]  # type: ignore[list-item]


async def test_a_gateway_tells_them(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library where the driver's root is, as in a container; and one that hangs is left out."""
    world = dgx(tmp_path / "world", 2)
    world.write()
    monkeypatch.setenv("FAKE_NVML_WORLD", str(world.path))
    libraries = tmp_path / "root/usr/lib64"
    libraries.mkdir(parents=True)
    (libraries / "libnvidia-ml.so.1").symlink_to(library())
    sockets = folder / "device-plugins"
    sockets.mkdir()
    options = ["--container-driver-root", str(tmp_path / "root"), "--metrics-address", "127.0.0.1:0", "--gpu-metrics"]
    command = gateway_command(sockets, tmp_path / "state", options=options)
    command[command.index("simulated")] = "nvidia"
    async with await GatewayProcess.launch(command) as process:
        port = int((await process.wait_for("listening", what="metrics"))["port"])
        await process.begun()
        lines: list[str] = []
        while not any(line.startswith("DCGM_FI_DEV_GPU_UTIL{") for line in lines):
            _, lines = await get(port, "/metrics")
        assert any(line.startswith("device_plugin_gateway_devices") for line in lines)
        assert {name for name in FAMILIES if any(line.startswith(f"{name}{{") for line in lines)} == set(FAMILIES)
