"""NVIDIA's GPUs and MIG instances: found and watched through NVML, which blocks, and sometimes hangs.

So NVML is called by two threads of its own. One opens it, looks at all GPUs every few seconds, and closes it; the other waits
for errors, which count at once. Both hand plain values to the event loop, where ``devices.gpu.health`` judges them; neither
holds up the other, the loop, or its end. An *open* NVML fixes what it knows (its GPUs, their handles, whom it listens to),
so whatever changes that (a driver loaded anew, a GPU plugged in, reset, released) is met by closing and opening it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from devices.gpu import health
from devices.gpu.backend import Sight
from devices.gpu.health import Checks, Event, Health, Look
from devices.gpu.model import GPU, Link, Way
from devices.gpu.nvml import (
    Board,
    Instance,
    LostError,
    MismatchError,
    NotLoadedError,
    Nvml,
    NvmlError,
    SessionError,
    UnsupportedError,
)
from devices.model import Kind, Trouble
from devices.policy import Policy
from devices.source import GiveUpError

_RESOURCE: Final = "nvidia.com/gpu"
_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_SPACING_S: Final = 0.5
"""Between two looks, in seconds, however many errors ask for one."""
_LOGGED_AGAIN_S: Final = 60.0
"""How long the same error of the same GPU isn't logged again, in seconds."""

_UNSEEN: Final = "a GPU can't be looked at"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pace:
    """How often and how long, in seconds.

    A look every ``poll``; ``wait`` is how long NVML is left waiting for errors, and so what closing it can take, of which
    ``leave`` is waited for when the watch ends (the rest happens behind it). What fails is tried again after ``again``,
    doubled each time up to ``again_max``; a lost GPU after ``lost``, up to ``lost_max``. A call that takes longer than
    ``hang`` hangs. A library that doesn't fit the driver is lived with for ``grace``.
    """

    poll: float = 5.0
    wait: float = 2.0
    leave: float = 0.25
    again: float = 0.5
    again_max: float = 30.0
    lost: float = 5.0
    lost_max: float = 600.0
    hang: float = 10.0
    grace: float = 600.0


@dataclass(frozen=True, slots=True)
class _Scan:
    """What one look found, begun at ``at``, of all GPUs but those ``let`` go of.

    ``reloaded``: the driver was loaded anew since the look before, and NVML was closed then (None: it wasn't).
    """

    at: float
    gpus: tuple[GPU, ...]
    looks: Mapping[str, Look]
    let: frozenset[str]
    driver: str
    control_nodes: tuple[str, ...]
    reloaded: float | None


@dataclass(frozen=True, slots=True)
class _Down:
    """NVML can't be used now."""

    error: NvmlError
    at: float


@dataclass(frozen=True, slots=True)
class _Happened:
    """An error came, at that moment (monotonic seconds)."""

    event: Event
    at: float


_News = _Scan | _Down | _Happened | Exception
"""What the threads hand over; an exception is a defect."""


@dataclass(frozen=True, slots=True)
class _Let:
    """Which GPUs mustn't be touched: these, or (``all``) NVML as a whole."""

    uuids: frozenset[str] = frozenset()
    all: bool = False


