"""What Helm makes of the chart: run by `.ci/chart`, which brings Helm and the schemas (HELM, SCHEMAS in the environment)."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import VERSION
from tests.unit import test_commands
from tools import chart, manifests

ROOT = Path(__file__).resolve().parents[2]
VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
FOREIGN = {"PodMonitor", "PrometheusRule", "SecurityContextConstraints"}
"""Kinds that Kubernetes itself doesn't have."""
Said = Path | Mapping[str, object]
"""A values file, or values by their dotted keys."""
EVERYTHING: dict[str, object] = {
    "podMonitor.enabled": True,
    "prometheusRule.enabled": True,
    "networkPolicy.enabled": True,
    "dashboard.enabled": True,
    "openshift.scc": True,
    "gfd.enabled": True,
}


def brought(variable: str) -> str:
    """What `.ci/chart` brings. Without it nothing here can be judged, and nothing passes or is skipped."""
    if variable not in os.environ:
        pytest.fail(f"expected ${variable}: run .ci/chart, which builds Helm, fetches the schemas and runs these tests")
    return os.environ[variable]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = brought("HELM")
    return subprocess.run([program, *arguments], check=False, capture_output=True, text=True, timeout=60)


def given(*said: Said) -> Iterator[str]:
    for one in said:
        if isinstance(one, Path):
            yield f"--values={one}"
        else:
            yield from (f"--set-json={key}={json.dumps(value)}" for key, value in one.items())


def rendered(*said: Said, version: str = "1.37", source: Path = chart.CHART) -> dict[tuple[str, str], dict[str, Any]]:
    """Each object by its kind and component."""
    done = helm("template", "gpu", source, "--namespace=gpu", f"--kube-version={version}.0", *given(*said))
    assert not done.returncode, done.stderr
    found = {}
    for document in yaml.safe_load_all(done.stdout):
        if document:
            component = document.get("metadata", {}).get("labels", {}).get("app.kubernetes.io/component", "")
            found[document["kind"], component] = document
    return found


def daemonset(*said: Said, component: str = "nvidia", version: str = "1.37") -> dict[str, Any]:
    return rendered(*said, version=version)["DaemonSet", component]


def pod(*said: Said, component: str = "nvidia") -> dict[str, Any]:
    found: dict[str, Any] = daemonset(*said, component=component)["spec"]["template"]["spec"]
    return found


def env(*said: Said) -> dict[str, Any]:
    return {row["name"]: row.get("value") for row in pod(*said)["containers"][0]["env"]}


def test_commands_are_tested_with_what_the_pod_has() -> None:
    [container] = pod(test_commands.VALUES, component="simulated")["containers"]
    assert {row["name"]: row.get("value") for row in container["env"]} == test_commands.ENVIRONMENT
    assert (container["args"], "command" in container) == (test_commands.ARGUMENTS, False)


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the chart that renders its notes as an object: Helm itself shows them beside a cluster only."""
    copy = tmp_path_factory.mktemp("chart") / "device-plugin-gateway"
    shutil.copytree(chart.CHART, copy)
    text = (copy / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    shown = 'kind: Notes\nmetadata: {name: notes}\ntext: {{ include "notes" . | toJson }}\n'
    (copy / "templates" / "notes.yaml").write_text(f'{{{{- define "notes" -}}}}{text}{{{{- end -}}}}\n{shown}')
    return copy


def notes(noted: Path, *said: Said) -> str:
    text: str = rendered(*said, source=noted)["Notes", ""]["text"]
    return text


@functools.cache
def swagger(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(brought("SCHEMAS")) / f"{version}.json").read_text())
    return found


JUDGES: dict[tuple[str, str, str], Callable[[Any], object]] = {}


def judge(document: Mapping[str, Any], version: str) -> None:
    key = version, document["apiVersion"], document["kind"]
    if key not in JUDGES:
        JUDGES[key] = manifests.strict(swagger(version), document)
    JUDGES[key](document)


@pytest.mark.parametrize("version", manifests.CURRENT)
@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_peoples_values_render_unchanged_into_what_kubernetes_knows(path: Path, version: str) -> None:
    for document in rendered(path, version=version).values():
        judge(document, version)


@pytest.mark.parametrize("version", manifests.CURRENT)
@pytest.mark.parametrize("backend", ["nvidia", "amd", "simulated"])
def test_everything_that_is_opt_in_renders(backend: str, version: str) -> None:
    found = rendered({"gateway.backend": backend}, EVERYTHING, version=version)
    assert {kind for kind, _ in found} >= FOREIGN | {"NetworkPolicy", "ServiceAccount", "ConfigMap", "DaemonSet"}
    for (kind, _), document in found.items():
        if kind not in FOREIGN:
            judge(document, version)


@pytest.mark.parametrize("version", manifests.LEGACY)
def test_old_control_planes_know_what_they_get(version: str) -> None:
    judge(daemonset(version=version), version)


def test_every_value_of_theirs_is_accounted_for(noted: Path) -> None:
    """Ten files, of which one has all values of NVIDIA's chart; `unknown` is what the chart says of the others."""
    for path in VALUES:
        assert "no value of this chart" not in notes(noted, path), path.stem


