"""How-tos on a whole node, with simulated GPUs: each command of Helm, kubectl and the gateway, as the page gives it.

What needs a driver, a registry or NVIDIA's chart is left out.
"""

import json
import re
import shutil
import textwrap
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from gateway_lab.node import Node
from gateway_lab.node.api import Api
from gateway_lab.node.continuity import IMAGE
from gateway_lab.node.installed import DEVICES, GPUS, IDS, NAMESPACE, STATE, write_profile
from gateway_lab.trials.scenarios import RESOURCE
from gateway_lab.waiting import until
from tests.e2e.test_readme import ROOT, SAMPLE, done, prepared, simulates

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
PATIENCE = 120
GATEWAYS = "app.kubernetes.io/name=device-plugin-gateway"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={GATEWAYS}"
INSTALL = "helm install gpu deploy/chart -n device-plugin-gateway --create-namespace -f your-values.yaml"
SRIOV = "kube-sriov-device-plugin-amd64"
DONE_ELSEWHERE = ("helm install gpu ", "helm template ", "helm upgrade nvdp ", "helm uninstall nvdp ")
"""The gateway is installed with simulated GPUs, tests/chart renders, and NVIDIA's chart isn't here."""
CRDS = {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"}
"""Of the Prometheus Operator, which isn't here: the API server takes its objects unread."""


class Reader:
    """An operator who follows a page on a node with the chart installed."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node, self.folder, self.api = node, folder, Api.of(node)

    async def pod(self) -> str:
        """The gateway's pod, when it is the only one and ready."""

        names: list[str] = []

        async def is_alone() -> bool:
            found = (await self.api.get(PODS))["items"]
            names[:] = [pod["metadata"]["name"] for pod in found]
            conditions = [one for pod in found for one in pod["status"].get("conditions", ())]
            return len(found) == 1 and any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)

        await until(is_alone, PATIENCE)
        return names[0]

    async def gpus(self, count: int, resource: str = RESOURCE) -> None:
        """Wait until so many are allocatable."""

        async def there() -> bool:
            status = (await self.api.get(f"/api/v1/nodes/{self.node.name}"))["status"]
            return int(status["allocatable"].get(resource, 0)) == count

        await until(there, PATIENCE)

    async def run(self, command: str, **words: str) -> str:
        """Run a command, with the page's placeholders filled; give what it said."""
        for word, value in {"NODE": self.node.name, **words}.items():
            command = re.sub(rf"\b{word}\b", value, command)
        return await done(self.node, self.folder, command)

    async def apply(self, what: Mapping[str, object]) -> None:
        """Give the API server an object, by kubectl."""
        (self.folder / "object.json").write_text(json.dumps(what))
        await self.run("kubectl apply -f object.json")

    async def follow(self, page: str, heading: str = "", *, inside: bool = False, **words: str) -> list[str]:
        """Run the commands of a section; ``inside``: those of the gateway in its pod. Give what each said."""
        said = []
        for command in commands(page, heading):
            pod = await self.pod()
            if inside and command.startswith("gateway "):
                command = f"kubectl exec -n {NAMESPACE} {pod} -- {command}"  # noqa: PLW2901
            said.append(await self.run(command, **{"POD": pod, "GATEWAY": pod, **words}))
        return said


def section(page: str, heading: str = "") -> str:
    """A page's section; without a heading, what stands before the first."""
    name, _, rest = f"\n## \n{(ROOT / 'docs' / page).read_text()}".partition(f"\n## {heading}\n")
    assert rest or not name
    return rest.partition("\n## ")[0]


def commands(page: str, heading: str = "") -> list[str]:
    """The commands of a section that can be run here."""
    lines = re.sub(r"\\\n\s*", "", section(page, heading)).splitlines()
    found = [match[1] for line in lines if (match := re.match(r" {4,}((?:helm|kubectl|gateway|sed) .*)$", line))]
    return [one for one in found if not one.startswith(DONE_ELSEWHERE)]


