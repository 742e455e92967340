"""What ``gateway doctor`` looks at: files, sockets, processes, NVML and the API server. Bounded, and it changes nothing.

``root`` is where the host's file system is: / on the host and in the gateway's own pod, /host in a debug container.
What can't be seen from here is left out of the snapshot, and is no finding.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from glob import glob
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from adapters import checkpoint
from adapters.dialect import MalformedError
from devices.files import NotPlainError, read_plain
from gateway.doctor.snapshot import (
    CheckpointSeen,
    DeviceNodeSeen,
    KubeletProcess,
    Pci,
    Process,
    Runtime,
    SocketDir,
    StateDir,
)
from gateway.kubelet.watch import listens

_MOST_NAMES: Final = 512
_MOST_PROCESSES: Final = 32_768
_MOST_BYTES: Final = 1024 * 1024
_KUBELETS: Final = frozenset({"kubelet", "kubelite", "k3s-agent", "k3s-server", "k3s", "rke2", "k0s"})
_GATEWAYS: Final = frozenset({"gateway", "nvidia-device-plugin"})
_VENDORS: Final = frozenset({"0x10de", "0x1002"})
_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Classes of the PCI bus: VGA, 3D and other display controllers, accelerators."""
_CONTAINERD: Final = (
    "etc/containerd/config.toml",
    "var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "run/k0s/containerd-cri.toml",
    "var/snap/microk8s/current/args/containerd.toml",
)
_CRI: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")
"""containerd's plugin that starts containers, in configurations of version 3, 2 and 1."""
_MODERN: Final = 3
"""The version of a configuration that only containerd 2.0 and later read."""
_HAS_CDI: Final = (1, 7)
_MERGES: Final = (2, 0)
_CRIO_HAS_CDI: Final = (1, 23)
_HOOKS: Final = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
_MOST_IMPORTS: Final = 64
WSL: Final = ("dev/dxg",)
JETSON: Final = ("dev/nvhost-gpu", "dev/nvhost-ctrl-gpu", "etc/nv_tegra_release")
"""What only these have."""
_OWN_CDI: Final = "k8s.device-plugin.nvidia.com-"
"""What the names of the gateway's own CDI files begin with (docs/answers.md)."""


def socket_dir(path: Path) -> SocketDir:
    """Look at the kubelet's folder for device plugins."""
    try:
        info = path.stat()
    except OSError:
        return SocketDir(str(path), "missing")
    if not stat.S_ISDIR(info.st_mode):
        return SocketDir(str(path), "missing")
    if not info.st_nlink:
        return SocketDir(str(path), "stale")
    names = frozenset(_names(path))
    sockets = [name for name in names if _is_socket(path / name)]
    return SocketDir(str(path), listening=frozenset(n for n in sockets if listens(path / n)), names=names)


