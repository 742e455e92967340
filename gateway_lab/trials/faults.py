"""Every fault that a node is made to go through, each written once: what it does, and how soon the node is right again.

A fault is struck on a ``Ground``: a node with a real gateway and kubelets, and what is wrong with it at present. It lasts
as long as its context manager; faults may be struck while others last. The runners (tests, ``gateway_lab.trials.gauntlet``)
decide which, and judge by ``Ground.right``: the kubelet's own records show what the hardware is, a pod gets a device of it,
nobody lost one or shares one, and the state file is on disk. All that in the same gateway process, but where a fault is that
process's own end.

A bound is what the gateway promises on a machine that is idle; ``allowed`` is what a busy one gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gateway.handover import HANGS, LIVES
from gateway.kubelet.identity import KUBELET_SOCKET
from gateway.wires.unix import listens
from gateway_lab.bench.footprint import footprint
from gateway_lab.gatewayproc import BEGUN, LINES, GatewayError, GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Faults, Kubelet, KubeletError
from gateway_lab.matrix.witness import logs
from gateway_lab.namespaces import Namespaces, NamespacesError
from gateway_lab.trials.invariants import given_twice, holdings
from gateway_lab.trials.scenarios import PATIENCE, RESOURCE, BrokenPromiseError, Node, device_ids, must, node
from gateway_lab.waiting import until

GPUS = 8
RESTART, COLD_START = 0.1, 1.0
"""Seconds: a registration with a kubelet that is there; a gateway's start until it serves."""
SLACK, SLOWER, SLOWEST = 5.0, 10.0, 15.0
"""A busy machine gets so many times a bound, which is at most so many seconds more than it, and some seconds on top: there
a Python process alone may take ten seconds to start."""
LINGER_SECONDS = 1.3
"""How long after a recovery the node is looked at again: longer than the gateway's own last look into the records."""
PLENTY = 10_000
"""What a limit of namespaces of its own is when it is none."""
STATE_BYTES = "2m"
"""How large the disk of a state directory is."""
FAILURES = (BrokenPromiseError, GatewayError, KubeletError, NamespacesError, TimeoutError)
"""What a promise that is broken raises, or a process that doesn't do what it was told."""
CHECKPOINT = "kubelet_internal_checkpoint"
FAR_SECONDS = 10 * 365 * 86400
"""How far the wall clock jumps."""
STORM, STORM_SECONDS = 20, 10.0
DIES_SECONDS = 1.0
"""So soon after it goes on, a gateway that was stopped for long has ended itself."""
PENDING_UPDATES, PENDING_MIB = 100, 8.0
"""So many lists that nobody reads may cost the gateway so much more memory. (Sent out, they would be twice that.)"""


def allowed(bound: float) -> float:
    """How many seconds a recovery may take on a busy machine."""
    return min(SLOWER * bound, bound + SLOWEST) + SLACK


# The ground.


