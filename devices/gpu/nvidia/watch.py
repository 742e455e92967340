"""The two threads that call NVML, which blocks, and sometimes hangs; and what the kernel tells besides it.

One thread opens NVML, looks at all GPUs every few seconds, and closes it; the other waits for errors, which count at once. Both
hand plain values to the event loop; neither holds up the other, the loop, or its end. An *open* NVML fixes what it knows (its
GPUs, their handles, whom it listens to), so whatever changes that (a driver loaded anew, a GPU plugged in, reset, released) is
met by closing and opening it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from devices.gpu.model import GPU, Link, Way
from devices.gpu.nvidia.health import Event, Look
from devices.gpu.nvidia.nvml import (
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

_RESOURCE: Final = "nvidia.com/gpu"
_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_AFTER_S: Final = 0.05
"""Between an error and the look that it asks for, in seconds: the error itself is told first."""
_SPACING_S: Final = 0.5
"""Between two looks, in seconds, however many errors ask for one."""
_MOST_LEFT: Final = 256
"""Errors that are still handed on when NVML is to be closed: a storm must not keep it open."""
_DISPLAYS: Final = frozenset({"DGX Display", "NVIDIA DGX Display"})
"""The products that are there for a screen alone, and aren't offered: those that NVIDIA's plugin skips (New, pkg/nvlib/device of
NVIDIA/go-nvlib)."""
_UNSEEN: Final = "a GPU can't be looked at"

_log = structlog.get_logger()


class Pace(Struct, frozen=True):
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


class Scan(Struct, frozen=True):
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


class Down(Struct, frozen=True):
    """NVML can't be used now."""

    error: NvmlError
    at: float


class Happened(Struct, frozen=True):
    """An error came, at that moment (monotonic seconds)."""

    event: Event
    at: float


News = Scan | Down | Happened | Exception
"""What the threads hand over; an exception is a defect."""


class Let(Struct, frozen=True):
    """Which GPUs mustn't be touched: these, or (``all``) NVML as a whole."""

    uuids: frozenset[str] = frozenset()
    all: bool = False


class Node(Struct, frozen=True):
    """What the kernel tells besides NVML."""

    sys: Path
    proc: Path
    dev: Path

    def numa_node(self, pci: str) -> int | None:
        """The NUMA node that a PCI device is near; None where the kernel knows none."""
        text = _read(self.sys / "bus/pci/devices" / pci / "numa_node", 64).strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None

    def control_nodes(self) -> tuple[str, ...]:
        """The device nodes that every GPU of NVIDIA needs, as far as they are there."""
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


class _Session(Struct):
    """What is known while NVML is open. ``again``: something in it can only come right when it is opened anew."""

    listener: threading.Thread | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    plugged: frozenset[str] = frozenset()
    boards: dict[str, Board] = field(default_factory=dict)
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    heard: frozenset[str] = frozenset()
    again: bool = False
    began: float = 0.0


class _Command(Struct, frozen=True):
    """An order to the looking thread: end, let go (and say when it is done), open anew what is ``broken``, or just look."""

    end: bool = False
    let: Let | None = None
    broken: threading.Event | None = None
    reason: str = ""
    done: Callable[[bool], None] | None = None


