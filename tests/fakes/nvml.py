"""The world of the fake NVML library (``nvml.c``), and the library itself, built when it is first asked for.

``World.here`` gives both to pynvml in the test's own process, ``World.env`` to a child process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_OID, UUID, uuid5

import pynvml
import pytest

SOURCE: Final = Path(__file__).with_name("nvml.c")
FLAGS: Final = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread")
GIB: Final = 1 << 30
NO_INSTANCE: Final = 0xFFFFFFFF
"""What an event says where it is no instance's."""
XID: Final = 0x8
"""nvmlEventTypeXidCriticalError."""
CRASHES: Final = -1
"""What ends the process (``nvml.c``), in the place of an error's number."""
PIX, PXB, PHB, NODE, SYS = 10, 20, 30, 40, 50
"""NVML_TOPOLOGY_SINGLE, _MULTIPLE, _HOSTBRIDGE, _NODE, _SYSTEM."""
TO_GPU, TO_SWITCH = 0, 2
"""NVML_NVLINK_DEVICE_TYPE_GPU, _SWITCH."""


def library() -> Path:
    """The built library, ``libnvidia-ml.so.1`` in a folder of its own for each content of ``nvml.c``.

    A folder that nobody asked for in a day is removed when another one is made.

    Raises:
        RuntimeError: there is no C compiler, or it refuses the source.
    """
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + " ".join(FLAGS).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "device-plugin-gateway"
    built = root / f"fake-nvml-{key}" / "libnvidia-ml.so.1"
    if built.exists():
        os.utime(built.parent)
        return built
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError(
            "the fake NVML library needs a C compiler, and neither cc nor gcc is here: apt install gcc libc6-dev"
        )
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        made = Path(folder) / built.name
        command = [compiler, *FLAGS, f"-Wl,-soname,{built.name}", "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise RuntimeError(f"{compiler} refuses {SOURCE}: {done.stderr}")
        built.parent.mkdir(exist_ok=True)
        made.rename(built)
    yesterday = time.time() - 24 * 3600
    for other in root.glob("fake-nvml-*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if other.stat().st_mtime < yesterday:
                shutil.rmtree(other)
    return built


@functools.cache
def functions() -> frozenset[str]:
    """The names by which ``World.fails`` knows the library's functions: as pynvml has them, without ``_v2``."""
    return frozenset(re.findall(r'"(nvml[A-Z]\w+)"', SOURCE.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of GPU instance: its number (``NVML_GPU_INSTANCE_PROFILE_…``), its ID as ``nvidia-smi mig -lgip`` shows it.

    ``engines`` counts copy engines, decoders, encoders, JPEG and OFA engines.
    """

    number: int
    id: int
    slices: int
    count: int
    processors: int
    memory_mb: int
    engines: tuple[int, int, int, int, int]


H100: Final[Mapping[str, Profile]] = {
    "1g.10gb": Profile(0, 19, 1, 7, 16, 9984, (1, 1, 0, 1, 0)),
    "2g.20gb": Profile(1, 14, 2, 3, 32, 20096, (2, 2, 0, 2, 0)),
    "3g.40gb": Profile(2, 9, 3, 2, 60, 40448, (3, 3, 0, 3, 0)),
    "4g.40gb": Profile(3, 5, 4, 1, 64, 40448, (4, 4, 0, 4, 0)),
    "7g.80gb": Profile(4, 0, 7, 1, 132, 81152, (8, 7, 0, 7, 1)),
    "1g.10gb+me": Profile(7, 20, 1, 1, 16, 9984, (1, 1, 0, 1, 1)),
    "1g.20gb": Profile(9, 15, 1, 4, 26, 20096, (1, 1, 0, 1, 0)),
}
"""The profiles of an H100 80GB, from the MIG user guide and ``nvidia-smi mig -lgip``."""
A100: Final[Mapping[str, Profile]] = {
    "1g.5gb": Profile(0, 19, 1, 7, 14, 4864, (1, 0, 0, 0, 0)),
    "2g.10gb": Profile(1, 14, 2, 3, 28, 9856, (2, 1, 0, 0, 0)),
    "3g.20gb": Profile(2, 9, 3, 2, 42, 19968, (3, 2, 0, 0, 0)),
    "4g.20gb": Profile(3, 5, 4, 1, 56, 19968, (4, 2, 0, 0, 0)),
    "7g.40gb": Profile(4, 0, 7, 1, 98, 40192, (7, 5, 0, 1, 1)),
    "1g.5gb+me": Profile(7, 20, 1, 1, 14, 4864, (1, 1, 0, 1, 1)),
    "1g.10gb": Profile(9, 15, 1, 4, 14, 9856, (1, 1, 0, 0, 0)),
}
"""The profiles of an A100 40GB, likewise."""


@dataclass(slots=True)
class Instance:
    """A MIG device. ``place`` is its index on its GPU; ``compute`` its slices where these are fewer than the GPU instance's.

    ``start`` is the first slice of memory that its GPU instance has, ``size`` how many it has.
    """

    uuid: str
    profile: str
    gpu_instance: int
    place: int
    compute_instance: int = 0
    compute: int = 0
    start: int = 0
    size: int = 1


@dataclass(slots=True)
class NVLink:
    pci: str
    type: int = TO_GPU
    active: bool = True


@dataclass(slots=True)
class GPU:
    """A GPU as NVML shows it. None means that the GPU doesn't support the question.

    ``rows`` are remapped rows: correctable, uncorrectable, pending (0, 1), failure (0, 1). ``recovery`` is
    ``NVML_GPU_RECOVERY_ACTION_…``, ``addressing`` ``NVML_DEVICE_ADDRESSING_MODE_…``, ``events`` a mask of the event types supported.
    ``fabric`` are state (``NVML_GPU_FABRIC_STATE_…``), status, clique and cluster. ``numa_node`` is for ``World.sysfs`` and
    ``World.ways``: NVML doesn't tell it.
    """

    uuid: str
    pci: str
    minor: int
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * GIB - 85 * (1 << 20)
    numa_node: int = 0
    profiles: Mapping[str, Profile] = field(default_factory=lambda: H100)
    mig: bool = False
    mig_pending: bool | None = None
    instances: list[Instance] = field(default_factory=list)
    links: dict[int, NVLink] = field(default_factory=dict)
    lost: bool = False
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    retired_pending: bool | None = None
    recovery: int | None = 0
    addressing: int | None = None
    events: int = 0x101F
    capability: tuple[int, int] = (9, 0)
    fabric: tuple[int, int, int, UUID] | None = None

    def lines(self, index: int) -> Iterable[str]:
        pending = self.mig if self.mig_pending is None else self.mig_pending
        yield (
            f"gpu {self.uuid} {self.pci} minor={self.minor} memory={self.memory}"
            f" mig={self.mig:d},{pending:d},{7 if self.profiles else 0} lost={self.lost:d}"
            f" rows={self.rows is not None:d}:{','.join(map(str, self.rows or (0, 0, 0, 0)))}"
            f" retired={_number(self.retired_pending)} recovery={_number(self.recovery)}"
            f" addressing={_number(self.addressing)} events={self.events:x}"
            f" name={self.name}"
        )
        yield f"capability {index} {self.capability[0]} {self.capability[1]}"
        if self.fabric is not None:
            yield f"fabric {index} {' '.join(map(str, self.fabric[:3]))} {self.fabric[3].hex}"
        for number, link in self.links.items():
            yield f"link {index} {number} {link.active:d} {link.type} {link.pci}"
        for name, p in self.profiles.items():
            counts = f"{p.slices} {p.count} {p.processors} {p.memory_mb} {','.join(map(str, p.engines))}"
            yield f"profile {index} {p.number} {p.id} {counts} {name}"
        for m in self.instances:
            profile = self.profiles[m.profile]
            slices = m.compute or profile.slices
            numbers = f"{m.gpu_instance} {m.compute_instance} {m.place} {profile.number} {slices} {m.start} {m.size}"
            yield f"mig {index} {numbers} {m.uuid}"


def _number(value: int | None) -> int:
    return -1 if value is None else int(value)


@dataclass(frozen=True, slots=True)
class _Rule:
    code: int
    hangs: float = 0


class Counts(ctypes.Structure):
    """What the library holds in this process, and how often it was called."""

    _fields_ = (
        ("references", ctypes.c_uint),
        ("event_sets", ctypes.c_uint),
        ("waits", ctypes.c_uint),
        ("calls", ctypes.c_ulonglong),
    )


def counts() -> Counts:
    """Look at what this process holds of the library. NVML's device handles are never closed: there is nothing to count."""
    found = Counts()
    ctypes.CDLL(str(library())).fake_nvml_counts(ctypes.byref(found))
    return found


@dataclass(slots=True)
class World:
    """Change it as you like, then ``write()``: the library sees it at its next call, and a wait for events at once.

    ``nodes`` is the folder of the device nodes that it opens: of a GPU with its first handle, of the first ``at_once`` with init.
    ``ways`` is the common ancestor (``PIX`` … ``SYS``) of two GPUs, by their indexes, the lower first; of others their NUMA
    nodes decide.
    """

    path: Path
    gpus: list[GPU] = field(default_factory=list)
    driver: str = "550.54.15"
    nodes: Path | None = None
    at_once: int = 1
    ways: dict[tuple[int, int], int] = field(default_factory=dict)
    rules: dict[tuple[str, int], _Rule] = field(default_factory=dict)

    def write(self) -> None:
        """Put the whole world in place at once."""
        lines = [f"driver {self.driver}", *([f"nodes {self.at_once} {self.nodes}"] if self.nodes else [])]
        for index, gpu in enumerate(self.gpus):
            lines += gpu.lines(index)
        for (i, one), (j, other) in combinations(enumerate(self.gpus), 2):
            way = self.ways.get((i, j), NODE if one.numa_node == other.numa_node else SYS)
            lines += [f"way {i} {way} {other.uuid}", f"way {j} {way} {one.uuid}"]
        for (function, gpu_index), rule in self.rules.items():
            lines.append(f"fails {function} {rule.code} {gpu_index} {int(rule.hangs * 1000)}")
        new = self.path.with_name(f".{self.path.name}.new")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(self.path)

    def event(
        self,
        gpu: int | str,
        xid: int = 0,
        *,
        type: int = XID,  # noqa: A002 (NVML's word)
        gpu_instance: int = NO_INSTANCE,
        compute_instance: int = NO_INSTANCE,
    ) -> None:
        """Let something happen to a GPU (index or UUID) now: no ``write()`` is needed. ``xid`` is the event's data."""
        uuid = gpu if isinstance(gpu, str) else self.gpus[gpu].uuid
        with Path(f"{self.path}.events").open("a", encoding="utf-8") as file:
            file.write(f"event {uuid} {type} {xid} {gpu_instance} {compute_instance}\n")

    def fails(self, function: str, code: int, gpu: int | None = None, *, hangs: float = 0) -> None:
        """Let a function (``nvmlDeviceGetUUID``) answer ``code``, for one GPU (its index) or all; 0 is no failure.

        With ``hangs`` it answers only after so many seconds, or when ``works()`` takes the rule back: a call that hangs.
        """
        if function not in functions():
            raise ValueError(
                f"expected a function of {SOURCE.name}, without _v2, got {function!r}: {sorted(functions())}"
            )
        self.rules[function, -1 if gpu is None else gpu] = _Rule(code, hangs)

    def crashes(self, function: str, gpu: int | None = None) -> None:
        """Let a function end the process that calls it, by SIGSEGV."""
        self.fails(function, CRASHES, gpu)

    def works(self, function: str, gpu: int | None = None) -> None:
        """Take back what ``fails`` said."""
        self.rules.pop((function, -1 if gpu is None else gpu), None)

    def mig(self, gpu: int, *profiles: str) -> list[Instance]:
        """Enable MIG on a GPU and put these instances on it instead of those it has: ``1g.10gb``, ``1c.2g.20gb``.

        GPU instances are numbered as the driver does: 7 and up for one slice, from 3 for two, from 1 for more; each compute
        instance that is smaller than its GPU instance shares one with its equals before it, as far as there is room.
        """
        board = self.gpus[gpu]
        board.mig = True
        board.instances = []
        free: dict[str, tuple[int, int, int]] = {}
        next_of = {1: 7, 2: 3}
        one = min(profile.memory_mb for profile in board.profiles.values())
        begin = start = size = 0
        for place, name in enumerate(profiles):
            smaller, _, rest = name.partition("c.")
            whole, compute = (rest, int(smaller)) if rest else (name, 0)
            slices = board.profiles[whole].slices
            instance, part, left = free.get(whole, (0, 0, 0))
            if not compute or left < compute:
                kind = min(slices, 3)
                instance = next_of.setdefault(kind, 1 if slices < 7 else 0)
                next_of[kind] += 1
                part, left = 0, slices
                size = round(board.profiles[whole].memory_mb / one)
                start = -(-begin // size) * size
                begin = start + size
            board.instances.append(
                Instance(_uuid("MIG-", board.uuid, name, place), whole, instance, place, part, compute, start, size)
            )
            if compute:
                free[whole] = (instance, part + 1, left - compute)
        return board.instances

    def no_mig(self, gpu: int) -> None:
        """Take all instances off a GPU, and MIG itself."""
        self.gpus[gpu].mig = False
        self.gpus[gpu].instances = []

    def sysfs(self, root: Path) -> None:
        """Write what the kernel tells of the GPUs: ``<root>/bus/pci/devices/0000:19:00.0/numa_node``."""
        for gpu in self.gpus:
            folder = root / "bus/pci/devices" / gpu.pci.lower()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "numa_node").write_text(f"{gpu.numa_node}\n", encoding="utf-8")

    def capabilities(self, proc: Path) -> None:
        """Write which capability nodes MIG instances have, as the driver's nvidia-caps does, into what stands for ``/proc``."""
        caps = proc / "driver/nvidia-caps"
        caps.mkdir(parents=True, exist_ok=True)
        lines = ["config 1", "monitor 2"]
        for board in self.gpus:
            for one in board.instances:
                instance = f"gpu{board.minor}/gi{one.gpu_instance}"
                first = 100 * board.minor + 10 * one.gpu_instance + 3
                lines += [
                    f"{instance}/access {first}",
                    f"{instance}/ci{one.compute_instance}/access {first + 1 + one.compute_instance}",
                ]
        (caps / "mig-minors").write_text("\n".join(lines) + "\n")

    def device_nodes(self, dev: Path) -> None:
        """Make the device nodes of all GPUs and MIG instances in what stands for ``/dev``; nodes that are there stay."""
        caps = dev / "nvidia-caps"
        caps.mkdir(exist_ok=True)
        for board in self.gpus:
            (dev / f"nvidia{board.minor}").touch()
            for one in board.instances:
                first = 100 * board.minor + 10 * one.gpu_instance + 3
                for number in (first, first + 1 + one.compute_instance):
                    (caps / f"nvidia-cap{number}").touch()

    def here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give this world to pynvml in this process, as long as the test runs."""
        monkeypatch.setenv("FAKE_NVML_WORLD", str(self.path))
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library())))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def env(self) -> dict[str, str]:
        """Environment variables with which a child process finds this world by ``dlopen("libnvidia-ml.so.1")``."""
        return {"FAKE_NVML_WORLD": str(self.path), "LD_LIBRARY_PATH": str(library().parent)}


def _uuid(prefix: str, *of: object) -> str:
    return prefix + str(uuid5(NAMESPACE_OID, " ".join(map(str, of))))


def gpu(index: int, *, numa_node: int = 0, **others: Any) -> GPU:
    """A GPU like others of its kind: UUID, PCI address and minor by its index."""
    pci = f"{index // 13:04x}:{0x19 + 0x11 * (index % 13):02x}:00.0"
    return GPU(_uuid("GPU-", index), pci, index, numa_node=numa_node, **others)


def dgx(path: Path, count: int = 8) -> World:
    """H100s on NVSwitches (18 links each), one half on either NUMA node: a DGX H100. It is written."""
    gpus = [gpu(i, numa_node=0 if i < (count + 1) // 2 else 1) for i in range(count)]
    for one in gpus:
        one.links = {n: NVLink(f"0000:{5 + n % 4:02x}:00.0", TO_SWITCH) for n in range(18)}
    world = World(path, gpus)
    world.write()
    return world


def a100s(path: Path, count: int = 4) -> World:
    """A100 40GB that are linked directly, four NVLinks between any two: a DGX Station A100. It is written."""
    gpus = [gpu(i, name="NVIDIA A100-SXM4-40GB", memory=40 * GIB, profiles=A100, recovery=None) for i in range(count)]
    for one in gpus:
        others = [other.pci for other in gpus if other is not one]
        one.links = {n: NVLink(others[n // 4]) for n in range(4 * len(others))}
    world = World(path, gpus)
    world.write()
    return world
