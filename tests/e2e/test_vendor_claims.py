"""The requests of NVIDIA's own GPU manifests, and a selector for each attribute and capacity, on a whole node with a fake NVML.

The manifests are those of tests/bats/specs in sigs.k8s.io/dra-driver-nvidia-gpu v0.5.0: what they ask for, in our own words. What they do
with CUDA, a stand-in does: it opens the GPUs that its container has.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import yaml

from gateway_lab.node import Node, pods
from gateway_lab.node.api import ApiError, Object
from gateway_lab.node.dra import DRIVER, EVERY, PATIENCE, POD, RESOURCES, SLICES, DraNode
from gateway_lab.node.installed import STATE
from gateway_lab.waiting import until
from tests.contract.test_claims import EMPTY_OF_AMD, MPS, REFUSED, gpu, interval, mig
from tests.fakes import amd, nvml
from tools.pages import between

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PAGE: Final = Path(__file__).parents[2] / "docs" / "nvidia-manifests.md"
BEGIN: Final = "<!-- The table is written by tests/e2e/test_vendor_claims.py. Do not edit it. -->\n"
END: Final = "<!-- Here the table ends. -->\n"
AMD: Final = "gpu.amd.com"
NS: Final = f"namespaces/{pods.NAMESPACE}"
CLAIMS, TEMPLATES = f"{RESOURCES}/{NS}/resourceclaims", f"{RESOURCES}/{NS}/resourceclaimtemplates"
DEPLOYMENTS, JOBS = f"/apis/apps/v1/{NS}/deployments", f"/apis/batch/v1/{NS}/jobs"
ROOT: Final = "run/nvidia/driver"
"""The driver's root on the node."""
SMI: Final = """#!/bin/sh
[ "$1" = compute-policy ] && echo "$5" > "${0%/usr/bin/nvidia-smi}/$3"
echo "GPU 0: a stand-in"
"""
OPENS: Final = """\
/usr/bin/nvidia-smi -L || exit 1
for node in /dev/nvidia[0-9]*; do : < $node && echo "open $node" || exit 1; done
"""
STAYS: Final = OPENS + "trap 'exit 0' TERM; while true; do sleep 1 & wait $!; done"
MIG: Final = "1g.10gb", "3g.40gb", "1g.10gb"


