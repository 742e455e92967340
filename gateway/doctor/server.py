"""Ask the API server and NVIDIA's library for ``gateway doctor``. The gateway does so; without a gateway, the command itself."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from gateway.doctor.snapshot import ApiNode, Cluster, DoctorAnswer, NvmlSeen
from gateway.kubernetes import access, client, quantity

if TYPE_CHECKING:
    from gateway.configuration.settings import Settings
    from gateway.telling.status import GatewayStatus
    from gateway.wires.control import ControlConnection

_ANSWER_S: Final = 5.0
"""Seconds for each answer of the API server."""
_NVML_S: Final = 10.0
"""Seconds for NVML. A healthy driver without persistence mode answers within three."""
_MISMATCH: Final = 18
"""NVML_ERROR_LIB_RM_VERSION_MISMATCH."""
_WITHOUT_LIBRARY: Final = 12
"""NVML_ERROR_LIBRARY_NOT_FOUND."""
_MOST_GPUS: Final = 512
"""Most GPUs that are asked about, one by one."""


async def meet(
    backend: str,
    status: GatewayStatus,
    settings: Settings,
    connection: ControlConnection,
    _request: Mapping[str, Any],
) -> None:
    """Answer ``doctor`` for a gateway with this status.

    It doesn't call NVML, because this process would then open GPUs that ``gateway release`` closed. The status has NVML's state.
    """
    cluster = await ask(settings.kubeconfig, settings.node_name, needed([status]))
    await connection.send(msgspec.to_builtins(DoctorAnswer(cluster, backend)))


async def ask(kubeconfig: Path | None, name: str, rights: Sequence[tuple[str, str, str]]) -> Cluster:
    """Ask the API server for the node, the classes and our rights. Answers are missing if it can't be reached, or refuses."""
    try:
        found = access.find(kubeconfig)
    except access.AccessError:
        return Cluster()
    return await asked(found, name, rights)


def nvml() -> NvmlSeen:
    """Call NVIDIA's library in a thread, because it may hang."""
    found: list[NvmlSeen] = []
    thread = threading.Thread(target=lambda: found.append(_nvml()), daemon=True, name="nvml")
    thread.start()
    thread.join(_NVML_S)
    return found[0] if found else NvmlSeen("silent", f"NVML has not answered for {_NVML_S:g} s")


def _nvml() -> NvmlSeen:
    import pynvml  # noqa: PLC0415 - it is asked on nodes with NVIDIA GPUs alone

    try:
        pynvml.nvmlInit()
        try:
            count, refused, told = int(pynvml.nvmlDeviceGetCount()), {}, set()
            for index in range(min(count, _MOST_GPUS)):
                try:
                    info = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
                    told.add(f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0")
                except pynvml.NVMLError as error:
                    refused[index] = str(error)
            return NvmlSeen("well", gpu_count=count, refused=refused, usable_addresses=frozenset(told))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        states: Mapping[int, Any] = {_MISMATCH: "mismatch", _WITHOUT_LIBRARY: "missing"}
        return NvmlSeen(states.get(error.value, "failed"), f"NVML: {error}")


class _Meta(Struct, frozen=True):
    name: str = ""


class _Named(Struct, frozen=True):
    metadata: _Meta = _Meta()


class _NodeInfo(Struct, frozen=True):
    kubelet: str = msgspec.field(default="", name="kubeletVersion")
    runtime: str = msgspec.field(default="", name="containerRuntimeVersion")
    boot: str = msgspec.field(default="", name="bootID")


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
"""What --dra needs of the API server: group, resource, verb (deploy/kustomize/components/dra)."""
_BOTH: Final[tuple[tuple[str, str, str], ...]] = (
    (_DRA, "deviceclasses", "list"),
    ("", "nodes", "watch"),
    ("", "nodes/status", "patch"),
)
"""What --dra on needs in addition (components api-server and dra-on)."""


def needed(statuses: Iterable[GatewayStatus]) -> tuple[tuple[str, str, str], ...]:
    """Return the rights that gateways with DRA need; empty if no gateway uses DRA."""
    told = list(statuses)
    claims = any(one.drivers for one in told)
    return (*(_CLAIMS if claims else ()), *(_BOTH if claims and any(one.sides for one in told) else ()))


async def asked(found: access.Access, name: str, rights: Sequence[tuple[str, str, str]] = ()) -> Cluster:
    """Ask the API server. A missing answer is None."""
    api = client.Client(found, manager="gateway-doctor")
    try:
        node, missing = None, False
        try:
            node = await api.get(f"/api/v1/nodes/{name}", _Node, seconds=_ANSWER_S) if name else None
        except client.KubernetesError as error:
            missing = error.is_missing
        classes = await _optional(api.list("/apis/node.k8s.io/v1/runtimeclasses", _Named, seconds=_ANSWER_S))
        device_classes = None
        for version in ("v1", "v1beta2", "v1beta1") if rights else ():
            path = f"/apis/{_DRA}/{version}/deviceclasses"
            device_classes = device_classes or await _optional(api.list(path, _DeviceClass, seconds=_ANSWER_S))
        allowed = {f"{verb} {resource}": await _allowed(api, group, resource, verb) for group, resource, verb in rights}
    finally:
        api.close()
    return Cluster(
        None if node is None else _api_node(node),
        None if classes is None else frozenset(one.metadata.name for one in classes[0]),
        None if device_classes is None else {one.metadata.name: _text(one) for one in device_classes[0]},
        {what: answer for what, answer in allowed.items() if answer is not None} or None,
        name,
        missing,
    )


async def _allowed(api: client.Client, group: str, resource: str, verb: str) -> bool | None:
    """Return True if we have a right; None if that isn't answered."""
    name, _, part = resource.partition("/")
    what = {"group": group, "resource": name, "subresource": part, "verb": verb}
    body: dict[str, Any] = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}}
    body["spec"] = {"resourceAttributes": what}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    found = await _optional(api.review(path, body, _Review, seconds=_ANSWER_S))
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
        read = {name: quantity.read(text) for name, text in quantities.items() if "/" in name}
        return {name: count for name, count in read.items() if count is not None}

    status = node.status
    info = status.info
    return ApiNode(info.kubelet, whole(status.capacity), whole(status.allocatable), info.runtime, info.boot)
