"""Rivals: what else runs, or only seems to run, on a node costs the kubelet's records at most three seconds, once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc.aio
import pytest
from msgspec.structs import replace

from adapters.registry import by_name
from devices.generic import GenericSource
from devices.model import Device
from devices.policy import Policy
from gateway.age import Age
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.handover import instance, standby
from gateway.handover.ability import Ability
from gateway.handover.events import Standing
from gateway.handover.peers import Peers
from gateway.kubelet.identity import KubeletId
from gateway.kubelet.view import Untold
from gateway.kubelet.watch import CHECKPOINT, KUBELET_SOCKET, kubelet_id
from gateway.lab.gatewayproc import GatewayProcess, gateway_command
from gateway.lab.kubelets.kubelet import Faults, Seen, Totals
from gateway.lab.trials import rivals
from gateway.lab.trials.scenarios import RESOURCE, Node, node
from gateway.lab.waiting import until
from gateway.registration.api import Probed
from gateway.registration.events import Phase, Renew
from gateway.registration.machine import FIRST_LOOKS
from gateway.registration.registrar import Resource
from gateway.registration.serve import MOST_STREAMS
from gateway.tally import Confirmation
from gateway.wires.rpc import target
from gateway.wires.unix import listening
from tests.unit.test_probes import get


def others_of(gateway: Gateway) -> Peers:
    """Return what a gateway knows of the others."""
    assert isinstance(gateway.others, Peers)
    return gateway.others


@pytest.mark.parametrize(
    ("name", "version", "lacks"),
    [
        pytest.param("refused", "1.34", False, id="one that the kubelet refuses doesn't ask"),
        pytest.param("refused, its own state", "1.10", False, id="nor where it can't talk"),
        pytest.param("planted, deaf", "1.28", True, id="a folder that nobody serves"),
        pytest.param("stopped, its own state", "1.20", True, id="one that stands still, by the checkpoint"),
    ],
)
async def test_a_rival_that_does_not_serve(name: str, version: str, lacks: bool) -> None:
    async with node(gpus={RESOURCE: 8}) as made:
        await made.start_kubelet(version)
        older = await made.start_gateway()
        await made.served()
        found = await rivals.measure(name, made, seconds=4)
        assert len(older.lines(rivals.TAKEN_BACK)) == int(lacks), found
        await made.served()


async def test_what_the_end_of_a_rival_costs_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubelets from 1.12 to 1.24 may have nothing to give then, and it was looked away in the very moment."""
    ended, looks = asyncio.Event(), itertools.count()

    @contextlib.asynccontextmanager
    async def rival(_: Node) -> AsyncIterator[None]:
        yield
        ended.set()

    async def totals() -> Totals:
        short = ended.is_set() and 0 < next(looks) < 10
        return Totals({RESOURCE: 8}, {RESOURCE: 0 if short else 8})

    monkeypatch.setattr(rivals, "RIVALS", {"ends": rival})
    monkeypatch.setattr(rivals, "AFTER", 1.0)
    made = SimpleNamespace(the_kubelet=SimpleNamespace(totals=totals), healthy=lambda: 8)
    [lacked] = await rivals.measure("ends", cast("Node", made), seconds=0.1)
    assert lacked > 0


async def test_a_node_is_served_as_it_was_seen_once() -> None:
    """A gateway registers anew right after: what the kubelet's records lack for some milliseconds isn't asked for."""

    async def wait(resource: str, count: int, _: float) -> Seen:
        return Seen(Totals({resource: count}, {resource: count}), 0)

    async def totals() -> Totals:
        return Totals({RESOURCE: 8}, {})

    async with node(gpus={RESOURCE: 8}) as made:
        kubelet = SimpleNamespace(version="1.12", wait=wait, totals=totals)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(made, "kubelet", kubelet)
            await made.served()


async def test_what_is_not_served_is_not_remembered() -> None:
    """The gateways share a ledger; the newer one has other GPUs, and the kubelet refuses it."""
    async with node(gpus={RESOURCE: 2}) as made:
        await made.start_kubelet("1.28")
        await made.start_gateway()
        await made.served()
        profile = made.root / "more.yaml"
        profile.write_text(f"resources: {{{RESOURCE}: {{gpus: 6}}}}\n")
        command = gateway_command(made.socket_dir, made.root / "state", profile, "v1alpha2")
        async with await GatewayProcess.launch(command) as newer:
            await newer.wait_for("waiting: another gateway serves, and this one could not")
            await asyncio.sleep(0.3)  # Longer than a write takes: it is the absence of one that is checked.
            ledger = json.loads((made.root / "state" / "ledger.json").read_bytes())
        assert len(ledger["resources"][RESOURCE]["announced"]) == 2


