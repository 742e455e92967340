"""A whole gateway with --dra on, beside an emulated kubelet: each GPU is given by one API at a time, through orders and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from adapters import pluginregistration
from adapters.dra.plugin import V1
from devices.claims import ClaimName, Refused
from devices.life.states import Entry, State
from devices.model import ContainerAnswer, Device, Health
from gateway.age import Age
from gateway.cli import serve
from gateway.daemon import RESIGNED, Gateway
from gateway.dra import cdi, crossing, desk, driver, publisher, records, service
from gateway.dra.claims import Allocated
from gateway.dra.crossing import Crossing, Strangers
from gateway.dra.desk import Names
from gateway.dra.drivers import Drivers
from gateway.dra.publisher import Publisher, Server
from gateway.handover import alone as being_alone
from gateway.handover import instance
from gateway.handover.alone import Alone, held_back
from gateway.kubelet import drift, view
from gateway.kubelet.view import View
from gateway.kubelet.watch import CHECKPOINT
from gateway.kubernetes import access, allocatable, client, watch
from gateway.kubernetes.client import KubernetesError
from gateway.kubernetes.watch import Backoff
from gateway.lab.kubelets.behaviour import behaviour
from gateway.lab.kubelets.devicemanager import DeviceManager
from gateway.lab.kubelets.kubelet import KubeletError
from gateway.lab.kubelets.pluginclient import CallError
from gateway.lab.kubelets.records import Container
from gateway.memory import holdings
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.registration.events import Phase
from gateway.sides import lent
from gateway.sides.side import Side
from gateway.sides.table import ANNOTATION
from gateway.telling import probes
from gateway.telling.commands import Commands
from gateway.wires import control
from gateway.wires.control import ControlError
from tests.fakes.apiserver import Answer, ApiServer, Request
from tests.unit.kubernetes import authority, server, until
from tests.unit.test_dra_daemon import API, GPU, PROFILE, SLICE, Place, states
from tests.unit.test_dra_driver import Kubelet

if TYPE_CHECKING:
    from gateway.dra.records import AskedClaims
    from gateway.kubernetes.node import NodeObject

__all__ = ["authority", "server"]
A, B = "GPU-a", "GPU-b"
STRANGE = {"uuid": {"string": A}}


class Node:
    """A node with both APIs: a kubelet's device manager, its DRA manager, and the API server."""

    def __init__(self, place: Place) -> None:
        self.place = place
        (place.plugins / CHECKPOINT).unlink(missing_ok=True)
        place.server.put(f"{API}/namespaces/x/resourceclaims/other")
        self.manager = DeviceManager(behaviour("1.37"), place.plugins)
        self.claims: Kubelet

    @classmethod
    def beside(cls, place: Place) -> Self:
        """Make one beside a kubelet that is there."""
        one = cls.__new__(cls)
        one.place = place
        return one

    @contextlib.asynccontextmanager
    async def gateway(self, *, known: bool = True, status: int = 0, seconds: float = 20) -> AsyncIterator[Gateway]:
        async with self.place.gateway("on", registers=known, status=status, seconds=seconds) as one:
            registry = self.place.folder / "plugins_registry"
            if known:
                await until(lambda: list(registry.iterdir()))
                self.claims = await self.place.kubelet()
                await self.claims.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))
            try:
                yield one
            finally:
                if known:
                    await self.claims.channel.close()

    async def cross(self, to: str, *ids: str, dry_run: bool = False) -> dict[str, str]:
        [path] = control.sockets(self.place.folder / "state")
        answer = await control.ask(path, {"op": "cross", "to": to, "ids": list(ids), "dry_run": dry_run}, 10)
        return {row["id"]: row["side"] for row in answer["boards"]}

    async def stand(self, **sides: str) -> None:
        async with asyncio.timeout(10):
            wanted = {f"GPU-{name}": side for name, side in sides.items()}
            while await self.cross("dra", dry_run=True) != wanted:  # noqa: ASYNC110 - it is a question to another
                await asyncio.sleep(0.02)

    @property
    def told(self) -> dict[str, str]:
        """What the API server shows as allocatable; only the gateway writes that here."""
        found: dict[str, str] = self.place.server.objects["/api/v1/nodes/n1"]["status"].get("allocatable", {})
        return found

    def by_name(self, name: str, uid: str, device: str) -> ClaimName:
        """Have a claim that the scheduler made for a pod that asked by name."""
        asked = self.place.claim(name, uid, device)
        said = {"resource.kubernetes.io/extended-resource-claim": "true"}
        path = f"{API}/namespaces/ns/resourceclaims/{name}"
        self.place.server.change(path, lambda one: one["metadata"].update(annotations=said))
        return asked

    async def allocatable(self, count: int) -> None:
        await self.manager.wait(GPU, count)

    async def at_dra(self) -> None:
        """Have both GPUs at DRA."""
        await self.allocatable(2)
        await self.cross("dra")
        await self.stand(a="dra", b="dra")

    async def half_way(self) -> None:
        """Have B at DRA, and A on its way there, because pod p1 holds it."""
        await self.allocatable(2)
        await self.manager.admit("p1", {GPU: 1})
        await self.cross("dra")
        await self.stand(a="to-dra", b="dra")

    async def lent(self) -> ClaimName:
        """Have B back from DRA, and A on its way, because a pod that asked by name holds it; give that pod's claim."""
        await self.at_dra()
        asked = self.by_name("c", "uid-c", "gpu-0")
        assert isinstance((await self.claims.prepare(V1, asked))["uid-c"], tuple)
        await self.cross("plugin")
        await self.stand(a="to-plugin", b="plugin")
        return asked

    @contextlib.asynccontextmanager
    async def newer(self) -> AsyncIterator[tuple[Gateway, asyncio.Task[int]]]:
        """Run one beside another, up to where it could take over but for a kubelet that takes its driver."""
        one = self.place.made("on")
        running = asyncio.create_task(one.run())
        try:
            await until(lambda: "expected the kubelet to have taken the DRA driver" in one.waits_for)
            yield one, running
        finally:
            one._end(0)
            await running


def drivers(gateway: Gateway) -> Drivers:
    assert gateway.drivers is not None
    return gateway.drivers


def owners(gateway: Gateway) -> Crossing:
    """Give the table of owners in force."""
    found = drivers(gateway).crossing
    assert found is not None
    return found


def asking(gateway: Gateway) -> Names:
    """Give what looks after pods that ask by name."""
    found = drivers(gateway)._desk
    assert found is not None
    return found.names


@pytest.fixture
async def node(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="on-"))
    monkeypatch.setattr(access, "find", lambda _: server.access())
    monkeypatch.setattr(cdi, "FOLDER", folder / "cdi")
    monkeypatch.setattr(allocatable, "SETTLE", 0.0)
    monkeypatch.setattr(crossing, "ADMITS", 0.0)
    monkeypatch.setattr(crossing, "WAIT", 0.05)
    one = Node(Place(folder, server))
    await one.manager.start()
    yield one
    await one.manager.stop()
    shutil.rmtree(folder)


