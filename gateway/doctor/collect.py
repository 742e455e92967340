"""Collect the facts that ``gateway doctor`` checks: files, sockets and processes. Bounded; it changes nothing.

``root`` is the host's file system: / on the host and in the gateway's own pod, /host in a debug container. Facts that can't be
seen from here are None in the snapshot, and cause no finding.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from adapters import checkpoint
from adapters.dialect import MalformedError
from devices.files import NotPlainError, read_plain
from gateway.configuration import document
from gateway.doctor.snapshot import (
    CheckpointSeen,
    DeviceNodeSeen,
    GatewayProcess,
    KubeletProcess,
    Pci,
    SocketDir,
    StateDir,
)
from gateway.wires.unix import listens

_MOST_NAMES: Final = 512
_MOST_PROCESSES: Final = 32_768
MOST_BYTES: Final = 1024 * 1024
_KUBELETS: Final = frozenset({"kubelet", "kubelite", "k3s-agent", "k3s-server", "k3s", "rke2", "k0s"})
_GATEWAYS: Final = frozenset({"gateway", "nvidia-device-plugin"})
_VENDORS: Final = frozenset({"0x10de", "0x1002"})
"""PCI vendors of GPUs: NVIDIA, AMD."""
_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Classes of the PCI bus: VGA, 3D and other display controllers, accelerators."""
WSL: Final = ("dev/dxg",)
JETSON: Final = ("dev/nvhost-gpu", "dev/nvhost-ctrl-gpu", "etc/nv_tegra_release")
"""A node with one of these files is WSL, or a Jetson."""
_OWN_CDI: Final = "k8s.device-plugin.nvidia.com-"
"""Prefixes of the gateway's own CDI files (docs/answers.md)."""


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
    found = frozenset(names(path))
    sockets = [name for name in found if _is_socket(path / name)]
    return SocketDir(str(path), listening=frozenset(n for n in sockets if listens(path / n)), names=found)


def kubelet_checkpoint(path: Path) -> CheckpointSeen | None:
    """Read the kubelet's checkpoint; None if there is none."""
    try:
        checkpoint.read(read_plain(path, checkpoint.MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, NotPlainError, MalformedError) as error:
        return CheckpointSeen(_why(path, error))
    return CheckpointSeen()


def _why(path: Path, error: Exception) -> str:
    """Return why a file can't be read, with its path once."""
    words = str(error.strerror if isinstance(error, OSError) else error)
    return words if words.startswith(str(path)) else f"{path}: {words}"


def kubelets(root: Path) -> tuple[KubeletProcess, ...]:
    """Return the kubelets among the visible processes."""
    found = []
    for folder in _processes(root):
        name = _text(folder / "comm").strip()
        if name in _KUBELETS:
            arguments = tuple(part for part in _text(folder / "cmdline").split("\0") if part)
            found.append(KubeletProcess(int(folder.name), arguments))
    return tuple(found)


def state_dir(path: Path) -> StateDir:
    """Look at the gateways' state directory and its file, without changing either."""
    try:
        room = os.statvfs(path)
    except OSError:
        return StateDir(str(path), exists=False)
    written, complaint, claims = None, "", tuple[str, ...]()
    file = path / "ledger.json"
    with suppress(FileNotFoundError):
        try:
            written = file.lstat().st_mtime
            content = msgspec.json.decode(read_plain(file, MOST_BYTES * 16))
            if not isinstance(content, dict) or type(content.get("format")) is not int:
                complaint = f"{file}: it holds no object with a format number"
            claims = _claims(content)
        except FileNotFoundError:
            raise
        except (OSError, NotPlainError, ValueError, RecursionError) as error:
            complaint = _why(file, error)
    writable = os.access(path, os.W_OK | os.X_OK) and not room.f_flag & os.ST_RDONLY
    return StateDir(
        str(path),
        writable=writable,
        free_bytes=room.f_bavail * room.f_frsize,
        free_inodes=room.f_favail if room.f_files else None,
        complaint=complaint,
        claims=claims,
        written_at=written,
    )


def process(root: Path, pid: int) -> GatewayProcess | None:
    """Return a gateway's process and its limits; None if it isn't visible. ``pid`` is its ID in its own PID namespace."""
    found = next((folder for folder in _processes(root) if _is_gateway(folder, pid)), None)
    return None if found is None else _process(root, found)


def _is_gateway(folder: Path, pid: int) -> bool:
    numbers = re.search(r"^NSpid:.*?(\d+)$", _text(folder / "status"), re.MULTILINE)
    if (int(numbers[1]) if numbers else int(folder.name)) != pid:
        return False
    return any(part.rpartition("/")[2] in _GATEWAYS for part in _text(folder / "cmdline").split("\0")[:4])


def _process(root: Path, folder: Path) -> GatewayProcess:
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(folder / "status"), re.MULTILINE)
    most = re.search(r"^Max open files\s+(\d+)", _text(folder / "limits"), re.MULTILINE)
    files = list(names(folder / "fd"))
    throttled, killed = _cgroup(root, folder)
    return GatewayProcess(
        int(folder.name),
        open_files=len(files) or None,
        max_open_files=int(most[1]) if most else None,
        capabilities=int(capabilities[1], 16) if capabilities else None,
        selinux_label=_text(folder / "attr" / "current").strip("\0\n"),
        throttled=throttled,
        oom_kills=killed,
        inotify_instances=_instances(root, folder),
    )


