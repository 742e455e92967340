"""Decode the kubelet's pod-resources API: its devices, and the containers that hold them.

Kubelet 1.20 and later has v1; 1.13 and later has v1alpha1 (by default since 1.15). v1alpha1 has only List, and its answer is
one of v1 with fewer fields.
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
"""Most messages and texts in an answer: 10,000 devices have 60,000. An empty message takes 2 bytes on the wire and 150 in memory."""
HOLDER_CHARS = 63 + 253 + 63 + 2
"""Most characters of namespace, pod and container name together (RFC 1123). Each container's holder repeats the first two."""
_BEGINNINGS = bytes(base + (field << 3 | 2) for field in range(1, 4) for base in (0, 0x80))
"""The first bytes of texts and messages in fields 1 to 3, in the shortest encoding and in longer ones."""


def _require_bounded(data: bytes) -> None:
    if has_more_of(data, _BEGINNINGS, MAX_PARTS):
        raise MalformedError(
            f"the answer of pod-resources has {len(data)} bytes, which may hold too many parts. Allowed: {MAX_PARTS}"
        )


def decode_allocatable(data: bytes) -> dict[str, frozenset[str]]:
    """Return the device IDs that the kubelet counts as allocatable, by resource name, including held devices.

    Raises:
        MalformedError: it is not an AllocatableResourcesResponse.
    """
    _require_bounded(data)
    message = parse(pb.AllocatableResourcesResponse, data, _API)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for devices in message.devices:
        found[devices.resource_name].update(devices.device_ids)
    return {resource: frozenset(ids) for resource, ids in found.items()}


def encode_get(pod: str) -> bytes:
    """Encode a Get for one pod (``namespace/pod``). Its answer has the encoding of a List with that pod."""
    namespace, _, name = pod.partition("/")
    return pb.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace).SerializeToString()


def is_not_found(details: str) -> bool:
    """Return True if an error of Get says that the pod doesn't exist. The code doesn't show it: it is UNKNOWN for every error."""
    return details.startswith("pod ") and details.endswith(" not found")


class Listed(Struct, frozen=True):
    """The content of a List."""

    held: Mapping[str, Mapping[str, str]]
    """The holder of each device, ``namespace/pod/container``, by resource name and device ID."""
    pods: frozenset[str]
    """All pods, with or without devices: ``namespace/pod``."""


def decode_list(data: bytes) -> Listed:
    """Decode a List of v1 or v1alpha1. If several containers of a pod share a device, the first one is its holder.

    Raises:
        MalformedError: it is not a ListPodResourcesResponse, or a name is longer than Kubernetes allows.
    """
    _require_bounded(data)
    message = parse(pb.ListPodResourcesResponse, data, _API)
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for pod in message.pod_resources:
        for container in pod.containers:
            holder = f"{pod.namespace}/{pod.name}/{container.name}"
            if len(holder) > HOLDER_CHARS:
                raise MalformedError(f"a holder's name is too long ({len(holder)} characters). Allowed: {HOLDER_CHARS}")
            for devices in container.devices:
                for device_id in devices.device_ids:
                    found[devices.resource_name].setdefault(device_id, holder)
    return Listed(dict(found), frozenset(f"{pod.namespace}/{pod.name}" for pod in message.pod_resources))
