"""How good and how fast preferred allocation is: ``python -m gateway_lab.trials.choice [topologies] [seed]``.

Each answer is compared with the best of *all* possible ones, found by trying them. For that the objective of
docs/preferred-allocation.md is written down a second time here, device by device, with nothing of what makes the real one
fast. Times are the processor's, so that what else runs on the machine doesn't count. Ends with 1 where an answer differs
or a bar is missed.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from devices.gpu.allocation import preferred
from devices.gpu.model import FARTHEST, GPU, Link, Way
from devices.model import PreferredRequest
from devices.policy import Sharing

_Ways = Callable[[int, int], Link | None]
_ASKED = 400


@dataclass(frozen=True, slots=True)
class Question:
    """A node, and what its kubelet asks."""

    gpus: Mapping[str, GPU]
    request: PreferredRequest
    sharing: Sharing = Sharing.DISTRIBUTED

    def answer(self) -> tuple[str, ...]:
        """Ask it."""
        return preferred(self.request, self.gpus, self.sharing)


def best(question: Question) -> tuple[str, ...]:
    """Find the best answer by trying each, sorted by ID. The devices of the question must be known and well."""
    must = question.request.must_include
    free = [device_id for device_id in question.request.available if device_id not in must]
    choices = itertools.combinations(free, question.request.size - len(must))
    return tuple(sorted(min(((*must, *more) for more in choices), key=Judge(question).badness)))


class Judge:
    """The objective, word by word."""

    def __init__(self, question: Question) -> None:
        ids = question.request.available
        gpus = {one: question.gpus[_named(one)[0]] for one in ids}
        shared = any(_named(one)[1] >= 0 for one in ids)
        self._spread = shared and question.sharing is Sharing.DISTRIBUTED
        self._must = frozenset(question.request.must_include)
        self._source = {one: gpus[one].uuid if shared else gpus[one].board for one in ids}
        self._order = {one: (gpus[one].index, _named(one)[1]) for one in ids}
        self._gpu = {self._source[one]: gpus[one] for one in ids}
        of = {source: [one for one in ids if self._source[one] == source] for source in self._gpu}
        self._free = {source: sum(one not in self._must for one in of[source]) for source in of}
        first = sorted(of, key=lambda source: min(self._order[one] for one in of[source]))
        self._place = {source: place for place, source in enumerate(first)}
        self._distance = {(a, b): _distance(self._gpu[a], self._gpu[b]) for a, b in itertools.permutations(of, 2)}

    def badness(self, chosen: Iterable[str]) -> tuple[object, ...]:
        """Say how bad a choice is, to be compared; the last three parts only settle which of equals it is."""
        chosen = tuple(chosen)
        used = {self._source[one] for one in chosen}
        left = dict(self._free)
        for one in chosen:
            left[self._source[one]] -= one not in self._must
        apart = sum(self._gpu[a].numa_node != self._gpu[b].numa_node for a, b in itertools.combinations(used, 2))
        near = self._total(used), apart
        stay = self._total(source for source, count in self._free.items() if count and source not in used)
        places = sorted(self._place[source] for source in used)
        fullest = [left[source] for source in sorted(used, key=lambda one: (self._free[one], self._place[one]))]
        devices = sorted((self._place[self._source[one]], self._order[one]) for one in chosen)
        if self._spread:
            return [-count for count in sorted(left.values())], -len(used), *near, stay, places, 0, devices
        return len(used), *near, sum(self._free[source] for source in used), stay, places, fullest, devices

    def _total(self, sources: Iterable[str]) -> int:
        return sum(self._distance[pair] for pair in itertools.combinations(sources, 2))


def _named(device_id: str) -> tuple[str, int]:
    """The UUID and the number that a replica's ID is made of; -1 for any other ID."""
    uuid, _, number = device_id.partition("::")
    return uuid, int(number or -1)


def _distance(a: GPU, b: GPU) -> int:
    if a.board == b.board:
        return 0
    named = [link for one, other in ((a, b), (b, a)) for link in one.links if link.peer == other.board]
    return min((link.distance for link in named), default=FARTHEST)


def linked(gpus: Iterable[GPU], ways: _Ways) -> dict[str, GPU]:
    """Link physical GPUs as ``ways`` says for the places of two, the lower first; give them by UUID."""
    gpus = tuple(gpus)
    links: dict[str, list[Link]] = {gpu.board: [] for gpu in gpus}
    for (i, a), (j, b) in itertools.combinations(enumerate(links), 2):
        link = ways(i, j)
        if link is not None:
            links[a].append(replace(link, peer=b))
    return {gpu.uuid: replace(gpu, links=tuple(links[gpu.board])) for gpu in gpus}


