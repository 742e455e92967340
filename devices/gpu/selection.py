"""Which of many GPUs are nearest to each other: the search beneath preferred allocation.

``select`` finds the choice that is least in distance, then in NUMA nodes, in what is left of the GPUs, in the distances
among those that stay, in indices: docs/preferred-allocation.md says what each means and why. It tries sets in the order of
their indices, and leaves out those that can't win: by a bound from below, and because of GPUs that are alike the first may as
well be taken first. 16 GPUs have 65 536 sets, so up to there the answer is always the best. Above, the work is bounded in
steps, not in time: the same question has the same answer on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from devices.gpu.model import FARTHEST, GPU

EXACT: Final = 16
"""Among so many GPUs the choice is the best, whatever their links."""
SEARCHED: Final = 64
"""Among more GPUs links don't count."""
_STEPS: Final = 16_384  # divided by the number of GPUs, because a step takes as much longer
_EXCHANGES: Final = 256


def select(
    gpus: Sequence[GPU], room: Sequence[int], count: int, missing: int, opened: Sequence[GPU], others: Sequence[GPU]
) -> list[int]:
    """Choose ``count`` of ``gpus`` that have room for ``missing`` devices together; give their places in ``gpus``, ascending.

    ``gpus`` are in the order in which they are preferred among equals; ``room`` says how many devices each has free, at
    least 1. The ``opened`` are chosen anyway; the ``others`` have room, too, and can't be chosen. There must be such a
    choice, and none of fewer GPUs.
    """
    if count in {0, len(gpus)}:
        return list(range(count))
    all_there = (*gpus, *opened, *others)
    searched = len(all_there) <= SEARCHED
    single = max(room) == 1
    if single and not (searched and _differ(all_there)):
        return _fewest_nodes(count, gpus, {gpu.numa_node for gpu in opened})
    if not searched:
        return _roomiest(room, count, missing)
    return list(_Search(gpus, room, count, missing, opened, others).best())


def _differ(gpus: Sequence[GPU]) -> bool:
    """Whether some of them can be nearer to each other than others."""
    return any(gpu.links for gpu in gpus) or len({gpu.board for gpu in gpus}) < len(gpus)


def _roomiest(room: Sequence[int], count: int, missing: int) -> list[int]:
    """Choose those with the most room; as the last, the one with the least that suffices."""
    order = sorted(range(len(room)), key=lambda place: -room[place])
    first, rest = order[: count - 1], order[count - 1 :]
    missing -= sum([room[place] for place in first])
    last = min((room[place], place) for place in rest if room[place] >= missing)[1]
    return sorted([*first, last])


class _Part(NamedTuple):
    """A part of a choice, by places in ascending order, and what there is to know of it.

    ``distance`` counts each pair twice; ``nodes`` is a set of bits; ``to`` has the distance of every GPU to those chosen.
    """

    chosen: tuple[int, ...]
    distance: int
    nodes: int
    cost: int
    to: Sequence[int]
    missing: int


