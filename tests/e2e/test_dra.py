"""Pods with ResourceClaims on a genuine node whose GPUs the gateway offers by DRA alone, through restarts of everybody."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from gateway.wires import control
from gateway.wires.control import ControlError
from gateway_lab.gatewayproc import leader_socket
from gateway_lab.node import pods
from gateway_lab.node.api import Object
from gateway_lab.node.dra import DRIVER, EVERY, PATIENCE, POD, RESOURCES, DraNode
from gateway_lab.node.installed import DEVICES, GPUS, STATE, write_profile
from gateway_lab.trials.scenarios import RESOURCE
from gateway_lab.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
OVERLAP = ["1.36", "1.37"]
"""Kubelets that take two instances of a driver at once."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def dra() -> AsyncIterator[DraNode]:
    async with DraNode.here() as one:
        yield one


@pytest.fixture(params=["1.32", *OVERLAP])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def begin(dra: DraNode, version: str) -> None:
    """Have one gateway and this kubelet, and no pods."""
    if dra.node.kubelet.version != version:
        await dra.node.kubelet.restart(version=version)
        await dra.node.ready()
    write_profile(dra.node)
    while len(dra.gateways) > 1 or (dra.gateways and dra.mode != "only"):
        await dra.end(dra.gateways[0])
    if not dra.gateways:
        await dra.start()
    await dra.delete_all()
    await dra.published()


async def begin_with(dra: DraNode, version: str, mode: str) -> None:
    """Have one gateway with ``--dra mode``, whose GPUs the device plugin API has, and no pods."""
    await begin(dra, version)
    await dra.close()
    await dra.start(mode)
    await dra.allocatable(GPUS)


async def test_a_claim_gets_its_gpu_and_gives_it_back(dra: DraNode, version: str) -> None:
    await begin(dra, version)
    given = {name: await dra.claim_pod(name) for name in ("a", "b")}
    assert {name: dra.account(name).nodes for name in given} == {name: {DEVICES[uuid]} for name, uuid in given.items()}
    assert len(set(given.values())) == 2
    assert {row["driver"] for row in dra.prepared().values()} == {DRIVER}
    assert len(dra.prepared()) == 2
    await dra.delete("a", "b")
    await dra.unprepared()


async def test_pods_outlive_the_kubelet_and_the_gateway(dra: DraNode, version: str) -> None:
    await begin(dra, version)
    await dra.claim_pod("a")
    began = dra.account("a").began
    await dra.node.kubelet.restart()
    await dra.node.ready()
    await dra.published()
    await dra.kill(dra.gateways[-1])
    await dra.start()
    await dra.published()
    await dra.claim_pod("b")
    assert (dra.account("a").began, dra.account("a").lost) == (began, ())
    await dra.delete("a", "b")
    await dra.unprepared()


@pytest.mark.parametrize("version", OVERLAP)
async def test_a_roll_loses_no_claim(dra: DraNode, version: str) -> None:
    await begin(dra, version)
    await dra.claim_pod("a")
    older = dra.gateways[-1]
    await dra.start()
    await dra.claim_pod("b")
    await dra.end(older)
    await dra.claim_pod("c")
    await dra.delete("a", "b", "c")
    await dra.unprepared()


async def test_a_node_is_switched_with_its_pods(dra: DraNode, version: str) -> None:
    await begin_with(dra, version, "off")
    held = {name: await dra.named_pod(name) for name in ("x", "y")}
    await dra.close()
    await dra.start()
    await dra.published(GPUS - 2)
    given = [DEVICES[await dra.claim_pod(name)] for name in ("a", "b")]
    assert not {*given} & {*held.values()}
    await dra.delete("x")  # Nobody writes the kubelet's checkpoint any more.
    await dra.published(GPUS - 1)
    await dra.delete("y", "a", "b")
    await dra.published()


