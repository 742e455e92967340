"""AMD's GPUs out of sysfs: what a tree means, what is wrong in it, and what is seen of its changes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from devices.gpu import naming
from devices.gpu.allocation import preferred
from devices.gpu.amd import backend as amd
from devices.gpu.amd import sysfs
from devices.gpu.amd.backend import AmdBackend
from devices.gpu.amd.exporter import Exporter, unhealthy
from devices.gpu.amd.sysfs import AbsentError, Topology
from devices.gpu.amd.vendor import AMD
from devices.gpu.backend import Sight
from devices.gpu.model import GPU, Link, Way
from devices.model import PreferredRequest, TroubleKind
from devices.policy import Naming, Policy
from gateway.lab.waiting import until
from tests.fakes.amd import CPUS, Board, Sysfs, mi210, mi300x, mi308, vega

FIRST, SECOND = "0000:05:00.0", "0000:27:00.0"


def seen(tree: Sysfs) -> tuple[GPU, ...]:
    return amd.gpus(sysfs.read(tree.root, Topology()))


def troubles(gpus: tuple[GPU, ...]) -> dict[str, str]:
    return {gpu.uuid: gpu.trouble.reason for gpu in gpus if gpu.trouble is not None}


# What a tree means.

Maker = Callable[[Path], Sysfs]
Shape = Callable[[Maker], tuple[GPU, ...]]


def spx(root: Path) -> Sysfs:
    return mi300x(root, ("SPX", "NPS1"))


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Shape:
    """What is seen of a published shape, whose tree is made once: it has up to 4 000 files."""
    return functools.cache(lambda make: seen(make(tmp_path_factory.mktemp("sys"))))


@pytest.mark.parametrize(
    ("make", "boards", "minors", "on_nodes", "profile"),
    [
        pytest.param(mi210, 8, range(128, 136), {0: 4, 1: 4}, "", id="MI210: two hives, one on each NUMA node"),
        pytest.param(
            mi300x, 8, range(128, 191), {0: 32, 1: 31}, "cpx_nps4", id="MI300X in CPX and NPS4: 63 partitions"
        ),
        pytest.param(mi308, 4, range(128, 160), {0: 16, 1: 16}, "cpx_nps1", id="MI308: four in eight partitions"),
        pytest.param(vega, 2, range(128, 130), {None: 2}, "", id="Vega: no modes, no NUMA node"),
    ],
)
def test_the_published_shapes(
    shape: Shape,
    make: Maker,
    boards: int,
    minors: range,
    on_nodes: dict[int | None, int],
    profile: str,
) -> None:
    gpus = shape(make)
    assert len({gpu.board for gpu in gpus}) == boards
    assert [gpu.minor for gpu in gpus] == list(minors)
    assert [gpu.index for gpu in gpus] == list(range(len(minors)))
    assert Counter(gpu.numa_node for gpu in gpus) == on_nodes
    assert {gpu.profile for gpu in gpus} == {profile}
    assert {gpu.resource for gpu in gpus} == {"amd.com/gpu"}
    assert not troubles(gpus)


def test_a_gpu_and_its_partitions_in_full(tmp_path: Path) -> None:
    boards = [
        Board("0000:05:00.0", 0, ("CPX", "NPS4"), 2, hive=7, lanes=4, product="AMD Instinct MI300X"),
        Board("0001:27:00.0", 1, hive=7, lanes=4),
    ]
    links = (Link("0001:27:00.0", Way.XGMI, 4),)
    whole = GPU(
        "0000:05:00.0",
        index=0,
        minor=128,
        numa_node=0,
        device_nodes=("/dev/dri/card1", "/dev/dri/renderD128"),
        links=links,
        resource="amd.com/gpu",
        profile="cpx_nps4",
        product="AMD Instinct MI300X",
        pci="0000:05:00.0",
        memory=96 << 30,
        capacities=(("computeUnits", 152), ("simdUnits", 608)),
    )
    part = replace(
        whole,
        uuid="amdgpu_xcp_0",
        index=1,
        minor=129,
        device_nodes=("/dev/dri/card2", "/dev/dri/renderD129"),
        parent="0000:05:00.0",
    )
    assert seen(Sysfs(tmp_path, boards).write())[:2] == (whole, part)


def test_a_partition_has_what_kfd_says_of_it(tmp_path: Path) -> None:
    """Each has a node of its own there, and they needn't be alike."""
    tree = Sysfs(tmp_path, [Board("0000:05:00.0", 0, ("CPX", "NPS4"), 2)]).write()
    second = max((tree.kfd / "nodes").iterdir(), key=lambda one: int(one.name))
    text = (second / "properties").read_text().replace("simd_count 608", "simd_count 8")
    (second / "properties").write_text(text.replace("simd_per_cu 4", "simd_per_cu 0"))
    (second / "mem_banks/0/properties").unlink()
    whole, part = seen(tree)
    assert (whole.memory, dict(whole.capacities)) == (96 << 30, {"computeUnits": 152, "simdUnits": 608})
    assert (part.memory, dict(part.capacities)) == (0, {"simdUnits": 8})


