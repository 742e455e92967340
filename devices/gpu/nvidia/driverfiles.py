"""Find the files of NVIDIA's driver that containers need: libraries, programs, firmware, sockets, files for graphics.

The search uses the distributions' folders, below the root in which this process sees the driver. It follows nvcdi of the NVIDIA
Container Toolkit (pkg/nvcdi/driver-nvml.go, pkg/lookup/library.go, internal/discover/graphics.go and symlinks.go,
internal/platform-support/dgpu of 1.20), but doesn't use the loader's cache. Symbolic links are followed inside that root only,
because they belong to the driver's container.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final

from msgspec.structs import replace

from devices.gpu.nvidia.cdi import DriverFiles, Extra, GraphicsFiles, Symlink
from devices.gpu.nvidia.kernel import read
from devices.model import Mount
from devices.policy import Policy

_VERSION: Final = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,3}")
_LIBRARY_FOLDERS: Final = tuple(
    folder + below + plugins
    for folder in (
        "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib", "/lib64", "/lib",
        "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/local/lib64", "/usr/local/lib",
        "/usr/local/nvidia/lib64", "/usr/local/glibc/usr/lib", "/run/opengl-driver/lib",
    )
    for below in ("", "/nvidia", "/nvidia/current")
    for plugins in ("", "/vdpau")
)  # fmt: skip
_PROGRAM_FOLDERS: Final = ("/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/bin", "/sbin")
_PROGRAMS: Final = (
    "nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
    "nvidia-imex", "nvidia-imex-ctl", "nvidia-xconfig",
)  # fmt: skip
_SOCKETS: Final = (
    ("/run/nvidia-persistenced/socket", "/var/run/nvidia-persistenced/socket"),
    ("/run/nvidia-fabricmanager/socket", "/var/run/nvidia-fabricmanager/socket"),
    ("/tmp/nvidia-mps",),  # noqa: S108 - a path of the host, not ours
)
"""Only the first path of each row that exists is used."""
_OWN_VERSION: Final = (
    "libnvidia-egl-gbm.so.*.*", "libnvidia-egl-wayland.so.*.*", "libnvidia-egl-wayland2.so.*.*",
    "libnvidia-egl-xcb.so.*.*", "libnvidia-egl-xlib.so.*.*", "libnvidia-nvvm70.so.*",
)  # fmt: skip
"""Libraries with another version than the driver's."""
_XORG_FOLDERS: Final = tuple(
    f"{folder}/modules{updates}/{kind}"
    for folder in ("/usr/lib/xorg", "/usr/lib64/xorg", "/usr/X11R6/lib", "/usr/X11R6/lib64")
    for updates in ("", "/updates")
    for kind in ("drivers", "extensions")
)
_XORG_BELOW: Final = (
    "nvidia/xorg", "xorg/modules/drivers", "xorg/modules/extensions", "xorg/modules/updates/drivers",
    "xorg/modules/updates/extensions",
)  # fmt: skip
"""Folders of X.Org modules below the libraries' folders."""
_CONFIG_FOLDERS: Final = ("/etc", "/usr/local/share", "/usr/share")
_CONFIGS: Final = (
    "glvnd/egl_vendor.d/10_nvidia.json", "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json", "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json", "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "nvidia/nvoptix.bin", "X11/xorg.conf.d/10-nvidia.conf", "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
)  # fmt: skip
"""Configuration files. Containers get them below /usr/share, wherever they are on the node."""
_OPENCL: Final = "OpenCL/vendors/nvidia.icd"
_VULKAN: Final = (
    "vulkan/icd.d/nvidia_icd.json", "vulkan/icd.d/nvidia_layers.json", "vulkan/implicit_layer.d/nvidia_layers.json",
    f"vulkan/icd.d/nvidia_icd.{os.uname().machine}.json",
)  # fmt: skip
"""Vulkan's files. Containers get them, and OpenCL's, below /etc."""
_LINKS: Final = {
    "libcuda.so": ("libcuda.so", "libcuda.so.1"),
    "libGLX_nvidia.so": ("libGLX_indirect.so.0", ""),
    "libnvidia-opticalflow.so": ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    "libnvidia-allocator.so": ("gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1"),
    "libnvidia-vulkan-producer.so": ("libnvidia-vulkan-producer.so", ""),
    "libglxserver_nvidia.so": ("libglxserver_nvidia.so", ""),
}
"""Links that programs need and that ldconfig doesn't make. By library: the link and its target ('': the library itself)."""
_NODES: Final = {
    Extra.GDRCOPY: (("/dev", "gdrdrv"),),
    Extra.GDS: (("/dev", "nvidia-fs*"),),
    Extra.MOFED: (("/dev/infiniband", "uverbs*"), ("/dev/infiniband", "rdma_cm")),
}
_MOUNTS: Final = {Extra.GDS: ("/run/udev", "/etc/cufile.json")}
_FIRMWARE: Final = re.compile(r"(?:gsp|ucodes).*\.bin")
_MAX_ENTRIES: Final = 20_000
_MAX_LINKS: Final = 40
"""Most links in one path, as in Linux."""