class Faked(DraNode):
    """A node with three H100 and a fourth one in MIG mode, or with AMD's GPUs, as fakes of their drivers show them."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.driver, self.fake = node.root / ROOT, node.folder / "fake"
        self.world: nvml.World | None = None
        self.more: Sequence[str] = ()
        self.serves: bool | None = None
        """Whether the gateway that runs offers shares; None: there is none for manifests."""

    def nvidia(self) -> None:
        """Have NVIDIA's GPUs."""
        shutil.rmtree(self.fake, ignore_errors=True)
        (self.fake / "proc").mkdir(parents=True)
        self.world = world = nvml.dgx(self.fake / "nvml", 4)
        for one in world.gpus:
            one.addressing = 1
        world.mig(3, *MIG)
        for one in world.gpus:
            real = self.fake / "sys/devices/pci0000:17" / one.pci.lower()
            real.mkdir(parents=True)
            link = self.fake / "sys/bus/pci/devices" / one.pci.lower()
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(real)
        world.sysfs(self.fake / "sys")
        world.capabilities(self.fake / "proc")
        (self.fake / "sys/module/nvidia").mkdir(parents=True)
        world.write()
        for board in world.gpus:
            self.node.make_device(f"/dev/nvidia{board.minor}")
            for part in board.instances:
                first = 100 * board.minor + 10 * part.gpu_instance + 3
                for number in (first, first + 1 + part.compute_instance):
                    self.node.make_device(f"/dev/nvidia-caps/nvidia-cap{number}")
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
            self.node.make_device(f"/dev/{name}")
        libraries, programs = self.driver / "usr/lib64", self.driver / "usr/bin"
        for folder in (libraries, programs):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(nvml.library(), libraries / "libnvidia-ml.so.1")
        (libraries / f"libcuda.so.{world.driver}").touch()
        (programs / "nvidia-smi").write_text(SMI)
        (programs / "nvidia-smi").chmod(0o755)
        hook = self.node.root / "usr/bin/nvidia-ctk"
        hook.unlink(missing_ok=True)
        hook.symlink_to("true")
        driver = (
            "--container-driver-root",
            str(self.driver),
            "--nvidia-driver-root",
            f"/{ROOT}",
            "--nvidia-dev-root",
            "/",
        )
        self.more = ("--backend", "nvidia", "--mig-strategy", "mixed", *driver)

    def amd(self) -> None:
        """Have AMD's GPUs, one of them in partitions."""
        shutil.rmtree(self.fake, ignore_errors=True)
        boards = amd.Board("0000:05:00.0", product="MI300X"), amd.Board("0000:46:00.0", 1, ("CPX", "NPS4"), 2)
        amd.Sysfs(self.fake / "sys", [*boards]).write()
        for number in range(1, 4):
            self.node.make_device(f"/dev/dri/card{number}")
            self.node.make_device(f"/dev/dri/renderD{127 + number}")
        self.node.make_device("/dev/kfd")
        self.more = ("--backend", "amd")

    def command(self, options: Sequence[str]) -> list[str]:
        """Return the command line of a gateway with these GPUs."""
        trees = [str(self.fake / name) for name in ("sys", "proc")]
        folders = "--socket-dir", str(self.node.plugins), "--state-dir", str(self.node.root / STATE)
        return [
            *("env", f"FAKE_NVML_WORLD={self.fake / 'nvml'}", sys.executable, "-m", "tests.e2e.faked"),
            *(
                *trees,
                str(self.node.root / "dev"),
                "--api",
                "auto",
                "--log-format",
                "json",
                *folders,
                *self.more,
                *options,
            ),
        ]

    async def prepare(self) -> None:
        """Give pods NVIDIA's and AMD's classes, too."""
        await super().prepare()
        mig = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'mig'"
        for name, expression in (("mig.nvidia.com", mig), (AMD, f"device.driver == '{AMD}'")):
            about = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name}}
            wanted = {**about, "spec": {"selectors": [{"cel": {"expression": expression}}]}}
            await self.api.apply(f"{RESOURCES}/deviceclasses/{name}", wanted)

    async def serve(self, *more: str, count: int) -> None:
        """Have one gateway with these options more, that offers so many devices."""
        self.serves = None
        await self.delete_all()
        await self.close()
        await self.start("only", *more)

        async def all_are() -> bool:
            return len(await self.offered()) == count

        await until(all_are, PATIENCE, every=EVERY)

    async def offered(self, driver: str = "") -> list[Object]:
        """Return the devices that are published, of one driver or of all."""
        found = (await self.api.get(SLICES))["items"]
        return [
            {**one, "driver": each["spec"]["driver"]}
            for each in found
            for one in each["spec"].get("devices", ())
            if driver in {"", each["spec"]["driver"]}
        ]

    def opened(self, pod: str, container: str) -> frozenset[str]:
        """Return the device nodes of GPUs that a container has opened."""
        uid = self._uids.get(pod, "*")  # An ended pod's log is there for a while.
        logs = (self.node.root / "var/log/pods").glob(f"{pods.NAMESPACE}_{pod}_{uid}/{container}/*.log")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return frozenset(line.rpartition("open ")[2] for line in lines if " open /dev/nvidia" in line)

    async def clear(self) -> None:
        """Delete all that a manifest made; return when nothing of it is prepared."""
        for place in (DEPLOYMENTS, JOBS):
            for one in (await self.api.get(place))["items"]:
                await self.api.delete(f"{place}/{one['metadata']['name']}?propagationPolicy=Background")
        await until(partial(self._have_no_pods), PATIENCE, every=EVERY)
        for place in (CLAIMS, TEMPLATES):
            for one in (await self.api.get(place))["items"]:
                await self.api.delete(f"{place}/{one['metadata']['name']}")
        await self.unprepared()

    async def _have_no_pods(self) -> bool:
        found = (await self.api.get(POD))["items"]
        for one in found:
            await self.api.delete(f"{POD}/{one['metadata']['name']}")
        return not found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def dra() -> AsyncIterator[Faked]:
    async with Faked.here() as one:
        yield one


# What manifests look like.


def request(name: str = "gpu", of: str = DRIVER, *expressions: str, **more: Any) -> Object:
    """Return a request for one device of a class."""
    selectors = {"selectors": [{"cel": {"expression": one}} for one in expressions]} if expressions else {}
    return {"name": name, "exactly": {"deviceClassName": of, **selectors, **more}}


