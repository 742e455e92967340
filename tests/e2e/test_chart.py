"""The Helm chart on a genuine node, by the genuine Helm: it installs, rolls without a pod noticing, and goes away.

HELM names the program; else it is the one that `.ci/chart` has built.
"""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.lab.node.continuity import IMAGE, SCENARIOS, judge, run
from gateway.lab.node.installed import DaemonSet, write_profile
from gateway.lab.node.stage import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
CHART = Path(__file__).parents[2] / "deploy" / "chart"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "device-plugin-gateway" / "helm"
NAMESPACE = "device-plugin-gateway"
VERSION = "1.37"


def helm() -> Path:
    built = sorted(CACHE.glob("*/helm"))
    return Path(os.environ["HELM"]) if "HELM" in os.environ else built[-1] if built else Path()


class Chart(DaemonSet):
    """The gateway by `helm install` of deploy/chart, with simulated GPUs that have the node's devices."""

    async def start(self) -> None:
        label = {"metadata": {"labels": {"device-plugin-gateway/simulated": "true"}}}
        await self._api.merge(f"/api/v1/nodes/{self._node.name}", label)
        await self._helm("install", "--create-namespace")

    async def stop(self) -> None:
        await self._helm("uninstall")
        await self._seen.until(lambda seen: not self._pods(seen), "the gateway's pods to be gone")

    async def roll(self, image: str) -> None:
        old = {pod.uid for pod in self._pods(self._seen)}
        self._image = image
        await self._helm("upgrade")
        await self._seen.until(
            lambda seen: (
                bool(self._pods(seen))
                and all(pod.uid not in old and pod.ready and not pod.ending for pod in self._pods(seen))
            ),
            f"one gateway, of image {image}",
            120,
        )

    async def _helm(self, verb: str, *more: str) -> None:
        values = {
            "gateway.backend": "simulated",
            "gateway.image": self._image,
            "fullnameOverride": "gpu",
        }
        said = (
            []
            if verb == "uninstall"
            else [str(CHART), *(f"--set-string={key}={value}" for key, value in values.items())]
        )
        if said:
            said.append(f"--set-file=gateway.profile={write_profile(self._node)}")
        command = [str(helm()), verb, "gpu", *said, f"--namespace={NAMESPACE}", *more]
        environment = os.environ | {"KUBECONFIG": str(self._node.kubeconfig), "HOME": str(self._node.folder)}
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, check=False, capture_output=True, text=True, timeout=120
        )
        assert not done.returncode, done.stderr


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chart(stage: Stage) -> AsyncIterator[Chart]:
    if not helm().is_file():
        pytest.skip("there is no Helm: .ci/chart builds one, HELM names another")
    one = Chart(stage.node, stage.api, stage.seen, IMAGE)
    await stage.install(one)
    yield one
    if stage.installed is one:
        await one.stop()
        stage.installed = None


@pytest.mark.parametrize("name", ["rolled", "rolled-back", "kubelet-term"])
async def test_the_chart_keeps_what_the_manifests_promise(stage: Stage, chart: Chart, name: str) -> None:
    outcome = await run(stage, VERSION, SCENARIOS[name])
    assert judge(outcome, SCENARIOS[name].promises[DaemonSet.kind]) == []


async def test_pods_outlive_its_removal(stage: Stage, chart: Chart) -> None:
    await stage.prepare(VERSION)
    before = {uid: pod.phase for uid, pod in stage.seen.pods.items() if pod.namespace != NAMESPACE}
    await chart.stop()
    stage.installed = None
    after: dict[Any, str] = {uid: pod.phase for uid, pod in stage.seen.pods.items() if uid in before}
    assert after == before
    left = await stage.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets")
    assert left["items"] == []