async def test_each_api_gives_its_own(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PATIENCE", 0.1)
    async with node.gateway() as one:
        await node.allocatable(2)
        assert node.place.published == {}
        assert await node.cross("dra", A) == {A: "to-dra"}
        await node.stand(a="dra", b="plugin")
        await node.allocatable(1)
        await until(lambda: node.place.published == {"gpu-0": []})
        node_path = "/api/v1/nodes/n1"
        assert node.place.server.objects[node_path]["status"]["allocatable"] == {GPU: "1"}
        assert states(one) == {A: State.ELSEWHERE, B: State.PRESENT}
        assert isinstance((await node.claims.prepare(V1, node.place.claim("c", "uid-c", "gpu-0")))["uid-c"], tuple)
        [resource] = one.resources
        await until(lambda: "claim ns/c (pod p) has it" in resource.entries[A].reason)
        told = {row.id: row for row in Commands(one).taken(True)().sides}
        assert (told[A].side, told[A].holder) == ("dra", "claim ns/c (pod p)")
        assert (told[B].side, told[B].holder) == ("plugin", None)
        assert Commands(one).taken(True)().resources[0].devices[0].holder == "claim ns/c (pod p)"
        await node.manager.admit("p1", {GPU: 1})
        with pytest.raises(KubeletError):
            await node.manager.admit("p2", {GPU: 1})


async def test_it_says_since_when_a_gpu_is_on_its_way_and_how_drivers_stand(node: Node) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.manager.admit("p1", {GPU: 1})
        before = time.monotonic()
        await node.cross("dra")
        await until(lambda: len(node.place.published) == 1)
        status = Commands(one).taken(True)()
        [way] = [row for row in status.sides if row.side == "to-dra"]
        assert way.moving_s is not None
        assert 0 <= way.moving_s <= time.monotonic() - before
        assert [row.moving_s for row in status.sides if row.side == "dra"] == [None]
        [driver_] = status.drivers
        assert (driver_.name, driver_.registered, driver_.unpublished) == ("gpu.nvidia.com", True, "")
        began = status.sides, owners(one).stands()
        await node.cross("plugin", way.id)
        await node.cross("dra", way.id)
        [again] = [row for row in owners(one).stands() if row.board == way.id]
        assert again.since is not None
        assert again.since > next(row.since for row in began[1] if row.board == way.id)  # type: ignore[operator]
        node.manager.remove("p1")


THEIRS = f"{API}/resourceslices/theirs"
THEM = "dra.example.com offers it as x in theirs"


def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what another DRA driver gave up asked for at once, and each time again."""
    for module, name in ((publisher, "LINGERS"), (crossing, "LINGERS"), (crossing, "LET_GO")):
        monkeypatch.setattr(module, name, 0.0)


def offer_theirs(node: Node) -> None:
    """Have another DRA driver offer A."""
    devices = [{"name": "x", "attributes": STRANGE}]
    node.place.server.put(THEIRS, spec={"driver": "dra.example.com", "nodeName": "n1", "devices": devices})


def allocate_theirs(node: Node) -> str:
    """Have a claim of what another DRA driver offers; give its path."""
    path = f"{API}/namespaces/ns/resourceclaims/c"
    results = [{"request": "gpu", "driver": "dra.example.com", "pool": "n1", "device": "x"}]
    status = {"allocation": {"devices": {"results": results}}}
    node.place.server.put(path, metadata={"uid": "uid-c", "namespace": "ns"}, status=status)
    return path


def named(gateway: Gateway) -> dict[str, str]:
    [resource] = Commands(gateway).taken(True)().resources
    return {row.id: row.stranger for row in resource.devices}


async def test_what_another_driver_offers_is_given_by_neither_api(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    no_grace(monkeypatch)
    async with node.gateway() as one:
        await node.allocatable(2)
        offer_theirs(node)
        await node.stand(a="foreign", b="plugin")
        await node.allocatable(1)
        await until(lambda: node.told == {GPU: "1"})  # The scheduler heard of it.
        assert states(one) == {A: State.LEAVING, B: State.PRESENT}
        assert named(one) == {A: THEM, B: ""}
        [row] = [row for row in Commands(one).taken(True)().sides if row.id == A]
        assert (row.side, row.words, row.moving_s) == ("foreign", f"offered by nobody here: {THEM}", None)
        drivers(one)._drivers["gpu.nvidia.com"]._patience = 0.5
        refused = (await node.claims.prepare(V1, node.place.claim("late", "uid-late", "gpu-0")))["uid-late"]
        assert isinstance(refused, Refused)
        assert THEM in refused.reason
        node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/late")
        # Its driver goes, and a claim has it still.
        path = allocate_theirs(node)
        node.place.server.remove(THEIRS)
        await until(lambda: "claim ns/c may have it" in words(one))
        await node.stand(a="foreign", b="plugin")
        node.place.server.remove(path)
        await node.stand(a="plugin", b="plugin")
        await node.allocatable(2)
        assert named(one) == {A: "", B: ""}


async def test_what_another_driver_offers_is_withheld_before_the_scheduler_has_heard(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocatable, "SETTLE", 60.0)
    monkeypatch.setattr(allocatable, "PATIENCE", 60.0)
    async with node.gateway():
        await node.allocatable(2)
        offer_theirs(node)
        await node.stand(a="foreign", b="plugin")
        await until(lambda: node.told == {GPU: "1"})


def words(gateway: Gateway) -> str:
    [row] = [row for row in drivers(gateway).stands() if row.board == A]
    return row.words


async def test_a_pod_keeps_what_another_driver_offers(node: Node) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.manager.admit("p1", {GPU: 2})
        offer_theirs(node)
        await node.stand(a="foreign", b="plugin")
        await until(lambda: words(one) == f"offered by nobody here: {THEM}: held by default/p1/main")
        assert states(one)[A] is State.LEAVING
        node.manager.remove("p1")
        await node.manager.admit("p2", {GPU: 1})
        with pytest.raises(KubeletError):
            await node.manager.admit("p3", {GPU: 1})


async def test_what_another_driver_offers_stays_withheld_through_a_start_of_kubelet_and_gateway(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway():
        await node.allocatable(2)
        offer_theirs(node)
        await node.stand(a="foreign", b="plugin")
        node.place.server.remove(THEIRS)  # A kubelet that starts deletes those of all drivers.
    await node.place.server.stop()
    async with node.gateway(known=False) as one:
        await node.allocatable(1)
        assert states(one)[A] is State.LEAVING
        await node.place.server.start()
        await until(lambda: drivers(one)._publisher is not None and drivers(one)._publisher.has_looked)  # type: ignore[union-attr]
        assert await node.cross("dra", dry_run=True) == {A: "foreign", B: "plugin"}
        owners(one).strangers._ask_at = 0.0
        await node.stand(a="plugin", b="plugin")


async def test_what_another_driver_has_of_dras_stays_withheld_through_a_start_of_kubelet_and_gateway(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.at_dra()
        await until(lambda: len(node.place.published) == 2)
        offer_theirs(node)
        await until(lambda: f"foreign:{A}" in one.ledger.sides)
        path = allocate_theirs(node)
    for one_of_them in (THEIRS, SLICE):  # A kubelet that starts deletes those of all drivers.
        node.place.server.remove(one_of_them)
    monkeypatch.setattr(crossing, "LET_GO", 0.0)
    async with node.gateway() as one:
        await until(lambda: node.place.published)
        assert list(node.place.published) == ["gpu-1"]
        owners(one).strangers._ask_at = 0.0
        await until(lambda: "claim ns/c may have it" in words(one))
        node.place.server.remove(path)
        await until(lambda: len(node.place.published) == 2)
        await until(lambda: {*one.ledger.sides} == {"", A, B})


async def test_without_its_state_file_it_gives_nothing_that_another_driver_offers(node: Node) -> None:
    offer_theirs(node)
    async with node.gateway() as one:
        await node.allocatable(1)
        await node.stand(a="foreign", b="plugin")
        with pytest.raises(KubeletError):
            await node.manager.admit("p1", {GPU: 2})
        assert states(one)[A] is State.LEAVING


async def test_dra_offers_again_what_another_driver_gave_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    no_grace(monkeypatch)
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.cross("dra")
        await until(lambda: len(node.place.published) == 2)
        offer_theirs(node)
        await until(lambda: list(node.place.published) == ["gpu-1"])
        assert words(one) == f"offered by nobody here: {THEM}"
        path = allocate_theirs(node)
        node.place.server.remove(THEIRS)
        await until(lambda: "claim ns/c may have it" in words(one))
        assert list(node.place.published) == ["gpu-1"]
        assert await node.cross("dra", dry_run=True) == {A: "dra", B: "dra"}
        node.place.server.remove(path)
        await until(lambda: len(node.place.published) == 2)
        offer_theirs(node)
        await until(lambda: list(node.place.published) == ["gpu-1"])
        await node.cross("plugin")
        await node.stand(a="foreign", b="plugin")
        node.place.server.remove(THEIRS)
        await node.stand(a="plugin", b="plugin")
        assert named(one) == {A: "", B: ""}


async def test_the_scheduler_hears_of_less_before_the_kubelet_does(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, order = [], crossing.Crossing.order

    async def ordered(one: Crossing, to: Side, wanted: Collection[str]) -> None:
        seen.append(node.place.server.objects["/api/v1/nodes/n1"]["status"].get("allocatable"))
        await order(one, to, wanted)

    monkeypatch.setattr(crossing.Crossing, "order", ordered)
    async with node.gateway():
        await node.allocatable(2)
        await node.cross("dra", A)
    assert seen == [{GPU: "1"}]


async def test_devices_are_withheld_only_when_a_lowered_allocatable_stayed_for_a_while(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocatable, "SETTLE", 0.2)
    told, order = [], crossing.Crossing.order

    async def ordered(one: Crossing, to: Side, wanted: Collection[str]) -> None:
        told.append(node.told)
        await order(one, to, wanted)

    monkeypatch.setattr(crossing.Crossing, "order", ordered)
    async with node.gateway() as one:
        await node.allocatable(2)
        crossing_ = drivers(one).crossing
        assert crossing_ is not None
        await until(lambda: crossing_.allocatable.came is None)
        Deaf(monkeypatch, A, B)  # What is told again after the order is told too late.
        ordering = asyncio.ensure_future(node.cross("dra", A))
        await until(lambda: node.told == {GPU: "1"})
        # A kubelet that had begun to tell of its devices writes the old number over it.
        node.place.server.change("/api/v1/nodes/n1", lambda one: one["status"].update(allocatable={GPU: "2"}))
        await ordering
        assert told == [{GPU: "1"}]


async def test_a_lowered_allocatable_is_to_stay_once_more_after_it_was_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, turn = 0.0, asyncio.sleep
    shown = [(0.3, "2"), (0.6, "0")]
    one = allocatable.Allocatable(AsyncMock(), NODE, AsyncMock(return_value=False), AsyncMock())

    async def later(seconds: float) -> None:
        nonlocal now
        now += seconds
        while shown and shown[0][0] <= now:
            one.heard(SimpleNamespace(status=SimpleNamespace(allocatable={GPU: shown.pop(0)[1]})))  # type: ignore[arg-type]
        await turn(0)

    monkeypatch.setattr(allocatable, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(allocatable, "asyncio", SimpleNamespace(sleep=later))
    await one.lower({GPU: ()})
    assert not shown
    assert now >= 0.6 + allocatable.SETTLE - 2 * allocatable.LOOK


@pytest.mark.parametrize(("phases", "counts"), [(["SERVING"] * 2, True), (["SERVING", "WAITING"], False)])
def test_the_kubelets_records_go_by_our_lists_once_it_has_all(phases: list[str], *, counts: bool) -> None:
    resources: Any = [SimpleNamespace(state=SimpleNamespace(phase=Phase[one])) for one in phases]
    look: Any = object()
    assert records.since_served(resources, look) is (look if counts else None)


async def test_who_holds_a_gpu_is_known_from_a_look_that_came_after_the_list_and_has_all(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.at_dra()
        table = owners(one)
        await table._beliefs.look()
        last = table._beliefs.last
        assert last is not None
        looks = [
            last,
            replace(last, at=table._told[A]),
            replace(last, view=replace(last.view, allocatable=None)),
            replace(last, view=replace(last.view, source="checkpoint")),
        ]
        said = []
        for look in looks:
            monkeypatch.setattr(table, "_beliefs", SimpleNamespace(last=look, holders=lambda _: {}))
            said.append(table._pod(A, table.boards()[A]))
        monkeypatch.undo()
        assert said == ["", None, None, None]


async def test_the_kubelet_is_told_of_a_gpu_when_the_list_withholds_all_of_its_parts(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.half_way()
        there = owners(one).boards()
        [(name, entry)] = there[A]
        part = Entry(replace(entry.device, id=f"{A}::1"), State.PRESENT)
        with monkeypatch.context() as now:
            now.setattr(owners(one), "boards", lambda: {**there, A: [(name, entry), (name, part)]})
            owners(one).listed(time.monotonic())
            assert A not in owners(one)._told


def test_the_scheduler_hears_of_healthy_devices_alone() -> None:
    listed = [
        (GPU, Entry(Device(id=one, health=health), State.PRESENT)) for one, health in zip("ab", Health, strict=False)
    ]
    assert crossing._healthy({"board": listed}, lambda *_: True) == {GPU: frozenset("a")}
    assert crossing._healthy({"board": listed}, lambda *_: False) == {GPU: frozenset()}


async def test_what_other_drivers_gave_up_is_kept_until_it_was_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "LINGERS", 0.0)
    monkeypatch.setattr(crossing, "LET_GO", 0.0)
    answers = [None, Allocated()]

    async def ask() -> Allocated | None:
        if len(answers) == 1:
            others.meet({})
        return answers.pop(0)

    others = Strangers(cast("AskedClaims", ask), lambda: None)
    for offered in ("abc", "bc", "c"):
        others.meet(dict.fromkeys(offered, "x offers it"))
    await others.let_go()
    assert [*others.went] == ["a", "b"], "nobody said"
    await others.let_go()
    assert [*others.went] == ["c"], "it went meanwhile"


def test_in_a_new_table_a_claims_gpu_is_the_claims_though_another_driver_offers_it() -> None:
    found = crossing._anew([A, B], Allocated({A: "claim ns/c"}), [A, B])
    assert found == {A: Side.TO_PLUGIN, B: Side.FOREIGN, crossing.REST: Side.PLUGIN}


async def test_a_kubelet_that_starts_does_not_get_what_goes_to_dra_and_another_driver_offers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.half_way()
        table = owners(one)
        [(_, entry)] = table.boards()[A]
        monkeypatch.setattr(table, "_admits", True)
        assert not table.away([entry.device])
        monkeypatch.setattr(table.strangers, "offered", {A: "another driver offers it"})
        assert table.away([entry.device])[A][0] is State.LEAVING
        monkeypatch.undo()


async def test_who_makes_room_tells_nothing_after_it() -> None:
    one = allocatable.Allocatable(AsyncMock(), NODE, AsyncMock(return_value=False), AsyncMock())
    await one.leave({GPU: {A}})
    assert one.turn.locked()


@pytest.mark.parametrize("ends", ["admitted", "late"])
async def test_a_pod_that_was_given_to_the_node_before_is_admitted_first(
    node: Node, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(desk, "ADMITTED", 30.0 if ends == "admitted" else 0.5)
    monkeypatch.setattr(allocatable, "PATIENCE", 30.0 if ends == "admitted" else 0.5)
    path, limits = "/api/v1/namespaces/ns/pods/p", {"resources": {"limits": {GPU: "1"}}}
    node.place.server.put(
        path,
        metadata={"uid": "uid-p"},
        spec={"nodeName": "n1", "containers": [limits]},
        status={"phase": "Pending"},
    )
    async with node.gateway() as one:
        await node.allocatable(2)
        await until(lambda: node.told == {GPU: "2"})
        ordering = asyncio.ensure_future(node.cross("dra", A))
        await until(lambda: len([one for one in node.place.server.asked("GET") if one.path == "/api/v1/pods"]) > 2)
        assert (node.told, states(one)) == ({GPU: "2"}, {A: State.PRESENT, B: State.PRESENT})
        if ends == "admitted":
            node.place.server.change(path, lambda one: one["status"].update(startTime="2026-01-01T00:00:00Z"))
        await ordering
        await node.stand(a="dra", b="plugin")


async def test_a_pod_that_is_given_to_the_node_while_allocatable_is_lowered_is_admitted_first(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocatable, "SETTLE", 0.5)
    monkeypatch.setattr(allocatable, "PATIENCE", 30.0)
    server, path, limits = node.place.server, "/api/v1/namespaces/ns/pods/p", {"resources": {"limits": {GPU: "1"}}}

    def looks() -> int:
        return len([one for one in server.asked("GET") if one.path == "/api/v1/pods"])

    async with node.gateway() as one:
        await node.allocatable(2)
        await until(lambda: node.told == {GPU: "2"})
        ordering = asyncio.ensure_future(node.cross("dra", A))
        await until(lambda: node.told == {GPU: "1"})
        spec = {"nodeName": "n1", "containers": [limits]}
        server.put(path, metadata={"uid": "uid-p"}, spec=spec, status={"phase": "Pending"})
        before = looks()
        await until(lambda: looks() > before + 1)
        assert states(one) == {A: State.PRESENT, B: State.PRESENT}
        server.change(path, lambda one: one["status"].update(startTime="2026-01-01T00:00:00Z"))
        await ordering
        await node.stand(a="dra", b="plugin")


async def test_a_pod_that_is_given_a_device_while_allocatable_is_lowered_is_counted_before_the_kubelet_checks_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocatable, "SETTLE", 0.5)
    server, limits = node.place.server, {"resources": {"limits": {GPU: "1"}}}
    spec = {"nodeName": "n1", "containers": [limits]}
    running = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
    has = {**running, "extendedResourceClaimStatus": {}}
    server.put("/api/v1/namespaces/ns/pods/by-claim", metadata={"uid": "by-claim"}, spec=spec, status=has)
    async with node.gateway():
        await node.allocatable(2)
        await until(lambda: node.told == {GPU: "2"})
        ordering = asyncio.ensure_future(node.cross("dra"))
        await until(lambda: node.told == {GPU: "0"})
        server.put("/api/v1/namespaces/ns/pods/p", metadata={"uid": "p"}, spec=spec, status={"phase": "Pending"})
        await node.manager.admit("p", {GPU: 1})
        assert node.told == {GPU: "2"}, "what the kubelet counts: the pod with the claim, and this one"
        server.change("/api/v1/namespaces/ns/pods/p", lambda one: one["status"].update(running))
        await ordering
        assert node.told == {GPU: "0"}


async def test_who_is_not_admitted_yet_is_asked_about_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole fleet may ask the API server at once."""
    monkeypatch.setattr(allocatable, "SETTLE", 0.0)
    monkeypatch.setattr(allocatable, "PATIENCE", 1.0)
    arriving, began = AsyncMock(return_value=True), time.monotonic()
    await allocatable.Allocatable(AsyncMock(), NODE, arriving, AsyncMock()).lower({GPU: ()})
    assert time.monotonic() - began >= 1.0
    assert 3 <= arriving.await_count <= 5


async def test_what_a_pod_holds_crosses_when_it_ended_and_comes_back_after_the_claim(node: Node) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.manager.admit("p1", {GPU: 1})
        await node.cross("dra")
        await until(lambda: len(node.place.published) == 1)
        assert sorted((await node.cross("dra", dry_run=True)).values()) == ["dra", "to-dra"]
        node.manager.remove("p1")
        await node.stand(a="dra", b="dra")
        await until(lambda: len(node.place.published) == 2)
        asked = node.place.claim("c", "uid-c", "gpu-0")
        assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
        await node.cross("plugin")
        await node.stand(a="to-plugin", b="plugin")
        await node.allocatable(1)
        await until(lambda: node.told == {GPU: "1"})
        await until(lambda: node.place.published == {"gpu-0": ["device-plugin-gateway.io/leaving"]})
        assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
        await node.claims.unprepare(V1, asked)
        await node.stand(a="to-plugin", b="plugin")  # It is allocated still.
        node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        await node.stand(a="plugin", b="plugin")
        await node.allocatable(2)
        assert states(one) == {A: State.PRESENT, B: State.PRESENT}


async def test_a_pod_that_has_ended_by_the_api_server_holds_nothing_in_the_status(node: Node) -> None:
    """The kubelet's checkpoint goes on naming it."""
    async with node.gateway() as one:
        await node.allocatable(2)
        node.place.server.put("/api/v1/namespaces/ns/pods/p", metadata={"uid": "u"}, spec={"nodeName": "n1"})
        node.place.holds(A)
        await one.beliefs.look()

        def said() -> tuple[int | None, int | None]:
            [resource] = Commands(one).taken(rows=False)().resources
            return resource.held, resource.free

        assert said() == (1, 1)
        node.place.server.remove("/api/v1/namespaces/ns/pods/p")
        await until(lambda: said() == (0, 2))


class Deaf:
    """A kubelet whose pod-resources API says that these devices are allocatable, whatever it was told, until it ``hears``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *allocatable: str) -> None:
        self._look, self._allocatable = view.look, {GPU: frozenset(allocatable)}
        self._looks, self.hears = 0, False
        monkeypatch.setattr(view, "look", self._seen)

    async def _seen(self, *places: Path, lists: bool) -> View:
        self._looks += 1
        found = await self._look(*places, lists=lists)
        return found if self.hears else replace(found, allocatable=self._allocatable)

    async def looked(self) -> None:
        """Wait until it was looked at some times more."""
        before = self._looks
        await until(lambda: self._looks > before + 3)


async def test_the_scheduler_hears_of_what_came_back_when_the_kubelet_has(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway():
        await node.at_dra()
        kubelet = Deaf(monkeypatch)
        await node.cross("plugin")
        await node.stand(a="plugin", b="plugin")
        await kubelet.looked()
        assert node.told == {GPU: "0"}
        kubelet.hears = True
        await until(lambda: node.told == {GPU: "2"})


async def test_a_lowered_allocatable_is_told_again_when_the_kubelet_has_heard(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await until(lambda: owners(one).allocatable.came is None)  # What was there at the start was told.
        kubelet = Deaf(monkeypatch, A, B)
        await node.cross("dra", A)
        assert node.told == {GPU: "1"}
        # A kubelet that had begun to tell of its devices writes the old number over it.
        node.place.server.change("/api/v1/nodes/n1", lambda one: one["status"].update(allocatable={GPU: "2"}))
        await kubelet.looked()
        assert node.told == {GPU: "2"}
        kubelet.hears = True
        await until(lambda: node.told == {GPU: "1"})


async def test_a_kubelet_that_starts_has_what_goes_to_dra_until_it_has_admitted_its_pods(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.half_way()
        await node.manager.stop()
        await until(lambda: states(one) == {A: State.PRESENT, B: State.ELSEWHERE})
        monkeypatch.setattr(crossing, "ADMITS", 60.0)
        await node.manager.start()
        await node.allocatable(1)
        await node.manager.admit("p1", {GPU: 1})  # Anew: its container may have ended meanwhile.
        node.manager.remove("p1")
        assert (await node.manager.admit("p2", {GPU: 1})).devices[GPU] == (A,)  # It was given to the node before.
        told: list[set[State]] = []
        tell = owners(one).allocatable.tell

        async def heard(counts: Mapping[str, int]) -> None:
            told.append({state for name, state in states(one).items() if name == A})
            await tell(counts)

        monkeypatch.setattr(owners(one).allocatable, "tell", heard)
        monkeypatch.setattr(crossing, "ADMITS", 0.0)
        await node.allocatable(0)
        assert (states(one)[A], told[0]) == (State.LEAVING, {State.PRESENT})  # The scheduler heard of it first.
        assert node.told == {GPU: "0"}
        node.manager.remove("p2")
        await node.stand(a="dra", b="dra")


async def test_the_scheduler_is_not_to_give_what_a_kubelet_that_starts_has_for_its_pods(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.half_way()
        await node.manager.stop()
        monkeypatch.setattr(crossing, "ADMITS", 60.0)
        await node.manager.start()
        await node.allocatable(1)
        for written in ("1", "1k", "1"):  # The kubelet tells of what it has; of thousands so.
            node.place.server.change("/api/v1/nodes/n1", lambda one: one["status"].update(allocatable={GPU: written}))  # noqa: B023
            await until(lambda: node.told == {GPU: "0"})
        assert states(one) == {A: State.PRESENT, B: State.ELSEWHERE}


async def test_what_is_ordered_while_no_kubelet_is_there_is_withheld_from_none(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def later(_: Crossing) -> None:
        pass

    async with node.gateway() as one:
        await node.allocatable(2)
        await until(lambda: not owners(one)._admits)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Crossing, "_admit", later)
            await node.manager.stop()
            await until(lambda: one.presence.since is None)
            await node.cross("dra")
            assert states(one) == {A: State.PRESENT, B: State.PRESENT}
        await node.manager.start()
        await node.stand(a="dra", b="dra")
        await node.allocatable(0)


async def test_on_the_way_back_a_pod_by_name_counts_and_what_it_had_goes_to_the_next(node: Node) -> None:
    async with node.gateway() as one:
        asked = await node.lent()
        await node.allocatable(2)
        await until(lambda: node.told == {GPU: "2"})
        await until(lambda: node.place.published == {"gpu-0": ["device-plugin-gateway.io/leaving"]})
        assert states(one) == {A: State.LENT, B: State.PRESENT}
        first = await node.manager.admit("p1", {GPU: 1})
        assert first.devices[GPU] == (B,)
        # The kubelet says that the pod ended when this is over, and the API server has its claim for a while.
        slices = drivers(one)._publisher
        assert slices is not None
        await until(lambda: not slices.free())  # The gateway has heard of it, too.
        owners(one)._allocated = {A: "claim ns/c"}
        await node.claims.unprepare(V1, asked)
        second = await node.manager.admit("p2", {GPU: 1})
        assert second.devices[GPU] == (A,)
        assert states(one) == {A: State.PRESENT, B: State.PRESENT}


async def test_on_the_way_back_a_pod_by_name_counts_whose_claim_is_not_prepared_yet(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent, "UNPREPARED", 60.0)
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.cross("dra")
        await node.stand(a="dra", b="dra")
        asked = node.by_name("c", "uid-c", "gpu-0")
        await node.cross("plugin")
        await node.stand(a="to-plugin", b="plugin")
        await until(lambda: "claim ns/c" in one.resources[0].entries[A].reason)
        await node.allocatable(1)  # It may be prepared, or be over, in a moment.
        assert states(one) == {A: State.ELSEWHERE, B: State.PRESENT}
        monkeypatch.setattr(lent, "UNPREPARED", 0.0)
        await node.allocatable(2)
        await until(lambda: node.told == {GPU: "2"})
        assert states(one) == {A: State.LENT, B: State.PRESENT}
        crossing_ = drivers(one).crossing
        assert crossing_ is not None
        crossing_._allocated = {}  # The API server is away, and another pod's claim ends.
        await crossing_.bring_back((), replace(asked, name="d"), ())
        assert crossing_.side(A) is Side.TO_PLUGIN
        assert (await node.manager.admit("p1", {GPU: 1})).devices[GPU] == (B,)
        assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
        await node.claims.unprepare(V1, asked)
        node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        await node.stand(a="plugin", b="plugin")
        assert (await node.manager.admit("p2", {GPU: 1})).devices[GPU] == (A,)


async def test_what_is_over_before_it_is_prepared_comes_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "UNPREPARED", 0.0)
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.cross("dra")
        await node.stand(a="dra", b="dra")
        node.by_name("c", "uid-c", "gpu-0")
        await node.cross("plugin")
        await until(lambda: states(one)[A] is State.LENT)
        node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        await node.stand(a="plugin", b="plugin")
        await node.allocatable(2)


@contextlib.contextmanager
def offered_still(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a ResourceSlice offer the first GPU, whoever it belongs to."""
    with monkeypatch.context() as late:
        late.setattr(Publisher, "free", lambda _: frozenset({("gpu.nvidia.com", "gpu-0")}))
        yield


async def test_what_a_pod_by_name_had_waits_while_a_slice_offers_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        asked = await node.lent()
        with offered_still(monkeypatch):
            await node.claims.unprepare(V1, asked)
            await until(lambda: states(one)[A] is State.RETURNING)
            node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
            assert await node.cross("dra", dry_run=True) == {A: "to-plugin", B: "plugin"}
            await node.allocatable(2)
        await node.stand(a="plugin", b="plugin")
        assert not owners(one)._allocated, "it is asked anew the next time"


async def test_what_a_pod_by_name_had_in_part_waits_until_it_is_known_who_has_the_rest(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        asked = await node.lent()
        with offered_still(monkeypatch):
            await node.claims.unprepare(V1, asked)
            await until(lambda: states(one)[A] is State.RETURNING)
        there = owners(one).boards()
        [(name, entry)] = there[A]
        shared = [(name, entry), (name, replace(entry, device=replace(entry.device, id=f"{A}::1")))]
        for had, devices, side in (
            ((), [(name, entry)], Side.TO_PLUGIN),
            ((A,), shared, Side.TO_PLUGIN),
            ((A,), [(name, entry)], Side.PLUGIN),
        ):
            owners(one)._allocated = {}  # Nobody was asked.
            with monkeypatch.context() as now:
                now.setattr(owners(one), "boards", lambda devices=devices: {**there, A: devices})
                await owners(one).bring_back((), asked, had)
            assert owners(one).side(A) is side


class Unsaid:
    """An API server that doesn't say which ResourceSlices there are, until it is ``well``."""

    def __init__(self, server: ApiServer) -> None:
        self.well, self._answer = asyncio.Event(), server.answer
        server.answer = self.answer  # type: ignore[method-assign]

    async def answer(self, answer: Answer, request: Request) -> None:
        if request.method == "GET" and "/resourceslices" in request.path and not self.well.is_set():
            await answer.no(429, "TooManyRequests")
        else:
            await self._answer(answer, request)


def comes_back(node: Node, board: str) -> None:
    """Have a board on its way back by the state file of a gateway that died before it wrote its slices."""
    there = Ledger(node.place.folder / "state")
    there.load()
    there.set_side(board, Side.TO_PLUGIN)
    there.save(there.snapshot())


@pytest.mark.parametrize("by_name", [False, True])
async def test_what_a_slice_of_before_may_still_offer_does_not_come_back(node: Node, *, by_name: bool) -> None:
    """The scheduler would give it to a claim, and the kubelet to a pod."""
    async with node.gateway():
        await node.at_dra()
        asked = node.by_name("c", "uid-c", "gpu-0")
        if by_name:
            assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
    if not by_name:
        node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
    comes_back(node, A)
    unsaid = Unsaid(node.place.server)
    # Without a claim of ours the driver isn't registered until that is said.
    async with node.gateway(known=by_name) as one:
        await until(lambda: drivers(one)._publisher is not None)
        if by_name:
            assert await node.claims.unprepare(V1, asked) == {"uid-c": None}
            node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        await owners(one)._look()
        assert owners(one).side(A) is Side.TO_PLUGIN
        assert "hasn't said yet which ResourceSlices the node has" in words(one)
        assert not node.place.published["gpu-0"], "the scheduler sees it free"
        unsaid.well.set()
        await node.stand(a="plugin", b="dra")
        await until(lambda: node.place.published.get("gpu-0", ["absent"]))


async def test_an_order_that_is_written_while_what_a_pod_by_name_had_is_brought_back_counts(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, written = asyncio.Event(), asyncio.Event()
    async with node.gateway() as one:
        asked, durable = await node.lent(), one.scribe.durable

        async def slow() -> bool:
            writes.set()
            await written.wait()
            return await durable()

        with offered_still(monkeypatch):
            await node.claims.unprepare(V1, asked)
            await until(lambda: states(one)[A] is State.RETURNING)
            monkeypatch.setattr(one.scribe, "durable", slow)
            ordering = asyncio.ensure_future(node.cross("dra", A))
            await writes.wait()
            bringing = asyncio.ensure_future(owners(one).bring_back((), asked, (A,)))
            await until(lambda: owners(one)._turn._waiters)
            written.set()
            await bringing
            assert owners(one).side(A) in {Side.TO_DRA, Side.DRA}
            await ordering


async def test_what_a_pod_by_name_keeps_is_given_to_no_other_and_not_forgotten(node: Node) -> None:
    async with node.gateway():
        asked = await node.lent()
    async with node.gateway() as one:
        assert states(one) == {A: State.LENT, B: State.PRESENT}
        await node.allocatable(2)
        await node.manager.admit("p1", {GPU: 1})
        with pytest.raises(KubeletError, match="claim ns/c"):
            await node.manager.admit("p2", {GPU: 1})
        assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
        # Ordered to DRA again, it is counted no more.
        await node.cross("dra", A)
        await node.stand(a="dra", b="plugin")
        await node.allocatable(1)
        await until(lambda: node.told == {GPU: "1"})


async def test_its_driver_is_there_as_soon_as_it_knows_the_kubelet(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BIND_AGAIN", 60.0)
    async with node.gateway():
        assert list((node.place.folder / "plugins_registry").iterdir())


@pytest.mark.parametrize("part", ["crossing", "desk"])
async def test_a_part_ends_though_news_come_at_that_moment(
    node: Node, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        moves, follows = owners(one), drivers(one)._desk
        assert follows is not None
        monkeypatch.setattr(moves, "_look", AsyncMock(return_value=60.0))
        monkeypatch.setattr(follows, "_wish", AsyncMock(return_value=None))
        follows._wished = "dra"
        moves._wake = follows._news = news = asyncio.Event()
        work = {"crossing": moves.run, "desk": follows.follow}[part]
        task = asyncio.ensure_future(work())
        await until(lambda: news._waiters)
        news.set()
        task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.cancelled()


async def test_a_restart_forgets_no_owner(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node.gateway():
        await node.allocatable(2)
        await node.manager.admit("p1", {GPU: 2})
        await node.cross("dra", A)
        await node.stand(a="to-dra", b="plugin")
    assert Ledger(node.place.folder / "state").sides == {}
    async with node.gateway() as one:
        assert await node.cross("dra", dry_run=True) == {A: "to-dra", B: "plugin"}
        assert states(one)[A] is State.LEAVING
        monkeypatch.setattr(holdings, "RECORDED_WITHIN", -60.0)  # By the kubelet's records alone.
        for _ in range(3):
            await until(partial(lambda look: one.beliefs.last is not look, one.beliefs.last))
        assert await node.cross("dra", dry_run=True) == {A: "to-dra", B: "plugin"}
        node.manager.remove("p1")
        await node.stand(a="dra", b="plugin")
        await until(lambda: node.place.published == {"gpu-0": []})
    async with node.gateway() as one:
        assert states(one) == {A: State.ELSEWHERE, B: State.PRESENT}
        await until(lambda: node.place.published == {"gpu-0": []})


async def prepare(node: Node, name: str, device: str) -> None:
    asked = node.place.claim(name, f"uid-{name}", device)
    assert isinstance((await node.claims.prepare(V1, asked))[asked.uid], tuple)


async def test_what_is_prepared_for_a_claim_is_not_the_device_plugins_whatever_the_table_says(node: Node) -> None:
    async with node.gateway() as one:
        await node.at_dra()
        await prepare(node, "c", "gpu-0")
        owners(one)._sides[A] = Side.PLUGIN
        assert owners(one).side(A) is Side.TO_PLUGIN


async def test_an_older_state_file_that_is_put_back_gives_no_gpu_twice(node: Node) -> None:
    path = node.place.folder / "state" / "ledger.json"
    async with node.gateway() as one:
        await until(lambda: path.exists() and not one.ledger.pending)
        older = path.read_bytes()
        await node.at_dra()
        await prepare(node, "c", "gpu-0")
    path.write_bytes(older)
    async with node.gateway() as one:
        await node.stand(a="to-plugin", b="plugin")  # The API server was asked.
        assert [row.name for row in one.ledger.claims.values()] == ["c"]
        await node.allocatable(1)
        await node.manager.admit("p1", {GPU: 1})
        with pytest.raises(KubeletError):
            await node.manager.admit("p2", {GPU: 1})


async def test_an_older_state_file_that_is_put_back_under_a_gateway_changes_nothing(node: Node) -> None:
    path = node.place.folder / "state" / "ledger.json"
    async with node.gateway() as one:
        await until(lambda: path.exists() and not one.ledger.pending)
        older = path.read_bytes()
        await node.at_dra()
        await prepare(node, "c", "gpu-0")
        path.write_bytes(older)
        await prepare(node, "d", "gpu-1")
    async with node.gateway() as one:
        assert await node.cross("dra", dry_run=True) == {A: "dra", B: "dra"}
        assert {row.name for row in one.ledger.claims.values()} == {"c", "d"}


async def test_gpus_go_where_the_nodes_annotation_wants_them(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "LOOK_FOR", 0.05)

    def annotate(**annotations: str) -> None:
        found = {f"device-plugin-gateway/{key.replace('_', '-')}": value for key, value in annotations.items()}
        node.place.server.change("/api/v1/nodes/n1", lambda one: one["metadata"].update(annotations=found))

    async with node.gateway() as one:
        await node.allocatable(2)
        await node.manager.admit("p1", {GPU: 1})
        annotate(cross_to="dra")
        await until(lambda: len(node.place.published) == 1)
        node.manager.remove("p1")
        await node.stand(a="dra", b="dra")
        with pytest.raises(ControlError, match="device-plugin-gateway/cross-to wants all at dra"):
            await node.cross("plugin")
        annotate(cross_to="elsewhere")
        await until(lambda: drivers(one).trouble)
        status = Commands(one).taken(True)()
        assert status.crossing.startswith("expected device-plugin-gateway/cross-to to be dra or plugin, got ")
        assert "elsewhere" in status.crossing
        await node.cross("plugin", A)
        await node.stand(a="plugin", b="dra")
        annotate(cross_to="plugin")
        await node.stand(a="plugin", b="plugin")
        await until(lambda: not drivers(one).trouble)
        annotate()
        await until(lambda: drivers(one)._desk._wished == "")  # type: ignore[union-attr]
        await node.cross("dra", B)
        await node.stand(a="plugin", b="dra")


async def stands_still(_answer: Answer, _: Request) -> None:
    """Be an API server that takes a request and says nothing."""
    await asyncio.Event().wait()


async def test_an_order_that_the_api_server_does_not_answer_is_given_up_and_not_carried_out_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await until(lambda: owners(one).allocatable.came is None)  # Nothing else is told to the API server now.
        monkeypatch.setattr(desk, "WITHIN", 0.3)
        node.place.server.faults.append(stands_still)
        with pytest.raises(ControlError, match=r"nothing was done within 0\.3 s: .*try again"):
            await node.cross("dra")
        monkeypatch.setattr(desk, "WITHIN", 10.0)
        assert await node.cross("dra", dry_run=True) == {A: "plugin", B: "plugin"}
        await node.cross("dra")
        await node.stand(a="dra", b="dra")


async def test_an_order_waits_while_something_else_is_told_of_the_node(node: Node) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await until(lambda: owners(one).allocatable.came is None)
        async with owners(one).allocatable.turn:
            ordering = asyncio.ensure_future(node.cross("dra", A))
            await until(lambda: owners(one).allocatable.turn._waiters)
            assert owners(one).side(A) is Side.PLUGIN
        await ordering


async def test_an_order_that_is_being_written_down_is_not_given_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    order = crossing.Crossing.order

    async def slowly(one: Crossing, to: Side, wanted: Collection[str]) -> None:
        await asyncio.sleep(0.6)  # So slow is the disk.
        await order(one, to, wanted)

    async with node.gateway() as one:
        await until(lambda: owners(one).allocatable.came is None)
        monkeypatch.setattr(crossing.Crossing, "order", slowly)
        monkeypatch.setattr(desk, "WITHIN", 0.5)
        assert await node.cross("plugin") == {A: "plugin", B: "plugin"}


async def test_without_its_state_file_the_claims_of_the_cluster_are_listed_ever_more_seldom(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "OFTEN", 3600.0)
    node.place.server.hidden = "resourceclaims"
    looks: list[int] = []
    look = Crossing._look

    async def counted(one: Crossing) -> float:
        looks.append(len([row for row in node.place.server.asked("GET") if row.path.endswith("/resourceclaims")]))
        return await look(one)

    monkeypatch.setattr(Crossing, "_look", counted)
    async with node.gateway(known=False):
        await until(lambda: looks[-5:].count(1) == 5)


async def test_the_claims_of_other_nodes_may_be_any_number(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_OBJECTS", 2)
    results = [{"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n2", "device": "gpu-0"}]
    for number in range(3):
        status = {"allocation": {"devices": {"results": results}}}
        node.place.server.put(f"{API}/namespaces/ns/resourceclaims/{number}", metadata={"uid": "u"}, status=status)
    async with node.gateway():
        await node.at_dra()
        await node.cross("plugin")
        await node.stand(a="plugin", b="plugin")


async def test_an_annotation_that_cannot_be_followed_is_tried_ever_more_seldom(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "LOOK_FOR", 0.01)
    monkeypatch.setattr(desk, "SELDOM", 60.0)
    tried: list[float] = []

    async def refused(_one: desk.Names, _resources: Collection[str]) -> str:
        tried.append(time.monotonic())
        return "a kubelet that is too old"

    monkeypatch.setattr(desk.Names, "ordered", refused)
    async with node.gateway():
        await node.allocatable(2)
        found = {ANNOTATION: "dra"}
        node.place.server.change("/api/v1/nodes/n1", lambda one: one["metadata"].update(annotations=found))
        await until(lambda: len(tried) == 6)
    waits = [after - before for before, after in itertools.pairwise(tried)]
    assert waits[4] > 5 * waits[0]
    assert waits[4] > 0.1


async def test_the_claims_of_the_whole_cluster_are_not_listed_while_nobody_says_which_slices_there_are(
    node: Node,
) -> None:
    node.place.server.hidden = "resourceslices"
    async with node.gateway(known=False) as one:
        await until(lambda: len([row for row in node.place.server.asked("GET") if "slices" in row.path]) > 2)
        assert not owners(one).is_known
        assert not [row for row in node.place.server.asked("GET") if row.path.endswith("/resourceclaims")]


async def test_people_are_told_why_nobody_knows_which_claims_there_are(node: Node) -> None:
    async with node.gateway() as one:
        await node.at_dra()
        node.place.server.hidden = "resourceclaims"
        await node.cross("plugin")
        await until(lambda: "doesn't say which do: GET /apis/resource.k8s.io/v1/resourceclaims" in words(one))
        assert "403 Forbidden" in words(one)
        node.place.server.hidden = ""
        await node.stand(a="plugin", b="plugin")
        assert "doesn't say" not in words(one)


async def test_an_annotation_is_followed_soon_after_the_api_server_is_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "LOOK_FOR", 60.0)
    async with node.gateway() as one:
        await node.allocatable(2)
        node.place.server.forbidden = "nodes/n1/status"
        found = {ANNOTATION: "dra"}
        node.place.server.change("/api/v1/nodes/n1", lambda one: one["metadata"].update(annotations=found))
        await until(lambda: "can't be lowered" in drivers(one).trouble)
        node.place.server.forbidden = ""
        await until(lambda: owners(one).side(A) is owners(one).side(B) is Side.DRA)


async def test_an_annotation_waits_for_a_kubelet_that_takes_the_driver(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "LOOK_FOR", 0.05)
    found = {ANNOTATION: "dra"}
    node.place.server.change("/api/v1/nodes/n1", lambda one: one["metadata"].update(annotations=found))
    async with node.gateway(known=False) as one:
        await node.allocatable(2)
        await until(lambda: "expected the kubelet to have taken the DRA driver" in drivers(one).trouble)
        node.claims = await node.place.kubelet()
        await node.claims.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))
        await node.stand(a="dra", b="dra")
        assert not drivers(one).trouble
        await node.claims.channel.close()


@pytest.mark.parametrize("cordoned", [False, True], ids=["", "cordoned"])
async def test_a_gpu_of_dra_that_is_lost_can_be_forgotten(node: Node, *, cordoned: bool) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.cross("dra", A)
        await node.stand(a="dra", b="plugin")
        node.place.profile.write_text(PROFILE.replace("    - {uuid: GPU-a, device_nodes: [/dev/nvidia0]}\n", ""))
        [resource] = one.resources
        await until(lambda: State.LOST in {layer.state for layer in resource.entries[A].layers})
        [path] = control.sockets(node.place.folder / "state")
        if cordoned:
            await control.ask(path, {"op": "cordon", "id": A, "reason": "it fell off"}, 10)
        answer = await control.ask(path, {"op": "forget", "id": A}, 10)
        assert answer["changed"]
        assert A not in resource.entries


async def test_whoever_takes_hardware_away_is_told_which_claim_has_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.at_dra()
        asked = node.place.claim("c", "uid-c", "gpu-0")
        assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
        [path] = control.sockets(node.place.folder / "state")
        monkeypatch.setattr(one.source, "release", AsyncMock(return_value=[A, B]))
        released = await control.ask(path, {"op": "release", "ids": []}, 10)
        assert released["holders"] == {A: "claim ns/c (pod p)"}
        cordoned = await control.ask(path, {"op": "cordon", "id": A, "reason": "ECC"}, 10)
        assert [row["holder"] for row in cordoned["found"]] == ["claim ns/c (pod p)"]
        node.place.profile.write_text(PROFILE.replace("    - {uuid: GPU-a, device_nodes: [/dev/nvidia0]}\n", ""))
        await until(lambda: any(layer.state is State.LOST for layer in one.resources[0].entries[A].layers))
        with pytest.raises(ControlError, match=r"held by claim ns/c \(pod p\): end that pod first"):
            await control.ask(path, {"op": "forget", "id": A}, 10)


async def test_a_late_claim_calls_back_what_nobody_holds(node: Node) -> None:
    async with node.gateway():
        await node.allocatable(2)
        asked = node.place.claim("c", "uid-c", "gpu-0")
        assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
        await node.stand(a="to-plugin", b="plugin")
        await node.allocatable(1)
        await node.claims.unprepare(V1, asked)
        node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        await node.stand(a="plugin", b="plugin")
        await node.allocatable(2)


async def test_without_its_state_file_it_gives_nothing_before_it_knows_the_claims(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossing, "ADMITS", 60.0)
    node.place.claim("c", "uid-c", "gpu-0")
    await node.place.server.stop()
    async with node.gateway(known=False) as one:
        await asyncio.sleep(0.1)
        assert set(states(one).values()) == {State.LEAVING}
        with pytest.raises(ControlError, match="hasn't said yet which ResourceSlices the node has; `gateway doctor`"):
            await node.cross("plugin")
        node.place.server.hidden = "resourceclaims"
        await node.place.server.start()
        why = "nothing is known of it yet, because the API server hasn't said yet which claims there are: GET "
        await until(lambda: words(one).startswith(why))
        assert "403 Forbidden" in words(one)
        node.place.server.hidden = ""
        await node.stand(a="to-plugin", b="plugin")
        await node.allocatable(1)
        assert one.ledger.sides[crossing.REST] is Side.PLUGIN


@pytest.mark.parametrize(
    "first", ["no profile", "resources: {nvidia.com/gpu: {gpus: []}}", PROFILE], ids=["unknown", "none", "not all"]
)
async def test_without_its_state_file_it_gives_nothing_before_it_knows_its_devices(
    node: Node, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Which of them a claim has can't be told before: a driver may take seconds to start."""
    looks, look, told = 0, Crossing._look, asyncio.Event()

    async def looked(one: Crossing) -> float:
        nonlocal looks
        looks += one.strangers.offered is not None
        if first == PROFILE:
            one._first = told  # Another source hasn't told of its devices.
        return await look(one)

    monkeypatch.setattr(Crossing, "_look", looked)
    node.place.claim("c", "uid-c", "gpu-0")
    node.place.profile.write_text(first)
    async with node.gateway(known=False) as one:
        await until(lambda: looks > 2)
        assert {*states(one).values()} <= {State.LEAVING}
        node.place.profile.write_text(PROFILE)
        told.set()
        await node.allocatable(1)
        await node.stand(a="to-plugin", b="plugin")
        assert (await node.manager.admit("p1", {GPU: 1})).devices[GPU] == (B,)
        with pytest.raises(KubeletError):
            await node.manager.admit("p2", {GPU: 1})


async def test_without_its_state_file_a_gpu_that_comes_later_is_asked_about_where_a_claim_has_one_that_is_not_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[float] = []
    look = Crossing._look

    async def looked(one: Crossing) -> float:
        again.append(await look(one))
        return again[-1]

    monkeypatch.setattr(Crossing, "_look", looked)
    asked = node.place.claim("c", "uid-c", "gpu-1")
    node.place.profile.write_text(PROFILE.replace("    - {uuid: GPU-b, device_nodes: [/dev/nvidia1]}\n", ""))
    async with node.gateway() as one:
        await node.stand(a="plugin")
        await node.allocatable(1)
        await until(lambda: again[-1:] == [0.0])  # It looks again when something happens.
        node.place.profile.write_text(PROFILE)  # It answers again.
        await until(lambda: B in one.resources[0].entries)
        await node.stand(a="plugin", b="to-plugin")
        await until(lambda: "claim ns/c has it" in drivers(one).stands()[1].words)
        assert (await node.manager.admit("p1", {GPU: 1})).devices[GPU] == (A,)
        with pytest.raises(KubeletError):
            await node.manager.admit("p2", {GPU: 1})
        assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
        await node.claims.unprepare(V1, asked)
        node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        await node.stand(a="plugin", b="plugin")
        await node.allocatable(2)


@pytest.mark.parametrize(("known", "status"), [(False, 404), (False, 403), (False, 0), (True, 404)])
async def test_only_a_server_without_the_api_has_no_claims(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, known: bool, status: int
) -> None:
    """One that had the API a moment ago has claims, too."""

    async def no(*_: object, **__: object) -> None:
        raise KubernetesError("GET", status, "no")

    async with node.gateway() as one:
        with monkeypatch.context() as away:
            away.setattr(drivers(one)._api, "get", no)
            away.setattr(drivers(one)._api, "list", no)
            away.setattr(drivers(one)._current, "server", Server("v1") if known else None)
            asked = drivers(one)._allocated()
            if (known, status) == (False, 404):
                assert await asked == Allocated()
            else:
                with pytest.raises(KubernetesError):
                    await asked


async def test_an_api_server_is_upgraded_and_taken_back_under_a_gateway(node: Node) -> None:
    """A claim is being prepared, and a GPU falls ill, while it has the version no more that was spoken; another driver's GPU stays its own."""
    server = node.place.server
    await server.upgrade("v1beta1")
    async with node.gateway() as one:
        await node.at_dra()
        for number, version in enumerate(("v1", "v1beta1")):
            api, asked = f"/apis/resource.k8s.io/{version}", ClaimName("ns", f"c{number}", f"uid-{number}")
            node.place.claim(asked.name, asked.uid, "gpu-0", f"/apis/resource.k8s.io/{('v1beta1', 'v1')[number]}")
            await server.stop()
            ill = "" if number else "    unhealthy: {GPU-b: XID 79}\n"
            node.place.profile.write_text(PROFILE + ill)
            preparing = asyncio.ensure_future(node.claims.prepare(V1, asked))
            await server.upgrade(version)
            assert isinstance((await preparing)[asked.uid], tuple)
            asks = await drivers(one)._allocated()
            assert asks.boards[A] == f"claim ns/{asked.name}"
            shown = (
                {"gpu-0": [], "gpu-1": []} if number else {"gpu-0": [], "gpu-1": ["device-plugin-gateway.io/unhealthy"]}
            )
            await until(lambda: node.place.published_at(api) == shown)  # noqa: B023
            await node.claims.unprepare(V1, asked)
            server.remove(f"{api}/namespaces/ns/resourceclaims/{asked.name}")
        theirs = [{"name": "x", "basic": {"attributes": STRANGE}}]
        spec = {"driver": "dra.example.com", "nodeName": "n1", "devices": theirs}
        server.put("/apis/resource.k8s.io/v1beta1/resourceslices/theirs", spec=spec)
        await until(lambda: "gpu-0" not in node.place.published_at("/apis/resource.k8s.io/v1beta1"))


async def test_a_kubelet_without_dra_has_the_device_plugin_alone(node: Node) -> None:
    server: Any = node.place.server
    server.change("/api/v1/nodes/n1", lambda one: one["status"]["nodeInfo"].update(kubeletVersion="v1.28.1"))
    async with node.gateway(known=False) as one:
        await node.allocatable(2)
        await until(lambda: bool(drivers(one).lacking))
        with pytest.raises(ControlError, match=r"kubelet 1\.28 has no dynamic resource allocation"):
            await node.cross("dra")
        assert not list((node.place.folder / "plugins_registry").iterdir())


async def test_a_defect_of_a_part_ends_the_gateway(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> float:
        raise ZeroDivisionError

    async with node.gateway(status=1) as one:
        monkeypatch.setattr(crossing.Crossing, "_look", broken)
        drivers(one)._pods_ended()
        assert await one._exit == 1


@pytest.mark.parametrize("named", [GPU, "example.com/other"])
async def test_where_pods_ask_by_name_nothing_goes_to_dra_on_a_kubelet_that_would_run_them_without(
    node: Node, named: str
) -> None:
    server: Any = node.place.server
    server.put(f"{API}/deviceclasses/by-name", spec={"extendedResourceName": named})
    server.put(f"{API}/deviceclasses/gpu.nvidia.com", spec={"selectors": []})
    async with node.gateway():
        await node.allocatable(2)
        server.change("/api/v1/nodes/n1", lambda one: one["status"]["nodeInfo"].update(kubeletVersion="v1.35.2"))
        if named == GPU:
            expected = r"from 1\.36 on, because of the DeviceClass by-name with .* nvidia.com/gpu, got 1\.35"
            with pytest.raises(ControlError, match=expected):
                await node.cross("dra")
            assert await node.cross("dra", dry_run=True) == {A: "plugin", B: "plugin"}
            assert node.told == {}
            server.change("/api/v1/nodes/n1", lambda one: one["status"]["nodeInfo"].update(kubeletVersion="v1.36.0"))
        await node.cross("dra")
        await node.stand(a="dra", b="dra")


async def test_which_kubelet_there_is_is_asked_anew_before_an_order(node: Node) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        names = asking(one)
        await names.looked.wait()
        names._kubelet = 99
        await names.ordered({GPU})
        assert names._kubelet == 37


async def test_nothing_goes_to_dra_while_nobody_says_whether_pods_ask_by_name(node: Node) -> None:
    server: Any = node.place.server
    server.change("/api/v1/nodes/n1", lambda one: one["status"]["nodeInfo"].update(kubeletVersion="v1.35.2"))
    async with node.gateway():
        await node.allocatable(2)
        with pytest.raises(ControlError, match="it can't be known whether pods that ask by name"):
            await node.cross("dra")  # Nobody has a class here: 404.


NODE = "/api/v1/nodes/n1"


def kubelet_is(node: Node, version: str) -> None:
    node.place.server.change(NODE, lambda one: one["status"]["nodeInfo"].update(kubeletVersion=version))


def gives(node: Node, name: str, resource: str = "") -> None:
    """Have a DeviceClass, that names a resource or none."""
    node.place.server.put(
        f"{API}/deviceclasses/{name}", spec={"extendedResourceName": resource} if resource else {"selectors": []}
    )


@pytest.mark.parametrize("change", ["a class is named", "the kubelet is replaced"])
async def test_what_pods_by_name_would_run_without_is_offered_to_nobody_new(
    node: Node, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "LOOK_AT_CLASSES", 0.05 if change == "a class is named" else 60.0)
    versions = ("v1.35.2", "v1.35.2") if change == "a class is named" else ("v1.37.1", "v1.35.2")
    kubelet_is(node, versions[0])
    gives(node, "c", "" if change == "a class is named" else GPU)
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.cross("dra")
        await until(lambda: node.place.published == {"gpu-0": [], "gpu-1": []})
        assert isinstance((await node.claims.prepare(V1, node.place.claim("c", "uid-c", "gpu-0")))["uid-c"], tuple)
        assert not drivers(one).by_name.overlooked
        late = node.place.claim("d", "uid-d", "gpu-1")
        kubelet_is(node, versions[1])
        gives(node, "c", GPU)
        taints = ["device-plugin-gateway.io/by-name"]
        await until(lambda: node.place.published == {"gpu-0": taints, "gpu-1": taints})
        words = Commands(one).taken(True)().by_name.overlooked
        assert re.search(r"from 1\.36 on, because of the DeviceClass c with .* nvidia.com/gpu, got 1\.35", words)
        # Who has one keeps it, and who was allocated one gets it.
        assert [row.holder for row in Commands(one).taken(True)().sides] == ["claim ns/c (pod p)", None]
        assert isinstance((await node.claims.prepare(V1, late))["uid-d"], tuple)
        kubelet_is(node, versions[0])
        gives(node, "c", "" if change == "a class is named" else GPU)
        await until(lambda: node.place.published == {"gpu-0": [], "gpu-1": []})
        assert not drivers(one).by_name.overlooked


async def test_what_pods_by_name_would_run_without_is_withheld_as_soon_as_the_kubelet_is_known(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.at_dra()
        names, told = asking(one), list[bool]()
        await names.looked.wait()
        monkeypatch.setattr(names, "_changed", lambda: told.append(True))
        names._classes = {"by-name": GPU}
        names.take(cast("NodeObject", SimpleNamespace(kubelet=35)))
        assert told == [True]


async def test_a_gateway_that_starts_offers_nothing_that_pods_by_name_would_run_without(node: Node) -> None:
    gives(node, "c", GPU)
    async with node.gateway():
        await node.allocatable(2)
        await node.cross("dra")
        await until(lambda: node.place.published == {"gpu-0": [], "gpu-1": []})
    node.place.server.remove(SLICE)
    kubelet_is(node, "v1.35.2")
    before = len(node.place.server.requests)
    async with node.gateway():
        taints = ["device-plugin-gateway.io/by-name"]
        await until(lambda: node.place.published == {"gpu-0": taints, "gpu-1": taints})
        written = [one.body for one in node.place.server.requests[before:] if one.path == SLICE and one.body]
        assert all("taints" in device for body in written for device in body["spec"]["devices"])


async def test_where_nobody_says_which_classes_there_are_an_old_kubelet_gets_nothing_new(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "pause", lambda *_: 0.05)
    async with node.gateway():
        await node.allocatable(2)
        await node.cross("dra")
        await until(lambda: node.place.published == {"gpu-0": [], "gpu-1": []})
    kubelet_is(node, "v1.35.2")
    async with node.gateway() as one:
        await until(lambda: all(node.place.published.values()))
        assert drivers(one).by_name.overlooked.startswith("it can't be known whether pods that ask by name")
        gives(node, "c")
        await until(lambda: node.place.published == {"gpu-0": [], "gpu-1": []})


async def test_it_says_that_pods_by_name_wait_for_a_class(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "LOOK_AT_CLASSES", 0.05)
    gives(node, "c", GPU)
    gives(node, "d")
    async with node.gateway() as one:
        await node.at_dra()
        assert not drivers(one).by_name.waiting
        node.place.server.remove(f"{API}/deviceclasses/c")
        await until(lambda: drivers(one).by_name.waiting)
        assert Commands(one).taken(True)().by_name.waiting.startswith("no DeviceClass has the extendedResourceName")
        await until(lambda: node.place.published == {"gpu-0": [], "gpu-1": []})
        gives(node, "c", GPU)
        await until(lambda: not drivers(one).by_name.waiting)


async def test_without_a_class_that_names_it_nobody_is_said_to_wait_but_where_a_pod_had_one(node: Node) -> None:
    gives(node, "d")
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.cross("dra")
        await until(lambda: node.place.published == {"gpu-0": [], "gpu-1": []})
        await node.claims.prepare(V1, node.place.claim("c", "uid-c", "gpu-0"))
        assert not drivers(one).by_name.waiting
        await node.claims.prepare(V1, node.by_name("d", "uid-d", "gpu-1"))
        assert drivers(one).by_name.waiting


async def test_nothing_crosses_to_a_driver_that_the_kubelet_has_not_taken(node: Node) -> None:
    async with node.gateway(known=False):
        await node.allocatable(2)
        with pytest.raises(ControlError, match="expected the kubelet to have taken the DRA driver"):
            await node.cross("dra")
        with pytest.raises(ControlError, match="no device here is called 'GPU-x'"):
            await node.cross("plugin", "GPU-x")
        with pytest.raises(ControlError, match="expected dra or plugin"):
            await node.cross("off")
        assert await node.cross("plugin") == {A: "plugin", B: "plugin"}, "it needs no driver"


async def test_a_dry_run_says_what_gpus_would_wait_for_and_why_the_order_would_be_refused(node: Node) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.manager.admit("p1", {GPU: 1})
        await until(lambda: held(one))
        [path] = control.sockets(node.place.folder / "state")
        request = {"op": "cross", "to": "dra", "ids": [], "dry_run": True}
        answer = await control.ask(path, request, 10)
        assert answer["refused"] == ""
        waits = {row["id"]: (row["side"], row["then"], row["words"]) for row in answer["boards"]}
        goes = "it goes to DRA as soon as nobody holds it"
        assert waits == {A: ("plugin", "to-dra", f"{goes}: held by default/p1/main"), B: ("plugin", "to-dra", goes)}
        drivers(one)._drivers["gpu.nvidia.com"].registered("no such version")
        answer = await control.ask(path, request, 10)
        assert "the kubelet to have taken the DRA driver" in answer["refused"]
        assert "`gateway doctor` says what to do" in answer["refused"]
        assert {row["side"] for row in answer["boards"]} == {"plugin"}


def held(one: Gateway) -> bool:
    return bool(one.beliefs.holders(GPU))


async def test_a_disk_that_does_not_write_stops_a_crossing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)

        async def not_written() -> bool:
            return False

        monkeypatch.setattr(one.scribe, "durable", not_written)
        with pytest.raises(ControlError, match="nothing was done"):
            await node.cross("dra")
        monkeypatch.undo()
        assert await node.cross("dra", dry_run=True) == {A: "plugin", B: "plugin"}
        assert {one.ledger.sides.get(board, Side.PLUGIN) for board in (A, B)} == {Side.PLUGIN}, (
            "a restart moves nothing"
        )


async def test_where_the_state_directory_can_not_be_written_nothing_is_given_away(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = node.place.folder / "state"
    state.write_text("where a folder belongs")
    made: list[Gateway] = []
    begin = Gateway.run

    async def run(gateway: Gateway) -> int:
        made.append(gateway)
        return await begin(gateway)

    monkeypatch.setattr(Gateway, "run", run)

    async def serve() -> None:
        async with node.gateway() as one:
            await node.allocatable(2)
            assert set(states(one).values()) == {State.PRESENT}
            await until(lambda: probes.look(one).ready)

    serving = asyncio.ensure_future(serve())
    await until(lambda: made and made[0].waits_for)
    assert not node.manager.registers
    assert not serving.done()
    state.unlink()
    await serving


async def test_what_a_disk_does_not_take_is_said(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("where a folder belongs")
    one = alone(tmp_path / "state")
    waiting = asyncio.ensure_future(one.begin())
    await until(lambda: one.waits_for)
    assert re.fullmatch(
        r"the state directory: .*/state/alone\.lock can't be locked \(.+\), and without that no GPU is given away",
        one.waits_for,
    )
    (tmp_path / "state").unlink()
    assert not await waiting
    one.close()


def alone(state: Path, born_ns: int = 1, others: Iterable[Age] = ()) -> Alone:
    return Alone(Age(born_ns, "0" * 8), state, lambda: dict.fromkeys(others), lambda: None, Scribe(Ledger(state)))


@pytest.mark.parametrize("start", ["begin", "succeed"])
async def test_without_descriptors_it_waits_until_it_knows_who_else_lives(tmp_path: Path, start: str) -> None:
    full = True

    def others() -> dict[Age, None]:
        if full:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return {}

    one = Alone(Age(1, "0" * 8), tmp_path, others, lambda: None, Scribe(Ledger(tmp_path)))
    starting = asyncio.ensure_future(one.begin() if start == "begin" else one.succeed(lambda: ""))
    await until(lambda: one.waits_for or starting.done())
    assert not starting.done()
    assert (start == "succeed") or "whether another gateway lives: Too many open files" in one.waits_for
    full = False
    assert not await starting
    one.close()


async def test_a_second_gateway_waits_for_the_first_and_for_those_beside_it(tmp_path: Path) -> None:
    others = [Age(2, "0000000a")]
    first, second = alone(tmp_path), alone(tmp_path, others=others)
    assert not await first.begin()
    waiting = asyncio.ensure_future(second.begin())
    await until(lambda: second.waits_for)
    first.close()
    await asyncio.sleep(0.3)
    assert not waiting.done()
    others.clear()
    assert not await waiting
    assert second.waits_for == ""
    third = alone(tmp_path)
    waiting = asyncio.ensure_future(third.begin())
    await until(lambda: third.waits_for)
    second.close()
    assert not await waiting
    third.close()


async def test_one_that_came_back_makes_no_room_at_once_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer gateway that ends as soon as it serves would take the kubelet's devices away each time that it starts."""
    assert [held_back(times) for times in (0, 1, 2, 3, 6, 10_000)] == [0, 30, 60, 120, 900, 900]
    assert alone(tmp_path).in_vain == 1
    one = Alone(Age(1, "0" * 8), tmp_path, dict, lambda: None, Scribe(Ledger(tmp_path)), in_vain=2)
    assert not await one.begin()
    one.serves(host_service=False)
    request = {"ready": True, "from": {"born_ns": 2, "token": "0000000b"}}
    with pytest.raises(ControlError, match=r"it made room 2 times for one that ended again, and does so next in \d+ s"):
        await one.handlers["resign"](None, request)  # type: ignore[arg-type]
    assert one.in_vain == 3
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 61)
    with pytest.raises(AttributeError):  # It answers.
        await one.handlers["resign"](None, request)  # type: ignore[arg-type]
    monkeypatch.setattr(time, "monotonic", lambda: began + 3700)
    assert one.in_vain == 1
    one.close()


@pytest.mark.parametrize(("seconds", "in_vain"), [(5, 3), (700, 1)])
async def test_a_newer_one_that_served_for_long_did_not_come_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, in_vain: int
) -> None:
    newer, one = (
        alone(tmp_path),
        Alone(Age(1, "0" * 8), tmp_path, dict, lambda: None, Scribe(Ledger(tmp_path)), in_vain=2),
    )
    assert not await newer.begin()
    waiting = asyncio.ensure_future(one.begin())
    await until(lambda: one.waits_for)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + seconds)
    newer.close()
    assert not await waiting
    one.serves(host_service=False)
    assert one.in_vain == in_vain
    one.close()


async def test_it_is_held_back_from_when_it_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Alone(Age(1, "0" * 8), tmp_path, dict, lambda: None, Scribe(Ledger(tmp_path)), in_vain=1)
    assert not await one.begin()
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 500)  # It has waited so long.
    one.serves(host_service=False)
    with pytest.raises(ControlError, match="and does so next in 30 s"):
        await one.handlers["resign"](None, {"ready": True, "from": {"born_ns": 2, "token": "0000000b"}})  # type: ignore[arg-type]
    one.close()


async def test_the_newest_of_the_older_gateways_is_asked_and_once_while_it_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    async def ask(path: Path, request: dict[str, Any], _: float) -> None:
        asked.append((path.name, request["ready"]))

    monkeypatch.setattr("gateway.handover.alone.control.ask", ask)
    monkeypatch.setattr("gateway.handover.alone.AGAIN", 0.005)
    others = [Age(1, "0000000a"), Age(2, "0000000b")]
    older, one = (
        alone(tmp_path),
        Alone(Age(3, "0000000c"), tmp_path, lambda: dict.fromkeys(others), lambda: None, Scribe(Ledger(tmp_path))),
    )
    assert not await older.begin()
    assert await one.begin()
    waiting = asyncio.ensure_future(one.succeed(lambda: ""))
    await until(lambda: len(asked) > 1)
    await asyncio.sleep(0.1)
    assert [("0000000b" in name, ready) for name, ready in asked] == [(True, False), (True, True)]
    others.clear()
    older.close()
    await waiting
    one.close()


async def test_of_two_newer_gateways_the_one_that_came_second_goes_back_to_waiting(node: Node) -> None:
    """It has a socket that the kubelet may call, and decides nothing: each claim would wait for it."""
    async with node.gateway(status=RESIGNED):
        await node.allocatable(2)
        async with node.newer() as (late, running), node.place.gateway("on") as first:
            assert first.age > late.age
            assert await running == RESIGNED
            assert len(list((node.place.folder / "plugins_registry").iterdir())) == 1


async def test_a_signal_while_it_makes_room_ends_it(node: Node) -> None:
    one = node.place.made("on")
    running = asyncio.ensure_future(one.run())
    await until(lambda: one.begun)
    one._end(RESIGNED)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_one_whose_program_is_gone_ends_when_it_made_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        age, alone = Age(1, "0" * 8), None

        async def run(self) -> int:
            return RESIGNED

    def ended(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(sys, "executable", "/no/such/program")
    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit, match=r"^1$"):
        await serve._run(Made())  # type: ignore[arg-type]


async def resigns(path: Path, born_ns: int, *, ready: bool = False) -> dict[str, Any]:
    return await control.ask(
        path, {"op": "resign", "ready": ready, "from": {"born_ns": born_ns, "token": "0000000b"}}, 5
    )


async def test_an_older_gateway_makes_room_for_a_newer_one_that_can_serve(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway(status=RESIGNED) as older:
        await node.allocatable(2)
        [path] = control.sockets(node.place.folder / "state")
        with pytest.raises(ControlError, match="expected the age of a gateway newer than"):
            await resigns(path, older.age.born_ns - 1)
        with pytest.raises(ControlError, match="expected the age of a gateway newer than"):
            await resigns(path, 1 << 61)  # Newer than now.
        assert await resigns(path, older.age.born_ns + 1) == {"resigns": True, "v": 1}
        assert not older._exit.done()
        assert older.alone is not None
        alone = older.alone
        alone.stays = "it is still starting"
        with pytest.raises(ControlError, match="it is still starting"):
            await resigns(path, older.age.born_ns + 1, ready=True)
        alone.stays = ""
        await node.manager.admit("p1", {GPU: 1})
        await node.cross("dra")
        await until(lambda: len(node.place.published) == 1)
        [free] = node.place.published
        asked = node.place.claim("c", "uid-c", free)
        assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
        waits = node.place.claim("w", "uid-w", free)
        waiting = asyncio.ensure_future(node.claims.prepare(V1, waits))
        before = await node.cross("dra", dry_run=True)
        close, held = older.scribe.close, []

        async def closed() -> None:
            held.append(alone._lock >= 0)
            await close()

        monkeypatch.setattr(older.scribe, "close", closed)
        async with node.beside(node.place).gateway() as newer:
            assert older._exit.result() == RESIGNED
            assert held == [True]  # All is on disk before the newer one reads it.
            assert newer.age > older.age
            assert await node.cross("dra", dry_run=True) == before
            await node.allocatable(0)
            assert not waiting.done()
            kubelet = await node.place.kubelet()
            await kubelet.unprepare(V1, asked)
            assert isinstance((await waiting)["uid-w"], tuple)  # Passed on, and answered by the newer one.
            node.manager.remove("p1")
            await node.stand(a="dra", b="dra")
            await until(lambda: len(node.place.published) == 2)
            await kubelet.channel.close()


async def test_a_gateway_without_dra_makes_room_for_a_newer_one_with_both_apis(node: Node) -> None:
    async with node.place.gateway("off", registers=False, status=RESIGNED) as older:
        await node.allocatable(2)
        [path] = control.sockets(node.place.folder / "state")
        with pytest.raises(ControlError, match="expected the age of a gateway newer than"):
            await resigns(path, older.age.born_ns - 1, ready=True)
        await node.manager.admit("p1", {GPU: 1})
        async with node.gateway() as newer:
            assert older._exit.result() == RESIGNED
            await node.allocatable(2)
            assert len(newer.ledger.handed_out(GPU)) == 1
            await node.cross("dra")
            await until(lambda: len(node.place.published) == 1)
            [free] = node.place.published
            await prepare(node, "c", free)
            # The same program, begun anew, waits until the newer one has ended.
            again = node.place.made("off", before=(older.age.born_ns, 1))
            running = asyncio.ensure_future(again.run())
            await until(lambda: "the other gateway on this node to end" in again.waits_for)
            assert not instance.Instance(node.place.plugins, again.age).folder.exists()
            assert newer.begun
        await until(lambda: again.begun)
        await until(lambda: sorted(one.value for one in states(again).values()) == ["present", "withheld"])
        [path] = control.sockets(node.place.folder / "state")
        with pytest.raises(ControlError, match="it made room once for one that ended again"):
            await resigns(path, again.age.born_ns + 1, ready=True)
        again._end(0)
        assert await running == 0


async def test_one_without_dra_that_made_room_begins_anew_as_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        age, alone = Age(7, "0" * 8), None

        async def run(self) -> int:
            return RESIGNED

    begun: list[str] = []

    def begins(_program: str, _words: list[str], variables: dict[str, str]) -> None:
        begun.append(variables[serve._BORN])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", begins)
    with pytest.raises(SystemExit):
        await serve._run(Made())  # type: ignore[arg-type]
    assert begun == ["7 1"]


async def test_one_without_dra_that_made_room_waits_also_where_another_one_would_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [Age(1, "0000000a"), Age(3, "0000000c")]
    one = alone(tmp_path, 2, others)
    monkeypatch.setattr(one, "_ask", AsyncMock(return_value=""))
    monkeypatch.setattr(being_alone, "AGAIN", 0.01)
    waiting = asyncio.ensure_future(one.begin(asks=False))
    await until(lambda: one.waits_for)
    assert not waiting.done()
    others.clear()
    one._others = dict
    assert await waiting is False
    one.close()


@pytest.mark.parametrize("why", ["it is still starting", "the host service makes no room"])
async def test_a_gateway_without_dra_makes_no_room_before_it_serves_nor_as_the_host_service(
    node: Node, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.place.gateway("off", registers=False) as one:
        [path] = control.sockets(node.place.folder / "state")
        if why == "it is still starting":
            monkeypatch.setattr(one.others, "begun", False)
        else:
            monkeypatch.setattr(one, "settings", replace(one.settings, host_service=True))
        with pytest.raises(ControlError, match=why):
            await resigns(path, one.age.born_ns + 1, ready=True)


async def test_nobody_comes_by_name_while_no_gateway_is_registered(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node.gateway(status=RESIGNED) as older:
        await node.allocatable(2)
        assert older.alone is not None
        left, make_room = [], older.alone._make_room

        def makes_room() -> None:
            left.append(node.told)
            make_room()

        monkeypatch.setattr(older.alone, "_make_room", makes_room)
        kubelet = Deaf(monkeypatch, A, B)  # It hasn't heard yet that nobody serves.
        kubelet.hears = True
        await node.manager.stop()
        async with node.newer() as (newer, running):
            kubelet.hears = False
            await node.place._register(newer)
            await until(lambda: newer.begun)
            assert left == [{GPU: "0"}]
            await kubelet.looked()
            assert node.told == {GPU: "0"}
            await node.manager.start()
            await until(lambda: node.told == {GPU: "2"})
        assert running.result() == 0


async def test_a_node_is_not_lowered_while_pods_have_gpus_of_dra_by_name(node: Node) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.cross("dra")
        await node.stand(a="dra", b="dra")
        asked = node.by_name("c", "uid-c", "gpu-0")
        await node.claims.prepare(V1, asked)
        await node.cross("plugin")
        await until(lambda: node.told == {GPU: "2"})
        await drivers(one).leave()
        assert node.told == {GPU: "2"}
        await node.claims.unprepare(V1, asked)
        await drivers(one).leave()
        assert node.told == {GPU: "0"}


async def test_room_is_made_when_nobody_is_on_the_way_while_pods_have_gpus_of_dra_by_name(node: Node) -> None:
    async with node.gateway() as one:
        await node.lent()
        path, limits = "/api/v1/namespaces/ns/pods/p", {"resources": {"limits": {GPU: "1"}}}
        spec = {"nodeName": "n1", "containers": [limits]}
        node.place.server.put(path, metadata={"uid": "uid-p"}, spec=spec, status={"phase": "Pending"})
        await until(lambda: node.told == {GPU: "2"})
        leaving = asyncio.ensure_future(drivers(one).leave())
        await until(lambda: [one.path for one in node.place.server.asked("GET")].count("/api/v1/pods") > 2)
        assert not leaving.done()
        node.place.server.change(path, lambda one: one["status"].update(startTime="2026-01-01T00:00:00Z"))
        async with asyncio.timeout(30):
            await leaving
        assert node.told == {GPU: "2"}


async def test_one_makes_room_though_the_api_server_does_not_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocatable, "LEAVES", 0.2)
    async with node.gateway() as older:
        await node.allocatable(2)
        crossing_ = drivers(older).crossing
        assert crossing_ is not None
        await crossing_.allocatable.turn.acquire()  # It doesn't answer an order that came before.
        [path] = control.sockets(node.place.folder / "state")
        await resigns(path, older.age.born_ns + 1, ready=True)
        await until(older._exit.done)
        assert older._exit.result() == RESIGNED


async def test_a_newer_gateway_that_no_kubelet_takes_changes_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "RECORDED_AFTER", 0.0)
    async with node.gateway() as older:
        await node.allocatable(2)
        await node.cross("dra", A)
        await node.stand(a="dra", b="plugin")
        registry = node.place.folder / "plugins_registry"
        async with node.newer() as (newer, running):
            assert len(list(registry.iterdir())) == 2
            assert set(states(newer).values()) == {State.LEAVING}
            assert not probes.look(newer).ready
            assert not older._exit.done()
            [its] = [path for path in registry.iterdir() if newer.age.token in path.name]
            kubelet = Kubelet(its)
            asked = node.place.claim("c", "uid-c", "gpu-0")
            waiting = asyncio.ensure_future(kubelet.prepare(V1, asked))
            await node.manager.admit("p1", {GPU: 1})
            await newer.beliefs.look()
            assert newer.beliefs.holders(GPU) == {
                B: "p1/main"
            }  # By the checkpoint: the older one may answer an Allocate.
            assert newer.beliefs.findings(GPU) == ()  # The kubelet has the older one's list.
            assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
            assert await waiting == await node.claims.prepare(V1, asked)  # Answered by the one that decides.
            assert (await kubelet.unprepare(V1, node.place.claim("d", "uid-d", "gpu-1")))["uid-d"] is None
            assert newer.ledger.claims == {}
            its_own = drivers(newer)._drivers["gpu.nvidia.com"]
            monkeypatch.setattr(its_own, "_patience", 0.05)
            assert isinstance(await its_own.prepare(asked), Refused)
            assert isinstance(await its_own.unprepare(asked), Refused)
            node.place.server.remove(SLICE)
            await until(lambda: node.place.published == {"gpu-0": []})  # Who decides publishes.
        assert running.result() == 0
        await kubelet.channel.close()


async def test_a_newer_gateway_goes_by_what_the_older_one_did_last(node: Node) -> None:
    async with node.gateway(status=RESIGNED):
        await node.allocatable(2)
        async with node.newer() as (newer, running):
            await node.cross("dra", A)
            await node.stand(a="dra", b="plugin")
            asked = node.place.claim("c", "uid-c", "gpu-0")
            assert isinstance((await node.claims.prepare(V1, asked))["uid-c"], tuple)
            await node.place._register(newer)
            await until(lambda: newer.begun)
            assert states(newer) == {A: State.ELSEWHERE, B: State.PRESENT}
            assert [row.name for row in newer.ledger.claims.values()] == ["c"]
            await until(lambda: probes.look(newer).ready)
        assert running.result() == 0


async def test_what_is_not_for_the_kubelet_comes_after_its_list(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody serves by name meanwhile, and to connect to an API server takes as long as to register."""
    async with node.gateway(status=RESIGNED):
        await node.allocatable(2)
        async with node.newer() as (newer, running):
            made, plugin, asked = drivers(newer), newer.resources[0].plugin, list[int]()
            decide, heed = made.decide, plugin.heed

            def decided() -> None:
                asked.append(len(node.place.server.requests))
                decide()

            def heeded(number: int) -> None:
                asked.append(len(node.place.server.requests))
                heed(number)

            monkeypatch.setattr(made, "decide", decided)
            monkeypatch.setattr(plugin, "heed", heeded)
            await node.place._register(newer)
            await until(lambda: newer.begun and len(node.place.server.requests) > asked[-1] > 0)
            assert len(set(asked)) == 1 < len(asked)
        assert running.result() == 0


async def test_an_allocate_that_comes_late_is_refused_on_the_way_to_dra_and_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway():
        await node.allocatable(2)
        kubelet = Deaf(monkeypatch, A, B)  # It had chosen before it heard.
        await node.cross("dra")
        await kubelet.looked()
        with pytest.raises(CallError, match="it goes to DRA as soon as nobody holds it"):
            await node.manager._endpoints[GPU].allocate((A,))
        assert await node.cross("dra", dry_run=True) == {A: "to-dra", B: "to-dra"}
        kubelet.hears = True
        await node.stand(a="dra", b="dra")
        with pytest.raises(CallError, match="offered by DRA"):
            await node.manager._endpoints[GPU].allocate((A,))


async def test_an_order_that_is_written_while_a_gpu_is_looked_at_counts(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, written = asyncio.Event(), asyncio.Event()
    async with node.gateway() as one:
        await node.allocatable(2)
        kubelet, durable = Deaf(monkeypatch, A, B), one.scribe.durable
        await node.cross("dra", A)

        async def slow() -> bool:
            writes.set()
            await written.wait()
            return await durable()

        await kubelet.looked()
        owners(one).allocatable.came = None  # The kubelet has told of its devices by itself.
        monkeypatch.setattr(one.scribe, "durable", slow)
        ordering = asyncio.ensure_future(node.cross("plugin", A))
        await writes.wait()
        kubelet.hears = True
        await until(lambda: owners(one)._turn._waiters)  # It was seen to be free for DRA.
        written.set()
        assert await ordering == {A: "plugin"}
        await until(lambda: not owners(one)._turn.locked())
        await node.stand(a="plugin", b="plugin")


async def test_what_was_told_of_a_gpu_before_its_last_order_does_not_count(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.half_way()
        before = owners(one)._told[A]
        monkeypatch.setattr(owners(one), "_update", AsyncMock())  # The lists are made later.
        await owners(one).order(Side.PLUGIN, [A])
        await owners(one).order(Side.DRA, [A])
        assert owners(one)._told.get(A) != before


async def test_on_the_way_to_dra_the_other_containers_of_a_pod_get_what_its_init_container_has(node: Node) -> None:
    async with node.gateway():
        await node.half_way()
        node.manager._records._active["p1"]["main"] = Container({GPU: 1}, init=True)
        [_] = await node.manager._endpoints[GPU].allocate((A,))
        with pytest.raises(CallError, match="offered by DRA"):
            await node.manager._endpoints[GPU].allocate((A, B))


async def test_what_is_given_while_its_way_to_a_claim_is_written_down_is_the_pods(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet's checkpoint names an ended pod, so Allocate takes it for held, and nobody else does."""
    asked, answers, writes, written = (asyncio.Event() for _ in range(4))
    # The claim's look goes on, though the Allocate is open.
    monkeypatch.setattr(view.OpenAllocates, "over", lambda _: asyncio.sleep(0))
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.manager.admit("p0", {GPU: 1})
        [held] = (await node.manager.admit("p1", {GPU: 1})).devices[GPU]
        node.manager.remove("p1")
        await one.beliefs.look()
        await until(lambda: drivers(one)._records._ended == {"p1"})
        answer, durable = one.source.answer, one.scribe.durable

        async def answered(*about: Any) -> ContainerAnswer:
            asked.set()
            await answers.wait()
            return await answer(*about)

        async def slow() -> bool:
            if one.ledger.sides.get(held) is Side.TO_PLUGIN:
                writes.set()
                await written.wait()
            return await durable()

        monkeypatch.setattr(one.source, "answer", answered)
        monkeypatch.setattr(one.scribe, "durable", slow)
        with monkeypatch.context() as late:
            # The kubelet's checkpoint is written late: it names the ended pod until the Allocate is over.
            late.setattr(node.manager, "_write_checkpoint", lambda: None)
            admitting = asyncio.ensure_future(node.manager.admit("p2", {GPU: 1}))
            await asked.wait()
            claim = node.place.claim("c", "uid-c", {A: "gpu-0", B: "gpu-1"}[held])
            preparing = asyncio.ensure_future(node.claims.prepare(V1, claim))
            await writes.wait()
            answers.set()
            assert (await admitting).devices[GPU] == (held,)
        written.set()
        await until(lambda: owners(one).side(held) is Side.TO_PLUGIN)
        await one.beliefs.look()
        assert one.ledger.claims == {}
        assert not preparing.done()
        node.manager.remove("p2")
        assert isinstance((await preparing)["uid-c"], tuple)


async def test_a_late_claim_is_refused_with_a_reason_where_a_pod_holds_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.gateway() as one:
        await node.allocatable(2)
        await node.manager.admit("p1", {GPU: 2})
        drivers(one)._drivers["gpu.nvidia.com"]._patience = 0.5
        refused = (await node.claims.prepare(V1, node.place.claim("c", "uid-c", "gpu-0")))["uid-c"]
        assert isinstance(refused, Refused)
        assert "offered by the device plugin API; `gateway cross --to dra` moves it" in refused.reason
        assert await node.cross("dra", dry_run=True) == {A: "plugin", B: "plugin"}


async def test_the_claims_of_the_whole_cluster_are_listed_ever_more_seldom_while_a_gpu_waits_for_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole fleet may ask the API server at once."""
    lists = f"{API}/resourceclaims"

    def listed() -> int:
        return len([one for one in node.place.server.asked("GET") if one.path == lists])

    async with node.gateway() as one:
        await node.allocatable(2)
        await node.cross("dra")
        await node.stand(a="dra", b="dra")
        node.by_name("c", "uid-c", "gpu-0")
        await node.cross("plugin")
        await node.stand(a="to-plugin", b="plugin")
        monkeypatch.setattr(watch, "SELDOM", 3600.0)
        owners(one)._backoff = Backoff()
        monkeypatch.setattr(watch, "OFTEN", 3600.0)
        looks = AsyncMock(side_effect=one.beliefs.look)
        monkeypatch.setattr(one.beliefs, "look", looks)
        await until(lambda: looks.await_count > 2)
        before, seen = listed(), looks.await_count
        await until(lambda: looks.await_count > seen + 4)
        assert listed() == before
        assert "claim ns/c" in one.resources[0].entries[A].reason
        node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        owners(one)._backoff = Backoff()  # Its time has come.
        await node.stand(a="plugin", b="plugin")


async def test_what_is_shown_of_the_node_is_lowered_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    api, node_ = AsyncMock(), AsyncMock()
    node_.status.allocatable = {GPU: "2"}
    told = allocatable.Allocatable(api, NODE, AsyncMock(), AsyncMock())
    told.heard(node_)
    monkeypatch.setattr(watch, "OFTEN", 3600.0)
    for _ in range(3):
        await told.hold_back({GPU: {B}})
    assert api.patch.await_count == 1
    await told.hold_back({GPU: ()})
    assert api.patch.await_count == 2, "something else is told at once"