NEAR, NEXT, FAR = Board("0000:03:00.0"), Board("0000:04:00.0"), Board("0000:83:00.0", 1)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param(replace(NEAR, hive=1), replace(NEXT, hive=1), (Way.XGMI, 1), id="one hive: XGMI"),
        pytest.param(
            replace(NEAR, hive=1), replace(FAR, hive=1), (Way.XGMI, 1), id="one hive over two NUMA nodes: XGMI"
        ),
        pytest.param(
            replace(NEAR, hive=1, lanes=4), replace(NEXT, hive=1), (Way.XGMI, 4), id="four links side by side"
        ),
        pytest.param(replace(NEAR, hive=1, lanes=999), replace(NEXT, hive=1), (Way.XGMI, 64), id="an absurd bandwidth"),
        pytest.param(replace(NEAR, hive=1), replace(NEXT, hive=2), (Way.NODE, 1), id="two hives on a NUMA node: PCIe"),
        pytest.param(NEAR, NEXT, (Way.NODE, 1), id="PCIe within a NUMA node"),
        pytest.param(NEAR, FAR, (Way.SYS, 1), id="PCIe over two NUMA nodes"),
        pytest.param(replace(NEAR, numa=-1), replace(NEXT, numa=-1), (Way.SYS, 1), id="PCIe, nobody knows where"),
    ],
)
def test_how_two_gpus_reach_each_other(tmp_path: Path, one: Board, other: Board, expected: tuple[Way, int]) -> None:
    gpu, _ = seen(Sysfs(tmp_path, [one, other]).write())
    assert gpu.links == (Link(other.pci, *expected),)


def test_a_link_of_another_type_counts_as_none(tmp_path: Path) -> None:
    tree = vega(tmp_path)
    wire = tree.kfd / f"nodes/{CPUS}/p2p_links/0/properties"
    wire.write_text(wire.read_text().replace("type 2", "type 1"))
    assert [gpu.links for gpu in seen(tree)] == [(), (Link("0000:19:00.0", Way.SYS),)]


@pytest.mark.parametrize(
    ("make", "places", "size", "expected"),
    [
        pytest.param(mi210, range(8), 1, [0], id="MI210: the first"),
        pytest.param(mi210, range(8), 4, [0, 1, 2, 3], id="MI210: a hive"),
        pytest.param(mi210, range(2, 8), 3, [4, 5, 6], id="MI210: where a hive is whole, from there"),
        pytest.param(mi210, range(8), 5, [0, 1, 2, 3, 4], id="MI210: a hive and one more"),
        pytest.param(mi300x, range(63), 3, [56, 57, 58], id="CPX: of the GPU with the fewest"),
        pytest.param(mi300x, range(63), 8, list(range(8)), id="CPX: eight are one whole GPU"),
        pytest.param(mi308, range(32), 12, list(range(12)), id="MI308: one GPU and a half"),
        pytest.param(vega, range(2), 1, [0], id="Vega: the first"),
    ],
)
def test_which_are_preferred(shape: Shape, make: Maker, places: range, size: int, expected: list[int]) -> None:
    gpus = shape(make)
    request = PreferredRequest(tuple(gpus[place].uuid for place in places), (), size)
    assert preferred(request, {gpu.uuid: gpu for gpu in gpus}) == tuple(gpus[place].uuid for place in expected)


@pytest.mark.parametrize(
    ("make", "strategy", "expected"),
    [
        pytest.param(mi210, Naming.SINGLE, {"amd.com/gpu": 8}, id="no partitions, single"),
        pytest.param(mi210, Naming.MIXED, {"amd.com/gpu": 8}, id="no partitions, mixed"),
        pytest.param(mi300x, Naming.SINGLE, {"amd.com/gpu": 63}, id="CPX, single"),
        pytest.param(mi300x, Naming.MIXED, {"amd.com/cpx_nps4": 63}, id="CPX, mixed"),
        pytest.param(
            spx,
            Naming.MIXED,
            {"amd.com/spx_nps1": 8},
            id="could be partitioned, mixed",
        ),
    ],
)
def test_the_names(shape: Shape, make: Maker, strategy: Naming, expected: dict[str, int]) -> None:
    named = naming.named(shape(make), Policy(resource_naming=strategy), (AMD,))
    assert {name: len(gpus) for name, gpus in named.items()} == expected


