"""The table of owners, explored: two doors, the kubelet, the scheduler, late news of both, and a crash at each point.

The gateway's part is the functions of ``gateway.sides.table``, called as the shell calls them: a change is on disk, then in force,
then in the list, then in the slice. What surrounds it is a model. A pod stands for all pods of the device plugin API, a claim for all
claims. Time isn't modelled, but for one thing: what Allocate answered before a gateway died is in the kubelet's records when
the next one reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from devices.life.states import TABLE, State
from gateway.lab.trials.explore import BrokenError
from gateway.sides import table
from gateway.sides.table import Offered, Seen, Side

NOBODY: Final = ""
CLAIM: Final = "the claim"
POD: Final = "the pod"


class GPU(NamedTuple):
    """One GPU, as each part of the node knows it."""

    disk: Side = Side.PLUGIN
    side: Side = Side.PLUGIN
    """The gateway's, in force."""
    shown: State | None = None
    """What lies over it in the list that the gateway serves."""
    healthy: bool = True
    """What the kubelet believes."""
    asked: bool = False
    """Allocate is on its way."""
    pod: bool = False
    """A container has it by the device plugin API."""
    booked: bool = False
    """The kubelet's records name a container, perhaps one that ended."""
    ended: bool = False
    """The API server said that this one ended."""
    look: str | None = None
    """Who holds it by a look into the records since the kubelet was told to give it to nobody."""
    slice: Offered = Offered.NOT
    known: Offered = Offered.NOT
    """What the scheduler believes that the slice says."""
    allocated: str | None = None
    """Which claim has it, by a look at the API server since the slice offers it to nobody new."""


class Node(NamedTuple):
    """All of it. ``claim``: 0 there is none, 1 allocated, 2 noted in memory, 3 on disk and told; it is of ``of``."""

    gpus: tuple[GPU, ...]
    alive: bool = True
    claim: int = 0
    of: tuple[int, ...] = ()

    def put(self, number: int, **changes: object) -> Node:
        """Change a GPU."""
        return self._replace(
            gpus=tuple(one._replace(**changes) if at == number else one for at, one in enumerate(self.gpus))  # type: ignore[arg-type]
        )

    def is_prepared(self, number: int) -> bool:
        """Whether the gateway has noted a GPU for a claim."""
        return self.claim >= 2 and number in self.of

    def actual(self, number: int) -> Side:
        """Say where a GPU is for the gateway."""
        return table.actual(self.gpus[number].side, claimed=self.is_prepared(number))

    def seen(self, number: int) -> Seen:
        """Say what the gateway knows of who holds a GPU."""
        one = self.gpus[number]
        return Seen(one.look, CLAIM if self.is_prepared(number) else NOBODY, one.allocated)


