"""The machine that a node believes it has: namespaces of its own, a cgroup of its own, a root of its own.

All that the node starts, mounts or configures lives in namespaces that end with their init, which the kernel kills as soon
as the runner dies, by whatever cause. What outlives namespaces is a cgroup and a folder: a reaper, which needs nothing from
the runner, removes these, and the next run removes what even a killed reaper left. Commands keep the machine's own view of the
file system, and find the node's in ``FOLDER/root``; the node's daemons have a view of their own, ``VIEW``, in which that is
"/" and nothing else exists. (A mere chroot isn't enough: who enters a container's mount namespace would leave it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

__all__ = ["ADDRESS", "BOOT_ID", "HOSTNAME", "SERVICE", "VIEW", "MachineError", "check", "leftovers", "run"]

HOSTNAME = "node-1"
ADDRESS = "192.0.2.2"
"""The node's address, of a block that is nobody's (RFC 5737)."""
SERVICE = "10.96.0.1"
"""The address of the service by which pods reach the API server. It is one of the node's own, so that no kube-proxy is needed."""

VIEW = "run/view"
"""The file in the folder that names the process which holds the view of the node's daemons."""
BOOT_ID = "run/boot_id"
"""The file in the folder that /proc/sys/kernel/random/boot_id shows, on the node and to commands: another one, another boot."""

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP = "device-plugin-node"
_FOLDERS = Path("/var/tmp")  # noqa: S108  overlays and container images want a disk; the name is made by mkdtemp
_PREFIX = "dpg-node-"
_OWNER = "owner"
_KERNEL_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NODES = {"kubelet", "kubelite", "k3s", "k3s-server", "k3s-agent", "k0s", "rke2", "microk8s"}
_GRACE_SECONDS = 10.0
_DEVICES = {
    "null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "kmsg": (1, 11), "tty": (5, 0),
}  # fmt: skip

# linux/sched.h and linux/prctl.h
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWPID, _NEWNET = 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


class MachineError(Exception):
    """A node can't run here, or not now; the message says what was expected, what came, and what to do."""


def run(lower: Path, binaries: Mapping[str, Path], inside: Callable[[Path], int]) -> int:
    """Makes the machine, calls ``inside`` in it with the machine's folder, ends it all, and gives what ``inside`` gave.

    Must be called from a process with one thread. ``inside`` is called in a process of its own, and may become another
    program; processes that it leaves are killed.

    Args:
        lower: The root file system that the node starts from.
        binaries: Folders of Kubernetes commands by minor version; the node sees them in /opt/kubernetes/VERSION.
        inside: What to do there.

    Raises:
        MachineError: This machine can't hold a node, is one, or holds another one of ours at the moment.
    """
    check()
    with _lock():
        _sweep()
        _refuse_nodes()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_FOLDERS))
        folder.joinpath(_OWNER).write_text(
            f"process {os.getpid()} since {time.strftime('%H:%M:%S')}: {' '.join(sys.argv)}"
        )
        end, alive = os.pipe()
        reaper = _fork(lambda: _reap(end, alive))
        try:
            keeper = _fork(lambda: _keep(alive, folder, lower, binaries, inside))
            status = _wait(keeper)
            if status:
                _keep_logs(folder)
        finally:
            os.close(end)
            os.close(alive)
            os.waitpid(reaper, 0)
    return status


def _keep_logs(folder: Path) -> None:
    kept = Path(tempfile.mkdtemp(prefix="dpg-logs-"))
    for source, target in ((folder / "logs", kept), (folder / "upper/var/log/pods", kept / "pods")):
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    print(f"that failed; the node's logs are in {kept}", file=sys.stderr)


def leftovers() -> list[str]:
    """What runs have left on this machine, one line each; empty, when none runs."""
    mounts = Path("/proc/self/mountinfo").read_text()
    return [
        *(f"folder {path}" for path in _FOLDERS.glob(f"{_PREFIX}*")),
        *(f"cgroup {path}, processes {path.joinpath('cgroup.procs').read_text().split()}" for path in _cgroups()),
        *(f"mount {line.split()[4]}" for line in mounts.splitlines() if f"/{_PREFIX}" in line),
    ]