CPX = ("CPX", "NPS1")


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        pytest.param(
            {"boards": [Board(FIRST, 0, CPX, 2)]}, {"amdgpu_xcp_0": FIRST}, id="AMD's kernel module: an underscore"
        ),
        pytest.param(
            {"boards": [Board(FIRST, 0, CPX, 2)], "partition_name": "amdgpu_xcp.{}"},
            {"amdgpu_xcp.0": FIRST},
            id="Linux's kernel module: a dot",
        ),
        pytest.param(
            {"boards": [Board(FIRST, 0, CPX, 2)], "partition_name": "amdgpu_xcp_{}x"}, {}, id="another device's name"
        ),
        pytest.param(
            {"boards": [Board(FIRST, 0, CPX, 2)], "spare": 5}, {"amdgpu_xcp_0": FIRST}, id="spare ones aren't in KFD"
        ),
        pytest.param({"boards": [Board(FIRST, -1, CPX, 2)]}, {"amdgpu_xcp_0": FIRST}, id="no NUMA node is no reason"),
        pytest.param(
            {"boards": [Board(FIRST, 0, CPX, 2), Board("0001:05:00.0", 0, CPX, 2)]},
            {"amdgpu_xcp_0": FIRST, "amdgpu_xcp_1": "0001:05:00.0"},
            id="one address in two domains",
        ),
        pytest.param(
            {"boards": [Board("0000:05:00.0", 0, CPX, 2), Board("0000:05:00.4", 0, CPX, 3)]},
            {"amdgpu_xcp_0": FIRST, "amdgpu_xcp_1": "0000:05:00.4", "amdgpu_xcp_2": "0000:05:00.4"},
            id="two functions of one device",
        ),
    ],
)
def test_where_partitions_belong(tmp_path: Path, tree: dict[str, Any], expected: dict[str, str]) -> None:
    gpus = seen(Sysfs(tmp_path, **tree).write())
    assert {gpu.uuid: gpu.parent for gpu in gpus if gpu.parent} == expected


def test_a_partition_belongs_by_its_place_also_where_each_has_a_unique_id(tmp_path: Path) -> None:
    tree = Sysfs(tmp_path, [Board(FIRST, 0, CPX, 4), Board(SECOND, 0, CPX, 4)]).write()
    for number in range(CPUS, CPUS + 8):
        properties = tree.kfd / f"nodes/{number}/properties"
        properties.write_text(properties.read_text().replace("unique_id", f"unique_id {number}\nold_id"))
    assert Counter(gpu.board for gpu in seen(tree)) == {FIRST: 4, SECOND: 4}


# What is wrong in it.


def mode(tree: Sysfs) -> Path:
    return tree.pci(tree.boards[0]) / "current_compute_partition"


def not_plain(tree: Sysfs) -> None:
    mode(tree).unlink()
    mode(tree).mkdir()


def a_pipe(tree: Sysfs) -> None:
    numa = tree.pci(tree.boards[0]) / "numa_node"
    numa.unlink()
    os.mkfifo(numa)


def a_link(tree: Sysfs) -> None:
    mode(tree).unlink()
    mode(tree).symlink_to("/etc/hostname")


def leads_out(tree: Sysfs) -> None:
    link = tree.driver / FIRST
    link.unlink()
    link.symlink_to("/etc")


def leads_to_itself(tree: Sysfs) -> None:
    link = tree.driver / FIRST
    link.unlink()
    link.symlink_to(FIRST)


def leads_nowhere(tree: Sysfs) -> None:
    shutil.rmtree(tree.pci(tree.boards[0]))


def no_render_node(tree: Sysfs) -> None:
    shutil.rmtree(tree.pci(tree.boards[0]) / "drm")


def not_in_kfd(tree: Sysfs) -> None:
    shutil.rmtree(tree.kfd / f"nodes/{CPUS}")


