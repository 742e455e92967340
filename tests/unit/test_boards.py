"""One GPU, one pod: what an edit of the configuration does to hardware that a pod holds under another ID."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from adapters.registry import by_name
from devices import boards
from devices.boards import Claim, Place, place_of
from devices.combined import Combined
from devices.generic import GenericSource
from devices.gpu.backend import Sight
from devices.gpu.model import GPU
from devices.gpu.simulated.backend import VENDORS
from devices.gpu.source import GPUSource
from devices.life import merging
from devices.life.states import State
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    Fault,
    Health,
    RefusedError,
    Sayable,
    Trouble,
    TroubleKind,
)
from devices.policy import Globbed, MigStrategy, Naming, Policy, Slices
from devices.source import DeviceSource, Inventory, Listing, Partial
from gateway import lists
from gateway.age import Age
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.handover import instance, peers
from gateway.kubelet import beliefs
from gateway.kubelet import view as kubelet_view
from gateway.kubelet.beliefs import Look
from gateway.kubelet.drift import Earlier
from gateway.kubelet.watch import CHECKPOINT, KUBELET_SOCKET
from gateway.lab.waiting import until
from gateway.lists import HANDED_OVER_LOOK, HOLDERS_AGAIN, PART
from gateway.memory import owners
from gateway.memory.again import RECORDED_WITHIN
from gateway.memory.ledger import Ledger
from gateway.memory.rows import Cordon
from gateway.registration.events import Phase
from gateway.registration.serve import DevicePlugin
from gateway.telling import changes
from gateway.telling.commands import Commands
from tests.unit.answering import GUARD

GPUS, AMD, RENAMED = "nvidia.com/gpu", "amd.com/gpu", "nvidia.com/a100"
SMALL = "nvidia.com/mig-1g.5gb"
PLAIN = Policy()
TWICE, FOUR = (Policy(slices={GPUS: Slices(times, GPUS)}) for times in (2, 4))
SHARED_AS = Policy(slices={GPUS: Slices(2, "nvidia.com/gpu.shared")})
NAMED = Policy(gpu_names=(("*", RENAMED),))
NAMED_TWICE = replace(NAMED, slices={RENAMED: Slices(2, RENAMED)})
MIXED, SINGLE = Policy(mig_strategy=MigStrategy.MIXED), Policy(mig_strategy=MigStrategy.SINGLE)
MIXED_TWICE = replace(MIXED, slices={SMALL: Slices(2, SMALL)})
AMD_MIXED = Policy(resource_naming=Naming.MIXED)

OLDER, NEWER = Age(0, "older"), Age(1 << 61, "newer")

Ids = Mapping[str, Collection[str]]


# The rule itself.


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        pytest.param(Place("G"), Place("G"), True, id="the same GPU"),
        pytest.param(Place("G"), Place("H"), False, id="two GPUs"),
        pytest.param(Place("G"), Place("G", "P"), True, id="a GPU and a partition of it"),
        pytest.param(Place("G", "P"), Place("G", "P"), True, id="the same partition"),
        pytest.param(Place("G", "P"), Place("G", "Q"), False, id="two partitions of a GPU"),
        pytest.param(Place("G", "P"), Place("H", "P"), False, id="partitions of two GPUs"),
    ],
)
def test_what_overlaps(one: Place, other: Place, overlap: bool) -> None:
    assert one.overlaps(other) is other.overlaps(one) is overlap


@pytest.mark.parametrize(
    ("device", "place"),
    [
        (Device("GPU-1"), Place("GPU-1")),
        (Device("GPU-1::0"), Place("GPU-1")),
        (Device("MIG-1", part_of="GPU-1"), Place("GPU-1", "MIG-1")),
        (Device("MIG-1::12", part_of="GPU-1"), Place("GPU-1", "MIG-1")),
        (Device("MIG-GPU-1/7/0"), Place("GPU-1", "MIG-GPU-1/7/0")),
        (Device("MIG-GPU-1/7/0::1"), Place("GPU-1", "MIG-GPU-1/7/0")),
        (Device("MIG-1"), Place("MIG-1")),
        (Device("/dev/fuse::3"), Place("/dev/fuse")),
        (Device("GPU::x"), Place("GPU::x")),
        (Device("::1"), Place("::1")),
    ],
)
def test_where_a_device_is(device: Device, place: Place) -> None:
    assert place_of(device) == place


@pytest.mark.parametrize(
    ("offered", "claimed", "held", "withheld"),
    [
        pytest.param("G", "G", (), True, id="the same ID, under another name"),
        pytest.param("G::0", "G", (), True, id="shared now, held whole"),
        pytest.param("G", "G::0", (), True, id="whole now, held as a replica"),
        pytest.param("G::0", "G::3", (), True, id="fewer replicas now"),
        pytest.param("G::0", "G::3", ("G::0",), False, id="who shared it goes on sharing it"),
        pytest.param("G::0", "G::3", ("G::1",), True, id="but nobody else begins to"),
        pytest.param("G::0", "G", ("G::0",), True, id="who holds it whole shares it with nobody"),
        pytest.param("G", "G::0", ("G",), True, id="nor does who holds a replica with one who has it whole"),
        pytest.param("H", "G", (), False, id="another GPU"),
    ],
)
def test_what_is_withheld(offered: str, claimed: str, held: Sequence[str], withheld: bool) -> None:
    claim = Claim("r", claimed, place_of(Device(claimed)), "why")
    others = Claim("r", "X", Place("X"), "why not")
    found = boards.withheld([others, claim], [Device(offered)], held)
    assert found == ({offered: "why"} if withheld else {})


def test_what_a_pod_holds_is_claimed_whatever_is_given_out_beside_it() -> None:
    """What another gateway offers isn't, where we gave the same hardware out before."""
    holds, offers = boards.held(GPUS, "G", Place("G"), "pod"), boards.offered_elsewhere(RENAMED, "G", Place("G"))
    assert boards.not_beside([Device("G::0")], [holds, offers]) == [holds]
    assert boards.not_beside([Device("H")], [holds, offers]) == [holds, offers]


def test_a_claim_says_who_holds_what() -> None:
    assert boards.held(GPUS, "U0", Place("U0"), "ns/pod/main").words == "still held as nvidia.com/gpu U0 by ns/pod/main"
    assert "can't be seen now" in boards.held(GPUS, "U0", Place("U0"), None).words
    assert len(boards.held(GPUS, "U0", Place("U0"), "x" * 999).words) < 300


# A whole gateway, but for the kubelet.


class Backend:
    """Shows what it is told to."""

    name = "test"
    hindrance = ""

    def __init__(self) -> None:
        self.sights: asyncio.Queue[Sight] = asyncio.Queue()

    async def watch(self) -> AsyncGenerator[Sight]:
        while True:
            yield await self.sights.get()

    async def release(self, uuids: Collection[str]) -> None: ...

    async def acquire(self, uuids: Collection[str]) -> None: ...


class Deaf:
    """Who gave an order and doesn't wait for the answer."""

    async def send(self, message: object) -> None: ...


