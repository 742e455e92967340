"""The table of owners, explored: two APIs, kubelet, scheduler, late news, a crash of each anywhere, and a newer gateway.

The gateway's part is the functions of ``gateway.sides.table``, called as the shell calls them: a change is on disk, then in force,
then in the list, then in the slice. What surrounds it is a model. A pod stands for all pods of its GPUs by the device plugin API, a
claim for all claims. Time isn't modelled, but for one thing: what Allocate answered before a gateway died is in the kubelet's records
when the next one reads them. What the API server and the scheduler know comes as late as it likes, so that their crashes add nothing.

What the tests search takes seconds. ``python -m gateway_lab.trials.owners`` searches pods by name and claims of two GPUs, too, and a GPU that
another DRA driver offers, with every step apart: the last one has 518,848 states, and takes 3 minutes of processor time and 2 GiB.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from devices.life.states import COUNTED, TABLE, State
from devices.model import Health
from gateway.sides import table
from gateway.sides.side import Side
from gateway.sides.table import BoardHolders, Offered
from gateway_lab.trials.explore import BrokenError, search, uncollected

NOBODY: Final = ""
CLAIM: Final = "the claim"
POD: Final = "the pod"
Group: TypeAlias = tuple[int, ...]


class Foreign(Enum):
    """What another DRA driver on the node does with a GPU."""

    NOT = "nothing"
    OFFERS = "its slices offer it"
    GAVE = "a claim of it has it"
    WENT = "a claim of it has it, and its slices are gone"


class GPU(Struct, frozen=True, cache_hash=True):
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
    untold: bool = False
    """The gateway that answered its Allocate ended without a word of it on disk."""
    recorded: bool = False
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
    foreign: Foreign = Foreign.NOT
    met: bool = False
    """Whether the gateway knows that another DRA driver offers it, or may have it still."""
    kept: bool = False
    """Another driver gave it away after the gateway had withheld it from everybody."""


class Node(Struct, frozen=True, cache_hash=True):
    """All of it. ``claim``: 0 there is none, 1 allocated, 2 noted in memory, 3 on disk and told; it is of ``of``.

    ``named``: the scheduler made it for a pod that asked by name.
    """

    gpus: tuple[GPU, ...]
    alive: bool = True
    claim: int = 0
    of: Group = ()
    named: bool = False


class On(NamedTuple):
    """How far a claim of a GPU is (as ``Node.claim``), and whether it was made for a pod that asked by name."""

    step: int
    named: bool

    @property
    def is_noted(self) -> bool:
        """Whether the gateway knows that it has the GPU."""
        return self.step >= 2


Steps: TypeAlias = tuple[tuple[str, GPU], ...]


class Model:
    """The model.

    Args:
        claims: the GPUs that a claim may be for.
        pods: the GPUs that a pod asks for, together; each GPU is in one of them.
        by_name: whether claims are made for pods that ask by name, too.
        ghosts: whether the kubelet's records go on naming a pod that ended.
        beside: whether another DRA driver offers the GPUs, too, and goes again. What its slices are without for a moment, while a
            kubelet starts, takes less time than the gateway waits, and isn't modelled.
        tells: whether a gateway that makes room has on disk what Allocate answered.
        at_once: whether what is on disk is in force, in the list and in the slice before anything else happens: what is between
            is explored with one GPU, and with two this leaves few enough states to see all.
    """

    def __init__(
        self,
        claims: tuple[Group, ...] = ((0,),),
        pods: tuple[Group, ...] = ((0,),),
        *,
        by_name: bool = False,
        ghosts: bool = True,
        tells: bool = True,
        at_once: bool = False,
        beside: bool = False,
    ) -> None:
        self._claims, self._pods, self._ghosts, self._at_once = claims, pods, ghosts, at_once
        self._kinds = (False, True) if by_name else (False,)
        self._tells, self._beside = tells, beside
        self.start = Node((GPU(),) * sum(map(len, pods)))
        self.onward: dict[Node, set[Node]] = defaultdict(set)
        """Which states come of which, without an order, a crash, or anybody new who wants a GPU."""
        self._known: dict[tuple[int, GPU, On, bool], tuple[Steps, Steps]] = {}
        self._same: dict[GPU, GPU] = {}
        self._are_twins = all(map(_is_same_swapped, (claims, pods)))
        self._resting: dict[tuple[GPU, On], GPU] = {}

    def check(self, node: Node) -> None:
        """No GPU is given twice."""
        for number, one in enumerate(node.gpus):
            prepared = node.claim == 3 and number in node.of
            if one.pod + prepared + one.kept > 1:
                raise BrokenError(f"GPU {number} is given twice")

    def moves(self, node: Node) -> Iterator[tuple[str, Node]]:
        """Say what can happen, and what becomes of it."""
        steps = [self._steps(node, number) for number in range(len(node.gpus))]
        for number, (news, _) in enumerate(steps):
            for said, one in news:
                yield said, self._sorted(_put(node, {number: one}))
        for said, after in self._news(node):
            yield said, self._sorted(after)
        onward = self.onward[node]
        progress = [(said, _put(node, {number: one})) for number, (_, each) in enumerate(steps) for said, one in each]
        for said, unsorted in chain(progress, self._progress(node)):
            onward.add(after := self._sorted(unsorted))
            yield said, after

    def _sorted(self, node: Node) -> Node:
        """Give one of the two states that differ only in which GPU is which."""
        if self._are_twins and hash(node.gpus[0]) > hash(node.gpus[1]):
            return replace(node, gpus=node.gpus[::-1])
        return node

    # What may happen, or not.

    def _news(self, node: Node) -> Iterator[tuple[str, Node]]:
        for group in self._pods:
            if all(one.healthy and not one.pod and not one.asked for one in _of(node, group)):
                asked = {number: self._one(replace(node.gpus[number], asked=True)) for number in group}
                yield f"the kubelet picks {group}", _put(node, asked)
        for of in self._claims if not node.claim else ():
            if all(one.known is Offered.FREE for one in _of(node, of)):
                for named in self._kinds:
                    said = f"the scheduler allocates {of}{' by name' if named else ''}"
                    yield said, replace(node, claim=1, of=of, named=named)
        yield "the kubelet starts anew", self._settled(replace(node, gpus=tuple(map(self._rebooted, node.gpus))))
        if node.alive:
            yield "the gateway dies", self._died(node)
            yield "a newer gateway takes over", self._handed_over(node)

    def _rebooted(self, one: GPU) -> GPU:
        """Give what a kubelet's start leaves: it hears of no list yet, deletes slices, and keeps what its checkpoint names."""
        return self._one(replace(one, asked=False, healthy=False, slice=Offered.NOT, pod=one.pod and one.recorded))

    def _died(self, node: Node) -> Node:
        gpus = tuple(
            self._one(replace(one, asked=False, recorded=one.recorded or one.pod, look=None, allocated=None))
            for one in node.gpus
        )
        return replace(node, gpus=gpus, alive=False, claim=1 if node.claim == 2 else node.claim)

    def _handed_over(self, node: Node) -> Node:
        """Give what an older gateway leaves to a newer one: all that was decided is on disk, and nothing in memory passes."""
        gpus = (
            replace(one, asked=False, look=None, allocated=None, untold=one.pod and not (one.recorded or self._tells))
            for one in node.gpus
        )
        claim = 3 if node.claim == 2 else node.claim  # It is finished, or passed on.
        return self._started(replace(node, gpus=tuple(gpus), claim=claim))

    # What goes on by itself.

    def _progress(self, node: Node) -> Iterator[tuple[str, Node]]:
        if not node.alive:
            yield "a gateway starts", self._started(node)
        for group in self._pods:
            gpus = _of(node, group)
            if node.alive and all(one.asked for one in gpus):
                given = all(_gives(one) for one in gpus)
                known = {"pod": True, "ended": False, "look": POD} if given else {}
                after = {number: self._one(replace(node.gpus[number], asked=False, **known)) for number in group}
                yield f"Allocate of {group}", _put(node, after)
            if all(one.pod for one in gpus):
                if not all(one.recorded for one in gpus):
                    recorded = {
                        number: self._one(replace(node.gpus[number], recorded=True, untold=False)) for number in group
                    }
                    yield f"the kubelet notes the pod of {group}", _put(node, recorded)
                ended = [replace(one, pod=False, untold=False, recorded=one.recorded and self._ghosts) for one in gpus]
                yield f"the pod of {group} ends", _put(node, dict(zip(group, map(self._one, ended), strict=True)))
        yield from self._claim(node)

    def _started(self, node: Node) -> Node:
        gpus = [
            replace(
                one,
                side=one.disk,
                shown=_listed(one.disk, _claim_on(node, number), None),
                # The slices are looked at before anything is given away that isn't by the table.
                met=one.disk is Side.FOREIGN or one.foreign in {Foreign.OFFERS, Foreign.GAVE},
                kept=one.kept and (one.disk is Side.FOREIGN or one.foreign is not Foreign.WENT),
            )
            for number, one in enumerate(node.gpus)
        ]
        return self._settled(replace(node, alive=True, gpus=tuple(map(self._one, gpus))))

    def _claim(self, node: Node) -> Iterator[tuple[str, Node]]:
        if node.claim == 1 and node.alive:
            offered = [table.offered(one.side, one.shown, one.look, _foreign(one)) for one in _of(node, node.of)]
            if all(one is not Offered.NOT for one in offered):
                yield "Prepare", self._settled(replace(node, claim=2))
        if node.claim == 2 and node.alive:
            yield "the claim is on disk", replace(node, claim=3)
        if node.claim == 3 and node.alive:
            if node.named:
                node = self._ended_by_name(node)
            yield "Unprepare", self._settled(replace(node, claim=0, of=(), named=False))

    def _ended_by_name(self, node: Node) -> Node:
        """Give what is written down when a claim of a pod that asked by name is unprepared."""
        after = {}
        for number in node.of:
            one = node.gpus[number]
            if one.shown in COUNTED and one.slice is not Offered.FREE and one.disk is one.side:
                side = table.moved(
                    _actual(one.side, On(0, named=False)),
                    BoardHolders(claim=NOBODY, allocated=NOBODY, foreign=_foreign(one)),
                )
                after[number] = self._one(replace(one, disk=side))
        return _put(node, after)

    # What happens to one GPU alone.

    def _steps(self, node: Node, number: int) -> tuple[Steps, Steps]:
        """Give what may happen to a GPU, and what goes on by itself."""
        one, claim = node.gpus[number], _claim_on(node, number)
        key = number, one, claim, node.alive
        if key not in self._known:
            found = [self._ordered(one) if node.alive else (), self._on(one, claim, alive=node.alive)]
            news, progress = (
                tuple(
                    (f"{said} ({number})", settled)
                    for said, after in steps
                    if (settled := self._at_rest(after, claim) if node.alive else self._one(after)) != one
                )
                for steps in found
            )
            self._known[key] = news, progress
        return self._known[key]

    def _ordered(self, one: GPU) -> Iterator[tuple[str, GPU]]:
        for to in (Side.DRA, Side.PLUGIN):
            yield f"ordered to {to.value}", replace(one, disk=table.ordered(one.side, to, _foreign(one)))

    def _on(self, one: GPU, claim: On, *, alive: bool) -> Iterator[tuple[str, GPU]]:
        yield from self._records(one, alive=alive)
        if self._beside:
            yield from _others(one, claim, alive=alive)
        if alive:
            yield "the kubelet hears", replace(one, healthy=_is_healthy(one.shown))
            if (shown := _listed(one.side, claim, one.shown, admits=not one.met)) is None and one.shown is not None:
                yield "a kubelet that starts has it listed", replace(one, shown=shown, look=None)
            if shown is State.ELSEWHERE and one.side is Side.TO_PLUGIN and claim.named and one.allocated == CLAIM:
                yield "the list counts a pod by name before its claim is prepared", replace(one, shown=State.RETURNING)
            yield from _told(one, claim)
            yield "the scheduler hears", replace(one, known=one.slice)
            if one.slice is not Offered.FREE:
                yield "claims are looked at", replace(one, allocated=CLAIM if claim.step else NOBODY)
            yield from self._crossing(one, claim)

    def _records(self, one: GPU, *, alive: bool) -> Iterator[tuple[str, GPU]]:
        if one.recorded and not one.pod:
            yield "the pod is known to have ended", replace(one, ended=True)
            yield "the kubelet forgets the pod", replace(one, recorded=False, ended=False)
        if alive and one.shown is not None and (not one.healthy or one.shown in COUNTED):
            # What Allocate answered in this life of the gateway it knows itself, and of the one before by what that wrote.
            held = (one.pod and not one.untold) or (one.recorded and not one.ended)
            yield "the records are read", replace(one, look=POD if held else NOBODY)

    def _crossing(self, one: GPU, claim: On) -> Iterator[tuple[str, GPU]]:
        if one.disk is not one.side:
            return
        seen = BoardHolders(one.look, CLAIM if claim.is_noted else NOBODY, one.allocated, _foreign(one))
        yield "it moves on", replace(one, disk=table.moved(one.side, seen))
        if claim.step == 1:
            free = not one.pod and not one.recorded
            yield (
                "the claim calls it back",
                replace(
                    one, disk=table.missed(one.side, BoardHolders(pod=NOBODY if free else POD, foreign=_foreign(one)))
                ),
            )

    # States.

    def _settled(self, node: Node) -> Node:
        if not node.alive:
            return node
        gpus = tuple(self._at_rest(one, _claim_on(node, number)) for number, one in enumerate(node.gpus))
        return replace(node, gpus=gpus)

    def _at_rest(self, one: GPU, claim: On) -> GPU:
        """Have what is on disk in force, in the list and in the slice, where that is at once."""
        if not self._at_once:
            return self._one(one)
        if (found := self._resting.get((one, claim))) is None:
            found = one
            while (step := next(_told(found, claim), None)) is not None:
                found = step[1]
            found = self._resting[one, claim] = self._one(found)
        return found

    def _one(self, one: GPU) -> GPU:
        """Keep one object of each: it is hashed once."""
        return self._same.setdefault(one, one)

    # What must come.

    @uncollected()
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