@dataclass(slots=True)
class Ground:
    """A node, and what is wrong with it now. Make one with ``ground``."""

    node: Node
    namespaces: Namespaces | None
    no_namespaces: str
    """Why there is none; '' where there is one."""
    ids: Sequence[str]
    """The device IDs, by index."""
    version: str
    """Which kubelet is started next."""
    lies: Faults = field(default_factory=Faults)
    """What an emulated kubelet does wrong now."""
    silent: bool = False
    """Whether the kubelet is stopped, so that it can't be asked."""
    writable: bool = True
    """Whether the ledger can be written."""
    ill: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    reset: set[int] = field(default_factory=set)
    """The devices that were ill at any time."""
    rivals: list[Kubelet] = field(default_factory=list)
    """Kubelets that run beside the node's own."""
    _probes: int = 0

    @property
    def clock(self) -> Path:
        """The file that says by how many seconds the gateway's wall clock is off."""
        return self.node.root / "clock"

    @property
    def state_dir(self) -> Path:
        """The gateway's state directory, as this process reaches it."""
        path = self.node.root / "state"
        return path if self.namespaces is None else self.namespaces.inside(path)

    @property
    def answering(self) -> Kubelet | None:
        """The kubelet, where there is one that can be asked."""
        kubelet = self.node.kubelet
        return None if kubelet is None or self.silent or not kubelet.alive else kubelet

    # What happens to it.

    async def start_gateway(self) -> GatewayProcess:
        """Start a gateway: the real one, with a witness inside, in the node's namespaces."""
        made = self.node
        if made.behind:
            await made.start_bridged()
        profile_path, options = None if made.behind else made.profile_path, (*made.options, *made.bridging)
        command = gateway_command(made.socket_dir, made.root / "state", profile_path, made.api, options)
        inside = (sys.executable, "-m", "gateway_lab.trials.insider", str(self.clock), *command[3:])
        process = await GatewayProcess.launch([*(self.namespaces.prefix if self.namespaces else ()), *inside])
        ended = [one for one in made.gateways if one.told_to_end and not one.alive]
        made.gateways[:] = [*(one for one in made.gateways if one not in ended[:-1]), process]
        return process

    async def end_kubelet(self, *, crash: bool = True) -> None:
        """End the kubelet, if there is one; a 1.9 not while it writes its checkpoint, which would lose every pod."""
        if self.answering is not None:
            await self.node.written()
        kubelet, self.node.kubelet = self.node.kubelet, None
        if kubelet is not None:
            await (kubelet.kill() if crash or self.silent else kubelet.terminate())
            await kubelet.close()
        self.silent = False

    async def start_kubelet(self) -> None:
        """Start the next kubelet, beside none; an emulated one does wrong what is wrong now."""
        emulated = self.node.genuine(self.version) is None
        await self.node.start_kubelet(self.version, faults=self.lies if emulated else None)

    async def lie(self, **lies: Any) -> None:
        """Change what an emulated kubelet does wrong."""
        self.lies = replace(self.lies, **lies)
        kubelet = self.answering
        if kubelet is not None and kubelet.kind == "emulated":
            with contextlib.suppress(KubeletError):  # it ended meanwhile
                await kubelet.fault(self.lies)

    def show_hardware(self) -> None:
        """Let the gateway see which GPUs are unhealthy and gone; one that is healthy again was reset, or it would be held back."""
        self.reset |= self.ill
        well = [self.ids[index] for index in sorted(self.reset - self.ill - self.gone)]
        self.node.traits = {RESOURCE: [f"recovered: [{', '.join(well)}]"]} if well else {}
        self.node.set_health({RESOURCE: self.ill}, gone={RESOURCE: self.gone})

    # What must hold.

    async def right(self, bound: float, seconds: float | None = None) -> float:
        """Wait until the node is right; return how many seconds that took, and expect the gateway to be alive.

        Args:
            bound: within what it is promised, for the message.
            seconds: how long to wait; ``allowed(bound)`` without.

        Raises:
            BrokenPromiseError: it wasn't; the message says what was wrong.
        """
        begin, wait = time.monotonic(), 0.01
        seconds = allowed(bound) if seconds is None else seconds
        while True:
            wrong = await self._wrong(min(1.0, max(0.05, begin + seconds - time.monotonic())))
            took = time.monotonic() - begin
            await self.same_gateway()
            if took > seconds:
                must(
                    [
                        f"not right within {seconds:.1f} s (promised: {bound:g} s):",
                        *(wrong or [f"it took {took:.1f} s"]),
                    ]
                )
            if not wrong:
                return took
            await asyncio.sleep(wait)
            wait = min(1.5 * wait, 0.25)

    async def same_gateway(self) -> None:
        """Expect that no gateway ended but those that were told to.

        Raises:
            BrokenPromiseError: one did; the message has the end of its log.
        """
        for one in self.node.gateways:
            if not one.alive and not one.told_to_end:
                must([f"the gateway ended by itself, with exit status {await one.wait()}; its log ends:", one.log()])

    async def _wrong(self, seconds: float) -> list[str]:
        """Say what is wrong; the kubelet's records have so many seconds to be right."""
        made = self.node
        kubelet = made.the_kubelet
        made.patience = seconds
        try:
            await made.served()
            ailing = self.ailing()
            free = made.healthy() - sum(one not in ailing for held in made.held for one in held.device_ids)
            if free > 0:
                self._probes += 1
                probe = f"probe-{self._probes}"
                await kubelet.admit(probe, RESOURCE, 1)
                must(given_twice(holdings(await kubelet.pods())))
                await kubelet.remove(probe)
            await made.check()
        except (KubeletError, BrokenPromiseError) as error:
            return str(error).splitlines()
        return self.forgotten() if self.writable else []

    def ailing(self) -> set[str]:
        """Give the devices that are unhealthy or gone."""
        return {self.ids[index] for index in self.ill | self.gone}

    def forgotten(self) -> list[str]:
        """Say what the ledger on disk doesn't know of what the gateway was to announce."""
        path = self.state_dir / "ledger.json"
        try:
            rows = json.loads(path.read_bytes())["resources"][RESOURCE]["announced"]
        except (OSError, ValueError, KeyError) as error:
            return [f"the state file on disk can't be used: {error!r}"]
        ailing, dropped = self.ailing(), self.node.dropped()
        wanted = {one: "Unhealthy" if one in ailing else "Healthy" for one in self.ids if one not in dropped}
        return [
            f"the state file on disk has {one} as {rows.get(one, {}).get('health', 'nothing')}, announced was {health}"
            for one, health in wanted.items()
            if rows.get(one, {}).get("health") != health
        ][:4]

    async def close(self) -> None:
        """End what isn't the node's own to end."""
        for rival in self.rivals:
            await rival.close()


@asynccontextmanager
async def ground(
    version: str,
    genuine: Callable[[str], Path | None] = lambda _: None,
    *,
    gpus: int = GPUS,
    behind: str = "",
) -> AsyncIterator[Ground]:
    """Set up a node with kubelet ``version`` and a gateway that serves it, and take it down with all its processes.

    ``behind``: the GPUs are those of a plugin of this API, behind the bridge.
    """
    async with AsyncExitStack() as stack:
        namespaces, no_namespaces = None, ""
        try:
            namespaces = await stack.enter_async_context(await Namespaces.open())
        except NamespacesError as error:
            no_namespaces = str(error)
        made = await stack.enter_async_context(node(genuine, gpus={RESOURCE: gpus}, behind=behind))
        (made.root / "state").mkdir()
        if namespaces is not None:
            await namespaces.run(
                "mount", "-t", "tmpfs", "-o", f"size={STATE_BYTES},mode=700", "state", str(made.root / "state")
            )
        one = Ground(made, namespaces, no_namespaces, device_ids(made.gpus)[RESOURCE], version)
        stack.push_async_callback(one.close)
        one.clock.write_text("0")
        await one.start_kubelet()
        await one.start_gateway()
        await one.right(COLD_START, PATIENCE)
        yield one