def node_is_a_link(tree: Sysfs) -> None:
    properties = tree.kfd / f"nodes/{CPUS}/properties"
    properties.rename(tree.root / "elsewhere")
    properties.symlink_to(tree.root / "elsewhere")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        pytest.param(not_plain, "to be a plain file", id="a folder where a file should be"),
        pytest.param(a_pipe, "to be a plain file", id="a pipe, which would block"),
        pytest.param(a_link, "Too many levels of symbolic links", id="a link where a file should be"),
        pytest.param(lambda tree: mode(tree).write_text("X" * 4097), "at most 4096 bytes", id="a huge file"),
        pytest.param(lambda tree: mode(tree).write_text("CPX/../x"), "expected a partition mode", id="an odd mode"),
        pytest.param(lambda tree: mode(tree).write_bytes(b"\xff\xfe"), "expected a partition mode", id="no text"),
        pytest.param(leads_out, "leads out of", id="a folder outside of sysfs"),
        pytest.param(leads_to_itself, "Too many levels of symbolic links", id="a folder that is a link to itself"),
        pytest.param(leads_nowhere, "No such file", id="a GPU that is just going"),
        pytest.param(no_render_node, "no render node", id="a GPU without a render node"),
        pytest.param(
            not_in_kfd, "KFD, which computes, has no node with the render minor 128", id="KFD doesn't know it"
        ),
        pytest.param(node_is_a_link, "has no node with the render minor 128 (", id="KFD's node can't be read"),
    ],
)
def test_a_gpu_in_trouble_is_the_only_one(tmp_path: Path, edit: Callable[[Sysfs], None], says: str) -> None:
    tree = spx(tmp_path)
    edit(tree)
    gpus = seen(tree)
    assert len(gpus) == 8
    wrong = troubles(gpus)
    assert list(wrong) == [FIRST]
    assert says in wrong[FIRST]
    assert len(wrong[FIRST]) < 500


@pytest.mark.parametrize("strategy", list(Naming))
@pytest.mark.parametrize("name", ["current_compute_partition", "current_memory_partition"])
@pytest.mark.parametrize("says", ["N/A", "UNKNOWN", "", "spx", "42"])
def test_a_gpu_whose_mode_is_no_mode_decides_no_name(tmp_path: Path, strategy: Naming, name: str, says: str) -> None:
    """The seven others are offered as before; it is listed beside them, unhealthy (ROCm/k8s-device-plugin#167)."""
    tree = spx(tmp_path)
    if says == "spx":
        says = "nps1" if name == "current_compute_partition" else says
    (tree.pci(tree.boards[3]) / name).write_text(f"{says}\n")
    named = naming.named(seen(tree), Policy(resource_naming=strategy), (AMD,))
    assert {one: len(gpus) for one, gpus in named.items()} == {
        "amd.com/gpu" if strategy is Naming.SINGLE else "amd.com/spx_nps1": 8
    }
    assert [gpu.trouble is None for gpus in named.values() for gpu in gpus] == [True] * 3 + [False] + [True] * 4


@pytest.mark.parametrize(
    ("driver", "unusable"),
    [
        pytest.param("", [FIRST], id="it has no driver"),
        pytest.param("vfio-pci", [], id="it is for virtual machines"),
    ],
)
async def test_a_gpu_that_the_driver_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, unusable: list[str]
) -> None:
    tree = spx(tmp_path)
    out_of_kfd(tree)
    (tree.driver / FIRST).unlink()
    link = tree.root / "bus/pci/devices" / FIRST / "driver"
    link.unlink()
    if driver:
        link.symlink_to(tree.root / "bus/pci/drivers" / driver)
    async with watching(tree, monkeypatch) as watched:
        sight = await watched.next()
        assert [one.pci for one in sight.unusable] == unusable
        assert (len(sight.gpus), watched.backend.hindrance) == (7, "")


async def test_what_hinders_is_told_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = spx(tmp_path)
    node_is_a_link(tree)
    async with watching(tree, monkeypatch) as watched:
        await watched.next()
        assert "KFD's topology can't be read" in watched.backend.hindrance
        tree.write()
        await watched.next()
        assert watched.backend.hindrance == ""


def test_a_container_from_which_kfd_hides_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: Path) -> dict[str, int]:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(sysfs, "_properties", hidden)
    wrong = troubles(seen(vega(tmp_path)))
    assert len(wrong) == 2
    assert all("let it run privileged" in reason for reason in wrong.values())


@pytest.mark.parametrize(
    ("name", "content"),
    [("product_name", b"\xff" * 5000), ("numa_node", b"-1\n"), ("numa_node", b"a lot\n"), ("unheard_of", b"?")],
)
def test_what_is_no_trouble(tmp_path: Path, name: str, content: bytes) -> None:
    tree = vega(tmp_path)
    (tree.pci(tree.boards[0]) / name).write_bytes(content)
    assert [(gpu.trouble, gpu.numa_node) for gpu in seen(tree)] == [(None, None)] * 2


def test_the_product_is_printable_and_short(tmp_path: Path) -> None:
    gpu, *_ = seen(Sysfs(tmp_path, [Board(FIRST, product="MI\x1b[2J" + "x" * 999)]).write())
    assert gpu.product == "MI[2J" + "x" * 59


def test_more_entries_than_any_node_has_are_not_read(tmp_path: Path) -> None:
    tree = Sysfs(tmp_path, []).write()
    for number in range(1100):
        (tree.driver / f"{number:04x}:01:00.0").symlink_to(tree.root / "class")
    assert len(seen(tree)) == 1024


