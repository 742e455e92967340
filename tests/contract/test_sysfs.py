"""What sysfs and KFD tell of AMD's GPUs, also where a file of it is missing, odd, changing or hangs."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from msgspec.structs import replace

from tests.contract import wire
from tests.contract.clock import patches
from tests.contract.hardware import Amd
from tests.contract.node import Gateway, Node
from tests.contract.test_amd import FIRST, GPU, SECOND, THIRD, parted, reasons, three
from tests.contract.test_nvml import facts, offered
from tests.fakes.amd import CPUS, Board, Sysfs, mi210, mi300x, mi308, vega

CPX = ("CPX", "NPS1")
SPX = ("SPX", "NPS1")
MIXED = "--resource-naming-strategy=mixed"


def known_by_a_link(tree: Sysfs) -> None:
    """Let KFD's node of the first GPU be a link, which isn't followed."""
    properties = tree.kfd / f"nodes/{CPUS}/properties"
    properties.rename(tree.root / "elsewhere")
    properties.symlink_to(tree.root / "elsewhere")


# What is told.


def spx(root: Path) -> Sysfs:
    return mi300x(root, SPX)


@pytest.mark.parametrize(
    ("make", "mixed", "on_nodes", "choices"),
    [
        (
            mi210,
            GPU,
            {(0,): 4, (1,): 4},
            [(0, 1, [0]), (0, 4, [0, 1, 2, 3]), (2, 3, [4, 5, 6]), (0, 5, [0, 1, 2, 3, 4])],
        ),
        (mi300x, "amd.com/cpx_nps4", {(0,): 32, (1,): 31}, [(0, 3, [56, 57, 58]), (0, 8, [*range(8)])]),
        (mi308, "amd.com/cpx_nps1", {(0,): 16, (1,): 16}, [(0, 12, [*range(12)])]),
        (vega, GPU, {(): 2}, [(0, 1, [0])]),
        (spx, "amd.com/spx_nps1", {(0,): 4, (1,): 4}, []),
    ],
)
async def test_the_published_machines_are_offered_by_their_names_and_the_nearest_is_preferred(
    node: Node,
    make: Callable[[Path], Sysfs],
    mixed: str,
    on_nodes: dict[tuple[int, ...], int],
    choices: list[tuple[int, int, list[int]]],
) -> None:
    host = Amd(node, make)
    await node.start_kubelet()
    for options, name in (((), GPU), ((MIXED,), mixed)):
        one = host.gateway(*options)
        await node.allocatable_is(sum(on_nodes.values()), name)
        known = await facts(one)
        places = sorted(known, key=lambda uuid: int(known[uuid]["index"]))
        assert [known[uuid]["minor"] for uuid in places] == list(range(128, 128 + len(places)))
        async with node.plugin(name) as plugin:
            listed = await plugin.first_list()
            assert Counter(device.numa_nodes for device in listed) == on_nodes
            for begin, count, chosen in choices:
                assert await plugin.prefer(places[begin:], count) == {places[each] for each in chosen}
        await one.terminate()


async def test_what_sysfs_tells_of_a_gpu_and_of_a_partition_is_told(node: Node) -> None:
    boards = [
        Board(FIRST, 0, ("CPX", "NPS4"), 3, hive=7, lanes=4, product="AMD\x1b[2J MI300X" + "x" * 99),
        Board(SECOND, 1, hive=7, lanes=4),
    ]
    host = Amd(node, lambda root: Sysfs(root, boards).write())
    odd = host.tree.kfd / f"nodes/{CPUS + 2}"
    properties = (odd / "properties").read_text().replace("simd_count 405", "simd_count 8")
    (odd / "properties").write_text(properties.replace("simd_per_cu 4", "simd_per_cu 0"))
    (odd / "mem_banks/0/properties").unlink()
    one = await host.served(3, MIXED, resource="amd.com/cpx_nps4")
    known = await facts(one)
    assert known[FIRST] == {
        "product": "AMD[2J MI300X" + "x" * 51,
        "index": "0",
        "pci": FIRST,
        "parent": "",
        "profile": "cpx_nps4",
        "links": {"3": "xgmi x4"},
        "nodes": ["/dev/dri/card1", "/dev/dri/renderD128"],
        "minor": 128,
        "driver": "6.8.5",
        "memory": 64 << 30,
        "traits": {"deviceID": "0x74a1"},
        "capacities": {"computeUnits": 101, "simdUnits": 405},
        "slot": "",
    }
    part = known["amdgpu_xcp_0"]
    assert (part["index"], part["parent"], part["profile"], part["minor"]) == ("1", FIRST, "cpx_nps4", 129)
    assert part["nodes"] == ["/dev/dri/card2", "/dev/dri/renderD129"]
    assert (known["amdgpu_xcp_1"]["memory"], known["amdgpu_xcp_1"]["capacities"]) == (0, {"simdUnits": 8})


NEAR, NEXT, FAR = Board(FIRST), Board(SECOND), Board(THIRD, 1)


@pytest.mark.parametrize(
    ("one", "other", "link"),
    [
        pytest.param(replace(NEAR, hive=1), replace(NEXT, hive=1), "xgmi", id="one hive"),
        pytest.param(replace(NEAR, hive=1), replace(FAR, hive=1), "xgmi", id="one hive over two NUMA nodes"),
        pytest.param(replace(NEAR, hive=1, lanes=4), replace(NEXT, hive=1), "xgmi x4", id="four links side by side"),
        pytest.param(replace(NEAR, hive=1, lanes=999), replace(NEXT, hive=1), "xgmi x64", id="an absurd bandwidth"),
        pytest.param(replace(NEAR, hive=1), replace(NEXT, hive=2), "node", id="two hives on a NUMA node"),
        pytest.param(NEAR, FAR, "sys", id="two NUMA nodes"),
        pytest.param(replace(NEAR, numa=-1), replace(NEXT, numa=-1), "sys", id="nobody knows where"),
    ],
)
async def test_how_two_gpus_reach_each_other_is_told(node: Node, one: Board, other: Board, link: str) -> None:
    host = Amd(node, lambda root: Sysfs(root, [one, other]).write())
    gateway = await host.served(2)
    assert (await facts(gateway))[one.pci]["links"] == {"1": link}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        pytest.param({}, {"amdgpu_xcp_0": FIRST}, id="AMD's kernel module"),
        pytest.param({"partition_name": "amdgpu_xcp.{}"}, {"amdgpu_xcp.0": FIRST}, id="Linux's"),
        pytest.param({"partition_name": "amdgpu_xcp_{}x"}, {}, id="another device's name"),
        pytest.param({"spare": 5}, {"amdgpu_xcp_0": FIRST}, id="spare ones aren't in KFD"),
        pytest.param({"boards": [Board(FIRST, -1, CPX, 2)]}, {"amdgpu_xcp_0": FIRST}, id="no NUMA node"),
        pytest.param(
            {"boards": [Board(FIRST, 0, CPX, 2), Board("0001:05:00.0", 0, CPX, 2)]},
            {"amdgpu_xcp_0": FIRST, "amdgpu_xcp_1": "0001:05:00.0"},
            id="one address in two domains",
        ),
        pytest.param(
            {"boards": [Board(FIRST, 0, CPX, 2), Board("0000:05:00.4", 0, CPX, 3)]},
            {"amdgpu_xcp_0": FIRST, "amdgpu_xcp_1": "0000:05:00.4", "amdgpu_xcp_2": "0000:05:00.4"},
            id="two functions of one device",
        ),
    ],
)
async def test_a_partition_belongs_to_the_gpu_at_its_place(
    node: Node, tree: dict[str, Any], expected: dict[str, str]
) -> None:
    boards = tree.pop("boards", [Board(FIRST, 0, CPX, 2)])
    host = Amd(node, lambda root: Sysfs(root, boards, **tree).write())
    await node.start_kubelet()
    one = host.gateway()
    await node.until(lambda: node.capacity(GPU) > 0, "the GPUs")
    found = {uuid: known["parent"] for uuid, known in (await facts(one)).items() if known["parent"]}
    assert found == expected


# What is wrong in it.


def _mode(tree: Sysfs) -> Path:
    return tree.pci(tree.boards[0]) / "current_compute_partition"


def _folder_for_a_file(tree: Sysfs) -> None:
    _mode(tree).unlink()
    _mode(tree).mkdir()


def _pipe_for_a_file(tree: Sysfs) -> None:
    numa = tree.pci(tree.boards[0]) / "numa_node"
    numa.unlink()
    os.mkfifo(numa)


def _link_for_a_file(tree: Sysfs) -> None:
    _mode(tree).rename(tree.root / "mode")
    _mode(tree).symlink_to(tree.root / "mode")


def _leads(target: str) -> Callable[[Sysfs], None]:
    def leads(tree: Sysfs) -> None:
        (tree.driver / FIRST).unlink()
        (tree.driver / FIRST).symlink_to(target)

    return leads


EDITS: Final[Mapping[str, tuple[Callable[[Sysfs], object], str]]] = {
    "a folder for a file": (_folder_for_a_file, "Is a directory"),
    "a pipe": (_pipe_for_a_file, "is not a plain file"),
    "a link for a file": (_link_for_a_file, "Too many levels of symbolic links"),
    "a huge file": (lambda tree: _mode(tree).write_text("X" * 4097), "more than 4096 bytes"),
    "an odd mode": (lambda tree: _mode(tree).write_text("CPX/../x"), "unknown partition mode"),
    "no text": (lambda tree: _mode(tree).write_bytes(b"\xff\xfe"), "unknown partition mode"),
    "it leads out": (_leads("/etc"), "leads out of"),
    "it leads to itself": (_leads(FIRST), "Too many levels of symbolic links"),
    "it is just going": (lambda tree: shutil.rmtree(tree.pci(tree.boards[0])), "No such file"),
    "no render node": (lambda tree: shutil.rmtree(tree.pci(tree.boards[0]) / "drm"), "no render node"),
    "not in KFD": (lambda tree: shutil.rmtree(tree.kfd / f"nodes/{CPUS}"), "has no node with the render minor 128"),
    "no file of KFD's": (known_by_a_link, "has no node with the render minor 128 ("),
}


@pytest.mark.parametrize("edit", EDITS)
async def test_a_gpu_with_something_wrong_in_its_files_is_the_only_one(node: Node, edit: str) -> None:
    boards = [Board(pci, 0, SPX) for pci in (FIRST, SECOND, THIRD)]
    host = Amd(node, lambda root: Sysfs(root, boards).write())
    change, words = EDITS[edit]
    change(host.tree)
    one = await host.served(2)
    (wrong,) = (await reasons(one)).items()
    assert wrong[0] == FIRST
    assert words in wrong[1]
    assert len(wrong[1]) < 500


@pytest.mark.parametrize("strategy", ["single", "mixed"])
@pytest.mark.parametrize("file", ["current_compute_partition", "current_memory_partition"])
async def test_a_gpu_whose_mode_is_no_mode_decides_no_name(node: Node, file: str, strategy: str) -> None:
    boards = [Board(pci, 0, SPX) for pci in (FIRST, SECOND, THIRD)]
    host = Amd(node, lambda root: Sysfs(root, boards).write())
    await node.start_kubelet()
    for words in ("N/A", "UNKNOWN", "", "spx" if file == "current_memory_partition" else "nps1", "42"):
        (host.tree.pci(boards[1]) / file).write_text(f"{words}\n")
        one = host.gateway("--resource-naming-strategy", strategy, "--fail-on-init-error")
        name = "amd.com/spx_nps1" if strategy == "mixed" else GPU
        await node.until(lambda: node.capacity(name) == 3, "the GPUs")  # noqa: B023 - at once
        await node.allocatable_is(2, name)
        assert list(await reasons(one)) == [SECOND]
        await one.terminate()


@pytest.mark.parametrize("file", ["current_compute_partition", "current_memory_partition"])
async def test_a_gpu_that_lacks_the_others_mode_is_not_offered_under_another_name(node: Node, file: str) -> None:
    boards = [Board(pci, 0, SPX) for pci in (FIRST, SECOND, THIRD)]
    host = Amd(node, lambda root: Sysfs(root, boards).write())
    (host.tree.pci(boards[1]) / file).unlink()
    one = await host.served(2, MIXED, resource="amd.com/spx_nps1")
    await node.pass_time(10)
    assert set(await offered(one)) == {FIRST, THIRD}
    assert list(await reasons(one)) == [SECOND]
    (host.tree.pci(boards[1]) / "current_compute_partition").unlink(missing_ok=True)
    (host.tree.pci(boards[1]) / "current_memory_partition").unlink(missing_ok=True)
    await node.pass_time(10)
    assert set(await offered(one)) == {FIRST, THIRD}


async def test_a_gpu_of_a_product_without_modes_is_well_beside_others_that_have_some(node: Node) -> None:
    boards = [Board(FIRST, 0, SPX, product="MI300X"), Board(SECOND, 0, product="W7900")]
    host = Amd(node, lambda root: Sysfs(root, boards).write())
    one = await host.served(2)
    assert await offered(one) == {FIRST: GPU, SECOND: GPU}


async def test_a_gpu_in_trouble_decides_no_name_of_those_that_were_partitioned_meanwhile(node: Node) -> None:
    host = Amd(node, lambda root: parted(root, ("DPX", "NPS1"), ("DPX", "NPS1")))
    await host.served(4)
    host.tree.boards = [host.tree.boards[0], Board(SECOND, 0, SPX)]
    host.tree.write()
    _mode(host.tree).write_text("?" * 99)
    await node.allocatable_is(1, GPU)
    await node.until(lambda: node.capacity(GPU) == 3, "the other one's partition to go", 900)


async def test_a_partition_of_before_the_restart_stays_while_a_gpu_is_in_trouble(node: Node) -> None:
    host = Amd(node, lambda root: parted(root, ("DPX", "NPS1"), ("DPX", "NPS1")))
    one = await host.served(4)
    one.kill()
    host.tree.boards = [Board(FIRST, 0, SPX), Board(SECOND, 0, SPX)]
    host.tree.write()
    _mode(host.tree).write_text("?" * 99)
    two = host.gateway()
    await node.allocatable_is(1, GPU)
    await node.pass_time(60)
    found = await two.states(GPU)
    assert (found["amdgpu_xcp_0"], found["amdgpu_xcp_1"]) == ("lost", "lost")
    host.tree.write()
    await node.until(lambda: node.capacity(GPU) == node.allocatable(GPU) == 2, "the whole GPUs", 900)


@pytest.mark.parametrize("driver", ["", "vfio-pci"])
async def test_a_gpu_without_amds_driver_is_told_unless_it_is_for_virtual_machines(node: Node, driver: str) -> None:
    host = Amd(node, three)
    host.tree.boards[0] = replace(host.tree.boards[0], in_kfd=False)
    host.tree.write()
    (host.tree.driver / FIRST).unlink()
    link = host.sys / "bus/pci/devices" / FIRST / "driver"
    link.unlink()
    if driver:
        link.symlink_to(host.sys / "bus/pci/drivers" / driver)
    one = await host.served(2)
    assert [gpu["id"] for gpu in (await one.status())["unusable"]] == ([] if driver else [FIRST])


@pytest.mark.parametrize("how", ["mended", "loaded anew", "without a generation"])
async def test_a_topology_that_is_another_one_is_read_again(node: Node, how: str) -> None:
    host = Amd(node, three)
    kfd = host.tree.kfd
    if how == "mended":
        known_by_a_link(host.tree)
    elif how == "without a generation":
        (kfd / "generation_id").unlink()
    one = await host.served(2 if how == "mended" else 3)
    assert ("KFD's topology can't be read" in str((await one.status())["hindrances"])) is (how == "mended")
    if how == "mended":
        (kfd / f"nodes/{CPUS}/properties").unlink()
        (host.sys / "elsewhere").rename(kfd / f"nodes/{CPUS}/properties")
        await node.allocatable_is(3, GPU)
        assert not (await one.status())["hindrances"]
        return
    if how == "loaded anew":
        (kfd / "nodes").rename(kfd / "old")
        shutil.copytree(kfd / "old", kfd / "nodes")
    shutil.rmtree(kfd / f"nodes/{CPUS}")
    await node.allocatable_is(2, GPU)


@pytest.mark.parametrize(
    ("file", "content"),
    [("product_name", b"\xff" * 5000), ("numa_node", b"-1\n"), ("numa_node", b"a lot\n"), ("x", b"?")],
)
async def test_what_only_describes_a_gpu_is_no_trouble(node: Node, file: str, content: bytes) -> None:
    host = Amd(node, three)
    (host.tree.pci(host.tree.boards[0]) / file).write_bytes(content)
    one = await host.served(3)
    assert not await reasons(one)


# Each file, in each way.

Place = Callable[[Sysfs, int], Path]
PARTS: Final = 2


def _of_gpu(name: str) -> Place:
    return lambda tree, number: tree.pci(tree.boards[number]) / name


def _of_node(name: str, part: int = 0) -> Place:
    return lambda tree, number: tree.kfd / "nodes" / str(CPUS + number * PARTS + part) / name


def _of_part(name: str) -> Place:
    return lambda tree, number: tree.root / "devices/platform" / f"amdgpu_xcp_{number}" / name


FILES: Final[Mapping[str, Place]] = {
    **{
        name: _of_gpu(name)
        for name in (
            "current_compute_partition",
            "current_memory_partition",
            "numa_node",
            "product_name",
            "device",
            "drm",
        )
    },
    "pci:amdgpu/<address>": lambda tree, number: tree.driver / tree.boards[number].pci,
    "nodes/<n>": _of_node(""),
    "nodes/<n>/properties": _of_node("properties"),
    "nodes/<n>/mem_banks/0/properties": _of_node("mem_banks/0/properties"),
    "nodes/<n>/io_links/1/properties": _of_node("io_links/1/properties"),
    "amdgpu_xcp_<n>": _of_part(""),
    "amdgpu_xcp_<n>/drm": _of_part("drm"),
    "nodes/<n>/properties of a partition": _of_node("properties", 1),
}


def _absent(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def _copy(path: Path, to: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, to, symlinks=True)
    else:
        shutil.copy2(path, to, follow_symlinks=False)


def _put_back(copy: Path, path: Path) -> None:
    if os.path.lexists(path):
        _absent(path)
    copy.rename(path)


def _empty(path: Path) -> None:
    made = Path.touch if path.is_file() else Path.mkdir
    _absent(path)
    made(path)


def _unreadable(path: Path) -> None:
    _absent(path)
    path.symlink_to(path.name)  # ELOOP: root may read all that has a mode.


def _nonsense(path: Path) -> None:
    _absent(path)
    path.write_text("N/A\n")


FAULTS = (_absent, _empty, _unreadable, _nonsense)
COUNT = 8 if "WHOLE_TABLE" in os.environ else 4
EACH = {"first": (0,), "last": (COUNT - 1,), "two": (1, COUNT - 2), "all": tuple(range(COUNT))}
WHICH = EACH if "WHOLE_TABLE" in os.environ else {"two": EACH["two"]}


@pytest.mark.parametrize("file", FILES)
async def test_no_file_of_a_gpu_takes_another_one_away(node: Node, file: str) -> None:
    """``pytest -s`` shows the table; with WHOLE_TABLE in the environment, as at night, for the first GPU of eight, the last, two and all; by day, for two of four."""
    boards = [
        Board(f"0000:{5 + 17 * index:02x}:00.0", 0, ("DPX", "NPS2"), 2, product="MI300X") for index in range(COUNT)
    ]
    host = Amd(node, lambda root: Sysfs(root, boards).write())
    one = await host.served(2 * COUNT, MIXED, resource="amd.com/dpx_nps2")
    well, cells = await offered(one), dict[str, list[str]]()
    for fault in FAULTS:
        for hit in WHICH.values():
            mine = {name for index in hit for name in (boards[index].pci, f"amdgpu_xcp_{index}")}
            for moment in ("later", "first look"):
                paths = {FILES[file](host.tree, index): node.folder / f"copy-{index}" for index in hit}
                for path, copy in paths.items():
                    _copy(path, copy)
                    fault(path)
                if moment == "first look":
                    one.kill()
                    shutil.rmtree(node.state)
                    one = host.gateway(MIXED)
                await node.pass_time(12)
                now, ill = await offered(one), await reasons(one)
                case = f"{fault.__name__[1:]} {hit} {moment}"
                others = {uuid: resource for uuid, resource in well.items() if uuid not in mine}
                assert others.items() <= now.items(), case
                assert now.items() <= well.items(), f"it is offered as something else: {case}"
                assert all(ill.values()), case
                hindered = (await one.status())["hindrances"]
                assert well.keys() - now.keys() <= ill.keys() or hindered, f"it is gone without a reason: {case}"
                lost = len(well) - len(now)
                cells.setdefault(f"{fault.__name__[1:]}, {moment}", []).append(f"{lost}/{len(mine)}")
                for path, copy in paths.items():
                    _put_back(copy, path)
                host.tree.renew()
                await _are_back(node, one, well)
    for case, row in cells.items():
        print(f"{file:46} {case:24}" + "".join(f"{cell:>8}" for cell in row))  # noqa: T201


async def _are_back(node: Node, one: Gateway, well: dict[str, str]) -> None:
    await node.eventually(lambda: _all(one, well), "all GPUs, after the file was mended", 200)


async def _all(one: Gateway, well: dict[str, str]) -> bool:
    return await offered(one) == well


@pytest.mark.parametrize(
    "file",
    [
        *("class/kfd", "module/amdgpu/version", "module/amdgpu/drivers/pci:amdgpu", "devices/platform"),
        *("devices/virtual/kfd/kfd/topology/generation_id", "devices/virtual/kfd/kfd/topology/nodes"),
    ],
)
async def test_a_file_of_the_whole_node_that_goes_leaves_every_gpu_listed_with_a_reason(node: Node, file: str) -> None:
    host = Amd(node, lambda root: parted(root, CPX, CPX))
    one = await host.served(4)
    well = await offered(one)
    for fault in (_absent, _empty, _nonsense):
        fault(host.sys / file)
        await node.pass_time(12)
        ill = await reasons(one)
        assert (await offered(one)).keys() | ill.keys() == well.keys()
        assert all(ill.values())
        host.tree.write()
        await _are_back(node, one, well)


# What hangs.


class Hanging:
    """Lets whoever opens a file below a folder wait for ever, in its own thread."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        opens = os.open

        def opening(path: Any, *how: Any, **where: Any) -> int:
            if str(path).startswith(str(folder)) and threading.current_thread().name == "amd-sysfs":
                self.free.wait()
            return opens(path, *how, **where)

        monkeypatch.setattr(os, "open", opening)


