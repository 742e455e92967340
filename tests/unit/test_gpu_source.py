"""The GPU model over a backend whose sights a test sets: what is offered, what became of a device, and who lets go of what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from devices.combined import Combined
from devices.generic import GenericSource
from devices.gpu import allocation, source
from devices.gpu.asked import NodeTraits
from devices.gpu.backend import Sight
from devices.gpu.model import GPU, Link, Way
from devices.gpu.nvidia.vendor import NVIDIA as NVIDIA_RULES
from devices.gpu.simulated.backend import VENDORS
from devices.gpu.source import GPUSource
from devices.model import (
    ContainerRequest,
    Fault,
    Field,
    Health,
    PreferredRequest,
    RefusedError,
    Sayable,
    Trouble,
    TroubleKind,
)
from devices.policy import CDI_STRATEGIES, Globbed, IdStrategy, ListStrategy, MigStrategy, Policy, Sharing, Slices
from devices.source import Facts, Fate, GiveUpError, Inventory, Unusable

NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
SINGLE, MIXED = Policy(mig_strategy=MigStrategy.SINGLE), Policy(mig_strategy=MigStrategy.MIXED)
TWICE = Policy(slices={NVIDIA: Slices(2, NVIDIA)})


class Backend:
    """Shows what it is told to, and notes what it is asked to let go of."""

    hindrance = ""

    def __init__(self, name: str = "test") -> None:
        self.name = name
        self.sights: asyncio.Queue[Sight | Exception | None] = asyncio.Queue()
        self.orders: list[tuple[str, list[str]]] = []

    def sees(self, *gpus: GPU, **rest: Any) -> None:
        self.sights.put_nowait(Sight(gpus, **rest))

    async def watch(self) -> AsyncGenerator[Sight]:
        while (sight := await self.sights.get()) is not None:
            if isinstance(sight, Exception):
                raise sight
            yield sight

    async def release(self, uuids: Collection[str]) -> None:
        self.orders.append(("release", sorted(uuids)))

    async def acquire(self, uuids: Collection[str]) -> None:
        self.orders.append(("acquire", sorted(uuids)))


def gpu(index: int, **rest: Any) -> GPU:
    return replace(GPU(f"GPU-{index}", index, index, resource=NVIDIA, pci=f"0000:0{index}:00.0"), **rest)


def mig(parent: int, number: int, profile: str = "1g.10gb") -> GPU:
    return gpu(
        parent, uuid=f"MIG-{parent}{number}", parent=f"GPU-{parent}", profile=profile, place=f"{parent}:{number}"
    )


def ids(inventory: Inventory) -> dict[str, list[str]]:
    return {resource: [device.id for device in listing.devices] for resource, listing in inventory.items()}


def surveyed(sight: Sight, policy: Policy) -> NodeTraits:
    """Stand in for what answers by CDI rest on: nothing but the nodes."""
    assert policy.list_strategies & CDI_STRATEGIES
    return NodeTraits(sight.control_nodes)


class Watched:
    """A source over a backend, with its watch open."""

    def __init__(self, policy: Policy = Policy(), survey: Callable[[Sight, Policy], NodeTraits] = surveyed) -> None:
        self.backend = Backend()
        self.source = GPUSource(self.backend, policy, VENDORS, survey)
        self.inventories: AsyncIterator[Inventory] = self.source.watch()

    async def next(self) -> Inventory:
        async with asyncio.timeout(10):
            return await anext(self.inventories)

    async def sees(self, *gpus: GPU, **rest: Any) -> dict[str, list[str]]:
        self.backend.sees(*gpus, **rest)
        return ids(await self.next())

    async def close(self) -> None:
        await cast("Any", self.inventories).aclose()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    one = Watched()
    yield one
    await one.close()


async def test_what_the_operator_decides_anew_is_listed_anew(watched: Watched) -> None:
    assert await watched.sees(gpu(0), gpu(1)) == {NVIDIA: ["GPU-0", "GPU-1"]}
    watched.source.adopt(TWICE)
    assert ids(await watched.next()) == {NVIDIA: ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]}


async def test_what_can_not_be_named_changes_no_more_than_health(watched: Watched) -> None:
    """As in the middle of a MIG change: the list stays until the node makes sense again, and nobody gets what isn't well."""
    watched.source.adopt(SINGLE)
    both, ill = (gpu(0, partitioned=True), gpu(1, partitioned=True)), Trouble("Xid 79")

    async def unhealthy() -> list[str]:
        return [one.id for one in (await watched.next())[NVIDIA].devices if one.health is Health.UNHEALTHY]

    assert await watched.sees(*both, mig(0, 0), mig(0, 1), mig(1, 0)) == {NVIDIA: ["MIG-00", "MIG-01", "MIG-10"]}
    with capture_logs() as logs:
        watched.backend.sees(*both, mig(0, 0), mig(1, 0, "2g.20gb"))
        assert await unhealthy() == ["MIG-01"]
        watched.backend.sees(*both, replace(mig(0, 0), trouble=ill), mig(0, 1), mig(1, 0, "2g.20gb"))
        assert await unhealthy() == ["MIG-00"]
    assert [one["event"] for one in logs] == ["devices can't be named"]
    assert watched.source.facts(NVIDIA)("MIG-00").parent == "GPU-0"
    assert await watched.sees(gpu(0), gpu(1)) == {NVIDIA: ["GPU-0", "GPU-1"]}
    watched.backend.sees(gpu(0, partitioned=True), gpu(1))
    assert await unhealthy() == ["GPU-0"]
    assert await watched.sees(gpu(0, partitioned=True), mig(0, 1)) == {NVIDIA: ["MIG-01"]}


