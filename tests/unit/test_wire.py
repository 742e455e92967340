from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from gateway_lab.wire.calls import CALLER_CANCELLED, CUT, PREFACE, SERVER_RESET, Call, Reader, WireError

DATA, HEADERS, RST, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS, PADDED, PRIORITY = 1, 4, 8, 32
PATH = "/v1beta1.DevicePlugin/Allocate"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(data).to_bytes(4) + data


class Side:
    """One side's frames, with its own header compression."""

    def __init__(self) -> None:
        self.encoder = Encoder()

    def headers(self, stream: int, *pairs: tuple[str, str], flags: int = END_HEADERS) -> bytes:
        return frame(HEADERS, flags, stream, self.encoder.encode(pairs))

    def call(self, stream: int, path: str = PATH) -> bytes:
        return self.headers(stream, (":method", "POST"), (":path", path), ("user-agent", "grpc-go/1.56.3"))

    def answer(self, stream: int, *messages: bytes) -> bytes:
        return self.headers(stream, (":status", "200")) + b"".join(frame(DATA, 0, stream, message(m)) for m in messages)

    def end(self, stream: int, code: str = "0", text: str = "") -> bytes:
        pairs = [("grpc-status", code), *([("grpc-message", text)] if text else [])]
        return self.headers(stream, *pairs, flags=END_HEADERS | END_STREAM)


def read(caller: bytes, server: bytes = b"") -> list[Call]:
    reader = Reader()
    reader.feed(PREFACE + frame(SETTINGS, 0, 0) + caller, from_caller=True)
    reader.feed(frame(SETTINGS, 0, 0) + server, from_caller=False)
    return reader.calls


def said(call: Call) -> tuple[list[bytes], list[bytes], str | None, str]:
    return call.requests, call.answers, call.end, call.details


CALLER = Side().call(1)
ONE = message(b"request")


@pytest.mark.parametrize(
    ("caller", "server", "expected"),
    [
        (frame(DATA, END_STREAM, 1, ONE), Side().answer(1, b"answer") + Side().end(1), ([b"request"], [b"answer"], "OK", "")),
        (frame(DATA, END_STREAM, 1, message(b"")), b"", ([b""], [], None, "")),
        (frame(DATA, 0, 1, ONE[:3]) + frame(DATA, 0, 1, ONE[3:9]) + frame(DATA, 1, 1, ONE[9:]), b"", ([b"request"], [], None, "")),
        (frame(DATA, 0, 1, ONE + ONE[:4]), b"", ([b"request"], [], None, "")),
        (frame(DATA, PADDED, 1, b"\x03" + ONE + b"\0\0\0"), b"", ([b"request"], [], None, "")),
        (frame(DATA, 1, 1, ONE), Side().answer(1, b"a", b"b", b"a"), ([b"request"], [b"a", b"b", b"a"], None, "")),
        (b"", Side().end(1, "2", "unknown%20kubelet%3A x"), ([], [], "UNKNOWN", "unknown kubelet: x")),
        (b"", Side().end(1, "12"), ([], [], "UNIMPLEMENTED", "")),
        (b"", Side().end(1, "99"), ([], [], "code 99", "")),
        (b"", Side().headers(1, (":status", "404"), flags=5), ([], [], "HTTP 404", "")),
        (frame(RST, 0, 1, bytes(4)), b"", ([], [], CALLER_CANCELLED, "")),
        (b"", frame(RST, 0, 1, bytes(4)), ([], [], SERVER_RESET, "")),
        (b"", Side().answer(1, b"a") + frame(DATA, END_STREAM, 1), ([], [b"a"], SERVER_RESET, "")),
        # What comes after the end changes nothing.
        (b"", Side().end(1) + frame(RST, 0, 1, bytes(4)) + frame(DATA, 0, 1, ONE), ([], [], "OK", "")),
        # Nothing but a call leaves a trace.
        (frame(PING, 0, 0, bytes(8)) + frame(8, 0, 0, bytes(4)), frame(7, 0, 0, bytes(8)), ([], [], None, "")),
    ],
)  # fmt: skip
def test_a_call(caller: bytes, server: bytes, expected: tuple[list[bytes], list[bytes], str | None, str]) -> None:
    [call] = read(CALLER + caller, server)
    assert call.path == PATH
    assert call.headers["user-agent"] == "grpc-go/1.56.3"
    assert said(call) == expected


