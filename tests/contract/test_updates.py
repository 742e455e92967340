"""What an update that sees none of a node's devices waits for, and what it doesn't: a node must neither be lost nor hold up the others."""

from __future__ import annotations

import json
from typing import Final

import pytest

from tests.contract.hardware import Nvidia
from tests.contract.node import GPU, Gateway, Node, gpus

BESIDE: Final = pytest.mark.parametrize("beside", [True, False], ids=["maxSurge 1", "maxUnavailable 1"])
SHARED: Final = (
    f"version: v1\nsharing: {{timeSlicing: {{renameByDefault: true, resources: [{{name: {GPU}, replicas: 2}}]}}}}\n"
)


def blind(node: Node) -> tuple[str, ...]:
    """Give the options of a gateway that sees no GPU."""
    profile = node.folder / "blind.json"
    profile.write_text(json.dumps({"resources": gpus()}))
    return ("--simulate", str(profile))


async def goes_on(node: Node, one: Gateway) -> None:
    """Wait until an update goes on to the next node, and see that it may."""
    await node.eventually(one.is_ready, "readiness")
    await node.pass_time(60)
    assert await one.is_ready()


@pytest.mark.parametrize(("function", "code"), [("nvmlInit", 999), ("nvmlDeviceGetHandleByIndex", 15)])
@BESIDE
async def test_a_node_that_served_nothing_stops_no_update(
    node: Node, nvidia: Nvidia, function: str, code: int, *, beside: bool
) -> None:
    older = await nvidia.served()
    for number in range(4):
        nvidia.event(number, 79)
    await node.allocatable_is(0)
    if not beside:
        await older.terminate()
    nvidia.fails(function, code)
    await goes_on(node, nvidia.gateway("--fail-on-init-error=false"))


async def test_what_served_before_a_reboot_is_not_waited_for(node: Node) -> None:
    await node.served(8)
    await node.pass_time(5)
    node.reboot()
    await node.start_kubelet()
    await goes_on(node, node.gateway(*blind(node)))


@BESIDE
async def test_what_a_setting_withdrew_is_not_waited_for(node: Node, nvidia: Nvidia, *, beside: bool) -> None:
    older = await nvidia.served()
    if not beside:
        await older.terminate()
    file = node.folder / "shared.yaml"
    file.write_text(SHARED)
    await goes_on(node, nvidia.gateway("--config-file", str(file)))
    await node.allocatable_is(8, f"{GPU}.shared")


async def test_what_an_operator_left_out_is_not_waited_for(node: Node) -> None:
    await node.served(2)
    await goes_on(node, node.gateway("--exclude-devices", "0,1"))
