"""Handover over real control sockets: whole gateways without their gRPC side, and partners that stall, lie or die."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from adapters.dialect import Level
from gateway.age import HOST_SERVICE_NS, Age, in_turn
from gateway.handover import machine
from gateway.handover import message as talked
from gateway.handover import partner as partners
from gateway.handover import talk as handover
from gateway.handover.events import Say, Standing, standing
from gateway.handover.machine import Newer, Older
from gateway.handover.talk import Handover, Waits
from gateway.kubelet import identity
from gateway.registration import events
from gateway.registration import machine as registration
from gateway.registration.events import Phase, Timer
from gateway.wires import control
from gateway.wires.control import ControlConnection, ControlServer, socket_path

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"
GUARD = 10.0
"""Seconds after which a test that waits for ever is told so."""


class Kubelet:
    """What several gateways share: one kubelet, which records whom it serves and what must never happen to it."""

    def __init__(self, minor: int) -> None:
        self.minor = minor
        self.id = identity.KubeletId(1, 1, 1)
        self.up = True
        self.refuses: set[Gateway] = set()
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.alive: list[Gateway] = []
        self.registers: Counter[str] = Counter()
        self.troubles: list[str] = []
        self._in_flight: Counter[str] = Counter()
        self._pulse = asyncio.Event()

    def serving(self, resource: str = GPU) -> list[str]:
        """Names those that have a stream, the oldest first."""
        return [gateway.name for gateway in sorted(self.alive, key=lambda one: one.age) if resource in gateway.streams]

    async def register(self, gateway: Gateway, resource: str) -> str:
        if not self.up:
            return "NOBODY"
        self.registers[gateway.name] += 1
        if self.minor < 37 and self.serving(resource):
            self.troubles.append(f"{gateway.name} registered beside {self.serving(resource)}")
        self._in_flight[resource] += 1
        try:
            await self.hangs.wait()
            await asyncio.sleep(0)
            if gateway in self.refuses:
                return "UNKNOWN"
            return "OK"
        finally:
            self._in_flight[resource] -= 1

    def pulse(self) -> None:
        """Something happened: let those look who wait for it."""
        self._pulse.set()

    def ended(self, resource: str) -> None:
        """Kubelets 1.25 to 1.36 disconnect whoever is registered when an old stream ends."""
        self.pulse()
        if self._in_flight[resource]:
            self.troubles.append("a stream ended during a Register")
        if 25 <= self.minor < 37:
            for gateway in self.alive:
                gateway.cut(resource)

    def restart(self) -> None:
        self.id = identity.KubeletId(1, 1, self.id.mtime_ns + 1)
        for gateway in self.alive:
            for resource in list(gateway.streams):
                gateway.cut(resource)
        for gateway in self.alive:
            gateway.meet()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD):
            while not condition():
                self._pulse.clear()
                await self._pulse.wait()


class Gateway:
    """A gateway as the shell puts it together: real state machines, a real control socket, and a Kubelet to call."""

    def __init__(self, node: Node, born_ns: int, resources: Collection[str]) -> None:
        self.node, self.kubelet, self.age = node, node.kubelet, Age(born_ns, f"{born_ns % (1 << 32):08x}")
        self.states = {name: registration.start(self.age.token, "auto", "v1beta1") for name in resources}
        self.streams: dict[str, int] = {}
        self.ending: set[str] = set()
        self.published = False
        self.silent: Callable[[], bool] = lambda: False
        """Whether a newer gateway is there that can't be talked to."""
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._timers: dict[tuple[str, Timer], asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = iter(range(1, 1000))
        self.handover = Handover(self.age, node.folder, self, self._count)
        self.server = ControlServer(socket_path(node.folder, self.age.token), {talked.OP: self.handover.serve})

    @property
    def name(self) -> str:
        return f"g{self.age.born_ns}"

    async def start(self) -> None:
        await self.server.start()
        if await self.handover.take_over(peer.age for peer in self.kubelet.alive):
            await asyncio.sleep(registration.CUT_WAIT)
        self.kubelet.alive.append(self)
        self.published = True
        for gateway in list(self.kubelet.alive):
            gateway.look()
        self.meet()

    def meet(self) -> None:
        for resource in self.states:
            self.feed(resource, events.KubeletUp(self.kubelet.id))

    async def end(self) -> None:
        """End as on SIGTERM: what was promised, the registrations, then the handovers, then the sockets."""
        await self.handover.waits.keep_promises()
        for resource in self.states:
            self.feed(resource, events.Stop())
        await self.handover.close()
        await self._vanish()

    async def kill(self) -> None:
        """End as on SIGKILL: the kernel closes what was open, and nothing is said."""
        self.published = False
        self.kubelet.alive.remove(self)
        for partner in list(self.handover._partners.values()):
            partner.connection.abort()
        gone, self.streams = self.streams, {}
        for resource in gone:
            self.kubelet.ended(resource)
        await self._vanish()

    async def _vanish(self) -> None:
        self.published = False
        if self in self.kubelet.alive:
            self.kubelet.alive.remove(self)
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.handover.close()
        await self.server.close()
        for gateway in list(self.kubelet.alive):
            gateway.look()

    def _count(self, side: str, outcome: str) -> None:
        self.outcomes[side, outcome] += 1
        self.kubelet.pulse()

    # What a handover asks of its holder.

    def names(self) -> Collection[str]:
        return self.states.keys()

    def standing(self, resource: str) -> Standing:
        streams = resource in self.streams or resource in self.ending
        return standing(self.states[resource].phase, streams=streams)

    def level(self, resource: str) -> Level | None:
        return Level(self.kubelet.minor, self.kubelet.minor) if resource in self.streams else None

    def kubelet_listens(self) -> bool:
        return self.kubelet.up

    def leaves(self, resource: str) -> bool:
        return resource in self.states and self.silent()

    def renew(self, resource: str) -> None:
        self.feed(resource, events.Renew("crossed"))

    def look(self) -> None:
        self.kubelet.pulse()
        if not self.published:
            return
        peers = [peer.age for peer in self.kubelet.alive if peer is not self]
        if any(peer < self.age for peer in peers):
            self._spawn(self.handover.take_over(peers))
        for resource in self.states:
            others = [peer for peer in peers if not self.handover.decides(peer, resource)]
            waits_for = self.handover.defers_to(resource) or next(iter(in_turn(self.age, others)), None)
            if waits_for is not None and self.standing(resource) is not Standing.BUSY:
                self.feed(resource, events.StandBy(waits_for))
            elif waits_for is None and self.states[resource].phase is Phase.STANDBY:
                self.feed(resource, events.Resume())

    # What the registrations ask for.

    def feed(self, resource: str, event: events.Event) -> None:
        self.states[resource], actions = registration.step(self.states[resource], event)
        for action in actions:
            match action:
                case events.SendRegister(attempt):
                    self._spawn(self._offer(resource, attempt))
                case events.SetTimer(timer, seconds):
                    self._cancel(resource, timer)
                    handle = asyncio.get_running_loop().call_later(seconds, self.feed, resource, events.Fired(timer))
                    self._timers[resource, timer] = handle
                case events.CancelTimer(timer):
                    self._cancel(resource, timer)
                case events.CancelRegister():
                    self.kubelet.troubles.append("a Register was given up")
                case events.EndStreams() if resource in self.streams:
                    self.ending.add(resource)
                    asyncio.get_running_loop().call_soon(self.cut, resource, True)
                case _:
                    pass
        self.handover.changed(resource)
        self.kubelet.pulse()

    async def _offer(self, resource: str, attempt: int) -> None:
        code = await self.kubelet.register(self, resource)
        self.feed(resource, events.Replied(attempt, code))
        if code == "OK":
            self.streams[resource] = next(self._numbers)
            self.feed(resource, events.StreamOpened(self.streams[resource]))

    def cut(self, resource: str, ours: bool = False) -> None:
        """A stream is over: ended by the kubelet, or by us."""
        self.ending.discard(resource)
        stream = self.streams.pop(resource, None)
        if stream is not None:
            self.feed(resource, events.StreamEnded(stream))
            if ours:
                self.kubelet.ended(resource)

    def _cancel(self, resource: str, timer: Timer) -> None:
        if handle := self._timers.pop((resource, timer), None):
            handle.cancel()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Node:
    """A state directory, a kubelet, and the gateways that were started there."""

    def __init__(self, folder: Path, minor: int) -> None:
        self.folder, self.kubelet = folder, Kubelet(minor)
        self._made: list[Gateway] = []

    async def gateway(self, born_ns: int, resources: Collection[str] = (GPU,), *, serves: bool = True) -> Gateway:
        """Start one; wait until it serves all that it has."""
        gateway = Gateway(self, born_ns, resources)
        self._made.append(gateway)
        await gateway.start()
        if serves:
            await self.kubelet.until(lambda: gateway.streams.keys() == set(resources))
        return gateway

    async def elsewhere(self, born_ns: int) -> Gateway:
        """Start one that has another state directory."""
        folder = self.folder / "other"
        folder.mkdir()
        gateway = Gateway(self, born_ns, [GPU])
        gateway.handover = Handover(gateway.age, folder, gateway, lambda *_: None)
        gateway.server = ControlServer(socket_path(folder, gateway.age.token), {talked.OP: gateway.handover.serve})
        self._made.append(gateway)
        await gateway.start()
        return gateway

    async def close(self) -> None:
        for gateway in self._made:
            await gateway.end()


@pytest.fixture
async def node(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    node = Node(folder, getattr(request, "param", 32))
    async with asyncio.timeout(3 * GUARD):
        yield node
    await node.close()


EVERY_CLASS = pytest.mark.parametrize(
    "node",
    [
        pytest.param(9, id="1.9"),
        pytest.param(20, id="1.20"),
        pytest.param(32, id="1.32: disconnects by name"),
        pytest.param(37, id="1.37: register first"),
    ],
    indirect=True,
)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits as short as a test wants them; their order stays."""
    monkeypatch.setattr(machine, "ANSWER_WAIT", 0.04)
    monkeypatch.setattr(machine, "REPORT_WAIT", 0.08)
    monkeypatch.setattr(machine, "CHECK_WAIT", 0.1)
    monkeypatch.setattr(machine, "REST", 0.1)


@pytest.fixture
def unhurried(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hasty, but an older one is in time however busy this machine is."""
    monkeypatch.setattr(machine, "ANSWER_WAIT", GUARD)
    monkeypatch.setattr(talked, "ASK_TIME", GUARD)


# Two gateways that do as they should.


async def test_who_never_says_that_it_serves_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "REPORT_WAIT", 0.05)
    waits = Waits()
    waits.saw({machine.Older.PROMISED})
    async with asyncio.timeout(GUARD):
        await waits.keep_promises()


@EVERY_CLASS
async def test_the_newer_one_takes_over_and_nothing_forbidden_happens(node: Node) -> None:
    older = await node.gateway(1, [GPU, MIG])
    newer = await node.gateway(2, [GPU, MIG])
    await node.kubelet.until(lambda: not older.streams)
    assert node.kubelet.serving(GPU) == node.kubelet.serving(MIG) == ["g2"]
    assert node.kubelet.registers == {"g1": 2, "g2": 2}
    assert node.kubelet.troubles == []
    assert newer.outcomes == {("newer", "done"): 2}
    await node.kubelet.until(lambda: older.outcomes == {("older", "done"): 2})


@pytest.mark.parametrize("node", [37], indirect=True)
async def test_from_1_37_on_there_is_no_gap(node: Node) -> None:
    older = await node.gateway(1)
    ended: list[list[str]] = []
    node.kubelet.ended = lambda resource: ended.append(node.kubelet.serving(resource))  # type: ignore[method-assign]  # a tap
    await node.gateway(2)
    await node.kubelet.until(lambda: not older.streams)
    assert ended == [["g2"]]


@pytest.mark.parametrize("node", [37], indirect=True)
async def test_an_older_one_that_is_told_to_end_lasts_until_the_newer_one_serves(node: Node) -> None:
    older = await node.gateway(1)
    ended: list[list[str]] = []
    node.kubelet.ended = lambda resource: ended.append(node.kubelet.serving(resource))  # type: ignore[method-assign]  # a tap
    node.kubelet.hangs.clear()
    newer = await node.gateway(2, serves=False)
    await node.kubelet.until(lambda: node.kubelet.registers["g2"] > 0)
    ending = asyncio.create_task(older.end())
    await asyncio.sleep(0.05)
    assert node.kubelet.serving() == ["g1"]
    node.kubelet.hangs.set()
    await ending
    assert (ended, list(newer.streams)) == ([["g2"]], [GPU])


@pytest.mark.parametrize("node", [37], indirect=True)
async def test_an_older_one_that_is_told_to_end_waits_for_no_newer_one_for_ever(node: Node, hasty: None) -> None:
    older = await node.gateway(1)
    node.kubelet.hangs.clear()
    await node.gateway(2, serves=False)
    async with asyncio.timeout(GUARD):
        await older.end()
    node.kubelet.hangs.set()


@EVERY_CLASS
@pytest.mark.parametrize("how", ["end", "kill"])
async def test_the_older_one_takes_over_again_when_the_newer_one_goes(node: Node, how: str) -> None:
    older = await node.gateway(1)
    newer = await node.gateway(2)
    await node.kubelet.until(lambda: not older.streams)
    await (newer.end() if how == "end" else newer.kill())
    await node.kubelet.until(lambda: GPU in older.streams)
    assert node.kubelet.serving() == ["g1"]
    assert node.kubelet.troubles == []


@EVERY_CLASS
@pytest.mark.parametrize("how", ["end", "kill"])
async def test_the_newer_one_stays_when_the_older_one_goes(node: Node, how: str) -> None:
    older = await node.gateway(1)
    newer = await node.gateway(2)
    await node.kubelet.until(lambda: not older.streams)
    await (older.end() if how == "end" else older.kill())
    assert node.kubelet.serving() == ["g2"]
    assert node.kubelet.registers["g2"] == 1
    assert newer.handover.defers_to(GPU) is None


@EVERY_CLASS
async def test_ten_upgrades_in_a_row(node: Node) -> None:
    before = await node.gateway(1)
    for born_ns in range(2, 12):
        newer = await node.gateway(born_ns)
        await node.kubelet.until(lambda gone=before: not gone.streams)  # type: ignore[misc]  # bound on purpose
        await before.end()
        before = newer
    assert node.kubelet.serving() == ["g11"]
    assert sum(node.kubelet.registers.values()) == 11
    assert node.kubelet.troubles == []


async def test_each_resource_is_a_handover_of_its_own(node: Node) -> None:
    older = await node.gateway(1, [GPU, MIG])
    await node.gateway(2, [GPU, "nvidia.com/other"])
    await node.kubelet.until(lambda: GPU not in older.streams)
    assert (node.kubelet.serving(GPU), node.kubelet.serving(MIG)) == (["g2"], ["g1"])
    assert node.kubelet.serving("nvidia.com/other") == ["g2"]


async def test_a_resource_that_comes_later_is_asked_for(node: Node) -> None:
    older = await node.gateway(1, [GPU, MIG])
    newer = await node.gateway(2, [GPU])
    newer.states[MIG] = registration.start("later", "auto", "v1beta1")
    await newer.handover.take_over([older.age])
    newer.meet()
    await node.kubelet.until(lambda: node.kubelet.serving(MIG) == ["g2"])
    assert node.kubelet.troubles == []


async def test_a_resource_that_comes_later_to_the_older_one_stands_by_at_once(node: Node) -> None:
    older = await node.gateway(1, [GPU])
    await node.gateway(2, [GPU, MIG])
    older.states[MIG] = registration.start("later", "auto", "v1beta1")
    older.look()
    older.meet()
    assert older.states[MIG].phase is Phase.STANDBY
    assert node.kubelet.registers["g1"] == 1


@EVERY_CLASS
async def test_of_three_gateways_the_newest_that_lives_serves(node: Node) -> None:
    first = await node.gateway(1)
    second = await node.gateway(2)
    third = await node.gateway(3)
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g3"])
    await third.kill()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])
    assert first.handover.defers_to(GPU) == second.age
    await second.kill()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])
    assert node.kubelet.troubles == []


