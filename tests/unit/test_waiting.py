"""What nobody tells is looked at again and again, no longer than was said, and errors come through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.lab.waiting import until


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
