"""Where the bridge meets what else happens on a node: rivals, renames, own devices, a second gateway, a relabelled folder."""

from __future__ import annotations

import asyncio
import socket as sockets
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from devices.combined import Combined
from devices.model import Device
from devices.policy import Bridging, Policy
from devices.source import Inventory, hear
from gateway.bridge import memory, shield
from gateway.bridge.calls import BridgedResource
from gateway.kubelet.watch import socket_id
from gateway_lab.plugins.played import Habits
from gateway_lab.waiting import until
from tests.unit.bridging import GUARD_S, NIC, TWO, bridged, plugin

OTHER = "other.example/fpga"


async def test_of_two_that_register_at_once_one_is_taken_and_the_other_is_told(folder: Path) -> None:
    async with (
        bridged(folder) as bridge,
        plugin(folder, start=False, endpoint="one.sock") as one,
        plugin(folder, start=False, endpoint="two.sock") as two,
    ):
        await one.serve()
        await two.serve()
        said = await asyncio.gather(one.register(), two.register(), return_exceptions=True)
        [refused] = [error for error in said if error is not None]
        assert isinstance(refused, grpc.aio.AioRpcError)
        assert refused.code() is grpc.StatusCode.ALREADY_EXISTS
        await bridge.lists("a", "b")
        assert bridge.one().registrations == 1


def test_a_socket_is_the_same_whatever_its_mode_or_label(folder: Path) -> None:
    path = folder / "x.sock"

    def bind() -> None:
        with sockets.socket(sockets.AF_UNIX) as one:
            one.bind(str(path))

    bind()
    before = socket_id(path)
    path.chmod(0o600)
    assert socket_id(path) == before
    path.rename(folder / "y.sock")
    bind()
    assert socket_id(path) not in {before, None}


async def test_what_is_remembered_gives_way_to_the_gateways_own(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder):
        await bridge.lists("a", "b")
        await bridge.close()
        async with bridged(folder, taken=lambda name: name == NIC) as again:
            assert again.bridge.plugins.keys() == {NIC}
            assert NIC not in again.told
            assert any("by this gateway itself" in one.reason for one in again.bridge.hindrances())


async def test_a_name_that_another_one_was_given_is_refused(folder: Path) -> None:
    async with bridged(folder, bridging=Bridging(renames={NIC: OTHER})) as bridge, plugin(folder):
        await bridge.lists("a", "b", resource=OTHER)
        async with plugin(folder, start=False, resource=OTHER, endpoint="other.sock") as other:
            await other.serve()
            with pytest.raises(grpc.aio.AioRpcError, match=r"is the name of what played\.sock offers"):
                await other.register()


@pytest.mark.parametrize("renames", [{NIC: OTHER}, {OTHER: NIC}], ids=["the first one's", "the second one's"])
async def test_a_list_and_the_answers_are_one_plugins(folder: Path, renames: Mapping[str, str]) -> None:
    [shown] = renames.values()
    async with (
        bridged(folder) as bridge,
        plugin(folder) as nic,
        plugin(folder, resource=OTHER, endpoint="other.sock", devices=(Device("x"),)) as other,
    ):
        await bridge.lists("a", "b")
        await bridge.lists("x", resource=OTHER)
        bridge.bridge.adopt(Policy(bridge=str(folder), bridging=Bridging(renames=renames)))
        told = await bridge.until(lambda told: told.keys() == {shown})
        of = nic if shown == NIC else other
        assert {one.id for one in told[shown].devices} == {one.id for one in of.devices}
        await bridge.allocate(*(one.id for one in of.devices), resource=shown)
        assert len(of.allocated) == 1
        assert any("is the name of what" in one.reason for one in bridge.bridge.hindrances())


async def test_an_empty_list_of_one_that_was_replaced_says_nothing_of_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.bridge.plugin.EMPTY_PATIENCE", 2 * GUARD_S)  # Not over before the next one is there.
    async with bridged(folder) as bridge, plugin(folder) as ending:
        await bridge.lists("a", "b")
        await ending.change(())
        await until(lambda: bridge.one()._emptied is not None, GUARD_S)
        held_back = bridge.one()._emptied
        async with plugin(folder, start=False, habits=Habits(silent_again=True), lists=1) as late:
            await late.start()
            await until(lambda: late.listening == 1, GUARD_S)
            assert held_back is not None
            assert held_back.cancelled()
            await bridge.lists("a", "b")
            monkeypatch.setattr("gateway.bridge.plugin.EMPTY_PATIENCE", 0.01)
            await late.change(())  # The same bytes: now they are its own.
            await bridge.lists()


async def test_a_plugin_that_registers_once_outlives_every_start_of_the_bridge(folder: Path) -> None:
    async with bridged(folder) as first, plugin(folder) as played:
        await first.lists("a", "b")
        await first.close()
        for number in range(3):
            async with bridged(folder) as again:
                assert not played.path.exists()
                await again.lists("a", "b")
                await again.allocate("a")
                assert (again.one().endpoint, len(played.allocated)) == ("played.sock", number + 1)
        await played.stop()
        async with bridged(folder):
            assert [path.name for path in played.folder.iterdir()] == ["kubelet.sock"]