# The faults.

Strike = Callable[[Ground, int], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and what is promised then."""

    name: str
    what: str
    """What happens, for people."""
    bound: float
    """Seconds after its end within which the node is right again, on an idle machine."""
    strike: Strike
    """Makes it happen, for as long as the context lasts; the number chooses among several ways, or devices."""
    why: str = ""
    """What the bound is made of, where that isn't plain."""
    lingers: bool = False
    """Whether the bound is longer by as long as the fault lasted: waits between two tries grow with every failure."""
    serves: bool = False
    """Whether the node must be right, within the bound, while it lasts too."""
    lasts: float = 0.0
    """How many seconds it lasts at least where it is struck alone."""
    meanwhile: Sequence[str] = ()
    """What is struck while it lasts, and outlasts it, where it is struck alone."""
    shows: str = ""
    """What a log of the node must say of it where it is struck alone: that it didn't pass unnoticed."""
    proof: Callable[[Ground], Awaitable[None]] | None = None
    """What else must hold while it lasts, where it is struck alone."""
    emulated: bool = False
    """Whether only an emulated kubelet can be made to do it."""
    inside_namespaces: bool = False
    """Whether it needs namespaces of its own."""
    bridged: bool = False
    """Whether it happens to a plugin behind the bridge."""
    gpus: int = GPUS

    def promised(self, lasted: float) -> float:
        """Give the bound in seconds, after a fault that lasted so many."""
        return self.bound + (lasted if self.lingers else 0)

    def why_not(self, kind: str, no_namespaces: str) -> str:
        """Say why it can't be struck on a kubelet of a kind, in this environment; '' where it can."""
        if self.emulated and kind != "emulated":
            return "a genuine kubelet can't be made to do this"
        return no_namespaces if self.inside_namespaces else ""


@asynccontextmanager
async def _kubelet_ends(g: Ground, _: int, *, crash: bool, absent: bool = False) -> AsyncIterator[None]:
    await g.end_kubelet(crash=crash)
    if not absent:
        await g.start_kubelet()
    yield
    if absent and g.node.kubelet is None:
        await g.start_kubelet()


@asynccontextmanager
async def _listens_late(g: Ground, _: int) -> AsyncIterator[None]:
    await g.lie(listen_late_ms=500)
    await g.end_kubelet()
    await g.start_kubelet()
    await g.lie(listen_late_ms=0)
    yield
    if g.answering is not None:
        await expect(lambda: listens(g.node.kubelet_dir / KUBELET_SOCKET), 10, "the kubelet to listen")


@asynccontextmanager
async def _restart_storm(g: Ground, _: int) -> AsyncIterator[None]:
    begin = time.monotonic()
    for number in range(STORM):
        kubelet = g.answering
        if kubelet is not None and kubelet.kind == "emulated":  # a new Python process would take too long
            await kubelet.stop()
            await kubelet.start([*g.node.pods.values()])
        else:
            await g.end_kubelet()
            await g.start_kubelet()
        await asyncio.sleep(begin + (number + 1) * STORM_SECONDS / STORM - time.monotonic())
    yield


@asynccontextmanager
async def _lies(g: Ground, _: int, **lies: Any) -> AsyncIterator[None]:
    await g.lie(**lies)
    yield
    await g.lie(**{name: getattr(Faults(), name) for name in lies})


@asynccontextmanager
async def _stream_cut(g: Ground, _: int) -> AsyncIterator[None]:
    kubelet = g.answering
    if kubelet is not None and kubelet.kind == "emulated":
        with contextlib.suppress(KubeletError):  # nobody is registered now
            gone = asyncio.create_task(kubelet.wait(RESOURCE, 0, 20))
            try:
                await asyncio.sleep(0)
                await kubelet.cut(RESOURCE)
                await gone
            finally:
                gone.cancel()
    yield


@asynccontextmanager
async def _kubelet_stopped(g: Ground, _: int) -> AsyncIterator[None]:
    kubelet = g.answering
    if kubelet is None:
        yield
        return
    os.kill(kubelet.pid, signal.SIGSTOP)
    g.silent = True
    yield
    if kubelet.alive:
        os.kill(kubelet.pid, signal.SIGCONT)
    if g.node.kubelet is kubelet:
        g.silent = False


@asynccontextmanager
async def _beside(g: Ground, _: int, *, stopped: bool = False, newer_ends: bool = False) -> AsyncIterator[None]:
    """A second kubelet on the directory of the first, which may be a stopped one: then its connections are half open."""
    first = g.answering
    if first is None:
        yield
        return
    if stopped:
        os.kill(first.pid, signal.SIGSTOP)
    g.rivals.append(first)
    g.node.kubelet = None
    await g.start_kubelet()
    yield
    if newer_ends:
        await g.end_kubelet()
    g.rivals.remove(first)
    await first.close()
    if g.node.kubelet is None:
        await g.start_kubelet()


@asynccontextmanager
async def _gateway_stopped(g: Ground, _: int) -> AsyncIterator[None]:
    """Nobody overrules it. If it was stopped for long, its own timer ends it, and it is started again."""
    gateway, began = g.node.gateway, time.monotonic()
    if gateway.alive:
        os.kill(gateway.pid, signal.SIGSTOP)
    yield
    if gateway.alive and await _dies(gateway, time.monotonic() - began):
        await g.start_gateway()


async def _dies(gateway: GatewayProcess, stopped: float) -> bool:
    """Let a gateway go on that was stopped for so many seconds; tell whether its timer ends it."""
    told, gateway.told_to_end = gateway.told_to_end, True
    os.kill(gateway.pid, signal.SIGCONT)
    if stopped > HANGS - LIVES:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DIES_SECONDS):
                await gateway.exited()
    if gateway.alive:
        gateway.told_to_end = told
    return not gateway.alive