HOST = HOST_SERVICE_NS + 100
"""When a host service says that it was born."""


@EVERY_CLASS
@pytest.mark.parametrize("how", ["end", "kill"])
async def test_pods_roll_beside_a_host_service(node: Node, how: str) -> None:
    """The newest pod is not newer than the service; but when that goes, it takes over."""
    pod = await node.gateway(1, [GPU, MIG])
    host = await node.gateway(HOST, [GPU, MIG])
    await node.kubelet.until(lambda: not pod.streams)
    newer = await node.gateway(2, [GPU, MIG], serves=False)
    for resource in (GPU, MIG):
        await node.kubelet.until(lambda it=resource: newer.handover.defers_to(it) == host.age)  # type: ignore[misc]  # bound on purpose
    await pod.end()
    assert node.kubelet.serving(GPU) == node.kubelet.serving(MIG) == [host.name]
    assert node.kubelet.registers == {"g1": 2, host.name: 2}
    await (host.end() if how == "end" else host.kill())
    await node.kubelet.until(lambda: newer.streams.keys() == {GPU, MIG})
    assert node.kubelet.registers == {"g1": 2, host.name: 2, "g2": 2}
    again = await node.gateway(HOST + 1, [GPU, MIG])
    await node.kubelet.until(lambda: not newer.streams)
    assert node.kubelet.registers == {"g1": 2, host.name: 2, "g2": 2, again.name: 2}
    assert node.kubelet.troubles == []