class Looker:
    """The two threads. ``start``, ``renew``, ``end`` and ``stuck`` are for the loop; the rest runs in the looking thread."""

    def __init__(self, nvml: Nvml, node: Node, pace: Pace, let: Let) -> None:
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

    def start(self, loop: asyncio.AbstractEventLoop, take: Callable[[News], None]) -> None:
        """Begin; ``take`` is called on ``loop`` with each piece of news."""
        self._loop, self._take = loop, take
        self._ended: asyncio.Future[bool] = loop.create_future()
        threading.Thread(target=self._run, name="nvml-look", daemon=True).start()

    def look(self) -> None:
        """Have a look taken soon."""
        self._commands.put(_Command())

    async def renew(self, let: Let) -> None:
        """Close NVML, and open it again without touching what was ``let`` go of.

        Raises:
            TimeoutError: NVML hangs.
        """
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
                    due = min(due, max(time.monotonic() + _AFTER_S, last + _SPACING_S))
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
        self._post(self._take, Down(error, time.monotonic()))

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
        """Hand on errors, until told to stop, and then those that have come by that time (the listening thread)."""
        left = _MOST_LEFT
        while left:
            stopping = stop.is_set()
            left -= stopping
            began = self._waiting = time.monotonic()
            try:
                event = self._nvml.wait(0 if stopping else int(self._pace.wait * 1000))
            except NvmlError as error:
                self._commands.put(_Command(broken=stop, reason=str(error)))
                return
            finally:
                self._waiting = None
            if event is not None:
                self._post(self._take, Happened(event, time.monotonic()))
                self._commands.put(_Command())
                stop.wait(0.001)  # so that a storm of them leaves room for others
            elif stopping:
                return
            elif time.monotonic() < began + self._pace.wait / 2:
                stop.wait(0.05)

    def _seats(self) -> dict[int, str | NvmlError]:
        """The UUIDs of all GPUs but displays by index, or why one can't be told; where some mustn't be touched, of known ones."""
        seats: dict[int, str | NvmlError] = {}
        there = {gpu.index: gpu for gpu, *_ in self._known.values()}
        self._busy = time.monotonic(), "nvmlDeviceGetCount"
        for index in sorted(there) if self._let.uuids else range(self._nvml.count()):
            gpu = there.get(index)
            if gpu is not None and gpu.uuid in self._let.uuids:
                continue
            self._busy = time.monotonic(), f"GPU {index}" if gpu is None else gpu.uuid
            try:
                uuid = self._nvml.at_address(gpu.pci) if gpu is not None and self._let.uuids else self._nvml.at(index)
                if not self._is_display(uuid):
                    seats[index] = uuid
            except SessionError:
                raise
            except NvmlError as error:
                seats[index] = error
        return seats

    def _is_display(self, uuid: str) -> bool:
        if uuid in self._known:
            return False
        product = self._nvml.product(uuid)
        if product not in _DISPLAYS:
            return False
        self._tell_once(uuid, "a GPU is not offered", f"it is for a display alone: {product}")
        return True

    def _look(self) -> Scan:
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
        known = {u: (replace(g, links=self._links(session, g, known)), *rest) for u, (g, *rest) in known.items()}
        self._known = {uuid: gpus for uuid, gpus in self._known.items() if uuid in self._let.uuids} | known
        lost = any(look.lost for look in looks.values()) or not session.heard >= set(seats.values())
        if lost and not session.again:
            self._lost_at = now + self._lost_pause
        elif not lost:
            self._lost_pause = self._pace.lost
        session.again = lost
        order = sorted(self._known.values(), key=lambda gpus: gpus[0].index)
        return Scan(
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
        lacks = ""
        if None in minors:
            lacks = (
                f"it has no capability device nodes ({caps[0]} and {caps[1]}), without which no container can use it: see that "
                "the driver's nvidia-caps is there (/proc/driver/nvidia-caps/mig-minors)"
            )
            self._tell_once(instance.uuid, "a MIG instance is not offered", lacks)
        return replace(
            gpu,
            uuid=instance.uuid,
            parent=gpu.uuid,
            profile=instance.profile,
            place=f"{gpu.index}:{instance.place}",
            partitioned=False,
            lacks=lacks,
            links=(),
            spec_nodes=(*gpu.spec_nodes, *(f"/dev/nvidia-caps/nvidia-cap{one}" for one in minors if one is not None)),
        )

    def _links(self, session: _Session, gpu: GPU, known: Collection[str]) -> tuple[Link, ...]:
        """Say how a GPU reaches those that are shown, in their order: also one that this session hasn't seen yet, as it was."""
        before = self._known.get(gpu.uuid, (gpu,))[0].links
        kept = {link.peer: link for link in before if link.peer not in session.links}
        links = kept | {link.peer: link for link in session.links.get(gpu.uuid, gpu.links)}
        return tuple(links[peer] for peer in known if peer in links)

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
