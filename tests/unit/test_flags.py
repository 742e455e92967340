"""Other plugins' flags and variables: each by each way, which one wins, and what a wrong one is told."""

from __future__ import annotations

import json
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result
from msgspec.structs import fields

from devices.policy import (
    CdiFallback,
    IdStrategy,
    ListStrategy,
    MigStrategy,
    Naming,
    Policy,
    Recovery,
    Sharing,
)
from gateway import VERSION, compose
from gateway.__main__ import nvidia
from gateway.cli import main
from gateway.configuration import commandline
from gateway.configuration.flags import FLAGS, GROUPS
from gateway.configuration.kinds import Flag, FlagKind
from gateway.configuration.settings import SOCKET_DIR, Settings
from gateway.registration import negotiate
from gateway.wires import log

BOTH = frozenset({ListStrategy.ENVVAR, ListStrategy.CDI_CRI})


pytestmark = pytest.mark.usefixtures("no_logging")


def call(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(main.gateway, list(arguments), env=variables)


def written(folder: Path, key: tuple[str, ...], text: str) -> str:
    """A configuration file that says one thing."""
    value = text
    for name in reversed(key):
        value = f"{{{name}: {value}}}"
    file = folder / "config.yaml"
    file.write_text(value)
    return str(file)


# Flag, a text for it, the policy's field, the value there. Lists are one text on the line and in a variable.
EFFECTS: list[tuple[str, str, str, Any]] = [
    ("mig-strategy", "mixed", "mig_strategy", MigStrategy.MIXED),
    ("fail-on-init-error", "true", "fail_on_init_error", True),
    ("nvidia-driver-root", "/run/nvidia/driver/", "driver_root", "/run/nvidia/driver"),
    ("nvidia-dev-root", "/custom", "dev_root", "/custom"),
    ("container-driver-root", "/host", "container_driver_root", "/host"),
    ("pass-device-specs", "true", "pass_device_specs", True),
    ("device-list-strategy", "cdi-cri", "list_strategies", frozenset({ListStrategy.CDI_CRI})),
    ("device-id-strategy", "index", "id_strategy", IdStrategy.INDEX),
    ("shared-devices-allocation-policy", "packed", "sharing", Sharing.PACKED),
    ("gdrcopy-enabled", "true", "gdrcopy", True),
    ("gds-enabled", "true", "gds", True),
    ("mofed-enabled", "true", "mofed", True),
    ("imex-channel-ids", "0", "imex_channels", (0,)),
    ("imex-required", "true", "imex_required", True),
    ("cdi-annotation-prefix", "x.io/", "cdi_annotation_prefix", "x.io/"),
    ("nvidia-cdi-hook-path", "/opt/hook", "cdi_hook_path", "/opt/hook"),
    ("cdi-disable-hooks", "update-ldcache", "cdi_disabled_hooks", frozenset({"update-ldcache"})),
    ("exclude-devices", "GPU-5f3a", "excluded", ("GPU-5f3a",)),
    ("node-features", "true", "node_features", True),
    ("DP_DISABLE_HEALTHCHECKS", "xids,13", "disabled_health_checks", "xids,13"),
    ("DP_ENABLE_HEALTHCHECKS", "all", "enabled_health_checks", "all"),
    ("resource-naming-strategy", "mixed", "resource_naming", Naming.MIXED),
    ("health-recovery", "off", "health_recovery", Recovery.OFF),
    ("cdi-fallback", "expand", "cdi_fallback", CdiFallback.EXPAND),
    ("bridge", "/run/dp-bridge/", "bridge", "/run/dp-bridge"),
    ("bridge-grace", "5.5", "bridge_grace", 5.5),
    ("bridge-withdraw", "0", "bridge_withdraw", 0.0),
]
NAMED = {flag.name: flag for flag in FLAGS}


@pytest.mark.parametrize(("name", "text", "field", "value"), EFFECTS, ids=[row[0] for row in EFFECTS])
def test_each_flag_by_each_way(
    given: list[Settings], tmp_path: Path, name: str, text: str, field: str, value: object
) -> None:
    flag = NAMED[name]
    runs = [call(**{variable: text}) for variable in flag.variables]
    for option in (flag.name, *flag.aliases) if flag.option else ():
        runs += [call(f"--{option}={text}"), call(f"-{option}={text}")]
        runs += (
            [call(f"--{option}")]
            if flag.kind is FlagKind.SWITCH
            else [call(f"--{option}", text), call(f"-{option}", text)]
        )
    if flag.key:
        in_file = f"[{text}]" if flag.kind is FlagKind.NUMBERS else text
        runs.append(call("--config-file", written(tmp_path, flag.key, in_file)))
    assert [run.exit_code for run in runs] == [0] * len(runs), [run.output for run in runs]
    assert [getattr(settings.policy, field) for settings in given] == [value] * len(runs)
    assert getattr(Policy(), field) != value


def test_every_flag_with_an_effect_has_a_row() -> None:
    of_policy = {field.name for field in fields(Policy)}
    assert {flag.name for flag in FLAGS if flag.field in of_policy} == {row[0] for row in EFFECTS}
    assert {field.name for field in fields(Policy)} - {flag.field for flag in FLAGS} == {
        "gpu_names",
        "mig_names",
        "slices",
        "fail_requests_greater_than_one",
        "globbed",
        "bridging",
    }


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.inert], ids=lambda flag: flag.name)
def test_what_has_no_effect_is_accepted(given: list[Settings], tmp_path: Path, flag: Flag) -> None:
    text = "true" if flag.kind is FlagKind.SWITCH else "3"
    runs = [call(f"-{flag.name}={text}"), *(call(**{variable: text}) for variable in flag.variables)]
    runs += (
        [call("--config-file", written(tmp_path, flag.key, f'"{text}"' if text == "3" else text))] if flag.key else []
    )
    assert [run.exit_code for run in runs] == [0] * len(runs), [run.output for run in runs]
    assert [settings.policy for settings in given] == [Policy()] * len(runs)


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [(["--mig-strategy=mixed"], "nonsense"), ([], "mixed")],
    ids=["to the line", "to a variable"],
)
def test_what_loses_is_not_judged(given: list[Settings], tmp_path: Path, arguments: list[str], variable: str) -> None:
    file = written(tmp_path, ("flags", "migStrategy"), "nonsense")
    result = call(*arguments, "--config-file", file, MIG_STRATEGY=variable)
    assert result.exit_code == 0, result.output
    assert given[0].policy.mig_strategy is MigStrategy.MIXED


