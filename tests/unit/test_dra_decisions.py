"""What DRA offers, publishes and hands out: tables of decisions, without sockets or files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from devices.boards import Place
from devices.claims import ClaimName, Prepared, Refused
from devices.life.states import Entry, State
from devices.model import ContainerAnswer, Device, DeviceNode, Health, Mount
from devices.replicas import ids, unshared
from devices.source import Facts, Hindrance
from gateway.configuration import dra as settings
from gateway.configuration.settings import ConfigError, Given
from gateway.dra import cdi, claims, offer, records, slices, sockets
from gateway.dra.claims import Grant, ResourceClaim, Toleration, Wait
from gateway.dra.offer import Ailment, Offer, Taken, Version
from gateway.dra.records import Pod
from gateway.dra.slices import Pool, Slice
from gateway.kubelet.beliefs import Look
from gateway.kubelet.view import View
from gateway.memory.claimed import Claimed, ClaimedDevice, holding, holds
from gateway.memory.holdings import remembered_only
from gateway.sides.table import Offered
from gateway.telling.readiness import judge_drivers
from gateway.telling.sides import DriverStatus

COMPONENT = Path(__file__).parents[2] / "deploy" / "kustomize" / "components" / "dra"
GPU, MIG, AMD, FILE = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "amd.com/gpu", "example.com/fpga"
FREE = Taken()


def entry(device_id: str, state: State = State.PRESENT, reason: str = "", **device: Any) -> Entry:
    well = state is State.PRESENT
    return Entry(Device(device_id, Health.HEALTHY if well else Health.UNHEALTHY, **device), state, reason)


def offered(
    entries: Mapping[str, list[Entry]], facts: Mapping[str, Facts], taken: Taken | None = FREE, **drivers: str
) -> tuple[list[Offer], dict[str, str]]:
    named = {name.replace("_", "."): driver for name, driver in drivers.items()}
    found, withheld = offer.offers(
        entries,
        lambda _: lambda one: facts.get(one, Facts()),
        lambda _: taken,
        named,
        lambda pci: "pci0000:00" if pci else "",
    )
    return found, {one.name: one.reason for one in withheld}


def test_what_another_driver_offers_is_withheld() -> None:
    whose = {"GPU-a": "x offers it"}
    found, withheld = offer.offers(
        {GPU: [entry("GPU-a"), entry("GPU-b")]},
        lambda _: lambda _: Facts(),
        lambda _: FREE,
        {},
        stranger=lambda attributes: whose.get(str(attributes.get("uuid")), ""),
    )
    assert [one.device_id for one in found] == ["GPU-b"]
    assert [(one.device_id, one.reason, one.lasts) for one in withheld] == [("GPU-a", "x offers it", True)]


A100 = Facts(
    product="A100",
    index="0",
    pci="0000:07:00.0",
    minor=3,
    driver="535.54.03",
    memory=40 << 30,
    traits={"architecture": "Ampere", "cudaComputeCapability": "8.0"},
)
PART = Facts(product="A100", index="0:2", parent="GPU-a", profile="1g.5gb", minor=3)
MI300 = Facts(
    product="MI300X",
    index="1",
    nodes=("/dev/kfd", "/dev/dri/card1", "/dev/dri/renderD129"),
    profile="spx_nps1",
    pci="0000:05:00.0",
    memory=192 << 30,
    capacities={"computeUnits": 304, "simdUnits": 1216},
)


@pytest.mark.parametrize(
    ("resource", "device_id", "facts", "driver", "name"),
    [
        (GPU, "GPU-a", A100, "gpu.nvidia.com", "gpu-3"),
        (GPU, "GPU-a", replace(A100, minor=None), "gpu.nvidia.com", "gpu-0"),
        (MIG, "MIG-x", PART, "gpu.nvidia.com", "gpu-3-mig-1g5gb-2"),
        (MIG, "MIG-x", replace(PART, slot="19-4"), "gpu.nvidia.com", "gpu-3-mig-1g5gb-19-4"),
        (MIG, "MIG-x", replace(PART, slot="20-0", profile="1g.10gb+me"), "gpu.nvidia.com", "gpu-3-mig-1g10gb-me-20-0"),
        (MIG, "MIG-x", replace(PART, slot="9-4", profile="1c.3g.20gb"), "gpu.nvidia.com", "gpu-3-mig-1c3g20gb-2"),
        (GPU, "GPU-a::4", A100, "gpu.nvidia.com", "gpu-3-shared-4"),
        (AMD, "amd-1", MI300, "gpu.amd.com", "gpu-1-129"),
        (AMD, "amd-1", replace(MI300, nodes=()), "gpu.amd.com", "gpu-1"),
        (FILE, "/dev/FPGA_0", Facts(), "example.com", "dev-fpga-0"),
        (FILE, f"/dev/{'x' * 59}", Facts(), "example.com", f"dev-{'x' * 59}"),
    ],
)
def test_names(resource: str, device_id: str, facts: Facts, driver: str, name: str) -> None:
    [one], _ = offered({resource: [entry(device_id)]}, {device_id: facts})
    assert (one.driver, one.name, one.resource, one.device_id) == (driver, name, resource, device_id)


def test_an_operator_names_drivers() -> None:
    [one], _ = offered({FILE: [entry("/dev/a")]}, {}, example_com="fpga.example.com")
    assert one.driver == "fpga.example.com"


def test_names_are_labels_and_distinct() -> None:
    long = [f"/dev/{'x' * 80}{number}" for number in range(2)]
    found, _ = offered({FILE: [entry(one) for one in (*long, "/dev/a-b", "/dev/a_b")]}, {})
    names = [one.name for one in found]
    assert len(set(names)) == 4
    assert all(len(name) <= 63 for name in names)
    backwards, _ = offered({FILE: [entry(one) for one in ("/dev/a_b", "/dev/a-b", *long[::-1])]}, {})
    assert {(one.device_id, one.name) for one in backwards} == {(one.device_id, one.name) for one in found}
    [alone], _ = offered({FILE: [entry(long[1])]}, {})
    assert alone.name == names[1]


def test_attributes_are_the_vendors() -> None:
    found, _ = offered(
        {
            GPU: [entry("GPU-a", numa_nodes=(1,))],
            MIG: [entry("MIG-x", part_of="GPU-a")],
            AMD: [entry("amd-1", numa_nodes=(1,))],
            FILE: [entry("/dev/a")],
        },
        {"GPU-a": A100, "MIG-x": PART, "amd-1": MI300},
    )
    whole, part, amd, file = (dict(one.attributes) for one in found)
    assert whole == {
        "type": "gpu",
        "uuid": "GPU-a",
        "resource": GPU,
        "productName": "A100",
        "index": 0,
        "minor": 3,
        "pcieBusID": "0000:07:00.0",
        "resource.kubernetes.io/pciBusID": "0000:07:00.0",
        "driverVersion": Version("535.54.3"),
        "architecture": "Ampere",
        "cudaComputeCapability": Version("8.0.0"),
        "resource.kubernetes.io/pcieRoot": "pci0000:00",
        "resource.kubernetes.io/numaNode": 1,
    }
    assert part == {
        "type": "mig",
        "uuid": "MIG-x",
        "resource": MIG,
        "productName": "A100",
        "parentUUID": "GPU-a",
        "parentIndex": 0,
        "parentMinor": 3,
        "profile": "1g.5gb",
    }
    assert [one.memory for one in found] == [40 << 30, 0, 192 << 30, 0]
    assert found[1].place == Place("GPU-a", "MIG-x")
    assert (amd["type"], amd["partitionProfile"], amd["numaNode"]) == ("amdgpu", "spx_nps1", 1)
    assert (amd["resource.kubernetes.io/pciBusID"], "pcieBusID" in amd) == ("0000:05:00.0", False)
    [change] = slices.changes(Pool("gpu.amd.com", "n1", (found[2],)), {})
    assert change.body is not None
    assert change.body["spec"]["devices"][0]["capacity"] == {
        "memory": {"value": "192Gi"},
        "computeUnits": {"value": "304"},
        "simdUnits": {"value": "1216"},
    }
    assert (file["type"], file["uuid"]) == ("file", "/dev/a")


@pytest.mark.parametrize(
    ("product", "told"), [("x" * 64, True), ("x" * 65, False), ("ä" * 32, True), ("ä" * 33, False)]
)
def test_a_value_that_is_too_long_is_left_out(product: str, told: bool) -> None:
    [one], _ = offered({GPU: [entry("GPU-a")]}, {"GPU-a": replace(A100, product=product)})
    assert ("productName" in one.attributes) is told


@pytest.mark.parametrize(("nodes", "told"), [((), None), ((1,), 1), ((0, 1), None)])
def test_a_device_on_several_numa_nodes_is_on_none(nodes: tuple[int, ...], told: int | None) -> None:
    [one], _ = offered({GPU: [entry("GPU-a", numa_nodes=nodes)]}, {"GPU-a": A100})
    assert one.attributes.get("resource.kubernetes.io/numaNode") == told


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("535.54.03", "535.54.3"),
        ("550.144", "550.144.0"),
        ("6", "6.0.0"),
        ("6.8.0-31-generic", "6.8.0"),
        ("1.2.3.4", "1.2.3"),
        ("", None),
        ("none", None),
    ],
)
def test_versions(text: str, version: str | None) -> None:
    assert offer.version(text) == (None if version is None else Version(version))


ILL = entry("a", State.UNHEALTHY, "XID 79")
REPAIRED = replace(entry("a", State.CORDONED, "repair"), beneath=entry("a"))


@pytest.mark.parametrize(
    ("one", "taken", "why_not"),
    [
        (entry("a"), FREE, ""),
        (ILL, FREE, ""),
        (REPAIRED, FREE, ""),
        (entry("a"), None, "records can't be read"),
        (entry("a"), Taken(held={"a"}), "a pod holds it by the device plugin API"),
        (entry("a"), Taken(offered={"a"}), "a device plugin on this node offers it"),
        (entry("a"), Taken(held={"b"}, offered={"b"}), ""),
        (entry("a", State.WITHHELD, "held as b"), FREE, "held as b"),
        (entry("a", State.RELEASED), FREE, "released"),
        (entry("a", State.LOST), FREE, "lost"),
        (entry("a", State.WITHDRAWN), FREE, "withdrawn"),
        (entry("a", State.NOT_LOOKED_YET), FREE, "not looked yet"),
        (replace(REPAIRED, beneath=entry("a", State.LOST)), FREE, "lost"),
        (replace(REPAIRED, beneath=ILL), FREE, ""),
        (replace(entry("a", State.RETURNING), beneath=entry("a")), Taken(offered={"a"}), ""),
        (replace(entry("a", State.LENT), beneath=entry("a")), Taken(held={"a"}, offered={"a"}), "a pod holds it"),
    ],
)
def test_who_is_offered(one: Entry, taken: Taken | None, why_not: str) -> None:
    found, withheld = offered({GPU: [one]}, {"a": A100}, taken)
    assert len(found) == (not why_not)
    assert why_not in withheld.get("gpu-3", "")


@pytest.mark.parametrize(
    ("one", "ailment", "reason", "well"),
    [
        (entry("a"), None, "", True),
        (ILL, Ailment.UNHEALTHY, "XID 79", False),
        (REPAIRED, Ailment.CORDONED, "repair", True),
        (replace(REPAIRED, beneath=ILL), Ailment.UNHEALTHY, "repair", False),
        (Entry(Device("a", Health.UNHEALTHY), State.PRESENT), Ailment.UNHEALTHY, "", False),
        (
            replace(REPAIRED, beneath=replace(entry("a", State.ELSEWHERE), beneath=ILL)),
            Ailment.UNHEALTHY,
            "repair",
            False,
        ),
    ],
)
def test_ailments(one: Entry, ailment: Ailment | None, reason: str, well: bool) -> None:
    [found], _ = offered({GPU: [one]}, {"a": A100})
    assert (found.ailment, found.reason, found.is_well) == (ailment, reason, well)


class Leaves:
    """All goes back to the device plugin API, or is there."""

    def __init__(self, shows: Offered = Offered.LEAVING) -> None:
        self._shows = shows

    def offered(self, _: Entry) -> Offered:
        return self._shows

    def words(self, _: Entry) -> str:
        return "it is there"


def test_what_is_the_other_apis_is_looked_up_no_more() -> None:
    found, [one] = offer.offers(
        {GPU: [entry("a")]}, lambda _: lambda _: A100, lambda _: FREE, {}, owner=Leaves(Offered.NOT)
    )
    assert (found, one.reason, one.lasts) == ([], "it is there", True)
    _, [one] = offer.offers({GPU: [entry("a")]}, lambda _: lambda _: A100, lambda _: None, {}, owner=Leaves())
    assert not one.lasts


@pytest.mark.parametrize(
    ("one", "ailment"), [(entry("a"), Ailment.LEAVING), (ILL, Ailment.UNHEALTHY), (REPAIRED, Ailment.CORDONED)]
)
def test_what_leaves_is_ill_all_the_same(one: Entry, ailment: Ailment) -> None:
    [found], _ = offer.offers({GPU: [one]}, lambda _: lambda _: A100, lambda _: FREE, {}, owner=Leaves())
    assert found.ailment is ailment
    [found], _ = offer.offers({GPU: [one]}, lambda _: lambda _: A100, lambda _: FREE, {}, overlooked="an old kubelet")
    assert found.ailment is (Ailment.BY_NAME if ailment is Ailment.LEAVING else ailment)


def view(held: dict[str, str], remembered: dict[str, str], source: Any = "pod-resources") -> View:
    return View(held={GPU: held}, remembered={GPU: remembered}, source=source)


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (view({"a": "ns/p/c"}, {}), {}),
        (view({}, {"a": "u/c", "b": "v/c"}), {"a": "u", "b": "v"}),
        (view({"a": "ns/p/c"}, {"a": "u/c"}), {}),
        (view({"a": "u/c"}, {"a": "u/c"}, source="checkpoint"), {}),
    ],
)
def test_which_pods_the_checkpoint_alone_names(shown: View, found: dict[str, str]) -> None:
    assert remembered_only(shown, GPU) == found


def pod(uid: str, phase: str = "Running") -> Pod:
    return msgspec.convert({"metadata": {"uid": uid}, "status": {"phase": phase}}, Pod)


def test_a_pod_that_has_not_ended_lives_and_a_static_one_under_both_its_uids() -> None:
    mirror = msgspec.convert({"metadata": {"uid": "m", "annotations": {"kubernetes.io/config.hash": "s"}}}, Pod)
    assert records.living([pod("a"), pod("b", "Succeeded"), pod("c", "Failed"), pod("d", "Pending"), mirror]) == {
        "a",
        "d",
        "m",
        "s",
    }


@pytest.mark.parametrize(
    ("holders", "listed", "moves", "says"),
    [
        ({"a": "ns/p/c"}, "a", True, "ns/p/c"),
        ({"a": ""}, "a", True, "a container"),  # It was given since the records were read.
        ({}, "a", True, None),  # The kubelet would give it away still.
        ({}, "", True, ""),
        ({}, "a", False, ""),
        (None, "a", False, None),
    ],
)
def test_who_holds_a_device(holders: dict[str, str] | None, listed: str, *, moves: bool, says: str | None) -> None:
    last = Look(View(allocatable={GPU: frozenset(listed)}), 0.0, 0.0)
    assert records.first_holder([(GPU, entry("a"))], lambda _: holders, last, moves=moves) == says


# Slices.


def gpu(number: int, **more: Any) -> Offer:
    return Offer(
        "gpu.nvidia.com",
        f"gpu-{number}",
        GPU,
        f"GPU-{number}",
        Place(f"GPU-{number}"),
        {"uuid": f"GPU-{number}"},
        **more,
    )


def pool(*devices: Offer, **more: Any) -> Pool:
    return Pool("gpu.nvidia.com", "n1", devices, **more)


def carried_out(one: Pool, there: dict[str, Slice], last: int = 0) -> dict[str, Slice]:
    there = dict(there)
    for change in slices.changes(one, there, last):
        if change.body is None:
            del there[change.name]
        else:
            there[change.name] = msgspec.convert(change.body, Slice)
    return there


def shape(there: Mapping[str, Slice]) -> list[tuple[str, int, int, int]]:
    return [
        (name, one.generation, one.spec.pool["resourceSliceCount"], len(one.spec.devices or ()))
        for name, one in sorted(there.items())
    ]


def test_a_pool_is_one_slice_and_stays() -> None:
    there = carried_out(pool(gpu(0), gpu(1)), {})
    assert shape(there) == [("n1-gpu.nvidia.com-0", 1, 1, 2)]
    assert slices.changes(pool(gpu(1), gpu(0)), there) == []


@pytest.mark.parametrize("claims", [3, 7, 10, 27, 28])
def test_the_first_replicas_that_fit_are_on_different_gpus(claims: int) -> None:
    shared = [entry(one) for number in range(7) for one in ids(f"GPU-{number}", 4)]
    facts = {one.device.id: replace(A100, minor=int(unshared(one.device.id)[-1])) for one in shared}
    [only] = carried_out(pool(*offered({GPU: shared}, facts)[0]), {}).values()
    first = [device["attributes"]["uuid"]["string"] for device in only.spec.devices or ()][:claims]
    counts = [first.count(f"GPU-{number}") for number in range(7)]
    assert sum(counts) == claims
    assert max(counts) - min(counts) <= 1


def test_a_slice_as_it_is_written_at_the_api_server() -> None:
    ill = gpu(1, ailment=Ailment.UNHEALTHY)
    one = replace(gpu(0), attributes={"a": "x", "b": 1, "c": True, "d": Version("1.2.3")})
    [change] = slices.changes(pool(one, ill, owner="uid"), {})
    assert change.body == {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {
            "name": "n1-gpu.nvidia.com-0",
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid", "controller": True}],
        },
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "n1",
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": "gpu-0",
                    "attributes": {
                        "a": {"string": "x"},
                        "b": {"int": 1},
                        "c": {"bool": True},
                        "d": {"version": "1.2.3"},
                    },
                },
                {
                    "name": "gpu-1",
                    "attributes": {"uuid": {"string": "GPU-1"}},
                    "taints": [{"key": "device-plugin-gateway.io/unhealthy", "effect": "NoSchedule"}],
                },
            ],
        },
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [(80 << 30, "80Gi"), (81479 << 20, "81479Mi"), (1 << 40, "1Ti"), (3 << 10, "3Ki"), (1025, "1025")],
)
def test_memory_is_spelled_as_the_server_does(count: int, text: str) -> None:
    [change] = slices.changes(pool(gpu(0, memory=count)), {})
    assert change.body is not None
    assert change.body["spec"]["devices"][0]["capacity"] == {"memory": {"value": text}}


def test_v1beta1_has_fields_in_basic() -> None:
    [change] = slices.changes(pool(gpu(0), version="v1beta1", taints=False), {})
    assert change.body is not None
    assert change.body["apiVersion"] == "resource.k8s.io/v1beta1"
    assert change.body["spec"]["devices"] == [{"name": "gpu-0", "basic": {"attributes": {"uuid": {"string": "GPU-0"}}}}]


@pytest.mark.parametrize(
    ("count", "ill", "shapes"),
    [(0, 0, [0]), (128, 0, [128]), (129, 0, [128, 1]), (300, 0, [128, 128, 44]), (64, 1, [64]), (65, 1, [64, 1])],
)
def test_a_slice_has_no_more_devices_than_it_may(count: int, ill: int, shapes: list[int]) -> None:
    devices = [gpu(n, ailment=Ailment.CORDONED if n < ill else None) for n in range(count)]
    there = carried_out(pool(*devices), {})
    assert [one[1:] for one in shape(there)] == [(1, len(shapes), size) for size in shapes]


def test_a_change_is_a_new_generation_of_the_whole_pool() -> None:
    there = carried_out(pool(*map(gpu, range(200))), {})
    there = carried_out(pool(*map(gpu, range(199))), there)
    assert [one[1:] for one in shape(there)] == [(2, 2, 128), (2, 2, 71)]
    there = carried_out(pool(gpu(0)), there)
    assert shape(there) == [("n1-gpu.nvidia.com-0", 3, 1, 1)]


def test_a_pool_whose_slices_are_counted_wrongly_is_written_again() -> None:
    [(name, one)] = carried_out(pool(gpu(0)), {}).items()
    counted = {name: replace(one, spec=replace(one.spec, pool=one.spec.pool | {"resourceSliceCount": 2}))}
    assert [one[1:] for one in shape(carried_out(pool(gpu(0)), counted))] == [(2, 1, 1)]


def test_what_is_left_over_goes_last() -> None:
    there = carried_out(pool(*map(gpu, range(200))), {})
    assert [change.body is None for change in slices.changes(pool(gpu(0)), there)] == [False, True]


def test_what_a_gateway_that_died_left_half_written_is_written_again() -> None:
    """It died before the second slice was written, or before the last one was deleted."""
    wanted = pool(gpu(0, memory=1), *map(gpu, range(1, 200)))
    there = carried_out(pool(*map(gpu, range(200))), {})
    half = carried_out(wanted, there) | {"n1-gpu.nvidia.com-1": there["n1-gpu.nvidia.com-1"]}
    assert {one[1] for one in shape(carried_out(wanted, half))} == {3}
    left = carried_out(pool(gpu(0)), {}) | {"n1-gpu.nvidia.com-1": there["n1-gpu.nvidia.com-1"]}
    assert [one[0] for one in shape(carried_out(pool(gpu(0)), left))] == ["n1-gpu.nvidia.com-0"]


def test_a_device_has_no_more_attributes_and_capacities_than_it_may() -> None:
    many = replace(gpu(0), attributes={str(number): number for number in range(40)}, capacities={"units": 1})
    for one, attributes in ((many, 31), (replace(many, memory=1), 30), (replace(many, capacities={}), 32)):
        [change] = slices.changes(pool(one), {})
        assert change.body is not None
        assert len(change.body["spec"]["devices"][0]["attributes"]) == attributes


def test_a_deleted_slice_comes_back_newer_than_it_was() -> None:
    assert shape(carried_out(pool(gpu(0)), {}, last=7)) == [("n1-gpu.nvidia.com-0", 8, 1, 1)]
    there = carried_out(pool(*map(gpu, range(200))), {})
    del there["n1-gpu.nvidia.com-1"]
    assert {one[1] for one in shape(carried_out(pool(*map(gpu, range(200))), there))} == {2}


def test_a_taints_time_is_the_servers() -> None:
    there = carried_out(pool(gpu(0, ailment=Ailment.UNHEALTHY)), {})
    [one] = there.values()
    assert one.spec.devices is not None
    one.spec.devices[0]["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    assert slices.changes(pool(gpu(0, ailment=Ailment.UNHEALTHY)), there) == []
    assert slices.changes(pool(gpu(0)), there) != []


def test_where_taints_are_not_known_the_ill_are_left_out() -> None:
    for known in ({"taints": False}, {"version": "v1beta1"}):
        there = carried_out(pool(gpu(0, ailment=Ailment.UNHEALTHY), gpu(1), **known), {})
        assert [one[3] for one in shape(there)] == [1]


def test_that_taints_are_dropped_shows() -> None:
    [written] = carried_out(pool(gpu(0, ailment=Ailment.UNHEALTHY)), {}).values()
    [bare] = carried_out(pool(gpu(0)), {}).values()
    assert slices.lacks_taints(written, bare)
    assert not slices.lacks_taints(written, written)
    assert not slices.lacks_taints(bare, bare)
    assert not slices.lacks_taints(written, msgspec.convert({**msgspec.to_builtins(bare), "spec": {}}, Slice))


def test_long_names_stay_names() -> None:
    one = replace(pool(), node="n" * 253)
    names = [slices.name_of(one, number) for number in range(3)]
    assert len(set(names)) == 3
    assert max(map(len, names)) <= 253
    [(name, there)] = carried_out(one, {}).items()
    assert slices.is_ours(name, there, one.node)


def test_the_slices_of_thousands_of_devices_are_ours() -> None:
    """Else they seem to be another process's, and nothing more is published."""
    ill = replace(gpu(0), ailment=Ailment.CORDONED)
    found = carried_out(pool(ill, *map(gpu, range(1, 10_000))), {})
    assert len(found) == 157
    assert all(slices.is_ours(name, one, "n1") for name, one in found.items())


