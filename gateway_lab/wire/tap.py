"""A tap between a kubelet and a device plugin: it relays every byte between two socket directories and keeps every call.

The kubelet has one directory to itself, the plugin another, and the tap stands in each for the other side. A kubelet that
takes connections is announced to the plugin as a kubelet announces itself (old names cleaned away, a new kubelet.sock); an
endpoint that the plugin registers is bound in the kubelet's directory before the Register's last bytes go on. A connection
that one side closes is closed on the other; where one side doesn't listen, the other is refused.

The tap believes neither of the two: it reads the bytes itself (``wire``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from adapters.pb.v1beta1 import v1beta1_pb2
from devices import inotify
from gateway.kubelet.identity import KUBELET_SOCKET, socket_id
from gateway.wires.unix import listens
from gateway_lab.wire.calls import Call, Reader, WireError

CHECKPOINT = "kubelet_internal_checkpoint"
CHUNK = 1 << 16
MEMORY = 64 << 20
"""Bytes of calls that are kept; beyond that, bytes are relayed unread and ``Connection.fault`` says so."""
LISTEN_EVERY = 0.001
"""Seconds between two looks whether a kubelet.sock that was bound listens by now: nothing else tells."""

_SocketId: TypeAlias = tuple[int, int, int]
"""Which socket a name stands for: device, inode, time of change (an inode alone can be used again)."""


@dataclass(slots=True)
class Connection:
    """One connection and its calls, in the order in which they were opened; both grow while it lives."""

    kind: Literal["registration", "plugin"]
    """Whom it leads to: the kubelet's Registration service, or a device plugin."""
    endpoint: str
    """The name of the socket in the directory."""
    reader: Reader = field(default_factory=Reader)
    fault: str = ""
    """Why its bytes could not be read (to the end); empty while they could."""
    offered: int = 0
    """How many of its Registers were taken note of."""

    @property
    def calls(self) -> list[Call]:
        """The calls so far."""
        return self.reader.calls