@pytest.mark.parametrize(
    ("arguments", "variables", "value"),
    [
        (["--device-list-strategy=envvar,cdi-cri"], {}, BOTH),
        (["--device-list-strategy", "envvar", "--device-list-strategy=cdi-cri"], {}, BOTH),
        (["--device-list-strategy=cdi-cri"], {"DEVICE_LIST_STRATEGY": "envvar"}, frozenset({ListStrategy.CDI_CRI})),
        ([], {"DEVICE_LIST_STRATEGY": "envvar, cdi-cri"}, BOTH),
    ],
    ids=["commas", "repeated", "the line replaces the variable's", "commas with spaces in a variable"],
)
def test_lists(given: list[Settings], arguments: list[str], variables: dict[str, str], value: object) -> None:
    assert call(*arguments, **variables).exit_code == 0
    assert given[0].policy.list_strategies == value


@pytest.mark.parametrize(
    ("text", "value", "unknown"),
    [
        pytest.param("update-ldcache, all,", {"update-ldcache", "all"}, [], id="several"),
        pytest.param("", set(), [], id="empty"),
        pytest.param(",", set(), [], id="commas alone"),
        pytest.param(
            "all,of-tomorrow",
            {"all", "of-tomorrow"},
            ["'of-tomorrow' isn't known, and has no effect. The known hooks are all"],
            id="one of a later toolkit, or none",
        ),
    ],
)
def test_hooks_to_disable(given: list[Settings], text: str, value: set[str], unknown: list[str]) -> None:
    """NVIDIA's plugin passes any name on (WithDisabledHooks of pkg/nvcdi)."""
    with structlog.testing.capture_logs() as logs:
        assert call(CDI_DISABLE_HOOKS=text).exit_code == 0
    assert given[0].policy.cdi_disabled_hooks == value
    notes = [line["note"] for line in logs if line["log_level"] == "warning"]
    assert [note.partition(", chmod")[0] for note in notes] == [f"cdi-disable-hooks: {one}" for one in unknown]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("t", True),
        ("TRUE", True),
        ("True", True),
        ("0", False),
        ("f", False),
        ("False", False),
        ("", False),
    ],
)
def test_switches_as_go_reads_them(given: list[Settings], text: str, value: object) -> None:
    assert call(PASS_DEVICE_SPECS=text).exit_code == 0
    assert given[0].policy.pass_device_specs is value


