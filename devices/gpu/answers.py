"""What Allocate tells the container runtime, so that a container gets its GPUs.

How is the vendor's to say (``vendor``); what holds for each is here. What this kubelet can't be told is left out where something
else brings the GPU, and refused where nothing does. Pure; docs/answers.md has the table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from devices.gpu.asked import Asked, unsaid
from devices.gpu.vendor import Vendor, vendor_of
from devices.model import ContainerAnswer, Fault, Field, RefusedError
from devices.replicas import is_replica


def answer(asked: Asked, device_ids: Collection[str], vendors: Sequence[Vendor]) -> ContainerAnswer:
    """Say how a container gets these devices, GPUs in the order of their indices, each once.

    Raises:
        RefusedError: INVALID_ARGUMENT, more than one of a shared resource where the operator wants that refused;
            FAILED_PRECONDITION, the container would start without a GPU, because this kubelet can't be told what brings it, or
            what brings it isn't known yet.
    """
    alone = asked.policy.fail_requests_greater_than_one
    if alone and len(device_ids) > 1 and any(is_replica(one, asked.gpus) for one in device_ids):
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f'invalid allocation request for "{asked.resource}": invalid request: maximum request size for shared resources is '
            f"1; found {len(device_ids)}: ask for one, or set failRequestsGreaterThanOne to false",
        )
    unseen = not asked.known and len(vendors) == 1  # Whatever an operator calls them, they are this vendor's.
    vendor = vendors[0] if unseen else vendor_of(asked.first_name(), vendors)
    names = tuple(gpu.cdi_name for gpu in asked.known if gpu.cdi_name)
    return _by_own_names(asked, names, vendor) if names and len(names) == len(asked.uuids) else vendor.answer(asked)


def _by_own_names(asked: Asked, names: tuple[str, ...], vendor: Vendor) -> ContainerAnswer:
    """Say GPUs that all have CDI names of their own. Where it can't be known whether those arrive, they are said once more.

    Raises:
        RefusedError: CDI names can't arrive, and nothing else brings what they bring.
    """
    if Field.CDI_DEVICES in asked.sayable.said:
        return ContainerAnswer(cdi_devices=names)
    if Field.CDI_DEVICES in asked.sayable.unsure:
        return replace(vendor.again(asked), cdi_devices=names)
    raise unsaid(asked.resource, [Field.CDI_DEVICES])
