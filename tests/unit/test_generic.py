"""Devices described by path globs, over real files: links to the device nodes that every machine has."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from devices import generic
from devices.boards import Place
from devices.combined import Combined
from devices.generic import GenericSource, rule_error
from devices.gpu.backend import Sight
from devices.gpu.model import GPU
from devices.gpu.simulated.backend import VENDORS
from devices.gpu.source import GPUSource
from devices.life.states import State
from devices.model import ContainerRequest, Device, DeviceNode, Fault, Field, PreferredRequest, RefusedError, Sayable
from devices.policy import Globbed, Policy
from devices.source import DeviceSource, Facts, Fate, Inventory, Listing
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.lab.kubelets.kubelet import Kubelet
from gateway.lab.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
GUARD_S = 10
"""How long a test waits for what must come; no promise, only an end to waiting for what never does."""

FPGA, NVIDIA = "example.com/fpga", "nvidia.com/gpu"
RULE = Globbed(FPGA, ("/dev/fpga*",))
NODES = Sayable(frozenset({Field.DEVICE_NODES}))
NULL = Path("/dev/null").stat().st_rdev


def policy(*rules: Globbed) -> Policy:
    return Policy(globbed=rules)


def plug(root: Path, *names: str, target: str = "/dev/null") -> None:
    for name in names:
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)


def ids(inventory: Inventory, resource: str = FPGA) -> list[str]:
    return [device.id for device in inventory[resource].devices]


def opened(source: GenericSource) -> aclosing[Any]:
    return aclosing(cast("Any", source.watch()))


async def following(watch: AsyncIterator[Inventory]) -> Inventory:
    async with asyncio.timeout(GUARD_S):
        return await anext(watch)


async def looked(source: GenericSource) -> Inventory:
    async with opened(source) as watch:
        return await following(watch)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(generic, "POLL_S", 0.01)
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_it_is_a_device_source(root: Path) -> None:
    source: DeviceSource = GenericSource(policy(), root)
    assert source.name == "generic"


# What is a device.


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param(RULE, ["/dev/fpga0", "/dev/fpga1"], id="each file that matches"),
        pytest.param(replace(RULE, paths=("/dev/fpga0", "/dev/f*0")), ["/dev/fpga0"], id="each once"),
        pytest.param(
            replace(RULE, paths=("/dev/fpga0",), count=3),
            ["/dev/fpga0::0", "/dev/fpga0::1", "/dev/fpga0::2"],
            id="each so many times",
        ),
        pytest.param(replace(RULE, paths=("/dev/ib/*",)), ["/dev/ib/rdma_cm", "/dev/ib/uverbs0"], id="in a folder"),
        pytest.param(
            replace(RULE, paths=("/dev/ib/*",), shared=("/dev/ib/rdma_cm",)),
            ["/dev/ib/uverbs0"],
            id="what all share is no device",
        ),
        pytest.param(replace(RULE, paths=("/dev/ib",)), ["/dev/ib"], id="a folder that is named"),
        pytest.param(replace(RULE, paths=("/dev/i*",)), [], id="a folder that only matches is none"),
        pytest.param(replace(RULE, paths=("/dev/text",)), [], id="an ordinary file is none"),
        pytest.param(replace(RULE, paths=("/dev/broken",)), [], id="a link to nowhere is none"),
        pytest.param(replace(RULE, paths=("/dev/odd*",)), [], id="a name that would not be an ID is none"),
        pytest.param(replace(RULE, paths=("/dev/none*",)), [], id="no file at all"),
    ],
)
async def test_devices(root: Path, rule: Globbed, expected: list[str]) -> None:
    plug(root, "fpga1", "fpga0", "ib/uverbs0", "ib/rdma_cm", "odd::1", "odd\x1b[2J", ".fpga7")
    plug(root, "broken", target="/nowhere")
    (root / "dev" / "text").write_text("text")
    assert ids(await looked(GenericSource(policy(rule), root))) == expected


async def test_so_many_devices_and_no_more(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic, "MOST_FILES", 3)
    monkeypatch.setattr(generic, "MOST_DEVICES", 8)
    plug(root, *(f"fpga{number}" for number in range(9)))
    seen = await looked(
        GenericSource(policy(RULE, Globbed("example.com/many", ("/dev/fpga*",), count=4)), root),
    )
    assert ids(seen) == ["/dev/fpga0", "/dev/fpga1", "/dev/fpga2"]
    assert Counter(one.partition("::")[0] for one in ids(seen, "example.com/many")) == {
        "/dev/fpga0": 4,
        "/dev/fpga1": 4,
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("1\n", (1,), id="a node"),
        pytest.param("0\n", (0,), id="the first one"),
        pytest.param("-1\n", (), id="no known one"),
        pytest.param("99999\n", (), id="one that can't be"),
        pytest.param("nonsense", (), id="nonsense"),
        pytest.param(None, (), id="nothing"),
    ],
)
async def test_numa_node(root: Path, content: str | None, expected: tuple[int, ...]) -> None:
    plug(root, "fpga0")
    device = root / "sys/dev/char" / f"{os.major(NULL)}:{os.minor(NULL)}" / "device"
    device.mkdir(parents=True)
    if content is not None:
        (device / "numa_node").write_text(content)
    [found] = (await looked(GenericSource(policy(RULE), root)))[FPGA].devices
    assert found.numa_nodes == expected


async def test_what_every_container_needs_must_be_there(root: Path) -> None:
    plug(root, "fpga0")
    async with opened(GenericSource(policy(replace(RULE, shared=("/dev/control*",))), root)) as watch:
        ill = (await following(watch))[FPGA]
        assert "needs /dev/control*" in ill.troubles["/dev/fpga0"].reason
        plug(root, "control0")
        assert (await following(watch))[FPGA].troubles == {}


# What changes.


async def test_files_come_and_go(root: Path) -> None:
    source = GenericSource(policy(RULE), root)
    async with opened(source) as watch:
        assert ids(await following(watch)) == []
        plug(root, "fpga0", "fpga1")
        while len(seen := ids(await following(watch))) < 2:
            pass
        assert seen == ["/dev/fpga0", "/dev/fpga1"]
        (root / "dev" / "fpga0").unlink()
        assert ids(await following(watch)) == ["/dev/fpga1"]
        assert source.fate(FPGA, "/dev/fpga0") is Fate.LOST


async def test_rules_change_at_run_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and only where something changed."""
    monkeypatch.setattr(generic, "POLL_S", 3600.0)
    plug(root, "fpga0", "nic0")
    nic = Globbed("example.com/nic", ("/dev/nic*",))
    source = GenericSource(policy(RULE), root)
    async with opened(source) as watch:
        assert set(await following(watch)) == {FPGA}
        pending = asyncio.ensure_future(following(watch))
        source.adopt(policy(replace(RULE, permissions="r")))
        source.adopt(policy(RULE, nic))
        assert set(await pending) == {FPGA, "example.com/nic"}
        source.adopt(policy(nic))
        assert set(await following(watch)) == {"example.com/nic"}
        assert source.fate(FPGA, "/dev/fpga0") is Fate.WITHDRAWN


