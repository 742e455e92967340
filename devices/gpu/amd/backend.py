"""AMD's GPUs and their partitions, read from sysfs as by AMD's own device plugin.

The driver's folders list the GPUs. KFD's topology shows which of them compute, which partition is on which GPU, and their links.
sysfs reports no changes, so a thread reads it every few seconds; a read may hang with the driver. ``read`` reads the tree, and
``gpus`` interprets it. docs/amd.md has the rules. Their sources are ROCm/k8s-device-plugin (internal/pkg/amdgpu/amdgpu.go) and
Linux (drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import replace

from devices.gpu.amd.exporter import Exporter
from devices.gpu.amd.sysfs import (
    COMPUTE,
    MAX_ENTRIES,
    MEMORY,
    XGMI,
    AbsentError,
    DriverEntry,
    KfdNode,
    Topology,
    Tree,
    gauges,
    read,
)
from devices.gpu.backend import Sight
from devices.gpu.model import GPU, Link, Way
from devices.model import Trouble
from devices.source import Hindrance, Reading, Unusable

_RESOURCE: Final = "amd.com/gpu"
_CONTROL_NODES: Final = ("/dev/kfd",)

_UNBOUND: Final = "the kernel has no driver for it: its log (dmesg) says why"
_EVERY_S: Final = 5.0
"""Seconds between two reads of sysfs."""
_PATIENCE_S: Final = 10.0
"""Most seconds for one read, which usually takes some milliseconds."""


_log = structlog.get_logger()


class HangsError(AbsentError):
    """The driver doesn't answer, so the GPUs are unknown."""


class AmdBackend:
    """The ``Backend`` of AMD's GPUs; ``sys`` is where sysfs is."""

    name = "amd"

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._sys = sys
        self._exporter = Exporter()
        self._asked = asyncio.Event()
        self._reading: asyncio.Future[Tree] | None = None
        self._topology = Topology()
        self._seen: tuple[GPU, ...] | None = None
        self._driver = ""
        self._released: frozenset[str] = frozenset()
        self._hindrance = ""

    @property
    def hindrance(self) -> Hindrance | None:
        """Why GPUs or partitions can't be seen; None if all can."""
        return Hindrance(self.name, self._hindrance) if self._hindrance else None

    async def watch(self) -> AsyncGenerator[Sight]:
        """Yield what exists once the driver is loaded, and again after each change."""
        last: Sight | None = None
        while True:
            self._asked.clear()
            sight = await self._look()
            if sight is not None and sight != last:
                last = sight
                yield sight
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._asked.wait()

    def readings(self) -> Sequence[Reading]:
        """Read the gauges of the GPUs that aren't released. It blocks: call it in a thread. Never raises."""
        released = self._released
        return gauges(self._sys, [gpu for gpu in self._seen or () if gpu.board not in released])

    async def release(self, uuids: Collection[str]) -> None:
        """Leave these GPUs out from now on. There is nothing to close: between two reads no file is open."""
        self._released |= frozenset(uuids or {gpu.board for gpu in self._seen or ()})
        self._asked.set()

    async def acquire(self, uuids: Collection[str]) -> None:
        """Use these GPUs again, and read sysfs at once."""
        self._released -= frozenset(uuids or self._released)
        self._asked.set()

    async def _look(self) -> Sight | None:
        """Return the present GPUs; None while the driver has hung since the start."""
        try:
            tree = await self._read()
        except AbsentError as error:
            self._hinder(str(error))
            if self._seen is None:  # Without a driver, there are no GPUs. While it hangs, they are unknown.
                return None if isinstance(error, HangsError) else Sight(())
            return await self._shown(replace(gpu, trouble=Trouble(str(error))) for gpu in self._seen)
        self._hinder(overlooked(tree))
        self._driver, self._topology = tree.driver, tree.topology
        self._seen = steadied(gpus(tree), self._seen or ())
        return await self._shown(self._seen)

    def _hinder(self, reason: str) -> None:
        if reason and reason != self._hindrance:
            _log.warning("AMD GPUs can't be seen", reason=reason)
        elif self._hindrance and not reason:
            _log.info("AMD GPUs can be seen")
        self._hindrance = reason

    async def _shown(self, there: Iterable[GPU]) -> Sight:
        ill = await self._exporter.unhealthy()
        said = Trouble("AMD's metrics exporter calls it unhealthy")
        return Sight(
            gpus=tuple(
                replace(gpu, trouble=said) if gpu.uuid in ill and gpu.trouble is None else gpu
                for gpu in there
                if gpu.board not in self._released
            ),
            released=self._released,
            control_nodes=_CONTROL_NODES,
            driver_version=self._driver,
            unusable=tuple(Unusable(self.name, _UNBOUND, pci=pci, id=pci) for pci in self._topology.unbound),
        )

    async def _read(self) -> Tree:
        """Read the tree in a daemon thread, so that a hanging driver can't delay the end of the process. At most one runs.

        Raises:
            AbsentError: there is no tree.
            HangsError: the thread hangs.
        """
        if self._reading is None:
            self._reading = _in_thread(lambda: read(self._sys, self._topology))
        done, _ = await asyncio.wait({self._reading}, timeout=_PATIENCE_S)
        if not done:
            raise HangsError(
                f"the amdgpu driver hangs: {self._sys} was not read within {_PATIENCE_S:g} s. If this lasts, reboot the node"
            )
        reading, self._reading = self._reading, None
        return reading.result()


