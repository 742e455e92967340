"""A node that is switched to DRA with its pods, beside a genuine kubelet's device manager: its checkpoint goes on naming them."""

from __future__ import annotations

import pytest

from gateway.dra import records
from gateway.kubernetes import access
from gateway.lab.trials.scenarios import RESOURCE, node
from tests.compat.test_podresources import genuine, versions
from tests.fakes.apiserver import ApiServer
from tests.unit.kubernetes import authority, server, until
from tests.unit.test_dra_daemon import Place

__all__ = ["authority", "server"]
pytestmark = pytest.mark.genuine
FIRST = 32
"""The kubelet, 1.N, from which there is a DRA that this gateway speaks."""


@pytest.mark.parametrize("version", versions(FIRST))
async def test_gpus_of_pods_come_over_when_they_end(
    server: ApiServer, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "find", lambda _: server.access())
    monkeypatch.setattr(records, "ASK_AGAIN", 0.2)
    async with node(genuine, gpus={RESOURCE: 3}) as made:
        place = Place(made.root, server, made.socket_dir.name)
        for pod in ("a", "b"):
            server.put(
                f"/api/v1/pods/{pod}", metadata={"uid": pod}, spec={"nodeName": "n1"}, status={"phase": "Running"}
            )
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
