"""A package of another project in the place of ours is named before anything is imported of it (``test_wheel`` has pip's view)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("spoiled", "status", "said"),
    [
        pytest.param({}, 0, "", id="ours"),
        pytest.param({"ours/adapters/__init__.py": "1 / 0\n"}, 2, "another one is in {}/ours/adapters", id="merged"),
        pytest.param({"first/devices/__init__.py": "1 / 0\n"}, 2, "another one is in {}/first/devices", id="hidden"),
        pytest.param(
            {"first/devices/__init__.py": '"""device-plugin-gateway"""\n1 / 0\n'},
            2,
            "another one is in {}/first/devices",
            id="of another release",
        ),
        pytest.param(
            {"ours/devices": ""}, 2, "'devices' of device-plugin-gateway should be in {}/ours/devices", id="gone"
        ),
    ],
)
def test_whose_packages_they_are(tmp_path: Path, spoiled: dict[str, str], status: int, said: str) -> None:
    for name in ("gateway", "adapters", "devices"):
        (tmp_path / "ours" / name).mkdir(parents=True)
        shutil.copy(ROOT / name / "__init__.py", tmp_path / "ours" / name)
    shutil.copytree(ROOT / "gateway/cli", tmp_path / "ours/gateway/cli", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ours/gateway/cli/main.py").write_text("import adapters, devices\n")
    for path, text in spoiled.items():
        if text:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        else:
            shutil.rmtree(tmp_path / path)
    # A Python that sees nothing else: no site-packages, in which this project is installed.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "gateway.cli.main"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/first{os.pathsep}{tmp_path}/ours"},
        cwd="/",
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, said.format(tmp_path) in done.stderr) == (status, True), done.stderr
