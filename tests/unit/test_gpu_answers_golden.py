"""Every combination of what an operator can choose, as it is said to every kubelet: one row each in tests/golden/answers.

A row says where it comes from. *Measured* ones were asked of NVIDIA's plugin 0.20 (on a mock NVML with eight GPUs, by a
modern kubelet's side) and stand here once more, written by hand; *derived* ones name their rule. UPDATE_GOLDEN=1 writes the
files anew: read the difference before you keep it.
"""

from __future__ import annotations

import json
import os
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from adapters.dialect import Dialect, Level, sendable
from adapters.registry import by_name
from devices.gpu.asked import Asked, NodeTraits
from devices.gpu.backend import Sight
from devices.gpu.model import GPU
from devices.gpu.nvidia.cdi import Extra, qualified
from devices.gpu.simulated.backend import VENDORS
from devices.gpu.vendor import answer
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    DeviceNode,
    Fault,
    Mount,
    RefusedError,
)
from devices.policy import IdStrategy, ListStrategy, MigStrategy, Policy, Slices

GOLDEN = Path(__file__).parents[1] / "golden" / "answers"
UNIQUE = "6f1c1f0e-9e0b-4a39-8a55-2f3a0f9b7a01"
U = [f"GPU-{number}" for number in range(8)]
M = [f"MIG-{number}" for number in range(4)]
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm")

LEVELS: dict[str, tuple[Dialect, Level]] = {
    "0.1": (by_name("0.1"), Level(8, 8)),
    "v1alpha2": (by_name("v1alpha2"), Level(9, 9)),
    "v1beta1 of 1.10 to 1.28": (by_name("v1beta1"), Level(10, 28)),
    "v1beta1 of who knows": (by_name("v1beta1"), Level(10)),
    "v1beta1 of 1.29 and later": (by_name("v1beta1"), Level(29)),
}
MODERN = "v1beta1 of 1.29 and later"


class World(NamedTuple):
    """A way of sharing GPUs: what is there, what is asked for, and what is on the host besides."""

    resource: str
    gpus: tuple[GPU, ...]
    asked: tuple[str, ...]
    policy: Policy
    control: tuple[str, ...] = ()


WHOLE = tuple(
    GPU(uuid, n, n, resource="nvidia.com/gpu", spec_nodes=(f"/dev/nvidia{n}",), place=str(n))
    for n, uuid in enumerate(U)
)
INSTANCES = tuple(
    GPU(
        uuid, n, 1, parent=U[1], resource="nvidia.com/gpu", profile="1g.5gb", place=f"1:{n}",
        spec_nodes=("/dev/nvidia1", f"/dev/nvidia-caps/nvidia-cap{30 + 9 * n}", f"/dev/nvidia-caps/nvidia-cap{31 + 9 * n}"),
    )
    for n, uuid in enumerate(M)
)  # fmt: skip
WORLDS = {
    "none": World("nvidia.com/gpu", WHOLE, (U[2], U[1]), Policy()),
    "time-slicing": World(
        "nvidia.com/gpu",
        WHOLE,
        (f"{U[2]}::1", f"{U[1]}::0", f"{U[1]}::2"),
        Policy(slices={"nvidia.com/gpu": Slices(3, "nvidia.com/gpu")}),
    ),
    "mig-single": World("nvidia.com/gpu", INSTANCES, (M[2], M[0]), Policy(mig_strategy=MigStrategy.SINGLE), CONTROL),
    "mig-mixed": World("nvidia.com/mig-1g.5gb", INSTANCES, (M[3],), Policy(mig_strategy=MigStrategy.MIXED), CONTROL),
}
STRATEGIES = [
    frozenset(some)
    for some in chain.from_iterable(combinations(ListStrategy, many) for many in range(1, len(ListStrategy) + 1))
]

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
DIR = "/var/run/nvidia-container-devices"
ONLY = {one: frozenset({one}) for one in ListStrategy}
ENVVAR, MOUNTS = ONLY[ListStrategy.ENVVAR], ONLY[ListStrategy.VOLUME_MOUNTS]