@asynccontextmanager
async def _gateway_ends(g: Ground, _: int, *, crash: bool, absent: bool = False) -> AsyncIterator[None]:
    gateway = g.node.gateway
    await g.same_gateway()
    if gateway.alive:
        with contextlib.suppress(ProcessLookupError):  # it can't end in order while it is stopped
            os.kill(gateway.pid, signal.SIGCONT)
        await (gateway.kill() if crash else gateway.terminate())
    if not absent:
        await g.start_gateway()
    yield
    if absent and not g.node.gateway.alive:
        await g.start_gateway()


@asynccontextmanager
async def _plugin_ends(g: Ground, _: int, *, crash: bool, absent: bool = False) -> AsyncIterator[None]:
    """The plugin behind the bridge ends, and starts again: at once, or when this ends."""
    await _end_plugin(g, crash=crash)
    if not absent:
        await g.node.start_bridged()
    yield
    await g.node.start_bridged()


async def _end_plugin(g: Ground, *, crash: bool) -> None:
    plugin = g.node.bridged
    if plugin is not None and plugin.alive:
        with contextlib.suppress(ProcessLookupError):  # as above
            os.kill(plugin.pid, signal.SIGCONT)
        await (plugin.kill() if crash else plugin.terminate())


@asynccontextmanager
async def _plugin_fewer(g: Ground, pick: int) -> AsyncIterator[None]:
    """The plugin behind the bridge is killed, and has forgotten a device when it is back: one that a pod holds, if any does."""
    held = [g.ids.index(one) for held in g.node.held for one in held.device_ids]
    index = held[pick % len(held)] if held else pick % len(g.ids)
    mine = index not in g.gone | g.ill
    if mine:
        await _end_plugin(g, crash=True)
        shutil.rmtree(g.node.behind_dir)
        g.gone.add(index)
        g.node.unlisted = {*g.node.unlisted, g.ids[index]}
        g.show_hardware()
        await g.node.start_bridged()
    yield
    if mine:
        g.gone.discard(index)
        g.node.unlisted = {*g.node.unlisted} - {g.ids[index]}
        g.show_hardware()


@asynccontextmanager
async def _plugin_stopped(g: Ground, _: int) -> AsyncIterator[None]:
    plugin = g.node.bridged
    if plugin is not None and plugin.alive:
        os.kill(plugin.pid, signal.SIGSTOP)
    yield
    if plugin is not None and plugin.alive:
        os.kill(plugin.pid, signal.SIGCONT)


async def _stays_allocatable(g: Ground) -> None:
    """The kubelet's records show what they showed, for as long as anybody would look twice."""
    ends = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < ends:
        seen = (await g.node.the_kubelet.totals()).allocatable.get(RESOURCE, 0)
        must([] if seen == g.node.healthy() else [f"{seen} of {g.node.healthy()} devices are allocatable"])
        await asyncio.sleep(0.02)


@asynccontextmanager
async def _rolled(g: Ground, _: int, *, back: bool, crash: bool = False) -> AsyncIterator[None]:
    """A newer gateway takes over from the one that leads; then the older one ends, or all but the older one do."""
    older = g.node.gateway
    await g.start_gateway()
    yield
    if back and not older.alive:  # Another fault killed it: there is nothing to go back to.
        return
    ending = [one for one in g.node.gateways if one is not older] if back else [older]
    for one in ending:
        if one.alive:
            os.kill(one.pid, signal.SIGCONT)
            await (one.kill() if crash else one.terminate())
    if back:
        g.node.gateways[:] = [older]


@asynccontextmanager
async def _name_removed(g: Ground, _: int) -> AsyncIterator[None]:
    for line in g.node.gateway.lines("registered")[-1:]:
        with contextlib.suppress(OSError):
            _name(g, str(line["endpoint"])).unlink()
    yield


def _name(g: Ground, endpoint: str) -> Path:
    return g.node.socket_dir / Path(endpoint).name