@pytest_asyncio.fixture(loop_scope="session")
async def reader(images: list[Path], tmp_path: Path) -> AsyncIterator[Reader]:
    node = await prepared(tmp_path, images)
    one = Reader(node, tmp_path)
    (tmp_path / "bin" / "gateway").symlink_to(ROOT / ".venv/bin/gateway")
    for path in DEVICES.values():
        node.make_device(path)
    gateway = {"backend": "simulated", "image": IMAGE, "profile": write_profile(node).read_text()}
    ready = {"condition": True, "events": True}
    (tmp_path / "your-values.yaml").write_text(json.dumps({"gateway": gateway, "nodeReadiness": ready}))
    await simulates(node)
    yield one
    await one.run("kubectl delete pods --all --wait --ignore-not-found")
    await one.run("kubectl annotate node NODE device-plugin-gateway.io/move-to-")
    await one.run("helm uninstall gpu -n device-plugin-gateway --ignore-not-found --wait")

    async def gone() -> bool:
        return not (await one.api.get(PODS))["items"]

    await until(gone, PATIENCE)
    shutil.rmtree(node.root / STATE)


@pytest_asyncio.fixture(loop_scope="session")
async def installed(reader: Reader) -> Reader:
    await reader.run(INSTALL)
    await reader.gpus(GPUS)
    return reader


async def test_a_node_moves_to_dra_and_back(installed: Reader) -> None:
    sample = installed.folder / "deploy/samples/claims/nvidia.yaml"
    there = re.sub(r"image: .*", f"image: {SAMPLE}", sample.read_text())
    sample.write_text(there.replace("[nvidia-smi, -L]", '[sh, -c, "ls /dev/nvidia*"]'))
    await installed.follow("move-to-dra.md", "Move it")
    await installed.gpus(0)
    said = await installed.follow("move-to-dra.md", "Check that it worked")
    assert "dra" in said[0]
    assert re.search(r"/dev/nvidia\d", said[-1])
    await installed.follow("move-to-dra.md", "Undo")
    await installed.gpus(GPUS)


async def test_gpus_are_shared_four_ways_by_label(installed: Reader) -> None:
    heading = "Share them on nodes with a label"
    [values] = re.findall(r"# values.yaml\n((?: {8}.*\n)+)", section("share.md", heading))
    (installed.folder / "values.yaml").write_text(textwrap.dedent(values))
    await installed.run("kubectl label node NODE --overwrite team=ml")
    await installed.follow("share.md", heading)
    await installed.gpus(4 * GPUS)
    [said] = await installed.follow("share.md", "Check that it worked")
    assert json.loads(said)[RESOURCE] == str(4 * GPUS)
    await installed.follow("share.md", "Undo")
    await installed.gpus(GPUS)


async def test_a_gpu_is_cordoned(installed: Reader) -> None:
    [whole] = re.findall(r"=(GPU-[0-9a-f-]{36})", section("cordon.md"))
    words = {whole: IDS[1], "GPU-5f3a": IDS[0]}
    await installed.follow("cordon.md", inside=True, **words)
    await installed.gpus(GPUS - 2)

    async def is_told() -> bool:
        [said] = await installed.follow("cordon.md", "Check that it worked")
        return "GPUCordoned" in said

    await until(is_told, PATIENCE)
    await installed.follow("cordon.md", "Undo", inside=True, **words)
    await installed.gpus(GPUS)


async def test_a_gpu_is_released_for_a_reset(installed: Reader) -> None:
    steps = commands("reset.md")
    assert [step.split()[1] for step in steps] == ["cordon", "devices", "release", "acquire", "uncordon"]
    for step in steps:
        inside = f"kubectl exec -n {NAMESPACE} {await installed.pod()} -- {step}"
        said = await installed.run(inside, **{"GPU-5f3a": IDS[0]})
        if " release " in step:
            assert IDS[0] in said
            await installed.gpus(GPUS - 1)
    await installed.gpus(GPUS)


async def test_a_pending_pod_is_explained(installed: Reader) -> None:
    container = {"name": "c", "image": SAMPLE, "resources": {"limits": {RESOURCE: GPUS + 1}}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "waits"}, "spec": {"containers": [container]}}
    await installed.apply(pod)
    await installed.run("kubectl wait --for=condition=PodScheduled=false pod/waits --timeout=60s")
    why, nodes = await installed.follow("pending.md", POD="waits")
    assert f"Insufficient {RESOURCE}" in why
    assert re.search(rf"{installed.node.name} +{GPUS}\b", nodes)
    *_, status = await installed.follow("pending.md", "No GPU is allocatable")
    assert "serving" in status


