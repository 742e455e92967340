"""The sockets on which plugins register: ``device-plugins/kubelet.sock``, and the sockets in ``plugins_registry/``.

Both folders are below ``--bridge DIR``. Every user who can write there can register devices. So no socket is opened in a folder
that users other than root (or this process's own) can write to.

Sockets are opened as a kubelet does it: the sockets of earlier plugins are removed, then kubelet.sock is unlinked and bound. It is
never renamed, because some plugins wait until it is removed. That makes every plugin register again, so it is done only when this
gateway begins to lead, or when the folder or the socket was removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from adapters import pluginregistration
from adapters.dialect import MalformedError
from adapters.registry import DIALECTS
from devices.model import Fault, Options, RefusedError
from gateway.bridge import judge
from gateway.bridge.judge import REGISTRATION, REGISTRY
from gateway.kubelet.identity import socket_id
from gateway.wires import rpc
from gateway.wires.log import Seldom
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from pathlib import Path

    from adapters.dialect import Dialect
    from devices.model import Registration
    from gateway.bridge.memory import PluginFolder
    from gateway.kubelet.identity import SocketId

    Accept = Callable[[Path, Dialect, str, Options, PluginFolder], Awaitable[None]]

LOOK_PERIOD_S: Final = 1.0
"""Seconds between two reads of the folders. A kubelet reads plugins_registry as often."""
GET_INFO_S: Final = 1.0
"""Seconds for an answer to GetInfo, as in a kubelet."""
NOTIFY_S: Final = 5.0
"""Seconds for an answer to the notification, as in a kubelet."""
MAX_SOCKETS: Final = 128
"""Most sockets in plugins_registry that are asked."""
ASK_AGAIN_S: Final = 30.0
"""Seconds until a socket that gave no answer or was refused is asked again."""
MAX_CONNECTIONS: Final = 256
MAX_CALLS: Final = 512
_LIMITS: Final = (
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # Register is one call, so a connection that stays open makes room for others.
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_connection_age_ms", 120_000),
    ("grpc.max_connection_age_grace_ms", 20_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),
)
_VERSIONS: Final = {
    dialect.registration_service: tuple(
        one for one in DIALECTS if one.registration_service == dialect.registration_service
    )
    for dialect in DIALECTS
}

_log = structlog.get_logger()


def folder_error(folder: Path) -> str:
    """Make a folder if it is missing. Return why plugins must not register in it; empty if they may."""
    try:
        folder.mkdir(mode=0o750, exist_ok=True)
        found = folder.stat(follow_symlinks=False)
    except OSError as error:
        return f"{folder} can't be used: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder. Remove it"
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"{folder} can be written to by users other than root (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}), so "
            f"they could register devices: chown root {folder} && chmod 0750 {folder}"
        )
    return ""


class Sockets:
    """The socket and the two folders in which plugins register.

    Args:
        folder: ``--bridge DIR``.
        accept: accepts a plugin, or raises a ``RefusedError``.
        spared: returns the sockets that stay when those of earlier plugins are removed.
    """

    def __init__(self, folder: Path, accept: Accept, spared: Callable[[], Collection[Path]] = tuple) -> None:
        self.folder = folder
        self._accept, self._spared = accept, spared
        self._server: rpc.UnixServer | None = None
        self._bound: SocketId | None = None
        self.registry = Registry(folder, accept)
        self._seldom = Seldom(times=10)

    @property
    def socket(self) -> Path:
        """The socket on which plugins register."""
        return self.folder / REGISTRATION / judge.KUBELET_SOCKET

    @property
    def is_open(self) -> bool:
        """True if plugins can register."""
        return self._bound is not None

    def hinders(self) -> str:
        """Make the folders. Return why plugins can't register now; empty if they can. Blocks for a moment."""
        try:
            self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            return f"{self.folder} can't be made: {error.strerror}"
        for folder in (self.folder, self.folder / REGISTRATION, self.folder / REGISTRY):
            if reason := folder_error(folder):
                return reason
        return ""

    async def keep_open(self) -> None:
        """Open kubelet.sock, unless ours is still there; also make missing folders.

        Raises:
            OSError: the folder can't be used now.
            RuntimeError: the socket can't be bound.
        """
        if self._bound is not None and socket_id(self.socket) == self._bound:
            return
        await self._stop()
        self.sweep()
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        # Both Registration services on one socket.
        methods = {f"/{service}/Register": rpc.unary(partial(self._register, service)) for service in _VERSIONS}
        server = rpc.UnixServer(self.socket, methods.get, _LIMITS, MAX_CALLS)
        self._server = server  # If this task is cancelled now, ``close`` stops the server.
        await server.start()
        self.socket.chmod(0o755)  # The mode of a kubelet's socket with the usual umask.
        self._bound = socket_id(self.socket)
        _log.info("plugins can register here", socket=str(self.socket), registry=str(self.folder / REGISTRY))

    def sweep(self) -> None:
        """Remove the sockets of earlier plugins, as a starting kubelet does. Some plugins register again then."""
        spared = {path.name for path in self._spared()}
        with os.scandir(self.folder / REGISTRATION) as entries:
            found = [entry.path for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        for path in found:
            if os.path.basename(path) in spared:  # noqa: PTH119 - entries have paths
                continue
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - entries have paths

    async def close(self) -> None:
        """Close the server. The socket stays behind, as a kubelet's does."""
        await self._stop()
        await self.registry.close()

    async def _stop(self) -> None:
        server, self._server, self._bound = self._server, None, None
        if server is not None:
            await server.stop(grace=0)

    async def _register(self, service: str, data: bytes, call: rpc.Call) -> bytes:
        try:
            dialect, said = _understood(service, data)
            path = _endpoint(self.folder, REGISTRATION, said.endpoint)
            await self._accept(path, dialect, said.resource_name, said.options, REGISTRATION)
        except (RefusedError, MalformedError) as error:
            fault = error.fault if isinstance(error, RefusedError) else Fault.INVALID_ARGUMENT
            if (more := self._seldom.tell(fault.value)) is not None:
                _log.warning("a plugin was refused", code=fault.value, reason=str(error), more_before=more)
            await call.abort(rpc.code(fault.value), str(error))
        return b""


def _understood(service: str, data: bytes) -> tuple[Dialect, Registration]:
    """Return the dialect of a Register, and the decoded request. Both alpha dialects use one service; only the version differs.

    Raises:
        MalformedError: it is not a Register.
        RefusedError: UNKNOWN, the version is unknown. The text is a kubelet's, because plugins check it.
    """
    spoken = _VERSIONS[service]
    said = spoken[0].decode_register(data)
    for dialect in spoken:
        if dialect.name == said.version:
            return dialect, said
    names = " ".join(f'"{dialect.name}"' for dialect in spoken)
    raise RefusedError(
        Fault.UNKNOWN,
        f'requested API version "{said.version[:64]}" is not supported by kubelet. Supported versions are [{names}]',
    )


def _endpoint(root: Path, folder: str, name: str) -> Path:
    path, ours = root / folder / name, root / REGISTRATION / judge.KUBELET_SOCKET
    problem = judge.endpoint_error(name, str(path.parent))
    if problem is None and (found := socket_id(path)) is not None and found == socket_id(ours):
        problem = judge.own_socket(name)
    if problem:
        raise RefusedError(Fault.INVALID_ARGUMENT, problem)
    return path


class Registry:
    """Finds plugins by their sockets in plugins_registry, asks for their names, and reports the result to them."""

    def __init__(self, root: Path, accept: Accept) -> None:
        self._folder, self._root, self._accept = root / REGISTRY, root, accept
        self._seen: dict[str, SocketId] = {}
        """The sockets that were asked, by name."""
        self._ask_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._seldom = Seldom(times=10)

    def look(self) -> None:
        """Ask each new socket, each only once at a time."""
        now = asyncio.get_running_loop().time()
        there = _sockets(self._folder)
        for name in self._seen.keys() - there.keys():
            del self._seen[name]
            self._ask_at.pop(name, None)
        for name, found in there.items():
            again = self._seen.get(name) != found or now >= self._ask_at.get(name, float("inf"))
            if again and name not in self._asking:
                self._seen[name] = found
                self._ask_at.pop(name, None)
                task = self._asking[name] = asyncio.ensure_future(self._ask(name))
                task.add_done_callback(partial(self._asked, name))

    def _asked(self, name: str, _: object) -> None:
        del self._asking[name]

    async def close(self) -> None:
        """Stop asking. The next ``look`` asks all again."""
        self._seen.clear()
        self._ask_at.clear()
        tasks = [*self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, name: str) -> None:
        path = self._folder / name
        if not listens(path):  # A plugin left it behind, and will make a new one.
            self._again(name)
            return
        async with rpc.Channel(path, pluginregistration.CHANNEL_OPTIONS) as channel:
            try:
                data = await channel.call(pluginregistration.GET_INFO, seconds=GET_INFO_S)
                error = await self._taken(name, pluginregistration.decode_info(data))
            except rpc.CallError as failed:
                self._again(name)
                self._tell(name, f"no answer to GetInfo within {GET_INFO_S:g} s: {failed.code.name}")
                return
            except MalformedError as malformed:
                error = str(malformed)
            if error:
                self._again(name)
                self._tell(name, error)
            with contextlib.suppress(rpc.CallError):
                said = pluginregistration.encode_status(error)
                await channel.call(pluginregistration.NOTIFY, said, seconds=NOTIFY_S)

    async def _taken(self, name: str, info: pluginregistration.PluginInfo) -> str:
        """Register a plugin that was found; return why it is refused."""
        if error := judge.info_error(info):
            return error
        folder, endpoint = judge.endpoint_of(info, name)
        try:
            path = _endpoint(self._root, folder, endpoint)
            await self._accept(path, DIALECTS[0], info.name, Options(), REGISTRY)
        except RefusedError as refused:
            return str(refused)
        return ""

    def _again(self, name: str) -> None:
        self._ask_at[name] = asyncio.get_running_loop().time() + ASK_AGAIN_S

    def _tell(self, name: str, reason: str) -> None:
        if (more := self._seldom.tell("refused")) is not None:
            _log.warning("a plugin in plugins_registry was refused", socket=name, reason=reason, more_before=more)


def _sockets(folder: Path) -> dict[str, SocketId]:
    """Return the first sockets in a folder, by name. As for a kubelet, a name that begins with a dot is not ready yet."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith("."))[:MAX_SOCKETS]
    except OSError:
        return {}
    return {name: found for name in names if (found := socket_id(folder / name)) is not None}
