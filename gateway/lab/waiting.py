"""Waiting for what nobody tells: another process's socket, file, log or answer is looked at until it shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
