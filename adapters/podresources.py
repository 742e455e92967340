"""The kubelet's pod-resources API v1 (kubelet 1.20 and later): what the kubelet believes of devices. Wire -> model only."""

from __future__ import annotations

from collections import defaultdict

from google.protobuf.message import DecodeError

from adapters.dialect import MalformedError
from adapters.pb.podresources import v1_pb2 as pb

GET_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
"""Kubelet 1.21 (behind a gate), 1.23 and later by default."""


def decode_allocatable(data: bytes) -> dict[str, frozenset[str]]:
    """Read which device IDs the kubelet would give out, healthy and taken alike, by resource name.

    Raises:
        MalformedError: it is no AllocatableResourcesResponse.
    """
    try:
        message = pb.AllocatableResourcesResponse.FromString(data)
    except DecodeError as error:
        raise MalformedError(f"expected an AllocatableResourcesResponse of pod-resources v1: {error}") from error
    found: defaultdict[str, set[str]] = defaultdict(set)
    for devices in message.devices:
        found[devices.resource_name].update(devices.device_ids)
    return {resource: frozenset(ids) for resource, ids in found.items()}
