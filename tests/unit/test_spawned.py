"""A process of the laboratory ends, whole, with its handle, and nobody else's process does."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gateway.lab.spawned import Spawned, spawn


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