@pytest.mark.parametrize("gone", ["class/kfd", "module"])
def test_without_the_driver_nothing_can_be_seen(tmp_path: Path, gone: str) -> None:
    tree = vega(tmp_path)
    shutil.rmtree(tree.root / gone)
    with pytest.raises(AbsentError, match="expected the amdgpu driver with KFD to be loaded"):
        seen(tree)


def test_the_topology_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    tree = vega(tmp_path)
    first = sysfs.read(tree.root, Topology())
    shutil.rmtree(tree.kfd / f"nodes/{CPUS}")
    assert sysfs.read(tree.root, first.topology) == first
    (tree.kfd / "generation_id").write_text("2\n")
    assert len(sysfs.read(tree.root, first.topology).topology.nodes) == 1


def test_a_topology_of_a_newly_loaded_driver_is_another_one(tmp_path: Path) -> None:
    tree = vega(tmp_path)
    first = sysfs.read(tree.root, Topology())
    (tree.kfd / "nodes").rename(tree.kfd / "old")
    (tree.kfd / "nodes").mkdir()
    assert sysfs.read(tree.root, first.topology).topology.nodes == ()


def test_a_topology_without_a_generation_is_always_read(tmp_path: Path) -> None:
    tree = vega(tmp_path)
    (tree.kfd / "generation_id").unlink()
    first = sysfs.read(tree.root, Topology())
    shutil.rmtree(tree.kfd / f"nodes/{CPUS}")
    assert len(sysfs.read(tree.root, first.topology).topology.nodes) == 1


def test_a_topology_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    tree = vega(tmp_path)
    node_is_a_link(tree)
    first = sysfs.read(tree.root, Topology())
    properties = tree.kfd / f"nodes/{CPUS}/properties"
    properties.unlink()
    (tree.root / "elsewhere").rename(properties)
    assert len(sysfs.read(tree.root, first.topology).topology.nodes) == 2


def test_a_tree_that_changed_while_it_was_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = spx(tmp_path)
    nodes, changes = sysfs._nodes, iter([True, False])

    def changing(folder: Path, renders: Collection[int | None]) -> tuple[tuple[sysfs.KfdNode, ...], str]:
        found = nodes(folder, renders)
        if next(changes):
            tree.boards = tree.boards[:2]
            tree.write()
        return found

    monkeypatch.setattr(sysfs, "_nodes", changing)
    assert [gpu.uuid for gpu in seen(tree)] == [FIRST, SECOND]


# What is seen of its changes.


@contextlib.asynccontextmanager
async def watching(
    tree: Sysfs, monkeypatch: pytest.MonkeyPatch, exporter: Exporter | None = None
) -> AsyncGenerator[Watched]:
    monkeypatch.setattr(amd, "_EVERY_S", 3600.0)  # it looks when it is asked to
    backend = AmdBackend(tree.root, exporter or Exporter(tree.root / "no.socket"))
    async with contextlib.aclosing(backend.watch()) as sights:
        yield Watched(backend, sights)


class Watched:
    def __init__(self, backend: AmdBackend, sights: AsyncGenerator[Sight]) -> None:
        self.backend, self._sights = backend, sights

    async def next(self) -> Sight:
        """Look, and wait for a change."""
        await self.backend.acquire(["nobody"])
        async with asyncio.timeout(10):
            return await anext(self._sights)


def ids(sight: Sight) -> list[str]:
    return [gpu.uuid for gpu in sight.gpus]


async def test_a_driver_that_is_not_there_shows_no_gpu_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = vega(tmp_path)
    (tmp_path / "class").rename(tmp_path / "not-yet")
    async with watching(tree, monkeypatch) as watched:
        assert (await watched.next()).gpus == ()
        (tmp_path / "not-yet").rename(tmp_path / "class")
        sight = await watched.next()
    assert ids(sight) == ["0000:19:00.0", "0000:67:00.0"]
    assert not troubles(sight.gpus)
    assert sight.control_nodes == ("/dev/kfd",)
    assert sight.driver == "6.8.5"


def fewer(tree: Sysfs) -> None:
    tree.boards = tree.boards[1:]
    tree.write()


def partitioned(tree: Sysfs) -> None:
    tree.boards[0] = replace(tree.boards[0], modes=("DPX", "NPS1"), parts=2)
    tree.write()


def out_of_kfd(tree: Sysfs) -> None:
    tree.boards[0] = replace(tree.boards[0], in_kfd=False)
    tree.write()


def no_kfd(tree: Sysfs) -> None:
    shutil.rmtree(tree.root / "class")