class Model:
    """The model. ``claims`` are the GPUs that a claim may be for."""

    def __init__(self, gpus: int = 1, claims: tuple[tuple[int, ...], ...] = ((0,),), *, ghosts: bool = True) -> None:
        self.start, self._claims, self._ghosts = Node((GPU(),) * gpus), claims, ghosts
        self.onward: dict[Node, set[Node]] = defaultdict(set)
        """Which states come of which, without an order, a crash, or anybody new who wants a GPU."""

    def check(self, node: Node) -> None:
        """No GPU is given twice."""
        for number, one in enumerate(node.gpus):
            if one.pod and node.claim == 3 and number in node.of:
                raise BrokenError(f"GPU {number} is given twice")

    def moves(self, node: Node) -> Iterator[tuple[str, Node]]:
        """Say what can happen, and what becomes of it."""
        for said, after in self._news(node):
            if after != node:
                yield said, after
        for said, after in self._progress(node):
            if after != node:
                self.onward[node].add(after)
                yield said, after

    # What may happen, or not.

    def _news(self, node: Node) -> Iterator[tuple[str, Node]]:
        for number, one in enumerate(node.gpus):
            if one.healthy and not one.pod and not one.asked:
                yield f"the kubelet picks {number}", node.put(number, asked=True)
            for to in (Side.DRA, Side.PLUGIN) if node.alive else ():
                disk = table.ordered(one.side, to)
                yield f"{number} is ordered to {to.value}", node.put(number, disk=disk)
        for of in self._claims if not node.claim else ():
            if all(node.gpus[number].known is Offered.FREE for number in of):
                yield f"the scheduler allocates {of}", node._replace(claim=1, of=of)
        if node.alive:
            yield "the gateway dies", self._died(node)

    def _died(self, node: Node) -> Node:
        gpus = tuple(
            one._replace(asked=False, booked=one.booked or one.pod, look=None, allocated=None) for one in node.gpus
        )
        return node._replace(gpus=gpus, alive=False, claim=1 if node.claim == 2 else node.claim)

    # What goes on by itself.

    def _progress(self, node: Node) -> Iterator[tuple[str, Node]]:
        if not node.alive:
            yield "a gateway starts", self._started(node)
        for number in range(len(node.gpus)):
            yield from self._kubelet(node, number)
            yield from self._books(node, number)
            if node.alive:
                yield from self._gateway(node, number)
                yield from self._crossing(node, number)
        yield from self._claim(node)

    def _started(self, node: Node) -> Node:
        node = node._replace(alive=True, gpus=tuple(one._replace(side=one.disk) for one in node.gpus))
        for number in range(len(node.gpus)):
            node = node.put(number, shown=table.listed(node.actual(number)))
        return node

    def _kubelet(self, node: Node, number: int) -> Iterator[tuple[str, Node]]:
        one = node.gpus[number]
        if node.alive:
            yield f"the kubelet hears of {number}", node.put(number, healthy=one.shown is None)
        if one.asked and node.alive:
            row = TABLE[one.shown] if one.shown is not None else None
            given = row is None or (row.held and one.booked)
            known = {"pod": True, "ended": False, "look": POD} if given else {}
            yield f"Allocate of {number}", node.put(number, asked=False, **known)
        if one.pod:
            yield f"the pod of {number} ends", node.put(number, pod=False, booked=one.booked and self._ghosts)

    def _books(self, node: Node, number: int) -> Iterator[tuple[str, Node]]:
        one = node.gpus[number]
        if one.pod and not one.booked:
            yield f"the kubelet notes the pod of {number}", node.put(number, booked=True)
        if one.booked and not one.pod:
            yield f"the pod of {number} is known to have ended", node.put(number, ended=True)
            yield f"the kubelet forgets the pod of {number}", node.put(number, booked=False, ended=False)
        if node.alive and one.shown is not None and not one.healthy:
            # What Allocate answered in this life of the gateway it knows itself.
            held = one.pod or (one.booked and not one.ended)
            yield f"the records are read of {number}", node.put(number, look=POD if held else NOBODY)

    def _gateway(self, node: Node, number: int) -> Iterator[tuple[str, Node]]:
        """What is on disk comes into force, into the list, into the slice."""
        one, side = node.gpus[number], node.actual(number)
        if one.disk is not one.side:
            yield f"{number} is {one.disk.value}", node.put(number, side=one.disk, allocated=None)
        shown = table.listed(side)
        if one.shown is not shown:
            look = one.look if one.shown is not None and shown is not None else None
            yield f"the list of {number}", node.put(number, shown=shown, look=look)
        offered = table.offered(side, one.shown, one.look)
        if one.slice is not offered:
            yield f"the slice of {number}", node.put(number, slice=offered)
        yield f"the scheduler hears of {number}", node.put(number, known=one.slice)
        if one.slice is not Offered.FREE:
            has = CLAIM if node.claim and number in node.of else NOBODY
            yield f"claims of {number} are looked at", node.put(number, allocated=has)

    def _crossing(self, node: Node, number: int) -> Iterator[tuple[str, Node]]:
        one, seen = node.gpus[number], node.seen(number)
        if one.disk is one.side:
            yield f"{number} moves on", node.put(number, disk=table.moved(one.side, seen))

    def _claim(self, node: Node) -> Iterator[tuple[str, Node]]:
        if node.claim == 1 and node.alive:
            sides, gpus = [node.actual(number) for number in node.of], [node.gpus[number] for number in node.of]
            if all(
                table.offered(side, one.shown, one.look) is not Offered.NOT
                for side, one in zip(sides, gpus, strict=True)
            ):
                yield "Prepare", node._replace(claim=2)
            for number, side in zip(node.of, sides, strict=True):
                free = not node.gpus[number].pod and not node.gpus[number].booked
                back = table.missed(side, Seen(pod=NOBODY if free else POD))
                if back is not side and node.gpus[number].disk is side:
                    yield f"the claim calls {number} back", node.put(number, disk=back)
        if node.claim == 2 and node.alive:
            yield "the claim is on disk", node._replace(claim=3)
        if node.claim == 3 and node.alive:
            yield "Unprepare", node._replace(claim=0, of=())

    # What must come.

    def unending(self, done: Callable[[Node], bool]) -> set[Node]:
        """Give the states from which no way leads to one that is ``done``, where nobody new wants anything."""
        before: dict[Node, set[Node]] = defaultdict(set)
        for node, after in self.onward.items():
            for one in after:
                before[one].add(node)
        every = {*self.onward, *before}
        reached = {node for node in every if done(node)}
        frontier = list(reached)
        while frontier:
            frontier = [one for node in frontier for one in before[node] if one not in reached and not reached.add(one)]  # type: ignore[func-returns-value]
        return every - reached


def is_settled(node: Node) -> bool:
    """Whether every GPU is free to be given away by exactly one API, everybody knows it, and no claim waits."""
    return (
        node.alive
        and not node.claim
        and all(
            (one.side, one.shown, one.healthy, one.known) in _SETTLED and not one.asked and not one.pod
            for one in node.gpus
        )
    )


_SETTLED: Final = frozenset(
    {
        (Side.PLUGIN, None, True, Offered.NOT),
        (Side.DRA, State.ELSEWHERE, False, Offered.FREE),
    }
)