async def test_a_driver_that_hangs_makes_its_gpus_unhealthy_until_it_answers_and_holds_up_nothing(node: Node) -> None:
    host = Amd(node, three)
    with pytest.MonkeyPatch.context() as patch:
        hanging = Hanging(host.sys, patch)
        one = await host.served(3)
        given = await node.admit("pod", GPU)
        hanging.free.clear()
        await node.allocatable_is(0, GPU, seconds=120)
        assert node.capacity(GPU) == 3
        assert all("the amdgpu driver hangs" in reason for reason in (await reasons(one)).values())
        await node.pass_time(120)
        assert [thread.name for thread in threading.enumerate()].count("amd-sysfs") == 1
        assert (await node.restart_container("pod")).devices == given.devices
        hanging.free.set()
        await node.allocatable_is(3, GPU)
        hanging.free.clear()
        await node.allocatable_is(0, GPU, seconds=120)
        assert await one.terminate() == 0
        hanging.free.set()


@pytest.mark.parametrize("again", [False, True])
async def test_a_driver_that_hangs_from_the_start_is_waited_for(node: Node, again: bool) -> None:
    host = Amd(node, three)
    await node.start_kubelet()
    if again:
        one = host.gateway()
        await node.allocatable_is(3, GPU)
        one.kill()
    with pytest.MonkeyPatch.context() as patch:
        hanging = Hanging(host.sys, patch)
        hanging.free.clear()
        one = host.gateway()
        await node.pass_time(60)
        assert node.capacity(GPU) == node.allocatable(GPU) == (3 if again else 0)
        assert "hangs" in str((await one.status())["hindrances"])
        hanging.free.set()
        await node.allocatable_is(3, GPU)
        await node.eventually(lambda: none_hinders(one), "no hindrance")