class Node:
    """A gateway and its kubelet's checkpoint. Nothing happens but what a test does."""

    def __init__(self, folder: Path, policy: Policy = PLAIN) -> None:
        self.folder, self.policy = folder, policy
        self.sight: tuple[GPU, ...] = ()
        (folder / "dp").mkdir()
        self._up()

    def _up(self) -> None:
        self.backend = Backend()
        self.source = self._source()
        self.gateway = Gateway(Settings(socket_dir=self.folder / "dp", state_dir=self.folder / "state"), self.source)
        self.gateway.ledger.load()
        self.gateway.holdings.recall(self.gateway.ledger.resources())
        self.gateway._instance.create()
        self.inventories: AsyncIterator[Inventory] = self.source.watch()

    def _source(self) -> DeviceSource:
        return GPUSource(self.backend, self.policy, VENDORS)

    async def close(self) -> None:
        await cast("Any", self.inventories).aclose()
        await self.gateway._close()

    async def restarts(self, policy: Policy | None = None) -> None:
        """The gateway ends, and the next one sees the same GPUs, first of all what the kubelet wrote down."""
        await self.close()
        self.policy = policy or self.policy
        self._up()
        await self.looks()
        await self.gateway.update()
        await self.sees(*self.sight)

    async def sees(self, *gpus: GPU) -> None:
        self.sight = gpus
        self.backend.sights.put_nowait(Sight(gpus))
        await self._next()

    async def edit(self, policy: Policy) -> None:
        self.policy = policy
        self.source.adopt(policy)
        await self._next()

    async def _next(self) -> None:
        async with asyncio.timeout(GUARD):
            await self.gateway.lists.take(await anext(self.inventories))

    async def pods(self, **held: Ids) -> None:
        """The kubelet writes down who holds what, by pod, and the gateway reads it."""
        self.writes(**held)
        await self.looks()
        await self.gateway.update()

    async def looks(self) -> None:
        """Look into what the kubelet wrote down, also where a look was under way that began before it did."""
        await self.gateway.beliefs.look()
        await self.gateway.beliefs.look()

    def writes(self, **held: Ids) -> None:
        """The kubelet writes down who holds what, by pod."""
        entries = [
            {"PodUID": pod, "ContainerName": "main", "ResourceName": name, "DeviceIDs": sorted(ids), "AllocResp": ""}
            for pod, resources in held.items()
            for name, ids in resources.items()
        ]
        data = msgspec.json.encode({"PodDeviceEntries": entries, "RegisteredDevices": {}})
        (self.folder / "dp" / CHECKPOINT).write_bytes(data)

    async def loses_memory(self) -> None:
        """Another kubelet comes, and knows of nobody who holds anything."""
        self.gateway.beliefs.restarted(self.gateway._resources)
        await self.pods()

    async def forgets(self, *ids: str) -> None:
        """An operator says that nothing uses these devices that the kubelet doesn't know of."""
        for one in ids:
            await self.orders("forget", one)

    async def orders(self, op: str, device_id: str) -> None:
        await Commands(self.gateway)._order(cast("Any", Deaf()), {"op": op, "id": device_id, "reason": "ECC"})

    def states(self, resource: str) -> dict[str, State]:
        plugin = self.gateway._resources.get(resource)
        return {} if plugin is None else {device_id: entry.state for device_id, entry in plugin.entries.items()}

    def free(self) -> dict[str, list[str]]:
        """What the kubelet may give out, held or not."""
        return {
            name: ids
            for name, plugin in self.gateway._resources.items()
            if (ids := [device.id for device in plugin.plugin.devices if device.health is Health.HEALTHY])
        }

    async def allocate(self, resource: str, *ids: str) -> None:
        dialect = by_name("v1beta1")
        request = dialect.encode_allocate_request([ContainerRequest(ids)]).data
        await self.gateway._resources[resource].plugin._allocate(dialect, request, cast("Any", None))


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[Node]:
    one = Node(folder)
    yield one
    await one.close()


def gpu(index: int, **rest: Any) -> GPU:
    return replace(GPU(f"U{index}", index, index, resource=GPUS, product="A100"), **rest)


def mig(parent: int, number: int) -> GPU:
    return gpu(parent, uuid=f"MIG-{parent}{number}", parent=f"U{parent}", profile="1g.5gb")


def cpx(number: int, **rest: Any) -> GPU:
    return replace(GPU(f"xcp_{number}", number, number, resource=AMD, parent="A0", profile="cpx_nps4"), **rest)


WHOLE = (gpu(0), gpu(1))
SPLIT = (gpu(0, partitioned=True), mig(0, 0), mig(0, 1), gpu(1))
SPLIT_ANEW = (gpu(0, partitioned=True), mig(0, 7), gpu(1))
SPLIT_LESS = (gpu(0, partitioned=True), mig(0, 1), mig(0, 8), gpu(1))
AMD_WHOLE = (GPU("A0", 0, 0, resource=AMD, profile="spx_nps1"),)
AMD_SPLIT = (GPU("A0", 0, 0, resource=AMD, profile="cpx_nps4", partitioned=True), cpx(1), cpx(2))


@pytest.mark.parametrize("again", ["", "restart", "restart with the edit"])
@pytest.mark.parametrize(
    ("before", "after", "gpus", "then", "held", "free"),
    [
        pytest.param(PLAIN, TWICE, WHOLE, WHOLE, {GPUS: ["U0"]}, {GPUS: ["U1::0", "U1::1"]}, id="plain, then shared"),
        pytest.param(TWICE, PLAIN, WHOLE, WHOLE, {GPUS: ["U0::1"]}, {GPUS: ["U1"]}, id="shared, then plain"),
        pytest.param(PLAIN, NAMED, WHOLE, WHOLE, {GPUS: ["U0"]}, {RENAMED: ["U1"]}, id="renamed"),
        pytest.param(NAMED, PLAIN, WHOLE, WHOLE, {RENAMED: ["U0"]}, {GPUS: ["U1"]}, id="renamed back"),
        pytest.param(
            PLAIN,
            SHARED_AS,
            WHOLE,
            WHOLE,
            {GPUS: ["U0"]},
            {"nvidia.com/gpu.shared": ["U1::0", "U1::1"]},
            id="shared under another name",
        ),
        pytest.param(
            SHARED_AS, PLAIN, WHOLE, WHOLE, {"nvidia.com/gpu.shared": ["U0::0"]}, {GPUS: ["U1"]}, id="and back"
        ),
        pytest.param(
            PLAIN,
            NAMED_TWICE,
            WHOLE,
            WHOLE,
            {GPUS: ["U0"]},
            {RENAMED: ["U1::0", "U1::1"]},
            id="renamed and shared",
        ),
        pytest.param(
            TWICE,
            FOUR,
            WHOLE,
            WHOLE,
            {GPUS: ["U0::1"]},
            {GPUS: [f"U{gpu}::{number}" for gpu in (0, 1) for number in range(4)]},
            id="more replicas: what is held is offered still",
        ),
        pytest.param(
            FOUR, TWICE, WHOLE, WHOLE, {GPUS: ["U0::3"]}, {GPUS: ["U1::0", "U1::1"]}, id="fewer replicas, one too many"
        ),
        pytest.param(
            FOUR,
            TWICE,
            WHOLE,
            WHOLE,
            {GPUS: ["U0::0"]},
            {GPUS: ["U0::0", "U0::1", "U1::0", "U1::1"]},
            id="fewer replicas, and those that are held among them",
        ),
        pytest.param(
            FOUR,
            TWICE,
            WHOLE,
            WHOLE,
            {GPUS: ["U0::0", "U0::3"]},
            {GPUS: ["U0::0", "U1::0", "U1::1"]},
            id="fewer replicas: who shares goes on sharing",
        ),
        pytest.param(PLAIN, MIXED, SPLIT, SPLIT, {GPUS: ["U0"]}, {GPUS: ["U1"]}, id="MIG none, then mixed"),
        pytest.param(MIXED, PLAIN, SPLIT, SPLIT, {SMALL: ["MIG-00"]}, {GPUS: ["U1"]}, id="MIG mixed, then none"),
        pytest.param(
            MIXED,
            MIXED_TWICE,
            SPLIT,
            SPLIT,
            {SMALL: ["MIG-00"]},
            {SMALL: ["MIG-01::0", "MIG-01::1"], GPUS: ["U1"]},
            id="partitions shared: the others are apart",
        ),
        pytest.param(MIXED, MIXED, SPLIT, SPLIT_ANEW, {SMALL: ["MIG-00"]}, {GPUS: ["U1"]}, id="a partition is no more"),
        pytest.param(
            MIXED, MIXED, SPLIT, WHOLE, {SMALL: ["MIG-00"]}, {GPUS: ["U1"]}, id="MIG is off, and an instance is held"
        ),
        pytest.param(MIXED, MIXED, WHOLE, SPLIT, {GPUS: ["U0"]}, {GPUS: ["U1"]}, id="MIG is on beneath a pod"),
        pytest.param(
            PLAIN, MIXED_TWICE, WHOLE, SPLIT, {GPUS: ["U0"]}, {GPUS: ["U1"]}, id="MIG is on, mixed and shared"
        ),
        pytest.param(
            MIXED_TWICE,
            MIXED,
            SPLIT,
            SPLIT_ANEW,
            {SMALL: ["MIG-00::1"]},
            {GPUS: ["U1"]},
            id="a shared partition is no more",
        ),
        pytest.param(
            MIXED,
            MIXED,
            SPLIT,
            SPLIT_LESS,
            {SMALL: ["MIG-00", "MIG-01"]},
            {GPUS: ["U1"]},
            id="one of two held partitions is no more: it may be anywhere",
        ),
        pytest.param(
            PLAIN, PLAIN, AMD_SPLIT, AMD_WHOLE, {AMD: ["xcp_1"]}, {}, id="AMD: in one piece, and a partition is held"
        ),
        pytest.param(
            AMD_MIXED,
            AMD_MIXED,
            AMD_WHOLE,
            AMD_SPLIT,
            {"amd.com/spx_nps1": ["A0"]},
            {},
            id="AMD: in pieces, and the whole is held",
        ),
        pytest.param(
            PLAIN,
            AMD_MIXED,
            AMD_SPLIT,
            AMD_SPLIT,
            {AMD: ["xcp_1"]},
            {"amd.com/cpx_nps4": ["xcp_2"]},
            id="AMD: partitions have another name",
        ),
    ],
)
async def test_an_edit_gives_nobody_what_a_pod_holds(
    folder: Path,
    before: Policy,
    after: Policy,
    gpus: Sequence[GPU],
    then: Sequence[GPU],
    held: Ids,
    free: Ids,
    again: str,
) -> None:
    """Whether the gateway goes on, or is restarted after the edit, or the next one comes with it; until the pod has ended."""
    node = Node(folder, before)
    try:
        await node.sees(*gpus)
        await node.pods(a=held)
        if again == "restart with the edit":
            node.sight = tuple(then)
            await node.restarts(after)
        else:
            if after != before:
                await node.edit(after)
            if then != gpus:
                await node.sees(*then)
        if again == "restart":
            await node.restarts()
        assert node.free() == free
        for resource, ids in held.items():
            kept = {State.WITHDRAWN, State.LOST, State.PRESENT, State.WITHHELD}
            assert all(node.states(resource)[one] in kept for one in ids)
        await node.pods()
        assert State.WITHHELD not in [state for name in node.gateway._resources for state in node.states(name).values()]
        node2 = {
            name: {device.id for device in one.devices} for name, one in (node.gateway.lists.inventory or {}).items()
        }
        assert {name: set(ids) for name, ids in node.free().items()} == {
            name: ids for name, ids in node2.items() if ids
        }
    finally:
        await node.close()