@EVERY_CLASS
async def test_both_start_at_the_same_instant(node: Node) -> None:
    async with asyncio.TaskGroup() as group:
        for born_ns in (1, 2):
            group.create_task(node.gateway(born_ns, serves=False))
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])


async def test_the_older_one_starts_after_the_newer_one(node: Node) -> None:
    """It was born earlier, and took longer to come up."""
    newer = await node.gateway(2)
    older = await node.gateway(1, serves=False)
    await node.kubelet.until(lambda: older.handover.defers_to(GPU) == newer.age)
    assert node.kubelet.registers == {"g2": 1}


@EVERY_CLASS
async def test_no_kubelet_is_there(node: Node, unhurried: None) -> None:
    """Nobody can report anything then, and nothing is taken back."""
    node.kubelet.up = False
    older = await node.gateway(1, serves=False)
    newer = await node.gateway(2, serves=False)
    await asyncio.sleep(3 * machine.REPORT_WAIT)  # It is the absence of events that is checked.
    assert older.handover.defers_to(GPU) == newer.age
    node.kubelet.up = True
    node.kubelet.restart()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])
    assert node.kubelet.registers == {"g2": 1}


@EVERY_CLASS
async def test_the_kubelet_restarts_in_the_middle(node: Node) -> None:
    await node.gateway(1)
    node.kubelet.hangs.clear()
    newer = await node.gateway(2, serves=False)
    assert node.kubelet.serving() == ([] if node.kubelet.minor < 37 else ["g1"])
    node.kubelet.hangs.set()
    node.kubelet.restart()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])
    assert newer.states[GPU].phase is Phase.SERVING


