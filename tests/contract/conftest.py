"""Runs the rows of each module in a forked process, on a clock that is moved."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import signal
import socket
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import pytest

from tests.contract import clock, wire
from tests.contract.cluster import Cluster
from tests.contract.hardware import Nvidia
from tests.contract.node import Node

REAL_SECONDS = 100
"""A row that takes longer hangs."""


@pytest.fixture
def node() -> None:
    """The row's node. It, and each fixture that takes it, is made in the row's own process."""


@pytest.fixture
def cluster(node: Node) -> Cluster:
    """The cluster around the row's node. What a fixture returns is entered, if that is possible."""
    return Cluster(node)


@pytest.fixture
def nvidia(node: Node) -> Nvidia:
    """Four of NVIDIA's GPUs on the row's node."""
    return Nvidia(node)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> bool | None:
    """Make none of these here."""
    if "node" not in fixturedef.argnames:
        return None
    fixturedef.cached_result = (None, fixturedef.cache_key(request), None)
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make quick` play one row of each history."""
    parser.addoption("--first", action="store_true", help="of each history of the contract, play the first row alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other rows of a history."""
    if config.getoption("--first", default=False):
        firsts = {item.nodeid.partition("[")[0]: item.nodeid for item in reversed(items)}
        chosen = set(firsts.values())
        items[:] = [item for item in items if not _is_row(item) or item.nodeid in chosen]


_parents: list[Child] = []
"""The parent of this session's rows. Empty if the session has no row."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the parent of the rows before any test starts gRPC's threads: a fork made after that may crash or hang."""
    if rows := {item.nodeid: item for item in session.items if _is_row(item)}:
        _parents.append(Child(_Rows(rows).play))


def pytest_sessionfinish() -> None:
    """End the parent of the rows, and wait for it and its child: their time is the session's."""
    while _parents:
        _parents[0].play(None)
        _parents.pop().close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a row in a forked process; what it raises is raised here as text."""
    if not _is_row(pyfuncitem):
        return None
    made = {
        name: pyfuncitem.funcargs[name]
        for name in _names(pyfuncitem)
        if name not in _parameters(pyfuncitem) and _in_row(pyfuncitem, name) is None
    }
    if text := _parents[0].play((pyfuncitem.nodeid, made)):
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
    return [*inspect.signature(_history(item)).parameters]


def _in_row(item: pytest.Function, name: str) -> Callable[..., Any] | None:
    """Return what makes a fixture from the row's node; None: that isn't made in the row's process."""
    if name == "node":
        return lambda node: node
    found = item._fixtureinfo.name2fixturedefs.get(name)
    return found[-1].func if found and "node" in found[-1].argnames else None


class Child:
    """A process that is forked from this one, and answers requests with text. None takes longer than ``seconds``."""

    def __init__(self, answer: Callable[[Any], str], seconds: int = 0) -> None:
        ours, its = socket.socketpair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with it
        if (pid := os.fork()) == 0:
            try:
                ours.close()
                if seconds:
                    os.dup2(self._printed.fileno(), 2)
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                with its.makefile("rwb") as wire, suppress(EOFError, KeyboardInterrupt):
                    while not clock.spoiled:
                        request = pickle.load(wire)  # noqa: S301 - from the process that forked this one
                        if seconds:
                            signal.alarm(seconds)
                            faulthandler.dump_traceback_later(seconds - 1, exit=True)
                        text = answer(request)
                        signal.alarm(0)
                        faulthandler.cancel_dump_traceback_later()
                        pickle.dump((text, bool(text or clock.spoiled)), wire)
                        wire.flush()
            finally:
                _exit(1)
        self._pid, self.is_over = pid, False
        its.close()
        self._wire = ours.makefile("rwb")
        ours.close()

    def play(self, request: object) -> str:
        """Have a request answered; what it printed stands below the answer, unless that is empty."""
        self._printed.truncate(0)
        self._printed.seek(0)
        pickle.dump(request, self._wire)
        self._wire.flush()
        try:
            text, self.is_over = pickle.load(self._wire)  # noqa: S301 - from our own fork
        except EOFError:
            self.is_over = True
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
            text = f"the row's process ended by itself, with status {ended and ended.si_status}\n"
        self._printed.seek(0)
        return text and f"{text}{self._printed.read().decode('utf-8', 'replace')}"

    def close(self) -> None:
        """End it."""
        self._wire.close()
        os.waitpid(self._pid, 0)
        self._printed.close()


class _Rows:
    """Plays rows in the process of the row before, if that was kept, is of the same module and spoiled nothing.

    It has imported their modules, runs one thread only, and knows each row's parameters. The values of fixtures are sent to it.
    """

    def __init__(self, rows: dict[str, pytest.Function]) -> None:
        self._rows = rows
        self._child: Child | None = None
        self._module: Path | None = None

    def play(self, request: tuple[str, dict[str, Any]] | None) -> str:
        """Play a row; return what it raised as text, empty where it was kept. None: there are no more."""
        module = None if request is None else self._rows[request[0]].path
        if self._child is not None and (self._child.is_over or module != self._module):
            self._child.close()
            self._child = None
        if module is None:
            return ""
        _prepare()
        self._module, self._child = module, self._child or Child(self._played, REAL_SECONDS)
        return self._child.play(request)

    def _played(self, request: tuple[str, dict[str, Any]]) -> str:
        row, made = self._rows[request[0]], request[1]
        values = _parameters(row) | made

        async def history(node: Node) -> None:
            async with AsyncExitStack() as stack:
                for name in _names(row):
                    if (make := _in_row(row, name)) is None:
                        continue
                    values[name] = made = make(node)
                    if made is not node and isinstance(made, AbstractAsyncContextManager):
                        values[name] = await stack.enter_async_context(made)
                await _history(row)(**{name: values[name] for name in _names(row)})
                node.check()

        return _played(history, 0)


@cache
def _prepare() -> None:
    """Do once what each row would do."""
    for package in map(importlib.import_module, ("gateway", "devices")):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith("gateway_lab.") and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in ("encodings.idna", "gateway_lab.plugins.played", "grpc._utilities", "h11"):
        importlib.import_module(name)
    for one in msgspec.Struct.__subclasses__():
        with suppress(NameError, TypeError):  # Not all can be decoded.
            msgspec.json.Decoder(one)  # Reads the annotations.
    gc.freeze()


def apart(history: Callable[[Node], Awaitable[None]], seed: int, seconds: int) -> str:
    """Run a row in a forked process of its own; return what it raised as text, empty where it was kept."""
    _prepare()
    child = Child(lambda _: _played(history, seed), seconds)
    try:
        return child.play(None)
    finally:
        child.close()


_exit = os._exit


def _played(history: Callable[[Node], Awaitable[None]], seed: int) -> str:
    with tempfile.TemporaryDirectory(prefix="dpg-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:

        async def row(moved: clock.Clock) -> None:
            _replace_grpc(moved)
            _move_cdi(Path(name) / "cdi")
            async with Node(Path(name), moved) as node:
                await history(node)
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
        clock.patches.setattr(f"{name}.grpc", grpc)
    clock.patches.setattr("gateway_lab.kubelets.devicemanager.LateListener", wire.LateListener)
    # Standard error is shared by the processes of a row: ``clock`` tells them apart already.
    clock.patches.setattr("gateway.wires.log.log_what_others_write", lambda: None)


def _move_cdi(folder: Path) -> None:
    """Have CDI files in a folder of the row's own instead of /var/run/cdi."""
    clock.patches.setattr("gateway.dra.cdi.FOLDER", folder)
    clock.patches.setitem(
        importlib.import_module("devices.gpu.nvidia.cdifiles").write_all.__kwdefaults__, "folder", folder
    )
