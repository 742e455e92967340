"""AMD's GPUs and their partitions, read from sysfs as AMD's own device plugin reads them.

The driver's folders name the GPUs; KFD's topology says which of them compute, which partition is on which and how they are
linked. sysfs tells nobody of a change, so it is looked at every few seconds, in a thread: a read can hang with the driver.
``gpus`` decides what a tree means, ``read`` only reads. docs/amd.md has the rules; their sources are
ROCm/k8s-device-plugin (internal/pkg/amdgpu/amdgpu.go) and Linux (drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from msgspec import Struct
from msgspec.structs import replace

from devices.gpu.amd.exporter import Exporter
from devices.gpu.backend import Sight
from devices.gpu.model import GPU, Link, Way
from devices.model import Trouble

_RESOURCE: Final = "amd.com/gpu"
_CONTROL_NODES: Final = ("/dev/kfd",)

_EVERY_S: Final = 5.0
_PATIENCE_S: Final = 10.0
"""How long one look may take; it takes some milliseconds."""
_TEXT: Final = 4096
"""The most bytes of a file that count; the kernel gives a page at most."""
_ENTRIES: Final = 1024
"""The most entries of a folder that count: 64 partitions have 65 nodes with 64 links each."""
_TRIES: Final = 3

_PCI: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
# amdgpu_xcp_30 with AMD's own kernel module, amdgpu_xcp.30 with Linux's (ROCm/k8s-device-plugin#157).
_PARTITION: Final = re.compile(r"amdgpu_xcp[._][0-9]{1,4}")
_CARD: Final = re.compile(r"card([0-9]{1,5})")
_RENDER: Final = re.compile(r"renderD([0-9]{1,5})")
_NUMBER: Final = re.compile(r"[0-9]{1,5}")
_MODE: Final = re.compile(r"[a-z0-9]{0,16}")
_FILES: Final = ("current_compute_partition", "current_memory_partition", "numa_node")
_PROPERTY: Final = re.compile(r"^([a-z0-9_]{1,40}) ([0-9]{1,20})$", re.MULTILINE)

_PCIE, _XGMI = 2, 11
"""Types of KFD's links (CRAT_IOLINK_TYPE_PCIEXPRESS, CRAT_IOLINK_TYPE_XGMI in kfd_crat.h)."""
_MOST_LANES: Final = 64

_log = structlog.get_logger()


class AbsentError(Exception):
    """AMD's GPUs can't be seen now. The message says why."""


class Entry(Struct, frozen=True):
    """What the driver has for a GPU (``id`` is its PCI address) or a partition (its platform device).

    ``card`` and ``render`` are the numbers of its device nodes, None where it has none. ``compute`` and ``memory`` are the
    partition modes of a GPU (``cpx``, ``nps4``), '' where it knows none. ``problem`` says what could not be read.
    """

    id: str
    card: int | None = None
    render: int | None = None
    compute: str = ""
    memory: str = ""
    numa_node: int | None = None
    product: str = ""
    problem: str = ""


class Wire(NamedTuple):
    """A link of KFD's topology: to which node, of which type, over how many lanes."""

    to: int
    kind: int
    lanes: int


class Node(Struct, frozen=True):
    """A node of KFD's topology that computes. ``location`` is bus << 8 | device << 3 | function, or partition."""

    number: int
    render: int
    domain: int
    location: int
    wires: tuple[Wire, ...] = ()


class Topology(Struct, frozen=True):
    """KFD's nodes as they were at ``key``, which changes with them. ``problem`` says why some could not be read."""

    key: tuple[object, ...] = ()
    nodes: tuple[Node, ...] = ()
    problem: str = ""


class Tree(Struct, frozen=True):
    """Everything in sysfs that counts, as plain values."""

    whole: tuple[Entry, ...] = ()
    partitions: tuple[Entry, ...] = ()
    topology: Topology = Topology()
    driver: str = ""


