"""The own node: asked for once at a start, and followed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gateway.configuration.flags import NODE_LABEL
from gateway.configuration.settings import Choice, Settings
from gateway.kubernetes import features, node
from gateway.kubernetes.access import AccessError
from gateway.kubernetes.client import Client, KubernetesError
from gateway.kubernetes.features import Features
from gateway.kubernetes.node import OwnNode
from tests.fakes.apiserver import ApiServer
from tests.unit.kubernetes import api, authority, server, until
from tests.unit.kubernetes import node as labelled

__all__ = ["api", "authority", "server"]

NODE = "/api/v1/nodes/n1"


def settings(server: ApiServer, tmp_path: Path) -> Settings:
    return Settings(kubeconfig=server.kubeconfig(tmp_path / "kubeconfig"), node_name="n1")


@pytest.mark.parametrize(("labels", "value"), [({"wanted": "a"}, "a"), ({"other": "a"}, "")])
async def test_a_label_is_asked_for(server: ApiServer, tmp_path: Path, labels: dict[str, str], value: str) -> None:
    server.put(NODE, **labelled(labels))
    assert await node.label(settings(server, tmp_path), "wanted", 10) == value
    await until(lambda: not server._open)


async def test_a_server_that_comes_in_time_is_waited_for(server: ApiServer, tmp_path: Path) -> None:
    where = settings(server, tmp_path)
    await server.stop()
    asking = asyncio.ensure_future(node.label(where, "wanted", 20))
    await asyncio.sleep(0.05)
    server.put(NODE, **labelled({"wanted": "late"}))
    await server.start()
    assert await asking == "late"


async def test_one_that_doesnt_come_is_waited_for_no_longer(server: ApiServer, tmp_path: Path) -> None:
    where = settings(server, tmp_path)
    await server.stop()
    async with asyncio.timeout(10):
        with pytest.raises(KubernetesError, match="no connection"):
            await node.label(where, "wanted", 0.2)


async def test_a_node_that_is_deleted_stays_as_it_was_until_it_comes_again(
    server: ApiServer, api: Client, tmp_path: Path
) -> None:
    server.put(NODE, **labelled({"is": "a"}))
    own, told = OwnNode(api, settings(server, tmp_path)), list[str]()
    own.told.append(lambda found: told.append(found.metadata.labels.get("is", "")))
    following = asyncio.ensure_future(own.run())
    await until(lambda: told == ["a"])
    server.objects[NODE]["metadata"]["labels"] = {"is": "deleted"}
    server.remove(NODE)
    server.put(NODE, **labelled({"is": "b"}))
    await until(lambda: "b" in told)
    assert told == ["a", "b"]
    assert own.last is not None
    assert own.last.metadata.labels == {"is": "b"}
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("failure", [RuntimeError("a defect"), AccessError("no token yet")])
async def test_whatever_fails_is_begun_again(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(features, "AGAIN", 0.01)
    failures, client = [failure, failure], node.client

    def make(of: Settings) -> Client:
        if failures:
            raise failures.pop()
        return client(of)

    monkeypatch.setattr(node, "client", make)
    server.put(NODE, **labelled({NODE_LABEL: "a"}))
    choice = Choice(tmp_path, NODE_LABEL)
    chosen = Features(replace(settings(server, tmp_path), choice=choice))
    nobody: Any = None
    with capture_logs():
        running = asyncio.ensure_future(chosen.run(nobody))
        await until(lambda: chosen.label is not None and chosen.label.value == "a")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("settings", "writes", "asks"),
    [
        pytest.param(Settings(), False, False, id="nothing is on"),
        pytest.param(Settings(choice=Choice(Path("configs"), NODE_LABEL)), False, True, id="a configuration by label"),
        pytest.param(Settings(startup_taint="a/b"), True, True, id="a taint that goes"),
        pytest.param(Settings(node_condition=True), True, True, id="a condition"),
        pytest.param(Settings(node_events=True), True, True, id="events"),
    ],
)
def test_the_api_server_is_asked_where_a_feature_needs_it(settings: Settings, writes: bool, asks: bool) -> None:
    assert (settings.writes_node, settings.asks_api_server) == (writes, asks)