@pytest.mark.parametrize(
    ("after", "held", "free"),
    [
        pytest.param(TWICE, {GPUS: ["U0"]}, {GPUS: ["U1::0", "U1::1"]}, id="shared"),
        pytest.param(NAMED, {GPUS: ["U0"]}, {RENAMED: ["U1"]}, id="renamed"),
        pytest.param(MIXED, {GPUS: ["U0"]}, {GPUS: ["U1"]}, id="partitions"),
    ],
)
async def test_a_silent_source_gives_nobody_what_a_pod_holds(folder: Path, after: Policy, held: Ids, free: Ids) -> None:
    """A gateway that comes again, whose driver doesn't answer while another source does, goes by what was listed last."""
    node = Node(folder)
    file = Partial({"a.b/file": Listing((Device("/dev/f"),))}, awaits=lambda name: name.startswith("nvidia.com/"))
    try:
        await node.sees(*SPLIT)
        await node.pods(a=held)
        await node.edit(after)
        await node.close()
        node._up()
        for holders in ({"a": held}, {}):
            node.writes(**holders)
            await node.looks()
            await node.gateway.lists.take(file)
            assert node.free() == {**free, "a.b/file": ["/dev/f"]}
        await node.sees(*SPLIT)
        assert State.WITHHELD not in [state for name in node.gateway._resources for state in node.states(name).values()]
    finally:
        await node.close()


class BesideFiles(Node):
    """Its GPUs' source could have any name that no path rule has."""

    def _source(self) -> DeviceSource:
        return Combined([super()._source(), GenericSource(self.policy)])


@pytest.mark.parametrize("again", ["the gateway goes on", "the next one comes with the edit", "without a state file"])
async def test_a_rule_that_is_renamed_beside_a_silent_source_gives_nobody_what_a_pod_holds(
    folder: Path, again: str
) -> None:
    before, after = ("nvidia.com/file", "a.b/file")
    rules = [Policy(globbed=(Globbed(name, ("/dev/null",)),)) for name in (before, after)]
    node = BesideFiles(folder, rules[0])
    try:
        await node._next()
        assert node.free() == {before: ["/dev/null"]}
        await node.pods(a={before: ["/dev/null"]})
        if again == "the gateway goes on":
            await node.edit(rules[1])
        else:
            await node.close()
            if again == "without a state file":
                (folder / "state" / "ledger.json").unlink()
            node.policy = rules[1]
            node._up()
            await node.looks()
            await node._next()
        assert (node.free(), node.states(after)) == ({}, {"/dev/null": State.WITHHELD})
        if again != "without a state file":
            assert node.states(before) == {"/dev/null": State.WITHDRAWN}
        await node.pods()
        assert node.free() == {after: ["/dev/null"]}
    finally:
        await node.close()


async def test_a_configuration_that_goes_back_and_forth_gives_out_nothing_held(node: Node) -> None:
    """What was given under the new IDs is kept from the old ones, and what is held still is no reason any more."""
    await node.sees(*WHOLE)
    await node.pods(a={GPUS: ["U0"]})
    await node.edit(TWICE)
    await node.pods(a={GPUS: ["U0"]}, b={GPUS: ["U1::1"]})
    await node.edit(PLAIN)
    assert node.states(GPUS) == {"U0": State.PRESENT, "U1": State.WITHHELD, "U1::1": State.WITHDRAWN}
    await node.pods(a={GPUS: ["U0"]})
    assert node.states(GPUS) == {"U0": State.PRESENT, "U1": State.PRESENT}


async def test_what_is_withheld_says_why_and_is_refused(node: Node) -> None:
    await node.sees(*WHOLE)
    await node.pods(a={GPUS: ["U0"]})
    await node.edit(SHARED_AS)
    entry = node.gateway._resources["nvidia.com/gpu.shared"].entries["U0::0"]
    assert entry.reason == "still held as nvidia.com/gpu U0 by a/main"
    assert entry.device.health is Health.UNHEALTHY
    with pytest.raises(
        RefusedError, match=r"withheld \(still held as nvidia.com/gpu U0 by a/main\).*container has ended"
    ) as e:
        await node.allocate("nvidia.com/gpu.shared", "U1::0", "U0::0")
    assert e.value.fault is Fault.FAILED_PRECONDITION
    assert {"U0::0", "U0::1"} <= set(node.gateway.beliefs.avoid("nvidia.com/gpu.shared"))


async def test_what_was_given_a_moment_ago_is_held(node: Node) -> None:
    """Before it was noted, and before any look into the kubelet's records."""
    await node.sees(*WHOLE)
    await node.pods()
    await node.allocate(GPUS, "U0")
    await node.edit(TWICE)
    assert node.free() == {GPUS: ["U1::0", "U1::1"]}
    assert "given it a moment ago" in node.gateway._resources[GPUS].entries["U0::0"].reason


@pytest.mark.parametrize(
    ("seconds", "free"),
    [
        pytest.param(0.0, ["U1::0", "U1::1"], id="the kubelet may not have written it down"),
        pytest.param(RECORDED_WITHIN + 0.1, ["U0::0", "U0::1", "U1::0", "U1::1"], id="it gave it to nobody"),
    ],
)
async def test_records_of_the_same_moment_end_no_hand_out(
    node: Node, seconds: float, free: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.sees(*WHOLE)
    await node.allocate(GPUS, "U0")
    node.gateway._resources[GPUS].plugin.note_handed_out()
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + seconds)
    await node.pods()
    monkeypatch.undo()
    await node.edit(TWICE)
    assert node.free() == {GPUS: free}


async def test_an_allocate_while_the_new_ids_are_written_counts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.sees(*WHOLE)
    await node.pods()
    durable = node.gateway.scribe.durable

    async def slow() -> bool:
        monkeypatch.undo()
        await node.allocate(GPUS, "U0")
        return await durable()

    monkeypatch.setattr(node.gateway.scribe, "durable", slow)
    await node.edit(TWICE)
    assert node.free() == {GPUS: ["U1::0", "U1::1"]}
    assert node.gateway.ledger.announced(GPUS)["U0::0"].health is Health.UNHEALTHY


async def test_an_illness_that_lasts_outlives_an_allocate_while_the_new_ids_are_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.sees(gpu(0, trouble=Trouble("Xid 48", TroubleKind.RESET_REQUIRED)), gpu(1))
    await node.pods()
    await node.sees(*WHOLE)
    durable = node.gateway.scribe.durable

    async def slow() -> bool:
        monkeypatch.undo()
        await node.allocate(GPUS, "U1")
        written = await durable()
        assert "U0" in node.gateway.ledger.sticky(RENAMED), "as durable as the ID"
        return written

    monkeypatch.setattr(node.gateway.scribe, "durable", slow)
    await node.edit(NAMED)
    assert node.states(RENAMED) == {"U0": State.UNHEALTHY, "U1": State.WITHHELD}


