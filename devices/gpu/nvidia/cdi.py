"""The CDI specifications for containers with NVIDIA's GPUs: nodes, driver files, hooks. ``cdifiles`` writes them.

Kinds and names are the same as in NVIDIA's device plugin (internal/cdi/cdi.go of 0.20, which uses nvcdi of the NVIDIA Container
Toolkit): after a change from that plugin, running pods still use its names. The content also follows nvcdi (pkg/nvcdi of 1.20).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, Final

from msgspec import Struct, field

from devices.gpu import cdi
from devices.gpu.cdi import ALL, Specification
from devices.gpu.model import GPU
from devices.model import Mount
from devices.policy import IMEX_CHANNEL, Policy

VENDOR: Final = "k8s.device-plugin.nvidia.com"
CLASS: Final = "gpu"
_READ_ONLY: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_WRITABLE: Final = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
"""Mount options of sockets. A nested container can't use a socket that is mounted read-only."""
# Without this variable, the NVIDIA runtime would add GPUs of its own choice.
_NO_RUNTIME_GPUS: Final = "NVIDIA_VISIBLE_DEVICES=void"
_CUDA: Final = "libcuda.so."
_LINK_HOOK: Final = "create-symlinks"


class Extra(Enum):
    """Further devices that a container gets with its GPUs, by setting. The values are the CDI classes."""

    GDRCOPY = "gdrcopy"
    GDS = "gds"
    MOFED = "mofed"


class Symlink(Struct, frozen=True):
    """A symbolic link for a container: ``path`` in the container leads to ``target``, relative to its folder."""

    path: str
    target: str


class GraphicsFiles(Struct, frozen=True):
    """The files that a container needs to draw on a GPU: DRM's device nodes, and links to them by PCI address."""

    nodes: tuple[str, ...]
    links: tuple[Symlink, ...] = ()


class DriverFiles(Struct, frozen=True):
    """The files of the driver that a container needs, as paths of the host and of the container.

    ``others`` are programs, firmware, sockets and files for graphics. ``nodes`` (paths below the dev root) and ``mounts``
    are the files of each ``Extra`` on the node. ``graphics`` has the files of each GPU that can draw, by PCI address.
    """

    libraries: tuple[Mount, ...]
    others: tuple[Mount, ...] = ()
    links: tuple[Symlink, ...] = ()
    nodes: Mapping[Extra, tuple[str, ...]] = field(default_factory=dict)
    mounts: Mapping[Extra, tuple[Mount, ...]] = field(default_factory=dict)
    graphics: Mapping[str, GraphicsFiles] = field(default_factory=dict)


def qualified(device: str, of: str = CLASS) -> str:
    """Return the fully qualified CDI name of a device of one of our classes.

    Raises:
        ValueError: CDI doesn't allow such a name.
    """
    return cdi.qualified(device, f"{VENDOR}/{of}")


IMEX_CLASS: Final = "imex-channel"
"""The class of IMEX channels. A channel's device name is its number."""


def extras(policy: Policy, driver: DriverFiles) -> tuple[Extra, ...]:
    """Return the extras that are set and exist on the node, as NVIDIA's plugin does (AdditionalDevices)."""
    wanted = {Extra.GDRCOPY: policy.gdrcopy, Extra.GDS: policy.gds, Extra.MOFED: policy.mofed}
    return tuple(extra for extra in Extra if wanted[extra] and driver.nodes.get(extra))


def specifications(
    gpus: Iterable[GPU], control_nodes: Sequence[str], policy: Policy, driver: DriverFiles, *, imex: bool = False
) -> tuple[Specification, ...]:
    """Return one specification for the GPUs and partitions, one for each extra, and one for IMEX channel 0 if ``imex``.

    A GPU without a valid CDI name (``qualified``) is left out.
    """
    named = {name: gpu for gpu in gpus if cdi.is_device_name(name := gpu.named_by(policy.id_strategy)) and name != ALL}
    written = []
    if named:
        devices = {name: _device((gpu,), policy, driver) for name, gpu in named.items()}
        devices[ALL] = _device(tuple(named.values()), policy, driver)
        common = _edits(
            env=[*_libcuda(driver), _NO_RUNTIME_GPUS],
            nodes=_nodes(control_nodes, policy),
            mounts=(*driver.libraries, *driver.others),
            hooks=_hooks(policy, driver) if driver.libraries else (),
        )
        written.append(_specification(CLASS, devices, common))
    for extra in extras(policy, driver):
        edits = _edits(nodes=_nodes(driver.nodes[extra], policy), mounts=driver.mounts.get(extra, ()))
        written.append(_specification(extra.value, {ALL: edits}, {}))
    if imex:
        written.append(_specification(IMEX_CLASS, {"0": _edits(nodes=_nodes([IMEX_CHANNEL], policy))}, {}))
    return tuple(written)


