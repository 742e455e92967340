"""Files that an operator edits: what is wrong in them changes nothing, is told, and is never quoted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.node import GPU, Gateway, Node

WRONG = (
    "sharing: [",
    "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}",
    "sharing: {timeSlicing: {resources: [{name: gpu, replicas: '2'}]}}",
    "sharing: {timeSlicing: {resources: []}}",
    "sharing: {timeSlicing: {resources: [{replicas: 2}]}}",
    "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}",
    "version: v2",
    "flags: {migStrategy: mixd}",
    "flags: {plugin: {deviceListStrategy: [envvar, nothing]}}",
    "gateway: {healthRecovery: maybe}",
    "gateway: {devices: [{resource: vendor.com/x, paths: [/etc/passwd]}]}",
    "resources: {gpus: [{pattern: '*', name: 'bad name'}]}\ngateway: {honourResourceNames: true}",
)


def sharing(replicas: int, name: str = "gpu") -> str:
    """Return the text of a configuration that shares a resource."""
    return json.dumps({"sharing": {"timeSlicing": {"resources": [{"name": name, "replicas": replicas}]}}})


async def ready(node: Node, text: str, count: int, *options: str, **environment: str) -> tuple[Gateway, Path]:
    """Start a gateway with two simulated GPUs and a configuration file."""
    path = node.folder / "config.yaml"
    path.write_text(text)
    if not node.profile.exists():
        node.simulate({GPU: {"gpus": 2}})
    await node.start_kubelet()
    one = node.gateway("--config-file", str(path), *options, environment=environment)
    await node.allocatable_is(count)
    return one, path


def renamed(path: Path, text: str) -> None:
    """Replace a file as editors do."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


async def test_a_wrong_edit_changes_nothing_and_is_told(node: Node) -> None:
    one, path = await ready(node, sharing(2), 4)
    for text in WRONG:
        renamed(path, text)
        await node.pass_time(5)
        assert node.allocatable() == 4, text
        assert str(path) in (await one.status())["configuration"]["error"], text
        assert (await one.metrics())["device_plugin_gateway_config_last_reload_successful"] == 0, text
    assert await one.is_ready()
    renamed(path, sharing(3))
    await node.allocatable_is(6, seconds=1)
    assert (await one.status())["configuration"].get("error", "") == ""


async def test_a_file_that_is_emptied_for_a_moment_changes_nothing(node: Node) -> None:
    _, path = await ready(node, sharing(2), 4)
    path.write_text("")
    await node.pass_time(0.5)
    assert node.allocatable() == 4
    path.write_text(sharing(3))
    await node.allocatable_is(6, seconds=3)
    path.write_text("")
    await node.allocatable_is(2, seconds=5)


@pytest.mark.parametrize("strict", [False, True])
async def test_an_unknown_key_is_told_or_refused(node: Node, strict: bool) -> None:
    text = json.dumps({"flags": {"migStategy": "single"}})
    if not strict:
        one, _ = await ready(node, text, 2)
        assert "did you mean" in str(one.said("configuration"))
        return
    path = node.folder / "config.yaml"
    path.write_text(text)
    one = node.gateway("--config-file", str(path), "--strict-config")
    await node.until(lambda: not one.alive, "its end")
    assert one.process.ended.result() == 2


async def test_a_file_of_something_else_is_not_quoted(node: Node) -> None:
    one, path = await ready(node, "version: v1", 2)
    for text in ("password: hunter2", "kind: Secret\nmetadata: {}\ndata: {it: hunter2}", "hunter2"):
        renamed(path, text)
        await node.pass_time(5)
        assert node.allocatable() == 2
        assert "hunter2" not in str(one.process.log)


async def test_a_wrong_profile_keeps_the_gpus_of_before(node: Node) -> None:
    node.simulate({GPU: {"gpus": 3}})
    one = await node.served(3)
    node.profile.write_text("resources: {nvidia.com/gpu: {gpus: many}}")
    await node.pass_time(10)
    assert node.allocatable() == 3
    hindrances = str((await one.status())["hindrances"])
    assert "profile rejected, until it is corrected the one before stays in force" in hindrances
    node.simulate({GPU: {"gpus": 2}})
    await node.allocatable_is(2)
    assert not (await one.status()).get("hindrances")
