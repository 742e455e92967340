"""What the kernel tells of NVIDIA's GPUs besides NVML: in sysfs, in /proc and by device nodes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_NODE: Final = re.compile(r"/nvidia([0-9]{1,3})$")


class KernelFacts(Struct, frozen=True):
    """What the kernel tells besides NVML."""

    sys: Path
    proc: Path
    dev: Path

    def numa_node(self, pci: str) -> int | None:
        """The NUMA node that a PCI device is near; None where the kernel knows none."""
        text = read(self.sys / "bus/pci/devices" / pci / "numa_node", 64).strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None

    def control_nodes(self) -> tuple[str, ...]:
        """The device nodes that every GPU of NVIDIA needs, as far as they are there."""
        return tuple(f"/dev/{name}" for name in _CONTROL if (self.dev / name).exists())

    def load(self) -> int | None:
        """What is another with each load of the driver: sysfs makes its folder anew; None where it can't be told."""
        try:
            return (self.sys / "module/nvidia").stat().st_ino
        except OSError:
            return None

    def plugged(self) -> frozenset[str]:
        """The GPUs that the driver has, as its folders in /proc."""
        try:
            return frozenset(entry.name for entry in (self.proc / "driver/nvidia/gpus").iterdir())
        except OSError:
            return frozenset()

    def opened(self) -> frozenset[int]:
        """The minors of the GPUs whose device nodes this process has open."""
        found = set()
        with contextlib.suppress(OSError):
            for link in (self.proc / "self/fd").iterdir():
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    if node := _NODE.search(str(link.readlink())):
                        found.add(int(node[1]))
        return frozenset(found)

    def excluded(self, plugged: Iterable[str]) -> frozenset[str]:
        """Those that the driver was told to leave out (its parameter NVreg_ExcludedGpus): NVML never has them."""
        folder = self.proc / "driver/nvidia/gpus"
        said = {pci: read(folder / pci / "information", 4096).replace("\t", "").replace(" ", "") for pci in plugged}
        return frozenset(pci for pci, text in said.items() if "GPUExcluded:Yes" in text)

    def capabilities(self) -> Mapping[str, int]:
        """The minors of MIG's capability nodes, by ``gpu0/gi1/access`` and ``gpu0/gi1/ci0/access`` (MIG user guide)."""
        found: dict[str, int] = {}
        for line in read(self.proc / "driver/nvidia-caps/mig-minors", 1 << 20).splitlines():
            path, _, minor = line.partition(" ")
            if minor.isascii() and minor.isdigit() and len(minor) < 8:
                found[path] = int(minor)
        return found

    def capability(self, path: str) -> int | None:
        """The same of one, where there is no such table; ``path`` is as there."""
        gpu, _, rest = path.partition("/")
        for line in read(self.proc / "driver/nvidia/capabilities" / gpu / "mig" / rest, 4096).splitlines():
            name, _, minor = line.partition(":")
            minor = minor.strip()
            if name == "DeviceFileMinor" and minor.isascii() and minor.isdigit() and len(minor) < 8:
                return int(minor)
        return None


def read(path: Path, most: int) -> str:
    """Read a small file; '' where there is none, or it isn't text."""
    try:
        with path.open("rb") as file:
            return file.read(most).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
