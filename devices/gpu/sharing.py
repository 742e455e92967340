"""Time-slicing: one GPU or partition offered several times, as replicas ``<uuid>::0``, ``<uuid>::1``, ….

Which resources are shared, how often and under which name is the operator's ``Policy.slices``; the IDs are those of NVIDIA's
device plugin, so that a checkpoint from before a swap stays true. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from devices.gpu.model import GPU
from devices.gpu.naming import NamingError
from devices.model import Device, Options
from devices.policy import Policy
from devices.source import Listing


@dataclass(frozen=True, slots=True)
class Offer:
    """What stands beneath one resource name: GPUs by UUID, each offered ``replicas`` times (0: as itself, unshared)."""

    gpus: Mapping[str, GPU]
    replicas: int = 0

    def ids(self, uuid: str) -> Iterator[str]:
        """Yield the device IDs of a GPU."""
        if not self.replicas:
            yield uuid
        for number in range(self.replicas):
            yield f"{uuid}::{number}"


def offered(named: Mapping[str, Iterable[GPU]], policy: Policy) -> dict[str, Offer]:
    """Say what each resource offers, by the name that it is shown as.

    Raises:
        NamingError: two resources are to be shown as one.
    """
    offers: dict[str, Offer] = {}
    for name, gpus in named.items():
        slices = policy.slices.get(name)
        shown = name if slices is None else slices.shown_as
        if shown in offers:
            raise NamingError(f"expected a name for each resource; got {shown} for {name}, too: rename one of them")
        offers[shown] = Offer({gpu.uuid: gpu for gpu in gpus}, 0 if slices is None else slices.replicas)
    return offers


def listing(offer: Offer, recovered: frozenset[str], released: frozenset[str]) -> Listing:
    """Show an offer as devices, for which the kubelet is asked to let us choose among them.

    PreStartContainer is asked for where any GPU must be made ready. ``recovered`` and ``released`` are UUIDs of GPUs, and mean
    what they mean in ``Listing`` for all their devices.
    """
    gpus = offer.gpus.values()
    return Listing(
        devices=tuple(
            Device(device_id, gpu.health, () if gpu.numa_node is None else (gpu.numa_node,))
            for gpu in gpus
            for device_id in offer.ids(gpu.uuid)
        ),
        options=Options(any(gpu.pre_start for gpu in gpus), preferred_allocation=True),
        troubles={
            device_id: gpu.trouble for gpu in gpus if gpu.trouble is not None for device_id in offer.ids(gpu.uuid)
        },
        recovered=_expanded(offer, recovered),
        released=_expanded(offer, released),
    )


def _expanded(offer: Offer, uuids: frozenset[str]) -> frozenset[str]:
    """The device IDs of these GPUs, and of the partitions on them."""
    return frozenset(
        device_id
        for gpu in offer.gpus.values()
        if gpu.uuid in uuids or gpu.parent in uuids
        for device_id in offer.ids(gpu.uuid)
    )