async def test_the_same_again_is_not_yielded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, several = asyncio.get_running_loop(), asyncio.Event()
    looks = iter(range(3))
    look = generic._look

    def counted(*arguments: Any) -> Inventory:
        if next(looks, None) is None:
            loop.call_soon_threadsafe(several.set)
        return look(*arguments)

    monkeypatch.setattr(generic, "_look", counted)
    plug(root, "fpga0")
    async with opened(GenericSource(policy(RULE), root)) as watch:
        await following(watch)
        pending = asyncio.ensure_future(following(watch))
        async with asyncio.timeout(GUARD_S):
            await several.wait()
        assert not pending.done()
        plug(root, "fpga1")
        assert ids(await pending) == ["/dev/fpga0", "/dev/fpga1"]


@pytest.mark.parametrize(
    ("rules", "device_id", "expected"),
    [
        pytest.param([RULE], "/dev/fpga7", Fate.LOST, id="its file vanished"),
        pytest.param([], "/dev/fpga7", Fate.WITHDRAWN, id="no rule has its name any more"),
        pytest.param([RULE], "/dev/nic0", Fate.WITHDRAWN, id="the rule's paths are others now"),
        pytest.param([RULE], "/dev/fpga7::0", Fate.WITHDRAWN, id="it is no longer offered several times"),
        pytest.param([replace(RULE, count=2)], "/dev/fpga7", Fate.WITHDRAWN, id="it is offered several times now"),
        pytest.param([replace(RULE, count=2)], "/dev/fpga7::1", Fate.LOST, id="one of several, its file vanished"),
        pytest.param([replace(RULE, count=2)], "/dev/fpga7::2", Fate.WITHDRAWN, id="one more than it is offered now"),
        pytest.param([replace(RULE, count=2)], "/dev/fpga7::x", Fate.WITHDRAWN, id="no number"),
        pytest.param([replace(RULE, shared=("/dev/fpga7",))], "/dev/fpga7", Fate.WITHDRAWN, id="shared now"),
        pytest.param([], "GPU-1", Fate.UNKNOWN, id="a device that never was one of these"),
    ],
)
def test_fate(root: Path, rules: list[Globbed], device_id: str, expected: Fate) -> None:
    assert GenericSource(policy(*rules), root).fate(FPGA, device_id) is expected


