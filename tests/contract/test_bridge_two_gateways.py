"""Plugins behind two gateways on one node: the one that leads has them, and they notice no more of a handover than of a restart."""

from __future__ import annotations

import asyncio

import pytest

from devices.model import Device, Health
from tests.contract.bridged import NIC, OTHER, Neighbour, behind, bridged, bridging, socket_of
from tests.contract.node import GPU, VERSION, Gateway, Node, gpus


async def led(node: Node, version: str = VERSION) -> tuple[Gateway, Gateway, Neighbour]:
    """Return a gateway that stands by, one that leads, and a plugin that registers once."""
    older, plugin = await bridged(node, version=version)
    newer = bridging(node)
    await node.until(lambda: newer.said("registered", resource=NIC), "its registration")
    return older, newer, plugin


@pytest.mark.parametrize("version", ["1.20", "1.34", "1.37"])
async def test_a_plugin_goes_to_the_next_gateway_and_back_with_one_stream_at_a_time(node: Node, version: str) -> None:
    node.simulate(gpus(0, 1))
    older, newer, plugin = await led(node, version)
    await node.admit("first", NIC)
    await node.pass_time(5)
    await plugin.change(*map(Device, "abcd"))
    await node.allocatable_is(4, NIC)
    ending, seen = asyncio.ensure_future(newer.terminate()), set()
    while not ending.done():
        await asyncio.sleep(0.001)
        seen.add(node.allocatable(NIC))
    await node.until(lambda: older.said("standing by") and node.allocatable(NIC) == 4, "the older one")
    await node.admit("second", NIC)
    assert version != "1.37" or seen == {4}
    assert (plugin.played.listening, plugin.played.most_listening) == (1, 1)
    await plugin.change(Device("a", Health.UNHEALTHY), *map(Device, "bcd"))
    await node.allocatable_is(3, NIC)
    third = bridging(node)
    await node.until(lambda: third.said("registered", resource=NIC), "its registration")
    await Neighbour(node, resource=OTHER, endpoint="other.sock").start()
    await node.allocatable_is(2, OTHER)
    await node.admit("third", NIC)
    await node.admit("gpu", GPU)
    assert (plugin.played.listening, plugin.played.most_listening) == (1, 1)
    await node.truthful()


@pytest.mark.parametrize("version", ["1.28", "1.37"])
async def test_a_gateway_that_leads_is_killed_and_the_next_one_has_the_plugin(node: Node, version: str) -> None:
    older, newer, plugin = await led(node, version)
    await node.pass_time(5)
    newer.kill()
    await node.until(lambda: len(older.said("registered", resource=NIC)) == 2, "its registration")
    await node.admit("pod", NIC)
    await node.pass_time(5)
    assert (await behind(older))["state"] == "live"
    assert (plugin.played.listening, plugin.played.most_listening) == (1, 1)
    await node.truthful()


async def test_a_gateway_that_stands_by_shows_the_plugins_and_calls_none(node: Node) -> None:
    older, _, plugin = await led(node)
    before = socket_of(node.bridge)
    await plugin.change(Device("a", Health.UNHEALTHY), Device("c"))
    late = Neighbour(node, resource=OTHER, endpoint="late.sock", devices=(Device("x"),))
    await late.start()
    await node.pass_time(5)
    assert (await older.states(NIC), await older.states(OTHER)) == (
        {"a": "unhealthy", "c": "healthy"},
        {"x": "healthy"},
    )
    assert (await behind(older))["state"] == "live"
    plugin.kill()
    await node.pass_time(5)
    assert (await behind(older))["state"] == "shielded"
    assert (plugin.played.lists, late.played.lists, socket_of(node.bridge)) == (2, 1, before)


async def test_room_is_made_for_a_newer_gateway_when_the_plugin_has_answered(node: Node) -> None:
    _, plugin = await bridged(node)
    await node.pass_time(3)
    plugin.played.free.clear()
    admitted = asyncio.ensure_future(node.admit("pod", NIC))
    await node.until(lambda: plugin.allocated, "the call")
    newer = bridging(node)
    await node.pass_time(20)
    assert not newer.said("registered")
    plugin.played.free.set()
    await admitted
    await node.until(lambda: newer.said("registered"), "its registration", 60)
    await node.admit("other", NIC)
    assert len(plugin.allocated) == 2
    await node.truthful()


async def test_a_newer_gateway_that_goes_while_room_is_made_leaves_the_plugin_to_the_older_one(node: Node) -> None:
    older, plugin = await bridged(node)
    await node.pass_time(3)
    node.disk.hang(writers=True)
    newer = bridging(node)
    await node.until(lambda: older.said("leader", stage="yielding"), "the handover")
    await node.pass_time(0.5)
    assert plugin.played.listening == 0
    newer.kill()
    node.disk.go_on()
    await node.pass_time(2)
    await node.admit("pod", NIC)
    assert (plugin.played.listening, plugin.played.most_listening) == (1, 1)
    await node.truthful()