@pytest.mark.parametrize(
    ("backend", "said", "value"),
    [
        ("auto", {}, False),
        ("nvidia", {}, True),
        ("amd", {}, False),
        ("simulated", {}, False),
        ("auto", {"FAIL_ON_INIT_ERROR": "true"}, True),
        ("nvidia", {"FAIL_ON_INIT_ERROR": "false"}, False),
        ("nvidia", {"FAIL_ON_INIT_ERROR": ""}, False),
    ],
)
def test_failing_at_start_is_nvidias_default_only(
    given: list[Settings], backend: str, said: dict[str, str], value: object
) -> None:
    assert call("--backend", backend, **said).exit_code == 0
    assert given[0].policy.fail_on_init_error is value


@pytest.mark.parametrize(
    ("arguments", "spelled"),
    [
        (["--gds-enabled", "probe", "--json"], ["--gds-enabled=true", "probe", "--json"]),
        (["-gds-enabled", "-pulse", "30"], ["--gds-enabled=true", "--pulse=30"]),
        (["-resource_naming_strategy=mixed"], ["--resource_naming_strategy=mixed"]),
        (["--mig-strategy", "--gds-enabled"], ["--mig-strategy=--gds-enabled"]),
        (["--output", "-gds-enabled", "-pulse=1"], ["--output", "-gds-enabled", "--pulse=1"]),
        (["probe", "-gds-enabled"], ["probe", "-gds-enabled"]),
        (["--", "-gds-enabled"], ["--", "-gds-enabled"]),
        (["--config-file="], ["--config-file="]),
        (["--mig-strategy"], ["--mig-strategy"]),
        (["-v"], ["--version"]),
        (["-v", "5", "-pulse=0"], ["--v=5", "--pulse=0"]),
        (["-v=5"], ["--v=5"]),
        (
            ["-driver_type", "container", "-alsologtostderr", "-log_dir", "/tmp", "-vmodule=a=2"],
            ["--driver_type=container", "--alsologtostderr=true", "--log_dir=/tmp", "--vmodule=a=2"],
        ),
        (["-h"], ["-h"]),
        ([], []),
    ],
    ids=[
        "a switch before a command",
        "one dash",
        "an underscore",
        "a value that looks like a flag",
        "the value of another option",
        "a command's own arguments",
        "the end of options",
        "an empty value",
        "a value that is missing",
        "a version",
        "a level of the log",
        "a level of the log, joined",
        "ROCm's and glog's",
        "help",
        "nothing",
    ],
)
def test_flags_are_spelled_as_go_has_them(arguments: list[str], spelled: list[str]) -> None:
    assert commandline.normalize_flags(arguments, {"--output"}) == spelled


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["--mig-strategy", "both"], {}, ["--mig-strategy: unknown value 'both'. Allowed: none, single, mixed"]),
        ([], {"MIG_STRATEGY": "both"}, ["MIG_STRATEGY: unknown value 'both'. Allowed: none, single, mixed"]),
        ([], {"MIG_STRATEGY": ""}, ["MIG_STRATEGY", "''"]),
        (
            ["--device-list-strategy=envvar,cdi"],
            {},
            ["unknown value 'cdi' (did you mean 'cdi-cri'?). Allowed: envvar, volume-mounts, cdi-annotations, cdi-cri"],
        ),
        ([], {"DEVICE_LIST_STRATEGY": ""}, ["DEVICE_LIST_STRATEGY", "cdi-cri", "''"]),
        ([], {"DEVICE_ID_STRATEGY": "name"}, ["DEVICE_ID_STRATEGY: unknown value 'name'. Allowed: uuid, index"]),
        ([], {"GDS_ENABLED": "yes"}, ["GDS_ENABLED: unknown value 'yes'. Allowed: true, false"]),
        (["--gds-enabled=yes"], {}, ["--gds-enabled: unknown value 'yes'. Allowed: true, false"]),
        (["--gds-enabled", "false"], {}, ["Write --gds-enabled=false"]),
        (["--shared-devices-allocation-policy=spread"], {}, ["'spread'. Allowed: distributed, packed"]),
        (["--device-discovery-strategy=tegra"], {}, ["tegra", "not supported", "keep NVIDIA's plugin"]),
        (
            ["-driver_type", "vf-passthrough"],
            {},
            ["'vf-passthrough'. Allowed: container. Only GPUs for containers"],
        ),
        (["--device-discovery-strategy=cdi"], {}, ["'cdi'. Allowed: auto, nvml"]),
        (
            [],
            {"IMEX_CHANNEL_IDS": "0,1"},
            ["IMEX_CHANNEL_IDS: [0, 1]: only IMEX channel 0 can be given to containers. Allowed: [] or [0]"],
        ),
        ([], {"IMEX_CHANNEL_IDS": "x"}, ["IMEX_CHANNEL_IDS: 'x' is not a whole number"]),
        (["--nvidia-driver-root=/a\nb"], {}, ["--nvidia-driver-root", "control characters"]),
        (["--resource-naming-strategy=all"], {}, ["'all'. Allowed: single, mixed"]),
        (["--health-recovery=on"], {}, ["'on'. Allowed: off, safe"]),
        (
            [],
            {"GATEWAY_CDI_FALLBACK": "x"},
            ["GATEWAY_CDI_FALLBACK: unknown value 'x'. Allowed: refuse, envvar, expand"],
        ),
        (["--kubelet-socket=/x/sock"], {}, ["--kubelet-socket", "kubelet.sock", "/x/sock"]),
        ([], {"KUBELET_SOCKET": ""}, ["KUBELET_SOCKET", "kubelet.sock", "''"]),
        (["--kubelet-socket=/x/kubelet.sock", "--socket-dir=/y"], {}, ["/x", "/y", "Leave one of them out"]),
        (["--mig-strategy"], {}, ["requires an argument"]),
        (["--config-file=/none/such"], {}, ["/none/such", "can't be read", "No such file"]),
        (["--config-file=/dev/null"], {}, ["/dev/null", "plain file"]),
    ],
)
def test_a_wrong_one_is_told_what_was_expected(
    given: list[Settings], arguments: list[str], variables: dict[str, str], words: list[str]
) -> None:
    result = call(*arguments, **variables)
    text = " ".join(result.output.split())
    assert (result.exit_code, given) == (1 if "can't be read" in text else 2, [])
    assert text.startswith("Error: ")
    assert [word for word in words if word not in text] == []


