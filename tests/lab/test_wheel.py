"""What pip installs: the wheel holds the data the code reads at run time, and nothing that isn't the product."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("adapters", "devices", "gateway", "gateway_lab")


@pytest.fixture(scope="module")
def wheel() -> Iterator[Path]:
    """Build the wheel from a copy, so that the build leaves nothing in this tree."""
    with tempfile.TemporaryDirectory(prefix="dpg-wheel-") as scratch:
        tree = Path(scratch, "tree")
        for package in PACKAGES:
            shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", scratch, str(tree)], check=True)
        yield next(Path(scratch).glob("*.whl"))


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    with ZipFile(wheel) as opened:
        return set(opened.namelist())


def _sources(*patterns: str) -> list[str]:
    """Give every file of the packages that matches, as the wheel should name it."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for pattern in patterns
        for path in (ROOT / package).rglob(pattern)
    )


@pytest.mark.parametrize("pattern", ["*.py", "*.pyi", "py.typed", "*.yaml"])
def test_the_wheel_holds_every(pattern: str, contents: set[str]) -> None:
    sources = _sources(pattern)
    assert sources, f"this tree has no {pattern}"
    assert not set(sources) - contents


def test_the_wheel_holds_nothing_else(contents: set[str]) -> None:
    tops = {name.split("/")[0] for name in contents}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def _rival(folder: Path) -> Path:
    """Make the wheel of another project that has a package ``adapters``, as one of PyPI has."""
    path = folder / "adapters-1.2.0-py3-none-any.whl"
    info = "adapters-1.2.0.dist-info"
    files = {
        "adapters/__init__.py": '"""Adapters for language models."""\n',
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: adapters\nVersion: 1.2.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with ZipFile(path, "w") as opened:
        for name, text in files.items():
            opened.writestr(name, text)
    return path


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """Make an environment with this project in it, and what it needs from the one of the tests; give its interpreter."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    # What is in a .pth comes last, and of what is in it no .pth is read: an editable install there isn't seen.
    (site / "needed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    _install(python, wheel)
    return python


def _install(python: Path, wheel: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True)


def _gateway(python: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(python.with_name("gateway")), "--version"]
    return subprocess.run(command, env=environment, cwd="/", text=True, capture_output=True, check=False)


def test_another_package_of_the_same_name_is_named(environment: Path, tmp_path: Path) -> None:
    assert _gateway(environment).returncode == 0

    other = tmp_path / "elsewhere" / "devices"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    hidden = _gateway(environment, PYTHONPATH=str(other.parent))
    assert (hidden.returncode, f"but another one is in {other}/__init__.py" in hidden.stderr) == (2, True)

    _install(environment, _rival(tmp_path))
    merged = _gateway(environment)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    named = f"but that of adapters is in {site}/adapters/__init__.py" in merged.stderr
    assert (merged.returncode, named, "Traceback" in merged.stderr) == (2, True, False)
