"""The command line: every flag, its variable, and what a wrong one is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gateway import compose
from gateway import daemon as shell
from gateway.cli import main, serve
from gateway.cli.argv import first_word
from gateway.configuration.settings import EX_CONFIG, Settings
from gateway.folder import EXIT_PINNED
from gateway_lab.gatewayproc import BEGUN

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
    flags = {option.opts[0] for option in main.gateway.params if isinstance(option, click.Option)}
    assert flags - {row[0] for row in (*FLAGS, *SWITCHES)} == {"--log-format", "--log-level", "--version"}


def test_without_any_flag_the_defaults_are_a_nodes(given: list[Settings]) -> None:
    call()
    assert given == [Settings()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api", "v2"], ["'v2'", "auto", "v1alpha"]),
        (["--kubelet-version", "1.7"], ["1.8 or later", "1.7"]),
        (["--kubelet-version", "new"], ["such as 1.28", "'new'"]),
        (["--simulate", "small"], ["--simulate needs --backend simulated"]),
        (["--backend", "simulated", "--simulate", "no-such"], ["no-such", "two-resources"]),
        ([], ["--backend simulated", "never simulates"]),
        (["--socket-dir", "/a", "--state-dir", "/a/b"], ["inside --socket-dir", "/var/lib/device-plugin-gateway"]),
        (["--socket-dir", "/" + "x" * 80], ["too long", "107 bytes"]),
        (["--probe-address", ":81", "--metrics-address", ":81"], ["expected two", "only one can listen"]),
        (["--node-condition"], ["NODE_NAME"]),
        (["--startup-taint", "a=b:NoSchedule"], ["without value and effect, got 'a=b:NoSchedule'"]),
        (["--node-condition", "--node-name", "n", "--dra", "only"], ["--dra only doesn't offer"]),
        (["--socket-dir", "x" * 60], ["too long", "107 bytes"]),
        (["--socket-dir", ""], ["'--socket-dir': '' is not a valid path"]),
        (["--startup-grace", "nan"], ["'--startup-grace': expected 0 to 3600 seconds, got 'nan': write a number"]),
        (["--startup-grace", "1h"], ["expected 0 to 3600 seconds, got '1h': write a number without a unit"]),
        (["--startup-grace", "-1"], ["expected 0 to 3600 seconds, got '-1'"]),
        (["--startup-grace", ""], ["expected 0 to 3600 seconds, got ''"]),
        (["compat", "--cap", "0"], ["'--cap': expected 0.1 to 600 seconds, got '0'"]),
        (["status", "--state-dir", ""], ["'--state-dir': '' is not a valid path"]),
        (["probe", "--socket-dir", ""], ["'--socket-dir': '' is not a valid path"]),
        (["doctor", "--host-root", ""], ["'--host-root': '' is not a valid path"]),
        (["dev", "kubelet", "--version", "1.37", "--socket-dir", ""], ["'--socket-dir': '' is not a valid directory"]),
        (["demo", "--pace", "nan"], ["'--pace': expected 0 to 60 seconds, got 'nan'"]),
        (["cordon", "GPU-5f3a"], ["Missing option '--reason'", "or set GATEWAY_CORDON_REASON"]),
        (["cross"], ["Missing option '--to'. Choose from: dra, plugin. Give it, or set GATEWAY_CROSS_TO."]),
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
    status = 1 if not arguments else 78 if "no-such" in arguments else 2  # hardware may come; settings stay as they are
    assert result.exit_code == status
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["compat", "--only", "{}"], id="an error of a command"),
        pytest.param(["{}", "more"], id="no such command"),
        pytest.param(["plan", "--from", "{}"], id="a version that is none"),
        pytest.param(["probe", "--socket-dir", "/nowhere/{}"], id="what a probe found"),
        pytest.param(["--socket-dir", "/nowhere/{}", "--backend", "simulated", "config", "show"], id="settings"),
        pytest.param(
            ["--socket-dir", "/nowhere/{}", "--backend", "simulated", "config", "show", "--json"], id="as JSON"
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
        ([], "GATEWAY_STATE_DIR", "", "'--state-dir': '' is not a valid path"),
        ([], "GATEWAY_POD_RESOURCES_SOCKET", "", "'--pod-resources-socket': '' is not a valid path"),
        ([], "GATEWAY_STARTUP_GRACE", "nan", "'--startup-grace': expected 0 to 3600 seconds, got 'nan'"),
        ([], "GATEWAY_API", "v2", "'--api': 'v2' is not one of"),
        ([], "GATEWAY_SIMULATE", "small", "--simulate needs --backend simulated"),
        (["compat"], "GATEWAY_COMPAT_KUBELETS", "1.99", "'--kubelets': kubelet 1.99 is not known here"),
    ],
)
def test_a_wrong_variable_is_named(arguments: list[str], variable: str, text: str, words: str) -> None:
    result = call(*arguments, **{variable: text})
    said = " ".join(result.output.split())
    assert (result.exit_code, words in said, said.count("comes from the variable")) == (2, True, 1), said
    assert f"comes from the variable {variable})" in said


@pytest.mark.parametrize(
    ("arguments", "variable", "name"),
    [
        pytest.param(["--backend", "simulated"], "GATEWAY_SOCKET_DIR", "socket-dir", id="a path"),
        pytest.param(["--backend", "simulated"], "GATEWAY_SIMULATE", "simulate", id="a profile"),
        pytest.param(
            ["--backend", "simulated"], "KUBECONFIG", "kubeconfig", id="a setting that NVIDIA's plugin has, too"
        ),
        pytest.param(["config", "show"], "GATEWAY_STATE_DIR", "state-dir", id="that is only shown"),
    ],
)
def test_a_setting_that_is_no_utf_8_is_refused(arguments: list[str], variable: str, name: str) -> None:
    """Neither gRPC nor JSON can say it."""
    result = call(*arguments, **{variable: os.fsdecode(b"/\xff")})
    assert (result.exit_code, result.output.split(" (")[0]) == (EX_CONFIG, f"Error: {name}"), result.exception
    assert f"({variable}): expected UTF-8, got '/\\udcff'" in result.output


def test_an_option_in_the_place_of_a_variable_that_is_wrong_counts(given: list[Settings]) -> None:
    assert call("--state-dir", "/t", GATEWAY_STATE_DIR="").exit_code == 0
    assert given[0].state_dir == Path("/t")


def test_two_ports_that_anybody_may_choose_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Settings] = []

    async def run(settings: Settings) -> int:
        ran.append(settings)
        return 0

    monkeypatch.setattr(shell, "Gateway", lambda settings, _source, **_: settings)
    monkeypatch.setattr(serve, "_run", run)
    result = call("--backend", "simulated", "--probe-address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0")
    assert (result.exit_code, len(ran)) == (0, 1), result.output


def test_the_host_service_is_not_started_again_where_that_does_not_help() -> None:
    unit = Path(__file__).parents[2] / "deploy/systemd/device-plugin-gateway@.service"
    assert f"RestartPreventExitStatus=2 {EX_CONFIG}\n" in unit.read_text()


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["probe", "--help"], ["demo", "--help"], ["dev", "kubelet", "--help"], ["config", "show", "--help"]],
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
        "import gateway.cli.main as command\n"
        "command._settings = lambda *_: (os.kill(os.getpid(), signal.SIGHUP), sys.exit(7))\n"
        "command.gateway()\n"
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


@pytest.mark.parametrize(("option", "command"), [("--state-dir", "status"), ("--socket-dir", "probe")])
def test_where_it_looks_can_be_said_before_the_command_or_after_it(option: str, command: str, folder: Path) -> None:
    before, after = str(folder / "before"), str(folder / "after")
    assert before in CliRunner().invoke(main.gateway, [option, before, command]).output.replace("\n", "")
    both = CliRunner().invoke(main.gateway, [option, before, command, option, after]).output.replace("\n", "")
    assert after in both
    assert before not in both


def test_a_probe_of_nothing_says_nothing_of_its_api(folder: Path) -> None:
    result = call("probe", "--socket-dir", str(folder))
    assert (result.exit_code, "kubelet.sock does not exist" in result.stderr) == (1, True)


def test_a_probe_of_nothing_says_so_in_json(folder: Path) -> None:
    result = call("probe", "--socket-dir", str(folder), "--json")
    assert (result.exit_code, json.loads(result.output)["api"]) == (1, None)
    assert "kubelet.sock does not exist" in json.loads(result.output)["says"]


def test_a_pinned_socket_directory_ends_it_with_75(folder: Path) -> None:
    """As in a container whose hostPath was deleted and made anew: the mount still shows the deleted one."""
    sockets = folder / "dp"
    sockets.mkdir()
    held = os.open(sockets, os.O_RDONLY)
    command = [sys.executable, "-m", "gateway", "--backend", "simulated", "--state-dir", str(folder / "state")]
    daemon = subprocess.Popen(
        [*command, "--socket-dir", f"/proc/self/fd/{held}", "--log-format", "json"],
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[held],
    )
    try:
        assert daemon.stderr is not None
        for line in daemon.stderr:
            if json.loads(line)["event"] in BEGUN:
                break
        shutil.rmtree(sockets)
        sockets.mkdir()
        said = [json.loads(line) for line in daemon.stderr]
        assert daemon.wait(10) == EXIT_PINNED
        assert any("must be restarted" in line.get("advice", "") for line in said)
    finally:
        os.close(held)
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGKILL)
        daemon.communicate()


def test_auto_never_simulates() -> None:
    with pytest.raises(compose.NoBackendError, match="never simulates"):
        compose.source(Settings(backend="auto"))
