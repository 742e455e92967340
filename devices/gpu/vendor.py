"""What differs between vendors: the names of GPUs, how a container gets them, and which partitions were removed on purpose.

A vendor's package has one ``Vendor``. GPUs without a vendor are ``PLAIN``: they are offered under the name that their backend
gives them, and a container gets their device nodes and no variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from devices.gpu.asked import Asked, by_nodes
from devices.gpu.model import GPU
from devices.model import ContainerAnswer, Fault, Field, RefusedError
from devices.policy import Policy
from devices.replicas import is_replica
from devices.source import not_carried


class Vendor:
    """The rules of one vendor; this class has those of ``PLAIN``. Pure.

    ``name`` is the name of its backend, ``prefix`` that of its resource names (``nvidia.com/``).
    """

    name = prefix = ""

    def name_of(self, gpu: GPU, policy: Policy) -> str | None:  # noqa: ARG002 - for vendors' rules
        """Return the name under which a GPU or partition is offered; None if it isn't."""
        return None if gpu.partitioned else gpu.resource

    def check(self, gpus: Sequence[GPU], policy: Policy) -> None:
        """Check that the policy can name the vendor's GPUs of a node.

        Raises:
            NamingError: it can't. The message says why and what to do.
        """

    def given_names(self, policy: Policy) -> Collection[str]:  # noqa: ARG002 - as above
        """Return the names that an operator gave GPUs of this vendor."""
        return ()

    def was_repartitioned(self, uuid: str, gpus: Collection[GPU]) -> bool:  # noqa: ARG002 - as above
        """Return True if a missing device, known by its ID only, was a partition that was removed or replaced on purpose."""
        return False

    def answer(self, asked: Asked) -> ContainerAnswer:
        """Return how a container gets these GPUs (by their device nodes).

        Raises:
            RefusedError: the container would start without a GPU.
        """
        return by_nodes(asked)

    def again(self, asked: Asked) -> ContainerAnswer:
        """Return an answer without CDI, which is sent with CDI names that a kubelet may drop.

        Raises:
            RefusedError: this kubelet can't carry it.
        """
        return by_nodes(asked)


PLAIN: Final = Vendor()


def vendor_of(resource: str, vendors: Iterable[Vendor]) -> Vendor:
    """Return the vendor of the GPUs with a resource name that their backend gave them."""
    for one in vendors:
        if resource.startswith(one.prefix):
            return one
    return PLAIN


def answer(asked: Asked, device_ids: Collection[str], vendors: Sequence[Vendor]) -> ContainerAnswer:
    """Return how a container gets these devices: GPUs in the order of their indices, each once.

    Raises:
        RefusedError: INVALID_ARGUMENT, more than one replica is requested, and ``fail_requests_greater_than_one`` is set.
            FAILED_PRECONDITION, the container would start without a GPU: this kubelet's API lacks the fields for it, or the GPU
            is not known yet.
    """
    alone = asked.policy.fail_requests_greater_than_one
    if alone and len(device_ids) > 1 and any(is_replica(one, asked.gpus) for one in device_ids):
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f'invalid allocation request for "{asked.resource}": invalid request: maximum request size for shared resources is '
            f"1; found {len(device_ids)}: ask for one, or set failRequestsGreaterThanOne to false",
        )
    unseen = not asked.known and len(vendors) == 1  # Whatever their resource's name is, they are this vendor's.
    # The name from the backend, because an operator may have renamed the resource.
    first_name = next((gpu.resource for gpu in asked.known if gpu.resource), asked.resource)
    vendor = vendors[0] if unseen else vendor_of(first_name, vendors)
    names = tuple(gpu.cdi_name for gpu in asked.known if gpu.cdi_name)
    return _by_own_names(asked, names, vendor) if names and len(names) == len(asked.uuids) else vendor.answer(asked)


def _by_own_names(asked: Asked, names: tuple[str, ...], vendor: Vendor) -> ContainerAnswer:
    """Return the answer for GPUs with CDI names of their own. If a kubelet may drop the names, add the device nodes.

    Raises:
        RefusedError: this kubelet's API has no CDI names.
    """
    if Field.CDI_DEVICES in asked.sendable.certain:
        return ContainerAnswer(cdi_devices=names)
    if Field.CDI_DEVICES in asked.sendable.unsure:
        return replace(vendor.again(asked), cdi_devices=names)
    raise not_carried(asked.resource, [Field.CDI_DEVICES])
