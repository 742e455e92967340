"""A clock that is moved, and processes that share one event loop: what a row of the contract runs on.

``run`` replaces ``time``, threads and exits of this Python process until its row is over. What the row's processes left behind stays: it
is for a process that was forked for a few rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import faulthandler
import os
import selectors
import signal
import socket
import ssl
import sys
import time
import weakref
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import pytest

from tests.contract import threads

_T = TypeVar("_T")
_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_RESULTS: contextvars.ContextVar[Iterator[Callable[[], Any]]] = contextvars.ContextVar("results")
_TURN_S: Final = 1e-6
"""Seconds that each turn of the loop takes."""
_SETTLE_S: Final = 0.002
"""Real seconds within which the kernel has delivered what was sent by TCP on loopback."""
_FIRST_PORT: Final = 60000
_DISK_AGAIN_S: Final = 0.005
_INTERNET: Final = (int(socket.AF_INET), int(socket.AF_INET6))
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
patches: Final = pytest.MonkeyPatch()
"""What is replaced in this Python process until the row is over."""
spoiled: Final[list[str]] = []
"""What stays of a row in this Python process, which is good for no other one."""


class StandstillError(Exception):
    """Nothing will ever happen any more: every task waits, and no timer runs."""


class WaitsError(BaseException):
    """A thread's work waits for the disk before it has done anything: it begins once more a little later."""


class _Ended(BaseException):
    """The process called ``os._exit``."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _BegunAnew(BaseException):
    """The process called ``os.execve``."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.environment = environment


class Clock:
    """The time that this process believes in."""

    def __init__(self, seed: int = 0) -> None:
        self._passed = 0.0
        self._began: dict[str, float] = {name: getattr(time, name)() for name in ("monotonic", "time", "perf_counter")}
        self._boot_ns, self._boots = time.clock_gettime_ns(time.CLOCK_BOOTTIME), 0
        self._gettime_ns = time.clock_gettime_ns
        self.random = Random(seed)  # noqa: S311 - no secret

    def monotonic(self) -> float:
        """Return what ``time.monotonic`` returns."""
        return self._began["monotonic"] + self._passed

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._passed += seconds

    def set_back(self, seconds: float) -> None:
        """Set the node's wall clock back; nothing else notices."""
        self._began["time"] -= seconds

    def reboot(self) -> None:
        """Let the machine have been booted just now. Kill all processes before."""
        self._boot_ns, self._boots = int(1e9 - self._passed * 1e9), self._boots + 1

    @property
    def boot_id(self) -> str:
        """What the kernel calls this boot."""
        return f"00000000-0000-4000-8000-{self._boots:012}"

    def latency(self) -> float:
        """Return how long a message or a thread takes, in seconds: usually under half a millisecond."""
        return self.random.uniform(0.0001, 0.0004)

    def install(self) -> None:
        """Make the modules that ask for the time ask this clock."""
        for name in self._began:
            patches.setattr(time, name, lambda name=name: self._began[name] + self._passed)
            patches.setattr(time, f"{name}_ns", lambda name=name: int((self._began[name] + self._passed) * 1e9))
        patches.setattr(time, "clock_gettime_ns", self._clock_gettime_ns)
        patches.setattr(time, "sleep", self.advance)
        patches.setattr(os, "urandom", Random(0).randbytes)  # noqa: S311 - a row goes the same way each time

    def _clock_gettime_ns(self, which: int) -> int:
        if which == time.CLOCK_BOOTTIME:
            return self._boot_ns + int(self._passed * 1e9)
        return self._gettime_ns(which)