class DriverFilesError(Exception):
    """The driver's libraries were not found. The message says where they were searched, and what to do."""


def find(
    policy: Policy, version: str, root: str = "", gpus: Iterable[str] = (), sys: Path = Path("/sys")
) -> DriverFiles:
    """Find the files of the driver of this version, and the device nodes of GPUs and extras. It blocks: call it in a thread.

    Args:
        policy: has the driver's root on the host (``driver_root``).
        version: the driver's version, such as 550.54.15.
        root: where this process sees that root; '' for ``policy.container_driver_root``.
        gpus: PCI addresses of the GPUs that can draw.
        sys: where this process sees /sys.

    Raises:
        DriverFilesError: there are no such libraries, or the version is invalid.
    """
    tree = _Tree(root or policy.container_driver_root, policy.driver_root)
    if not _VERSION.fullmatch(version):
        raise DriverFilesError(
            f"CDI needs the driver's version, such as 550.54.15, but it is {version[:40]!r}. Load the driver, or choose a device "
            "list strategy without CDI"
        )
    libraries, found = _libraries(tree, version)
    if not any(PurePosixPath(library.container_path).name == f"libcuda.so.{version}" for library in libraries):
        raise DriverFilesError(
            f"the driver's libraries are missing for CDI: no libcuda.so.{version} in "
            f"{_LIBRARY_FOLDERS[0]} or another library folder below {tree.root}, the host's "
            f"{policy.driver_root}. Set NVIDIA_DRIVER_ROOT to the driver's folder and mount it at "
            "CONTAINER_DRIVER_ROOT, or choose a device list strategy without CDI"
        )
    dev = tree if tree.resolve("/dev") else _Tree("/", "/")
    graphics = tuple(_graphics(tree, version, libraries))
    made = {link.path: link for link in _links((*libraries, *graphics), version)}
    return DriverFiles(
        libraries=libraries,
        links=(*made.values(), *(link for link in found if link.path not in made)),
        others=(*graphics, *_others(tree, version, sys)),
        nodes={extra: tuple(_nodes(dev, places)) for extra, places in _NODES.items()},
        mounts={extra: tuple(_named(tree, paths)) for extra, paths in _MOUNTS.items()},
        graphics={pci: one for pci in gpus if (one := _drawing(dev, sys, pci)).nodes},
    )


class _Tree:
    """A root, as this process sees it and as the host does. Paths in it begin with a slash."""

    def __init__(self, root: str, host: str) -> None:
        self.root = root.rstrip("/") or "/"
        self._host = host.rstrip("/")

    def resolve(self, path: str) -> str | None:
        """Follow all links of a path, as a process with this root would; None if a target doesn't exist."""
        rest = [part for part in path.split("/") if part][::-1]
        done: list[str] = []
        links = 0
        while rest:
            part = rest.pop()
            if part in {".", ".."}:
                done = done[:-1] if part == ".." else done  # The root is its own parent.
                continue
            try:
                target = str(Path(self.seen("/" + "/".join((*done, part)))).readlink())
            except FileNotFoundError:
                return None
            except OSError:  # EINVAL: it isn't a link.
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            if target.startswith("/"):
                done = []
            rest += [one for one in target.split("/") if one][::-1]
        return "/" + "/".join(done)

    def seen(self, path: str) -> str:
        """Return where this process sees a path without links."""
        return self.root.rstrip("/") + path

    def mode(self, path: str) -> int:
        """Return the mode of a path without links; 0 if it can't be read."""
        try:
            return os.lstat(self.seen(path)).st_mode
        except OSError:
            return 0

    def entries(self, folder: str) -> list[str]:
        """Return the names in a folder without links; empty if it can't be read."""
        try:
            with os.scandir(self.seen(folder)) as entries:
                return sorted(entry.name for entry in islice(entries, _MAX_ENTRIES))
        except OSError:
            return []

    def mount(self, resolved: str, container: str = "") -> Mount:
        """Return the mount of a path without links, at the same place or at ``container``."""
        return Mount(container or resolved, self._host + resolved, read_only=True)


def _libraries(tree: _Tree, version: str) -> tuple[tuple[Mount, ...], tuple[Symlink, ...]]:
    libraries: dict[str, Mount] = {}
    links: dict[str, Symlink] = {}
    for folder in dict.fromkeys(tree.resolve(folder) for folder in _LIBRARY_FOLDERS):
        entries = [] if folder is None else [one for one in tree.entries(folder) if fnmatchcase(one, "lib*.so*")]
        for name in entries:
            path = f"{folder}/{name}"
            end = tree.resolve(path)
            if end is None or not end.endswith(f".so.{version}") or not stat.S_ISREG(tree.mode(end)):
                continue
            libraries[end] = tree.mount(end)
            if end != path:
                links[path] = Symlink(path, PurePosixPath(end).name)
    # A link into another folder isn't made: there, the loader finds the library by itself.
    beside = (link for link in links.values() if str(PurePosixPath(link.path).with_name(link.target)) in libraries)
    return tuple(libraries.values()), tuple(beside)


