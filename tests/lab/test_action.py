"""The GitHub Action: its steps run as they stand in action.yml, in a checkout, as a runner runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway_lab.conformance.report import from_yaml

ROOT = Path(__file__).parents[2]
ACTION: Mapping[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
SHELL = ("bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c")
"""What a runner makes of ``shell: bash``."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runner's folder, with a checkout of this repository and the first step done."""
    folder = tmp_path_factory.mktemp("runner")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.split(b"\0")
    wanted = re.compile(rb"(gateway|gateway_lab|adapters|devices)/|pyproject.toml|README.md|LICENSE|action.yml")
    for name in (os.fsdecode(one) for one in files if wanted.match(one)):
        place = folder / "checkout" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((ROOT / name).read_bytes())
    (folder / "temp").mkdir()
    install, _ = ACTION["runs"]["steps"]
    done = _step(install, folder, {})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _step(step: Mapping[str, Any], folder: Path, inputs: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a step. There is no network: what it installs besides this project is that of the tests' own environment."""
    given = {name: one.get("default", "") for name, one in ACTION["inputs"].items()} | {**inputs}
    own = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: given[match[1]], text)
        for name, text in step.get("env", {}).items()
    }
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "RUNNER_TEMP": str(folder / "temp"),
        "GITHUB_ACTION_PATH": str(folder / "checkout"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        **own,
    }
    return subprocess.run([*SHELL, step["run"]], check=False, cwd=folder, env=env, capture_output=True, text=True)


def test_the_action_is_made_of_shell_steps_alone() -> None:
    install, examine = ACTION["runs"]["steps"]
    assert ACTION["runs"]["using"] == "composite"
    assert {one["shell"] for one in (install, examine)} == {"bash"}
    named = {name for text in examine["env"].values() for name in re.findall(r"inputs\.([\w-]+)", text)}
    assert named == {*ACTION["inputs"]}, "each input reaches the step, and through the environment alone"
    assert "${{" not in install["run"] + examine["run"]


@pytest.mark.parametrize(
    ("plugin", "status", "badge", "only"),
    [
        pytest.param("python -c pass {socket_dir}", 2, "not examined", "", id="not examined, as it stands"),
        pytest.param("python -m gateway_lab.trivial {socket_dir}", 0, "core kept", "--only registers", id="kept"),
        pytest.param(
            "python -m gateway_lab.trivial {socket_dir}", 1, "core 1 broken", "--only unknown-device", id="broken"
        ),
    ],
)
def test_the_action(runner: Path, plugin: str, status: int, badge: str, only: str) -> None:
    """``only`` one rule where all of them would take a minute."""
    _, examine = ACTION["runs"]["steps"]
    step = {**examine, "run": examine["run"].replace("conformance ", f"conformance {only} ", 1)}
    inputs = {
        "plugin": plugin,
        "name": "my-plugin",
        "version": "v1",
        "kubelets": "1.37",
        "genuine": "no",
        "out": "found",
    }
    (runner / "summary.md").unlink(missing_ok=True)
    done = _step(step, runner, inputs)
    assert done.returncode == status, done.stdout + done.stderr
    told = from_yaml((runner / "found" / "plugin-report.yaml").read_bytes())
    assert (told.plugin, told.version, told.command) == ("my-plugin", "v1", plugin)
    assert badge in (runner / "found" / "plugin-badge.json").read_text()
    assert (runner / "summary.md").read_text().startswith(f"```\ndevice plugin: {plugin}\n")