async def test_the_older_ones_register_is_waited_for(node: Node) -> None:
    """Between its Register and the kubelet's call no stream may end, and no other Register be sent."""
    node.kubelet.hangs.clear()
    await node.gateway(1, serves=False)
    newer = await node.gateway(2, serves=False)
    assert newer.handover.defers_to(GPU) is not None
    assert node.kubelet.registers == {"g1": 1}
    node.kubelet.hangs.set()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])
    assert node.kubelet.registers == {"g1": 1, "g2": 1}
    assert node.kubelet.troubles == []


# A newer one that can't.


async def refused(node: Node) -> Gateway:
    """Start a newer gateway that the kubelet refuses."""
    newer = Gateway(node, 2, [GPU])
    node._made.append(newer)
    node.kubelet.refuses.add(newer)
    await newer.start()
    return newer


@EVERY_CLASS
async def test_a_newer_one_that_is_refused_gives_it_back_and_asks_again(node: Node, unhurried: None) -> None:
    older = await node.gateway(1)
    newer = await refused(node)
    await node.kubelet.until(lambda: node.kubelet.registers["g2"] > 0)
    await node.kubelet.until(lambda: ("older", "back") in older.outcomes and GPU in older.streams)
    await node.kubelet.until(lambda: newer.handover.defers_to(GPU) == older.age)
    node.kubelet.refuses.clear()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])
    assert node.kubelet.troubles == []
    # How often it was refused until then is nobody's promise.
    assert (set(newer.outcomes), newer.outcomes["newer", "done"]) == ({("newer", "back"), ("newer", "done")}, 1)


async def test_one_that_would_leave_it_to_another_at_once_does_not_ask_again(node: Node, hasty: None) -> None:
    """Of three the newest can't talk and stands still: the oldest one serves, and would yield to nobody who serves."""
    older = await node.gateway(1)
    newer = await refused(node)
    await node.kubelet.until(lambda: ("older", "back") in older.outcomes and GPU in older.streams)
    await node.kubelet.until(lambda: newer.handover.defers_to(GPU) == older.age)
    stream, again = older.streams[GPU], iter([True, True, False])
    newer.silent = lambda: next(again) and older.streams.get(GPU) == stream
    node.kubelet.refuses.clear()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])
    assert next(again, None) is None


async def test_the_older_one_ends_while_the_newer_one_stands_by(node: Node, hasty: None) -> None:
    older = await node.gateway(1)
    await refused(node)
    await node.kubelet.until(lambda: ("older", "back") in older.outcomes and GPU in older.streams)
    node.kubelet.refuses.clear()
    await older.kill()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])


# A partner that isn't one: it speaks by hand.

NEWER, YOUNGEST, OLDER = Age(9, "00000009"), Age(10, "0000000a"), Age(0, "00000000")