def inotify_most(root: Path) -> int | None:
    """Return how many inotify instances a user may have; None if unknown."""
    return _number(root / "proc/sys/fs/inotify/max_user_instances")


def gpus(root: Path) -> tuple[Pci, ...] | None:
    """Return the GPUs on the bus; None if the bus can't be seen."""
    bus = root / "sys/bus/pci/devices"
    if not bus.is_dir():
        return None
    found = []
    for name in sorted(names(bus, 8192)):
        vendor = _text(bus / name / "vendor").strip()
        if vendor in _VENDORS and _text(bus / name / "class").startswith(_CLASSES):
            found.append(Pci(name, vendor, _link(bus / name / "driver")))
    return tuple(found)


def modules(root: Path) -> frozenset[str] | None:
    """Return which of the drivers' modules are loaded; None if that can't be seen."""
    folder = root / "sys/module"
    if not folder.is_dir():
        return None
    return frozenset(name for name in ("nvidia", "nouveau", "amdgpu") if (folder / name).is_dir())


def nodes(root: Path, gpus_there: int, *, tried: bool) -> tuple[DeviceNodeSeen, ...] | None:
    """Look at NVIDIA's device nodes; with ``tried`` also open them, as a program would. None if /dev can't be seen."""
    dev = root / "dev"
    if not dev.is_dir():
        return None
    numbers = [name for name in names(dev, 4096) if re.fullmatch(r"nvidia\d+", name)]
    # In a container without the driver capability "compute", nvidia-uvm is missing even if the host has it.
    given = set(os.environ.get("NVIDIA_DRIVER_CAPABILITIES", "all").split(","))
    kept_from_us = not given & {"all", "compute"} and "nvidia-uvm" in _text(root / "proc/devices")
    common = ["nvidiactl", *(["nvidia-uvm"] if gpus_there and not kept_from_us else [])]
    wanted = [*common, *(sorted(numbers) or [f"nvidia{number}" for number in range(gpus_there)])]
    return tuple(_node(root, dev / name, tried=tried) for name in wanted)


def kfd_gpus(root: Path) -> int | None:
    """Count the AMD GPUs that the compute driver shows; None if it isn't there."""
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    if not folder.is_dir():
        return None
    properties = (_text(folder / name / "properties") for name in names(folder))
    return sum(bool(re.search(r"^simd_count [1-9]", text, re.MULTILINE)) for text in properties)