async def test_what_was_held_back_is_remembered_before_it_is_sent() -> None:
    """The older gateway ends while the newer one waits for a kubelet that doesn't answer: what that one remembers is news."""
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.28")
        await made.start_gateway()
        await made.served()
        profile = made.root / "more.yaml"
        profile.write_text(f"resources: {{{RESOURCE}: {{gpus: 6}}}}\n")
        await kubelet.fault(Faults(register_hangs=True))
        async with await GatewayProcess.launch(gateway_command(made.socket_dir, made.root / "state", profile)) as newer:
            await newer.wait_for("waiting: another gateway serves, and this one could not")
            await made.gateway.terminate()
            await kubelet.fault(Faults())
            await newer.wait_for("registered", seconds=20)
            ledger = json.loads((made.root / "state" / "ledger.json").read_bytes())
        assert len(ledger["resources"][RESOURCE]["announced"]) == 6


async def test_one_that_talks_and_one_that_does_not_want_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our Register was in flight for both: when it is over, we stand by, once."""
    gateway = Gateway(Settings(socket_dir=tmp_path, state_dir=tmp_path), GenericSource(Policy()))
    others_of(gateway).begun, gateway._exit = True, asyncio.get_running_loop().create_future()
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    monkeypatch.setattr(others_of(gateway).handover, "defers_to", lambda _: Age(1, "talks"))
    others_of(gateway)._yielding.add(RESOURCE)  # For one that doesn't talk.
    gateway.around.stood(plugin)
    assert plugin.state.phase is Phase.STANDBY


async def test_strangers_that_listen_over_a_restart_cost_the_kubelet_nothing() -> None:
    """All the streams that others may have are taken, by callers that look like a kubelet."""
    async with node(gpus={RESOURCE: 2}) as made, contextlib.AsyncExitStack() as opened:
        await made.start_kubelet("1.28")
        gateway = await made.start_gateway()
        await made.served()
        [plugin] = (made.socket_dir / instance.FOLDER).glob("*/*.sock")
        for number in range(MOST_STREAMS - 1):  # The kubelet has one.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.primary_user_agent", f"grpc-go/1.{number}")]
            channel = await opened.enter_async_context(grpc.aio.insecure_channel(target(plugin), options=options))
            listen: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch"
            )
            await listen(b"").read()
        await made.served()
        kubelet = await made.start_kubelet("1.28")
        await made.served()
        assert await kubelet.registers() == {RESOURCE: 1}
        assert not gateway.lines("stream cut")


async def test_what_nobody_serves_calls_for_a_person_until_somebody_does() -> None:
    """What two alerts read: served, absent while the other is to serve, 0 while nobody does, served again; and taken back once."""
    seen: list[str] = []

    async def taken_back(port: int) -> list[str]:
        count = 'device_plugin_gateway_handovers_total{outcome="back",side="older"}'
        return [line.split()[1] for line in (await get(port, "/metrics"))[1] if line.startswith(count)]

    async def told(port: int, sample: str) -> None:
        async with asyncio.timeout(30):
            while not seen or seen[-1] != sample:
                lines = (await get(port, "/metrics"))[1]
                said = [line.split()[1] for line in lines if line.startswith("device_plugin_gateway_serving{")]
                seen.extend(one for one in said if seen[-1:] != [one])
                await asyncio.sleep(0.05)

    async with node(gpus={RESOURCE: 2}, options=("--metrics-address", "127.0.0.1:0")) as made:
        kubelet = await made.start_kubelet("1.28")
        older = await made.start_gateway()
        await made.served()
        port = int((await older.wait_for("listening", what="metrics"))["port"])
        await told(port, "1.0")
        seen[:] = ["1.0"]
        assert await taken_back(port) == ["0.0"]
        await kubelet.fault(Faults(register_hangs=True))
        async with rivals.RIVALS["planted, deaf"](made):
            await older.wait_for(
                "taking a resource back: another gateway is to serve it, and the kubelet's records show no device of it"
            )
            await told(port, "0.0")
            await kubelet.fault(Faults())
            await told(port, "1.0")
            assert await taken_back(port) == ["1.0"]
    assert seen == ["1.0", "0.0", "1.0"]


@pytest.mark.parametrize(
    ("api", "checked", "talks", "anew"),
    [
        pytest.param("v1beta1", Confirmation.UNKNOWN, (False,), True, id="the kubelet doesn't tell whom it holds"),
        pytest.param("v1beta1", Confirmation.HELD, (False,), False, id="it does"),
        pytest.param("v1beta1", None, (False,), True, id="it hasn't been asked yet"),
        pytest.param("v1beta1", Confirmation.UNKNOWN, (True,), False, id="what it served was handed over"),
        pytest.param(
            "v1beta1",
            Confirmation.UNKNOWN,
            (False, True, False),
            False,
            id="it talked, and said goodbye before it went",
        ),
        pytest.param("v1alpha2", Confirmation.UNKNOWN, (False,), False, id="kubelet 1.9 would have ended our stream"),
        pytest.param("0.1", Confirmation.UNKNOWN, (False,), False, id="so would 1.8, which two Registers may confuse"),
    ],
)
async def test_one_that_could_not_talk_has_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    api: str,
    checked: Confirmation | None,
    talks: Sequence[bool],
    anew: bool,
) -> None:
    gateway = Gateway(Settings(socket_dir=tmp_path, state_dir=tmp_path), GenericSource(Policy()))
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    plugin.plugin.offer(by_name(api))
    plugin.checked = checked
    plugin.state = replace(plugin.state, phase=Phase.SERVING, stream=1)
    peers = {Age(1, "other"): tmp_path}  # Older: we serve.
    monkeypatch.setattr(gateway.others, "living", lambda: peers)
    for talking in talks:
        monkeypatch.setattr(others_of(gateway).handover, "talks_to", lambda _, talking=talking: talking)
        others_of(gateway).look_at_peers()
        assert plugin.state.stream == 1
    peers.clear()
    others_of(gateway).look_at_peers()
    assert (plugin.state.phase.value == Phase.WAITING.value) is anew
    await plugin.close()


async def _gone_later(folder: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool) -> bool:
    """Tell whether we register anew when a newer gateway is gone that we stood by for, and that never talked to us."""
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    gateway._exit = asyncio.get_running_loop().create_future()
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    plugin.checked = Confirmation.UNKNOWN
    newer = Age(1 << 61, "0badcafe")
    peers, path = {newer: folder}, folder / instance.socket_name(RESOURCE)
    monkeypatch.setattr(gateway.others, "living", lambda: peers)
    with listening(path):
        others_of(gateway).look_at_peers()
        assert plugin.state.phase is Phase.STANDBY
        if not ends:
            others_of(gateway).unserved(plugin)
            others_of(gateway).look_at_peers()
            await until(lambda: plugin.standing_by_for is None, 20)
    others_of(gateway).look_at_peers()
    await until(lambda: plugin.state.phase.value != Phase.STANDBY.value, 20)
    plugin.state = replace(plugin.state, phase=Phase.SERVING, stream=1)
    peers.clear()
    others_of(gateway).look_at_peers()
    anew = plugin.state.stream is None
    await plugin.close()
    await gateway._tasks.close()
    return anew


@pytest.mark.parametrize(
    ("born_ns", "both"), [(1 << 61, True), (1 << 59, False)], ids=["the newest", "in between: it takes it back itself"]
)
async def test_who_stands_by_for_one_that_talks_and_one_that_does_not_takes_it_back_from_both_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, born_ns: int, both: bool
) -> None:
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    silent, asked = Age(born_ns, "0badcafe"), list[str]()
    monkeypatch.setattr(gateway.others, "living", lambda: {silent: folder})
    monkeypatch.setattr(others_of(gateway).handover, "defers_to", lambda _: Age(1 << 60, "cafecafe"))
    monkeypatch.setattr(others_of(gateway).handover, "unserved", asked.append)
    with listening(folder / instance.socket_name(RESOURCE)):
        others_of(gateway).unserved(plugin)
    assert (asked, [*others_of(gateway).doubts.get(RESOURCE, ())]) == ([RESOURCE], [silent] if both else [])
    await plugin.close()
    await gateway._tasks.close()


@pytest.mark.parametrize("registers", [False, True], ids=["deaf all the time", "registers while it is asked"])
async def test_of_several_others_those_that_answer_no_call_are_taken_back_from_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, registers: bool
) -> None:
    """Each alone would cost the kubelet's records two seconds. One that answers stands by, as we do, and may serve next."""
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    others_of(gateway).begun, gateway._exit = True, asyncio.get_running_loop().create_future()
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    answering, another, deaf, newest = (Age((1 << 60) + place, f"{place}badcafe") for place in range(4))
    peers = {age: folder / age.token for age in (answering, another, deaf, newest)}
    monkeypatch.setattr(gateway.others, "living", lambda: peers)
    monkeypatch.setattr(others_of(gateway)._presence, "listens", lambda: True)
    looks, look = list[Age | None](), others_of(gateway).look

    def looked() -> None:
        look()
        looks.append(plugin.standing_by_for)

    monkeypatch.setattr(gateway.others, "look", looked)
    sockets = [each / instance.socket_name(RESOURCE) for each in peers.values()]
    for each in peers.values():
        each.mkdir()
    server = grpc.aio.server()
    server.add_insecure_port(target(sockets[0]))
    await server.start()
    with listening(sockets[1]), listening(sockets[2]), listening(sockets[3]):
        others_of(gateway).look_at_peers()
        assert plugin.standing_by_for == newest
        others_of(gateway).unserved(plugin)
        if registers:
            (folder / f"{deaf.token}-1.sock").touch()
        await until(lambda: len(looks) == 2, 20)
        assert looks == [deaf, deaf if registers else answering]
    await server.stop(None)
    await plugin.close()
    await gateway._tasks.close()


