"""What both alpha dialects have in common: two calls, one container in each Allocate, no options, no NUMA nodes.

They differ only in the answer to Allocate. v1alpha2's messages encode the rest, which is the same on the wire for both. A call
that they lack is encoded as an empty message, with its field among the lost ones. PreStartContainer is refused instead, because
a pod would start without its device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from adapters.dialect import Fidelity, Level, MalformedError, Rule, Wire, left_out
from adapters.fields import of_allocate, of_list, of_options, of_preferred, of_registration
from adapters.pb.v1alpha import v1alpha2_pb2 as pb
from adapters.spelling import CDI_ADVICE, health, parse, require_answers, require_bounded, serialize
from devices.model import ContainerAnswer, ContainerRequest, Device, Field, Options, PreferredRequest, Registration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from google.protobuf.descriptor import FileDescriptor
    from google.protobuf.message import Message

_NO_CALL = "kubelet 1.8 and 1.9 call ListAndWatch and Allocate only"
_SAME = "as released in 1.8.15 and 1.9.11"

_RULES: Mapping[Field, Rule] = {
    Field.OPTIONS: Rule(Fidelity.DEGRADED, source="Register has no options before kubelet 1.10"),
    Field.GET_OPTIONS: Rule(Fidelity.DEGRADED, source=_NO_CALL),
    Field.TOPOLOGY: Rule(Fidelity.DEGRADED, source="came with kubelet 1.16; pods start, unaligned"),
    Field.SEVERAL_CONTAINERS: Rule(
        Fidelity.IMPOSSIBLE,
        source="one container in each call before kubelet 1.10 (#60318)",
        advice="this API has one container in each Allocate. Make one call for each",
    ),
    Field.ENVS: Rule(Fidelity.LOSSLESS, source=_SAME),
    Field.MOUNTS: Rule(Fidelity.LOSSLESS, source=_SAME),
    Field.DEVICE_NODES: Rule(Fidelity.LOSSLESS, source=_SAME),
    Field.ANNOTATIONS: Rule(Fidelity.DEGRADED, source="came with kubelet 1.10; in no released alpha"),
    Field.CDI_DEVICES: Rule(
        Fidelity.IMPOSSIBLE, source="came with kubelet 1.28; nothing else does what CDI does", advice=CDI_ADVICE
    ),
    Field.PREFERRED_ALLOCATION: Rule(Fidelity.DEGRADED, source="came with kubelet 1.19; the kubelet chooses by itself"),
    Field.PRE_START: Rule(
        Fidelity.IMPOSSIBLE,
        source="came with kubelet 1.10; containers would start unprepared",
        advice="its containers would start on devices that nobody made ready; run kubelet 1.10 or later",
    ),
}


class Alpha(Struct, eq=False):
    """An alpha dialect: its name, its kubelets and its encoding of Allocate's answer."""

    name: str
    kubelets: Level
    spell_answer: Callable[[ContainerRequest, ContainerAnswer], Message]
    read_answer: Callable[[bytes], ContainerAnswer]
    """Raises MalformedError."""
    schema: FileDescriptor
    asks_again: bool = False
    writes_late: bool = False
    names_itself: bool = True
    family: str = "v1alpha"
    registration_service: str = "deviceplugin.Registration"
    plugin_service: str = "deviceplugin.DevicePlugin"
    rules: Mapping[Field, Rule] = field(default_factory=lambda: _RULES)
    spacing: float = 0.0

    def encode_register(self, registration: Registration) -> Wire:
        message = pb.RegisterRequest(
            version=registration.version, endpoint=registration.endpoint, resource_name=registration.resource_name
        )
        return Wire(serialize(message), left_out(self, of_registration(registration)))

    def decode_register(self, data: bytes) -> Registration:
        message = parse(pb.RegisterRequest, data, self.name)
        return Registration(message.version, message.endpoint, message.resource_name)

    def encode_options(self, options: Options) -> Wire:
        return Wire(b"", left_out(self, of_options(options)))

    def decode_options(self, data: bytes) -> Options:
        parse(pb.Empty, data, self.name)
        return Options()

    def encode_list(self, devices: Sequence[Device]) -> Wire:
        message = pb.ListAndWatchResponse(
            devices=[pb.Device(ID=device.id, health=device.health.value) for device in devices]
        )
        return Wire(serialize(message), left_out(self, of_list(devices)))

    def decode_list(self, data: bytes) -> tuple[Device, ...]:
        message = parse(pb.ListAndWatchResponse, data, self.name)
        return tuple(Device(device.ID, health(device.health)) for device in message.devices)

    def encode_allocate_request(self, containers: Sequence[ContainerRequest]) -> Wire:
        lost = left_out(self, of_allocate(containers))
        return Wire(serialize(pb.AllocateRequest(devicesIDs=containers[0].device_ids)), lost)

    def decode_allocate_request(self, data: bytes) -> tuple[ContainerRequest, ...]:
        require_bounded(data, containers=False)
        message = parse(pb.AllocateRequest, data, self.name)
        return (ContainerRequest(tuple(message.devicesIDs)),)

    def encode_allocate_answer(
        self,
        containers: Sequence[ContainerRequest],
        answers: Sequence[ContainerAnswer],
        level: Level,
    ) -> Wire:
        require_answers(containers, answers)
        lost = left_out(self, of_allocate(containers, answers), level)
        [container], [answer] = containers, answers
        return Wire(serialize(self.spell_answer(container, answer)), lost)

    def decode_allocate_answer(self, data: bytes) -> tuple[ContainerAnswer, ...]:
        return (self.read_answer(data),)

    def encode_preferred_request(self, containers: Sequence[PreferredRequest]) -> Wire:
        return Wire(b"", left_out(self, of_preferred(containers)))

    def decode_preferred_request(self, data: bytes) -> tuple[PreferredRequest, ...]:
        parse(pb.Empty, data, self.name)
        return ()

    def encode_preferred_answer(self, containers: Sequence[Sequence[str]]) -> Wire:
        return Wire(b"", left_out(self, of_preferred(containers)))

    def decode_preferred_answer(self, data: bytes) -> tuple[tuple[str, ...], ...]:
        parse(pb.Empty, data, self.name)
        return ()

    def encode_pre_start_request(self, device_ids: Sequence[str]) -> Wire:  # noqa: ARG002  nothing of it can be said
        return Wire(b"", left_out(self, [Field.PRE_START]))

    def decode_pre_start_request(self, data: bytes) -> tuple[str, ...]:
        message = f"device plugin API {self.name} has no PreStartContainer, but {len(data)} bytes of a request came"
        raise MalformedError(message)
