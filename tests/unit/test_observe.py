"""What is logged and shown: text that others wrote steers no screen, and what repeats itself fills no disk."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog

from gateway import process
from gateway.wires import log as observe
from gateway.wires.log import Seldom, escaped, printable
from gateway_lab.gatewayproc import GatewayProcess, gateway_command

STEERING = ["\x1b[2J", "\x9b2J", "\x7f", "\u202e", "\u2066", "\u200f", "\x00", "\ud800", "\u2028", "\U000e0001", "\xad"]


@pytest.mark.parametrize("text", STEERING)
def test_what_steers_a_screen_is_replaced(text: str) -> None:
    shown = printable(f"GPU-1 {text} é 漢 🔥")
    assert shown.isprintable()
    assert shown.startswith("GPU-1 ?")
    assert shown.endswith(" é 漢 🔥")


@pytest.mark.parametrize("text", [*STEERING, "é 漢 🔥", ""])
def test_a_document_means_the_same_and_steers_no_screen(text: str) -> None:
    document = {"a": [text, {text: 1}], "b": "x"}
    for spelled in (json.dumps(document, ensure_ascii=False), json.dumps(document, ensure_ascii=False, indent=1)):
        assert json.loads(escaped(spelled)) == document
        assert escaped(spelled).replace("\n", "").isprintable()


def fail(text: str) -> NoReturn:
    raise ValueError(text)


@contextmanager
def logging_to(monkeypatch: pytest.MonkeyPatch, log_format: str) -> Iterator[io.StringIO]:
    sink = io.StringIO()
    monkeypatch.setattr(sys, "stderr", sink)
    before = structlog.get_config()
    observe.configure(log_format, "info")
    try:
        yield sink
    finally:
        structlog.configure(**before)


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("text", STEERING)
def test_a_line_of_the_log_steers_no_screen(monkeypatch: pytest.MonkeyPatch, log_format: str, text: str) -> None:
    with logging_to(monkeypatch, log_format) as sink:
        log = structlog.get_logger()
        log.warning("refused", reason=f"before{text}after")
        try:
            fail(text)
        except ValueError:
            log.exception("unexpected", what=text)
    lines = sink.getvalue().split("\n")
    assert all(line.isprintable() for line in lines)
    assert any("before" in line and "after" in line for line in lines)
    assert any("ValueError" in line for line in lines)


def test_what_repeats_itself_is_told_so_often_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    seldom = Seldom(times=2, seconds=60)
    assert [seldom.tell("a") for _ in range(5)] == [0, 0, None, None, None]
    assert seldom.tell("b") == 0
    now = 1059.9
    assert seldom.tell("a") is None
    now = 1060.0
    assert [seldom.tell("a") for _ in range(3)] == [4, 0, None]


async def test_a_listener_without_descriptors_fills_no_log() -> None:
    """asyncio tells each of a hundred failures a second (``_accept_connection`` of selector_events)."""
    context: dict[str, Any] = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
    }
    with structlog.testing.capture_logs() as logs:
        for _ in range(1000):
            process.report_loop_error(asyncio.get_running_loop(), context)
    assert 1 <= len(logs) <= 5


async def test_a_gateway_may_have_as_many_as_its_hard_limit_allows(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, 512)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        gateway = await GatewayProcess.launch(gateway_command(folder / "device-plugins", folder / "state"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with gateway:
        await gateway.begun()
        assert resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE) == (hard, hard) != (low, hard)


def test_where_the_limit_may_not_be_raised_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(resource, "setrlimit", forbidden)
    assert process.allow_descriptors() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_what_a_library_writes_to_standard_error_is_a_line_of_the_json_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_to(monkeypatch, "json") as sink:
        observe.log_what_others_write()
        try:
            fail("no descriptor is left")
        except ValueError:
            traceback.print_exc()
    lines = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert lines[-1]["text"] == "ValueError: no descriptor is left"


def test_what_a_library_writes_stays_as_it_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_to(monkeypatch, "console") as sink:
        observe.log_what_others_write()
        sys.stderr.write("text\n")
    assert sink.getvalue() == "text\n"