async def none_hinders(one: Gateway) -> bool:
    """Whether no source is hindered."""
    return not (await one.status())["hindrances"]


async def test_without_a_driver_at_the_start_there_is_no_gpu_and_the_gateway_is_ready(node: Node) -> None:
    host = Amd(node, three)
    shutil.rmtree(host.sys / "module")
    await node.start_kubelet()
    one = host.gateway("--startup-grace=0")
    await node.until(lambda: one.said("serving"), "its start")
    assert "amdgpu driver" in str((await one.status())["hindrances"])
    host.tree.write()
    await node.allocatable_is(3, GPU)
    one.kill()
    shutil.rmtree(host.sys / "module")
    two = host.gateway()
    await node.allocatable_is(0, GPU)  # It was looked, and there is none.
    assert set((await two.states(GPU)).values()) == {"lost"}
    host.tree.write()
    await node.allocatable_is(3, GPU)


# What the metrics exporter says.


def _said(health: Mapping[str, str]) -> bytes:
    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    return b"".join(field(1, field(3, word.encode()) + field(5, device.encode())) for device, word in health.items())


class Exporter:
    """AMD's metrics exporter, which says ``words``; it counts who asks, at which time."""

    def __init__(self, host: Amd, words: Callable[[], bytes]) -> None:
        self.asked: list[float] = []

        async def say(_request: bytes, _context: object) -> bytes:
            self.asked.append(time.monotonic())
            return words()

        patches.setattr("devices.gpu.amd.exporter.grpc", wire.Grpc(host.node.clock))
        handlers: dict[str, Any] = {"List": grpc.unary_unary_rpc_method_handler(say)}
        self.server = wire.Server([grpc.method_handlers_generic_handler("metricssvc.MetricsService", handlers)])
        self.server.add_insecure_port(f"unix:{host.root / 'exporter.sock'}")


