"""What the node's daemons are told: flags, and files in the node's /etc.

Nothing is reachable from outside: the network namespace has a loopback and pods' own links. The credentials are made anew
for each node and die with it. Every setting that isn't a path or an address says why it is there.
"""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.levels import minor_version
from gateway_lab.node.image import PAUSE
from gateway_lab.node.machine import ADDRESS, HOSTNAME, SERVICE

_DRA = 34
"""The kubelet, 1.N, from which it has dynamic resource allocation by default."""
_ETCD = "http://127.0.0.1:2379"
_KEYS = "/etc/kubernetes"

ETCD: Sequence[str] = (
    "etcd",
    "--data-dir=/var/lib/etcd/data",
    f"--listen-client-urls={_ETCD}",
    f"--advertise-client-urls={_ETCD}",
    "--listen-peer-urls=http://127.0.0.1:2380",
    "--unsafe-no-fsync",  # nothing in it outlives the node
)

CONTROL_PLANE: Mapping[str, Sequence[str]] = {
    "kube-apiserver": (
        f"--etcd-servers={_ETCD}",
        "--secure-port=443",  # the service's own: nobody translates it
        f"--advertise-address={ADDRESS}",
        f"--tls-cert-file={_KEYS}/server.crt",
        f"--tls-private-key-file={_KEYS}/server.key",
        "--cert-dir=/run/kube-apiserver",
        "--service-cluster-ip-range=10.96.0.0/24",
        f"--service-account-issuer=https://{HOSTNAME}",
        f"--service-account-signing-key-file={_KEYS}/server.key",
        f"--service-account-key-file={_KEYS}/server.crt",
        f"--token-auth-file={_KEYS}/tokens.csv",
        "--allow-privileged=true",  # device plugins of others ask for it
        "--authorization-mode=Node,RBAC",
        "--kubelet-preferred-address-types=InternalIP",
        # Kubelets below 1.34 know no newer one of claims and slices.
        "--runtime-config=resource.k8s.io/v1beta1=true",
        "--endpoint-reconciler-type=none",  # there is no kube-proxy that would ask for endpoints
        "--v=1",
    ),
    "kube-controller-manager": (
        f"--kubeconfig={_KEYS}/admin.conf",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--service-account-private-key-file={_KEYS}/server.key",
        f"--root-ca-file={_KEYS}/server.crt",
        "--v=1",
    ),
    "kube-scheduler": (
        f"--kubeconfig={_KEYS}/admin.conf",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--v=1",
    ),
}

_KUBELET: Mapping[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",  # there is no systemd
    "failSwapOn": False,
    "failCgroupV1": False,  # 1.35 and later refuse cgroup v1 otherwise
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    "staticPodPath": f"{_KEYS}/manifests",
    "fileCheckFrequency": "1s",
    "makeIPTablesUtilChains": False,
    # A test machine's disk may be as full as it likes.
    "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    "imageGCHighThresholdPercent": 100,
    "imageGCLowThresholdPercent": 99,
    "resolvConf": "",
}

_NETWORK: Mapping[str, Any] = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni",
                "ranges": [[{"subnet": "10.244.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}

_CONTAINERD = f"""\
version = 2
oom_score = 0
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
  disable_apparmor = true
  # A machine may withhold CAP_SYS_RESOURCE, and then nobody can lower a container's score.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
"""


def gates(kubelet: str) -> Sequence[str]:
    """Give the flags of a kubelet of that version that make it one with dynamic resource allocation: below 1.34 it is off."""
    return ("--feature-gates=DynamicResourceAllocation=true",) if minor_version(kubelet) < _DRA else ()


def write(root: Path) -> None:
    """Writes the files into the node's /etc, with new keys and tokens.

    Args:
        root: The node's root folder, as seen from here.
    """
    folder = root / "etc/kubernetes"
    folder.joinpath("manifests").mkdir(parents=True)
    root.joinpath("etc/machine-id").write_text(f"{secrets.token_hex(16)}\n")
    certificate = _certificate(root)
    tokens = {"admin": secrets.token_hex(16), "kubelet": secrets.token_hex(16)}
    folder.joinpath("tokens.csv").write_text(
        f'{tokens["admin"]},admin,admin,"system:masters"\n'
        f'{tokens["kubelet"]},system:node:{HOSTNAME},{HOSTNAME},"system:nodes"\n'
    )
    folder.joinpath("admin.token").write_text(tokens["admin"])
    for name, token in tokens.items():
        folder.joinpath(f"{name}.conf").write_text(json.dumps(_kubeconfig(certificate, token)))
    folder.joinpath("kubelet.yaml").write_text(json.dumps(_KUBELET))
    for path, text in (("cni/net.d/pods.conflist", json.dumps(_NETWORK)), ("containerd/config.toml", _CONTAINERD)):
        target = root / "etc" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _certificate(root: Path) -> bytes:
    """One key for all: the API server shows its certificate, and signs service accounts' tokens with it."""
    names = f"subjectAltName=IP:127.0.0.1,IP:{ADDRESS},IP:{SERVICE},DNS:localhost,DNS:{HOSTNAME}"
    subprocess.run(
        [
            "chroot", root, "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc",
            "-keyout", f"{_KEYS}/server.key", "-out", f"{_KEYS}/server.crt", "-days", "2", "-subj", f"/CN={HOSTNAME}",
            "-addext", names, "-addext", "keyUsage=critical,digitalSignature,keyCertSign",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return root.joinpath("etc/kubernetes/server.crt").read_bytes()


def _kubeconfig(certificate: bytes, token: str) -> Mapping[str, Any]:
    cluster = {"server": "https://127.0.0.1", "certificate-authority-data": base64.b64encode(certificate).decode()}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "node", "cluster": cluster}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "node", "context": {"cluster": "node", "user": "user"}}],
        "current-context": "node",
    }