async def test_many_devices_are_put_together_while_calls_are_answered(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65,000 take a tenth of a second."""
    monkeypatch.setattr(lists, "AT_ONCE", 3)
    await node.sees(*WHOLE)
    await node.pods()
    begun, go_on, merge = threading.Event(), threading.Event(), merging.merge

    def slow(*about: Any) -> merging.Merged:
        assert threading.current_thread() is not threading.main_thread()
        begun.set()
        assert go_on.wait(GUARD)
        return merge(*about)

    monkeypatch.setattr(merging, "merge", slow)
    edited = asyncio.ensure_future(node.edit(TWICE))
    assert await asyncio.to_thread(begun.wait, GUARD)
    monkeypatch.setattr(merging, "merge", merge)
    noted, durable = list[set[str]](), node.gateway.scribe.durable

    async def noting() -> bool:
        noted.append({*node.gateway.ledger.announced(GPUS)})
        return await durable()

    monkeypatch.setattr(node.gateway.scribe, "durable", noting)
    await node.allocate(GPUS, "U0")
    go_on.set()
    await edited
    assert noted[0] >= {"U0::0", "U0::1", "U1::0", "U1::1"}
    assert node.free() == {GPUS: ["U1::0", "U1::1"]}, "what was given meanwhile counts"
    assert sorted(node.gateway.ledger.announced(GPUS)) == ["U0", "U0::0", "U0::1", "U1::0", "U1::1"]


async def test_calls_are_answered_between_the_steps_of_an_update(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 51,200 devices each takes tens of milliseconds."""
    await node.sees(*WHOLE)
    steps, soon = list[str](), asyncio.get_running_loop().call_soon

    def noted(where: object, name: str) -> None:
        do = getattr(where, name)

        def step(*about: Any) -> Any:
            steps.append(name)
            soon(steps.append, "a call")
            return do(*about)

        monkeypatch.setattr(where, name, step)

    noted(changes, "tell")
    noted(node.gateway.beliefs, "listed")
    await node.gateway.update()
    assert steps[:3] == ["tell", "a call", "listed"]


async def test_what_is_forgotten_while_lists_are_put_together_stays_forgotten(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.sees(*WHOLE)
    await node.pods()
    await node.sees(WHOLE[0])
    assert node.states(GPUS)["U1"] is State.LOST
    forgotten, durable = list[asyncio.Future[None]](), node.gateway.scribe.durable

    async def slow() -> bool:
        monkeypatch.undo()
        forgotten.append(asyncio.ensure_future(node.forgets("U1")))
        await asyncio.sleep(0)
        return await durable()

    monkeypatch.setattr(node.gateway.scribe, "durable", slow)
    await node.sees(WHOLE[0], gpu(2))
    await forgotten[0]
    assert node.states(GPUS).keys() == {"U0", "U2"}
    assert "U1" not in node.gateway.ledger.announced(GPUS)


async def test_an_edit_while_the_source_is_asked_refuses_what_is_offered_no_longer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.sees(*WHOLE)
    await node.pods()
    answer = node.source.answer

    async def slow(resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        await node.edit(TWICE)
        return await answer(resource, request, sayable)

    monkeypatch.setattr(node.source, "answer", slow)
    with pytest.raises(RefusedError) as refused:
        await node.allocate(GPUS, "U0")
    assert refused.value.fault is Fault.NOT_FOUND
    assert node.free() == {GPUS: ["U0::0", "U0::1", "U1::0", "U1::1"]}


async def test_who_holds_it_is_not_known(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Withheld, but for a bounded time: as long as what is withdrawn stays."""
    await node.sees(*WHOLE)
    await node.edit(TWICE)
    assert node.free() == {}
    assert "can't be seen now" in node.gateway._resources[GPUS].entries["U0::0"].reason
    monkeypatch.setattr("devices.life.merging.HELD_UNKNOWN_S", 0.0)
    await node.restarts()
    assert node.free() == {GPUS: ["U0::0", "U0::1", "U1::0", "U1::1"]}


@pytest.mark.parametrize(
    ("accepted", "checkpoint", "free"),
    [
        pytest.param("0.1", None, ["U1::0", "U1::1"], id="kubelet 1.8 has written nothing yet: what was given is held"),
        pytest.param("0.1", b"{", [], id="what it has written can't be read"),
        pytest.param("v1beta1", None, [], id="a kubelet that may have a List instead"),
    ],
)
async def test_before_the_first_container_what_was_given_is_all_that_is_held(
    node: Node, accepted: str, checkpoint: bytes | None, free: Sequence[str]
) -> None:
    node.gateway.ledger.accept(accepted)
    if checkpoint is not None:
        (node.folder / "dp" / CHECKPOINT).write_bytes(checkpoint)
    await node.looks()
    await node.sees(*WHOLE)
    await node.allocate(GPUS, "U0")
    await node.edit(TWICE)
    assert node.free().get(GPUS, []) == free


async def test_who_serves_is_not_elsewhere_though_none_of_its_devices_is_well(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have a socket for it. What the other one offers is over, or none of ours would ever be well on kubelet 1.8."""
    await node.sees(gpu(0, trouble=Trouble("fell off the bus")))
    one = node.gateway._resources[GPUS]
    monkeypatch.setattr(node.gateway.others, "living", lambda: {OLDER: Path()})
    monkeypatch.setattr(peers, "listens", lambda _: True)
    assert node.gateway.others.elsewhere(GPUS)
    one.state = replace(one.state, phase=Phase.SERVING, stream=1)
    assert not node.gateway.others.elsewhere(GPUS)


async def test_lists_are_not_put_together_anew_while_a_register_is_under_way(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tens of thousands of devices it takes seconds, in which neither the kubelet nor the older gateway is answered."""
    await node.sees(*WHOLE)
    await node.pods(a={GPUS: ["U0"]})
    await node.edit(TWICE)
    one, taken, asked, again = node.gateway._resources[GPUS], list[object](), list[float](), list[object]()

    def background(work: Coroutine[object, object, None]) -> None:
        work.close()
        taken.append(work)

    monkeypatch.setattr(node.gateway.lists._tasks, "background", background)
    monkeypatch.setattr(node.gateway.beliefs, "look_within", asked.append)
    monkeypatch.setattr(node.gateway.lists, "update_again", again.append)
    one.state = replace(one.state, phase=Phase.OFFERING)
    node.gateway.lists.looked()
    node.gateway.lists._refresh()
    assert (taken, asked, len(again)) == ([], [HANDED_OVER_LOOK], 1)
    one.state = replace(one.state, phase=Phase.SERVING, stream=1)
    node.gateway.lists.looked()
    node.gateway.lists._refresh()
    assert (len(taken), asked[1:], len(again)) == (2, [HOLDERS_AGAIN], 1)
    node.gateway.lists._took = HOLDERS_AGAIN
    node.gateway.lists.looked()
    assert asked[2:] == [PART * HOLDERS_AGAIN], "most of the time is for calls"


@pytest.mark.parametrize(
    ("since", "source", "remembered", "known"),
    [
        pytest.param(None, "pod-resources", None, False, id="nobody knows when the kubelet came"),
        pytest.param(1.0, "pod-resources", None, False, id="it came just now: it may not have heard of its pods"),
        pytest.param(1.0, "pod-resources", {}, True, id="its checkpoint names those"),
        pytest.param(1.0, "checkpoint", {}, True, id="so does the checkpoint alone"),
        pytest.param(beliefs.AFTER_START, "pod-resources", None, True, id="it has had the time"),
    ],
)
def test_the_list_of_a_young_kubelet_is_not_the_whole_truth(
    folder: Path, since: float | None, source: Any, remembered: Any, known: bool
) -> None:
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(PLAIN))
    gateway.presence.since = None if since is None else 100.0 - since
    gateway.beliefs.last = Look(kubelet_view.View({}, remembered, None, source), 100.0, 100.0)
    assert gateway.holdings.held(GPUS) == (frozenset() if known else None)


async def test_an_old_ledger_does_not_say_what_a_partition_is_part_of(folder: Path) -> None:
    """What is there says it; and what the IDs of older drivers name is known anyway."""
    state = folder / "state"
    state.mkdir(mode=0o700)
    rows = {one: {"health": "Healthy", "numa": []} for one in ("MIG-00", "MIG-GPU-1/2/0", "MIG-01")}
    (state / "ledger.json").write_bytes(msgspec.json.encode({"format": 1, "resources": {SMALL: {"announced": rows}}}))
    node = Node(folder, PLAIN)
    try:
        await node.pods(a={SMALL: ["MIG-00", "MIG-GPU-1/2/0"]})
        await node.sees(*SPLIT, gpu(2, uuid="GPU-1"), gpu(3))
        assert node.free() == {GPUS: ["U1", "U3"]}
    finally:
        await node.close()


@pytest.mark.parametrize(
    ("at", "held", "states"),
    [
        pytest.param("0000:01:00.0", [], {"new": State.PRESENT}, id="replaced, and nobody holds the old one"),
        pytest.param(
            "0000:01:00.0", ["old"], {"new": State.PRESENT, "old": State.WITHDRAWN}, id="a container holds the old one"
        ),
        pytest.param("0000:02:00.0", [], {"new": State.PRESENT, "old": State.LOST}, id="another address: it is lost"),
    ],
)
async def test_a_gpu_that_was_replaced_while_the_gateway_was_down(
    folder: Path, at: str, held: list[str], states: dict[str, State]
) -> None:
    state = folder / "state"
    state.mkdir(mode=0o700)
    rows = {"old": {"health": "Healthy", "numa": [], "pci": "0000:01:00.0"}}
    (state / "ledger.json").write_bytes(msgspec.json.encode({"format": 1, "resources": {GPUS: {"announced": rows}}}))
    node = Node(folder, PLAIN)
    try:
        await node.pods(**({"a": {GPUS: held}} if held else {}))
        await node.sees(gpu(0, uuid="new", pci=at))
        assert node.states(GPUS) == states
    finally:
        await node.close()


def test_what_a_partition_is_part_of_outlives_the_process(folder: Path) -> None:
    ledger = Ledger(folder)
    split = Device("MIG-00", Health.HEALTHY, (1,), "U0", "0000:01:00.0")
    ledger.announce(SMALL, (split, Device("U1")))
    snapshot = ledger.snapshot()
    ledger.settle(snapshot, ledger.save(snapshot))
    again = Ledger(folder)
    again.load()
    assert dict(again.announced(SMALL)) == {"MIG-00": split, "U1": Device("U1")}
    assert b'"U1":{"numa":[],"health":"Healthy"}' in (folder / "ledger.json").read_bytes()


async def test_a_cordon_lies_over_it(node: Node) -> None:
    await node.sees(*WHOLE)
    await node.pods(a={GPUS: ["U0"]})
    await node.edit(TWICE)
    node.gateway.ledger.cordon("U0::0", Cordon("for repair", 1.0))
    await node.gateway.update()
    entry = node.gateway._resources[GPUS].entries["U0::0"]
    assert (entry.state, entry.beneath and entry.beneath.state) == (State.CORDONED, State.WITHHELD)
    assert entry.reason == "for repair; without the cordon: withheld, still held as nvidia.com/gpu U0 by a/main"
    await node.pods()
    assert node.states(GPUS)["U0::0"] is State.CORDONED
    node.gateway.ledger.uncordon("U0::0")
    await node.gateway.update()
    assert set(node.states(GPUS).values()) == {State.PRESENT}


@pytest.mark.parametrize("again", ["", "restart with the edit"])
@pytest.mark.parametrize(
    ("before", "after", "gpus", "then", "cordoned", "free"),
    [
        pytest.param(PLAIN, TWICE, WHOLE, WHOLE, ["U0"], {GPUS: ["U1::0", "U1::1"]}, id="shared"),
        pytest.param(TWICE, PLAIN, WHOLE, WHOLE, ["U0::1"], {GPUS: ["U1"]}, id="shared no longer"),
        pytest.param(
            PLAIN,
            SHARED_AS,
            WHOLE,
            WHOLE,
            ["U0"],
            {"nvidia.com/gpu.shared": ["U1::0", "U1::1"]},
            id="shared under another name",
        ),
        pytest.param(PLAIN, MIXED, SPLIT, SPLIT, ["U0"], {GPUS: ["U1"]}, id="MIG none, then mixed"),
        pytest.param(MIXED, PLAIN, SPLIT, SPLIT, ["MIG-00"], {GPUS: ["U1"]}, id="MIG mixed, then none"),
        pytest.param(
            MIXED, MIXED, SPLIT, SPLIT_ANEW, ["MIG-00"], {SMALL: ["MIG-07"], GPUS: ["U1"]}, id="the instance is no more"
        ),
        pytest.param(
            TWICE, TWICE, WHOLE, WHOLE, ["U0::1"], {GPUS: ["U0::0", "U1::0", "U1::1"]}, id="one replica, as before"
        ),
    ],
)
async def test_a_cordon_is_of_the_hardware_whatever_it_is_offered_as(
    folder: Path,
    before: Policy,
    after: Policy,
    gpus: Sequence[GPU],
    then: Sequence[GPU],
    cordoned: Sequence[str],
    free: Ids,
    again: str,
) -> None:
    """It is lifted as it was set, and says what it was set on."""
    node = Node(folder, before)
    try:
        await node.sees(*gpus)
        await node.pods()
        for one in cordoned:
            await node.orders("cordon", one)
        if again:
            node.sight = tuple(then)
            await node.restarts(after)
        else:
            await node.edit(after)
            await node.sees(*then)
        assert node.free() == free
        entries = [entry for one in node.gateway._resources.values() for entry in one.entries.values()]
        reasons = {
            entry.reason for entry in entries if entry.state is State.CORDONED and entry.device.id not in cordoned
        }
        assert reasons <= {f"ECC (cordoned as {one})" for one in cordoned}
        for one in cordoned:
            await node.orders("uncordon", one)
        assert all(state is State.PRESENT for name in node.gateway._resources for state in node.states(name).values())
    finally:
        await node.close()


async def test_the_records_are_read_until_the_holder_has_ended(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    await node.sees(*WHOLE)
    await node.pods(a={GPUS: ["U0"]})
    monkeypatch.setattr(node.gateway.beliefs, "look_within", asked.append)
    await node.edit(TWICE)
    assert asked == [0], "at once: the last look may be hours old"
    await node.gateway.update()
    assert asked == [0, HOLDERS_AGAIN]
    await node.pods(a={GPUS: ["U0"]})
    assert set(asked[2:]) == {HOLDERS_AGAIN}
    asked.clear()
    await node.pods()
    await node.gateway.update()
    asked.clear()
    await node.gateway.update()
    assert asked == []


# What the ledger never heard of: it was lost, or another plugin served it, or a gateway with a ledger of its own.


@pytest.mark.parametrize("read", ["before the first list", "with it", "later"])
@pytest.mark.parametrize(
    ("policy", "gpus", "held", "free"),
    [
        pytest.param(PLAIN, WHOLE, {GPUS: ["U0"]}, {GPUS: ["U0", "U1"]}, id="as before"),
        pytest.param(TWICE, WHOLE, {GPUS: ["U0"]}, {GPUS: ["U1::0", "U1::1"]}, id="shared now"),
        pytest.param(PLAIN, WHOLE, {GPUS: ["U0::1"]}, {GPUS: ["U1"]}, id="shared before"),
        pytest.param(
            SHARED_AS, WHOLE, {GPUS: ["U0"]}, {"nvidia.com/gpu.shared": ["U1::0", "U1::1"]}, id="shared and renamed now"
        ),
        pytest.param(NAMED, WHOLE, {GPUS: ["U0"]}, {RENAMED: ["U1"]}, id="renamed now"),
        pytest.param(MIXED, SPLIT, {GPUS: ["U0"]}, {GPUS: ["U1"]}, id="partitioned now"),
        pytest.param(PLAIN, SPLIT, {SMALL: ["MIG-00"]}, {GPUS: ["U1"]}, id="partitioned before"),
        pytest.param(
            PLAIN, WHOLE, {GPUS: ["U7"], "a.b/nic": ["eth0"]}, {GPUS: ["U0", "U1"]}, id="nothing that is seen here"
        ),
    ],
)
async def test_what_no_ledger_knows_of_is_held_all_the_same(
    node: Node, policy: Policy, gpus: Sequence[GPU], held: Ids, free: Ids, read: str
) -> None:
    """By the kubelet's records alone, whenever they can be read first."""
    node.source.adopt(policy)
    if read != "later":
        node.writes(a=held)
    if read == "before the first list":
        await node.looks()
    await node.sees(*gpus)
    if read == "later":
        node.writes(a=held)
        await node.looks()
        await node.gateway._tasks.settle()
    assert node.free() == free
    (node.folder / "dp" / CHECKPOINT).unlink()  # Nobody says any more who holds what.
    await node.looks()
    await node.gateway.update()
    assert node.free() == free
    await node.pods()
    assert State.WITHHELD not in [state for name in node.gateway._resources for state in node.states(name).values()]


async def test_what_no_ledger_knows_of_is_free_when_nobody_could_say_for_long_who_holds_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.source.adopt(TWICE)
    node.writes(a={GPUS: ["U0"]})
    await node.sees(*WHOLE)
    (node.folder / "dp" / CHECKPOINT).unlink()
    await node.looks()
    await node.gateway.update()
    assert node.gateway._resources[GPUS].entries["U0::0"].reason == (
        "still held as nvidia.com/gpu U0; who holds it can't be seen now, so it may be free"
    )
    monkeypatch.setattr(owners, "HELD_UNKNOWN_S", 0.0)
    await node.gateway.update()
    assert set(node.states(GPUS).values()) == {State.PRESENT}


async def test_what_no_ledger_knows_of_and_the_kubelet_forgot_is_withheld_until_an_operator_says_otherwise(
    node: Node,
) -> None:
    node.source.adopt(TWICE)
    await node.sees(*WHOLE)
    await node.pods(a={GPUS: ["U0"]})
    await node.loses_memory()
    assert node.free() == {GPUS: ["U1::0", "U1::1"]}
    assert "'a/main', perhaps" in node.gateway._resources[GPUS].entries["U0::0"].reason
    await node.forgets("U0")
    assert set(node.states(GPUS).values()) == {State.PRESENT}


# What only another gateway serves.


@pytest.mark.parametrize(
    ("held", "allocatable", "withheld"),
    [
        pytest.param({"U0"}, None, "still held as nvidia.com/gpu U0 by a/main", id="a pod holds it"),
        pytest.param({"U0"}, {"U0"}, "still held as nvidia.com/gpu U0 by a/main", id="and it is on offer"),
        pytest.param(
            set(), {"U0"}, "offered as nvidia.com/gpu U0 by another gateway or plugin", id="the kubelet may give it out"
        ),
        pytest.param(set(), set(), "", id="the kubelet doesn't give it out"),
        pytest.param(set(), None, "", id="what the kubelet gives out isn't known"),
    ],
)
async def test_what_only_another_gateway_serves(
    node: Node,
    held: Collection[str],
    allocatable: Collection[str] | None,
    withheld: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway that is rolled out with other names finds the one before it still there."""
    await node.pods(a={GPUS: held})
    node.gateway.ledger.announce(GPUS, (Device("U0"), Device("U1")))
    monkeypatch.setattr(node.gateway.others, "living", lambda: {OLDER: Path()})
    last = node.gateway.beliefs.last
    assert last is not None
    view = replace(last.view, allocatable=None if allocatable is None else {GPUS: frozenset(allocatable)})
    node.gateway.beliefs.last = replace(last, view=view)
    node.policy = SHARED_AS
    node.source.adopt(SHARED_AS)
    await node.sees(*WHOLE)
    assert GPUS not in node.gateway._resources
    entries = node.gateway._resources["nvidia.com/gpu.shared"].entries
    assert entries["U0::0"].reason == entries["U0::1"].reason == withheld
    assert entries["U1::0"].state is State.PRESENT


@pytest.mark.parametrize("known", [pytest.param(True, id="one ledger"), pytest.param(False, id="a ledger of each")])
@pytest.mark.parametrize(
    ("peers", "free"),
    [
        pytest.param([OLDER], ["U1::0", "U1::1"], id="to the older one it is left"),
        pytest.param([], ["U1::0", "U1::1"], id="so it is to another plugin"),
        pytest.param([NEWER], ["U1::0", "U1::1"], id="to the newer, too, which was there first"),
        pytest.param([OLDER, NEWER], ["U1::0", "U1::1"], id="between two"),
    ],
)
async def test_of_two_that_offer_a_gpu_one_leaves_it_to_the_other(
    node: Node, peers: Sequence[Age], free: Sequence[str], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would give it away, or neither; also while a kubelet that was restarted knows of neither's yet."""
    if known and not peers:
        return  # What nobody else serves any more is our own.
    await node.pods()
    if known:
        node.gateway.ledger.announce(GPUS, (Device("U0"),))
    monkeypatch.setattr(node.gateway.others, "living", lambda: dict.fromkeys(peers, Path()))
    last = node.gateway.beliefs.last
    assert last is not None
    offering = replace(last.view, allocatable={GPUS: frozenset({"U0"})})
    node.gateway.beliefs.last = replace(last, view=offering)
    node.source.adopt(SHARED_AS)
    await node.sees(*WHOLE)
    assert node.free() == {"nvidia.com/gpu.shared": free}
    node.gateway.presence.since = last.at
    node.gateway.beliefs.last = replace(last, at=last.at + 1)
    await node.gateway.update()
    assert node.free() == {"nvidia.com/gpu.shared": free}, "the kubelet was restarted a second ago"
    node.gateway.beliefs.last = replace(last, at=last.at + beliefs.AFTER_START)
    await node.gateway.update()
    assert node.free() == {"nvidia.com/gpu.shared": ["U0::0", "U0::1", "U1::0", "U1::1"]}


@pytest.mark.parametrize(
    ("ages", "streaming", "free"),
    [
        pytest.param([NEWER], True, ["U0::0", "U0::1", "U1::0", "U1::1"], id="the newer leaves it to us"),
        pytest.param([NEWER], False, ["U1::0", "U1::1"], id="we have no stream: nobody got it from us"),
        pytest.param([OLDER], True, ["U1::0", "U1::1"], id="to the older one it is left"),
        pytest.param([NEWER, OLDER], True, ["U1::0", "U1::1"], id="one of both may be it"),
        pytest.param(None, True, ["U1::0", "U1::1"], id="it can't be known who is there"),
    ],
)
async def test_both_offer_a_gpu(
    node: Node, ages: Sequence[Age] | None, streaming: bool, free: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They came at the same time, so that each found nothing on offer: the age decides, on both sides alike."""
    node.source.adopt(SHARED_AS)
    await node.sees(*WHOLE)
    monkeypatch.setattr(DevicePlugin, "streaming", streaming)
    living = None if ages is None else dict.fromkeys(ages, node.folder)
    monkeypatch.setattr(node.gateway.others, "living", lambda: living)
    data = msgspec.json.encode({"PodDeviceEntries": [], "RegisteredDevices": {GPUS: ["U0"]}})
    (node.folder / "dp" / CHECKPOINT).write_bytes(data)
    await node.looks()
    await node.gateway.update()
    assert node.free() == {"nvidia.com/gpu.shared": free}


@pytest.mark.parametrize(
    ("peers", "free"),
    [
        pytest.param([OLDER], ["U1::0", "U1::1"], id="an older one lives"),
        pytest.param([], ["U0::0", "U0::1", "U1::0", "U1::1"], id="perhaps nobody serves it any more"),
    ],
)
async def test_before_1_23_the_checkpoint_says_what_others_offer(
    node: Node, peers: Sequence[Age], free: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.gateway.others, "living", lambda: dict.fromkeys(peers, Path()))
    data = msgspec.json.encode({"PodDeviceEntries": [], "RegisteredDevices": {GPUS: ["U0"]}})
    (node.folder / "dp" / CHECKPOINT).write_bytes(data)
    node.source.adopt(SHARED_AS)
    await node.sees(*WHOLE)
    assert node.free() == {"nvidia.com/gpu.shared": free}


@pytest.mark.parametrize(
    ("age", "serves", "free"),
    [
        pytest.param(OLDER, GPUS, ["U1::0", "U1::1"], id="an older one has a socket for it"),
        pytest.param(OLDER, AMD, ["U0::0", "U0::1", "U1::0", "U1::1"], id="none for this one"),
        pytest.param(NEWER, GPUS, ["U1::0", "U1::1"], id="a newer one, too, which was there first"),
    ],
)
async def test_kubelet_1_8_does_not_say_what_others_offer(
    node: Node, age: Age, serves: str, free: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state file and an older gateway's socket do; what is ill there the kubelet gives to nobody."""
    (node.folder / "dp" / CHECKPOINT).write_text('{"Entries": []}')
    await node.looks()
    node.gateway.ledger.announce(GPUS, (Device("U0"), Device("U1", Health.UNHEALTHY)))
    other = socket.socket(socket.AF_UNIX)
    try:
        other.bind(str(node.folder / instance.socket_name(serves)))
        other.listen()
        monkeypatch.setattr(node.gateway.others, "living", lambda: {age: node.folder})
        node.source.adopt(SHARED_AS)
        await node.sees(*WHOLE)
        assert node.free() == {"nvidia.com/gpu.shared": free}
    finally:
        other.close()


@pytest.mark.parametrize("known", [pytest.param(True, id="one ledger"), pytest.param(False, id="a ledger of each")])
@pytest.mark.parametrize(
    ("standing_by_for", "free"),
    [pytest.param(OLDER, [], id="the older one serves it"), pytest.param(None, ["MIG-00", "MIG-01"], id="we do")],
)
async def test_what_the_other_gateway_offers_under_a_name_that_both_have(
    node: Node, standing_by_for: Age | None, free: Sequence[str], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another MIG strategy, for example: the older one offers a GPU whole, and this one its instances, under a name of their own."""
    node.source.adopt(MIXED)
    await node.sees(*SPLIT)
    one = node.gateway._resources[GPUS]
    one.state = replace(one.state, standing_by_for=standing_by_for)
    if known:
        node.gateway.ledger.announce(GPUS, (Device("U0"),))
    monkeypatch.setattr(node.gateway.others, "living", lambda: {OLDER: node.folder})
    monkeypatch.setattr(node.gateway.standby, "began", lambda _: None)
    data = msgspec.json.encode({"PodDeviceEntries": [], "RegisteredDevices": {GPUS: ["U0", "U1"]}})
    (node.folder / "dp" / CHECKPOINT).write_bytes(data)
    await node.looks()
    await node.gateway.update()
    assert node.free().get(SMALL, []) == free
    node.gateway.presence.since = time.monotonic()
    (node.folder / "dp" / CHECKPOINT).write_text('{"PodDeviceEntries": [], "RegisteredDevices": {}}')
    await node.looks()
    await node.gateway.update()
    assert node.free().get(SMALL, []) == free, "the kubelet was restarted just now"


async def test_what_another_gateway_served_is_taken_up_as_it_is_now(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its ledger and by the kubelet's records of now: it gave a GPU away after the last look at either."""
    await node.pods()
    node.gateway.ledger.announce(GPUS, (Device("U0"), Device("U1")))
    await node.gateway.scribe.durable()
    monkeypatch.setattr(node.gateway.others, "living", lambda: {OLDER: Path()})
    node.source.adopt(SHARED_AS)
    await node.sees(*WHOLE)
    other = Ledger(node.folder / "state")
    other.load()
    other.announce(GPUS, (Device("U2"),))
    snapshot = other.snapshot()
    other.settle(snapshot, other.save(snapshot))
    data = {"PodUID": "b", "ContainerName": "main", "ResourceName": GPUS, "DeviceIDs": ["U1", "U2"], "AllocResp": ""}
    written = msgspec.json.encode({"PodDeviceEntries": [data], "RegisteredDevices": {}})
    (node.folder / "dp" / CHECKPOINT).write_bytes(written)
    monkeypatch.setattr(node.gateway.others, "living", dict)
    await node.gateway.others._take_up()
    assert node.states(GPUS) == {"U1": State.WITHDRAWN, "U2": State.LOST}
    assert node.free() == {"nvidia.com/gpu.shared": ["U0::0", "U0::1"]}


@pytest.mark.parametrize("loaded", [False, True], ids=["not read until then", "read before, for another reason"])
async def test_whom_the_kubelet_forgot_beside_another_gateway_keeps_what_it_had_under_every_name(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, loaded: bool
) -> None:
    """The one that served knew, and this one takes the resource back: the same GPU has another name now (run on 1.37)."""
    await node.sees(*WHOLE)
    await node.pods()
    await node.edit(NAMED)
    assert await node.gateway.scribe.durable()
    for one in node.gateway.resources:
        one.state = replace(one.state, phase=Phase.STANDBY, standing_by_for=OLDER)
    other = Ledger(node.folder / "state")
    other.load()
    other.announce(GPUS, (Device("U1"),))
    other.set_forgotten(GPUS, {"U1": (Earlier(("default/p/main",), time.time()),)})
    snapshot = other.snapshot()
    other.settle(snapshot, other.save(snapshot))
    if loaded:
        await node.gateway.scribe.load()
        await node.gateway.update()
    await node.gateway.others._resume(node.gateway._resources[RENAMED], 0.0)
    assert node.free() == {RENAMED: ["U0"]}


async def test_who_takes_a_resource_back_forgets_what_it_knew_of_it_before(node: Node) -> None:
    """The other gateway has seen meanwhile that nobody has the device."""
    await node.sees(*WHOLE)
    await node.pods()
    assert await node.gateway.scribe.durable()
    one = node.gateway._resources[GPUS]
    one.state = replace(one.state, phase=Phase.STANDBY, standing_by_for=OLDER)
    node.gateway.beliefs.recall(GPUS, {}, {"U1": Earlier(("default/p/main",), time.time())})
    assert node.gateway.beliefs.earlier(GPUS).keys() == {"U1"}
    node.gateway.others._resuming.add(GPUS)
    await node.gateway.others._resume(one, 0.0)
    assert node.gateway.beliefs.earlier(GPUS) == {}


async def test_what_the_one_before_gave_last_is_known_before_its_offers_are_forgotten(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older gateway has handed over, and a pod got a GPU of it just before: the kubelet hasn't written that down yet."""
    await node.pods()
    await node.sees(*WHOLE)
    assert await node.gateway.scribe.durable()
    monkeypatch.setattr(node.gateway.others, "living", lambda: {OLDER: Path()})
    monkeypatch.setattr(node.gateway.lists._owners, "_elsewhere", lambda _: True)
    checkpoint = node.folder / "dp" / CHECKPOINT
    checkpoint.write_text('{"PodDeviceEntries": [], "RegisteredDevices": {"nvidia.com/gpu": ["U0", "U1"]}}')
    await node.looks()
    await node.edit(TWICE)
    assert node.free() == {}, "the older one offers them"
    other = Ledger(node.folder / "state")
    other.load()
    other.hand_out(GPUS, ["U0"], "v1beta1", time.time())
    snapshot = other.snapshot()
    other.settle(snapshot, other.save(snapshot))
    monkeypatch.setattr(node.gateway.lists._owners, "_elsewhere", lambda _: False)
    checkpoint.write_text('{"PodDeviceEntries": [], "RegisteredDevices": {}}')
    await node.looks()
    await until(lambda: bool(node.free()))
    assert node.free() == {GPUS: ["U1::0", "U1::1"]}


# What the kubelet forgot.


@pytest.mark.parametrize("again", ["", "restart", "restart with the edit"])
@pytest.mark.parametrize("first", ["the memory", "the edit"])
@pytest.mark.parametrize(
    ("before", "after", "gpus", "held", "free"),
    [
        pytest.param(PLAIN, TWICE, WHOLE, {GPUS: ["U0"]}, {GPUS: ["U1::0", "U1::1"]}, id="shared"),
        pytest.param(TWICE, PLAIN, WHOLE, {GPUS: ["U0::1"]}, {GPUS: ["U1"]}, id="shared no longer"),
        pytest.param(PLAIN, NAMED, WHOLE, {GPUS: ["U0"]}, {RENAMED: ["U1"]}, id="renamed"),
        pytest.param(PLAIN, MIXED, SPLIT, {GPUS: ["U0"]}, {GPUS: ["U1"]}, id="MIG none, then mixed"),
        pytest.param(MIXED, PLAIN, SPLIT, {SMALL: ["MIG-00"]}, {GPUS: ["U1"]}, id="MIG mixed, then none"),
    ],
)
async def test_an_edit_gives_nobody_what_the_kubelet_forgot(
    folder: Path, before: Policy, after: Policy, gpus: Sequence[GPU], held: Ids, free: Ids, first: str, again: str
) -> None:
    """A kubelet that lost its checkpoint ends no pod: what that one may use is withheld until an operator says otherwise."""
    node = Node(folder, before)
    try:
        await node.sees(*gpus)
        await node.pods(a=held)
        for what in (first, *{"the memory", "the edit"} - {first}):
            if what == "the memory":
                await node.loses_memory()
            elif again == "restart with the edit":
                await node.restarts(after)
            else:
                await node.edit(after)
        if again == "restart":
            await node.restarts()
        assert node.free() == free
        for ids in held.values():
            await node.forgets(*ids)
        assert State.WITHHELD not in [state for name in node.gateway._resources for state in node.states(name).values()]
    finally:
        await node.close()


@pytest.mark.parametrize(
    ("boot", "same", "free"),
    [
        pytest.param("", False, ["U1::0", "U1::1"], id="another kubelet: it forgot"),
        pytest.param("", True, ["U0::0", "U0::1", "U1::0", "U1::1"], id="the same one: the pod has ended"),
        pytest.param("before ", False, ["U0::0", "U0::1", "U1::0", "U1::1"], id="the node was booted anew: so it has"),
    ],
)
async def test_the_kubelet_forgot_while_no_gateway_ran_and_the_next_one_comes_with_an_edit(
    folder: Path, boot: str, same: bool, free: Sequence[str]
) -> None:
    """The first list must not give away what the ledger says a pod held, though nobody has noticed the kubelet yet."""
    node, kubelet = Node(folder), folder / "dp" / KUBELET_SOCKET
    first, second = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    try:
        first.bind(str(kubelet))
        await node.sees(*WHOLE)
        node.gateway.ledger.rebuild_handed_out(GPUS, {"U0": "ns/a/main"}, time.time() - 60)
        node.gateway.ledger.compared_with(boot + node.gateway.holdings.kubelet_named())
        if not same:
            kubelet.unlink()
            second.bind(str(kubelet))
        node.writes()
        await node.restarts(TWICE)
        assert node.free() == {GPUS: free}
    finally:
        first.close()
        second.close()
        await node.close()


async def test_what_was_given_before_the_clock_was_set_back_comes_back(node: Node) -> None:
    await node.sees(*WHOLE)
    resource = node.gateway._resources[GPUS]
    resource.state = replace(resource.state, phase=Phase.SERVING)
    node.gateway.ledger.hand_out(GPUS, ["U0"], "v1beta1", time.time() + 3600)
    await node.pods()
    assert node.gateway.ledger.handed_out(GPUS)["U0"].at <= time.time()


async def test_who_is_forgotten_leaves_the_other_pod_what_both_had(node: Node) -> None:
    """A GPU perhaps in two pods: an operator says that the first is gone, and the second has it still."""
    await node.sees(*WHOLE)
    await node.pods(a={GPUS: ["U0"]})
    await node.loses_memory()
    await node.pods(b={GPUS: ["U0"]})
    await node.edit(TWICE)
    assert node.free() == {GPUS: ["U1::0", "U1::1"]}
    await node.forgets("U0")
    assert node.free() == {GPUS: ["U1::0", "U1::1"]}
    await node.pods()
    assert node.free() == {GPUS: ["U0::0", "U0::1", "U1::0", "U1::1"]}


async def test_a_replica_that_the_kubelet_forgot_is_given_to_nobody_beside_one_too_many(node: Node) -> None:
    """Who is forgotten doesn't keep the kubelet from giving it: it isn't held."""
    await node.sees(*WHOLE)
    await node.edit(FOUR)
    await node.pods(a={GPUS: ["U0::0"]}, b={GPUS: ["U0::3"]})
    await node.loses_memory()
    await node.pods(b={GPUS: ["U0::3"]})
    await node.edit(TWICE)
    assert node.free() == {GPUS: ["U1::0", "U1::1"]}


async def test_a_claim_says_that_the_kubelet_forgot(node: Node) -> None:
    await node.sees(*WHOLE)
    await node.pods(a={GPUS: ["U0"]})
    await node.edit(TWICE)
    await node.loses_memory()
    assert (
        node.gateway._resources[GPUS].entries["U0::0"].reason
        == "still held as nvidia.com/gpu U0 by 'a/main', perhaps: the kubelet forgot who; when it has ended, run `gateway forget ID`"
    )


# When they are put together again.


async def test_lists_are_put_together_again_at_the_first_moment_that_asks_for_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = []
    with monkeypatch.context() as clock:
        clock.setattr(time, "monotonic", lambda: 1000.0)
        for moments in ((1060.0, 1020.0), (900.0,), (1e9,)):
            node.gateway.lists.update_again(moments)
            timers.append(node.gateway.lists._again)
    node.gateway.lists.close()
    assert [timer and timer.when() for timer in timers] == [1020.0, 1000.01, 1000 + lists.LONGEST_TIMER]
    assert [timer and timer.cancelled() for timer in timers] == [True] * 3
    assert node.gateway.lists._again is None


async def test_what_was_not_found_yet_is_judged_when_its_time_is_over(node: Node) -> None:
    await node.sees(*WHOLE)
    assert node.gateway.lists._again is None
    await node.close()
    node._up()
    await node.gateway.update()
    assert set(node.states(GPUS).values()) == {State.NOT_LOOKED_YET}
    assert node.gateway.lists._again is not None


@pytest.mark.parametrize(
    ("entry", "metrics", "asked"),
    [
        pytest.param({}, False, [], id="nothing waits for anybody"),
        pytest.param({}, True, [lists.LOOK_FOR_METRICS], id="metrics tell who holds what"),
        pytest.param({"state": State.LOST}, True, [lists.LOOK_AGAIN], id="what is lost may be held"),
        pytest.param({"state": State.WITHDRAWN}, False, [lists.LOOK_AGAIN], id="and what is offered no longer"),
        pytest.param({"beneath": State.LOST}, False, [lists.LOOK_AGAIN], id="below a cordon, too"),
    ],
)
async def test_when_the_records_are_looked_into_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, entry: dict[str, State], metrics: bool, asked: list[float]
) -> None:
    await node.sees(*WHOLE)
    plugin, told = node.gateway._resources[GPUS].plugin, list[float]()
    plain = plugin.list.entries["U0"]
    beneath = replace(plain, state=entry["beneath"]) if "beneath" in entry else None
    plugin.list.entries["U0"] = replace(plain, state=entry.get("state", plain.state), beneath=beneath)
    if metrics:
        node.gateway.lists._settings = replace(node.gateway.settings, metrics_address=("127.0.0.1", 0))
    monkeypatch.setattr(node.gateway.lists._tasks, "background", lambda work: work.close())
    monkeypatch.setattr(node.gateway.beliefs, "look_within", told.append)
    node.gateway.lists.looked()
    assert told == asked


async def test_the_shortest_list_that_the_kubelet_hears_is_sent_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet writes its checkpoint with any list, and one that it isn't sent makes it write nothing."""
    node.source.adopt(MIXED)
    await node.sees(*SPLIT, gpu(2), gpu(3), gpu(4, resource="a.b/other"))
    sizes = {name: len(one.plugin.devices) for name, one in node.gateway._resources.items()}
    assert sizes == {GPUS: 3, SMALL: 2, "a.b/other": 1}
    await node.looks()
    again = list[str]()
    monkeypatch.setattr(node.gateway.lists._outdated, "is_due", lambda *_: True)
    monkeypatch.setattr(DevicePlugin, "streaming", property(lambda one: one.name in {GPUS, SMALL}))
    monkeypatch.setattr(DevicePlugin, "send_again", lambda one: again.append(one.name))
    monkeypatch.setattr(node.gateway.lists._tasks, "background", lambda work: work.close())
    plugin = node.gateway._resources[GPUS].plugin
    plugin.list.entries["U2"] = replace(plugin.list.entries["U2"], state=State.LOST)
    node.gateway.lists.looked()
    assert again == [SMALL]


@pytest.mark.parametrize(
    ("then", "wrote"),
    [
        pytest.param((gpu(0), gpu(1)), ["soon"], id="nothing is new"),
        pytest.param((gpu(0),), ["soon", "at once"], id="one is lost"),
        pytest.param((gpu(0), gpu(1, trouble=Trouble("ECC"))), ["soon", "at once"], id="one is ill"),
    ],
)
async def test_an_illness_is_written_at_once_and_what_can_wait_soon(
    node: Node, monkeypatch: pytest.MonkeyPatch, then: Sequence[GPU], wrote: list[str]
) -> None:
    """The next gateway offers nothing as healthy that this one called ill."""
    asked, scribe = list[str](), node.gateway.scribe
    await node.sees(*WHOLE)
    assert await scribe.durable()

    async def durable() -> bool:
        asked.append("at once")
        return True

    monkeypatch.setattr(scribe, "durable", durable)
    monkeypatch.setattr(scribe, "soon", lambda: asked.append("soon"))
    await node.sees(*then)
    await asyncio.sleep(0)
    assert asked == wrote


async def test_what_takes_a_reset_is_ill_still_for_the_next_process(node: Node) -> None:
    await node.sees(gpu(0, trouble=Trouble("Xid 79", TroubleKind.RESET_REQUIRED)), gpu(1))
    assert await node.gateway.scribe.durable()
    node.sight = WHOLE
    await node.restarts()
    assert node.states(GPUS) == {"U0": State.UNHEALTHY, "U1": State.PRESENT}


@pytest.mark.parametrize("again", ["", "restart with the edit"])
@pytest.mark.parametrize(
    ("before", "after", "well"),
    [
        pytest.param(PLAIN, TWICE, {GPUS: ["U1::0", "U1::1"]}, id="shared"),
        pytest.param(TWICE, PLAIN, {GPUS: ["U1"]}, id="shared no longer"),
        pytest.param(TWICE, FOUR, {GPUS: [f"U1::{number}" for number in range(4)]}, id="shared more often"),
        pytest.param(PLAIN, NAMED, {RENAMED: ["U1"]}, id="renamed"),
    ],
)
async def test_what_takes_a_reset_is_ill_under_another_name_too(
    folder: Path, before: Policy, after: Policy, well: Ids, again: str
) -> None:
    node = Node(folder, before)
    try:
        await node.sees(gpu(0, trouble=Trouble("Xid 79", TroubleKind.RESET_REQUIRED)), gpu(1))
        await node.pods()
        await node.sees(*WHOLE)
        await (node.restarts(after) if again else node.edit(after))
        assert node.free() == well
        await node.pods()
        assert node.free() == well
        node.backend.sights.put_nowait(Sight(WHOLE, recovered=frozenset({"U0"})))
        await node._next()
        assert any(one.startswith("U0") for ids in node.free().values() for one in ids)
    finally:
        await node.close()


async def test_what_was_lost_long_ago_and_nobody_holds_is_on_no_list(node: Node) -> None:
    await node.sees(*WHOLE)
    await node.pods()
    await node.sees(gpu(0))
    assert node.states(GPUS)["U1"] is State.LOST
    node.gateway.ledger.set_lost_since(GPUS, {"U1": 1.0})
    await node.gateway.update()
    assert node.states(GPUS) == {"U0": State.PRESENT}


async def test_older_gateways_are_asked_for_a_resource_that_comes_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would register it."""
    asked, others = list[object](), node.gateway.others

    async def take_over(peers: object) -> None:
        asked.append(peers)

    monkeypatch.setattr(others.handover, "take_over", take_over)
    monkeypatch.setattr(others, "look_at_peers", lambda: None)
    monkeypatch.setattr(others, "living", lambda: {OLDER: Path()})
    others.begun = True
    await node.sees(*WHOLE)
    await node.sees(gpu(0))
    assert asked == [{OLDER: Path()}]
