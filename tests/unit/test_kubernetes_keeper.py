"""Real gateways that keep what their node says at the API server: condition, start-up taint, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from devices.life.states import Entry, State
from devices.model import Device, Health
from devices.source import Hindrance
from gateway.cli import status
from gateway.configuration.settings import Settings
from gateway.kubernetes import keeper, ready, watch
from gateway.kubernetes import node as nodes
from gateway.kubernetes.client import Client
from gateway.kubernetes.keeper import Keeper
from gateway.kubernetes.node import OwnNode
from gateway.kubernetes.ready import CONDITION
from gateway.lab.plugins.played import PlayedPlugin
from gateway.lab.trials.scenarios import RESOURCE, Node, node
from gateway.registration.events import Phase
from gateway.tally import Confirmation
from gateway.telling.status import ResourceStatus
from tests.fakes.apiserver import Answer, ApiServer, Request
from tests.unit.kubernetes import api, authority, server, until

__all__ = ["api", "authority", "server"]

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


async def said(made: Node) -> ResourceStatus:
    [seen] = (await status.look(made.root / "state")).read
    [resource] = seen.resources
    return resource


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


async def test_what_another_plugin_has_is_neither_ready_nor_allocatable(server: ApiServer) -> None:
    """The kubelet of 1.37 goes on reading our stream, and gives what the other plugin listed."""
    async with kept(server, "--startup-taint", TAINT["key"], "--node-condition") as made:
        kubelet = await made.start_kubelet("1.37")
        await made.start_gateway()
        await kubelet.wait(RESOURCE, 2)
        async with asyncio.timeout(
            10
        ):  # Two looks show that the registration took; the next one is five minutes later.
            while ((await said(made)).stream_s or 0) < 1.5:
                pass
        other = PlayedPlugin(folder=made.socket_dir, resource=RESOURCE, devices=[Device("theirs")])
        await other.start()
        await kubelet.wait(RESOURCE, 1)
        shows(server, "1")
        await until(lambda: condition(server) == ("False", "NotVerified"))
        assert "another plugin may have the resource" in message(server)
        assert taints(server) == [OTHER, TAINT]
        resource = await said(made)
        assert (resource.phase, resource.listed, resource.healthy, resource.allocatable) == ("serving", 2, 2, 1)
        await other.stop()


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
        assert one._counts(ready.NodeReadiness(reason, ""), was=was) is written


class FakeTime:
    def __init__(self, now: float) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now


async def test_only_what_follows_a_write_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, told, rounds, sleep = list[float](), list[Callable[[object], None]](), asyncio.Queue[int](), asyncio.sleep
    one = keeper.Keeper.__new__(keeper.Keeper)
    one._own = cast("Any", SimpleNamespace(told=told))

    def steps() -> Sequence[Any]:
        one._wrote = one._wrote or not slept
        rounds.put_nowait(len(slept))
        return ()

    async def at_once(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(one, "_steps", steps)
    monkeypatch.setattr(keeper, "LOOK", look := 1000.0)
    monkeypatch.setattr(asyncio, "sleep", at_once)
    running = asyncio.ensure_future(one.run())
    for _ in range(3):
        await rounds.get()
        told[0](None)
    running.cancel()
    assert slept == [look, watch.FIRST, watch.FIRST]


# One look, with a gateway that isn't there.


def gateway(*, served: bool = True, elsewhere: bool = False, ill: int = 0, hindrances: Sequence[Hindrance] = ()) -> Any:
    """What the keeper asks a gateway: one resource of two devices."""
    gone = [State.PRESENT] * (2 - ill) + [State.UNHEALTHY] * ill
    entries = {
        f"GPU-{number}": Entry(
            Device(f"GPU-{number}", Health.HEALTHY if state is State.PRESENT else Health.UNHEALTHY), state
        )
        for number, state in enumerate(gone)
    }
    plugin = SimpleNamespace(
        name=RESOURCE,
        entries=entries,
        state=SimpleNamespace(phase=Phase.SERVING if served else Phase.WAITING),
        checked=Confirmation.HELD,
        standing_by_for="another" if elsewhere else None,
    )
    return SimpleNamespace(
        settings=Settings(node_name="n1", node_condition=True, node_events=True, startup_taint=TAINT["key"]),
        resources=[plugin],
        hindrances=lambda: hindrances,
        beliefs=SimpleNamespace(findings=lambda _: (), look_within=lambda _: None),
        token="abc",  # noqa: S106 - its name
    )


@pytest.fixture
def keep(server: ApiServer, api: Client) -> Callable[[Any], Keeper]:
    """Make a keeper for a gateway, on a node that has both taints and two GPUs allocatable."""
    server.put(NODE, spec={"taints": [OTHER, TAINT]}, status={"conditions": [], "allocatable": {RESOURCE: "2"}})

    def make(one: Any) -> Keeper:
        own = OwnNode(api, one.settings)
        own.last = msgspec.convert(server.objects[NODE], nodes.NodeObject)
        return Keeper(one, api, own)

    return make


async def test_a_node_that_is_ready_is_said_to_be_and_untainted(
    server: ApiServer, keep: Callable[[Any], Keeper]
) -> None:
    one = keep(gateway())
    await one._say_ready()
    await one._untaint()
    assert (condition(server), taints(server)) == (("True", "Ready"), [OTHER])


async def test_a_gateway_that_stands_by_leaves_the_node_to_the_other(
    server: ApiServer, keep: Callable[[Any], Keeper]
) -> None:
    one = keep(gateway(elsewhere=True, served=False))
    await one._say_ready()
    await one._untaint()
    await one._tell()
    one._gateway = gateway(elsewhere=True, served=False, ill=1)
    await one._tell()
    assert not server.asked("PATCH") + server.asked("POST")


async def test_a_gateway_that_serves_one_of_two_resources_says_how_the_node_is(
    server: ApiServer, keep: Callable[[Any], Keeper]
) -> None:
    both = gateway()
    both.resources += gateway(elsewhere=True).resources
    await keep(both)._say_ready()
    assert condition(server) == ("True", "Ready")


async def test_what_happened_while_another_gateway_served_is_no_news(
    server: ApiServer, keep: Callable[[Any], Keeper]
) -> None:
    one = keep(gateway())
    await one._tell()
    for now in (gateway(elsewhere=True), gateway(ill=1)):
        one._gateway = now
        await one._tell()
    assert not server.asked("POST")


@pytest.mark.parametrize(("held_up", "said"), [(True, ("False", "DevicesUnknown")), (False, ("True", "Ready"))])
async def test_a_source_that_is_only_slow_takes_no_readiness_away(
    server: ApiServer, keep: Callable[[Any], Keeper], *, held_up: bool, said: tuple[str, str]
) -> None:
    await keep(gateway(hindrances=[Hindrance("amd", "no driver", held_up)]))._say_ready()
    assert condition(server) == said


@pytest.mark.parametrize(("before", "said"), [("False", ("False", "NotRegistered")), ("True", ("True", "Ready"))])
async def test_why_a_node_is_not_ready_is_said_at_once(
    server: ApiServer, keep: Callable[[Any], Keeper], before: str, said: tuple[str, str]
) -> None:
    """Only readiness is taken away with patience."""

    def was(found: dict[str, Any]) -> None:
        reason = "Ready" if before == "True" else "NoDevices"
        found["status"]["conditions"] = [{"type": CONDITION, "status": before, "reason": reason}]

    server.change(NODE, was)
    await keep(gateway(served=False))._say_ready()
    assert condition(server) == said


async def test_a_condition_of_before_untaints_no_node_that_isnt_whole(
    server: ApiServer, keep: Callable[[Any], Keeper]
) -> None:
    def before(found: dict[str, Any]) -> None:
        found["status"] |= {"conditions": [{"type": CONDITION, "status": "True"}], "allocatable": {RESOURCE: "1"}}

    server.change(NODE, before)
    one = keep(gateway())
    await one._untaint()
    assert taints(server) == [OTHER, TAINT]


@pytest.mark.parametrize(("status", "waits"), [(403, 1), (500, 1), (422, 0), (400, 0)])
async def test_an_event_that_no_later_try_would_bring_is_left_out(
    server: ApiServer, keep: Callable[[Any], Keeper], status: int, waits: int
) -> None:
    async def no(answer: Answer, _: Request) -> None:
        await answer.no(status, "No")

    one = keep(gateway())
    await one._tell()
    one._gateway = gateway(ill=1)
    server.faults.append(no)
    await one._attempt(one._tell)
    assert len(one._queue.waiting) == waits


async def test_a_step_that_failed_isnt_taken_at_once_again(server: ApiServer, keep: Callable[[Any], Keeper]) -> None:
    one = keep(gateway())
    server.forbidden = "/status"
    for _ in range(5):
        await one._attempt(one._say_ready)
    assert len(server.asked("PATCH")) == 1
    await one._attempt(one._untaint)
    assert taints(server) == [OTHER], "another step is taken all the same"
    one._failed["_say_ready"] = (*one._failed["_say_ready"][:2], 0.0)
    server.forbidden = ""
    await one._attempt(one._say_ready)
    assert (condition(server), one._failed) == (("True", "Ready"), {}), "the next failure is the first one"