class AmdBackend:
    """The ``Backend`` of AMD's GPUs.

    Args:
        sys: where sysfs is.
        exporter: the metrics exporter of the node.
    """

    name = "amd"
    rejected = ""

    def __init__(self, sys: Path = Path("/sys"), exporter: Exporter | None = None) -> None:
        self._sys = sys
        self._exporter = exporter or Exporter()
        self._asked = asyncio.Event()
        self._reading: asyncio.Future[Tree | Exception] | None = None
        self._topology = Topology()
        self._seen: tuple[GPU, ...] | None = None
        self._driver = ""
        self._released: frozenset[str] = frozenset()
        self._absent = ""

    async def watch(self) -> AsyncGenerator[Sight]:
        """Yield what is there as soon as the driver is, and again after each change."""
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

    async def release(self, uuids: Collection[str]) -> None:
        """Leave these GPUs out from now on. There is nothing to close: between two looks no file is open."""
        self._released |= frozenset(uuids or {gpu.board for gpu in self._seen or ()})
        self._asked.set()

    async def acquire(self, uuids: Collection[str]) -> None:
        """Look at these GPUs again, and at once."""
        self._released -= frozenset(uuids or self._released)
        self._asked.set()

    async def _look(self) -> Sight | None:
        """Say what is there now; None while nothing was ever seen."""
        try:
            tree = await self._read()
        except AbsentError as error:
            if str(error) != self._absent:
                _log.warning("AMD GPUs can't be seen", reason=str(error))
            self._absent = str(error)
            if self._seen is None:
                return None
            return await self._shown(replace(gpu, trouble=Trouble(str(error))) for gpu in self._seen)
        if self._absent:
            _log.info("AMD GPUs can be seen", entries=len(tree.whole) + len(tree.partitions))
        self._absent, self._driver, self._topology = "", tree.driver, tree.topology
        self._seen = steadied(gpus(tree), self._seen or ())
        return await self._shown(self._seen)

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
            driver=self._driver,
        )

    async def _read(self) -> Tree:
        """Read the tree in a thread that the end of the process doesn't wait for.

        While one thread hangs there is no second one: this goes on waiting for it.

        Raises:
            AbsentError: there is no tree, or the thread hangs.
        """
        if self._reading is None:
            self._reading = _in_thread(lambda: read(self._sys, self._topology))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                result = await asyncio.shield(self._reading)
        except TimeoutError:
            raise AbsentError(
                f"the amdgpu driver hangs: expected {self._sys} to be read within {_PATIENCE_S:g} s; reboot the node if this "
                "lasts"
            ) from None
        self._reading = None
        if isinstance(result, Exception):
            raise result
        return result


def gpus(tree: Tree) -> tuple[GPU, ...]:
    """Say which GPUs and partitions these are, in the order of KFD's nodes, each GPU before its partitions.

    A GPU that KFD doesn't know, or of which something can't be read, is in trouble. A partition that KFD doesn't know is
    none: the driver makes more of their platform devices than it uses.
    """
    by_render = {node.render: node for node in tree.topology.nodes}
    nodes = {entry.id: node for entry in tree.whole if (node := by_render.get(entry.render or 0)) is not None}
    boards = {node.number: _board(node, nodes) for node in tree.topology.nodes}
    entries = {entry.id: entry for entry in tree.whole}
    partitions: dict[str, dict[int, Entry]] = {}
    for part in tree.partitions:
        if (node := by_render.get(part.render or 0)) is not None:
            partitions.setdefault(boards[node.number], {})[node.number] = part
    found: list[GPU] = []
    for entry in sorted(tree.whole, key=lambda one: nodes[one.id].number if one.id in nodes else _ENTRIES):
        there = nodes.get(entry.id)
        links = () if there is None else _links(entry, there, boards, entries)
        whole = _gpu(entry, entry, links, _trouble(entry, there, tree.topology))
        found.append(whole)
        for _, part in sorted(partitions.get(entry.id, {}).items()):
            found.append(replace(_gpu(part, entry, links, whole.trouble), parent=entry.id))
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(found))


def steadied(now: Sequence[GPU], before: Sequence[GPU]) -> tuple[GPU, ...]:
    """Keep what was seen ``before`` of the GPUs that are in trouble now, in its place.

    While a GPU can't be looked at, its partitions and its name are unknown, not other ones.
    """
    troubles = {gpu.uuid: gpu.trouble for gpu in now if gpu.trouble is not None and not gpu.parent}
    kept = [replace(gpu, trouble=troubles[gpu.board]) for gpu in before if gpu.board in troubles]
    if not kept:
        return tuple(now)
    places = {gpu.uuid: place for place, gpu in enumerate(before)}
    boards = {gpu.board for gpu in kept}
    shown = [*kept, *(gpu for gpu in now if gpu.board not in boards)]
    shown.sort(key=lambda gpu: places.get(gpu.board, len(before)))
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(shown))