def shown(*arguments: str, **variables: str) -> dict[str, tuple[Any, str]]:
    """The effective configuration, by name: value and who said it."""
    with structlog.testing.capture_logs():
        result = call("config", "show", "--json", *arguments, **variables)
    assert result.exit_code == 0, result.output
    return {one["name"]: (one["value"], one["from"]) for one in json.loads(result.output)}


@pytest.mark.parametrize(
    ("arguments", "variables", "name", "value", "source"),
    [
        ([], {}, "mig-strategy", "none", "default"),
        (["--mig-strategy=mixed"], {"MIG_STRATEGY": "single"}, "mig-strategy", "mixed", "--mig-strategy"),
        ([], {"MIG_STRATEGY": "single"}, "mig-strategy", "single", "MIG_STRATEGY"),
        ([], {"CDI_DISABLE_HOOKS": "chmod,all"}, "cdi-disable-hooks", ["all", "chmod"], "CDI_DISABLE_HOOKS"),
        ([], {"NVIDIA_CTK_PATH": ""}, "nvidia-cdi-hook-path", "/usr/bin/nvidia-ctk", "NVIDIA_CTK_PATH"),
        ([], {}, "socket-dir", str(SOCKET_DIR), "default"),
        (["--socket-dir=/x"], {}, "socket-dir", "/x", "--socket-dir"),
        ([], {"GATEWAY_SOCKET_DIR": "/x"}, "socket-dir", "/x", "GATEWAY_SOCKET_DIR"),
        ([], {"KUBELET_SOCKET": "/x/kubelet.sock"}, "socket-dir", "/x", "KUBELET_SOCKET"),
        ([], {"GATEWAY_POD_RESOURCES_SOCKET": "/p"}, "pod-resources-socket", "/p", "GATEWAY_POD_RESOURCES_SOCKET"),
        ([], {"GATEWAY_METRICS_ADDRESS": "9400"}, "metrics-address", ["127.0.0.1", 9400], "GATEWAY_METRICS_ADDRESS"),
        ([], {"DP_DISABLE_HEALTHCHECKS": "13"}, "DP_DISABLE_HEALTHCHECKS", "13", "DP_DISABLE_HEALTHCHECKS"),
        (["--mps-root=/m"], {}, "mps-root", "/m", "--mps-root"),
        (["--strict-config"], {}, "strict-config", True, "--strict-config"),
        ([], {}, "strict-config", False, "default"),
        ([], {}, "config-file", None, "default"),
        ([], {}, "gateway.honourResourceNames", False, "default"),
        (["--log-level=debug"], {}, "log-level", "debug", "--log-level"),
        ([], {"GATEWAY_LOG_FORMAT": "json"}, "log-format", "json", "GATEWAY_LOG_FORMAT"),
    ],
)
def test_the_configuration_in_force_is_shown_with_who_said_it(
    arguments: list[str], variables: dict[str, str], name: str, value: object, source: str
) -> None:
    assert shown(*arguments, **variables)[name] == (value, source)


