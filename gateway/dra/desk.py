"""Orders to move GPUs between the APIs, and the state of pods that ask for GPUs by resource name.

An order comes over the control socket, or from the node's annotation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog
from msgspec import Struct, field

from gateway.dra.claims import Metadata
from gateway.dra.crossing import NotWrittenError
from gateway.kubernetes.client import KubernetesError
from gateway.kubernetes.node import NodeObject
from gateway.kubernetes.watch import Retries
from gateway.sides import names, table
from gateway.sides.side import Side
from gateway.sides.table import ANNOTATION
from gateway.tasks import first_of
from gateway.telling import orders
from gateway.telling.sides import ByNameStatus
from gateway.wires.control import ControlError, shown

if TYPE_CHECKING:
    from gateway.dra.crossing import Crossing
    from gateway.dra.publisher import Current
    from gateway.kubernetes.client import Client
    from gateway.memory.ledger import Ledger
    from gateway.telling.sides import DriverStatus
    from gateway.wires.control import ControlConnection, Handler

ANNOTATION_PERIOD_S: Final = 2.0
"""Seconds between two checks that each board is on the side that the node's annotation names."""
ANNOTATION_RETRY_MAX_S: Final = 30.0
"""Most seconds between two checks if the annotation can't be followed: all nodes of a fleet may ask the API server."""
ORDER_S: Final = 22.0
"""Seconds after which an order gives up on the API server. Up to 15 of them are for pods that are being admitted."""
ADMISSION_WAIT_S: Final = 10.0
"""Seconds for which an order waits until the kubelet has admitted the pods of this node, before allocatable is lowered."""
FIRST: Final = 32
"""The first kubelet (1.N) whose API for claims this gateway speaks (v1beta1)."""
CLASSES_PERIOD_S: Final = 120.0
"""Seconds between two reads of the DeviceClasses, while GPUs are DRA's or on their way."""
_TARGETS: Final = frozenset({Side.DRA.value, Side.PLUGIN.value})
"""The sides to which an order can move a GPU."""
_log = structlog.get_logger()


class _Spec(Struct):
    resource: str = field(default="", name="extendedResourceName")


class DeviceClass(Struct):
    """A DeviceClass. Its ``extendedResourceName`` lets pods ask for its devices by resource name."""

    metadata: Metadata
    spec: _Spec = field(default_factory=_Spec)


def too_old(kubelet: int | None) -> str:
    """Return why a kubelet 1.N can't prepare claims. None: its version is unknown."""
    if kubelet is None:
        return "the API server has not reported yet which kubelet the node has"
    return f"kubelet 1.{kubelet} has no dynamic resource allocation API that this gateway speaks. The first that has is 1.{FIRST}"


def not_taken(drivers: Iterable[DriverStatus]) -> str:
    """Return why no GPU can move to DRA; '' if the kubelet has accepted all drivers."""
    missing = [one for one in drivers if not one.registered]
    if missing and missing[0].rival:
        return f"the DRA driver {missing[0].name} is not registered: {missing[0].rival}"
    return f"the kubelet has not accepted the DRA driver {missing[0].name}. Run `gateway doctor`" if missing else ""


