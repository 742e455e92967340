"""``gateway doctor`` on made-up nodes with each container runtime: nothing is found on a healthy one, and each fault is by its own code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from gateway.doctor import checks
from gateway.telling.sides import SideStatus
from tests.unit.test_doctor import DRIVER, STATUS, Fake, well

__all__ = ["well"]

V2, V3 = '"io.containerd.grpc.v1.cri"', "'io.containerd.cri.v1.runtime'"
OPTIONS = '[plugins.%s.containerd.runtimes.nvidia.options]\nBinaryName = "/usr/bin/nvidia-container-runtime"\n'
CLASS = '[plugins.%s.containerd]\ndefault_runtime_name = "nvidia"\n'
IMPORTS = 'version = %d\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
KUBEVIRT = f"version = 3\n[plugins.{V3}]\ndevice_ownership_from_security_context = true\n"
GVISOR = f"version = 3\n[plugins.{V3}.containerd.runtimes.gvisor]\nruntime_type = 'io.containerd.runsc.v1'\n"
FOLDERS = f"version = 3\n[plugins.{V3}]\ncdi_spec_dirs = ['/etc/cdi', '/var/run/cdi', '/opt/cdi']\n"
CRIO = '[crio.runtime.runtimes.nvidia]\nruntime_path = "/usr/bin/nvidia-container-runtime"\n'
MAIN, DROP_INS = "etc/containerd/config.toml", "etc/containerd/conf.d"
NVIDIA2, NVIDIA3 = OPTIONS % V2 + CLASS % V2, OPTIONS % V3 + CLASS % V3
CDI = frozenset({"cdi-cri"})


@dataclass(frozen=True)
class MadeUp:
    """A node: what the kubelet reports as its runtime, the runtime's files, and how containers get their GPUs."""

    reported: str
    files: Mapping[str, str] = field(default_factory=dict)
    amd: bool = False
    strategies: frozenset[str] = frozenset({"envvar"})
    dra: bool = False

    def make(self, fake: Fake) -> Fake:
        shutil.rmtree(fake.root / "etc/containerd")
        for path, text in self.files.items():
            fake.write(path, text)
        fake.node = replace(fake.node, runtime=self.reported)
        fake.told["strategies"] = self.strategies
        if self.dra:
            fake.status = replace(STATUS, drivers=(DRIVER,))
        if self.amd:
            for number in (1, 2):
                fake.gpu(number, "0x1002", "amdgpu")
            shutil.rmtree(fake.root / "sys/module/nvidia")
            fake.classes = frozenset()
        return fake


