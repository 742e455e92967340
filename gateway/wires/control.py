"""The control socket, by which the node's commands and other gateways talk to this one.

It is a Unix socket in the state directory, ``<token>.sock``. Both ends send JSON objects, one per line, such as
``{"v": 1, "op": ...}``. The first message's ``op`` chooses a handler, which may answer at once, or keep the connection
for further messages. New fields may be added: unknown fields are ignored, and an unknown op is answered with an error.

Only our own user and root may connect, whatever the file's mode (SO_PEERCRED). Messages, connections and waits are bounded also.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from gateway.wires.unix import connect_error, listens

VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 64 * 1024
"""Most bytes of a line that a gateway reads."""
MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of a line that a gateway sends: the status of 10,000 devices takes a third of that."""
PIECE_BYTES: Final = 1024 * 1024
"""Most bytes that are written at once: asyncio copies the unsent rest, and 16 MiB would block the event loop for 25 ms."""
MAX_CONNECTIONS: Final = 16
IDLE_S: Final = 5.0
"""Seconds for which a connection may be open without a request."""
WRITE_S: Final = 5.0
"""Seconds within which the other end must read a message."""
REMOVE_S: Final = 1.0
"""Seconds within which the socket's file must be removed at the end; after that it stays."""
MAX_PATH_BYTES: Final = 107
"""Most bytes of a Unix socket's path (Linux, unix(7))."""
_MAX_SOCKETS: Final = 64
_MAKING_S: Final = 10.0
_NAME = r"\.?[0-9a-f]{8}\.sock"
_CREDENTIALS = struct.Struct("iII")

_JSON: Final = msgspec.json.Encoder()
_log = structlog.get_logger()


class ControlError(Exception):
    """A connection failed, or a request can't be met. The message says what to do."""


class ControlConnection:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def closed(self) -> bool:
        """True if this end was closed."""
        return self._writer.is_closing()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; ``v`` is added.

        Raises:
            ControlError: the message is too long, or the other end is gone or doesn't read; then the connection is closed.
        """
        line = _JSON.encode_lines([{**message, "v": VERSION}])
        if len(line) > MAX_REPLY_BYTES:
            raise ControlError(f"the answer is too long ({len(line)} bytes). Allowed: {MAX_REPLY_BYTES}. Ask for less")
        if self.closed:
            raise ControlError("the control connection is closed")
        try:
            async with asyncio.timeout(WRITE_S):
                for start in range(0, len(line), PIECE_BYTES):
                    self._writer.write(line[start : start + PIECE_BYTES])
                    await self._writer.drain()
        except OSError as error:
            self.abort()
            raise ControlError(f"the partner did not take a message of {len(line)} bytes: {_why(error)}") from error

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message. If the other end is gone, or sent no message, close the connection and return None."""
        try:
            line = await self._reader.readline()
        except (OSError, ValueError):  # ValueError: longer than the limit.
            line = b""
        message = _decode(line)
        if message is None:
            self.close()
        return message

    def close(self) -> None:
        """Close this end once all sent messages are out. Another task's ``receive`` returns None."""
        self._writer.close()

    async def finish(self) -> None:
        """Close, and wait until all sent messages are out, at most ``WRITE_S`` seconds."""
        self.close()
        try:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(WRITE_S):
                    await self._writer.wait_closed()
        finally:
            self.abort()

    def abort(self) -> None:
        """Close this end at once, even if messages are unsent."""
        self._writer.transport.abort()


Handler = Callable[[ControlConnection, dict[str, Any]], Awaitable[None]]
"""Handles one request. When it returns, the next one is read. A ControlError is answered as ``{"error": ...}``."""


class ControlServer:
    """The gateway's control socket at ``path`` (``socket_path``); ``handlers`` are by op."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self.path = path
        self._handlers = handlers
        self._open: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Make the socket, and answer on it. It gets its final name once it listens and only our user can write to it.

        Raises:
            ControlError: it can't be made. The gateway works without it, but commands don't reach it.
        """
        hidden = self.path.with_name(f".{self.path.name}")
        if (length := len(os.fsencode(hidden))) > MAX_PATH_BYTES:
            raise ControlError(
                f"the path of the control socket is too long: {hidden} has {length} bytes. Linux allows "
                f"{MAX_PATH_BYTES}. Use a shorter --state-dir. Until then no command reaches this gateway, "
                "and it can't arrange a handover"
            )
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sweep(self.path.parent)
            with contextlib.ExitStack() as undo:
                listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(os.fspath(hidden))
                undo.callback(hidden.unlink, missing_ok=True)
                hidden.chmod(0o600)
                server = await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_REQUEST_BYTES)
                undo.callback(server.close)
                hidden.rename(self.path)
                undo.pop_all()
                self._server = server
        except OSError as error:
            raise ControlError(
                f"could not make the control socket {self.path}: {_why(error)}. Make --state-dir writable: until then no "
                "command reaches this gateway, and it can't arrange a handover"
            ) from error

    async def close(self) -> None:
        """End every connection and remove the socket. Never raises."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        with contextlib.suppress(OSError):  # TimeoutError is one: a disk that hangs isn't waited for.
            async with asyncio.timeout(REMOVE_S):
                await asyncio.to_thread(self.path.unlink)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a connection, in a task of our own: Python 3.11's streams report a cancelled task of theirs as an error."""
        connection = ControlConnection(reader, writer)
        if self._server is None or not _may_talk(writer.get_extra_info("socket")):
            connection.abort()
            return
        task = asyncio.ensure_future(self._serve(connection, full=len(self._open) >= MAX_CONNECTIONS))

        def ended(task: asyncio.Task[None]) -> None:
            self._open.discard(task)
            connection.abort()

        self._open.add(task)
        task.add_done_callback(ended)

    async def _serve(self, connection: ControlConnection, *, full: bool) -> None:
        with contextlib.suppress(ControlError):
            if full:
                await connection.send({"error": f"{MAX_CONNECTIONS} connections are open already: try again later"})
            else:
                await self._talk(connection)
        await connection.finish()

    async def _talk(self, connection: ControlConnection) -> None:
        while not connection.closed:
            try:
                async with asyncio.timeout(IDLE_S):
                    request = await connection.receive()
            except TimeoutError:
                return
            if request is None:
                return
            try:
                await self._handler(request)(connection, request)
            except ControlError as error:
                await connection.send({"error": str(error)})
            except Exception:  # noqa: BLE001 - a defect in one request must not end others
                _log.exception("a control request failed", op=str(request.get("op"))[:64])
                await connection.send({"error": "the gateway failed at this; its log says how"})

    def _handler(self, request: Mapping[str, Any]) -> Handler:
        version, op = request.get("v"), request.get("op")
        if version != VERSION:
            raise ControlError(f"not a message of version {VERSION}: {shown(version)}")
        handler = self._handlers.get(op) if isinstance(op, str) else None
        if handler is None:
            raise ControlError(
                f"unknown op {shown(op)}: this gateway is of another release than your command, and knows "
                f"{', '.join(sorted(self._handlers))}: use the command of its own release"
            )
        return handler