async def test_who_was_stood_by_for_by_age_and_talks_by_now_is_looked_at_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It met us, and asks for nothing because this kubelet refuses it."""
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    looks = list[str]()
    monkeypatch.setattr(gateway.others, "look", lambda: looks.append("look"))
    others_of(gateway).unserved(plugin)
    assert looks == ["look"]
    await plugin.close()
    await gateway._tasks.close()


async def test_one_that_ended_its_stream_before_our_register_and_goes_later_costs_no_other_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not await _gone_later(folder, monkeypatch, ends=True)


async def test_one_that_we_stood_by_for_in_vain_and_that_goes_costs_a_register(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await _gone_later(folder, monkeypatch, ends=False)


async def test_one_that_comes_and_goes_while_we_resume_leaves_nothing_unserved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    gateway._exit, others_of(gateway).begun = asyncio.get_running_loop().create_future(), True
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    peers, reading, read = dict[Age, Path](), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(gateway.others, "living", lambda: peers)

    async def load() -> None:
        reading.set()
        await read.wait()

    monkeypatch.setattr(gateway.scribe, "load", load)
    for one in (Age(1 << 60, "0badcafe"), Age(1 << 61, "cafecafe")):
        peers[one] = folder
        with listening(folder / instance.socket_name(RESOURCE)):
            others_of(gateway).look_at_peers()
        assert plugin.standing_by_for == one
        peers.clear()
        others_of(gateway).look_at_peers()
        await reading.wait()
    read.set()
    await until(lambda: plugin.state.phase is not Phase.STANDBY, 20)
    await plugin.close()
    await gateway._tasks.close()


async def test_what_only_another_gateway_served_is_taken_up_by_what_is_held_now(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, done = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy())), list[str]()
    for part, step in ((gateway.scribe, "load"), (gateway.beliefs, "look"), (gateway.lists, "update")):
        monkeypatch.setattr(part, step, AsyncMock(side_effect=lambda step=step: done.append(step)))
    await others_of(gateway)._take_up()
    assert done == ["load", "look", "update"]
    await gateway._tasks.close()


@pytest.mark.parametrize("ends", [True, False])
async def test_who_ends_takes_nothing_over(folder: Path, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    gateway, looks = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy())), list[str]()
    monkeypatch.setattr(gateway.others, "_ending", lambda: ends)
    monkeypatch.setattr(gateway.others, "look_at_peers", lambda: looks.append("look"))
    others_of(gateway)._left()
    assert looks == ([] if ends else ["look"])
    await gateway._tasks.close()


async def test_who_is_about_to_serve_again_registers(folder: Path) -> None:
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    registers = [others_of(gateway).registering]
    others_of(gateway)._resuming.add(RESOURCE)
    assert [*registers, others_of(gateway).registering] == [False, True]
    await gateway._tasks.close()


async def test_a_gateway_that_dies_counts_as_gone_for_the_kubelet_that_it_named(folder: Path) -> None:
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    with listening(folder / KUBELET_SOCKET):
        others_of(gateway).over("0badcafe", "another kubelet")
        assert others_of(gateway)._instance.over == set()
        others_of(gateway).over("0badcafe", str(kubelet_id(folder / KUBELET_SOCKET)))
        assert others_of(gateway)._instance.over == {"0badcafe"}
    await gateway._tasks.close()


@pytest.mark.parametrize(
    ("unfit", "waits"),
    [
        pytest.param({"a": "it has no devices", "b": None}, "", id="one could be served"),
        pytest.param({"a": "", "b": "too many"}, "too many", id="none"),
        pytest.param({}, "", id="there is none"),
    ],
)
async def test_a_gateway_waits_where_none_of_its_resources_could_be_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unfit: dict[str, str | None], waits: str
) -> None:
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    ability = others_of(gateway).ability
    monkeypatch.setattr(ability, "_resources", {name: name for name in unfit})
    monkeypatch.setattr(ability, "unfit", unfit.get)
    monkeypatch.setattr(ability, "probe", AsyncMock(return_value=""))
    with listening(folder / KUBELET_SOCKET):
        assert await ability.unable() == waits
    await gateway._tasks.close()


async def test_one_that_could_not_talk_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name comes or goes then: that its connections end is all that tells it."""
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    gateway._exit, connected = asyncio.get_running_loop().create_future(), asyncio.Queue[asyncio.StreamWriter]()
    renewed = asyncio.Event()
    monkeypatch.setattr(Resource, "feed", lambda _, event: renewed.set() if isinstance(event, Renew) else None)
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    plugin.checked = Confirmation.UNKNOWN
    plugin.state = replace(plugin.state, phase=Phase.SERVING, stream=1)
    peers = {Age(1, "0badcafe"): folder}  # Older: we serve.
    monkeypatch.setattr(gateway.others, "living", lambda: peers)
    socket = folder / instance.socket_name(RESOURCE)

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await reader.read()  # Who only looks whether it listens goes at once.
                writer.close()
                return
        connected.put_nowait(writer)

    server = await asyncio.start_unix_server(served, socket)
    async with asyncio.timeout(20):
        others_of(gateway).look_at_peers()
        lease = await connected.get()
        assert not renewed.is_set()
        peers.clear()
        server.close()
        socket.unlink()
        lease.close()
        await renewed.wait()
    await plugin.close()
    await gateway._tasks.close()


