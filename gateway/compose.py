"""The one place that constructs backends, each imported only when it is chosen: every import is paid on every node."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices.source import DeviceSource
    from gateway.settings import Settings


class NoBackendError(Exception):
    """No device source fits the settings. The message says what was looked for and what to do."""


def source(settings: Settings) -> DeviceSource:
    """Construct the device source that ``settings`` ask for.

    Raises:
        NoBackendError: nothing was found (``auto`` takes real hardware only, never a simulation).
        ValueError: the profile is not usable; the message names file, line and what was expected.
    """
    if settings.backend == "simulated":
        from devices.gpu.simulated import SimulatedBackend
        from devices.gpu.source import GPUSource

        return GPUSource(SimulatedBackend(settings.profile or "default"), settings.policy)
    raise NoBackendError(
        "expected a backend for hardware of this node; this release has none for NVIDIA or AMD GPUs yet, and --backend "
        "auto never simulates. To try the gateway without hardware: --backend simulated"
    )
