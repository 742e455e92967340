"""A gateway with --dra on makes room for a newer one, waits for an older one, and is alone on its node."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from adapters.dra.plugin import V1
from devices.claims import Refused
from devices.life.states import State
from gateway.age import Age
from gateway.cli import serve
from gateway.daemon import RESIGNED, Gateway
from gateway.dra import cdi, crossing
from gateway.dra.crossing import Crossing
from gateway.dra.drivers import Drivers
from gateway.handover import alone as being_alone
from gateway.handover import instance
from gateway.handover.alone import Alone, held_back
from gateway.kubelet import drift, view
from gateway.kubelet.view import View
from gateway.kubernetes import access, allocatable
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.telling import probes
from gateway.wires import control
from gateway.wires.control import ControlError
from tests.fakes.apiserver import ApiServer
from tests.unit.draplace import GPU, SLICE, Kubelet, Node, Place, states
from tests.unit.kubernetes import authority, server, until

__all__ = ["authority", "server"]
A, B = "GPU-a", "GPU-b"


def drivers(gateway: Gateway) -> Drivers:
    assert gateway.drivers is not None
    return gateway.drivers


def owners(gateway: Gateway) -> Crossing:
    """Give the table of owners in force."""
    found = drivers(gateway).crossing
    assert found is not None
    return found


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


def words(gateway: Gateway) -> str:
    [row] = [row for row in drivers(gateway).stands() if row.board == A]
    return row.words


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


async def prepare(node: Node, name: str, device: str) -> None:
    asked = node.place.claim(name, f"uid-{name}", device)
    assert isinstance((await node.claims.prepare(V1, asked))[asked.uid], tuple)


def held(one: Gateway) -> bool:
    return bool(one.beliefs.holders(GPU))


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
