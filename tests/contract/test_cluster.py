"""What a gateway says at the API server and reads there, whatever happens to that server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import h11
import pytest
import trustme

from tests.contract import clock
from tests.contract.cluster import AT, NAME, Cluster
from tests.contract.node import GPU, Node
from tests.contract.test_sharing import configure, sliced
from tests.fakes.apiserver import TOKEN, Answer, Request

A, B = "GPU-a", "GPU-b"
TAINT = "example.com/starting"
CONDITION = "nvidia.com/GPUReady"
LABEL = "nvidia.com/device-plugin.config"
EVENTS = "/api/v1/namespaces/default/events"


def simulate(node: Node, *unhealthy: str) -> None:
    """Have two GPUs."""
    gpus = [{"uuid": one} for one in (A, B)]
    node.simulate({GPU: {"gpus": gpus, "unhealthy": dict.fromkeys(unhealthy, "fell off the bus")}})


@contextlib.asynccontextmanager
async def cluster_of(node: Node, *, reports: bool = True) -> AsyncGenerator[Cluster]:
    """Give a node with two GPUs and a kubelet; without ``reports`` the API server hears of devices only from the row."""
    simulate(node)
    async with Cluster(node) as cluster:
        if reports:
            await cluster.start_kubelet()
        else:
            await node.start_kubelet()
        yield cluster


@pytest.fixture
def cluster(node: Node) -> contextlib.AbstractAsyncContextManager[Cluster]:
    return cluster_of(node)


def condition(cluster: Cluster) -> str:
    """Return the condition's status and reason; '' if there is none."""
    found = cluster.server.objects[AT]["status"].get("conditions", [])
    return next((f"{one['status']} {one['reason']}" for one in found if one["type"] == CONDITION), "")


async def condition_is(cluster: Cluster, wanted: str, seconds: float = 60) -> None:
    """Wait until the condition says so."""
    await cluster.node.until(lambda: condition(cluster) == wanted, f"{wanted} instead of {condition(cluster)}", seconds)


async def test_the_node_is_ready_when_the_api_server_shows_all_its_gpus(node: Node) -> None:
    async with cluster_of(node, reports=False) as cluster:
        cluster.gateway("--node-condition")
        await node.allocatable_is(2)
        await condition_is(cluster, "False NotAllocatable")
        cluster.tell({GPU: "1"})
        await node.pass_time(20)
        assert condition(cluster) == "False NotAllocatable"
        cluster.tell({GPU: "2"})
        await condition_is(cluster, "True Ready", 5)
        cluster.tell({GPU: "1"})  # The kubelet tells of a change up to ten seconds late.
        await node.pass_time(30)
        assert condition(cluster) == "True Ready"
        cluster.tell({GPU: "0"})
        await node.pass_time(7)
        assert condition(cluster) == "True Ready"
        await condition_is(cluster, "False NotAllocatable", 10)


async def test_thousands_of_devices_are_counted_as_kubernetes_spells_them(node: Node) -> None:
    async with cluster_of(node, reports=False) as cluster:
        cluster.gateway("--node-condition", *configure(node, sliced({"name": "gpu", "replicas": 1000})))
        await node.allocatable_is(2000)
        cluster.tell({GPU: "1k"})
        await condition_is(cluster, "False NotAllocatable")
        cluster.tell({GPU: "2k"})
        await condition_is(cluster, "True Ready")


async def test_a_restart_of_kubelet_or_gateway_takes_no_readiness_away(node: Node, cluster: Cluster) -> None:
    cluster.gateway("--node-condition")
    await condition_is(cluster, "True Ready")
    written = len(cluster.server.asked("PATCH"))
    await cluster.start_kubelet()
    await node.pass_time(30)
    cluster.restart_gateway("--node-condition")
    await node.pass_time(30)
    assert condition(cluster) == "True Ready"
    assert len(cluster.server.asked("PATCH")) == written


async def test_the_condition_says_why(node: Node, cluster: Cluster) -> None:
    cluster.gateway("--node-condition")
    await condition_is(cluster, "True Ready")
    simulate(node, A, B)
    await condition_is(cluster, "False NoHealthyDevices")
    simulate(node, A)
    await condition_is(cluster, "True Ready")
    node.kill_kubelet()
    await condition_is(cluster, "False NotRegistered")


