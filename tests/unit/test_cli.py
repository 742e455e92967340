"""The command line: every flag, its variable, and what a wrong one is told."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gateway import VERSION
from gateway.cli import main
from gateway.cli.argv import first_word
from gateway.configuration import flags as flagtable
from gateway.configuration.settings import SOCKET_DIR, Settings
from gateway.folder import EXIT_PINNED
from gateway_lab.gatewayproc import GatewayProcess, gateway_command

pytestmark = pytest.mark.usefixtures("no_logging")


def call(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(main.gateway, list(arguments), env=variables)


FLAGS = [
    ("--api", "v1alpha", "api", "v1alpha"),
    ("--socket-dir", "/s", "socket_dir", Path("/s")),
    ("--state-dir", "/t", "state_dir", Path("/t")),
    ("--pod-resources-socket", "/p.sock", "pod_resources", Path("/p.sock")),
    ("--backend", "simulated", "backend", "simulated"),
    ("--simulate", "small", "profile", "small"),
    ("--kubelet-version", "v1.28.15", "kubelet_minor", 28),
    ("--startup-grace", "30", "startup_grace", 30.0),
    ("--metrics-address", "0.0.0.0:9400", "metrics_address", ("0.0.0.0", 9400)),  # noqa: S104 - data
    ("--probe-address", ":8081", "probe_address", ("", 8081)),
    ("--startup-taint", "example.com/starting", "startup_taint", "example.com/starting"),
]


@pytest.mark.parametrize(("flag", "text", "field", "value"), FLAGS)
def test_flag_and_variable(given: list[Settings], flag: str, text: str, field: str, value: object) -> None:
    variable = "GATEWAY_" + flag.removeprefix("--").replace("-", "_").upper()
    assert call(flag, text).exit_code == 0
    assert call(**{variable: text}).exit_code == 0
    assert call(flag, text, **{variable: "0.1" if flag == "--api" else text}).exit_code == 0
    assert [getattr(settings, field) for settings in given] == [value] * 3


SWITCHES = [
    ("--metrics-device-ids", "metrics_device_ids"),
    ("--host-service", "host_service"),
    ("--node-condition", "node_condition"),
    ("--node-events", "node_events"),
    ("--gpu-metrics", "gpu_metrics"),
]


@pytest.mark.parametrize(("flag", "field"), SWITCHES)
def test_a_flag_without_a_value(given: list[Settings], flag: str, field: str) -> None:
    variable = "GATEWAY_" + field.upper()
    assert call(flag).exit_code == call(**{variable: "true"}).exit_code == call().exit_code == 0
    assert [getattr(settings, field) for settings in given] == [True, True, False]


def test_every_flag_has_a_row() -> None:
    flags = {f"--{flag.name}" for flag in flagtable.FLAGS if flag.prefix and flag.field in Settings.__struct_fields__}
    others = {"--log-format", "--log-level", "--strict-config", "--dra", "--dra-drivers", "--dra-shares", "--POD_UID"}
    assert flags - {row[0] for row in (*FLAGS, *SWITCHES)} == others


def test_without_any_flag_the_defaults_are_a_nodes(given: list[Settings]) -> None:
    call()
    assert given == [Settings()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api", "v2"], ["Error: --api: unknown value 'v2'. Allowed: auto, v1beta1"]),
        (["--kubelet-version", "1.7"], ["--kubelet-version: kubelet 1.7 has no device plugins", "1.8"]),
        (["--kubelet-version", "new"], ["such as 1.28", "'new'"]),
        (["--simulate", "small"], ["--simulate needs --backend simulated"]),
        (["--backend", "simulated", "--simulate", "no-such"], ["no-such", "two-resources"]),
        ([], ["--backend simulated", "never simulates"]),
        (["--socket-dir", "/a", "--state-dir", "/a/b"], ["inside --socket-dir", "/var/lib/device-plugin-gateway"]),
        (["--socket-dir", "/" + "x" * 80], ["too long", "107 bytes"]),
        (["--probe-address", ":81", "--metrics-address", ":81"], ["only one can listen", "Use two ports"]),
        (["--node-condition"], ["NODE_NAME"]),
        (["--startup-taint", "a=b:NoSchedule"], ["'a=b:NoSchedule' is not a taint's key"]),
        (["--node-condition", "--node-name", "n", "--dra", "only"], ["--dra only doesn't offer"]),
        (["--socket-dir", "x" * 60], ["too long", "107 bytes"]),
        (["--socket-dir", ""], ["Error: --socket-dir: the value is empty. Write a path, or leave it out"]),
        (
            ["--startup-grace", "nan"],
            ["--startup-grace: 'nan' is not a number from 0 to 3600 (seconds, without a unit)"],
        ),
        (["--startup-grace", "1h"], ["'1h' is not a number from 0 to 3600 (seconds, without a unit)"]),
        (["--startup-grace", "-1"], ["'-1' is not a number from 0 to 3600"]),
        (["--startup-grace", ""], ["'' is not a number from 0 to 3600"]),
        (["conformance", "x", "--cap", "0"], ["--cap: '0' is not a number from 0.1 to 600"]),
        (["status", "--state-dir", ""], ["--state-dir: the value is empty"]),
        (["probe", "--socket-dir", ""], ["Error: --socket-dir: the value is empty. Write a path, or leave it out"]),
        (["doctor", "--host-root", ""], ["--host-root: the value is empty"]),
        (
            ["dev", "kubelet", "--version", "1.37", "--socket-dir", ""],
            ["--socket-dir: the value is empty. Write a directory"],
        ),
        (["demo", "--pace", "nan"], ["--pace: 'nan' is not a number from 0 to 60"]),
        (["cordon", "GPU-5f3a"], ["Missing option '--reason'", "or set GATEWAY_CORDON_REASON"]),
        (["move"], ["Missing option '--to'. Choose from: dra, plugin. Give it, or set GATEWAY_MOVE_TO."]),
        (["dance"], ["No such command 'dance'"]),
        (["stauts"], ["No such command 'stauts'", "'status'"]),
    ],
)
def test_a_wrong_flag_is_told_what_was_expected(
    arguments: list[str], words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := folder / ("y" * 60)).mkdir()
    monkeypatch.chdir(here)
    result = call(*arguments)
    text = " ".join(result.output.split())
    assert result.exit_code == (2 if arguments else 1)  # hardware may come; settings stay as they are
    assert "Error: " in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["compat", "--only", "{}"], id="an error of a command"),
        pytest.param(["{}", "more"], id="no such command"),
        pytest.param(["plan", "--from", "{}"], id="a version that is none"),
        pytest.param(["probe", "--socket-dir", "/nowhere/{}"], id="what a probe found"),
        pytest.param(["config", "show", "--socket-dir", "/nowhere/{}", "--backend", "simulated"], id="settings"),
        pytest.param(
            ["config", "show", "--socket-dir", "/nowhere/{}", "--backend", "simulated", "--json"], id="as JSON"
        ),
    ],
)
def test_what_somebody_wrote_steers_no_terminal(arguments: list[str]) -> None:
    steering = "\x1b[31m\x9b\u202e"
    result = CliRunner().invoke(main.gateway, [one.format(steering) for one in arguments], color=True)
    assert not set(steering[0] + steering[-2:]) & set(result.output), result.output


@pytest.mark.parametrize(
    ("arguments", "variable", "text", "words"),
    [
        ([], "GATEWAY_STATE_DIR", "", "Error: GATEWAY_STATE_DIR: the value is empty"),
        ([], "GATEWAY_POD_RESOURCES_SOCKET", "", "Error: GATEWAY_POD_RESOURCES_SOCKET: the value is empty"),
        ([], "GATEWAY_STARTUP_GRACE", "nan", "Error: GATEWAY_STARTUP_GRACE: 'nan' is not a number from 0 to 3600"),
        ([], "GATEWAY_API", "v2", "Error: GATEWAY_API: unknown value 'v2'. Allowed: "),
        ([], "GATEWAY_SIMULATE", "small", "(--simulate comes from GATEWAY_SIMULATE)"),
        (["config", "show"], "GATEWAY_API", "v2", "Error: GATEWAY_API: unknown value 'v2'"),
        (["compat"], "GATEWAY_COMPAT_KUBELETS", "1.99", "Error: GATEWAY_COMPAT_KUBELETS: kubelet 1.99 is unknown"),
    ],
)
def test_a_wrong_variable_is_named(arguments: list[str], variable: str, text: str, words: str) -> None:
    result = call(*arguments, **{variable: text})
    said = " ".join(result.output.split())
    assert (result.exit_code, words in said, said.count(variable)) == (2, True, 1), said


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        pytest.param(["--backend", "simulated"], "GATEWAY_SOCKET_DIR", id="a path"),
        pytest.param(["--backend", "simulated"], "GATEWAY_SIMULATE", id="a profile"),
        pytest.param(["--backend", "simulated"], "KUBECONFIG", id="a setting that NVIDIA's plugin has, too"),
        pytest.param(["config", "show"], "GATEWAY_STATE_DIR", id="that is only shown"),
    ],
)
def test_a_setting_that_is_no_utf_8_is_refused(arguments: list[str], variable: str) -> None:
    """Neither gRPC nor JSON can say it."""
    result = call(*arguments, **{variable: os.fsdecode(b"/\xff")})
    assert (result.exit_code, result.output) == (2, f"Error: {variable}: '/\\udcff' is not UTF-8\n"), result.exception


def test_an_option_in_the_place_of_a_variable_that_is_wrong_counts(given: list[Settings]) -> None:
    assert call("--state-dir", "/t", GATEWAY_STATE_DIR="").exit_code == 0
    assert given[0].state_dir == Path("/t")


def test_the_unit_starts_the_host_service_and_not_again_where_that_does_not_help(given: list[Settings]) -> None:
    unit = (Path(__file__).parents[2] / "deploy/systemd/device-plugin-gateway@.service").read_text()
    assert "\nRestartPreventExitStatus=2\n" in unit
    [words] = re.findall(r"\nExecStart=/\S+/gateway (.*)\n", unit)
    assert (call(*words.split()).exit_code, [one.host_service for one in given]) == (0, [True])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["config", "show", "--help"],
        ["demo", "--help"],
        ["dev", "kubelet", "--help"],
        ["devices", "--help"],
        ["plan", "--help"],
        ["probe", "--help"],
    ],
)
def test_help_has_examples(arguments: list[str]) -> None:
    result = call(*arguments)
    assert (result.exit_code, "Examples:" in result.output) == (0, True)


@pytest.mark.parametrize(
    ("program", "first"),
    [
        ("from gateway.__main__ import nvidia; nvidia()", "nvidia-device-plugin"),
        ("from gateway.__main__ import main; main()", sys.executable),
    ],
    ids=["NVIDIA's name", "our own"],
)
def test_the_first_word_of_a_process_is_the_name_that_others_look_for(folder: Path, program: str, first: str) -> None:
    """NVIDIA's config-manager looks for it at the places of /proc, and splits at NUL once those at the end are gone."""
    (sockets := folder / "dp").mkdir()
    arguments = ["--backend=simulated", "--socket-dir", str(sockets), "--state-dir", str(folder / "state")]
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # it logs: it runs
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
        process.kill()
    assert words[0] == first
    assert words[-len(arguments) :] == arguments


