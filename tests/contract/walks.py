"""Random walks: whatever happens to a node, and in whichever order, pods keep what they were given and those that ask get some.

A walk is a list of steps that is drawn from a seed. After each step no hardware is in two pods, and nobody lost any. When all is
healed, each wait ends, the kubelet gives out what the hardware has, pods that waited run, and every gateway says what the kubelet says.

    python -m tests.contract.walks --seed 7 --walks 500     # Walks 7 to 506; one that fails is made shorter, and printed.
    python -m tests.contract.walks --seed 7 --steps "kubelet:3 gateway:1"     # One walk of these steps.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, NamedTuple

from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.checkpoint import FILE_NAME, CorruptError, decode
from tests.contract.conftest import apart
from tests.contract.node import GPU, BrokenError, Gateway, Node, OrderError, Refused

LENGTH: Final = 25
"""Steps of a walk, unless it is told another number."""
VERSIONS: Final = ("1.8", "1.9", "1.10", "1.11", "1.12", "1.16", "1.20", "1.24", "1.25", "1.28", "1.34", "1.36", "1.37")
HEALED_S: Final = 120.0
"""Simulated seconds within which everything is right after all was healed: a Register may be pending for 15 s, a kubelet dials for
10 s, and the waits between tries have grown to 60 s."""
_MOST_GATEWAYS: Final = 3
_REAL_S: Final = 100
"""A walk that takes longer hangs."""
_VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"


class Step(NamedTuple):
    """What is done, and a number that all chances in it are drawn from."""

    do: str
    pick: int

    def __str__(self) -> str:
        return f"{self.do}:{self.pick}"


def _chance(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - no secret


def steps_of(seed: int, length: int = LENGTH) -> list[Step]:
    """Draw a walk."""
    chance = _chance(seed)
    names, weights = zip(*_STEPS.items(), strict=True)
    drawn = chance.choices(names, [weight for _, weight in weights], k=length)
    return [Step(do, chance.randrange(10**6)) for do in ("kubelet", "gateway", "settled", *drawn)]


class Walk:
    """A node, and what must be so on it."""

    def __init__(self, node: Node, chance: Random) -> None:
        self.node = node
        self.ids = [f"GPU-{number}{chance.randrange(16**6):06x}" for number in range(chance.choice((2, 3, 4, 6)))]
        self.gone: set[str] = set()
        self.ill: set[str] = set()
        self.cordoned: set[str] = set()
        self.unsure: set[str] = set()
        """Devices about which an order failed, or may have: an operator gives it again."""
        self.holds: dict[str, frozenset[str]] = {}
        """What living pods were given."""
        self.given: set[str] = set()
        """What any pod ever had: a kubelet takes note of a pod's end when the next one comes."""
        self.doubtful: set[str] = set()
        """What a pod had that the kubelet forgot, and that has ended: only the kubelet could say so."""
        self.over: set[str] = set()
        """What pods had that ended since ``known``: a gateway may not have heard of that."""
        self.wanting: dict[str, int] = {}
        """Pods that were refused, and how many devices they want."""
        self.asking: dict[str, asyncio.Task[None]] = {}
        self.ending: list[Gateway] = []
        """Those that were told to end."""
        self.killed: list[Gateway] = []
        self.soon: list[asyncio.Task[None]] = []
        self.version = chance.choice(VERSIONS)
        self.runs = False
        self.unfreed = 0
        """How many pods ended, or were forgotten, of which the checkpoint says nothing before the next pod comes."""
        self.known: set[str] = set()
        """The pods of which a gateway has said that they hold what they hold: the next one knows, too."""
        self.pods = 0
        self.trail: list[str] = []
        self._draw()

    async def play(self, steps: Sequence[Step]) -> None:
        """Take the steps, then heal everything."""
        for step in steps:
            self.trail.append(f"{self._now():.6f} {step}")
            await _STEPS[step.do][0](self, _chance(step.pick))
            self.unharmed()
        self.trail.append(f"{self._now():.6f} the end")
        self.gone, self.ill = set(), set()
        self._draw()
        await self.settled()
        for one in tuple(self.cordoned):
            self.cordoned.discard(one)
            self.unsure.add(one)
        await self.settled()

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _kubelet(self, chance: Random) -> None:
        """Start a kubelet, which may be another version, or one without a memory; one that runs is killed."""
        if chance.random() < 0.4:
            self.version = chance.choice(VERSIONS)
        self.node.kill_kubelet()
        self.runs = False
        if chance.random() < 0.15:
            self.node.forget_checkpoint()
        await self._start_kubelet(ready=chance.random() < 0.8)

    async def _start_kubelet(self, *, ready: bool = True) -> None:
        await self._all_done()
        written = self._written()
        await self.node.start_kubelet(self.version, ready=ready)
        self.runs = True
        recorded = self.node.pods()
        forgotten = {pod for pod, ids in self.holds.items() if _ids(recorded.get(pod, {})) != ids}
        self._must(not (lost := forgotten & written), f"the kubelet forgot {lost}: the walk's own mistake")
        self.doubtful |= self.over if forgotten else set()
        for pod in forgotten - self.node.forgotten:
            self.doubtful |= self.holds[pod] if pod not in self.known else set()
        self.unfreed += len(forgotten)
        self.node.forgotten = forgotten
        self.trail.append(f"  kubelet {self.version}, ready={ready}, forgotten: {sorted(forgotten)}")

    def _written(self) -> set[str]:
        """Return the pods that the next kubelet finds in the checkpoint: it can't read each other one's."""
        try:
            found = decode((self.node.sockets / FILE_NAME).read_bytes(), behaviour(self.version))
        except (OSError, CorruptError):
            return set()
        return {pod for pod, _, _ in found.held}

    async def _kubelet_ready(self, _chance: Random) -> None:
        if self.runs:
            self.node.kubelet.manager.ready()

    async def _kubelet_dies(self, chance: Random) -> None:
        def die() -> None:
            self.node.kill_kubelet()
            self.runs = False

        await self._soon(chance, die)

    async def _fault(self, chance: Random) -> None:
        """Make the kubelet do one thing wrong, until something else goes wrong or all is healed."""
        self.node.fault(
            **chance.choice(
                (
                    {"register_hangs": True},
                    {"register_lost": True},
                    {"register_late_ms": chance.choice((1, 20, 500, 12_000))},
                    {
                        "register_errors": chance.randint(1, 4),
                        "register_code": chance.choice(("UNAVAILABLE", "UNKNOWN")),
                    },
                    {"never_calls_back": True},
                    {"reads_no_lists": True},
                    {"report_late_ms": chance.choice((1, 4, 50))},
                )
            )
        )

    async def _healed(self, _chance: Random) -> None:
        self.node.fault()

    async def _cut(self, chance: Random) -> None:
        """End the kubelet's stream of lists from its side."""

        def cut() -> None:
            if self.runs:
                with suppress(*Refused):
                    self.node.kubelet.manager.cut(GPU)

        await self._soon(chance, cut)

    async def _gateway(self, _chance: Random) -> None:
        if len(self._alive()) < _MOST_GATEWAYS:
            self.node.gateway()

    async def _gateway_killed(self, chance: Random) -> None:
        if alive := self._alive():
            one = chance.choice(alive)
            self.killed.append(one)
            await self._soon(chance, one.kill)

    async def _gateway_ends(self, chance: Random) -> None:
        if alive := self._alive():
            one = chance.choice(alive)
            self.ending.append(one)
            one.process.terminate()

    async def _gateway_stops(self, chance: Random) -> None:
        if alive := self._alive():
            await self._soon(chance, chance.choice(alive).process.stop)

    async def _gateway_goes_on(self, _chance: Random) -> None:
        self._go_on()

    async def _pod(self, chance: Random) -> None:
        """Start one pod, or a few at once; wait for a while."""
        for _ in range(chance.choice((1, 1, 1, 3))):
            self.pods += 1
            self._ask(f"pod-{self.pods}", chance.choice((1, 1, 2)))
        await self._while(chance)

    async def _pod_ends(self, chance: Random) -> None:
        if self.holds:
            pod = chance.choice(sorted(self.holds))
            await self._soon(chance, lambda: self._end(pod))

    async def _container_restarts(self, chance: Random) -> None:
        pods = sorted(self.holds.keys() - self.node.forgotten)
        # 1.8 starts containers without any, until a plugin is there.
        if (
            pods
            and self.runs
            and (self.node.allocatable() or not self.node.kubelet.manager.behaviour.allocates_at_start)
        ):
            self._restart(chance.choice(pods))
            await self._while(chance)

    async def _wrong(self, chance: Random) -> None:
        """Ask the plugin for what it may not give."""
        await self._all_done()
        if (
            not self.runs
            or not self.node.allocatable()
            or any(one.alive and one.process.stopped for one in self.node.gateways)
        ):
            return
        kinds = [("GPU-nobody",), (self.ids[0], self.ids[0])]
        kinds += [(one,) for one in sorted((self.gone | self.cordoned) - self.given - self.unsure)]
        ids = chance.choice(kinds)
        with suppress(*Refused):
            async with asyncio.timeout(60), self.node.plugin() as plugin:
                given = await plugin.allocate(*ids)
                raise BrokenError(f"a wrong request for {ids} was answered with {given}")

    async def _ill(self, chance: Random) -> None:
        self.ill ^= {chance.choice(self.ids)}
        self._draw()
        await self._while(chance)

    async def _lost(self, chance: Random) -> None:
        one = chance.choice(self.ids)
        if one in self.gone or len(self.gone) < len(self.ids) - 1:
            self.gone ^= {one}
            self._draw()
            await self._while(chance)

    async def _order(self, chance: Random) -> None:
        """Have every gateway cordon a device, uncordon or forget it."""
        await self._all_done()
        one = chance.choice(self.ids)
        op = "uncordon" if one in self.cordoned else chance.choice(("cordon", "cordon", "forget"))
        if op != "forget":
            self.cordoned ^= {one}
            await self._told(op, one)
            return
        self.doubtful.add(one)  # An operator says that nobody uses it.
        for gateway in self._listening():
            with suppress(OrderError, ConnectionError, ValueError):
                await gateway.order("forget", id=one)

    async def _time(self, chance: Random) -> None:
        await asyncio.sleep(math.exp(chance.uniform(math.log(1e-4), math.log(600))))

    # -- what steps are made of ---------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _alive(self) -> list[Gateway]:
        """Return the gateways that run and are not about to end."""
        return [one for one in self.node.gateways if one.alive and one not in self.ending and one not in self.killed]

    def _listening(self) -> list[Gateway]:
        return [one for one in self._alive() if not one.process.stopped]

    async def _soon(self, chance: Random, do: Callable[[], object]) -> None:
        """Do something at once, or a moment later, in the middle of the steps that follow."""
        if chance.random() < 0.3:
            do()
            return
        delay = math.exp(chance.uniform(math.log(1e-6), math.log(0.5)))

        async def later() -> None:
            await asyncio.sleep(delay)
            self.trail.append(f"  {self._now():.6f} now")
            do()

        self.soon.append(asyncio.get_running_loop().create_task(later()))

    async def _all_done(self) -> None:
        """Wait until what is to happen soon has happened."""
        soon, self.soon = self.soon, []
        await asyncio.gather(*soon)

    async def _while(self, chance: Random) -> None:
        """Let no time pass, or a moment, or some seconds."""
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01, 0.05, 3)) * chance.random())

    def _draw(self) -> None:
        there = [{"uuid": one} for one in self.ids if one not in self.gone]
        self.node.simulate({GPU: {"gpus": there, "unhealthy": dict.fromkeys(sorted(self.ill - self.gone), "smoke")}})

    def _ask(self, pod: str, count: int) -> None:
        taken = sum(map(len, self.holds.values())) + len(self.asking)
        if not self.runs or self.node.allocatable() < taken + count:  # The scheduler knows a node's numbers.
            self.wanting[pod] = count
            return
        self.asking[pod] = asyncio.get_running_loop().create_task(self._admit(pod, count))

    async def _admit(self, pod: str, count: int) -> None:
        unfreed = self.unfreed
        try:
            given = await self.node.admit(pod, count=count)
        except (*Refused, ConnectionError) as error:
            self.trail.append(f"  {self._now():.6f} {pod} refused: {str(error)[:150]}")
            self.wanting[pod] = count
            self.node.remove(pod)
            if not self.runs:  # The kubelet ended, perhaps after it was given one of these.
                self.doubtful |= self._well() - frozenset().union(*self.holds.values())
            return
        self.wanting.pop(pod, None)
        ids = frozenset(given.devices.get(GPU, ()))
        self.trail.append(f"  {self._now():.6f} {pod} has {sorted(ids)}")
        self._must(len(ids) == count, f"{pod} asked for {count} and got {sorted(ids)}")
        told = frozenset(filter(None, given.answer.envs.get(_VISIBLE, "").split(",")))
        self._must(told == ids, f"{pod} has {sorted(ids)} and its container is told {sorted(told)}")
        self.holds[pod] = ids
        self.given |= ids
        self.unfreed -= unfreed

    def _restart(self, pod: str) -> None:
        async def restarted() -> None:
            try:
                given = await self.node.restart_container(pod)
            except (*Refused, ConnectionError) as error:
                self.trail.append(f"  {self._now():.6f} {pod} not started again: {str(error)[:150]}")
                return
            ids = frozenset(given.devices.get(GPU, ()))
            told = frozenset(filter(None, given.answer.envs.get(_VISIBLE, "").split(",")))
            if pod in self.holds and pod not in self.node.forgotten:
                same = ids == told == self.holds[pod]
                self._must(same, f"{pod} had {sorted(self.holds[pod])}, and has {sorted(ids)}, told {sorted(told)}")

        if pod not in self.asking:
            self.asking[pod] = asyncio.get_running_loop().create_task(restarted())

    def _end(self, pod: str) -> None:
        if pod in self.holds and pod not in self.asking:
            ids = self.holds.pop(pod)
            self.node.remove(pod)
            self.doubtful |= ids if pod in self.node.forgotten else set()
            self.over |= ids
            self.unfreed += 1
            self.node.forgotten.discard(pod)

    def _go_on(self) -> None:
        for one in self.node.gateways:
            if one.alive and one.process.stopped:
                one.process.go_on()

    async def _told(self, op: str, one: str) -> None:
        """Give an order to every gateway, as the command line does."""
        self.unsure.add(one)
        try:
            told = [
                await gateway.order(op, id=one, **({"reason": "walk"} if op == "cordon" else {}))
                for gateway in self._listening()
            ]
        except (OrderError, ConnectionError, ValueError) as error:
            if one in self.gone and "no device here" in str(error):  # No gateway ever saw it.
                self.cordoned.discard(one)
                self.unsure.discard(one)
            self.trail.append(f"  {self._now():.6f} {op} {one}: {error!r:.150}")
            return
        if told and len(told) == len(self._alive()):
            self.unsure.discard(one)

    # -- what must be so ----------------------------------------------------------------------------------------------

    def _must(self, is_so: bool, words: str) -> None:
        if not is_so:
            raise BrokenError(words)

    def unharmed(self) -> None:
        """See what holds at every moment.

        Raises:
            BrokenError: it doesn't.
        """
        self.node.check()
        for pod, task in tuple(self.asking.items()):
            if task.done():
                del self.asking[pod]
                task.result()
        for one in tuple(self.node.gateways):
            if not one.alive and one not in self.killed:
                status = one.process.ended.result()
                if one.process.hung or one.said(
                    "ending: this gateway took over, and isn't served"
                ):  # Its container is started again.
                    self.killed.append(one)
                    self.node.gateway()
                    continue
                self._must(
                    one in self.ending and status in {0, -signal.SIGTERM},
                    f"a gateway ended by itself, with status {status}",
                )
            wrong = [line for line in one.process.log if line["level"] == "text" and "Traceback" in str(line["event"])]
            self._must(not wrong, f"a gateway wrote {one.process.log[-30:] if wrong else ''}")
        if not self.runs:
            return
        defects = [note for note in self.node.kubelet.notes if "DEFECT" in note]
        self._must(not defects, f"the kubelet: {defects}")
        recorded = {pod: _ids(containers) for pod, containers in self.node.pods().items()}
        for pod, ids in self.holds.items():
            if pod not in self.node.forgotten and pod not in self.asking:
                found = recorded.get(pod, frozenset())
                self._must(found == ids, f"{pod} was given {sorted(ids)}, the kubelet's records have {sorted(found)}")

    def _well(self) -> set[str]:
        return set(self.ids) - self.gone - self.ill - self.cordoned

    def tale(self) -> str:
        """Return the walk so far, and what gateways and kubelet logged."""
        lines = [*self.trail]
        for number, one in enumerate(self.node.gateways):
            lines.append(f"gateway {number}: {'alive' if one.alive else 'dead'}")
            for line in one.process.log[1:][-25:]:
                rest = {
                    name: value
                    for name, value in line.items()
                    if name not in {"event", "level", "timestamp", "resource"}
                }
                lines.append(f"  {line.get('timestamp', '')[14:-1]} {line['event']} {rest or ''}"[:1500])
        return "\n".join([*lines, *(self.node.kubelet.notes[-20:] if self.runs else ())])

    async def settled(self) -> None:
        """Heal what is no matter of hardware, and see that the node is right in time."""
        node = self.node
        await self._all_done()
        node.fault()
        if not self.runs:
            await self._start_kubelet()
        node.kubelet.manager.ready()
        self._go_on()
        if not self._alive():
            node.gateway()
        ends = self._now() + HEALED_S
        while self.unsure:  # An operator gives an order again that failed.
            self._must(self._now() < ends, f"an order fails: {self.unsure}")
            for one in sorted(self.unsure):
                await self._told("cordon" if one in self.cordoned else "uncordon", one)
            await asyncio.sleep(1 if self.unsure else 0)
        await node.until(lambda: not any(one.alive for one in self.ending), "the end of a gateway that was told to end")
        await node.allocatable_is(len(self._well()), seconds=HEALED_S)
        if self.asking:
            _, waits = await asyncio.wait(self.asking.values(), timeout=HEALED_S)
            self._must(not waits, f"{sorted(self.asking)} wait for ever")
        self.unharmed()
        await self._all_run()
        self.unharmed()
        ends = self._now() + HEALED_S
        while differs := await self._differs():
            self._must(self._now() < ends, f"a gateway doesn't say what the kubelet says: {differs}")
            await asyncio.sleep(0.3)
        if self._well() and not self.unfreed:  # 1.8 and 1.9 know no unhealthy device.
            await node.truthful(HEALED_S)
            await asyncio.sleep(1)
            self.known, self.over = set(self.holds), set()
        await node.allocatable_is(len(self._well()), seconds=1)

    async def _all_run(self) -> None:
        """See that each pod runs for which there is a free device."""
        for refused, count in tuple(self.wanting.items()):
            pod, free = refused, self._well() - frozenset().union(*self.holds.values())
            if count > len(free):
                continue
            ends = self._now() + HEALED_S
            while pod in self.wanting:
                self._must(self._now() < ends, f"{pod} isn't admitted, though {sorted(free)} are free")
                del self.wanting[pod]
                self.pods += 1
                pod = f"pod-{self.pods}"  # A controller makes another one.
                await self._admit(pod, count)
                await asyncio.sleep(0.5 if pod in self.wanting else 0)
            if self.node.kubelet.manager.behaviour.preferred:
                free -= self.doubtful
                doubled = self.holds[pod] - free - self.doubtful if len(free) >= count else ()
                self._must(
                    not doubled,
                    f"{pod} was given {sorted(doubled)} of a pod that the kubelet forgot, {sorted(free)} were free",
                )

    async def _differs(self) -> str:
        """Return what a gateway says that isn't so; empty where every gateway is ready, one serves, and all say what is so."""
        serving = 0
        for number, one in enumerate(self.node.gateways):
            if one not in self._alive():
                continue
            status, words = await one.get("probes", "/readyz")
            # A release that sees no usable GPU where the one before it did is taken for a broken one.
            if status != 200 and self._well():
                return f"gateway {number} isn't ready: {words}"
            resource = next(iter((await one.status())["resources"]), None)
            if resource is None:
                return f"gateway {number} has no list yet"
            serving += resource["phase"] == "serving"
            healthy = {row["id"] for row in resource["devices"] if row["health"] == "Healthy"}
            if healthy ^ self._well():
                return f"gateway {number}: {sorted(healthy)} are healthy, not {sorted(self._well())}"
        return "" if serving == 1 else f"{serving} serve"


