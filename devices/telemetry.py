"""Load, memory and temperature of GPUs, as plain values, for metrics only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct


class Reading(Struct, frozen=True):
    """The gauges of a GPU or a partition at one moment; None if the driver doesn't report them.

    ``uuid`` is its device ID, ``index`` the vendor's index on the node, ``minor`` the number of its device node, ``profile`` a
    partition's kind. ``busy`` is in percent, ``used`` and ``free`` memory in MiB, ``celsius`` the GPU's temperature, ``watts``
    its power draw.
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
    """A backend, or a source of devices, that has gauges."""

    def readings(self) -> Sequence[Reading]:
        """Read the gauges of all GPUs that may be used now. It blocks for as long as a driver takes: call it in a thread.

        What can't be read is left out, without an exception.
        """
