"""Rounds of edits under running pods: whatever a GPU is called, shared and split as, it is in one pod, and nobody is kept from it for nothing.

In each round the configuration or the hardware's MIG layout changes, pods end, and kubelet and gateway may die, forget what they wrote,
or be replaced. Then the node settles, and pods take all that it gives out.

    python -m tests.contract.edits --seed 7 --nodes 50                       # Nodes 7 to 56, on a moved clock.
    python -m tests.contract.edits --real --kubelet 1.36 --rounds 60         # The real kubelet code, and the machine's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.build import build
from tests.contract.conftest import apart
from tests.contract.node import GPU, BrokenError, Gateway, Node, OrderError, Refused, gpus
from tests.contract.real import RealNode
from tests.contract.test_holders import BIG, MIXED, OTHER, SMALL, configure, rows, shared

KUBELETS: Final = ("1.10", "1.20", "1.28", "1.36", "1.37")
ROUNDS: Final = 12
SETTLES_S: Final = 90.0
"""Seconds within which all that is free is given out again."""
_NOTED_S: Final = 4.0
"""Seconds after which a gateway has seen who has what it gave: only then can it say whom a kubelet forgot."""
_KEEPS_LAST: Final = range(24, 32)
"""Kubelets, 1.N, whose records have the pod that they admitted last until they admit another one, also if it has ended
(pendingAdmissionPod in pkg/kubelet/cm/devicemanager/manager.go: read in 1.24 and 1.25, run on 1.28, gone in 1.32)."""
_RESOURCES: Final = (GPU, OTHER, SMALL, BIG)
_CONFIGURATIONS: Final[Sequence[Mapping[str, Any]]] = (
    {},
    shared(2),
    shared(4),
    shared(2, rename=OTHER),
    MIXED,
    MIXED | shared(2, SMALL),
)
_LAYOUTS: Final[Sequence[Sequence[str]]] = ((), ("1g.10gb", "1g.10gb"), ("2g.20gb",))
_BOARDS: Final = ("GPU-0", "GPU-1", "GPU-2")
_REAL_S: Final = 100


class Has(NamedTuple):
    """What a pod has: under which resource, and which device."""

    resource: str
    device: str

    @property
    def hardware(self) -> str:
        """The device without the number of its replica."""
        return self.device.partition("::")[0]


class Rounds:
    """A node, and what must be so on it."""

    def __init__(self, node: Node, chance: Random, version: str) -> None:
        self.node, self.chance, self.version = node, chance, version
        node.shared = _RESOURCES
        self.configuration: Mapping[str, Any] = {}
        self.mig: dict[str, Sequence[str]] = {}
        self.board = {one: one for one in _BOARDS}
        """The board of each device, without the number of its replica."""
        self.has: dict[str, Has] = {}
        """What each running pod has."""
        self.unnoted: set[str] = set()
        """Boards of pods that ended since a pod was admitted last."""
        self.last = ""
        """The board of the pod that was admitted last."""
        self.lists = behaviour(version).minor >= 15 and chance.random() < 0.8
        """Whether the kubelet's pod-resources API is there, by which it says who has what now."""
        more = () if self.lists else ("--pod-resources-socket", str(node.folder / "none.sock"))
        self.options = (*configure(node, MIXED), *more)
        self.pods = 0
        self.trail: list[str] = []

    async def play(self, rounds: int) -> None:
        """Play them.

        Raises:
            BrokenError: a promise is broken.
        """
        self._draw()
        await self.node.start_kubelet(self.version)
        one = self.node.gateway(*self.options)
        for board in _BOARDS[:2]:
            for layout in _LAYOUTS[1:]:
                await self._learn(one, board, layout)
        self.mig = {}
        self._draw()
        configure(self.node, self.configuration)
        for name in ("proxy-x7k2p", "agent-9fw4c"):  # By these a kubelet shows that it has heard from the API server.
            await self.node.admit(name, count=0)
        for number in range(rounds):
            await self._settled()
            await self._taken()
            self.trail.append(f"round {number}")
            await self._round()
        await self._settled()

    async def _learn(self, one: Gateway, board: str, layout: Sequence[str]) -> None:
        """See what the instances of a board are called."""
        self.mig = {board: layout}
        self._draw()

        async def new() -> list[str]:
            try:
                there = await rows(one)
            except (OSError, KeyError, OrderError):  # It has only just started.
                return []
            named = [row["id"] for row in there if row["resource"] in {SMALL, BIG} and row["health"] == "Healthy"]
            ids = [name for name in named if name not in self.board]
            return ids if len(ids) == len(layout) else []

        ids = await self.node.eventually(new, f"the instances of {board}")
        self.board |= dict.fromkeys(ids, board)

    # -- what happens -------------------------------------------------------------------------------------------------

    async def _round(self) -> None:
        chance, node = self.chance, self.node
        way = chance.choice(("adopts it", "killed", "replaced", "stands still"))
        forgets = chance.random() < 0.2
        if forgets:
            await asyncio.sleep(_NOTED_S)
        still = [one for one in node.gateways if one.alive] if way == "stands still" else []
        for one in still:
            one.process.stop()
        for pod in sorted(self.has):
            if chance.random() < 0.35:
                self._end(pod)
        self._edit()
        await node.pass_time(0)
        dies = forgets or chance.random() < 0.25
        if dies:
            self.trail.append(f"the kubelet dies{', and forgets' if forgets else ''}")
            node.kill_kubelet()
            if forgets:
                node.forget_checkpoint()
                node.forgotten |= self.has.keys()
        await self._gateway(way)
        if dies:
            await asyncio.sleep(chance.choice((0, 0.1, 2)))
            await node.start_kubelet(self.version)
        if still:
            await asyncio.sleep(chance.choice((0.01, 1, 3)))
        for one in still:
            one.process.go_on()
        if chance.random() < 0.4:
            await asyncio.sleep(chance.choice((0.01, 0.3, 2)))
            for pod in sorted(self.has):
                if chance.random() < 0.3:
                    self._end(pod)

    def _edit(self) -> None:
        self.configuration = self.chance.choice(_CONFIGURATIONS)
        if self.chance.random() < 0.5:
            self.mig[self.chance.choice(_BOARDS[:2])] = self.chance.choice(_LAYOUTS)
        self.trail.append(f"edited: {self.configuration}, {self.mig}")

    async def _gateway(self, way: str) -> None:
        """Have the edit adopted: by the gateway that runs, by the next one, or by one that comes before the first has gone."""
        node, before = self.node, [one for one in self.node.gateways if one.alive]
        # Only the state file says whom the kubelet forgot, and of which board an instance was that is no more.
        known = not node.forgotten and all(has.hardware in _BOARDS for has in self.has.values())
        loses = way == "killed" and known and self.chance.random() < 0.2
        self.trail.append(f"the gateway: {way}{', and the state is lost' if loses else ''}")
        if way == "killed":
            for one in before:
                one.kill()
        if loses:
            for file in node.state.iterdir():
                file.unlink(missing_ok=True)
        self._draw()
        configure(node, self.configuration)
        if way in {"killed", "replaced"}:
            node.gateway(*self.options)
        if way == "replaced":
            await asyncio.sleep(self.chance.choice((0.01, 1, 3)))
            for one in before:
                await one.terminate()

    def _draw(self) -> None:
        self.node.simulate(gpus(*range(len(_BOARDS)), mig={one: [*parts] for one, parts in self.mig.items() if parts}))

    def _end(self, pod: str) -> None:
        self.node.remove(pod)
        self.node.forgotten.discard(pod)
        self.trail.append(f"{pod} ends, which has {self.has[pod]}")
        self.unnoted.add(self._board(self.has.pop(pod)))

    def _board(self, has: Has) -> str:
        return self.board[has.hardware]

    # -- what must be so ----------------------------------------------------------------------------------------------

    async def _settled(self) -> None:
        """Wait until nobody is kept from hardware that no pod has."""
        ends = asyncio.get_running_loop().time() + SETTLES_S
        while wrong := await self._wrong():
            if asyncio.get_running_loop().time() > ends:
                raise BrokenError(f"{wrong}\n{self.tale()}")
            await asyncio.sleep(0.5)
        self.node.check()

    async def _wrong(self) -> str:
        (*_, one) = (each for each in self.node.gateways if each.alive)
        try:
            there = await rows(one)
        except (OSError, OrderError, ValueError, KeyError) as error:
            return f"the gateway doesn't answer: {error!r}"
        held = {self._board(has) for has in self.has.values()}
        listed = {self.board[row["id"].partition("::")[0]] for row in there}
        if missing := {*_BOARDS} - listed - held - self._unnoted():
            return f"{sorted(missing)} are on no list, and no pod has them"
        for row in there:
            board = self.board[row["id"].partition("::")[0]]
            if row["health"] != "Healthy" and board not in held | self._unnoted():
                await self._forget(one, row)
                return f"{row['id']} ({row['resource']}) is {row['state']}, and no pod has it: {row['reason']}"
        given_out = {name: self.node.allocatable(name) for name in _RESOURCES}
        healthy = {
            name: sum(row["health"] == "Healthy" for row in there if row["resource"] == name) for name in given_out
        }
        return "" if given_out == healthy else f"the kubelet gives out {given_out}, healthy are {healthy}"

    async def _forget(self, one: Gateway, row: Mapping[str, Any]) -> None:
        """Say that a pod has ended whose end no kubelet shows: it forgot the pod, and lists none without devices."""
        if "the kubelet forgot who" in row["reason"] or "forgotten" in row["drift"]:
            board = self.board[row["id"].partition("::")[0]]
            for device in (device for device, its in self.board.items() if its == board):
                for name in (device, *(f"{device}::{number}" for number in range(4))):
                    with contextlib.suppress(OrderError, OSError):
                        await one.order("forget", id=name)

    def _unnoted(self) -> set[str]:
        """Return the boards of which the kubelet's records go on naming ended pods until it admits another one."""
        if not self.lists:
            return self.unnoted
        return self.unnoted & {self.last} if behaviour(self.version).minor in _KEEPS_LAST else set()

    async def _taken(self) -> None:
        """Have pods take some of what is given out, one after another."""
        for resource in self.chance.sample(_RESOURCES, len(_RESOURCES)):
            free = self.node.allocatable(resource) - sum(has.resource == resource for has in self.has.values())
            for _ in range(self.chance.randint(0, max(free, 0))):
                self.pods += 1
                await self._admitted(f"pod-{self.pods}", resource)

    async def _admitted(self, pod: str, resource: str) -> None:
        try:
            given = await self.node.admit(pod, resource)
        except Refused as error:
            self.trail.append(f"{pod} is refused: {error!s:.300}")
            self.node.remove(pod)
            return
        (device,) = given.devices[resource]
        has = self.has[pod] = Has(resource, device)
        self.unnoted.clear()
        self.last = self._board(has)
        self.trail.append(f"{pod} has {has}")
        for other, its in self.has.items():
            if other == pod or self._board(its) != self._board(has):
                continue
            beside = its.resource == resource and its.hardware == has.hardware and its.device != has.device
            apart_ = its.hardware != has.hardware and not {its.hardware, has.hardware} & {*_BOARDS}
            # A kubelet that forgot gives the same device again if no other is left: that fails no pod, and is told.
            again = other in self.node.forgotten and its == has
            if not (beside or apart_ or again):
                raise BrokenError(f"{other} has {its}, {pod} was given {has}\n{self.tale()}")

    def tale(self) -> str:
        """Return what was done, and what gateways and kubelet logged last."""
        return "\n".join([*self.trail[-40:], self.node.tale()])