def socket_path(state_dir: Path, token: str) -> Path:
    """Return the path of a gateway's control socket; ``token`` has eight hexadecimal digits."""
    return state_dir / f"{token}.sock"


def sockets(state_dir: Path) -> list[Path]:
    """Return the control sockets on which a gateway listens now.

    Raises:
        ControlError: this user may not use the folder or a socket in it, or the folder can't be read.
    """
    try:
        found = {path: connect_error(path) for path in _named_as_ours(state_dir) if path.name[0] != "."}
        for denied in (error for error in found.values() if isinstance(error, PermissionError)):
            raise denied
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise ControlError(f"No permission to ask the gateway in {state_dir}. Run this command as root.") from error
    except OSError as error:
        raise ControlError(f"Cannot read {state_dir}: {_why(error)}. Correct --state-dir.") from error
    return [path for path, error in found.items() if error is None]


async def connect(path: Path, seconds: float) -> ControlConnection:
    """Connect to the gateway on ``path``.

    Raises:
        ControlError: the connection failed within ``seconds``.
    """
    try:
        async with asyncio.timeout(seconds):
            return ControlConnection(*await asyncio.open_unix_connection(path, limit=MAX_REPLY_BYTES))
    except OSError as error:
        raise ControlError(f"no gateway takes connections on {path}: {_why(error)}") from error


async def ask(path: Path, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Send one request to the gateway on ``path`` and return its answer.

    Raises:
        ControlError: no answer came within ``seconds``, or it is an error.
    """
    try:
        async with asyncio.timeout(seconds):
            connection = await connect(path, seconds)
            try:
                await connection.send(request)
                answer = await connection.receive()
            finally:
                connection.abort()
    except TimeoutError as error:
        raise ControlError(
            f"the gateway on {path} did not answer within {seconds:g} s: it is stopped, or hangs; its log may say why, a restart ends it"
        ) from error
    if answer is None:
        raise ControlError(f"the gateway on {path} closed the connection without an answer: its log says why")
    if "error" in answer:
        raise ControlError(str(answer["error"]))
    return answer


# Details.


def _decode(line: bytes) -> dict[str, Any] | None:
    """Decode one line; None if it is not a JSON object."""
    if not line.endswith(b"\n"):
        return None
    try:
        message = msgspec.json.decode(line)
    except (ValueError, RecursionError):  # msgspec.DecodeError is a ValueError.
        return None
    return message if isinstance(message, dict) else None


def _may_talk(partner: Any) -> bool:
    user = _user(partner)
    if user in {0, os.geteuid()}:
        return True
    _log.warning("refused a control connection: only the gateway's own user and root may connect", user=user)
    return False


def _user(partner: Any) -> int:
    """Return the user ID of the other end of a Unix socket, from the kernel."""
    _, user, _ = _CREDENTIALS.unpack(partner.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _named_as_ours(state_dir: Path) -> list[Path]:
    with os.scandir(state_dir) as entries:
        names = sorted(entry.name for entry in entries if re.fullmatch(_NAME, entry.name))
    return [state_dir / name for name in names[:_MAX_SOCKETS]]


def _sweep(state_dir: Path) -> None:
    """Remove the sockets of dead gateways. A new socket is hidden, and doesn't listen for a moment, so it stays."""
    for path in _named_as_ours(state_dir):
        with contextlib.suppress(OSError):
            found = path.stat(follow_symlinks=False)
            making = path.name.startswith(".") and time.time() - found.st_mtime < _MAKING_S
            if stat.S_ISSOCK(found.st_mode) and not making and not listens(path):
                path.unlink()


def _why(error: OSError) -> str:
    return error.strerror or str(error) or "not in time"


def shown(value: object) -> str:
    """Return a value from the other end in ASCII, shortened."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
