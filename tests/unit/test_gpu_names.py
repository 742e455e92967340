"""Under which names GPUs and partitions are offered, and how often: the vendors' own rules as tables."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from devices.gpu import naming
from devices.gpu.model import GPU
from devices.gpu.naming import NamingError
from devices.gpu.sharing import NamedGPUs, could_be, listing, offered
from devices.gpu.simulated.backend import VENDORS
from devices.model import Device, Health, Options, Trouble, TroubleKind
from devices.policy import Globbed, MigStrategy, Naming, Policy, Portion, Slices

NVIDIA = "nvidia.com/gpu"
AMD = "amd.com/gpu"


def named(gpus: Iterable[GPU], policy: Policy) -> dict[str, tuple[GPU, ...]]:
    return naming.named(gpus, policy, VENDORS)


def name_of(one: GPU, policy: Policy) -> str | None:
    return naming.name_of(one, policy, VENDORS)


def claimed(resource: str, backend: str, policy: Policy) -> bool:
    return naming.claimed(resource, backend, policy, VENDORS)


def gpu(uuid: str, *, split: bool = False, trouble: Trouble | None = None) -> GPU:
    return GPU(uuid, int(uuid[-1]), int(uuid[-1]), resource=NVIDIA, partitioned=split, trouble=trouble)


def mig(parent: str, number: int, profile: str = "1g.10gb") -> GPU:
    index = int(parent[-1])
    return GPU(f"MIG-{index}{number}", index, index, resource=NVIDIA, profile=profile, parent=parent)


def amd(uuid: str, profile: str = "") -> GPU:
    return GPU(uuid, 0, 0, resource=AMD, profile=profile)


G0, G1 = gpu("GPU-0"), gpu("GPU-1")
S0, S1 = gpu("GPU-0", split=True), gpu("GPU-1", split=True)
SMALL = [mig("GPU-0", 0), mig("GPU-0", 1)]
BIG = [mig("GPU-1", 0, "3g.40gb+me")]


def by_name(gpus: Iterable[GPU], policy: Policy) -> dict[str, list[str]]:
    return {name: [one.uuid for one in there] for name, there in named(gpus, policy).items()}


@pytest.mark.parametrize(
    ("strategy", "gpus", "names"),
    [
        pytest.param("none", [G0, G1], {NVIDIA: ["GPU-0", "GPU-1"]}, id="none: GPUs"),
        pytest.param("none", [S0, *SMALL, G1], {NVIDIA: ["GPU-0", "GPU-1"]}, id="none: whole GPUs, in MIG mode too"),
        pytest.param("single", [G0, G1], {NVIDIA: ["GPU-0", "GPU-1"]}, id="single: GPUs where nothing is in MIG mode"),
        pytest.param("single", [S0, *SMALL], {NVIDIA: ["MIG-00", "MIG-01"]}, id="single: instances as GPUs"),
        pytest.param("mixed", [G0, G1], {NVIDIA: ["GPU-0", "GPU-1"]}, id="mixed: GPUs where nothing is in MIG mode"),
        pytest.param(
            "mixed",
            [S0, *SMALL, S1, *BIG, gpu("GPU-2")],
            {
                "nvidia.com/mig-1g.10gb": ["MIG-00", "MIG-01"],
                "nvidia.com/mig-3g.40gb.me": ["MIG-10"],
                NVIDIA: ["GPU-2"],
            },
            id="mixed: a name for each profile, + is .",
        ),
        pytest.param("mixed", [S0, G1], {NVIDIA: ["GPU-1"]}, id="mixed: nothing for MIG mode without an instance"),
    ],
)
def test_names_by_mig_strategy(strategy: str, gpus: list[GPU], names: dict[str, list[str]]) -> None:
    assert by_name(gpus, Policy(mig_strategy=MigStrategy(strategy))) == names


@pytest.mark.parametrize(
    ("gpus", "got"),
    [
        pytest.param([S0, *SMALL, G1], "1 in MIG mode and 1 without (1)", id="one without MIG"),
        pytest.param([S0, *SMALL, S1], "no MIG instance on GPU 1", id="one without an instance"),
        pytest.param([S0, *SMALL, S1, *BIG], "profiles (1g.10gb, 3g.40gb+me)", id="two profiles"),
    ],
)
def test_what_single_can_not_mean_is_said(gpus: list[GPU], got: str) -> None:
    with pytest.raises(NamingError, match="the MIG strategy 'single' expects every GPU") as raised:
        named(gpus, Policy(mig_strategy=MigStrategy.SINGLE))
    assert got in str(raised.value)


@pytest.mark.parametrize(
    ("naming", "profiles", "names"),
    [
        ("single", ["", ""], [AMD]),
        ("single", ["cpx_nps4", "cpx_nps4"], [AMD]),
        ("mixed", ["", ""], [AMD]),
        ("mixed", ["cpx_nps4", "spx_nps1"], ["amd.com/cpx_nps4", "amd.com/spx_nps1"]),
    ],
)
def test_names_by_amds_strategy(naming: str, profiles: list[str], names: list[str]) -> None:
    gpus = [amd(f"{number}", profile) for number, profile in enumerate(profiles)]
    assert sorted(named(gpus, Policy(resource_naming=Naming(naming)))) == names


def test_amds_single_needs_gpus_that_are_alike() -> None:
    with pytest.raises(NamingError, match="got cpx_nps4, spx_nps1: partition them alike"):
        named([amd("a", "cpx_nps4"), amd("b", "spx_nps1")], Policy())


ILL = {kind: Trouble(kind.value, kind) for kind in TroubleKind}


@pytest.mark.parametrize(
    ("whole", "parts", "worst"),
    [
        pytest.param(None, [None, None], None, id="all are well"),
        pytest.param(
            None, [None, TroubleKind.RESET_REQUIRED], TroubleKind.RESET_REQUIRED, id="one of its partitions isn't"
        ),
        pytest.param(
            TroubleKind.RESET_REQUIRED, [TroubleKind.RESTART_APP], TroubleKind.RESET_REQUIRED, id="its own is the worse"
        ),
        pytest.param(
            TroubleKind.APPLICATION,
            [TroubleKind.RESTART_APP],
            TroubleKind.RESTART_APP,
            id="what leaves it well hides nothing",
        ),
        pytest.param(
            TroubleKind.RESET_REQUIRED, [TroubleKind.UNKNOWN], TroubleKind.UNKNOWN, id="as bad as anything could be"
        ),
    ],
)
def test_a_gpu_that_is_offered_whole_has_the_worst_trouble_on_it(
    whole: TroubleKind | None, parts: list[TroubleKind | None], worst: TroubleKind | None
) -> None:
    """With the strategy ``none`` nobody else would say that something on it is ill."""
    board = gpu("GPU-0", split=True, trouble=ILL.get(whole))  # type: ignore[arg-type]  # None is in no mapping
    on_it = [replace(mig("GPU-0", number), trouble=ILL.get(kind)) for number, kind in enumerate(parts)]  # type: ignore[arg-type]
    found = named([board, *on_it, replace(G1, trouble=ILL[TroubleKind.APPLICATION])], Policy())
    assert [one.trouble for one in found[NVIDIA]] == [ILL.get(worst), ILL[TroubleKind.APPLICATION]]  # type: ignore[arg-type]


def test_a_partition_that_lacks_something_is_ill_and_its_gpu_is_not() -> None:
    parts = [
        replace(SMALL[0], lacks="no node"),
        replace(SMALL[1], trouble=ILL[TroubleKind.RESET_REQUIRED], lacks="no node"),
    ]
    found = named([gpu("GPU-0", split=True), *parts], Policy(mig_strategy=MigStrategy.MIXED))
    assert [one.trouble for one in found["nvidia.com/mig-1g.10gb"]] == [
        Trouble("no node"),
        ILL[TroubleKind.RESET_REQUIRED],
    ]
    (whole,) = named([gpu("GPU-0", split=True), parts[0]], Policy())[NVIDIA]
    assert whole.trouble is None


def test_a_gpus_trouble_is_that_of_its_partitions() -> None:
    hot, own = Trouble("hot", TroubleKind.RESET_REQUIRED), Trouble("xid 94")
    parts = [SMALL[0], replace(SMALL[1], trouble=own)]
    found = named([gpu("GPU-0", split=True, trouble=hot), *parts], Policy(mig_strategy=MigStrategy.MIXED))
    assert [one.trouble for one in found["nvidia.com/mig-1g.10gb"]] == [hot, hot]


def test_other_names_stay_what_they_are() -> None:
    assert name_of(GPU("x", 0, 0, resource="a.com/b", profile="p", parent="y"), Policy()) == "a.com/b"


SLICED = Policy(slices={NVIDIA: Slices(3, "nvidia.com/gpu.shared")})


@pytest.mark.parametrize(
    ("policy", "devices"),
    [
        pytest.param(Policy(), {NVIDIA: ["GPU-0", "GPU-1"]}, id="unshared"),
        pytest.param(
            SLICED, {f"{NVIDIA}.shared": [f"GPU-{gpu}::{slot}" for gpu in "01" for slot in range(3)]}, id="replicas"
        ),
        pytest.param(Policy(slices={AMD: Slices(3, AMD)}), {NVIDIA: ["GPU-0", "GPU-1"]}, id="another is shared"),
    ],
)
def test_how_often_a_gpu_is_offered(policy: Policy, devices: dict[str, list[str]]) -> None:
    offers = offered(named([G0, G1], policy), policy)
    shown = {name: listing(offer, frozenset(), frozenset()).devices for name, offer in offers.items()}
    assert {name: [device.id for device in there] for name, there in shown.items()} == devices


def portions(*parts: Portion, replicas: int = 0) -> Policy:
    return Policy(slices={NVIDIA: Slices(replicas, NVIDIA, parts)})


@pytest.mark.parametrize(
    ("policy", "devices"),
    [
        pytest.param(
            portions(Portion(("1",), 2, NVIDIA)), {NVIDIA: ["GPU-0", "GPU-1::0", "GPU-1::1"]}, id="by index, the rest is whole"
        ),
        pytest.param(
            portions(Portion(("GPU-0",), 2, "x.io/s")), {"x.io/s": ["GPU-0::0", "GPU-0::1"], NVIDIA: ["GPU-1"]},
            id="by UUID, renamed",
        ),
        pytest.param(
            portions(Portion(("0",), 2, NVIDIA), Portion(("1",), 3, NVIDIA)),
            {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1", "GPU-1::2"]}, id="each its own number",
        ),
        pytest.param(
            portions(Portion(("0",), 3, NVIDIA), replicas=2),
            {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-0::2", "GPU-1::0", "GPU-1::1"]}, id="the rest is shared, too",
        ),
        pytest.param(portions(Portion(1, 2, NVIDIA)), {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1"]}, id="the first"),
        pytest.param(
            portions(Portion(9, 2, NVIDIA)), {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]}, id="more than there are"
        ),
        pytest.param(
            portions(Portion(("0",), 2, NVIDIA), Portion(("0",), 3, NVIDIA)),
            {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1"]}, id="meant twice: the first counts",
        ),
        pytest.param(portions(Portion(("GPU-9", "7"), 2, "x.io/s")), {NVIDIA: ["GPU-0", "GPU-1"]}, id="not there"),
        pytest.param(
            portions(Portion(("0", "1"), 2, "x.io/s")),
            {"x.io/s": ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]}, id="nothing is left",
        ),
    ],
)  # fmt: skip
def test_some_gpus_are_offered_more_often(policy: Policy, devices: dict[str, list[str]]) -> None:
    offers = offered({NVIDIA: [G1, G0]}, policy)
    shown = {name: listing(offer, frozenset(), frozenset()).devices for name, offer in offers.items()}
    assert {name: sorted(device.id for device in there) for name, there in shown.items()} == devices


def test_an_instance_is_meant_by_its_place() -> None:
    policy = Policy(
        mig_strategy=MigStrategy.SINGLE, slices={NVIDIA: Slices(0, NVIDIA, (Portion(("0:1",), 2, NVIDIA),))}
    )
    placed = [replace(one, place=f"0:{at}") for at, one in enumerate(SMALL)]
    (offer,) = offered(named([S0, *placed], policy), policy).values()
    assert [offer.replicas_of(one.uuid) for one in placed] == [0, 2]


def test_without_gpus_a_resource_keeps_its_name() -> None:
    assert offered({NVIDIA: []}, portions(Portion(("0",), 2, "x.io/s"))) == {NVIDIA: NamedGPUs({})}


@pytest.mark.parametrize(
    ("slices", "device_id", "resource", "could"),
    [
        (Slices(0, NVIDIA), "GPU-0", NVIDIA, True),
        (Slices(2, "x.io/s"), "GPU-0::1", "x.io/s", True),
        (Slices(2, "x.io/s"), "GPU-0::2", "x.io/s", False),
        (Slices(0, NVIDIA, (Portion(("0",), 2, "x.io/s"),)), "GPU-0::1", "x.io/s", True),
        (Slices(0, NVIDIA, (Portion(("0",), 2, "x.io/s"),)), "GPU-0", NVIDIA, False),
        (Slices(0, NVIDIA, (Portion(("1",), 2, "x.io/s"),)), "GPU-0", NVIDIA, True),
        (Slices(0, NVIDIA, (Portion(("1",), 2, "x.io/s"),)), "GPU-0::0", "x.io/s", False),
        (Slices(0, NVIDIA, (Portion(1, 2, "x.io/s"),)), "GPU-0::0", "x.io/s", True),
        (Slices(0, NVIDIA, (Portion(1, 2, "x.io/s"),)), "GPU-0", NVIDIA, True),
    ],
)
def test_what_a_gpu_could_be_offered_as(slices: Slices, device_id: str, resource: str, could: bool) -> None:
    assert could_be(G0, device_id, resource, slices) is could


def test_the_name_of_a_portion_is_claimed() -> None:
    policy = portions(Portion(("0",), 2, "x.io/s"))
    assert [claimed(name, "nvidia", policy) for name in ("x.io/s", NVIDIA, "x.io/t")] == [True, True, False]


def test_two_resources_can_not_be_shown_as_one() -> None:
    policy = Policy(slices={NVIDIA: Slices(2, AMD)})
    with pytest.raises(NamingError, match=r"a name for each resource; got amd.com/gpu for nvidia.com/gpu, too"):
        offered({AMD: [amd("a")], NVIDIA: [G0]}, policy)


GPUS = (
    GPU("GPU-z", 0, 0, numa_node=0),
    GPU("GPU-y", 1, 1, numa_node=1, trouble=Trouble("too hot")),
    GPU("GPU-x", 2, 2),
)


def shown(*gpus: GPU, replicas: int = 0) -> NamedGPUs:
    return NamedGPUs({gpu.uuid: gpu for gpu in gpus}, replicas)


def test_gpus_on_the_list() -> None:
    there = listing(shown(*GPUS), frozenset(), frozenset())
    assert there.devices == (
        Device("GPU-z", Health.HEALTHY, (0,)),
        Device("GPU-y", Health.UNHEALTHY, (1,)),
        Device("GPU-x", Health.HEALTHY, ()),
    )
    assert there.troubles == {"GPU-y": Trouble("too hot")}
    assert there.options == Options(pre_start_required=False, preferred_allocation=True)
    ready = listing(shown(*GPUS, GPU("GPU-w", 3, 3, pre_start=True)), frozenset(), frozenset())
    assert ready.options.pre_start_required


@pytest.mark.parametrize("kind", TroubleKind)
def test_a_gpu_is_ill_by_any_trouble_but_an_applications(kind: TroubleKind) -> None:
    there = listing(shown(GPU("a", 0, 0, trouble=Trouble("hot", kind))), frozenset(), frozenset())
    assert there.devices == (Device("a", Health.HEALTHY if kind is TroubleKind.APPLICATION else Health.UNHEALTHY),)
    assert there.troubles == {"a": Trouble("hot", kind)}


def test_devices_that_are_as_before_are_the_same_objects() -> None:
    """So that to compare two lists of thousands costs next to nothing."""
    before, after = (
        listing(shown(GPU("a", 0, 0), GPU("b", 1, 1, trouble=trouble), replicas=2), frozenset(), frozenset()).devices
        for trouble in (None, Trouble("hot"))
    )
    assert [one is other for one, other in zip(before, after, strict=True)] == [True, True, False, False]


def test_what_is_true_of_a_gpu_is_true_of_all_that_is_on_it() -> None:
    part = GPU("part", 0, 0, parent="whole", trouble=Trouble("hot"))
    there = listing(shown(part, GPU("other", 1, 1), replicas=2), frozenset({"whole"}), frozenset({"part"}))
    assert there.troubles == dict.fromkeys(("part::0", "part::1"), Trouble("hot"))
    assert there.recovered == there.released == {"part::0", "part::1"}


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*", True),
        ("NVIDIA H100*", True),
        ("*H100 80GB HBM3", True),
        ("H100", False),
        ("NVIDIA H100", False),
        ("NVIDIA.H100 80GB HBM3", False),
    ],
)
def test_names_by_pattern(pattern: str, matches: bool) -> None:
    policy = Policy(gpu_names=((pattern, "example.com/big"), ("nothing", "example.com/never")))
    found = name_of(replace(G0, product="NVIDIA H100 80GB HBM3"), policy)
    assert found == ("example.com/big" if matches else None)


@pytest.mark.parametrize("strategy", [MigStrategy.SINGLE, MigStrategy.MIXED])
def test_names_of_instances_by_pattern(strategy: MigStrategy) -> None:
    policy = Policy(mig_strategy=strategy, mig_names=(("1g.*", "example.com/small"),))
    assert [name_of(one, policy) for one in (SMALL[0], BIG[0])] == ["example.com/small", None]


RENAMED = Policy(
    gpu_names=(("*A100*", "big.com/gpu"),),
    mig_names=(("1g.*", "small.com/gpu"),),
    slices={
        "nvidia.com/gpu": Slices(2, "shared.com/gpu"),
        "big.com/gpu": Slices(2, "slices.com/big"),
        "amd.com/gpu": Slices(2, "slices.com/amd"),
    },
    globbed=(Globbed("nvidia.com/nvme", ("/dev/nvme*",)),),
)


@pytest.mark.parametrize(
    ("name", "vendors"),
    [
        pytest.param("nvidia.com/gpu", "nvidia", id="a vendor's own"),
        pytest.param("nvidia.com/mig-1g.5gb", "nvidia", id="any of it"),
        pytest.param("amd.com/cpx_nps4", "amd", id="the other's"),
        pytest.param("big.com/gpu", "nvidia", id="a name for products"),
        pytest.param("small.com/gpu", "nvidia", id="a name for MIG profiles"),
        pytest.param("shared.com/gpu", "nvidia", id="a name for slices"),
        pytest.param("slices.com/big", "nvidia", id="a name for slices of renamed ones"),
        pytest.param("slices.com/amd", "amd", id="a name for slices of the other's"),
        pytest.param("nvidia.com/nvme", "", id="a path rule's, whatever it begins with"),
        pytest.param("example.com/null", "", id="nobody's"),
    ],
)
def test_whose_a_name_could_be(name: str, vendors: str) -> None:
    assert [vendor for vendor in ("nvidia", "amd") if claimed(name, vendor, RENAMED)] == vendors.split()
    assert claimed(name, "simulated", RENAMED) is (name != "nvidia.com/nvme")


@pytest.mark.parametrize(("gpus", "replicas", "fits"), [(1, 65_536, True), (2, 50_000, True), (2, 50_001, False)])
def test_more_devices_than_a_list_can_hold_are_refused(gpus: int, replicas: int, fits: bool) -> None:
    named = {"nvidia.com/gpu": [GPU(f"GPU-{index}", index, index) for index in range(gpus)]}
    policy = Policy(slices={"nvidia.com/gpu": Slices(replicas, "nvidia.com/gpu")})
    if fits:
        assert offered(named, policy)["nvidia.com/gpu"].replicas == replicas
    else:
        with pytest.raises(NamingError, match=r"at most 100000 devices of nvidia.com/gpu; got 100002: ask for fewer"):
            offered(named, policy)
