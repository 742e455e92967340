"""How `make test` runs again what fails: named at the end with what it said, and never what harms a pod."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
tries = []

def test_late():
    tries.append(1)
    assert len(tries) > 1, "not in time"

def test_harmed():
    tries.append("harmed")
    assert tries.count("harmed") > 1, "GPU-1 is given to both a and b"
"""


def test_what_fails_runs_again_and_is_named(tmp_path: Path) -> None:
    said = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [run] = [line for line in said.splitlines() if " -m pytest " in line]
    again = [one for one in shlex.split(run) if one.startswith("--") and "rerun" in one and "delay" not in one]
    path = tmp_path / "test_tries.py"
    path.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", *again]
    done = subprocess.run([*command, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    told = done.stdout.partition("rerun test summary info")[2]
    assert "RERUN test_tries.py::test_late\n" in told.replace(f"{tmp_path}/", "")
    assert "AssertionError: not in time" in told
    assert "RERUN test_tries.py::test_harmed" not in told
    assert "1 failed, 1 passed, 1 rerun" in told
