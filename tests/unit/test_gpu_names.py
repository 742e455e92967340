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
from devices.gpu.vendor import vendor_of
from devices.model import Trouble, TroubleKind
from devices.policy import Globbed, Policy, Portion, Slices

NVIDIA = "nvidia.com/gpu"


def named(gpus: Iterable[GPU], policy: Policy) -> dict[str, tuple[GPU, ...]]:
    return naming.named(gpus, policy, VENDORS)


def name_of(one: GPU, policy: Policy) -> str | None:
    return vendor_of(one.resource, VENDORS).name_of(one, policy)


def claimed(resource: str, backend: str, policy: Policy) -> bool:
    return naming.claimed(resource, backend, policy, VENDORS)


def gpu(uuid: str, *, split: bool = False, trouble: Trouble | None = None) -> GPU:
    return GPU(uuid, int(uuid[-1]), int(uuid[-1]), resource=NVIDIA, partitioned=split, trouble=trouble)


def mig(parent: str, number: int, profile: str = "1g.10gb") -> GPU:
    index = int(parent[-1])
    return GPU(f"MIG-{index}{number}", index, index, resource=NVIDIA, profile=profile, parent=parent)


G0, G1 = gpu("GPU-0"), gpu("GPU-1")
ILL = {kind: Trouble(kind.value, kind) for kind in TroubleKind}


@pytest.mark.parametrize(
    ("whole", "parts", "worst"),
    [
        pytest.param(None, [None, None], None, id="all are well"),
        pytest.param(None, [None, TroubleKind.RESET_REQUIRED], TroubleKind.RESET_REQUIRED, id="one of its partitions isn't"),
        pytest.param(TroubleKind.RESET_REQUIRED, [TroubleKind.RESTART_APP], TroubleKind.RESET_REQUIRED, id="its own is the worse"),
        pytest.param(TroubleKind.APPLICATION, [TroubleKind.RESTART_APP], TroubleKind.RESTART_APP, id="what leaves it well hides nothing"),
        pytest.param(TroubleKind.RESET_REQUIRED, [TroubleKind.UNKNOWN], TroubleKind.UNKNOWN, id="as bad as anything could be"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_offered_whole_has_the_worst_trouble_on_it(
    whole: TroubleKind | None, parts: list[TroubleKind | None], worst: TroubleKind | None
) -> None:
    """With the strategy ``none`` nobody else would say that something on it is ill."""
    board = gpu("GPU-0", split=True, trouble=ILL.get(whole))  # type: ignore[arg-type]  # None is in no mapping
    on_it = [replace(mig("GPU-0", number), trouble=ILL.get(kind)) for number, kind in enumerate(parts)]  # type: ignore[arg-type]
    found = named([board, *on_it, replace(G1, trouble=ILL[TroubleKind.APPLICATION])], Policy())
    assert [one.trouble for one in found[NVIDIA]] == [ILL.get(worst), ILL[TroubleKind.APPLICATION]]  # type: ignore[arg-type]


def portions(*parts: Portion, replicas: int = 0) -> Policy:
    return Policy(slices={NVIDIA: Slices(replicas, NVIDIA, parts)})


@pytest.mark.parametrize(
    ("policy", "devices"),
    [
        pytest.param(portions(Portion(("1",), 2, NVIDIA)), {NVIDIA: ["GPU-0", "GPU-1::0", "GPU-1::1"]}, id="by index, the rest is whole"),
        pytest.param(portions(Portion(("GPU-0",), 2, "x.io/s")), {"x.io/s": ["GPU-0::0", "GPU-0::1"], NVIDIA: ["GPU-1"]}, id="by UUID, renamed"),
        pytest.param(portions(Portion(("0",), 2, NVIDIA), Portion(("1",), 3, NVIDIA)), {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1", "GPU-1::2"]}, id="each its own number"),
        pytest.param(portions(Portion(("0",), 3, NVIDIA), replicas=2), {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-0::2", "GPU-1::0", "GPU-1::1"]}, id="the rest is shared, too"),
        pytest.param(portions(Portion(1, 2, NVIDIA)), {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1"]}, id="the first"),
        pytest.param(portions(Portion(9, 2, NVIDIA)), {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]}, id="more than there are"),
        pytest.param(portions(Portion(("0",), 2, NVIDIA), Portion(("0",), 3, NVIDIA)), {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1"]}, id="meant twice: the first counts"),
        pytest.param(portions(Portion(("GPU-9", "7"), 2, "x.io/s")), {NVIDIA: ["GPU-0", "GPU-1"]}, id="not there"),
        pytest.param(portions(Portion(("0", "1"), 2, "x.io/s")), {"x.io/s": ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]}, id="nothing is left"),
    ],
)  # fmt: skip
def test_some_gpus_are_offered_more_often(policy: Policy, devices: dict[str, list[str]]) -> None:
    offers = offered({NVIDIA: [G1, G0]}, policy)
    shown = {name: listing(offer, frozenset(), frozenset()).devices for name, offer in offers.items()}
    assert {name: sorted(device.id for device in there) for name, there in shown.items()} == devices


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


def shown(*gpus: GPU, replicas: int = 0) -> NamedGPUs:
    return NamedGPUs({gpu.uuid: gpu for gpu in gpus}, replicas)


def test_devices_that_are_as_before_are_the_same_objects() -> None:
    """So that to compare two lists of thousands costs next to nothing."""
    before, after = (
        listing(shown(GPU("a", 0, 0), GPU("b", 1, 1, trouble=trouble), replicas=2), frozenset(), frozenset()).devices
        for trouble in (None, Trouble("hot"))
    )
    assert [one is other for one, other in zip(before, after, strict=True)] == [True, True, False, False]


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
        with pytest.raises(NamingError, match=r"nvidia.com/gpu would have 100002 devices. Allowed: at most 100000"):
            offered(named, policy)
