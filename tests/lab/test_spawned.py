"""A process of the laboratory ends, whole, with its handle, and nobody else's process does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from typing import Final

import pytest

from gateway_lab.spawned import Spawned, spawn


async def test_what_it_has_started_ends_with_it() -> None:
    process = await spawn(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with Spawned(process) as spawned:
        child = os.pidfd_open(int(await process.stdout.readline()))
        living = [spawned.alive]
    assert [*living, spawned.alive] == [True, False]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(child, ended.set)
    async with asyncio.timeout(10):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(child)
    os.close(child)


_HOLDS: Final = """
import asyncio, signal
from gateway_lab.spawned import Spawned, spawn

async def main():
    async with Spawned(await spawn(["sleep", "60"])) as spawned:
        print(spawned.pid, flush=True)
        await spawned.exited()

signal.signal(signal.SIGINT, {})  # Whatever the tests were started with: behind & a shell ignores it.
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("on_interrupt", "number"),
    [
        pytest.param("signal.default_int_handler", signal.SIGINT, id="Ctrl-C"),
        pytest.param("signal.default_int_handler", signal.SIGTERM, id="TERM"),
        pytest.param("signal.SIG_IGN", signal.SIGTERM, id="TERM, in the background of a script"),
    ],
)
async def test_who_is_called_off_leaves_nothing_running(on_interrupt: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", _HOLDS.format(on_interrupt)]
    holder = await spawn(command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    assert holder.stdout is not None
    async with Spawned(holder):
        held = os.pidfd_open(int(await holder.stdout.readline()))
        try:
            holder.send_signal(number)
            async with asyncio.timeout(10):
                assert await holder.wait() != 0
            ended, _, _ = select.select([held], [], [], 0)
            assert ended
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, signal.SIGKILL)
            os.close(held)


async def test_its_number_is_signalled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[tuple[int, int]] = []
    killpg = os.killpg

    def kill(group: int, number: int) -> None:
        signals.append((group, number))
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", kill)
    async with Spawned(await spawn(["sleep", "60"])) as spawned:
        await spawned.kill()
        await spawned.kill()
    assert signals == [(spawned.pid, signal.SIGKILL)]