class Names:
    """Knows if pods that ask for DRA's GPUs by resource name get them: the kubelet must prepare claims, and a DeviceClass must name the resource.

    Args:
        api: the API server.
        current: its version of resource.k8s.io.
        node: the node's path at the API server.
        crossing: knows the side of each board.
        ledger: has the claims that were made for such pods.
        changed: called when DRA must stop offering GPUs to new claims, or may offer them again.
    """

    def __init__(
        self, api: Client, current: Current, node: str, crossing: Crossing, ledger: Ledger, changed: Callable[[], None]
    ) -> None:
        self._api, self._current, self._node = api, current, node
        self._crossing, self._ledger, self._changed = crossing, ledger, changed
        self._kubelet: int | None = None
        self._classes: Mapping[str, str] | None = None
        self._unsaid = "the API server has not reported yet which DeviceClasses exist"
        self._named: set[str] = set()
        """The resources that a DeviceClass has named since this process started."""
        self._told = ByNameStatus()
        self._news = asyncio.Event()
        self.looked = asyncio.Event()
        """Set after the first read, also if it failed."""

    @property
    def status(self) -> ByNameStatus:
        """What is wrong for pods that ask by name."""
        sides = self._sides()
        by_name = {one.resource for row in self._ledger.claims.values() if row.by_name for one in row.devices}
        overlooked = names.overlooked(names.of_dra(sides), self._kubelet, self._classes, self._unsaid)
        waiting = names.waiting(sides, self._classes, self._named | by_name)
        return ByNameStatus(overlooked=overlooked, waiting=waiting)

    def take(self, own: NodeObject) -> None:
        """Note the node's kubelet."""
        if own.kubelet != self._kubelet:
            self._kubelet = own.kubelet
            if self.looked.is_set():
                self._tell()
            self._news.set()

    async def ordered(self, resources: Collection[str]) -> str:
        """Ask the API server; return why pods would run without their GPUs if these resources were DRA's; '' if no pod would."""
        try:
            self.take(await self._api.get(self._node, NodeObject))
            await self._read()
        except KubernetesError as error:
            return names.overlooked(resources, self._kubelet, None, str(error))
        return names.overlooked(resources, self._kubelet, self._classes)

    async def run(self) -> None:
        """Check repeatedly. Never returns."""
        retries = Retries()
        while True:
            if (error := await self._look()) is None:
                retries.worked()
            wait = CLASSES_PERIOD_S if error is None else retries.wait(error)
            await first_of(self._news, seconds=wait)
            self._news.clear()

    async def _look(self) -> KubernetesError | None:
        """Read the node and the DeviceClasses, if they matter now. Return the error; the last known state stays in force."""
        failed, matters = None, bool(names.of_dra(self._sides()))
        try:
            if self._kubelet is None:
                self.take(await self._api.get(self._node, NodeObject))
            if matters or self._classes is None:
                await self._read()
        except KubernetesError as error:
            failed, self._unsaid = error, str(error)
        self._tell()
        self.looked.set()
        return failed if matters else None

    async def _read(self) -> None:
        found = await self._current.list("deviceclasses", DeviceClass)
        self._classes = {one.metadata.name: one.spec.resource for one in found}
        self._named |= {*self._classes.values()}

    def _sides(self) -> dict[str, set[Side]]:
        """Return the sides of each resource's boards; empty without a table."""
        sides: dict[str, set[Side]] = {}
        for board, devices in self._crossing.boards().items() if self._crossing.is_known else ():
            side = self._crossing.side(board)
            for name, _ in devices:
                sides.setdefault(name, set()).add(side)
        return sides

    def _tell(self) -> None:
        before, self._told = self._told, self.status
        if (why := self._told.overlooked) != before.overlooked:
            tell = _log.error if why else _log.info
            tell("DRA offers no GPUs to new claims" if why else "DRA offers GPUs to new claims again", reason=why)
            self._changed()
        if (why := self._told.waiting) != before.waiting:
            tell = _log.warning if why else _log.info
            state = "wait" if why else "no longer wait"
            tell(f"pods that ask for GPUs by resource name {state}", reason=why)


