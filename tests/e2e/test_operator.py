"""docs/beside.md on a genuine node: a driver upgrade as the GPU Operator's driver manager does it, with the gateway by its chart.

The steps and their order are those of NVIDIA/k8s-driver-manager v0.12.0 (`uninstallDriver`). The operator itself isn't run, and there
is no driver: what is seen is who is on the node at each step, and that pods get their GPUs afterwards.
"""

import json
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from gateway_lab.node.continuity import IMAGE
from gateway_lab.node.dra import DraNode
from gateway_lab.node.installed import DEVICES, GPUS, STATE, write_profile
from gateway_lab.waiting import until
from tests.e2e.test_readme import ROOT, done, prepared, simulates

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
PAGE = (ROOT / "docs/beside.md").read_text().partition("## NVIDIA's GPU Operator\n")[2].partition("\n## ")[0]
CLIENT, DRIVER = "nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.dra-driver"
PAUSED = "paused-for-driver-upgrade"
OPERATOR = "gpu-operator"
DAEMONSET = "daemonset/gpu-device-plugin-gateway"
GATEWAYS = "app.kubernetes.io/name=device-plugin-gateway"
MOVE = "device-plugin-gateway.io/move-to"
PATIENCE = 120


def commands(heading: str) -> list[str]:
    """The commands of a part of the page's section; what Helm does to the operator is left out."""
    text = PAGE.partition(f"### {heading}\n")[2].partition("\n### ")[0].replace("\\\n", "")
    found = re.findall(r"^    ((?:helm|kubectl) .+)$", text, re.MULTILINE)
    return [command for command in found if "nvidia/gpu-operator" not in command]


@pytest_asyncio.fixture(loop_scope="session")
async def node(images: list[Path], tmp_path: Path) -> AsyncIterator[DraNode]:
    """A node with the operator's namespace and runtime class, and simulated GPUs."""
    one = DraNode(await prepared(tmp_path, images))
    for path in DEVICES.values():
        one.node.make_device(path)
    gateway = {"backend": "simulated", "image": IMAGE, "profile": write_profile(one.node).read_text()}
    (tmp_path / "your-values.yaml").write_text(json.dumps({"gateway": gateway}))
    await one.claimable()
    runtime = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia"},
        "handler": "runc",
    }
    await one.api.apply("/apis/node.k8s.io/v1/runtimeclasses/nvidia", runtime)
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR}}
    await one.api.apply(f"/api/v1/namespaces/{OPERATOR}", space)
    await simulates(one.node)
    yield one
    await one.delete_all()
    await done(one.node, tmp_path, f"helm uninstall gpu -n {OPERATOR} --ignore-not-found --wait")
    await gone(one, f"/api/v1/pods?labelSelector={GATEWAYS}")
    await label(one, dict.fromkeys((CLIENT, DRIVER)))
    await one.api.merge(f"/api/v1/nodes/{one.node.name}", {"metadata": {"annotations": {MOVE: None}}})
    shutil.rmtree(one.node.root / STATE)


async def label(node: DraNode, labels: Mapping[str, str | None]) -> None:
    await node.api.merge(f"/api/v1/nodes/{node.node.name}", {"metadata": {"labels": labels}})


async def names(node: DraNode, path: str) -> list[str]:
    return [one["metadata"]["name"] for one in (await node.api.get(path))["items"]]


async def gone(node: DraNode, path: str) -> None:
    async def is_empty() -> bool:
        return not await names(node, path)

    await until(is_empty, PATIENCE)


async def driver_upgrade(node: DraNode) -> AsyncIterator[str]:
    """Do each step of the driver manager's; say which one was done."""
    about = f"/api/v1/nodes/{node.node.name}"
    there = (await node.api.get(about))["metadata"]["labels"]
    if CLIENT in there:
        await label(node, {CLIENT: PAUSED})
        await gone(
            node, f"/api/v1/pods?labelSelector={GATEWAYS}"
        )  # it waits for DaemonSets' pods that select the label
    yield "clients are paused"
    await node.api.merge(about, {"spec": {"unschedulable": True}})
    for name in await names(node, "/api/v1/namespaces/default/pods"):
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
        await node.api.create(f"/api/v1/namespaces/default/pods/{name}/eviction", eviction)
    await gone(node, "/api/v1/namespaces/default/pods")
    yield "GPU pods are evicted"
    if DRIVER in there:
        await label(node, {DRIVER: PAUSED})
        await gone(node, f"/api/v1/namespaces/{OPERATOR}/pods?labelSelector=app=nvidia-dra-driver-kubelet-plugin")
    yield "the driver is replaced"
    await node.api.merge(about, {"spec": {"unschedulable": None}})
    await label(node, {one: "true" for one in (CLIENT, DRIVER) if one in there})


async def install(node: DraNode, folder: Path, heading: str) -> None:
    for command in commands(heading):
        await done(node.node, folder, command.replace("NODE", node.node.name))


async def test_without_dra_it_goes_first_and_pods_keep_their_gpus_until_they_are_evicted(
    node: DraNode, tmp_path: Path
) -> None:
    await install(node, tmp_path, "Install it without DRA")
    await node.allocatable(GPUS)
    await node.named_pod("x")
    gateways = {}
    async for step in driver_upgrade(node):
        gateways[step] = len(await names(node, f"/api/v1/pods?labelSelector={GATEWAYS}"))
        if step == "clients are paused":
            assert (await names(node, "/api/v1/namespaces/default/pods"), node.account("x").lost) == (["x"], ())
    assert set(gateways.values()) == {0}
    await node.allocatable(GPUS)
    await node.named_pod("y")
    await node.delete("y")
    await install(node, tmp_path, "Undo")


async def test_with_dra_it_goes_last_and_claims_are_released(node: DraNode, tmp_path: Path) -> None:
    await install(node, tmp_path, "Install it with DRA")
    await node.allocatable(GPUS)
    await done(node.node, tmp_path, f"kubectl annotate node {node.node.name} {MOVE}=dra")
    await node.published(GPUS)
    await node.claim_pod("a")
    gateways, claims = {}, {}
    async for step in driver_upgrade(node):
        gateways[step] = len(await names(node, f"/api/v1/pods?labelSelector={GATEWAYS}"))
        claims[step] = len(node.prepared())
    assert gateways == {"clients are paused": 1, "GPU pods are evicted": 1, "the driver is replaced": 0}
    assert claims == {"clients are paused": 1, "GPU pods are evicted": 0, "the driver is replaced": 0}
    # Its slices outlive it: a claim would be allocated before the kubelet knows the driver again, and is tried again a minute later.
    await done(node.node, tmp_path, f"kubectl rollout status {DAEMONSET} -n {OPERATOR} --timeout=120s")
    await node.claim_pod("b")
    await node.delete("b")
    await install(node, tmp_path, "Undo")
