"""One look at all GPUs by an open NVML: their vitals, their partitions, how they reach each other, and what can't be seen.

Runs in the looking thread (``watch``). A GPU that fails is shown as it was last, with the reason as its trouble.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Final

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from devices.gpu.model import GPU, Link, Way
from devices.gpu.nvidia.health import Looked
from devices.gpu.nvidia.kernel import KernelFacts
from devices.gpu.nvidia.nvml import Board, CrashedError, LostError, MigDevice, Nvml, NvmlError, SessionError
from devices.model import Trouble, TroubleKind
from devices.source import Attempts

_RESOURCE: Final = "nvidia.com/gpu"
_DISPLAYS: Final = frozenset({"DGX Display", "NVIDIA DGX Display"})
"""The products that are there for a screen alone, and aren't offered: those that NVIDIA's plugin skips (New, pkg/nvlib/device of
NVIDIA/go-nvlib)."""
_UNSEEN: Final = "a GPU can't be looked at"

_log = structlog.get_logger()


class Scan(Struct, frozen=True):
    """What one look found, begun at ``at``, of all GPUs but those ``let`` go of.

    ``reloaded``: the driver was loaded anew since the look before, and NVML was closed then (None: it wasn't).
    """

    at: float
    gpus: tuple[GPU, ...]
    looks: Mapping[str, Looked]
    let: frozenset[str]
    driver: str
    control_nodes: tuple[str, ...]
    reloaded: float | None


class Let(Struct, frozen=True):
    """Which GPUs mustn't be touched: these, or (``all``) NVML as a whole."""

    uuids: frozenset[str] = frozenset()
    all: bool = False


class Session(Struct):
    """What is known while NVML is open. ``lost``: something in it can only come right when it is opened anew."""

    listener: threading.Thread | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    plugged: frozenset[str] = frozenset()
    boards: dict[str, Board] = field(default_factory=dict)
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    heard: frozenset[str] = frozenset()
    lost: bool = False
    began: float = 0.0


class Busy:
    """What a thread is at, and since when (monotonic seconds): a call of NVML may hang there, or end the process.

    Args:
        attempts: where it is noted, too, so that what ended a process isn't tried again.
    """

    def __init__(self, attempts: Attempts | None = None) -> None:
        self.at: tuple[float, str] | None = None
        self._attempts, self._noted = attempts, ""

    def on(self, what: str) -> None:
        """Begin with a step; ``what`` is a GPU's UUID or the step's name.

        Raises:
            CrashedError: a process ended at this step.
        """
        self.off()
        if self._attempts is not None:
            if reason := self._attempts.begin(f"the look at {what}"):
                raise CrashedError(reason)
            self._noted = what
        self.at = time.monotonic(), what

    def on_all_the_same(self, what: str) -> None:
        """Begin with a step that can't be left out."""
        self.off()
        self.at = time.monotonic(), what

    def off(self) -> None:
        """Have nothing to do."""
        self.at = None
        if self._attempts is not None and self._noted:
            self._attempts.end(f"the look at {self._noted}")
            self._noted = ""


class Scanner:
    """Looks at GPUs, and remembers what it saw of each."""

    def __init__(self, nvml: Nvml, node: KernelFacts, busy: Busy) -> None:
        self._nvml, self._node, self._busy = nvml, node, busy
        self._known: dict[str, tuple[GPU, ...]] = {}
        self._told: dict[tuple[str, str], str] = {}
        self._capabilities: Mapping[str, int] = {}

    def scan(self, session: Session, let: Let, reloaded: float | None) -> Scan:
        """Look at every GPU, but those ``let`` go of.

        Raises:
            NvmlError: nothing can be looked at now.
        """
        at = time.monotonic()
        seats = self.seats(let)
        known, looks = self._look_at_all(session, self._by_uuid(seats, let), at)
        self._link(session)
        known = {u: (replace(g, links=self._links(session, g, known)), *rest) for u, (g, *rest) in known.items()}
        self._known = {uuid: gpus for uuid, gpus in self._known.items() if uuid in let.uuids} | known
        due = {one for one in seats.values() if not isinstance(one, CrashedError)}
        lost = any(look.lost for look in looks.values()) or not session.heard >= due
        session.lost = lost or (not let.uuids and self._is_short(session))
        order = sorted(self._known.values(), key=lambda gpus: gpus[0].index)
        return Scan(
            at=at,
            gpus=tuple(gpu for gpus in order for gpu in gpus),
            looks=looks,
            let=let.uuids,
            driver=self._nvml.driver(),
            control_nodes=self._node.control_nodes(),
            reloaded=reloaded,
        )

    def _by_uuid(self, seats: Mapping[int, str | NvmlError], let: Let) -> dict[str, tuple[int, NvmlError | None]]:
        """The index of each GPU by UUID, also of one that no longer tells it, with the reason."""
        found: dict[str, tuple[int, NvmlError | None]] = {
            uuid: (index, None) for index, uuid in seats.items() if not isinstance(uuid, NvmlError)
        }
        for index, error in seats.items():
            if isinstance(error, NvmlError) and (uuid := self._whose(index, found, let)):
                found[uuid] = (index, error)
            elif isinstance(error, NvmlError):
                self.tell_once(f"index {index}", _UNSEEN, error)
        return found

    def _look_at_all(
        self, session: Session, found: Mapping[str, tuple[int, NvmlError | None]], at: float
    ) -> tuple[dict[str, tuple[GPU, ...]], dict[str, Looked]]:
        """Look at each GPU; return what is known of it and its partitions, and the look. One that fails keeps what was known."""
        known: dict[str, tuple[GPU, ...]] = {}
        looks: dict[str, Looked] = {}
        for uuid, (index, unseen) in sorted(found.items(), key=lambda item: item[1][0]):
            try:
                self._busy.on(uuid)
                if unseen is not None:
                    raise unseen
                known[uuid], looks[uuid] = self._look_at(session, uuid, index, at)
                self._told.pop((uuid, _UNSEEN), None)
            except SessionError:
                raise
            except NvmlError as failure:
                self.tell_once(uuid, _UNSEEN, failure)
                if uuid in self._known:  # else there is nothing to show
                    known[uuid] = self._known[uuid]
                    looks[uuid] = Looked(at, *_failed(failure))
        return known, looks

    def seats(self, let: Let) -> dict[int, str | NvmlError]:
        """The UUIDs of all GPUs but displays by index, or why one can't be told; where some mustn't be touched, of known ones."""
        seats: dict[int, str | NvmlError] = {}
        there = {gpu.index: gpu for gpu, *_ in self._known.values()}
        self._busy.on("nvmlDeviceGetCount")
        for index in sorted(there) if let.uuids else range(self._nvml.count()):
            gpu = there.get(index)
            if gpu is not None and gpu.uuid in let.uuids:
                continue
            try:
                self._busy.on(f"GPU {index}" if gpu is None else gpu.uuid)
                uuid = self._nvml.at_address(gpu.pci) if gpu is not None and let.uuids else self._nvml.at(index)
                if not self._is_display(uuid):
                    seats[index] = uuid
            except SessionError:
                raise
            except NvmlError as error:
                seats[index] = error
        return seats

    def minors(self, let: Let) -> frozenset[int]:
        """The minors of the GPUs, as far as they are known, that mustn't be touched."""
        return frozenset(gpu.minor for gpu, *_ in self._known.values() if gpu.uuid in let.uuids)

    def _is_short(self, session: Session) -> bool:
        """Whether the driver has more GPUs than NVML: one that was plugged in again before its going was seen."""
        count = self._nvml.count()
        return len(session.plugged) > count and len(session.plugged - self._node.excluded(session.plugged)) > count

    def _is_display(self, uuid: str) -> bool:
        if uuid in self._known:
            return False
        product = self._nvml.product(uuid)
        if product not in _DISPLAYS:
            return False
        self.tell_once(uuid, "a GPU is not offered", f"it is for a display alone: {product}")
        return True

    def _whose(self, index: int, found: Collection[str], let: Let) -> str:
        """Which GPU it is that can't say so itself: the one that was there before, or the only one missing."""
        missing = [uuid for uuid in self._known if uuid not in found and uuid not in let.uuids]
        there = [uuid for uuid in missing if self._known[uuid][0].index == index]
        return there[0] if there else missing[0] if len(missing) == 1 else ""

    def _look_at(self, session: Session, uuid: str, index: int, at: float) -> tuple[tuple[GPU, ...], Looked]:
        board = session.boards.get(uuid)
        if board is None:
            board = self._nvml.board(uuid)
            session.boards[uuid] = board
        vitals = self._nvml.vitals(uuid)
        instances = self._nvml.instances(uuid) if vitals.mig else ()
        gpu = GPU(
            uuid=uuid,
            index=index,
            minor=board.minor,
            numa_node=self._node.numa_node(board.pci),
            links=session.links.get(uuid, ()),
            spec_nodes=(f"/dev/nvidia{board.minor}",),
            resource=_RESOURCE,
            partitioned=vitals.mig,
            product=board.product,
            pci=board.pci,
            memory=board.memory,
            traits=board.traits,
        )
        look = Looked(
            at=at,
            partitions={(one.gpu_instance, one.compute_instance): one.uuid for one in instances},
            remap_pending=vitals.remap_pending,
            remap_failed=vitals.remap_failed,
            action=vitals.action,
        )
        return (gpu, *(self._partition(gpu, one) for one in instances)), look

    def _partition(self, gpu: GPU, instance: MigDevice) -> GPU:
        caps = (
            f"gpu{gpu.minor}/gi{instance.gpu_instance}/access",
            f"gpu{gpu.minor}/gi{instance.gpu_instance}/ci{instance.compute_instance}/access",
        )
        if not self._capabilities.keys() >= set(caps):
            self._capabilities = self._node.capabilities()
        minors = [self._capabilities[cap] if cap in self._capabilities else self._node.capability(cap) for cap in caps]
        lacks = ""
        if None in minors:
            lacks = (
                f"it has no capability device nodes ({caps[0]} and {caps[1]}), without which no container can use it: see that "
                "the driver's nvidia-caps is there (/proc/driver/nvidia-caps/mig-minors)"
            )
            self.tell_once(instance.uuid, "a MIG instance is not offered", lacks)
        return replace(
            gpu,
            uuid=instance.uuid,
            parent=gpu.uuid,
            profile=instance.profile,
            memory=instance.memory,
            place=f"{gpu.index}:{instance.place}",
            slot=instance.slot,
            partitioned=False,
            lacks=lacks,
            links=(),
            spec_nodes=(*gpu.spec_nodes, *(f"/dev/nvidia-caps/nvidia-cap{one}" for one in minors if one is not None)),
        )

    def _links(self, session: Session, gpu: GPU, known: Collection[str]) -> tuple[Link, ...]:
        """Say how a GPU reaches those that are shown, in their order: also one that this session hasn't seen yet, as it was."""
        before = self._known.get(gpu.uuid, (gpu,))[0].links
        kept = {link.peer: link for link in before if link.peer not in session.links}
        links = kept | {link.peer: link for link in session.links.get(gpu.uuid, gpu.links)}
        return tuple(links[peer] for peer in known if peer in links)

    def _link(self, session: Session) -> None:
        """Find how GPUs reach each other, once for each set of them."""
        uuids = list(session.boards)
        if session.links.keys() == set(uuids):
            return
        lanes: dict[str, Mapping[str, int]] = {}
        for uuid in uuids:
            try:
                self._busy.on(uuid)
                lanes[uuid] = self._nvml.lanes(uuid)
            except SessionError:
                raise
            except NvmlError:
                lanes[uuid] = {}
        links: dict[str, list[Link]] = {uuid: [] for uuid in uuids}
        for place, uuid in enumerate(uuids):
            for other in uuids[place + 1 :]:
                if (way := self._way(session, lanes, uuid, other)) is not None:
                    links[uuid].append(Link(other, *way))
                    links[other].append(Link(uuid, *way))
        session.links = {uuid: tuple(found) for uuid, found in links.items()}

    def _way(
        self, session: Session, lanes: Mapping[str, Mapping[str, int]], uuid: str, other: str
    ) -> tuple[Way, int] | None:
        """By NVLinks from one to the other, directly or over switches, which reach every GPU on them; else over PCIe."""
        direct = lanes[uuid].get(session.boards[other].pci, 0)
        switched = min(lanes[uuid].get("", 0), lanes[other].get("", 0))
        if direct or switched:
            return Way.NVLINK, direct + switched
        try:
            self._busy.on(uuid)
            way = self._nvml.way(uuid, other)
        except SessionError:
            raise
        except NvmlError:
            return None
        return None if way is None else (way, 1)

    def tell_once(self, what: str, event: str, reason: object) -> None:
        """Log what is wrong with a GPU, once for each reason."""
        if self._told.get((what, event)) != str(reason):
            if len(self._told) >= 1024:
                self._told.clear()
            self._told[what, event] = str(reason)
            _log.warning(event, gpu=what, reason=str(reason))


def _failed(error: NvmlError) -> tuple[Trouble, bool]:
    """What a failed look says of a GPU, and whether it is lost."""
    if isinstance(error, LostError):
        return Trouble(f"it doesn't answer any more: {error}", TroubleKind.RESET_REQUIRED), True
    return Trouble(f"it can't be looked at: {error}", TroubleKind.RESTART_APP), False
