"""Random walks, and what they found before."""

from __future__ import annotations

import pytest

from tests.contract.edits import ROUNDS, moved
from tests.contract.node import GPU, Node
from tests.contract.walks import steps_of, walk


@pytest.mark.parametrize(("lived", "dies"), [(0.001, False), (2.0, False), (2.0, True)])
@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
async def test_a_device_of_a_forgotten_pod_is_given_last(node: Node, version: str, lived: float, dies: bool) -> None:
    one = await node.served(8, version=version)
    given = await node.admit("pod", count=4)
    await node.pass_time(lived)
    node.kill_kubelet()
    node.forget_checkpoint()
    if dies:
        one.kill()
        node.gateway()
    await node.start_kubelet(version)
    node.forgotten.add("pod")
    await node.allocatable_is(8)
    other = await node.admit("other", count=4)
    assert not {*given.devices[GPU]} & {*other.devices[GPU]}


@pytest.mark.parametrize("seed", range(1, 25))
def test_a_walk_breaks_no_promise(seed: int) -> None:
    broke = walk(seed, steps_of(seed))
    assert not broke, f"python -m tests.contract.walks --seed {seed} --walks 1\n{broke}"


@pytest.mark.parametrize("seed", range(1, 7))
def test_edits_under_running_pods_break_no_promise(seed: int) -> None:
    broke = moved(seed, ROUNDS)
    assert not broke, f"python -m tests.contract.edits --seed {seed}\n{broke}"