# --- whether --------------------------------------------------------------------------------------------------------------


def check() -> None:
    """Says whether a node can run here.

    Raises:
        MachineError: It can't, and why.
    """
    if os.geteuid():
        raise MachineError("expected to be root, which namespaces, mounts and a container runtime need: run it by sudo")
    missing = [tool for tool in ("mount", "chroot", "nsenter", "pivot_root", "setsid") if shutil.which(tool) is None]
    if missing:
        raise MachineError(
            f"expected the commands {', '.join(missing)} (Debian: mount, coreutils, util-linux) on the PATH"
        )
    if not _CGROUPS.is_dir():
        raise MachineError("expected cgroups in /sys/fs/cgroup, found none: a container needs them mounted, writable")


def _refuse_nodes() -> None:
    found = [f"process {name}" for name in sorted(set(_node_processes()))]
    found += [f"cgroup {path}" for path in _CGROUPS.glob("**/kubepods*") if _CGROUP not in path.parts]
    if found:
        raise MachineError(
            f"expected a machine that is no Kubernetes node, but there is: {', '.join(found[:5])}. Nothing was touched; "
            "run this on another machine"
        )


def _node_processes() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            name = _node_program(path.read_bytes())
            if name:
                yield name


def _node_program(command_line: bytes) -> str:
    """The program if it makes a machine a node, else "". The laboratory's device managers, ``kubelet -dir DIR``, don't."""
    name, *options = command_line.split(b"\0")
    program = os.fsdecode(name).rpartition("/")[2]
    return program if program in _NODES and b"-dir" not in options else ""


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One node at a time on a machine: it is the cgroups' folder that is locked, so no file is left.

    The reaper inherits the lock: it is free when all is gone.
    """
    descriptor = os.open(_CGROUPS, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owners = [path.read_text().strip() for path in _FOLDERS.glob(f"{_PREFIX}*/{_OWNER}")]
            raise MachineError(
                f"expected no other node to run on this machine, but there is one: {', '.join(owners) or 'nobody says whose'}. "
                "Wait for its end, or end it"
            ) from None
        yield
    finally:
        os.close(descriptor)


# --- the processes: the runner, its reaper, and the keeper, whose child is the namespaces' init ------------------------------


def _fork(work: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = work()
    except BaseException as error:  # noqa: BLE001  whatever it is ends here: the parent's code must not run twice
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap(end: int, alive: int) -> int:
    """Waits until the runner is gone, or done, and removes what outlives namespaces."""
    os.setsid()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.close(alive)
    os.read(end, 1)
    _sweep()
    return 0


def _wait(keeper: int) -> int:
    """Waits for the keeper. Ctrl-C reaches the command itself, which gets some seconds to end; a second one ends all.

    So does SIGTERM, which is passed on to the command.
    """
    before = signal.signal(signal.SIGTERM, partial(_interrupt, keeper))
    try:
        return _ended(keeper)
    except KeyboardInterrupt:
        deadline = time.monotonic() + _GRACE_SECONDS
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < deadline and not os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                time.sleep(0.1)
        os.kill(keeper, signal.SIGKILL)  # no news to one that has ended
        _ended(keeper)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(keeper: int, *_: object) -> None:
    os.kill(keeper, signal.SIGTERM)
    raise KeyboardInterrupt


def _ended(child: int) -> int:
    return _status(os.waitpid(child, 0)[1])


def _status(waited: int) -> int:
    """An exit status as a shell has it: 128 and the signal that ended the process."""
    code = os.waitstatus_to_exitcode(waited)
    return code if code >= 0 else 128 - code


def _keep(alive: int, folder: Path, lower: Path, binaries: Mapping[str, Path], inside: Callable[[Path], int]) -> int:
    """Enters the namespaces and waits for their init: dies with the runner, and takes the init with it."""
    os.close(alive)
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _join(made := _make_cgroups())
    _unshare(_NEWCGROUP)
    _join([path / "init" for path in made])
    for path in made:
        if path.joinpath("cgroup.controllers").exists():  # version 2: may hold no process once it hands controllers on
            _hand_on(path)
    _unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET)
    init = _fork(lambda: _init(folder, lower, binaries, inside))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(init, signal.SIGTERM))
    return _ended(init)


def _init(folder: Path, lower: Path, binaries: Mapping[str, Path], inside: Callable[[Path], int]) -> int:
    """Process 1 of the namespaces: its end is the end of every process in them. It reaps, and waits for ``inside``."""
    _die_with_parent()
    _furnish(folder, lower, binaries)
    _open_view(folder)
    command = _fork(lambda: _begin(folder, inside))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(command, signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == command:
            return _status(status)


def _begin(folder: Path, inside: Callable[[Path], int]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return inside(folder)


def _die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _unshare(namespaces: int) -> None:
    _call("unshare", namespaces)


def _call(name: str, *arguments: int | bytes) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise MachineError(
            f"expected {name}{arguments} to work, but: {os.strerror(number)} (is this a container without privileges?)"
        )


# --- cgroups --------------------------------------------------------------------------------------------------------------


def _hierarchies() -> Iterator[tuple[str, Path]]:
    """The cgroup hierarchies that are mounted: their options ("" for version 2), and this process's own cgroup in each."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        mounted = _CGROUPS
        if controllers:
            mounted /= controllers.removeprefix("name=")
        elif not mounted.joinpath("cgroup.controllers").exists():
            continue  # version 2 beside version 1: it has no controllers, and nobody needs it
        if mounted.is_dir():
            yield controllers, mounted / own.lstrip("/") if controllers else mounted