class NvidiaBackend:
    """A ``Backend`` over NVML.

    A GPU that fails keeps what is known of it, with its trouble, and takes no other along. While NVML can't be used, what was
    seen last stays: ill where the driver isn't loaded, because then nothing can be; as it was where there is no evidence of
    that (a library that is of another release than the driver, say). While any GPU is released, new ones aren't found.

    A call that hangs makes only its GPU ill; errors of the others still come in, and the watch still ends. Its thread can't be
    ended: it goes when the call returns, or with the process.

    Args:
        policy: whether a first failure is final, and what the operator says of health; ``judge_by`` changes the latter.
        library: NVML's name, or the path of it.
        sys: where the kernel's ``/sys`` is seen.
        proc: where its ``/proc`` is seen.
        dev: where the host's ``/dev`` is seen.
        pace: how often, and how long.
    """

    name = "nvidia"

    def __init__(
        self,
        policy: Policy,
        *,
        library: str = "libnvidia-ml.so.1",
        sys: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
        pace: Pace = Pace(),
    ) -> None:
        self._policy, self._pace = policy, pace
        self._checks = _checks(policy)
        self._node = _Node(sys, proc, dev)
        self._library = library
        self._health = Health()
        self._scan: _Scan | None = None
        self._down: _Down | None = None
        self._defect: Exception | None = None
        self._stuck = ""
        self._mismatch_since: float | None = None
        self._let = _Let()
        self._news = asyncio.Event()
        self._looker: _Looker | None = None
        self._logged: dict[tuple[str, int | None], float] = {}

    async def watch(self) -> AsyncGenerator[Sight]:
        """Yield what is there, and again after each change.

        Raises:
            GiveUpError: status 1, the first attempt failed and ``fail_on_init_error`` says that this is final; status 75,
                the library has not fitted the driver for ``Pace.grace``, and only a new container can have another.
        """
        looker = self._looker = _Looker(Nvml(self._library), self._node, self._pace, self._let)
        looker.start(asyncio.get_running_loop(), lambda news: self._take(looker, news))
        last: Sight | None = None
        try:
            while True:
                now = time.monotonic()
                self._health = health.rested(self._health, now, self._policy.health_recovery)
                self._mind(looker, now)
                sight = self._sight()
                if sight is not None and sight != last:
                    last = sight
                    yield sight
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._patience(time.monotonic())):
                        await self._news.wait()
                self._news.clear()
        finally:
            self._looker = None
            await looker.end()

    async def release(self, uuids: Collection[str]) -> None:
        """Close NVML, and open it again without touching these GPUs (none means all, and then it stays closed).

        Raises:
            TimeoutError: NVML hangs, and so still holds them.
        """
        self._let = _Let(self._let.uuids | frozenset(uuids), all=self._let.all or not uuids)
        await self._renew()

    async def acquire(self, uuids: Collection[str]) -> None:
        """Look at these GPUs again (none means all), and believe that they are well but for what that shows.

        Raises:
            TimeoutError: NVML hangs.
        """
        self._health = health.vouched(self._health, uuids)
        self._let = _Let(self._released() - frozenset(uuids) if uuids else frozenset())
        await self._renew()

    def judge_by(self, policy: Policy) -> None:
        """Judge health as the operator says it now. Must not block, and never raises."""
        self._policy, self._checks = policy, _checks(policy)
        self._health = health.rejudged(self._health, self._checks)
        self._news.set()
        if self._looker is not None:
            self._looker.look()

    async def _renew(self) -> None:
        self._news.set()
        if self._looker is not None:
            await self._looker.renew(self._let)

    def _take(self, looker: _Looker, news: _News) -> None:
        """Take in what a thread hands over (on the loop)."""
        if looker is not self._looker:
            return
        match news:
            case _Happened():
                self._tell(news)
                self._health = health.event(self._health, news.event, self._checks, news.at)
            case _Scan():
                if self._down is not None or self._scan is None:
                    _log.info("NVML answers", driver=news.driver, gpus=len(news.looks))
                self._scan, self._down, self._mismatch_since = news, None, None
                self._health = health.looked(
                    self._health,
                    news.looks,
                    self._checks,
                    self._policy.health_recovery,
                    now=news.at,
                    reloaded=news.reloaded,
                    released=news.let,
                )
            case _Down():
                if self._down is None or str(self._down.error) != str(news.error):
                    _log.error(
                        "NVML can't be used",
                        reason=str(news.error),
                        gpus="as they were seen last" if self._scan is not None else "none yet",
                    )
                self._down = news
                if not isinstance(news.error, MismatchError):
                    self._mismatch_since = None
                elif self._mismatch_since is None:
                    self._mismatch_since = news.at
            case Exception():
                self._defect = news
        self._news.set()

    def _tell(self, news: _Happened) -> None:
        """Log an error, but not each of a storm."""
        key = news.event.uuid, news.event.xid
        if news.at < self._logged.get(key, -_LOGGED_AGAIN_S) + _LOGGED_AGAIN_S:
            return
        if len(self._logged) >= 1024:
            self._logged.clear()
        self._logged[key] = news.at
        if news.event.xid is None:
            _log.warning("double bit ECC error", gpu=news.event.uuid)
            return
        trouble = health.judged(news.event.xid, self._checks)
        tell = _log.info if trouble.kind is Kind.APPLICATION else _log.warning
        tell(
            "Xid",
            gpu=news.event.uuid,
            reason=trouble.reason,
            kind=trouble.kind.value,
            gpu_instance=news.event.gpu_instance,
            compute_instance=news.event.compute_instance,
        )

    def _mind(self, looker: _Looker, now: float) -> None:
        """Notice what only time tells: a call that hangs, a first attempt or a grace that is over.

        Raises:
            GiveUpError: see ``watch``.
        """
        if self._defect is not None:
            raise self._defect
        stuck = looker.stuck(now)
        if stuck and stuck != self._stuck:
            _log.error("NVML doesn't answer", call=stuck, seconds=self._pace.hang)
        elif self._stuck and not stuck:
            _log.info("NVML answers again")
        self._stuck = stuck
        if self._down is None:
            return
        if self._scan is None and self._policy.fail_on_init_error:
            raise GiveUpError(
                f"expected NVML to work, got {self._down.error}: see that the driver is installed and loaded and its "
                "library visible here, or let this be tried again (FAIL_ON_INIT_ERROR=false)"
            )
        if self._mismatch_since is not None and now >= self._mismatch_since + self._pace.grace:
            raise GiveUpError(
                f"the driver was upgraded beneath this container, whose libraries are of the release before "
                f"({self._down.error}): restart it, so that it gets the new ones",
                status=75,
            )

    def _patience(self, now: float) -> float:
        """How long nothing changes by itself, in seconds."""
        due = [now + self._pace.hang]
        if (rests := health.rests_at(self._health, self._policy.health_recovery)) is not None:
            due.append(rests)
        if self._mismatch_since is not None:
            due.append(self._mismatch_since + self._pace.grace)
        return max(min(due) - now, 0.0)

    def _released(self) -> frozenset[str]:
        every = self._scan.gpus if self._let.all and self._scan is not None else ()
        return self._let.uuids | {gpu.board for gpu in every}

    def _sight(self) -> Sight | None:
        """Put together what is there and what is wrong with it; None: nothing was seen yet."""
        scan = self._scan
        if scan is None:
            return None
        let = self._released()
        released = frozenset(gpu.uuid for gpu in scan.gpus if gpu.board in let) | let
        return Sight(
            gpus=tuple(replace(gpu, trouble=self._trouble(gpu)) for gpu in scan.gpus),
            recovered=self._health.recovered,
            released=released,
            control_nodes=scan.control_nodes,
            driver=scan.driver,
        )

    def _trouble(self, gpu: GPU) -> Trouble | None:
        trouble = self._health.trouble(*{gpu.uuid, gpu.board})
        if trouble is not None and trouble.kind is not Kind.APPLICATION:
            return trouble
        if self._down is not None:
            if isinstance(self._down.error, NotLoadedError):
                return Trouble(f"the driver isn't loaded: {self._down.error}", Kind.RESTART_APP)
            return Trouble(f"NVML can't be asked: {self._down.error}", Kind.APPLICATION)
        if self._stuck and gpu.board == self._stuck:
            return Trouble(f"NVML hasn't answered about it for {self._pace.hang:.0f} s", Kind.RESTART_APP)
        return trouble