def devices(*requests: Object, parameters: Object | None = None) -> Object:
    """Return the spec of a claim, with parameters for its first request."""
    config = [{"requests": [requests[0]["name"]], "opaque": {"driver": DRIVER, "parameters": parameters}}]
    return {"devices": {"requests": [*requests], **({"config": config} if parameters else {})}}


def parameters(kind: str, **sharing: Any) -> Object:
    """Return parameters of NVIDIA's driver."""
    return {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "sharing": sharing}


def pod_spec(
    claims: Mapping[str, Object], containers: Mapping[str, Sequence[Object]], script: str = STAYS, **more: Any
) -> Object:
    """Return the spec of a pod: its claims by name, and which of them each container has."""
    made = [
        {
            "name": name,
            "image": pods.IMAGE,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", script],
            "resources": {"claims": [*has]},
        }
        for name, has in containers.items()
    ]
    named = [{"name": name, **of} for name, of in claims.items()]
    about = {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
    return {**about, "containers": made, "resourceClaims": named, **more}


TEMPLATE: Final[Object] = {"resourceClaimTemplateName": "one"}
CLAIM: Final[Object] = {"resourceClaimName": "one"}
ONE_CONTAINER: Final[Mapping[str, Sequence[Object]]] = {"ctr": [{"name": "gpu"}]}
TWO_CONTAINERS: Final[Mapping[str, Sequence[Object]]] = {"ctr0": [{"name": "gpu"}], "ctr1": [{"name": "gpu"}]}


@dataclass(frozen=True)
class Manifest:
    """A manifest: what it asks for in words, and what it has the cluster make; ``see`` says what came of it."""

    asks: str
    claim: Object
    see: Callable[[Faked], Awaitable[str]]
    pods: Mapping[str, Object]
    shared: bool = False
    kind: str = "Pod"
    by_shares: bool = False


async def make(dra: Faked, one: Manifest) -> None:
    """Have the cluster make what a manifest asks for."""
    version = "resource.k8s.io/v1"
    if one.shared:
        wanted: Object = {
            "apiVersion": version,
            "kind": "ResourceClaim",
            "metadata": {"name": "one"},
            "spec": one.claim,
        }
        await dra.api.create(CLAIMS, wanted)
    else:
        about = {"apiVersion": version, "kind": "ResourceClaimTemplate", "metadata": {"name": "one"}}
        await dra.api.create(TEMPLATES, {**about, "spec": {"spec": one.claim}})
    for name, spec in one.pods.items():
        if one.kind == "Pod":
            about = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": pods.NAMESPACE}}
            await dra.create(name, {**about, "spec": spec})
            continue
        labels = {"app": name}
        inner = {"template": {"metadata": {"labels": labels}, "spec": spec}}
        if one.kind == "Job":
            job = {"completions": 2, "parallelism": 1, **inner}
            await dra.api.create(
                JOBS, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job}
            )
        else:
            two = {"replicas": 2, "selector": {"matchLabels": labels}, **inner}
            about = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}
            await dra.api.create(DEPLOYMENTS, {**about, "spec": two})


def runs(*containers: str, gpus: int = 1, each: int = 1) -> Callable[[Faked], Awaitable[str]]:
    """See that containers (``pod/container``) opened GPUs: so many in all, and each so many."""

    async def see(dra: Faked) -> str:
        found: dict[str, frozenset[str]] = {}

        def all_run() -> bool:
            found.update({one: dra.opened(*one.split("/")) for one in containers})
            return all(len(nodes) == each for nodes in found.values())

        try:
            await until(all_run, PATIENCE)
        except TimeoutError:
            raise AssertionError(f"{found}; {await events(dra)}") from None
        assert len(frozenset().union(*found.values())) == gpus, found
        return "runs"

    return see


async def events(dra: Faked) -> list[str]:
    """Return what was said of pods."""
    found = (await dra.api.get(f"/api/v1/{NS}/events"))["items"]
    return [one["message"] for one in found if one["involvedObject"]["kind"] == "Pod" and one["type"] == "Warning"]


def refused(words: str) -> Callable[[Faked], Awaitable[str]]:
    """See that pods are refused with these words."""

    async def see(dra: Faked) -> str:
        async def said() -> bool:
            return any(words in one for one in await events(dra))

        try:
            await until(said, PATIENCE, every=EVERY)
        except TimeoutError:
            raise AssertionError(f"{await events(dra)}") from None
        return f"refused: {words}"

    return see


