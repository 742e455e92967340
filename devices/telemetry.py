"""How busy, full and hot GPUs are, as plain values: for metrics, and for nothing that decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct


class Reading(Struct, frozen=True):
    """The gauges of a GPU or a partition at one moment; None where the driver doesn't tell.

    ``uuid`` is its device ID, ``index`` its place on the node in the vendor's words, ``minor`` the number of its device node,
    ``profile`` a partition's kind. ``busy`` is in percent, ``used`` and ``free`` memory in MiB, ``celsius`` the GPU's
    temperature, ``watts`` what it draws.
    """

    uuid: str
    index: str
    minor: int
    pci: str = ""
    product: str = ""
    profile: str = ""
    busy: float | None = None
    used: float | None = None
    free: float | None = None
    celsius: float | None = None
    watts: float | None = None


@runtime_checkable
class Measured(Protocol):
    """A backend, or a source of devices, that can be asked for gauges."""

    def readings(self) -> Sequence[Reading]:
        """Read the gauges of all GPUs that may be touched now. Blocks, for as long as a driver likes: belongs in a thread.

        What can't be read is left out; nothing is raised for that.
        """