async def test_who_was_told_that_it_is_registered_is_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SAVE_TIME", 60.0)  # It is told when that is written, not when that took too long.
    async with bridged(folder), AsyncExitStack() as stack:
        for number in range(3):  # The first one finds nothing that was written just now.
            resource = f"vendor.example/nic-{number}"
            await stack.enter_async_context(plugin(folder, resource=resource, endpoint=f"{number}.sock"))
            plugins, _ = memory.load(folder / "state")
            assert resource in {row.resource for row in plugins}


async def test_one_that_registered_and_said_nothing_yet_is_called_after_a_crash(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder, lists=1, habits=Habits(silent_again=True)) as played:
        await until(lambda: played.lists == 2, GUARD_S)
        await bridge.close()
        async with bridged(folder) as again:
            assert again.one().word.devices is None
            assert again.told == {}
            await until(lambda: played.lists == 3, GUARD_S)
            await played.change(TWO)
            await again.lists("a", "b")


async def test_one_that_registers_once_outlives_a_gateway_that_is_killed_while_it_opens_its_socket(
    folder: Path,
) -> None:
    async with bridged(folder) as first, plugin(folder):
        await first.lists("a", "b")
        await first.close()
        before = (folder / "state" / memory.NAME).read_bytes()
        async with bridged(folder) as killed:
            await killed.close()
        (folder / "state" / memory.NAME).write_bytes(before)  # As if it hadn't come to that.
        async with bridged(folder) as again:
            assert again.one().peer is not None
            assert again.one().endpoint == "played.sock"