@pytest.mark.parametrize(
    ("device_id", "place"), [("/dev/fuse::3", Place("/dev/fuse")), ("/dev/none", Place("/dev/none")), ("GPU-1", None)]
)
def test_a_file_is_the_same_hardware_under_each_rule(root: Path, device_id: str, place: Place | None) -> None:
    """Also under a rule that isn't there any more: a container may hold it still."""
    assert GenericSource(Policy(), root).place(device_id) == place


def test_a_device_tells_its_node_and_an_unknown_one_nothing(root: Path) -> None:
    source = GenericSource(policy(replace(RULE, count=2)), root)
    assert source.facts(FPGA)("/dev/fpga0::1") == Facts(nodes=("/dev/fpga0",))
    assert source.facts(FPGA)("/dev/fpga0::2") == source.facts("a.b/c")("/dev/fpga0::1") == Facts()


async def test_nothing_is_held_open(root: Path) -> None:
    plug(root, "fpga0")
    source = GenericSource(policy(RULE), root)
    await looked(source)
    assert (list(await source.release(["/dev/fpga0"])), list(await source.acquire([]))) == ([], [])


# What a container gets.


@pytest.mark.parametrize(
    ("rule", "asked", "expected"),
    [
        pytest.param(RULE, ["/dev/fpga1", "/dev/fpga0"], ["/dev/fpga0", "/dev/fpga1"], id="its files, in order"),
        pytest.param(replace(RULE, count=2), ["/dev/fpga0::1", "/dev/fpga0::0"], ["/dev/fpga0"], id="each once"),
        pytest.param(
            replace(RULE, shared=("/dev/control*", "/dev/lacks")),
            ["/dev/fpga0"],
            ["/dev/fpga0", "/dev/control0", "/dev/control1"],
            id="and what all share",
        ),
        pytest.param(RULE, ["/dev/fpga9"], ["/dev/fpga9"], id="one that was not looked for yet"),
    ],
)
async def test_answer(root: Path, rule: Globbed, asked: list[str], expected: list[str]) -> None:
    plug(root, "fpga0", "fpga1", "control1", "control0")
    source = GenericSource(policy(replace(rule, permissions="rm")), root)
    answer = await source.answer(FPGA, ContainerRequest(tuple(asked)), NODES)
    assert answer.device_nodes == tuple(DeviceNode(path, path, "rm") for path in expected)
    assert (answer.envs, answer.mounts, answer.annotations, answer.cdi_devices) == ({}, (), {}, ())


@pytest.mark.parametrize(
    ("rules", "sayable", "says"),
    [
        pytest.param([RULE], Sayable(frozenset({Field.ENVS})), "device nodes, which can't be said", id="unsayable"),
        pytest.param(
            [RULE], Sayable(frozenset(), frozenset({Field.DEVICE_NODES})), "can't be said for certain", id="unsure"
        ),
        pytest.param([], NODES, "put the rule back", id="no rule any more"),
        pytest.param([replace(RULE, count=2)], NODES, "put the rule back", id="another rule now"),
    ],
)
async def test_a_half_answer_is_refused(root: Path, rules: list[Globbed], sayable: Sayable, says: str) -> None:
    plug(root, "fpga0")
    source = GenericSource(policy(*rules), root)
    with pytest.raises(RefusedError, match=says) as refused:
        await source.answer(FPGA, ContainerRequest(("/dev/fpga0",)), sayable)
    assert refused.value.fault is Fault.FAILED_PRECONDITION


