"""A GPU, and how a set of them looks to the kubelet.

What every kind of GPU has in common, whoever made it, so that choosing among GPUs and answering for them are written
once. A GPU's UUID is its device ID: it means the same GPU after a restart, an upgrade or a change of the kubelet's API,
where an index may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from devices.model import Device, Health, Kind, Options, Trouble
from devices.source import Listing


@dataclass(frozen=True, slots=True)
class GPU:
    """One physical GPU.

    ``index`` is its place on the node now, ``minor`` the number of its device node; both from 0. ``numa_node`` None
    means that it has no known place. ``trouble`` is what is wrong with it. ``device_nodes`` are host paths that a container
    needs in order to use it, the same inside and outside. ``cdi_name`` is the fully qualified CDI name under which the
    container runtime finds it ('' where it has none), and ``pre_start`` whether it must be made ready each time a container
    with it starts.
    """

    uuid: str
    index: int
    minor: int
    numa_node: int | None = None
    trouble: Trouble | None = None
    device_nodes: tuple[str, ...] = ()
    cdi_name: str = ""
    pre_start: bool = False

    @property
    def health(self) -> Health:
        """Whether a container can use it: in spite of a trouble that is only an application's, it can."""
        well = self.trouble is None or self.trouble.kind is Kind.APPLICATION
        return Health.HEALTHY if well else Health.UNHEALTHY


def listing(
    gpus: Iterable[GPU], recovered: frozenset[str] = frozenset(), released: frozenset[str] = frozenset()
) -> Listing:
    """Show GPUs as devices: the UUID is the ID, and the kubelet is asked to let us choose among them.

    PreStartContainer is asked for where any of them must be made ready. ``recovered`` and ``released`` are UUIDs, and mean
    what they mean in ``Listing``.
    """
    gpus = tuple(gpus)
    return Listing(
        devices=tuple(Device(gpu.uuid, gpu.health, () if gpu.numa_node is None else (gpu.numa_node,)) for gpu in gpus),
        options=Options(any(gpu.pre_start for gpu in gpus), preferred_allocation=True),
        troubles={gpu.uuid: gpu.trouble for gpu in gpus if gpu.trouble is not None},
        recovered=recovered,
        released=released,
    )


def in_order(device_ids: Iterable[str], gpus: Mapping[str, GPU]) -> list[str]:
    """Sort device IDs by their GPU's index; those of no GPU in ``gpus`` (by UUID) come last, by ID.

    The kubelet hands IDs over in random order: a set. Whoever shows them on puts them in this one.
    """

    def place(device_id: str) -> tuple[float, str]:
        gpu = gpus.get(device_id)
        return (float("inf") if gpu is None else gpu.index, device_id)

    return sorted(device_ids, key=place)
