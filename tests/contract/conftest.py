"""Runs each row in a process of its own, which is forked, on a clock that is moved."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import signal
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract import clock, wire
from tests.contract.node import Node

REAL_SECONDS = 100
"""A row that takes longer hangs."""
for _name in (
    "gateway.daemon",
    "gateway.compose",
    "gateway.dra.drivers",
    "gateway.kubernetes.features",
    "gateway.telling.commands",
    "gateway.telling.metrics",
    "gateway.telling.probes",
    "gateway.lab.kubelets.podresources",
    "devices.gpu.simulated.backend",
    "devices.gpu.source",
    "devices.gpu.nvidia.cdi",
    "devices.gpu.nvidia.survey",
    "tests.contract.cluster",
    "h11",
):
    importlib.import_module(_name)  # Once for all rows.


@pytest.fixture
def node() -> None:
    """The row's node, which is made in the row's own process."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a row in a forked process; what it raises is raised here as text."""
    history = inspect.unwrap(pyfuncitem.obj)  # Beneath what pytest-asyncio makes of it.
    if not inspect.iscoroutinefunction(history) or "node" not in pyfuncitem.fixturenames:
        return None
    names = inspect.signature(history).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "node"}
    if text := apart(history, arguments):
        pytest.fail(text, pytrace=False)
    return True


def apart(
    history: Callable[..., Awaitable[None]], arguments: dict[str, Any], seed: int = 0, seconds: int = REAL_SECONDS
) -> str:
    """Run a row in a forked process; return what it raised as text, empty where it was kept."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.close(reader)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            faulthandler.dump_traceback_later(seconds - 1, exit=True)
            text = _played(history, arguments, seed)
            with os.fdopen(writer, "wb") as out:
                out.write(text.encode("utf-8", "replace"))
            status = 0
        finally:
            _exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as found:
        text = found.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    return f"the row's process ended by itself, with status {status}" if status else text


_exit = os._exit


def _played(history: Callable[..., Awaitable[None]], arguments: dict[str, Any], seed: int) -> str:
    with tempfile.TemporaryDirectory(prefix="dpg-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:

        async def row(moved: clock.Clock) -> None:
            _replace_grpc(moved)
            _move_cdi(Path(name) / "cdi")
            async with Node(Path(name), moved) as node:
                await history(node=node, **arguments)
                node.check()

        try:
            clock.run(row, seed)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            return "".join(traceback.format_exception(error))
    return ""


def _replace_grpc(moved: clock.Clock) -> None:
    grpc = wire.Grpc(moved)
    for name in (
        "gateway.wires.rpc",
        "gateway.lab.kubelets.devicemanager",
        "gateway.lab.kubelets.pluginclient",
        "gateway.lab.kubelets.podresources",
        "gateway.lab.plugins.played",
    ):
        setattr(importlib.import_module(name), "grpc", grpc)  # noqa: B010 - a module's name
    setattr(importlib.import_module("gateway.lab.kubelets.devicemanager"), "LateListener", wire.LateListener)  # noqa: B010 - as above
    # Standard error is shared by the processes of a row: ``clock`` tells them apart already.
    setattr(importlib.import_module("gateway.wires.log"), "log_what_others_write", lambda: None)  # noqa: B010


def _move_cdi(folder: Path) -> None:
    """Have CDI files in a folder of the row's own instead of /var/run/cdi."""
    setattr(importlib.import_module("gateway.dra.cdi"), "FOLDER", folder)  # noqa: B010 - a module's name
    keep = importlib.import_module("devices.gpu.nvidia.survey").keep
    keep.__kwdefaults__["folder"] = folder
