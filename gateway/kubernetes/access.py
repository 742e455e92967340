"""How to reach the API server: its address, its CA, and our credentials, as in a pod or by a kubeconfig.

Files are read again when they are needed, because tokens and certificates are renewed.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from devices.files import NotPlainError, read_plain

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token and the API server's CA."""
_HOST: Final = "KUBERNETES_SERVICE_HOST"
_PORT: Final = "KUBERNETES_SERVICE_PORT"
_MAX_BYTES: Final = 1024 * 1024
"""Most bytes of a file."""


class AccessError(Exception):
    """The API server can't be configured. The message says what is wrong and what to do."""


class Access(Struct, frozen=True):
    """How to reach an API server. A path is a file that is read at each use; bytes are the content itself."""

    host: str
    port: int
    ca: Path | bytes
    base: str = ""
    """The prefix of the API's paths."""
    server_name: str = ""
    """The name in the server's certificate; empty: the host."""
    token: Path | bytes = b""
    certificate: Path | bytes = b""
    key: Path | bytes = b""

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a connection now.

        Raises:
            AccessError: a file can't be read or is invalid.
        """
        return _tls(_content(self.ca), _content(self.certificate), _content(self.key))

    def authorization(self) -> str:
        """Return the current authorization header; empty if a client certificate is used.

        Raises:
            AccessError: the token can't be read.
        """
        token = _content(self.token).strip()
        if not token:
            if isinstance(self.token, Path):
                raise AccessError(f"{self.token}: the token is empty. Is the service account's volume mounted?")
            return ""
        if not (token.isascii() and token.decode().isprintable()):
            raise AccessError("the token has characters that are not printable ASCII. Look at the token's file")
        return f"Bearer {token.decode()}"


def in_cluster(environ: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> Access:
    """Return how a pod reaches its API server.

    Raises:
        AccessError: this process is not in a pod, or the pod has no service account token.
    """
    host, port = environ.get(_HOST, ""), environ.get(_PORT, "")
    if not host or not port.isdecimal():
        raise AccessError(
            f"the variables {_HOST} and {_PORT}, which every pod has, are not set. Outside of a pod, set --kubeconfig FILE"
        )
    if not (folder / "token").exists():
        raise AccessError(
            f"no service account's token is in {folder}. Give the pod one (automountServiceAccountToken: true), or set "
            "--kubeconfig FILE"
        )
    return Access(host, int(port), folder / "ca.crt", token=folder / "token")


class _Cluster(Struct, rename="kebab"):
    server: str
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False


class _User(Struct):
    token: str = ""
    token_file: str = field(default="", name="tokenFile")
    certificate: str = field(default="", name="client-certificate")
    certificate_data: str = field(default="", name="client-certificate-data")
    key: str = field(default="", name="client-key")
    key_data: str = field(default="", name="client-key-data")


class _Context(Struct):
    cluster: str
    user: str


class _NamedCluster(Struct):
    name: str
    cluster: _Cluster


class _NamedUser(Struct):
    name: str
    user: _User


class _NamedContext(Struct):
    name: str
    context: _Context


class _Kubeconfig(Struct, rename={"current": "current-context"}):
    current: str
    clusters: list[_NamedCluster]
    users: list[_NamedUser]
    contexts: list[_NamedContext]


def kubeconfig(path: Path) -> Access:
    """Read the current context of a kubeconfig. Supported are a token, a token file and a client certificate, but no credential programs.

    Raises:
        AccessError: it can't be read or used.
    """
    from gateway.configuration import document  # noqa: PLC0415 - a pod needs no YAML

    try:
        found = msgspec.convert(document.read(_content(path), str(path)).plain(), _Kubeconfig)
        context = next(one.context for one in found.contexts if one.name == found.current)
        cluster = next(one.cluster for one in found.clusters if one.name == context.cluster)
        user = next(one.user for one in found.users if one.name == context.user)
        at = urlsplit(cluster.server)
        host, port = at.hostname, at.port or 443
    except StopIteration:
        raise AccessError(f"{path}: current-context names no context with a cluster and a user. Correct it") from None
    except (msgspec.ValidationError, ValueError) as error:
        # YAML's errors may quote the token.
        why = str(error) if isinstance(error, msgspec.ValidationError) else type(error).__name__
        raise AccessError(f"{path}: not a kubeconfig ({why}). Name another file") from None
    if at.scheme != "https" or not host or cluster.insecure_skip_tls_verify:
        raise AccessError(
            f"{path}: the cluster's server is not reached by https with a verified certificate. Correct the cluster"
        )

    def either(name: str, data: str) -> Path | bytes:
        try:
            return path.parent / name if name else base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise AccessError(f"{path}: not base64 ({error}). Write the file again") from error

    access = Access(
        host,
        port,
        either(cluster.certificate_authority, cluster.certificate_authority_data),
        base=at.path.rstrip("/"),
        server_name=cluster.tls_server_name,
        token=path.parent / user.token_file if user.token_file else user.token.encode(),
        certificate=either(user.certificate, user.certificate_data),
        key=either(user.key, user.key_data),
    )
    if not access.token and not access.certificate:
        raise AccessError(
            f"{path}: no token, tokenFile or client-certificate. Write one. The gateway runs no credential plugins (exec)"
        )
    return access


def find(kubeconfig_path: Path | None) -> Access:
    """Use the kubeconfig if one is named, otherwise the pod's environment.

    Raises:
        AccessError: as ``kubeconfig`` and ``in_cluster`` do.
    """
    return in_cluster() if kubeconfig_path is None else kubeconfig(kubeconfig_path)


def _content(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        found = read_plain(source, _MAX_BYTES)
    except (OSError, NotPlainError) as error:
        raise AccessError(f"{source}: the file can't be read ({error})") from error
    if len(found) > _MAX_BYTES:
        raise AccessError(f"{source}: more than {_MAX_BYTES} bytes. Name another file")
    return found


@lru_cache(maxsize=1)
def _tls(ca: bytes, certificate: bytes, key: bytes) -> ssl.SSLContext:
    # Not create_default_context: from Python 3.13 on it refuses CAs without an Authority Key Identifier, which clusters have.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= (
        ssl.VERIFY_X509_PARTIAL_CHAIN
    )  # As Go does: every certificate in the bundle is trusted, root or not.
    try:
        context.load_verify_locations(cadata=ca.decode())
        if certificate:
            _load_chain(context, certificate + b"\n" + key)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise AccessError(f"the certificates and the key are not PEM ({error}). Look at these files") from error
    return context


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a certificate and its key. OpenSSL needs a file, so they go into one in memory."""
    with os.fdopen(os.memfd_create("client", os.MFD_CLOEXEC), "wb") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
