"""What a command says if it cannot do its work: one row has the command, its standard error and its exit status."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

WITHOUT_OVERRIDE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Takes from root what other users lack: to read files whose mode forbids it (setpriv is part of util-linux)."""
CONFIG_MAP = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: plugin}\ndata: {a: 'version: v1'}\n"
FILES = {
    "level.yaml": "version: v1\nmigStrategy: mixed\n",
    "section.yaml": "version: v1\ntimeSlicing: {resources: []}\n",
    "plugin.yaml": "version: v1\nplugin: {passDeviceSpecs: true}\n",
    "map.yaml": CONFIG_MAP,
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with everything that a row needs to fail."""
    with tempfile.TemporaryDirectory(prefix="dpg-") as name:
        made = Path(name)
        for file, text in FILES.items():
            (made / file).write_text(text)
        for closed in ("closed", "guarded"):
            (made / closed).mkdir()
        with socket.socket(socket.AF_UNIX) as kubelet, socket.socket(socket.AF_UNIX) as control:
            for one, path in ((kubelet, "guarded/kubelet.sock"), (control, "guarded/0123abcd.sock")):
                one.bind(str(made / path))
                one.listen()
                (made / path).chmod(0)
            (made / "dead").mkdir()
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(made / "dead/kubelet.sock"))
            (made / "closed").chmod(0)
            yield made
            (made / "closed").chmod(0o700)


def closed(state_dir: str) -> str:
    return f"Error: No permission to ask the gateway in {state_dir}. Run this command as root."


def strict(file: str) -> str:
    return f"gateway config show --strict-config --config-file {{}}/{file}"


OBJECT = "this is a Kubernetes object, not a configuration. Mount the ConfigMap, and name a mounted file"
FULL = "Error: Cannot write the output: No space left on device."
ROWS: dict[str, tuple[str, str, int]] = {
    "probe, no right to connect": (
        "gateway probe --socket-dir {}/guarded",
        "Cannot connect to {}/guarded/kubelet.sock: permission denied. Run this command as root.",
        1,
    ),
    "probe, no right to enter the folder": (
        "gateway probe --socket-dir {}/closed",
        "Cannot connect to {}/closed/kubelet.sock: permission denied. Run this command as root.",
        1,
    ),
    "probe, no socket": (
        "gateway probe --socket-dir {}/none",
        "{}/none/kubelet.sock does not exist. Start the kubelet, or set --socket-dir to its device plugin directory.",
        1,
    ),
    "probe, a dead kubelet's socket": (
        "gateway probe --socket-dir {}/dead",
        "No kubelet listens on {}/dead/kubelet.sock. Start the kubelet.",
        1,
    ),
    "probe, a folder that is a file": (
        "gateway probe --socket-dir {}/map.yaml",
        "Cannot connect to {}/map.yaml/kubelet.sock: Not a directory. Is --socket-dir the kubelet's device plugin directory?",
        1,
    ),
    **{
        f"{command}, no right to read the state directory": (
            f"gateway {command} --state-dir {{}}/closed",
            closed("{}/closed"),
            1,
        )
        for command in (
            "status",
            "status --check",
            "devices",
            "cordon GPU-1 --reason x",
            "forget GPU-1",
            "move --to dra",
        )
    },
    "status, no right to connect": ("gateway status --state-dir {}/guarded", closed("{}/guarded"), 1),
    "status, a state directory that is a file": (
        "gateway status --state-dir {}/map.yaml",
        "Error: Cannot read {}/map.yaml: Not a directory. Correct --state-dir.",
        1,
    ),
    "status, a full disk": ("gateway status --json --state-dir {} > /dev/full", FULL, 1),
    "plan, a full disk": ("gateway plan --from 1.28 --to 1.32 > /dev/full", FULL, 1),
    "config show, a full disk": ("gateway config show --backend simulated > /dev/full", FULL, 1),
    "a flag's key at the wrong level": (
        strict("level.yaml"),
        "Error: {}/level.yaml, line 2: migStrategy: unknown key; it belongs at flags.migStrategy",
        2,
    ),
    "sharing's key at the wrong level": (
        strict("section.yaml"),
        "Error: {}/section.yaml, line 2: timeSlicing: unknown key; it belongs at sharing.timeSlicing",
        2,
    ),
    "a section at the wrong level": (
        strict("plugin.yaml"),
        "Error: {}/plugin.yaml, line 2: plugin: unknown key; it belongs at flags.plugin",
        2,
    ),
    "a ConfigMap for the file": (
        strict("map.yaml"),
        f"Error: {{}}/map.yaml, line 1: the file: {OBJECT}",
        2,
    ),
    "DRA without the node's name": (
        "gateway config show --backend simulated --dra on",
        "Error: --dra: needs the node's name. Set --node-name, or NODE_NAME from spec.nodeName",
        2,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_failed_command_names_its_cause_and_the_cure(folder: Path, name: str) -> None:
    command, says, status = ROWS[name]
    words = command.replace("gateway", f"{sys.executable} -m gateway", 1).replace("{}", str(folder))
    shell = [*(WITHOUT_OVERRIDE if os.geteuid() == 0 else []), "bash", "-c", words]
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=60, env=quiet())
    assert (done.stderr.strip(), done.returncode) == (says.replace("{}", str(folder)), status)


def quiet() -> dict[str, str]:
    """An environment in which nothing but the row's words says a setting."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("GATEWAY_", "NODE_NAME"))}


def test_no_setting_that_nobody_gave_is_prose() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "config", "show", "--backend", "simulated", "--json"],
        check=True,
        capture_output=True,
        text=True,
        env=quiet(),
    )
    defaults = [one["value"] for one in json.loads(done.stdout) if one["from"] == "default"]
    assert [value for value in defaults if isinstance(value, str) and " " in value] == []
