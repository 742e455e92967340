"""Check what plugins send to the bridge. Pure functions: each returns the reason of a refusal, or None.

A plugin may be broken or hostile, so its messages are bounded, and checked before they are used. A reason says what is wrong and
what to do.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from adapters.pluginregistration import DEVICE_PLUGIN, PluginInfo
from devices.model import ContainerAnswer, Device
from devices.naming import resource_name_error
from devices.replicas import unshared

KUBELET_SOCKET: Final = "kubelet.sock"
REGISTRATION: Final = "device-plugins"
REGISTRY: Final = "plugins_registry"
MAX_PLUGINS: Final = 128
"""Most resources that are remembered. A node has a handful of plugins."""
MAX_DEVICES: Final = 20_000
"""Most devices of one plugin. The kubelet's limit of 4 MiB per list is 43,000 devices with IDs of 80 bytes."""
MAX_DEVICES_IN_ALL: Final = 60_000
"""Most devices of all plugins together. A list that exceeds this is refused, and the plugin's last list stays in force."""
MAX_REPEATED_BYTES: Final = 16 * 1024
"""Most bytes of an answer that is remembered."""
MAX_ID_CHARS: Final = 253
"""Most characters of a device ID. The API's comment says 63, but no kubelet checks that."""
MAX_PARTS: Final = 4096
"""Most variables, mounts, device nodes, annotations and CDI names of one answer, together."""
MAX_ANSWER_BYTES: Final = 1024 * 1024
"""Most bytes of one answer to Allocate."""
_MAX_PATH_BYTES: Final = 107
_MOST_NUMA_NODES: Final = 1024  # CONFIG_NODES_SHIFT is at most 10
_OF_HARDWARE: Final = ("GPU-", "MIG-")
_OURS: Final = (REGISTRATION, REGISTRY)


def resource_error(name: str, allow: Sequence[str]) -> str | None:
    """Return why a plugin can't register ``name``; ``allow`` are the allowed patterns (none: every name)."""
    if problem := resource_name_error(name):
        return problem
    if allow and not any(fnmatchcase(name, pattern) for pattern in allow):
        return (
            f"{name} is not among the resources that may register here ({', '.join(allow)[:200]}): add it to bridge.allow in "
            "the gateway's configuration file, or let the plugin register with the kubelet itself"
        )
    return None


def endpoint_error(endpoint: str, folder: str) -> str | None:
    """Return why an endpoint can't be a socket's name in ``folder``."""
    shown = f"{endpoint[:80]!r}"
    if not endpoint or endpoint in {".", ".."} or "/" in endpoint or not endpoint.isprintable():
        return (
            f"not the name of a socket in the folder of {KUBELET_SOCKET}: {shown}. Bind the plugin's "
            "socket there, and register its bare name"
        )
    if endpoint == KUBELET_SOCKET:
        return own_socket(endpoint)
    if len(posixpath.join(folder, endpoint).encode()) > _MAX_PATH_BYTES:
        return (
            f"the path of the socket {shown} in {folder} is too long. Linux allows {_MAX_PATH_BYTES} "
            "bytes. Use a shorter name, or a shorter folder for --bridge"
        )
    return None


def own_socket(endpoint: str) -> str:
    """Return the refusal of an endpoint that is the bridge's own socket."""
    return f"{endpoint[:80]!r} is the gateway's own socket. Bind one under another name"


def info_error(info: PluginInfo) -> str | None:
    """Return why a plugin that was found in plugins_registry can't be served."""
    if info.kind != DEVICE_PLUGIN:
        return f"not a plugin of type {DEVICE_PLUGIN}: {info.kind[:64]!r}. Bind that one in the kubelet's own folder"
    if "v1beta1" not in info.versions:
        return (
            f"the plugin speaks {', '.join(info.versions)[:80]!r}, but plugins_registry is for "
            "v1beta1 only. Let an older plugin register on kubelet.sock"
        )
    return None


def endpoint_of(info: PluginInfo, found: str) -> tuple[str, str]:
    """Return the name of the bridge's folder and of the socket in it, for a plugin that was found in plugins_registry.

    ``GetInfo`` returns a path as the plugin sees it, usually ``/var/lib/kubelet/plugins_registry/x.sock``; only its last two
    parts matter. ``found`` is the name of the socket that was asked.
    """
    if not info.endpoint:
        return _OURS[1], found
    folder, name = posixpath.split(info.endpoint)
    last = posixpath.basename(folder)
    return (last if last in _OURS else _OURS[1]), name


def list_error(devices: Sequence[Device], others: int = 0) -> str | None:
    """Return why a list is refused; None if it isn't. ``others`` is how many devices the other plugins have.

    A list is refused as a whole, because a part of it would remove devices that exist.
    """
    if len(devices) > MAX_DEVICES:
        return f"too many devices on a list ({len(devices)}). Allowed: {MAX_DEVICES}. Announce fewer"
    if len(devices) + others > MAX_DEVICES_IN_ALL:
        return f"too many devices of all plugins ({len(devices)} next to {others}). Allowed: {MAX_DEVICES_IN_ALL}. Announce fewer"
    if wrong := next((one.id for one in devices if not _is_id(one.id)), None):
        return (
            f"not a device ID: {wrong[:80]!r} ({len(wrong)} characters). Allowed: 1 to {MAX_ID_CHARS} "
            "printable characters"
        )
    if not all(one.id for one in devices):
        return "a device on the list has no ID. Give it one"
    ids = {one.id for one in devices}
    if len(ids) < len(devices):
        twice, count = Counter(one.id for one in devices).most_common(1)[0]
        return f"the device ID {twice[:80]!r} is on the list {count} times. Give each device an ID of its own"
    return None


def _is_id(device_id: str) -> bool:
    return not device_id or (len(device_id) <= MAX_ID_CHARS and device_id.isprintable())


def placed(resource: str, device: Device) -> Device:
    """Return the device with its board. Two plugins may both use the ID ``0``, but the IDs of GPUs are the hardware's own."""
    board = "" if device.id.startswith(_OF_HARDWARE) else f"{resource}/{unshared(device.id)}"
    return Device(device.id, device.health, numa_nodes(device.numa_nodes), board)


def numa_nodes(found: Iterable[int]) -> tuple[int, ...]:
    """Return the NUMA nodes that can exist. If a device had another one, the kubelet might refuse its pod."""
    return tuple(node for node in found if 0 <= node < _MOST_NUMA_NODES)


def answer_error(answers: Sequence[ContainerAnswer]) -> str | None:
    """Return why an answer to an Allocate for one container can't be passed on."""
    if len(answers) != 1:
        return f"{len(answers)} answers for one container"
    [answer] = answers
    parts = sum(
        map(len, (answer.envs, answer.mounts, answer.device_nodes, answer.annotations, answer.cdi_devices)),
    )
    if parts > MAX_PARTS:
        return f"{parts} variables, mounts, devices and names for a container. Allowed: {MAX_PARTS}"
    return None