class ByHand:
    """A newer partner of ``older``, over a real connection."""

    def __init__(self, connection: ControlConnection, age: Age) -> None:
        self.connection, self.age = connection, age

    async def say(self, say: object, resources: object = (GPU,), **more: object) -> None:
        message = {"op": talked.OP, "say": say, "resources": resources, "from": _from(self.age)}
        await self.connection.send(message | more)

    async def hears(self) -> str | None:
        async with asyncio.timeout(GUARD):
            message = await self.connection.receive()
        return None if message is None else str(message.get("say", message.get("error")))


def _from(age: Age) -> dict[str, object]:
    return {"born_ns": age.born_ns, "token": age.token}


@contextlib.asynccontextmanager
async def by_hand(older: Gateway, age: Age = NEWER) -> AsyncIterator[ByHand]:
    connection = await control.connect(older.server.path, 1)
    try:
        yield ByHand(connection, age)
    finally:
        connection.abort()


async def test_what_an_older_one_says(node: Node) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("ask")
        assert await newer.hears() == "yours"
        assert node.kubelet.serving() == []
        await newer.say("serving")
        await newer.say("released")
        await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])
        await newer.say("ask")
        assert await newer.hears() == "mine"


async def test_a_late_ask_ends_no_stream(node: Node) -> None:
    """The newer one has gone on: its Register may be in flight, and the kubelet of 1.25 to 1.36 would disconnect it."""
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("ask", until_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME) - 1)
        assert await newer.hears() == "first"
        assert node.kubelet.serving() == ["g1"]
        await newer.say("serving")
        await node.kubelet.until(lambda: node.kubelet.serving() == [])


async def test_a_newer_one_whose_register_was_crossed_registers_once_more(node: Node) -> None:
    older = await node.gateway(1)
    newer = await node.gateway(2)
    [partner] = older.handover._partners.values()
    before = newer.streams[GPU]
    partner.say(Say.ANEW, GPU)
    await node.kubelet.until(lambda: newer.streams.get(GPU, before) != before)
    assert node.kubelet.serving() == ["g2"]


async def test_a_newer_one_that_never_reports_loses_it(node: Node, hasty: None) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("ask")
        assert [await newer.hears() for _ in range(3)] == ["yours", "revoke", "mine"]
        await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])


async def test_a_newer_one_that_was_stopped_loses_it(node: Node, hasty: None) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("serving")
        assert [await newer.hears() for _ in range(3)] == ["anew", "revoke", "mine"]
        await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])


async def test_a_newer_one_that_hangs_while_the_records_lack_it_loses_it(node: Node, hasty: None) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("serving")
        await node.kubelet.until(lambda: node.kubelet.serving() == [])
        older.handover.unserved(GPU)
        assert [await newer.hears() for _ in range(3)] == ["anew", "revoke", "mine"]
        await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])


async def test_two_newer_ones_that_say_what_isnt_so_lose_it(node: Node, hasty: None) -> None:
    """Neither's word keeps it from the older one."""
    older = await node.gateway(1)
    async with by_hand(older) as newer, by_hand(older, YOUNGEST) as other:
        for one in (newer, other):
            await one.say("serving")
        await node.kubelet.until(lambda: node.kubelet.serving() == [] and len(older.handover._partners) == 2)
        await node.kubelet.until(lambda: older.handover.defers_to(GPU) == YOUNGEST)
        for _ in range(2):
            older.handover.unserved(GPU)
            for one in (newer, other):
                heard = await one.hears()
                if heard == "anew":  # The older one may still have served when this one spoke.
                    heard = await one.hears()
                assert heard == "revoke" if _ == 0 else "mine"
                if _ == 0:
                    await one.say("serving")
            await asyncio.sleep(0.01)
        await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])


async def test_of_several_that_dont_serve_all_are_asked_at_once(node: Node) -> None:
    """The middle one of three stands by for the older one, too, which took it back once: it asks both."""
    oldest = await node.gateway(1)
    middle = await node.gateway(2)
    [asked] = middle.handover._partners.values()
    async with by_hand(oldest, YOUNGEST) as newest, by_hand(middle, YOUNGEST) as newer:
        for one in (newest, newer):
            await one.say("serving")
        await node.kubelet.until(lambda: node.kubelet.serving() == [] and len(middle.handover._partners) == 2)
        asked.states[GPU] = machine.State(Newer.RESTING, Standing.IDLE)
        assert await newer.hears() == "anew"
        middle.handover.unserved(GPU)
        stages = [partner.states[GPU].stage for partner in middle.handover._partners.values()]
        assert stages == [Newer.ASKING, Older.CHECKING]
        assert [await newer.hears() for _ in range(2)] == ["revoke", "mine"]
        await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])


async def test_of_those_that_are_left_the_newest_takes_over_whoever_sees_first_that_nobody_serves(node: Node) -> None:
    """Or the oldest one would take it, and hand it over a second time soon after."""
    oldest = await node.gateway(1)
    middle = await node.gateway(2)
    async with by_hand(oldest, YOUNGEST) as newest, by_hand(middle, YOUNGEST) as newer:
        for one in (newest, newer):
            await one.say("serving")
        await node.kubelet.until(lambda: node.kubelet.serving() == [] and len(middle.handover._partners) == 2)
        await node.kubelet.until(lambda: oldest.handover.defers_to(GPU) == middle.handover.defers_to(GPU) == YOUNGEST)
        oldest.handover.unserved(GPU)
        await node.kubelet.until(lambda: node.kubelet.serving() != [])
        assert node.kubelet.serving() == ["g2"]
        await node.kubelet.until(lambda: oldest.handover.defers_to(GPU) == middle.age)