@pytest.mark.parametrize("version", OVERLAP)
async def test_a_node_crosses_over_and_back_with_its_pods(dra: DraNode, version: str) -> None:
    await begin_with(dra, version, "on")
    uuid = {path: one for one, path in DEVICES.items()}
    held = {name: uuid[await dra.named_pod(name)] for name in ("x", "y")}
    free = DEVICES.keys() - {*held.values()}
    await dra.cross("dra")
    await dra.stand(dict.fromkeys(free, "dra") | dict.fromkeys(held.values(), "to-dra"))
    await dra.published(GPUS - 2)
    given = {name: await dra.claim_pod(name) for name in ("a", "b")}
    assert not {*given.values()} & {*held.values()}
    # In mid-way: the gateway dies, and the kubelet starts again.
    await dra.kill(dra.gateways[-1])
    await dra.start("on")
    await dra.stand(dict.fromkeys(free, "dra") | dict.fromkeys(held.values(), "to-dra"))
    await dra.node.kubelet.restart()
    await dra.node.ready()
    await dra.delete("x")
    await dra.stand({held["x"]: "dra", held["y"]: "to-dra"})
    await dra.published(GPUS - 1)
    # And back: who has a claim keeps it.
    await dra.cross("plugin")
    back = DEVICES.keys() - {*given.values()}
    await dra.stand(dict.fromkeys(back, "plugin") | dict.fromkeys(given.values(), "to-plugin"))
    await dra.allocatable(GPUS - 2)
    assert uuid[await dra.named_pod("z")] in back - {held["y"]}
    await dra.delete("a")
    await dra.stand({given["a"]: "plugin", given["b"]: "to-plugin"})
    assert {name: dra.account(name).lost for name in ("y", "b", "z")} == dict.fromkeys(("y", "b", "z"), ())
    await dra.delete("b", "y", "z")
    await dra.stand(dict.fromkeys(DEVICES, "plugin"))
    await dra.close()


@pytest.mark.parametrize("version", OVERLAP)
async def test_pods_that_ask_by_name_get_their_gpu_on_either_side_of_a_crossing(dra: DraNode, version: str) -> None:
    await begin_with(dra, version, "on")
    async with dra.by_name():
        uuid = {path: one for one, path in DEVICES.items()}
        held = uuid[await dra.named_pod("x")]
        await dra.short_pod("s1")
        await dra.cross("dra")
        free = DEVICES.keys() - {held}
        await dra.stand(dict.fromkeys(free, "dra") | {held: "to-dra"})
        await dra.published(GPUS - 1)
        # What asked by name before has a claim now, which the scheduler made.
        given = uuid[await dra.named_pod("y")]
        assert given in free
        [claim] = dra.prepared().values()
        assert (claim["pods"], [one["device_id"] for one in claim["devices"]]) == (["y"], [given])
        assert (await dra.devices())[await dra.allocated("y")] == given
        await asyncio.gather(*(dra.short_pod(f"s{number}") for number in (2, 3)))
        await dra.cross("plugin")
        back = DEVICES.keys() - {given}
        await dra.stand(dict.fromkeys(back, "plugin") | {given: "to-plugin"})
        # The scheduler counts y, so the list does, too; what it has is given to no other.
        await dra.allocatable(GPUS)
        names = [f"z{number}" for number in range(GPUS - 2)]
        assert {uuid[await dra.named_pod(name)] for name in names} == back - {held}
        # The next one waits for it.
        await dra.create("w", dra.named("w"))
        await dra.delete("y")
        await until(lambda: bool(dra.account("w").nodes), PATIENCE)
        assert {uuid[path] for path in dra.account("w").nodes} == {given}
        await dra.delete("w", *names)
        await dra.stand(dict.fromkeys(DEVICES, "plugin"))
        await dra.allocatable(GPUS)
        await asyncio.gather(*(dra.short_pod(f"s{number}") for number in (5, 6, 7)))
        assert dra.account("x").lost == ()
        await dra.delete("x")
    await dra.close()