class Tap:
    """Relays between ``kubelet_dir`` and ``plugin_dir`` while it is entered (``async with``)."""

    def __init__(self, kubelet_dir: Path, plugin_dir: Path) -> None:
        self.kubelet_dir, self.plugin_dir = kubelet_dir, plugin_dir
        self.connections: list[Connection] = []
        """All connections, in the order in which they were made."""
        self.kubelets = 0
        """How many kubelets were announced to the plugin."""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: dict[str, socket.socket] = {}
        self._inotify: inotify.INotify | None = None
        self._appeared = asyncio.Event()
        self._kept = 0

    async def __aenter__(self) -> Self:
        self._inotify = inotify.INotify()
        self._inotify.add_watch(self.kubelet_dir, inotify.CREATE | inotify.MOVED_TO)
        asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._look)
        self._appeared.set()
        self._spawn(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
        for name in [*self._listeners]:
            self._close(name)
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        failed = [one for one in results if isinstance(one, Exception)]
        if failed and error is None:
            raise failed[0]

    async def wait(self, condition: Callable[[list[Connection]], bool], seconds: float = 30) -> None:
        """Wait until ``condition`` is true of the recorded connections; it is asked again after each change.

        Raises:
            TimeoutError: it wasn't within ``seconds``.
        """
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: condition(self.connections))

    # -- the kubelet's coming -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._inotify is not None and any(event.name == KUBELET_SOCKET for event in self._inotify.read()):
            self._appeared.set()

    async def _follow(self) -> None:
        """Announce each kubelet to the plugin, as soon as it takes connections."""
        path = self.kubelet_dir / KUBELET_SOCKET
        announced: _SocketId | None = None
        while True:
            await self._appeared.wait()
            self._appeared.clear()
            while (found := socket_id(path)) is not None and found != announced:
                if not listens(path):
                    await asyncio.sleep(LISTEN_EVERY)
                elif found == socket_id(path):
                    announced = found
                    self._announce(announced)
                    await self._notify()

    def _announce(self, announced: _SocketId) -> None:
        """Do in the plugin's directory what the kubelet did in its own: clean up, then bind and listen."""
        for entry in os.scandir(self.plugin_dir):
            if not entry.is_dir(follow_symlinks=False) and entry.name != CHECKPOINT:
                Path(entry).unlink(missing_ok=True)
        for name in [*self._listeners]:
            self._close(name)
            if name != KUBELET_SOCKET:
                (self.kubelet_dir / name).unlink(missing_ok=True)
        self._listen(KUBELET_SOCKET, self.plugin_dir, self.kubelet_dir, announced)
        self.kubelets += 1

    def _offer(self, request: bytes) -> None:
        """Bind the endpoint of a Register in the kubelet's directory."""
        # The fields have the same numbers in all three APIs.
        endpoint = v1beta1_pb2.RegisterRequest.FromString(request).endpoint
        name = PurePosixPath(endpoint)
        if not name.name or name.is_absolute() or ".." in name.parts or endpoint == KUBELET_SOCKET:
            return  # the kubelet finds nothing there, as it would without a tap
        self._close(endpoint)
        path = self.kubelet_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._listen(endpoint, self.kubelet_dir, self.plugin_dir)

    # -- connections --------------------------------------------------------------------------------------------------

    def _listen(self, name: str, here: Path, there: Path, only: _SocketId | None = None) -> None:
        """Take connections on ``name`` in ``here``, and relay each to the same name in ``there`` (while it is ``only``)."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listeners[name] = listener
        listener.bind(os.fspath(here / name))
        listener.listen(128)
        asyncio.get_running_loop().add_reader(listener, self._take, listener, name, there / name, only)

    def _take(self, listener: socket.socket, name: str, there: Path, only: _SocketId | None) -> None:
        with contextlib.suppress(BlockingIOError):
            self._spawn(self._relay(listener.accept()[0], listener, name, there, only))

    def _close(self, name: str) -> None:
        listener = self._listeners.pop(name, None)
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    async def _relay(
        self, taken: socket.socket, listener: socket.socket, name: str, there: Path, only: _SocketId | None
    ) -> None:
        connection = Connection("registration" if name == KUBELET_SOCKET else "plugin", name)
        self.connections.append(connection)
        loop = asyncio.get_running_loop()
        with taken, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as far:
            taken.setblocking(False)  # noqa: FBT003  the standard library's signature
            try:
                # The name of a kubelet that is gone must not lead to the next one, which isn't announced yet.
                if only not in {None, socket_id(there)}:
                    raise ConnectionRefusedError
                await loop.sock_connect(far, os.fspath(there))
            except OSError:
                # Nobody listens there: nobody shall listen here, either. The name stays, as that of the dead does.
                if self._listeners.get(name) is listener:
                    self._close(name)
            else:
                await _first_of(
                    self._pump(connection, taken, far, from_caller=True),
                    self._pump(connection, far, taken, from_caller=False),
                )
            finally:
                connection.reader.close()
                await self._notify()

    async def _pump(
        self, connection: Connection, source: socket.socket, sink: socket.socket, *, from_caller: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(source, CHUNK):
                self._record(connection, data, from_caller=from_caller)
                await self._notify()
                # If the other end has closed, what it sent before is still to be read.
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(sink, data)

    def _record(self, connection: Connection, data: bytes, *, from_caller: bool) -> None:
        if connection.fault:
            return
        if self._kept > MEMORY:
            connection.fault = f"not read: more than {MEMORY} bytes are recorded already"
            return
        before = connection.reader.kept
        try:
            connection.reader.feed(data, from_caller=from_caller)
        except WireError as error:
            connection.fault = str(error)
        self._kept += connection.reader.kept - before
        registers = [
            call.requests[0]
            for call in connection.calls
            if call.path.endswith(".Registration/Register") and call.requests
        ]
        for request in registers[connection.offered :]:
            self._offer(request)
        connection.offered = len(registers)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)  # a task that failed stays, and is told of at the end


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run until one is done, then cancel the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
