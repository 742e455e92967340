"""The genuine node, as far as it needs neither root nor Kubernetes: whether a machine can be one, and how its daemons are held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway_lab.node import machine
from gateway_lab.node.cluster import VARIABLE, Daemon, Node, NodeError
from gateway_lab.node.machine import MachineError

# --- whether a node can run


@pytest.mark.parametrize(
    ("command_line", "program"),
    [
        (b"/usr/bin/kubelet\0--config=/var/lib/kubelet/config.yaml\0", "kubelet"),
        (b"kubelet\0", "kubelet"),
        (b"/usr/local/bin/k3s\0server\0", "k3s"),
        (b"/cache/1.36-00/kubelet\0-dir\0/tmp/x\0", ""),
        (b"/cache/1.12-00/kubelet\0-v=5\0-dir\0/tmp/x\0", ""),
        (b"/usr/bin/python3\0kubelet\0", ""),
        (b"", ""),
    ],
)
def test_a_kubelet_makes_a_machine_a_node_and_a_device_manager_of_ours_does_not(
    command_line: bytes, program: str
) -> None:
    assert machine._node_program(command_line) == program


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MachineError, match="expected to be root"):
        machine.check()


def test_missing_commands_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "nsenter" else f"/bin/{tool}")
    with pytest.raises(MachineError, match="expected the commands nsenter "):
        machine.check()


def test_a_second_node_is_told_whose_the_first_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_FOLDERS", tmp_path)
    folder = tmp_path / f"{machine._PREFIX}x"
    folder.mkdir()
    folder.joinpath(machine._OWNER).write_text("process 7 since 12:00:00: pytest")
    with (
        machine._lock(),
        pytest.raises(MachineError, match=r"there is one: process 7 .*: pytest\. Wait"),
        machine._lock(),
    ):
        pass
    with machine._lock():
        pass


def test_a_process_that_is_on_no_node_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NodeError, match=r"python -m gateway_lab\.node -- COMMAND"):
        Node.here()


# --- daemons ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain(Node):
    """A node whose view of the file system is everyone's."""

    @property
    def inside(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Plain]:
    for name in ("run", "logs", "root/opt/kubernetes/1.9", "root/opt/kubernetes/1.10"):
        tmp_path.joinpath(name).mkdir(parents=True)
    yield Plain(tmp_path)
    for path in tmp_path.glob("run/*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


async def test_a_daemon_is_known_to_all_holders_and_ended_by_any(node: Plain) -> None:
    up = node.folder / "up"
    os.mkfifo(up)

    def held() -> Daemon:
        return Daemon(node, "sleeper", lambda: ["sh", "-c", f"echo hello; echo >{up}; exec sleep 60"])

    assert held().pid is None
    await held().start()
    async with asyncio.timeout(10):
        await asyncio.to_thread(up.read_text)
    pid = held().pid
    assert pid is not None
    assert os.getsid(pid) == pid
    with pytest.raises(NodeError, match=f"expected sleeper not to run, but it does: process {pid}"):
        await held().start()
    await held().stop()
    assert not held().alive
    await held().stop()
    assert held().log() == "hello"


async def test_a_daemon_that_ignores_its_signal_is_killed_and_told(node: Plain) -> None:
    heard = node.folder / "heard"
    os.mkfifo(heard)
    script = f"trap '' TERM; echo deaf; echo deaf >{heard}; while :; do sleep 0.05; done"
    stubborn = Daemon(node, "stubborn", lambda: ["sh", "-c", script])
    await stubborn.start()
    async with asyncio.timeout(10):
        await asyncio.to_thread(heard.read_text)
    with pytest.raises(NodeError, match=r"(?s)still there 0.2 s after SIGTERM; it has been killed.*ends:\ndeaf"):
        await stubborn.stop(seconds=0.2)
    assert not stubborn.alive
