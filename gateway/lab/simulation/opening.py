"""How each schedule begins: a kubelet and one gateway on a node where nothing goes wrong yet.

That is the same for all schedules of a kubelet's version but for chance, and costs a third of one: so some dozen openings of
each version are played once in a process, and a schedule goes on with a copy of one. A general copier would take longer than
half of what it saves: so a function is made for each opening that does nothing but build its copies.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Final

import msgspec

from gateway.lab.simulation.kubelet import KUBELETS
from gateway.lab.simulation.node import Node

SECONDS: Final = 1.5
"""How long an opening lasts, in simulated seconds: no schedule has a step before."""
VARIANTS: Final = 64
"""How many openings of a version differ by chance."""
_NUMBERS: Final = (int, float)
_played: Final[set[tuple[str, int]]] = set()
"""Which openings were wanted already: most of a few hundred schedules want one that no other does."""


def played(kubelet: str, seed: int, trace: list[str] | None = None) -> Node:
    """Play the opening of a schedule, told in ``trace``; from there on, chance goes by the schedule's own seed."""
    node = _opened(kubelet, seed % VARIANTS, trace)
    chance = random.Random(seed).random
    node.clock.random = chance
    for disk in node.disks.values():
        disk.random = chance
    return node


def copied(kubelet: str, seed: int) -> Node:
    """Give what ``played`` gives, without playing it each time: from the second time on, a copy."""
    if (kubelet, seed % VARIANTS) not in _played:
        _played.add((kubelet, seed % VARIANTS))
        return played(kubelet, seed)
    build, shared = _kept(kubelet, seed % VARIANTS)
    return build(random.Random(seed).random, *shared)


def _opened(kubelet: str, variant: int, trace: list[str] | None = None) -> Node:
    node = Node(variant)
    node.clock.trace = trace
    node.start_kubelet(KUBELETS[kubelet])
    node.start_gateway(looks=0.05)
    node.clock.run(SECONDS)
    return node


@cache
def _kept(kubelet: str, variant: int) -> tuple[Callable[..., Node], list[Any]]:
    """What builds copies of an opening, and the values that all copies share because nobody can change them."""
    plan = _Plan(_opened(kubelet, variant))
    return _compiled(plan.source()), plan.shared


@cache
def _compiled(source: str) -> Callable[..., Node]:
    """Openings of a version mostly differ in numbers alone: they have one function in common."""
    made: dict[str, Any] = {"new": object.__new__}
    exec(source, made)  # noqa: S102 - this process wrote it
    build: Callable[..., Node] = made["build"]
    return build


class _Plan:
    """Writes down how a node is built: what can change is made anew, and what can't is an argument."""

    def __init__(self, node: Node) -> None:
        self.shared: list[Any] = []
        self._arguments = ["chance"]
        self._lines: list[str] = []
        self._names = {id(node.clock.random): "chance"}
        self._empty: list[Any] = []
        """Objects that are there, but have no attributes yet: these may lead back to the object."""
        self._node = self._of(node)

    def source(self) -> str:
        """Write the function."""
        while self._empty:
            value = self._empty.pop()
            name = self._names[id(value)]
            self._lines += [f"{name}.{at} = {self._of(one)}" for at, one in _attributes(value)]
        return "\n ".join([f"def build({', '.join(self._arguments)}):", *self._lines, f"return {self._node}\n"])

    def _of(self, value: Any) -> str:
        """Write down how a value is made; return the name that it has then."""
        if id(value) in self._names and type(value) not in _NUMBERS:
            return self._names[id(value)]
        if _is_frozen(value):
            self.shared.append(value)
            self._arguments.append(f"a{len(self.shared)}")
            self._names[id(value)] = self._arguments[-1]
            return self._arguments[-1]
        if isinstance(value, MethodType):
            return f"{self._of(value.__self__)}.{value.__name__}"
        made = self._made(value)
        name = self._names[id(value)] = f"m{len(self._lines)}"
        self._lines.append(f"{name} = {made}")
        return name

    def _made(self, value: Any) -> str:
        kind = self._of(type(value))
        match value:
            case defaultdict():
                return f"{kind}({self._of(value.default_factory)}, {{{self._pairs(value)}}})"
            case dict():
                return f"{{{self._pairs(value)}}}"
            case list():
                return f"[{self._all(value)}]"
            case tuple():
                return f"({self._all(value)})"
            case set() | deque():
                return f"{kind}([{self._all(value)}])"
            case _ if _has_frozen_fields(value):
                return f"{kind}({self._all(_fields(value))})"
            case _:
                self._empty.append(value)
                return f"new({kind})"

    def _all(self, values: Iterable[Any]) -> str:
        return "".join(f"{self._of(one)}, " for one in values)

    def _pairs(self, values: dict[Any, Any]) -> str:
        return "".join(f"{self._of(key)}: {self._of(one)}, " for key, one in values.items())


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


def _has_frozen_fields(value: Any) -> bool:
    if isinstance(value, msgspec.Struct):
        return bool(value.__struct_config__.frozen)
    return is_dataclass(value) and bool(getattr(type(value), "__dataclass_params__").frozen)  # noqa: B009 - untyped


def _fields(value: Any) -> list[Any]:
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else value.__match_args__
    return [getattr(value, name) for name in names]


def _is_frozen(value: Any) -> bool:
    """Whether nobody can change a value, nor what it holds."""
    if value is None or isinstance(value, (str, bytes, int, float, Enum, type, msgspec.Raw)):
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_frozen, value))
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return _has_frozen_fields(value) and all(map(_is_frozen, _fields(value)))