@pytest.mark.parametrize("entry", ["main", "nvidia"])
def test_a_hangup_while_the_program_is_imported_does_not_end_it(entry: str) -> None:
    program = f"""
import signal, sys
class HungUp:
    def find_spec(self, name, path, target=None):
        if name == "gateway.cli.main":
            signal.raise_signal(signal.SIGHUP)
sys.meta_path.insert(0, HungUp())
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored.
from gateway.__main__ import {entry}
{entry}()
"""
    ended = subprocess.run([sys.executable, "-c", program, "--version"], check=False, capture_output=True, text=True)
    assert (ended.returncode, "version" in ended.stdout) == (0, True), ended.stderr


def test_a_hangup_while_the_settings_are_read_does_not_end_it() -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # Who is run by nohup would ignore it.
        "import gateway.cli.run as command\n"
        "command.read = lambda *_: (os.kill(os.getpid(), signal.SIGHUP), sys.exit(7))\n"
        "command.run()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 7


def test_a_command_meets_a_hangup_as_it_was_started() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert CliRunner().invoke(main.gateway, ["plan", "--help"], obj=signal.SIG_DFL).exit_code == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_name_without_room_changes_nothing() -> None:
    before = Path("/proc/self/cmdline").read_bytes()
    assert not first_word("x" * 100_000)
    assert Path("/proc/self/cmdline").read_bytes() == before