def _specification(of: str, devices: Mapping[str, Specification], common: Specification) -> Specification:
    """Return a specification of the lowest version that has all its fields (pkg/cdi/version.go of CDI)."""
    hosts = any("hostPath" in node for edits in (*devices.values(), common) for node in edits.get("deviceNodes", ()))
    spec: Specification = {
        "cdiVersion": "0.5.0" if hosts or any(name[0].isdigit() for name in devices) else "0.3.0",
        "kind": f"{VENDOR}/{of}",
        "devices": [{"name": name, "containerEdits": edits} for name, edits in devices.items()],
    }
    return {**spec, "containerEdits": common} if common else spec


def _edits(
    env: Sequence[str] = (),
    nodes: Sequence[Mapping[str, str]] = (),
    mounts: Sequence[Mount] = (),
    hooks: Sequence[Mapping[str, Any]] = (),
) -> Specification:
    mounted = [
        {
            "hostPath": mount.host_path,
            "containerPath": mount.container_path,
            "options": list(_READ_ONLY if mount.read_only else _WRITABLE),
        }
        for mount in mounts
    ]
    said = {"env": list(env), "deviceNodes": list(nodes), "mounts": mounted, "hooks": list(hooks)}
    return {key: value for key, value in said.items() if value}


def _device(gpus: Sequence[GPU], policy: Policy, driver: DriverFiles) -> Specification:
    """Return one CDI device that has these GPUs. A MIG instance can draw only if its profile says so (newNvmlMigDiscoverer of nvcdi)."""
    draw = [
        driver.graphics[gpu.pci]
        for gpu in gpus
        if gpu.pci in driver.graphics and (not gpu.parent or gpu.profile.endswith("+gfx"))
    ]
    nodes: list[dict[str, str]] = []
    for gpu in gpus:
        nodes += [{"path": path} for path in gpu.device_nodes]
        nodes += _nodes((path for path in gpu.spec_nodes if path not in gpu.device_nodes), policy)
    nodes += _nodes((path for one in draw for path in one.nodes), policy)
    links = _link_arguments(dict.fromkeys(link for one in draw for link in one.links))
    edits = _edits(
        nodes=list({node["path"]: node for node in nodes}.values()),
        hooks=_hook_list(policy, {_LINK_HOOK: links} if links else {}),
    )
    return edits or {"env": [_NO_RUNTIME_GPUS]}  # CDI rejects a device without edits.


def _nodes(paths: Iterable[str], policy: Policy) -> list[dict[str, str]]:
    return [
        {"path": path} if (host := policy.on_host(path)) == path else {"path": path, "hostPath": host} for path in paths
    ]


def _hooks(policy: Policy, driver: DriverFiles) -> list[Specification]:
    """Return the hooks of NVIDIA's program, which run before a container starts, in nvcdi's order.

    They make links, set up CUDA's forward compatibility by the host's version, add the libraries to the loader's cache, keep
    the driver from making device nodes, and limit EGL and Vulkan to the container's GPUs.
    """
    links = _link_arguments(driver.links)
    folders = dict.fromkeys(str(PurePosixPath(library.container_path).parent) for library in driver.libraries)
    version = next((library.name.removeprefix(_CUDA) for library in _cuda(driver)), "")
    calls = {
        _LINK_HOOK: links,
        "enable-cuda-compat": [f"--host-driver-version={version}"] if version else [],
        "update-ldcache": [word for folder in folders for word in ("--folder", folder)],
        "disable-device-node-modification": [],
        "update-application-profile": [],
    }
    if not links:
        del calls[_LINK_HOOK]
    return _hook_list(policy, calls)


def _link_arguments(links: Iterable[Symlink]) -> list[str]:
    return [word for link in links for word in ("--link", f"{link.target}::{link.path}")]


def _hook_list(policy: Policy, calls: Mapping[str, Sequence[str]]) -> list[Specification]:
    program, off = policy.cdi_hook_path, policy.cdi_disabled_hooks
    name = PurePosixPath(program).name
    begin = [name, "hook"] if name == "nvidia-ctk" else [name]
    return [
        {
            "hookName": "createContainer",
            "path": program,
            "args": [*begin, call, *words],
            "env": ["NVIDIA_CTK_DEBUG=false"],
        }
        for call, words in calls.items()
        if not off & {call, ALL}
    ]


def _libcuda(driver: DriverFiles) -> list[str]:
    """Return the path of the driver's own libcuda, for a container that also has another one."""
    folders = dict.fromkeys(str(library.parent) for library in _cuda(driver))
    return [f"NVIDIA_CTK_LIBCUDA_DIR={':'.join(folders)}"] if folders else []


def _cuda(driver: DriverFiles) -> list[PurePosixPath]:
    paths = (PurePosixPath(library.container_path) for library in driver.libraries)
    return [path for path in paths if path.name.startswith(_CUDA)]
