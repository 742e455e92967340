"""Runs each row in a process of its own, which is forked, on a clock that is moved."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import signal
import socket
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

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
    "gateway_lab.kubelets.podresources",
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


_parents: list[Parent] = []
"""The parent of this session's rows. Empty if the session has no row."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the parent of the rows before any test starts gRPC's threads: a fork made after that may crash or hang."""
    if rows := {item.nodeid: item for item in session.items if _is_row(item)}:
        _parents.append(Parent(rows))


def pytest_sessionfinish() -> None:
    """End the parent of the rows."""
    while _parents:
        _parents.pop().close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a row in a forked process; what it raises is raised here as text."""
    if not _is_row(pyfuncitem):
        return None
    made = {name: pyfuncitem.funcargs[name] for name in _names(pyfuncitem) if name not in _parameters(pyfuncitem)}
    if text := _parents[0].run(pyfuncitem.nodeid, made):
        pytest.fail(text, pytrace=False)
    return True


def _history(item: pytest.Function) -> Callable[..., Awaitable[None]]:
    beneath: Callable[..., Awaitable[None]] = inspect.unwrap(item.obj)  # What pytest-asyncio wrapped.
    return beneath


def _is_row(item: pytest.Item) -> TypeGuard[pytest.Function]:
    if not isinstance(item, pytest.Function):
        return False
    return inspect.iscoroutinefunction(_history(item)) and "node" in item.fixturenames


def _parameters(item: pytest.Function) -> dict[str, Any]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def _names(item: pytest.Function) -> list[str]:
    return [name for name in inspect.signature(_history(item)).parameters if name != "node"]


class Parent:
    """The process that rows are forked from. It has imported their modules and runs one thread only.

    It knows each row's parameters. The values of fixtures are sent to it.
    """

    def __init__(self, rows: dict[str, pytest.Function]) -> None:
        ours, its = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            try:
                with its.makefile("rwb") as wire, suppress(EOFError, KeyboardInterrupt):
                    _be_parent(rows, wire)
            finally:
                _exit(0)
        its.close()
        self._wire = ours.makefile("rwb")
        ours.close()

    def run(self, row: str, made: dict[str, Any]) -> str:
        """Run a row; return what it raised as text, empty where it was kept."""
        pickle.dump((row, made), self._wire)
        self._wire.flush()
        return str(pickle.load(self._wire))  # noqa: S301 - from our own fork

    def close(self) -> None:
        """End it."""
        self._wire.close()
        os.waitpid(self._pid, 0)


def _be_parent(rows: dict[str, pytest.Function], wire: Any) -> None:
    gc.freeze()
    while True:
        row, made = pickle.load(wire)  # noqa: S301 - from the process that forked this one
        item = rows[row]
        values = _parameters(item) | made
        text = apart(_history(item), {name: values[name] for name in _names(item)})
        pickle.dump(text, wire)
        wire.flush()


def apart(
    history: Callable[..., Awaitable[None]], arguments: dict[str, Any], seed: int = 0, seconds: int = REAL_SECONDS
) -> str:
    """Run a row in a forked process; return what it raised as text, empty where it was kept."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as printed:
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.close(reader)
                os.dup2(printed.fileno(), 2)
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
        if status := os.waitpid(child, 0)[1]:
            text = f"the row's process ended by itself, with status {status}\n"
        if text:
            printed.seek(0)
            text += printed.read().decode("utf-8", "replace")
    return text


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
        "gateway_lab.kubelets.devicemanager",
        "gateway_lab.kubelets.pluginclient",
        "gateway_lab.kubelets.podresources",
        "gateway_lab.plugins.played",
    ):
        setattr(importlib.import_module(name), "grpc", grpc)  # noqa: B010 - a module's name
    setattr(importlib.import_module("gateway_lab.kubelets.devicemanager"), "LateListener", wire.LateListener)  # noqa: B010 - as above
    # Standard error is shared by the processes of a row: ``clock`` tells them apart already.
    setattr(importlib.import_module("gateway.wires.log"), "log_what_others_write", lambda: None)  # noqa: B010


def _move_cdi(folder: Path) -> None:
    """Have CDI files in a folder of the row's own instead of /var/run/cdi."""
    setattr(importlib.import_module("gateway.dra.cdi"), "FOLDER", folder)  # noqa: B010 - a module's name
    keep = importlib.import_module("devices.gpu.nvidia.survey").keep
    keep.__kwdefaults__["folder"] = folder
