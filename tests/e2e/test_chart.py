"""The Helm chart on a genuine node, by the genuine Helm: it installs, rolls without a pod noticing, and goes away.

In between, with what it turns on that goes by the API server, and with the rights that it brings. HELM names Helm; else it is
the one that `.ci/chart` has built.
"""

import asyncio
import contextlib
import http.client
import io
import json
import os
import re
import ssl
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
import yaml

from gateway_lab.node import Node, pods
from gateway_lab.node.api import Access, Api, ApiError, Object
from gateway_lab.node.chart import ACCOUNT, PROFILE, RELEASE, Chart, helm
from gateway_lab.node.continuity import IMAGE, SCENARIOS, judge, run
from gateway_lab.node.dra import DRIVER, SLICES, DraNode, slice_of
from gateway_lab.node.installed import CDI_RESOURCE, DAEMONSETS, DEVICES, IDS, NAMESPACE, DaemonSet
from gateway_lab.node.stage import POD, Stage
from gateway_lab.node.watch import PodSeen
from gateway_lab.trials.scenarios import RESOURCE
from gateway_lab.waiting import until as waited

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
VERSION = "1.37"
PATIENCE = 60.0
TAINT = {"key": "readiness.k8s.io/gpu", "effect": "NoSchedule"}
LABEL = "nvidia.com/device-plugin.config"
CONDITION = "nvidia.com/GPUReady"
EVENTS = "/api/v1/namespaces/default/events"
SHARED = {"version": "v1", "sharing": {"timeSlicing": {"resources": [{"name": RESOURCE, "replicas": 2}]}}}
BLIND: Object = {"resources": {RESOURCE: {"gpus": []}, CDI_RESOURCE: {"gpus": []}}}
FEATURES = {
    "config": {"map": {"default": "version: v1\n", "shared": yaml.safe_dump(SHARED)}},
    "nodeReadiness": {"condition": True, "startupTaint": TAINT["key"], "events": True},
}


def members(out: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(out)) as tar:
        return tar.getnames()


NO_CLASS = ("--ignore", "DPG0604")
"""Nobody claims what CDI_RESOURCE offers."""
COMMANDS: Mapping[tuple[str, ...], Callable[[bytes], object]] = {
    ("doctor", *NO_CLASS): bytes.decode,
    ("doctor", *NO_CLASS, "--json"): json.loads,
    ("status",): bytes.decode,
    ("status", "--json"): json.loads,
    ("devices",): bytes.decode,
    ("devices", "--json"): json.loads,
    ("support-bundle", "--output", "-"): members,
}
"""What reads each command's standard output."""
MOST_MIB = 32
"""Of resident memory, at a command's peak: it counts against the limit of the gateway's container."""
_CODE = """
import os, sys
_, status, used = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)
print(f'peak {used.ru_maxrss}', file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""
MEASURED = ("/usr/bin/python3.13", "-I", "-c", _CODE)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chart(stage: Stage) -> AsyncIterator[Chart]:
    helm()
    one = Chart(stage.node, stage.api, stage.seen, IMAGE)
    await stage.install(one)
    yield one
    if stage.installed is one:
        await one.stop()
        stage.installed = None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def told_of(stage: Stage, chart: Chart) -> Object:
    """The node as it is when the chart has turned everything on that tells of it; it began with the start-up taint."""
    await stage.prepare(VERSION)
    path = f"/api/v1/nodes/{stage.node.name}"
    await stage.api.strategic(path, {"spec": {"taints": [TAINT]}})
    await chart.reconfigure(FEATURES)
    await until(stage, lambda found: taints(found) == [], "the start-up taint to go")
    return await until(stage, ready, f"{CONDITION} to be True")


@pytest_asyncio.fixture(loop_scope="session")
async def node(stage: Stage, told_of: Object) -> AsyncIterator[Object]:
    """The same for one test, which may fail: the API server is there for the next one, and no label."""
    yield told_of
    if not stage.node.apiserver.alive:
        await stage.node.apiserver.start()
    await label(stage, None)
    await served_shared(stage, yes=False, seconds=PATIENCE)


async def until(stage: Stage, holds: Callable[[Object], bool], what: str) -> Object:
    """Wait until the node at the API server is so."""
    found: Object = {}
    try:
        async with asyncio.timeout(PATIENCE):
            while not holds(found := await stage.api.get(f"/api/v1/nodes/{stage.node.name}")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"expected {what}, the node is: {found}") from None
    return found


def taints(found: Object) -> list[str]:
    return [one["key"] for one in found["spec"].get("taints", ())]


def ready(found: Object) -> bool:
    return any(one["type"] == CONDITION and one["status"] == "True" for one in found["status"]["conditions"])


def shared(stage: Stage) -> bool:
    """Whether the kubelet's own records have replicas."""
    return any("::" in one for one in (stage.last_records.allocatable or {}).get(RESOURCE, ()))


