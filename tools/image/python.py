"""Python's part of the root: the locked wheels and our own, laid out by pip for the root's Python, and byte code of all.

pip of the project's environment does it for the image's Python, from wheels alone: nothing is built but our own wheel, and
nothing that a package says is run. The byte code is made by the same Python, without a check of times or contents:
the daemon reads no source when it starts, and the layer's digest depends on no clock.
"""

from __future__ import annotations

import configparser
import email
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.image import debian
from tools.image.contents import ImageError

SITE = "usr/lib/python3/dist-packages"
_OURS = "device-plugin-gateway"
_OLDEST_GLIBC = 17
_NEWEST_GLIBC = 41  # 2.N, as Debian 13 has it
_RECORDS = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"}


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """An installed wheel: its name and version, its archive's SHA-256 (none for our own), its licence where it is said."""

    name: str
    version: str
    sha256: str | None
    licence: str | None


def install(lock: Path, own: Path, root: Path, python: str, triple: str) -> list[Wheel]:
    """Install what the lock says and our own wheel.

    Raises:
        ImageError: pip could not, or a hash differs.
    """
    site = root / SITE
    machine = triple.partition("-")[0]
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    target = [f"--platform={name}" for name in (*platforms, f"manylinux2014_{machine}")]
    report = root.parent / "report.json"
    common = ["install", "--no-deps", "--no-compile", "--only-binary=:all:", f"--target={site}", f"--report={report}"]
    _pip(
        *common,
        "--require-hashes",
        "--implementation=cp",
        f"--python-version={python}",
        *target,
        f"--requirement={lock}",
    )
    hashes = archives(report.read_text())
    _pip(*common, "--no-index", f"--python-version={python}", str(own))
    shutil.rmtree(site / "bin", ignore_errors=True)
    wheels = []
    for folder in sorted(site.glob("*.dist-info")):
        found = wheel((folder / "METADATA").read_text(), hashes)
        wheels.append(found)
        for name in _RECORDS:
            (folder / name).unlink(missing_ok=True)
        if found.name == _OURS:
            for command, script in commands((folder / "entry_points.txt").read_text(), python).items():
                path = root / "usr/bin" / command
                path.write_text(script)
                path.chmod(0o755)
    return wheels


def archives(report: str) -> dict[str, str]:
    """The SHA-256 of each wheel by the name of its package, from pip's installation report."""
    rows = json.loads(report)["install"]
    return {row["metadata"]["name"]: row["download_info"]["archive_info"]["hashes"]["sha256"] for row in rows}


def wheel(metadata: str, hashes: Mapping[str, str]) -> Wheel:
    """What a wheel's METADATA says of it. Its licence is an SPDX expression, or where that is older, names as PyPI has them."""
    said = email.message_from_string(metadata)
    names = [
        str(row).rpartition(" :: ")[2] for row in said.get_all("Classifier", []) if row.startswith("License :: OSI")
    ]
    short = said.get("License", "")
    licence = said.get("License-Expression") or ", ".join(names) or (short if "\n" not in short else "")
    name = str(said["Name"])
    return Wheel(name=name, version=str(said["Version"]), sha256=hashes.get(name), licence=licence or None)


def commands(entry_points: str, python: str) -> dict[str, str]:
    """The scripts of a package's commands by name; run apart from the environment's PYTHON variables and any user's packages."""
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(entry_points)
    scripts = {}
    for name, value in parser["console_scripts"].items():
        module, _, function = value.partition(":")
        scripts[name] = (
            f"#!/usr/bin/python{python} -I\nimport sys\nfrom {module} import {function}\n\nsys.exit({function}())\n"
        )
    return scripts


def build(scratch: Path, when: int) -> Path:
    """Build our own wheel, with one time for all its files.

    Raises:
        ImageError: this is no checkout, or setuptools failed.
    """
    _pip("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={scratch}", str(copy(scratch)), when=when)
    (found,) = scratch.glob("*.whl")
    return found


def sdist(scratch: Path, when: int) -> Path:
    """Build our source distribution; its times are those of the build.

    Raises:
        ImageError: this is no checkout, or setuptools failed.
    """
    command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(scratch)!r})"]
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(when)}
    done = subprocess.run(
        command, cwd=copy(scratch / "sdist"), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ImageError(f"setuptools could not build the sdist:\n{done.stderr.strip()[-2000:]}")
    (found,) = scratch.glob("*.tar.gz")
    return found


def copy(scratch: Path) -> Path:
    """Copy the tree, because a build leaves its traces in the tree that it builds; modes are "may be run" or not.

    Raises:
        ImageError: this is no checkout.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        raise ImageError(f"expected a checkout of the project, to build its wheel from it: {listed.stderr.strip()}")
    tree = scratch / "tree"
    for name in sorted(listed.stdout.split("\0")):
        if name and os.path.lexists(name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, tree / name, follow_symlinks=False)
            if not (tree / name).is_symlink():
                (tree / name).chmod(0o755 if os.access(name, os.X_OK) else 0o644)
    return tree


def compile_all(root: Path, python: str, interpreter: Path) -> None:
    """Write the byte code of every module.

    Args:
        root: where the modules are.
        python: the version of the root's Python, as ``3.13``.
        interpreter: a root with that Python for this machine.

    Raises:
        ImageError: a module can't be compiled.
    """
    command = [
        *debian.loader(interpreter, debian.architecture()),
        str(interpreter / f"usr/bin/python{python}"),
        "-BS",
        "-m",
        "compileall",
        "-q",
    ]
    unchecked = ["--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"]
    # -B: what this run imports itself would be there already, with the path of today. The seed: sets come out in one order.
    environment = {"PYTHONHOME": str(interpreter / "usr"), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    folders = [str(root / f"usr/lib/python{python}"), str(root / SITE)]
    done = subprocess.run(
        [*command, *unchecked, *folders], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ImageError(f"byte code could not be made:\n{(done.stdout + done.stderr)[-2000:]}")


def _pip(*arguments: str, when: int | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    environment = os.environ | ({} if when is None else {"SOURCE_DATE_EPOCH": str(when)})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, umask=0o022)
    if done.returncode != 0:
        raise ImageError(f"pip {arguments[0]} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
