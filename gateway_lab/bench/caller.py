"""Unary calls as fast as a kubelet makes them: one connection, one call at a time, its HTTP/2 frames written by hand.

A gRPC client in Python costs as much as the server that is measured, and would make every plugin look like every other.
What a call sends is known beforehand, and of the answer only two things matter: that it is one, and when it was there. So
this knows just as much of HTTP/2 (RFC 9113) as that takes, flow control included.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Sequence
from pathlib import Path

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
        self._stream = -1
        self._window = self._initial = self._stream_window = _WINDOW
        self._unsent = memoryview(b"")
        self._answered = False
        self._ended = 0
        self._received = 0
        self._buffer = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_SECONDS)
        self._socket.connect(str(path))
        self._socket.sendall(PREFACE + _frame(_SETTINGS, 0, 0))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def call(self, times: int) -> list[int]:
        """Call ``times`` times; give how long each call took, in ns.

        Raises:
            CallError: a call was refused, or the plugin ended the connection.
            OSError: the connection broke, or nothing came for long.
        """
        taken = []
        for _ in range(times):
            began = time.perf_counter_ns()
            self._stream += 2
            self._stream_window, self._unsent = self._initial, memoryview(next(self._messages))
            self._answered, self._ended = False, 0
            self._send(_frame(_HEADERS, _END_HEADERS, self._stream, self._block))
            while not self._ended:
                self._receive()
            if not self._answered:  # Trailers alone: a status other than OK.
                raise CallError(f"{self._method}: refused; the plugin's log says why")
            taken.append(self._ended - began)
        return taken

    def _send(self, head: bytes = b"") -> None:
        """Send ``head``, and of the message as much as the plugin takes now."""
        parts = [head]
        while (size := min(len(self._unsent), self._window, self._stream_window, _LARGEST_FRAME)) > 0:
            self._window -= size
            self._stream_window -= size
            sent, self._unsent = self._unsent[:size], self._unsent[size:]
            parts.append(_frame(_DATA, 0 if self._unsent else _END_STREAM, self._stream, bytes(sent)))
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
            self._answered = True
            self._received += len(payload)
            if self._received > _WINDOW // 2:
                self._send(_frame(_WINDOW_UPDATE, 0, 0, self._received.to_bytes(4)))
                self._received = 0
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload) - 5, 6):
                if int.from_bytes(payload[at : at + 2]) == _INITIAL_WINDOW_SIZE:
                    initial = int.from_bytes(payload[at + 2 : at + 6])
                    self._stream_window += initial - self._initial
                    self._initial = initial
            self._send(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._send(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload) & 0x7FFFFFFF
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
            self._send()
        elif kind in {_RST_STREAM, _GOAWAY}:
            raise CallError(f"{self._method}: the plugin gave it up ({payload.hex()})")
        if flags & _END_STREAM and kind in {_DATA, _HEADERS}:
            self._ended = now


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