@dataclass(frozen=True, slots=True)
class _Node:
    """What the kernel tells besides NVML."""

    sys: Path
    proc: Path
    dev: Path

    def numa_node(self, pci: str) -> int | None:
        text = _read(self.sys / "bus/pci/devices" / pci / "numa_node", 64).strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None

    def control_nodes(self) -> tuple[str, ...]:
        return tuple(f"/dev/{name}" for name in _CONTROL if (self.dev / name).exists())

    def load(self) -> int | None:
        """What is another with each load of the driver: sysfs makes its folder anew; None where it can't be told."""
        try:
            return (self.sys / "module/nvidia").stat().st_ino
        except OSError:
            return None

    def plugged(self) -> frozenset[str]:
        """The GPUs that the driver has, as its folders in /proc."""
        try:
            return frozenset(entry.name for entry in (self.proc / "driver/nvidia/gpus").iterdir())
        except OSError:
            return frozenset()

    def capabilities(self) -> Mapping[str, int]:
        """The minors of MIG's capability nodes, by ``gpu0/gi1/access`` and ``gpu0/gi1/ci0/access`` (MIG user guide)."""
        found: dict[str, int] = {}
        for line in _read(self.proc / "driver/nvidia-caps/mig-minors", 1 << 20).splitlines():
            path, _, minor = line.partition(" ")
            if minor.isascii() and minor.isdigit() and len(minor) < 8:
                found[path] = int(minor)
        return found

    def capability(self, path: str) -> int | None:
        """The same of one, where there is no such table; ``path`` is as there."""
        gpu, _, rest = path.partition("/")
        for line in _read(self.proc / "driver/nvidia/capabilities" / gpu / "mig" / rest, 4096).splitlines():
            name, _, minor = line.partition(":")
            minor = minor.strip()
            if name == "DeviceFileMinor" and minor.isascii() and minor.isdigit() and len(minor) < 8:
                return int(minor)
        return None


