"""Simulated GPUs: whichever way a profile is edited, and whatever stands in it, the kubelet is told at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.node import GPU, Gateway, Node

AMD = "amd.com/gpu"


def text(count: int, beneath: str = "") -> str:
    """Return a profile with so many GPUs."""
    return f"resources: {{{GPU}: {{gpus: {count}{', ' if beneath else ''}{beneath}}}}}\n"


async def ready(node: Node, content: str, count: int) -> tuple[Gateway, Path]:
    """Start a kubelet, and a gateway with a profile in a folder of its own."""
    path = node.folder / "profiles" / "profile.yaml"
    path.parent.mkdir()
    path.write_text(content)
    one = await node.served(count, "--backend", "simulated", "--simulate", str(path))
    return one, path


def in_place(path: Path, content: str) -> None:
    path.write_text(content)


def in_two_parts(path: Path, content: str) -> None:
    path.write_text(content[:20])
    with path.open("a") as file:
        file.write(content[20:])


def renamed(path: Path, content: str) -> None:
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
    """As a kubelet updates a mounted ConfigMap: the file is a link through a link that is swapped."""
    version = path.parent / f"..{len(list(path.parent.iterdir()))}"
    version.mkdir()
    (version / path.name).write_text(content)
    (path.parent / "..data_tmp").symlink_to(version.name)
    (path.parent / "..data_tmp").replace(path.parent / "..data")
    if not path.is_symlink():
        path.unlink()
        path.symlink_to(f"..data/{path.name}")


EDITS = (in_place, in_two_parts, renamed, backed_up, deleted_and_written, swapped_link)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
async def test_each_way_of_editing_is_followed_at_once(node: Node, edit: Callable[[Path, str], None]) -> None:
    _, path = await ready(node, text(2), 2)
    for content, count in ((text(2, "unhealthy: {1: hot}"), 1), (text(2), 2), (text(3), 3), (text(1), 1)):
        edit(path, content)
        await node.allocatable_is(count, seconds=1)


async def test_a_folder_that_is_replaced_and_an_edit_elsewhere_are_seen(node: Node) -> None:
    _, path = await ready(node, text(2), 2)
    shutil.rmtree(path.parent)
    await node.allocatable_after(20, 2)
    path.parent.mkdir()
    path.write_text(text(3))
    await node.allocatable_is(3, seconds=10)
    path.unlink()
    elsewhere = node.folder / "elsewhere.yaml"
    elsewhere.write_text(text(1))
    path.symlink_to(elsewhere)
    await node.allocatable_is(1, seconds=10)
    renamed(elsewhere, text(2))
    await node.allocatable_is(2, seconds=60)


@pytest.mark.parametrize(
    ("beneath", "counts", "states"),
    [
        pytest.param("unhealthy: {1: {reason: hot, kind: application}}", (3, 3), {}, id="an application's error"),
        pytest.param("unhealthy: {1: {reason: hot, kind: reset-required}}", (2, 3), {1: "unhealthy"}, id="an illness"),
        pytest.param("unhealthy: {1: hot}, recovered: [1]", (2, 3), {1: "unhealthy"}, id="ill all the same"),
        pytest.param("released: [2]", (2, 3), {2: "released"}, id="released"),
        pytest.param("withdrawn: [1]", (2, 2), {}, id="withdrawn"),
    ],
)
async def test_a_gpu_is_as_its_profile_says(
    node: Node, beneath: str, counts: tuple[int, int], states: dict[int, str]
) -> None:
    one, path = await ready(node, text(3), 3)
    ids = [*await one.states()]
    path.write_text(text(3, beneath))
    await node.pass_time(5)
    assert (node.allocatable(), node.capacity()) == counts
    found = await one.states()
    assert {ids.index(each): state for each, state in found.items() if state != "healthy"} == states
    assert list(found) == [each for each in ids if each in found]


@pytest.mark.parametrize(
    ("content", "state"),
    [
        pytest.param(text(1), "lost", id="there are fewer"),
        pytest.param(text(2, "withdrawn: [1]"), None, id="it is withdrawn"),
        pytest.param(text(1, "withdrawn: [0]"), "lost", id="another is withdrawn"),
        pytest.param("resources: {a.com/b: {gpus: 2}}", None, id="its resource is gone"),
        pytest.param("resources: [", "healthy", id="a wrong profile takes nothing away"),
    ],
)
async def test_what_becomes_of_a_gpu_that_a_profile_lacks(node: Node, content: str, state: str | None) -> None:
    one, path = await ready(node, text(2), 2)
    gone = [*await one.states()][1]
    path.write_text(content)
    await node.pass_time(5)
    assert (await one.states()).get(gone) == state
    if state == "lost":
        path.write_text(text(2, "withdrawn: [1]"))
        await node.pass_time(5)
        assert gone not in await one.states()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("resources: [", "not YAML"),
        (
            text(2, "unhealthy: {7: hot}"),
            "line 1: resources['nvidia.com/gpu'].unhealthy[7]: 7 is no GPU of this resource",
        ),
        ("", "the file is empty"),
        (None, "No such file"),
    ],
)
async def test_a_profile_that_is_wrong_or_gone_is_told_until_fixed(node: Node, content: str | None, words: str) -> None:
    one, path = await ready(node, text(2), 2)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    await node.pass_time(5)
    (hindrance,) = (await one.status())["hindrances"]
    assert words in hindrance["reason"]
    assert len(one.said("profile rejected")) == 1
    assert node.allocatable() == 2
    path.write_text(text(3))
    await node.allocatable_is(3, seconds=2)
    assert not (await one.status())["hindrances"]


async def test_a_profile_that_is_wrong_at_the_start_shows_no_gpu_until_it_is_right(node: Node) -> None:
    path = node.folder / "profile.yaml"
    path.write_text("resources: 8")
    await node.start_kubelet()
    one = node.gateway("--backend", "simulated", "--simulate", str(path))
    await node.until(lambda: one.said("profile rejected"), "the complaint")
    path.write_text(text(1))
    await node.allocatable_is(1)


async def test_an_unknown_profile_ends_the_start(node: Node) -> None:
    one = node.gateway("--backend", "simulated", "--simulate", "unknown")
    await node.until(lambda: not one.alive, "its end")
    assert one.process.ended.result() == 2
    assert "or use one of default, " in str(one.process.log)


@pytest.mark.parametrize(
    ("profile", "resource", "taken", "count", "chosen"),
    [
        ("default", GPU, 3, 2, [4, 5]),  # On one NUMA node.
        ("hives", AMD, 2, 3, [4, 5, 6]),  # Linked.
        ("partitions", AMD, 1, 7, [*range(1, 8)]),  # The rest of a GPU.
        ("two-resources", AMD, 0, 2, [0, 1]),
    ],
)
async def test_a_shipped_profile_s_nearest_are_preferred(
    node: Node, profile: str, resource: str, taken: int, count: int, chosen: list[int]
) -> None:
    await node.start_kubelet()
    node.gateway("--backend", "simulated", "--simulate", profile)
    await node.until(lambda: node.allocatable(resource) > 0, "the GPUs")
    async with node.plugin(resource) as plugin:
        ids = [device.id for device in await plugin.first_list()]
        assert await plugin.prefer(ids[taken:], count) == {ids[one] for one in chosen}


@pytest.mark.parametrize(("vendor", "variable"), [("nvidia", "NVIDIA_VISIBLE_DEVICES"), ("amd", "AMD_VISIBLE_DEVICES")])
async def test_a_simulated_gpu_is_given_as_its_vendors_would_be(node: Node, vendor: str, variable: str) -> None:
    name = f"{vendor}.com/gpu"
    node.simulate({name: {"gpus": 2}})
    one = await node.served(2, resource=name)
    given = await node.admit("pod", name, count=2)
    assert given.answer.envs == {variable: ",".join(await one.states(name))}


@pytest.mark.parametrize(
    ("beneath", "facts"),
    [
        ({"gpus": 2}, [("Simulated GPU", 80), ("Simulated GPU", 80)]),
        ({"gpus": 1, "product": "NVIDIA L4", "memory": 24}, [("NVIDIA L4", 24)]),
        ({"gpus": 4, "partitions": 2}, [("Simulated GPU", 40)] * 4),
    ],
)
async def test_what_a_profile_says_of_product_and_memory_is_told(
    node: Node, beneath: dict[str, object], facts: list[tuple[str, int]]
) -> None:
    (node.folder / "profile.yaml").write_text(json.dumps({"resources": {GPU: beneath}}))
    one = node.gateway("--backend", "simulated", "--simulate", str(node.folder / "profile.yaml"))
    known = (await one.order("devices"))["facts"][GPU]
    assert [(each["product"], each["memory"] >> 30) for each in known.values()] == facts
