"""Orders to cross: over the control socket, and from the annotation of the own node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog
from msgspec import Struct, field

from gateway.dra import publisher
from gateway.dra.claims import Called
from gateway.dra.crossing import NotWrittenError
from gateway.kubernetes.client import KubernetesError
from gateway.kubernetes.node import NodeObject
from gateway.sides import table
from gateway.sides.table import ANNOTATION, Side
from gateway.telling import orders
from gateway.wires.control import ControlError, shown

if TYPE_CHECKING:
    from gateway.dra.crossing import Crossing
    from gateway.kubernetes.client import Client
    from gateway.wires.control import ControlConnection, Handler

LOOK_FOR: Final = 2.0
"""Seconds between two looks for boards that aren't where the node's annotation wants them."""
FIRST: Final = 32
"""The first kubelet, 1.N, whose API for claims is spoken (v1beta1)."""
BY_NAME: Final = 36
"""The first kubelet, 1.N, that has DRA's devices for pods that ask by name (DRAExtendedResource, on by default)."""
_ENDS: Final = frozenset({Side.DRA.value, Side.PLUGIN.value})
_log = structlog.get_logger()


class _Spec(Struct):
    resource: str = field(default="", name="extendedResourceName")


class DeviceClass(Struct):
    """A class of devices. Who asks for its resource by name gets a claim of it on a node where no device plugin has any."""

    metadata: Called
    spec: _Spec = field(default_factory=_Spec)


def too_old(kubelet: int | None) -> str:
    """Say why a kubelet, 1.N, takes no claims; None: it isn't known which one."""
    if kubelet is None:
        return "the API server hasn't said yet which kubelet the node has"
    return f"kubelet 1.{kubelet} has no dynamic resource allocation that this gateway speaks: 1.{FIRST} is the first"


def overlooked(classes: Iterable[DeviceClass], resources: Collection[str], kubelet: int) -> str:
    """Say why pods that ask by name would run without their GPUs, were these resources DRA's; '' where none would.

    The scheduler gives them claims whatever the kubelet is, and one before 1.36 runs them without a word (run on 1.32).
    """
    for one in classes if kubelet < BY_NAME else ():
        if one.spec.resource in resources:
            return (
                f"expected a kubelet from 1.{BY_NAME} on, because of the DeviceClass {one.metadata.name} with the extendedResourceName "
                f"{one.spec.resource}, got 1.{kubelet}, which would run pods that ask for that name without their GPU: upgrade the "
                "kubelet first, or take that field out of the class"
            )
    return ""


async def without_gpus(api: Client, node: str, resources: Collection[str]) -> str:
    """Ask the API server for what ``overlooked`` judges; ``node`` is the node's path there."""
    try:
        kubelet = (await api.get(node, NodeObject)).kubelet or 0
        if kubelet >= BY_NAME:
            return ""
        server = await publisher.ask(api)
        classes, _ = await api.list(f"{server.path}/deviceclasses", DeviceClass)
    except KubernetesError as error:
        return f"it can't be known whether pods that ask by name would run without their GPU: {error}"
    return overlooked(classes, resources, kubelet)


class Desk:
    """Takes orders to cross, over the control socket and from the annotation of the node, which counts as long as it is there.

    Args:
        crossing: carries them out.
        why_not: says why nothing can go to DRA; '' where it can.
        without: says why pods would run without their GPUs, were these resources DRA's; '' where none would.
    """

    def __init__(
        self,
        crossing: Crossing,
        why_not: Callable[[], str],
        without: Callable[[Collection[str]], Awaitable[str]],
    ) -> None:
        self._crossing, self._why_not, self._without = crossing, why_not, without
        self._wished = ""
        self._news = asyncio.Event()
        self.trouble = ""
        """Why the annotation isn't followed now; empty where it is, and where there is none."""

    def take(self, own: NodeObject) -> None:
        """Take note of what the own node's annotation wants."""
        if (wished := own.metadata.annotations.get(ANNOTATION, "")) != self._wished:
            self._wished = wished
            self._news.set()

    async def follow(self) -> None:
        """Keep all boards where the annotation wants them, for ever."""
        while True:
            before, self.trouble = self.trouble, await self._wish()
            if self.trouble != before:
                tell = _log.warning if self.trouble else _log.info
                tell("the node's annotation", key=ANNOTATION, value=f"{self._wished:.80}", reason=self.trouble)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_FOR if self._wished else None):
                    await self._news.wait()
            self._news.clear()

    async def _wish(self) -> str:
        """Bring boards to where the annotation wants them; say why that isn't done."""
        if not self._wished:
            return ""
        if self._wished not in _ENDS:
            return f"expected {ANNOTATION} to be dra or plugin, got {shown(self._wished)}: nothing moves by it; correct it or remove it"
        crossing, to = self._crossing, Side(self._wished)
        away = [one for one in crossing.boards() if table.ordered(crossing.side(one), to) is not crossing.side(one)]
        try:
            if away:
                await self._move(to, away)
        except ControlError as error:
            return str(error)
        return ""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Who meets which op."""
        return {"cross": self._cross}

    async def _cross(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        """Move boards to the other API, or say where they are."""
        crossing, to, ids = self._crossing, request.get("to"), orders.handle_ids(request)
        if to not in _ENDS:
            raise ControlError(f"expected dra or plugin, got {shown(to)}")
        there = crossing.boards()
        of = {one: board for board, found in there.items() for one in (board, *(entry.device.id for _, entry in found))}
        if strange := [one for one in ids if one not in of]:
            raise ControlError(f"no device here is called {strange[0]!r}: `gateway devices` lists them")
        wanted = list(dict.fromkeys(of[one] for one in ids)) or list(there)
        if not request.get("dry_run"):
            if self._wished in _ENDS - {to}:
                raise ControlError(
                    f"the node's annotation {ANNOTATION} wants all at {self._wished}: change it or remove it first"
                )
            await self._move(Side(to), wanted)
        told = [one for one in crossing.stands() if one.board in wanted]
        await connection.send(
            {"boards": [{"id": one.board, "side": one.side.value, "words": one.words} for one in told]}
        )

    async def _move(self, to: Side, wanted: Sequence[str]) -> None:
        if not self._crossing.is_known:
            raise ControlError("the API server hasn't said yet which claims there are: try again when it does")
        there = self._crossing.boards()
        resources = {name for board in wanted for name, _ in there.get(board, ())}
        if to is Side.DRA and (reason := self._why_not() or await self._without(resources)):
            raise ControlError(reason)
        async with self._crossing.allocatable.turn:
            if to is Side.DRA:
                try:
                    await self._crossing.allocatable.lower(self._crossing.stays(wanted))
                except KubernetesError as error:
                    raise ControlError(
                        f"nothing was done: the node's allocatable devices can't be lowered: {error}"
                    ) from error
            try:
                await self._crossing.order(to, wanted)
            except NotWrittenError as error:
                raise ControlError(f"nothing was done, because the state file can't be written: {error}") from error
        _log.info("order", op="cross", to=to.value, boards=wanted)