@pytest.mark.parametrize(
    ("came", "checked", "does"),
    [
        pytest.param("0badcafe", Confirmation.UNKNOWN, "registers", id="the kubelet doesn't tell whom it holds"),
        pytest.param("0badcafe", Confirmation.HELD, "looks", id="it does"),
        pytest.param(".0badcafe", Confirmation.UNKNOWN, "nothing", id="it never was a gateway"),
        pytest.param("own", Confirmation.UNKNOWN, "nothing", id="it is our own"),
    ],
)
async def test_one_that_came_and_went_while_we_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came: str, checked: Confirmation, does: str
) -> None:
    gateway = Gateway(Settings(socket_dir=tmp_path, state_dir=tmp_path), GenericSource(Policy()))
    others_of(gateway).begun, gateway._exit = True, asyncio.get_running_loop().create_future()
    plugin = gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    plugin.checked = checked
    plugin.state = replace(plugin.state, phase=Phase.SERVING, stream=1, verified=FIRST_LOOKS)
    monkeypatch.setattr(gateway.others, "living", dict)
    others_of(gateway).look([gateway.token if came == "own" else came])
    found = (
        "registers" if plugin.state.stream is None else "looks" if plugin.state.verified < FIRST_LOOKS else "nothing"
    )
    assert found == does
    await plugin.close()