@pytest.mark.parametrize("wrong", [{"taints": ["x"]}, {"taints": 1}, {"attributes": "x"}, {"basic": {"attributes": 1}}])
def test_of_a_device_of_another_shape_what_can_be_read_counts(wrong: dict[str, Any]) -> None:
    """It would end the gateway where its slice is looked at, or hide all others of the node."""
    [(name, mine)] = carried_out(pool(gpu(0)), {}).items()
    device = (mine.spec.devices or [])[0]
    told = {"metadata": {"name": name}, "spec": {**msgspec.to_builtins(mine.spec), "devices": [{**device, **wrong}]}}
    assert slices.changes(pool(gpu(0)), {name: msgspec.convert(told, slices.Slice)}) != [], "ours is written anew"
    told["spec"] |= {"driver": "x", "devices": [{**device, **wrong}, device]}
    assert "GPU-0" in slices.strangers([msgspec.convert(told, slices.Slice)], "n1", ())
    told["spec"]["devices"] = [{**device, **wrong}]
    assert bool(slices.strangers([msgspec.convert(told, slices.Slice)], "n1", ())) is ("taints" in wrong)


def test_other_drivers_devices_are_theirs() -> None:
    ours = carried_out(pool(gpu(0)), {})
    [(name, mine)] = ours.items()
    assert slices.is_ours(name, mine, "n1")
    other = msgspec.convert(
        {
            "metadata": {"name": "x"},
            "spec": {
                "driver": "dra.example.com",
                "nodeName": "n1",
                "devices": [{"name": "d", "attributes": {"uuid": {"string": "GPU-0"}}}, {"name": "e", "basic": {}}],
            },
        },
        Slice,
    )
    same = [{"name": "g", "attributes": {"uuid": {"string": "GPU-2"}}}]
    namesake = msgspec.convert(
        {"metadata": {"name": "y"}, "spec": {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": same}}, Slice
    )
    elsewhere = msgspec.convert(
        {"metadata": {"name": "z"}, "spec": {"driver": "gpu.nvidia.com", "nodeName": "n2"}}, Slice
    )
    basic = [{"name": "f", "basic": {"attributes": {"uuid": {"string": "GPU-1"}}}}]  # As a kubelet of 1.32 has it.
    older = replace(other, metadata=slices.Metadata("w"), spec=replace(other.spec, devices=basic))
    found = slices.strangers([*ours.values(), other, older, namesake, elsewhere], "n1", ours)
    assert found == {
        "GPU-0": "dra.example.com offers it as d in x",
        "GPU-1": "dra.example.com offers it as f in w",
        "GPU-2": "gpu.nvidia.com offers it as g in y",
    }
    assert not slices.is_ours("y", namesake, "n1")


HARDWARE: Mapping[str, tuple[dict[str, object], set[str]]] = {
    "a GPU of NVIDIA's driver": (
        {"uuid": "GPU-0", "resource.kubernetes.io/pciBusID": "0000:3B:00.0", "type": "gpu"},
        {"GPU-0", "0000:3b:00.0"},
    ),
    "a MIG instance": ({"uuid": "MIG-1", "parentUUID": "GPU-0", "index": 3}, {"MIG-1", "GPU-0"}),
    "an address as NVML writes it": ({"pcieBusID": "00000000:3B:00.0"}, {"0000:3b:00.0"}),
    "one that is passed through": ({"pciAddr": "0000:3b:00.0"}, {"0000:3b:00.0"}),
    "no hardware": ({"uuid": "", "productName": "GPU-0", "pciBusID": 7}, set()),
}


@pytest.mark.parametrize("name", HARDWARE)
def test_hardware_is_known_again_whatever_the_driver_calls_it(name: str) -> None:
    attributes, wanted = HARDWARE[name]
    assert slices.hardware(attributes) == wanted


# Claims.

ASKED = ClaimName("ns", "c", "u")
KEY = claims.key("gpu.nvidia.com", "u")


def claim(*results: dict[str, Any], uid: str = "u", config: Any = None) -> ResourceClaim:
    rows = [{"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0", **one} for one in results]
    status = {"allocation": {"devices": {"results": rows, "config": config}}}
    return msgspec.convert({"metadata": {"uid": uid, "namespace": "ns", "name": "c"}, "status": status}, ResourceClaim)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (claim({}, uid="v"), "another one by now"),
        (msgspec.convert({"metadata": {"uid": "u"}, "status": {}}, ResourceClaim), "not any more"),
        (claim({}, config=[{"opaque": {"driver": "gpu.nvidia.com", "parameters": {}}}]), "expected no parameters"),
        (claim({"pool": "n2"}), "expected devices of the pool n1"),
        (claim({}, {"pool": "n2"}), "expected devices of the pool n1"),
        (claim({"driver": "x"}), "expected 1 to 32 devices of gpu.nvidia.com"),
        (claim(*[{}] * 33), "got 33"),
    ],
)
def test_what_is_no_allocation_of_ours_is_refused(found: ResourceClaim, reason: str) -> None:
    refused = claims.allocated(found, ASKED, "gpu.nvidia.com", "n1")
    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_what_is_of_other_drivers_is_theirs() -> None:
    found = claim({}, {"driver": "x", "device": "d"}, config=[{"opaque": {"driver": "x"}}])
    results = claims.allocated(found, ASKED, "gpu.nvidia.com", "n1")
    assert not isinstance(results, Refused)
    assert [one.device for one in results] == ["gpu-0"]