async def no_match(dra: Faked) -> str:
    """See that a pod waits for a GPU that isn't there."""
    await dra.unschedulable("pod")
    return "stays Pending, as it must: no GPU matches"


async def job_completes(dra: Faked) -> str:
    """See that both pods of a Job succeed."""

    async def is_done() -> bool:
        return int((await dra.api.get(f"{JOBS}/pod"))["status"].get("succeeded", 0)) == 2

    await until(is_done, PATIENCE, every=EVERY)
    return "runs"


async def deployment_runs(dra: Faked) -> str:
    """See that both pods of a Deployment run, with a GPU each."""

    async def names() -> list[str]:
        return [one["metadata"]["name"] for one in (await dra.api.get(POD))["items"]]

    async def both_run() -> bool:
        found = [dra.opened(one, "ctr") for one in await names()]
        return len(found) == 2 and all(found) and len(frozenset().union(*found)) == 2

    await until(both_run, PATIENCE, every=EVERY)
    return "runs"


def ends(pod: str = "pod") -> Callable[[Faked], Awaitable[str]]:
    """See that a pod runs to its end."""

    async def see(dra: Faked) -> str:
        async def is_over() -> bool:
            return bool((await dra.api.get(f"{POD}/{pod}"))["status"].get("phase") == "Succeeded")

        await until(is_over, PATIENCE, every=EVERY)
        assert dra.opened(pod, "ctr")
        return "runs"

    return see


async def sliced(dra: Faked) -> str:
    """See that the pod runs on a GPU with another time slice, which is put back after it."""
    await runs("pod/ctr0", "pod/ctr1")(dra)
    slices = [path.read_text().strip() for path in dra.driver.glob("GPU-*")]
    assert slices.count("1") == 1, slices
    await dra.clear()
    slices = [path.read_text().strip() for path in dra.driver.glob("GPU-*")]
    assert {*slices} == {"0"}, slices
    return "runs"