@pytest.mark.parametrize("version", ["1.32"])
async def test_nothing_goes_to_dra_where_a_kubelet_would_run_pods_without_their_gpu(dra: DraNode, version: str) -> None:
    await begin_with(dra, version, "on")
    async with dra.by_name():
        with pytest.raises(ControlError, match=r"because of the DeviceClass by-name .* got 1\.32"):
            await dra.cross("dra")
        await dra.short_pod("s")
    await dra.cross("dra")
    await dra.stand(dict.fromkeys(DEVICES, "dra"))
    await dra.cross("plugin")
    await dra.stand(dict.fromkeys(DEVICES, "plugin"))
    await dra.close()


@pytest.mark.parametrize("version", ["1.32"])
async def test_an_older_kubelet_that_comes_after_the_crossing_gets_nothing_new(dra: DraNode, version: str) -> None:
    [*_, newest] = dra.node.kubelet_versions
    if newest == version:
        pytest.skip("the node has no newer kubelet")
    await begin_with(dra, newest, "on")
    async with dra.by_name():
        await dra.cross("dra")
        await dra.published()
        await dra.claim_pod("y")
        await dra.node.kubelet.restart(version=version)
        await dra.node.ready()

        async def tainted() -> bool:
            return len(await dra.tainted()) == GPUS

        await until(tainted, PATIENCE, every=EVERY)
        await dra.create("z", dra.named("z"))
        await dra.create("c", dra.claiming("c"))
        await asyncio.gather(*(dra.unschedulable(name) for name in "zc"))
        assert dra.account("y").lost == ()
        await dra.node.kubelet.restart(version=newest)
        await dra.node.ready()
        await until(lambda: all(dra.account(name).nodes for name in "zc"), PATIENCE)
        await dra.delete("y", "z", "c")
    await dra.cross("plugin")
    await dra.stand(dict.fromkeys(DEVICES, "plugin"))
    await dra.close()


@pytest.mark.parametrize("version", OVERLAP)
async def test_both_apis_give_their_own_gpus(dra: DraNode, version: str) -> None:
    await begin_with(dra, version, "on")
    [one, *others] = DEVICES
    await dra.cross("dra", one)
    await dra.published(1)
    assert await dra.claim_pod("a") == one
    uuid = {path: id for id, path in DEVICES.items()}  # noqa: A001
    assert {uuid[await dra.named_pod(f"p{number}")] for number in range(len(others))} == {*others}
    await dra.delete("a", *(f"p{number}" for number in range(len(others))))
    await dra.cross("plugin")
    await dra.stand(dict.fromkeys(DEVICES, "plugin"))
    await dra.close()


async def test_an_api_server_that_was_away_is_told_what_happened(dra: DraNode, version: str) -> None:
    await begin(dra, version)
    await dra.claim_pod("a")
    await dra.node.apiserver.stop()
    write_profile(dra.node, ill={GPUS - 1})
    await dra.node.apiserver.start()

    async def tainted() -> bool:
        return await dra.tainted() == {f"gpu-{GPUS - 1}"}

    await until(tainted, PATIENCE, every=EVERY)
    write_profile(dra.node)
    assert dra.account("a").lost == ()
    await dra.delete("a")
    await dra.unprepared()


async def test_it_may_write_its_own_nodes_slices_and_what_is_allocatable_alone(dra: DraNode, version: str) -> None:
    await begin(dra, version)
    assert await dra.write_elsewhere() in {403, 422}
    own = f"/api/v1/nodes/{dra.node.name}"
    status = {"addresses": [{"type": "Hostname", "address": "elsewhere"}]}
    assert await dra.write(f"{own}/status", {"status": status}) == 422
    assert await dra.write(f"{own}/status", {"metadata": {"labels": {"role": "elsewhere"}}}) == 422
    assert await dra.write(f"{own}/status", {"status": {"allocatable": {"example.com/none": "0"}}}) == 200
    async with dra.ready_too():
        conditions, tries = (await dra.api.get(own))["status"]["conditions"], itertools.count()

        async def in_force() -> bool:
            other = {"type": "Elsewhere", "status": "True", "reason": f"Try{next(tries)}"}  # A change each time.
            return await dra.write(f"{own}/status", {"status": {"conditions": [*conditions, other]}}) == 422

        await until(in_force, 60, every=0.2)
        assert await dra.write(f"{own}/status", {"status": {"allocatable": {"example.com/none": None}}}) == 200


