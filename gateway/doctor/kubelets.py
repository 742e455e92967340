"""Checks of the kubelet: its folder, its socket, its records and its version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.doctor.snapshot import Surveyed, joined

_KUBELET: Final = "kubelet.sock"
_REGISTRAR: Final = "-reg.sock"
_OTHERS: Final = ("nvidia", "amd.com_gpu", "amd_gpu", "nvidiaGPU", "gpu.sock")
"""Prefixes of the sockets of other GPU plugins: NVIDIA's, AMD's, Google's, and those made after an example."""
_ROOT: Final = "/var/lib/kubelet"
_ON_BY_DEFAULT: Final = 10
"""The minor version from which device plugins are on by default."""
_POD_RESOURCES: Final = 13


def _missing(seen: Surveyed) -> str:
    folder = seen.socket_dir
    return f"there is no folder {folder.path}" if folder.state == "missing" else ""


def _stale(seen: Surveyed) -> str:
    folder = seen.socket_dir
    return f"{folder.path} has been deleted: no name leads to it" if folder.state == "stale" else ""


def silent(seen: Surveyed) -> str:
    """Return that no process listens on the folder's kubelet.sock; '' if one does, or another check says why not."""
    folder = seen.socket_dir
    if folder.state != "there" or _registry(seen) or _KUBELET in folder.listening:
        return ""
    there = "nobody listens on it" if _KUBELET in folder.names else "it isn't there"
    return f"{folder.path}/{_KUBELET}: {there}"


def _elsewhere(seen: Surveyed) -> str:
    for kubelet in seen.kubelets:
        root = _flag(kubelet.arguments, "root-dir")
        if root and root.rstrip("/") != _ROOT and not seen.pod_resources:
            return f"process {kubelet.pid} runs with --root-dir={root}"
    return ""


def _registry(seen: Surveyed) -> str:
    folder = seen.socket_dir
    foreign = sorted(name for name in folder.names if name.endswith(_REGISTRAR))
    return f"{folder.path} has {foreign[0]} and no {_KUBELET}" if foreign and _KUBELET not in folder.names else ""


def _other(seen: Surveyed) -> str:
    others = sorted(name for name in seen.socket_dir.listening if name.startswith(_OTHERS))
    return f"somebody listens on {', '.join(others)} in {seen.socket_dir.path}" if others else ""


def _pod_resources(seen: Surveyed) -> str:
    if seen.pod_resources is not False or _elsewhere(seen) or seen.sockets is None or silent(seen):
        return ""
    return (
        ""
        if seen.release and 0 < seen.release.minor < _POD_RESOURCES
        else "nobody listens on the socket in pod-resources"
    )


def _unreadable(seen: Surveyed) -> str:
    return seen.checkpoint.complaint if seen.checkpoint else ""


def _next(seen: Surveyed) -> str:
    return seen.release.unkept if seen.release else ""


def _bugs(seen: Surveyed) -> str:
    return "; ".join(seen.release.fixed) if seen.release else ""


def _unknown(seen: Surveyed) -> str:
    return seen.release.unknown if seen.release else ""


def _switched_off(seen: Surveyed) -> str:
    if not seen.release or not 0 < seen.release.minor < _ON_BY_DEFAULT:
        return ""
    for kubelet in seen.kubelets:
        if "DevicePlugins=true" not in _flag(kubelet.arguments, "feature-gates"):
            return f"kubelet 1.{seen.release.minor}, process {kubelet.pid}, has no --feature-gates=DevicePlugins=true"
    return ""


def _numa(seen: Surveyed) -> str:
    if seen.numa_nodes is None or not seen.gpus:
        return ""  # Simulated GPUs are on no NUMA node of this kernel.
    known = seen.numa_nodes
    return joined(
        f"{device.id} is on NUMA node {', '.join(map(str, sorted(unknown)))}; the kernel has {', '.join(map(str, sorted(known)))}"
        for status in seen.statuses
        for one in status.resources
        for device in one.devices
        if (unknown := set(device.numa) - known)
    )


def _flag(arguments: tuple[str, ...], name: str) -> str:
    for number, argument in enumerate(arguments):
        found, equals, value = argument.lstrip("-").partition("=")
        if found == name and argument.startswith("-"):
            return value if equals else next(iter(arguments[number + 1 :]), "")
    return ""


CHECKS: Final[Mapping[str, Callable[[Surveyed], str]]] = {
    "DPG0101": _missing,
    "DPG0102": _stale,
    "DPG0103": silent,
    "DPG0104": _elsewhere,
    "DPG0105": _registry,
    "DPG0106": _other,
    "DPG0107": _pod_resources,
    "DPG0108": _unreadable,
    "DPG0109": _next,
    "DPG0110": _bugs,
    "DPG0111": _unknown,
    "DPG0112": _switched_off,
    "DPG0113": _numa,
}
