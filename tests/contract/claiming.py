"""A node with two GPUs whose gateway takes claims, alone or with the device plugin API too."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator
from typing import Any, Final

from tests.contract.cluster import NVIDIA, Cluster
from tests.contract.node import GPU, Gateway, Node

A, B = "GPU-a", "GPU-b"
CLAIMS: Final = "/resourceclaims"


def simulate(node: Node, *gpus: str, unhealthy: str = "", **more: Any) -> None:
    """Have these GPUs, by default A and B, of which one may be unhealthy."""
    there = [{"uuid": one, "device_nodes": [f"/dev/nvidia{number}"]} for number, one in enumerate(gpus or (A, B))]
    node.simulate({GPU: {"gpus": there, "unhealthy": {unhealthy: "fell off the bus"} if unhealthy else {}, **more}})


async def started(cluster: Cluster, version: str = "1.34", *options: str) -> Gateway:
    """Start a kubelet and a gateway that serves claims alone, and wait until slices offer both GPUs."""
    simulate(cluster.node)
    await cluster.start_kubelet(version)
    one = cluster.gateway("--dra", "only", *options)
    await cluster.published_is(gpu_0=[], gpu_1=[])
    return one


@contextlib.asynccontextmanager
async def both(node: Node, version: str = "1.37") -> AsyncGenerator[Cluster]:
    """Give a node with two GPUs at the device plugin API, and a gateway that serves both APIs."""
    simulate(node)
    async with Cluster(node, version) as cluster:
        await cluster.start_kubelet(version)
        cluster.gateway("--dra", "on")
        await node.allocatable_is(2)
        await cluster.connected()
        await node.until(lambda: cluster.allocatable == 2, "the API server to show both")
        yield cluster


async def there_and_back(cluster: Cluster) -> None:
    """Move the GPUs to DRA and back: the first order after a kubelet's start lets it have them for its pods until it has admitted those."""
    await cluster.node.pass_time(5)
    await all_to_dra(cluster)
    await cross(cluster, "plugin")
    await cluster.node.allocatable_is(2)
    await cluster.node.until(lambda: cluster.allocatable == 2, "the API server to show both")


async def held_by_name(cluster: Cluster) -> tuple[Gateway, str]:
    """Start a gateway without DRA that gives a pod one of two GPUs; return the gateway and the GPU."""
    simulate(cluster.node)
    await cluster.start_kubelet()
    one = cluster.node.gateway()
    await cluster.node.allocatable_is(2)
    [held] = (await cluster.node.admit("pod")).devices[GPU]
    return one, held


async def all_to_dra(cluster: Cluster) -> None:
    """Move all GPUs, which are A and B, to DRA."""
    await cross(cluster, "dra")
    await cluster.published_is(gpu_0=[], gpu_1=[])


async def cross(cluster: Cluster, to: str, *ids: str, dry_run: bool = False) -> dict[str, str]:
    """Order GPUs to an API; return where each is then."""
    answer = await cluster.node.gateways[-1].order("move", to=to, ids=list(ids), dry_run=dry_run)
    return {row["id"]: row["side"] for row in answer["boards"]}


async def sides(cluster: Cluster, a: str, b: str, seconds: float = 60) -> None:
    """Wait until the two GPUs are so."""

    async def so() -> bool:
        return await cross(cluster, "plugin", dry_run=True) == {A: a, B: b}

    await cluster.node.eventually(so, f"A to be {a} and B to be {b}", seconds)


async def side(cluster: Cluster, gpu: str) -> dict[str, Any]:
    """Return what the status says of where a GPU is."""
    return next(row for row in (await cluster.node.gateways[-1].status())["sides"] if row["id"] == gpu)


async def words(cluster: Cluster, gpu: str, part: str, seconds: float = 60) -> None:
    """Wait until people are told so of a GPU."""

    async def said() -> bool:
        return part in (await side(cluster, gpu))["words"]

    await cluster.node.eventually(said, f"{part!r} instead of {await side(cluster, gpu)}", seconds)


async def driver(cluster: Cluster) -> dict[str, Any]:
    """Return what the status says of the driver."""
    [found] = (await cluster.node.gateways[-1].status())["drivers"]
    return dict(found)


def device_class(cluster: Cluster, name: str = GPU) -> None:
    """Have a DeviceClass that gives DRA's GPUs to pods which ask for this resource by name; '': for none."""
    spec: dict[str, Any] = {"extendedResourceName": name} if name else {"selectors": []}
    cluster.server.put(f"{cluster.api}/deviceclasses/{NVIDIA}", spec=spec)


def watch_both(cluster: Cluster) -> list[str]:
    """Look after each change at the API server and at the kubelet; what is returned tells when a GPU was offered by both APIs."""
    twice: list[str] = []
    later, context = asyncio.get_running_loop().call_soon, contextvars.copy_context()

    def look() -> None:
        free, by_name = [one for one, taints in cluster.published().items() if not taints], cluster.node.allocatable()
        if len(free) + by_name > 2:
            twice.append(f"{free} and {by_name} by name")

    cluster.server.told = cluster.node.noted = lambda: later(look, context=context)
    return twice


def asked(cluster: Cluster, end: str, method: str = "GET") -> int:
    """Return how often the API server was asked for what a path ends with."""
    return sum(one.path.endswith(end) and not one.watches for one in cluster.server.requests if one.method == method)
