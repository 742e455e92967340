"""Read AMD's GPUs from sysfs, as plain values. Sizes are bounded, and a tree that changes during a read is read again."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from devices.files import read_plain
from devices.gpu.model import GPU
from devices.source import Reading

_MAX_TEXT_BYTES: Final = 4096
"""Most bytes of a file: the kernel gives at most a page."""
MAX_ENTRIES: Final = 1024
"""Most entries of a folder: 64 partitions have 65 nodes with 64 links each."""
_MAX_TRIES: Final = 3
_PCI: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


# amdgpu_xcp_30 with AMD's own kernel module, amdgpu_xcp.30 with Linux's (ROCm/k8s-device-plugin#157).
_PARTITION: Final = re.compile(r"amdgpu_xcp[._][0-9]{1,4}")
_CARD: Final = re.compile(r"card([0-9]{1,5})")
_RENDER: Final = re.compile(r"renderD([0-9]{1,5})")
_NUMBER: Final = re.compile(r"[0-9]{1,5}")
_GAUGE: Final = re.compile(r"[0-9]{1,20}")
_MONITOR: Final = re.compile(r"hwmon[0-9]{1,5}")
COMPUTE, MEMORY = "current_compute_partition", "current_memory_partition"
"""The files with a GPU's partition modes."""
_MODES: Final = {COMPUTE: (re.compile(r"[a-z]px"), "SPX"), MEMORY: (re.compile(r"nps[0-9]{1,2}"), "NPS1")}
"""The form of the modes (amdgpu_xcp.c, amdgpu_gmc.c), and an example. A driver that can't read a mode writes "UNKNOWN"."""
_VENDOR, _CLASSES = "0x1002", ("0x03", "0x12")
"""AMD's PCI vendor ID; PCI classes of display controllers and processing accelerators."""
_DEVICE: Final = re.compile(r"0x[0-9a-f]{4}")
_PROPERTY: Final = re.compile(r"^([a-z0-9_]{1,40}) ([0-9]{1,20})$", re.MULTILINE)
_MOST_LANES: Final = 64


PCIE, XGMI = 2, 11
"""Types of KFD's links (CRAT_IOLINK_TYPE_PCIEXPRESS, CRAT_IOLINK_TYPE_XGMI in kfd_crat.h)."""


class AbsentError(Exception):
    """AMD's GPUs can't be seen now. The message says why."""


class DriverEntry(Struct, frozen=True):
    """A GPU (``id`` is its PCI address) or a partition (its platform device), as the driver lists it.

    ``card`` and ``render`` are the numbers of its device nodes, None if it has none. ``compute`` and ``memory`` are the
    partition modes of a GPU (``cpx``, ``nps4``), '' if it has no such file. ``device`` is its PCI device ID (``0x740f``).
    ``problem`` says what could not be read.
    """

    id: str
    card: int | None = None
    render: int | None = None
    compute: str = ""
    memory: str = ""
    numa_node: int | None = None
    product: str = ""
    problem: str = ""
    device: str = ""


class KfdLink(NamedTuple):
    """A link of KFD's topology: to which node, of which type, over how many lanes."""

    to: int
    kind: int
    lanes: int


class KfdNode(Struct, frozen=True):
    """A node of KFD's topology that computes. ``location`` is bus << 8 | device << 3 | function (or partition number).

    ``simds`` is the number of its SIMD units, ``per_cu`` the number for one compute unit, ``memory`` is in bytes; 0: unknown.
    """

    number: int
    render: int
    domain: int
    location: int
    wires: tuple[KfdLink, ...] = ()
    simds: int = 0
    per_cu: int = 0
    memory: int = 0


class Topology(Struct, frozen=True):
    """KFD's nodes, and a ``key`` that changes with them. ``problem`` is why some could not be read.

    ``unbound`` are the PCI addresses of AMD's GPUs without a driver.
    """

    key: tuple[object, ...] = ()
    nodes: tuple[KfdNode, ...] = ()
    problem: str = ""
    unbound: tuple[str, ...] = ()


class Tree(Struct, frozen=True):
    """What was read from sysfs."""

    whole: tuple[DriverEntry, ...] = ()
    partitions: tuple[DriverEntry, ...] = ()
    topology: Topology = Topology()
    driver: str = ""


def read(sys: Path, last: Topology) -> Tree:
    """Read the tree below ``sys``. It takes some milliseconds, less if KFD's topology is still ``last``.

    Raises:
        AbsentError: the driver or KFD isn't there, or their folders can't be read.
    """
    try:
        root = sys.resolve(strict=True)
        kfd = _folder(root, root / "class/kfd/kfd/topology")
        drivers = _folder(root, root / "module/amdgpu/drivers/pci:amdgpu")
    except (OSError, ValueError) as error:
        raise AbsentError(f"the amdgpu driver with KFD is not loaded: {error}") from None
    tree = Tree()
    for _ in range(_MAX_TRIES):  # Until nothing changed while it was read.
        tree = _read(root, kfd, drivers, last)
        if tree.topology.key == _key(kfd, tree.whole):
            break
    return tree