async def test_only_the_word_unhealthy_counts_and_it_is_asked_for_every_half_minute(node: Node) -> None:
    host = Amd(node, three)
    health = {FIRST: "unknown", SECOND: "UNHEALTHY", THIRD: ""}
    exporter = Exporter(host, lambda: _said(health))
    await exporter.server.start()
    one = await host.served(2)
    assert await reasons(one) == {SECOND: "AMD's metrics exporter calls it unhealthy"}
    shutil.rmtree(host.tree.pci(host.tree.boards[1]) / "drm")
    await node.pass_time(120)
    assert "no render node" in (await reasons(one))[SECOND]  # What is seen here says more.
    assert 4 <= len(exporter.asked) <= 6


async def test_what_the_exporter_says_of_a_partition_is_so_of_its_gpu(node: Node) -> None:
    host = Amd(node, lambda root: parted(root, ("CPX", "NPS4"), ("CPX", "NPS4")))
    exporter = Exporter(host, lambda: _said({"amdgpu_xcp_0": "unhealthy"}))
    await exporter.server.start()
    one = await host.served(2)
    assert set(await reasons(one)) == {FIRST, "amdgpu_xcp_0"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(lambda: b"\x0b", "cannot decode the answer", id="nonsense"),
        pytest.param(lambda: b"\x0a\x00" * (1 << 20), "RESOURCE_EXHAUSTED", id="too much"),
        pytest.param(lambda: b"\x0a" + 1 // 0 * b"", "UNKNOWN", id="an error"),
    ],
)
async def test_an_exporter_that_answers_badly_has_said_nothing_new_and_that_is_told_once(
    node: Node, words: Callable[[], bytes], reason: str
) -> None:
    host = Amd(node, three)
    says = [lambda: _said({SECOND: "unhealthy"})]

    def last() -> bytes:
        return says[-1]()

    exporter = Exporter(host, last)
    await exporter.server.start()
    one = await host.served(2)
    says.append(words)
    await node.allocatable_after(120, 2, GPU)
    (silent,) = one.said("metrics exporter silent")
    assert reason in silent["reason"]
    says.pop()
    await node.pass_time(60)
    assert len(one.said("metrics exporter answers again")) == 1