def test_a_claim_has_as_many_devices_as_it_may() -> None:
    results = claims.allocated(claim(*[{}] * claims.MOST), ASKED, "gpu.nvidia.com", "n1")
    assert not isinstance(results, Refused)
    assert len(results) == claims.MOST


@pytest.mark.parametrize(
    ("kind", "key"),
    [(ResourceClaim, "resource.kubernetes.io/extended-resource-claim"), (Pod, "kubernetes.io/config.hash")],
)
def test_of_annotations_only_what_is_gone_by_is_kept(kind: type, key: str) -> None:
    """Any user's claim, or pod, may have 256 KiB of them, and all claims of the cluster are listed."""
    more = {f"a{number}": "" for number in range(10_000)}
    one: Any = msgspec.convert({"metadata": {"uid": "u", "annotations": {key: "true", **more}}}, kind)
    assert msgspec.to_builtins(one.metadata.annotations) == {key: "true"}


def test_a_claim_is_reserved_for_pods() -> None:
    status = {"reservedFor": [{"resource": "pods", "name": "p"}, {"resource": "podgroups", "name": "q"}]}
    assert claims.pods(msgspec.convert({"metadata": {"uid": "u"}, "status": status}, ResourceClaim)) == ["p"]


@pytest.mark.parametrize(
    ("results", "has", "unshown", "missing"),
    [
        ([{}], True, "", False),
        ([{"pool": "n2"}], False, "", False),
        ([{"adminAccess": True}], False, "", False),
        ([{"device": "gone"}], False, "claim ns/c", True),
        ([{}, {"device": "gone"}], True, "claim ns/c", True),
        ([{"driver": "x", "device": "shown"}], False, "", False),
        ([{"driver": "x", "device": "gone"}], False, "claim ns/c", False),
    ],
)
def test_what_claims_have_of_a_node(results: list[dict[str, Any]], *, has: bool, unshown: str, missing: bool) -> None:
    free = frozenset({("gpu.nvidia.com", "gpu-1"), ("x", "free")})
    boards = {("gpu.nvidia.com", "gpu-0"): "GPU-0", ("gpu.nvidia.com", "gpu-1"): "GPU-1"}
    found = claims.allocations([claim(*results)], "n1", boards, (free, free | {("x", "shown")}), {})
    had = {"GPU-0": "claim ns/c"} if has else {}
    assert found == claims.Allocated(had | {"GPU-1": "a ResourceSlice still offers it"}, frozenset(), unshown, missing)