def _is_same_swapped(groups: tuple[Group, ...]) -> bool:
    """True if two GPUs may swap their numbers."""
    return max(map(max, groups)) == 1 and {tuple(sorted(1 - one for one in group)) for group in groups} == {*groups}


def _put(node: Node, changes: dict[int, GPU]) -> Node:
    return replace(node, gpus=tuple(changes.get(number, one) for number, one in enumerate(node.gpus)))


def _of(node: Node, group: Group) -> list[GPU]:
    return [node.gpus[number] for number in group]


def _claim_on(node: Node, number: int) -> On:
    """Say how far a claim of a GPU is; 0 where there is none."""
    return On(node.claim, node.named) if number in node.of else On(0, named=False)


def _actual(side: Side, claim: On) -> Side:
    """Say where a GPU is for the gateway."""
    return table.actual(side, claimed=claim.is_noted)


def _listed(side: Side, claim: On, before: State | None, *, admits: bool = False) -> State | None:
    """Say what lies over a GPU in the list."""
    noted = claim.is_noted
    named = noted and claim.named
    return table.listed(_actual(side, claim), named=named, claimed=noted, before=before, admits=admits)


def _is_healthy(shown: State | None) -> bool:
    """Whether the kubelet takes a GPU for healthy, with this over it."""
    return shown is None or TABLE[shown].health is Health.HEALTHY


