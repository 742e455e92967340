"""The bridge to plugins of every API version, over real sockets: what they say arrives, what is asked goes to them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from devices.model import (
    ContainerAnswer,
    Device,
    DeviceNode,
    Fault,
    Health,
    Mount,
    Options,
    PreferredRequest,
    RefusedError,
)
from devices.policy import Bridging, Policy
from devices.source import Inventory
from gateway.bridge import memory
from gateway.bridge.plugin import OLD_STREAMS
from gateway.kubelet.watch import socket_id
from gateway.lab.gatewayproc import GatewayProcess
from gateway.lab.plugins.played import Habits, PlayedPlugin
from gateway.lab.waiting import until
from tests.unit.bridging import GUARD_S, NIC, TWO, bridged, health, plugin

APIS = ("0.1", "v1alpha2", "v1beta1")


@pytest.mark.parametrize("api", APIS)
async def test_a_plugins_list_health_and_answers_arrive(folder: Path, api: str) -> None:
    full = ContainerAnswer({"K": "v"}, (Mount("/c", "/h", read_only=True),), (DeviceNode("/dev/c", "/dev/h", "r"),))
    async with bridged(folder) as bridge, plugin(folder, api=api, answer=lambda _: full) as played:
        assert health(await bridge.lists("a", "b")) == {"a": True, "b": True}
        await played.change((Device("a", Health.UNHEALTHY), Device("c")))
        assert health(await bridge.lists("a", "c")) == {"a": False, "c": True}
        assert await bridge.allocate("c") == full
        assert played.allocated == [("c",)]


async def test_numa_nodes_that_there_cannot_be_are_left_out(folder: Path) -> None:
    devices = (Device("a", numa_nodes=(0, 1)), Device("b", numa_nodes=(-1,)), Device("c", numa_nodes=(1 << 40, 2)))
    async with bridged(folder) as bridge, plugin(folder, devices=devices):
        listing = await bridge.lists("a", "b", "c")
    assert [one.numa_nodes for one in listing.devices] == [(0, 1), (), (2,)]


@pytest.mark.parametrize(
    "habits",
    [Habits(), Habits(no_options=True), Habits(bare_options=True)],
    ids=["both", "Register, without the call", "Register, and the call asks for nothing"],
)
async def test_options_count_whichever_way_a_plugin_says_them(folder: Path, habits: Habits) -> None:
    options = Options(pre_start_required=True, preferred_allocation=True)
    async with bridged(folder) as bridge, plugin(folder, options=options, habits=habits) as played:
        assert (await bridge.lists("a", "b")).options == options
        await bridge.bridge.prepare(NIC, ("a",))
        assert played.prepared == [("a",)]
        assert await bridge.bridge.prefer(NIC, PreferredRequest(("a", "b"), (), 1)) == ("b",)


@pytest.mark.parametrize("shared", [False, True], ids=["each its own list", "one channel for all"])
async def test_options_are_those_of_the_last_register_though_the_list_is_the_same(
    folder: Path, *, shared: bool
) -> None:
    """It needn't be sent again, or may come by the stream of an earlier registration."""
    async with bridged(folder) as bridge, plugin(folder, habits=Habits(shared_channel=shared)) as played:
        await bridge.lists("a", "b")
        played.options = Options(pre_start_required=True)
        await played.register()
        await bridge.until(lambda told: told[NIC].options == played.options)
        for devices in ((Device("c"),), TWO, (Device("d"),)):
            await played.change(devices)
            assert (await bridge.lists(*(one.id for one in devices))).options == played.options
        await bridge.bridge.prepare(NIC, ("d",))
        assert played.prepared == [("d",)]


async def test_options_are_those_of_who_binds_the_socket_before_the_one_before_ended(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder):
        await bridge.lists("a", "b")
        async with plugin(folder, options=Options(pre_start_required=True)) as played:
            await bridge.bridge.prepare(NIC, ("a",))
            assert played.prepared == [("a",)]


async def test_a_plugin_that_asked_for_nothing_is_not_asked_to_prepare(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        await bridge.bridge.prepare(NIC, ("a",))
        assert played.prepared == []


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.PERMISSION_DENIED,
    ],
)
async def test_a_plugins_error_arrives_with_its_code_and_text(folder: Path, code: grpc.StatusCode) -> None:
    async with bridged(folder) as bridge, plugin(folder, failing=(code, "no pod is pending")):
        await bridge.lists("a", "b")
        with pytest.raises(RefusedError, match=r"^no pod is pending$") as refused:
            async with asyncio.timeout(GUARD_S):
                await bridge.allocate("a")
        assert refused.value.fault.value == code.name
        assert bridge.one().absences == 0


