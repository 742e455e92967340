"""How each schedule begins: a kubelet and one gateway on a node where nothing goes wrong yet.

That is the same for all schedules of a kubelet's version but for chance, and costs a third of one: so some dozen openings of
each version are played once in a process, and a schedule goes on with a copy of one.
"""

from __future__ import annotations

import io
import pickle
import random
from enum import Enum
from functools import cache
from typing import Any, Final

import msgspec

from gateway.lab.kubelets.behaviour import Behaviour
from gateway.lab.simulation.kubelet import KUBELETS
from gateway.lab.simulation.node import Node

SECONDS: Final = 1.5
"""How long an opening lasts, in simulated seconds: no schedule has a step before."""
VARIANTS: Final = 64
"""How many openings of a version differ by chance."""


def played(kubelet: str, seed: int, trace: list[str] | None = None) -> Node:
    """Play the opening of a schedule, told in ``trace``; from there on, chance goes by the schedule's own seed."""
    node = _opened(kubelet, seed % VARIANTS, trace)
    chance = random.Random(seed).random
    node.clock.random = chance
    for disk in node.disks.values():
        disk.random = chance
    return node


def copied(kubelet: str, seed: int) -> Node:
    """Give what ``played`` gives, without playing it each time."""
    data, shared = _kept(kubelet, seed % VARIANTS)
    reading = pickle.Unpickler(io.BytesIO(data))  # noqa: S301 - this process wrote it
    # A method of C's in the place of one of Python's: it is called for each of what is shared.
    setattr(reading, "persistent_load", [random.Random(seed).random, *shared].__getitem__)  # noqa: B010 - typeshed has a method
    node = reading.load()
    assert isinstance(node, Node)
    return node


def _opened(kubelet: str, variant: int, trace: list[str] | None = None) -> Node:
    node = Node(variant)
    node.clock.trace = trace
    node.start_kubelet(KUBELETS[kubelet])
    node.start_gateway(looks=0.05)
    node.clock.run(SECONDS)
    return node


@cache
def _kept(kubelet: str, variant: int) -> tuple[bytes, list[Any]]:
    """An opening, to copy from, and the values that all copies share because nobody can change them."""
    node, kept = _opened(kubelet, variant), io.BytesIO()
    keeping = _Keeping(kept, node.clock.random)
    keeping.dump(node)
    return kept.getvalue(), keeping.shared


class _Keeping(pickle.Pickler):
    """Writes down what can change. What can't is numbered from 1, and 0 is the chance of the schedule that goes on."""

    def __init__(self, file: io.BytesIO, chance: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._chance = chance
        self._numbers: dict[int, int] = {}
        self.shared: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if value is self._chance:
            return 0
        if not isinstance(value, (Enum, Behaviour, type)) and not _is_frozen(value):
            return None
        if id(value) not in self._numbers:
            self.shared.append(value)
            self._numbers[id(value)] = len(self.shared)
        return self._numbers[id(value)]


def _is_frozen(value: Any) -> bool:
    """Whether nobody can change a value, nor what it holds."""
    if not isinstance(value, msgspec.Struct) or not value.__struct_config__.frozen:
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True