@pytest.mark.parametrize(
    ("silent", "doubted", "leaves"),
    [
        pytest.param(True, False, True, id="it offers it, and can't talk"),
        pytest.param(True, True, False, id="it was stood by for in vain"),
        pytest.param(False, False, False, id="nobody else is there"),
    ],
)
async def test_what_would_be_left_to_one_that_can_not_talk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, silent: bool, doubted: bool, leaves: bool
) -> None:
    gateway, newer = (
        Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy())),
        Age(1 << 62, "0badcafe"),
    )
    gateway._resources[RESOURCE] = Resource(gateway.around, RESOURCE, "")
    monkeypatch.setattr(gateway.others, "living", lambda: {newer: folder} if silent else {})
    if doubted:
        others_of(gateway).doubts[RESOURCE] = {newer: frozenset()}
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), folder / instance.socket_name(RESOURCE))
    assert others_of(gateway).leaves(RESOURCE) is leaves
    server.close()
    await server.wait_closed()


async def test_one_that_could_not_serve_says_so() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        await made.start_kubelet("1.28")
        await made.start_gateway()
        await made.served()
        options = ("--probe-address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0")
        command = gateway_command(made.socket_dir, made.root / "elsewhere", made.profile_path, "v1alpha2", options)
        async with await GatewayProcess.launch(command) as newer:
            await newer.wait_for("waiting: another gateway serves, and this one could not")
            probes, metrics = [
                int((await newer.wait_for("listening", what=what))["port"]) for what in ("probes", "metrics")
            ]
            status, lines = await get(probes, "/readyz")
            assert (status, lines[:2]) == (503, ["not ready", "starting"])
            assert "use --api auto" in lines[2]
            assert f'device_plugin_gateway_serving{{resource="{RESOURCE}"}} 0.0' in (await get(metrics, "/metrics"))[1]
            await made.gateway.terminate()  # Nobody serves any more: it does what it can.
            await newer.wait_for("no common version")