async def served_shared(stage: Stage, *, yes: bool, seconds: float) -> float:
    """Wait until the kubelet's own records say so; give how long that took."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while shared(stage) is not yes:  # noqa: ASYNC110 - the kubelet's records tell nobody
            await asyncio.sleep(0.02)
    return time.monotonic() - began


async def label(stage: Stage, value: str | None) -> None:
    await stage.api.merge(f"/api/v1/nodes/{stage.node.name}", {"metadata": {"labels": {LABEL: value}}})


def own(name: str) -> bool:
    return name == "gpu" or name.startswith(NAMESPACE)


def gateways(stage: Stage) -> list[PodSeen]:
    return [pod for pod in stage.seen.pods.values() if pod.namespace == NAMESPACE]


async def answer(stage: Stage, pod: PodSeen, port: int, path: str) -> str:
    about = await stage.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.name}")

    def ask() -> str:
        connection = http.client.HTTPConnection(about["status"]["podIP"], port, timeout=10)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    return await asyncio.to_thread(ask)


async def metrics(stage: Stage) -> str:
    (pod,) = gateways(stage)
    return await answer(stage, pod, 9400, "/metrics")


async def simulate(stage: Stage, profile: str) -> str:
    """Let new gateways go by another profile; return the one of before."""
    path = f"{DAEMONSETS}/{RELEASE}"
    [container] = (await stage.api.get(path))["spec"]["template"]["spec"]["containers"]
    [before] = [one["value"] for one in container["env"] if one["name"] == "GATEWAY_SIMULATE"]
    env = [{"name": "GATEWAY_SIMULATE", "value": profile}]
    spec = {"containers": [{"name": container["name"], "env": env}]}
    await stage.api.strategic(path, {"spec": {"template": {"spec": spec}}})
    return str(before)


def sample(text: str, name: str, resource: str) -> float:
    found = re.findall(
        rf'^device_plugin_gateway_{name}\{{[^}}]*resource="{resource}"[^}}]*\}} (\S+)$', text, re.MULTILINE
    )
    return sum(map(float, found))


async def gateway(stage: Stage, *words: str) -> None:
    """Run the gateway's own command in its container, without the API server."""
    (pod,) = gateways(stage)
    (container,) = pod.containers.values()
    name = f"e2e-{time.monotonic_ns()}"
    await stage.node.ctr(
        "tasks", "exec", "--exec-id", name, container.id.removeprefix("containerd://"), "gateway", *words
    )


