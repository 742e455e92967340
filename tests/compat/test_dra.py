"""A node that is switched to DRA with its pods, beside a genuine kubelet's device manager: its checkpoint goes on naming them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from adapters.dra.plugin import V1
from gateway.dra import cdi, crossing
from gateway.dra import pods as dra_pods
from gateway.kubernetes import access
from gateway_lab.kubelets.kubelet import KubeletError
from gateway_lab.trials.scenarios import RESOURCE, node
from gateway_lab.trials.scenarios import Node as Made
from tests.compat.test_podresources import genuine, versions
from tests.fakes.apiserver import ApiServer
from tests.unit.draplace import API, Node, Place
from tests.unit.kubernetes import authority, server, until

__all__ = ["authority", "server"]
pytestmark = pytest.mark.genuine
FIRST = 32
"""The kubelet, 1.N, from which there is a DRA that this gateway speaks."""


@contextlib.asynccontextmanager
async def _node(server: ApiServer, monkeypatch: pytest.MonkeyPatch, uids: str) -> AsyncIterator[tuple[Made, Place]]:
    """Give a node with three GPUs, and its place beside an API server that knows these pods."""
    monkeypatch.setattr(access, "find", lambda _: server.access())
    monkeypatch.setattr(dra_pods, "PODS_PERIOD_MAX_S", 0.2)
    monkeypatch.setattr(crossing, "ADMITS_S", 0.0)
    async with node(genuine, gpus={RESOURCE: 3}) as made:
        place = Place(made.root, server, made.socket_dir.name)
        monkeypatch.setattr(cdi, "FOLDER", place.folder / "cdi")
        for pod in uids:
            server.put(
                f"/api/v1/pods/{pod}", metadata={"uid": pod}, spec={"nodeName": "n1"}, status={"phase": "Running"}
            )
        yield made, place


@pytest.mark.parametrize("version", versions(FIRST))
async def test_gpus_of_pods_come_over_when_they_end(
    server: ApiServer, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _node(server, monkeypatch, "ab") as (made, place):
        kubelet = await made.start_kubelet(version)
        await made.start_gateway()
        await made.served()
        for pod in ("a", "b"):
            await kubelet.admit(pod, RESOURCE, 1)
        await made.end_gateway()
        async with place.gateway("only"):
            await until(lambda: len(place.published) == 1)
            server.remove("/api/v1/pods/a")
            await kubelet.remove("a")
            await until(lambda: len(place.published) == 2)
            server.remove("/api/v1/pods/b")
            await kubelet.remove("b")
            await until(lambda: len(place.published) == 3)


@pytest.mark.parametrize("version", versions(FIRST))
async def test_a_node_crosses_over_and_back_with_its_pods(
    server: ApiServer, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _node(server, monkeypatch, "abc") as (made, place):
        server.put(f"{API}/namespaces/x/resourceclaims/other")
        kubelet = await made.start_kubelet(version)
        both = Node(place)
        async with both.gateway():
            await kubelet.wait(RESOURCE, 3)
            await kubelet.admit("a", RESOURCE, 1)
            await kubelet.admit("b", RESOURCE, 1)
            await both.cross("dra")
            await until(lambda: len(place.published) == 1)
            await kubelet.wait(RESOURCE, 0)
            server.remove("/api/v1/pods/a")
            await kubelet.remove("a")
            await until(lambda: len(place.published) == 2)
        async with both.gateway():
            await until(lambda: len(place.published) == 2)
            asked = place.claim("c", "uid-c", min(place.published))
            assert isinstance((await both.claims.prepare(V1, asked))["uid-c"], tuple)
            await both.cross("plugin")
            await kubelet.wait(RESOURCE, 2)
            await kubelet.admit("c", RESOURCE, 1)
            with pytest.raises(KubeletError):
                await kubelet.admit("d", RESOURCE, 1)
            server.remove(f"{API}/namespaces/ns/resourceclaims/c")
            await both.claims.unprepare(V1, asked)
            await kubelet.wait(RESOURCE, 3)
