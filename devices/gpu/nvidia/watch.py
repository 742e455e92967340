"""The two threads that call NVML, which blocks and sometimes hangs.

One thread opens NVML, looks at all GPUs every few seconds, and closes it. The other waits for errors and passes them on at once.
Both pass plain values to the event loop. Neither can delay the other, the loop, or the end of the process.

An *open* NVML keeps its GPUs, handles and event registrations. So after a change (the driver was loaded again, a GPU was plugged
in, reset or released) it is closed and opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import structlog
from msgspec import Struct

from devices.gpu.nvidia.health import Event
from devices.gpu.nvidia.kernel import KernelFacts
from devices.gpu.nvidia.nvml import (
    DeniedError,
    MismatchError,
    NotLoadedError,
    Nvml,
    NvmlError,
    SessionError,
    UnsupportedError,
)
from devices.gpu.nvidia.scan import Busy, Let, Scan, Scanner, Session

HANG_S: Final = 10.0
"""Seconds after which a call is treated as hanging."""
GRACE_S: Final = 600.0
"""Seconds for which a library of another release than the driver is tolerated."""
_POLL_S: Final = 5.0
"""Seconds between two looks."""
_WAIT_S: Final = 2.0
"""Seconds of one wait of NVML for errors. Closing NVML takes at most as long."""
_LEAVE_S: Final = 0.25
"""Seconds for which the end of the watch waits for the threads."""
_AGAIN_S, _AGAIN_MAX_S = 0.5, 30.0
"""Seconds until NVML is tried again after a failure: at first, and at most. The wait doubles each time."""
_LOST_S, _LOST_MAX_S = 5.0, 600.0
"""The same for a lost GPU."""
_AFTER_S: Final = 0.05
"""Seconds between an error and the look that it triggers, so that the error is passed on first."""
_SPACING_S: Final = 0.5
"""Fewest seconds between two looks, even if many errors arrive."""
_MOST_LEFT: Final = 256
"""Most errors that are passed on after the order to close NVML, so that a flood can't keep it open."""
_GUEST_S: Final = 2.0
"""Most seconds for which closing NVML waits for a reading of the gauges."""


_log = structlog.get_logger()


class Happened(Struct, frozen=True):
    """An error that arrived at ``at`` (monotonic seconds)."""

    event: Event
    at: float


News = Scan | NvmlError | Happened | Exception
"""What the threads pass on. ``NvmlError``: NVML can't be used now. Another exception is a defect."""


class _Command(Struct, frozen=True):
    """An order to the looking thread. Without fields, it means: look now.

    ``end``: end both threads. ``let``: release these GPUs, and set ``done`` to True, or to False if NVML hangs. ``broken``: open
    NVML again if the session with this stop event still lasts, because of ``reason``.
    """

    end: bool = False
    let: Let | None = None
    broken: threading.Event | None = None
    reason: str = ""
    done: Future[bool] | None = None


class Guests:
    """Readings of the gauges, which use NVML next to the looking thread: one at a time, and only while that thread has it open.

    A reading holds the lock ``inside``, and begins only if ``allowed``. So the looking thread unloads the library only while no
    reading uses it.
    """

    def __init__(self) -> None:
        self.inside = threading.Lock()
        self.allowed = False

    def gone(self) -> bool:
        """Allow no further reading, and wait for the present one; return False if it hangs."""
        self.allowed = False
        if not self.inside.acquire(timeout=_GUEST_S):
            return False
        self.inside.release()
        return True


