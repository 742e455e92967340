"""A gateway that dies, is replaced, or is told something: pods keep their GPUs."""

from __future__ import annotations

import pytest

from tests.contract.node import GPU, Node


@pytest.mark.also_real
@pytest.mark.parametrize("version", ["1.10", "1.28", "1.37"])
async def test_what_was_given_survives_a_kill_of_the_gateway(node: Node, version: str) -> None:
    first = await node.served(8, version=version)
    given = await node.admit("pod")
    first.kill()
    second = await node.registered()
    await node.allocatable_is(8)
    for number in range(7):
        await node.admit(f"other-{number}")
    assert given.devices[GPU][0] not in str(second.said("withheld"))


@pytest.mark.also_real
@pytest.mark.parametrize("version", ["1.10", "1.28", "1.37"])
async def test_a_newer_gateway_takes_over(node: Node, version: str) -> None:
    first = await node.served(8, version=version)
    await node.admit("pod")
    await node.registered()
    await node.admit("other")
    assert await first.terminate() == 0
    await node.allocatable_is(8)
    await node.admit("third")


@pytest.mark.also_real
async def test_a_stopped_gateway_goes_on(node: Node) -> None:
    one = await node.served(8)
    one.process.stop()
    await node.pass_time(5)
    one.process.go_on()
    await node.admit("pod")


@pytest.mark.also_real
async def test_status_probes_and_metrics_say_what_is_so(node: Node) -> None:
    one = await node.served(8)
    await node.eventually(one.is_ready, "readiness")
    (resource,) = (await one.status())["resources"]
    assert (resource["name"], len(resource["devices"])) == (GPU, 8)
    assert (await one.metrics())[f'device_plugin_gateway_serving{{resource="{GPU}"}}'] == 1


@pytest.mark.also_real
async def test_a_cordoned_device_is_given_to_nobody(node: Node) -> None:
    one = await node.served(8)
    async with node.plugin() as plugin:
        ids = [device.id for device in await plugin.first_list()]
        await one.order("cordon", id=ids[0], reason="smells")
        await node.allocatable_is(7)
        await plugin.refused(ids[0])


@pytest.mark.also_real
async def test_hardware_that_is_lost_comes_back(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    await node.served(2)
    node.simulate({GPU: {"gpus": 1}})
    await node.allocatable_is(1)
    node.simulate({GPU: {"gpus": 2}})
    await node.allocatable_is(2)