def kubelet_checkpoint(path: Path) -> CheckpointSeen | None:
    """Read the kubelet's checkpoint; None where there is none."""
    try:
        checkpoint.read(read_plain(path, checkpoint.MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, NotPlainError, MalformedError) as error:
        return CheckpointSeen(f"{path}: {str(error) or 'it is no plain file'}")
    return CheckpointSeen()


def kubelets(root: Path) -> tuple[KubeletProcess, ...]:
    """Find the kubelets among the processes that can be seen."""
    found = []
    for folder in _processes(root):
        name = _text(folder / "comm").strip()
        if name in _KUBELETS:
            arguments = tuple(part for part in _text(folder / "cmdline").split("\0") if part)
            found.append(KubeletProcess(int(folder.name), arguments))
    return tuple(found)


def state_dir(path: Path) -> StateDir:
    """Look at the gateways' state directory and its file, without touching either."""
    try:
        room = os.statvfs(path)
    except OSError:
        return StateDir(str(path), there=False)
    written, complaint, claims = None, "", ()
    file = path / "ledger.json"
    with suppress(FileNotFoundError):
        try:
            written = file.lstat().st_mtime
            content = msgspec.json.decode(read_plain(file, _MOST_BYTES * 16))
            if not isinstance(content, dict) or type(content.get("format")) is not int:
                complaint = f"{file}: it holds no object with a format number"
            claims = _claims(content)
        except FileNotFoundError:
            raise
        except (OSError, NotPlainError, ValueError, RecursionError) as error:
            complaint = f"{file}: {error}"
    writable = os.access(path, os.W_OK | os.X_OK) and not room.f_flag & os.ST_RDONLY
    return StateDir(
        str(path),
        writable=writable,
        free_bytes=room.f_bavail * room.f_frsize,
        free_inodes=room.f_favail if room.f_files else None,
        complaint=complaint,
        claims=claims,
        written=written,
    )


def process(root: Path, pid: int) -> Process | None:
    """Look at what the kernel lets one gateway do, by the number that it has in its own name space; None where it isn't seen."""
    found = next((folder for folder in _processes(root) if _is_gateway(folder, pid)), None)
    return None if found is None else _process(root, found)


def _is_gateway(folder: Path, pid: int) -> bool:
    numbers = re.search(r"^NSpid:.*?(\d+)$", _text(folder / "status"), re.MULTILINE)
    if (int(numbers[1]) if numbers else int(folder.name)) != pid:
        return False
    return any(part.rpartition("/")[2] in _GATEWAYS for part in _text(folder / "cmdline").split("\0")[:4])


def _process(root: Path, folder: Path) -> Process:
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(folder / "status"), re.MULTILINE)
    most = re.search(r"^Max open files\s+(\d+)", _text(folder / "limits"), re.MULTILINE)
    files = list(_names(folder / "fd"))
    throttled, killed = _cgroup(root, folder)
    return Process(
        int(folder.name),
        open_files=len(files) or None,
        most_files=int(most[1]) if most else None,
        capabilities=int(capabilities[1], 16) if capabilities else None,
        context=_text(folder / "attr" / "current").strip("\0\n"),
        throttled=throttled,
        killed=killed,
        instances=_instances(root, folder),
    )


def inotify_most(root: Path) -> int | None:
    """How many inotify instances a user may have."""
    return _number(root / "proc/sys/fs/inotify/max_user_instances")


def gpus(root: Path) -> tuple[Pci, ...] | None:
    """Find the GPUs on the bus; None where the bus can't be seen."""
    bus = root / "sys/bus/pci/devices"
    if not bus.is_dir():
        return None
    found = []
    for name in sorted(_names(bus, 8192)):
        vendor = _text(bus / name / "vendor").strip()
        if vendor in _VENDORS and _text(bus / name / "class").startswith(_CLASSES):
            found.append(Pci(name, vendor, _link(bus / name / "driver")))
    return tuple(found)


def modules(root: Path) -> frozenset[str] | None:
    """Say which of the drivers' modules are loaded; None where that can't be seen."""
    folder = root / "sys/module"
    if not folder.is_dir():
        return None
    return frozenset(name for name in ("nvidia", "nouveau", "amdgpu") if (folder / name).is_dir())


def nodes(root: Path, gpus_there: int, *, tried: bool) -> tuple[DeviceNodeSeen, ...] | None:
    """Look at NVIDIA's device nodes, and (``tried``) open them as who uses them does; None where /dev can't be seen."""
    dev = root / "dev"
    if not dev.is_dir():
        return None
    numbers = [name for name in _names(dev, 4096) if re.fullmatch(r"nvidia\d+", name)]
    wanted = ["nvidiactl", *(sorted(numbers) or [f"nvidia{number}" for number in range(gpus_there)])]
    return tuple(_node(root, dev / name, tried=tried) for name in wanted)


def kfd_gpus(root: Path) -> int | None:
    """Count AMD's GPUs that the compute driver shows; None where it isn't there."""
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    if not folder.is_dir():
        return None
    properties = (_text(folder / name / "properties") for name in _names(folder))
    return sum(bool(re.search(r"^simd_count [1-9]", text, re.MULTILINE)) for text in properties)