class _Search:
    """The search among at most ``SEARCHED`` GPUs, which are numbers from 0 here: their places."""

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
        self._rows = [row[: len(gpus)] for row in table]
        # Among choices of the same distance, those that stay are the nearer, the farther the chosen are from everyone.
        shares = [sum(row) for row in table]
        scale = sum(shares) + 1
        self._cost = [free * scale - share for free, share in zip(room, shares, strict=True)]
        bits = {node: 1 << bit for bit, node in enumerate(dict.fromkeys(gpu.numa_node for gpu in (*opened, *gpus)))}
        self._nodes = [bits[gpu.numa_node] for gpu in gpus]
        to = [sum(row[len(gpus) : len(gpus) + len(opened)]) for row in table]
        self._start = _Part((), 0, sum({bits[gpu.numa_node] for gpu in opened}), 0, to, missing)
        self._alike = self._classes()
        self._near: dict[int, list[list[int]]] = {}
        self._steps = _STEPS // len(gpus) if len(gpus) > EXACT else 1 << EXACT

    def best(self) -> tuple[int, ...]:
        """Find the best choice; where that takes too many steps, one that no single exchange betters."""
        first = self._exchanged(self._star())
        self._found = first.chosen
        # The 1 lets the search find an equal one with lower indices; the first that it finds has the lowest.
        self._least = (first.distance, first.nodes.bit_count(), first.cost, 1)
        self._descend(self._start, 0, 0)
        if self._steps <= 0:
            self._found = self._exchanged(self._part(self._found)).chosen
        return self._found

    def _with(self, part: _Part, place: int) -> _Part:
        return _Part(
            (*part.chosen, place),
            part.distance + 2 * part.to[place],
            part.nodes | self._nodes[place],
            part.cost + self._cost[place],
            [a + b for a, b in zip(part.to, self._rows[place], strict=True)],
            part.missing - self._room[place],
        )

    def _descend(self, part: _Part, start: int, skipped: int) -> None:
        """Try each way to complete ``part`` with GPUs from ``start`` on that are like none in ``skipped``, a set of bits."""
        self._steps -= 1
        left = self._count - len(part.chosen)
        rest = [place for place in self._places[start:] if not skipped >> self._alike[place] & 1]
        if left == 1:
            self._complete(part, rest)
        elif len(rest) >= left and self._promising(part, start, rest, left):
            for place in rest[: len(rest) - left + 1]:
                if self._steps <= 0:
                    break
                if not skipped >> self._alike[place] & 1:
                    self._descend(self._with(part, place), place + 1, skipped)
                    skipped |= 1 << self._alike[place]

    def _complete(self, part: _Part, rest: Iterable[int]) -> None:
        """Try each of ``rest`` as the last."""
        for place in rest:
            distance = part.distance + 2 * part.to[place]
            if distance <= self._least[0] and self._room[place] >= part.missing:
                key = (distance, (part.nodes | self._nodes[place]).bit_count(), part.cost + self._cost[place], 0)
                if key < self._least:
                    self._least, self._found = key, (*part.chosen, place)

    def _promising(self, part: _Part, start: int, rest: Sequence[int], left: int) -> bool:
        """Whether ``left`` of ``rest`` may have the room, and be better than the best so far.

        They can't be nearer than if each had, as the ``left - 1`` others, those that are nearest to it.
        """
        if part.missing > left and sum(sorted([self._room[place] for place in rest])[-left:]) < part.missing:
            return False
        near = self._nearest(start)
        distance = part.distance + sum(sorted([2 * part.to[place] + near[place][left - 1] for place in rest])[:left])
        if distance != self._least[0]:
            return distance < self._least[0]
        there = Counter([self._nodes[place] for place in rest])
        inside = sum([count for node, count in there.items() if node & part.nodes])
        beyond = [count for node, count in there.items() if not node & part.nodes]
        nodes = part.nodes.bit_count() + _nodes_needed(left - inside, beyond)
        cost = part.cost + sum(sorted([self._cost[place] for place in rest])[:left])
        return (distance, nodes, cost, 0) < self._least

    def _nearest(self, start: int) -> list[list[int]]:
        """For each GPU, the sums of its 0, 1, 2… smallest distances to those from ``start`` on, or some before."""
        start -= start % (1 + (len(self._places) - 1) // EXACT)  # so that it is made at most 16 times
        if start not in self._near:
            self._near[start] = [
                [0, *accumulate(sorted([*row[start:place], *row[max(start, place + 1) :]]))]
                for place, row in enumerate(self._rows)
            ]
        return self._near[start]

    def _classes(self) -> list[int]:
        """Find for each GPU the first that is like it: to exchange the two changes no distance, node or room."""
        firsts: dict[tuple[int, ...], list[int]] = {}
        alike: list[int] = []
        for place in self._places:
            known = firsts.setdefault((self._start.to[place], self._nodes[place], self._cost[place]), [])
            for first in known:
                row = self._rows[first].copy()
                row[first], row[place] = row[place], 0
                if row == self._rows[place]:
                    alike.append(first)
                    break
            else:
                known.append(place)
                alike.append(place)
        return alike

    def _star(self) -> _Part:
        """Choose a GPU and those nearest to it, for the GPU that has them nearest; if none has the room, the roomiest."""
        stars: list[tuple[int, list[int]]] = []
        for centre, row in enumerate(self._rows):
            lengths = [a + b for a, b in zip(row, self._start.to, strict=True)]
            star = sorted(self._places, key=[*lengths[:centre], -1, *lengths[centre + 1 :]].__getitem__)[: self._count]
            if sum([self._room[place] for place in star]) >= self._start.missing:
                stars.append((sum([lengths[place] for place in star]), star))
        return self._part(min(stars)[1] if stars else _roomiest(self._room, self._count, self._start.missing))

    def _exchanged(self, part: _Part) -> _Part:
        """Exchange one GPU for another, the best exchange first, while that makes the choice better."""
        for _ in range(_EXCHANGES):
            least = (part.distance, part.nodes.bit_count(), part.cost)
            better, swap = least, (-1, -1)
            for out in part.chosen:
                row = self._rows[out]
                nodes = self._start.nodes
                for place in part.chosen:
                    nodes |= self._nodes[place] if place != out else 0
                for new in self._places:
                    distance = part.distance + 2 * (part.to[new] - row[new] - part.to[out])
                    if distance > better[0] or new in part.chosen:
                        continue
                    key = (
                        distance,
                        (nodes | self._nodes[new]).bit_count(),
                        part.cost + self._cost[new] - self._cost[out],
                    )
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
    """Give the distances of ``rows``, which are among ``columns``, to these: 0 on one board, else that of the nearest link."""
    ways = {gpu.board: _ways(gpu) for gpu in columns}
    there = [(gpu.board, ways[gpu.board]) for gpu in columns]
    table: list[list[int]] = []
    for gpu in rows:
        board, own = gpu.board, ways[gpu.board]
        table.append([min(own.get(peer, FARTHEST), back.get(board, FARTHEST)) for peer, back in there])
    return table


def _ways(gpu: GPU) -> Mapping[str, int]:
    ways: dict[str, int] = {}
    for link in gpu.links:
        ways[link.peer] = min(link.distance, ways.get(link.peer, FARTHEST))
    ways[gpu.board] = 0
    return ways


def _fewest_nodes(size: int, candidates: Sequence[GPU], opened: set[int | None]) -> list[int]:
    """Choose ``size`` of at least as many ``candidates`` on as few nodes beyond ``opened`` as can be; give their places.

    Walks the candidates in order and settles each node when it first turns up: it is opened if, with it, the biggest of
    the unsettled nodes still make up the number, and closed for good otherwise. (Once a node can't be part of a smallest
    set of nodes, opening others never changes that.)
    """
    opened = set(opened)
    room = Counter(gpu.numa_node for gpu in candidates)
    missing = size - sum(room.pop(node, 0) for node in opened)
    budget, closed = _nodes_needed(missing, room.values()), set[int | None]()
    chosen: list[int] = []
    for place, gpu in enumerate(candidates):
        if len(chosen) == size:
            break
        node = gpu.numa_node
        if node not in opened and node not in closed:
            own = room.pop(node)
            if budget and _nodes_needed(missing - own, room.values()) < budget:
                opened.add(node)
                missing, budget = missing - own, budget - 1
            else:
                closed.add(node)
        if node in opened:
            chosen.append(place)
    return chosen


def _nodes_needed(missing: int, room: Iterable[int]) -> int:
    """How many nodes it takes, the biggest first, to make up for ``missing``; one too many where all aren't enough."""
    count = 0
    for size in sorted(room, reverse=True):
        if missing <= 0:
            return count
        missing -= size
        count += 1
    return count if missing <= 0 else count + 1
