"""The gauges of AMD's GPUs, as the amdgpu driver shows them in sysfs (Linux, Documentation/gpu/amdgpu, "Thermal" and "Driver information").

A partition has no files of its own for these; its GPU's are told for the GPU alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from devices.files import NotPlainError, read_plain
from devices.gpu.model import GPU
from devices.telemetry import Reading

_DIGITS: Final = 20
_HWMONS: Final = 8
_MIB: Final = 2**20


def read(sys: Path, gpus: Sequence[GPU]) -> tuple[Reading, ...]:
    """Read the gauges of these GPUs, as far as there are files of them. Blocks."""
    return tuple(_reading(sys / "bus/pci/devices" / gpu.pci, gpu) for gpu in gpus if gpu.pci and not gpu.parent)


def _reading(folder: Path, gpu: GPU) -> Reading:
    used, whole = (_number(folder / f"mem_info_vram_{name}") for name in ("used", "total"))
    hwmons = list(_hwmons(folder / "hwmon"))
    celsius = next((found for one in hwmons if (found := _number(one / "temp1_input")) is not None), None)
    # Newer GPUs have the input, older ones the average.
    files = ("power1_average", "power1_input")
    watts = next((found for one in hwmons for name in files if (found := _number(one / name)) is not None), None)
    return Reading(
        gpu.uuid,
        gpu.place or str(gpu.index),
        gpu.minor,
        gpu.pci,
        gpu.product,
        "",
        _number(folder / "gpu_busy_percent"),
        None if used is None else used / _MIB,
        None if used is None or whole is None else max(whole - used, 0) / _MIB,
        None if celsius is None else celsius / 1000,
        None if watts is None else watts / 1_000_000,
    )


def _hwmons(folder: Path) -> Iterator[Path]:
    try:
        yield from islice(folder.glob("hwmon*"), _HWMONS)
    except OSError:
        return


def _number(path: Path) -> float | None:
    try:
        text = read_plain(path, _DIGITS).strip()
    except (OSError, NotPlainError):
        return None
    return float(text) if text.isdigit() and len(text) <= _DIGITS else None