async def test_an_upgrade_is_planned(installed: Reader) -> None:
    said = await installed.follow("upgrades.md")
    assert [not one for one in said] == ["-o html" in one for one in commands("upgrades.md")]
    assert "<html" in (installed.folder / "plan.html").read_text()
    await installed.follow("upgrades.md", "From the device plugin API to claims")
    [nodes] = await installed.follow("upgrades.md", "Check that it worked")
    assert re.search(rf"{installed.node.name} +v1\.37\S* +{GPUS}\b", nodes)


async def test_a_plugin_is_swapped(reader: Reader) -> None:
    await reader.run(f"{INSTALL} --set nodeSelector.device-plugin=gateway")
    assert not (await reader.api.get(PODS))["items"]
    for command in commands("migration.md", "Swap"):
        await reader.run(command)
    await reader.gpus(GPUS)
    said = await reader.follow("migration.md", "Check that it worked")
    assert json.loads(said[0])[RESOURCE] == str(GPUS)
    assert IDS[0] in said[1]
    for command in ("kubectl label node NODE device-plugin-", "kubectl label node NODE other-plugin-"):
        assert f"`{command}`" in (ROOT / "docs/migration.md").read_text()
        await reader.run(command)


async def test_a_plugin_goes_behind_the_gateway(installed: Reader) -> None:
    volume = {"name": "devicesock", "hostPath": {"path": "/var/lib/kubelet", "type": "Directory"}}
    container = {"name": "c", "image": SAMPLE, "command": ["sleep", "1000000"]}
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": [volume]}
    labels = {"app": SRIOV}
    plugin = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": SRIOV, "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }
    await installed.apply(plugin)
    try:
        await installed.follow("bridge.md", "1. Give the gateway the folder")
        await installed.follow("bridge.md", "2. Give the plugin the folder")
        there = await installed.run(f"kubectl -n kube-system get daemonset {SRIOV} -o jsonpath='{{..hostPath.path}}'")
        assert there == "/run/dp-bridge"
        await installed.follow("bridge.md", "Check that it worked")
    finally:
        await installed.run(f"kubectl -n kube-system delete daemonset {SRIOV}")
    await installed.gpus(GPUS)


async def test_alerts_are_set_up(installed: Reader) -> None:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    for plural, kind in CRDS.items():
        name = f"{plural}.monitoring.coreos.com"
        names = {"plural": plural, "singular": kind.lower(), "kind": kind}
        spec = {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}
        crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": name}}
        await installed.apply({**crd, "spec": spec})
        await installed.run(f"kubectl wait --for=condition=Established crd/{name} --timeout=60s")
    await installed.follow("alerts.md", "Set it up")
    [said] = await installed.follow("alerts.md", "Check that it worked")
    for kind in CRDS.values():
        assert f"{kind.lower()}.monitoring.coreos.com/" in said


async def test_partitions_of_mi300(reader: Reader) -> None:
    address = "0000:05:00.0"
    profile = {"amd.com/gpu": {"gpus": [{"uuid": address}]}, "amd.com/cpx_nps4": {"gpus": [{"uuid": "amdgpu_xcp_1"}]}}
    values = json.loads((reader.folder / "your-values.yaml").read_text())
    values["gateway"]["profile"] = yaml.safe_dump({"resources": profile})
    (reader.folder / "your-values.yaml").write_text(json.dumps(values))
    await reader.run(INSTALL)
    await reader.gpus(1, "amd.com/cpx_nps4")
    await reader.follow("amd.md", "Offer the partitions of MI300 GPUs")
    await reader.gpus(0, "amd.com/gpu")
    [undo] = re.findall(r"`(kubectl exec [^`]+ uncordon [^`]+)`", (ROOT / "docs/amd.md").read_text())
    await reader.run(undo, POD=await reader.pod())
    await reader.gpus(1, "amd.com/gpu")
    sample = reader.folder / "deploy/samples/amd.yaml"
    sample.write_text(sample.read_text().replace("[ls, -l, /dev/kfd, /dev/dri]", "[echo, ran]"))
    allocatable, run, log = commands("amd.md", "Check that it worked")
    assert "amd.com/cpx_nps4" in await reader.run(allocatable)
    await reader.run(run)
    await reader.run("kubectl wait --for=jsonpath='{.status.phase}'=Succeeded pod/gpu-sample --timeout=60s")
    assert await reader.run(log) == "ran\n"
