"""What DRA offers, publishes and hands out: tables of decisions, without sockets or files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from devices.boards import Hold, Place
from devices.claims import ClaimName, Refused
from devices.gpu.nvidia import health
from devices.gpu.nvidia.health import Checks
from devices.life.states import Entry, State
from devices.model import Device, Health
from devices.replicas import ids, unshared
from devices.source import Facts
from gateway.configuration import commandline
from gateway.configuration.settings import ConfigError, Given
from gateway.dra import claims, offer, slices, sockets
from gateway.dra.claims import ResourceClaim, Toleration
from gateway.dra.offer import Ailment, Offer, Version
from gateway.dra.slices import Pool, Slice
from gateway.memory.claimed import Claimed, ClaimedDevice

GPU, MIG, AMD, FILE = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "amd.com/gpu", "example.com/fpga"
NO_HOLDS: list[Hold] = []


def entry(device_id: str, state: State = State.PRESENT, reason: str = "", **device: Any) -> Entry:
    well = state is State.PRESENT
    return Entry(Device(device_id, Health.HEALTHY if well else Health.UNHEALTHY, **device), state, reason)


def offered(
    entries: Mapping[str, list[Entry]], facts: Mapping[str, Facts], holds: list[Hold] | None = NO_HOLDS, **drivers: str
) -> tuple[list[Offer], dict[str, str]]:
    named = {name.replace("_", "."): driver for name, driver in drivers.items()}
    found, withheld = offer.offers(
        entries,
        lambda _: lambda one: facts.get(one, Facts()),
        lambda _: holds,
        named,
        lambda pci: "pci0000:00" if pci else "",
    )
    return found, {one.name: one.reason for one in withheld}


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


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("535.54.03", "535.54.3"), ("550.144", "550.144.0"), ("6", "6.0.0"), ("6.8.0-31-generic", "6.8.0"),
        ("1.2.3.4", "1.2.3"), ("", None), ("none", None),
    ],
)  # fmt: skip
def test_versions(text: str, version: str | None) -> None:
    assert offer.version(text) == (None if version is None else Version(version))


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


@pytest.mark.parametrize("claims", [3, 7, 10, 27, 28])
def test_the_first_replicas_that_fit_are_on_different_gpus(claims: int) -> None:
    shared = [entry(one) for number in range(7) for one in ids(f"GPU-{number}", 4)]
    facts = {one.device.id: replace(A100, minor=int(unshared(one.device.id)[-1])) for one in shared}
    [only] = carried_out(pool(*offered({GPU: shared}, facts)[0]), {}).values()
    first = [device["attributes"]["uuid"]["string"] for device in only.spec.devices or ()][:claims]
    counts = [first.count(f"GPU-{number}") for number in range(7)]
    assert sum(counts) == claims
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(80 << 30, "80Gi"), (81479 << 20, "81479Mi"), (1 << 40, "1Ti"), (3 << 10, "3Ki"), (1025, "1025")],
)
def test_memory_is_spelled_as_the_server_does(count: int, text: str) -> None:
    [change] = slices.changes(pool(gpu(0, memory=count)), {})
    assert change.body is not None
    assert change.body["spec"]["devices"][0]["capacity"] == {"memory": {"value": text}}


@pytest.mark.parametrize(
    ("count", "ill", "shapes"),
    [(0, 0, [0]), (128, 0, [128]), (129, 0, [128, 1]), (300, 0, [128, 128, 44]), (64, 1, [64]), (65, 1, [64, 1])],
)
def test_a_slice_has_no_more_devices_than_it_may(count: int, ill: int, shapes: list[int]) -> None:
    devices = [gpu(n, ailment=Ailment.CORDONED if n < ill else None) for n in range(count)]
    there = carried_out(pool(*devices), {})
    assert [one[1:] for one in shape(there)] == [(1, len(shapes), size) for size in shapes]


def test_a_device_has_no_more_attributes_and_capacities_than_it_may() -> None:
    many = replace(gpu(0), attributes={str(number): number for number in range(40)}, capacities={"units": 1})
    for one, attributes in ((many, 31), (replace(many, memory=1), 30), (replace(many, capacities={}), 32)):
        [change] = slices.changes(pool(one), {})
        assert change.body is not None
        assert len(change.body["spec"]["devices"][0]["attributes"]) == attributes


def test_what_a_device_has_too_much_of_is_not_what_nvidias_driver_says_of_it() -> None:
    """A replica of a MIG instance that is all of its GPU has 34 attributes and capacities."""
    traits = dict.fromkeys(
        ("architecture", "brand", "cudaComputeCapability", "cudaDriverVersion", "addressingMode"), "1"
    )
    engines = ("multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines")
    counts = dict.fromkeys((*engines, *(f"memorySlice{number}" for number in range(8))), 0)
    part = replace(PART, pci="0000:07:00.0", driver="550.54.15", memory=80 << 30, traits=traits, capacities=counts)
    [one], _ = offered({MIG: [entry("MIG-x::1", numa_nodes=(0,))]}, {"MIG-x::1": part})
    [change] = slices.changes(pool(one), {})
    assert change.body is not None
    [device] = change.body["spec"]["devices"]
    assert device["capacity"] == {name: {"value": "0"} for name in counts} | {"memory": {"value": "80Gi"}}
    assert len(device["attributes"]) == 32 - 15
    named = ("type", "uuid", "parentUUID", "profile", "productName", "driverVersion", *traits)
    standard = (f"resource.kubernetes.io/{name}" for name in ("pciBusID", "pcieRoot", "numaNode"))
    assert {*named, *standard} <= device["attributes"].keys()


CAUSES: Mapping[str, dict[str, str]] = {
    health.judged(79, Checks({})).code: {"gpu.nvidia.com/xid": "79"},
    "xid=9999": {"gpu.nvidia.com/xid": "9999"},
    "gpu-lost": {"gpu.nvidia.com/gpu-lost": ""},
    "": {},
}
"""What NVIDIA's driver says of a device, by the code of its trouble."""


