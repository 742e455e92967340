"""The simulated backend over real files: whatever way a person or a program edits a profile, the inventory follows."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from devices import files
from devices.gpu.simulated import backend as simulated
from devices.gpu.simulated import profile
from devices.gpu.simulated.backend import VENDORS, SimulatedBackend
from devices.gpu.simulated.document import ProfileError
from devices.gpu.source import GPUSource
from devices.model import ContainerRequest, Fault, Field, Health, PreferredRequest, RefusedError, Sayable, Trouble
from devices.policy import Policy
from devices.source import DeviceSource, Fate, Inventory

GUARD_S = 30
"""How long a test waits for what must come; no promise, only an end to waiting for what never does."""

NAME = "nvidia.com/gpu"
Log = asyncio.Queue[MutableMapping[str, Any]]


def text(count: int, ill: str = "") -> str:
    return f"resources:\n  {NAME}:\n    gpus: {count}\n    unhealthy: {{{ill}}}\n"


def shape(inventory: Inventory) -> str:
    """Show an inventory as one character for each GPU: ``o`` well, ``x`` ill."""
    return "".join("o" if device.health is Health.HEALTHY else "x" for device in inventory[NAME].devices)


async def following(watch: AsyncIterator[Inventory]) -> str:
    """The shape of the next inventory."""
    async with asyncio.timeout(GUARD_S):
        return shape(await anext(watch))


async def logged(log: Log) -> MutableMapping[str, Any]:
    """The next thing that is logged."""
    async with asyncio.timeout(GUARD_S):
        return await log.get()


def inotify_descriptors() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += "inotify" in str(entry.readlink())
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return found


@pytest.fixture
def log() -> Iterator[Log]:
    """What is logged, to be awaited."""
    queue: Log = asyncio.Queue()

    def keep(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        queue.put_nowait(event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[keep])
    yield queue
    structlog.configure(**before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "node" / "profile.yaml"
    path.parent.mkdir()
    path.write_text(text(2))
    return path


@pytest.fixture
def source(path: Path) -> GPUSource:
    return over(str(path))


@pytest.fixture
async def watch(
    source: GPUSource, log: Log, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncIterator[Inventory]]:
    """A watch that has seen two well GPUs, and hears of changes from inotify alone."""
    monkeypatch.setattr(files, "_POLL_S", 3600.0)
    monkeypatch.setattr(files, "_POLL_ALONE_S", 0.01)
    async with opened(source) as watch:
        assert await following(watch) == "oo"
        assert (await logged(log))["event"] == "profile read"
        yield watch
    assert inotify_descriptors() == 0


def over(profile: str = "default") -> GPUSource:
    return GPUSource(SimulatedBackend(profile), Policy(), VENDORS)


def opened(source: GPUSource) -> aclosing[Any]:
    return aclosing(cast("Any", source.watch()))


def deleted(path: Path) -> None:
    path.unlink()


def in_place(path: Path, content: str) -> None:
    path.write_text(content)


def appended(path: Path, content: str) -> None:
    path.write_text(content[:20])
    with path.open("a") as file:
        file.write(content[20:])


def renamed_over(path: Path, content: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(content)
    new.replace(path)


def backed_up(path: Path, content: str) -> None:
    path.rename(path.with_suffix(".yaml~"))
    path.write_text(content)


def deleted_and_written(path: Path, content: str) -> None:
    path.unlink()
    path.write_text(content)


def swapped_link(path: Path, content: str) -> None:
    """As the kubelet updates a mounted ConfigMap: the file is a link through a link that is swapped."""
    version = path.parent / f"..{len(list(path.parent.iterdir()))}"
    version.mkdir()
    (version / path.name).write_text(content)
    (path.parent / "..data_tmp").symlink_to(version.name)
    (path.parent / "..data_tmp").replace(path.parent / "..data")
    if not path.is_symlink():
        path.unlink()
        path.symlink_to(f"..data/{path.name}")


@pytest.mark.parametrize(
    "edit",
    [in_place, appended, renamed_over, backed_up, deleted_and_written, swapped_link],
    ids=lambda edit: edit.__name__,
)
async def test_each_way_of_editing_is_followed(
    edit: Callable[[Path, str], None], path: Path, watch: AsyncIterator[Inventory]
) -> None:
    for content, seen in [(text(2, "1: hot"), "ox"), (text(2), "oo"), (text(3), "ooo"), (text(1), "o")]:
        edit(path, content)
        assert await following(watch) == seen


async def test_an_edit_between_two_looks_is_not_missed(path: Path, watch: AsyncIterator[Inventory]) -> None:
    in_place(path, text(5))
    in_place(path, text(4))
    assert await following(watch) == "oooo"


async def test_reasons_come_along(path: Path, watch: AsyncIterator[Inventory]) -> None:
    in_place(path, text(2, "1: fell off the bus"))
    listing = (await anext(watch))[NAME]
    assert listing.troubles == {listing.devices[1].id: Trouble("fell off the bus")}


NONE = frozenset[int]()


@pytest.mark.parametrize(
    ("beneath", "seen", "recovered", "released"),
    [
        pytest.param("unhealthy: {1: {reason: hot, kind: application}}", "ooo", NONE, NONE, id="not ill"),
        pytest.param("unhealthy: {1: {reason: hot, kind: reset-required}}", "oxo", NONE, NONE, id="ill"),
        pytest.param("recovered: [1]", "ooo", {1}, NONE, id="reset"),
        pytest.param("released: [2]", "ooo", NONE, {2}, id="released"),
        pytest.param("withdrawn: [1]", "oo", NONE, NONE, id="withdrawn"),
    ],
)
async def test_what_else_an_edit_can_say(
    beneath: str, seen: str, recovered: set[int], released: set[int], path: Path, watch: AsyncIterator[Inventory]
) -> None:
    in_place(path, text(3))
    ids = [device.id for device in (await anext(watch))[NAME].devices]
    in_place(path, f"resources:\n  {NAME}:\n    gpus: 3\n    {beneath}\n")
    inventory = await anext(watch)
    assert shape(inventory) == seen
    assert inventory[NAME].recovered == {ids[index] for index in recovered}
    assert inventory[NAME].released == {ids[index] for index in released}


@pytest.mark.parametrize(
    ("content", "fate"),
    [
        pytest.param(text(1), Fate.LOST, id="no longer covered by gpus: lost"),
        pytest.param(f"resources: {{{NAME}: {{gpus: 2, withdrawn: [1]}}}}", Fate.WITHDRAWN, id="withdrawn"),
        pytest.param(f"resources: {{{NAME}: {{gpus: 2, withdrawn: [0]}}}}", Fate.LOST, id="another is withdrawn"),
        pytest.param("resources: {a.com/b: {gpus: 2}}", Fate.WITHDRAWN, id="its resource is gone"),
        pytest.param("resources: [", Fate.LOST, id="a wrong profile withdraws nothing"),
    ],
)
async def test_what_became_of_a_gpu(content: str, fate: Fate, path: Path, log: Log) -> None:
    source = over(str(path))
    async with opened(source) as watch:
        gone = (await anext(watch))[NAME].devices[1].id
        assert (await logged(log))["event"] == "profile read"
        following = asyncio.create_task(anext(watch))
        in_place(path, content)
        assert (await logged(log))["event"] in {"profile read", "profile rejected"}
        assert source.fate(NAME, gone) is fate
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_lost_gpu_can_be_withdrawn_afterwards(path: Path) -> None:
    """The inventory stays the same, and is told again: what it means has changed."""
    source = over(str(path))
    async with opened(source) as watch:
        gone = (await anext(watch))[NAME].devices[1].id
        in_place(path, text(1))
        lost = await anext(watch)
        assert source.fate(NAME, gone) is Fate.LOST
        in_place(path, f"resources: {{{NAME}: {{gpus: 2, withdrawn: [1]}}}}")
        assert await anext(watch) == lost
        assert source.fate(NAME, gone) is Fate.WITHDRAWN


async def test_a_second_watch_tells_at_once_what_is_known(path: Path) -> None:
    source = over(str(path))
    for _ in range(2):
        async with opened(source) as watch:
            assert await following(watch) == "oo"


def test_before_the_first_look_nothing_is_withdrawn(path: Path) -> None:
    assert over(str(path)).fate(NAME, "any") is Fate.UNKNOWN


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("resources: [", "expected YAML"),
        (text(2, "7: hot"), "line 4: resources['nvidia.com/gpu'].unhealthy[7]: expected the index (0 to 1)"),
        ("", "got an empty file"),
    ],
)
async def test_a_wrong_edit_is_logged_and_changes_nothing(
    content: str, reason: str, path: Path, source: GPUSource, watch: AsyncIterator[Inventory], log: Log
) -> None:
    pending = asyncio.create_task(following(watch))
    in_place(path, content)
    rejected = await logged(log)
    assert rejected["event"] == "profile rejected"
    assert rejected["reason"].startswith(str(path))
    assert reason in rejected["reason"]
    assert rejected["kept"] == {NAME: 2}
    assert not pending.done()
    [hindrance] = source.hindrances()
    assert hindrance.source == "simulated"
    assert (
        hindrance.reason
        == f"profile rejected, until it is corrected the one before stays in force: {rejected['reason']}"
    )
    assert not hindrance.held_up
    in_place(path, text(1))
    assert await pending == "o"
    assert source.hindrances() == ()


async def test_a_deleted_profile_is_logged_and_its_return_is_seen(
    path: Path, watch: AsyncIterator[Inventory], log: Log
) -> None:
    pending = asyncio.create_task(following(watch))
    deleted(path)
    rejected = await logged(log)
    assert (rejected["event"], rejected["kept"]) == ("profile rejected", {NAME: 2})
    assert "No such file" in rejected["reason"]
    in_place(path, text(2))
    assert (await logged(log))["event"] == "profile read"
    assert not pending.done()
    in_place(path, text(2, "0: hot"))
    assert await pending == "xo"


async def test_an_edit_that_means_the_same_is_not_a_change(
    path: Path, watch: AsyncIterator[Inventory], log: Log
) -> None:
    pending = asyncio.create_task(following(watch))
    in_place(path, "# a remark\n" + text(2))
    assert (await logged(log))["event"] == "profile read"
    assert not pending.done()
    in_place(path, text(0))
    assert await pending == ""


async def test_other_files_of_the_folder_do_not_matter(path: Path, watch: AsyncIterator[Inventory], log: Log) -> None:
    in_place(path.with_name("another.yaml"), text(7))
    in_place(path, text(1))
    assert await following(watch) == "o"
    assert (await logged(log))["gpus"] == {NAME: 1}
    assert log.empty()


async def test_a_profile_that_is_wrong_at_first_yields_nothing_until_it_is_right(path: Path, log: Log) -> None:
    in_place(path, "resources: 8")
    async with opened(over(str(path))) as watch:
        first = asyncio.create_task(following(watch))
        assert (await logged(log))["event"] == "profile rejected"
        in_place(path, text(1))
        assert await first == "o"


async def test_the_folder_may_be_replaced(path: Path, watch: AsyncIterator[Inventory], log: Log) -> None:
    pending = asyncio.create_task(following(watch))
    shutil.rmtree(path.parent)
    while (await logged(log))["event"] != "file watched by polling":
        pass
    path.parent.mkdir()
    in_place(path, text(3))
    assert await pending == "ooo"
    in_place(path, text(1))
    assert await following(watch) == "o"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ENOSYS])
async def test_without_inotify_it_polls_and_says_so_once(
    number: int, path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "INotify", refuse)
    monkeypatch.setattr(files, "_POLL_ALONE_S", 0.01)
    async with opened(over(str(path))) as watch:
        await anext(watch)
        for count in (3, 4, 5):
            renamed_over(path, text(count))
            assert await following(watch) == "o" * count
    events = [log.get_nowait()["event"] for _ in range(log.qsize())]
    assert events == ["file watched by polling", *["profile read"] * 4]


async def test_what_inotify_does_not_tell_is_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_POLL_S", 0.01)
    target = tmp_path / "elsewhere" / "target.yaml"
    target.parent.mkdir()
    target.write_text(text(1))
    link = tmp_path / "profile.yaml"
    link.symlink_to(target)
    async with opened(over(str(link))) as watch:
        assert await following(watch) == "o"
        renamed_over(target, text(2))
        assert await following(watch) == "oo"


@pytest.mark.parametrize("end", ["cancelled", "closed"])
async def test_the_end_of_the_watch_leaves_no_descriptor(end: str, path: Path) -> None:
    watch = cast("Any", over(str(path)).watch())
    await anext(watch)
    assert inotify_descriptors() == 1
    if end == "cancelled":
        pending = asyncio.create_task(following(watch))
        await asyncio.sleep(0)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
    else:
        await watch.aclose()
    assert inotify_descriptors() == 0


async def test_a_shipped_profile_is_not_watched() -> None:
    async with opened(over()) as watch:
        assert await following(watch) == "oooooooo"
        pending = asyncio.create_task(following(watch))
        await asyncio.sleep(0)
        assert not pending.done()
        assert inotify_descriptors() == 0
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending


def test_an_unknown_profile_is_refused_at_once() -> None:
    with pytest.raises(ProfileError, match="or the name of a shipped one"):
        over("unknown")


async def test_it_answers_as_a_device_source() -> None:
    source: DeviceSource = over("two-resources")
    assert source.name == "simulated"
    async with aclosing(cast("Any", source.watch())) as watch:
        inventory = await anext(watch)
    ids = [device.id for device in inventory[NAME].devices]
    assert {resource: len(listing.devices) for resource, listing in inventory.items()} == {NAME: 4, "amd.com/gpu": 2}

    chosen = await source.prefer(NAME, PreferredRequest(tuple(ids[1:]), (), 2))
    assert chosen == (ids[2], ids[3])
    answer = await source.answer(NAME, ContainerRequest(chosen[::-1]), Sayable(frozenset({Field.ENVS})))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": f"{ids[2]},{ids[3]}"}
    await source.prepare(NAME, chosen)
    with pytest.raises(RefusedError, match="isn't: repair it") as refused:
        await source.prepare(NAME, (ids[0], "GPU-that-is-gone"))
    assert refused.value.fault is Fault.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("profile", "resource", "available", "size", "chosen"),
    [
        pytest.param("default", NAME, range(3, 8), 2, [4, 5], id="default: on one NUMA node"),
        pytest.param("hives", "amd.com/gpu", range(2, 8), 3, [4, 5, 6], id="hives: linked"),
        pytest.param("partitions", "amd.com/gpu", range(1, 64), 7, [*range(1, 8)], id="partitions: of the fullest GPU"),
    ],
)
async def test_what_it_prefers(profile: str, resource: str, available: range, size: int, chosen: list[int]) -> None:
    source = over(profile)
    async with opened(source) as watch:
        ids = [device.id for device in (await anext(watch))[resource].devices]
    found = await source.prefer(resource, PreferredRequest(tuple(ids[index] for index in available), (), size))
    assert [ids.index(one) for one in found] == chosen


async def test_before_the_first_look_it_answers_for_what_was_announced() -> None:
    source = over()
    assert await source.prefer(NAME, PreferredRequest(("b", "a"), (), 1)) == ("a",)
    answer = await source.answer(NAME, ContainerRequest(("b", "a")), Sayable(frozenset(Field)))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "a,b"}


async def test_a_profile_that_can_not_be_read_now_is_read_later(
    path: Path, watch: AsyncIterator[Inventory], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process has no descriptor left: nothing tells when it has one again."""
    failures = iter(range(3))

    def fail_at_first(path: Path) -> bytes:
        if next(failures, None) is not None:
            raise profile.UnreadableProfileError("Too many open files")
        return profile.read(path)

    monkeypatch.setattr(simulated, "read", fail_at_first)
    monkeypatch.setattr(files, "_POLL_ALONE_S", 0.01)
    in_place(path, text(5))
    assert await following(watch) == "ooooo"
    assert [log.get_nowait()["event"] for _ in range(log.qsize())] == ["profile rejected", "profile read"]


async def test_where_no_gpu_is_named_all_are_meant() -> None:
    backend = SimulatedBackend("small")
    async with contextlib.aclosing(backend.watch()) as sights:
        every = {gpu.uuid for gpu in (await anext(sights)).gpus}
        await backend.release(())
        assert (await anext(sights)).released == every
        await backend.acquire(())
        assert not (await anext(sights)).released
