"""Runs the gateway with trees that stand for /sys, /proc and /dev: ``python -m tests.e2e.faked SYS PROC DEV OPTION...``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import devices.gpu.amd.backend
import devices.gpu.nvidia.backend
import gateway.dra.drivers
from gateway.cli.main import gateway as command_line


def main() -> None:
    """Have the backends look there, and become the gateway."""
    tree, proc, dev = map(Path, sys.argv[1:4])
    nvidia: Any = devices.gpu.nvidia.backend
    nvidia.NvidiaBackend = partial(nvidia.NvidiaBackend, sys=tree, proc=proc, dev=dev)
    amd: Any = devices.gpu.amd.backend
    amd.AmdBackend = partial(amd.AmdBackend, sys=tree)
    drivers: Any = gateway.dra.drivers
    drivers._SYS = tree / "bus/pci/devices"
    command_line.main(sys.argv[4:], prog_name="gateway")


if __name__ == "__main__":
    main()
