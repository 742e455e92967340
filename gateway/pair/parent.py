"""The parent of a pair: it starts gateways, tells one to serve, and sees to it that another one stands by.

It is a fork of what the gateways will be, before there is an event loop, a thread or a gRPC connection: what they have in
common is in memory once. It holds no device and no socket of the kubelet's, so that nothing that ends a gateway ends it.

A gateway of the pair is older than those before it (``Role``): it stands by over the handover that any two gateways of a node
have, and takes over when the connection to the one that serves ends. So the parent is no part of that, and may be late.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NoReturn

import structlog

from devices import inotify
from gateway.handover.instance import boot_ns
from gateway.pair import held
from gateway.pair.flight import LANES, Flight
from gateway.pair.policy import Deaths, lasting
from gateway.pair.pulse import Pulse
from gateway.pair.role import RESIGNS, Role
from gateway.pair.signs import EVERY, Signs, Silence
from gateway.wires import notify

READY_TIME: Final = 10.0
"""Seconds that the first gateway is given to be ready, before another one is started beside it."""
AFTER_DEATH: Final = 0.5
"""Seconds after a death at which another one is started at the earliest: who takes over goes first."""
FORK_AGAIN: Final = 10.0
"""Seconds until a gateway that could not be started beside another one is tried again."""
END_TIME: Final = 10.0
"""Seconds that a gateway is given to end."""
ANSWER_TIME: Final = 45.0
"""Seconds that one that stood by has for claims that it passed on: as many as the kubelet gives a call."""
_NEEDED_LATER: Final = ("concurrent.futures.thread", "gateway.registration.api", "grpc._utilities")
"""Modules that a gateway would import when it is called for the first time, which takes milliseconds of a takeover."""
_NEEDED_WITH_DRA: Final = (
    "devices.gpu.nvidia.survey",
    "encodings.idna",
    "gateway.dra.drivers",
    "gateway.handover.alone",
    "gateway.kubernetes.features",
)
"""Modules that are in memory once so."""
_PR_SET_PDEATHSIG: Final = 1
_LONGEST_WORD: Final = 512
_log = structlog.get_logger()


class _Child:
    """One gateway of the pair."""

    def __init__(self, pid: int, channel: socket.socket, lane: int, signs: int) -> None:
        self.pid, self.channel, self.lane, self.silence = pid, channel, lane, Silence(signs)
        self.since = time.monotonic()
        self.ready = self.active = self.ends = False
        self.held = held.Connections()

    def serve(self) -> None:
        """Tell it that it is the one that serves."""
        self.active = True
        with contextlib.suppress(OSError):
            self.channel.send(b"1")

    def words(self) -> Iterator[tuple[str, list[int]]]:
        """Give what it has said since, and the descriptors that came with each word."""
        with contextlib.suppress(OSError):  # There is no more now; or it closed its end.
            while (heard := self.channel.recvmsg(_LONGEST_WORD, held.SPACE, socket.MSG_CMSG_CLOEXEC))[0]:
                yield heard[0].decode(errors="replace"), held.received(heard[1])

    def close(self) -> None:
        """Forget it, but for its connections."""
        self.channel.close()


class Pair:
    """Keeps two gateways.

    Args:
        serve: runs one gateway in a process of its own, and returns its exit status.
        flight: what all of them note what they try in.
        dra: one gateway decides on the node: nobody stands by before the first one does.
        before: when the pair began (nanoseconds of the boot clock; empty: now), and how often in a row it made room in vain.
    """

    def __init__(
        self, serve: Callable[[Role], int], flight: Flight, *, dra: bool = False, before: Sequence[int] = ()
    ) -> None:
        self._serve, self._flight, self._pulse, self._signs, self._dra = serve, flight, Pulse(), Signs(), dra
        self._look_at = time.monotonic() + EVERY
        """When signs of life are looked for (monotonic seconds)."""
        self._in_vain = sum(before[1:])
        self.resigned: int | None = None
        """Set where it made room for a newer gateway: how often in vain, should that one end again."""
        self._children: list[_Child] = []
        self._dead: list[tuple[float, held.Connections]] = []
        """Until when (monotonic seconds) the connections of those that died live on."""
        self._deaths = Deaths()
        self._started = 0
        self.born_ns = next(iter(before), None) or boot_ns()
        self._not_before = 0.0
        self._status: int | None = None
        self._woken, self._wake = os.pipe()

    def run(self) -> int:
        """Keep the pair until it is told to end; return the exit status."""
        for module in (*_NEEDED_LATER, *(_NEEDED_WITH_DRA if self._dra else ())):
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # What the gateways share is shared as long as nobody writes into it, and the collector does.
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake)
        while self._status is None:
            self._start_missing()
            self._wait()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Python takes its handlers back before the process ends.
        return self._end(self._status)

    # What happens.

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            for child in self._children:
                _send(child, signal.SIGHUP)
        elif number != signal.SIGCHLD:
            self._status, self.resigned = 0, None

    def _wait(self) -> None:
        """Wait for a death, a word, a signal, or until something is due."""
        dues = [self._look_at, *(until for until, _ in self._dead)]
        if (due := self._due) is not None:
            dues.append(due)
        wait = max(min(dues) - time.monotonic(), 0.0)
        select.select([self._woken, *(one.channel.fileno() for one in self._children)], [], [], wait)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 64):
                pass
        self._hear()
        self._bury()
        for _, ended in self._dead:
            for child in self._children:
                ended.lead_to(child.held)
        self._let_end(time.monotonic())
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        """Kill who stands still: SIGKILL ends a stopped process, too."""
        if now < self._look_at:
            return
        late, self._look_at = now - self._look_at > EVERY, now + EVERY
        for child in self._children:
            count = self._signs.count(child.lane)
            child.silence = Silence(count) if late else child.silence.look(count)
            if child.silence.lasts:
                _log.error("a gateway of the pair stands still: killing it", gateway=child.pid, serves=child.active)
                _send(child, signal.SIGKILL)

    def _hear(self) -> None:
        """Take what gateways tell a service manager: that of the serving one goes on to ours."""
        for child in self._children:
            for said, lent in child.words():
                if said.startswith(held.WORD):
                    child.held.take(said, lent)
                child.ends |= said == notify.STOPPING
                if said == notify.READY and not child.ready:
                    child.ready = True
                    _log.info("ready", gateway=child.pid, serves=child.active)
                if child.active and said in {notify.READY, notify.ALIVE}:
                    notify.tell(said)
                if child.active and said.startswith(RESIGNS) and self._status is None:
                    self._status, self.resigned = 0, int(said.removeprefix(RESIGNS))
                    _log.info("making room for a newer gateway", gateway=child.pid)

    def _bury(self) -> None:
        """Take note of those that died; the one that stood by serves."""
        while self._status is None:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = next((one for one in self._children if one.pid == pid), None)
            if child is None:
                continue
            self._children.remove(child)
            child.close()
            self._died(child, os.waitstatus_to_exitcode(how))

    def _let_end(self, now: float) -> None:
        """Close the connections of those that died long enough ago."""
        for until, ended in self._dead:
            if until <= now:
                ended.close()
        self._dead = [one for one in self._dead if one[0] > now]

    def _died(self, child: _Child, status: int) -> None:
        self._dead.append((time.monotonic() + held.LONGER, child.held))
        lived = time.monotonic() - child.since
        self._deaths = self._deaths.after(lived)
        self._not_before = time.monotonic() + max(self._deaths.wait, AFTER_DEATH if self._children else 0.0)
        _log.error(
            "a gateway of the pair died",
            gateway=child.pid,
            served=child.active,
            status=status,
            lived_s=round(lived, 3),
            next_in_s=self._deaths.wait,
            left_out_from_now_on=self._flight.landed(child.lane, status),
        )
        if child.active and self._children:
            self._children[0].serve()
            if self._children[0].ready:
                notify.tell(notify.READY)
        if lasting(status) or self._deaths.loop:
            why = "the next one would end so, too" if lasting(status) else f"{self._deaths.young} died young in a row"
            _log.error("ending the pair", reason=why, status=status)
            self._status = status if status > 0 else 1

    # Starting and ending.

    @property
    def _due(self) -> float | None:
        """When the next gateway is to be started (monotonic seconds); None: not yet, or two are there."""
        if len(self._children) > 1:
            return None
        first = self._children[0] if self._children else None
        if first is None or first.ready:
            return self._not_before
        return None if self._dra else max(self._not_before, first.since + READY_TIME)

    def _start_missing(self) -> None:
        while self._status is None and (due := self._due) is not None and time.monotonic() >= due:
            self._start()

    def _start(self) -> None:
        try:
            self._fork()
        except OSError as error:  # The limit of processes, or of files, or memory: who serves goes on.
            if not self._children:
                raise
            _log.error("a second gateway can't be started", reason=error.strerror, next_in_s=FORK_AGAIN)
            self._not_before = time.monotonic() + FORK_AGAIN

    def _fork(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # Without a name: nobody else gets at it.
        ours.settimeout(0)
        its.settimeout(0)
        self._started += 1
        [lane] = {*range(LANES)} - {one.lane for one in self._children} if self._children else [0]
        parent, first, born_ns = os.getpid(), not self._children, self.born_ns - self._started
        lives = partial(self._signs.give, lane)
        role = Role(self._flight, self._pulse, its.fileno(), born_ns, first=first, in_vain=self._in_vain, lives=lives)
        pid = os.fork()
        if pid == 0:
            ours.close()
            notify.parent[:] = [its]
            self._flight.take(lane)
            self._pulse.begin(lane)
            self._be_a_gateway(role, parent)
        its.close()
        child = _Child(pid, ours, lane, self._signs.count(lane))
        self._children.append(child)
        if first:
            child.serve()

    def _be_a_gateway(self, role: Role, parent: int) -> NoReturn:
        """Run a gateway in this process, which is a copy of the parent."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # What changes before it listens is read when it does.
            for child in self._children:
                child.close()
                child.held.close()
            self._let_end(math.inf)
            # The kernel closes what a killed process had open from the highest number down (4.3 and later), and stays at an
            # inotify instance for 5 to 20 ms: connections, sockets and locks with lower numbers would end as much later.
            inotify.kept[:] = *os.pipe(), *os.pipe()
            with contextlib.suppress(AttributeError, OSError):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            if "WATCHDOG_PID" in os.environ:
                os.environ["WATCHDOG_PID"] = str(os.getpid())
            status = self._serve(role)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException:  # noqa: BLE001 - it must not go on as a second parent
            _log.exception("a gateway of the pair could not be run")
        finally:
            os._exit(status)

    def _end(self, status: int) -> int:
        """End the one that stands by, or it would take over; then the other.

        With claims one that says that it ends takes nothing over any more, and may have passed on some that a newer gateway answers
        once the other one has ended.
        """
        notify.tell(notify.STOPPING)
        children = sorted(self._children, key=lambda one: one.active)
        for child in children:
            _send(child, signal.SIGTERM)
            _end_within(child, END_TIME, partial(self._leaves, child))
        for child in reversed(children):
            _end_within(child, END_TIME if child.active else ANSWER_TIME)
            child.held.close()
        self._let_end(math.inf)
        return status

    def _leaves(self, child: _Child) -> bool:
        self._hear()
        return self._dra and child.ends


def _send(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, number)


def _end_within(child: _Child, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Wait for a gateway's end, or for something else, and kill it when neither comes in time."""
    if not _ended(child, seconds, until):
        _log.error("a gateway of the pair doesn't end: killing it", gateway=child.pid)
        _send(child, signal.SIGKILL)
        _ended(child, END_TIME)


def _ended(child: _Child, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
    """Wait for a gateway's end, or for something else; False: neither came in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(child.pid, os.WNOHANG)[0] == 0 and not until():
                time.sleep(0.005)
                continue
        return True
    return False
