"""Checks of the kubelet: its folder, its socket, its records and its version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.doctor.snapshot import NodeFacts, joined

_KUBELET: Final = "kubelet.sock"
_PLUGIN_REGISTRY_SUFFIX: Final = "-reg.sock"
_OTHER_PLUGINS: Final = ("nvidia", "amd.com_gpu", "amd_gpu", "nvidiaGPU", "gpu.sock")
"""Prefixes of the sockets of other GPU plugins: NVIDIA's, AMD's, Google's, and copies of an example plugin."""
_DEFAULT_ROOT_DIR: Final = "/var/lib/kubelet"
_DEVICE_PLUGINS_SINCE: Final = 10
"""The first minor version in which device plugins are on by default."""
_POD_RESOURCES_SINCE: Final = 13


def _folder_is_missing(seen: NodeFacts) -> str:
    folder = seen.socket_dir
    return f"there is no folder {folder.path}" if folder.state == "missing" else ""


def _folder_was_replaced(seen: NodeFacts) -> str:
    folder = seen.socket_dir
    return f"{folder.path} has been deleted: no name leads to it" if folder.state == "stale" else ""


def no_kubelet_listens(seen: NodeFacts) -> str:
    """Return the fault if no kubelet listens on kubelet.sock; '' if one does, or if another check reports the cause."""
    folder = seen.socket_dir
    if folder.state != "there" or _is_plugins_registry(seen) or _KUBELET in folder.listening:
        return ""
    there = "no process listens on it" if _KUBELET in folder.names else "it isn't there"
    return f"{folder.path}/{_KUBELET}: {there}"


def _other_root_dir(seen: NodeFacts) -> str:
    for kubelet in seen.kubelets:
        root = _flag(kubelet.arguments, "root-dir")
        if root and root.rstrip("/") != _DEFAULT_ROOT_DIR and not seen.has_pod_resources:
            return f"process {kubelet.pid} runs with --root-dir={root}"
    return ""


def _is_plugins_registry(seen: NodeFacts) -> str:
    folder = seen.socket_dir
    foreign = sorted(name for name in folder.names if name.endswith(_PLUGIN_REGISTRY_SUFFIX))
    return f"{folder.path} has {foreign[0]} and no {_KUBELET}" if foreign and _KUBELET not in folder.names else ""


def _other_plugins(seen: NodeFacts) -> str:
    others = sorted(name for name in seen.socket_dir.listening if name.startswith(_OTHER_PLUGINS))
    return f"a process listens on {', '.join(others)} in {seen.socket_dir.path}" if others else ""


def _pod_resources(seen: NodeFacts) -> str:
    if seen.has_pod_resources is not False or _other_root_dir(seen) or no_kubelet_listens(seen):
        return ""
    return (
        ""
        if seen.release and 0 < seen.release.minor < _POD_RESOURCES_SINCE
        else "no process listens on the socket in pod-resources"
    )


def _checkpoint_is_unreadable(seen: NodeFacts) -> str:
    return seen.checkpoint.complaint if seen.checkpoint else ""


def _next_kubelet_cannot_read(seen: NodeFacts) -> str:
    return seen.release.checkpoint_lost_reason if seen.release else ""


def _fixed_bugs(seen: NodeFacts) -> str:
    return "; ".join(seen.release.bugs_fixed_later) if seen.release else ""


def _unknown_version(seen: NodeFacts) -> str:
    return seen.release.unknown_reason if seen.release else ""


def _device_plugins_are_off(seen: NodeFacts) -> str:
    if not seen.release or not 0 < seen.release.minor < _DEVICE_PLUGINS_SINCE:
        return ""
    for kubelet in seen.kubelets:
        if "DevicePlugins=true" not in _flag(kubelet.arguments, "feature-gates"):
            return f"kubelet 1.{seen.release.minor}, process {kubelet.pid}, has no --feature-gates=DevicePlugins=true"
    return ""


def _unknown_numa_nodes(seen: NodeFacts) -> str:
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


CHECKS: Final[Mapping[str, Callable[[NodeFacts], str]]] = {
    "DPG0101": _folder_is_missing,
    "DPG0102": _folder_was_replaced,
    "DPG0103": no_kubelet_listens,
    "DPG0104": _other_root_dir,
    "DPG0105": _is_plugins_registry,
    "DPG0106": _other_plugins,
    "DPG0107": _pod_resources,
    "DPG0108": _checkpoint_is_unreadable,
    "DPG0109": _next_kubelet_cannot_read,
    "DPG0110": _fixed_bugs,
    "DPG0111": _unknown_version,
    "DPG0112": _device_plugins_are_off,
    "DPG0113": _unknown_numa_nodes,
}