async def test_a_node_whose_kubelet_gives_fewer_than_are_healthy_is_not_ready(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway("--node-condition")
    await condition_is(cluster, "True Ready")
    node.fault(reads_no_lists=True)
    await one.order("cordon", id=B, reason="smells")
    await node.pass_time(20)
    await one.order("uncordon", id=B)  # The kubelet never hears of it.
    await condition_is(cluster, "False NotVerified", 400)
    node.fault()
    await condition_is(cluster, "True Ready", 400)


async def test_why_a_node_is_not_ready_is_said_at_once(node: Node) -> None:
    async with cluster_of(node, reports=False) as cluster:
        before = [{"type": CONDITION, "status": "False", "reason": "OfBefore"}]
        cluster.server.change(AT, lambda one: one.update(status={"conditions": before}))
        cluster.gateway("--node-condition")
        await node.allocatable_is(2)
        await condition_is(cluster, "False NotAllocatable", 6)
        await node.pass_time(60)
        node.kill_kubelet()
        await condition_is(cluster, "False NotRegistered", 6)


async def test_other_words_of_the_condition_are_no_transition(node: Node) -> None:
    def found(cluster: Cluster) -> dict[str, Any]:
        conditions = cluster.server.objects[AT]["status"].get("conditions", [])
        return next((one for one in conditions if one["type"] == CONDITION), {})

    async with cluster_of(node) as cluster:
        cluster.gateway("--node-condition")
        await condition_is(cluster, "True Ready")
        before = found(cluster)
        assert "(2)" in before["message"]
        await node.pass_time(30)
        simulate(node, A)
        await node.until(lambda: "(1)" in found(cluster)["message"], "the other words")
        assert found(cluster)["lastTransitionTime"] == before["lastTransitionTime"]
        await node.pass_time(30)
        simulate(node, A, B)
        await condition_is(cluster, "False NoHealthyDevices")
        assert found(cluster)["lastTransitionTime"] > before["lastTransitionTime"]


async def test_the_startup_taint_goes_when_all_gpus_are_allocatable_and_no_other_one(node: Node) -> None:
    async with cluster_of(node, reports=False) as cluster:
        others = [{"key": key, "effect": "NoSchedule", "value": "x"} for key in ("a", "b")]
        taints = [others[0], {"key": TAINT, "effect": "NoSchedule"}, others[1], {"key": TAINT, "effect": "NoExecute"}]
        cluster.server.change(AT, lambda one: one.update(spec={"taints": taints}))
        cluster.gateway("--startup-taint", TAINT)
        await node.allocatable_is(2)
        cluster.tell({GPU: "1"})
        await node.pass_time(30)
        assert cluster.server.objects[AT]["spec"]["taints"] == taints
        cluster.tell({GPU: "2"})
        await node.until(lambda: cluster.server.objects[AT]["spec"]["taints"] == others, "the taint to go", 5)
        cluster.server.change(AT, lambda one: one["spec"]["taints"].append({"key": TAINT, "effect": "NoSchedule"}))
        await node.until(lambda: cluster.server.objects[AT]["spec"]["taints"] == others, "the taint to go again", 5)


def events(cluster: Cluster) -> list[str]:
    """Return the reasons of the node's events, each with its GPU."""
    found = (one for path, one in cluster.server.objects.items() if path.startswith(EVENTS))
    return [f"{one['reason']} {one['message'].split()[1]}" for one in found]


async def test_events_tell_once_what_becomes_of_a_gpu(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway("--node-events")
    await node.allocatable_is(2)
    await node.pass_time(5)
    for _ in range(3):
        simulate(node, A)
        await node.allocatable_is(1)
        await node.pass_time(5)
        simulate(node)
        await node.allocatable_is(2)
        await node.pass_time(5)
    assert events(cluster) == [f"GPUUnhealthy {A}", f"GPURecovered {A}"]
    assert [found["type"] for path, found in cluster.server.objects.items() if "/events/" in path] == [
        "Warning",
        "Normal",
    ]
    await one.order("cordon", id=B, reason="smells")
    await node.pass_time(5)
    one.kill()
    cluster.gateway("--node-events")
    await node.pass_time(20)
    assert events(cluster)[2:] == [f"GPUCordoned {B}"]
    await node.pass_time(300)
    simulate(node, A)
    await node.until(lambda: len(events(cluster)) == 4, "the same of the same GPU later")


async def test_a_gpu_that_comes_ill_is_told_and_a_newly_shared_one_not_again(node: Node, cluster: Cluster) -> None:
    cluster.gateway("--node-events", *configure(node, {"version": "v1"}))
    await node.allocatable_is(2)
    gpus = [{"uuid": one} for one in (A, B, "GPU-c")]
    node.simulate({GPU: {"gpus": gpus, "unhealthy": {"GPU-c": "fell off the bus"}}})
    await node.until(lambda: events(cluster) == ["GPUUnhealthy GPU-c"], "what became of the new one")
    await node.pass_time(400)
    configure(node, sliced({"name": "gpu", "replicas": 2}))
    await node.allocatable_is(4)
    await node.pass_time(20)
    assert events(cluster) == ["GPUUnhealthy GPU-c"]


async def test_that_the_kubelets_records_differ_is_told_once(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway("--node-events")
    await node.allocatable_is(2)
    node.fault(reads_no_lists=True)
    await one.order("cordon", id=A, reason="smells")
    await node.allocatable_is(1)
    await node.pass_time(20)
    await one.order("uncordon", id=A)
    await node.pass_time(400)
    simulate(node, B)
    await node.pass_time(400)
    found = [one for path, one in cluster.server.objects.items() if path.startswith(EVENTS)]
    told = [one["message"] for one in found if one["reason"] == "GPURecordsDiffer"]
    assert len(told) == len(set(told)) == 2  # Another time for what differs otherwise.


async def test_many_events_at_once_are_told_in_part_and_that_is_said(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway("--node-events")
    uuids = [f"GPU-{number}" for number in range(16)]
    many = {"gpus": [{"uuid": uuid} for uuid in uuids]}
    node.simulate({GPU: many})
    await node.allocatable_is(16)
    node.simulate({GPU: many | {"unhealthy": dict.fromkeys(uuids, "no power")}})
    await node.allocatable_is(0)
    await node.pass_time(20)
    assert one.said("too many events: some were left out", events=6)
    assert len(events(cluster)) == 10


async def refuse(answer: Answer, _: Request) -> None:
    """Refuse what no later try would bring."""
    await answer.no(422, "Invalid")


async def test_what_the_api_server_does_not_take_holds_up_nothing_else(node: Node, cluster: Cluster) -> None:
    one = cluster.gateway("--node-events", "--node-condition")
    await condition_is(cluster, "True Ready")
    cluster.server.faults.append(refuse)
    await one.order("cordon", id=B, reason="smells")
    await node.pass_time(5)
    await one.order("uncordon", id=B)
    await node.until(lambda: events(cluster) == [f"GPUUncordoned {B}"], "the next event")
    cluster.server.forbidden = EVENTS
    await one.order("cordon", id=A, reason="smells")
    simulate(node, A, B)
    await condition_is(cluster, "False NoHealthyDevices")
    await cluster.server.stop()
    simulate(node)
    await node.pass_time(60)
    cluster.server.forbidden = ""
    await cluster.server.start()
    await condition_is(cluster, "True Ready", 40)
    await node.until(lambda: f"GPUUnhealthy {B}" in events(cluster), "what happened meanwhile")


async def test_what_only_a_source_complains_of_takes_no_readiness_away(node: Node, cluster: Cluster) -> None:
    cluster.gateway("--node-condition")
    await condition_is(cluster, "True Ready")
    right = node.profile.read_text()
    node.profile.write_text("{")
    await node.pass_time(60)
    assert condition(cluster) == "True Ready"
    node.gateways[-1].kill()
    cluster.gateway("--node-condition")  # This one sees nothing at all.
    await condition_is(cluster, "False DevicesUnknown")
    node.profile.write_text(right)
    await condition_is(cluster, "True Ready")


async def test_a_gateway_that_stands_by_leaves_the_node_to_the_other(node: Node, cluster: Cluster) -> None:
    options = ("--node-condition", "--node-events", "--startup-taint", TAINT)
    cluster.gateway(*options)
    await condition_is(cluster, "True Ready")
    cluster.gateway(*options)
    await node.pass_time(20)
    serving, *_ = [each for each in node.gateways if (await each.status())["resources"][0]["phase"] == "serving"]
    written = len(cluster.server.asked("PATCH"))
    await node.pass_time(60)
    assert len(cluster.server.asked("PATCH")) == written
    simulate(node, A)
    await node.allocatable_is(1)
    await node.pass_time(20)
    assert events(cluster) == [f"GPUUnhealthy {A}"]
    serving.kill()
    await node.allocatable_is(1)
    await node.pass_time(30)
    assert events(cluster) == [f"GPUUnhealthy {A}"]  # What happened before it served is no news.
    assert condition(cluster) == "True Ready"


async def test_a_condition_of_before_untaints_no_node_that_is_not_whole(node: Node) -> None:
    async with cluster_of(node, reports=False) as cluster:
        before = [{"type": CONDITION, "status": "True", "reason": "Ready"}]
        taints = [{"key": TAINT, "effect": "NoSchedule"}]
        cluster.server.change(AT, lambda one: one.update(spec={"taints": taints}, status={"conditions": before}))
        cluster.gateway("--startup-taint", TAINT, "--node-condition")
        await node.allocatable_is(2)
        cluster.tell({GPU: "1"})
        await node.pass_time(60)
        assert cluster.server.objects[AT]["spec"]["taints"] == taints


async def test_without_a_feature_that_needs_it_the_api_server_is_not_asked(node: Node, cluster: Cluster) -> None:
    cluster.gateway()
    await node.allocatable_is(2)
    await node.pass_time(60)
    assert not cluster.server.requests


# -- the label that chooses the configuration -------------------------------------------------------------------------


def choose(cluster: Cluster, name: str | None) -> None:
    """Set the node's label."""
    labels = {} if name is None else {LABEL: name}
    cluster.server.change(AT, lambda one: one["metadata"].update(labels=labels))


def choices(node: Node, *names: str) -> list[str]:
    """Write configuration files, each of which shares each GPU as often as its name has letters; return the options."""
    folder = node.folder / "choices"
    folder.mkdir(exist_ok=True)
    for name in names:
        shared = {"timeSlicing": {"resources": [{"name": GPU, "replicas": len(name)}]}}
        (folder / name).write_text(json.dumps({"version": "v1", "sharing": shared}))
    node.shared = (GPU,)
    return ["--config-file-srcdir", str(folder)]


async def test_the_nodes_label_chooses_the_configuration(node: Node, cluster: Cluster) -> None:
    options = choices(node, "two", "three")
    choose(cluster, "two")
    cluster.gateway(*options)
    await node.allocatable_is(6)
    choose(cluster, "three")
    await node.allocatable_is(10)
    choose(cluster, "fourth")  # There is no such file yet.
    await node.allocatable_after(60, 10)
    choices(node, "fourth")
    await node.allocatable_is(12)


async def test_without_the_api_server_the_label_of_before_counts(node: Node, cluster: Cluster) -> None:
    options = choices(node, "two", "three")
    choose(cluster, "three")
    one = cluster.gateway(*options, "--default-config", "two")
    await node.allocatable_is(10)
    await cluster.server.stop()
    await one.terminate()
    two = cluster.gateway(*options, "--default-config", "two")
    await node.until(lambda: two.said("registered"), "its registration")
    await node.allocatable_after(60, 10)
    await two.terminate()
    choose(cluster, None)
    await cluster.server.start()
    cluster.gateway(*options, "--default-config", "two")
    await node.allocatable_is(6)


# -- an API server that is not well -----------------------------------------------------------------------------------


async def followed(node: Node, cluster: Cluster, count: int, seconds: float = 60) -> None:
    """See that another label is followed."""
    choose(cluster, "x" * count)
    await node.allocatable_is(2 * count, seconds=seconds)


@contextlib.asynccontextmanager
async def followed_by(node: Node) -> AsyncGenerator[Cluster]:
    """Give a cluster whose node's label a gateway follows."""
    async with cluster_of(node) as cluster:
        options = choices(node, *("x" * number for number in range(1, 9)))
        choose(cluster, "xx")
        cluster.gateway(*options)
        await node.allocatable_is(4)
        yield cluster


async def gone(cluster: Cluster) -> None:
    """Cut all, for a while."""
    await cluster.server.stop()
    await cluster.node.pass_time(20)
    await cluster.server.start()


async def expired(cluster: Cluster) -> None:
    """Forget all versions, and cut the watches."""
    await cluster.server.stop()
    cluster.server.forget()
    await cluster.server.start()


async def expires_later(cluster: Cluster) -> None:
    """Have a watch end with the word that its version is too old."""
    error = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}

    async def end(answer: Answer, request: Request) -> None:
        if not request.watches:
            await cluster.server.answer(answer, request)
            return
        cluster.server.forget()
        cluster.server.faults.clear()
        await answer.head(200, {"Transfer-Encoding": "chunked"})
        await answer.event("ERROR", error)

    cluster.server.faults.extend([end] * 9)
    await gone(cluster)


async def busy(cluster: Cluster) -> None:
    """Answer with errors, for a while."""

    async def refuse_all(answer: Answer, _: Request) -> None:
        await answer.no(503, "ServiceUnavailable", {"Retry-After": "1"})

    cluster.server.always = refuse_all
    await gone(cluster)
    await cluster.node.pass_time(30)
    cluster.server.always = None


async def nonsense(cluster: Cluster) -> None:
    """Answer what nobody can read, for a while."""

    async def garble(answer: Answer, request: Request) -> None:
        await (answer.raw(b"HTTP/9 what\r\n\r\n") if request.watches else answer.json(200, ["no node"]))

    cluster.server.always = garble
    await gone(cluster)
    await cluster.node.pass_time(30)
    cluster.server.always = None


async def hanging(cluster: Cluster) -> None:
    """Answer nothing, for a while, and what was asked then never."""

    async def never(_answer: Answer, _: Request) -> None:
        await asyncio.Event().wait()

    cluster.server.always = never
    await gone(cluster)
    await cluster.node.pass_time(60)
    cluster.server.always = None


async def bookmarked(cluster: Cluster) -> None:
    """Let the version that the watch began with become too old, but not that of a bookmark."""
    cluster.server.forget()
    cluster.server.bookmark()
    await cluster.node.pass_time(1)  # Until it is told.
    cluster.server.oldest = cluster.server.version
    await gone(cluster)


def _watch_ends_with(play: Callable[[Answer], Awaitable[None]]) -> Callable[[Cluster], Awaitable[None]]:
    """Have the next watch end in this way."""

    async def play_it(cluster: Cluster) -> None:
        async def end(answer: Answer, request: Request) -> None:
            if not request.watches:
                await cluster.server.answer(answer, request)
                return
            cluster.server.faults.clear()
            await answer.head(200, {"Transfer-Encoding": "chunked"})
            await play(answer)

        cluster.server.faults.extend([end] * 9)
        await gone(cluster)

    return play_it


async def _failing(answer: Answer) -> None:
    await answer.event("ERROR", {"kind": "Status", "code": 500, "message": "etcd"})
    await asyncio.Event().wait()


async def _garbled(answer: Answer) -> None:
    await answer.send(h11.Data(data=b"{]\n"))
    await asyncio.Event().wait()


async def _of_a_later_release(answer: Answer) -> None:
    await answer.event("PAUSED", {"metadata": {}})
    await answer.send(h11.EndOfMessage())


async def _without_end(answer: Answer) -> None:
    while True:
        await answer.send(h11.Data(data=b"x" * 65536))


async def _over_at_once(answer: Answer) -> None:
    await answer.send(h11.EndOfMessage())


ENDS = {
    play.__name__.strip("_"): _watch_ends_with(play)
    for play in (_failing, _garbled, _of_a_later_release, _without_end, _over_at_once)
}


@pytest.mark.parametrize(
    "what",
    [
        gone,
        expired,
        expires_later,
        busy,
        nonsense,
        hanging,
        bookmarked,
        *(pytest.param(ENDS[it], id=it) for it in ENDS),
    ],
)
async def test_a_change_is_seen_after(node: Node, what: Any) -> None:
    async with followed_by(node) as cluster:
        await what(cluster)
        await followed(node, cluster, 3)
        cluster.server.requests.clear()
        await node.pass_time(200)
        asked = [(one.method, one.path, one.query) for one in cluster.server.requests]
        assert len(asked) < 16, f"it asks too often: {asked}"
        await followed(node, cluster, 4)


async def test_after_a_bookmark_nothing_is_asked_for_again(node: Node) -> None:
    async with followed_by(node) as cluster:
        cluster.server.requests.clear()
        await bookmarked(cluster)
        await followed(node, cluster, 3)
        assert not [(one.method, one.path) for one in cluster.server.requests if not one.watches]


async def test_a_server_that_was_away_for_long_is_found_within_seconds(node: Node) -> None:
    async with followed_by(node) as cluster:
        await cluster.server.stop()
        await node.pass_time(300)
        await cluster.server.start()
        await followed(node, cluster, 3, 5)


async def test_a_server_that_says_when_it_wants_to_be_asked_again_is_asked_then(node: Node) -> None:
    async with followed_by(node) as cluster:

        async def later(answer: Answer, _: Request) -> None:
            await answer.no(429, "TooManyRequests", {"Retry-After": "25"})

        cluster.server.always = later
        await cluster.server.stop()
        await cluster.server.start()
        await node.until(lambda: len(cluster.server.requests) > 0, "a question")
        await node.pass_time(5)
        asked = len(cluster.server.requests)
        await node.pass_time(18)
        assert len(cluster.server.requests) == asked
        cluster.server.always = None
        await followed(node, cluster, 3)


async def test_a_watch_on_which_nothing_comes_any_more_is_left(node: Node) -> None:
    async with followed_by(node) as cluster:
        cluster.mute()
        choose(cluster, "xxx")
        await node.allocatable_after(60, 4)
        await node.allocatable_is(6, seconds=330)


async def test_a_node_that_is_deleted_and_made_again_is_followed(node: Node) -> None:
    async with followed_by(node) as cluster:
        cluster.server.remove(AT)
        await node.allocatable_after(30, 4)
        cluster.server.put(AT, metadata={"uid": "another", "labels": {LABEL: "xxx"}}, status={})
        await node.allocatable_is(6)


async def test_a_kubeconfig_that_is_none_is_told_and_never_quoted(node: Node, cluster: Cluster) -> None:
    right = cluster.kubeconfig.read_text()
    for text in ("users: [{user: {token: s3cret}]\n", "\ttoken: s3cret", "s3cret", "x" * 1024**2 + "s3cret", ""):
        cluster.kubeconfig.write_text(text)
        one = cluster.gateway("--node-condition")
        await node.until(partial(one.said, "the API server can't be asked"), "what is wrong")
        assert str(cluster.kubeconfig) in str(one.said("the API server can't be asked"))
        assert "s3cret" not in str(one.process.log)
        await one.terminate()
    cluster.kubeconfig.write_text(right)
    cluster.gateway("--node-condition")
    await condition_is(cluster, "True Ready")


async def under_a_path(answer: Answer, request: Request, cluster: Cluster) -> None:
    """Answer as a proxy does that has the API server under a path."""
    if not request.path.startswith("/k8s/api"):
        await answer.no(404, "NotFound")
        return
    request.path = request.path.removeprefix("/k8s")
    await cluster.server.answer(answer, request)


async def test_a_kubeconfig_may_have_a_certificate_a_name_and_a_path(node: Node, cluster: Cluster) -> None:
    await cluster.server.stop()
    clients = cluster.server.clients = trustme.CA()
    cluster.server.tokens = {""}
    await cluster.server.start("kubernetes")
    cluster.server.always = partial(under_a_path, cluster=cluster)
    mine = clients.issue_cert("client.example")
    chain = b"".join(one.bytes() for one in mine.cert_chain_pems)
    config = json.loads(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"] |= {
        "server": f"https://127.0.0.1:{cluster.server.port}/k8s/",
        "tls-server-name": "kubernetes",
    }
    config["users"][0]["user"] = {
        "client-certificate-data": base64.b64encode(chain).decode(),
        "client-key-data": base64.b64encode(mine.private_key_pem.bytes()).decode(),
    }
    config["clusters"].insert(0, {"name": "another", "cluster": {"server": "http://nowhere"}})
    cluster.kubeconfig.write_text(json.dumps(config))
    cluster.gateway(*choices(node, "xx", "xxx"), "--default-config=xx")
    await node.allocatable_is(4)
    await followed(node, cluster, 3)
    assert not any("authorization" in one.headers for one in cluster.server.requests)


@pytest.mark.parametrize(
    ("cluster_says", "user_says", "words"),
    [
        ({"server": "http://127.0.0.1"}, {}, "https"),
        ({"insecure-skip-tls-verify": True}, {}, "verified"),
        ({"certificate-authority-data": "no base64"}, {}, "base64"),
        ({"certificate-authority-data": ""}, {}, "PEM"),
        ({"certificate-authority-data": "bm90aGluZw=="}, {}, "PEM"),
        ({}, {"token": ""}, "client-certificate"),
        ({}, {"token": ["s3cret"]}, "a kubeconfig"),
        ({}, {"token": "s3cret\x01s3cret"}, "printable"),
        ({}, {"token": "", "tokenFile": "empty"}, "empty"),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used_is_told_and_never_quoted(
    node: Node, cluster: Cluster, cluster_says: dict[str, Any], user_says: dict[str, Any], words: str
) -> None:
    right = cluster.kubeconfig.read_text()
    (node.folder / "empty").touch()
    config = json.loads(right)
    config["clusters"][0]["cluster"] |= cluster_says
    config["users"][0]["user"] |= user_says
    cluster.kubeconfig.write_text(json.dumps(config))
    one = cluster.gateway("--node-condition")
    await node.allocatable_is(2)
    await node.until(lambda: words in str(one.process.log), "what is wrong")
    assert "s3cret" not in str(one.process.log)
    if one.said("the API server can't be asked"):  # What a file beside it says is read with each request.
        cluster.kubeconfig.write_text(right)
    else:
        await one.terminate()
        cluster.kubeconfig.write_text(right)
        cluster.gateway("--node-condition")
    await condition_is(cluster, "True Ready")


async def test_a_pod_asks_with_its_service_account(node: Node, cluster: Cluster) -> None:
    folder = node.folder / "account"
    folder.mkdir()
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}
    clock.patches.setattr("gateway.kubernetes.access.in_cluster.__defaults__", (environment, folder))
    one = node.gateway("--node-name", NAME, "--node-condition")
    await node.until(lambda: "KUBERNETES_SERVICE_PORT" in str(one.process.log), "what is missing")
    environment["KUBERNETES_SERVICE_PORT"] = str(cluster.server.port)
    await node.until(lambda: "automountServiceAccountToken" in str(one.process.log), "what is missing")
    (folder / "ca.crt").write_bytes(cluster.server.authority.cert_pem.bytes())
    (folder / "token").write_bytes(TOKEN + b"\n")
    await condition_is(cluster, "True Ready")


async def test_a_renewed_token_and_ca_are_used_from_then_on(node: Node, cluster: Cluster) -> None:
    options = choices(node, "xx", "xxx", "xxxx")
    choose(cluster, "xx")
    ca, token = node.folder / "ca.crt", node.folder / "token"
    ca.write_bytes(cluster.server.authority.cert_pem.bytes())
    token.write_text("token-1")
    config = json.loads(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"] = {
        "server": f"https://127.0.0.1:{cluster.server.port}",
        "certificate-authority": "ca.crt",
    }
    config["users"][0]["user"] = {"tokenFile": "token"}
    cluster.kubeconfig.write_text(json.dumps(config))
    cluster.gateway(*options)
    await node.allocatable_is(4)
    token.write_text("token-2")
    cluster.server.tokens = {"token-2"}
    await gone(cluster)
    await followed(node, cluster, 3)
    await cluster.server.stop()
    cluster.server.authority = trustme.CA()
    await cluster.server.start()
    await node.pass_time(10)
    ca.write_bytes(cluster.server.authority.cert_pem.bytes())
    await followed(node, cluster, 4)


@pytest.mark.parametrize(("option", "component"), [("--node-condition", "api-server"), ("--dra=on", "dra")])
async def test_missing_rights_are_reported_with_their_component(
    node: Node, cluster: Cluster, option: str, component: str
) -> None:

    async def forbid(answer: Answer, request: Request) -> None:
        if component == "dra" and "resourceslices" not in request.path:
            await cluster.server.answer(answer, request)
        else:
            await answer.no(403, "Forbidden")

    cluster.server.always = forbid
    one = cluster.gateway(option)
    await node.until(lambda: "deploy/kustomize/components/" in str(one.process.log), "the advice")
    assert f"deploy/kustomize/components/{component}" in str(one.process.log)


async def test_who_may_not_ask_says_so_and_serves(node: Node, cluster: Cluster) -> None:
    cluster.server.tokens = set()
    cluster.gateway("--node-condition", "--startup-taint", TAINT, "--node-events")
    await node.allocatable_is(2)
    await node.pass_time(120)
    await node.admit("pod")
    assert len(cluster.server.requests) < 30, "it asks too often"
