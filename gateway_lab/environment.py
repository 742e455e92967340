"""An environment that holds the run-time lock and the gateway, and nothing else: what a node gets.

The benchmark measures there, because a developer's environment flatters and blames wrongly (structlog imports rich wherever
that is installed). The lock's part is kept in the user's cache under its hash; the gateway is built from this checkout and
installed anew each time, with its byte code.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from gateway_lab.kubelets.build import cache

_REPOSITORY: Final = Path(__file__).resolve().parents[1]
_PIP: Final = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")


class UnmadeError(Exception):
    """The environment can't be made. The message ends with what pip said."""


def make() -> Path:
    """Make the environment, or bring it up to date; give its Python.

    Raises:
        UnmadeError: there is no checkout with a lock here, or pip failed.
    """
    lock = _REPOSITORY / "locks" / "run.txt"
    if not lock.is_file():
        raise UnmadeError(f"expected the run-time lock at {lock}: run this from a checkout of the repository")
    key = hashlib.sha256(sys.version.encode() + lock.read_bytes()).hexdigest()[:16]
    home = cache() / "bench" / key
    python = home / "bin" / "python"
    ready = home / ".ready"
    if not ready.exists():
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(home))
        _run(*_PIP, "--python", str(python), "install", "--require-hashes", "-r", str(lock))
        ready.touch()
    with tempfile.TemporaryDirectory(prefix="dpg-") as made:
        # A copy, because a build leaves its traces in the tree that it builds.
        tree = Path(made, "tree")
        tree.mkdir()
        for name in ("adapters", "devices", "gateway", "gateway_lab"):
            shutil.copytree(_REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(_REPOSITORY / name, tree / name)
        _run(*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made, str(tree))
        wheel = next(Path(made).glob("*.whl"))
        _run(
            *_PIP,
            "--python",
            str(python),
            "install",
            "--no-deps",
            "--no-index",
            "--force-reinstall",
            "--compile",
            str(wheel),
        )
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise UnmadeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