# How it is started.

RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "the command": (["run"], {}),
    "the command with options": (["run", "--api", "auto"], {}),
    "options without a command": (["--api", "auto"], {}),
    "one dash, as with Go": (["-v", "5", "-mig-strategy", "none"], {}),
    "nothing, and no terminal": ([], {}),
    "variables alone": ([], {"GATEWAY_SOCKET_DIR": "/s"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_starts_the_daemon(given: list[Settings], name: str) -> None:
    words, variables = RUNS[name]
    result = call(*words, **variables)
    assert (result.exit_code, len(given)) == (0, 1), result.output
    assert given[0].socket_dir == Path(variables.get("GATEWAY_SOCKET_DIR", SOCKET_DIR))


def test_the_variable_of_an_option_has_no_command_in_its_name(given: list[Settings]) -> None:
    assert call("run", GATEWAY_RUN_SOCKET_DIR="/s").exit_code == 0
    assert given[0].socket_dir == SOCKET_DIR


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("main", "Usage: gateway [OPTIONS] COMMAND"),
        ("nvidia", "Error: GATEWAY_API: unknown value"),  # The daemon begins, and ends.
    ],
)
def test_with_nothing_on_a_terminal(program: str, words: str) -> None:
    """Help; but under NVIDIA's name it is the daemon."""
    ours, theirs = pty.openpty()
    code = f"import sys; sys.argv = ['gateway']; from gateway.__main__ import {program}; {program}()"
    environment = os.environ | {"GATEWAY_API": "v9"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        said = read_all(ours)
        assert process.wait(30) == (0 if program == "main" else 2), said
    assert words in said, said


def read_all(terminal: int) -> str:
    """Read until the other side is closed, which is an error (EIO) of a terminal."""
    found = b""
    with contextlib.suppress(OSError):
        while more := os.read(terminal, 4096):
            found += more
    os.close(terminal)
    return found.decode()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--state-dir /x status", "Options go after their command. Write: gateway status --state-dir=/x"),
        ("--socket-dir=/x probe --json", "Write: gateway probe --socket-dir=/x --json"),
        ("--api auto run --backend none", "Write: gateway run --api=auto --backend none"),
        ("-mig-strategy mixed config show", "Write: gateway config show --mig-strategy=mixed"),
        ("--config-file f --dra on doctor", "Write: gateway doctor --config-file=f --dra=on"),
        ("--api auto status", "--api is an option of `gateway run`, not of `gateway status`. Leave it out"),
        ("run --state-dir /x status", "Write: gateway status --state-dir=/x"),
        ("run status", "Got unexpected extra argument (status)"),
        ("--api auto dance", "Got unexpected extra argument (dance)"),
    ],
)
def test_an_option_of_the_daemon_in_front_of_a_command_is_refused(given: list[Settings], words: str, says: str) -> None:
    result = call(*words.split())
    assert (result.exit_code, given) == (2, [])
    assert result.output.endswith(f"{says}\n"), result.output