def test_every_setting_is_shown_once_and_none_that_has_no_effect() -> None:
    names = shown()
    assert {flag.name for flag in FLAGS if not flag.inert} <= {*names}
    assert not {flag.name for flag in FLAGS if flag.inert} & {*names}
    of_the_file_alone = 6
    assert len(names) == len([flag for flag in FLAGS if not flag.inert]) + of_the_file_alone


def test_what_the_file_says_is_shown_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "flags:\n  migStrategy: mixed\n  gdsEnabled: true\nsharing:\n  timeSlicing:\n    resources:\n"
        "    - {name: gpu, replicas: 2}\ngateway:\n  honourResourceNames: true\n"
    )
    found = shown("--gds-enabled=false", CONFIG_FILE=str(file))
    assert found["mig-strategy"] == ("mixed", f"{file}, line 2: flags.migStrategy")
    assert found["gds-enabled"] == (False, "--gds-enabled")
    slices, source = found["sharing.timeSlicing.resources"]
    assert (slices["nvidia.com/gpu"]["replicas"], source) == (2, str(file))
    assert found["gateway.devices"] == ([], "default")
    assert found["gateway.honourResourceNames"] == (True, f"{file}, line 9: gateway.honourResourceNames")
    assert found["config-file"] == (str(file), "CONFIG_FILE")