def _read(root: Path, kfd: Path, drivers: Path, last: Topology) -> Tree:
    platform = root / "devices/platform"
    try:
        names = _listed(drivers, _PCI), _listed(platform, _PARTITION)
    except OSError as error:
        raise AbsentError(f"Cannot list AMD's GPUs: {error}. Is /sys mounted in the container?") from None
    whole = tuple(_entry(root, drivers / name) for name in names[0])
    partitions = tuple(_entry(root, platform / name) for name in names[1])
    key = _key(kfd, whole)
    known = key and key == last.key and not last.problem
    renders = {entry.render for entry in whole}
    topology = last if known else Topology(key, *_nodes(kfd / "nodes", renders), _unbound(root, names[0]))
    driver, _ = _optional(root / "module/amdgpu/version")
    return Tree(whole, partitions, topology, driver)


def _entry(root: Path, path: Path) -> DriverEntry:
    try:
        folder = _folder(root, path)
    except (OSError, ValueError) as error:
        return DriverEntry(path.name, problem=str(error))
    (compute, why_compute), (memory, why_memory) = (_mode(folder / name) for name in (COMPUTE, MEMORY))
    numa, why_numa = _optional(folder / "numa_node")
    product, _ = _optional(folder / "product_name")
    device, _ = _optional(folder / "device")
    names = _names(folder / "drm")
    return DriverEntry(
        id=path.name,
        card=_least(_CARD, names),
        render=_least(_RENDER, names),
        compute=compute,
        memory=memory,
        numa_node=int(numa) if _NUMBER.fullmatch(numa) else None,  # -1: none.
        product="".join(filter(str.isprintable, product))[:64],
        problem="; ".join(filter(None, (why_compute, why_memory, why_numa and f"numa_node: {why_numa}")))[:400],
        device=device if _DEVICE.fullmatch(device) else "",
    )


def _unbound(root: Path, bound: Collection[str]) -> tuple[str, ...]:
    """Return the PCI addresses of AMD's GPUs that are not ``bound`` to amdgpu, nor to another driver (VFIO)."""
    folder = root / "bus/pci/devices"
    found = []
    for name in _names(folder, _PCI):
        vendor, kind = (_optional(folder / name / file)[0] for file in ("vendor", "class"))
        if name not in bound and vendor == _VENDOR and kind.startswith(_CLASSES):
            driver = Path(os.path.realpath(folder / name / "driver")).name  # "driver": none.
            if driver in {"driver", "amdgpu"}:
                found.append(name)
    return tuple(found)


def _mode(path: Path) -> tuple[str, str]:
    """Return a partition mode in lower case and '', or '' and the problem. A GPU without partitions has no such file."""
    modes, example = _MODES[path.name]
    text, problem = _optional(path)
    if not problem and not modes.fullmatch(text.lower()) and (text or path.exists()):
        problem = f"unknown partition mode {text[:40]!r}. It should be one such as {example}"
    return ("", f"{path.name}: {problem}") if problem else (text.lower(), "")


def _key(kfd: Path, whole: Iterable[DriverEntry]) -> tuple[object, ...]:
    """Return a key that changes whenever KFD's topology does; empty if the kernel has no generation number.

    The number starts again when the driver is loaded, so the key also has the inode.
    """
    generation, _ = _optional(kfd / "generation_id")
    try:
        inode = (kfd / "nodes").stat().st_ino
    except OSError:
        return ()
    return (generation, inode, *(entry.render for entry in whole)) if generation else ()


def _nodes(folder: Path, renders: Collection[int | None]) -> tuple[tuple[KfdNode, ...], str]:
    """Return the nodes that compute, and why some can't be read. Nodes with one of these render minors have their links."""
    nodes: list[KfdNode] = []
    names = _names(folder, _NUMBER)
    problem = "" if names else f"{folder} has no nodes"
    for name in names:
        try:
            has = _properties(folder / name / "properties")
        except (OSError, ValueError) as error:
            if isinstance(error, PermissionError):  # From the device cgroup (kfd_devcgroup_check_permission).
                problem = "this container may not use the GPUs, so KFD hides them. Run it privileged"
            problem = problem or str(error)
            continue
        if not (has.get("drm_render_minor") or has.get("cpu_cores_count")):
            problem = problem or f"{folder / name / 'properties'} describes neither a GPU nor a CPU"
        if render := has.get("drm_render_minor", 0):  # A CPU has none.
            wires = tuple(_wires(folder / name)) if render in renders else ()
            place = int(name), render, has.get("domain", 0), has.get("location_id", 0)
            counts = has.get("simd_count", 0), has.get("simd_per_cu", 0), _vram(folder / name)
            nodes.append(KfdNode(*place, wires, *counts))
    return tuple(nodes), problem


