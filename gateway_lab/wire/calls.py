"""gRPC calls out of the raw bytes of one connection, without a gRPC library: what was really said, whoever said it.

A library would answer pings, join what was split and forget what was reset; a witness must do none of that. HTTP/2
frames are read by hand (RFC 9113, section 4.1), header blocks by ``hpack``, messages by gRPC's five-byte prefix. Frames
that are no part of a call (SETTINGS, PING, WINDOW_UPDATE, PRIORITY, GOAWAY) leave no trace: when they come is chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

from hpack import Decoder, HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LONGEST_MESSAGE = 64 << 20
"""Bytes; kubelets of 1.10 and later take 4 MiB, older ones have no limit."""

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE = 1
_LARGEST_TABLE = 1 << 16
_CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)

CALLER_CANCELLED = "cancelled by the caller"
SERVER_RESET = "reset by the server"
CUT = "cut with the connection"


class WireError(Exception):
    """The bytes are not those of a gRPC connection. The message says what was expected and what came."""


@dataclass(slots=True)
class Call:
    """One RPC. It grows while it is under way; ``end`` is None until then."""

    path: str
    """Such as ``/v1beta1.DevicePlugin/Allocate``."""
    headers: dict[str, str]
    """What the caller said of itself (``:authority``, ``user-agent``, ...)."""
    requests: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    end: str | None = None
    """gRPC's name of the status, or one of ``CALLER_CANCELLED``, ``SERVER_RESET``, ``CUT``."""
    details: str = ""


@dataclass(slots=True)
class _Stream:
    call: Call
    pending: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))


class _Side:
    """What one side sends: its bytes so far, its header compression, and a header block that isn't whole yet."""

    def __init__(self, *, preface: bool) -> None:
        self.buffer = bytearray()
        self.preface = preface
        self.decoder = Decoder()
        self.block: tuple[int, int, bytearray] | None = None


class Reader:
    """The calls of one connection, from what each side sends. ``calls`` are in the order in which they were opened."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.kept = 0
        """Bytes held by the recorded calls, roughly."""
        self._sides = (_Side(preface=True), _Side(preface=False))
        self._streams: dict[int, _Stream] = {}

    def feed(self, data: bytes, *, from_caller: bool) -> None:
        """Take the next bytes of one side.

        Raises:
            WireError: this is no HTTP/2, or no gRPC. The reader is of no use afterwards.
        """
        side = self._sides[0 if from_caller else 1]
        side.buffer += data
        if side.preface:
            if not PREFACE.startswith(bytes(side.buffer[: len(PREFACE)])):
                raise WireError(f"expected the HTTP/2 preface, came {bytes(side.buffer[: len(PREFACE)])!r}")
            if len(side.buffer) < len(PREFACE):
                return
            del side.buffer[: len(PREFACE)]
            side.preface = False
        while len(side.buffer) >= 9:
            end = 9 + int.from_bytes(side.buffer[:3])
            if len(side.buffer) < end:
                return
            kind, flags = side.buffer[3], side.buffer[4]
            stream = int.from_bytes(side.buffer[5:9]) & 0x7FFFFFFF
            payload = bytes(side.buffer[9:end])
            del side.buffer[:end]
            self._frame(side, kind, flags, stream, payload, from_caller=from_caller)

    def close(self) -> None:
        """Take note that the connection is gone, and every open call with it."""
        for stream in self._streams.values():
            stream.call.end = CUT
        self._streams.clear()

    def _frame(self, side: _Side, kind: int, flags: int, stream: int, payload: bytes, *, from_caller: bool) -> None:
        if side.block is not None and (kind != _CONTINUATION or stream != side.block[0]):
            raise WireError(f"expected the rest of a header block of stream {side.block[0]}, came frame type {kind}")
        if kind == _DATA:
            self._data(stream, _unpadded(flags, payload), from_caller=from_caller)
            if flags & _END_STREAM and not from_caller:
                self._end(stream, SERVER_RESET)
        elif kind == _HEADERS:
            body = _unpadded(flags, payload)
            side.block = (stream, flags, bytearray(body[5:] if flags & _PRIORITY else body))
        elif kind == _CONTINUATION:
            if side.block is None:
                raise WireError(f"expected a header block before the CONTINUATION of stream {stream}")
            side.block[2].extend(payload)
        elif kind == _RST_STREAM:
            self._end(stream, CALLER_CANCELLED if from_caller else SERVER_RESET)
        elif kind == _SETTINGS:
            self._settings(payload, from_caller=from_caller)
        if side.block is not None and flags & _END_HEADERS:
            opened, first_flags, block = side.block
            side.block = None
            try:
                headers = {str(name): str(value) for name, value in side.decoder.decode(bytes(block))}
            except (HPACKError, UnicodeDecodeError) as error:
                raise WireError(f"expected a header block on stream {opened}: {error!r}") from error
            self._headers(opened, headers, last=bool(first_flags & _END_STREAM), from_caller=from_caller)

    def _settings(self, payload: bytes, *, from_caller: bool) -> None:
        # What one side accepts bounds the compression of what the other side sends.
        other = self._sides[1 if from_caller else 0].decoder
        for at in range(0, len(payload) - 5, 6):
            if int.from_bytes(payload[at : at + 2]) == _HEADER_TABLE_SIZE:
                size = min(int.from_bytes(payload[at + 2 : at + 6]), _LARGEST_TABLE)
                other.max_allowed_table_size = max(other.max_allowed_table_size, size)

    def _headers(self, stream: int, headers: dict[str, str], *, last: bool, from_caller: bool) -> None:
        if from_caller:
            if stream not in self._streams and ":path" in headers:
                call = Call(headers[":path"], headers)
                self.calls.append(call)
                self.kept += 1024
                self._streams[stream] = _Stream(call)
            return
        if "grpc-status" in headers:
            code = headers["grpc-status"]
            known = code.isdecimal() and int(code) < len(_CODES)
            self._end(stream, _CODES[int(code)] if known else f"code {code}", unquote(headers.get("grpc-message", "")))
        elif last or headers.get(":status", "200") != "200":
            self._end(stream, f"HTTP {headers.get(':status', 'end')}")

    def _data(self, stream: int, data: bytes, *, from_caller: bool) -> None:
        found = self._streams.get(stream)
        if found is None:
            return
        pending = found.pending[0 if from_caller else 1]
        pending += data
        messages = found.call.requests if from_caller else found.call.answers
        while len(pending) >= 5:
            size = int.from_bytes(pending[1:5])
            if pending[0]:
                raise WireError(f"expected an uncompressed message in {found.call.path}, came flag {pending[0]}")
            if size > LONGEST_MESSAGE:
                raise WireError(f"expected at most {LONGEST_MESSAGE} bytes in a message of {found.call.path}: {size}")
            if len(pending) < 5 + size:
                return
            messages.append(bytes(pending[5 : 5 + size]))
            self.kept += size
            del pending[: 5 + size]

    def _end(self, stream: int, end: str, details: str = "") -> None:
        found = self._streams.pop(stream, None)
        if found is not None:
            found.call.end, found.call.details = end, details


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise WireError(
            f"expected less padding than the frame's {len(payload)} bytes, came {payload[:1].hex() or 'none'}"
        )
    return payload[1 : len(payload) - payload[0]]
