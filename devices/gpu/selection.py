"""Find the GPUs that are nearest to each other: the search of preferred allocation.

``select`` minimises, in this order: the distances between chosen GPUs, the pairs on two NUMA nodes, the devices left free on
chosen GPUs, the distances among the other GPUs, and the indices (docs/preferred-allocation.md explains each). It tries sets in
the order of their indices, and skips sets whose lower bound is worse than the best set so far.

For up to 16 GPUs (65,536 sets), the result is optimal. For more GPUs, the number of steps is limited. It isn't the time, so that
equal requests get equal answers on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, combinations, islice
from operator import add, sub
from typing import Final

from msgspec import Struct

from devices.gpu.model import FARTHEST, GPU

EXACT_GPUS: Final = 16
"""Most GPUs for which the choice is optimal."""
LINKED_GPUS: Final = 64
"""Most GPUs for which links are used."""
_STEPS: Final = 8_192  # Divided by the number of GPUs, because each step takes longer with more GPUs.
_EXCHANGES: Final = 256
_MOST_NODES: Final = 8
"""Most NUMA nodes (two CPUs in four parts each) of which every combination is tried if no links are known."""
_PAIRS: Final = LINKED_GPUS * LINKED_GPUS
"""Larger than the number of pairs of GPUs, so that one difference in distance outweighs all pairs on two NUMA nodes."""


def select(
    gpus: Sequence[GPU], room: Sequence[int], count: int, missing: int, opened: Sequence[GPU], others: Sequence[GPU]
) -> list[int]:
    """Choose ``count`` GPUs that together have room for ``missing`` devices; return their indexes in ``gpus``, ascending.

    ``gpus`` are in order of preference among equals. ``room`` is how many devices each has free, at least 1. The ``opened``
    GPUs are chosen anyway; the ``others`` have room, but can't be chosen. The caller guarantees that ``count`` is the smallest number
    of GPUs with enough room.
    """
    if count in {0, len(gpus)}:
        return list(range(count))
    all_there = (*gpus, *opened, *others)
    searched = len(all_there) <= LINKED_GPUS
    single = max(room) == 1
    nodes = len({gpu.numa_node for gpu in gpus})
    if single and not (searched and (nodes > _MOST_NODES or _differ(all_there))):
        return _nearest_nodes(count, gpus, Counter(gpu.numa_node for gpu in opened))
    if not searched:
        return _roomiest(room, count, missing)
    return list(_Search(gpus, room, count, missing, opened, others).best())


def _differ(gpus: Sequence[GPU]) -> bool:
    """Return True if the distances between these GPUs can differ."""
    return any(gpu.links for gpu in gpus) or len({gpu.board for gpu in gpus}) < len(gpus)


def _roomiest(room: Sequence[int], count: int, missing: int) -> list[int]:
    """Choose the GPUs with the most room; as the last one, the one with the least room that suffices."""
    order = sorted(range(len(room)), key=lambda place: -room[place])
    first, rest = order[: count - 1], order[count - 1 :]
    missing -= sum([room[place] for place in first])
    last = min((room[place], place) for place in rest if room[place] >= missing)[1]
    return sorted([*first, last])


class _Part(Struct, frozen=True):
    """A part of a choice (indexes in ascending order), and its sums.

    ``distance`` counts each pair twice; ``to`` has every GPU's distance to the chosen ones.
    """

    chosen: tuple[int, ...]
    distance: int
    cost: int
    to: Sequence[int]
    missing: int


class _Search:
    """The search among at most ``LINKED_GPUS`` GPUs, which are numbered from 0 here."""

    def __init__(
        self,
        gpus: Sequence[GPU],
        room: Sequence[int],
        count: int,
        missing: int,
        opened: Sequence[GPU],
        others: Sequence[GPU],
    ) -> None:
        self._places = range(len(gpus))
        self._room, self._count = room, count
        table = _distances(gpus, (*gpus, *opened, *others))
        # Among choices of the same distance: the farther the chosen GPUs are from all, the nearer the others stay.
        shares = [sum(row) for row in table]
        scale = sum(shares) + 1
        self._cost = [free * scale - share for free, share in zip(room, shares, strict=True)]
        nodes = [gpu.numa_node for gpu in (*gpus, *opened)]
        apart = {own: [node != own for node in nodes] for own in {*nodes}}
        near = [[*map(add, row, apart[own])] for row, own in zip(table, nodes, strict=False)]
        self._rows = [row[: len(gpus)] for row in near]
        self._start = _Part((), 0, 0, [sum(row[len(gpus) :]) for row in near], missing)
        self._near: dict[int, list[list[int]]] = {}
        self._steps = _STEPS // len(gpus) if len(gpus) > EXACT_GPUS else 1 << EXACT_GPUS

    def best(self) -> tuple[int, ...]:
        """Return the best choice; if that takes too many steps, one that no single exchange improves."""
        first = self._exchanged(self._star())
        self._found = first.chosen
        # The 1 lets the search find an equal choice with lower indices; the first that it finds has the lowest.
        self._least = (first.distance, first.cost, 1)
        self._descend(self._start, 0)
        if self._steps <= 0:
            self._found = self._exchanged(self._part(self._found)).chosen
        return self._found

    def _with(self, part: _Part, place: int) -> _Part:
        return _Part(
            (*part.chosen, place),
            part.distance + 2 * part.to[place],
            part.cost + self._cost[place],
            [*map(add, part.to, self._rows[place])],
            part.missing - self._room[place],
        )

    def _descend(self, part: _Part, start: int) -> None:
        """Try each way to complete ``part`` with GPUs from ``start`` on."""
        self._steps -= 1
        left = self._count - len(part.chosen)
        rest = self._places[start:]
        if left == 1:
            self._complete(part, rest)
        elif len(rest) >= left and self._promising(part, start, rest, left):
            for place in rest[: len(rest) - left + 1]:
                if self._steps <= 0:
                    break
                self._descend(self._with(part, place), place + 1)

    def _complete(self, part: _Part, rest: Iterable[int]) -> None:
        for place in rest:
            distance = part.distance + 2 * part.to[place]
            if distance <= self._least[0] and self._room[place] >= part.missing:
                key = (distance, part.cost + self._cost[place], 0)
                if key < self._least:
                    self._least, self._found = key, (*part.chosen, place)

    def _promising(self, part: _Part, start: int, rest: Sequence[int], left: int) -> bool:
        """Return True if ``left`` of ``rest`` may have enough room, and may be better than the best choice so far.

        The bound assumes for each GPU that the ``left - 1`` others are its nearest.
        """
        if part.missing > left and sum(sorted([self._room[place] for place in rest])[-left:]) < part.missing:
            return False
        to, near = part.to, self._nearest(start)
        distance = part.distance + sum(sorted([2 * to[place] + near[place][left - 1] for place in rest])[:left])
        if distance != self._least[0]:
            return distance < self._least[0]
        cost = part.cost + sum(sorted([self._cost[place] for place in rest])[:left])
        return (distance, cost, 0) < self._least

    def _nearest(self, start: int) -> list[list[int]]:
        """Return for each GPU from ``start`` on the sums of its 1, 2, 3… smallest distances to these GPUs."""
        start -= start % (1 + 2 * ((len(self._places) - 1) // EXACT_GPUS))  # So it is made at most 16 times.
        if start not in self._near:
            sums = [[*accumulate(sorted(row[start:])[: self._count])] for row in self._rows[start:]]
            self._near[start] = [*[[]] * start, *sums]
        return self._near[start]

    def _star(self) -> _Part:
        """Choose the GPU whose neighbours are nearest, and these; if none has the room, the GPUs with the most room."""
        rows = [[*map(add, row, self._start.to)] for row in self._rows]
        for centre, row in enumerate(rows):
            row[centre] -= 1 << 32  # So that it comes first.
        for row in sorted(rows, key=lambda row: sum(sorted(row)[: self._count])):
            star = sorted(self._places, key=row.__getitem__)[: self._count]
            if sum([self._room[place] for place in star]) >= self._start.missing:
                return self._part(star)
        return self._part(_roomiest(self._room, self._count, self._start.missing))

    def _exchanged(self, part: _Part) -> _Part:
        """Exchange one GPU for another, the best exchange first, while that improves the choice."""
        for _ in range(_EXCHANGES):
            least = (part.distance, part.cost)
            better, swap = least, (-1, -1)
            for out in part.chosen:
                without = part.distance - 2 * part.to[out]
                for new, to in enumerate(map(sub, part.to, self._rows[out])):
                    distance = without + 2 * to
                    if distance > better[0] or new in part.chosen:
                        continue
                    key = (distance, part.cost + self._cost[new] - self._cost[out])
                    if key < better and part.missing + self._room[out] - self._room[new] <= 0:
                        better, swap = key, (out, new)
            if better == least:
                break
            part = self._part({*part.chosen, swap[1]} - {swap[0]})
        return part

    def _part(self, places: Iterable[int]) -> _Part:
        part = self._start
        for place in sorted(places):
            part = self._with(part, place)
        return part


def _distances(rows: Sequence[GPU], columns: Sequence[GPU]) -> list[list[int]]:
    """Return the distances of each of ``rows`` to each of ``columns``, times ``_PAIRS``. GPUs on one board have 0."""
    boards = [gpu.board for gpu in columns]
    places = {board: place for place, board in enumerate(dict.fromkeys(boards))}
    table = [[FARTHEST * _PAIRS] * len(places) for _ in places]
    for gpu in columns:
        own = places[gpu.board]
        row = table[own]
        row[own] = 0
        for link in gpu.links:
            peer = places.get(link.peer)
            if peer is not None and (distance := link.distance * _PAIRS) < row[peer]:
                row[peer] = table[peer][own] = distance
    order = [places[board] for board in boards]
    return [[row[place] for place in order] for row in (table[places[gpu.board]] for gpu in rows)]


def _nearest_nodes(count: int, gpus: Sequence[GPU], opened: Mapping[int | None, int]) -> list[int]:
    """Choose ``count`` GPUs with the most pairs on one NUMA node; return their indexes, ascending.

    ``opened`` is how many GPUs the container has on each node already. The more it has on a node, the more pairs each further
    GPU there adds. So in the best choices, all nodes but one are used completely or not at all. All such choices are tried. If
    there are more than ``_MOST_NODES`` nodes, the nodes that add the most pairs are used first.
    """
    there: dict[int | None, list[int]] = {}
    for place, gpu in enumerate(gpus):
        there.setdefault(gpu.numa_node, []).append(place)
    nodes = [_NumaNode(opened.get(node, 0), places) for node, places in there.items()]
    if len(nodes) > _MOST_NODES:
        nodes.sort(key=lambda node: -node.pairs(min(len(node.places), count)))
        return sorted(islice(chain.from_iterable(node.places for node in nodes), count))
    ways = list(_ways_to_use(count, nodes))
    most = max(pairs for pairs, _ in ways)
    return min(sorted(chain.from_iterable(taken)) for pairs, taken in ways if pairs == most)


class _NumaNode(Struct, frozen=True):
    """A NUMA node: how many GPUs the container has there already, and the indexes of the free ones."""

    opened: int
    places: list[int]

    def pairs(self, count: int) -> int:
        """Return how many pairs ``count`` more GPUs add there."""
        return count * self.opened + count * (count - 1) // 2


def _ways_to_use(count: int, nodes: Sequence[_NumaNode]) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield each choice of ``count`` GPUs that uses some nodes completely and at most one partly, with its number of pairs."""
    for full in chain.from_iterable(combinations(nodes, number) for number in range(len(nodes) + 1)):
        rest = count - sum(len(node.places) for node in full)
        pairs = sum(node.pairs(len(node.places)) for node in full)
        taken = [node.places for node in full]
        if rest == 0:
            yield pairs, taken
        for node in nodes if rest > 0 else ():
            if len(node.places) > rest and not any(node is one for one in full):
                yield pairs + node.pairs(rest), [*taken, node.places[:rest]]
