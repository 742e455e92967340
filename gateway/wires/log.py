"""The gateway's log: structured lines, readable on a terminal, otherwise as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, TextIO, cast

import msgspec
import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

FORMATS = ("auto", "console", "json")
LEVELS = ("debug", "info", "warning", "error")


def printable(text: str) -> str:
    """Replace each character that could control a terminal with a question mark: control characters, and those that change direction."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def printable_lines(text: str) -> str:
    """Do the same in each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def escaped(document: str) -> str:
    """Escape, in a JSON document, the characters that ``printable`` replaces. They occur only in texts, so the meaning stays."""
    lines = document.split("\n")
    return "\n".join(
        line if line.isprintable() else "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)
        for line in lines
    )


class Seldom:
    """Limits repeated log lines: ``times`` per ``seconds`` and kind are logged, the rest is counted."""

    def __init__(self, times: int = 1, seconds: float = 60.0) -> None:
        self._times, self._seconds = times, seconds
        self._kinds: dict[str, tuple[float, int, int]] = {}
        """By kind: when the count began (monotonic seconds), the lines since then, and the lines left out since the last logged one."""

    def tell(self, kind: str) -> int | None:
        """Return None if this line must not be logged; otherwise how many lines were left out since the last logged one."""
        now = time.monotonic()
        since, came, untold = self._kinds.get(kind, (now, 0, 0))
        if now - since >= self._seconds:
            since, came = now, 0
        if told := came < self._times:
            self._kinds[kind] = since, came + 1, 0
        else:
            self._kinds[kind] = since, came + 1, untold + 1
        return untold if told else None


def wants_colour() -> bool:
    """Return True if a terminal may get colours: NO_COLOR is not set (https://no-color.org), and it is no dumb terminal."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure(log_format: str, level: str) -> None:
    """Log to standard error. ``auto`` means readable lines on a terminal, otherwise JSON lines."""
    readable = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers: list[Processor] = (
        [
            structlog.processors.format_exc_info,
            _shown,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty() and wants_colour(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
        if readable
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_spelled)]
    )
    structlog.configure(
        processors=shared + renderers,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: structlog.WriteLogger(_standard_error()),
    )


class _LibraryOutput:
    """Standard error for libraries that write to it. Each line becomes a line of the log."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self._line = stream, ""

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in filter(str.strip, lines):
            structlog.get_logger().error("a library wrote to standard error", text=line)
        return len(text)


def _standard_error() -> TextIO:
    """Return the original standard error, for the log itself."""
    stream: object = sys.stderr
    return cast("TextIO", stream.stream if isinstance(stream, _LibraryOutput) else stream)


def log_what_others_write() -> None:
    """If the log is JSON, turn libraries' output on standard error, such as gRPC's tracebacks, into log lines."""
    if isinstance(structlog.get_config()["processors"][-1], structlog.processors.JSONRenderer):
        sys.stderr = cast("TextIO", _LibraryOutput(sys.stderr))


def _spelled(event: object, **_: object) -> str:
    """Return a line as JSON, four times as fast as ``json.dumps``. Unknown types are written as their ``repr``."""
    try:
        return escaped(msgspec.json.encode(event, enc_hook=repr).decode())
    except UnicodeEncodeError:  # A file name that isn't UTF-8.
        return json.dumps(event, default=repr)


def _shown(_: object, __: str, event: EventDict) -> EventDict:
    """Keep values from controlling the terminal."""
    return {key: printable_lines(part) if isinstance(part, str) else part for key, part in event.items()}