# Running them.


def moved(seed: int, rounds: int, version: str = "") -> str:
    """Play rounds on a moved clock, in a process of its own; return what broke, empty if nothing did."""

    async def history(node: Node) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        chance = Random(seed)  # noqa: S311 - no secret
        await Rounds(node, chance, version or chance.choice(KUBELETS)).play(rounds)

    return apart(history, seed, _REAL_S)


async def real(seed: int, rounds: int, version: str) -> str:
    """Play rounds with the real kubelet code of a version, which is built if it isn't; return as ``moved`` does."""
    binaries = build([version], progress=lambda line: print(line, file=sys.stderr))  # noqa: T201 - it may take a minute
    with tempfile.TemporaryDirectory(prefix="dpg-", ignore_cleanup_errors=True) as folder:
        try:
            async with RealNode(Path(folder), version, binaries.get) as node:
                await Rounds(node, Random(seed), version).play(rounds)  # noqa: S311 - no secret
        except BrokenError as error:
            return str(error)
    return ""


def main(words: Sequence[str]) -> int:
    """Play rounds; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="tests.contract.edits", description="rounds of edits under running pods")
    parser.add_argument("--seed", type=int, default=0, help="the first node's seed")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds on each")
    parser.add_argument("--kubelet", default="", help="its version (default: by the seed)")
    parser.add_argument("--real", action="store_true", help="the real kubelet code, on the machine's clock")
    chosen = parser.parse_args(words)
    failed, began = 0, time.monotonic()
    for seed in range(chosen.seed, chosen.seed + chosen.nodes):
        version = chosen.kubelet or Random(seed).choice(KUBELETS)  # noqa: S311 - no secret
        broke = asyncio.run(real(seed, chosen.rounds, version)) if chosen.real else moved(seed, chosen.rounds, version)
        failed += bool(broke)
        took = f"{time.monotonic() - began:.0f} s"
        sys.stdout.write(f"seed {seed}, kubelet {version}: {f'BROKEN: {broke}' if broke else 'kept'} ({took})\n")
        sys.stdout.flush()
    sys.stdout.write(f"{failed} of {chosen.nodes} nodes broke a promise\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
