"""The fake NVML library through the genuine pynvml: what tests of the NVIDIA backend stand on."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pynvml
import pytest

from tests.fakes import nvml
from tests.fakes.nvml import NO_INSTANCE, World

FOR_EVER = 10_000
"""Milliseconds that no test waits."""
Answer = Callable[[Any], object]
"""What is asked of a GPU's handle."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A DGX H100; what a test got from the library it has given back at its end."""
    world = nvml.dgx(tmp_path / "world")
    world.here(monkeypatch)
    yield world
    held = nvml.counts()
    assert (held.references, held.event_sets, held.waits) == (0, 0, 0)


@pytest.fixture
def started(world: World) -> Iterator[World]:
    pynvml.nvmlInit()
    yield world
    pynvml.nvmlShutdown()


@pytest.fixture
def event_set(started: World) -> Iterator[Any]:
    """A set with the Xids of every GPU but the last."""
    made = pynvml.nvmlEventSetCreate()
    for index in range(7):
        pynvml.nvmlDeviceRegisterEvents(handle(index), pynvml.nvmlEventTypeXidCriticalError, made)
    yield made
    pynvml.nvmlEventSetFree(made)


def handle(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def code(call: Callable[[], object]) -> int:
    """NVML's code for a call."""
    try:
        call()
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def until(seen: Callable[[], bool]) -> None:
    """What the library counts can't be awaited, only looked at."""
    late = time.monotonic() + 10
    while not seen():
        assert time.monotonic() < late
        time.sleep(0.001)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def xid(event_set: Any, timeout_ms: int = FOR_EVER) -> tuple[str, int]:
    event = pynvml.nvmlEventSetWait(event_set, timeout_ms)
    return pynvml.nvmlDeviceGetUUID(event.device), event.eventData


REFUSALS: Final[dict[str, tuple[Answer, Any]]] = {
    "an index too many": (lambda _: handle(8), pynvml.NVML_ERROR_INVALID_ARGUMENT),
    "an unknown address": (lambda _: pynvml.nvmlDeviceGetHandleByPciBusId("0000:99:00.0"), pynvml.NVML_ERROR_NOT_FOUND),
    "no handle": (lambda _: pynvml.nvmlDeviceGetUUID(None), pynvml.NVML_ERROR_INVALID_ARGUMENT),
    "retired pages since Ampere": (pynvml.nvmlDeviceGetRetiredPagesPendingStatus, pynvml.NVML_ERROR_NOT_SUPPORTED),
    "attributes of a whole GPU": (pynvml.nvmlDeviceGetAttributes, pynvml.NVML_ERROR_NOT_SUPPORTED),
    "a MIG device without MIG": (
        lambda h: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(h, 0),
        pynvml.NVML_ERROR_NOT_FOUND,
    ),
    "a GPU instance without MIG": (lambda h: pynvml.nvmlDeviceGetGpuInstanceById(h, 0), pynvml.NVML_ERROR_NOT_FOUND),
    "a profile that can't be": (
        lambda h: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(h, 17, 1),
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    ),
    "no address": (lambda _: pynvml.nvmlDeviceGetHandleByPciBusId("none"), pynvml.NVML_ERROR_INVALID_ARGUMENT),
    "a whole GPU's instance": (pynvml.nvmlDeviceGetGpuInstanceId, pynvml.NVML_ERROR_INVALID_ARGUMENT),
    "a link that isn't there": (lambda h: pynvml.nvmlDeviceGetNvLinkState(h, 18), pynvml.NVML_ERROR_NOT_SUPPORTED),
    "a link that can't be": (lambda h: pynvml.nvmlDeviceGetNvLinkState(h, 36), pynvml.NVML_ERROR_INVALID_ARGUMENT),
    "what isn't exported": (pynvml.nvmlDeviceGetSerial, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
}


@pytest.mark.parametrize(("ask", "error"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_a_gpu_refuses(started: World, ask: Answer, error: int) -> None:
    assert code(lambda: ask(handle(2))) == error


def test_a_field_that_the_driver_lacks_has_its_own_result(started: World) -> None:
    started.gpus[1].recovery = None
    started.write()
    values = pynvml.nvmlDeviceGetFieldValues(handle(1), [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 1])
    assert [value.nvmlReturn for value in values] == [pynvml.NVML_ERROR_NOT_SUPPORTED] * 2


def profile_number(gpu: Any, mig: Any) -> int:
    """Which of NVML's profiles a MIG device's GPU instance has, found the way that go-nvlib's GetProfile goes."""
    instance = pynvml.nvmlDeviceGetGpuInstanceById(gpu, pynvml.nvmlDeviceGetGpuInstanceId(mig))
    wanted = pynvml.nvmlGpuInstanceGetInfo(instance).profileId
    ids = {}
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        with suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            ids[pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, number, 1).id] = number
    return ids[wanted]


@pytest.mark.parametrize(
    ("profiles", "instances"),
    [
        (["1g.10gb"] * 7, [(g, 0) for g in range(7, 14)]),
        (["1g.10gb", "2g.20gb", "3g.40gb"], [(7, 0), (3, 0), (1, 0)]),
        (["7g.80gb"], [(0, 0)]),
        (["1g.10gb+me", "1g.20gb"], [(7, 0), (8, 0)]),
        (["1c.3g.40gb", "2c.3g.40gb", "1c.3g.40gb"], [(1, 0), (1, 1), (2, 0)]),
    ],
    ids=lambda value: str(value[:3]),
)
def test_mig_devices(started: World, profiles: list[str], instances: list[tuple[int, int]]) -> None:
    made = started.mig(0, *profiles)
    started.write()
    gpu = handle(0)
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 7
    devices = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place) for place in range(len(made))]
    assert [
        (pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)) for mig in devices
    ] == instances
    assert [pynvml.nvmlDeviceGetUUID(mig) for mig in devices] == [instance.uuid for instance in made]
    for mig, instance in zip(devices, made, strict=True):
        profile = nvml.H100[instance.profile]
        attributes = pynvml.nvmlDeviceGetAttributes(mig)
        assert profile_number(gpu, mig) == profile.number
        assert pynvml.nvmlDeviceGetName(mig) == f"NVIDIA H100 80GB HBM3 MIG {instance.profile}"
        assert pynvml.nvmlDeviceGetMemoryInfo(mig).total == profile.memory_mb << 20
        assert attributes.memorySizeMB == profile.memory_mb
        assert attributes.gpuInstanceSliceCount == profile.slices
        assert attributes.computeInstanceSliceCount == (instance.compute or profile.slices)
        assert (attributes.sharedCopyEngineCount, attributes.sharedOfaCount) == (profile.engines[0], profile.engines[4])