def measured(node: Node, pod: PodSeen, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run the gateway's own command in its container by ``kubectl exec``; its peak in KiB is on standard error."""
    command = [
        str(node.kubectl),
        f"--namespace={NAMESPACE}",
        "exec",
        pod.name,
        "--",
        *MEASURED,
        "/usr/bin/gateway",
        *words,
    ]
    environment = os.environ | {"KUBECONFIG": str(node.kubeconfig)}
    return subprocess.run(command, env=environment, check=False, capture_output=True, timeout=PATIENCE)


async def told(stage: Stage, reason: str, uuid: str, meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
    """Wait for an event of the node about a GPU; do something between two looks."""
    found: list[tuple[str, str]] = []
    try:
        async with asyncio.timeout(PATIENCE):
            while not any(one == reason and uuid in message for one, message in found):
                await asyncio.sleep(0.1)
                if meanwhile is not None:
                    await meanwhile()
                events = (await stage.api.get(EVENTS))["items"]
                found = [
                    (one["reason"], one["message"])
                    for one in events
                    if one["involvedObject"]["kind"] == "Node" and one["reportingComponent"] == "device-plugin-gateway"
                ]
    except TimeoutError:
        raise AssertionError(f"expected the event {reason} of {uuid}, the events are: {found}") from None


async def changed(stage: Stage) -> None:
    """Change the gateway's pod: the kubelet looks at it at once, and gives it the ConfigMaps that it knows by then.

    Otherwise that takes a minute. It may come before the kubelet has heard of a ConfigMap, so it is done again.
    """
    (pod,) = gateways(stage)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.name}"
    await stage.api.merge(path, {"metadata": {"annotations": {"e2e": str(time.monotonic_ns())}}})
    await asyncio.sleep(1)


def free(stage: Stage) -> str:
    """Give a GPU that no pod holds."""
    return next(uuid for uuid in IDS if uuid not in (stage.last_records.held or {}).get(RESOURCE, {}))


# A roll first: right after an installation the DaemonSet controller has other reasons to look again, and must not forget.
@pytest.mark.parametrize("name", ["rolled", "rolled-back", "kubelet-term"])
async def test_the_chart_keeps_what_the_manifests_promise(stage: Stage, chart: Chart, name: str) -> None:
    outcome = await run(stage, VERSION, SCENARIOS[name])
    assert judge(outcome, SCENARIOS[name].promises[DaemonSet.kind]) == []


ROLLS = {"maxSurge 1": {"maxSurge": 1, "maxUnavailable": 0}, "maxUnavailable 1": {"maxSurge": 0, "maxUnavailable": 1}}


@contextlib.asynccontextmanager
async def blind(stage: Stage, rolls: str) -> AsyncIterator[None]:
    """Roll the node's gateway to a release that sees no GPU, and back."""
    await one_ready(stage)  # The DaemonSet controller deletes a pod that isn't ready before the new one is.
    path = f"{DAEMONSETS}/{RELEASE}"
    rolling = (await stage.api.get(path))["spec"]["updateStrategy"]["rollingUpdate"]
    await stage.api.merge(path, {"spec": {"updateStrategy": {"rollingUpdate": ROLLS[rolls]}}})
    await stage.api.merge(PROFILE, {"data": {"blind.yaml": yaml.safe_dump(BLIND)}})
    before = await simulate(stage, "/etc/device-plugin-gateway/blind.yaml")
    try:
        yield
    finally:
        await simulate(stage, before)
        await one_ready(stage)
        await stage.api.merge(path, {"spec": {"updateStrategy": {"rollingUpdate": rolling}}})


async def one_ready(stage: Stage) -> None:
    """Wait until there is one gateway, and its pod is ready."""
    await stage.seen.until(lambda _: [one.ready for one in gateways(stage)] == [True], "one gateway that is ready")


async def new_gateway(stage: Stage, old: PodSeen) -> PodSeen:
    """Wait until the new gateway runs."""
    await stage.seen.until(lambda _: any(one.runs and one.uid != old.uid for one in gateways(stage)), "a new gateway")
    return next(one for one in gateways(stage) if one.uid != old.uid)


@pytest.mark.parametrize("rolls", ROLLS)
async def test_a_release_that_sees_no_gpu_stops_at_the_first_gateway(stage: Stage, chart: Chart, rolls: str) -> None:
    """With maxSurge, the node keeps its GPUs."""
    await stage.prepare(VERSION)
    [old], mark = gateways(stage), len(stage.records)
    async with blind(stage, rolls):
        new, verdict = await new_gateway(stage, old), ""
        async with asyncio.timeout(PATIENCE):
            while "sees none of" not in verdict:
                with contextlib.suppress(ConnectionRefusedError):  # Its container runs before it listens.
                    verdict = await answer(stage, new, 8081, "/readyz")
                await asyncio.sleep(0.1)
        await asyncio.sleep(5)
        left = {old.uid: (True, False)} if rolls == "maxSurge 1" else {}
        assert {one.uid: (one.ready, one.ending) for one in gateways(stage)} == {**left, new.uid: (False, False)}
    await stage.served()
    if rolls == "maxSurge 1":
        assert {seen.allocatable[RESOURCE] for seen in stage.records[mark:]} <= {len(IDS)}


async def test_a_node_says_when_it_is_ready(stage: Stage, node: Object) -> None:
    assert ready(node)
    assert taints(node) == []
    assert node["status"]["allocatable"][RESOURCE] == str(len(IDS))
    assert {kind: one.account.lost for kind, one in stage.standing().items() if one.account.lost} == {}


@pytest.mark.usefixtures("node")
async def test_another_label_counts_and_other_streams_go_on(stage: Stage) -> None:
    before, began = await metrics(stage), await stage.settled()
    await label(stage, "shared")
    took = await served_shared(stage, yes=True, seconds=PATIENCE)
    after = await metrics(stage)
    assert sample(after, "registrations_total", CDI_RESOURCE) == sample(before, "registrations_total", CDI_RESOURCE) > 0
    age = "stream_age_seconds"
    assert sample(after, age, CDI_RESOURCE) >= sample(before, age, CDI_RESOURCE) > took
    await label(stage, None)
    await served_shared(stage, yes=False, seconds=PATIENCE)
    assert {kind: one.devices for kind, one in (await stage.settled()).items()} == {
        kind: one.devices for kind, one in began.items()
    }


@pytest.mark.usefixtures("node")
async def test_what_happened_while_the_api_server_was_away_is_caught_up(stage: Stage) -> None:
    uuid = free(stage)
    await stage.node.apiserver.stop()
    await gateway(stage, "cordon", uuid, "--reason", "the API server is away")
    await asyncio.sleep(5 * stage.settle_seconds)
    assert all(one.account.lost == () for one in stage.standing().values())
    await stage.node.apiserver.start()
    await label(stage, "shared")
    # An API server that starts answers with errors for a while, and is asked the more seldom the longer that takes (`watch.pause`).
    await served_shared(stage, yes=True, seconds=PATIENCE)
    await told(stage, "GPUCordoned", uuid)
    await label(stage, None)
    await served_shared(stage, yes=False, seconds=PATIENCE)
    await gateway(stage, "uncordon", uuid)
    await told(stage, "GPUUncordoned", uuid)
    await until(stage, ready, f"{CONDITION} to be True")


@pytest.mark.usefixtures("node")
async def test_a_gpu_that_becomes_unhealthy_is_told(stage: Stage) -> None:
    uuid = free(stage)
    profile = yaml.safe_load((await stage.api.get(PROFILE))["data"]["profile.yaml"])
    for unhealthy, reason in (({IDS.index(uuid): "fell off the bus"}, "GPUUnhealthy"), ({}, "GPURecovered")):
        profile["resources"][RESOURCE]["unhealthy"] = unhealthy
        await stage.api.merge(PROFILE, {"data": {"profile.yaml": yaml.safe_dump(profile)}})
        await told(stage, reason, uuid, partial(changed, stage))


async def status(done: Awaitable[object]) -> int:
    """Give the status of a request's answer."""
    try:
        await done
    except ApiError as error:
        return error.status
    return 200


async def with_its_token(stage: Stage) -> Api:
    """Give the API server to those who have a token as the gateway's pod has."""
    (pod,) = gateways(stage)
    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod.name, "uid": pod.uid}
    asked = {"spec": {"boundObjectRef": bound, "expirationSeconds": 3600}}
    token = (await stage.api.create(f"{ACCOUNT}/token", asked))["status"]["token"]
    return Api(Access(stage.node.server, token, ssl.create_default_context(cafile=str(stage.node.ca))))


