"""How the API server is reached: as a pod is told, or by a kubeconfig."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from gateway.kubernetes import access
from gateway.kubernetes.access import Access, AccessError
from gateway.kubernetes.client import Client
from tests.fakes.apiserver import ApiServer
from tests.unit.kubernetes import authority, node, server

__all__ = ["authority", "server"]

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def test_a_pod_is_told_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    expected = Access("10.96.0.1", 443, tmp_path / "ca.crt", token=tmp_path / "token")
    assert access.in_cluster(POD, tmp_path) == expected


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "which every pod has"),
        ({"KUBERNETES_SERVICE_HOST": "x"}, "which every pod has"),
        ({"KUBERNETES_SERVICE_PORT": "443"}, "which every pod has"),
        (POD | {"KUBERNETES_SERVICE_PORT": "tcp://10.96.0.1:443"}, "which every pod has"),
        (POD, "automountServiceAccountToken"),
    ],
)
def test_without_a_way_it_says_what_to_do(tmp_path: Path, environ: dict[str, str], told: str) -> None:
    with pytest.raises(AccessError, match=f"{told}.*--kubeconfig"):
        access.in_cluster(environ, tmp_path)


def kubeconfig(path: Path, user: dict[str, Any], **cluster: Any) -> Path:
    cluster = {"server": "https://api.example:6443/k8s", "certificate-authority-data": "Y2E=", **cluster}
    content = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "other", "cluster": {"server": "x"}}, {"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("user", "cluster", "expected"),
    [
        ({"token": "t"}, {}, {"token": b"t", "ca": b"ca"}),
        ({"tokenFile": "bound/token"}, {}, {"token": Path("bound/token")}),
        ({"token": "t"}, {"certificate-authority": "/etc/ca.crt"}, {"ca": Path("/etc/ca.crt")}),
        ({"token": "t"}, {"tls-server-name": "kubernetes"}, {"server_name": "kubernetes"}),
        ({"token": "t"}, {"server": "https://10.0.0.1"}, {"host": "10.0.0.1", "port": 443, "base": ""}),
        ({"token": "t"}, {}, {"host": "api.example", "port": 6443, "base": "/k8s"}),
        (
            {"client-certificate": "pki/client.pem", "client-key": "pki/client.pem"},
            {},
            {"certificate": Path("pki/client.pem"), "key": Path("pki/client.pem")},
        ),
        (
            {"client-certificate-data": "Yw==", "client-key-data": "aw=="},
            {},
            {"certificate": b"c", "key": b"k", "token": b""},
        ),
    ],
)
def test_a_kubeconfig_is_read(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = access.kubeconfig(kubeconfig(tmp_path / "config", user, **cluster))
    for name, value in expected.items():
        assert getattr(found, name) == (tmp_path / value if isinstance(value, Path) else value)


@pytest.mark.parametrize(
    ("user", "cluster", "told"),
    [
        ({"exec": {"command": "aws"}}, {}, "no token, tokenFile or client-certificate"),
        ({"token": "t"}, {"server": "http://api.example"}, "by https"),
        ({"token": "t"}, {"insecure-skip-tls-verify": True}, "verified"),
        ({"token": "t"}, {"server": "https://api.example:port"}, "not a kubeconfig"),
        ({"token": "t"}, {"certificate-authority-data": "no base64"}, "not base64"),
        ({"token": ["t"]}, {}, "not a kubeconfig"),
    ],
)
def test_a_kubeconfig_that_cant_be_gone_by_is_refused(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], told: str
) -> None:
    with pytest.raises(AccessError, match=told):
        access.kubeconfig(kubeconfig(tmp_path / "config", user, **cluster))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "not a kubeconfig"),
        ("current-context: x\nclusters: []\nusers: []\ncontexts: []\n", "current-context"),
        ("{", "not a kubeconfig"),
        ("[" * 5000, "not a kubeconfig"),
        ("x" * (access._MOST + 1), "more than"),
    ],
    ids=["empty", "nothing named", "no YAML", "deep", "large"],
)
def test_what_is_no_kubeconfig_is_refused(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(AccessError, match=told):
        access.kubeconfig(path)


@pytest.mark.parametrize(
    "content",
    [
        "users: [{user: {token: s3cret}]\n",
        "\ttoken: s3cret",
        "token: s3cret",
        "users: [{name: u, user: {token: [s3cret]}}]",
    ],
)
def test_what_a_kubeconfig_holds_is_never_quoted(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(AccessError) as caught:
        access.kubeconfig(path)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_no_file_is_said_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=f"{tmp_path}/config: the file can't be read"):
        access.find(tmp_path / "config")


async def test_a_client_certificate_is_shown_to_the_server(authority: trustme.CA) -> None:
    """As the kubelet's own kubeconfig has it; the key of a kubeconfig is on no disk."""
    server = ApiServer(authority, clients=trustme.CA())
    async with server:
        assert server.clients is not None
        mine = server.clients.issue_cert("client.example")
        path = server.access()
        server.tokens = {""}
        server.put("/api/v1/nodes/n1", **node())
        found = Access(
            path.host,
            path.port,
            path.ca,
            certificate=b"".join(one.bytes() for one in mine.cert_chain_pems),
            key=mine.private_key_pem.bytes(),
        )
        api = Client(found, manager="test")
        await api.get("/api/v1/nodes/n1", dict[str, Any])
        assert "authorization" not in server.requests[0].headers
        api.close()


async def test_a_name_is_resolved(server: ApiServer) -> None:
    there = server.access()
    server.put("/api/v1/nodes/n1", **node())
    api = Client(Access("localhost", there.port, there.ca, server_name="127.0.0.1", token=there.token), manager="test")
    await api.get("/api/v1/nodes/n1", dict[str, Any])
    api.close()


async def test_what_is_in_the_bundle_is_trusted_root_or_not() -> None:
    """As Go trusts it: an intermediate CA is enough."""
    intermediate = trustme.CA().create_child_ca()
    async with ApiServer(intermediate) as server:
        server.put("/api/v1/nodes/n1", **node())
        api = Client(server.access(), manager="test")
        await api.get("/api/v1/nodes/n1", dict[str, Any])
        api.close()


@pytest.mark.parametrize("ca", [b"", b"nothing", base64.b64decode("/w==")], ids=["empty", "no PEM", "bytes"])
async def test_a_ca_that_is_none_is_said(ca: bytes) -> None:
    with pytest.raises(AccessError, match="not PEM"):
        access.Trust(Access("127.0.0.1", 1, ca)).context()