async def _name_is_back(g: Ground) -> None:
    name = _name(g, str(g.node.gateway.lines("registered")[-1]["endpoint"]))
    await expect(name.is_socket, allowed(RESTART), f"{name.name} to be put back")


@asynccontextmanager
async def _directory_replaced(g: Ground, _: int) -> AsyncIterator[None]:
    """The kubelet's checkpoint comes with it: what a kubelet forgets is no fault of a plugin's."""
    await g.end_kubelet()
    folder = g.node.socket_dir
    old = folder.rename(folder.with_name("replaced"))
    folder.mkdir()
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(old / CHECKPOINT, folder / CHECKPOINT)
    shutil.rmtree(old, ignore_errors=True)
    await g.start_kubelet()
    yield


@asynccontextmanager
async def _device(g: Ground, pick: int, *, gone: bool) -> AsyncIterator[None]:
    ailing = g.gone if gone else g.ill
    index = pick % g.node.gpus[RESOURCE]
    mine = index not in g.gone | g.ill
    if mine:
        ailing.add(index)
        g.show_hardware()
    yield
    if mine:
        ailing.discard(index)
        g.show_hardware()


@asynccontextmanager
async def _disk_full(g: Ground, _: int) -> AsyncIterator[None]:
    if not g.writable:
        yield
        return
    filler = g.state_dir / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    g.writable = False
    yield
    g.writable = True
    filler.unlink()


@asynccontextmanager
async def _read_only(g: Ground, _: int) -> AsyncIterator[None]:
    if not g.writable:
        yield
        return
    namespaces, state = _namespaces(g), str(g.node.root / "state")
    await namespaces.run("mount", "-o", "remount,ro", state)
    g.writable = False
    yield
    g.writable = True
    await namespaces.run("mount", "-o", "remount,rw", state)


@asynccontextmanager
async def _no_descriptors(g: Ground, _: int) -> AsyncIterator[None]:
    """The process may keep what it has open, and open nothing more. One that still starts is left alone: it can't."""
    gateway = g.node.gateway
    before: tuple[int, int] | None = None
    with contextlib.suppress(OSError):  # it was ended
        if gateway.seen > LINES or any(gateway.lines(event) for event in BEGUN):
            before = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
            forbid_descriptors(gateway.pid)
    # A number that it closes could be had again: a kubelet that went would leave just what its successor needs.
    lowering = None if before is None else asyncio.create_task(_lowered(gateway.pid))
    yield
    if lowering is not None:
        lowering.cancel()
        await asyncio.wait([lowering])
    if before is not None and gateway.alive:
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, before)


async def _lowered(pid: int) -> None:
    with contextlib.suppress(OSError):  # it was ended
        while True:
            forbid_descriptors(pid)
            await asyncio.sleep(0.005)


def forbid_descriptors(pid: int) -> None:
    """Lower a process's limit to the first number that it has free: what it has open stays open.

    Raises:
        OSError: there is no such process.
    """
    taken = descriptors(pid)
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    if free < limits[0]:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, limits[1]))


@asynccontextmanager
async def _limited(g: Ground, _: int, *, names: Sequence[str]) -> AsyncIterator[None]:
    """The kernel gives the node's gateways no more of something; what they have they keep."""
    namespaces = _namespaces(g)
    for name in names:
        await namespaces.limit(name, 0)
    yield
    for name in names:
        await namespaces.limit(name, PLENTY)


@asynccontextmanager
async def _no_links(g: Ground, _: int) -> AsyncIterator[None]:
    """A mount of its own on the gateways' folder: link(2) from there to the kubelet's folder is EXDEV."""
    namespaces, folder = _namespaces(g), str(g.node.socket_dir / "gateway")
    with contextlib.suppress(NamespacesError):  # no such folder now
        await namespaces.run("mount", "--bind", folder, folder)
    yield
    with contextlib.suppress(NamespacesError):  # the folder was replaced, and the mount went with it
        await namespaces.run("umount", "--lazy", folder)


@asynccontextmanager
async def _clock_jumps(g: Ground, pick: int) -> AsyncIterator[None]:
    """Far to one side, and to the other; files seem to be from the future."""
    sign = 1 if pick % 2 else -1
    then = time.time() + FAR_SECONDS
    with contextlib.suppress(OSError):
        for path in (g.state_dir, g.state_dir / "ledger.json", g.node.socket_dir, g.node.socket_dir / "gateway"):
            os.utime(path, (then, then))
    g.clock.write_text(str(sign * FAR_SECONDS))
    yield
    g.clock.write_text(str(-sign * FAR_SECONDS))


@asynccontextmanager
async def _several(g: Ground, pick: int) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for name in ("disk-full", "link-refused", "device-ill", "register-errors", "kubelet-killed", "no-descriptors"):
            if not FAULTS[name].why_not("genuine" if g.node.genuine(g.version) else "emulated", g.no_namespaces):
                await stack.enter_async_context(FAULTS[name].strike(g, pick))
        yield


def descriptors(pid: int) -> set[int]:
    """Give the numbers of the open descriptors of a process.

    Raises:
        OSError: there is no such process.
    """
    return {int(entry.name) for entry in Path("/proc", str(pid), "fd").iterdir()}