CUDA: Final = {"script": OPENS, "restartPolicy": "Never"}
SMALL = "device.capacity['gpu.nvidia.com'].multiprocessors.isLessThan(quantity('30'))"
LARGE = "device.capacity['gpu.nvidia.com'].multiprocessors.isGreaterThan(quantity('50'))"
SOME = "device.capacity['gpu.nvidia.com'].multiprocessors.isGreaterThan(quantity('10'))"
MEMORY = "device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('10Gi'))"
PLAIN = devices(request())
POD_OF_ONE = {"pod": pod_spec({"gpu": TEMPLATE}, ONE_CONTAINER)}
CUDA_POD = {"pod": pod_spec({"gpu": TEMPLATE}, ONE_CONTAINER, **CUDA)}
TWO = {name: pod_spec({"gpu": TEMPLATE}, ONE_CONTAINER) for name in ("pod1", "pod2")}
SHARE_PODS = {name: pod_spec({"gpu": TEMPLATE}, ONE_CONTAINER, restartPolicy="Never") for name in ("pod1", "pod2")}
MANIFESTS: Final[Mapping[str, Manifest]] = {
    "gpu-simple-full": Manifest("a GPU", PLAIN, runs("pod/ctr"), POD_OF_ONE),
    "gpu-1pod-2cnt-1gpu": Manifest(
        "one claim for two containers",
        PLAIN,
        runs("pod/ctr0", "pod/ctr1"),
        {"pod": pod_spec({"gpu": TEMPLATE}, TWO_CONTAINERS)},
    ),
    "gpu-2pods-1gpu": Manifest(
        "one claim for two pods",
        PLAIN,
        runs("pod1/ctr", "pod2/ctr"),
        {name: pod_spec({"gpu": CLAIM}, ONE_CONTAINER) for name in ("pod1", "pod2")},
        shared=True,
    ),
    "gpu-2pods-2gpus": Manifest("a GPU for each of two pods", PLAIN, runs("pod1/ctr", "pod2/ctr", gpus=2), TWO),
    "gpu-two-claims-one-pod": Manifest(
        "two claims of one pod",
        PLAIN,
        runs("pod/ctr", gpus=2, each=2),
        {"pod": pod_spec({"a": TEMPLATE, "b": TEMPLATE}, {"ctr": [{"name": "a"}, {"name": "b"}]})},
    ),
    "pods-shared-gpu": Manifest(
        "one claim for many pods",
        PLAIN,
        runs(*(f"pod{number}/ctr" for number in range(6))),
        {f"pod{number}": pod_spec({"gpu": CLAIM}, ONE_CONTAINER, restartPolicy="Never") for number in range(6)},
        shared=True,
    ),
    "gpu-job-rct": Manifest("a Job of two pods, one after the other", PLAIN, job_completes, CUDA_POD, kind="Job"),
    "gpu-job-rct-parallel": Manifest("a Deployment of two pods", PLAIN, deployment_runs, POD_OF_ONE, kind="Deployment"),
    "gpu-pod-fail-restart": Manifest("a pod that ends", PLAIN, ends(), CUDA_POD),
    "gpu-cel-nomatch": Manifest(
        "a product that isn't there",
        devices(request("gpu", DRIVER, "device.attributes['gpu.nvidia.com'].productName == 'None'")),
        no_match,
        POD_OF_ONE,
    ),
    "gpu-cuda-busgrind": Manifest("a GPU for a CUDA program", PLAIN, ends(), CUDA_POD),
    "gpu-cuda-demo-suite": Manifest("a GPU for CUDA programs", PLAIN, ends(), CUDA_POD),
    "gpu-anymig": Manifest("any MIG device", devices(request("gpu", "mig.nvidia.com")), runs("pod/ctr"), POD_OF_ONE),
    "gpu-simple-mig": Manifest(
        "a MIG device, selected by multiprocessors and memory",
        devices(request("gpu", "mig.nvidia.com", f"{SOME} && {MEMORY}")),
        runs("pod/ctr"),
        POD_OF_ONE,
    ),
    "gpu-simple-mig-ts": Manifest(
        "the same with MigDeviceConfig, TimeSlicing",
        devices(
            request("gpu", "mig.nvidia.com", SOME), parameters=parameters("MigDeviceConfig", strategy="TimeSlicing")
        ),
        runs("pod/ctr"),
        POD_OF_ONE,
    ),
    "gpu-multiple-mig": Manifest(
        "a small and a large MIG device in one claim",
        devices(request("small", "mig.nvidia.com", SMALL), request("large", "mig.nvidia.com", LARGE)),
        runs("pod/ctr0", "pod/ctr1"),
        {
            "pod": pod_spec(
                {"gpu": TEMPLATE},
                {f"ctr{number}": [{"name": "gpu", "request": one}] for number, one in enumerate(("small", "large"))},
            )
        },
    ),
    "gpu-timeslicing": Manifest(
        "GpuConfig, TimeSlicing, interval Short",
        devices(
            request(),
            parameters=parameters("GpuConfig", strategy="TimeSlicing", timeSlicingConfig={"interval": "Short"}),
        ),
        sliced,
        {"pod": pod_spec({"gpu": TEMPLATE}, TWO_CONTAINERS)},
    ),
    "gpu-mps": Manifest(
        "GpuConfig, MPS",
        devices(
            request(),
            parameters=parameters("GpuConfig", strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 50}),
        ),
        refused("GpuConfig asks for MPS, which the gateway does not run"),
        {"pod": pod_spec({"gpu": TEMPLATE}, TWO_CONTAINERS)},
    ),
    "gpu-consumable-shares-integer": Manifest(
        "one share of a GPU for each of two pods",
        devices(request(capacity={"requests": {"shares": "1"}})),
        runs("pod1/ctr", "pod2/ctr"),
        SHARE_PODS,
        by_shares=True,
    ),
    "gpu-consumable-shares-memory": Manifest(
        "2 GiB of a GPU for each of two pods",
        devices(request(capacity={"requests": {"memory": "2Gi"}})),
        runs("pod1/ctr", "pod2/ctr"),
        SHARE_PODS,
        by_shares=True,
    ),
}
SEEN: Final[dict[str, str]] = {}
"""What came of each manifest."""
OFFERED: Final = 3 + len(MIG)