def _vram(node: Path) -> int:
    """Return the bytes of the first bank of memory, which is the GPU's own; 0 if unknown."""
    try:
        return _properties(node / "mem_banks/0/properties").get("size_in_bytes", 0)
    except (OSError, ValueError):
        return 0


def _wires(node: Path) -> Iterator[KfdLink]:
    for kind in ("io_links", "p2p_links"):
        for name in _names(node / kind, _NUMBER):
            with contextlib.suppress(OSError, ValueError):
                has = _properties(node / kind / name / "properties")
                if has.get("type") in {PCIE, XGMI}:
                    one = has.get("min_bandwidth", 0)  # Of one lane (amdgpu_amdkfd_get_xgmi_bandwidth_mbytes).
                    lanes = has.get("max_bandwidth", 0) // one if one else 1
                    yield KfdLink(has.get("node_to", -1), has["type"], min(max(lanes, 1), _MOST_LANES))


def _properties(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in _PROPERTY.findall(_text(path))}


def _least(pattern: re.Pattern[str], names: Iterable[str]) -> int | None:
    return min((int(match[1]) for name in names if (match := pattern.fullmatch(name))), default=None)


def _names(folder: Path, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Return the names in a folder as ``_listed`` does; none if it can't be read."""
    try:
        return _listed(folder, pattern)
    except OSError:
        return []


def _listed(folder: Path, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Return the names in a folder that have this form, sorted, at most ``MAX_ENTRIES``.

    Raises:
        OSError: it can't be read.
    """
    with os.scandir(folder) as entries:
        names = (entry.name for entry in entries)
        fit = (name for name in names if pattern is None or pattern.fullmatch(name))
        return sorted(itertools.islice(fit, MAX_ENTRIES))


def _folder(root: Path, path: Path) -> Path:
    """Follow links to a folder, which must be in ``root``."""
    folder = Path(os.path.realpath(path, strict=True))
    if not folder.is_relative_to(root):
        raise ValueError(f"{path} leads out of {root}")
    return folder


def _optional(path: Path) -> tuple[str, str]:
    """Return the text of a file that not every GPU has ('' without a file), and why it can't be read."""
    try:
        return _text(path).strip(), ""
    except FileNotFoundError:
        return "", ""
    except OSError as error:
        return "", error.strerror or str(error)
    except ValueError as error:
        return "", str(error)


def _text(path: Path) -> str:
    """Read a small file.

    Raises:
        ValueError: it is not a plain file, or too large.
        OSError: it can't be read, or it is a link.
    """
    text = read_plain(path, _MAX_TEXT_BYTES, follow=False)
    if len(text) > _MAX_TEXT_BYTES:
        raise ValueError(f"{path} has more than {_MAX_TEXT_BYTES} bytes")
    return text.decode(errors="replace")


def gauges(sys: Path, gpus: Sequence[GPU]) -> tuple[Reading, ...]:
    """Read the gauges of these GPUs, as far as they have any. Partitions have none. It blocks.

    The files are those of the amdgpu driver (Linux, Documentation/gpu/amdgpu, "Thermal" and "Driver information").
    """
    return tuple(_reading(sys / "bus/pci/devices" / gpu.pci, gpu) for gpu in gpus if gpu.pci and not gpu.parent)


def _reading(folder: Path, gpu: GPU) -> Reading:
    used, total = (_gauge([folder / f"mem_info_vram_{name}"]) for name in ("used", "total"))
    monitors = [folder / "hwmon" / name for name in _names(folder / "hwmon", _MONITOR)]
    celsius = _gauge(monitor / "temp1_input" for monitor in monitors)
    # Older GPUs have the average, newer ones the input.
    watts = _gauge(monitor / name for monitor in monitors for name in ("power1_average", "power1_input"))
    return Reading(
        uuid=gpu.uuid,
        index=gpu.place or str(gpu.index),
        minor=gpu.minor,
        pci=gpu.pci,
        product=gpu.product,
        busy=_gauge([folder / "gpu_busy_percent"]),
        used=None if used is None else used / 2**20,
        free=None if used is None or total is None else max(total - used, 0) / 2**20,
        celsius=None if celsius is None else celsius / 1000,
        watts=None if watts is None else watts / 1_000_000,
    )


def _gauge(paths: Iterable[Path]) -> float | None:
    """Return the number in the first of these files that has one; None if none has."""
    texts = (_optional(path)[0] for path in paths)
    return next((float(text) for text in texts if _GAUGE.fullmatch(text)), None)
