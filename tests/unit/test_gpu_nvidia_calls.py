"""Each call of NVML fails with each code: for the first GPU, the last, two, and all eight, at the first look and later.

``pytest -s tests/unit/test_gpu_nvidia_calls.py`` shows the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pynvml
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from devices.gpu.backend import Backend
from devices.gpu.nvidia.health import Checks, NodeHealth, looked
from devices.gpu.nvidia.kernel import KernelFacts
from devices.gpu.nvidia.nvml import Nvml
from devices.gpu.nvidia.scan import Busy, Let, Scan, Scanner, Session
from devices.model import Health
from devices.policy import Recovery
from gateway.lab.waiting import until
from tests.fakes.nvml import dgx, library
from tests.unit.test_gpu_nvidia import Node, watching
from tests.unit.test_gpu_source import MIXED, Watched

CODES: Final = (1, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 17, 18, 19, 20, 999)
"""Those of nvmlReturn_t that a question about a GPU can be answered with."""
DECORATIVE: Final = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetTopologyCommonAncestor",
)
"""What only describes a GPU."""
CALLS: Final = (
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetAttributes",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceGetGpuInstanceProfileInfo",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetFieldValues",
    *DECORATIVE,
)
NO_SUCH_INSTANCE: Final = {("nvmlDeviceGetMigDeviceHandleByIndex", 2), ("nvmlDeviceGetMigDeviceHandleByIndex", 6)}
"""What says that a GPU has no instance at a place: so it has none any more."""
WHOLE: Final = "nvidia.com/gpu"
SPLIT: Final = (0, 1)
"""The GPUs in MIG mode, by index."""
WHICH: Final[dict[str, Sequence[int]]] = {"first": (0,), "last": (7,), "two": (1, 5), "all": range(8)}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Eight GPUs, two of them with a MIG instance; links are few, so that a look takes little time."""
    world = dgx(tmp_path / "world")
    for index in SPLIT:
        world.mig(index, "1g.10gb")
    monkeypatch.setenv("FAKE_NVML_WORLD", str(world.path))
    monkeypatch.setattr(pynvml, "NVML_NVLINK_MAX_LINKS", 1)
    with capture_logs():
        yield Node(tmp_path, world)


class Looks:
    """Looks of one process at the GPUs of a node."""

    def __init__(self, node: Node, nvml: Nvml) -> None:
        self._node = KernelFacts(node.root / "sys", node.root / "proc", node.root / "dev")
        self._scanner = Scanner(nvml, self._node, Busy())
        self._session = Session(plugged=self._node.plugged())

    def look(self) -> Scan:
        return self._scanner.scan(self._session, Let(), None)


async def stands(scan: Scan, node: Node, source: Watched) -> dict[int, tuple[str, str]]:
    """Say of each GPU, by index, how it stands, and under which names a container gets it or a part of it."""
    health = looked(NodeHealth(), scan.looks, Checks.of(), Recovery.SAFE, now=scan.at)
    source.backend.sees(
        *(replace(gpu, trouble=health.trouble(gpu.uuid, gpu.board)) for gpu in scan.gpus), unusable=scan.unusable
    )
    inventory, found = await source.next(), {}
    for index, gpu in enumerate(node.world.gpus):
        mine = {
            (name, device.health)
            for name, listing in inventory.items()
            for device in listing.devices
            if (device.part_of or device.id) == gpu.uuid
        }
        reasons = [one.reason for one in source.source.unusable() if one.index == str(index) or one.pci == gpu.pci]
        how = "served" if {one for _, one in mine} == {Health.HEALTHY} else "unhealthy"
        found[index] = (
            how if mine else "unusable" if any(reasons) else "gone",
            ",".join(sorted(name for name, _ in mine)),
        )
    return found


async def test_each_call_that_fails_with_each_code(node: Node) -> None:
    """No GPU suffers by another's trouble, none is offered whole that may be partitioned, none goes without a reason."""
    nvml, wrong = Nvml(str(library())), list[str]()
    table = {(call, moment): list[str]() for call in CALLS for moment in ("first look", "later")}
    nvml.open()
    steady, source = Looks(node, nvml), Watched(MIXED)
    well = await stands(steady.look(), node, source)
    assert well == {index: ("served", "nvidia.com/mig-1g.10gb" if index in SPLIT else WHOLE) for index in range(8)}
    for call in CALLS:
        for code in CODES:
            cells: dict[str, list[str]] = {"first look": [], "later": []}
            for which, indexes in WHICH.items():
                for index in indexes if which != "all" else [None]:
                    node.world.fails(call, code, index)
                node.world.write()
                for moment, looks in (("first look", Looks(node, nvml)), ("later", steady)):
                    found = await stands(looks.look(), node, source)
                    case = f"{call} {code} {moment} {which}: {found}"
                    wrong += [case for index in range(8) if index not in indexes and found[index] != well[index]]
                    wrong += [case for index in SPLIT if found[index] == ("served", WHOLE)]
                    wrong += [case for how, _ in found.values() if how == "gone"]
                    if (call, code) not in NO_SUCH_INSTANCE:
                        wrong += [case for how, _ in found.values() if moment == "later" and how == "unusable"]
                    wrong += [case for how, _ in found.values() if call in DECORATIVE and how != "served"]
                    cells[moment].append("".join(sorted({found[index][0][2] for index in indexes})))
                node.world.rules.clear()
            node.world.write()
            assert await stands(steady.look(), node, source) == well
            for moment, found_of in cells.items():
                table[call, moment].append("/".join(found_of))
    nvml.close()
    await source.close()
    lines = [
        "",
        "first GPU/last/two/all: r served, h unhealthy, u unusable (never seen well); the latter two with a reason",
    ]
    lines += [f"{'':48}" + " ".join(f"{code:>9}" for code in CODES)]
    lines += [f"{call:36} {moment:11}" + " ".join(f"{one:>9}" for one in row) for (call, moment), row in table.items()]
    sys.stdout.write("\n".join([*lines, ""]))
    assert not wrong, "\n".join(dict.fromkeys(wrong))


DRIVER_WIDE: Final = ("nvmlInit", "nvmlDeviceGetCount")
EVENTS: Final = (
    "nvmlEventSetCreate",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait",
)


def _is_down(backend: Backend) -> bool:
    return bool(backend.hindrance)


@pytest.mark.parametrize("call", [*DRIVER_WIDE, *EVENTS])
async def test_a_call_that_speaks_for_the_driver_or_of_errors(node: Node, call: str) -> None:
    """NVML that can't be used takes no GPU away and is reported; errors that nobody reports take no GPU away."""
    for code in CODES:
        node.world.fails(call, code)
        node.write()
        backend = node.backend()
        async with watching(backend) as watch:
            if call in EVENTS:
                assert len((await watch.until(lambda sight: sight.gpus)).gpus) == 10, code
                continue
            await until(partial(_is_down, backend), 20)
            assert "NVML" in backend.hindrance, code
            assert not any(sight.gpus for sight in watch.sights), code
            node.world.works(call)
            node.write()
            before = await watch.until(lambda sight: sight.gpus)
            node.world.fails("nvmlInit", code)  # A count that works leaves NVML open.
            node.world.fails("nvmlDeviceGetCount", code)
            node.write()
            sight = await watch.until(lambda sight: sight.gpus and sight.gpus[0].trouble)
            assert [one.uuid for one in sight.gpus] == [one.uuid for one in before.gpus], code
            assert all(one.trouble and one.trouble.reason for one in sight.gpus), code
        node.world.rules.clear()