class Process:
    """Something that can be killed or stopped alone: a gateway, a kubelet, a plugin. Its calls carry its context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.stopped = True, False
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit status, minus the signal for one that was killed."""
        self.turns, self.dies_at = 0, -1
        """How often code of it ran, and after how many such turns it is killed."""
        self.hung, self.hangs_at = False, float("inf")
        """Whether it ended itself because it stood still (``faulthandler``), and when it does so."""
        self.log: list[dict[str, Any]] = []
        self.at_death: list[Callable[[], None]] = []
        """What the kernel and other processes notice."""
        self._signals: dict[int, Callable[[], object]] = {}
        self._backlog: list[events.Handle] = []
        self._files: set[int] = set()
        self._sockets: list[socket.socket] = []
        self._readers: set[int] = set()
        self._paused: list[tuple[int, int, Any]] = []
        self._line = ""
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        _processes.append(self)
        _kept.append(self)

    def run(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run work in this process."""
        task = asyncio.get_running_loop().create_task(work, context=self.context.copy())
        _kept.append(task)
        return task

    def bound(self) -> list[str]:
        """Return where its Unix sockets were bound."""
        self._sockets = [one for one in self._sockets if one.fileno() >= 0]
        return [name for one in self._sockets if isinstance(name := one.getsockname(), str) and name]

    async def ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run work in this process, and wait for its result.

        Raises:
            ConnectionError: the process ended first.
        """
        task = self.run(work)
        both: set[asyncio.Future[Any]] = {task, self.ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ConnectionError(f"{self.name} has ended")

    def main(self, program: Callable[[], object]) -> None:
        """Run a program that ends in ``asyncio.run``, as the process's main thread does."""
        _ = self.run(self._main(program))

    async def _main(self, program: Callable[[], object]) -> None:
        environment = dict(os.environ)
        while True:
            try:
                await _started(program, environment)
            except (_Ended, SystemExit) as error:
                status = error.status if isinstance(error, _Ended) else error.code
                self._die(status if isinstance(status, int) else int(status is not None))
                return
            except _BegunAnew as error:
                environment = dict(error.environment)
                self._close_all()

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """Send a signal that the process handles, once it has said so; until then it ends by it."""
        if not self.alive:
            return
        if number in self._signals:
            self._signals[number]()
        else:
            self.kill(number)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it as SIGKILL does: nothing of it runs any more, the kernel closes what it had open."""
        self._die(-number)

    def stop(self) -> None:
        """Stop it, as SIGSTOP does."""
        self.stopped = True
        selector = _selector()
        for number in self._readers:
            if (key := selector.get_map().get(number)) is not None:
                self._paused.append((number, key.events, key.data))
                selector.unregister(number)

    def go_on(self) -> None:
        """Let it go on, as SIGCONT does: what was due meanwhile happens at once."""
        if time.monotonic() >= self.hangs_at:
            self.hung = True
            self.kill()
            return
        self.stopped = False
        for number, mask, data in self._paused:
            _selector().register(number, mask, data)
        loop: Any = asyncio.get_running_loop()
        loop._ready.extend(self._backlog)
        self._paused, self._backlog = [], []

    def write(self, text: str) -> None:
        """Take what it writes to standard error."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            try:
                self.log.append(msgspec.json.decode(line, type=dict[str, Any]))
            except (msgspec.DecodeError, msgspec.ValidationError):
                self.log.append({"event": line, "level": "text"})

    def _die(self, status: int) -> None:
        if not self.alive:
            return
        self.alive = False
        self._close_all()
        _processes.remove(self)
        for notice in self.at_death:
            notice()
        if not self.ended.done():
            self.ended.set_result(status)

    def _close_all(self) -> None:
        selector = _selector()
        for number in self._readers:
            if number in selector.get_map():
                selector.unregister(number)
        sockets = {one.fileno() for one in self._sockets}
        transports: Any = getattr(asyncio.get_running_loop(), "_transports", {})
        for number in sockets:
            transports.pop(number, None)
        for one in self._sockets:
            one.close()
        for number in (self._files | self._readers) - sockets:
            with contextlib.suppress(OSError):
                _os_close(number)
        self._files, self._sockets, self._readers = set(), [], set()


class _Captured(BaseException):
    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        super().__init__()
        self.work = work


async def _started(program: Callable[[], object], environment: Mapping[str, str]) -> None:
    """Run a program to its end. It begins again after each ``asyncio.run``, which gives then what came of it."""
    results: list[Callable[[], Any]] = []
    while (work := _until_it_runs(program, environment, results)) is not None:
        try:
            results.append(partial(_given, await work))
        except Exception as error:  # noqa: BLE001 - the program's
            results.append(partial(_raised, error))


def _until_it_runs(
    program: Callable[[], object], environment: Mapping[str, str], results: Sequence[Callable[[], Any]]
) -> Coroutine[Any, Any, Any] | None:
    before, token = dict(os.environ), _RESULTS.set(iter(results))
    try:
        _set_environment(environment)
        program()
    except _Captured as found:
        return found.work
    finally:
        _RESULTS.reset(token)
        _set_environment(before)
    return None


def _set_environment(wanted: Mapping[str, str]) -> None:
    """Change what differs: each change is a call of the C library."""
    known = dict(os.environ)
    for name in known.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if known.get(name) != value})


