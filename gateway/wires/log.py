"""What the gateway says of itself: structured log lines, for people on a terminal, as JSON for everything else."""

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
    from collections.abc import Collection

    from structlog.typing import EventDict, Processor

FORMATS = ("auto", "console", "json")
LEVELS = ("debug", "info", "warning", "error")


def printable(text: str) -> str:
    """Put a question mark in the place of each character that steers a screen: control, DEL, U+009B, and those that turn text round."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def printable_lines(text: str) -> str:
    """Do so in each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def escaped(document: str) -> str:
    """Escape in a JSON document what ``printable`` replaces; it means the same, because it can only be within texts."""
    lines = document.split("\n")
    return "\n".join(
        line if line.isprintable() else "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)
        for line in lines
    )


class Seldom:
    """Keeps what repeats itself from filling a disk: ``times`` in each ``seconds`` it is told, the rest is counted."""

    def __init__(self, times: int = 1, seconds: float = 60.0) -> None:
        self._times, self._seconds = times, seconds
        self._kinds: dict[str, tuple[float, int, int]] = {}
        """Since when (monotonic seconds) a kind has been counted, how often it came, and how often before."""

    @property
    def kinds(self) -> Collection[str]:
        """What is being counted."""
        return self._kinds.keys()

    def tell(self, kind: str) -> int | None:
        """Say whether to tell this one: None where not, else how many weren't told since the last one that was."""
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
    """Whether a terminal is to be written to in colours: not where NO_COLOR is set (https://no-color.org), or it is a dumb one."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure(log_format: str, level: str) -> None:
    """Log to standard error. ``auto`` means: readable where standard error is a terminal, JSON lines otherwise."""
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


class _Others:
    """Standard error for libraries that write to it: each line becomes a line of the log."""

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
    """Return standard error itself: the log must not be taken for what libraries write."""
    stream: object = sys.stderr
    return cast("TextIO", stream.stream if isinstance(stream, _Others) else stream)


def log_what_others_write() -> None:
    """Make log lines of what libraries write to standard error, as gRPC does with tracebacks, if the log is JSON."""
    if isinstance(structlog.get_config()["processors"][-1], structlog.processors.JSONRenderer):
        sys.stderr = cast("TextIO", _Others(sys.stderr))


def _spelled(event: object, **_: object) -> str:
    """Spell a line as JSON, four times as fast as ``json.dumps``; what JSON doesn't know is shown as Python shows it."""
    try:
        return escaped(msgspec.json.encode(event, enc_hook=repr).decode())
    except UnicodeEncodeError:  # A file's name that is no UTF-8.
        return json.dumps(event, default=repr)


def _shown(_: object, __: str, event: EventDict) -> EventDict:
    """Keep what others wrote from steering the terminal."""
    return {key: printable_lines(part) if isinstance(part, str) else part for key, part in event.items()}