def _namespaces(g: Ground) -> Namespaces:
    assert g.namespaces is not None, "a fault that needs namespaces of its own is never struck without"
    return g.namespaces


async def _updates_pile_up(g: Ground) -> None:
    """Many lists that nobody reads must not be kept."""
    gateway = g.node.gateway
    before = footprint(gateway.pid).rss
    for number in range(PENDING_UPDATES):
        mark = gateway.seen
        g.ill = {number % g.node.gpus[RESOURCE]}
        g.show_hardware()
        await gateway.wait_for("profile read", since=mark)
    grown = footprint(gateway.pid).rss - before
    must([f"{PENDING_UPDATES} lists that nobody read cost {grown:.1f} MiB"] if grown > PENDING_MIB else [])


async def expect(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something that only looking tells.

    Raises:
        BrokenPromiseError: it wasn't so within ``seconds``.
    """
    try:
        await until(true, seconds, every=0.002)
    except TimeoutError:
        raise BrokenPromiseError(f"expected {what} within {seconds:g} s") from None


# The table.

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "kubelet-restarted",
            "the kubelet ends (TERM) and starts again",
            RESTART,
            partial(_kubelet_ends, crash=False),
        ),
        Fault("kubelet-killed", "the kubelet is killed and starts again", RESTART, partial(_kubelet_ends, crash=True)),
        Fault(
            "kubelet-absent",
            "the gateway starts while no kubelet runs",
            RESTART,
            partial(_kubelet_ends, crash=True, absent=True),
            meanwhile=("gateway-killed",),
            lasts=2,
        ),
        Fault(
            "kubelet-listens-late",
            "kubelet.sock exists for half a second before the kubelet listens",
            RESTART,
            _listens_late,
            emulated=True,
        ),
        Fault(
            "restart-storm",
            f"the kubelet restarts {STORM} times in {STORM_SECONDS:g} s",
            RESTART,
            _restart_storm,
        ),
        Fault(
            "register-hangs",
            "Register isn't answered until the fault ends",
            1.0,
            partial(_lies, register_hangs=True),
            why="the gateway retries less and less often",
            lasts=17,
            meanwhile=("kubelet-killed",),
            emulated=True,
            shows="told to hang",
        ),
        Fault(
            "register-lost",
            "one Register is never answered",
            16.0,
            partial(_lies, register_lost=True),
            why="Register has a deadline of 15 s, because a kubelet may take 10 s to connect",
            lasts=1,
            meanwhile=("kubelet-killed",),
            emulated=True,
            shows="told to lose it",
        ),
        Fault(
            "register-errors",
            "Register fails three times",
            1.0,
            partial(_lies, register_errors=3),
            why="the gateway waits 50, 100 and 200 ms, or up to a quarter longer",
            meanwhile=("kubelet-killed",),
            emulated=True,
            shows="told to fail",
        ),
        Fault(
            "never-calls",
            "Register is answered with OK, and the kubelet never connects",
            15.0,
            partial(_lies, never_calls_back=True),
            why="the gateway waits 11 to 14 s, because a kubelet may take 10 s to connect",
            lasts=1,
            meanwhile=("kubelet-killed",),
            emulated=True,
            shows="told never to call back",
        ),
        Fault(
            "stream-cut",
            "the kubelet ends only the stream of lists",
            RESTART,
            _stream_cut,
            emulated=True,
            shows="stream ended",
        ),
        Fault(
            "lists-not-read",
            f"the kubelet doesn't read its stream: {PENDING_UPDATES} lists of 2 000 devices take less than {PENDING_MIB:g} MiB",
            1.0,
            partial(_lies, reads_no_lists=True),
            meanwhile=("device-ill",),
            proof=_updates_pile_up,
            emulated=True,
            gpus=2000,
        ),
        Fault(
            "kubelet-stopped",
            "a gateway starts and a device becomes unhealthy while the kubelet is stopped (SIGSTOP)",
            1.0,
            _kubelet_stopped,
            lasts=17,
            meanwhile=("gateway-killed", "device-ill"),
        ),
        Fault(
            "half-open",
            "the kubelet is stopped (SIGSTOP) with open connections, and another kubelet starts in the same directory",
            RESTART,
            partial(_beside, stopped=True),
            serves=True,
        ),
        Fault(
            "two-kubelets",
            "a second kubelet starts on the directory of a running kubelet; the first ends later",
            RESTART,
            _beside,
            serves=True,
        ),
        Fault(
            "two-kubelets-younger-ends",
            "a second kubelet starts on the directory of a running kubelet, and ends first; then a third starts",
            RESTART,
            partial(_beside, newer_ends=True),
            serves=True,
        ),
        Fault(
            "gateway-stopped",
            "the gateway is stopped (SIGSTOP) until its timer ends it, while the kubelet is killed",
            COLD_START,
            _gateway_stopped,
            lasts=17,
            meanwhile=("kubelet-killed", "device-ill"),
        ),
        Fault(
            "gateway-killed",
            "the gateway is killed and restarted",
            COLD_START,
            partial(_gateway_ends, crash=True),
        ),
        Fault(
            "gateway-restarted",
            "the gateway ends (TERM) and restarts",
            COLD_START,
            partial(_gateway_ends, crash=False),
        ),
        Fault(
            "gateway-absent",
            "the kubelet is killed and a device vanishes while no gateway runs",
            COLD_START,
            partial(_gateway_ends, crash=True, absent=True),
            meanwhile=("kubelet-killed", "device-lost"),
        ),
        Fault(
            "gateway-rolled-out",
            "a second gateway takes over; then the first ends",
            COLD_START,
            partial(_rolled, back=False),
            serves=True,
            lasts=2,
        ),
        Fault(
            "gateway-rolled-back",
            "a second gateway takes over and ends; the first takes over again",
            COLD_START,
            partial(_rolled, back=True),
            serves=True,
            lasts=2,
        ),
        Fault(
            "leader-killed",
            "a second gateway takes over and is killed; the first takes over again",
            RESTART,
            partial(_rolled, back=True, crash=True),
            serves=True,
            lasts=2,
        ),
        Fault(
            "standby-killed",
            "a second gateway takes over; then the first is killed",
            RESTART,
            partial(_rolled, back=False, crash=True),
            serves=True,
            lasts=2,
        ),
        Fault(
            "name-removed",
            "the gateway's socket file is deleted: the gateway restores the file without registering",
            RESTART,
            _name_removed,
            serves=True,
            proof=_name_is_back,
            shows="put our socket's name back",
        ),
        Fault(
            "directory-replaced",
            "the kubelet's directory is replaced by a new one",
            0.3,
            _directory_replaced,
            shows="the socket directory was replaced",
        ),
        Fault(
            "device-ill",
            "a device becomes unhealthy, and is healthy again",
            0.5,
            partial(_device, gone=False),
            serves=True,
        ),
        Fault(
            "device-lost",
            "a device vanishes, and comes back",
            0.5,
            partial(_device, gone=True),
            serves=True,
        ),
        Fault(
            "disk-full",
            "the state directory's disk is full",
            1.0,
            _disk_full,
            why="the gateway retries less and less often",
            serves=True,
            meanwhile=("device-ill", "kubelet-killed"),
            inside_namespaces=True,
            shows="No space left on device",
            lingers=True,
        ),
        Fault(
            "state-read-only",
            "the state directory becomes read-only",
            1.0,
            _read_only,
            why="as `disk-full`",
            serves=True,
            meanwhile=("device-ill", "kubelet-killed"),
            inside_namespaces=True,
            shows="Read-only file system",
            lingers=True,
        ),
        Fault(
            "no-descriptors",
            "the gateway can open no more file descriptors",
            2.0,
            _no_descriptors,
            why="the gateway retries less and less often",
            lasts=1,
            meanwhile=("kubelet-killed", "device-ill"),
            shows="Too many open files",
            lingers=True,
        ),
        Fault(
            "no-inotify",
            "the kernel gives the gateway no inotify instance when it starts",
            2.0,
            partial(_limited, names=("max_inotify_instances",)),
            why="the gateway reads the kubelet's directory every 250 ms, and files every second",
            serves=True,
            meanwhile=("gateway-killed", "kubelet-killed", "device-ill", "directory-replaced"),
            inside_namespaces=True,
            shows="inotify is not available",
        ),
        Fault(
            "no-watches",
            "the kernel gives the gateway no more inotify watches",
            2.0,
            partial(_limited, names=("max_inotify_watches",)),
            why="as `no-inotify`",
            serves=True,
            meanwhile=("directory-replaced", "kubelet-killed", "device-ill"),
            inside_namespaces=True,
            shows="cannot watch a folder",
        ),
        Fault(
            "link-refused",
            "link(2) into the kubelet's directory is refused (EXDEV)",
            RESTART,
            _no_links,
            serves=True,
            meanwhile=("kubelet-killed",),
            inside_namespaces=True,
            shows="Invalid cross-device link",
        ),
        Fault(
            "clock-jumps",
            "the wall clock jumps ten years forward and back, so that files are from the future",
            RESTART,
            _clock_jumps,
            serves=True,
            meanwhile=("kubelet-killed", "device-ill"),
        ),
        Fault(
            "plugin-restarted",
            "a plugin behind the bridge ends (TERM) and starts again",
            COLD_START,
            partial(_plugin_ends, crash=False),
            serves=True,
            bridged=True,
            shows="the plugin is away",
            proof=_stays_allocatable,
        ),
        Fault(
            "plugin-killed",
            "a plugin behind the bridge is killed and starts again",
            COLD_START,
            partial(_plugin_ends, crash=True),
            serves=True,
            bridged=True,
            shows="the plugin is away",
            proof=_stays_allocatable,
        ),
        Fault(
            "plugin-absent",
            "the kubelet and the gateway restart while a plugin behind the bridge is away",
            COLD_START,
            partial(_plugin_ends, crash=True, absent=True),
            meanwhile=("kubelet-killed", "gateway-killed"),
            lasts=2,
            bridged=True,
        ),
        Fault(
            "plugin-fewer",
            "a plugin behind the bridge is killed and returns without a device that a pod holds: the device is Unhealthy",
            COLD_START,
            _plugin_fewer,
            serves=True,
            bridged=True,
            shows="the plugin is away",
        ),
        Fault(
            "plugin-stopped",
            "a plugin behind the bridge is stopped (SIGSTOP)",
            RESTART,
            _plugin_stopped,
            lasts=2,
            bridged=True,
            proof=_stays_allocatable,
        ),
        Fault(
            "several-at-once",
            "the disk is full, links are refused, Register fails, a device is unhealthy, no descriptors are left, and the kubelet is killed",
            2.0,
            _several,
            lasts=1,
            lingers=True,
        ),
    )
}
"""All faults by name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a fault that was struck alone."""

    fault: str
    version: str
    kind: str
    status: str
    """``passed``, ``failed`` or ``not applicable``."""
    seconds: float = 0.0
    """How long the node took to be right again."""
    reason: str = ""
    first: str = ""
    """Why it failed at the first try, where this is what came of a second one; otherwise empty."""
    log: Sequence[str] = ()
    """The ends of the logs of the node's processes, where it failed."""


async def alone(fault: Fault, version: str, genuine: Callable[[str], Path | None] = lambda _: None) -> Outcome:
    """Strike one fault on a node of its own, with two pods on it, and judge; with a plugin behind the bridge where it takes one."""
    kind = "emulated" if genuine(version) is None else "genuine"
    if why := fault.why_not(kind, ""):
        return Outcome(fault.name, version, kind, "not applicable", reason=why)
    try:
        async with ground(version, genuine, gpus=fault.gpus, behind="v1beta1" if fault.bridged else "") as g:
            if why := fault.why_not(kind, g.no_namespaces):
                return Outcome(fault.name, version, kind, "not applicable", reason=why)
            try:
                took = await _alone(fault, g)
            except FAILURES as error:
                reason = str(error).replace(str(g.node.root), "<node>")
                return Outcome(fault.name, version, kind, "failed", reason=reason, log=logs(g.node))
    except FAILURES as error:
        return Outcome(fault.name, version, kind, "failed", reason=f"no node to strike it on: {error}")
    return Outcome(fault.name, version, kind, "passed", took)


async def _alone(fault: Fault, g: Ground) -> float:
    await g.node.run_pods()
    worst = 0.0
    async with AsyncExitStack() as outlasting:
        begin = time.monotonic()
        async with fault.strike(g, 1):
            for name in fault.meanwhile:
                await outlasting.enter_async_context(FAULTS[name].strike(g, 2))
                worst = max(worst, await g.right(fault.bound) if fault.serves else 0)
            worst = max(worst, await g.right(fault.bound) if fault.serves else 0)
            if fault.proof is not None:
                await fault.proof(g)
            await asyncio.sleep(begin + fault.lasts - time.monotonic())
            if fault.shows:
                await expect(partial(_told, g, fault.shows), allowed(RESTART), f"a log to say {fault.shows!r}")
        worst = max(worst, await g.right(fault.promised(time.monotonic() - begin)))
    worst = max(worst, await g.right(fault.bound))
    await asyncio.sleep(LINGER_SECONDS)
    await g.right(fault.bound, SLACK)
    return worst


def _told(g: Ground, text: str) -> bool:
    kubelet = g.node.kubelet
    logs_of = [one.log(one.seen) for one in g.node.gateways] + ([kubelet.log()] if kubelet is not None else [])
    return any(text in log for log in logs_of)


# The page.

INTRODUCTION = f"""\
<!-- Generated from gateway_lab/trials/faults.py by `make docs`. Do not edit. -->
# What the gateway survives, and how soon

    make gauntlet

This command causes the faults on this page one at a time, on emulated and real kubelets, then several at random. Each heading says how soon after the fault's end
the node must be correct again. A busy machine gets {SLOWER:g} times as long, at most {SLOWEST:g} s more, plus {SLACK:g} s. A node is correct if the kubelet's records
match the hardware, a new pod gets a device, no device is in two pods, and no pod lost its device.

- *It serves*: the node must also be correct during the fault.
- *And as long again*: the gateway waits longer after each failure, so the limit grows by the duration of the fault.
- *Emulated*: only an emulated kubelet can cause this fault.

"""

NOTES = """\
The test simulates only the jumps of the wall clock. All other faults are real.
"""


def page() -> str:
    """Write docs/faults.md, in Markdown."""
    bounds: dict[str, list[Fault]] = {}
    for fault in sorted(FAULTS.values(), key=lambda fault: fault.bound):
        bounds.setdefault(_bound(fault), []).append(fault)
    lines = []
    for bound, faults in bounds.items():
        lines += [
            f"## {bound}",
            "",
            *(f"- `{one.name}`: {one.what}" + (f" ({one.why})" if one.why else "") for one in faults),
            "",
        ]
    return "\n".join([INTRODUCTION, *lines, NOTES])


def _bound(fault: Fault) -> str:
    notes = {"and as long again": fault.lingers, "it serves": fault.serves, "emulated": fault.emulated}
    return ", ".join([f"Within {fault.bound:g} s", *(note for note, holds in notes.items() if holds)])
