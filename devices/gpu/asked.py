"""A request for GPUs with everything that its answer needs, and the answers that are the same for every vendor. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from devices.gpu.backend import Sight
from devices.gpu.model import GPU, in_order
from devices.model import ContainerAnswer, DeviceNode, Fault, Field, RefusedError, Sendable
from devices.policy import Policy
from devices.replicas import unshared
from devices.source import not_carried

if TYPE_CHECKING:
    from devices.gpu.cdi import Specification


class NodeTraits(Struct, frozen=True):
    """Facts about the node that answers need.

    ``extras`` are CDI names of further devices that each container with a GPU gets. ``specifications`` are the CDI
    specifications; ``without_cdi`` is why there are none ('' if there are).
    """

    sight: Sight = Sight(())
    extras: tuple[str, ...] = ()
    specifications: tuple[Specification, ...] = ()
    without_cdi: str = ""


class Asked:
    """A request, and everything that its answer needs.

    Args:
        resource: the resource name of the request.
        device_ids: UUIDs, or replicas of them.
        gpus: the GPUs of the resource, by UUID. Until the first inventory, requested devices may be missing here: the
            gateway serves the devices that it announced before.
        policy: the operator's settings.
        sendable: the fields that reach this kubelet.
        around: facts about the node.
        token: a new UUID (version 4), which makes the key of an annotation unique.
    """

    def __init__(
        self,
        resource: str,
        device_ids: Iterable[str],
        gpus: Mapping[str, GPU],
        policy: Policy,
        sendable: Sendable,
        around: NodeTraits,
        token: str = "",
    ) -> None:
        self.resource, self.gpus, self.policy, self.sendable, self.around = resource, gpus, policy, sendable, around
        self.token = token
        self.uuids = tuple(dict.fromkeys(unshared(one, gpus) for one in in_order(device_ids, gpus)))
        self.known = [gpus[uuid] for uuid in self.uuids if uuid in gpus]

    def require_known(self, what: str) -> None:
        """Check that all GPUs have been seen, because ``what`` of each is needed.

        Raises:
            RefusedError: FAILED_PRECONDITION, a GPU hasn't.
        """
        unknown = [uuid for uuid in self.uuids if uuid not in self.gpus]
        if unknown:
            raise RefusedError(
                Fault.FAILED_PRECONDITION,
                f"{self.resource}: the {what} of {', '.join(unknown[:4])} is not known, because the "
                "gateway has not checked that GPU yet. See in the log if its driver is loaded, and "
                "start the container again",
            )


def visible_devices(asked: Asked, variable: str) -> ContainerAnswer:
    """Return the variable with the GPUs that a vendor's runtime reads, in the order of their indices, and their device nodes.

    Raises:
        RefusedError: this kubelet's API lacks a field for them, so the container would start without its GPUs.
    """
    nodes = dict.fromkeys(path for gpu in asked.known for path in gpu.device_nodes)
    needed = {Field.ENVS} | ({Field.DEVICE_NODES} if nodes else set())
    if missing := needed - asked.sendable.certain:
        raise not_carried(asked.resource, missing)
    return ContainerAnswer(
        envs={variable: ",".join(asked.uuids)}, device_nodes=tuple(DeviceNode(path, path) for path in nodes)
    )


def by_nodes(asked: Asked) -> ContainerAnswer:
    """Return the device nodes of the GPUs, with those that each container with a GPU needs.

    Raises:
        RefusedError: a GPU has none, or this kubelet can't carry them.
    """
    asked.require_known("device nodes")
    if bare := [gpu.uuid for gpu in asked.known if not gpu.device_nodes]:
        raise RefusedError(
            Fault.FAILED_PRECONDITION,
            f"{asked.resource}: {', '.join(bare[:4])} has no device node. Is its driver loaded?",
        )
    if Field.DEVICE_NODES not in asked.sendable.certain:
        raise not_carried(asked.resource, [Field.DEVICE_NODES])
    paths = dict.fromkeys(
        (*asked.around.sight.control_nodes, *(path for gpu in asked.known for path in gpu.device_nodes))
    )
    return ContainerAnswer(device_nodes=tuple(DeviceNode(path, path) for path in paths))
