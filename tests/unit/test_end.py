"""A gateway that is told to end does so, also while a disk doesn't answer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from gateway_lab.gatewayproc import GatewayProcess, gateway_command

HANGS = """
import os, time
from pathlib import Path
from gateway.cli.main import gateway

def hang(*_, **__):
    time.sleep(600)  # Longer than the test waits for the gateway's end.

os.fsync, unlink = hang, Path.unlink
Path.unlink = lambda path, **rest: (hang if path.parent.name == "state" else unlink)(path, **rest)
gateway()
"""


HANGS_WHEN_READ = """
import time
from gateway.cli.main import gateway
from gateway.memory import ledger
ledger.Ledger.look = lambda _: time.sleep(600)  # Longer than the test waits for the gateway's end.
gateway()
"""


async def test_the_end_does_not_wait_for_a_disk_that_hangs_at_the_start() -> None:
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        root = Path(folder)
        command = gateway_command(root / "device-plugins", root / "state")
        (root / "device-plugins").mkdir()
        async with await GatewayProcess.launch([command[0], "-c", HANGS_WHEN_READ, *command[3:]]) as gateway:
            await gateway.wait_for("state file not read", seconds=20)
            assert await gateway.terminate() == 0


@pytest.mark.parametrize("bridge", [False, True])
async def test_the_end_does_not_wait_for_a_disk_that_hangs(bridge: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        root = Path(folder)
        more = ("--bridge", str(root / "bridge")) if bridge else ()
        command = [*gateway_command(root / "device-plugins", root / "state"), *more]
        (root / "device-plugins").mkdir()
        async with await GatewayProcess.launch([command[0], "-c", HANGS, *command[3:]]) as gateway:
            await gateway.begun()
            assert await gateway.terminate() == 0