# What claims and the pods that use them can look like.

CLAIMS = f"{RESOURCES}/namespaces/{pods.NAMESPACE}/resourceclaims"
ADMIN = "resource.kubernetes.io/admin-access"
ONE = {"deviceClassName": DRIVER}
IMPOSSIBLE = {"selectors": [{"cel": {"expression": "false"}}]}


async def claim(dra: DraNode, name: str, request: Object) -> None:
    """Make a claim of one request."""
    about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}}
    spec = {"devices": {"requests": [{"name": "gpu", **request}]}}
    await dra.api.create(CLAIMS, {**about, "spec": spec})


async def pod(dra: DraNode, name: str, of: str, count: int = 1, **spec: Any) -> pods.Account:
    """Have a pod of a claim run; return what its container says once it has opened so many GPUs."""
    one = pods.gpu_pod(name, 0)
    main = {**one["spec"]["containers"][0], "resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimName": of}]
    await dra.create(name, {**one, "spec": {**one["spec"], "containers": [main], "resourceClaims": claims, **spec}})
    await until(lambda: len(dra.account(name).nodes) >= count, PATIENCE)
    return dra.account(name)


@pytest_asyncio.fixture(loop_scope="session", params=["1.37"])
async def newest(dra: DraNode, request: pytest.FixtureRequest) -> AsyncIterator[DraNode]:
    await begin(dra, request.param)
    yield dra
    await dra.delete_all()
    for one in (await dra.api.get(CLAIMS))["items"]:
        await dra.api.delete(f"{CLAIMS}/{one['metadata']['name']}")
    await dra.unprepared()


@pytest.mark.parametrize(
    ("request_", "count"),
    [
        pytest.param({"firstAvailable": [{"name": "a", **ONE, **IMPOSSIBLE}, {"name": "b", **ONE}]}, 1, id="a list"),
        pytest.param({"exactly": {**ONE, "allocationMode": "All"}}, GPUS, id="all"),
    ],
)
async def test_a_claim_by_priorities_or_of_all_gpus_runs(newest: DraNode, request_: Object, count: int) -> None:
    await claim(newest, "one", request_)
    assert len((await pod(newest, "a", "one", count)).nodes) == count


async def test_two_pods_of_one_claim_have_the_same_gpu(newest: DraNode) -> None:
    await claim(newest, "one", {"exactly": ONE})
    assert (await pod(newest, "a", "one")).nodes == (await pod(newest, "b", "one")).nodes


async def test_an_administrators_claim_has_gpus_that_others_hold(newest: DraNode) -> None:
    await newest.api.merge(f"/api/v1/namespaces/{pods.NAMESPACE}", {"metadata": {"labels": {ADMIN: "true"}}})
    held = await newest.claim_pod("user")
    await claim(newest, "one", {"exactly": {**ONE, "allocationMode": "All", "adminAccess": True}})
    assert len((await pod(newest, "admin", "one", GPUS)).nodes) == GPUS
    assert newest.account("user").nodes == {DEVICES[held]}
    assert not newest.account("user").lost


async def test_a_sidecar_has_its_pods_gpu_and_a_pod_may_limit_its_containers_together(newest: DraNode) -> None:
    await claim(newest, "one", {"exactly": ONE})
    main = pods.gpu_pod("a", 0)["spec"]["containers"][0]
    sidecar = {**main, "name": "sidecar", "restartPolicy": "Always", "resources": {"claims": [{"name": "gpu"}]}}
    limits = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}
    assert len((await pod(newest, "a", "one", initContainers=[sidecar], resources=limits)).nodes) == 1
    logs = newest.node.root / "var/log/pods"
    [log] = logs.glob(f"{pods.NAMESPACE}_a_*/sidecar/*.log")
    await until(lambda: "open /dev/nvidia" in log.read_text(), PATIENCE)


