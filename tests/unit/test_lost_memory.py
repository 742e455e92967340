"""A kubelet that lost its checkpoint gives a running pod's GPU away: what the gateway says of it, and for how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.lab.kubelets.kubelet import Demand
from gateway.lab.trials import scenarios
from gateway.lab.trials.scenarios import RESOURCE, Node
from gateway.wires import control

CHECKPOINT = "kubelet_internal_checkpoint"
OLD, NEW = Demand("training-0", RESOURCE, 4), Demand("thief-1", RESOURCE, 4)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with scenarios.node(demands=(OLD,)) as made:
        yield made


async def begin(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    await node.admit(OLD)
    await until(node, held=OLD)
    await written(node, lambda ledger: f'{OLD.pod}/main"' in ledger)


async def written(node: Node, holds: Callable[[str], bool]) -> None:
    """Wait until the state file is so: a disk takes its time, and a gateway that is killed meanwhile forgets."""
    file = node.root / "state" / "ledger.json"
    async with asyncio.timeout(20):
        while not holds(file.read_text()):  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0.05)


async def lose_memory(node: Node, version: str, *, knows: tuple[Demand, ...] = (OLD,)) -> None:
    """Start the kubelet anew without its checkpoint; it hears of these pods."""
    kubelet, node.kubelet = node.the_kubelet, None
    await kubelet.kill()
    await kubelet.close()
    (node.kubelet_dir / CHECKPOINT).unlink()
    node.pods = {one.pod: one for one in knows}
    await node.start_kubelet(version)


async def steal(node: Node) -> None:
    """Another pod takes all GPUs."""
    await node.the_kubelet.wait(RESOURCE, 4)
    await node.the_kubelet.admit(NEW.pod, RESOURCE, NEW.count)


async def ask(node: Node, **request: object) -> dict[str, object]:
    paths = control.sockets(node.root / "state")
    answers = await asyncio.gather(*(control.ask(path, request, 5) for path in paths), return_exceptions=True)
    return next(one for one in answers if isinstance(one, dict))


async def seen(node: Node) -> tuple[dict[str, int], dict[str, int], str]:
    """What the status says: how many GPUs each pod holds, how many differ in which way, and in which words."""
    status = (await ask(node, op="status"))["status"]
    assert isinstance(status, dict)
    resource = next(one for one in status["resources"] if one["name"] == RESOURCE)
    drift = {one["kind"]: one["devices"] for one in resource["drift"]}
    held = Counter(one["holder"].split("/")[-2] for one in resource["devices"] if one["holder"])
    return dict(held), drift, " ".join(one["words"] for one in resource["drift"])


async def until(node: Node, *, held: Demand | None = None, drift: dict[str, int] | None = None) -> str:
    """Wait until the status says so (``held``: who holds all); return the words."""
    found: tuple[dict[str, int], dict[str, int], str] | None = None
    try:
        async with asyncio.timeout(20):
            while True:
                found = await seen(node)
                if (held is None or found[0] == {held.pod: 4}) and (drift is None or found[1] == drift):
                    return found[2]
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"expected held={held}, drift={drift}, last seen {found}") from None


@pytest.mark.parametrize("version", ["1.37", "1.22", "1.10"])
async def test_it_is_said_until_an_operator_says_otherwise(node: Node, version: str) -> None:
    await begin(node, version)
    await lose_memory(node, version)
    await until(node, drift={"forgotten": 4})
    await steal(node)
    words = await until(node, held=NEW, drift={"doubled": 4})
    assert "perhaps in two pods at once" in words
    assert all(name in words for name in (OLD.pod, NEW.pod))
    await node.gateway.wait_for("mismatch", kind="doubled")
    for name in scenarios.device_ids({RESOURCE: 4})[RESOURCE]:
        await ask(node, op="forget", id=name)
    await until(node, held=NEW, drift={})


async def again(node: Node, how: str) -> None:
    """Put another gateway in the place of the one that runs."""
    if how == "end":
        await node.end_gateway()
    elif how == "crash":
        await node.gateway.kill()
    await node.start_gateway()
    await node.gateway.begun()
    if how == "handover":
        await node.the_kubelet.wait(RESOURCE, 4)
        await node.gateway.wait_for("registered")
        await node.gateways[0].terminate()
    await node.the_kubelet.wait(RESOURCE, 4)


@pytest.mark.parametrize("how", ["end", "crash", "handover"])
async def test_another_gateway_says_it_too(node: Node, how: str) -> None:
    """The first one has written it down: the second one sees nothing amiss in the kubelet's records."""
    await begin(node, "1.37")
    await lose_memory(node, "1.37")
    await until(node, drift={"forgotten": 4})
    await steal(node)
    await until(node, drift={"doubled": 4})
    await written(node, lambda ledger: '"forgotten":{"' in ledger)
    await again(node, how)
    words = await until(node, held=NEW, drift={"doubled": 4})
    assert all(name in words for name in (OLD.pod, NEW.pod))


async def test_nobody_looked_when_it_was_lost(node: Node) -> None:
    """No gateway runs when the kubelet loses its memory: the next one knows who held what."""
    await begin(node, "1.37")
    await node.gateway.kill()
    await lose_memory(node, "1.37")
    await node.start_gateway()
    await steal(node)
    assert OLD.pod in await until(node, held=NEW, drift={"doubled": 4})


async def test_pods_that_end_while_no_gateway_runs_have_ended(node: Node) -> None:
    """Nothing was lost: the same kubelet freed what they held."""
    await begin(node, "1.37")
    await node.gateway.kill()
    await node.the_kubelet.remove(OLD.pod)
    await node.start_gateway()
    await steal(node)
    await until(node, held=NEW, drift={})
    assert not node.gateway.lines("mismatch")


async def test_a_drained_node_loses_nothing(node: Node) -> None:
    """The last look was before its pods ended, and the new kubelet names others: they are gone."""
    await begin(node, "1.37")
    await node.the_kubelet.remove(OLD.pod)
    await lose_memory(node, "1.37", knows=(Demand("proxy-x1b2c", RESOURCE, 0), Demand("network-d3e4f", RESOURCE, 0)))
    await steal(node)
    await until(node, held=NEW, drift={})
    assert not node.gateway.lines("mismatch")