def runtime(root: Path, reported: str) -> Runtime | None:
    """Read the container runtime's configuration; None if it can't be told which one it is.

    ``reported`` is what the kubelet reports at the API server, such as ``containerd://1.7.27``; '' if that isn't known.
    """
    name, _, text = reported.partition("://")
    path, content = next(((root / one, found) for one in _CONTAINERD if (found := _toml(root / one))), (root, None))
    crio = root / "etc/crio"
    parts = [crio / "crio.conf", *sorted((crio / "crio.conf.d").glob("*"))[:_MOST_IMPORTS]]
    theirs = [found for one in parts if (found := _toml(one)) is not None]
    if not name and bool(content) != bool(theirs):
        name = "containerd" if content else "cri-o"
    if name == "cri-o":
        return _crio(root, str(crio), text, theirs)
    if name != "containerd":
        return Runtime(f"{name} {text}") if name else None
    if content is None:
        return _containerd("", text, _version(text), [])
    version = _version(text) or _by_binary(root) or (_MERGES if _number_of(content) >= _MODERN else ())
    return _containerd(str(path), text, version, [content, *_imported(root, path, content)])


def cdi_files(root: Path) -> dict[str, str]:
    """Read the CDI specifications of others, and return what is wrong with each. The gateway writes and repairs its own."""
    return {
        f"/{folder}/{name}": _unsound(root, root / folder / name)
        for folder in ("etc/cdi", "run/cdi")
        for name in sorted(_names(root / folder, 64))
        if name.endswith((".yaml", ".json")) and not name.startswith(_OWN_CDI)
    }


def sign(root: Path, names: Iterable[str]) -> str:
    """Return the first of these files that is there; '' if none is."""
    return next((f"/{name}" for name in names if (root / name).exists()), "")


def switches(root: Path) -> int | None:
    """Count NVSwitches; None if the bus can't be seen."""
    bus = root / "sys/bus/pci/devices"
    if not bus.is_dir():
        return None
    found = (_text(bus / name / "vendor").strip() + _text(bus / name / "class")[:6] for name in _names(bus, 8192))
    return sum(one == "0x10de0x0680" for one in found)


def fabric_manager(root: Path) -> bool | None:
    """Whether NVIDIA's fabric manager runs; None if the host's processes can't be seen."""
    # The kernel keeps 15 characters of a process's name.
    return (
        any(_text(one / "comm").startswith("nv-fabricmanage") for one in _processes(root)) if _sees_host(root) else None
    )


def boot(root: Path) -> str:
    """Return the kernel's ID of this boot; '' if it can't be seen."""
    return _text(root / "proc/sys/kernel/random/boot_id").strip()


