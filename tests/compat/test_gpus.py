"""The GPU model end to end: the daemon as a process, on NVML, under the names and with the file that people bring along.

NVML is the fake library that the genuine pynvml loads; the kubelets are emulated, and genuine where they are built by default.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets.build import built
from gateway_lab.kubelets.kubelet import Kubelet
from tests.compat.conftest import GENUINE
from tests.fakes.nvml import World, dgx

GPU = "nvidia.com/gpu"
NVIDIA = (sys.executable, "-c", "from gateway.__main__ import nvidia; nvidia()")
"""The entry point ``nvidia-device-plugin``."""
NVIDIA_AND_PROC = (
    sys.executable,
    "-c",
    (
        "import os, pathlib; from devices.gpu.nvidia.backend import NvidiaBackend; from gateway.__main__ import nvidia; "
        "NvidiaBackend.__init__.__kwdefaults__['proc'] = pathlib.Path(os.environ['PROC']); nvidia()"
    ),
)
"""The same on a machine whose ``/proc`` is the folder in PROC: the driver tells there of the nodes of MIG instances."""
GATEWAY = (sys.executable, "-m", "gateway")
KUBELETS = [(version, "emulated") for version in ("1.8", "1.9", "1.10", "1.28", "1.37")] + [
    (version, "genuine") for version in GENUINE
]


@dataclass
class Node:
    """A kubelet, a daemon on its directory, and the world that NVML shows."""

    root: Path
    kubelet: Kubelet
    daemon: GatewayProcess
    world: World

    async def allocatable(self, resource: str, count: int) -> None:
        await self.kubelet.wait(resource, count)

    async def pod(self, name: str, count: int, resource: str = GPU) -> dict[str, str]:
        """Start a pod; give the variables of its container."""
        return dict((await self.kubelet.admit(name, resource, count)).answer.envs)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*GATEWAY, *words, "--state-dir", str(self.root / "state")],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@asynccontextmanager
async def node(
    monkeypatch: pytest.MonkeyPatch,
    version: str = "1.37",
    kind: str = "emulated",
    options: Sequence[str] = (),
    command: Sequence[str] = NVIDIA,
) -> AsyncIterator[Node]:
    with TemporaryDirectory(prefix="dpg-") as folder:
        root = Path(folder)
        world = dgx(root / "world")
        for name, value in world.env().items():
            monkeypatch.setenv(name, value)
        sockets = root / "device-plugins"
        sockets.mkdir()
        async with await Kubelet.launch(version, sockets, built(version) if kind == "genuine" else None) as kubelet:
            await kubelet.start()
            folders = ("--socket-dir", str(sockets), "--state-dir", str(root / "state"), "--log-format", "json")
            async with await GatewayProcess.launch([*command, *folders, *options]) as daemon:
                yield Node(root, kubelet, daemon, world)


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        pytest.param(version, kind, id=f"{version}-{kind}", marks=[pytest.mark.genuine] if kind == "genuine" else [])
        for version, kind in KUBELETS
    ],
)
async def test_a_pod_gets_gpus_of_nvml(version: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(monkeypatch, version, kind) as one:
        await one.allocatable(GPU, 8)
        told = (await one.pod("a", 2))["NVIDIA_VISIBLE_DEVICES"].split(",")
        assert len(told) == 2
        assert set(told) <= {gpu.uuid for gpu in one.world.gpus}


async def test_an_error_of_the_hardware_reaches_the_kubelet_and_one_of_a_program_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node(monkeypatch) as one:
        await one.allocatable(GPU, 8)
        one.world.event(2, 31)  # a program's page fault
        one.world.event(3, 79)  # the GPU fell off the bus
        await one.allocatable(GPU, 7)
        rows = json.loads(one.ask("devices", "--json").stdout)
        ill = {row["id"]: row["reason"] for row in rows["devices"] if row["state"] != "healthy"}
        assert set(ill) == {one.world.gpus[3].uuid}
        assert "79" in ill[one.world.gpus[3].uuid]


async def test_a_mig_change_is_followed_without_a_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROC", str(tmp_path))
    async with node(monkeypatch, options=("--mig-strategy=mixed",), command=NVIDIA_AND_PROC) as one:
        await one.allocatable(GPU, 8)
        one.world.mig(0, "1g.10gb", "1g.10gb", "3g.40gb")
        one.world.capabilities(tmp_path)
        one.world.write()
        await one.allocatable("nvidia.com/mig-1g.10gb", 2)
        await one.allocatable("nvidia.com/mig-3g.40gb", 1)
        await one.allocatable(GPU, 7)
        told = (await one.pod("small", 1, "nvidia.com/mig-3g.40gb"))["NVIDIA_VISIBLE_DEVICES"]
        assert told.startswith("MIG-")
        assert len(one.daemon.lines("registered", resource=GPU)) == 1


async def test_released_gpus_are_given_to_nobody_until_they_are_acquired(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(monkeypatch) as one:
        await one.allocatable(GPU, 8)
        uuid = one.world.gpus[5].uuid
        assert uuid in (let_go := one.ask("release", uuid)).stdout, let_go
        states = {row["id"]: row["state"] for row in json.loads(one.ask("devices", "--json").stdout)["devices"]}
        assert {device: state for device, state in states.items() if state != "healthy"} == {uuid: "released"}
        await one.allocatable(GPU, 7)
        assert uuid in one.ask("acquire", uuid).stdout
        await one.allocatable(GPU, 8)
        states = {row["id"]: row["state"] for row in json.loads(one.ask("devices", "--json").stdout)["devices"]}
        assert set(states.values()) == {"healthy"}


@pytest.mark.parametrize("told", ["by SIGHUP", "by the edit alone"])
async def test_an_edited_file_is_taken_over_and_a_bad_one_is_not(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the resource that doesn't change stays open: it is registered once."""
    with TemporaryDirectory(prefix="dpg-") as folder:
        file = Path(folder) / "config.yaml"
        sliced = "version: v1\nsharing: {{timeSlicing: {{resources: [{{name: nvidia.com/gpu, replicas: {}}}]}}}}\n"
        file.write_text(sliced.format(2))
        options = ("--config-file", str(file), "--backend", "simulated", "--simulate", "two-resources")
        async with node(monkeypatch, options=options, command=GATEWAY) as one:
            await one.allocatable(GPU, 8)
            await one.allocatable("amd.com/gpu", 2)
            for text, count in ((sliced.format(1), 8), (sliced.format(3), 12), ("version: v1\n", 4)):
                file.write_text(text)
                if told == "by SIGHUP":
                    os.kill(one.daemon.pid, signal.SIGHUP)
                if count == 8:
                    said = await one.daemon.wait_for("configuration rejected: the last good one stays in force")
                    assert "must be 2 to 65536" in said["reason"]
                await one.allocatable(GPU, count)
            assert len(one.daemon.lines("registered", resource="amd.com/gpu")) == 1


async def test_a_bad_setting_ends_it_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="dpg-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text("version: v1\nflags:\n  migStrategy: some\n")
        async with node(monkeypatch, options=("--config-file", str(file))) as one:
            assert await one.daemon.wait() == 2
            assert f"{file}, line 3" in one.daemon.log()


async def test_without_a_driver_it_ends_where_the_operator_wants_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAIL_ON_INIT_ERROR is true unless it is said otherwise, as with NVIDIA's plugin."""
    async with node(monkeypatch) as one:
        await one.allocatable(GPU, 8)
        one.world.fails("nvmlInit", 9)
        one.world.write()
        folders = ("--socket-dir", str(one.root / "device-plugins"), "--state-dir", str(one.root / "other"))
        async with await GatewayProcess.launch([*NVIDIA, *folders, "--log-format", "json"]) as second:
            assert await second.wait() == 1
            assert "driver" in second.log()
