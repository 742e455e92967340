"""The dialect v1beta1 of kubelet 1.10 to today. It only grew, so how much of it arrives depends on the kubelet's level.

Kubelets drop what they don't know in silence. So everything that is harmless is always spelled, and only CDI names to a
kubelet that certainly drops them are refused: its container would start without its device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.dialect import Level, Rule, UnsayableError, Verdict, Wire, span, verdict
from adapters.pb.v1beta1 import v1beta1_pb2 as pb
from adapters.spelling import (
    CDI_ADVICE,
    device_nodes,
    fill,
    health,
    mounts,
    parse,
    require_answers,
    require_bounded,
    serialize,
)
from devices.model import ContainerAnswer, ContainerRequest, Device, Field, Options, PreferredRequest, Registration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from adapters.dialect import Dialect

_ALWAYS = "since 1.10"

_RULES: Mapping[Field, Rule] = {
    Field.OPTIONS: Rule(Verdict.LOSSLESS, source="heeded by 1.10 to 1.24; 1.25 and later ask GetDevicePluginOptions"),
    Field.GET_OPTIONS: Rule(
        Verdict.LOSSLESS, source="called by 1.25 and later; before, Register's options say the same"
    ),
    Field.TOPOLOGY: Rule(
        Verdict.LOSSLESS,
        since=18,
        before=Verdict.DEGRADED,
        source="came with 1.16; its gate TopologyManager is on by default from 1.18",
    ),
    Field.SEVERAL_CONTAINERS: Rule(Verdict.LOSSLESS, source=f"{_ALWAYS} (#60318)"),
    Field.ENVS: Rule(Verdict.LOSSLESS, source=_ALWAYS),
    Field.MOUNTS: Rule(Verdict.LOSSLESS, source=_ALWAYS),
    Field.DEVICE_NODES: Rule(Verdict.LOSSLESS, source=_ALWAYS),
    Field.ANNOTATIONS: Rule(Verdict.LOSSLESS, source=_ALWAYS),
    Field.CDI_DEVICES: Rule(
        Verdict.LOSSLESS,
        since=29,
        before=Verdict.IMPOSSIBLE,
        source="came with 1.28; its gate DevicePluginCDIDevices is on by default from 1.29",
    ),
    Field.PREFERRED_ALLOCATION: Rule(
        Verdict.LOSSLESS,
        since=19,
        before=Verdict.DEGRADED,
        source="came with 1.19; before, the kubelet chooses by itself",
    ),
    Field.PRE_START: Rule(Verdict.LOSSLESS, source=_ALWAYS),
}


class V1Beta1:
    """Kubelet 1.10 to today."""

    name = "v1beta1"
    registration_service = "v1beta1.Registration"
    plugin_service = "v1beta1.DevicePlugin"
    kubelets = Level(10)
    rules: Mapping[Field, Rule] = _RULES
    message_limit: int | None = 4 * 1024 * 1024
    spacing = 0.0

    def encode_register(self, registration: Registration) -> Wire:
        message = pb.RegisterRequest(
            version=registration.version,
            endpoint=registration.endpoint,
            resource_name=registration.resource_name,
            options=_options(registration.options),
        )
        return Wire(serialize(message))

    def decode_register(self, data: bytes) -> Registration:
        message = parse(pb.RegisterRequest, data, self.name)
        return Registration(message.version, message.endpoint, message.resource_name, _read_options(message.options))

    def encode_options(self, options: Options) -> Wire:
        return Wire(serialize(_options(options)))

    def decode_options(self, data: bytes) -> Options:
        return _read_options(parse(pb.DevicePluginOptions, data, self.name))

    def encode_list(self, devices: Sequence[Device]) -> Wire:
        return Wire(serialize(pb.ListAndWatchResponse(devices=[_device(device) for device in devices])))

    def decode_list(self, data: bytes) -> tuple[Device, ...]:
        message = parse(pb.ListAndWatchResponse, data, self.name)
        return tuple(
            Device(device.ID, health(device.health), tuple(node.ID for node in device.topology.nodes))
            for device in message.devices
        )

    def encode_allocate_request(self, containers: Sequence[ContainerRequest]) -> Wire:
        requests = [pb.ContainerAllocateRequest(devicesIDs=container.device_ids) for container in containers]
        return Wire(serialize(pb.AllocateRequest(container_requests=requests)))

    def decode_allocate_request(self, data: bytes) -> tuple[ContainerRequest, ...]:
        require_bounded(data, containers=True)
        message = parse(pb.AllocateRequest, data, self.name)
        return tuple(ContainerRequest(tuple(request.devicesIDs)) for request in message.container_requests)

    def encode_allocate_answer(
        self, containers: Sequence[ContainerRequest], answers: Sequence[ContainerAnswer], level: Level
    ) -> Wire:
        require_answers(containers, answers)
        if any(answer.cdi_devices for answer in answers):
            self._require_cdi(level)
        message = pb.AllocateResponse()
        for answer in answers:
            response = message.container_responses.add()
            fill(response, answer)
            if answer.annotations:
                response.annotations.update(answer.annotations)
            for name in answer.cdi_devices:
                response.cdi_devices.add(name=name)
        return Wire(serialize(message))

    def decode_allocate_answer(self, data: bytes) -> tuple[ContainerAnswer, ...]:
        message = parse(pb.AllocateResponse, data, self.name)
        return tuple(
            ContainerAnswer(
                dict(response.envs),
                mounts(response),
                device_nodes(response),
                dict(response.annotations),
                tuple(device.name for device in response.cdi_devices),
            )
            for response in message.container_responses
        )

    def encode_preferred_request(self, containers: Sequence[PreferredRequest]) -> Wire:
        requests = [
            pb.ContainerPreferredAllocationRequest(
                available_deviceIDs=container.available,
                must_include_deviceIDs=container.must_include,
                allocation_size=container.size,
            )
            for container in containers
        ]
        return Wire(serialize(pb.PreferredAllocationRequest(container_requests=requests)))

    def decode_preferred_request(self, data: bytes) -> tuple[PreferredRequest, ...]:
        require_bounded(data, containers=True)
        message = parse(pb.PreferredAllocationRequest, data, self.name)
        return tuple(
            PreferredRequest(
                tuple(request.available_deviceIDs), tuple(request.must_include_deviceIDs), request.allocation_size
            )
            for request in message.container_requests
        )

    def encode_preferred_answer(self, containers: Sequence[Sequence[str]]) -> Wire:
        responses = [pb.ContainerPreferredAllocationResponse(deviceIDs=device_ids) for device_ids in containers]
        return Wire(serialize(pb.PreferredAllocationResponse(container_responses=responses)))

    def decode_preferred_answer(self, data: bytes) -> tuple[tuple[str, ...], ...]:
        message = parse(pb.PreferredAllocationResponse, data, self.name)
        return tuple(tuple(response.deviceIDs) for response in message.container_responses)

    def encode_pre_start_request(self, device_ids: Sequence[str]) -> Wire:
        return Wire(serialize(pb.PreStartContainerRequest(devicesIDs=device_ids)))

    def decode_pre_start_request(self, data: bytes) -> tuple[str, ...]:
        require_bounded(data, containers=False)
        return tuple(parse(pb.PreStartContainerRequest, data, self.name).devicesIDs)

    def _require_cdi(self, level: Level) -> None:
        if verdict(self, Field.CDI_DEVICES, level) is Verdict.IMPOSSIBLE:
            raise UnsayableError(Field.CDI_DEVICES, f"{self.name} (kubelet {span(level)})", CDI_ADVICE)


def _options(options: Options) -> pb.DevicePluginOptions:
    return pb.DevicePluginOptions(
        pre_start_required=options.pre_start_required,
        get_preferred_allocation_available=options.preferred_allocation,
    )


def _read_options(message: pb.DevicePluginOptions) -> Options:
    return Options(message.pre_start_required, message.get_preferred_allocation_available)


def _device(device: Device) -> pb.Device:
    """Spell a device; one without a known place has no topology at all, which is not a topology with no nodes."""
    message = pb.Device(ID=device.id, health=device.health.value)
    for node in device.numa_nodes:
        message.topology.nodes.add(ID=node)
    return message


V1BETA1: Dialect = V1Beta1()