def gpus(tree: Tree) -> tuple[GPU, ...]:
    """Return the GPUs and partitions of a tree, in the order of KFD's nodes, each GPU before its partitions.

    A GPU has a trouble if KFD doesn't know it, or a part of it can't be read. Platform devices that KFD doesn't know are left
    out, because the driver makes more of them than it uses.
    """
    by_render = {node.render: node for node in tree.topology.nodes}
    nodes = {entry.id: node for entry in tree.whole if (node := by_render.get(entry.render or 0)) is not None}
    boards = _boards(tree)
    entries = {entry.id: entry for entry in tree.whole}
    partitions: dict[str, dict[int, DriverEntry]] = {}
    for part in tree.partitions:
        if (node := by_render.get(part.render or 0)) is not None:
            partitions.setdefault(boards[node.number], {})[node.number] = part
    troubles = {
        entry.id: _trouble(entry, nodes.get(entry.id), tree.topology) or _doubt(entry, partitions, tree.whole)
        for entry in tree.whole
    }
    found: list[GPU] = []
    for entry in _in_order(tree.whole, nodes):
        there = nodes.get(entry.id)
        links = () if there is None else _links(entry, there, boards, entries)
        profile = _profile(entry) or (_usual(entry, tree.whole, troubles) if troubles[entry.id] else "")
        whole = _gpu(entry, entry, profile, links, troubles[entry.id], there)
        found.append(whole)
        for _, part in sorted(partitions.get(entry.id, {}).items()):
            one = _gpu(part, entry, profile, links, whole.trouble, by_render[part.render or 0])
            found.append(replace(one, parent=entry.id))
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(found))


def overlooked(tree: Tree) -> str:
    """Return why GPUs or partitions may be missing from the list; '' if none is."""
    if tree.topology.problem:
        return f"KFD's topology can't be read: {tree.topology.problem}"
    boards = _boards(tree)
    known = {entry.render for entry in (*tree.whole, *tree.partitions)}
    lost = [node for node in tree.topology.nodes if node.render not in known or not boards[node.number]]
    if not lost:
        return ""
    return (
        f"KFD's node {lost[0].number} computes (render minor {lost[0].render}), but the driver shows no GPU or partition "
        "for it: reload the driver or reboot the node"
    )


