"""CDI (the Container Device Interface), as far as it is the same for all vendors: names and specifications. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias, TypedDict

import msgspec

from devices.model import ContainerAnswer, DeviceNode, Mount

Specification: TypeAlias = dict[str, Any]
"""A CDI specification, as in its JSON file."""

MAX_GONE: Final = 256
"""Most devices that stay in a specification after they have gone: a node has fewer pods."""
ALL: Final = "all"
"""The device that stands for all devices of a kind."""

# pkg/parser of the CDI project: a vendor begins with a letter and has dots, a class has none before 0.6.0; device names may
# begin with a digit since 0.5.0.
_KIND: Final = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?")
_DEVICE: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_NEWEST: Final = (1, 1, 0)
"""The newest supported version. A runtime rejects a whole file if it has a later version, or a wrong or repeated name."""
_VERSION: Final = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}")


class _Node(TypedDict):
    path: str


class _Mount(TypedDict):
    hostPath: str
    containerPath: str


class _Hook(TypedDict):
    hookName: str
    path: str


class _Edits(TypedDict, total=False):
    env: list[str]
    deviceNodes: list[_Node]
    mounts: list[_Mount]
    hooks: list[_Hook]


class _Device(TypedDict):
    name: str
    containerEdits: _Edits


class HookError(ValueError):
    """A specification has a hook, which only a container runtime can run."""


def is_device_name(name: str) -> bool:
    """Return True if CDI allows a device of this name."""
    return _DEVICE.fullmatch(name) is not None


def qualified(device: str, kind: str) -> str:
    """Return the fully qualified CDI name of a device, such as ``k8s.device-plugin.nvidia.com/gpu=GPU-1``.

    Raises:
        ValueError: CDI doesn't allow such a name (pkg/parser of the CDI project).
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"not a kind of CDI devices: {kind[:80]!r}. Write one such as vendor.com/class")
    if not is_device_name(device):
        raise ValueError(
            f"{device[:80]!r} cannot be a CDI device name: the driver is older than CDI. Name GPUs in "
            "the environment (envvar)"
        )
    return f"{kind}={device}"


def with_gone(new: Specification, old: object) -> Specification:
    """Return ``new`` and the last ``MAX_GONE`` devices that only ``old`` has; ``old`` is a file's content, unchecked.

    A container that got a device by such a name can restart only while the name exists. No new container gets it.
    """
    if not isinstance(old, dict) or old.get("kind") != new["kind"] or not isinstance(old.get("devices"), list):
        return new
    if _ordered(str(old.get("cdiVersion"))) > _NEWEST:
        return new
    there = {device["name"] for device in new["devices"]}
    found = {
        device["name"]: device
        for device in old["devices"]
        if _is_device(device) and is_device_name(device["name"]) and device["name"] not in there
    }
    kept = [*found.values()][-MAX_GONE:]
    if not kept:
        return new
    version = max(new["cdiVersion"], str(old.get("cdiVersion")), key=_ordered)
    return {**new, "cdiVersion": version, "devices": [*new["devices"], *kept]}


def expanded(names: Iterable[str], specs: Iterable[Specification]) -> ContainerAnswer:
    """Return the nodes, mounts and variables that the specifications have for these devices (fully qualified names).

    Raises:
        HookError: one of them has a hook.
        KeyError: a name is in no specification.
    """
    known = {spec["kind"]: spec for spec in specs}
    chosen: list[Mapping[str, Any]] = []
    for name in names:
        kind, _, device = name.partition("=")
        edits = {one["name"]: one["containerEdits"] for one in known[kind]["devices"]}
        chosen += [known[kind].get("containerEdits", {}), edits[device]]
    if any(edits.get("hooks") for edits in chosen):
        raise HookError("the CDI specification has a hook, which only a container runtime can run")
    nodes = {node["path"]: node for edits in chosen for node in edits.get("deviceNodes", ())}
    mounts = {mount["containerPath"]: mount for edits in chosen for mount in edits.get("mounts", ())}
    return ContainerAnswer(
        envs=dict(env.partition("=")[::2] for edits in chosen for env in edits.get("env", ())),
        mounts=tuple(Mount(path, one["hostPath"], "ro" in one.get("options", ())) for path, one in mounts.items()),
        device_nodes=tuple(DeviceNode(path, one.get("hostPath", path)) for path, one in nodes.items()),
    )


def _is_device(found: object) -> bool:
    """Return True if a runtime can read this device. If it can't, it rejects the whole file."""
    try:
        msgspec.convert(found, _Device)
    except msgspec.ValidationError:
        return False
    return True


def _ordered(version: str) -> tuple[int, ...]:
    """Return a sort key for versions; an invalid one comes first."""
    return tuple(map(int, version.split("."))) if _VERSION.fullmatch(version) else ()