def _others(tree: _Tree, version: str, sys: Path) -> Iterator[Mount]:
    yield from (tree.mount(path) for name in _PROGRAMS if (path := _program(tree, name)))
    release = os.uname().release
    own = read(sys / "module/firmware_class/parameters/path", 4096).strip()
    usual = (f"/lib/firmware/updates/{release}", "/lib/firmware/updates", f"/lib/firmware/{release}", "/lib/firmware")
    for folder in (own, *usual) if own else usual:
        there = tree.resolve(f"{folder}/nvidia/{version}")
        names = [] if there is None else [one for one in tree.entries(there) if _FIRMWARE.fullmatch(one)]
        if names:
            yield from _named(tree, [f"{there}/{name}" for name in names])
            break
    for places in _SOCKETS:
        yield from (replace(mount, read_only=False) for mount in islice(_named(tree, places), 1))


def _program(tree: _Tree, name: str) -> str | None:
    found = (tree.resolve(f"{folder}/{name}") for folder in _PROGRAM_FOLDERS)
    return next((one for one in found if one and tree.mode(one) & 0o111), None)


def program(root: str, name: str) -> str | None:
    """Return where this process sees a program of the driver; None if it isn't there. It blocks."""
    tree = _Tree(root, "")
    found = _program(tree, name)
    return None if found is None else tree.seen(found)


def _graphics(tree: _Tree, version: str, libraries: Iterable[Mount]) -> Iterator[Mount]:
    """Return what EGL, Vulkan, OptiX and the X server need, apart from the libraries of the driver's version."""
    own = list(dict.fromkeys(str(PurePosixPath(library.container_path).parent) for library in libraries))
    mounts: dict[str, Mount] = {}
    for folder in own:
        for pattern in _OWN_VERSION:
            ends = (tree.resolve(f"{folder}/{name}") for name in tree.entries(folder) if fnmatchcase(name, pattern))
            mounts |= {end: tree.mount(end) for end in ends if end and stat.S_ISREG(tree.mode(end))}
    xorg = (*(f"{folder}/{below}" for folder in own for below in _XORG_BELOW), *_XORG_FOLDERS)
    for name in ("nvidia_drv.so", f"libglxserver_nvidia.so.{version}"):
        for mount in islice(_named(tree, [f"{folder}/{name}" for folder in xorg]), 1):
            mounts[mount.container_path] = mount
    yield from mounts.values()
    # Google's nodes have Vulkan's in the driver's own root.
    kinds = ((_CONFIGS, (), "/usr/share"), ((_OPENCL,), (), "/etc"), (_VULKAN, ("",), "/etc"))
    for configs, more, inside in kinds:
        for config in configs:
            for mount in islice(_named(tree, [f"{folder}/{config}" for folder in (*_CONFIG_FOLDERS, *more)]), 1):
                yield replace(mount, container_path=f"{inside}/{config}")


def _links(libraries: Iterable[Mount], version: str) -> Iterator[Symlink]:
    for library in libraries:
        path = PurePosixPath(library.container_path)
        if link := _LINKS.get(path.name.removesuffix(f".{version}")):
            yield Symlink(f"{path.parent}/{link[0]}", link[1] or path.name)


def _named(tree: _Tree, paths: Iterable[str]) -> Iterator[Mount]:
    for path in paths:
        found = tree.resolve(path)
        if found is not None and tree.mode(found):
            yield tree.mount(found, path)


def _nodes(tree: _Tree, places: Iterable[tuple[str, str]]) -> Iterator[str]:
    for folder, pattern in places:
        for name in tree.entries(folder):
            if fnmatchcase(name, pattern) and stat.S_ISCHR(tree.mode(f"{folder}/{name}")):
                yield f"{folder}/{name}"


def _drawing(dev: _Tree, sys: Path, pci: str) -> GraphicsFiles:
    """Return DRM's nodes of a GPU, and udev's links to them."""
    names = _Tree(str(sys), "").entries(f"/bus/pci/devices/{pci}/drm")
    nodes = tuple(_nodes(dev, (("/dev/dri", name) for name in names)))
    links = []
    for path in (f"/dev/dri/by-path/pci-{pci}-{kind}" for kind in ("card", "render")):
        with contextlib.suppress(OSError):
            if dev.resolve(path) in nodes:
                links.append(Symlink(path, str(Path(dev.seen(path)).readlink())))
    return GraphicsFiles(nodes, tuple(links))