def test_who_was_allocated_it_counts_though_a_slice_still_offers_it() -> None:
    one = ("gpu.nvidia.com", "gpu-0")
    assert claims.taken([claim({})], "n1", {one: "GPU-0"}, [one]) == {"GPU-0": "claim ns/c"}


def row(*devices: ClaimedDevice) -> Claimed:
    return Claimed("ns", "other", "gpu.nvidia.com", 1.0, list(devices))


HELD = ClaimedDevice("gpu-0", GPU, "GPU-0", "GPU-0", requests=["gpu"])
PARTED = ClaimedDevice("gpu-0-mig", MIG, "MIG-1", "GPU-0", "MIG-1")
COPY = ClaimedDevice("gpu-0-shared-0", GPU, "GPU-0::0", "GPU-0")
OTHER = claims.key("gpu.nvidia.com", "w")
REPLICA = replace(gpu(0), device_id="GPU-0::1", name="gpu-0")
SHARE = replace(HELD, share="s")


@pytest.mark.parametrize(
    ("had", "result", "same"),
    [
        (HELD, {}, True),
        (HELD, {"request": "gpu/large"}, True),
        (HELD, {"request": "more"}, False),
        (HELD, {"device": "gpu-1"}, False),
        (HELD, {"shareID": "s"}, False),
        (SHARE, {"shareID": "s"}, True),
        (SHARE, {"shareID": "t"}, False),
        (replace(HELD, former=True), {}, False),
    ],
)
def test_what_was_prepared_is_what_is_allocated(had: ClaimedDevice, result: dict[str, Any], *, same: bool) -> None:
    results = claims.allocated(claim(result), ASKED, "gpu.nvidia.com", "n1")
    assert not isinstance(results, Refused)
    assert claims.has(row(had), results) is same