HEALTHY: Mapping[str, MadeUp] = {
    "containerd 1.7, NVIDIA": MadeUp("containerd://1.7.27", {MAIN: f"version = 2\n{NVIDIA2}"}),
    "containerd 1.7, NVIDIA, drop-in": MadeUp(
        "containerd://1.7.27-k3s1",
        {MAIN: 'version = 2\nimports = ["conf.d/*.toml"]\n', f"{DROP_INS}/99-nvidia.toml": f"version = 2\n{NVIDIA2}"},
    ),
    "containerd 1.7, NVIDIA, CDI": MadeUp(
        "containerd://1.7.27", {MAIN: f"version = 2\n[plugins.{V2}]\nenable_cdi = true\n"}, strategies=CDI
    ),
    "containerd 1.7, AMD": MadeUp("containerd://1.7.27", {MAIN: "version = 2\n"}, amd=True),
    "containerd 2.0, NVIDIA, two drop-ins": MadeUp(
        "containerd://2.0.4",
        {
            MAIN: IMPORTS % 3,
            f"{DROP_INS}/10-nvidia.toml": f"version = 3\n{NVIDIA3}",
            f"{DROP_INS}/20-kubevirt.toml": KUBEVIRT,
        },
    ),
    "containerd 2.0, NVIDIA, gVisor in a drop-in": MadeUp(
        "containerd://2.0.4", {MAIN: IMPORTS % 3 + NVIDIA3, f"{DROP_INS}/gvisor.toml": GVISOR}
    ),
    "containerd 2.0, NVIDIA, the file of 1.7, CDI": MadeUp(
        "containerd://2.0.4",
        {MAIN: f'version = 2\n[plugins.{V2}]\nsandbox_image = "registry.k8s.io/pause:3.10"\n'},
        strategies=CDI,
    ),
    "containerd 2.0, AMD": MadeUp("containerd://2.0.4", {MAIN: "version = 3\n"}, amd=True),
    "containerd 2.2, NVIDIA, CDI folders and a drop-in": MadeUp(
        "containerd://2.2.0",
        {
            MAIN: IMPORTS % 3 + FOLDERS.removeprefix("version = 3\n"),
            f"{DROP_INS}/99-nvidia.toml": f"version = 3\n{NVIDIA3}",
        },
        strategies=CDI,
    ),
    "containerd 2.2, NVIDIA, DRA alone": MadeUp("containerd://2.2.0", {MAIN: "version = 3\n"}, dra=True),
    "CRI-O, NVIDIA, drop-ins": MadeUp(
        "cri-o://1.33.2",
        {
            "etc/crio/crio.conf": "[crio.runtime]\n",
            "etc/crio/crio.conf.d/10-crio.conf": '[crio.runtime]\ndefault_runtime = "crun"\n',
            "etc/crio/crio.conf.d/99-nvidia.conf": f'[crio.runtime]\ndefault_runtime = "nvidia"\n{CRIO}',
        },
    ),
    "CRI-O, NVIDIA, a hook": MadeUp(
        "cri-o://1.33.2",
        {
            "etc/crio/crio.conf": "[crio.runtime]\n",
            "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": "{}",
        },
    ),
    "CRI-O, NVIDIA, CDI": MadeUp("cri-o://1.33.2", {"etc/crio/crio.conf": "[crio.runtime]\n"}, strategies=CDI),
    "CRI-O, AMD": MadeUp("cri-o://1.33.2", {"etc/crio/crio.conf.d/10-crio.conf": "[crio.runtime]\n"}, amd=True),
}
FAULTY: Mapping[str, tuple[str, MadeUp]] = {
    "containerd 1.7: another drop-in takes the place of NVIDIA's": (
        "DPG0401",
        MadeUp(
            "containerd://1.7.27",
            {
                MAIN: IMPORTS % 2,
                f"{DROP_INS}/1.toml": f"version = 2\n{NVIDIA2}",
                f"{DROP_INS}/2.toml": f"version = 2\n[plugins.{V2}]\nsandbox_image = 'x'\n",
            },
        ),
    ),
    "containerd 1.7: CDI is off by default": (
        "DPG0402",
        MadeUp("containerd://1.7.27", {MAIN: "version = 2\n"}, strategies=CDI),
    ),
    "containerd 1.7: claims need CDI": ("DPG0402", MadeUp("containerd://1.7.27", {MAIN: "version = 2\n"}, dra=True)),
    "containerd 1.6 has no CDI, whatever its file says": ("DPG0402", MadeUp("containerd://1.6.36", strategies=CDI)),
    "containerd 2.0: CDI was switched off": (
        "DPG0402",
        MadeUp("containerd://2.0.4", {MAIN: f"version = 3\n[plugins.{V3}]\nenable_cdi = false\n"}, strategies=CDI),
    ),
    "containerd 2.2: the gateway's CDI folder isn't read": (
        "DPG0403",
        MadeUp("containerd://2.2.0", {MAIN: FOLDERS.replace("'/var/run/cdi', ", "")}, strategies=CDI),
    ),
    "CRI-O without NVIDIA's runtime": (
        "DPG0401",
        MadeUp("cri-o://1.33.2", {"etc/crio/crio.conf": "[crio.runtime]\n"}),
    ),
    "CRI-O 1.22 has no CDI": ("DPG0402", MadeUp("cri-o://1.22.5", strategies=CDI)),
}


def found(fake: Fake) -> dict[str, str]:
    return {result.code: result.seen for result in checks.judged(fake.look()) if result.seen}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_on_a_healthy_node(name: str, well: Fake) -> None:
    assert found(HEALTHY[name].make(well)) == {}