def test_places_of_mig_devices_may_be_empty(started: World) -> None:
    started.mig(0, "1g.10gb", "1g.10gb", "1g.10gb")
    del started.gpus[0].instances[1]
    started.write()
    ask = partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle(0))
    found = [code(partial(ask, place)) for place in range(8)]
    none, invalid = pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert found == [0, none, 0, none, none, none, none, invalid]


def test_a_mig_device_that_was_destroyed_has_no_handle(started: World) -> None:
    started.mig(0, "1g.10gb", "2g.20gb")
    started.write()
    gone, stays = (pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(0), place) for place in (0, 1))
    del started.gpus[0].instances[0]
    started.write()
    assert code(lambda: pynvml.nvmlDeviceGetUUID(gone)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code(lambda: pynvml.nvmlDeviceGetUUID(stays)) == 0
    started.no_mig(0)
    started.write()
    assert code(lambda: pynvml.nvmlDeviceGetUUID(stays)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


@pytest.mark.parametrize(
    "ask", [pynvml.nvmlDeviceGetMinorNumber, pynvml.nvmlDeviceGetPciInfo, pynvml.nvmlDeviceGetMigMode]
)
def test_some_questions_are_the_whole_gpus(started: World, ask: Answer) -> None:
    started.mig(0, "1g.10gb")
    started.write()
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(0), 0)
    assert code(lambda: ask(mig)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("instances", "told"),
    [({}, (NO_INSTANCE, NO_INSTANCE)), ({"gpu_instance": 7, "compute_instance": 0}, (7, 0))],
    ids=["the whole GPU", "a MIG device"],
)
def test_an_event_names_the_instance(
    started: World, event_set: Any, instances: dict[str, int], told: tuple[int, int]
) -> None:
    started.event(0, 43, **instances)
    event = pynvml.nvmlEventSetWait(event_set, FOR_EVER)
    assert event.eventType == pynvml.nvmlEventTypeXidCriticalError
    assert (event.gpuInstanceId, event.computeInstanceId) == told


@pytest.mark.parametrize(
    "happens",
    [
        lambda world: world.event(7, 79),
        lambda world: world.event(0, type=pynvml.nvmlEventTypeClock),
        lambda world: world.event("GPU-0", 79),
    ],
    ids=["of a GPU that isn't in the set", "of another type", "of an unknown GPU"],
)
def test_events_that_nobody_asked_for(started: World, event_set: Any, happens: Callable[[World], None]) -> None:
    happens(started)
    started.event(1, 13)
    assert xid(event_set) == (started.gpus[1].uuid, 13)


def test_events_from_before_the_registration_are_not_told(started: World) -> None:
    started.event(0, 48)
    first, second = pynvml.nvmlEventSetCreate(), pynvml.nvmlEventSetCreate()
    try:
        pynvml.nvmlDeviceRegisterEvents(handle(0), pynvml.nvmlEventTypeXidCriticalError, first)
        started.event(1, 63)
        for each in (first, second):
            pynvml.nvmlDeviceRegisterEvents(handle(1), pynvml.nvmlEventTypeXidCriticalError, each)
        started.event(1, 64)
        assert [xid(each)[1] for each in (first, second)] == [64, 64]
    finally:
        pynvml.nvmlEventSetFree(first)
        pynvml.nvmlEventSetFree(second)


def test_a_type_that_is_not_supported_registers_none(started: World) -> None:
    started.gpus[0].events = pynvml.nvmlEventTypeXidCriticalError
    started.write()
    both = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
    made = pynvml.nvmlEventSetCreate()
    try:
        assert code(lambda: pynvml.nvmlDeviceRegisterEvents(handle(0), both, made)) == pynvml.NVML_ERROR_NOT_SUPPORTED
        started.event(0, 79)
        assert code(lambda: xid(made, 0)) == pynvml.NVML_ERROR_TIMEOUT
    finally:
        pynvml.nvmlEventSetFree(made)


def test_sets_that_threads_wait_on_don_t_hinder_each_other(started: World, threads: ThreadPoolExecutor) -> None:
    sets = []
    for index in range(4):
        sets.append(pynvml.nvmlEventSetCreate())
        pynvml.nvmlDeviceRegisterEvents(handle(index), pynvml.nvmlEventTypeXidCriticalError, sets[-1])
    told = [threads.submit(xid, each) for each in sets]
    until(lambda: nvml.counts().waits == len(sets))
    assert pynvml.nvmlDeviceGetCount() == 8
    for index in reversed(range(4)):
        started.event(index, 100 + index)
    assert [each.result() for each in told] == [(started.gpus[index].uuid, 100 + index) for index in range(4)]
    for each in sets:
        pynvml.nvmlEventSetFree(each)


@pytest.mark.parametrize("leaves", ["lost", "gone"])
def test_a_gpu_that_falls_off_the_bus(started: World, event_set: Any, leaves: str, threads: ThreadPoolExecutor) -> None:
    lost = handle(3)
    told = threads.submit(code, lambda: xid(event_set))
    until(lambda: nvml.counts().waits == 1)
    pci = started.gpus[3].pci
    started.gpus[3].lost = True
    if leaves == "gone":
        del started.gpus[3]
    started.write()
    is_lost = pynvml.NVML_ERROR_GPU_IS_LOST
    assert told.result() == is_lost
    asked = (lambda: xid(event_set), lambda: pynvml.nvmlDeviceGetUUID(lost), lambda: handle(3))
    assert [code(ask) for ask in asked] == [is_lost] * 3
    assert code(lambda: pynvml.nvmlDeviceGetHandleByPciBusId(pci)) == (
        is_lost if leaves == "lost" else pynvml.NVML_ERROR_NOT_FOUND
    )
    assert pynvml.nvmlDeviceGetCount() == 8
    assert pynvml.nvmlDeviceGetUUID(handle(4)) == started.gpus[3 if leaves == "gone" else 4].uuid


def test_the_last_event_of_a_lost_gpu_is_still_told(started: World, event_set: Any) -> None:
    started.event(3, 79)
    started.gpus[3].lost = True
    started.write()
    event = pynvml.nvmlEventSetWait(event_set, FOR_EVER)
    assert event.eventData == 79
    assert code(lambda: pynvml.nvmlDeviceGetUUID(event.device)) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert code(lambda: xid(event_set)) == pynvml.NVML_ERROR_GPU_IS_LOST


def test_a_gpu_that_returns_is_there_after_an_initialisation(world: World) -> None:
    for lost, found in ((True, pynvml.NVML_ERROR_GPU_IS_LOST), (False, 0)):
        pynvml.nvmlInit()
        world.gpus[3].lost = lost
        world.write()
        assert code(lambda: handle(3)) == found
        world.gpus[3].lost = False
        world.write()
        assert code(lambda: handle(3)) == found
        pynvml.nvmlShutdown()


def test_gpus_that_are_added_are_seen_after_an_initialisation(world: World) -> None:
    for count in (8, 9):
        pynvml.nvmlInit()
        if count == 8:
            world.gpus.append(nvml.gpu(8))
            world.write()
        assert pynvml.nvmlDeviceGetCount() == count
        pynvml.nvmlShutdown()


def test_a_wait_that_goes_on_is_made_to_fail(started: World, event_set: Any, threads: ThreadPoolExecutor) -> None:
    told = threads.submit(code, lambda: xid(event_set))
    until(lambda: nvml.counts().waits == 1)
    started.fails("nvmlEventSetWait", pynvml.NVML_ERROR_UNKNOWN)
    started.write()
    assert told.result() == pynvml.NVML_ERROR_UNKNOWN


def test_a_call_that_hangs_holds_nobody_else_up(started: World, threads: ThreadPoolExecutor) -> None:
    started.fails("nvmlDeviceGetMemoryInfo", 0, gpu=1, hangs=60)
    started.write()
    board, before = handle(1), nvml.counts().calls
    told = threads.submit(code, lambda: pynvml.nvmlDeviceGetMemoryInfo(board))
    until(lambda: nvml.counts().calls > before)
    assert code(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle(0))) == 0
    assert not told.done()
    started.works("nvmlDeviceGetMemoryInfo", gpu=1)
    started.write()
    assert told.result() == 0


