"""A node to measure on: its directories, the processes on it, and what the machine beneath it is."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from gateway.kubelet import records as kubelet_records
from gateway.kubelet.identity import KUBELET_SOCKET
from gateway.wires.unix import listens
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets import build
from gateway_lab.kubelets.kubelet import Kubelet
from gateway_lab.spawned import Spawned, spawn

RESOURCE: Final = "nvidia.com/gpu"
GPUS: Final = 8
EMULATED: Final = "1.28"
"""Which kubelet is emulated where faults are needed: it connects back inside Register, the strictest way. Where any kubelet
will do, it is the genuine one of this version, if that is built."""


class Unheard(Spawned):
    """A plugin whose log goes into a file: to read it while calls are timed would cost more than the calls.

    Make one with ``Node.unheard``; it ends with the node.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        super().__init__(process)
        self._log = log

    def log(self) -> str:
        """The end of the log, as text."""
        return self._log.read_text(errors="replace")[-2000:]


@dataclass(slots=True)
class Node:
    """Directories of one node, and the processes on them, which end with it."""

    root: Path
    python: Path
    stack: AsyncExitStack

    @property
    def sockets(self) -> Path:
        """The kubelet's device plugin directory."""
        return self.root / "device-plugins"

    @property
    def state(self) -> Path:
        """The gateways' state directory."""
        return self.root / "state"

    @property
    def profile(self) -> Path:
        """The profile of the simulated GPUs."""
        return self.root / "profile.yaml"

    @classmethod
    @asynccontextmanager
    async def make(cls, python: Path) -> AsyncIterator[Self]:
        """Make a node in a temporary directory (a short one: a socket's path may have 107 bytes)."""
        root = Path(tempfile.mkdtemp(prefix="dpg-"))
        try:
            (root / "device-plugins").mkdir()
            async with AsyncExitStack() as stack:
                yield cls(root, python, stack)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def simulate(self, profile: str) -> None:
        """Put a profile in place, in one step as an editor does."""
        made = self.profile.with_suffix(".new")
        made.write_text(profile)
        made.replace(self.profile)

    def hide_pod_resources(self) -> None:
        """Take away the kubelet's pod-resources API, where calls follow each other faster than pods end.

        A device that is given again is asked about there first (gateway.memory.again), and a kubelet answers 100 requests a second.
        """
        (self.root / "pod-resources" / "kubelet.sock").unlink(missing_ok=True)

    async def gateway(self, profile: str = "", options: Sequence[str] = ()) -> GatewayProcess:
        """Start a gateway from the measured environment, with the GPUs of ``profile`` (8 healthy ones without)."""
        if profile:
            self.simulate(profile)
        return await self.plugin(self.gateway_command(options))

    def gateway_command(self, options: Sequence[str] = ()) -> list[str]:
        """Give the command line of a gateway of the measured environment, with the profile that is in place."""
        profile = self.profile if self.profile.exists() else None
        command = gateway_command(self.sockets, self.state, profile, options=options)
        return [str(self.python.with_name("gateway")), *command[3:]]

    def trivial_command(self) -> list[str]:
        """Give the command line of the trivial plugin, from the measured environment (-P: not from the current folder)."""
        return [str(self.python), "-P", "-m", "gateway_lab.trivial", str(self.sockets)]

    async def plugin(self, command: Sequence[str]) -> GatewayProcess:
        """Start any plugin."""
        process = await GatewayProcess.launch(command)
        await self.stack.enter_async_context(process)
        return process

    async def unheard(self, command: Sequence[str]) -> Unheard:
        """Start any plugin, and don't listen to it."""
        log = self.root / "plugin.log"
        with log.open("ab") as file:
            process = await spawn(command, stdout=file, stderr=file)
        plugin = Unheard(process, log)
        self.stack.push_async_callback(plugin.kill)
        return plugin

    def plugin_sockets(self) -> list[Path]:
        """Give the sockets in the kubelet's directory on which a plugin listens, those at its top first."""
        return [
            path
            for path in sorted(self.sockets.rglob("*"), key=lambda path: (len(path.parts), path))
            if stat.S_ISSOCK(path.lstat().st_mode) and path.name != KUBELET_SOCKET and listens(path)
        ]

    async def kubelet(self, version: str = EMULATED, *, genuine: bool = False) -> Kubelet:
        """Launch a kubelet (a genuine one where that is wanted and built)."""
        kubelet = await Kubelet.launch(version, self.sockets, build.built(version) if genuine else None)
        self.stack.push_async_callback(kubelet.close)
        return kubelet

    async def allocatable(self, resource: str = RESOURCE) -> list[str] | None:
        """Ask the kubelet which devices of a resource it would give out; None where it can't be asked (before 1.23)."""
        records = await kubelet_records.look(self.root / "pod-resources" / "kubelet.sock", self.root / "none")
        return None if records.allocatable is None else sorted(records.allocatable.get(resource, ()))


def plain(count: int) -> str:
    """Write the profile of so many healthy GPUs."""
    return f"resources:\n  {RESOURCE}:\n    gpus: {count}\n"


def machine(folder: Path) -> dict[str, str | int | list[float]]:
    """Describe where this runs, as far as figures depend on it; ``folder`` is where state directories are."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "scheduling": {os.SCHED_OTHER: "normal", os.SCHED_FIFO: "real time (FIFO)"}.get(
            os.sched_getscheduler(0), "other"
        ),
        "state directory on": file_system(folder),
        "load average": [round(one, 1) for one in os.getloadavg()],
    }


def _cpu() -> str:
    with suppress(OSError):
        for one in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = one.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def file_system(folder: Path) -> str:
    """Name the type of the file system that a folder is on, as /proc/mounts has it."""
    folder = folder.resolve()
    found = ""
    longest = -1
    for one in Path("/proc/mounts").read_text().splitlines():
        _, mounted, kind, *_ = one.split()
        if folder.is_relative_to(mounted) and len(mounted) >= longest:  # A later mount covers an earlier one.
            found, longest = kind, len(mounted)
    return found