async def test_a_pod_keeps_its_gpu_while_it_is_resized(newest: DraNode) -> None:
    await claim(newest, "one", {"exactly": ONE})
    main = pods.gpu_pod("a", 0)["spec"]["containers"][0]
    resources = {"claims": [{"name": "gpu"}], "requests": {"cpu": "100m"}}
    before = await pod(newest, "a", "one", containers=[{**main, "resources": resources}])
    more = {"spec": {"containers": [{"name": pods.CONTAINER, "resources": {"requests": {"cpu": "200m"}}}]}}
    await newest.api.strategic(f"{POD}/a/resize", more)

    async def is_resized() -> bool:
        [found] = (await newest.api.get(f"{POD}/a"))["status"]["containerStatuses"]
        now = found.get("resources", {}).get("requests", {}).get("cpu")
        return (now, found["restartCount"]) == ("200m", 0)

    await until(is_resized, PATIENCE, every=EVERY)
    after = newest.account("a")
    assert (after.nodes, after.lost) == (before.nodes, ())


async def sees_health(dra: DraNode, pod: str, uuid: str, resource: str) -> None:
    """See that a pod's status shows how its GPU does, which becomes unhealthy and recovers."""
    for ill, word in (([[*DEVICES].index(uuid)], "Unhealthy"), ([], "Healthy")):
        write_profile(dra.node, ill)

        async def is_told(word: str = word) -> bool:
            [found] = (await dra.api.get(f"{POD}/{pod}"))["status"]["containerStatuses"]
            told = [
                (of["name"], one["health"])
                for of in found.get("allocatedResourcesStatus", ())
                for one in of["resources"]
            ]
            return told == [(resource, word)]

        await until(is_told, PATIENCE, every=EVERY)
    assert dra.account(pod).lost == ()


async def test_a_pods_status_shows_that_its_claims_gpu_is_unhealthy(newest: DraNode) -> None:
    await sees_health(newest, "a", await newest.claim_pod("a"), "claim:gpu")


@pytest.mark.parametrize("version", ["1.37"])
async def test_a_pods_status_shows_that_its_gpu_by_name_is_unhealthy(dra: DraNode, version: str) -> None:
    await begin_with(dra, version, "off")
    uuid = {path: one for one, path in DEVICES.items()}
    await sees_health(dra, "a", uuid[await dra.named_pod("a")], RESOURCE)
    await dra.delete("a")
    await dra.close()


# Shares of GPUs that the configuration shares.

REPLICAS = 4


def sharing(dra: DraNode) -> tuple[str, ...]:
    """Write the configuration that shares each GPU; return the options of a gateway whose claims ask for shares."""
    path = dra.node.folder / "run" / "shared.json"
    shared = {"timeSlicing": {"resources": [{"name": "gpu", "replicas": REPLICAS}]}}
    path.write_text(json.dumps({"version": "v1", "sharing": shared}))
    return "--config-file", str(path), "--dra-shares", "capacity"


async def shares(dra: DraNode) -> dict[str, int]:
    """Return how many shares of each GPU claims were allocated, by its name."""
    found: Counter[str] = Counter()
    for one in (await dra.api.get(CLAIMS))["items"]:
        for result in one.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()):
            assert result["shareID"], result
            found[result["device"]] += int(result["consumedCapacity"]["shares"])
    return found


async def asks(dra: DraNode, name: str, **capacity: str) -> set[str]:
    """Have a pod with a claim of so much of a GPU's capacity run; return its device nodes."""
    await claim(dra, name, {"exactly": {**ONE, "capacity": {"requests": capacity}}})
    return {*(await pod(dra, name, name)).nodes}


