"""Each file of sysfs and KFD in trouble, for each GPU: what is offered then, what is unhealthy, and what is said.

``pytest -s`` prints the table.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from devices.gpu import naming
from devices.gpu.amd import backend as amd
from devices.gpu.amd import sysfs
from devices.gpu.amd.sysfs import AbsentError, Topology
from devices.gpu.amd.vendor import AMD
from devices.gpu.model import GPU
from devices.model import Health
from devices.policy import Naming, Policy
from tests.fakes.amd import CPUS, Board, Sysfs

BOARDS: Final = 8
Place = Callable[[Sysfs, int], Path]


def of_gpu(name: str) -> Place:
    return lambda tree, number: tree.pci(tree.boards[number]) / name


def of_node(name: str, part: int = 0) -> Place:
    """A file of the KFD node of a GPU, or of a partition of it."""

    def place(tree: Sysfs, number: int) -> Path:
        parts = tree.boards[0].parts
        return tree.kfd / "nodes" / str(CPUS + number * parts + min(part, parts - 1)) / name

    return place


def of_partition(name: str) -> Place:
    return lambda tree, number: tree.root / "devices/platform" / f"amdgpu_xcp_{number}" / name


def of_root(name: str) -> Place:
    return lambda tree, _: tree.root / name


FILES: Final[Mapping[str, Place]] = {
    "current_compute_partition": of_gpu("current_compute_partition"),
    "current_memory_partition": of_gpu("current_memory_partition"),
    "numa_node": of_gpu("numa_node"),
    "product_name": of_gpu("product_name"),
    "drm/": of_gpu("drm"),
    "pci:amdgpu/<address>": lambda tree, number: tree.driver / tree.boards[number].pci,
    "nodes/<n>/": of_node(""),
    "nodes/<n>/properties": of_node("properties"),
    "nodes/<n>/mem_banks/0/properties": of_node("mem_banks/0/properties"),
    "nodes/<n>/io_links/1/properties": of_node("io_links/1/properties"),
}
OF_PARTITIONS: Final[Mapping[str, Place]] = {
    "amdgpu_xcp_<n>/": of_partition(""),
    "amdgpu_xcp_<n>/drm/": of_partition("drm"),
    "nodes/<n>/properties of a partition": of_node("properties", 1),
}
OF_ALL: Final[Mapping[str, Place]] = {
    "class/kfd": of_root("class/kfd"),
    "topology/generation_id": lambda tree, _: tree.kfd / "generation_id",
    "topology/nodes/": lambda tree, _: tree.kfd / "nodes",
    "module/amdgpu/version": of_root("module/amdgpu/version"),
    "module/amdgpu/drivers/pci:amdgpu": of_root("module/amdgpu/drivers/pci:amdgpu"),
    "devices/platform/": of_root("devices/platform"),
}
"""Files that stand for the whole node."""
WHICH: Final = {"first": (0,), "last": (BOARDS - 1,), "two": (2, 5), "all": tuple(range(BOARDS))}


def absent(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def empty(path: Path) -> None:
    made = Path.touch if path.is_file() else Path.mkdir
    absent(path)
    made(path)


def unreadable(path: Path) -> None:
    absent(path)
    path.symlink_to(path.name)  # ELOOP: root may read all that has a mode


def nonsense(path: Path) -> None:
    absent(path)
    path.write_text("N/A\n")


FAULTS: Final = (absent, empty, unreadable, nonsense)
SHAPES: Final = {"SPX": (("SPX", "NPS1"), 1), "DPX": (("DPX", "NPS2"), 2)}


class Case(Struct, frozen=True):
    """One fault in a tree."""

    shape: str
    file: str
    fault: Callable[[Path], None]
    later: bool
    which: str

    @property
    def title(self) -> str:
        return f"{self.file} {self.fault.__name__}, {self.which}, {'later' if self.later else 'first look'}"

    @property
    def broken(self) -> Sequence[int]:
        return WHICH[self.which]


class Outcome(Struct, frozen=True):
    """What is known after a look: device IDs by resource and health, reasons by ID, and what is said of the whole."""

    healthy: Mapping[str, str]
    reasons: Mapping[str, str]
    hindrance: str

    @property
    def cell(self) -> str:
        said = next(iter(self.reasons.values()), "") or self.hindrance
        return f"{len(self.healthy)} healthy, {len(self.reasons)} unhealthy" + (f": {said:.70}" if said else "")


def look(tree: Sysfs, before: Sequence[GPU]) -> tuple[tuple[GPU, ...], Mapping[Naming, Outcome]]:
    """Look once, as the backend does, and name what is seen by each strategy."""
    try:
        found = sysfs.read(tree.root, Topology())
    except AbsentError as error:
        now = Outcome({}, {gpu.uuid: str(error) for gpu in before}, str(error))
        return tuple(before), dict.fromkeys(Naming, now)
    gpus = amd.steadied(amd.gpus(found), before)
    return gpus, {strategy: outcome(gpus, strategy, amd.overlooked(found)) for strategy in Naming}


def outcome(gpus: Sequence[GPU], strategy: Naming, hindrance: str) -> Outcome:
    named = naming.named(gpus, Policy(resource_naming=strategy), (AMD,))
    listed = [(name, gpu) for name, there in named.items() for gpu in there]
    healthy = {gpu.uuid: name for name, gpu in listed if gpu.health is Health.HEALTHY}
    reasons = {gpu.uuid: gpu.trouble.reason for _, gpu in listed if gpu.trouble is not None}
    return Outcome(healthy, reasons, hindrance)


@contextlib.contextmanager
def broken(tree: Sysfs, case: Case) -> Iterator[None]:
    """Break files, and mend them again."""
    place = {**FILES, **OF_PARTITIONS, **OF_ALL}[case.file]
    paths = dict.fromkeys(place(tree, number) for number in case.broken)
    saved = tree.root / "saved"
    for number, path in enumerate(paths):
        if path.is_symlink():
            (saved / str(number)).parent.mkdir(exist_ok=True)
            (saved / str(number)).symlink_to(path.readlink())
        elif path.is_dir():
            shutil.copytree(path, saved / str(number), symlinks=True)
        else:
            saved.mkdir(exist_ok=True)
            shutil.copy(path, saved / str(number))
        case.fault(path)
    yield
    for number, path in enumerate(paths):
        if path.is_symlink() or path.exists():
            absent(path)
        shutil.move(saved / str(number), path)
    shutil.rmtree(saved)


def wrong(case: Case, tree: Sysfs, well: Outcome, now: Outcome) -> Iterator[str]:
    """Say what breaks a promise."""
    boards = {board.pci: number for number, board in enumerate(tree.boards)}
    node = case.file in OF_ALL
    for uuid, name in well.healthy.items():
        number = boards.get(uuid, int(uuid.rpartition("_")[2]) if uuid not in boards else 0)
        touched = node or number in case.broken
        if uuid in now.healthy:
            if now.healthy[uuid] != name:
                yield f"{uuid} is offered as {now.healthy[uuid]}, not as {name}"
        elif not touched:
            yield f"{uuid} is lost by another's trouble"
        elif uuid not in now.reasons and (case.later or not now.hindrance):
            if not (case.later and "pci:amdgpu" in case.file):  # what the driver no longer has is lost, and listed so
                yield f"{uuid} is gone without a reason"
        elif not (now.reasons.get(uuid) or now.hindrance):
            yield f"{uuid} has an empty reason"
    if extra := (now.healthy.keys() | now.reasons.keys()) - well.healthy.keys():
        yield f"{extra} were never there"


def cases(shape: str) -> Iterator[Case]:
    for fault, later in itertools.product(FAULTS, (False, True)):
        for file in (*FILES, *(OF_PARTITIONS if shape == "DPX" else ())):
            yield from (Case(shape, file, fault, later, which) for which in WHICH)
        yield from (Case(shape, file, fault, later, "all") for file in OF_ALL)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_file_of_one_gpu_takes_another_away(tmp_path: Path, shape: str) -> None:
    modes, parts = SHAPES[shape]
    boards = [
        Board(f"0000:{bus:02x}:00.0", place // 4, modes, parts, hive=1, product="AMD Instinct MI300X")
        for place, bus in enumerate(range(5, 5 + BOARDS * 0x11, 0x11))
    ]
    tree = Sysfs(tmp_path, boards).write()
    for node in (tree.kfd / "nodes").iterdir():  # two links of each will do: they are read at each look
        shutil.rmtree(node / "p2p_links", ignore_errors=True)
        for link in (node / "io_links").glob("[2-9]*"):
            shutil.rmtree(link)
    before, well = look(tree, ())
    for one in well.values():
        assert (len(one.healthy), one.reasons, one.hindrance) == (BOARDS * parts, {}, "")
    found, rows = [], dict[str, str]()
    for case in cases(shape):
        with broken(tree, case):
            after, now = look(tree, before if case.later else ())
        rows[case.title] = now[Naming.MIXED].cell
        for strategy in Naming:
            found += [
                f"{case.title}, {strategy.value}: {one}" for one in wrong(case, tree, well[strategy], now[strategy])
            ]
        if case.later:
            assert look(tree, after) == (before, well), case
    width = max(map(len, rows))
    print(f"\n{shape}", *(f"  {name:<{width}}  {cell}" for name, cell in rows.items()), sep="\n")  # noqa: T201 - for people
    assert not found, "\n".join(found)
