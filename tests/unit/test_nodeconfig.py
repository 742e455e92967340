"""What it costs a real process to follow its node's label and to say at the API server how the node is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from gateway.configuration.flags import NODE_LABEL
from gateway_lab.bench.footprint import footprint
from gateway_lab.trials.scenarios import RESOURCE, Node, node
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
