"""The node's label chooses the configuration file: which one, what another label changes, and what is done without any."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AbstractAsyncContextManager

import pytest

from tests.contract.cluster import Cluster
from tests.contract.node import GPU, Gateway, Node
from tests.contract.test_cluster import choices, choose, cluster_of

FALLBACKS = "--fallback-strategies"
FUSE = "vendor.com/fuse"


@pytest.fixture
def cluster(node: Node) -> AbstractAsyncContextManager[Cluster]:
    return cluster_of(node)


def write(node: Node, **files: str) -> tuple[str, str]:
    """Write the configuration files; return the options that name their folder."""
    folder = node.folder / "choices"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    node.shared = (GPU,)
    return "--config-file-srcdir", str(folder)


def shared(replicas: int) -> str:
    """Return a configuration that shares each GPU."""
    return json.dumps({"sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": replicas}]}}})


async def ended(node: Node, one: Gateway) -> tuple[int, str]:
    """Wait for a gateway's end; return its exit status and what it logged."""
    await node.until(lambda: not one.alive, "its end")
    return one.process.ended.result(), str(one.process.log)


async def _strategies_are(node: Node, one: Gateway, name: str) -> None:
    async def so() -> bool:
        return bool((await one.status())["list_strategies"] == [name])

    await node.eventually(so, f"the strategy {name}")


async def test_all_of_the_file_that_the_label_names_counts_and_nothing_of_another(node: Node, cluster: Cluster) -> None:
    plain = json.dumps({"flags": {"plugin": {"deviceListStrategy": "volume-mounts"}}})
    files = json.dumps({"gateway": {"excludeDevices": [0], "devices": [{"resource": FUSE, "paths": ["/dev/null"]}]}})
    options = write(node, plain=plain, twice=shared(2), files=files)
    choose(cluster, "plain")
    one = cluster.gateway(*options)
    await node.allocatable_is(2)
    await _strategies_are(node, one, "volume-mounts")
    given = await node.admit("pod")
    assert str((await one.status())["configuration"]["path"]).endswith("/plain")
    registers = node.registers[GPU]
    choose(cluster, "twice")
    await node.allocatable_is(2)  # Of four, two are of the pod's GPU.
    await _strategies_are(node, one, "envvar")
    choose(cluster, "files")
    await node.allocatable_is(1, FUSE)
    await node.until(lambda: node.capacity() <= 2, "one GPU to be left out", 900)
    choose(cluster, "plain")
    await node.allocatable_is(2, seconds=900)
    await _strategies_are(node, one, "volume-mounts")
    await node.until(lambda: node.capacity(FUSE) == 0, "the files to go", 900)
    assert node.registers[GPU] == registers, "no stream was ended for it"
    assert (await node.restart_container("pod")).devices == given.devices


async def test_what_another_label_said_before_counts_no_more(node: Node, cluster: Cluster) -> None:
    options = (*write(node, twice=shared(2), thrice=shared(3)), "--default-config=thrice")
    choose(cluster, "twice")
    one = cluster.gateway(*options)
    await node.allocatable_is(4)
    await one.terminate()
    await cluster.server.stop()
    cluster.gateway(*options, "--node-label=example.com/another")
    await node.allocatable_is(6)


async def test_an_edit_of_the_chosen_file_alone_counts_and_it_does_at_once(node: Node, cluster: Cluster) -> None:
    options = choices(node, "two", "three")
    choose(cluster, "two")
    cluster.gateway(*options)
    await node.allocatable_is(6)
    write(node, three=shared(2))
    await node.allocatable_after(60, 6)
    write(node, two=shared(4))
    await node.allocatable_is(8, seconds=3)
    choose(cluster, "three")
    await node.allocatable_is(4)
    write(node, three=shared(5))
    await node.allocatable_is(10, seconds=3)


async def test_a_label_whose_file_is_wrong_or_missing_changes_nothing_and_is_told(node: Node, cluster: Cluster) -> None:
    options = write(node, twice=shared(2), bad="flags: [")
    choose(cluster, "twice")
    one = cluster.gateway(*options)
    await node.allocatable_is(4)
    for label in ("bad", "nowhere"):
        choose(cluster, label)
        await node.eventually(lambda: _complains(one), "the complaint")
        assert node.allocatable() == 4
        choose(cluster, "twice")
        await node.eventually(lambda: _is_content(one), "its end")
    choose(cluster, "bad")
    await node.eventually(lambda: _complains(one), "the complaint")
    await one.terminate()
    two = cluster.gateway(*options)  # The label of before counts over a restart, too.
    await node.until(lambda: two.said("registered"), "its registration")
    await node.allocatable_after(30, 4)
    assert two.said("configuration rejected", label="bad")