def _topology(draw: random.Random) -> _Ways:
    """Draw how GPUs are linked: as in machines that there are, or in any way at all."""
    size, part = draw.choice([2, 3, 4, 8]), draw.random()
    near, any_way = Link("", Way.XGMI), tuple(Way)
    machines: tuple[_Ways, ...] = (
        lambda _i, _j: None,
        lambda _i, _j: Link("", Way.NVLINK, 18),
        lambda i, j: near if i // size == j // size else None,
        lambda i, j: Link("", (Way.PIX, Way.PXB, Way.NODE, Way.SYS)[min((i ^ j).bit_length() // 2, 3)]),
        lambda i, j: Link("", Way.NVLINK, 1 + (i ^ j == 1)) if (i ^ j).bit_count() == 1 else Link("", Way.SYS),
        lambda _i, _j: near if draw.random() < part else None,
        lambda _i, _j: Link("", draw.choice(any_way), draw.randint(1, 6)),
    )
    return draw.choice(machines)


def asked(draw: random.Random, devices: int) -> Question:
    """Draw a node of so many devices (whole GPUs, partitions or replicas), and a question about some of them."""
    form = draw.choice(["whole", "whole", "partitions", "replicas"])
    per = 1 if form == "whole" else draw.randint(2, 8)
    count = -(-devices // per)
    nodes: list[int | None] = [place * 2 // count for place in range(count)]
    if draw.random() < 0.5:
        nodes = draw.choices([None, 0, 1, 2, 3], k=count)
    if form == "partitions":
        gpus = [GPU(f"p{i}", i, i, nodes[i // per], parent=f"g{i // per}") for i in range(devices)]
    else:
        gpus = [GPU(f"g{i}", i, i, node) for i, node in enumerate(nodes)]
    ids = [f"g{i // per}::{i % per}" for i in range(devices)] if form == "replicas" else [gpu.uuid for gpu in gpus]
    available = draw.sample(ids, draw.choice([devices, draw.randint(1, devices)]))
    size = draw.randint(1, len(available))
    must = draw.sample(available, draw.choice([0, 0, draw.randint(0, size)]))
    request = PreferredRequest(tuple(available), tuple(must), size)
    return Question(linked(gpus, _topology(draw)), request, draw.choice(list(Sharing)))


def whole(draw: random.Random, count: int, size: int) -> Question:
    """Draw links between so many whole GPUs, and ask for ``size`` of them."""
    gpus = linked((GPU(f"g{i}", i, i, i * 2 // count) for i in range(count)), _topology(draw))
    return Question(gpus, PreferredRequest(tuple(gpus), (), size))


def partitions(draw: random.Random, count: int, size: int) -> Question:
    """Draw so many partitions on 8 or 16 GPUs, any of which can be taken, and ask for ``size`` of the others."""
    per = count // draw.choice([8, 16])
    gpus = (GPU(f"p{i}", i, i, i * 2 // count, parent=f"g{i // per}") for i in range(count))
    there = linked(gpus, _topology(draw))
    ids = draw.sample(sorted(there), draw.randint(size, count))
    return Question(there, PreferredRequest(tuple(ids), tuple(ids[: draw.choice([0, 0, 2])]), size))


def replicas(draw: random.Random, count: int, size: int) -> Question:
    """Draw so many replicas of 8, 16 or 64 GPUs, any of which can be taken, and ask for ``size`` of the others."""
    per = count // (shared := draw.choice([8, 16, 64]))
    gpus = linked((GPU(f"GPU-{i:032}", i, i, i * 2 // shared) for i in range(shared)), _topology(draw))
    ids = [f"{uuid}::{number}" for uuid in gpus for number in range(per)]
    available = tuple(draw.sample(ids, draw.choice([count, draw.randint(size, count)])))
    return Question(gpus, PreferredRequest(available, (), size), draw.choice(list(Sharing)))


def _times(
    draw: random.Random, make: Callable[[random.Random, int, int], Question], count: int, size: int
) -> list[float]:
    """Ask many such questions; give the ascending times of the answers, in ms of the processor."""
    times: list[float] = []
    for question in (make(draw, count, size) for _ in range(_ASKED)):
        begun = time.process_time()
        question.answer()
        times.append((time.process_time() - begun) * 1e3)
    return sorted(times)


def main(topologies: int = 2000, seed: int = 1) -> int:
    """Compare and measure; give the exit status."""
    draw = random.Random(seed)
    questions = (asked(draw, draw.randint(1, 16)) for _ in range(topologies))
    wrong = [question for question in questions if tuple(sorted(question.answer())) != best(question)]
    print(
        f"{topologies - len(wrong)} of {topologies} answers on random topologies of up to 16 devices are the best there is"
    )
    for question in wrong[:1]:
        print(f"not the best: {question}\n  best: {best(question)}\n   got: {question.answer()}")
    late = False
    for make, count, size, bar in (
        (partitions, 64, 8, 5.0),
        (replicas, 8000, 8, 20.0),
        (whole, 8, 4, None),
        (whole, 16, 8, None),
        (whole, 64, 8, None),
    ):
        times = _times(draw, make, count, size)
        p99 = times[len(times) * 99 // 100]
        late |= bar is not None and p99 > bar
        verdict = "" if bar is None else f", bar {bar:.0f} ms: {'missed' if p99 > bar else 'kept'}"
        name = f"{count} {make.__name__} choose {size}"
        print(f"{name:26} p50 {times[len(times) // 2]:6.2f} ms, p99 {p99:6.2f} ms{verdict}")
    return 1 if wrong or late else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