def test_a_header_block_in_pieces_padded_and_with_a_priority() -> None:
    block = Encoder().encode([(":path", PATH)])
    pieces = (
        frame(HEADERS, PADDED | PRIORITY, 1, b"\x02" + bytes(5) + block[:2] + b"\0\0")
        + frame(CONTINUATION, 0, 1, block[2:4])
        + frame(CONTINUATION, END_HEADERS, 1, block[4:])
    )
    assert [call.path for call in read(pieces)] == [PATH]


def test_calls_are_in_the_order_in_which_they_were_opened_whatever_ends_first() -> None:
    caller, server = Side(), Side()
    calls = read(
        caller.call(1, "/first") + caller.call(3, "/second") + caller.call(5, "/third"),
        server.end(5, "5") + server.end(3) + server.answer(1, b"still here"),
    )
    assert [(call.path, call.end) for call in calls] == [("/first", None), ("/second", "OK"), ("/third", "NOT_FOUND")]
    assert calls[0].answers == [b"still here"]


def test_a_closed_connection_cuts_what_is_open() -> None:
    reader, side = Reader(), Side()
    reader.feed(PREFACE + side.call(1) + side.call(3), from_caller=True)
    reader.feed(Side().end(3), from_caller=False)
    reader.close()
    assert [call.end for call in reader.calls] == [CUT, "OK"]


def test_a_larger_header_table_that_the_other_side_allows() -> None:
    encoder = Encoder()
    encoder.header_table_size = 16384
    reader = Reader()
    reader.feed(frame(SETTINGS, 0, 0, (1).to_bytes(2) + (16384).to_bytes(4)), from_caller=False)
    reader.feed(PREFACE + frame(HEADERS, END_HEADERS, 1, encoder.encode([(":path", PATH)])), from_caller=True)
    assert [call.path for call in reader.calls] == [PATH]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\nand more of the same", "expected the HTTP/2 preface"),
        (PREFACE + frame(HEADERS, 0, 1, b"") + frame(DATA, 0, 1, b""), "expected the rest of a header block"),
        (PREFACE + frame(CONTINUATION, END_HEADERS, 1, b""), "expected a header block before"),
        (PREFACE + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), "expected a header block on stream 1"),
        (PREFACE + frame(DATA, PADDED, 1, b""), "expected less padding"),
        (PREFACE + frame(DATA, PADDED, 1, b"\x05abc"), "expected less padding"),
        (PREFACE + CALLER + frame(DATA, 0, 1, message(b"x", flag=1)), "expected an uncompressed message"),
        (PREFACE + CALLER + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"), "expected at most"),
    ],
)
def test_what_is_no_grpc_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        Reader().feed(data, from_caller=True)


@given(st.lists(st.integers(0, 400), max_size=12))
def test_it_makes_no_difference_how_the_bytes_are_cut(cuts: Sequence[int]) -> None:
    caller, server = Side(), Side()
    sent = (
        PREFACE
        + caller.call(1)
        + frame(DATA, 1, 1, ONE)
        + caller.call(3, "/b")
        + frame(DATA, PADDED, 3, b"\1" + ONE + b"\0")
    )
    answered = server.answer(1, b"a" * 100, b"b") + server.end(1) + server.answer(3) + server.end(3, "9", "no")
    whole, pieces = Reader(), Reader()
    whole.feed(sent, from_caller=True)
    whole.feed(answered, from_caller=False)
    for data, from_caller in ((sent, True), (answered, False)):
        at = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
        for start, end in pairwise(at):
            pieces.feed(data[start:end], from_caller=from_caller)
    assert pieces.calls == whole.calls
    assert [said(call) for call in whole.calls] == [
        ([b"request"], [b"a" * 100, b"b"], "OK", ""),
        ([b"request"], [], "FAILED_PRECONDITION", "no"),
    ]
