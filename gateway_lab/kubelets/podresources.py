"""The pod-resources API of an emulated kubelet: the same records, for whoever asks, beside the socket directory.

A kubelet has it at ``/var/lib/kubelet/pod-resources/kubelet.sock``, next to ``device-plugins``; so it is at the same place
here. Not in a folder that everyone shares (``/tmp``): kubelets in ``/tmp/a`` and ``/tmp/b`` would answer for each other.

v1alpha1 is there from kubelet 1.15, v1 from 1.20. GetAllocatableResources is there from 1.23 on, where it has the healthy
devices only (kubernetes #104123); 1.21 and 1.22 have it behind a gate. Get is there from 1.34 on, behind a gate from 1.27 on.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import grpc

from adapters import podresources
from adapters.pb.podresources import v1_pb2 as pb
from gateway.wires.rpc import target
from gateway_lab.kubelets.behaviour import Behaviour
from gateway_lab.kubelets.checkpoint import Allotment
from gateway_lab.kubelets.records import DeviceRecords

Context = grpc.aio.ServicerContext[bytes, bytes]

_OLDEST = 15
_V1 = 20
_ALLOCATABLE_GATE = 21
_ALLOCATABLE = 23
_ONE_DEVICE_EACH = 23
_GET_GATE = 27
_GET = 34
_DISABLED = "PodResources API {} disabled"


class PodResources(grpc.GenericRpcHandler):
    """The server; it reads ``records``, and frees in them what ended pods hold, as every List of a kubelet does."""

    def __init__(
        self, behaviour: Behaviour, directory: Path, records: DeviceRecords, note: Callable[[str], None]
    ) -> None:
        self._behaviour = behaviour
        self._records = records
        self._note = note
        self._server: grpc.aio.Server | None = None
        self.socket_path = directory.parent / "pod-resources" / "kubelet.sock"

    async def start(self) -> None:
        """Listen, where this version does and the place allows it."""
        if self._behaviour.minor < _OLDEST:
            return
        place = self.socket_path.parent
        if place.parent.stat().st_mode & stat.S_ISVTX:
            self._note(f"no pod-resources API: {place.parent} is a folder that everyone shares")
            return
        place.mkdir(mode=0o750, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        self._server = grpc.aio.server(handlers=[self], options=[("grpc.max_send_message_length", -1)])
        self._server.add_insecure_port(target(self.socket_path))
        await self._server.start()

    async def stop(self) -> None:
        """Close it, and remove the socket."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
            with contextlib.suppress(FileNotFoundError):
                self.socket_path.unlink()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Find the method, as far as this version has it."""
        method, minor = handler_call_details.method, self._behaviour.minor
        if method == podresources.LIST_V1ALPHA1 or (method == podresources.LIST and minor >= _V1):
            return grpc.unary_unary_rpc_method_handler(self._list)
        if method == podresources.GET_ALLOCATABLE and minor >= _ALLOCATABLE_GATE:
            return grpc.unary_unary_rpc_method_handler(self._allocatable)
        if method == podresources.GET and minor >= _GET_GATE:
            return grpc.unary_unary_rpc_method_handler(self._get)
        return None

    async def _list(self, _request: bytes, _context: Context) -> bytes:
        self._records.free_inactive()
        answer = pb.ListPodResourcesResponse()
        for name, containers in self._records.app_containers().items():
            self._describe(answer.pod_resources.add(name=name, namespace="default"), containers)
        return answer.SerializeToString()

    def _describe(self, pod: pb.PodResources, containers: Mapping[str, Mapping[str, Allotment]]) -> None:
        for container, held in containers.items():
            entry = pod.containers.add(name=container)
            for resource, allotment in held.items():
                for node, ids in allotment.numa.items():
                    self._add_devices(entry, resource, node, ids)

    def _add_devices(self, entry: pb.ContainerResources, resource: str, node: str, ids: Iterable[str]) -> None:
        minor = self._behaviour.minor
        for some in ([one] for one in ids) if minor >= _ONE_DEVICE_EACH else [ids]:
            devices = entry.devices.add(resource_name=resource, device_ids=some)
            if minor >= _V1 and node != "-1":
                devices.topology.nodes.add(ID=int(node))

    async def _get(self, request: bytes, context: Context) -> bytes:
        if self._behaviour.minor < _GET:
            await context.abort(grpc.StatusCode.UNKNOWN, _DISABLED.format("Get method"))
        asked = pb.GetPodResourcesRequest.FromString(request)
        containers = self._records.app_containers().get(asked.pod_name)
        if containers is None or asked.pod_namespace != "default":
            text = f"pod {asked.pod_name} in namespace {asked.pod_namespace} not found"
            await context.abort(grpc.StatusCode.UNKNOWN, text)
        answer = pb.GetPodResourcesResponse()
        self._describe(answer.pod_resources, containers or {})
        answer.pod_resources.name, answer.pod_resources.namespace = asked.pod_name, asked.pod_namespace
        return answer.SerializeToString()

    async def _allocatable(self, _request: bytes, context: Context) -> bytes:
        if self._behaviour.minor < _ALLOCATABLE:
            await context.abort(grpc.StatusCode.UNKNOWN, _DISABLED.format("GetAllocatableResources"))
        answer = pb.AllocatableResourcesResponse()
        for resource, listed in self._records.allocatable().items():
            for device in listed:
                for node in device.numa_nodes or (None,):
                    devices = answer.devices.add(resource_name=resource, device_ids=[device.id])
                    if node is not None:
                        devices.topology.nodes.add(ID=node)
        return answer.SerializeToString()
