"""Fake nodes whose labels are known: what NVIDIA's GPU Feature Discovery writes of each is in tests/golden/labels/NAME."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from tests.fakes import nvml

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "labels"
GRAPHICS, COMPUTE = "0x030000", "0x030200"
CLUSTER: Final = UUID("b1a8d9c4-0b1e-4f5a-9a55-2f6c1f0e7d43")
_COMPLETED: Final = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""


def _whole(path: Path) -> nvml.World:
    return nvml.dgx(path)


def _workstation(path: Path) -> nvml.World:
    gpu = nvml.gpu(0, name="NVIDIA RTX 6000 Ada Generation", memory=49140 << 20, profiles={}, capability=(8, 9))
    return nvml.World(path, [gpu], driver="550.54")


def _a100s(path: Path, *layouts: tuple[str, ...]) -> nvml.World:
    world = nvml.a100s(path, max(2, len(layouts)))
    for gpu in world.gpus:
        gpu.capability = (8, 0)
    for index, profiles in enumerate(layouts):
        if profiles != ("whole",):
            world.mig(index, *profiles)
    return world


def _two_products(path: Path) -> nvml.World:
    world = nvml.dgx(path, 3)
    world.gpus[1].name, world.gpus[1].memory, world.gpus[1].capability = "NVIDIA T4", 15360 << 20, (7, 5)
    world.gpus[1].profiles = {}
    return world


def _superchips(path: Path) -> nvml.World:
    world = nvml.dgx(path, 4)
    for gpu in world.gpus:
        gpu.name, gpu.capability, gpu.fabric = "NVIDIA GB200", (10, 0), (_COMPLETED, 0, 32766, CLUSTER)
    world.gpus[3].fabric = (2, 0, 0, CLUSTER)  # It has not joined yet.
    return world


def _guest(path: Path) -> nvml.World:
    return nvml.World(path, [nvml.gpu(0, name="GRID T4-16Q", memory=16 << 30, profiles={}, capability=(7, 5))])


def _sharing(name: str, replicas: int, *, rename: bool = False) -> Mapping[str, Any]:
    resources = [{"name": f"nvidia.com/{name}", "replicas": replicas}]
    return {"sharing": {"timeSlicing": {"renameByDefault": rename, "resources": resources}}}


@dataclass(frozen=True, kw_only=True)
class LabelledNode:
    """A node: its GPUs as NVML has them and as the kernel has, and the configuration file."""

    make: Callable[[Path], nvml.World]
    mig: str = "none"
    config: Mapping[str, Any] = field(default_factory=dict)
    kind: str = COMPUTE
    """The PCI class of its GPUs."""
    vgpu: bool = False
    """True for a virtual machine with a vGPU."""
    machine: str = "DGX H100 (rev. A/2)"
    by_chance: bool = False
    """True if GPU Feature Discovery writes one of several things."""

    def configuration(self) -> str:
        """Return the text of the configuration file."""
        return json.dumps({"version": "v1", "flags": {"migStrategy": self.mig}, **self.config})

    def kernel(self, world: nvml.World, sys: Path) -> None:
        """Write what the kernel shows in ``/sys``."""
        devices = sys / "bus/pci/devices"
        for address, vendor, kind in [
            ("0000:00:00.0", "0x8086", "0x060000"),
            *((gpu.pci.lower(), "0x10de", self.kind) for gpu in world.gpus),
        ]:
            folder = devices / address
            folder.mkdir(parents=True, exist_ok=True)
            files = {"vendor": vendor, "class": kind, "device": "0x2330", "resource": "0x0 0x0 0x0", "numa_node": "0"}
            for name, text in files.items():
                (folder / name).write_text(f"{text}\n", encoding="ascii")
            (folder / "config").write_bytes(_pci_configuration(vgpu=self.vgpu and vendor == "0x10de"))
        machine = sys / "class/dmi/id/product_name"
        machine.parent.mkdir(parents=True, exist_ok=True)
        machine.write_text(f"{self.machine}\n", encoding="utf-8")


def _pci_configuration(*, vgpu: bool) -> bytes:
    """Return 256 bytes; of a vGPU with a capability that has its host's driver in the second record."""
    config = bytearray(256)
    config[6], config[0x34] = 0x10, 0x60  # It has capabilities; the first one is power management.
    config[0x60:0x63] = bytes((1, 0x80, 8))
    if vgpu:
        record = bytes((0, 22)) + b"550.90.05".ljust(10, b"\0") + b"r550_00".ljust(10, b"\0")
        body = b"VF" + bytes((7, 4, 0, 0)) + record
        config[0x80 : 0x80 + 3 + len(body)] = bytes((9, 0, 3 + len(body))) + body
    else:
        config[0x80:0x83] = bytes((9, 0, 20))  # Another vendor-specific one.
    return bytes(config)


NODES: Final[Mapping[str, LabelledNode]] = {
    "whole": LabelledNode(make=_whole),
    "workstation": LabelledNode(make=_workstation, kind=GRAPHICS, machine="Precision 7960 Tower"),
    "no-gpu": LabelledNode(make=lambda path: nvml.World(path, [])),
    "two-products": LabelledNode(make=_two_products, by_chance=True),
    "mig-none": LabelledNode(make=lambda path: _a100s(path, ("1g.5gb", "2g.10gb"), ("7g.40gb",))),
    "mig-single": LabelledNode(make=lambda path: _a100s(path, ("3g.20gb", "3g.20gb"), ("3g.20gb",)), mig="single"),
    "mig-single-whole": LabelledNode(make=lambda path: _a100s(path, ("whole",), ("whole",)), mig="single"),
    "mig-single-two-profiles": LabelledNode(make=lambda path: _a100s(path, ("3g.20gb",), ("4g.20gb",)), mig="single"),
    "mig-single-empty": LabelledNode(make=lambda path: _a100s(path, ("3g.20gb",), ()), mig="single"),
    "mig-mixed": LabelledNode(
        make=lambda path: _a100s(
            path, ("1g.5gb", "1g.5gb", "1g.5gb+me", "3g.20gb"), ("1c.2g.10gb", "1c.2g.10gb", "4g.20gb"), ("whole",), ()
        ),
        mig="mixed",
    ),
    "shared": LabelledNode(make=_whole, config=_sharing("gpu", 4)),
    "shared-renamed": LabelledNode(make=_whole, config=_sharing("gpu", 10, rename=True)),
    "mig-single-shared": LabelledNode(
        make=lambda path: _a100s(path, ("7g.40gb",), ("7g.40gb",)), mig="single", config=_sharing("gpu", 2)
    ),
    "mig-mixed-shared": LabelledNode(
        make=lambda path: _a100s(path, ("1g.5gb", "1g.5gb"), ("whole",)),
        mig="mixed",
        config=_sharing("mig-1g.5gb", 3),
    ),
    "clique": LabelledNode(make=_superchips, machine="GB200 NVL"),
    "vgpu-guest": LabelledNode(make=_guest, kind=GRAPHICS, vgpu=True, machine="VMware7,1"),
}