def _make_cgroups() -> list[Path]:
    """A cgroup of its own in each hierarchy: below this process's with version 1, below the root with version 2."""
    made = []
    for controllers, parent in _hierarchies():
        path = parent / _CGROUP
        path.joinpath("init").mkdir(parents=True, exist_ok=True)
        if not controllers:
            _hand_on(parent)
        elif "cpuset" in controllers.split(","):  # empty at first, and nobody may join then
            for name in ("cpuset.cpus", "cpuset.mems"):
                for child in (path, path / "init"):
                    child.joinpath(name).write_text(parent.joinpath(name).read_text())
        made.append(path)
    if not made:
        raise MachineError(
            "expected cgroup hierarchies mounted below /sys/fs/cgroup, found none that this process is in"
        )
    return made


def _hand_on(cgroup: Path) -> None:
    controllers = cgroup.joinpath("cgroup.controllers").read_text().split()
    try:
        cgroup.joinpath("cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
    except OSError as error:
        raise MachineError(
            f"expected {cgroup} to hand its controllers on, but: {error}; in a container, its processes must be in a cgroup "
            "below its root"
        ) from error


def _join(cgroups: list[Path]) -> None:
    for path in cgroups:
        path.joinpath("cgroup.procs").write_text("0")


def _cgroups() -> list[Path]:
    return [path for path in _CGROUPS.glob(f"**/{_CGROUP}") if path.is_dir()]


def _sweep() -> None:
    """Removes what a machine that is gone has left: processes that are still dying, cgroups, the folder."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for cgroup in _cgroups():
        while True:
            for path in [*cgroup.glob("**/cgroup.procs")]:
                with contextlib.suppress(OSError):
                    for pid in filter(None, map(int, path.read_text().split())):  # 0: of a PID namespace beside ours
                        os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                for path in sorted(filter(Path.is_dir, cgroup.glob("**/")), reverse=True):
                    path.rmdir()
            if not cgroup.exists() or time.monotonic() > deadline:
                break
            time.sleep(0.02)
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


# --- mounts ---------------------------------------------------------------------------------------------------------------


def _furnish(folder: Path, lower: Path, binaries: Mapping[str, Path]) -> None:
    """Mounts the node's root and what belongs into it, in the mount namespace that this process is alone in."""
    _mount("--make-rprivate", "/")
    _mount("-t", "proc", "proc", "/proc")
    root = folder / "root"
    for name in ("root", "upper", "work", "logs", "run", "disk"):
        folder.joinpath(name).mkdir(mode=0o755)
    folder.chmod(0o755)
    try:
        _mount(
            "-t", "overlay", "-o", f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work", "node", str(root)
        )
    except MachineError as error:
        raise MachineError(
            f"{error}; in a container, let {_FOLDERS} be a volume: no overlay lies upon another"
        ) from error
    for name in ("kubelet", "containerd", "etcd"):  # no overlay upon an overlay; and a node's state is on a disk
        folder.joinpath("disk", name).mkdir()
        _bind(folder / "disk" / name, root / "var/lib" / name)
    for version, path in binaries.items():
        _bind(path, root / "opt/kubernetes" / version)
    _mount("-t", "proc", "proc", str(root / "proc"))
    folder.joinpath(BOOT_ID).write_text(_KERNEL_BOOT_ID.read_text())
    for path in (_KERNEL_BOOT_ID, root / _KERNEL_BOOT_ID.relative_to("/")):
        _mount("--bind", str(folder / BOOT_ID), str(path))
    _mount("-t", "sysfs", "sysfs", str(root / "sys"))
    for name, mode in (("run", "755"), ("tmp", "1777"), ("dev", "755")):
        _mount("-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", str(root / name))
    _fill_dev(root / "dev")
    _mount_cgroups(root / "sys/fs/cgroup")
    Path("/proc/sys/kernel/hostname").write_text(HOSTNAME)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    addresses = [("address", "add", f"{address}/32", "dev", "lo") for address in (ADDRESS, SERVICE)]
    for command in (("link", "set", "lo", "up"), *addresses):
        subprocess.run(["chroot", root, "ip", *command], check=True)
    root.joinpath("etc/hostname").write_text(f"{HOSTNAME}\n")
    root.joinpath("etc/hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOSTNAME}\n")


def _open_view(folder: Path) -> None:
    """Starts the process whose mount namespace has the node's root as its own, and notes it.

    A bind mount of the namespace could hold it, too, but Linux 6.18 refuses that at random: it tells which of two mount
    namespaces is the newer one by numbers that each processor hands out for itself.
    """
    read, write = os.pipe()
    holder = _fork(lambda: _pivot(folder / "root", read, write))
    os.close(write)
    if not os.read(read, 1):
        raise MachineError("expected a mount namespace with the node's root as its own, but there is none: see above")
    os.close(read)
    folder.joinpath(VIEW).write_text(str(holder))


def _pivot(root: Path, read: int, write: int) -> int:
    os.close(read)
    _unshare(_NEWNS)
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "."], check=True)
    _call("umount2", b".", _MNT_DETACH)
    _mount("--make-rshared", "/")  # as an init makes it, and mountPropagation wants it
    os.write(write, b"1")
    while True:
        signal.pause()


