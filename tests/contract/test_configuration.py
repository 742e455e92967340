"""Settings: who says what, which are refused in words, and what an edit of the file does to a gateway that runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.contract.node import GPU, PREFIX, Gateway, Node

WRONG = 2
DRA = ("--dra=on", "--node-name=n")
TAKEN: tuple[tuple[tuple[str, ...], Mapping[str, str], str, object], ...] = (
    (("-mig-strategy", "mixed"), {}, "mig-strategy", "mixed"),
    (("--resource_naming_strategy=mixed",), {}, "resource-naming-strategy", "mixed"),
    (("--gds-enabled",), {"GDS_ENABLED": "false"}, "gds-enabled", True),
    ((), {"GDS_ENABLED": ""}, "gds-enabled", False),
    ((), {"GDS_ENABLED": "T"}, "gds-enabled", True),
    ((), {"CONTAINER_DRIVER_ROOT": "/one", "DRIVER_ROOT_CTR_PATH": "/two"}, "container-driver-root", "/two"),
    (("--exclude-devices=0, GPU-a,,0",), {}, "exclude-devices", ["0", "GPU-a"]),
    (("--exclude-devices=0", "--exclude-devices=1"), {}, "exclude-devices", ["0", "1"]),
    (("--mig-strategy=single", "--mig-strategy=mixed"), {}, "mig-strategy", "mixed"),
    (("--nvidia-cdi-hook-path=",), {}, "nvidia-cdi-hook-path", "/usr/bin/nvidia-ctk"),
    (("--imex-channel-ids=",), {}, "imex-channel-ids", []),
    (("--device-discovery-strategy=nvml", "--driver-type="), {}, "device-discovery-strategy", "nvml"),
    (DRA, {}, "device-list-strategy", ["cdi-cri"]),
    ((*DRA, "--device-list-strategy=cdi-cri,envvar"), {}, "device-list-strategy", ["cdi-cri"]),
)
"""What is said by flags and variables, and what a setting is then."""
NOT_TAKEN: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--dra=maybe", "--node-name=n"), "maybe"),
    (("--dra=on",), "NODE_NAME"),
    ((*DRA, "--device-list-strategy=envvar"), "cdi-cri"),
    ((*DRA, "--dra-drivers=gpu.example.com"), "DOMAIN=DRIVER"),
    ((*DRA, "--dra-drivers=example.com=GPU_x"), "DOMAIN=DRIVER"),
    (("--imex-channel-ids=one",), "one"),
    (("--device-list-strategy=",), "envvar"),
    (("--device-discovery-strategy=guess",), "guess"),
    (("--driver-type=vf-passthrough",), "vf-passthrough"),
    (("--cdi-annotation-prefix=a\tb",), "control characters"),
    (("--exclude-devices=a\tb",), "unprintable"),
    (("--bridge-grace=soon",), "soon"),
    (("--fallback-strategies=named,any", "--config-file-srcdir=/x", "--node-name=n"), "any"),
)


def _shared(replicas: object, more: str = "") -> str:
    return (
        "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"
        f"    - name: nvidia.com/gpu\n      replicas: {replicas}\n{more}"
    )


async def _ended(node: Node, *options: str, environment: Mapping[str, str] = {}) -> tuple[int, str]:
    """Start a gateway that ends by itself; return its exit status and its last words."""
    one = node.gateway(*options, environment=environment)
    await node.until(lambda: not one.alive, "its end")
    return one.process.ended.result(), "\n".join(line["event"] for line in one.process.log)


@pytest.mark.parametrize(
    ("options", "environment", "status", "words"),
    [
        (["--mig-strategy=mixd"], {}, WRONG, ("--mig-strategy", "mixd")),
        ([], {"MIG_STRATEGY": "mixd"}, WRONG, ("MIG_STRATEGY", "mixd")),
        ([], {"DEVICE_LIST_STRATEGY": "volume-mounts,nothing"}, WRONG, ("DEVICE_LIST_STRATEGY", "nothing")),
        (["--bridge-grace=-1"], {}, WRONG, ("--bridge-grace", "-1")),
        (["--bridge-grace=nan"], {}, WRONG, ("--bridge-grace", "nan")),
        (["--bridge=folder"], {}, WRONG, ("--bridge", "folder")),
        (["--pass-device-specs=maybe"], {}, WRONG, ("--pass-device-specs", "maybe")),
        (["--pass-device-specs", "false"], {}, WRONG, ("--pass-device-specs=false",)),
        (["--imex-channel-ids=1"], {}, WRONG, ("--imex-channel-ids",)),
        (["--device-discovery-strategy=tegra"], {}, WRONG, ("--device-discovery-strategy", "tegra")),
        (["--api=v9"], {}, WRONG, ("--api", "v9")),
        ([], {"GATEWAY_API": "v9"}, WRONG, ("GATEWAY_API", "v9")),
        (["--backend=cuda"], {}, WRONG, ("--backend", "cuda")),
        (["--kubelet-version=1.7"], {}, WRONG, ("--kubelet-version", "1.7")),
        (["--startup-grace=3601"], {}, WRONG, ("--startup-grace", "3601")),
        (["--metrics-address=node:99999"], {}, WRONG, ("--metrics-address", "99999")),
        (["--probe-address=:9400", "--metrics-address=:9400"], {}, WRONG, ("--probe-address", "--metrics-address")),
        (["--socket-dir=/" + "x" * 100], {}, WRONG, ("--socket-dir", "107")),
        (["--node-condition"], {}, WRONG, ("--node-condition", "NODE_NAME")),
        (["--no-such-flag"], {}, WRONG, ("--no-such-flag",)),
        (["--config-file=/no/such/file"], {}, 1, ("/no/such/file",)),
    ],
)
async def test_a_wrong_value_ends_the_start_and_is_named(
    node: Node, options: list[str], environment: Mapping[str, str], status: int, words: tuple[str, ...]
) -> None:
    found, said = await _ended(node, *options, environment=environment)
    assert found == status, said
    assert all(word in said for word in words), said
    assert not list(node.sockets.iterdir())


async def test_what_flags_and_variables_mean(node: Node) -> None:
    for options, environment, name, value in TAKEN:
        with pytest.MonkeyPatch.context() as patch:
            for key, text in environment.items():
                patch.setenv(key, text)
            status, said = await node.command("config", "show", *options, "-o", "json")
        assert status == 0, (options, said)
        shown = {one["name"]: one["value"] for one in json.loads(said[said.index("[\n") :])}
        assert shown[name] == value, (options, environment)


async def test_what_cannot_be_meant_is_refused_in_words(node: Node) -> None:
    for options, word in NOT_TAKEN:
        status, said = await node.command("config", "show", *options)
        assert (status, word in said) == (WRONG, True), (options, said)


async def test_a_memory_that_kubelets_would_delete_is_refused(node: Node) -> None:
    for folder in (node.sockets, node.sockets / "state", node.sockets / "a" / "b"):
        status, said = await _ended(node, "--state-dir", str(folder))
        assert status == WRONG
        assert "--state-dir" in said
        assert "--socket-dir" in said
    assert not list(node.sockets.iterdir())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flags: [", ("line 2", "YAML")),
        ("flags:\n  migStrategy: mixd\n", ("line 2", "flags.migStrategy", "mixd")),
        ("flags:\n  migStrategy: 1\n", ("line 2", "flags.migStrategy")),
        (_shared(1), ("line 6", "replicas")),
        (_shared("two"), ("line 6", "replicas")),
        ("sharing:\n  mps: {resources: []}\n", ("line 2", "MPS")),
        ("version: v2\n", ("line 1", "v2")),
        ("gateway:\n  bridge:\n    rename:\n    - resource: a.b/c\n      name: 'no name'\n", ("line 4", "rename")),
        ("gateway:\n  bridge:\n    deadlines:\n    - {resource: a.b/c, seconds: 0}\n", ("line 4", "600")),
    ],
)
async def test_a_wrong_file_ends_the_start_with_its_line_and_nothing_later(
    node: Node, text: str, words: tuple[str, ...]
) -> None:
    file = node.folder / "config.yaml"
    file.write_text(text)
    status, said = await _ended(node, "--config-file", str(file))
    assert status == WRONG, said
    assert all(word in said for word in (str(file), *words)), said
    file.write_text("version: v1\n")
    one = await node.served(8, "--config-file", str(file))
    file.write_text(text)
    error = await node.eventually(lambda: _error(one), "the complaint")
    assert all(word in error for word in (str(file), *words)), error
    assert (await one.metrics())[f"{PREFIX}config_last_reload_successful"] == 0
    await node.truthful()
    file.write_text(_shared(2))
    await node.allocatable_is(16)
    assert not await _error(one)


async def _error(one: Gateway) -> str:
    return str((await one.status())["configuration"]["error"])


async def test_the_command_line_beats_the_variable_and_that_the_file(node: Node) -> None:
    file = node.folder / "config.yaml"
    file.write_text("flags:\n  plugin:\n    deviceListStrategy: volume-mounts\n")
    variable, flag = {"DEVICE_LIST_STRATEGY": "cdi-cri"}, "--device-list-strategy=envvar,volume-mounts"
    named = ("--config-file", str(file))
    for options, environment, in_force in (
        ((), {}, ["envvar"]),
        (named, {}, ["volume-mounts"]),
        (named, variable, ["cdi-cri"]),
        ((*named, flag), variable, ["envvar", "volume-mounts"]),
        ((flag,), variable, ["envvar", "volume-mounts"]),
        ((*named, flag), {}, ["envvar", "volume-mounts"]),
        ((), {"CONFIG_FILE": str(file)}, ["volume-mounts"]),
    ):
        one = node.gateway(*options, environment=environment)
        assert (await one.status())["list_strategies"] == in_force
        assert await one.terminate() == 0


async def test_what_loses_is_not_judged(node: Node) -> None:
    one = node.gateway("--mig-strategy=none", environment={"MIG_STRATEGY": "mixd"})
    assert (await one.status())["resources"]


async def test_zero_is_a_value(node: Node) -> None:
    one = node.gateway("--bridge-grace=0", "--bridge-withdraw=0", "--startup-grace=0")
    assert (await one.status())["resources"]


@pytest.mark.parametrize("way", ["in place", "rename", "link", "signal"])
async def test_an_edit_is_adopted_while_pods_run(node: Node, way: str) -> None:
    node.shared = (GPU,)
    folder = node.folder / "mounted"
    folder.mkdir()
    file = folder / "config.yaml"
    if way == "link":
        (folder / "..first").mkdir()
        (folder / "..data").symlink_to("..first")
        (folder / "..first" / "config.yaml").write_text(_shared(2))
        file.symlink_to("..data/config.yaml")
    else:
        file.write_text(_shared(2))
    node.simulate({GPU: {"gpus": 8}})
    one = await node.served(16, "--config-file", str(file), "--device-list-strategy=volume-mounts")
    given = await node.admit("pod")
    _edit(file, way, _shared(3))
    if way == "signal":
        one.process.terminate(signal.SIGHUP)
    await node.allocatable_is(24, seconds=3)  # At once: no look every now and then.
    await node.admit("other", count=20)
    await node.truthful()
    assert (await node.restart_container("pod")).devices == given.devices
    assert (await one.status())["list_strategies"] == ["volume-mounts"]
    assert (await one.metrics())[f"{PREFIX}config_last_reload_success_age_seconds"] < 60
    assert node.registers[GPU] == 1


def _edit(file: Path, way: str, text: str) -> None:
    if way == "link":
        folder = file.parent / "..second"
        folder.mkdir()
        (folder / "config.yaml").write_text(text)
        draft = file.parent / "..draft"
        draft.symlink_to("..second")
        draft.rename(file.parent / "..data")
    elif way == "rename":
        draft = file.with_suffix(".draft")
        draft.write_text(text)
        draft.rename(file)
    else:
        file.write_text(text)


async def test_a_file_that_is_away_for_a_moment_is_no_trouble_and_one_that_stays_away_is_told(node: Node) -> None:
    file = node.folder / "config.yaml"
    file.write_text(_shared(2))
    node.simulate({GPU: {"gpus": 8}})
    one = await node.served(16, "--config-file", str(file))
    file.unlink()
    await node.pass_time(0.01)
    file.write_text(_shared(3))
    await node.allocatable_is(24)
    assert not one.said("configuration rejected: the last good one stays in force")
    file.unlink()
    assert str(file) in await node.eventually(lambda: _error(one), "the complaint", 120)
    await node.truthful()
    assert node.allocatable() == 24
    file.write_text(_shared(3))
    await node.pass_time(60)
    assert not await _error(one)
    assert (await one.metrics())[f"{PREFIX}config_last_reload_successful"] == 1


async def test_what_is_decided_at_the_start_waits_for_the_next_one(node: Node) -> None:
    file = node.folder / "config.yaml"
    file.write_text(_shared(2))
    node.simulate({GPU: {"gpus": 8}})
    one = await node.served(16, "--config-file", str(file))
    bridge = node.folder / "bridge"
    file.write_text(_shared(3, f"gateway:\n  bridge:\n    folder: {bridge}\n"))
    await node.allocatable_is(24)
    assert [line for line in one.process.log if "bridge" in str(line.get("settings", ""))]
    assert not bridge.exists()
    await one.terminate()
    node.gateway("--config-file", str(file))
    await node.until((bridge / "device-plugins" / "kubelet.sock").exists, "the bridge")


async def test_a_hangup_without_a_file_ends_nothing(node: Node) -> None:
    one = await node.served(8)
    one.process.terminate(signal.SIGHUP)
    await node.pass_time(5)
    await node.admit("pod")
    await node.truthful()


async def test_variables_that_are_no_settings_are_named_without_their_value(node: Node) -> None:
    one = node.gateway(environment={"GATEWAY_METRICS_ADRESS": "secret", "GATEWAY_SERVICE_HOST": "10.0.0.1"})
    assert (await one.status())["resources"]
    said = str(one.process.log)
    assert "GATEWAY_METRICS_ADRESS" in said
    assert "GATEWAY_METRICS_ADDRESS" in said
    assert "secret" not in said
    assert "GATEWAY_SERVICE_HOST" not in said
    assert "GATEWAY_METRICS_ADRESS" not in os.environ