SPLIT = (gpu(0, partitioned=True), mig(0, 0), gpu(1))
"""What the strategy ``single`` has no name for: one GPU with MIG, and one without."""
AMD_SPLIT = tuple(gpu(one, resource=AMD, profile=profile) for one, profile in enumerate(["spx_nps1", "cpx_nps4"]))


@pytest.mark.parametrize(
    ("policy", "odd", "even", "offered"),
    [
        pytest.param(SINGLE, SPLIT, SPLIT[:2], {NVIDIA: ["MIG-00"]}, id="NVIDIA"),
        pytest.param(Policy(), AMD_SPLIT, AMD_SPLIT[:1], {AMD: ["GPU-0"]}, id="AMD"),
    ],
)
async def test_a_node_that_can_not_be_named_says_so_until_it_can(
    watched: Watched, policy: Policy, odd: tuple[GPU, ...], even: tuple[GPU, ...], offered: dict[str, list[str]]
) -> None:
    watched.source.adopt(policy)
    watched.backend.sees(*odd)
    pending = asyncio.ensure_future(watched.next())
    with capture_logs() as logs:
        while not logs:  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0)
    assert watched.source.fate(next(iter(offered)), odd[0].uuid) is Fate.UNKNOWN
    (hindrance,) = watched.source.hindrances()
    assert (hindrance.source, hindrance.held_up) == ("test", True)
    assert hindrance.reason == f"devices can't be named: {logs[0]['reason']}"
    assert not pending.done()
    watched.backend.sees(*even)
    assert (ids(await pending), watched.source.hindrances()) == (offered, ())
    watched.backend.sees(*odd)
    while not watched.source.hindrances():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    assert not watched.source.hindrances()[0].held_up  # What was offered before still is.


async def test_a_node_that_can_not_be_named_at_first_ends_the_process_where_that_is_wanted() -> None:
    one = Watched(replace(SINGLE, fail_on_init_error=True))
    with pytest.raises(GiveUpError, match=r"^devices can't be named: the MIG strategy 'single' expects") as given_up:
        await one.sees(*SPLIT)
    assert given_up.value.status == 1


async def test_a_node_that_can_not_be_named_any_more_ends_no_process() -> None:
    """Not even where that came before the first list was told."""
    one = Watched(replace(SINGLE, fail_on_init_error=True))
    one.backend.sees(*SPLIT[:2])
    assert await one.sees(*SPLIT) == {NVIDIA: ["MIG-00"]}
    assert await one.sees(gpu(0)) == {NVIDIA: ["GPU-0"]}
    await one.close()


@pytest.mark.parametrize("seen", [False, True])
async def test_a_gpu_is_its_vendors_whatever_an_operator_calls_it(seen: bool) -> None:
    policy = Policy(gpu_names=(("*", "example.com/big"),))
    source = GPUSource(backend := Backend("nvidia"), policy, (NVIDIA_RULES,))
    async with aclosing(cast("Any", source.watch())) as inventories:
        if seen:
            backend.sees(gpu(0))
            await anext(inventories)
        answer = await source.answer("example.com/big", ContainerRequest(("GPU-0",)), Sayable(frozenset(Field)))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "GPU-0"}


