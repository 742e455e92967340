"""Where the bridge meets what else happens on a node: rivals, renames, own devices, a second gateway, a relabelled folder."""

from __future__ import annotations

import asyncio
import socket as sockets
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from devices.combined import Combined
from devices.source import Inventory, hear
from gateway.bridge import memory
from gateway.bridge.calls import BridgedResource
from gateway_lab.waiting import until
from tests.unit.bridging import GUARD_S, NIC, bridged, plugin

OTHER = "other.example/fpga"


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
