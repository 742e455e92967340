"""The dialect v1beta1 of kubelet 1.10 and later. It only grew, so older kubelets read fewer of its fields.

A kubelet silently drops fields that it doesn't know. So all fields are always encoded, except CDI names for a kubelet that
certainly drops them: they are refused, because the container would start without its device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters import dialect, spelling
from adapters.dialect import Dialect, Fidelity, Level, Rule, Wire
from adapters.pb.v1beta1 import v1beta1_pb2 as pb
from devices.model import ContainerAnswer, ContainerRequest, Device, Field, Options, PreferredRequest, Registration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from google.protobuf.descriptor import FileDescriptor
_ALWAYS = "since 1.10"

RULES: Mapping[Field, Rule] = {
    Field.OPTIONS: Rule(Fidelity.LOSSLESS, source="used by 1.10 to 1.24; 1.25 and later call GetDevicePluginOptions"),
    Field.GET_OPTIONS: Rule(Fidelity.LOSSLESS, source="called by 1.25 and later; before, Register has the options"),
    Field.TOPOLOGY: Rule(
        Fidelity.LOSSLESS,
        since=18,
        before=Fidelity.DEGRADED,
        source="came with 1.16; its gate TopologyManager is on by default from 1.18",
    ),
    Field.SEVERAL_CONTAINERS: Rule(Fidelity.LOSSLESS, source=f"{_ALWAYS} (#60318)"),
    Field.ENVS: Rule(Fidelity.LOSSLESS, source=_ALWAYS),
    Field.MOUNTS: Rule(Fidelity.LOSSLESS, source=_ALWAYS),
    Field.DEVICE_NODES: Rule(Fidelity.LOSSLESS, source=_ALWAYS),
    Field.ANNOTATIONS: Rule(Fidelity.LOSSLESS, source=_ALWAYS),
    Field.CDI_DEVICES: Rule(
        Fidelity.LOSSLESS,
        since=29,
        before=Fidelity.IMPOSSIBLE,
        source="came with 1.28; its gate DevicePluginCDIDevices is on by default from 1.29",
        advice=spelling.CDI_ADVICE,
    ),
    Field.PREFERRED_ALLOCATION: Rule(
        Fidelity.LOSSLESS,
        since=19,
        before=Fidelity.DEGRADED,
        source="came with 1.19; before, the kubelet chooses by itself",
    ),
    Field.PRE_START: Rule(Fidelity.LOSSLESS, source=_ALWAYS),
}


class Beta(Dialect):
    """v1beta1, or a later version that has its messages.

    Args:
        name: the version, after which the kubelet names its services.
        kubelets: the kubelets that speak it.
        messages: its generated module (``adapters.pb``).
        rules: what happens to each field.
    """

    def __init__(self, name: str, kubelets: Level, messages: Any, rules: Mapping[Field, Rule]) -> None:
        self.name = self.family = name
        self.kubelets, self.rules = kubelets, rules
        self.registration_service, self.plugin_service = f"{name}.Registration", f"{name}.DevicePlugin"
        self.schema: FileDescriptor = messages.DESCRIPTOR
        self._messages = messages  # Untyped: tests/unit/test_adapters.py holds for each version.

    def encode_register(self, registration: Registration) -> Wire:
        message = self._messages.RegisterRequest(
            version=registration.version,
            endpoint=registration.endpoint,
            resource_name=registration.resource_name,
            options=self._options(registration.options),
        )
        return Wire(spelling.serialize(message), dialect.left_out(self, dialect.of_registration(registration)))

    def decode_register(self, data: bytes) -> Registration:
        message = spelling.parse(self._messages.RegisterRequest, data, self.name)
        return Registration(message.version, message.endpoint, message.resource_name, _read_options(message.options))

    def encode_options(self, options: Options) -> Wire:
        return Wire(spelling.serialize(self._options(options)), dialect.left_out(self, dialect.of_options(options)))

    def decode_options(self, data: bytes) -> Options:
        return _read_options(spelling.parse(self._messages.DevicePluginOptions, data, self.name))

    def encode_list(self, devices: Sequence[Device]) -> Wire:
        message = self._messages.ListAndWatchResponse(devices=[self._device(device) for device in devices])
        return Wire(spelling.serialize(message), dialect.left_out(self, dialect.of_list(devices)))

    def decode_list(self, data: bytes) -> tuple[Device, ...]:
        message = spelling.parse(self._messages.ListAndWatchResponse, data, self.name)
        return tuple(
            Device(device.ID, spelling.health(device.health), tuple(node.ID for node in device.topology.nodes))
            for device in message.devices
        )

    def encode_allocate_request(self, containers: Sequence[ContainerRequest]) -> Wire:
        requests = [
            self._messages.ContainerAllocateRequest(devicesIDs=container.device_ids) for container in containers
        ]
        message = self._messages.AllocateRequest(container_requests=requests)
        return Wire(spelling.serialize(message), dialect.left_out(self, dialect.of_allocate(containers)))

    def decode_allocate_request(self, data: bytes) -> tuple[ContainerRequest, ...]:
        message = spelling.parse_containers(self._messages.AllocateRequest, data, self.name)
        return tuple(ContainerRequest(tuple(request.devicesIDs)) for request in message.container_requests)

    def encode_allocate_answer(
        self, containers: Sequence[ContainerRequest], answers: Sequence[ContainerAnswer], level: Level
    ) -> Wire:
        spelling.require_answers(containers, answers)
        lost = dialect.left_out(self, dialect.of_allocate(containers, answers), level)
        message = self._messages.AllocateResponse()
        for answer in answers:
            response = message.container_responses.add()
            spelling.fill(response, answer)
            if answer.annotations:
                response.annotations.update(answer.annotations)
            for name in answer.cdi_devices:
                response.cdi_devices.add(name=name)
        return Wire(spelling.serialize(message), lost)

    def decode_allocate_answer(self, data: bytes) -> tuple[ContainerAnswer, ...]:
        message = spelling.parse(self._messages.AllocateResponse, data, self.name)
        return tuple(
            ContainerAnswer(
                dict(response.envs),
                spelling.mounts(response),
                spelling.device_nodes(response),
                dict(response.annotations),
                tuple(device.name for device in response.cdi_devices),
            )
            for response in message.container_responses
        )

    def encode_preferred_request(self, containers: Sequence[PreferredRequest]) -> Wire:
        requests = [
            self._messages.ContainerPreferredAllocationRequest(
                available_deviceIDs=container.available,
                must_include_deviceIDs=container.must_include,
                allocation_size=container.size,
            )
            for container in containers
        ]
        message = self._messages.PreferredAllocationRequest(container_requests=requests)
        return Wire(spelling.serialize(message), dialect.left_out(self, dialect.of_preferred(containers)))

    def decode_preferred_request(self, data: bytes) -> tuple[PreferredRequest, ...]:
        message = spelling.parse_containers(self._messages.PreferredAllocationRequest, data, self.name)
        return tuple(
            PreferredRequest(
                tuple(request.available_deviceIDs), tuple(request.must_include_deviceIDs), request.allocation_size
            )
            for request in message.container_requests
        )

    def encode_preferred_answer(self, containers: Sequence[Sequence[str]]) -> Wire:
        responses = [
            self._messages.ContainerPreferredAllocationResponse(deviceIDs=device_ids) for device_ids in containers
        ]
        message = self._messages.PreferredAllocationResponse(container_responses=responses)
        return Wire(spelling.serialize(message), dialect.left_out(self, dialect.of_preferred(containers)))

    def decode_preferred_answer(self, data: bytes) -> tuple[tuple[str, ...], ...]:
        message = spelling.parse(self._messages.PreferredAllocationResponse, data, self.name)
        return tuple(tuple(response.deviceIDs) for response in message.container_responses)

    def encode_pre_start_request(self, device_ids: Sequence[str]) -> Wire:
        message = self._messages.PreStartContainerRequest(devicesIDs=device_ids)
        return Wire(spelling.serialize(message), dialect.left_out(self, (Field.PRE_START,)))

    def decode_pre_start_request(self, data: bytes) -> tuple[str, ...]:
        spelling.require_bounded(data)
        return tuple(spelling.parse(self._messages.PreStartContainerRequest, data, self.name).devicesIDs)

    def _options(self, options: Options) -> Any:
        return self._messages.DevicePluginOptions(
            pre_start_required=options.pre_start_required,
            get_preferred_allocation_available=options.preferred_allocation,
        )

    def _device(self, device: Device) -> Any:
        """Encode a device. Without a known NUMA node it has no topology, which is not the same as a topology without nodes."""
        message = self._messages.Device(ID=device.id, health=device.health.value)
        for node in device.numa_nodes:
            message.topology.nodes.add(ID=node)
        return message


def _read_options(message: Any) -> Options:
    return Options(message.pre_start_required, message.get_preferred_allocation_available)


V1BETA1 = Beta("v1beta1", Level(10), pb, RULES)