def no_driver(tree: Sysfs) -> None:
    shutil.rmtree(tree.root / "module")


def odd_mode(tree: Sysfs) -> None:
    mode(tree).write_text("")
    mode(tree).write_text("?" * 99)


PART = "amdgpu_xcp_0"
ALL = [FIRST, PART, SECOND]


@pytest.mark.parametrize(
    ("change", "there", "in_trouble"),
    [
        pytest.param(fewer, [SECOND], [], id="a GPU vanishes"),
        pytest.param(out_of_kfd, ALL, [FIRST, PART], id="KFD lost a GPU: its partitions stay"),
        pytest.param(odd_mode, ALL, [FIRST, PART], id="a mode that can't be read: the old one stays"),
        pytest.param(no_kfd, ALL, ALL, id="KFD is gone: all stay"),
        pytest.param(no_driver, ALL, ALL, id="the driver is gone: all stay"),
    ],
)
async def test_what_is_seen_after_a_change_and_after_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Sysfs], None],
    there: list[str],
    in_trouble: list[str],
) -> None:
    tree = Sysfs(tmp_path, [Board(FIRST, 0, CPX, 2, hive=1), Board(SECOND, 1, ("SPX", "NPS1"), hive=1)]).write()
    boards = list(tree.boards)
    async with watching(tree, monkeypatch) as watched:
        before = await watched.next()
        assert (ids(before), troubles(before.gpus)) == (ALL, {})
        change(tree)
        changed = await watched.next()
        assert ids(changed) == there
        assert list(troubles(changed.gpus)) == in_trouble
        assert {gpu.uuid: gpu.profile for gpu in changed.gpus}.items() <= {
            gpu.uuid: gpu.profile for gpu in before.gpus
        }.items()
        assert all(gpu.trouble.kind is TroubleKind.RESTART_APP for gpu in changed.gpus if gpu.trouble)
        tree.boards = boards
        tree.write()
        assert (await watched.next()).gpus == before.gpus