async def _complains(one: Gateway) -> bool:
    return bool((await one.status())["configuration"].get("error"))


async def _is_content(one: Gateway) -> bool:
    return not await _complains(one)


@pytest.mark.parametrize(("label", "words"), [("nowhere", "'nowhere'"), ("bad", "not YAML")])
async def test_a_first_start_without_a_good_file_ends_to_be_retried(
    node: Node, cluster: Cluster, label: str, words: str
) -> None:
    choose(cluster, label)
    status, said = await ended(node, cluster.gateway(*write(node, good=shared(2), bad="flags: [")))
    assert status == 1  # Not 2: the label may be corrected.
    assert words in said


@pytest.mark.parametrize(
    ("files", "options", "count"),
    [
        pytest.param(["default", "xxx"], [FALLBACKS, "named,single"], 14, id="the one of that name"),
        pytest.param(["xxx"], [FALLBACKS, "named,single"], 6, id="the only one"),
        pytest.param(["xx", "xxx"], [FALLBACKS, "named,single,empty"], 2, id="none at all"),
        pytest.param(["xx", "xxx"], ["--default-config", "xx"], 4, id="the default"),
        pytest.param(["xx", "xxx"], [FALLBACKS, "named,single"], None, id="none fits"),
        pytest.param(["xx", "xxx"], [], None, id="nothing is said"),
    ],
)
async def test_without_a_label_the_default_and_the_strategies_decide(
    node: Node, cluster: Cluster, files: list[str], options: list[str], count: int | None
) -> None:
    one = cluster.gateway(*choices(node, *files), *options)
    if count is None:
        status, said = await ended(node, one)
        assert status == 1
        assert "has no label" in said
        return
    await node.allocatable_is(count)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--config-file", "x"), "Leave one of them out"),
        (("--node-name", ""), "NODE_NAME"),
        (("--kubeconfig", "/nowhere"), "/nowhere"),
        ((FALLBACKS, "first"), "Allowed: named, single, empty"),
    ],
)
async def test_wrong_settings_of_the_label_end_the_start(
    node: Node, cluster: Cluster, options: tuple[str, ...], words: str
) -> None:
    status, said = await ended(node, cluster.gateway(*choices(node, "two"), *options))
    assert status == 2
    assert words in said


@pytest.mark.parametrize(("known", "least", "most"), [(False, 6, 20), (True, 0, 5)])
async def test_a_start_waits_for_the_api_server_where_it_knows_nothing_better(
    node: Node, cluster: Cluster, known: bool, least: float, most: float
) -> None:
    options = (*choices(node, "two", "three"), "--default-config", "two")
    if known:
        await _remembered(cluster, *options)
    await cluster.server.stop()
    before = asyncio.get_running_loop().time()
    one = cluster.gateway(*options)
    await node.until(lambda: one.said("registered"), "its registration")
    took = asyncio.get_running_loop().time() - before
    assert least <= took <= most
    assert node.allocatable() == (10 if known else 6)


async def _remembered(cluster: Cluster, *options: str) -> None:
    choose(cluster, "three")
    one = cluster.gateway(*options)
    await cluster.node.allocatable_is(10)
    await one.terminate()


async def test_a_hangup_has_the_file_that_the_label_chose_read_at_once(node: Node, cluster: Cluster) -> None:
    choose(cluster, "two")
    one = cluster.gateway(*choices(node, "two"))
    await node.allocatable_is(6)
    await node.pass_time(20)
    one.process.terminate(signal.SIGHUP)
    await node.until(lambda: one.said("configuration read: nothing changed"), "the answer", 3)
    write(node, two="flags: [")
    await node.eventually(lambda: _complains(one), "the complaint")
    one.process.terminate(signal.SIGHUP)
    await node.until(lambda: len(one.said("configuration rejected: the last good one stays in force")) == 2, "it", 3)
    assert node.allocatable() == 6


async def test_a_renamed_label_is_followed_under_its_name(node: Node, cluster: Cluster) -> None:
    options = choices(node, "two", "three")
    cluster.server.change("/api/v1/nodes/n1", lambda one: one["metadata"].update(labels={"mine": "three"}))
    cluster.gateway(*options, "--node-label", "mine")
    await node.allocatable_is(10)