def steadied(now: Sequence[GPU], before: Sequence[GPU]) -> tuple[GPU, ...]:
    """Return the GPUs of ``now``; for GPUs with a trouble now, return their state ``before`` with this trouble.

    The reason: while a GPU can't be read, its partitions and its name are unknown. Also add a trouble to a GPU that lost its
    mode, and to missing partitions of a GPU whose mode is the same.
    """
    known = {gpu.uuid: gpu for gpu in before}
    wholes = {gpu.uuid: _still_moded(gpu, known.get(gpu.uuid)) for gpu in now if not gpu.parent}
    troubles = {uuid: gpu.trouble for uuid, gpu in wholes.items() if gpu.trouble is not None}
    kept = [replace(gpu, trouble=troubles[gpu.board]) for gpu in before if gpu.board in troubles]
    boards = {gpu.board for gpu in kept}
    shown = [*kept, *(gpu for gpu in now if gpu.board not in boards), *_missing(now, before, wholes.keys() - boards)]
    if len(shown) == len(now) and not kept:
        return tuple(now)
    places = {gpu.uuid: place for place, gpu in enumerate(before)}
    shown.sort(key=lambda gpu: places.get(gpu.board, len(before)))
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(shown))


def _still_moded(gpu: GPU, before: GPU | None) -> GPU:
    if before is None or not before.profile or gpu.profile or gpu.trouble is not None:
        return gpu
    reason = f"its partition mode was {before.profile} and is gone: if that is meant, restart the gateway"
    return replace(gpu, trouble=Trouble(reason))


def _missing(now: Sequence[GPU], before: Sequence[GPU], boards: Collection[str]) -> Iterable[GPU]:
    """Yield the missing partitions of these ``boards``, with a trouble, unless others replaced them."""
    modes, there = {gpu.uuid: gpu.profile for gpu in now}, Counter(gpu.parent for gpu in now)
    were, known = Counter(gpu.parent for gpu in before), modes.keys()
    for gpu in before:
        same = gpu.parent in boards and modes[gpu.parent] == gpu.profile
        if same and gpu.uuid not in known and there[gpu.parent] < were[gpu.parent]:
            reason = f"its GPU is still partitioned as {gpu.profile}, but the driver or KFD doesn't show this partition"
            yield replace(gpu, trouble=Trouble(reason))


def _in_order(wholes: Sequence[DriverEntry], nodes: Mapping[str, KfdNode]) -> list[DriverEntry]:
    """Sort GPUs by KFD's nodes. A GPU without a node is sorted by PCI address, so that no index changes."""
    places: dict[str, float] = {entry.id: nodes[entry.id].number for entry in wholes if entry.id in nodes}
    for entry in wholes:
        after = [places[other] for other in nodes if other > entry.id]
        places.setdefault(entry.id, min(after, default=MAX_ENTRIES) - 0.5)
    return sorted(wholes, key=lambda entry: (places[entry.id], entry.id))


def _profile(entry: DriverEntry) -> str:
    return f"{entry.compute}_{entry.memory}" if entry.compute and entry.memory else ""


def _like(entry: DriverEntry, wholes: Iterable[DriverEntry]) -> list[DriverEntry]:
    """Return the other GPUs of the same product whose partition mode is known."""
    return [one for one in wholes if one.id != entry.id and one.product == entry.product and _profile(one)]


def _usual(entry: DriverEntry, wholes: Iterable[DriverEntry], troubles: Mapping[str, Trouble | None]) -> str:
    """Return the mode of the healthy GPUs of the same product, '' if they differ. A GPU with a trouble is listed with it."""
    profiles = {_profile(one) for one in _like(entry, wholes) if troubles[one.id] is None}
    return profiles.pop() if len(profiles) == 1 else ""


def _doubt(entry: DriverEntry, partitions: Mapping[str, object], wholes: Sequence[DriverEntry]) -> Trouble | None:
    """Return a trouble if a GPU may be partitioned but a file with its mode is missing. GPUs without modes have neither file."""
    missing = [name for name, mode in ((COMPUTE, entry.compute), (MEMORY, entry.memory)) if not mode]
    if not missing or not (len(missing) == 1 or entry.id in partitions or _like(entry, wholes)):
        return None
    return Trouble(f"it may be partitioned: {' and '.join(missing)} is missing; reload the driver or reboot the node")