def test_a_function_that_the_library_lacks_can_t_be_made_to_fail(world: World) -> None:
    with pytest.raises(ValueError, match=r"expected a function of nvml\.c, without _v2, got 'nvmlDeviceGetCount_v2'"):
        world.fails("nvmlDeviceGetCount_v2", 1)


def test_each_initialisation_needs_a_shutdown(world: World) -> None:
    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    for wanted in (1, 2):
        pynvml.nvmlInit()
        assert nvml.counts().references == wanted
    for wanted in (1, 0):
        assert pynvml.nvmlDeviceGetCount() == 8
        pynvml.nvmlShutdown()
        assert nvml.counts().references == wanted
    assert code(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED


def test_handles_end_with_a_shutdown(world: World) -> None:
    pynvml.nvmlInit()
    old, stale = handle(0), pynvml.nvmlEventSetCreate()
    pynvml.nvmlEventSetFree(stale)
    pynvml.nvmlShutdown()
    assert code(lambda: pynvml.nvmlDeviceGetUUID(old)) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInit()
    invalid = pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code(lambda: pynvml.nvmlDeviceGetUUID(old)) == invalid
    assert [code(lambda: xid(stale)), code(lambda: pynvml.nvmlEventSetFree(stale))] == [invalid] * 2
    pynvml.nvmlShutdown()


def test_a_set_that_is_not_freed_is_counted(started: World) -> None:
    made = pynvml.nvmlEventSetCreate()
    assert nvml.counts().event_sets == 1
    pynvml.nvmlEventSetFree(made)
    assert nvml.counts().event_sets == 0


@pytest.mark.parametrize("text", ["gpu without the rest", "link 8 0 1 0 0000:00:00.0", "way 8 10 GPU-0"])
def test_a_world_that_can_t_be_read_says_where(world: World, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    lines = world.path.read_text(encoding="utf-8").splitlines()
    world.path.write_text("\n".join([*lines, text]), encoding="utf-8")
    assert code(pynvml.nvmlInit) == pynvml.NVML_ERROR_UNKNOWN
    assert f"line {len(lines) + 1} isn't one that a_line() in nvml.c reads: {text}" in capfd.readouterr().err


FEATURE_DISCOVERY: Final = {
    "nvmlComputeInstanceGetInfo",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlGpuInstanceGetComputeInstanceById",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
}
"""What GPU Feature Discovery calls besides (``make labels``)."""
DEVICE_PLUGIN: Final = {"nvmlDeviceGetHandleByUUID"}
"""What NVIDIA's device plugin calls besides (``make compared``)."""


def test_it_exports_exactly_what_is_called() -> None:
    names = subprocess.run(
        ["nm", "-D", "--defined-only", nvml.library()], capture_output=True, text=True, check=True
    ).stdout
    exported = {re.sub(r"(_v\d|V|WithFlags)$", "", name) for name in re.findall(r" T (nvml\w+)", names)}
    backend = (nvml.SOURCE.parents[2] / "devices/gpu/nvidia/nvml.py").read_text(encoding="utf-8")
    called = set(re.findall(r'"(nvml[A-Z]\w+)"', backend))
    assert exported == called | FEATURE_DISCOVERY | DEVICE_PLUGIN | {"nvmlErrorString"}
    assert nvml.functions() <= exported


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="neither cc nor gcc is here: apt install gcc libc6-dev"):
        nvml.library()
