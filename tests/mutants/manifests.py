"""The manifests: how an update goes, what the pod may do, where it runs, and how they are judged."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "Y1": "an update brings the new gateway before the old one goes, where the control plane knows how",
    "Y2": "the pod has no privilege that isn't stated, and no way to the API server",
    "Y3": "the pod sees the folders of the host where the gateway looks for them, and may be killed only by its own loop's fault",
    "Y4": "a node has one gateway: the host's, or that of one vendor, and a simulation only where somebody asked for it",
    "Y5": "a legacy control plane is told nothing that it doesn't know",
    "Y6": "a schema is taken by the letter",
}

_TEST = "tests/unit/test_manifests.py"
_NVIDIA = "deploy/manifests/nvidia.yaml"
_CDI = "deploy/manifests/nvidia-cdi.yaml"
_AMD = "deploy/manifests/amd.yaml"
_SIMULATED = "deploy/manifests/simulated.yaml"
_LEGACY = "deploy/manifests/legacy-nvidia.yaml"
_TOOL = "tools/manifests.py"

MUTANTS = (
    Mutant(
        "Y1",
        "the old gateway may go first",
        _NVIDIA,
        "maxUnavailable: 0",
        "maxUnavailable: 1",
        f"{_TEST}::test_in_an_update_the_new_gateway_comes_before_the_old_one_goes",
    ),
    Mutant(
        "Y1",
        "ready for a moment is long enough",
        _AMD,
        "successThreshold: 6",
        "successThreshold: 1",
        f"{_TEST}::test_in_an_update_the_new_gateway_comes_before_the_old_one_goes",
    ),
    Mutant(
        "Y1",
        "a port of the host, that two pods fight over",
        _NVIDIA,
        "- containerPort: 8081\n",
        "- containerPort: 8081\n          hostPort: 8081\n",
        f"{_TEST}::test_two_gateways_of_a_node_have_nothing_to_fight_over",
    ),
    Mutant(
        "Y1",
        "SELinux gives each pod categories of its own",
        _NVIDIA,
        "          level: s0\n",
        "",
        f"{_TEST}::test_selinux_keeps_neither_the_kubelet_nor_the_other_gateway_from_us",
    ),
    Mutant(
        "Y1",
        "on a busy node the gateway comes last",
        _NVIDIA,
        "cpu: 200m\n",
        "cpu: 10m\n",
        f"{_TEST}::test_its_memory_is_bounded_and_it_is_in_time_on_a_busy_node",
    ),
    Mutant(
        "Y2",
        "a capability is left",
        _NVIDIA,
        "            - ALL\n",
        "            - NET_RAW\n",
        f"{_TEST}::test_the_pod_may_do_nothing_but_be_root",
    ),
    Mutant(
        "Y2",
        "AMD's root file system can be written to",
        _AMD,
        "readOnlyRootFilesystem: true",
        "readOnlyRootFilesystem: false",
        f"{_TEST}::test_amd_is_privileged_and_still_writes_nowhere_but_to_what_is_mounted",
    ),
    Mutant(
        "Y2",
        "a token is mounted",
        _SIMULATED,
        "automountServiceAccountToken: false",
        "automountServiceAccountToken: true",
        f"{_TEST}::test_the_pod_has_no_way_to_the_api_server",
    ),
    Mutant(
        "Y2",
        "the node's root can be written to",
        _CDI,
        "- mountPath: /driver-root\n          name: driver-root\n          readOnly: true",
        "- mountPath: /driver-root\n          name: driver-root",
        f"{_TEST}::test_it_sees_these_folders_of_the_host_where_it_looks_for_them",
    ),
    Mutant(
        "Y2",
        "the NVIDIA runtime is asked for more than the image wants",
        _CDI,
        "value: utility",
        "value: compute,utility",
        f"{_TEST}::test_the_nvidia_runtime_is_asked_for_what_the_image_asks_for",
    ),
    Mutant(
        "Y3",
        "the state directory must be there already",
        _NVIDIA,
        "DirectoryOrCreate",
        "Directory",
        f"{_TEST}::test_it_sees_these_folders_of_the_host_where_it_looks_for_them",
    ),
    Mutant(
        "Y3",
        "a variable that nobody reads",
        _NVIDIA,
        "GATEWAY_PROBE_ADDRESS",
        "GATEWAY_PROBES_ADDRESS",
        f"{_TEST}::test_the_gateway_understands_what_it_is_told",
    ),
    Mutant(
        "Y3",
        "the kubelet asks on a port where nobody listens",
        _NVIDIA,
        "- containerPort: 8081",
        "- containerPort: 8080",
        f"{_TEST}::test_the_kubelet_asks_on_the_address_of_the_pod",
    ),
    Mutant(
        "Y3",
        "what isn't ready is killed",
        _NVIDIA,
        "path: /healthz",
        "path: /readyz",
        f"{_TEST}::test_the_kubelet_asks_on_the_address_of_the_pod",
    ),
    Mutant(
        "Y3",
        "a stall of ten seconds kills",
        _NVIDIA,
        "failureThreshold: 6",
        "failureThreshold: 1",
        f"{_TEST}::test_it_is_given_a_minute_before_it_is_killed",
    ),
    Mutant(
        "Y4",
        "a pod beside the host's gateway",
        _SIMULATED,
        "- key: device-plugin-gateway/host-service\n",
        "- key: device-plugin-gateway/no-service\n",
        f"{_TEST}::test_a_node_whose_host_runs_the_gateway_gets_no_pod",
    ),
    Mutant(
        "Y4",
        "a gateway of each vendor on one node",
        _AMD,
        'amd-gpu\n                operator: In\n                values:\n                - "true"\n'
        "              - key: device-plugin-gateway/host-service\n                operator: NotIn\n                values:\n"
        '                - "true"\n              - key: feature.node.kubernetes.io/pci-10de.present\n',
        'amd-gpu\n                operator: In\n                values:\n                - "true"\n'
        "              - key: device-plugin-gateway/host-service\n                operator: NotIn\n                values:\n"
        '                - "true"\n              - key: feature.node.kubernetes.io/pci-0000.present\n',
        f"{_TEST}::test_a_node_with_the_gpus_of_both_vendors_has_one_gateway",
    ),
    Mutant(
        "Y4",
        "a simulation wherever nobody refused it",
        _SIMULATED,
        "- key: device-plugin-gateway/simulated\n                operator: In",
        "- key: device-plugin-gateway/simulated\n                operator: NotIn",
        f"{_TEST}::test_any_of_these_labels_brings_it_to_a_node",
    ),
    Mutant(
        "Y5",
        "the word for seccomp is that of 1.11",
        _LEGACY,
        "docker/default",
        "runtime/default",
        f"{_TEST}::test_a_legacy_control_plane_is_told_nothing_it_does_not_know",
    ),
    Mutant(
        "Y5",
        "critical pods outside of kube-system",
        _LEGACY,
        "namespace: kube-system",
        "namespace: device-plugin-gateway",
        f"{_TEST}::test_before_1_17_critical_pods_live_in_kube_system",
    ),
    Mutant(
        "Y6",
        "an unknown field is taken",
        _TOOL,
        'closed.setdefault("additionalProperties", False)',
        "pass",
        f"{_TEST}::test_a_schema_is_taken_by_the_letter",
    ),
    Mutant(
        "Y6",
        "a percentage is no number",
        _TOOL,
        '{"type": ["integer", "string"]}',
        '{"type": "integer"}',
        f"{_TEST}::test_a_schema_is_taken_by_the_letter",
    ),
)
