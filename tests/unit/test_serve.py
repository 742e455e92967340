"""The daemon in one process, real sockets, a kubelet's side of our own that speaks bytes: what it is told, and refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import structlog
from msgspec.structs import replace
from structlog.testing import capture_logs
from structlog.typing import EventDict

from adapters.dialect import Dialect, Level, Wire
from adapters.registry import DIALECTS, by_name
from devices.life.merging import Merged, Sticky
from devices.life.states import Entry, State
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    Fault,
    Field,
    Health,
    Options,
    PreferredRequest,
    RefusedError,
    Registration,
    Sayable,
    Trouble,
    TroubleKind,
)
from devices.policy import Policy
from devices.source import NOT_TOLD, DeviceSource, Fate, GiveUpError, Hindrance, Inventory, Listing, Partial
from gateway import daemon as shell
from gateway import folder as folders
from gateway import following
from gateway import lists as offering
from gateway.age import Age
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.handover import peers, talk
from gateway.handover.instance import Instance, begin, socket_name
from gateway.handover.peers import Peers
from gateway.kubelet import drift, watch
from gateway.kubelet import view as kubelet_view
from gateway.kubelet.beliefs import Look
from gateway.kubelet.identity import KubeletId
from gateway.kubelet.view import Untold, View
from gateway.memory import scribe
from gateway.memory.file import LedgerError
from gateway.memory.ledger import Ledger, LedgerSnapshot, Written
from gateway.registration import devicelist, machine, registrar, serve, spelled
from gateway.registration.devicelist import DeviceList
from gateway.registration.events import Event, KubeletUp, Lacking, Phase, Renew, StandBy
from gateway.registration.serve import DevicePlugin
from gateway.registration.spelled import Parts
from gateway.registration.turns import Turns
from gateway.tally import Confirmation, Tally
from gateway.telling import probes, readiness
from gateway.telling.commands import Commands
from gateway.wires import control, rpc
from gateway.wires.control import ControlError

GPU = "nvidia.com/gpu"


class Source(DeviceSource):
    """A device source whose inventory a test sets, and that answers with CDI names or with a variable."""

    name = "test"

    def __init__(self, inventory: Inventory) -> None:
        self.inventories: asyncio.Queue[Inventory | Exception] = asyncio.Queue()
        self.inventories.put_nowait(inventory)
        self.cdi = False
        self.hindered: tuple[Hindrance, ...] = ()

    async def watch(self) -> AsyncGenerator[Inventory]:
        while True:
            found = await self.inventories.get()
            if isinstance(found, Exception):
                raise found
            yield found

    async def answer(self, resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        if self.cdi:
            return ContainerAnswer(cdi_devices=tuple(f"{resource}={one}" for one in request.device_ids))
        return ContainerAnswer(
            envs={"IDS": ",".join(request.device_ids), "CDI": str(Field.CDI_DEVICES in sayable.said)}
        )

    def fate(self, resource: str, device_id: str) -> Fate:
        return Fate.LOST

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        return tuple(sorted(request.available))[: request.size]

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        raise RefusedError(Fault.FAILED_PRECONDITION, f"{resource} is busy")

    def claims(self, resource: str) -> bool:
        return True

    def hindrances(self) -> tuple[Hindrance, ...]:
        return self.hindered

    def adopt(self, policy: Policy) -> None:
        pass

    async def release(self, device_ids: Collection[str]) -> Collection[str]:
        return device_ids

    async def acquire(self, device_ids: Collection[str]) -> Collection[str]:
        return device_ids


class Kubelet:
    """The kubelet's side: takes Registers in one dialect, and makes the calls that a test asks for."""

    asks_first = False
    """Whether it asks for the options before it answers a Register, as kubelets from 1.25 on do."""

    def __init__(self, folder: Path, api: str, user_agent: str) -> None:
        self.dialect: Dialect = by_name(api)
        self.registrations: asyncio.Queue[Registration] = asyncio.Queue()
        self.deadline: float | None = None
        """How long a stream of its may live, in seconds; a kubelet says nothing of that."""
        self._folder, self._user_agent = folder, user_agent
        self._server = grpc.aio.server()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._open: list[AsyncGenerator[tuple[Device, ...]]] = []

    async def start(self) -> None:
        async def register(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            registration = self.dialect.decode_register(request)
            if registration.version != self.dialect.name:
                await context.abort(grpc.StatusCode.UNKNOWN, "unsupported API version by the Kubelet registry")
            if self.asks_first:
                await self.call(registration, "GetDevicePluginOptions")
            self.registrations.put_nowait(registration)
            return b""

        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Register": grpc.unary_unary_rpc_method_handler(register)
        }
        service = grpc.method_handlers_generic_handler(self.dialect.registration_service, handlers)
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix:{self._folder / 'kubelet.sock'}")
        await self._server.start()

    async def registered(self) -> Registration:
        async with asyncio.timeout(10):
            return await self.registrations.get()

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            options = [("grpc.primary_user_agent", self._user_agent), ("grpc.max_receive_message_length", -1)]
            self._channels[endpoint] = grpc.aio.insecure_channel(f"unix:{self._folder / endpoint}", options=options)
        return self._channels[endpoint]

    async def call(self, to: Registration, method: str, request: bytes = b"") -> bytes:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel(to.endpoint).unary_unary(
            f"/{self.dialect.plugin_service}/{method}"
        )
        return await call(request, timeout=10)

    def lists(self, to: Registration) -> AsyncGenerator[tuple[Device, ...]]:
        """Call ListAndWatch; the stream is open until it is closed, or the kubelet is."""
        self._open.append(lists := self._lists(to))
        return lists

    async def _lists(self, to: Registration) -> AsyncGenerator[tuple[Device, ...]]:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel(to.endpoint).unary_stream(
            f"/{self.dialect.plugin_service}/ListAndWatch"
        )
        stream = call(b"", timeout=self.deadline)
        try:
            async for data in stream:
                yield self.dialect.decode_list(data)
        finally:
            stream.cancel()

    async def allocate(self, to: Registration, *containers: Sequence[str]) -> tuple[ContainerAnswer, ...]:
        wire = self.dialect.encode_allocate_request([ContainerRequest(tuple(ids)) for ids in containers])
        return self.dialect.decode_allocate_answer(await self.call(to, "Allocate", wire.data))

    async def aclose(self) -> None:
        await asyncio.gather(*(lists.aclose() for lists in self._open))
        await asyncio.gather(*(channel.close() for channel in self._channels.values()), self._server.stop(grace=0))


class Node:
    """A gateway and a kubelet on one socket directory."""

    def __init__(self, folder: Path, source: Source, kubelet: Kubelet, gateway: Gateway) -> None:
        self.folder, self.source, self.kubelet = folder, source, kubelet
        self._gateway = gateway
        self._run: asyncio.Future[int] = asyncio.ensure_future(gateway.run())

    async def end(self) -> None:
        self._gateway._end(0)
        assert await self.ended() == 0

    async def ended(self) -> int:
        """Wait for the end; give the exit status. Once told, it counts as an orderly one."""
        async with asyncio.timeout(10):
            status = await self._run
        self._run = asyncio.get_running_loop().create_future()
        self._run.set_result(0)
        return status

    def ledger(self) -> dict[str, object]:
        content = json.loads((self.folder / "state" / "ledger.json").read_text())
        announced: dict[str, object] = content["resources"][GPU]["announced"]
        return announced


Make = Callable[..., Awaitable[Node]]


@pytest.fixture
async def make(logs: asyncio.Queue[EventDict], folder: Path) -> AsyncIterator[Make]:
    (folder / "dp").mkdir()
    nodes: list[Node] = []

    async def run(
        inventory: Inventory, api: str = "v1beta1", user_agent: str = "grpc-go/1.82.1", minor: int | None = None
    ) -> Node:
        kubelet, source = Kubelet(folder / "dp", api, user_agent), Source(inventory)
        await kubelet.start()
        settings = Settings(socket_dir=folder / "dp", state_dir=folder / "state", kubelet_minor=minor)
        nodes.append(node := Node(folder, source, kubelet, Gateway(settings, source)))
        return node

    yield run
    for node in nodes:
        await node.end()
        await node.kubelet.aclose()


@pytest.fixture
def logs() -> Iterator[asyncio.Queue[EventDict]]:
    """What the gateway says, awaitable."""
    queue: asyncio.Queue[EventDict] = asyncio.Queue()

    def keep(_logger: object, level: str, event: EventDict) -> EventDict:
        queue.put_nowait({**event, "level": level})
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    yield queue
    structlog.reset_defaults()


async def told(logs: asyncio.Queue[EventDict], event: str) -> EventDict:
    async with asyncio.timeout(20):
        while True:
            said = await logs.get()
            if said["event"] == event:
                return said


async def test_what_keeps_it_waiting_is_said_again_and_again(
    logs: asyncio.Queue[EventDict], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "FOLDER_AGAIN", 0.001)
    monkeypatch.setattr(folders, "FOLDER_TOLD", 0.005)
    settings = Settings(socket_dir=folder / "dp", state_dir=folder / "state")
    run = asyncio.ensure_future((gateway := Gateway(settings, Source({}))).run())
    try:
        for _ in range(2):
            said = await told(logs, "waiting for the socket directory")
            assert (said["level"], said["folder"]) == ("warning", str(folder / "dp"))
            assert f"the nearest one is {folder}" in said["reason"]
        (folder / "dp").mkdir()
        await told(logs, "waiting for a kubelet")
    finally:
        gateway._end(0)
        assert await run == 0


async def test_a_step_of_the_start_that_breaks_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "dp").mkdir()
    gateway = Gateway(Settings(socket_dir=folder / "dp", state_dir=folder / "state"), Source(inventory(A)))

    async def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway.others.ability, "wait", broken)
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(10):
            await gateway.run()


