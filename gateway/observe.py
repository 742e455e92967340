"""What the gateway says of itself: structured log lines, for people on a terminal, as JSON for everything else."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import msgspec
import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor

FORMATS = ("auto", "console", "json")
LEVELS = ("debug", "info", "warning", "error")


def configure(log_format: str, level: str) -> None:
    """Log to standard error. ``auto`` means: readable where standard error is a terminal, JSON lines otherwise."""
    readable = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if readable
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_spelled)]
    )
    structlog.configure(
        processors=shared + renderers,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _spelled(event: object, **_: object) -> str:
    """Spell a line as JSON, four times as fast as ``json.dumps``; what JSON doesn't know is shown as Python shows it."""
    return msgspec.json.encode(event, enc_hook=repr).decode()
