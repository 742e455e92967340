"""What the manifests promise the node, its operator and the kubelet: each promise a row, on what a cluster gets.

Whether Kubernetes knows their fields is for `.ci/manifests` to say.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from devices.gpu.simulated.profile import parse
from devices.policy import ListStrategy, Policy
from gateway import VERSION
from gateway.cli import main, run
from gateway.configuration.flags import FLAGS
from gateway.configuration.settings import SOCKET_DIR, STATE_DIR, Settings
from gateway.wires import log as observe
from gateway_lab.bench import busy
from tools import manifests
from tools.image.build import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
CURRENT = ("nvidia", "nvidia-cdi", "amd", "simulated")
LEGACY = ("legacy-nvidia", "legacy-amd", "legacy-simulated")
ALL = (*CURRENT, *LEGACY)
HOST_SERVICE = {"key": "device-plugin-gateway.io/host-service", "operator": "NotIn", "values": ["true"]}
CRITICAL = {"key": "CriticalAddonsOnly", "operator": "Exists"}


@functools.cache
def documents(name: str) -> dict[str, Any]:
    text = (ROOT / "deploy" / "manifests" / f"{name}.yaml").read_text(encoding="utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def daemon_set(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = documents(name)["DaemonSet"]["spec"]
    return spec


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = daemon_set(name)["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    [one] = pod(name)["containers"]
    found: dict[str, Any] = one
    return found


def mounts(name: str) -> dict[str, tuple[str, str, bool]]:
    """By the host's path: where it is in the pod, of which type, and whether it can be written to."""
    there = {mount["name"]: mount for mount in container(name)["volumeMounts"]}
    return {
        volume["hostPath"]["path"]: (
            there[volume["name"]]["mountPath"],
            volume["hostPath"].get("type", ""),
            not there[volume["name"]].get("readOnly", False),
        )
        for volume in pod(name)["volumes"]
        if "hostPath" in volume
    }


def variables(name: str) -> dict[str, str]:
    return {row["name"]: row["value"] for row in container(name)["env"] if "value" in row}