async def test_a_gpu_in_trouble_decides_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mode is known from before, and the others were changed meanwhile."""
    tree = mi300x(tmp_path, ("DPX", "NPS1"))
    async with watching(tree, monkeypatch) as watched:
        await watched.next()
        tree.boards = [tree.boards[0], *(replace(board, modes=("SPX", "NPS1"), parts=1) for board in tree.boards[1:])]
        tree.write()
        odd_mode(tree)
        named = naming.named((await watched.next()).gpus, Policy(), (AMD,))
    assert [gpu.trouble is None for gpu in named["amd.com/gpu"]] == [False] * 2 + [True] * 7


async def test_a_gpu_that_is_partitioned_is_seen_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = spx(tmp_path)
    async with watching(tree, monkeypatch) as watched:
        assert {gpu.profile for gpu in (await watched.next()).gpus} == {"spx_nps1"}
        partitioned(tree)
        gpus = (await watched.next()).gpus
    assert [(gpu.uuid, gpu.parent, gpu.profile) for gpu in gpus[:3]] == [
        (FIRST, "", "dpx_nps1"),
        (PART, FIRST, "dpx_nps1"),
        (SECOND, "", "spx_nps1"),
    ]


async def test_a_look_that_finds_nothing_new_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = vega(tmp_path)
    looks, still, real = threading.Semaphore(0), threading.Lock(), sysfs.read

    def counted(sys: Path, last: Topology) -> sysfs.Tree:
        looks.release()
        with still:
            return real(sys, last)

    monkeypatch.setattr(amd, "read", counted)
    async with watching(tree, monkeypatch) as watched:
        await watched.next()
        monkeypatch.setattr(amd, "_EVERY_S", 0.001)  # from now on it looks by itself
        following = asyncio.ensure_future(watched.next())
        for _ in range(5):
            assert await asyncio.to_thread(looks.acquire, timeout=10)
        assert not following.done()
        with still:  # Half of a change is news, too.
            fewer(tree)
        assert ids(await following) == ["0000:67:00.0"]


async def test_released_gpus_are_left_out_until_they_are_acquired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Sysfs(tmp_path, [Board(FIRST, 0, CPX, 2), Board(SECOND)]).write()
    async with watching(tree, monkeypatch) as watched:
        before = await watched.next()
        await watched.backend.release([FIRST])
        await watched.backend.release([FIRST])
        sight = await watched.next()
        assert (ids(sight), set(sight.released)) == ([SECOND], {FIRST})
        await watched.backend.release(())
        sight = await watched.next()
        assert (ids(sight), set(sight.released)) == ([], {FIRST, SECOND})
        await watched.backend.acquire([SECOND])
        sight = await watched.next()
        assert (ids(sight), set(sight.released)) == ([SECOND], {FIRST})
        await watched.backend.acquire(())
        assert await watched.next() == before


async def test_a_driver_that_hangs_is_a_trouble_and_costs_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = vega(tmp_path)
    real, hung, calls = sysfs.read, threading.Event(), []

    def hanging(sys: Path, last: Topology) -> sysfs.Tree:
        calls.append(sys)
        hung.wait(30)
        return real(sys, last)

    async with watching(tree, monkeypatch) as watched:
        before = await watched.next()
        monkeypatch.setattr(amd, "read", hanging)
        monkeypatch.setattr(amd, "_PATIENCE_S", 0.01)
        sight = await watched.next()
        assert ids(sight) == ids(before)
        assert all("the amdgpu driver hangs" in reason for reason in troubles(sight.gpus).values())
        assert len(troubles(sight.gpus)) == 2
        for _ in range(3):
            with pytest.raises(AbsentError):
                await watched.backend._read()
        assert len(calls) == 1
        monkeypatch.setattr(amd, "_PATIENCE_S", 10.0)
        hung.set()
        assert await watched.next() == before


async def test_a_driver_that_hangs_from_the_start_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, hung, real = vega(tmp_path), threading.Event(), sysfs.read
    monkeypatch.setattr(amd, "read", lambda sys, last: (hung.wait(30), real(sys, last))[1])
    monkeypatch.setattr(amd, "_PATIENCE_S", 0.01)
    async with watching(tree, monkeypatch) as watched:
        with capture_logs() as logs:
            first = asyncio.ensure_future(watched.next())
            await until(lambda: bool(logs), 10)
        assert not first.done(), "nobody could look"
        monkeypatch.setattr(amd, "_PATIENCE_S", 10.0)
        hung.set()
        await watched.backend.acquire(())
        assert len((await first).gpus) == 2


async def test_a_watch_that_is_closed_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = vega(tmp_path)
    async with watching(tree, monkeypatch) as watched:
        await watched.next()
    for thread in threading.enumerate():
        if thread.name == "amd-sysfs":
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive()


async def test_a_defect_in_a_look_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sys: Path, last: Topology) -> sysfs.Tree:
        raise ZeroDivisionError

    monkeypatch.setattr(amd, "read", broken)
    async with watching(vega(tmp_path), monkeypatch) as watched:
        with pytest.raises(ZeroDivisionError):
            await watched.next()


# What the metrics exporter says.


def _messages() -> Any:
    """The exporter's answer, as its own metricssvc.proto describes it: made by protobuf, read by us."""
    text, many = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    file = descriptor_pb2.FileDescriptorProto(name="metricssvc.proto", package="metricssvc", syntax="proto3")
    state = file.message_type.add(name="GPUState")
    for number, name in enumerate(("ID", "UUID", "Health", "AssociatedWorkload", "Device"), 1):
        state.field.add(name=name, number=number, type=text, label=many if number == 4 else 1)
    answer = file.message_type.add(name="GPUStateResponse")
    answer.field.add(name="GPUState", number=1, type=11, type_name=".metricssvc.GPUState", label=many)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("metricssvc.GPUStateResponse"))


Answer = _messages()


def answer(**health: str) -> bytes:
    states = [
        {"ID": "0", "UUID": "u", "Health": word, "AssociatedWorkload": ["a", "b"], "Device": device}
        for device, word in health.items()
    ]
    data: bytes = Answer(GPUState=states).SerializeToString()
    return data


@given(st.dictionaries(st.text(max_size=300), st.sampled_from(["healthy", "unhealthy", "unknown", ""]), max_size=20))
def test_an_answer_of_the_exporter_is_read(health: dict[str, str]) -> None:
    assert unhealthy(answer(**health)) == {device for device, word in health.items() if word == "unhealthy"}


@given(st.binary(max_size=200))
def test_no_answer_of_the_exporter_does_harm(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        unhealthy(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(answer(a="unhealthy")[:-1], "cut short by 1 bytes", id="cut short"),
        pytest.param(b"\x0a\x05\x1a\x09abc", "cut short by 6 bytes", id="cut short inside"),
        pytest.param(b"\x0a" + b"\xff" * 10, "a number without an end", id="a length of more than 64 bits"),
        pytest.param(b"\x0a", "a number without an end", id="no length"),
        pytest.param(b"\x0b", "the unknown type 3", id="a group"),
    ],
)
def test_what_is_no_answer_of_the_exporter(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        unhealthy(data)


@pytest.mark.parametrize("field", [b"\x30\x96\x01", b"\x31" + b"\x00" * 8, b"\x35" + b"\x00" * 4, b"\x32\x01?"])
def test_fields_of_a_release_to_come_are_stepped_over(field: bytes) -> None:
    assert unhealthy(field + answer(a="unhealthy") + field) == {"a"}


@contextlib.asynccontextmanager
async def exporter_at(socket: Path, say: Callable[[], bytes]) -> AsyncGenerator[None]:
    async def serve(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        assert request == b""
        return say()

    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"List": grpc.unary_unary_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("metricssvc.MetricsService", methods)])
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)
        await asyncio.to_thread(socket.unlink, missing_ok=True)