@pytest.mark.parametrize("name", FAULTY)
def test_a_finding_about_the_runtime_names_its_version(name: str, well: Fake) -> None:
    code, node = FAULTY[name]
    [(seen_code, words)] = found(node.make(well)).items()
    assert seen_code == code
    assert node.reported.partition("://")[2] in words


@pytest.mark.parametrize("reported", ["", "docker://27.1.0"])
def test_a_runtime_whose_version_is_unknown_is_not_seen(reported: str, well: Fake) -> None:
    node = MadeUp(reported, {MAIN: "version = 2\n"}, strategies=CDI).make(well)
    outcomes = {result.code: result.outcome for result in checks.judged(node.look())}
    assert {code: outcomes[code] for code in ("DPG0401", "DPG0402", "DPG0403")} == {
        "DPG0401": "unseen",
        "DPG0402": "unseen",
        "DPG0403": "unseen",
    }


@pytest.mark.parametrize(("module", "outcome"), [("containerd/v2", "ok"), ("containerd", "unseen")])
def test_the_program_tells_its_version_where_no_api_server_does(module: str, outcome: str, well: Fake) -> None:
    node = MadeUp("", {MAIN: "version = 2\n"}, strategies=CDI).make(well)
    node.write("usr/bin/containerd", f"{'x' * 1024 * 1024}path\tgithub.com/containerd/{module}/cmd/containerd\nmod")
    assert {one.code: one.outcome for one in checks.judged(node.look())}["DPG0402"] == outcome


@pytest.mark.parametrize("where", ["etc/cdi", "run/cdi"])
def test_the_gateways_own_cdi_file_is_not_judged(where: str, well: Fake) -> None:
    """It keeps devices that are gone, for containers that have them."""
    nodes = {"containerEdits": {"deviceNodes": [{"path": "/dev/nvidia7"}]}}
    own = {"cdiVersion": "0.5.0", "kind": "k8s.device-plugin.nvidia.com/gpu", "devices": [{"name": "GPU-7", **nodes}]}
    well.write(f"{where}/k8s.device-plugin.nvidia.com-gpu.json", json.dumps(own))
    assert found(well) == {}


PLATFORMS = {"dev/dxg": "DPG0313", "dev/nvhost-gpu": "DPG0314", "etc/nv_tegra_release": "DPG0314"}


@pytest.mark.parametrize("path", PLATFORMS)
def test_a_platform_on_which_the_gateway_offers_nothing_is_named(path: str, well: Fake) -> None:
    well.write(path, "")
    assert found(well) == {PLATFORMS[path]: f"/{path} is there"}


@pytest.fixture
def hgx(well: Fake) -> Fake:
    well.write("sys/bus/pci/devices/0000:a0:00.0/vendor", "0x10de\n")
    well.write("sys/bus/pci/devices/0000:a0:00.0/class", "0x068000\n")
    return well


def test_a_fabric_manager_that_runs_is_no_finding(hgx: Fake) -> None:
    assert set(found(hgx)) == {"DPG0315"}
    hgx.write("proc/900/comm", "nv-fabricmanage\n")
    assert found(hgx) == {}


def test_deleted_rights_are_one_finding_without_advice_about_a_feature_gate(well: Fake) -> None:
    well.node = replace(well.node, kubelet="v1.33.6")
    well.status = replace(STATUS, drivers=(replace(DRIVER, registered=False),))
    well.rights["list resourceslices"] = False
    words = found(well)
    assert {"DPG0606"} <= set(words) <= {"DPG0606", "DPG0110"}
    assert not any("DynamicResourceAllocation" in one for one in words.values())


def test_both_apis_need_the_runtime_that_the_plugin_needs(well: Fake) -> None:
    node = MadeUp("containerd://2.2.0", {MAIN: "version = 3\n"}, dra=True).make(well)
    sides = (SideStatus(id="GPU-0", side="plugin", words=""),)
    node.status = replace(node.status, sides=sides)
    assert set(found(node)) == {"DPG0401"}