async def test_a_list_is_put_together_before_it_is_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is too large for the kubelet takes seconds on a busy machine; until then this gateway has no resource."""
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    monkeypatch.setattr(gateway.others, "living", lambda: {Age(1, "other"): folder})
    async with gateway.lists.lock:
        gateway.lists.inventory = {}
        knows = asyncio.ensure_future(others_of(gateway).know_devices(asyncio.Event(), "test"))
        done, _ = await asyncio.wait([knows], timeout=0.01)
        assert not done
    await knows


def test_what_another_kubelet_spoke_says_nothing_of_this_one(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(folder / "kubelet.sock"))
    presence, here = SimpleNamespace(socket=folder / "kubelet.sock"), kubelet_id(folder / "kubelet.sock")
    one = Ability("v1alpha2", cast("Any", presence), {}, list, lambda _: None)
    resource = cast("Any", SimpleNamespace(entries={"a": 1}))
    for spoken, unfit in ((None, False), (KubeletId(1, 1, 1), False), (here, True)):
        one._speaks = None if spoken is None else (spoken, None)
        assert (one.unfit(resource) is not None) is unfit


@pytest.mark.parametrize(
    ("resources", "speaks", "unable"),
    [
        pytest.param([], "v1beta1", "", id="nothing to ask for yet"),
        pytest.param([(8, "")], "v1beta1", "", id="a list that fits"),
        pytest.param([(8, "")], None, "speaks none", id="a kubelet that refuses it"),
        pytest.param([(0, "")], "v1beta1", "it has no devices", id="nothing to serve"),
        pytest.param([(8, "too large")], "v1beta1", "too large for v1beta1", id="a list that is too large"),
        pytest.param([(8, "too large"), (8, "")], "v1beta1", "", id="one of two lists fits"),
        pytest.param([(0, ""), (8, "too large")], "v1beta1", "it has no devices", id="of two reasons the first"),
    ],
)
async def test_only_who_could_serve_asks(
    folder: Path, resources: Sequence[tuple[int, str]], speaks: str | None, unable: str
) -> None:
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(folder / KUBELET_SOCKET))
    here = kubelet_id(folder / KUBELET_SOCKET)
    presence = SimpleNamespace(socket=folder / KUBELET_SOCKET, listens=lambda: True)

    def served(devices: int, why: str) -> Any:
        large = SimpleNamespace(too_large=lambda dialect: (why and f"{why} for {dialect.name}") or None)
        return SimpleNamespace(entries=dict.fromkeys(range(devices)), plugin=SimpleNamespace(list=large))

    all_ = {str(number): served(*one) for number, one in enumerate(resources)}
    one = Ability("auto", cast("Any", presence), cast("Any", all_), list, lambda _: None)
    assert here is not None
    one._speaks = here, speaks
    found = await one.unable()
    assert unable in found
    assert bool(unable) is bool(found)


@pytest.mark.parametrize(
    ("phase", "unfit", "standing"),
    [
        pytest.param(Phase.ABSENT, None, Standing.IDLE, id="it could serve: it asks"),
        pytest.param(Phase.ABSENT, "it has no devices", Standing.OUT, id="one of its resources it could not: of that it asks nothing"),
        pytest.param(Phase.OFFERING, "it has no devices", Standing.BUSY, id="whose Register is in flight is waited for"),
    ],
)  # fmt: skip
def test_where_a_resource_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, unfit: str | None, standing: Standing
) -> None:
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    state, plugin = SimpleNamespace(phase=phase, refused=False), SimpleNamespace(streaming=False)
    gateway._resources[RESOURCE] = cast("Any", SimpleNamespace(state=state, plugin=plugin))
    monkeypatch.setattr(others_of(gateway).ability, "unfit", lambda _: unfit)
    assert others_of(gateway).standing(RESOURCE) is standing


async def test_who_waits_says_why_and_looks_again_never_too_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.handover.ability.PEERS_AGAIN", 0.001)
    monkeypatch.setattr("gateway.handover.ability.PROBE_AGAIN", 0.002)
    resource = SimpleNamespace(trouble="")
    one = Ability(
        "auto",
        cast("Any", SimpleNamespace(kubelet=None)),
        cast("Any", {RESOURCE: resource}),
        lambda: [1],
        lambda _: None,
    )
    reasons, told = [*["slow"] * 20, "too many", ""], list[str]()

    async def unable() -> str:
        told.append(resource.trouble.rpartition(": ")[2])
        return reasons.pop(0)

    monkeypatch.setattr(one, "unable", unable)
    async with asyncio.timeout(20):
        await one.wait()
    assert told == ["", *["slow"] * 20, "too many"]
    assert resource.trouble == ""


async def test_each_kubelet_is_asked_once_what_it_speaks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Path]()

    async def ask(path: Path, _seconds: float) -> Probed:
        asked.append(path)
        return Probed("v1beta1", "", "")

    monkeypatch.setattr("gateway.registration.api.ask", ask)
    presence = SimpleNamespace(socket=folder / "kubelet.sock")
    told, counts = list[str](), list[int]()
    one = Ability("auto", cast("Any", presence), cast("Any", {RESOURCE: None}), list, told.append)
    for comes in (False, True, False, True):
        if comes:
            presence.socket.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as kubelet:
                kubelet.bind(str(presence.socket))
        assert await one.probe() == ""
        counts.append(len(asked))
    assert counts == [0, 1, 1, 2]
    assert told == [RESOURCE] * 2, "what is known of it now counts in handovers"


@pytest.mark.parametrize("version", [pytest.param("1.8", id="a kubelet that tells nothing"), "1.37"])
async def test_one_that_hangs_is_seen_by_the_next(version: str) -> None:
    """The kubelet starts anew while the gateway that served is stopped: the other one serves it, and says so."""
    async with node(gpus={RESOURCE: 2}, options=("--probe-address", "127.0.0.1:0")) as made:
        await made.start_kubelet(version)
        older = await made.start_gateway()
        await made.served()
        newer = await made.start_gateway()
        await newer.wait_for("registered")
        await older.wait_for("standing by")
        os.kill(newer.pid, signal.SIGSTOP)
        await made.start_kubelet(version)
        await made.served()
        os.kill(newer.pid, signal.SIGCONT)
        await newer.wait_for("standing by")
        await made.served()


async def test_one_that_hangs_is_seen_where_the_kubelet_has_no_checkpoint() -> None:
    """Kubelets 1.16 to 1.20 write it with their first pod, which doesn't come where nothing is allocatable."""
    async with node(gpus={RESOURCE: 2}) as made:
        await made.start_kubelet("1.20")
        older = await made.start_gateway()
        await made.served()
        command = gateway_command(made.socket_dir, made.root / "elsewhere", made.profile_path)
        async with await GatewayProcess.launch(command) as newer:
            await newer.wait_for("registered")
            await older.wait_for("standing by")
            os.kill(newer.pid, signal.SIGSTOP)
            await made.the_kubelet.terminate()
            await made.the_kubelet.close()
            made.kubelet = None
            (made.socket_dir / CHECKPOINT).unlink()
            await made.start_kubelet("1.20")
            await made.served()


