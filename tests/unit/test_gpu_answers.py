"""What a container is told, so that it gets its GPUs; and how GPUs look on the list."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.gpu.asked import Asked, NodeTraits
from devices.gpu.model import GPU, found
from devices.gpu.nvidia import cdi
from devices.gpu.nvidia.cdi import DriverFiles
from devices.gpu.simulated.backend import VENDORS
from devices.gpu.vendor import Vendor, answer
from devices.model import (
    ContainerAnswer,
    Fault,
    Field,
    Mount,
    RefusedError,
    Sendable,
)
from devices.policy import CdiFallback, IdStrategy, ListStrategy, Policy

ALL = Sendable(frozenset(Field))


REAL = {
    gpu.uuid: gpu
    for gpu in (
        GPU("GPU-b", 0, 0, resource="nvidia.com/gpu", spec_nodes=("/dev/nvidia0",)),
        GPU("GPU-a", 1, 1, resource="nvidia.com/gpu", spec_nodes=("/dev/nvidia1",)),
    )
}
CDI_CRI = frozenset({ListStrategy.CDI_CRI})
ENVVAR = frozenset({ListStrategy.ENVVAR})
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
FILE = Mount("/usr/lib64/libcuda.so.550.54.15", "/run/nvidia/driver/usr/lib64/libcuda.so.550.54.15", read_only=True)


def said(
    *device_ids: str,
    policy: Policy | None = None,
    sendable: Sendable = ALL,
    around: NodeTraits | None = None,
    gpus: dict[str, GPU] | None = None,
    resource: str = "nvidia.com/gpu",
    vendors: Sequence[Vendor] = VENDORS,
) -> ContainerAnswer:
    known = REAL if gpus is None else gpus
    asked = Asked(resource, device_ids, known, policy or Policy(), sendable, around or NodeTraits(), "token")
    return answer(asked, device_ids, vendors)


def around(*, hooks: bool) -> NodeTraits:
    policy = Policy(driver_root="/run/nvidia/driver")
    driver = DriverFiles(libraries=(FILE,)) if hooks else DriverFiles((), others=(FILE,))
    return NodeTraits(specifications=cdi.specifications(REAL.values(), ("/dev/nvidiactl",), policy, driver))


FIELDS = frozenset({Field.ENVS, Field.MOUNTS, Field.DEVICE_NODES, Field.ANNOTATIONS, Field.CDI_DEVICES})
POLICIES = st.builds(
    Policy,
    list_strategies=st.frozensets(st.sampled_from(ListStrategy), min_size=1),
    id_strategy=st.sampled_from(IdStrategy),
    pass_device_specs=st.booleans(),
    cdi_fallback=st.sampled_from(CdiFallback),
    gds=st.booleans(),
)


NAMED = {name: GPU(name, index, index, cdi_name=f"v.com/gpu={name}") for index, name in enumerate(("GPU-b", "GPU-a"))}


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


def test_beside_a_gpu_that_nobody_has_seen_no_name_of_its_own_counts() -> None:
    """Half an answer would start the container with one of its two GPUs."""
    told = said("GPU-a", "GPU-unseen", gpus=NAMED)
    assert (told.cdi_devices, told.envs) == ((), {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-unseen"})


@given(
    POLICIES,
    st.frozensets(st.sampled_from(sorted(FIELDS, key=str))),
    st.frozensets(st.sampled_from(sorted(FIELDS, key=str))),
)
def test_an_answer_uses_what_can_be_said_and_something_is_sure_to_arrive(
    policy: Policy, can: frozenset[Field], perhaps: frozenset[Field]
) -> None:
    try:
        told = said("GPU-a", policy=policy, sendable=Sendable(can, perhaps - can), around=around(hooks=False))
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


# --- GPUs of a vendor that has no rules here ----------------------------------------------------------------------------


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
