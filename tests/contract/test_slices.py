"""ResourceSlices: written once for each change, put right when somebody changed them, and left to the process that they belong to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway_lab.kubelets.kubelet import KubeletError
from tests.contract.claiming import A, B, asked, driver, simulate, started, words
from tests.contract.claiming import both as serving_both
from tests.contract.cluster import GROUP, NVIDIA, Cluster, other_driver
from tests.contract.hardware import Amd, Nvidia
from tests.contract.node import GPU, Node
from tests.fakes import amd as fakes
from tests.fakes.apiserver import Answer, Request

OURS = f"n1-{NVIDIA}-0"
THEIRS = "dra.example.com"
AMD, OF_AMD = "amd.com/gpu", "gpu.amd.com"
UNDER = "gpu.nvidia.com-x7k2p"


def path(cluster: Cluster) -> str:
    """Return where the gateway's first slice is."""
    return f"{cluster.api}/resourceslices/{OURS}"


def written(cluster: Cluster) -> int:
    """Return how often slices were written."""
    return asked(cluster, "", "PATCH")


async def cordon(cluster: Cluster, gpu: str = A) -> None:
    """Have something to write."""
    await cluster.node.gateways[-1].order("cordon", id=gpu, reason="smells")


async def test_each_change_is_applied_once_for_the_node(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    [write] = cluster.server.asked("PATCH")
    assert "apply" in write.headers["content-type"]
    assert write.query["force"] == "true"
    [owner] = write.body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Node", "node-uid")
    await cordon(cluster)
    await cluster.published_is(gpu_0=["cordoned"], gpu_1=[])
    await cordon(cluster)
    await node.pass_time(60)
    assert written(cluster) == 2


async def test_what_somebody_wrote_over_is_put_right_and_not_in_a_race(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    cluster.server.change(path(cluster), lambda one: one["spec"].update(devices=[]))
    await cluster.published_is(gpu_0=[], gpu_1=[])
    before = written(cluster)
    for _ in range(200):
        if cluster.server.objects[path(cluster)]["spec"]["devices"]:
            cluster.server.change(path(cluster), lambda one: one["spec"].update(devices=[]))
        await node.pass_time(0.05)
    assert written(cluster) - before < 20
    await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_a_kubelet_that_starts_again_and_again_finds_slices_soon_each_time(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    for _ in range(6):
        cluster.wipe()
        await cluster.published_is(1, gpu_0=[], gpu_1=[])
        await node.pass_time(2)


async def test_a_slice_of_another_shape_hides_no_other(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    cluster.offer(THEIRS, d=B)
    theirs = f"{cluster.api}/resourceslices/{THEIRS}-theirs"
    cluster.server.change(theirs, lambda one: one["spec"]["devices"][0].update(taints=["all"]))
    await cluster.published_is(gpu_0=[])
    cluster.server.change(path(cluster), lambda one: one["spec"]["devices"][0].update(taints=["all"]))
    await node.until(
        lambda: "taints" not in cluster.server.objects[path(cluster)]["spec"]["devices"][0],
        "our slice to be put right",
    )


SAME: dict[str, dict[str, Any]] = {
    "a part of our GPU": {"uuid": {"string": "MIG-7"}, "parentUUID": {"string": A}},
    "our GPU under another name": {"x.example.com/uuid": {"string": A}},
}


@pytest.mark.parametrize("same", SAME)
async def test_what_another_driver_offers_is_offered_half_a_minute_later(
    node: Node, cluster: Cluster, same: str
) -> None:
    await started(cluster)
    theirs = cluster.offer(THEIRS, d="x")
    cluster.server.change(theirs, lambda one: one["spec"]["devices"][0].update(attributes=SAME[same]))
    await cluster.published_is(gpu_1=[])
    cluster.server.remove(theirs)
    cluster.wipe()  # A kubelet that starts deletes theirs too. They come back in a moment.
    await node.until(cluster.published, "our slice")
    await node.pass_time(20)
    await cluster.published_is(gpu_1=[])
    await node.pass_time(5)
    await cluster.published_is(20, gpu_0=[], gpu_1=[])


async def test_nothing_new_is_offered_before_a_kubelet_takes_the_driver(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    node.gateways[-1].kill()
    (await cluster.start_kubelet()).refuses = "no such plugin here"
    await node.pass_time(2)
    wiped = json.loads(json.dumps({"spec": {**SLICE, "devices": [{"name": "gpu-0"}, {"name": "gone"}, TAINTED]}}))
    cluster.server.put(path(cluster), **wiped)
    cluster.gateway("--dra", "only")
    await node.pass_time(30)
    assert [*cluster.published()] == ["gpu-0"]
    assert (await driver(cluster))["trouble"] == "no such plugin here"
    cluster.dra.refuses = ""
    await cluster.published_is(gpu_0=[], gpu_1=[])


POOL = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
SLICE = {"driver": NVIDIA, "nodeName": "n1", "pool": POOL}
TAINTED = {"name": "gpu-1", "taints": [{"key": "device-plugin-gateway.io/cordoned", "effect": "NoSchedule"}]}


async def test_slices_are_written_soon_after_an_outage_that_ends_with_errors(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    await cluster.server.stop()
    await cordon(cluster)
    await node.pass_time(300)
    cluster.server.forbidden = "resourceslices"
    await cluster.server.start()
    await node.until(lambda: written(cluster) > 2, "it to be refused")
    assert "403" in (await driver(cluster))["unpublished"]
    cluster.server.forbidden = ""
    await cluster.published_is(10, gpu_0=["cordoned"], gpu_1=[])
    await rival_is(cluster, "'unpublished': ''")


async def test_where_taints_are_dropped_the_unhealthy_are_left_out(node: Node, cluster: Cluster) -> None:
    await started(cluster)

    async def dropping(answer: Answer, request: Request) -> None:
        if request.method == "PATCH" and "resourceslices" in request.path:
            for device in request.body["spec"]["devices"]:
                device.pop("taints", None)
        await cluster.server.answer(answer, request)

    cluster.server.always = dropping
    simulate(node, unhealthy=A)
    await cluster.published_is(gpu_1=[])


async def test_the_newest_version_is_spoken_of_those_that_the_api_server_has(cluster: Cluster) -> None:
    cluster.server.put(GROUP, versions=[{"version": one} for one in ("v1beta1", "v1", "v1beta2")])
    await started(cluster)
    assert cluster.server.asked("PATCH")[-1].body["apiVersion"] == "resource.k8s.io/v1"


async def test_people_read_that_an_api_server_has_no_dra(node: Node, cluster: Cluster) -> None:
    cluster.server.put(GROUP, versions=[{"version": "v1alpha3"}])
    simulate(node)
    await cluster.start_kubelet()
    cluster.gateway("--dra", "only")
    await node.pass_time(600)
    assert "the API server has v1alpha3 of resource.k8s.io" in (await driver(cluster))["unpublished"]
    assert asked(cluster, GROUP) < 60


async def test_a_newer_gateway_without_gpus_leaves_the_slices_to_the_older_one(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    other = node.folder / "other.json"
    other.write_text(json.dumps({"resources": {GPU: {"gpus": []}}}))
    new = node.gateway(
        "--kubeconfig", str(cluster.kubeconfig), "--node-name", "n1", "--dra", "only",
        "--backend", "simulated", "--simulate", str(other),
    )  # fmt: skip
    await node.pass_time(40)
    await cluster.published_is(gpu_0=[], gpu_1=[])
    assert not await new.is_ready()
    assert await node.gateways[0].is_ready()
    other.write_text(node.profile.read_text())
    await node.eventually(new.is_ready, "the newer one to be ready")


async def test_the_newer_of_two_gateways_writes_the_slices(node: Node, cluster: Cluster) -> None:
    one = await started(cluster)
    two = cluster.gateway("--dra", "only")
    await node.until(lambda: len(cluster.dra.drivers) == 2, "both drivers")
    await node.pass_time(5)
    simulate(node, unhealthy=B)
    await cluster.published_is(gpu_0=[], gpu_1=["unhealthy"])
    await node.pass_time(30)
    assert [len(each.said("ResourceSlices written")) for each in (one, two)] == [1, written(cluster) - 1]
    await two.terminate()
    before = cluster.generation()
    await one.order("cordon", id=A, reason="smells")
    await cluster.published_is(gpu_0=["cordoned"], gpu_1=["unhealthy"])
    assert cluster.generation() > before  # Or the scheduler believes the slices of before.


@pytest.mark.parametrize("first", ["goes on", "was killed"])
async def test_a_gateway_that_starts_late_knows_its_slices(node: Node, cluster: Cluster, first: str) -> None:
    one = await started(cluster)
    if first == "was killed":
        one.kill()
    two = cluster.gateway("--dra", "only")
    for _ in range(300):
        await node.pass_time(0.1)
        assert cluster.published() == {"gpu-0": [], "gpu-1": []}
    assert not two.said("a device is not offered here, because another DRA driver offers it")


async def test_of_a_kubelet_that_is_not_known_yet_one_gateway_at_a_time_registers(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    held = cluster.claim("held", "gpu-0")
    await cluster.prepare(held)
    await cluster.server.stop()
    cluster.gateway("--dra", "only")
    await node.pass_time(30)
    assert len(cluster.dra.drivers) == 1
    await node.gateways[0].terminate()
    await node.until(lambda: cluster.dra.is_connected, "the other one")
    await cluster.prepare(held)


async def test_slices_say_what_claims_choose_by(node: Node, cluster: Cluster) -> None:
    gpus = [{"uuid": A, "numa": 0}, {"uuid": B, "numa": 1}]
    node.simulate({GPU: {"gpus": gpus, "product": "NVIDIA H100 80GB HBM3", "memory": 80}})
    await cluster.start_kubelet()
    cluster.gateway("--dra", "only")
    await cluster.published_is(gpu_0=[], gpu_1=[])
    for number, device in enumerate(cluster.slices().values()):
        said = {name: next(iter(value.values())) for name, value in device["attributes"].items()}
        assert (said["type"], said["uuid"], said["index"]) == ("gpu", (A, B)[number], number)
        assert (said["productName"], said["resource"]) == ("NVIDIA H100 80GB HBM3", GPU)
        assert said["resource.kubernetes.io/numaNode"] == number
        assert device["capacity"]["memory"]["value"] == "80Gi"


def spelled(device: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a published device's attributes and its capacities."""
    attributes = {name: next(iter(value.values())) for name, value in device["attributes"].items()}
    return attributes, {name: one["value"] for name, one in device["capacity"].items()}


async def of_nvidia(cluster: Cluster, nvidia: Nvidia, count: int, *options: str) -> None:
    """Start a gateway that offers NVIDIA's GPUs by DRA, and wait until slices offer them."""
    nvidia.show()
    await cluster.start_kubelet()
    driver = ("--backend", "nvidia", "--container-driver-root", str(nvidia.driver))
    cluster.gateway(*driver, "--dra", "only", *options)
    await cluster.node.until(lambda: len(cluster.published()) == count, f"{count} devices")


async def test_a_claim_brings_the_imex_channel_of_the_configuration(node: Node) -> None:
    nvidia, channel = Nvidia(node), "nvidia-caps-imex-channels/channel0"
    (nvidia.dev / channel).parent.mkdir()
    (nvidia.dev / channel).touch()
    node.cdi.mkdir(exist_ok=True)
    nvidia.cdi.rmdir()
    nvidia.cdi.symlink_to(node.cdi)  # The container runtime of this node looks there.
    async with Cluster(node) as cluster:
        await of_nvidia(cluster, nvidia, 4, "--imex-channel-ids", "0")
        assert f"/dev/{channel}" in (await cluster.prepare(cluster.claim("one", "gpu-0"))).nodes


async def test_claims_choose_mig_instances_by_what_nvidias_driver_says_of_them(node: Node, nvidia: Nvidia) -> None:
    for gpu in nvidia.world.gpus:
        gpu.addressing = 1
    half, small = nvidia.world.mig(0, "3g.40gb", "1g.10gb+me")
    (all_of_it,) = nvidia.world.mig(1, "7g.80gb")
    async with Cluster(node) as cluster:
        await of_nvidia(cluster, nvidia, 5, "--mig-strategy", "mixed")
        there = {str(said[0]["uuid"]): said for said in map(spelled, cluster.slices().values())}
    engines = "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"
    for part, counts, memory, numbers in (
        (half, "60 3 3 0 3 0", "40448Mi", range(4)),
        (small, "16 1 1 0 1 1", "9984Mi", range(4, 5)),
        (all_of_it, "132 8 7 0 7 1", "81152Mi", range(8)),
    ):
        wanted = {"memory": memory, **dict(zip(engines, counts.split(), strict=True))}
        assert there[part.uuid][1] == wanted | {f"memorySlice{number}": "1" for number in numbers}
    said = there[all_of_it.uuid][0]
    theirs = {
        "type": "mig",
        "profile": "7g.80gb",
        "parentUUID": nvidia.uuids[1],
        "productName": "NVIDIA H100 80GB HBM3",
        "brand": "Nvidia",
        "architecture": "Hopper",
        "cudaComputeCapability": "9.0.0",
        "driverVersion": "550.54.15",
        "cudaDriverVersion": "12.4.0",
        "addressingMode": "HMM",
        "resource.kubernetes.io/pciBusID": nvidia.world.gpus[1].pci,
        "pcieBusID": nvidia.world.gpus[1].pci,  # As NVIDIA's driver said it up to 25.8.
        "resource.kubernetes.io/numaNode": 0,
    }
    assert said | theirs == said


@pytest.mark.parametrize("attribute", ["pciBusID", "resource.kubernetes.io/pciBusID"])
async def test_another_driver_s_gpu_is_known_by_any_spelling(node: Node, nvidia: Nvidia, attribute: str) -> None:
    async with Cluster(node) as cluster:
        await of_nvidia(cluster, nvidia, 4)
        theirs = cluster.offer(THEIRS, d="x")
        address = {attribute: {"string": f"0000{nvidia.world.gpus[1].pci}".upper()}}
        cluster.server.change(theirs, lambda one: one["spec"]["devices"][0].update(attributes=address))
        await node.until(lambda: {*cluster.published()} == {"gpu-0", "gpu-2", "gpu-3"}, "theirs to go")


async def test_devices_have_the_names_of_nvidias_driver(node: Node, nvidia: Nvidia) -> None:
    nvidia.world.gpus[0].minor, nvidia.world.gpus[3].minor = 3, 0
    nvidia.world.mig(1, "1g.10gb", "1g.10gb+me")
    nvidia.world.mig(2, "1c.3g.40gb")
    async with Cluster(node) as cluster:
        await of_nvidia(cluster, nvidia, 5, "--mig-strategy", "mixed")
        there = {name: spelled(one)[0]["uuid"] for name, one in cluster.slices().items()}
        gpus, parts = nvidia.world.gpus, [*nvidia.world.gpus[1].instances, *nvidia.world.gpus[2].instances]
        names = ("gpu-1-mig-1g10gb-19-0", "gpu-1-mig-1g10gb-me-20-1", "gpu-2-mig-1c3g40gb-0")
        assert there == {"gpu-3": gpus[0].uuid, "gpu-0": gpus[3].uuid} | {
            name: part.uuid for name, part in zip(names, parts, strict=True)
        }


@pytest.mark.parametrize(("mode", "said"), [(None, None), (0, "None"), (1, "HMM"), (2, "ATS"), (3, None)])
async def test_claims_choose_gpus_by_their_addressing_mode(
    node: Node, nvidia: Nvidia, mode: int | None, said: str | None
) -> None:
    nvidia.world.gpus[0].addressing = mode
    async with Cluster(node) as cluster:
        await of_nvidia(cluster, nvidia, 4)
        attributes, capacities = spelled(cluster.slices()["gpu-0"])
        assert attributes.get("addressingMode") == said
        assert [*capacities] == ["memory"]


async def test_claims_choose_gpus_of_amd_by_their_device_id(node: Node) -> None:
    host = Amd(node, fakes.mi300x)
    (host.tree.pci(host.tree.boards[1]) / "device").write_text("none\n")
    async with Cluster(node) as cluster:
        await cluster.start_kubelet()
        cluster.gateway("--backend", "amd", "--dra", "only")
        await node.until(lambda: cluster.published(OF_AMD), "slices")
        there = [spelled(one)[0] for one in cluster.slices(OF_AMD).values()]
        lacking = host.tree.boards[1].pci
        for one in there:
            assert one.get("deviceID") == (None if one["resource.kubernetes.io/pciBusID"] == lacking else "0x74a1")


def taints(cluster: Cluster) -> dict[str, list[dict[str, str]]]:
    """Return the taints of each device that has some."""
    return {name: one["taints"] for name, one in cluster.slices().items() if "taints" in one}


UNHEALTHY = {"key": "device-plugin-gateway.io/unhealthy", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("xid", "taint"), [(79, {"key": f"{NVIDIA}/xid", "value": "79"}), (None, {"key": f"{NVIDIA}/gpu-lost"})]
)
async def test_an_unhealthy_gpu_has_the_taint_of_nvidias_driver_too_while_it_is_so(
    node: Node, nvidia: Nvidia, xid: int | None, taint: dict[str, str]
) -> None:
    async with Cluster(node) as cluster:
        await of_nvidia(cluster, nvidia, 4)
        if xid is None:
            nvidia.world.gpus[1].lost = True
            nvidia.show()
        else:
            nvidia.event(1, xid)
        await node.until(lambda: any(cluster.published().values()), "a taint")
        assert taints(cluster) == {"gpu-1": [UNHEALTHY, taint | {"effect": "NoSchedule"}]}
        nvidia.world.gpus[1].lost = False
        nvidia.show()
        if xid is None:  # It answers again, so it was reset.
            await cluster.published_is(gpu_0=[], gpu_1=[], gpu_2=[], gpu_3=[])
        else:
            node.gateways[-1].kill()
            await of_nvidia(cluster, nvidia, 4)
            await node.pass_time(30)
            assert taints(cluster) == {"gpu-1": [UNHEALTHY, taint | {"effect": "NoSchedule"}]}


@pytest.mark.parametrize("cordoned", [False, True])
async def test_an_unhealthy_gpu_without_xid_has_our_taint_alone(node: Node, cluster: Cluster, cordoned: bool) -> None:
    await started(cluster)
    simulate(node, unhealthy=A)
    await cluster.published_is(gpu_0=["unhealthy"], gpu_1=[])
    if cordoned:
        await cluster.node.gateways[-1].order("cordon", id=A, reason="Xid 79 (or so)")
        await node.pass_time(5)
    assert taints(cluster) == {"gpu-0": [UNHEALTHY]}


async def test_each_vendor_has_a_driver_and_another_process_holds_up_one_alone(node: Node, cluster: Cluster) -> None:
    node.simulate({GPU: {"gpus": [{"uuid": A}]}, AMD: {"gpus": [{"uuid": "a", "device_nodes": ["/dev/dri/card1"]}]}})
    await other_driver(node)
    await cluster.start_kubelet()
    cluster.gateway("--dra", "only")
    await node.until(lambda: cluster.published(OF_AMD), "slices")
    await node.pass_time(20)
    assert not ours(cluster)
    [name] = cluster.published(OF_AMD)
    assert (await cluster.prepare(cluster.claim("claim", name, driver=OF_AMD))).nodes == ("/dev/dri/card1",)


# -- another process with the driver's name ---------------------------------------------------------------------------


def publishes(cluster: Cluster, *devices: str) -> str:
    """Have the other process publish devices; return its slice."""
    at, uuids = f"{cluster.api}/resourceslices/n1-{UNDER}", {"gpu-0": A, "gpu-1": B}
    shown = [{"name": one, "attributes": {"uuid": {"string": uuids[one]}}} for one in devices]
    cluster.server.put(at, spec={**SLICE, "devices": shown})
    return at


def ours(cluster: Cluster) -> int:
    """Return how many slices the gateway has."""
    return sum(one.endswith(OURS) for one in cluster.server.objects)


async def rival_is(cluster: Cluster, part: str, seconds: float = 60) -> None:
    """Wait until people read so of the other process."""

    async def said() -> bool:
        told = str((await cluster.node.gateways[-1].status())["drivers"])
        return part in told if part else "'rival': ''" in told

    await cluster.node.eventually(said, f"{part!r} in {(await cluster.node.gateways[-1].status())['drivers']}", seconds)


async def rivalled(cluster: Cluster, version: str = "1.34") -> Any:
    """Start a kubelet and another process with the driver's name, then a gateway."""
    simulate(cluster.node)
    other = await other_driver(cluster.node)
    await cluster.start_kubelet(version)
    cluster.gateway("--dra", "only")
    await rival_is(cluster, "listens on")
    return other


@pytest.mark.parametrize("file", [f"{NVIDIA}-reg.sock", "x.sock", "nvidia", "folder/x.sock", "silent"])
async def test_another_process_is_known_by_what_its_socket_says(node: Node, cluster: Cluster, file: str) -> None:
    simulate(node)
    silent = file == "silent"
    name = f"{NVIDIA}-reg.sock" if silent else file
    await other_driver(node, "another.example.com", "another.sock")
    await other_driver(node, silent=True, file="csi.sock")
    await other_driver(node, file=f".{NVIDIA}-reg.sock")  # A kubelet takes none with a dot.
    await started(cluster)
    our = cluster.dra.drivers[-1].path
    other = await other_driver(node, file=name, silent=silent)
    await rival_is(cluster, f"listens on {name}")
    await node.until(lambda: not ours(cluster), "our slices to go")
    await node.pass_time(30)
    assert not our.exists()
    assert await node.gateways[-1].is_ready(), "another pod in its place would change nothing"
    other.kill()
    await cluster.published_is(90, gpu_0=[], gpu_1=[])
    await rival_is(cluster, "")


async def test_what_another_process_publishes_stays_through_its_updates_and_while_claims_have_it(node: Node) -> None:
    version = "1.33"  # Later ones delete the slices of who is away.
    async with Cluster(node, version) as cluster:
        other = await rivalled(cluster, version)
        theirs = publishes(cluster, "gpu-0", "gpu-1")
        there = cluster.server.objects[theirs]
        claim = cluster.allocate("theirs", "gpu-0")
        for _ in range(3):
            await node.pass_time(20)
            other.kill()
            await rival_is(cluster, "may be in an update")
            await node.pass_time(20)
            other = await other_driver(node)
            await rival_is(cluster, "listens on")
        other.kill()
        await node.pass_time(90)
        await rival_is(cluster, "default/theirs")
        assert cluster.server.objects[theirs] == there
        assert (ours(cluster), cluster.server.asked("PATCH")) == (0, [])
        cluster.forget(claim)
        await cluster.published_is(gpu_0=[], gpu_1=[])
        await node.until(lambda: theirs not in cluster.server.objects, "theirs to go")
        await cluster.published_is(gpu_0=[], gpu_1=[])
        await cluster.prepare(cluster.claim("ours", "gpu-0"))


async def test_slices_that_are_written_show_that_their_process_lives(node: Node, cluster: Cluster) -> None:
    simulate(node)
    await cluster.start_kubelet()
    await node.pass_time(2)
    theirs = publishes(cluster, "gpu-0")
    cluster.gateway("--dra", "only")
    for number in range(2, 8):
        await node.pass_time(40)
        cluster.server.change(theirs, lambda one: one["spec"]["pool"].update(generation=number))  # noqa: B023
    assert ours(cluster) == 0
    assert theirs in cluster.server.objects
    await cluster.published_is(90, gpu_0=[], gpu_1=[])


async def test_claims_of_a_process_that_ended_are_not_ours_to_prepare(node: Node, cluster: Cluster) -> None:
    other = await rivalled(cluster)
    theirs = publishes(cluster, "gpu-0", "gpu-1")
    claim = cluster.allocate("theirs", "gpu-0")
    await rival_is(cluster, UNDER)
    cluster.server.remove(theirs)
    other.kill()
    await node.pass_time(40)
    assert not cluster.dra.is_connected
    await node.until(lambda: cluster.dra.is_connected, "our driver")
    await rival_is(cluster, "default/theirs")
    assert cluster.published() == {}
    await cluster.refused(claim, "ResourceSlices of another process")
    await cluster.unprepare(claim)
    cluster.forget(claim)
    await cluster.published_is(gpu_0=[], gpu_1=[])


async def test_while_ours_has_claims_it_stays_and_leaves_the_other_s_alone(node: Node, cluster: Cluster) -> None:
    await started(cluster)
    mine = cluster.claim("mine", "gpu-1")
    got = await cluster.prepare(mine)
    our = cluster.dra.drivers[-1]
    other = await other_driver(node)
    publishes(cluster, "gpu-0")
    await rival_is(cluster, UNDER)
    await node.until(lambda: not ours(cluster), "our slices to go")
    theirs, unknown = cluster.allocate("theirs", "gpu-0"), cluster.allocate("unknown", "gpu-7")
    gone = cluster.allocate("gone", "gpu-0")
    cluster.forget(gone)
    await node.pass_time(20)
    cluster.dra.drivers = [our]  # The kubelet calls ours once more.
    for call in (cluster.dra.prepare, cluster.dra.unprepare):
        with pytest.raises(KubeletError, match=f"{NVIDIA}-reg.sock"):
            await node.kubelet.ask(call(theirs))
    for neither in (unknown, gone):
        await node.kubelet.ask(cluster.dra.unprepare(neither))
    await cluster.server.stop()
    with pytest.raises(KubeletError, match="cannot read claim default/theirs"):
        await node.kubelet.ask(cluster.dra.unprepare(theirs))
    await cluster.server.start()
    assert await cluster.prepare(mine) == got
    other.kill()
    await node.kubelet.ask(cluster.dra.unprepare(theirs))  # Nobody else can.
    await other_driver(node)
    await rival_is(cluster, "listens on")
    await cluster.unprepare(mine)
    await node.until(lambda: not our.path.exists(), "our socket to go")


async def test_without_the_api_server_ours_is_there_for_its_prepared_claims_alone(node: Node, cluster: Cluster) -> None:
    one = await started(cluster)
    held = cluster.claim("held", "gpu-0")
    await cluster.prepare(held)
    await cluster.server.stop()
    await one.terminate()
    two = cluster.gateway("--dra", "only")
    await cluster.connected()
    await cluster.unprepare(held)
    await two.terminate()
    cluster.gateway("--dra", "only")
    await node.pass_time(30)
    assert not cluster.dra.is_connected
    await cluster.server.start()
    await cluster.connected()


async def test_what_a_process_with_our_drivers_name_gave_to_pods_is_given_by_neither_api(node: Node) -> None:
    async with serving_both(node) as cluster:
        other = await other_driver(node)
        theirs = publishes(cluster, "gpu-0")
        await node.allocatable_is(1)
        claim = cluster.allocate("theirs", "gpu-0")
        with pytest.raises(Exception, match=f"{NVIDIA} is not registered: another process"):
            await node.gateways[-1].order("move", to="dra", ids=[])
        cluster.server.remove(theirs)  # A kubelet does that half a minute after.
        other.kill()
        await node.pass_time(100)
        await words(cluster, A, "claim default/theirs may have it")
        assert node.allocatable() == 1
        assert (await node.admit("pod")).devices[GPU] == (B,)
        await node.refused("other")
        cluster.forget(claim)
        await node.allocatable_is(2)
