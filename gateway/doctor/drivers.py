"""Checks of the drivers: GPUs on the bus and their drivers, NVML, and device nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from devices.model import LibraryFault
from gateway.doctor.snapshot import NodeFacts, NvmlSeen, Pci, joined
from gateway.telling.status import GatewayStatus

_NVIDIA: Final = "0x10de"
_AMD: Final = "0x1002"
_SYS_ADMIN: Final = 1 << 21
_VIRTUAL: Final = "vfio-pci"
_STATES: Final[Mapping[str, Literal["missing", "mismatch", "silent"]]] = {
    LibraryFault.NO_LIBRARY: "missing",
    LibraryFault.MISMATCH: "mismatch",
    LibraryFault.SILENT: "silent",
}


def reported(statuses: Iterable[GatewayStatus]) -> NvmlSeen:
    """Return whether NVML works, as the gateways with NVIDIA's backend report it (``devices.gpu.nvidia``)."""
    seen = list(statuses)
    causes = [(one.cause, one.reason) for status in seen for one in status.hindrances]
    causes += [(one.cause, one.reason) for status in seen for resource in status.resources for one in resource.devices]
    for cause, reason in causes:
        if cause:
            return NvmlSeen(_STATES.get(cause, "failed"), reason)
    unseen = [
        f"GPU {one.index or '?'}{f' ({one.pci})' if one.pci else ''}: {one.reason}"
        for status in seen
        for one in status.unusable
        if one.cause and one.cause != LibraryFault.DENIED
    ]
    return NvmlSeen("well", missing_gpus=tuple(unseen))


def _nvidia_unloaded(seen: NodeFacts) -> str:
    if seen.kernel_modules is None or "nvidia" in seen.kernel_modules or _nouveau(seen):
        return ""
    return _listed("NVIDIA GPUs", _gpus(seen, _NVIDIA), "and the module nvidia isn't loaded")


def _library_missing(seen: NodeFacts) -> str:
    nvml = _nvml(seen)
    return nvml.message if nvml and nvml.state == "missing" and not _unwatchable(seen) else ""


def _mismatch(seen: NodeFacts) -> str:
    nvml = _nvml(seen)
    return nvml.message if nvml and nvml.state == "mismatch" else ""


def _unwatchable(seen: NodeFacts) -> str:
    denied = [one for status in seen.statuses for one in status.unusable if one.cause == LibraryFault.DENIED]
    if denied:
        return joined(f"{one.name}: {one.reason}" for one in denied)
    if not seen.monitors_mig:
        return ""
    for one in seen.processes:
        if one.capabilities is not None and not one.capabilities & _SYS_ADMIN:
            return f"NVIDIA_MIG_MONITOR_DEVICES is set, and process {one.pid} lacks CAP_SYS_ADMIN"
    return ""


def _failing(seen: NodeFacts) -> str:
    nvml = _nvml(seen)
    if nvml is None or nvml.state not in {"failed", "silent"} or _closed(seen):
        return ""
    return nvml.message


def _nodes_missing(seen: NodeFacts) -> str:
    missing = [one.path for one in seen.device_nodes or () if not one.exists]
    loaded = seen.kernel_modules is not None and "nvidia" in seen.kernel_modules
    return f"missing: {', '.join(missing)}" if missing and loaded and _gpus(seen, _NVIDIA) else ""


def _closed(seen: NodeFacts) -> str:
    refused = [one.path for one in seen.device_nodes or () if one.refused]
    return f"not permitted: {', '.join(refused)}" if refused else ""


def _lost(seen: NodeFacts) -> str:
    nvml = _nvml(seen)
    there = [one for one in _gpus(seen, _NVIDIA) if one.driver == "nvidia"]
    if nvml is None or nvml.state != "well":
        return ""
    left = [one.address for one in there if one.address not in nvml.usable_addresses]
    addresses = (
        left if len(left) == len(nvml.refused) else [""] * len(nvml.refused)
    )  # NVML counts in the order of the bus.
    found = [
        f"GPU {index}{f' ({address})' if address else ''}: {reason}"
        for (index, reason), address in zip(nvml.refused.items(), addresses, strict=True)
    ]
    found += nvml.missing_gpus
    if nvml.gpu_count is not None and nvml.gpu_count < len(there):
        found.append(f"{len(there)} on the bus, NVML has {nvml.gpu_count}")
    return joined(found)


def _nouveau(seen: NodeFacts) -> str:
    return _listed("nouveau has", [one for one in _gpus(seen, _NVIDIA) if one.driver == "nouveau"])


def _amd_unloaded(seen: NodeFacts) -> str:
    without = [one for one in _gpus(seen, _AMD) if not one.driver]
    if seen.kernel_modules is None or "amdgpu" in seen.kernel_modules:
        return ""
    return _listed("AMD GPUs", without, "and the module amdgpu isn't loaded")


def _hidden(seen: NodeFacts) -> str:
    taken = [one for one in _gpus(seen, _AMD) if one.driver == "amdgpu"]
    return _listed("amdgpu has", taken, "and KFD shows none") if seen.kfd_gpus == 0 else ""


def _virtual(seen: NodeFacts) -> str:
    return _listed("vfio-pci has", [one for one in seen.gpus or () if one.driver == _VIRTUAL])


def _wsl(seen: NodeFacts) -> str:
    return f"{seen.wsl} is there" if seen.wsl else ""


def _jetson(seen: NodeFacts) -> str:
    return f"{seen.jetson} is there" if seen.jetson else ""


def _no_fabric(seen: NodeFacts) -> str:
    if seen.fabric_manager is not False or not seen.nvswitches or not _gpus(seen, _NVIDIA):
        return ""
    return f"{seen.nvswitches} NVSwitches are on the bus, and no process nv-fabricmanager runs"


def _gpus(seen: NodeFacts, vendor: str) -> list[Pci]:
    return [one for one in seen.gpus or () if one.vendor == vendor and one.driver != _VIRTUAL]


def _nvml(seen: NodeFacts) -> NvmlSeen | None:
    """Return the state of NVML, if the node has NVIDIA GPUs and the module may be loaded."""
    loaded = seen.kernel_modules is None or "nvidia" in seen.kernel_modules
    return seen.nvml if loaded and _gpus(seen, _NVIDIA) else None


def _listed(what: str, gpus: Iterable[Pci], then: str = "") -> str:
    addresses = ", ".join(one.address for one in gpus)
    return f"{what} {addresses} {then}".strip() if addresses else ""


CHECKS: Final[Mapping[str, Callable[[NodeFacts], str]]] = {
    "DPG0301": _nvidia_unloaded,
    "DPG0302": _library_missing,
    "DPG0303": _mismatch,
    "DPG0304": _unwatchable,
    "DPG0305": _failing,
    "DPG0306": _nodes_missing,
    "DPG0307": _closed,
    "DPG0308": _lost,
    "DPG0309": _nouveau,
    "DPG0310": _amd_unloaded,
    "DPG0311": _hidden,
    "DPG0312": _virtual,
    "DPG0313": _wsl,
    "DPG0314": _jetson,
    "DPG0315": _no_fabric,
}