@pytest.mark.parametrize("looked", [False, True])
async def test_a_resource_of_nobody_is_not_answered_for(watched: Watched, looked: bool) -> None:
    """It is remembered from another configuration, say: no path is a GPU."""
    watched.source.adopt(Policy(globbed=(Globbed("example.com/null", ("/dev/null",)),)))
    if looked:
        await watched.sees(gpu(0))
    request = ContainerRequest(("/dev/null",))
    with pytest.raises(RefusedError, match="none offers example"):
        await watched.source.answer("example.com/null", request, Sayable(frozenset(Field)))
    assert not watched.source.claims("example.com/null")


async def test_a_gpu_that_is_here_is_answered_for_under_an_old_name() -> None:
    """A kubelet 1.8 asks at each start of a container, also after the name was changed."""
    source = GPUSource(backend := Backend("nvidia"), Policy(), VENDORS)
    async with aclosing(cast("Any", source.watch())) as inventories:
        backend.sees(gpu(0))
        await anext(inventories)
        answer = await source.answer("old.com/gpu", ContainerRequest(("GPU-0::1",)), Sayable(frozenset(Field)))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "GPU-0"}


async def test_a_complete_backend_says_itself_what_it_has(watched: Watched) -> None:
    assert watched.source.claims("any.com/thing")
    await watched.sees(gpu(0), resources=(NVIDIA, AMD))
    assert [watched.source.claims(name) for name in (NVIDIA, AMD, "any.com/thing")] == [True, True, False]


async def test_a_complete_backend_may_have_any_resource_until_its_devices_can_be_named(watched: Watched) -> None:
    """More replicas than fit on a list, say: what is remembered of them isn't lost, and is served from memory."""
    watched.source.adopt(SINGLE)
    watched.backend.sees(*SPLIT, resources=(NVIDIA,))
    pending = asyncio.ensure_future(watched.next())
    while not watched.source.hindrances():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    assert [watched.source.claims(name) for name in (NVIDIA, "any.com/thing")] == [True, True]
    watched.backend.sees(*SPLIT[:2], resources=(NVIDIA,))
    await pending
    assert [watched.source.claims(name) for name in (NVIDIA, "any.com/thing")] == [True, False]


@pytest.mark.parametrize(
    ("before", "policy", "after", "resource", "device", "fate"),
    [
        pytest.param([gpu(0), gpu(1)], Policy(), [gpu(0)], NVIDIA, "GPU-1", Fate.LOST, id="a GPU is gone"),
        pytest.param(
            [gpu(0)], Policy(), [gpu(5, pci="0000:00:00.0")], NVIDIA, "GPU-0", Fate.WITHDRAWN, id="another in its slot"
        ),
        pytest.param(
            [gpu(0, pci="")], Policy(), [gpu(5, pci="")], NVIDIA, "GPU-0", Fate.LOST, id="nobody knows in which slot another is"
        ),
        pytest.param(
            [gpu(0, partitioned=True), mig(0, 0), mig(0, 1)], MIXED, [mig(0, 1)], "nvidia.com/mig-1g.10gb", "MIG-00", Fate.LOST,
            id="in its slot is another part of the same GPU",
        ),
        pytest.param([gpu(0)], TWICE, [gpu(0)], NVIDIA, "GPU-0", Fate.WITHDRAWN, id="it is shared now"),
        pytest.param([gpu(0)], TWICE, [gpu(0)], NVIDIA, "GPU-0::2", Fate.WITHDRAWN, id="fewer replicas"),
        pytest.param([gpu(0)], TWICE, [], NVIDIA, "GPU-0::1", Fate.LOST, id="a shared GPU is gone"),
        pytest.param([gpu(0)], TWICE, [], NVIDIA, "GPU-0", Fate.WITHDRAWN, id="gone, and would be shared"),
        pytest.param(
            [gpu(0, partitioned=True), mig(0, 0)],
            MIXED,
            [gpu(0, partitioned=True)],
            "nvidia.com/mig-1g.10gb",
            "MIG-00",
            Fate.WITHDRAWN,
            id="an instance was destroyed",
        ),
        pytest.param(
            [gpu(0, partitioned=True), mig(0, 0)],
            MIXED,
            [],
            "nvidia.com/mig-1g.10gb",
            "MIG-00",
            Fate.LOST,
            id="an instance went with its GPU",
        ),
        pytest.param(
            [gpu(0, partitioned=True), mig(0, 0)], SINGLE, [], "nvidia.com/mig-1g.10gb", "MIG-00", Fate.WITHDRAWN,
            id="gone, and would have another name",
        ),
        pytest.param([gpu(0)], Policy(), [gpu(0)], NVIDIA, "MIG-unknown", Fate.WITHDRAWN, id="an instance of before"),
        pytest.param([gpu(0)], Policy(), [gpu(0)], NVIDIA, "GPU-unknown", Fate.UNKNOWN, id="a GPU of before"),
        pytest.param([gpu(0)], Policy(), [gpu(0)], AMD, "amdgpu_xcp_3", Fate.WITHDRAWN, id="a partition of before"),
        pytest.param(
            [gpu(0)], Policy(), [gpu(0, profile="spx_nps1")], AMD, "amdgpu_xcp.3", Fate.WITHDRAWN, id="not partitioned now"
        ),
        pytest.param(
            [gpu(0)], Policy(), [gpu(0, profile="cpx_nps4")], AMD, "amdgpu_xcp_3", Fate.UNKNOWN, id="partitioned still"
        ),
        pytest.param(
            [gpu(0)], Policy(), [gpu(0, trouble=Trouble("mute"))], AMD, "amdgpu_xcp_3", Fate.UNKNOWN, id="its GPU is ill"
        ),
        pytest.param([gpu(0)], Policy(), [], AMD, "amdgpu_xcp_3", Fate.UNKNOWN, id="it went with all GPUs"),
        pytest.param([gpu(0)], Policy(), [gpu(0)], NVIDIA, "GPU-0", Fate.LOST, id="still on the list"),
    ],
)  # fmt: skip
async def test_what_became_of_a_device(
    before: list[GPU], policy: Policy, after: list[GPU], resource: str, device: str, fate: Fate
) -> None:
    one = Watched(MIXED)
    assert one.source.fate(resource, device) is Fate.UNKNOWN  # nobody has looked yet
    await one.sees(*before)
    one.source.adopt(policy)
    await one.next()
    await one.sees(*after)
    assert one.source.fate(resource, device) is fate
    await one.close()


