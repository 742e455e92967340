"""What nobody tells is looked at again and again, no longer than was said, and errors come through; work is cut off by a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from gateway_lab.waiting import cut_off, until


@pytest.mark.parametrize("awaited", [False, True])
async def test_it_looks_until_it_is_so(*, awaited: bool) -> None:
    looks = iter([False, False, True])

    async def later() -> bool:
        return next(looks)

    look: Callable[[], bool | Awaitable[bool]] = later if awaited else lambda: next(looks)
    await until(look, 10, every=0)
    assert next(looks, None) is None


async def never() -> bool:
    return False


async def hangs() -> bool:
    await asyncio.Event().wait()
    return True


@pytest.mark.parametrize("look", [never, hangs])
async def test_it_looks_no_longer_than_was_said(look: Callable[[], Awaitable[bool]]) -> None:
    with pytest.raises(TimeoutError):
        await until(look, 0.02, every=0.001)


async def test_what_a_look_raises_is_not_looked_past() -> None:
    with pytest.raises(ZeroDivisionError):
        await until(lambda: bool(1 // 0), 10)


async def ends() -> None:
    pass


async def fails() -> None:
    raise ValueError


async def ended_by(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("work", "broke"),
    [
        pytest.param(ends, type(None), id="over"),
        pytest.param(fails, ValueError, id="failed"),
        pytest.param(lambda: ended_by(signal.SIGINT), asyncio.CancelledError, id="INT"),
        pytest.param(lambda: ended_by(signal.SIGTERM), asyncio.CancelledError, id="TERM"),
    ],
)
async def test_work_is_cut_off_by_a_signal(
    work: Callable[[], Coroutine[Any, Any, None]], broke: type[BaseException | None]
) -> None:
    assert type(await cut_off(work())) is broke
