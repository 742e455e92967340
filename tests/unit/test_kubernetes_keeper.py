"""Real gateways that keep what their node says at the API server: condition, start-up taint, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.kubernetes import keeper, ready
from gateway.kubernetes.ready import CONDITION
from gateway.lab.trials.scenarios import RESOURCE, Node, node
from tests.fakes.apiserver import ApiServer
from tests.unit.kubernetes import authority, server, until

__all__ = ["authority", "server"]

NODE = "/api/v1/nodes/n1"
TAINT = {"key": "example.com/starting", "effect": "NoSchedule"}
OTHER = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


@asynccontextmanager
async def kept(server: ApiServer, *options: str) -> AsyncIterator[Node]:
    """A node of two GPUs with both taints, whose gateways may write it."""
    server.put(NODE, spec={"taints": [OTHER, TAINT]}, status={"conditions": [{"type": "Ready", "status": "True"}]})
    async with node(gpus={RESOURCE: 2}) as made:
        made.options = ("--kubeconfig", str(server.kubeconfig(made.root / "kubeconfig")), "--node-name", "n1", *options)
        yield made


def shows(server: ApiServer, count: str) -> None:
    server.change(NODE, lambda found: found["status"].update(allocatable={RESOURCE: count}))


def condition(server: ApiServer) -> tuple[str, str]:
    found = server.objects[NODE]["status"]["conditions"]
    return next(((one["status"], one["reason"]) for one in found if one["type"] == CONDITION), ("", ""))


def message(server: ApiServer) -> str:
    found = server.objects[NODE]["status"]["conditions"]
    return next((str(one["message"]) for one in found if one["type"] == CONDITION), "")


def taints(server: ApiServer) -> list[Any]:
    found: list[Any] = server.objects[NODE]["spec"]["taints"]
    return found


def told(server: ApiServer) -> list[str]:
    return [found["reason"] for path, found in server.objects.items() if "/events/" in path]


async def test_the_node_is_ready_when_the_api_server_shows_all(server: ApiServer) -> None:
    async with kept(server, "--startup-taint", TAINT["key"], "--node-condition") as made:
        kubelet = await made.start_kubelet("1.37")
        await made.start_gateway()
        await kubelet.wait(RESOURCE, 2)
        await until(lambda: condition(server) == ("False", "NotAllocatable"))
        shows(server, "1")
        await asyncio.sleep(0.1)
        assert taints(server) == [OTHER, TAINT]
        shows(server, "2")
        await until(lambda: condition(server) == ("True", "Ready"))
        await until(lambda: taints(server) == [OTHER])
        assert {"type": "Ready", "status": "True"} in server.objects[NODE]["status"]["conditions"]


async def test_a_taint_that_came_again_goes_again_and_conflicts_do_no_harm(server: ApiServer) -> None:
    async with kept(server, "--startup-taint", TAINT["key"]) as made:
        kubelet = await made.start_kubelet("1.37")
        await made.start_gateway()
        await kubelet.wait(RESOURCE, 2)
        shows(server, "2")
        await until(lambda: taints(server) == [OTHER])
        server.change(NODE, lambda found: found["spec"].update(taints=[TAINT, OTHER]))
        await until(lambda: taints(server) == [OTHER])
        assert condition(server) == ("", ""), "nobody asked for the condition"


async def test_a_gpu_that_falls_ill_and_recovers_is_told_and_the_server_may_be_away(server: ApiServer) -> None:
    async with kept(server, "--node-events") as made:
        kubelet = await made.start_kubelet("1.37")
        gateway = await made.start_gateway()
        await kubelet.wait(RESOURCE, 2)
        await asyncio.sleep(keeper.LOOK)  # What is so at the first look is no news.
        await server.stop()
        made.set_health({RESOURCE: [0]})
        await kubelet.wait(RESOURCE, 1)
        await gateway.wait_for("the node can't be written at the API server")
        await server.start()
        await until(lambda: told(server) == ["GPUUnhealthy"])
        made.set_health({})
        await until(lambda: told(server) == ["GPUUnhealthy", "GPURecovered"])
        assert condition(server) == ("", "")


async def test_what_one_feature_isnt_allowed_keeps_no_other(server: ApiServer) -> None:
    """Without the right to create events, the condition is written all the same."""
    server.forbidden = "/events"
    async with kept(server, "--node-events", "--node-condition") as made:
        kubelet = await made.start_kubelet("1.37")
        gateway = await made.start_gateway()
        await kubelet.wait(RESOURCE, 2)
        shows(server, "2")
        await until(lambda: condition(server) == ("True", "Ready"))
        made.set_health({RESOURCE: [0]})
        await gateway.wait_for("the node can't be written at the API server")
        await until(lambda: condition(server)[0] == "True" and "(1)" in message(server))


@pytest.mark.parametrize("refusal", [403, 500])
async def test_a_server_that_refuses_all_changes_nothing_for_the_kubelet(server: ApiServer, refusal: int) -> None:
    async def no(answer: Any, _: object) -> None:
        await answer.no(refusal, "No")

    async with kept(server, "--node-events", "--node-condition", "--startup-taint", "a") as made:
        server.faults.extend([no] * 1000)
        kubelet = await made.start_kubelet("1.37")
        gateway = await made.start_gateway()
        await kubelet.wait(RESOURCE, 2)
        await gateway.wait_for("the API server can't be watched")
        made.set_health({RESOURCE: [0]})
        await kubelet.wait(RESOURCE, 1)
        assert gateway.alive


@pytest.mark.parametrize(
    ("steps"),
    [
        [(0, "NotRegistered", False, True)],
        [(0, "NotRegistered", True, False), (9.9, "NotRegistered", True, False), (10, "NotRegistered", True, True)],
        [(0, "NotRegistered", True, False), (9, "Ready", True, True), (10, "NotRegistered", True, False)],
    ],
    ids=["never was ready", "no longer ready", "a kubelet's restart"],
)
def test_readiness_is_taken_away_only_where_it_stays_away(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[float, str, bool, bool]]
) -> None:
    """Each step: when, the reason, whether the node was ready, and whether that is written."""
    one = keeper.Keeper.__new__(keeper.Keeper)
    one._unready_since = None
    for at, reason, was, written in steps:
        monkeypatch.setattr(keeper, "time", FakeTime(1000 + at))
        assert one._counts(ready.Verdict(reason, ""), was=was) is written


class FakeTime:
    def __init__(self, now: float) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now