def _ids(containers: Any) -> frozenset[str]:
    return frozenset(one for held in containers.values() for one in held.get(GPU, ()))


_STEPS: Final[dict[str, tuple[Callable[[Walk, Random], Awaitable[None]], float]]] = {
    "kubelet": (Walk._kubelet, 3),
    "kubelet-ready": (Walk._kubelet_ready, 0.5),
    "kubelet-dies": (Walk._kubelet_dies, 1),
    "fault": (Walk._fault, 2),
    "healed": (Walk._healed, 1),
    "cut": (Walk._cut, 1),
    "gateway": (Walk._gateway, 4),
    "gateway-killed": (Walk._gateway_killed, 3),
    "gateway-ends": (Walk._gateway_ends, 1.5),
    "gateway-stops": (Walk._gateway_stops, 1.5),
    "gateway-goes-on": (Walk._gateway_goes_on, 1),
    "pod": (Walk._pod, 6),
    "pod-ends": (Walk._pod_ends, 4),
    "container-restarts": (Walk._container_restarts, 2),
    "wrong": (Walk._wrong, 2),
    "ill": (Walk._ill, 2),
    "lost": (Walk._lost, 2),
    "order": (Walk._order, 2),
    "time": (Walk._time, 4),
    "settled": (lambda walk, _: walk.settled(), 2),
}
"""What is done, and how often."""