async def test_from_one_that_registers_after_all_it_is_taken_back_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to kubelet 1.11 the two end each other's streams, and the checkpoint doesn't tell their lists apart."""
    now, taken = [0.0], list[float]()

    async def shown(*_: object) -> frozenset[str]:
        return frozenset()

    monkeypatch.setattr("gateway.kubelet.view.shown", shown)
    monkeypatch.setattr(standby, "time", SimpleNamespace(monotonic=lambda: now[0], time_ns=lambda: int(now[0] * 1e9)))
    plugin = SimpleNamespace(
        name=RESOURCE,
        plugin=SimpleNamespace(devices=(Device("a"),)),
        standing_by_for=Age(1, "0badcafe"),
        entries=("a",),
        checked=Confirmation.UNKNOWN,
    )
    own = SimpleNamespace(resources=[plugin], talks=lambda _: False, doubts={})
    one = standby.Standby(cast("Any", own), Path("none"), Path("none"), Path("none"))

    async def round_of(times: int) -> list[float]:
        taken.clear()
        for _ in range(times):
            began = now[0]
            own.unserved = lambda *_, began=began: taken.append(now[0] - began)
            one.began(RESOURCE)
            before = len(taken)
            while len(taken) == before:
                now[0] += 0.1
                await one._look()
        return [round(seconds) for seconds in taken]

    assert await round_of(5) == [2, 2, 3, 6, 11]
    one.kubelet_up(0)
    assert await round_of(1) == [2]
    plugin.checked = Confirmation.LACKING  # This one tells whom it holds.
    assert await round_of(4) == [2, 2, 2, 2]


async def test_one_that_talks_and_has_no_name_is_asked_once_of_each_kubelet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kubelets 1.8, and up to 1.22 those without a checkpoint, tell nothing: what is missing is the name of a gateway that stands still, and answers nothing."""
    now, asked = [100.0], list[float]()

    async def shown(*_: object) -> Untold:
        return Untold.AT_ALL

    monkeypatch.setattr("gateway.kubelet.view.shown", shown)
    monkeypatch.setattr(standby, "time", SimpleNamespace(monotonic=lambda: now[0], time_ns=lambda: int(now[0] * 1e9)))
    plugin = SimpleNamespace(
        state=SimpleNamespace(phase=Phase.STANDBY),
        name=RESOURCE,
        plugin=SimpleNamespace(devices=(Device("a"),)),
        standing_by_for=Age(1, "0badcafe"),
        entries=("a",),
        checked=Confirmation.UNKNOWN,
    )
    own = SimpleNamespace(resources=[plugin], talks=lambda _: True, doubts={}, unserved=lambda *_: asked.append(now[0]))
    one = standby.Standby(cast("Any", own), tmp_path, Path("none"), Path("none"))

    async def looks() -> int:
        """Look as often as is wanted; return how often it was asked."""
        asked.clear()
        for _ in range(40):
            if (wait := one._wait(cast("Any", plugin))) is None:
                break
            now[0] += wait
            await one._look()
        else:
            pytest.fail("it is looked for without end")
        return len(asked)

    one.began(RESOURCE)
    began = now[0]
    assert await looks() == 1
    assert 1.4 < asked[0] - began < 2
    assert one.lacking(RESOURCE, now[0]) == 0
    one.kubelet_up(0)
    assert await looks() == 1
    one.kubelet_up(0)
    (tmp_path / "0badcafe-ab12-1.sock").touch()
    assert await looks() == 0


@pytest.mark.parametrize(
    ("attempt", "named", "lacking"),
    [
        pytest.param(0, True, False, id="one that registered before we came: nothing is written again"),
        pytest.param(0, False, True, id="one that never registered with this kubelet"),
        pytest.param(1, True, True, id="one that was to take what was ours"),
    ],
)
async def test_a_file_that_was_not_written_since_we_stand_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempt: int, named: bool, lacking: bool
) -> None:
    """An older gateway that starts slowly comes when a newer one serves: it must not take the resource from it."""

    async def shown(*_: object) -> Untold:
        return Untold.SINCE

    monkeypatch.setattr("gateway.kubelet.view.shown", shown)
    plugin = SimpleNamespace(
        name=RESOURCE,
        state=SimpleNamespace(attempt=attempt),
        plugin=SimpleNamespace(devices=(Device("a"),)),
        standing_by_for=Age(1, "0badcafe"),
        entries=("a",),
    )
    own = SimpleNamespace(resources=[plugin], talks=lambda _: False, doubts={})
    one = standby.Standby(cast("Any", own), tmp_path, *[Path("none")] * 2)
    if named:
        (tmp_path / "0badcafe-ab12-1.sock").touch()
    one.began(RESOURCE)
    await one._look()
    assert (one._records[RESOURCE].lacking_since is not None) is lacking