async def test_one_that_waits_for_its_folder_can_be_asked_and_told(
    logs: asyncio.Queue[EventDict], folder: Path
) -> None:
    settings = Settings(socket_dir=folder / "dp", state_dir=folder / "state")
    run = asyncio.ensure_future((gateway := Gateway(settings, Source(inventory(A)))).run())
    try:
        await told(logs, "waiting for the socket directory")
        [path] = control.sockets(folder / "state")
        assert str(folder) in (await control.ask(path, {"op": "status"}, 10))["status"]["waits_for"]
        await control.ask(path, {"op": "cordon", "id": "a", "reason": "ticket 4711"}, 10)
        assert json.loads((folder / "state" / "ledger.json").read_text())["cordons"].keys() == {"a"}
        (folder / "dp").mkdir()
        await told(logs, "waiting for a kubelet")
        status = (await control.ask(path, {"op": "status"}, 10))["status"]
        assert (status["waits_for"], status["resources"][0]["states"][0]["state"]) == ("", "cordoned")
    finally:
        gateway._end(0)
        assert await run == 0


async def served(node: Node, logs: asyncio.Queue[EventDict]) -> AsyncGenerator[tuple[Device, ...]]:
    """Wait until the first list has come and Register's answer has been taken in; give the lists."""
    lists = node.kubelet.lists(await node.kubelet.registered())
    await anext(lists)
    await told(logs, "registered")
    return lists


def inventory(*devices: Device, resource: str = GPU, options: Options | None = None) -> Inventory:
    return {resource: Listing(devices, options or Options())}


A, B, ILL = Device("a", numa_nodes=(0,)), Device("b"), Device("ill", Health.UNHEALTHY)
FORGOTTEN = {"a": (drift.Earlier(("default/pod/main",), 1.0),)}


async def test_options_are_said_twice(make: Make) -> None:
    options = Options(pre_start_required=True, preferred_allocation=True)
    kubelet = (await make(inventory(A, options=options))).kubelet
    registration = await kubelet.registered()
    asked = kubelet.dialect.decode_options(await kubelet.call(registration, "GetDevicePluginOptions"))
    assert (registration.options, asked) == (options, options)


async def test_ids_are_durable_before_they_are_sent(make: Make) -> None:
    node = await make(inventory(A))
    lists = node.kubelet.lists(await node.kubelet.registered())
    assert ([one.id for one in await anext(lists)], set(node.ledger())) == (["a"], {"a"})
    node.source.inventories.put_nowait(inventory(A, B))
    assert ([one.id for one in await anext(lists)], set(node.ledger())) == (["a", "b"], {"a", "b"})


async def test_an_illness_is_told_while_the_disk_is_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await make(inventory(A))
    lists = node.kubelet.lists(await node.kubelet.registered())
    assert await anext(lists) == (A,)
    disk, save = threading.Event(), Ledger.save

    def slow(ledger: Ledger, snapshot: LedgerSnapshot) -> Written:
        disk.wait(60)
        return save(ledger, snapshot)

    monkeypatch.setattr(Ledger, "save", slow)
    monkeypatch.setattr(scribe, "PATIENCE", 3600.0)
    trouble = Trouble("Xid 79", TroubleKind.RESET_REQUIRED)
    node.source.inventories.put_nowait({GPU: Listing((A,), troubles={"a": trouble})})
    try:
        async with asyncio.timeout(10):
            assert await anext(lists) == (replace(A, health=Health.UNHEALTHY),)
    finally:
        disk.set()
    await node.end()
    content = json.loads((node.folder / "state" / "ledger.json").read_text())
    assert set(content["resources"][GPU]["sticky"]) == {"a"}