@dataclass(slots=True)
class _Session:
    """What is known while NVML is open. ``again``: something in it can only come right when it is opened anew."""

    listener: threading.Thread | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    plugged: frozenset[str] = frozenset()
    boards: dict[str, Board] = field(default_factory=dict)
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    heard: frozenset[str] = frozenset()
    again: bool = False
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class _Command:
    """An order to the looking thread: end, let go (and say when it is done), open anew what is ``broken``, or just look."""

    end: bool = False
    let: _Let | None = None
    broken: threading.Event | None = None
    reason: str = ""
    done: Callable[[bool], None] | None = None


class _Looker:
    """The two threads. ``start``, ``renew``, ``end`` and ``stuck`` are for the loop; the rest runs in the looking thread."""

    def __init__(self, nvml: Nvml, node: _Node, pace: Pace, let: _Let) -> None:
        self._nvml, self._node, self._pace, self._let = nvml, node, pace, let
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._session: _Session | None = None
        self._old: threading.Thread | None = None
        self._busy: tuple[float, str] | None = None
        self._waiting: float | None = None
        self._known: dict[str, tuple[GPU, ...]] = {}
        self._load: int | None = None
        self._unloaded = False
        self._closed = 0.0
        self._reloaded: float | None = None
        self._posted: object = None
        self._pause, self._lost_pause = pace.again, pace.lost
        self._lost_at = 0.0
        self._told: dict[tuple[str, str], str] = {}
        self._capabilities: Mapping[str, int] = {}

    def start(self, loop: asyncio.AbstractEventLoop, take: Callable[[_News], None]) -> None:
        self._loop, self._take = loop, take
        self._ended: asyncio.Future[bool] = loop.create_future()
        threading.Thread(target=self._run, name="nvml-look", daemon=True).start()

    def look(self) -> None:
        self._commands.put(_Command())

    async def renew(self, let: _Let) -> None:
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._commands.put(
            _Command(let=let, done=lambda closed: self._post(functools.partial(_resolve, done, value=closed)))
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pace.wait + 2 * self._pace.hang):
                if await done:
                    return
        raise TimeoutError("expected NVML to be closed, but a call of it hangs: see to the GPU that it hangs on")

    async def end(self) -> None:
        """Have both threads let go of all they hold, and end. What takes longer than ``Pace.leave`` happens behind us."""
        self._commands.put(_Command(end=True))
        await asyncio.wait({self._ended}, timeout=self._pace.leave)

    def stuck(self, now: float) -> str:
        """The UUID of the GPU, or the name of the step, at which a call hangs; '' where none does."""
        busy, waiting = self._busy, self._waiting
        if busy is not None and now >= busy[0] + self._pace.hang:
            return busy[1]
        late = waiting is not None and now >= waiting + self._pace.wait + self._pace.hang
        return "nvmlEventSetWait" if late else ""

    def _post(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(call, *args)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 (the loop raises it)
            self._post(self._take, error)
        finally:
            self._close()
            self._post(functools.partial(_resolve, self._ended, value=True))

    def _serve(self) -> None:
        due, last = time.monotonic(), 0.0
        while True:
            command = self._next(due - time.monotonic())
            if command is not None:
                if command.end:
                    break
                if command.let is not None:
                    self._let, self._posted = command.let, None
                    closed = self._close()
                    if command.done is not None:
                        command.done(closed)
                elif command.broken is not None:
                    if self._session is None or self._session.stop is not command.broken:
                        continue
                    self._tell_once("any", "NVML doesn't wait for errors any more, and is opened anew", command.reason)
                    young = time.monotonic() < self._session.began + self._pace.again_max
                    self._close()
                    self._posted = None
                    due = time.monotonic() + (self._rest() if young else 0.0)
                    continue
                else:
                    self._posted = None
                    due = min(due, max(time.monotonic(), last + _SPACING_S))
                    if due > time.monotonic():
                        continue
            last = time.monotonic()
            due = last + self._turn()

    def _next(self, seconds: float) -> _Command | None:
        try:
            return self._commands.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None

    def _turn(self) -> float:
        """Look once, and say how long to wait until the next look."""
        if self._let.all:
            return self._pace.poll
        try:
            scan = self._look()
        except NvmlError as error:
            self._busy = None
            self._down(error)
            return self._rest()
        self._busy = None
        key = replace(scan, at=0.0, looks={uuid: replace(look, at=0.0) for uuid, look in scan.looks.items()})
        if key != self._posted:
            self._posted = key
            self._post(self._take, scan)
        self._reloaded = None
        if self._session is not None and time.monotonic() > self._session.began + self._pace.again_max:
            self._pause = self._pace.again
        return self._pace.poll

    def _rest(self) -> float:
        """How long to leave NVML alone after it failed, in seconds: longer each time."""
        pause, self._pause = self._pause, min(2 * self._pause, self._pace.again_max)
        return pause

    def _down(self, error: NvmlError) -> None:
        closed = self._close()
        self._unloaded = self._unloaded or isinstance(error, NotLoadedError)
        if closed and isinstance(error, MismatchError):
            self._nvml.unload()
        self._posted = None
        self._post(self._take, _Down(error, time.monotonic()))

    def _close(self) -> bool:
        """Close NVML; False where a call that hangs doesn't let us."""
        session, self._session = self._session, None
        if session is not None:
            self._closed = time.monotonic()
        if session is not None and session.listener is not None:
            session.stop.set()
            self._old = session.listener
        if self._old is not None:
            self._old.join(self._pace.wait + self._pace.hang)
            if self._old.is_alive():
                return False
            self._old = None
        self._busy = time.monotonic(), "nvmlShutdown"
        self._nvml.close()
        self._busy = None
        return True

    def _open(self) -> _Session:
        """Open NVML and listen to all GPUs that may be touched."""
        if self._old is not None and not self._close():
            raise SessionError("nvmlEventSetWait: a call hangs, and must end before NVML can be opened again")
        self._busy = time.monotonic(), "nvmlInit"
        load, plugged = self._node.load(), self._node.plugged()
        self._nvml.open()
        session = self._session = _Session(plugged=plugged, began=time.monotonic())
        if self._unloaded or (None not in {load, self._load} and load != self._load):
            self._reloaded = self._closed
        self._load, self._unloaded = load if load is not None else self._load, False
        heard, told = set(), False
        for uuid in self._seats().values():
            if isinstance(uuid, NvmlError):
                continue
            self._busy = time.monotonic(), uuid
            try:
                self._nvml.listen(uuid)
                told = True
                heard.add(uuid)
            except UnsupportedError as error:
                heard.add(uuid)
                self._tell_once(uuid, "no errors of this GPU are told", error)
            except SessionError:
                raise
            except NvmlError:
                continue
        session.heard = frozenset(heard)
        if told:
            session.listener = threading.Thread(
                target=self._listen, args=(session.stop,), name="nvml-wait", daemon=True
            )
            session.listener.start()
        return session

    def _listen(self, stop: threading.Event) -> None:
        """Hand on errors, until told to stop (the listening thread)."""
        while not stop.is_set():
            began = self._waiting = time.monotonic()
            try:
                event = self._nvml.wait(int(self._pace.wait * 1000))
            except NvmlError as error:
                self._commands.put(_Command(broken=stop, reason=str(error)))
                return
            finally:
                self._waiting = None
            if event is not None:
                self._post(self._take, _Happened(event, time.monotonic()))
                self._commands.put(_Command())
                stop.wait(0.001)  # so that a storm of them leaves room for others
            elif time.monotonic() < began + self._pace.wait / 2:
                stop.wait(0.05)

    def _seats(self) -> dict[int, str | NvmlError]:
        """The UUIDs of all GPUs by index, or why one can't be told; where some mustn't be touched, of others that are known."""
        seats: dict[int, str | NvmlError] = {}
        there = {gpu.index: gpu for gpu, *_ in self._known.values()}
        self._busy = time.monotonic(), "nvmlDeviceGetCount"
        for index in sorted(there) if self._let.uuids else range(self._nvml.count()):
            gpu = there.get(index)
            if gpu is not None and gpu.uuid in self._let.uuids:
                continue
            self._busy = time.monotonic(), f"GPU {index}" if gpu is None else gpu.uuid
            try:
                seats[index] = (
                    self._nvml.at_address(gpu.pci) if gpu is not None and self._let.uuids else self._nvml.at(index)
                )
            except SessionError:
                raise
            except NvmlError as error:
                seats[index] = error
        return seats

    def _look(self) -> _Scan:
        now = time.monotonic()
        session = self._session
        if session is not None and (
            self._node.plugged() != session.plugged or (session.again and now >= self._lost_at)
        ):
            self._lost_pause = min(2 * self._lost_pause, self._pace.lost_max) if session.again else self._pace.lost
            self._close()
            session = None
        session = session or self._open()
        at = time.monotonic()
        seats = self._seats()
        found: dict[str, tuple[int, NvmlError | None]] = {
            uuid: (index, None) for index, uuid in seats.items() if not isinstance(uuid, NvmlError)
        }
        for index, error in seats.items():
            if isinstance(error, NvmlError) and (uuid := self._whose(index, found)):
                found[uuid] = (index, error)
            elif isinstance(error, NvmlError):
                self._tell_once(f"index {index}", _UNSEEN, error)
        known: dict[str, tuple[GPU, ...]] = {}
        looks: dict[str, Look] = {}
        for uuid, (index, unseen) in sorted(found.items(), key=lambda item: item[1][0]):
            self._busy = time.monotonic(), uuid
            try:
                if unseen is not None:
                    raise unseen
                known[uuid], looks[uuid] = self._look_at(session, uuid, index, at)
                self._told.pop((uuid, _UNSEEN), None)
            except SessionError:
                raise
            except NvmlError as failure:
                self._tell_once(uuid, _UNSEEN, failure)
                if uuid in self._known:  # else there is nothing to show
                    known[uuid] = self._known[uuid]
                    looks[uuid] = Look(at, *_failed(failure))
        self._link(session)
        known = {u: (replace(g, links=session.links.get(u, g.links)), *rest) for u, (g, *rest) in known.items()}
        self._known = {uuid: gpus for uuid, gpus in self._known.items() if uuid in self._let.uuids} | known
        lost = any(look.lost for look in looks.values()) or not session.heard >= set(seats.values())
        if lost and not session.again:
            self._lost_at = now + self._lost_pause
        elif not lost:
            self._lost_pause = self._pace.lost
        session.again = lost
        order = sorted(self._known.values(), key=lambda gpus: gpus[0].index)
        return _Scan(
            at=at,
            gpus=tuple(gpu for gpus in order for gpu in gpus),
            looks=looks,
            let=self._let.uuids,
            driver=self._nvml.driver(),
            control_nodes=self._node.control_nodes(),
            reloaded=self._reloaded,
        )

    def _whose(self, index: int, found: Collection[str]) -> str:
        """Which GPU it is that can't say so itself: the one that was there before, or the only one missing."""
        missing = [uuid for uuid in self._known if uuid not in found and uuid not in self._let.uuids]
        there = [uuid for uuid in missing if self._known[uuid][0].index == index]
        return there[0] if there else missing[0] if len(missing) == 1 else ""

    def _look_at(self, session: _Session, uuid: str, index: int, at: float) -> tuple[tuple[GPU, ...], Look]:
        board = session.boards.get(uuid)
        if board is None:
            board = self._nvml.board(uuid)
            session.boards[uuid] = board
        vitals = self._nvml.vitals(uuid)
        instances = self._nvml.instances(uuid) if vitals.mig else ()
        gpu = GPU(
            uuid=uuid,
            index=index,
            minor=board.minor,
            numa_node=self._node.numa_node(board.pci),
            links=session.links.get(uuid, ()),
            spec_nodes=(f"/dev/nvidia{board.minor}",),
            resource=_RESOURCE,
            partitioned=vitals.mig,
            product=board.product,
            pci=board.pci,
        )
        look = Look(
            at=at,
            partitions={(one.gpu_instance, one.compute_instance): one.uuid for one in instances},
            remap_pending=vitals.remap_pending,
            remap_failed=vitals.remap_failed,
            action=vitals.action,
        )
        return (gpu, *(self._partition(gpu, one) for one in instances)), look

    def _partition(self, gpu: GPU, instance: Instance) -> GPU:
        caps = (
            f"gpu{gpu.minor}/gi{instance.gpu_instance}/access",
            f"gpu{gpu.minor}/gi{instance.gpu_instance}/ci{instance.compute_instance}/access",
        )
        if not self._capabilities.keys() >= set(caps):
            self._capabilities = self._node.capabilities()
        minors = [self._capabilities[cap] if cap in self._capabilities else self._node.capability(cap) for cap in caps]
        if None in minors:
            self._tell_once(instance.uuid, "a MIG instance has no capability nodes", f"none of {caps[0]} or {caps[1]}")
        return replace(
            gpu,
            uuid=instance.uuid,
            parent=gpu.uuid,
            profile=instance.profile,
            place=f"{gpu.index}:{instance.place}",
            partitioned=False,
            links=(),
            spec_nodes=(*gpu.spec_nodes, *(f"/dev/nvidia-caps/nvidia-cap{one}" for one in minors if one is not None)),
        )

    def _link(self, session: _Session) -> None:
        """Find how GPUs reach each other, once for each set of them."""
        uuids = list(session.boards)
        if session.links.keys() == set(uuids):
            return
        lanes: dict[str, Mapping[str, int]] = {}
        for uuid in uuids:
            self._busy = time.monotonic(), uuid
            try:
                lanes[uuid] = self._nvml.lanes(uuid)
            except SessionError:
                raise
            except NvmlError:
                lanes[uuid] = {}
        links: dict[str, list[Link]] = {uuid: [] for uuid in uuids}
        for place, uuid in enumerate(uuids):
            for other in uuids[place + 1 :]:
                if (way := self._way(session, lanes, uuid, other)) is not None:
                    links[uuid].append(Link(other, *way))
                    links[other].append(Link(uuid, *way))
        session.links = {uuid: tuple(found) for uuid, found in links.items()}

    def _way(
        self, session: _Session, lanes: Mapping[str, Mapping[str, int]], uuid: str, other: str
    ) -> tuple[Way, int] | None:
        """By NVLinks from one to the other, directly or over switches, which reach every GPU on them; else over PCIe."""
        direct = lanes[uuid].get(session.boards[other].pci, 0)
        switched = min(lanes[uuid].get("", 0), lanes[other].get("", 0))
        if direct or switched:
            return Way.NVLINK, direct + switched
        self._busy = time.monotonic(), uuid
        try:
            way = self._nvml.way(uuid, other)
        except SessionError:
            raise
        except NvmlError:
            return None
        return None if way is None else (way, 1)

    def _tell_once(self, what: str, event: str, reason: object) -> None:
        """Log what is wrong with a GPU, once for each reason."""
        if self._told.get((what, event)) != str(reason):
            if len(self._told) >= 1024:
                self._told.clear()
            self._told[what, event] = str(reason)
            _log.warning(event, gpu=what, reason=str(reason))


def _failed(error: NvmlError) -> tuple[Trouble, bool]:
    """What a failed look says of a GPU, and whether it is lost."""
    if isinstance(error, LostError):
        return Trouble(f"it doesn't answer any more: {error}", Kind.RESET_REQUIRED), True
    return Trouble(f"it can't be looked at: {error}", Kind.RESTART_APP), False


def _checks(policy: Policy) -> Checks:
    checks = Checks.of(policy.disabled_health_checks, policy.enabled_health_checks)
    if checks.malformed:
        _log.warning("health checks that are no Xid are ignored", words=", ".join(checks.malformed[:8]))
    return checks


def _resolve(future: asyncio.Future[bool], *, value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _read(path: Path, most: int) -> str:
    """Read a small file; '' where there is none, or it isn't text."""
    try:
        with path.open("rb") as file:
            return file.read(most).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
