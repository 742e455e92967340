"""The genuine node, as far as it needs neither root nor Kubernetes: what goes into it, and how its daemons are held."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway_lab.kubelets.build import BuildError, Go
from gateway_lab.node import __main__ as runner
from gateway_lab.node import build, image, machine, root
from gateway_lab.node.cluster import VARIABLE, Daemon, Node, NodeError
from gateway_lab.node.machine import MachineError
from gateway_lab.node.root import RootError

# --- what is built ----------------------------------------------------------------------------------------------------------


def test_every_kubelet_and_the_newest_ones_control_plane_are_built() -> None:
    assert build.versions() == ("1.32", "1.36", "1.37")
    for version in build.versions():
        text = (build._SOURCES / version / "go.mod").read_text()
        tools = {
            name
            for block in re.findall(r"^tool (?:\(([^)]+)\)|(.+))$", text, re.MULTILINE)
            for name in "".join(block).split()
        }
        commands = {"kubelet"}
        if version == build.newest():
            commands |= {"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"}
        assert tools == {f"k8s.io/kubernetes/cmd/{name}" for name in commands}
        assert build._release(version).startswith(f"v{version}.")


def test_the_binaries_place_changes_with_go_and_with_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "1.40"
    folder.mkdir()
    folder.joinpath("go.mod").write_text("require k8s.io/kubernetes v1.40.2\n")
    folder.joinpath("go.sum").write_text("k8s.io/kubernetes v1.40.2 h1:a=\n")
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    first = build._folder("1.40", "go1.26.6")
    assert build._folder("1.40", "go1.26.7") != first
    folder.joinpath("go.sum").write_text("k8s.io/kubernetes v1.40.2 h1:b=\n")
    assert build._folder("1.40", "go1.26.6") != first


@pytest.mark.parametrize(
    ("kubelets", "built"),
    [
        (["1.32"], {"1.32", "1.37"}),
        (["1.37"], {"1.37"}),
        (["1.37", "1.36"], {"1.36", "1.37"}),
        ([], {"1.32", "1.36", "1.37"}),
    ],
)
def test_only_the_kubelets_that_are_wanted_are_built_and_the_control_plane(
    kubelets: list[str], built: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "machine_go", lambda: Go(path=tmp_path / "go", version="go1.26.6"))
    monkeypatch.setattr(build, "_build", lambda version, *_: made.append(version))
    monkeypatch.setattr(machine, "check", lambda: None)
    monkeypatch.setattr(runner, "root", lambda **_: tmp_path)
    assert runner.main(["--make", *(f"--kubelet={one}" for one in kubelets)]) == 0
    assert {*made} == built


def test_sources_that_are_not_there_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    with pytest.raises(BuildError, match=r"expected .*go\.mod, found none"):
        build.versions()


# --- the root file system ---------------------------------------------------------------------------------------------------


def test_the_list_of_packages_names_the_release_and_what_the_node_runs() -> None:
    release, packages = root._wanted(root._LIST.read_text())
    assert release == "trixie"
    assert {"containerd", "runc", "etcd-server", "busybox-static"} <= set(packages)


@pytest.mark.parametrize("text", ["containerd\n", "release: a\nrelease: b\n"])
def test_a_list_without_one_release_is_refused(text: str) -> None:
    with pytest.raises(RootError, match="expected one line `release: NAME`"):
        root._wanted(text)


@pytest.mark.parametrize(
    ("line", "carried"),
    [
        ('Acquire::http::Proxy "http://proxy:3128";', True),
        ('Acquire::Check-Valid-Until "false";', True),
        ('Acquire::Languages "";', False),
        ('Acquire::Languages:: "";', False),
        ('Acquire::IndexTargets::deb::Contents "x";', False),
        ('APT::Architecture "amd64";', False),
    ],
)
def test_only_settings_of_the_way_to_the_mirrors_are_carried(line: str, carried: bool) -> None:
    assert bool(root._OURS_TO_CARRY.match(line)) == carried


def test_an_image_has_busybox_under_the_names_of_all_its_commands(tmp_path: Path) -> None:
    program = tmp_path / "busybox"
    program.write_text("#!/bin/sh\necho busybox sh sleep\n")
    program.chmod(0o755)
    image.busybox(program, image.PAUSE, tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as archive:
        read = {member.name: archive.extractfile(member) for member in archive}
        content = {name: file.read() for name, file in read.items() if file}
    assert json.loads(content["manifest.json"])[0]["RepoTags"] == ["localhost/pause:1"]
    assert json.loads(content["config.json"])["config"]["Cmd"][0] == "/bin/sleep"
    with tarfile.open(fileobj=io.BytesIO(content["layer.tar"])) as layer:
        assert {member.name: member.linkname for member in layer if member.issym()} == {
            "bin/sh": "busybox",
            "bin/sleep": "busybox",
        }


# --- whether a node can run -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("waited", "status"), [(0, 0), (3 << 8, 3), (signal.SIGKILL, 137)])
def test_an_end_by_a_signal_has_a_shells_status(waited: int, status: int) -> None:
    assert machine._status(waited) == status


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


def test_kubelets_are_ordered_by_number_and_the_newest_is_the_first_to_run(node: Plain) -> None:
    assert node.kubelet_versions == ("1.9", "1.10")
    assert node.kubelet.version == "1.10"


async def test_an_unknown_kubelet_is_refused(node: Plain) -> None:
    with pytest.raises(NodeError, match=r"expected a kubelet out of 1\.9, 1\.10, got '1\.11'"):
        await node.kubelet.start("1.11")
    assert node.kubelet.version == "1.10"