@pytest.mark.parametrize(
    ("result", "stock", "others", "decision"),
    [
        ({}, gpu(0), {}, Grant),
        ({}, gpu(0), {OTHER: row(HELD)}, "gpu-0 is in use: still held as nvidia.com/gpu GPU-0 by claim ns/other"),
        ({}, gpu(0), {OTHER: row(PARTED)}, "by claim ns/other"),
        ({}, gpu(0), {OTHER: row(replace(HELD, board="GPU-1"))}, Grant),
        ({}, gpu(0), {claims.key("x.example.com", "w"): row(HELD)}, "is in use"),
        ({}, gpu(0), {KEY: row(HELD)}, Grant),
        ({}, REPLICA, {OTHER: row(COPY)}, Grant),
        ({}, REPLICA, {OTHER: row(replace(COPY, device_id="GPU-0::1"))}, "is in use"),
        ({}, REPLICA, {OTHER: row(HELD)}, "is in use"),
        ({}, gpu(0), {OTHER: row(COPY)}, "is in use"),
        ({"adminAccess": True}, gpu(0), {OTHER: row(HELD)}, Grant),
        ({}, gpu(0), {OTHER: row(replace(HELD, admin=True))}, Grant),
        ({}, gpu(1), {}, "gpu-0 can't be handed out: a pod holds it"),
        ({}, gpu(0, ailment=Ailment.UNHEALTHY, reason="XID 79"), {}, "gpu-0 is unhealthy: XID 79"),
        ({"tolerations": [{"operator": "Exists"}]}, gpu(0, ailment=Ailment.UNHEALTHY), {}, Grant),
        ({"adminAccess": True}, gpu(0, ailment=Ailment.UNHEALTHY), {}, Grant),
        ({}, gpu(0, ailment=Ailment.LEAVING), {}, Grant),
        ({}, gpu(0, ailment=Ailment.BY_NAME), {}, Grant),
        ({}, gpu(0, ailment=Ailment.CORDONED, reason="hums"), {}, "gpu-0 is cordoned: hums"),
    ],
)
def test_who_gets_a_device(result: dict[str, Any], stock: Offer, others: dict[str, Claimed], decision: Any) -> None:
    results = claims.allocated(claim(result), ASKED, "gpu.nvidia.com", "n1")
    assert not isinstance(results, Refused)
    found = claims.granted(ASKED, results, {stock.name: stock}, {"gpu-0": "a pod holds it"}, others)
    if isinstance(decision, str):
        assert isinstance(found, Wait)
        assert decision in found.reason
    else:
        assert isinstance(found, decision)


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "key": "k"}, True),
        ({"operator": "Exists", "key": "other"}, False),
        ({"operator": "Equal", "key": "k"}, True),
        ({"operator": "Equal", "key": "k", "value": "v"}, False),
        ({"operator": "Equal"}, False),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_tolerations(toleration: dict[str, str], covers: bool) -> None:
    assert msgspec.convert(toleration, Toleration).covers("k") is covers


