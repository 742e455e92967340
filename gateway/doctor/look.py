"""One look at a node: everything that ``gateway doctor`` collects, put together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from adapters import checkpoint
from gateway.doctor import collect
from gateway.doctor.snapshot import ApiNode, NvmlSeen, Release, Surveyed
from gateway.handover import instance
from gateway.kubelet.watch import listens
from gateway.kubernetes import access, client
from gateway.telling.status import GatewayStatus

_WITHIN: Final = 5.0
"""Seconds that the API server has for each answer."""


class Places(Struct, frozen=True, kw_only=True):
    """Where to look: ``root`` is the host's file system, the others are below it."""

    root: Path
    socket_dir: Path
    state_dir: Path
    pod_resources: Path


class Told(Struct, frozen=True, kw_only=True):
    """What is known before the look: the gateways' own words, and the settings that they would have here."""

    statuses: tuple[GatewayStatus, ...] = ()
    silent: Mapping[str, str] = {}
    settings: str = ""
    strategies: frozenset[str] = frozenset({"envvar"})
    monitors_mig: bool = False


class Cluster(Struct, frozen=True):
    """What the API server said; None: it wasn't asked, or didn't say."""

    node: ApiNode | None = None
    runtime_classes: frozenset[str] | None = None
    device_classes: Mapping[str, str] | None = None
    rights: Mapping[str, bool] | None = None


def look(
    places: Places,
    told: Told,
    cluster: Cluster,
    release: Callable[[str], Release | None],
    nvml: Callable[[], NvmlSeen] | None = None,
) -> Surveyed:
    """Look at everything once. ``release`` says what is known of a kubelet's version; without ``nvml`` that isn't asked.

    From a container with the host's files in a folder, the host's devices and libraries can't be judged by use.
    """
    root = places.root
    gpus = collect.gpus(root)
    of_nvidia = sum(one.vendor == "0x10de" for one in gpus or ())
    seen = collect.socket_dir(places.socket_dir)
    there = seen.state == "there"
    return Surveyed(
        now=time.time(),
        socket_dir=seen,
        checkpoint=collect.kubelet_checkpoint(places.socket_dir / checkpoint.FILE_NAME) if there else None,
        pod_resources=listens(places.pod_resources) if there else None,
        kubelets=collect.kubelets(root),
        release=release(cluster.node.kubelet) if cluster.node and cluster.node.kubelet else None,
        statuses=told.statuses,
        silent=told.silent,
        alive=instance.alive(places.socket_dir) if there else frozenset(),
        state_dir=collect.state_dir(places.state_dir),
        settings=told.settings,
        strategies=told.strategies,
        monitors_mig=told.monitors_mig,
        inotify_most=collect.inotify_most(root),
        processes=tuple(found for status in told.statuses if (found := collect.process(root, status.pid)) is not None),
        gpus=gpus,
        modules=collect.modules(root),
        nvml=nvml() if nvml and of_nvidia else None,
        nodes=collect.nodes(root, of_nvidia, tried=nvml is not None) if of_nvidia else None,
        kfd_gpus=collect.kfd_gpus(root),
        runtime=collect.runtime(root),
        cdi_files=collect.cdi_files(root),
        enforcing=collect.enforcing(root),
        drivers=collect.dra_drivers(places.socket_dir.parent),
        node=cluster.node,
        runtime_classes=cluster.runtime_classes,
        registry=collect.has_registry(places.socket_dir.parent),
        device_classes=cluster.device_classes,
        rights=cluster.rights,
    )


class _Meta(Struct, frozen=True):
    name: str = ""


class _Named(Struct, frozen=True):
    metadata: _Meta = _Meta()


class _NodeInfo(Struct, frozen=True):
    kubelet: str = msgspec.field(default="", name="kubeletVersion")


class _NodeStatus(Struct, frozen=True):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    info: _NodeInfo = msgspec.field(default=_NodeInfo(), name="nodeInfo")


class _Node(Struct, frozen=True):
    status: _NodeStatus = _NodeStatus()


class _Cel(Struct, frozen=True):
    expression: str = ""


class _Selector(Struct, frozen=True):
    cel: _Cel = _Cel()