async def begin(dra: Faked, *, by_shares: bool) -> None:
    """Have a gateway that offers shared GPUs in shares, or GPUs that aren't shared; one that does so stays."""
    if dra.serves == by_shares:
        return
    dra.nvidia()
    file = dra.node.folder / "shares.json"
    shared = {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}
    file.write_text(json.dumps({"version": "v1", "sharing": shared}))
    await dra.serve(*(("--config-file", str(file), "--dra-shares", "capacity") if by_shares else ()), count=OFFERED)
    dra.serves = by_shares
    await dra.clear()


@pytest.mark.parametrize("name", MANIFESTS)
async def test_a_manifest_runs_or_is_refused_by_name(dra: Faked, name: str) -> None:
    one = MANIFESTS[name]
    await begin(dra, by_shares=one.by_shares)
    try:
        await make(dra, one)
        SEEN[name] = await one.see(dra)
    finally:
        await dra.clear()


async def test_the_page_says_what_came_of_each() -> None:
    assert len(MANIFESTS) == 20
    if SEEN.keys() != MANIFESTS.keys():
        pytest.skip("not all of them ran")
    rows = [f"| `{name}` | {one.asks} | {SEEN[name]} |\n" for name, one in MANIFESTS.items()]
    table = ["\n| manifest | asks for | result |\n|---|---|---|\n", *rows, "\n"]
    before = PAGE.read_text(encoding="utf-8")
    after = between(before, BEGIN, END, iter(table))
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(after, encoding="utf-8")
    else:
        assert before == after


# Selectors.


def expressions(device: Object) -> dict[str, str]:
    """Return an expression for each attribute and capacity of a device that is true of it, by name."""
    found = {}
    for name, value in device["attributes"].items():
        domain, _, own = name.rpartition("/")
        [(kind, is_so)] = value.items()
        said = f"device.attributes['{domain or device['driver']}'].{own}"
        found[name] = {
            "string": f"{said} == '{is_so}'",
            "int": f"{said} == {is_so}",
            "bool": f"{said} == {str(is_so).lower()}",
            "version": f"{said}.compareTo(semver('{is_so}')) == 0",
        }[kind]
    for name, value in device.get("capacity", {}).items():
        found[f"capacity {name}"] = (
            f"device.capacity['{device['driver']}'].{name}.compareTo(quantity('{value['value']}')) == 0"
        )
    return found


KUBERNETES: Final = frozenset(f"resource.kubernetes.io/{name}" for name in ("pciBusID", "pcieRoot", "numaNode"))
NVIDIAS: Final = KUBERNETES | {
    *("type", "uuid", "productName", "brand", "architecture", "cudaComputeCapability", "driverVersion"),
    *("cudaDriverVersion", "addressingMode", "parentUUID", "profile", "index", "minor", "parentIndex"),
    *("parentMinor", "resource", "pcieBusID", "capacity memory", "capacity multiprocessors", "capacity copyEngines"),
    *("capacity decoders", "capacity encoders", "capacity jpegEngines", "capacity ofaEngines"),
    "capacity memorySlice0",
}
AMDS: Final = KUBERNETES | {
    *("type", "uuid", "productName", "deviceID", "driverVersion", "driverVersionFull", "partitionProfile"),
    *("numaNode", "resource", "capacity memory", "capacity computeUnits", "capacity simdUnits"),
}


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
async def test_a_claim_can_select_by_each_attribute_and_capacity(dra: Faked, vendor: str) -> None:
    driver, wanted = {"nvidia": (DRIVER, NVIDIAS), "amd": (AMD, AMDS)}[vendor]
    getattr(dra, vendor)()
    await dra.serve(count=OFFERED if vendor == "nvidia" else 3)
    there = await dra.offered(driver)
    by_name: dict[str, tuple[Object, str]] = {}
    for one in there:
        by_name |= {name: (one, said) for name, said in expressions(one).items()}
    assert wanted <= by_name.keys(), wanted - by_name.keys()
    admin = {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}
    await dra.api.merge(f"/api/v1/namespaces/{pods.NAMESPACE}", admin)
    classes = {"gpu": DRIVER, "mig": "mig.nvidia.com", "amdgpu": AMD, "amdgpu-partition": AMD}
    expected: dict[str, tuple[str, str]] = {}
    for number, (one, said) in enumerate(by_name.values()):
        kind, uuid = (one["attributes"][name]["string"] for name in ("type", "uuid"))
        of = f"device.attributes['{driver}'].uuid == '{uuid}' && "  # Not all devices have what is asked for.
        # A claim for supervision takes its device from nobody, so that all of them can be allocated at once.
        name = f"select-{number}"
        spec = devices(request("gpu", classes[kind], of + said, adminAccess=True))
        about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}}
        await dra.api.create(CLAIMS, {**about, "spec": spec})
        pod = pod_spec({"gpu": {"resourceClaimName": name}}, {"ctr": []})
        about = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": pods.NAMESPACE}}
        await dra.create(name, {**about, "spec": pod})
        expected[name] = one["name"], said

    async def left() -> list[str]:
        given: dict[str, str] = {}
        for found in (await dra.api.get(CLAIMS))["items"]:
            for result in found.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()):
                given[found["metadata"]["name"]] = result["device"]
        return [said for name, (device, said) in expected.items() if given.get(name) != device]

    async def none_is_left() -> bool:
        return not await left()

    try:
        await until(none_is_left, 2 * PATIENCE, every=EVERY)
    except TimeoutError:
        raise AssertionError(f"not allocated: {await left()}") from None
    finally:
        await dra.clear()