async def test_claims_and_pods_by_name_share_gpus_in_turn(newest: DraNode) -> None:
    dra, name_of = newest, {DEVICES[uuid]: f"gpu-{number}" for number, uuid in enumerate(DEVICES)}
    await dra.close()
    await dra.start("on", *sharing(dra))
    await dra.allocatable(GPUS * REPLICAS)
    uuid_of = {path: uuid for uuid, path in DEVICES.items()}
    held = uuid_of[await dra.named_pod("x")]
    await dra.cross("dra")
    await dra.stand(dict.fromkeys(DEVICES.keys() - {held}, "dra") | {held: "to-dra"})
    await dra.published(GPUS - 1)
    asked = [1, 2, 3, 1]
    got = {f"c{at}": await asks(dra, f"c{at}", shares=str(count)) for at, count in enumerate(asked)}
    got["memory"] = await asks(dra, "memory", memory="10Gi")
    allocated = await shares(dra)
    assert (sum(allocated.values()), max(allocated.values())) == (sum(asked) + 1, REPLICAS)
    assert {name_of[path] for nodes in got.values() for path in nodes} == allocated.keys()
    assert all(len(nodes) == 1 for nodes in got.values())
    replicas = [one["device_id"] for row in dra.prepared().values() for one in row["devices"]]
    assert len({*replicas}) == len(replicas) == sum(asked) + 1
    # Everybody starts again, and the scheduler finds the same shares taken.
    await dra.kill(dra.gateways[-1])
    await dra.start("on", *sharing(dra))
    await dra.node.kubelet.restart()
    await dra.node.ready()
    await dra.delete("x", "c2")
    await dra.api.delete(f"{CLAIMS}/c2")
    await dra.stand(dict.fromkeys(DEVICES, "dra"))
    await dra.published()
    await asks(dra, "more", shares="3")
    assert max((await shares(dra)).values()) == REPLICAS
    assert not [name for name in got.keys() - {"c2"} if dra.account(name).lost]
    await dra.cross("plugin")
    used = await shares(dra)
    free = [uuid for number, uuid in enumerate(DEVICES) if f"gpu-{number}" not in used]
    await dra.stand(dict.fromkeys(free, "plugin") | dict.fromkeys(DEVICES.keys() - {*free}, "to-plugin"))
    await dra.allocatable(len(free) * REPLICAS)
    assert await dra.named_pod("y") in {DEVICES[uuid] for uuid in free}
    await dra.delete("y", *(got.keys() - {"c2"}), "more")
    for one in (await dra.api.get(CLAIMS))["items"]:
        await dra.api.delete(f"{CLAIMS}/{one['metadata']['name']}")
    await dra.stand(dict.fromkeys(DEVICES, "plugin"))
    await dra.close()


async def test_an_api_server_without_its_gate_is_named_and_gets_no_shared_gpu(newest: DraNode) -> None:
    dra = newest
    await dra.close()
    for one in (await dra.api.get(f"{RESOURCES}/resourceslices"))["items"]:
        await dra.api.delete(f"{RESOURCES}/resourceslices/{one['metadata']['name']}")
    await dra.node.apiserver.stop()
    await dra.node.apiserver_with("--feature-gates=DRAConsumableCapacity=false").start()
    try:
        gateway = await dra.start("only", *sharing(dra))
        await gateway.wait_for("shared devices are not published", seconds=PATIENCE)
        assert await dra.devices() == {}
        places = dra.node.plugins, dra.node.root / STATE
        [driver] = (await control.ask(leader_socket(*places), {"op": "status"}, PATIENCE))["drivers"]
        assert "DRAConsumableCapacity" in driver["unpublished"]
    finally:
        await dra.node.apiserver.stop()
        await dra.node.apiserver.start()
    await until(partial(has, dra, GPUS), 2 * PATIENCE, every=EVERY)
    await dra.close()


async def has(dra: DraNode, count: int) -> bool:
    """Whether so many devices are published."""
    return len(await dra.devices()) == count