@pytest.fixture
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("x")
    yield folder / "exporter.socket"
    shutil.rmtree(folder)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_gpu_is_ill_while_the_exporter_calls_it_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket: Path
) -> None:
    clock, health = Clock(), {FIRST: "healthy", SECOND: "unknown"}
    tree = spx(tmp_path)
    async with (
        exporter_at(socket, lambda: answer(**health)),
        watching(tree, monkeypatch, Exporter(socket, clock)) as watched,
    ):
        assert not troubles((await watched.next()).gpus)
        health[FIRST] = "unhealthy"
        clock.now += 30
        sight = await watched.next()
        assert troubles(sight.gpus) == {FIRST: "AMD's metrics exporter calls it unhealthy"}
        health[FIRST] = "healthy"
        clock.now += 30
        assert not troubles((await watched.next()).gpus)
        shutil.rmtree(tree.pci(tree.boards[0]) / "drm")
        health[FIRST] = "unhealthy"
        clock.now += 30
        assert "no render node" in troubles((await watched.next()).gpus)[FIRST]  # What is seen here says more.


async def test_the_exporter_is_asked_every_30_seconds(socket: Path) -> None:
    clock, asked = Clock(), Counter[float]()

    def say() -> bytes:
        asked[clock.now] += 1
        return b""

    async with exporter_at(socket, say):
        exporter = Exporter(socket, clock)
        for _ in range(61):
            await exporter.unhealthy()
            clock.now += 1
    assert list(asked) == [1000.0, 1030.0, 1060.0]


async def test_an_answer_of_the_exporter_holds_up_no_call(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_in = list[int]()

    def read(_: bytes) -> frozenset[str]:
        read_in.append(threading.get_ident())
        return frozenset()

    monkeypatch.setattr("devices.gpu.amd.exporter.unhealthy", read)
    async with exporter_at(socket, bytes):
        await Exporter(socket, Clock()).unhealthy()
    assert read_in
    assert threading.get_ident() not in read_in


async def test_the_last_word_of_an_exporter_that_is_away_counts_for_five_minutes(socket: Path) -> None:
    clock = Clock()
    exporter = Exporter(socket, clock)
    with capture_logs() as logs:
        assert await exporter.unhealthy() == set()
        clock.now += 30
        async with exporter_at(socket, lambda: answer(a="unhealthy")):
            assert await exporter.unhealthy() == {"a"}
        said = []
        for _ in range(11):
            clock.now += 30
            said.append(await exporter.unhealthy())
        assert said == [{"a"}] * 9 + [set()] * 2
        async with exporter_at(socket, lambda: answer(b="unhealthy")):
            clock.now += 30
            assert await exporter.unhealthy() == {"b"}
    assert [log["event"] for log in logs] == ["metrics exporter silent", "metrics exporter answers again"]


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        pytest.param(lambda: b"\x0b", "the unknown type 3", id="nonsense"),
        pytest.param(lambda: b"\x0a\x00" * (1 << 20), "RESOURCE_EXHAUSTED", id="too much"),
        pytest.param(lambda: b"\x0a" + 1 // 0 * b"", "UNKNOWN", id="an error"),
    ],
)
async def test_an_exporter_that_answers_badly_is_silent(socket: Path, say: Callable[[], bytes], reason: str) -> None:
    clock, words = Clock(), [answer(a="unhealthy")]
    async with exporter_at(socket, lambda: words.pop() if words else say()):
        exporter = Exporter(socket, clock)
        await exporter.unhealthy()
        with capture_logs() as logs:
            for _ in range(2):
                clock.now += 30
                assert await exporter.unhealthy() == {"a"}
    assert [log["reason"] for log in logs if log["event"] == "metrics exporter silent" and reason in log["reason"]]
    assert len(logs) == 1


async def test_a_socket_where_nobody_listens(socket: Path) -> None:
    async with exporter_at(socket, bytes):
        os.link(socket, socket.with_name("left"))
    with capture_logs() as logs:
        assert await Exporter(socket.with_name("left"), Clock()).unhealthy() == set()
    assert [log["reason"].split(":")[0] for log in logs] == ["UNAVAILABLE"]
