"""The node and its control plane: genuine daemons, each started, stopped and killed by name.

A ``Node`` is nothing but the folder of a machine (``machine.py``): what runs is told by files in it, so that the runner, a
test and a script can hold the same node at once, in any event loop. A daemon is a child of the namespaces' init, whoever
started it, and logs into ``node.logs``. Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from packaging.version import Version

from gateway_lab.node import configuration
from gateway_lab.node.image import BUSYBOX, PAUSE, busybox
from gateway_lab.node.machine import ADDRESS, BOOT_ID, HOSTNAME, VIEW
from gateway_lab.waiting import until

__all__ = ["VARIABLE", "ApiServer", "Containerd", "Daemon", "Kubelet", "Node", "NodeError"]

VARIABLE = "GATEWAY_NODE"
"""The environment variable that names the machine's folder to commands in it."""
_POLL_SECONDS = 0.02
_LOG_LINES = 25
_KUBERNETES = Path("/opt/kubernetes")
_SERVER = ("127.0.0.1", 443)


class NodeError(Exception):
    """Something on the node didn't happen; the message ends with the last lines of the daemon's log."""


class Daemon:
    """A daemon of the node, by name; its process is known by a file that all holders of the node share."""

    def __init__(self, node: Node, name: str, command: Callable[[], Sequence[str | Path]]) -> None:
        self.name = name
        self._node = node
        self._command = command
        self._pid_file = node.folder / "run" / f"{name}.pid"
        self._log_file = node.logs / f"{name}.log"

    @property
    def pid(self) -> int | None:
        """The process, or None when it doesn't run."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(self._pid_file.read_text())
            # The third field of stat, after a name that may hold anything: Z is a process that has ended.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return pid
        return None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.pid is not None

    @property
    def started(self) -> float:
        """When it was last started, in seconds since 1970.

        Raises:
            FileNotFoundError: It never was.
        """
        return self._pid_file.stat().st_mtime

    def log(self) -> str:
        """The end of its log."""
        try:
            lines = self._log_file.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-_LOG_LINES:])

    async def start(self) -> None:
        """Starts the process; it need not be ready when this returns.

        Raises:
            NodeError: It runs already.
        """
        if self.alive:
            raise NodeError(f"expected {self.name} not to run, but it does: process {self.pid}")
        # The shell makes it a child of init, and tells its process: setsid and nsenter become the daemon.
        done = await asyncio.to_thread(
            subprocess.run,
            ["sh", "-c", 'log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 & echo $!', "sh", self._log_file, *self._node.inside, *self._command()],
            check=True, stdout=subprocess.PIPE, text=True, env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )  # fmt: skip
        self._pid_file.write_text(done.stdout)

    async def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 15) -> None:
        """Sends the signal and waits until the process is gone; does nothing when it isn't there.

        Raises:
            NodeError: It was still there after so many seconds; it has been killed.
        """
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            try:
                async with asyncio.timeout(seconds):
                    await _gone(pid)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):  # It may be reaped before we look.
                    os.kill(pid, signal.SIGKILL)
                    await _gone(pid)
                raise self.error(f"it was still there {seconds:g} s after {number.name}; it has been killed") from None

    def error(self, what: str) -> NodeError:
        """An error of this daemon, with the end of its log."""
        return NodeError(f"{self.name}: {what}; {self._log_file} ends:\n{self.log()}")


class Kubelet(Daemon):
    """The kubelet: any of the versions that there are, on the same state."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, "kubelet", self._arguments)
        self.directory = node.plugins
        self.socket = node.plugins / "kubelet.sock"
        self._version_file = node.folder / "run/kubelet.version"

    @property
    def version(self) -> str:
        """The minor version that runs, or ran last."""
        try:
            return self._version_file.read_text()
        except FileNotFoundError:
            return self._node.kubelet_versions[-1]

    async def start(self, version: str | None = None) -> None:
        """Starts a minor version, or the one that ran last; kubelet.sock need not be there when this returns.

        Raises:
            NodeError: It runs already, or there is no such version.
        """
        versions = self._node.kubelet_versions
        if version is not None and version not in versions:
            raise NodeError(f"expected a kubelet out of {', '.join(versions)}, got {version!r}")
        self._version_file.write_text(version or self.version)
        await super().start()

    async def restart(self, *, signal: signal.Signals = signal.SIGTERM, version: str | None = None) -> None:
        """Stops it by the signal and starts it at once: a restart, or with another version an upgrade or a step back.

        Raises:
            NodeError: as stop and start.
        """
        await self.stop(signal)
        await self.start(version)

    def _arguments(self) -> Sequence[str | Path]:
        return [
            _KUBERNETES / self.version / "kubelet",
            "--config=/etc/kubernetes/kubelet.yaml",
            "--kubeconfig=/etc/kubernetes/kubelet.conf",
            f"--hostname-override={HOSTNAME}",
            f"--node-ip={ADDRESS}",
            "--v=2",
            *configuration.gates(self.version),
        ]