async def test_who_rests_with_several_older_ones_asks_all_of_them_at_once(node: Node) -> None:
    """Or one would give it to a gateway that still stands by for another one, and nobody would serve."""
    await node.gateway(1)
    await node.gateway(2)
    newest = await node.gateway(3)
    partners = list(newest.handover._partners.values())
    for partner in partners:
        partner.states[GPU] = machine.State(Newer.RESTING, Standing.IDLE)
    newest.handover._fire(partners[0], GPU)
    assert [partner.states[GPU].stage for partner in partners] == [Newer.ASKING] * 2


async def test_who_took_it_back_and_cannot_serve_it_keeps_it_from_nobody(node: Node) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("ask")
        assert await newer.hears() == "yours"
        await newer.say("released")
        await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])
        older.feed(GPU, events.Withhold("its list fits no message"))
        await newer.say("ask")
        assert await newer.hears() == "yours"


async def test_a_newer_one_that_is_registering_is_waited_for(node: Node, hasty: None) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("ask")
        assert [await newer.hears() for _ in range(2)] == ["yours", "revoke"]
        await newer.say("busy")
        await asyncio.sleep(3 * machine.ANSWER_WAIT)  # It is the absence of events that is checked.
        assert node.kubelet.serving() == []
        await newer.say("released")
        await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])


@pytest.mark.parametrize("after", [["ask"], ["ask", "serving"], ["serving"], ["going"]], ids=" ".join)
async def test_a_newer_one_that_dies(node: Node, after: list[str]) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        for say in after:
            await newer.say(say)
            if say == "ask":
                assert await newer.hears() == "yours"
        if "serving" in after:
            await node.kubelet.until(lambda: node.kubelet.serving() == [])
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])
    assert node.kubelet.troubles == []


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"say": "later"}, id="a word of a later release"),
        pytest.param({"say": ["ask"]}, id="no word"),
        pytest.param({"say": None}, id="none at all"),
        pytest.param({"op": "status", "say": "ask"}, id="another op in between"),
        pytest.param({"say": "mine"}, id="an older one's word"),
        pytest.param({"say": "busy"}, id="an answer to nothing"),
        pytest.param({"say": "ask", "resources": []}, id="of nothing"),
    ],
)
async def test_what_is_not_understood_is_ignored(node: Node, message: dict[str, Any]) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("released")
        await newer.connection.send({"op": talked.OP, "resources": [GPU], "from": _from(NEWER)} | message)
        assert node.kubelet.serving() == ["g1"]
        await newer.say("ask", more="of a later release")
        assert await newer.hears() == "yours"


def test_a_message_has_room_for_as_many_names_as_one_says() -> None:
    names = [f"a.b/{n}" for n in range(talked.IN_ONE_MESSAGE)]
    assert talked.read(talked.written(NEWER, Say.ASK, names, 0) | {"v": control.VERSION}) == (Say.ASK, names)


def test_a_refusal_is_no_word_of_a_later_release() -> None:
    with pytest.raises(talked.NonsenseError, match="refused"):
        talked.read({"v": control.VERSION, "error": "this one ends"})


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"resources": GPU}, id="a name for a list"),
        pytest.param({"resources": None}, id="no resources"),
        pytest.param({"resources": [1]}, id="no names"),
        pytest.param({"resources": [""]}, id="an empty name"),
        pytest.param({"resources": ["x" * 318]}, id="a name too long"),
        pytest.param({"resources": [f"a.b/{n}" for n in range(65)]}, id="too many at once"),
    ],
)
async def test_nonsense_ends_the_conversation(node: Node, message: dict[str, Any]) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("ask")
        assert await newer.hears() == "yours"
        await newer.connection.send({"op": talked.OP, "say": "serving", "from": _from(NEWER)} | message)
        assert await newer.hears() is None
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])
    assert older.outcomes == {("older", "connection lost"): 1}


async def test_a_partner_cannot_make_it_remember_without_end(node: Node) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        for start in range(0, partners.MAX_RESOURCES + 64, 64):
            await newer.say("ask", [f"a.b/{n}" for n in range(start, start + 64)])
        said = []
        while (word := await newer.hears()) is not None:
            said.append(word)
    assert set(said) <= {"yours"}
    assert older.handover._partners == {}


@pytest.mark.parametrize(
    "sender",
    [
        pytest.param(_from(OLDER), id="an older one"),
        pytest.param(_from(Age(1, "00000001")), id="we ourselves"),
        pytest.param({"born_ns": 9, "token": "../../x"}, id="no token"),
        pytest.param({"born_ns": "9", "token": "00000009"}, id="no age"),
        pytest.param({"born_ns": -1, "token": "00000009"}, id="before the boot"),
        pytest.param({"born_ns": 10**18, "token": "00000009"}, id="in the future"),
        pytest.param(None, id="nobody"),
        pytest.param([], id="nothing"),
    ],
)
async def test_only_a_newer_gateway_may_ask(node: Node, sender: object) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.connection.send({"op": talked.OP, "say": "ask", "resources": [GPU], "from": sender})
        assert "expected the age of a gateway newer" in str(await newer.hears())
    assert node.kubelet.serving() == ["g1"]


async def test_a_gateway_that_connects_twice_has_one_lease(node: Node) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as lost, by_hand(older) as newer:
        await lost.say("serving")
        await node.kubelet.until(lambda: node.kubelet.serving() == [])
        await newer.say("serving")
        assert [await lost.hears() for _ in range(2)] == ["anew", None]
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])


Talk = Callable[[ControlConnection, dict[str, Any]], Any]