def numa_nodes(root: Path) -> frozenset[int] | None:
    """Return the NUMA nodes that the kernel has; None if they can't be seen."""
    found = [name[4:] for name in _names(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    return frozenset(map(int, found)) or None


def enforcing(root: Path) -> bool | None:
    """Whether SELinux enforces its rules; None where that can't be seen."""
    found = _number(root / "sys/fs/selinux/enforce")
    return None if found is None else bool(found)


def dra_drivers(kubelet_dir: Path) -> frozenset[str] | None:
    """Name the DRA drivers that are registered with the kubelet; None where its folder can't be seen."""
    folders = [kubelet_dir / "plugins_registry", kubelet_dir / "plugins"]
    if not any(folder.is_dir() for folder in folders):
        return None
    names = {name.removesuffix("-reg.sock").removesuffix(".sock") for folder in folders for name in _names(folder)}
    return frozenset(names)


def has_registry(kubelet_dir: Path) -> bool | None:
    """Whether the kubelet has its folder for drivers; None where the kubelet's own folder isn't there."""
    return (kubelet_dir / "plugins_registry").is_dir() if kubelet_dir.is_dir() else None


def _node(root: Path, path: Path, *, tried: bool) -> DeviceNodeSeen:
    shown = f"/{path.relative_to(root)}"
    try:
        info = path.stat()
    except OSError:
        return DeviceNodeSeen(shown, there=False)
    refused, linked = False, None
    if stat.S_ISCHR(info.st_mode):
        if (root / "dev/char").is_dir():
            number = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
            linked = os.path.lexists(root / "dev/char" / number)
        try:
            if tried:
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            refused = error.errno in {errno.EPERM, errno.EACCES}
    return DeviceNodeSeen(shown, refused=refused, linked=linked)


def _imported(root: Path, path: Path, content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Read the files that a configuration of containerd imports, such as NVIDIA's toolkit writes one, in their order."""
    for pattern in map(str, _list(content.get("imports"))[:_MOST_IMPORTS]):
        whole = root / pattern.lstrip("/") if pattern.startswith("/") else path.parent / pattern
        for name in sorted(glob(str(whole)))[:_MOST_IMPORTS]:  # noqa: PTH207 - for pathlib ** is the whole disk
            if (found := _toml(Path(name))) is not None:
                yield found


def _cri(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of the plugin that starts containers, by whichever name this version of the file calls it."""
    plugins = _table(content, "plugins")
    return next(filter(None, (_table(plugins, name) for name in _CRI)), {})


def _number_of(content: Mapping[str, Any]) -> int:
    version = content.get("version")
    return version if isinstance(version, int) else 1


def _containerd(path: str, text: str, version: tuple[int, ...], files: Sequence[Mapping[str, Any]]) -> Runtime:
    """Judge containerd's configuration and what it imports.

    Until 1.7 a plugin's section is the last file's, as a whole (containerd#5837), and CDI came with 1.7, off. From 2.0 on sections are
    merged (containerd#9982), and CDI is on, whatever the version of the file (containerd#9621).
    """
    name = f"containerd {text or '.'.join(map(str, version)) or 'of an unknown version'}"
    if not version or not files:
        return Runtime(name, path, cdi=False if version and version < _HAS_CDI else None)
    sections = [one for one in map(_cri, files) if one]
    section = reduce(_merged, sections, {}) if version >= _MERGES else next(reversed(sections), {})
    containerd = _table(section, "containerd")
    nvidia = _of_nvidia(_table(containerd, "runtimes"), lambda one: _table(one, "options").get("BinaryName"))
    return Runtime(
        name,
        path,
        nvidia=bool(nvidia),
        default=containerd.get("default_runtime_name") in nvidia,
        cdi=version >= _HAS_CDI and bool(section.get("enable_cdi", version >= _MERGES)),
        cdi_dirs=_folders(section.get("cdi_spec_dirs")),
    )


def _crio(root: Path, path: str, text: str, files: Sequence[Mapping[str, Any]]) -> Runtime:
    """Judge CRI-O's configuration and its drop-ins, which are merged. CDI came with 1.23, on; with NVIDIA's hook no runtime is needed."""
    name, version = f"CRI-O {text or 'of an unknown version'}", _version(text)
    if not version or not files:
        return Runtime(name, path if files else "", cdi=version >= _CRIO_HAS_CDI if version else None)
    section = _table(_table(reduce(_merged, files, {}), "crio"), "runtime")
    nvidia = _of_nvidia(_table(section, "runtimes"), lambda one: one.get("runtime_path"))
    folders = (root / str(one).lstrip("/") for one in _list(section.get("hooks_dir")) or _HOOKS)
    hooked = any("nvidia" in name for folder in folders for name in _names(folder))
    return Runtime(
        name,
        path,
        nvidia=bool(nvidia) or hooked,
        default=hooked or section.get("default_runtime") in nvidia,
        cdi=version >= _CRIO_HAS_CDI,
        cdi_dirs=_folders(section.get("cdi_spec_dirs")),
    )


def _of_nvidia(runtimes: Mapping[str, Any], program: Callable[[Mapping[str, Any]], Any]) -> set[str]:
    named = {name: one if isinstance(one, dict) else {} for name, one in runtimes.items()}
    return {name for name, one in named.items() if "nvidia" in name or "nvidia" in str(program(one) or "")}


def _folders(found: Any) -> tuple[str, ...]:
    return tuple(map(str, found)) if isinstance(found, list) else ("/etc/cdi", "/var/run/cdi")


def _merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one table over another, and the tables within them likewise."""
    both = {name: _merged(_table(first, name), one) for name, one in then.items() if isinstance(one, dict)}
    return {**first, **then, **both}


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def _by_binary(root: Path) -> tuple[int, ...]:
    """Tell containerd 2 from 1 by the path of the module that Go wrote into the program; () if that can't be seen."""
    for folder in ("usr/bin", "usr/local/bin", "opt/bin"):
        with suppress(OSError), (root / folder / "containerd").open("rb") as file:
            end = b""
            while piece := file.read(_MOST_BYTES):
                if found := re.search(rb"path\tgithub\.com/containerd/containerd/(v2/)?cmd/containerd\n", end + piece):
                    return _MERGES if found[1] else ()
                end = piece[-128:]
    return ()


def _toml(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, NotPlainError, ValueError):
        return tomllib.loads(read_plain(path, _MOST_BYTES).decode())
    return None


def _table(content: Any, name: str) -> Mapping[str, Any]:
    found = content.get(name) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def _list(content: Any) -> Sequence[Any]:
    return content if isinstance(content, list) else ()


def _unsound(root: Path, path: Path) -> str:
    try:
        content = yaml.safe_load(read_plain(path, _MOST_BYTES))
    except (OSError, NotPlainError, ValueError, yaml.YAMLError, RecursionError) as error:
        return f"it can't be read: {str(error).splitlines()[0]}"
    devices = content.get("devices") if isinstance(content, dict) else None
    if not isinstance(devices, list) or not isinstance(content.get("kind"), str):
        return "it is no CDI specification: it has no kind, or no devices"
    missing = sorted(
        {
            str(node.get("hostPath") or node.get("path"))
            for one in (content, *devices)
            for node in _list(_table(one, "containerEdits").get("deviceNodes"))
            if isinstance(node, dict)
            and not (root / str(node.get("hostPath") or node.get("path")).lstrip("/")).exists()
        }
    )
    return f"it names {', '.join(missing[:3])}, which isn't there" if missing and _sees_host(root) else ""


def _sees_host(root: Path) -> bool:
    """Whether processes and devices below ``root`` are the host's: those of a pod are its own."""
    return (root != Path("/") or "KUBERNETES_SERVICE_HOST" not in os.environ) and (root / "dev").is_dir()


def _claims(content: Any) -> tuple[str, ...]:
    """Return the claims that a state file says something is prepared for, in words."""
    rows = _table(content, "claims").values()
    return tuple(
        f"{one.get('namespace')}/{one.get('name')} ({one.get('driver')})" for one in rows if isinstance(one, dict)
    )


def _cgroup(root: Path, folder: Path) -> tuple[int | None, int]:
    """Say how often a process's CPU limit held it (None: it has none), and how often its group was killed for memory."""
    path = re.search(r"^0::/(.*)$", _text(folder / "cgroup"), re.MULTILINE)
    if path is None:
        return None, 0
    group = root / "sys/fs/cgroup" / path[1]
    killed = re.search(r"^oom_kill (\d+)$", _text(group / "memory.events"), re.MULTILINE)
    held = re.search(r"^nr_throttled (\d+)$", _text(group / "cpu.stat"), re.MULTILINE)
    limited = not _text(group / "cpu.max").startswith("max") and held is not None
    return int(held[1]) if limited and held else None, int(killed[1]) if killed else 0


def _instances(root: Path, of: Path) -> int:
    """Count the inotify instances of a process's user, as far as they can be seen: the limit is each user's."""
    found = 0
    with suppress(OSError):
        user = of.stat().st_uid
        for folder in _processes(root):
            with suppress(OSError):
                if folder.stat().st_uid == user:
                    links = (_link_text(folder / "fd" / name) for name in _names(folder / "fd"))
                    found += sum(link == "anon_inode:inotify" for link in links)
    return found


def _processes(root: Path) -> Iterator[Path]:
    for name in _names(root / "proc", _MOST_PROCESSES):
        if name.isdecimal():
            yield root / "proc" / name


def _names(folder: Path, most: int = _MOST_NAMES) -> Iterable[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry, _ in zip(entries, range(most), strict=False)]
    except OSError:
        return ()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _link(path: Path) -> str:
    return _link_text(path).rpartition("/")[2]


def _link_text(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """Read a small file of the kernel's; empty where it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(65_536).decode(errors="replace")
    except OSError:
        return ""
