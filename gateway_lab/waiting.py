"""Waiting: for what nobody tells, which is looked at until it shows; and for work that a signal may cut off."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import tenacity

EVERY = 0.01
"""Seconds between two looks."""


async def until(
    look: Callable[[], bool | Awaitable[bool]], seconds: float | None = None, *, every: float = EVERY
) -> None:
    """Look until it is so.

    Args:
        look: says whether it is, at once or when it is awaited.
        seconds: for how long; without, as long as it takes. A look that takes longer is ended, too.
        every: seconds between two looks.

    Raises:
        TimeoutError: it wasn't so within ``seconds``.
    """

    async def seen() -> bool:
        found: Any = look()
        return bool(await found if isinstance(found, Awaitable) else found)

    again = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_result(lambda is_so: not is_so), wait=tenacity.wait_fixed(every)
    )
    async with asyncio.timeout(seconds):
        await again(seen)


async def cut_off(work: Coroutine[Any, Any, None]) -> BaseException | None:
    """Do some work until it is over or SIGINT or SIGTERM comes; return what ended it before its time, None where nothing did."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    [broke] = await asyncio.gather(task, return_exceptions=True)
    return broke