def test_the_help_is_short_and_begins_with_the_commands_by_group() -> None:
    lines = call("--help").output.splitlines()
    assert len(lines) <= 60
    headings = [line for line in lines if line.endswith(":") and not line.startswith("  ")]
    assert headings == ["Daemon:", "Look:", "Orders:", "Tools:", "Options:"]
    assert [name for name in main.COMMANDS if not any(line.startswith(f"  {name} ") for line in lines)] == []


@pytest.mark.parametrize("words", [["version"], ["version", "-o", "json"], ["--version"]])
def test_the_version_is_printed(words: list[str]) -> None:
    result = call(*words)
    assert (result.exit_code, VERSION in result.output) == (0, True)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_what_prints_a_table_prints_json_as_kubectl_does(name: str) -> None:
    """All that has --json has -o; but the demo, which draws a picture."""
    command = main.gateway.get_command(click.Context(main.gateway), name)
    assert command is not None
    commands = [*command.commands.values()] if isinstance(command, click.Group) else [command]
    for one in commands:
        options = {word for option in one.params for word in option.opts}
        assert name == "demo" or ("--json" in options) is ("-o" in options)


def test_a_probe_of_nothing_says_so_in_json(folder: Path) -> None:
    result = call("probe", "--socket-dir", str(folder), "--json")
    assert (result.exit_code, json.loads(result.output)["api"]) == (1, None)
    assert "kubelet.sock does not exist" in json.loads(result.output)["says"]


async def test_a_pinned_socket_directory_ends_it_with_75(folder: Path) -> None:
    """As in a container whose hostPath was deleted and made anew: the mount still shows the deleted one."""
    (folder / "dp").mkdir()
    held = os.open(folder / "dp", os.O_RDONLY)
    mount = Path(f"/proc/{os.getpid()}/fd/{held}")
    try:
        async with await GatewayProcess.launch(gateway_command(mount, folder / "state")) as gateway:
            await gateway.begun()
            while (folder / "dp").exists():  # The gateway makes its folder in it again.
                shutil.rmtree(folder / "dp", ignore_errors=True)
            assert await gateway.wait() == EXIT_PINNED
            assert "must be restarted" in gateway.log()
    finally:
        os.close(held)
