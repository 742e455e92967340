"""Run the image's gateway on this machine: ``python -m tools.image.emulated dist/image/root.tar.gz version``.

An image for another architecture runs under qemu-user. It needs no root: the gateway sees this machine's files, with the image's
interpreter and libraries, and the one library of the laboratory that the image lacks.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import hpack

from gateway_lab.bench.node import GPUS, RESOURCE, Node
from gateway_lab.gatewayproc import gateway_command
from tools.image import build, contents, debian
from tools.image.python import SITE

STARTS = 5


def main() -> int:
    """Run the gateway; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path, help="the image's files, as `make image` leaves them: root.tar.gz")
    parser.add_argument(
        "--figures", action="store_true", help="instead print its size, and how long it takes to register 8 GPUs"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of the gateway, as: demo --json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dpg-emulated-") as folder:
        root = Path(folder)
        subprocess.run(["tar", "-xzf", arguments.root, "-C", root, "--no-same-owner"], check=True)
        try:
            python = interpreter(root)
            shutil.copytree(Path(hpack.__file__).parent, root / SITE / "hpack")  # nothing but Python
        except contents.ImageError as error:
            sys.exit(f"image: {error}")
        if arguments.figures:
            files = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
            started = asyncio.run(_starts(python))
            print(f"packed {arguments.root.stat().st_size / 1e6:.1f} MB, unpacked {files / 1e6:.1f} MB")
            print(f"registered {median(started):.2f} s after its start ({min(started):.2f} to {max(started):.2f})")
            return 0
        # Under emulation a gateway takes seconds to start, so only two scenarios run at once.
        return subprocess.run(
            [python, "-I", "-X", "cpu_count=1", "-m", "gateway", *arguments.command], check=False
        ).returncode


async def _starts(python: Path) -> list[float]:
    """Start the gateway some times; return the seconds until an emulated kubelet's records had its GPUs."""
    seconds = []
    async with Node.make(python) as node:
        kubelet = await node.kubelet()
        await kubelet.start()
        for _ in range(STARTS):
            began = time.monotonic()
            gateway = await node.plugin([str(python), *gateway_command(node.sockets, node.state)[1:]])
            await kubelet.wait(RESOURCE, GPUS, seconds=60)
            seconds.append(time.monotonic() - began)
            await gateway.terminate()
            await kubelet.wait(RESOURCE, 0, seconds=60)
    return seconds


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