class Containerd(Daemon):
    """The container runtime. Containers live on while it doesn't."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, "containerd", lambda: ["containerd"])

    async def start(self) -> None:
        """Starts it, and waits until it answers.

        Raises:
            NodeError: It runs already, or doesn't answer.
        """
        await super().start()
        await self._node.until(self._answers, 20, lambda: self.error("it doesn't answer"))

    async def restart(self) -> None:
        """Stops it and starts it.

        Raises:
            NodeError: as stop and start.
        """
        await self.stop()
        await self.start()

    async def _answers(self) -> bool:
        if not self.alive:
            raise self.error("it has ended")
        with contextlib.suppress(NodeError):
            return bool(await self._node.ctr("version"))
        return False


class ApiServer(Daemon):
    """The API server. Its end is a KILL: open watches would hold up an orderly one for a minute."""

    async def start(self) -> None:
        """Starts it, and waits until it is ready.

        Raises:
            NodeError: It runs already, ended, or isn't ready after a minute.
        """
        await super().start()
        await self._node.until(self._ready, 60, lambda: self.error("/readyz isn't 200 after a minute"))

    async def stop(self, number: signal.Signals = signal.SIGKILL, seconds: float = 15) -> None:
        """Sends the signal and waits until the process is gone.

        Raises:
            NodeError: as every daemon's.
        """
        await super().stop(number, seconds)

    async def _ready(self) -> bool:
        if not self.alive:
            raise self.error("it has ended")
        return await self._node.get("/readyz") is not None


@dataclass(frozen=True)
class Node:
    """A node with its control plane, by the folder of its machine. Wants to be held by processes in that machine."""

    folder: Path

    @classmethod
    def here(cls) -> Node:
        """The node that this process runs on.

        Raises:
            NodeError: It runs on none.
        """
        folder = os.environ.get(VARIABLE)
        if not folder:
            raise NodeError(
                f"expected ${VARIABLE}, which names a node, but it isn't set: python -m gateway_lab.node -- COMMAND runs COMMAND on one"
            )
        return cls(Path(folder))

    name = HOSTNAME
    """The name of its Node object."""
    server = f"https://{_SERVER[0]}:{_SERVER[1]}"
    """The address of the API server."""

    @property
    def root(self) -> Path:
        """The node's root folder, as seen from here: a pod's hostPath /X is root / X."""
        return self.folder / "root"

    @property
    def inside(self) -> tuple[str, ...]:
        """What comes before a command to run it in the node's own view of the file system, where ``root`` is "/"."""
        return ("nsenter", f"--mount=/proc/{(self.folder / VIEW).read_text()}/ns/mnt")

    @property
    def plugins(self) -> Path:
        """The kubelet's folder of device plugin sockets."""
        return self.root / "var/lib/kubelet/device-plugins"

    @property
    def pods(self) -> Path:
        """The folder of static pods' manifests, which the kubelet looks at every second."""
        return self.root / "etc/kubernetes/manifests"

    @property
    def logs(self) -> Path:
        """The folder of the daemons' logs; containers' logs are in root / "var/log/pods"."""
        return self.folder / "logs"

    @property
    def ca(self) -> Path:
        """The certificate that the API server shows."""
        return self.root / "etc/kubernetes/server.crt"

    @property
    def token(self) -> str:
        """The bearer token of the administrator."""
        return (self.root / "etc/kubernetes/admin.token").read_text()

    @property
    def kubectl(self) -> Path:
        """The command of the API server's version; its configuration is ``kubeconfig``."""
        return self.root / f".{_KUBERNETES}" / self.kubelet_versions[-1] / "kubectl"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's configuration of kubectl."""
        return self.root / "etc/kubernetes/admin.conf"

    @property
    def kubelet_versions(self) -> tuple[str, ...]:
        """The minor versions of the kubelets, oldest first."""
        names = [path.name for path in (self.root / f".{_KUBERNETES}").iterdir()]
        return tuple(sorted(names, key=Version))

    @property
    def kubelet(self) -> Kubelet:
        """The kubelet."""
        return Kubelet(self)

    @property
    def containerd(self) -> Containerd:
        """The container runtime."""
        return Containerd(self)

    @property
    def apiserver(self) -> ApiServer:
        """The API server."""
        return self.apiserver_with()

    def apiserver_with(self, *flags: str) -> ApiServer:
        """The API server, to be started with more flags."""
        return ApiServer(self, "kube-apiserver", lambda: [*self._control_plane("kube-apiserver"), *flags])

    @property
    def controllers(self) -> Daemon:
        """The controller manager."""
        return Daemon(self, "kube-controller-manager", lambda: self._control_plane("kube-controller-manager"))

    @property
    def scheduler(self) -> Daemon:
        """The scheduler."""
        return Daemon(self, "kube-scheduler", lambda: self._control_plane("kube-scheduler"))

    @property
    def etcd(self) -> Daemon:
        """The API server's store."""
        return Daemon(self, "etcd", lambda: configuration.ETCD)

    def _control_plane(self, name: str) -> Sequence[str | Path]:
        return [_KUBERNETES / self.kubelet_versions[-1] / name, *configuration.CONTROL_PLANE[name]]

    # --- what can be done to it ------------------------------------------------------------------------------------------

    async def up(self, version: str | None = None) -> None:
        """Starts everything, with the newest kubelet or the one that is named; returns when the node is ready.

        Raises:
            NodeError: A daemon didn't come up.
        """
        await asyncio.to_thread(configuration.write, self.root)
        await self.etcd.start()
        await asyncio.gather(self._runtime(), self.apiserver.start())
        await asyncio.gather(self.controllers.start(), self.scheduler.start(), self.kubelet.start(version))
        await self.ready()
        await self.until(self._accounts, 30, lambda: self.controllers.error("there is no default service account"))

    async def ready(self, seconds: float = 60) -> None:
        """Waits until kubelet.sock accepts, and the API server has heard from this kubelet that the node is ready.

        Raises:
            NodeError: That isn't so after so many seconds.
        """
        await self.until(
            self._reported, seconds, lambda: self.kubelet.error(f"the node isn't ready after {seconds:g} s")
        )

    def make_device(self, path: str) -> None:
        """Makes a character device on the node, as good as /dev/null; one that is there stays.

        Args:
            path: Where containers' runtimes look for it, such as "/dev/nvidia0".
        """
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mknod(target, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            target.chmod(0o666)

    async def import_image(self, archive: Path) -> None:
        """Gives the runtime the images of an OCI or Docker archive, under the names that it says.

        Raises:
            NodeError: The archive isn't one.
        """
        inside = self.root / "tmp" / f"{uuid.uuid4().hex}.tar"
        try:
            await asyncio.to_thread(shutil.copyfile, archive, inside)
            await self.ctr("images", "import", f"/tmp/{inside.name}")  # noqa: S108  the node's own
        finally:
            inside.unlink(missing_ok=True)

    async def ctr(self, *arguments: str) -> str:
        """What containerd's ctr says in the kubelet's namespace.

        Raises:
            NodeError: It failed.
        """
        return await self._run("ctr", "--namespace", "k8s.io", *arguments)

    async def set_cdi(self, enabled: bool) -> None:  # noqa: FBT001  it is what is set
        """Restarts containerd as one that honours CDI device names, or ignores them. Specs are in root / "etc/cdi".

        Raises:
            NodeError: containerd didn't come up.
        """
        path = self.root / "etc/containerd/config.toml"
        path.write_text(re.sub(r"(?<=enable_cdi = )\w+", str(enabled).lower(), path.read_text()))
        await self.containerd.restart()

    async def power_off(self) -> None:
        """Ends the kubelet, every container and the runtime at once, as a power cut does.

        What a boot begins without is gone: /run, mounts, containers' cgroups. What is on the disk stays, sockets too: as on a
        real node the files of plugins' sockets and of kubelet.sock are there, and nobody listens.
        """
        await self.kubelet.stop(signal.SIGKILL)
        await self.containerd.stop(signal.SIGKILL)
        await asyncio.to_thread(self._cut)

    async def power_on(self) -> None:
        """Boots what ``power_off`` ended: containerd, then the kubelet, which finds another boot ID.

        Raises:
            NodeError: containerd didn't come up.
        """
        await self.containerd.start()
        await self.kubelet.start()

    # --- how -------------------------------------------------------------------------------------------------------------

    async def get(self, path: str) -> bytes | None:
        """What the API server answers to the administrator's GET of a path, or None when it isn't 200."""
        return await asyncio.to_thread(self._get, path)

    async def until(self, done: Callable[[], Awaitable[bool]], seconds: float, error: Callable[[], NodeError]) -> None:
        """Asks again and again until ``done`` is true.

        Raises:
            NodeError: ``error`` of it, after so many seconds.
        """
        try:
            await until(done, seconds, every=_POLL_SECONDS)
        except TimeoutError:
            raise error() from None

    def _get(self, path: str) -> bytes | None:
        context = ssl.create_default_context(cafile=str(self.ca))
        connection = http.client.HTTPSConnection(*_SERVER, timeout=2, context=context)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
            return answer.read() if answer.status == http.HTTPStatus.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    async def _runtime(self) -> None:
        await self.containerd.start()
        for name in (PAUSE, BUSYBOX):
            archive = self.folder / "run" / "image.tar"
            await asyncio.to_thread(busybox, self.root / "usr/bin/busybox", name, archive)
            await self.import_image(archive)
            archive.unlink()

    async def _run(self, *command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *self.inside, *command,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate()
        if process.returncode:
            raise NodeError(f"expected `{' '.join(command)}` to work, but: {said.decode(errors='replace').strip()}")
        return said.decode(errors="replace")

    async def _accounts(self) -> bool:
        return await self.get("/api/v1/namespaces/default/serviceaccounts/default") is not None

    async def _reported(self) -> bool:
        kubelet = self.kubelet
        if not kubelet.alive:
            raise kubelet.error("it has ended")
        if not await _accepts(kubelet.socket):
            return False
        node = await self.get(f"/api/v1/nodes/{self.name}")
        lease = await self.get(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self.name}")
        if node is None or lease is None:
            return False
        # The lease is renewed when a kubelet starts, in microseconds; the status has seconds only.
        status = json.loads(node)["status"]
        return (
            _seconds(json.loads(lease)["spec"]["renewTime"]) >= kubelet.started
            and status.get("nodeInfo", {}).get("kubeletVersion", "").startswith(f"v{kubelet.version}.")
            and any(
                condition["type"] == "Ready"
                and condition["status"] == "True"
                and _seconds(condition["lastHeartbeatTime"]) >= int(kubelet.started)
                for condition in status.get("conditions", ())
            )
        )

    def _cut(self) -> None:
        deadline = time.monotonic() + 10
        while pids := _containers(self.root):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise NodeError(
                    f"expected the containers' processes {pids} to end by KILL, but they are there after 10 s"
                )
            time.sleep(_POLL_SECONDS)
        mounts = subprocess.run(
            [*self.inside, "cat", "/proc/self/mountinfo"], check=True, stdout=subprocess.PIPE, text=True
        )
        places = [line.split()[4] for line in mounts.stdout.splitlines()]
        gone = [place for place in places if place.startswith(("/run/", "/var/lib/kubelet/"))]
        if gone:
            subprocess.run([*self.inside, "umount", "--lazy", *reversed(gone)], check=True)
        for path in (self.root / "run").iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in sorted(_pod_cgroups(self.root), reverse=True):
            path.rmdir()
        (self.folder / BOOT_ID).write_text(f"{uuid.uuid4()}\n")


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _pod_cgroups(root: Path) -> list[Path]:
    return [path for path in (root / "sys/fs/cgroup").glob("**/kubepods/**/") if path.is_dir()]


def _containers(root: Path) -> set[int]:
    """The processes of containers, and of what holds them."""
    found = set()
    for path in _pod_cgroups(root):
        with contextlib.suppress(OSError):
            found |= {int(line) for line in path.joinpath("cgroup.procs").read_text().split()}
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().startswith("containerd-shim"):
                found.add(int(path.parent.name))
    return found


async def _accepts(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _gone(pid: int) -> None:
    """Returns when the process has ended, whosever child it is."""
    descriptor = os.pidfd_open(pid)
    try:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)
