"""A GPU or a partition of one, independent of the vendor.

A GPU's UUID is its device ID: it means the same GPU after a restart, an upgrade or a change of the kubelet's API, while an
index may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from devices.model import Health, Trouble, TroubleKind
from devices.policy import IdStrategy
from devices.replicas import unshared


class Way(StrEnum):
    """How two GPUs are connected, the nearest first. The values are the words of ``nvidia-smi topo`` and ``rocm-smi``."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    PIX = "pix"
    """Over one PCIe switch."""
    PXB = "pxb"
    """Over several PCIe switches, without the CPU."""
    PHB = "phb"
    """Over the host bridge of a CPU."""
    NODE = "node"
    """Over several host bridges of a NUMA node."""
    SYS = "sys"
    """Over the link between NUMA nodes."""


FARTHEST: Final = 40
"""The distance of two GPUs without a known link."""
_DIRECT: Final = 12
_OVER_PCIE: Final[Mapping[Way, int]] = {Way.PIX: 28, Way.PXB: 30, Way.PHB: 33, Way.NODE: 36, Way.SYS: FARTHEST}


class Link(Struct, frozen=True):
    """A connection from one GPU to another, over ``lanes`` parallel links (NVLink, XGMI). ``peer`` is a GPU's ``board``."""

    peer: str
    way: Way
    lanes: int = 1

    @property
    def distance(self) -> int:
        """The distance, from 1 (nearest) to ``FARTHEST``. Twice as many lanes halve it (docs/preferred-allocation.md)."""
        return _OVER_PCIE.get(self.way) or -(-_DIRECT // (self.lanes or 1))


class GPU(Struct, frozen=True):
    """A physical GPU, or a partition of one: a MIG instance, an AMD partition.

    ``index`` is its index on the node now, ``minor`` the number of its device node; both from 0. ``numa_node`` None: unknown.
    ``trouble`` is what is wrong with it; ``lacks`` is what a partition lacks, so that no container can use it ('' if it is
    complete). ``device_nodes`` are host paths that a container needs for it, the same inside and outside. ``spec_nodes`` are
    further paths, which a container gets only with ``PASS_DEVICE_SPECS``; otherwise the vendor's container runtime adds them.
    ``cdi_name`` is its fully qualified CDI name ('' if it has none). ``pre_start``: it must be prepared each time a container
    starts with it. ``parent`` is the UUID of the GPU that a partition is on ('' for a physical GPU). ``links`` lead to other
    physical GPUs; a link that only the other GPU lists is also used.

    ``resource`` is the name under which a whole GPU of its kind is offered (``nvidia.com/gpu``), also for a partition.
    ``profile`` is a partition's kind in the vendor's words (``1g.5gb``, ``cpx_nps4``). ``partitioned``: a physical GPU is in the
    mode for partitions, even if it has none now; ``partitionable``: it has such a mode. ``place`` is the vendor's index if that
    is not a number (``0:2``: MIG). ``slot`` is a partition's place in the hardware, '' if unknown. ``product`` and ``pci``
    (``0000:07:00.0``) are for people, and show that a GPU was replaced. ``memory`` is in bytes, 0 if unknown. ``traits`` are
    further properties for claims, in the vendor's words, ``capacities`` further quantities. ``clique`` is the name of a group of
    GPUs on several nodes that can read each other's memory, '' for none.
    """

    uuid: str
    index: int
    minor: int
    numa_node: int | None = None
    trouble: Trouble | None = None
    device_nodes: tuple[str, ...] = ()
    cdi_name: str = ""
    pre_start: bool = False
    parent: str = ""
    links: tuple[Link, ...] = ()
    spec_nodes: tuple[str, ...] = ()
    resource: str = ""
    profile: str = ""
    partitionable: bool = False
    partitioned: bool = False
    lacks: str = ""
    place: str = ""
    product: str = ""
    pci: str = ""
    memory: int = 0
    traits: tuple[tuple[str, str], ...] = ()
    capacities: tuple[tuple[str, int], ...] = ()
    slot: str = ""
    clique: str = ""

    @property
    def board(self) -> str:
        """The UUID of the physical GPU."""
        return self.parent or self.uuid

    @property
    def health(self) -> Health:
        """Healthy without a trouble, or if the trouble is only an application's."""
        well = self.trouble is None or self.trouble.kind is TroubleKind.APPLICATION
        return Health.HEALTHY if well else Health.UNHEALTHY

    def named_by(self, strategy: IdStrategy) -> str:
        """Return its name in a container's environment: its UUID, or its index on the node (``2``; ``0:2`` for a MIG instance)."""
        return self.uuid if strategy is IdStrategy.UUID else self.place or str(self.index)


def found(device_id: str, gpus: Mapping[str, GPU]) -> GPU | None:
    """Return the GPU in ``gpus`` (by UUID) of a device ID, which is a UUID or a replica's ID, ``<uuid>::<n>``."""
    return gpus.get(unshared(device_id, gpus))


def in_order(device_ids: Iterable[str], gpus: Mapping[str, GPU]) -> list[str]:
    """Sort device IDs by their GPU's index in ``gpus`` (by UUID); other IDs come last, by ID.

    The kubelet sends IDs in random order (a Go map). Containers and people see them in this order.
    """

    def place(device_id: str) -> float:
        gpu = found(device_id, gpus)
        return float("inf") if gpu is None else gpu.index

    ids = sorted(device_ids)  # Two sorts: Python sorts strings four times as fast as pairs.
    return sorted(ids, key=place) if len(ids) > 1 else ids