def test_the_configuration_in_force_as_a_table() -> None:
    lines = call("config", "show", "--mig-strategy=mixed").output.splitlines()
    assert [line.split() for line in lines if line.startswith(("mig-strategy", "nvidia-dev-root", "gds"))] == [
        ["gds-enabled", "false", "default"],
        ["mig-strategy", "mixed", "--mig-strategy"],
        ["nvidia-dev-root", '""', "default"],
    ]


def test_a_wrong_configuration_is_not_shown() -> None:
    result = call("config", "show", "--mig-strategy=both")
    assert (result.exit_code, "Allowed: none, single, mixed" in result.output) == (2, True)


def test_the_first_line_of_the_log_has_the_version_and_what_differs_from_the_defaults(given: list[Settings]) -> None:
    with structlog.testing.capture_logs() as logs:
        assert call("--mig-strategy=mixed", DEVICE_LIST_STRATEGY="cdi-cri").exit_code == 0
    [line] = logs
    assert (line["event"], line["version"]) == ("starting device-plugin-gateway", VERSION)
    assert line["settings"] == {"mig-strategy": "mixed", "device-list-strategy": ["cdi-cri"]}
    assert len(given) == 1


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("GATEWAY_METRIC_ADDRESS", "1", "did you mean GATEWAY_METRICS_ADDRESS?"),
        ("GATEWAY_STARTUPGRACE", "1", "did you mean GATEWAY_STARTUP_GRACE?"),
        ("GATEWAY_CDI_FALBACK", "1", "did you mean GATEWAY_CDI_FALLBACK?"),
        ("GATEWAY_POD_RESOURCE_SOCKET", "1", "did you mean GATEWAY_POD_RESOURCES_SOCKET?"),
        ("GATEWAY_MIG_STRATEGY", "1", "did you mean MIG_STRATEGY?"),
        ("GATEWAY_QQQ", "secret", "is ignored"),
        ("GATEWAY_FOO", "1", "is ignored"),
        ("GATEWAY_RUN_SOCKET_DIR", "/x", "did you mean GATEWAY_SOCKET_DIR?"),
        ("GATEWAY_METRICS_ADDRESS", ":9400", ""),
        ("GATEWAY_KUBELET_VERSION", "1.28", ""),
        ("GATEWAY_CDI_FALLBACK", "refuse", ""),
        ("GATEWAY_STATUS_JSON", "1", ""),
        ("GATEWAY_SERVICE_HOST", "10.0.0.1", ""),
        ("GATEWAY_API_SERVICE_PORT_HTTP", "80", ""),
        ("GATEWAY_PORT", "tcp://10.0.0.1:80", ""),
        ("GATEWAY_PORT_80_TCP_ADDR", "10.0.0.1", ""),
        ("MIG_STRATEGI", "1", ""),
    ],
)
def test_a_misspelt_variable_is_said(given: list[Settings], name: str, value: str, says: str) -> None:
    with structlog.testing.capture_logs() as logs:
        assert call(**{name: value}).exit_code == 0
    notes = [line["note"] for line in logs if line["event"] == "environment"]
    assert [note.endswith(says) and note.startswith(f"{name} ") for note in notes] == [True] * bool(says)
    assert len(given) == 1


def test_not_every_misspelt_variable_is_said(given: list[Settings]) -> None:
    with structlog.testing.capture_logs() as logs:
        assert call(**{f"GATEWAY_X{number}": "" for number in range(100)}).exit_code == 0
    assert len([line for line in logs if line["event"] == "environment"]) == 20
    assert len(given) == 1