IGNORED = {
    "per-node": ["nfd.*"],
    "mig-cdi": ["cdi.featureFlags"],
    "mps-left-over": ["configManager.*", "logVerbosity", "mps.*"],
    "labels-only": ["gfd.enableNodeFeatureApi", "nfd.*"],
    "whole-0.17": ["componentSelectorLabels.enabled", "mps.*", "nfd.*"],
}


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_what_is_ignored_is_said(noted: Path, path: Path) -> None:
    said = notes(noted, path).partition("Ignored:\n")[2].partition("\n\n")[0]
    assert sorted(line.partition(": ")[0] for line in said.splitlines()) == IGNORED.get(path.stem, [])


SELECTOR = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [SELECTOR]}}}
NODES: dict[str, tuple[dict[str, object], str]] = {
    "nvidia": ({}, "It runs on nodes with one of these labels: feature.node.kubernetes.io/pci-10de.present=true, "),
    "simulated": ({"gateway.backend": "simulated"}, "nodes with the label: device-plugin-gateway.io/simulated=true\n"),
    "affinity": (
        {"gateway.backend": "simulated", "affinity": AFFINITY},
        "the nodes that `affinity` of your values selects\n",
    ),
    "selector": ({"nodeSelector": {"pool": "a100"}}, "; all of `nodeSelector` too: pool=a100 \n"),
}


@pytest.mark.parametrize("name", NODES)
def test_the_notes_name_the_nodes_that_the_values_choose(noted: Path, name: str) -> None:
    values, says = NODES[name]
    assert says in f"{notes(noted, values)}\n"


def test_feature_discovery_is_of_the_newest_release_whose_values_are_taken() -> None:
    text = (chart.CHART / "values.yaml").read_text(encoding="utf-8")
    [newest] = re.findall(r"NVIDIA's chart \(0\.\d+ to (0\.\d+)\)", text)
    assert yaml.safe_load(text)["gateway"]["gfdImage"].rpartition(":v")[2].startswith(f"{newest}.")