def cdi_files(root: Path) -> dict[str, str]:
    """Read the CDI specifications of other programs; return the fault of each ('' for none). The gateway repairs its own."""
    return {
        f"/{folder}/{name}": _unsound(root, root / folder / name)
        for folder in ("etc/cdi", "run/cdi")
        for name in sorted(names(root / folder, 64))
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
    found = (_text(bus / name / "vendor").strip() + _text(bus / name / "class")[:6] for name in names(bus, 8192))
    return sum(one == "0x10de0x0680" for one in found)


def fabric_manager(root: Path) -> bool | None:
    """Return True if NVIDIA's fabric manager runs; None if the host's processes can't be seen."""
    # The kernel keeps 15 characters of a process's name.
    return (
        any(_text(one / "comm").startswith("nv-fabricmanage") for one in _processes(root)) if _sees_host(root) else None
    )


def boot(root: Path) -> str:
    """Return the kernel's ID of this boot; '' if it can't be seen."""
    return _text(root / "proc/sys/kernel/random/boot_id").strip()


def numa_nodes(root: Path) -> frozenset[int] | None:
    """Return the NUMA nodes that the kernel has; None if they can't be seen."""
    found = [name[4:] for name in names(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    return frozenset(map(int, found)) or None


def enforcing(root: Path) -> bool | None:
    """Return True if SELinux enforces its rules; None if that can't be seen."""
    found = _number(root / "sys/fs/selinux/enforce")
    return None if found is None else bool(found)


def dra_drivers(kubelet_dir: Path) -> frozenset[str] | None:
    """Return the DRA drivers that are registered with the kubelet; None if its folder can't be seen."""
    folders = [kubelet_dir / "plugins_registry", kubelet_dir / "plugins"]
    if not any(folder.is_dir() for folder in folders):
        return None
    found = (name.removesuffix("-reg.sock").removesuffix(".sock") for folder in folders for name in names(folder))
    return frozenset(found)


def has_registry(kubelet_dir: Path) -> bool | None:
    """Return True if the kubelet has its folder for drivers; None if the kubelet's own folder isn't there."""
    return (kubelet_dir / "plugins_registry").is_dir() if kubelet_dir.is_dir() else None


def _node(root: Path, path: Path, *, tried: bool) -> DeviceNodeSeen:
    shown = f"/{path.relative_to(root)}"
    try:
        info = path.stat()
    except OSError:
        return DeviceNodeSeen(shown, exists=False)
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


def table(content: Any, name: str) -> Mapping[str, Any]:
    """Return the table of that name; empty if there is none."""
    found = content.get(name) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def listed(content: Any) -> Sequence[Any]:
    """Return a list, or an empty one for anything else."""
    return content if isinstance(content, list) else ()


def _unsound(root: Path, path: Path) -> str:
    try:
        content = document.read(read_plain(path, MOST_BYTES), str(path)).plain()
    except (OSError, NotPlainError, ValueError) as error:
        return f"it can't be read: {str(error).splitlines()[0]}"
    devices = content.get("devices") if isinstance(content, dict) else None
    if not isinstance(devices, list) or not isinstance(content.get("kind"), str):
        return "it is no CDI specification: it has no kind, or no devices"
    missing = sorted(
        {
            str(node.get("hostPath") or node.get("path"))
            for one in (content, *devices)
            for node in listed(table(one, "containerEdits").get("deviceNodes"))
            if isinstance(node, dict)
            and not (root / str(node.get("hostPath") or node.get("path")).lstrip("/")).exists()
        }
    )
    return f"it names {', '.join(missing[:3])}, which isn't there" if missing and _sees_host(root) else ""


def _sees_host(root: Path) -> bool:
    """Return True if processes and devices below ``root`` are the host's, not the pod's own."""
    return (root != Path("/") or "KUBERNETES_SERVICE_HOST" not in os.environ) and (root / "dev").is_dir()


def _claims(content: Any) -> tuple[str, ...]:
    """Return the prepared claims in a state file, in words."""
    rows = table(content, "claims").values()
    return tuple(
        f"{one.get('namespace')}/{one.get('name')} ({one.get('driver')})" for one in rows if isinstance(one, dict)
    )


def _cgroup(root: Path, folder: Path) -> tuple[int | None, int]:
    """Return how often its CPU limit throttled a process (None: no limit), and how many processes of its cgroup were killed for memory."""
    path = re.search(r"^0::/(.*)$", _text(folder / "cgroup"), re.MULTILINE)
    if path is None:
        return None, 0
    group = root / "sys/fs/cgroup" / path[1]
    killed = re.search(r"^oom_kill (\d+)$", _text(group / "memory.events"), re.MULTILINE)
    held = re.search(r"^nr_throttled (\d+)$", _text(group / "cpu.stat"), re.MULTILINE)
    limited = not _text(group / "cpu.max").startswith("max") and held is not None
    return int(held[1]) if limited and held else None, int(killed[1]) if killed else 0


def _instances(root: Path, of: Path) -> int:
    """Count the visible inotify instances of a process's user. The limit is per user."""
    found = 0
    with suppress(OSError):
        user = of.stat().st_uid
        for folder in _processes(root):
            with suppress(OSError):
                if folder.stat().st_uid == user:
                    links = (_link_text(folder / "fd" / name) for name in names(folder / "fd"))
                    found += sum(link == "anon_inode:inotify" for link in links)
    return found


def _processes(root: Path) -> Iterator[Path]:
    for name in names(root / "proc", _MOST_PROCESSES):
        if name.isdecimal():
            yield root / "proc" / name


def names(folder: Path, most: int = _MOST_NAMES) -> Iterable[str]:
    """Return the first ``most`` names in a folder; none if it can't be read."""
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
    """Read a small file of the kernel; empty if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(65_536).decode(errors="replace")
    except OSError:
        return ""
