"""A device plugin as a process of its own: spawned on a socket directory, heard by its JSON log lines, ended for sure.

The plugin is the gateway (``gateway_command``), or any other command that serves a socket directory: nothing here asks
for more than a process that writes lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gateway.leader.instance import FOLDER
from gateway.leader.locks import NAME as LOCK
from gateway.wires import control
from gateway_lab.spawned import Spawned, spawn

LINES = 10_000
"""How many of the newest log lines are kept."""
LONGEST_LINE = 1 << 20
BEGUN = ("serving", "waiting for a kubelet")
"""What a gateway says when it is done with its start, with and without a kubelet; with its backend."""

Line = Mapping[str, Any]
"""One log line: a JSON object as it came, or ``{"event": text}`` for a line that is none."""


class GatewayError(Exception):
    """The process did not do what was waited for. The message ends with the last of its log."""


def gateway_command(
    socket_dir: Path, state_dir: Path, profile: Path | None = None, api: str = "auto", options: Sequence[str] = ()
) -> list[str]:
    """Give the command line of a gateway with simulated GPUs: those of ``profile``, or 8 healthy ones."""
    return [
        *(sys.executable, "-m", "gateway"),
        *("--api", api, "--socket-dir", str(socket_dir), "--state-dir", str(state_dir)),
        *("--backend", "simulated", "--log-format", "json"),
        *(("--simulate", str(profile)) if profile else ()),
        *options,
    ]


def leader_socket(socket_dir: Path, state_dir: Path) -> Path:
    """Give the control socket of the gateway that leads, or led last, by the name in its lock."""
    try:
        said = json.loads((socket_dir / FOLDER / LOCK).read_text())
    except (OSError, ValueError):
        said = {}
    return control.socket_path(state_dir, said.get("token", ""))


class GatewayProcess(Spawned):
    """A running plugin. Make one with ``launch``; end it with ``terminate`` or ``kill``; ``async with`` ends it for sure."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path | None) -> None:
        super().__init__(process)
        self._sink = Path(os.devnull) if log is None else log
        self._lines: deque[Line] = deque(maxlen=LINES)
        self._changed = asyncio.Condition()
        self._ended = False
        self.seen = 0
        """How many lines came so far: a mark for ``wait_for(..., since=mark)``."""
        self.told_to_end = False
        """Whether its end was ours to cause."""
        self._reader = asyncio.create_task(self._read(), name=f"log of {process.pid}")

    @classmethod
    async def launch(cls, command: Sequence[str], log: Path | None = None) -> Self:
        """Spawn ``command``; its standard output and error are its log, kept in ``log`` too (appended to).

        It need not be ready when this returns.
        """
        process = await spawn(
            command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LONGEST_LINE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        return cls(process, log)

    def lines(self, event: str, since: int = 0, **fields: Any) -> list[Line]:
        """Give the lines with this ``event`` and these fields that came since a mark (as far as they are kept)."""
        skip = max(0, since - (self.seen - len(self._lines)))
        wanted = {"event": event, **fields}
        return [
            line
            for number, line in enumerate(self._lines)
            if number >= skip and all(line.get(key, ...) == value for key, value in wanted.items())
        ]

    @property
    def stage(self) -> str:
        """Whether it leads, by its log: the ``gateway.leader.machine.Stage`` that it was in last; '' before the first."""
        return next((str(line["stage"]) for line in reversed(self._lines) if line["event"] == "leader"), "")

    async def wait_for(self, event: str, *, since: int = 0, seconds: float = 30, **fields: Any) -> Line:
        """Wait for a line with this ``event`` and these fields, also one that came already (after the mark ``since``).

        Raises:
            GatewayError: none came within ``seconds``, or the process ended before.
        """
        what = f"a line {event!r}" + "".join(f", {key}={value!r}" for key, value in fields.items())
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._ended or self.lines(event, since, **fields))
        except TimeoutError:
            raise GatewayError(f"expected {what} within {seconds:g} s; the log ends:\n{self.log()}") from None
        found = self.lines(event, since, **fields)
        if not found:
            raise GatewayError(f"expected {what}, but the process ended; the log ends:\n{self.log()}")
        return found[0]

    async def begun(self, *, seconds: float = 30) -> Line:
        """Wait until a gateway is done with its start, with or without a kubelet; give the line that says so.

        Raises:
            GatewayError: as ``wait_for``.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._ended or self._begun())
        except TimeoutError:
            raise GatewayError(f"expected a start within {seconds:g} s; the log ends:\n{self.log()}") from None
        if not (found := self._begun()):
            raise GatewayError(f"expected a start, but the process ended; the log ends:\n{self.log()}")
        return found[0]

    def _begun(self) -> list[Line]:
        return [line for event in BEGUN for line in self.lines(event) if "backend" in line]

    def log(self, lines: int = 20) -> str:
        """The end of the log, as text."""
        return "\n".join(json.dumps(line) for line in [*self._lines][-lines:])

    async def wait(self, seconds: float = 30) -> int:
        """Wait until the process ends by itself; return its exit code.

        Raises:
            GatewayError: it didn't within ``seconds``.
        """
        try:
            async with asyncio.timeout(seconds):
                code = await self._process.wait()
        except TimeoutError:
            raise GatewayError(f"expected an end within {seconds:g} s; the log ends:\n{self.log()}") from None
        await self._gone()
        return code

    async def terminate(self, seconds: float = 30) -> int:
        """Send TERM, wait, and return the exit code.

        Raises:
            GatewayError: it was still there after ``seconds``.
        """
        self.told_to_end = True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        return await self.wait(seconds)

    async def kill(self) -> None:
        """End the process, and what it may have started, as a crash does."""
        self.told_to_end = True
        await super().kill()
        await self._gone()

    async def _gone(self) -> None:
        """Read the log to its end; a child that holds it open must not hold us."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.wait([self._reader])
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        try:
            with self._sink.open("ab", buffering=0) as sink:
                while raw := await _line(stream):
                    sink.write(raw)
                    self._lines.append(_parsed(raw))
                    self.seen += 1
                    await self._notify()
        finally:
            self._ended = True
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:
        return b"(a line that was too long)\n"


def _parsed(raw: bytes) -> Line:
    text = raw.decode(errors="replace").rstrip("\n")
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {"event": text}
