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
LONG = f"{'a' * 63}.{'b' * 63}.{'c' * 63}.{'d' * 52}/{'E' * 63}"
"""The longest name that every kubelet takes."""
MEANT = (
    ("flags: {plugin: {<<: [{deviceIDStrategy: index}, {deviceIDStrategy: uuid}]}}", "device-id-strategy", "index"),
    ("flags: {<<: &one {migStrategy: mixed}, plugin: {<<: *one}}", "mig-strategy", "mixed"),
    ("flags: {migStrategy: mixed, MIGSTRATEGY: single}", "mig-strategy", "mixed"),
    ("flags: {migStrategy: mixed}\n---\nflags: {migStrategy: single}", "mig-strategy", "mixed"),
    ("flags: {plugin: {deviceListStrategy: &two [envvar, cdi-cri]}}", "device-list-strategy", ["cdi-cri", "envvar"]),
    ("flags: {gdsEnabled: yes}", "gds-enabled", True),
    ("flags: {gdsEnabled: null, mofedEnabled: on}", "gds-enabled", False),
    ("flags: {nvidiaDriverRoot: run//nvidia/}", "nvidia-driver-root", "/run/nvidia"),
    ("imex: {channelIDs: []}", "imex-channel-ids", []),
    ("gateway: {healthRecovery: off}", "health-recovery", "off"),
    ("gateway: {excludeDevices: 3}", "exclude-devices", ["3"]),
    ("gateway: {bridge: {grace: 017}}", "bridge-grace", 15.0),
    ("gateway: {bridge: {grace: 1_0}}", "bridge-grace", 10.0),
    ("resources: {gpus: [{pattern: '*', name: big}]}", "resources.gpus", []),
    *(
        (f"sharing: {{timeSlicing: {text}}}", "sharing.timeSlicing.resources", {GPU: slices})
        for text, slices in (
            ("{resources: [{name: gpu, replicas: 4}, {name: gpu, replicas: 2}]}", [4, GPU, []]),
            ("{renameByDefault: true, resources: [{name: gpu, replicas: 2.0}]}", [2, f"{GPU}.shared", []]),
            ("{resources: [{name: gpu, replicas: 3, rename: x, devices: [0]}]}", [3, GPU, []]),
            ("{resources: [{name: gpu, replicas: 3, devices: all}]}", [3, GPU, []]),
        )
    ),
    (f"gateway: {{devices: [{{resource: {LONG}, paths: [/dev/x]}}]}}", "gateway.devices", [LONG]),
)
"""What a file says, and what it means, as with NVIDIA's plugin."""
HONOURED = "gateway: {honourResourceNames: true}\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: some}]}}"
NOT_READ = (
    (f"version: v1 #{'x' * 1024**2}", "1048576 bytes"),
    ("a: " + "[" * 40 + "]" * 40, "32 levels"),
    ("a: &one [*one]", "'*'"),
    ("a: *nothing", "'*'"),
    ("? [a, b]\n: c", "line 1"),
    ("flags: {<<: 3}", "mapping"),
    (
        "a: &a [1, 2, 3, 4, 5, 6, 7, 8]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)),
        "50000",
    ),
    ("flags: [1]", "flags"),
    ("flags: {gdsEnabled: 1}", "flags.gdsEnabled"),
    ("gateway: {devices: {a: b}}", "gateway.devices"),
    ("sharing: {timeSlicing: {renameByDefault: maybe, resources: [{name: gpu, replicas: 2}]}}", "renameByDefault"),
    ("sharing: {timeSlicing: {resources: [{name: 3, replicas: 2}]}}", "the number 3"),
    (
        "sharing: {timeSlicing: {resources: [{name: a, replicas: 2}, {name: b, replicas: 2, rename: a}]}}\ngateway: {honourResourceNames: true}",
        "nvidia.com/a",
    ),
    (HONOURED, "'some'"),
    ("gateway: {bridge: {rename: [{resource: a.b/c, name: a.b/e}, {resource: a.b/d, name: a.b/e}]}}", "a.b/e"),
    ("imex: {channelIDs: [1]}", "channel"),
    *(
        (f"gateway: {{devices: [{{resource: '{name}', paths: [/dev/x]}}]}}", words)
        for name, words in (
            (f"{LONG}x", "63 letters"),
            (f"x{LONG}", "244 lower-case"),
            ("a.b/-x", "beginning"),
            ("A.b/x", "lower-case"),
            ("requests.a.b/x", "quotas"),
            ("node.kubernetes.io/x", "Kubernetes"),
            ("x", "domain"),
        )
    ),
    ("flags: {deviceDiscoveryStrategy: guess}", "guess"),
)
"""What is no configuration, and a word of why."""


def sharing(replicas: int, name: str = "gpu") -> str:
    """Return the text of a configuration that shares a resource."""
    return json.dumps({"sharing": {"timeSlicing": {"resources": [{"name": name, "replicas": replicas}]}}})


async def ready(node: Node, text: str, count: int, *options: str, **environment: str) -> tuple[Gateway, Path]:
    """Start a gateway with two simulated GPUs and a configuration file."""
    path = node.folder / "config.yaml"
    path.write_text(text)
    if not node.profile.exists():
        node.simulate({GPU: {"gpus": 2}})
    one = await node.served(count, "--config-file", str(path), *options, environment=environment)
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
        await node.allocatable_after(5, 4)
        assert str(path) in (await one.status())["configuration"]["error"], text
        assert (await one.metrics())["device_plugin_gateway_config_last_reload_successful"] == 0, text
    assert await one.is_ready()
    renamed(path, sharing(3))
    await node.allocatable_is(6, seconds=1)
    assert (await one.status())["configuration"].get("error", "") == ""


async def test_a_file_means_what_it_means_to_nvidias_plugin(node: Node) -> None:
    path = node.folder / "config.yaml"
    for text, name, value in MEANT:
        path.write_text(text)
        status, said = await node.command("config", "show", "--config-file", str(path), "-o", "json")
        assert status == 0, (text, said)
        shown = {one["name"]: one["value"] for one in json.loads(said[said.index("[\n") :])}
        found = shown[name]
        if isinstance(found, dict):
            found = {key: [one["replicas"], one["shown_as"], one["portions"]] for key, one in found.items()}
        elif name == "gateway.devices":
            found = [one["resource"] for one in found]
        assert found == value, text


async def test_what_is_no_configuration_is_refused_in_words(node: Node) -> None:
    path = node.folder / "config.yaml"
    for text, word in NOT_READ:
        path.write_text(text)
        status, said = await node.command("config", "show", "--config-file", str(path))
        assert (status, word in said, str(path) in said) == (2, True, True), (text[:200], said)


async def test_a_file_that_is_emptied_for_a_moment_changes_nothing(node: Node) -> None:
    _, path = await ready(node, sharing(2), 4)
    path.write_text("")
    await node.allocatable_after(0.5, 4)
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
        await node.allocatable_after(5, 2)
        assert "hunter2" not in str(one.process.log)


async def test_a_wrong_profile_keeps_the_gpus_of_before(node: Node) -> None:
    node.simulate({GPU: {"gpus": 3}})
    one = await node.served(3)
    node.profile.write_text("resources: {nvidia.com/gpu: {gpus: many}}")
    await node.allocatable_after(10, 3)
    hindrances = str((await one.status())["hindrances"])
    assert "profile rejected, until it is corrected the one before stays in force" in hindrances
    node.simulate({GPU: {"gpus": 2}})
    await node.allocatable_is(2)
    assert not (await one.status()).get("hindrances")