class CrossingOrders:
    """Carries out orders to move GPUs. The node's annotation is in force as long as it exists.

    Args:
        crossing: moves the boards.
        why_not: returns why no GPU can move to DRA; '' if they can.
        names: knows if pods that ask by resource name would run without their GPUs.
    """

    def __init__(self, crossing: Crossing, why_not: Callable[[], str], names: Names) -> None:
        self._crossing, self._why_not, self.names = crossing, why_not, names
        self._wished = ""
        self._news = asyncio.Event()
        self.trouble = ""
        """Why the annotation isn't followed now; empty if it is followed, or doesn't exist."""

    def take(self, own: NodeObject) -> None:
        """Note the value of the node's annotation."""
        if (wished := own.metadata.annotations.get(ANNOTATION, "")) != self._wished:
            self._wished = wished
            self._news.set()

    async def follow(self) -> None:
        """Keep each board on the side that the annotation names. Never returns."""
        wait, retries = ANNOTATION_PERIOD_S, Retries()
        while True:
            error = await self._wish()
            before, self.trouble = self.trouble, "" if error is None else str(error)
            if error is not None and isinstance(error.__cause__, KubernetesError):
                wait = retries.wait(error.__cause__)
            else:
                retries.worked()
                wait = ANNOTATION_PERIOD_S if error is None else min(2 * wait, ANNOTATION_RETRY_MAX_S)
            if self.trouble != before:
                tell = _log.warning if self.trouble else _log.info
                event = (
                    "the node's annotation can't be followed" if self.trouble else "the node's annotation is followed"
                )
                tell(event, key=ANNOTATION, value=f"{self._wished:.80}", reason=self.trouble)
            await first_of(self._news, seconds=wait if self._wished else None)
            if self._news.is_set():
                wait = ANNOTATION_PERIOD_S
            self._news.clear()

    async def _wish(self) -> ControlError | None:
        """Move boards to the side that the annotation names; return the error if that fails now."""
        if not self._wished:
            return None
        if self._wished not in _TARGETS:
            return ControlError(
                f"{ANNOTATION}: unknown value {shown(self._wished)}. Allowed: dra, plugin. No GPU moves until it is corrected"
            )
        crossing, to = self._crossing, Side(self._wished)
        away = [one for one in crossing.boards() if table.ordered(crossing.side(one), to) is not crossing.side(one)]
        try:
            if away:
                await self._move(to, away)
        except ControlError as error:
            return error
        return None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of orders."""
        return {"move": self._answer}

    async def _answer(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        """Move boards to the other API, or (``dry_run``) only report their sides."""
        crossing, to, ids = self._crossing, request.get("to"), orders.handle_ids(request)
        if to not in _TARGETS:
            raise ControlError(f"unknown value {shown(to)}. Allowed: dra, plugin")
        there = crossing.boards()
        of = {one: board for board, found in there.items() for one in (board, *(entry.device.id for _, entry in found))}
        if strange := [one for one in ids if one not in of]:
            raise ControlError(f"no device here is called {strange[0]!r}: `gateway devices` lists them")
        wanted = list(dict.fromkeys(of[one] for one in ids)) or list(there)
        if dry := bool(request.get("dry_run")):
            refused = await self._refused(Side(to), wanted)
        else:
            refused = ""
            await self._move(Side(to), wanted)
        told = [one for one in crossing.statuses(Side(to) if dry else None) if one.board in wanted]
        rows = [
            {"id": one.board, "side": one.side.value, "then": (one.then or one.side).value, "words": one.words}
            for one in told
        ]
        await connection.send({"boards": rows, "refused": refused})

    async def _refused(self, to: Side, wanted: Sequence[str]) -> str:
        """Return why boards can't be moved now; '' if they can."""
        if self._wished in _TARGETS - {to.value}:
            return f"the node's annotation {ANNOTATION} moves all GPUs to {self._wished}. Change or remove it first"
        if not self._crossing.is_known:
            return f"{self._crossing.strangers.unknown}; `gateway doctor` says what to do"
        there = self._crossing.boards()
        resources = {name for board in wanted for name, _ in there.get(board, ())}
        return (self._why_not() or await self.names.ordered(resources)) if to is Side.DRA else ""

    async def _move(self, to: Side, wanted: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(ORDER_S) as limit:
                if reason := await self._refused(to, wanted):
                    raise ControlError(reason)
                if to is Side.DRA:
                    await self._crossing.allocatable.admitted(self._crossing.stays(), ADMISSION_WAIT_S)
                async with self._crossing.allocatable.turn:
                    if to is Side.DRA:
                        await self._crossing.allocatable.lower(self._crossing.stays(wanted))
                    limit.reschedule(None)  # From here on the order is carried out, however long the write takes.
                    await self._crossing.order(to, wanted)
        except TimeoutError:
            raise ControlError(
                f"nothing was done within {ORDER_S:g} s: the API server is slow, or another order is in progress: try again"
            ) from None
        except KubernetesError as error:
            advice = ". `gateway doctor` names the missing right" if error.status in {401, 403} else ""
            raise ControlError(
                f"nothing was done, because the node's allocatable devices can't be lowered: {error}{advice}"
            ) from error
        except NotWrittenError as error:
            raise ControlError(f"nothing was done, because the state file can't be written: {error}") from error
        _log.info("order", op="move", to=to.value, boards=wanted)