# Admission.

POLICY: Final = Path(__file__).parents[2] / "deploy" / "chart" / "files" / "claims.yaml"
ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
POLICIES: Final = {
    "ValidatingAdmissionPolicy": f"{ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{ADMISSION}/validatingadmissionpolicybindings",
}
NAMED: Final = "device-plugin-gateway-claims"
ACCEPTED: Final[Sequence[Any]] = [
    gpu(),
    gpu({"strategy": "TimeSlicing"}),
    gpu({"strategy": "TimeSlicing", "timeSlicingConfig": {}, "mpsConfig": None}),
    *map(interval, ("Default", "Short", "Medium", "Long")),
    mig(),
    mig({"strategy": "TimeSlicing"}),
]


async def admitted(dra: Faked, place: str, kind: str, spec: Object) -> str:
    """Say why the API server refuses an object; '' if it takes it."""
    wanted = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": "tried"}, "spec": spec}
    try:
        await dra.api.create(f"{place}?dryRun=All", wanted)
    except ApiError as error:
        return str(error)
    return ""


async def test_the_policy_refuses_the_parameters_that_the_gateway_refuses(dra: Faked) -> None:
    wanted = {f"{POLICIES[one['kind']]}/{NAMED}": one for one in yaml.safe_load_all(POLICY.read_text())}
    mps, other = gpu(MPS), {"opaque": {"driver": "x.example.com", "parameters": gpu(MPS)}}

    def ours(given: Any, driver: str = DRIVER) -> Object:
        return {"opaque": {"driver": driver, "parameters": given}}

    async def claim(given: Any, driver: str = DRIVER) -> str:
        return await admitted(dra, CLAIMS, "ResourceClaim", _claim(ours(given, driver)))

    def _claim(config: Object) -> Object:
        return {"devices": {"requests": [request()], "config": [config]}}

    assert not await claim(mps)
    for path, one in wanted.items():
        await dra.api.apply(path, one)
    try:

        async def in_force() -> bool:
            return NAMED in await claim(mps)

        await until(in_force, PATIENCE, every=0.2)
        assert not [one for one in ACCEPTED if await claim(one)]
        said = {name: await claim(given) for name, (given, _) in REFUSED.items() if name not in {"null", "a surrogate"}}
        assert not [name for name, words in said.items() if not words]
        by_policy = [name for name, words in said.items() if NAMED in words]
        assert len(by_policy) > 15, said
        assert "the parameters ask for MPS, which the gateway does not run" in said["MPS"]
        assert not await claim(EMPTY_OF_AMD, AMD)
        assert "without members" in await claim(EMPTY_OF_AMD | {"sharing": {}}, AMD)
        assert not await admitted(dra, CLAIMS, "ResourceClaim", _claim(other))
        spec = {"spec": _claim(ours(mps))}
        assert NAMED in await admitted(dra, TEMPLATES, "ResourceClaimTemplate", spec)
        assert NAMED in await admitted(dra, f"{RESOURCES}/deviceclasses", "DeviceClass", {"config": [ours(mps)]})
        assert not await admitted(dra, f"{RESOURCES}/deviceclasses", "DeviceClass", {"config": [ours(gpu())]})
        assert not await admitted(dra, CLAIMS, "ResourceClaim", devices(request()))
    finally:
        for path in wanted:
            await dra.api.delete(path)