async def test_what_is_not_known_now_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that doesn't answer tells nothing about whom it holds."""

    async def shown(*_: object) -> Untold:
        return Untold.NOW

    monkeypatch.setattr("gateway.kubelet.view.shown", shown)
    plugin = SimpleNamespace(
        name=RESOURCE,
        plugin=SimpleNamespace(devices=(Device("a"),)),
        standing_by_for=Age(1, "0badcafe"),
        entries=("a",),
    )
    one = standby.Standby(
        cast("Any", SimpleNamespace(resources=[plugin], talks=lambda _: False, doubts={})), *[Path("none")] * 3
    )
    one.began(RESOURCE)
    await one._look()
    assert (one._records[RESOURCE].unknown, one._records[RESOURCE].lacking_since) == (1, None)


async def test_one_that_is_doubted_is_looked_after_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may register after all, and nobody tells."""

    async def shown(*_: object) -> Untold:
        return Untold.AT_ALL

    monkeypatch.setattr("gateway.kubelet.view.shown", shown)
    plugin = SimpleNamespace(state=SimpleNamespace(phase=Phase.SERVING), name=RESOURCE, standing_by_for=None)
    looks = list[str]()
    doubts = {RESOURCE: {Age(1, "0badcafe"): object()}}
    own = SimpleNamespace(resources=[plugin], doubts=doubts, look=lambda: looks.append("look"))
    one = standby.Standby(cast("Any", own), Path("none"), Path("none"), Path("none"))
    assert one._wait(cast("Any", plugin)) == 1.0
    await one._look()
    assert looks == ["look"]
    doubts.clear()
    assert one._wait(cast("Any", plugin)) is None


async def test_a_new_kubelet_is_looked_into_although_the_last_one_knew_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: asyncio.Queue[int] = asyncio.Queue()

    async def shown(_: Path, __: Path, since_ns: int) -> frozenset[str]:
        looks.put_nowait(since_ns)
        return frozenset({RESOURCE})

    monkeypatch.setattr("gateway.kubelet.view.shown", shown)
    plugin = SimpleNamespace(
        state=SimpleNamespace(phase=Phase.STANDBY),
        name=RESOURCE,
        plugin=SimpleNamespace(devices=(Device("a"),)),
        standing_by_for=object(),
        entries=("a",),
        checked=None,
    )
    own = SimpleNamespace(resources=[plugin], kubelet_listens=lambda: True, talks=lambda _: True, doubts={})
    one = standby.Standby(cast("Any", own), Path("none"), Path("none"), Path("none"))
    one.began(RESOURCE)
    running = asyncio.create_task(one.run())
    try:
        async with asyncio.timeout(10):
            began = await looks.get()
            one.kubelet_up(began + 42)
            assert await looks.get() == began + 42
            one.kubelet_up(42)  # It is seen after we left the resource to another: what it wrote before was ours.
            assert await looks.get() == began + 42
    finally:
        running.cancel()


# The end, and signals before the gateway is up.

HANGS = """
import os, time
from pathlib import Path
from gateway.cli.main import gateway

def hang(*_, **__):
    time.sleep(600)  # Longer than the test waits for the gateway's end.

os.fsync, unlink = hang, Path.unlink
Path.unlink = lambda path, **rest: (hang if path.parent.name == "state" else unlink)(path, **rest)
gateway()
"""


HANGS_WHEN_READ = """
import time
from gateway.cli.main import gateway
from gateway.memory import ledger
ledger.Ledger.look = lambda _: time.sleep(600)  # Longer than the test waits for the gateway's end.
gateway()
"""


async def test_the_end_does_not_wait_for_a_disk_that_hangs_at_the_start() -> None:
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        root = Path(folder)
        command = gateway_command(root / "device-plugins", root / "state")
        (root / "device-plugins").mkdir()
        async with await GatewayProcess.launch([command[0], "-c", HANGS_WHEN_READ, *command[3:]]) as gateway:
            await gateway.wait_for("state file not read", seconds=20)
            assert await gateway.terminate() == 0


@pytest.mark.parametrize("bridge", [False, True])
async def test_the_end_does_not_wait_for_a_disk_that_hangs(bridge: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        root = Path(folder)
        more = ("--bridge", str(root / "bridge")) if bridge else ()
        command = [*gateway_command(root / "device-plugins", root / "state"), *more]
        (root / "device-plugins").mkdir()
        async with await GatewayProcess.launch([command[0], "-c", HANGS, *command[3:]]) as gateway:
            await gateway.begun()
            assert await gateway.terminate() == 0


async def test_a_hangup_before_the_gateway_listens_does_not_end_it() -> None:
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        root = Path(folder)
        command = [*gateway_command(root / "not" / "yet", root / "state"), "--probe-address", "127.0.0.1:0"]
        async with await GatewayProcess.launch(command) as gateway:
            await gateway.wait_for("waiting for the socket directory")
            os.kill(gateway.pid, signal.SIGHUP)
            (root / "not" / "yet").mkdir(parents=True)
            await gateway.begun()


def test_a_hangup_while_the_settings_are_read_does_not_end_it() -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # Who is run by nohup would ignore it.
        "import gateway.cli.main as command\n"
        "command._settings = lambda *_: (os.kill(os.getpid(), signal.SIGHUP), sys.exit(7))\n"
        "command.gateway()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 7
