"""A gateway whose configuration the node's label chooses: real processes, a kubelet, and an API server that comes and goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from gateway.cli import nodeconfig
from gateway.configuration import choice as choosing
from gateway.configuration.flags import NODE_LABEL
from gateway.configuration.settings import Choice, Settings
from gateway.lab.bench.footprint import footprint
from gateway.lab.trials.scenarios import RESOURCE, Node, node
from tests.fakes.apiserver import ApiServer
from tests.unit.kubernetes import authority, server
from tests.unit.kubernetes import node as labelled

__all__ = ["authority", "server"]

NODE = "/api/v1/nodes/n1"
OTHER = "example.com/gpu"
SHARED = "sharing: {timeSlicing: {resources: [{name: %s, replicas: %s}]}}"
FILES = {"twice": SHARED % (RESOURCE, 2), "thrice": SHARED % (RESOURCE, 3), "default": "version: v1", "bad": "flags: ["}


@asynccontextmanager
async def chosen(server: ApiServer, files: Mapping[str, str] = FILES) -> AsyncIterator[Node]:
    """A node with two resources of two GPUs, whose gateways have four files to choose from."""
    async with node(gpus={RESOURCE: 2, OTHER: 2}) as made:
        folder = made.root / "configs"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        kubeconfig = server.kubeconfig(made.root / "kubeconfig")
        made.options = (
            *("--config-file-srcdir", str(folder), "--kubeconfig", str(kubeconfig), "--node-name", "n1"),
            *("--fallback-strategies", "named,single"),
        )
        yield made


def label(value: str) -> dict[str, object]:
    return labelled({NODE_LABEL: value} if value else {})


async def test_the_label_is_followed_on_the_streams_that_are(server: ApiServer) -> None:
    server.put(NODE, **label("twice"))
    async with chosen(server) as made:
        kubelet = await made.start_kubelet("1.37")
        gateway = await made.start_gateway()
        await kubelet.wait(RESOURCE, 4)
        await kubelet.wait(OTHER, 2)
        registers = await kubelet.registers()
        server.put(NODE, **label("thrice"))
        await kubelet.wait(RESOURCE, 6)
        await server.stop()
        server.put(NODE, **label(""))
        await server.start()
        await kubelet.wait(RESOURCE, 2)
        server.put(NODE, **label("bad"))
        await gateway.wait_for("configuration rejected: the last good one stays in force")
        await kubelet.wait(RESOURCE, 2)
        assert await kubelet.registers() == registers, "no stream was ended for it"


async def test_without_the_server_the_label_of_before_counts(server: ApiServer) -> None:
    server.put(NODE, **label("thrice"))
    async with chosen(server) as made:
        kubelet = await made.start_kubelet("1.37")
        await made.start_gateway()
        await kubelet.wait(RESOURCE, 6)
        await made.end_gateway()
        await server.stop()
        gateway = await made.start_gateway()
        await gateway.wait_for("the node's label isn't known")
        await kubelet.wait(RESOURCE, 6)
        server.put(NODE, **label("twice"))
        await server.start()
        await kubelet.wait(RESOURCE, 4)


async def test_where_the_label_has_no_file_the_one_of_before_counts(server: ApiServer) -> None:
    server.put(NODE, **label("thrice"))
    async with chosen(server) as made:
        kubelet = await made.start_kubelet("1.37")
        await made.start_gateway()
        await kubelet.wait(RESOURCE, 6)
        await made.end_gateway()
        server.put(NODE, **label("nowhere"))
        gateway = await made.start_gateway()
        await gateway.wait_for("configuration rejected", label="nowhere")
        await kubelet.wait(RESOURCE, 6)


@pytest.mark.parametrize(
    ("value", "status", "told"),
    [("nowhere", 1, "'nowhere'"), ("bad", 1, "expected YAML")],
)
async def test_a_first_start_without_a_good_file_ends_and_says_why(
    server: ApiServer, value: str, status: int, told: str
) -> None:
    server.put(NODE, **label(value))
    async with chosen(server) as made:
        gateway = await made.start_gateway()
        assert await gateway.wait() == status, "not 78: the label may be corrected"
        assert told in gateway.log()


@pytest.mark.parametrize(("known", "seconds"), [(None, nodeconfig.PATIENCE), ("thrice", nodeconfig.IMPATIENCE)])
def test_a_start_waits_for_the_server_where_it_knows_nothing_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str | None, seconds: float
) -> None:
    choice = Choice(tmp_path, NODE_LABEL)
    (tmp_path / "thrice").write_text("version: v1")
    if known:
        choosing.remember(choice, tmp_path / "state", known)
    waited: list[float] = []

    def asked(_: Settings, __: Choice, patience: float) -> str:
        waited.append(patience)
        return "thrice"

    monkeypatch.setattr(nodeconfig, "_asked", asked)
    found, _ = nodeconfig.start(Settings(node_name="n1", state_dir=tmp_path / "state"), choice)
    assert (waited, found.node_label, found.config_file) == ([seconds], "thrice", tmp_path / "thrice")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--config-file", "x"), "leave one of them out"),
        (("--node-name", ""), "NODE_NAME"),
        (("--kubeconfig", "/nowhere"), "/nowhere"),
        (("--fallback-strategies", "first"), "expected named, single, empty"),
    ],
)
async def test_settings_that_cant_be_gone_by_end_it(authority: trustme.CA, options: tuple[str, ...], told: str) -> None:
    async with chosen(ApiServer(authority)) as made:
        made.options = (*made.options, *options)
        gateway = await made.start_gateway()
        assert await gateway.wait() == 78
        assert told in gateway.log()


async def test_the_label_and_what_the_node_says_cost_less_than_15_mib(server: ApiServer) -> None:
    server.put(NODE, **label("twice"))
    cost = []
    for asked in (False, True):
        async with chosen(server) as made:
            told = ("--node-condition", "--node-events", "--startup-taint", "a/b")
            made.options = (*made.options, *told) if asked else ()
            kubelet = await made.start_kubelet("1.37")
            gateway = await made.start_gateway()
            await kubelet.wait(RESOURCE, 4 if asked else 2)
            if asked:
                await gateway.wait_for("node condition written")
            cost.append(footprint(gateway.pid).rss)
    off, on = cost
    print(f"off {off:.1f} MiB, on {on:.1f} MiB")  # noqa: T201 - pytest -rP shows it
    assert on - off < 15