async def _silent(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    while await connection.receive() is not None:
        pass


def _answers(message: dict[str, Any]) -> Talk:
    async def answer(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
        await connection.send({"op": talked.OP, "resources": [GPU]} | message)
        await _silent(connection, {})

    return answer


async def _hangs_up(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    connection.abort()


async def _keeps_saying_wait(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    for say in ("wait", "wait", "yours"):
        await connection.send({"op": talked.OP, "resources": [GPU], "say": say})
    await _silent(connection, {})


@pytest.mark.parametrize(
    "talk",
    [
        pytest.param(_silent, id="it is stopped"),
        pytest.param(_hangs_up, id="it dies"),
        pytest.param(_answers({"error": "unknown op"}), id="it is of an older release"),
        pytest.param(_answers({"say": "later"}), id="it is of a later release"),
        pytest.param(_answers({"say": "ask"}), id="it talks like a newer one"),
        pytest.param(_answers({"say": "yours", "resources": ["not.asked/for"]}), id="it gives what nobody asked for"),
        pytest.param(_answers({"say": "yours", "resources": 5}), id="it talks nonsense"),
        pytest.param(_keeps_saying_wait, id="it says wait twice"),
    ],
)
async def test_whatever_an_older_one_does_the_newer_one_serves(node: Node, talk: Talk) -> None:
    """The older one's own streams are none of its words' business here: this one has none."""
    server = ControlServer(socket_path(node.folder, OLDER.token), {talked.OP: talk})
    await server.start()
    newer = Gateway(node, 2, [GPU])
    node._made.append(newer)
    async with asyncio.timeout(GUARD):
        await newer.handover.take_over([OLDER])
    assert newer.handover.defers_to(GPU) is None
    assert all(partner.states.keys() <= {GPU} for partner in newer.handover._partners.values())
    await newer.start()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])
    await server.close()


async def test_an_older_one_is_met_once_by_two_looks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    met, connect = list[Path](), control.connect

    async def counted(path: Path, seconds: float) -> ControlConnection:
        met.append(path)
        return await connect(path, seconds)

    monkeypatch.setattr(control, "connect", counted)
    server = ControlServer(socket_path(node.folder, OLDER.token), {talked.OP: _answers({"say": "yours"})})
    await server.start()
    newer = Gateway(node, 2, [GPU])
    node._made.append(newer)
    await asyncio.gather(*(newer.handover.take_over([OLDER]) for _ in range(2)))
    assert len(met) == 1
    await server.close()


async def test_so_many_older_ones_are_met_and_the_newest_of_them(node: Node) -> None:
    newest = await node.gateway(99)
    others = [Age(number, f"{number:08x}") for number in range(1, 2 * handover.MAX_PARTNERS)]
    met = [*newest.handover._strangers(others)]
    assert met == others[: -handover.MAX_PARTNERS - 1 : -1]


async def test_the_end_waits_until_the_last_words_are_said_and_no_longer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "FAREWELL", 3600.0)
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("ask")
        assert await newer.hears() == "yours"
        [partner] = older.handover._partners.values()
        goes_on, send = asyncio.Event(), partner.connection.send

        async def send_slowly(message: Mapping[str, Any]) -> None:
            await goes_on.wait()
            await send(message)

        monkeypatch.setattr(partner.connection, "send", send_slowly)
        partner.say(Say.MINE, GPU)
        closing = asyncio.create_task(older.handover.close())
        await asyncio.wait([closing], timeout=0.05)
        goes_on.set()
        assert await newer.hears() == "mine"
        async with asyncio.timeout(GUARD):
            await closing
        assert await newer.hears() is None


async def test_a_lease_that_ends_as_it_begins_is_over(node: Node) -> None:
    server = ControlServer(socket_path(node.folder, OLDER.token), {talked.OP: _answers({"say": "yours"})})
    await server.start()
    newer = Gateway(node, 2, [GPU])
    node._made.append(newer)
    await newer.handover._meet(OLDER)
    newer.handover.part(OLDER.token)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not newer.handover.talks
    await server.close()


async def test_a_lease_that_was_ended_early_ends_once(node: Node) -> None:
    older = await node.gateway(1)
    async with by_hand(older) as newer:
        await newer.say("ask")
        assert await newer.hears() == "yours"
        older.handover.part(NEWER.token)
        assert await newer.hears() is None
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g1"])
    await older.handover.close()
    assert older.outcomes == {("older", "connection lost"): 1}
    assert older.handover._rests.seconds == {NEWER.token: 2 * partners.AGAIN}


async def test_an_older_one_that_could_not_be_spoken_to_is_asked_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ever more seldom: it may be of a release that will never talk."""
    monkeypatch.setattr(partners, "AGAIN", 0.02)
    monkeypatch.setattr(partners, "AGAIN_MOST", 0.1)
    tries: list[float] = []
    rests: list[float] = []

    async def refuse(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
        tries.append(time.monotonic())
        node.kubelet.pulse()
        connection.abort()

    server = ControlServer(socket_path(node.folder, OLDER.token), {talked.OP: refuse})
    newer = Gateway(node, 2, [GPU])
    node._made.append(newer)
    begin = newer.handover._rests.begin

    def begun(peer: Age, now: float) -> float:
        rests.append(begin(peer, now))
        return rests[-1]

    monkeypatch.setattr(newer.handover._rests, "begin", begun)
    newer.look = lambda: newer._spawn(newer.handover.take_over([OLDER]))  # type: ignore[method-assign]  # OLDER is no Gateway
    await newer.handover.take_over([OLDER])
    assert tries == []
    await server.start()
    await node.kubelet.until(lambda: len(tries) == 4)
    assert rests[:4] == [0.02, 0.04, 0.08, 0.1]
    assert all(after - before > 0.04 for before, after in pairwise(tries)), "it is left in peace that long"
    assert newer.handover._rests.seconds == {OLDER.token: partners.AGAIN_MOST}
    await server.close()


async def test_a_conversation_forgets_the_failures_before_it(node: Node) -> None:
    newer = Gateway(node, 2, [GPU])
    node._made.append(newer)
    await newer.handover.take_over([OLDER])
    newer.handover._rests.until.clear()
    server = ControlServer(socket_path(node.folder, OLDER.token), {talked.OP: _answers({"say": "yours"})})
    await server.start()
    await newer.handover.take_over([OLDER])
    [partner] = newer.handover._partners.values()
    partner.connection.abort()
    await node.kubelet.until(lambda: not newer.handover._partners)
    assert newer.handover._rests.seconds == {OLDER.token: 2 * partners.AGAIN}
    await server.close()


def test_of_very_many_gateways_the_times_of_the_last_are_known() -> None:
    times = dict[str, float]()
    for number in range(10 * partners._MAX_REMEMBERED):
        partners.remember(times, Age(number, f"{number:08x}"), number)
        assert times[f"{number:08x}"] == number
        assert len(times) <= partners._MAX_REMEMBERED


async def test_who_ends_talks_to_nobody_new(node: Node) -> None:
    """What it said would be its last word: the newer one goes on without it."""
    older = await node.gateway(1)
    await older.handover.close()
    async with by_hand(older) as newer:
        await newer.say("ask")
        assert "this one ends" in str(await newer.hears())


async def test_what_a_partner_does_not_read_is_bounded() -> None:
    class Deaf:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    deaf = Deaf()
    partner = partners.Partner(NEWER, cast("ControlConnection", deaf))
    for _ in range(partners._MAX_OUTBOX):
        for say in (Say.MINE, Say.REVOKE):
            partner.say(say, GPU)
    assert (len(partner.outbox), deaf.aborted) == (partners._MAX_OUTBOX, True)


async def test_another_protocol_version_is_no_conversation(node: Node) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'{"v":2,"op":"handover","say":"mine","resources":["nvidia.com/gpu"]}\n')
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(speak, socket_path(node.folder, OLDER.token))
    newer = Gateway(node, 2, [GPU])
    node._made.append(newer)
    await newer.handover.take_over([OLDER])
    assert newer.handover.defers_to(GPU) is None
    server.close()


async def test_an_older_one_that_keeps_it_is_stood_by_for(node: Node) -> None:
    server = ControlServer(socket_path(node.folder, OLDER.token), {talked.OP: _answers({"say": "mine"})})
    await server.start()
    newer = Gateway(node, 2, [GPU])
    node._made.append(newer)
    await newer.handover.take_over([OLDER])
    assert newer.handover.defers_to(GPU) == OLDER
    await server.close()
    await node.kubelet.until(lambda: newer.handover.defers_to(GPU) is None)


# Gateways that can't talk: age alone decides, as before.


async def test_a_newer_gateway_with_another_state_directory_serves(node: Node) -> None:
    await node.gateway(1)
    await node.elsewhere(2)
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])


@pytest.mark.parametrize(
    ("own", "theirs", "decides"),
    [
        pytest.param(True, True, True, id="it can talk: it is given time to ask"),
        pytest.param(True, False, False, id="an older release: it won't"),
        pytest.param(False, True, False, id="our own socket could not be had: it can't"),
    ],
)
async def test_a_newer_gateway_appears_without_a_word(node: Node, own: bool, theirs: bool, decides: bool) -> None:
    older = await node.gateway(1)
    for there, age in ((own, older.age), (theirs, NEWER)):
        if there:
            socket_path(node.folder, age.token).touch()
        else:
            socket_path(node.folder, age.token).unlink(missing_ok=True)
    assert older.handover.decides(NEWER, GPU) is decides
    assert not older.handover.decides(NEWER, MIG)  # Not served here: nothing is to be ended.


async def test_the_time_to_ask_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "GRACE", 0.01)
    older = await node.gateway(1)
    looked = asyncio.Event()
    older.look = looked.set  # type: ignore[method-assign]  # a tap
    socket_path(node.folder, NEWER.token).touch()
    assert older.handover.decides(NEWER, GPU)
    async with asyncio.timeout(GUARD):
        await looked.wait()
    assert not older.handover.decides(NEWER, GPU)


async def test_a_broken_connection_while_the_newer_one_stands_by_gives_it_its_turn(node: Node, hasty: None) -> None:
    """Age alone decides then, and at once: the older one ends its streams before the newer one registers."""
    older = await node.gateway(1)
    newer = await refused(node)
    await node.kubelet.until(lambda: newer.handover.defers_to(GPU) == older.age and GPU in older.streams)
    node.kubelet.refuses.clear()
    [partner] = older.handover._partners.values()
    partner.connection.abort()
    await node.kubelet.until(lambda: node.kubelet.serving() == ["g2"])
    assert node.kubelet.troubles == []


async def test_a_broken_connection_between_the_living_changes_nothing(node: Node) -> None:
    older = await node.gateway(1)
    newer = await node.gateway(2)
    await node.kubelet.until(lambda: not older.streams)
    [partner] = newer.handover._partners.values()
    partner.connection.abort()
    await node.kubelet.until(lambda: not older.handover._partners)
    assert node.kubelet.serving() == ["g2"]
    assert older.states[GPU].phase is Phase.STANDBY
    assert node.kubelet.registers == {"g1": 1, "g2": 1}
