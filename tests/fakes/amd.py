"""Makes sysfs trees as the amdgpu driver and KFD show them, of shapes that AMD's device plugin was published with.

What a tree holds follows Linux: drivers/gpu/drm/amd/amdkfd/kfd_topology.c (nodes, properties, links), kfd_crat.h (link types
and weights), amdgpu_gfx.c (partition modes). Names and links of folders are as in a real ``/sys``. ``Sysfs.write`` makes the
tree anew with the next generation, as the kernel does; tests change single files in it by hand.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

CPUS = 2
"""KFD's first nodes are the sockets."""
PCIE, XGMI = 2, 11


class Board(Struct, frozen=True):
    """A GPU. Those of one ``hive`` (0: none) are linked by XGMI, over ``lanes`` links; all by PCIe."""

    pci: str
    numa: int = 0
    modes: tuple[str, str] | None = None
    parts: int = 1
    hive: int = 0
    lanes: int = 1
    product: str = ""
    in_kfd: bool = True
    unique: int = 0

    @property
    def location(self) -> int:
        _, bus, device = self.pci.split(":")
        number, _, function = device.partition(".")
        return int(bus, 16) << 8 | int(number, 16) << 3 | int(function)


@dataclass
class Sysfs:
    """A tree in ``root``. ``spare`` partitions have a platform device and no node in KFD."""

    root: Path
    boards: list[Board]
    partition_name: str = "amdgpu_xcp_{}"
    spare: int = 0
    generation: int = 0

    @property
    def kfd(self) -> Path:
        return self.root / "devices/virtual/kfd/kfd/topology"

    @property
    def driver(self) -> Path:
        return self.root / "bus/pci/drivers/amdgpu"

    def pci(self, board: Board) -> Path:
        return self.root / f"devices/pci{board.pci[:7]}" / board.pci

    def write(self) -> Sysfs:
        for name in ("devices", "bus", "module", "class"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        self.renew()
        _link(self.root / "class/kfd/kfd", self.kfd.parent)
        _file(self.root / "module/amdgpu/version", "6.8.5")
        self.driver.mkdir(parents=True)
        _link(self.root / "module/amdgpu/drivers/pci:amdgpu", self.driver)
        (self.root / "devices/platform/serial8250").mkdir(parents=True)
        for cpu in range(CPUS):
            _properties(self.kfd / "nodes" / str(cpu), {"cpu_cores_count": 64, "simd_count": 0, "drm_render_minor": 0})
        nodes: list[Board] = []
        card, partition = 1, 0
        for board in self.boards:
            self._device(board, card)
            for part in range(board.parts):
                if part:
                    name, partition = self.partition_name.format(partition), partition + 1
                    self._drm(self.root / "devices/platform" / name, card)
                if board.in_kfd:
                    self._node(CPUS + len(nodes), board, part, 127 + card)
                    nodes.append(board)
                card += 1
        for _ in range(self.spare):
            self._drm(self.root / "devices/platform" / self.partition_name.format(partition), card)
            card, partition = card + 1, partition + 1
        for number, board in enumerate(nodes):
            self._links(CPUS + number, board, nodes)
        return self

    def renew(self) -> None:
        """Tell that KFD's part of the tree has changed."""
        self.generation += 1
        _file(self.kfd / "generation_id", f"{self.generation}")

    def _device(self, board: Board, card: int) -> None:
        folder = self.pci(board)
        _file(folder / "vendor", "0x1002")
        _file(folder / "device", "0x74a1")
        _file(folder / "class", "0x120000")
        _link(folder / "driver", self.driver)
        _link(self.root / "bus/pci/devices" / board.pci, folder)
        _file(folder / "numa_node", f"{board.numa}")
        if board.modes is not None:
            _file(folder / "current_compute_partition", board.modes[0])
            _file(folder / "current_memory_partition", board.modes[1])
        if board.product:
            _file(folder / "product_name", board.product)
        self._drm(folder, card)
        _link(self.driver / board.pci, folder)

    def _drm(self, folder: Path, card: int) -> None:
        for name in (f"card{card}", f"renderD{127 + card}"):
            _file(folder / "drm" / name / "dev", "226:1")

    def _node(self, number: int, board: Board, part: int, render: int) -> None:
        has = {
            "cpu_cores_count": 0,
            "simd_count": 1216 // board.parts,
            "simd_per_cu": 4,
            "gfx_target_version": 90402,
            "vendor_id": 0x1002,
            "location_id": board.location + part,
            "domain": int(board.pci.split(":")[0], 16),
            "drm_render_minor": render,
            "hive_id": board.hive,
            "unique_id": (board.unique or board.location) + 2**63,
        }
        _properties(self.kfd / "nodes" / str(number), has)
        bank = {"heap_type": 1, "size_in_bytes": 192 * 2**30 // board.parts, "flags": 0, "width": 8192}
        _properties(self.kfd / "nodes" / str(number) / "mem_banks/0", bank)

    def _links(self, number: int, board: Board, nodes: list[Board]) -> None:
        """XGMI links stand among ``io_links``, those over PCIe among ``p2p_links``, as published."""
        folder = self.kfd / "nodes" / str(number)
        io_links, p2p_links = folder / "io_links", folder / "p2p_links"
        io_links.mkdir()
        _wire(f"{io_links}/0", number, max(board.numa, 0) % CPUS, PCIE, 20, 312, 32000)
        near = [CPUS + peer for peer, other in enumerate(nodes) if other is board and CPUS + peer != number]
        hive = [CPUS + peer for peer, other in enumerate(nodes) if other is not board and board.hive == other.hive != 0]
        far = [
            CPUS + peer for peer, other in enumerate(nodes) if other is not board and not board.hive == other.hive != 0
        ]
        for place, peer in enumerate(near, 1):
            _wire(f"{io_links}/{place}", number, peer, XGMI, 13, 819200, 819200)
        for place, peer in enumerate(hive, 1 + len(near)):
            _wire(f"{io_links}/{place}", number, peer, XGMI, 15, 50000, 50000 * board.lanes)
        if far:
            p2p_links.mkdir()
        for place, peer in enumerate(far):
            _wire(f"{p2p_links}/{place}", number, peer, PCIE, 72, 0, 0)


def mi210(root: Path) -> Sysfs:
    """Eight GPUs in two hives of four, each hive on a NUMA node of its own; numbered as in the published machine."""
    buses = (("63", "43", "03", "26"), ("e3", "c3", "83", "a3"))
    boards = [
        Board(f"0000:{bus}:00.0", numa, hive=numa + 1, product="AMD Instinct MI210")
        for numa, hive in enumerate(buses)
        for bus in hive
    ]
    return Sysfs(root, boards).write()


def mi300x(root: Path, modes: tuple[str, str] = ("CPX", "NPS4"), last: int = 7) -> Sysfs:
    """Eight GPUs in one hive, in eight partitions each; the last has ``last``, 63 together, as in the published machine."""
    buses = ("05", "27", "47", "65", "85", "a7", "c7", "e5")
    parts = {"CPX": 8, "DPX": 2}.get(modes[0], 1)
    boards = [
        Board(f"0000:{bus}:00.0", place // 4, modes, min(parts, last) if place == 7 else parts, hive=1)
        for place, bus in enumerate(buses)
    ]
    return Sysfs(root, boards, spare=64 - 8 * parts if parts < 8 else 0).write()


def mi308(root: Path) -> Sysfs:
    """Four GPUs in eight partitions each."""
    boards = [
        Board(f"0000:{bus}:00.0", place // 2, ("CPX", "NPS1"), 8, hive=1)
        for place, bus in enumerate(("0c", "22", "9f", "af"))
    ]
    return Sysfs(root, boards).write()


def vega(root: Path) -> Sysfs:
    """Two GPUs of a workstation: no hive, no partitions, no NUMA node."""
    return Sysfs(root, [Board("0000:19:00.0", -1), Board("0000:67:00.0", -1)]).write()


def _file(path: Path, text: str) -> None:
    if not os.path.isdir(path.parent):  # noqa: PTH112 - as in _wire
        path.parent.mkdir(parents=True)
    with open(path, "wb", buffering=0) as file:  # noqa: PTH123 - as in _wire
        file.write(f"{text}\n".encode())


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _properties(folder: Path, has: dict[str, int]) -> None:
    _file(folder / "properties", "\n".join(f"{name} {value}" for name, value in has.items()))


def _wire(folder: str, from_: int, to: int, kind: int, weight: int, least: int, most: int) -> None:
    """Tell of a link, which has a folder of its own: with plain system calls, since a tree has hundreds."""
    ends = f"type {kind}\nnode_from {from_}\nnode_to {to}\n"
    os.mkdir(folder)  # noqa: PTH102 - as above
    with open(f"{folder}/properties", "wb", buffering=0) as file:  # noqa: PTH123 - as above
        file.write(f"{ends}weight {weight}\nmin_bandwidth {least}\nmax_bandwidth {most}\n".encode())