# What NVIDIA's plugin 0.20 answered to a modern kubelet: sharing, strategies, IDs, device specs.
MEASURED = {
    ("none", ENVVAR, IdStrategy.UUID, False): ContainerAnswer(envs={VISIBLE: f"{U[1]},{U[2]}"}),
    ("none", ENVVAR, IdStrategy.INDEX, False): ContainerAnswer(envs={VISIBLE: "1,2"}),
    ("none", MOUNTS, IdStrategy.UUID, False): ContainerAnswer(
        envs={VISIBLE: DIR}, mounts=(Mount(f"{DIR}/{U[1]}", "/dev/null"), Mount(f"{DIR}/{U[2]}", "/dev/null"))
    ),
    ("none", ENVVAR | MOUNTS, IdStrategy.UUID, False): ContainerAnswer(
        envs={VISIBLE: DIR}, mounts=(Mount(f"{DIR}/{U[1]}", "/dev/null"), Mount(f"{DIR}/{U[2]}", "/dev/null"))
    ),
    ("none", MOUNTS, IdStrategy.INDEX, True): ContainerAnswer(
        envs={VISIBLE: DIR},
        mounts=(Mount(f"{DIR}/1", "/dev/null"), Mount(f"{DIR}/2", "/dev/null")),
        device_nodes=(DeviceNode("/dev/nvidia1", "/dev/nvidia1", "rw"), DeviceNode("/dev/nvidia2", "/dev/nvidia2", "rw")),
    ),
    ("none", ENVVAR, IdStrategy.UUID, True): ContainerAnswer(
        envs={VISIBLE: f"{U[1]},{U[2]}"},
        device_nodes=(DeviceNode("/dev/nvidia1", "/dev/nvidia1", "rw"), DeviceNode("/dev/nvidia2", "/dev/nvidia2", "rw")),
    ),
    ("time-slicing", ENVVAR, IdStrategy.UUID, False): ContainerAnswer(envs={VISIBLE: f"{U[1]},{U[2]}"}),
}  # fmt: skip


def told(world: World, policy: Policy, to: str, resource: str = "") -> ContainerAnswer:
    gpus = {gpu.uuid: gpu for gpu in world.gpus}
    around = NodeTraits(Sight((), control_nodes=world.control))
    asked = Asked(resource or world.resource, world.asked, gpus, policy, sendable(*LEVELS[to]), around, UNIQUE)
    return answer(asked, world.asked, VENDORS)


def plain(said: ContainerAnswer) -> dict[str, Any]:
    """Give an answer as JSON has it: mounts as container: host, nodes as container: host and permissions."""
    whole = {
        "envs": dict(said.envs),
        "mounts": {one.container_path: one.host_path + (" ro" if one.read_only else "") for one in said.mounts},
        "nodes": {one.container_path: f"{one.host_path} {one.permissions}" for one in said.device_nodes},
        "annotations": dict(said.annotations),
        "cdi": list(said.cdi_devices),
    }
    return {key: value for key, value in whole.items() if value}


def rule(sharing: str, strategies: frozenset[ListStrategy], ids: IdStrategy, *, specs: bool) -> str:
    """Say by which rule the row of these choices follows."""
    if (sharing, strategies, ids, specs) in MEASURED:
        return "measured: NVIDIA 0.20, to a modern kubelet; derived: to others, as each dialect says all of it"
    cdi = strategies & {ListStrategy.CDI_ANNOTATIONS, ListStrategy.CDI_CRI}
    if strategies == cdi:
        rules = [
            "CDI alone says no variable and no nodes (server.go: AllCDIEnabled), and is refused where it can't be said"
        ]
    elif cdi:
        rules = ["CDI and the rest side by side (server.go: updateResponseForCDI), CDI left out where it can't be said"]
    elif ListStrategy.VOLUME_MOUNTS in strategies:
        rules = ["mounts as measured with whole GPUs"]
    else:
        rules = ["the variable as measured with whole GPUs"]
    if specs and strategies != cdi:
        rules.append("the GPU's own nodes, then the control nodes that exist (server.go: apiDeviceSpecs), each once")
    if ids is IdStrategy.INDEX:
        rules.append("index as measured with whole GPUs, GPU:instance with MIG (rm/nvml_devices.go)")
    if sharing == "time-slicing":
        rules.append("replicas count as their GPU, once")
    return f"derived: {'; '.join(rules)}"


def row(sharing: str, strategies: frozenset[ListStrategy], ids: IdStrategy, *, specs: bool) -> dict[str, Any]:
    world = WORLDS[sharing]
    policy = replace(world.policy, list_strategies=strategies, id_strategy=ids, pass_device_specs=specs)
    answers: list[dict[str, Any]] = []
    for to in LEVELS:
        try:
            said = plain(told(world, policy, to))
        except RefusedError as refused:
            said = {"refused": f"{refused.fault.value}: {str(refused).partition(', so the')[0]}"}
        same = next((one for one in answers if one["says"] == said), None)
        if same is None:
            answers.append({"to": [to], "says": said})
        else:
            same["to"].append(to)
    return {
        "strategies": "+".join(one.value for one in ListStrategy if one in strategies),
        "ids": ids.value,
        "specs": specs,
        "source": rule(sharing, strategies, ids, specs=specs),
        "answers": answers,
    }


