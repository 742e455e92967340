"""What a container is told, so that it gets its GPUs; and how GPUs look on the list."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.gpu.amd.vendor import AMD
from devices.gpu.answers import answer
from devices.gpu.asked import Asked, NodeTraits
from devices.gpu.model import GPU, found, in_order
from devices.gpu.nvidia import cdi
from devices.gpu.nvidia.cdi import DriverFiles
from devices.gpu.nvidia.vendor import NVIDIA
from devices.gpu.simulated.backend import VENDORS
from devices.gpu.vendor import PLAIN, Vendor
from devices.model import (
    ContainerAnswer,
    DeviceNode,
    Fault,
    Field,
    Mount,
    RefusedError,
    Sayable,
    Trouble,
)
from devices.policy import CdiFallback, IdStrategy, ListStrategy, Policy

GPUS = {
    gpu.uuid: gpu
    for gpu in (
        GPU("GPU-z", 0, 0, numa_node=0, device_nodes=("/dev/null", "/dev/zero")),
        GPU("GPU-y", 1, 1, numa_node=1, trouble=Trouble("too hot"), device_nodes=("/dev/null",)),
        GPU("GPU-x", 2, 2),
    )
}
ALL = Sayable(frozenset(Field))


@pytest.mark.parametrize(
    ("resource", "asked", "answer"),
    [
        pytest.param(
            "nvidia.com/gpu",
            ("GPU-x",),
            ContainerAnswer(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-x"}),
            id="one",
        ),
        pytest.param(
            "nvidia.com/gpu",
            ("GPU-x", "GPU-y", "GPU-z"),
            ContainerAnswer(
                envs={"NVIDIA_VISIBLE_DEVICES": "GPU-z,GPU-y,GPU-x"},
                device_nodes=(DeviceNode("/dev/null", "/dev/null"), DeviceNode("/dev/zero", "/dev/zero")),
            ),
            id="several: by index, each node once",
        ),
        pytest.param(
            "nvidia.com/gpu",
            ("GPU-b", "GPU-a", "GPU-x"),
            ContainerAnswer(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-x,GPU-a,GPU-b"}),
            id="not looked yet: named all the same",
        ),
        pytest.param(
            "amd.com/gpu",
            ("GPU-x",),
            ContainerAnswer(envs={"AMD_VISIBLE_DEVICES": "GPU-x"}),
            id="each vendor has a variable of its own",
        ),
    ],
)
def test_answer(resource: str, asked: tuple[str, ...], answer: ContainerAnswer) -> None:
    assert said(*asked, gpus=GPUS, resource=resource) == answer


@pytest.mark.parametrize(
    ("asked", "sayable", "says"),
    [
        ("GPU-x", Sayable(frozenset()), "by environment variables, which"),
        ("GPU-x", Sayable(frozenset(), unsure=frozenset({Field.ENVS})), "by environment variables, which"),
        ("GPU-z", Sayable(frozenset({Field.ENVS})), "by device nodes, which"),
        ("GPU-z", Sayable(frozenset()), "by environment variables, which"),
    ],
)
def test_no_half_answer(asked: str, sayable: Sayable, says: str) -> None:
    with pytest.raises(RefusedError) as refused:
        said(asked, gpus=GPUS, sayable=sayable)
    assert refused.value.fault is Fault.FAILED_PRECONDITION
    assert says in str(refused.value)


NAMED = {name: GPU(name, index, index, cdi_name=f"v.com/gpu={name}") for index, name in enumerate(("GPU-b", "GPU-a"))}


@pytest.mark.parametrize(
    ("sure", "unsure", "answer"),
    [
        ({Field.ENVS, Field.CDI_DEVICES}, set(), ContainerAnswer(cdi_devices=("v.com/gpu=GPU-b", "v.com/gpu=GPU-a"))),
        (
            {Field.ENVS},
            {Field.CDI_DEVICES},
            ContainerAnswer(
                envs={"NVIDIA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, cdi_devices=("v.com/gpu=GPU-b", "v.com/gpu=GPU-a")
            ),
        ),
    ],
)
def test_cdi_names_stand_alone_only_where_they_arrive(
    sure: set[Field], unsure: set[Field], answer: ContainerAnswer
) -> None:
    sayable = Sayable(frozenset(sure), frozenset(unsure))
    assert said("GPU-a", "GPU-b", gpus=NAMED, sayable=sayable) == answer


@pytest.mark.parametrize("gpus", [{}, GPUS], ids=["not looked yet", "without CDI names"])
def test_without_cdi_names_the_variable_speaks(gpus: dict[str, GPU]) -> None:
    assert said("GPU-x", gpus=gpus) == ContainerAnswer(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-x"})


def test_order_is_by_index_and_strangers_come_last() -> None:
    assert in_order(("b", "GPU-x", "a", "GPU-z"), GPUS) == ["GPU-z", "GPU-x", "a", "b"]


REAL = {
    gpu.uuid: gpu
    for gpu in (
        GPU("GPU-b", 0, 0, resource="nvidia.com/gpu", spec_nodes=("/dev/nvidia0",)),
        GPU("GPU-a", 1, 1, resource="nvidia.com/gpu", spec_nodes=("/dev/nvidia1",)),
    )
}
CDI_CRI = frozenset({ListStrategy.CDI_CRI})
CDI = frozenset({ListStrategy.CDI_CRI, ListStrategy.CDI_ANNOTATIONS})
ENVVAR = frozenset({ListStrategy.ENVVAR})
WITHOUT_CDI = Sayable(frozenset({Field.ENVS, Field.MOUNTS, Field.DEVICE_NODES}))
PERHAPS_CDI = Sayable(WITHOUT_CDI.said, frozenset({Field.CDI_DEVICES}))
ONE = "k8s.device-plugin.nvidia.com/gpu=GPU-a"
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
FILE = Mount("/usr/lib64/libcuda.so.550.54.15", "/run/nvidia/driver/usr/lib64/libcuda.so.550.54.15", read_only=True)


def said(
    *device_ids: str,
    policy: Policy | None = None,
    sayable: Sayable = ALL,
    around: NodeTraits | None = None,
    gpus: dict[str, GPU] | None = None,
    resource: str = "nvidia.com/gpu",
    vendors: Sequence[Vendor] = VENDORS,
) -> ContainerAnswer:
    known = REAL if gpus is None else gpus
    asked = Asked(resource, device_ids, known, policy or Policy(), sayable, around or NodeTraits(), "token")
    return answer(asked, device_ids, vendors)


def around(*, hooks: bool) -> NodeTraits:
    policy = Policy(driver_root="/run/nvidia/driver")
    driver = DriverFiles(libraries=(FILE,)) if hooks else DriverFiles((), others=(FILE,))
    return NodeTraits(specifications=cdi.specifications(REAL.values(), ("/dev/nvidiactl",), policy, driver))


def test_what_a_specification_says_can_be_said_instead() -> None:
    policy = Policy(list_strategies=CDI_CRI, cdi_fallback=CdiFallback.EXPAND)
    assert said("GPU-a", policy=policy, sayable=PERHAPS_CDI, around=around(hooks=False)) == ContainerAnswer(
        envs={VARIABLE: "void"},
        mounts=(FILE,),
        device_nodes=(
            DeviceNode("/dev/nvidiactl", "/run/nvidia/driver/dev/nvidiactl"),
            DeviceNode("/dev/nvidia1", "/run/nvidia/driver/dev/nvidia1"),
        ),
        cdi_devices=(ONE,),
    )


@pytest.mark.parametrize(
    ("policy", "sayable", "there", "says"),
    [
        pytest.param(Policy(list_strategies=CDI_CRI), WITHOUT_CDI, NodeTraits(), "by CDI device names, which", id="CDI"),
        pytest.param(Policy(list_strategies=CDI_CRI), PERHAPS_CDI, NodeTraits(), "by CDI device names, which", id="perhaps"),
        pytest.param(Policy(list_strategies=CDI), WITHOUT_CDI, NodeTraits(), "CDI device names, annotations", id="both"),
        pytest.param(
            Policy(list_strategies=CDI_CRI, cdi_fallback=CdiFallback.EXPAND), WITHOUT_CDI, around(hooks=True), "a hook of",
            id="a hook",
        ),
        pytest.param(
            Policy(list_strategies=CDI_CRI, cdi_fallback=CdiFallback.EXPAND), WITHOUT_CDI, NodeTraits(),
            "in no CDI specification", id="no specification",
        ),
        pytest.param(
            Policy(list_strategies=CDI_CRI), ALL, NodeTraits(without_cdi="CDI needs the driver's libraries"),
            "there is no specification: CDI needs the driver's libraries", id="no libraries",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused(policy: Policy, sayable: Sayable, there: NodeTraits, says: str) -> None:
    with pytest.raises(RefusedError) as refused:
        said("GPU-a", policy=policy, sayable=sayable, around=there)
    assert refused.value.fault is Fault.FAILED_PRECONDITION
    assert says in str(refused.value)


def test_a_specification_that_is_not_there_is_not_named() -> None:
    policy = Policy(list_strategies=CDI_CRI | ENVVAR)
    there = NodeTraits(without_cdi="CDI needs the driver's libraries")
    assert said("GPU-a", policy=policy, around=there) == ContainerAnswer(envs={VARIABLE: "GPU-a"})


@pytest.mark.parametrize(
    ("policy", "resource", "what"),
    [
        (Policy(id_strategy=IdStrategy.INDEX), "nvidia.com/gpu", "the index of GPU-new"),
        (Policy(pass_device_specs=True), "nvidia.com/gpu", "the device nodes of GPU-new"),
        (Policy(), "amd.com/gpu", "the device nodes of GPU-new"),
    ],
)
def test_not_looked_yet_is_refused_where_a_name_is_not_enough(policy: Policy, resource: str, what: str) -> None:
    with pytest.raises(RefusedError, match=what) as refused:
        said("GPU-new", policy=policy, resource=resource)
    assert refused.value.fault is Fault.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(), ContainerAnswer(envs={VARIABLE: "GPU-new"})),
        (
            Policy(list_strategies=CDI_CRI),
            ContainerAnswer(cdi_devices=("k8s.device-plugin.nvidia.com/gpu=GPU-new",)),
        ),
    ],
)
def test_not_looked_yet_is_named_where_that_is_all(policy: Policy, expected: ContainerAnswer) -> None:
    assert said("GPU-new", policy=policy) == expected


def test_a_uuid_that_cdi_cannot_name_is_refused() -> None:
    with pytest.raises(RefusedError, match="expected a CDI device name"):
        said("MIG-GPU-1/7/0", policy=Policy(list_strategies=CDI_CRI), gpus={})


CARDS = {
    uuid: GPU(uuid, n, n, resource="amd.com/gpu", device_nodes=nodes)
    for n, (uuid, nodes) in enumerate(
        {
            "0000:03:00.0": ("/dev/dri/card0", "/dev/dri/renderD128"),
            "0000:83:00.0": ("/dev/dri/card1", "/dev/dri/renderD129"),
            "none": (),
        }.items()
    )
}
KFD = NodeTraits(("/dev/kfd",))


@pytest.mark.parametrize(
    "policy", [Policy(), Policy(list_strategies=CDI_CRI, dev_root="/custom")], ids=["plain", "NVIDIA's"]
)
def test_amd_is_its_nodes_and_nothing_else(policy: Policy) -> None:
    told = said("0000:83:00.0", "0000:03:00.0", policy=policy, around=KFD, gpus=CARDS, resource="amd.com/cpx_nps4")
    paths = ("/dev/kfd", "/dev/dri/card0", "/dev/dri/renderD128", "/dev/dri/card1", "/dev/dri/renderD129")
    assert told == ContainerAnswer(device_nodes=tuple(DeviceNode(path, path, "rw") for path in paths))


def test_amd_without_nodes_is_simulated_and_named() -> None:
    told = said("none", around=KFD, gpus=CARDS, resource="example.com/gpu")
    assert told == ContainerAnswer(envs={"AMD_VISIBLE_DEVICES": "none"})


@pytest.mark.parametrize(
    ("asked", "sayable", "says"),
    [
        (("0000:03:00.0", "none"), ALL, "none has none"),
        (("0000:03:00.0",), Sayable(frozenset({Field.ENVS})), "by device nodes"),
    ],
)
def test_amd_has_no_half_answer(asked: tuple[str, ...], sayable: Sayable, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        said(*asked, sayable=sayable, around=KFD, gpus=CARDS, resource="amd.com/gpu")


def test_a_name_of_its_own_goes_before_any_strategy() -> None:
    assert said("GPU-a::1", policy=Policy(list_strategies=ENVVAR), gpus=NAMED).cdi_devices == ("v.com/gpu=GPU-a",)


FIELDS = frozenset({Field.ENVS, Field.MOUNTS, Field.DEVICE_NODES, Field.ANNOTATIONS, Field.CDI_DEVICES})
POLICIES = st.builds(
    Policy,
    list_strategies=st.frozensets(st.sampled_from(ListStrategy), min_size=1),
    id_strategy=st.sampled_from(IdStrategy),
    pass_device_specs=st.booleans(),
    cdi_fallback=st.sampled_from(CdiFallback),
    gds=st.booleans(),
)


@given(
    POLICIES,
    st.frozensets(st.sampled_from(sorted(FIELDS, key=str))),
    st.frozensets(st.sampled_from(sorted(FIELDS, key=str))),
)
def test_an_answer_uses_what_can_be_said_and_something_is_sure_to_arrive(
    policy: Policy, can: frozenset[Field], perhaps: frozenset[Field]
) -> None:
    try:
        told = said("GPU-a", policy=policy, sayable=Sayable(can, perhaps - can), around=around(hooks=False))
    except RefusedError as refused:
        assert refused.fault is Fault.FAILED_PRECONDITION  # noqa: PT017 - either is right, and each is checked
        return
    used = {
        field
        for field, value in {
            Field.ENVS: told.envs,
            Field.MOUNTS: told.mounts,
            Field.DEVICE_NODES: told.device_nodes,
            Field.ANNOTATIONS: told.annotations,
            Field.CDI_DEVICES: told.cdi_devices,
        }.items()
        if value
    }
    assert used <= can | perhaps
    assert used - {Field.ANNOTATIONS, Field.CDI_DEVICES} <= can
    assert VARIABLE in told.envs or used & can & {Field.ANNOTATIONS, Field.CDI_DEVICES}


def test_beside_a_gpu_that_nobody_has_seen_no_name_of_its_own_counts() -> None:
    """Half an answer would start the container with one of its two GPUs."""
    told = said("GPU-a", "GPU-unseen", gpus=NAMED)
    assert (told.cdi_devices, told.envs) == ((), {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-unseen"})


# --- GPUs of a vendor that has no rules here ----------------------------------------------------------------------------

REAL_VENDORS = (NVIDIA, AMD)
OWN = {"SN0": GPU("SN0", 0, 0, device_nodes=("/dev/sn0",)), "SN1": GPU("SN1", 1, 1)}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        pytest.param(OWN, ContainerAnswer(device_nodes=(DeviceNode("/dev/sn0", "/dev/sn0"),)), id="its nodes"),
        pytest.param(
            {"SN0": GPU("SN0", 0, 0, device_nodes=("/dev/sn0",), cdi_name="v.com/sn=SN0")},
            ContainerAnswer(cdi_devices=("v.com/sn=SN0",), device_nodes=(DeviceNode("/dev/sn0", "/dev/sn0"),)),
            id="its CDI name, and its nodes where that may not arrive",
        ),
    ],
)
def test_a_vendor_without_rules_gets_its_device_nodes_and_never_a_variable(
    gpus: dict[str, GPU], expected: ContainerAnswer
) -> None:
    assert said("SN0", gpus=gpus, resource="vendor.com/sn", sayable=PERHAPS_CDI, vendors=REAL_VENDORS) == expected


def test_a_vendor_without_rules_and_without_nodes_is_refused() -> None:
    with pytest.raises(RefusedError, match="expected device nodes of each GPU, but SN1 has none"):
        said("SN0", "SN1", gpus=OWN, resource="vendor.com/sn", vendors=REAL_VENDORS)


@pytest.mark.parametrize("gone", ["MIG-1", "amdgpu_xcp_1"])
def test_of_a_vendor_without_rules_no_device_goes_on_purpose(gone: str) -> None:
    assert not PLAIN.was_repartitioned(gone, OWN.values())


def test_simulated_gpus_of_any_vendor_start_a_container() -> None:
    assert said("SN1", gpus=OWN, resource="vendor.com/sn") == ContainerAnswer()
    assert said("SN0", gpus=OWN, resource="vendor.com/sn").device_nodes == (DeviceNode("/dev/sn0", "/dev/sn0"),)
    with pytest.raises(RefusedError, match="has none"):
        said("SN0", "SN1", gpus=OWN, resource="vendor.com/sn")


@pytest.mark.parametrize(
    ("asked", "uuids"),
    [
        pytest.param("A::1", "A::1", id="an ID that looks like a replica's"),
        pytest.param("A::1::0", "A::1", id="a replica of that"),
        pytest.param("A::x", "A::x", id="no number, no replica"),
    ],
)
def test_a_vendors_id_that_contains_colons_survives(asked: str, uuids: str) -> None:
    gpus = {uuid: GPU(uuid, index, index) for index, uuid in enumerate(("A", "A::1", "A::x"))}
    assert said(asked, gpus=gpus).envs == {VARIABLE: uuids}
    assert found(asked, gpus) is gpus[uuids]