async def test_an_illness_that_was_sent_is_remembered(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another gateway is given the resource at that moment: it may not have heard of it."""
    node = await make(inventory(A))
    lists = node.kubelet.lists(await node.kubelet.registered())
    assert await anext(lists) == (A,)
    publish = registrar.Resource.publish

    def last_word(self: registrar.Resource, listing: Listing | None, entries: tuple[Entry, ...]) -> None:
        publish(self, listing, entries)
        self.state = replace(self.state, standing_by_for=Age(1 << 62, "3f9a2c1d"))

    monkeypatch.setattr(registrar.Resource, "publish", last_word)
    node.source.inventories.put_nowait(
        {GPU: Listing((A,), troubles={"a": Trouble("Xid 79", TroubleKind.RESET_REQUIRED)})}
    )
    assert await anext(lists) == (replace(A, health=Health.UNHEALTHY),)
    await node.end()
    content = json.loads((node.folder / "state" / "ledger.json").read_text())
    assert set(content["resources"][GPU]["sticky"]) == {"a"}


async def test_an_illness_outlives_its_device(make: Make) -> None:
    """A partition that was ill, was taken away and is made again is the same silicon."""
    gateway = (await make(inventory(A)))._gateway
    ill = {"a": Sticky(Trouble("Xid 79", TroubleKind.RESET_REQUIRED), 5.0, "")}
    gateway.ledger.announce(GPU, (A,))
    gateway.ledger.set_sticky(GPU, ill)
    gone = Merged((), frozenset(), dropped=frozenset({"a"}), sticky=ill, lost_since={}, again_at=None)
    offering.remember(gateway.ledger, gateway.lists.unseen, GPU, gone, gateway.ledger.sticky(GPU))
    assert (gateway.ledger.announced(GPU), gateway.ledger.sticky(GPU)) == ({}, ill)


@contextlib.asynccontextmanager
async def beside(node: Node, source: Source) -> AsyncIterator[Gateway]:
    """Run a newer gateway of the same state directory."""
    newer = Gateway(Settings(socket_dir=node.folder / "dp", state_dir=node.folder / "state"), source)
    running = asyncio.ensure_future(newer.run())
    try:
        yield newer
    finally:
        newer._end(0)
        await running


async def test_what_knows_no_device_takes_nothing_over(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new release that finds no device must not be ready in the place of one that serves."""
    monkeypatch.setattr(shell, "FIRST_LOOK", 0.01)
    node = await make(inventory(A))
    lists = node.kubelet.lists(await node.kubelet.registered())
    assert await anext(lists) == (A,)
    source = Source(inventory(A, B))
    devices = source.inventories.get_nowait()
    async with beside(node, source) as newer:
        assert (await told(logs, "waiting for the devices: meanwhile another gateway serves"))["backend"] == "test"
        assert (newer.begun, node.kubelet.registrations.empty()) == (False, True)
        source.inventories.put_nowait(devices)
        assert await anext(node.kubelet.lists(await node.kubelet.registered())) == (A, B)


async def test_what_knows_no_device_serves_by_its_memory_when_the_other_is_gone(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "FIRST_LOOK", 0.01)
    node = await make(inventory(A))
    await anext(node.kubelet.lists(await node.kubelet.registered()))
    source = Source(inventory(A))
    source.inventories.get_nowait()
    async with beside(node, source):
        await told(logs, "waiting for the devices: meanwhile another gateway serves")
        await node.end()
        assert await anext(node.kubelet.lists(await node.kubelet.registered())) == (A,)


FILE = "example.com/null"


def without_gpus(*devices: Device) -> Inventory:
    """What files alone are, while the GPUs' source is silent."""
    return Partial({FILE: Listing(devices)}, GPU.__eq__)


async def test_what_a_silent_source_had_is_served_from_memory_beside_the_others(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart while NVML is away."""
    monkeypatch.setattr(shell, "FIRST_LOOK", 0.01)
    before = await make(inventory(A, B))
    await anext(before.kubelet.lists(await before.kubelet.registered()))
    await before.end()
    node = await make(without_gpus(Device("/dev/null")))
    registered = [await node.kubelet.registered(), await node.kubelet.registered()]
    lists = {one.resource_name: node.kubelet.lists(one) for one in registered}
    assert {name: await anext(one) for name, one in lists.items()} == {GPU: (A, B), FILE: (Device("/dev/null"),)}
    states = {plugin.name: {one.state for one in plugin.entries.values()} for plugin in node._gateway.resources}
    assert states == {GPU: {State.NOT_LOOKED_YET}, FILE: {State.PRESENT}}
    assert not probes.look(node._gateway).ready, "an update must wait until its source tells"
    node.source.inventories.put_nowait({GPU: Listing((A,)), FILE: Listing((Device("/dev/null"),))})
    assert await anext(lists[GPU]) == (A, replace(B, health=Health.UNHEALTHY))


async def test_what_a_silent_source_had_is_no_other_gateways(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet's records show the list that was served from memory: nobody else offers it, or holds it under another ID."""
    monkeypatch.setattr(shell, "FIRST_LOOK", 0.01)
    before = await make(inventory(A, B))
    await anext(before.kubelet.lists(await before.kubelet.registered()))
    await before.end()
    node = await make(without_gpus(Device("/dev/null")))
    assert {(await node.kubelet.registered()).resource_name for _ in range(2)} == {GPU, FILE}
    gateway = node._gateway
    view = View(held={GPU: {"a": "default/p/main"}}, remembered={}, allocatable={GPU: frozenset("ab")})
    gateway.beliefs.last = Look(view, time.monotonic(), time.time())
    await gateway.update()
    [gpus] = [plugin for plugin in gateway.resources if plugin.name == GPU]
    assert {one.state for one in gpus.entries.values()} == {State.NOT_LOOKED_YET}
    assert not gateway.lists.withholds


async def test_the_start_waits_for_every_source_but_not_for_long(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what looks for a third of a second is on the first list."""
    monkeypatch.setattr(shell, "FIRST_LOOK", 0.5)
    began = time.monotonic()
    await make(without_gpus(Device("/dev/null")))
    assert (await told(logs, "serving"))["resources"] == {FILE: 1}
    assert time.monotonic() - began >= 0.5


async def test_what_a_silent_source_had_is_left_to_another_gateway(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have is taken over meanwhile, but an update must wait."""
    monkeypatch.setattr(shell, "FIRST_LOOK", 0.01)
    node = await make(inventory(A))
    await anext(node.kubelet.lists(await node.kubelet.registered()))
    source = Source(without_gpus(Device("/dev/null")))
    async with beside(node, source) as newer:
        registration = await node.kubelet.registered()
        assert registration.resource_name == FILE
        assert await anext(node.kubelet.lists(registration)) == (Device("/dev/null"),)
        [hindrance] = newer.hindrances()
        assert f"none of the 1 usable device of {GPU}" in hindrance.reason
        assert not probes.look(newer).ready
        source.inventories.put_nowait({GPU: Listing((A, B)), FILE: Listing((Device("/dev/null"),))})
        registration = await node.kubelet.registered()
        assert registration.resource_name == GPU
        assert await anext(node.kubelet.lists(registration)) == (A, B)
        assert newer.hindrances() == ()


async def test_what_hinders_the_source_is_told_once(make: Make) -> None:
    node = await make(inventory(A))
    gateway = node._gateway
    own, silent = Hindrance("test", "no name for them"), Hindrance("test", NOT_TOLD)
    told = {}
    for trouble in ("", NOT_TOLD, "it failed"):
        for hindered in ((), (own,)):
            gateway._follower.trouble = trouble
            node.source.hindered = hindered
            told[trouble, hindered] = gateway.hindrances()
    failed = Hindrance("test", "it failed")
    assert told == {
        ("", ()): (),
        ("", (own,)): (own,),
        (NOT_TOLD, ()): (silent,),
        (NOT_TOLD, (own,)): (own,),
        ("it failed", ()): (failed,),
        ("it failed", (own,)): (failed, own),
    }
    assert Commands(gateway).taken(rows=False)().hindrances[0].reason == "it failed"


async def test_a_cordon_is_confirmed_when_it_is_on_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is asked for once more: the first time may have been in vain."""
    node = await make(inventory(A))
    await anext(node.kubelet.lists(await node.kubelet.registered()))
    order = Commands(node._gateway)._order
    asked = {"op": "cordon", "id": "a", "reason": "smells"}
    answers: list[object] = []

    class Person:
        async def send(self, message: object) -> None:
            answers.append(message)

    save = Ledger.save

    def full(ledger: Ledger, snapshot: LedgerSnapshot) -> Written:
        raise LedgerError("no space left on device")

    monkeypatch.setattr(Ledger, "save", full)
    for _ in range(2):
        with pytest.raises(ControlError, match="done, but it will be forgotten"):
            await order(Person(), asked)  # type: ignore[arg-type]  # what it needs of a connection
    monkeypatch.setattr(Ledger, "save", save)
    await order(Person(), asked)  # type: ignore[arg-type]  # as above
    assert len(answers) == 1
    assert set(json.loads((node.folder / "state" / "ledger.json").read_text())["cordons"]) == {"a"}


async def test_an_orderly_end_remembers_the_accepted_api(make: Make, logs: asyncio.Queue[EventDict]) -> None:
    """Also when it comes right after the first Register."""
    node = await make(inventory(A), "v1alpha2")
    await served(node, logs)
    await node.end()
    assert json.loads((node.folder / "state" / "ledger.json").read_text())["accepted"] == "v1alpha2"


async def test_an_orderly_end_remembers_what_was_handed_out_last(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "NOTED_AFTER", 3600.0)
    node = await make(inventory(A))
    registration = await node.kubelet.registered()
    await anext(node.kubelet.lists(registration))
    await node.kubelet.allocate(registration, ["a"])
    await node.end()
    content = json.loads((node.folder / "state" / "ledger.json").read_text())
    assert set(content["resources"][GPU]["handed_out"]) == {"a"}


async def test_what_was_handed_out_a_moment_ago_is_held(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before it is noted: else a device that is withdrawn at that moment would be dropped under its container."""
    monkeypatch.setattr(serve, "NOTED_AFTER", 3600.0)
    node = await make(inventory(A, B))
    registration = await node.kubelet.registered()
    await anext(node.kubelet.lists(registration))
    gateway = node._gateway
    gateway.beliefs.last = Look(View(held={}), time.monotonic(), time.time())
    await node.kubelet.allocate(registration, ["a"])
    assert gateway.holdings.held(GPU) == frozenset({"a"})


async def test_a_lost_device_is_unhealthy_not_absent(make: Make) -> None:
    node = await make(inventory(A, B))
    lists = node.kubelet.lists(await node.kubelet.registered())
    await anext(lists)
    node.source.inventories.put_nowait(inventory(B))
    assert {one.id: one.health for one in await anext(lists)} == {"a": Health.UNHEALTHY, "b": Health.HEALTHY}


async def test_a_list_that_says_nothing_new_is_not_sent(make: Make) -> None:
    node = await make(inventory(A))
    lists = node.kubelet.lists(await node.kubelet.registered())
    await anext(lists)
    for found in (inventory(A), inventory(A), inventory(A, B)):
        node.source.inventories.put_nowait(found)
    assert [one.id for one in await anext(lists)] == ["a", "b"]


async def test_a_list_too_large_is_not_offered_and_the_others_are(make: Make, logs: asyncio.Queue[EventDict]) -> None:
    many = tuple(Device(f"{number:01000}") for number in range(4_500))
    node = await make({**inventory(*many, resource="big.example/gpu"), **inventory(A)})
    assert (await node.kubelet.registered()).resource_name == GPU
    said = await told(logs, "not offered")
    assert (said["resource"], said["level"], "4132 devices would fit" in said["details"]) == (
        "big.example/gpu",
        "error",
        True,
    )
    assert node.kubelet.registrations.empty()


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_no_kubelet_is_sent_a_list_that_is_too_large(dialect: Dialect) -> None:
    """Also not 1.8 and 1.9, which would take it."""
    long = DeviceList(GPU, Tally(), grace=False)
    long.becomes(None, tuple(Entry(Device(f"{number:01000}"), State.PRESENT) for number in range(4_500)))
    assert "devices would fit" in (long.too_large(dialect) or "")


def test_a_list_of_just_the_most_bytes_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect, on_offer = by_name("v1beta1"), DeviceList(GPU, Tally(), grace=False)
    on_offer.becomes(None, (Entry(A, State.PRESENT), Entry(B, State.PRESENT)))
    monkeypatch.setattr(devicelist, "LIST_LIMIT", size := len(on_offer.wire(dialect).data))
    assert on_offer.too_large(dialect) is None
    monkeypatch.setattr(devicelist, "LIST_LIMIT", size - 1)
    assert ": 1 devices would fit" in (on_offer.too_large(dialect) or "")


def test_what_a_list_can_not_say_is_counted_each_time_and_told_once() -> None:
    tally = Tally()
    on_offer, numa = DeviceList(GPU, tally, grace=False), replace(A, numa_nodes=(0,))
    with capture_logs() as said:
        for device in (numa, B, numa):
            on_offer.becomes(None, (Entry(device, State.PRESENT),))
            on_offer.wire(by_name("v1alpha2"))
    assert sum(tally.lost_fields.values()) == 2
    assert [line["event"] for line in said] == ["a field was left out"]


@pytest.mark.parametrize("grace", [True, False])
def test_containers_wait_for_what_is_not_found_yet_only_where_that_is_wanted(*, grace: bool) -> None:
    on_offer = DeviceList(GPU, Tally(), grace=grace)
    on_offer.becomes(None, (Entry(A, State.NOT_LOOKED_YET),))
    assert on_offer.options.pre_start_required is grace
    on_offer.forget(A.id)
    assert not on_offer.entries


async def test_a_list_that_outgrows_the_limit_ends_and_comes_back(make: Make, logs: asyncio.Queue[EventDict]) -> None:
    """Its stream ends with the reason, and so does no other; told apart from a list that never fitted by nothing."""
    many = tuple(Device(f"{number:01000}") for number in range(4_500))
    node = await make(inventory(A))
    lists = node.kubelet.lists(await node.kubelet.registered())
    await anext(lists)
    node.source.inventories.put_nowait(inventory(*many))
    with pytest.raises(grpc.aio.AioRpcError, match="would fit") as ended:
        await anext(lists)
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await told(logs, "not offered"))["resource"] == GPU


async def test_a_resource_that_comes_later_is_registered_too(make: Make) -> None:
    node = await make(inventory(A))
    assert (await node.kubelet.registered()).resource_name == GPU
    node.source.inventories.put_nowait({**inventory(A), **inventory(B, resource="late.example/gpu")})
    assert (await node.kubelet.registered()).resource_name == "late.example/gpu"
    assert node.kubelet.registrations.empty()


async def test_a_resource_that_can_not_be_bound_holds_up_no_other_and_is_bound_later(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peers, "look", lambda _: None)  # Which comes now and then, and would try again, too.
    monkeypatch.setattr(offering, "BIND_AGAIN", 0)
    node = await make(inventory(A))
    lists = node.kubelet.lists(await node.kubelet.registered())
    assert await anext(lists) == (A,)
    failing, bind = asyncio.Event(), DevicePlugin.bind
    failing.set()

    async def fail(self: DevicePlugin, path: Path) -> None:
        if failing.is_set():
            raise RuntimeError("Too many open files")
        await bind(self, path)

    monkeypatch.setattr(DevicePlugin, "bind", fail)
    for b in (B, replace(B, health=Health.UNHEALTHY), B):  # With a device that is new to the ledger, and without.
        node.source.inventories.put_nowait({**inventory(A, b), **inventory(B, resource="late.example/gpu")})
        async with asyncio.timeout(20):
            assert await anext(lists) == (A, b)
            assert (await told(logs, "can't be bound"))["resource"] == "late.example/gpu"
    failing.clear()
    late = await node.kubelet.registered()
    assert (late.resource_name, await anext(node.kubelet.lists(late))) == ("late.example/gpu", (B,))
    errors = {said["event"] for said in [logs.get_nowait() for _ in range(logs.qsize())] if said["level"] == "error"}
    assert errors <= {"can't be bound"}


async def test_a_resource_that_can_not_be_bound_holds_up_no_other_beside_another_gateway(
    make: Make, newer: Callable[[], Instance], monkeypatch: pytest.MonkeyPatch, logs: asyncio.Queue[EventDict]
) -> None:
    """At the start nothing is about to be sent yet, as long as the other one wasn't asked."""
    bind = DevicePlugin.bind

    async def fail(self: DevicePlugin, path: Path) -> None:
        if self.name != GPU:
            raise RuntimeError("Too many open files")
        await bind(self, path)

    monkeypatch.setattr(DevicePlugin, "bind", fail)
    newer()
    node = await make({**inventory(A), **inventory(B, resource="late.example/gpu")})
    assert (await node.kubelet.registered()).resource_name == GPU
    said = [logs.get_nowait() for _ in range(logs.qsize())]
    assert {one["event"] for one in said if one["level"] == "error"} == {"can't be bound"}


async def test_a_socket_directory_that_goes_while_it_waits_for_another_gateway_ends_no_start(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, logs: asyncio.Queue[EventDict]
) -> None:
    living = {Age(1, "3f9a2c1d"): folder}
    monkeypatch.setattr(Peers, "living", lambda _: living)
    monkeypatch.setattr(shell, "FIRST_LOOK", 0)
    monkeypatch.setattr(Source, "watch", lambda _: _never())
    node = await make({})
    await told(logs, "waiting for the devices: meanwhile another gateway serves")
    (folder / "dp").rename(folder / "away")
    living.clear()
    await until(lambda: node._gateway.begun)
    (folder / "away").rename(folder / "dp")
    await until(lambda: Instance(folder / "dp").peers())


async def _never() -> AsyncGenerator[Inventory]:
    await asyncio.get_running_loop().create_future()
    yield {}


async def test_a_gateway_for_other_devices_is_left_alone_while_it_lives(make: Make) -> None:
    """Both have one state directory: what one announced isn't "gone" because the other doesn't see it."""
    node = await make(inventory(A))
    first = await node.kubelet.registered()
    lists = node.kubelet.lists(first)
    assert await anext(lists) == (A,)
    source = Source(inventory(B, resource="late.example/gpu"))
    other = Node(node.folder, source, node.kubelet, Gateway(node._gateway.settings, source))
    try:
        assert (await node.kubelet.registered()).resource_name == "late.example/gpu"
        source.inventories.put_nowait(inventory(B, ILL, resource="late.example/gpu"))
        await until(lambda: "ill" in other._gateway.resources[0].entries)
        assert await other._gateway.scribe.durable()
        node.source.inventories.put_nowait(inventory(A, ILL))
        assert await anext(lists) == (A, ILL)
        assert node.kubelet.registrations.empty()
        await node.end()
        again = await node.kubelet.registered()
        assert again.resource_name == GPU
        rows = {device.id: device.health for device in await anext(node.kubelet.lists(again))}
        assert rows == {"a": Health.UNHEALTHY, "ill": Health.UNHEALTHY}
    finally:
        await other.end()


async def test_what_only_others_served_is_taken_up_at_once_when_nobody_is_left(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the last one remembered of it: the state file is read before the lists are made."""
    node = await make(inventory(A))
    await node.kubelet.registered()
    gateway, done = node._gateway, list[str]()
    taken = asyncio.Event()
    gateway.ledger.announce("late.example/gpu", (B,))

    async def load(**_: object) -> None:
        done.append("the state file is read")

    async def update() -> None:
        done.append("the lists are made")
        taken.set()

    monkeypatch.setattr(gateway.scribe, "load", load)
    monkeypatch.setattr(gateway.lists, "update", update)
    monkeypatch.setattr(gateway.others, "look_at_peers", lambda: None)
    gateway.others.look()
    async with asyncio.timeout(10):
        await taken.wait()
    assert done == ["the state file is read", "the lists are made"]


async def test_what_another_gateway_served_is_served_whatever_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch, logs: asyncio.Queue[EventDict]
) -> None:
    monkeypatch.setattr(peers, "UPDATE_AGAIN", 0)
    node = await make(inventory(A))
    await anext(node.kubelet.lists(await node.kubelet.registered()))
    gateway, again = node._gateway, asyncio.Event()
    one = gateway._resources[GPU]

    async def fails() -> None:
        if one.state.phase is Phase.STANDBY:
            raise RuntimeError("Too many open files")
        again.set()

    monkeypatch.setattr(gateway.lists, "announce", fails)
    monkeypatch.setattr(gateway.lists, "update", fails)
    one.feed(StandBy(Age(1, "3f9a2c1d")))
    gateway.others.look()
    assert await anext(node.kubelet.lists(await node.kubelet.registered())) == (A,)
    assert (await told(logs, "the lists could not be brought up to date: serving the last one"))["level"] == "error"
    async with asyncio.timeout(10):
        await again.wait()


# A newer gateway with a state directory of its own: only what it does on the node is seen of it.


@pytest.fixture
def newer(folder: Path) -> Iterator[Callable[[], Instance]]:
    """One that offers the GPUs from when it is called."""
    with contextlib.ExitStack() as stack:

        def appear() -> Instance:
            one = Instance(folder / "dp")
            one.create()
            stack.callback(one.remove)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(one.folder / socket_name(GPU)))
            listener.listen()
            one.publish()
            return one

        yield appear


async def until(condition: Callable[[], object]) -> None:
    """Wait for what nobody tells."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.005)


async def test_a_register_in_flight_is_not_given_up_for_a_newer_gateway(
    make: Make, newer: Callable[[], Instance], logs: asyncio.Queue[EventDict]
) -> None:
    node = await make(inventory(A))
    await served(node, logs)
    gateway, one = node._gateway, node._gateway.resources[0]
    one.state = replace(one.state, phase=Phase.ACCEPTED)
    newer()
    gateway.others.look()
    assert one.state.phase is Phase.ACCEPTED
    one.state = replace(one.state, phase=Phase.SERVING)
    gateway.around.stood(one)
    assert one.state.phase is Phase.STANDBY


async def test_what_another_gateway_serves_is_not_remembered_but_what_it_remembers_is(
    make: Make, newer: Callable[[], Instance], logs: asyncio.Queue[EventDict]
) -> None:
    node = await make(inventory(A))
    await served(node, logs)
    gateway, one = node._gateway, node._gateway.resources[0]
    other = newer()
    await until(lambda: one.state.phase is Phase.STANDBY)
    node.source.inventories.put_nowait(inventory(A, B))
    await until(lambda: "b" in one.entries)
    assert await gateway.scribe.durable()
    assert node.ledger().keys() == {"a"}
    theirs = Ledger(node.folder / "state")
    theirs.load()
    theirs.announce(GPU, (A, Device("theirs")))
    theirs.set_forgotten(GPU, FORGOTTEN)
    theirs.save(theirs.snapshot())
    other.remove()
    gateway.others.look()
    assert {device.id for device in await anext(node.kubelet.lists(await node.kubelet.registered()))} == {
        *("a", "b", "theirs")
    }
    assert [(one.kind, one.device_ids) for one in gateway.beliefs.findings(GPU)] == [
        (drift.MismatchKind.FORGOTTEN, ("a",))
    ]


@pytest.mark.parametrize("leaves", [True, False])
async def test_whom_the_kubelet_forgot_is_remembered_by_who_serves(
    make: Make, newer: Callable[[], Instance], logs: asyncio.Queue[EventDict], leaves: bool
) -> None:
    node = await make(inventory(A))
    await served(node, logs)
    gateway, one = node._gateway, node._gateway.resources[0]
    if leaves:
        newer()
        await until(lambda: one.state.phase is Phase.STANDBY)
    gateway.beliefs.recall(GPU, FORGOTTEN, {})
    assert gateway.ledger.forgotten(GPU) == ({} if leaves else FORGOTTEN)


async def test_what_the_one_before_remembered_last_is_taken_over(
    make: Make, monkeypatch: pytest.MonkeyPatch, logs: asyncio.Queue[EventDict]
) -> None:
    node = await make(inventory(A))
    await served(node, logs)
    source = Source(inventory(A))
    newer = Gateway(node._gateway.settings, source)

    async def able() -> None:  # It has read the ledger already.
        node.source.inventories.put_nowait(inventory(A, B))
        await until(lambda: "b" in node._gateway.resources[0].entries)
        node._gateway.ledger.set_forgotten(GPU, FORGOTTEN)
        assert await node._gateway.scribe.durable()

    monkeypatch.setattr(newer.others.ability, "wait", able)
    other = Node(node.folder, source, node.kubelet, newer)
    try:
        rows = await anext(node.kubelet.lists(await node.kubelet.registered()))
        assert {device.id: device.health for device in rows} == {"a": Health.HEALTHY, "b": Health.UNHEALTHY}
        assert [(one.kind, one.device_ids) for one in newer.beliefs.findings(GPU)] == [
            (drift.MismatchKind.FORGOTTEN, ("a",))
        ]
    finally:
        await other.end()


async def test_what_a_newer_gateway_does_not_serve_is_remembered_before_it_is_sent(make: Make, folder: Path) -> None:
    host = Instance(folder / "dp", begin(host_service=True))
    host.create()
    host.publish()
    try:
        node = await make(inventory(A))
        assert await anext(node.kubelet.lists(await node.kubelet.registered())) == (A,)
        assert node.ledger().keys() == {"a"}
    finally:
        host.remove()


@pytest.mark.parametrize(
    ("device", "shown", "registered", "talks", "lacking"),
    [
        pytest.param(A, frozenset(), True, False, True, id="the records show nothing"),
        pytest.param(A, frozenset({GPU}), False, False, False, id="they show it"),
        pytest.param(A, frozenset({"amd.com/gpu"}), True, False, True, id="they show others"),
        pytest.param(ILL, frozenset(), True, False, False, id="none of ours is well: perhaps none of the other's"),
        pytest.param(
            A, Untold.AT_ALL, False, False, True, id="nothing is known, and it has no name in the kubelet's folder"
        ),
        pytest.param(A, Untold.AT_ALL, True, False, False, id="but it has"),
        pytest.param(A, Untold.SINCE, True, False, True, id="it has, and the records are still those of our list"),
        pytest.param(A, Untold.AT_ALL, False, True, True, id="one that talks has none, and wasn't asked yet"),
    ],
)
async def test_what_is_stood_by_for_is_looked_for(
    make: Make,
    newer: Callable[[], Instance],
    logs: asyncio.Queue[EventDict],
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    shown: frozenset[str] | Untold,
    registered: bool,
    talks: bool,
    lacking: bool,
) -> None:
    looked: asyncio.Queue[None] = asyncio.Queue()

    async def look(*_: object) -> frozenset[str] | Untold:
        looked.put_nowait(None)
        return shown

    monkeypatch.setattr(kubelet_view, "shown", look)
    monkeypatch.setattr(readiness, "LACKING", 0.001)
    monkeypatch.setattr(Peers, "unserved", lambda *_: None)
    monkeypatch.setattr(Peers, "talks", lambda *_: talks)
    node = await make(inventory(device))
    await served(node, logs)
    other = newer()
    if registered:
        (node.folder / "dp" / f"{other.token}-ab12-1.sock").touch()
    for _ in range(2 if shown and not isinstance(shown, Untold) else 3):
        await looked.get()
    verdict, told = probes.look(node._gateway), Commands(node._gateway).taken(rows=False)()
    assert (verdict.ready, "no device of it" in verdict.text) == (not lacking, lacking)
    assert (told.resources[0].lacking_s is not None) is lacking


async def test_one_that_was_stood_by_for_in_vain_counts_again_once_it_registers(
    make: Make, newer: Callable[[], Instance], logs: asyncio.Queue[EventDict]
) -> None:
    """It is known by the name of its socket, not by the end of our stream: a third gateway's yielding ends that, too."""
    node = await make(inventory(A))
    await served(node, logs)
    gateway, one = node._gateway, node._gateway.resources[0]
    other = newer()
    await until(lambda: one.state.phase is Phase.STANDBY)
    gateway.others.unserved(one)
    lists = await served(node, logs)
    gateway.others.look()
    assert one.state.phase is Phase.SERVING
    await lists.aclose()
    await until(lambda: one.state.phase is not Phase.SERVING)
    assert one.standing_by_for is None, "that a kubelet ended our stream is no word of the other gateway's"
    await served(node, logs)
    assert gateway.presence.kubelet is not None
    gateway._kubelet_up(replace(gateway.presence.kubelet, mtime_ns=1))
    gateway.others.look()
    assert one.standing_by_for is None
    await served(node, logs)
    (node.folder / "dp" / f"{other.token}-ab12-1.sock").touch()
    gateway.others.look()
    await until(lambda: one.state.phase is Phase.STANDBY)
    assert one.standing_by_for == other.age


async def test_records_are_looked_into_again_where_the_list_changed(
    make: Make, monkeypatch: pytest.MonkeyPatch, logs: asyncio.Queue[EventDict]
) -> None:
    monkeypatch.setattr(machine, "VERIFY_AFTER", (3600.0, 3601.0, 3602.0))  # The test looks, and nobody else.
    node = await make(inventory(A))
    await served(node, logs)
    one = node._gateway._resources[GPU]
    looks: list[Sequence[Device]] = []

    async def holds(_socket: Path, _resource: str, devices: Sequence[Device], _patience: float) -> bool:
        looks.append(devices)
        if len(looks) == 1:
            await node._gateway.lists.take(inventory(A, B))
        return True

    monkeypatch.setattr(kubelet_view, "holds", holds)
    monkeypatch.setattr(one, "checked", Confirmation.LACKING)
    await one._verify()
    assert (looks[:2], one.checked) == ([(A,), (A, B)], Confirmation.HELD)


async def test_what_was_handed_over_is_registered_a_moment_later(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelets 1.25 to 1.36 close the connection first, and disconnect whoever is registered a moment later."""
    node = await make(inventory(A))
    await served(node, logs)

    monkeypatch.setattr(talk, "HANDED_OVER_WAIT", wait := 0.5)  # Nothing else waits for as long.
    handover = node._gateway.others.handover
    monkeypatch.setattr(handover, "_ask", lambda: True)
    handover.waits.answered.set()
    began = time.monotonic()
    await node._gateway.others.take_over([Age(1, "00000001")])
    node._gateway.resources[0].feed(Renew("another gateway's streams have ended"))
    await node.kubelet.registered()
    assert time.monotonic() - began >= wait


@pytest.mark.parametrize(
    ("claimed", "elsewhere", "looks"),
    [
        pytest.param(False, False, 0, id="nothing else is known"),
        pytest.param(True, False, 1, id="the older one's offers are in the way, until its streams are over"),
        pytest.param(False, True, 0, id="the older one has given something"),
    ],
)
async def test_between_an_older_ones_word_and_the_register_is_only_what_must_be(
    make: Make, monkeypatch: pytest.MonkeyPatch, claimed: bool, elsewhere: bool, looks: int
) -> None:
    """To put a list of 80,000 devices together takes seconds, in which nobody would serve them."""
    node = await make(inventory(A))
    gateway = node._gateway
    await node.kubelet.registered()
    merged, looked, again = list[object](), list[float](), list[object]()
    merge = gateway.lists._asked

    async def handed_over(_older_ones: object) -> bool:
        assert node.ledger().keys() == {"a"}, "it is on disk before the older one ends anything"
        gateway.ledger.withdraw(GPU, ["a"])
        assert await gateway.scribe.durable()
        assert "a" not in gateway.ledger.announced(GPU)
        if elsewhere:
            other = Ledger(node.folder / "state")
            other.load()
            other.hand_out(GPU, ["b"], "v1beta1", time.time())
            other.save(other.snapshot())
        looked.clear()
        again.clear()
        return True

    def noted(*of: Any) -> object:
        merged.append(of)
        return merge(*of)

    monkeypatch.setattr(gateway.others.handover, "take_over", handed_over)
    monkeypatch.setattr(gateway.lists, "_asked", noted)
    monkeypatch.setattr(gateway.lists, "_claims", [object()] if claimed else [])
    monkeypatch.setattr(gateway.beliefs, "look_within", looked.append)
    monkeypatch.setattr(gateway.lists, "update_again", again.append)
    gateway.ledger.withdraw(GPU, ["a"])
    assert await gateway.scribe.durable()
    await gateway.others.take_over([Age(1, "00000001")])
    assert node.ledger().keys() == {"a"}, "it is on disk before it is sent"
    assert (bool(merged), len(looked)) == (elsewhere, looks)
    assert again or looked, "the lists are brought up to date later"


@pytest.mark.parametrize(("withheld", "does"), [(False, "announce"), (True, "update")])
async def test_what_was_withheld_for_another_gateway_is_put_right_when_it_has_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch, withheld: bool, does: str
) -> None:
    node = await make(inventory(A))
    await node.kubelet.registered()
    lists, done = node._gateway.lists, list[str]()

    def noted(what: str) -> Callable[[], Awaitable[None]]:
        async def one() -> None:
            done.append(what)

        return one

    for what in ("announce", "update"):
        monkeypatch.setattr(lists, what, noted(what))
    monkeypatch.setattr(lists, "_claims", [object()] if withheld else [])
    await peers._bring_up(node._gateway.holdings, lists, withheld=False)
    assert done == [does]


@pytest.mark.parametrize(("others", "warm"), [({}, 0), ({Age(9, "99999999"): Path("newer")}, 1)])
async def test_who_is_going_to_stand_by_has_connected_to_the_kubelet_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, others: dict[Age, Path], warm: int
) -> None:
    """A process's first connection takes milliseconds, in which nobody would serve once the other gateway is dead."""
    node = await make(inventory(A))
    await node.kubelet.registered()
    connected: list[Path] = []

    async def connect(socket: Path) -> None:
        connected.append(socket)

    monkeypatch.setattr(peers, "warm_up", connect)
    monkeypatch.setattr(node._gateway.others, "living", lambda: others)
    await node._gateway.others.take_over([])
    assert len(connected) == warm


async def test_what_is_connected_to_the_kubelet_before_is_not_used(make: Make, logs: asyncio.Queue[EventDict]) -> None:
    node = await make(inventory(A))
    await served(node, logs)
    one = node._gateway.resources[0]
    one.approach(KubeletId(0, 0, 0))
    assert one._ahead is not None
    await one._ahead.channel.ready()
    second = Kubelet(node.folder / "dp", "v1beta1", "grpc-go/1.82.1")
    await second.start()
    try:
        await second.registered()
    finally:
        await second.aclose()
    assert node.kubelet.registrations.empty()


async def test_what_was_seen_of_a_kubelet_that_came_is_told_from_what_was_seen_before(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of its socket tells: what was seen since is its own word."""
    node = await make(inventory(A))
    await served(node, logs)
    since: list[float] = []
    monkeypatch.setattr(node._gateway.beliefs, "restarted", lambda _, unix=math.inf: since.append(unix))
    second = Kubelet(node.folder / "dp", "v1beta1", "grpc-go/1.82.1")
    await second.start()
    try:
        await second.registered()
        assert since == [(node.folder / "dp" / "kubelet.sock").stat().st_mtime_ns / 1e9]
    finally:
        await second.aclose()


async def test_who_is_served_or_stands_by_holds_no_connection_to_the_kubelet(
    make: Make, logs: asyncio.Queue[EventDict]
) -> None:
    """It would keep gRPC's threads busy."""
    node = await make(inventory(A))
    await served(node, logs)
    one, kubelet = node._gateway.resources[0], watch.kubelet_id(node.folder / "dp" / "kubelet.sock")
    assert kubelet is not None
    one.approach(kubelet)
    one.feed(KubeletUp(kubelet))
    assert one._ahead is None
    one.feed(StandBy(Age(1, "0123abcd")))
    one.approach(kubelet)
    assert one._ahead is None


async def test_a_kubelet_that_came_in_between_is_not_taken_for_the_one_before(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be told of as a new one, and registered with twice."""
    node = await make(inventory(A))
    lists = await served(node, logs)
    whole, stale = watch.kubelet_id, [KubeletId(0, 0, 0)]
    monkeypatch.setattr(registrar, "kubelet_id", lambda path: stale.pop() if stale else whole(path))
    await lists.aclose()
    await node.kubelet.registered()
    assert node._gateway.resources[0].state.kubelet == whole(node.folder / "dp" / "kubelet.sock")


async def test_without_hard_links_the_servers_own_path_is_registered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    kubelet = (await make(inventory(A))).kubelet
    registration = await kubelet.registered()
    assert registration.endpoint.startswith("gateway/")
    assert [one.id for one in await anext(kubelet.lists(registration))] == ["a"]


async def test_the_unexpected_while_registering_is_said_and_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, logs: asyncio.Queue[EventDict]
) -> None:
    whole, failures = watch.kubelet_id, [ZeroDivisionError()]

    def once(path: Path) -> KubeletId | None:
        if failures:
            raise failures.pop()
        return whole(path)

    monkeypatch.setattr(registrar, "kubelet_id", once)
    kubelet = (await make(inventory(A))).kubelet
    assert (await told(logs, "unexpected while registering"))["level"] == "error"
    assert (await kubelet.registered()).resource_name == GPU


async def test_a_source_that_fails_is_asked_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "RETRY_S", 0)
    node = await make(inventory(A))
    lists = node.kubelet.lists(await node.kubelet.registered())
    await anext(lists)
    node.source.inventories.put_nowait(OSError(5, "the driver is gone"))
    node.source.inventories.put_nowait(inventory(A, B))
    assert [one.id for one in await anext(lists)] == ["a", "b"]


async def test_a_source_that_gives_up_ends_the_gateway(make: Make) -> None:
    node = await make(inventory(A))
    node.source.inventories.put_nowait(GiveUpError("the driver's libraries are stale", 75))
    assert await node.ended() == 75


async def test_ten_thousand_devices_are_one_list(make: Make) -> None:
    node = await make(inventory(*(Device(f"GPU-{number:036}") for number in range(10_000))))
    lists = node.kubelet.lists(await node.kubelet.registered())
    assert len(await anext(lists)) == 10_000


@pytest.mark.parametrize("api", ["v1beta1", "v1alpha2", "0.1"])
@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        pytest.param(["a", "never"], grpc.StatusCode.NOT_FOUND, "'never'", id="an ID never announced"),
        pytest.param(["a", "a"], grpc.StatusCode.INVALID_ARGUMENT, "more than once", id="the same ID twice"),
        pytest.param([], grpc.StatusCode.INVALID_ARGUMENT, "at least one device ID", id="no ID"),
        pytest.param([""], grpc.StatusCode.NOT_FOUND, "''", id="an empty ID"),
        pytest.param(["ill"], grpc.StatusCode.FAILED_PRECONDITION, "unhealthy", id="a device long ill"),
    ],
)
async def test_a_wrong_request_is_refused_precisely(
    make: Make, monkeypatch: pytest.MonkeyPatch, api: str, asked: list[str], code: grpc.StatusCode, words: str
) -> None:
    monkeypatch.setattr("devices.life.admission.JUST_TURNED_S", 0.0)
    kubelet = (await make(inventory(A, B, ILL), api)).kubelet
    registration = await kubelet.registered()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kubelet.allocate(registration, asked)
    assert (refused.value.code(), words in (refused.value.details() or "")) == (code, True)


async def test_each_of_several_containers_is_judged(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devices.life.admission.JUST_TURNED_S", 0.0)
    kubelet = (await make(inventory(A, B, ILL))).kubelet
    registration = await kubelet.registered()
    for wrong in ("ill", "never"):
        with pytest.raises(grpc.aio.AioRpcError, match=wrong):
            await kubelet.allocate(registration, ["a"], [wrong])


@pytest.mark.parametrize("turned", ["a", "b"])
async def test_each_of_several_containers_is_judged_by_the_list_that_came_meanwhile(
    make: Make, monkeypatch: pytest.MonkeyPatch, turned: str
) -> None:
    monkeypatch.setattr("devices.life.admission.JUST_TURNED_S", 0.0)
    node = await make(inventory(A, B))
    now = inventory(*(replace(one, health=Health.UNHEALTHY) if one.id == turned else one for one in (A, B)))
    answer = node.source.answer

    async def answers(resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        if request.device_ids == ("b",):
            await node._gateway.lists.take(now)
        return await answer(resource, request, sayable)

    monkeypatch.setattr(node.source, "answer", answers)
    with pytest.raises(grpc.aio.AioRpcError, match=f"'{turned}'"):
        await node.kubelet.allocate(await node.kubelet.registered(), ["a"], ["b"])


async def test_a_request_without_containers_is_refused(make: Make) -> None:
    kubelet = (await make(inventory(A))).kubelet
    with pytest.raises(grpc.aio.AioRpcError, match="at least one container"):
        await kubelet.allocate(await kubelet.registered())


async def test_bytes_that_are_no_message_are_refused(make: Make) -> None:
    kubelet = (await make(inventory(A))).kubelet
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kubelet.call(await kubelet.registered(), "Allocate", b"\xff\xff\xff")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("api", ["v1beta1", "v1alpha2", "0.1"])
async def test_each_container_is_answered(make: Make, api: str) -> None:
    kubelet = (await make(inventory(A, B), api)).kubelet
    [answer] = await kubelet.allocate(await kubelet.registered(), ["b", "a"])
    assert answer.envs["IDS"] == "b,a"


async def test_a_device_that_is_held_already_is_given_again(make: Make) -> None:
    """Init and app containers share, and no release is ever told."""
    kubelet = (await make(inventory(A))).kubelet
    registration = await kubelet.registered()
    assert await kubelet.allocate(registration, ["a"]) == await kubelet.allocate(registration, ["a"])


@pytest.mark.parametrize(("api", "served"), [("0.1", True), ("v1alpha2", False), ("v1beta1", False)])
async def test_a_device_that_fell_ill_is_given_again_where_each_start_of_a_container_asks(
    make: Make, monkeypatch: pytest.MonkeyPatch, api: str, served: bool
) -> None:
    """Kubelet 1.8 alone calls Allocate at each start: a refusal would end a pod that runs. What it never had stays refused."""
    monkeypatch.setattr("devices.life.admission.JUST_TURNED_S", 0.0)
    node = await make(inventory(A, B), api)
    registration = await node.kubelet.registered()
    lists = node.kubelet.lists(registration)
    await anext(lists)
    await node.kubelet.allocate(registration, ["a"])
    ill = [Device(one.id, Health.UNHEALTHY) for one in (A, B)]
    node.source.inventories.put_nowait(inventory(*ill))
    await anext(lists)
    for asked, given in (("a", served), ("b", False)):
        if given:
            await node.kubelet.allocate(registration, [asked])
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="unhealthy"):
                await node.kubelet.allocate(registration, [asked])


@pytest.mark.parametrize(
    ("api", "user_agent", "options_first", "said"),
    [
        pytest.param("v1beta1", "grpc-go/1.58.3", True, True, id="1.29 by its user-agent"),
        pytest.param("v1beta1", "grpc-go/1.56.3", True, False, id="1.28 by its user-agent"),
        pytest.param("v1beta1", "grpc-go/1.82.1", False, False, id="no options asked for first: 1.24 at most"),
        pytest.param("v1alpha2", "grpc-go/1.3.0", False, False, id="alpha never"),
    ],
)
async def test_cdi_is_said_to_those_who_hear_it(
    make: Make, api: str, user_agent: str, options_first: bool, said: bool
) -> None:
    node = await make(inventory(A), api, user_agent)
    registration = await node.kubelet.registered()
    if options_first:
        await node.kubelet.call(registration, "GetDevicePluginOptions")
    await anext(node.kubelet.lists(registration))
    [answer] = await node.kubelet.allocate(registration, ["a"])
    assert answer.envs["CDI"] == str(said)
    node.source.cdi = True
    if said:
        [answer] = await node.kubelet.allocate(registration, ["a"])
        assert answer.cdi_devices == (f"{GPU}=a",)
    else:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.kubelet.allocate(registration, ["a"])
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_kubelet_that_died_is_no_longer_present(make: Make, logs: asyncio.Queue[EventDict]) -> None:
    node = await make(inventory(A))
    assert (await told(logs, "serving"))["backend"] == "test"
    await anext(node.kubelet.lists(await node.kubelet.registered()))
    await told(logs, "registered")
    assert node._gateway.presence.since is not None
    await node.kubelet.aclose()
    assert (await told(logs, "the kubelet is gone"))["socket"] == str(node.folder / "dp" / "kubelet.sock")
    assert node._gateway.presence.since is None


async def test_a_kubelet_that_has_connected_and_does_not_call_is_soon_registered_with_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CALL_SOON", 0.05)
    monkeypatch.setattr(machine, "CALL_WAIT", 3600.0)
    monkeypatch.setattr(Kubelet, "asks_first", True)
    kubelet = (await make(inventory(A))).kubelet
    assert (await kubelet.registered()).endpoint != (await kubelet.registered()).endpoint


async def test_what_a_kubelet_showed_is_forgotten_at_the_next_offer(make: Make) -> None:
    kubelet = (await make(inventory(A))).kubelet
    for options_first in (True, False):
        registration = await kubelet.registered()
        [answer] = await kubelet.allocate(registration, ["a"])
        assert answer.envs["CDI"] == "False"  # whatever the kubelet before showed
        if options_first:
            await kubelet.call(registration, "GetDevicePluginOptions")
        async with contextlib.aclosing(kubelet.lists(registration)) as lists:
            await anext(lists)
            [answer] = await kubelet.allocate(registration, ["a"])
        assert answer.envs["CDI"] == str(options_first)


@pytest.mark.parametrize(("minor", "shows", "cdi"), [(28, True, False), (31, True, True), (31, False, True)])
async def test_the_kubelet_version_that_an_operator_names_holds_whatever_the_kubelet_shows(
    make: Make, minor: int, shows: bool, cdi: bool
) -> None:
    kubelet = (await make(inventory(A), minor=minor)).kubelet
    registration = await kubelet.registered()
    if shows:
        await kubelet.call(registration, "GetDevicePluginOptions")
        await anext(kubelet.lists(registration))
    [answer] = await kubelet.allocate(registration, ["a"])
    assert answer.envs["CDI"] == str(cdi)


# Others than the kubelet on our socket.


class Listener(Kubelet):
    """Somebody else who listens."""

    def __init__(self, node: Node, user_agent: str = "") -> None:
        super().__init__(node.folder / "dp", node.kubelet.dialect.name, user_agent)

    async def first(self, to: Registration) -> tuple[Device, ...]:
        """Call, take one list, and end."""
        async with contextlib.aclosing(self.lists(to)) as lists:
            return await anext(lists)


@pytest.mark.parametrize("user_agent", ["", "grpc-go/1.60.0", "exporter/1.0 grpc-go/1.60.0"])
async def test_who_else_listens_costs_the_kubelet_nothing(
    make: Make, logs: asyncio.Queue[EventDict], user_agent: str
) -> None:
    node = await make(inventory(A))
    to = await node.kubelet.registered()
    lists = node.kubelet.lists(to)
    assert await anext(lists) == (A,)
    await told(logs, "registered")
    async with contextlib.aclosing(Listener(node, user_agent)) as other:
        assert [await other.first(to) for _ in range(20)] == [(A,)] * 20
        lasting = other.lists(to)
        await anext(lasting)
        node.source.inventories.put_nowait(inventory(A, B))
        assert (await anext(lists), await anext(lasting)) == ((A, B), (A, B))
    assert node.kubelet.registrations.empty()
    assert node._gateway.resources[0].state.cuts == 0


@pytest.mark.parametrize(("user_agent", "deadline"), [("", None), ("grpc-go/1.60.0", 600.0)])
async def test_who_listens_before_the_kubelet_calls_does_not_take_its_place(
    make: Make, user_agent: str, deadline: float | None
) -> None:
    node = await make(inventory(A))
    to = await node.kubelet.registered()
    async with contextlib.aclosing(Listener(node, user_agent)) as other:
        other.deadline = deadline
        others = other.lists(to)
        await anext(others)
        lists = node.kubelet.lists(to)
        await anext(lists)
        await others.aclose()
        node.source.inventories.put_nowait(inventory(A, B))
        assert await anext(lists) == (A, B)
    assert node.kubelet.registrations.empty()


async def test_how_many_asked_for_the_options_is_bounded(make: Make) -> None:
    node = await make(inventory(A))
    to, resource = await node.kubelet.registered(), node._gateway.resources[0].plugin
    for number in range(serve._MOST_AGENTS + 1):
        async with contextlib.aclosing(Listener(node, f"other/{number}")) as other:
            await other.call(to, "GetDevicePluginOptions")
    assert len(resource.asked_options) == serve._MOST_AGENTS


async def test_who_else_listens_is_not_waited_for(make: Make, logs: asyncio.Queue[EventDict]) -> None:
    """A handover waits until our streams are over: the kubelet's are meant."""
    node = await make(inventory(A))
    lists = await served(node, logs)
    resource, to = node._gateway.resources[0].plugin, node._gateway.resources[0].state.name
    async with contextlib.aclosing(Listener(node)) as other:
        await anext(other.lists(Registration("v1beta1", to, GPU)))
        assert resource.streaming
        await lists.aclose()
        await told(logs, "stream ended")
        assert not resource.streaming


async def test_a_list_that_is_too_large_for_somebody_else_is_not_withheld(
    make: Make, logs: asyncio.Queue[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await make(inventory(A))
    await served(node, logs)
    monkeypatch.setattr(devicelist, "LIST_LIMIT", 1)
    async with contextlib.aclosing(Listener(node)) as other:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await other.first(Registration("v1beta1", node._gateway.resources[0].state.name, GPU))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert node._gateway.resources[0].state.phase is Phase.SERVING


async def test_what_others_show_is_no_evidence_of_the_kubelet(make: Make) -> None:
    """What a kubelet 1.24 or 1.25 may be is 1.24 where it didn't ask for the options, whoever else did, or listens."""
    node = await make(inventory(A), user_agent="grpc-go/1.45.0")
    to = await node.kubelet.registered()
    async with contextlib.aclosing(Listener(node, "grpc-go/1.82.1 other/1.0")) as other:
        await other.call(to, "GetDevicePluginOptions")
        await anext(node.kubelet.lists(to))
        before = node._gateway.resources[0].plugin.level
        await anext(other.lists(to))
        assert node._gateway.resources[0].plugin.level == before == Level(23, 24)


async def test_others_are_bounded_and_the_kubelet_is_always_heard(
    make: Make, monkeypatch: pytest.MonkeyPatch, logs: asyncio.Queue[EventDict]
) -> None:
    monkeypatch.setattr(serve, "MOST_STREAMS", 3)
    node = await make(inventory(A))
    to = await node.kubelet.registered()
    lists = node.kubelet.lists(to)
    await anext(lists)
    await told(logs, "registered")
    async with contextlib.aclosing(Listener(node)) as other:
        listening = [other.lists(to) for _ in range(2)]
        assert [await anext(one) for one in listening] == [(A,)] * 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await other.first(to)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await lists.aclose()
        again = await node.kubelet.registered()
        refill = other.lists(again)
        await anext(refill)
        lists = node.kubelet.lists(again)
        assert await anext(lists) == (A,)
        node.source.inventories.put_nowait(inventory(A, B))
        assert await anext(lists) == (A, B)


async def test_other_options_while_the_call_is_waited_for_are_said(make: Make) -> None:
    node = await make(inventory(A))
    first = await node.kubelet.registered()
    options = Options(pre_start_required=True)
    await node._gateway.lists.take(inventory(A, B, options=options))
    assert [one async for one in node.kubelet.lists(first)] in ([], [(A, B)])
    again = await node.kubelet.registered()
    assert (first.options, again.options) == (Options(), options)


@pytest.mark.parametrize(
    ("api", "then"),
    [
        pytest.param("v1alpha2", inventory(B, options=Options(preferred_allocation=True)), id="1.9 knows no options"),
        pytest.param("v1beta1", {GPU: Listing(())}, id="what is offered no longer asks what it asked"),
    ],
)
async def test_no_stream_ends_for_options_that_say_nothing_new(
    make: Make, logs: asyncio.Queue[EventDict], api: str, then: Inventory
) -> None:
    options = Options(preferred_allocation=api == "v1beta1")
    node = await make(inventory(A, options=options), api)
    lists = await served(node, logs)
    await node._gateway.lists.take(then)
    await anext(lists)
    assert node._gateway._resources[GPU].state.phase is Phase.SERVING


# One list at a time.


@pytest.mark.parametrize(
    ("api", "expected"),
    [
        pytest.param(
            "v1alpha2", [(0.02, True)] * 4 + [(0.02, False)], id="1.9 writes its checkpoint in place, unlocked"
        ),
        pytest.param("0.1", [], id="1.8 writes it after Allocate only, one pod at a time"),
        pytest.param("v1beta1", [], id="later ones rename it into place"),
    ],
)
async def test_a_kubelet_that_can_take_one_list_at_a_time_gets_one_at_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch, api: str, expected: list[tuple[float, bool]]
) -> None:
    """First lists, later ones, and answers to Allocate; somebody else who listens takes no turn."""
    taken: list[tuple[float, bool]] = []

    async def take(_: Turns, spacing: float, *, writes: bool) -> None:
        taken.append((spacing, writes))

    monkeypatch.setattr(Turns, "take", take)
    node = await make({GPU: Listing((A,)), "example.com/b": Listing((B,))}, api)
    to, _ = both = [await node.kubelet.registered() for _ in range(2)]
    lists = [node.kubelet.lists(one) for one in both]
    for one in lists:
        await anext(one)
    async with contextlib.aclosing(Listener(node)) as other:
        await other.first(to)
        node.source.inventories.put_nowait({GPU: Listing((A, ILL)), "example.com/b": Listing((B, ILL))})
        for one in lists:
            await anext(one)
        await node.kubelet.allocate(to, [{GPU: "a"}.get(to.resource_name, "b")])
    assert taken == expected


@pytest.mark.parametrize(
    "waits", [pytest.param(False, id="at once"), pytest.param(True, id="while it waits for its turn")]
)
async def test_a_stream_that_ends_takes_no_turn(make: Make, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """It sends nothing, so kubelet 1.9 writes nothing: the next list waited 2 s for that, at each handover."""
    log: list[str] = []
    node = await make({GPU: Listing((A,))}, "v1alpha2")
    [to] = [await node.kubelet.registered()]
    lists = node.kubelet.lists(to)
    await anext(lists)
    plugin = node._gateway.resources[0].plugin

    async def take(_: Turns, spacing: float, *, writes: bool) -> None:
        log.append("taken")
        plugin.end_streams()

    monkeypatch.setattr(Turns, "take", take)
    monkeypatch.setattr(Turns, "unused", lambda _: log.append("unused"))
    if waits:
        node.source.inventories.put_nowait({GPU: Listing((A, ILL))})
    else:
        plugin.end_streams()
    assert [one async for one in lists] == []
    assert log == (["taken", "unused"] if waits else [])


class Context:
    """The server's side of a call, as far as ListAndWatch knows it; ``write`` is the test's."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self.write = write

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("user-agent", "grpc-go/1.82.1"),)

    def time_remaining(self) -> None:
        return None


async def test_a_list_that_changes_while_one_is_sent_is_sent_too(make: Make, logs: asyncio.Queue[EventDict]) -> None:
    node = await make(inventory(A))
    await served(node, logs)
    one, sent, enough = node._gateway.resources[0], list[tuple[Device, ...]](), asyncio.Event()

    async def write(data: bytes) -> None:
        sent.append(node.kubelet.dialect.decode_list(data))
        if len(sent) == 1:
            await node._gateway.lists.take(inventory(A, B))
        else:
            enough.set()

    stream = asyncio.ensure_future(
        one.plugin._list_and_watch(node.kubelet.dialect, rpc.Call(cast("Any", Context(write))))
    )
    async with asyncio.timeout(10):
        await enough.wait()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert sent == [(A,), (A, B)]


async def test_a_long_list_is_spelled_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes meanwhile is spelled when it is sent."""
    dialect, shown, threads = by_name("v1beta1"), DeviceList(GPU, Tally(), grace=False), list[threading.Thread]()

    def become(*devices: Device) -> None:
        shown.becomes(Listing(devices), tuple(Entry(device, State.PRESENT) for device in devices))

    def slow(dialect: Dialect, devices: Sequence[Device], before: Parts) -> tuple[Wire, Parts]:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            become(A, B)
        return spelled.spell(dialect, devices, before)

    monkeypatch.setattr(devicelist, "AT_ONCE", 0)
    monkeypatch.setattr(devicelist, "spell", slow)
    become(A)
    await shown.spell(dialect)
    assert threads[0] is not threading.main_thread()
    assert dialect.decode_list(shown.wire(dialect).data) == (A, B)


@pytest.mark.parametrize(("devices", "room", "fits"), [((A, B), 0, True), ((A, B), -1, False), ((A,), 0, False)])
async def test_a_list_may_be_just_as_large_as_the_kubelet_receives(
    make: Make,
    logs: asyncio.Queue[EventDict],
    monkeypatch: pytest.MonkeyPatch,
    devices: tuple[Device, ...],
    room: int,
    fits: bool,
) -> None:
    node = await make(inventory(A, B))
    await served(node, logs)
    dialect = node.kubelet.dialect
    monkeypatch.setattr(devicelist, "LIST_LIMIT", len(dialect.encode_list(devices).data) + room)
    said = node._gateway.resources[0].plugin.list.too_large(dialect)
    assert said is None if fits else "1 devices would fit" in (said or "")


@pytest.mark.parametrize(
    ("allocatable", "devices", "young", "asks"),
    [
        pytest.param({}, (A,), False, True, id="the whole resource is missing"),
        pytest.param({GPU: frozenset[str]()}, (A,), False, True, id="it is there, and nothing of it"),
        pytest.param({GPU: frozenset({"b"})}, (A, B), False, False, id="some of it is there: that is drift"),
        pytest.param(None, (A,), False, False, id="the kubelet doesn't tell"),
        pytest.param({}, (ILL,), False, False, id="nothing of it is healthy"),
        pytest.param({}, (A,), True, False, id="the look is older than the stream"),
    ],
)
async def test_a_later_look_that_lacks_a_resource_begins_a_look_for_it(
    make: Make,
    logs: asyncio.Queue[EventDict],
    monkeypatch: pytest.MonkeyPatch,
    allocatable: dict[str, frozenset[str]] | None,
    devices: tuple[Device, ...],
    young: bool,
    asks: bool,
) -> None:
    node = await make(inventory(*devices))
    lists = await served(node, logs)
    one, fed = node._gateway.resources[0], list[Event]()
    assert one.stream_since is not None
    monkeypatch.setattr(one, "feed", fed.append)
    at = one.stream_since + (-1 if young else 1)
    node._gateway._looked(Look(View(None, None, allocatable), at, time.time()))
    monkeypatch.undo()
    assert fed == [Lacking()] * asks
    await lists.aclose()


async def test_pre_start_hands_on_what_the_source_says(make: Make) -> None:
    kubelet = (await make(inventory(A))).kubelet
    registration = await kubelet.registered()
    with pytest.raises(grpc.aio.AioRpcError, match="is busy"):
        await kubelet.call(registration, "PreStartContainer", kubelet.dialect.encode_pre_start_request(["a"]).data)
    with pytest.raises(grpc.aio.AioRpcError, match="never was"):
        await kubelet.call(registration, "PreStartContainer", kubelet.dialect.encode_pre_start_request(["x"]).data)


@pytest.mark.parametrize("method", ["GetDevicePluginOptions", "GetPreferredAllocation", "PreStartContainer", "Dance"])
async def test_an_alpha_kubelet_has_two_calls(make: Make, method: str) -> None:
    kubelet = (await make(inventory(A), "v1alpha2")).kubelet
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kubelet.call(await kubelet.registered(), method)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_preferred_allocation_is_the_sources(make: Make) -> None:
    kubelet = (await make(inventory(A, B))).kubelet
    request = kubelet.dialect.encode_preferred_request([PreferredRequest(("b", "a"), (), 1)]).data
    answer = await kubelet.call(await kubelet.registered(), "GetPreferredAllocation", request)
    assert kubelet.dialect.decode_preferred_answer(answer) == (("a",),)


async def test_what_is_not_on_the_list_is_preferred_last(make: Make) -> None:
    """To choose among 140 000 of them took more than a second, and a device of before the list changed can't be allocated."""
    kubelet = (await make(inventory(A, B))).kubelet
    request = kubelet.dialect.encode_preferred_request([PreferredRequest(("A", "B", "C", "b", "a"), (), 3)]).data
    answer = await kubelet.call(await kubelet.registered(), "GetPreferredAllocation", request)
    assert kubelet.dialect.decode_preferred_answer(answer) == (("A", "a", "b"),)


@pytest.mark.parametrize(
    ("must", "last"),
    [
        pytest.param((), ("avoided", A.id, "gone"), id="the one can be had in a moment, the other never"),
        pytest.param((B.id, "gone"), (), id="nothing, where all of the choice is given"),
    ],
)
def test_what_another_api_gives_back_is_preferred_to_what_is_not_on_the_list(
    must: tuple[str, ...], last: tuple[str, ...]
) -> None:
    on_offer = DeviceList(GPU, Tally(), grace=False)
    on_offer.becomes(None, (Entry(A, State.RETURNING), Entry(B, State.PRESENT)))
    request = PreferredRequest(("gone", A.id, B.id), must, 2)
    assert on_offer.given_last((A.id, "avoided"), request) == last


async def test_what_was_ill_of_late_is_preferred_last(make: Make) -> None:
    node = await make(inventory(replace(A, health=Health.UNHEALTHY), B))
    registration = await node.kubelet.registered()
    lists = node.kubelet.lists(registration)
    await anext(lists)
    node.source.inventories.put_nowait(inventory(A, B))
    assert await anext(lists) == (A, B)
    request = node.kubelet.dialect.encode_preferred_request([PreferredRequest(("b", "a"), (), 1)]).data
    answer = await node.kubelet.call(registration, "GetPreferredAllocation", request)
    assert node.kubelet.dialect.decode_preferred_answer(answer) == (("b",),)


async def test_a_new_socket_directory_that_can_not_be_used_at_once_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, logs: asyncio.Queue[EventDict]
) -> None:
    """As where no descriptor is left to bind with: seen in the gauntlet, and nothing else would ever mend it."""
    node = await make(inventory(A))
    await node.kubelet.registered()
    failures, bind = iter(range(3)), DevicePlugin.bind

    async def fail_at_first(self: DevicePlugin, path: Path) -> None:
        if next(failures, None) is not None:
            raise RuntimeError("Too many open files")
        await bind(self, path)

    monkeypatch.setattr(DevicePlugin, "bind", fail_at_first)
    node._gateway._folder._replaced()
    await told(logs, "the new socket directory can't be used yet")
    async with asyncio.timeout(10):
        await node._gateway._folder._rebinding  # type: ignore[misc]  # it is there
    assert next(failures, None) is None
    assert node._gateway.around.own_socket(GPU).is_socket()