class Looker:
    """The two threads, which start with it. ``take`` is called on the event loop with each result.

    The methods with a public name are for the event loop; the rest runs in the looking thread.
    """

    def __init__(self, nvml: Nvml, node: KernelFacts, let: Let, guests: Guests, take: Callable[[News], None]) -> None:
        self._nvml, self._node, self._let, self._guests = nvml, node, let, guests
        self._loop, self._take = asyncio.get_running_loop(), take
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._session: Session | None = None
        self._old: threading.Thread | None = None
        self._busy = Busy()
        self._scanner = Scanner(nvml, node, self._busy)
        self._waiting: float | None = None
        self._opens_anyway: frozenset[int] = frozenset()
        self._load: int | None = None
        self._unloaded = False
        self._closed = 0.0
        self._reloaded: float | None = None
        self._pause, self._lost_pause = _AGAIN_S, _LOST_S
        self._lost_at = 0.0
        self._ended: Future[bool] = Future()
        threading.Thread(target=self._run, name="nvml-look", daemon=True).start()

    def look(self) -> None:
        """Order a look."""
        self._commands.put(_Command())

    async def renew(self, let: Let) -> None:
        """Close NVML, and open it again without using the GPUs in ``let``.

        Raises:
            TimeoutError: NVML hangs.
        """
        done: Future[bool] = Future()
        self._commands.put(_Command(let=let, done=done))
        closed = asyncio.wrap_future(done)
        await asyncio.wait({closed}, timeout=_WAIT_S + 2 * HANG_S)
        if not (closed.done() and closed.result()):
            raise TimeoutError("NVML cannot be closed, because a call of it hangs. Look at the GPU that it hangs on")

    async def end(self) -> None:
        """End both threads; wait at most ``_LEAVE_S``."""
        self._commands.put(_Command(end=True))
        await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=_LEAVE_S)

    def stuck(self, now: float) -> str:
        """Return the GPU (UUID) or step at which a call hangs; '' if none does."""
        busy, waiting = self._busy.at, self._waiting
        if busy is not None and now >= busy[0] + HANG_S:
            return busy[1]
        late = waiting is not None and now >= waiting + _WAIT_S + HANG_S
        return "nvmlEventSetWait" if late else ""

    def _post(self, news: News) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._take, news)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 (the loop raises it)
            self._post(error)
        finally:
            self._close()
            self._ended.set_result(True)

    def _serve(self) -> None:
        due, last = time.monotonic(), 0.0
        while True:
            command = None
            with contextlib.suppress(queue.Empty):
                command = self._commands.get(timeout=max(due - time.monotonic(), 0.0))
            if command is not None:
                if command.end:
                    break
                if command.let is not None:
                    self._let = command.let
                    closed = self._close()
                    if closed and self._let.uuids and not self._let.all and not self._stays_closed():
                        with contextlib.suppress(NvmlError):  # The next look reports it.
                            self._open()  # Before ``done``: after it, the GPU is reset.
                    if command.done is not None:
                        command.done.set_result(closed)
                elif command.broken is not None:
                    if self._session is None or self._session.stop is not command.broken:
                        continue
                    _log.warning("NVML doesn't wait for errors any more, and is opened again", reason=command.reason)
                    young = time.monotonic() < self._session.began + _AGAIN_MAX_S
                    self._close()
                    due = time.monotonic() + (self._rest() if young else 0.0)
                    continue
                else:
                    due = min(due, max(time.monotonic() + _AFTER_S, last + _SPACING_S))
                    if due > time.monotonic():
                        continue
            last = time.monotonic()
            due = last + self._turn()

    def _turn(self) -> float:
        """Look once; return the seconds until the next look."""
        if self._let.all:
            return _POLL_S
        if reason := self._stays_closed():
            self._post(SessionError(reason))
            return _POLL_S
        try:
            self._post(self._look())
        except NvmlError as error:
            self._busy.off()
            self._down(error)
            return self._rest()
        self._busy.off()
        self._reloaded = None
        if self._session is not None and time.monotonic() > self._session.began + _AGAIN_MAX_S:
            self._pause = _AGAIN_S
        return _POLL_S

    def _rest(self) -> float:
        """Return the seconds until NVML is tried again after a failure: longer each time."""
        pause, self._pause = self._pause, min(2 * self._pause, _AGAIN_MAX_S)
        return pause

    def _down(self, error: NvmlError) -> None:
        closed = self._close()
        self._unloaded = self._unloaded or isinstance(error, NotLoadedError)
        if closed and isinstance(error, MismatchError):
            self._nvml.unload()
        if isinstance(error, (NotLoadedError, DeniedError)):
            closed_because = type(error)(f"{error}{self._node.why_closed()}")
            closed_because.__cause__ = error.__cause__  # It has NVML's error code.
            error = closed_because
        self._post(error)

    def _stays_closed(self) -> str:
        """Return why NVML must stay closed while these GPUs are released; '' if it may be open.

        With driver 580, nvmlInit opens the device node of a machine's only GPU (seen on an H100), which prevents a reset.
        """
        nodes = [f"/dev/nvidia{minor}" for minor in sorted(self._scanner.minors(self._let) & self._opens_anyway)]
        return (
            f"NVML opens {', '.join(nodes)} by itself, so it stays closed, and no GPU can be checked, until that GPU is acquired "
            "(gateway acquire)"
            if nodes
            else ""
        )

    def _close(self) -> bool:
        """Close NVML; return False if a call that hangs prevents it."""
        session, self._session = self._session, None
        if session is not None:
            self._closed = time.monotonic()
        if session is not None and session.listener is not None:
            session.stop.set()
            self._old = session.listener
        if self._old is not None:
            self._old.join(_WAIT_S + HANG_S)
            if self._old.is_alive():
                return False
            self._old = None
        self._busy.on("nvmlShutdown")
        self._nvml.close()
        self._busy.off()
        return self._guests.gone()

    def _open(self) -> Session:
        """Open NVML and listen to all GPUs that may be used."""
        if self._old is not None and not self._close():
            raise SessionError("nvmlEventSetWait: a call hangs, and must end before NVML can be opened again")
        self._busy.on("nvmlInit")
        load, plugged = self._node.load(), self._node.plugged()
        self._nvml.open()
        self._guests.allowed = True
        session = self._session = Session(plugged=plugged, began=time.monotonic())
        if self._unloaded or (None not in {load, self._load} and load != self._load):
            self._reloaded = self._closed
        self._load, self._unloaded = load if load is not None else self._load, False
        session.heard, told = self._hear_all()
        released = self._scanner.minors(self._let)
        if released and (held := released & self._node.opened()):
            self._opens_anyway |= held
            self._close()
            raise SessionError(self._stays_closed())
        if told:
            session.listener = threading.Thread(
                target=self._listen, args=(session.stop,), name="nvml-wait", daemon=True
            )
            session.listener.start()
        return session

    def _hear_all(self) -> tuple[frozenset[str], bool]:
        """Listen to every GPU that may be used. Return those that need no further try, and True if any reports errors."""
        heard, told = set(), False
        for uuid in (seat.uuid for seat in self._scanner.seats(self._let) if seat.error is None):
            try:
                self._busy.on(uuid)
                self._nvml.listen(uuid)
                told = True
                heard.add(uuid)
            except (UnsupportedError, DeniedError) as error:
                heard.add(uuid)
                _log.warning("this GPU reports no errors", gpu=uuid, reason=str(error))
            except NvmlError as error:
                _log.warning("this GPU reports no errors until NVML is opened again", gpu=uuid, reason=str(error))
        return frozenset(heard), told

    def _listen(self, stop: threading.Event) -> None:
        """Pass on errors until ``stop`` is set, then the errors from before that. It runs in the listening thread."""
        left = _MOST_LEFT
        while left:
            stopping = stop.is_set()
            left -= stopping
            began = self._waiting = time.monotonic()
            try:
                event = self._nvml.wait(0 if stopping else int(_WAIT_S * 1000))
            except NvmlError as error:
                self._commands.put(_Command(broken=stop, reason=str(error)))
                return
            finally:
                self._waiting = None
            if event is not None:
                self._post(Happened(event, time.monotonic()))
                self._commands.put(_Command())
                stop.wait(0.001)  # So that many errors leave time for other threads.
            elif stopping:
                return
            elif time.monotonic() < began + _WAIT_S / 2:
                stop.wait(0.05)

    def _look(self) -> Scan:
        now = time.monotonic()
        session = self._session
        if session is not None and (self._node.plugged() != session.plugged or (session.lost and now >= self._lost_at)):
            self._lost_pause = min(2 * self._lost_pause, _LOST_MAX_S) if session.lost else _LOST_S
            self._close()
            session = None
        session = session or self._open()
        before = session.lost
        scan = self._scanner.scan(session, self._let, self._reloaded)
        if session.lost and not before:
            self._lost_at = now + self._lost_pause
        elif not session.lost:
            self._lost_pause = _LOST_S
        return scan