@pytest.mark.usefixtures("node")
async def test_its_token_is_good_for_no_more_than_that(stage: Stage) -> None:
    (pod,) = gateways(stage)
    api = await with_its_token(stage)
    own = f"/api/v1/nodes/{stage.node.name}"
    other = "/api/v1/nodes/node-2"
    await stage.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-2"}})
    said = {"type": CONDITION, "status": "True", "reason": "Ready", "message": "by a test"}
    event = {"metadata": {"generateName": "a."}, "reason": "GPULost", "message": "by a test", "type": "Normal"}
    events = {
        name: {**event, "involvedObject": {"kind": kind, "name": name, "namespace": namespace}}
        for kind, name, namespace in (("Node", "node-2", ""), ("Pod", pod.name, "default"))
    }
    try:
        statuses = {
            what: await status(done)
            for what, done in {
                "own condition": api.strategic(f"{own}/status", {"status": {"conditions": [said]}}),
                "another's condition": api.strategic(f"{other}/status", {"status": {"conditions": [said]}}),
                "another condition": api.strategic(
                    f"{own}/status", {"status": {"conditions": [{**said, "type": "Ready"}]}}
                ),
                "capacity": api.merge(f"{own}/status", {"status": {"capacity": {RESOURCE: "7"}}}),
                "label": api.merge(own, {"metadata": {"labels": {"a": "b"}}}),
                "taint": api.strategic(own, {"spec": {"taints": [TAINT]}}),
                "cordoned": api.merge(own, {"spec": {"unschedulable": True}}),
                "another's label": api.merge(other, {"metadata": {"labels": {"a": "b"}}}),
                "another's event": api.create(EVENTS, events["node-2"]),
                "a pod's event": api.create(EVENTS, events[pod.name]),
                "secrets": api.create("/api/v1/namespaces/default/secrets", {"metadata": {"name": "a"}}),
            }.items()
        }
    finally:
        await stage.api.delete(other)
    assert statuses.pop("own condition") == 200
    assert {what: one for what, one in statuses.items() if one not in {403, 422}} == {}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(stage: Stage, chart: Chart) -> AsyncIterator[DraNode]:
    """The node when the chart has turned both APIs on, beside all that tells of the node."""
    await stage.prepare(VERSION)
    await chart.reconfigure({**FEATURES, "gateway": {"dra": "on"}})
    await stage.served()
    one = DraNode(stage.node)
    await one.claimable()
    yield one
    await one.delete("claims", "asks-by-name")  # Nobody unprepares a claim when the gateway has gone.


