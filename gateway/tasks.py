"""Start and end the tasks of a gateway, and wait for events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

_T = TypeVar("_T")
_log = structlog.get_logger()


async def after(event: Callable[[], Awaitable[object]], work: Coroutine[object, object, None]) -> None:
    """Await ``event``, then ``work``. If it is cancelled before that, close ``work``, or Python would warn about it."""
    try:
        await event()
    except asyncio.CancelledError:
        work.close()
        raise
    await work


async def first_of(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Wait until one of the events is set, at most ``seconds`` (None: for ever)."""
    waits = [asyncio.ensure_future(one.wait()) for one in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()


class Background:
    """Tasks that no code awaits. It keeps them, because an event loop alone may lose them, and cancels them together.

    A task that fails is a defect, and is logged at once.
    """

    def __init__(self, log: Any = _log) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def background(self, work: Coroutine[object, object, object]) -> None:
        """Start a task."""
        _ = self.start(work)

    def start(self, work: Coroutine[object, object, _T]) -> asyncio.Task[_T]:
        """Start a task and return it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("a task failed because of a defect in the gateway", exc_info=error)

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Signal:
    """Wakes all waiting tasks at each change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the waiting tasks. A task that waits afterwards waits for the next change."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, seconds: float | None) -> None:
        """Wait for the next change, at most ``seconds`` (None: for ever)."""
        await first_of(self._event, seconds=seconds)


class Tasks(Background):
    """All tasks of one gateway. Ends the gateway if one of them fails."""

    def __init__(self) -> None:
        super().__init__()
        self.exit_status: int | None = None
        """The exit status, once the gateway should end."""
        self._ending = asyncio.Event()

    def end(self, status: int) -> None:
        """End the gateway with an exit status. Later calls change nothing."""
        if self.exit_status is None:
            self.exit_status = status
            self._ending.set()

    async def wait_for_end(self) -> None:
        """Wait until the gateway should end."""
        await self._ending.wait()

    def spawn(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Start a task that must never end by itself. If it does, that is a defect, and the gateway ends."""
        _ = self.spawn_cancellable(name, work)

    def spawn_cancellable(self, name: str, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Do the same as ``spawn``, and return the task so that the caller can cancel it."""
        task = asyncio.ensure_future(work)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                _log.error(
                    "ending because of a defect: a task ended that must never end",
                    task=name,
                    exc_info=task.exception() or False,
                )
                self.end(1)

        task.add_done_callback(ended)
        self._tasks.add(task)
        return task
