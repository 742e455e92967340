"""The handle and the process of an emulated kubelet: the protocol, its errors, and that nothing is ever left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.dev import _Node, checkpoint_warning, dev, why_unusable
from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.checkpoint import checksum
from gateway_lab.kubelets.devicemanager import DeviceManager
from gateway_lab.kubelets.kubelet import Demand, Faults, Kubelet, KubeletError, Totals


@pytest.fixture
async def kubelet(folder: Path) -> AsyncIterator[Kubelet]:
    async with await Kubelet.launch("1.28", folder) as kubelet:
        yield kubelet


async def test_it_says_which_kubelet_it_is(kubelet: Kubelet, folder: Path) -> None:
    about = await kubelet.about()
    assert (about.kubernetes, about.directory, about.pid) == ("v1.28", str(folder), kubelet.pid)
    assert (kubelet.kind, kubelet.version) == ("emulated", "1.28")


async def test_the_life_of_a_process(kubelet: Kubelet, folder: Path) -> None:
    await kubelet.start([Demand("pod", "example.com/gpu", 2)])
    assert (folder / "kubelet.sock").is_socket()
    assert await kubelet.totals() == Totals({}, {})
    assert await kubelet.pods() == {}
    assert await kubelet.registers() == {}
    admission = await kubelet.admit("pod")
    assert admission.devices == {}
    await kubelet.stop()
    await kubelet.start()
    assert "kubelet 1.28 serves v1beta1.Registration" in kubelet.log()


@pytest.mark.parametrize(
    ("op", "fields", "message"),
    [
        ("capacity", {}, "not started"),
        ("nonsense", {}, "not started"),
        ("version", {"bogus": 1}, "unknown field"),
        ("start", {"ready": "yes"}, "Expected `bool`"),
        ("start", {"gates": "Nonsense=true"}, "unrecognized feature gate: Nonsense"),
    ],
)
async def test_what_cannot_be_done_is_said(kubelet: Kubelet, op: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KubeletError, match=message) as failed:
        await kubelet.ask(op, **fields)
    assert failed.value.op == op
    await kubelet.about()  # the process goes on


async def test_a_second_start_is_refused(kubelet: Kubelet) -> None:
    await kubelet.start()
    with pytest.raises(KubeletError, match="already started"):
        await kubelet.start()


async def test_a_wait_that_takes_long_holds_up_nobody(kubelet: Kubelet) -> None:
    await kubelet.start()
    waiting = asyncio.create_task(kubelet.wait("example.com/gpu", 1, 30))
    await kubelet.totals()
    assert not waiting.done()
    await kubelet.kill()
    with pytest.raises(KubeletError, match="its log ends"):
        await waiting


async def test_a_wait_that_fails_says_what_was_seen(kubelet: Kubelet) -> None:
    await kubelet.start()
    with pytest.raises(KubeletError, match=r"expected 1 of example.com/gpu allocatable, saw allocatable {}"):
        await kubelet.wait("example.com/gpu", 1, 0.01)


async def test_faults_can_be_set_before_the_start(kubelet: Kubelet, folder: Path) -> None:
    await kubelet.fault(Faults(listen_late_ms=60_000))
    await kubelet.start()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_unix_connection(folder / "kubelet.sock")


@pytest.mark.parametrize("how", ["kill", "terminate"])
async def test_a_kubelet_that_ends_leaves_its_socket(folder: Path, how: str) -> None:
    async with await Kubelet.launch("1.9", folder) as kubelet:
        await kubelet.start()
        await (kubelet.kill() if how == "kill" else kubelet.terminate())
        assert not kubelet.alive
        assert (folder / "kubelet.sock").is_socket()
        with pytest.raises(KubeletError, match="the process has ended"):
            await kubelet.totals()


async def test_a_version_that_is_none_fails_with_the_reason(folder: Path) -> None:
    with pytest.raises(KubeletError, match=r"expected a kubelet version from 1.8 on"):
        await Kubelet.launch("1.7", folder)


async def test_a_binary_that_is_none_is_an_error(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await Kubelet.launch("1.9", folder, genuine=folder / "nothing")


async def test_a_launch_that_is_cancelled_leaves_no_process(folder: Path) -> None:
    before = _children()
    async with asyncio.timeout(10):
        launching = asyncio.create_task(Kubelet.launch("1.9", folder))
        while not _children() - before:  # noqa: ASYNC110  nothing tells of the birth of someone else's child
            await asyncio.sleep(0)
        launching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await launching
    assert not _children() - before


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


async def test_a_log_of_ones_own(folder: Path) -> None:
    log = folder / "log"
    async with await Kubelet.launch("1.9", folder, log=log) as kubelet:
        (folder / "dir").mkdir()
        await kubelet.start()
        assert log.exists() is False, "a kubelet of 1.9 deletes every file in its directory"
    other = Path(tempfile.mkdtemp(prefix="dpg-")) / "log"
    async with await Kubelet.launch("1.9", folder, log=other) as kubelet:
        await kubelet.start()
        assert other.read_text() == kubelet.log() != ""
    shutil.rmtree(other.parent)


@pytest.mark.parametrize(
    ("data", "genuine"),
    [
        ({"PodDeviceEntries": None, "RegisteredDevices": {}}, 3467439661),
        ({"PodDeviceEntries": None, "RegisteredDevices": None}, 1944006890),
        ({"PodDeviceEntries": [], "RegisteredDevices": {"b.c/d": ["z", "y"], "a": [], "n": None}}, 1634994433),
        (
            {
                "PodDeviceEntries": [
                    {
                        "PodUID": 'p"1é',
                        "ContainerName": "c",
                        "ResourceName": "r",
                        "DeviceIDs": {"-1": ["d2", "d1"], "10": ["x"], "2": ["k"]},
                        "AllocResp": "AQL/",
                    },
                    {
                        "PodUID": "p2",
                        "ContainerName": "c",
                        "ResourceName": "r",
                        "DeviceIDs": None,
                        "AllocResp": None,
                    },
                    {"PodUID": "p3", "ContainerName": "", "ResourceName": "", "DeviceIDs": {}, "AllocResp": ""},
                ],
                "RegisteredDevices": {"r": ["a"]},
            },
            3029866419,
        ),
    ],
)
def test_the_checksum_is_the_one_that_a_kubelet_computes(data: dict[str, object], genuine: int) -> None:
    """The numbers were printed by the kubelet's own hash over its own types."""
    assert checksum(data) == genuine