async def test_a_disk_that_hangs_keeps_nobody_from_registering(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.memory.SAVE_TIME", 0.1)
    over = threading.Event()
    monkeypatch.setattr("gateway.bridge.memory.save", lambda *_: over.wait(6 * GUARD_S))
    async with bridged(folder) as bridge:
        try:
            async with asyncio.timeout(GUARD_S), plugin(folder):
                await bridge.lists("a", "b")
        finally:
            over.set()


async def test_a_disk_that_fails_is_told_of_once_until_it_works_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = iter([OSError("full"), OSError("full"), OSError("read-only"), None, OSError("read-only")])

    def save(*_: object) -> None:
        if (error := next(written)) is not None:
            raise error

    monkeypatch.setattr(memory, "save", save)
    monkeypatch.setattr(memory, "SAVE_SOON", 0.0)
    one = memory.PluginsFile(folder, lambda: ())
    running = asyncio.ensure_future(one.run())
    with capture_logs() as told:
        for _ in range(5):
            await one.durable()
    running.cancel()
    assert [line["reason"] for line in told] == ["full", "read-only", "read-only"]


async def test_what_is_under_way_ends_before_the_sockets_are_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[str]()

    async def under_way() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("task")

    async with bridged(folder, opens=False) as bridge:
        close = bridge.bridge._sockets.close

        async def closed() -> None:
            ended.append("sockets")
            await close()

        await bridge.until(lambda _: bridge.count)
        monkeypatch.setattr(bridge.bridge, "_keep_sockets", under_way)
        await bridge.bridge.lead()
        monkeypatch.setattr(bridge.bridge._sockets, "close", closed)
    assert ended == ["task", "sockets"]


async def test_who_takes_over_knows_what_came_last(folder: Path) -> None:
    async with bridged(folder) as first, plugin(folder):
        await first.lists("a", "b")
        async with bridged(folder, opens=False) as second:
            await second.lists("a", "b")
            async with plugin(folder, resource=OTHER, endpoint="other.sock") as late:
                await first.lists("a", "b", resource=OTHER)
                await first.bridge.rest()
                await second.bridge.lead()
                assert second.told.keys() == {NIC, OTHER}
                await until(lambda: late.lists >= 2, GUARD_S)


async def test_an_allocate_that_is_open_when_its_plugin_ends_its_stream_is_asked_once(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        played.free.clear()
        call = asyncio.create_task(bridge.allocate("a"))
        await until(lambda: bool(played.allocated), GUARD_S)
        await played.hang_up()
        await until(lambda: bridge.one().peer is None, GUARD_S)
        played.free.set()
        async with asyncio.timeout(GUARD_S):
            await call
        assert played.allocated == [("a",)]


async def test_who_takes_over_knows_what_it_had_never_heard_of(folder: Path) -> None:
    async with bridged(folder) as first, bridged(folder, opens=False) as second:
        await second.until(lambda _: second.count)
        async with plugin(folder):
            await first.lists("a", "b")
            await first.bridge.rest()
            assert not first.bridge.is_open
            await second.bridge.lead()
            assert second.told.keys() == {NIC}
            await second.allocate("a")


async def test_with_several_sources_too_lists_are_whole_once_this_gateway_leads(folder: Path) -> None:
    taken: list[Inventory] = []

    async def take(inventory: Inventory) -> None:
        await asyncio.sleep(0.05)
        taken.append(inventory)

    async with bridged(folder) as first, bridged(folder, opens=False) as second:
        await second.close()
        combined: Any = Combined([second.bridge])
        following = asyncio.ensure_future(hear(combined, take))
        await until(lambda: bool(taken), GUARD_S)
        async with plugin(folder):
            await first.lists("a", "b")
            await first.bridge.rest()
            await combined.lead()
            assert taken[-1].keys() == {NIC}
            await second.open()
            await combined.rest()
            assert not second.bridge.is_open
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_plugin_that_was_given_another_name_is_not_called_by_the_old_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it after a restart, where the old name is called first."""
    called, call = asyncio.Event(), BridgedResource.call

    async def in_order(one: BridgedResource) -> bool:
        if one.resource == OTHER:
            await called.wait()
        try:
            return await call(one)
        finally:
            called.set()

    async with bridged(folder) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
        await until(lambda: bridge.one().peer is None, GUARD_S)
        async with plugin(folder, resource=OTHER) as renamed:
            await bridge.lists("a", "b", resource=OTHER)
            assert not await bridge.one().call()
            await bridge.close()
            monkeypatch.setattr(BridgedResource, "call", in_order)
            async with bridged(folder) as again:
                await again.lists("a", "b", resource=OTHER)
                assert {name for name, one in again.bridge.plugins.items() if one.peer is not None} == {OTHER}
                await until(lambda: renamed.lists == 2, GUARD_S)


async def test_a_plugin_that_is_called_by_the_name_of_another_is_who_it_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.bridge.plugin.REDIAL_FIRST", 0.05)
    async with bridged(folder) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
        async with plugin(folder, start=False, resource=OTHER) as renamed:
            await renamed.serve()
            await until(lambda: renamed.listening == 1, GUARD_S)
            await renamed.register()
            await bridge.lists("a", "b", resource=OTHER)
            assert (bridge.one().peer, bridge.one().word.why) == (None, f"its socket is {OTHER}'s now")
            await until(lambda: renamed.listening == 1, GUARD_S)


async def test_who_registers_while_another_name_is_called_has_the_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.bridge.peer.OPTIONS_TIME", GUARD_S)
    async with bridged(folder) as bridge:
        async with plugin(folder):
            await bridge.lists("a", "b")
        await until(lambda: bridge.one().peer is None, GUARD_S)
        async with plugin(folder, start=False, resource=OTHER, stalls=True) as renamed:
            await renamed.serve()
            calling = asyncio.create_task(bridge.one().call())
            await until(lambda: len(renamed.stalled) == 1, GUARD_S)
            registering = asyncio.create_task(renamed.register())
            await until(lambda: len(renamed.stalled) == 2, GUARD_S)
            renamed.stalled[0].set()
            assert await calling
            renamed.stalled[1].set()
            await registering
            await bridge.lists("a", "b", resource=OTHER)
            assert bridge.one().peer is None


async def test_a_defect_of_a_part_is_the_end_of_the_bridge(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: memory.PluginsFile) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(memory.PluginsFile, "run", broken)
    async with bridged(folder, opens=False) as bridge, asyncio.timeout(GUARD_S):
        await bridge.bridge.lead()
        with pytest.raises(ZeroDivisionError):
            await bridge._following


async def test_one_that_hung_and_ends_its_stream_while_it_is_asked_is_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.bridge.plugin.PROBE_EVERY", 0.0)
    asked, answers = asyncio.Event(), asyncio.Event()

    async def answered() -> bool:
        asked.set()
        return await answers.wait()

    async with bridged(folder) as bridge, plugin(folder):
        await bridge.lists("a", "b")
        one = bridge.one()
        peer = one.peer
        assert peer is not None
        monkeypatch.setattr(peer, "answers", answered)
        one.went("it hangs", peer)
        await asked.wait()
        one._hung = None  # Its stream ended.
        answers.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert one.peer is None


async def test_what_an_earlier_stream_says_while_the_plugin_is_away_does_not_count(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder):
        await bridge.lists("a", "b")
        peer = bridge.one().peer
        assert peer is not None
        assert not bridge.one().is_old(peer, b"a list")
        bridge.one().went("it ended its stream")
        assert bridge.one().is_old(peer, b"another list")


async def test_a_socket_that_another_one_bound_meanwhile_gets_no_second_name(folder: Path) -> None:
    async with bridged(folder) as bridge, plugin(folder) as played:
        await bridge.lists("a", "b")
        played.path.unlink()
        with sockets.socket(sockets.AF_UNIX) as stranger:
            stranger.bind(str(played.path))
            assert bridge.one().keep() is None


def test_a_call_that_finds_nobody_waits_though_nobody_is_known_to_be_away() -> None:
    assert shield.left(shield.Word(TWO), shield.Limits(grace=60), 1000) == 60