def _fill_dev(dev: Path) -> None:
    for name, (major, minor) in _DEVICES.items():
        os.mknod(dev / name, 0o020666, os.makedev(major, minor))
        dev.joinpath(name).chmod(0o666)
    for name in ("pts", "shm"):
        dev.joinpath(name).mkdir()
    _mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", str(dev / "pts"))
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(dev / "shm"))
    dev.joinpath("ptmx").symlink_to("pts/ptmx")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        dev.joinpath(name).symlink_to(f"/proc/self/fd/{number}")
    dev.joinpath("fd").symlink_to("/proc/self/fd")


def _mount_cgroups(target: Path) -> None:
    """The hierarchies as this cgroup namespace sees them: its own cgroup is their root."""
    hierarchies = [controllers for controllers, _ in _hierarchies()]
    if "" in hierarchies:
        _mount("-t", "cgroup2", "cgroup2", str(target))
        return
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(target))
    for controllers in hierarchies:
        folder = target / controllers.removeprefix("name=")
        folder.mkdir()
        _mount("-t", "cgroup", "-o", controllers, "cgroup", str(folder))


def _bind(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    _mount("--bind", str(source), str(target))


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise MachineError(f"expected `mount {' '.join(arguments)}` to work, but: {done.stderr.strip()}")