def test_a_wrong_word_is_said(noted: Path) -> None:
    said = notes(noted, {"migStrategi": "none", "config.mapp": {}, "global": {"a": 1}})
    assert "migStrategi: no value" in said
    assert "config.mapp: no value" in said
    assert "global" not in said


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "tegra": ({"deviceDiscoveryStrategy": "tegra"}, "deviceDiscoveryStrategy: `auto` and `nvml`"),
    "namespace": ({"namespace": "gpu"}, "namespace: use `helm --namespace`"),
    "name-and-map": ({"config.name": "a", "config.map": {"a": "version: v1"}}, "name and map exclude each other"),
    "no-default": ({"config.map": {"a": "version: v1", "b": "version: v1"}}, "no configuration is the default"),
    "wrong-default": ({"config.map": {"a": "version: v1"}, "config.default": "b"}, "b is no key of config.map"),
    "default-of-nothing": (
        {"config.default": "a"},
        "config.default: there is no configuration to choose from. Set config.name",
    ),
    "mps": ({"config.map": {"a": "sharing: {mps: {resources: []}}"}}, "config.map.a: sharing.mps is refused"),
    "no-yaml": ({"config.map": {"a": "a: [1"}}, "config.map.a: is no YAML"),
    "mps-object": (
        {"config.map": {"a": {"sharing": {"mps": {"resources": []}}}}},
        "config.map.a: sharing.mps is refused",
    ),
    "no-mapping": ({"config.map": {"a": ["version: v1"]}}, "config.map.a: is no YAML"),
    "rocm": ({"dp.resources": {"limits": {}}, "node_selector": {"a": "b"}}, "dp.resources: a value of ROCm's chart"),
    "wrong-type": ({"migStrategy": 3}, "migStrategy"),
    "wrong-strategy": ({"migStrategy": "mixxed"}, "'none', 'single', 'mixed'"),
    "wrong-backend": ({"gateway.backend": "intel"}, "backend"),
    "wrong-dra": ({"gateway.dra": "both"}, "dra"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_reason(name: str) -> None:
    values, reason = REFUSED[name]
    done = helm(*TEMPLATE, *given(values))
    assert done.returncode
    assert reason in done.stderr


def test_a_configuration_may_be_an_object() -> None:
    text, said = "version: v1\n", {"version": "v1", "flags": {"plugin": {"deviceListStrategy": ["cdi-cri"]}}}
    found = rendered({"config.map": {"a": text, "b": said}, "config.default": "a"})
    [data] = [one["data"] for (kind, _), one in found.items() if kind == "ConfigMap"]
    assert data["a"] == text
    assert yaml.safe_load(data["b"]) == said
    [daemonset] = [one for (kind, _), one in found.items() if kind == "DaemonSet"]
    assert "driver-root" in {one["name"] for one in daemonset["spec"]["template"]["spec"]["volumes"]}


def test_the_default_namespace_is_refused_unless_it_is_allowed() -> None:
    assert "allowDefaultNamespace" in helm("template", "gpu", chart.CHART).stderr
    assert not helm("template", "gpu", chart.CHART, "--set", "allowDefaultNamespace=true").returncode


EQUAL: dict[str, tuple[dict[str, object], str]] = {
    "nvidia": ({}, "1.37"),
    "nvidia-cdi": ({"deviceListStrategy": "cdi-annotations,cdi-cri"}, "1.37"),
    "amd": ({"gateway.backend": "amd"}, "1.37"),
    "simulated": ({"gateway.backend": "simulated"}, "1.37"),
    "legacy-nvidia": ({}, "1.24"),
    "legacy-amd": ({"gateway.backend": "amd"}, "1.24"),
    "legacy-simulated": ({"gateway.backend": "simulated"}, "1.24"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_chart_and_kustomize_say_the_same(name: str) -> None:
    values, version = EQUAL[name]
    text = (manifests.RENDERED / f"{name}.yaml").read_text(encoding="utf-8")
    theirs = {document["kind"]: document for document in yaml.safe_load_all(text)}
    ours = {kind: document for (kind, _), document in rendered(values, version=version).items()}
    assert _same(ours["DaemonSet"]) == _same(theirs["DaemonSet"])
    assert ours.get("ConfigMap", {}).get("data") == theirs.get("ConfigMap", {}).get("data")
    assert set(ours) - {"ServiceAccount"} == set(theirs) - {"Namespace"}


def _same(document: dict[str, Any]) -> dict[str, Any]:
    """Without names, labels and the order of what has a name: they differ, and nothing else may."""
    spec = document["spec"]
    pod = spec["template"]["spec"]
    del spec["selector"], spec["template"]["metadata"]["labels"]
    pod.pop("serviceAccountName", None)
    pod["volumes"].sort(key=lambda volume: str(volume["name"]))
    for volume in pod["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = "any"
    (gateway,) = pod["containers"]
    gateway["env"].sort(key=lambda row: str(row["name"]))
    gateway["volumeMounts"].sort(key=lambda mount: str(mount["name"]))
    return spec if spec["template"]["metadata"] else {**spec, "template": {"spec": pod}}


def test_a_standby_differs_in_its_name_and_ports_only() -> None:
    values = {"gateway.standby": True, "gateway.dra": "on", "podMonitor.enabled": True, "networkPolicy.enabled": True}
    found = rendered(values)
    gateway, standby = found["DaemonSet", "nvidia"]["spec"]["template"]["spec"]["containers"]
    assert (gateway["name"], standby["name"]) == ("gateway", "standby")
    said = yaml.safe_dump({**gateway, "name": "standby"})
    ports = {"probes": "standby-probes", "metrics": "standby-metrics", "8081": "8082", "9400": "9401"}
    for ours, theirs in ports.items():
        said = said.replace(f": {ours}\n", f": {theirs}\n").replace(f": :{ours}\n", f": :{theirs}\n")
    assert yaml.safe_load(said) == standby
    [monitor] = [one for (kind, _), one in found.items() if kind == "PodMonitor"]
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["metrics", "standby-metrics"]
    [policy] = [one for (kind, _), one in found.items() if kind == "NetworkPolicy"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": 9400}, {"port": 9401}]


@pytest.mark.parametrize("on", [True, False])
def test_the_folder_of_node_features_is_mounted_only_for_who_writes_there(*, on: bool) -> None:
    found = pod({"gateway.nodeFeatures": on, "gateway.standby": True})
    folder = "/etc/kubernetes/node-feature-discovery/features.d"
    mounts = [[mount["mountPath"] for mount in one["volumeMounts"]] for one in found["containers"]]
    assert [folder in one for one in mounts] == [on, on]
    assert (folder in [volume.get("hostPath", {}).get("path") for volume in found["volumes"]]) is on
    assert "add" not in found["containers"][0]["securityContext"]["capabilities"]


def test_the_bridge_is_what_the_component_adds() -> None:
    text = (ROOT / "deploy/kustomize/components/bridge/daemonset.yaml").read_text(encoding="utf-8")
    added = yaml.safe_load(text)["spec"]["template"]["spec"]
    spec = pod({"gateway.backend": "none", "gateway.bridge": "/run/dp-bridge"}, component="none")
    [theirs], [ours] = added["containers"], spec["containers"]
    assert added["volumes"][0] in spec["volumes"]
    assert theirs["volumeMounts"][0] in ours["volumeMounts"]
    assert theirs["env"][0] in ours["env"]
    [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [one["operator"] for one in term["matchExpressions"]] == ["NotIn"]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TYPED = [
    pytest.param(page, line, id=f"{page.name}: {line}")
    for page in PAGES
    for line in dict.fromkeys(
        re.findall(
            r"\bhelm (?:install|upgrade|template) (gpu deploy/chart [^\n`]+)",
            page.read_text(encoding="utf-8").replace("\\\n", ""),
        )
    )
]


@pytest.mark.parametrize(("page", "line"), TYPED)
def test_a_command_of_helm_renders_with_the_values_that_the_page_shows(page: Path, line: str, tmp_path: Path) -> None:
    """Values of people's own are those of NVIDIA's chart with time-slicing; those of the page are in a block that names the file."""
    text = page.read_text(encoding="utf-8")
    shutil.copy(Path(__file__).parent / "values" / "time-slicing.yaml", tmp_path / "your-values.yaml")
    (tmp_path / "values.yaml").touch()
    for name, block in re.findall(r"^ +# (\S+\.yaml)\n((?: {4}.*\n|\n)+)", text, re.MULTILINE):
        (tmp_path / name).write_text(textwrap.dedent(block), encoding="utf-8")
    words = shlex.split(re.sub(r"\$IMAGE", "registry.example.com/gateway:1", line))
    words = [str(tmp_path / word) if (tmp_path / word).is_file() else word for word in words]
    ours = {"--reuse-values", "--create-namespace"}
    said = [word.replace("deploy/", f"{ROOT}/deploy/") for word in words if word not in ours]
    version = [] if "--kube-version" in said else ["--kube-version=1.37.0"]
    done = helm("template", *said, *version)
    assert not done.returncode, done.stderr
    assert "kind: DaemonSet" in done.stdout


ROWS: dict[str, tuple[dict[str, object], dict[str, str | None]]] = {
    "mig": ({"migStrategy": "mixed"}, {"MIG_STRATEGY": "mixed", "NVIDIA_MIG_MONITOR_DEVICES": "all"}),
    "no-mig": ({"migStrategy": "none"}, {"MIG_STRATEGY": "none", "NVIDIA_MIG_MONITOR_DEVICES": None}),
    "mig-in-map": ({"config.map": {"a": "flags: {migStrategy: single}"}}, {"NVIDIA_MIG_MONITOR_DEVICES": "all"}),
    "mig-in-object": (
        {"config.map": {"a": {"flags": {"migStrategy": "single"}}}},
        {"NVIDIA_MIG_MONITOR_DEVICES": "all"},
    ),
    "switches": (
        {"failOnInitError": False, "compatWithCPUManager": True, "gdsEnabled": True},
        {"FAIL_ON_INIT_ERROR": "false", "PASS_DEVICE_SPECS": "true", "GDS_ENABLED": "true", "MOFED_ENABLED": None},
    ),
    "node-features": ({"gateway.nodeFeatures": True}, {"GATEWAY_NODE_FEATURES": "true"}),
    "gpu-metrics": ({"gateway.gpuMetrics": True}, {"GATEWAY_GPU_METRICS": "true"}),
    "excluded": ({"gateway.excludeDevices": [3, "NVIDIA T400*"]}, {"GATEWAY_EXCLUDE_DEVICES": "3,NVIDIA T400*"}),
    "texts": (
        {
            "deviceIDStrategy": "index",
            "nvidiaDevRoot": "/d",
            "cdi.nvidiaHookPath": "/h",
            "deviceDiscoveryStrategy": "nvml",
            "nvidiaDriverCapabilities": "all",
            "gateway.logLevel": "debug",
        },
        {
            "DEVICE_ID_STRATEGY": "index",
            "NVIDIA_DEV_ROOT": "/d",
            "NVIDIA_CDI_HOOK_PATH": "/h",
            "DEVICE_DISCOVERY_STRATEGY": "nvml",
            "NVIDIA_DRIVER_CAPABILITIES": "all",
            "GATEWAY_LOG_LEVEL": "debug",
        },
    ),
    "other-switches": (
        {"gdrcopyEnabled": True, "mofedEnabled": False},
        {"GDRCOPY_ENABLED": "true", "MOFED_ENABLED": "false", "FAIL_ON_INIT_ERROR": None},
    ),
    "list": ({"deviceListStrategy": ["envvar", "cdi-cri"]}, {"DEVICE_LIST_STRATEGY": "envvar,cdi-cri"}),
    "driver-root": ({"nvidiaDriverRoot": "/run/nvidia/driver"}, {"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver"}),
    "more": (
        {"devicePlugin.containers": {"main": {"env": [{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}]}}},
        {"NVIDIA_DRIVER_CAPABILITIES": "all"},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_values_become_the_variables_that_they_are_in_their_chart(name: str) -> None:
    values, wanted = ROWS[name]
    found = env(values)
    assert {key: found.get(key) for key in wanted} == wanted


PLACES: dict[str, tuple[dict[str, object], str, object]] = {
    "runtime-class": ({"runtimeClassName": "nvidia"}, "runtimeClassName", "nvidia"),
    "secrets": ({"imagePullSecrets": [{"name": "a"}]}, "imagePullSecrets", [{"name": "a"}]),
    "node-selector": ({"nodeSelector": {"a": "b"}}, "nodeSelector", {"a": "b"}),
    "priority": ({"priorityClassName": "mine"}, "priorityClassName", "mine"),
    "tolerations": ({"tolerations": [{"operator": "Exists"}]}, "tolerations", [{"operator": "Exists"}]),
    "no-tolerations": ({"tolerations": []}, "tolerations", []),
    "its-own-taint": (
        {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}], "nodeReadiness.startupTaint": "a/b"},
        "tolerations",
        [{"operator": "Exists", "effect": "NoExecute"}, {"key": "a/b", "operator": "Exists"}],
    ),
    "host-network": ({"devicePlugin.enableHostNetwork": True}, "hostNetwork", True),
    "its-names": ({"devicePlugin.enableHostNetwork": True}, "dnsPolicy", "ClusterFirstWithHostNet"),
    "pod-security": (
        {"podSecurityContext": {"runAsUser": 0, "fsGroup": 7}},
        "securityContext",
        {
            "fsGroup": 7,
            "runAsUser": 0,
            "seLinuxOptions": {"type": "spc_t", "level": "s0"},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_value_of_the_pod_is_where_it_belongs(name: str) -> None:
    values, place, wanted = PLACES[name]
    assert pod(values)[place] == wanted


CONTAINER: dict[str, tuple[dict[str, object], str, object]] = {
    "resources": ({"resources": {"limits": {"memory": "1Gi"}}}, "resources", {"limits": {"memory": "1Gi"}}),
    "its-own-resources": (
        {"resources": {"limits": {"memory": "1Gi"}}, "devicePlugin.resources": {"limits": {"memory": "2Gi"}}},
        "resources",
        {"limits": {"memory": "2Gi"}},
    ),
    "security": ({"securityContext": {"privileged": True}}, "securityContext", {"privileged": True}),
    "pull-policy": ({"image.pullPolicy": "Always"}, "imagePullPolicy", "Always"),
    "mig": (
        {"migStrategy": "single"},
        "securityContext",
        {
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["SYS_ADMIN"], "drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    ),
}


@pytest.mark.parametrize("name", CONTAINER)
def test_a_value_of_the_container_is_where_it_belongs(name: str) -> None:
    values, place, wanted = CONTAINER[name]
    assert pod(values)["containers"][0][place] == wanted


def test_folders_of_the_host_are_those_that_were_named() -> None:
    values = {"gateway.stateDir": "/a", "gateway.devicePluginsDir": "/b", "nvidiaDriverRoot": "/c"}
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod(values)["volumes"]}
    assert (paths["state"], paths["device-plugins"], paths["driver-root"]) == ("/a", "/b", "/c")


def test_annotations_and_labels_are_those_that_were_named() -> None:
    found = daemonset({"podAnnotations": {"a": "b"}, "selectorLabelsOverride": {"app": "gpu"}})["spec"]
    assert found["template"]["metadata"]["annotations"] == {"a": "b"}
    assert found["selector"]["matchLabels"] == {"app": "gpu"}
    assert found["template"]["metadata"]["labels"]["app"] == "gpu"


def test_only_prometheus_reaches_the_metrics() -> None:
    found = rendered({"networkPolicy.enabled": True, "podMonitor.enabled": True})
    policy = found["NetworkPolicy", ""]["spec"]
    assert policy["ingress"] == [
        {
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "ports": [{"port": 9400}],
        }
    ]
    assert policy["egress"] == []
    labels = found["DaemonSet", "nvidia"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    monitor = found["PodMonitor", ""]["spec"]
    node = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
    assert monitor["podMetricsEndpoints"] == [{"port": "metrics", "interval": "30s", "relabelings": [node]}]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()


def test_the_alerts_and_the_dashboard_are_ours() -> None:
    found = rendered({"prometheusRule.enabled": True, "dashboard.enabled": True})
    rules = yaml.safe_load((ROOT / "deploy/alerts/device-plugin-gateway.rules.yaml").read_text())
    assert found["PrometheusRule", ""]["spec"] == rules
    there = rendered({"prometheusRule.enabled": True, "prometheusRule.docsUrl": "https://docs.example/"})
    [group] = there["PrometheusRule", ""]["spec"]["groups"]
    assert all(
        rule["annotations"]["runbook_url"].startswith("https://docs.example/alerts.html#") for rule in group["rules"]
    )
    shown = json.loads(found["ConfigMap", ""]["data"]["device-plugin-gateway.json"])
    told = set(re.findall(r"device_plugin_gateway_\w+", json.dumps(shown)))
    page = (ROOT / "docs/observability.md").read_text()
    assert told
    assert all(f"`{name.removesuffix('_bucket')}`" in page for name in told)


@pytest.mark.parametrize(
    ("backend", "more", "privileged", "capabilities"),
    [
        pytest.param("nvidia", {}, False, [], id="nvidia"),
        pytest.param("nvidia", {"migStrategy": "single"}, False, ["SYS_ADMIN"], id="mig"),
        pytest.param("nvidia", {"securityContext": {"privileged": True}}, True, [], id="their-own-context"),
        pytest.param("amd", {}, True, [], id="amd"),
    ],
)
def test_openshift_allows_what_the_pod_takes_and_no_more(
    backend: str, more: dict[str, object], privileged: bool, capabilities: list[str]
) -> None:
    values = {"gateway.backend": backend, **more}
    scc = rendered({"openshift.scc": True, **values})["SecurityContextConstraints", ""]
    assert scc["allowPrivilegedContainer"] is scc["allowPrivilegeEscalation"] is privileged
    assert scc["allowedCapabilities"] == capabilities
    assert scc["users"] == ["system:serviceaccount:gpu:gpu-device-plugin-gateway"]
    assert not scc["allowHostNetwork"]
    spec = pod(values, component=backend)
    takes = spec["containers"][0]["securityContext"]
    assert scc["readOnlyRootFilesystem"] is takes.get("readOnlyRootFilesystem", False)
    assert takes.get("capabilities", {}).get("add", []) == capabilities
    volumes = {next(key for key in one if key != "name") for one in spec["volumes"]}
    assert volumes <= set(scc["volumes"])


def test_feature_discovery_follows_the_label_by_nvidias_own_sidecar() -> None:
    found = rendered(ROOT / "tests/chart/values/per-node.yaml")
    spec = found["DaemonSet", "gpu-feature-discovery"]["spec"]["template"]["spec"]
    (first,), (sidecar, main) = spec["initContainers"], spec["containers"]
    assert [one["command"] for one in (first, sidecar, main)] == [
        ["config-manager"],
        ["config-manager"],
        ["gpu-feature-discovery"],
    ]
    told = {row["name"]: row.get("value") for row in sidecar["env"]}
    assert (told["PROCESS_TO_SIGNAL"], told["SIGNAL"], told["ONESHOT"]) == ("gpu-feature-discovery", "1", "false")
    assert spec["shareProcessNamespace"] is True
    assert found["ClusterRole", "gpu-feature-discovery"]["rules"][0]["verbs"] == ["get", "list", "watch"]
    assert found["ConfigMap", ""]["data"].keys() == {"whole", "mig-mixed", "shared"}


IMAGES: dict[str, tuple[dict[str, object], str]] = {
    "none": ({}, f"device-plugin-gateway:{VERSION}"),
    "theirs": (
        {"image.repository": "nvcr.io/nvidia/k8s-device-plugin", "image.tag": "v0.17.1"},
        f"device-plugin-gateway:{VERSION}",
    ),
    "a-mirror-of-theirs": ({"image.repository": "a.b/k8s-device-plugin"}, f"device-plugin-gateway:{VERSION}"),
    "ours": ({"image.repository": "a.b/gateway", "image.tag": "1"}, "a.b/gateway:1"),
    "ours-without-a-tag": ({"image.repository": "a.b/gateway"}, f"a.b/gateway:{VERSION}"),
    "whole": ({"image.repository": "a.b/gateway", "gateway.image": "c.d/gateway@sha256:0"}, "c.d/gateway@sha256:0"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_their_image_is_not_run_as_ours(name: str) -> None:
    values, wanted = IMAGES[name]
    assert pod(values)["containers"][0]["image"] == wanted


def test_an_affinity_of_theirs_leaves_the_nodes_of_the_host_service_out() -> None:
    host = {"key": "device-plugin-gateway.io/host-service", "operator": "NotIn", "values": ["true"]}
    for path in VALUES:
        if path.stem != "labels-only":
            spec = pod(path)
            terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert all(host in term["matchExpressions"] for term in terms["nodeSelectorTerms"]), path.stem
    preferred: dict[str, object] = {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    }
    spec = pod(preferred)
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchExpressions": [host]}]


def test_on_the_hosts_network_there_is_no_surge() -> None:
    rolling = daemonset({"devicePlugin.enableHostNetwork": True})["spec"]["updateStrategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 1}


def test_a_kubelet_elsewhere_moves_its_pod_resources_and_nothing_else() -> None:
    spec = pod({"gateway.kubeletRootDir": "/var/lib/k0s/kubelet"})
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
    assert paths["pod-resources"] == "/var/lib/k0s/kubelet/pod-resources"
    assert paths["device-plugins"] == "/var/lib/kubelet/device-plugins"


def test_there_is_no_token_where_no_feature_needs_one() -> None:
    found = rendered()
    assert found["DaemonSet", "nvidia"]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert found["ServiceAccount", ""]["automountServiceAccountToken"] is False
    assert not {kind for kind, _ in found} & {"ClusterRole", "ClusterRoleBinding"}


def test_the_nodes_label_chooses_among_configurations() -> None:
    found = rendered(ROOT / "tests/chart/values/per-node.yaml")
    spec = found["DaemonSet", "nvidia"]["spec"]["template"]["spec"]
    (one,) = spec["containers"]
    variables = {row["name"]: row.get("value", row.get("valueFrom")) for row in one["env"]}
    assert variables["CONFIG_FILE_SRCDIR"] == "/available-configs"
    assert variables["DEFAULT_CONFIG"] == "whole"
    assert variables["FALLBACK_STRATEGIES"] == "named,single"
    assert variables["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert {"name": "configs", "mountPath": "/available-configs", "readOnly": True} in one["volumeMounts"]
    assert {"name": "configs", "configMap": {"name": "gpu-device-plugin-gateway-configs"}} in spec["volumes"]
    assert spec["automountServiceAccountToken"] is True
    assert found["ClusterRole", ""]["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "watch"]}]
    assert found["ClusterRoleBinding", ""]["subjects"][0]["name"] == spec["serviceAccountName"]


def test_the_rights_are_those_of_kustomize() -> None:
    component = ROOT / "deploy/kustomize/components/api-server/account.yaml"
    (role,) = [one for one in yaml.safe_load_all(component.read_text()) if one["kind"] == "ClusterRole"]
    assert rendered({"config.name": "any"})["ClusterRole", ""]["rules"] == role["rules"]


TEMPLATE = ("template", "gpu", chart.CHART, "--namespace=gpu", "--kube-version=1.37.0")
NODE = {
    "nodeReadiness.condition": True,
    "nodeReadiness.startupTaint": "readiness.k8s.io/gpu",
    "nodeReadiness.events": True,
}


def test_a_gateway_that_tells_its_node_is_kept_to_it() -> None:
    done = helm(*TEMPLATE, *given(NODE))
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    for one in found:
        judge(one, "1.37")
    account = {"kind": "ServiceAccount", "name": "gpu-device-plugin-gateway", "namespace": "gpu"}
    bindings = [one for one in found if one["kind"].endswith("RoleBinding")]
    assert len(bindings) == 3
    assert all(one["subjects"] == [account] for one in bindings)
    (policy,) = [one for one in found if one["kind"] == "ValidatingAdmissionPolicy"]
    expression = policy["spec"]["matchConditions"][0]["expression"]
    assert expression.endswith("'system:serviceaccount:gpu:gpu-device-plugin-gateway'")
    (binding,) = [one for one in found if one["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert binding["spec"]["policyName"] == policy["metadata"]["name"] == "gpu-gpu-device-plugin-gateway-node-readiness"
    names = [(one["kind"], one["metadata"]["name"], one["metadata"].get("namespace")) for one in found]
    assert len(names) == len(set(names))


def test_a_gateway_that_tells_its_node_is_told_so() -> None:
    found = env(NODE)
    assert found["GATEWAY_NODE_CONDITION"] == found["GATEWAY_NODE_EVENTS"] == "true"
    assert found["GATEWAY_STARTUP_TAINT"] == "readiness.k8s.io/gpu"
    assert pod(NODE)["automountServiceAccountToken"] is True


def test_where_it_cannot_be_kept_to_its_node_it_is_refused() -> None:
    done = helm("template", "gpu", chart.CHART, "--namespace=gpu", "--kube-version=1.31.0", *given(NODE))
    assert "from Kubernetes 1.32 on" in done.stderr


BY_DRA = [("only", ("dra",)), ("on", ("dra", "dra-on"))]
"""What `gateway.dra` says, and the components of kustomize that give the same."""


@pytest.mark.parametrize(("mode", "components"), BY_DRA)
def test_by_dra_it_has_the_rights_and_policies_of_kustomize(mode: str, components: tuple[str, ...]) -> None:
    text = helm(*TEMPLATE, *given({"gateway.dra": mode})).stdout
    found = [one for one in yaml.safe_load_all(text) if one]
    for one in found:
        judge(one, "1.37")
    files = [ROOT / "deploy/kustomize/components/api-server/account.yaml"]
    for name in components:
        files += [ROOT / "deploy/kustomize/components" / name / file for file in ("rights.yaml", "policy.yaml")]
    theirs = json.dumps([_rights(one) for file in files for one in yaml.safe_load_all(file.read_text())])
    for before, after in (
        ("serviceaccount:device-plugin-gateway:device-plugin-gateway", "serviceaccount:gpu:gpu-device-plugin-gateway"),
        (
            'device-plugin-gateway", "namespace": "device-plugin-gateway"',
            'gpu-device-plugin-gateway", "namespace": "gpu"',
        ),
        ('"device-plugin-gateway', '"gpu-gpu-device-plugin-gateway'),
    ):
        theirs = theirs.replace(before, after)
    ours = [_rights(one) for one in found if one["kind"] not in ("DaemonSet", "ServiceAccount")]
    wanted = [one for one in json.loads(theirs) if one["kind"] != "ServiceAccount"]
    assert sorted(map(str, ours)) == sorted(map(str, wanted))


def _rights(document: dict[str, Any]) -> dict[str, Any]:
    """It without its labels, in the order that JSON has it in."""
    named = {**document, "metadata": document["metadata"]["name"]}
    sorted_: dict[str, Any] = json.loads(json.dumps(named, sort_keys=True))
    return sorted_


@pytest.mark.parametrize(
    ("said", "mode"), [("on", "on"), ('"on"', "on"), ("true", "on"), ("only", "only"), ("off", None), ("null", None)]
)
def test_the_mode_is_the_one_that_a_values_file_says(tmp_path: Path, said: str, mode: str | None) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(f"gateway: {{dra: {said}}}\n")
    assert env(values).get("GATEWAY_DRA") == mode
    assert pod(values)["automountServiceAccountToken"] is bool(mode)


@pytest.mark.parametrize("said", [True, False, None])
def test_parameters_are_refused_at_admission_only_if_that_is_asked_for(said: bool | None) -> None:
    more = {} if said is None else {"gateway.draAdmission": said}
    found = [one for one in yaml.safe_load_all(helm(*TEMPLATE, *given({"gateway.dra": "only", **more})).stdout) if one]
    policies = {one["metadata"]["name"]: one for one in found if one["kind"] == "ValidatingAdmissionPolicy"}
    bindings = [one for one in found if one["kind"] == "ValidatingAdmissionPolicyBinding"]
    own = "gpu-gpu-device-plugin-gateway-claims"
    assert (own in policies) is bool(said)
    assert [one["spec"]["policyName"] for one in bindings if one["metadata"]["name"] == own] == [own] * bool(said)
    for one in found:
        judge(one, "1.37")


@pytest.mark.parametrize("shares", ["devices", "capacity", None])
def test_how_claims_get_a_shared_gpu_is_what_a_values_file_says(tmp_path: Path, shares: str | None) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(f"gateway: {{dra: only, draShares: {shares or 'null'}}}\n")
    assert env(values).get("GATEWAY_DRA_SHARES") == (shares if shares == "capacity" else None)


@pytest.mark.parametrize("mode", ["only", "on"])
def test_by_dra_the_pod_has_what_kustomize_gives_it(mode: str) -> None:
    (patch,) = yaml.safe_load_all((ROOT / "deploy/kustomize/components/dra/daemonset.yaml").read_text())
    theirs, ours = patch["spec"]["template"]["spec"], pod({"gateway.dra": mode})
    assert all(one in ours["volumes"] for one in theirs["volumes"])
    assert all(one in ours["containers"][0]["volumeMounts"] for one in theirs["containers"][0]["volumeMounts"])


@pytest.mark.parametrize("mode", ["only", "on"])
def test_dra_is_refused_before_the_first_kubernetes_that_has_it_on(mode: str) -> None:
    assert "from Kubernetes 1.34 on" in helm(*TEMPLATE, "--kube-version=1.33.0", *given({"gateway.dra": mode})).stderr


def test_gpu_feature_discovery_runs_theirs() -> None:
    spec = daemonset(ROOT / "tests/chart/values/private-registry.yaml", component="gpu-feature-discovery")["spec"][
        "template"
    ]["spec"]
    (one,) = spec["containers"]
    assert one["image"] == "registry.example.com/mirror/nvidia/k8s-device-plugin:v0.17.1"
    assert {row["name"]: row.get("value") for row in one["env"]}["GFD_SLEEP_INTERVAL"] == "120s"


OPERATOR = "nvidia.com/gpu.deploy."


@pytest.mark.parametrize(
    ("mode", "label", "waited_for"),
    [("off", "client", None), *((mode, "dra-driver", "nvidia-dra-driver-kubelet-plugin") for mode in ("only", "on"))],
)
def test_beside_the_gpu_operator_it_has_the_place_of_what_it_serves(
    mode: str, label: str, waited_for: str | None
) -> None:
    """The driver manager takes clients away first, and a DRA plugin, which it knows by its label, last."""
    made = daemonset({"gateway.dra": mode, "nodeSelector": {f"{OPERATOR}{label}": "true"}})["spec"]
    assert made["template"]["spec"]["nodeSelector"] == {f"{OPERATOR}{label}": "true"}
    assert made["template"]["metadata"]["labels"].get("app") == waited_for
    assert "app" not in made["selector"]["matchLabels"], "a release that is there could not be upgraded"


@pytest.mark.parametrize("mode", ["only", "on"])
def test_a_driver_of_claims_is_not_taken_away_before_its_pods(mode: str) -> None:
    said = given({"gateway.dra": mode, "nodeSelector": {f"{OPERATOR}client": "true"}})
    assert "Select nvidia.com/gpu.deploy.dra-driver" in helm(*TEMPLATE, *said).stderr


@pytest.mark.parametrize("mode", ["only", "on"])
def test_amds_pods_have_no_label_of_nvidias(mode: str) -> None:
    made = daemonset({"gateway.dra": mode, "gateway.backend": "amd"}, component="amd")
    assert "app" not in made["spec"]["template"]["metadata"]["labels"]