async def test_allocates_reach_a_plugin_one_at_a_time_and_in_order(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        played.free.clear()
        calls = [asyncio.create_task(bridge.allocate(one)) for one in ("b", "a", "b")]
        await until(lambda: bool(played.allocated), GUARD_S)
        await asyncio.wait(calls, timeout=0.2)  # nothing must happen
        assert played.allocated == [("b",)]
        played.free.set()
        await asyncio.gather(*calls)
        assert played.allocated == [("b",), ("a",), ("b",)]


# A plugin's habits.


async def test_equal_lists_are_told_once(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder, habits=Habits(repeats_s=0.01)):
        await bridge.lists("a", "b")
        count, peer = bridge.count, bridge.one().peer
        assert peer is not None
        await until(lambda: peer.lists >= 5, GUARD_S)
        assert bridge.count == count


async def test_calls_are_answered_before_an_inventory_is_taken_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make one of many plugins takes milliseconds, and so does what is made of it."""
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        taken_in, make = list[int](), bridge.bridge._inventory

        def made() -> Inventory:
            before = bridge.count
            asyncio.get_running_loop().call_soon(lambda: taken_in.append(bridge.count - before))
            return make()

        monkeypatch.setattr(bridge.bridge, "_inventory", made)
        await played.change((Device("a"),))
        await bridge.lists("a")
    assert set(taken_in) == {0}


async def test_one_listandwatch_for_each_registration(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder, habits=Habits(shared_channel=True)) as played:
        await bridge.lists("a", "b")
        for devices in ((Device("c"),), TWO, (Device("d"),)):
            await played.change(devices)
            await bridge.lists(*(one.id for one in devices))
        assert played.lists == 1


async def test_what_an_earlier_handler_of_the_same_server_swallows_still_counts(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder, habits=Habits(shared_channel=True)) as played:
        await bridge.lists("a", "b")
        await played.register()
        async with asyncio.timeout(GUARD_S):
            while (peer := bridge.one().peer) is None or played.lists < 2 or not peer.lists:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
        for devices in ((Device("c"),), TWO, (Device("d"),)):
            await played.change(devices)
            await bridge.lists(*(one.id for one in devices))


async def test_an_empty_list_before_the_end_is_a_stop(folder: Path) -> None:
    async with bridged(folder) as bridge:
        async with plugin(folder, habits=Habits(empties=True)):
            await bridge.lists("a", "b")
        await bridge.until(lambda _: bridge.one().peer is None)
        await asyncio.sleep(1.1)  # As long as an empty list is held back.
        assert health(bridge.told[NIC]) == {"a": True, "b": True}


async def test_an_empty_list_of_a_plugin_that_stays_is_no_devices(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        await played.change(())
        await bridge.lists()


async def test_one_that_says_again_and_again_that_it_has_no_devices_has_none(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder, habits=Habits(repeats_s=0.05)) as played:
        await bridge.lists("a", "b")
        await played.change(())
        await bridge.lists()


async def test_a_socket_that_is_bound_again_under_its_name_is_a_new_plugin(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as old:
        await bridge.lists("a", "b")
        async with plugin(folder, devices=(Device("new"),)):
            await bridge.lists("new")
            await old.change((Device("stale"),))
            await bridge.allocate("new")
            assert health(bridge.told[NIC]) == {"new": True}


async def test_a_list_that_follows_an_empty_one_counts(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        await played.change(())
        peer = bridge.one().peer
        assert peer is not None
        await until(lambda: peer.lists >= 2, GUARD_S)
        await played.change((Device("c"),))
        await bridge.lists("c")
        await asyncio.sleep(1.1)  # As long as an empty list is held back.
        assert health(bridge.told[NIC]) == {"c": True}


async def test_a_plugin_that_registers_again_and_again_keeps_few_streams(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        for _ in range(8):
            await played.register()
        await bridge.lists("a", "b")
        await until(lambda: not (played.lists < 9 or played.listening > OLD_STREAMS + 1), GUARD_S)


# The shield.


async def test_while_a_plugin_is_away_its_devices_stay_and_allocate_waits(folder: Path) -> None:
    async with bridged(folder) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
        await bridge.until(lambda _: bridge.one().peer is None)
        assert health(bridge.told[NIC]) == {"a": True, "b": True}
        bridge.one().went("it is away already")
        call = asyncio.create_task(bridge.allocate("a"))
        async with plugin(folder) as again:
            async with asyncio.timeout(GUARD_S):
                await call
            assert again.allocated == [("a",)]
            await bridge.until(lambda _: bridge.one().returns)
            assert (bridge.one().absences, bridge.one().returns) == (1, 1)


async def test_a_device_that_a_plugin_came_back_without_is_refused_by_name_and_nothing_else_is(folder: Path) -> None:
    async with bridged(folder) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
        await bridge.until(lambda _: bridge.one().peer is None)
        lost, kept = (asyncio.create_task(bridge.allocate(name)) for name in ("b", "a"))
        async with plugin(folder, devices=[Device("a")]) as again, asyncio.timeout(GUARD_S):
            with pytest.raises(RefusedError, match="got 'b', which it came back without") as refused:
                await lost
            assert refused.value.fault is Fault.NOT_FOUND
            assert (await kept).envs == {"DEVICES": "a"}
            assert again.allocated == [("a",)]
            await bridge.lists("a")
            with pytest.raises(RefusedError, match="which it came back without"):
                await bridge.allocate("b")
            assert await bridge.bridge.prefer(NIC, PreferredRequest(("b", "a"), (), 1)) == ("b",)
            await bridge.allocate("a")


async def test_one_that_comes_back_with_nothing_is_asked_for_nothing(folder: Path) -> None:
    async with bridged(folder) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
        await bridge.until(lambda _: bridge.one().peer is None)
        call = asyncio.create_task(bridge.allocate("a"))
        async with plugin(folder, devices=[]) as again, asyncio.timeout(GUARD_S):
            with pytest.raises(RefusedError, match="which it came back without"):
                await call
            assert again.allocated == []


async def test_one_that_comes_back_and_says_nothing_has_what_it_had(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.bridge.calls.FIRST_LIST", 0.05)
    async with bridged(folder) as bridge, plugin(folder, habits=Habits(silent_again=True)) as played:
        await bridge.lists("a", "b")
        bridge.one().went("its stream broke")
        call = asyncio.create_task(bridge.allocate("a"))
        await played.register()
        async with asyncio.timeout(GUARD_S):
            await call


async def test_an_allocate_that_a_dying_plugin_had_goes_to_the_next_one(folder: Path) -> None:
    async with bridged(folder) as bridge:
        async with plugin(folder) as played:
            await bridge.lists("a", "b")
            played.free.clear()
            call = asyncio.create_task(bridge.allocate("a"))
            await until(lambda: bool(played.allocated), GUARD_S)
        async with plugin(folder) as again, asyncio.timeout(GUARD_S):
            assert (await call).envs == {"DEVICES": "a"}
            assert again.allocated == [("a",)]


async def test_an_allocate_that_one_had_when_the_next_registered_is_nothing_against_that_one(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        played.free.clear()
        call = asyncio.create_task(bridge.allocate("a"))
        await until(lambda: bool(played.allocated), GUARD_S)
        async with plugin(folder) as again, asyncio.timeout(GUARD_S):
            await until(lambda: again.lists == 1, GUARD_S)
            await played._server.stop(0)  # type: ignore[union-attr]
            assert (await call).envs == {"DEVICES": "a"}
            assert (again.allocated, bridge.one().absences) == ([("a",)], 0)


async def test_an_allocate_that_a_killed_plugin_had_goes_to_the_next_one(folder: Path) -> None:
    async with bridged(folder) as bridge:
        command = (sys.executable, "-m", "gateway.lab.plugins.played", str(folder / "device-plugins"), "--devices", "2")
        async with await GatewayProcess.launch(command) as process:
            await bridge.lists("dev-0", "dev-1")
            os.kill(process.pid, signal.SIGSTOP)
            call = asyncio.create_task(bridge.allocate("dev-0"))
            await asyncio.sleep(0)
            await process.kill()
        await bridge.until(lambda _: bridge.one().peer is None)
        async with plugin(folder, devices=[Device("dev-0")]) as again, asyncio.timeout(GUARD_S):
            await call
            assert again.allocated == [("dev-0",)]


async def test_after_the_grace_devices_are_unhealthy_and_after_longer_withdrawn(folder: Path) -> None:
    async with bridged(folder, grace=0.3, withdraw=0.8) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
        await bridge.until(lambda told: NIC in told and health(told[NIC]) == {"a": False, "b": False})
        with pytest.raises(RefusedError, match="it is away") as refused:
            await bridge.allocate("a")
        assert refused.value.fault is Fault.UNAVAILABLE
        await bridge.until(lambda told: NIC not in told)
        async with plugin(folder):
            listing = await bridge.lists("a", "b")
            assert health(listing) == {"a": True, "b": True}
            assert listing.recovered == {"a", "b"}


async def test_a_large_answer_is_not_remembered(folder: Path) -> None:
    async with bridged(folder, bridging=Bridging(repeat=("*",)), grace=0.3) as bridge:
        async with plugin(folder, answer=lambda _: ContainerAnswer({"K": "v" * 20_000})):
            await bridge.lists("a", "b")
            await bridge.allocate("a")
        await bridge.until(lambda _: bridge.one().peer is None)
        with pytest.raises(RefusedError, match="it is away"):
            await bridge.allocate("a")


@pytest.mark.parametrize("repeat", [True, False], ids=["as before", "not without the operator's word"])
async def test_an_earlier_answer_is_repeated_where_the_operator_says_so(folder: Path, *, repeat: bool) -> None:
    bridging = Bridging(repeat=("vendor.example/*",) if repeat else ())
    async with bridged(folder, bridging=bridging, grace=0.5) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
            first = await bridge.allocate("a", "b")
        await bridge.until(lambda _: bridge.one().peer is None)
        if repeat:
            assert await bridge.allocate("b", "a") == first
        for ids in (["a"],) if repeat else (["a"], ["b", "a"]):
            with pytest.raises(RefusedError, match="it is away"):
                await bridge.allocate(*ids)


async def test_a_plugin_that_hangs_is_away_until_it_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.plugin.PROBE_EVERY", 0.05)
    async with bridged(folder, grace=10) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        bridge.one().deadline = 0.1
        played.free.clear()
        played.stalls = True
        with pytest.raises(RefusedError, match="hangs"):
            await bridge.allocate("a")
        assert bridge.one().word.away_since is not None
        bridge.one().deadline = GUARD_S
        waiting = asyncio.create_task(bridge.allocate("b"))
        await until(lambda: not bridge.one()._back.is_set(), GUARD_S)
        played.stalls = False
        played.free.set()
        await bridge.until(lambda _: bridge.one().word.away_since is None)
        await waiting
        await bridge.allocate("a")
        assert played.lists == 1  # It was not called a second time.


async def test_a_plugin_that_hangs_is_answered_for_where_the_operator_says_so(folder: Path) -> None:
    async with bridged(folder, bridging=Bridging(repeat=("*",))) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        first = await bridge.allocate("a")
        bridge.one().deadline = 0.1
        played.free.clear()
        played.stalls = True
        assert await bridge.allocate("a") == first
        assert bridge.one().repeated == 1
        played.free.set()


async def test_a_plugin_that_is_slow_but_lives_is_not_away(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        bridge.one().deadline = 0.1
        played.free.clear()
        with pytest.raises(RefusedError, match=r"lives, but it didn't answer Allocate within 0\.1 s"):
            await bridge.allocate("a")
        assert bridge.one().word.away_since is None


async def test_a_choice_is_made_without_a_plugin_that_is_away(folder: Path) -> None:
    async with bridged(folder) as bridge:
        async with plugin(folder, options=Options(preferred_allocation=True)):
            await bridge.lists("a", "b")
        await bridge.until(lambda _: bridge.one().peer is None)
        assert await bridge.bridge.prefer(NIC, PreferredRequest(("a", "b", "c"), ("c",), 2)) == ("c", "a")


async def test_one_that_never_registers_again_is_called_by_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.bridge.plugin.REDIAL_FIRST", 0.05)
    async with bridged(folder) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
        async with plugin(folder, start=False, devices=(Device("c"),)) as again:
            await again.serve()
            await bridge.lists("c")


async def test_few_answers_are_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.calls.MOST_ANSWERS", 2)
    async with bridged(folder, bridging=Bridging(repeat=("*",))) as bridge, plugin(folder):
        await bridge.lists("a", "b")
        for ids in (("a",), ("b",), ("a",), ("a", "b")):
            await bridge.allocate(*ids)
        assert [*bridge.one().answers] == [frozenset({"a"}), frozenset({"a", "b"})]


async def test_what_an_operator_changes_counts_for_plugins_that_are_there(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder):
        await bridge.lists("a", "b")
        bridge.bridge.adopt(
            Policy(bridge_grace=5, bridging=Bridging(deadlines=(("vendor.*", 7.0),), repeat=("*/nic",)))
        )
        assert (bridge.one().deadline, bridge.one().repeats, bridge.one().limits.grace) == (7.0, True, 5)


# A new start of the bridge.


async def test_a_bridge_that_starts_anew_knows_its_plugins_and_their_devices(folder: Path) -> None:
    async with bridged(folder) as bridge:
        async with plugin(
            folder, devices=(Device("a", numa_nodes=(1,)), Device("b", Health.UNHEALTHY)), api="v1alpha2"
        ):
            before = await bridge.lists("a", "b")
        await bridge.until(lambda _: bridge.one().peer is None)
    async with bridged(folder) as again:
        assert (await again.lists("a", "b")).devices == before.devices
        assert (again.one().api, again.one().endpoint) == ("v1alpha2", "played.sock")


async def test_a_bridge_that_starts_anew_calls_its_plugins_first_and_then_makes_them_register(folder: Path) -> None:
    async with plugin(folder, start=False) as played:
        async with bridged(folder) as bridge:
            await played.start()
            await bridge.lists("a", "b")
        async with bridged(folder) as again:
            assert again.one().peer is not None  # It was called before the socket was opened.
            await again.allocate("a")
            assert not played.path.exists()  # Some register anew when they see that.
            await played.stop()
            await played.start()
            await again.allocate("b")


async def test_one_that_is_remembered_and_came_later_is_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.plugin.REDIAL_FIRST", 0.05)
    async with bridged(folder) as bridge, plugin(folder):
        await bridge.lists("a", "b")
    async with bridged(folder) as again, plugin(folder, start=False, devices=(Device("c"),)) as played:
        await again.lists("a", "b")
        await played.serve()
        await again.lists("c")


async def test_one_that_was_away_for_long_before_a_start_still_is(folder: Path) -> None:
    row = memory.Plugin(
        NIC, "device-plugins", "x", "v1beta1", (memory.DeviceRow("a", well=True),), away_since=time.time() - 100
    )
    (folder / "state").mkdir(mode=0o700)
    memory.save(folder / "state", (row,))
    async with bridged(folder) as bridge:
        assert health(await bridge.lists("a")) == {"a": False}


async def test_a_damaged_memory_is_put_aside(folder: Path) -> None:
    (folder / "state").mkdir(mode=0o700)
    (folder / "state" / "bridge.json").write_text('{"format": 1, "plugins": [{"resource": 3}]}')
    async with bridged(folder) as bridge, plugin(folder):
        await bridge.lists("a", "b")
        assert (folder / "state" / "bridge.damaged").exists()


async def test_the_socket_goes_before_it_comes_again(folder: Path) -> None:
    (folder / "device-plugins").mkdir(mode=0o750)
    (plain := folder / "device-plugins" / "notes").touch()
    async with bridged(folder) as bridge:
        assert plain.exists(), "no plugin left it"
        socket = folder / "device-plugins" / "kubelet.sock"
        before = socket_id(socket)
        socket.unlink()
        await until(lambda: socket_id(socket) not in {None, before}, GUARD_S)
        async with plugin(folder):
            await bridge.lists("a", "b")


async def test_a_second_gateway_calls_the_firsts_plugins_and_takes_them_over_when_it_ends(folder: Path) -> None:
    async with plugin(folder, start=False) as played, bridged(folder) as first:
        await played.start()
        await first.lists("a", "b")
        async with bridged(folder, opens=False) as second:
            await second.lists("a", "b")
            assert "another gateway has this folder" in second.bridge.hindrances()[0].reason
            await second.allocate("a")
            await played.change((Device("a", Health.UNHEALTHY), Device("c")))
            await second.lists("a", "c")
            assert health(second.told[NIC]) == {"a": False, "c": True}
            assert (first.one().peer is not None, played.lists) == (True, 1)
            await first.close()
            await second.open()
            await second.allocate("c")
            assert played.lists == 2


async def test_an_allocate_at_a_second_gateway_waits_for_a_plugin_that_is_away(folder: Path) -> None:
    async with bridged(folder) as first:
        async with plugin(folder):
            await first.lists("a", "b")
            async with bridged(folder, opens=False) as second:
                await second.lists("a", "b")
                await second.allocate("a")
        # The plugin ends while the second one is away, so that it must be told.
        async with bridged(folder, opens=False) as second:
            await second.until(lambda _: second.bridge.plugins and second.one().word.away_since is not None)
            call = asyncio.create_task(second.allocate("a"))
            async with plugin(folder) as again, asyncio.timeout(GUARD_S):
                await call
                assert again.allocated == [("a",)]


async def test_a_second_gateway_notices_that_a_plugin_went(folder: Path) -> None:
    async with bridged(folder) as first, AsyncExitStack() as stack:
        played = await stack.enter_async_context(plugin(folder))
        await first.lists("a", "b")
        async with bridged(folder, opens=False) as second:
            await second.lists("a", "b")
            await second.allocate("a")
            await played.stop()
            await second.until(lambda _: second.one().word.away_since is not None)
            call = asyncio.create_task(second.allocate("b"))
            await asyncio.sleep(0)
            assert not call.done()
            await played.start()
            async with asyncio.timeout(GUARD_S):
                await call
            assert played.allocated == [("a",), ("b",)]


# The other folder.


async def test_a_plugin_in_plugins_registry_is_found_and_told(folder: Path) -> None:
    async with bridged(folder) as bridge:
        registry = folder / "plugins_registry"
        async with plugin(folder, start=False) as played:
            played.folder = registry
            await played.serve()
            await bridge.lists("a", "b")
            await bridge.allocate("a")
            await told(played)
            assert played.told == [""]
        async with plugin(folder, start=False, resource="nodomain") as wrong:
            wrong.folder = registry
            await wrong.serve()
            await told(wrong)
            assert "expected a resource name with a domain" in wrong.told[0]


async def test_a_socket_in_plugins_registry_that_is_bound_again_is_a_new_plugin(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder, start=False) as old:
        old.folder = folder / "plugins_registry"
        await old.serve()
        await bridge.lists("a", "b")
        async with plugin(folder, start=False, devices=(Device("new"),)) as new:
            new.folder = old.folder
            await new.serve()
            await bridge.lists("new")


async def test_a_plugin_in_plugins_registry_that_was_refused_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.bridge.sockets.ASK_AGAIN", 0.05)
    bridging = Bridging(allow=("none.example/*",))
    async with bridged(folder, bridging=bridging) as bridge, plugin(folder, start=False) as played:
        played.folder = folder / "plugins_registry"
        await played.serve()
        await told(played)
        assert "bridge.allow" in played.told[0]
        bridge.bridge.adopt(Policy())
        await bridge.lists("a", "b")
        assert not bridge.bridge._sockets.registry._ask_at, "nobody asks one that was taken"


async def test_a_plugin_in_plugins_registry_is_called_once_by_a_bridge_that_starts_anew(folder: Path) -> None:
    async with plugin(folder, start=False) as played:
        for calls in (1, 2):
            played.told.clear()
            async with bridged(folder) as bridge:
                if calls == 1:
                    played.folder = folder / "plugins_registry"
                    await played.serve()
                await bridge.lists("a", "b")
                await told(played)
                assert (played.told, played.lists) == ([""], calls)


async def test_kubelet_sock_has_a_kubelets_mode(folder: Path) -> None:
    (folder / "device-plugins").mkdir(mode=0o750)
    before = os.umask(0o077)
    try:
        async with bridged(folder):
            assert (folder / "device-plugins" / "kubelet.sock").stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)


async def told(played: PlayedPlugin) -> None:
    await until(lambda: bool(played.told), GUARD_S)


async def test_a_plugin_that_was_let_go_before_it_was_followed_has_ended(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder):
        await bridge.lists("a", "b")
        peer = bridge.one().peer
        assert peer is not None
        await peer.close()
        assert await peer.follow(bridge.one()) == "the connection is closed"