# Which ones a container gets.


def known(places: dict[str, int | None], count: int = 1) -> dict[str, Device]:
    return {
        device_id: Device(device_id, numa_nodes=() if node is None else (node,))
        for path, node in places.items()
        for device_id in ([path] if count == 1 else [f"{path}::{number}" for number in range(count)])
    }


FOUR: dict[str, int | None] = {"a": 0, "b": 1, "c": 1, "d": None}


@pytest.mark.parametrize(
    ("devices", "available", "must", "size", "expected"),
    [
        pytest.param(known(FOUR), "a b c d", "", 2, "b c", id="on one NUMA node"),
        pytest.param(known(FOUR), "a b c d", "a", 2, "a d", id="what must be included is"),
        pytest.param(known(FOUR), "a b c d", "c", 2, "b c", id="where the container is anyway"),
        pytest.param(
            known({"a": 0, "b": 1, "c": 1, "d": 1}), "a b c d", "b", 2, "b c", id="though another has just enough"
        ),
        pytest.param(known(FOUR), "a b d", "", 1, "d", id="the node that has just enough, the first of equals"),
        pytest.param(known(FOUR), "a b c d", "", 4, "a b c d", id="all"),
        pytest.param(known(FOUR), "a x b", "", 2, "a b", id="one that isn't there comes last"),
        pytest.param(known(FOUR), "a x", "", 2, "a x", id="unless there is no other"),
        pytest.param(known({"a": 0, "b": 0}, 3), "a::0 a::1 b::0", "", 2, "a::0 b::0", id="of two files"),
        pytest.param(known({"a": 0, "b": 0}, 3), "a::0 a::1 b::0", "a::0", 2, "a::0 b::0", id="the other file"),
        pytest.param(known({"a": 0, "b": 0}, 3), "a::0 b::1 b::2", "", 1, "b::1", id="of the least used file"),
        pytest.param(known({"a": 0, "b": 1}, 3), "a::0 a::1 b::0", "", 2, "a::0 a::1", id="nearness before spread"),
        pytest.param(known({"a": 0}, 12), "a::10 a::2 a::9", "", 2, "a::2 a::9", id="by number"),
    ],
)
def test_prefer(devices: dict[str, Device], available: str, must: str, size: int, expected: str) -> None:
    request = PreferredRequest(tuple(available.split()), tuple(must.split()), size)
    assert generic._preferred(request, Listing(tuple(devices.values()))) == tuple(expected.split())


@pytest.mark.parametrize(
    ("available", "must", "size"),
    [
        pytest.param("a b", "", 0, id="none"),
        pytest.param("a b", "", 3, id="more than there are"),
        pytest.param("a b", "a b", 1, id="fewer than must be"),
        pytest.param("a b", "c", 1, id="one that isn't available"),
        pytest.param("a a", "", 2, id="one twice"),
    ],
)
async def test_no_such_choice(root: Path, available: str, must: str, size: int) -> None:
    request = PreferredRequest(tuple(available.split()), tuple(must.split()), size)
    with pytest.raises(RefusedError) as refused:
        await GenericSource(policy(RULE), root).prefer(FPGA, request)
    assert refused.value.fault is Fault.INVALID_ARGUMENT


async def test_it_chooses_by_what_it_saw(root: Path) -> None:
    plug(root, "fpga1", "fpga2", "fpga3", target="/dev/null")
    source = GenericSource(policy(RULE), root)
    await looked(source)
    request = PreferredRequest(("/dev/fpga0", "/dev/fpga2", "/dev/fpga1"), (), 2)
    assert await source.prefer(FPGA, request) == ("/dev/fpga1", "/dev/fpga2")


