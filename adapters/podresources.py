"""The kubelet's pod-resources API: what the kubelet believes of devices, and of who holds them. Wire -> model only.

v1 is there from kubelet 1.20, v1alpha1 from 1.13 (by default from 1.15). v1alpha1 has List alone, and its answer is one of
v1 on the wire, with fewer fields.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct

from adapters.dialect import MalformedError
from adapters.pb.podresources import v1_pb2 as pb
from adapters.spelling import has_more_of, parse

GET_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
"""Kubelet 1.21 (behind a gate), 1.23 and later by default."""
LIST = "/v1.PodResourcesLister/List"
GET = "/v1.PodResourcesLister/Get"
"""Kubelet 1.27 (behind a gate), 1.34 and later by default."""
LIST_V1ALPHA1 = "/v1alpha1.PodResourcesLister/List"
_API = "pod-resources"

MAX_PARTS = 300_000
"""The most messages and texts in an answer. 10 000 devices have 60 000; an empty message is 2 bytes on the wire, 150 in memory."""
LONGEST_HOLDER = 63 + 253 + 63 + 2
"""Characters of namespace, pod and container (RFC 1123, as Kubernetes has their names): each of a pod's holders repeats the pod's."""
_BEGINNINGS = bytes(base + (field << 3 | 2) for field in range(1, 4) for base in (0, 0x80))
"""The bytes with which texts and messages of the fields 1 to 3 begin, in the shortest spelling and in longer ones."""


def _require_bounded(data: bytes) -> None:
    if has_more_of(data, _BEGINNINGS, MAX_PARTS):
        raise MalformedError(
            f"the answer of pod-resources has {len(data)} bytes, which may hold too many parts. Allowed: {MAX_PARTS}"
        )


def decode_allocatable(data: bytes) -> dict[str, frozenset[str]]:
    """Read which device IDs the kubelet would give out, healthy and taken alike, by resource name.

    Raises:
        MalformedError: it is no AllocatableResourcesResponse.
    """
    _require_bounded(data)
    message = parse(pb.AllocatableResourcesResponse, data, _API)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for devices in message.devices:
        found[devices.resource_name].update(devices.device_ids)
    return {resource: frozenset(ids) for resource, ids in found.items()}


def encode_get(pod: str) -> bytes:
    """Ask Get for one pod (``namespace/pod``). Its answer is a List of that pod on the wire."""
    namespace, _, name = pod.partition("/")
    return pb.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace).SerializeToString()


def is_not_found(details: str) -> bool:
    """Tell by the text of an error whether Get knows no such pod: the code is UNKNOWN, as of any other error of a kubelet."""
    return details.startswith("pod ") and details.endswith(" not found")


class Listed(Struct, frozen=True):
    """What List says."""

    held: Mapping[str, Mapping[str, str]]
    """Who holds which device: ``namespace/pod/container``, by resource name and device ID."""
    pods: frozenset[str]
    """Which pods there are, with devices or without: ``namespace/pod``."""


def decode_list(data: bytes) -> Listed:
    """Read who holds which device, and which pods there are, of v1 and of v1alpha1.

    A device that several containers of a pod share has the first of them.

    Raises:
        MalformedError: it is no ListPodResourcesResponse, or names what Kubernetes can't name so.
    """
    _require_bounded(data)
    message = parse(pb.ListPodResourcesResponse, data, _API)
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for pod in message.pod_resources:
        for container in pod.containers:
            holder = f"{pod.namespace}/{pod.name}/{container.name}"
            if len(holder) > LONGEST_HOLDER:
                raise MalformedError(
                    f"a holder's name is too long ({len(holder)} characters). Allowed: {LONGEST_HOLDER}"
                )
            for devices in container.devices:
                for device_id in devices.device_ids:
                    found[devices.resource_name].setdefault(device_id, holder)
    return Listed(dict(found), frozenset(f"{pod.namespace}/{pod.name}" for pod in message.pod_resources))