def settings(name: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What the gateway of a pod is told, as it understands it."""
    runs: list[Settings] = []

    def serve(found: Settings) -> int:
        runs.append(found)
        return 0

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setattr(observe, "configure", lambda *_: None)
    assert container(name)["args"] == ["run"]
    done = CliRunner().invoke(main.gateway, container(name)["args"], env=variables(name))
    assert done.exit_code == 0, done.output
    [one] = runs
    return one


def test_every_manifest_is_rendered_from_an_overlay() -> None:
    assert {path.stem for path in (ROOT / "deploy" / "manifests").iterdir()} == set(ALL)
    assert {manifest.path.stem for manifest in manifests.MANIFESTS} == set(ALL)
    overlays = ROOT / "deploy" / "kustomize" / "overlays"
    made = {path.parent.relative_to(overlays).as_posix() for path in overlays.rglob("kustomization.yaml")}
    assert {manifest.overlay for manifest in manifests.MANIFESTS} == made


@pytest.mark.parametrize("name", CURRENT)
def test_in_an_update_the_new_gateway_comes_before_the_old_one_goes(name: str) -> None:
    strategy = daemon_set(name)["updateStrategy"]
    assert strategy["type"] == "RollingUpdate"
    assert re.fullmatch(r"[1-9]\d?%", strategy["rollingUpdate"]["maxSurge"])
    assert strategy["rollingUpdate"]["maxUnavailable"] == 0
    # One round of the kubelet's node status, which is what the API server sees. By the probe: beside maxSurge the DaemonSet
    # controller may forget the end of minReadySeconds.
    probe = container(name)["readinessProbe"]
    assert probe["periodSeconds"] * (probe["successThreshold"] - 1) >= 10
    assert "minReadySeconds" not in daemon_set(name)


@pytest.mark.parametrize("name", LEGACY)
def test_a_control_plane_that_knows_no_surge_updates_one_node_after_the_other(name: str) -> None:
    assert daemon_set(name)["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}


@pytest.mark.parametrize("name", ALL)
def test_two_gateways_of_a_node_have_nothing_to_fight_over(name: str) -> None:
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod(name))
    assert not [port for port in container(name)["ports"] if "hostPort" in port]


@pytest.mark.parametrize("name", ALL)
def test_gateways_of_one_pod_know_that_they_are(name: str) -> None:
    [uid] = [row["valueFrom"] for row in container(name)["env"] if row["name"] == "POD_UID"]
    assert uid == {"fieldRef": {"fieldPath": "metadata.uid"}}


@pytest.mark.parametrize("name", ALL)
def test_the_component_standby_finds_what_it_replaces(name: str) -> None:
    path = ROOT / "deploy" / "kustomize" / "components" / "standby" / "container.yaml"
    for patch in yaml.safe_load(path.read_text(encoding="utf-8"))[1:]:
        one: Any = {"1": container(name)}
        for key in patch["path"].removeprefix("/spec/template/spec/containers/").split("/"):
            one = one[int(key) if isinstance(one, list) else key]
    assert [port["name"] for port in container(name)["ports"]] == ["probes", "metrics"]


@pytest.mark.parametrize("name", [name for name in ALL if "amd" not in name])
def test_the_pod_may_do_nothing_but_be_root(name: str) -> None:
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


@pytest.mark.parametrize("name", [name for name in ALL if "amd" in name])
def test_amd_is_privileged_and_still_writes_nowhere_but_to_what_is_mounted(name: str) -> None:
    assert container(name)["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True}
    assert mounts(name)["/sys"] == ("/sys", "Directory", False)


@pytest.mark.parametrize("name", ALL)
def test_the_pod_has_no_way_to_the_api_server(name: str) -> None:
    assert pod(name)["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod(name)
    kinds = set(documents(name)) - {"DaemonSet", "ConfigMap", "Namespace"}
    assert kinds == set()


@pytest.mark.parametrize("name", ALL)
def test_selinux_keeps_neither_the_kubelet_nor_the_other_gateway_from_us(name: str) -> None:
    assert pod(name)["securityContext"]["seLinuxOptions"] == {"type": "spc_t", "level": "s0"}


@pytest.mark.parametrize("name", CURRENT)
def test_seccomp_is_stated(name: str) -> None:
    assert pod(name)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("name", ALL)
def test_kubelets_that_refuse_a_word_about_user_namespaces_are_told_none(name: str) -> None:
    assert "hostUsers" not in pod(name)


@pytest.mark.parametrize("name", LEGACY)
def test_a_legacy_control_plane_is_told_nothing_it_does_not_know(name: str) -> None:
    assert "seccompProfile" not in pod(name)["securityContext"]
    annotations = daemon_set(name)["template"]["metadata"]["annotations"]
    # runtime/default, the word since 1.11, is refused by 1.9 and 1.10.
    assert annotations["seccomp.security.alpha.kubernetes.io/pod"] == "docker/default"


@pytest.mark.parametrize("name", LEGACY)
def test_before_1_17_critical_pods_live_in_kube_system(name: str) -> None:
    assert documents(name)["DaemonSet"]["metadata"]["namespace"] == "kube-system"
    assert "Namespace" not in documents(name)
    assert daemon_set(name)["template"]["metadata"]["annotations"]["scheduler.alpha.kubernetes.io/critical-pod"] == ""


@pytest.mark.parametrize("name", CURRENT)
def test_the_namespace_is_ours_and_allows_host_paths(name: str) -> None:
    namespace = documents(name)["Namespace"]["metadata"]
    assert namespace["name"] == documents(name)["DaemonSet"]["metadata"]["namespace"] == "device-plugin-gateway"
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


KUBELET = {
    str(SOCKET_DIR): (str(SOCKET_DIR), "Directory", True),
    str(STATE_DIR): (str(STATE_DIR), "DirectoryOrCreate", True),
}
RECORDS = "/var/lib/kubelet/pod-resources"
MORE: Mapping[str, Mapping[str, tuple[str, str, bool]]] = {
    "nvidia-cdi": {
        "/var/run/cdi": ("/var/run/cdi", "DirectoryOrCreate", True),
        "/": (Policy().container_driver_root, "Directory", False),
    },
    "amd": {
        "/sys": ("/sys", "Directory", False),
        "/var/lib/amd-metrics-exporter": ("/var/lib/amd-metrics-exporter", "DirectoryOrCreate", False),
    },
}


@pytest.mark.parametrize("name", ALL)
def test_it_sees_these_folders_of_the_host_where_it_looks_for_them(name: str) -> None:
    records = {RECORDS: (RECORDS, "DirectoryOrCreate" if name in LEGACY else "Directory", False)}
    assert mounts(name) == {**KUBELET, **records, **MORE.get(name.removeprefix("legacy-"), {})}


@pytest.mark.parametrize("name", ALL)
def test_the_gateway_understands_what_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = settings(name, monkeypatch)
    assert said.backend == name.removeprefix("legacy-").removesuffix("-cdi")
    assert said.metrics_address == ("", 9400)
    assert said.probe_address == ("", 8081)
    known = {variable for flag in FLAGS for variable in flag.variables}
    # These two are for NVIDIA's runtime.
    assert set(variables(name)) <= known | {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}


@pytest.mark.parametrize("name", ["nvidia", "nvidia-cdi", "legacy-nvidia"])
def test_the_nvidia_runtime_is_asked_for_what_the_image_asks_for(name: str) -> None:
    asked = {variable: value for variable, value in variables(name).items() if variable in ENVIRONMENT}
    assert asked == {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"}
    assert asked.items() <= ENVIRONMENT.items()


def test_cdi_reaches_kubelets_of_every_age(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = settings("nvidia-cdi", monkeypatch).policy
    assert policy.list_strategies == {ListStrategy.CDI_ANNOTATIONS, ListStrategy.CDI_CRI}
    assert policy.driver_root == "/"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("probe", "path"), [("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")])
def test_the_kubelet_asks_on_the_address_of_the_pod(
    name: str, probe: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert container(name)[probe]["httpGet"] == {"path": path, "port": "probes"}
    ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    said = settings(name, monkeypatch)
    assert said.probe_address is not None
    assert said.metrics_address is not None
    assert ports == {"probes": said.probe_address[1], "metrics": said.metrics_address[1]}


@pytest.mark.parametrize("name", ALL)
def test_it_is_given_a_minute_before_it_is_killed(name: str) -> None:
    probe = container(name)["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60


def terms(name: str) -> list[list[dict[str, Any]]]:
    required = pod(name)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [term["matchExpressions"] for term in required["nodeSelectorTerms"]]


@pytest.mark.parametrize("name", ALL)
def test_a_node_whose_host_runs_the_gateway_gets_no_pod(name: str) -> None:
    assert terms(name)
    assert all(HOST_SERVICE in term for term in terms(name))


NFD = "feature.node.kubernetes.io"
LABELS = {
    "nvidia": {
        f"{NFD}/pci-10de.present",
        f"{NFD}/pci-0300_10de.present",
        f"{NFD}/pci-0302_10de.present",
        "nvidia.com/gpu.present",
    },
    "amd": {f"{NFD}/amd-gpu"}
    | {f"{NFD}/pci-{vendor}.present" for vendor in ("1002", "0300_1002", "0302_1002", "0380_1002", "1200_1002")},
    # A simulation lands on no node that nobody named for it.
    "simulated": {"device-plugin-gateway.io/simulated"},
}


def labels(term: list[dict[str, Any]], operator: str) -> set[str]:
    """The labels of a term that must be "true" (In), or must not (NotIn)."""
    assert {row["operator"] for row in term} <= {"In", "NotIn"}
    assert all(row["values"] == ["true"] for row in term)
    return {row["key"] for row in term if row["operator"] == operator}


@pytest.mark.parametrize("name", ALL)
def test_any_of_these_labels_brings_it_to_a_node(name: str) -> None:
    wanted = [labels(term, "In") for term in terms(name)]
    assert all(len(term) == 1 for term in wanted)
    assert set[str]().union(*wanted) == LABELS[name.removeprefix("legacy-").removesuffix("-cdi")]


@pytest.mark.parametrize("name", ["amd", "legacy-amd"])
def test_a_node_with_the_gpus_of_both_vendors_has_one_gateway(name: str) -> None:
    assert all(labels(term, "NotIn") == {HOST_SERVICE["key"], *LABELS["nvidia"]} for term in terms(name))


TAINTS = {"nvidia": ["nvidia.com/gpu"], "amd": ["amd.com/gpu"], "simulated": []}


@pytest.mark.parametrize("name", ALL)
def test_it_tolerates_what_keeps_others_off_gpu_nodes(name: str) -> None:
    taints = TAINTS[name.removeprefix("legacy-").removesuffix("-cdi")]
    gpus = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
    assert pod(name)["tolerations"] == [CRITICAL, *gpus]


@pytest.mark.parametrize("name", ALL)
def test_it_is_among_the_last_to_be_evicted(name: str) -> None:
    assert pod(name)["priorityClassName"] == "system-node-critical"


@pytest.mark.parametrize("name", ALL)
def test_its_memory_is_bounded_and_it_is_in_time_on_a_busy_node(name: str) -> None:
    assert busy.MANIFEST == 200
    assert container(name)["resources"] == {
        "requests": {"cpu": "200m", "memory": "96Mi"},
        "limits": {"memory": "256Mi"},
    }


@pytest.mark.parametrize("name", ALL)
def test_the_image_is_the_one_that_is_built_here(name: str) -> None:
    assert container(name)["image"] == f"device-plugin-gateway:{VERSION}"


def told(heading: str) -> dict[str, str]:
    """The first two cells of a table of the page on security."""
    text = (
        (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    )
    return dict(re.findall(r"^\| `?([^|`]+?)`? \| ([^|]+) \|", text, re.MULTILINE))


def mounted(document: Any) -> Iterator[tuple[str, bool]]:
    """Each mount in a document, at any depth: where it is in the pod, and whether it can be written to."""
    if isinstance(document, dict) and "mountPath" in document:
        yield document["mountPath"], not document.get("readOnly", False)
    for one in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from mounted(one)


def test_the_page_on_security_names_each_mount_of_the_node() -> None:
    files = [
        *(ROOT / "deploy/manifests").glob("*.yaml"),
        *(ROOT / "deploy/kustomize/components").glob("*/daemonset.yaml"),
    ]
    found = {mount for file in files for mount in mounted([*yaml.safe_load_all(file.read_text(encoding="utf-8"))])}
    found = {mount for mount in found if not mount[0].startswith("/etc/device-plugin-gateway")}  # of a ConfigMap
    page = {path: access for path, access in told("What each mount is for").items() if path.startswith("/")}
    chart = (ROOT / "deploy/chart/templates/_container.tpl").read_text(encoding="utf-8")
    assert {*re.findall(r"mountPath: (/\S+)", chart)} - {
        "/etc/device-plugin-gateway",
        "/available-configs",
    } <= page.keys()
    assert found == {(path, access.startswith("write")) for path, access in page.items()}


def test_the_page_on_security_names_each_privilege() -> None:
    chart = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "deploy/chart/templates").iterdir())
    asked = {*re.findall(r'"?add"?:? ?\(?(?:list )?\[?"?([A-Z_]+)', chart)}
    privileged = {name for name in ALL if container(name)["securityContext"].get("privileged")}
    page = told("What root is needed for")
    assert asked == {"SYS_ADMIN"} <= page.keys()
    assert privileged == {"amd", "legacy-amd"}
    assert "`amd`" in page["privileged"]


def test_daemon_sets_of_several_overlays_do_not_take_each_others_pods() -> None:
    selectors = [daemon_set(name)["selector"]["matchLabels"] for name in ("nvidia", "amd", "simulated")]
    assert all(selectors.count(selector) == 1 for selector in selectors)
    for name in ALL:
        assert daemon_set(name)["selector"]["matchLabels"] == daemon_set(name)["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", ["simulated", "legacy-simulated"])
def test_the_profile_is_one_and_is_where_the_gateway_looks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = documents(name)["ConfigMap"]
    [(file, text)] = config["data"].items()
    assert set(parse(text.encode(), file)) == {"nvidia.com/gpu"}
    [volume] = [volume for volume in pod(name)["volumes"] if "configMap" in volume]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    [mount] = [mount for mount in container(name)["volumeMounts"] if mount["name"] == volume["name"]]
    # As a folder: of a file that is mounted by itself (subPath), no edit ever arrives.
    assert settings(name, monkeypatch).profile == f"{mount['mountPath']}/{file}"


SWAGGER: Mapping[str, Any] = {
    "definitions": {
        "Whole": {
            "type": "object",
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": {"type": "object"},
                "spec": {"$ref": "#/definitions/Part", "default": {}},
            },
            "x-kubernetes-group-version-kind": [{"group": "g", "version": "v1", "kind": "Whole"}],
        },
        "Part": {
            "type": "object",
            "required": ["count"],
            "properties": {
                "count": {"type": "integer", "format": "int32"},
                "surge": {"type": "string", "format": "int-or-string"},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "format": {"type": "array", "items": {"$ref": "#/definitions/Part"}},
            },
        },
    }
}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("{count: 1, surge: 10%}", ""),
        ("{count: 1, surge: 1}", ""),
        ("{count: 1, surge: [1]}", "spec.surge must be integer or string"),
        ("{count: 1, labels: {any: x}}", ""),
        ("{count: 1, labels: {any: 1}}", "spec.labels.any must be string"),
        ("{count: 1, colour: red}", "spec must not contain {'colour'} properties"),
        ("{count: 1, format: [{count: 1, colour: red}]}", r"spec.format\[0\] must not contain {'colour'} properties"),
        ("{count: one}", "spec.count must be integer"),
        ("{}", r"spec must contain \['count'\] properties"),
    ],
)
def test_a_schema_is_taken_by_the_letter(spec: str, says: str) -> None:
    text = f"{{apiVersion: g/v1, kind: Whole, metadata: {{name: x}}, spec: {spec}}}"
    assert [bool(re.search(says, problem)) for problem in manifests.problems(text, SWAGGER)] == ([True] if says else [])


def test_a_kind_that_a_version_has_not_is_told() -> None:
    text = "{apiVersion: g/v2, kind: Whole, metadata: {name: x}}"
    assert list(manifests.problems(text, SWAGGER)) == ["Whole x: expected the kind Whole in g/v2, and there is none"]


# Components, which whoever needs them adds.


def component(name: str) -> list[dict[str, Any]]:
    folder = ROOT / "deploy" / "kustomize" / "components" / name
    return [
        document
        for path in sorted(folder.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def rights(name: str) -> list[tuple[str, list[str], list[str]]]:
    return [
        (document["kind"], rule["resources"], rule["verbs"])
        for document in component(name)
        for rule in document.get("rules", ())
    ]


def test_who_reads_the_nodes_label_may_read_nodes_and_nothing_else() -> None:
    assert rights("api-server") == [("ClusterRole", ["nodes"], ["get", "watch"])]


def test_who_writes_its_node_is_held_to_it() -> None:
    assert rights("node-readiness") == [
        ("ClusterRole", ["nodes", "nodes/status"], ["patch"]),
        ("Role", ["events"], ["create"]),
    ]
    [policy] = [one for one in component("node-readiness") if one["kind"] == "ValidatingAdmissionPolicy"]
    [binding] = [one for one in component("node-readiness") if one["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert policy["spec"]["failurePolicy"] == "Fail"
    covered = {
        resource for rule in policy["spec"]["matchConstraints"]["resourceRules"] for resource in rule["resources"]
    }
    assert covered == {"nodes", "nodes/status", "events"}
    [account] = [one for one in component("api-server") if one["kind"] == "ServiceAccount"]
    name, namespace = account["metadata"]["name"], account["metadata"]["namespace"]
    [condition] = policy["spec"]["matchConditions"]
    assert condition["expression"] == f"request.userInfo.username == 'system:serviceaccount:{namespace}:{name}'"
    assert policy["spec"]["validations"][0]["expression"] == "variables.own != ''"
