"""The configuration file: an edit counts at once, a wrong one changes nothing, and what beats what."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

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


def mounted(path: Path, text: str) -> None:
    """Replace a file as the kubelet does in a volume of a ConfigMap."""
    folder = path.parent / f"..{len(list(path.parent.iterdir()))}"
    folder.mkdir()
    (folder / path.name).write_text(text)
    link = path.parent / "..data_tmp"
    link.symlink_to(folder.name)
    link.replace(path.parent / "..data")


async def test_an_edit_counts_at_once_however_it_is_made(node: Node) -> None:
    one, path = await ready(node, sharing(2), 4)
    renamed(path, sharing(3))
    await node.allocatable_is(6, seconds=1)
    path.write_text(sharing(4))
    await node.allocatable_is(8, seconds=3)
    path.unlink()
    await node.pass_time(30)
    assert node.allocatable() == 8
    assert "can't be read" in (await one.status())["configuration"]["error"]
    path.write_text(sharing(2))
    await node.allocatable_is(4, seconds=3)
    assert (await one.status())["configuration"].get("error", "") == ""


async def test_a_swap_of_a_mounted_configmap_counts_at_once(node: Node) -> None:
    folder = node.folder / "volume"
    folder.mkdir()
    mounted(folder / "config", sharing(2))
    (folder / "config").symlink_to("..data/config")
    node.simulate({GPU: {"gpus": 2}})
    await node.start_kubelet()
    node.gateway("--config-file", str(folder / "config"))
    await node.allocatable_is(4)
    mounted(folder / "config", sharing(5))
    await node.allocatable_is(10, seconds=1)


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


@pytest.mark.parametrize("text", WRONG)
async def test_a_wrong_file_ends_the_start_with_its_line(node: Node, text: str) -> None:
    path = node.folder / "config.yaml"
    path.write_text(text)
    await node.start_kubelet()
    one = node.gateway("--config-file", str(path))
    await node.until(lambda: not one.alive, "its end")
    assert one.process.ended.result() == 78
    assert "config.yaml" in str(one.process.log)


async def test_a_file_that_is_emptied_for_a_moment_changes_nothing(node: Node) -> None:
    _, path = await ready(node, sharing(2), 4)
    path.write_text("")
    await node.pass_time(0.5)
    assert node.allocatable() == 4
    path.write_text(sharing(3))
    await node.allocatable_is(6, seconds=3)
    path.write_text("")
    await node.allocatable_is(2, seconds=5)


async def test_sighup_reads_the_file_again_and_never_ends_the_gateway(node: Node) -> None:
    one, _ = await ready(node, sharing(2), 4)
    one.process.terminate(signal.SIGHUP)
    await node.pass_time(1)
    assert one.said("configuration read: nothing changed")
    other = node.gateway()
    await node.until(lambda: other.said("registered"), "its registration")
    other.process.terminate(signal.SIGHUP)
    await node.pass_time(1)
    assert other.alive


@pytest.mark.parametrize(
    ("option", "variable", "in_file", "index"),
    [
        ("uuid", "index", "index", False),
        ("index", "uuid", "uuid", True),
        (None, "index", "uuid", True),
        (None, "uuid", "index", False),
        (None, None, "index", True),
        (None, None, None, False),
    ],
)
async def test_the_command_line_beats_the_environment_and_that_the_file(
    node: Node, option: str | None, variable: str | None, in_file: str | None, index: bool
) -> None:
    text = json.dumps({"flags": {"plugin": {"deviceIDStrategy": in_file} if in_file else {}}})
    options = [f"--device-id-strategy={option}"] if option else []
    environment = {"DEVICE_ID_STRATEGY": variable} if variable else {}
    _, path = await ready(node, text, 2, *options, **environment)
    for wait in (0, 5):  # An edit doesn't change that.
        await node.pass_time(wait)
        async with node.plugin() as plugin:
            ids = sorted(device.id for device in await plugin.first_list())
            envs = (await plugin.allocate(ids[0])).envs
            assert envs["NVIDIA_VISIBLE_DEVICES"] in ({"0", "1"} if index else set(ids))
        renamed(path, text + " ")


async def test_what_is_decided_at_the_start_stays_and_the_rest_counts(node: Node) -> None:
    one, path = await ready(node, "version: v1", 2)
    bridge = {"gateway": {"bridge": {"folder": str(node.folder / "bridge")}}}
    renamed(path, json.dumps(json.loads(sharing(2)) | bridge))
    await node.allocatable_is(4, seconds=1)
    assert one.said("configuration: this changes only when the gateway is started anew")
    assert not (node.folder / "bridge").exists()
    renamed(path, json.dumps(json.loads(sharing(3)) | bridge))
    await node.allocatable_is(6, seconds=1)


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
    assert one.process.ended.result() == 78


async def test_a_file_of_something_else_is_not_quoted(node: Node) -> None:
    one, path = await ready(node, "version: v1", 2)
    for text in ("password: hunter2", "kind: Secret\nmetadata: {}\ndata: {it: hunter2}", "hunter2"):
        renamed(path, text)
        await node.pass_time(5)
        assert node.allocatable() == 2
        assert "hunter2" not in str(one.process.log)


async def test_an_edit_of_the_health_checks_recovery_and_names_counts(node: Node) -> None:
    _, path = await ready(node, "version: v1", 2)
    configuration: dict[str, Any] = {"gateway": {"excludeDevices": [0]}}
    renamed(path, json.dumps(configuration))
    await node.allocatable_is(1, seconds=1)
    renamed(path, "version: v1")
    await node.allocatable_is(2, seconds=1)


async def test_a_wrong_profile_keeps_the_gpus_of_before(node: Node) -> None:
    node.simulate({GPU: {"gpus": 3}})
    await node.start_kubelet()
    one = node.gateway()
    await node.allocatable_is(3)
    node.profile.write_text("resources: {nvidia.com/gpu: {gpus: many}}")
    await node.pass_time(10)
    assert node.allocatable() == 3
    assert "profile rejected" in str((await one.status())["hindrances"])
    node.simulate({GPU: {"gpus": 2}})
    await node.allocatable_is(2)
    assert not (await one.status()).get("hindrances")