def test_what_is_written_down_and_told() -> None:
    results = claims.allocated(claim({"request": "big/large", "shareID": "s"}), ASKED, "gpu.nvidia.com", "n1")
    assert not isinstance(results, Refused)
    grant = claims.granted(ASKED, results, {"gpu-0": gpu(0)}, {}, {})
    assert isinstance(grant, Grant)
    written = claims.claimed(ASKED, "gpu.nvidia.com", grant, 5.0)
    assert written == Claimed("ns", "c", "gpu.nvidia.com", 5.0, [replace(HELD, requests=["big"], share="s")])
    assert claims.prepared(written, "n1", {"gpu-0": ("a=b",)}) == (Prepared(("big",), "n1", "gpu-0", ("a=b",), "s"),)
    assert claims.uid_of(KEY) == "u"


def test_what_supervises_is_written_down_as_such() -> None:
    results = claims.allocated(claim({}, {"adminAccess": True}), ASKED, "gpu.nvidia.com", "n1")
    assert not isinstance(results, Refused)
    grant = claims.granted(ASKED, results, {"gpu-0": gpu(0)}, {}, {})
    assert isinstance(grant, Grant)
    assert [one.admin for one in claims.claimed(ASKED, "gpu.nvidia.com", grant, 5.0).devices] == [False, True]