# Running them.


def walk(seed: int, steps: Sequence[Step]) -> str:
    """Take a walk in a process of its own; return what broke, empty where nothing did."""

    async def history(node: Node) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # What the dead leave behind is no news.
        os.urandom = _chance(seed).randbytes
        setattr(random, "_urandom", os.urandom)  # noqa: B010 - a module's name
        taken = Walk(node, _chance(seed))
        try:
            await taken.play(steps)
        except BaseException as error:
            error.add_note(taken.tale())
            raise

    return apart(history, seed, _REAL_S)


def shrunk(seed: int, steps: Sequence[Step], say: Callable[[str], None]) -> tuple[list[Step], str]:
    """Leave steps out as long as the rest still fails; return the rest, and what it breaks."""
    kept, broke = list(steps), walk(seed, steps)
    size = max(1, len(kept) // 2)
    while broke:
        at, before = 0, len(kept)
        while at < len(kept):
            rest = [*kept[:at], *kept[at + size :]]
            if found := walk(seed, rest):
                kept, broke = rest, found
                say(f"  {len(kept)} steps still fail")
            else:
                at += size
        if size == 1 and len(kept) == before:
            break
        size = max(1, size // 2)
    return kept, broke


def parsed(text: str) -> Iterator[Step]:
    """Read steps as they are printed.

    Raises:
        ValueError: there is no such step.
    """
    for word in text.split():
        do, _, pick = word.partition(":")
        if do not in _STEPS:
            raise ValueError(f"unknown step {do!r}. Allowed: {', '.join(_STEPS)}")
        yield Step(do, int(pick or 0))


def main(words: Sequence[str]) -> int:
    """Take walks; return 1 where one failed."""
    parser = argparse.ArgumentParser(prog="tests.contract.walks", description="random walks")
    parser.add_argument("--seed", type=int, default=0, help="the first walk's seed")
    parser.add_argument("--walks", type=int, default=1, help="how many")
    parser.add_argument("--length", type=int, default=LENGTH, help="steps of each")
    parser.add_argument("--steps", help='take these steps instead: "kubelet:3 gateway:1"')
    parser.add_argument("--whole", action="store_true", help="don't shorten what fails")
    parser.add_argument("--most", type=int, default=10, help="stop after so many that failed")
    chosen = parser.parse_args(words)
    failed, began = 0, time.monotonic()

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    for number in range(chosen.walks):
        seed = chosen.seed + number
        steps = steps_of(seed, chosen.length) if chosen.steps is None else list(parsed(chosen.steps))
        if number and number % 50 == 0:
            say(f"{number} walks, {failed} failed, {time.monotonic() - began:.0f} s")
        if broke := walk(seed, steps):
            failed += 1
            if not chosen.whole:
                say(f"seed {seed} fails; looking for fewer steps")
                steps, again = shrunk(seed, steps, say)
                broke = again or f"(not again) {broke}"
            say(f'seed {seed}: --seed {seed} --steps "{" ".join(map(str, steps))}"\n{broke}')
            if failed >= chosen.most:
                break
    say(f"{failed} of {number + 1} walks failed, {time.monotonic() - began:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # Sets are walked through alike each time.
        os.execve(  # noqa: S606 - itself
            sys.executable,
            (sys.executable, "-m", "tests.contract.walks", *sys.argv[1:]),
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    sys.exit(main(sys.argv[1:]))