def _given(value: _T) -> _T:
    return value


def _raised(error: Exception) -> NoReturn:
    raise error


_kept: list[object] = []
"""Processes and their tasks: to collect them would run the ``finally`` blocks of the dead."""
_os_close = os.close
_processes: list[Process] = []
"""Those that are alive."""


def _is_anew(number: int) -> None:
    """Take note that a descriptor's number is used again: who had it closed it in a way that isn't seen here."""
    for process in _processes:
        if process is not current():
            process._files.discard(number)
            process._readers.discard(number)


_selectors: list[_Selector] = []


def _selector() -> _Selector:
    return _selectors[0]


def current() -> Process | None:
    """Return the process whose code runs now; None: the test's own."""
    return _PROCESS.get()


class _Selector(selectors.EpollSelector):
    """Never waits: where nothing is ready, the time until the next timer has passed."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.tcp: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        self._clock.advance(_TURN_S)
        if found or timeout == 0:
            return found
        if self.tcp and self._is_connected() and (found := super().select(_SETTLE_S)):
            return found
        if timeout is None:
            raise StandstillError
        self._clock.advance(timeout)
        return []

    def _is_connected(self) -> bool:
        """Whether something may be on its way by TCP. Sockets that listen, or are closed, stay so."""
        for one in list(self.tcp):
            if one.fileno() < 0 or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self.tcp.discard(one)
        return bool(self.tcp)


class _Listener:
    """A listener for TLS on loopback. Its connections are pairs of sockets: what is sent there has arrived at once."""

    def __init__(self, port: int, make: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext) -> None:
        self._address = "127.0.0.1", port
        self._make, self._tls = make, tls
        self.context = contextvars.copy_context()
        self.sockets = (self,)
        self._taking: set[asyncio.Task[Any]] = set()
        _listeners[port] = self

    def getsockname(self) -> tuple[str, int]:
        """Return where it listens."""
        return self._address

    def close(self) -> None:
        """Listen no more."""
        _listeners.pop(self._address[1], None)

    def take(self, one: socket.socket) -> None:
        """Take a connection."""
        loop = asyncio.get_running_loop()
        self._taking.add(task := loop.create_task(self._take(one)))
        task.add_done_callback(self._taking.discard)

    async def _take(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):  # Who came went at once.
            await asyncio.get_running_loop().connect_accepted_socket(self._make, one, ssl=self._tls)


_listeners: dict[int, _Listener] = {}


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        _selectors[:] = [selector := _Selector(clock)]
        super().__init__(selector)
        self._moved = clock

    def run_in_executor(self, _executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Do a thread's work on the loop, after a moment."""
        done = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except WaitsError:
                self.call_later(_DISK_AGAIN_S, work)
            except Exception as error:  # noqa: BLE001 - told to who waits
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(self._moved.latency(), work)
        return done

    def time(self) -> float:
        """Return the moved clock's time: ``time.monotonic``, which every timer asks for."""
        return self._moved.monotonic()

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """Listen; for TLS without TCP."""
        if (tls := options.get("ssl")) is None:
            return await super().create_server(*args, **options)
        make, _, port = args
        return _Listener(port or _FIRST_PORT + len(_listeners), make, tls)

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Connect; for TLS without TCP."""
        if options.get("ssl") is None:
            return await super().create_connection(*args, **options)
        make, _, port = args
        await asyncio.sleep(self._moved.latency())
        if (listener := _listeners.get(port)) is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        here, there = contextvars.Context().run(socket.socketpair)
        if (process := current()) is not None:
            process._sockets.append(here)
        self.call_soon(listener.take, there, context=listener.context)
        return await super().create_connection(make, sock=here, **options)

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        if (process := current()) is not None:
            context = contextvars.copy_context()
            process._signals[sig] = lambda: self.call_soon(callback, *args, context=context)

    def remove_signal_handler(self, sig: int) -> bool:
        process = current()
        return process is not None and process._signals.pop(sig, None) is not None

    def _add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
        _is_anew(_number(fd))
        if (process := current()) is not None:
            process._readers.add(_number(fd))
        return super()._add_reader(fd, callback, *args)  # type: ignore[misc]

    def _remove_reader(self, fd: Any) -> bool:
        if (process := current()) is not None:
            process._readers.discard(_number(fd))
        return bool(super()._remove_reader(fd))  # type: ignore[misc]


def _number(fd: Any) -> int:
    return fd if isinstance(fd, int) else int(fd.fileno())


class _StandardError:
    """Standard error of whichever process writes."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def write(self, text: str) -> int:
        if (process := current()) is not None:
            process.write(text)
        else:
            self._real.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _patch(clock: Clock) -> None:
    clock.install()
    patches.setattr(sys, "stderr", _StandardError(sys.stderr))
    patches.setattr(sys, "stdout", _StandardError(sys.stdout))
    run_handle = events.Handle._run
    real_open, real_init, real_run = os.open, socket.socket.__init__, asyncio.run
    exits, read_text, real_replace = os._exit, Path.read_text, os.replace
    real_later, real_cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later

    def replaced(source: Any, target: Any, **kwargs: Any) -> None:
        real_replace(source, target, **kwargs)
        now = time.time_ns()
        os.utime(target, ns=(now, now), follow_symlinks=False)  # The kernel has another clock.

    def handle(self: Any) -> None:
        process = self._context.get(_PROCESS)
        if process is None or (process.alive and not process.stopped):
            run_handle(self)
            if process is not None:
                process.turns += 1
                if process.turns == process.dies_at:
                    process.kill()
        elif process.alive:
            process._backlog.append(self)

    def opened(*args: Any, **kwargs: Any) -> int:
        number = real_open(*args, **kwargs)
        _is_anew(number)
        if (process := current()) is not None:
            process._files.add(number)
        return number

    def closed(number: int) -> None:
        if (process := current()) is not None:
            process._files.discard(number)
            process._readers.discard(number)
        _os_close(number)

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        if self.fileno() >= 0:
            _is_anew(self.fileno())
        if (process := current()) is not None:
            process._sockets.append(self)
            if len(process._sockets) > 512:
                process._sockets = [one for one in process._sockets if one.fileno() >= 0]
        if self.fileno() >= 0 and super(socket.socket, self).family in _INTERNET:
            _selector().tcp.add(self)

    def captured(work: Any, **options: Any) -> Any:
        if current() is None:
            return real_run(work, **options)
        if (result := next(_RESULTS.get(), None)) is None:
            raise _Captured(work)
        work.close()
        return result()

    def exited(status: int) -> NoReturn:
        if current() is None:
            exits(status)
        raise _Ended(status)

    def lives(seconds: float, **options: Any) -> None:
        if (process := current()) is None:
            real_later(seconds, **options)
        else:
            process.hangs_at = time.monotonic() + seconds

    def hangs_not() -> None:
        if (process := current()) is None:
            real_cancel()
        else:
            process.hangs_at = float("inf")

    def begun_anew(_path: Any, _argv: Any, environment: Mapping[str, str]) -> NoReturn:
        raise _BegunAnew(environment)

    def read(self: Path, *args: Any, **kwargs: Any) -> str:
        return f"{clock.boot_id}\n" if self == _BOOT_ID else read_text(self, *args, **kwargs)

    for owner, others in (
        (events.Handle, {"_run": handle}),
        (Path, {"read_text": read}),
        (socket.socket, {"__init__": made}),
        (os, {"replace": replaced, "open": opened, "close": closed, "_exit": exited, "execve": begun_anew}),
        (asyncio, {"run": captured}),
        (faulthandler, {"dump_traceback_later": lives, "cancel_dump_traceback_later": hangs_not}),
    ):
        for name, new in others.items():
            patches.setattr(owner, name, new)


def run(work: Callable[[Clock], Coroutine[Any, Any, None]], seed: int = 0) -> None:
    """Run a row on a moved clock."""
    clock, environment = Clock(seed), dict(os.environ)
    _patch(clock)
    loop = _Loop(clock)
    threads.install(loop, current, patches.setattr)
    asyncio.set_event_loop(loop)

    async def row() -> None:
        try:
            await work(clock)
        finally:
            for process in tuple(_processes):
                process.kill()

    try:
        loop.run_until_complete(row())
    finally:
        # As tasks: what the dead hold must not be collected.
        _kept.extend((loop, asyncio.all_tasks(loop)))
        _processes.clear()
        _listeners.clear()
        threads.forget()
        patches.undo()
        _set_environment(environment)