def read(sys: Path, last: Topology) -> Tree:
    """Read the tree below ``sys``. Takes some milliseconds; most of it only where KFD's topology isn't that of ``last``.

    Raises:
        AbsentError: the driver or KFD isn't there.
    """
    try:
        root = sys.resolve(strict=True)
        kfd = _folder(root, root / "class/kfd/kfd/topology")
        drivers = _folder(root, root / "module/amdgpu/drivers/pci:amdgpu")
    except (OSError, ValueError) as error:
        raise AbsentError(f"expected the amdgpu driver with KFD to be loaded: {error}") from None
    tree = Tree()
    for _ in range(_TRIES):  # until nothing changed while it was read
        tree = _read(root, kfd, drivers, last)
        if tree.topology.key == _key(kfd, tree.whole):
            break
    return tree


def _read(root: Path, kfd: Path, drivers: Path, last: Topology) -> Tree:
    platform = root / "devices/platform"
    whole = tuple(_entry(root, drivers / name) for name in _names(drivers, _PCI))
    partitions = tuple(_entry(root, platform / name) for name in _names(platform, _PARTITION))
    key = _key(kfd, whole)
    known = key and key == last.key and not last.problem
    topology = last if known else Topology(key, *_nodes(kfd / "nodes", {entry.render for entry in whole}))
    driver, _ = _optional(root / "module/amdgpu/version")
    return Tree(whole, partitions, topology, driver)


def _gpu(entry: Entry, board: Entry, links: tuple[Link, ...], trouble: Trouble | None) -> GPU:
    """Describe a GPU or a partition, with what it has from its ``board``."""
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
        profile=f"{board.compute}_{board.memory}" if board.compute and board.memory else "",
        product=board.product,
        pci=board.id,
    )


def _trouble(entry: Entry, node: Node | None, topology: Topology) -> Trouble | None:
    if entry.problem:
        return Trouble(f"it can't be read: {entry.problem}")
    if entry.render is None:
        return Trouble("the amdgpu driver has no render node for it")
    if node is not None:
        return None
    unread = f" ({topology.problem})" if topology.problem else ""
    return Trouble(f"KFD, which computes, has no node with the render minor {entry.render}{unread}")


def _board(node: Node, wholes: Mapping[str, Node]) -> str:
    """The ID of the GPU that a node is on: at its bus and device, with its function or the next lower one.

    A partition's number stands in the function of its location. (Its unique ID says it only with older drivers:
    ROCm/k8s-device-plugin#162.)
    """
    near = [
        (whole.location, uuid)
        for uuid, whole in wholes.items()
        if (whole.domain, whole.location >> 3) == (node.domain, node.location >> 3) and whole.location <= node.location
    ]
    return max(near, default=(0, ""))[1]


def _links(entry: Entry, node: Node, boards: Mapping[int, str], entries: Mapping[str, Entry]) -> tuple[Link, ...]:
    """Say how a GPU reaches the others, the nearest way to each. KFD knows NUMA nodes, and no PCIe switches."""
    best: dict[str, Link] = {}
    for wire in node.wires:
        peer = boards.get(wire.to, "")
        if not peer or peer == entry.id:
            continue
        same = entry.numa_node is not None and entry.numa_node == entries[peer].numa_node
        way = Way.XGMI if wire.kind == _XGMI else Way.NODE if same else Way.SYS
        link = Link(peer, way, wire.lanes if way is Way.XGMI else 1)
        best[peer] = min(best.get(peer, link), link, key=lambda one: one.distance)
    return tuple(best[peer] for peer in sorted(best))


def _in_thread(work: Callable[[], Tree]) -> asyncio.Future[Tree | Exception]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Tree | Exception] = loop.create_future()

    def deliver(result: Tree | Exception) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result: Tree | Exception
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            result = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result)

    threading.Thread(target=run, name="amd-sysfs", daemon=True).start()
    return done