def table(sharing: str) -> str:
    rows = [
        json.dumps(row(sharing, strategies, ids, specs=specs))
        for strategies in STRATEGIES
        for ids in IdStrategy
        for specs in (False, True)
    ]
    return "[\n" + ",\n".join(rows) + "\n]\n"


@pytest.mark.parametrize("sharing", WORLDS)
def test_every_combination_is_said_as_it_was(sharing: str) -> None:
    file = GOLDEN / f"{sharing}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(table(sharing), encoding="utf-8")
    assert json.loads(table(sharing)) == json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("sharing", WORLDS)
def test_what_is_said_arrives_whole(sharing: str) -> None:
    world = WORLDS[sharing]
    for strategies in STRATEGIES:
        for to, (dialect, level) in LEVELS.items():
            try:
                said = told(world, replace(world.policy, list_strategies=strategies, pass_device_specs=True), to)
            except RefusedError:
                continue
            wire = dialect.encode_allocate_answer([ContainerRequest(world.asked)], [said], level)
            assert not wire.lost
            assert dialect.decode_allocate_answer(wire.data) == (said,)


@pytest.mark.parametrize("sharing", WORLDS)
def test_without_cdi_nothing_depends_on_the_kubelet(sharing: str) -> None:
    world = WORLDS[sharing]
    for strategies in (ENVVAR, MOUNTS, ENVVAR | MOUNTS):
        policy = replace(world.policy, list_strategies=strategies)
        assert {json.dumps(plain(told(world, policy, to))) for to in LEVELS} == {
            json.dumps(plain(told(world, policy, MODERN)))
        }


@pytest.mark.parametrize(
    ("sharing", "strategies", "ids", "specs"),
    MEASURED,
    ids=lambda value: "+".join(sorted(one.value for one in value)) if isinstance(value, frozenset) else str(value),
)
def test_measured(sharing: str, strategies: frozenset[ListStrategy], ids: IdStrategy, specs: bool) -> None:
    world = WORLDS[sharing]
    policy = replace(world.policy, list_strategies=strategies, id_strategy=ids, pass_device_specs=specs)
    assert told(world, policy, MODERN) == MEASURED[sharing, strategies, ids, specs]


@pytest.mark.parametrize(
    ("policy", "host"),
    [
        pytest.param(
            Policy(driver_root="/run/nvidia/driver", pass_device_specs=True),
            "/run/nvidia/driver/dev/nvidia1",
            id="the driver's root",
        ),
        pytest.param(
            Policy(dev_root="/custom", pass_device_specs=True), "/custom/dev/nvidia1", id="the nodes' own root"
        ),
    ],
)
def test_measured_roots(policy: Policy, host: str) -> None:
    world = World("nvidia.com/gpu", WHOLE, (U[1],), policy)
    said = told(world, policy, MODERN)
    assert said == ContainerAnswer(envs={VISIBLE: U[1]}, device_nodes=(DeviceNode("/dev/nvidia1", host, "rw"),))


def test_measured_more_than_one_of_a_shared_resource() -> None:
    policy = Policy(fail_requests_greater_than_one=True)
    asked = World("nvidia.com/gpu.shared", WHOLE, (f"{U[0]}::0", f"{U[1]}::0"), policy)
    with pytest.raises(RefusedError) as refused:
        told(asked, policy, MODERN)
    assert refused.value.fault is Fault.INVALID_ARGUMENT  # There: UNKNOWN, which says less.
    assert str(refused.value).startswith(
        'invalid allocation request for "nvidia.com/gpu.shared": invalid request: maximum request size for shared resources '
        "is 1; found 2"
    )


@pytest.mark.parametrize("strategy", [MigStrategy.SINGLE, MigStrategy.MIXED])
def test_measured_without_a_mig_gpu_the_strategy_changes_nothing(strategy: MigStrategy) -> None:
    world = WORLDS["none"]
    assert told(world, Policy(mig_strategy=strategy), MODERN) == told(world, Policy(), MODERN)


def test_extras_are_named_after_the_gpus() -> None:
    world = WORLDS["none"]
    policy = Policy(list_strategies=ONLY[ListStrategy.CDI_CRI], gds=True, mofed=True)
    gpus = {gpu.uuid: gpu for gpu in world.gpus}
    around = NodeTraits(extras=tuple(qualified("all", extra.value) for extra in (Extra.GDS, Extra.MOFED)))
    said = answer(
        Asked(world.resource, world.asked, gpus, policy, sendable(*LEVELS[MODERN]), around, UNIQUE),
        world.asked,
        VENDORS,
    )
    assert said.cdi_devices == (
        f"k8s.device-plugin.nvidia.com/gpu={U[1]}",
        f"k8s.device-plugin.nvidia.com/gpu={U[2]}",
        "k8s.device-plugin.nvidia.com/gds=all",
        "k8s.device-plugin.nvidia.com/mofed=all",
    )
