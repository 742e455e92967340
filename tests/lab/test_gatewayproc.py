from __future__ import annotations

import sys

import pytest

from gateway_lab import gatewayproc
from gateway_lab.gatewayproc import GatewayError, GatewayProcess

PRELUDE = "import json, os, signal, subprocess, sys, time; say = lambda **line: print(json.dumps(line)); "


def command(script: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + script]


async def test_lines_are_found_by_event_and_fields_and_since_a_mark() -> None:
    script = "say(event='registered', resource='a'); print('plain'); say(event='registered', resource='b'); input()"
    async with await GatewayProcess.launch(command(script)) as process:
        # Its standard input is closed, so that it ends with a Traceback, which is part of the log too.
        assert (await process.wait_for("registered", resource="b"))["resource"] == "b"
        assert (await process.wait_for("registered"))["resource"] == "a"
        assert (await process.wait_for("registered", since=1))["resource"] == "b"
        await process.wait_for("plain")
        assert await process.wait() == 1
        assert [line["resource"] for line in process.lines("registered")] == ["a", "b"]
        assert "EOFError" in process.log()


async def test_only_the_newest_lines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatewayproc, "LINES", 10)
    async with await GatewayProcess.launch(command("[say(event=str(n)) for n in range(100)]")) as process:
        assert await process.wait() == 0
        assert process.seen == 100
        assert not process.lines("89")
        assert process.lines("90", since=90)
        assert not process.lines("95", since=96)


async def test_a_line_too_long_is_told_of_and_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatewayproc, "LONGEST_LINE", 1000)
    async with await GatewayProcess.launch(command("print('x' * 100_000); say(event='after')")) as process:
        await process.wait_for("after")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("say(event='other'); sys.exit(3)", 'the process ended; the log ends:\n{"event": "other"}'),
        ("say(event='other'); time.sleep(60)", "within 0.2 s"),
    ],
)
async def test_what_does_not_come_is_an_error_with_the_log(script: str, says: str) -> None:
    async with await GatewayProcess.launch(command(script)) as process:
        with pytest.raises(GatewayError, match="expected a line 'registered', resource='a'") as caught:
            await process.wait_for("registered", resource="a", seconds=0.2 if "sleep" in script else 10)
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); say(event='up'); time.sleep(60)", 7),
        ("say(event='up'); time.sleep(60)", -15),
    ],
)
async def test_the_exit_code_after_term(script: str, code: int) -> None:
    async with await GatewayProcess.launch(command(script)) as process:
        await process.wait_for("up")
        assert await process.terminate() == code
        assert not process.alive
        assert await process.terminate() == code