async def test_what_was_taken_away_on_purpose_is_withdrawn(watched: Watched) -> None:
    await watched.sees(gpu(0), gpu(1))
    await watched.sees(gpu(0), withdrawn=frozenset({"GPU-1"}))
    assert watched.source.fate(NVIDIA, "GPU-1") is Fate.WITHDRAWN


async def test_a_name_that_a_complete_backend_no_longer_has_is_withdrawn(watched: Watched) -> None:
    assert await watched.sees(resources=(AMD,)) == {AMD: []}
    assert watched.source.fate(NVIDIA, "any") is Fate.WITHDRAWN


async def test_released_gpus_stay_listed_with_what_is_on_them(watched: Watched) -> None:
    watched.source.adopt(MIXED)
    await watched.sees(gpu(0, partitioned=True), mig(0, 0), gpu(1))
    watched.backend.sees(gpu(1), released=frozenset({"GPU-0"}))
    inventory = await watched.next()
    assert ids(inventory) == {NVIDIA: ["GPU-1"], "nvidia.com/mig-1g.10gb": ["MIG-00"]}
    assert inventory["nvidia.com/mig-1g.10gb"].released == {"MIG-00"}
    assert inventory[NVIDIA].released == frozenset()


@pytest.mark.parametrize(
    ("asked", "told", "devices"),
    [
        pytest.param([], [], ["GPU-1::0", "GPU-1::1", "MIG-00", "MIG-01"], id="all"),
        pytest.param(["MIG-01"], ["GPU-0"], ["MIG-00", "MIG-01"], id="an instance: its GPU, and all that is on it"),
        pytest.param(["GPU-1::1"], ["GPU-1"], ["GPU-1::0", "GPU-1::1"], id="a replica: its GPU"),
    ],
)
@pytest.mark.parametrize("order", ["release", "acquire"])
async def test_what_is_let_go_of(
    watched: Watched, order: str, asked: list[str], told: list[str], devices: list[str]
) -> None:
    watched.source.adopt(replace(MIXED, slices=TWICE.slices))
    await watched.sees(gpu(0, partitioned=True), mig(0, 0), mig(0, 1), gpu(1))
    assert sorted(await getattr(watched.source, order)(asked)) == devices
    assert watched.backend.orders == [(order, told)]


@pytest.mark.parametrize("stranger", ["GPU-7", "GPU-0::0", "GPU-0::"])
async def test_nobody_is_asked_to_let_go_of_what_is_not_there(watched: Watched, stranger: str) -> None:
    await watched.sees(gpu(0))
    assert list(await watched.source.release([stranger])) == []
    assert watched.backend.orders == []


ILL = Trouble("Xid 95", TroubleKind.RESET_REQUIRED)


