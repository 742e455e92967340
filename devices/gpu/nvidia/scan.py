"""One look at all GPUs by an open NVML: their state, their partitions, their connections, and the GPUs that can't be read.

It runs in the looking thread (``watch``). If a GPU fails, its last known state stays, with the reason as its trouble. If it was
never seen, it is ``Unusable``, with the reason. So every GPU that NVML or the kernel's driver reports is listed somewhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from devices.gpu.backend import Sight
from devices.gpu.model import GPU, Link, Way
from devices.gpu.nvidia.health import Looked
from devices.gpu.nvidia.kernel import KernelFacts
from devices.gpu.nvidia.nvml import DeniedError, LostError, Nvml, NvmlError
from devices.model import Trouble, TroubleKind
from devices.source import Unusable

_VENDOR: Final = "nvidia"
_DISPLAYS: Final = frozenset({"DGX Display", "NVIDIA DGX Display"})
"""Products that only drive a screen. They aren't offered, as in NVIDIA's plugin (New, pkg/nvlib/device of NVIDIA/go-nvlib)."""
_DENIED: Final = ". Run the gateway privileged, or for MIG with SYS_ADMIN and NVIDIA_MIG_MONITOR_DEVICES=all"


class Scan(Struct, frozen=True):
    """The result of one look, begun at ``at``, at all GPUs except those in ``let``.

    ``at`` and ``reloaded`` are monotonic seconds. ``reloaded`` is when NVML was closed, if the driver was loaded again since the
    look before (None: it wasn't). In ``sight``, no GPU has a trouble, ``recovered`` and ``released`` are missing, and ``imex``
    means that IMEX channel 0 exists.
    """

    at: float
    sight: Sight
    looks: Mapping[str, Looked]
    let: frozenset[str]
    reloaded: float | None


class Seat(Struct, frozen=True):
    """A GPU that NVML counts, or (``index`` None) that only the kernel's driver reports. '' means unknown.

    ``error`` is why it can't be read.
    """

    index: int | None = None
    uuid: str = ""
    pci: str = ""
    error: NvmlError | None = None


class Let(Struct, frozen=True):
    """The GPUs that must not be used: these, or (``all``) NVML as a whole."""

    uuids: frozenset[str] = frozenset()
    all: bool = False


class Session(Struct):
    """What is known while NVML is open. ``lost``: NVML must be opened again to correct something."""

    listener: threading.Thread | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    plugged: frozenset[str] = frozenset()
    boards: dict[str, GPU] = field(default_factory=dict)
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    heard: frozenset[str] = frozenset()
    lost: bool = False
    began: float = 0.0


class Busy:
    """The present step of a thread and its start (monotonic seconds), because a call of NVML may hang in it."""

    def __init__(self) -> None:
        self.at: tuple[float, str] | None = None

    def on(self, what: str) -> None:
        """Begin a step; ``what`` is a GPU's UUID or the step's name."""
        self.at = time.monotonic(), what

    def off(self) -> None:
        """End the step."""
        self.at = None


class Scanner:
    """Looks at GPUs, and remembers the last state of each."""

    def __init__(self, nvml: Nvml, node: KernelFacts, busy: Busy) -> None:
        self._nvml, self._node, self._busy = nvml, node, busy
        self._known: dict[str, tuple[GPU, ...]] = {}
        self._displays: dict[str, Unusable] = {}
        self._capabilities: Mapping[str, int] = {}
        self._driver = ""

    def scan(self, session: Session, let: Let, reloaded: float | None) -> Scan:
        """Look at every GPU, except those in ``let``.

        Raises:
            NvmlError: no GPU can be read now.
        """
        at = time.monotonic()
        seats = self.seats(let)
        known, looks, unseen = self._look_at_all(session, seats, at)
        unusable = list(self._displays.values())
        for seat in self._named(unseen, session, seats, let):
            error = seat.error or NvmlError("it can't be read")
            index = "" if seat.index is None else str(seat.index)
            if seat.uuid in self._known and seat.index is not None:
                known[seat.uuid], looks[seat.uuid] = self._known[seat.uuid], Looked(at, *_failed(error))
            else:
                reason = _failed(error)[0].reason
                unusable.append(Unusable(_VENDOR, reason, index, seat.pci, seat.uuid, cause=error.cause))
        self._link(session)
        known = dict(sorted(known.items(), key=lambda item: item[1][0].index))
        known = {u: (replace(g, links=self._links(session, g, known)), *rest) for u, (g, *rest) in known.items()}
        self._known = {uuid: gpus for uuid, gpus in self._known.items() if uuid in let.uuids} | known
        failed = any(seat.error is not None for seat in seats)
        unheard = {seat.uuid for seat in seats if seat.error is None} - session.heard
        lost = failed or bool(unheard) or any(look.lost for look in looks.values())
        session.lost = lost or (not let.uuids and self._is_short(session))
        gpus = tuple(gpu for gpus in sorted(self._known.values(), key=lambda gpus: gpus[0].index) for gpu in gpus)
        self._driver = self._nvml.driver() or self._driver
        sight = Sight(
            gpus,
            control_nodes=self._node.control_nodes(),
            driver_version=self._driver,
            unusable=tuple(unusable),
            missing_nodes=self._node.missing(path for gpu in gpus for path in gpu.spec_nodes),
            imex=self._node.imex(),
        )
        return Scan(at, sight, looks, let.uuids, reloaded)

    def _look_at_all(
        self, session: Session, seats: Iterable[Seat], at: float
    ) -> tuple[dict[str, tuple[GPU, ...]], dict[str, Looked], list[Seat]]:
        """Look at each GPU; return the GPUs with their partitions, the looks, and the GPUs that can't be read."""
        known: dict[str, tuple[GPU, ...]] = {}
        looks: dict[str, Looked] = {}
        unseen: list[Seat] = []
        for seat in seats:
            try:
                if seat.error is not None or seat.index is None:
                    unseen.append(seat)
                    continue
                self._busy.on(seat.uuid)
                known[seat.uuid], looks[seat.uuid] = self._look_at(session, seat.uuid, seat.index, at)
            except NvmlError as failure:
                board = session.boards.get(seat.uuid)
                unseen.append(replace(seat, pci="" if board is None else board.pci, error=failure))
        return known, looks, unseen

    def seats(self, let: Let) -> list[Seat]:
        """Return all GPUs that NVML counts, except displays, by index. If some must not be used, return the known GPUs."""
        seats: list[Seat] = []
        self._displays = {}
        there = {gpu.index: gpu for gpu, *_ in self._known.values()}
        self._busy.on("nvmlDeviceGetCount")
        for index in sorted(there) if let.uuids else range(self._nvml.count()):
            gpu = there.get(index)
            if gpu is not None and gpu.uuid in let.uuids:
                continue
            by_address = gpu if let.uuids else None
            try:
                self._busy.on(f"GPU {index}" if gpu is None else gpu.uuid)
                uuid = self._nvml.at(index) if by_address is None else self._nvml.at_address(by_address.pci)
                if not self._is_display(index, uuid):
                    seats.append(Seat(index, uuid))
            except NvmlError as error:
                known = ("", "") if by_address is None else (by_address.uuid, by_address.pci)
                seats.append(Seat(index, *known, error))
        return seats

    def _named(self, unseen: Sequence[Seat], session: Session, seats: Sequence[Seat], let: Let) -> Iterator[Seat]:
        """Identify the GPUs that can't be read, by the PCI addresses that the kernel's driver reports and NVML doesn't.

        The kernel has the UUID from the time when the GPU answered. An index identifies a GPU only while the bus doesn't change.
        """
        at = {gpu.pci: gpu.uuid for gpu, *_ in self._known.values()}
        here = {gpu.uuid: gpu.pci for gpu, *_ in self._known.values()}
        unseen = [replace(one, pci=one.pci or here.get(one.uuid, "")) for one in unseen]
        taken = {one.pci for one in unseen} | {one.pci for one in self._displays.values()}
        taken |= {board.pci for uuid, board in session.boards.items() if any(one.uuid == uuid for one in seats)}
        free = frozenset() if let.uuids else session.plugged - taken
        free -= self._node.excluded(free)
        same = len(seats) == len(self._known) and all(
            not one.uuid or (one.uuid in self._known and self._known[one.uuid][0].index == one.index) for one in seats
        )
        by_index = {gpu.index: gpu for gpu, *_ in self._known.values()} if same else {}
        for seat in addressed(unseen, sorted(free), self._uncounted):
            if seat.pci:
                yield replace(seat, uuid=seat.uuid or self._node.uuid(seat.pci) or at.get(seat.pci, ""))
            elif seat.index in by_index and not seat.uuid:
                yield replace(seat, uuid=by_index[seat.index].uuid, pci=by_index[seat.index].pci)
            else:
                yield seat

    def _uncounted(self, pci: str) -> NvmlError:
        return NvmlError(f"the kernel's driver has it, and NVML doesn't count it: {self._node.why_unusable(pci)}")

    def minors(self, let: Let) -> frozenset[int]:
        """Return the known minors of the GPUs that must not be used."""
        return frozenset(gpu.minor for gpu, *_ in self._known.values() if gpu.uuid in let.uuids)

    def _is_short(self, session: Session) -> bool:
        """Return True if the driver has more GPUs than NVML: a GPU was plugged in again before its removal was seen."""
        count = self._nvml.count()
        return len(session.plugged) > count and len(session.plugged - self._node.excluded(session.plugged)) > count

    def _is_display(self, index: int, uuid: str) -> bool:
        if uuid in self._known:
            return False
        product = self._nvml.product(uuid)
        if product not in _DISPLAYS:
            return False
        reason, pci = f"it only drives a display: {product}", ""
        with contextlib.suppress(NvmlError):
            pci = self._nvml.board(uuid).pci
        self._displays[uuid] = Unusable(_VENDOR, reason, str(index), pci, uuid, excluded=True)
        return True

    def _look_at(self, session: Session, uuid: str, index: int, at: float) -> tuple[tuple[GPU, ...], Looked]:
        board = session.boards.get(uuid)
        if board is None or not (board.product and board.memory):
            board = self._nvml.board(uuid)
            session.boards[uuid] = board
        look, mig = self._nvml.look(uuid, at), self._nvml.mig(uuid)
        gpu = replace(
            board,
            index=index,
            numa_node=self._node.numa_node(board.pci),
            links=session.links.get(uuid, ()),
            spec_nodes=(f"/dev/nvidia{board.minor}",),
            partitionable=mig is not None,
            partitioned=bool(mig),
            clique=self._nvml.clique(uuid),
        )
        instances = self._nvml.instances(gpu) if mig else {}
        look = replace(look, partitions={key: one.uuid for key, one in instances.items()})
        return (gpu, *(self._with_nodes(one, *key) for key, one in instances.items())), look

    def _with_nodes(self, instance: GPU, gpu_instance: int, compute_instance: int) -> GPU:
        """Return a MIG device with its device nodes."""
        place = f"gpu{instance.minor}/gi{gpu_instance}"
        caps = f"{place}/access", f"{place}/ci{compute_instance}/access"
        if not self._capabilities.keys() >= set(caps):
            self._capabilities = self._node.capabilities()
        minors = [self._capabilities[cap] if cap in self._capabilities else self._node.capability(cap) for cap in caps]
        lacks = ""
        if None in minors:
            lacks = (
                f"it has no capability device nodes ({caps[0]} and {caps[1]}), without which no container can use it: see that "
                "the driver's nvidia-caps is there (/proc/driver/nvidia-caps/mig-minors)"
            )
        nodes = (f"/dev/nvidia-caps/nvidia-cap{one}" for one in minors if one is not None)
        return replace(instance, lacks=lacks, spec_nodes=(*instance.spec_nodes, *nodes))

    def _links(self, session: Session, gpu: GPU, known: Collection[str]) -> tuple[Link, ...]:
        """Return the connections of a GPU, in the order of ``known``. For GPUs that this session hasn't seen, keep the earlier ones."""
        before = self._known.get(gpu.uuid, (gpu,))[0].links
        kept = {link.peer: link for link in before if link.peer not in session.links}
        links = kept | {link.peer: link for link in session.links.get(gpu.uuid, gpu.links)}
        return tuple(links[peer] for peer in known if peer in links)

    def _link(self, session: Session) -> None:
        """Find how GPUs are connected, once for each set of GPUs."""
        uuids = list(session.boards)
        if session.links.keys() == set(uuids):
            return
        lanes: dict[str, Mapping[str, int]] = {}
        for uuid in uuids:
            self._busy.on(uuid)
            lanes[uuid] = self._nvml.lanes(uuid)
        links: dict[str, list[Link]] = {uuid: [] for uuid in uuids}
        for uuid, other in combinations(uuids, 2):
            # NVLinks lead directly to the other GPU, or to switches, which reach every GPU. Without NVLinks, PCIe is used.
            count = lanes[uuid].get(session.boards[other].pci, 0) + min(lanes[uuid].get("", 0), lanes[other].get("", 0))
            self._busy.on(uuid)
            way = Way.NVLINK if count else self._nvml.way(uuid, other)
            if way is not None:
                links[uuid].append(Link(other, way, count or 1))
                links[other].append(Link(uuid, way, count or 1))
        session.links = {uuid: tuple(found) for uuid, found in links.items()}


def addressed(unseen: Sequence[Seat], free: Sequence[str], uncounted: Callable[[str], NvmlError]) -> list[Seat]:
    """Assign the remaining PCI addresses to GPUs that don't report theirs. NVML's indexes are in the order of the bus.

    Args:
        unseen: the GPUs that can't be read, by index.
        free: the addresses, in order, at which the kernel's driver reports a GPU that isn't known from NVML.
        uncounted: returns why NVML doesn't count the GPU at an address.
    """
    nameless = [one for one in unseen if not one.pci]
    if len(free) < len(nameless):  # The kernel doesn't show them all, so they can't be assigned.
        return list(unseen)
    rest = [one for one in unseen if one.pci]
    if len(free) == len(nameless):
        return rest + [replace(one, pci=pci) for one, pci in zip(nameless, free, strict=True)]
    error = nameless[0].error if nameless else None  # NVML doesn't count some of them, so their indexes are unknown.
    return rest + [Seat(pci=pci, error=error or uncounted(pci)) for pci in free]


def _failed(error: NvmlError) -> tuple[Trouble, bool]:
    """Return the trouble after a failed look, and True if the GPU is lost."""
    if isinstance(error, LostError):
        return Trouble(f"it doesn't answer any more: {error}", TroubleKind.RESET_REQUIRED, "gpu-lost"), True
    hint = _DENIED if isinstance(error, DeniedError) else ""
    return Trouble(f"it can't be read: {error}{hint}", TroubleKind.RESTART_APP), False
