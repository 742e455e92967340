"""The answer to Allocate, with which the container runtime gives a container its GPUs. Pure; docs/answers.md has the table.

The vendor decides how (``vendor``); this module has what holds for all. A field that this kubelet can't carry is dropped if
something else brings the GPU, else the call is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from devices.gpu.asked import Asked, unsaid
from devices.gpu.vendor import Vendor, vendor_of
from devices.model import ContainerAnswer, Fault, Field, RefusedError
from devices.replicas import is_replica


def answer(asked: Asked, device_ids: Collection[str], vendors: Sequence[Vendor]) -> ContainerAnswer:
    """Return how a container gets these devices: GPUs in the order of their indices, each once.

    Raises:
        RefusedError: INVALID_ARGUMENT, more than one replica is asked for, and the operator wants that refused;
            FAILED_PRECONDITION, the container would start without a GPU, because this kubelet can't carry what brings
            it, or that isn't known yet.
    """
    alone = asked.policy.fail_requests_greater_than_one
    if alone and len(device_ids) > 1 and any(is_replica(one, asked.gpus) for one in device_ids):
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f'invalid allocation request for "{asked.resource}": invalid request: maximum request size for shared resources is '
            f"1; found {len(device_ids)}: ask for one, or set failRequestsGreaterThanOne to false",
        )
    unseen = not asked.known and len(vendors) == 1  # Whatever their resource's name is, they are this vendor's.
    vendor = vendors[0] if unseen else vendor_of(asked.first_name(), vendors)
    names = tuple(gpu.cdi_name for gpu in asked.known if gpu.cdi_name)
    return _by_own_names(asked, names, vendor) if names and len(names) == len(asked.uuids) else vendor.answer(asked)


def _by_own_names(asked: Asked, names: tuple[str, ...], vendor: Vendor) -> ContainerAnswer:
    """Return the answer for GPUs that have CDI names of their own. If the names may not arrive, their content is sent as well.

    Raises:
        RefusedError: CDI names can't arrive, and nothing else brings what they stand for.
    """
    if Field.CDI_DEVICES in asked.sayable.said:
        return ContainerAnswer(cdi_devices=names)
    if Field.CDI_DEVICES in asked.sayable.unsure:
        return replace(vendor.again(asked), cdi_devices=names)
    raise unsaid(asked.resource, [Field.CDI_DEVICES])
