"""Unary calls as fast as a kubelet makes them: one connection, and the HTTP/2 frames of a call written by hand.

A gRPC client in Python costs as much as the server that is measured, and would make every plugin look like every other.
What a call sends is known beforehand, and of the answer only two things matter: that it is one, and when it was there. So
this knows just as much of HTTP/2 (RFC 9113) as that takes, flow control included.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway_lab.wire.calls import PREFACE

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 0x1
_END_HEADERS = 0x4
_INITIAL_WINDOW_SIZE = 4
_WINDOW = 65_535
_LARGEST_FRAME = 16_384
_RECEIVE = 1 << 16
_SECONDS = 30.0
_USER_AGENT = "grpc-go/1.82.1"


class CallError(Exception):
    """A call that was refused, or a connection that ended. The message says which."""


class Caller:
    """One connection to the plugin that listens on a socket.

    Args:
        path: the plugin's socket.
        method: such as ``/v1beta1.DevicePlugin/Allocate``.
        requests: the messages to send, one after another and round again.
    """

    def __init__(self, path: Path, method: str, requests: Sequence[bytes]) -> None:
        self._block = _headers(method)
        self._messages = itertools.cycle([b"\0" + len(one).to_bytes(4) + one for one in requests])
        self._method = method
        self._next = 1
        self._window, self._initial = _WINDOW, _WINDOW
        self._windows: dict[int, int] = {}
        self._unsent: deque[tuple[int, memoryview]] = deque()
        self._began: dict[int, int] = {}
        self._answered: set[int] = set()
        self._taken: list[int] = []
        self._received = 0
        self._buffer = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_SECONDS)
        self._socket.connect(str(path))
        self._socket.sendall(PREFACE + _frame(_SETTINGS, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def call(self, times: int, at_once: int = 1) -> list[int]:
        """Call ``times`` times, with ``at_once`` calls under way as long as there are; give how long each took, in ns.

        Raises:
            CallError: a call was refused, or the plugin ended the connection.
            OSError: the connection broke, or nothing came for long.
        """
        self._taken = []
        left = times
        while left or self._began:
            while left and len(self._began) < at_once:
                self._open()
                left -= 1
            self._receive()
        return self._taken

    def _open(self) -> None:
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        self._began[stream] = time.perf_counter_ns()
        self._unsent.append((stream, memoryview(next(self._messages))))
        self._send(_frame(_HEADERS, _END_HEADERS, stream, self._block))

    def _send(self, head: bytes = b"") -> None:
        """Send ``head``, and of the messages as much as the plugin takes now."""
        parts = [head]
        while self._unsent:
            stream, rest = self._unsent[0]
            size = min(len(rest), self._window, self._windows[stream], _LARGEST_FRAME)
            if size <= 0:
                break
            self._window -= size
            self._windows[stream] -= size
            parts.append(_frame(_DATA, _END_STREAM if size == len(rest) else 0, stream, bytes(rest[:size])))
            self._unsent.popleft()
            if size < len(rest):
                self._unsent.appendleft((stream, rest[size:]))
        if data := b"".join(parts):
            self._socket.sendall(data)

    def _receive(self) -> None:
        data = self._socket.recv(_RECEIVE)
        now = time.perf_counter_ns()
        if not data:
            raise CallError(f"{self._method}: the plugin ended the connection")
        self._buffer += data
        while len(self._buffer) >= 9 and len(self._buffer) >= (end := 9 + int.from_bytes(self._buffer[:3])):
            kind, flags = self._buffer[3], self._buffer[4]
            stream, payload = int.from_bytes(self._buffer[5:9]) & 0x7FFFFFFF, bytes(self._buffer[9:end])
            del self._buffer[:end]
            self._take(kind, flags, stream, payload, now)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes, now: int) -> None:
        if kind == _DATA:
            self._answered.add(stream)
            self._received += len(payload)
            if self._received > _WINDOW // 2:
                self._send(_frame(_WINDOW_UPDATE, 0, 0, self._received.to_bytes(4)))
                self._received = 0
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload) - 5, 6):
                if int.from_bytes(payload[at : at + 2]) == _INITIAL_WINDOW_SIZE:
                    initial = int.from_bytes(payload[at + 2 : at + 6])
                    self._windows = {one: window + initial - self._initial for one, window in self._windows.items()}
                    self._initial = initial
            self._send(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._send(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload) & 0x7FFFFFFF
            if stream == 0:
                self._window += more
            elif stream in self._windows:
                self._windows[stream] += more
            self._send()
        elif kind in {_RST_STREAM, _GOAWAY}:
            raise CallError(f"{self._method}: the plugin gave it up ({payload.hex()})")
        if flags & _END_STREAM and kind in {_DATA, _HEADERS}:
            self._ended(stream, now)

    def _ended(self, stream: int, now: int) -> None:
        self._taken.append(now - self._began.pop(stream))
        del self._windows[stream]
        if stream not in self._answered:  # Trailers alone: a status other than OK.
            raise CallError(f"{self._method}: refused; the plugin's log says why")
        self._answered.discard(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _headers(method: str) -> bytes:
    """Spell a call's headers: POST and http by their index, the rest as literals that nobody is to remember (RFC 7541)."""
    literals = {
        ":path": method,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "user-agent": _USER_AGENT,
        "te": "trailers",
    }
    return b"\x83\x86" + b"".join(b"\0" + _text(name) + _text(value) for name, value in literals.items())


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()
