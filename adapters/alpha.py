"""The alpha dialects of kubelet 1.8 (``0.1``) and 1.9 (``v1alpha2``): two calls, one container in each Allocate, no options, no NUMA nodes.

They differ only in the answer to Allocate. The other messages are the same on the wire, so both use v1alpha2's. A call that
they lack is encoded as an empty message, and its field is in ``Wire.lost``. PreStartContainer is refused instead, because a pod
would start without its device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters import dialect, spelling
from adapters.dialect import Dialect, Fidelity, Level, MalformedError, Rule, Wire
from adapters.pb.v1alpha import v0_1_pb2
from adapters.pb.v1alpha import v1alpha2_pb2 as pb
from devices.model import ContainerAnswer, ContainerRequest, Device, Field, Options, PreferredRequest, Registration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from devices.model import DeviceNode, Mount

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
        Fidelity.IMPOSSIBLE,
        source="came with kubelet 1.28; nothing else does what CDI does",
        advice=spelling.CDI_ADVICE,
    ),
    Field.PREFERRED_ALLOCATION: Rule(Fidelity.DEGRADED, source="came with kubelet 1.19; the kubelet chooses by itself"),
    Field.PRE_START: Rule(
        Fidelity.IMPOSSIBLE,
        source="came with kubelet 1.10; containers would start unprepared",
        advice="its containers would start on devices that nobody made ready; run kubelet 1.10 or later",
    ),
}


class _Alpha(Dialect):
    """What both alpha dialects have in common."""

    family = "v1alpha"
    registration_service = "deviceplugin.Registration"
    plugin_service = "deviceplugin.DevicePlugin"
    rules = _RULES

    def encode_register(self, registration: Registration) -> Wire:
        message = pb.RegisterRequest(
            version=registration.version, endpoint=registration.endpoint, resource_name=registration.resource_name
        )
        return Wire(spelling.serialize(message), dialect.left_out(self, dialect.of_registration(registration)))

    def decode_register(self, data: bytes) -> Registration:
        message = spelling.parse(pb.RegisterRequest, data, self.name)
        return Registration(message.version, message.endpoint, message.resource_name)

    def encode_options(self, options: Options) -> Wire:
        return Wire(b"", dialect.left_out(self, dialect.of_options(options)))

    def decode_options(self, data: bytes) -> Options:
        spelling.parse(pb.Empty, data, self.name)
        return Options()

    def encode_list(self, devices: Sequence[Device]) -> Wire:
        message = pb.ListAndWatchResponse(
            devices=[pb.Device(ID=device.id, health=device.health.value) for device in devices]
        )
        return Wire(spelling.serialize(message), dialect.left_out(self, dialect.of_list(devices)))

    def decode_list(self, data: bytes) -> tuple[Device, ...]:
        message = spelling.parse(pb.ListAndWatchResponse, data, self.name)
        return tuple(Device(device.ID, spelling.health(device.health)) for device in message.devices)

    def encode_allocate_request(self, containers: Sequence[ContainerRequest]) -> Wire:
        lost = dialect.left_out(self, dialect.of_allocate(containers))
        return Wire(spelling.serialize(pb.AllocateRequest(devicesIDs=containers[0].device_ids)), lost)

    def decode_allocate_request(self, data: bytes) -> tuple[ContainerRequest, ...]:
        spelling.require_bounded(data)
        message = spelling.parse(pb.AllocateRequest, data, self.name)
        return (ContainerRequest(tuple(message.devicesIDs)),)

    def encode_preferred_request(self, containers: Sequence[PreferredRequest]) -> Wire:
        return Wire(b"", dialect.left_out(self, dialect.of_preferred(containers)))

    def decode_preferred_request(self, data: bytes) -> tuple[PreferredRequest, ...]:
        spelling.parse(pb.Empty, data, self.name)
        return ()

    def encode_preferred_answer(self, containers: Sequence[Sequence[str]]) -> Wire:
        return Wire(b"", dialect.left_out(self, dialect.of_preferred(containers)))

    def decode_preferred_answer(self, data: bytes) -> tuple[tuple[str, ...], ...]:
        spelling.parse(pb.Empty, data, self.name)
        return ()

    def encode_pre_start_request(self, device_ids: Sequence[str]) -> Wire:  # noqa: ARG002 - the call doesn't exist
        return Wire(b"", dialect.left_out(self, (Field.PRE_START,)))

    def decode_pre_start_request(self, data: bytes) -> tuple[str, ...]:
        raise MalformedError(
            f"device plugin API {self.name} has no PreStartContainer, but {len(data)} bytes of a request came"
        )


class _Kubelet18(_Alpha):
    """Kubelet 1.8: Allocate answers with one spec for each device ID.

    The answer of 1.9 has another form under the same service name (kubernetes#53031): this kubelet would read it as empty.
    """

    name = "0.1"
    kubelets = Level(8, 8)
    schema = v0_1_pb2.DESCRIPTOR
    asks_again = writes_late = True
    names_itself = False

    def encode_allocate_answer(
        self, containers: Sequence[ContainerRequest], answers: Sequence[ContainerAnswer], level: Level
    ) -> Wire:
        spelling.require_answers(containers, answers)
        lost = dialect.left_out(self, dialect.of_allocate(containers, answers), level)
        [container], [answer] = containers, answers
        # The first spec has everything, because the kubelet merges them.
        specs = [v0_1_pb2.DeviceRuntimeSpec(ID=device_id) for device_id in container.device_ids or ("",)]
        spelling.fill(specs[0], answer)
        return Wire(spelling.serialize(v0_1_pb2.AllocateResponse(spec=specs)), lost)

    def decode_allocate_answer(self, data: bytes) -> tuple[ContainerAnswer, ...]:
        """Merge the specs as kubelet 1.8 does: if a variable or a container path is there twice, the first one is used."""
        envs: dict[str, str] = {}
        mounted: dict[str, Mount] = {}
        nodes: dict[str, DeviceNode] = {}
        for spec in spelling.parse(v0_1_pb2.AllocateResponse, data, self.name).spec:
            envs = {**spec.envs, **envs}
            for mount in spelling.mounts(spec):
                mounted.setdefault(mount.container_path, mount)
            for node in spelling.device_nodes(spec):
                nodes.setdefault(node.container_path, node)
        return (ContainerAnswer(envs, tuple(mounted.values()), tuple(nodes.values())),)


class _Kubelet19(_Alpha):
    """Kubelet 1.9: the answer to Allocate is for one container."""

    name = "v1alpha2"
    kubelets = Level(9, 9)
    schema = pb.DESCRIPTOR
    # At each list and after each Allocate, 1.9 writes its checkpoint in place without a lock. Two writes at once break the file,
    # and after its next start the kubelet gives held devices to other pods. 1.8 writes only after Allocate, for one pod at a
    # time. 1.10 replaces the file by a rename.
    spacing = 0.02

    def encode_allocate_answer(
        self, containers: Sequence[ContainerRequest], answers: Sequence[ContainerAnswer], level: Level
    ) -> Wire:
        spelling.require_answers(containers, answers)
        lost = dialect.left_out(self, dialect.of_allocate(containers, answers), level)
        message = pb.AllocateResponse()
        spelling.fill(message, answers[0])
        return Wire(spelling.serialize(message), lost)

    def decode_allocate_answer(self, data: bytes) -> tuple[ContainerAnswer, ...]:
        message = spelling.parse(pb.AllocateResponse, data, self.name)
        return (ContainerAnswer(dict(message.envs), spelling.mounts(message), spelling.device_nodes(message)),)


V0_1 = _Kubelet18()
V1ALPHA2 = _Kubelet19()