@pytest.mark.parametrize(("count", "at_once"), [(500, True), (501, False)])
async def test_a_choice_among_many_devices_holds_up_nobody(
    root: Path, monkeypatch: pytest.MonkeyPatch, count: int, at_once: bool
) -> None:
    where: list[bool] = []
    preferred = generic._preferred

    def noted(request: PreferredRequest, seen: Listing | None) -> tuple[str, ...]:
        where.append(threading.current_thread() is threading.main_thread())
        return preferred(request, seen)

    monkeypatch.setattr(generic, "_preferred", noted)
    plug(root, "fpga0", "fpga1")
    source = GenericSource(policy(replace(RULE, count=count)), root)
    available = tuple(ids(await looked(source)))
    assert await source.prefer(FPGA, PreferredRequest(available, (), 2)) == ("/dev/fpga0::0", "/dev/fpga1::0")
    assert where == [at_once]


def nodes(choice: Any, devices: dict[str, Device]) -> int:
    return len({devices[one].numa_nodes for one in choice})


@given(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=7), st.integers(1, 2), st.data())
def test_no_other_choice_is_on_fewer_numa_nodes(places: list[int | None], count: int, data: st.DataObject) -> None:
    devices = known({f"f{number}": place for number, place in enumerate(places)}, count)
    available = data.draw(st.lists(st.sampled_from(sorted(devices)), min_size=1, max_size=8, unique=True))
    must = data.draw(st.lists(st.sampled_from(available), max_size=3, unique=True))
    size = data.draw(st.integers(max(1, len(must)), len(available)))
    seen = Listing(tuple(devices.values()))
    chosen = generic._preferred(PreferredRequest(tuple(available), tuple(must), size), seen)
    again = generic._preferred(PreferredRequest(tuple(reversed(available)), tuple(must), size), seen)
    assert (len(set(chosen)), set(must) <= set(chosen) <= set(available), again) == (size, True, chosen)
    others = (one for one in combinations(available, size) if set(must) <= set(one))
    assert nodes(chosen, devices) == min(nodes(one, devices) for one in others)


# All of it.


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.37"])
async def test_a_pod_gets_devices_from_an_emulated_kubelet(root: Path, folder: Path, version: str) -> None:
    """A file that vanishes takes what it offers out of the kubelet's records, and back when it is there again."""
    plug(root, "fpga0", "fpga1", "control")
    rule = replace(RULE, shared=("/dev/control",), count=2, permissions="rm")
    (folder / "dp").mkdir()
    settings = Settings(socket_dir=folder / "dp", state_dir=folder / "state")
    gateway = Gateway(settings, GenericSource(policy(rule), root))
    run = asyncio.ensure_future(gateway.run())
    try:
        async with await Kubelet.launch(version, folder / "dp") as kubelet:
            await kubelet.start()
            await kubelet.wait(FPGA, 4)
            given = await kubelet.admit("a", FPGA, 3)
            (root / "dev" / "fpga1").unlink()
            await kubelet.wait(FPGA, 2)
            plug(root, "fpga1")
            await kubelet.wait(FPGA, 4)
    finally:
        gateway._end(0)
        await run
    assert {(node.host_path, node.permissions) for node in given.answer.device_nodes} == {
        ("/dev/control", "rm"),
        ("/dev/fpga0", "rm"),
        ("/dev/fpga1", "rm"),
    }


class Nvml:
    """NVIDIA's GPUs, which are seen when a test says so."""

    name = "nvidia"
    hindrance = ""

    def __init__(self, seen: bool) -> None:
        self.seen = asyncio.Event()
        if seen:
            self.seen.set()

    async def watch(self) -> AsyncGenerator[Sight]:
        await self.seen.wait()
        yield Sight((GPU("GPU-a", 0, 0, resource=NVIDIA), GPU("GPU-b", 1, 1, resource=NVIDIA)))
        await asyncio.get_running_loop().create_future()

    async def release(self, uuids: Collection[str]) -> None:
        pass

    async def acquire(self, uuids: Collection[str]) -> None:
        pass


@asynccontextmanager
async def running(folder: Path, source: DeviceSource) -> AsyncIterator[Gateway]:
    gateway = Gateway(Settings(socket_dir=folder / "dp", state_dir=folder / "state"), source)
    run = asyncio.ensure_future(gateway.run())
    try:
        yield gateway
    finally:
        gateway._end(0)
        await run


