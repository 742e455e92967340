"""What Allocate tells the container runtime, so that a container gets its GPUs.

An environment variable that a vendor's runtime looks for, which every version of the kubelet's API can say, with device
nodes for GPUs that name some; or CDI names, which bring all of that and which only kubelets from 1.29 on are sure to pass on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from devices.gpu.model import GPU, in_order
from devices.model import ContainerAnswer, DeviceNode, Fault, Field, RefusedError, Sayable

# Each vendor's runtime has a variable of its own: with one for all, a container that has GPUs of two vendors would see
# only the ones that the kubelet wrote last.
_VARIABLES: Final[Mapping[str, str]] = {"amd.com": "AMD_VISIBLE_DEVICES"}
_VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"


def reached(resource: str, device_ids: Iterable[str], gpus: Mapping[str, GPU], sayable: Sayable) -> ContainerAnswer:
    """Say how a container gets these GPUs: by CDI names where all have one, else by ``visible_devices``.

    Where it can't be known whether CDI names arrive, the variable says the same once more.

    Raises:
        RefusedError: as ``visible_devices``; and where CDI names can't arrive, because nothing else brings what they bring.
    """
    ids = in_order(device_ids, gpus)
    names = tuple(gpus[device_id].cdi_name for device_id in ids if device_id in gpus and gpus[device_id].cdi_name)
    if not names or len(names) < len(ids):
        return visible_devices(resource, ids, gpus, sayable)
    if Field.CDI_DEVICES in sayable.said:
        return ContainerAnswer(cdi_devices=names)
    if Field.CDI_DEVICES in sayable.unsure:
        return replace(visible_devices(resource, ids, gpus, sayable), cdi_devices=names)
    raise _unsaid(resource, [Field.CDI_DEVICES])


def visible_devices(
    resource: str, device_ids: Iterable[str], gpus: Mapping[str, GPU], sayable: Sayable
) -> ContainerAnswer:
    """Name the GPUs in the variable that the vendor's runtime reads: their IDs, in the order of their indices.

    An ID without a GPU in ``gpus`` (by UUID) is named like any other: during the first discovery the gateway serves what
    it announced before the backend has seen it.

    Raises:
        RefusedError: the kubelet can't be told what the container needs, so it would start without its GPUs.
    """
    ids = in_order(device_ids, gpus)
    nodes = dict.fromkeys(path for device_id in ids if device_id in gpus for path in gpus[device_id].device_nodes)
    needed = {Field.ENVS} | ({Field.DEVICE_NODES} if nodes else set())
    if unsaid := needed - sayable.said:
        raise _unsaid(resource, unsaid)
    return ContainerAnswer(
        envs={_VARIABLES.get(resource.partition("/")[0], _VARIABLE): ",".join(ids)},
        device_nodes=tuple(DeviceNode(path, path) for path in nodes),
    )


def _unsaid(resource: str, fields: Iterable[Field]) -> RefusedError:
    return RefusedError(
        Fault.FAILED_PRECONDITION,
        f"{resource} reaches a container by {', '.join(sorted(field.value for field in fields))}, which can't be said for "
        "certain to this kubelet, so the container would start without its GPU; use a kubelet or an API version that can be "
        "told, or another backend",
    )
