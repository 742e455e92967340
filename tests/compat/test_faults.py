"""A few faults of each kind, struck for real on kubelets of each dialect; `make gauntlet` strikes them all, and mixes them."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_lab.kubelets.build import built
from gateway_lab.namespaces import Namespaces, NamespacesError
from gateway_lab.trials.faults import FAULTS, alone
from gateway_lab.trials.gauntlet import Player, Step


@pytest.mark.parametrize(
    ("fault", "version", "kind"),
    [
        ("stream-cut", "1.9", "emulated"),  # nothing but the stream shows it: kubelets before 1.20 tell no records
        ("gateway-absent", "1.37", "emulated"),
        ("name-removed", "1.28", "emulated"),
        ("no-descriptors", "1.20", "emulated"),
        pytest.param("disk-full", "1.37", "emulated", marks=pytest.mark.root),
        pytest.param("no-inotify", "1.28", "emulated", marks=pytest.mark.root),
        pytest.param("link-refused", "1.8", "emulated", marks=pytest.mark.root),
        ("plugin-fewer", "1.37", "emulated"),
        pytest.param("half-open", "1.28", "genuine", marks=pytest.mark.genuine),
        pytest.param("two-kubelets", "1.9", "genuine", marks=pytest.mark.genuine),
    ],
)
async def test_a_node_is_right_again(fault: str, version: str, kind: str) -> None:
    outcome = await alone(FAULTS[fault], version, built if kind == "genuine" else lambda _: None)
    if outcome.status == "not applicable":
        pytest.skip(outcome.reason)
    assert (outcome.kind, outcome.status) == (kind, "passed"), "\n".join((outcome.reason, *outcome.log))


async def test_a_script_is_played_to_its_end() -> None:
    steps = [
        Step(0, "kubelet", kubelet="1.37 emulated"),
        Step(1, "admit", 1),
        Step(1, "device-ill", 5),
        Step(1, "kubelet-killed"),
        Step(1, "admit", 2),
        Step(2, "remove", 0),
        Step(2, "kubelet", kubelet="1.28 emulated"),
        Step(2, "stream-cut"),
    ]
    said: list[str] = []
    played = await Player({}, said.append).play(steps)
    assert (played.broke, played.rounds) == ("", 3), "\n".join((played.broke, *played.log))
    assert played.struck == {"device-ill": 1, "kubelet-killed": 1, "stream-cut": 1}
    assert set(played.worst) == {"stream-cut"}  # the other two were struck together
    assert [line.split(":")[0].strip() for line in said] == ["round 0, 1.37", "round 1, 1.37", "round 2, 1.28"]
    [sample] = {type(one) for one in played.samples}
    assert all(one.tasks > 0 and one.descriptors > 0 and one.memory > 1 for one in played.samples), sample


async def test_a_kubelet_that_is_not_built_is_asked_for() -> None:
    played = await Player({}, lambda _: None).play([Step(0, "kubelet", kubelet="1.11 genuine")])
    assert "gateway_lab.kubelets.build 1.11" in played.broke


# Namespaces of a node's own.


@pytest.fixture
async def namespaces() -> AsyncIterator[Namespaces]:
    try:
        made = await Namespaces.open()
    except NamespacesError as error:
        pytest.skip(str(error))
    async with made:
        yield made


@pytest.mark.root
async def test_what_is_mounted_inside_is_only_there(namespaces: Namespaces, tmp_path: Path) -> None:
    await namespaces.run("mount", "-t", "tmpfs", "-o", "size=64k", "state", str(tmp_path))
    (namespaces.inside(tmp_path) / "file").write_text("inside")
    assert not (tmp_path / "file").exists()
    with pytest.raises(OSError, match="No space left"):
        (namespaces.inside(tmp_path) / "filler").write_bytes(b"\0" * 100_000)


@pytest.mark.root
async def test_a_limit_holds_for_who_is_inside(namespaces: Namespaces) -> None:
    before = await _limit()
    await namespaces.limit("max_inotify_instances", 0)
    assert await _limit(*namespaces.prefix) == b"0\n"
    assert await _limit() == before


async def _limit(*prefix: str) -> bytes:
    command = (*prefix, "cat", "/proc/sys/user/max_inotify_instances")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    return told


@pytest.mark.root
async def test_a_mount_on_a_folder_refuses_links_out_of_it(namespaces: Namespaces, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    await namespaces.run("mount", "--bind", str(folder), str(folder))
    with pytest.raises(NamespacesError, match=os.strerror(errno.EXDEV)):
        await namespaces.run("ln", str(folder / "file"), str(tmp_path / "link"))
    await namespaces.run("umount", "--lazy", str(folder))
    await namespaces.run("ln", str(folder / "file"), str(tmp_path / "link"))