@pytest.mark.parametrize(("said", "ids"), [("true", {"GPU-0"}), ("false", set()), ("", set())])
def test_what_pods_got_that_asked_by_name(said: str, ids: set[str]) -> None:
    one = claim({}, {"device": "gone"}, {"pool": "n2", "device": "gpu-1"})
    one.metadata.annotations = claims.Annotations(said) if said else None
    stock = {"gpu.nvidia.com": {"gpu-0": gpu(0), "gpu-1": gpu(1)}}
    assert claims.got_by_name([one], "n1", stock) == ids


def test_what_supervises_has_nothing() -> None:
    named = Claimed("ns", "n", "d", 0.0, [replace(COPY, board="GPU-2", device_id="GPU-2::0")], by_name=True)
    rows = {OTHER: row(replace(HELD, admin=True), replace(HELD, board="GPU-1", device_id="GPU-1")), "n@d": named}
    assert claims.by_board(rows) == (
        {"GPU-1": "claim ns/other", "GPU-2": "claim ns/n"},
        frozenset({"GPU-2::0"}),
    )


def test_claims_hold_hardware_against_the_other_api() -> None:
    prepared = {KEY: row(HELD, replace(PARTED, admin=True), replace(HELD, device_id="GPU-9", admin=True))}
    assert holding(prepared, GPU) == {"GPU-0": "claim ns/other"}
    many = Claimed("ns", "c", "d", 0.0, [HELD], ["p", "q", "r", "s", "t"])
    assert many.words == "claim ns/c (pods p, q, r, 2 more)"
    assert holding(prepared, MIG) == {}
    [one] = holds(prepared)
    assert (one.device_id, one.place, one.words) == (
        "GPU-0",
        Place("GPU-0"),
        "still held as nvidia.com/gpu GPU-0 by claim ns/other",
    )


def test_devices_that_one_container_gets_are_told_of_together() -> None:
    second = replace(HELD, name="gpu-1", device_id="GPU-1")
    third, other = replace(HELD, name="gpu-2", requests=["more"]), replace(PARTED, requests=["gpu"])
    assert list(claims.by_resource(row(HELD, other, second, third))) == [(HELD, second), (other,), (third,)]


# Readiness.

TAKEN, UNTAKEN = (
    DriverStatus(name="d.com", devices=2, registered=one, trouble="" if one else "no") for one in (True, False)
)


@pytest.mark.parametrize(
    ("drivers", "begun", "kubelet_s", "hindrances", "ready", "words"),
    [
        ([TAKEN], True, 5.0, (), True, "d.com: registered, 2 devices"),
        ([TAKEN, UNTAKEN], True, 5.0, (), False, "d.com: not registered; no"),
        ([UNTAKEN], True, None, (), True, "no kubelet takes registrations"),
        ([TAKEN], False, 5.0, (), False, "starting"),
        ([], True, 5.0, (), True, "no devices"),
        ([TAKEN], True, 5.0, (Hindrance("b", "why", held_up=True),), False, "backend b: why"),
        ([TAKEN], True, 5.0, (Hindrance("b", "why"),), True, "backend b: why"),
    ],
)
def test_readiness(drivers: Any, begun: bool, kubelet_s: Any, hindrances: Any, ready: bool, words: str) -> None:
    found = judge_drivers(drivers, begun=begun, kubelet_s=kubelet_s, hindrances=hindrances)
    assert (found.ready, words in found.text) == (ready, True)


# CDI.

NODES = ContainerAnswer(device_nodes=(DeviceNode("/dev/a", "/dev/b", "rw"),))


