"""``gateway support-bundle``, ``completion`` and ``status --check``: what people give away, and what scripts go by."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from gateway.cli import bundle
from gateway.cli.main import gateway
from gateway.telling.status import GatewayStatus
from gateway.wires import control
from tests.unit.answering import gateways
from tests.unit.documents import FULL, OTHER, SERVING, WAITING

HOLDER = "default/training-0/main"
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln"  # noqa: S105 - nobody's


@pytest.fixture
def node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("KUBERNETES_SERVICE_HOST", "GATEWAY_STATE_DIR", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    state = folder / "var/lib/device-plugin-gateway"
    state.mkdir(parents=True)
    (state / "ledger.json").write_text(json.dumps({"format": 1, "note": TOKEN}))
    sockets = folder / "var/lib/kubelet/device-plugins"
    sockets.mkdir(parents=True)
    entry = {
        "PodUID": "u",
        "ContainerName": "main",
        "ResourceName": "r",
        "DeviceIDs": ["GPU-0"],
        "AllocResp": "c2VjcmV0",
    }
    (sockets / "kubelet_internal_checkpoint").write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    log = folder / "var/log/pods/gpu_device-plugin-gateway-nvidia-x_1/gateway/0.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"granted '{HOLDER}' on {os.uname().nodename} Authorization: Bearer abc.def\n")
    with gateways(state, {SERVING: {"status": FULL}}, "status"):
        yield folder


def members(node: Path, *arguments: str) -> dict[str, str]:
    output = node / "bundle.tar.gz"
    done = CliRunner().invoke(
        gateway, ["support-bundle", "--host-root", str(node), "--output", str(output), *arguments]
    )
    assert done.exit_code == 0, done.output
    with tarfile.open(output) as tar:
        return {
            member.name.removeprefix("bundle/"): (tar.extractfile(member) or io.BytesIO()).read().decode()
            for member in tar.getmembers()
        }


def test_it_holds_what_a_person_would_ask_for(node: Path) -> None:
    assert set(members(node)) == {
        "doctor.json",
        "environment.json",
        "kubelet-checkpoint.json",
        "log-gpu_device-plugin-gateway-nvidia-x_1-0.log",
        "settings.json",
        "snapshot.json",
        "state.json",
        "status.json",
        "versions.json",
    }


def test_a_file_that_cannot_be_written_is_named(node: Path) -> None:
    """As in a container whose root is read-only."""
    away = node / "not there" / "bundle.tgz"
    done = CliRunner().invoke(gateway, ["support-bundle", "--host-root", str(node), "--output", str(away)])
    assert (done.exit_code, f"written to {away} (No such file" in done.output, "--output" in done.output) == (
        1,
        True,
        True,
    )


def test_names_and_secrets_are_not_given_away(node: Path) -> None:
    whole = "\n".join(members(node).values())
    for word in (HOLDER, "training-0", "default/", TOKEN, "abc.def", "c2VjcmV0"):
        assert word not in whole, word
    assert not re.search(rf"(?<![\w.-]){re.escape(os.uname().nodename)}(?![\w.-])", whole)
    assert "GPU-0f3a0c6e" in whole
    assert "double-bit ECC error" in whole


def test_one_name_is_one_word_throughout(node: Path) -> None:
    found = members(node)
    word = json.loads(found["status.json"])["gateways"][0]["resources"][0]["devices"][0]["holder"]
    assert f"granted '{word}' on node" in found["log-gpu_device-plugin-gateway-nvidia-x_1-0.log"]


def test_names_stay_where_they_are_wanted(node: Path) -> None:
    found = members(node, "--with-names")
    assert HOLDER in found["status.json"]
    assert TOKEN not in found["state.json"]


def test_variables_that_look_like_secrets_are_left_out(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_TOKEN", "hunter2")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    monkeypatch.setenv("HOME_ADDRESS", "elsewhere")
    found = json.loads(members(node)["environment.json"])
    assert found["GATEWAY_TOKEN"] == "REDACTED"  # noqa: S105 - that is what it is about
    assert found["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "HOME_ADDRESS" not in found


def test_a_name_is_replaced_where_it_stands_alone() -> None:
    clean = bundle.redacted(b"web web-2 web.log 'web' x/web", {"web": "pod-1"})
    assert clean == b"pod-1 web-2 web.log 'pod-1' x/pod-1"


def test_of_a_long_log_the_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_MOST_LOG", 4)
    (tmp_path / "log").write_text("beginning end!")
    assert bundle._end(tmp_path / "log") == b"end!"


def checked(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(gateway, ["status", "--state-dir", str(folder), "--check"])
    return done.exit_code, done.output


SERVED = replace(FULL, resources=FULL.resources[:1])


@pytest.mark.parametrize(
    ("answers", "status", "words"),
    [
        ({SERVING: SERVED}, 0, "ready"),
        ({SERVING: SERVED, WAITING: OTHER}, 0, "ready"),
        ({SERVING: FULL}, 1, "nvidia.com/mig-1g.10gb: waiting to register again: Register was refused"),
        ({SERVING: replace(SERVED, waits_for="the folder /x")}, 1, "waiting for the folder /x"),
    ],
)
def test_a_script_goes_by_the_exit_status(
    folder: Path, answers: dict[str, GatewayStatus], status: int, words: str
) -> None:
    with gateways(folder, {token: {"status": answer} for token, answer in answers.items()}, "status"):
        code, output = checked(folder)
    assert (code, output.splitlines()[0]) == (status, "not ready" if status else "ready")
    assert words in output


def test_a_gateway_that_does_not_answer_is_not_ready(folder: Path) -> None:
    with gateways(folder, {SERVING: {"status": SERVED}, WAITING: control.ControlError("no")}, "status"):
        code, output = checked(folder)
    assert code == 1
    assert WAITING in output


def test_where_none_answers_it_is_neither(folder: Path) -> None:
    assert checked(folder) == (2, "no gateway answers\n")
    with gateways(folder, {WAITING: control.ControlError("it hangs")}, "status"):
        code, output = checked(folder)
    assert (code, output.splitlines()[0]) == (2, "no gateway answers")
    assert f"{WAITING}: " in output
    assert "it hangs" in output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_what_completes(shell: str) -> None:
    done = CliRunner().invoke(gateway, ["completion", shell])
    assert done.exit_code == 0
    assert f"_GATEWAY_COMPLETE={shell}_complete" in done.output


def test_commands_are_completed() -> None:
    complete = click.shell_completion.BashComplete(gateway, {}, "gateway", "_GATEWAY_COMPLETE")
    assert [item.value for item in complete.get_completions([], "do")] == ["doctor"]