# -- gateway dev kubelet ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "refusal"),
    [
        ([], ""),
        (["kubelet_internal_checkpoint", "DEPRECATION", "sub/"], ""),
        (["thesis.tex"], "delete thesis.tex"),
        (["plugin.sock"], ""),
        (["a", "b", "c", "d"], "delete a, b, c, …"),
    ],
)
def test_a_directory_with_someones_files_is_refused(folder: Path, entries: list[str], refusal: str) -> None:
    for entry in entries:
        path = folder / entry
        if entry.endswith(".sock"):
            with socket.socket(socket.AF_UNIX) as left_behind:
                left_behind.bind(str(path))
        else:
            path.mkdir() if entry.endswith("/") else path.touch()
    assert refusal in why_unusable(folder)
    assert bool(refusal) is bool(why_unusable(folder))


async def test_a_directory_with_a_living_kubelet_is_refused(kubelet: Kubelet, folder: Path) -> None:
    await kubelet.start()
    assert "serves on" in why_unusable(folder)
    await kubelet.kill()
    assert not why_unusable(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--version", "1.7", "--socket-dir", "/nowhere"], "expected a kubelet version from 1.8 on"),
        (["--version", "1.9"], "Missing option '--socket-dir'"),
        (["--version", "1.9", "--socket-dir", "/proc/dp"], "cannot create it"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(dev, ["kubelet", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("old", "new", "pods", "way"),
    [
        pytest.param("1.28", "1.37", ["web"], "", id="the help's example"),
        pytest.param("1.9", "1.9", ["web"], "", id="the same version"),
        pytest.param("1.9", "1.37", [], "", id="no pod"),
        pytest.param("1.18", "1.30", ["web"], "", id="up, kept"),
        pytest.param("1.30", "1.18", ["web"], "devices of web", id="and down, lost"),
        pytest.param("1.37", "1.99", ["web"], "", id="a version to come"),
        pytest.param("1.9", "1.37", ["web", "db"], "devices of db, web", id="who loses them"),
        pytest.param("1.18", "1.32", ["web"], "`restart 1.30` first", id="a stop on the way"),
        pytest.param("1.9", "1.37", ["web"], "`remove` them first", id="no stop on the way"),
    ],
)
def test_a_hop_that_forgets_pods_is_told(old: str, new: str, pods: list[str], way: str) -> None:
    said = checkpoint_warning(old, new, pods)
    assert (way in said, bool(said)) == (True, bool(way)), said


async def test_a_restart_says_who_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    node = _Node(folder)
    monkeypatch.setattr(node, "say", said.append)
    try:
        await node.boot(behaviour("1.9"))
        assert node._kubelet is not None
        monkeypatch.setattr(node._kubelet, "pods", lambda: {"web": {"main": {"example.com/gpu": ["0"]}}})
        await node.obey("restart 1.37")
        await node.obey("restart 1.9")
    finally:
        await node.halt()
    assert [line for line in said if "warning" in line] == [checkpoint_warning("1.9", "1.37", ["web"])]


async def test_pods_outlive_a_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    start = DeviceManager.start

    async def told(manager: DeviceManager, pods: Sequence[Demand] = ()) -> None:
        started.append([one.pod for one in pods])
        await start(manager, pods)

    monkeypatch.setattr(DeviceManager, "start", told)
    node = _Node(folder)
    try:
        await node.boot(behaviour("1.37"))
        for line in ("admit web example.com/gpu 1", "admit db example.com/gpu 1", "remove db", "restart"):
            await node.obey(line)
    finally:
        await node.halt()
    assert started == [[], ["web"]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("admit web example.com/gpu x", "unknown command 'admit web example.com/gpu x'"),
        ("admit web example.com/gpu -1", "unknown command"),
        ("remove web", "no pod web was admitted"),
        ("start web", 'of a pod "web" is active'),
        ("restart 1.7", "expected a kubelet version from 1.8 on"),
    ],
)
async def test_a_wrong_command_is_told_what_was_expected(
    line: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    node = _Node(folder)
    monkeypatch.setattr(node, "say", said.append)
    try:
        await node.boot(behaviour("1.37"))
        assert await node.obey(line)
    finally:
        await node.halt()
    assert [line for line in said if words in line]


def test_the_helps_example_keeps_its_pods() -> None:
    result = CliRunner().invoke(dev, ["kubelet", "--help"])
    [old] = re.findall(r"--version (1\.\d+) ", result.output)
    [new] = re.findall(r", restart (1\.\d+),", result.output)
    assert checkpoint_warning(old, new, ["web"]) == ""


async def test_a_person_can_play_with_it(folder: Path) -> None:
    code = "from gateway.cli.dev import dev; dev()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "kubelet", "--version", "1.9", "--socket-dir", str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            for command, answer in (
                ("", "kubelet 1.9 serves deviceplugin.Registration"),
                ("capacity", "no resource is registered"),
                (
                    "admit pod example.com/gpu 1",
                    "pod pod runs with no device: no plugin has registered example.com/gpu (see `capacity`)",
                ),
                ("pods", "no pod holds a device"),
                ("admit pod", "unknown command"),
                ("restart 1.99", "1.99 is newer than any known here"),
                ("help", "kubelet 1.99 serves v1beta1.Registration"),
                ("admit 'x", "No closing quotation"),
            ):
                if command:
                    process.stdin.write(f"{command}\n".encode())
                while answer.encode() not in (line := await process.stdout.readline()):
                    assert line, f"{command}: it ended without saying {answer!r}"
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert not (folder / "kubelet.sock").exists()