@pytest.mark.parametrize(
    ("arguments", "variables", "folder"),
    [
        ([], {}, str(SOCKET_DIR)),
        (["--kubelet-socket=/x/kubelet.sock"], {}, "/x"),
        ([], {"KUBELET_SOCKET": "/x/kubelet.sock"}, "/x"),
        (["--socket-dir=/y"], {"KUBELET_SOCKET": "/x/kubelet.sock"}, "/y"),
        (["--kubelet-socket=/x/kubelet.sock"], {"GATEWAY_SOCKET_DIR": "/y"}, "/x"),
        (["--kubelet-socket=/x/kubelet.sock", "--socket-dir=/x"], {}, "/x"),
    ],
)
def test_the_kubelets_socket_says_where_its_folder_is(
    given: list[Settings], arguments: list[str], variables: dict[str, str], folder: str
) -> None:
    assert call(*arguments, **variables).exit_code == 0
    assert given[0].socket_dir == Path(folder)


def test_the_rest_of_the_settings(given: list[Settings], tmp_path: Path) -> None:
    file = written(tmp_path, ("flags", "gdsEnabled"), "true")
    assert call("--strict-config", "--mofed-enabled", CONFIG_FILE=file).exit_code == 0
    (settings,) = given
    assert (settings.config_file, settings.strict_config, list(settings.given)) == (Path(file), True, ["mofed-enabled"])
    assert call(CONFIG_FILE="").exit_code == 0
    assert given[1] == Settings()


@pytest.mark.parametrize(
    ("arguments", "backend", "says"),
    [
        ([], "nvidia", ""),
        (["--backend", "simulated"], "simulated", ""),
        (["--version"], None, "nvidia-device-plugin, version"),
        (["-v"], None, "nvidia-device-plugin, version"),
        (["-h"], None, "Usage: nvidia-device-plugin"),
    ],
)
def test_under_nvidias_name(
    given: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    backend: str | None,
    says: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/nvidia-device-plugin", *arguments])
    with pytest.raises(SystemExit) as ended:
        nvidia()
    assert (ended.value.code, [settings.backend for settings in given]) == (0, [] if backend is None else [backend])
    assert says in capsys.readouterr().out


def test_help_has_every_option_in_one_group() -> None:
    names = [flag.name for flag in FLAGS if flag.option and not flag.inert]
    text = call("run", "--help").output
    assert [name for name in (*names, "version") if len(re.findall(rf"\n  --{name}\s", text)) != 1] == []
    assert [heading for heading in (*GROUPS, "Others") if f"\n{heading}:\n" not in text] == ["Without an effect"]
    assert "--pulse" not in text


WORDS = {
    "api": {*negotiate.CHOICES},
    "backend": {*compose.BACKENDS},
    "log-format": {*log.FORMATS},
    "log-level": {*log.LEVELS},
    "fallback-strategies": {"named", "single", "empty"},
    "device-discovery-strategy": {"auto", "nvml"},
    "dra": {"off", "on", "only"},
    "dra-shares": {"devices", "capacity"},
}


def test_the_words_of_a_setting_are_those_that_the_gateway_knows() -> None:
    effects = {name: type(value) for name, _, _, value in EFFECTS if isinstance(value, Enum)}
    for flag in FLAGS:
        if "|" in flag.values:
            words = WORDS.get(flag.name) or {one.value for one in effects.get(flag.name, ListStrategy)}
            assert {*flag.values.split("|")} == words, flag.name


def test_each_option_has_a_variable_of_its_name() -> None:
    assert [flag.name for flag in FLAGS if flag.option and not flag.variables] == []
    ours = {flag.name: flag.variables for flag in FLAGS if flag.prefix and flag.option}
    assert ours == {name: ("GATEWAY_" + name.upper().replace("-", "_"),) for name in ours}
    assert {"socket-dir", "dra", "bridge", "driver-type", "pulse"} <= ours.keys()