@pytest.mark.parametrize("code", CAUSES)
def test_what_makes_a_device_unhealthy_is_also_told_as_nvidias_driver_tells_it(code: str) -> None:
    sick = replace(entry("a", State.UNHEALTHY, "why"), code=code)
    [ill], _ = offered({GPU: [sick]}, {})
    assert ill.vendor_taints == CAUSES[code]
    [ill], _ = offered({GPU: [replace(entry("a", State.CORDONED, "repair"), beneath=sick)]}, {})
    assert ill.vendor_taints == CAUSES[code]
    [well], _ = offered({GPU: [replace(entry("a", State.CORDONED, "why"), beneath=entry("a"))]}, {})
    assert well.vendor_taints == {}


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


def claim(*results: dict[str, Any], uid: str = "u", config: Any = None) -> ResourceClaim:
    rows = [{"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0", **one} for one in results]
    status = {"allocation": {"devices": {"results": rows, "config": config}}}
    return msgspec.convert({"metadata": {"uid": uid, "namespace": "ns", "name": "c"}, "status": status}, ResourceClaim)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (claim({}, uid="v"), "was replaced by another one"),
        (msgspec.convert({"metadata": {"uid": "u"}, "status": {}}, ResourceClaim), "is not allocated any more"),
        (claim({"pool": "n2"}), "has devices of n2, not of the pool n1"),
        (claim({}, {"pool": "n2"}), "has devices of n2, not of the pool n1"),
        (claim({"driver": "x"}), "has 0 devices of gpu.nvidia.com. Allowed: 1 to 32"),
        (claim(*[{}] * 33), "has 33 devices"),
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
    results = claims.allocated(claim(*[{}] * claims.MAX_DEVICES), ASKED, "gpu.nvidia.com", "n1")
    assert not isinstance(results, Refused)
    assert len(results) == claims.MAX_DEVICES


def row(*devices: ClaimedDevice) -> Claimed:
    return Claimed("ns", "other", "gpu.nvidia.com", 1.0, list(devices))


HELD = ClaimedDevice("gpu-0", GPU, "GPU-0", "GPU-0", requests=["gpu"])
SHARE = replace(HELD, share="s")


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
    found = claims.allocations([claim(*results)], "n1", boards, (free, free | {("x", "shown")}), {}, {})
    had = {"GPU-0": "claim ns/c"} if has else {}
    assert found == claims.Allocated(had | {"GPU-1": "a ResourceSlice still offers it"}, frozenset(), unshown, missing)


@pytest.mark.parametrize(
    ("had", "result", "same"),
    [
        (HELD, {}, True), (HELD, {"request": "gpu/large"}, True), (HELD, {"request": "more"}, False),
        (HELD, {"device": "gpu-1"}, False), (HELD, {"shareID": "s"}, False), (SHARE, {"shareID": "s"}, True),
        (SHARE, {"shareID": "t"}, False), (replace(HELD, former=True), {}, False),
    ],
)  # fmt: skip
def test_what_was_prepared_is_what_is_allocated(had: ClaimedDevice, result: dict[str, Any], *, same: bool) -> None:
    results = claims.allocated(claim(result), ASKED, "gpu.nvidia.com", "n1")
    assert not isinstance(results, Refused)
    assert claims.has(row(had), results) is same


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


# Settings.


def said(**texts: Any) -> dict[str, Given]:
    return {name.replace("_", "-"): Given(value, f"--{name.replace('_', '-')}") for name, value in texts.items()}


@pytest.mark.parametrize(
    ("given", "node", "message"),
    [
        (said(dra="yes"), "n1", "unknown value 'yes'. Allowed: off, on, only"),
        (said(dra="only"), "", "needs the node's name"),
        (said(dra="only", device_list_strategy=("envvar",)), "n1", "needs cdi-cri with --dra"),
        (said(dra="only", dra_drivers=("a.b",)), "n1", "is not DOMAIN=DRIVER"),
        (said(dra="only", dra_drivers=("a.b=A",)), "n1", "is not DOMAIN=DRIVER"),
        (said(dra="only", dra_drivers=(f"a.b={'x' * 64}",)), "n1", "is not DOMAIN=DRIVER"),
    ],
)
def test_settings_that_cannot_be_gone_by(given: dict[str, Given], node: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        commandline.make_settings({**given, "node-name": Given(node, "--node-name")})


# Pods that ask by name, and sockets.


def test_a_long_name_fits_into_a_path() -> None:
    path = sockets.path_of(Path("/var/lib/kubelet/plugins_registry"), "x" * 63, "0" * 8)
    assert len(str(path)) <= 107
    assert path != sockets.path_of(path.parent, "x" * 62, "0" * 8)