async def test_a_gpu_offered_whole_is_ill_with_an_instance_and_well_with_it(watched: Watched) -> None:
    """With the MIG strategy ``none``; an operator's word, or another judgement, is of the instance."""
    ill = (gpu(0, partitioned=True), replace(mig(0, 0), trouble=ILL), gpu(1))
    well = (gpu(0, partitioned=True), mig(0, 0), gpu(1))
    watched.backend.sees(*ill)
    found = (await watched.next())[NVIDIA]
    assert (found.troubles, found.recovered) == ({"GPU-0": ILL}, frozenset())
    watched.backend.sees(*well, recovered=frozenset({"MIG-00"}))
    found = (await watched.next())[NVIDIA]
    assert (dict(found.troubles), found.recovered) == ({}, frozenset({"GPU-0"}))


async def test_one_instance_that_was_reset_says_nothing_of_the_others(watched: Watched) -> None:
    watched.source.adopt(MIXED)
    watched.backend.sees(gpu(0, partitioned=True), mig(0, 0), mig(0, 1), recovered=frozenset({"MIG-00"}))
    assert (await watched.next())["nvidia.com/mig-1g.10gb"].recovered == {"MIG-00"}


async def test_an_instance_that_lacks_its_nodes_is_listed_as_ill_and_never_answered_for(watched: Watched) -> None:
    lacks = "it has no capability device nodes"
    watched.source.adopt(replace(MIXED, pass_device_specs=True))
    watched.backend.sees(gpu(0, partitioned=True), replace(mig(0, 0), lacks=lacks, spec_nodes=("/dev/nvidia0",)))
    resource = "nvidia.com/mig-1g.10gb"
    found = (await watched.next())[resource]
    assert [device.health for device in found.devices] == [Health.UNHEALTHY]
    assert found.troubles == {"MIG-00": Trouble(lacks)}
    with pytest.raises(RefusedError, match=lacks) as refused:
        await watched.source.answer(resource, ContainerRequest(("MIG-00",)), Sayable(frozenset(Field)))
    assert refused.value.fault is Fault.FAILED_PRECONDITION


async def test_what_is_known_of_a_gpu(watched: Watched) -> None:
    link = Link("GPU-1", Way.NVLINK, 4)
    await watched.sees(gpu(0, product="H100", links=(link,), spec_nodes=("/dev/nvidia0",)), gpu(1))
    assert watched.source.facts(NVIDIA)("GPU-0") == Facts(
        "H100", "0", "0000:00:00.0", links={"1": "nvlink x4"}, nodes=("/dev/nvidia0",), minor=0
    )
    assert watched.source.facts(NVIDIA)("GPU-9") == Facts()