def test_a_claims_specification() -> None:
    answer = replace(NODES, envs={"K": "V"}, mounts=(Mount("/in", "/on", read_only=True),))
    assert cdi.specification("x.com", "u", {"d": answer, "e": ContainerAnswer(cdi_devices=("v/c=n",))}) == {
        "cdiVersion": "0.5.0",
        "kind": "x.com/claim",
        "devices": [
            {
                "name": "u-d",
                "containerEdits": {
                    "env": ["K=V"],
                    "deviceNodes": [{"path": "/dev/a", "hostPath": "/dev/b", "permissions": "rw"}],
                    "mounts": [
                        {
                            "hostPath": "/on",
                            "containerPath": "/in",
                            "options": ["rbind", "rprivate", "nosuid", "nodev", "ro"],
                        }
                    ],
                },
            }
        ],
    }


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (NODES, ("x.com/claim=u-d",)),
        (ContainerAnswer(cdi_devices=("v/c=n",)), ("v/c=n",)),
        (replace(NODES, cdi_devices=("v/c=n",)), ("v/c=n", "x.com/claim=u-d")),
    ],
)
def test_the_names_by_which_a_container_gets_it(answer: ContainerAnswer, names: tuple[str, ...]) -> None:
    assert cdi.names("x.com", "u", "d", answer) == names


def test_where_others_say_all_there_is_no_specification() -> None:
    assert cdi.specification("x.com", "u", {"d": ContainerAnswer(cdi_devices=("v/c=n",))}) is None


# What is installed.


@pytest.mark.parametrize("file", sorted(COMPONENT.glob("*.yaml")), ids=lambda file: file.name)
def test_the_component_is_readable(file: Path) -> None:
    assert all(one["kind"] for one in yaml.safe_load_all(file.read_text()))


# Settings.


def said(**texts: Any) -> dict[str, Given]:
    return {name.replace("_", "-"): Given(value, f"--{name.replace('_', '-')}") for name, value in texts.items()}


def test_off_is_the_default_and_changes_nothing() -> None:
    for given in (said(), said(dra="off"), said(dra="off", device_list_strategy=("envvar",))):
        before = {name: one for name, one in given.items() if name != "dra"}
        assert settings.taken(given, "") == ("off", {})
        assert given == before


def test_only_tells_gpus_by_cdi() -> None:
    given = said(dra="only", dra_drivers=("a.b=c.d",))
    assert settings.taken(given, "n1") == ("only", {"a.b": "c.d"})
    assert given == {"device-list-strategy": Given(("cdi-cri",), "--dra")}
    assert settings.taken(said(dra="only", device_list_strategy=("envvar", "cdi-cri")), "n1")[0] == "only"


@pytest.mark.parametrize(
    ("given", "node", "message"),
    [
        (said(dra="yes"), "n1", "expected off, on or only, got 'yes'"),
        (said(dra="only"), "", "needs the node's name"),
        (said(dra="only", device_list_strategy=("envvar",)), "n1", "expected cdi-cri with --dra"),
        (said(dra="only", dra_drivers=("a.b",)), "n1", "expected DOMAIN=DRIVER"),
        (said(dra="only", dra_drivers=("a.b=A",)), "n1", "expected DOMAIN=DRIVER"),
        (said(dra="only", dra_drivers=(f"a.b={'x' * 64}",)), "n1", "expected DOMAIN=DRIVER"),
    ],
)
def test_settings_that_cannot_be_gone_by(given: dict[str, Given], node: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.taken(given, node)


# Pods that ask by name, and sockets.


@pytest.mark.parametrize(
    ("spec", "status", "comes"),
    [
        ({"containers": [{}, {"resources": {"limits": {GPU: "1"}}}]}, {"phase": "Pending"}, True),
        ({"containers": [{}], "initContainers": [{"resources": {"limits": {GPU: "1"}}}]}, {}, True),
        ({"containers": [{"resources": {"limits": {"cpu": "1"}}}]}, {"phase": "Pending"}, False),
        ({"containers": [{"resources": {"limits": {GPU: "1"}}}]}, {"startTime": "2026-01-01T00:00:00Z"}, False),
        ({"containers": [{"resources": {"limits": {GPU: "1"}}}]}, {"phase": "Failed"}, False),
        ({"containers": [{"resources": {"limits": {GPU: "1"}}}]}, {"extendedResourceClaimStatus": {}}, False),
    ],
)
async def test_who_is_given_to_the_node_and_not_admitted_yet_is_arriving(
    spec: dict[str, Any], status: dict[str, Any], *, comes: bool
) -> None:
    async def ask() -> list[Pod]:
        return [msgspec.convert({"metadata": {"uid": "u"}, "spec": spec, "status": status}, Pod)]

    assert await records.arriving(ask, {GPU}) is comes


ONE, TWO = {"resources": {"limits": {GPU: "1"}}}, {"resources": {"limits": {GPU: "2"}}}
CLAIM: dict[str, Any] = {"extendedResourceClaimStatus": {}}


@pytest.mark.parametrize(
    ("pods", "count"),
    [
        ([({"containers": [ONE, TWO]}, {}), ({"containers": [ONE]}, CLAIM)], 4),
        ([({"containers": [ONE], "initContainers": [TWO, ONE]}, {}), ({"containers": [{}]}, CLAIM)], 2),
        ([({"containers": [ONE]}, {"phase": "Failed"}), ({"containers": [ONE]}, CLAIM)], 1),
        ([({"containers": [ONE]}, {}), ({"containers": [ONE]}, {**CLAIM, "phase": "Succeeded"})], 0),
        ([({"containers": [ONE]}, {})], 0),
    ],
    ids=["all containers", "init containers", "a pod that ended", "a claim that ended", "no claim"],
)
async def test_what_a_kubelet_counts_for_pods_beside_claims(pods: list[tuple[Any, Any]], count: int) -> None:
    async def ask() -> list[Pod]:
        return [msgspec.convert({"metadata": {"uid": "u"}, "spec": one, "status": said}, Pod) for one, said in pods]

    assert await records.counted(ask, GPU) == count


def test_a_long_name_fits_into_a_path() -> None:
    path = sockets.path_of(Path("/var/lib/kubelet/plugins_registry"), "x" * 63, "0" * 8)
    assert len(str(path)) <= 107
    assert path != sockets.path_of(path.parent, "x" * 62, "0" * 8)