class _Selectors(Struct, frozen=True):
    selectors: tuple[_Selector, ...] = ()


class _DeviceClass(Struct, frozen=True):
    metadata: _Meta = _Meta()
    spec: _Selectors = _Selectors()


class _Allowed(Struct, frozen=True):
    allowed: bool = False


class _Review(Struct, frozen=True):
    status: _Allowed = _Allowed()


_DRA: Final = "resource.k8s.io"
_CLAIMS: Final[tuple[tuple[str, str, str], ...]] = (
    *((_DRA, "resourceslices", verb) for verb in ("list", "watch", "patch", "delete")),
    *((_DRA, "resourceclaims", verb) for verb in ("get", "list")),
    ("", "nodes", "get"),
    ("", "pods", "list"),
)
"""What --dra asks of the API server: group, resource, verb (deploy/kustomize/components/dra)."""
_BOTH: Final[tuple[tuple[str, str, str], ...]] = (
    (_DRA, "deviceclasses", "list"),
    ("", "nodes", "watch"),
    ("", "nodes/status", "patch"),
)
"""What --dra on asks besides (components api-server and dra-on)."""


def needed(statuses: Iterable[GatewayStatus]) -> tuple[tuple[str, str, str], ...]:
    """Say what gateways that offer devices by DRA need to be allowed; nothing where none does."""
    told = list(statuses)
    claims = any(one.drivers for one in told)
    return (*(_CLAIMS if claims else ()), *(_BOTH if claims and any(one.sides for one in told) else ()))


def cluster(kubeconfig: Path | None, name: str, rights: Sequence[tuple[str, str, str]]) -> Cluster:
    """Ask the API server for the node and the classes, and for rights; nothing where there is no way to it, or no right."""
    try:
        found = access.find(kubeconfig)
    except access.AccessError:
        return Cluster()
    return asyncio.run(asked(found, name, rights))


async def asked(found: access.Access, name: str, rights: Sequence[tuple[str, str, str]] = ()) -> Cluster:
    """Ask one API server; what it doesn't say is None."""
    api = client.Client(found, manager="gateway-doctor", version="")
    try:
        node = await _optional(api.get(f"/api/v1/nodes/{name}", _Node, seconds=_WITHIN))
        classes = await _optional(api.list("/apis/node.k8s.io/v1/runtimeclasses", _Named, seconds=_WITHIN))
        device_classes = None
        for version in ("v1", "v1beta2", "v1beta1") if rights else ():
            path = f"/apis/{_DRA}/{version}/deviceclasses"
            device_classes = device_classes or await _optional(api.list(path, _DeviceClass, seconds=_WITHIN))
        allowed = {f"{verb} {resource}": await _allowed(api, group, resource, verb) for group, resource, verb in rights}
    finally:
        api.close()
    return Cluster(
        None if node is None else _api_node(node),
        None if classes is None else frozenset(one.metadata.name for one in classes[0]),
        None if device_classes is None else {one.metadata.name: _text(one) for one in device_classes[0]},
        {what: answer for what, answer in allowed.items() if answer is not None} or None,
    )


async def _allowed(api: client.Client, group: str, resource: str, verb: str) -> bool | None:
    """Ask whether who asks may do something; None where that isn't answered."""
    name, _, part = resource.partition("/")
    what = {"group": group, "resource": name, "subresource": part, "verb": verb}
    body: dict[str, Any] = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}}
    body["spec"] = {"resourceAttributes": what}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    found = await _optional(api.review(path, body, _Review, seconds=_WITHIN))
    return None if found is None else bool(found.status.allowed)


def _text(one: _DeviceClass) -> str:
    return " ".join(selector.cel.expression for selector in one.spec.selectors)


async def _optional(asked: Any) -> Any:
    try:
        return await asked
    except client.KubernetesError:
        return None


def _api_node(node: _Node) -> ApiNode:
    def whole(quantities: Mapping[str, str]) -> dict[str, int]:
        return {name: int(count) for name, count in quantities.items() if "/" in name and count.isdecimal()}

    status = node.status
    return ApiNode(status.info.kubelet, whole(status.capacity), whole(status.allocatable))
