"""Read the gauges of NVIDIA's GPUs, next to the threads that watch them.

NVML is opened and closed for each reading. That costs little, because the watching thread holds it open. While that thread has
it closed (GPUs are released, the driver is being replaced), nothing is read. Several threads may call the library (NVML API
reference, "thread safe").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from devices.gpu.model import GPU
from devices.gpu.nvidia.nvml import Nvml, NvmlError
from devices.gpu.nvidia.watch import Guests
from devices.telemetry import Reading


def read(library: str, guests: Guests, gpus: Sequence[GPU]) -> tuple[Reading, ...]:
    """Read the gauges of these GPUs and MIG instances, as far as possible. Blocks."""
    with guests.let_in() as welcome:
        if not welcome:
            return ()
        nvml = Nvml(library)
        try:
            nvml.open()
            return tuple(_each(nvml, gpus))
        except NvmlError:
            return ()
        finally:
            nvml.close()


def _each(nvml: Nvml, gpus: Sequence[GPU]) -> Iterator[Reading]:
    for board in gpus:
        if board.parent:
            continue
        parts = [one for one in gpus if one.parent == board.uuid]
        with contextlib.suppress(NvmlError):
            yield from _board(nvml, board, parts)


def _board(nvml: Nvml, board: GPU, parts: Iterable[GPU]) -> Iterator[Reading]:
    if nvml.at_address(board.pci) != board.uuid:
        return  # Another GPU is at its index; the next look finds it.
    busy, used, free, celsius, watts = nvml.gauges(board.uuid)
    index = board.place or str(board.index)
    yield Reading(
        board.uuid, index, board.minor, board.pci, board.product, "", busy, used, free, celsius, watts
    )  # fmt: skip
    for part in parts:
        try:
            used, free = nvml.memory_of(board.uuid, int(part.place.rpartition(":")[2]), part.uuid)
        except (NvmlError, ValueError):
            continue
        yield Reading(
            part.uuid, part.place, board.minor, board.pci, board.product, part.profile, None, used, free, celsius, None
        )  # fmt: skip
