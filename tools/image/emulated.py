"""Run the image's gateway on this machine: ``python -m tools.image.emulated dist/image/root.tar.gz version``.

An image for another architecture runs under qemu-user. It needs no root: the gateway sees this machine's files, with the image's
interpreter and libraries.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.image import build, contents, debian


def main() -> int:
    """Run the gateway; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path, help="the image's files, as `make image` leaves them: root.tar.gz")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of the gateway, as: demo --json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dpg-emulated-") as folder:
        root = Path(folder)
        subprocess.run(["tar", "-xzf", arguments.root, "-C", root, "--no-same-owner"], check=True)
        try:
            python = interpreter(root)
        except contents.ImageError as error:
            sys.exit(f"image: {error}")
        return subprocess.run([python, "-I", "-m", "gateway", *arguments.command], check=False).returncode


def interpreter(root: Path) -> Path:
    """Write the program that starts the root's Python, and that this Python starts as ``sys.executable``; return its path.

    Raises:
        ImageError: the root has no dynamic loader, or there is no emulator.
    """
    [architecture] = [name for name, triple in debian.TRIPLES.items() if (root / "usr/lib" / triple).is_dir()]
    version = contents.read(build.CONTENTS).python
    wrapper = root / "usr/bin/python-here"
    # It is named by argv[0]: Python takes its own path from there, and its folders from that path.
    command = shlex.join(
        [*debian.loader(root, architecture), "--argv0", str(wrapper), str(root / f"usr/bin/python{version}")]
    )
    wrapper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


if __name__ == "__main__":
    sys.exit(main())