@pytest.mark.parametrize("version", ["1.8", "1.37"])
async def test_files_beside_a_silent_nvml_are_given_as_files_and_gpus_as_gpus(
    root: Path, folder: Path, version: str
) -> None:
    """Over restarts of the gateway, with NVML away in the second: what the ledger remembers goes to its own source."""
    plug(root, "fpga0", "fpga1")
    (folder / "dp").mkdir()

    def source(*, nvml: bool) -> tuple[Nvml, Combined]:
        backend, rules = Nvml(nvml), policy(RULE)
        return backend, Combined([GPUSource(backend, rules, VENDORS), GenericSource(rules, root)])

    async with await Kubelet.launch(version, folder / "dp") as kubelet:
        await kubelet.start()
        async with running(folder, source(nvml=True)[1]):
            await kubelet.wait(FPGA, 2)
            await kubelet.wait(NVIDIA, 2)
        backend, both = source(nvml=False)
        async with running(folder, both) as gateway:
            await kubelet.wait(FPGA, 2)
            await kubelet.wait(NVIDIA, 2)
            states = {plugin.name: {one.state for one in plugin.entries.values()} for plugin in gateway.resources}
            assert states == {NVIDIA: {State.NOT_LOOKED_YET}, FPGA: {State.PRESENT}}
            file, gpu = await kubelet.admit("file", FPGA, 1), await kubelet.admit("gpu", NVIDIA, 1)
            (root / "dev" / "fpga1").unlink()
            await kubelet.wait(FPGA, 1)
            backend.seen.set()
            await until(lambda: not gateway.hindrances(), GUARD_S)
            await kubelet.wait(NVIDIA, 2)
    assert [node.host_path[:9] for node in file.answer.device_nodes] == ["/dev/fpga"]
    assert (dict(file.answer.envs), [*gpu.answer.envs]) == ({}, ["NVIDIA_VISIBLE_DEVICES"])
    assert gpu.answer.envs["NVIDIA_VISIBLE_DEVICES"] in {"GPU-a", "GPU-b"}


# Rules.


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        pytest.param(RULE, None, id="a rule"),
        pytest.param(replace(RULE, shared=("/dev/a",), count=1000, permissions="mrw"), None, id="all of it"),
        pytest.param(replace(RULE, resource="fpga"), "with a domain", id="no resource name"),
        pytest.param(replace(RULE, resource="taken.com/x"), "one rule for taken.com/x, got two", id="twice"),
        pytest.param(replace(RULE, paths=()), "1 to 32 paths", id="no path"),
        pytest.param(replace(RULE, paths=("/dev/a",) * 33), "got 33", id="too many paths"),
        pytest.param(replace(RULE, paths=("dev/a",)), "below /dev", id="a relative path"),
        pytest.param(replace(RULE, paths=("/etc/*",)), "below /dev", id="elsewhere"),
        pytest.param(replace(RULE, paths=("/dev/../etc/*",)), "below /dev", id="elsewhere in disguise"),
        pytest.param(replace(RULE, paths=("/dev/",)), "below /dev", id="/dev itself"),
        pytest.param(replace(RULE, paths=("/dev/**/a",)), "'**'", id="all folders"),
        pytest.param(replace(RULE, shared=("/etc/shadow",)), "below /dev", id="a shared file elsewhere"),
        pytest.param(replace(RULE, paths=("/dev/a\n",)), "below /dev", id="two lines"),
        pytest.param(replace(RULE, paths=("/dev/" + "a" * 240,)), "at most 240", id="too long"),
        pytest.param(replace(RULE, count=0), "count of 1 to 1000", id="not even once"),
        pytest.param(replace(RULE, count=1001), "count of 1 to 1000", id="too often"),
        pytest.param(replace(RULE, permissions=""), "permissions", id="no permission"),
        pytest.param(replace(RULE, permissions="rx"), "got 'rx'", id="no such permission"),
        pytest.param(replace(RULE, permissions="rr"), "got 'rr'", id="a permission twice"),
    ],
)
def test_rule(rule: Globbed, says: str | None) -> None:
    found = rule_error(rule, {"taken.com/x"})
    assert found is None if says is None else says in (found or "")


def test_the_page_has_rules() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    rules = [msgspec.convert(one, Globbed) for one in yaml.safe_load(text)["gateway"]["devices"]]
    assert len(rules) == 3
    assert [rule_error(rule) for rule in rules] == [None] * 3