async def test_each_api_gives_its_own_gpus(stage: Stage, both: DraNode) -> None:
    uuid = free(stage)
    await gateway(stage, "move", "--to", "dra", uuid)
    assert await both.claim_pod("claims") == uuid
    assert both.account("claims").nodes == {DEVICES[uuid]}
    held = {path for one in stage.standing().values() for path in one.account.nodes}
    assert await both.named_pod("asks-by-name") in {*DEVICES.values()} - held - {DEVICES[uuid]}
    await both.delete("claims", "asks-by-name")
    await both.unprepared()
    await gateway(stage, "move", "--to", "plugin", uuid)
    await both.allocatable()
    assert {kind: one.account.lost for kind, one in stage.standing().items() if one.account.lost} == {}


@pytest.mark.usefixtures("both")
async def test_commands_in_its_pod_take_little_memory_and_programs_can_read_them(stage: Stage) -> None:
    (pod,) = gateways(stage)
    peaks = {}
    for words, read in COMMANDS.items():
        done = await asyncio.to_thread(measured, stage.node, pod, *words)
        [peak] = re.findall(r"^peak ([0-9]+)$", done.stderr.decode(), re.MULTILINE)
        peaks[words] = int(peak) / 1024
        assert done.returncode == 0, done.stdout.decode()
        assert read(done.stdout), words
    assert {words: peak for words, peak in peaks.items() if peak > MOST_MIB} == {}


@pytest.mark.usefixtures("both")
async def test_doctor_names_rights_that_were_deleted_and_an_upgrade_brings_them_back(
    stage: Stage, chart: Chart
) -> None:
    (pod,) = gateways(stage)
    roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
    for one in (await stage.api.get(roles))["items"]:
        if own(name := one["metadata"]["name"]):
            await stage.api.delete(f"{roles}/{name}")

    async def finds(codes: set[str]) -> bool:
        done = await asyncio.to_thread(measured, stage.node, pod, "doctor", *NO_CLASS, "--json")
        return {one["code"] for one in json.loads(done.stdout)["checks"] if "seen" in one} == codes

    await waited(partial(finds, {"DPG0606"}), PATIENCE, every=0.2)
    await chart.repair()
    await waited(partial(finds, set()), PATIENCE, every=0.2)