def _gives(one: GPU) -> bool:
    """Whether Allocate gives it."""
    row = TABLE[one.shown] if one.shown is not None else None
    return row is None or row.allocate is None or (row.held and one.recorded)


def _told(one: GPU, claim: On) -> Iterator[tuple[str, GPU]]:
    """Bring what is on disk into force, into the list, into the slice; each only where it isn't there."""
    side = _actual(one.side, claim)
    if one.disk is not one.side:
        yield f"it is {one.disk.value}", replace(one, side=one.disk, allocated=None)
    shown = _listed(one.side, claim, one.shown)
    if one.shown is not shown:
        look = one.look if one.shown is not None and shown is not None else None
        yield "the list", replace(one, shown=shown, look=look)
    offered = table.offered(side, one.shown, one.look, _foreign(one))
    if one.slice is not offered:
        yield "the slice", replace(one, slice=offered)


def _foreign(one: GPU) -> str:
    """Say which other driver has a GPU, for all that the gateway knows."""
    return "another driver" if one.met else ""


def _others(one: GPU, claim: On, *, alive: bool) -> Iterator[tuple[str, GPU]]:
    """Give what another DRA driver does, and what the gateway hears of that."""
    away = one.side in {Side.FOREIGN, Side.DRA} and one.disk is one.side and one.shown is not None and not one.healthy
    nobody = not (one.pod or one.asked or claim.step) and Offered.FREE not in {one.slice, one.known}
    match one.foreign:
        case Foreign.NOT:
            yield "another driver offers it", replace(one, foreign=Foreign.OFFERS)
        case Foreign.OFFERS:
            kept = alive and one.met and away and nobody
            yield "another driver gives it away", replace(one, foreign=Foreign.GAVE, kept=kept)
            yield "another driver goes", replace(one, foreign=Foreign.NOT)
        case Foreign.GAVE:
            yield "another driver's pod ends", replace(one, foreign=Foreign.OFFERS, kept=False)
            yield "another driver goes before its pod", replace(one, foreign=Foreign.WENT)
        case Foreign.WENT:
            yield "another driver's last pod ends", replace(one, foreign=Foreign.NOT, kept=False)
    if alive and one.foreign in {Foreign.NOT, Foreign.OFFERS, Foreign.GAVE}:
        yield "the gateway hears of another driver", replace(one, met=one.foreign is not Foreign.NOT)


def is_settled(node: Node) -> bool:
    """Whether every GPU is free to be given away by exactly one API, everybody knows it, and no claim waits."""
    return (
        node.alive
        and not node.claim
        and all(
            (one.side, one.shown, one.healthy, one.known) in _SETTLED and not (one.asked or one.pod or one.met)
            for one in node.gpus
        )
    )


_SETTLED: Final = frozenset(
    {
        (Side.PLUGIN, None, True, Offered.NOT),
        (Side.DRA, State.ELSEWHERE, False, Offered.FREE),
    }
)


def main() -> int:
    """Search what takes too long for the tests, and say what was found."""
    failed = False
    for model in (
        Model(by_name=True),
        Model(claims=((0, 1),), pods=((0,), (1,)), ghosts=False, at_once=True),
        Model(claims=((0,),), pods=((0, 1),), by_name=True, ghosts=False, at_once=True),
        Model(beside=True),
    ):
        found = search(model.start, model.moves, model.check)
        print(f"{found.states} states, {found.transitions} transitions, depth {found.depth}")
        stuck = [] if found.broken else [*model.unending(is_settled)]
        print(*(found.broken, *found.trace, *stuck[:1]), sep="\n")
        failed = failed or bool(found.broken or stuck)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