def _gpu(
    entry: DriverEntry,
    board: DriverEntry,
    profile: str,
    links: tuple[Link, ...],
    trouble: Trouble | None,
    node: KfdNode | None,
) -> GPU:
    """Return a GPU or a partition, with the properties of its ``board`` and of its own KFD node."""
    nodes = [f"/dev/dri/card{entry.card}"] if entry.card is not None else []
    nodes += [f"/dev/dri/renderD{entry.render}"] if entry.render is not None else []
    return GPU(
        uuid=entry.id,
        index=0,
        minor=entry.render or 0,
        numa_node=board.numa_node,
        trouble=trouble,
        device_nodes=tuple(nodes),
        links=links,
        resource=_RESOURCE,
        profile=profile,
        product=board.product,
        pci=board.id,
        memory=0 if node is None else node.memory,
        traits=(("deviceID", board.device),) if board.device else (),
        capacities=() if node is None else _capacities(node),
    )


def _capacities(node: KfdNode) -> tuple[tuple[str, int], ...]:
    """Return the compute capacities, with the names of AMD's DRA driver (pkg/amdgpu/amdgpu.go of k8s-gpu-dra-driver)."""
    units = node.simds // node.per_cu if node.per_cu else 0
    return tuple((name, count) for name, count in (("computeUnits", units), ("simdUnits", node.simds)) if count)


def _trouble(entry: DriverEntry, node: KfdNode | None, topology: Topology) -> Trouble | None:
    if entry.problem:
        return Trouble(f"it can't be read: {entry.problem}")
    if entry.render is None:
        return Trouble("the amdgpu driver has no render node for it")
    if node is not None:
        return None
    unread = f" ({topology.problem})" if topology.problem else ""
    return Trouble(f"KFD, which computes, has no node with the render minor {entry.render}{unread}")


def _boards(tree: Tree) -> dict[int, str]:
    """Return the ID of the GPU that each of KFD's nodes is on, '' if there is none."""
    own = {entry.render: entry.id for entry in tree.whole}
    places = [(*_address(entry.id), entry.id) for entry in tree.whole]
    return {node.number: own.get(node.render) or _board(node, places) for node in tree.topology.nodes}


def _address(pci: str) -> tuple[int, int]:
    """Return the domain and the location of a PCI address, as in KFD's nodes."""
    domain, bus, rest = pci.split(":")
    device, _, function = rest.partition(".")
    return int(domain, 16), int(bus, 16) << 8 | int(device, 16) << 3 | int(function)


def _board(node: KfdNode, wholes: Iterable[tuple[int, int, str]]) -> str:
    """Return the ID of a node's GPU: at its bus and device, with its function or the next lower one.

    The function in a partition's location is the partition's number. (Its unique ID has the GPU only with older drivers:
    ROCm/k8s-device-plugin#162.)
    """
    near = [
        (location, uuid)
        for domain, location, uuid in wholes
        if (domain, location >> 3) == (node.domain, node.location >> 3) and location <= node.location
    ]
    return max(near, default=(0, ""))[1]


def _links(
    entry: DriverEntry, node: KfdNode, boards: Mapping[int, str], entries: Mapping[str, DriverEntry]
) -> tuple[Link, ...]:
    """Return the connections of a GPU to the others, the nearest for each. KFD knows NUMA nodes, and no PCIe switches."""
    best: dict[str, Link] = {}
    for wire in node.wires:
        peer = boards.get(wire.to, "")
        if not peer or peer == entry.id:
            continue
        same = entry.numa_node is not None and entry.numa_node == entries[peer].numa_node
        way = Way.XGMI if wire.kind == XGMI else Way.NODE if same else Way.SYS
        link = Link(peer, way, wire.lanes if way is Way.XGMI else 1)
        best[peer] = min(best.get(peer, link), link, key=lambda one: one.distance)
    return tuple(best[peer] for peer in sorted(best))


def _in_thread(work: Callable[[], Tree]) -> asyncio.Future[Tree]:
    done: Future[Tree] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="amd-sysfs", daemon=True).start()
    return asyncio.wrap_future(done)
