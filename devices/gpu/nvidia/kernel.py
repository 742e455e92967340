"""Facts about NVIDIA's GPUs from the kernel: from sysfs, /proc and device nodes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from devices.gpu.nvidia.answers import NEEDED, UVM
from devices.policy import IMEX_CHANNEL

_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_UUID: Final = re.compile(r"GPU-[0-9a-f-]{36}")
_MINOR: Final = re.compile(r"(?<=\s)[0-9]{1,7}(?=\s*$)")
_NODE: Final = re.compile(r"/nvidia([0-9]{1,3})$")


class KernelFacts(Struct, frozen=True):
    """Facts from the kernel."""

    sys: Path
    proc: Path
    dev: Path
    without_uvm: bool = False
    """True if the container runtime keeps /dev/nvidia-uvm from this container, so that only its module shows that it exists."""
    root: Path = Path("/")
    """Where this process sees the driver's root."""

    def numa_node(self, pci: str) -> int | None:
        """Return the NUMA node of a PCI device; None if unknown."""
        text = read(self.sys / "bus/pci/devices" / pci / "numa_node", 64).strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None

    def control_nodes(self) -> tuple[str, ...]:
        """Return the existing device nodes that every GPU of NVIDIA needs."""
        return tuple(f"/dev/{name}" for name in _CONTROL if (self.dev / name).exists())

    def imex(self) -> bool:
        """Return True if IMEX channel 0 exists. In a container, new device nodes appear only below the driver's root."""
        return any((dev / IMEX_CHANNEL.removeprefix("/dev/")).exists() for dev in (self.root / "dev", self.dev))

    def load(self) -> int | None:
        """Return a number that differs for each load of the driver (the inode of its folder in sysfs); None if unknown."""
        try:
            return (self.sys / "module/nvidia").stat().st_ino
        except OSError:
            return None

    def plugged(self) -> frozenset[str]:
        """Return the GPUs that the driver has, by its folders in /proc."""
        try:
            return frozenset(entry.name for entry in (self.proc / "driver/nvidia/gpus").iterdir())
        except OSError:
            return frozenset()

    def opened(self) -> frozenset[int]:
        """Return the minors of the GPUs whose device nodes this process has open."""
        found = set()
        with contextlib.suppress(OSError):
            for link in (self.proc / "self/fd").iterdir():
                with contextlib.suppress(OSError):  # It has been closed since.
                    if node := _NODE.search(str(link.readlink())):
                        found.add(int(node[1]))
        return frozenset(found)

    def uuid(self, pci: str) -> str:
        """Return the UUID of the GPU at an address; '' if the driver never read it."""
        uuid = self._said(pci).get("GPU UUID", "")
        return uuid if _UUID.fullmatch(uuid) else ""

    def why_unusable(self, pci: str) -> str:
        """Return why NVML may lack a GPU that the driver has: its device node is missing, or can't be opened."""
        minor = self._said(pci).get("Device Minor", "")
        barred = self._barred(f"nvidia{minor}", f"-c {minor}") if minor.isdecimal() else ""
        return barred or "see the kernel's log (dmesg | grep -i nvrm)"

    def why_closed(self) -> str:
        """Return why NVML may not find the loaded driver; '' if the kernel shows no reason."""
        barred = "" if self.load() is None else self._barred("nvidiactl", "-c 0 -u")
        return f". The driver is loaded, but {barred}" if barred else ""

    def _barred(self, name: str, modprobe: str) -> str:
        """Return why this process can't open a device node; '' if it can."""
        node = self.dev / name
        if os.access(node, os.R_OK | os.W_OK):
            return ""
        if node.exists():
            return f"this process may not open /dev/{name}"
        return f"/dev/{name} is missing: create it (nvidia-modprobe {modprobe})"

    def missing(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the missing device nodes: of ``nodes``, and of those that every CUDA program needs."""
        gone = [path for path in {*NEEDED, *nodes} if not (self.dev / path.removeprefix("/dev/")).exists()]
        if self.without_uvm and "nvidia-uvm" in read(self.proc / "devices", 1 << 16):
            gone = [path for path in gone if path != UVM]
        return tuple(sorted(gone))

    def _said(self, pci: str) -> dict[str, str]:
        """Return what the driver reports of a GPU: names and values."""
        text = read(self.proc / "driver/nvidia/gpus" / pci / "information", 4096)
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}

    def excluded(self, plugged: Iterable[str]) -> frozenset[str]:
        """Return the GPUs that the driver's parameter NVreg_ExcludedGpus leaves out; NVML doesn't list them."""
        return frozenset(pci for pci in plugged if self._said(pci).get("GPU Excluded") == "Yes")

    def capabilities(self) -> Mapping[str, int]:
        """Return the minors of MIG's capability nodes, by ``gpu0/gi1/access`` and ``gpu0/gi1/ci0/access`` (MIG user guide)."""
        lines = read(self.proc / "driver/nvidia-caps/mig-minors", 1 << 20).splitlines()
        return {line.partition(" ")[0]: int(minor[0]) for line in lines if (minor := _MINOR.search(line))}

    def capability(self, path: str) -> int | None:
        """Return the minor of one capability node, for drivers without the table of ``capabilities``; ``path`` is as there."""
        gpu, _, rest = path.partition("/")
        lines = read(self.proc / "driver/nvidia/capabilities" / gpu / "mig" / rest, 4096).splitlines()
        minors = [_MINOR.search(line) for line in lines if line.startswith("DeviceFileMinor:")]
        return int(minors[0][0]) if minors and minors[0] else None


def read(path: Path, most: int) -> str:
    """Read a small file; '' if it doesn't exist or isn't text."""
    try:
        with path.open("rb") as file:
            return file.read(most).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
