"""Turns: a kubelet's checkpoint that is written in place, by a kubelet that this test is."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from gateway.registration import turns
from gateway.registration.turns import Turns

SPACING = 0.02


@pytest.fixture
async def taken(folder: Path) -> Turns:
    """Turns, of which a list has just taken one; the checkpoint has something in it."""
    (folder / "checkpoint").write_text("{}")
    one = Turns(folder / "checkpoint")
    await one.take(SPACING, writes=True)
    return one


def _after(one: Turns, *, writes: bool = True) -> asyncio.Future[None]:
    return asyncio.ensure_future(one.take(SPACING, writes=writes))


async def test_the_next_waits_until_the_kubelet_has_written(
    taken: Turns, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()
    stamp = Turns._stamp

    def look(one: Turns) -> tuple[int, int] | None:
        looked.set()
        return stamp(one)

    monkeypatch.setattr(Turns, "_stamp", look)

    async def looks(times: int) -> None:
        for _ in range(times):
            looked.clear()
            await looked.wait()

    following = _after(taken)
    async with asyncio.timeout(turns.PATIENCE):
        await looks(3)
    assert not following.done()
    (folder / "checkpoint").write_text("")  # A write begins.
    async with asyncio.timeout(turns.PATIENCE):
        await looks(3)
    assert not following.done()
    (folder / "checkpoint").write_text("{...}")
    async with asyncio.timeout(turns.PATIENCE):
        await following


async def test_a_checkpoint_of_the_same_size_was_written(
    taken: Turns, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 600.0)
    os.utime(folder / "checkpoint", ns=(1, 1))
    async with asyncio.timeout(10):
        await _after(taken)


async def test_a_kubelet_that_writes_nothing_is_not_waited_for_without_end(
    taken: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.05)
    began = time.monotonic()
    async with asyncio.timeout(10):
        await _after(taken)
    assert time.monotonic() - began > SPACING


async def test_what_makes_the_kubelet_write_later_is_only_given_its_time(taken: Turns, folder: Path) -> None:
    """Its checkpoint is written when each resource of a container is answered, and the next one's answer waits."""
    (folder / "checkpoint").write_text("{...}")
    await _after(taken, writes=False)
    began = time.monotonic()
    async with asyncio.timeout(turns.PATIENCE):
        await _after(taken)
    assert time.monotonic() - began >= SPACING * 0.9


async def test_turns_are_taken_in_order(taken: Turns, folder: Path) -> None:
    order: list[int] = []

    async def take(number: int) -> None:
        await taken.take(0.3, writes=False)
        order.append(number)

    (folder / "checkpoint").write_text("{...}")
    began = time.monotonic()
    await asyncio.gather(*map(take, range(4)))
    assert (order, time.monotonic() - began >= 0.9) == ([0, 1, 2, 3], True)


async def test_the_first_waits_for_nobody(folder: Path) -> None:
    async with asyncio.timeout(10):
        await Turns(folder / "missing").take(60, writes=True)
