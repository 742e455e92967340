"""Construct the device sources. Each backend is imported only when it is chosen, because every import costs memory on every node."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from devices.gpu.asked import NodeTraits
    from devices.gpu.backend import Sight
    from devices.gpu.labels import FeatureFile
    from devices.policy import Policy
    from devices.source import DeviceSource
    from gateway.configuration.settings import Settings

_VENDORS: Final = {"0x10de": "nvidia", "0x1002": "amd"}
_DISPLAY: Final = ("0x03", "0x12")
"""PCI classes of GPUs: display controllers, and processing accelerators."""
_SYS: Final = Path("/sys")
_NVML: Final = "libnvidia-ml.so.1"


class NoBackendError(Exception):
    """No device source fits the settings. The message says what was looked for and what to do."""


def source(settings: Settings, sys: Path = _SYS) -> DeviceSource:
    """Construct the device source that ``settings`` ask for; ``sys`` is the path of sysfs.

    Raises:
        NoBackendError: no GPU was found. ``auto`` uses real hardware only, never a simulation.
        ValueError: the settings ask for no source, or the profile can't be used.
    """
    wanted = hardware(sys) if settings.backend == "auto" else [settings.backend] if settings.backend != "none" else []
    sources = [_MAKERS[name](settings) for name in wanted]
    # Also without a rule in the file: the file may be edited later.
    if settings.policy.globbed or (sources and settings.config_file is not None):
        from devices.generic import GenericSource

        sources.append(GenericSource(settings.policy))
    if settings.policy.bridge:
        from gateway.bridge.source import Bridge

        ours = tuple(sources)
        sources.append(
            Bridge(
                Path(settings.policy.bridge),
                settings.state_dir,
                settings.policy,
                taken=lambda name: any(one.claims(name) for one in ours),
            )
        )
    if not sources and settings.backend == "none":
        raise ValueError(
            "--backend none: there are no other devices. Add gateway.devices to the configuration file, or --bridge"
        )
    if not sources:
        raise NoBackendError(
            f"No GPU of NVIDIA or AMD is among the PCI devices below {sys}, and no configuration file describes devices. Run the "
            "gateway only on nodes with GPUs (a node selector). If the GPU comes later, set --backend nvidia or amd. "
            "--backend auto never simulates; to try it without hardware, set --backend simulated"
        )
    if len(sources) == 1:
        return sources[0]
    from devices.combined import Combined

    return Combined(sources)


def hardware(sys: Path) -> list[str]:
    """Return the names of the backends that have GPUs on this node, by the kernel's PCI devices, with or without a driver."""
    found: set[str] = set()
    for function in (sys / "bus" / "pci" / "devices").glob("*"):
        try:
            vendor, kind = ((function / name).read_text()[:16].strip() for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        if vendor in _VENDORS and kind.startswith(_DISPLAY):
            found.add(_VENDORS[vendor])
    return sorted(found, reverse=True)


def nvml(root: str) -> str:
    """Return the path of NVML in the driver's root, or its name for the loader if it isn't there.

    The folders are those of NVIDIA's plugin (``tryResolveLibrary``, cmd/nvidia-device-plugin of 0.17).
    """
    folders = ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
    also = ("lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
    there = (Path(root) / folder / _NVML for folder in (*folders, *also) if root not in {"", "/"})
    return next((str(path) for path in there if path.exists()), _NVML)


def set_time_slice(settings: Settings, *which: str) -> str:
    """Set the time slice of an NVIDIA GPU (``devices.gpu.nvidia.timeslice``)."""
    from devices.gpu.nvidia.timeslice import set_time_slice as set_one

    return set_one(settings.policy, nvml(settings.policy.container_driver_root), *which)


def _nvidia(settings: Settings) -> DeviceSource:
    from devices.gpu.nvidia.backend import NvidiaBackend
    from devices.gpu.nvidia.vendor import NVIDIA
    from devices.gpu.source import GPUSource

    policy = settings.policy
    # NVIDIA's container runtime gives /dev/nvidia-uvm only to containers with the capability "compute".
    given = set(os.environ.get("NVIDIA_DRIVER_CAPABILITIES", "all").split(","))
    nvidia = NvidiaBackend(
        policy,
        library=nvml(policy.container_driver_root),
        without_uvm=not given & {"all", "compute"},
    )
    return GPUSource(nvidia, policy, (NVIDIA,), _survey, tell=nvidia.judge_by, features=_features)


def _amd(settings: Settings) -> DeviceSource:
    from devices.gpu.amd.backend import AmdBackend
    from devices.gpu.amd.vendor import AMD
    from devices.gpu.source import GPUSource

    return GPUSource(AmdBackend(), settings.policy, (AMD,))


def _simulated(settings: Settings) -> DeviceSource:
    from devices.gpu.simulated.backend import VENDORS, SimulatedBackend
    from devices.gpu.source import GPUSource

    simulated = SimulatedBackend(settings.profile or "default")
    return GPUSource(simulated, settings.policy, VENDORS, partial(_survey, simulated=True), features=_features)


def _features() -> FeatureFile:
    from devices.gpu.labels import FeatureFile  # Paid only where an operator wants labels.
    from devices.gpu.nvidia.labels import labels

    return FeatureFile(labels)


def _survey(sight: Sight, policy: Policy, *, simulated: bool = False) -> NodeTraits:
    from devices.gpu.nvidia.cdi import DriverFiles  # Paid only where an operator chose CDI.
    from devices.gpu.nvidia.cdifiles import write_all

    return write_all(sight, policy, driver=DriverFiles(()) if simulated else None)


_MAKERS: Final[Mapping[str, Callable[[Settings], DeviceSource]]] = {
    "nvidia": _nvidia,
    "amd": _amd,
    "simulated": _simulated,
}
BACKENDS: Final = ("auto", *_MAKERS, "none")
"""The values of ``--backend``."""
