"""The configuration file while the gateway runs: which changes of it are edits, what is answered, and what never counts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.contract.node import GPU, Gateway, Node, gpus

REJECTED = "configuration rejected: the last good one stays in force"
UNCHANGED = "configuration read: nothing changed"


def shared(replicas: int, **flags: Any) -> str:
    """Return the text of a configuration that shares each GPU."""
    entry = {"name": GPU, "replicas": replicas}
    return json.dumps({"version": "v1", "flags": flags, "sharing": {"timeSlicing": {"resources": [entry]}}})


async def ready(node: Node, *options: str) -> tuple[Gateway, Path]:
    """Start a gateway that shares each of two GPUs twice; return it and its configuration file."""
    node.shared = (GPU,)
    file = node.folder / "config.yaml"
    file.write_text(shared(2))
    node.simulate(gpus(0, 1))
    one = await node.served(4, "--config-file", str(file), *options)
    await node.pass_time(5)
    return one, file


def hang_up(one: Gateway) -> None:
    """Send it SIGHUP."""
    one.process.terminate(signal.SIGHUP)


async def test_a_file_that_is_emptied_before_it_is_written_is_no_edit_and_one_that_stays_empty_is(node: Node) -> None:
    one, file = await ready(node)
    for _ in range(2):
        file.write_text("")
        await node.pass_time(0.3)
        file.write_text(shared(2))
        await node.pass_time(10)
    assert not one.said("configuration adopted")
    assert node.allocatable() == 4
    file.write_text("")
    await node.allocatable_is(2, seconds=120)
    file.write_text(shared(3))
    await node.allocatable_is(6)
    file.write_text("")
    hang_up(one)
    await node.allocatable_is(2, seconds=1)


async def test_a_file_is_followed_also_when_its_folder_is_made_anew(node: Node) -> None:
    node.shared = (GPU,)
    folder = node.folder / "mounted"
    folder.mkdir()
    (folder / "config.yaml").write_text(shared(2))
    node.simulate(gpus(0, 1))
    one = await node.served(4, "--config-file", str(folder / "config.yaml"))
    for number in (3, 4):
        folder.rename(node.folder / f"away-{number}")
        await node.pass_time(20)
        folder.mkdir()
        (folder / "config.yaml").write_text(shared(number))
        await node.allocatable_is(2 * number)
        await node.pass_time(20)
    (folder / "config.yaml").write_text(shared(5))
    await node.allocatable_is(10, seconds=1)  # It is watched, not only looked at now and then.
    (folder / "another").write_text("nonsense")
    await node.pass_time(20)
    assert len(one.said("configuration adopted")) == 3


async def test_a_hangup_is_answered_also_where_nothing_changed(node: Node) -> None:
    one, file = await ready(node)
    hang_up(one)
    await node.until(lambda: one.said(UNCHANGED), "the answer", 1)
    file.write_text(f"{shared(2)}\n# a word")
    await node.until(lambda: len(one.said(UNCHANGED)) == 2, "the answer")
    assert not one.said("configuration adopted")


async def test_a_wrong_file_is_complained_of_once_and_again_when_somebody_asks(node: Node) -> None:
    one, file = await ready(node)
    file.write_text("flags: [")
    await node.pass_time(100)
    assert len(one.said(REJECTED)) == 1
    hang_up(one)
    await node.until(lambda: len(one.said(REJECTED)) == 2, "the complaint", 1)
    file.write_text("flags: [")  # The same again makes it no better.
    await node.pass_time(20)
    assert "not YAML" in (await one.status())["configuration"]["error"]
    file.unlink()
    await node.pass_time(100)
    assert len(one.said(REJECTED)) == 3
    file.write_text("flags: [")
    await node.pass_time(10)
    file.write_text(shared(3))
    await node.allocatable_is(6)


async def test_no_edit_beats_the_command_line(node: Node) -> None:
    node.simulate(gpus(0, 1))
    one, file = await ready(node, "--mig-strategy", "none")
    node.simulate(gpus(0, 1, mig={"GPU-0": ["1g.10gb"]}))
    file.write_text(shared(3, migStrategy="mixed"))
    await node.allocatable_is(6)
    await node.pass_time(10)
    assert [one["name"] for one in (await one.status())["resources"]] == [GPU]


async def test_an_unknown_key_is_refused_in_an_edit_where_the_start_refuses_it(node: Node) -> None:
    strict, file = await ready(node, "--strict-config")
    edit = {**json.loads(shared(3)), "unknown": 1}
    file.write_text(json.dumps(edit))
    await node.until(lambda: strict.said(REJECTED), "the complaint")
    assert node.allocatable() == 4
    await strict.terminate()
    file.write_text(shared(2))
    node.gateway("--config-file", str(file))
    await node.allocatable_is(4)
    file.write_text(json.dumps(edit))
    await node.allocatable_is(6)


@pytest.mark.parametrize("file", ["a file", "no file"])
async def test_a_hangup_does_not_cut_an_end_short(node: Node, file: str) -> None:
    if file == "a file":
        one, _ = await ready(node)
    else:
        one = await node.served(8)
        hang_up(one)
        await node.until(lambda: one.said("SIGHUP, but there is nothing to reload: no --config-file was given"), "it")
    one.process.terminate()
    for _ in range(20):
        await node.pass_time(0.001)
        if one.alive:
            hang_up(one)
    assert await one.process.ended == 0
