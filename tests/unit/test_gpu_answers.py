"""What a container is told, so that it gets its GPUs; and how GPUs look on the list."""

from __future__ import annotations

import pytest

from devices.gpu.answers import reached, visible_devices
from devices.gpu.model import GPU, in_order
from devices.model import (
    ContainerAnswer,
    Device,
    DeviceNode,
    Fault,
    Field,
    Health,
    Kind,
    Options,
    RefusedError,
    Sayable,
    Trouble,
)

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
    assert visible_devices(resource, asked, GPUS, ALL) == answer


@pytest.mark.parametrize(
    ("asked", "sayable", "says"),
    [
        ("GPU-x", Sayable(frozenset()), "by environment variables, which"),
        ("GPU-x", Sayable(frozenset(), unsure=frozenset({Field.ENVS})), "by environment variables, which"),
        ("GPU-z", Sayable(frozenset({Field.ENVS})), "by device nodes, which"),
        ("GPU-z", Sayable(frozenset()), "by device nodes, environment variables, which"),
    ],
)
def test_no_half_answer(asked: str, sayable: Sayable, says: str) -> None:
    with pytest.raises(RefusedError) as refused:
        visible_devices("nvidia.com/gpu", (asked,), GPUS, sayable)
    assert refused.value.fault is Fault.FAILED_PRECONDITION
    assert says in str(refused.value)


def test_what_cannot_be_said_but_is_not_needed_does_not_matter() -> None:
    visible_devices("nvidia.com/gpu", ("GPU-x",), GPUS, Sayable(frozenset({Field.ENVS})))


NAMED = {name: GPU(name, index, index, cdi_name=f"v.com/gpu={name}") for index, name in enumerate(("GPU-b", "GPU-a"))}


@pytest.mark.parametrize(
    ("said", "unsure", "answer"),
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
    said: set[Field], unsure: set[Field], answer: ContainerAnswer
) -> None:
    sayable = Sayable(frozenset(said), frozenset(unsure))
    assert reached("nvidia.com/gpu", ("GPU-a", "GPU-b"), NAMED, sayable) == answer


def test_cdi_names_that_cannot_arrive_are_refused() -> None:
    with pytest.raises(RefusedError, match="by CDI device names, which") as refused:
        reached("nvidia.com/gpu", ("GPU-a",), NAMED, Sayable(frozenset({Field.ENVS})))
    assert refused.value.fault is Fault.FAILED_PRECONDITION


@pytest.mark.parametrize("gpus", [{}, GPUS], ids=["not looked yet", "without CDI names"])
def test_without_cdi_names_the_variable_speaks(gpus: dict[str, GPU]) -> None:
    answer = reached("nvidia.com/gpu", ("GPU-x",), gpus, ALL)
    assert answer == ContainerAnswer(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-x"})


def test_order_is_by_index_and_strangers_come_last() -> None:
    assert in_order(("b", "GPU-x", "a", "GPU-z"), GPUS) == ["GPU-z", "GPU-x", "a", "b"]