def _entry(root: Path, path: Path) -> Entry:
    """Read the driver's folder of a GPU or partition."""
    try:
        folder = _folder(root, path)
    except (OSError, ValueError) as error:
        return Entry(path.name, problem=str(error))
    said = {name: _optional(folder / name) for name in _FILES}
    compute, memory, numa = (said[name][0].lower() for name in _FILES)
    problems = [f"{name}: {problem}" for name, (_, problem) in said.items() if problem]
    problems += [
        f"expected a partition mode, got {one[:40]!r}" for one in (compute, memory) if not _MODE.fullmatch(one)
    ]
    product, _ = _optional(folder / "product_name")
    names = _names(folder / "drm")
    return Entry(
        id=path.name,
        card=_least(_CARD, names),
        render=_least(_RENDER, names),
        compute=compute,
        memory=memory,
        numa_node=int(numa) if _NUMBER.fullmatch(numa) else None,  # -1 where there is none
        product="".join(filter(str.isprintable, product))[:64],
        problem="; ".join(problems)[:400],
    )


def _key(kfd: Path, whole: Iterable[Entry]) -> tuple[object, ...]:
    """What changes whenever KFD's topology does: its generation, and since that begins anew with the driver, its inode.

    Empty where the kernel tells no generation.
    """
    generation, _ = _optional(kfd / "generation_id")
    try:
        inode = (kfd / "nodes").stat().st_ino
    except OSError:
        return ()
    return (generation, inode, *(entry.render for entry in whole)) if generation else ()


def _nodes(folder: Path, renders: Collection[int | None]) -> tuple[tuple[Node, ...], str]:
    """Read the nodes that compute, with the links of those that have one of these render minors; and what hindered it."""
    nodes: list[Node] = []
    problem = ""
    for name in _names(folder, _NUMBER):
        try:
            has = _properties(folder / name / "properties")
        except (OSError, ValueError) as error:
            if isinstance(error, PermissionError):  # the kernel asks the device cgroup (kfd_devcgroup_check_permission)
                problem = "this container may not use the GPUs, so KFD hides them: let it run privileged"
            problem = problem or str(error)
            continue
        if render := has.get("drm_render_minor", 0):  # a CPU has none
            wires = tuple(_wires(folder / name)) if render in renders else ()
            nodes.append(Node(int(name), render, has.get("domain", 0), has.get("location_id", 0), wires))
    return tuple(nodes), problem


def _wires(node: Path) -> Iterator[Wire]:
    for kind in ("io_links", "p2p_links"):
        for name in _names(node / kind, _NUMBER):
            with contextlib.suppress(OSError, ValueError):
                has = _properties(node / kind / name / "properties")
                if has.get("type") in {_PCIE, _XGMI}:
                    one = has.get("min_bandwidth", 0)  # of a single lane (amdgpu_amdkfd_get_xgmi_bandwidth_mbytes)
                    lanes = has.get("max_bandwidth", 0) // one if one else 1
                    yield Wire(has.get("node_to", -1), has["type"], min(max(lanes, 1), _MOST_LANES))


def _properties(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in _PROPERTY.findall(_text(path))}


def _least(pattern: re.Pattern[str], names: Iterable[str]) -> int | None:
    return min((int(match[1]) for name in names if (match := pattern.fullmatch(name))), default=None)


def _names(folder: Path, pattern: re.Pattern[str] | None = None) -> list[str]:
    """The names in a folder that have this form, sorted, of those that count; none where it can't be read."""
    try:
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries)
            fit = (name for name in names if pattern is None or pattern.fullmatch(name))
            return sorted(itertools.islice(fit, _ENTRIES))
    except OSError:
        return []


def _folder(root: Path, path: Path) -> Path:
    """Follow links to a folder, which must be in ``root``."""
    folder = Path(os.path.realpath(path, strict=True))
    if not folder.is_relative_to(root):
        raise ValueError(f"{path} leads out of {root}")
    return folder


def _optional(path: Path) -> tuple[str, str]:
    """Read a file that not every GPU has; return what it says ('' where there is none) and why it can't be read."""
    try:
        return _text(path).strip(), ""
    except FileNotFoundError:
        return "", ""
    except OSError as error:
        return "", error.strerror or str(error)
    except ValueError as error:
        return "", str(error)


def _text(path: Path) -> str:
    """Read a small file.

    Raises:
        ValueError: it is no plain file, or too big.
        OSError: it can't be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError(f"expected {path} to be a plain file")
        text = os.read(file, _TEXT + 1)
    finally:
        os.close(file)
    if len(text) > _TEXT:
        raise ValueError(f"expected at most {_TEXT} bytes in {path}")
    return text.decode(errors="replace")
