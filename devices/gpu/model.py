"""A GPU, or a partition of one, and how device IDs name it.

What every kind of GPU has in common, whoever made it, so that choosing among GPUs and answering for them are written
once. A GPU's UUID is its device ID: it means the same GPU after a restart, an upgrade or a change of the kubelet's API,
where an index may not.
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
    """How two GPUs reach each other, the nearest first. The values are the words of ``nvidia-smi topo`` and ``rocm-smi``."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    PIX = "pix"
    """Over one PCIe switch."""
    PXB = "pxb"
    """Over several PCIe switches, not over the CPU."""
    PHB = "phb"
    """Over the host bridge of a CPU."""
    NODE = "node"
    """Over several host bridges of a NUMA node."""
    SYS = "sys"
    """Over the link between NUMA nodes."""


FARTHEST: Final = 40
"""The distance of two GPUs of which no link is known."""
_DIRECT: Final = 12
_OVER_PCIE: Final[Mapping[Way, int]] = {Way.PIX: 28, Way.PXB: 30, Way.PHB: 33, Way.NODE: 36, Way.SYS: FARTHEST}


class Link(Struct, frozen=True):
    """A way from one GPU to another, over ``lanes`` links (NVLink, XGMI) side by side. ``peer`` is a GPU's ``board``."""

    peer: str
    way: Way
    lanes: int = 1

    @property
    def distance(self) -> int:
        """From 1, the nearest, to ``FARTHEST``: halved where lanes are doubled (docs/preferred-allocation.md)."""
        return _OVER_PCIE.get(self.way) or -(-_DIRECT // (self.lanes or 1))


class GPU(Struct, frozen=True):
    """One physical GPU, or a partition of one: a MIG instance, an AMD partition.

    ``index`` is its place on the node now, ``minor`` the number of its device node; both from 0. ``numa_node`` None
    means that it has no known place. ``trouble`` is what is wrong with it. ``device_nodes`` are host paths that a container
    needs in order to use it, the same inside and outside; ``spec_nodes`` are those that it gets only where an operator wants
    them passed (``PASS_DEVICE_SPECS``), because a container runtime of the vendor's brings them otherwise. ``cdi_name`` is
    the fully qualified CDI name under which the container runtime finds it ('' where it has none), and ``pre_start`` whether
    it must be made ready each time a container with it starts. ``parent`` is the UUID of the GPU that a partition is part of
    ('' where it is no partition). ``links`` lead from the physical GPU to others; one that only the other GPU names counts
    as well.

    ``resource`` is the name under which a whole GPU of its kind is offered (``nvidia.com/gpu``), for a partition too.
    ``profile`` is a partition's kind in the vendor's words (``1g.5gb``, ``cpx_nps4``). ``partitioned`` says of a physical GPU that it is
    there for partitions now, even if it has none, ``partitionable`` that it could be. ``place`` is the index in the vendor's words where that is
    no plain number (``0:2``: MIG), ``slot`` where in the hardware a partition is, '' where that isn't known. ``product`` and ``pci`` (``0000:07:00.0``) are for people, and to see a GPU replaced.
    ``memory`` is in bytes, 0 where it isn't known; ``traits`` are what else claims may ask for, names and values in the vendor's words, and
    ``capacities`` how much else of something it has. ``clique`` names the GPUs of several nodes whose memory it can reach, '' for none.
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
        """Whether a container can use it: in spite of a trouble that is only an application's, it can."""
        well = self.trouble is None or self.trouble.kind is TroubleKind.APPLICATION
        return Health.HEALTHY if well else Health.UNHEALTHY

    def named_by(self, strategy: IdStrategy) -> str:
        """Say how containers know it: by its UUID, or by its place on the node (``2``; ``0:2`` for a MIG instance)."""
        return self.uuid if strategy is IdStrategy.UUID else self.place or str(self.index)


def found(device_id: str, gpus: Mapping[str, GPU]) -> GPU | None:
    """Find the GPU in ``gpus`` (by UUID) that a device ID means: by its UUID, or as one of its replicas, ``<uuid>::<n>``."""
    return gpus.get(unshared(device_id, gpus))


def in_order(device_ids: Iterable[str], gpus: Mapping[str, GPU]) -> list[str]:
    """Sort device IDs by their GPU's index; those of no GPU in ``gpus`` (by UUID) come last, by ID.

    The kubelet hands IDs over in random order: a set. Whoever shows them on puts them in this one.
    """

    def place(device_id: str) -> float:
        gpu = found(device_id, gpus)
        return float("inf") if gpu is None else gpu.index

    ids = sorted(device_ids)  # Texts alone are sorted four times as fast as pairs, during which nothing else runs.
    return sorted(ids, key=place) if len(ids) > 1 else ids