@pytest.mark.usefixtures("both")
async def test_its_token_is_good_for_its_own_nodes_slices_and_allocatable(stage: Stage) -> None:
    api, name, other = await with_its_token(stage), stage.node.name, "node-2"
    tried = "?dryRun=All&fieldManager=e2e"
    none: Object = {"example.com/none": "0"}
    anywhere = {**slice_of("anywhere"), "spec": {**slice_of("anywhere")["spec"], "allNodes": True}}
    del anywhere["spec"]["nodeName"]
    await stage.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": other}})
    await stage.api.create(SLICES, slice_of(other))
    try:
        statuses = {
            what: await status(done)
            for what, done in {
                "own slice": api.create(f"{SLICES}{tried}", slice_of(name)),
                "own allocatable": api.merge(f"/api/v1/nodes/{name}/status{tried}", {"status": {"allocatable": none}}),
                "a new slice of another's": api.create(
                    SLICES, {**slice_of(other), "metadata": {"name": "node-2-more"}}
                ),
                "another's slice": api.merge(f"{SLICES}/{other}", {"spec": {"pool": {"generation": 2}}}),
                "another's slice removed": api.delete(f"{SLICES}/{other}"),
                "a slice of all nodes": api.create(SLICES, anywhere),
                "another's allocatable": api.merge(f"/api/v1/nodes/{other}/status", {"status": {"allocatable": none}}),
                "own capacity": api.merge(f"/api/v1/nodes/{name}/status", {"status": {"capacity": none}}),
                "a class": api.delete(f"/apis/resource.k8s.io/v1/deviceclasses/{DRIVER}"),
            }.items()
        }
    finally:
        await stage.api.delete(f"{SLICES}/{other}")
        await stage.api.delete(f"/api/v1/nodes/{other}")
    assert (statuses.pop("own slice"), statuses.pop("own allocatable")) == (200, 200)
    assert {what: one for what, one in statuses.items() if one not in {403, 422}} == {}


async def test_no_pod_fails_when_it_is_removed_from_a_cordoned_node(stage: Stage, chart: Chart) -> None:
    """As docs/chart.md says: cordon, uninstall, see that no GPU is allocatable, uncordon. Pods come all the time."""
    await stage.prepare(VERSION)
    path = f"/api/v1/nodes/{stage.node.name}"
    names = [f"late-{number}" for number in range(20)]

    async def come() -> None:
        for name in names:
            await stage.api.create(POD, pods.gpu_pod(name))
            await asyncio.sleep(0.5)  # The load is what the row is about.

    await stage.api.merge(path, {"spec": {"unschedulable": True}})
    load = asyncio.ensure_future(come())
    try:
        await chart.stop()
        stage.installed = None
        await until(stage, lambda found: found["status"]["allocatable"].get(RESOURCE, "0") == "0", "no GPU allocatable")
        await stage.api.merge(path, {"spec": {"unschedulable": None}})
        await load
        assert {pod.phase for name in names for pod in stage.seen.named(name)} == {"Pending"}
    finally:
        load.cancel()
        await stage.api.merge(path, {"spec": {"unschedulable": None}})
        for name in names:
            await stage.remove(name)
    await stage.install(chart)


async def test_pods_outlive_its_removal(stage: Stage, chart: Chart) -> None:
    await stage.prepare(VERSION)
    before = {uid: pod.phase for uid, pod in stage.seen.pods.items() if pod.namespace != NAMESPACE}
    await chart.stop()
    stage.installed = None
    after: dict[Any, str] = {uid: pod.phase for uid, pod in stage.seen.pods.items() if uid in before}
    assert after == before
    kinds = (
        f"apps/v1/namespaces/{NAMESPACE}/daemonsets",
        "rbac.authorization.k8s.io/v1/clusterroles",
        "rbac.authorization.k8s.io/v1/clusterrolebindings",
        "rbac.authorization.k8s.io/v1/namespaces/default/roles",
        "admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    )
    left = [await stage.api.get(f"/apis/{kind}") for kind in kinds]
    names = [one["metadata"]["name"] for found in left for one in found["items"]]
    assert [*filter(own, names)] == []