async def test_what_is_known_of_many_gpus_is_looked_up_once_for_all_until_they_change(watched: Watched) -> None:
    looks = []

    class Counted(tuple[GPU, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[GPU]:
            looks.append(len(self))
            return super().__iter__()

    link = Link("GPU-1", Way.NVLINK)
    await watched.sees(gpu(0, links=(link,)), gpu(1), gpu(2))
    watched.source._sight = sight = replace(
        cast("Sight", watched.source._sight), gpus=Counted((gpu(0), gpu(1), gpu(2)))
    )
    assert [watched.source.facts(NVIDIA)(f"GPU-{number}").index for number in range(3)] == ["0", "1", "2"]
    assert looks == [3]
    await watched.sees(gpu(0, links=(link,)), gpu(1, place="0:1"), *sight.gpus[2:], gpu(3))
    assert watched.source.facts(NVIDIA)("GPU-0").links == {"0:1": "nvlink"}


async def test_replicas_are_chosen_as_the_operator_says(watched: Watched) -> None:
    request = PreferredRequest(("GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"), (), 2)
    watched.source.adopt(TWICE)
    await watched.sees(gpu(0), gpu(1))
    assert await watched.source.prefer(NVIDIA, request) == ("GPU-0::0", "GPU-1::0")
    watched.source.adopt(replace(TWICE, sharing=Sharing.PACKED))
    assert await watched.source.prefer(NVIDIA, request) == ("GPU-0::0", "GPU-0::1")


@pytest.mark.parametrize(("replicas", "at_once"), [(500, True), (501, False)])
async def test_a_choice_among_many_devices_holds_up_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, replicas: int, at_once: bool
) -> None:
    where: list[bool] = []

    def noted(*asked: Any) -> tuple[str, ...]:
        where.append(threading.current_thread() is threading.main_thread())
        return allocation.preferred(*asked)

    monkeypatch.setattr(source, "preferred", noted)
    watched.source.adopt(Policy(slices={NVIDIA: Slices(replicas, NVIDIA)}))
    (offered,) = (await watched.sees(gpu(0), gpu(1))).values()
    chosen = await watched.source.prefer(NVIDIA, PreferredRequest(tuple(offered), (), 2))
    assert (chosen, where) == (("GPU-0::0", "GPU-1::0"), [at_once])


@pytest.mark.parametrize("there", [[gpu(0), gpu(1, trouble=Trouble("hot"))], [gpu(0)]], ids=["ill", "gone"])
async def test_a_gpu_that_is_not_well_is_not_made_ready(watched: Watched, there: list[GPU]) -> None:
    await watched.sees(*there)
    await watched.source.prepare(NVIDIA, ("GPU-0",))
    with pytest.raises(RefusedError, match="GPU-1 isn't: repair it"):
        await watched.source.prepare(NVIDIA, ("GPU-0", "GPU-1"))


@pytest.mark.parametrize("end", [GiveUpError("stale", 75), OSError("broken")])
async def test_what_ends_a_backend_ends_the_watch(watched: Watched, end: Exception) -> None:
    watched.backend.sights.put_nowait(end)
    with pytest.raises(type(end)):
        await watched.next()


async def test_a_backend_that_just_ends_is_a_defect(watched: Watched) -> None:
    watched.backend.sights.put_nowait(None)
    with pytest.raises(RuntimeError, match="the backend test ended"):
        await watched.next()


# Several sources as one.


async def test_two_sources_are_one_inventory() -> None:
    first, second = Backend("a"), Backend("b")
    both = Combined([GPUSource(first, Policy(), VENDORS), GPUSource(second, Policy(), VENDORS)])
    async with aclosing(cast("Any", both.watch())) as inventories:
        following = asyncio.ensure_future(anext(inventories))
        first.sees(gpu(0))
        second.sees(replace(gpu(1), resource=AMD))
        assert ids(await following) == {NVIDIA: ["GPU-0"], AMD: ["GPU-1"]}
        assert both.name == "a+b"
        assert await both.prefer(AMD, PreferredRequest(("GPU-1",), (), 1)) == ("GPU-1",)
        answer = await both.answer(AMD, ContainerRequest(("GPU-1",)), Sayable(frozenset(Field)))
        assert answer.envs == {"AMD_VISIBLE_DEVICES": "GPU-1"}
        assert list(await both.release(["GPU-1"])) == ["GPU-1"]
        assert (first.orders, second.orders) == ([], [("release", ["GPU-1"])])
        assert both.facts(AMD)("GPU-1").index == "1"
        both.adopt(TWICE)
        assert ids(await anext(inventories)) == {NVIDIA: ["GPU-0::0", "GPU-0::1"], AMD: ["GPU-1"]}
        assert both.fate(NVIDIA, "GPU-0") is Fate.WITHDRAWN
        assert both.fate("nobody.has/it", "x") is Fate.LOST


@pytest.mark.parametrize(
    ("rules", "device", "fate"),
    [
        pytest.param((), "/dev/fuse", Fate.WITHDRAWN, id="its rule went while nobody looked"),
        pytest.param((Globbed("example.com/x", ("/dev/no-such",)),), "/dev/no-such", Fate.LOST, id="its file did"),
        pytest.param((), "MIG-unknown", Fate.WITHDRAWN, id="a partition that somebody took away meanwhile"),
        pytest.param((), "GPU-unknown", Fate.LOST, id="what nobody knows counts as lost"),
    ],
)
async def test_of_several_sources_those_count_that_can_tell(
    rules: tuple[Globbed, ...], device: str, fate: Fate, tmp_path: Path
) -> None:
    """As after a restart: no source listed the resource."""
    backend = Backend()
    both = Combined([GPUSource(backend, Policy(), VENDORS), GenericSource(Policy(globbed=rules), tmp_path)])
    async with aclosing(cast("Any", both.watch())) as inventories:
        backend.sees(gpu(0))
        await anext(inventories)
        assert both.fate("example.com/x", device) is fate


async def test_an_answer_follows_whatever_it_rests_on(watched: Watched) -> None:
    async def said() -> dict[str, str]:
        answer = await watched.source.answer(NVIDIA, ContainerRequest(("GPU-0",)), Sayable(frozenset(Field)))
        return dict(answer.envs) | {node.host_path: "node" for node in answer.device_nodes} | dict(answer.annotations)

    by_uuid, by_index = {"NVIDIA_VISIBLE_DEVICES": "GPU-0"}, {"NVIDIA_VISIBLE_DEVICES": "3"}
    await watched.sees(gpu(0))
    assert await said() == await said() == by_uuid
    watched.source.adopt(Policy(id_strategy=IdStrategy.INDEX))
    assert await said() == {"NVIDIA_VISIBLE_DEVICES": "0"}
    await watched.next()
    await watched.sees(gpu(3, uuid="GPU-0"))
    assert await said() == by_index
    watched.source.adopt(Policy(id_strategy=IdStrategy.INDEX, pass_device_specs=True))
    await watched.next()
    await watched.sees(gpu(3, uuid="GPU-0"), control_nodes=("/dev/nvidiactl",))
    assert await said() == by_index | {"/dev/nvidiactl": "node"}


async def test_each_annotation_has_a_key_of_its_own(watched: Watched) -> None:
    watched.source.adopt(Policy(list_strategies=frozenset({ListStrategy.CDI_ANNOTATIONS})))
    await watched.sees(gpu(0))
    asked = ContainerRequest(("GPU-0",)), Sayable(frozenset(Field))
    keys = [key for _ in range(2) for key in (await watched.source.answer(NVIDIA, *asked)).annotations]
    assert len(set(keys)) == len(keys) == 2


async def test_what_is_remembered_of_gpus_that_went_is_bounded(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest are, and one that was seen again is one of these."""
    monkeypatch.setattr(source, "_REMEMBERED", 3)
    for there in ([gpu(0), gpu(1)], [gpu(0), gpu(2)], [gpu(3)]):
        await watched.sees(*there)
    assert [*watched.source._known] == ["GPU-0", "GPU-2", "GPU-3"]
    assert watched.source.fate("old.com/name", "GPU-0") is Fate.WITHDRAWN
    assert watched.source.fate("old.com/name", "GPU-1") is Fate.UNKNOWN


async def test_answers_that_are_remembered_are_bounded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_ANSWERS", 2)
    await watched.sees(*map(gpu, range(5)))
    for number in range(5):
        answer = await watched.source.answer(NVIDIA, ContainerRequest((f"GPU-{number}",)), Sayable(frozenset(Field)))
        assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": f"GPU-{number}"}
        assert len(watched.source._answered) <= 2


@pytest.mark.parametrize(
    ("outcomes", "reasons", "final"),
    [
        pytest.param(["no folder", "no folder", ""], ["no folder"], False, id="none at first"),
        pytest.param(["", ""], [], True, id="what it rests on may change"),
        pytest.param(
            ["", "no libraries", "no libraries", ""], ["no libraries"], True, id="lost later, which ends no process"
        ),
    ],
)
async def test_what_a_specification_rests_on_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[str], reasons: list[str], final: bool
) -> None:
    """A driver's upgrade, or its DRM part that is loaded later: the GPUs stay what they are, and nobody is told of them anew."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def survey(_: Sight, __: Policy) -> NodeTraits:
        reason = outcomes.pop(0)
        if not outcomes:
            monkeypatch.setattr(source, "_CDI_AGAIN", 3600.0)
            loop.call_soon_threadsafe(over.set)
        return NodeTraits(specifications=() if reason else ({"kind": "a/b"},), without_cdi=reason)

    monkeypatch.setattr(source, "_CDI_AGAIN", 0.01)
    strategies = frozenset({ListStrategy.CDI_CRI})
    one = Watched(Policy(list_strategies=strategies, fail_on_init_error=final), survey)
    with capture_logs() as logs:
        await one.sees(gpu(0))
        pending = asyncio.ensure_future(one.next())
        async with asyncio.timeout(10):
            await over.wait()
    assert not pending.done()
    assert [entry["reason"] for entry in logs if entry["event"] == "no CDI specification"] == reasons
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await one.close()


async def test_a_gpu_that_is_released_and_seen_all_the_same_is_there_once(watched: Watched) -> None:
    await watched.sees(gpu(0))
    assert await watched.sees(gpu(0), released=frozenset({"GPU-0"})) == {NVIDIA: ["GPU-0"]}
    assert len(cast("Sight", watched.source._sight).gpus) == 1


async def test_the_backend_is_told_what_the_operator_decides() -> None:
    told: list[Policy] = []
    GPUSource(Backend(), Policy(), tell=told.append).adopt(MIXED)
    assert told == [MIXED]


LOST = Unusable("test", "it is lost", "3", "0000:03:00.0")


@pytest.mark.parametrize(
    ("policy", "gpus", "unusable", "reasons", "held_up"),
    [
        pytest.param(Policy(), [gpu(0)], [LOST], {"3": "it is lost"}, False, id="one of two is lost"),
        pytest.param(Policy(), [], [LOST], {"3": "it is lost"}, True, id="all are lost"),
        pytest.param(
            MIXED, [gpu(0, partitioned=True)], [], {"0": "no MIG instances"}, True, id="MIG without instances"
        ),
        pytest.param(
            MIXED, [gpu(0, partitioned=True), mig(0, 0), gpu(1)], [], {}, False, id="an instance accounts for its GPU"
        ),
        pytest.param(
            Policy(gpu_names=(("A100*", NVIDIA),)), [gpu(0)], [], {"0": "no pattern"}, False, id="left out by a setting"
        ),
    ],
)
async def test_every_gpu_is_accounted_for(
    policy: Policy, gpus: list[GPU], unusable: list[Unusable], reasons: dict[str, str], held_up: bool
) -> None:
    watched = Watched(policy)
    await watched.sees(*gpus, unusable=tuple(unusable))
    found = watched.source.unusable()
    assert [one.index for one in found] == list(reasons)
    assert all(reasons[one.index] in one.reason for one in found)
    hindrances = watched.source.hindrances()
    assert len(hindrances) == sum(not one.excluded for one in found)
    assert any(one.held_up for one in hindrances) is held_up
    await watched.close()


async def test_a_first_look_that_finds_no_usable_gpu_can_be_final(watched: Watched) -> None:
    watched.source.adopt(Policy(fail_on_init_error=True))
    watched.backend.sees(unusable=(LOST,))
    with pytest.raises(GiveUpError, match=r"GPU 3 \(0000:03:00.0\) can't be used: it is lost"):
        await watched.next()


async def test_gpus_that_are_lost_later_end_nothing(watched: Watched) -> None:
    watched.source.adopt(Policy(fail_on_init_error=True))
    await watched.sees(gpu(3))
    assert await watched.sees(unusable=(LOST,)) == {}
    assert [one.held_up for one in watched.source.hindrances()] == [True]


@pytest.mark.parametrize(
    ("gpus", "unusable", "fate"),
    [
        pytest.param([gpu(0)], (), Fate.WITHDRAWN, id="its GPU is whole now"),
        pytest.param([], (), Fate.UNKNOWN, id="no GPU is there"),
        pytest.param([gpu(0)], (LOST,), Fate.UNKNOWN, id="it may be on the GPU that is lost"),
        pytest.param([gpu(0)], (replace(LOST, excluded=True),), Fate.WITHDRAWN, id="another GPU is left out"),
    ],
)
async def test_partitions_of_gpus_that_can_not_be_looked_at_are_not_withdrawn(
    gpus: list[GPU], unusable: tuple[Unusable, ...], fate: Fate
) -> None:
    """They are from before this process, whose first look this is."""
    watched = Watched(MIXED)
    await watched.sees(*gpus, unusable=unusable)
    assert watched.source.fate("nvidia.com/mig-1g.10gb", "MIG-00") is fate
    await watched.close()


UVM = "/dev/nvidia-uvm"


@pytest.mark.parametrize(
    ("policy", "missing", "refused"),
    [
        pytest.param(Policy(pass_device_specs=True), [UVM], UVM, id="device specs"),
        pytest.param(Policy(pass_device_specs=True), ["/dev/nvidia0"], "/dev/nvidia0", id="the GPU's own node"),
        pytest.param(Policy(pass_device_specs=True), ["/dev/nvidia7"], "", id="another GPU's node"),
        pytest.param(Policy(list_strategies=frozenset({ListStrategy.CDI_CRI})), [UVM], UVM, id="CDI"),
        pytest.param(
            Policy(list_strategies=frozenset({ListStrategy.CDI_CRI})), [], "", id="CDI, and nothing is missing"
        ),
        pytest.param(Policy(), [UVM], "", id="the container runtime makes the nodes itself"),
    ],
)
async def test_a_container_without_a_device_node_that_cuda_needs_is_refused(
    policy: Policy, missing: list[str], refused: str
) -> None:
    watched = Watched(policy)
    with capture_logs() as logs:
        for product in ("A", "B"):
            await watched.sees(gpu(0, spec_nodes=("/dev/nvidia0",), product=product), missing=tuple(missing))
    assert [one["nodes"] for one in logs if one["event"] == "device nodes are missing"] == [missing] * bool(missing)
    assert [one.held_up for one in watched.source.hindrances()] == [False] * bool(missing)
    request = watched.source.answer(NVIDIA, ContainerRequest(("GPU-0",)), Sayable(frozenset(Field)))
    if refused:
        with pytest.raises(RefusedError, match=f"{refused} is missing on this node"):
            await request
    else:
        assert (await request).cdi_devices or policy.list_strategies == Policy().list_strategies
    await watched.close()
